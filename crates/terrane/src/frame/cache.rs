//! A CPU's cache of free frames: a stack whose bottom can be taken off as well.
//!
//! Only the holder of the CPU's pin changes it, so loads and stores are relaxed and nothing is a read-modify-write;
//! the pin orders one holder after the other. An array rather than a list through the metadata: what the top
//! is does not depend on a load from a frame's metadata, which may be out of the processor's cache.

use crate::addr::Frame;
use crate::error::OutOfMemory;
use crate::sync::atomic::{AtomicU32, Ordering::Relaxed};
use alloc::boxed::Box;
use alloc::vec::Vec;
use crossbeam_utils::CachePadded;

/// Frames that move between a cache and the pool at a time, at most.
pub(super) const BATCH: usize = 64;

/// Slots that lie on lines of their own: the caches of two CPUs do not meet at their ends.
const TOGETHER: usize = 32;

pub(super) struct Cache {
    /// The frames at `bottom..top`, modulo the capacity, which is a power of two. Both counts wrap.
    slots: Box<[CachePadded<[AtomicU32; TOGETHER]>]>,
    capacity: u32,
    top: AtomicU32,
    bottom: AtomicU32,
}

impl Cache {
    /// An empty cache for up to `capacity` frames, a power of two.
    pub(super) fn try_new(capacity: usize) -> Result<Self, OutOfMemory> {
        debug_assert!(capacity.is_power_of_two());
        let mut slots = Vec::new();
        let lines = capacity.div_ceil(TOGETHER);
        slots.try_reserve_exact(lines).map_err(|_| OutOfMemory)?;
        slots.resize_with(lines, || CachePadded::new([const { AtomicU32::new(0) }; TOGETHER]));
        Ok(Self {
            slots: slots.into_boxed_slice(),
            capacity: u32::try_from(capacity).map_err(|_| OutOfMemory)?,
            top: AtomicU32::new(0),
            bottom: AtomicU32::new(0),
        })
    }

    /// Frames to move at a time: a quarter of a small cache.
    pub(super) fn batch(&self) -> usize {
        (self.capacity as usize / 4).clamp(1, BATCH)
    }

    /// Frames in it; exact for the owner, and at rest.
    #[inline]
    pub(super) fn len(&self) -> usize {
        // At most the capacity even when the two are read at different moments.
        (self.top.load(Relaxed).wrapping_sub(self.bottom.load(Relaxed)) as usize).min(self.capacity as usize)
    }

    #[inline]
    fn slot(&self, position: u32) -> &AtomicU32 {
        let place = (position & (self.capacity - 1)) as usize;
        &self.slots[place / TOGETHER][place % TOGETHER]
    }

    /// Takes the frame that was pushed last.
    #[inline]
    pub(super) fn pop(&self) -> Option<Frame> {
        let top = self.top.load(Relaxed);
        if top == self.bottom.load(Relaxed) {
            return None;
        }
        let top = top.wrapping_sub(1);
        self.top.store(top, Relaxed);
        Some(Frame(self.slot(top).load(Relaxed)))
    }

    /// Puts a frame on top; false, and nothing done, when the cache is full.
    #[inline]
    #[must_use]
    pub(super) fn push(&self, frame: Frame) -> bool {
        let top = self.top.load(Relaxed);
        if top.wrapping_sub(self.bottom.load(Relaxed)) >= self.capacity {
            return false;
        }
        self.slot(top).store(frame.0, Relaxed);
        self.top.store(top.wrapping_add(1), Relaxed);
        true
    }

    /// Takes the frames that have been in it longest, as many as there are and fit into `out`.
    pub(super) fn pop_oldest(&self, out: &mut [u32]) -> usize {
        let bottom = self.bottom.load(Relaxed);
        let count = self.len().min(out.len());
        for (offset, frame) in out[..count].iter_mut().enumerate() {
            *frame = self.slot(bottom.wrapping_add(offset as u32)).load(Relaxed);
        }
        self.bottom.store(bottom.wrapping_add(count as u32), Relaxed);
        count
    }
}

describe!([] Cache { slots, top, bottom });
