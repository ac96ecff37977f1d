//! The timers of a process: `alarm`, `setitimer`, `timer_create`.
//!
//! Each lies in its process, which lives until they are stopped, at its end. They fire in the timer's interrupt and send a signal from there.
//! Timers of processor time (`ITIMER_VIRTUAL`, `ITIMER_PROF`, the clocks of processes and threads) go by the time of the whole process: they fire when that could
//! have come at the earliest, and fire again later when it has not.

use core::ptr;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::lock::Lock;
use super::process::Process;
use super::signal::{self, Info, SI_TIMER, SIGALRM, SIGPROF, SIGVTALRM};
use super::time;
use super::timer::{Fire, Timer};
use super::tree::tree;
use crate::arch;
use crate::errno::Errno;

/// Timers that a process can create.
pub const CREATED_MAX: usize = 32;
/// How soon a timer of processor time looks again, in ns.
const LOOK_AGAIN: u64 = 1_000_000;
/// `setitimer`'s.
const INTERVAL: usize = 3;

/// How a timer tells that its time has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Notice {
    /// `alarm`, `setitimer`.
    Interval(u32),
    /// A signal with a value, to the process or to one thread.
    Signal { signal: u32, value: u64, thread: u32 },
    /// Nothing: somebody looks.
    None,
}

/// A timer of a process.
pub struct ProcessTimer {
    timer: Timer,
    setting: Lock<Setting>,
    /// In ns; 0 for once.
    interval: AtomicU64,
    /// For one of processor time, the process's time at which it comes; 0 for others.
    target: AtomicU64,
    /// How often it has come again before its signal was taken.
    overrun: AtomicU32,
    /// Its process; null until it has been started.
    process: core::sync::atomic::AtomicPtr<Process>,
    number: AtomicU32,
}

#[derive(Clone, Copy)]
struct Setting {
    used: bool,
    clock: u64,
    notice: Notice,
}

/// All of them.
pub struct Timers {
    timers: [ProcessTimer; INTERVAL + CREATED_MAX],
    /// Held while they are set: setting is not one step.
    pub setting: crate::sync::Mutex<()>,
}

impl ProcessTimer {
    const fn new() -> Self {
        Self {
            timer: Timer::new(),
            setting: Lock::new(Setting { used: false, clock: 1, notice: Notice::None }),
            interval: AtomicU64::new(0),
            target: AtomicU64::new(0),
            overrun: AtomicU32::new(0),
            process: core::sync::atomic::AtomicPtr::new(ptr::null_mut()),
            number: AtomicU32::new(0),
        }
    }

    /// When it comes next, in ns from now (0 when it is stopped), and its interval.
    pub fn get(&self, process: &Process) -> (u64, u64) {
        let left = self.timer.deadline().map_or(0, |at| {
            let left = match self.target.load(Ordering::Relaxed) {
                0 => at.saturating_sub(arch::now()),
                target => target.saturating_sub(time::time_of(process)),
            };
            left.max(1)
        });
        (left, self.interval.load(Ordering::Relaxed))
    }

    /// How often it has come again before its signal was taken.
    pub fn overrun(&self) -> u32 {
        self.overrun.load(Ordering::Relaxed)
    }

    /// The clock that it was made with.
    pub fn clock(&self) -> u64 {
        self.setting.lock().clock
    }

    /// Sets it to come in `value` ns, or stops it where that is 0; then again after each `interval` ns, if not 0. With
    /// [`Timers::setting`] held.
    pub fn set(&self, process: &Process, value: u64, interval: u64, of_processor: bool) {
        self.timer.stop();
        self.interval.store(interval, Ordering::Relaxed);
        self.overrun.store(0, Ordering::Relaxed);
        self.process.store(ptr::from_ref(process).cast_mut(), Ordering::Relaxed);
        let target = if of_processor { time::time_of(process).saturating_add(value) } else { 0 };
        self.target.store(target, Ordering::Relaxed);
        if value != 0 {
            let at = arch::now().saturating_add(value);
            // SAFETY: it lies in its process, which stops it before it ends.
            unsafe { self.timer.start(at, Fire::Call(fire, ptr::from_ref(self).cast())) };
        }
    }
}

