//! The x87 and vector registers of programs.
//!
//! Entries save the 16 SSE registers, which the kernel uses; all others keep the program's values while the kernel runs, and
//! are saved when another thread is to run.

use super::cpu::{self, Feature, cr4};
use alloc::alloc::{Layout, alloc_zeroed, dealloc};
use core::arch::asm;
use core::ptr::NonNull;
use core::slice;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use terrane::OutOfMemory;

/// x87, SSE, AVX, AVX-512.
const WANTED: u64 = 0b1110_0111;
/// Size of what `fxsave` writes.
const LEGACY: usize = 512;
/// Size of the header of what `xsave` writes more.
const HEADER: usize = 64;

static SIZE: AtomicU32 = AtomicU32::new(LEGACY as u32);
static COMPONENTS: AtomicU64 = AtomicU64::new(0b11);
static MXCSR_MASK: AtomicU32 = AtomicU32::new(0xffbf);

/// Sets this processor up, after the features are known.
pub fn set_up() {
    if cpu::has(Feature::Xsave) {
        let components = u64::from(cpu::cpuid(0xd, 0).eax) & WANTED;
        // SAFETY: the processor has it, and the components are among those it names; 0 and 1 always are.
        unsafe {
            cpu::write_cr4(cpu::read_cr4() | cr4::OSXSAVE);
            asm!("xsetbv", in("ecx") 0, in("eax") components as u32, in("edx") (components >> 32) as u32,
                 options(nomem, nostack, preserves_flags));
        }
        COMPONENTS.store(components, Ordering::Relaxed);
        SIZE.store(cpu::cpuid(0xd, 0).ebx, Ordering::Relaxed);
    }
    // SAFETY: a known state: exceptions masked.
    unsafe { asm!("fninit", "ldmxcsr [{}]", in(reg) &0x1f80u32, options(nostack)) };
    #[repr(C, align(16))]
    struct Area([u8; LEGACY]);
    let mut area = Area([0; LEGACY]);
    // SAFETY: an area of the size and alignment that it takes.
    unsafe { asm!("fxsave64 [{}]", in(reg) area.0.as_mut_ptr(), options(nostack, preserves_flags)) };
    let mask = u32::from_le_bytes([area.0[28], area.0[29], area.0[30], area.0[31]]);
    if mask != 0 {
        MXCSR_MASK.store(mask, Ordering::Relaxed);
    }
}

/// The registers of a thread, as `xsave` writes them in its standard format. The 16 SSE registers in it are the
/// kernel's, of no use; those of the program are in its [`TrapFrame`](super::TrapFrame).
pub struct FpuState(NonNull<u8>);

// SAFETY: it owns its memory.
unsafe impl Send for FpuState {}
// SAFETY: what is shared is only read.
unsafe impl Sync for FpuState {}

impl FpuState {
    fn layout() -> Layout {
        // SAFETY: a size of some KiB, and a power of two.
        unsafe { Layout::from_size_align_unchecked(SIZE.load(Ordering::Relaxed) as usize, 64) }
    }

    /// The state that a program begins with.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn try_new() -> Result<Self, OutOfMemory> {
        // SAFETY: the layout has a size.
        let mut new = Self(NonNull::new(unsafe { alloc_zeroed(Self::layout()) }).ok_or(OutOfMemory)?);
        new.reset();
        Ok(new)
    }

    /// Makes it what a program begins with: for `execve`.
    pub fn reset(&mut self) {
        let bytes = self.bytes_mut();
        bytes.fill(0);
        bytes[..2].copy_from_slice(&0x37fu16.to_le_bytes());
        bytes[24..28].copy_from_slice(&0x1f80u32.to_le_bytes());
        if bytes.len() > LEGACY {
            bytes[LEGACY] = 0b11;
        }
    }

    /// A copy: for a fork.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn try_clone(&self) -> Result<Self, OutOfMemory> {
        let mut new = Self::try_new()?;
        new.bytes_mut().copy_from_slice(self.bytes());
        Ok(new)
    }

    /// Saves this processor's registers.
    #[inline]
    pub fn save(&mut self) {
        let at = self.0.as_ptr();
        // SAFETY: an area of the size and alignment that they take; the header of a new one is zero.
        unsafe {
            if cpu::has(Feature::Xsave) {
                asm!("xsave64 [{}]", in(reg) at, in("eax") u32::MAX, in("edx") u32::MAX, options(nostack, preserves_flags));
            } else {
                asm!("fxsave64 [{}]", in(reg) at, options(nostack, preserves_flags));
            }
        }
    }

    /// Loads them. What is in the area was saved, or [checked](Self::sanitize).
    #[inline]
    pub fn restore(&self) {
        let at = self.0.as_ptr();
        // SAFETY: what is there was saved, or checked, so that it does not fault. The SSE registers change under the
        // compiler: named.
        unsafe {
            if cpu::has(Feature::Xsave) {
                asm!("xrstor64 [{}]", in(reg) at, in("eax") u32::MAX, in("edx") u32::MAX, options(nostack, preserves_flags),
                     out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _, out("xmm4") _, out("xmm5") _,
                     out("xmm6") _, out("xmm7") _, out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                     out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _);
            } else {
                asm!("fxrstor64 [{}]", in(reg) at, options(nostack, preserves_flags),
                     out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _, out("xmm4") _, out("xmm5") _,
                     out("xmm6") _, out("xmm7") _, out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                     out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _);
            }
        }
    }

    /// The area: for the frame of a signal. The program's SSE registers belong at 160.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: allocated with this size, initialised.
        unsafe { slice::from_raw_parts(self.0.as_ptr(), Self::layout().size()) }
    }

    /// The same, to be changed; before it is restored, it must be [checked](Self::sanitize).
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { slice::from_raw_parts_mut(self.0.as_ptr(), Self::layout().size()) }
    }

    /// The components that are saved: `XCR0`.
    pub fn components() -> u64 {
        COMPONENTS.load(Ordering::Relaxed)
    }

    /// Makes what a program put there loadable: clears reserved bits.
    pub fn sanitize(&mut self) {
        let (mask, components) = (MXCSR_MASK.load(Ordering::Relaxed), Self::components());
        let bytes = self.bytes_mut();
        for (byte, mask) in bytes[24..28].iter_mut().zip(mask.to_le_bytes()) {
            *byte &= mask;
        }
        if bytes.len() > LEGACY {
            let (used, rest) = bytes[LEGACY..LEGACY + HEADER].split_at_mut(8);
            for (byte, mask) in used.iter_mut().zip(components.to_le_bytes()) {
                *byte &= mask;
            }
            rest.fill(0);
        }
    }
}

impl Drop for FpuState {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, which does not change.
        unsafe { dealloc(self.0.as_ptr(), Self::layout()) };
    }
}
