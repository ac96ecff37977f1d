//! Blocks: 2 MiB of private memory behind one entry of the page table (transparent huge pages).
//!
//! # What a block is
//!
//! An entry of level 2 that maps 512 frames which follow each other. Nothing else holds them together: each frame has its own
//! references (one for each space that maps it, by a block or by a page), its own anon_vma and index. So dividing a block
//! means writing a table of 512 entries and nothing more, any page of it may be copied, freed or found by reverse mapping
//! alone, and a fork counts 512 references (3 us). Linux keeps such pages in one compound page instead, and must take
//! that apart when the last of its mappings is divided.
//!
//! # How blocks come and go
//!
//! | what | where | the entry of level 2 |
//! |---|---|---|
//! | first touch | `fault::block` | empty, taken, block |
//! | collapse | `space::collapse` | table, taken, block |
//! | division | [`Mm::divide_block`] | block, taken, table |
//! | unmap, `DONTNEED` of all of it | `space::sweep` | block, empty |
//! | protect, fork, reuse | `space::sweep`, `space::share`, `fault::block` | block, block |
//!
//! # What keeps them right
//!
//! 1. **A block lies in one VMA.** A first touch sees a VMA that covers all of the block, and looks at its counter while it
//!    owns the entry. So a call that divides or trims that VMA either spoils the first touch or meets the block.
//! 2. **Who makes a boundary divides the block.** A call whose range begins or ends within a block divides it at both
//!    ends of its range, after it has changed the layout and before it sweeps. It has set tables aside for that before its first
//!    change, so it cannot fail then (`space::splits`). No call divides at boundaries that others make, so none
//!    waits for another: two calls that meet at an address both reserve, and one of them finds the block divided.
//! 3. **Dividing changes nothing** that anybody can tell. So faults do it at any time, without looking at the VMA, and sweeps
//!    that meet a block are ready to find it a table a moment later. The other direction, collapse, holds the whole range
//!    exclusively.
//! 4. **Calls need not reserve where blocks cannot be**: `may_have_blocks` is raised before the first one can come, by who
//!    makes the space, advises, or collapses; the latter two hold the range that it concerns, so a call that holds an
//!    address of it later sees the mark.
//!
//! # Who may break it
//!
//! Whoever changes the attributes of a part of a block before dividing it; whoever frees a frame of a block by hand;
//! whoever maps a block of an object's pages: those are not counted.

use super::Mm;
use crate::addr::{AddrRange, Frame, PAGE_SHIFT};
use crate::error::OutOfMemory;
use crate::frame::{BLOCK_FRAMES, FrameFlags, FrameList, Ram};
use crate::host::Host;
use crate::machine::Cpu;
use crate::page_table::{Level, Pte};
use crate::stats::Counter;
use crate::sync::atomic::Ordering;
use crate::vma::VmFlags;
use core::mem::ManuallyDrop;

/// Bytes in a block.
pub const BLOCK_SIZE: u64 = Level::BLOCK.span();

/// When first touches of private memory make huge pages, as `/sys/kernel/mm/transparent_hugepage/enabled` says it on Linux.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum HugePages {
    /// Never.
    Never,
    /// Where the program advised it ([`Advice::HugePage`](crate::vma::Advice::HugePage)).
    #[default]
    Madvise,
    /// Everywhere but where the program advised against it ([`Advice::NoHugePage`](crate::vma::Advice::NoHugePage)).
    Always,
}

impl HugePages {
    /// True when memory with these attributes gets huge pages on first touch, and from the collapser.
    #[inline]
    pub fn allow(self, flags: VmFlags) -> bool {
        // A handler of user faults works page by page.
        !flags.intersects(VmFlags::NOHUGEPAGE.union(VmFlags::UFFD_MODES))
            && match self {
                HugePages::Never => false,
                HugePages::Madvise => flags.contains(VmFlags::HUGEPAGE),
                HugePages::Always => true,
            }
    }
}

/// The aligned 2 MiB around `addr`.
#[inline]
pub(crate) const fn block_around(addr: u64) -> AddrRange {
    let start = addr & !(BLOCK_SIZE - 1);
    AddrRange::new(start, start.saturating_add(BLOCK_SIZE))
}

impl<H: Host> Mm<H> {
    /// False when no part of the space can be a block: calls need not prepare for dividing one.
    #[inline]
    pub(crate) fn may_have_blocks(&self) -> bool {
        self.blocks.load(Ordering::Relaxed)
    }

    /// Says that blocks may come from now on. Before the first one can.
    pub(crate) fn expect_blocks(&self) {
        if !self.may_have_blocks() {
            self.blocks.store(true, Ordering::Relaxed);
        }
    }

