//! Lists of nodes, in the order of arrival: what is under each spin lock of a range lock.

use super::Node;
use crate::host::Wait;
use core::ptr;

/// Nodes in the order of arrival. Lists are short: about as many members as CPUs are in the zone at this moment.
pub(super) struct List {
    first: *const Node,
    /// Members.
    len: u32,
    /// Members that are not granted.
    waiting: u32,
    /// A wide one sleeps until some member leaves.
    watched: bool,
    /// Whoever gets its range from now on sees what was written before this moment; see `RangeLock::await_aware`.
    moment: u64,
}

// SAFETY: the members are `Sync`, and stay valid while they are in the list (the promise of `RangeLock::lock`).
unsafe impl Send for List {}

impl List {
    pub(super) const fn new() -> Self {
        Self { first: ptr::null(), len: 0, waiting: 0, watched: false, moment: 0 }
    }

    /// The members. They are lent for longer than the list, because a member may be taken out in the course of a visit; only
    /// the functions here make use of it.
    fn members<'n>(&self) -> impl Iterator<Item = &'n Node> + use<'n> {
        let mut at = self.first;
        core::iter::from_fn(move || {
            // SAFETY: members are valid while they are in the list, and it is locked by whoever holds `self`.
            let node = unsafe { at.as_ref() }?;
            at = node.next.get();
            Some(node)
        })
    }

    /// The members.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Node> {
        self.members()
    }

    /// True when a member conflicts with `node`.
    #[inline]
    pub(super) fn blocks(&self, node: &Node) -> bool {
        self.iter().any(|member| member.conflicts_with(node))
    }

    /// True when a wide member conflicts with `node`.
    pub(super) fn wide_blocks(&self, node: &Node) -> bool {
        self.iter().any(|member| member.is_wide() && member.conflicts_with(node))
    }

    /// Appends `node`; it is granted if no member conflicts with it. Returns whether it is.
    #[inline]
    pub(super) fn append(&mut self, node: &Node) -> bool {
        let mut free = true;
        let mut last: Option<&Node> = None;
        for member in self.members() {
            free &= !member.conflicts_with(node);
            last = Some(member);
        }
        node.next.set(ptr::null());
        match last {
            Some(last) => last.next.set(node),
            None => self.first = node,
        }
        node.set_granted(free, self.moment);
        self.len += 1;
        self.waiting += u32::from(!free);
        free
    }

    /// Takes `node` out.
    #[inline]
    pub(super) fn unlink(&mut self, node: &Node) {
        let before = self.members().take_while(|member| !ptr::eq(*member, node)).last();
        match before {
            Some(before) => before.next.set(node.next.get()),
            None => self.first = node.next.get(),
        }
        self.len -= 1;
        self.waiting -= u32::from(!node.is_granted());
    }

    /// How many members there are.
    #[inline]
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// True when some member is not granted.
    #[inline]
    pub(super) fn has_waiting(&self) -> bool {
        self.waiting > 0
    }

    /// The first member, in the order of arrival, that waits although no earlier member conflicts.
    pub(super) fn next_free<'n>(&self) -> Option<&'n Node> {
        self.members().filter(|node| !node.is_granted()).find(|node| {
            let mut earlier = self.members().take_while(|member| !ptr::eq(*member, *node));
            !earlier.any(|member| member.conflicts_with(node))
        })
    }

    /// Grants a member its range.
    pub(super) fn grant(&mut self, node: &Node) {
        node.set_granted(true, self.moment);
        self.waiting -= 1;
    }

    /// A wide member has got its range.
    pub(super) fn complete(&mut self, node: &Node) {
        node.set_holds(self.moment);
    }

    /// Notes a moment. Never goes back.
    pub(super) fn note(&mut self, moment: u64) {
        self.moment = self.moment.max(moment);
    }

    /// Asks for an event when a member leaves.
    pub(super) fn start_watch(&mut self) {
        self.watched = true;
    }

    /// True when an event was asked for; it is asked for no more.
    #[inline]
    pub(super) fn stop_watch(&mut self) -> bool {
        core::mem::take(&mut self.watched)
    }
}

/// Those whose turn has come, to be told once the spin locks are released.
pub(super) struct Told {
    first: *const Node,
    last: *const Node,
}

impl Told {
    pub(super) const fn new() -> Self {
        Self { first: ptr::null(), last: ptr::null() }
    }

    /// Adds a node that was granted its range just now.
    pub(super) fn add(&mut self, node: &Node) {
        node.next_told.set(ptr::null());
        // SAFETY: its owner waits until it is told, so it is valid, and the cell is ours until then.
        match unsafe { self.last.as_ref() } {
            Some(last) => last.next_told.set(node),
            None => self.first = node,
        }
        self.last = node;
    }

    /// Tells them. No spin lock is held.
    #[inline]
    pub(super) fn tell<W: Wait>(self, wait: &W) {
        let mut at = self.first;
        // SAFETY: nodes are not freed before the lock is, so not even one that has gone on already.
        while let Some(node) = unsafe { at.as_ref() } {
            // Before its owner is told: after that the cell is not ours.
            at = node.next_told.get();
            node.tell(wait);
        }
    }
}
