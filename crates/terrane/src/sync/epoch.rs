//! Pins: readers without locks, reclamation behind them, and the private state of each CPU.
//!
//! # What it guarantees
//!
//! 1. **Reclamation.** What was reachable when a [`Pin`] was made, or becomes reachable while it lasts, is not
//!    freed before the pin ends, if it is given up through [`Participant::retire`] after having been unlinked.
//! 2. **Ownership.** At most one pin of a CPU exists at a time. State that belongs to a CPU (frame caches, free
//!    lists, retired objects) is used only under a pin of that CPU, so it needs no lock of its own; and another
//!    CPU may take it over for a moment with [`Epoch::try_pin_other`], say to drain its caches when memory is
//!    short.
//! 3. **No shared writes.** Pinning writes the CPU's own word and reads the global epoch. Only
//!    [`Participant::collect`], which layout changes call and faults do not, ever writes the global epoch.
//!
//! # How
//!
//! Each CPU has a word: 0 when idle, else the epoch at which it pinned. Pinning is one compare-and-swap from 0:
//! it announces the epoch, it is (on x86; elsewhere a fence follows) the full fence that epoch reclamation needs
//! between the announcement and the first read, and it is the lock of the private state. One instruction, three
//! duties: a separate lock for the frame cache would cost a fault another 8 ns (Zen 3).
//!
//! The global epoch moves from `e` to `e + 1` only when no word holds an epoch other than `e`. An object retired
//! at epoch `r` is freed at `r + 2`. `r` is read when objects are collected, under a pin of its own, whose full fence is behind
//! the unlinking of all that was retired since. (A fence for each object took 8 ns of a map and unmap.) A reader that pinned at `e` keeps the epoch at `e + 1` or below. A reader may
//! announce an epoch that is already old: it then blocks every advance until it ends, which is safe, because
//! whatever was freed before its announcement was unlinked before, and its reads come after.
//!
//! # Who may break it
//!
//! Whoever keeps a reference beyond its pin; whoever retires an object that can still be reached; whoever pins
//! the same CPU twice on one thread (that would wait for itself: calls pin once and pass the [`Pin`] down);
//! whoever blocks, or waits for another CPU, while pinned.
//!
//! # Source
//!
//! K. Fraser, "Practical lock freedom" (2004). `crossbeam-epoch` does the same and was the first choice; three
//! things ruled it out: every 128th pin may write its global epoch (a fault would write a line that others read,
//! requirement A3 of the promise), deferring allocates and so can abort, and it gives no hold on another
//! CPU's private state.

use super::atomic::{
    AtomicBool, AtomicU64, AtomicUsize, Ordering, fence, fence_behind_locked, note_write, spin_loop,
};
use crate::error::OutOfMemory;
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::cell::Cell;
use core::marker::PhantomData;
use core::ptr::{self, NonNull};
use crossbeam_utils::CachePadded;

/// Which CPU: an index below the number of CPUs that the machine was made for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct CpuId(pub u32);

