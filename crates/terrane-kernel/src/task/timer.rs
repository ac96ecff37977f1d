//! Deadlines: what is to happen when a time has come.
//!
//! Each CPU has a list of timers, ordered by deadline, and arms its hardware timer for the first of them or for the end of the current thread's
//! slice. A timer is started on the CPU that runs its owner, stopped from anywhere, and fires in the interrupt of the CPU it was
//! started on.
//!
//! A timer fires with its list's lock held, and stopping takes that lock: once [`Timer::stop`] has returned, it is not firing and will not. So
//! a timer may lie on the stack of a thread that waits.

use core::cell::Cell;
use core::ptr;
use core::sync::atomic::{AtomicU32, Ordering};

use super::list::{Link, Linked, List};
use super::lock::Lock;
use super::sched::{self, MAX_CPUS};
use super::thread::Thread;
use crate::arch;

/// What a timer does.
#[derive(Clone, Copy)]
pub enum Fire {
    /// Wakes the thread, which outlives the timer.
    Wake(*const Thread),
    /// Calls the function with the pointer, which outlives the timer; what it returns is the next deadline.
    Call(fn(*const ()) -> Option<u64>, *const ()),
}

/// In no list.
const STOPPED: u32 = u32::MAX;

/// A deadline.
#[repr(C)]
pub struct Timer {
    link: Link,
    deadline: Cell<u64>,
    fire: Cell<Fire>,
    /// The CPU whose list it is in.
    list: AtomicU32,
}

// SAFETY: the link is the first field.
unsafe impl Linked for Timer {
    fn link(&self) -> &Link {
        &self.link
    }
}

// SAFETY: the cells are used under the lock of the list that it is in, and by its owner while it is in none.
unsafe impl Send for Timer {}
// SAFETY: as above.
unsafe impl Sync for Timer {}

static LISTS: [Lock<List<Timer>>; MAX_CPUS] = [const { Lock::new(List::new()) }; MAX_CPUS];

impl Timer {
    /// One that is stopped.
    pub const fn new() -> Self {
        Self {
            link: Link::new(),
            deadline: Cell::new(0),
            fire: Cell::new(Fire::Wake(ptr::null())),
            list: AtomicU32::new(STOPPED),
        }
    }

    /// Starts it, on this CPU's list. It is stopped, and one thread at a time starts and stops it.
    ///
    /// # Safety
    /// It stays where it is, and what `fire` points to stays alive, until it has been stopped.
    pub unsafe fn start(&self, deadline: u64, fire: Fire) {
        arch::interrupts::without(|| {
            let cpu = arch::cpu_index();
            let mut list = LISTS[cpu].lock();
            self.deadline.set(deadline);
            self.fire.set(fire);
            self.list.store(cpu as u32, Ordering::Relaxed);
            // SAFETY: the caller's promise; the lists are static.
            unsafe { list.insert(self, |other| other.deadline.get() > deadline) };
            drop(list);
            arm(arch::now());
        });
    }

    /// Stops it; true if it had not fired for the last time. Not from what it fires.
    pub fn stop(&self) -> bool {
        loop {
            let cpu = self.list.load(Ordering::Acquire);
            if cpu == STOPPED {
                // It may be firing at this moment, under a lock that we do not know any more: it says `STOPPED` after that.
                return false;
            }
            let list = LISTS[cpu as usize].lock();
            if self.list.load(Ordering::Relaxed) == cpu {
                // SAFETY: it is in this list.
                unsafe { list.remove(self) };
                self.list.store(STOPPED, Ordering::Release);
                return true;
            }
        }
    }

    /// When it fires; `None` when it is stopped.
    pub fn deadline(&self) -> Option<u64> {
        let cpu = self.list.load(Ordering::Acquire);
        if cpu == STOPPED {
            return None;
        }
        let _list = LISTS[cpu as usize].lock();
        (self.list.load(Ordering::Relaxed) == cpu).then(|| self.deadline.get())
    }
}

/// Fires what is due on this CPU. In the timer's interrupt.
pub fn fire_due(now: u64) {
    let mut list = LISTS[arch::cpu_index()].lock();
    loop {
        let Some(first) = list.find(|_| true) else { return };
        // SAFETY: it is in the list, so alive.
        let timer = unsafe { &*first };
        if timer.deadline.get() > now {
            return;
        }
        // SAFETY: it is in this list.
        unsafe { list.remove(timer) };
        let next = match timer.fire.get() {
            Fire::Wake(thread) => {
                // SAFETY: alive until the timer is stopped, which takes the lock that we hold.
                sched::wake(unsafe { &*thread });
                None
            }
            Fire::Call(act, on) => act(on),
        };
        match next {
            Some(deadline) => {
                timer.deadline.set(deadline);
                // SAFETY: it has just been taken out, and nobody can have stopped it meanwhile.
                unsafe { list.insert(timer, |other| other.deadline.get() > deadline) };
            }
            // From here on its owner may free it.
            None => timer.list.store(STOPPED, Ordering::Release),
        }
    }
}

/// Arms this CPU's hardware timer for what comes next. With interrupts off.
pub fn arm(_now: u64) {
    let mut next = sched::slice_end();
    {
        let list = LISTS[arch::cpu_index()].lock();
        if let Some(first) = list.find(|_| true) {
            // SAFETY: it is in the list, so alive.
            next = next.min(unsafe { (*first).deadline.get() });
        }
    }
    arch::timer::arm(next);
}
