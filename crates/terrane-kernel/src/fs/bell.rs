//! What rings when a pipe, an event or the like changes: those who wait look again, and `epoll` sees that something has happened.

use crate::errno::Errno;
use crate::task::wait::{Queue, Wake};
use core::sync::atomic::{AtomicU64, Ordering};

/// A queue, and how often it was rung.
pub struct Bell {
    pub queue: Queue,
    rings: AtomicU64,
}

impl Bell {
    /// A bell that was never rung.
    pub const fn new() -> Self {
        Self { queue: Queue::new(), rings: AtomicU64::new(0) }
    }

    /// Something has changed. Not while holding what the conditions of those who wait lock.
    pub fn ring(&self) {
        self.rings.fetch_add(1, Ordering::AcqRel);
        self.queue.wake_all();
    }

    /// How often it was rung.
    pub fn rings(&self) -> u64 {
        self.rings.load(Ordering::Acquire)
    }

    /// Waits until `condition` holds.
    ///
    /// # Errors
    /// `ERESTARTSYS` when a signal comes first.
    pub fn wait(&self, condition: impl FnMut() -> bool) -> Result<(), Errno> {
        self.queue.wait_until(None, condition).map_err(interrupted)
    }
}

/// What a wait that ended early means to a call that begins anew after a signal.
pub fn interrupted(wake: Wake) -> Errno {
    match wake {
        Wake::Signal => Errno::ERESTARTSYS,
        Wake::Timeout => Errno::EAGAIN,
    }
}
