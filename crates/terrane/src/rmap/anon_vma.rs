//! The anon_vma: which spaces may share a private page.
//!
//! # The structure
//!
//! An `AnonVma` belongs to one space; the VMAs of that space that use it are counted, not listed. `fork` gives the
//! child an `AnonVma` of its own below the parent's, so they form trees that follow the forks. A private page
//! names the `AnonVma` under which it was made and its linear index (its virtual page number), and so can be mapped
//! only in that space and in the spaces of the nodes below, at that address or where a move has taken it
//! ([`relocations`](super::relocations)): a walk looks into the page table of each ([`walk`](super::walk)).
//!
//! Linux keeps a list of VMAs (an interval tree by now) in each anon_vma instead. Splitting, merging and moving either end
//! of a VMA then change the list and need its lock. Here they change nothing: those calls take **no** lock of the
//! reverse mapping. What takes it is the fork of a VMA, and the end of the last VMA of a space that used the node.
//! The relation between a page's index and its address (H. Dickins' remark in source E) cannot be broken by
//! moving a start, because no record is consulted for it.
//!
//! # What it guarantees
//!
//! One lock for each tree, in its root. Whoever holds it sees no node come or go, and every node's space alive:
//! a space takes its nodes out of their trees, under the lock, before it goes. The lock blocks, so it is
//! taken unpinned; its order is after the range locks and before page-table entries.
//!
//! A node is kept by its users (VMAs, and faults about to make one), by the nodes below it, and by guests (walks about
//! to take the lock). When its users are gone it has no space (a *zombie*); when the nodes below are gone too
//! it leaves the tree; its memory is freed an epoch after the last guest, for those who read a VMA's `anon`
//! pointer under a pin.
//!
//! A chain of forks in which each parent exits would make a tree ever deeper, with zombies for all but its last
//! node. So depth is limited: a node at the limit has no children. Pages made in its space name its parent as their
//! owner, and a fork of its space puts the child's node beside it instead of below: pages are then
//! looked for in more spaces than needed, never in fewer.
//!
//! # Who may break it
//!
//! Whoever maps a private page elsewhere than at its index, without a relocation; whoever drops a user count without the lock order above.
//!
//! Sources: E (L. Schermerhorn, "avoid unnecessary anon_vma lock acquisition in vma_adjust()", 2009) for what must
//! not need the lock; R. van Riel's anon_vma chains (Linux 2.6.34) for the descent along forks.

use crate::error::OutOfMemory;
use crate::host::Host;
use crate::machine::Machine;
use crate::stats::Counter;
use crate::sync::atomic::{AtomicPtr, AtomicUsize, Ordering, note_write};
use crate::sync::{Participant, Pin, RetireLink};
use alloc::alloc::{Layout, alloc, dealloc};
use core::cell::Cell;
use core::ptr::{self, NonNull};

/// Forks that get nodes below one another. A walk from the top meets at most this many zombies on the way to a node.
const MAX_DEPTH: u32 = 16;

/// A node of the tree that follows the forks of private memory.
#[repr(C, align(64))]
pub struct AnonVma<H: Host> {
    /// First, so that the link's address is the node's.
    retire: RetireLink,
    /// VMAs of `space` that use this node, and faults about to make one use it. Zero is final unless the node is
    /// given to another space under the lock.
    users: AtomicUsize,
    /// What keeps the memory: one for being in the tree, one for each guest, and, in a root, one a descendant.
    holds: AtomicUsize,
    /// The `Mm` that it belongs to, as a cookie; null when its users are gone. Changes under the lock.
    space: AtomicPtr<()>,
    /// The root of the tree; itself, for a root.
    root: Cell<*const AnonVma<H>>,
    // Under the root's lock:
    parent: Cell<*const AnonVma<H>>,
    first_child: Cell<*const AnonVma<H>>,
    prev: Cell<*const AnonVma<H>>,
    next: Cell<*const AnonVma<H>>,
    children: Cell<usize>,
    /// Nodes above this one; fixed.
    depth: u32,
    lock: lock_api::Mutex<H::Mutex, ()>,
}

// SAFETY: the cells but `root` are used under the root's lock only; `root` is written before the node is shared.
unsafe impl<H: Host> Send for AnonVma<H> {}
// SAFETY: as above.
unsafe impl<H: Host> Sync for AnonVma<H> {}

/// A tree, locked.
pub struct Tree<'a, H: Host> {
    node: &'a AnonVma<H>,
    _guard: lock_api::MutexGuard<'a, H::Mutex, ()>,
}

