//! The end of threads and processes.
//!
//! Who decides that a process is to end says so first ([`Process::begin_exit`]) and then, under the tree's lock, posts `SIGKILL` to each of its threads, which ends
//! their waits; each leaves where it would return to user mode. A thread that is started meanwhile is added under the same lock, and
//! looks before it is in user mode for the first time. `SIGKILL` decides as it is sent (`signal::send_to_process`): else a thread that returns to
//! user mode before the one that takes the signal could end the process in its own way. The last thread to go makes the process one that has ended, and tells the parent.

use core::sync::atomic::Ordering;

use super::children;
use super::process::{Exit, Process, Usage};
use super::sched;
use super::signal::{self, Info, SIGKILL};
use super::thread::{CurrentThread, Thread, current};
use super::tree::{self, tree};
use super::{futex, report};
use crate::user;
use terrane::PAGE_SIZE;

/// `exit_group`, and the end by a signal.
pub fn group(exit: Exit) -> ! {
    let thread = current();
    thread.process().begin_exit(exit);
    tell_others(&thread);
    crate::fs::userfault::space_ends(thread.space());
    thread_only(&thread)
}

/// `exit`: the thread alone, if it is not the last.
pub fn thread(code: u64) -> ! {
    let thread = current();
    thread.change(|own| own.exit_code = code as u8);
    thread_only(&thread)
}

/// Leaves if the process is to end, or to become a new program without this thread.
pub fn leave_if_told(thread: &CurrentThread) {
    if thread.process().ends(thread.id()) {
        thread_only(thread);
    }
}

/// Makes the other threads of the process come and look.
pub fn tell_others(thread: &CurrentThread) {
    let tree = tree();
    for other in tree.threads_of(thread.process()) {
        if !thread.is(other) {
            kill(other);
        }
    }
}

/// Makes a thread look whether it is to end.
pub fn kill(thread: &Thread) {
    let _ = thread.pending.post(Info::from_kernel(SIGKILL));
    signal::tell(thread);
}

/// Ends a process from outside, as when memory is short: `SIGKILL`.
pub fn kill_process(process: &Process) {
    let tree = tree();
    let _ = signal::send_to_process(&tree, process, Info::from_kernel(SIGKILL));
}

/// What a thread has in the memory of its program, which it leaves: because it ends, or becomes a new program.
pub fn leave_memory(thread: &CurrentThread) {
    futex::leave_robust(thread);
    let at = thread.private().clear_child_tid;
    thread.change(|own| {
        own.robust_list = 0;
        own.clear_child_tid = 0;
        own.rseq = None;
    });
    if at != 0 && user::write_value(at, 0u32).is_ok() {
        futex::wake_word(at);
    }
}

fn thread_only(thread: &CurrentThread) -> ! {
    tree::collect();
    leave_memory(thread);
    let resident = thread.space().mm().peaks().0;
    let (space, files, cwd, vfork) =
        thread.change(|own| (own.space.take(), own.files.take(), own.cwd.take(), own.vfork.take()));
    // The last reference may take the space apart, which is not to be under this CPU's feet.
    crate::arch::interrupts::without(|| crate::mm::activate(None));
    drop(files);
    drop(cwd);
    if let Some(vfork) = vfork {
        vfork.done();
    }
    let process = thread.process().clone();
    let exit_code = thread.private().exit_code;
    let last = {
        let _tree = tree();
        let mut ended = process.ended.lock();
        ended.add(&Usage { resident, ..thread.take_usage() });
        drop(ended);
        // Its number is free, for a thread that makes the process a new program above all.
        thread.set_id(0);
        thread.process().threads.fetch_sub(1, Ordering::SeqCst) == 1
    };
    drop(space);
    if last {
        process.begin_exit(Exit::Code(exit_code));
        process.timers.stop();
        let space = process.set_space(None);
        drop(space);
        if process.id() == super::clone::FIRST {
            report::shut_down(process.exit_status().unwrap_or(0));
        }
        crate::fs::process_ended(process.id());
        children::has_ended(&process);
    }
    process.threads_changed.wake_all();
    drop(process);
    tree::note_gone();
    let thread: &Thread = thread;
    crate::arch::interrupts::disable();
    thread.state.store(sched::DEAD, Ordering::SeqCst);
    sched::schedule();
    unreachable!("a thread that has ended runs");
}

/// A thread has no memory for a page that it touched: its process is killed, as Linux's out-of-memory killer would.
pub fn out_of_memory(thread: &CurrentThread, addr: u64) {
    let process = thread.process();
    let mapped = thread.space().mapped_bytes() / PAGE_SIZE;
    crate::log!("out of memory: process {} killed at {addr:#x}, {mapped} pages mapped", process.id());
    kill_process(process);
}
