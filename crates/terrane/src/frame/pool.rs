//! The shared pool: every frame that is neither in use nor in a CPU's cache.
//!
//! A bit for each frame, in blocks of 512 frames (2 MiB, aligned by frame number). A block whose frames are all
//! back is whole again, without any search: its count says so. Blocks are on a list by how many of their frames are
//! free; small allocations take from the fullest, so that the emptiest have time to become whole.
//!
//! # Why bits
//!
//! A free list through the metadata costs a cache miss a frame, under the lock. With bits, 64 neighbours are one
//! word, the metadata of free frames stay untouched, and a block that became whole needs no repair. They cost 80 bytes
//! for 2 MiB.
//!
//! # Starting
//!
//! Blocks behind the *frontier* have never been used; nothing of them, not even their bits, has been written. A pool of any
//! size starts in the time of one zeroed allocation.

use super::BLOCK_FRAMES;
use super::list::NO_FRAME;
use super::zeroed::{Zeroable, ZeroedArray};
use crate::addr::Frame;
use crate::error::OutOfMemory;
use crate::host::FrameRange;

/// Lists of partly free blocks, by the number of free frames: 1..=64, 65..=128, and so on to 511.
const PARTIAL: usize = 8;
/// The list of whole blocks.
const WHOLE: usize = PARTIAL;
const LISTS: usize = PARTIAL + 1;
/// "No block", as a link.
const NONE: u32 = u32::MAX;
const SHIFT: u32 = BLOCK_FRAMES.trailing_zeros();

#[repr(C)]
struct Block {
    /// A set bit: the frame is in the pool.
    bits: [u64; BLOCK_FRAMES / 64],
    /// How many bits are set.
    free: u32,
    // Neighbours on the list of `list_of(free)`; meaningless when no frame is free.
    next: u32,
    previous: u32,
}

// SAFETY: integers.
unsafe impl Zeroable for Block {}

/// Which list a block with `free` free frames is on.
fn list_of(free: u32) -> Option<usize> {
    match free as usize {
        0 => None,
        BLOCK_FRAMES => Some(WHOLE),
        some => Some((some - 1) / 64),
    }
}

/// The pool's state; [`Frames`](super::Frames) keeps it behind a spin lock.
pub(super) struct Pool {
    blocks: ZeroedArray<Block>,
    /// The number of block 0: frame numbers shifted by [`SHIFT`].
    first_block: u32,
    range: FrameRange,
    /// Blocks from here on have never been used.
    frontier: u32,
    lists: [u32; LISTS],
    free: usize,
}

impl Pool {
    /// A pool that holds all of `range`.
    pub(super) fn try_new(range: FrameRange) -> Result<Self, OutOfMemory> {
        // The last number is taken by `NO_FRAME`.
        let end = u64::from(range.first.0).checked_add(range.count as u64).ok_or(OutOfMemory)?;
        if end > u64::from(NO_FRAME) {
            return Err(OutOfMemory);
        }
        let first_block = range.first.0 >> SHIFT;
        let behind = end.div_ceil(BLOCK_FRAMES as u64) as u32;
        let count = if range.count == 0 { 0 } else { behind - first_block };
        Ok(Self {
            blocks: ZeroedArray::try_new(count as usize)?,
            first_block,
            range,
            frontier: 0,
            lists: [NONE; LISTS],
            free: range.count,
        })
    }

    /// Frames in the pool.
    pub(super) fn free(&self) -> usize {
        self.free
    }

    /// Takes up to `out.len()` frames, neighbours in ascending order where there are any, and returns how many.
    pub(super) fn take(&mut self, out: &mut [u32]) -> usize {
        let mut taken = 0;
        while taken < out.len() {
            let Some(index) = self.fullest() else { break };
            taken += self.take_from(index, &mut out[taken..]);
        }
        self.free -= taken;
        taken
    }

    /// Takes up to `out.len()` frames of `range`, ascending, and returns how many. O(blocks of the range).
    pub(super) fn take_within(&mut self, range: FrameRange, out: &mut [u32]) -> usize {
        if range.count == 0 {
            return 0;
        }
        let (first, last) = (range.first.0, range.first.0 + (range.count - 1) as u32);
        let mut taken = 0;
        for index in (first >> SHIFT) - self.first_block..=(last >> SHIFT) - self.first_block {
            // Blocks that have never been used have no bits yet.
            while self.frontier <= index && self.advance().is_some() {}
            let base = (index + self.first_block) << SHIFT;
            let Some(block) = self.blocks.get_mut(index as usize) else { break };
            let before = taken;
            for (number, word) in block.bits.iter_mut().enumerate() {
                let start = base + number as u32 * 64;
                // The bits of the frames that are in the range.
                let low =
                    if first > start { u64::MAX.checked_shl(first - start).unwrap_or(0) } else { u64::MAX };
                let high = match (start + 63).checked_sub(last) {
                    Some(beyond) => u64::MAX.checked_shr(beyond).unwrap_or(0),
                    None => u64::MAX,
                };
                while *word & low & high != 0 && taken < out.len() {
                    let bit = (*word & low & high).trailing_zeros();
                    out[taken] = start + bit;
                    *word &= !(1 << bit);
                    taken += 1;
                }
            }
            let left = block.free - (taken - before) as u32;
            self.recount(index, left);
            if taken == out.len() {
                break;
            }
        }
        self.free -= taken;
        taken
    }

