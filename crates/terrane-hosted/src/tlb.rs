//! The shoot-down protocol: how processors that are threads forget translations.
//!
//! A kernel interrupts the other processors and waits for their answers. Threads cannot be interrupted, and one
//! that is not running would keep everyone waiting. So a shoot-down here *posts* and returns; the answer is
//! collected later, when memory is to be freed.
//!
//! # What it guarantees
//!
//! 1. **No new use.** An access that starts after [`Tlb::shoot_down`] returned (in the sense of happens-before)
//!    uses no translation of the range that was read from the page table before the call.
//! 2. **No late use.** When [`Tlb::has_passed`] says yes, or [`Tlb::settle`] returns, no access anywhere still
//!    uses such a translation, and what those accesses did happens before.
//! 3. **No late reading.** A load returns what the page held before any shoot-down that came meanwhile. (A store
//!    cannot promise that: it may land after the shoot-down was posted, though not after it has passed.)
//! 4. **Progress.** Posting waits for nobody; asking waits for nobody. Settling waits only for threads that are
//!    in the middle of an access, which blocks on nothing: at worst until the scheduler runs them again.
//!
//! # How
//!
//! Each processor has a *lane*: a request word that shooters raise, and a state word that only the owner writes:
//! the request it has last acted upon, and one bit that is set while it is inside an access.
//!
//! | access | shoot-down | settling |
//! |---|---|---|
//! | sets the bit | changes the page table | reads the request word |
//! | *(compiler fence)* | raises the request word | `membarrier` |
//! | reads the request word; if new: flushes, acknowledges | | reads the state word: |
//! | looks in its TLB, touches memory | | bit clear: passed up to that request |
//! | clears the bit (release) | | |
//!
//! *Guarantee 1* is coherence: an access that starts later reads the request word and cannot miss what happened
//! before. A translation that was walked for before the shoot-down but put into the TLB after it is caught as
//! well, because it is used only by an attempt that reads the request word again after the insertion.
//!
//! *Guarantee 2* has three proofs, the cheapest first. The state word acknowledges the request or a later one:
//! acknowledging comes after the accesses before it and before the look-ups after it. Or the state word says
//! [`OFF`]: the processor runs no space; whoever leaves that state makes a full fence between the word and its
//! first access, and the shooter one between the request and its look at the word, so one of them sees the other.
//! Or somebody has *swept*: read the request word, made every thread of the process pass a full fence
//! (`membarrier`), and then seen the bit clear. An access whose bit was set before that fence and not cleared
//! would have been seen; an access that sets its bit after the fence reads the request. This is what lets an
//! access do without a fence of its own, which would wait for the stores before it.
//!
//! *Guarantee 3* is a second look at the request word, after the load ([`Port::is_overtaken`]); if it has moved, the
//! load is done again. It matters where a page changes owners without being freed: when one of two processes
//! that share a page after a fork unmaps it, the other may write it in place at once.
//!
//! Where the kernel refuses `membarrier`, accesses make a full fence between setting the bit and reading the
//! request word, and a sweep makes one in place of the system call.
//!
//! # Who is asked
//!
//! Those who may hold a translation of the range: the processors in the space's [`CpuSet`] whose [`Filter`] has a bit of
//! the range set. Both are Dekker's pattern once more:
//!
//! | a processor that fills its TLB | shoot-down |
//! |---|---|
//! | enters the set, the bit of the region | changes the page table |
//! | full fence | full fence |
//! | reads the page table | reads the set and the bits |
//!
//! So a shooter that finds a bit clear knows one of two things. Either the processor's fence comes after its own: then
//! whatever the processor reads from the table for this region is the changed entry. Or the bit had been set and was
//! cleared again before the look: a processor clears its filter together with its TLB, between two accesses. Every
//! access through an old translation used it out of the TLB while the bit was set, and had ended before the
//! clearing, whose store releases it. Either way no old translation is in the TLB, none can get there, and no access is
//! under way through one: the shoot-down has passed for this processor without a request, and all three
//! guarantees hold. The bit is set before the table is read, not when the translation is inserted: a
//! translation that is on its way from the one to the other is asked for too.
//!
//! A shoot-down that asks nobody returns [`Ticket::PASSED`] and writes no word that anybody else reads.
//!
//! # Notes
//!
//! A request is one number, so by itself it flushes everything. Beside it lie a few *notes* saying which pages the
//! last requests were about. A processor that finds the note of every request since its last look drops just
//! those pages; if one is missing, unfinished or overwritten, it flushes all. Without the notes, a thread that maps
//! and unmaps one page would walk the tables again for everything else that it touches.
//!
//! # Tickets
//!
//! A ticket is a number that the shooting processor counts up. What it waits for is kept in two batches for each
//! shooter, as in read-copy-update: the one being *collected* (for each target the highest request posted) and the
//! one being *waited* for. When every target of the latter has passed, its tickets have passed, and the collected
//! batch moves up. Two batches are enough for any number of shoot-downs in flight: nothing wraps, overflows or is
//! confused, a ticket waits for at most one batch besides its own, and no word is written by every shoot-down of
//! the machine.
//!
//! # Who may break it
//!
//! Whoever touches memory through a translation outside [`Port::enter`] .. [`Port::leave`], or keeps the host
//! address beyond it; two ports of one processor; a library that shoots down in the name of a processor that
//! another thread owns *and* takes [`Ticket::PASSED`] for it; code that blocks, or calls Terrane, inside an
//! access; whoever reads a page table for the TLB without [`Port::will_hold`] before it, or clears a filter and keeps a
//! translation.
//!
//! Source: the asymmetric Dekker pattern is that of D. Dice et al., "Asymmetric Dekker synchronization" (2001), and of
//! `liburcu`; `membarrier(2)`.

