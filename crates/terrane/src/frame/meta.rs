//! What is known about a frame: 32 bytes each, half a cache line.
//!
//! # Who may write what
//!
//! | state of the frame | `flags` | `references` | `owner`, `index` | `spare` |
//! |---|---|---|---|---|
//! | in the allocator | the allocator | 0 | nobody | nobody |
//! | on a [`FrameList`](super::FrameList) or deferred | as they were | as they were | the list (its links) | the list |
//! | just allocated | its holder, by plain stores | its holder | its holder | its holder |
//! | mapped, anonymous | anybody who holds a reference, by read-modify-write | who adds or removes a holder | set before the frame is published; then only under the lock of the anon_vma | `swap`, under the lock of a slot |
//! | in a page cache | anybody who owns the object, by read-modify-write | nobody | set before the slot of the cache is filled | nobody |
//!
//! `references` counts the holders: page-table entries that map the frame, and whoever else must be sure that it
//! stays. Who takes it from 1 to 0 is the one that frees the frame. It stays 0 from then until the next allocation,
//! so [`inc_references_not_zero`](FrameMeta::inc_references_not_zero) by somebody with an old frame number fails, or
//! takes a reference to the frame's next life: such a caller compares `owner` and `index` afterwards. Who allows
//! such callers must free only after having counted down to 0.
//!
//! A frame has at most 2^32 - 1 references; its page-table entries alone would need 32 GiB by then. The shared
//! zero frame is not counted.

use super::zeroed::Zeroable;
use crate::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

bitflags::bitflags! {
    /// What a frame is used for, and its state.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
    pub struct FrameFlags: u32 {
        /// Somebody has the frame to itself: its contents are being read in, written back or moved.
        const LOCKED = 1;
        /// The contents are those of the file.
        const UPTODATE = 1 << 1;
        /// The contents are newer than those of the file.
        const DIRTY = 1 << 2;
        /// Reading or writing the contents failed.
        const ERROR = 1 << 3;
        /// An anonymous page: `owner` is its anon_vma.
        const ANON = 1 << 4;
        /// In a page cache: `owner` is the object.
        const CACHE = 1 << 5;
        /// A page table.
        const TABLE = 1 << 6;
        /// To be passed over once by reclaim: it has just been read back from swap.
        const REFERENCED = 1 << 7;
        /// Being written back to the file.
        const WRITEBACK = 1 << 9;
        /// Somebody waits for `LOCKED` or `WRITEBACK` to go.
        const WAITERS = 1 << 10;
        /// First frame of a block of 512 that is on a [`FrameList`](super::FrameList) as a whole.
        const BLOCK = 1 << 11;
        /// Not to be reclaimed: locked in memory.
        const UNEVICTABLE = 1 << 12;
        /// With `CACHE`: for a moment the page stays in its object, and so the object stays: somebody who found the frame by
        /// its number is becoming an owner of the object.
        const HELD = 1 << 13;
        /// Lost to a hardware error.
        const POISONED = 1 << 14;
        /// Its program has said that it may be forgotten unless it is stored to again (`MADV_FREE`); see
        /// [`may_vanish`](crate::fault::may_vanish).
        const LAZYFREE = 1 << 15;
        /// It may be forgotten even if it was stored to (`MAP_DROPPABLE`).
        const DROPPABLE = 1 << 16;
        /// The mark of having been accessed was taken from an entry that maps it: an entry without the mark may be in use by
        /// a processor all the same.
        const AGED = 1 << 17;
        /// In a page cache, of memory that is in no file.
        const SHMEM = 1 << 18;
        /// On its way out of memory, or to another frame: entries that mapped it say so no more, and processors may still be storing through
        /// them. Nobody maps it before that is over; see [`swap`](crate::swap).
        const UNSETTLED = 1 << 19;
        /// In the allocator. Set and cleared by the allocator alone.
        const FREE = 1 << 31;
    }
}

/// The metadata of one frame; see the [module](self) for who may write what.
#[derive(Debug)]
#[repr(C)]
pub struct FrameMeta {
    flags: AtomicU32,
    references: AtomicU32,
    owner: AtomicPtr<()>,
    index: AtomicU64,
    spare: AtomicU64,
}

#[cfg(not(terrane_loom))]
const _: () = assert!(size_of::<FrameMeta>() <= 32);

// SAFETY: atomics of integers and a pointer: zeros are a value, and nothing is dropped.
unsafe impl Zeroable for FrameMeta {}

