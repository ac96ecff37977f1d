//! Physical memory as a pinned CPU sees it.
//!
//! # Who may touch a frame's bytes, and how
//!
//! | bytes | by | how |
//! |---|---|---|
//! | of a frame just allocated | its holder alone | plain writes: [`Ram::zero`], [`Ram::copy`] to it |
//! | of a page table | every CPU that walks it | atomics: [`Ram::table`] |
//! | of a mapped page | programs on every CPU | whatever the machine does: Terrane reads them as atomics |
//!
//! A frame comes back from the allocator only after its grace (see [`limbo`](super::limbo)), so no old
//! translation and no walker is left: its new holder is alone with it until it publishes the frame.

use super::BLOCK_FRAMES;
use super::frames::Frames;
use super::limbo::Grace;
use super::list::FrameList;
use super::meta::FrameMeta;
use crate::addr::{Frame, PAGE_SIZE, TABLE_ENTRIES};
use crate::host::{Host, Ticket};
use crate::stats::{Counter, Event, Stats};
use crate::sync::Pin;
use crate::sync::atomic::AtomicU64;
use core::ptr::NonNull;

/// The frames of a machine, its counters and its host, for the CPU that is pinned. Passed down by value.
pub struct Ram<'a, H: Host> {
    /// The host: where the bytes are, and whom to tell.
    pub host: &'a H,
    /// Who has which frame.
    pub frames: &'a Frames,
    /// What is counted.
    pub stats: &'a Stats,
    /// The CPU that acts.
    pub pin: &'a Pin<'a>,
}

impl<H: Host> Clone for Ram<'_, H> {
    #[inline]
    fn clone(&self) -> Self {
        *self
    }
}

impl<H: Host> Copy for Ram<'_, H> {}

impl<'a, H: Host> Ram<'a, H> {
    /// Where the bytes of `frame` are, aligned to the page size. What may be done with them: see the
    /// [module](self).
    #[inline]
    pub fn bytes(&self, frame: Frame) -> NonNull<u8> {
        debug_assert!(self.frames.contains(frame), "not a frame of this machine");
        self.host.bytes(frame)
    }

