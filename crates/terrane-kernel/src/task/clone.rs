//! Starting threads and processes: `clone`, `clone3`, `fork`, `vfork`.

use core::cell::Cell;
use core::sync::atomic::Ordering;

use terrane::sync::Shared;

use super::process::Process;
use super::sched;
use super::signal::{Actions, AlternateStack, SIGCHLD};
use super::thread::{Private, Thread, current};
use super::tree::{self, Node, tree};
use super::vfork::Vfork;
use crate::arch::{self, TrapFrame, interrupts};
use crate::errno::Errno;
use crate::mm;
use crate::user;

const CSIGNAL: u64 = 0xff;
const VM: u64 = 0x100;
const FS: u64 = 0x200;
const FILES: u64 = 0x400;
const SIGHAND: u64 = 0x800;
const VFORK: u64 = 0x4000;
const PARENT: u64 = 0x8000;
const THREAD: u64 = 0x1_0000;
const SYSVSEM: u64 = 0x4_0000;
const SETTLS: u64 = 0x8_0000;
const PARENT_SETTID: u64 = 0x10_0000;
const CHILD_CLEARTID: u64 = 0x20_0000;
const DETACHED: u64 = 0x40_0000;
const UNTRACED: u64 = 0x80_0000;
const CHILD_SETTID: u64 = 0x100_0000;
const IO: u64 = 0x8000_0000;
const CLEAR_SIGHAND: u64 = 0x1_0000_0000;
const KNOWN: u64 = VM
    | FS
    | FILES
    | SIGHAND
    | VFORK
    | PARENT
    | THREAD
    | SYSVSEM
    | SETTLS
    | PARENT_SETTID
    | CHILD_CLEARTID
    | DETACHED
    | UNTRACED
    | CHILD_SETTID
    | IO
    | CLEAR_SIGHAND;

/// What is to be started.
#[derive(Clone, Copy, Default)]
struct Request {
    flags: u64,
    /// 0 for the parent's.
    stack: u64,
    parent_tid: u64,
    child_tid: u64,
    tls: u64,
    exit_signal: u32,
}

/// `fork`.
pub fn fork(frame: &TrapFrame) -> Result<u64, Errno> {
    start(frame, Request { exit_signal: SIGCHLD, ..Request::default() })
}

/// `vfork`.
pub fn vfork(frame: &TrapFrame) -> Result<u64, Errno> {
    start(frame, Request { flags: VM | VFORK, exit_signal: SIGCHLD, ..Request::default() })
}

/// `clone`.
pub fn clone(frame: &TrapFrame, args: [u64; 6]) -> Result<u64, Errno> {
    let [flags, stack, parent_tid, child_tid, tls, _] = args;
    // 32 bits here; what is above came with `clone3`.
    let flags = flags & 0xffff_ffff;
    let exit_signal = (flags & CSIGNAL) as u32;
    start(frame, Request { flags: flags & !CSIGNAL, stack, parent_tid, child_tid, tls, exit_signal })
}

/// `clone3`.
pub fn clone3(frame: &TrapFrame, at: u64, size: u64) -> Result<u64, Errno> {
    const LEAST: usize = 64;
    const WORDS: usize = 11;
    let size = size as usize;
    if size < LEAST {
        return Err(Errno::EINVAL);
    }
    if size > 4096 {
        return Err(Errno::E2BIG);
    }
    let mut bytes = [0u8; 8 * WORDS];
    let known = size.min(bytes.len());
    user::read(&mut bytes[..known], at)?;
    for offset in known..size {
        if user::read_value::<u8>(at + offset as u64)? != 0 {
            return Err(Errno::E2BIG);
        }
    }
    let mut words = [0u64; WORDS];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_ne_bytes(bytes.try_into().map_err(|_| Errno::EINVAL)?);
    }
    let [
        flags,
        _pidfd,
        child_tid,
        parent_tid,
        exit_signal,
        stack,
        stack_size,
        tls,
        set_tid,
        set_tid_size,
        _cgroup,
    ] = words;
    if set_tid != 0 || set_tid_size != 0 || exit_signal > 64 || flags & (CSIGNAL | DETACHED) != 0 {
        return Err(Errno::EINVAL);
    }
    if (stack == 0) != (stack_size == 0) || flags & (THREAD | PARENT) != 0 && exit_signal != 0 {
        return Err(Errno::EINVAL);
    }
    let stack = stack.wrapping_add(stack_size);
    start(frame, Request { flags, stack, parent_tid, child_tid, tls, exit_signal: exit_signal as u32 })
}

fn check(flags: u64) -> Result<(), Errno> {
    let has = |flag: u64| flags & flag != 0;
    let contradicts = has(THREAD) && !has(SIGHAND)
        || has(SIGHAND) && !has(VM)
        || has(SIGHAND) && has(CLEAR_SIGHAND)
        || flags & !KNOWN != 0;
    if contradicts { Err(Errno::EINVAL) } else { Ok(()) }
}

