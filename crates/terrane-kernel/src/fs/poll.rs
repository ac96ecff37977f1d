//! Waiting for one of several files: `poll`, `select`, `epoll_wait`.
//!
//! All wait in the same way: on the bells of all files, and until the first of their deadlines (a `timerfd`'s). No file knows who waits for it but
//! by the queue of its bell.

use super::abi::{POLLERR, POLLHUP, POLLIN, POLLNVAL, POLLOUT, POLLPRI, POLLRDBAND, POLLRDNORM, POLLWRNORM};
use super::current;
use super::epoll::Ready;
use super::inode::Kind;
use super::open::Open;
use crate::arch;
use crate::errno::Errno;
use crate::task::wait::{self, Queue, Wake};
use crate::user;
use alloc::vec::Vec;

/// Waits until `ready` says so, at most until `deadline`. False when that has come.
fn wait_for(files: &[Open], deadline: Option<u64>, mut ready: impl FnMut() -> bool) -> Result<bool, Errno> {
    let mut inner = Vec::new();
    for file in files {
        if let Kind::Epoll(epoll) = &file.node.kind {
            epoll.files(&mut inner)?;
        }
    }
    let mut queues: Vec<&Queue> = Vec::new();
    queues.try_reserve_exact(files.len() + inner.len())?;
    queues.extend(files.iter().chain(&inner).filter_map(|file| file.queue()));
    // Signals that are read have to wake who waits to read them.
    let signals = files.iter().chain(&inner).filter_map(|file| match &file.node.kind {
        Kind::Signals(signals) => Some(signals.wanted()),
        _ => None,
    });
    let awaited = signals.fold(0, |all, set| all | set);
    if awaited != 0 {
        return current::awaiting(awaited, || wait_on(&queues, files, &inner, deadline, &mut ready));
    }
    wait_on(&queues, files, &inner, deadline, &mut ready)
}

fn wait_on(
    queues: &[&Queue],
    files: &[Open],
    inner: &[Open],
    deadline: Option<u64>,
    ready: &mut dyn FnMut() -> bool,
) -> Result<bool, Errno> {
    loop {
        let timers = files.iter().chain(inner).filter_map(|file| file.deadline());
        let next = timers.filter(|&at| at > arch::now()).chain(deadline).min();
        match wait::on_any(queues, next, &mut *ready) {
            Ok(()) => return Ok(true),
            Err(Wake::Signal) => return Err(Errno::EINTR),
            Err(Wake::Timeout) if ready() => return Ok(true),
            Err(Wake::Timeout) => {
                if deadline.is_some_and(|deadline| deadline <= arch::now()) {
                    return Ok(false);
                }
            }
        }
    }
}

/// When so many ns from now have passed.
fn after(ns: u64) -> u64 {
    arch::now().saturating_add(ns)
}

/// A timeout in ms; none when negative.
fn milliseconds(timeout: i32) -> Option<u64> {
    u64::try_from(timeout).ok().map(|ms| after(ms * 1_000_000))
}

/// A timeout by address: seconds, and parts of which `scale` are a second; none at 0.
fn timeout_at(at: u64, scale: i64) -> Result<Option<u64>, Errno> {
    if at == 0 {
        return Ok(None);
    }
    let [seconds, parts]: [i64; 2] = user::read_value(at)?;
    // `select` takes more than a million microseconds.
    if seconds < 0 || parts < 0 || scale == 1_000_000_000 && parts >= scale {
        return Err(Errno::EINVAL);
    }
    let ns = (seconds as u64).saturating_mul(1_000_000_000);
    Ok(Some(after(ns.saturating_add((parts as u64).saturating_mul((1_000_000_000 / scale) as u64)))))
}

/// Writes what is left of a timeout back, as Linux does.
fn put_left(at: u64, deadline: Option<u64>, scale: u64) {
    let Some(deadline) = deadline.filter(|_| at != 0) else { return };
    let left = deadline.saturating_sub(arch::now());
    let parts = left % 1_000_000_000 / (1_000_000_000 / scale);
    // As Linux: a timeout that cannot be written is no error.
    let _ = user::write_value(at, [left / 1_000_000_000, parts]);
}

