//! `ptrace`, as far as a parent needs it that looks at a child of its own: `PTRACE_TRACEME`, stops at signals and at system calls, memory and
//! registers. There is no attaching to others.
//!
//! # Protocol
//!
//! What a trace is about is in the process ([`Trace`], under its lock). The thread that asked to be traced stops *itself*: where a signal is to be
//! delivered, and around system calls. It says so under the lock, tells its parent, and waits until the state is another one, its process is to end,
//! or nobody traces it any more. From saying so until it has the lock again it touches none of its registers, so whoever holds the lock and sees
//! [`State::Stopped`] may look at them and change them.

use super::process::Process;
use super::signal::{self, Info, SA_NOCLDSTOP, SI_USER, SIGCHLD, SIGKILL};
use super::thread::{CurrentThread, Thread, current};
use super::tree::{Change, Tree, tree};
use crate::arch::TrapFrame;
use crate::errno::Errno;
use crate::syscall::memory_of;
use crate::user;
use core::sync::atomic::Ordering;
use terrane::sync::Shared;

/// Whether a traced thread runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum State {
    #[default]
    Runs,
    /// To its next system call.
    RunsToCall,
    Stopped,
}

/// What is known of a process that is traced.
#[derive(Clone, Copy, Debug, Default)]
pub struct Trace {
    /// The number of the thread that is traced, which asked for it; 0 for none.
    thread: u32,
    state: State,
    options: u32,
    /// Why it stopped.
    info: Info,
    /// The signal that it is to get when it goes on; 0 for none.
    signal: u32,
    /// Where its registers are, while it has stopped.
    frame: usize,
}

const SIGTRAP: u32 = 5;
/// `PTRACE_O_TRACESYSGOOD`, `PTRACE_O_EXITKILL`.
const GOOD: u32 = 1;
const EXIT_KILL: u32 = 1 << 20;

/// Whether a parent is told of every stop of `process`.
pub fn is_traced(process: &Process) -> bool {
    process.trace.lock().thread != 0
}

/// A parent ends: what it traces goes on without, or ends too.
pub fn tracer_ends(parent: u32) {
    let tree = tree();
    for node in tree.processes().iter().filter(|node| node.parent == parent) {
        let before = core::mem::take(&mut *node.process.trace.lock());
        if before.options & EXIT_KILL != 0 && !node.is_zombie() {
            let _ = signal::send_to_process(&tree, &node.process, Info::from_kernel(SIGKILL));
        }
        if before.thread != 0 {
            node.process.trace_changed.wake_all();
        }
    }
}

/// Tells the parent of a stop.
fn announce(tree: &Tree, process: &Process, code: u32) {
    const CLD_TRAPPED: i32 = 4;
    let Some(node) = tree.process(process.id()).filter(|node| !node.is_zombie()) else { return };
    node.change.set(Some(Change::Stopped(code)));
    let Some(parent) = tree.process(node.parent) else { return };
    if parent.process.action(SIGCHLD).flags & SA_NOCLDSTOP == 0 {
        let info = Info::child(CLD_TRAPPED, process.id(), code as i32, (0, 0));
        let _ = signal::send_to_process(tree, &parent.process, info);
    }
    parent.process.children_changed.wake_all();
}

/// By a traced thread: it stops, and the parent learns `code`. The signal that it is to get afterwards, or 0.
fn stop(thread: &CurrentThread, frame: &mut TrapFrame, code: u32, info: Info) -> u32 {
    let process = thread.process();
    {
        let mut trace = process.trace.lock();
        if trace.thread != thread.id() {
            return info.signal;
        }
        trace.state = State::Stopped;
        trace.frame = &raw mut *frame as usize;
        trace.info = info;
        trace.signal = 0;
    }
    announce(&tree(), process, code);
    process
        .trace_changed
        .wait_uninterrupted(|| process.trace.lock().state != State::Stopped || process.ends(thread.id()));
    let mut trace = process.trace.lock();
    if trace.thread == 0 {
        drop(trace);
        thread.change(|own| own.is_traced = false);
        return 0;
    }
    if trace.state == State::Stopped {
        trace.state = State::Runs;
    }
    core::mem::take(&mut trace.signal)
}

/// Before a signal is delivered: the parent may look, and choose another one, or none.
pub fn at_signal(thread: &CurrentThread, frame: &mut TrapFrame, info: Info) -> Option<Info> {
    if info.signal == SIGKILL {
        return Some(info);
    }
    match stop(thread, frame, info.signal, info) {
        0 => None,
        signal if signal == info.signal => Some(info),
        signal => Some(Info::from_process(signal, SI_USER, thread.process().id())),
    }
}

