//! The frame allocator of a machine: a cache for each CPU over the shared pool.
//!
//! # What it guarantees
//!
//! 1. A frame is with at most one holder at a time.
//! 2. While a CPU's cache has what is asked for, allocating and freeing write nothing that another CPU's allocating
//!    or freeing writes, and use no lock and no locked instruction: the caller's [`Pin`] owns the cache.
//! 3. What is freed last is allocated first: it is still in the processor's cache, and zeroing it takes a quarter of
//!    the time of a cold frame.
//! 4. No frame is out of reach because another CPU is idle: when cache and pool are empty, the caches of CPUs that
//!    are not pinned are drained. Never waits for a pinned one, so `None` may come while such a CPU still has
//!    some frames. Deferred frames are not taken: only who can ask the host whether a shoot-down has passed may
//!    [`settle`](Frames::settle) them.
//!
//! # How large the caches are
//!
//! A thread that touches 512 pages and gives them up with `MADV_DONTNEED`, in a loop, has at most 512 frames mapped
//! and 512 waiting in limbo while it touches the next 512. A cache of 1024 takes all of them back: the loop never
//! reaches the pool. When memory is small the caches together hold at most an eighth of it.
//!
//! Frames move between cache and pool 64 at a time. A cache that is full gives its 64 oldest, so that a CPU which
//! alternates at either end of the cache comes back only after 64 more.
//!
//! A frame allocated and freed costs 5 ns from the cache, most of it the stores that reset the metadata, and 5 to 8 ns
//! more when it comes from the pool and goes back there (Zen 3). Metadata of 16 GiB are ready after 40 us.
//!
//! # Who may break it
//!
//! Whoever frees what it does not hold, and whoever passes a pin of another machine.

use super::cache::{BATCH, Cache};
use super::late::Late;
use super::limbo::Limbo;
use super::meta::{FrameFlags, FrameMeta};
use super::nodes::Nodes;
use super::pool::Pool;
use super::zeroed::ZeroedArray;
use super::{BLOCK_FRAMES, list::NO_FRAME};
use crate::addr::Frame;
use crate::error::OutOfMemory;
use crate::host::FrameRange;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::once::SetOnce;
use crate::sync::{CpuId, Pin, SpinLock};
use alloc::boxed::Box;
use alloc::vec::Vec;
use crossbeam_utils::CachePadded;

/// Frames in a CPU's cache at most; see the [module](self).
const CACHE_MAX: usize = 1024;
/// And at least, however small the machine.
const CACHE_MIN: usize = 16;
/// CPUs at most: what a deferred batch has room to remember.
const CPUS_MAX: usize = 1 << 16;

/// What belongs to one CPU. Written under its pin only; others read the counts.
pub(super) struct CpuFrames {
    pub(super) cache: Cache,
    pub(super) limbo: Limbo,
    pub(super) late: Late,
    /// It found no frame the last time it asked for one.
    short: AtomicBool,
}

/// The frames of one machine: their metadata and who has them.
pub struct Frames {
    range: FrameRange,
    metas: ZeroedArray<FrameMeta>,
    /// Stands for every frame that is not the machine's: no flags, no references.
    foreign: ZeroedArray<FrameMeta>,
    cpus: Box<[CachePadded<CpuFrames>]>,
    pool: CachePadded<SpinLock<Pool>>,
    pub(super) nodes: SetOnce<Nodes>,
}

impl Frames {
    /// The frames of `range`, all free, for CPUs with ids below `cpus`. Takes 32 bytes a frame from the global
    /// allocator and touches almost none of them.
    ///
    /// # Errors
    /// [`OutOfMemory`], also when the range passes 16 TiB or there are more than 65 536 CPUs.
    pub fn try_new(range: FrameRange, cpus: usize) -> Result<Self, OutOfMemory> {
        if cpus > CPUS_MAX {
            return Err(OutOfMemory);
        }
        let share = range.count / (8 * cpus.max(1));
        let capacity = match share.checked_ilog2() {
            Some(log) => (1 << log).clamp(CACHE_MIN, CACHE_MAX),
            None => CACHE_MIN,
        };
        let mut of_cpus = Vec::new();
        of_cpus.try_reserve_exact(cpus).map_err(|_| OutOfMemory)?;
        for _ in 0..cpus {
            of_cpus.push(CachePadded::new(CpuFrames {
                cache: Cache::try_new(capacity)?,
                limbo: Limbo::new(),
                late: Late::new(),
                short: AtomicBool::new(false),
            }));
        }
        Ok(Self {
            range,
            metas: ZeroedArray::try_new(range.count)?,
            foreign: ZeroedArray::try_new(1)?,
            cpus: of_cpus.into_boxed_slice(),
            pool: CachePadded::new(SpinLock::new(Pool::try_new(range)?)),
            nodes: SetOnce::new(),
        })
    }

