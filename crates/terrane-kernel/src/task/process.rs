//! A process: what threads have in common.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use alloc::sync::Arc;
use terrane::sync::Shared;

use super::lock::Lock;
use super::signal::{Action, Actions, Pending};
use super::timers::Timers;
use super::trace::Trace;
use super::wait::Queue;
use crate::errno::Errno;
use crate::mm::Space;

/// Resources with a limit (`RLIMIT_…`).
pub const LIMITS: usize = 16;
pub const RLIMIT_DATA: usize = 2;
pub const RLIMIT_STACK: usize = 3;
pub const RLIMIT_NPROC: usize = 6;
pub const RLIMIT_NOFILE: usize = 7;
pub const RLIMIT_MEMLOCK: usize = 8;
pub const RLIMIT_AS: usize = 9;
/// No limit.
pub const INFINITY: u64 = u64::MAX;

/// The limits that a first process has, as on Linux.
pub fn default_limits() -> [(u64, u64); LIMITS] {
    let mut limits = [(INFINITY, INFINITY); LIMITS];
    limits[RLIMIT_STACK].0 = 8 << 20;
    limits[4].0 = 0; // core
    limits[RLIMIT_NPROC] = (0x7fff, 0x7fff);
    limits[RLIMIT_NOFILE] = (1024, 4096);
    limits[RLIMIT_MEMLOCK] = (8 << 20, 8 << 20);
    limits[11] = (0x7fff, 0x7fff); // pending signals
    limits[12] = (819_200, 819_200); // message queues
    limits[13] = (0, 0); // nice
    limits[14] = (0, 0); // real-time priority
    limits
}

/// How a process has ended, or is to end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exit {
    /// `exit(code)`.
    Code(u8),
    /// Killed by this signal.
    Signal(u32),
}

impl Exit {
    /// The status that `wait4` gives.
    pub fn status(self) -> u32 {
        match self {
            Exit::Code(code) => u32::from(code) << 8,
            Exit::Signal(signal) => signal,
        }
    }
}

/// Times and faults of threads that have ended, and the same of children that have.
#[derive(Clone, Copy, Default, Debug)]
pub struct Usage {
    /// In ns.
    pub time: u64,
    /// Of that in the kernel.
    pub in_kernel: u64,
    pub faults: u64,
    pub voluntary: u64,
    pub preempted: u64,
    /// The most that was in memory, in bytes.
    pub resident: u64,
}

impl Usage {
    /// Adds up.
    pub fn add(&mut self, other: &Usage) {
        self.time += other.time;
        self.in_kernel += other.in_kernel;
        self.faults += other.faults;
        self.voluntary += other.voluntary;
        self.preempted += other.preempted;
        self.resident = self.resident.max(other.resident);
    }
}

/// A process.
pub struct Process {
    id: u32,
    actions: Lock<Shared<Actions>>,
    /// Signals for any of its threads.
    pub pending: Pending,
    /// Its address space; `None` once its last thread has ended. Threads have references of their own.
    space: Lock<Option<Arc<Space>>>,
    pub limits: Lock<[(u64, u64); LIMITS]>,
    /// Those wait here who wait for children of this process.
    pub children_changed: Queue,
    /// Those wait here who wait for its threads to end.
    pub threads_changed: Queue,
    /// How it is to end: 0 until that is decided, then 1 << 32 and a status.
    exit: AtomicU64,
    /// The thread that makes this process a new program, while the others are to end; 0 for none.
    pub execs: AtomicU32,
    /// Threads that have not ended.
    pub threads: AtomicU32,
    /// Its threads are to stop on their way to user mode.
    pub stopped: AtomicBool,
    /// It goes on, and its parent has not been told.
    pub continued: AtomicBool,
    /// Stopped threads wait here.
    pub going_on: Queue,
    /// `ptrace`; who is traced waits at `trace_changed`.
    pub trace: Lock<Trace>,
    pub trace_changed: Queue,
    /// What the parent is sent when it ends; 0 for nothing.
    pub exit_signal: AtomicU32,
    /// Of threads that have ended, and of children that were waited for.
    pub ended: Lock<Usage>,
    pub children: Lock<Usage>,
    pub timers: Timers,
    /// When it began, in ns.
    pub began: u64,
    /// `personality`.
    pub personality: AtomicU32,
    /// `PR_SET_CHILD_SUBREAPER`: orphans beneath it are its children.
    pub adopts: AtomicBool,
    /// `PR_SET_DUMPABLE`, `PR_SET_NO_NEW_PRIVS`: what is set is what is got.
    pub dumpable: AtomicU32,
    pub no_new_privileges: AtomicBool,
    /// `PR_SET_MDWE`: memory is not to become executable that was not so when it was mapped.
    pub no_new_code: AtomicU32,
    /// `PR_SET_THP_DISABLE`, `PR_SET_MEMORY_MERGE`: what is set is what is got.
    pub no_huge_pages: AtomicU32,
    pub merges: AtomicBool,
    /// It may use `MEMBARRIER_CMD_PRIVATE_EXPEDITED`…: those that it has registered for.
    pub barriers: AtomicU32,
    /// `execve` has been here since it was forked (`setpgid` of a child looks).
    pub has_execed: AtomicBool,
    /// Real, effective and saved ids of user and group.
    pub ids: Lock<[[u32; 3]; 2]>,
    /// The path of its program.
    pub program: Lock<Option<Shared<alloc::vec::Vec<u8>>>>,
    /// The arguments it was started with, each ended by NUL.
    pub arguments: Lock<Option<Shared<alloc::vec::Vec<u8>>>>,
}

