//! What a listing calls an object: device, inode, path.
//!
//! Every object has a number of its own in its machine, which is never given again. An object that the host has named
//! ([`Object::set_identity`](crate::object::Object::set_identity)) stands in a table of the machine under its number. A listing knows objects by number, because
//! it tells of a moment that may have passed, and objects with it; so the names of objects that end while a listing is
//! under way are kept until it has ended (`Identities::keep`).
//!
//! The table's lock is taken when an object is named, when a named one ends, and twice by a listing. Nobody waits for
//! anything while holding it.

use crate::error::OutOfMemory;
use crate::sync::Shared;
use crate::sync::atomic::{AtomicBool, Ordering};
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

/// What `/proc/pid/maps` says of an object. Made by the host, which is the one that knows.
pub struct Identity {
    major: u32,
    minor: u32,
    inode: u64,
    path: String,
    deleted: AtomicBool,
}

impl Identity {
    /// The device's numbers, the inode's, and the path as it is to be shown (`/memfd:name` for a `memfd`).
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_new(major: u32, minor: u32, inode: u64, path: &str) -> Result<Self, OutOfMemory> {
        let mut owned = String::new();
        owned.try_reserve_exact(path.len()).map_err(|_| OutOfMemory)?;
        owned.push_str(path);
        Ok(Self { major, minor, inode, path: owned, deleted: AtomicBool::new(false) })
    }

    /// The major number of the device.
    pub fn major(&self) -> u32 {
        self.major
    }

    /// The minor number of the device.
    pub fn minor(&self) -> u32 {
        self.minor
    }

    /// The number of the inode.
    pub fn inode(&self) -> u64 {
        self.inode
    }

    /// The path.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// True when no name leads to the object any more: shown as ` (deleted)` behind the path.
    pub fn is_deleted(&self) -> bool {
        self.deleted.load(Ordering::Relaxed)
    }

    /// Says that no name leads to the object any more. At any time.
    pub fn set_deleted(&self) {
        self.deleted.store(true, Ordering::Relaxed);
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02x}:{:02x} {} {:?}", self.major, self.minor, self.inode, self.path)
    }
}

/// One object that has a name.
struct Named {
    number: u64,
    identity: Shared<Identity>,
    /// The object has ended; a listing may still ask.
    ended: bool,
}

/// The names of a machine's objects, by number.
pub struct Identities<M: lock_api::RawMutex>(lock_api::Mutex<M, Table>);

struct Table {
    /// Ascending by number.
    named: Vec<Named>,
    /// Listings under way.
    listings: usize,
    /// Some of `named` have ended.
    ended: bool,
}

impl Table {
    fn place(&self, number: u64) -> Result<usize, usize> {
        self.named.binary_search_by_key(&number, |named| named.number)
    }
}

impl<M: lock_api::RawMutex> Identities<M> {
    /// No names.
    pub(crate) const fn new() -> Self {
        Self(lock_api::Mutex::new(Table { named: Vec::new(), listings: 0, ended: false }))
    }

    pub(crate) fn set(&self, number: u64, identity: Identity) -> Result<(), OutOfMemory> {
        let identity = Shared::try_new(identity)?;
        let mut table = self.0.lock();
        match table.place(number) {
            Ok(place) => table.named[place].identity = identity,
            Err(place) => {
                table.named.try_reserve(1).map_err(|_| OutOfMemory)?;
                table.named.insert(place, Named { number, identity, ended: false });
            }
        }
        Ok(())
    }

    pub(crate) fn get(&self, number: u64) -> Option<Shared<Identity>> {
        let table = self.0.lock();
        table.place(number).ok().map(|place| table.named[place].identity.clone())
    }

    /// The object has ended.
    pub(crate) fn end(&self, number: u64) {
        let mut table = self.0.lock();
        let Ok(place) = table.place(number) else { return };
        if table.listings == 0 {
            table.named.remove(place);
        } else {
            table.named[place].ended = true;
            table.ended = true;
        }
    }

    /// Keeps the names of objects that end from now on, until the value is dropped. Before a listing begins.
    pub(crate) fn keep(&self) -> Kept<'_, M> {
        self.0.lock().listings += 1;
        Kept(self)
    }
}

/// Names are kept; see [`Identities::keep`].
pub(crate) struct Kept<'a, M: lock_api::RawMutex>(&'a Identities<M>);

impl<M: lock_api::RawMutex> Kept<'_, M> {
    /// The names of those of the objects `numbers` that have one, ascending by number.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(crate) fn names_of(
        &self,
        numbers: impl Iterator<Item = u64>,
    ) -> Result<Vec<(u64, Shared<Identity>)>, OutOfMemory> {
        let mut wanted: Vec<u64> = Vec::new();
        for number in numbers {
            // Neighbouring mappings mostly show one object.
            if wanted.last() != Some(&number) {
                wanted.try_reserve(1).map_err(|_| OutOfMemory)?;
                wanted.push(number);
            }
        }
        wanted.sort_unstable();
        wanted.dedup();
        let mut names = Vec::new();
        names.try_reserve_exact(wanted.len()).map_err(|_| OutOfMemory)?;
        let table = self.0.0.lock();
        for number in wanted {
            if let Ok(place) = table.place(number) {
                names.push((number, table.named[place].identity.clone()));
            }
        }
        Ok(names)
    }
}

impl<M: lock_api::RawMutex> Drop for Kept<'_, M> {
    fn drop(&mut self) {
        let mut table = self.0.0.lock();
        table.listings -= 1;
        if table.listings == 0 && table.ended {
            table.ended = false;
            table.named.retain(|named| !named.ended);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::RawMutex;

    fn named(path: &str) -> Identity {
        Identity::try_new(8, 1, 42, path).unwrap()
    }

    #[test]
    fn a_listing_keeps_the_names_of_objects_that_end() {
        let table = Identities::<RawMutex>::new();
        for number in [3, 1, 2] {
            table.set(number, named(&alloc::format!("/{number}"))).unwrap();
        }
        table.end(2);
        assert!(table.get(2).is_none());
        let (first, second) = (table.keep(), table.keep());
        table.end(1);
        table.end(9);
        let names = first.names_of([3, 3, 2, 1, 7, 3].into_iter()).unwrap();
        let shown: Vec<_> = names.iter().map(|(number, name)| (*number, name.path())).collect();
        assert_eq!(shown, [(1, "/1"), (3, "/3")]);
        drop(first);
        assert!(table.get(1).is_some());
        drop(second);
        assert!(table.get(1).is_none() && table.get(3).is_some());
    }

    #[test]
    fn a_name_is_replaced_and_can_be_deleted() {
        let table = Identities::<RawMutex>::new();
        table.set(5, named("/old")).unwrap();
        table.set(5, named("/new")).unwrap();
        let name = table.get(5).unwrap();
        assert_eq!((name.path(), name.major(), name.minor(), name.inode()), ("/new", 8, 1, 42));
        assert!(!name.is_deleted());
        name.set_deleted();
        assert!(table.get(5).unwrap().is_deleted());
    }
}
