//! Room for leaves in pieces of 2 MiB, which a host backs by huge pages.
//!
//! Among 64 Ki entries a lookup pays for the lines of one leaf out of four thousand, and, where memory is in pages of 4 KiB, for
//! translations as well: in a virtual machine, with page tables of two kinds, one that is missed costs as much as the leaf. With
//! huge pages a lookup took a third less (152 to 102 ns, 199 to 142, 205 to 144 by turns in one process, by what others did to
//! the caches), a removal and an insertion a tenth. A kernel needs none of this, as its own memory is in huge pages; it is for hosts
//! that say so ([`Memory::back_by_huge_pages`](crate::host::Memory::back_by_huge_pages)).
//!
//! # What it guarantees
//!
//! 1. No failure: who gets nothing here takes the allocator's memory, leaf by leaf, as without a pool.
//! 2. An index takes leaves from here when it has some thousands of entries: few mappings take no 2 MiB.
//! 3. A piece in which no leaf is left goes back to the allocator, but for one that is kept for the next.
//! 4. Leaves may outlive whoever made the pool: those that wait for the end of a grace period do.
//!
//! # How
//!
//! A piece begins with its head; a leaf in use knows its piece, so that whoever frees it needs nothing else. Pieces with room
//! are chained; all of it is under one spin lock, which is taken once for a leaf that is made or freed: three times in eight
//! insertions that grow an index beyond what its CPUs have set aside (`reserve`), which take the structure lock as well, and never by
//! those that take out and put in what was there. A piece with leaves in use shares in the pool, which so goes when the last of
//! them does.
//!
//! # Who may break it
//!
//! Who gives room back that readers may still be in: leaves go through the epoch.

use super::LEAF_SLOTS;
use super::node::Leaf;
use crate::error::OutOfMemory;
use crate::host::Back;
use crate::sync::{Shared, SpinLock};
use alloc::alloc::{Layout, alloc, dealloc};
use core::ptr::{self, NonNull};

/// Bytes, and alignment, of a piece.
const PIECE: usize = 2 << 20;
const LAYOUT: Layout = match Layout::from_size_align(PIECE, PIECE) {
    Ok(layout) => layout,
    Err(_) => panic!("a power of two"),
};
/// Bytes at the start of a piece for its head: leaves begin on lines.
const HEAD: usize = 64;

/// Room for leaves of one size. Clones are the same pool.
#[derive(Clone)]
pub struct LeafPool(Shared<Pool>);

struct Pool {
    /// Bytes from one leaf to the next.
    stride: usize,
    back: Back,
    state: SpinLock<State>,
}

struct State {
    /// The first piece with room.
    room: *mut Piece,
    /// Pieces there are.
    pieces: usize,
}

// SAFETY: pieces are memory of no thread's; they are reached under the lock only.
unsafe impl Send for State {}

/// The head of a piece.
pub(super) struct Piece {
    pool: *const Pool,
    /// While leaves of it are in use.
    keeps: Option<LeafPool>,
    /// The next piece with room.
    next: *mut Piece,
    /// Room that has been used, chained through its first word.
    free: *mut Free,
    /// How many have been used for the first time.
    carved: usize,
    live: usize,
}

struct Free {
    next: *mut Free,
}

const _: () = assert!(size_of::<Piece>() <= HEAD);

