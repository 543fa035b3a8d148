//! Faults that wait for a frame: left unanswered until reclaim has one.

use rustix_futex_sync::Mutex;

use crate::units::PageNum;

const STARVED_MAX: usize = 64;

struct List {
    pages: [PageNum; STARVED_MAX],
    len: usize,
}

/// The pages whose faults wait for a frame.
pub struct Starved {
    list: Mutex<List>,
}

impl Default for Starved {
    fn default() -> Starved {
        Starved::new()
    }
}

impl Starved {
    /// Nobody waits.
    #[must_use]
    pub const fn new() -> Starved {
        Starved { list: Mutex::new(List { pages: [PageNum(0); STARVED_MAX], len: 0 }) }
    }

    /// Adds a page; `false` where the list is full (the fault is tried again at once then).
    pub fn push(&self, page: PageNum) -> bool {
        let mut list = self.list.lock();
        let len = list.len;
        if len == STARVED_MAX {
            return false;
        }
        list.pages[len] = page;
        list.len += 1;
        true
    }

    /// Whether somebody waits.
    pub fn is_empty(&self) -> bool {
        self.list.lock().len == 0
    }

    /// Takes all, and answers each.
    pub fn answer_all(&self, mut answer: impl FnMut(PageNum)) {
        let (pages, len) = {
            let mut list = self.list.lock();
            (list.pages, core::mem::take(&mut list.len))
        };
        pages[..len].iter().copied().for_each(&mut answer);
    }
}
