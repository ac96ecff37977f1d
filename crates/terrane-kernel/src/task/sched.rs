//! The scheduler: which thread runs on which CPU.
//!
//! Each CPU has a queue of threads that could run, and runs the one that has had the least time (its `virtual time`), as Linux's CFS does. A
//! thread is preempted only on its way back to user mode; in the kernel it gives the CPU up where it blocks.
//!
//! # States of a thread
//!
//! | state | where it is | left by |
//! |---|---|---|
//! | `RUNNING` | the current thread of a CPU | itself: to `BLOCKED` when it is about to wait, to `QUEUED` by [`schedule`] |
//! | `BLOCKED` | on its way to sleep, or asleep | whoever wakes it, to `QUEUED`; itself, back to `RUNNING`, when it need not wait |
//! | `QUEUED` | in a run queue, or about to be put there by who moved it here | [`schedule`] of the CPU that picks it |
//! | `DEAD` | nowhere | nobody |
//!
//! # Waking against going to sleep
//!
//! A thread that waits sets `BLOCKED`, *then* looks at its condition, and only then calls [`schedule`]. Whoever makes the condition true does
//! that first and then exchanges `BLOCKED` for `QUEUED`. Both are atomic read-modify-writes or sequentially consistent stores, so either
//! the waiter sees the condition or the waker sees `BLOCKED` (Dekker). The exchange succeeds for one waker only: it alone puts
//! the thread into a queue, so a thread is in one queue at most.
//!
//! A thread may be woken before it has left its CPU: `on_cpu` is true until another context runs there. Such a thread goes into that CPU's
//! own queue, which that CPU cannot look at before it has switched (or picks the same thread again, and goes on); those who
//! take threads from other CPUs' queues leave it alone. So a context is never resumed before it has been saved. A thread that must leave its CPU because of its affinity
//! is queued elsewhere by whoever runs next, after the switch.
//!
//! # Idle CPUs
//!
//! A CPU says that it is idle, then looks at its queue, then halts; whoever queues a thread puts it in, then looks whether the CPU is idle, and
//! if so sends an interrupt. The queue's lock orders the two. A CPU with nothing to do takes threads from the fullest queue, and one with two more
//! than another gives it one at the end of a slice.

use core::cell::{Cell, UnsafeCell};
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence};

use super::list::List;
use super::lock::Lock;
use super::thread::Thread;
use super::timer;
use crate::arch::{self, interrupts};
use crate::mm;

/// CPUs at most: one bit each in an affinity mask.
pub const MAX_CPUS: usize = 64;

/// How long a thread runs while others wait, in ns.
const SLICE: u64 = 4_000_000;
/// How far a thread that slept may be behind the others, in ns: what it is favoured by when it wakes.
const SLEEPER_CREDIT: u64 = 3_000_000;
/// How much less time than the running thread a thread must have had to preempt it when it wakes, in ns.
const WAKE_GRANULARITY: u64 = 1_000_000;

/// See the module's head.
pub const RUNNING: u32 = 0;
pub const BLOCKED: u32 = 1;
pub const QUEUED: u32 = 2;
pub const DEAD: u32 = 3;

struct RunQueue {
    /// Threads in state `QUEUED`, which are alive until they have run and ended.
    threads: List<Thread>,
    /// The virtual time of what was picked last; never falls.
    floor: u64,
}

/// What a CPU has for itself.
struct Cpu {
    queue: Lock<RunQueue>,
    /// Threads in the queue, for others to look at.
    length: AtomicUsize,
    /// Null while it idles.
    current: AtomicPtr<Thread>,
    idle: AtomicBool,
    /// The current thread is to give way when it returns to user mode.
    must_switch: AtomicBool,
    /// When the current thread began its slice, and what its virtual time was then.
    slice_start: AtomicU64,
    slice_virtual: AtomicU64,
    /// What ran before, from the switch until the next context has taken note.
    previous: Cell<*const Thread>,
    /// Its own context, saved while a thread runs. Used by this CPU alone.
    idle_context: UnsafeCell<arch::Context>,
    switches: AtomicU64,
    /// Switches to the idle context, and back, not counted: how often it went idle.
    idles: AtomicU64,
}

