//! The page cache of one object: a radix tree of 64 slots a node, read and filled without locks.
//!
//! # What it guarantees
//!
//! A slot goes from empty to a frame by compare-and-swap, so a page has one frame. Nodes are added by
//! compare-and-swap and freed only with the cache, so a reader may hold on to a node for as long as it holds the
//! object. The tree grows at the root: a new root has the old one as its first child, published by one
//! compare-and-swap of the root word, which holds the node's address and, in the low bits that its alignment
//! leaves free, its height.
//!
//! # Who may break it
//!
//! Whoever empties a slot without the protocol in the head of [`object`](super).
//!
//! The radix tree per object is as in Linux before its xarray; filling it without a lock is ours.

use crate::addr::Frame;
use crate::error::OutOfMemory;
use crate::sync::Pin;
use crate::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use alloc::alloc::{Layout, alloc_zeroed, dealloc};
use core::ptr;

const BITS: u32 = 6;
const SLOTS: usize = 1 << BITS;
/// Levels that reach every page of a 64-bit offset: 52 bits of page number, 6 a level.
const MAX_HEIGHT: u32 = 9;
const HEIGHT_MASK: usize = 63;

/// One page's place: 0, or the frame and a mark, or the slot of the swap device and another mark.
#[repr(transparent)]
pub struct Slot(AtomicU64);

const FILLED: u64 = 1 << 32;
const SWAPPED: u64 = 1 << 33;

/// What a slot says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    /// Nowhere.
    None,
    /// In memory.
    Frame(Frame),
    /// In a slot of the swap device.
    Swap(u32),
}

impl Place {
    #[inline]
    fn of(word: u64) -> Self {
        match word & (FILLED | SWAPPED) {
            FILLED => Place::Frame(Frame(word as u32)),
            SWAPPED => Place::Swap(word as u32),
            _ => Place::None,
        }
    }

    fn word(self) -> u64 {
        match self {
            Place::None => 0,
            Place::Frame(frame) => FILLED | u64::from(frame.0),
            Place::Swap(number) => SWAPPED | u64::from(number),
        }
    }
}

impl Slot {
    /// The frame in the slot. `SeqCst`, because a fault looks again while it owns a page-table entry.
    #[inline]
    pub fn get(&self) -> Option<Frame> {
        let word = self.0.load(Ordering::SeqCst);
        (word & FILLED != 0).then_some(Frame(word as u32))
    }

    /// What the slot says.
    #[inline]
    pub(super) fn place(&self) -> Place {
        Place::of(self.0.load(Ordering::SeqCst))
    }

    /// Puts `frame` into the empty slot, or returns what is there.
    pub(super) fn fill(&self, frame: Frame) -> Result<(), Place> {
        self.replace(Place::None, Place::Frame(frame))
    }

    /// Changes the slot from `current` to `new`, or returns what is there.
    pub(super) fn replace(&self, current: Place, new: Place) -> Result<(), Place> {
        match self.0.compare_exchange(current.word(), new.word(), Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => Ok(()),
            Err(word) => Err(Place::of(word)),
        }
    }

    /// Empties the slot; returns what was there.
    pub(super) fn clear(&self) -> Place {
        Place::of(self.0.swap(0, Ordering::SeqCst))
    }
}

/// A node: 64 children, or, at height 1, 64 slots. 512 bytes.
#[repr(C, align(64))]
struct Node([AtomicPtr<Node>; SLOTS]);

/// The 64 slots of neighbouring pages.
#[derive(Clone, Copy)]
pub struct Slots<'a> {
    first: u64,
    slots: &'a [Slot; SLOTS],
}

impl Slots<'_> {
    /// The frame of page `index`, or `None` when it is not in memory or not among these 64.
    #[inline]
    pub fn get(&self, index: u64) -> Option<Frame> {
        self.slots.get(usize::try_from(index.wrapping_sub(self.first)).ok()?)?.get()
    }

    /// Number of the page behind the last of these.
    #[inline]
    pub fn end(&self) -> u64 {
        self.first + SLOTS as u64
    }
}

/// The pages of an object that are in memory.
pub(super) struct PageCache {
    /// Address of the root node, and its height in the low bits; 0 when there is none.
    root: AtomicPtr<Node>,
}

