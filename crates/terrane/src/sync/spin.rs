//! A lock for critical sections of a few dozen instructions that hold no other lock and never block.
//!
//! Test-and-test-and-set: no fault takes one, so fairness is not worth a second word. Built on `lock_api`, so
//! that guards and `Sync` bounds are not ours to get wrong.

use super::atomic::{AtomicBool, Ordering, spin_loop};

/// The raw lock behind [`SpinLock`].
#[derive(Debug)]
pub struct RawSpin(AtomicBool);

// SAFETY: `try_lock` succeeds only on the change from false to true, and only the holder stores false again, so
// at most one holder exists at a time; acquire and release order the critical sections.
unsafe impl lock_api::RawMutex for RawSpin {
    #[allow(
        clippy::declare_interior_mutable_const,
        reason = "lock_api asks for the initial value as a constant"
    )]
    const INIT: Self = RawSpin(AtomicBool::new(false));
    type GuardMarker = lock_api::GuardNoSend;

    #[inline]
    fn lock(&self) {
        while !self.try_lock() {
            while self.0.load(Ordering::Relaxed) {
                spin_loop();
            }
        }
    }

    #[inline]
    fn try_lock(&self) -> bool {
        let order = mutant!("spin_lock_relaxed", Ordering::Acquire, Ordering::Relaxed);
        self.0.compare_exchange(false, true, order, Ordering::Relaxed).is_ok()
    }

    #[inline]
    unsafe fn unlock(&self) {
        self.0.store(false, mutant!("spin_unlock_relaxed", Ordering::Release, Ordering::Relaxed));
    }

    /// Writes nothing. Whoever finds it free sees what its holders wrote.
    #[inline]
    fn is_locked(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// A spinning mutual-exclusion lock around a `T`.
pub type SpinLock<T> = lock_api::Mutex<RawSpin, T>;

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn one_holder_at_a_time() {
        let total = SpinLock::new(0u64);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| (0..10_000).for_each(|_| *total.lock() += 1));
            }
        });
        assert!(total.try_lock().is_some_and(|_held| total.try_lock().is_none()));
        assert_eq!(total.into_inner(), 30_000);
    }
}
