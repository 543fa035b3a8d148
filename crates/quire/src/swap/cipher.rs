//! A swap file that nobody can read: what is written to it is encrypted (`--swap-encrypt`).
//!
//! The key is made for the run and lies in the control page, which the supervisor keeps from the kernel's swap and
//! which no core dump has. The cipher is ChaCha20, as a stream that can be entered at each granule: a read of a
//! few pages decrypts those alone. No part of a stream is used twice: it goes by the segment's number and by how
//! often that was written. That a blob is what was written is told by its hash, as without encryption; it keeps
//! bytes secret, and is no seal against someone who changes them.

#![deny(unsafe_code)]

use core::sync::atomic::Ordering::Relaxed;

use chacha20::ChaCha20;
use chacha20::cipher::{KeyIvInit as _, StreamCipher as _, StreamCipherSeek as _};

use super::file::Segment;
use crate::control::{Control, SEGMENT_BYTES};

#[derive(Clone, Copy)]
pub struct SwapCipher {
    control: &'static Control,
}

impl SwapCipher {
    /// That of a run, if its swap file is encrypted.
    pub fn of(control: &'static Control) -> Option<SwapCipher> {
        (control.is_swap_encrypted.load(Relaxed) != 0).then_some(SwapCipher { control })
    }

    /// A segment is about to be written: its bytes get a stream of their own.
    pub(super) fn begin(self, segment: Segment) {
        // Relaxed: who reads the segment has its location from a word that was written after this.
        self.control.segment_lives[segment.number() as usize].fetch_add(1, Relaxed);
    }

    /// Encrypts or decrypts what lies at an offset of the file, within one segment.
    pub(super) fn apply(self, offset: u64, bytes: &mut [u8]) {
        let segment = (offset / SEGMENT_BYTES as u64) as u32;
        let lives = self.control.segment_lives[segment as usize].load(Relaxed);
        let (mut key, mut nonce) = ([0; 32], [0; 12]);
        for (place, word) in key.as_chunks_mut().0.iter_mut().zip(&self.control.swap_key) {
            *place = word.load(Relaxed).to_ne_bytes();
        }
        nonce[..4].copy_from_slice(&segment.to_ne_bytes());
        nonce[4..8].copy_from_slice(&lives.to_ne_bytes());
        let mut cipher = ChaCha20::new(&key.into(), &nonce.into());
        cipher.seek(offset % SEGMENT_BYTES as u64);
        cipher.apply_keystream(bytes);
    }
}
