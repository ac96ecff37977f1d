//! Address spaces: the calls that make, change and show mappings.
//!
//! | module | what |
//! |---|---|
//! | `config` | how a space behaves |
//! | `change` | a layout change under way: what it has reserved, splitting, merging, removing (`change::remove`), sweeping |
//! | `place`, `stretch` | finding free addresses |
//! | `splits`, `collapse` | dividing and making huge pages |
//! | `within` | a change of attributes within one VMA, in one step |
//! | `at_once` | calls that are one step and hold no range |
//! | `sweep`, `share` | what changes and `fork` do to the entries of the page table |
//! | `carry` | what moves do to the entries of the page table |
//! | [`linux`] | the calls by Linux's numbers |
//! | `pagemap` | what is behind each page |
//! | `footprint` | how much memory a mapping holds |
//! | `accounts` | limits, and the memory that was promised |
//! | `grow` | stacks that grow |
//! | `program` | stack, heap and layout of a program |
//! | `map`, `protect`, `remap`, `seal`, `advise`, `lock`, `heap`, `fork`, `mincore`, `sync`, `listing`, `userfault` | the calls |
//!
//! # Plan, then commit
//!
//! A call checks its arguments, takes hold of its range, works out what is to change, and reserves all records and index
//! nodes for it. Everything that can fail is before the first change; from then on nothing allocates. So a call
//! that fails has changed nothing.
//!
//! # Change first, sweep after
//!
//! A call that takes pages away first changes the records, each in a short bracket of its sequence counter, and then
//! sweeps the page table. Faults elsewhere in a VMA that is split or trimmed are not held up by the sweep: they find
//! the record at rest. A fault that began before sees, while it owns its entry, that the counter has moved.

mod accounts;
mod advise;
mod at_once;
mod carry;
mod change;
mod collapse;
mod config;
mod footprint;
mod fork;
mod grow;
mod heap;
pub mod linux;
mod listing;
mod lock;
mod map;
mod mincore;
mod pagemap;
mod place;
mod policy;
mod program;
mod protect;
mod remap;
mod seal;
mod share;
mod splits;
mod stretch;
mod sweep;
mod sync;
mod userfault;
mod within;

pub use accounts::Limit;
pub use collapse::CollapseProgress;
pub use config::{Placement, SpaceConfig};
pub(crate) use footprint::Sharers;
pub use footprint::{Footprint, Share};
pub use listing::{Backing, Listing, Mapping};
pub use lock::{LockAllFlags, LockFlags};
pub use map::MapRequest;
pub use pagemap::PageState;
pub use policy::{Policy, PolicyFlags, PolicyMode};
pub use program::Program;
pub use sync::SyncFlags;
pub use userfault::{
    FaultKind, Incomplete, Resolve, UserEvent, UserFault, UserFaultModes, UserFaults, UserFeatures,
};

pub use crate::mm::{HugePages, Layout, Locking};

use crate::addr::{AddrRange, Frame, PAGE_SHIFT, TABLE_ENTRIES};
use crate::error::{Error, FaultError, OutOfMemory};
use crate::fault::{self, Translation};
use crate::host::{Host, Tlb};
use crate::machine::Cpu;
use crate::mm::{BLOCK_SIZE, Mm};
use crate::page_table::{Format, Level, Pte, PteFlags, Slot, Walk};
use crate::sync::Shared;
use crate::sync::atomic::AtomicU64;
use crate::vma::Access;
use accounts::Limits;
use change::Change;
use stretch::Stretches;

