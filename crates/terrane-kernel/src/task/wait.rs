//! Waiting until something is so.
//!
//! A [`Queue`] knows the threads that wait for something; the condition itself is elsewhere, and is looked at by those who wait. Whoever
//! makes it true calls [`wake_all`](Queue::wake_all) afterwards.
//!
//! # Why no wake-up is lost
//!
//! A waiter enters the queue, then says that it is about to sleep, then looks at its condition ([`super::sched`]). Whoever wakes makes the
//! condition true, then looks through the queue. So it finds the waiter there and about to sleep, or the waiter finds the
//! condition true. A waiter looks at its condition before it gives up for a signal or a deadline.
//!
//! A waiter lies on the stack of its thread, and leaves the queue, under its lock, before it returns; whoever wakes holds that lock, so
//! the thread is alive.
//!
//! Wake-ups for no reason are allowed: everything here looks at its condition again.

use core::ptr;
use core::sync::atomic::Ordering;

use super::list::{Link, Linked, List};
use super::lock::Lock;
use super::sched;
use super::thread::Thread;
use super::timer::{Fire, Timer};
use crate::arch;
use alloc::vec::Vec;

/// Why a wait ended before its condition was true.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wake {
    /// A signal is pending for the thread, or it is to end.
    Signal,
    /// The deadline has come.
    Timeout,
}

/// Those who wait for something.
pub struct Queue {
    waiters: Lock<List<Waiter>>,
}

#[repr(C)]
struct Waiter {
    link: Link,
    thread: *const Thread,
}

// SAFETY: the link is the first field.
unsafe impl Linked for Waiter {
    fn link(&self) -> &Link {
        &self.link
    }
}

// SAFETY: used under the queue's lock; the thread is `Sync`.
unsafe impl Send for Waiter {}
// SAFETY: as above.
unsafe impl Sync for Waiter {}

impl Waiter {
    fn new(thread: &Thread) -> Self {
        Self { link: Link::new(), thread: ptr::from_ref(thread) }
    }
}

impl Default for Queue {
    fn default() -> Self {
        Self::new()
    }
}

impl Queue {
    /// Nobody waits. The queue stays where it is from its first use on.
    pub const fn new() -> Self {
        Self { waiters: Lock::new(List::new()) }
    }

    /// Waits until `ready` says so, a signal comes, or it is `deadline` (ns since the start, [`arch::now`]).
    ///
    /// # Errors
    /// [`Wake`]; `ready` was false at its last look.
    pub fn wait_until(&self, deadline: Option<u64>, ready: impl FnMut() -> bool) -> Result<(), Wake> {
        wait_on(&[self], deadline, true, ready)
    }

    /// Waits until `ready` says so, whatever comes. Before threads run it looks again and again.
    pub fn wait_uninterrupted(&self, ready: impl FnMut() -> bool) {
        let _ = wait_on(&[self], None, false, ready);
    }

    /// Wakes all who sleep here.
    pub fn wake_all(&self) {
        self.waiters.lock().for_each(|waiter| {
            // SAFETY: it waits here, so its thread is alive while we hold the lock.
            sched::wake(unsafe { &*waiter.thread });
            true
        });
    }

    /// # Safety
    /// `waiter` stays where it is and alive until it has left.
    unsafe fn enter(&self, waiter: &Waiter) {
        // SAFETY: the caller's promise, and the queue's own (`new`).
        unsafe { self.waiters.lock().push(waiter) };
    }

    /// # Safety
    /// `waiter` is in this queue.
    unsafe fn leave(&self, waiter: &Waiter) {
        let waiters = self.waiters.lock();
        // SAFETY: the caller's promise.
        unsafe { waiters.remove(waiter) };
    }
}

/// Waits on several queues at once: until `ready` says so, a signal comes, or it is `deadline`.
///
/// # Errors
/// As [`Queue::wait_until`].
pub fn on_any(queues: &[&Queue], deadline: Option<u64>, ready: impl FnMut() -> bool) -> Result<(), Wake> {
    wait_on(queues, deadline, true, ready)
}

/// Queues for which there is room on the stack.
const FEW: usize = 8;
/// How often a thread looks that waits on more queues than there is memory for, in ns.
const LOOK_AGAIN: u64 = 1_000_000;

fn wait_on(
    queues: &[&Queue],
    deadline: Option<u64>,
    interruptible: bool,
    mut ready: impl FnMut() -> bool,
) -> Result<(), Wake> {
    if ready() {
        return Ok(());
    }
    // SAFETY: the current thread is alive while it runs, which it does until this function has returned.
    let Some(thread) = (unsafe { sched::current_raw().as_ref() }) else {
        // No threads yet, or an idle CPU: nothing to switch to.
        while !ready() {
            arch::relax();
        }
        return Ok(());
    };
    let mut few = [const { None }; FEW];
    let mut many = Vec::new();
    let waiters: &[Option<Waiter>] = if queues.len() <= FEW {
        for place in &mut few[..queues.len()] {
            *place = Some(Waiter::new(thread));
        }
        &few[..queues.len()]
    } else {
        if many.try_reserve_exact(queues.len()).is_ok() {
            many.resize_with(queues.len(), || Some(Waiter::new(thread)));
        }
        &many
    };
    let poll = waiters.len() < queues.len();
    for (queue, waiter) in queues.iter().zip(waiters.iter().flatten()) {
        // SAFETY: it lies still in `few` or `many` until it leaves below.
        unsafe { queue.enter(waiter) };
    }
    let timer = Timer::new();
    let mut started = false;
    let result = loop {
        sched::prepare_to_wait(thread);
        if ready() {
            break Ok(());
        }
        if interruptible && thread.has_signal() {
            break Err(Wake::Signal);
        }
        let now = arch::now();
        if deadline.is_some_and(|deadline| deadline <= now) {
            break Err(Wake::Timeout);
        }
        let limit = if poll {
            Some(deadline.map_or(now + LOOK_AGAIN, |at| at.min(now + LOOK_AGAIN)))
        } else {
            deadline
        };
        if let Some(limit) = limit.filter(|_| poll || !started) {
            timer.stop();
            // SAFETY: it is stopped below, before it or the thread goes.
            unsafe { timer.start(limit, Fire::Wake(thread)) };
            started = true;
        }
        thread.voluntary.fetch_add(1, Ordering::Relaxed);
        sched::schedule();
    };
    sched::do_not_wait(thread);
    if started {
        timer.stop();
    }
    for (queue, waiter) in queues.iter().zip(waiters.iter().flatten()) {
        // SAFETY: it entered above.
        unsafe { queue.leave(waiter) };
    }
    result
}

/// Sleeps until `deadline` or a signal.
///
/// # Errors
/// [`Wake::Signal`].
pub fn sleep_until(deadline: u64) -> Result<(), Wake> {
    match wait_on(&[], Some(deadline), true, || false) {
        Err(Wake::Timeout) | Ok(()) => Ok(()),
        signal => signal,
    }
}
