//! `timerfd`: a time that can be waited for. Nothing runs when it comes: who waits does so until then.

use super::abi::{POLLIN, POLLRDNORM};
use super::bell::{Bell, interrupted};
use crate::arch;
use crate::errno::Errno;
use crate::sync::SpinLock;
use crate::task::wait::Wake;

/// When it goes off. In ns.
#[derive(Clone, Copy, Default)]
pub struct Setting {
    /// The next time, as `arch::now` counts; 0 for never.
    pub next: u64,
    /// From one time to the next; 0 for only once.
    pub interval: u64,
}

/// The timer of a `timerfd`.
pub struct Timer {
    setting: SpinLock<Setting>,
    /// It follows `CLOCK_REALTIME`.
    pub real: bool,
    pub bell: Bell,
}

impl Timer {
    /// A timer that is not set.
    pub fn new(real: bool) -> Self {
        Self { setting: SpinLock::new(Setting::default()), real, bell: Bell::new() }
    }

    /// Sets it; what was set before.
    pub fn set(&self, setting: Setting) -> Setting {
        let before = core::mem::replace(&mut *self.setting.lock(), setting);
        self.bell.ring();
        before
    }

    /// What is set: a repeating one's next time lies in the future unless it was not read since.
    pub fn get(&self) -> Setting {
        *self.setting.lock()
    }

    /// How often it has gone off since the last read: at least once.
    ///
    /// # Errors
    /// `EAGAIN`, `ERESTARTSYS`.
    pub fn read(&self, blocks: bool) -> Result<u64, Errno> {
        loop {
            let (next, rings) = {
                let mut setting = self.setting.lock();
                let now = arch::now();
                if setting.next != 0 && setting.next <= now {
                    if setting.interval == 0 {
                        setting.next = 0;
                        return Ok(1);
                    }
                    let times = 1 + (now - setting.next) / setting.interval;
                    setting.next += times * setting.interval;
                    return Ok(times);
                }
                (setting.next, self.bell.rings())
            };
            if !blocks {
                return Err(Errno::EAGAIN);
            }
            let deadline = Some(next).filter(|&next| next != 0);
            match self.bell.queue.wait_until(deadline, || self.bell.rings() != rings) {
                Ok(()) | Err(Wake::Timeout) => {}
                Err(signal) => return Err(interrupted(signal)),
            }
        }
    }

    /// When `poll` is to look again.
    pub fn deadline(&self) -> Option<u64> {
        Some(self.get().next).filter(|&next| next != 0)
    }

    /// What `poll` says.
    pub fn ready(&self) -> u32 {
        if self.deadline().is_some_and(|next| next <= arch::now()) { POLLIN | POLLRDNORM } else { 0 }
    }
}
