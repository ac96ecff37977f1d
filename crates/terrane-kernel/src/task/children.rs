//! Children: their ends, and waiting for them.

use core::sync::atomic::Ordering;

use super::process::{Process, Usage};
use super::signal::{self, IGNORE, Info, SA_NOCLDWAIT, SIGCHLD, SIGCONT};
use super::thread::current;
use super::trace;
use super::tree::{self, Change, Node, Tree, tree};
use crate::errno::Errno;
use crate::syscall::write_usage;
use crate::user;
use terrane::sync::Shared;

const WNOHANG: u64 = 1;
const WUNTRACED: u64 = 2;
const WEXITED: u64 = 4;
const WCONTINUED: u64 = 8;
const WNOWAIT: u64 = 0x100_0000;
/// `__WNOTHREAD`, `__WALL`, `__WCLONE`.
const KINDS: u64 = 0xe000_0000;
const WALL: u64 = 0x4000_0000;
const WCLONE: u64 = 0x8000_0000;

/// The parent of the first process and of orphans: the number of the process that starts a Linux, which there is none of here. Who has it for a parent goes
/// without being waited for.
pub const NOBODY: u32 = 1;

/// `si_code`s.
const CLD_EXITED: i32 = 1;
const CLD_KILLED: i32 = 2;
const CLD_DUMPED: i32 = 3;
const CLD_STOPPED: i32 = 5;
const CLD_CONTINUED: i32 = 6;

/// The code and status that a parent is told of an end with this status.
fn code_of(status: u32) -> (i32, i32) {
    match status {
        status if status & 0x7f == 0 => (CLD_EXITED, (status >> 8 & 0xff) as i32),
        status if status & 0x80 != 0 => (CLD_DUMPED, (status & 0x7f) as i32),
        status => (CLD_KILLED, (status & 0x7f) as i32),
    }
}

/// Who gets the children of a process that ends: the next before it that adopts (`PR_SET_CHILD_SUBREAPER`), or nobody.
fn heir_of(tree: &Tree, process: &Process) -> u32 {
    let mut at = process.id();
    while let Some(parent) = tree.process(at).map(|node| node.parent) {
        match tree.process(parent) {
            Some(node)
                if node.process.adopts.load(Ordering::Relaxed) && node.process.exit_status().is_none() =>
            {
                return parent;
            }
            _ => at = parent,
        }
    }
    NOBODY
}

/// The last thread of a process has gone: its children get another parent, and its own is told.
pub fn has_ended(process: &Shared<Process>) {
    let status = process.exit_status().unwrap_or(0);
    let mut removed = None;
    trace::tracer_ends(process.id());
    {
        let mut tree = tree();
        let heir = heir_of(&tree, process);
        for node in tree.processes_mut() {
            if node.parent == process.id() {
                node.parent = heir;
                // Whatever it was to send: another parent expects the usual.
                node.process.exit_signal.store(SIGCHLD, Ordering::Relaxed);
            }
        }
        if let Some(heir) = tree.process(heir) {
            heir.process.children_changed.wake_all();
        }
        // Of those who have ended already nobody will ask. What is dropped here has no space, nor files.
        while let Some(orphan) =
            tree.processes().iter().find(|node| node.parent == NOBODY && node.is_zombie())
        {
            let orphan = orphan.process.id();
            drop(tree.remove_process(orphan));
        }
        let Some(node) = tree.process(process.id()) else { return };
        node.change.set(Some(Change::Ended(status)));
        let parent_id = node.parent;
        let parent = tree.process(parent_id).map(|node| node.process.clone());
        match parent {
            Some(parent) => {
                let signal = process.exit_signal.load(Ordering::Relaxed);
                let action = parent.action(SIGCHLD);
                let unwanted =
                    signal == SIGCHLD && (action.handler == IGNORE || action.flags & SA_NOCLDWAIT != 0);
                if signal != 0 && !(signal == SIGCHLD && action.handler == IGNORE) {
                    let (code, status) = code_of(status);
                    let ended = process.ended.lock();
                    let tick = |ns: u64| ns / 10_000_000;
                    let times = (tick(ended.time - ended.in_kernel), tick(ended.in_kernel));
                    drop(ended);
                    let info = Info { signal, ..Info::child(code, process.id(), status, times) };
                    let _ = signal::send_to_process(&tree, &parent, info);
                }
                if unwanted {
                    removed = tree.remove_process(process.id());
                }
                parent.children_changed.wake_all();
            }
            None => removed = tree.remove_process(process.id()),
        }
    }
    drop(removed);
}

/// What is waited for.
#[derive(Clone, Copy)]
enum Which {
    Any,
    Process(u32),
    Group(u32),
}

/// A child that has changed.
struct Found {
    process: u32,
    change: Change,
    usage: Usage,
}