    /// A frame that is a page table, as its entries. The frame must not be zeroed or copied to while others may use
    /// it as a table; that it is not freed meanwhile is what the pin is for.
    #[inline]
    pub fn table(&self, frame: Frame) -> &'a [AtomicU64; TABLE_ENTRIES] {
        // SAFETY: `Memory` promises a page of bytes, aligned, for as long as the host lives, which `'a` does not
        // exceed; tables are accessed as atomics by all (see the module's table).
        unsafe { self.bytes(frame).cast().as_ref() }
    }

    /// The metadata of `frame`.
    #[inline]
    pub fn meta(&self, frame: Frame) -> &'a FrameMeta {
        self.frames.meta(frame)
    }

    /// Makes all bytes of `frame`, which only the caller can reach, zero.
    #[inline]
    pub fn zero(&self, frame: Frame) {
        // SAFETY: `Memory` promises a page of bytes. The frame is the caller's alone: nobody else reads or writes
        // it (see the module).
        unsafe { self.bytes(frame).write_bytes(0, PAGE_SIZE as usize) };
    }

    /// Copies the bytes of `from`, which programs may be writing meanwhile, to `to`, which only the caller can
    /// reach. Each byte is copied as it was at some moment during the call.
    #[inline]
    pub fn copy(&self, from: Frame, to: Frame) {
        debug_assert!(from != to);
        // SAFETY: `Memory` promises two pages of bytes, different ones. `to` is the caller's alone.
        unsafe { self.host.copy(self.bytes(from), self.bytes(to), PAGE_SIZE as usize) };
    }

    /// Takes a frame and counts it, if the host does not refuse it; see [`Frames::allocate`].
    #[inline]
    pub fn allocate(&self) -> Option<Frame> {
        if self.host.refuses() {
            return None;
        }
        let frame = self.frames.allocate(self.pin)?;
        self.count(Counter::PgAlloc);
        Some(frame)
    }

    /// Takes a frame of `node` and counts it; see [`Frames::allocate_on`].
    pub fn allocate_on(&self, node: usize) -> Option<Frame> {
        let frame = self.frames.allocate_on(self.pin, node)?;
        self.count(Counter::PgAlloc);
        Some(frame)
    }

    /// Takes a frame and makes its bytes zero.
    #[inline]
    pub fn allocate_zeroed(&self) -> Option<Frame> {
        let frame = self.allocate()?;
        self.zero(frame);
        // loom's atomics come into being when they are first used: before others see the table.
        #[cfg(terrane_loom)]
        for entry in self.table(frame) {
            entry.load(crate::sync::atomic::Ordering::Relaxed);
        }
        Some(frame)
    }

    /// Gives a frame back at once and counts it; see [`Frames::free`].
    #[inline]
    pub fn free(&self, frame: Frame) {
        self.count(Counter::PgFree);
        self.frames.free(self.pin, frame);
    }

    /// Takes a block and counts its frames; see [`Frames::allocate_block`].
    pub fn allocate_block(&self) -> Option<Frame> {
        let first = self.frames.allocate_block(self.pin)?;
        self.stats.add(self.pin, Counter::PgAlloc, BLOCK_FRAMES as u64);
        Some(first)
    }

    /// The same with all frames of `node`; see [`Frames::allocate_block_on`].
    pub fn allocate_block_on(&self, node: usize) -> Option<Frame> {
        let first = self.frames.allocate_block_on(self.pin, node)?;
        self.stats.add(self.pin, Counter::PgAlloc, BLOCK_FRAMES as u64);
        Some(first)
    }

    /// Gives the block that starts with `first` back at once and counts its frames; see [`Frames::free_block`].
    pub fn free_block(&self, first: Frame) {
        self.stats.add(self.pin, Counter::PgFree, BLOCK_FRAMES as u64);
        self.frames.free_block(self.pin, first);
    }

    /// Gives all frames of a list back at once and counts them.
    pub fn free_all(&self, mut list: FrameList) {
        self.stats.add(self.pin, Counter::PgFree, list.len() as u64);
        while let Some(frame) = list.pop(self.frames) {
            self.frames.free_listed(self.pin, frame);
        }
    }

    /// Whether [`drop_reference`](Self::drop_reference) can be called for a page that others map too. If not, a shoot-down must pass first.
    #[inline]
    pub(crate) fn has_room_for_late(&self) -> bool {
        self.frames.has_room_for_late(self.pin) || {
            self.settle_late();
            self.frames.has_room_for_late(self.pin)
        }
    }

    /// Gives references back whose shoot-downs have passed.
    pub(crate) fn settle_late(&self) -> usize {
        let freed = self.frames.settle_late(self.pin, &|cpu, ticket| self.host.has_passed(cpu, ticket));
        if freed > 0 {
            self.stats.add(self.pin, Counter::PgFree, freed as u64);
        }
        freed
    }

    /// One holder less of `frame`, an anonymous page, once the shoot-down of its entry has passed; the last one frees it. For a page that
    /// others map too there must be [room](Self::has_room_for_late).
    #[inline]
    pub(crate) fn drop_reference(&self, frame: Frame, ticket: Ticket) {
        // With one reference it is the caller's, and nobody can add another.
        let shared = ticket != Ticket::PASSED && self.meta(frame).references() > 1;
        if mutant!("copied_page_dropped_at_once", shared, false) {
            self.settle_late();
            let added = self.frames.drop_late(self.pin, frame, ticket);
            debug_assert!(added, "no room for a late reference");
            return;
        }
        if self.meta(frame).dec_references() != 0 {
            return;
        }
        if ticket == Ticket::PASSED {
            self.free(frame);
        } else {
            let mut list = FrameList::new();
            list.push(self.frames, frame);
            self.defer(list, Grace { epoch: None, ticket });
        }
    }

    /// Gives frames back when `grace` is over, and counts them now; see [`Frames::defer`].
    #[inline]
    pub fn defer(&self, frames: FrameList, grace: Grace) {
        self.stats.add(self.pin, Counter::PgFree, frames.len() as u64);
        self.frames.defer(self.pin, frames, grace);
    }

    /// One round of a loop that waits for another CPU; see [`Wait::relax`](crate::host::Wait::relax).
    #[inline]
    pub fn relax(&self, rounds: u32) {
        self.host.relax(self.pin.cpu(), rounds);
    }

    /// Counts one.
    #[inline]
    pub fn count(&self, counter: Counter) {
        self.stats.count(self.pin, counter);
    }

    /// Counts one and tells the host about it, with the virtual address that it concerns.
    #[inline]
    pub fn event(&self, kind: Counter, address: u64) {
        self.count(kind);
        self.host.event(self.pin.cpu(), Event { kind, address });
    }
}

