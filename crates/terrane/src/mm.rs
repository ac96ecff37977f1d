//! The inside of an address space: its VMAs, its page table, its locks.
//!
//! What faults and reverse mapping work on. The calls that change the layout are in [`space`](crate::space), the
//! layer above; each of them holds the range that it is about ([`Mm::exclude`]).
//!
//! # Who excludes whom
//!
//! A call holds its range from its first look to behind its last shoot-down. So what is mapped in the range, and how, is
//! changed by nobody else. Calls about ranges without a common address never wait for one another.
//!
//! The *record* that covers an address of the range may reach beyond it, and a call about addresses next door may divide it
//! there, merge it, or move its far end, at any time. Therefore every change to a record and to the index is a short step
//! under the lock of a leaf of the index, which finds the record anew ([`Index::edit`] and its like); what takes long (sweeps,
//! shoot-downs, reverse mapping) is done outside of these steps, under the range lock alone.
//!
//! | lock | held by | blocks |
//! |---|---|---|
//! | lock of the heap | `brk`, fork | yes |
//! | a range, exclusive | every layout change, collapse | yes |
//! | a range, shared | a fault on the locked path (its page), `DONTNEED`, reading the objects of a range | yes |
//! | `limits` | layout changes of a space that has limits | yes |
//! | mapping lock of an object | layout changes (inside their range), walks of the object's mappings | yes |
//! | lock of an anon_vma tree | fork, the end of an anon_vma, moves (inside a range), walks | yes |
//! | list of relocations | moves, walks, unmapping of what was moved | yes |
//! | a pin | everything that reads the index or the page table | never while held |
//! | a leaf of the index | layout changes, for one step of a hundred nanoseconds | never while held |
//! | a page-table entry that is taken | faults, for nanoseconds | never while held |
//!
//! in this order, from the outside in. A speculative fault takes a pin and an entry only.
//!
//! Under [`Locking::Classic`] one reader-writer lock stands in for all ranges, and faults hold it for reading: the baseline
//! of the experiments.

mod block;
mod layout;
mod parting;
pub mod policy;
pub mod rss;

pub use block::{BLOCK_SIZE, HugePages};
pub(crate) use block::{BlockFrames, SpareBlock, block_around};
pub use layout::Layout;
pub(crate) use parting::Parting;

use crate::addr::AddrRange;
use crate::error::OutOfMemory;
use crate::fault::user::Contexts;
use crate::frame::Ram;
use crate::history::History;
use crate::host::{Host, Ticket, Tlb};
use crate::index::{Entry, Index, Reserve};
use crate::machine::{Cpu, Machine};
use crate::page_table::PageTable;
use crate::range_lock::{Held, Mode, RangeLock};
use crate::rmap::Relocations;
use crate::stats::Counter;
use crate::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Pin, Shared, Tally};
use crate::vma::{Snapshot, VmFlags, Vma};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::cell::Cell;
use core::ops::ControlFlow;
use crossbeam_utils::CachePadded;

/// How faults exclude layout changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Locking {
    /// Every fault holds the lock of the whole space for reading, every change for writing: Linux before 6.4.
    /// The baseline of the experiments.
    Classic,
    /// Faults take no lock; see [`fault`](crate::fault).
    #[default]
    Speculative,
}

/// The right to change the layout of a range; see [`Mm::exclude`].
pub enum Exclusive<'a, H: Host> {
    /// Of the whole space, under [`Locking::Classic`].
    Whole(#[allow(dead_code, reason = "held for its drop")] lock_api::RwLockWriteGuard<'a, H::RwLock, ()>),
    /// Of the range.
    Range(Held<'a, H>),
    /// Of a part of what the same call holds already.
    Covered,
}

impl<H: Host> Exclusive<'_, H> {
    /// Says that the layout does not change any more under it, or not at all; see [`Held::committed`].
    #[inline]
    pub fn committed(&self) {
        if let Exclusive::Range(held) = self {
            held.committed();
        }
    }
}

