//! The address index: disjoint ranges by address, read without locks, with a search for free addresses.
//!
//! A B+tree over entries `start..end`, keyed by start. It knows of an entry what [`Entry`] says, and of nothing else.
//!
//! | file | what is in it |
//! |---|---|
//! | `node` | leaves and inner nodes, and the order in which they are written |
//! | `find` | the way down: lookups without locks, exact queries |
//! | `write` | insertion, removal, moves; splits and merges |
//! | `gaps` | gap hints and the search for free addresses |
//! | `reserve` | nodes set aside, so that a change cannot fail |
//!
//! # What it guarantees
//!
//! 1. A lookup ([`Index::find`]) takes no lock, waits for nobody and writes nothing that another CPU reads.
//! 2. A lookup finds every entry that was in place before it began and that nobody changed meanwhile, whatever happens
//!    to its neighbours. What it returns says itself that it contains the address. A miss is never proof of absence.
//! 3. Queries under the layout lock are exact.
//! 4. After [`Index::reserve`] no change fails, and none allocates.
//! 5. The search for free addresses is exact; hints only decide where it looks first.
//!
//! # Lookups beside a writer
//!
//! **A leaf is not sorted.** A lookup compares all its keys and takes the entry with the greatest start at or below the
//! address; a free slot has a key above all addresses. So an insertion is one store that counts (the key, after entry
//! and end), a removal is one store, and a move is one store: there is no moment at which entries are being shifted,
//! and a change disturbs lookups of the changed entry only. In a sorted leaf a lookup would have to check a version
//! and start again: every insertion would disturb up to fifteen neighbours. Writers, who come one at a time, keep the
//! order beside the slots in one word.
//!
//! A slot may be given to another entry between the look at its key and the look at its pointer. Then the entry found
//! does not contain the address, or if it does, it is a right answer. The entry sought was not the one in that slot,
//! if nobody changed it: no other key lies between its start and the address.
//!
//! **Inner nodes never change their children.** A split or a merge builds new nodes up to the first inner node that
//! can exchange one child, and one store there publishes all of it. The old nodes stay as they were for those who are
//! in them, are marked obsolete before the new ones can be written to, and go through the
//! [epoch](crate::sync::epoch). A lookup that ends in an obsolete leaf without a hit starts again.
//!
//! **Separators do change, in place.** Every entry lies wholly in the span of its leaf, so that one descent decides. An
//! entry that grows beyond it takes the separator along (`raise_fence` in `write`). Separators are
//! compared independently of one another, and each is on the same side of an unchanged entry at any time: any mixture
//! of old and new values leads to the same child.
//!
//! Why right: an unchanged entry is in exactly one leaf at a time, or in an old leaf and its copy; every root ever
//! published since it was inserted leads to one of these; and no store to its leaf moves it.
//!
//! # Gap hints
//!
//! Each inner node has for each child an upper bound on the largest gap *before* an entry below the child. The gap
//! before the first entry of a leaf begins in an earlier leaf. A permanent sentinel at the end of the limits makes the
//! last gap one like the others.
//!
//! - A hint is **never too low**, and never lower than the hints below it.
//! - Freeing addresses raises hints from the leaf upwards and stops at the first that is high enough: the second
//!   invariant says that all above it are, too.
//! - Taking addresses writes no hint. (One exception: an entry that becomes the last of its leaf takes over a part of
//!   a gap that was counted for a later leaf. Then hints are compared, and raised if need be.)
//! - A search that finds a hint too high lowers it on its way: a leaf's to what it found, an inner node's to the
//!   highest below it. So each wrong hint costs one look, once.
//!
//! Unmapping a range and mapping it again writes nothing above the leaf. Linux keeps exact gaps up to the root in
//! every node, on every change.
//!
//! # Who may break it
//!
//! Two writers at once, or one with a [`Reserve`] of another index; an entry that is freed without a grace period; a
//! caller that takes a miss without the layout lock for an answer.
//!
//! **Parallel writers**, should they come, need three things more: a lock in each leaf, held by whoever changes the leaf
//! or lowers its hint; a second look at the leaf after its hint was lowered, or a raise between look and store is lost;
//! and the separators of an inner node under the lock of that node.
//!
//! # Constants
//!
//! Best of 40 runs on a busy two-core virtual machine (Zen 3), a pin included in each lookup, the record of 128 bytes
//! touched by each hit; `BTreeMap`, without pin and record, in the same run. Fill at random; bytes an entry at 64 Ki entries.
//!
//! | leaf, fan-out | lookup, 64 entries | 1 Ki | bytes an entry |
//! |---|---|---|---|
//! | 16, 32 | 18 ns | 29 ns | 44 |
//! | 24, 32 | 20.5 ns | 30 ns | 41 |
//! | 32, 32 | 24 ns | 34 ns | 39.5 |
//! | 16, 64 | 22 ns | 36 ns | 44 |
//! | `BTreeMap` | 28 ns | 47 ns | |
//!
//! Sixteen slots also let the order of a leaf be one word, which took a removal and an insertion at 64 entries from
//! 103 to 86 ns (`BTreeMap`: 79). At 64 Ki entries memory decides: 160 ns, where a `BTreeMap` that leads to the same
//! records needs 240. Keys apart from entry pointers, in two cache lines, were no slower than pairs in four, nor
//! did prefetching help. Separators are compared in two steps of independent comparisons: comparing all 32 took 10 ns
//! more a level, as did binary search.
//!
//! Ascending and descending runs of insertions leave full leaves (30 bytes an entry).
//!
//! # Source
//!
//! Requirements C1 to C3: R. van Riel, "mm: scalable and unified arch_get_unmapped_area" (2012), and the reply that
//! measured what its upkeep costs and asked for a lazy one. Unsorted leaves in which one store publishes: I. Oukid et
//! al., "FPTree" (SIGMOD 2016).

