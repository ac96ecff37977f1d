//! The record of one VMA.
//!
//! # What it guarantees
//!
//! The first cache line holds everything a fault reads, and a fault writes none of it but, once in the life of
//! a VMA, its `anon` pointer. Attributes change only inside a bracket of the sequence counter
//! ([`SeqCount`]), under the lock of the leaf of the index that it is in. `object` and `space` never change.
//!
//! # The `anon` pointer
//!
//! It goes from null to an [`AnonVma`] at the first private write, set by the fault with a compare-and-swap and
//! without any lock. A layout change that must decide on it (merging two VMAs) first *freezes* a null
//! pointer: a fault that meets [`FROZEN`](Anon::Frozen) gives up (`spf_vma_noanon`) and takes the locked path. A VMA that
//! leaves its space is *closed*, so that a fault that is late cannot leave an anon_vma behind on it.
//!
//! # Who may break it
//!
//! Whoever changes `start` without changing `pgoff` along, or either outside the reverse-mapping lock of the
//! object: the walk of a file's mappings relies on their relation (source E, H. Dickins' remark).

use crate::addr::{AddrRange, PAGE_SHIFT};
use crate::host::Host;
use crate::machine::{Machine, Record};
use crate::object::{MappingLink, Object};
use crate::rmap::AnonVma;
use crate::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering, note_write};
use crate::sync::{Freeing, Participant, Pin, RetireLink, SeqCount, Shared};
use crate::vma::VmFlags;
use core::mem::offset_of;
use core::ptr::{self, NonNull};

/// One mapping of an address space. 128 bytes on two cache lines.
#[repr(C, align(64))]
pub struct Vma<H: Host> {
    /// Even when the attributes are at rest; see [`SeqCount`].
    pub seq: SeqCount,
    /// Which copy of a fork it belongs to; see [`kin`](Self::kin).
    kin: AtomicU32,
    start: AtomicU64,
    end: AtomicU64,
    flags: AtomicU64,
    pgoff: AtomicU64,
    anon: AtomicPtr<AnonVma<H>>,
    object: Option<Shared<Object<H>>>,
    /// The `Mm` this VMA belongs to, as a cookie: that layer is above this one.
    space: *const (),
    /// The machine whose record this is; outlives it, because retired records are freed before a machine goes.
    machine: *const Machine<H>,
    // Second line: nothing a fault reads.
    /// For reclamation after the VMA has left its space.
    retire: RetireLink,
    /// Its place among the mappings of `object`.
    pub(crate) link: MappingLink,
    /// Chains VMAs that one layout change removes, while it is under way.
    next: AtomicPtr<Vma<H>>,
}

// SAFETY: all that changes is atomic, or (`retire`, `link`, `next`) used by one holder at a time: the layout
// change that removes the VMA, the holder of the object's mapping lock, the queue of retired objects. `space` is a
// cookie that is only dereferenced under the rules of `rmap`.
unsafe impl<H: Host> Send for Vma<H> {}
// SAFETY: as above.
unsafe impl<H: Host> Sync for Vma<H> {}

/// The attributes of a VMA as a fault read them, once (requirement B2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Snapshot {
    /// Addresses, in bytes.
    pub range: AddrRange,
    /// Attributes.
    pub flags: VmFlags,
    /// Where in the object the mapping starts, in pages.
    pub pgoff: u64,
}

impl Snapshot {
    /// The page of the object that `addr` (inside the range) shows.
    #[inline]
    pub fn index_of(&self, addr: u64) -> u64 {
        self.pgoff + ((addr - self.range.start) >> PAGE_SHIFT)
    }
}

/// The states of a VMA's `anon` pointer.
pub enum Anon<'a, H: Host> {
    /// No private page was written yet.
    None,
    /// A layout change is deciding on it.
    Frozen,
    /// The VMA has left its space.
    Closed,
    /// Set.
    Some(&'a AnonVma<H>),
}

const FROZEN: usize = 1;
const CLOSED: usize = 2;