/// `poll`, with a deadline.
fn poll_until(at: u64, count: u64, deadline: Option<u64>) -> Result<u64, Errno> {
    if count > current::file_limit() {
        return Err(Errno::EINVAL);
    }
    let count = count as usize;
    // Descriptors, and what is asked about them.
    let mut asked: Vec<(i32, u32)> = Vec::new();
    let mut files: Vec<Open> = Vec::new();
    let mut places: Vec<Option<usize>> = Vec::new();
    asked.try_reserve_exact(count)?;
    files.try_reserve_exact(count)?;
    places.try_reserve_exact(count)?;
    let table = current::files();
    for n in 0..count as u64 {
        let fd: i32 = user::read_value(at + 8 * n)?;
        let events: u16 = user::read_value(at + 8 * n + 4)?;
        asked.push((fd, u32::from(events) | POLLERR | POLLHUP));
        let file = if fd >= 0 { table.get(fd).ok() } else { None };
        places.push(file.is_some().then_some(files.len()));
        files.extend(file);
    }
    let answer = |n: usize| match (asked[n], places[n]) {
        ((_, events), Some(place)) => files[place].ready() & events,
        ((0.., _), None) => POLLNVAL,
        _ => 0,
    };
    wait_for(&files, deadline, || (0..count).any(|n| answer(n) != 0))?;
    let mut ready = 0;
    for n in 0..count {
        let events = answer(n) as u16;
        user::write_value(at + 8 * n as u64 + 6, events)?;
        ready += u64::from(events != 0);
    }
    Ok(ready)
}

/// `poll`.
pub fn poll(at: u64, count: u64, timeout: i32) -> Result<u64, Errno> {
    poll_until(at, count, milliseconds(timeout))
}

/// `ppoll`.
pub fn ppoll(at: u64, count: u64, timeout: u64, mask: u64, size: u64) -> Result<u64, Errno> {
    let deadline = timeout_at(timeout, 1_000_000_000)?;
    let result = current::with_mask(mask, size, || poll_until(at, count, deadline));
    put_left(timeout, deadline, 1_000_000_000);
    result
}

/// The three sets of `select`, as words of 64 bits.
struct Sets {
    words: [Vec<u64>; 3],
}

/// What each of the sets asks for, and what it is told.
const SETS: [u32; 3] =
    [POLLRDNORM | POLLRDBAND | POLLIN | POLLHUP | POLLERR, POLLWRNORM | POLLOUT | POLLERR, POLLPRI];

impl Sets {
    fn read(addresses: [u64; 3], words: usize) -> Result<Self, Errno> {
        let mut sets = Self { words: [const { Vec::new() }; 3] };
        for (at, set) in addresses.into_iter().zip(&mut sets.words) {
            set.try_reserve_exact(words)?;
            for n in 0..words as u64 {
                set.push(if at == 0 { 0 } else { user::read_value(at + 8 * n)? });
            }
        }
        Ok(sets)
    }

    fn has(&self, set: usize, fd: usize) -> bool {
        self.words[set][fd / 64] >> (fd % 64) & 1 != 0
    }
}

fn select_until(count: i32, addresses: [u64; 3], deadline: Option<u64>) -> Result<u64, Errno> {
    let count = usize::try_from(count).map_err(|_| Errno::EINVAL)?;
    let table = current::files();
    // As Linux: what lies behind the table is not looked at.
    let count = count.min(table.capacity());
    let sets = Sets::read(addresses, count.div_ceil(64))?;
    let mut asked: Vec<(usize, Open)> = Vec::new();
    for fd in 0..count {
        if (0..3).any(|set| sets.has(set, fd)) {
            asked.try_reserve(1)?;
            asked.push((fd, table.get(fd as i32)?));
        }
    }
    let mut files = Vec::new();
    files.try_reserve_exact(asked.len())?;
    files.extend(asked.iter().map(|(_, file)| file.clone()));
    let answer = |fd: usize, file: &Open, set: usize| sets.has(set, fd) && file.ready() & SETS[set] != 0;
    wait_for(&files, deadline, || asked.iter().any(|(fd, file)| (0..3).any(|set| answer(*fd, file, set))))?;
    let mut ready = 0;
    for (set, at) in addresses.into_iter().enumerate().filter(|&(_, at)| at != 0) {
        for word in 0..count.div_ceil(64) {
            let mut bits = 0u64;
            for (fd, file) in asked.iter().filter(|(fd, _)| fd / 64 == word) {
                if answer(*fd, file, set) {
                    bits |= 1 << (fd % 64);
                    ready += 1;
                }
            }
            user::write_value(at + 8 * word as u64, bits)?;
        }
    }
    Ok(ready)
}

