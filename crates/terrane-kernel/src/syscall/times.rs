//! Clocks, sleeping, timers.

use super::Answer;
use crate::arch;
use crate::errno::Errno;
use crate::task::process::Process;
use crate::task::restart;
use crate::task::thread::current;
use crate::task::time::{self, SECOND, Timespec, of_timeval, timeval};
use crate::task::timers::Notice;
use crate::task::tree::tree;
use crate::task::wait;
use crate::user;

const TIMER_ABSTIME: u64 = 1;

/// `clock_gettime`.
pub fn clock_gettime(id: u64, to: u64) -> Answer {
    Timespec::of(time::clock(id, &current())?).write(to)?;
    Ok(0)
}

/// `clock_settime`. Who sleeps until a time of the clock goes on sleeping as long as it was to be when it began.
pub fn clock_settime(id: u64, from: u64) -> Answer {
    if id as i32 != 0 {
        // The others cannot be set, or are not there.
        time::clock(id, &current())?;
        return Err(Errno::EINVAL);
    }
    let to = Timespec::read(from)?.duration()?;
    if !current().process().is_privileged() {
        return Err(Errno::EPERM);
    }
    if to < arch::now() {
        return Err(Errno::EINVAL);
    }
    arch::set_realtime(to);
    Ok(0)
}

/// `adjtimex`: the clock runs by itself, and nothing corrects it.
pub fn adjtimex(at: u64) -> Answer {
    const UNSYNCHRONISED: i64 = 0x40;
    const ERROR: u64 = 5;
    const SET_OFFSET: u32 = 0x100;
    const NANOSECONDS: u32 = 0x2000;
    const STATUS_NANOSECONDS: i64 = 0x2000;
    let modes: u32 = user::read_value(at)?;
    if modes != 0 && !current().process().is_privileged() {
        return Err(Errno::EPERM);
    }
    let tick: i64 = user::read_value(at + 88)?;
    if modes & 0x4000 != 0 && !(9000..=11000).contains(&tick) {
        return Err(Errno::EINVAL);
    }
    if modes & SET_OFFSET != 0 {
        let [seconds, part]: [i64; 2] = user::read_value(at + 72)?;
        let scale = if modes & NANOSECONDS != 0 { 1 } else { 1000 };
        let by = seconds.saturating_mul(SECOND as i64).saturating_add(part.saturating_mul(scale));
        arch::set_realtime(arch::realtime().saturating_add_signed(by).max(arch::now()));
    }
    let now = arch::realtime();
    let mut words = [0i64; 26];
    words[0] = i64::from(modes);
    // Errors in us, status, accuracy, tolerance, the time, us a tick.
    (words[3], words[4]) = (16_000_000, 16_000_000);
    words[5] = UNSYNCHRONISED | STATUS_NANOSECONDS;
    (words[6], words[7], words[8]) = (2, 1, 32_768_000);
    (words[9], words[10]) = ((now / SECOND) as i64, (now % SECOND) as i64);
    words[11] = 10_000;
    user::write_value(at, words)?;
    Ok(ERROR)
}

/// `clock_adjtime`.
pub fn clock_adjtime(id: u64, at: u64) -> Answer {
    if id as i32 != 0 {
        time::clock(id, &current())?;
        return Err(Errno::EOPNOTSUPP);
    }
    adjtimex(at)
}

/// `clock_getres`.
pub fn clock_getres(id: u64, to: u64) -> Answer {
    time::clock(id, &current())?;
    if to != 0 {
        // The coarse ones are as fine as the others here.
        Timespec::of(1).write(to)?;
    }
    Ok(0)
}

/// `gettimeofday`.
pub fn gettimeofday(to: u64, zone: u64) -> Answer {
    if to != 0 {
        user::write_value(to, timeval(arch::realtime()))?;
    }
    if zone != 0 {
        user::write_value(zone, [0u32; 2])?;
    }
    Ok(0)
}

