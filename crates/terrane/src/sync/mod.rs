//! Synchronisation primitives: what the layers above are built from.
//!
//! | module | what it gives |
//! |---|---|
//! | [`atomic`] | the one door to atomics |
//! | [`epoch`] | pins: readers without locks, reclamation after them, and each CPU's private state |
//! | [`seq`] | the sequence counter of a VMA |
//! | [`spin`] | a small lock for short, rare critical sections |
//! | [`shared`] | a reference-counted pointer whose creation can fail |
//! | [`tally`] | a counter that many CPUs add to |

/// Is `$right`; or `$wrong`, while a model has chosen the mutation `$name` to see that it is caught. Plain builds
/// know only `$right`. See `sync::mutation`.
#[cfg(not(any(terrane_watch, terrane_loom)))]
macro_rules! mutant {
    ($name:literal, $right:expr, $wrong:expr $(,)?) => {
        $right
    };
}
#[cfg(any(terrane_watch, terrane_loom))]
macro_rules! mutant {
    ($name:literal, $right:expr, $wrong:expr $(,)?) => {
        if $crate::sync::mutation::is($name) { $wrong } else { $right }
    };
}
/// Under the mutation of this name, gives other threads time: for harm that needs others to do much within few steps. Nothing otherwise.
#[cfg(not(terrane_watch))]
macro_rules! linger {
    ($name:literal) => {};
}
#[cfg(terrane_watch)]
macro_rules! linger {
    ($name:literal) => {
        if $crate::sync::mutation::is($name) {
            $crate::sync::mutation::linger();
        }
    };
}
pub mod atomic;
pub mod epoch;
#[cfg(any(terrane_watch, terrane_loom))]
pub mod mutation;
pub(crate) mod once;
pub mod recent;
pub mod seq;
pub mod shared;
pub mod spin;
pub mod tally;

pub use epoch::{CpuId, Epoch, Freeing, Participant, Pin, RetireLink};
pub use recent::Recent;
pub use seq::SeqCount;
pub use shared::Shared;
pub use spin::SpinLock;
pub use tally::Tally;