impl FrameMeta {
    /// Makes the metadata those of a frame just allocated: one reference, nothing else.
    #[inline]
    pub(super) fn begin_life(&self) {
        self.flags.store(0, Ordering::Relaxed);
        self.owner.store(core::ptr::null_mut(), Ordering::Relaxed);
        self.index.store(0, Ordering::Relaxed);
        self.spare.store(0, Ordering::Relaxed);
        // Last, and releasing: who takes a reference through an old frame number sees the rest.
        self.references.store(1, Ordering::Release);
    }

    /// Marks the frame as the allocator's.
    #[inline]
    pub(super) fn end_life(&self) {
        debug_assert!(!self.flags().contains(FrameFlags::FREE), "a frame is freed twice");
        self.references.store(0, Ordering::Relaxed);
        self.flags.store(FrameFlags::FREE.bits(), Ordering::Relaxed);
    }

    /// The flags at this moment; what was written before they were set is visible.
    #[inline]
    pub fn flags(&self) -> FrameFlags {
        FrameFlags::from_bits_retain(self.flags.load(Ordering::Acquire))
    }

    /// Sets `flags`, leaving the others, and returns what all were before.
    #[inline]
    pub fn set_flags(&self, flags: FrameFlags) -> FrameFlags {
        FrameFlags::from_bits_retain(self.flags.fetch_or(flags.bits(), Ordering::AcqRel))
    }

    /// Clears `flags`, leaving the others, and returns what all were before.
    #[inline]
    pub fn clear_flags(&self, flags: FrameFlags) -> FrameFlags {
        FrameFlags::from_bits_retain(self.flags.fetch_and(!flags.bits(), Ordering::AcqRel))
    }

    /// Makes the flags exactly `flags`: for a holder that nobody else can reach the frame beside. A plain store.
    #[inline]
    pub fn init_flags(&self, flags: FrameFlags) {
        self.flags.store(flags.bits(), Ordering::Release);
    }

    /// Makes the flags exactly `flags` and returns what they were: for the holder of [`FrameFlags::LOCKED`].
    #[inline]
    pub fn swap_flags(&self, flags: FrameFlags) -> FrameFlags {
        FrameFlags::from_bits_retain(self.flags.swap(flags.bits(), Ordering::SeqCst))
    }

