//! What became of a run: in all, and process by process.

use std::path::PathBuf;

use super::exit_log::Entry;
use super::unmanaged::Unmanaged;
use super::whole::InMemory;
use crate::runs::counts::Counts;

#[derive(Clone, Default, Debug)]
pub(crate) struct Account {
    pub budget_bytes: u64,
    pub held_bytes_max: u64,
    pub wanted_bytes_max: u64,
    pub managed_bytes_max: u64,
    pub pool_bytes_max: u64,
    pub swap_file_bytes_max: u64,
    pub swap_file_limit_bytes: u64,
    /// Where the swap file is.
    pub swap_folder: Option<PathBuf>,
    /// What went to a server, where there was one.
    pub far: Option<FarAccount>,
    /// Most that one member might hold; 0 where only the budget bounded it.
    pub member_bytes_max: u64,
    pub members_max: u64,
    pub processes: u64,
    pub processes_left: u64,
    /// Processes that could not join because there were as many members as may be.
    pub processes_refused: u64,
    /// Processes that were seen to be none of the members.
    pub unmanaged_processes: u64,
    /// Most that those had in memory at a time, as far as was seen.
    pub unmanaged_bytes_max: u64,
    /// Most that was in memory and not managed, where the budget was for that too.
    pub unmanaged_memory_max: Option<InMemory>,
    /// The process that had most shared memory: its name, its id, and how many bytes.
    pub most_shared_by: Option<(String, u32, u64)>,
    pub counts: Counts,
}

#[derive(Clone, Debug)]
pub(crate) struct FarAccount {
    /// The server's addresses.
    pub name: String,
    pub bytes_max: u64,
    pub bytes_out: u64,
    pub bytes_in: u64,
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