#[inline]
fn height_of(root: *mut Node) -> u32 {
    (root.addr() & HEIGHT_MASK) as u32
}

#[inline]
fn node_of(root: *mut Node) -> *mut Node {
    root.map_addr(|addr| addr & !HEIGHT_MASK)
}

fn new_node() -> Result<*mut Node, OutOfMemory> {
    // SAFETY: the layout has a size. All zeros is a node of null pointers, and of empty slots.
    let node = unsafe { alloc_zeroed(Layout::new::<Node>()) }.cast::<Node>();
    if node.is_null() { Err(OutOfMemory) } else { Ok(node) }
}

fn free_node(node: *mut Node) {
    // SAFETY: only called with nodes from `new_node` that nothing refers to (any more).
    unsafe { dealloc(node.cast(), Layout::new::<Node>()) };
}

/// Pages that a tree of `height` levels covers.
#[inline]
fn reach(height: u32) -> u64 {
    1 << (BITS * height)
}

impl PageCache {
    pub(super) const fn new() -> Self {
        Self { root: AtomicPtr::new(ptr::null_mut()) }
    }

    #[inline]
    pub(super) fn get(&self, pin: &Pin<'_>, index: u64) -> Option<Frame> {
        self.slots(pin, index)?.get(index)
    }

    /// Where page `index` is.
    #[inline]
    pub(super) fn place(&self, pin: &Pin<'_>, index: u64) -> Place {
        self.slot(pin, index).map_or(Place::None, Slot::place)
    }

    /// The slot of page `index`, if it was ever made.
    #[inline]
    pub(super) fn slot<'p>(&'p self, pin: &'p Pin<'_>, index: u64) -> Option<&'p Slot> {
        self.slots(pin, index).map(|slots| &slots.slots[index as usize % SLOTS])
    }

    /// The leaf that holds page `index`.
    #[inline]
    pub(super) fn slots<'p>(&'p self, _pin: &'p Pin<'_>, index: u64) -> Option<Slots<'p>> {
        let root = self.root.load(Ordering::Acquire);
        let mut height = height_of(root);
        if height == 0 || index >= reach(height) {
            return None;
        }
        let mut node = node_of(root);
        while height > 1 {
            height -= 1;
            // SAFETY: nodes live as long as the cache, which `'p` borrows.
            let children = unsafe { &(*node).0 };
            node = children[(index >> (BITS * height)) as usize % SLOTS].load(Ordering::Acquire);
            if node.is_null() {
                return None;
            }
        }
        // SAFETY: as above; at height 1 the words are slots, which have the size and the zero of a pointer and
        // are only ever used as slots.
        let slots = unsafe { &*node.cast::<[Slot; SLOTS]>() };
        Some(Slots { first: index & !(SLOTS as u64 - 1), slots })
    }

    /// The slot of page `index`, with the nodes above it made.
    pub(super) fn make_slot<'p>(&'p self, _pin: &'p Pin<'_>, index: u64) -> Result<&'p Slot, OutOfMemory> {
        let mut root = self.root.load(Ordering::Acquire);
        while height_of(root) == 0 || (height_of(root) < MAX_HEIGHT && index >= reach(height_of(root))) {
            let node = new_node()?;
            // SAFETY: not shared yet.
            unsafe { *(*node).0[0].as_ptr() = node_of(root) };
            let taller = node.map_addr(|addr| addr | (height_of(root) as usize + 1));
            match self.root.compare_exchange(root, taller, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => root = taller,
                Err(other) => {
                    free_node(node);
                    root = other;
                }
            }
        }
        let mut node = node_of(root);
        let mut height = height_of(root);
        while height > 1 {
            height -= 1;
            // SAFETY: nodes live as long as the cache.
            let child = unsafe { &(*node).0[(index >> (BITS * height)) as usize % SLOTS] };
            let mut next = child.load(Ordering::Acquire);
            if next.is_null() {
                let fresh = new_node()?;
                next =
                    match child.compare_exchange(ptr::null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire)
                    {
                        Ok(_) => fresh,
                        Err(winner) => {
                            free_node(fresh);
                            winner
                        }
                    };
            }
            node = next;
        }
        // SAFETY: as in `slots`.
        Ok(unsafe { &(*node.cast::<[Slot; SLOTS]>())[index as usize % SLOTS] })
    }

    /// Calls `visit` for each page in memory or in swap from page `first` on, ascending, until it returns false.
    pub(super) fn for_each_until(&self, first: u64, mut visit: impl FnMut(u64, &Slot) -> bool) {
        let root = self.root.load(Ordering::Acquire);
        if height_of(root) > 0 {
            // SAFETY: nodes live as long as the cache.
            unsafe { walk(node_of(root), height_of(root), 0, first, &mut visit) };
        }
    }
}

