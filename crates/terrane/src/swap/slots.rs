//! The slots of a swap device: which are in use, by how many entries, and whose page is in memory meanwhile.
//!
//! # What it guarantees
//!
//! A slot is in use as long as an entry or a helper counts on it. *Entries* are page-table entries that say
//! [`Pte::Swap`](crate::page_table::Pte::Swap), and slots of a page cache; fork adds one, an unmap or a fault removes one.
//! *Helpers* are those who read or write the slot at the moment, holding nothing else.
//!
//! A slot may know the frame in which its page is (still, or again). It then holds a reference to the frame, and the frame's
//! [`spare`](crate::frame::FrameMeta::spare) names the slot. **A slot without entries knows no frame**: who takes the last entry away takes the
//! frame away in the same step. So the owner of such a frame, an anon_vma, is alive: the space with the entry uses it.
//!
//! # How
//!
//! All of this changes under the slot's lock, one word beside the counts, held for some dozen instructions in which nothing is waited
//! for. So it may be taken while a page-table entry is owned; it belongs to one page, as the entry does. Free slots are found by looking
//! at their states, from behind the one that the same CPU found last: what is swapped out together lies together, and each CPU begins in
//! a part of its own. There is no list, and no word that all faults write.
//!
//! # Who may break it
//!
//! Whoever changes an entry from or to `Swap` without counting, while owning the entry.
//!
//! Source for the idea of a cache between entries and device: Linux's swap cache (S. Tweedie, Linux 2.2).

use crate::addr::Frame;
use crate::error::OutOfMemory;
use crate::frame::zeroed::{Zeroable, ZeroedArray};
use crate::frame::{FrameFlags, Frames};
use crate::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, spin_loop};
use crate::sync::{CpuId, Tally};
use alloc::boxed::Box;
use alloc::vec::Vec;
use crossbeam_utils::CachePadded;

/// States of a slot.
const FREE: u32 = 0;
const USED: u32 = 1;
const LOCKED: u32 = 2;
/// No frame.
const NONE: u32 = u32::MAX;
/// No frame, and never one: the entry is a slot of a page cache, and the owner an object.
const OF_OBJECT: u32 = u32::MAX - 1;

/// What is known about one slot: 32 bytes. Everything but `state` changes under the lock.
pub(super) struct Slot {
    state: AtomicU32,
    entries: AtomicU32,
    helpers: AtomicU32,
    frame: AtomicU32,
    owner: AtomicPtr<()>,
    index: AtomicU64,
}

// SAFETY: atomics of integers and a pointer: zeros are a value, and nothing is dropped.
unsafe impl Zeroable for Slot {}

/// The slots of one device.
pub(super) struct Slots {
    /// The number of the first.
    base: u64,
    slots: ZeroedArray<Slot>,
    /// By CPU: where it looks next.
    cursors: Box<[CachePadded<AtomicUsize>]>,
    used: Tally,
}

#[cfg(terrane_watch)]
impl crate::names::Describe for Slots {
    fn describe(&self, names: &mut crate::names::Names) {
        names.leaf(self);
        names.field("cursors", &self.cursors);
        names.field("used", &self.used);
        let slots = self.slots.as_ptr_range();
        let item = |slot| alloc::format!("[{slot}]");
        names.array(slots.start.addr()..slots.end.addr(), size_of::<Slot>(), item, &[]);
    }
}

/// A slot, locked.
pub(super) struct Locked<'a> {
    slots: &'a Slots,
    slot: &'a Slot,
    cpu: CpuId,
}

impl Slots {
    /// `count` slots, numbered from `base` on.
    pub(super) fn try_new(base: u64, count: usize, cpus: usize) -> Result<Self, OutOfMemory> {
        let mut cursors = Vec::new();
        cursors.try_reserve_exact(cpus).map_err(|_| OutOfMemory)?;
        cursors.extend((0..cpus).map(|cpu| CachePadded::new(AtomicUsize::new(start_of(cpu, cpus, count)))));
        Ok(Self {
            base,
            slots: ZeroedArray::try_new(count)?,
            cursors: cursors.into_boxed_slice(),
            used: Tally::try_new()?,
        })
    }

    pub(super) fn total(&self) -> usize {
        self.slots.len()
    }

    /// Slots in use; exact at rest.
    pub(super) fn used(&self) -> usize {
        usize::try_from(self.used.sum()).unwrap_or(0)
    }

    /// Takes a free slot for the pinned CPU `cpu`, with one helper: the caller. `None` when there is none.
    pub(super) fn allocate(&self, cpu: CpuId) -> Option<u64> {
        let total = self.slots.len();
        let cursor = self.cursors.get(cpu.index())?;
        if self.used() >= total {
            return None;
        }
        let mut at = cursor.load(Ordering::Relaxed);
        for _ in 0..total {
            if at >= total {
                at = 0;
            }
            let slot = &self.slots[at];
            if slot.state.load(Ordering::Relaxed) == FREE
                && slot
                    .state
                    .compare_exchange(
                        FREE,
                        LOCKED,
                        mutant!("slot_taken_relaxed", Ordering::Acquire, Ordering::Relaxed),
                        Ordering::Relaxed,
                    )
                    .is_ok()
            {
                slot.entries.store(0, Ordering::Relaxed);
                slot.helpers.store(1, Ordering::Relaxed);
                slot.frame.store(NONE, Ordering::Relaxed);
                slot.state.store(USED, Ordering::Release);
                self.used.add(cpu, 1);
                cursor.store(at + 1, Ordering::Relaxed);
                return Some(self.base + at as u64);
            }
            at += 1;
        }
        None
    }