    /// Gives frames back.
    pub(super) fn give(&mut self, frames: impl Iterator<Item = u32>) {
        for frame in frames {
            let index = (frame >> SHIFT) - self.first_block;
            let block = &mut self.blocks[index as usize];
            let within = frame as usize % BLOCK_FRAMES;
            debug_assert!(block.bits[within / 64] & 1 << (within % 64) == 0, "a frame is freed twice");
            block.bits[within / 64] |= 1 << (within % 64);
            self.recount(index, self.blocks[index as usize].free + 1);
            self.free += 1;
        }
    }

    /// Takes a whole block and returns its first frame.
    pub(super) fn take_block(&mut self) -> Option<Frame> {
        while self.lists[WHOLE] == NONE {
            // A block at either end of the range may lack frames; it then goes to another list.
            self.advance()?;
        }
        let index = self.lists[WHOLE];
        self.blocks[index as usize].bits.fill(0);
        self.recount(index, 0);
        self.free -= BLOCK_FRAMES;
        Some(Frame((index + self.first_block) << SHIFT))
    }

    /// Takes a whole block whose frames are all in `range`. O(blocks of the range).
    pub(super) fn take_block_within(&mut self, range: FrameRange) -> Option<Frame> {
        let end = u64::from(range.first.0) + range.count as u64;
        let (first, behind) = (range.first.0.div_ceil(BLOCK_FRAMES as u32), (end >> SHIFT) as u32);
        for number in first..behind {
            let index = number - self.first_block;
            // Blocks that have never been used are on no list yet.
            while self.frontier <= index && self.advance().is_some() {}
            let Some(block) = self.blocks.get_mut(index as usize) else { break };
            if block.free == BLOCK_FRAMES as u32 {
                block.bits.fill(0);
                self.recount(index, 0);
                self.free -= BLOCK_FRAMES;
                return Some(Frame(number << SHIFT));
            }
        }
        None
    }

    /// Gives back all frames of a block at once.
    pub(super) fn give_block(&mut self, first: Frame) {
        debug_assert!((first.0 as usize).is_multiple_of(BLOCK_FRAMES), "not the first frame of a block");
        let index = (first.0 >> SHIFT) - self.first_block;
        let block = &mut self.blocks[index as usize];
        debug_assert!(block.free == 0, "a frame of a block is freed twice");
        block.bits.fill(!0);
        self.recount(index, BLOCK_FRAMES as u32);
        self.free += BLOCK_FRAMES;
    }

    /// A block to take from: the fullest there is, then a whole one, then a new one.
    fn fullest(&mut self) -> Option<u32> {
        for list in self.lists {
            if list != NONE {
                return Some(list);
            }
        }
        self.advance()
    }

    /// Takes what fits into `out` from one listed block.
    fn take_from(&mut self, index: u32, out: &mut [u32]) -> usize {
        let base = (index + self.first_block) << SHIFT;
        let block = &mut self.blocks[index as usize];
        let mut taken = 0;
        for (number, word) in block.bits.iter_mut().enumerate() {
            while *word != 0 && taken < out.len() {
                out[taken] = base + number as u32 * 64 + word.trailing_zeros();
                *word &= *word - 1;
                taken += 1;
            }
        }
        let left = block.free - taken as u32;
        self.recount(index, left);
        taken
    }

    /// Moves the frontier on by one block, which becomes listed.
    fn advance(&mut self) -> Option<u32> {
        let index = self.frontier;
        let block = self.blocks.get_mut(index as usize)?;
        self.frontier += 1;
        // The frames of the block that are in the range: all but at the range's ends.
        let base = u64::from(index + self.first_block) << SHIFT;
        let start = u64::from(self.range.first.0).max(base);
        let end = (u64::from(self.range.first.0) + self.range.count as u64).min(base + BLOCK_FRAMES as u64);
        if end - start == BLOCK_FRAMES as u64 {
            block.bits.fill(!0);
        } else {
            for within in (start - base) as usize..(end - base) as usize {
                block.bits[within / 64] |= 1 << (within % 64);
            }
        }
        self.recount(index, (end - start) as u32);
        Some(index)
    }

    /// Sets the number of free frames of a block and moves it to the list where it then belongs.
    fn recount(&mut self, index: u32, free: u32) {
        let block = &mut self.blocks[index as usize];
        let (from, to) = (list_of(block.free), list_of(free));
        block.free = free;
        if from == to {
            return;
        }
        let (next, previous) = (block.next, block.previous);
        if let Some(from) = from {
            match self.blocks.get_mut(previous as usize) {
                Some(block) => block.next = next,
                None => self.lists[from] = next,
            }
            if let Some(block) = self.blocks.get_mut(next as usize) {
                block.previous = previous;
            }
        }
        if let Some(to) = to {
            let head = self.lists[to];
            if let Some(block) = self.blocks.get_mut(head as usize) {
                block.previous = index;
            }
            let block = &mut self.blocks[index as usize];
            (block.next, block.previous) = (head, NONE);
            self.lists[to] = index;
        }
    }
}
