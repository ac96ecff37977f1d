//! The system calls about signals.

use super::{
    Action, AlternateStack, COUNT, Info, SI_TKILL, SI_USER, SIGCONT, SIGKILL, Set, frame, is_ignored,
    send_to_process, send_to_thread,
};
use crate::arch::TrapFrame;
use crate::errno::Errno;
use crate::task::process::Process;
use crate::task::thread::{CurrentThread, current};
use crate::task::time::Timespec;
use crate::task::tree::{Tree, tree};
use crate::task::wait::{self, Wake};
use crate::user;
use core::sync::atomic::Ordering;
use terrane::sync::Shared;

pub const SS_ONSTACK: u32 = 1;
pub const SS_DISABLE: u32 = 2;
pub const SS_AUTODISARM: u32 = 1 << 31;

/// The least that an alternate stack must have.
const MINSIGSTKSZ: u64 = 2048;
/// Bytes of a set.
const SET: u64 = 8;

/// What a call returns.
pub type Answer = Result<u64, Errno>;

fn check_size(size: u64) -> Result<(), Errno> {
    if size == SET { Ok(()) } else { Err(Errno::EINVAL) }
}

fn check_signal(signal: u64) -> Result<u32, Errno> {
    let signal = signal as u32;
    if signal <= COUNT { Ok(signal) } else { Err(Errno::EINVAL) }
}

/// `rt_sigaction`.
pub fn rt_sigaction(signal: u64, new: u64, old: u64, size: u64) -> Answer {
    check_size(size)?;
    let signal = check_signal(signal)?;
    if signal == 0 || new != 0 && Set::ALWAYS.has(signal) {
        return Err(Errno::EINVAL);
    }
    let action = match new {
        0 => None,
        at => {
            let [handler, flags, restorer, mask] = user::read_value::<[u64; 4]>(at)?;
            Some(Action { handler, flags, restorer, mask: mask & !Set::ALWAYS.0 })
        }
    };
    let thread = current();
    let process = thread.process();
    let before = match action {
        None => process.action(signal),
        Some(action) => {
            let before = process.actions().set(signal, action);
            if is_ignored(&action, signal) {
                // What waits is ignored too.
                process.pending.forget(Set::of(signal));
                for thread in tree().threads_of(process) {
                    thread.pending.forget(Set::of(signal));
                }
            }
            before
        }
    };
    if old != 0 {
        user::write_value(old, [before.handler, before.flags, before.restorer, before.mask])?;
    }
    Ok(0)
}

/// `rt_sigprocmask`.
pub fn rt_sigprocmask(how: u64, new: u64, old: u64, size: u64) -> Answer {
    check_size(size)?;
    let thread = current();
    let before = thread.mask();
    if new != 0 {
        let set = user::read_value::<u64>(new)?;
        let after = match how as i32 {
            0 => before.0 | set,
            1 => before.0 & !set,
            2 => set,
            _ => return Err(Errno::EINVAL),
        };
        thread.set_mask(Set(after));
        hand_on(&thread, Set(after & !before.0));
    }
    if old != 0 {
        user::write_value(old, before.0)?;
    }
    Ok(0)
}

/// Signals of the process that this thread will not take any more, and was perhaps woken for, are for the others to look at.
fn hand_on(thread: &CurrentThread, blocked: Set) {
    let process = thread.process();
    if process.pending.set().0 & blocked.0 != 0 && process.threads.load(Ordering::Relaxed) > 1 {
        for other in tree().threads_of(process) {
            if !thread.is(other) && other.has_signal() {
                super::tell(other);
            }
        }
    }
}

/// `rt_sigpending`.
pub fn rt_sigpending(at: u64, size: u64) -> Answer {
    if size > SET {
        return Err(Errno::EINVAL);
    }
    let thread = current();
    let set = thread.waiting_signals().0 & thread.mask().0;
    user::write(at, &set.to_ne_bytes()[..size as usize])?;
    Ok(0)
}

/// Sets the mask that a program gave at `at` until the call ends: for `ppoll` and the like. Nothing where `at` is 0.
///
/// # Errors
/// `EINVAL` for another size than 8, `EFAULT`.
pub fn set_temporary_mask(at: u64, size: u64) -> Result<(), Errno> {
    if at == 0 {
        return Ok(());
    }
    check_size(size)?;
    let set = Set(user::read_value::<u64>(at)?);
    let thread = current();
    let before = thread.mask();
    thread.change(|own| own.saved_mask = Some(before));
    thread.set_mask(set);
    Ok(())
}

/// The end of that: when a signal has interrupted the call, the mask comes back behind its handler, else now.
pub fn end_temporary_mask(interrupted: bool) {
    let thread = current();
    if !interrupted && let Some(mask) = thread.change(|own| own.saved_mask.take()) {
        thread.set_mask(mask);
    }
}

