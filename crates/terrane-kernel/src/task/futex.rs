//! Futexes: waiting for a word of a program's memory to change.
//!
//! A word is known by a [`Key`]: a private one by its address space and address, a shared one by the object behind it and where it lies in that, so that
//! processes that map the same object at different addresses meet.
//!
//! # Waiting against waking
//!
//! Who waits enters the bucket of its key, passes a full fence, and only then looks at the word. Who wakes has changed the word before, takes the bucket's lock
//! and looks through it. So the waiter sees the word changed, or the waker sees the waiter. No lock is held while the word is read, for that may fault.
//!
//! A waiter that was found by a waker in the moment before it sees that the word is another one already gives the wake-up on to the next, so that the
//! number that `FUTEX_WAKE` wakes is right.
//!
//! A waiter lies on its thread's stack, and takes the lock of the bucket that it is in before it leaves, woken or not; whoever wakes it or moves it to another
//! bucket holds that lock (both locks, the one with the lower number first). So it and its thread are alive.

use core::cell::Cell;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};

use terrane::AddrRange;
use terrane::vma::VmFlags;

use super::list::{Link, Linked, List};
use super::lock::Lock;
use super::restart;
use super::sched;
use super::thread::{CurrentThread, Thread, current};
use super::time::{self, Timespec};
use super::wait::{self, Wake};
use crate::errno::Errno;
use crate::mm;
use crate::user;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ptr;

const WAIT: u64 = 0;
const WAKE: u64 = 1;
const REQUEUE: u64 = 3;
const CMP_REQUEUE: u64 = 4;
const WAKE_OP: u64 = 5;
const LOCK_PI: u64 = 6;
const UNLOCK_PI: u64 = 7;
const TRYLOCK_PI: u64 = 8;
const LOCK_PI2: u64 = 13;
const WAIT_BITSET: u64 = 9;
const WAKE_BITSET: u64 = 10;
const PRIVATE: u64 = 128;
const CLOCK_REALTIME: u64 = 256;

/// Every bit.
const ANY: u32 = u32::MAX;

/// What a word is known by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Key {
    /// An address space, or the number of an object.
    who: u64,
    /// The address, or the offset in the object, in bytes.
    at: u64,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// `FUTEX_PRIVATE_FLAG`.
    Private,
    /// Shared by name, but in memory that no other space has.
    Own,
    /// In an object.
    Object,
}

impl Key {
    /// The key of the word at `at` in the current thread's memory.
    ///
    /// # Errors
    /// `EINVAL` for an address that is no multiple of 4, `EFAULT` for one where nothing is mapped.
    pub fn of(at: u64, private: bool) -> Result<Self, Errno> {
        if !at.is_multiple_of(4) {
            return Err(Errno::EINVAL);
        }
        let thread = current();
        let space = thread.space();
        let who = Arc::as_ptr(space) as u64;
        if private {
            return Ok(Self { who, at, kind: Kind::Private });
        }
        // A word that cannot be read is not waited for.
        user::load_u32(at)?;
        mm::with_cpu(|cpu| {
            let _steady = space.mm().share(cpu, AddrRange::new(at, at + 4));
            let pin = cpu.pin();
            let (vma, seen) = space.mm().vma_at(&pin, at).ok_or(Errno::EFAULT)?;
            match vma.object().filter(|_| seen.flags.contains(VmFlags::SHARED)) {
                Some(object) => {
                    let at = seen.index_of(at) << 12 | at & 0xfff;
                    Ok(Self { who: object.number(), at, kind: Kind::Object })
                }
                None => Ok(Self { who, at, kind: Kind::Own }),
            }
        })
    }

    fn bucket(self) -> usize {
        let mixed = (self.who ^ self.at >> 2).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 48) as usize % BUCKETS
    }
}

const BUCKETS: usize = 256;

static TABLE: [Lock<List<Waiter>>; BUCKETS] = [const { Lock::new(List::new()) }; BUCKETS];

#[repr(C)]
struct Waiter {
    link: Link,
    thread: *const Thread,
    /// Changed with the locks of both buckets held.
    key: Cell<Key>,
    bucket: AtomicUsize,
    bits: u32,
    woken: AtomicBool,
}

