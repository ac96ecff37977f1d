//! Times as programs write them.

use super::process::Process;
use super::thread::Thread;
use super::tree::tree;
use crate::arch;
use crate::errno::Errno;
use crate::user;

/// Nanoseconds a second.
pub const SECOND: u64 = 1_000_000_000;

pub const CLOCK_REALTIME: u64 = 0;
pub const CLOCK_MONOTONIC: u64 = 1;
pub const CLOCK_PROCESS_CPUTIME_ID: u64 = 2;
pub const CLOCK_THREAD_CPUTIME_ID: u64 = 3;

/// `struct timespec`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Timespec {
    pub seconds: i64,
    pub nanoseconds: i64,
}

impl Timespec {
    /// So many ns.
    pub fn of(ns: u64) -> Self {
        Self { seconds: (ns / SECOND) as i64, nanoseconds: (ns % SECOND) as i64 }
    }

    /// Reads one of a program's.
    ///
    /// # Errors
    /// `EFAULT`.
    pub fn read(at: u64) -> Result<Self, Errno> {
        let [seconds, nanoseconds] = user::read_value::<[i64; 2]>(at)?;
        Ok(Self { seconds, nanoseconds })
    }

    /// Writes one to a program.
    ///
    /// # Errors
    /// `EFAULT`.
    pub fn write(self, at: u64) -> Result<(), Errno> {
        user::write_value(at, [self.seconds, self.nanoseconds])
    }

    /// In ns; more than there are in `u64` is as many as there are.
    ///
    /// # Errors
    /// `EINVAL` for less than nothing, or ns that are no part of a second.
    pub fn duration(self) -> Result<u64, Errno> {
        if self.seconds < 0 || !(0..SECOND as i64).contains(&self.nanoseconds) {
            return Err(Errno::EINVAL);
        }
        Ok((self.seconds as u64).saturating_mul(SECOND).saturating_add(self.nanoseconds as u64))
    }
}

/// `struct timeval` in ns.
///
/// # Errors
/// `EINVAL`.
pub fn of_timeval([seconds, microseconds]: [i64; 2]) -> Result<u64, Errno> {
    if !(0..1_000_000).contains(&microseconds) {
        return Err(Errno::EINVAL);
    }
    Timespec { seconds, nanoseconds: microseconds * 1000 }.duration()
}

/// Ns as `struct timeval`.
pub fn timeval(ns: u64) -> [i64; 2] {
    [(ns / SECOND) as i64, (ns % SECOND / 1000) as i64]
}

/// What a clock says, in ns.
///
/// # Errors
/// `EINVAL` for a clock that there is not.
pub fn clock(id: u64, thread: &Thread) -> Result<u64, Errno> {
    Ok(match id as i32 {
        // Real, coarse, and international time; the last without leap seconds, as long as nobody sets them.
        0 | 5 | 8 | 11 => arch::realtime(),
        1 | 4 | 6 | 7 | 9 => arch::now(),
        2 => process_time(thread),
        3 => thread.run_time(),
        // Of another process or thread: the number is in the upper bits, turned around.
        id if id < 0 => {
            // Of a time that there is: in all, of the program, of the scheduler; the fourth would be of a descriptor.
            if id & 3 == 3 {
                return Err(Errno::EINVAL);
            }
            let number = !(id >> 3) as u32;
            let of_thread = id & 4 != 0;
            let tree = tree();
            match (number, of_thread) {
                (0, true) => thread.run_time(),
                (0, false) => {
                    drop(tree);
                    process_time(thread)
                }
                (number, true) => tree.thread(number).ok_or(Errno::EINVAL)?.run_time(),
                (number, false) => {
                    let node = tree.process(number).ok_or(Errno::EINVAL)?;
                    let ended = node.process.ended.lock().time;
                    ended + tree.threads_of(&node.process).map(Thread::run_time).sum::<u64>()
                }
            }
        }
        _ => return Err(Errno::EINVAL),
    })
}

/// How long the threads of the process of `thread` have run, in ns.
pub fn process_time(thread: &Thread) -> u64 {
    time_of(thread.process())
}

/// How long the threads of a process have run, in ns.
pub fn time_of(process: &Process) -> u64 {
    let tree = tree();
    let ended = process.ended.lock().time;
    ended + tree.threads_of(process).map(Thread::run_time).sum::<u64>()
}

/// A time of the clock `id` as one of [`arch::now`]'s: for deadlines.
///
/// # Errors
/// `EINVAL` for a clock that deadlines cannot be of.
pub fn deadline(id: u64, time: u64) -> Result<u64, Errno> {
    match id {
        0 | 5 | 8 | 11 => Ok(arch::now().saturating_add(time.saturating_sub(arch::realtime()))),
        1 | 4 | 6 | 7 | 9 => Ok(time),
        _ => Err(Errno::EINVAL),
    }
}