/// `settimeofday`. The time zone is told to nobody.
pub fn settimeofday(from: u64, zone: u64) -> Answer {
    let to = match from {
        0 => None,
        at => {
            let [seconds, microseconds] = user::read_value::<[i64; 2]>(at)?;
            if !(0..=1_000_000).contains(&microseconds) {
                return Err(Errno::EINVAL);
            }
            Some(Timespec { seconds, nanoseconds: microseconds * 1000 })
        }
    };
    if zone != 0 {
        user::read_value::<[u32; 2]>(zone)?;
    }
    let to = to.map(Timespec::duration).transpose()?;
    if !current().process().is_privileged() {
        return Err(Errno::EPERM);
    }
    match to {
        Some(to) if to < arch::now() => return Err(Errno::EINVAL),
        Some(to) => arch::set_realtime(to),
        None => {}
    }
    Ok(0)
}

/// `time`.
pub fn time(to: u64) -> Answer {
    let now = arch::realtime() / SECOND;
    if to != 0 {
        user::write_value(to, now)?;
    }
    Ok(now)
}

fn sleep_until(deadline: u64, left_to: u64) -> Answer {
    match wait::sleep_until(deadline) {
        Ok(()) => Ok(0),
        Err(_) => {
            if left_to != 0 {
                Timespec::of(deadline.saturating_sub(arch::now())).write(left_to)?;
            }
            Err(Errno::EINTR)
        }
    }
}

/// `nanosleep`.
pub fn nanosleep(duration: u64, left_to: u64) -> Answer {
    let duration = Timespec::read(duration)?.duration()?;
    sleep_until(restart::deadline(&current(), duration), left_to)
}

/// `clock_nanosleep`.
pub fn clock_nanosleep(id: u64, flags: u64, at: u64, left_to: u64) -> Answer {
    let thread = current();
    let time = Timespec::read(at)?.duration()?;
    match id {
        time::CLOCK_THREAD_CPUTIME_ID => return Err(Errno::EINVAL),
        time::CLOCK_PROCESS_CPUTIME_ID => return sleep_for_process_time(flags, time),
        id => time::deadline(id, 0)?,
    };
    if flags & TIMER_ABSTIME != 0 {
        return sleep_until(time::deadline(id, time)?, 0);
    }
    sleep_until(restart::deadline(&thread, time), left_to)
}

/// Until the process has run so long: looked at again and again, for the clock stands still when it does not run.
fn sleep_for_process_time(flags: u64, time: u64) -> Answer {
    let thread = current();
    let now = time::process_time(&thread);
    let until = if flags & TIMER_ABSTIME != 0 { time } else { now.saturating_add(time) };
    loop {
        let left = until.saturating_sub(time::process_time(&thread));
        if left == 0 {
            return Ok(0);
        }
        wait::sleep_until(arch::now() + left.clamp(100_000, SECOND / 10)).map_err(|_| Errno::EINTR)?;
    }
}

fn write_interval(to: u64, (left, interval): (u64, u64)) -> Result<(), Errno> {
    let [seconds, microseconds] = timeval(left.next_multiple_of(1000));
    let [every_seconds, every_microseconds] = timeval(interval);
    user::write_value(to, [every_seconds, every_microseconds, seconds, microseconds])
}

/// `getitimer`.
pub fn getitimer(which: u64, to: u64) -> Answer {
    let thread = current();
    write_interval(to, thread.process().timers.interval(which)?.get(thread.process()))?;
    Ok(0)
}

/// `setitimer`.
pub fn setitimer(which: u64, new: u64, old: u64) -> Answer {
    let (value, interval) = match new {
        0 => (0, 0),
        at => {
            let [every_seconds, every_microseconds, seconds, microseconds] =
                user::read_value::<[i64; 4]>(at)?;
            (of_timeval([seconds, microseconds])?, of_timeval([every_seconds, every_microseconds])?)
        }
    };
    let before = set_interval(current().process(), which, value, interval)?;
    if old != 0 {
        write_interval(old, before)?;
    }
    Ok(0)
}

fn set_interval(process: &Process, which: u64, value: u64, interval: u64) -> Result<(u64, u64), Errno> {
    let timer = process.timers.interval(which)?;
    let _one = process.timers.setting.lock();
    let before = timer.get(process);
    timer.set(process, value, interval, which != 0);
    Ok(before)
}

