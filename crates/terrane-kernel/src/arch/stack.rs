//! Kernel stacks.

use core::alloc::Layout;
use terrane::OutOfMemory;

/// Bytes of a thread's kernel stack. Most calls take a few KiB, but a new address space is built on the stack before it gets its
/// place, which takes some 60; and code that is not optimised makes more copies.
const SIZE: usize = if cfg!(debug_assertions) { 256 << 10 } else { 128 << 10 };
/// What lies at the end of a stack as long as it has not overflowed.
const CANARY: u64 = 0x7465_7272_616e_6521;

/// Memory for a stack, aligned to a page; where it begins.
pub fn allocate(size: usize) -> Result<*mut u8, OutOfMemory> {
    let layout = Layout::from_size_align(size, 4096).map_err(|_| OutOfMemory)?;
    // SAFETY: the layout has a size.
    let base = unsafe { alloc::alloc::alloc(layout) };
    if base.is_null() { Err(OutOfMemory) } else { Ok(base) }
}

/// The stack on which the kernel runs for one thread. A word at its end tells when it has overflowed.
pub struct KernelStack(*mut u8);

// SAFETY: it is memory of its own.
unsafe impl Send for KernelStack {}
// SAFETY: what is shared gives only addresses.
unsafe impl Sync for KernelStack {}

impl KernelStack {
    /// A new one.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn try_new() -> Result<Self, OutOfMemory> {
        let base = allocate(SIZE)?;
        // SAFETY: just allocated, aligned to a page.
        unsafe { base.cast::<u64>().write(CANARY) };
        Ok(Self(base))
    }

    /// The address behind its last byte, aligned to 16: where it begins to be used.
    #[inline]
    pub fn top(&self) -> u64 {
        self.0 as u64 + SIZE as u64
    }

    /// Where a program's registers are kept while the kernel runs for it: at the top.
    #[inline]
    pub fn user_frame(&self) -> *mut super::TrapFrame {
        (self.top() - size_of::<super::TrapFrame>() as u64) as *mut super::TrapFrame
    }
}

/// Panics when the kernel stack that begins at `top` has overflowed: what lies beside it is broken. 0: no stack.
#[inline]
pub fn check(top: u64) {
    // SAFETY: the end of the stack; written when it was made.
    if top != 0 && unsafe { ((top - SIZE as u64) as *const u64).read_volatile() } != CANARY {
        overflowed(top);
    }
}

#[cold]
fn overflowed(top: u64) -> ! {
    panic!("the kernel stack at {top:#x} has overflowed");
}

impl Drop for KernelStack {
    fn drop(&mut self) {
        check(self.top());
        // SAFETY: allocated by `try_new` with this layout; who drops it does not run on it.
        unsafe { alloc::alloc::dealloc(self.0, Layout::from_size_align_unchecked(SIZE, 4096)) };
    }
}
