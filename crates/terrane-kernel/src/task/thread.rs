//! A thread: what is scheduled.
//!
//! The [tree](super::tree) owns a thread from its start until it has ended and left its CPU for good; then it is freed by the next that starts,
//! ends or waits ([`super::tree::collect`]). So whoever holds the tree's lock, or finds a thread in a run queue or wait queue under that
//! queue's lock, has it alive.

use alloc::sync::Arc;
use core::cell::UnsafeCell;
use core::marker::PhantomData;
use core::ops::Deref;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use terrane::sync::Shared;

use super::list::{Link, Linked};
use super::own::Own;
use super::process::{Process, Usage};
use super::sched;
use super::signal::{self, Pending, Set};
use super::vfork::Vfork;
use crate::arch;
use crate::errno::Errno;
use crate::fs;
use crate::mm::{self, Space};

/// A thread of a program.
#[repr(C)]
pub struct Thread {
    link: Link,
    /// Its number (`gettid`). Changed by `execve` alone, which makes its caller the leader.
    id: AtomicU32,
    process: Shared<Process>,

    /// See [`sched`].
    pub state: AtomicU32,
    /// A CPU uses its stack.
    pub on_cpu: AtomicBool,
    /// Where it runs or ran last.
    pub cpu: AtomicU32,
    /// What `sched_setscheduler` has set: the policy, the priority in the next byte, the nice value in the third. What is set is what is got:
    /// all threads are scheduled alike.
    pub scheduling: AtomicU32,
    /// CPUs on which it may run: a mask.
    pub affinity: AtomicU64,
    /// Its time for the scheduler, in ns.
    pub virtual_time: AtomicU64,
    /// How long it has run, in ns, up to `charged_at`.
    ran: AtomicU64,
    charged_at: AtomicU64,
    /// Of `ran`, what the timer found it in the kernel for.
    in_kernel: AtomicU64,
    /// How often it gave its CPU up, by itself and not.
    pub voluntary: AtomicU64,
    pub preempted: AtomicU64,
    /// Page faults that it had.
    pub faults: AtomicU64,

    /// Saved while it does not run; the scheduler's.
    pub context: SwitchContext,
    stack: arch::KernelStack,
    fpu: Own<arch::FpuState>,
    pub fs_base: AtomicU64,
    pub gs_base: AtomicU64,
    /// It has moved to another CPU, or lost its CPU: `rseq` is to be told.
    pub rseq_stale: AtomicBool,

    /// Signals for this thread alone.
    pub pending: Pending,
    /// Signals that it does not want now. Changed by itself.
    mask: AtomicU64,
    /// Signals that it waits for although it does not want them (`sigtimedwait`).
    pub awaited: AtomicU64,
    /// What it keeps for itself.
    pub own: Own<Private>,
}

/// Where a thread goes on when it is switched to.
pub struct SwitchContext(UnsafeCell<arch::Context>);

// SAFETY: written by the CPU that leaves it, read by the CPU that resumes it, which are ordered by `on_cpu` and the run queues.
unsafe impl Sync for SwitchContext {}

impl SwitchContext {
    /// For the switch alone.
    pub fn get(&self) -> *mut arch::Context {
        self.0.get()
    }
}

/// What only the thread itself uses.
#[derive(Default)]
pub struct Private {
    /// `None` once it ends.
    pub space: Option<Arc<Space>>,
    pub files: Option<Shared<fs::Files>>,
    pub cwd: Option<Shared<fs::Cwd>>,
    /// `set_tid_address`, `CLONE_CHILD_CLEARTID`.
    pub clear_child_tid: u64,
    /// `CLONE_CHILD_SETTID`.
    pub set_child_tid: u64,
    pub robust_list: u64,
    pub rseq: Option<super::rseq::Area>,
    pub alternate_stack: signal::AlternateStack,
    /// The mask that comes back after the handler (`sigsuspend`, `ppoll`).
    pub saved_mask: Option<Set>,
    /// It is traced ([`super::trace`]).
    pub is_traced: bool,
    /// The call under way was interrupted by a signal, and may begin anew.
    pub interrupted: bool,
    /// The call that begins does so anew.
    pub begins_anew: bool,
    /// The last trap for which the program gets a signal: its number, its error code, the address.
    pub trap: (u64, u64, u64),
    /// The deadline of a call that begins anew.
    pub restart_deadline: Option<u64>,
    /// Who waits until this thread has left its parent's space.
    pub vfork: Option<Shared<Vfork>>,
    /// The number that a signal sent to the parent at its end has, for `PR_SET_PDEATHSIG`; 0 for none.
    pub parent_death_signal: u32,
    /// What it gave to `exit`.
    pub exit_code: u8,
    /// `PR_SET_NAME`.
    pub name: [u8; 16],
    /// Calls that may make VMAs before it looks how many there are.
    pub maps_before_look: u32,
    /// `PR_SET_TIMERSLACK`, in ns; 0 for the usual.
    pub timer_slack: u64,
}

