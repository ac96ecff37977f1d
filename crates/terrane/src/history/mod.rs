//! What a listing needs to know of the calls that pass it by.
//!
//! # What it guarantees
//!
//! A listing is the layout as it was at one moment between calls, and stops nobody: it holds no lock that a call or a fault
//! waits for. A call that meets no listing pays one load of a word that is hardly ever written; one that does writes
//! down, once, what its range held before.
//!
//! # How
//!
//! A listing has a number. Its maker publishes the number ([`History::record`]) and waits until the calls that may not
//! have seen it are through with their changes
//! ([`RangeLock::await_aware`](crate::range_lock::RangeLock::await_aware)). These come before the moment; all others come after it, and write to the log:
//!
//! * once its range is locked and before its first change, an *image* of the range: the parts of VMAs in it, and whether
//!   the first and the last go on beyond its ends;
//! * while the index is being read, with each step that changes a record that reaches beyond the range (its end moves, it is
//!   divided, it is merged), and under the same lock of a leaf and the same pin, a *note* of the record as it was.
//!
//! Then the maker says that it begins to read, and waits until all pins that may not have seen that have ended. So it has notes of all
//! steps that are made while it reads, and none from a time at which calls before the moment were not through. It
//! reads the index from below to above as it happens to be, and [`restore`]s: in the range of an image, the image holds (of
//! several images, the first); elsewhere, what was read, or noted.
//!
//! # Why it is right
//!
//! *An address in the range of an image*: the calls about it exclude each other, and those before the moment were through before
//! the first that came after it could lock the range. So the first image is the state of the moment. Images are
//! in the order in which they were taken where it matters: a call that finds what another has changed takes its place in the
//! log after that other one did.
//!
//! *Any other address*: no call changes its attributes any more when reading begins. All records that cover it from then on
//! show the same, so whatever is read or noted about it is right; and it is in one of the two. For the index yields each entry
//! that nobody changes meanwhile, and every other one is in a note.
//! That a note is seen along with the change follows from the order of writing: log, fence, change; and of reading: index, fence, log.
//!
//! *The boundary between two VMAs* is changed by calls whose range contains it or ends at it; so the first image whose range it
//! is in, or at an end of, tells; elsewhere, what was read. (Where two calls meet at an address at the same time, one before and one after the
//! moment, whether their VMAs show as two or as one mapping is not determined. Neither is it for who makes the calls.)
//!
//! A call need not write what the log has already: a range in which this CPU took images before has its first image.
//! Loops that map and unmap the same place pay once a listing, and do not hold the range for it after that
//! ([`at_once`](crate::space)).
//!
//! # Who may break it
//!
//! Whoever changes a record without having made an [image](Log::image), or one that reaches beyond the range without a note; whoever says
//! that it has committed and then changes the layout.
//!
//! # Source
//!
//! Undo logs, as databases read old snapshots (C. Mohan et al., ARIES, 1992, in spirit). Linux lists under a lock, a page of
//! output at a time, and a listing longer than a page is no one state.

mod covered;
mod log;
mod restore;
#[cfg(test)]
mod tests;

pub use covered::Covered;
pub use log::{Log, Piece};
pub use restore::restore;

use crate::error::OutOfMemory;
use crate::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use crate::sync::{Participant, Pin};
use alloc::boxed::Box;
use core::ptr::{self, NonNull};
use lock_api::RawMutex;

/// Whether a listing of a space is under way, and its log.
pub struct History<M: RawMutex> {
    /// The number of the listing under way; 0 when there is none.
    active: AtomicU64,
    /// The same once it reads the index.
    reading: AtomicU64,
    /// Its log. Freed an epoch after the listing.
    log: AtomicPtr<Log>,
    /// One listing at a time.
    lister: lock_api::Mutex<M, ()>,
}

/// A listing under way, as its maker sees it.
pub struct Recording<'a, M: RawMutex> {
    history: &'a History<M>,
    log: &'a Log,
}

impl<M: RawMutex> History<M> {
    /// No listing.
    pub const fn new() -> Self {
        Self {
            active: AtomicU64::new(0),
            reading: AtomicU64::new(0),
            log: AtomicPtr::new(ptr::null_mut()),
            lister: lock_api::Mutex::new(()),
        }
    }

    /// The number of the listing under way, or 0. For a call that has locked its range.
    #[inline]
    pub fn active(&self) -> u64 {
        self.active.load(Ordering::Acquire)
    }

    /// The number of the listing that reads the index, or 0. For a step that is about to change a record, pinned.
    #[inline]
    pub fn reading(&self) -> u64 {
        // After the pin, in the order of all that is `SeqCst`: see `begin_reading`.
        self.reading.load(Ordering::SeqCst)
    }

    /// The log of listing `number`, unless it is over.
    pub fn log<'p>(&self, _pin: &'p Pin<'_>, number: u64) -> Option<&'p Log> {
        // SAFETY: unlinked before it is retired, so it stays as long as the pin.
        let log = unsafe { self.log.load(Ordering::Acquire).as_ref() };
        log.filter(|log| log.number() == number)
    }

    /// Has calls write to a log of `entries` while `act` runs. The listing takes its number from `numbers`, which may serve
    /// other spaces too. Waits for another listing that is under way. Not while pinned.
    ///
    /// # Errors
    /// [`OutOfMemory`], and `act` was not called.
    pub fn record<R>(
        &self,
        me: &Participant<'_>,
        numbers: &AtomicU64,
        entries: usize,
        act: impl FnOnce(&Recording<'_, M>) -> R,
    ) -> Result<R, OutOfMemory> {
        let _one_at_a_time = self.lister.lock();
        // Under the lock, so that numbers rise in the order of the listings.
        let number = numbers.fetch_add(1, Ordering::Relaxed) + 1;
        let log = Log::try_new(number, entries)?;
        let log = NonNull::from(Box::leak(log)).cast::<Log>();
        self.log.store(log.as_ptr(), Ordering::Release);
        self.active.store(number, Ordering::Release);
        // SAFETY: freed below.
        let result = act(&Recording { history: self, log: unsafe { log.as_ref() } });
        self.reading.store(0, Ordering::Release);
        self.active.store(0, Ordering::Release);
        self.log.store(ptr::null_mut(), Ordering::Release);
        // SAFETY: just unlinked, once.
        unsafe { Log::retire(log, &me.pin()) };
        Ok(result)
    }
}

impl<M: RawMutex> Default for History<M> {
    fn default() -> Self {
        Self::new()
    }
}

impl<M: RawMutex> Recording<'_, M> {
    /// What calls have written.
    pub fn log(&self) -> &Log {
        self.log
    }

    /// From now on steps make notes: when it returns, none that does not is under way. The calls before the moment are
    /// through. Not while pinned; `relax` is called, with the number of rounds so far, while pins are waited for.
    pub fn begin_reading(&self, me: &Participant<'_>, mut relax: impl FnMut(u32)) {
        // Dekker's pattern, as in the epoch itself: a pin that is not seen sees this.
        self.history.reading.store(self.log.number(), Ordering::SeqCst);
        let epoch = me.epoch();
        let stamp = epoch.now();
        let mut rounds = 0;
        while !epoch.has_passed(stamp) {
            if !epoch.try_advance() {
                relax(rounds);
                rounds = rounds.saturating_add(1);
            }
        }
    }
}
