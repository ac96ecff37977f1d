//! Limits, usage, scheduling, and what else a C library asks for as it starts.

use super::Answer;
use crate::arch;
use crate::errno::Errno;
use crate::mm;
use crate::task::exec;
use crate::task::process::{LIMITS, Process, Usage};
use crate::task::sched;
use crate::task::thread::{Thread, current};
use crate::task::time::{SECOND, Timespec, timeval};
use crate::task::tree::tree;
use crate::user;
use core::sync::atomic::Ordering;
use terrane::PAGE_SIZE;
use terrane::page_table::{Format, X86_64};
use terrane::sync::Shared;

/// What the threads of the current thread's process have used.
pub fn own_usage(thread: &Thread) -> Usage {
    let process = thread.process();
    let tree = tree();
    let mut usage = *process.ended.lock();
    for thread in tree.threads_of(process) {
        usage.add(&usage_of(thread));
    }
    usage
}

fn usage_of(thread: &Thread) -> Usage {
    let time = thread.run_time();
    Usage {
        time,
        in_kernel: thread.kernel_time().min(time),
        faults: thread.faults.load(Ordering::Relaxed),
        voluntary: thread.voluntary.load(Ordering::Relaxed),
        preempted: thread.preempted.load(Ordering::Relaxed),
        resident: 0,
    }
}

/// Writes `struct rusage`.
///
/// # Errors
/// `EFAULT`.
pub fn write_usage(to: u64, usage: &Usage) -> Result<(), Errno> {
    let [user_seconds, user] = timeval(usage.time - usage.in_kernel);
    let [system_seconds, system] = timeval(usage.in_kernel);
    let mut words = [0i64; 18];
    words[..4].copy_from_slice(&[user_seconds, user, system_seconds, system]);
    words[4] = (usage.resident >> 10) as i64;
    words[8] = usage.faults as i64;
    words[16] = usage.voluntary as i64;
    words[17] = usage.preempted as i64;
    user::write_value(to, words)
}

/// `getrusage`.
pub fn getrusage(who: u64, to: u64) -> Answer {
    let thread = current();
    let usage = match who as i32 {
        0 => Usage { resident: thread.space().mm().peaks().0, ..own_usage(&thread) },
        -1 => *thread.process().children.lock(),
        1 => Usage { resident: thread.space().mm().peaks().0, ..usage_of(&thread) },
        _ => return Err(Errno::EINVAL),
    };
    write_usage(to, &usage)?;
    Ok(0)
}

/// `getrlimit`.
pub fn getrlimit(resource: u64, to: u64) -> Answer {
    prlimit64(0, resource, 0, to)
}

/// `setrlimit`.
pub fn setrlimit(resource: u64, from: u64) -> Answer {
    if from == 0 {
        return Err(Errno::EFAULT);
    }
    prlimit64(0, resource, from, 0)
}

/// `prlimit64`.
pub fn prlimit64(id: u64, resource: u64, new: u64, old: u64) -> Answer {
    let resource = usize::try_from(resource as u32).ok().filter(|&r| r < LIMITS).ok_or(Errno::EINVAL)?;
    let new = match new {
        0 => None,
        at => {
            let [soft, hard] = user::read_value::<[u64; 2]>(at)?;
            if soft > hard {
                return Err(Errno::EINVAL);
            }
            Some((soft, hard))
        }
    };
    let thread = current();
    let process: Shared<Process> = match id as u32 {
        0 => thread.process().clone(),
        id => tree().process(id).map(|node| node.process.clone()).ok_or(Errno::ESRCH)?,
    };
    let before = {
        let mut limits = process.limits.lock();
        let before = limits[resource];
        if let Some(new) = new {
            if new.1 > before.1 && !thread.process().is_privileged() {
                return Err(Errno::EPERM);
            }
            limits[resource] = new;
        }
        before
    };
    if new.is_some()
        && let Some(space) = process.space()
    {
        exec::apply_limits(&process, &space);
    }
    if old != 0 {
        user::write_value(old, [before.0, before.1])?;
    }
    Ok(0)
}