impl Process {
    /// A process that has no thread yet.
    ///
    /// # Errors
    /// [`Errno::ENOMEM`].
    pub fn try_new(
        id: u32,
        space: Option<Arc<Space>>,
        actions: Shared<Actions>,
        limits: [(u64, u64); LIMITS],
    ) -> Result<Shared<Self>, Errno> {
        Ok(Shared::try_new(Self {
            id,
            actions: Lock::new(actions),
            pending: Pending::new(),
            space: Lock::new(space),
            limits: Lock::new(limits),
            children_changed: Queue::new(),
            threads_changed: Queue::new(),
            exit: AtomicU64::new(0),
            execs: AtomicU32::new(0),
            threads: AtomicU32::new(0),
            stopped: AtomicBool::new(false),
            continued: AtomicBool::new(false),
            going_on: Queue::new(),
            trace: Lock::new(Trace::default()),
            trace_changed: Queue::new(),
            exit_signal: AtomicU32::new(0),
            ended: Lock::new(Usage::default()),
            children: Lock::new(Usage::default()),
            timers: Timers::new(),
            began: crate::arch::now(),
            personality: AtomicU32::new(0),
            adopts: AtomicBool::new(false),
            dumpable: AtomicU32::new(1),
            no_new_privileges: AtomicBool::new(false),
            no_new_code: AtomicU32::new(0),
            no_huge_pages: AtomicU32::new(0),
            merges: AtomicBool::new(false),
            barriers: AtomicU32::new(0),
            has_execed: AtomicBool::new(false),
            ids: Lock::new([[0; 3]; 2]),
            program: Lock::new(None),
            arguments: Lock::new(None),
        })?)
    }

    /// Its number (`getpid`).
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Takes from its parent what a child has from there, beyond what it was made with.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn inherit(&self, parent: &Process) -> Result<(), Errno> {
        let personality = parent.personality.load(Ordering::Relaxed);
        self.personality.store(personality, Ordering::Relaxed);
        let locked = parent.no_new_privileges.load(Ordering::Relaxed);
        self.no_new_privileges.store(locked, Ordering::Relaxed);
        let code = parent.no_new_code.load(Ordering::Relaxed);
        // The second bit: not for children.
        self.no_new_code.store(if code & 2 != 0 { 0 } else { code }, Ordering::Relaxed);
        self.no_huge_pages.store(parent.no_huge_pages.load(Ordering::Relaxed), Ordering::Relaxed);
        self.merges.store(parent.merges.load(Ordering::Relaxed), Ordering::Relaxed);
        self.barriers.store(parent.barriers.load(Ordering::Relaxed), Ordering::Relaxed);
        *self.ids.lock() = *parent.ids.lock();
        *self.program.lock() = parent.program.lock().clone();
        *self.arguments.lock() = parent.arguments.lock().clone();
        Ok(())
    }

    /// Real, effective and saved user id.
    pub fn user_ids(&self) -> [u32; 3] {
        self.ids.lock()[0]
    }

    /// Real, effective and saved group id.
    pub fn group_ids(&self) -> [u32; 3] {
        self.ids.lock()[1]
    }

    /// It runs as root.
    pub fn is_privileged(&self) -> bool {
        self.user_ids()[1] == 0
    }

    /// Whether thread `id` of it is to end: all are to, or another makes the process a new program.
    pub fn ends(&self, id: u32) -> bool {
        let execs = self.execs.load(Ordering::SeqCst);
        self.exit.load(Ordering::SeqCst) != 0 || execs != 0 && execs != id
    }

    /// What it does about signals.
    pub fn actions(&self) -> Shared<Actions> {
        self.actions.lock().clone()
    }

    /// What it does about `signal`.
    pub fn action(&self, signal: u32) -> Action {
        self.actions().get(signal)
    }

    /// Gives it handlers of its own, for a new program.
    pub fn set_actions(&self, actions: Shared<Actions>) {
        let old = core::mem::replace(&mut *self.actions.lock(), actions);
        drop(old);
    }

    /// Its address space.
    pub fn space(&self) -> Option<Arc<Space>> {
        self.space.lock().clone()
    }

    /// Gives it another; returns the one before, which the caller drops where it may block.
    pub fn set_space(&self, space: Option<Arc<Space>>) -> Option<Arc<Space>> {
        core::mem::replace(&mut *self.space.lock(), space)
    }

    /// A limit in force.
    pub fn limit(&self, resource: usize) -> u64 {
        self.limits.lock()[resource].0
    }

    /// Decides how it ends; the first decision holds. True for that one.
    pub fn begin_exit(&self, exit: Exit) -> bool {
        let word = 1 << 32 | u64::from(exit.status());
        self.exit.compare_exchange(0, word, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// The status with which it is to end, when that is decided.
    pub fn exit_status(&self) -> Option<u32> {
        let word = self.exit.load(Ordering::SeqCst);
        (word != 0).then_some(word as u32)
    }
}
