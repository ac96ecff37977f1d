//! `vmstat`: the counters of a machine.

use super::TextError;
use crate::addr::{Frame, PAGE_SHIFT};
use crate::frame::FrameFlags;
use crate::host::Host;
use crate::machine::{Cpu, Machine};
use crate::stats::{Counter, Snapshot};
use core::fmt::Write;

/// What the frames are in use for.
#[derive(Default)]
struct Census {
    anon: u64,
    cache: u64,
    shmem: u64,
    dirty: u64,
    writeback: u64,
    unevictable: u64,
    tables: u64,
}

impl Census {
    /// Looks at all frames, each at its own moment.
    fn take<H: Host>(machine: &Machine<H>) -> Self {
        let mut census = Self::default();
        let range = machine.host().frames();
        for n in 0..range.count as u32 {
            let flags = machine.frames().meta(Frame(range.first.0 + n)).flags();
            let count = |flag: FrameFlags, place: &mut u64| *place += u64::from(flags.contains(flag));
            if flags.contains(FrameFlags::FREE) {
                continue;
            }
            count(FrameFlags::ANON, &mut census.anon);
            count(FrameFlags::CACHE, &mut census.cache);
            count(FrameFlags::SHMEM, &mut census.shmem);
            count(FrameFlags::WRITEBACK, &mut census.writeback);
            count(FrameFlags::UNEVICTABLE, &mut census.unevictable);
            count(FrameFlags::TABLE, &mut census.tables);
            // What has no file cannot be written back.
            if !flags.intersects(FrameFlags::ANON | FrameFlags::SHMEM) {
                count(FrameFlags::DIRTY, &mut census.dirty);
            }
        }
        census
    }
}

/// Counters that Linux has too, in its order.
const LIKE_LINUX: &[Counter] = &[
    Counter::PgPgIn,
    Counter::PgPgOut,
    Counter::PswpIn,
    Counter::PswpOut,
    Counter::PgAlloc,
    Counter::AllocStall,
    Counter::PgFree,
    Counter::PgFault,
    Counter::PgMajFault,
    Counter::PgLazyFreed,
    Counter::PgReuse,
    Counter::PgStealKswapd,
    Counter::PgStealDirect,
    Counter::PgScanKswapd,
    Counter::PgScanDirect,
    Counter::PgScanAnon,
    Counter::PgScanFile,
    Counter::PgStealAnon,
    Counter::PgStealFile,
    Counter::PgMigrate,
    Counter::PgMigrateFail,
    Counter::ThpFaultAlloc,
    Counter::ThpFaultFallback,
    Counter::ThpCollapseAlloc,
    Counter::ThpCollapseAllocFailed,
    Counter::ThpSplitPmd,
    Counter::ThpScanExceedNone,
    Counter::ThpScanExceedShare,
];

/// Writes `/proc/vmstat` for a machine: what Linux has too, under its names and in its order, and behind that the counters of
/// Terrane's own ([`Counter`]). Sums at rest, a moment's view otherwise. O(frames), without a lock and without a pin.
///
/// As on Linux, `pgpgin` and `pgpgout` are in KiB, all else in pages or in times.
///
/// # Errors
/// [`TextError::Write`].
pub fn write_vmstat<H: Host>(cpu: &Cpu<H>, out: &mut impl Write) -> Result<(), TextError> {
    let machine = cpu.machine();
    let census = Census::take(machine);
    let counters: Snapshot = machine.stats().snapshot();
    let levels = [
        ("nr_free_pages", machine.frames().free_frames() as u64),
        ("nr_unevictable", census.unevictable),
        ("nr_anon_pages", census.anon),
        ("nr_file_pages", census.cache),
        ("nr_dirty", census.dirty),
        ("nr_writeback", census.writeback),
        ("nr_shmem", census.shmem),
        ("nr_page_table_pages", census.tables),
    ];
    for (name, value) in levels {
        writeln!(out, "{name} {value}")?;
    }
    let value = |counter: Counter| match counter {
        Counter::PgPgIn | Counter::PgPgOut => counters.get(counter) << (PAGE_SHIFT - 10),
        _ => counters.get(counter),
    };
    let own = Counter::ALL.iter().filter(|counter| !LIKE_LINUX.contains(counter));
    for &counter in LIKE_LINUX.iter().chain(own) {
        writeln!(out, "{} {}", counter.name(), value(counter))?;
    }
    Ok(())
}
