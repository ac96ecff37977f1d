//! Locks of files: `flock` (of an open file) and `fcntl`'s (of a process or an open file, over bytes).
//!
//! All locks of the machine are in one list under one lock: there are few. Whoever waits does so on one bell, and looks again when any
//! lock goes.

use super::bell::Bell;
use super::current;
use super::inode::{Inode, Node};
use super::open::{Open, OpenFile};
use crate::errno::Errno;
use crate::sync::SpinLock;
use alloc::vec::Vec;
use terrane::sync::Shared;

/// Whose a lock is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Owner {
    /// `flock`: an open file's, by its address. It excludes other `flock`s only.
    File(usize),
    /// `fcntl` with `F_OFD_…`: an open file's.
    Description(usize),
    /// `fcntl`: a process's.
    Process(u32),
}

/// A lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lock {
    /// The inode's address: an inode that is locked is open.
    inode: usize,
    pub owner: Owner,
    pub start: u64,
    /// Behind the last byte.
    pub end: u64,
    pub exclusive: bool,
}

static LOCKS: SpinLock<Vec<Lock>> = SpinLock::new(Vec::new());
static BELL: Bell = Bell::new();

fn inode_of(node: &Node) -> usize {
    Shared::as_ptr(node).cast::<Inode>().addr()
}

fn address_of(file: &Open) -> usize {
    Shared::as_ptr(file).cast::<OpenFile>().addr()
}

/// The owner of `flock`'s locks of `file`.
pub fn file_owner(file: &Open) -> Owner {
    Owner::File(address_of(file))
}

/// The owner of `fcntl`'s locks of `file` itself.
pub fn description_owner(file: &Open) -> Owner {
    Owner::Description(address_of(file))
}

impl Lock {
    /// A lock of the bytes from `start` to `end` of `node`.
    pub fn new(node: &Node, owner: Owner, start: u64, end: u64, exclusive: bool) -> Self {
        Self { inode: inode_of(node), owner, start, end, exclusive }
    }

    fn excludes(&self, other: &Lock) -> bool {
        let same_kind = matches!(self.owner, Owner::File(_)) == matches!(other.owner, Owner::File(_));
        same_kind
            && self.inode == other.inode
            && self.owner != other.owner
            && (self.exclusive || other.exclusive)
            && self.start < other.end
            && other.start < self.end
    }
}

/// A lock that keeps `wanted` from being had.
pub fn in_the_way(wanted: &Lock) -> Option<Lock> {
    LOCKS.lock().iter().find(|lock| lock.excludes(wanted)).copied()
}

/// Takes `wanted`, in place of what its owner has there.
///
/// # Errors
/// `EAGAIN` when it cannot be had at once and `waits` is not set, `ERESTARTSYS`, `ENOLCK` without memory.
pub fn lock(wanted: Lock, waits: bool) -> Result<(), Errno> {
    loop {
        {
            let mut locks = LOCKS.lock();
            if !locks.iter().any(|lock| lock.excludes(&wanted)) {
                release(&mut locks, &wanted)?;
                locks.try_reserve(1).map_err(|_| Errno::ENOLCK)?;
                locks.push(wanted);
                drop(locks);
                // It may have been exclusive before.
                BELL.ring();
                return Ok(());
            }
        }
        if !waits {
            return Err(Errno::EAGAIN);
        }
        BELL.wait(|| in_the_way(&wanted).is_none())?;
    }
}

/// Gives up what the owner of `range` has there.
///
/// # Errors
/// `ENOLCK` without memory.
pub fn unlock(range: &Lock) -> Result<(), Errno> {
    release(&mut LOCKS.lock(), range)?;
    BELL.ring();
    Ok(())
}

/// Takes the bytes of `range` out of its owner's locks. Each may be divided.
fn release(locks: &mut Vec<Lock>, range: &Lock) -> Result<(), Errno> {
    let mine = |lock: &Lock| {
        lock.inode == range.inode
            && lock.owner == range.owner
            && lock.start < range.end
            && range.start < lock.end
    };
    let count = locks.iter().filter(|lock| mine(lock)).count();
    locks.try_reserve(count).map_err(|_| Errno::ENOLCK)?;
    let mut place = 0;
    while place < locks.len() {
        let lock = locks[place];
        if !mine(&lock) {
            place += 1;
            continue;
        }
        locks.swap_remove(place);
        if lock.start < range.start {
            locks.push(Lock { end: range.start, ..lock });
        }
        if range.end < lock.end {
            locks.push(Lock { start: range.end, ..lock });
        }
        // What was pushed does not overlap the range, and is passed over.
    }
    Ok(())
}

/// The last descriptor of `file` is gone: so are its locks.
pub fn unlock_file(file: &Open) {
    let (first, second) = (file_owner(file), description_owner(file));
    LOCKS.lock().retain(|lock| lock.owner != first && lock.owner != second);
    BELL.ring();
}

/// A process has closed a descriptor of the inode: its locks of it are gone, as POSIX asks for.
pub fn unlock_process(node: &Node) {
    let (inode, owner) = (inode_of(node), Owner::Process(current::pid()));
    let gone = {
        let mut locks = LOCKS.lock();
        let before = locks.len();
        locks.retain(|lock| lock.inode != inode || lock.owner != owner);
        before != locks.len()
    };
    if gone {
        BELL.ring();
    }
}

/// A process has ended.
pub fn process_ended(pid: u32) {
    LOCKS.lock().retain(|lock| lock.owner != Owner::Process(pid));
    BELL.ring();
}
