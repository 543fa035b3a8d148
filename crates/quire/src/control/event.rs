//! What is counted, and the names by which it is asked for.

use super::Tracepoint;

crate::named::named! {
    /// What is counted, by the names of /proc/vmstat where it has one.
    pub enum Event {
        /// Faults served.
        Pgfault = "pgfault",
        /// Faults that had to read the swap file.
        Pgmajfault = "pgmajfault",
        /// Pages read from the compressed pool, by a same-fill, or from the swap file.
        Pswpin = "pswpin",
        /// Pages that went to swap.
        Pswpout = "pswpout",
        /// Pages that came back from the compressed pool.
        Zswpin = "zswpin",
        /// Pages that went to the compressed pool.
        Zswpout = "zswpout",
        /// Pages written from the compressed pool to the swap file.
        Zswpwb = "zswpwb",
        /// Same-filled pages that came back.
        SwpinZero = "swpin_zero",
        /// Same-filled pages that went out without data.
        SwpoutZero = "swpout_zero",
        /// Pages that came in around a fault that was not one of a long stream's.
        SwapRa = "swap_ra",
        /// Of these those that are used, estimated from the faults that are served alone, one in 16.
        SwapRaHit = "swap_ra_hit",
        /// Faults that found their page in the pool with its content ("limbo").
        PgactivateLimbo = "pgactivate_limbo",
        /// Pages looked at by the background thread.
        PgscanKswapd = "pgscan_kswapd",
        /// Pages looked at by faults that had to reclaim.
        PgscanDirect = "pgscan_direct",
        /// Pages taken by the background thread.
        PgstealKswapd = "pgsteal_kswapd",
        /// Pages taken by faults that had to reclaim.
        PgstealDirect = "pgsteal_direct",
        /// Faults that had to reclaim.
        Allocstall = "allocstall",
        /// Nanoseconds that they reclaimed.
        AllocstallNs = "allocstall_ns",
        /// Nanoseconds that faults waited for the swap file itself.
        SwapReadNs = "swap_read_ns",
        /// Pages that faults asked for after they had gone to swap.
        WorkingsetRefaultAnon = "workingset_refault_anon",
        /// Of these, those that came back before as many pages had left as a sixteenth of the budget has.
        Refault16th = "refault_16th",
        /// Nanoseconds that faults take for these, as faults of their kind do on average.
        Refault16thNs = "refault_16th_ns",
        /// After that, and before an eighth.
        Refault8th = "refault_8th",
        /// After that, and before a quarter.
        RefaultQuarter = "refault_quarter",
        /// After that, and before a half.
        RefaultHalf = "refault_half",
        /// After that, and before all of the budget: twice as much memory would have held them.
        RefaultOnce = "refault_once",
        /// After that, and before twice the budget.
        RefaultTwice = "refault_twice",
        /// After that, and before four times the budget.
        RefaultFour = "refault_four_times",
        /// Still later.
        RefaultFar = "refault_far",
        /// Calls that unmapped pages for reclaim.
        UnmapCalls = "unmap_calls",
        /// Pages unmapped by them.
        UnmapPages = "unmap_pages",
        /// Pages that a call refused to unmap (pinned by the kernel, or shared).
        UnmapRefused = "unmap_refused",
        /// Pages dropped because they were free to be (MADV_FREE).
        Pglazyfreed = "pglazyfreed",
        /// Pages mapped by moving a frame.
        MapMove = "map_move",
        /// Pages mapped by copying.
        MapCopy = "map_copy",
        /// Clean pages evicted without compressing again.
        PswpoutClean = "pswpout_clean",
        /// Bytes written to the compressed pool.
        ZswpoutBytes = "zswpout_bytes",
        /// Of the pages that went to the compressed pool, those packed by Zstandard.
        ZswpoutZstd = "zswpout_zstd",
        /// Bytes of these.
        ZswpoutZstdBytes = "zswpout_zstd_bytes",
        /// Pages of the compressed pool that stayed there, and were packed anew by Zstandard.
        ZswpRepacked = "zswp_repacked",
        /// Faults parked until a lock, a frame or a read was ready.
        FaultParked = "fault_parked",
        /// Pages poisoned because their content was lost.
        Pgpoison = "pgpoison",
        /// Faults served under the space's lock.
        FaultClassic = "fault_classic",
        /// Forks served.
        Fork = "fork",
        /// Nanoseconds that the calls which unmap took.
        UnmapNs = "unmap_ns",
        /// Nanoseconds that packing what was unmapped took.
        CompressNs = "compress_ns",
        /// Pages of objects mapped from their cache.
        MapCached = "map_cached",
        /// Pages of objects read from their stores.
        Pgpgin = "pgpgin",
        /// Pages of objects written to their stores.
        Pgpgout = "pgpgout",
        /// Cached pages of objects that were given new memory.
        PgmigrateSuccess = "pgmigrate_success",
        /// Cached pages of objects that should have been, and were in use.
        PgmigrateFail = "pgmigrate_fail",
        /// Faults served the speculative way.
        SpeculativePgfault = "speculative_pgfault",
        /// Speculative faults given up because the VMA changed meanwhile, or was being changed.
        SpfVmaChanged = "spf_vma_changed",
        /// Speculative faults given up because the VMA's memory was not prepared for them.
        SpfVmaNoanon = "spf_vma_noanon",
        /// Speculative faults given up because VMAs of that kind are not served so.
        SpfVmaNotsup = "spf_vma_notsup",
        /// Speculative faults given up because the VMA does not allow the access.
        SpfVmaAccess = "spf_vma_access",
        /// Speculative faults given up because the page's state changed meanwhile.
        SpfPmdChanged = "spf_pmd_changed",
        /// Times that a thread slept for a page: for its lock, or the end of its write-back.
        PageWait = "page_wait",
        /// Threads that were woken from that, a system call each: an unlock without waiters makes none.
        PageWake = "page_wake",
        /// Changes of the layout that are not managed.
        LayoutUnmanaged = "layout_unmanaged",
    }
}

