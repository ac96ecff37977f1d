//! Nodes set aside, so that a change that has begun cannot run out of memory.

use super::node::{Inner, Leaf, Node};
use crate::error::OutOfMemory;
use crate::sync::{Freeing, Participant, Pin, RetireLink};
use alloc::alloc::{Layout, alloc, dealloc};
use core::marker::PhantomData;
use core::ptr::{self, NonNull};

/// Nodes for the coming changes of one call. Several calls have each their own.
///
/// [`Index::reserve`](super::Index::reserve) fills it; what a call does not use stays for the next, and nodes belong to no
/// particular index: keep one for each CPU, say.
pub struct Reserve<T, const N: usize = { super::LEAF_SLOTS }, const F: usize = { super::FANOUT }> {
    pub(super) leaves: Stash<Leaf<T, N>>,
    pub(super) inners: Stash<Inner<F>>,
    /// Insertions that `reserve` promised and that have not happened yet.
    pub(super) promised: usize,
}

impl<T, const N: usize, const F: usize> Reserve<T, N, F> {
    /// A reserve without nodes.
    pub const fn new() -> Self {
        Self { leaves: Stash::new(), inners: Stash::new(), promised: 0 }
    }

    /// Bytes of the nodes set aside.
    pub fn bytes(&self) -> usize {
        self.leaves.len * size_of::<Leaf<T, N>>() + self.inners.len * size_of::<Inner<F>>()
    }
}

impl<T, const N: usize, const F: usize> Default for Reserve<T, N, F> {
    fn default() -> Self {
        Self::new()
    }
}

/// Memory for nodes of one kind, chained through its first word.
pub(super) struct Stash<N> {
    head: *mut Spare,
    len: usize,
    owns: PhantomData<N>,
}

struct Spare {
    next: *mut Spare,
}

// SAFETY: it owns plain memory, which belongs to no thread.
unsafe impl<N> Send for Stash<N> {}
// SAFETY: a shared reference gives the length and nothing else.
unsafe impl<N> Sync for Stash<N> {}

impl<N> Stash<N> {
    const fn new() -> Self {
        Self { head: ptr::null_mut(), len: 0, owns: PhantomData }
    }

    /// Nodes at hand.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Allocates until `wanted` are at hand. What it got before it failed stays.
    #[inline]
    pub(super) fn fill(&mut self, wanted: usize) -> Result<(), OutOfMemory> {
        if self.len >= wanted { Ok(()) } else { self.allocate(wanted) }
    }

    #[cold]
    fn allocate(&mut self, wanted: usize) -> Result<(), OutOfMemory> {
        while self.len < wanted {
            #[cfg(test)]
            if super::tests::allocation_fails() {
                return Err(OutOfMemory);
            }
            // SAFETY: nodes are not of size zero.
            let memory = unsafe { alloc(Layout::new::<N>()) }.cast::<Spare>();
            if memory.is_null() {
                return Err(OutOfMemory);
            }
            // SAFETY: fresh memory, larger than a pointer and aligned to a cache line.
            unsafe { memory.write(Spare { next: self.head }) };
            self.head = memory;
            self.len += 1;
        }
        Ok(())
    }

    /// Memory for one node, or `None` when there is none.
    pub(super) fn take(&mut self) -> Option<NonNull<N>> {
        let spare = NonNull::new(self.head)?;
        // SAFETY: chained by `fill` and ours.
        self.head = unsafe { spare.as_ref() }.next;
        self.len -= 1;
        Some(spare.cast())
    }
}

impl<N> Drop for Stash<N> {
    fn drop(&mut self) {
        while let Some(node) = self.take() {
            // SAFETY: allocated by `fill` with this layout, never handed out.
            unsafe { dealloc(node.as_ptr().cast(), Layout::new::<N>()) };
        }
    }
}

/// Gives a node up once no reader can be in it.
///
/// # Safety
/// `node` came from a stash and no new reader can reach it.
pub(super) unsafe fn retire<N: Node>(pin: &Pin<'_>, node: *mut N) {
    let link = node.wrapping_byte_add(N::OFFSET).cast::<RetireLink>();
    if let Some(link) = NonNull::new(link) {
        // SAFETY: unlinked, as the caller promises; `release` frees exactly what a stash allocated, and memory
        // may be freed on any thread.
        unsafe { Participant::retire(pin, link, release::<N>) };
    }
}

/// Frees a node: what [`retire`] leaves to the epoch.
unsafe fn release<N: Node>(link: NonNull<RetireLink>, _: &mut Freeing<'_>) {
    let node = link.as_ptr().wrapping_byte_sub(N::OFFSET);
    // SAFETY: the node was given up with this link and this kind, and its grace period is over.
    unsafe { free(node.cast::<N>()) };
}

/// Frees a node at once.
///
/// # Safety
/// `node` came from a stash and nobody can reach it.
pub(super) unsafe fn free<N: Node>(node: *mut N) {
    // SAFETY: allocated by `Stash::fill` with this layout; nodes hold nothing that needs dropping.
    unsafe { dealloc(node.cast(), Layout::new::<N>()) };
}
