//! The one door to atomics.
//!
//! Every module of the library takes its atomics, fences and spin hints from here and nowhere else, so that
//! a model checker or a recorder of cache-line writes takes their place in one step. There are three of them:
//!
//! | configuration | what is behind the door | for |
//! |---|---|---|
//! | none | `core`'s own types, re-exported: nothing is added | everybody |
//! | `--cfg terrane_watch` | the same, and each thread may install a hook that is told of every operation | the cache-line audit; shuttle, for which each operation is a point to switch threads |
//! | `--cfg terrane_loom` | loom's, which know the C11 memory model | the models of small protocols |
//!
//! Code that names an atomic of the library, a host's [`Wait`](crate::host::Wait) say, takes it from here as well, or
//! it does not compile with the other two. `docs/proof.md` has the commands.

#[cfg(all(terrane_watch, terrane_loom))]
compile_error!("`terrane_watch` and `terrane_loom` exclude each other");

#[cfg(not(any(terrane_watch, terrane_loom)))]
mod plain {
    pub use core::hint::spin_loop;
    pub use core::sync::atomic::{
        AtomicBool, AtomicI64, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, fence,
    };

    /// Tells the watcher that this thread writes `count` values from `first` on by plain stores: state that is not
    /// atomic because it has one user at a time. Nothing, unless the library is built with `--cfg terrane_watch`.
    #[inline(always)]
    pub fn note_write<T>(_first: *const T, _count: usize) {}
}
#[cfg(terrane_loom)]
#[path = "loom.rs"]
mod plain;
#[cfg(terrane_watch)]
#[path = "watch.rs"]
mod plain;

pub use core::sync::atomic::Ordering;
pub use plain::*;

/// A full fence behind a read-modify-write, whatever its order. On x86 a locked instruction is one already, even a compare-and-swap
/// that fails, and only the compiler is told; the language, and processors that load-link and store-conditionally, let later
/// loads pass its store.
#[inline]
pub fn fence_behind_locked() {
    if cfg!(all(any(target_arch = "x86_64", target_arch = "x86"), not(terrane_loom))) {
        core::sync::atomic::compiler_fence(Ordering::SeqCst);
    } else {
        fence(Ordering::SeqCst);
    }
}