impl CpuId {
    /// As an index into per-CPU tables.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Retired objects that come together on a CPU before it looks which can be freed, and advances the epoch if none can. Small, as
/// their lines go out of the caches meanwhile; not smaller, as an advance takes a line from each CPU that is at work.
const COLLECT_AT: usize = 32;
/// How many more before it tries again, when another CPU was pinned too long ago. That is common where others are at work: a try for
/// each call until one succeeded made two CPUs that protect pages beside each other 40 % slower than two in machines of their own.
const COLLECT_AGAIN: usize = 8;

/// In an object whose stamp is that of one behind it in the queue, or that has none yet. Epochs begin at 1.
const UNSTAMPED: u64 = 0;

/// The part of a retired object that the epoch works with; embed it in whatever is to be retired.
#[derive(Debug)]
pub struct RetireLink {
    next: Cell<*mut RetireLink>,
    stamp: Cell<u64>,
    free: Cell<Option<FreeFn>>,
}

/// Frees a retired object: gets the link that was retired, and the CPU that frees it (not pinned).
pub type FreeFn = unsafe fn(NonNull<RetireLink>, &mut Freeing<'_>);

impl RetireLink {
    /// A link of an object that is in use.
    #[inline]
    pub const fn new() -> Self {
        Self { next: Cell::new(ptr::null_mut()), stamp: Cell::new(0), free: Cell::new(None) }
    }
}

impl Default for RetireLink {
    fn default() -> Self {
        Self::new()
    }
}

/// A CPU's announcement and its retired objects.
struct Slot {
    /// 0, or `epoch << 1 | 1`.
    word: AtomicU64,
    taken: AtomicBool,
    // Owner-only (under a pin): a queue of retired objects in the order of their stamps.
    head: Cell<*mut RetireLink>,
    tail: Cell<*mut RetireLink>,
    /// The first of those that have no stamp yet, which are the last of the queue; null when all have one.
    fresh: Cell<*mut RetireLink>,
    retired: Cell<usize>,
    /// How many retired objects are to be looked at.
    due: Cell<usize>,
}

// SAFETY: the cells are used only by the holder of the slot's pin (guarantee 2), which compare-and-swap with
// acquire and release order hands from one thread to the next.
unsafe impl Sync for Slot {}
// SAFETY: as above; the retired objects belong to no thread.
unsafe impl Send for Slot {}

/// The epoch of one machine and the slots of its CPUs.
pub struct Epoch {
    global: CachePadded<AtomicU64>,
    /// Slots below this index have been used; the others need no look.
    used: CachePadded<AtomicUsize>,
    slots: Box<[CachePadded<Slot>]>,
}

impl Epoch {
    /// An epoch for at most `cpus` CPUs at a time.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_new(cpus: usize) -> Result<Self, OutOfMemory> {
        let mut slots = Vec::new();
        slots.try_reserve_exact(cpus).map_err(|_| OutOfMemory)?;
        slots.extend((0..cpus).map(|_| {
            CachePadded::new(Slot {
                word: AtomicU64::new(0),
                taken: AtomicBool::new(false),
                head: Cell::new(ptr::null_mut()),
                tail: Cell::new(ptr::null_mut()),
                fresh: Cell::new(ptr::null_mut()),
                retired: Cell::new(0),
                due: Cell::new(COLLECT_AT),
            })
        }));
        Ok(Self {
            global: CachePadded::new(AtomicU64::new(1)),
            used: CachePadded::new(AtomicUsize::new(0)),
            slots: slots.into_boxed_slice(),
        })
    }

    /// CPUs that this epoch was made for.
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// CPUs that have ever been registered: ids are below this.
    #[inline]
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Acquire)
    }

    /// Registers a CPU and gives it the lowest free id, or `None` when all are taken.
    pub fn register(&self) -> Option<Participant<'_>> {
        for (index, slot) in self.slots.iter().enumerate() {
            if slot.taken.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                self.used.fetch_max(index + 1, Ordering::AcqRel);
                return Some(Participant { epoch: self, id: CpuId(index as u32), not_sync: PhantomData });
            }
        }
        None
    }

    /// Gives an id back for others to register. What the CPU retired stays queued for the next owner.
    ///
    /// # Safety
    /// `id` came from [`register`](Self::register), and whoever held it uses it no more.
    pub unsafe fn unregister(&self, id: CpuId) {
        self.slots[id.index()].taken.store(false, Ordering::Release);
    }

    /// The participant of a registered id, made anew.
    ///
    /// # Safety
    /// `id` is registered and the caller is its only user while the result lives.
    #[inline]
    pub unsafe fn participant(&self, id: CpuId) -> Participant<'_> {
        Participant { epoch: self, id, not_sync: PhantomData }
    }

    /// Takes over the private state of CPU `id` for as long as the pin lasts, if that CPU is not pinned now.
    /// The owner waits if it wants to pin meanwhile, so keep it short. Never waits itself.
    #[inline]
    pub fn try_pin_other(&self, id: CpuId) -> Option<Pin<'_>> {
        let slot = self.slots.get(id.index())?;
        let announce = self.global.load(Ordering::Relaxed) << 1 | 1;
        // Lazily: a pin made in vain would, when dropped, end the pin of the CPU's owner.
        let pin = || Pin { epoch: self, id, not_send: PhantomData };
        slot.word.compare_exchange(0, announce, Ordering::SeqCst, Ordering::Relaxed).ok()?;
        // The announcement must come before every read under the pin.
        mutant!("pin_without_fence", fence_behind_locked(), ());
        Some(pin())
    }

    /// Runs `act` pinned as some CPU that is not pinned now: for destructors that must give something back and
    /// have no CPU of their own. Waits until there is one; not while pinned.
    pub fn pin_any<R>(&self, act: impl FnOnce(&Pin<'_>) -> R) -> R {
        loop {
            // From the top: the highest ids are the least likely to be in use.
            for index in (0..self.slots.len()).rev() {
                if let Some(pin) = self.try_pin_other(CpuId(index as u32)) {
                    // Its private state is in use from now on, though nobody registered it.
                    self.used.fetch_max(index + 1, Ordering::AcqRel);
                    return act(&pin);
                }
            }
            spin_loop();
        }
    }

    /// The global epoch at this moment.
    #[inline]
    pub fn now(&self) -> u64 {
        self.global.load(Ordering::SeqCst)
    }

    /// True when whatever was unlinked before [`now`](Self::now) gave `stamp` can no longer be in use.
    #[inline]
    pub fn has_passed(&self, stamp: u64) -> bool {
        self.global.load(Ordering::Acquire) >= stamp + mutant!("grace_of_one", 2, 1)
    }

    /// Moves the global epoch on by one unless a pinned CPU still announces an older one. O(CPUs).
    pub fn try_advance(&self) -> bool {
        // Before the fence: a pin whose announcement is missed below then sees this epoch, or a later one
        // (`sync::recent` relies on that).
        let now = self.global.load(Ordering::Relaxed);
        mutant!("advance_without_fence", fence(Ordering::SeqCst), ());
        for slot in &self.slots[..self.used()] {
            // What was read under a pin that has ended was read before. Not by one fence for all: ThreadSanitizer knows none.
            let order = mutant!("advance_without_acquire", Ordering::Acquire, Ordering::Relaxed);
            let word = slot.word.load(order);
            if mutant!("advance_past_pins", word != 0 && word >> 1 != now, false) {
                return false;
            }
        }
        self.global.compare_exchange(now, now + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

impl Drop for Epoch {
    fn drop(&mut self) {
        // Nobody can be pinned any more: whoever drops the epoch owns it.
        for index in 0..self.slots.len() {
            let me = Participant { epoch: self, id: CpuId(index as u32), not_sync: PhantomData };
            me.collect_all();
        }
    }
}

/// The right to act as one CPU. Not `Sync`: one thread of execution uses it at a time.
pub struct Participant<'e> {
    epoch: &'e Epoch,
    id: CpuId,
    not_sync: PhantomData<Cell<()>>,
}

impl<'e> Participant<'e> {
    /// Which CPU this is.
    #[inline]
    pub fn id(&self) -> CpuId {
        self.id
    }

    /// The epoch it takes part in.
    #[inline]
    pub fn epoch(&self) -> &'e Epoch {
        self.epoch
    }

    /// Pins this CPU. Waits only while another CPU has taken over its state (see
    /// [`Epoch::try_pin_other`]). Must not be called while this CPU is pinned already.
    #[inline]
    pub fn pin(&self) -> Pin<'e> {
        loop {
            if let Some(pin) = self.epoch.try_pin_other(self.id) {
                return pin;
            }
            spin_loop();
        }
    }

    /// Gives up an object that has been unlinked: `free` runs when no pin can still see it. O(1), never
    /// allocates.
    ///
    /// # Safety
    /// `link` is part of an object that no new reader can reach and that stays valid until `free` is called on
    /// it, once, by [`collect`](Self::collect); `free` may run on any thread.
    #[inline]
    pub unsafe fn retire(pin: &Pin<'_>, link: NonNull<RetireLink>, free: FreeFn) {
        let slot = &pin.epoch.slots[pin.id.index()];
        // SAFETY: the caller gives the object up to this queue.
        let node = unsafe { link.as_ref() };
        note_write(node, 1);
        note_write(&slot.tail, 1);
        node.stamp.set(UNSTAMPED);
        node.free.set(Some(free));
        node.next.set(ptr::null_mut());
        if slot.tail.get().is_null() {
            slot.head.set(link.as_ptr());
        } else {
            note_write(slot.tail.get(), 1);
            // SAFETY: the tail is retired and not yet freed, and ours under the pin.
            unsafe { (*slot.tail.get()).next.set(link.as_ptr()) };
        }
        slot.tail.set(link.as_ptr());
        if mutant!("stamped_when_retired", false, true) {
            node.stamp.set(pin.epoch.global.load(Ordering::Relaxed));
        } else if slot.fresh.get().is_null() {
            slot.fresh.set(link.as_ptr());
        }
        slot.retired.set(slot.retired.get() + 1);
    }

    /// Stamps what the pinned CPU has retired since the last time, before this pin.
    fn stamp(pin: &Pin<'_>) {
        let slot = &pin.epoch.slots[pin.id.index()];
        if slot.fresh.replace(ptr::null_mut()).is_null() {
            return;
        }
        note_write(&slot.fresh, 1);
        note_write(slot.tail.get(), 1);
        // The unlinking must be ordered before the stamp is read: a stamp too old would free too early. The fence is the pin's.
        let now = pin.epoch.global.load(Ordering::Relaxed);
        // The last one's stamp is that of all since the one before that has one.
        // SAFETY: the tail is queued, as what is fresh is, so it is valid, and ours under the pin.
        unsafe { (*slot.tail.get()).stamp.set(now) };
    }

    /// Frees what this CPU retired and nobody can see any more, once enough has come together. Not to be called
    /// while pinned: destructors may pin.
    #[inline]
    pub fn collect(&self) {
        let slot = &self.epoch.slots[self.id.index()];
        // A plain look at our own counters: exact unless another CPU drains us this very moment.
        if slot.retired.get() >= slot.due.get() {
            self.collect_some();
        }
    }

    /// One look, under one pin, with one advance at most: what is retired now is freed by the look after the next, and where others
    /// advance as well, some looks need none of their own.
    #[cold]
    fn collect_some(&self) {
        let Some(pin) = self.epoch.try_pin_other(self.id) else { return };
        Self::stamp(&pin);
        let has_passed = |epoch: &Epoch, stamp| epoch.has_passed(stamp);
        let mut ready = Self::take_ready(&pin, has_passed);
        // Our own pin keeps the epoch from moving on twice, not once.
        if ready.is_null() && self.epoch.try_advance() {
            ready = Self::take_ready(&pin, has_passed);
        }
        if ready.is_null() {
            let slot = &self.epoch.slots[self.id.index()];
            slot.due.set(slot.retired.get() + COLLECT_AGAIN);
        }
        drop(pin);
        self.free_all(ready);
    }

    /// Frees what can be freed now, however little. Returns how many objects.
    pub fn collect_now(&self) -> usize {
        self.collect_from(self.id)
    }

    /// The same for what CPU `other` retired, if that CPU is not pinned now.
    pub fn collect_from(&self, other: CpuId) -> usize {
        // Under a pin of its own, which would keep the epoch from moving on twice.
        let stamped = self.epoch.try_pin_other(other).map(|pin| Self::stamp(&pin));
        self.epoch.try_advance();
        self.epoch.try_advance();
        if stamped.is_none() {
            return 0;
        }
        let Some(pin) = self.epoch.try_pin_other(other) else { return 0 };
        let ready = Self::take_ready(&pin, |epoch, stamp| epoch.has_passed(stamp));
        drop(pin);
        self.free_all(ready)
    }

    /// Frees all that this CPU retired, waiting for the pins of others (which are short) where it must.
    pub fn collect_all(&self) {
        while self.epoch.slots[self.id.index()].retired.get() > 0 {
            if self.collect_now() == 0 {
                spin_loop();
            }
        }
    }

    /// Unlinks the first retired objects for which `passed` holds; returns the head of their chain.
    fn take_ready(pin: &Pin<'_>, passed: impl Fn(&Epoch, u64) -> bool) -> *mut RetireLink {
        let slot = &pin.epoch.slots[pin.id.index()];
        let first = slot.head.get();
        let mut last: *mut RetireLink = ptr::null_mut();
        let mut next = first;
        let (mut seen, mut taken) = (0, 0);
        while let Some(node) = NonNull::new(next) {
            // SAFETY: queued objects are valid until freed, and the queue is ours under the pin.
            let node = unsafe { node.as_ref() };
            seen += 1;
            let stamp = node.stamp.get();
            if stamp != UNSTAMPED {
                if !passed(pin.epoch, stamp) {
                    break;
                }
                // With all those before it.
                (last, taken) = (next, seen);
            } else if next == slot.fresh.get() {
                break;
            }
            next = node.next.get();
        }
        if last.is_null() {
            return ptr::null_mut();
        }
        note_write(last, 1);
        note_write(&slot.head, 1);
        // SAFETY: `last` is a queued object.
        let rest = unsafe { (*last).next.replace(ptr::null_mut()) };
        slot.head.set(rest);
        if rest.is_null() {
            slot.tail.set(ptr::null_mut());
        }
        let left = slot.retired.get() - taken;
        slot.retired.set(left);
        slot.due.set(left + COLLECT_AT);
        first
    }

    fn free_all(&self, mut next: *mut RetireLink) -> usize {
        let mut freed = 0;
        let mut freeing = Freeing { me: self, pin: None };
        while let Some(link) = NonNull::new(next) {
            // SAFETY: unlinked from the queue by us, not yet freed.
            let node = unsafe { link.as_ref() };
            next = node.next.get();
            if let Some(free) = node.free.get() {
                // SAFETY: `retire` promised that `free` may be called once, after the grace period.
                unsafe { free(link, &mut freeing) };
            }
            freed += 1;
            if freed % FREES_A_PIN == 0 {
                freeing.unpin();
            }
        }
        freed
    }
}