/// The right to rely on the layout of a range; see [`Mm::share`].
pub enum Steady<'a, H: Host> {
    /// Of the whole space, under [`Locking::Classic`].
    Whole(#[allow(dead_code, reason = "held for its drop")] lock_api::RwLockReadGuard<'a, H::RwLock, ()>),
    /// Of the range.
    Range(#[allow(dead_code, reason = "held for its drop")] Held<'a, H>),
}

/// The inside of an address space.
pub struct Mm<H: Host> {
    /// Its machine.
    pub machine: Shared<Machine<H>>,
    /// The VMAs, by address.
    pub index: Index<Vma<H>>,
    /// The page table.
    pub page_table: PageTable<H::Format>,
    /// What the host keeps: as a rule which CPUs run the space.
    pub tlb: <H as Tlb>::Space,
    /// How faults exclude layout changes.
    pub locking: Locking,
    /// Bytes mapped around a file fault, a power of two of pages; a page means none.
    pub fault_around: u64,
    /// When first touches make huge pages.
    pub huge_pages: HugePages,
    /// Where its memory comes from.
    pub(crate) policies: policy::Policies,
    /// False as long as the space certainly has no blocks; see [`mm::block`](block).
    blocks: AtomicBool,
    /// False as long as nothing is sealed.
    pub(crate) sealed: AtomicBool,
    /// False as long as no private page is shared with another space; see [`mm::parting`](parting).
    sharers: AtomicBool,
    /// True while a fork has made pages read-only but stores through old translations may still arrive: nobody may
    /// copy such a page yet, or a store would be lost.
    pub forking: AtomicBool,
    /// How many calls have taken pages of objects away, or the permission to store to them, and still wait for accesses
    /// through old translations to end. Raised before the first entry changes: whoever finds an entry changed and
    /// this at zero knows that those accesses have ended.
    pub ending: CachePadded<AtomicUsize>,
    /// Which calls exclude each other.
    pub ranges: RangeLock,
    /// The lock of the whole space, under [`Locking::Classic`].
    pub classic: lock_api::RwLock<H::RwLock, ()>,
    /// The heap.
    pub heap: Heap<H>,
    /// What the host has said about the program.
    pub(crate) layout: layout::LayoutCell,
    /// Held by layout changes of a space that has limits, from the look at what is mapped to behind the change.
    pub limits: lock_api::Mutex<H::Mutex, ()>,
    /// Whether a listing is under way; see [`listing`](crate::space). Read by every layout change, and hardly ever written.
    pub history: CachePadded<History<H::Mutex>>,
    /// Where moved pages are.
    pub relocations: Relocations<H>,
    /// Pages mapped.
    pub mapped: Tally,
    /// Pages of private mappings that may be stored to.
    pub data: Tally,
    /// Pages of locked mappings; see [`lock`](crate::space).
    pub locked: Tally,
    /// Attributes that mappings get from now on: bits of [`VmFlags::LOCKED_MASK`].
    pub(crate) future: AtomicU64,
    /// Where the linear search starts; see [`SpaceConfig::linear_search`](crate::space::SpaceConfig).
    pub search_from: AtomicU64,
    /// Handlers of user faults. Looked at by faults that are for one, and by nobody else.
    pub(crate) users: Contexts<H>,
    /// What each CPU has for itself.
    reserves: Reserves<Vma<H>>,
    /// What has been mapped at most.
    peaks: CachePadded<rss::Peaks>,
}

/// Where the heap begins, and the program break, in bytes.
pub struct Heap<H: Host> {
    start: AtomicU64,
    end: AtomicU64,
    lock: lock_api::Mutex<H::Mutex, ()>,
}

impl<H: Host> Heap<H> {
    fn new() -> Self {
        Self { start: AtomicU64::new(0), end: AtomicU64::new(0), lock: lock_api::Mutex::new(()) }
    }

    /// Keeps others from moving it. Before any range is locked; not while pinned.
    pub fn lock(&self) -> lock_api::MutexGuard<'_, H::Mutex, ()> {
        self.lock.lock()
    }

    /// The heap at this moment.
    pub fn range(&self) -> AddrRange {
        // The end first: the start is set once, before the end has moved.
        let end = self.end.load(Ordering::Acquire);
        AddrRange::new(self.start.load(Ordering::Relaxed), end)
    }

    /// Moves it. Under its lock.
    pub fn set(&self, heap: AddrRange) {
        self.start.store(heap.start, Ordering::Relaxed);
        self.end.store(heap.end, Ordering::Release);
    }
}