/// Looks for a child with news; `None` when there is none yet.
fn look(
    tree: &mut Tree,
    me: u32,
    which: Which,
    options: u64,
) -> Result<Option<(Found, Option<Node>)>, Errno> {
    let mut any = false;
    let mut found = None;
    for node in tree.processes() {
        let meant = match which {
            Which::Any => true,
            Which::Process(id) => node.process.id() == id,
            Which::Group(group) => node.group == group,
        };
        let clone = node.process.exit_signal.load(Ordering::Relaxed) != SIGCHLD;
        let kind = options & WALL != 0 || clone == (options & WCLONE != 0);
        if node.parent != me || !meant || !kind {
            continue;
        }
        any = true;
        let wanted = match node.change.get() {
            Some(Change::Ended(_)) => options & WEXITED != 0,
            Some(Change::Stopped(_)) => options & WUNTRACED != 0 || trace::is_traced(&node.process),
            Some(Change::Continued) => options & WCONTINUED != 0,
            None => false,
        };
        if wanted && let Some(change) = node.change.get() {
            let mut usage = *node.process.ended.lock();
            usage.add(&node.process.children.lock());
            found = Some(Found { process: node.process.id(), change, usage });
            if options & WNOWAIT == 0 && !matches!(change, Change::Ended(_)) {
                node.change.set(None);
            }
            break;
        }
    }
    let Some(found) = found else { return if any { Ok(None) } else { Err(Errno::ECHILD) } };
    let reaped = matches!(found.change, Change::Ended(_)) && options & WNOWAIT == 0;
    let node = if reaped { tree.remove_process(found.process) } else { None };
    Ok(Some((found, node)))
}

fn wait(which: Which, options: u64) -> Result<Option<Found>, Errno> {
    let thread = current();
    let process = thread.process();
    tree::collect();
    let mut result = Ok(None);
    let waited = process.children_changed.wait_until(None, || {
        result = look(&mut tree(), process.id(), which, options);
        !matches!(result, Ok(None)) || options & WNOHANG != 0
    });
    let found = result?;
    match found {
        Some((found, node)) => {
            if node.is_some() {
                process.children.lock().add(&found.usage);
            }
            drop(node);
            Ok(Some(found))
        }
        None if waited.is_err() => Err(Errno::EINTR),
        None => Ok(None),
    }
}

fn own_group() -> u32 {
    let process = current().process().id();
    tree().process(process).map_or(0, |node| node.group)
}

/// `wait4`.
pub fn wait4(id: u64, status: u64, options: u64, usage: u64) -> Result<u64, Errno> {
    let options = options & 0xffff_ffff;
    if options & !(WNOHANG | WUNTRACED | WCONTINUED | KINDS) != 0 {
        return Err(Errno::EINVAL);
    }
    let which = match id as i32 {
        i32::MIN => return Err(Errno::ESRCH),
        -1 => Which::Any,
        0 => Which::Group(own_group()),
        id @ 1.. => Which::Process(id as u32),
        id => Which::Group(id.unsigned_abs()),
    };
    let Some(found) = wait(which, options | WEXITED)? else { return Ok(0) };
    let word = match found.change {
        Change::Ended(status) => status,
        Change::Stopped(signal) => signal << 8 | 0x7f,
        Change::Continued => 0xffff,
    };
    if status != 0 {
        user::write_value(status, word)?;
    }
    if usage != 0 {
        write_usage(usage, &found.usage)?;
    }
    Ok(found.process.into())
}

/// `waitid`.
pub fn waitid(kind: u64, id: u64, info: u64, options: u64, usage: u64) -> Result<u64, Errno> {
    let options = options & 0xffff_ffff;
    let known = WNOHANG | WUNTRACED | WEXITED | WCONTINUED | WNOWAIT | KINDS;
    if options & !known != 0 || options & (WUNTRACED | WEXITED | WCONTINUED) == 0 {
        return Err(Errno::EINVAL);
    }
    let which = match kind {
        0 => Which::Any,
        1 if id as i32 > 0 => Which::Process(id as u32),
        2 if id as i32 == 0 => Which::Group(own_group()),
        2 if id as i32 > 0 => Which::Group(id as u32),
        _ => return Err(Errno::EINVAL),
    };
    let found = wait(which, options);
    if let Ok(Some(found)) = &found
        && usage != 0
    {
        write_usage(usage, &found.usage)?;
    }
    if info != 0 {
        // Also with an error: it says of nobody then.
        let told = match &found {
            Ok(Some(found)) => {
                let (code, status) = match found.change {
                    Change::Ended(status) => code_of(status),
                    Change::Stopped(signal) => (CLD_STOPPED, signal as i32),
                    Change::Continued => (CLD_CONTINUED, SIGCONT as i32),
                };
                [SIGCHLD, 0, code as u32, 0, found.process, 0, status as u32]
            }
            _ => [0; 7],
        };
        user::write_value(info, told)?;
    }
    found.map(|_| 0)
}
