//! Who may do what: by the effective user and group of the process, as on Linux without capabilities, groups beyond the first, or access lists.

use super::inode::{Inode, Node};
use crate::errno::Errno;
use crate::task::thread::try_current;

/// To run a file, or to look a name up in a directory.
pub const EXECUTE: u32 = 1;
/// To change bytes, or the names in a directory.
pub const WRITE: u32 = 2;
/// To read bytes, or to list names.
pub const READ: u32 = 4;

/// Whose permissions count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Who {
    pub uid: u32,
    pub gid: u32,
}

impl Who {
    /// The effective user of the thread that calls; the superuser at start.
    pub fn calls() -> Self {
        Self::from_ids(1)
    }

    /// The real user of the thread that calls.
    pub fn really_calls() -> Self {
        Self::from_ids(0)
    }

    fn from_ids(which: usize) -> Self {
        try_current().map_or(Self { uid: 0, gid: 0 }, |thread| {
            let process = thread.process();
            Self { uid: process.user_ids()[which], gid: process.group_ids()[which] }
        })
    }

    /// It may do everything.
    pub fn is_superuser(self) -> bool {
        self.uid == 0
    }

    /// Whether it may do what `wanted` says.
    ///
    /// # Errors
    /// `EACCES`.
    pub fn may(self, node: &Inode, wanted: u32) -> Result<(), Errno> {
        let attributes = *node.attributes.lock();
        let allowed = if self.is_superuser() {
            // Everything, but running what nobody may run.
            let runs = node.is_directory() || attributes.mode & 0o111 != 0;
            READ | WRITE | if runs { EXECUTE } else { 0 }
        } else if self.uid == attributes.uid {
            attributes.mode >> 6
        } else if self.gid == attributes.gid {
            attributes.mode >> 3
        } else {
            attributes.mode
        };
        if wanted & !allowed == 0 { Ok(()) } else { Err(Errno::EACCES) }
    }

    /// Whether it may change what only the owner may.
    ///
    /// # Errors
    /// `EPERM`.
    pub fn owns(self, node: &Inode) -> Result<(), Errno> {
        let owner = node.attributes.lock().uid;
        if self.is_superuser() || self.uid == owner { Ok(()) } else { Err(Errno::EPERM) }
    }

    /// Whether it may put names into a directory, or, with `node`, take the one away that leads there.
    ///
    /// # Errors
    /// `EACCES`; `EPERM` when only the owner may (the sticky bit).
    pub fn may_change(self, directory: &Node, node: Option<&Node>) -> Result<(), Errno> {
        if self.is_superuser() {
            return Ok(());
        }
        self.may(directory, WRITE | EXECUTE)?;
        let sticky = directory.attributes.lock().mode & 0o1000 != 0;
        match node {
            Some(node) if sticky && self.owns(directory).is_err() => self.owns(node),
            _ => Ok(()),
        }
    }
}
