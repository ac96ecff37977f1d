//! Limbo: frames that have been given up but may still be in use for a moment.
//!
//! A frame that was mapped can be reached by an old translation until a shoot-down has passed, and by a pointer (a
//! table that is being walked, a page found in a cache) until the epoch has moved on. Who gives it up does not wait for that:
//! it defers the frame with a [`Grace`], and [`Frames::settle`] frees it later.
//!
//! # How
//!
//! Each CPU has a queue of batches, in the order in which it deferred them; a batch is a
//! [`FrameList`] with one grace. Nothing is allocated: the queue's links and the grace are in the metadata of each
//! batch's first frame, in `owner`, `index` and `spare`. `references` and `flags` stay as they are, so that
//! `references`, if 0, still turns down whoever knows the frame by an old number.
//!
//! A batch remembers which CPU deferred it, because a ticket means something only together with the CPU that
//! made the shoot-down; so the batches of a CPU that has left can be moved to another
//! ([`take_over`](Frames::take_over)).
//!
//! # The epoch in 15 bits
//!
//! 24 bytes hold two links, a ticket and, in the size of a pointer of 32 bits, the CPU and the epoch. Of the epoch 15
//! bits are kept; the rest is taken from the present: of all epochs up to now with these bits, the latest. That
//! is never earlier than the true one, so nothing is freed early; and it is later only after 32768 epochs
//! in limbo, and then by so little that the batch waits for two more advances.
//!
//! # Who may break it
//!
//! Whoever defers a frame that is still reachable by *new* means: an entry that still maps it, a table still
//! linked. The grace begins after the unlinking.

use super::frames::Frames;
use super::list::{FrameList, NO_FRAME};
use super::meta::FrameMeta;
use crate::addr::Frame;
use crate::host::Ticket;
use crate::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};
use crate::sync::{CpuId, Pin};
use core::ptr;

/// What must be over before deferred frames can be used again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grace {
    /// If set, what [`Epoch::now`](crate::sync::Epoch::now) gave after the frames had been unlinked: all pins that
    /// may have seen them must end.
    pub epoch: Option<u64>,
    /// The shoot-down, by the CPU that defers, that makes others forget translations of the frames;
    /// [`Ticket::PASSED`] when there were none.
    pub ticket: Ticket,
}

/// The queue of a CPU. Only the holder of the CPU's pin changes it.
pub(super) struct Limbo {
    /// First frames of the first and the last batch.
    head: AtomicU32,
    tail: AtomicU32,
    /// Frames in all batches.
    count: AtomicUsize,
}

impl Limbo {
    pub(super) fn new() -> Self {
        Self { head: AtomicU32::new(NO_FRAME), tail: AtomicU32::new(NO_FRAME), count: AtomicUsize::new(0) }
    }

    fn front(&self) -> Option<Frame> {
        let head = self.head.load(Relaxed);
        (head != NO_FRAME).then_some(Frame(head))
    }

    /// Puts batches, linked from `first` to `last`, at the end.
    fn append(&self, frames: &Frames, first: u32, last: u32, count: usize) {
        match self.tail.load(Relaxed) {
            NO_FRAME => self.head.store(first, Relaxed),
            tail => {
                let meta = frames.meta(Frame(tail));
                set_links(meta, links(meta).0, first);
            }
        }
        self.tail.store(last, Relaxed);
        self.count.store(self.count.load(Relaxed) + count, Relaxed);
    }
}

// `index` of a batch's first frame: the next frame of the batch, and the first frame of the next batch.

fn links(meta: &FrameMeta) -> (u32, u32) {
    let index = meta.index();
    (index as u32, (index >> 32) as u32)
}

fn set_links(meta: &FrameMeta, frame: u32, batch: u32) {
    meta.set_index(u64::from(batch) << 32 | u64::from(frame));
}

// `owner` of a batch's first frame: the CPU in the low 16 bits, whether there is an epoch in the next, then
// the low bits of the epoch.

const EPOCH_BITS: u32 = 15;
const HAS_EPOCH: usize = 1 << 16;
const EPOCH_SHIFT: u32 = 17;

fn set_grace(meta: &FrameMeta, cpu: CpuId, grace: Grace) {
    let epoch = match grace.epoch {
        Some(stamp) => (stamp as usize % (1 << EPOCH_BITS)) << EPOCH_SHIFT | HAS_EPOCH,
        None => 0,
    };
    meta.set_owner(ptr::without_provenance_mut(epoch | cpu.index()));
    meta.set_spare(grace.ticket.0);
}

