//! Threads and processes.
//!
//! | module | what |
//! |---|---|
//! | `lock`, `list`, `own` | a spin lock that keeps interrupts out; lists without memory of their own; what only one thread uses |
//! | `sched`, `timer`, `wait` | which thread runs; deadlines; waiting until something is so |
//! | `thread`, `process`, `tree` | what is scheduled, what threads have in common, and who is whose child |
//! | `futex`, `rseq` | what the C libraries build locks and per-CPU data on |
//! | `signal`, `restart`, `stop`, `timers` | signals, the calls that they interrupt, processes that stand still, timers that send them |
//! | `clone`, `elf`, `exec`, `exit`, `vfork`, `children` | the life of a process |
//! | `time`, `report` | clocks; what is told at the end |
//! | `background` | the reclaimer and the collapser |
//!
//! Each module's head says which races it settles, and how.

mod background;
pub mod children;
pub mod clone;
pub mod elf;
pub mod exec;
pub mod exit;
pub mod futex;
mod list;
pub mod lock;
mod own;
pub mod process;
mod report;
pub mod restart;
pub mod rseq;
pub mod sched;
pub mod signal;
mod stop;
pub mod thread;
pub mod time;
mod timer;
pub mod timers;
pub mod trace;
pub mod tree;
mod vfork;
pub mod wait;

pub use sched::yield_now;
pub use signal::before_user;
pub use thread::current;

use crate::arch::{self, TrapFrame, interrupts};
use crate::errno::Errno;
use crate::{fs, log, mm, options, report, syscall};
use core::sync::atomic::Ordering;
use signal::{Info, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGTRAP};
use terrane::FaultError;
use terrane::commit::Overcommit;
use terrane::sync::Shared;
use terrane::vma::Access;

/// Runs the program that the command line names, and everything it starts. On the first CPU, when everything is up, with interrupts off.
pub fn start() -> ! {
    // As Linux by default: what could never be is refused.
    mm::machine().commit().set_mode(Overcommit::Guess);
    if let Err(errno) = start_first() {
        report!("@panic no memory for the first process ({errno:?})");
        arch::exit(1);
    }
    interrupts::disable();
    sched::run()
}

/// The loop of the other CPUs, with interrupts off.
pub fn idle() -> ! {
    sched::run()
}

fn start_first() -> Result<(), Errno> {
    let files = Shared::try_new(fs::Files::try_new()?)?;
    let cwd = Shared::try_new(fs::Cwd::new())?;
    let thread = clone::first(files, cwd, first_program)?;
    sched::start(&thread);
    background::start();
    Ok(())
}

/// Calls itself until its stack is used up: a mistake that is planted, to see what becomes of it.
#[inline(never)]
fn overflow(depth: u64) -> u64 {
    let room = core::hint::black_box([depth; 16]);
    let below = if room[0] == 0 { 0 } else { overflow(depth + 1) };
    below + core::hint::black_box(room)[3]
}

/// Where the first thread begins: it becomes the program.
extern "C" fn first_program(_: usize) -> ! {
    sched::finish();
    interrupts::enable();
    match options::value("plant") {
        Some("overflow") => log!("never: {}", overflow(1)),
        Some(other) => log!("nothing to plant: {other}"),
        None => {}
    }
    let thread = current();
    let mut frame = TrapFrame::user(0, 0);
    if let Err((errno, path)) = exec_first(&mut frame) {
        report!("@log cannot run {path}: error {}", errno.0);
        // It has no space yet that an ordinary end would give up.
        report::shut_down(process::Exit::Code(if errno == Errno::ENOENT { 127 } else { 126 }).status());
    }
    report!("@ready {}", arch::now());
    mm::begin_refusing();
    let at = thread.user_frame();
    // SAFETY: this thread's registers, at the top of its stack, where nothing is yet.
    unsafe {
        at.write(frame);
        before_user(&mut *at);
        arch::enter_user(&*at)
    }
}

