//! Lists of faults that are left unanswered until what they wait for has come: a frame, room in a
//! queue, the end of a change of the layout.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::sys::mutex::Mutex;
use crate::sys::rank;
use crate::units::PageNum;

const LISTED_MAX: usize = 64;

struct ListedPages {
    pages: [PageNum; LISTED_MAX],
    len: usize,
    /// More wait than the list has room for.
    is_overfull: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Answer {
    Page(PageNum),
    /// All faults: more have waited than could be listed.
    All,
}

/// The pages whose faults wait for one thing, and the threads that sleep until it has come.
pub(crate) struct FaultList {
    list: Mutex<rank::FaultList, ListedPages>,
    /// Threads that sleep, or are about to.
    sleepers: AtomicU32,
    /// Counts answers; what sleepers sleep on.
    answers: AtomicU64,
}

impl FaultList {
    #[must_use]
    pub const fn new() -> FaultList {
        let list = ListedPages { pages: [PageNum(0); LISTED_MAX], len: 0, is_overfull: false };
        FaultList {
            list: Mutex::new(list),
            sleepers: AtomicU32::new(0),
            answers: AtomicU64::new(0),
        }
    }

    /// In a fork's child, before any other thread runs there: nothing waits. A thread of the parent
    /// may have held the lock at that moment.
    pub fn after_fork_in_child(&self) {
        if self.list.is_locked() {
            // SAFETY: the thread that held it does not exist in this process.
            unsafe { self.list.force_unlock() };
        }
        self.sleepers.store(0, Ordering::SeqCst);
        self.answer_all(|_| {});
    }

    pub fn push(&self, page: PageNum) {
        let mut list = self.list.lock();
        let len = list.len;
        if list.pages[..len].contains(&page) {
            return;
        }
        if len == LISTED_MAX {
            list.is_overfull = true;
            return;
        }
        list.pages[len] = page;
        list.len += 1;
    }

    /// Adds what another list had.
    pub fn push_answer(&self, answer: Answer) {
        match answer {
            Answer::Page(page) => self.push(page),
            Answer::All => {
                let mut list = self.list.lock();
                // An empty list is not looked at.
                list.len = list.len.max(1);
                list.is_overfull = true;
            }
        }
    }

    pub fn is_empty(&self) -> bool {
        self.sleepers.load(Ordering::SeqCst) == 0 && self.list.lock().len == 0
    }

    /// Takes all, and answers each.
    pub fn answer_all(&self, mut answer: impl FnMut(Answer)) {
        let (pages, len, is_overfull) = {
            let mut list = self.list.lock();
            let len = core::mem::take(&mut list.len);
            (list.pages, len, core::mem::take(&mut list.is_overfull))
        };
        if is_overfull {
            answer(Answer::All);
        } else {
            pages[..len].iter().for_each(|&page| answer(Answer::Page(page)));
        }
    }

    /// Sleeps, as a thread that may, until the next [`Self::wake_sleepers`]. `call` sees to it that
    /// there will be one; `is_over` says that it need not sleep; `sleep` sleeps while the word is
    /// what it is given.
    pub fn sleep(
        &self,
        call: impl FnOnce(),
        is_over: impl FnOnce() -> bool,
        sleep: impl FnOnce(&AtomicU64, u64),
    ) {
        // SeqCst, as in `wake_sleepers`: either the waker sees a sleeper, or the sleeper sees what
        // the waker has given before.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let seen = self.answers.load(Ordering::SeqCst);
        call();
        if !is_over() {
            sleep(&self.answers, seen);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes those that sleep; `wake` wakes the threads that sleep on the word.
    pub fn wake_sleepers(&self, wake: impl FnOnce(&AtomicU64)) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.answers.fetch_add(1, Ordering::SeqCst);
            wake(&self.answers);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    fn answers(faults: &FaultList) -> Vec<Answer> {
        let mut all = Vec::new();
        faults.answer_all(|answer| all.push(answer));
        all
    }

    #[test]
    fn each_page_is_answered_once() {
        let faults = FaultList::new();
        for page in [3, 5, 3] {
            faults.push(PageNum(page));
        }
        assert!(!faults.is_empty());
        assert_eq!(answers(&faults), [Answer::Page(PageNum(3)), Answer::Page(PageNum(5))]);
        assert!(faults.is_empty());
    }

    #[test]
    fn no_fault_is_forgotten_where_more_wait_than_can_be_listed() {
        let faults = FaultList::new();
        for page in 0..=LISTED_MAX as u64 {
            faults.push(PageNum(page));
        }
        assert_eq!(answers(&faults), [Answer::All]);
        assert!(faults.is_empty());
        faults.push(PageNum(1));
        assert_eq!(answers(&faults), [Answer::Page(PageNum(1))]);
    }

    #[test]
    fn a_sleeper_counts_as_one_that_waits_and_is_woken() {
        let faults = FaultList::new();
        let woken = || {
            let mut is_woken = false;
            faults.wake_sleepers(|_| is_woken = true);
            is_woken
        };
        assert!(!woken());
        let call = || assert!(!faults.is_empty());
        faults.sleep(
            call,
            || false,
            |word, seen| {
                assert!(woken());
                assert_ne!(word.load(Ordering::Relaxed), seen);
            },
        );
        assert!(faults.is_empty());
        faults.sleep(|| {}, || true, |_, _| panic!("there is nothing to wait for"));
    }
}
