//! Inner nodes: copying them up to where one store publishes the copies, merging them, giving them up.
//!
//! All of it under the structure lock. Leaves are locked before the first node is marked obsolete: while a node is marked
//! and its successor not yet published, others wait, and nobody who waits so may hold what is waited for here.

use super::find::Path;
use super::node::{Child, Inner, Leaf, Node};
use super::reserve::{Reserve, free};
use super::shape::{Run, cut, merged, scant};
use super::{Entry, Index};
use crate::sync::Pin;
use core::ptr;

impl<T: Entry, const N: usize, const F: usize> Index<T, N, F> {
    /// Puts one or two nodes in the place of `old.1` children, from number `old.0` on, of the inner node at
    /// `depth - 1`; or in the place of the root when `depth` is 0.
    ///
    /// Copies inner nodes up to the first that can take the change in its stride, by an exchange of one child, and
    /// publishes all of it there with one store. The replaced children are left to the caller.
    pub(super) fn graft(
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
            // Before its hints are read: who raises one of them after that sees it, and raises it in the copy.
            inner.retire_from_now();
            (items, count) = self.copy_inner(to.reserve, inner, (first, gone), &items[..count], run);
            (first, gone) = (child_above(&path, top), 1);
        }
        if top > 0 {
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
            // SAFETY: unlinked just now, so still live under the pin.
            let leaf = unsafe { &*node.cast::<Leaf<T, N>>() };
            debug_assert!(leaf.len() == 0 && leaf.low() == leaf.high());
            leaf.retire_from_now();
            return self.discard(pin, leaf);
        }
        let inner = node.cast::<Inner<F>>();
        // SAFETY: as above.
        let children = unsafe { &*inner };
        children.retire_from_now();
        for at in 0..children.len() {
            self.discard_below(pin, children.child(at), height - 1);
        }
        self.discard(pin, inner);
    }

    /// Merges the inner node at `depth` on the way to `addr` with a neighbour, under the same conditions.
    pub(super) fn merge_inner(&self, reserve: &mut Reserve<T, N, F>, pin: &Pin<'_>, addr: u64, depth: usize) {
        let path = self.path(pin, addr);
        let above = path.inner(depth - 1);
        // SAFETY: children of a node that is not among the lowest are inner nodes, live under the pin.
        let inner = |at: usize| unsafe { &*above.child(at).cast::<Inner<F>>() };
        if path.inner(depth).len() > scant(F) {
            return;
        }
        let fits = |first: usize| inner(first).len() + inner(first + 1).len() <= merged(F);
        let Some(first) = partner(above, path.at(depth - 1), fits) else { return };
        if !self.may_spend(reserve, 0, 2) {
            return;
        }
        for old in [inner(first), inner(first + 1)] {
            old.retire_from_now();
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
        }
        // SAFETY: as above.
        let gap = unsafe { (*node).highest_gap() };
        let item = Child { node: node.cast(), from: 0, gap };
        self.graft(&mut Change { reserve, pin, path }, depth, (first, 2), &[item], Run::None);
        self.discard(pin, inner(first));
        self.discard(pin, inner(first + 1));
    }

    /// Makes an only child of the root the root.
    pub(super) fn lower_root(&self, pin: &Pin<'_>) {
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
            inner.retire_from_now();
            self.set_root(inner.child(0), height - 1);
            self.discard(pin, inner);
        }
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

/// What a change of inner nodes works with.
pub(super) struct Change<'a, 'p, T, const N: usize, const F: usize> {
    pub(super) reserve: &'a mut Reserve<T, N, F>,
    pub(super) pin: &'a Pin<'a>,
    pub(super) path: Path<'p, T, N, F>,
}

pub(super) const NO_CHILD: Child = Child { node: ptr::null_mut(), from: 0, gap: 0 };

/// The child taken above `depth`; 0 for the root, which nothing is above.
pub(super) fn child_above<T, const N: usize, const F: usize>(
    path: &Path<'_, T, N, F>,
    depth: usize,
) -> usize {
    if depth > 0 { path.at(depth - 1) } else { 0 }
}

#[inline]
fn is_among(at: usize, replaced: (usize, usize)) -> bool {
    at >= replaced.0 && at < replaced.0 + replaced.1
}

/// True when a copy of `inner` keeps child `at`.
fn is_kept<const F: usize>(inner: &Inner<F>, at: usize, replaced: (usize, usize)) -> bool {
    !is_among(at, replaced) && !inner.is_swallowed(at)
}

/// The first of two neighbouring children, one of them `at`, that fit together.
pub(super) fn partner<const F: usize>(
    inner: &Inner<F>,
    at: usize,
    fits: impl Fn(usize) -> bool,
) -> Option<usize> {
    let fits = |&first: &usize| first + 1 < inner.len() && fits(first);
    at.checked_sub(1).filter(fits).or_else(|| Some(at).filter(fits))
}
