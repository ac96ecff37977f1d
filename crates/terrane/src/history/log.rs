//! The log of a listing.
//!
//! Slots of eight words each. A writer reserves consecutive slots with one read-modify-write, fills them, and makes each valid by
//! its first word; the one that stands for all of an image, its head, comes last. So a head that is valid has valid pieces. A
//! writer that is not done has not yet changed anything, and its image is not missed.

use crate::addr::{AddrRange, PAGE_SHIFT};
use crate::error::OutOfMemory;
use crate::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use crate::sync::{Freeing, Participant, Pin, RetireLink};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::mem::offset_of;
use core::ptr::NonNull;
use crossbeam_utils::CachePadded;

/// A VMA or a part of one, as a listing shows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Addresses.
    pub range: AddrRange,
    /// Attributes.
    pub flags: u64,
    /// Which page of the object it begins with.
    pub pgoff: u64,
    /// What is mapped: any number that tells objects apart.
    pub object: u64,
}

impl Piece {
    const NONE: Piece = Piece { range: AddrRange { start: 0, end: 0 }, flags: 0, pgoff: 0, object: 0 };

    /// The part inside `range`, which it overlaps.
    pub fn clip(self, range: AddrRange) -> Piece {
        let part = self.range.intersection(range);
        let pgoff = self.pgoff.wrapping_add((part.start.wrapping_sub(self.range.start)) >> PAGE_SHIFT);
        Piece { range: part, pgoff, ..self }
    }

    /// True when `high` has the same attributes and shows the object where this one does or would.
    pub fn is_alike(&self, high: &Piece) -> bool {
        let pages = high.range.start.wrapping_sub(self.range.start) >> PAGE_SHIFT;
        self.flags == high.flags && self.object == high.object && self.pgoff.wrapping_add(pages) == high.pgoff
    }
}

/// What was in a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Image {
    pub(super) range: AddrRange,
    /// The VMA at the start reaches below it.
    pub(super) joined_below: bool,
    /// The VMA at the end reaches above it.
    pub(super) joined_above: bool,
    /// Where in the log its pieces are, ascending.
    pub(super) first: usize,
    pub(super) pieces: usize,
}

/// VMAs in a range that are read once and remembered; those of a range with more are read twice.
const FEW: usize = 4;

/// What a slot is; 0 stands for one that is not written yet.
const PIECE: u64 = 1;
const NOTE: u64 = 2;
const IMAGE: u64 = 3;
const HEAP: u64 = 4;

/// Kind, start, end, then as each kind uses them.
type Slot = [AtomicU64; 8];

/// The log of one listing.
pub struct Log {
    retire: RetireLink,
    number: u64,
    /// Slots reserved, perhaps more than there are.
    used: CachePadded<AtomicUsize>,
    overflowed: AtomicBool,
    slots: Box<[Slot]>,
}

fn fill(slot: &Slot, kind: u64, words: [u64; 5]) {
    for (word, value) in slot[1..].iter().zip(words) {
        word.store(value, Ordering::Relaxed);
    }
    slot[0].store(kind, Ordering::Release);
}

fn fill_piece(slot: &Slot, kind: u64, piece: Piece) {
    let Piece { range, flags, pgoff, object } = piece;
    fill(slot, kind, [range.start, range.end, flags, pgoff, object]);
}

fn range_in(slot: &Slot) -> AddrRange {
    AddrRange::new(slot[1].load(Ordering::Relaxed), slot[2].load(Ordering::Relaxed))
}

fn piece_in(slot: &Slot) -> Piece {
    let [flags, pgoff, object] = [3, 4, 5].map(|word: usize| slot[word].load(Ordering::Relaxed));
    Piece { range: range_in(slot), flags, pgoff, object }
}

