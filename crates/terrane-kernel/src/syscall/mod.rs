//! The system calls, by Linux's numbers on x86-64.
//!
//! What is about files is [`crate::fs`]'s; the rest is here, in `memory`, `times`, `identity` and `process`, or where threads and
//! signals are ([`crate::task`]). A number that nobody knows is `ENOSYS`, and named once in the report. `docs/kernel.md` has the table.

mod identity;
pub mod memory;
mod privilege;
mod process;
mod remote;
mod shm;
mod times;

pub use process::write_usage;
pub use remote::memory as memory_of;

use crate::arch::TrapFrame;
use crate::errno::Errno;
use crate::task::{children, clone, exec, exit, futex, rseq, signal, trace};
use crate::{fs, report, task};
use core::sync::atomic::{AtomicU64, Ordering};

/// What a call returns.
pub type Answer = Result<u64, Errno>;

/// Makes the call whose number and arguments are in the registers. `None` when the registers are what the program is to have already:
/// for a new program, and for what a handler has interrupted.
pub fn call(frame: &mut TrapFrame) -> Option<Answer> {
    let args = [frame.rdi, frame.rsi, frame.rdx, frame.r10, frame.r8, frame.r9];
    let [a, b, c, d, e, _] = args;
    let number = frame.orig_rax;
    Some(match number {
        9 => memory::mmap(args),
        10 => memory::mprotect(a, b, c),
        11 => memory::munmap(a, b),
        12 => memory::brk(a),
        13 => signal::rt_sigaction(a, b, c, d),
        14 => signal::rt_sigprocmask(a, b, c, d),
        15 => return signal::rt_sigreturn(frame),
        24 => process::sched_yield(),
        25 => memory::mremap(a, b, c, d, e),
        26 => memory::msync(a, b, c),
        27 => memory::mincore(a, b, c),
        28 => memory::madvise(a, b, c),
        29 => shm::shmget(a, b, c),
        30 => shm::shmat(a, b, c),
        31 => shm::shmctl(a, b, c),
        34 => signal::pause(),
        35 => times::nanosleep(a, b),
        36 => times::getitimer(a, b),
        37 => times::alarm(a),
        38 => times::setitimer(a, b, c),
        39 => identity::getpid(),
        56 => clone::clone(frame, args),
        57 => clone::fork(frame),
        58 => clone::vfork(frame),
        59 => match exec::execve(frame, a, b, c) {
            Ok(_) => {
                if task::current().private().is_traced {
                    trace::at_exec(&task::current());
                }
                return None;
            }
            Err(errno) => Err(errno),
        },
        60 => exit::thread(a),
        61 => children::wait4(a, b, c, d),
        62 => signal::kill(a, b),
        63 => identity::uname(a),
        67 => shm::shmdt(a),
        96 => times::gettimeofday(a, b),
        97 => process::getrlimit(a, b),
        98 => process::getrusage(a, b),
        99 => process::sysinfo(a),
        100 => times::times(a),
        101 => trace::ptrace(a, b, c, d),
        102 => identity::getuid(),
        104 => identity::getgid(),
        105 => identity::setuid(a),
        106 => identity::setgid(a),
        107 => identity::geteuid(),
        108 => identity::getegid(),
        109 => identity::setpgid(a, b),
        110 => identity::getppid(),
        111 => identity::getpgid(0),
        112 => identity::setsid(),
        113 => identity::setreuid(a, b),
        114 => identity::setregid(a, b),
        115 => Ok(0),
        116 => privilege::setgroups(a, b),
        117 => identity::setresuid(a, b, c),
        118 => identity::getresuid(a, b, c),
        119 => identity::setresgid(a, b, c),
        120 => identity::getresgid(a, b, c),
        121 => identity::getpgid(a),
        122 => identity::geteuid(),
        123 => identity::getegid(),
        124 => identity::getsid(a),
        125 => privilege::capget(a, b),
        126 => privilege::capset(a, b),
        127 => signal::rt_sigpending(a, b),
        128 => signal::rt_sigtimedwait(a, b, c, d),
        129 => signal::rt_sigqueueinfo(a, b, c),
        130 => signal::rt_sigsuspend(a, b),
        131 => signal::sigaltstack(a, b, frame.rsp),
        135 => process::personality(a),
        140 => process::getpriority(a, b),
        141 => process::setpriority(a, b, c),
        142 => process::sched_setparam(a, b),
        143 => process::sched_getparam(a, b),
        144 => process::sched_setscheduler(a, b, c),
        145 => process::sched_getscheduler(a),
        146 => process::sched_priority(a, 99),
        147 => process::sched_priority(a, 1),
        148 => process::sched_rr_get_interval(a, b),
        149 => memory::mlock(a, b),
        150 => memory::munlock(a, b),
        151 => memory::mlockall(a),
        152 => memory::munlockall(),
        157 => process::prctl(args),
        158 => process::arch_prctl(a, b),
        160 => process::setrlimit(a, b),
        153 | 163 | 167 | 168 | 169 | 170 | 171 | 175 | 176 => privilege::refused(number, args),
        159 => times::adjtimex(a),
        164 => times::settimeofday(a, b),
        186 => identity::gettid(),
        200 => signal::tgkill(None, a, b),
        201 => times::time(a),
        202 => futex::futex(args),
        203 => process::sched_setaffinity(a, b, c),
        204 => process::sched_getaffinity(a, b, c),
        216 => memory::remap_file_pages(args),
        218 => process::set_tid_address(a),
        219 => Err(Errno::EINTR),
        222 => times::timer_create(a, b, c),
        223 => times::timer_settime(a, b, c, d),
        224 => times::timer_gettime(a, b),
        225 => times::timer_getoverrun(a),
        226 => times::timer_delete(a),
        227 => times::clock_settime(a, b),
        228 => times::clock_gettime(a, b),
        229 => times::clock_getres(a, b),
        230 => times::clock_nanosleep(a, b, c, d),
        231 => exit::group(crate::task::process::Exit::Code(a as u8)),
        234 => signal::tgkill(Some(a), b, c),
        237 => memory::mbind(args),
        238 => memory::set_mempolicy(a, b, c),
        239 => memory::get_mempolicy(args),
        251 => privilege::ioprio_set(a, b, c),
        252 => privilege::ioprio_get(a, b),
        256 => remote::migrate_pages(a, b, c, d),
        279 => remote::move_pages(args),
        247 => children::waitid(a, b, c, d, e),
        273 => process::set_robust_list(a, b),
        274 => process::get_robust_list(a, b, c),
        297 => signal::rt_tgsigqueueinfo(a, b, c, d),
        305 => times::clock_adjtime(a, b),
        302 => process::prlimit64(a, b, c, d),
        309 => process::getcpu(a, b),
        310 => remote::process_vm(args, false),
        311 => remote::process_vm(args, true),
        314 => process::sched_setattr(a, b, c),
        315 => process::sched_getattr(a, b, c, d),
        318 => process::getrandom(a, b, c),
        322 => match exec::execveat(frame, args) {
            Ok(_) => {
                if task::current().private().is_traced {
                    trace::at_exec(&task::current());
                }
                return None;
            }
            Err(errno) => Err(errno),
        },
        324 => process::membarrier(a, b),
        325 => memory::mlock2(a, b, c),
        329 => memory::pkey_mprotect(a, b, c, d),
        // No keys on this machine: as where the processor has none.
        330 => Err(Errno::EINVAL),
        331 => Err(Errno::EINVAL),
        334 => rseq::rseq(a, b, c, d),
        424 => remote::pidfd_send_signal(a, b, c, d),
        434 => remote::pidfd_open(a, b),
        435 => clone::clone3(frame, a, b),
        440 => remote::process_madvise(args),
        448 => remote::process_mrelease(a, b),
        449 => futex::waitv(a, b, c, d, e),
        450 => memory::set_mempolicy_home_node(a, b, c, d),
        // No shadow stacks on this machine.
        453 => Err(Errno::EOPNOTSUPP),
        462 => memory::mseal(a, b, c),
        _ => match fs::syscall(number, &args) {
            Some(answer) => answer,
            None => unknown(number),
        },
    })
}

/// Numbers that have been named.
static NAMED: [AtomicU64; 8] = [const { AtomicU64::new(0) }; 8];

fn unknown(number: u64) -> Answer {
    let word = NAMED.get(number as usize / 64);
    let bit = 1 << (number % 64);
    if word.is_some_and(|word| word.fetch_or(bit, Ordering::Relaxed) & bit == 0) {
        report!("@nosys {number}");
    }
    Err(Errno::ENOSYS)
}
