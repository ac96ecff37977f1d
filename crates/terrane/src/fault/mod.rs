//! Page faults.
//!
//! # The speculative path (requirements A1 to A3, B1 to B3)
//!
//! 1. Pin the CPU; find the VMA in the index, without a lock.
//! 2. Read its sequence counter (even, or give up) and its attributes, once, into a [`Snapshot`].
//! 3. Walk the page table, installing missing tables by compare-and-swap.
//! 4. Make the page ready: a frame zeroed, or a page of the object found. Nothing is owned yet.
//! 5. Take the entry with one compare-and-swap (empty to busy).
//! 6. While owning it, look at the sequence counter again. Changed: give the entry back, undo, give up.
//! 7. Publish.
//!
//! Nothing here waits for a layout change, and nothing that another CPU's fault writes is written: the VMA and the upper
//! tables are only read, the counters, the frame cache and the pin's word belong to the CPU, the frame's
//! metadata and the entry to the page.
//!
//! # The locked path
//!
//! The same steps, with the page's range held (shared) from before step 1 to behind step 7: no call changes what is mapped
//! there meanwhile, so step 6 is not needed. A call about other addresses is not waited for, though it may divide or merge
//! the record of the VMA at any time: the lookup is exact all the same, the attributes are read by the counter, and an anon_vma
//! that passes to another record stays alive. The locked path is where the speculative path goes when it gives up. What
//! the speculative path cannot resolve it never decides: an address without a VMA, a forbidden access or a page
//! beyond the end of its file are errors only when the locked path says so. It always makes progress: changes of its page are
//! excluded, changes next door and entries that are busy are nanoseconds from their end.
//!
//! Under [`Locking::Classic`] every fault goes this way, with the lock of the whole space.
//!
//! # Waiting
//!
//! An attempt that must wait (for a page being read, for an entry taken by another fault, for memory) ends, drops
//! pin and lock, waits, and starts over. So a fault never holds anything that a shoot-down, a sweep or a collapse could
//! wait for, but the entry itself between steps 5 and 7, where nothing waits (B3).
//!
//! Sources: A (asynchronous page fault, 2009), B (speculative page faults v11, 2018); A. Clements et al., "Scalable
//! address spaces using RCU balanced trees" (2012) for filling entries without a lock of the space.

mod anon;
mod block;
mod file;
mod handler;
mod marks;
mod populate;
mod private;
mod swap;
pub mod user;

pub use marks::may_vanish;
pub(crate) use marks::{Marks, age_block, age_entry};
pub(crate) use populate::populate;

use crate::addr::{AddrRange, Frame, PAGE_SIZE, page_floor};
use crate::error::FaultError;
use crate::frame::Ram;
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::{Locking, Mm};
use crate::object::Object;
use crate::page_table::PteFlags;
use crate::rmap::AnonVma;
use crate::stats::Counter;
use crate::sync::Shared;
use crate::vma::{Access, Snapshot, VmFlags, Vma};
use core::ptr::NonNull;

/// What an address translates to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Translation {
    /// The frame that holds the page.
    pub frame: Frame,
    /// What its entry allows now.
    pub flags: PteFlags,
}

/// One attempt at one fault: what it works with.
pub(crate) struct Attempt<'a, H: Host> {
    pub(crate) mm: &'a Mm<H>,
    pub(crate) ram: Ram<'a, H>,
    pub(crate) vma: &'a Vma<H>,
    pub(crate) seen: Snapshot,
    /// The counter's value for a speculative attempt; `None` when the page's range is held.
    pub(crate) seq: Option<u32>,
    /// Whether a block may be asked for ([`Stop::Block`]).
    pub(crate) blocks: bool,
}

impl<H: Host> Attempt<'_, H> {
    /// Step 6: true when the attributes still hold. For a caller that owns an entry.
    #[inline]
    pub(crate) fn still_valid(&self) -> bool {
        self.seq.is_none_or(|seq| self.vma.seq.unchanged_while_owned(seq))
    }
}

impl<H: Host> Attempt<'_, H> {
    /// A frame for a private page at `addr`, from where the policy of the VMA wants it.
    #[inline]
    pub(crate) fn allocate(&self, addr: u64) -> Option<Frame> {
        self.mm.allocate_page(&self.ram, self.seen.flags, addr)
    }
}