#[cfg(test)]
mod tests {
    use crate::addr::{Frame, PAGE_SIZE};
    use crate::frame::{FrameList, Grace};
    use crate::host::Ticket;
    use crate::stats::Counter;
    use crate::sync::atomic::{AtomicBool, Ordering};
    use crate::testing::Rig;

    #[test]
    fn pages_are_zeroed_and_copied_whole() {
        let rig = Rig::new(64, 1);
        let me = rig.epoch.register().unwrap();
        let pin = me.pin();
        let ram = rig.ram(&pin);
        let [before, from, to, behind] = [0, 1, 2, 3].map(|n| Frame(rig.frames.range().first.0 + n));
        for frame in [before, from, to, behind] {
            for (index, word) in ram.table(frame).iter().enumerate() {
                word.store(u64::from(frame.0) << 32 | index as u64, Ordering::Relaxed);
            }
        }
        ram.copy(from, to);
        for (index, word) in ram.table(to).iter().enumerate() {
            assert_eq!(word.load(Ordering::Relaxed), u64::from(from.0) << 32 | index as u64);
        }
        ram.zero(to);
        assert!(ram.table(to).iter().all(|word| word.load(Ordering::Relaxed) == 0));
        for frame in [before, from, behind] {
            for (index, word) in ram.table(frame).iter().enumerate() {
                assert_eq!(word.load(Ordering::Relaxed), u64::from(frame.0) << 32 | index as u64);
            }
        }
        assert_eq!(ram.bytes(from).as_ptr() as usize + PAGE_SIZE as usize, ram.bytes(to).as_ptr() as usize);
    }

    #[test]
    fn a_page_that_is_being_written_can_be_copied() {
        let rig = Rig::new(64, 2);
        let stop = AtomicBool::new(false);
        let first = rig.frames.range().first;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let me = rig.epoch.register().unwrap();
                let pin = me.pin();
                let mut pattern = 0;
                while !stop.load(Ordering::Relaxed) {
                    pattern = !pattern;
                    for word in rig.ram(&pin).table(first) {
                        word.store(pattern, Ordering::Relaxed);
                    }
                }
            });
            let me = rig.epoch.register().unwrap();
            let pin = me.pin();
            let ram = rig.ram(&pin);
            let to = Frame(first.0 + 1);
            for _ in 0..2000 {
                ram.copy(first, to);
                for word in ram.table(to) {
                    assert!(
                        word.load(Ordering::Relaxed)
                            .to_ne_bytes()
                            .iter()
                            .all(|byte| [0, 0xff].contains(byte))
                    );
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn frames_are_counted() {
        let rig = Rig::new(64, 1);
        let me = rig.epoch.register().unwrap();
        let pin = me.pin();
        let ram = rig.ram(&pin);
        let (one, two) = (ram.allocate().unwrap(), ram.allocate_zeroed().unwrap());
        assert_eq!(ram.meta(one).references(), 1);
        ram.free(one);
        let mut list = FrameList::new();
        list.push(&rig.frames, two);
        ram.defer(list, Grace { epoch: None, ticket: Ticket::PASSED });
        ram.event(Counter::PgFault, 0x1000);
        let counts =
            [Counter::PgAlloc, Counter::PgFree, Counter::PgFault].map(|counter| rig.stats.sum(counter));
        assert_eq!(counts, [2, 2, 1]);
        assert_eq!((rig.frames.free_frames(), rig.frames.deferred_frames()), (63, 1));
    }
}
