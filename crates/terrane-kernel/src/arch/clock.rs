//! Time: the time stamp counter, measured against a clock of known speed.
//!
//! The emulator's processors are threads that may be interrupted between two readings, for milliseconds. So a reading of another
//! clock is taken between two of the counter, several times, and the tightest one counts.

use super::cpu;
use super::{acpi, port};
use crate::mm::direct;
use core::sync::atomic::{AtomicU64, Ordering};

/// The counter at the start of the kernel.
static START: AtomicU64 = AtomicU64::new(0);
/// Nanoseconds a step, as a fraction of 2^32.
static SCALE: AtomicU64 = AtomicU64::new(1 << 32);
/// Steps a nanosecond, as a fraction of 2^32.
static RATE: AtomicU64 = AtomicU64::new(1 << 32);
/// Nanoseconds from 1970 to the start of the kernel.
static EPOCH: AtomicU64 = AtomicU64::new(0);

/// How long the counter is measured, in nanoseconds.
const MEASURE: u64 = 8_000_000;

/// Reads another clock, with the counter at that moment.
pub fn sample(mut read: impl FnMut() -> u64) -> (u64, u64) {
    let mut best = (u64::MAX, 0, 0);
    for _ in 0..8 {
        let before = cpu::timestamp();
        let value = read();
        let width = cpu::timestamp() - before;
        if width < best.0 {
            best = (width, before + width / 2, value);
        }
    }
    (best.1, best.2)
}

/// Remembers when the kernel started. First of all.
pub fn start() {
    START.store(cpu::timestamp(), Ordering::Relaxed);
}

/// Measures the counter, and reads the date.
pub fn set_up() {
    let frequency = known_frequency().unwrap_or_else(measure).max(1);
    SCALE.store((1_000_000_000u64 << 32).checked_div(frequency).unwrap_or(1), Ordering::Relaxed);
    RATE.store(((u128::from(frequency) << 32) / 1_000_000_000) as u64, Ordering::Relaxed);
    EPOCH.store((date() * 1_000_000_000).saturating_sub(now()), Ordering::Relaxed);
}

/// What a hypervisor or the processor says, in Hz.
fn known_frequency() -> Option<u64> {
    let is_virtual = cpu::cpuid(1, 0).ecx & 1 << 31 != 0;
    if is_virtual {
        let highest = cpu::cpuid(0x4000_0000, 0).eax;
        if (0x4000_0010..0x4000_1000).contains(&highest) {
            let khz = cpu::cpuid(0x4000_0010, 0).eax;
            return (khz != 0).then_some(u64::from(khz) * 1000);
        }
        return None;
    }
    if cpu::highest_leaf() < 0x15 {
        return None;
    }
    let leaf = cpu::cpuid(0x15, 0);
    (leaf.eax != 0 && leaf.ebx != 0 && leaf.ecx != 0)
        .then(|| u64::from(leaf.ecx) * u64::from(leaf.ebx) / u64::from(leaf.eax))
}

fn measure() -> u64 {
    if let Some(base) = acpi::hpet() {
        let at = direct(base) as *mut u64;
        // SAFETY: the registers of the HPET: capabilities, configuration, counter. Nobody else drives it.
        unsafe {
            let femtoseconds = at.read_volatile() >> 32;
            at.add(2).write_volatile(at.add(2).read_volatile() | 1);
            if let Some(steps) = (MEASURE * 1_000_000).checked_div(femtoseconds) {
                return measure_with(|| at.add(30).read_volatile() as u32, steps as u32, femtoseconds);
            }
        }
    }
    // The first counter of the PIT: counts down from 65536 at 1193182 Hz.
    // SAFETY: nobody else drives it, and its interrupt is masked.
    unsafe {
        port::write_u8(0x43, 0x34);
        port::write_u8(0x40, 0);
        port::write_u8(0x40, 0);
    }
    let read = || {
        // SAFETY: as above: latch the counter, read its two bytes.
        let count = unsafe {
            port::write_u8(0x43, 0);
            u16::from_le_bytes([port::read_u8(0x40), port::read_u8(0x40)])
        };
        // As the upper half of a counter that counts up, so that differences wrap as they should.
        u32::from(count.wrapping_neg()) << 16
    };
    let steps = (MEASURE * 1_193_182 / 1_000_000_000) as u32;
    measure_with(read, steps << 16, (1_000_000_000_000_000 / 1_193_182) >> 16)
}

/// Measures the counter against `read`, a clock whose steps take `femtoseconds`, for `steps` of them.
fn measure_with(read: impl Fn() -> u32, steps: u32, femtoseconds: u64) -> u64 {
    let (start, from) = sample(|| read().into());
    while read().wrapping_sub(from as u32) < steps {
        core::hint::spin_loop();
    }
    let (end, to) = sample(|| read().into());
    let passed = u128::from((to as u32).wrapping_sub(from as u32)) * u128::from(femtoseconds);
    (u128::from(end - start) * 1_000_000_000_000_000 / passed.max(1)) as u64
}

/// Nanoseconds since the start of the kernel at a reading of the counter.
#[inline]
pub fn nanoseconds(timestamp: u64) -> u64 {
    let steps = timestamp.wrapping_sub(START.load(Ordering::Relaxed));
    ((u128::from(steps) * u128::from(SCALE.load(Ordering::Relaxed))) >> 32) as u64
}

/// The counter at `at` nanoseconds since the start of the kernel.
pub fn timestamp_at(at: u64) -> u64 {
    START.load(Ordering::Relaxed) + ((u128::from(at) * u128::from(RATE.load(Ordering::Relaxed))) >> 32) as u64
}

/// Nanoseconds since the start of the kernel.
#[inline]
pub fn now() -> u64 {
    nanoseconds(cpu::timestamp())
}

/// Nanoseconds since 1970.
#[inline]
pub fn realtime() -> u64 {
    EPOCH.load(Ordering::Relaxed) + now()
}

/// Makes it `at` nanoseconds since 1970.
pub fn set_realtime(at: u64) {
    EPOCH.store(at.saturating_sub(now()), Ordering::Relaxed);
}

/// Waits `length` nanoseconds.
pub fn pause(length: u64) {
    let until = now() + length;
    while now() < until {
        super::relax();
    }
}

/// Seconds from 1970 to now, by the clock with the battery.
fn date() -> u64 {
    let read = |register: u8| {
        // SAFETY: reading the clock changes nothing.
        unsafe {
            port::write_u8(0x70, 0x80 | register);
            u64::from(port::read_u8(0x71))
        }
    };
    let all = || [0, 2, 4, 7, 8, 9].map(read);
    let is_busy = || read(10) & 0x80 != 0;
    let mut fields = all();
    // Twice the same: it did not change meanwhile. A clock that never stands still is as good as none.
    for _ in 0..1000 {
        let again = all();
        if again == fields && !is_busy() {
            break;
        }
        fields = again;
    }
    let mode = read(11);
    if mode & 4 == 0 {
        fields = fields
            .map(|field| (field & 0x70) / 16 * 10 + field % 16 + if field & 0x80 != 0 { 80 } else { 0 });
    }
    let [second, minute, hour, day, month, year] = fields;
    // Days since 1970: as if years began in March. H. Hinnant, "chrono-compatible low-level date algorithms".
    let year = 2000 + year - u64::from(month <= 2);
    let month = (month + 9) % 12;
    let days =
        365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day.max(1) - 1 - 719_468;
    ((days * 24 + hour) * 60 + minute) * 60 + second
}
