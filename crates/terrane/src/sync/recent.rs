//! What a CPU found last, kept from one pin to the next.
//!
//! # What it guarantees
//!
//! [`Recent::get`] gives the object only while it cannot have been freed. It says nothing of whether the object can still be
//! reached: that is for the object's own word to say (a VMA's sequence counter is odd for ever once it has left its space).
//!
//! # Why it is right
//!
//! *Found:* under a pin that announced epoch `a` before it looked. The stamp of an object that is unlinked later is read from the
//! global epoch behind a full fence, after the unlinking, and so is `a` or later: it is freed at `a + 2` at the earliest. *Used again:* under a pin that, once it
//! has announced its epoch behind a full fence, still reads `a` as the global one. From `a` the epoch moves at most to `a + 1`
//! while that pin lasts: whoever moves it from `a + 1` on reads `a + 1` first, passes a full fence, and then reads the
//! announcement; had he read it before it was made, the pin would have read `a + 1`. So nothing that was stamped `a` or later
//! is freed under either pin.
//!
//! So an object is remembered for as long as nobody moves the epoch, which layout changes do once in 32 retirements: long enough
//! for most faults, each of which saves a descent through the index, and the lines of leaves that others change.
//!
//! # Who may break it
//!
//! Whoever remembers an object that is not freed through [`Participant::retire`](super::Participant::retire) of the same epoch.
//!
//! # Source
//!
//! Linux kept the last VMAs of a thread (`vmacache`, 2014 to 2022), and told old ones from new by a counter of the space, which every
//! unmap wrote.

use super::Pin;
use core::cell::Cell;
use core::ptr;

/// See the [module](self).
pub struct Recent {
    epoch: Cell<u64>,
    /// Of what type is for the user to know.
    object: Cell<*const ()>,
}

// SAFETY: the pointer is followed only under the conditions of the module's head, on whatever thread; what it gives is shared.
unsafe impl Send for Recent {}

impl Recent {
    /// Nothing yet.
    pub const fn new() -> Self {
        Self { epoch: Cell::new(0), object: Cell::new(ptr::null()) }
    }

    /// Remembers `object`.
    ///
    /// # Safety
    /// It was found under `pin`, could be reached then, and is freed only by having been retired in the pin's epoch.
    #[inline]
    pub unsafe fn set<T: Sync>(&self, pin: &Pin<'_>, object: &T) {
        self.epoch.set(pin.announced());
        self.object.set(ptr::from_ref(object).cast());
    }

    /// What was remembered, if it is certainly still there.
    ///
    /// # Safety
    /// Only objects of type `T` have been remembered here.
    #[inline]
    pub unsafe fn get<'p, T: Sync>(&self, pin: &'p Pin<'_>) -> Option<&'p T> {
        let is_current = pin.epoch().now() == self.epoch.get();
        if mutant!("recent_of_any_epoch", is_current, true) {
            // SAFETY: null, or not freed before the pin ends (see the head), and of this type by the caller's promise.
            unsafe { self.object.get().cast::<T>().as_ref() }
        } else {
            None
        }
    }
}

impl Default for Recent {
    fn default() -> Self {
        Self::new()
    }
}