/// What each CPU has for itself in a space: nodes that its calls left over for the next, and what it has counted.
struct Reserves<T>(Box<[CachePadded<Own<T>>]>);

/// What one CPU has for itself. Reserves are without atomics: a lock here took 25 ns off a map and unmap.
struct Own<T> {
    left_over: LeftOver<T>,
    counts: rss::Counts,
}

#[cfg(terrane_watch)]
impl<T> crate::names::Describe for Own<T>
where
    LeftOver<T>: crate::names::Describe,
{
    fn describe(&self, names: &mut crate::names::Names) {
        names.field("left_over", &self.left_over);
        names.field("counts", &self.counts);
    }
}

/// What the calls of one CPU left over.
type LeftOver<T> = Cell<Option<Reserve<T>>>;

// SAFETY: a CPU's cell is used by the holder of its `Cpu`, of whom there is one at a time (`Cpu` is not `Sync`, and has its
// number to itself); the holder after is ordered behind by the registering of CPUs.
unsafe impl<T> Sync for Reserves<T> {}
// SAFETY: reserves are plain memory, which belongs to no thread.
unsafe impl<T> Send for Reserves<T> {}

impl<T> Reserves<T> {
    fn try_new(cpus: usize) -> Result<Self, OutOfMemory> {
        let mut cells = Vec::new();
        cells.try_reserve_exact(cpus).map_err(|_| OutOfMemory)?;
        cells.resize_with(cpus, || {
            CachePadded::new(Own { left_over: Cell::new(None), counts: rss::Counts::default() })
        });
        Ok(Self(cells.into_boxed_slice()))
    }
}

// SAFETY: `start` and `end` are what the index was told, and a VMA's addresses change only together with its key in
// the index, under the lock of the leaf.
unsafe impl<H: Host> Entry for Vma<H> {
    const GUARD_MAX: u64 = STACK_GUARD_GAP;

    #[inline]
    fn start(&self) -> u64 {
        Vma::start(self)
    }

    #[inline]
    fn end(&self) -> u64 {
        Vma::end(self)
    }

    #[inline]
    fn guard_below(&self) -> u64 {
        if self.flags().contains(VmFlags::GROWSDOWN) { STACK_GUARD_GAP } else { 0 }
    }
}

/// Bytes kept free below a stack that grows: 256 pages, as in Linux.
pub const STACK_GUARD_GAP: u64 = 256 << crate::addr::PAGE_SHIFT;

