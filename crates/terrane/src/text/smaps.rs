//! `smaps` and `smaps_rollup`: how much memory each mapping holds, and all of them.

use super::maps::{write_header, write_prefix};
use super::{Footprint, Listing, TextError, write_size};
use crate::addr::{AddrRange, PAGE_SIZE};
use crate::error::Error;
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::BLOCK_SIZE;
use crate::space::{AddressSpace, Backing, Mapping, Sharers};
use crate::vma::{Prot, VmFlags};
use core::fmt::{self, Write};

/// Writes `/proc/pid/smaps`. O(pages), and O(pages) for each other mapping of the same objects. Blocks on objects' mapping
/// locks; not while pinned.
///
/// # Errors
/// [`TextError`].
pub fn write_smaps<H: Host>(
    space: &AddressSpace<H>,
    cpu: &Cpu<H>,
    out: &mut impl Write,
) -> Result<(), TextError> {
    let mut smaps = Smaps::new(space, cpu)?;
    while smaps.write_next(space, cpu, out)? {}
    Ok(())
}

/// `/proc/pid/smaps`, a mapping at a time: for readers that stop after the first few, or want no more memory than that. What mappings there
/// are is of the moment of [`Smaps::new`], how much they hold of the moment that they are written.
#[derive(Debug)]
pub struct Smaps {
    listing: Listing,
    /// How many of its mappings are written.
    written: usize,
    /// What was counted for them that may hold for the next.
    sharers: Sharers,
}

impl Smaps {
    /// The mappings of `space`, of which none is written yet. O(n log n) in their number.
    ///
    /// # Errors
    /// [`Error::NoMemory`].
    pub fn new<H: Host>(space: &AddressSpace<H>, cpu: &Cpu<H>) -> Result<Self, Error> {
        Ok(Self { listing: space.listing(cpu)?, written: 0, sharers: Sharers::NONE })
    }

    /// Writes what is to be said of the next mapping; false when there is none. O(pages), as [`write_smaps`].
    ///
    /// # Errors
    /// [`TextError`].
    pub fn write_next<H: Host>(
        &mut self,
        space: &AddressSpace<H>,
        cpu: &Cpu<H>,
        out: &mut impl Write,
    ) -> Result<bool, TextError> {
        let Some(mapping) = self.listing.mappings.get(self.written) else { return Ok(false) };
        let footprint = space.footprint_with(cpu, mapping, &mut self.sharers);
        write_header(out, &self.listing, mapping)?;
        write_size(out, "Size:", mapping.range.len())?;
        write_size(out, "KernelPageSize:", PAGE_SIZE)?;
        write_size(out, "MMUPageSize:", PAGE_SIZE)?;
        write_footprint(out, &footprint, false)?;
        writeln!(out, "THPeligible:    {:>8}", u8::from(is_eligible(space, mapping)))?;
        write_flags(out, mapping.flags)?;
        self.written += 1;
        Ok(true)
    }
}

/// Writes `/proc/pid/smaps_rollup`: the sums of [`write_smaps`]. As that.
///
/// # Errors
/// [`TextError`].
pub fn write_smaps_rollup<H: Host>(
    space: &AddressSpace<H>,
    cpu: &Cpu<H>,
    out: &mut impl Write,
) -> Result<(), TextError> {
    let Listing { mappings, .. } = space.listing(cpu)?;
    let (mut sum, mut sharers) = (Footprint::default(), Sharers::NONE);
    for mapping in &mappings {
        sum += space.footprint_with(cpu, mapping, &mut sharers);
    }
    let range = match (mappings.first(), mappings.last()) {
        (Some(first), Some(last)) => AddrRange::new(first.range.start, last.range.end),
        _ => AddrRange::default(),
    };
    let all = Mapping {
        range,
        prot: Prot::empty(),
        shared: false,
        offset: 0,
        backing: Backing::Anonymous,
        flags: VmFlags::empty(),
        object: 0,
    };
    let mut line = PrefixOnly::default();
    write_prefix(&mut line, &all, (0, 0, 0))?;
    write_prefix(out, &all, (0, 0, 0))?;
    writeln!(out, "{:>1$}[rollup]", "", super::maps::PATH_COLUMN.saturating_sub(line.0).max(1))?;
    write_footprint(out, &sum, true)?;
    Ok(())
}

