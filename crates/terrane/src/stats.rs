//! Counters and events (source B, requirement B5).
//!
//! Counters belong to a CPU: counting is a load and a store to a line that no other CPU writes, and reading sums
//! over the CPUs. Names are those of `/proc/vmstat` and of source B's trace events, so that existing tools read
//! them. An event is what a counter counts, with its address; a host sends it wherever it likes through
//! [`Observe`](crate::host::Observe).

use crate::error::OutOfMemory;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{CpuId, Pin};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;
use crossbeam_utils::CachePadded;

macro_rules! counters {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// What is counted.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[non_exhaustive]
        #[repr(usize)]
        pub enum Counter { $($(#[$doc])* $variant,)* }

        impl Counter {
            /// Every counter, in the order in which they print.
            pub const ALL: &[Counter] = &[$(Counter::$variant,)*];

            /// The published name, as in `/proc/vmstat`.
            pub const fn name(self) -> &'static str {
                match self { $(Counter::$variant => $name,)* }
            }
        }
    };
}

counters! {
    /// Page faults taken.
    PgFault = "pgfault",
    /// Faults that had to wait for a file or a device.
    PgMajFault = "pgmajfault",
    /// Faults resolved without the lock of the address space.
    SpeculativePgFault = "speculative_pgfault",
    /// Given up: the VMA changed meanwhile.
    SpfVmaChanged = "spf_vma_changed",
    /// Given up: the VMA's anon_vma was not set and could not be set speculatively.
    SpfVmaNoanon = "spf_vma_noanon",
    /// Given up: this kind of VMA or fault is not handled speculatively.
    SpfVmaNotsup = "spf_vma_notsup",
    /// Given up: the access is not allowed by the VMA; the locked path decides.
    SpfVmaAccess = "spf_vma_access",
    /// Given up: an upper page-table entry changed meanwhile.
    SpfPmdChanged = "spf_pmd_changed",
    /// Frames allocated for pages and tables.
    PgAlloc = "pgalloc_normal",
    /// Frames freed.
    PgFree = "pgfree",
    /// Pages copied because a shared page was written.
    PgCow = "pgcow",
    /// Pages made writable in place: the last sharer wrote.
    PgReuse = "pgreuse",
    /// Pages mapped around a file fault, beyond the one asked for.
    PgFaultAround = "pgfaultaround",
    /// Pages filled in by populate calls.
    PgPopulate = "pgpopulate",
    /// Pages read from files.
    PgPgIn = "pgpgin",
    /// Pages written to files.
    PgPgOut = "pgpgout",
    /// Dirty pages that their file did not take.
    WriteBackError = "nr_write_back_errors",
    /// Page tables made.
    PgTableAlloc = "pgtable_alloc",
    /// Page tables given up.
    PgTableFree = "pgtable_free",
    /// Shoot-downs for which other CPUs were asked, however many.
    TlbRemoteFlush = "nr_tlb_remote_flush",
    /// Requests of other CPUs that were acted upon. Counted by the host.
    TlbRemoteFlushReceived = "nr_tlb_remote_flush_received",
    /// Flushes of a CPU's whole TLB, for itself or for others. Counted by the host.
    TlbLocalFlushAll = "nr_tlb_local_flush_all",
    /// Pages dropped one by one from a CPU's TLB, for itself or for others. Counted by the host.
    TlbLocalFlushOne = "nr_tlb_local_flush_one",
    /// Changes of mappings that found nothing present, and so needed no shoot-down.
    TlbFlushSkipped = "nr_tlb_flush_skipped",
    /// Times a reverse-mapping lock was taken.
    RmapLock = "rmap_lock",
    /// `mmap` calls.
    Map = "vm_map",
    /// `munmap` calls.
    Unmap = "vm_unmap",
    /// VMAs split.
    VmaSplit = "vma_split",
    /// VMAs merged into a neighbour.
    VmaMerge = "vma_merge",
    /// Huge pages made by first touches.
    ThpFaultAlloc = "thp_fault_alloc",
    /// First touches that wanted a huge page, for which there was no memory.
    ThpFaultFallback = "thp_fault_fallback",
    /// Huge pages divided into small ones; the memory stays where it is.
    ThpSplitPmd = "thp_split_pmd",
    /// Huge pages made of small ones.
    ThpCollapseAlloc = "thp_collapse_alloc",
    /// Huge pages that could not be made of small ones, because there was no memory.
    ThpCollapseAllocFailed = "thp_collapse_alloc_failed",
    /// Page tables that the collapser left alone: too few pages are there.
    ThpScanExceedNone = "thp_scan_exceed_none_pte",
    /// Page tables that the collapser left alone: pages are shared.
    ThpScanExceedShare = "thp_scan_exceed_share_pte",
    /// Pages read back from swap.
    PswpIn = "pswpin",
    /// Pages written to swap.
    PswpOut = "pswpout",
    /// Pages that swap did not give back: bus errors.
    SwapReadError = "nr_swap_read_errors",
    /// Pages that swap did not take: they stay.
    SwapWriteError = "nr_swap_write_errors",
    /// Times that a fault or a call went to look for memory itself.
    AllocStall = "allocstall_normal",
    /// Pages looked at by the background reclaimer.
    PgScanKswapd = "pgscan_kswapd",
    /// Pages looked at by those who were short of memory.
    PgScanDirect = "pgscan_direct",
    /// Private pages looked at by reclaim.
    PgScanAnon = "pgscan_anon",
    /// Pages of objects looked at by reclaim.
    PgScanFile = "pgscan_file",
    /// Pages that the background reclaimer freed.
    PgStealKswapd = "pgsteal_kswapd",
    /// Pages freed by those who were short of memory.
    PgStealDirect = "pgsteal_direct",
    /// Private pages that reclaim freed.
    PgStealAnon = "pgsteal_anon",
    /// Pages of objects that reclaim freed.
    PgStealFile = "pgsteal_file",
    /// Private pages that were forgotten, as their program had said that they might be.
    PgLazyFreed = "pglazyfreed",
    /// Pages moved to another frame.
    PgMigrate = "pgmigrate_success",
    /// Pages that could not be moved to another frame.
    PgMigrateFail = "pgmigrate_fail",
    /// Leaves of the index looked at by searches for free addresses.
    GapLeaves = "gap_search_leaves",
}

impl Counter {
    /// True for what is counted through a [`Cpu`](crate::machine::Cpu) instead of a pin; see [`Stats::add_unpinned`].
    const fn is_unpinned(self) -> bool {
        use Counter::{TlbFlushSkipped, TlbLocalFlushAll, TlbLocalFlushOne, TlbRemoteFlushReceived};
        matches!(self, TlbRemoteFlushReceived | TlbLocalFlushAll | TlbLocalFlushOne | TlbFlushSkipped)
    }
}

const COUNTERS: usize = Counter::ALL.len();

/// The counters of all CPUs.
pub struct Stats {
    cpus: Box<[CachePadded<[AtomicU64; COUNTERS]>]>,
}

impl Stats {
    /// Counters, all zero, for `cpus` CPUs.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_new(cpus: usize) -> Result<Self, OutOfMemory> {
        let mut counters = Vec::new();
        counters.try_reserve_exact(cpus).map_err(|_| OutOfMemory)?;
        counters.extend((0..cpus).map(|_| CachePadded::new([const { AtomicU64::new(0) }; COUNTERS])));
        Ok(Self { cpus: counters.into_boxed_slice() })
    }

    /// Adds `n` on behalf of the pinned CPU.
    #[inline]
    pub fn add(&self, pin: &Pin<'_>, counter: Counter, n: u64) {
        // The pin makes this CPU's counters ours: no read-modify-write is needed.
        debug_assert!(!counter.is_unpinned());
        self.add_to(pin.cpu(), counter, n);
    }

    /// Adds `n` on behalf of `cpu` without a pin, for whoever is the only one that acts as this CPU: through
    /// [`Cpu::count`](crate::machine::Cpu::count). These counters and those that are counted under a pin, perhaps by
    /// another CPU that has taken over the state of this one, are different ones, so none is lost.
    #[inline]
    pub(crate) fn add_unpinned(&self, cpu: CpuId, counter: Counter, n: u64) {
        debug_assert!(counter.is_unpinned());
        self.add_to(cpu, counter, n);
    }

    #[inline]
    fn add_to(&self, cpu: CpuId, counter: Counter, n: u64) {
        let cell = &self.cpus[cpu.index()][counter as usize];
        cell.store(cell.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// Counts one on behalf of the pinned CPU.
    #[inline]
    pub fn count(&self, pin: &Pin<'_>, counter: Counter) {
        self.add(pin, counter, 1);
    }

    /// What `counter` stands at, summed over the CPUs; exact when they rest. O(CPUs).
    pub fn sum(&self, counter: Counter) -> u64 {
        self.cpus.iter().fold(0, |sum, cpu| sum.wrapping_add(cpu[counter as usize].load(Ordering::Relaxed)))
    }

    /// What `counter` stands at for one CPU; 0 for a CPU that does not exist.
    pub fn of_cpu(&self, cpu: CpuId, counter: Counter) -> u64 {
        self.cpus.get(cpu.index()).map_or(0, |c| c[counter as usize].load(Ordering::Relaxed))
    }

    /// All counters, summed.
    pub fn snapshot(&self) -> Snapshot {
        let mut values = [0; COUNTERS];
        for (value, counter) in values.iter_mut().zip(Counter::ALL) {
            *value = self.sum(*counter);
        }
        Snapshot { values }
    }
}

/// The counters at one moment. Prints in the form of `/proc/vmstat`: a name, a space, a number, a line each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Snapshot {
    values: [u64; COUNTERS],
}

impl Snapshot {
    /// The value of one counter.
    pub fn get(&self, counter: Counter) -> u64 {
        self.values[counter as usize]
    }

    /// What was counted since `earlier`.
    pub fn since(&self, earlier: &Snapshot) -> Snapshot {
        let mut values = self.values;
        for (value, before) in values.iter_mut().zip(earlier.values) {
            *value = value.wrapping_sub(before);
        }
        Snapshot { values }
    }

    /// Names and values, in printing order.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        Counter::ALL.iter().map(|&counter| (counter.name(), self.get(counter)))
    }
}

