//! Inodes: what names and descriptors lead to.

use super::abi::{S_IFCHR, S_IFDIR, S_IFIFO, S_IFLNK, S_IFREG, S_IFSOCK};
use super::device::Device;
use super::directory::Directory;
use super::epoll::Epoll;
use super::event::Event;
use super::permission::Who;
use super::pipe::Pipe;
use super::procfs::Entry;
use super::regular::Regular;
use super::signals::Signals;
use super::socket::Socket;
use super::timer::Timer;
use super::userfault::UserFault;
use crate::arch;
use crate::errno::Errno;
use crate::mm::Object;
use crate::sync::SpinLock;
use crate::task::process::Process;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};
use terrane::sync::Shared;

/// An inode, with its owners counted.
pub type Node = Shared<Inode>;

/// A moment, since 1970.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Time {
    pub seconds: i64,
    pub nanoseconds: u32,
}

impl Time {
    /// This moment.
    pub fn now() -> Self {
        let now = arch::realtime();
        Self { seconds: (now / 1_000_000_000) as i64, nanoseconds: (now % 1_000_000_000) as u32 }
    }
}

/// What can be changed of any inode.
#[derive(Clone, Copy, Debug)]
pub struct Attributes {
    /// The permissions: 12 bits.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// Names that lead to it.
    pub links: u32,
    pub accessed: Time,
    pub modified: Time,
    pub changed: Time,
}

/// The file systems, by their minor device numbers (the major one is 0).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Volume {
    /// The tree.
    Root = 2,
    /// What has no name: pipes, events.
    Anonymous = 15,
    /// `memfd`s.
    Memory = 1,
    /// `/proc`.
    Proc = 21,
}

/// What it is.
pub enum Kind {
    Directory(Directory),
    Regular(Regular),
    /// A symbolic link, and where it leads.
    Symlink(Vec<u8>),
    Device(Device),
    Pipe(Pipe),
    Event(Event),
    Timer(Timer),
    Epoll(Epoll),
    Signals(Signals),
    UserFault(UserFault),
    Process(Shared<Process>),
    Socket(Socket),
    /// What `/proc` and `/sys` make up when they are asked.
    Proc(Entry),
}

/// An inode.
pub struct Inode {
    pub number: u64,
    pub volume: Volume,
    pub kind: Kind,
    pub attributes: SpinLock<Attributes>,
}

static NUMBERS: AtomicU64 = AtomicU64::new(2);

impl Inode {
    /// A new inode with permissions `mode`, and one name.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_new(volume: Volume, kind: Kind, mode: u32) -> Result<Node, Errno> {
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        Self::with_number(volume, kind, mode, number)
    }

    /// The same with a number of the caller's choice.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn with_number(volume: Volume, kind: Kind, mode: u32, number: u64) -> Result<Node, Errno> {
        let now = Time::now();
        let who = Who::calls();
        let links = if matches!(kind, Kind::Directory(_)) { 2 } else { 1 };
        let attributes = Attributes {
            mode: mode & 0o7777,
            uid: who.uid,
            gid: who.gid,
            links,
            accessed: now,
            modified: now,
            changed: now,
        };
        Ok(Shared::try_new(Self { number, volume, kind, attributes: SpinLock::new(attributes) })?)
    }

    /// The type, as in `st_mode`.
    pub fn file_type(&self) -> u32 {
        match &self.kind {
            Kind::Directory(_) => S_IFDIR,
            Kind::Regular(_) => S_IFREG,
            Kind::Symlink(_) => S_IFLNK,
            Kind::Device(_) => S_IFCHR,
            Kind::Pipe(_) => S_IFIFO,
            Kind::Socket(_) => S_IFSOCK,
            Kind::Event(_)
            | Kind::Timer(_)
            | Kind::Epoll(_)
            | Kind::Signals(_)
            | Kind::UserFault(_)
            | Kind::Process(_) => 0,
            Kind::Proc(entry) => entry.file_type(),
        }
    }

    /// True for directories of any sort.
    pub fn is_directory(&self) -> bool {
        self.file_type() == S_IFDIR
    }

    /// True for symbolic links of any sort.
    pub fn is_link(&self) -> bool {
        self.file_type() == S_IFLNK
    }

    /// The directory, if it is one of those in memory.
    pub fn directory(&self) -> Option<&Directory> {
        match &self.kind {
            Kind::Directory(directory) => Some(directory),
            _ => None,
        }
    }

    /// The file, if it is a regular one in memory.
    pub fn regular(&self) -> Option<&Regular> {
        match &self.kind {
            Kind::Regular(regular) => Some(regular),
            _ => None,
        }
    }

    /// The object of Terrane whose pages are the bytes of a regular file.
    pub fn object(&self) -> Option<&Object> {
        self.regular().map(Regular::object)
    }

    /// Length in bytes, as `stat` gives it.
    pub fn len(&self) -> u64 {
        match &self.kind {
            Kind::Regular(regular) => regular.len(),
            Kind::Symlink(target) => target.len() as u64,
            Kind::Directory(directory) => directory.len() as u64 * 20 + 40,
            Kind::Proc(entry) => entry.len(),
            _ => 0,
        }
    }

    /// The number of the device that it is, not the one it lies on.
    pub fn device_number(&self) -> u64 {
        match &self.kind {
            Kind::Device(device) => device.number(),
            _ => 0,
        }
    }

    /// Says that the bytes, or the entries, have changed.
    pub fn touch(&self) {
        let now = Time::now();
        let mut attributes = self.attributes.lock();
        (attributes.modified, attributes.changed) = (now, now);
    }

    /// Says that something about it has changed that is not its bytes.
    pub fn touch_attributes(&self) {
        self.attributes.lock().changed = Time::now();
    }
}
