//! A machine: a host, its frames, its CPUs. Many address spaces share one.
//!
//! Nothing here knows what a mapping is. [`Machine`] owns what is common to all spaces; a [`Cpu`] is the right
//! to act as one of its processors, and every call takes one.

use crate::addr::{AddrRange, Frame};
use crate::commit::Commit;
use crate::error::{Error, OutOfMemory};
use crate::frame::{Frames, NodeMask, Ram, Slab};
use crate::history::Covered;
use crate::host::{Host, Ticket};
use crate::identity::Identities;
use crate::index::LeafPool;
use crate::range_lock::{Held, Mode, Node, RangeLock};
use crate::reclaim::{self, Reclaim};
use crate::stats::{Counter, Stats};
use crate::swap::Swap;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{CpuId, Epoch, Participant, Pin, Recent, Shared};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::cell::Cell;
use core::marker::PhantomData;
use core::mem::MaybeUninit;
use crossbeam_utils::CachePadded;

/// Storage for one VMA record: the layer above gives it its meaning.
#[repr(C, align(64))]
pub struct Record(MaybeUninit<[u8; if cfg!(terrane_loom) { 512 } else { 128 }]>);

impl Record {
    /// Storage that holds nothing yet.
    pub const fn new() -> Self {
        Self(MaybeUninit::uninit())
    }
}

impl Default for Record {
    fn default() -> Self {
        Self::new()
    }
}

/// Ranges that one call holds at a time, at most: a move holds two.
const RANGES_A_CALL: usize = 4;

/// What a CPU locks ranges with.
type RangeNodes = CachePadded<[Node; RANGES_A_CALL]>;

/// A host with its frames, statistics and the records of its spaces.
pub struct Machine<H: Host> {
    // Dropped in this order: retired records are freed into `records` when `epoch` goes.
    epoch: Epoch,
    frames: Frames,
    stats: Stats,
    records: Slab<Record>,
    /// Leaves of indexes, if the host backs large memory by huge pages.
    leaves: Option<LeafPool>,
    /// By CPU.
    range_nodes: Box<[RangeNodes]>,
    zero_frame: Frame,
    swap: Swap,
    reclaim: Reclaim,
    /// How many listings there have been, of all spaces.
    listings: CachePadded<AtomicU64>,
    /// How many objects there have been.
    objects: AtomicU64,
    /// What programs have been promised.
    commit: Commit,
    /// What listings call objects.
    identities: Identities<H::Mutex>,
    /// Serialises those who act without a CPU of their own (destructors); its id is not for others.
    housekeeper: lock_api::Mutex<H::Mutex, CpuId>,
    host: H,
}

/// What a machine holds at one moment; exact at rest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Usage {
    /// Frames of the machine.
    pub frames_total: usize,
    /// Frames that are free.
    pub frames_free: usize,
    /// VMA records in use, in all spaces; those waiting for reclamation included.
    pub vmas: usize,
    /// Bytes that VMA records take from the allocator.
    pub vma_bytes: usize,
    /// Bytes of metadata a frame.
    pub bytes_per_frame: usize,
}

impl<H: Host> Machine<H> {
    /// A machine for at most `cpus` CPUs at a time.
    ///
    /// # Errors
    /// [`OutOfMemory`] when the metadata or the frame of zeros cannot be had.
    pub fn try_new(host: H, cpus: usize) -> Result<Shared<Self>, OutOfMemory> {
        let cpus = cpus.checked_add(1).ok_or(OutOfMemory)?;
        let epoch = Epoch::try_new(cpus)?;
        let frames = Frames::try_new(host.frames(), cpus)?;
        let stats = Stats::try_new(cpus)?;
        let records = Slab::try_new(cpus)?;
        let leaves = host.back_by_huge_pages().map(LeafPool::try_new).transpose()?;
        let swap = Swap::try_new(cpus)?;
        let mut range_nodes = Vec::new();
        range_nodes.try_reserve_exact(cpus).map_err(|_| OutOfMemory)?;
        range_nodes.resize_with(cpus, || CachePadded::new([const { Node::new() }; RANGES_A_CALL]));
        let range_nodes = range_nodes.into_boxed_slice();
        let (zero_frame, housekeeper) = {
            let me = epoch.register().ok_or(OutOfMemory)?;
            let pin = me.pin();
            let ram = Ram { host: &host, frames: &frames, stats: &stats, pin: &pin };
            (ram.allocate_zeroed().ok_or(OutOfMemory)?, pin.cpu())
        };
        let housekeeper = lock_api::Mutex::new(housekeeper);
        let commit = Commit::try_new(frames.total() as u64)?;
        Shared::try_new(Self {
            epoch,
            frames,
            stats,
            records,
            leaves,
            range_nodes,
            zero_frame,
            commit,
            swap,
            reclaim: Reclaim::new(),
            listings: CachePadded::new(AtomicU64::new(0)),
            objects: AtomicU64::new(0),
            identities: Identities::new(),
            housekeeper,
            host,
        })
    }