/// Objects that are freed one after the other under one pin: to pin for each would cost more than the freeing.
const FREES_A_PIN: usize = 64;

/// What those who free retired objects work with.
pub struct Freeing<'a> {
    me: &'a Participant<'a>,
    pin: Option<Pin<'a>>,
}

impl<'a> Freeing<'a> {
    /// The CPU that frees. It may be pinned: see [`unpin`](Self::unpin).
    pub fn cpu(&self) -> &'a Participant<'a> {
        self.me
    }

    /// The CPU pinned, as it may be from the object before.
    #[inline]
    pub fn pin(&mut self) -> &Pin<'a> {
        self.pin.get_or_insert_with(|| self.me.pin())
    }

    /// Ends the pin, for whoever is about to block or to pin.
    #[inline]
    pub fn unpin(&mut self) {
        self.pin = None;
    }
}

/// A pinned CPU: proof that what it reads is not freed, and that the CPU's private state is the holder's.
pub struct Pin<'e> {
    epoch: &'e Epoch,
    id: CpuId,
    not_send: PhantomData<*mut ()>,
}

impl<'e> Pin<'e> {
    /// The CPU that is pinned.
    #[inline]
    pub fn cpu(&self) -> CpuId {
        self.id
    }

    /// The number of the epoch that it has announced: the global one, or one that is old already.
    #[inline]
    pub fn announced(&self) -> u64 {
        self.epoch.slots[self.id.index()].word.load(Ordering::Relaxed) >> 1
    }

