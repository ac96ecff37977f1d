//! On the way back to user mode: signals, preemption, what `rseq` must know.

use super::{
    Action, DEFAULT, IGNORE, Info, SA_NODEFER, SA_ONSTACK, SA_RESETHAND, SA_RESTART, SA_RESTORER, SIGKILL,
    SIGSEGV, Set, frame,
};
use crate::arch::{TrapFrame, interrupts};
use crate::errno::Errno;
use crate::task::process::Exit;
use crate::task::thread::{CurrentThread, current};
use crate::task::{exit, restart, rseq, sched, stop, trace};
use core::sync::atomic::Ordering;

/// The last thing before a return to user mode: does what waits to be done, and returns with interrupts off, so that what comes
/// from then on brings the thread back here.
pub fn before_user(frame: &mut TrapFrame) {
    let thread = current();
    loop {
        interrupts::disable();
        let leaves = thread.process().ends(thread.id());
        let stops = thread.process().stopped.load(Ordering::Relaxed)
            || thread.process().continued.load(Ordering::Relaxed);
        let moves = sched::must_switch() || !sched::may_stay(&thread);
        let signal = thread.has_signal();
        let restores = thread.private().saved_mask.is_some();
        let stale = thread.rseq_stale.load(Ordering::Relaxed) && thread.private().rseq.is_some();
        // A call that was interrupted for nothing begins anew.
        let restarts = thread.private().interrupted;
        if !(leaves || stops || moves || signal || stale || restores || restarts) {
            return;
        }
        interrupts::enable();
        if leaves {
            exit::leave_if_told(&thread);
        }
        if stops {
            stop::wait_while_stopped(thread.process());
        }
        if moves {
            thread.preempted.fetch_add(1, Ordering::Relaxed);
            sched::schedule();
        }
        if signal {
            deliver(&thread, frame);
        }
        // What is left has no handler.
        if !thread.has_signal() {
            if thread.private().interrupted {
                restart::again(&thread, frame);
            }
            if let Some(mask) = thread.change(|own| own.saved_mask.take()) {
                thread.set_mask(mask);
                continue;
            }
        }
        if thread.rseq_stale.load(Ordering::Relaxed) && thread.private().rseq.is_some() {
            rseq::update(&thread, frame);
        }
    }
}

/// Does what is to be done about one signal.
fn deliver(thread: &CurrentThread, frame: &mut TrapFrame) {
    let wanted = Set(!thread.mask().0);
    let process = thread.process();
    let Some(info) = thread.pending.take(wanted).or_else(|| process.pending.take(wanted)) else { return };
    let info = match info {
        info if !thread.private().is_traced => info,
        info => match trace::at_signal(thread, frame, info) {
            Some(info) => info,
            None => return,
        },
    };
    let signal = info.signal;
    let actions = process.actions();
    let action = actions.get(signal);
    if signal == SIGKILL {
        exit::group(Exit::Signal(SIGKILL));
    }
    match action.handler {
        IGNORE => {}
        DEFAULT if Set::HARMLESS.has(signal) => {}
        DEFAULT if Set::STOPS.has(signal) && thread.private().is_traced => {
            // The parent that wants it stopped is told of that, and lets it go on as ever.
            let _ = trace::at_signal(thread, frame, info);
        }
        DEFAULT if Set::STOPS.has(signal) => {
            stop::stop(process, signal);
        }
        DEFAULT => exit::group(Exit::Signal(signal)),
        _ => {
            if action.flags & SA_RESETHAND != 0 {
                actions.set(signal, Action { handler: DEFAULT, ..action });
            }
            run_handler(thread, frame, &action, &info);
        }
    }
}

fn run_handler(thread: &CurrentThread, frame: &mut TrapFrame, action: &Action, info: &Info) {
    if thread.private().interrupted {
        if action.flags & SA_RESTART != 0
            && restart::after_handler(frame.orig_rax, thread.private().restart_deadline.is_some())
        {
            restart::again(thread, frame);
        } else {
            restart::end(thread, frame);
        }
    }
    if thread.private().rseq.is_some() {
        rseq::update(thread, frame);
    }
    let saved = thread.change(|own| own.saved_mask.take());
    let trap = match info.signal {
        super::SIGSEGV | super::SIGBUS if info.code > 0 && info.code != super::SI_KERNEL => {
            thread.last_trap(info.words[0])
        }
        _ => (0, 0, 0),
    };
    let call = frame::Call {
        handler: action.handler,
        restorer: action.restorer,
        on_alternate: action.flags & SA_ONSTACK != 0,
        mask: saved.unwrap_or(thread.mask()),
        trap,
    };
    let pushed = if action.flags & SA_RESTORER == 0 {
        Err(Errno::EFAULT)
    } else {
        frame::push(thread, frame, &call, info)
    };
    if pushed.is_err() {
        thread.set_mask(call.mask);
        force_default(thread, info.signal == SIGSEGV);
        return;
    }
    let mut mask = thread.mask().0 | action.mask;
    if action.flags & SA_NODEFER == 0 {
        mask |= Set::of(info.signal).0;
    }
    thread.set_mask(Set(mask));
}

/// A frame could not be put down: `SIGSEGV`, without its handler if it was that signal's.
fn force_default(thread: &CurrentThread, without_handler: bool) {
    if without_handler {
        exit::group(Exit::Signal(SIGSEGV));
    }
    force(thread, Info::from_kernel(SIGSEGV));
}

/// Sends the current thread a signal that an instruction of its own has caused: one that it cannot ignore, or put off.
pub fn force(thread: &CurrentThread, info: Info) {
    let actions = thread.process().actions();
    let action = actions.get(info.signal);
    let blocked = thread.mask().has(info.signal);
    if blocked || action.handler == IGNORE {
        actions.set(info.signal, Action { handler: DEFAULT, ..action });
        thread.set_mask(Set(thread.mask().0 & !Set::of(info.signal).0));
    }
    // One that waits already says less.
    thread.pending.forget(Set::of(info.signal));
    let _ = thread.pending.post(info);
}
