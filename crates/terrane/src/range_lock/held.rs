//! A range that is locked.

use super::{Caller, Mode, Node, RangeLock};
use crate::addr::AddrRange;
use crate::host::Wait;

/// A range that is locked; dropping it unlocks, and wakes those who wait.
#[must_use = "the range is unlocked when this is dropped"]
pub struct Held<'a, W: Wait> {
    pub(super) lock: &'a RangeLock,
    pub(super) node: &'a Node,
    pub(super) caller: Caller<'a, W>,
    pub(super) waited: bool,
}

impl<W: Wait> Held<'_, W> {
    /// The range.
    #[inline]
    pub fn range(&self) -> AddrRange {
        self.node.range()
    }

    /// How it is held.
    #[inline]
    pub fn mode(&self) -> Mode {
        if self.node.is_exclusive() { Mode::Exclusive } else { Mode::Shared }
    }

    /// True when somebody was in the way.
    #[inline]
    pub fn waited(&self) -> bool {
        self.waited
    }

    /// Says that the holder knows of `moment`; see [`RangeLock::await_aware`].
    #[inline]
    pub fn aware_of(&self, moment: u64) {
        self.node.set_seen(moment);
    }

    /// Says that the layout does not change any more (or not at all) under this lock: what follows is sweeping and waiting for
    /// shoot-downs, which a listing need not wait for.
    #[inline]
    pub fn committed(&self) {
        self.node.set_committed();
    }
}

impl<W: Wait> Drop for Held<'_, W> {
    #[inline]
    fn drop(&mut self) {
        if self.node.is_wide() {
            self.lock.unlock_wide(self.caller, self.node);
        } else {
            self.lock.unlock_narrow(self.caller, self.node);
        }
        self.node.release();
    }
}