// SAFETY: the link is the first field.
unsafe impl Linked for Thread {
    fn link(&self) -> &Link {
        &self.link
    }
}

impl Thread {
    /// A thread of `process` that begins with `entry`; it runs once it is in the tree and [`sched::start`]ed.
    ///
    /// # Errors
    /// [`Errno::ENOMEM`].
    pub fn try_new(
        id: u32,
        process: Shared<Process>,
        private: Private,
        fpu: arch::FpuState,
        entry: extern "C" fn(usize) -> !,
    ) -> Result<Shared<Self>, Errno> {
        let stack = arch::KernelStack::try_new()?;
        let context = arch::Context::new(&stack, entry, 0);
        Ok(Shared::try_new(Self {
            link: Link::new(),
            id: AtomicU32::new(id),
            process,
            state: AtomicU32::new(sched::RUNNING),
            on_cpu: AtomicBool::new(false),
            cpu: AtomicU32::new(0),
            scheduling: AtomicU32::new(0),
            affinity: AtomicU64::new(u64::MAX),
            virtual_time: AtomicU64::new(0),
            ran: AtomicU64::new(0),
            charged_at: AtomicU64::new(0),
            in_kernel: AtomicU64::new(0),
            voluntary: AtomicU64::new(0),
            preempted: AtomicU64::new(0),
            faults: AtomicU64::new(0),
            context: SwitchContext(UnsafeCell::new(context)),
            stack,
            fpu: Own::new(fpu),
            fs_base: AtomicU64::new(0),
            gs_base: AtomicU64::new(0),
            rseq_stale: AtomicBool::new(false),
            pending: Pending::new(),
            mask: AtomicU64::new(0),
            awaited: AtomicU64::new(0),
            own: Own::new(private),
        })?)
    }

    /// Its number.
    pub fn id(&self) -> u32 {
        self.id.load(Ordering::Relaxed)
    }

    /// Gives it the number of its process's leader, in `execve`. Under the tree's lock.
    pub fn set_id(&self, id: u32) {
        self.id.store(id, Ordering::Relaxed);
    }

    /// The process that it is of.
    pub fn process(&self) -> &Shared<Process> {
        &self.process
    }

    /// Signals that it does not want now.
    pub fn mask(&self) -> Set {
        Set(self.mask.load(Ordering::SeqCst))
    }

    /// Changes them: by the thread itself, or before it runs. `SIGKILL` and `SIGSTOP` are always wanted.
    pub fn set_mask(&self, mask: Set) {
        self.mask.store(mask.0 & !Set::ALWAYS.0, Ordering::SeqCst);
    }

    /// Whether a signal waits that it wants, or waits for: what ends a wait.
    pub fn has_signal(&self) -> bool {
        let unwanted = self.mask().0 & !self.awaited.load(Ordering::SeqCst);
        self.waiting_signals().0 & !unwanted != 0
    }

    /// Whether it is to be woken for `signal`.
    pub fn wants(&self, signal: u32) -> bool {
        !self.mask().has(signal) || Set(self.awaited.load(Ordering::SeqCst)).has(signal)
    }

    /// All signals that wait for it, wanted or not.
    pub fn waiting_signals(&self) -> Set {
        Set(self.pending.set().0 | self.process.pending.set().0)
    }

    /// How long it has run, in ns.
    pub fn run_time(&self) -> u64 {
        let ran = self.ran.load(Ordering::Relaxed);
        let runs =
            self.on_cpu.load(Ordering::Relaxed) && self.state.load(Ordering::Relaxed) != sched::BLOCKED;
        if runs { ran + arch::now().saturating_sub(self.charged_at.load(Ordering::Relaxed)) } else { ran }
    }

    /// How long of that in the kernel: what the timer found.
    pub fn kernel_time(&self) -> u64 {
        self.in_kernel.load(Ordering::Relaxed).min(self.run_time())
    }

    /// Counts the time since it was counted last. By the CPU that it runs on.
    pub fn charge(&self, now: u64) -> u64 {
        let spent = now.saturating_sub(self.charged_at.load(Ordering::Relaxed));
        self.charged_at.store(now, Ordering::Relaxed);
        self.ran.store(self.ran.load(Ordering::Relaxed) + spent, Ordering::Relaxed);
        self.virtual_time.store(self.virtual_time.load(Ordering::Relaxed) + spent, Ordering::Relaxed);
        spent
    }

    /// The same by the timer, which found it in the kernel or not.
    pub fn charge_tick(&self, now: u64, user: bool) {
        let spent = self.charge(now);
        if !user {
            self.in_kernel.store(self.in_kernel.load(Ordering::Relaxed) + spent, Ordering::Relaxed);
        }
    }

