//! The address index: disjoint ranges by address, read without locks, changed side by side, with a search for free addresses.
//!
//! A B+tree over entries `start..end`, keyed by start. It knows of an entry what [`Entry`] says, and of nothing else.
//!
//! | file | what is in it |
//! |---|---|
//! | `node` | leaves and inner nodes, the lock of a leaf, and the order in which a leaf is written |
//! | `find` | the way down: lookups without locks, exact queries |
//! | `write` | changes of entries: insertion, removal, moves, division, joining |
//! | `widen` | an entry that grows, for a caller that does not hold the addresses |
//! | `shape` | changes of more than one leaf: splits, merges, separators that move |
//! | `graft` | inner nodes copied and published |
//! | `gaps` | gap hints and the search for free addresses |
//! | `reserve` | nodes set aside, so that a change cannot fail |
//! | `pool` | room for leaves in large pieces, for hosts that back them by huge pages |
//!
//! # What it guarantees
//!
//! 1. A lookup ([`Index::find`]) takes no lock, waits for nobody and writes nothing that another CPU reads.
//! 2. A lookup finds every entry that was in place before it began and that nobody changed meanwhile, whatever happens
//!    to its neighbours. What it returns is to be checked by the entry's own word. A miss is never proof of absence.
//! 3. **Callers exclude each other by addresses, and by nothing else**: whoever holds a range (see
//!    [`range_lock`](crate::range_lock)) changes what is in it, while others change what is beside it, in the same leaf, or
//!    even in the same entry. What queries say of addresses that the caller holds is exact.
//! 4. A change of an entry is a short critical section under the lock of its leaf, in which the caller changes its record
//!    as well ([`Index::edit`]): both change together for everybody who takes that lock.
//! 5. After [`Index::reserve`] no change fails. None allocates, unless others let the tree grow by two levels meanwhile.
//! 6. The search for free addresses is exact in addresses that the caller holds, else it names a candidate; hints only
//!    decide where it looks first.
//!
//! # Lookups beside writers
//!
//! **A leaf is not sorted.** A lookup compares all its keys and takes the entry with the greatest start at or below the
//! address; a free slot has a key above all addresses. So an insertion is one store that counts (the key, after entry
//! and end), a removal is one store, and a move is one store: there is no moment at which entries are being shifted,
//! and a change disturbs lookups of the changed entry only. In a sorted leaf a lookup would have to check a version
//! and start again: every insertion would disturb up to fifteen neighbours. Writers keep the order beside the slots in
//! one word, under the lock of the leaf.
//!
//! A slot may be given to another entry between the look at its key and the look at its pointer and end. Then the key has
//! changed, and the lookup has missed. The entry sought was not the one in that slot, if nobody changed it: no other key
//! lies between its start and the address. The end is read from the leaf, not from the record: among 64 Ki entries
//! the record's cache miss cost as much as all the rest.
//!
//! **Inner nodes never change their children.** A split or a merge builds new nodes up to the first inner node that
//! can exchange one child, and one store there publishes all of it. The old nodes stay as they were for those who are
//! in them, are marked obsolete before the new ones can be written to, and go through the
//! [epoch](crate::sync::epoch).
//!
//! **Separators do change, in place.** Every entry lies wholly in the span of its leaf, so that one descent decides. An
//! entry that grows beyond it takes the separator along (`raise_separators` in `shape`). Separators are
//! compared independently of one another, and each is on the same side of an unchanged entry at any time: any mixture
//! of old and new values leads to the same child.
//!
//! Why right: an unchanged entry is in exactly one leaf at a time, or in an old leaf and its copy; every root ever
//! published since it was inserted leads to one of these; and no store to its leaf moves it.
//!
//! # Writers beside writers
//!
//! **One leaf.** Each leaf has a spin lock, in the cache line that holds its order and its length, which lookups do not read. A
//! change of one leaf goes down without locks, takes the lock, and looks whether the leaf is not obsolete and whether the address
//! is in its span, which the leaf itself knows: separators are moved under the locks of the leaves on both sides, which get
//! their new spans before. So there is no second descent. If the leaf is the wrong one, it starts over.
//!
//! **More than one leaf**: splits, merges, separators, the root. One lock for the structure of the index, taken *before* those of
//! leaves. Whoever finds under a leaf's lock that it needs the structure lock gives the leaf back and starts over. So
//! whoever holds a leaf without the structure lock waits for nobody, and whoever holds the structure lock may wait for any
//! leaf. A split happens once in eight insertions, and for a microsecond; a merge is left undone when the lock is taken.
//!
//! **Whose separators.** A separator moves inside free addresses of the caller that moves it, or (in
//! [`Index::join`]) inside an entry of which it may hold only a part: that is why the span is looked at under the lock.
//!
//! **The lock is a version as well**: odd while held, and another even number after. Queries that need more of a leaf
//! than a lookup (exact ones, iteration, search) read a state of it, look whether the version is still the same, and go on to
//! the next leaf by address, from the end of the span. They write nothing, so that a listing or a search does not take
//! lines away from writers; after some vain attempts they take the lock.
//!
//! **An obsolete leaf may be read.** It is as it was when its successor was published. Who came to it began its descent before
//! that, so it is a state of a moment of the query. What a query may not do is lower hints by it.
//!
//! What two writers in different leaves have in common: nothing that both write. They read the upper nodes, which
//! change once in a split; removing the first or the last entry of a leaf reads the leaf beside, for the gap that lies
//! between the two; and a hint that is too low is raised, once until a search lowers it.
//!
//! # Gap hints
//!
//! Each inner node has for each child an upper bound on the largest gap that touches the child's span. Freeing addresses raises
//! hints where they are too low; taking addresses writes none; a search that finds a hint too high lowers it on its
//! way, so that each wrong hint costs one look, once. How that is right beside each other is in the head of `gaps`. A permanent
//! sentinel at the end of the limits makes the last gap one like the others.
//!
//! Unmapping a range and mapping it again writes nothing above the leaf. Linux keeps exact gaps up to the root in
//! every node, on every change.
//!
//! # Who may break it
//!
//! Two callers that change the same addresses; an entry that is freed without a grace period; a caller that takes a miss
//! of [`Index::find`] for an answer; an `act` (of [`Index::edit`] and its like) that blocks or comes back into the index.
//!
//! # Constants
//!
//! Best of 40 runs on a busy two-core virtual machine (Zen 3), a pin included in each lookup, when a hit still touched
//! the record of 128 bytes; `BTreeMap`, without pin and record, in the same run. Fill at random; bytes an entry at 64 Ki
//! entries.
//!
//! | leaf, fan-out | lookup, 64 entries | 1 Ki | bytes an entry |
//! |---|---|---|---|
//! | 16, 32 | 18 ns | 29 ns | 44 |
//! | 24, 32 | 20.5 ns | 30 ns | 41 |
//! | 32, 32 | 24 ns | 34 ns | 39.5 |
//! | 16, 64 | 22 ns | 36 ns | 44 |
//! | `BTreeMap` | 28 ns | 47 ns | |
//!
//! Today, the record not touched, the second of a hundred of some hundred batches on the same machine (the least that it
//! needs; others work beside it). A removal and an insertion, each with its pin, its look at the reserve and the leaf's lock:
//!
//! | | 64 entries | 1 Ki |
//! |---|---|---|
//! | lookup | 15.3 ns | 24.1 ns |
//! | the same with sums that wait for every comparison, and keys the right way up | 19.6 ns | 30.0 ns |
//! | removal and insertion | 78 ns | 99 ns |
//!
//! The pin is 3.1 ns of it, the rest a chain of loads and comparisons each of which waits for the one before, whose latencies
//! add up to just that; and the pin is a fence, so that lookups do not overlap. Nodes of 64 children, with seven comparisons
//! in both steps, took 1.5 ns more.
//!
//! At 64 Ki entries the lines of the leaf decide, 2 MiB of them. Its keys and, behind them, its slot were two misses, one after the
//! other; now all six lines are fetched together, which takes a quarter to a third away (210 to 165 ns where others used
//! the cache as well), and nothing is lost where they are at hand. Where a host has memory backed by huge pages, the leaves of an index
//! of more than a thousand entries lie in pieces of 2 MiB (`pool`), which takes another third (152 to 102 ns).
//!
//! Sixteen slots also let the order of a leaf be one word, which took a removal and an insertion at 64 entries from
//! 103 to 86 ns. Entry and end of a slot lie side by side, so that a hit reads three lines of its leaf. Keys apart from them, in
//! two cache lines, were no slower than all in four. Separators are compared in two steps of
//! independent comparisons: comparing all 32 took 10 ns more a level, as did binary search.
//!
//! Ascending and descending runs of insertions leave full leaves (30 bytes an entry).
//!
//! # Source
//!
//! Requirements C1 to C3: R. van Riel, "mm: scalable and unified arch_get_unmapped_area" (2012), and the reply that
//! measured what its upkeep costs and asked for a lazy one. Unsorted leaves in which one store publishes: I. Oukid et
//! al., "FPTree" (SIGMOD 2016). Leaves that know their span, so that a descent without locks can be checked at its end: P. Lehman
//! and S. Yao, "Efficient locking for concurrent operations on B-trees" (1981). Locks that are versions: Y. Mao et al.,
//! "Masstree" (EuroSys 2012).

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
mod pool;
mod reserve;
mod shape;
#[cfg(test)]
mod tests;
mod widen;
mod write;