/// Why an attempt did not resolve its fault.
pub(crate) enum Stop<H: Host> {
    /// Start over at once: another CPU was faster or owns the entry.
    Again,
    /// The speculative path gives up, for the reason counted; the locked path decides.
    GiveUp(Counter),
    /// The page of the object is not in memory.
    Read(Shared<Object<H>>, u64),
    /// The page is being read.
    Wait(Shared<Object<H>>, Frame),
    /// The page is in this slot of the swap device, and the attempt has become a helper of the slot: not to be dropped.
    SwapIn(u64),
    /// It is for a handler of user faults: wait until that has resolved it.
    User(user::Want),
    /// A block is wanted, for a VMA with these attributes: make one and install it.
    Block(VmFlags),
    /// Start over, but first give back a use of an anon_vma: that may need its lock.
    GiveBack(NonNull<AnonVma<H>>),
    /// It cannot be resolved. From a speculative attempt: the locked path decides.
    Fail(FaultError),
}

/// Speculative attempts that may end in "the VMA changed" before the lock is taken. More than one, because a
/// merge or a split beside the address leaves a VMA there that the next look finds.
const TRIES: u32 = 3;

/// Attempts that may meet an entry that is taken before the lock is.
const PATIENCE: u32 = 64;

/// Times that memory is looked for before a fault reports that there is none.
const RECLAIM_TRIES: u32 = 3;

/// Times that memory is found, and taken by others, before a fault counts them as failures.
const FOUND_TRIES: u32 = 1000;

/// Resolves a fault at `addr`; returns the translation of its page. Blocks where a page must be read; not while
/// pinned.
///
/// # Errors
/// [`FaultError`].
pub(crate) fn fault<H: Host>(
    mm: &Mm<H>,
    cpu: &Cpu<H>,
    addr: u64,
    access: Access,
) -> Result<Translation, FaultError> {
    let addr = page_floor(addr);
    let mut course = Course::new(mm, addr);
    loop {
        let stop = match course.attempt(cpu, |attempt| handler::handle(attempt, addr, access)) {
            Ok(translation) => return Ok(translation),
            Err(stop) => stop,
        };
        course.recover(cpu, stop)?;
    }
}

/// Gives the VMA at `addr`, which the caller holds, an anon_vma if it has none. Not while pinned.
///
/// # Errors
/// [`FaultError::OutOfMemory`]; [`FaultError::NotMapped`].
pub(crate) fn prepare_anon_held<H: Host>(mm: &Mm<H>, cpu: &Cpu<H>, addr: u64) -> Result<(), FaultError> {
    let mut course = Course { speculative: false, ..Course::quiet(mm, addr, addr + PAGE_SIZE) };
    loop {
        let stop = {
            let pin = cpu.pin();
            let (vma, seen) = mm.vma_at(&pin, addr).ok_or(FaultError::NotMapped)?;
            let attempt = Attempt { mm, ram: mm.ram(&pin), vma, seen, seq: None, blocks: false };
            match private::prepare_anon(&attempt) {
                Ok(_) => return Ok(()),
                Err(stop) => stop,
            }
        };
        course.recover(cpu, stop)?;
    }
}

/// Gives the VMA at `addr`, which the caller holds, the anon_vma that filling it in from there on would give it: none when a guard is
/// in the way. Not while pinned.
///
/// # Errors
/// As [`prepare_anon_held`].
pub(crate) fn prepare_to_fill<H: Host>(mm: &Mm<H>, cpu: &Cpu<H>, addr: u64) -> Result<(), FaultError> {
    let guarded = {
        let pin = cpu.pin();
        mm.page_table.walk(&mm.ram(&pin), addr).is_some_and(|walk| walk.raw == crate::page_table::GUARD)
    };
    if guarded { Ok(()) } else { prepare_anon_held(mm, cpu, addr) }
}