// SAFETY: the link is the first field.
unsafe impl Linked for Waiter {
    fn link(&self) -> &Link {
        &self.link
    }
}

// SAFETY: what is not atomic is used under the bucket's lock; the thread is `Sync`.
unsafe impl Send for Waiter {}
// SAFETY: as above.
unsafe impl Sync for Waiter {}

impl Waiter {
    /// Enters the bucket of its key.
    ///
    /// # Safety
    /// It stays where it is until it has left.
    unsafe fn enter(&self) {
        let mut list = TABLE[self.bucket.load(Ordering::Relaxed)].lock();
        // SAFETY: the caller's promise; the table is static.
        unsafe { list.push(self) };
        drop(list);
        fence(Ordering::SeqCst);
    }

    /// Leaves; true if it has been woken.
    fn leave(&self) -> bool {
        loop {
            let bucket = self.bucket.load(Ordering::Relaxed);
            let list = TABLE[bucket].lock();
            if self.bucket.load(Ordering::Relaxed) != bucket {
                continue;
            }
            if self.link.is_linked() {
                // SAFETY: it is in the list of its bucket.
                unsafe { list.remove(self) };
            }
            return self.woken.load(Ordering::Relaxed);
        }
    }
}

/// Waits while the word at `at` is `value`.
fn wait(at: u64, key: Key, value: u32, bits: u32, deadline: Option<u64>) -> Result<u64, Errno> {
    if bits == 0 {
        return Err(Errno::EINVAL);
    }
    if user::load_u32(at)? != value {
        return Err(Errno::EAGAIN);
    }
    let thread = current();
    let waiter = Waiter {
        link: Link::new(),
        thread: ptr::from_ref::<Thread>(&thread),
        key: Cell::new(key),
        bucket: AtomicUsize::new(key.bucket()),
        bits,
        woken: AtomicBool::new(false),
    };
    // SAFETY: it leaves before this function returns.
    unsafe { waiter.enter() };
    let seen = user::load_u32(at);
    if seen != Ok(value) {
        if waiter.leave() {
            wake(waiter.key.get(), 1, bits);
        }
        return Err(seen.err().unwrap_or(Errno::EAGAIN));
    }
    let result = wait::on_any(&[], deadline, || waiter.woken.load(Ordering::Acquire));
    if waiter.leave() {
        return Ok(0);
    }
    match result {
        Err(Wake::Timeout) => Err(Errno::ETIMEDOUT),
        _ => Err(Errno::EINTR),
    }
}

/// Wakes up to `count` who wait for `key` with one of `bits`; returns how many.
pub fn wake(key: Key, count: u32, bits: u32) -> u32 {
    fence(Ordering::SeqCst);
    let list = TABLE[key.bucket()].lock();
    let mut woken = 0;
    list.for_each(|waiter| {
        if woken < count && waiter.key.get() == key && waiter.bits & bits != 0 {
            // SAFETY: it is in this list.
            unsafe { list.remove(waiter) };
            waiter.woken.store(true, Ordering::Release);
            // SAFETY: it cannot leave, nor its thread end, while the bucket is locked.
            sched::wake(unsafe { &*waiter.thread });
            woken += 1;
        }
        woken < count
    });
    woken
}

/// Wakes up to `wakes` who wait for `from`, and lets up to `moves` of the others wait for `to`; returns how many of both.
fn requeue(from: Key, to: Key, wakes: u32, moves: u32) -> (u32, u32) {
    let mut woken = wake(from, wakes, ANY);
    if from == to {
        return (woken, 0);
    }
    let (source, target) = (from.bucket(), to.bucket());
    let mut moved = 0;
    if source == target {
        TABLE[source].lock().for_each(|waiter| {
            if waiter.key.get() == from && moved < moves {
                waiter.key.set(to);
                moved += 1;
            }
            true
        });
    } else {
        let (first, second) = (source.min(target), source.max(target));
        let (mut first, mut second) = (TABLE[first].lock(), TABLE[second].lock());
        let (out, into) =
            if source < target { (&mut *first, &mut *second) } else { (&mut *second, &mut *first) };
        while moved < moves {
            let Some(waiter) = out.find(|waiter| waiter.key.get() == from) else { break };
            // SAFETY: it is in this list, and cannot leave while that is locked.
            let waiter = unsafe { &*waiter };
            // SAFETY: as above; the table is static.
            unsafe {
                out.remove(waiter);
                into.push(waiter);
            }
            waiter.key.set(to);
            waiter.bucket.store(target, Ordering::Relaxed);
            moved += 1;
        }
    }
    // Those who came to wait before the last were moved, and were to be woken.
    if woken < wakes {
        woken += wake(from, wakes - woken, ANY);
    }
    (woken, moved)
}

