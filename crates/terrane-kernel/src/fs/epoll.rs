//! `epoll`: a set of files that are waited for.
//!
//! An epoll owns the files in it; they leave it when their last descriptor is closed ([`forget`]). It keeps no list of what is ready, but asks its
//! files: sets are small here. Edge-triggered means that a file's bell was rung since it was last reported.

use super::abi::{POLLERR, POLLHUP, POLLIN, POLLRDNORM};
use super::bell::Bell;
use super::inode::{Kind, Node};
use super::open::Open;
use crate::errno::Errno;
use crate::sync::SpinLock;
use alloc::vec::Vec;
use core::sync::atomic::Ordering;

/// `EPOLLET`.
const EDGE: u32 = 1 << 31;
/// `EPOLLONESHOT`.
const ONCE: u32 = 1 << 30;
/// The flags beside the events: `EPOLLET`, `EPOLLONESHOT`, `EPOLLWAKEUP`, `EPOLLEXCLUSIVE`.
const FLAGS: u32 = 0xf << 28;
/// Epolls in epolls.
const DEPTH: usize = 4;

struct Watch {
    fd: i32,
    file: Open,
    events: u32,
    data: u64,
    /// How often the bell had been rung when it was last reported.
    reported: Option<u64>,
}

/// The set of an `epoll`.
pub struct Epoll {
    watches: SpinLock<Vec<Watch>>,
    /// Rung when the set changes.
    pub bell: Bell,
}

/// All epolls with something in them. An epoll in it is kept by the files in it only, so it is taken out when it ends: see [`Epoll::drop`].
static ALL: SpinLock<Vec<usize>> = SpinLock::new(Vec::new());

/// An event, as programs get it.
#[derive(Clone, Copy)]
pub struct Ready {
    pub events: u32,
    pub data: u64,
}

impl Epoll {
    /// An empty set.
    pub const fn new() -> Self {
        Self { watches: SpinLock::new(Vec::new()), bell: Bell::new() }
    }

    /// `EPOLL_CTL_ADD`.
    ///
    /// # Errors
    /// `EEXIST`, `EPERM` for a file that is always ready, `ELOOP`, `ENOMEM`.
    pub fn add(&self, fd: i32, file: &Open, events: u32, data: u64) -> Result<(), Errno> {
        if file.queue().is_none() {
            return Err(Errno::EPERM);
        }
        if let Kind::Epoll(inner) = &file.node.kind
            && inner.depth() >= DEPTH
        {
            return Err(Errno::ELOOP);
        }
        let myself = core::ptr::from_ref(self).expose_provenance();
        {
            let mut all = ALL.lock();
            if !all.contains(&myself) {
                all.try_reserve(1)?;
                all.push(myself);
            }
            let mut watches = self.watches.lock();
            if watches.iter().any(|watch| watch.fd == fd && Open::ptr_eq(&watch.file, file)) {
                return Err(Errno::EEXIST);
            }
            watches.try_reserve(1)?;
            watches.push(Watch { fd, file: file.clone(), events, data, reported: None });
            file.watched.store(1, Ordering::Release);
        }
        self.bell.ring();
        Ok(())
    }

    /// `EPOLL_CTL_MOD`.
    ///
    /// # Errors
    /// `ENOENT`.
    pub fn change(&self, fd: i32, file: &Open, events: u32, data: u64) -> Result<(), Errno> {
        {
            let mut watches = self.watches.lock();
            let watch = watches.iter_mut().find(|watch| watch.fd == fd && Open::ptr_eq(&watch.file, file));
            let watch = watch.ok_or(Errno::ENOENT)?;
            (watch.events, watch.data, watch.reported) = (events, data, None);
        }
        self.bell.ring();
        Ok(())
    }