/// Before and after a system call of a traced thread.
pub fn at_call(thread: &CurrentThread, frame: &mut TrapFrame) {
    let code = {
        let trace = thread.process().trace.lock();
        if trace.state != State::RunsToCall || trace.thread != thread.id() {
            return;
        }
        if trace.options & GOOD != 0 { SIGTRAP | 0x80 } else { SIGTRAP }
    };
    let info = Info { signal: SIGTRAP, code: code as i32, ..Info::default() };
    let signal = stop(thread, frame, code, info);
    if signal != 0 && signal != SIGTRAP {
        let info = Info::from_process(signal, SI_USER, thread.process().id());
        let _ = thread.pending.post(info);
    }
}

/// A traced thread has become a new program.
pub fn at_exec(thread: &CurrentThread) {
    let _ = thread.pending.post(Info::from_process(SIGTRAP, SI_USER, thread.process().id()));
}

/// Where the registers are in `struct user_regs_struct`; of those behind the stack's segment, which programs have no use for, nothing is told.
fn register(frame: &mut TrapFrame, word: usize) -> Option<&mut u64> {
    Some(match word {
        0 => &mut frame.r15,
        1 => &mut frame.r14,
        2 => &mut frame.r13,
        3 => &mut frame.r12,
        4 => &mut frame.rbp,
        5 => &mut frame.rbx,
        6 => &mut frame.r11,
        7 => &mut frame.r10,
        8 => &mut frame.r9,
        9 => &mut frame.r8,
        10 => &mut frame.rax,
        11 => &mut frame.rcx,
        12 => &mut frame.rdx,
        13 => &mut frame.rsi,
        14 => &mut frame.rdi,
        15 => &mut frame.orig_rax,
        16 => &mut frame.rip,
        17 => &mut frame.cs,
        18 => &mut frame.rflags,
        19 => &mut frame.rsp,
        20 => &mut frame.ss,
        _ => return None,
    })
}

/// Words of `struct user_regs_struct`, and bytes of `struct user`.
const WORDS: usize = 27;
const USER: u64 = 912;

/// Lets `act` at the registers of the thread that has stopped.
fn with_registers<R>(trace: &mut Trace, act: impl FnOnce(&mut TrapFrame) -> R) -> R {
    // SAFETY: the thread waits in `stop`, to which it lent its registers, and by the protocol nobody but who has the lock, as the caller, touches
    // them before it has had the lock again.
    act(unsafe { &mut *(trace.frame as *mut TrapFrame) })
}

/// The words of the thread's registers.
fn words_of(thread: &Thread, trace: &mut Trace) -> [u64; WORDS] {
    let mut words = [0; WORDS];
    with_registers(trace, |frame| {
        for (place, word) in words.iter_mut().enumerate() {
            *word = register(frame, place).map_or(0, |register| *register);
        }
    });
    words[21] = thread.fs_base.load(Ordering::Relaxed);
    words[22] = thread.gs_base.load(Ordering::Relaxed);
    words
}

/// Sets a word of them; segments stay.
fn set_word(thread: &Thread, trace: &mut Trace, place: usize, word: u64) {
    match place {
        17 | 20 => {}
        21 => thread.fs_base.store(word & (u64::MAX >> 17), Ordering::Relaxed),
        22 => thread.gs_base.store(word & (u64::MAX >> 17), Ordering::Relaxed),
        _ => with_registers(trace, |frame| {
            if let Some(register) = register(frame, place) {
                *register = word;
            }
        }),
    }
}

/// The caller's child with this number that has stopped and is traced.
fn stopped(id: u64) -> Result<(Shared<Process>, Shared<Thread>), Errno> {
    let tree = tree();
    let child = child(&tree, id)?;
    if child.trace.lock().state != State::Stopped {
        return Err(Errno::ESRCH);
    }
    let thread = tree.thread(id as u32).cloned().ok_or(Errno::ESRCH)?;
    Ok((child, thread))
}

fn child(tree: &Tree, id: u64) -> Result<Shared<Process>, Errno> {
    let me = current().process().id();
    let node = tree.process(id as u32).filter(|node| node.parent == me && !node.is_zombie());
    let node = node.filter(|node| node.process.trace.lock().thread == node.process.id());
    node.map(|node| node.process.clone()).ok_or(Errno::ESRCH)
}

