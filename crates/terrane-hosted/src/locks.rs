//! The blocking locks of the machine: `parking_lot`'s.
//!
//! With `--cfg terrane_watch` every locking and unlocking tells the watcher that it writes the lock's word, because
//! `parking_lot` has atomics of its own, which nobody watches.

#[cfg(not(terrane_watch))]
pub use parking_lot::{RawMutex, RawRwLock};
#[cfg(terrane_watch)]
pub use watched::{RawMutex, RawRwLock};

#[cfg(terrane_watch)]
mod watched {
    use parking_lot::lock_api;
    use terrane::sync::atomic::note_write;

    /// `parking_lot`'s, watched.
    pub struct RawMutex(parking_lot::RawMutex);

    // SAFETY: nothing is added but notes.
    unsafe impl lock_api::RawMutex for RawMutex {
        #[allow(clippy::declare_interior_mutable_const, reason = "the trait asks for a constant")]
        const INIT: Self = Self(lock_api::RawMutex::INIT);
        type GuardMarker = <parking_lot::RawMutex as lock_api::RawMutex>::GuardMarker;

        #[track_caller]
        fn lock(&self) {
            note_write(self, 1);
            self.0.lock();
        }

        #[track_caller]
        fn try_lock(&self) -> bool {
            note_write(self, 1);
            self.0.try_lock()
        }

        unsafe fn unlock(&self) {
            note_write(self, 1);
            // SAFETY: by the caller.
            unsafe { self.0.unlock() }
        }
    }

    /// `parking_lot`'s, watched.
    pub struct RawRwLock(parking_lot::RawRwLock);

    // SAFETY: nothing is added but notes.
    unsafe impl lock_api::RawRwLock for RawRwLock {
        #[allow(clippy::declare_interior_mutable_const, reason = "the trait asks for a constant")]
        const INIT: Self = Self(lock_api::RawRwLock::INIT);
        type GuardMarker = <parking_lot::RawRwLock as lock_api::RawRwLock>::GuardMarker;

        fn lock_shared(&self) {
            note_write(self, 1);
            self.0.lock_shared();
        }

        fn try_lock_shared(&self) -> bool {
            note_write(self, 1);
            self.0.try_lock_shared()
        }

        unsafe fn unlock_shared(&self) {
            note_write(self, 1);
            // SAFETY: by the caller.
            unsafe { self.0.unlock_shared() }
        }

        fn lock_exclusive(&self) {
            note_write(self, 1);
            self.0.lock_exclusive();
        }

        fn try_lock_exclusive(&self) -> bool {
            note_write(self, 1);
            self.0.try_lock_exclusive()
        }

        unsafe fn unlock_exclusive(&self) {
            note_write(self, 1);
            // SAFETY: by the caller.
            unsafe { self.0.unlock_exclusive() }
        }
    }
}
