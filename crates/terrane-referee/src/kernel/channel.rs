//! The memory that the referee and its helpers share: a slot for each process, with one operation at a time.
//!
//! # Protocol
//!
//! A slot has two counters. The referee writes an operation and then moves `request` on; the helper sees that the two differ, carries
//! the operation out, writes what came of it, and sets `reply` to `request`. So each field has one writer at any time, and the counters
//! (released and acquired) hand the others over. Whoever waits looks some times and then sleeps on the counter (futex).
//! A process that comes into being finds both counters of its slot equal: its predecessor has answered everything.

use crate::operation::{DATA, WORDS};
use core::cell::UnsafeCell;
use core::ptr;
use core::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// What is asked of a slot beside operations.
pub(super) mod ask {
    /// To fork a process that serves the slot in word 0.
    pub const FORK: u64 = 1 << 32;
    /// To prepare for a script whose [`Setup`](crate::script::Setup) is in the words.
    pub const PREPARE: u64 = FORK + 1;
    /// To end.
    pub const EXIT: u64 = FORK + 2;
}

/// What came of a request.
pub(super) mod status {
    pub const VALUE: u64 = 0;
    pub const ERRNO: u64 = 1;
    pub const SIGNAL: u64 = 2;
    /// The helper cannot do what it must: `value` is an errno, `extra[0]` says where.
    pub const UNABLE: u64 = 3;
}

/// What a slot holds beside the counters.
#[repr(C)]
pub(super) struct Message {
    pub kind: u64,
    pub words: [u64; WORDS],
    pub status: u64,
    pub value: u64,
    pub extra: [u64; 2],
    /// Bytes of `data` that belong to the answer.
    pub len: u64,
    pub data: [u8; DATA],
}

/// One slot.
#[repr(C, align(4096))]
pub(super) struct Slot {
    request: AtomicU32,
    reply: AtomicU32,
    message: UnsafeCell<Message>,
}

// SAFETY: the counters say whose turn it is; see the head.
unsafe impl Sync for Slot {}

/// Looks before sleeping.
const LOOKS: u32 = 200;

fn await_change(word: &AtomicU32, old: u32, timeout: Duration) -> bool {
    for _ in 0..LOOKS {
        if word.load(Ordering::Acquire) != old {
            return true;
        }
        core::hint::spin_loop();
    }
    let time = libc::timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: 0 };
    let mut again = true;
    while again && word.load(Ordering::Acquire) == old {
        // SAFETY: the word and the time live through the call; the word is shared between processes, so the futex is too.
        let result = unsafe {
            libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, old, ptr::from_ref(&time), 0, 0)
        };
        // Anything but the time running out is a reason to look again.
        // SAFETY: `errno` of this thread.
        again = result == 0 || unsafe { *libc::__errno_location() } != libc::ETIMEDOUT;
    }
    word.load(Ordering::Acquire) != old
}

fn move_on(word: &AtomicU32, value: u32) {
    word.store(value, Ordering::Release);
    // SAFETY: the word lives through the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, 1, 0, 0, 0) };
}

impl Slot {
    /// For the referee: the message, between an answer and the next request.
    ///
    /// # Safety
    /// No request is under way, and there is no other reference to the message on this side.
    #[allow(clippy::mut_from_ref, reason = "the protocol says who may write")]
    pub unsafe fn message(&self) -> &mut Message {
        // SAFETY: the caller's promise.
        unsafe { &mut *self.message.get() }
    }

    /// For the referee: asks.
    pub fn ask(&self) {
        move_on(&self.request, self.request.load(Ordering::Relaxed).wrapping_add(1));
    }

    /// For the referee: waits for the answer; false when none came in time.
    pub fn await_answer(&self, timeout: Duration) -> bool {
        let request = self.request.load(Ordering::Relaxed);
        let reply = self.reply.load(Ordering::Acquire);
        reply == request || await_change(&self.reply, reply, timeout)
    }

    /// For the helper: waits for a request; false when none came in time.
    pub fn await_request(&self, timeout: Duration) -> bool {
        let reply = self.reply.load(Ordering::Relaxed);
        await_change(&self.request, reply, timeout)
    }

    /// For the helper: has answered.
    pub fn answered(&self) {
        move_on(&self.reply, self.request.load(Ordering::Relaxed));
    }
}
