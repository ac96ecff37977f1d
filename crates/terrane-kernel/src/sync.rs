//! Locks of the kernel.
//!
//! A thread that waits for a word sleeps in one of a few queues, chosen by the word's address; whoever changes the word wakes that queue,
//! and each sleeper looks at its own word again. So words need no queue of their own, and Terrane's locks can be words.

use crate::arch;
use crate::task::wait::Queue;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// A spin lock: held for nanoseconds, never while blocking. While it spins, a processor answers shoot-downs. One that interrupt
/// handlers take is always taken with interrupts off ([`arch::interrupts::without`]).
pub type SpinLock<T> = lock_api::Mutex<RawSpin, T>;
/// A blocking lock.
pub type Mutex<T> = lock_api::Mutex<RawMutex, T>;

/// The inside of a [`SpinLock`].
pub struct RawSpin(AtomicBool);

// SAFETY: one holder at a time: the one whose compare-and-swap made it true.
unsafe impl lock_api::RawMutex for RawSpin {
    #[allow(clippy::declare_interior_mutable_const, reason = "as lock_api asks")]
    const INIT: Self = RawSpin(AtomicBool::new(false));
    type GuardMarker = lock_api::GuardNoSend;

    #[inline]
    fn lock(&self) {
        while !self.try_lock() {
            while self.0.load(Ordering::Relaxed) {
                arch::relax();
            }
        }
    }

    #[inline]
    fn try_lock(&self) -> bool {
        self.0.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[inline]
    unsafe fn unlock(&self) {
        self.0.store(false, Ordering::Release);
    }
}

const QUEUES: usize = 64;

static SLEEPERS: [Queue; QUEUES] = [const { Queue::new() }; QUEUES];

#[inline]
fn queue_of(word: *const AtomicU32) -> &'static Queue {
    let hash = (word as u64 >> 2).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    &SLEEPERS[(hash >> 58) as usize]
}

/// Sleeps while `*word == value`.
pub fn wait_while(word: &AtomicU32, value: u32) {
    queue_of(word).wait_uninterrupted(|| word.load(Ordering::Acquire) != value);
}

/// Wakes those who sleep on `word`, after it has changed.
pub fn wake_all(word: &AtomicU32) {
    queue_of(word).wake_all();
}

/// Rounds before a thread that waits for a lock goes to sleep: about as long as falling asleep takes.
const ROUNDS: u32 = 200;

const FREE: u32 = 0;
const HELD: u32 = 1;
/// Held, and somebody sleeps.
const AWAITED: u32 = 2;

/// The inside of a [`Mutex`]: a word that is free, held, or held and awaited.
///
/// U. Drepper, "Futexes Are Tricky", 2011.
pub struct RawMutex(AtomicU32);

impl RawMutex {
    #[cold]
    fn lock_slowly(&self) {
        for _ in 0..ROUNDS {
            if self.0.load(Ordering::Relaxed) == FREE
                && self.0.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                return;
            }
            arch::relax();
        }
        while self.0.swap(AWAITED, Ordering::Acquire) != FREE {
            wait_while(&self.0, AWAITED);
        }
    }
}

// SAFETY: one holder at a time: the one who took the word from `FREE`.
unsafe impl lock_api::RawMutex for RawMutex {
    #[allow(clippy::declare_interior_mutable_const, reason = "as lock_api asks")]
    const INIT: Self = RawMutex(AtomicU32::new(FREE));
    type GuardMarker = lock_api::GuardSend;

    #[inline]
    fn lock(&self) {
        if !self.try_lock() {
            self.lock_slowly();
        }
    }

    #[inline]
    fn try_lock(&self) -> bool {
        self.0.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[inline]
    unsafe fn unlock(&self) {
        if self.0.swap(FREE, Ordering::Release) == AWAITED {
            wake_all(&self.0);
        }
    }
}

const WRITER: u32 = 1 << 31;
/// A writer waits: readers that come let it go first.
const WRITER_WAITS: u32 = 1 << 30;
/// Somebody sleeps.
const SLEEPER: u32 = 1 << 29;
const READERS: u32 = SLEEPER - 1;

/// The inside of a blocking lock for many readers or one writer, which Terrane uses: the number of readers, or the mark of the writer, and marks of those who wait.
pub struct RawRwLock(AtomicU32);

impl RawRwLock {
    /// Waits until `may` holds of the word and then changes it to what `new` makes of it. `marks` are set before sleeping.
    #[cold]
    fn take_slowly(&self, may: fn(u32) -> bool, new: fn(u32) -> u32, marks: u32) {
        let mut rounds = 0;
        loop {
            let word = self.0.load(Ordering::Relaxed);
            if may(word) {
                if self.0.compare_exchange_weak(word, new(word), Ordering::Acquire, Ordering::Relaxed).is_ok()
                {
                    return;
                }
            } else if rounds < ROUNDS {
                rounds += 1;
                arch::relax();
            } else {
                let marked = word | marks | SLEEPER;
                if word == marked
                    || self
                        .0
                        .compare_exchange_weak(word, marked, Ordering::Relaxed, Ordering::Relaxed)
                        .is_ok()
                {
                    queue_of(&self.0).wait_uninterrupted(|| {
                        let word = self.0.load(Ordering::Relaxed);
                        may(word) || word & SLEEPER == 0
                    });
                    rounds = 0;
                }
            }
        }
    }

    #[inline]
    fn may_read(word: u32) -> bool {
        word & (WRITER | WRITER_WAITS) == 0
    }

    #[inline]
    fn may_write(word: u32) -> bool {
        word & (WRITER | READERS) == 0
    }

    #[cold]
    fn wake(&self) {
        self.0.fetch_and(!(SLEEPER | WRITER_WAITS), Ordering::Relaxed);
        wake_all(&self.0);
    }
}

// SAFETY: the word counts the readers, and is taken by a writer only when there are none; no reader comes while it is.
unsafe impl lock_api::RawRwLock for RawRwLock {
    #[allow(clippy::declare_interior_mutable_const, reason = "as lock_api asks")]
    const INIT: Self = RawRwLock(AtomicU32::new(0));
    type GuardMarker = lock_api::GuardSend;

    #[inline]
    fn lock_shared(&self) {
        if !self.try_lock_shared() {
            self.take_slowly(Self::may_read, |word| word + 1, 0);
        }
    }

    #[inline]
    fn try_lock_shared(&self) -> bool {
        let word = self.0.load(Ordering::Relaxed);
        Self::may_read(word)
            && self.0.compare_exchange(word, word + 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[inline]
    unsafe fn unlock_shared(&self) {
        let before = self.0.fetch_sub(1, Ordering::Release);
        if before & SLEEPER != 0 && before & READERS == 1 {
            self.wake();
        }
    }

    #[inline]
    fn lock_exclusive(&self) {
        if !self.try_lock_exclusive() {
            self.take_slowly(Self::may_write, |word| (word & SLEEPER) | WRITER, WRITER_WAITS);
        }
    }

    #[inline]
    fn try_lock_exclusive(&self) -> bool {
        self.0.compare_exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[inline]
    unsafe fn unlock_exclusive(&self) {
        if self.0.fetch_and(!WRITER, Ordering::Release) & SLEEPER != 0 {
            self.wake();
        }
    }
}