impl<H: Host> Mm<H> {
    /// An empty space in `range`.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_new(
        machine: &Shared<Machine<H>>,
        pin: &Pin<'_>,
        range: AddrRange,
        gaps: bool,
        locking: Locking,
        fault_around: u64,
    ) -> Result<Self, OutOfMemory> {
        // Before the page table, which holds a frame.
        let reserves = Reserves::try_new(machine.epoch().capacity())?;
        let (mapped, data, locked) = (Tally::try_new()?, Tally::try_new()?, Tally::try_new()?);
        Ok(Self {
            machine: machine.clone(),
            index: Index::try_new_in(range, gaps, machine.leaves())?,
            ranges: RangeLock::try_new(range, machine.epoch().capacity())?,
            page_table: PageTable::try_new(&machine.ram(pin))?,
            tlb: Default::default(),
            locking,
            fault_around,
            huge_pages: HugePages::Never,
            policies: policy::Policies::new(),
            blocks: AtomicBool::new(false),
            sealed: AtomicBool::new(false),
            sharers: AtomicBool::new(false),
            forking: AtomicBool::new(false),
            ending: CachePadded::new(AtomicUsize::new(0)),
            classic: lock_api::RwLock::new(()),
            heap: Heap::new(),
            layout: layout::LayoutCell::new(),
            limits: lock_api::Mutex::new(()),
            history: CachePadded::new(History::new()),
            relocations: Relocations::new(),
            mapped,
            data,
            locked,
            future: AtomicU64::new(0),
            search_from: AtomicU64::new(0),
            users: Contexts::new(),
            reserves,
            peaks: CachePadded::new(rss::Peaks::default()),
        })
    }

    /// Waits until no other call is about an address of `range`, nor a fault on the locked path, and keeps it so. Not
    /// while pinned.
    pub fn exclude<'a>(&'a self, cpu: &'a Cpu<H>, range: AddrRange) -> Exclusive<'a, H> {
        match self.locking {
            Locking::Classic => Exclusive::Whole(self.classic.write()),
            Locking::Speculative => Exclusive::Range(cpu.lock_range(&self.ranges, range, Mode::Exclusive)),
        }
    }

    /// [`exclude`](Self::exclude) for two ranges that have no address in common.
    pub fn exclude_both<'a>(&'a self, cpu: &'a Cpu<H>, ranges: [AddrRange; 2]) -> [Exclusive<'a, H>; 2] {
        match self.locking {
            Locking::Classic => [Exclusive::Whole(self.classic.write()), Exclusive::Covered],
            Locking::Speculative => {
                cpu.lock_ranges(&self.ranges, ranges, Mode::Exclusive).map(Exclusive::Range)
            }
        }
    }

    /// Waits until no call that changes something is about an address of `range`, and keeps it so. Not while pinned.
    #[inline]
    pub fn share<'a>(&'a self, cpu: &'a Cpu<H>, range: AddrRange) -> Steady<'a, H> {
        match self.locking {
            Locking::Classic => Steady::Whole(self.classic.read()),
            Locking::Speculative => Steady::Range(cpu.lock_range(&self.ranges, range, Mode::Shared)),
        }
    }

    /// The VMA at `addr` and its attributes, for a caller that holds the address: a miss is proof. Calls next door may divide
    /// the record or merge it at any time; what is returned was one state of it that contained `addr`, and what it says
    /// about the addresses that are held is right.
    #[inline]
    pub fn vma_at<'p>(&'p self, pin: &'p Pin<'_>, addr: u64) -> Option<(&'p Vma<H>, Snapshot)> {
        let state =
            |vma: &'p Vma<H>| vma.read().filter(|seen| seen.range.contains(addr)).map(|seen| (vma, seen));
        if let Some(found) = self.index.find(pin, addr).and_then(state) {
            return Some(found);
        }
        let mut rounds = 0;
        loop {
            let found = state(self.index.find_exact(pin, addr)?);
            if found.is_some() {
                return found;
            }
            // A neighbour's step, a hundred nanoseconds from its end.
            self.machine.host().relax(pin.cpu(), rounds);
            rounds = rounds.saturating_add(1);
        }
    }

    /// The VMA of this CPU's last fault, if `addr` is in it, with the value of its counter and its attributes.
    #[inline]
    pub fn recent_vma<'p>(
        &self,
        cpu: &Cpu<H>,
        pin: &'p Pin<'_>,
        addr: u64,
    ) -> Option<(&'p Vma<H>, u32, Snapshot)> {
        // SAFETY: `remember_vma` alone uses it, and a CPU sees spaces of one machine only.
        let vma: &Vma<H> = unsafe { cpu.recent().get(pin) }?;
        if vma.space() != self.cookie() {
            return None;
        }
        // Odd when it has left the space.
        let seq = vma.seq.read()?;
        let seen = vma.snapshot();
        (seen.range.contains(addr) && vma.seq.unchanged(seq)).then_some((vma, seq, seen))
    }

    /// Remembers the VMA of a fault, which was found under `pin`.
    #[inline]
    pub fn remember_vma(&self, cpu: &Cpu<H>, pin: &Pin<'_>, vma: &Vma<H>) {
        // SAFETY: found in the index under the pin, and VMAs leave it through `Vma::retire`.
        unsafe { cpu.recent().set(pin, vma) };
    }

    /// The VMA at `at`, or the first that starts between it and `end`; `at..end` is held. As exact as [`vma_at`](Self::vma_at).
    #[inline]
    pub fn next_vma<'p>(&'p self, pin: &'p Pin<'_>, at: u64, end: u64) -> Option<(&'p Vma<H>, Snapshot)> {
        let mut rounds = 0;
        loop {
            let vma = self.index.first_ending_after(pin, at)?;
            match vma.read() {
                Some(seen) if seen.range.contains(at) => return Some((vma, seen)),
                // Above the range, and whatever a neighbour makes of it, it stays there.
                Some(seen) if seen.range.start >= end => return None,
                // Where a VMA begins in the range is nobody else's business, so this is the next one.
                Some(seen) if seen.range.start > at => return Some((vma, seen)),
                // A neighbour's step, a hundred nanoseconds from its end.
                _ => self.machine.host().relax(pin.cpu(), rounds),
            }
            rounds = rounds.saturating_add(1);
        }
    }

    /// A reserve of nodes for a call of this CPU, perhaps with some in it.
    #[inline]
    pub fn take_reserve(&self, cpu: &Cpu<H>) -> Reserve<Vma<H>> {
        self.reserves.0.get(cpu.id().index()).and_then(|own| own.left_over.take()).unwrap_or_default()
    }

    /// Gives back what a call did not use.
    #[inline]
    pub fn give_reserve(&self, cpu: &Cpu<H>, reserve: Reserve<Vma<H>>) {
        if let Some(own) = self.reserves.0.get(cpu.id().index()) {
            own.left_over.set(Some(reserve));
        }
    }

    /// This space as the cookie that VMAs and anon_vmas carry.
    #[inline]
    pub fn cookie(&self) -> *const () {
        core::ptr::from_ref(self).cast()
    }

    /// Calls `visit` for the parts of `range` in which there are page tables, a leaf table's span (or a block's) at a time,
    /// pinned anew after every few so that no pin lasts long. Costs nothing for what has no tables.
    pub fn for_each_part(
        &self,
        cpu: &Cpu<H>,
        range: AddrRange,
        mut visit: impl FnMut(&Ram<'_, H>, AddrRange),
    ) {
        /// 4096 pages: some 20 to 100 us of work when all are there.
        const TABLES_A_PIN: usize = 8;
        let mut at = range.start;
        while at < range.end {
            let pin = cpu.pin();
            let ram = self.ram(&pin);
            let mut tables = 0;
            let mut next = range.end;
            let _ = self.page_table.for_each_run(&ram, AddrRange::new(at, range.end), |run| {
                let part = AddrRange::new(run.addr, run.address_of(run.slots.len()));
                visit(&ram, part.intersection(range));
                tables += 1;
                if tables < TABLES_A_PIN {
                    return ControlFlow::Continue(());
                }
                next = part.end;
                ControlFlow::Break(())
            });
            at = next;
        }
    }

    /// Makes all CPUs forget `range`, and counts whether others had to be asked; see [`Tlb::shoot_down`].
    pub fn shoot_down(&self, ram: &Ram<'_, H>, range: AddrRange) -> Ticket {
        let done = ram.host.shoot_down(ram.pin.cpu(), &self.tlb, range);
        if done.asked > 0 {
            ram.count(Counter::TlbRemoteFlush);
        }
        done.ticket
    }

    /// Physical memory as the pinned CPU sees it.
    #[inline]
    pub fn ram<'a>(&'a self, pin: &'a Pin<'a>) -> Ram<'a, H> {
        self.machine.ram(pin)
    }
}

