//! Range locks: calls on disjoint ranges of one space never wait for each other.
//!
//! # What it guarantees
//!
//! 1. **Exclusion.** Two that hold overlapping ranges at the same time both hold them shared.
//! 2. **Order.** Of two that conflict and are of the same kind (both within one zone, or both wide), the one that came first
//!    goes first. None waits for ever while holders let go.
//! 3. **Nothing shared.** The space is divided into *zones*. Locking a range within one zone and letting it go writes the line of
//!    that zone's *bucket*, the CPU's own node, and nothing else; so CPUs at work in different zones share no line
//!    ([`RangeLock::zone_len`]: make the areas of CPUs multiples of it). Two compare-and-swaps, no allocation.
//!
//! # How
//!
//! A bucket is a spin lock and a list of nodes in the order of arrival, holders and waiters together. A node is granted
//! when no earlier node of the list conflicts with it. Whoever leaves takes its node out and grants those that
//! have become free; waiters sleep on the word of their own node.
//!
//! A range that spans zones is *wide*. It registers in a list of its own, where it waits for the earlier wide ones that conflict;
//! *announces* itself by a bit for each bucket that its zones are in; and then goes through those buckets and waits until no
//! node conflicts that is there. A narrow one looks at the bit of its bucket under the spin lock of the bucket. If
//! it is set, it turns to the list of wide ones. If none of them conflicts, it registers in its bucket all the same, else it
//! queues among them; whoever lets it go moves it from there to its bucket.
//!
//! # Why it is right
//!
//! *Two narrow ones* that overlap are in the same zone, so in the same bucket, and the later one sees the earlier. *Two wide ones*
//! likewise, in their list. *A wide and a narrow one*: the wide one announces itself, then locks the bucket; the narrow one
//! looks and registers under that same lock. If it was there first, the wide one finds its node, and waits.
//! If it comes after, the lock makes the announcement visible to it, and it looks in the list of wide
//! ones under their lock: a wide one that conflicts is there until it lets go. No fence is needed, for the lock of the bucket
//! is one. (If the bit is gone because the wide one has let go, the narrow one has not met it under any lock: the release of
//! that store, and the acquire of this load, are what orders the one behind the other.) A narrow one that
//! queues among the wide is moved under both locks, so it is always in one of the lists, and a wide one behind it waits for it
//! first in the one, then in the other.
//!
//! *No circle.* A node in a bucket waits for earlier nodes of that bucket only. A wide one waits for earlier ones in its list and for nodes in
//! buckets. A narrow one among the wide waits for earlier wide ones. So whoever came first in a bucket holds; who is
//! behind waits for a finite number that does not grow: once a wide one is announced, no narrow one that conflicts
//! gets into a bucket before it, and a narrow one in the list is passed by nobody that is wide.
//! (A narrow one may pass a narrow one that queues in the list: they meet in the bucket, in the order in which they
//! get there.)
//!
//! *No lost wake-up.* Granting is decided under the lock of the list and told by the word of the node, which goes from
//! waiting to granted once; the sleeper's wait compares the word. The node may be used anew as soon as its owner has
//! seen it: a late wake-up then reaches a waiter that looks again. A wide one that finds a node in its
//! way says so in the bucket (`watched`) and notes the bucket's event counter, both under the bucket's lock; whoever leaves the bucket later
//! moves the counter.
//!
//! # Changes in one step
//!
//! A change that is one step under the lock of one leaf of the index, and has nothing to do after it, need not hold its range: it
//! looks whether anybody else does ([`RangeLock::is_quiet`]), and if so goes the long way. Dekker's pattern:
//!
//! | step | holder |
//! |---|---|
//! | locks the leaf, makes the counters of the records it changes odd | takes the lock of its bucket, announces itself if it is wide |
//! | full fence | full fence |
//! | looks at the bucket and at what is announced | looks at leaves and records |
//!
//! Either the step sees the holder; or the holder, who looks at nothing before it has registered, finds the leaf locked or the
//! counter odd and waits for the end of the step, or sees what became of it. The fence of the holder is the compare-and-swap on the
//! lock of the bucket. (A wide one takes those locks after it has announced itself.) So the step looks whether that lock is
//! free, and only then at the number of members, which is stored before it is given back. Two steps
//! about the same addresses meet in the leaf.
//!
//! # The order of locks
//!
//! A range lock comes before mapping locks of objects, locks of anon_vma trees, leaf locks of the index, and pins.
//!
//! Who holds a range of a space does not *wait* for another of the same space, not even one further up: a third may queue
//! for both, behind the one that is held and in front of the one that is asked for. [`RangeLock::lock_both`] takes two
//! by waiting for one and trying the other; [`RangeLock::try_lock`] never waits. A range of a space that nobody else knows
//! yet (a fork's child) may be locked beside any other.
//!
//! # Who may break it
//!
//! Whoever locks while pinned ([`RangeLock::lock_at_once`] does not wait, and may be asked); whoever waits for a range while it holds another; whoever forgets a [`Held`] (its range stays locked).
//!
//! # Source
//!
//! J. Kara, "Range locks" (2013), and D. Bueso, "locking: range lock" (2017, patches for Linux), for the one list of
//! holders and waiters in order of arrival; A. Kogan, D. Dice, S. Issa, "Scalable range locks for scalable address spaces
//! and beyond" (EuroSys 2020), for the remark that one tree under one spin lock does not scale. Theirs is one lock-free
//! list; every lock walks it and, where CPUs work side by side, writes what others read. The zones are ours: areas of
//! CPUs lie apart, so lists by area have nothing in common.

