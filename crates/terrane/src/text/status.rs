//! `status`: the lines that are about memory.

use super::{Listing, TextError};
use crate::addr::{PAGE_SHIFT, page_ceil, page_floor};
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::HugePages;
use crate::mm::rss::Rss;
use crate::space::{AddressSpace, Mapping};
use crate::vma::VmFlags;
use core::fmt::Write;

/// The sizes that `status` tells. In bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Status {
    /// The most that was mapped at a time.
    pub peak: u64,
    /// Mapped.
    pub size: u64,
    /// In mappings that are locked in memory.
    pub locked: u64,
    /// The most that was in memory at a time.
    pub resident_peak: u64,
    /// Pages in memory, and in swap, by kind.
    pub rss: Rss,
    /// In private mappings that may be stored to, without stacks.
    pub data: u64,
    /// In mappings that grow downwards.
    pub stack: u64,
    /// The program's own code.
    pub code: u64,
    /// In other mappings of code.
    pub libraries: u64,
    /// In page tables, without the root.
    pub tables: u64,
}

/// What Linux counts a mapping as, besides its size.
enum Use {
    Code,
    Stack,
    Data,
    Other,
}

fn use_of(mapping: &Mapping) -> Use {
    let flags = mapping.flags;
    let stack = flags.contains(VmFlags::GROWSDOWN);
    if flags & (VmFlags::EXEC | VmFlags::WRITE) == VmFlags::EXEC && !stack {
        Use::Code
    } else if stack {
        Use::Stack
    } else if flags & (VmFlags::WRITE | VmFlags::SHARED) == VmFlags::WRITE {
        Use::Data
    } else {
        Use::Other
    }
}

impl Status {
    /// Reads the sizes of a space: the mappings of one moment, then the counters. O(n log n).
    ///
    /// # Errors
    /// [`TextError::List`].
    pub fn of<H: Host>(space: &AddressSpace<H>, cpu: &Cpu<H>) -> Result<Self, TextError> {
        let Listing { mappings, layout, .. } = space.listing(cpu)?;
        let (resident_peak, peak) = space.mm().peaks();
        let tables = space.page_tables().saturating_sub(1) as u64;
        let mut status =
            Status { resident_peak, rss: space.mm().rss(), tables: tables << PAGE_SHIFT, ..Self::default() };
        let mut code = 0;
        for mapping in &mappings {
            let len = mapping.range.len();
            status.size += len;
            if mapping.flags.contains(VmFlags::LOCKED) {
                status.locked += len;
            }
            match use_of(mapping) {
                Use::Code => code += len,
                Use::Stack => status.stack += len,
                Use::Data => status.data += len,
                Use::Other => {}
            }
        }
        let own = page_ceil(layout.code.end).unwrap_or(0).saturating_sub(page_floor(layout.code.start));
        status.code = own.min(code);
        status.libraries = code - status.code;
        status.peak = peak.max(status.size);
        Ok(status)
    }
}

/// Writes the lines of `/proc/pid/status` that are about memory, from `VmPeak` to `THP_enabled`; the others are the host's.
///
/// # Errors
/// [`TextError`].
pub fn write_status<H: Host>(
    space: &AddressSpace<H>,
    cpu: &Cpu<H>,
    out: &mut impl Write,
) -> Result<(), TextError> {
    let status = Status::of(space, cpu)?;
    let pages = |pages: u64| pages << PAGE_SHIFT;
    let lines = [
        ("VmPeak", status.peak),
        ("VmSize", status.size),
        ("VmLck", status.locked),
        ("VmPin", 0),
        ("VmHWM", status.resident_peak),
        ("VmRSS", pages(status.rss.resident())),
        ("RssAnon", pages(status.rss.anon)),
        ("RssFile", pages(status.rss.file)),
        ("RssShmem", pages(status.rss.shmem)),
        ("VmData", status.data),
        ("VmStk", status.stack),
        ("VmExe", status.code),
        ("VmLib", status.libraries),
        ("VmPTE", status.tables),
        ("VmSwap", pages(status.rss.swap)),
        ("HugetlbPages", 0),
    ];
    for (name, bytes) in lines {
        writeln!(out, "{name}:\t{:>8} kB", bytes >> 10)?;
    }
    writeln!(out, "CoreDumping:\t0")?;
    writeln!(out, "THP_enabled:\t{}", u8::from(space.config().huge_pages != HugePages::Never))?;
    Ok(())
}
