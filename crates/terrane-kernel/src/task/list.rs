//! Lists whose links lie in their members, so that queueing a thread takes no memory and cannot fail.
//!
//! A list and the links of its members are protected by one lock, that of whoever owns the list. A member stays where it is and alive while
//! it is linked; that is for the user of the list to see to, and said where each list is.

use core::cell::Cell;
use core::ptr;

/// What a member of a list is linked by.
pub struct Link {
    next: Cell<*const Link>,
    previous: Cell<*const Link>,
}

// SAFETY: the cells are used under the lock of the list only; see above.
unsafe impl Send for Link {}
// SAFETY: as above.
unsafe impl Sync for Link {}

impl Link {
    /// In no list.
    pub const fn new() -> Self {
        Self { next: Cell::new(ptr::null()), previous: Cell::new(ptr::null()) }
    }

    /// Whether it is in a list.
    pub fn is_linked(&self) -> bool {
        !self.next.get().is_null()
    }
}

/// What can be in a [`List`].
///
/// # Safety
/// `link` gives the same field always, which is the first of a `repr(C)` type.
pub unsafe trait Linked {
    /// Its link.
    fn link(&self) -> &Link;
}

/// A list of `T`s that lie elsewhere. Empty until the first [`push`](Self::push): then its head points to itself or members.
pub struct List<T: Linked> {
    head: Link,
    kind: core::marker::PhantomData<*const T>,
}

// SAFETY: pointers to members, which are used under the lock that holds the list.
unsafe impl<T: Linked + Sync> Send for List<T> {}

impl<T: Linked> List<T> {
    /// Nothing in it.
    pub const fn new() -> Self {
        Self { head: Link::new(), kind: core::marker::PhantomData }
    }

    /// True when nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.head.next.get().is_null() || ptr::eq(self.head.next.get(), &self.head)
    }

    /// Puts `member` behind the others.
    ///
    /// # Safety
    /// It is in no list, and stays alive and where it is until it has been removed. The list does not move any more from then on.
    pub unsafe fn push(&mut self, member: &T) {
        if self.is_empty() {
            self.head.next.set(&self.head);
            self.head.previous.set(&self.head);
        }
        // SAFETY: the caller's promise; the head is linked.
        unsafe { Self::insert_before(&self.head, member.link()) };
    }

    /// Puts `member` before the first for which `later` says so, or behind all.
    ///
    /// # Safety
    /// As for [`push`](Self::push).
    pub unsafe fn insert(&mut self, member: &T, later: impl Fn(&T) -> bool) {
        match self.find(later) {
            // SAFETY: the caller's promise; `place` is in this list.
            Some(place) => unsafe { Self::insert_before((*place).link(), member.link()) },
            // SAFETY: the caller's promise.
            None => unsafe { self.push(member) },
        }
    }

    unsafe fn insert_before(place: &Link, link: &Link) {
        let previous = place.previous.get();
        link.next.set(place);
        link.previous.set(previous);
        place.previous.set(link);
        // SAFETY: neighbours of a linked place are linked, so alive.
        unsafe { (*previous).next.set(link) };
    }

    /// Takes `member` out.
    ///
    /// # Safety
    /// It is in this list.
    pub unsafe fn remove(&self, member: &T) {
        let link = member.link();
        // SAFETY: the neighbours of a member are members or the head, all alive.
        unsafe {
            (*link.previous.get()).next.set(link.next.get());
            (*link.next.get()).previous.set(link.previous.get());
        }
        link.next.set(ptr::null());
        link.previous.set(ptr::null());
    }

    /// The first member that `wanted` accepts. It is alive while it is in the list.
    pub fn find(&self, wanted: impl Fn(&T) -> bool) -> Option<*const T> {
        let mut found = None;
        self.for_each(|member| {
            if wanted(member) {
                found = Some(ptr::from_ref(member));
            }
            found.is_none()
        });
        found
    }

    /// Shows the members, from the first on, while `go_on` says so; it may take out the one that it sees.
    pub fn for_each(&self, mut go_on: impl FnMut(&T) -> bool) {
        let mut at = self.head.next.get();
        while !at.is_null() && !ptr::eq(at, &self.head) {
            // SAFETY: members are alive while they are linked, and the link is the first field of a `repr(C)` type (`Linked`).
            let (next, member) = unsafe { ((*at).next.get(), &*at.cast::<T>()) };
            if !go_on(member) {
                return;
            }
            at = next;
        }
    }
}