// SAFETY: `previous` and `idle_context` are used by the CPU itself alone, with interrupts off; the rest is atomic or locked.
unsafe impl Sync for Cpu {}

impl Cpu {
    const fn new() -> Self {
        Self {
            queue: Lock::new(RunQueue { threads: List::new(), floor: 0 }),
            length: AtomicUsize::new(0),
            current: AtomicPtr::new(ptr::null_mut()),
            idle: AtomicBool::new(false),
            must_switch: AtomicBool::new(false),
            slice_start: AtomicU64::new(0),
            slice_virtual: AtomicU64::new(0),
            previous: Cell::new(ptr::null()),
            idle_context: UnsafeCell::new(arch::Context::empty()),
            switches: AtomicU64::new(0),
            idles: AtomicU64::new(0),
        }
    }
}

impl Cpu {
    /// The current thread, which has been charged up to `now`, begins a slice. By this CPU.
    fn begin_slice(&self, thread: &Thread, now: u64) {
        self.slice_start.store(now, Ordering::Relaxed);
        self.slice_virtual.store(thread.virtual_time.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// The virtual time of the thread that runs there, about; for others, who must not look at the thread itself: it may end. `None` while it idles.
    fn current_virtual(&self) -> Option<u64> {
        let since = arch::now().saturating_sub(self.slice_start.load(Ordering::Relaxed));
        let runs = !self.current.load(Ordering::Relaxed).is_null();
        runs.then(|| self.slice_virtual.load(Ordering::Relaxed) + since)
    }
}

static CPUS: [Cpu; MAX_CPUS] = [const { Cpu::new() }; MAX_CPUS];

fn this_cpu() -> &'static Cpu {
    &CPUS[arch::cpu_index()]
}

/// The mask of the CPUs that there are: all have started, or are about to, when the first thread does.
pub fn online() -> u64 {
    u64::MAX >> (MAX_CPUS - arch::cpu_count().clamp(1, MAX_CPUS))
}

/// How often CPUs have changed from one thread to another.
pub fn switches() -> u64 {
    CPUS.iter().map(|cpu| cpu.switches.load(Ordering::Relaxed)).sum()
}

/// Threads that run or could run now.
pub fn runnable() -> usize {
    let runs = |cpu: &Cpu| usize::from(!cpu.current.load(Ordering::Relaxed).is_null());
    CPUS.iter().map(|cpu| cpu.length.load(Ordering::Relaxed) + runs(cpu)).sum()
}

/// The thread that runs on this CPU; null while it idles or starts.
pub fn current_raw() -> *const Thread {
    arch::current_thread() as *const Thread
}

/// Whether the current thread is to give way on its return to user mode.
pub fn must_switch() -> bool {
    this_cpu().must_switch.load(Ordering::Relaxed)
}

/// Whether the affinity of the current thread allows this CPU.
pub fn may_stay(thread: &Thread) -> bool {
    thread.affinity.load(Ordering::Relaxed) >> arch::cpu_index() & 1 != 0
}

/// When this CPU's timer is to interrupt the current thread: `u64::MAX` where it idles.
pub fn slice_end() -> u64 {
    let cpu = this_cpu();
    if cpu.current.load(Ordering::Relaxed).is_null() {
        return u64::MAX;
    }
    cpu.slice_start.load(Ordering::Relaxed) + SLICE
}

/// By the timer's interrupt: has the current thread had its time?
pub fn tick(now: u64, user: bool) {
    let cpu = this_cpu();
    let Some(thread) = current_of(cpu) else { return };
    if now < cpu.slice_start.load(Ordering::Relaxed) + SLICE {
        return;
    }
    thread.charge_tick(now, user);
    cpu.begin_slice(thread, now);
    let here = cpu.length.load(Ordering::Relaxed);
    if here > 0 {
        cpu.must_switch.store(true, Ordering::Relaxed);
        balance(cpu, here + 1);
    }
}

/// Threads that run or wait on a CPU, about.
fn load(cpu: usize) -> usize {
    let one = &CPUS[cpu];
    one.length.load(Ordering::Relaxed) + usize::from(!one.current.load(Ordering::Relaxed).is_null())
}

/// Gives a thread of this CPU's queue, which has `here` with the current one, to the CPU that has the fewest, if that has two less.
fn balance(cpu: &Cpu, here: usize) {
    let others = (0..MAX_CPUS).filter(|&other| online() >> other & 1 != 0);
    let Some(target) = others.min_by_key(|&other| load(other)) else { return };
    if load(target) + 2 > here {
        return;
    }
    let fits = |thread: &Thread| {
        thread.affinity.load(Ordering::Relaxed) >> target & 1 != 0 && !thread.on_cpu.load(Ordering::Acquire)
    };
    if let Some(thread) = take(cpu, fits) {
        // SAFETY: it is in state `QUEUED` and in no queue, so it neither runs nor ends until this puts it into one.
        enqueue(target, unsafe { &*thread }, false);
    }
}

fn current_of(cpu: &Cpu) -> Option<&Thread> {
    // SAFETY: the current thread of this CPU is alive while it runs, which is now.
    unsafe { cpu.current.load(Ordering::Relaxed).cast_const().as_ref() }
}

/// Marks the current thread as about to wait: see the module's head.
pub fn prepare_to_wait(thread: &Thread) {
    thread.state.store(BLOCKED, Ordering::SeqCst);
    fence(Ordering::SeqCst);
}

/// The current thread need not wait after all.
pub fn do_not_wait(thread: &Thread) {
    if thread.state.compare_exchange(BLOCKED, RUNNING, Ordering::SeqCst, Ordering::SeqCst) == Err(QUEUED) {
        // It has been woken, so it is in a queue or will be: it runs again when it is picked there.
        schedule();
    }
}

/// Wakes `thread` if it waits; true if it did, and this call alone has woken it. The caller keeps it alive.
pub fn wake(thread: &Thread) -> bool {
    fence(Ordering::SeqCst);
    if thread.state.compare_exchange(BLOCKED, QUEUED, Ordering::SeqCst, Ordering::Relaxed).is_err() {
        return false;
    }
    let last = thread.cpu.load(Ordering::Relaxed) as usize;
    let target = if thread.on_cpu.load(Ordering::Acquire) { last } else { choose(thread, last) };
    enqueue(target, thread, true);
    true
}

/// Lets a new thread run.
pub fn start(thread: &Thread) {
    let target = choose(thread, arch::cpu_index());
    thread.cpu.store(target as u32, Ordering::Relaxed);
    thread.state.store(QUEUED, Ordering::SeqCst);
    // It begins a slice behind the others, as in CFS: else who starts many threads would come after all of them when they
    // are woken together, having had more time than each.
    thread.virtual_time.store(floor_of(target) + SLICE, Ordering::Relaxed);
    enqueue(target, thread, false);
}

fn floor_of(cpu: usize) -> u64 {
    CPUS[cpu].queue.lock().floor
}

/// Makes the CPU that runs `thread` in user mode, if one does, come into the kernel.
pub fn interrupt(thread: &Thread) {
    let cpu = thread.cpu.load(Ordering::Relaxed) as usize;
    if thread.on_cpu.load(Ordering::Relaxed) && cpu != arch::cpu_index() {
        arch::ipi::reschedule(cpu);
    }
}

/// Where `thread` is to run: where it ran last if that CPU idles, else on any that does, else on the least loaded.
fn choose(thread: &Thread, last: usize) -> usize {
    let allowed = thread.affinity.load(Ordering::Relaxed) & online();
    let allowed = if allowed == 0 { online() } else { allowed };
    let may = |cpu: usize| allowed >> cpu & 1 != 0;
    let mut best = if may(last) { last } else { allowed.trailing_zeros() as usize };
    let mut least = load(best);
    for cpu in (0..MAX_CPUS).filter(|&cpu| may(cpu)) {
        if least == 0 {
            break;
        }
        let load = load(cpu);
        if load < least {
            (best, least) = (cpu, load);
        }
    }
    best
}

/// Puts a thread in state `QUEUED` into the queue of `target`.
fn enqueue(target: usize, thread: &Thread, woken: bool) {
    let cpu = &CPUS[target];
    let preempts = {
        let mut queue = cpu.queue.lock();
        let time = &thread.virtual_time;
        let floor = queue.floor;
        let mine = time.load(Ordering::Relaxed).max(floor.saturating_sub(SLEEPER_CREDIT));
        // Who comes from a CPU whose clock is ahead does not wait for this one's to catch up.
        let mine = mine.min(floor + SLICE);
        time.store(mine, Ordering::Relaxed);
        // SAFETY: it is in no queue (whoever made it `QUEUED` puts it in one), and alive until it has run and ended; the queue is static.
        unsafe { queue.threads.push(thread) };
        cpu.length.fetch_add(1, Ordering::Relaxed);
        woken && cpu.current_virtual().is_some_and(|current| mine + WAKE_GRANULARITY < current)
    };
    fence(Ordering::SeqCst);
    if preempts {
        cpu.must_switch.store(true, Ordering::Relaxed);
        // Of another CPU: the interrupt below does it.
        if target == arch::cpu_index() {
            arch::look_before_user();
        }
    }
    if (preempts || cpu.idle.load(Ordering::Relaxed)) && target != arch::cpu_index() {
        arch::ipi::reschedule(target);
    }
}

/// Takes the thread with the least virtual time out of a queue, of those that `wanted` accepts.
fn take(cpu: &Cpu, wanted: impl Fn(&Thread) -> bool) -> Option<*const Thread> {
    if cpu.length.load(Ordering::Relaxed) == 0 {
        return None;
    }
    let mut queue = cpu.queue.lock();
    let mut best: Option<(*const Thread, u64)> = None;
    queue.threads.for_each(|thread| {
        let time = thread.virtual_time.load(Ordering::Relaxed);
        if wanted(thread) && best.is_none_or(|(_, least)| time < least) {
            best = Some((thread, time));
        }
        true
    });
    let (thread, time) = best?;
    // SAFETY: it is in this queue, so alive.
    unsafe { queue.threads.remove(&*thread) };
    cpu.length.fetch_sub(1, Ordering::Relaxed);
    queue.floor = queue.floor.max(time);
    Some(thread)
}

/// A thread for this CPU: of its own queue, else of the fullest.
fn pick(cpu: &Cpu) -> Option<*const Thread> {
    let me = arch::cpu_index();
    let may = |thread: &Thread| thread.affinity.load(Ordering::Relaxed) >> me & 1 != 0;
    // Its own queue may hold one that is not allowed here any more: that one is moved once it runs.
    if let Some(thread) = take(cpu, |_| true) {
        return Some(thread);
    }
    let others = || (0..MAX_CPUS).filter(|&other| online() >> other & 1 != 0 && other != me);
    let fullest = others().max_by_key(|&other| CPUS[other].length.load(Ordering::Relaxed))?;
    let found = take(&CPUS[fullest], |thread| may(thread) && !thread.on_cpu.load(Ordering::Acquire));
    found.or_else(|| {
        others().find_map(|other| {
            take(&CPUS[other], |thread| may(thread) && !thread.on_cpu.load(Ordering::Acquire))
        })
    })
}

/// Gives the CPU to another thread. Returns when the calling thread is picked again: at once if it is `RUNNING` and nobody else wants the
/// CPU. Not with a [`Lock`] held.
pub fn schedule() {
    let enabled = interrupts::are_enabled();
    interrupts::disable();
    let cpu = this_cpu();
    cpu.must_switch.store(false, Ordering::Relaxed);
    let Some(thread) = current_of(cpu) else {
        if enabled {
            interrupts::enable();
        }
        return;
    };
    let now = arch::now();
    thread.charge(now);
    let me = arch::cpu_index();
    let may_stay = thread.affinity.load(Ordering::Relaxed) >> me & 1 != 0;
    let state = thread.state.load(Ordering::Relaxed);
    if state == RUNNING && may_stay {
        if cpu.length.load(Ordering::Relaxed) == 0 {
            cpu.begin_slice(thread, now);
            timer::arm(now);
            if enabled {
                interrupts::enable();
            }
            return;
        }
        thread.state.store(QUEUED, Ordering::Relaxed);
        enqueue(me, thread, false);
    }
    let next = pick(cpu).map_or(ptr::null(), |next| next);
    if ptr::eq(next, thread) {
        thread.state.store(RUNNING, Ordering::Relaxed);
        cpu.begin_slice(thread, now);
        timer::arm(now);
    } else {
        // SAFETY: interrupts are off, the current thread is `thread`, and `next` has just been taken out of a queue.
        unsafe { change(cpu, thread, next, now) };
    }
    if enabled {
        interrupts::enable();
    }
}

/// Goes on with `next`, or idles if that is null; returns when `from` is picked again.
///
/// # Safety
/// Interrupts are off; `from` is the current thread; `next` is nobody else's to run, and its context is saved.
unsafe fn change(cpu: &'static Cpu, from: &Thread, next: *const Thread, now: u64) {
    from.leave();
    cpu.previous.set(from);
    // SAFETY: null, or taken out of a queue by this CPU: alive.
    let to: *const arch::Context = match unsafe { next.as_ref() } {
        Some(next) => {
            begin(cpu, next, now);
            next.context.get()
        }
        None => {
            cpu.current.store(ptr::null_mut(), Ordering::Relaxed);
            arch::set_current_thread(0);
            mm::activate(None);
            cpu.idle_context.get()
        }
    };
    // SAFETY: both contexts are alive: `from` until it has ended, which is said to be after this switch, `to` as it is about to run.
    unsafe { arch::switch(from.context.get(), to) };
    finish();
}

/// Makes `next` the current thread: everything but the switch of stacks.
fn begin(cpu: &Cpu, next: &Thread, now: u64) {
    next.state.store(RUNNING, Ordering::Relaxed);
    let me = arch::cpu_index() as u32;
    if next.cpu.swap(me, Ordering::Relaxed) != me {
        next.moved();
    }
    next.on_cpu.store(true, Ordering::Relaxed);
    cpu.current.store(ptr::from_ref(next).cast_mut(), Ordering::Relaxed);
    arch::set_current_thread(ptr::from_ref(next) as usize);
    cpu.begin_slice(next, now);
    cpu.switches.fetch_add(1, Ordering::Relaxed);
    next.enter(now);
    timer::arm(now);
}

/// What the context that runs now does for the one before: lets it be resumed elsewhere, or freed.
pub fn finish() {
    let cpu = this_cpu();
    let previous = cpu.previous.replace(ptr::null());
    // SAFETY: a thread that has left its CPU is alive until it has been let go here, or is queued here.
    let Some(thread) = (unsafe { previous.as_ref() }) else { return };
    let state = thread.state.load(Ordering::Relaxed);
    if state == DEAD {
        // From here on it may be freed.
        thread.on_cpu.store(false, Ordering::Release);
        return;
    }
    // Only its own CPU makes a thread `RUNNING`, or takes it out of that: it had to leave because of its affinity.
    if state == RUNNING {
        thread.state.store(QUEUED, Ordering::Relaxed);
        thread.on_cpu.store(false, Ordering::Release);
        enqueue(choose(thread, arch::cpu_index()), thread, false);
        return;
    }
    thread.on_cpu.store(false, Ordering::Release);
}

/// Makes this CPU one that runs threads, and never returns. Each CPU calls it once, with interrupts off.
pub fn run() -> ! {
    let cpu = this_cpu();
    loop {
        interrupts::disable();
        cpu.idle.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let Some(next) = pick(cpu) else {
            timer::arm(arch::now());
            cpu.idles.fetch_add(1, Ordering::Relaxed);
            interrupts::wait_for_one();
            continue;
        };
        cpu.idle.store(false, Ordering::Relaxed);
        // SAFETY: it has just been taken out of a queue, so it is alive and nobody else's.
        let next = unsafe { &*next };
        begin(cpu, next, arch::now());
        // SAFETY: `next` is about to run here; the idle context, which is this CPU's own, is saved by this very call.
        unsafe { arch::switch(cpu.idle_context.get(), next.context.get()) };
        finish();
    }
}

/// Gives way to the others as `sched_yield` does: behind all that are in the queue.
pub fn yield_now() {
    let cpu = this_cpu();
    let Some(thread) = current_of(cpu) else { return };
    if cpu.length.load(Ordering::Relaxed) > 0 {
        let mut most = 0;
        cpu.queue.lock().threads.for_each(|other| {
            most = most.max(other.virtual_time.load(Ordering::Relaxed));
            true
        });
        thread.charge(arch::now());
        thread.virtual_time.fetch_max(most + 1, Ordering::Relaxed);
    }
    schedule();
}
