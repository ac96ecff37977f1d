//! Interrupt controllers: the local APIC of each processor, and the I/O APIC.
//!
//! Source: Intel SDM volume 3A, chapter 11; Intel 82093AA I/O APIC data sheet.

use super::cpu::{self, Feature, msr};
use super::entry::vector;
use super::{acpi, clock, interrupts, percpu, port};
use crate::mm::direct;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Registers, by their offsets in memory; as model-specific registers a sixteenth of that.
mod register {
    pub const ID: u32 = 0x20;
    pub const END: u32 = 0xb0;
    pub const SPURIOUS: u32 = 0xf0;
    pub const COMMAND: u32 = 0x300;
    pub const COMMAND_HIGH: u32 = 0x310;
    pub const TIMER: u32 = 0x320;
    pub const TIMER_START: u32 = 0x380;
    pub const TIMER_NOW: u32 = 0x390;
    pub const TIMER_DIVIDE: u32 = 0x3e0;
}

/// Bits of the command register.
const PENDING: u32 = 1 << 12;
const ASSERT: u32 = 1 << 14;
const ALL_OTHERS: u32 = 3 << 18;
const NMI: u32 = 4 << 8;
const INIT: u32 = 5 << 8;
const START_UP: u32 = 6 << 8;

const MASKED: u32 = 1 << 16;
const DEADLINE: u32 = 2 << 17;

static X2: AtomicBool = AtomicBool::new(false);
/// Where the registers are, in the x mode.
static BASE: AtomicU64 = AtomicU64::new(0);
/// Steps of the timer a nanosecond, as a fraction of 2^32.
static RATE: AtomicU64 = AtomicU64::new(0);

#[inline]
fn read(register: u32) -> u32 {
    // SAFETY: registers of this processor's APIC, which only this module drives; reading them changes nothing.
    unsafe {
        if X2.load(Ordering::Relaxed) {
            cpu::read_msr(msr::X2APIC + register / 16) as u32
        } else {
            ((BASE.load(Ordering::Relaxed) + u64::from(register)) as *const u32).read_volatile()
        }
    }
}

#[inline]
fn write(register: u32, value: u32) {
    // SAFETY: as above; what is written makes interrupts that the gates expect.
    unsafe {
        if X2.load(Ordering::Relaxed) {
            cpu::write_msr(msr::X2APIC + register / 16, value.into());
        } else {
            ((BASE.load(Ordering::Relaxed) + u64::from(register)) as *mut u32).write_volatile(value);
        }
    }
}

/// Sends a command to the processor whose APIC is `to`. Interrupts are off: the x mode takes two registers.
fn command(to: u32, command: u32) {
    if X2.load(Ordering::Relaxed) {
        // SAFETY: as in `write`.
        unsafe {
            cpu::write_msr(msr::X2APIC + register::COMMAND / 16, u64::from(to) << 32 | u64::from(command))
        };
        return;
    }
    while read(register::COMMAND) & PENDING != 0 {
        core::hint::spin_loop();
    }
    write(register::COMMAND_HIGH, to << 24);
    write(register::COMMAND, command);
}

/// Silences the legacy controllers, and finds out how to drive this processor's; once, on the first.
pub fn find() {
    // To vectors of their own, all masked.
    for (port, value) in [
        (0x20, 0x11),
        (0xa0, 0x11),
        (0x21, vector::LEGACY),
        (0xa1, vector::LEGACY + 8),
        (0x21, 4),
        (0xa1, 2),
        (0x21, 1),
        (0xa1, 1),
        (0x21, 0xff),
        (0xa1, 0xff),
    ] {
        // SAFETY: the legacy interrupt controllers, which nobody else drives.
        unsafe { port::write_u8(port, value) };
    }
    X2.store(cpu::has(Feature::X2Apic), Ordering::Relaxed);
    // SAFETY: every processor that runs 64-bit code has it.
    let base = unsafe { cpu::read_msr(msr::APIC_BASE) } & 0xf_ffff_f000;
    BASE.store(direct(base) as u64, Ordering::Relaxed);
}

