//! What is counted, and the names by which it is asked for.

use super::Tracepoint;

/// What is counted, by /proc/vmstat's names where it has one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Event {
    /// Faults served.
    Pgfault,
    /// Faults that had to read the swap file.
    Pgmajfault,
    /// Pages read from the compressed pool, by a same-fill, or from the swap file.
    Pswpin,
    /// Pages that went to swap.
    Pswpout,
    /// Pages that came back from the compressed pool.
    Zswpin,
    /// Pages that went to the compressed pool.
    Zswpout,
    /// Pages written from the compressed pool to the swap file.
    Zswpwb,
    /// Same-filled pages that came back.
    SwpinZero,
    /// Same-filled pages that went out without data.
    SwpoutZero,
    /// Faults that found their page in the pool with its content ("limbo").
    PgactivateLimbo,
    /// Pages looked at by the background thread.
    PgscanKswapd,
    /// Pages looked at by faults that had to reclaim.
    PgscanDirect,
    /// Pages taken by the background thread.
    PgstealKswapd,
    /// Pages taken by faults that had to reclaim.
    PgstealDirect,
    /// Faults that had to reclaim.
    Allocstall,
    /// Pages that came back soon after they had gone.
    WorkingsetRefaultAnon,
    /// Calls that unmapped pages for reclaim.
    UnmapCalls,
    /// Pages unmapped by them.
    UnmapPages,
    /// Pages that a call refused to unmap (pinned by the kernel, or shared).
    UnmapRefused,
    /// Pages dropped because they were free to be (MADV_FREE).
    Pglazyfreed,
    /// Pages mapped by moving a frame.
    MapMove,
    /// Pages mapped by copying.
    MapCopy,
    /// Clean pages evicted without compressing again.
    PswpoutClean,
    /// Bytes written to the compressed pool.
    ZswpoutBytes,
    /// Faults parked until a lock, a frame or a read was ready.
    FaultParked,
    /// Pages poisoned because their content was lost.
    Pgpoison,
    /// Faults served under the space's lock.
    FaultClassic,
    /// Forks served.
    Fork,
    /// Nanoseconds that the calls which unmap took.
    UnmapNs,
    /// Nanoseconds that packing what was unmapped took.
    CompressNs,
    /// Pages of objects mapped from their cache.
    MapCached,
    /// Pages of objects read from their stores.
    Pgpgin,
    /// Pages of objects written to their stores.
    Pgpgout,
    /// Cached pages of objects that were given new memory.
    PgmigrateSuccess,
    /// Cached pages of objects that should have been, and were in use.
    PgmigrateFail,
    /// Faults served the speculative way.
    SpeculativePgfault,
    /// Speculative faults given up because the VMA changed meanwhile, or was being changed.
    SpfVmaChanged,
    /// Speculative faults given up because the VMA's memory was not prepared for them.
    SpfVmaNoanon,
    /// Speculative faults given up because VMAs of that kind are not served so.
    SpfVmaNotsup,
    /// Speculative faults given up because the VMA does not allow the access.
    SpfVmaAccess,
    /// Speculative faults given up because the page's state changed meanwhile.
    SpfPmdChanged,
    /// Changes of the layout that are not managed.
    LayoutUnmanaged,
}

impl Event {
    /// Every event, in the order of its counter.
    pub const ALL: [Event; 42] = [
        Event::Pgfault,
        Event::Pgmajfault,
        Event::Pswpin,
        Event::Pswpout,
        Event::Zswpin,
        Event::Zswpout,
        Event::Zswpwb,
        Event::SwpinZero,
        Event::SwpoutZero,
        Event::PgactivateLimbo,
        Event::PgscanKswapd,
        Event::PgscanDirect,
        Event::PgstealKswapd,
        Event::PgstealDirect,
        Event::Allocstall,
        Event::WorkingsetRefaultAnon,
        Event::UnmapCalls,
        Event::UnmapPages,
        Event::UnmapRefused,
        Event::Pglazyfreed,
        Event::MapMove,
        Event::MapCopy,
        Event::PswpoutClean,
        Event::ZswpoutBytes,
        Event::FaultParked,
        Event::Pgpoison,
        Event::FaultClassic,
        Event::Fork,
        Event::UnmapNs,
        Event::CompressNs,
        Event::MapCached,
        Event::Pgpgin,
        Event::Pgpgout,
        Event::PgmigrateSuccess,
        Event::PgmigrateFail,
        Event::SpeculativePgfault,
        Event::SpfVmaChanged,
        Event::SpfVmaNoanon,
        Event::SpfVmaNotsup,
        Event::SpfVmaAccess,
        Event::SpfPmdChanged,
        Event::LayoutUnmanaged,
    ];

    /// The counter's name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Event::Pgfault => "pgfault",
            Event::Pgmajfault => "pgmajfault",
            Event::Pswpin => "pswpin",
            Event::Pswpout => "pswpout",
            Event::Zswpin => "zswpin",
            Event::Zswpout => "zswpout",
            Event::Zswpwb => "zswpwb",
            Event::SwpinZero => "swpin_zero",
            Event::SwpoutZero => "swpout_zero",
            Event::PgactivateLimbo => "pgactivate_limbo",
            Event::PgscanKswapd => "pgscan_kswapd",
            Event::PgscanDirect => "pgscan_direct",
            Event::PgstealKswapd => "pgsteal_kswapd",
            Event::PgstealDirect => "pgsteal_direct",
            Event::Allocstall => "allocstall",
            Event::WorkingsetRefaultAnon => "workingset_refault_anon",
            Event::UnmapCalls => "unmap_calls",
            Event::UnmapPages => "unmap_pages",
            Event::UnmapRefused => "unmap_refused",
            Event::Pglazyfreed => "pglazyfreed",
            Event::MapMove => "map_move",
            Event::MapCopy => "map_copy",
            Event::PswpoutClean => "pswpout_clean",
            Event::ZswpoutBytes => "zswpout_bytes",
            Event::FaultParked => "fault_parked",
            Event::Pgpoison => "pgpoison",
            Event::FaultClassic => "fault_classic",
            Event::Fork => "fork",
            Event::UnmapNs => "unmap_ns",
            Event::CompressNs => "compress_ns",
            Event::MapCached => "map_cached",
            Event::Pgpgin => "pgpgin",
            Event::Pgpgout => "pgpgout",
            Event::PgmigrateSuccess => "pgmigrate_success",
            Event::PgmigrateFail => "pgmigrate_fail",
            Event::SpeculativePgfault => "speculative_pgfault",
            Event::SpfVmaChanged => "spf_vma_changed",
            Event::SpfVmaNoanon => "spf_vma_noanon",
            Event::SpfVmaNotsup => "spf_vma_notsup",
            Event::SpfVmaAccess => "spf_vma_access",
            Event::SpfPmdChanged => "spf_pmd_changed",
            Event::LayoutUnmanaged => "layout_unmanaged",
        }
    }

    /// The event of a name, by which other tools may know it.
    #[must_use]
    pub fn by_name(name: &str) -> Option<Event> {
        let name = match name {
            "faults" | "page-faults" => "pgfault",
            "major-faults" => "pgmajfault",
            "spf" | "speculative-faults" => "speculative_pgfault",
            // perf's names of the tracepoints.
            _ => match Tracepoint::ALL.into_iter().find(|tracepoint| tracepoint.name() == name) {
                Some(tracepoint) => return Some(tracepoint.event()),
                None => name,
            },
        };
        Event::ALL.into_iter().find(|event| event.name() == name)
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
