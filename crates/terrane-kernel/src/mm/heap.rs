//! The kernel's heap: what `alloc` allocates from.
//!
//! One lock for all. Terrane allocates when mappings change, not in faults on memory that is there, and keeps records and frames for
//! each processor by itself.

use super::layout::{Piece, direct};
use crate::sync::RawSpin;
use talc::{ErrOnOom, Span, Talc, Talck};

#[global_allocator]
static HEAP: Talck<RawSpin, ErrOnOom> = Talc::new(ErrOnOom).lock();

/// Gives `piece` to the heap, for ever.
///
/// # Safety
/// Nobody else uses that memory, and it is mapped.
pub unsafe fn add(piece: Piece) {
    let span = Span::new(direct(piece.start), direct(piece.end));
    // SAFETY: by the caller.
    if unsafe { HEAP.lock().claim(span) }.is_err() {
        crate::log!("a piece of memory is too small for the heap: {} bytes", piece.len());
    }
}