impl<H: Host> AnonVma<H> {
    fn try_alloc(space: *const (), above: Option<&Self>) -> Result<NonNull<Self>, OutOfMemory> {
        // SAFETY: the layout has a size.
        let Some(node) = NonNull::new(unsafe { alloc(Layout::new::<Self>()) }.cast::<Self>()) else {
            return Err(OutOfMemory);
        };
        let value = Self {
            retire: RetireLink::new(),
            users: AtomicUsize::new(1),
            holds: AtomicUsize::new(1),
            space: AtomicPtr::new(space.cast_mut()),
            root: Cell::new(above.map_or(node.as_ptr().cast_const(), |above| above.root.get())),
            parent: Cell::new(above.map_or(ptr::null(), ptr::from_ref)),
            first_child: Cell::new(ptr::null()),
            prev: Cell::new(ptr::null()),
            next: Cell::new(ptr::null()),
            children: Cell::new(0),
            depth: above.map_or(0, |above| above.depth + 1),
            lock: lock_api::Mutex::new(()),
        };
        note_write(node.as_ptr(), 1);
        // SAFETY: freshly allocated for this type.
        unsafe { node.write(value) };
        Ok(node)
    }

    /// A tree of one node for `space`, with one user: the caller.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_new(space: *const ()) -> Result<NonNull<Self>, OutOfMemory> {
        Self::try_alloc(space, None)
    }

    /// Frees a node that was never shared: the caller is its only user and it is in no one's tree.
    ///
    /// # Safety
    /// `node` is fresh from [`try_new`](Self::try_new).
    pub unsafe fn discard(node: NonNull<Self>) {
        // SAFETY: the caller's promise.
        unsafe { free_node(node) };
    }

    /// True when no fork lies above: a neighbour may share it as Linux would let it.
    #[inline]
    pub fn is_root(&self) -> bool {
        ptr::eq(self.root.get(), self)
    }

    /// The node that pages made under this one name as their owner: this one, or at the depth limit the one above.
    #[inline]
    pub fn page_owner(&self) -> *const Self {
        // The parent of a node with users never changes, and stays in the tree because of its child.
        if self.depth == MAX_DEPTH { self.parent.get() } else { self }
    }

    /// One more user, if there is one still.
    #[inline]
    pub fn try_use(&self) -> bool {
        self.users.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |n| (n > 0).then_some(n + 1)).is_ok()
    }

    /// One more user, by a caller that speaks for one already.
    #[inline]
    pub fn use_again(&self) {
        self.users.fetch_add(1, Ordering::Relaxed);
    }

    /// The space this node belongs to, as a cookie; null for a zombie. Meaningful under the lock.
    pub fn space(&self) -> *const () {
        self.space.load(Ordering::Relaxed)
    }

    /// Becomes a guest: the node's memory stays until [`leave`](Self::leave). Under a pin in which a page or a VMA
    /// was seen to name this node; false when it is on its way out.
    pub fn visit(&self) -> bool {
        self.holds.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |n| (n > 0).then_some(n + 1)).is_ok()
    }

    /// Ends [`visit`](Self::visit). Not while pinned.
    ///
    /// # Safety
    /// The caller visited, and uses the node no more.
    pub unsafe fn leave(&self, me: &Participant<'_>) {
        // SAFETY: passed on.
        unsafe { self.release(me) };
    }

    /// Drops a hold. The last one retires the node, and with it the node's hold on its root.
    ///
    /// # Safety
    /// The caller owns a hold, and uses the node no more.
    unsafe fn release(&self, me: &Participant<'_>) {
        let mut node = self;
        loop {
            // Read before the hold is dropped: afterwards the node may be freed.
            let root = node.root.get();
            if node.holds.fetch_sub(1, Ordering::AcqRel) != 1 {
                return;
            }
            let pin = me.pin();
            // SAFETY: nothing leads here any more but pins that are older; `retire` is the first field.
            unsafe {
                Participant::retire(&pin, NonNull::from(node).cast(), |link, _| {
                    free_node(link.cast::<Self>())
                });
            }
            if ptr::eq(root, node) {
                return;
            }
            // SAFETY: a root outlives its descendants: each holds it.
            node = unsafe { &*root };
        }
    }

    /// Locks the tree. Blocks; not while pinned. The caller counts `rmap_lock`.
    pub fn lock_tree(&self) -> Tree<'_, H> {
        // SAFETY: a root lives as long as any node below it.
        let root = unsafe { &*self.root.get() };
        Tree { node: self, _guard: root.lock.lock() }
    }

    /// One user less. The last one makes the node a zombie and, when no node is below, takes it (and zombies above
    /// that it kept) out of the tree. Not while pinned.
    ///
    /// # Safety
    /// The caller speaks for a user, which ends, and uses the node no more.
    pub unsafe fn end_use(&self, machine: &Machine<H>, me: &Participant<'_>) {
        // Users above one come and go without the lock; the step to zero is taken under it, so that a node with a
        // space always has users in the eyes of whoever holds the lock.
        let quick =
            self.users.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |n| (n > 1).then_some(n - 1));
        if quick.is_ok() {
            return;
        }
        count_lock(machine, me);
        // The guard borrows the node, which its hold for being in the tree keeps; this one is for after.
        self.holds.fetch_add(1, Ordering::Relaxed);
        let tree = self.lock_tree();
        let mut gone: *const Self = ptr::null();
        if self.users.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.space.store(ptr::null_mut(), Ordering::Relaxed);
            gone = self.unlink_if_done();
        }
        drop(tree);
        while !gone.is_null() {
            // SAFETY: unlinked by us; the hold for being in the tree is ours to drop. `prev` chains them.
            let node = unsafe { &*gone };
            gone = node.prev.get();
            // SAFETY: as above.
            unsafe { node.release(me) };
        }
        // SAFETY: taken above.
        unsafe { self.release(me) };
    }

    /// Under the lock: takes this node and its ancestors out of the tree as long as they have neither users nor
    /// children. Returns them, chained by `prev`.
    fn unlink_if_done(&self) -> *const Self {
        let mut gone: *const Self = ptr::null();
        let mut node = self;
        while node.users.load(Ordering::Relaxed) == 0 && node.children.get() == 0 {
            let parent = node.parent.get();
            if !parent.is_null() {
                // SAFETY: a parent has children, so it is in the tree.
                let parent = unsafe { &*parent };
                let (prev, next) = (node.prev.get(), node.next.get());
                if prev.is_null() {
                    parent.first_child.set(next);
                } else {
                    // SAFETY: siblings are in the tree.
                    unsafe { (*prev).next.set(next) };
                }
                if !next.is_null() {
                    // SAFETY: as above.
                    unsafe { (*next).prev.set(prev) };
                }
                parent.children.set(parent.children.get() - 1);
            }
            node.prev.set(gone);
            gone = node;
            if parent.is_null() {
                break;
            }
            // SAFETY: as above.
            node = unsafe { &*parent };
        }
        gone
    }

    /// The node for the copy of a VMA with this node in `child`, the space of a fork; the caller becomes its user.
    /// Copies of several VMAs share one. Blocks; not while pinned.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn for_fork(
        &self,
        machine: &Machine<H>,
        me: &Participant<'_>,
        child: *const (),
    ) -> Result<NonNull<Self>, OutOfMemory> {
        count_lock(machine, me);
        let tree = self.lock_tree();
        // SAFETY: a parent is in the tree as long as its child.
        let above = if self.depth == MAX_DEPTH { unsafe { &*self.parent.get() } } else { self };
        // The child's node, if another VMA of this fork has made one: the newest, so it is first.
        let first = above.first_child.get();
        if !first.is_null() {
            // SAFETY: children of a node in the tree are in the tree.
            let first = unsafe { &*first };
            if ptr::eq(first.space(), child) && first.try_use() {
                return Ok(NonNull::from(first));
            }
        }
        let node = Self::try_alloc(child, Some(above))?;
        // SAFETY: just made; the root is in memory while any node is.
        let (new, root) = unsafe { (node.as_ref(), &*self.root.get()) };
        root.holds.fetch_add(1, Ordering::Relaxed);
        new.next.set(first);
        if !first.is_null() {
            // SAFETY: as above.
            unsafe { (*first).prev.set(node.as_ptr()) };
        }
        above.first_child.set(node.as_ptr());
        above.children.set(above.children.get() + 1);
        drop(tree);
        Ok(node)
    }
}

