//! A stretch of the address space for each CPU (placement that lets CPUs map and unmap side by side).
//!
//! From above, as Linux places, all CPUs meet at the same spot: the highest gap. They then lock the same range, change the
//! same leaf of the index and the same page tables. With stretches each CPU places its small mappings in addresses of its
//! own, from above within the stretch, so what it frees it uses again. A stretch is aligned to its size, and a leaf boundary
//! of the index is kept at its ends. It is a habit, not a right: anybody may map there at a fixed address, or when nothing
//! else is left.
//!
//! When a stretch has no room its CPU takes another. When there is no other (an aligned gap as large as a stretch that no CPU
//! has), the whole space is searched as without stretches: no address is out of reach.
//!
//! Sources: per-CPU arenas of allocators (E. Berger et al., "Hoard", 2000); A. Clements et al., "RadixVM" (2013) for
//! disjoint ranges as what scales.

use super::SpaceConfig;
use crate::addr::AddrRange;
use crate::error::OutOfMemory;
use crate::host::Host;
use crate::index::{Direction, GapRequest};
use crate::machine::Cpu;
use crate::mm::{Mm, STACK_GUARD_GAP};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{CpuId, Pin};
use alloc::boxed::Box;
use alloc::vec::Vec;
use crossbeam_utils::CachePadded;

/// The largest stretch, in bytes: two of them do not share a line of entries in the level of page tables whose entries cover
/// 1 GiB.
const LARGEST: u64 = 64 << 30;
/// The smallest: what one page table covers.
const SMALLEST: u64 = 2 << 20;
/// Bytes left free at the end of a large stretch.
const MARGIN: u64 = STACK_GUARD_GAP.next_multiple_of(SMALLEST);
/// Stretches for each CPU that the space has room for, at least.
const A_CPU: u64 = 8;
/// What is small: this part of a stretch.
const SMALL: u64 = 16;

/// The stretches of one space.
pub(super) struct Stretches<H: Host> {
    size: u64,
    /// The first address of each CPU's stretch; 0 for none.
    starts: Box<[CachePadded<AtomicU64>]>,
    /// Held while a stretch is taken.
    taking: lock_api::Mutex<H::Mutex, ()>,
}

impl<H: Host> Stretches<H> {
    /// No stretches yet, for a machine of `cpus` CPUs. `None` when the space is too small for any.
    pub(super) fn try_new(config: &SpaceConfig, cpus: usize) -> Result<Option<Self>, OutOfMemory> {
        let share = config.range.len() / (A_CPU * cpus.max(1) as u64);
        let Some(log) = share.checked_ilog2().filter(|&log| 1 << log >= SMALLEST) else { return Ok(None) };
        let mut starts = Vec::new();
        starts.try_reserve_exact(cpus).map_err(|_| OutOfMemory)?;
        starts.extend((0..cpus).map(|_| CachePadded::new(AtomicU64::new(0))));
        Ok(Some(Self {
            size: (1 << log).min(LARGEST),
            starts: starts.into_boxed_slice(),
            taking: lock_api::Mutex::new(()),
        }))
    }

    /// The stretches of a parent, for its child.
    pub(super) fn copy_from(&self, parent: &Self) {
        for (mine, theirs) in self.starts.iter().zip(&parent.starts) {
            mine.store(theirs.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    fn of(&self, cpu: CpuId) -> Option<AddrRange> {
        let start = self.starts.get(cpu.index())?.load(Ordering::Relaxed);
        (start != 0).then(|| AddrRange::new(start, start + self.size))
    }

    /// Free addresses for `len` bytes in the CPU's stretch, or in another that it takes; `None` when they are to be found
    /// elsewhere. `search` searches a range. Not while pinned.
    pub(super) fn find(
        &self,
        mm: &Mm<H>,
        cpu: &Cpu<H>,
        len: u64,
        search: impl Fn(&Pin<'_>, AddrRange) -> Option<u64>,
    ) -> Option<u64> {
        if len > self.size / SMALL {
            return None;
        }
        if let Some(stretch) = self.of(cpu.id())
            && let Some(addr) = search(&cpu.pin(), self.room(stretch))
        {
            return Some(addr);
        }
        let stretch = self.take(mm, cpu)?;
        search(&cpu.pin(), self.room(stretch))
    }

    /// Free addresses for `len` bytes in the CPU's stretch, if it has one and there is room. May be called while pinned.
    #[inline]
    pub(super) fn find_in_own(
        &self,
        cpu: CpuId,
        len: u64,
        search: impl FnOnce(AddrRange) -> Option<u64>,
    ) -> Option<u64> {
        if len > self.size / SMALL {
            return None;
        }
        search(self.room(self.of(cpu)?))
    }

    /// Where in a stretch to place. Large ones leave the guard gap of a stack free at their end, so that no search needs to
    /// look what begins behind it, which another CPU may be changing; and a whole page table, so that the first mappings fill another.
    fn room(&self, stretch: AddrRange) -> AddrRange {
        let margin = if self.size / MARGIN > SMALL { MARGIN } else { 0 };
        AddrRange::new(stretch.start, stretch.end - margin)
    }

    /// Takes the highest free stretch that no CPU has.
    #[cold]
    fn take(&self, mm: &Mm<H>, cpu: &Cpu<H>) -> Option<AddrRange> {
        let limits = mm.index.limits();
        let _one_at_a_time = self.taking.lock();
        let mut high = limits.end;
        let start = loop {
            let request = GapRequest {
                length: self.size,
                low: limits.start.max(1),
                high,
                direction: Direction::TopDown,
                align_mask: self.size - 1,
                align_offset: 0,
            };
            let start = mm.index.search(&cpu.pin(), &request)?;
            if !self.starts.iter().any(|taken| taken.load(Ordering::Relaxed) == start) {
                break start;
            }
            high = start;
        };
        let mut nodes = mm.take_reserve(cpu);
        {
            let pin = cpu.pin();
            // Without memory for it the CPU shares a leaf with another: slower, and nothing else.
            let _ = mm.index.fence(&mut nodes, &pin, start);
            let _ = mm.index.fence(&mut nodes, &pin, start + self.size);
            // And one where the room ends: what is free behind it is not to be looked at by every search.
            let _ = mm.index.fence(&mut nodes, &pin, self.room(AddrRange::new(start, start + self.size)).end);
        }
        mm.give_reserve(cpu, nodes);
        self.starts.get(cpu.id().index())?.store(start, Ordering::Relaxed);
        Some(AddrRange::new(start, start + self.size))
    }
}