/// Lets it go on.
fn go_on(process: &Process, state: Option<State>, signal: u64) -> Result<u64, Errno> {
    if signal > signal::COUNT.into() {
        return Err(Errno::EIO);
    }
    // What was not asked for yet is no news any more.
    if let Some(node) = tree().process(process.id())
        && matches!(node.change.get(), Some(Change::Stopped(_)))
    {
        node.change.set(None);
    }
    let mut trace = process.trace.lock();
    trace.signal = signal as u32;
    match state {
        Some(state) => trace.state = state,
        None => *trace = Trace::default(),
    }
    drop(trace);
    process.trace_changed.wake_all();
    Ok(0)
}

/// `ptrace`.
pub fn ptrace(request: u64, id: u64, addr: u64, data: u64) -> Result<u64, Errno> {
    const TRACE_ME: u64 = 0;
    const PEEK: [u64; 2] = [1, 2];
    const PEEK_USER: u64 = 3;
    const POKE: [u64; 2] = [4, 5];
    const POKE_USER: u64 = 6;
    const CONTINUE: u64 = 7;
    const KILL: u64 = 8;
    const GET_REGISTERS: u64 = 12;
    const SET_REGISTERS: u64 = 13;
    const ATTACH: u64 = 16;
    const DETACH: u64 = 17;
    const TO_CALL: u64 = 24;
    const SET_OPTIONS: u64 = 0x4200;
    const GET_MESSAGE: u64 = 0x4201;
    const GET_INFO: u64 = 0x4202;
    const SEIZE: u64 = 0x4206;
    const OPTIONS: u64 = 0x30_00ff;
    match request {
        TRACE_ME => {
            let thread = current();
            let mut trace = thread.process().trace.lock();
            if trace.thread != 0 {
                return Err(Errno::EPERM);
            }
            *trace = Trace { thread: thread.id(), ..Trace::default() };
            drop(trace);
            thread.change(|own| own.is_traced = true);
            return Ok(0);
        }
        ATTACH | SEIZE => {
            tree().thread(id as u32).ok_or(Errno::ESRCH)?;
            return Err(Errno::EPERM);
        }
        KILL => {
            let process = child(&tree(), id)?;
            let _ =
                signal::send_to(process.id(), Info::from_process(SIGKILL, SI_USER, current().process().id()));
            return Ok(0);
        }
        _ => {}
    }
    let (process, thread) = stopped(id)?;
    // The lock keeps it where it is.
    let steady =
        || Some(process.trace.lock()).filter(|trace| trace.state == State::Stopped).ok_or(Errno::ESRCH);
    let space = || process.space().ok_or(Errno::ESRCH);
    match request {
        request if PEEK.contains(&request) => {
            let mut word = [0; 8];
            if memory_of(&space()?, addr, &mut word, false)? < 8 {
                return Err(Errno::EIO);
            }
            user::write(data, &word)?;
        }
        request if POKE.contains(&request) => {
            if memory_of(&space()?, addr, &mut data.to_ne_bytes(), true)? < 8 {
                return Err(Errno::EIO);
            }
        }
        PEEK_USER | POKE_USER if !addr.is_multiple_of(8) || addr >= USER => return Err(Errno::EIO),
        PEEK_USER => {
            let words = steady().map(|mut trace| words_of(&thread, &mut trace))?;
            user::write_value(data, words.get(addr as usize / 8).copied().unwrap_or(0))?;
        }
        POKE_USER => {
            set_word(&thread, &mut *steady()?, addr as usize / 8, data);
        }
        GET_REGISTERS => {
            let words = steady().map(|mut trace| words_of(&thread, &mut trace))?;
            user::write_value(data, words)?;
        }
        SET_REGISTERS => {
            let words = user::read_value::<[u64; WORDS]>(data)?;
            let mut trace = steady()?;
            for (place, &word) in words.iter().enumerate() {
                set_word(&thread, &mut trace, place, word);
            }
        }
        SET_OPTIONS if data & !OPTIONS != 0 => return Err(Errno::EINVAL),
        SET_OPTIONS => process.trace.lock().options = data as u32,
        GET_MESSAGE => user::write_value(data, 0u64)?,
        GET_INFO => {
            let info = process.trace.lock().info;
            user::write(data, &[0; 128])?;
            user::write_value(data, [info.signal, 0, info.code as u32, 0])?;
            user::write_value(data + 16, info.words)?;
        }
        CONTINUE => return go_on(&process, Some(State::Runs), data),
        TO_CALL => return go_on(&process, Some(State::RunsToCall), data),
        DETACH => return go_on(&process, None, data),
        _ => return Err(Errno::EIO),
    }
    Ok(0)
}
