//! The kernel's heap: what `alloc` allocates from.

use crate::sync::RawSpin;
use talc::{ErrOnOom, Talc, Talck};

#[global_allocator]
static HEAP: Talck<RawSpin, ErrOnOom> = Talc::new(ErrOnOom).lock();
