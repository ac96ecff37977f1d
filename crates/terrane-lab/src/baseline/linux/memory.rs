//! Memory of the kernel's, and its account of our faults.

use crate::failure::Failure;
use crate::report::Counters;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::ffi::c_void;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};

/// The size of a page, in bytes.
pub fn page_size() -> usize {
    rustix::param::page_size()
}

/// A mapping of our own, unmapped when dropped.
pub struct Memory {
    address: NonNull<u8>,
    length: usize,
}

// SAFETY: `Memory` is nothing but a range of addresses that it alone unmaps; all access to its bytes is by raw
// pointers, volatile, and of single bytes, whose values nobody relies on.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Private anonymous memory in pages of the ordinary size: huge pages would be measured for something else.
    pub fn anonymous(length: usize, prot: ProtFlags) -> Result<Self, Failure> {
        let memory = Self::anonymous_as_it_comes(length, prot)?;
        // A kernel without huge pages refuses this, and is right.
        let _ = memory.advise(Advice::LinuxNoHugepage);
        Ok(memory)
    }

    /// The same by one call, in pages of the size that the kernel likes.
    pub fn anonymous_as_it_comes(length: usize, prot: ProtFlags) -> Result<Self, Failure> {
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let address = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), length, prot, MapFlags::PRIVATE) };
        Self::of(address, length)
    }

    /// The first `length` bytes of a file, shared, for reading.
    pub fn file(file: impl AsFd, length: usize, flags: MapFlags) -> Result<Self, Failure> {
        Self::of_file(file, length, ProtFlags::READ, MapFlags::SHARED | flags)
    }

    /// The first `length` bytes of a file; whoever lets stores reach it (`SHARED`) has the file to himself.
    pub fn of_file(
        file: impl AsFd,
        length: usize,
        prot: ProtFlags,
        flags: MapFlags,
    ) -> Result<Self, Failure> {
        // SAFETY: as above.
        let address = unsafe { rustix::mm::mmap(ptr::null_mut(), length, prot, flags, file, 0) };
        Self::of(address, length)
    }

    fn of(address: rustix::io::Result<*mut c_void>, length: usize) -> Result<Self, Failure> {
        let address = address.map_err(|e| Failure::broken("cannot map memory", e))?;
        let address =
            NonNull::new(address.cast()).ok_or_else(|| Failure::Broken("memory was mapped at 0".into()))?;
        Ok(Self { address, length })
    }

    /// The address of byte `offset`.
    ///
    /// # Panics
    /// If it is not inside.
    pub fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset < self.length);
        // SAFETY: checked to be inside.
        unsafe { self.address.as_ptr().add(offset) }
    }

    /// The number of bytes.
    pub fn length(&self) -> usize {
        self.length
    }

    /// madvise on all of it.
    pub fn advise(&self, advice: Advice) -> rustix::io::Result<()> {
        self.advise_part(0, self.length, advice)
    }

    /// madvise on `length` bytes from `offset`.
    pub fn advise_part(&self, offset: usize, length: usize, advice: Advice) -> rustix::io::Result<()> {
        // SAFETY: the range is ours, and whoever discards its contents does so because nobody relies on them.
        unsafe { rustix::mm::madvise(self.at(offset).cast(), length, advice) }
    }

    /// mprotect on `length` bytes from `offset`.
    pub fn protect(
        &self,
        offset: usize,
        length: usize,
        prot: rustix::mm::MprotectFlags,
    ) -> Result<(), Failure> {
        // SAFETY: the range is ours, and nobody touches what is protected.
        unsafe { rustix::mm::mprotect(self.at(offset).cast(), length, prot) }
            .map_err(|e| Failure::broken("cannot protect memory", e))
    }

    /// Writes a byte to each page of `length` bytes from `offset`.
    #[inline]
    pub fn write_pages(&self, offset: usize, length: usize) {
        assert!(offset + length <= self.length);
        for at in (offset..offset + length).step_by(page_size()) {
            // SAFETY: checked to be inside; the callers mapped it for writing.
            unsafe { self.address.as_ptr().add(at).write_volatile(1) };
        }
    }

    /// Reads the byte at `offset`.
    #[inline]
    pub fn read_byte(&self, offset: usize) -> u8 {
        // SAFETY: `at` checks that it is inside; the callers mapped it for reading.
        unsafe { self.at(offset).read_volatile() }
    }

    /// Reads a byte of each page of all of it.
    #[inline]
    pub fn read_pages(&self) {
        for at in (0..self.length).step_by(page_size()) {
            // SAFETY: inside; the callers mapped it for reading.
            unsafe { self.address.as_ptr().add(at).read_volatile() };
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nobody has a pointer into it any more.
        let _ = unsafe { rustix::mm::munmap(self.address.as_ptr().cast(), self.length) };
    }
}

/// The kernel's counts of this process and its children that are gone: minor faults, major faults, context
/// switches wanted and not.
pub fn counters() -> [u64; 4] {
    let mut sums = [0; 4];
    for who in [libc::RUSAGE_SELF, libc::RUSAGE_CHILDREN] {
        // SAFETY: all zero is a valid value of this plain record.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel fills in a record that is ours; on failure it stays zero.
        unsafe { libc::getrusage(who, &raw mut usage) };
        let counts = [usage.ru_minflt, usage.ru_majflt, usage.ru_nvcsw, usage.ru_nivcsw];
        for (sum, count) in sums.iter_mut().zip(counts) {
            *sum += u64::try_from(count).unwrap_or(0);
        }
    }
    sums
}

/// What was counted since `before`, under the names of `/proc/vmstat` and `perf stat`.
pub fn counted_since(before: &[u64; 4]) -> Counters {
    let now = counters();
    let since = |index: usize| now[index].saturating_sub(before[index]);
    Counters::from([
        ("pgfault", since(0) + since(1)),
        ("pgmajfault", since(1)),
        ("context-switches", since(2) + since(3)),
    ])
}
