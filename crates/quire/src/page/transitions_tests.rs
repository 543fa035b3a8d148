use super::super::PageWord;
use super::super::word::Word;
use super::*;
use crate::page::LockedRange;
use crate::units::{BLOCK_PAGES, PageNum, PageRange};

/// Words by number; nobody waits for them.
struct Words(std::vec::Vec<PageWord>);

impl Words {
    fn new() -> Words {
        Words((0..BLOCK_PAGES).map(|_| PageWord(Word::new(0))).collect())
    }

    fn lock(&self, page: u64) -> LockedPage<'_, Words> {
        let content = self.0[page as usize].try_lock().expect("free");
        LockedPage::adopt(self, PageNum(page), content)
    }

    fn has(&self, page: u64, content: Snapshot) -> bool {
        self.0[page as usize].load() == content
    }

    fn locked(&self) -> std::vec::Vec<usize> {
        (0..BLOCK_PAGES).filter(|&page| self.0[page].load().is_locked()).collect()
    }
}

impl PageLocks for Words {
    fn word(&self, page: PageNum) -> &PageWord {
        &self.0[page.index()]
    }

    fn unlock_unchanged(&self, page: PageNum) {
        self.0[page.index()].release();
    }

    fn unlock_changed(&self, page: PageNum, content: Snapshot) {
        self.0[page.index()].release_with(content);
    }
}

/// Makes page 0 what `stored` says, by legal ways.
fn store_first(words: &Words, stored: Stored) {
    words.lock(0).drop_content();
    words.lock(0).map(Flags::EMPTY);
    words.lock(0).store(stored);
}

#[test]
fn a_clean_page_goes_back_to_where_it_came_from() {
    let words = Words::new();
    for stored in [Stored::Nothing, Stored::Same(9), Stored::Pool(9), Stored::File(9)] {
        store_first(&words, stored);
        words.lock(0).map_clean(Flags::ACCESSED);
        let mapped = words.0[0].load();
        assert_eq!((mapped.state(), mapped.stored()), (State::Mapped, Some(stored)));
        assert!(mapped.has(Flags::CLEAN.or(Flags::ACCESSED)));
        words.lock(0).store(stored);
        assert!(words.has(0, stored.content()));
    }
}

#[test]
fn a_clean_page_that_is_written_keeps_nothing() {
    let words = Words::new();
    for stored in [Stored::Nothing, Stored::Same(9), Stored::Pool(9), Stored::File(9)] {
        store_first(&words, stored);
        words.lock(0).map_clean(Flags::WRITE_PROTECTED);
        words.lock(0).write();
        let written = Snapshot::new(State::Mapped, 0).with(Flags::DIRTY).with(Flags::ACCESSED);
        assert!(words.has(0, written));
    }
}

#[test]
fn a_cached_page_goes_back_to_what_it_keeps_unless_it_was_written() {
    let words = Words::new();
    for stored in [Stored::Nothing, Stored::Same(9), Stored::Pool(9), Stored::File(9)] {
        store_first(&words, stored);
        let mut page = words.lock(0);
        page.cache_clean();
        let kept = Some(stored).filter(|&stored| stored != Stored::Nothing);
        assert_eq!((page.state(), page.content().stored()), (State::Cached, kept));
        page.uncache();
        assert!(words.has(0, stored.content()));
        let mut page = words.lock(0);
        page.cache_clean();
        page.dirty();
        assert_eq!(page.content().stored(), None);
        page.keep_stored(Stored::Pool(7));
        page.rename_locked(8);
        page.uncache();
        assert!(words.has(0, Stored::Pool(8).content()));
    }
}