impl LeafPool {
    /// A pool for leaves of [`LEAF_SLOTS`](super::LEAF_SLOTS) entries, whose pieces are made known to `back` before their first use.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_new(back: Back) -> Result<Self, OutOfMemory> {
        let size = size_of::<Leaf<(), LEAF_SLOTS>>();
        let state = SpinLock::new(State { room: ptr::null_mut(), pieces: 0 });
        Shared::try_new(Pool { stride: size.next_multiple_of(HEAD), back, state }).map(Self)
    }

    /// Bytes of the pieces.
    pub fn bytes(&self) -> usize {
        self.0.state.lock().pieces * PIECE
    }

    /// True when there is room for leaves of `size` bytes.
    pub(super) fn fits(&self, size: usize) -> bool {
        self.0.stride == size.next_multiple_of(HEAD)
    }

    /// Room for a leaf, and the piece that it is to be given back to. `None`: the allocator has it.
    pub(super) fn take(&self) -> Option<(NonNull<u8>, NonNull<Piece>)> {
        let mut state = self.0.state.lock();
        if state.room.is_null() {
            // Not under the lock: the allocator may take its time. If another CPU does the same, there is one piece more.
            drop(state);
            let piece = self.new_piece()?;
            state = self.0.state.lock();
            // SAFETY: new, and nobody else's until it is linked here.
            unsafe { (*piece.as_ptr()).next = state.room };
            state.room = piece.as_ptr();
            state.pieces += 1;
        }
        let first = NonNull::new(state.room)?;
        // SAFETY: a linked piece is live, and what is in its head is used under the lock.
        let piece = unsafe { &mut *first.as_ptr() };
        let room = match NonNull::new(piece.free) {
            Some(free) => {
                // SAFETY: in a chain of free room, written by `give`.
                piece.free = unsafe { free.as_ref() }.next;
                free.cast()
            }
            None => {
                let offset = HEAD + piece.carved * self.0.stride;
                piece.carved += 1;
                // SAFETY: a linked piece has room, so this is inside of it.
                unsafe { first.cast::<u8>().add(offset) }
            }
        };
        piece.live += 1;
        if piece.keeps.is_none() {
            piece.keeps = Some(self.clone());
        }
        if !piece.has_room(self.0.stride) {
            state.room = piece.next;
        }
        Some((room, first))
    }

    #[cold]
    fn new_piece(&self) -> Option<NonNull<Piece>> {
        #[cfg(test)]
        if super::tests::allocation_fails() {
            return None;
        }
        // SAFETY: of some size.
        let memory = NonNull::new(unsafe { alloc(LAYOUT) })?;
        // Before the first touch.
        (self.0.back)(memory, PIECE);
        let piece = memory.cast::<Piece>();
        let (next, free) = (ptr::null_mut(), ptr::null_mut());
        let head = Piece { pool: &raw const *self.0, keeps: None, next, free, carved: 0, live: 0 };
        // SAFETY: fresh memory, large enough and aligned.
        unsafe { piece.write(head) };
        Some(piece)
    }
}

impl Piece {
    fn has_room(&self, stride: usize) -> bool {
        !self.free.is_null() || HEAD + (self.carved + 1) * stride <= PIECE
    }

    /// Takes room back.
    ///
    /// # Safety
    /// `room` came from [`LeafPool::take`] with this piece, has not been given back, and nobody uses it any more.
    pub(super) unsafe fn give(this: NonNull<Piece>, room: NonNull<u8>) {
        // SAFETY: a piece with leaves in use is live, and so is its pool, in which it shares; the address never changes.
        let pool = unsafe { &*(*this.as_ptr()).pool };
        let mut state = pool.state.lock();
        // SAFETY: what is in the head is used under the lock.
        let piece = unsafe { &mut *this.as_ptr() };
        let had_room = piece.has_room(pool.stride);
        let free = room.cast::<Free>();
        // SAFETY: ours now, larger than a pointer and aligned to a line.
        unsafe { free.write(Free { next: piece.free }) };
        piece.free = free.as_ptr();
        piece.live -= 1;
        if !had_room {
            piece.next = state.room;
            state.room = this.as_ptr();
        }
        if piece.live > 0 {
            return;
        }
        let keeps = piece.keeps.take();
        // The only one with room is kept for the next leaf.
        let is_spare = state.room != this.as_ptr() || !piece.next.is_null();
        if is_spare {
            state.unlink(this.as_ptr());
            state.pieces -= 1;
        }
        drop(state);
        if is_spare {
            // SAFETY: allocated with this layout, unlinked, and nothing in it is used.
            unsafe { dealloc(this.as_ptr().cast(), LAYOUT) };
        }
        // Perhaps the last share: then it goes with the piece that was kept.
        drop(keeps);
    }
}