/// `rt_sigsuspend`.
pub fn rt_sigsuspend(at: u64, size: u64) -> Answer {
    check_size(size)?;
    if at == 0 {
        return Err(Errno::EFAULT);
    }
    set_temporary_mask(at, size)?;
    pause()
}

/// `pause`.
pub fn pause() -> Answer {
    while wait::sleep_until(u64::MAX).is_ok() {}
    Err(Errno::EINTR)
}

/// `rt_sigtimedwait`.
pub fn rt_sigtimedwait(set: u64, info: u64, timeout: u64, size: u64) -> Answer {
    check_size(size)?;
    let wanted = Set(user::read_value::<u64>(set)? & !Set::ALWAYS.0);
    let deadline = match timeout {
        0 => None,
        at => Some(crate::arch::now().saturating_add(Timespec::read(at)?.duration()?)),
    };
    let thread = current();
    let process = thread.process();
    thread.awaited.store(wanted.0, Ordering::SeqCst);
    let found = loop {
        if let Some(found) = thread.pending.take(wanted).or_else(|| process.pending.take(wanted)) {
            break Ok(found);
        }
        match wait::on_any(&[], deadline, || false) {
            // A signal that is waited for, or another, which ends it.
            Err(Wake::Signal) if thread.waiting_signals().0 & wanted.0 != 0 => {}
            Err(Wake::Signal) => break Err(Errno::EINTR),
            Err(Wake::Timeout) => break Err(Errno::EAGAIN),
            Ok(()) => {}
        }
    };
    thread.awaited.store(0, Ordering::SeqCst);
    let found = found?;
    if info != 0 {
        user::write(info, &frame::siginfo(&found))?;
    }
    Ok(found.signal.into())
}

/// `sigaltstack`.
pub fn sigaltstack(new: u64, old: u64, sp: u64) -> Answer {
    let thread = current();
    let before = thread.private().alternate_stack;
    if new != 0 {
        let [base, flags, size] = user::read_value::<[u64; 3]>(new)?;
        set_alternate_stack(&thread, AlternateStack { base, flags: flags as u32, size }, sp)?;
    }
    if old != 0 {
        let on = frame::is_on(&before, sp);
        let flags = if before.size == 0 { SS_DISABLE } else { before.flags | u32::from(on) };
        user::write_value(old, [before.base, flags.into(), before.size])?;
    }
    Ok(0)
}

/// Sets the alternate stack, unless `sp` is on the one that there is.
///
/// # Errors
/// As `sigaltstack`.
pub fn set_alternate_stack(thread: &CurrentThread, new: AlternateStack, sp: u64) -> Result<(), Errno> {
    let before = thread.private().alternate_stack;
    if frame::is_on(&before, sp) {
        return Err(Errno::EPERM);
    }
    let mode = new.flags & !SS_AUTODISARM;
    if mode != 0 && mode != SS_ONSTACK && mode != SS_DISABLE {
        return Err(Errno::EINVAL);
    }
    let stack = if mode == SS_DISABLE {
        AlternateStack::default()
    } else {
        if new.size < MINSIGSTKSZ {
            return Err(Errno::ENOMEM);
        }
        AlternateStack { flags: new.flags & SS_AUTODISARM, ..new }
    };
    thread.change(|own| own.alternate_stack = stack);
    Ok(())
}

/// Whether the caller may send `signal` to `process`: as root, with its user's number, or to let one of its own session go on.
fn may_send(tree: &Tree, process: &Process, signal: u32) -> bool {
    let own = current();
    let [real, effective, _] = own.process().user_ids();
    let [their_real, _, their_saved] = process.user_ids();
    let session = |id: u32| tree.process(id).map(|node| node.session);
    own.process().is_privileged()
        || [real, effective].iter().any(|id| [their_real, their_saved].contains(id))
        || signal == SIGCONT && session(own.process().id()) == session(process.id())
}

/// Whoever waits for a handler of user faults cannot be ended by a signal: where one ends the process, the handlers go first.
fn release(process: Option<Shared<Process>>) {
    if let Some(space) = process.and_then(|process| process.space()) {
        crate::fs::userfault::space_ends(&space);
    }
}

