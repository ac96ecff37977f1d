//! The inside of an address space: its VMAs, its page table, its lock.
//!
//! What faults and reverse mapping work on. The calls that change the layout are in [`space`](crate::space), the
//! layer above; all of them hold [`Mm::layout`] for writing.
//!
//! # Who may hold what
//!
//! | lock | held by | blocks |
//! |---|---|---|
//! | `layout`, writing | every layout change, for its plan and commit | yes |
//! | `layout`, reading | a fault on the locked path (every fault under [`Locking::Classic`]), a listing, `DONTNEED` | yes |
//! | mapping lock of an object | layout changes (inside `layout`), walks of the object's mappings | yes |
//! | lock of an anon_vma tree | fork, the end of an anon_vma (inside `layout`), walks | yes |
//! | a pin | everything that reads the index or the page table | never while held |
//! | a page-table entry that is taken | faults, for nanoseconds | never while held |
//!
//! in this order, from the outside in. A speculative fault takes the last two only.

use crate::addr::AddrRange;
use crate::error::OutOfMemory;
use crate::frame::Ram;
use crate::host::{Host, Ticket, Tlb};
use crate::index::{Entry, Index, Reserve};
use crate::machine::{Cpu, Machine};
use crate::page_table::PageTable;
use crate::stats::Counter;
use crate::sync::atomic::{AtomicBool, AtomicUsize};
use crate::sync::{Pin, Shared};
use crate::vma::{VmFlags, Vma};
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

/// What the layout lock protects besides the records: only a layout change touches it.
pub struct Layout<H: Host> {
    /// Nodes set aside for the index; having it proves that no other change runs.
    pub reserve: Reserve<Vma<H>>,
    /// The heap: where it begins, and the program break.
    pub heap: AddrRange,
    /// Pages mapped, for the address-space limit.
    pub total_pages: u64,
    /// Where the linear search starts; see [`SpaceConfig::linear_search`](crate::space::SpaceConfig).
    pub search_from: u64,
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
    /// True while a fork has made pages read-only but stores through old translations may still arrive: nobody may
    /// copy such a page yet, or a store would be lost.
    pub forking: AtomicBool,
    /// How many calls have taken pages of objects away, or the permission to store to them, and still wait for accesses
    /// through old translations to end. Raised before the first entry changes: whoever finds an entry changed and
    /// this at zero knows that those accesses have ended.
    pub ending: CachePadded<AtomicUsize>,
    /// The lock of the layout.
    pub layout: lock_api::RwLock<H::RwLock, Layout<H>>,
}

// SAFETY: `start` and `end` are what the index was told, and a VMA's addresses change only together with its key in
// the index, under the layout lock.
unsafe impl<H: Host> Entry for Vma<H> {
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
        let index = Index::try_new(range, gaps)?;
        let mut reserve = Reserve::new();
        index.reserve(&mut reserve, 1)?;
        Ok(Self {
            machine: machine.clone(),
            index,
            page_table: PageTable::try_new(&machine.ram(pin))?,
            tlb: Default::default(),
            locking,
            fault_around,
            forking: AtomicBool::new(false),
            ending: CachePadded::new(AtomicUsize::new(0)),
            layout: lock_api::RwLock::new(Layout {
                reserve,
                heap: AddrRange::new(0, 0),
                total_pages: 0,
                search_from: 0,
            }),
        })
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

    /// Makes all CPUs forget `range`, and counts it; see [`Tlb::shoot_down`].
    pub fn shoot_down(&self, ram: &Ram<'_, H>, range: AddrRange) -> Ticket {
        let cpu = ram.pin.cpu();
        if ram.host.is_shared(cpu, &self.tlb) {
            ram.count(Counter::TlbRemoteFlush);
        } else {
            ram.count(Counter::TlbLocalFlush);
        }
        ram.host.shoot_down(cpu, &self.tlb, range)
    }

    /// Physical memory as the pinned CPU sees it.
    #[inline]
    pub fn ram<'a>(&'a self, pin: &'a Pin<'a>) -> Ram<'a, H> {
        self.machine.ram(pin)
    }
}
