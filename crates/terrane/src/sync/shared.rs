//! A reference-counted pointer whose creation reports exhaustion instead of aborting.
//!
//! `alloc::sync::Arc::try_new` is not stable, and an abort in a kernel is a lost machine (rule: exhaustion is an
//! error). There are no weak references; what must not keep its target alive uses a raw pointer under a protocol
//! of its own.

use super::atomic::{AtomicUsize, Ordering, fence};
use crate::error::OutOfMemory;
use alloc::alloc::{Layout, alloc, dealloc};
use core::marker::PhantomData;
use core::ops::Deref;
use core::ptr::NonNull;

struct Counted<T> {
    references: AtomicUsize,
    value: T,
}

/// A shared owner of a `T`; the last one drops it.
pub struct Shared<T> {
    counted: NonNull<Counted<T>>,
    owns: PhantomData<Counted<T>>,
}

// SAFETY: like `Arc`: any owner on any thread may read the value or drop it last.
unsafe impl<T: Send + Sync> Send for Shared<T> {}
// SAFETY: as above; `&Shared` gives only `&T` and clones.
unsafe impl<T: Send + Sync> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// Moves `value` into shared memory.
    ///
    /// # Errors
    /// [`OutOfMemory`] when the allocator has none; `value` is dropped.
    pub fn try_new(value: T) -> Result<Self, OutOfMemory> {
        Self::try_new_or_return(value).map_err(|_| OutOfMemory)
    }

    /// As [`try_new`](Self::try_new), but gives the value back when there is no memory.
    ///
    /// # Errors
    /// `value`.
    pub fn try_new_or_return(value: T) -> Result<Self, T> {
        let layout = Layout::new::<Counted<T>>();
        // SAFETY: the layout is not of size zero: it holds the count.
        let Some(counted) = NonNull::new(unsafe { alloc(layout) }.cast::<Counted<T>>()) else {
            return Err(value);
        };
        // SAFETY: freshly allocated with the layout of `Counted<T>`.
        unsafe { counted.write(Counted { references: AtomicUsize::new(1), value }) };
        Ok(Self { counted, owns: PhantomData })
    }

    /// The value, for change, if this is its only owner.
    pub fn get_mut(this: &mut Self) -> Option<&mut T> {
        // SAFETY: `counted` is live while `this` is.
        let counted = unsafe { this.counted.as_mut() };
        // An only owner cannot be cloned while it is borrowed; acquire makes the former owners' use happen before.
        let order = mutant!("shared_only_owner_relaxed", Ordering::Acquire, Ordering::Relaxed);
        (counted.references.load(order) == 1).then_some(&mut counted.value)
    }

    /// True when both point to one value.
    #[inline]
    pub fn ptr_eq(a: &Self, b: &Self) -> bool {
        a.counted == b.counted
    }

    /// The address of the value; stable for as long as an owner lives.
    #[inline]
    pub fn as_ptr(this: &Self) -> *const T {
        // SAFETY: `counted` is live while `this` is; only the field's address is taken.
        unsafe { &raw const (*this.counted.as_ptr()).value }
    }

    /// Lets [`try_own`](Self::try_own) work for this value.
    pub(crate) fn expose(this: &Self) {
        let _ = this.counted.as_ptr().expose_provenance();
    }

    /// One more owner of the value at `value`, unless it is being dropped.
    ///
    /// # Safety
    /// `value` is what [`as_ptr`](Self::as_ptr) gave for a value that was [exposed](Self::expose), and whose memory is not
    /// freed during the call.
    pub(crate) unsafe fn try_own(value: *const T) -> Option<Self> {
        let addr = value.addr() - core::mem::offset_of!(Counted<T>, value);
        let counted = NonNull::new(core::ptr::with_exposed_provenance_mut::<Counted<T>>(addr))?;
        // SAFETY: the caller's promise: the count is there.
        let references = unsafe { &(*counted.as_ptr()).references };
        let owned =
            references.fetch_update(Ordering::Acquire, Ordering::Relaxed, |n| (n > 0).then_some(n + 1));
        owned.ok().map(|_| Self { counted, owns: PhantomData })
    }

    /// Owners at this moment; a hint once others may clone.
    pub fn references(this: &Self) -> usize {
        // SAFETY: `counted` is live while `this` is.
        unsafe { this.counted.as_ref() }.references.load(Ordering::Relaxed)
    }
}

impl<T> Clone for Shared<T> {
    #[inline]
    fn clone(&self) -> Self {
        // SAFETY: `counted` is live while `self` is. A new owner needs no ordering: it is made from one.
        unsafe { self.counted.as_ref() }.references.fetch_add(1, Ordering::Relaxed);
        Self { counted: self.counted, owns: PhantomData }
    }
}

impl<T> Deref for Shared<T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: `counted` is live while `self` is.
        unsafe { &self.counted.as_ref().value }
    }
}

impl<T> Drop for Shared<T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: live until the count falls to zero, which happens for one owner only; release and acquire make
        // every other owner's use happen before the drop.
        unsafe {
            let order = mutant!("shared_drop_relaxed", Ordering::Release, Ordering::Relaxed);
            if self.counted.as_ref().references.fetch_sub(1, order) != 1 {
                return;
            }
            mutant!("shared_drop_without_acquire", fence(Ordering::Acquire), ());
            self.counted.as_ptr().drop_in_place();
            dealloc(self.counted.as_ptr().cast(), Layout::new::<Counted<T>>());
        }
    }
}

impl<T: core::fmt::Debug> core::fmt::Debug for Shared<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(terrane_watch)]
impl<T> crate::names::Describe for Shared<T> {
    /// The count of owners only: what is shared has a place of its own to be described from.
    fn describe(&self, names: &mut crate::names::Names) {
        // SAFETY: `counted` is live while `self` is.
        names.field("references", &unsafe { self.counted.as_ref() }.references);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::AtomicUsize as Count;
    use std::thread;

    static DROPS: Count = Count::new(0);

    struct Counts(u32);

    impl Drop for Counts {
        fn drop(&mut self) {
            DROPS.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn the_last_owner_drops_it_once() {
        let mut first = Shared::try_new(Counts(7)).unwrap();
        assert_eq!(Shared::get_mut(&mut first).map(|counts| counts.0), Some(7));
        let second = first.clone();
        assert!(Shared::get_mut(&mut first).is_none() && Shared::ptr_eq(&first, &second));
        assert_eq!((Shared::references(&first), Shared::as_ptr(&first)), (2, Shared::as_ptr(&second)));
        thread::scope(|scope| {
            for _ in 0..4 {
                let mine = first.clone();
                scope.spawn(move || (0..1000).for_each(|_| drop(mine.clone())));
            }
        });
        drop(first);
        assert_eq!((DROPS.load(Ordering::Relaxed), second.0), (0, 7));
        drop(second);
        assert_eq!(DROPS.load(Ordering::Relaxed), 1);
    }
}
