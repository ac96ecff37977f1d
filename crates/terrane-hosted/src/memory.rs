//! Physical memory: one reservation of the process, cut into frames.
//!
//! The reservation is private anonymous memory that the kernel backs when it is touched (`MAP_NORESERVE`), so a
//! machine costs what it uses. Frame numbers begin at [`FIRST_FRAME`], a multiple of 512: frame 0 is never handed
//! out, and 512 frames that are aligned by number are 2 MiB that are aligned in the process too, so that a huge
//! page of the machine can be a huge page of the kernel.

use crate::error::HostedError;
use core::ptr::{self, NonNull};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use terrane::addr::{Frame, PAGE_SHIFT, PAGE_SIZE, TABLE_ENTRIES};
use terrane::host::{Back, FrameRange};

/// The number of the first frame.
const FIRST_FRAME: u32 = TABLE_ENTRIES as u32;
/// Bytes that one entry of a second-level table maps.
const BLOCK: usize = PAGE_SIZE as usize * TABLE_ENTRIES;

/// The memory of a hosted machine. Given back when dropped.
pub(crate) struct Memory {
    /// What `mmap` returned, and its length in bytes: the frames, and up to one block to align them.
    mapping: (NonNull<u8>, usize),
    /// Where the first frame is.
    base: NonNull<u8>,
    frames: usize,
    huge_pages: bool,
}

// SAFETY: the reservation belongs to no thread; what is done with its bytes is for the frames' owners to order.
unsafe impl Send for Memory {}
// SAFETY: as above; the value itself never changes.
unsafe impl Sync for Memory {}

impl Memory {
    /// Reserves `bytes`, rounded up to whole frames. With `huge_pages` the kernel is asked to back the memory with
    /// huge pages, which makes misses of the processor's own TLB rarer and first touches fewer.
    pub fn new(bytes: u64, huge_pages: bool) -> Result<Self, HostedError> {
        if bytes == 0 {
            return Err(HostedError::NoMemoryAsked);
        }
        let reach = u64::from(u32::MAX - FIRST_FRAME) << PAGE_SHIFT;
        let available = available_memory().unwrap_or(reach).min(reach);
        if bytes > available {
            return Err(HostedError::MemoryTooLarge { asked: bytes, available });
        }
        let frames = bytes.div_ceil(PAGE_SIZE) as usize;
        let length = frames * PAGE_SIZE as usize + BLOCK;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping where the kernel likes: it replaces nothing.
        let start =
            unsafe { mmap_anonymous(ptr::null_mut(), length, ProtFlags::READ | ProtFlags::WRITE, flags)? };
        let start = NonNull::new(start.cast::<u8>()).ok_or(HostedError::OutOfMemory)?;
        // SAFETY: the mapping is a block longer than the frames need.
        let base = unsafe { start.add(start.align_offset(BLOCK)) };
        let advice = advice(huge_pages);
        // A kernel built without huge pages refuses the advice, and nothing depends on its being taken.
        // SAFETY: the range is ours, and neither advice changes its contents.
        let _ = unsafe { madvise(base.as_ptr().cast(), frames * PAGE_SIZE as usize, advice) };
        Ok(Self { mapping: (start, length), base, frames, huge_pages })
    }

    /// What asks the kernel to back other memory by huge pages, if the machine is to have them.
    pub fn back(&self) -> Option<Back> {
        self.huge_pages.then_some(back)
    }

    /// The frames there are.
    #[inline]
    pub fn frames(&self) -> FrameRange {
        FrameRange { first: Frame(FIRST_FRAME), count: self.frames }
    }

    /// Where the bytes of `frame` are. For a frame that the machine does not have, the result is dangling and must
    /// not be used; computing it is harmless.
    #[inline]
    pub fn bytes(&self, frame: Frame) -> NonNull<u8> {
        debug_assert!((frame.0.wrapping_sub(FIRST_FRAME) as usize) < self.frames, "no such frame: {frame:?}");
        let offset = (frame.0.wrapping_sub(FIRST_FRAME) as usize) << PAGE_SHIFT;
        let address = self.base.as_ptr().wrapping_add(offset);
        // Wrapping round to null would take a frame number beyond the machine; such a caller gets the base.
        NonNull::new(address).unwrap_or(self.base)
    }
}

fn back(memory: NonNull<u8>, length: usize) {
    // A kernel built without huge pages refuses the advice, and nothing depends on its being taken.
    // SAFETY: it does not change what is in the memory, whoever has it.
    let _ = unsafe { madvise(memory.as_ptr().cast(), length, advice(true)) };
}

fn advice(huge_pages: bool) -> Advice {
    if huge_pages { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let (start, length) = self.mapping;
        // SAFETY: our own mapping; the machine that handed out its frames is gone, or never was.
        let _ = unsafe { munmap(start.as_ptr().cast(), length) };
    }
}

/// `MemAvailable` of `/proc/meminfo`, in bytes; `None` when that cannot be read.
fn available_memory() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_memory_and_blocks_are_aligned() {
        let memory = Memory::new(5 << 20, true).unwrap();
        let FrameRange { first, count } = memory.frames();
        assert_eq!(count, 5 << 8);
        assert!(first.0 >= 1 && (first.0 as usize).is_multiple_of(TABLE_ENTRIES));
        assert_eq!(memory.bytes(first).as_ptr() as usize % BLOCK, 0);
        for n in [0, 1, count as u32 - 1] {
            let bytes = memory.bytes(Frame(first.0 + n));
            // SAFETY: a frame of the machine, which the test alone uses.
            unsafe {
                assert_eq!(bytes.read(), 0);
                bytes.write_bytes(0xa5, PAGE_SIZE as usize);
                assert_eq!(bytes.add(PAGE_SIZE as usize - 1).read(), 0xa5);
            }
        }
    }

    #[test]
    fn sizes_that_cannot_be_had_are_refused() {
        assert_eq!(Memory::new(0, false).err(), Some(HostedError::NoMemoryAsked));
        assert!(matches!(
            Memory::new(u64::MAX, false),
            Err(HostedError::MemoryTooLarge { asked: u64::MAX, .. })
        ));
        let error = Memory::new(1 << 60, true).err().unwrap();
        assert!(error.to_string().contains("available"), "{error}");
        assert_eq!(Memory::new(1, false).unwrap().frames().count, 1);
    }

    #[test]
    fn the_system_says_what_is_available() {
        assert!(available_memory().unwrap() > 1 << 20);
    }
}