    /// How much memory programs have been promised, and the mode of overcommit.
    #[inline]
    pub fn commit(&self) -> &Commit {
        &self.commit
    }

    /// The host.
    #[inline]
    pub fn host(&self) -> &H {
        &self.host
    }

    /// The frames.
    #[inline]
    pub fn frames(&self) -> &Frames {
        &self.frames
    }

    /// The counters.
    #[inline]
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// The epoch.
    #[inline]
    pub fn epoch(&self) -> &Epoch {
        &self.epoch
    }

    /// Room for leaves of large indexes, if the host has memory backed by huge pages.
    pub fn leaves(&self) -> Option<&LeafPool> {
        self.leaves.as_ref()
    }

    /// Storage of VMA records.
    #[inline]
    pub fn records(&self) -> &Slab<Record> {
        &self.records
    }

    /// The frame that reads as zeros and is never written, mapped wherever untouched memory is read.
    #[inline]
    pub fn zero_frame(&self) -> Frame {
        self.zero_frame
    }

    /// Where pages go that are swapped out.
    #[inline]
    pub fn swap(&self) -> &Swap {
        &self.swap
    }

    /// Where reclaim stands.
    pub(crate) fn reclaim(&self) -> &Reclaim {
        &self.reclaim
    }

    /// A number for an object, given once.
    pub(crate) fn new_object_number(&self) -> u64 {
        self.objects.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// What listings call objects.
    pub(crate) fn identities(&self) -> &Identities<H::Mutex> {
        &self.identities
    }

    /// Where listings take their numbers from.
    pub(crate) fn listings(&self) -> &AtomicU64 {
        &self.listings
    }

    /// Physical memory as the pinned CPU sees it.
    #[inline]
    pub fn ram<'a>(&'a self, pin: &'a Pin<'a>) -> Ram<'a, H> {
        Ram { host: &self.host, frames: &self.frames, stats: &self.stats, pin }
    }

    /// What is in use.
    pub fn usage(&self) -> Usage {
        Usage {
            frames_total: self.frames.total(),
            frames_free: self.frames.free_frames() + self.reclaim.reserved(),
            vmas: self.records.live(),
            vma_bytes: self.records.bytes(),
            bytes_per_frame: size_of::<crate::frame::FrameMeta>(),
        }
    }
}

impl<H: Host> Drop for Machine<H> {
    fn drop(&mut self) {
        // Retired objects may hold frames and records: free them while those still exist.
        for index in 0..self.epoch.used() {
            // SAFETY: whoever drops the machine is its only user.
            unsafe { self.epoch.participant(CpuId(index as u32)) }.collect_all();
        }
    }
}

/// One processor of a machine, registered. One thread of execution uses it at a time: it is `Send`, not `Sync`.
pub struct Cpu<H: Host> {
    machine: Shared<Machine<H>>,
    id: CpuId,
    owned: bool,
    /// What this CPU has written for the listing under way: images of ranges, and notes of records.
    images: Covered,
    notes: Covered,
    /// What its last fault found, a layer above.
    recent: Recent,
    not_sync: PhantomData<Cell<()>>,
}

impl<H: Host> Cpu<H> {
    /// Registers a CPU.
    ///
    /// # Errors
    /// [`Error::Again`] when all CPUs that the machine was made for are registered.
    pub fn try_new(machine: &Shared<Machine<H>>) -> Result<Self, Error> {
        let id = machine.epoch.register().ok_or(Error::Again)?.id();
        Ok(Self {
            machine: machine.clone(),
            id,
            owned: true,
            images: Covered::new(),
            notes: Covered::new(),
            recent: Recent::new(),
            not_sync: PhantomData,
        })
    }

    /// Runs `act` as the machine's housekeeper: for destructors, which have no CPU of their own. Waits for
    /// others who do the same; `act` must not come back here.
    pub fn as_housekeeper<R>(machine: &Shared<Machine<H>>, act: impl FnOnce(&Self) -> R) -> R {
        let id = machine.housekeeper.lock();
        let cpu = Self {
            machine: machine.clone(),
            id: *id,
            owned: false,
            images: Covered::new(),
            notes: Covered::new(),
            recent: Recent::new(),
            not_sync: PhantomData,
        };
        act(&cpu)
    }

