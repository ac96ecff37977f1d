//! Large arrays that start as zeros and are not touched until used.

use crate::error::OutOfMemory;
use alloc::alloc::{Layout, alloc_zeroed, dealloc};
use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;
use core::slice;

/// Alignment of the first element: a cache line, so that elements whose size divides it never lie across two.
const LINE: usize = 64;

/// Types of which all-zero bytes are a value.
///
/// # Safety
/// All-zero bytes are a valid value, dropping it does nothing, and its alignment is at most [`LINE`].
pub(crate) unsafe trait Zeroable {}

/// A boxed slice of zeros, aligned to a cache line.
///
/// The alignment is made by hand: asked for more than 16 bytes of it, the allocators of `std` zero by writing, and
/// the metadata of 16 GiB (128 MiB) would cost 50 ms at start instead of nothing.
pub(crate) struct ZeroedArray<T> {
    base: NonNull<T>,
    len: usize,
    allocation: NonNull<u8>,
    owns: PhantomData<T>,
}

// SAFETY: it owns its elements as a boxed slice does.
unsafe impl<T: Send> Send for ZeroedArray<T> {}
// SAFETY: as above; a shared array gives only shared elements.
unsafe impl<T: Sync> Sync for ZeroedArray<T> {}

impl<T: Zeroable> ZeroedArray<T> {
    pub(crate) fn try_new(len: usize) -> Result<Self, OutOfMemory> {
        let layout = Self::layout(len).ok_or(OutOfMemory)?;
        // SAFETY: the layout holds at least a cache line.
        let allocation = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(OutOfMemory)?;
        let gap = allocation.as_ptr().align_offset(LINE);
        if gap >= LINE {
            // SAFETY: allocated above with this layout. (A compiler may leave the offset unknown; none does here.)
            unsafe { dealloc(allocation.as_ptr(), layout) };
            return Err(OutOfMemory);
        }
        // SAFETY: the layout has a cache line to spare, and the gap is less than one.
        let base = unsafe { allocation.add(gap) }.cast();
        Ok(Self { base, len, allocation, owns: PhantomData })
    }
}

impl<T> ZeroedArray<T> {
    fn layout(len: usize) -> Option<Layout> {
        let size = len.checked_mul(size_of::<T>())?.checked_add(LINE)?;
        Layout::from_size_align(size, 16).ok()
    }
}

impl<T> Deref for ZeroedArray<T> {
    type Target = [T];
    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: `len` elements from `base` lie inside the allocation, aligned, and zeros are values of them.
        unsafe { slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for ZeroedArray<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as for `deref`; the borrow is exclusive.
        unsafe { slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

impl<T> Drop for ZeroedArray<T> {
    fn drop(&mut self) {
        if let Some(layout) = Self::layout(self.len) {
            // SAFETY: allocated by `try_new` with the layout of this length; elements need no drop.
            unsafe { dealloc(self.allocation.as_ptr(), layout) };
        }
    }
}