impl<H: Host> Vma<H> {
    /// Makes a VMA at rest, in no index yet, in a record of `machine`. `space` is the cookie of its `Mm`; `pgoff` in
    /// pages.
    pub fn create(
        record: NonNull<Record>,
        machine: &Machine<H>,
        range: AddrRange,
        flags: VmFlags,
        pgoff: u64,
        object: Option<Shared<Object<H>>>,
        space: *const (),
    ) -> NonNull<Self> {
        const { assert!(size_of::<Self>() <= size_of::<Record>() && align_of::<Self>() <= align_of::<Record>()) };
        let vma = record.cast::<Self>();
        let value = Self {
            seq: SeqCount::new(),
            kin: AtomicU32::new(0),
            start: AtomicU64::new(range.start),
            end: AtomicU64::new(range.end),
            flags: AtomicU64::new(flags.bits()),
            pgoff: AtomicU64::new(pgoff),
            anon: AtomicPtr::new(ptr::null_mut()),
            object,
            space,
            machine,
            retire: RetireLink::new(),
            link: MappingLink::new(),
            next: AtomicPtr::new(ptr::null_mut()),
        };
        note_write(vma.as_ptr(), 1);
        // SAFETY: a record is storage for a VMA, as asserted above, and this one is the caller's.
        unsafe { vma.write(value) };
        vma
    }

    /// Gives the record up once no pin can see it.
    ///
    /// # Safety
    /// The VMA is in no index, list or chain any more, and nothing refers to it but older pins.
    pub unsafe fn retire(vma: NonNull<Self>, pin: &Pin<'_>) {
        // SAFETY: the VMA is live until freed.
        let link = NonNull::from(unsafe { &vma.as_ref().retire });
        // SAFETY: the caller's promise.
        unsafe { Participant::retire(pin, link, Self::free_retired) };
    }

    unsafe fn free_retired(link: NonNull<RetireLink>, freeing: &mut Freeing<'_>) {
        // SAFETY: the link is the `retire` field of a VMA, as given to `retire` above.
        let vma = unsafe { link.byte_sub(offset_of!(Self, retire)) }.cast::<Self>();
        // SAFETY: called once, after the grace period. The machine outlives its retired records.
        unsafe {
            let machine = &*vma.as_ref().machine;
            if vma.as_ref().object.is_some() {
                // Dropping it may write to its file.
                freeing.unpin();
            }
            vma.as_ptr().drop_in_place();
            machine.records().free(freeing.pin(), vma.cast());
        }
    }

    /// First address.
    #[inline]
    pub fn start(&self) -> u64 {
        self.start.load(Ordering::Relaxed)
    }

    /// First address behind.
    #[inline]
    pub fn end(&self) -> u64 {
        self.end.load(Ordering::Relaxed)
    }

    /// The addresses at this moment; consistent only under the lock of its leaf, or when validated.
    #[inline]
    pub fn range(&self) -> AddrRange {
        AddrRange::new(self.start(), self.end())
    }

    /// The attributes at this moment.
    #[inline]
    pub fn flags(&self) -> VmFlags {
        VmFlags::from_bits_retain(self.flags.load(Ordering::Relaxed))
    }

    /// Where in the object the mapping starts, in pages.
    #[inline]
    pub fn pgoff(&self) -> u64 {
        self.pgoff.load(Ordering::Relaxed)
    }

    /// All attributes a fault needs; valid once the sequence counter says so.
    #[inline]
    pub fn snapshot(&self) -> Snapshot {
        Snapshot { range: self.range(), flags: self.flags(), pgoff: self.pgoff() }
    }

    /// All attributes as they were at one moment; `None` while they change, or when the VMA has left its space.
    #[inline]
    pub fn read(&self) -> Option<Snapshot> {
        let seq = self.seq.read()?;
        let seen = self.snapshot();
        self.seq.unchanged(seq).then_some(seen)
    }

    /// What is mapped; `None` for private anonymous memory.
    #[inline]
    pub fn object(&self) -> Option<&Shared<Object<H>>> {
        self.object.as_ref()
    }

    /// The cookie of the `Mm` it belongs to.
    #[inline]
    pub fn space(&self) -> *const () {
        self.space
    }

    /// Moves the end. Inside a bracket.
    #[inline]
    pub fn set_end(&self, end: u64) {
        self.end.store(end, Ordering::Relaxed);
    }

    /// Moves the start, and the offset along with it. Inside a bracket, and under the mapping lock of the
    /// object if there is one.
    #[inline]
    pub fn set_start(&self, start: u64) {
        let moved = (start.wrapping_sub(self.start()) as i64) >> PAGE_SHIFT;
        self.pgoff.store(self.pgoff().wrapping_add_signed(moved), Ordering::Relaxed);
        self.start.store(start, Ordering::Relaxed);
    }

    /// Changes the attributes. Inside a bracket.
    #[inline]
    pub fn set_flags(&self, flags: VmFlags) {
        self.flags.store(flags.bits(), Ordering::Relaxed);
    }

    /// Runs `change` inside a bracket of the sequence counter.
    #[inline]
    pub fn change<R>(&self, change: impl FnOnce(&Self) -> R) -> R {
        self.seq.write_begin();
        let result = change(self);
        self.seq.write_end();
        result
    }

