//! Changes of more than one leaf: splits, merges, and separators that move.
//!
//! One at a time, under the structure lock. It is taken before the locks of leaves, and whoever holds it may hold several
//! leaves and wait for more: those who hold a leaf and not the structure lock wait for nobody.

use super::find::{Path, Snapshot};
use super::graft::{Change, child_above, partner};
use super::node::{Child, Held, Inner, Item, Leaf, Node};
use super::reserve::{Reserve, Stash, retire};
use super::{Entry, Index, MAX_HEIGHT, POOL_FROM};
use crate::addr::is_page_aligned;
use crate::error::OutOfMemory;
use crate::sync::Pin;
use crate::sync::atomic::{Ordering, spin_loop};
use core::ptr;

/// The structure lock, held.
pub(super) type Shape<'a> = lock_api::MutexGuard<'a, crate::sync::spin::RawSpin, ()>;

/// Where insertions go on: at the upper or the lower end of a run, or anywhere.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Run {
    Up,
    Down,
    None,
}

/// How many of `total` items, one more than fit, go to the left of two nodes; the new one is number `new`.
///
/// A run fills its node to the last slot: the cut is made between the run and what lies ahead of it, so that the
/// run goes on in the same node; and if nothing lies ahead, the run goes on in a node of its own.
pub(super) fn cut(total: usize, new: usize, run: Run) -> usize {
    match run {
        Run::Up if new + 1 < total => new + 1,
        Run::Up => total - 1,
        Run::Down if new > 0 => new,
        Run::Down => 1,
        Run::None => total / 2,
    }
}

/// A node with no more than this many of `room` items may be merged. Half of [`merged`]: of two nodes that can be
/// merged, one is as small as that.
#[inline]
pub(super) const fn scant(room: usize) -> usize {
    merged(room) / 2
}

/// What two nodes may have together to be merged. A quarter less than the room, so that the result is not soon split,
/// nor the halves of a split soon merged.
pub(super) const fn merged(room: usize) -> usize {
    room * 3 / 4
}

/// Where a full leaf is divided.
struct Cut {
    /// How many entries go to the left.
    left: usize,
    /// The separator between the two.
    from: u64,
    run: Run,
    /// The right leaf begins at a fence.
    fenced: bool,
}

/// Two leaves that are neighbours but for leaves without entries, or one leaf twice; locked.
pub(super) struct Span<'p, T, const N: usize, const F: usize> {
    paths: [Path<'p, T, N, F>; 2],
    first: Held<'p, T, N>,
    /// `None` if it is the first.
    last: Option<Held<'p, T, N>>,
}

impl<'p, T, const N: usize, const F: usize> Span<'p, T, N, F> {
    pub(super) fn first(&self) -> &Held<'p, T, N> {
        &self.first
    }

    pub(super) fn last(&self) -> &Held<'p, T, N> {
        self.last.as_ref().unwrap_or(&self.first)
    }

    /// Lets the first leaf reach up to `end`, which is inside the last one's span or its end.
    pub(super) fn raise_fence(&self, end: u64) {
        let Some(last) = self.last.as_ref().filter(|_| self.first.high() < end) else { return };
        self.empty_between(end);
        last.set_span(end, last.high());
        self.first.set_span(self.first.low(), end);
        raise_separators(&self.paths[0], end);
    }

    /// Lets the last leaf reach down to `start`, which is inside the first one's span.
    pub(super) fn lower_fence(&self, start: u64) {
        let Some(last) = self.last.as_ref().filter(|last| start < last.low()) else { return };
        self.empty_between(start);
        self.first.set_span(self.first.low(), start);
        if self.first.low() == start && self.first.is_fenced() {
            // It has been swallowed whole, and its border is the last one's now.
            last.set_fenced(true);
        }
        last.set_span(start, last.high());
        lower_separators(&self.paths[1], start);
    }

    /// Leaves the leaves between without a span, at `border`.
    fn empty_between(&self, border: u64) {
        let mut path = self.paths[0];
        while path.step(true) && !ptr::eq(path.leaf(), self.paths[1].leaf()) {
            path.leaf().lock().set_span(border, border);
        }
    }
}

