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
    let tree = tree();
    if process.stopped.swap(true, Ordering::SeqCst) {
        return;
    }
    for thread in tree.threads_of(process) {
        super::sched::interrupt(thread);
    }
    note(&tree, process, Change::Stopped(signal));
    send(&tree, process, CLD_STOPPED, signal);
}

/// Lets a process go on that is stopped: by `SIGCONT`, as that is sent. Who waits for that learns it at once; the signal to the
/// parent comes from the process itself.
pub fn go_on(tree: &Tree, process: &Process) {
    if process.stopped.swap(false, Ordering::SeqCst) {
        note(tree, process, Change::Continued);
        process.continued.store(true, Ordering::SeqCst);
        process.going_on.wake_all();
    }
}

/// By a thread of a process that goes on: the parent is sent a signal, once.
fn note_continued(process: &Process) {
    if process.continued.swap(false, Ordering::SeqCst) {
        send(&tree(), process, CLD_CONTINUED, signal::SIGCONT);
    }
}

/// For who waits for children.
fn note(tree: &Tree, process: &Process, change: Change) {
    let Some(node) = tree.process(process.id()).filter(|node| !node.is_zombie()) else { return };
    node.change.set(Some(change));
    if let Some(parent) = tree.process(node.parent) {
        parent.process.children_changed.wake_all();
    }
}

fn send(tree: &Tree, process: &Process, code: i32, status: u32) {
    let node = tree.process(process.id()).filter(|node| !node.is_zombie());
    let Some(parent) = node.and_then(|node| tree.process(node.parent)) else { return };
    if parent.process.action(SIGCHLD).flags & SA_NOCLDSTOP == 0 {
        let info = Info::child(code, process.id(), status as i32, (0, 0));
        let _ = signal::send_to_process(tree, &parent.process, info);
    }
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
