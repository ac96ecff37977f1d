//! Changes. Each publishes itself with one store; see the head of [the index](super) for why that is enough.

use super::find::Path;
use super::node::{Child, Inner, Item, Leaf, Node};
use super::reserve::{Reserve, Stash, free, retire};
use super::{Entry, Index, MAX_HEIGHT};
use crate::addr::is_page_aligned;
use crate::error::OutOfMemory;
use crate::sync::Pin;
use crate::sync::atomic::Ordering;
use core::ptr::{self, NonNull};

/// Where insertions go on: at the upper or the lower end of a run, or anywhere.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Run {
    Up,
    Down,
    None,
}

/// How many of `total` items, one more than fit, go to the left of two nodes; the new one is number `new`.
///
/// A run fills its node to the last slot: the cut is made between the run and what lies ahead of it, so that the
/// run goes on in the same node; and if nothing lies ahead, the run goes on in a node of its own.
fn cut(total: usize, new: usize, run: Run) -> usize {
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
const fn scant(room: usize) -> usize {
    merged(room) / 2
}

/// What two nodes may have together to be merged. A quarter less than the room, so that the result is not soon split,
/// nor the halves of a split soon merged.
const fn merged(room: usize) -> usize {
    room * 3 / 4
}

impl<T: Entry, const N: usize, const F: usize> Index<T, N, F> {
    /// Leaves and inner nodes that `inserts` insertions may need.
    ///
    /// An insertion that splits needs two leaves, and at every level above either one copy of the inner node or, if
    /// it is full, two; and a new root when the old one is full. The root is looked at, so that the usual case is
    /// not reserved for the worst.
    fn need(&self, inserts: usize) -> (usize, usize) {
        let (root, height) = self.root();
        if inserts == 0 {
            return (0, 0);
        }
        // Levels grow by one for every full root, which takes F - 2 further splits to be full again.
        let worst = |height: usize| inserts * (2 * (height + inserts / (F - 1)) + 1);
        if height == 0 {
            // SAFETY: the root is live: the caller keeps other writers away.
            let leaf = unsafe { &*root.cast::<Leaf<T, N>>() };
            return match leaf.len() + inserts <= N {
                true => (0, 0),
                false => (2 * inserts, worst(usize::from(inserts >= F))),
            };
        }
        // SAFETY: as above.
        let inner = unsafe { &*root.cast::<Inner<F>>() };
        let spare_root = inner.len() + inserts <= F;
        (
            2 * inserts,
            if spare_root {
                inserts * (2 * height - 1)
            } else {
                worst(height + usize::from(inserts > F - 2))
            },
        )
    }

    /// Sets nodes aside: after it, `inserts` insertions and any number of other changes cannot fail.
    ///
    /// Call it before a call commits to anything, also with `inserts` = 0: then removals have what they need to merge
    /// nodes, which they leave undone without.
    ///
    /// # Errors
    /// [`OutOfMemory`]; the index is as it was.
    pub fn reserve(&self, reserve: &mut Reserve<T, N, F>, inserts: usize) -> Result<(), OutOfMemory> {
        let (_, height) = self.root();
        if height + 2 + inserts / (F - 1) > MAX_HEIGHT {
            return Err(OutOfMemory);
        }
        let (leaves, inners) = self.need(inserts);
        reserve.promised = 0;
        reserve.leaves.fill(leaves + height.min(1))?;
        // One copy above merged leaves; a merged node and a copy at each level above that.
        reserve.inners.fill(inners + (2 * height).saturating_sub(1))?;
        reserve.promised = inserts;
        Ok(())
    }

    /// Adds an entry. O(log n).
    ///
    /// The range from its [`start`](Entry::start) to its [`end`](Entry::end) is page aligned, not empty, inside the
    /// limits, and shares no address with another entry.
    ///
    /// # Panics
    /// When it needs a node and [`reserve`](Self::reserve) was not called for this insertion.
    pub fn insert(&self, reserve: &mut Reserve<T, N, F>, pin: &Pin<'_>, entry: NonNull<T>) {
        // SAFETY: whoever hands an entry in keeps it alive (contract of `Entry`).
        let (start, end) = unsafe { (entry.as_ref().start(), entry.as_ref().end()) };
        debug_assert!(is_page_aligned(start) && is_page_aligned(end) && start < end);
        debug_assert!(self.top.limits.start <= start && end <= self.top.limits.end);
        let path = self.path(pin, start);
        let leaf = path.leaf();
        let (rank, len) = (leaf.rank(start), leaf.len());
        debug_assert!(self.end_before(&path, rank) <= start, "entries overlap");
        debug_assert!(rank == len || end <= leaf.start(rank), "entries overlap");
        raise_fence(&path, end);
        reserve.promised = reserve.promised.saturating_sub(1);
        let item = Item { start, end, entry: entry.as_ptr() };
        if len == N {
            self.split(reserve, pin, &path, rank, item);
        } else {
            leaf.insert(rank, item);
            if rank == len && self.top.gaps && path.height() > 0 {
                // Until now that gap was part of one before an entry of another leaf.
                self.raise(&path, path.height(), start - self.end_before(&path, rank));
            }
        }
        self.count.len.store(self.len() + 1, Ordering::Relaxed);
    }

    /// Takes the entry that starts at `start` out and returns it, or `None` when there is none. O(log n).
    ///
    /// Readers may still use the entry: it is to be freed through the epoch.
    pub fn remove(&self, reserve: &mut Reserve<T, N, F>, pin: &Pin<'_>, start: u64) -> Option<NonNull<T>> {
        let (path, rank) = self.position(pin, start)?;
        let leaf = path.leaf();
        let entry = NonNull::new(leaf.entry(rank))?;
        leaf.remove(rank);
        self.count.len.store(self.len() - 1, Ordering::Relaxed);
        self.gap_grew(&path, rank);
        if leaf.len() <= scant(N) {
            self.merge(reserve, pin, &path, start);
        }
        Some(entry)
    }

    /// Tells the index that the entry that started at `old_start` now starts at `new_start`. False when there is no
    /// such entry. O(log n).
    ///
    /// The caller changes the entry itself, before or after: before a shrink and after a growth make lookups see
    /// either the old or the new range. A growth goes into free addresses only.
    pub fn move_start(
        &self,
        _: &mut Reserve<T, N, F>,
        pin: &Pin<'_>,
        old_start: u64,
        new_start: u64,
    ) -> bool {
        let Some((path, rank)) = self.position(pin, old_start) else { return false };
        debug_assert!(is_page_aligned(new_start) && new_start < path.leaf().end(rank));
        debug_assert!(self.end_before(&path, rank) <= new_start, "entries overlap");
        if new_start < old_start {
            lower_fence(&path, new_start);
        }
        path.leaf().set_start(rank, new_start);
        if new_start > old_start {
            self.gap_grew(&path, rank);
        }
        true
    }

    /// Tells the index that the entry that starts at `start` now ends at `new_end`. False when there is no such
    /// entry. O(log n). The caller changes the entry itself, as for [`move_start`](Self::move_start).
    pub fn move_end(&self, _: &mut Reserve<T, N, F>, pin: &Pin<'_>, start: u64, new_end: u64) -> bool {
        let Some((path, rank)) = self.position(pin, start) else { return false };
        debug_assert!(is_page_aligned(new_end) && start < new_end);
        let old_end = path.leaf().end(rank);
        if new_end > old_end {
            raise_fence(&path, new_end);
        }
        path.leaf().set_end(rank, new_end);
        if new_end < old_end {
            self.gap_grew(&path, rank + 1);
        }
        true
    }

    /// Divides the entry that starts at `start`: it ends at `at` from now on, and `entry` takes the rest. False when there
    /// is no such entry. O(log n).
    ///
    /// No gap changes, so no hint is touched: as [`move_end`](Self::move_end) and [`insert`](Self::insert) in one, which
    /// would raise hints for a gap that is gone the next moment. Reserve for one insertion.
    ///
    /// # Panics
    /// As [`insert`](Self::insert).
    pub fn divide(
        &self,
        reserve: &mut Reserve<T, N, F>,
        pin: &Pin<'_>,
        start: u64,
        at: u64,
        entry: NonNull<T>,
    ) -> bool {
        let Some((path, rank)) = self.position(pin, start) else { return false };
        let leaf = path.leaf();
        let end = leaf.end(rank);
        debug_assert!(is_page_aligned(at) && start < at && at < end);
        leaf.set_end(rank, at);
        reserve.promised = reserve.promised.saturating_sub(1);
        let item = Item { start: at, end, entry: entry.as_ptr() };
        if leaf.len() == N {
            self.split(reserve, pin, &path, rank + 1, item);
        } else {
            leaf.insert(rank + 1, item);
        }
        self.count.len.store(self.len() + 1, Ordering::Relaxed);
        true
    }

    /// Joins two entries that touch: takes the one that starts at `high` out and returns it, and the one that starts at
    /// `low` ends where that ended. `None`, and nothing done, when there is no entry at `high`. O(log n).
    ///
    /// The undoing of [`divide`](Self::divide): no gap changes, so no hint is touched, but where the two lie in different
    /// leaves. The caller has changed the end of the low entry before, so that lookups find one of the two throughout.
    pub fn join(
        &self,
        reserve: &mut Reserve<T, N, F>,
        pin: &Pin<'_>,
        low: u64,
        high: u64,
    ) -> Option<NonNull<T>> {
        let (path, rank) = self.position(pin, high)?;
        let leaf = path.leaf();
        let end = leaf.end(rank);
        if rank == 0 {
            let entry = self.remove(reserve, pin, high)?;
            self.move_end(reserve, pin, low, end);
            return Some(entry);
        }
        debug_assert!(leaf.start(rank - 1) == low && leaf.end(rank - 1) == high);
        let entry = NonNull::new(leaf.entry(rank))?;
        leaf.set_end(rank - 1, end);
        leaf.remove(rank);
        self.count.len.store(self.len() - 1, Ordering::Relaxed);
        if leaf.len() <= scant(N) {
            self.merge(reserve, pin, &path, high);
        }
        Some(entry)
    }

    /// Puts `entry` in the place of the one that starts at `start` and has the same range. Returns the old one, or
    /// `None` (and does nothing) when there is none. O(log n).
    pub fn replace(
        &self,
        _: &mut Reserve<T, N, F>,
        pin: &Pin<'_>,
        start: u64,
        entry: NonNull<T>,
    ) -> Option<NonNull<T>> {
        let (path, rank) = self.position(pin, start)?;
        let old = NonNull::new(path.leaf().entry(rank))?;
        path.leaf().set_entry(rank, entry.as_ptr());
        Some(old)
    }

    /// The path to the entry that starts at `start`, and its rank.
    #[inline(always)]
    fn position<'p>(&'p self, pin: &'p Pin<'_>, start: u64) -> Option<(Path<'p, T, N, F>, usize)> {
        if start >= self.top.limits.end {
            return None;
        }
        let path = self.path(pin, start);
        let rank = path.leaf().rank_of(start)?;
        Some((path, rank))
    }

    /// Takes a node from the reserve.
    fn make<M>(&self, stash: &mut Stash<M>, value: M) -> *mut M {
        let Some(node) = stash.take() else { panic!("insertion into an index without a reserve") };
        // SAFETY: memory of that size and alignment, and ours.
        unsafe { node.write(value) };
        self.count_bytes(size_of::<M>() as isize);
        node.as_ptr()
    }

    pub(super) fn make_leaf(&self, reserve: &mut Reserve<T, N, F>) -> *mut Leaf<T, N> {
        self.make(&mut reserve.leaves, Leaf::new())
    }

    fn make_inner(&self, reserve: &mut Reserve<T, N, F>) -> *mut Inner<F> {
        self.make(&mut reserve.inners, Inner::new())
    }

    /// Gives up a node that has been unlinked.
    fn discard<M: Node>(&self, pin: &Pin<'_>, node: *const M) {
        self.count_bytes(-(size_of::<M>() as isize));
        // SAFETY: callers have published the node's successor, and all nodes come from a stash.
        unsafe { retire(pin, node.cast_mut()) };
    }

    fn count_bytes(&self, change: isize) {
        let bytes = self.count.bytes.load(Ordering::Relaxed);
        self.count.bytes.store(bytes.wrapping_add_signed(change), Ordering::Relaxed);
    }

    /// Puts two leaves in the place of a full one, with the new item among them.
    fn split(
        &self,
        reserve: &mut Reserve<T, N, F>,
        pin: &Pin<'_>,
        path: &Path<'_, T, N, F>,
        rank: usize,
        new: Item<T>,
    ) {
        let old = path.leaf();
        let run = if rank > 0 && old.is_recent(rank - 1) {
            Run::Up
        } else if rank < N && old.is_recent(rank) {
            Run::Down
        } else {
            Run::None
        };
        let cut = cut(N + 1, rank, run);
        let item = |at: usize| match at {
            _ if at < rank => old.item(at),
            _ if at == rank => new,
            _ => old.item(at - 1),
        };
        // Between the two lies a gap, and what is inserted there next belongs to the leaf with more room.
        let (left_end, right_start) = (item(cut - 1).end, item(cut).start);
        let from = if cut > N / 2 { left_end } else { right_start };

        let (left, right) = (self.make_leaf(reserve), self.make_leaf(reserve));
        // SAFETY: fresh and ours until published.
        let (left_leaf, right_leaf) = unsafe { (&*left, &*right) };
        for at in 0..=N {
            let (leaf, at_leaf) = if at < cut { (left_leaf, at) } else { (right_leaf, at - cut) };
            leaf.insert(at_leaf, item(at));
        }
        let (with_new, rank_new, other) =
            if rank < cut { (left_leaf, rank, right_leaf) } else { (right_leaf, rank - cut, left_leaf) };
        with_new.set_recent(rank_new);
        other.forget_recent();

        let (mut left_gap, mut right_gap) = (0, 0);
        if self.top.gaps {
            left_gap = self.largest_gap(left_leaf, self.end_before(path, 0));
            right_gap = self.largest_gap(right_leaf, left_end);
        }
        let items = [
            Child { node: left.cast(), from: 0, gap: left_gap },
            Child { node: right.cast(), from, gap: right_gap },
        ];
        old.obsolete().store(true, Ordering::Release);
        let change = &mut Change { reserve, pin, path: *path };
        self.graft(change, path.height(), (child_above(path, path.height()), 1), &items, run);
        self.discard(pin, old);
    }

    /// Puts one or two nodes in the place of `old.1` children, from number `old.0` on, of the inner node at
    /// `depth - 1`; or in the place of the root when `depth` is 0.
    ///
    /// Copies inner nodes up to the first that can take the change in its stride, by an exchange of one child, and
    /// publishes all of it there with one store. The replaced children are left to the caller.
    fn graft(
        &self,
        to: &mut Change<'_, '_, T, N, F>,
        depth: usize,
        old: (usize, usize),
        new: &[Child],
        run: Run,
    ) {
        let path = to.path;
        let mut items = [NO_CHILD; 2];
        let mut count = new.len();
        items[..count].copy_from_slice(new);
        let (mut first, mut gone) = old;
        let mut top = depth;
        while top > 0 && (count, gone) != (1, 1) {
            top -= 1;
            let inner = path.inner(top);
            (items, count) = self.copy_inner(to.reserve, inner, (first, gone), &items[..count], run);
            inner.obsolete().store(true, Ordering::Release);
            (first, gone) = (child_above(&path, top), 1);
        }
        if top > 0 {
            self.raise(&path, top, items[0].gap);
            path.inner(top - 1).set_child(first, items[0].node);
        } else if count == 1 {
            self.set_root(items[0].node, path.height());
        } else {
            let root = self.make_inner(to.reserve);
            for &item in &items {
                // SAFETY: fresh and ours until published.
                unsafe { (*root).push(item) };
            }
            self.set_root(root.cast(), path.height() + 1);
        }
        // What was copied can no longer be reached, nor can the swallowed children that the copies left out.
        for depth_of in top..depth {
            let inner = path.inner(depth_of);
            let replaced = if depth_of + 1 == depth { old } else { (path.at(depth_of), 1) };
            for at in (0..inner.len()).filter(|&at| !is_kept(inner, at, replaced) && !is_among(at, replaced))
            {
                self.discard_below(to.pin, inner.child(at), path.height() - 1 - depth_of);
            }
            self.discard(to.pin, inner);
        }
    }

    /// Copies an inner node with `new` in the place of some children and without those that have been swallowed.
    /// Gives two nodes when one cannot hold them.
    fn copy_inner(
        &self,
        reserve: &mut Reserve<T, N, F>,
        old: &Inner<F>,
        replaced: (usize, usize),
        new: &[Child],
        run: Run,
    ) -> ([Child; 2], usize) {
        let kept_before = (0..replaced.0).filter(|&at| is_kept(old, at, replaced)).count();
        let kept_after =
            (replaced.0 + replaced.1..old.len()).filter(|&at| is_kept(old, at, replaced)).count();
        let total = kept_before + new.len() + kept_after;
        let left_len = match total <= F {
            true => total,
            false => cut(total, if run == Run::Up { kept_before + new.len() - 1 } else { kept_before }, run),
        };

        let left = self.make_inner(reserve);
        let mut items = [Child { node: left.cast(), ..NO_CHILD }, NO_CHILD];
        let mut right = ptr::null_mut();
        let mut pushed = 0;
        let mut push = |child: Child| {
            if pushed == left_len {
                right = self.make_inner(reserve);
                items[1] = Child { node: right.cast(), ..child };
            }
            // SAFETY: fresh and ours until published.
            unsafe { (*if pushed < left_len { left } else { right }).push(child) };
            pushed += 1;
        };
        for at in (0..replaced.0).filter(|&at| is_kept(old, at, replaced)) {
            push(old.as_child(at));
        }
        let (low, behind) = (old.from(replaced.0), replaced.0 + replaced.1);
        let high = if behind < old.len() { old.from(behind) } else { u64::MAX };
        for (nth, &child) in new.iter().enumerate() {
            // A separator that comes from below may be one that has been overtaken there; see `raise_fence`.
            push(Child { from: if nth == 0 { low } else { child.from.clamp(low, high) }, ..child });
        }
        for at in (behind..old.len()).filter(|&at| is_kept(old, at, replaced)) {
            push(old.as_child(at));
        }
        // SAFETY: as above.
        items[0].gap = unsafe { (*left).highest_gap() };
        if right.is_null() {
            return (items, 1);
        }
        // SAFETY: as above.
        items[1].gap = unsafe { (*right).highest_gap() };
        (items, 2)
    }

    /// Gives up a swallowed child, `height` levels above its leaves, and all below it. There are no entries.
    fn discard_below(&self, pin: &Pin<'_>, node: *mut (), height: usize) {
        if height == 0 {
            let leaf = node.cast::<Leaf<T, N>>();
            // SAFETY: unlinked just now, so still live under the pin.
            debug_assert!(unsafe { (*leaf).len() } == 0);
            return self.discard(pin, leaf);
        }
        let inner = node.cast::<Inner<F>>();
        // SAFETY: as above.
        let children = unsafe { &*inner };
        for at in 0..children.len() {
            self.discard_below(pin, children.child(at), height - 1);
        }
        self.discard(pin, inner);
    }

    /// Merges the leaf with a neighbour when both together leave a quarter of a leaf free, and so on upwards. Never
    /// takes what insertions have been promised.
    fn merge(&self, reserve: &mut Reserve<T, N, F>, pin: &Pin<'_>, path: &Path<'_, T, N, F>, addr: u64) {
        let path = *path;
        let Some(depth) = path.height().checked_sub(1) else { return };
        // SAFETY: children of the lowest inner nodes are leaves, live under the pin.
        let leaf = |at: usize| unsafe { &*path.inner(depth).child(at).cast::<Leaf<T, N>>() };
        let Some(first) = partner(path.inner(depth), path.at(depth), merged(N), |at| leaf(at).len()) else {
            return;
        };
        if !self.may_spend(reserve, 1, 1) {
            return;
        }
        let node = self.make_leaf(reserve);
        for old in [leaf(first), leaf(first + 1)] {
            for rank in 0..old.len() {
                // SAFETY: fresh and ours until published.
                unsafe { (*node).insert((*node).len(), old.item(rank)) };
            }
            old.obsolete().store(true, Ordering::Release);
        }
        // SAFETY: as above.
        unsafe { (*node).forget_recent() };
        let gap = path.inner(depth).as_child(first).gap.max(path.inner(depth).as_child(first + 1).gap);
        let item = Child { node: node.cast(), from: 0, gap };
        self.graft(&mut Change { reserve, pin, path }, depth + 1, (first, 2), &[item], Run::None);
        self.discard(pin, leaf(first));
        self.discard(pin, leaf(first + 1));
        for depth in (1..path.height()).rev() {
            self.merge_inner(reserve, pin, addr, depth);
        }
        self.lower_root(pin);
    }

    /// Merges the inner node at `depth` on the way to `addr` with a neighbour, under the same conditions.
    fn merge_inner(&self, reserve: &mut Reserve<T, N, F>, pin: &Pin<'_>, addr: u64, depth: usize) {
        let path = self.path(pin, addr);
        let above = path.inner(depth - 1);
        // SAFETY: children of a node that is not among the lowest are inner nodes, live under the pin.
        let inner = |at: usize| unsafe { &*above.child(at).cast::<Inner<F>>() };
        if path.inner(depth).len() > scant(F) {
            return;
        }
        let Some(first) = partner(above, path.at(depth - 1), merged(F), |at| inner(at).len()) else { return };
        if !self.may_spend(reserve, 0, 2) {
            return;
        }
        let node = self.make_inner(reserve);
        let between = above.from(first + 1);
        for (nth, old) in [inner(first), inner(first + 1)].into_iter().enumerate() {
            for at in 0..old.len() {
                let child = old.as_child(at);
                // Separators that were overtaken must not stand on the wrong side of the other node's.
                let from = if nth == 0 { child.from.min(between) } else { child.from.max(between) };
                // SAFETY: fresh and ours until published.
                unsafe { (*node).push(Child { from, ..child }) };
            }
            old.obsolete().store(true, Ordering::Release);
        }
        // SAFETY: as above.
        let gap = unsafe { (*node).highest_gap() };
        let item = Child { node: node.cast(), from: 0, gap };
        self.graft(&mut Change { reserve, pin, path }, depth, (first, 2), &[item], Run::None);
        self.discard(pin, inner(first));
        self.discard(pin, inner(first + 1));
    }

    /// Makes an only child of the root the root.
    fn lower_root(&self, pin: &Pin<'_>) {
        loop {
            let (root, height) = self.root();
            if height == 0 {
                return;
            }
            // SAFETY: the root, live under the pin.
            let inner = unsafe { &*root.cast::<Inner<F>>() };
            if inner.len() != 1 {
                return;
            }
            inner.obsolete().store(true, Ordering::Release);
            self.set_root(inner.child(0), height - 1);
            self.discard(pin, inner);
        }
    }

    /// True when the reserve holds that many nodes beyond what insertions have been promised.
    fn may_spend(&self, reserve: &Reserve<T, N, F>, leaves: usize, inners: usize) -> bool {
        let need = self.need(reserve.promised);
        reserve.leaves.len() >= need.0 + leaves && reserve.inners.len() >= need.1 + inners
    }

    /// Frees the nodes below `node`, `height` levels above its leaves, and itself.
    ///
    /// # Safety
    /// Nobody else uses the index, now or later.
    pub(super) unsafe fn free_below(node: *mut (), height: usize) {
        if height == 0 {
            // SAFETY: from a stash, and ours alone.
            return unsafe { free(node.cast::<Leaf<T, N>>()) };
        }
        let inner = node.cast::<Inner<F>>();
        // SAFETY: live until freed below; children are ours alone like their parent.
        unsafe {
            for at in 0..(*inner).len() {
                Self::free_below((*inner).child(at), height - 1);
            }
            free(inner);
        }
    }
}