mod held;
mod list;
mod node;
describe!([] RangeLock { buckets, announced, wide });
describe!([] Bucket { nodes, event, members });
describe!([] Wide { nodes });

#[cfg(test)]
mod tests;

pub use held::Held;
pub use node::Node;

use crate::addr::AddrRange;
use crate::error::OutOfMemory;
use crate::host::Wait;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence_behind_locked};
use crate::sync::spin::RawSpin;
use crate::sync::{CpuId, SpinLock};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ops::{Deref, DerefMut};
use crossbeam_utils::CachePadded;
use list::{List, Told};
use node::LOOKS;

/// A list that is locked.
type Locked<'a> = lock_api::MutexGuard<'a, RawSpin, List>;

/// The list of a bucket, locked.
struct InBucket<'a> {
    nodes: Locked<'a>,
    bucket: &'a Bucket,
}

impl Deref for InBucket<'_> {
    type Target = List;

    #[inline]
    fn deref(&self) -> &List {
        &self.nodes
    }
}

impl DerefMut for InBucket<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut List {
        &mut self.nodes
    }
}

impl Drop for InBucket<'_> {
    #[inline]
    fn drop(&mut self) {
        // Before the lock is given back: see `RangeLock::is_quiet`. Who reads that nobody is left sees what they did.
        let order = mutant!("range_left_relaxed", Ordering::Release, Ordering::Relaxed);
        self.bucket.members.store(self.nodes.len(), order);
    }
}

/// Who else may hold an overlapping range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Others that hold it shared.
    Shared,
    /// Nobody.
    Exclusive,
}

/// The narrow ones of some zones.
struct Bucket {
    nodes: SpinLock<List>,
    /// Moves when a node leaves while a wide one watches.
    event: AtomicU32,
    /// How many nodes there are, for those who do not take the lock; stored before it is given back.
    members: AtomicU32,
}

impl Bucket {
    fn new() -> Self {
        Self { nodes: SpinLock::new(List::new()), event: AtomicU32::new(0), members: AtomicU32::new(0) }
    }
}

/// The wide ones, and narrow ones that wait for them.
struct Wide {
    nodes: SpinLock<List>,
}

/// The range locks of one address space.
pub struct RangeLock {
    /// A power of two of them, at most 64. 128 bytes each, so a space has them for the CPUs there are, and not for those there
    /// might be: 2 KiB on a machine with 8.
    buckets: Box<[CachePadded<Bucket>]>,
    /// Bits of an address below the number of its zone.
    zone_shift: u32,
    /// The buckets that wide ones have announced themselves for, as bits. Written under the lock of `wide` only.
    announced: CachePadded<AtomicU64>,
    wide: CachePadded<Wide>,
}

/// Zones are no smaller: 2 MiB.
const MIN_ZONE_SHIFT: u32 = 21;
/// And no larger: 4 GiB.
const MAX_ZONE_SHIFT: u32 = 32;
/// Zones in a space that is smaller than that many of the largest.
const ZONES: u64 = 1 << 10;

