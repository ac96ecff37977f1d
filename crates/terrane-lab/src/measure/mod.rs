//! What an experiment is, and how its variants are measured fairly.
//!
//! An [`Experiment`] is an entry of a table: what it is called, which source it repeats, what it costs, and a
//! function that runs it. The function makes a [`Plan`] of [`Case`]s and runs it; the plan takes one sample of
//! every case in turn, then the next sample of every case, and so on, so that whatever drifts (clock rate,
//! neighbours on the machine, temperature) drifts for all of them alike.

pub mod host;
pub mod plan;
pub mod progress;
pub mod random;
pub mod rate;
pub mod stats;
pub mod threads;
pub mod timing;

pub use plan::{Case, Plan, Sample};

use crate::failure::Failure;
use crate::report;
use progress::Progress;
use std::time::Duration;

/// Something that can be measured.
pub struct Experiment {
    /// The name on the command line and in reports.
    pub id: &'static str,
    /// What is measured, in a few words.
    pub title: &'static str,
    /// Where it comes from.
    pub source: &'static str,
    /// What is done and what the columns mean, in a sentence or two.
    pub about: &'static str,
    /// Seconds that each case is measured for, all its samples together, unless the user says otherwise.
    pub seconds: f64,
    /// How many samples are taken of each case, unless the user says otherwise.
    pub runs: usize,
    /// The bytes of memory it needs with this many threads (`None`: its own choice).
    pub memory: fn(threads: Option<usize>) -> u64,
    /// Measures it.
    pub run: fn(&Context<'_>) -> Result<report::Experiment, Failure>,
}

/// What an experiment is told about how to run.
pub struct Context<'a> {
    /// Which experiment this is.
    pub experiment: &'a Experiment,
    /// The number of threads the user asked for.
    pub threads: Option<usize>,
    /// How many files the user asked for, where an experiment works on files.
    pub files: Option<usize>,
    /// How long each case is measured, all samples together.
    pub time: Duration,
    /// How many samples are taken of each case.
    pub runs: usize,
    /// Where it says how far it is.
    pub progress: &'a Progress,
}

impl Context<'_> {
    /// The number of threads for a measurement of threads working together: what the user asked for, or one a
    /// processor, but at least two.
    pub fn threads(&self) -> usize {
        self.threads.unwrap_or_else(|| threads::processors().len().max(2))
    }
}