/// Turns this processor's APIC on.
pub fn enable() {
    // SAFETY: on, and in the x2 mode if that is what is used.
    unsafe {
        let base = cpu::read_msr(msr::APIC_BASE) | 1 << 11;
        cpu::write_msr(msr::APIC_BASE, base);
        if X2.load(Ordering::Relaxed) {
            cpu::write_msr(msr::APIC_BASE, base | 1 << 10);
        }
    }
    write(register::SPURIOUS, 1 << 8 | u32::from(vector::SPURIOUS));
    write(register::TIMER_DIVIDE, 0b1011);
    let deadline = if cpu::has(Feature::TscDeadline) { DEADLINE } else { 0 };
    write(register::TIMER, u32::from(vector::TIMER) | deadline);
}

/// The number of this processor's APIC.
pub fn id() -> u32 {
    let id = read(register::ID);
    if X2.load(Ordering::Relaxed) { id } else { id >> 24 }
}

/// Tells the APIC that the interrupt is dealt with.
#[inline]
pub fn end_of_interrupt() {
    write(register::END, 0);
}

/// Interrupts processor `index` with `vector`.
pub fn interrupt(index: usize, vector: u8) {
    if let Some(to) = percpu::of(index) {
        interrupts::without(|| command(to.apic_id.load(Ordering::Relaxed), ASSERT | u32::from(vector)));
    }
}

/// Interrupts all other processors, whether they take interrupts or not.
pub fn interrupt_others_unmasked() {
    interrupts::without(|| command(0, ALL_OTHERS | ASSERT | NMI));
}

/// Makes another processor wait for [`start_up`].
pub fn initialise(apic_id: u32) {
    interrupts::without(|| command(apic_id, ASSERT | INIT));
}

/// Starts another processor in 16-bit code at `page`, below 1 MiB.
pub fn start_up(apic_id: u32, page: u64) {
    interrupts::without(|| command(apic_id, ASSERT | START_UP | (page >> 12) as u32));
}

/// Finds out how fast the timer counts. Takes some milliseconds.
pub fn calibrate() {
    if cpu::has(Feature::TscDeadline) {
        return;
    }
    write(register::TIMER, MASKED | u32::from(vector::TIMER));
    write(register::TIMER_START, u32::MAX);
    let (start, from) = clock::sample(|| read(register::TIMER_NOW).into());
    clock::pause(2_000_000);
    let (end, to) = clock::sample(|| read(register::TIMER_NOW).into());
    write(register::TIMER_START, 0);
    write(register::TIMER, u32::from(vector::TIMER));
    let nanoseconds = clock::nanoseconds(end) - clock::nanoseconds(start);
    RATE.store(((from - to) << 32) / nanoseconds.max(1), Ordering::Relaxed);
}

/// The timer of each processor.
pub mod timer {
    use super::*;

    /// Makes [`on_timer`](crate::task::on_timer) be called on this processor, with interrupts off, at `at` (ns, as [`now`](crate::arch::now)
    /// counts) or soon after. The last call counts; `u64::MAX`: not at all.
    pub fn arm(at: u64) {
        if cpu::has(Feature::TscDeadline) {
            let deadline = if at == u64::MAX { 0 } else { clock::timestamp_at(at) };
            // SAFETY: the processor has it. 0 disarms.
            unsafe { cpu::write_msr(msr::TSC_DEADLINE, deadline) };
            return;
        }
        if at == u64::MAX {
            write(register::TIMER_START, 0);
            return;
        }
        // What is too far for the timer interrupts early, and is armed anew.
        let ahead = at.saturating_sub(clock::now()).clamp(1_000, 1_000_000_000);
        let steps = ((u128::from(ahead) * u128::from(RATE.load(Ordering::Relaxed))) >> 32) as u64;
        write(register::TIMER_START, steps.clamp(1, u64::from(u32::MAX)) as u32);
    }
}

/// Leads the interrupt of COM1 to this processor.
pub fn route_serial() {
    let Some((base, first)) = acpi::io_apic() else { return };
    let Some(pin) = 4u32.checked_sub(first) else { return };
    let at = direct(base) as *mut u32;
    let entry = |register: u32, value: u32| {
        // SAFETY: the I/O APIC's window: a register's number, then its value.
        unsafe {
            at.write_volatile(register);
            at.add(4).write_volatile(value);
        }
    };
    entry(0x10 + 2 * pin + 1, percpu::this().apic_id.load(Ordering::Relaxed) << 24);
    entry(0x10 + 2 * pin, vector::SERIAL.into());
}