    /// `EPOLL_CTL_DEL`.
    ///
    /// # Errors
    /// `ENOENT`.
    pub fn remove(&self, fd: i32, file: &Open) -> Result<(), Errno> {
        let removed = {
            let mut watches = self.watches.lock();
            let place = watches.iter().position(|watch| watch.fd == fd && Open::ptr_eq(&watch.file, file));
            watches.swap_remove(place.ok_or(Errno::ENOENT)?)
        };
        drop(removed);
        Ok(())
    }

    /// Puts what is ready into `into`, at most as much as there is room for, and notes that it was reported.
    pub fn collect(&self, into: &mut Vec<Ready>) {
        let mut watches = self.watches.lock();
        for watch in watches.iter_mut() {
            if into.len() == into.capacity() {
                return;
            }
            let rings = watch.file.changes();
            let ready = watch.ready();
            if ready == 0 {
                continue;
            }
            watch.reported = Some(rings);
            if watch.events & ONCE != 0 {
                watch.events &= FLAGS;
            }
            into.push(Ready { events: ready, data: watch.data });
        }
        // Who comes last is looked at first next time.
        if !watches.is_empty() {
            watches.rotate_left(1);
        }
    }

    /// The files in it, and those in epolls in it: what is to be waited for.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn files(&self, into: &mut Vec<Open>) -> Result<(), Errno> {
        let first = into.len();
        {
            let watches = self.watches.lock();
            into.try_reserve(watches.len())?;
            into.extend(watches.iter().map(|watch| watch.file.clone()));
        }
        for place in first..into.len() {
            let file = into[place].clone();
            if let Kind::Epoll(inner) = &file.node.kind {
                inner.files(into)?;
            }
        }
        Ok(())
    }

    /// What `poll` says.
    pub fn ready(&self) -> u32 {
        let ready = self.watches.lock().iter().any(|watch| watch.ready() != 0);
        if ready { POLLIN | POLLRDNORM } else { 0 }
    }

    /// When that changes without a bell.
    pub fn deadline(&self) -> Option<u64> {
        self.watches.lock().iter().filter_map(|watch| watch.file.deadline()).min()
    }

    fn depth(&self) -> usize {
        let watches = self.watches.lock();
        let depths = watches.iter().map(|watch| match &watch.file.node.kind {
            Kind::Epoll(inner) => inner.depth(),
            _ => 0,
        });
        1 + depths.max().unwrap_or(0)
    }

    /// True when `node` is this epoll, or in it at some depth.
    pub fn contains(&self, node: &Node) -> bool {
        self.watches.lock().iter().any(|watch| {
            Node::ptr_eq(&watch.file.node, node)
                || matches!(&watch.file.node.kind, Kind::Epoll(inner) if inner.contains(node))
        })
    }
}

impl Watch {
    /// What is to be reported.
    fn ready(&self) -> u32 {
        if self.events & !FLAGS == 0 {
            return 0;
        }
        if self.events & EDGE != 0 && self.reported == Some(self.file.changes()) {
            return 0;
        }
        self.file.ready() & (self.events & !FLAGS | POLLERR | POLLHUP)
    }
}

impl Drop for Epoll {
    fn drop(&mut self) {
        let myself = core::ptr::from_ref(self).expose_provenance();
        ALL.lock().retain(|&other| other != myself);
    }
}

/// No descriptor stands for `file` any more: it leaves all epolls.
pub fn forget(file: &Open) {
    let mut removed = Vec::new();
    let all = ALL.lock();
    for &epoll in all.iter() {
        // SAFETY: an epoll takes itself out of the list, under its lock, before it ends.
        let epoll = unsafe { &*core::ptr::with_exposed_provenance::<Epoll>(epoll) };
        let mut watches = epoll.watches.lock();
        while let Some(place) = watches.iter().position(|watch| Open::ptr_eq(&watch.file, file)) {
            let watch = watches.swap_remove(place);
            // The caller has an owner of the file too, so none ends here.
            if removed.try_reserve(1).is_ok() {
                removed.push(watch);
            }
        }
    }
}