/// `FUTEX_WAKE_OP`'s operation on the word at `at`; true when the old value compares as asked.
fn operate(code: u32, at: u64) -> Result<bool, Errno> {
    let shift = code >> 28 & 8 != 0;
    let operation = code >> 28 & 7;
    let comparison = code >> 24 & 15;
    let signed = |bits: u32| (bits << 20) as i32 >> 20;
    let argument = signed(code >> 12 & 0xfff);
    let against = signed(code & 0xfff);
    let argument = if shift { 1u32 << (argument & 31) } else { argument as u32 };
    let mut old = user::load_u32(at)?;
    loop {
        let new = match operation {
            0 => argument,
            1 => old.wrapping_add(argument),
            2 => old | argument,
            3 => old & !argument,
            4 => old ^ argument,
            _ => return Err(Errno::ENOSYS),
        };
        match user::compare_exchange_u32(at, old, new)? {
            Ok(_) => break,
            Err(now) => old = now,
        }
    }
    let old = old as i32;
    match comparison {
        0 => Ok(old == against),
        1 => Ok(old != against),
        2 => Ok(old < against),
        3 => Ok(old <= against),
        4 => Ok(old > against),
        5 => Ok(old >= against),
        _ => Err(Errno::ENOSYS),
    }
}

/// The deadline of a call with a timeout at `at`, if it has one.
fn deadline(thread: &CurrentThread, command: u64, options: u64, at: u64) -> Result<Option<u64>, Errno> {
    if at == 0 {
        return Ok(None);
    }
    let time = Timespec::read(at)?.duration()?;
    if command == WAIT {
        return Ok(Some(restart::deadline(thread, time)));
    }
    let clock = if options & CLOCK_REALTIME != 0 { time::CLOCK_REALTIME } else { time::CLOCK_MONOTONIC };
    let at = time::deadline(clock, time)?;
    thread.change(|own| own.restart_deadline = Some(at));
    Ok(Some(at))
}

/// `futex`.
pub fn futex(args: [u64; 6]) -> Result<u64, Errno> {
    let [at, operation, value, timeout, at2, value3] = args;
    let options = operation & (PRIVATE | CLOCK_REALTIME);
    let command = operation & 0xffff_ffff & !(PRIVATE | CLOCK_REALTIME);
    let private = options & PRIVATE != 0;
    if options & CLOCK_REALTIME != 0 && !matches!(command, WAIT_BITSET | LOCK_PI2) {
        return Err(Errno::ENOSYS);
    }
    let key = |at: u64| Key::of(at, private);
    let (count, count2) = (value as u32, timeout as u32);
    match command {
        WAIT | WAIT_BITSET => {
            let bits = if command == WAIT { ANY } else { value3 as u32 };
            let deadline = deadline(&current(), command, options, timeout)?;
            wait(at, key(at)?, value as u32, bits, deadline)
        }
        WAKE => Ok(wake(key(at)?, count.max(1), ANY).into()),
        WAKE_BITSET if value3 as u32 == 0 => Err(Errno::EINVAL),
        WAKE_BITSET => Ok(wake(key(at)?, count.max(1), value3 as u32).into()),
        REQUEUE | CMP_REQUEUE => {
            if (count as i32) < 0 || (count2 as i32) < 0 {
                return Err(Errno::EINVAL);
            }
            let (from, to) = (key(at)?, key(at2)?);
            if command == CMP_REQUEUE && user::load_u32(at)? != value3 as u32 {
                return Err(Errno::EAGAIN);
            }
            let (woken, moved) = requeue(from, to, count, count2);
            Ok((woken + moved).into())
        }
        WAKE_OP => {
            let (first, second) = (key(at)?, key(at2)?);
            let also = operate(value3 as u32, at2)?;
            let mut woken = wake(first, count.max(1), ANY);
            if also {
                woken += wake(second, count2.max(1), ANY);
            }
            Ok(woken.into())
        }
        LOCK_PI | LOCK_PI2 => {
            let deadline = match timeout {
                0 => None,
                at => {
                    let real = command == LOCK_PI || options & CLOCK_REALTIME != 0;
                    let clock = if real { time::CLOCK_REALTIME } else { time::CLOCK_MONOTONIC };
                    Some(time::deadline(clock, Timespec::read(at)?.duration()?)?)
                }
            };
            lock_pi(at, private, deadline, false)
        }
        TRYLOCK_PI => lock_pi(at, private, None, true),
        UNLOCK_PI => unlock_pi(at, private),
        _ => Err(Errno::ENOSYS),
    }
}

