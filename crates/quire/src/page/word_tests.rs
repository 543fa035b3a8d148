use super::*;

#[test]
fn a_dump_of_a_word_names_its_flags() {
    let word = PageWord(AtomicU64::new(0));
    let snapshot = word.try_lock().unwrap();
    word.set(Snapshot::new(State::Pool, 7).with(Flags::ACCESSED));
    assert!(word.lock_or_park().is_none());
    assert_eq!(snapshot.state(), State::None);
    let text = std::format!("{:?}", word.load());
    assert_eq!(text, "Pool(0x7) locked parked accessed");
    assert!(word.lock_or_be_handed().is_none());
    let text = std::format!("{:?}", word.load());
    assert_eq!(text, "Pool(0x7) locked waiters parked handoff accessed");
    let old = word.release();
    assert!(old.has_parked() && old.has_waiters() && old.has_handoff());
    assert!(!word.load().is_locked());
}

#[test]
fn a_promised_lock_is_refused_to_newcomers() {
    let word = PageWord(AtomicU64::new(0));
    word.try_lock().unwrap();
    assert!(word.lock_or_be_handed().is_none());
    assert!(word.release().has_handoff());
    assert!(!word.load().is_locked() && !word.load().is_free());
    assert!(word.try_lock().is_none());
    assert!(word.lock_or_park().is_none());
    word.hand_over(false);
    assert!(word.load().is_locked() && !word.load().has_handoff());
    assert!(word.release().has_parked(), "the new owner answers who parked meanwhile");
}

#[test]
fn a_dropped_promise_takes_the_parked_faults_along() {
    let word = PageWord(AtomicU64::new(0));
    word.try_lock().unwrap();
    assert!(word.lock_or_be_handed().is_none());
    word.release();
    assert!(word.lock_or_park().is_none());
    assert!(word.drop_promise());
    word.clear_waiters();
    assert_eq!(word.0.into_inner(), 0);
}

#[test]
fn a_freed_word_carries_no_parked_faults() {
    let word = PageWord(AtomicU64::new(0));
    word.try_lock().unwrap();
    word.park_under_lock();
    assert!(word.release_with(Snapshot::new(State::None, 0)).has_parked());
    assert_eq!(word.0.into_inner(), 0);
}

#[test]
fn a_condition_looks_at_its_bits_alone() {
    let mapped = Snapshot::new(State::Mapped, 7).with(Flags::WRITEBACK);
    assert!(Condition::state(State::Mapped).holds(mapped));
    assert!(!Condition::state(State::Pool).holds(mapped));
    assert!(Condition::set(Flags::WRITEBACK).holds(mapped));
    assert!(!Condition::clear(Flags::WRITEBACK).holds(mapped));
    assert!(
        Condition::clear(Flags::WRITEBACK.or(Flags::DIRTY)).holds(mapped.without(Flags::WRITEBACK))
    );
    assert!(Condition::UNLOCKED.holds(mapped) && Condition::UNLOCKED.is_of_lock());
    assert!(!Condition::set(Flags::DIRTY).is_of_lock());
}
