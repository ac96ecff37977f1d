//! Filling a range in as faults would, many pages at a time (requirement D1).
//!
//! A batch is what one attempt does: up to a page table's span in one VMA, found once, walked once. Files are mapped by
//! [`file::map_batch`], private memory page by page into the same table; what is not simple (a page to be read, a
//! page to be copied) is done as a single fault within the attempt. Nobody is excluded: an attempt is speculative
//! where faults are, and holds the batch's range, shared, where they are not.

use super::block::{self, Above};
use super::{Attempt, Course, Stop, file, handler};
use crate::addr::{AddrRange, PAGE_SHIFT, PAGE_SIZE, TABLE_ENTRIES};
use crate::error::FaultError;
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::Mm;
use crate::page_table::{Pte, PteFlags};
use crate::stats::Counter;
use crate::vma::{Access, VmFlags};

/// Bytes that one leaf table maps.
const TABLE_SPAN: u64 = PAGE_SIZE * TABLE_ENTRIES as u64;

/// Pages of private memory made by one attempt at most: a pin is to be short, and zeroing 64 pages takes some 5 us.
const PINNED_PAGES: u64 = 64;

/// Maps every page of `range` for `access`. Blocks where pages must be read; not while pinned.
///
/// # Errors
/// The first page's that cannot be mapped, with its address; the pages before it are mapped.
pub(crate) fn populate<H: Host>(
    mm: &Mm<H>,
    cpu: &Cpu<H>,
    range: AddrRange,
    access: Access,
) -> Result<(), (u64, FaultError)> {
    let mut at = range.start;
    while at < range.end {
        let end = range.end.min((at & !(TABLE_SPAN - 1)).saturating_add(TABLE_SPAN));
        let mut course = Course::quiet(mm, at, end);
        at = loop {
            match course.attempt(cpu, |attempt| batch(attempt, at, end, access)) {
                Ok(next) => break next,
                Err(stop) => course.recover(cpu, stop).map_err(|error| (at, error))?,
            }
        };
    }
    Ok(())
}

/// Maps pages from `start` on, which the attempt's VMA contains, up to `end` (within one table) or less. Returns where
/// it stopped: beyond `start`, unless it fails.
fn batch<H: Host>(attempt: &Attempt<'_, H>, start: u64, end: u64, access: Access) -> Result<u64, Stop<H>> {
    let end = end.min(attempt.seen.range.end);
    let flags = attempt.seen.flags;
    // Device memory is filled in by faults only.
    if !flags.allows(access) || flags.intersects(VmFlags::IO.union(VmFlags::PFNMAP)) {
        return Err(Stop::Fail(FaultError::NotAllowed));
    }
    let ram = &attempt.ram;
    let page_table = &attempt.mm.page_table;
    let table = match page_table.leaf_table(ram, start) {
        Some(table) => table,
        None => match block::above(attempt, start, access)? {
            Above::Slot(_) => page_table.leaf_table(ram, start).ok_or(Stop::Again)?,
            // All of it serves: what one of its pages allows, all allow.
            Above::Block(_) => return Ok(end),
        },
    };
    let by_window = attempt
        .vma
        .object()
        .filter(|object| access != Access::Write || file::writable_at_once(attempt, object))
        .filter(|_| !flags.intersects(file::NOT_AROUND));
    let mut at = start;
    let mut done = 0;
    let mut single = 0;
    let result = loop {
        if at >= end || single >= PINNED_PAGES {
            break Ok(at);
        }
        if let Some(object) = by_window {
            let stop = end.min(at + file::BATCH as u64 * PAGE_SIZE);
            done += file::map_batch(attempt, object, table, at, stop, None);
        }
        // What the window left: pages that are not there yet, and all pages of private memory.
        let stop =
            if by_window.is_some() { end.min(at + file::BATCH as u64 * PAGE_SIZE) } else { at + PAGE_SIZE };
        while at < stop {
            let slot = &table[(at >> PAGE_SHIFT) as usize % TABLE_ENTRIES];
            let there = match Pte::decode::<H::Format>(slot.load()) {
                Pte::Page { flags, .. } => access != Access::Write || flags.contains(PteFlags::WRITE),
                _ => false,
            };
            if !there {
                if let Err(stop) = handler::handle(attempt, at, access) {
                    // What was done stays done; the rest is met again as the first page of the next attempt.
                    ram.stats.add(ram.pin, Counter::PgPopulate, done);
                    // But who holds something for the next attempt is to get there.
                    let holds = matches!(stop, Stop::GiveBack(_) | Stop::SwapIn(_));
                    return if at > start && !holds { Ok(at) } else { Err(stop) };
                }
                done += 1;
                single += 1;
            }
            at += PAGE_SIZE;
        }
    };
    ram.stats.add(ram.pin, Counter::PgPopulate, done);
    result
}
