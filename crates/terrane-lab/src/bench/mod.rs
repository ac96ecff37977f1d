//! Benchmarks of single operations, one file each: Terrane beside ordinary data structures and beside the running
//! kernel, by the same loops, in the same run.

mod fault;
mod fork;
mod index;
mod map;
mod mapped;
mod memory;
mod populate;
mod rig;
mod scale;

use crate::measure::Experiment;

/// Every benchmark, in the order in which they run.
pub static ALL: &[&Experiment] =
    &[&index::BENCH, &fault::BENCH, &map::BENCH, &populate::BENCH, &fork::BENCH, &scale::BENCH];
