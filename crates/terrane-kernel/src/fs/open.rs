//! Open files: what descriptors stand for.

use super::abi::{O_ACCMODE, O_APPEND, O_NONBLOCK, O_PATH, O_RDWR, O_WRONLY};
use super::abi::{POLLIN, POLLOUT, POLLRDNORM, POLLWRNORM};
use super::bell::Bell;
use super::epoll;
use super::inode::{Kind, Node};
use super::locks;
use super::pidfd;
use super::procfs::Reading;
use crate::arch;
use crate::errno::Errno;
use crate::sync::{Mutex, SpinLock};
use crate::task::wait::Queue;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use terrane::sync::Shared;

/// An open file, with its owners counted.
pub type Open = Shared<OpenFile>;

/// An open file.
pub struct OpenFile {
    pub node: Node,
    /// How it was opened, and the flags that `fcntl` sets.
    flags: AtomicU32,
    /// Where the next read or write begins. Held while it is under way, as by Linux.
    pub position: Mutex<u64>,
    /// The path by which it was opened, absolute.
    pub path: Vec<u8>,
    /// Descriptors that stand for it: at none, nobody will wait for it any more.
    descriptors: AtomicUsize,
    /// What it reads, if that is made up (`/proc`).
    pub text: Mutex<Reading>,
    /// It was put into an `epoll`.
    pub watched: AtomicU32,
    /// It holds or has held a lock of `flock`.
    pub locked: SpinLock<bool>,
}

impl OpenFile {
    /// Opens `node`.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_new(node: Node, flags: u32, path: Vec<u8>) -> Result<Open, Errno> {
        let file = Self {
            node,
            flags: AtomicU32::new(flags),
            position: Mutex::new(0),
            path,
            descriptors: AtomicUsize::new(0),
            text: Mutex::new(Reading::default()),
            watched: AtomicU32::new(0),
            locked: SpinLock::new(false),
        };
        // Its end closes the pipe: so it is opened first, also if there is no memory for it.
        if let Kind::Pipe(pipe) = &file.node.kind {
            pipe.open(file.reads(), file.writes());
        }
        Ok(Shared::try_new(file)?)
    }

    /// The flags, as `F_GETFL` gives them.
    pub fn flags(&self) -> u32 {
        self.flags.load(Ordering::Relaxed)
    }

    /// Changes the flags in `mask`.
    pub fn set_flags(&self, mask: u32, flags: u32) {
        let _ = self
            .flags
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |before| Some(before & !mask | flags & mask));
    }

    /// Opened for nothing but its name.
    pub fn is_path(&self) -> bool {
        self.flags() & O_PATH != 0
    }

    /// Opened for reading.
    pub fn reads(&self) -> bool {
        !self.is_path() && matches!(self.flags() & O_ACCMODE, 0 | O_RDWR)
    }

    /// Opened for writing.
    pub fn writes(&self) -> bool {
        !self.is_path() && matches!(self.flags() & O_ACCMODE, O_WRONLY | O_RDWR)
    }

    /// Writes go to the end.
    pub fn appends(&self) -> bool {
        self.flags() & O_APPEND != 0
    }

    /// Calls wait.
    pub fn blocks(&self) -> bool {
        self.flags() & O_NONBLOCK == 0
    }

    /// A descriptor stands for it.
    pub fn add_descriptor(&self) {
        self.descriptors.fetch_add(1, Ordering::Relaxed);
    }

    /// A descriptor less stands for it.
    pub fn remove_descriptor(file: &Open) {
        if file.descriptors.fetch_sub(1, Ordering::AcqRel) == 1 {
            if file.watched.load(Ordering::Acquire) != 0 {
                epoll::forget(file);
            }
            if *file.locked.lock() {
                locks::unlock_file(file);
            }
        }
    }

    /// What `poll` says: all events, asked for or not.
    pub fn ready(&self) -> u32 {
        match &self.node.kind {
            Kind::Pipe(pipe) => pipe.ready(self.reads(), self.writes()),
            Kind::Event(event) => event.ready(),
            Kind::Timer(timer) => timer.ready(),
            Kind::Epoll(epoll) => epoll.ready(),
            Kind::Signals(signals) => signals.ready(),
            Kind::UserFault(fault) => fault.ready(),
            Kind::Process(process) => pidfd::ready(process),
            Kind::Socket(socket) => socket.ready(),
            Kind::Device(device) => device.ready(),
            _ => POLLIN | POLLRDNORM | POLLOUT | POLLWRNORM,
        }
    }

    /// Where to wait until that changes.
    pub fn queue(&self) -> Option<&Queue> {
        match &self.node.kind {
            Kind::Device(device) => device.queue(),
            Kind::Process(process) => Some(&process.threads_changed),
            _ => self.bell().map(|bell| &bell.queue),
        }
    }

    /// How often it has changed; the console does so all the time.
    pub fn changes(&self) -> u64 {
        self.bell().map_or_else(arch::now, Bell::rings)
    }

    fn bell(&self) -> Option<&Bell> {
        match &self.node.kind {
            Kind::Pipe(pipe) => Some(&pipe.bell),
            Kind::Event(event) => Some(&event.bell),
            Kind::Timer(timer) => Some(&timer.bell),
            Kind::Epoll(epoll) => Some(&epoll.bell),
            Kind::UserFault(fault) => Some(fault.bell()),
            Kind::Socket(socket) => Some(&socket.input.bell),
            _ => None,
        }
    }

    /// When that changes without a bell.
    pub fn deadline(&self) -> Option<u64> {
        match &self.node.kind {
            Kind::Timer(timer) => timer.deadline(),
            Kind::Epoll(epoll) => epoll.deadline(),
            Kind::Socket(socket) => socket.deadline(),
            _ => None,
        }
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        if let Kind::Pipe(pipe) = &self.node.kind {
            pipe.close(self.reads(), self.writes());
        }
    }
}
