//! Signals: sending them, and what waits.
//!
//! | module | what |
//! |---|---|
//! | `pending` | signals that wait for a thread or a process |
//! | `deliver` | what happens to them on the way back to user mode |
//! | `frame` | what a handler finds on its stack, as on Linux |
//! | `calls` | the system calls |
//!
//! # Sending against waiting
//!
//! Who sends puts the signal in, then wakes the threads that it may concern ([`super::sched::wake`]) or interrupts the CPU that runs them. A thread looks at what
//! waits for it after it has said that it is about to sleep, and with interrupts off before it returns to user mode; an interrupt that is sent
//! in between comes when it is back there, and brings it into the kernel again. So a signal is not overlooked.
//!
//! Which thread takes a signal of the process is decided by who comes first: each takes it under the lock of what waits. A thread whose mask is about to let the
//! signal in will look too, for it returns to user mode after that.

mod calls;
mod deliver;
mod frame;
mod pending;

pub use calls::*;
pub use deliver::{before_user, force};
pub use frame::minimum_stack;
pub use pending::Pending;

use super::process::{Exit, Process};
use super::sched;
use super::thread::Thread;
use super::tree::{Tree, tree};
use crate::errno::Errno;
use crate::task::lock::Lock;
use core::sync::atomic::Ordering;

pub const SIGILL: u32 = 4;
pub const SIGTRAP: u32 = 5;
pub const SIGBUS: u32 = 7;
pub const SIGFPE: u32 = 8;
pub const SIGKILL: u32 = 9;
pub const SIGSEGV: u32 = 11;
pub const SIGALRM: u32 = 14;
pub const SIGCHLD: u32 = 17;
pub const SIGCONT: u32 = 18;
pub const SIGSTOP: u32 = 19;
pub const SIGTSTP: u32 = 20;
pub const SIGTTIN: u32 = 21;
pub const SIGTTOU: u32 = 22;
pub const SIGURG: u32 = 23;
pub const SIGVTALRM: u32 = 26;
pub const SIGPROF: u32 = 27;
pub const SIGWINCH: u32 = 28;
/// Signals are 1 to this.
pub const COUNT: u32 = 64;
/// The first that queue.
pub const REAL_TIME: u32 = 32;

/// `si_code`s.
pub const SI_USER: i32 = 0;
pub const SI_KERNEL: i32 = 0x80;
pub const SI_TIMER: i32 = -2;
pub const SI_TKILL: i32 = -6;

/// `sa_handler`s that are none.
pub const DEFAULT: u64 = 0;
pub const IGNORE: u64 = 1;

pub const SA_NOCLDSTOP: u64 = 1;
pub const SA_NOCLDWAIT: u64 = 2;
pub const SA_RESTORER: u64 = 0x0400_0000;
pub const SA_ONSTACK: u64 = 0x0800_0000;
pub const SA_RESTART: u64 = 0x1000_0000;
pub const SA_NODEFER: u64 = 0x4000_0000;
pub const SA_RESETHAND: u64 = 0x8000_0000;

/// A set of signals: bit 0 is signal 1.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Set(pub u64);

impl Set {
    /// Those that cannot be kept away.
    pub const ALWAYS: Set = Set::of(SIGKILL).with(SIGSTOP);
    /// Those that stop a process.
    pub const STOPS: Set = Set::of(SIGSTOP).with(SIGTSTP).with(SIGTTIN).with(SIGTTOU);
    /// Those whose default is nothing.
    pub const HARMLESS: Set = Set::of(SIGCHLD).with(SIGURG).with(SIGWINCH).with(SIGCONT);
    /// Those that an instruction causes: they come before others.
    pub const SYNCHRONOUS: Set = Set::of(SIGSEGV).with(SIGBUS).with(SIGILL).with(SIGTRAP).with(SIGFPE);

    /// One signal.
    pub const fn of(signal: u32) -> Set {
        Set(1 << (signal - 1))
    }

    /// With one more.
    pub const fn with(self, signal: u32) -> Set {
        Set(self.0 | Set::of(signal).0)
    }

    /// Whether `signal` is in it.
    pub const fn has(self, signal: u32) -> bool {
        self.0 & Set::of(signal).0 != 0
    }
}

/// What a handler is told: `siginfo_t` without its padding.
#[derive(Clone, Copy, Debug, Default)]
pub struct Info {
    pub signal: u32,
    pub errno: i32,
    pub code: i32,
    /// Bytes 16 to 48.
    pub words: [u64; 4],
}

impl Info {
    /// From a process: `kill`.
    pub fn from_process(signal: u32, code: i32, process: u32) -> Self {
        Self { signal, code, words: [u64::from(process), 0, 0, 0], ..Self::default() }
    }

    /// From the kernel, for no particular reason.
    pub fn from_kernel(signal: u32) -> Self {
        Self { signal, code: SI_KERNEL, ..Self::default() }
    }

    /// By an instruction that touched `addr`.
    pub fn fault(signal: u32, code: i32, addr: u64) -> Self {
        Self { signal, code, words: [addr, 0, 0, 0], ..Self::default() }
    }

    /// About a child.
    pub fn child(code: i32, process: u32, status: i32, times: (u64, u64)) -> Self {
        Self {
            signal: SIGCHLD,
            code,
            words: [u64::from(process), u64::from(status as u32), times.0, times.1],
            ..Self::default()
        }
    }
}