    /// Changes the flags from exactly `current` to `new`, or returns false.
    #[inline]
    pub fn replace_flags(&self, current: FrameFlags, new: FrameFlags) -> bool {
        self.flags.compare_exchange(current.bits(), new.bits(), Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// The flags, for a caller that has just taken a page-table entry: the other half of Dekker's pattern with
    /// [`replace_flags`](Self::replace_flags) and a sweep after it.
    #[inline]
    pub fn flags_while_owned(&self) -> FrameFlags {
        FrameFlags::from_bits_retain(self.flags.load(Ordering::SeqCst))
    }

    /// Takes a page out of use as one of an object: it is not `UPTODATE` any more, and nobody finds the object by it. What kind it
    /// was can still be told. Waits for
    /// who [holds](FrameFlags::HELD) it, which takes nanoseconds. False, and nothing done, while the page is being read,
    /// written or moved, unless it was out of use already.
    pub fn dismiss(&self) -> bool {
        loop {
            let flags = self.flags();
            if !flags.contains(FrameFlags::UPTODATE) {
                return !flags.contains(FrameFlags::LOCKED);
            }
            let held = mutant!("dismissed_while_held", flags.contains(FrameFlags::HELD), false);
            if !held && self.replace_flags(flags, flags - FrameFlags::UPTODATE) {
                return true;
            }
            crate::sync::atomic::spin_loop();
        }
    }

    /// Takes [`FrameFlags::LOCKED`] if nobody has it.
    #[inline]
    pub fn try_lock(&self) -> bool {
        !self.set_flags(FrameFlags::LOCKED).contains(FrameFlags::LOCKED)
    }

    /// Gives [`FrameFlags::LOCKED`] back, with [`FrameFlags::WAITERS`]; true when somebody is to be woken.
    #[inline]
    pub fn unlock(&self) -> bool {
        let before = self.clear_flags(FrameFlags::LOCKED | FrameFlags::WAITERS);
        debug_assert!(before.contains(FrameFlags::LOCKED));
        before.contains(FrameFlags::WAITERS)
    }

    /// The word behind the flags, for a host's [`Wait`](crate::host::Wait): a waiter sets
    /// [`FrameFlags::WAITERS`] and waits for the word to change.
    #[inline]
    pub fn flags_word(&self) -> &AtomicU32 {
        &self.flags
    }

    /// How many hold the frame; a hint unless the caller excludes the others.
    #[inline]
    pub fn references(&self) -> u32 {
        self.references.load(Ordering::Acquire)
    }

    /// Makes the count exactly `references`: for a holder that nobody else can reach the frame beside.
    #[inline]
    pub fn init_references(&self, references: u32) {
        self.references.store(references, Ordering::Release);
    }

    /// Adds a holder and returns how many there are now. The caller is, or answers for, a holder already.
    #[inline]
    pub fn inc_references(&self) -> u32 {
        self.add_references(1)
    }

    /// Adds `holders` holders at once and returns how many there are now. The caller answers for one already.
    #[inline]
    pub fn add_references(&self, holders: u32) -> u32 {
        // A new reference is made from one: no ordering is needed.
        let before = self.references.fetch_add(holders, Ordering::Relaxed);
        debug_assert!(before != 0, "a reference to a free frame");
        before.wrapping_add(holders)
    }

    /// Adds a holder unless there is none: for a caller that knows the frame only by number. False: the frame is
    /// free. True: the frame stays, but it may be another page by now; compare `owner` and `index`.
    #[inline]
    pub fn inc_references_not_zero(&self) -> bool {
        let mut count = self.references.load(Ordering::Relaxed);
        while count != 0 {
            match self.references.compare_exchange_weak(
                count,
                count + 1,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return true,
                Err(now) => count = now,
            }
        }
        false
    }

    /// Removes a holder and returns how many are left. At 0 the caller has the frame to itself, sees everything
    /// that the others did to it, and frees it.
    #[inline]
    pub fn dec_references(&self) -> u32 {
        let before = self.references.fetch_sub(1, Ordering::AcqRel);
        debug_assert!(before != 0, "a reference given back twice");
        before.wrapping_sub(1)
    }

    /// What the frame belongs to, by flags: an anon_vma, an object, or null.
    #[inline]
    pub fn owner(&self) -> *mut () {
        self.owner.load(Ordering::Acquire)
    }

    /// Sets what the frame belongs to.
    #[inline]
    pub fn set_owner(&self, owner: *mut ()) {
        self.owner.store(owner, Ordering::Release);
    }

    /// Where in its owner the page is, in pages.
    #[inline]
    pub fn index(&self) -> u64 {
        self.index.load(Ordering::Acquire)
    }

    /// Sets where in its owner the page is, in pages.
    #[inline]
    pub fn set_index(&self, index: u64) {
        self.index.store(index, Ordering::Release);
    }

    /// Eight bytes for [`swap`](crate::swap): the slot that knows the page, and one; 0 after allocation.
    #[inline]
    pub fn spare(&self) -> u64 {
        self.spare.load(Ordering::Acquire)
    }

    /// Sets the eight bytes for [`swap`](crate::swap).
    #[inline]
    pub fn set_spare(&self, value: u64) {
        self.spare.store(value, Ordering::Release);
    }
}

#[cfg(terrane_watch)]
impl FrameMeta {
    /// Where the fields are, for the cache-line audit.
    pub(super) const FIELDS: &[(usize, &str)] = &[
        (core::mem::offset_of!(Self, flags), ".flags"),
        (core::mem::offset_of!(Self, references), ".references"),
        (core::mem::offset_of!(Self, owner), ".owner"),
        (core::mem::offset_of!(Self, index), ".index"),
        (core::mem::offset_of!(Self, spare), ".spare"),
    ];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_count_and_never_rise_from_zero() {
        let array = super::super::zeroed::ZeroedArray::<FrameMeta>::try_new(3).unwrap();
        assert_eq!(array.as_ptr() as usize % 64, 0);
        let meta = &array[1];
        assert!(!meta.inc_references_not_zero());
        meta.begin_life();
        assert!(meta.inc_references_not_zero());
        assert_eq!(meta.add_references(3), 5);
        assert_eq!((0..5).map(|_| meta.dec_references()).last(), Some(0));
        assert!(!meta.inc_references_not_zero());
    }

    #[test]
    fn the_lock_has_one_holder() {
        let array = super::super::zeroed::ZeroedArray::<FrameMeta>::try_new(1).unwrap();
        let meta = &array[0];
        meta.begin_life();
        meta.init_flags(FrameFlags::CACHE);
        assert!(meta.try_lock() && !meta.try_lock());
        meta.set_flags(FrameFlags::WAITERS | FrameFlags::DIRTY);
        assert!(meta.unlock());
        assert_eq!(meta.flags(), FrameFlags::CACHE | FrameFlags::DIRTY);
        assert!(meta.try_lock() && !meta.unlock());
    }
}