describe!([H: Host] Heap<H> { start, end, lock });

#[cfg(terrane_watch)]
impl<H: Host> Mm<H> {
    /// The names of its fields, its VMAs and its page tables, for the cache-line audit.
    pub fn describe(&self, pin: &Pin<'_>, names: &mut crate::names::Names)
    where
        H::Space: crate::names::Describe,
    {
        names.leaf(self);
        names.field("tlb", &self.tlb);
        names.field("machine", &self.machine);
        names.field("forking", &self.forking);
        names.field("ending", &self.ending);
        names.field("ranges", &self.ranges);
        names.field("classic", &self.classic);
        names.field("heap", &self.heap);
        names.field("limits", &self.limits);
        names.field("relocations", &self.relocations);
        names.field("mapped", &self.mapped);
        names.field("data", &self.data);
        names.field("locked", &self.locked);
        names.field("future", &self.future);
        names.field("search_from", &self.search_from);
        names.field("users", &self.users);
        names.field("reserves", &self.reserves.0);
        names.field("peaks", &*self.peaks);
        names.field("index", &self.index);
        names.under("page_table", |names| self.page_table.describe(&self.ram(pin), names));
        self.index.for_each(pin, AddrRange::new(0, u64::MAX), |vma| {
            let name = alloc::format!("VMA {:#x}..{:#x}", vma.start(), vma.end());
            names.field(&name, vma);
            if let Some(anon) = vma.anon_vma() {
                names.field(alloc::format!("anon_vma of {name}"), anon);
            }
            ControlFlow::Continue(())
        });
    }
}