/// `select`.
pub fn select(count: i32, sets: [u64; 3], timeout: u64) -> Result<u64, Errno> {
    let deadline = timeout_at(timeout, 1_000_000)?;
    let result = select_until(count, sets, deadline);
    put_left(timeout, deadline, 1_000_000);
    result
}

/// `pselect6`: the mask and its size lie behind one address.
pub fn pselect(count: i32, sets: [u64; 3], timeout: u64, mask: u64) -> Result<u64, Errno> {
    let deadline = timeout_at(timeout, 1_000_000_000)?;
    let [mask, size]: [u64; 2] = if mask == 0 { [0, 8] } else { user::read_value(mask)? };
    let result = current::with_mask(mask, size, || select_until(count, sets, deadline));
    put_left(timeout, deadline, 1_000_000_000);
    result
}

/// `epoll_ctl`.
pub fn epoll_ctl(epoll: i32, operation: u32, fd: i32, event: u64) -> Result<u64, Errno> {
    const ADD: u32 = 1;
    const DELETE: u32 = 2;
    const CHANGE: u32 = 3;
    let (mut events, mut data) = (0u32, 0u64);
    if operation != DELETE {
        // Packed on x86-64.
        events = user::read_value(event)?;
        data = user::read_value(event + 4)?;
    }
    let files = current::files();
    let (set, file) = (files.get(epoll)?, files.get(fd)?);
    let Kind::Epoll(inner) = &set.node.kind else { return Err(Errno::EINVAL) };
    if super::tree::same(&set.node, &file.node) {
        return Err(Errno::EINVAL);
    }
    match operation {
        ADD => {
            if let Kind::Epoll(other) = &file.node.kind
                && other.contains(&set.node)
            {
                return Err(Errno::ELOOP);
            }
            inner.add(fd, &file, events, data)?;
        }
        CHANGE => inner.change(fd, &file, events, data)?,
        DELETE => inner.remove(fd, &file)?,
        _ => return Err(Errno::EINVAL),
    }
    Ok(0)
}

fn epoll_until(fd: i32, at: u64, count: i32, deadline: Option<u64>) -> Result<u64, Errno> {
    /// More at a time are not needed.
    const MOST: usize = 1024;
    let count = usize::try_from(count).ok().filter(|&count| count > 0).ok_or(Errno::EINVAL)?.min(MOST);
    let file = current::files().get(fd)?;
    let Kind::Epoll(epoll) = &file.node.kind else { return Err(Errno::EINVAL) };
    let mut ready: Vec<Ready> = Vec::new();
    ready.try_reserve_exact(count)?;
    loop {
        epoll.collect(&mut ready);
        if !ready.is_empty() {
            break;
        }
        let mut files = Vec::new();
        files.try_reserve(1)?;
        files.push(file.clone());
        // The set may change while it is waited for: then the bells are others.
        let rings = epoll.bell.rings();
        if !wait_for(&files, deadline, || epoll.ready() != 0 || epoll.bell.rings() != rings)? {
            return Ok(0);
        }
    }
    for (n, ready) in ready.iter().take(count).enumerate() {
        user::write_value(at + 12 * n as u64, ready.events)?;
        user::write_value(at + 12 * n as u64 + 4, ready.data)?;
    }
    Ok(ready.len().min(count) as u64)
}

/// `epoll_wait`, `epoll_pwait`.
pub fn epoll_wait(fd: i32, at: u64, count: i32, timeout: i32, mask: u64, size: u64) -> Result<u64, Errno> {
    let deadline = milliseconds(timeout);
    current::with_mask(mask, size, || epoll_until(fd, at, count, deadline))
}

/// `epoll_pwait2`.
pub fn epoll_wait2(fd: i32, at: u64, count: i32, timeout: u64, mask: u64, size: u64) -> Result<u64, Errno> {
    let deadline = timeout_at(timeout, 1_000_000_000)?;
    current::with_mask(mask, size, || epoll_until(fd, at, count, deadline))
}
