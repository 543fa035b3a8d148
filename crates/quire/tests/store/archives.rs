//! Archives: each reads as the file that was packed, or is refused.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use quire::store::{Cause, Operation, PackOptions, Packed, Store, StoreError, ZstdStore, pack};
use rustix::io::Errno;
use xxhash_rust::xxh64::xxh64;

use super::{Folder, PAGE, Random, cannot_run, pattern};

/// Bytes of which half can be packed.
fn text(seed: u64, bytes: usize) -> Vec<u8> {
    let mut random = Random(seed | 1);
    let mut text = Vec::with_capacity(bytes + 64);
    while text.len() < bytes {
        text.extend(format!("{:x} is the {}th; ", random.next(), random.below(100)).bytes());
    }
    text.truncate(bytes);
    text
}

fn packed(folder: &Folder, content: &[u8], frame_bytes: usize) -> PathBuf {
    let input = folder.file("content", content);
    let output = folder.path("content.zst");
    let options = PackOptions::new().frame_bytes(frame_bytes).replace();
    pack(input, &output, &options, |_| {}).unwrap();
    output
}

/// All of an archive, by pages.
fn read_all(store: &ZstdStore) -> Result<Vec<u8>, StoreError> {
    let mut content = vec![0xa5; store.len()? as usize];
    for (page, bytes) in content.chunks_mut(PAGE).enumerate() {
        store.read((page * PAGE) as u64, bytes)?;
    }
    Ok(content)
}

/// Whether the `zstd` command line tool is there.
fn has_tool() -> bool {
    let has_tool = Command::new("zstd").arg("--version").output().is_ok();
    if !has_tool {
        cannot_run("no zstd command line tool");
    }
    has_tool
}

/// What `zstd` makes of `input`, given to it as a stream.
fn zstd(options: &[&str], input: &[u8]) -> Vec<u8> {
    let mut zstd = Command::new("zstd");
    zstd.args(["-q", "-c"]).args(options).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut zstd = zstd.spawn().unwrap();
    let mut stdin = zstd.stdin.take().unwrap();
    thread::scope(|scope| {
        scope.spawn(move || stdin.write_all(input).unwrap());
        let output = zstd.wait_with_output().unwrap();
        assert!(output.status.success());
        output.stdout
    })
}

/// The same of a file, whose size it can tell.
fn zstd_of_file(path: &Path) -> Vec<u8> {
    let output = Command::new("zstd").args(["-q", "-c"]).arg(path).output().unwrap();
    assert!(output.status.success());
    output.stdout
}

#[test]
fn an_archive_reads_as_the_file_that_was_packed() {
    let folder = Folder::on_disk();
    for bytes in [0, 1, 4095, 4096, 4097, 3 << 20, (1 << 20) + 77] {
        for frame_bytes in [PAGE, 16 * PAGE, 1 << 20] {
            let content = if bytes % 2 == 0 { text(7, bytes) } else { pattern(7, bytes) };
            let path = packed(&folder, &content, frame_bytes);
            let store = ZstdStore::open(&path).unwrap();
            assert_eq!(store.len().unwrap(), bytes as u64);
            assert_eq!(store.frame_count(), bytes.div_ceil(frame_bytes));
            assert!(store.is_read_only());
            let mut random = Random(bytes as u64 + 1);
            for _ in 0..50 {
                let at = random.below(bytes + 2 * PAGE);
                let mut buffer = vec![0xa5; random.below(5 * PAGE)];
                let mut expected = content.get(at..).unwrap_or_default().to_vec();
                expected.resize(buffer.len(), 0);
                store.read(at as u64, &mut buffer).unwrap();
                assert!(buffer == expected, "{bytes} {frame_bytes} {at}");
            }
        }
    }
}

