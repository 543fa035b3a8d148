//! What leaves the machine: encrypted and authenticated, by a key that stays in the supervisor.
//!
//! A segment is sealed in chunks, so that a part of it can be read. What the seal binds together is the chunk, its
//! number, and the number of the copy: each copy of a segment has one of its own, so that an older one, or another's,
//! is refused as a changed one is.

use anyhow::{Context as _, Result};
use chacha20poly1305::aead::{AeadInOut as _, KeyInit as _};
use chacha20poly1305::{ChaCha20Poly1305, Tag};
use quire::control::place::{CHUNK_BYTES, CHUNKS};

const TAG_BYTES: usize = 16;
/// Bytes of a sealed chunk.
const SEALED_BYTES: usize = CHUNK_BYTES + TAG_BYTES;

pub(super) struct Seal(ChaCha20Poly1305);

impl Seal {
    /// By a new key.
    pub(super) fn new() -> Result<Seal> {
        let mut key = [0; 32];
        rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty())
            .context("the kernel gives no random key")?;
        Ok(Seal(ChaCha20Poly1305::new(&key.into())))
    }

    /// Seals a whole segment as copy `copy`, which no other copy of the run is.
    pub(super) fn seal(&self, copy: u64, segment: &[u8]) -> Result<Vec<u8>> {
        let mut sealed = Vec::with_capacity(CHUNKS * SEALED_BYTES);
        for (number, chunk) in segment.chunks(CHUNK_BYTES).enumerate() {
            let start = sealed.len();
            sealed.extend_from_slice(chunk);
            let tag = self
                .0
                .encrypt_inout_detached(
                    &nonce(copy, number).into(),
                    &[],
                    (&mut sealed[start..]).into(),
                )
                .map_err(|_| anyhow::anyhow!("a chunk cannot be sealed"))?;
            sealed.extend_from_slice(&tag);
        }
        Ok(sealed)
    }

    /// Opens chunks of copy `copy` from the `first` on, into `into`. Returns those that are what was sealed, a bit each
    /// by their numbers; of the others nothing is to be used.
    pub(super) fn open(&self, copy: u64, first: usize, sealed: &[u8], into: &mut [u8]) -> u8 {
        let chunks = sealed.chunks_exact(SEALED_BYTES).zip(into.chunks_exact_mut(CHUNK_BYTES));
        let mut opened = 0;
        for (number, (sealed, out)) in (first..).zip(chunks) {
            let (bytes, tag) = sealed.split_at(CHUNK_BYTES);
            out.copy_from_slice(bytes);
            let nonce = nonce(copy, number).into();
            let is_right = Tag::try_from(tag).is_ok_and(|tag| {
                self.0.decrypt_inout_detached(&nonce, &[], out.into(), &tag).is_ok()
            });
            opened |= u8::from(is_right) << number;
        }
        opened
    }
}

/// Where chunks lie in a sealed segment.
pub(super) fn sealed_range(first: usize, count: usize) -> (usize, usize) {
    (first * SEALED_BYTES, count * SEALED_BYTES)
}

fn nonce(copy: u64, chunk: usize) -> [u8; 12] {
    let mut nonce = [0; 12];
    nonce[..8].copy_from_slice(&copy.to_le_bytes());
    nonce[8] = chunk as u8;
    nonce
}

#[cfg(test)]
mod tests {
    use super::*;
    use quire::control::SEGMENT_BYTES;

    #[test]
    fn what_was_changed_moved_or_is_old_does_not_open() {
        let seal = Seal::new().unwrap();
        let segment: Vec<u8> = (0..SEGMENT_BYTES).map(|at| (at / 7) as u8).collect();
        let sealed = seal.seal(5, &segment).unwrap();
        assert!(!sealed.windows(64).any(|part| part == &segment[1000..1064]), "it is encrypted");
        let open = |copy, first: usize, bytes: &[u8]| {
            let mut out = vec![0; CHUNK_BYTES];
            (seal.open(copy, first, bytes, &mut out) == 1 << first).then_some(out)
        };
        let (start, length) = sealed_range(2, 1);
        let third = &sealed[start..start + length];
        let bytes = open(5, 2, third).expect("as it was sealed");
        assert!(bytes == segment[2 * CHUNK_BYTES..3 * CHUNK_BYTES]);
        assert!(open(5, 1, third).is_none(), "another chunk's");
        assert!(open(4, 2, third).is_none(), "an older copy");
        assert!(open(5, 2, &third[1..]).is_none(), "shorter");
        for at in [0, CHUNK_BYTES / 2, length - 1] {
            let mut changed = third.to_vec();
            changed[at] ^= 1;
            assert!(open(5, 2, &changed).is_none(), "changed at {at}");
        }
        assert_eq!(Seal::new().unwrap().open(5, 2, third, &mut vec![0; CHUNK_BYTES]), 0);
        let mut several = sealed;
        several[start + 7] ^= 1;
        let mut out = vec![0; SEGMENT_BYTES];
        assert_eq!(
            seal.open(5, 0, &several, &mut out),
            0b1111_1011,
            "the others are none the worse"
        );
        assert!(out[3 * CHUNK_BYTES..] == segment[3 * CHUNK_BYTES..]);
    }
}
