//! Loads and stores that may raise a signal, and go on.
//!
//! Each access says where to go on, and then is made by one instruction. The signal's handler notes what the signal says and puts
//! that place into the interrupted context, so the access ends with whatever was done before. The handler runs on the ordinary stack, which
//! lies outside of the window.

use core::sync::atomic::{AtomicI32, AtomicU64, Ordering};

/// Where to go on; 0 outside of accesses.
static LANDING: AtomicU64 = AtomicU64::new(0);
static SIGNAL: AtomicI32 = AtomicI32::new(0);
static CODE: AtomicI32 = AtomicI32::new(0);
static ADDRESS: AtomicU64 = AtomicU64::new(0);

/// What a signal said.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fault {
    pub signal: i32,
    pub code: i32,
    pub addr: u64,
}

extern "C" fn handle(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let landing = LANDING.load(Ordering::Relaxed);
    if landing == 0 {
        // Not by a probe: a bug of the helper, which ends by the signal that is raised again with nobody to handle it.
        // SAFETY: resets the handler of this signal.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
        return;
    }
    SIGNAL.store(signal, Ordering::Relaxed);
    // SAFETY: with SA_SIGINFO the kernel passes both; the context is what it returns to.
    unsafe {
        CODE.store((*info).si_code, Ordering::Relaxed);
        ADDRESS.store((*info).si_addr().addr() as u64, Ordering::Relaxed);
        let context = &mut *context.cast::<libc::ucontext_t>();
        context.uc_mcontext.gregs[libc::REG_RIP as usize] = landing as i64;
    }
}

/// Catches the signals from now on.
pub(super) fn install() -> bool {
    // SAFETY: the action is filled in as the call wants it, and the handler is safe in signals: it touches atomics and its arguments.
    unsafe {
        let mut action: libc::sigaction = core::mem::zeroed();
        action.sa_sigaction = handle as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        [libc::SIGSEGV, libc::SIGBUS]
            .iter()
            .all(|&signal| libc::sigaction(signal, &action, core::ptr::null_mut()) == 0)
    }
}

fn fault() -> Option<Fault> {
    LANDING.store(0, Ordering::Relaxed);
    let signal = SIGNAL.swap(0, Ordering::Relaxed);
    let (code, addr) = (CODE.load(Ordering::Relaxed), ADDRESS.load(Ordering::Relaxed));
    (signal != 0).then_some(Fault { signal, code, addr })
}

/// Copies `len` bytes from `from` to `to`, ascending; returns how many were copied, and the signal that ended it.
///
/// # Safety
/// What can be written at `to` may be written; what can be read at `from` may be read.
pub(super) unsafe fn copy(to: u64, from: u64, len: usize) -> (usize, Option<Fault>) {
    let left: usize;
    // SAFETY: string moves touch the two ranges only, and leave in `rcx` what they have not done when they are interrupted.
    unsafe {
        core::arch::asm!(
            "lea {place}, [rip + 2f]",
            "mov [{landing}], {place}",
            "rep movsb",
            "2:",
            place = out(reg) _,
            landing = in(reg) LANDING.as_ptr(),
            inout("rcx") len => left,
            inout("rdi") to => _,
            inout("rsi") from => _,
        );
    }
    (len - left, fault())
}

/// Loads eight bytes.
///
/// # Safety
/// What can be read at `addr` may be read.
pub(super) unsafe fn load(addr: u64) -> Result<u64, Fault> {
    let value: u64;
    // SAFETY: one load.
    unsafe {
        core::arch::asm!(
            "xor {value:e}, {value:e}",
            "lea {place}, [rip + 2f]",
            "mov [{landing}], {place}",
            "mov {value}, [{addr}]",
            "2:",
            place = out(reg) _,
            landing = in(reg) LANDING.as_ptr(),
            addr = in(reg) addr,
            value = out(reg) value,
        );
    }
    fault().map_or(Ok(value), Err)
}

/// Stores eight bytes.
///
/// # Safety
/// What can be written at `addr` may be written.
pub(super) unsafe fn store(addr: u64, value: u64) -> Result<(), Fault> {
    // SAFETY: one store.
    unsafe {
        core::arch::asm!(
            "lea {place}, [rip + 2f]",
            "mov [{landing}], {place}",
            "mov [{addr}], {value}",
            "2:",
            place = out(reg) _,
            landing = in(reg) LANDING.as_ptr(),
            addr = in(reg) addr,
            value = in(reg) value,
        );
    }
    fault().map_or(Ok(()), Err)
}
