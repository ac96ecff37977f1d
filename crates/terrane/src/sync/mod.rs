//! Synchronisation primitives: what the layers above are built from.
//!
//! | module | what it gives |
//! |---|---|
//! | [`atomic`] | the one door to atomics |
//! | [`epoch`] | pins: readers without locks, reclamation after them, and each CPU's private state |
//! | [`seq`] | the sequence counter of a VMA |
//! | [`spin`] | a small lock for short, rare critical sections |
//! | [`shared`] | a reference-counted pointer whose creation can fail |

pub mod atomic;
pub mod epoch;
pub mod seq;
pub mod shared;
pub mod spin;

pub use epoch::{CpuId, Epoch, Participant, Pin, RetireLink};
pub use seq::SeqCount;
pub use shared::Shared;
pub use spin::SpinLock;
