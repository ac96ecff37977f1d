//! What differs on purpose, and why. Everything else is a bug of one side.
//!
//! | what | Linux | Terrane | why |
//! |---|---|---|---|
//! | `madvise` with `MERGEABLE`, `UNMERGEABLE` | as the kernel was built | `EINVAL`, as without KSM | pages are not merged; not generated |
//! | `mmap` with `FIXED` beyond `RLIMIT_AS` | fails, and what it would have replaced is divided by then | fails, and nothing has changed | not generated where that limit is set |
//! | `mmap` of private memory, whole multiples of 2 MiB, no hint | looks for 2 MiB more and aligns within | the host says what to align | a policy for huge pages, not what `mmap` promises; not generated |

use crate::operation::{Op, Outcome};
use crate::script::Setup;
use crate::{kernel, machine};

/// True when the operation is one whose answer differs on purpose: not generated.
pub fn excludes(op: &Op, setup: &Setup) -> bool {
    match *op {
        Op::Advise { advice, .. } | Op::ProcessAdvise { advice, .. } => matches!(advice, 12 | 13 | 100 | 101),
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

/// Why two different outcomes of `op` are allowed, if they are.
pub fn allows(_op: &Op, _kernel: &Outcome, _terrane: &Outcome) -> Option<&'static str> {
    None
}

/// The attributes that both sides tell.
pub fn compared_flags() -> u64 {
    kernel::known_flags() & machine::known_flags()
}
