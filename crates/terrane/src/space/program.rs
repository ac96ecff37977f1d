//! Where a program begins: its stack, its heap, and the addresses that are left for mappings.
//!
//! As Linux's loader does it on a 64-bit machine, but for the random numbers, which are the host's to add. The stack lies at the top; it is mapped for
//! what the loader writes there and 128 KiB more, grows down by faults as far as its limit lets it, and keeps its guard gap. Mappings are looked
//! for below all that it may grow to ([`SpaceConfig::for_program`]).

use super::{AddressSpace, Limit, MapRequest, SpaceConfig};
use crate::addr::{AddrRange, PAGE_SIZE, is_page_aligned, page_ceil, page_floor};
use crate::error::Error;
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::{Layout, STACK_GUARD_GAP};
use crate::page_table::Format;
use crate::vma::{MapFlags, Prot};

/// What a stack can grow by at first, besides what the loader writes.
const ROOM: u64 = 128 << 10;
/// The least that is kept for a stack, below the top.
const GAP_MIN: u64 = 128 << 20;

/// What a loader says of a program. Addresses and lengths in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Program {
    /// Where the stack ends, page-aligned; 0 for the end of the space's range.
    pub stack_top: u64,
    /// How much the loader writes there: strings, pointers, and what the program is told besides.
    pub stack_bytes: u64,
    /// Code may run on the stack.
    pub executable_stack: bool,
    /// Where the heap begins: behind the program's data. 0 for no heap.
    pub heap: u64,
    /// The program's code, for [`Layout`].
    pub code: AddrRange,
}

impl SpaceConfig {
    /// The default, for a program whose stack may grow to `stack_limit` (`None` for no limit): it is the limit of the space, and mappings are
    /// looked for below what the stack may take, at least 128 MiB and at most five sixths of all addresses.
    pub fn for_program<F: Format>(stack_limit: Option<u64>) -> Self {
        let most = page_floor(F::USER_END / 6 * 5);
        let gap = stack_limit.unwrap_or(u64::MAX).saturating_add(STACK_GUARD_GAP).clamp(GAP_MIN, most);
        let map_top = page_floor(F::USER_END - gap);
        Self { map_top, stack_limit, ..Self::default() }
    }
}

impl<H: Host> AddressSpace<H> {
    /// Maps the stack of a program, says where its heap begins, and what listings are to know of it ([`set_layout`](Self::set_layout)). For a
    /// new space, or one that [`exec`](Self::exec) has emptied, before or after the program's segments are mapped. Returns the stack: the
    /// loader writes at its end.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a top that is unaligned or beyond the space, or a heap there; [`Error::NoMemory`] beyond a limit, when the loader
    /// writes more than the limit of the stack, or without memory; [`Error::Exists`] when something is mapped there. Nothing has changed then.
    pub fn start_program(&self, cpu: &Cpu<H>, program: &Program) -> Result<AddrRange, Error> {
        let limits = self.config().range;
        let top = if program.stack_top == 0 { limits.end } else { program.stack_top };
        if !is_page_aligned(top) || top > limits.end || top <= limits.start {
            return Err(Error::Invalid);
        }
        let written = page_ceil(program.stack_bytes.max(1)).ok_or(Error::NoMemory)?;
        let limit = page_floor(self.limit(Limit::Stack).unwrap_or(u64::MAX));
        // As in Linux: no more than the limit allows, but a page.
        let len = written.saturating_add(ROOM).min(limit.max(PAGE_SIZE));
        if written > len || len > top - limits.start {
            return Err(Error::NoMemory);
        }
        let stack = AddrRange::new(top - len, top);
        let mut prot = Prot::READ | Prot::WRITE;
        prot.set(Prot::EXEC, program.executable_stack);
        let request = MapRequest { addr: stack.start, ..MapRequest::anonymous(len, prot) };
        self.map(cpu, request.with(MapFlags::GROWSDOWN | MapFlags::FIXED_NOREPLACE))?;
        if program.heap != 0
            && let Err(error) = self.set_heap(cpu, program.heap)
        {
            // Mapped by this call, and needs no dividing.
            let _ = self.unmap(cpu, stack.start, len);
            return Err(error);
        }
        self.set_layout(Layout { code: program.code, stack: top - 1 });
        Ok(stack)
    }
}