/// What every structural change works with.
struct Change<'a, 'p, T, const N: usize, const F: usize> {
    reserve: &'a mut Reserve<T, N, F>,
    pin: &'a Pin<'a>,
    path: Path<'p, T, N, F>,
}

const NO_CHILD: Child = Child { node: ptr::null_mut(), from: 0, gap: 0 };

/// The child taken above `depth`; 0 for the root, which nothing is above.
fn child_above<T, const N: usize, const F: usize>(path: &Path<'_, T, N, F>, depth: usize) -> usize {
    if depth > 0 { path.at(depth - 1) } else { 0 }
}

fn is_among(at: usize, replaced: (usize, usize)) -> bool {
    at >= replaced.0 && at < replaced.0 + replaced.1
}

/// True when a copy of `inner` keeps child `at`.
fn is_kept<const F: usize>(inner: &Inner<F>, at: usize, replaced: (usize, usize)) -> bool {
    !is_among(at, replaced) && !inner.is_swallowed(at)
}

/// The first of two neighbouring children, one of them `at`, that have no more than `limit` together.
fn partner<const F: usize>(
    inner: &Inner<F>,
    at: usize,
    limit: usize,
    len: impl Fn(usize) -> usize,
) -> Option<usize> {
    let fits = |&first: &usize| first + 1 < inner.len() && len(first) + len(first + 1) <= limit;
    at.checked_sub(1).filter(fits).or_else(|| Some(at).filter(fits))
}

/// Moves every separator that an entry of the leaf would overlap up to the entry's new end.
///
/// The addresses in between are free, so whatever is routed there changes nothing for any other entry. A separator
/// that passes others takes them along; the children between have no span left and no entries, and the next copy of
/// their parent leaves them out. Below such a child, and at the edges of its neighbours, separators may stay behind
/// that lie outside their node's own span: they are overtaken, never met by a lookup, and clamped whenever they move
/// to another node.
fn raise_fence<T, const N: usize, const F: usize>(path: &Path<'_, T, N, F>, end: u64) {
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

/// The same downwards, for an entry that now starts at `start`.
fn lower_fence<T, const N: usize, const F: usize>(path: &Path<'_, T, N, F>, start: u64) {
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