impl<H: Host> Tree<'_, H> {
    /// Calls `visit` with the space of every node from the one that was locked downwards.
    pub fn for_each_space(&self, mut visit: impl FnMut(*const ())) {
        let top: *const AnonVma<H> = self.node;
        let mut node = top;
        loop {
            // SAFETY: nodes of a locked tree stay in it.
            let here = unsafe { &*node };
            if !here.space().is_null() {
                visit(here.space());
            }
            // Depth first, by links: a tree may be as deep as forks were.
            if !here.first_child.get().is_null() {
                node = here.first_child.get();
                continue;
            }
            loop {
                if node == top {
                    return;
                }
                // SAFETY: as above.
                let here = unsafe { &*node };
                if !here.next.get().is_null() {
                    node = here.next.get();
                    break;
                }
                node = here.parent.get();
            }
        }
    }
}

fn count_lock<H: Host>(machine: &Machine<H>, me: &Participant<'_>) {
    let pin: Pin<'_> = me.pin();
    machine.stats().count(&pin, Counter::RmapLock);
}

/// # Safety
/// `node` came from `try_alloc` and nothing refers to it any more.
unsafe fn free_node<H: Host>(node: NonNull<AnonVma<H>>) {
    // SAFETY: the caller's promise.
    unsafe {
        node.as_ptr().drop_in_place();
        dealloc(node.as_ptr().cast(), Layout::new::<AnonVma<H>>());
    }
}

describe!([H: Host] AnonVma<H> { retire, users, holds, space, root, parent, first_child, prev, next, children, lock });
