//! A line of text in the making, without an allocator.

/// A message or a path. What does not fit is cut off.
pub struct Line {
    bytes: [u8; 200],
    len: usize,
}

impl Line {
    /// Empty.
    #[must_use]
    pub const fn new() -> Line {
        Line { bytes: [0; 200], len: 0 }
    }

    /// What was written.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl Default for Line {
    fn default() -> Line {
        Line::new()
    }
}

impl core::fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        let room = &mut self.bytes[self.len..];
        let taken = text.len().min(room.len());
        room[..taken].copy_from_slice(&text.as_bytes()[..taken]);
        self.len += taken;
        Ok(())
    }
}
