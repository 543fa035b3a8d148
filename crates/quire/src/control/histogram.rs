//! How long faults take: kinds of faults, and the buckets in which their times are counted.
//!
//! A time is from the moment at which a handler has read the fault's message (inline: from the entry
//! of the signal) to the moment at which the fault is answered. The kernel's part, which brings the
//! message and wakes the thread, is not in it. A fault that is parked for a lock or for memory is not
//! counted: its thread faults again, and that fault is counted. The kinds that read include the time
//! of the read ([`FaultKind::File`], [`FaultKind::ObjectRead`]).

/// Buckets of a histogram of service times: the last begins at 2^31 ns, about two seconds.
pub const FAULT_BUCKETS: usize = 32;

crate::named::named! {
    /// What a fault had to do, by where its page was when it came.
    pub enum FaultKind {
        /// A page without content of its own: zeros, or its object's bytes in a private mapping.
        Fresh = "fresh",
        /// In a frame of the pool.
        Limbo = "limbo",
        /// Packed in memory, or a pattern.
        Memory = "memory",
        /// In the swap file.
        File = "file",
        /// A page of an object, which was cached.
        Object = "object",
        /// A page of an object, which was read from its store.
        ObjectRead = "object_read",
        /// The first write to a page that is write-protected, of no object.
        Protected = "protected",
        /// Mapped already.
        Spurious = "spurious",
    }
}

#[inline]
pub const fn bucket_of(ns: u64) -> usize {
    let bucket = (ns | 1).ilog2() as usize;
    if bucket < FAULT_BUCKETS { bucket } else { FAULT_BUCKETS - 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_has_the_times_between_two_powers_of_two() {
        assert_eq!([0, 1, 2, 3, 4].map(bucket_of), [0, 0, 1, 1, 2]);
        for bucket in 1..FAULT_BUCKETS {
            assert_eq!(bucket_of(1 << bucket), bucket);
            assert_eq!(bucket_of((1 << bucket) - 1), bucket - 1);
        }
        assert_eq!(bucket_of(1 << 32), FAULT_BUCKETS - 1, "what takes longest is in the last");
        assert_eq!(bucket_of(u64::MAX), FAULT_BUCKETS - 1);
    }

    #[test]
    fn every_kind_has_its_histogram_and_a_name_of_its_own() {
        for (at, kind) in FaultKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, at);
            let same = FaultKind::ALL.iter().filter(|other| other.name() == kind.name());
            assert_eq!(same.count(), 1, "{kind:?}");
        }
    }
}