#[test]
fn a_page_whose_memory_fails_keeps_what_it_has_in_swap_and_nothing_else() {
    let words = Words::new();
    for stored in [Stored::Nothing, Stored::Same(9), Stored::Pool(9), Stored::File(9)] {
        for is_cached in [false, true] {
            store_first(&words, stored);
            let mut page = words.lock(0);
            if is_cached {
                page.cache_clean();
            }
            page.fail();
            let page = words.lock(0);
            assert_eq!((page.state(), page.in_swap()), (State::Poisoned, None));
            page.uncache();
            assert!(words.has(0, stored.content()));
        }
    }
    // Of an object with a store the payload is a sync's number.
    let mut page = words.lock(1);
    page.cache();
    page.note_written(3);
    page.set_flags(Flags::WRITEBACK.or(Flags::ACCESSED));
    words.lock(1).fail();
    assert!(words.has(1, Snapshot::new(State::Poisoned, 0).with(Flags::WRITEBACK)));
}

#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "cannot go from")]
fn what_is_kept_in_swap_is_let_go_before_a_page_is_dirty() {
    let words = Words::new();
    store_first(&words, Stored::Pool(4));
    let mut page = words.lock(0);
    page.cache_clean();
    page.set_flags(Flags::DIRTY);
}

#[test]
fn what_is_tracked_stays_tracked_on_the_way_out() {
    let words = Words::new();
    words.lock(0).map(Flags::ACCESSED);
    words.lock(0).track_writes();
    words.lock(0).into_limbo(FrameId(3), Flags::EMPTY);
    words.lock(0).store(Stored::Pool(4));
    words.lock(0).set_flags(Flags::WRITEBACK);
    words.lock(0).store(Stored::File(5));
    assert!(words.has(0, Snapshot::new(State::File, 5).with(Flags::WRITE_PROTECTED)));
}

#[test]
fn a_page_that_has_moved_leaves_nothing_behind() {
    let words = Words::new();
    store_first(&words, Stored::Pool(4));
    words.lock(0).set_flags(Flags::WRITEBACK);
    words.lock(0).move_to(words.lock(1));
    assert!(words.has(0, Stored::Nothing.content()));
    assert!(words.has(1, Stored::Pool(4).content()), "the write that was under way is of page 0");
}

#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "cannot go from")]
fn a_packed_page_cannot_enter_limbo() {
    let words = Words::new();
    store_first(&words, Stored::Pool(4));
    words.lock(0).into_limbo(FrameId(3), Flags::EMPTY);
}

#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "cannot go from")]
fn a_page_in_the_swap_file_cannot_be_locked_in_memory() {
    let words = Words::new();
    store_first(&words, Stored::File(4));
    words.lock(0).set_flags(Flags::MLOCKED);
}

#[test]
fn a_guard_that_is_dropped_unlocks_and_one_that_is_left_does_not() {
    let words = Words::new();
    words.lock(7).unlock();
    assert!(words.locked().is_empty());
    let page = words.lock(7).leave_locked();
    assert_eq!(words.locked(), [7]);
    LockedPage::adopt(&words, page, words.0[7].load()).map(Flags::EMPTY);
    assert!(words.has(7, Snapshot::new(State::Mapped, 0)));
}

#[test]
fn a_range_unlocks_what_it_still_has() {
    let words = Words::new();
    let mut range = LockedRange::of(words.lock(10));
    let bounds = PageRange { start: PageNum(5), end: PageNum(14) };
    range.grow(bounds, 7, |page| (page.0 != 13).then(|| words.lock(page.0)));
    assert_eq!(range.range(), PageRange { start: PageNum(6), end: PageNum(13) });
    range.cut_to(PageRange { start: PageNum(8), end: PageNum(12) });
    assert_eq!(words.locked(), [8, 9, 10, 11]);
    range.take_first().expect("page 8").map(Flags::EMPTY);
    assert_eq!(words.locked(), [9, 10, 11]);
    assert_eq!(range.content(PageNum(8)).state(), State::None, "as it was when it was locked");
    let left = range.leave_locked();
    drop(LockedRange::adopt(&words, left));
    assert!(words.locked().is_empty());
}
