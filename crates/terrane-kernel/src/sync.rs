//! Locks of the kernel.

use crate::arch;
use core::sync::atomic::{AtomicBool, Ordering};

/// A spin lock: held for nanoseconds. While it spins, a processor answers shoot-downs. One that interrupt handlers take is
/// taken with interrupts kept out ([`arch::interrupts::without`]).
pub type SpinLock<T> = lock_api::Mutex<RawSpin, T>;
/// A blocking lock.
pub type Mutex<T> = lock_api::Mutex<RawMutex, T>;
/// A blocking lock for many readers or one writer.
pub type RwLock<T> = lock_api::RwLock<RawRwLock, T>;

/// The inside of a [`SpinLock`].
pub struct RawSpin(AtomicBool);

// SAFETY: one holder at a time: the one whose compare-and-swap made it true.
unsafe impl lock_api::RawMutex for RawSpin {
    #[allow(clippy::declare_interior_mutable_const, reason = "as lock_api asks")]
    const INIT: Self = RawSpin(AtomicBool::new(false));
    type GuardMarker = lock_api::GuardNoSend;

    #[inline]
    fn lock(&self) {
        while !self.try_lock() {
            while self.0.load(Ordering::Relaxed) {
                arch::relax();
            }
        }
    }

    #[inline]
    fn try_lock(&self) -> bool {
        self.0.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[inline]
    unsafe fn unlock(&self) {
        self.0.store(false, Ordering::Release);
    }
}

/// The inside of a [`Mutex`].
pub type RawMutex = RawSpin;

/// The inside of a [`RwLock`].
pub struct RawRwLock(core::sync::atomic::AtomicU32);

const WRITER: u32 = 1 << 31;

// SAFETY: the word holds the number of readers, or the mark of the one writer.
unsafe impl lock_api::RawRwLock for RawRwLock {
    #[allow(clippy::declare_interior_mutable_const, reason = "as lock_api asks")]
    const INIT: Self = RawRwLock(core::sync::atomic::AtomicU32::new(0));
    type GuardMarker = lock_api::GuardNoSend;

    fn lock_shared(&self) {
        while !self.try_lock_shared() {
            arch::relax();
        }
    }
    fn try_lock_shared(&self) -> bool {
        let word = self.0.load(Ordering::Relaxed);
        word & WRITER == 0
            && self.0.compare_exchange(word, word + 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }
    unsafe fn unlock_shared(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
    fn lock_exclusive(&self) {
        while !self.try_lock_exclusive() {
            arch::relax();
        }
    }
    fn try_lock_exclusive(&self) -> bool {
        self.0.compare_exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }
    unsafe fn unlock_exclusive(&self) {
        self.0.store(0, Ordering::Release);
    }
}
