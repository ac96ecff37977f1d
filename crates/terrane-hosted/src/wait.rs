//! Waiting: futexes for what takes long, yielding for what takes nanoseconds.
//!
//! The processors of a hosted machine are threads, so the one that is waited for may not be running: a loop that
//! only spins could use up a time slice for nothing. A thread that waits here is inside the library, hence not
//! inside a memory access (see [`tlb`](crate::tlb)).

use core::sync::atomic::AtomicU32 as Futex;
use rustix::thread::{futex, sched_yield};
use terrane::sync::atomic::{AtomicU32, Ordering};

/// Rounds of spinning before the processor is offered to another thread: about as long as a yield takes.
const SPINS: u32 = 100;

/// The word as the kernel's interface takes it: another type when the library is built with a watcher.
fn kernels(word: &AtomicU32) -> &Futex {
    // SAFETY: the pointer is to an atomic that is borrowed as long as the result.
    unsafe { Futex::from_ptr(word.as_ptr()) }
}

/// Blocks while `*word == value`, or less long.
pub(crate) fn wait(word: &AtomicU32, value: u32) {
    if word.load(Ordering::Acquire) != value {
        return;
    }
    // Every error (changed meanwhile, interrupted) is an early return, which the contract allows.
    let _ = futex::wait(kernels(word), futex::Flags::PRIVATE, value, None);
}

/// Wakes everyone who waits on `word`.
pub(crate) fn wake_all(word: &AtomicU32) {
    // Fails only for a word that is not mapped, and this one is borrowed.
    let _ = futex::wake(kernels(word), futex::Flags::PRIVATE, i32::MAX as u32);
}

/// One round of waiting for another processor that is about to finish.
#[inline]
pub(crate) fn relax(rounds: u32) {
    if rounds < SPINS {
        core::hint::spin_loop();
    } else {
        sched_yield();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;
    use std::time::Duration;

    #[test]
    fn a_waiter_sleeps_until_the_word_changes_and_someone_wakes_it() {
        let word = AtomicU32::new(1);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while word.load(Ordering::Acquire) == 1 {
                        wait(&word, 1);
                    }
                });
            }
            thread::sleep(Duration::from_millis(20));
            word.store(2, Ordering::Release);
            wake_all(&word);
        });
        // A word that has changed already is not waited for.
        wait(&word, 1);
        relax(0);
        relax(SPINS);
    }
}
