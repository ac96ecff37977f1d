//! The one door to atomics.
//!
//! Every module of the library takes its atomics, fences and spin hints from here and nowhere else, so that
//! a model checker or a recorder of cache-line writes can take their place in one step.

pub use core::hint::spin_loop;
pub use core::sync::atomic::{
    AtomicBool, AtomicI64, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