impl<T: Entry, const N: usize, const F: usize> Index<T, N, F> {
    /// Leaves and inner nodes that `inserts` insertions may need.
    ///
    /// An insertion that splits needs two leaves, and at every level above either one copy of the inner node or, if
    /// it is full, two; and a new root when the old one is full. Others may have let the tree grow until then: one level
    /// is allowed for. (A tree that has grown by one level has a root with two children: for more, one call would have
    /// to be overtaken by thousands of insertions. What is still missing then is allocated on the spot.)
    fn need(&self, inserts: usize) -> (usize, usize) {
        let (_, height) = self.root();
        // Levels grow by one for every full root, which takes F - 2 further splits to be full again.
        (2 * inserts, inserts * (2 * (height + 1 + inserts / (F - 1)) + 1))
    }

    /// Sets nodes aside: after it, `inserts` insertions or divisions and any number of other changes cannot fail.
    ///
    /// Call it before a call commits to anything, also with `inserts` = 0: then removals have what they need to merge
    /// nodes, which they leave undone without.
    ///
    /// # Errors
    /// [`OutOfMemory`]; the index is as it was.
    #[inline]
    pub fn reserve(&self, reserve: &mut Reserve<T, N, F>, inserts: usize) -> Result<(), OutOfMemory> {
        let (_, height) = self.root();
        if height + 3 + inserts / (F - 1) > MAX_HEIGHT {
            return Err(OutOfMemory);
        }
        let (leaves, inners) = self.need(inserts);
        reserve.promised = 0;
        let pool = || self.pool.as_ref().filter(|_| self.bytes() >= POOL_FROM);
        reserve.leaves.fill(leaves + height.min(1), pool)?;
        // One copy above merged leaves; a merged node and a copy at each level above that.
        reserve.inners.fill(inners + (2 * height).saturating_sub(1), || None)?;
        reserve.promised = inserts;
        Ok(())
    }

    /// True when the reserve holds that many nodes beyond what insertions have been promised.
    pub(super) fn may_spend(&self, reserve: &Reserve<T, N, F>, leaves: usize, inners: usize) -> bool {
        let need = self.need(reserve.promised);
        reserve.leaves.len() >= need.0 + leaves && reserve.inners.len() >= need.1 + inners
    }

    /// Inner nodes that a split of the path's leaf takes.
    fn inners_for_split(path: &Path<'_, T, N, F>) -> usize {
        let full = (0..path.height()).rev().take_while(|&depth| path.inner(depth).len() == F).count();
        2 * full + 1
    }

    /// True when the reserve has not what a split of the path's leaf takes.
    fn lacks(reserve: &Reserve<T, N, F>, path: &Path<'_, T, N, F>) -> bool {
        reserve.leaves.len() < 2 || reserve.inners.len() < Self::inners_for_split(path)
    }

