//! A spin lock that interrupt handlers may take: interrupts are off while it is held.
//!
//! Who waits for it lets interrupts in between two tries if they were on before, and answers shoot-downs while it spins. Whoever holds
//! one must not call into Terrane, touch user memory that may fault, block, or wait for another CPU; it is held for nanoseconds.
//!
//! Order, outer to inner: timers, the tree of processes, pending signals, futex buckets and wait queues, run queues. The
//! allocator's lock is inside all of them.

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicBool, Ordering};

use crate::arch::{self, interrupts};

/// A value behind a spin lock.
pub struct Lock<T> {
    held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the lock gives the value to one at a time.
unsafe impl<T: Send> Sync for Lock<T> {}
// SAFETY: as its value.
unsafe impl<T: Send> Send for Lock<T> {}

/// The right to use the value; interrupts are off until it goes.
pub struct Guard<'a, T> {
    lock: &'a Lock<T>,
    interrupts: bool,
}

impl<T> Lock<T> {
    /// A lock that nobody holds.
    pub const fn new(value: T) -> Self {
        Self { held: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// Takes the lock, with interrupts off.
    pub fn lock(&self) -> Guard<'_, T> {
        let interrupts = interrupts::are_enabled();
        loop {
            interrupts::disable();
            if !self.held.swap(true, Ordering::Acquire) {
                return Guard { lock: self, interrupts };
            }
            if interrupts {
                interrupts::enable();
            }
            while self.held.load(Ordering::Relaxed) {
                arch::relax();
            }
        }
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the guard's owner holds the lock.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and by `&mut` of the guard nobody else has a reference.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        self.lock.held.store(false, Ordering::Release);
        if self.interrupts {
            interrupts::enable();
        }
    }
}
