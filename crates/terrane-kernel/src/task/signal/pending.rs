//! Signals that wait.

use super::{Info, REAL_TIME, SI_USER, Set};
use crate::errno::Errno;
use crate::task::lock::Lock;
use alloc::collections::VecDeque;
use core::sync::atomic::{AtomicU64, Ordering};

/// Signals that queue wait in this number at most: what `RLIMIT_SIGPENDING` says.
const QUEUED_MAX: usize = 0x7fff;

/// The signals that wait for a thread, or for a process.
pub struct Pending {
    /// Which; changed under the lock, read without.
    set: AtomicU64,
    /// What is known about them, oldest first. A signal of the set without an entry here has been sent by somebody when there was no memory for it.
    infos: Lock<VecDeque<Info>>,
}

impl Pending {
    /// None.
    pub const fn new() -> Self {
        Self { set: AtomicU64::new(0), infos: Lock::new(VecDeque::new()) }
    }

    /// Which there are.
    pub fn set(&self) -> Set {
        Set(self.set.load(Ordering::SeqCst))
    }

    /// Adds one. An ordinary signal that waits already is not added again; those from [`REAL_TIME`] on queue.
    ///
    /// # Errors
    /// [`Errno::EAGAIN`] when one that queues cannot, for want of memory or because too many do, and it was not sent by a mere `kill`.
    pub fn post(&self, info: Info) -> Result<(), Errno> {
        let mut infos = self.infos.lock();
        let known = self.set().has(info.signal);
        if info.signal < REAL_TIME && known {
            return Ok(());
        }
        let room = infos.len() < QUEUED_MAX && infos.try_reserve(1).is_ok();
        if room {
            infos.push_back(info);
        } else if info.signal >= REAL_TIME && info.code != SI_USER {
            return Err(Errno::EAGAIN);
        }
        self.set.fetch_or(Set::of(info.signal).0, Ordering::SeqCst);
        Ok(())
    }

    /// Takes one of `wanted` out: those that an instruction caused first, then the lowest number.
    pub fn take(&self, wanted: Set) -> Option<Info> {
        if self.set().0 & wanted.0 == 0 {
            return None;
        }
        let mut infos = self.infos.lock();
        let here = self.set().0 & wanted.0;
        let first = if here & Set::SYNCHRONOUS.0 != 0 { here & Set::SYNCHRONOUS.0 } else { here };
        if first == 0 {
            return None;
        }
        let signal = first.trailing_zeros() + 1;
        let place = infos.iter().position(|info| info.signal == signal);
        let info = match place {
            Some(place) => infos.remove(place).unwrap_or_default(),
            None => Info { signal, ..Info::default() },
        };
        if !infos.iter().any(|info| info.signal == signal) {
            self.set.fetch_and(!Set::of(signal).0, Ordering::SeqCst);
        }
        Some(info)
    }

    /// Drops those of `set`.
    pub fn forget(&self, set: Set) {
        if self.set().0 & set.0 == 0 {
            return;
        }
        let mut infos = self.infos.lock();
        infos.retain(|info| !set.has(info.signal));
        self.set.fetch_and(!set.0, Ordering::SeqCst);
    }
}