impl fmt::Display for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, value) in self.iter() {
            writeln!(f, "{name} {value}")?;
        }
        Ok(())
    }
}

/// Something that happened, with its address, for a host that traces.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Event {
    /// What happened: the counter that counts it.
    pub kind: Counter,
    /// The virtual address it concerns, in bytes; for layout changes the start of the range.
    pub address: u64,
}

#[cfg(terrane_watch)]
impl crate::names::Describe for Stats {
    fn describe(&self, names: &mut crate::names::Names) {
        for (index, cpu) in self.cpus.iter().enumerate() {
            names.under(format_args!("[{index}]"), |names| {
                names.leaf(cpu);
                for counter in Counter::ALL {
                    names.field(counter.name(), &cpu[*counter as usize]);
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Epoch;
    use alloc::string::ToString;

    #[test]
    fn counters_add_up_over_the_cpus_and_print_like_vmstat() {
        let epoch = Epoch::try_new(2).unwrap();
        let (a, b) = (epoch.register().unwrap(), epoch.register().unwrap());
        let stats = Stats::try_new(2).unwrap();
        stats.count(&a.pin(), Counter::PgFault);
        stats.add(&b.pin(), Counter::PgFault, 4);
        let before = stats.snapshot();
        stats.count(&b.pin(), Counter::SpfVmaChanged);
        assert_eq!(stats.sum(Counter::PgFault), 5);
        assert_eq!(
            (stats.of_cpu(b.id(), Counter::PgFault), stats.of_cpu(CpuId(9), Counter::PgFault)),
            (4, 0)
        );
        let since = stats.snapshot().since(&before);
        assert_eq!((since.get(Counter::PgFault), since.get(Counter::SpfVmaChanged)), (0, 1));
        let text = stats.snapshot().to_string();
        assert!(text.starts_with("pgfault 5\n"));
        for line in text.lines() {
            let (name, value) = line.split_once(' ').unwrap();
            assert!(name.bytes().all(|c| c.is_ascii_lowercase() || c == b'_'));
            value.parse::<u64>().unwrap();
        }
    }

    #[test]
    fn the_published_names_are_there_once_each() {
        for name in [
            "pgfault",
            "speculative_pgfault",
            "spf_vma_changed",
            "spf_vma_noanon",
            "spf_vma_notsup",
            "spf_vma_access",
            "spf_pmd_changed",
            "nr_tlb_remote_flush",
            "nr_tlb_remote_flush_received",
            "nr_tlb_local_flush_all",
            "nr_tlb_local_flush_one",
        ] {
            assert_eq!(Counter::ALL.iter().filter(|counter| counter.name() == name).count(), 1, "{name}");
        }
        for (n, counter) in Counter::ALL.iter().enumerate() {
            assert_eq!(*counter as usize, n);
        }
    }
}
