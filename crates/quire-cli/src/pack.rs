//! `quire pack`: makes an archive that can be mapped like the file it was made of.

use std::fs;

use anyhow::{Context as _, Result, bail};
use quire::store::{self, PackOptions, Packed};
use rustix::io::Errno;

use crate::cli::PackArgs;
use crate::print::say;
use crate::print::status::StatusLine;
use crate::size::{Human, Size};

pub(crate) fn pack(arguments: &PackArgs) -> Result<u8> {
    let Size::Bytes(frame_bytes) = arguments.frame_size else {
        bail!("--frame-size takes a number of bytes, such as 1M, and no percentage");
    };
    let frame_bytes = usize::try_from(frame_bytes).context("--frame-size is too large")?;
    let mut options = PackOptions::new().frame_bytes(frame_bytes).level(arguments.level);
    if arguments.force {
        options = options.replace();
    }
    // Bytes of the file, as far as it tells; 0 for a pipe.
    let total_bytes = fs::metadata(&arguments.input).map_or(0, |metadata| metadata.len());
    let mut status = StatusLine::new(!arguments.quiet);
    let packed = store::pack(&arguments.input, &arguments.output, &options, |bytes| {
        status.show(|| progress_line(bytes, total_bytes));
    });
    status.clear();
    let packed = packed.map_err(|error| match error.errno() {
        Errno::EXIST => anyhow::Error::new(error).context("pass --force to replace the archive"),
        _ => error.into(),
    })?;
    if !arguments.quiet {
        say(&summary(&packed));
    }
    Ok(0)
}

fn summary(packed: &Packed) -> String {
    let Packed { bytes, packed_bytes, frames } = *packed;
    let share = packed_bytes as f64 * 100.0 / bytes.max(1) as f64;
    let frames = if frames == 1 { "1 frame".into() } else { format!("{frames} frames") };
    format!("packed {} into {} ({share:.1}%), {frames}", Human(bytes), Human(packed_bytes))
}

fn progress_line(bytes: u64, total_bytes: u64) -> String {
    // There is no percentage of a pipe, or of a file that grows.
    match (u128::from(bytes) * 100).checked_div(total_bytes.into()) {
        Some(percent) if percent <= 100 => {
            format!("quire: packing: {percent}% of {}", Human(total_bytes))
        }
        _ => format!("quire: packing: {}", Human(bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_a_share_where_there_is_a_whole() {
        for (bytes, total_bytes, line) in [
            (0, 4 << 20, "quire: packing: 0% of 4 MiB"),
            (3 << 20, 4 << 20, "quire: packing: 75% of 4 MiB"),
            (4 << 20, 4 << 20, "quire: packing: 100% of 4 MiB"),
            (5 << 20, 4 << 20, "quire: packing: 5 MiB"),
            (5 << 20, 0, "quire: packing: 5 MiB"),
            (u64::MAX, u64::MAX, "quire: packing: 100% of 16384 PiB"),
        ] {
            assert_eq!(progress_line(bytes, total_bytes), line);
        }
    }

    #[test]
    fn the_summary_says_what_was_gained() {
        let packed = Packed { bytes: 4 << 20, packed_bytes: 1 << 20, frames: 4 };
        assert_eq!(summary(&packed), "packed 4 MiB into 1 MiB (25.0%), 4 frames");
        let packed = Packed { bytes: 0, packed_bytes: 17, frames: 0 };
        assert_eq!(summary(&packed), "packed 0 B into 17 B (1700.0%), 0 frames");
    }
}