impl Event {
    /// Refault distances: each is up to twice as far as the one before.
    pub const REFAULTS: [Event; 8] = [
        Event::Refault16th,
        Event::Refault8th,
        Event::RefaultQuarter,
        Event::RefaultHalf,
        Event::RefaultOnce,
        Event::RefaultTwice,
        Event::RefaultFour,
        Event::RefaultFar,
    ];

    /// The event of a name, by which other tools may know it.
    pub fn by_name(name: &str) -> Option<Event> {
        // perf's names of the tracepoints.
        let traced = || Tracepoint::ALL.into_iter().find(|tracepoint| tracepoint.name() == name);
        match name {
            "faults" | "page-faults" => Some(Event::Pgfault),
            "major-faults" => Some(Event::Pgmajfault),
            "spf" | "speculative-faults" => Some(Event::SpeculativePgfault),
            _ => Event::ALL.into_iter().find(|event| event.name() == name),
        }
        .or_else(|| traced().map(Tracepoint::event))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_event_has_its_place_and_a_name_of_its_own() {
        for (at, event) in Event::ALL.into_iter().enumerate() {
            assert_eq!(event as usize, at, "{event:?} is counted as another");
            assert_eq!(Event::by_name(event.name()), Some(event), "a name is used twice");
        }
        assert_eq!(Event::by_name("page faults"), None);
        assert_eq!(Event::by_name(""), None);
    }

    #[test]
    fn events_are_found_by_the_names_that_other_tools_have_for_them() {
        for (alias, event) in [
            ("faults", Event::Pgfault),
            ("page-faults", Event::Pgfault),
            ("major-faults", Event::Pgmajfault),
            ("spf", Event::SpeculativePgfault),
            ("speculative-faults", Event::SpeculativePgfault),
            ("pagefault:spf_vma_changed", Event::SpfVmaChanged),
            ("pagefault:spf_vma_noanon", Event::SpfVmaNoanon),
            ("pagefault:spf_vma_notsup", Event::SpfVmaNotsup),
            ("pagefault:spf_vma_access", Event::SpfVmaAccess),
            ("pagefault:spf_pmd_changed", Event::SpfPmdChanged),
        ] {
            assert_eq!(Event::by_name(alias), Some(event), "{alias}");
        }
        assert_eq!(Event::by_name("pagefault:pgfault"), None);
    }
}
