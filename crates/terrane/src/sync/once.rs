//! A value that is set once, by whoever is first, and read without waiting.

use super::atomic::{AtomicPtr, Ordering};
use crate::error::Error;
use alloc::alloc::{Layout, alloc};
use alloc::boxed::Box;
use core::marker::PhantomData;
use core::ptr;

/// Nothing, or a `T` for as long as this lives.
pub(crate) struct SetOnce<T> {
    value: AtomicPtr<T>,
    owns: PhantomData<T>,
}

// SAFETY: it owns its value as a box does, and gives only shared references to it.
unsafe impl<T: Send> Send for SetOnce<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for SetOnce<T> {}

impl<T> SetOnce<T> {
    pub(crate) const LAYOUT: () = assert!(size_of::<T>() > 0);

    pub(crate) fn new() -> Self {
        let () = Self::LAYOUT;
        Self { value: AtomicPtr::new(ptr::null_mut()), owns: PhantomData }
    }

    /// The value, if it is set.
    #[inline]
    pub(crate) fn get(&self) -> Option<&T> {
        // SAFETY: null, or set once, and freed with `self`.
        unsafe { self.value.load(Ordering::Acquire).as_ref() }
    }

    /// Sets the value.
    ///
    /// # Errors
    /// [`Error::NoMemory`]; [`Error::Exists`] when it is set already.
    pub(crate) fn set(&self, value: T) -> Result<(), Error> {
        self.set_or_return(value).map_err(|(error, _)| error)
    }

    /// Sets the value, or gives it back with the reason.
    pub(crate) fn set_or_return(&self, value: T) -> Result<(), (Error, T)> {
        // SAFETY: the layout has a size, as asserted.
        let place = unsafe { alloc(Layout::new::<T>()) }.cast::<T>();
        if place.is_null() {
            return Err((Error::NoMemory, value));
        }
        // SAFETY: just allocated for this type.
        unsafe { place.write(value) };
        let set = self.value.compare_exchange(ptr::null_mut(), place, Ordering::AcqRel, Ordering::Relaxed);
        if set.is_err() {
            // SAFETY: allocated above as a box is, and known to nobody.
            return Err((Error::Exists, *unsafe { Box::from_raw(place) }));
        }
        Ok(())
    }
}

impl<T> Drop for SetOnce<T> {
    fn drop(&mut self) {
        let value = self.value.swap(ptr::null_mut(), Ordering::AcqRel);
        if !value.is_null() {
            // SAFETY: allocated by `set` as a box is; nobody borrows `self` any more.
            drop(unsafe { Box::from_raw(value) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::String;

    #[test]
    fn the_first_value_stays() {
        let once = SetOnce::new();
        assert!(once.get().is_none());
        once.set(String::from("one")).unwrap();
        assert_eq!(once.set(String::from("two")), Err(Error::Exists));
        assert_eq!(once.get().map(String::as_str), Some("one"));
    }
}
