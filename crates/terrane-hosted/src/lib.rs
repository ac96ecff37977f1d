//! Terrane's machine in user space: real memory, real files, and processors with a software TLB.
//!
//! [Terrane](terrane) manages virtual memory for a machine that somebody else provides. This crate provides one
//! that needs no privileges: an ordinary Linux process in which everything is real but the processors.
//!
//! - **Memory** is one anonymous mapping of the process, cut into frames. Page tables lie in those frames, in the
//!   format of x86-64.
//! - **Files** are files of the system: pages come from `pread` and go back with `pwrite`.
//! - **Processors** are [`Cpu`] values, one for each thread that wants one. A `Cpu` does what a processor's memory
//!   unit does: a load looks in a TLB (the cache of translations), on a miss walks the page table, marks the entry
//!   accessed, raises a page fault that Terrane resolves, and tries again. What a kernel would turn into a signal
//!   comes back as an error.
//! - **Shoot-downs** make other processors forget translations without interrupts and without waiting for threads
//!   that are not running. The protocol, and why it is right, is in the head of `src/tlb.rs`.
//!
//! What is it for? Tests and experiments: whatever Terrane promises about memory can be checked here byte by byte,
//! with threads and under a debugger. And emulators and simulators: this is a memory unit for many guest
//! processors.
//!
//! # Example
//!
//! ```
//! use terrane::space::{AddressSpace, MapRequest, SpaceConfig};
//! use terrane::sync::Shared;
//! use terrane::vma::Prot;
//! use terrane::{FaultError, PAGE_SIZE};
//! use terrane_hosted::{HostedMachine, MachineConfig};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let machine = HostedMachine::new(MachineConfig { memory: 16 << 20, ..MachineConfig::default() })?;
//! let mut cpu = machine.cpu()?;
//! let parent = Shared::try_new(AddressSpace::try_new(cpu.core(), SpaceConfig::default())?)?;
//! cpu.switch_to(&parent);
//!
//! // Calls go to the space and name the processor they run on; accesses go to the processor.
//! let request = MapRequest::anonymous(2 * PAGE_SIZE, Prot::READ | Prot::WRITE);
//! let at = parent.map(cpu.core(), request)?;
//! cpu.store_u64(at, 42)?; // a TLB miss, a page fault, a frame of zeros, and the store
//! cpu.store_u64(at + 8, 43)?; // a hit
//! assert_eq!(cpu.activity().faults, 1);
//!
//! // A child shares the page until somebody stores to it.
//! let child = Shared::try_new(parent.fork(cpu.core())?)?;
//! cpu.switch_to(&child);
//! cpu.store_u64(at, 7)?;
//! cpu.switch_to(&parent);
//! assert_eq!(cpu.load_u64(at)?, 42);
//!
//! // What is not mapped, or not for this, is what a kernel would send a signal for.
//! parent.protect(cpu.core(), at, PAGE_SIZE, Prot::READ)?;
//! assert_eq!(cpu.store_u64(at, 1), Err(FaultError::NotAllowed));
//! parent.unmap(cpu.core(), at, PAGE_SIZE)?;
//! assert_eq!(cpu.load_u64(at), Err(FaultError::NotMapped));
//! # Ok(())
//! # }
//! ```
//!
//! What tools read in `/proc` of a process, [`Cpu::proc_text`] writes for a space, in the system's own format:
//! `cpu.proc_text(&space, ProcFile::Smaps)`.
//!
//! Another thread makes a processor of its own with [`HostedMachine::cpu`] and switches it to the same space.
//!
//! # Memory that comes from elsewhere
//!
//! [`Paging`] answers the faults of a range with pages that a [`Pager`] supplies, and fetches the rest in the background:
//! `examples/post_copy.rs` runs a guest on its new machine before its memory has come.
//!
//! # Costs
//!
//! A load that hits the TLB takes 2.2 ns, a store 3 (Zen 3, in a loop over one page): compare the request
//! word, compare the tag, move, with no fence and no read-modify-write, on lines that no other processor writes.
//! A fence in each access, where `membarrier` cannot be had, adds a nanosecond or more. Long transfers move 31 bytes a
//! nanosecond.
//!
//! # Limits
//!
//! Linux only. At most [`MAX_CPUS`] processors at a time. Instructions are not executed, only their fetching is
//! checked ([`Cpu::execute`]). A call that must wait for stores under way (forbidding stores, forking, writing back) waits
//! for threads that the scheduler has stopped in the middle of an access; with many more threads than
//! processors that can take milliseconds.
#![warn(missing_docs)]

mod collapser;
mod cpu;
mod cpu_set;
mod error;
mod file;
mod filter;
mod locks;
mod machine;
mod memory;
mod pager;
mod proc;
mod reclaimer;
mod swap;
mod tlb;
#[cfg(test)]
mod tlb_tests;
mod translations;
mod wait;

pub use collapser::{Collapser, CollapserConfig};
pub use cpu::{Activity, AtomicError, Cpu, Interrupted};
pub use cpu_set::CpuSet;
pub use error::HostedError;
pub use file::HostFile;
pub use machine::{EventSink, Hosted, HostedMachine, MachineConfig, Space};
pub use pager::{Pager, PagerConfig, Paging, PagingProgress};
pub use proc::ProcFile;
pub use reclaimer::{Reclaimer, ReclaimerConfig};
pub use swap::SwapFile;

/// The most processors that a machine can have at a time: one of the numbers below 256 is that of the housekeeper
/// (see [`terrane::machine`]).
pub const MAX_CPUS: usize = LANES - 1;

/// Numbers that processors can have, the housekeeper included.
pub(crate) const LANES: usize = 256;

/// The examples of the front page, compiled and run as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct FrontPage;