    /// The epoch it is pinned in.
    #[inline]
    pub fn epoch(&self) -> &'e Epoch {
        self.epoch
    }
}

impl Drop for Pin<'_> {
    #[inline]
    fn drop(&mut self) {
        let order = mutant!("unpin_relaxed", Ordering::Release, Ordering::Relaxed);
        self.epoch.slots[self.id.index()].word.store(0, order);
    }
}

describe!([] RetireLink { next, stamp, free });
describe!([] Epoch { global, used, slots });
describe!([] Slot { word, taken, head, tail, fresh, retired, due });

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::AtomicUsize as Count;

    static FREED: Count = Count::new(0);

    #[repr(C)]
    struct Node {
        link: RetireLink,
        value: u64,
    }

    unsafe fn free(link: NonNull<RetireLink>, _: &mut Freeing<'_>) {
        // SAFETY: made by `Box::leak` in the test; the link is the first field.
        let node = unsafe { Box::from_raw(link.as_ptr().cast::<Node>()) };
        assert_eq!(node.value, 7);
        FREED.fetch_add(1, Ordering::Relaxed);
    }

    #[test]
    fn a_pin_elsewhere_holds_reclamation_back() {
        let epoch = Epoch::try_new(2).unwrap();
        let a = epoch.register().unwrap();
        let b = epoch.register().unwrap();
        assert!(epoch.register().is_none());
        let reader = b.pin();
        {
            let pin = a.pin();
            let node = Box::leak(Box::new(Node { link: RetireLink::new(), value: 7 }));
            // SAFETY: never linked anywhere.
            unsafe { Participant::retire(&pin, NonNull::from(&mut *node).cast(), free) };
        }
        for _ in 0..4 {
            assert_eq!(a.collect_now(), 0);
        }
        assert!(epoch.try_pin_other(b.id()).is_none());
        assert!(epoch.try_pin_other(b.id()).is_none(), "the attempt before has ended the pin");
        assert_eq!(a.collect_now(), 0);
        drop(reader);
        assert!(epoch.try_pin_other(b.id()).is_some());
        assert_eq!(a.collect_now(), 1);
        assert_eq!(FREED.load(Ordering::Relaxed), 1);
    }
}