    /// Takes a frame. Its contents are unspecified; its metadata are those of a new frame: one reference, the rest
    /// 0. O(1); `None` when no frame can be had (see guarantee 4 of the [module](self)).
    #[inline]
    pub fn allocate(&self, pin: &Pin<'_>) -> Option<Frame> {
        let frame = match self.of(pin.cpu()).cache.pop() {
            Some(frame) => frame,
            None => self.refill(pin)?,
        };
        self.meta(frame).begin_life();
        Some(frame)
    }

    /// Whether CPU `cpu`, the calling one, has found no frame since the last such question.
    pub(crate) fn take_short(&self, cpu: CpuId) -> bool {
        self.of(cpu).short.swap(false, Ordering::Relaxed)
    }

    /// Gives a frame back at once: nobody can reach it any more, by translation or by pointer. O(1).
    #[inline]
    pub fn free(&self, pin: &Pin<'_>, frame: Frame) {
        self.meta(frame).end_life();
        let cache = &self.of(pin.cpu()).cache;
        if !cache.push(frame) {
            self.spill(cache);
            let pushed = cache.push(frame);
            debug_assert!(pushed, "room was made");
        }
    }

    /// Takes [`BLOCK_FRAMES`] frames that follow each other, the first a multiple of it, and returns the first; where there are
    /// [nodes](super::nodes), of the CPU's own rather than of another. Each
    /// is allocated as if by [`allocate`](Self::allocate), and may be freed alone. `None` when there is no such
    /// block, even after the caches of this CPU and of the idle ones have been drained.
    pub fn allocate_block(&self, pin: &Pin<'_>) -> Option<Frame> {
        let near = self.nodes.get().and_then(|nodes| nodes.range(nodes.of_cpu(pin.cpu())));
        let near = near.and_then(|range| self.pool.lock().take_block_within(range));
        let first = near.or_else(|| self.take_block(pin, Pool::take_block))?;
        Some(self.begin_block(first))
    }

    /// As [`allocate_block`](Self::allocate_block), with all frames of `node`. O(blocks of the node).
    pub fn allocate_block_on(&self, pin: &Pin<'_>, node: usize) -> Option<Frame> {
        let range = self.range_of(node)?;
        let first = self.take_block(pin, |pool| pool.take_block_within(range))?;
        Some(self.begin_block(first))
    }

    fn take_block(&self, pin: &Pin<'_>, take: impl Fn(&mut Pool) -> Option<Frame>) -> Option<Frame> {
        let block = take(&mut self.pool.lock());
        if block.is_some() || self.free_frames() < BLOCK_FRAMES {
            return block;
        }
        // Emptying the caches takes some microseconds; who asks for a block saves 511 faults, and asks once
        // for 2 MiB.
        self.drain_all(pin);
        take(&mut self.pool.lock())
    }

    /// The frames of a block that was just taken are in use.
    fn begin_block(&self, first: Frame) -> Frame {
        for frame in first.0..first.0 + BLOCK_FRAMES as u32 {
            self.meta(Frame(frame)).begin_life();
        }
        first
    }

    /// Gives back the block that starts with `first`, all of whose frames the caller holds.
    pub fn free_block(&self, _pin: &Pin<'_>, first: Frame) {
        for frame in first.0..first.0 + BLOCK_FRAMES as u32 {
            self.meta(Frame(frame)).end_life();
        }
        self.pool.lock().give_block(first);
    }

    /// How many frames the one from a [`FrameList`](super::FrameList) speaks for: all of its block, if it was pushed as
    /// one.
    #[inline]
    pub(super) fn counts_for(&self, listed: Frame) -> usize {
        if self.meta(listed).flags().contains(FrameFlags::BLOCK) { BLOCK_FRAMES } else { 1 }
    }

    /// Gives back what the frame from a [`FrameList`](super::FrameList) speaks for; returns how many frames.
    #[inline]
    pub(super) fn free_listed(&self, pin: &Pin<'_>, listed: Frame) -> usize {
        let count = self.counts_for(listed);
        if count == 1 {
            self.free(pin, listed);
        } else {
            self.free_block(pin, listed);
        }
        count
    }

    /// The metadata of a frame of this machine; of device memory, which has none, those of a frame that is nothing. Not to be
    /// written then.
    #[inline]
    pub fn meta(&self, frame: Frame) -> &FrameMeta {
        let number = frame.0.wrapping_sub(self.range.first.0) as usize;
        self.metas.get(number).unwrap_or_else(|| &self.foreign[0])
    }

    /// True when `frame` is one of this machine.
    #[inline]
    pub fn contains(&self, frame: Frame) -> bool {
        (frame.0.wrapping_sub(self.range.first.0) as usize) < self.range.count
    }

    /// All frames, free or not.
    #[inline]
    pub fn total(&self) -> usize {
        self.range.count
    }