impl State {
    /// Takes a piece out of the chain of those with room.
    fn unlink(&mut self, piece: *mut Piece) {
        let mut link = &raw mut self.room;
        // SAFETY: all that is linked is live, and used under the lock, which the caller holds.
        unsafe {
            while *link != piece {
                link = &raw mut (**link).next;
            }
            *link = (*piece).next;
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // A piece with leaves in use would share in the pool: those that are left are empty, so they have room.
        let mut next = self.state.get_mut().room;
        while let Some(piece) = NonNull::new(next) {
            // SAFETY: linked once, allocated with this layout.
            unsafe {
                next = piece.as_ref().next;
                dealloc(piece.as_ptr().cast(), LAYOUT);
            }
        }
    }
}

#[cfg(terrane_watch)]
impl crate::names::Describe for LeafPool {
    fn describe(&self, names: &mut crate::names::Names) {
        names.field("state", &self.0.state);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::with_allowed;
    use super::*;
    use alloc::vec::Vec;
    use std::collections::BTreeSet;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    const SIZE: usize = 448;
    const A_PIECE: usize = (PIECE - HEAD) / SIZE;

    fn pool(back: Back) -> LeafPool {
        let pool = LeafPool::try_new(back).unwrap();
        assert_eq!(pool.bytes(), 0);
        pool
    }

    fn take(pool: &LeafPool, count: usize) -> Vec<(NonNull<u8>, NonNull<Piece>)> {
        (0..count).map(|_| pool.take().unwrap()).collect()
    }

    fn give(rooms: impl IntoIterator<Item = (NonNull<u8>, NonNull<Piece>)>) {
        // SAFETY: taken in the tests, given back once.
        rooms.into_iter().for_each(|(room, piece)| unsafe { Piece::give(piece, room) });
    }

    #[test]
    fn rooms_are_apart_used_again_and_given_back_by_the_piece() {
        static BACKED: AtomicUsize = AtomicUsize::new(0);
        let pool = pool(|memory, length| {
            assert!((memory.as_ptr() as usize).is_multiple_of(PIECE) && length == PIECE);
            BACKED.fetch_add(1, Relaxed);
        });
        let mut rooms = take(&pool, 2 * A_PIECE + 1);
        assert_eq!((pool.bytes(), BACKED.load(Relaxed)), (3 * PIECE, 3));
        let places: BTreeSet<usize> = rooms.iter().map(|(room, _)| room.as_ptr() as usize).collect();
        assert_eq!(places.len(), rooms.len());
        assert!(places.iter().all(|place| place.is_multiple_of(HEAD)));
        assert!(places.iter().zip(places.iter().skip(1)).all(|(one, next)| next - one >= SIZE));
        for (room, piece) in &rooms {
            let (room, piece) = (room.as_ptr() as usize, piece.as_ptr() as usize);
            assert!(piece + HEAD <= room && room + SIZE <= piece + PIECE);
        }
        // All of the last piece and of the first: one of them stays.
        give(rooms.pop());
        assert_eq!(pool.bytes(), 3 * PIECE);
        give(rooms.drain(..A_PIECE));
        assert_eq!(pool.bytes(), 2 * PIECE);
        // What has been given back comes first.
        let again = take(&pool, 1);
        assert!(places.contains(&(again[0].0.as_ptr() as usize)));
        give(again);
        give(rooms);
        assert_eq!(pool.bytes(), PIECE);
        assert_eq!(BACKED.load(Relaxed), 3);
    }

    #[test]
    fn without_memory_there_is_none() {
        let pool = pool(|_, _| unreachable!());
        assert!(with_allowed(0, || pool.take()).is_none());
        assert_eq!(pool.bytes(), 0);
    }

    #[test]
    fn rooms_outlive_the_pool() {
        let pool = pool(|_, _| ());
        let rooms = take(&pool, A_PIECE + 9);
        drop(pool);
        for (room, _) in &rooms {
            // SAFETY: taken above, and of this size.
            unsafe { room.as_ptr().write_bytes(0xa5, SIZE) };
        }
        give(rooms);
    }

    #[test]
    fn threads_take_and_give_at_once() {
        let pool = pool(|_, _| ());
        std::thread::scope(|scope| {
            for id in 0..3u8 {
                let pool = &pool;
                scope.spawn(move || {
                    for round in 0..40 {
                        let mut rooms = take(pool, 100 + 50 * (round % 7));
                        for (room, _) in &rooms {
                            // SAFETY: taken above, and of this size.
                            unsafe { room.as_ptr().write_bytes(id, SIZE) };
                        }
                        for (room, _) in &rooms {
                            // SAFETY: as above, written just now.
                            let bytes = unsafe { core::slice::from_raw_parts(room.as_ptr(), SIZE) };
                            assert!(bytes.iter().all(|&byte| byte == id));
                        }
                        give(rooms.drain(..60));
                        give(rooms.into_iter().rev());
                    }
                });
            }
        });
        assert_eq!(pool.bytes(), PIECE);
    }
}