/// `sysinfo`.
pub fn sysinfo(to: u64) -> Answer {
    let usage = mm::machine().usage();
    let total = usage.frames_total as u64 * PAGE_SIZE;
    let free = usage.frames_free as u64 * PAGE_SIZE;
    let load = (sched::runnable() as u64) << 16;
    let processes = tree().threads().count() as u64;
    // Uptime, three loads, memory: total, free, shared, buffers, swap: total, free; processes (16 bits), padding, high memory, unit.
    let words: [u64; 14] =
        [arch::now() / SECOND, load, load, load, total, free, 0, 0, 0, 0, processes & 0xffff, 0, 0, 1];
    user::write_value(to, words)?;
    Ok(0)
}

/// `sched_yield`.
pub fn sched_yield() -> Answer {
    sched::yield_now();
    Ok(0)
}

/// Runs `act` on the thread with this number; 0 is the current one.
fn on_thread<R>(id: u64, act: impl FnOnce(&Thread) -> R) -> Result<R, Errno> {
    if (id as i32) < 0 {
        return Err(Errno::EINVAL);
    }
    match id as u32 {
        0 => Ok(act(&current())),
        id => tree().thread(id).map(|thread| act(thread)).ok_or(Errno::ESRCH),
    }
}

/// `sched_setaffinity`.
pub fn sched_setaffinity(id: u64, len: u64, at: u64) -> Answer {
    let mut bytes = [0; 8];
    let len = (len as u32 as usize).min(8);
    user::read(&mut bytes[..len], at)?;
    let mask = u64::from_ne_bytes(bytes) & sched::online();
    on_thread(id, |thread| {
        if mask == 0 {
            return Err(Errno::EINVAL);
        }
        thread.affinity.store(mask, Ordering::SeqCst);
        sched::interrupt(thread);
        Ok(())
    })??;
    if !sched::may_stay(&current()) {
        sched::schedule();
    }
    Ok(0)
}

/// `sched_getaffinity`.
pub fn sched_getaffinity(id: u64, len: u64, to: u64) -> Answer {
    if len < 8 || !len.is_multiple_of(8) {
        return Err(Errno::EINVAL);
    }
    let mask = on_thread(id, |thread| thread.affinity.load(Ordering::Relaxed))? & sched::online();
    user::write_value(to, mask)?;
    Ok(8)
}

/// `getcpu`.
pub fn getcpu(cpu: u64, node: u64) -> Answer {
    if cpu != 0 {
        user::write_value(cpu, arch::cpu_index() as u32)?;
    }
    if node != 0 {
        user::write_value(node, 0u32)?;
    }
    Ok(0)
}

/// What a thread was told about how it is to be scheduled. What is set is what is got; all are scheduled alike.
#[derive(Clone, Copy)]
struct Scheduling {
    policy: u32,
    priority: u32,
    nice: i32,
    reset_on_fork: bool,
}

impl Scheduling {
    const RESET: u32 = 0x4000_0000;

    fn of(thread: &Thread) -> Self {
        let word = thread.scheduling.load(Ordering::Relaxed);
        Self {
            policy: word & 0xff,
            priority: word >> 8 & 0xff,
            nice: i32::from((word >> 16) as u8 as i8),
            reset_on_fork: word & Self::RESET != 0,
        }
    }

    fn set(self, thread: &Thread) {
        let reset = if self.reset_on_fork { Self::RESET } else { 0 };
        let word = self.policy | self.priority << 8 | u32::from(self.nice as i8 as u8) << 16 | reset;
        thread.scheduling.store(word, Ordering::Relaxed);
    }

    fn check(self) -> Result<(), Errno> {
        match self.policy {
            0 | 3 | 5 if self.priority == 0 => Ok(()),
            1 | 2 if (1..=99).contains(&self.priority) => Ok(()),
            _ => Err(Errno::EINVAL),
        }
    }
}

/// Changes how a thread is to be scheduled.
fn reschedule(id: u64, change: impl FnOnce(Scheduling) -> Scheduling) -> Answer {
    let own = current();
    let (privileged, users) = (own.process().is_privileged(), own.process().user_ids());
    let most = own.process().limit(14);
    on_thread(id, |thread| {
        let before = Scheduling::of(thread);
        let after = change(before);
        after.check()?;
        if !privileged {
            let real_time = matches!(after.policy, 1 | 2);
            let allowed = !real_time
                || u64::from(after.priority) <= most
                || after.policy == before.policy && after.priority <= before.priority;
            if !allowed || after.nice < before.nice || thread.process().user_ids()[1] != users[1] {
                return Err(Errno::EPERM);
            }
        }
        after.set(thread);
        Ok(0)
    })?
}

