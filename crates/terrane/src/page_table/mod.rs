//! Page tables: what the processor walks, and what faults and layout changes agree on.
//!
//! | module | what it gives |
//! |---|---|
//! | [`format`](mod@format) | the bits of a processor's entries, as a parameter ([`X86_64`], [`Aarch64`]) |
//! | [`pte`] | what an entry says, and Terrane's own kinds of entries |
//! | [`entry`] | the protocol of one entry: the only lock of a page fault |
//! | [`table`] | the tree of tables: finding the entry of an address, making the tables on the way |
//! | [`sweep`] | going over the entries of a range: zap, protect, fork |
//! | [`block`] | dividing blocks of 2 MiB into pages, and gathering pages into blocks |
//! | [`free`] | giving up tables that have become empty, under the eyes of faults |
//!
//! There is no lock in a page table. Every entry, of any level, is taken and published for itself; reading needs
//! a [`Pin`](crate::sync::Pin) and nothing else. What must be right between an entry and the mapping it belongs to
//! is the business of [`entry`]'s protocol and of the VMA's sequence counter.

pub mod aarch64;
pub mod block;
pub mod entry;
pub mod format;
pub mod free;
pub mod pte;
pub mod sweep;
pub mod table;
pub mod x86_64;

pub use aarch64::Aarch64;
pub use entry::{Slot, Table, Taken};
pub use format::{Format, PteFlags};
pub use pte::{BUSY, EMPTY, GUARD, PAYLOAD_USER_WP, Pte, Raw, TOMBSTONE, swap_slot};
pub use sweep::{Pair, Run};
pub use table::{Level, PageTable, SlotError, Walk};
pub use x86_64::X86_64;

#[cfg(test)]
mod tests;
