//! Terrane's host: physical memory, translations, waiting.

use super::layout::direct;
use super::tlb::{self, Running};
use crate::sync::{RawMutex, RawRwLock, wait_while, wake_all};
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};
use terrane::host::{File, FrameRange, Host, IoError, Memory, Observe, ShootDown, Ticket, Tlb, Wait};
use terrane::page_table::X86_64;
use terrane::sync::CpuId;
use terrane::sync::atomic::AtomicU32;
use terrane::{AddrRange, Frame};

/// The hardware.
pub struct KernelHost {
    pub(super) frames: FrameRange,
    /// Refuses frames.
    pub(super) refuser: Refuser,
}

/// Refuses each n-th frame, where the command line says `inject=frame:N`, from [`begin`](Self::begin) on.
pub(super) struct Refuser {
    /// 0 for none.
    every: AtomicU64,
    asked: AtomicU64,
}

impl Refuser {
    pub(super) const fn new() -> Self {
        Self { every: AtomicU64::new(0), asked: AtomicU64::new(0) }
    }

    /// When there is a program: before, all frames are the kernel's own.
    pub(super) fn begin(&self) {
        let words = crate::options::values("inject").flat_map(|words| words.split(','));
        if let Some(every) = words.filter_map(|word| word.strip_prefix("frame:")?.parse().ok()).last() {
            self.every.store(every, Ordering::Relaxed);
        }
    }

    #[inline]
    fn refuses(&self) -> bool {
        // Without it, nothing shared is written.
        let every = self.every.load(Ordering::Relaxed);
        every != 0 && self.refuses_one_in(every)
    }

    #[cold]
    fn refuses_one_in(&self, every: u64) -> bool {
        self.asked.fetch_add(1, Ordering::Relaxed) % every == every - 1
    }
}

/// A file whose bytes are not in memory. There are none: the bytes of all files are shared objects of Terrane's.
pub enum KernelFile {}

impl File for KernelFile {
    fn len(&self) -> u64 {
        match *self {}
    }
    fn read_at(&self, _: u64, _: &mut [u8]) -> Result<usize, IoError> {
        match *self {}
    }
    fn write_at(&self, _: u64, _: &[u8]) -> Result<(), IoError> {
        match *self {}
    }
    fn is_writable(&self) -> bool {
        match *self {}
    }
}

// SAFETY: the frames are RAM that the memory map gives to Terrane alone; the direct map reaches all of it.
unsafe impl Memory for KernelHost {
    #[inline]
    fn frames(&self) -> FrameRange {
        self.frames
    }

    #[inline]
    fn bytes(&self, frame: Frame) -> NonNull<u8> {
        // SAFETY: the direct map is not at 0.
        unsafe { NonNull::new_unchecked(direct(frame.address())) }
    }

    #[inline]
    unsafe fn copy(&self, from: NonNull<u8>, to: NonNull<u8>, len: usize) {
        // SAFETY: by the caller; assembly, so each byte is read and written as by an atomic.
        unsafe { crate::arch::copy_used_bytes(to.as_ptr(), from.as_ptr(), len) };
    }

    #[inline]
    fn refuses(&self) -> bool {
        self.refuser.refuses()
    }
}

// SAFETY: see `tlb`: when `shoot_down` returns, every processor that runs the space has dropped the range, and every other one
// drops what it kept before it runs the space again.
unsafe impl Tlb for KernelHost {
    type Space = Running;

    #[inline]
    fn shoot_down(&self, _: CpuId, space: &Running, range: AddrRange) -> ShootDown {
        tlb::shoot_down(space, range)
    }

    #[inline]
    fn has_passed(&self, _: CpuId, _: Ticket) -> bool {
        true
    }

    fn settle(&self, _: CpuId, _: Ticket) {}
}

/// Rounds of waiting for another processor before others run here.
const SPINS: u32 = 256;

/// What takes that long has been interrupted: by sleep, where a call waits for a lock, and goes on when it gets a processor, perhaps this one.
/// Since the kernel is not preempted, nobody else would give it one.
#[cold]
fn let_others_run() {
    if crate::arch::interrupts::are_enabled() {
        crate::task::yield_now();
    }
}

impl Wait for KernelHost {
    fn wait(&self, _: CpuId, word: &AtomicU32, value: u32) {
        crate::fs::userfault::announce();
        wait_while(word, value);
    }

    fn wake_all(&self, word: &AtomicU32) {
        wake_all(word);
    }

    #[inline]
    fn relax(&self, _: CpuId, rounds: u32) {
        crate::arch::relax();
        if rounds % SPINS == SPINS - 1 {
            let_others_run();
        }
    }
}

impl Observe for KernelHost {}

impl Host for KernelHost {
    type Format = X86_64;
    type File = KernelFile;
    type RwLock = RawRwLock;
    type Mutex = RawMutex;
}