/// `sched_getscheduler`.
pub fn sched_getscheduler(id: u64) -> Answer {
    on_thread(id, |thread| {
        let now = Scheduling::of(thread);
        u64::from(now.policy | if now.reset_on_fork { Scheduling::RESET } else { 0 })
    })
}

/// `sched_setscheduler`.
pub fn sched_setscheduler(id: u64, policy: u64, param: u64) -> Answer {
    if param == 0 || (policy as i32) < 0 || (id as i32) < 0 {
        return Err(Errno::EINVAL);
    }
    let priority = user::read_value::<u32>(param)?;
    let policy = policy as u32;
    let reset_on_fork = policy & Scheduling::RESET != 0;
    let priority = if priority > 99 { 200 } else { priority };
    reschedule(id, |now| {
        let policy = (policy & !Scheduling::RESET).min(200);
        Scheduling { policy, priority, reset_on_fork, ..now }
    })
}

/// `sched_setparam`.
pub fn sched_setparam(id: u64, param: u64) -> Answer {
    if param == 0 || (id as i32) < 0 {
        return Err(Errno::EINVAL);
    }
    let priority = user::read_value::<u32>(param)?;
    reschedule(id, |now| Scheduling { priority: priority.min(200), ..now })
}

/// `sched_getparam`.
pub fn sched_getparam(id: u64, to: u64) -> Answer {
    if to == 0 {
        return Err(Errno::EINVAL);
    }
    let priority = on_thread(id, |thread| Scheduling::of(thread).priority)?;
    user::write_value(to, priority)?;
    Ok(0)
}

/// `sched_setattr`.
pub fn sched_setattr(id: u64, at: u64, flags: u64) -> Answer {
    if at == 0 || (id as i32) < 0 || flags as u32 != 0 {
        return Err(Errno::EINVAL);
    }
    let [size, policy]: [u32; 2] = user::read_value(at)?;
    if size != 0 && !(48..=4096).contains(&size) {
        user::write_value(at, 56u32)?;
        return Err(Errno::E2BIG);
    }
    for offset in 56..u64::from(size) {
        if user::read_value::<u8>(at + offset)? != 0 {
            user::write_value(at, 56u32)?;
            return Err(Errno::E2BIG);
        }
    }
    let options: u64 = user::read_value(at + 8)?;
    let [nice, priority]: [u32; 2] = user::read_value(at + 16)?;
    if options & !0x7f != 0 || (policy as i32) < 0 {
        return Err(Errno::EINVAL);
    }
    reschedule(id, |now| Scheduling {
        policy: policy.min(200),
        priority: priority.min(200),
        nice: if matches!(policy, 0 | 3) { (nice as i32).clamp(-20, 19) } else { now.nice },
        reset_on_fork: options & 1 != 0,
    })
}

/// `sched_getattr`.
pub fn sched_getattr(id: u64, to: u64, size: u64, flags: u64) -> Answer {
    let size = size as u32;
    if to == 0 || (id as i32) < 0 || flags as u32 != 0 || !(48..=4096).contains(&size) {
        return Err(Errno::EINVAL);
    }
    let now = on_thread(id, Scheduling::of)?;
    let written = size.min(56);
    let mut words = [0u32; 14];
    (words[0], words[1], words[2]) = (written, now.policy, u32::from(now.reset_on_fork));
    (words[4], words[5]) = (now.nice as u32, now.priority);
    let mut bytes = [0; 56];
    for (place, word) in bytes.chunks_exact_mut(4).zip(words) {
        place.copy_from_slice(&word.to_ne_bytes());
    }
    user::write(to, &bytes[..written as usize])?;
    Ok(0)
}

/// `sched_get_priority_max`, `sched_get_priority_min`.
pub fn sched_priority(policy: u64, real_time: u64) -> Answer {
    match policy {
        1 | 2 => Ok(real_time),
        0 | 3 | 5 => Ok(0),
        _ => Err(Errno::EINVAL),
    }
}

/// `sched_rr_get_interval`.
pub fn sched_rr_get_interval(id: u64, to: u64) -> Answer {
    on_thread(id, |_| ())?;
    Timespec::of(4_000_000).write(to)?;
    Ok(0)
}