    /// Which frames there are.
    #[inline]
    pub fn range(&self) -> FrameRange {
        self.range
    }

    /// Frames that are free, those in the CPUs' caches included, deferred ones not. Exact at rest. O(CPUs).
    pub fn free_frames(&self) -> usize {
        let cached: usize = self.cpus.iter().map(|cpu| cpu.cache.len()).sum();
        self.pool.lock().free() + cached
    }

    /// Free frames in the cache of one CPU; 0 for a CPU that does not exist.
    pub fn cached(&self, cpu: CpuId) -> usize {
        self.try_of(cpu).map_or(0, |cpu| cpu.cache.len())
    }

    /// Gives the cache of the pinned CPU back to the pool: the CPU leaves, or others need its frames. Deferred
    /// frames stay; see [`take_over`](Self::take_over).
    pub fn drain_cpu(&self, pin: &Pin<'_>) {
        let cache = &self.of(pin.cpu()).cache;
        while cache.len() != 0 {
            self.spill(cache);
        }
    }

    /// Takes frames of `range` from the pool.
    pub(super) fn take_within(&self, range: FrameRange, out: &mut [u32]) -> usize {
        self.pool.lock().take_within(range, out)
    }

    /// Empties the caches of this CPU and of the idle ones into the pool.
    pub(super) fn drain_all(&self, pin: &Pin<'_>) {
        self.drain_cpu(pin);
        self.for_each_idle(pin, |other| {
            self.drain_cpu(other);
            None::<()>
        });
    }

    pub(super) fn cpu_count(&self) -> usize {
        self.cpus.len()
    }

    #[inline]
    pub(super) fn of(&self, cpu: CpuId) -> &CpuFrames {
        &self.cpus[cpu.index()]
    }

    pub(super) fn try_of(&self, cpu: CpuId) -> Option<&CpuFrames> {
        self.cpus.get(cpu.index()).map(|cpu| &**cpu)
    }

    pub(super) fn of_all(&self) -> impl Iterator<Item = &CpuFrames> {
        self.cpus.iter().map(|cpu| &**cpu)
    }

    /// Takes a batch from the pool, or from an idle CPU, and returns one frame of it.
    #[cold]
    fn refill(&self, pin: &Pin<'_>) -> Option<Frame> {
        let cache = &self.of(pin.cpu()).cache;
        let mut batch = [NO_FRAME; BATCH];
        let batch = &mut batch[..cache.batch()];
        // Near memory first.
        let near = self.nodes.get().and_then(|nodes| nodes.range(nodes.of_cpu(pin.cpu())));
        let mut count = near.map_or(0, |range| self.take_within(range, batch));
        if count == 0 {
            count = self.pool.lock().take(batch);
        }
        if count == 0 {
            let taken = self.for_each_idle(pin, |other| match self.of(other.cpu()).cache.pop_oldest(batch) {
                0 => None,
                count => Some(count),
            });
            let Some(taken) = taken else {
                self.of(pin.cpu()).short.store(true, Ordering::Relaxed);
                return None;
            };
            count = taken;
        }
        // In reverse, so that neighbours are allocated in ascending order.
        for &frame in batch[..count].iter().rev() {
            let pushed = cache.push(Frame(frame));
            debug_assert!(pushed, "a batch fits into an empty cache");
        }
        cache.pop()
    }

    /// Gives the oldest frames of a full cache to the pool.
    #[cold]
    fn spill(&self, cache: &Cache) {
        let mut batch = [NO_FRAME; BATCH];
        let count = cache.pop_oldest(&mut batch[..cache.batch()]);
        self.pool.lock().give(batch[..count].iter().copied());
    }

    /// Pins one after the other the CPUs that are idle and have cached frames, until `act` returns something.
    fn for_each_idle<R>(&self, pin: &Pin<'_>, mut act: impl FnMut(&Pin<'_>) -> Option<R>) -> Option<R> {
        let epoch = pin.epoch();
        for index in 0..epoch.used().min(self.cpus.len()) {
            let cpu = CpuId(index as u32);
            if cpu == pin.cpu() || self.of(cpu).cache.len() == 0 {
                continue;
            }
            if let Some(result) = epoch.try_pin_other(cpu).and_then(|other| act(&other)) {
                return Some(result);
            }
        }
        None
    }
}

describe!([] CpuFrames { cache, limbo, late, short });

#[cfg(terrane_watch)]
impl crate::names::Describe for Frames {
    fn describe(&self, names: &mut crate::names::Names) {
        names.leaf(self);
        names.field("cpus", &self.cpus);
        names.field("pool", &self.pool);
        let metas = self.metas.as_ptr_range();
        let item = |frame| alloc::format!("[{frame}]");
        names.under("metas", |names| {
            names.array(
                metas.start.addr()..metas.end.addr(),
                size_of::<FrameMeta>(),
                item,
                FrameMeta::FIELDS,
            );
        });
    }
}
