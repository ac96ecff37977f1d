//! A place in a range lock: who waits for or holds which range.

use super::Mode;
use crate::addr::AddrRange;
use crate::host::Wait;
use crate::sync::CpuId;
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use core::cell::Cell;
use core::ptr;

/// The range is not ours yet, and we are looking.
const WAITING: u32 = 0;
/// The same, and we may be asleep: whoever grants must wake.
const SLEEPING: u32 = 1;
/// Our turn.
const GRANTED: u32 = 2;

/// Looks at the word before going to sleep: a call holds its range for about a microsecond when it has nothing to
/// sweep.
pub(super) const LOOKS: u32 = if cfg!(any(terrane_watch, terrane_loom)) { 1 } else { 64 };

/// One place of one CPU in some range lock. A machine has a few for each CPU, so that locking allocates nothing.
///
/// The cells are what a list knows about its members. They are used by the holder of the spin lock of the list that the
/// node is in, and by the node's owner while it is in none.
pub struct Node {
    /// [`WAITING`], [`SLEEPING`] or [`GRANTED`]. The owner waits on it; whoever grants the range stores it, once, as the last
    /// thing it does with the node.
    word: AtomicU32,
    /// In use. Only for the owner, to find a free one.
    busy: AtomicBool,
    /// The holder's layout change is over; see [`Held::committed`](super::Held::committed).
    committed: AtomicBool,
    /// What the holder saw of the history; see [`Held::enter`](super::Held::enter).
    seen: AtomicU64,
    range: Cell<AddrRange>,
    exclusive: Cell<bool>,
    /// Spans zones. Does not change while the node is in a list.
    wide: Cell<bool>,
    /// Nobody in the list is before it: in a bucket, it holds its range.
    granted: Cell<bool>,
    /// It holds its range, whatever the list.
    holds: Cell<bool>,
    /// The moment of its list when it got its range.
    since: Cell<u64>,
    pub(super) next: Cell<*const Node>,
    /// Chains those that are to be told of their turn.
    pub(super) next_told: Cell<*const Node>,
}

// SAFETY: the cells have one user at a time, as said above; the spin locks hand them from one to the next. From the owner
// to the others a node passes by being put in a list, and back by being taken out, or by `word` (release and acquire).
unsafe impl Sync for Node {}
// SAFETY: a node belongs to no thread; the pointers are followed under the locks only.
unsafe impl Send for Node {}

impl Node {
    /// A node in no list.
    pub const fn new() -> Self {
        Self {
            word: AtomicU32::new(WAITING),
            busy: AtomicBool::new(false),
            committed: AtomicBool::new(false),
            seen: AtomicU64::new(0),
            range: Cell::new(AddrRange { start: 0, end: 0 }),
            exclusive: Cell::new(false),
            wide: Cell::new(false),
            granted: Cell::new(false),
            holds: Cell::new(false),
            since: Cell::new(0),
            next: Cell::new(ptr::null()),
            next_told: Cell::new(ptr::null()),
        }
    }

    /// True while it is waiting for or holding a range. A hint for all but the owner.
    #[inline]
    pub fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Acquire)
    }

    /// Makes it ready for a list.
    #[inline]
    pub(super) fn prepare(&self, range: AddrRange, mode: Mode, wide: bool) {
        self.busy.store(true, Ordering::Relaxed);
        self.word.store(WAITING, Ordering::Relaxed);
        self.committed.store(false, Ordering::Relaxed);
        self.seen.store(0, Ordering::Relaxed);
        self.range.set(range);
        self.exclusive.set(mode == Mode::Exclusive);
        self.wide.set(wide);
        self.granted.set(false);
        self.holds.set(false);
        self.next.set(ptr::null());
    }

    /// It is in no list any more.
    #[inline]
    pub(super) fn release(&self) {
        self.busy.store(false, Ordering::Release);
    }

    #[inline]
    pub(super) fn range(&self) -> AddrRange {
        self.range.get()
    }

    #[inline]
    pub(super) fn is_exclusive(&self) -> bool {
        self.exclusive.get()
    }

    /// True when the two cannot hold their ranges at the same time.
    #[inline]
    pub(super) fn conflicts_with(&self, other: &Node) -> bool {
        let conflict =
            self.range.get().overlaps(other.range.get()) && (self.exclusive.get() || other.exclusive.get());
        mutant!("range_no_conflict", conflict, false)
    }

    /// Waits for [`tell`](Self::tell).
    #[cold]
    pub(super) fn await_turn<W: Wait>(&self, wait: &W, cpu: CpuId) {
        let mut looks = 0;
        loop {
            match self.word.load(mutant!("range_turn_relaxed", Ordering::Acquire, Ordering::Relaxed)) {
                GRANTED => return,
                WAITING if looks < LOOKS => {
                    wait.relax(cpu, looks);
                    looks += 1;
                }
                WAITING => {
                    // Fails when our turn has come.
                    let _ =
                        self.word.compare_exchange(WAITING, SLEEPING, Ordering::Relaxed, Ordering::Relaxed);
                }
                _ => wait.wait(cpu, &self.word, SLEEPING),
            }
        }
    }

    /// Tells the owner that its turn has come. From then on the node is the owner's again, and may already stand for
    /// another range: a wake-up that comes late is one for no reason, which every wait allows.
    pub(super) fn tell<W: Wait>(&self, wait: &W) {
        let order = mutant!("range_told_relaxed", Ordering::Release, Ordering::Relaxed);
        if self.word.swap(GRANTED, order) == mutant!("range_nobody_told", SLEEPING, GRANTED) {
            wait.wake_all(&self.word);
        }
    }

    #[inline]
    pub(super) fn is_wide(&self) -> bool {
        self.wide.get()
    }

    #[inline]
    pub(super) fn is_granted(&self) -> bool {
        self.granted.get()
    }

    /// Whether an earlier node of its list is in its way. A wide one still has the buckets to go through.
    #[inline]
    pub(super) fn set_granted(&self, granted: bool, moment: u64) {
        self.granted.set(granted);
        if !self.wide.get() {
            self.holds.set(granted);
            self.since.set(moment);
        }
    }

    /// A wide one has gone through the buckets.
    pub(super) fn set_holds(&self, moment: u64) {
        self.holds.set(true);
        self.since.set(moment);
    }

    #[inline]
    pub(super) fn set_committed(&self) {
        self.committed.store(true, Ordering::Release);
    }

    #[inline]
    pub(super) fn set_seen(&self, seen: u64) {
        self.seen.store(seen, Ordering::Release);
    }

    /// True when a holder may be about to change the layout without knowing of `moment`.
    pub(super) fn is_unaware_of(&self, moment: u64) -> bool {
        self.exclusive.get()
            && self.holds.get()
            && self.since.get() < moment
            && self.seen.load(Ordering::Acquire) != moment
            && !self.committed.load(Ordering::Acquire)
    }
}

impl Default for Node {
    fn default() -> Self {
        Self::new()
    }
}

describe!([] Node { word, busy, committed, seen, range, exclusive, wide, granted, holds, next, next_told });