/// Takes the lock at `at`, which holds its owner's number and whether somebody waits (`FUTEX_LOCK_PI`).
///
/// As all threads are scheduled alike, the owner inherits nothing. The word is what both sides change; who finds it taken marks it and waits until
/// it is given the lock, or finds it free.
fn lock_pi(at: u64, private: bool, deadline: Option<u64>, tries: bool) -> Result<u64, Errno> {
    let thread = current();
    let id = thread.id();
    let key = Key::of(at, private)?;
    loop {
        let word = user::load_u32(at)?;
        let owner = word & OWNER;
        if owner == id {
            return Err(Errno::EDEADLK);
        }
        if owner == 0 {
            let mark = word & (OWNER_DIED | WAITERS);
            if user::compare_exchange_u32(at, word, id | mark)?.is_ok() {
                return Ok(0);
            }
            continue;
        }
        if tries {
            return Err(Errno::EAGAIN);
        }
        let marked = word | WAITERS;
        if marked != word && user::compare_exchange_u32(at, word, marked)?.is_err() {
            continue;
        }
        if super::tree::tree().thread(owner).is_none() {
            return Err(Errno::ESRCH);
        }
        match wait(at, key, marked, ANY, deadline) {
            Ok(_) | Err(Errno::EAGAIN) => {}
            // As on Linux: begun anew behind any handler.
            Err(Errno::EINTR) => return Err(Errno::ERESTARTNOINTR),
            Err(error) => return Err(error),
        }
    }
}

/// Releases it (`FUTEX_UNLOCK_PI`), and wakes one who waits, who takes it.
fn unlock_pi(at: u64, private: bool) -> Result<u64, Errno> {
    let id = current().id();
    let key = Key::of(at, private)?;
    loop {
        let word = user::load_u32(at)?;
        if word & OWNER != id {
            return Err(Errno::EPERM);
        }
        // The mark stays until somebody takes it who finds nobody waiting; until then each release wakes one.
        if user::compare_exchange_u32(at, word, word & WAITERS)?.is_ok() {
            if wake(key, 1, ANY) == 0 && word & WAITERS != 0 {
                let _ = user::compare_exchange_u32(at, WAITERS, 0)?;
            }
            return Ok(0);
        }
    }
}

/// Words that `futex_waitv` takes at most.
const MANY: u64 = 128;