    /// Makes the block that covers `addr`, if there is one, a table of pages; that takes the frame in `table`.
    ///
    /// The shoot-down's ticket is of no interest: no frame is freed, and no permission taken away.
    ///
    /// # Errors
    /// [`OutOfMemory`] when there is a block and no frame.
    pub(crate) fn divide_block(
        &self,
        ram: &Ram<'_, H>,
        addr: u64,
        table: &mut Option<Frame>,
    ) -> Result<(), OutOfMemory> {
        let Some(slot) = self.page_table.block_slot(ram, addr) else { return Ok(()) };
        loop {
            let raw = slot.wait_not_busy(ram);
            if Pte::block::<H::Format>(raw).is_none() {
                return Ok(());
            }
            let frame = table.ok_or(OutOfMemory)?;
            let range = block_around(addr);
            let divided = self.page_table.divide(ram, slot, raw, frame, || {
                self.shoot_down(ram, range);
            });
            if divided {
                *table = None;
                ram.event(Counter::ThpSplitPmd, range.start);
                return Ok(());
            }
        }
    }
}

/// The frames of a block, which some entry maps.
#[derive(Clone, Copy)]
pub(crate) struct BlockFrames(pub(crate) Frame);

impl BlockFrames {
    /// All of them, ascending.
    pub(crate) fn iter(self) -> impl Iterator<Item = Frame> {
        (self.0.0..self.0.0 + BLOCK_FRAMES as u32).map(Frame)
    }

    /// Makes the frames, fresh from the allocator, private pages at `start` and the addresses that follow, owned by the
    /// anon_vma at `owner`. By who owns the entry and has found the VMA valid: from here on a walk that meets the frames
    /// trusts their owner.
    pub(crate) fn own<H: Host>(self, ram: &Ram<'_, H>, owner: *const (), start: u64) {
        for (frame, index) in self.iter().zip(start >> PAGE_SHIFT..) {
            let meta = ram.frames.meta(frame);
            meta.set_owner(owner.cast_mut());
            meta.set_index(index);
            meta.init_flags(FrameFlags::ANON);
        }
    }

    /// True when no other entry maps any of them. Sure for who owns the entry, or keeps forks away.
    pub(crate) fn have_one_owner<H: Host>(self, ram: &Ram<'_, H>) -> bool {
        self.iter().all(|frame| {
            let meta = ram.frames.meta(frame);
            meta.flags().contains(FrameFlags::ANON) && meta.references() == 1
        })
    }

    /// Counts one more entry.
    pub(crate) fn inc_references<H: Host>(self, ram: &Ram<'_, H>) {
        self.iter().for_each(|frame| {
            ram.frames.meta(frame).inc_references();
        });
    }

    /// Counts one entry less; frames that nothing maps any more go to `list`, as a block if they are all.
    pub(crate) fn drop_references<H: Host>(self, ram: &Ram<'_, H>, list: &mut FrameList) {
        // Another space may drop the same frames at the same time, so each side may be the last for some.
        let mut gone = [0u64; BLOCK_FRAMES / 64];
        for (n, frame) in self.iter().enumerate() {
            if ram.frames.meta(frame).dec_references() == 0 {
                gone[n / 64] |= 1 << (n % 64);
            }
        }
        if gone.iter().all(|&bits| bits == u64::MAX) {
            list.push_block(ram.frames, self.0);
            return;
        }
        for (n, frame) in self.iter().enumerate() {
            if gone[n / 64] & 1 << (n % 64) != 0 {
                list.push(ram.frames, frame);
            }
        }
    }
}

/// A block of frames that belongs to a call and is mapped nowhere; given back when dropped.
pub(crate) struct SpareBlock<'a, H: Host> {
    cpu: &'a Cpu<H>,
    first: Frame,
}

impl<'a, H: Host> SpareBlock<'a, H> {
    /// For the 2 MiB at `addr` of a VMA of `mm` with these attributes, which say where it comes from. `None` when no 512 free frames
    /// follow each other there. Not while pinned.
    pub(crate) fn try_new(cpu: &'a Cpu<H>, mm: &Mm<H>, flags: VmFlags, addr: u64) -> Option<Self> {
        let pin = cpu.pin();
        let first = mm.allocate_block(&cpu.machine().ram(&pin), flags, addr)?;
        Some(Self { cpu, first })
    }

    /// The frames.
    pub(crate) fn frames(&self) -> BlockFrames {
        BlockFrames(self.first)
    }

    /// Calls `fill` for each frame, with its number in the block: a few under one pin, because all take 100 us.
    pub(crate) fn for_each(&self, mut fill: impl FnMut(&Ram<'_, H>, usize, Frame)) {
        const FRAMES_A_PIN: usize = 32;
        let mut frames = self.frames().iter().enumerate();
        for _ in 0..BLOCK_FRAMES / FRAMES_A_PIN {
            let pin = self.cpu.pin();
            let ram = self.cpu.machine().ram(&pin);
            frames.by_ref().take(FRAMES_A_PIN).for_each(|(n, frame)| fill(&ram, n, frame));
        }
    }

    /// It is mapped now.
    pub(crate) fn into_mapped(self) {
        let _ = ManuallyDrop::new(self);
    }
}

impl<H: Host> Drop for SpareBlock<'_, H> {
    fn drop(&mut self) {
        let pin = self.cpu.pin();
        self.cpu.machine().ram(&pin).free_block(self.first);
    }
}
