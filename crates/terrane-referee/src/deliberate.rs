//! What differs on purpose, and why. Everything else is a bug of one side.
//!
//! | what | Linux | Terrane | why |
//! |---|---|---|---|
//! | `madvise` with `MERGEABLE`, `UNMERGEABLE` | as the kernel was built | `EINVAL`, as without KSM | pages are not merged; not generated |
//! | `mmap` with `HUGETLB` of memory | an errno that depends on the pool | `EINVAL`, as without a pool | there is none; not generated with `NORESERVE`, which needs none until a page is touched |
//! | `mmap` with `ABOVE4G` (0x80) | looks above 4 GiB | ignored | the host says where to look; not generated |
//! | `mmap` with `FIXED` beyond `RLIMIT_AS` | fails, and what it would have replaced is divided by then | fails, and nothing has changed | not generated where that limit is set |
//! | `mmap` at a fixed address in the last page of all, off its beginning | returns the address, which programs take for an errno | `ENOMEM` | not generated |
//! | `mremap` with `DONTUNMAP` of locked memory without a page | the new mapping may become one with the old, and is unlocked with it, and with all that it touches | the new mapping stays locked | neither side makes the call ([`excludes_now`]) |
//! | `mmap` of private memory, whole multiples of 2 MiB, no hint | looks for 2 MiB more and aligns within | the host says what to align | a policy for huge pages, not what `mmap` promises; not generated |

use crate::kernel::{Detail, KernelError};
use crate::operation::{Op, Outcome};
use crate::script::Setup;
use crate::{kernel, machine};

/// `MAP_HUGETLB`, `MAP_ANONYMOUS`.
const HUGE_MEMORY: u64 = 0x4_0000 | 0x20;
/// `MAP_NORESERVE`.
const NORESERVE: u64 = 0x4000;
/// `MAP_FIXED`, `MAP_FIXED_NOREPLACE`.
const FIXED: u64 = 0x10 | 0x10_0000;

/// True when the operation is one whose answer differs on purpose: not generated.
pub fn excludes(op: &Op, setup: &Setup) -> bool {
    match *op {
        Op::Advise { advice, .. } | Op::ProcessAdvise { advice, .. } => matches!(advice, 12 | 13 | 100 | 101),
        Op::Map { flags, .. } if flags & HUGE_MEMORY == HUGE_MEMORY && flags & NORESERVE != 0 => true,
        Op::Map { flags, .. } if flags & 0x80 != 0 => true,
        Op::Map { addr, flags, .. } if flags & FIXED != 0 && addr > !0xfff => true,
        Op::Map { flags, .. } if setup.mapped.is_some() && flags as i32 & libc::MAP_FIXED != 0 => true,
        Op::Map { addr: 0, len, flags, .. } => {
            let private = flags as i32 & (libc::MAP_ANONYMOUS | libc::MAP_PRIVATE);
            private == libc::MAP_ANONYMOUS | libc::MAP_PRIVATE
                && flags as i32 & libc::MAP_FIXED == 0
                && len != 0
                && len.div_ceil(4096).is_multiple_of(512)
        }
        _ => false,
    }
}

/// True when the answer to the operation differs on purpose for mappings with these details; the kernel's of the process that acts.
pub fn excludes_now(
    op: &Op,
    details: impl FnOnce() -> Result<Vec<Detail>, KernelError>,
) -> Result<bool, KernelError> {
    let Op::Remap { addr, old, flags, .. } = *op else { return Ok(false) };
    if flags & 4 == 0 {
        return Ok(false);
    }
    let end = addr.saturating_add(old);
    let untouched =
        |detail: &Detail| detail.flags & 0x2000 != 0 && detail.memory && detail.counts.anonymous == 0;
    Ok(details()?.iter().any(|detail| detail.start < end && addr < detail.end && untouched(detail)))
}

/// Why two different outcomes of `op` are allowed, if they are.
pub fn allows(op: &Op, kernel: &Outcome, terrane: &Outcome) -> Option<&'static str> {
    match (*op, kernel, terrane) {
        (Op::Map { flags, .. }, Outcome::Errno(_), Outcome::Errno(libc::EINVAL))
            if flags & HUGE_MEMORY == HUGE_MEMORY =>
        {
            Some("there is no pool of huge pages")
        }
        _ => None,
    }
}

/// The attributes that both sides tell.
pub fn compared_flags() -> u64 {
    kernel::known_flags() & machine::known_flags()
}