    /// What it has used up to now, which is counted elsewhere from here on: it ends. By the thread itself, with interrupts off.
    pub fn take_usage(&self) -> Usage {
        self.charge(arch::now());
        let time = self.ran.swap(0, Ordering::Relaxed);
        Usage {
            time,
            in_kernel: self.in_kernel.swap(0, Ordering::Relaxed).min(time),
            faults: self.faults.swap(0, Ordering::Relaxed),
            voluntary: self.voluntary.swap(0, Ordering::Relaxed),
            preempted: self.preempted.swap(0, Ordering::Relaxed),
            resident: 0,
        }
    }

    /// It begins to run on this CPU: its registers beyond the context, its space. With interrupts off, by the scheduler.
    pub fn enter(&self, now: u64) {
        self.charged_at.store(now, Ordering::Relaxed);
        // SAFETY: it does not run (the scheduler has just picked it), so it does not use what is its own.
        unsafe {
            match &self.own.get().space {
                Some(space) => mm::activate(Some(space)),
                None => mm::activate(None),
            }
            self.fpu.with(|fpu| fpu.restore());
        }
        let (fs, gs) = (self.fs_base.load(Ordering::Relaxed), self.gs_base.load(Ordering::Relaxed));
        arch::set_thread(self.stack.top(), fs, gs);
    }

    /// It stops running on this CPU. With interrupts off, by the scheduler.
    pub fn leave(&self) {
        self.rseq_stale.store(true, Ordering::Relaxed);
        // SAFETY: it is the current thread, on its way out of the CPU.
        unsafe { self.fpu.with(|fpu| fpu.save()) };
    }

    /// It has come to another CPU.
    pub fn moved(&self) {
        self.rseq_stale.store(true, Ordering::Relaxed);
    }

    /// Uses its registers beyond those of the trap frame.
    ///
    /// # Safety
    /// It is the current thread, or has not run yet.
    pub unsafe fn with_fpu<R>(&self, act: impl FnOnce(&mut arch::FpuState) -> R) -> R {
        // SAFETY: the caller's promise; `leave` and `enter` use it when it does not run.
        unsafe { self.fpu.with(act) }
    }

    /// Where its program's registers are while the kernel runs for it.
    pub fn user_frame(&self) -> *mut arch::TrapFrame {
        self.stack.user_frame()
    }
}

impl Thread {
    /// True when it has ended, and nothing uses its stack any more.
    pub fn is_gone(&self) -> bool {
        self.state.load(Ordering::Acquire) == sched::DEAD && !self.on_cpu.load(Ordering::Acquire)
    }
}

/// The thread that runs this code.
pub struct CurrentThread {
    thread: &'static Thread,
    not_send: PhantomData<*const ()>,
}

/// The thread that runs this code.
///
/// # Panics
/// Where none does: in the kernel's start, and on an idle CPU.
pub fn current() -> CurrentThread {
    try_current().expect("a thread runs")
}

/// The same; `None` where none does.
pub fn try_current() -> Option<CurrentThread> {
    // SAFETY: the thread that runs here is alive while it runs, and the value does not leave it.
    let thread = unsafe { sched::current_raw().as_ref() }?;
    Some(CurrentThread { thread, not_send: PhantomData })
}

impl Deref for CurrentThread {
    type Target = Thread;
    fn deref(&self) -> &Thread {
        self.thread
    }
}

impl CurrentThread {
    /// Its descriptors. A thread that ends has none any more, and does not ask.
    pub fn files(&self) -> &Shared<fs::Files> {
        self.private().files.as_ref().expect("a thread that runs has descriptors")
    }

    /// Its directory.
    pub fn cwd(&self) -> &Shared<fs::Cwd> {
        self.private().cwd.as_ref().expect("a thread that runs has a directory")
    }

    /// Its address space.
    pub fn space(&self) -> &Arc<Space> {
        self.private().space.as_ref().expect("a thread that runs has a space")
    }

    /// What it keeps for itself, to look at.
    pub fn private(&self) -> &Private {
        // SAFETY: this is the thread; `change` takes no reference of ours along, for it is used in between only.
        unsafe { self.own.get() }
    }

    /// What it keeps for itself, to change: `act` does not come back here.
    pub fn change<R>(&self, act: impl FnOnce(&mut Private) -> R) -> R {
        // SAFETY: this is the thread; references from `private` are not held across this by anybody (`task` alone uses the two).
        unsafe { self.own.with(act) }
    }

    /// The trap that a signal about `addr` tells of.
    pub fn last_trap(&self, addr: u64) -> (u64, u64, u64) {
        let trap = self.private().trap;
        if trap.2 == addr { trap } else { (0, 0, 0) }
    }

    /// True when it is this one.
    pub fn is(&self, other: &Thread) -> bool {
        ptr::eq(self.thread, other)
    }
}
