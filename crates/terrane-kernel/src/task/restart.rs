//! Calls that a signal has interrupted: whether they begin anew.
//!
//! A call that waits ends with `EINTR` (or one of the kernel's own numbers for that) when a signal comes. What follows is decided when it is known what the
//! signal does: without a handler the call begins anew, whatever it is; with one, it does so if the handler was set with `SA_RESTART`
//! and the call is of the kind for which Linux does that. A call with a relative timeout keeps its deadline.

use super::thread::CurrentThread;
use crate::arch::TrapFrame;
use crate::errno::Errno;

/// The length of the instruction `syscall`.
const INSTRUCTION: u64 = 2;

/// Calls that never begin anew behind a handler, `SA_RESTART` or not: `poll`, `pause`, `nanosleep`, `select`, `rt_sigsuspend`,
/// `clock_nanosleep`, `epoll_wait`, `pselect6`, `ppoll`, `epoll_pwait`, `rt_sigtimedwait`, `epoll_pwait2`.
const ONCE: [u64; 12] = [7, 34, 35, 23, 130, 230, 232, 270, 271, 281, 128, 441];
/// Calls that do not even without one.
const NEVER: [u64; 4] = [128, 232, 281, 441];

/// Whether call `number` begins anew behind a handler with `SA_RESTART`. `timed`: it has a timeout from its beginning on.
pub fn after_handler(number: u64, timed: bool) -> bool {
    !timed && !ONCE.contains(&number)
}

/// Notes how a call has ended, as it returns to `before_user`.
pub fn note(thread: &CurrentThread, frame: &mut TrapFrame, result: Result<u64, Errno>) {
    frame.rax = match result {
        Ok(value) => value,
        Err(
            Errno::EINTR
            | Errno::ERESTARTSYS
            | Errno::ERESTARTNOINTR
            | Errno::ERESTARTNOHAND
            | Errno::ERESTART_RESTARTBLOCK,
        ) => {
            if !NEVER.contains(&frame.orig_rax) {
                thread.change(|own| own.interrupted = true);
            }
            i64::from(-Errno::EINTR.0) as u64
        }
        Err(errno) => i64::from(-errno.0) as u64,
    };
}

/// A call begins: what an earlier one has left is gone unless it is the same one.
pub fn begin(thread: &CurrentThread) {
    let own = thread.private();
    if own.begins_anew || own.restart_deadline.is_some() {
        thread.change(|own| {
            if !own.begins_anew {
                own.restart_deadline = None;
            }
            own.begins_anew = false;
        });
    }
}

/// Lets the call begin anew.
pub fn again(thread: &CurrentThread, frame: &mut TrapFrame) {
    thread.change(|own| {
        own.interrupted = false;
        own.begins_anew = true;
    });
    frame.rax = frame.orig_rax;
    frame.rip = frame.rip.wrapping_sub(INSTRUCTION);
}

/// Lets it end with `EINTR`.
pub fn end(thread: &CurrentThread, _: &mut TrapFrame) {
    thread.change(|own| {
        own.interrupted = false;
        own.restart_deadline = None;
    });
}

/// The deadline of a call that waits for `duration` ns: that of its first beginning.
pub fn deadline(thread: &CurrentThread, duration: u64) -> u64 {
    thread.change(|own| {
        *own.restart_deadline.get_or_insert_with(|| crate::arch::now().saturating_add(duration))
    })
}