/// Runs `act` on the threads that `which` and `id` mean (`PRIO_PROCESS`, `_PGRP`, `_USER`); whether there was one.
fn on_all(which: u64, id: u64, mut act: impl FnMut(&Thread)) -> Result<(), Errno> {
    let own = current();
    let tree = tree();
    let group = |process: u32| tree.process(process).map_or(0, |node| node.group);
    let id = id as u32;
    let mut any = false;
    for thread in tree.threads() {
        let process = thread.process();
        let meant = match which as u32 {
            0 if id == 0 => thread.id() == own.id(),
            0 => thread.id() == id,
            1 if id == 0 => group(process.id()) == group(own.process().id()),
            1 => group(process.id()) == id,
            2 if id == 0 => process.user_ids()[0] == own.process().user_ids()[0],
            2 => process.user_ids()[0] == id,
            _ => return Err(Errno::EINVAL),
        };
        if meant {
            any = true;
            act(thread);
        }
    }
    if any { Ok(()) } else { Err(Errno::ESRCH) }
}

/// `getpriority`: 20 less the least nice value.
pub fn getpriority(which: u64, id: u64) -> Answer {
    let mut least = 19;
    on_all(which, id, |thread| least = least.min(Scheduling::of(thread).nice))?;
    Ok((20 - least) as u64)
}

/// `setpriority`: kept, and got back.
pub fn setpriority(which: u64, id: u64, nice: u64) -> Answer {
    let nice = (nice as i32).clamp(-20, 19);
    let privileged = current().process().is_privileged();
    let mut result = Ok(0);
    on_all(which, id, |thread| {
        let now = Scheduling::of(thread);
        if nice < now.nice && !privileged {
            result = Err(Errno::EACCES);
        } else {
            Scheduling { nice, ..now }.set(thread);
        }
    })?;
    result
}

/// `getrandom`.
pub fn getrandom(to: u64, len: u64, flags: u64) -> Answer {
    if flags & !7 != 0 || flags & 6 == 6 {
        return Err(Errno::EINVAL);
    }
    let len = len.min(i32::MAX as u64 & !(PAGE_SIZE - 1));
    let mut done = 0;
    while done < len {
        let mut bytes = [0; 256];
        for word in bytes.chunks_exact_mut(8) {
            word.copy_from_slice(&arch::random().to_ne_bytes());
        }
        let part = (len - done).min(256);
        match user::write(to + done, &bytes[..part as usize]) {
            Ok(()) => done += part,
            Err(errno) if done == 0 => return Err(errno),
            Err(_) => break,
        }
        if done.is_multiple_of(PAGE_SIZE) && current().has_signal() {
            break;
        }
    }
    Ok(done)
}

/// `arch_prctl`.
pub fn arch_prctl(code: u64, value: u64) -> Answer {
    let thread = current();
    match code {
        0x1002 if value >= X86_64::USER_END => Err(Errno::EPERM),
        0x1001 if value >= X86_64::USER_END => Err(Errno::EPERM),
        0x1002 => {
            thread.fs_base.store(value, Ordering::Relaxed);
            arch::set_fs_base(value);
            Ok(0)
        }
        0x1001 => {
            thread.gs_base.store(value, Ordering::Relaxed);
            arch::set_gs_base(value);
            Ok(0)
        }
        0x1003 => user::write_value(value, thread.fs_base.load(Ordering::Relaxed)).map(|()| 0),
        0x1004 => user::write_value(value, thread.gs_base.load(Ordering::Relaxed)).map(|()| 0),
        // `ARCH_CET_STATUS` and the like, which C libraries try: as on a kernel without.
        _ => Err(Errno::EINVAL),
    }
}

/// `set_tid_address`.
pub fn set_tid_address(at: u64) -> Answer {
    let thread = current();
    thread.change(|own| own.clear_child_tid = at);
    Ok(thread.id().into())
}

/// `set_robust_list`.
pub fn set_robust_list(head: u64, len: u64) -> Answer {
    if len != 24 {
        return Err(Errno::EINVAL);
    }
    current().change(|own| own.robust_list = head);
    Ok(0)
}