impl RangeLock {
    /// The locks of a space in `limits`, on a machine of `cpus` CPUs.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_new(limits: AddrRange, cpus: usize) -> Result<Self, OutOfMemory> {
        let count = cpus.saturating_mul(2).clamp(4, 64).next_power_of_two();
        let zone_shift = (limits.end / ZONES).max(1).ilog2().clamp(MIN_ZONE_SHIFT, MAX_ZONE_SHIFT);
        let mut buckets = Vec::new();
        buckets.try_reserve_exact(count).map_err(|_| OutOfMemory)?;
        buckets.resize_with(count, || CachePadded::new(Bucket::new()));
        Ok(Self {
            buckets: buckets.into_boxed_slice(),
            zone_shift,
            announced: CachePadded::new(AtomicU64::new(0)),
            wide: CachePadded::new(Wide { nodes: SpinLock::new(List::new()) }),
        })
    }

    /// Bytes in a zone, a power of two; zones are aligned to it. Ranges in different zones, as a rule, share no line; those of
    /// up to as many consecutive zones as there are buckets never do.
    pub fn zone_len(&self) -> u64 {
        1 << self.zone_shift
    }

    /// Locks `range`. Blocks on the node's own word while one that conflicts holds it or waits in front; not to be called
    /// while pinned. `cpu` is the calling CPU.
    ///
    /// # Safety
    /// Until the result is dropped, nobody else uses `node` and it is not freed; nor before the lock itself is.
    #[inline]
    pub unsafe fn lock<'a, W: Wait>(
        &'a self,
        wait: &'a W,
        cpu: CpuId,
        node: &'a Node,
        range: AddrRange,
        mode: Mode,
    ) -> Held<'a, W> {
        let (caller, bucket) = (Caller { wait, cpu }, self.prepare(node, range, mode));
        let waited = match bucket {
            Some(bucket) => self.lock_narrow(caller, node, bucket),
            None => self.lock_wide(caller, node),
        };
        Held { lock: self, node, caller, waited }
    }

    /// Locks `range` if nobody that conflicts holds it or waits for it.
    ///
    /// # Safety
    /// As for [`lock`](Self::lock).
    pub unsafe fn try_lock<'a, W: Wait>(
        &'a self,
        wait: &'a W,
        cpu: CpuId,
        node: &'a Node,
        range: AddrRange,
        mode: Mode,
    ) -> Option<Held<'a, W>> {
        let (caller, bucket) = (Caller { wait, cpu }, self.prepare(node, range, mode));
        let locked = match bucket {
            Some(bucket) => self.try_lock_narrow(caller, node, bucket),
            None => self.try_lock_wide(caller, node),
        };
        self.held_if(locked, caller, node)
    }

    /// Locks `range` if it lies within one zone and nothing is in the way, not even a wide range elsewhere in the zone. Never
    /// waits but for the spin lock of the bucket, so it may be called while pinned. `None` says nothing: ask
    /// [`lock`](Self::lock) then.
    ///
    /// # Safety
    /// As for [`lock`](Self::lock).
    #[inline]
    pub unsafe fn lock_at_once<'a, W: Wait>(
        &'a self,
        wait: &'a W,
        cpu: CpuId,
        node: &'a Node,
        range: AddrRange,
        mode: Mode,
    ) -> Option<Held<'a, W>> {
        let caller = Caller { wait, cpu };
        self.bucket_of(range)?;
        let bucket = self.prepare(node, range, mode)?;
        let locked = {
            let mut nodes = caller.enter_bucket_to_hold(&self.buckets[bucket]);
            // Under the lock of the bucket: see the head.
            self.announced.load(Ordering::Acquire) & (1 << bucket) == 0
                && !nodes.blocks(node)
                && nodes.append(node)
        };
        self.held_if(locked, caller, node)
    }

    /// Makes `node` ready for the list that it is for: that of a bucket, which is returned, or that of the wide ones.
    #[inline]
    fn prepare(&self, node: &Node, range: AddrRange, mode: Mode) -> Option<usize> {
        let bucket = self.bucket_of(range);
        node.prepare(range, mode, bucket.is_none());
        bucket
    }

    /// What became of an attempt that did not wait; a node that was not `locked` is in no list, and given back.
    #[inline]
    fn held_if<'a, W: Wait>(
        &'a self,
        locked: bool,
        caller: Caller<'a, W>,
        node: &'a Node,
    ) -> Option<Held<'a, W>> {
        if !locked {
            node.release();
            return None;
        }
        Some(Held { lock: self, node, caller, waited: false })
    }

    /// True when no range in the zone of `range`, which must lie in one, is held or waited for, and no wide one is about it: then a
    /// change that is one step goes without holding it; see the head. Behind a full fence that follows the first store of
    /// the step. Writes nothing.
    #[inline]
    pub fn is_quiet(&self, range: AddrRange) -> bool {
        let Some(at) = self.bucket_of(range) else { return false };
        let bucket = &self.buckets[at];
        // The lock first: who finds it free finds the number of those that have taken it.
        let quiet = !bucket.nodes.is_locked()
            && bucket.members.load(Ordering::Acquire) == 0
            && self.announced.load(Ordering::Acquire) & (1 << at) == 0;
        mutant!("range_always_quiet", quiet, true)
    }

    /// Locks two disjoint ranges, for a move: waits for one, holding nothing, and tries the other, beginning with the lower; if
    /// that fails, the other way round. So two that want the same two meet at the lower, and whoever is in the way
    /// of one gets on.
    ///
    /// # Safety
    /// As for [`lock`](Self::lock), of two nodes.
    pub unsafe fn lock_both<'a, W: Wait>(
        &'a self,
        wait: &'a W,
        cpu: CpuId,
        nodes: [&'a Node; 2],
        ranges: [AddrRange; 2],
        mode: Mode,
    ) -> [Held<'a, W>; 2] {
        debug_assert!(!ranges[0].overlaps(ranges[1]), "a range that is in its own way");
        let mut first = usize::from(ranges[1].start < ranges[0].start);
        loop {
            let second = 1 - first;
            // SAFETY: the caller's promise, for both.
            let (held, other) = unsafe {
                let held = self.lock(wait, cpu, nodes[first], ranges[first], mode);
                (held, self.try_lock(wait, cpu, nodes[second], ranges[second], mode))
            };
            match other {
                Some(other) if first == 0 => return [held, other],
                Some(other) => return [other, held],
                None => first = second,
            }
        }
    }

    /// Waits until no exclusive holder is left that may change the layout without knowing of `moment`: those that held
    /// their range before the call and have neither committed, nor said that they know of it, nor let go. Whoever gets a range
    /// later sees what the caller wrote before the call. Moments are numbers from 1 that rise.
    pub fn await_aware<W: Wait>(&self, wait: &W, cpu: CpuId, moment: u64) {
        let caller = Caller { wait, cpu };
        let lists = self.buckets.iter().map(|bucket| &bucket.nodes).chain([&self.wide.nodes]);
        // First all, then wait: while one is waited for, others get on.
        lists.clone().for_each(|nodes| caller.enter(nodes).note(moment));
        for nodes in lists {
            let mut rounds = 0;
            while caller.enter(nodes).iter().any(|node| node.is_unaware_of(moment)) {
                wait.relax(cpu, rounds);
                rounds = rounds.saturating_add(1);
            }
        }
    }

    /// Which bucket the zone is in. Sums of the digits: consecutive zones, and zones a power of two apart, take turns.
    #[inline]
    fn bucket_of_zone(&self, zone: u64) -> usize {
        let bits = self.buckets.len().trailing_zeros();
        (zone + (zone >> bits) + (zone >> (2 * bits))) as usize & (self.buckets.len() - 1)
    }

    /// The first and the last zone of `range`.
    #[inline]
    fn zones_of(&self, range: AddrRange) -> (u64, u64) {
        let last = range.end.saturating_sub(1).max(range.start);
        (range.start >> self.zone_shift, last >> self.zone_shift)
    }

    /// The bucket of a range within one zone.
    #[inline]
    fn bucket_of(&self, range: AddrRange) -> Option<usize> {
        let (first, last) = self.zones_of(range);
        (first == last).then(|| self.bucket_of_zone(first))
    }

    /// The buckets of a wide range, as bits.
    fn buckets_of(&self, range: AddrRange) -> u64 {
        let (first, last) = self.zones_of(range);
        if last - first >= self.buckets.len() as u64 {
            return u64::MAX >> (64 - self.buckets.len());
        }
        (first..=last).fold(0, |bits, zone| bits | 1 << self.bucket_of_zone(zone))
    }

    /// Registers in the bucket and returns whether the range is granted; `None`, and nothing done, if a wide one is
    /// announced for the bucket.
    #[inline]
    fn register<W: Wait>(&self, caller: Caller<'_, W>, node: &Node, bucket: usize) -> Option<bool> {
        let mut nodes = caller.enter_bucket_to_hold(&self.buckets[bucket]);
        // Under the lock of the bucket: see the head.
        if self.announced.load(Ordering::Acquire) & (1 << bucket) != 0 {
            return None;
        }
        Some(nodes.append(node))
    }

    /// The same while wide ones are announced: among them if one conflicts, else in the bucket.
    #[cold]
    fn register_beside_wide<W: Wait>(&self, caller: Caller<'_, W>, node: &Node, bucket: usize) -> bool {
        let mut wide = caller.enter(&self.wide.nodes);
        if wide.wide_blocks(node) {
            wide.append(node)
        } else {
            caller.enter_bucket_to_hold(&self.buckets[bucket]).append(node)
        }
    }

    /// Returns whether it waited.
    #[inline]
    fn lock_narrow<W: Wait>(&self, caller: Caller<'_, W>, node: &Node, bucket: usize) -> bool {
        let granted = match self.register(caller, node, bucket) {
            Some(granted) => granted,
            None => self.register_beside_wide(caller, node, bucket),
        };
        if !granted {
            node.await_turn(caller.wait, caller.cpu);
        }
        !granted
    }

    fn try_lock_narrow<W: Wait>(&self, caller: Caller<'_, W>, node: &Node, bucket: usize) -> bool {
        // With the lock of the wide ones, so that none comes in between; this is not the path that must share nothing.
        let wide = caller.enter(&self.wide.nodes);
        let mut nodes = caller.enter_bucket_to_hold(&self.buckets[bucket]);
        !wide.wide_blocks(node) && !nodes.blocks(node) && nodes.append(node)
    }

    fn unlock_narrow<W: Wait>(&self, caller: Caller<'_, W>, node: &Node) {
        let bucket = &self.buckets[self.bucket_of_zone(node.range().start >> self.zone_shift)];
        let mut told = Told::new();
        let watched = {
            let mut nodes = caller.enter_bucket(bucket);
            nodes.unlink(node);
            if nodes.has_waiting() {
                while let Some(next) = nodes.next_free() {
                    nodes.grant(next);
                    told.add(next);
                }
            }
            let watched = nodes.stop_watch();
            if mutant!("range_no_event", watched, false) {
                bucket.event.store(bucket.event.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
            }
            watched
        };
        told.tell(caller.wait);
        if watched {
            caller.wait.wake_all(&bucket.event);
        }
    }

    /// Returns whether it waited.
    #[cold]
    fn lock_wide<W: Wait>(&self, caller: Caller<'_, W>, node: &Node) -> bool {
        let granted = {
            let mut wide = caller.enter(&self.wide.nodes);
            let granted = wide.append(node);
            self.announce(&wide);
            granted
        };
        if !granted {
            node.await_turn(caller.wait, caller.cpu);
        }
        let waited = self.await_narrow(caller, node);
        self.hold_wide(caller, node);
        !granted || waited
    }

    fn try_lock_wide<W: Wait>(&self, caller: Caller<'_, W>, node: &Node) -> bool {
        {
            let mut wide = caller.enter(&self.wide.nodes);
            if wide.blocks(node) {
                return false;
            }
            wide.append(node);
            self.announce(&wide);
        }
        let mut buckets = self.buckets.iter().enumerate().filter(|(at, _)| self.is_in(node, *at));
        if buckets.any(|(_, bucket)| caller.enter_bucket_to_hold(bucket).blocks(node)) {
            self.unlock_wide(caller, node);
            return false;
        }
        self.hold_wide(caller, node);
        true
    }

    /// For those who ask who holds what, under the lock as everything in a node.
    fn hold_wide<W: Wait>(&self, caller: Caller<'_, W>, node: &Node) {
        caller.enter(&self.wide.nodes).complete(node);
    }

    /// Publishes which buckets the wide ones are about.
    fn announce(&self, wide: &List) {
        let members = wide.iter().filter(|member| member.is_wide());
        let buckets = members.fold(0, |bits, member| bits | self.buckets_of(member.range()));
        // Whoever locks one of the buckets after one of the wide ones did sees a bit that is set: see the head. Whoever sees
        // one that is gone sees what the wide one did while it held its range: that is what the release is for.
        let order = mutant!("range_announced_relaxed", Ordering::Release, Ordering::Relaxed);
        self.announced.store(mutant!("range_not_announced", buckets, 0), order);
    }

    /// True when zones of the wide `node` are in the bucket.
    fn is_in(&self, node: &Node, bucket: usize) -> bool {
        self.buckets_of(node.range()) & (1 << bucket) != 0
    }

    /// Waits until no node that conflicts is left in the buckets of a wide one that is announced, and first among the wide.
    fn await_narrow<W: Wait>(&self, caller: Caller<'_, W>, node: &Node) -> bool {
        let mut waited = false;
        let buckets = self.buckets_of(node.range());
        for (_, bucket) in self.buckets.iter().enumerate().filter(|(at, _)| buckets & (1 << at) != 0) {
            while let Some(event) = self.watch(caller, node, bucket) {
                waited = true;
                let mut looks = 0;
                while looks < LOOKS && bucket.event.load(Ordering::Acquire) == event {
                    caller.wait.relax(caller.cpu, looks);
                    looks += 1;
                }
                caller.wait.wait(caller.cpu, &bucket.event, event);
            }
        }
        waited
    }

    /// If a node in the bucket conflicts, asks to be woken when one leaves: the value of the event counter that it will then
    /// no longer have.
    fn watch<W: Wait>(&self, caller: Caller<'_, W>, node: &Node, bucket: &Bucket) -> Option<u32> {
        let mut nodes = caller.enter_bucket_to_hold(bucket);
        if !mutant!("range_wide_looks_nowhere", nodes.blocks(node), false) {
            return None;
        }
        nodes.start_watch();
        Some(bucket.event.load(Ordering::Relaxed))
    }

    #[cold]
    fn unlock_wide<W: Wait>(&self, caller: Caller<'_, W>, node: &Node) {
        let mut told = Told::new();
        {
            let mut wide = caller.enter(&self.wide.nodes);
            wide.unlink(node);
            self.announce(&wide);
            while let Some(next) = wide.next_free() {
                if next.is_wide() {
                    wide.grant(next);
                    told.add(next);
                } else {
                    // In the order of the list, so that those who queued together stay in their order.
                    wide.unlink(next);
                    let bucket = self.bucket_of_zone(next.range().start >> self.zone_shift);
                    if caller.enter_bucket_to_hold(&self.buckets[bucket]).append(next) {
                        told.add(next);
                    }
                }
            }
        }
        told.tell(caller.wait);
    }
}