fn exec_first(frame: &mut TrapFrame) -> Result<(), (Errno, &'static str)> {
    let path = options::value("init").ok_or((Errno::ENOENT, "(no init= on the command line)"))?;
    let named = |errno: Errno| (errno, path);
    let strings = |name: &[u8]| {
        let mut strings = exec::Strings::default();
        if let Ok(bytes) = fs::read_whole(name) {
            for string in bytes.split_inclusive(|&byte| byte == 0) {
                strings.push(string.strip_suffix(&[0]).unwrap_or(string))?;
            }
        }
        Ok::<_, Errno>(strings)
    };
    let arguments = strings(b"/.terrane/argv").map_err(named)?;
    let environment = strings(b"/.terrane/envp").map_err(named)?;
    let program = fs::open_program(path.as_bytes()).map_err(named)?;
    exec::run(frame, program, path.as_bytes(), arguments, &environment).map_err(named)?;
    Ok(())
}

/// A page fault in user mode that could not be resolved.
pub fn on_page_fault(frame: &mut TrapFrame, addr: u64, _: Access, fault: FaultError) {
    let thread = current();
    let error = frame.orig_rax;
    thread.change(|own| own.trap = (14, error, addr));
    match fault {
        FaultError::OutOfMemory => exit::out_of_memory(&thread, addr),
        fault => signal::force(&thread, Info::fault(fault.signal() as u32, fault.code(), addr)),
    }
}

/// Another exception in user mode.
pub fn on_trap(frame: &mut TrapFrame, vector: u8, error: u64) {
    let thread = current();
    let at = frame.rip;
    // With the `si_code`s of Linux.
    let info = match vector {
        0 => Info::fault(SIGFPE, 1, at),
        1 => Info::fault(SIGTRAP, 2, at),
        3 => Info::from_kernel(SIGTRAP),
        4 => Info::from_kernel(SIGSEGV),
        6 => Info::fault(SIGILL, 2, at),
        16 | 19 => Info::fault(SIGFPE, float_code(&thread, vector), at),
        17 => Info::fault(SIGBUS, 1, 0),
        12 => Info::from_kernel(SIGBUS),
        _ => Info::from_kernel(SIGSEGV),
    };
    thread.change(|own| own.trap = (vector.into(), error, 0));
    signal::force(&thread, info);
}

/// Which exception of the floating-point units it was (`FPE_…`).
fn float_code(thread: &thread::CurrentThread, vector: u8) -> i32 {
    // SAFETY: it is the current thread.
    let raised = unsafe {
        thread.with_fpu(|fpu| {
            fpu.save();
            let bytes = fpu.bytes();
            let word = |at: usize| u32::from(bytes[at]) | u32::from(bytes[at + 1]) << 8;
            match vector {
                // Status and control word of the x87; status and mask of SSE in one word.
                16 => word(2) & !word(0),
                _ => word(24) & !(word(24) >> 7),
            }
        })
    };
    match raised & 0x3f {
        raised if raised & 1 != 0 => 7,
        raised if raised & 4 != 0 => 3,
        raised if raised & 8 != 0 => 4,
        raised if raised & 0x12 != 0 => 5,
        raised if raised & 0x20 != 0 => 6,
        _ => 0,
    }
}

/// A system call.
pub fn on_syscall(frame: &mut TrapFrame) {
    let thread = current();
    restart::begin(&thread);
    let traced = thread.private().is_traced;
    if traced {
        // What a program that looks on finds there before the call.
        frame.rax = (Errno::ENOSYS.0 as u64).wrapping_neg();
        trace::at_call(&thread, frame);
    }
    if let Some(result) = syscall::call(frame) {
        restart::note(&thread, frame, result);
    }
    if traced {
        trace::at_call(&thread, frame);
    }
}

/// A page fault in user mode comes: it is counted for `getrusage`, by the thread itself.
#[inline]
pub fn count_fault() {
    // SAFETY: the thread that runs here is alive while it runs; there is one, for a program has faulted.
    if let Some(thread) = unsafe { sched::current_raw().as_ref() } {
        thread.faults.store(thread.faults.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }
}

/// The timer: with interrupts off. `user`: it has interrupted a program.
pub fn on_timer(user: bool) {
    let now = arch::now();
    timer::fire_due(now);
    sched::tick(now, user);
    timer::arm(now);
}

/// Another CPU has called `ipi::reschedule` for this one: with interrupts off. What there is to do is done on the way back to user mode, or by the
/// idle loop.
pub fn on_reschedule() {}