pub use pool::LeafPool;
pub use reserve::Reserve;
pub use write::{Alone, Edit};

use node::{Item, Leaf};

/// Entries a leaf has room for.
pub const LEAF_SLOTS: usize = 16;
/// Children an inner node has room for.
pub const FANOUT: usize = 32;
/// Levels of inner nodes at most. `Index::reserve` refuses more.
const MAX_HEIGHT: usize = 10;
/// Bytes of nodes from which on an index takes its leaves from its pool: so that few mappings take no 2 MiB.
const POOL_FROM: usize = 64 << 10;

/// What can be put into an [`Index`]: something that covers a range of addresses.
///
/// # Safety
/// A pointer that is handed to an [`Index`] points to a live value, which is not freed before the index has given it
/// back (or was dropped) and then a grace period of the epoch has passed; and it may be used from any thread.
pub unsafe trait Entry {
    /// The first address inside, in bytes, page aligned.
    fn start(&self) -> u64;

    /// The first address behind, in bytes, page aligned.
    fn end(&self) -> u64;

    /// The most that [`guard_below`](Self::guard_below) ever says: lets searches do without a look at entries that are
    /// further away.
    const GUARD_MAX: u64 = u64::MAX;

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
    pool: Option<LeafPool>,
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
        Self::try_new_in(limits, gaps, None)
    }

    /// The same, with leaves from `pool`, if there is one, once there are many.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_new_in(limits: AddrRange, gaps: bool, pool: Option<&LeafPool>) -> Result<Self, OutOfMemory> {
        let end = page_floor(limits.end);
        let limits = AddrRange { start: page_ceil(limits.start).unwrap_or(end).min(end), end };
        let index = Self {
            top: CachePadded::new(Top { root: AtomicPtr::new(ptr::null_mut()), limits, gaps }),
            len: Tally::try_new()?,
            shape: SpinLock::new(()),
            bytes: AtomicUsize::new(0),
            pool: pool.filter(|pool| pool.fits(size_of::<Leaf<T, N>>())).cloned(),
            entries: PhantomData,
        };
        let mut reserve = Reserve::<T, N, F>::new();
        reserve.leaves.fill(1, || None)?;
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
impl<T: Entry, const N: usize, const F: usize> crate::names::Describe for Index<T, N, F> {
    /// All nodes too: while nobody changes the index.
    fn describe(&self, names: &mut crate::names::Names) {
        names.leaf(self);
        names.field("root", &self.top.root);
        names.field("len", &self.len);
        names.field("shape", &self.shape);
        names.field("bytes", &self.bytes);
        let (root, height) = self.root();
        let mut nodes = alloc::vec![(root, height)];
        while let Some((node, height)) = nodes.pop() {
            // SAFETY: nodes are live while nobody changes the index, and of the kind that their height says.
            unsafe {
                if height == 0 {
                    let leaf = &*node.cast::<Leaf<T, N>>();
                    names.field(format_args!("leaf[{:#x}]", leaf.low()), leaf);
                } else {
                    let inner = &*node.cast::<node::Inner<F>>();
                    names.field(format_args!("node of height {height}"), inner);
                    nodes.extend((0..inner.len()).map(|at| (inner.child(at), height - 1)));
                }
            }
        }
    }
}
