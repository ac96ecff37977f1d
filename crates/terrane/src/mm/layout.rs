//! Marks that a program loader sets: where the code is, and the first stack. Only listings look at them.

use crate::addr::AddrRange;
use crate::sync::atomic::{AtomicU64, Ordering};

/// What a host says about the program in a space, for the texts of `/proc`. All zeros where nothing was said.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Layout {
    /// The program's own code, in bytes: `VmExe` in `status`; other code is `VmLib`.
    pub code: AddrRange,
    /// An address in the first stack (its top when the program began, as a rule): the mapping around it is `[stack]`. At 0,
    /// every mapping that grows downwards is.
    pub stack: u64,
}

/// A [`Layout`] that may be read while it is set. Set once, before there is anybody to read it; who reads beside a second
/// setting may see a mixture.
pub(crate) struct LayoutCell {
    start: AtomicU64,
    end: AtomicU64,
    stack: AtomicU64,
}

impl LayoutCell {
    pub(crate) const fn new() -> Self {
        Self { start: AtomicU64::new(0), end: AtomicU64::new(0), stack: AtomicU64::new(0) }
    }

    pub(crate) fn get(&self) -> Layout {
        let [start, end, stack] =
            [&self.start, &self.end, &self.stack].map(|word| word.load(Ordering::Relaxed));
        Layout { code: AddrRange { start, end }, stack }
    }

    pub(crate) fn set(&self, layout: Layout) {
        self.start.store(layout.code.start, Ordering::Relaxed);
        self.end.store(layout.code.end, Ordering::Relaxed);
        self.stack.store(layout.stack, Ordering::Relaxed);
    }
}