use crate::addr::{AddrRange, page_ceil, page_floor};
use crate::error::OutOfMemory;
use crate::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use crate::sync::{SpinLock, Tally};
use core::marker::PhantomData;
use core::ptr;
use crossbeam_utils::CachePadded;

mod find;
mod gaps;
mod graft;
mod node;
mod reserve;
mod shape;
#[cfg(test)]
mod tests;
mod write;

pub use reserve::Reserve;
pub use write::Edit;

use node::{Item, Leaf};

/// Entries a leaf has room for.
pub const LEAF_SLOTS: usize = 16;
/// Children an inner node has room for.
pub const FANOUT: usize = 32;
/// Levels of inner nodes at most. `Index::reserve` refuses more.
const MAX_HEIGHT: usize = 10;

/// What can be put into an [`Index`]: something that covers a range of addresses.
///
/// # Safety
/// A pointer that is handed to an [`Index`] points to a live value, which is not freed before the index has given it
/// back (or was dropped) and then a grace period of the epoch has passed; and it may be used from any thread. All
/// changes of one index are made with one [`Reserve`], which belongs to that index alone.
pub unsafe trait Entry {
    /// The first address inside, in bytes, page aligned.
    fn start(&self) -> u64;

    /// The first address behind, in bytes, page aligned.
    fn end(&self) -> u64;

    /// Bytes below the entry that [`Index::search`] leaves free, page aligned: the guard gap of a stack that grows
    /// down.
    fn guard_below(&self) -> u64 {
        0
    }
}

/// From which end free addresses are taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// The highest that fit.
    TopDown,
    /// The lowest that fit.
    BottomUp,
}

/// Which free addresses are wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GapRequest {
    /// How many bytes; rounded up to whole pages.
    pub length: u64,
    /// The first address that may be used.
    pub low: u64,
    /// The first address that may not be used any more.
    pub high: u64,
    /// Which of several gaps.
    pub direction: Direction,
    /// A power of two minus one: the result agrees with `align_offset` in these bits. Page alignment always holds.
    pub align_mask: u64,
    /// The bits to agree with.
    pub align_offset: u64,
}

/// What lookups read, apart from what writers write.
struct Top {
    /// The root node and, in the low bits, how many inner nodes are above a leaf.
    root: AtomicPtr<()>,
    limits: AddrRange,
    gaps: bool,
}

/// Disjoint page-aligned ranges by address. See the [module](self).
pub struct Index<T: Entry, const N: usize = LEAF_SLOTS, const F: usize = FANOUT> {
    top: CachePadded<Top>,
    len: Tally,
    /// The structure lock: held by whoever changes more than one leaf.
    shape: SpinLock<()>,
    bytes: AtomicUsize,
    entries: PhantomData<*const T>,
}

// SAFETY: fields are atomics or never change; entries may be used from any thread (contract of `Entry`).
unsafe impl<T: Entry + Sync, const N: usize, const F: usize> Sync for Index<T, N, F> {}
// SAFETY: as above.
unsafe impl<T: Entry + Sync, const N: usize, const F: usize> Send for Index<T, N, F> {}

impl<T: Entry, const N: usize, const F: usize> Index<T, N, F> {
    /// An index without entries for addresses inside `limits`, which are narrowed to whole pages. With `gaps` false
    /// it keeps no gap hints, and [`search`](Self::search) looks at every entry.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_new(limits: AddrRange, gaps: bool) -> Result<Self, OutOfMemory> {
        let end = page_floor(limits.end);
        let limits = AddrRange { start: page_ceil(limits.start).unwrap_or(end).min(end), end };
        let index = Self {
            top: CachePadded::new(Top { root: AtomicPtr::new(ptr::null_mut()), limits, gaps }),
            len: Tally::new(),
            shape: SpinLock::new(()),
            bytes: AtomicUsize::new(0),
            entries: PhantomData,
        };
        let mut reserve = Reserve::<T, N, F>::new();
        reserve.leaves.fill(1)?;
        let leaf = index.make(&mut reserve.leaves, Leaf::new(0, u64::MAX));
        // SAFETY: made just now.
        unsafe { &*leaf }.lock().push(Item { start: end, end: u64::MAX, entry: ptr::null_mut() });
        index.set_root(leaf.cast(), 0);
        Ok(index)
    }

    /// The addresses that entries may cover.
    pub fn limits(&self) -> AddrRange {
        self.top.limits
    }

    /// Entries in the index; while others change it, some number between.
    pub fn len(&self) -> usize {
        usize::try_from(self.len.sum()).unwrap_or(0)
    }

    /// True when there is no entry.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the nodes in use. Entries, nodes set aside and nodes that wait for the end of their grace period do
    /// not count.
    pub fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }
}

impl<T: Entry, const N: usize, const F: usize> Drop for Index<T, N, F> {
    fn drop(&mut self) {
        let (root, height) = self.root();
        if !root.is_null() {
            // SAFETY: `&mut self`: nobody reads any more, and nobody will.
            unsafe { Self::free_below(root, height) };
        }
    }
}

#[cfg(terrane_watch)]
impl<T: Entry, const N: usize, const F: usize> Index<T, N, F> {
    /// The names of its fields, for the cache-line audit.
    pub fn describe(&self, names: &mut crate::names::Names) {
        names.leaf(self);
        names.under("top", |names| names.leaf(&self.top));
        names.under("count", |names| names.leaf(&self.count));
    }
}