fn start(frame: &TrapFrame, request: Request) -> Result<u64, Errno> {
    let flags = request.flags;
    check(flags)?;
    tree::collect();
    let has = |flag: u64| flags & flag != 0;
    let me = current();
    let parent = me.process();
    let id = {
        let mut tree = tree();
        tree.reserve()?;
        tree.new_id()?
    };
    let vfork = if has(VFORK) { Some(Shared::try_new(Vfork::new())?) } else { None };
    // SAFETY: it is the current thread.
    let fpu = unsafe {
        me.with_fpu(|fpu| {
            fpu.save();
            fpu.try_clone()
        })
    }?;
    let files = if has(FILES) { me.files().clone() } else { Shared::try_new(me.files().fork()?)? };
    let cwd = if has(FS) { me.cwd().clone() } else { Shared::try_new(me.cwd().fork()?)? };
    let space =
        if has(VM) { me.space().clone() } else { mm::with_cpu(|cpu| mm::fork_space(cpu, me.space()))? };
    let process = if has(THREAD) {
        parent.clone()
    } else {
        let actions = match () {
            () if has(SIGHAND) => parent.actions(),
            () if has(CLEAR_SIGHAND) => {
                let actions = parent.actions().copy();
                actions.reset();
                Shared::try_new(actions)?
            }
            () => Shared::try_new(parent.actions().copy())?,
        };
        let process = Process::try_new(id, Some(space.clone()), actions, *parent.limits.lock())?;
        process.exit_signal.store(request.exit_signal, Ordering::Relaxed);
        process.inherit(parent)?;
        process
    };
    let own = me.private();
    let keeps_stack = !has(VM) || has(VFORK);
    let private = Private {
        space: Some(space),
        files: Some(files),
        cwd: Some(cwd),
        clear_child_tid: if has(CHILD_CLEARTID) { request.child_tid } else { 0 },
        set_child_tid: if has(CHILD_SETTID) { request.child_tid } else { 0 },
        rseq: if has(VM) { None } else { own.rseq },
        alternate_stack: if keeps_stack { own.alternate_stack } else { AlternateStack::default() },
        vfork: vfork.clone(),
        name: own.name,
        ..Private::default()
    };
    let thread = Thread::try_new(id, process.clone(), private, fpu, begin)?;
    let mut registers = frame.clone();
    registers.rax = 0;
    if request.stack != 0 {
        registers.rsp = request.stack;
    }
    // SAFETY: the thread does not run yet, so the top of its stack is ours.
    unsafe { thread.user_frame().write(registers) };
    thread.scheduling.store(me.scheduling.load(Ordering::Relaxed), Ordering::Relaxed);
    thread.affinity.store(me.affinity.load(Ordering::Relaxed), Ordering::Relaxed);
    let fs_base = if has(SETTLS) { request.tls } else { me.fs_base.load(Ordering::Relaxed) };
    thread.fs_base.store(fs_base, Ordering::Relaxed);
    thread.gs_base.store(me.gs_base.load(Ordering::Relaxed), Ordering::Relaxed);
    thread.set_mask(me.mask());
    thread.rseq_stale.store(true, Ordering::Relaxed);
    if has(PARENT_SETTID) {
        // As in Linux: what cannot be written is not said.
        let _ = user::write_value(request.parent_tid, id);
    }
    {
        let mut tree = tree();
        tree.reserve()?;
        if parent.exit_status().is_some() || parent.execs.load(Ordering::SeqCst) != 0 && has(THREAD) {
            return Err(Errno::EINTR);
        }
        if !has(THREAD) {
            let (mut group, mut session, mut grandparent) = (0, 0, super::children::NOBODY);
            if let Some(node) = tree.process(parent.id()) {
                (group, session, grandparent) = (node.group, node.session, node.parent);
            }
            let parent = if has(PARENT) { grandparent } else { parent.id() };
            tree.add_process(Node {
                process: process.clone(),
                parent,
                group,
                session,
                change: Cell::new(None),
            });
        }
        tree.add_thread(thread.clone());
    }
    sched::start(&thread);
    drop(thread);
    if let Some(vfork) = vfork {
        vfork.wait(|| me.waiting_signals().has(super::signal::SIGKILL) || parent.ends(me.id()));
    }
    Ok(id.into())
}

/// Where a new thread begins in the kernel.
pub extern "C" fn begin(_: usize) -> ! {
    sched::finish();
    interrupts::enable();
    let thread = current();
    let at = thread.private().set_child_tid;
    if at != 0 {
        let _ = user::write_value(at, thread.id());
    }
    let frame = thread.user_frame();
    // SAFETY: this thread's registers, which whoever started it has put there; nobody else uses them.
    unsafe {
        super::signal::before_user(&mut *frame);
        arch::enter_user(&*frame)
    }
}

/// The number of the first process.
pub const FIRST: u32 = super::children::NOBODY + 1;

/// The first thread of the first process: it has no space until it has been given a program.
///
/// # Errors
/// `ENOMEM`.
pub fn first(
    files: Shared<crate::fs::Files>,
    cwd: Shared<crate::fs::Cwd>,
    entry: extern "C" fn(usize) -> !,
) -> Result<Shared<Thread>, Errno> {
    let id = {
        let mut tree = tree();
        tree.reserve()?;
        tree.new_id()?
    };
    let actions = Shared::try_new(Actions::new())?;
    let process = Process::try_new(id, None, actions, super::process::default_limits())?;
    let private = Private { files: Some(files), cwd: Some(cwd), ..Private::default() };
    let thread = Thread::try_new(id, process.clone(), private, arch::FpuState::try_new()?, entry)?;
    let mut tree = tree();
    let parent = super::children::NOBODY;
    tree.add_process(Node { process, parent, group: id, session: id, change: Cell::new(None) });
    tree.add_thread(thread.clone());
    Ok(thread)
}
