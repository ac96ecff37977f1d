//! Processes that are stopped, and go on.

use core::sync::atomic::Ordering;

use super::process::Process;
use super::signal::{self, Info, SA_NOCLDSTOP, SIGCHLD};
use super::tree::{Change, Tree, tree};

/// `si_code`s of `SIGCHLD`.
const CLD_STOPPED: i32 = 5;
const CLD_CONTINUED: i32 = 6;

/// Stops a process because of `signal`: its threads wait on their way to user mode.
pub fn stop(process: &Process, signal: u32) {
    let mut tree = tree();
    if process.stopped.swap(true, Ordering::SeqCst) {
        return;
    }
    for thread in tree.threads_of(process) {
        super::sched::interrupt(thread);
    }
    tell_parent(&mut tree, process, Change::Stopped(signal), CLD_STOPPED, signal as i32);
}

/// Lets a process go on that is stopped: by `SIGCONT`, as that is sent.
pub fn go_on(_: &Tree, process: &Process) {
    if process.stopped.swap(false, Ordering::SeqCst) {
        process.continued.store(true, Ordering::SeqCst);
        process.going_on.wake_all();
    }
}

/// By a thread of a process that goes on: the parent is told, once.
pub fn note_continued(process: &Process) {
    if process.continued.swap(false, Ordering::SeqCst) {
        tell_parent(&mut tree(), process, Change::Continued, CLD_CONTINUED, signal::SIGCONT as i32);
    }
}

fn tell_parent(tree: &mut Tree, process: &Process, change: Change, code: i32, status: i32) {
    let Some(node) = tree.process_mut(process.id()) else { return };
    if node.is_zombie() {
        return;
    }
    node.change = Some(change);
    let parent = node.parent;
    let Some(parent) = tree.process(parent).map(|node| node.process.clone()) else { return };
    if parent.action(SIGCHLD).flags & SA_NOCLDSTOP == 0 {
        let _ = signal::send_to_process(tree, &parent, Info::child(code, process.id(), status, (0, 0)));
    }
    parent.children_changed.wake_all();
}

/// By a thread on its way to user mode: waits while its process is stopped and not to end.
pub fn wait_while_stopped(process: &Process) {
    process.going_on.wait_uninterrupted(|| {
        !process.stopped.load(Ordering::SeqCst)
            || process.exit_status().is_some()
            || process.execs.load(Ordering::SeqCst) != 0
    });
    note_continued(process);
}