use crate::cpu_set::{CpuSet, Mask};
use crate::error::HostedError;
use crate::filter::{Filter, Held};
use crate::locks::RawMutex;
use core::ptr::NonNull;
use core::sync::atomic::compiler_fence;
use crossbeam_utils::CachePadded;
use parking_lot::lock_api::Mutex;
use rustix::thread::{MembarrierCommand, membarrier, sched_yield};
use terrane::addr::AddrRange;
use terrane::host::{ShootDown, Ticket};
use terrane::sync::CpuId;
use terrane::sync::atomic::{AtomicU64, Ordering, fence};

/// Requests count in steps of two; the lowest bit of a state word says "inside an access".
const STEP: u64 = 2;
const INSIDE: u64 = 1;
/// The state of a processor that runs no space: it acknowledges everything in advance.
const OFF: u64 = u64::MAX - 1;

/// Notes kept in a lane; together with the request word they fill one 128-byte line.
const NOTES: usize = 4;
/// The longest range, in pages, that is dropped page by page; beyond it a full flush is cheaper.
const NOTE_PAGES: u64 = 32;

/// Failed questions by one shooter before it sweeps: a processor that rests (its thread waits for something, or
/// only makes calls) never acknowledges, and a system call every so often costs less than the memory held back.
const SWEEP_EVERY: u32 = 64;

/// What a request is about, written by the shooter.
#[derive(Default)]
struct Note {
    /// The request the note belongs to; `WRITING` while it is being written.
    request: AtomicU64,
    start: AtomicU64,
    end: AtomicU64,
}

/// Not a request: those are even.
const WRITING: u64 = u64::MAX;

impl Note {
    /// Leaves the note, unless another shooter is at it.
    fn write(&self, request: u64, range: AddrRange) {
        let old = self.request.load(Ordering::Relaxed);
        if old == WRITING
            || old > request
            || self.request.compare_exchange(old, WRITING, Ordering::Relaxed, Ordering::Relaxed).is_err()
        {
            return;
        }
        // A reader that sees one of the two stores below must see WRITING too when it looks again.
        fence(Ordering::Release);
        self.start.store(range.start, Ordering::Relaxed);
        self.end.store(range.end, Ordering::Relaxed);
        self.request.store(request, Ordering::Release);
    }