    /// The state of the `anon` pointer.
    #[inline]
    pub fn anon(&self) -> Anon<'_, H> {
        let pointer = self.anon.load(Ordering::Acquire);
        match pointer.addr() {
            0 => Anon::None,
            FROZEN => Anon::Frozen,
            CLOSED => Anon::Closed,
            // SAFETY: a pointer stored here counts as a user of the anon_vma until the VMA is closed, and an
            // anon_vma is freed only after an epoch has passed since its last user left: whoever reads the
            // pointer holds a pin or a lock that keeps the VMA in its space.
            _ => Anon::Some(unsafe { &*pointer }),
        }
    }

    /// In a space that came by `fork`: a number for each VMA that had an anon_vma then, and for its parts. VMAs of different
    /// numbers are never merged: in Linux each VMA gets an anon_vma of its own in the child, and listings show that. 0 for all
    /// others.
    #[inline]
    pub fn kin(&self) -> u32 {
        self.kin.load(Ordering::Relaxed)
    }

    /// Sets [`kin`](Self::kin) of a VMA that has just been made.
    pub fn set_kin(&self, kin: u32) {
        self.kin.store(kin, Ordering::Relaxed);
    }

    /// The anon_vma, if there is one.
    #[inline]
    pub fn anon_vma(&self) -> Option<&AnonVma<H>> {
        match self.anon() {
            Anon::Some(anon) => Some(anon),
            _ => None,
        }
    }

    /// Sets the anon_vma if there is none; the caller's user count passes to this VMA. On failure the count
    /// stays with the caller.
    #[inline]
    pub fn install_anon(&self, anon: NonNull<AnonVma<H>>) -> bool {
        let order = mutant!("anon_installed_relaxed", Ordering::AcqRel, Ordering::Relaxed);
        mutant!(
            "anon_installed_over",
            self.anon.compare_exchange(ptr::null_mut(), anon.as_ptr(), order, Ordering::Acquire).is_ok(),
            self.anon.swap(anon.as_ptr(), order).addr() <= CLOSED
        )
    }

    /// Keeps a null pointer null until [`thaw_anon`](Self::thaw_anon); one that is set stays as it is.
    pub fn freeze_anon(&self) {
        let _ = self.anon.compare_exchange(
            mutant!("anon_frozen_over", ptr::null_mut(), self.anon.load(Ordering::Relaxed)),
            ptr::without_provenance_mut(FROZEN),
            Ordering::AcqRel,
            Ordering::Acquire,
        );
    }

    /// Ends [`freeze_anon`](Self::freeze_anon), under the same lock: if still frozen, the pointer becomes `anon` (whose
    /// user count passes to this VMA) or null.
    pub fn thaw_anon(&self, anon: Option<NonNull<AnonVma<H>>>) {
        // Nobody else changes a frozen pointer.
        if self.anon.load(Ordering::Relaxed).addr() == FROZEN {
            self.anon.store(anon.map_or(ptr::null_mut(), NonNull::as_ptr), Ordering::Release);
        }
    }

    /// [`close_anon`](Self::close_anon) of a pointer that is [frozen](Self::freeze_anon), or set: nobody else changes it.
    pub fn close_frozen_anon(&self) -> Option<NonNull<AnonVma<H>>> {
        let pointer = self.anon.load(Ordering::Acquire);
        debug_assert!(!pointer.is_null());
        self.anon.store(ptr::without_provenance_mut(CLOSED), Ordering::Release);
        if pointer.addr() <= CLOSED { None } else { NonNull::new(pointer) }
    }

    /// Takes the anon_vma away for good: the user count passes to the caller.
    pub fn close_anon(&self) -> Option<NonNull<AnonVma<H>>> {
        let pointer = self.anon.swap(ptr::without_provenance_mut(CLOSED), Ordering::AcqRel);
        if pointer.addr() <= CLOSED { None } else { NonNull::new(pointer) }
    }

    /// The next VMA in the chain of a layout change.
    pub fn next_removed(&self) -> Option<NonNull<Vma<H>>> {
        NonNull::new(self.next.load(Ordering::Relaxed))
    }

    /// Chains this VMA before `next`.
    pub fn chain_removed(&self, next: Option<NonNull<Vma<H>>>) {
        self.next.store(next.map_or(ptr::null_mut(), NonNull::as_ptr), Ordering::Relaxed);
    }
}

describe!([H: Host] Vma<H> { seq, kin, start, end, flags, pgoff, anon, retire, link, next });
