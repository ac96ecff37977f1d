//! Rates of threads that repeat something, each for itself.
//!
//! The threads start together and then run freely, without a barrier between rounds: what slows one down is what the others do
//! to it, not that it waits for them. Each counts what it did and for how long, and the rates are added.

use super::stats::Summary;
use super::threads::together;
use super::timing::settles;
use crate::failure::Failure;
use std::time::{Duration, Instant};

/// What a thread did.
#[derive(Clone, Copy, Default, Debug)]
pub struct Done {
    /// How many things.
    pub things: u64,
    /// The time that they took, without what was done to prepare and clean up.
    pub took: Duration,
    /// The time that something else took, measured in turn with it.
    pub other: Duration,
}

impl Done {
    /// So many things in this time.
    pub fn new(things: u64, took: Duration) -> Self {
        Self { things, took, other: Duration::ZERO }
    }
}

/// What a thread did in all its steps.
struct Sum {
    done: Done,
    /// Nanoseconds for each thing beyond what the other one took, step by step; without steps that have no other.
    above: Vec<f64>,
}

/// What all threads did.
pub struct All(Vec<Sum>);

impl All {
    /// Things a second, of all threads.
    pub fn rate(&self) -> f64 {
        self.0.iter().map(|Sum { done, .. }| done.things as f64 / done.took.as_secs_f64()).sum()
    }

    /// Nanoseconds for each thing beyond what the other one took: the median of the steps of each thread, and the mean of the
    /// threads. A difference of two times is small beside both, and one step in which the thread lost its processor would
    /// spoil the mean.
    pub fn above_other(&self) -> f64 {
        let median = |sum: &Sum| Summary::of(&sum.above).map_or(f64::NAN, |summary| summary.median);
        self.0.iter().map(median).sum::<f64>() / self.0.len() as f64
    }
}

/// Repeats `step` on `threads` pinned threads until `time` is over. `seats` is how many threads there are in all.
/// A step should take some microseconds at least: the clock is looked at once for each. Steps that end while caches fill
/// ([`settles`]) do not count.
///
/// # Errors
/// The first failure of `prepare` or `step`.
pub fn rates<P>(
    threads: usize,
    seats: usize,
    time: Duration,
    prepare: impl Fn(usize) -> Result<P, Failure> + Sync,
    step: impl Fn(usize, &mut P) -> Result<Done, Failure> + Sync,
) -> Result<All, Failure> {
    let done = together(threads, seats, prepare, |index, mut prepared| {
        let start = Instant::now();
        let mut sum = Sum { done: Done::default(), above: Vec::new() };
        loop {
            let done = step(index, &mut prepared)?;
            sum.done.things += done.things;
            sum.done.took += done.took;
            if done.other > Duration::ZERO {
                let above = done.took.as_nanos() as f64 - done.other.as_nanos() as f64;
                sum.above.push(above / done.things as f64);
            }
            let elapsed = start.elapsed();
            if elapsed >= time {
                return Ok(sum);
            }
            if settles(elapsed, time) {
                sum = Sum { done: Done::default(), above: Vec::new() };
            }
        }
    })?;
    Ok(All(done))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_of_threads_add_up() {
        let all = rates(
            2,
            2,
            Duration::from_millis(1),
            |index| Ok(index as u64 + 1),
            |_, &mut things| {
                let other = Duration::from_nanos(500);
                Ok(Done { other, ..Done::new(things, Duration::from_micros(1)) })
            },
        )
        .unwrap();
        assert!((all.rate() - 3e6).abs() < 1.0);
        assert_eq!(all.above_other(), (500.0 + 250.0) / 2.0);
    }
}
