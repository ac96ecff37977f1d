//! The kernel's own threads: what `kswapd` and `khugepaged` are in Linux.
//!
//! * The *reclaimer* keeps some frames free, so that faults seldom have to look for memory themselves. Whoever finds none does so all the same:
//!   the reclaimer may be late. It looks often while memory is nearly short, and seldom otherwise.
//! * The *collapser* goes round the spaces of all processes and makes huge pages of small ones, where that was asked for (`MADV_HUGEPAGE`) or is the policy.
//!
//! They are threads of a process with number 0 that is in no table: it has no program, no space and no files, gets no signals, and nobody waits for it. They never
//! return to user mode, and so are not preempted; what they do at a time is bounded by a budget.
//!
//! A space that the collapser works on is owned by it meanwhile: should its process end, the collapser is the one that frees it.

use super::process::{self, Process};
use super::signal::Actions;
use super::thread::{Private, Thread};
use super::tree::tree;
use super::{sched, wait};
use crate::arch::{self, interrupts};
use crate::errno::Errno;
use crate::{log, mm, options};
use alloc::sync::Arc;
use core::mem;
use terrane::reclaim;
use terrane::sync::Shared;

/// Between looks of the reclaimer, in ns: while memory is nearly short, and else. At the speed of emulation a processor takes some 20 MiB in
/// the longer time.
const NEAR: u64 = 5_000_000;
const FAR: u64 = 100_000_000;
/// Between rounds of the collapser, as Linux's `scan_sleep_millisecs`, if the command line does not say otherwise (`collapse-every=MS`).
const COLLAPSE_EVERY: u64 = 10_000_000_000;
/// VMAs and page tables that the collapser looks at in a space in a round: Linux's `pages_to_scan`, in tables.
const BUDGET: usize = 8;

/// Starts them. Without memory for them the kernel does without.
pub fn start() {
    if let Err(errno) = try_start() {
        log!("no threads of the kernel's own: error {}", errno.0);
    }
}

fn try_start() -> Result<(), Errno> {
    let actions = Shared::try_new(Actions::new())?;
    let process = Process::try_new(0, None, actions, process::default_limits())?;
    for entry in [reclaimer as extern "C" fn(usize) -> !, collapser] {
        let thread =
            Thread::try_new(0, process.clone(), Private::default(), arch::FpuState::try_new()?, entry)?;
        sched::start(&thread);
        // It never ends, and the scheduler's queues do not own it.
        mem::forget(thread);
    }
    Ok(())
}

extern "C" fn reclaimer(_: usize) -> ! {
    sched::finish();
    interrupts::enable();
    let frames = mm::machine().frames();
    let total = frames.total();
    let (low, high) = ((total / 64).max(16), (total / 32).max(32));
    loop {
        mm::with_cpu(|cpu| reclaim::balance(cpu, low, high));
        pause(if frames.free_frames() < 4 * high { NEAR } else { FAR });
    }
}

extern "C" fn collapser(_: usize) -> ! {
    sched::finish();
    interrupts::enable();
    let every = options::value("collapse-every").and_then(|text| text.parse::<u64>().ok());
    let every = every.map_or(COLLAPSE_EVERY, |ms| ms.saturating_mul(1_000_000));
    loop {
        pause(every);
        let mut last = 0;
        while let Some((id, space)) = space_after(last) {
            mm::with_cpu(|cpu| space.collapse_step(cpu, BUDGET));
            last = id;
        }
    }
}

/// The space of the process with the least number above `last` that has one.
fn space_after(last: u32) -> Option<(u32, Arc<mm::Space>)> {
    let tree = tree();
    let spaces = tree.processes().iter().filter(|node| node.process.id() > last);
    let spaces = spaces.filter_map(|node| Some((node.process.id(), node.process.space()?)));
    // Of those that are not the one the references are given back at once; each process keeps its own, under the tree's lock.
    spaces.min_by_key(|&(id, _)| id)
}

fn pause(ns: u64) {
    // No signal comes.
    let _ = wait::sleep_until(arch::now() + ns);
}
