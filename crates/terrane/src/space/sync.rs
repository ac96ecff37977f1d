//! `msync`: writing shared mappings of files back.

use super::AddressSpace;
use crate::addr::{AddrRange, PAGE_SIZE, is_page_aligned};
use crate::error::Error;
use crate::host::Host;
use crate::machine::Cpu;
use crate::vma::VmFlags;

bitflags::bitflags! {
    /// How to sync ([`msync`](AddressSpace::msync), `MS_…`).
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct SyncFlags: u32 {
        /// Nothing is done now.
        const ASYNC = 1;
        /// Mappings show what is in the file, as they always do; not for locked ones.
        const INVALIDATE = 2;
        /// Dirty pages are written before the call returns.
        const SYNC = 4;
    }
}

impl<H: Host> AddressSpace<H> {
    /// Writes the dirty pages of shared mappings of files in `len` bytes (rounded up to pages) at `addr`, with [`SyncFlags::SYNC`]
    /// among the bits of `flags`; without, only checks. One mapping after the other, also behind holes; nothing is held while pages are written.
    ///
    /// # Errors
    /// [`Error::Invalid`] for unknown flags, an unaligned address, or `ASYNC` with `SYNC`; [`Error::NoMemory`] for a range that
    /// wraps, or a hole (what is mapped is written all the same); [`Error::Busy`] with `INVALIDATE` for a locked
    /// mapping; [`Error::Io`] when the file has not taken a page, now or since it was last said: that page stays dirty, and
    /// what lies behind the mapping is not tried.
    pub fn msync(&self, cpu: &Cpu<H>, addr: u64, len: u64, flags: u32) -> Result<(), Error> {
        let flags = SyncFlags::from_bits(flags).ok_or(Error::Invalid)?;
        if !is_page_aligned(addr) || flags.contains(SyncFlags::ASYNC | SyncFlags::SYNC) {
            return Err(Error::Invalid);
        }
        // As Linux computes it: a length that wraps to nothing when it is rounded up is nothing.
        let len = len.wrapping_add(PAGE_SIZE - 1) & !(PAGE_SIZE - 1);
        let range = AddrRange::of_len(addr, len).ok_or(Error::NoMemory)?;
        let mut hole = false;
        let mut at = range.start;
        while at < range.end {
            let found = {
                let _steady = self.mm().share(cpu, AddrRange::new(at, range.end));
                let pin = cpu.pin();
                let vma = self.mm().next_vma(&pin, at, range.end);
                vma.map(|(vma, seen)| (seen, vma.object().cloned()))
            };
            let Some((seen, object)) = found else { return Err(Error::NoMemory) };
            let part = seen.range.intersection(AddrRange::new(at, range.end));
            if part.start > at {
                if flags == SyncFlags::ASYNC {
                    return Err(Error::NoMemory);
                }
                hole = true;
            }
            if flags.contains(SyncFlags::INVALIDATE) && seen.flags.contains(VmFlags::LOCKED) {
                return Err(Error::Busy);
            }
            if let Some(object) =
                object.filter(|_| flags.contains(SyncFlags::SYNC) && !seen.flags.is_private())
            {
                let first = seen.index_of(part.start);
                object.sync(cpu, first..first.saturating_add(part.pages()))?;
            }
            at = part.end;
        }
        if hole { Err(Error::NoMemory) } else { Ok(()) }
    }

    /// [`msync`](Self::msync) with [`SyncFlags::SYNC`].
    ///
    /// # Errors
    /// As [`msync`](Self::msync).
    pub fn sync(&self, cpu: &Cpu<H>, addr: u64, len: u64) -> Result<(), Error> {
        self.msync(cpu, addr, len, SyncFlags::SYNC.bits())
    }
}
