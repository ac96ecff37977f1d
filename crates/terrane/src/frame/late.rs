//! References that are given back late: of pages that others map too, and that a processor may still be reading through a
//! translation that has been taken away.
//!
//! # What it guarantees
//!
//! The last space that maps a private page may store to it in place, and its frame is free when that space leaves it. So a copy-on-write
//! counts as an owner of the old page until the shoot-down of its entry has passed: nobody reads through it what another space stores
//! afterwards, nor what the frame's next owner does.
//!
//! # How
//!
//! A frame that has other owners can be in no list, since each of them may part with it at the same time. So each CPU has
//! a short queue of its own, of frames and tickets, in the order of the shoot-downs. Only the holder of the CPU's pin changes it. It is settled with
//! limbo, and whenever a reference is added. When it is full, a copy-on-write starts over until a shoot-down has passed.
//!
//! Calls that empty many entries wait for their shoot-downs instead, once for many pages.

use super::frames::Frames;
use crate::addr::Frame;
use crate::host::Ticket;
use crate::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use crate::sync::{CpuId, Pin};
use core::array;

/// References that a CPU may have waiting.
const ROOM: usize = 16;

/// The queue of a CPU.
pub(super) struct Late {
    frames: [AtomicU32; ROOM],
    tickets: [AtomicU64; ROOM],
    /// How many have ever been settled, and added.
    settled: AtomicUsize,
    added: AtomicUsize,
}

impl Late {
    pub(super) fn new() -> Self {
        Self {
            frames: array::from_fn(|_| AtomicU32::new(0)),
            tickets: array::from_fn(|_| AtomicU64::new(0)),
            settled: AtomicUsize::new(0),
            added: AtomicUsize::new(0),
        }
    }

    /// How many wait.
    pub(super) fn len(&self) -> usize {
        self.added.load(Relaxed).wrapping_sub(self.settled.load(Relaxed))
    }

    fn ticket(&self, number: usize) -> Ticket {
        Ticket(self.tickets[number % ROOM].load(Relaxed))
    }

    /// What the last waits for.
    pub(super) fn last(&self) -> Option<Ticket> {
        (self.len() > 0).then(|| self.ticket(self.added.load(Relaxed).wrapping_sub(1)))
    }
}

impl Frames {
    /// Whether the pinned CPU can give another reference back late.
    pub(crate) fn has_room_for_late(&self, pin: &Pin<'_>) -> bool {
        self.of(pin.cpu()).late.len() < ROOM
    }

    /// Gives a reference to `frame` back when the shoot-down of `ticket`, by the pinned CPU, has passed. False, and nothing done, when
    /// there is no [room](Self::has_room_for_late).
    pub(crate) fn drop_late(&self, pin: &Pin<'_>, frame: Frame, ticket: Ticket) -> bool {
        let late = &self.of(pin.cpu()).late;
        let number = late.added.load(Relaxed);
        if late.len() == ROOM {
            return false;
        }
        late.frames[number % ROOM].store(frame.0, Relaxed);
        late.tickets[number % ROOM].store(ticket.0, Relaxed);
        late.added.store(number.wrapping_add(1), Relaxed);
        true
    }

    /// Gives the references back whose shoot-downs have passed, of the pinned CPU, oldest first; returns how many frames came free by that.
    /// `has_passed` is the host's [`Tlb::has_passed`](crate::host::Tlb::has_passed).
    pub(crate) fn settle_late(&self, pin: &Pin<'_>, has_passed: &dyn Fn(CpuId, Ticket) -> bool) -> usize {
        let late = &self.of(pin.cpu()).late;
        let mut freed = 0;
        while late.len() > 0 {
            let number = late.settled.load(Relaxed);
            if !has_passed(pin.cpu(), late.ticket(number)) {
                break;
            }
            let frame = Frame(late.frames[number % ROOM].load(Relaxed));
            late.settled.store(number.wrapping_add(1), Relaxed);
            if self.meta(frame).dec_references() == 0 {
                self.free(pin, frame);
                freed += 1;
            }
        }
        freed
    }

    /// What the last of the pinned CPU's late references waits for.
    pub(crate) fn last_late(&self, pin: &Pin<'_>) -> Option<Ticket> {
        self.of(pin.cpu()).late.last()
    }
}

describe!([] Late { frames, tickets, settled, added });

#[cfg(test)]
mod tests {
    use super::ROOM;
    use crate::addr::Frame;
    use crate::host::Ticket;
    use crate::testing::Rig;

    #[test]
    fn references_go_in_order_and_the_last_frees_the_frame() {
        let rig = Rig::new(64, 1);
        let me = rig.epoch.register().unwrap();
        let pin = me.pin();
        let frames = &rig.frames;
        let shared = frames.allocate(&pin).unwrap();
        for _ in 1..=ROOM {
            frames.meta(shared).inc_references();
        }
        let free = frames.free_frames();
        for ticket in 1..=ROOM as u64 {
            assert!(frames.has_room_for_late(&pin));
            assert!(frames.drop_late(&pin, shared, Ticket(ticket)));
        }
        assert!(!frames.has_room_for_late(&pin) && !frames.drop_late(&pin, shared, Ticket(99)));
        assert_eq!((frames.last_late(&pin), frames.deferred(me.id())), (Some(Ticket(ROOM as u64)), ROOM));
        assert_eq!(frames.settle_late(&pin, &|cpu, ticket| cpu == me.id() && ticket.0 <= 3), 0);
        assert_eq!(frames.meta(shared).references(), ROOM as u32 - 2);
        assert_eq!(frames.settle_late(&pin, &|_, ticket| ticket.0 % 2 == 1), 0, "the oldest has not passed");
        assert_eq!(frames.settle_late(&pin, &|_, _| true), 0);
        assert_eq!((frames.last_late(&pin), frames.meta(shared).references()), (None, 1));
        assert!(frames.drop_late(&pin, shared, Ticket(100)));
        assert_eq!(frames.settle_late(&pin, &|_, _| true), 1);
        assert_eq!(frames.free_frames(), free + 1);
        let _: Frame = frames.allocate(&pin).unwrap();
    }
}
