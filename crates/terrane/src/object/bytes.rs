//! Bytes of an object, read and written by the host: `read` and `write` of a file whose bytes are the pages that programs map.
//!
//! # Beside mappings, faults and reclaim
//!
//! Bytes are copied under a pin, so that a page taken out meanwhile keeps its frame. A write also holds the object's lock for
//! write-back and truncation: a page is written back, swapped out or moved only under that lock, so no copy of it is made without
//! what was written, and none is given up. Programs may load and store the same bytes meanwhile; each byte is as it was at some moment
//! during the call.

use super::{Object, Page};
use crate::addr::{Frame, PAGE_SHIFT, PAGE_SIZE};
use crate::error::{Error, FaultError};
use crate::host::Host;
use crate::machine::Cpu;
use core::ops::Range;
use core::ptr::NonNull;

impl<H: Host> Object<H> {
    /// Copies the bytes from `offset` on into `buffer`, and returns how many there were: fewer than asked for only at the end of the
    /// object. Pages of memory that were never touched read as zeros, and stay untouched. Blocks; not while pinned. O(bytes).
    ///
    /// # Errors
    /// [`Error::Io`] when a page cannot be read, [`Error::NoMemory`], if nothing comes before; [`Error::NoDevice`] for device memory.
    pub fn read(&self, cpu: &Cpu<H>, offset: u64, buffer: &mut [u8]) -> Result<usize, Error> {
        self.for_each_part(offset, buffer.len(), |index, within, part| {
            let Some(part) = buffer.get_mut(part) else { return Ok(false) };
            loop {
                let pin = cpu.pin();
                match self.page(&pin, index) {
                    Page::Ready(frame) => {
                        self.copy_out(frame, within, part);
                        return Ok(true);
                    }
                    Page::Absent if !self.is_file() => {
                        part.fill(0);
                        return Ok(true);
                    }
                    Page::BeyondEnd => return Ok(false),
                    other => {
                        drop(pin);
                        self.await_page(cpu, index, other)?;
                    }
                }
            }
        })
    }

    /// Copies `bytes` to `offset`, and returns how many there was room for: the object does not become longer
    /// ([`set_len`](Self::set_len) does that). Blocks; not while pinned. O(bytes).
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn write(&self, cpu: &Cpu<H>, offset: u64, bytes: &[u8]) -> Result<usize, Error> {
        self.for_each_part(offset, bytes.len(), |index, within, part| {
            let Some(part) = bytes.get(part) else { return Ok(false) };
            loop {
                let found = {
                    let _stays = self.lock_io();
                    let pin = cpu.pin();
                    let found = self.page(&pin, index);
                    if let Page::Ready(frame) = found {
                        self.copy_in(frame, within, part);
                        self.mark_dirty(frame);
                        return Ok(true);
                    }
                    found
                };
                if found == Page::BeyondEnd {
                    return Ok(false);
                }
                self.await_page(cpu, index, found)?;
            }
        })
    }

    /// Calls `copy` with the number of each page, where in the page to begin, and which part of the buffer it is, until it says that
    /// there is no such page. How many bytes that were.
    fn for_each_part(
        &self,
        offset: u64,
        count: usize,
        mut copy: impl FnMut(u64, usize, Range<usize>) -> Result<bool, Error>,
    ) -> Result<usize, Error> {
        if self.is_device() {
            return Err(Error::NoDevice);
        }
        let mut done = 0;
        while done < count {
            let at = offset.saturating_add(done as u64);
            let within = (at & (PAGE_SIZE - 1)) as usize;
            let left = usize::try_from(self.len().saturating_sub(at)).unwrap_or(usize::MAX);
            let part = (count - done).min(PAGE_SIZE as usize - within).min(left);
            if part == 0 {
                break;
            }
            match copy(at >> PAGE_SHIFT, within, done..done + part) {
                Ok(true) => done += part,
                Ok(false) => break,
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    /// Brings page `index`, which was found as `page`, nearer.
    fn await_page(&self, cpu: &Cpu<H>, index: u64, page: Page) -> Result<(), Error> {
        if let Page::Reading(frame) = page {
            self.wait_for(cpu, frame);
            return Ok(());
        }
        match self.read_in(cpu, index, true) {
            // Cut short meanwhile: the next look will say so.
            Ok(()) | Err(FaultError::BeyondEnd) => Ok(()),
            Err(FaultError::OutOfMemory) if cpu.find_memory() => Ok(()),
            Err(FaultError::OutOfMemory) => Err(Error::NoMemory),
            Err(_) => Err(Error::Io),
        }
    }

    fn copy_out(&self, frame: Frame, within: usize, to: &mut [u8]) {
        let host = self.machine().host();
        let from = host.bytes(frame);
        debug_assert!(within + to.len() <= PAGE_SIZE as usize);
        // SAFETY: inside the frame, which the caller's pin keeps; `to` is the caller's alone.
        unsafe { host.copy(from.add(within), NonNull::from(&mut *to).cast(), to.len()) };
    }

    fn copy_in(&self, frame: Frame, within: usize, from: &[u8]) {
        let host = self.machine().host();
        let to = host.bytes(frame);
        debug_assert!(within + from.len() <= PAGE_SIZE as usize);
        // SAFETY: inside the frame, which the caller's pin keeps; nobody writes `from`.
        unsafe { host.copy(NonNull::from(from).cast(), to.add(within), from.len()) };
    }
}