/// What a process does about a signal: `struct sigaction` as the system call has it.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Action {
    pub handler: u64,
    pub flags: u64,
    pub restorer: u64,
    pub mask: u64,
}

/// What processes that share handlers do about each signal.
pub struct Actions(Lock<[Action; COUNT as usize]>);

impl Actions {
    /// The default for all.
    pub const fn new() -> Self {
        Self(Lock::new([Action { handler: DEFAULT, flags: 0, restorer: 0, mask: 0 }; COUNT as usize]))
    }

    /// A copy for a process of its own.
    pub fn copy(&self) -> Self {
        Self(Lock::new(*self.0.lock()))
    }

    /// What is done about `signal`.
    pub fn get(&self, signal: u32) -> Action {
        self.0.lock()[signal as usize - 1]
    }

    /// Changes it; returns what it was.
    pub fn set(&self, signal: u32, action: Action) -> Action {
        core::mem::replace(&mut self.0.lock()[signal as usize - 1], action)
    }

    /// For a new program: handlers are gone, what was ignored stays ignored.
    pub fn reset(&self) {
        for action in self.0.lock().iter_mut() {
            let handler = if action.handler == IGNORE { IGNORE } else { DEFAULT };
            *action = Action { handler, ..Action::default() };
        }
    }

    /// The signals that are caught, or ignored: for `/proc`.
    pub fn sets(&self) -> (Set, Set) {
        let (mut ignored, mut caught) = (Set(0), Set(0));
        for (action, signal) in self.0.lock().iter().zip(1..) {
            match action.handler {
                DEFAULT => {}
                IGNORE => ignored = ignored.with(signal),
                _ => caught = caught.with(signal),
            }
        }
        (ignored, caught)
    }
}

/// `sigaltstack`: where handlers run that ask for it.
#[derive(Clone, Copy, Debug, Default)]
pub struct AlternateStack {
    pub base: u64,
    pub size: u64,
    pub flags: u32,
}

/// Sends to a process. Under the tree's lock, so that its threads stay.
///
/// # Errors
/// [`Errno::EAGAIN`] when a signal that queues cannot.
pub fn send_to_process(tree: &Tree, process: &Process, info: Info) -> Result<(), Errno> {
    let signal = info.signal;
    if !prepare(tree, process, signal, None) {
        return Ok(());
    }
    process.pending.post(info)?;
    if signal == SIGKILL {
        // Decided as it is sent: no thread gets to end the process in another way before one of them has looked.
        process.begin_exit(Exit::Signal(SIGKILL));
    }
    let mut told = false;
    // All are told of what ends the process; of others one that wants it, and where none does nobody.
    for thread in tree.threads_of(process) {
        if signal == SIGKILL || !told && thread.wants(signal) {
            tell(thread);
            told = true;
        }
    }
    Ok(())
}

/// Sends to one thread.
///
/// # Errors
/// As [`send_to_process`].
pub fn send_to_thread(tree: &Tree, thread: &Thread, info: Info) -> Result<(), Errno> {
    if info.signal == SIGKILL {
        return send_to_process(tree, thread.process(), info);
    }
    if !prepare(tree, thread.process(), info.signal, Some(thread)) {
        return Ok(());
    }
    thread.pending.post(info)?;
    if thread.wants(info.signal) {
        tell(thread);
    }
    Ok(())
}

/// Lets the thread look at its signals.
pub fn tell(thread: &Thread) {
    if !sched::wake(thread) {
        sched::interrupt(thread);
    }
}

/// What a signal does as it is sent; false when it is not to be kept.
fn prepare(tree: &Tree, process: &Process, signal: u32, thread: Option<&Thread>) -> bool {
    let forget = |set: Set| {
        process.pending.forget(set);
        for thread in tree.threads_of(process) {
            thread.pending.forget(set);
        }
    };
    if signal == SIGCONT {
        forget(Set::STOPS);
        super::stop::go_on(tree, process);
    } else if Set::STOPS.has(signal) {
        forget(Set::of(SIGCONT));
    } else if signal == SIGKILL {
        process.stopped.store(false, Ordering::SeqCst);
        process.going_on.wake_all();
        process.trace_changed.wake_all();
    }
    let mut masks = tree.threads_of(process).map(Thread::mask);
    let blocked = match thread {
        Some(thread) => thread.mask().has(signal),
        None => masks.next().is_some_and(|mask| mask.has(signal)),
    };
    blocked || !is_ignored(&process.actions().get(signal), signal) || super::trace::is_traced(process)
}

/// Whether nothing at all is done about `signal`.
pub fn is_ignored(action: &Action, signal: u32) -> bool {
    action.handler == IGNORE || action.handler == DEFAULT && Set::HARMLESS.has(signal)
}

/// Sends `info` to the process with this number.
///
/// # Errors
/// [`Errno::ESRCH`]; as [`send_to_process`].
pub fn send_to(process: u32, info: Info) -> Result<(), Errno> {
    let tree = tree();
    let node = tree.process(process).ok_or(Errno::ESRCH)?;
    if node.is_zombie() { Ok(()) } else { send_to_process(&tree, &node.process, info) }
}