/// The course of one fault (or one batch) through its attempts.
pub(crate) struct Course<'a, H: Host> {
    mm: &'a Mm<H>,
    addr: u64,
    /// The end of what an attempt may fill in.
    end: u64,
    speculative: bool,
    /// Counted as a fault; batches of populate are not.
    counted: bool,
    first: bool,
    read_before: bool,
    tries: u32,
    rounds: u32,
    reclaims: u32,
    found: u32,
    /// A block may still be asked for: once in the course of a fault.
    blocks: bool,
}

impl<'a, H: Host> Course<'a, H> {
    pub(crate) fn new(mm: &'a Mm<H>, addr: u64) -> Self {
        Self {
            mm,
            addr,
            end: addr + PAGE_SIZE,
            speculative: mm.locking == Locking::Speculative,
            counted: true,
            first: true,
            read_before: false,
            tries: 0,
            rounds: 0,
            reclaims: 0,
            found: 0,
            blocks: true,
        }
    }

    /// The course of a batch up to `end`: the same, but not counted as a fault.
    pub(crate) fn quiet(mm: &'a Mm<H>, addr: u64, end: u64) -> Self {
        Self { counted: false, first: false, end, ..Self::new(mm, addr) }
    }

    /// Makes one attempt: finds the VMA, the way of the moment, and calls `act`.
    #[inline]
    pub(crate) fn attempt<R>(
        &mut self,
        cpu: &Cpu<H>,
        act: impl FnOnce(&Attempt<'_, H>) -> Result<R, Stop<H>>,
    ) -> Result<R, Stop<H>> {
        if self.speculative { self.attempt_speculative(cpu, act) } else { self.attempt_locked(cpu, act) }
    }

    #[inline]
    fn attempt_speculative<R>(
        &mut self,
        cpu: &Cpu<H>,
        act: impl FnOnce(&Attempt<'_, H>) -> Result<R, Stop<H>>,
    ) -> Result<R, Stop<H>> {
        let (mm, blocks) = (self.mm, self.blocks);
        let pin = cpu.pin();
        let ram = mm.ram(&pin);
        if self.first {
            self.first = false;
            ram.event(Counter::PgFault, self.addr);
        }
        let (vma, seq, seen) = match mm.recent_vma(cpu, &pin, self.addr) {
            Some(recent) => recent,
            None => {
                // A miss proves nothing (A1).
                let vma = mm.index.find(&pin, self.addr).ok_or(Stop::GiveUp(Counter::SpfVmaChanged))?;
                let seq = vma.seq.read().ok_or(Stop::GiveUp(Counter::SpfVmaChanged))?;
                let seen = vma.snapshot();
                if !seen.range.contains(self.addr) || !vma.seq.unchanged(seq) {
                    return Err(Stop::GiveUp(Counter::SpfVmaChanged));
                }
                mm.remember_vma(cpu, &pin, vma);
                (vma, seq, seen)
            }
        };
        let result = act(&Attempt { mm, ram, vma, seen, seq: Some(seq), blocks })?;
        if self.counted {
            ram.event(Counter::SpeculativePgFault, self.addr);
        }
        Ok(result)
    }

    #[inline]
    fn attempt_locked<R>(
        &mut self,
        cpu: &Cpu<H>,
        act: impl FnOnce(&Attempt<'_, H>) -> Result<R, Stop<H>>,
    ) -> Result<R, Stop<H>> {
        let (mm, blocks) = (self.mm, self.blocks);
        let _steady = mm.share(cpu, AddrRange::new(self.addr, self.end));
        let pin = cpu.pin();
        let ram = mm.ram(&pin);
        if self.first {
            self.first = false;
            ram.event(Counter::PgFault, self.addr);
        }
        let (vma, seen) = match mm.recent_vma(cpu, &pin, self.addr) {
            Some((vma, _, seen)) => (vma, seen),
            None => {
                let (vma, seen) = mm.vma_at(&pin, self.addr).ok_or(Stop::Fail(FaultError::NotMapped))?;
                mm.remember_vma(cpu, &pin, vma);
                (vma, seen)
            }
        };
        act(&Attempt { mm, ram, vma, seen, seq: None, blocks })
    }

    /// What to do about `stop` before the next attempt: wait, read, find memory, change to the locked path.
    ///
    /// # Errors
    /// The fault's error, when nothing can be done.
    #[cold]
    pub(crate) fn recover(&mut self, cpu: &Cpu<H>, stop: Stop<H>) -> Result<(), FaultError> {
        let machine = &*self.mm.machine;
        match stop {
            Stop::Again => {
                machine.host().relax(cpu.id(), self.rounds);
                self.rounds = self.rounds.saturating_add(1);
                // Whoever owns the entry keeps it for long: a collapse. The range lock knows how to wait for that.
                if self.speculative && self.rounds >= PATIENCE {
                    self.lock_from_now_on(cpu, Some(Counter::SpfPmdChanged));
                }
            }
            Stop::GiveUp(reason) => {
                self.tries += 1;
                if !self.speculative {
                    // On the locked path: a neighbouring call is deciding on this VMA, and must get on to end.
                    machine.host().relax(cpu.id(), self.rounds);
                    self.rounds = self.rounds.saturating_add(1);
                }
                if reason != Counter::SpfVmaChanged || self.tries >= TRIES {
                    self.lock_from_now_on(cpu, Some(reason));
                }
            }
            Stop::Read(object, index) => {
                self.count_major(cpu);
                let random = self.mm.fault_around <= PAGE_SIZE;
                match object.read_in(cpu, index, !random) {
                    Ok(()) => {}
                    Err(FaultError::OutOfMemory) => self.find_memory(cpu)?,
                    // The object may have changed its length meanwhile: the next attempt decides.
                    Err(FaultError::BeyondEnd) => self.lock_from_now_on(cpu, None),
                    Err(error) => return Err(error),
                }
            }
            // SAFETY: the count came from `try_use` and was installed nowhere; it keeps the node.
            Stop::GiveBack(anon) => unsafe { anon.as_ref().end_use(machine, &cpu.participant()) },
            Stop::SwapIn(number) => self.swap_in(cpu, number)?,
            Stop::Block(flags) => self.map_block(cpu, flags)?,
            Stop::User(want) => user::wait(self.mm, cpu, self.addr, want)?,
            Stop::Wait(object, frame) => object.wait_for(cpu, frame),
            Stop::Fail(FaultError::OutOfMemory) => self.find_memory(cpu)?,
            Stop::Fail(error) => {
                if !self.speculative {
                    return Err(error);
                }
                if error == FaultError::Refused {
                    // Objects that have gone hold their promises until their mappings' records are freed.
                    cpu.quiesce();
                }
                let reason = (error == FaultError::NotAllowed).then_some(Counter::SpfVmaAccess);
                self.lock_from_now_on(cpu, reason);
            }
        }
        Ok(())
    }

    /// Leaves the speculative path; counts why.
    fn lock_from_now_on(&mut self, cpu: &Cpu<H>, reason: Option<Counter>) {
        if let (true, Some(reason)) = (self.speculative, reason) {
            let pin = cpu.pin();
            self.mm.machine.ram(&pin).event(reason, self.addr);
        }
        self.speculative = false;
    }

    /// Counts a fault that waits for a file or a device, once.
    fn count_major(&mut self, cpu: &Cpu<H>) {
        if !core::mem::replace(&mut self.read_before, true) {
            let pin = cpu.pin();
            self.mm.machine.ram(&pin).event(Counter::PgMajFault, self.addr);
        }
    }

    /// Looks for memory where the page may be.
    fn look_for_memory(&self, cpu: &Cpu<H>) -> bool {
        let nodes = {
            let pin = cpu.pin();
            // A hint: at worst, memory is looked for in the wrong place once.
            let vma = self.mm.index.find(&pin, self.addr);
            vma.and_then(|vma| self.mm.bound_to(vma, self.addr))
        };
        match nodes {
            Some(nodes) => cpu.find_memory_on(nodes),
            None => cpu.find_memory(),
        }
    }

    fn find_memory(&mut self, cpu: &Cpu<H>) -> Result<(), FaultError> {
        self.reclaims += 1;
        if self.reclaims > RECLAIM_TRIES {
            return Err(FaultError::OutOfMemory);
        }
        if self.look_for_memory(cpu) {
            // Others may take what was found: that is no reason to give up, but for one that may go on for ever.
            self.found += 1;
            if self.found < FOUND_TRIES {
                self.reclaims = 0;
            }
        }
        Ok(())
    }
}
