//! Registers and instructions of the processor that have no better place.

use core::arch::asm;
use core::arch::x86_64::{__cpuid_count, CpuidResult};
use core::sync::atomic::{AtomicU32, Ordering};

/// Model-specific registers.
pub mod msr {
    /// Where the local APIC is, and its mode.
    pub const APIC_BASE: u32 = 0x1b;
    /// When the timer is to interrupt, as the TSC counts.
    pub const TSC_DEADLINE: u32 = 0x6e0;
    /// The first register of the local APIC in its x2 mode.
    pub const X2APIC: u32 = 0x800;
    /// Segments of system calls.
    pub const STAR: u32 = 0xc000_0081;
    /// Where a system call enters.
    pub const LSTAR: u32 = 0xc000_0082;
    /// Flags that a system call clears.
    pub const FMASK: u32 = 0xc000_0084;
    /// The base of FS.
    pub const FS_BASE: u32 = 0xc000_0100;
    /// The base of GS.
    pub const GS_BASE: u32 = 0xc000_0101;
    /// What `swapgs` exchanges it with.
    pub const KERNEL_GS_BASE: u32 = 0xc000_0102;
}

/// Reads a model-specific register.
///
/// # Safety
/// There is such a register.
#[inline]
pub unsafe fn read_msr(register: u32) -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: by the caller; reading changes nothing.
    unsafe {
        asm!("rdmsr", in("ecx") register, out("eax") low, out("edx") high, options(nomem, nostack, preserves_flags));
    }
    u64::from(high) << 32 | u64::from(low)
}

/// Writes a model-specific register.
///
/// # Safety
/// There is such a register, it takes this value, and what the kernel relies on stays true.
#[inline]
pub unsafe fn write_msr(register: u32, value: u64) {
    // SAFETY: by the caller.
    unsafe {
        asm!("wrmsr", in("ecx") register, in("eax") value as u32, in("edx") (value >> 32) as u32,
             options(nostack, preserves_flags));
    }
}

/// What the processor says of itself.
#[inline]
pub fn cpuid(leaf: u32, sub: u32) -> CpuidResult {
    __cpuid_count(leaf, sub)
}

/// The highest leaf of `cpuid`.
pub fn highest_leaf() -> u32 {
    cpuid(0, 0).eax
}

/// Features that the kernel decides by, as bits of one word.
#[derive(Clone, Copy)]
#[repr(u32)]
pub enum Feature {
    /// The local APIC by model-specific registers.
    X2Apic = 1,
    /// The timer by a deadline.
    TscDeadline = 2,
    /// Tagged translations.
    Pcid = 4,
    /// The kernel does not reach programs' memory by accident.
    Smap = 8,
    /// The kernel does not run programs' code.
    Smep = 16,
    /// Pages of 1 GiB.
    HugePages = 32,
    /// `rdrand`.
    Random = 64,
    /// `xsave`.
    Xsave = 128,
    /// `pause` costs no more than a few nanoseconds. QEMU's emulation takes it as an occasion to look after everything
    /// else, under a lock that page faults take too.
    Pause = 256,
}

static FEATURES: AtomicU32 = AtomicU32::new(0);

/// Looks which features there are.
pub fn find_features() {
    let mut found = 0;
    let one = cpuid(1, 0).ecx;
    let mut note = |there: bool, feature: Feature| {
        if there {
            found |= feature as u32;
        }
    };
    note(one & 1 << 21 != 0, Feature::X2Apic);
    note(one & 1 << 24 != 0, Feature::TscDeadline);
    note(one & 1 << 17 != 0, Feature::Pcid);
    note(one & 1 << 26 != 0, Feature::Xsave);
    note(one & 1 << 30 != 0, Feature::Random);
    if highest_leaf() >= 7 {
        let seven = cpuid(7, 0).ebx;
        note(seven & 1 << 7 != 0, Feature::Smep);
        note(seven & 1 << 20 != 0, Feature::Smap);
    }
    if cpuid(0x8000_0000, 0).eax >= 0x8000_0001 {
        note(cpuid(0x8000_0001, 0).edx & 1 << 26 != 0, Feature::HugePages);
    }
    let maker = cpuid(0x4000_0000, 0);
    let is_emulated =
        one & 1 << 31 != 0 && [maker.ebx, maker.ecx, maker.edx] == [0x5447_4354, 0x4354_4743, 0x4743_5447];
    note(!is_emulated, Feature::Pause);
    if !is_emulated {
        super::memory::use_string_instructions();
    }
    FEATURES.store(found, Ordering::Relaxed);
}