/// A timer's time has come: in an interrupt.
fn fire(timer: *const ()) -> Option<u64> {
    // SAFETY: it was started with itself, and is in its process, which stops it before it ends.
    let timer = unsafe { &*timer.cast::<ProcessTimer>() };
    // SAFETY: as above.
    let process = unsafe { &*timer.process.load(Ordering::Relaxed) };
    let target = timer.target.load(Ordering::Relaxed);
    if target != 0 {
        let left = target.saturating_sub(time::time_of(process));
        if left > 0 {
            // As many CPUs as there are may run it.
            return Some(arch::now() + (left / arch::cpu_count() as u64).max(LOOK_AGAIN));
        }
        timer.target.store(target + timer.interval.load(Ordering::Relaxed), Ordering::Relaxed);
    }
    let number = timer.number.load(Ordering::Relaxed);
    let (info, thread) = match timer.setting.lock().notice {
        Notice::Interval(signal) => (Info::from_kernel(signal), 0),
        Notice::Signal { signal, value, thread } => {
            let words = [u64::from(number), value, 0, 0];
            (Info { signal, code: SI_TIMER, words, ..Info::default() }, thread)
        }
        Notice::None => (Info::default(), 0),
    };
    if info.signal != 0 {
        let tree = tree();
        if process.pending.set().has(info.signal) {
            timer.overrun.fetch_add(1, Ordering::Relaxed);
        }
        let to = (thread != 0).then(|| tree.thread(thread)).flatten();
        let _ = match to {
            Some(thread) => signal::send_to_thread(&tree, thread, info),
            None => signal::send_to_process(&tree, process, info),
        };
    }
    let interval = timer.interval.load(Ordering::Relaxed);
    (interval != 0).then(|| arch::now().saturating_add(interval))
}

impl Timers {
    /// None of them runs.
    pub const fn new() -> Self {
        Self {
            timers: [const { ProcessTimer::new() }; INTERVAL + CREATED_MAX],
            setting: crate::sync::Mutex::new(()),
        }
    }

    /// `setitimer`'s timer number `which`.
    ///
    /// # Errors
    /// `EINVAL`.
    pub fn interval(&self, which: u64) -> Result<&ProcessTimer, Errno> {
        let signal = match which {
            0 => SIGALRM,
            1 => SIGVTALRM,
            2 => SIGPROF,
            _ => return Err(Errno::EINVAL),
        };
        let timer = &self.timers[which as usize];
        timer.setting.lock().notice = Notice::Interval(signal);
        Ok(timer)
    }

    /// Makes a timer; returns its number.
    ///
    /// # Errors
    /// `EAGAIN` when there are too many.
    pub fn create(&self, clock: u64, notice: Notice) -> Result<u32, Errno> {
        let _one = self.setting.lock();
        let free = self.timers[INTERVAL..].iter().position(|timer| !timer.setting.lock().used);
        let number = free.ok_or(Errno::EAGAIN)?;
        let timer = &self.timers[INTERVAL + number];
        let notice = match notice {
            // Without a `sigevent`: the value is the number.
            Notice::Signal { signal, value: u64::MAX, thread } => {
                Notice::Signal { signal, value: number as u64, thread }
            }
            notice => notice,
        };
        *timer.setting.lock() = Setting { used: true, clock, notice };
        timer.number.store(number as u32, Ordering::Relaxed);
        timer.interval.store(0, Ordering::Relaxed);
        Ok(number as u32)
    }

    /// The timer with this number.
    ///
    /// # Errors
    /// `EINVAL`.
    pub fn created(&self, number: u64) -> Result<&ProcessTimer, Errno> {
        let timer =
            usize::try_from(number as u32).ok().and_then(|number| self.timers[INTERVAL..].get(number));
        timer.filter(|timer| timer.setting.lock().used).ok_or(Errno::EINVAL)
    }

    /// Ends the timer with this number.
    ///
    /// # Errors
    /// `EINVAL`.
    pub fn delete(&self, number: u64) -> Result<(), Errno> {
        let _one = self.setting.lock();
        let timer = self.created(number)?;
        timer.timer.stop();
        timer.setting.lock().used = false;
        Ok(())
    }

    /// Stops them all: the process ends.
    pub fn stop(&self) {
        let _one = self.setting.lock();
        for timer in &self.timers {
            timer.timer.stop();
        }
    }

    /// Ends those that were created: the process becomes a new program.
    pub fn forget_created(&self) {
        let _one = self.setting.lock();
        for timer in &self.timers[INTERVAL..] {
            timer.timer.stop();
            timer.setting.lock().used = false;
        }
    }
}