#[test]
fn packing_tells_its_progress_and_leaves_a_whole_archive_or_none() {
    let folder = Folder::on_disk();
    let content = text(1, 300_000);
    let input = folder.file("content", &content);
    let output = folder.path("content.zst");
    let options = PackOptions::new().frame_bytes(16 * PAGE);
    let mut told = Vec::new();
    let Packed { bytes, packed_bytes, frames } =
        pack(&input, &output, &options, |bytes| told.push(bytes)).unwrap();
    assert_eq!((bytes, frames), (300_000, 5));
    assert_eq!(packed_bytes, fs::metadata(&output).unwrap().len());
    assert!(packed_bytes < 200_000);
    assert!(told.is_sorted() && told.last() == Some(&300_000));
    let error = pack(&input, &output, &options, |_| {}).unwrap_err();
    assert_eq!((error.errno(), error.operation()), (Errno::EXIST, Operation::Pack));
    assert!(error.store().ends_with("content.zst"), "{error}");
    pack(&input, &output, &options.clone().level(9).replace(), |_| {}).unwrap();
    for options in [
        PackOptions::new().frame_bytes(0),
        PackOptions::new().frame_bytes(PAGE + 1),
        PackOptions::new().frame_bytes(128 << 20),
        PackOptions::new().level(99),
    ] {
        let error = pack(&input, folder.path("other"), &options, |_| {}).unwrap_err();
        assert!(matches!(error.cause(), Cause::Unsupported(_)), "{error}");
    }
    // A folder opens as a file, and fails when it is read: the archive is begun by then.
    let error = pack(&folder.0, folder.path("other"), &options, |_| {}).unwrap_err();
    assert_eq!(error.errno(), Errno::ISDIR);
    let mut names = folder.names();
    names.sort();
    assert_eq!(names, ["content", "content.zst"]);
}

#[test]
fn the_zstd_tool_unpacks_what_we_pack_and_we_map_what_it_packs() {
    if !has_tool() {
        return;
    }
    let folder = Folder::on_disk();
    let content = text(3, 1_000_000);
    let path = packed(&folder, &content, 32 * PAGE);
    assert!(zstd(&["-d"], &fs::read(path).unwrap()) == content);
    // One frame, then several of one size, then of many sizes.
    for sizes in [vec![1_000_000], vec![100_000; 10], vec![1, 400_000, 255, 256, 300_000, 299_488]]
    {
        let mut archive = Vec::new();
        let mut rest = &content[..];
        for size in sizes {
            let (part, later) = rest.split_at(size);
            archive.extend(zstd_of_file(&folder.file("part", part)));
            rest = later;
        }
        let store = ZstdStore::open(folder.file("parts.zst", &archive)).unwrap();
        assert!(read_all(&store).unwrap() == content);
    }
}

#[test]
fn a_frame_that_is_too_large_or_of_unknown_size_is_refused_with_what_to_do() {
    if !has_tool() {
        return;
    }
    let folder = Folder::on_disk();
    let large = folder.path("large");
    fs::File::create(&large).unwrap().set_len(65 << 20).unwrap();
    let archives = [
        folder.file("large.zst", &zstd_of_file(&large)),
        folder.file("s.zst", &zstd(&[], b"hello")),
    ];
    for path in archives {
        let error = ZstdStore::open(path).err().unwrap();
        assert!(matches!(error.cause(), Cause::Unsupported(_)), "{error}");
        assert!(error.to_string().contains("pack it with `quire pack`"), "{error}");
        assert_eq!(error.operation(), Operation::Open);
    }
}

#[test]
fn every_frame_is_unpacked_once_though_several_threads_want_it() {
    let folder = Folder::on_disk();
    let content = text(5, 2 << 20);
    let path = packed(&folder, &content, 64 * PAGE);
    let store = ZstdStore::open(&path).unwrap();
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| assert!(read_all(&store).unwrap() == content));
        }
    });
    assert_eq!((store.frame_count(), store.unpacked_count()), (8, 8));
    // Page by page, too.
    let store = ZstdStore::open(&path).unwrap();
    let mut buffers = vec![vec![0; PAGE]; 512];
    for (buffer, page) in buffers.iter_mut().zip(0..) {
        store.read(page * PAGE as u64, buffer).unwrap();
    }
    assert!(buffers.concat() == content);
    assert_eq!(store.unpacked_count(), 8);
}