/// Who calls: needed wherever something may have to be waited for.
struct Caller<'a, W: Wait> {
    wait: &'a W,
    cpu: CpuId,
}

impl<W: Wait> Clone for Caller<'_, W> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<W: Wait> Copy for Caller<'_, W> {}

impl<W: Wait> Caller<'_, W> {
    /// Takes the lock of a bucket, to let go of a range.
    #[inline]
    fn enter_bucket<'l>(&self, bucket: &'l Bucket) -> InBucket<'l> {
        InBucket { nodes: self.enter(&bucket.nodes), bucket }
    }

    /// The same, to get one. What follows is behind a full fence: see `RangeLock::is_quiet`.
    #[inline]
    fn enter_bucket_to_hold<'l>(&self, bucket: &'l Bucket) -> InBucket<'l> {
        let nodes = self.enter_bucket(bucket);
        mutant!("range_registered_unordered", fence_behind_locked(), ());
        nodes
    }

    /// Takes a spin lock, letting others run if its holder does not.
    #[inline]
    fn enter<'l>(&self, nodes: &'l SpinLock<List>) -> Locked<'l> {
        let mut rounds = 0;
        loop {
            if let Some(guard) = nodes.try_lock() {
                return guard;
            }
            while nodes.is_locked() {
                self.wait.relax(self.cpu, rounds);
                rounds = rounds.saturating_add(1);
            }
        }
    }
}