/// The CPU and the grace of a batch; `now` is the epoch at this moment or before, but after the batch was deferred.
fn grace(meta: &FrameMeta, now: u64) -> (CpuId, Grace) {
    let word = meta.owner().addr();
    let epoch = (word & HAS_EPOCH != 0).then(|| {
        let age = now.wrapping_sub((word >> EPOCH_SHIFT) as u64) % (1 << EPOCH_BITS);
        now.saturating_sub(age)
    });
    (CpuId(word as u32 & 0xffff), Grace { epoch, ticket: Ticket(meta.spare()) })
}

impl Frames {
    /// Gives up frames that others may still use until `grace` is over. O(1), allocates nothing.
    pub fn defer(&self, pin: &Pin<'_>, frames: FrameList, grace: Grace) {
        let Some((first, last, count)) = frames.into_parts() else { return };
        self.meta(last).set_index(NO_FRAME.into());
        let meta = self.meta(first);
        set_links(meta, links(meta).0, NO_FRAME);
        set_grace(meta, pin.cpu(), grace);
        self.of(pin.cpu()).limbo.append(self, first.0, first.0, count);
    }

    /// Frees what the pinned CPU has deferred and whose grace is over, oldest first, up to the first batch
    /// that must still wait; returns how many frames. `has_passed` is the host's
    /// [`Tlb::has_passed`](crate::host::Tlb::has_passed). Does not move the epoch; O(1) when nothing can be freed.
    pub fn settle(&self, pin: &Pin<'_>, has_passed: &dyn Fn(CpuId, Ticket) -> bool) -> usize {
        let limbo = &self.of(pin.cpu()).limbo;
        let mut freed = 0;
        while let Some(first) = limbo.front() {
            let meta = self.meta(first);
            let (cpu, grace) = grace(meta, pin.epoch().now());
            let over = mutant!(
                "limbo_ignores_epoch",
                grace.epoch.is_none_or(|stamp| pin.epoch().has_passed(stamp)),
                true
            );
            let passed = grace.ticket == Ticket::PASSED || has_passed(cpu, grace.ticket);
            if !over || mutant!("limbo_ignores_ticket", !passed, false) {
                break;
            }
            let (mut next, batch) = links(meta);
            limbo.head.store(batch, Relaxed);
            if batch == NO_FRAME {
                limbo.tail.store(NO_FRAME, Relaxed);
            }
            let mut count = self.free_listed(pin, first);
            while next != NO_FRAME {
                let frame = Frame(next);
                next = self.meta(frame).index() as u32;
                count += self.free_listed(pin, frame);
            }
            limbo.count.store(limbo.count.load(Relaxed) - count, Relaxed);
            freed += count;
        }
        freed
    }

    /// What the first batch of the pinned CPU waits for; `None` when nothing is deferred. The epoch may be
    /// given later than it was, never earlier.
    pub fn oldest_deferred(&self, pin: &Pin<'_>) -> Option<Grace> {
        self.oldest_deferred_by(pin).map(|(_, grace)| grace)
    }

    /// As [`oldest_deferred`](Self::oldest_deferred), with the CPU whose ticket it is: another than the pinned one
    /// after [`take_over`](Self::take_over).
    pub fn oldest_deferred_by(&self, pin: &Pin<'_>) -> Option<(CpuId, Grace)> {
        let first = self.of(pin.cpu()).limbo.front()?;
        Some(grace(self.meta(first), pin.epoch().now()))
    }

    /// Moves what the CPU `from` has deferred to the end of the pinned CPU's queue, in O(1), and returns how many
    /// frames: for a CPU that has left and will not settle them itself. `None`, and nothing done, while `from` is
    /// pinned.
    pub fn take_over(&self, pin: &Pin<'_>, from: CpuId) -> Option<usize> {
        if from == pin.cpu() || self.deferred(from) == 0 {
            return Some(0);
        }
        let _other = pin.epoch().try_pin_other(from)?;
        let limbo = &self.of(from).limbo;
        let count = limbo.count.load(Relaxed);
        if count != 0 {
            let (head, tail) = (limbo.head.load(Relaxed), limbo.tail.load(Relaxed));
            self.of(pin.cpu()).limbo.append(self, head, tail, count);
            limbo.head.store(NO_FRAME, Relaxed);
            limbo.tail.store(NO_FRAME, Relaxed);
            limbo.count.store(0, Relaxed);
        }
        Some(count)
    }

    /// Frames that one CPU has deferred, and references to shared frames that it gives back late; 0 for a CPU that does not exist. Exact
    /// at rest.
    pub fn deferred(&self, cpu: CpuId) -> usize {
        self.try_of(cpu).map_or(0, |cpu| cpu.limbo.count.load(Relaxed) + cpu.late.len())
    }

    /// The same of all CPUs. Exact at rest. O(CPUs).
    pub fn deferred_frames(&self) -> usize {
        self.of_all().map(|cpu| cpu.limbo.count.load(Relaxed) + cpu.late.len()).sum()
    }
}

describe!([] Limbo { head, tail, count });