/// `kill`.
pub fn kill(id: u64, signal: u64) -> Answer {
    let signal = check_signal(signal)?;
    let me = current();
    let my_id = me.process().id();
    let id = id as i32;
    let info = Info::from_process(signal, SI_USER, my_id);
    let tree = tree();
    let my_group = tree.process(my_id).map_or(0, |node| node.group);
    if id == 1 {
        // The parent of the first process. It takes nothing amiss.
        return if me.process().is_privileged() { Ok(0) } else { Err(Errno::EPERM) };
    }
    let (mut any, mut allowed, mut killed) = (false, false, None);
    for node in tree.processes() {
        let process = node.process.id();
        let meant = match id {
            0 => node.group == my_group,
            -1 => process != 1 && process != my_id,
            1.. => process == id as u32,
            _ => node.group == id.unsigned_abs(),
        };
        if !meant {
            continue;
        }
        any = true;
        if !may_send(&tree, &node.process, signal) {
            continue;
        }
        allowed = true;
        if signal != 0 && !node.is_zombie() {
            send_to_process(&tree, &node.process, info)?;
            if signal == SIGKILL {
                killed = Some(node.process.clone());
            }
        }
    }
    // A thread's number names its process, too.
    if !any
        && id > 0
        && let Some(thread) = tree.thread(id as u32)
    {
        (any, allowed) = (true, may_send(&tree, thread.process(), signal));
        if allowed && signal != 0 {
            send_to_process(&tree, thread.process(), info)?;
            if signal == SIGKILL {
                killed = Some(thread.process().clone());
            }
        }
    }
    drop(tree);
    release(killed);
    match (any, allowed) {
        (_, true) => Ok(0),
        (true, false) => Err(Errno::EPERM),
        (false, false) => Err(Errno::ESRCH),
    }
}

/// `tgkill`; `tkill` with a group of `None`.
pub fn tgkill(group: Option<u64>, id: u64, signal: u64) -> Answer {
    if id as i32 <= 0 || group.is_some_and(|group| group as i32 <= 0) {
        return Err(Errno::EINVAL);
    }
    let signal = check_signal(signal)?;
    let info = Info::from_process(signal, SI_TKILL, current().process().id());
    send_to_one(group, id, info)
}

fn send_to_one(group: Option<u64>, id: u64, info: Info) -> Answer {
    let tree = tree();
    let thread = tree.thread(id as u32).ok_or(Errno::ESRCH)?;
    if group.is_some_and(|group| thread.process().id() != group as u32) {
        return Err(Errno::ESRCH);
    }
    if !may_send(&tree, thread.process(), info.signal) {
        return Err(Errno::EPERM);
    }
    let process = (info.signal == SIGKILL).then(|| thread.process().clone());
    if info.signal != 0 {
        send_to_thread(&tree, thread, info)?;
    }
    drop(tree);
    release(process);
    Ok(0)
}

fn read_info(signal: u64, at: u64, target: &dyn Fn(&Process) -> bool) -> Result<Info, Errno> {
    let signal = check_signal(signal)?;
    let bytes = user::read_value::<[u8; 128]>(at)?;
    let info = frame::parse_siginfo(signal, &bytes);
    // What the kernel says, and `tkill`, is not for programs to say of others.
    if (info.code >= 0 || info.code == SI_TKILL) && !target(current().process()) {
        return Err(Errno::EPERM);
    }
    Ok(info)
}

/// `rt_sigqueueinfo`.
pub fn rt_sigqueueinfo(id: u64, signal: u64, at: u64) -> Answer {
    let info = read_info(signal, at, &|process| process.id() == id as u32)?;
    if id as u32 == 1 {
        return if current().process().is_privileged() { Ok(0) } else { Err(Errno::EPERM) };
    }
    {
        let tree = tree();
        let node = tree.process(id as u32).ok_or(Errno::ESRCH)?;
        if !may_send(&tree, &node.process, info.signal) {
            return Err(Errno::EPERM);
        }
    }
    if info.signal == 0 {
        return Ok(0);
    }
    super::send_to(id as u32, info).map(|()| 0)
}

/// `rt_tgsigqueueinfo`.
pub fn rt_tgsigqueueinfo(group: u64, id: u64, signal: u64, at: u64) -> Answer {
    if id as i32 <= 0 || group as i32 <= 0 {
        return Err(Errno::EINVAL);
    }
    let info = read_info(signal, at, &|process| process.id() == group as u32)?;
    send_to_one(Some(group), id, info)
}

/// `rt_sigreturn`: the registers are what the handler interrupted.
pub fn rt_sigreturn(frame: &mut TrapFrame) -> Option<Answer> {
    let thread = current();
    if frame::pop(&thread, frame).is_err() {
        super::force(&thread, Info::from_kernel(super::SIGSEGV));
    }
    None
}

/// Sends the current thread a signal that a call of its own has caused: `SIGPIPE`, `SIGXFSZ`.
pub fn send_to_current(signal: u32) {
    let thread = current();
    let info = Info::from_process(signal, SI_USER, thread.process().id());
    // What does not queue cannot fail.
    let _ = send_to_thread(&tree(), &thread, info);
}