/// `get_robust_list`: of the calling thread.
pub fn get_robust_list(id: u64, head: u64, len: u64) -> Answer {
    let thread = current();
    if id as u32 != 0 && id as u32 != thread.id() {
        return Err(if tree().thread(id as u32).is_some() { Errno::EPERM } else { Errno::ESRCH });
    }
    user::write_value(len, 24u64)?;
    user::write_value(head, thread.private().robust_list)?;
    Ok(0)
}

/// `personality`.
pub fn personality(persona: u64) -> Answer {
    let thread = current();
    let word = &thread.process().personality;
    let before = word.load(Ordering::Relaxed);
    if persona as u32 != u32::MAX {
        word.store(persona as u32, Ordering::Relaxed);
    }
    Ok(before.into())
}

/// `prctl`: what programs use of it.
pub fn prctl([option, a, b, c, d, _]: [u64; 6]) -> Answer {
    const SET_PDEATHSIG: u64 = 1;
    const GET_PDEATHSIG: u64 = 2;
    const GET_DUMPABLE: u64 = 3;
    const SET_DUMPABLE: u64 = 4;
    const SET_NAME: u64 = 15;
    const GET_NAME: u64 = 16;
    const SET_NO_NEW_PRIVS: u64 = 38;
    const GET_NO_NEW_PRIVS: u64 = 39;
    const SET_CHILD_SUBREAPER: u64 = 36;
    const GET_CHILD_SUBREAPER: u64 = 37;
    const GET_TID_ADDRESS: u64 = 40;
    const SET_MDWE: u64 = 65;
    const GET_MDWE: u64 = 66;
    const GET_SECCOMP: u64 = 21;
    const GET_TIMING: u64 = 13;
    const KEEP_CAPABILITIES: u64 = 7;
    const GET_SECURITY_BITS: u64 = 27;
    const READ_BOUND: u64 = 23;
    const GET_TSC: u64 = 25;
    const SET_TIMER_SLACK: u64 = 29;
    const GET_TIMER_SLACK: u64 = 30;
    const SET_PTRACER: u64 = 0x5961_6d61;
    const SET_THP_DISABLE: u64 = 41;
    const GET_THP_DISABLE: u64 = 42;
    const SET_MEMORY_MERGE: u64 = 67;
    const GET_MEMORY_MERGE: u64 = 68;
    let thread = current();
    let process = thread.process();
    match option {
        SET_PDEATHSIG if a > 64 => Err(Errno::EINVAL),
        SET_PDEATHSIG => {
            thread.change(|own| own.parent_death_signal = a as u32);
            Ok(0)
        }
        GET_PDEATHSIG => {
            user::write_value(a, thread.private().parent_death_signal)?;
            Ok(0)
        }
        GET_DUMPABLE => Ok(process.dumpable.load(Ordering::Relaxed).into()),
        SET_DUMPABLE if a > 1 => Err(Errno::EINVAL),
        SET_DUMPABLE => {
            process.dumpable.store(a as u32, Ordering::Relaxed);
            Ok(0)
        }
        SET_NAME => {
            let mut name = [0; 16];
            for (nth, byte) in name[..15].iter_mut().enumerate() {
                *byte = user::read_value::<u8>(a + nth as u64)?;
                if *byte == 0 {
                    break;
                }
            }
            thread.change(|own| own.name = name);
            Ok(0)
        }
        GET_NAME => {
            user::write(a, &thread.private().name)?;
            Ok(0)
        }
        SET_NO_NEW_PRIVS if a != 1 || b != 0 || c != 0 || d != 0 => Err(Errno::EINVAL),
        SET_NO_NEW_PRIVS => {
            process.no_new_privileges.store(true, Ordering::Relaxed);
            Ok(0)
        }
        GET_NO_NEW_PRIVS => Ok(process.no_new_privileges.load(Ordering::Relaxed).into()),
        SET_CHILD_SUBREAPER => {
            process.adopts.store(a != 0, Ordering::Relaxed);
            Ok(0)
        }
        GET_CHILD_SUBREAPER => {
            user::write_value(a, u32::from(process.adopts.load(Ordering::Relaxed)))?;
            Ok(0)
        }
        GET_TID_ADDRESS => {
            user::write_value(a, thread.private().clear_child_tid)?;
            Ok(0)
        }
        KEEP_CAPABILITIES | GET_SECURITY_BITS | GET_SECCOMP | GET_TIMING => Ok(0),
        READ_BOUND if a <= 40 => Ok(1),
        SET_TIMER_SLACK => {
            thread.change(|own| own.timer_slack = a);
            Ok(0)
        }
        GET_TIMER_SLACK => Ok(match thread.private().timer_slack {
            0 => 50_000,
            slack => slack,
        }),
        SET_PTRACER => Ok(0),
        GET_TSC => user::write_value(a, 1u32).map(|()| 0),
        SET_MDWE if a & !3 != 0 || a == 2 || b != 0 || c != 0 || d != 0 => Err(Errno::EINVAL),
        SET_MDWE => {
            let now = process.no_new_code.load(Ordering::Relaxed);
            if now != 0 && now as u64 != a {
                return Err(Errno::EPERM);
            }
            process.no_new_code.store(a as u32, Ordering::Relaxed);
            Ok(0)
        }
        GET_MDWE if a != 0 || b != 0 || c != 0 || d != 0 => Err(Errno::EINVAL),
        GET_MDWE => Ok(process.no_new_code.load(Ordering::Relaxed).into()),
        // How huge pages are made is the command line's to say, for all, and nothing looks for equal pages: what is set is what is got.
        SET_THP_DISABLE if b & !2 != 0 || c != 0 || d != 0 || a == 0 && b != 0 => Err(Errno::EINVAL),
        SET_THP_DISABLE => {
            let told = if a != 0 { 1 | b as u32 } else { 0 };
            process.no_huge_pages.store(told, Ordering::Relaxed);
            Ok(0)
        }
        GET_THP_DISABLE if a != 0 || b != 0 || c != 0 || d != 0 => Err(Errno::EINVAL),
        GET_THP_DISABLE => Ok(process.no_huge_pages.load(Ordering::Relaxed).into()),
        SET_MEMORY_MERGE if b != 0 || c != 0 || d != 0 => Err(Errno::EINVAL),
        SET_MEMORY_MERGE => {
            process.merges.store(a != 0, Ordering::Relaxed);
            Ok(0)
        }
        GET_MEMORY_MERGE if a != 0 || b != 0 || c != 0 || d != 0 => Err(Errno::EINVAL),
        GET_MEMORY_MERGE => Ok(process.merges.load(Ordering::Relaxed).into()),
        _ => Err(Errno::EINVAL),
    }
}