/// Counts what a prefix takes.
#[derive(Default)]
struct PrefixOnly(usize);

impl Write for PrefixOnly {
    fn write_str(&mut self, s: &str) -> fmt::Result {
        self.0 += s.len();
        Ok(())
    }
}

/// The lines that both have; with the three that only the sums have.
fn write_footprint(out: &mut impl Write, of: &Footprint, rollup: bool) -> fmt::Result {
    write_size(out, "Rss:", of.resident)?;
    write_size(out, "Pss:", of.share.bytes())?;
    write_size(out, "Pss_Dirty:", of.share_dirty.bytes())?;
    if rollup {
        write_size(out, "Pss_Anon:", of.share_anon.bytes())?;
        write_size(out, "Pss_File:", of.share_file.bytes())?;
        write_size(out, "Pss_Shmem:", of.share_shmem.bytes())?;
    }
    write_size(out, "Shared_Clean:", of.shared_clean)?;
    write_size(out, "Shared_Dirty:", of.shared_dirty)?;
    write_size(out, "Private_Clean:", of.private_clean)?;
    write_size(out, "Private_Dirty:", of.private_dirty)?;
    write_size(out, "Referenced:", of.referenced)?;
    write_size(out, "Anonymous:", of.anonymous)?;
    write_size(out, "KSM:", 0)?;
    write_size(out, "LazyFree:", of.lazy_free)?;
    write_size(out, "AnonHugePages:", of.huge)?;
    write_size(out, "ShmemPmdMapped:", 0)?;
    write_size(out, "FilePmdMapped:", 0)?;
    // One place less, as on Linux.
    writeln!(out, "Shared_Hugetlb: {:>8} kB", 0)?;
    writeln!(out, "Private_Hugetlb: {:>7} kB", 0)?;
    write_size(out, "Swap:", of.swap)?;
    write_size(out, "SwapPss:", of.share_swap.bytes())?;
    write_size(out, "Locked:", of.share_locked.bytes())
}

/// True when a fault, or the collapser, may make a huge page of a part of the mapping.
fn is_eligible<H: Host>(space: &AddressSpace<H>, mapping: &Mapping) -> bool {
    let range = mapping.range;
    let fits = range
        .start
        .checked_next_multiple_of(BLOCK_SIZE)
        .is_some_and(|start| start.checked_add(BLOCK_SIZE).is_some_and(|end| end <= range.end));
    fits && mapping.object == 0 && space.config().huge_pages.allow(mapping.flags)
}

/// The two letters of each attribute that Linux has, by the number of its bit.
const LETTERS: [&str; 43] = [
    "rd", "wr", "ex", "sh", "mr", "mw", "me", "ms", "gd", "um", "pf", "gu", "uw", "lo", "io", "sr", "rr",
    "dc", "de", "lf", "ac", "nr", "ht", "sf", "ar", "wf", "dd", "sd", "mm", "hg", "nh", "mg", "", "", "", "",
    "", "", "", "", "dp", "ui", "sl",
];

/// `VM_SHARED` and `VM_MAYSHARE`.
const SHARED_BIT: usize = 3;
const MAY_SHARE_BIT: usize = 7;

fn write_flags(out: &mut impl Write, flags: VmFlags) -> fmt::Result {
    out.write_str("VmFlags: ")?;
    for (bit, letters) in LETTERS.iter().enumerate() {
        let shared = flags.contains(VmFlags::SHARED);
        let set = match bit {
            // Where stores can never reach the object, Linux keeps only that the mapping asked to share.
            SHARED_BIT => shared && flags.contains(VmFlags::MAYWRITE),
            MAY_SHARE_BIT => shared,
            _ => flags.bits() >> bit & 1 != 0,
        };
        if set && !letters.is_empty() {
            write!(out, "{letters} ")?;
        }
    }
    out.write_char('\n')
}
