//! Calls that change the layout of the address space.

use super::memory::{Memory, page_size};
use crate::failure::Failure;
use crate::measure::Sample;
use crate::measure::plan::Runner;
use crate::measure::threads::together;
use crate::measure::timing::per_op;
use rustix::mm::{MprotectFlags, ProtFlags};
use std::time::Duration;

/// Maps a page and unmaps it untouched.
pub fn churn() -> Result<(), Failure> {
    // Its protection is that of no other mapping here, so that it is a mapping of its own, and never merged.
    // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing, and goes at once.
    let result = unsafe {
        rustix::mm::mmap_anonymous(
            std::ptr::null_mut(),
            page_size(),
            ProtFlags::WRITE,
            rustix::mm::MapFlags::PRIVATE,
        )
        .and_then(|address| rustix::mm::munmap(address, page_size()))
    };
    result.map_err(|e| Failure::broken("cannot map and unmap a page", e))
}

/// Repeats `call` on a pinned thread of its own; nanoseconds for each.
fn repeat(time: Duration, call: impl Fn() -> Result<(), Failure> + Sync) -> Result<Sample, Failure> {
    let times = together(
        1,
        1,
        |_| Ok(()),
        |_, ()| {
            let mut result = Ok(());
            let ns = per_op(time, |n| {
                for _ in 0..n {
                    if let Err(failure) = call() {
                        result = Err(failure);
                    }
                }
            });
            result.map(|()| ns)
        },
    )?;
    Ok(Sample::from(times[0]))
}

/// How many mappings the kernel grants a process; without limit if it does not say.
fn mapping_limit() -> usize {
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
    text.trim().parse().unwrap_or(usize::MAX)
}

/// mmap and munmap of a page among `mappings` others.
pub fn map_unmap(mappings: usize) -> Result<Runner<'static>, Failure> {
    // The process has some of its own: code, libraries, stacks.
    const OWN: usize = 200;
    let limit = mapping_limit();
    if mappings.saturating_add(OWN) > limit {
        return Err(Failure::Unsupported(format!("this kernel grants a process {limit} mappings")));
    }
    // Protections alternate so that neighbours do not merge.
    let others: Vec<Memory> = (0..mappings)
        .map(|index| {
            Memory::anonymous(page_size(), if index % 2 == 0 { ProtFlags::READ } else { ProtFlags::empty() })
        })
        .collect::<Result<_, _>>()?;
    Ok(Box::new(move |time| {
        let _alive = &others;
        repeat(time, churn)
    }))
}

/// Two mprotect calls on a page, there and back.
pub fn protect(split: bool) -> Result<Runner<'static>, Failure> {
    // As in the reply of source C: 512 pages, the page, 512 pages, which the kernel holds as one mapping.
    let (before, prot) = if split { (512, ProtFlags::READ) } else { (1, ProtFlags::empty()) };
    let (memory, offset) = (Memory::anonymous((2 * before + 1) * page_size(), prot)?, before * page_size());
    let (there, back) = if split {
        (MprotectFlags::empty(), MprotectFlags::READ)
    } else {
        // Never what its neighbours have, so nothing splits or merges.
        (MprotectFlags::READ, MprotectFlags::READ | MprotectFlags::WRITE)
    };
    memory.protect(offset, page_size(), back)?;
    Ok(Box::new(move |time| {
        repeat(time, || {
            memory.protect(offset, page_size(), there)?;
            memory.protect(offset, page_size(), back)
        })
    }))
}

/// Grows the heap by 128 KiB and shrinks it again.
pub fn brk() -> Result<Runner<'static>, Failure> {
    const STEP: usize = 128 << 10;
    // The raw call, because the C library's keeps an account of its own, which we leave as it was.
    // SAFETY: asking for the end of the heap at 0 changes nothing.
    let brk = |end: usize| unsafe { libc::syscall(libc::SYS_brk, end) } as usize;
    Ok(Box::new(move |time| {
        repeat(time, || {
            // Asked for in every turn: an allocation between the samples may have moved it. Between the three
            // calls there is none, and what is beyond the present end belongs to nobody.
            let end = brk(0);
            if brk(end + STEP) == end + STEP && brk(end) == end {
                return Ok(());
            }
            Err(Failure::Broken("cannot grow the heap".into()))
        })
    }))
}
