//! Fields that only the thread they belong to uses.

use core::cell::UnsafeCell;

/// A value of a thread's, for that thread alone.
pub struct Own<T>(UnsafeCell<T>);

// SAFETY: used by one thread at a time: see `Own::get` and `Own::with`.
unsafe impl<T: Send> Sync for Own<T> {}

impl<T> Own<T> {
    /// Holds `value`.
    pub const fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    /// The value.
    ///
    /// # Safety
    /// The caller is the thread that it belongs to (or has not let that run yet), and no [`with`](Self::with) is under way.
    pub unsafe fn get(&self) -> &T {
        // SAFETY: the caller's promise: nobody changes it.
        unsafe { &*self.0.get() }
    }

    /// Runs `act` on the value; `act` does not come back to this value.
    ///
    /// # Safety
    /// The caller is the thread that it belongs to (or has not let that run yet), and holds no reference from [`get`](Self::get).
    pub unsafe fn with<R>(&self, act: impl FnOnce(&mut T) -> R) -> R {
        // SAFETY: the caller's promise: this is the only reference.
        act(unsafe { &mut *self.0.get() })
    }
}
