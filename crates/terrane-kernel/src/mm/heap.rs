//! The kernel's heap: what `alloc` allocates from.
//!
//! One lock for all. Terrane allocates when mappings change, not in faults on memory that is there, and keeps records and frames for
//! each processor by itself.

//!
//! The lock is held with interrupts off: interrupt handlers queue signals.

use super::layout::{Piece, direct};
use crate::arch::interrupts;
use crate::sync::RawSpin;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use talc::{ErrOnOom, Span, Talc, Talck};

/// A spin lock that keeps interrupts out while it is held.
struct RawQuiet {
    lock: RawSpin,
    /// Whether the holder lets interrupts in afterwards; the holder's.
    enables: AtomicBool,
}

// SAFETY: as exclusive as the lock inside.
unsafe impl lock_api::RawMutex for RawQuiet {
    #[allow(clippy::declare_interior_mutable_const, reason = "as lock_api asks")]
    const INIT: Self = RawQuiet { lock: RawSpin::INIT, enables: AtomicBool::new(false) };
    type GuardMarker = lock_api::GuardNoSend;

    #[inline]
    fn lock(&self) {
        let enables = interrupts::are_enabled();
        interrupts::disable();
        self.lock.lock();
        self.enables.store(enables, Ordering::Relaxed);
    }

    #[inline]
    fn try_lock(&self) -> bool {
        let enables = interrupts::are_enabled();
        interrupts::disable();
        let taken = self.lock.try_lock();
        if taken {
            self.enables.store(enables, Ordering::Relaxed);
        } else if enables {
            interrupts::enable();
        }
        taken
    }

    #[inline]
    unsafe fn unlock(&self) {
        let enables = self.enables.load(Ordering::Relaxed);
        // SAFETY: by the caller.
        unsafe { self.lock.unlock() };
        if enables {
            interrupts::enable();
        }
    }
}

#[global_allocator]
static HEAP: Talck<RawQuiet, ErrOnOom> = Talc::new(ErrOnOom).lock();

/// Bytes that it was given.
static SIZE: AtomicUsize = AtomicUsize::new(0);

/// How many bytes it has, used or not.
pub fn size() -> usize {
    SIZE.load(Ordering::Relaxed)
}

/// Gives `piece` to the heap, for ever.
///
/// # Safety
/// Nobody else uses that memory, and it is mapped.
pub unsafe fn add(piece: Piece) {
    SIZE.fetch_add(piece.len() as usize, Ordering::Relaxed);
    let span = Span::new(direct(piece.start), direct(piece.end));
    // SAFETY: by the caller.
    if unsafe { HEAP.lock().claim(span) }.is_err() {
        crate::log!("a piece of memory is too small for the heap: {} bytes", piece.len());
    }
}