    #[inline]
    fn slot(&self, number: u64) -> Option<&Slot> {
        self.slots.get(usize::try_from(number.checked_sub(self.base)?).ok()?)
    }

    /// Locks a slot on which the caller counts.
    pub(super) fn lock(&self, number: u64, cpu: CpuId) -> Option<Locked<'_>> {
        let slot = self.slot(number)?;
        let order = mutant!("slot_locked_relaxed", Ordering::Acquire, Ordering::Relaxed);
        loop {
            match slot.state.compare_exchange_weak(USED, LOCKED, order, Ordering::Relaxed) {
                Ok(_) => return Some(Locked { slots: self, slot, cpu }),
                Err(FREE) => {
                    debug_assert!(false, "a swap slot is used that is free");
                    return None;
                }
                Err(_) => spin_loop(),
            }
        }
    }

    /// The frame that a slot knows, if it is in use.
    pub(super) fn peek(&self, number: u64, cpu: CpuId) -> Option<Frame> {
        self.lock_if_used(number, cpu)?.frame()
    }

    /// How many entries name a slot, if it is in use.
    pub(super) fn count(&self, number: u64, cpu: CpuId) -> Option<u32> {
        Some(self.lock_if_used(number, cpu)?.entries())
    }

    /// Locks a slot, if it is in use: for a caller that does not count on it.
    pub(super) fn lock_if_used(&self, number: u64, cpu: CpuId) -> Option<Locked<'_>> {
        let slot = self.slot(number)?;
        loop {
            match slot.state.compare_exchange_weak(USED, LOCKED, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Some(Locked { slots: self, slot, cpu }),
                Err(FREE) => return None,
                Err(_) => spin_loop(),
            }
        }
    }

    /// Locks the slot that `frame` names, if it does and the slot knows the frame. For a caller that counts on neither.
    pub(super) fn lock_of(&self, frames: &Frames, frame: Frame, cpu: CpuId) -> Option<Locked<'_>> {
        let number = frames.meta(frame).spare().checked_sub(1)?;
        let slot = self.slot(number)?;
        slot.state.compare_exchange(USED, LOCKED, Ordering::Acquire, Ordering::Relaxed).ok()?;
        let locked = Locked { slots: self, slot, cpu };
        (locked.frame() == Some(frame)).then_some(locked)
    }
}

fn start_of(cpu: usize, cpus: usize, count: usize) -> usize {
    count / cpus.max(1) * cpu
}