#[cfg(terrane_watch)]
impl<H: Host> AddressSpace<H> {
    /// The names of all that belongs to it, for the cache-line audit.
    pub fn describe(&self, pin: &crate::sync::Pin<'_>, names: &mut crate::names::Names)
    where
        H::Space: crate::names::Describe,
    {
        names.leaf(self);
        names.field("owners of Mm", &self.mm);
        self.mm.describe(pin, names);
    }
}

#[cfg(test)]
mod tests;

/// An address space of a machine.
///
/// `Send` and `Sync`: threads share it by reference, or in a [`Shared`]. Every call takes the [`Cpu`] it runs on.
/// Dropping a space unmaps everything.
pub struct AddressSpace<H: Host> {
    mm: Shared<Mm<H>>,
    config: SpaceConfig,
    limits: Limits,
    /// With [`Placement::PerCpu`].
    stretches: Option<Stretches<H>>,
    /// Where the collapser goes on, in bytes.
    collapse_at: AtomicU64,
}

impl<H: Host> AddressSpace<H> {
    /// An empty space.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a configuration that makes no sense, [`Error::NoMemory`].
    pub fn try_new(cpu: &Cpu<H>, config: SpaceConfig) -> Result<Self, Error> {
        let config = config.checked::<H::Format>()?;
        let stretches = match config.placement {
            Placement::Linux => None,
            Placement::PerCpu => Stretches::try_new(&config, cpu.machine().epoch().capacity())?,
        };
        let mm = retry_with_memory(cpu, || {
            let pin = cpu.pin();
            let (range, gaps) = (config.range, config.gaps);
            let mut mm = Mm::try_new(cpu.machine(), &pin, range, gaps, config.locking, config.fault_around)?;
            mm.huge_pages = config.huge_pages;
            if config.huge_pages == HugePages::Always {
                mm.expect_blocks();
            }
            Ok(mm)
        })?;
        match Shared::try_new_or_return(mm) {
            Ok(mm) => Ok(Self {
                mm,
                config,
                limits: Limits::new(&config),
                stretches,
                collapse_at: AtomicU64::new(0),
            }),
            Err(mut mm) => {
                let pin = cpu.pin();
                mm.page_table.destroy(&cpu.machine().ram(&pin));
                Err(Error::NoMemory)
            }
        }
    }

    /// How it was configured.
    pub fn config(&self) -> &SpaceConfig {
        &self.config
    }

    /// Its inside, for those who extend Terrane: reverse mapping and statistics.
    pub fn mm(&self) -> &Mm<H> {
        &self.mm
    }

    fn shared_mm(&self) -> &Shared<Mm<H>> {
        &self.mm
    }

    /// What the host keeps with this space.
    #[inline]
    pub fn host_state(&self) -> &<H as Tlb>::Space {
        &self.mm.tlb
    }

    /// The frame of the root table, for loading into a processor.
    #[inline]
    pub fn root_table(&self) -> crate::addr::Frame {
        self.mm.page_table.root()
    }

    /// Resolves a page fault: after it, `access` to `addr` translates (unless another thread changes that at once).
    /// Blocks where a page must be read from a file; not to be called while the CPU is pinned. Typically some
    /// tens of nanoseconds beyond zeroing the page.
    ///
    /// # Errors
    /// [`FaultError`]: what signal the program is to get.
    #[inline]
    pub fn fault(&self, cpu: &Cpu<H>, addr: u64, access: Access) -> Result<Translation, FaultError> {
        if addr >= H::Format::USER_END {
            return Err(FaultError::NotMapped);
        }
        match fault::fault(&self.mm, cpu, addr, access) {
            Err(FaultError::NotMapped) => self.fault_below(cpu, addr, access),
            result => result,
        }
    }

    /// What a processor's page walk does: finds the entry of `addr` and, if it allows `access`, marks it accessed
    /// (and dirty, for a store). `None` is a page fault. For software processors; hardware does it itself.
    #[inline]
    pub fn translate(&self, cpu: &Cpu<H>, addr: u64, access: Access) -> Option<Translation> {
        if addr >= H::Format::USER_END {
            return None;
        }
        let pin = cpu.pin();
        let ram = self.mm.ram(&pin);
        let Walk { slot, mut raw, level } = self.mm.page_table.walk(&ram, addr)?;
        loop {
            let (frame, flags) = match level {
                Level::PAGE => match Pte::decode::<H::Format>(raw) {
                    Pte::Page { frame, flags } => (frame, flags),
                    _ => return None,
                },
                Level::BLOCK => {
                    let (first, flags) = Pte::block::<H::Format>(raw)?;
                    (Frame(first.0 + (addr >> PAGE_SHIFT) as u32 % TABLE_ENTRIES as u32), flags)
                }
                _ => return None,
            };
            let (needs, marks) = match access {
                Access::Read => (PteFlags::READ, PteFlags::ACCESSED),
                Access::Write => (PteFlags::WRITE, PteFlags::ACCESSED.union(PteFlags::DIRTY)),
                Access::Execute => (PteFlags::EXEC, PteFlags::ACCESSED),
            };
            if !flags.contains(needs) {
                return None;
            }
            match slot.set_flags::<H::Format>(raw, marks) {
                Ok(_) => return Some(Translation { frame, flags: flags | marks }),
                Err(now) => raw = now,
            }
        }
    }