#[test]
fn no_more_is_kept_than_was_allowed_and_what_is_kept_is_what_was_used_last() {
    let folder = Folder::on_disk();
    let content = text(6, 64 * PAGE);
    let path = packed(&folder, &content, 4 * PAGE);
    let store = ZstdStore::with_cache(&path, 8 * PAGE).unwrap();
    assert!(read_all(&store).unwrap() == content);
    assert_eq!((store.unpacked_count(), store.kept_bytes()), (16, 8 * PAGE));
    let mut unpacked = |frame: usize| {
        let before = store.unpacked_count();
        store.read((frame * 4 * PAGE) as u64, &mut [0; PAGE]).unwrap();
        store.unpacked_count() - before
    };
    assert_eq!([14, 15, 14, 3, 14, 15].map(&mut unpacked), [0, 0, 0, 1, 0, 1]);
    // One frame is kept whatever was allowed, or every page would unpack it again.
    let store = ZstdStore::with_cache(&path, 0).unwrap();
    assert!(read_all(&store).unwrap() == content);
    assert_eq!((store.unpacked_count(), store.kept_bytes()), (16, 4 * PAGE));
}

/// Opens and reads an archive that was tampered with: an error, or the right bytes.
fn assert_right_or_refused(path: &Path, content: &[u8], how: &str) -> bool {
    let whole = ZstdStore::open(path).and_then(|store| {
        // Page by page: one that fails says nothing of the next.
        assert_eq!(store.len().unwrap(), content.len() as u64, "{how}");
        let mut result = Ok(());
        for (page, expected) in content.chunks(PAGE).enumerate() {
            let mut bytes = vec![0; expected.len()];
            match store.read((page * PAGE) as u64, &mut bytes) {
                Ok(()) => assert!(bytes == expected, "{how}: page {page} has wrong bytes"),
                Err(error) => result = Err(error),
            }
        }
        result
    });
    let Err(error) = whole else { return true };
    assert!(matches!(error.cause(), Cause::Corrupt(_) | Cause::Unsupported(_)), "{how}: {error}");
    assert_eq!(error.store(), path.to_string_lossy());
    false
}

/// The seek table that another tool could have written behind `frames`: sizes packed, and content.
fn table_with_checksums(frames: &[(usize, &[u8])]) -> Vec<u8> {
    let mut table = 0x184D_2A5E_u32.to_le_bytes().to_vec();
    table.extend((frames.len() as u32 * 12 + 9).to_le_bytes());
    for (packed_bytes, content) in frames {
        table.extend((*packed_bytes as u32).to_le_bytes());
        table.extend((content.len() as u32).to_le_bytes());
        table.extend((xxh64(content, 0) as u32).to_le_bytes());
    }
    table.extend((frames.len() as u32).to_le_bytes());
    table.push(0x80);
    table.extend(0x8F92_EAB1_u32.to_le_bytes());
    table
}

/// Small archives of every kind: named, with their contents.
fn small_archives(folder: &Folder) -> Vec<(&'static str, Vec<u8>, Vec<u8>)> {
    let frame = |content: &[u8]| {
        let archive = fs::read(packed(folder, content, 16 * PAGE)).unwrap();
        // Behind the frame: a table of one entry.
        archive[..archive.len() - 25].to_vec()
    };
    let content = "the same again; ".repeat(1000).as_bytes()[..3 * PAGE + 100].to_vec();
    let table = fs::read(packed(folder, &content, PAGE)).unwrap();
    let (one, other) = content.split_at(5000);
    let (first, second) = (frame(one), frame(other));
    let headers = [&first[..], &second].concat();
    let sizes = [(first.len(), one), (second.len(), other)];
    let checksums = [&headers[..], &table_with_checksums(&sizes)].concat();
    let noise = pattern(9, 500);
    let raw = fs::read(packed(folder, &noise, PAGE)).unwrap();
    vec![
        ("with a table", table, content.clone()),
        ("with headers only", headers, content.clone()),
        ("with checksums in the table", checksums, content),
        ("that could not be packed", raw, noise),
    ]
}