    /// Which CPU this is.
    #[inline]
    pub fn id(&self) -> CpuId {
        self.id
    }

    /// The machine it belongs to.
    #[inline]
    pub fn machine(&self) -> &Shared<Machine<H>> {
        &self.machine
    }

    /// This CPU in the machine's epoch.
    #[inline]
    pub fn participant(&self) -> Participant<'_> {
        // SAFETY: the id was registered for this value alone (or is the housekeeper's, under its lock), and
        // being `!Sync` this value has one user at a time.
        unsafe { self.machine.epoch.participant(self.id) }
    }

    /// What its last fault found: for `Mm` alone, which keeps VMAs there.
    #[inline]
    pub(crate) fn recent(&self) -> &Recent {
        &self.recent
    }

    /// Pins this CPU; see [`Epoch`]. Not while it is pinned already.
    #[inline]
    pub fn pin(&self) -> Pin<'_> {
        self.participant().pin()
    }

    /// Counts what a host counts ([`Tlb`](crate::host::Tlb)): `nr_tlb_remote_flush_received`, `nr_tlb_local_flush_all`,
    /// `nr_tlb_local_flush_one`. A plain store to the CPU's own counters, in any state, pinned or not. Other counters
    /// are the library's.
    #[inline]
    pub fn count(&self, counter: Counter, n: u64) {
        self.machine.stats.add_unpinned(self.id, counter, n);
    }

    /// Locks `range` of a space of this machine. Blocks; not while pinned, nor while holding another range of that space. A
    /// call holds at most four ranges at a time.
    #[inline]
    pub(crate) fn lock_range<'a>(&'a self, lock: &'a RangeLock, range: AddrRange, mode: Mode) -> Held<'a, H> {
        let [node] = self.range_nodes();
        // SAFETY: the nodes of a CPU are for who acts as that CPU, which is one at a time; and a space, with its range
        // locks, keeps its machine.
        unsafe { lock.lock(&self.machine.host, self.id, node, range, mode) }
    }

    /// The same if that takes no waiting; see [`RangeLock::lock_at_once`]. May be called while pinned.
    #[inline]
    pub(crate) fn lock_range_at_once<'a>(
        &'a self,
        lock: &'a RangeLock,
        range: AddrRange,
        mode: Mode,
    ) -> Option<Held<'a, H>> {
        let [node] = self.range_nodes();
        // SAFETY: as above.
        unsafe { lock.lock_at_once(&self.machine.host, self.id, node, range, mode) }
    }

    /// Locks two disjoint ranges of a space of this machine, as [`lock_range`](Self::lock_range) does one: for moving a mapping.
    pub(crate) fn lock_ranges<'a>(
        &'a self,
        lock: &'a RangeLock,
        ranges: [AddrRange; 2],
        mode: Mode,
    ) -> [Held<'a, H>; 2] {
        // SAFETY: as above.
        unsafe { lock.lock_both(&self.machine.host, self.id, self.range_nodes(), ranges, mode) }
    }

    /// Nodes of this CPU that are free. There are always: only this CPU uses them, and no call holds more.
    #[inline]
    fn range_nodes<const N: usize>(&self) -> [&Node; N] {
        let nodes = &self.machine.range_nodes[self.id.index()];
        let mut free = nodes.iter().filter(|node| !node.is_busy());
        core::array::from_fn(|_| {
            loop {
                if let Some(node) = free.next() {
                    break node;
                }
                // As with any lock that is taken once too often: it waits for itself.
                debug_assert!(false, "a call holds more ranges than it has places for");
                self.machine.host.relax(self.id, u32::MAX);
            }
        })
    }

    /// The ranges whose images this CPU has written for the listing under way.
    #[inline]
    pub(crate) fn images(&self) -> &Covered {
        &self.images
    }

    /// The records that it has noted for it.
    #[inline]
    pub(crate) fn notes(&self) -> &Covered {
        &self.notes
    }

    /// Frees what this CPU gave up and nobody uses any more, if enough has come together. Not while pinned.
    #[inline]
    pub fn tidy(&self) {
        self.participant().collect();
        // A look without the pin: the queue is ours, unless another CPU drains it this very moment.
        if self.machine.frames.deferred(self.id) > 0 {
            let pin = self.pin();
            self.settle_pinned(&pin);
        }
    }

    /// Waits until no store through a translation that `ticket`'s shoot-down (this CPU's) took away can land any more: for
    /// pages that stay in use but must stand still. Not while pinned.
    pub fn await_stores(&self, ticket: Ticket) {
        let host = self.machine.host();
        let under_way = ticket != Ticket::PASSED && !host.has_passed(self.id, ticket);
        if mutant!("stores_not_awaited", under_way, false) {
            host.settle(self.id, ticket);
        }
    }

    /// Frees deferred frames of the pinned CPU (this one or an idle one) whose grace is over.
    fn settle_pinned(&self, pin: &Pin<'_>) -> usize {
        let machine = &*self.machine;
        let freed = machine.frames.settle(pin, &|cpu, ticket| machine.host.has_passed(cpu, ticket));
        freed + machine.ram(pin).settle_late()
    }

    /// For when memory is short: frees what can be freed, reclaims pages ([`reclaim`]), and while frames are
    /// on their way back (their shoot-down has not passed, a CPU that was interrupted while pinned holds the epoch, another
    /// CPU reclaims) waits for the first of them, for a bounded time. False when nothing came back, nor has come free since this CPU found none. May read and write files
    /// and swap. Not while pinned, nor with a lock of the reverse mapping held.
    pub fn find_memory(&self) -> bool {
        /// Rounds of [`Wait::relax`](crate::host::Wait::relax): with threads for CPUs, as many turns of the others.
        const ROUNDS: u32 = 10_000;
        /// Rounds after which reclaim is tried again.
        const AGAIN: u32 = 32;
        /// More frames than who asks for memory needs before it has any of them to keep.
        const PLENTY: usize = 16;
        let was_short = self.machine.frames.take_short(self.id);
        let mut busy = false;
        for round in 0..ROUNDS {
            if self.quiesce() > 0 {
                return true;
            }
            if round % AGAIN == 0 {
                let found = reclaim::find_memory(self);
                if found.freed > 0 {
                    self.quiesce();
                    return true;
                }
                busy = found.busy;
            }
            if !busy && self.machine.frames.deferred_frames() == 0 {
                // They have come free since; or they were with a CPU that was pinned, of which nobody can take any.
                let free = was_short && self.machine.frames.free_frames() > PLENTY;
                if free {
                    self.machine.host.relax(self.id, round + 100);
                }
                return free;
            }
            self.machine.host.relax(self.id, round + 100);
        }
        false
    }

    /// The same for memory of some nodes: for who may have no other. What is free elsewhere is no help; and page tables, which may
    /// be anywhere, are looked for too when nothing is.
    pub(crate) fn find_memory_on(&self, nodes: NodeMask) -> bool {
        if self.machine.frames.free_frames() == 0 {
            return self.find_memory();
        }
        if self.machine.frames.deferred_frames() > 0 && self.quiesce() > 0 {
            return true;
        }
        let found = reclaim::find_memory_on(self, nodes);
        self.quiesce();
        if found.busy {
            self.machine.host.relax(self.id, 100);
        }
        found.freed > 0 || found.busy
    }

    /// Frees everything that can be freed, also what other CPUs gave up, waiting for shoot-downs under way.
    /// For when memory is short and for counting at rest. Not while pinned. Returns how many frames and records
    /// came back.
    pub fn quiesce(&self) -> usize {
        let machine = &*self.machine;
        let mut freed = 0;
        // Three rounds: what is retired in one (a destructor gives up more) is freed in the next.
        for _ in 0..3 {
            for index in 0..machine.epoch.used() {
                let id = CpuId(index as u32);
                freed += self.participant().collect_from(id);
                let waiting: [Option<Ticket>; 2] = {
                    let Some(pin) = machine.epoch.try_pin_other(id) else { continue };
                    freed += self.settle_pinned(&pin);
                    let oldest = machine.frames.oldest_deferred(&pin).map(|grace| grace.ticket);
                    [oldest, machine.frames.last_late(&pin)]
                };
                if waiting.iter().any(Option::is_some) {
                    waiting.into_iter().flatten().for_each(|ticket| machine.host.settle(id, ticket));
                    machine.epoch.try_advance();
                    machine.epoch.try_advance();
                    if let Some(pin) = machine.epoch.try_pin_other(id) {
                        freed += self.settle_pinned(&pin);
                    }
                }
            }
        }
        freed
    }
}

impl<H: Host> Drop for Cpu<H> {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        // All of it: a retired VMA may own an object, and an object its machine, which would never go.
        self.participant().collect_all();
        {
            let pin = self.pin();
            self.settle_pinned(&pin);
            self.machine.frames.drain_cpu(&pin);
            self.machine.records.drain_cpu(&pin);
        }
        // SAFETY: registered by `try_new` for this value, which ends here.
        unsafe { self.machine.epoch.unregister(self.id) };
    }
}

describe!([H: Host] Machine<H> { epoch, frames, stats, records, leaves, range_nodes, swap, reclaim, commit, housekeeper });