    /// The range of `request`, if this is its note.
    fn read(&self, request: u64) -> Option<AddrRange> {
        if self.request.load(Ordering::Acquire) != request {
            return None;
        }
        let range = AddrRange::new(self.start.load(Ordering::Relaxed), self.end.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        (self.request.load(Ordering::Relaxed) == request).then_some(range)
    }
}

/// The part of a lane that shooters write.
#[derive(Default)]
struct Inbox {
    /// The last request.
    request: AtomicU64,
    /// The highest request known to have passed by a sweep.
    swept: AtomicU64,
    notes: [Note; NOTES],
}

/// The part of a lane that the owner writes all the time.
#[derive(Default)]
struct Owner {
    /// The request last acted upon, and `INSIDE`; or `OFF`.
    state: AtomicU64,
    /// Requests that the owner has posted to itself.
    own: AtomicU64,
}

/// One processor as the others see it.
#[derive(Default)]
struct Lane {
    inbox: CachePadded<Inbox>,
    owner: CachePadded<Owner>,
    /// Written by the owner only, when it comes to new addresses.
    filter: Filter,
}

impl Lane {
    /// Asks for `range` to be forgotten; returns the request.
    fn post(&self, range: AddrRange) -> u64 {
        // Release: whoever reads the request sees the change of the page table.
        let request = self.inbox.request.fetch_add(STEP, Ordering::SeqCst) + STEP;
        if range.pages() <= NOTE_PAGES {
            self.inbox.notes[note_index(request)].write(request, range);
        }
        request
    }

    /// True when no access can still use what `request` asked to forget.
    fn has_passed(&self, request: u64) -> bool {
        self.owner.state.load(Ordering::Acquire) & !INSIDE >= request
            || self.inbox.swept.load(Ordering::Acquire) >= request
    }
}

#[inline]
fn note_index(request: u64) -> usize {
    (request / STEP) as usize % NOTES
}

/// Shoot-downs that pass together.
struct Batch {
    /// Who has not passed yet.
    targets: Mask,
    /// For each of them, the request to wait for.
    requests: Box<[u64]>,
    /// The highest ticket inside.
    last: u64,
}

/// What one processor has posted and not yet seen pass.
struct Ledger {
    issued: u64,
    waiting: Batch,
    collecting: Batch,
    /// Questions answered with no since the last sweep.
    refusals: u32,
}

struct Shooter {
    /// Tickets up to this one have passed.
    passed: AtomicU64,
    ledger: Mutex<RawMutex, Ledger>,
}

impl Shooter {
    /// Moves `passed` on as far as the lanes allow.
    fn advance(&self, ledger: &mut Ledger, lanes: &[Lane]) {
        loop {
            let waiting = &mut ledger.waiting;
            for target in waiting.targets.iter() {
                if lanes[target].has_passed(waiting.requests[target]) {
                    waiting.targets.remove(target);
                }
            }
            if !waiting.targets.is_empty() {
                return;
            }
            self.passed.store(waiting.last, Ordering::Release);
            if ledger.collecting.targets.is_empty() {
                return;
            }
            core::mem::swap(&mut ledger.waiting, &mut ledger.collecting);
        }
    }
}

/// The translation caches of a machine, from outside.
pub(crate) struct Tlb {
    lanes: Box<[Lane]>,
    shooters: Box<[CachePadded<Shooter>]>,
    /// True when accesses must fence for themselves.
    fenced: bool,
}

impl Tlb {
    /// For processors with numbers below `cpus`, all off. `membarrier: false` does without the system call.
    pub fn new(cpus: usize, membarrier: bool) -> Result<Self, HostedError> {
        let fenced = !(membarrier && register_membarrier());
        let batch = || Batch { targets: Mask::EMPTY, requests: vec![0; cpus].into_boxed_slice(), last: 0 };
        let mut lanes = Vec::new();
        let mut shooters = Vec::new();
        lanes.try_reserve_exact(cpus).map_err(|_| HostedError::OutOfMemory)?;
        shooters.try_reserve_exact(cpus).map_err(|_| HostedError::OutOfMemory)?;
        for _ in 0..cpus {
            let lane = Lane::default();
            lane.owner.state.store(OFF, Ordering::Relaxed);
            lanes.push(lane);
            let ledger = Ledger { issued: 0, waiting: batch(), collecting: batch(), refusals: 0 };
            shooters
                .push(CachePadded::new(Shooter { passed: AtomicU64::new(0), ledger: Mutex::new(ledger) }));
        }
        Ok(Self { lanes: lanes.into_boxed_slice(), shooters: shooters.into_boxed_slice(), fenced })
    }

