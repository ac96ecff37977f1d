//! Showing the mappings.

use super::AddressSpace;
use crate::addr::{AddrRange, PAGE_SHIFT};
use crate::error::{Error, OutOfMemory};
use crate::host::Host;
use crate::machine::Cpu;
use crate::vma::{Prot, VmFlags};
use alloc::vec::Vec;
use core::fmt;
use core::ops::ControlFlow;

/// What a mapping shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Backing {
    /// Private memory.
    Anonymous,
    /// Private memory that `brk` moves the end of.
    Heap,
    /// Private memory that grows downwards.
    Stack,
    /// Memory shared between spaces.
    Shared,
    /// A file.
    File,
}

/// One VMA, as it was when the listing was made. Prints as a line of `/proc/pid/maps`, without device, inode and
/// path, which only the host knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapping {
    /// Addresses, in bytes.
    pub range: AddrRange,
    /// What is allowed.
    pub prot: Prot,
    /// True when stores reach the object.
    pub shared: bool,
    /// Where in the object it starts, in bytes; 0 for private memory.
    pub offset: u64,
    /// What it shows.
    pub backing: Backing,
    /// All attributes.
    pub flags: VmFlags,
}

impl fmt::Display for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = |set: bool, c: char| if set { c } else { '-' };
        write!(
            f,
            "{:08x}-{:08x} {}{}{}{} {:08x} 00:00 0",
            self.range.start,
            self.range.end,
            mark(self.prot.contains(Prot::READ), 'r'),
            mark(self.prot.contains(Prot::WRITE), 'w'),
            mark(self.prot.contains(Prot::EXEC), 'x'),
            if self.shared { 's' } else { 'p' },
            self.offset,
        )?;
        match self.backing {
            Backing::Heap => f.write_str("    [heap]"),
            Backing::Stack => f.write_str("    [stack]"),
            _ => Ok(()),
        }
    }
}

impl<H: Host> AddressSpace<H> {
    /// The mappings, ascending: one consistent state. O(n).
    ///
    /// # Errors
    /// [`Error::NoMemory`].
    pub fn mappings(&self, cpu: &Cpu<H>) -> Result<Vec<Mapping>, Error> {
        let mut list: Vec<Mapping> = Vec::new();
        let layout = self.mm().layout.read();
        list.try_reserve_exact(self.mm().index.len()).map_err(|_| OutOfMemory)?;
        let heap = layout.heap;
        let pin = cpu.pin();
        self.mm().index.for_each(&pin, AddrRange::new(0, u64::MAX), |vma| {
            let seen = vma.snapshot();
            let backing = match vma.object() {
                Some(object) if object.is_file() => Backing::File,
                Some(_) => Backing::Shared,
                None if seen.range.start <= heap.end && heap.start < seen.range.end && !heap.is_empty() => {
                    Backing::Heap
                }
                None if seen.flags.contains(VmFlags::GROWSDOWN) => Backing::Stack,
                None => Backing::Anonymous,
            };
            list.push(Mapping {
                range: seen.range,
                prot: seen.flags.prot(),
                shared: !seen.flags.is_private(),
                offset: if vma.object().is_some() { seen.pgoff << PAGE_SHIFT } else { 0 },
                backing,
                flags: seen.flags,
            });
            ControlFlow::Continue(())
        });
        Ok(list)
    }
}