impl Locked<'_> {
    /// Its number.
    pub(super) fn number(&self) -> u64 {
        let first: *const Slot = self.slots.slots.as_ptr();
        self.slots.base + ((core::ptr::from_ref(self.slot).addr() - first.addr()) / size_of::<Slot>()) as u64
    }

    pub(super) fn entries(&self) -> u32 {
        self.slot.entries.load(Ordering::Relaxed)
    }

    pub(super) fn frame(&self) -> Option<Frame> {
        let frame = self.slot.frame.load(Ordering::Relaxed);
        (frame < OF_OBJECT).then_some(Frame(frame))
    }

    /// True when somebody reads or writes it at the moment.
    pub(super) fn has_helpers(&self) -> bool {
        self.slot.helpers.load(Ordering::Relaxed) > 0
    }

    /// Remembers that the page is one of an object, and which.
    pub(super) fn set_object(&self, object: *mut (), index: u64) {
        self.set_identity(object, index);
        self.slot.frame.store(OF_OBJECT, Ordering::Relaxed);
    }

    /// The object and the number of the page there, if it is one of an object.
    pub(super) fn object(&self) -> Option<(*mut (), u64)> {
        let is = self.slot.frame.load(Ordering::Relaxed) == OF_OBJECT;
        is.then(|| (self.slot.owner.load(Ordering::Relaxed), self.slot.index.load(Ordering::Relaxed)))
    }

    /// One entry more. False at four billion.
    pub(super) fn add_entry(&self) -> bool {
        let Some(more) = self.entries().checked_add(1) else { return false };
        self.slot.entries.store(more, Ordering::Relaxed);
        true
    }

    /// One entry less; the last one returns the frame that the slot knows, with its reference.
    pub(super) fn remove_entry(&self, frames: &Frames) -> Option<Frame> {
        debug_assert!(self.entries() > 0, "an entry too many is removed");
        let left = self.entries().saturating_sub(1);
        self.slot.entries.store(left, Ordering::Relaxed);
        if left == 0 { self.forget_frame(frames) } else { None }
    }

    pub(super) fn add_helper(&self) {
        self.slot.helpers.store(self.slot.helpers.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    pub(super) fn remove_helper(&self) {
        debug_assert!(self.slot.helpers.load(Ordering::Relaxed) > 0);
        self.slot
            .helpers
            .store(self.slot.helpers.load(Ordering::Relaxed).saturating_sub(1), Ordering::Relaxed);
    }

    /// Remembers whose page it is: its anon_vma and its number.
    pub(super) fn set_identity(&self, owner: *mut (), index: u64) {
        self.slot.owner.store(owner, Ordering::Relaxed);
        self.slot.index.store(index, Ordering::Relaxed);
    }

    /// Makes `frame`, of which the caller gives one reference, the one that the slot knows. There is an entry.
    pub(super) fn know_frame(&self, frames: &Frames, frame: Frame) {
        debug_assert!(self.frame().is_none() && self.entries() > 0);
        frames.meta(frame).set_spare(self.number() + 1);
        self.slot.frame.store(frame.0, Ordering::Relaxed);
    }

    /// The same for a frame just filled, which nobody else has: it becomes a private page, with `flags` besides.
    pub(super) fn know_fresh_frame(&self, frames: &Frames, frame: Frame, flags: FrameFlags) {
        let meta = frames.meta(frame);
        meta.set_owner(self.slot.owner.load(Ordering::Relaxed));
        meta.set_index(self.slot.index.load(Ordering::Relaxed));
        meta.set_spare(self.number() + 1);
        // Last: whoever sees the flag trusts the owner. To be used at once: not to be swapped out before.
        meta.init_flags(flags | FrameFlags::ANON | FrameFlags::REFERENCED);
        self.slot.frame.store(frame.0, Ordering::Relaxed);
    }

    /// Knows no frame any more; the reference goes to the caller.
    pub(super) fn forget_frame(&self, frames: &Frames) -> Option<Frame> {
        let frame = self.frame()?;
        frames.meta(frame).set_spare(0);
        self.slot.frame.store(NONE, Ordering::Relaxed);
        Some(frame)
    }
}

impl Drop for Locked<'_> {
    /// Unlocks it, and frees it when nobody counts on it any more.
    fn drop(&mut self) {
        let used = self.entries() > 0 || self.slot.helpers.load(Ordering::Relaxed) > 0;
        debug_assert!(used || self.frame().is_none());
        if !used {
            self.slots.used.add(self.cpu, -1);
        }
        let order = mutant!("slot_unlocked_relaxed", Ordering::Release, Ordering::Relaxed);
        self.slot.state.store(if used { USED } else { FREE }, order);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_handed_out_once_and_come_back() {
        let slots = Slots::try_new(0, 600, 3).unwrap();
        let mut seen = std::collections::BTreeSet::new();
        for n in 0..600 {
            assert!(seen.insert(slots.allocate(CpuId(n % 3)).unwrap()));
        }
        assert_eq!((slots.allocate(CpuId(0)), slots.used(), slots.total()), (None, 600, 600));
        for number in [5, 599, 300] {
            let locked = slots.lock(number, CpuId(1)).unwrap();
            assert_eq!(locked.number(), number);
            assert!(locked.add_entry());
            locked.remove_helper();
        }
        assert_eq!(slots.allocate(CpuId(0)), None);
        let frames = Frames::try_new(crate::host::FrameRange { first: Frame(1), count: 1 }, 1).unwrap();
        for number in [5, 599, 300] {
            assert_eq!(slots.lock(number, CpuId(2)).unwrap().remove_entry(&frames), None);
        }
        assert_eq!(slots.used(), 597);
        let again: std::collections::BTreeSet<_> =
            (0..3).map(|_| slots.allocate(CpuId(0)).unwrap()).collect();
        assert_eq!(again, [5, 300, 599].into());
        assert_eq!(slots.allocate(CpuId(0)), None);
    }

    #[test]
    fn threads_share_the_slots_and_lose_none() {
        let slots = Slots::try_new(1 << 32, 300, 4).unwrap();
        let frames = Frames::try_new(crate::host::FrameRange { first: Frame(1), count: 1 }, 1).unwrap();
        std::thread::scope(|scope| {
            for cpu in 0..4 {
                let (slots, frames) = (&slots, &frames);
                scope.spawn(move || {
                    let mut mine = Vec::new();
                    for round in 0..2000u32 {
                        if round % 3 != 2 {
                            if let Some(number) = slots.allocate(CpuId(cpu)) {
                                let locked = slots.lock(number, CpuId(cpu)).unwrap();
                                assert_eq!(locked.entries(), 0);
                                assert!(locked.add_entry());
                                locked.remove_helper();
                                mine.push(number);
                            }
                        } else if let Some(number) = mine.pop() {
                            assert_eq!(slots.lock(number, CpuId(cpu)).unwrap().remove_entry(frames), None);
                        }
                    }
                    for number in mine {
                        slots.lock(number, CpuId(cpu)).unwrap().remove_entry(frames);
                    }
                });
            }
        });
        assert_eq!(slots.used(), 0);
    }
}