/// `membarrier`: by running on each CPU in turn, which none of them gets past without a switch.
pub fn membarrier(command: u64, flags: u64) -> Answer {
    const GLOBAL: u64 = 1;
    const GLOBAL_EXPEDITED: u64 = 1 << 1;
    const REGISTER_GLOBAL_EXPEDITED: u64 = 1 << 2;
    const PRIVATE_EXPEDITED: u64 = 1 << 3;
    const REGISTER_PRIVATE_EXPEDITED: u64 = 1 << 4;
    const PRIVATE_SYNC_CORE: u64 = 1 << 5;
    const REGISTER_PRIVATE_SYNC_CORE: u64 = 1 << 6;
    const ALL: u64 = (1 << 7) - 1;
    if flags != 0 {
        return Err(Errno::EINVAL);
    }
    let thread = current();
    let registered = &thread.process().barriers;
    match command {
        0 => return Ok(ALL),
        REGISTER_GLOBAL_EXPEDITED | REGISTER_PRIVATE_EXPEDITED | REGISTER_PRIVATE_SYNC_CORE => {
            registered.fetch_or(command as u32, Ordering::Relaxed);
            return Ok(0);
        }
        PRIVATE_EXPEDITED | PRIVATE_SYNC_CORE => {
            if registered.load(Ordering::Relaxed) & (command << 1) as u32 == 0 {
                return Err(Errno::EPERM);
            }
        }
        GLOBAL | GLOBAL_EXPEDITED => {}
        _ => return Err(Errno::EINVAL),
    }
    let own = thread.affinity.load(Ordering::Relaxed);
    for cpu in (0..64).filter(|cpu| sched::online() >> cpu & 1 != 0) {
        thread.affinity.store(1 << cpu, Ordering::SeqCst);
        if !sched::may_stay(&thread) {
            sched::schedule();
        }
    }
    thread.affinity.store(own, Ordering::SeqCst);
    Ok(0)
}
