//! What became of a tree: in all, and one by one.

use quire::control::Event;

use super::roll::Entry;
use super::unmanaged::Unmanaged;

/// The maxima that are seen by looking now and then.
#[derive(Clone, Copy, Default)]
pub(super) struct Samples {
    pub(super) pool_pages_max: u64,
    pub(super) segments_used_max: u32,
}

/// What became of the tree.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Account {
    pub budget_bytes: u64,
    pub held_bytes_max: u64,
    pub wanted_bytes_max: u64,
    pub managed_bytes_max: u64,
    pub pool_bytes_max: u64,
    pub swap_file_bytes_max: u64,
    pub swap_file_limit_bytes: u64,
    /// Most that one member might hold; 0 where only the budget bounded it.
    pub member_bytes_max: u64,
    pub members_max: u64,
    pub processes: u64,
    pub processes_left: u64,
    /// Processes that could not join for there were as many members as there might be.
    pub processes_refused: u64,
    /// Processes that were seen to be none of the members.
    pub unmanaged_processes: u64,
    /// Most that those had in memory at a time, as far as was seen.
    pub unmanaged_bytes_max: u64,
    pub events: [u64; Event::ALL.len()],
}

impl Default for Account {
    fn default() -> Account {
        Account {
            budget_bytes: 0,
            held_bytes_max: 0,
            wanted_bytes_max: 0,
            managed_bytes_max: 0,
            pool_bytes_max: 0,
            swap_file_bytes_max: 0,
            swap_file_limit_bytes: 0,
            member_bytes_max: 0,
            members_max: 0,
            processes: 0,
            processes_left: 0,
            processes_refused: 0,
            unmanaged_processes: 0,
            unmanaged_bytes_max: 0,
            events: [0; Event::ALL.len()],
        }
    }
}

/// What is known of the run's processes one by one.
#[derive(Clone, Default, Debug)]
pub(crate) struct ByMember {
    /// Those that have left, oldest first, then those that are there.
    pub members: Vec<Entry>,
    /// Members that have left before those, and are in the sums alone.
    pub forgotten: u64,
    pub unmanaged: Vec<Unmanaged>,
}
