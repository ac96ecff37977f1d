//! Terrane's host: physical memory, translation caches, waiting.

use crate::sync::{RawMutex, RawRwLock};
use core::ptr::NonNull;
use terrane::host::{File, FrameRange, Host, IoError, Memory, Observe, ShootDown, Ticket, Tlb, Wait};
use terrane::page_table::X86_64;
use terrane::sync::CpuId;
use terrane::sync::atomic::AtomicU32;
use terrane::{AddrRange, Frame};

/// The hardware.
pub struct KernelHost {
    frames: FrameRange,
}

/// A file whose bytes are not in memory: there are none, all files are shared objects of Terrane's.
pub enum KernelFile {}

impl File for KernelFile {
    fn len(&self) -> u64 {
        match *self {}
    }
    fn read_at(&self, _: u64, _: &mut [u8]) -> Result<usize, IoError> {
        match *self {}
    }
    fn write_at(&self, _: u64, _: &[u8]) -> Result<(), IoError> {
        match *self {}
    }
    fn is_writable(&self) -> bool {
        match *self {}
    }
}

// SAFETY: to come.
unsafe impl Memory for KernelHost {
    fn frames(&self) -> FrameRange {
        self.frames
    }
    fn bytes(&self, _: Frame) -> NonNull<u8> {
        todo!()
    }
}

// SAFETY: to come.
unsafe impl Tlb for KernelHost {
    type Space = ();
    fn shoot_down(&self, _: CpuId, _: &(), _: AddrRange) -> ShootDown {
        todo!()
    }
    fn has_passed(&self, _: CpuId, _: Ticket) -> bool {
        true
    }
    fn settle(&self, _: CpuId, _: Ticket) {}
}

impl Wait for KernelHost {
    fn wait(&self, _: CpuId, _: &AtomicU32, _: u32) {
        todo!()
    }
    fn wake_all(&self, _: &AtomicU32) {}
}

impl Observe for KernelHost {}

impl Host for KernelHost {
    type Format = X86_64;
    type File = KernelFile;
    type RwLock = RawRwLock;
    type Mutex = RawMutex;
}