/// `alarm`.
pub fn alarm(seconds: u64) -> Answer {
    let value = u64::from(seconds as u32) * SECOND;
    let (left, _) = set_interval(current().process(), 0, value, 0)?;
    // Rounded, but never to none.
    Ok(if left == 0 { 0 } else { ((left + SECOND / 2) / SECOND).max(1) })
}

/// `timer_create`.
pub fn timer_create(clock: u64, event: u64, to: u64) -> Answer {
    const SIGEV_SIGNAL: i32 = 0;
    const SIGEV_NONE: i32 = 1;
    const SIGEV_THREAD_ID: i32 = 4;
    let thread = current();
    time::clock(clock, &thread)?;
    let notice = match event {
        0 => Notice::Signal { signal: crate::task::signal::SIGALRM, value: u64::MAX, thread: 0 },
        at => {
            let value = user::read_value::<u64>(at)?;
            let [signal, kind, target] = user::read_value::<[i32; 3]>(at + 8)?;
            let signals = (1..=64).contains(&signal);
            match kind {
                SIGEV_NONE => Notice::None,
                SIGEV_SIGNAL if signals => Notice::Signal { signal: signal as u32, value, thread: 0 },
                SIGEV_THREAD_ID if signals => {
                    let tree = tree();
                    let found = tree.thread(target as u32).ok_or(Errno::EINVAL)?;
                    if found.process().id() != thread.process().id() {
                        return Err(Errno::EINVAL);
                    }
                    Notice::Signal { signal: signal as u32, value, thread: target as u32 }
                }
                _ => return Err(Errno::EINVAL),
            }
        }
    };
    let timers = &thread.process().timers;
    let number = timers.create(clock, notice)?;
    if let Err(errno) = user::write_value(to, number) {
        timers.delete(number.into())?;
        return Err(errno);
    }
    Ok(0)
}

fn write_setting(to: u64, (left, interval): (u64, u64)) -> Result<(), Errno> {
    let (every, left) = (Timespec::of(interval), Timespec::of(left));
    user::write_value(to, [every.seconds, every.nanoseconds, left.seconds, left.nanoseconds])
}

/// `timer_settime`.
pub fn timer_settime(number: u64, flags: u64, new: u64, old: u64) -> Answer {
    let thread = current();
    let process = thread.process();
    if new == 0 {
        return Err(Errno::EINVAL);
    }
    let [every_seconds, every, seconds, nanoseconds] = user::read_value::<[i64; 4]>(new)?;
    let interval = Timespec { seconds: every_seconds, nanoseconds: every }.duration()?;
    let value = Timespec { seconds, nanoseconds }.duration()?;
    let before = {
        let timer = process.timers.created(number)?;
        let _one = process.timers.setting.lock();
        let before = timer.get(process);
        let clock = timer.clock();
        let of_processor = time::deadline(clock, 0).is_err();
        let left = match flags & TIMER_ABSTIME {
            0 => value,
            // What has passed comes at once; 0 stops it.
            _ if value == 0 => 0,
            _ => value.saturating_sub(time::clock(clock, &thread)?).max(1),
        };
        timer.set(process, left, interval, of_processor);
        before
    };
    if old != 0 {
        write_setting(old, before)?;
    }
    Ok(0)
}

/// `timer_gettime`.
pub fn timer_gettime(number: u64, to: u64) -> Answer {
    let thread = current();
    let process = thread.process();
    write_setting(to, process.timers.created(number)?.get(process))?;
    Ok(0)
}

/// `timer_getoverrun`.
pub fn timer_getoverrun(number: u64) -> Answer {
    Ok(current().process().timers.created(number)?.overrun().into())
}

/// `timer_delete`.
pub fn timer_delete(number: u64) -> Answer {
    current().process().timers.delete(number)?;
    Ok(0)
}

/// `times`: in hundredths of a second.
pub fn times(to: u64) -> Answer {
    const TICK: u64 = SECOND / 100;
    if to != 0 {
        let thread = current();
        let own = super::process::own_usage(&thread);
        let children = *thread.process().children.lock();
        let ticks = [
            (own.time - own.in_kernel) / TICK,
            own.in_kernel / TICK,
            (children.time - children.in_kernel) / TICK,
            children.in_kernel / TICK,
        ];
        user::write_value(to, ticks)?;
    }
    Ok(arch::now() / TICK)
}
