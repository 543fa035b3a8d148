//! The pool alone: pages that come, are found again, or are drained, in any order.

use super::*;
use crate::units::PageNum;

fn evict(pool: &FramePool, len: usize) -> FrameId {
    let frame = pool.take_holes(len).unwrap();
    for at in 0..len {
        pool.set_owner(frame.add(at), PageNum(at as u64));
    }
    pool.enter_limbo(FrameRun { start: frame, len }, |_| true);
    frame
}

#[test]
fn limbo_is_first_in_first_out_by_window() {
    let pool = FramePool::new(4 * BLOCK_PAGES).unwrap();
    let first = evict(&pool, 512);
    evict(&pool, 512);
    let window = pool.oldest_window().unwrap();
    assert_eq!(window, first.0 >> BLOCK_ORDER);
    pool.leave_limbo(FrameRun { start: first, len: 512 });
    pool.put(FrameRun { start: first, len: 512 });
    pool.return_window(window, QueueEnd::Youngest);
    assert_eq!((pool.free(), pool.limbo()), (512, 512));
    pool.check();
}

#[test]
fn a_window_whose_frames_have_left_is_used_again() {
    let pool = FramePool::new(2 * BLOCK_PAGES).unwrap();
    for _ in 0..10 {
        let frame = evict(&pool, 300);
        let window = pool.oldest_window().unwrap();
        pool.leave_limbo(FrameRun { start: frame, len: 300 });
        pool.put(FrameRun { start: frame, len: 300 });
        pool.return_window(window, QueueEnd::Youngest);
        let mut left = 300;
        while left > 0 {
            let run = pool.take(left).unwrap();
            pool.consume(run);
            left -= run.len;
        }
        pool.check();
    }
    assert!(pool.take(1).is_none());
}

#[test]
fn a_window_that_empties_while_it_is_drained_is_not_opened_until_it_comes_back() {
    let pool = FramePool::new(2 * BLOCK_PAGES).unwrap();
    let frame = evict(&pool, 10);
    let window = pool.oldest_window().unwrap();
    let run = FrameRun { start: frame, len: 10 };
    // Faults take every page of it back meanwhile.
    pool.leave_limbo(run);
    pool.consume(run);
    assert_ne!(evict(&pool, 10).0 >> BLOCK_ORDER, window);
    pool.return_window(window, QueueEnd::Youngest);
    pool.check();
}

#[test]
fn pages_that_enter_limbo_after_their_window_left_the_queue_are_queued() {
    let pool = FramePool::new(4 * BLOCK_PAGES).unwrap();
    let late = pool.take_holes(10).unwrap();
    evict(&pool, 512);
    let window = pool.oldest_window().unwrap();
    assert_eq!(window, late.0 >> BLOCK_ORDER);
    pool.return_window(window, QueueEnd::Youngest);
    pool.enter_limbo(FrameRun { start: late, len: 10 }, |_| true);
    pool.check();
}

#[test]
fn nothing_is_taken_where_nothing_is_wanted() {
    let pool = FramePool::new(BLOCK_PAGES).unwrap();
    let start = evict(&pool, 10);
    let run = FrameRun { start, len: 10 };
    pool.leave_limbo(run);
    pool.put(run);
    assert!(pool.take(0).is_none());
    assert_eq!(pool.free(), 10);
}
