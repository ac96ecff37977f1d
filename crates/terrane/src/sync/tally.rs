//! A counter that many CPUs add to and few read.
//!
//! Each of the first CPUs has a shard of its own, on lines of its own, and adds by a load and a store; the CPUs beyond share the
//! last shard and add by a read-modify-write. Reading sums the shards: exact at rest, and while others add it is some
//! mixture of their states. A shard by itself may be negative (one CPU maps, another unmaps); the sum at rest is what was
//! added.
//!
//! Who may break it: whoever adds as a CPU that another thread uses at the same time. A pin of that CPU is what keeps
//! others away.

use super::CpuId;
use super::atomic::{AtomicI64, Ordering};
use crossbeam_utils::CachePadded;

/// Shards of a counter.
const SHARDS: usize = 16;

/// A sharded counter. 2 KiB.
pub struct Tally {
    shards: [CachePadded<AtomicI64>; SHARDS],
}

impl Tally {
    /// A counter at zero.
    pub const fn new() -> Self {
        Self { shards: [const { CachePadded::new(AtomicI64::new(0)) }; SHARDS] }
    }

    /// Adds `n`, as the CPU that the caller has pinned.
    #[inline]
    pub fn add(&self, cpu: CpuId, n: i64) {
        let index = cpu.index();
        if index < SHARDS - 1 {
            let shard = &self.shards[index];
            shard.store(shard.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
        } else {
            self.shards[SHARDS - 1].fetch_add(n, Ordering::Relaxed);
        }
    }

    /// The sum of all that was added.
    pub fn sum(&self) -> i64 {
        self.shards.iter().fold(0i64, |sum, shard| sum.wrapping_add(shard.load(Ordering::Relaxed)))
    }
}

impl Default for Tally {
    fn default() -> Self {
        Self::new()
    }
}

describe!([] Tally { shards });

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn what_every_cpu_adds_is_in_the_sum() {
        let tally = Tally::new();
        thread::scope(|scope| {
            let tally = &tally;
            // Some have a shard of their own, some share the last.
            for cpu in [0, 1, 13, 14, 15, 16, 31] {
                scope.spawn(move || {
                    for n in 0..1000 {
                        tally.add(CpuId(cpu), n);
                        tally.add(CpuId(cpu), -(n / 2));
                    }
                });
            }
        });
        assert_eq!(tally.sum(), 7 * (0..1000).map(|n: i64| n - n / 2).sum::<i64>());
    }

    #[test]
    fn shards_may_be_negative_and_the_sum_is_right() {
        let tally = Tally::default();
        tally.add(CpuId(3), 5);
        tally.add(CpuId(4), -5);
        tally.add(CpuId(40), 2);
        assert_eq!(tally.sum(), 2);
    }

    #[test]
    fn cpus_write_lines_of_their_own() {
        let tally = Tally::new();
        let line = |index: usize| core::ptr::from_ref(&tally.shards[index]).addr() / 64;
        assert!((1..SHARDS).all(|index| line(index) > line(index - 1)));
    }
}