#[test]
fn every_byte_of_an_archive_flipped_is_an_error_or_the_right_bytes() {
    let folder = Folder::in_memory();
    for (kind, archive, content) in small_archives(&folder) {
        let path = folder.path("flipped.zst");
        let mut refused = 0;
        for at in 0..archive.len() {
            for flip in [0x01, 0x0f, 0x10, 0x80, 0xff] {
                let mut flipped = archive.clone();
                flipped[at] ^= flip;
                fs::write(&path, flipped).unwrap();
                let how = format!("{kind}: byte {at} of {} ^ {flip:#x}", archive.len());
                refused += usize::from(!assert_right_or_refused(&path, &content, &how));
            }
        }
        // Few bytes mean nothing: the low bits of a skippable frame's magic number, for one.
        assert!(refused >= archive.len() * 5 - 50, "{kind}: {refused}");
    }
}

#[test]
fn an_archive_cut_anywhere_is_an_error_or_shorter_by_whole_frames_at_most() {
    let folder = Folder::in_memory();
    for (kind, archive, content) in small_archives(&folder) {
        let path = folder.path("cut.zst");
        for length in 0..archive.len() {
            fs::write(&path, &archive[..length]).unwrap();
            // Without its table an archive is a row of frames, and one with fewer is an archive.
            let Ok(store) = ZstdStore::open(&path) else { continue };
            let bytes = store.len().unwrap() as usize;
            assert!(read_all(&store).unwrap() == content[..bytes], "{kind} cut at {length}");
            assert!(
                bytes < content.len() || length > archive.len() - 100,
                "{kind} cut at {length}"
            );
        }
        // Cut while it is open: what is gone is an error.
        fs::write(&path, &archive).unwrap();
        let store = ZstdStore::with_cache(&path, 0).unwrap();
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(10).unwrap();
        let error = read_all(&store).unwrap_err();
        assert!(error.to_string().contains("the archive ends inside a frame"), "{kind}: {error}");
    }
}

#[test]
fn a_checksum_in_the_seek_table_is_verified() {
    let folder = Folder::on_disk();
    let (_, mut archive, content) = small_archives(&folder).swap_remove(2);
    let path = folder.file("checksums.zst", &archive);
    assert!(assert_right_or_refused(&path, &content, "unharmed"));
    // The last frame's checksum: nothing else is wrong.
    let at = archive.len() - 9 - 4;
    archive[at] ^= 1;
    let store = ZstdStore::open(folder.file("checksums.zst", &archive)).unwrap();
    store.read(0, &mut [0; PAGE]).unwrap();
    let error = store.read(2 * PAGE as u64, &mut [0; PAGE]).unwrap_err();
    assert!(error.to_string().contains("checksum"), "{error}");
    assert_eq!(error.errno(), Errno::BADMSG);
    assert!(error.offset() > 0, "it says where in the archive");
}

#[test]
fn what_is_no_archive_is_refused() {
    let folder = Folder::on_disk();
    for content in [&b"x"[..], b"text that was not packed", &[0; 5000], &pattern(1, 9999)] {
        let error = ZstdStore::open(folder.file("f.zst", content)).err().unwrap();
        assert!(matches!(error.cause(), Cause::Corrupt(_)), "{error}");
    }
    let error = ZstdStore::open(folder.path("missing")).err().unwrap();
    assert_eq!(error.errno(), Errno::NOENT);
    let store = ZstdStore::open(folder.file("empty.zst", b"")).unwrap();
    assert_eq!(store.len().unwrap(), 0);
    assert_eq!(store.write(0, b"x").unwrap_err().cause(), &Cause::ReadOnly);
    assert_eq!(store.set_len(1).unwrap_err().cause(), &Cause::ReadOnly);
}
