//! Timed loops.
//!
//! Time comes from [`Instant`], which costs some 25 ns, so it is read once per batch and batches are made long
//! enough (tens of microseconds) for that not to show. What is timed must not be optimised away: bodies pass
//! their results through [`black_box`].

pub use std::hint::black_box;
use std::time::{Duration, Instant};

/// The shortest batch between two looks at the clock.
const BATCH: Duration = Duration::from_micros(50);

/// Whether what ended `elapsed` after the beginning of a sample of `time` is not to count. A sample begins with caches that others have
/// filled, on a processor where other threads ran; an eighth of its time is enough to have what a loop needs there. What takes longer
/// than that for once counts from the first time on.
pub fn settles(elapsed: Duration, time: Duration) -> bool {
    elapsed < time / 8
}

/// Runs `batch(n)`, which does something `n` times, until `time` is over; returns nanoseconds for each.
///
/// Every operation done counts, those of the search for a good batch size included, except the very first one,
/// which pays for lazy set-up, and those that end while caches fill ([`settles`]).
pub fn per_op(time: Duration, mut batch: impl FnMut(u64)) -> f64 {
    batch(1);
    let start = Instant::now();
    let (mut size, mut done, mut counted_from) = (1u64, 0u64, Duration::ZERO);
    loop {
        let before = start.elapsed();
        batch(size);
        done += size;
        let after = start.elapsed();
        if after >= time {
            return (after - counted_from).as_nanos() as f64 / done as f64;
        }
        if settles(after, time) {
            (done, counted_from) = (0, after);
        }
        if after - before < BATCH {
            // Only work that the compiler did away with gets anywhere near the cap.
            size = (size * 2).min(1 << 32);
        }
    }
}

/// The time that `work` takes, and what it returns.
pub fn timed<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let start = Instant::now();
    let result = work();
    (start.elapsed(), result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_what_was_done() {
        let mut done = 0u64;
        let ns = per_op(Duration::from_millis(5), |n| (0..n).for_each(|_| done = black_box(done) + 1));
        // At least 5 ms passed, of which an eighth does not count, so no operation can have cost less than its share of that.
        assert!(ns * done as f64 >= 4.3e6, "{ns} ns, {done} times");
    }

    #[test]
    fn work_longer_than_the_time_is_done_once_more_after_warming_up() {
        let mut calls = 0;
        per_op(Duration::ZERO, |n| calls += n);
        assert_eq!(calls, 2);
    }
}
