//! `eventfd`: a counter that can be waited for.

use super::abi::{POLLERR, POLLIN, POLLOUT, POLLRDNORM, POLLWRNORM};
use super::bell::Bell;
use crate::errno::Errno;
use crate::sync::SpinLock;

/// The counter of an `eventfd`.
pub struct Event {
    count: SpinLock<u64>,
    /// A read takes one, not all.
    takes_one: bool,
    pub bell: Bell,
}

impl Event {
    /// A counter that begins with `count`.
    pub fn new(count: u64, takes_one: bool) -> Self {
        Self { count: SpinLock::new(count), takes_one, bell: Bell::new() }
    }

    /// Takes the count, or one.
    ///
    /// # Errors
    /// `EAGAIN`, `ERESTARTSYS`.
    pub fn read(&self, blocks: bool) -> Result<u64, Errno> {
        loop {
            {
                let mut count = self.count.lock();
                if *count > 0 {
                    let taken = if self.takes_one { 1 } else { *count };
                    *count -= taken;
                    drop(count);
                    self.bell.ring();
                    return Ok(taken);
                }
            }
            if !blocks {
                return Err(Errno::EAGAIN);
            }
            self.bell.wait(|| *self.count.lock() > 0)?;
        }
    }

    /// Adds to the count.
    ///
    /// # Errors
    /// `EINVAL` for the greatest number, `EAGAIN`, `ERESTARTSYS`.
    pub fn write(&self, value: u64, blocks: bool) -> Result<(), Errno> {
        if value == u64::MAX {
            return Err(Errno::EINVAL);
        }
        loop {
            {
                let mut count = self.count.lock();
                if value < u64::MAX - *count {
                    *count += value;
                    drop(count);
                    self.bell.ring();
                    return Ok(());
                }
            }
            if !blocks {
                return Err(Errno::EAGAIN);
            }
            self.bell.wait(|| value < u64::MAX - *self.count.lock())?;
        }
    }

    /// What `poll` says.
    pub fn ready(&self) -> u32 {
        let count = *self.count.lock();
        let readable = if count > 0 { POLLIN | POLLRDNORM } else { 0 };
        let writable = if count < u64::MAX - 1 { POLLOUT | POLLWRNORM } else { 0 };
        let overflow = if count == u64::MAX { POLLERR } else { 0 };
        readable | writable | overflow
    }
}
