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
use crate::error::OutOfMemory;
use alloc::boxed::Box;
use alloc::vec::Vec;
use crossbeam_utils::CachePadded;

/// Shards of a counter.
const SHARDS: usize = 16;

/// A sharded counter. 2 KiB, in memory of its own: what holds some of them stays small enough to be made on a kernel's stack.
pub struct Tally {
    shards: Box<[CachePadded<AtomicI64>; SHARDS]>,
}

impl Tally {
    /// A counter at zero.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_new() -> Result<Self, OutOfMemory> {
        let mut shards = Vec::new();
        shards.try_reserve_exact(SHARDS).map_err(|_| OutOfMemory)?;
        shards.resize_with(SHARDS, || CachePadded::new(AtomicI64::new(0)));
        let shards = shards.into_boxed_slice().try_into().map_err(|_| OutOfMemory)?;
        Ok(Self { shards })
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

describe!([] Tally { shards });

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn what_every_cpu_adds_is_in_the_sum() {
        let tally = Tally::try_new().unwrap();
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
        let tally = Tally::try_new().unwrap();
        tally.add(CpuId(3), 5);
        tally.add(CpuId(4), -5);
        tally.add(CpuId(40), 2);
        assert_eq!(tally.sum(), 2);
    }

    #[test]
    fn cpus_write_lines_of_their_own() {
        let tally = Tally::try_new().unwrap();
        let line = |index: usize| core::ptr::from_ref(&tally.shards[index]).addr() / 64;
        assert!((1..SHARDS).all(|index| line(index) > line(index - 1)));
    }
}