    /// Pages mapped in the page table: what `VmRSS` counts, without the page of zeros and device memory. O(pages).
    pub fn resident_pages(&self, cpu: &Cpu<H>) -> u64 {
        let zero = self.mm.machine.zero_frame();
        let mut count = 0;
        self.mm.for_each_part(cpu, self.config.range, |ram, part| {
            let _ = self.mm.page_table.for_each_run(ram, part, |run| {
                Slot::for_each_used(run.slots, |_, slot| {
                    let raw = slot.load();
                    match Pte::decode::<H::Format>(raw) {
                        _ if run.level == Level::BLOCK => {
                            count += Pte::block::<H::Format>(raw).map_or(0, |_| BLOCK_SIZE >> PAGE_SHIFT);
                        }
                        Pte::Page { frame, .. } | Pte::NoAccess { frame, .. }
                            if frame != zero && ram.frames.contains(frame) =>
                        {
                            count += 1;
                        }
                        _ => {}
                    }
                    core::ops::ControlFlow::Continue(())
                })
            });
        });
        count
    }

    /// Page tables in use, the root included.
    pub fn page_tables(&self) -> usize {
        self.mm.page_table.tables()
    }

    /// VMAs in the space.
    pub fn map_count(&self) -> usize {
        self.mm.index.len()
    }

    /// Bytes that the index takes from the allocator, VMA records not included.
    pub fn index_bytes(&self) -> usize {
        self.mm.index.bytes()
    }

    /// Unmaps everything and gives all memory back, on a CPU of the caller's. What dropping does with the machine's
    /// housekeeper.
    pub fn destroy(mut self, cpu: &Cpu<H>) {
        self.clear(cpu);
    }

    /// True when how much is mapped decides whether a call may go on.
    fn has_limits(&self) -> bool {
        self.config.map_limit.is_some()
            || self.limit(Limit::Address).is_some()
            || self.limit(Limit::Data).is_some()
            || self.limits_locked()
    }

    fn clear(&mut self, cpu: &Cpu<H>) {
        // Handlers may outlive the space, but not reach into it any more.
        self.mm.users.end(self.mm.machine.host());
        if !self.mm.index.is_empty() {
            // Removing whole VMAs reserves nothing, so it cannot fail.
            let mut change = Change::begin(&self.mm, cpu, self.config.range);
            change.remove(self.config.range, true);
        }
        // No VMA is left, so no anon_vma names this space and nothing else knows its inside.
        if let Some(mm) = Shared::get_mut(&mut self.mm) {
            let pin = cpu.pin();
            let machine = mm.machine.clone();
            mm.page_table.destroy(&machine.ram(&pin));
        }
        cpu.tidy();
    }
}

impl<H: Host> Drop for AddressSpace<H> {
    fn drop(&mut self) {
        if self.mm.page_table.tables() == 0 {
            return; // destroyed
        }
        let machine = self.mm.machine.clone();
        Cpu::as_housekeeper(&machine, |cpu| {
            self.clear(cpu);
            // All of it: see `Cpu::drop`.
            cpu.participant().collect_all();
        });
    }
}

/// Runs `make`, and once more after freeing what can be freed when memory is short.
fn retry_with_memory<H: Host, T>(
    cpu: &Cpu<H>,
    mut make: impl FnMut() -> Result<T, OutOfMemory>,
) -> Result<T, OutOfMemory> {
    make().or_else(|OutOfMemory| {
        cpu.find_memory();
        make()
    })
}

/// The pages that `len` bytes at `addr` touch: `addr` page-aligned, `len` rounded up.
///
/// # Errors
/// [`Error::Invalid`] when `addr` is not aligned or the range wraps.
#[inline]
fn page_range(addr: u64, len: u64) -> Result<AddrRange, Error> {
    if !crate::addr::is_page_aligned(addr) {
        return Err(Error::Invalid);
    }
    let len = crate::addr::page_ceil(len).ok_or(Error::Invalid)?;
    AddrRange::of_len(addr, len).ok_or(Error::Invalid)
}

/// Threads share a space by reference, and it may go to another thread: checked here, where it would be lost.
#[allow(dead_code, reason = "being type-checked is what it is for")]
fn threads_share_spaces<H: Host>() {
    fn shared<T: Send + Sync>() {}
    shared::<AddressSpace<H>>();
    shared::<crate::object::Object<H>>();
    shared::<crate::machine::Machine<H>>();
}
