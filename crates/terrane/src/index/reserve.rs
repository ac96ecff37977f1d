//! Nodes set aside, so that a change that has begun cannot run out of memory.

use super::node::{Inner, Leaf, Node};
use super::pool::{LeafPool, Piece};
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
    /// The piece that it belongs to; `None`: the allocator's.
    home: Option<NonNull<Piece>>,
}

/// Memory for a node, and where it is to be given back.
pub(super) type Room<N> = (NonNull<N>, Option<NonNull<Piece>>);

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

    /// Allocates until `wanted` are at hand, from `pool` if it has any. What it got before it failed stays.
    #[inline]
    pub(super) fn fill<'a>(
        &mut self,
        wanted: usize,
        pool: impl FnOnce() -> Option<&'a LeafPool>,
    ) -> Result<(), OutOfMemory> {
        if self.len >= wanted { Ok(()) } else { self.allocate(wanted, pool()) }
    }

    #[cold]
    fn allocate(&mut self, wanted: usize, pool: Option<&LeafPool>) -> Result<(), OutOfMemory> {
        while self.len < wanted {
            #[cfg(test)]
            if super::tests::allocation_fails() {
                return Err(OutOfMemory);
            }
            let (memory, home) = match pool.and_then(LeafPool::take) {
                Some((memory, piece)) => (memory, Some(piece)),
                // SAFETY: nodes are not of size zero.
                None => (NonNull::new(unsafe { alloc(Layout::new::<N>()) }).ok_or(OutOfMemory)?, None),
            };
            let memory = memory.cast::<Spare>();
            // SAFETY: memory for a node, ours, larger than this and aligned to a cache line.
            unsafe { memory.write(Spare { next: self.head, home }) };
            self.head = memory.as_ptr();
            self.len += 1;
        }
        Ok(())
    }

    /// Memory for one node, or `None` when there is none.
    pub(super) fn take(&mut self) -> Option<Room<N>> {
        let spare = NonNull::new(self.head)?;
        // SAFETY: chained by `fill` and ours.
        let Spare { next, home } = *unsafe { spare.as_ref() };
        self.head = next;
        self.len -= 1;
        Some((spare.cast(), home))
    }
}

impl<N> Drop for Stash<N> {
    fn drop(&mut self) {
        while let Some(room) = self.take() {
            // SAFETY: allocated by `fill`, never handed out.
            unsafe { give_back(room) };
        }
    }
}

/// Gives memory back to where it came from.
///
/// # Safety
/// It came from a stash for such nodes, and nobody can reach it.
unsafe fn give_back<N>((node, home): Room<N>) {
    // SAFETY: as the caller says: from that piece, or from the allocator with this layout.
    unsafe {
        match home {
            Some(piece) => Piece::give(piece, node.cast()),
            None => dealloc(node.as_ptr().cast(), Layout::new::<N>()),
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
    let Some(node) = NonNull::new(node) else { return };
    // SAFETY: live until here; a node knows its home, and holds nothing that needs dropping.
    unsafe { give_back((node, node.as_ref().home())) };
}