/// `futex_waitv`: waits until one of several words is woken; which.
pub fn waitv(list: u64, count: u64, flags: u64, timeout: u64, clock: u64) -> Result<u64, Errno> {
    const SIZE_32: u32 = 2;
    const PRIVATE_FLAG: u32 = 128;
    if flags as u32 != 0 || count == 0 || count > MANY || list == 0 {
        return Err(Errno::EINVAL);
    }
    let deadline = match timeout {
        0 => None,
        _ if clock as i32 != 0 && clock as i32 != 1 => return Err(Errno::EINVAL),
        at => Some(time::deadline(clock, Timespec::read(at)?.duration()?)?),
    };
    let thread = current();
    let mut waiters: Vec<Waiter> = Vec::new();
    let mut words: Vec<(u64, u32)> = Vec::new();
    waiters.try_reserve_exact(count as usize)?;
    words.try_reserve_exact(count as usize)?;
    for nth in 0..count {
        let [value, at] = user::read_value::<[u64; 2]>(list.wrapping_add(24 * nth))?;
        let [flags, reserved] = user::read_value::<[u32; 2]>(list.wrapping_add(24 * nth + 16))?;
        if flags & !(SIZE_32 | PRIVATE_FLAG) != 0 || flags & 3 != SIZE_32 || reserved != 0 || value >> 32 != 0
        {
            return Err(Errno::EINVAL);
        }
        let key = Key::of(at, flags & PRIVATE_FLAG != 0)?;
        words.push((at, value as u32));
        waiters.push(Waiter {
            link: Link::new(),
            thread: ptr::from_ref::<Thread>(&thread),
            key: Cell::new(key),
            bucket: AtomicUsize::new(key.bucket()),
            bits: ANY,
            woken: AtomicBool::new(false),
        });
    }
    for waiter in &waiters {
        // SAFETY: all leave before this function returns, and the list does not grow any more.
        unsafe { waiter.enter() };
    }
    let differs = words.iter().map(|&(at, value)| match user::load_u32(at) {
        Ok(now) if now == value => Ok(()),
        Ok(_) => Err(Errno::EAGAIN),
        Err(error) => Err(error),
    });
    let result = match differs.collect::<Result<(), Errno>>() {
        Ok(()) => {
            wait::on_any(&[], deadline, || waiters.iter().any(|waiter| waiter.woken.load(Ordering::Acquire)))
                .map_err(|wake| match wake {
                    Wake::Timeout => Errno::ETIMEDOUT,
                    Wake::Signal => Errno::ERESTARTSYS,
                })
        }
        Err(error) => Err(error),
    };
    let mut first = None;
    for (nth, waiter) in waiters.iter().enumerate() {
        if waiter.leave() {
            first = first.or(Some(nth as u64));
        }
    }
    match first {
        Some(nth) => Ok(nth),
        None => result.and(Err(Errno::EAGAIN)),
    }
}

/// Wakes one who waits for the word at `at`, which the kernel has changed: a thread has ended.
pub fn wake_word(at: u64) {
    for private in [true, false] {
        if let Ok(key) = Key::of(at, private) {
            wake(key, 1, ANY);
        }
    }
}

/// Bits of a word that is a lock, as the C libraries and the kernel agree.
const WAITERS: u32 = 0x8000_0000;
const OWNER_DIED: u32 = 0x4000_0000;
const OWNER: u32 = 0x3fff_ffff;
/// Entries that are looked at: a list may be a circle.
const ROBUST_MAX: usize = 2048;

/// Marks the robust locks that a thread holds, which ends, and wakes who waits for them.
pub fn leave_robust(thread: &CurrentThread) {
    let head = thread.private().robust_list;
    if head != 0 {
        // What cannot be read ends the walk: the program has broken its list.
        let _ = walk_robust(thread, head);
    }
}

fn walk_robust(thread: &CurrentThread, head: u64) -> Result<(), Errno> {
    let [mut entry, offset, pending] = user::read_value::<[u64; 3]>(head)?;
    for _ in 0..ROBUST_MAX {
        if entry & !1 == head {
            break;
        }
        let next = user::read_value::<u64>(entry & !1);
        // Not twice: what was being taken or released is looked at last.
        if entry & !1 != pending & !1 {
            let _ = bury(thread, (entry & !1).wrapping_add(offset), false);
        }
        entry = next?;
    }
    if pending & !1 != 0 {
        let _ = bury(thread, (pending & !1).wrapping_add(offset), true);
    }
    Ok(())
}

fn bury(thread: &CurrentThread, at: u64, pending: bool) -> Result<(), Errno> {
    let mut word = user::load_u32(at)?;
    loop {
        if pending && word == 0 {
            // It had been released, and nobody may have been woken yet.
            wake_word(at);
            return Ok(());
        }
        if word & OWNER != thread.id() {
            return Ok(());
        }
        match user::compare_exchange_u32(at, word, word & WAITERS | OWNER_DIED)? {
            Ok(_) => break,
            Err(now) => word = now,
        }
    }
    if word & WAITERS != 0 {
        wake_word(at);
    }
    Ok(())
}