impl Log {
    /// An empty log of `entries` slots.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_new(number: u64, entries: usize) -> Result<Box<[Log]>, OutOfMemory> {
        let mut slots: Vec<Slot> = Vec::new();
        slots.try_reserve_exact(entries).map_err(|_| OutOfMemory)?;
        slots.resize_with(entries, Slot::default);
        // As a slice, because a vector is what can say that there is no memory.
        let mut log = Vec::new();
        log.try_reserve_exact(1).map_err(|_| OutOfMemory)?;
        log.push(Log {
            retire: RetireLink::new(),
            number,
            used: CachePadded::new(AtomicUsize::new(0)),
            overflowed: AtomicBool::new(false),
            slots: slots.into_boxed_slice(),
        });
        Ok(log.into_boxed_slice())
    }

    /// Frees a log once no pin can see it.
    ///
    /// # Safety
    /// It came from [`try_new`](Self::try_new), nobody finds it any more, and it is given up once.
    pub(super) unsafe fn retire(log: NonNull<Log>, pin: &Pin<'_>) {
        // Not through a reference to the field, which would not reach the rest of the log.
        // SAFETY: live until freed.
        let link = unsafe { NonNull::new_unchecked(&raw mut (*log.as_ptr()).retire) };
        // SAFETY: the caller's promise.
        unsafe { Participant::retire(pin, link, Self::free_retired) };
    }

    unsafe fn free_retired(link: NonNull<RetireLink>, _: &mut Freeing<'_>) {
        // SAFETY: the link is the `retire` field of a log, as given to `retire` above.
        let log = unsafe { link.byte_sub(offset_of!(Self, retire)) }.cast::<Self>();
        // SAFETY: a box of one log, given up by its only owner.
        drop(unsafe { Box::from_raw(core::ptr::slice_from_raw_parts_mut(log.as_ptr(), 1)) });
    }

    /// Which listing this is the log of.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// True when something was not written for lack of room: the log is of no use.
    pub fn has_overflowed(&self) -> bool {
        self.overflowed.load(Ordering::Acquire)
    }

    /// The place of `count` slots that are now the caller's.
    fn reserve(&self, count: usize) -> Option<&[Slot]> {
        let first = self.used.fetch_add(count, Ordering::AcqRel);
        let slots = first.checked_add(count).and_then(|end| self.slots.get(first..end));
        if slots.is_none() {
            self.overflowed.store(true, Ordering::Release);
        }
        slots
    }

    /// Writes what is in `range`, which the caller has locked and not yet changed: what `visit` yields, the VMAs that are in it or
    /// partly, ascending, each time the same but for what lies outside.
    pub fn image(&self, range: AddrRange, visit: impl Fn(&mut dyn FnMut(Piece))) {
        let mut few = [Piece::NONE; FEW];
        let (mut count, mut joined) = (0, 0);
        // All that neighbours may change is read before the place in the log is taken; see the head of the module above.
        visit(&mut |vma| {
            if let Some(place) = few.get_mut(count) {
                *place = vma.clip(range);
            }
            count += 1;
            joined |= u64::from(vma.range.start < range.start) | u64::from(vma.range.end > range.end) << 1;
        });
        if let Some([head, slots @ ..]) = self.reserve(1 + count) {
            let mut rest = slots.iter();
            let mut write = |piece| {
                if let Some(slot) = rest.next() {
                    fill_piece(slot, PIECE, piece);
                }
            };
            match few.get(..count) {
                Some(pieces) => pieces.iter().for_each(|piece| write(*piece)),
                None => visit(&mut |vma| write(vma.clip(range))),
            }
            let pieces = slots.len() - rest.len();
            fill(head, IMAGE, [range.start, range.end, joined, pieces as u64, 0]);
        }
        // What is changed from now on is seen together with the log.
        fence(Ordering::Release);
    }

    /// Writes what a record is like that is about to change, under the lock of its leaf.
    pub fn note(&self, vma: Piece) {
        if let Some([slot]) = self.reserve(1) {
            fill_piece(slot, NOTE, vma);
        }
        fence(Ordering::Release);
    }

    /// Writes what the heap is, before it is moved.
    pub fn heap(&self, heap: AddrRange) {
        if let Some([slot]) = self.reserve(1) {
            fill(slot, HEAP, [heap.start, heap.end, 0, 0, 0]);
        }
        fence(Ordering::Release);
    }

    /// The slots that are valid, with their kinds, and where they are. What belongs to changes that the caller has seen is among
    /// them.
    fn entries(&self) -> impl Iterator<Item = (usize, u64, &Slot)> {
        fence(Ordering::Acquire);
        let used = self.used.load(Ordering::Acquire).min(self.slots.len());
        let slots = self.slots[..used].iter().enumerate();
        slots.map(|(index, slot)| (index, slot[0].load(Ordering::Acquire), slot))
    }

    /// The notes.
    pub fn notes(&self) -> impl Iterator<Item = Piece> {
        self.entries().filter(|(_, kind, _)| *kind == NOTE).map(|(_, _, slot)| piece_in(slot))
    }

    /// What the heap was, if it has been moved.
    pub fn first_heap(&self) -> Option<AddrRange> {
        self.entries().find(|(_, kind, _)| *kind == HEAP).map(|(_, _, slot)| range_in(slot))
    }

    /// The images, in the order in which their places were taken.
    pub(super) fn images(&self) -> impl Iterator<Item = Image> {
        self.entries().filter(|(_, kind, _)| *kind == IMAGE).map(|(index, _, slot)| {
            let [joined, pieces] = [3, 4].map(|word: usize| slot[word].load(Ordering::Relaxed));
            Image {
                range: range_in(slot),
                joined_below: joined & 1 != 0,
                joined_above: joined & 2 != 0,
                first: index + 1,
                pieces: pieces as usize,
            }
        })
    }

    /// The pieces of an image.
    pub(super) fn pieces(&self, image: &Image) -> impl Iterator<Item = Piece> {
        self.slots.iter().skip(image.first).take(image.pieces).map(piece_in)
    }
}
