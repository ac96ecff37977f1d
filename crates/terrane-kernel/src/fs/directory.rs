//! Directories in memory: names, and what they lead to.
//!
//! Entries are ordered by name. Each has a number that grows with every entry of the directory, so that `getdents64` can go on where it
//! stopped, whatever was removed or added meanwhile.
//!
//! Lookups take the lock of one directory. Changes (create, link, unlink, rename) take `tree`'s lock first, so that what they have looked up
//! stays.

use super::inode::Node;
use crate::errno::Errno;
use crate::sync::SpinLock;
use alloc::vec::Vec;

/// One entry.
struct Entry {
    name: Vec<u8>,
    number: u64,
    node: Node,
}

struct Entries {
    /// Ascending by name.
    list: Vec<Entry>,
    next: u64,
    /// No name leads to the directory any more: nothing can be put into it.
    removed: bool,
    /// The directory in which it lies; `None` for the root, and once it is removed.
    parent: Option<Node>,
}

/// A directory.
pub struct Directory {
    entries: SpinLock<Entries>,
    /// It is `/proc`, which has a directory for each process besides its entries.
    pub has_processes: bool,
}

/// What a listing says of an entry.
pub struct Listed {
    pub name: Vec<u8>,
    /// Where to go on behind it.
    pub next: u64,
    pub inode: u64,
    pub file_type: u32,
}

/// The first numbers are for `.` and `..`.
pub const FIRST: u64 = 2;

impl Directory {
    /// An empty directory in `parent`.
    pub fn new(parent: Option<Node>) -> Self {
        Self {
            entries: SpinLock::new(Entries { list: Vec::new(), next: FIRST + 1, removed: false, parent }),
            has_processes: false,
        }
    }

    /// How many entries it has.
    pub fn len(&self) -> usize {
        self.entries.lock().list.len()
    }

    /// What `name` leads to.
    pub fn get(&self, name: &[u8]) -> Option<Node> {
        let entries = self.entries.lock();
        entries.place(name).ok().map(|place| entries.list[place].node.clone())
    }

    /// The directory in which it lies.
    pub fn parent(&self) -> Option<Node> {
        self.entries.lock().parent.clone()
    }

    /// The name that leads to `node`.
    ///
    /// # Errors
    /// `ENOENT`, `ENOMEM`.
    pub fn name_of(&self, node: &Node) -> Result<Vec<u8>, Errno> {
        let entries = self.entries.lock();
        let entry = entries.list.iter().find(|entry| Node::ptr_eq(&entry.node, node));
        copy(&entry.ok_or(Errno::ENOENT)?.name)
    }

    /// Puts an entry in.
    ///
    /// # Errors
    /// `EEXIST`, `ENOENT` when the directory has been removed, `ENOMEM`.
    pub fn insert(&self, name: &[u8], node: &Node) -> Result<(), Errno> {
        let name = copy(name)?;
        let mut entries = self.entries.lock();
        if entries.removed {
            return Err(Errno::ENOENT);
        }
        let Err(place) = entries.place(&name) else { return Err(Errno::EEXIST) };
        entries.list.try_reserve(1)?;
        let number = entries.next;
        entries.next += 1;
        entries.list.insert(place, Entry { name, number, node: node.clone() });
        Ok(())
    }

    /// Makes an entry lead elsewhere; what it led to.
    pub fn replace(&self, name: &[u8], node: &Node) -> Option<Node> {
        let mut entries = self.entries.lock();
        let place = entries.place(name).ok()?;
        Some(core::mem::replace(&mut entries.list[place].node, node.clone()))
    }

    /// Takes an entry out; what it led to.
    pub fn remove(&self, name: &[u8]) -> Option<Node> {
        let mut entries = self.entries.lock();
        let place = entries.place(name).ok()?;
        Some(entries.list.remove(place).node)
    }

    /// Says that no name leads to it any more, if it is empty.
    ///
    /// # Errors
    /// `ENOTEMPTY`.
    pub fn set_removed(&self) -> Result<(), Errno> {
        let parent = {
            let mut entries = self.entries.lock();
            if !entries.list.is_empty() {
                return Err(Errno::ENOTEMPTY);
            }
            entries.removed = true;
            entries.parent.take()
        };
        drop(parent);
        Ok(())
    }

    /// True once it has been removed.
    pub fn is_removed(&self) -> bool {
        self.entries.lock().removed
    }

    /// Says where it lies now.
    pub fn set_parent(&self, parent: &Node) {
        let before = self.entries.lock().parent.replace(parent.clone());
        drop(before);
    }

    /// The entries whose numbers are above `from`, at most `limit`, in the order of their numbers.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn list(&self, from: u64, limit: usize) -> Result<Vec<Listed>, Errno> {
        let entries = self.entries.lock();
        let mut places: Vec<(u64, usize)> = Vec::new();
        places.try_reserve_exact(entries.list.len())?;
        let behind = entries.list.iter().enumerate().filter(|(_, entry)| entry.number > from);
        places.extend(behind.map(|(place, entry)| (entry.number, place)));
        places.sort_unstable();
        places.truncate(limit);
        let mut listed = Vec::new();
        listed.try_reserve_exact(places.len())?;
        for (number, place) in places {
            let entry = &entries.list[place];
            listed.push(Listed {
                name: copy(&entry.name)?,
                next: number,
                inode: entry.node.number,
                file_type: entry.node.file_type(),
            });
        }
        Ok(listed)
    }
}

impl Entries {
    fn place(&self, name: &[u8]) -> Result<usize, usize> {
        self.list.binary_search_by(|entry| entry.name.as_slice().cmp(name))
    }
}

/// A copy of bytes.
///
/// # Errors
/// `ENOMEM`.
pub fn copy(bytes: &[u8]) -> Result<Vec<u8>, Errno> {
    let mut copy = Vec::new();
    copy.try_reserve_exact(bytes.len())?;
    copy.extend_from_slice(bytes);
    Ok(copy)
}
