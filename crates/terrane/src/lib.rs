//! A virtual-memory manager to embed: the part of an operating system that owns an address space (its mappings, its page
//! tables, its page faults), for kernels, unikernels, hypervisors, emulators and user-space pagers.
//!
//! The promise: **a page fault never waits for a change to some other part of the address space, and never writes a cache
//! line that another CPU's fault writes.**
//!
//! # The idea
//!
//! A page fault usually takes the lock of its address space, for reading, so that no mapping changes under its hands. With
//! many threads that lock is what they wait for: each fault writes its cache line, and each `mmap` stops them all.
//! Terrane's faults take no lock. They find the mapping in an index that is read without locks, note its *sequence counter*,
//! make the page ready, take the *page-table entry* with one compare-and-swap, look at the counter once more, and publish. A
//! change to the mapping moves the counter first and sweeps the entries after, so one of the two always notices the other.
//! The [`fault`] module tells it step by step; `docs/design.md` tells how the rest fits around it.
//!
//! # From the ground up
//!
//! Every layer is exposed and documented, each knows only those before it:
//!
//! | module | layer |
//! |---|---|
//! | [`addr`], [`error`] | addresses, ranges, frames, errors |
//! | [`sync`] | pins and epochs, sequence counters, a lock, a shared pointer |
//! | [`stats`], [`host`] | counters and events; **what a host provides** |
//! | [`identity`] | what listings call files and shared memory |
//! | [`frame`] | physical pages: who has which, and when they come back |
//! | [`page_table`] | formats, the protocol of an entry, walks and sweeps |
//! | [`machine`] | a host with its frames and CPUs, shared by many spaces |
//! | [`history`] | what a listing needs to show one moment while calls go on |
//! | [`range_lock`] | calls about disjoint ranges do not wait for one another |
//! | [`swap`] | pages that are elsewhere than in memory |
//! | [`object`] | files and shared memory |
//! | [`vma`], [`index`], [`mm`] | the record of a mapping, the ordered map of them, and the inside of a space |
//! | [`rmap`] | from a page to the entries that map it |
//! | [`reclaim`] | memory found where it is not in use |
//! | [`fault`] | page faults |
//! | [`space`] | **the calls**: map, unmap, protect, advise, brk, populate, fork, list, user faults |
//! | [`text`] | what `/proc` says of a space and of a machine |
//!
//! # To use it
//!
//! Implement [`host::Host`] (`examples/minimal_host.rs` is a whole one in some hundred lines), make a
//! [`Machine`](machine::Machine), register a [`Cpu`](machine::Cpu) for each processor, and make
//! [`AddressSpace`](space::AddressSpace)s. The crate `terrane-hosted` is a ready machine in user space, with real memory, real files and
//! software processors.
//!
//! The library is `no_std` with `alloc`. It has no global state, starts no threads, never panics on input, and reports exhaustion of
//! memory as an error.
#![no_std]

extern crate alloc;
#[cfg(test)]
extern crate std;

#[cfg(terrane_watch)]
#[macro_use]
pub mod names;
#[cfg(not(terrane_watch))]
#[macro_use]
mod names {
    /// Nothing: names are for the cache-line audit (`docs/audit.md`).
    macro_rules! describe {
        ($($t:tt)*) => {};
    }
}
// First, for its macro.
#[macro_use]
pub mod sync;

pub mod addr;
pub mod commit;
mod copy;
pub mod error;
pub mod fault;
pub mod frame;
pub mod history;
pub mod host;
pub mod identity;
pub mod index;
pub mod machine;
pub mod mm;
pub mod object;
pub mod page_table;
#[cfg(any(terrane_loom, terrane_watch))]
pub mod proof;
pub mod range_lock;
pub mod reclaim;
pub mod rmap;
pub mod space;
pub mod stats;
pub mod swap;
#[cfg(test)]
mod testing;
pub mod text;
pub mod vma;

pub use addr::{AddrRange, Frame, PAGE_SHIFT, PAGE_SIZE};
pub use error::{Error, FaultError, OutOfMemory};