    /// True when each access makes a full fence because the kernel refuses `membarrier`.
    pub fn is_fenced(&self) -> bool {
        self.fenced
    }

    /// See [`terrane::host::Tlb::shoot_down`].
    pub fn shoot_down(&self, cpu: CpuId, space: &CpuSet, range: AddrRange) -> ShootDown {
        // The change of the page table comes before the look at who runs the space and what they hold.
        // `CpuSet::insert` and `Held::add` are the other halves: a processor that we do not see here walks the changed
        // table.
        fence(Ordering::SeqCst);
        let mut targets = space.load();
        for target in targets.iter() {
            if !self.lanes[target].filter.may_hold(range) {
                targets.remove(target);
            }
        }
        if targets.remove(cpu.index()) {
            // The caller is the owner of this lane, hence not inside an access: nothing to wait for.
            let lane = &self.lanes[cpu.index()];
            lane.post(range);
            lane.owner.own.store(lane.owner.own.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
        if targets.is_empty() {
            return ShootDown::PASSED;
        }
        let shooter = &self.shooters[cpu.index()];
        let mut ledger = shooter.ledger.lock();
        ledger.issued += 1;
        ledger.collecting.last = ledger.issued;
        let mut asked = 0;
        for target in targets.iter() {
            ledger.collecting.requests[target] = self.lanes[target].post(range);
            ledger.collecting.targets.insert(target);
            asked += 1;
        }
        let ticket = Ticket(ledger.issued);
        drop(ledger);
        // Between the requests and any later look at a state word that may say OFF.
        fence(Ordering::SeqCst);
        ShootDown { ticket, asked }
    }

    /// See [`terrane::host::Tlb::has_passed`]. May be asked by any thread.
    pub fn has_passed(&self, cpu: CpuId, ticket: Ticket) -> bool {
        let shooter = &self.shooters[cpu.index()];
        if shooter.passed.load(Ordering::Acquire) >= ticket.0 {
            return true;
        }
        // Somebody else is at it: "not yet" is always a right answer.
        let Some(mut ledger) = shooter.ledger.try_lock() else { return false };
        shooter.advance(&mut ledger, &self.lanes);
        if shooter.passed.load(Ordering::Acquire) >= ticket.0 {
            return true;
        }
        ledger.refusals += 1;
        if ledger.refusals < SWEEP_EVERY {
            return false;
        }
        ledger.refusals = 0;
        self.sweep();
        shooter.advance(&mut ledger, &self.lanes);
        shooter.passed.load(Ordering::Acquire) >= ticket.0
    }

    /// See [`terrane::host::Tlb::settle`]. The calling thread must not be inside an access.
    pub fn settle(&self, cpu: CpuId, ticket: Ticket) {
        let shooter = &self.shooters[cpu.index()];
        while shooter.passed.load(Ordering::Acquire) < ticket.0 {
            self.sweep();
            shooter.advance(&mut shooter.ledger.lock(), &self.lanes);
            if shooter.passed.load(Ordering::Acquire) < ticket.0 {
                // A thread is inside an access; let it run.
                sched_yield();
            }
        }
    }

    /// Finds out which processors are not inside an access, and notes for them that all requests up to now have
    /// passed.
    fn sweep(&self) {
        let mut lagging = Mask::EMPTY;
        let mut requests = [0; crate::LANES];
        for (index, lane) in self.lanes.iter().enumerate() {
            let request = lane.inbox.request.load(Ordering::Acquire);
            if !lane.has_passed(request) {
                requests[index] = request;
                lagging.insert(index);
            }
        }
        if lagging.is_empty() || !self.heavy_fence() {
            return;
        }
        for index in lagging.iter() {
            let lane = &self.lanes[index];
            // Acquire: the accesses that ended before the bit was cleared happen before whatever follows.
            if lane.owner.state.load(Ordering::Acquire) & INSIDE == 0 {
                lane.inbox.swept.fetch_max(requests[index], Ordering::AcqRel);
            }
        }
    }

    /// The settling half of the asymmetric fence. False when the system call failed, which it does not do once
    /// registered unless the process has forbidden it to itself; then only acknowledgements count.
    fn heavy_fence(&self) -> bool {
        fence(Ordering::SeqCst);
        self.fenced || membarrier(MembarrierCommand::PrivateExpedited).is_ok()
    }

    /// The owner's side of the lane of `cpu`.
    ///
    /// # Safety
    /// The port does not outlive `self`, and while it lives no other port of this processor is used.
    pub unsafe fn port(&self, cpu: CpuId) -> Port {
        let lane = &self.lanes[cpu.index()];
        let own_seen = lane.owner.own.load(Ordering::Relaxed);
        Port { lane: NonNull::from(lane), seen: 0, own_seen, held: Held::default(), fenced: self.fenced }
    }
}

/// Registers the process for private expedited barriers and tries one. Registering twice is harmless.
fn register_membarrier() -> bool {
    membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
        && membarrier(MembarrierCommand::PrivateExpedited).is_ok()
}

/// What a processor has to forget before it may go on.
pub(crate) enum Forget {
    All,
    Range(AddrRange),
}

/// The owner's side of a lane.
pub(crate) struct Port {
    lane: NonNull<Lane>,
    /// The request last acted upon.
    seen: u64,
    /// How many of the requests acted upon were the owner's own.
    own_seen: u64,
    held: Held,
    fenced: bool,
}

// SAFETY: the lane may be used from any thread, and `&mut` methods keep it to one at a time.
unsafe impl Send for Port {}

impl Port {
    #[inline(always)]
    fn lane(&self) -> &Lane {
        // SAFETY: the lane outlives the port (`Tlb::port`).
        unsafe { self.lane.as_ref() }
    }

    /// Begins to run a space. The caller's TLB is empty, and it enters itself into the space's set next.
    pub fn on(&mut self) {
        self.holds_nothing();
        self.own_seen = self.lane().owner.own.load(Ordering::Relaxed);
        self.seen = self.lane().inbox.request.load(Ordering::Acquire);
        self.lane().owner.state.store(self.seen, Ordering::Relaxed);
        // Between leaving OFF and the first access; see the module head.
        fence(Ordering::SeqCst);
    }

    /// Runs no space any more. The caller's TLB is empty.
    pub fn off(&mut self) {
        self.holds_nothing();
        self.lane().owner.state.store(OFF, Ordering::Release);
    }

    /// Begins an access. When it returns false, [`catch_up`](Self::catch_up) comes before the look-up.
    #[inline(always)]
    #[must_use]
    pub fn enter(&mut self) -> bool {
        let lane = self.lane();
        lane.owner.state.store(self.seen | INSIDE, Ordering::Relaxed);
        if self.fenced {
            fence(Ordering::SeqCst);
        } else {
            compiler_fence(Ordering::SeqCst);
        }
        lane.inbox.request.load(Ordering::Acquire) == self.seen
    }

    /// Acts upon the requests since the last look, and acknowledges them. Returns how many came from others.
    #[cold]
    pub fn catch_up(&mut self, mut forget: impl FnMut(Forget)) -> u64 {
        let inbox = &self.lane().inbox;
        let request = inbox.request.load(Ordering::Acquire);
        let mut all = request - self.seen > STEP * NOTES as u64;
        let mut next = if all { request } else { self.seen };
        while next != request {
            next += STEP;
            let Some(range) = inbox.notes[note_index(next)].read(next) else {
                all = true;
                break;
            };
            forget(Forget::Range(range));
        }
        if all {
            forget(Forget::All);
            // The look-up comes after this, so the access that has begun has used no translation yet.
            // SAFETY: the lane outlives the port (`Tlb::port`); not through `lane()`, which would borrow all of the port.
            self.held.flushed(unsafe { &self.lane.as_ref().filter });
        }
        let own = self.lane().owner.own.load(Ordering::Relaxed);
        let received = ((request - self.seen) / STEP).saturating_sub(own - self.own_seen);
        self.own_seen = own;
        self.seen = request;
        // Release: every access before this one is over.
        self.lane().owner.state.store(request | INSIDE, Ordering::Release);
        received
    }

    /// Says that a translation of `addr` is about to be read from the page table, and may be put into the TLB until
    /// the next full flush. Outside of accesses. `forget` is called if there must be one first.
    #[inline]
    pub fn will_hold(&mut self, addr: u64, forget: impl FnOnce(Forget)) {
        if self.held.is_full() {
            self.flush(forget);
        }
        // SAFETY: as in `catch_up`.
        self.held.add(unsafe { &self.lane.as_ref().filter }, addr);
    }

    /// Empties the TLB, by `forget`, and with it the filter. Outside of accesses.
    pub fn flush(&mut self, forget: impl FnOnce(Forget)) {
        forget(Forget::All);
        self.holds_nothing();
    }

    /// Empties the filter. The caller's TLB is empty.
    fn holds_nothing(&mut self) {
        // SAFETY: as in `catch_up`.
        self.held.clear(unsafe { &self.lane.as_ref().filter });
    }

    /// True when a shoot-down has been posted since the access began. For loads, after they have loaded (with
    /// acquire order), before [`leave`](Self::leave).
    #[inline(always)]
    #[must_use]
    pub fn is_overtaken(&self) -> bool {
        self.lane().inbox.request.load(Ordering::Acquire) != self.seen
    }

    /// Ends an access.
    #[inline(always)]
    pub fn leave(&mut self) {
        compiler_fence(Ordering::SeqCst);
        // Release: the access is over when this is seen.
        self.lane().owner.state.store(self.seen, Ordering::Release);
    }
}

#[cfg(terrane_watch)]
mod watched {
    use super::{Inbox, Lane, Note, Owner, Shooter, Tlb};
    use terrane::names::{Describe, Names};

    /// Says what a structure is made of.
    macro_rules! describe {
        ($type:ty { $($field:ident),* }) => {
            impl Describe for $type {
                fn describe(&self, names: &mut Names) {
                    names.leaf(self);
                    $(names.field(stringify!($field), &self.$field);)*
                }
            }
        };
    }

    describe!(Tlb { lanes, shooters });
    describe!(Lane { inbox, owner, filter });
    describe!(Inbox { request, swept, notes });
    describe!(Note { request, start, end });
    describe!(Owner { state, own });
    describe!(Shooter { passed, ledger });

    impl Describe for crate::filter::Filter {
        fn describe(&self, names: &mut Names) {
            names.leaf(self);
        }
    }

    impl Describe for crate::cpu_set::CpuSet {
        fn describe(&self, names: &mut Names) {
            names.leaf(self);
        }
    }
}
