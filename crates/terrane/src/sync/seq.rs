//! The sequence counter of a VMA (source B, requirement B1).
//!
//! # What it guarantees
//!
//! Every change to an attribute that the fault handler looks at is bracketed by [`SeqCount::write_begin`] and
//! [`SeqCount::write_end`]. A handler that read the attributes after a successful [`SeqCount::read`] and later
//! sees [`SeqCount::unchanged`] used attributes that were all valid at one moment, and that stayed valid until
//! the check.
//!
//! # Against a sweep of the page table
//!
//! The handler makes its last check while it owns the page-table entry; the writer makes the counter odd before
//! it sweeps the entries. That is Dekker's pattern:
//!
//! | fault | layout change |
//! |---|---|
//! | takes the entry (`SeqCst` read-modify-write) | makes the counter odd |
//! | | full fence |
//! | reads the counter (`SeqCst`) | reads the entry |
//!
//! At least one side sees the other: the fault sees the odd counter and gives the entry back, or the sweep sees
//! the entry taken, waits, and then sweeps what the fault published. The order is made by
//! [`SeqCount::unchanged_while_owned`] and [`SeqCount::write_begin`].
//!
//! # Who may break it
//!
//! Whoever writes an attribute outside a bracket; whoever sweeps before `write_begin`; two writers at once
//! (writers of one VMA exclude each other by the lock of the leaf it is in).
//!
//! Source: L. Dufour, P. Zijlstra, "Speculative page faults", v11 (2018).

use super::atomic::{AtomicU32, Ordering, fence, fence_behind_locked};

/// Set in a counter whose VMA has left its space for good; such a counter stays odd.
const DEAD: u32 = 1 << 31;

/// A counter that is odd while its object changes.
#[derive(Debug, Default)]
pub struct SeqCount(AtomicU32);

impl SeqCount {
    /// A counter at rest.
    #[inline]
    pub const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Begins a read: the counter's value, or `None` while a change is under way or after [`kill`](Self::kill).
    #[inline]
    pub fn read(&self) -> Option<u32> {
        let seq = self.0.load(mutant!("read_relaxed", Ordering::Acquire, Ordering::Relaxed));
        (seq & 1 == 0).then_some(seq)
    }

    /// True when no change has begun since [`read`](Self::read) gave `seq`: what was read in between is one
    /// consistent state.
    #[inline]
    pub fn unchanged(&self, seq: u32) -> bool {
        mutant!("unchanged_without_fence", fence(Ordering::Acquire), ());
        self.0.load(Ordering::Relaxed) == seq
    }

    /// The same check for a caller that has just taken a page-table entry: the read-modify-write that took it
    /// must have been `SeqCst`, which orders it before this load without a fence of its own.
    #[inline]
    pub fn unchanged_while_owned(&self, seq: u32) -> bool {
        let order = mutant!("validate_relaxed", Ordering::SeqCst, Ordering::Relaxed);
        mutant!("validate_never", self.0.load(order) == seq, true)
    }

    /// True while a change is under way, and after [`kill`](Self::kill): for a writer that may not be the only one.
    #[inline]
    pub fn is_changing(&self) -> bool {
        self.0.load(Ordering::Acquire) & 1 != 0
    }

    /// Begins a change: makes the counter odd, and orders that before everything that follows.
    #[inline]
    pub fn write_begin(&self) {
        let seq = self.0.load(Ordering::Relaxed);
        debug_assert!(seq & 1 == 0, "two writers of one VMA, or a dead one");
        self.0.store(seq.wrapping_add(1) & !DEAD, Ordering::Relaxed);
        mutant!(
            "write_begin_without_fence",
            mutant!("write_begin_unordered", fence(Ordering::SeqCst), ()),
            fence(Ordering::Release)
        );
    }

    /// [`write_begin`](Self::write_begin) where `locked` follows, a read-modify-write that serves as the fence.
    #[inline]
    pub fn write_begin_before(&self, locked: impl FnOnce()) {
        let seq = self.0.load(Ordering::Relaxed);
        debug_assert!(seq & 1 == 0, "two writers of one VMA, or a dead one");
        self.0.store(seq.wrapping_add(1) & !DEAD, Ordering::Relaxed);
        locked();
        mutant!("write_begin_before_unordered", fence_behind_locked(), ());
    }

    /// [`write_begin`](Self::write_begin) of several counters, whose changes are one.
    #[inline]
    pub fn write_begin_all<'s>(counters: impl IntoIterator<Item = Option<&'s SeqCount>>) {
        for counter in counters.into_iter().flatten() {
            let seq = counter.0.load(Ordering::Relaxed);
            debug_assert!(seq & 1 == 0, "two writers of one VMA, or a dead one");
            counter.0.store(seq.wrapping_add(1) & !DEAD, Ordering::Relaxed);
        }
        mutant!("write_begin_all_unordered", fence(Ordering::SeqCst), ());
    }

    /// [`kill`](Self::kill) of a counter that is odd already, because its change has begun: that is what has been ordered.
    #[inline]
    pub fn kill_begun(&self) {
        let seq = self.0.load(Ordering::Relaxed);
        debug_assert!(seq & 1 == 1);
        self.0.store(seq | DEAD, Ordering::Relaxed);
    }

    /// Ends a change: the counter is even again and differs from before.
    #[inline]
    pub fn write_end(&self) {
        let seq = self.0.load(Ordering::Relaxed);
        debug_assert!(seq & 1 == 1);
        let order = mutant!("write_end_relaxed", Ordering::Release, Ordering::Relaxed);
        self.0.store(seq.wrapping_add(1) & !DEAD, order);
    }

    /// Makes the counter odd for ever: the VMA is no longer part of its space. Allowed at rest and during a
    /// change.
    #[inline]
    pub fn kill(&self) {
        let seq = self.0.load(Ordering::Relaxed);
        self.0.store(seq | 1 | DEAD, Ordering::Relaxed);
        mutant!("kill_without_fence", fence(Ordering::SeqCst), fence(Ordering::Release));
    }

    /// True after [`kill`](Self::kill).
    #[inline]
    pub fn is_dead(&self) -> bool {
        self.0.load(Ordering::Acquire) & DEAD != 0
    }
}

#[cfg(terrane_watch)]
impl crate::names::Describe for SeqCount {
    fn describe(&self, names: &mut crate::names::Names) {
        names.leaf(self);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_seen() {
        let seq = SeqCount::new();
        let begun = seq.read().unwrap();
        assert!(seq.unchanged(begun) && seq.unchanged_while_owned(begun));
        seq.write_begin();
        assert!(seq.read().is_none() && !seq.unchanged(begun));
        seq.write_end();
        assert!(!seq.unchanged(begun));
        assert!(seq.unchanged(seq.read().unwrap()));
        seq.kill();
        assert!(seq.read().is_none() && seq.is_dead());
    }

    #[test]
    fn the_counter_wraps_without_dying() {
        let seq = SeqCount(AtomicU32::new(DEAD - 2));
        seq.write_begin();
        seq.write_end();
        assert!(!seq.is_dead());
        assert_eq!(seq.read(), Some(0));
    }
}