    /// The leaf for a new entry, with room for it, locked. Separators inside its range have given way.
    #[cold]
    pub(super) fn make_room<'p>(
        &'p self,
        reserve: &mut Reserve<T, N, F>,
        pin: &'p Pin<'_>,
        new: Item<T>,
    ) -> Held<'p, T, N> {
        loop {
            let shape = self.shape.lock();
            self.lock_span(&shape, pin, new.start, new.end - 1).raise_fence(new.end);
            let path = self.path(pin, new.start);
            let leaf = path.leaf().lock();
            if leaf.len() < N {
                return leaf;
            }
            if Self::lacks(reserve, &path) {
                drop((leaf, shape));
                Self::supply(reserve, &path);
                continue;
            }
            let rank = leaf.rank(new.start);
            let run = if rank > 0 && leaf.is_recent(rank - 1) {
                Run::Up
            } else if rank < N && leaf.is_recent(rank) {
                Run::Down
            } else {
                Run::None
            };
            // Among the new one and the others.
            let all = cut(N + 1, rank, run);
            let goes_left = rank < all;
            let left = all - usize::from(goes_left);
            let left_end = if goes_left && rank == left { new.end } else { leaf.end(left - 1) };
            let right_start = if !goes_left && rank == left { new.start } else { leaf.start(left) };
            // Between the two lies a gap, and what is inserted there next belongs to the leaf with more room.
            let from = if all > N / 2 { left_end } else { right_start };
            let [left, right] =
                self.split(&shape, reserve, pin, &path, leaf, Cut { left, from, run, fenced: false });
            return if goes_left { left } else { right };
        }
    }

    /// The leaf of the entry that contains `addr`, with room for `inserts` more, locked. `None` when there is no such entry.
    #[cold]
    pub(super) fn make_room_beside<'p>(
        &'p self,
        reserve: &mut Reserve<T, N, F>,
        pin: &'p Pin<'_>,
        addr: u64,
        inserts: usize,
    ) -> Option<Held<'p, T, N>> {
        loop {
            let shape = self.shape.lock();
            let path = self.path(pin, addr);
            let leaf = path.leaf().lock();
            let rank = leaf.rank_at(addr)?;
            let len = leaf.len();
            if len + inserts <= N {
                return Some(leaf);
            }
            if Self::lacks(reserve, &path) {
                drop((leaf, shape));
                Self::supply(reserve, &path);
                continue;
            }
            // A run of divisions fills its leaf, as a run of insertions does.
            let (left, run) = if rank >= inserts && leaf.is_recent(rank) {
                (rank, Run::Up)
            } else if rank + 1 < len && len - (rank + 1) >= inserts && leaf.is_recent(rank + 1) {
                (rank + 1, Run::Down)
            } else {
                (len / 2, Run::None)
            };
            let from = if left > N / 2 { leaf.end(left - 1) } else { leaf.start(left) };
            let goes_left = rank < left;
            let [left, right] =
                self.split(&shape, reserve, pin, &path, leaf, Cut { left, from, run, fenced: false });
            return Some(if goes_left { left } else { right });
        }
    }

    /// Keeps a border of leaves at `at` (page aligned) from now on: entries below and above it share no leaf. Unless an entry
    /// spans it; then the border is where that entry ends, or nowhere. For parts of the address space that different
    /// CPUs work in.
    ///
    /// # Errors
    /// [`OutOfMemory`]; the index is as it was.
    pub fn fence(&self, reserve: &mut Reserve<T, N, F>, pin: &Pin<'_>, at: u64) -> Result<(), OutOfMemory> {
        debug_assert!(is_page_aligned(at));
        if at <= self.top.limits.start || self.top.limits.end <= at {
            return Ok(());
        }
        loop {
            let shape = self.shape.lock();
            let path = self.path(pin, at);
            let leaf = path.leaf().lock();
            if leaf.low() == at {
                leaf.set_fenced(true);
                return Ok(());
            }
            let left = leaf.rank(at);
            if left > 0 && leaf.end(left - 1) > at {
                return Ok(());
            }
            if Self::lacks(reserve, &path) {
                drop((leaf, shape));
                reserve.leaves.fill(2, || None)?;
                reserve.inners.fill(Self::inners_for_split(&path), || None)?;
                continue;
            }
            self.split(
                &shape,
                reserve,
                pin,
                &path,
                leaf,
                Cut { left, from: at, run: Run::None, fenced: true },
            );
            return Ok(());
        }
    }

    /// Sets aside what a split of the path's leaf takes, however long there is no memory.
    fn supply(reserve: &mut Reserve<T, N, F>, path: &Path<'_, T, N, F>) {
        let inners = Self::inners_for_split(path);
        while reserve.leaves.fill(2, || None).and_then(|()| reserve.inners.fill(inners, || None)).is_err() {
            spin_loop();
        }
    }

    /// The leaves of two addresses, locked, between which there are no entries.
    pub(super) fn lock_span<'p>(
        &'p self,
        _: &Shape<'_>,
        pin: &'p Pin<'_>,
        from: u64,
        to: u64,
    ) -> Span<'p, T, N, F> {
        let paths = [self.path(pin, from), self.path(pin, to)];
        let first = paths[0].leaf().lock();
        let last = (!ptr::eq(paths[0].leaf(), paths[1].leaf())).then(|| paths[1].leaf().lock());
        Span { paths, first, last }
    }

    /// Puts two leaves in the place of one. Both are locked still.
    fn split<'p>(
        &'p self,
        _: &Shape<'_>,
        reserve: &mut Reserve<T, N, F>,
        pin: &'p Pin<'_>,
        path: &Path<'p, T, N, F>,
        old: Held<'p, T, N>,
        cut: Cut,
    ) -> [Held<'p, T, N>; 2] {
        let seen = Snapshot::of(&old);
        let left = self.make(&mut reserve.leaves, Leaf::new(seen.low, cut.from));
        let right = self.make(&mut reserve.leaves, Leaf::new(cut.from, seen.high));
        // SAFETY: fresh; once published, live under the pin.
        let leaves: [&'p Leaf<T, N>; 2] = unsafe { [&*left, &*right] };
        let leaves = leaves.map(Leaf::lock);
        for (nth, &item) in seen.items().iter().enumerate() {
            leaves[usize::from(nth >= cut.left)].push(item);
        }
        for leaf in &leaves {
            leaf.forget_recent();
        }
        leaves[0].set_fenced(old.is_fenced());
        leaves[1].set_fenced(cut.fenced);
        if let Some(depth) = path.height().checked_sub(1) {
            // Before anything is read that hints are made of: who frees addresses beside the leaf and does not see
            // this, has freed them before.
            path.inner(depth).retire_from_now();
        }
        let gap = |low, high| if self.top.gaps { self.largest_gap(pin, &seen, low, high) } else { 0 };
        let items = [
            Child { node: left.cast(), from: seen.low, gap: gap(seen.low, cut.from) },
            Child { node: right.cast(), from: cut.from, gap: gap(cut.from, seen.high) },
        ];
        old.retire_from_now();
        let change = &mut Change { reserve, pin, path: *path };
        self.graft(change, path.height(), (child_above(path, path.height()), 1), &items, cut.run);
        drop(old);
        self.discard(pin, path.leaf());
        leaves
    }

    /// Merges the leaf of `addr` with a neighbour when both together leave a quarter of a leaf free, and so on upwards. Never
    /// takes what insertions have been promised, and leaves it undone while another changes the structure.
    #[cold]
    pub(super) fn merge(&self, reserve: &mut Reserve<T, N, F>, pin: &Pin<'_>, addr: u64) {
        let Some(_shape) = self.shape.try_lock() else { return };
        let path = self.path(pin, addr);
        let Some((depth, first)) = Self::may_merge(&path) else { return };
        if !self.may_spend(reserve, 1, 1) {
            return;
        }
        let inner = path.inner(depth);
        let leaf = |at: usize| Self::leaf_below(inner, at);
        let olds = [leaf(first).lock(), leaf(first + 1).lock()];
        if !Self::fits(inner, first) {
            return;
        }
        debug_assert!(olds[0].high() == olds[1].low());
        let node = self.make(&mut reserve.leaves, Leaf::new(olds[0].low(), olds[1].high()));
        {
            // SAFETY: fresh and ours until published.
            let new = unsafe { &*node }.lock();
            for old in &olds {
                (0..old.len()).for_each(|rank| new.push(old.item(rank)));
            }
            new.forget_recent();
            new.set_fenced(olds[0].is_fenced());
        }
        inner.retire_from_now();
        for old in &olds {
            old.retire_from_now();
        }
        let gap = inner.as_child(first).gap.max(inner.as_child(first + 1).gap);
        let item = Child { node: node.cast(), from: 0, gap };
        self.graft(&mut Change { reserve, pin, path }, depth + 1, (first, 2), &[item], Run::None);
        drop(olds);
        self.discard(pin, leaf(first));
        self.discard(pin, leaf(first + 1));
        for depth in (1..path.height()).rev() {
            self.merge_inner(reserve, pin, addr, depth);
        }
        self.lower_root(pin);
    }

    /// Which leaf below the path's lowest inner node can be one with the next: the path's own, or the one before it. Without
    /// locks: a scant leaf without a partner (between two fences, say) is asked about with every removal, and the structure
    /// lock is one for all.
    #[inline]
    pub(super) fn may_merge(path: &Path<'_, T, N, F>) -> Option<(usize, usize)> {
        let depth = path.height().checked_sub(1)?;
        let inner = path.inner(depth);
        partner(inner, path.at(depth), |first| Self::fits(inner, first)).map(|first| (depth, first))
    }

    /// Child `at` of one of the lowest inner nodes.
    fn leaf_below(inner: &Inner<F>, at: usize) -> &Leaf<T, N> {
        // SAFETY: children of the lowest inner nodes are leaves, live under the pin that the node was found with.
        unsafe { &*inner.child(at).cast::<Leaf<T, N>>() }
    }

    /// True when the leaves `first` and the next below `inner` can be one.
    fn fits(inner: &Inner<F>, first: usize) -> bool {
        let [low, high] = [first, first + 1].map(|at| Self::leaf_below(inner, at));
        !high.is_fenced() && low.len() + high.len() <= merged(N)
    }

    /// Takes a node from the reserve.
    pub(super) fn make<M: Node>(&self, stash: &mut Stash<M>, mut value: M) -> *mut M {
        let Some((node, home)) = stash.take() else { panic!("a change of the index without a reserve") };
        value.set_home(home);
        // SAFETY: memory of that size and alignment, and ours.
        unsafe { node.write(value) };
        self.count_bytes(size_of::<M>() as isize);
        node.as_ptr()
    }

    pub(super) fn make_inner(&self, reserve: &mut Reserve<T, N, F>) -> *mut Inner<F> {
        self.make(&mut reserve.inners, Inner::new())
    }

    /// Gives up a node that has been unlinked.
    pub(super) fn discard<M: Node>(&self, pin: &Pin<'_>, node: *const M) {
        self.count_bytes(-(size_of::<M>() as isize));
        // SAFETY: callers have published the node's successor, and all nodes come from a stash.
        unsafe { retire(pin, node.cast_mut()) };
    }

    fn count_bytes(&self, change: isize) {
        let bytes = self.bytes.load(Ordering::Relaxed);
        self.bytes.store(bytes.wrapping_add_signed(change), Ordering::Relaxed);
    }
}

/// Moves every separator behind the path's leaf that is below `end` up to it.
///
/// There are no entries in between, or the locks of both leaves are held. A separator
/// that passes others takes them along; the children between have no span left and no entries, and the next copy of
/// their parent leaves them out. Below such a child, and at the edges of its neighbours, separators may stay behind
/// that lie outside their node's own span: they are overtaken, never met by a lookup, and clamped whenever they move
/// to another node.
fn raise_separators<T, const N: usize, const F: usize>(path: &Path<'_, T, N, F>, end: u64) {
    for depth in 0..path.height() {
        let inner = path.inner(depth);
        for at in path.at(depth) + 1..inner.len() {
            if inner.from(at) >= end {
                break;
            }
            inner.set_from(at, end);
        }
    }
}

/// The same downwards: every separator up to the path's leaf that is above `start`.
fn lower_separators<T, const N: usize, const F: usize>(path: &Path<'_, T, N, F>, start: u64) {
    for depth in 0..path.height() {
        let inner = path.inner(depth);
        for at in (1..=path.at(depth)).rev() {
            if inner.from(at) <= start {
                break;
            }
            inner.set_from(at, start);
        }
    }
}