/// Returns false once `visit` has.
///
/// # Safety
/// `node` is a live node of `height`, whose first page is `base`.
unsafe fn walk(
    node: *mut Node,
    height: u32,
    base: u64,
    first: u64,
    visit: &mut impl FnMut(u64, &Slot) -> bool,
) -> bool {
    let span = reach(height - 1);
    let skip = (first.saturating_sub(base) / span).min(SLOTS as u64);
    for child in skip..SLOTS as u64 {
        let start = base + child * span;
        if height == 1 {
            // SAFETY: at height 1 the words are slots.
            let slot = unsafe { &(*node.cast::<[Slot; SLOTS]>())[child as usize] };
            if slot.place() != Place::None && !visit(start, slot) {
                return false;
            }
        } else {
            // SAFETY: the node is live.
            let next = unsafe { &(*node).0[child as usize] }.load(Ordering::Acquire);
            // SAFETY: a child of a live node is live, and one level lower.
            if !next.is_null() && !unsafe { walk(next, height - 1, start, first, visit) } {
                return false;
            }
        }
    }
    true
}

/// # Safety
/// `node` is a node of `height` that nothing else refers to.
unsafe fn free_tree(node: *mut Node, height: u32) {
    if height > 1 {
        for child in 0..SLOTS {
            // SAFETY: exclusively ours.
            let next = unsafe { (*node).0[child].load(Ordering::Relaxed) };
            if !next.is_null() {
                // SAFETY: as above, one level lower.
                unsafe { free_tree(next, height - 1) };
            }
        }
    }
    free_node(node);
}

impl Drop for PageCache {
    fn drop(&mut self) {
        let root = self.root.load(Ordering::Relaxed);
        if height_of(root) > 0 {
            // SAFETY: `&mut self`: nobody reads any more.
            unsafe { free_tree(node_of(root), height_of(root)) };
        }
    }
}

#[cfg(terrane_watch)]
impl crate::names::Describe for PageCache {
    fn describe(&self, names: &mut crate::names::Names) {
        names.field("root", &self.root);
        self.for_each_until(0, |index, slot| {
            names.under(format_args!("page {index}"), |names| names.leaf(slot));
            true
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Epoch;
    use alloc::vec::Vec;

    #[test]
    fn pages_far_apart_are_found_again_in_order() {
        let epoch = Epoch::try_new(1).unwrap();
        let cpu = epoch.register().unwrap();
        let pin = cpu.pin();
        let cache = PageCache::new();
        let indexes = [0u64, 1, 63, 64, 65, 4095, 4096, 1 << 20, (1 << 40) + 5, (1 << 52) - 1];
        for (n, &index) in indexes.iter().enumerate() {
            assert_eq!(cache.get(&pin, index), None);
            cache.make_slot(&pin, index).unwrap().fill(Frame(n as u32)).unwrap();
            assert_eq!(
                cache.make_slot(&pin, index).unwrap().fill(Frame(99)),
                Err(Place::Frame(Frame(n as u32)))
            );
        }
        for (n, &index) in indexes.iter().enumerate() {
            assert_eq!(cache.get(&pin, index), Some(Frame(n as u32)));
        }
        let mut seen = Vec::new();
        cache.for_each_until(1, |index, _| {
            seen.push(index);
            index < 1 << 40
        });
        assert_eq!(seen, &indexes[1..9]);
        assert_eq!(cache.make_slot(&pin, 64).unwrap().clear(), Place::Frame(Frame(3)));
        assert_eq!(cache.get(&pin, 64), None);
    }
}