/// True when the processors have it.
#[inline]
pub fn has(feature: Feature) -> bool {
    FEATURES.load(Ordering::Relaxed) & feature as u32 != 0
}

/// The time stamp counter.
#[inline]
pub fn timestamp() -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: reads a counter. The fence keeps the reading from moving before earlier loads.
    unsafe {
        asm!("lfence", "rdtsc", out("eax") low, out("edx") high, options(nomem, nostack, preserves_flags))
    };
    u64::from(high) << 32 | u64::from(low)
}

/// A number that the processor's generator gives, if it has one.
pub fn random() -> Option<u64> {
    if !has(Feature::Random) {
        return None;
    }
    (0..16).find_map(|_| {
        let (value, good): (u64, u8);
        // SAFETY: only registers change.
        unsafe { asm!("rdrand {}", "setc {}", out(reg) value, out(reg_byte) good, options(nomem, nostack)) };
        (good != 0).then_some(value)
    })
}

/// The address of the last page fault.
#[inline]
pub fn fault_address() -> u64 {
    let value: u64;
    // SAFETY: reading changes nothing.
    unsafe { asm!("mov {}, cr2", out(reg) value, options(nomem, nostack, preserves_flags)) };
    value
}

/// The root of the page table, with its flags.
#[inline]
pub fn read_cr3() -> u64 {
    let value: u64;
    // SAFETY: reading changes nothing.
    unsafe { asm!("mov {}, cr3", out(reg) value, options(nomem, nostack, preserves_flags)) };
    value
}

/// Sets the root of the page table.
///
/// # Safety
/// The table maps the kernel as all do, and stays while it is used.
#[inline]
pub unsafe fn write_cr3(value: u64) {
    // SAFETY: by the caller.
    unsafe { asm!("mov cr3, {}", in(reg) value, options(nostack, preserves_flags)) };
}

/// Control register 4.
#[inline]
pub fn read_cr4() -> u64 {
    let value: u64;
    // SAFETY: reading changes nothing.
    unsafe { asm!("mov {}, cr4", out(reg) value, options(nomem, nostack, preserves_flags)) };
    value
}

/// Sets control register 4.
///
/// # Safety
/// The processor has the features, and what the kernel relies on stays true.
#[inline]
pub unsafe fn write_cr4(value: u64) {
    // SAFETY: by the caller.
    unsafe { asm!("mov cr4, {}", in(reg) value, options(nostack, preserves_flags)) };
}

/// Bits of control register 4.
pub mod cr4 {
    /// Global pages.
    pub const PGE: u64 = 1 << 7;
    /// Tagged translations.
    pub const PCIDE: u64 = 1 << 17;
    /// `xsave`.
    pub const OSXSAVE: u64 = 1 << 18;
    /// No programs' code in the kernel.
    pub const SMEP: u64 = 1 << 20;
    /// No programs' memory in the kernel, but between `stac` and `clac`.
    pub const SMAP: u64 = 1 << 21;
}

/// Drops the translations of one page, in the tables that run.
#[inline]
pub fn drop_translation(addr: u64) {
    // SAFETY: forgetting a translation is always right.
    unsafe { asm!("invlpg [{}]", in(reg) addr, options(nostack, preserves_flags)) };
}

/// Drops all translations, also of global pages.
pub fn drop_all_translations() {
    let value = read_cr4();
    // SAFETY: as it was, in the end. Any change of PGE drops all.
    unsafe {
        write_cr4(value ^ cr4::PGE);
        write_cr4(value);
    }
}
