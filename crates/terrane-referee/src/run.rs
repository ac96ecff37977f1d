//! Many seeds, side by side.

use crate::generate::Generator;
use crate::judge::{Difference, Judge, Stop, What};
use crate::kernel::{Kernel, KernelError};
use crate::machine::{Plant, Terrane};
use crate::operation::{Op, Outcome};
use crate::script::Script;
use crate::shrink::shrink;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// What to do.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// The first seed.
    pub seed: u64,
    /// Seeds, each with a script of its own.
    pub seeds: u64,
    /// Operations of each script.
    pub operations: u64,
    /// Pairs of a helper and a Terrane machine that work side by side.
    pub threads: usize,
    /// Something that Terrane is made to do wrong.
    pub plant: Option<Plant>,
}

/// How operations of one kind ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    /// With a result.
    pub succeeded: u64,
    /// With an errno.
    pub failed: u64,
    /// With a signal.
    pub signalled: u64,
}

impl Tally {
    fn count(&mut self, outcome: &Outcome) {
        match outcome {
            Outcome::Value(..) | Outcome::Nothing => self.succeeded += 1,
            Outcome::Errno(_) => self.failed += 1,
            Outcome::Signal { .. } => self.signalled += 1,
        }
    }

    /// All of them.
    pub fn all(&self) -> u64 {
        self.succeeded + self.failed + self.signalled
    }
}

/// A difference with the script that shows it.
#[derive(Clone, Debug)]
pub struct Found {
    /// The seed, if it was generated.
    pub seed: Option<u64>,
    /// The script, shrunk.
    pub script: Script,
    /// What differs after it.
    pub difference: Difference,
    /// Operations before it was shrunk.
    pub before: usize,
}

/// What came of it.
#[derive(Debug)]
pub struct Report {
    /// By kind of operation.
    pub tallies: Vec<Tally>,
    /// Scripts that were carried out without a difference.
    pub scripts: u64,
    /// What was found, if anything; the first.
    pub found: Option<Found>,
}

/// Why nothing can be said.
#[derive(Debug)]
pub enum RunError {
    /// This kernel, or what it runs in, cannot be a referee.
    Unable(String),
    /// Something broke off.
    Broken(String),
}

impl From<KernelError> for RunError {
    fn from(error: KernelError) -> Self {
        match error {
            KernelError::Unable(what) => RunError::Unable(what),
            KernelError::Lost(what) => RunError::Broken(what),
        }
    }
}

/// Makes a judge. `helper` makes the command that serves as helper.
///
/// # Errors
/// [`RunError`].
pub fn judge(helper: &dyn Fn() -> Command, plant: Option<Plant>) -> Result<Judge, RunError> {
    Ok(Judge::new(Kernel::start(helper())?, Terrane::new(plant).map_err(RunError::Broken)?))
}

/// Carries a script out; `None` if there is no difference.
///
/// # Errors
/// [`RunError`].
pub fn replay(judge: &mut Judge, script: &Script) -> Result<Option<Difference>, RunError> {
    match judge.run(script) {
        Ok(()) => Ok(None),
        Err(Stop::Difference(difference)) => Ok(Some(*difference)),
        Err(Stop::Kernel(error)) => Err(error.into()),
        Err(Stop::Terrane(error)) => Err(RunError::Broken(error)),
    }
}

/// Carries out a script of `operations` that follows from `seed`. Returns it, and what differs after it.
fn play(
    judge: &mut Judge,
    seed: u64,
    operations: u64,
    tallies: &mut [Tally],
    go_on: &dyn Fn(u64) -> bool,
) -> Result<(Script, Option<Difference>), Stop> {
    let mut generator = Generator::new(seed);
    let mut script = Script { setup: *generator.setup(), ops: Vec::new() };
    judge.begin(&script.setup)?;
    let difference = loop {
        if script.ops.len() as u64 == operations {
            break judge.finish();
        }
        let op = generator.operation(judge.areas());
        script.ops.push(op);
        match judge.step(&op) {
            Ok(outcome) => tallies[op.kind()].count(&outcome),
            Err(stop) => break Err(stop),
        }
        if script.ops.len().is_multiple_of(64) && !go_on(64) {
            break Ok(());
        }
    };
    match difference {
        Ok(()) => Ok((script, None)),
        Err(Stop::Difference(difference)) => Ok((script, Some(*difference))),
        Err(stop) => Err(stop),
    }
}

/// Shrinks a script that shows `difference`.
///
/// # Errors
/// [`RunError`].
pub fn shrunk(
    judge: &mut Judge,
    seed: Option<u64>,
    script: &Script,
    difference: Difference,
) -> Result<Found, RunError> {
    let before = script.ops.len();
    if difference.what == What::Panic {
        // What unwinding leaves behind may keep the next attempt waiting for ever.
        return Ok(Found { seed, script: script.clone(), difference, before });
    }
    let mut error = None;
    let mut last = (script.clone(), difference);
    let mut shows = |script: &Script| -> Option<(What, usize)> {
        if error.is_some() {
            return None;
        }
        match replay(judge, script) {
            Ok(found) => {
                // What is found in the end belongs to no operation.
                found.map(|found| (found.what, found.at))
            }
            Err(stop) => {
                error = Some(stop);
                None
            }
        }
    };
    let small = shrink(script, &mut shows);
    if let Some(error) = error {
        return Err(error);
    }
    if let Some(difference) = replay(judge, &small)? {
        last = (small, difference);
    }
    let (script, difference) = last;
    Ok(Found { seed, script, difference, before })
}

/// Does what the plan says. `helper` makes the command that serves as helper; `progress` is told how many operations are done.
///
/// # Errors
/// [`RunError`].
pub fn run(
    plan: &Plan,
    helper: &(dyn Fn() -> Command + Sync),
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Report, RunError> {
    let next = AtomicU64::new(0);
    let stopped = AtomicBool::new(false);
    let done = AtomicU64::new(0);
    let report =
        Mutex::new(Report { tallies: vec![Tally::default(); Op::NAMES.len()], scripts: 0, found: None });
    let go_on = |operations| {
        progress(done.fetch_add(operations, Ordering::Relaxed) + operations);
        !stopped.load(Ordering::Relaxed)
    };
    let worker = || -> Result<(), RunError> {
        let mut judge = judge(helper, plan.plant)?;
        let mut tallies = vec![Tally::default(); Op::NAMES.len()];
        let mut scripts = 0;
        let mut result = Ok(());
        while result.is_ok() && !stopped.load(Ordering::Relaxed) {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= plan.seeds {
                break;
            }
            let seed = plan.seed.wrapping_add(number);
            match play(&mut judge, seed, plan.operations, &mut tallies, &go_on) {
                Ok((_, None)) => scripts += 1,
                Ok((script, Some(difference))) => {
                    stopped.store(true, Ordering::Relaxed);
                    result = shrunk(&mut judge, Some(seed), &script, difference).map(|found| {
                        let mut report = report.lock().unwrap_or_else(PoisonError::into_inner);
                        report.found.get_or_insert(found);
                    });
                }
                Err(Stop::Kernel(error)) => result = Err(error.into()),
                Err(Stop::Terrane(error)) => result = Err(RunError::Broken(error)),
                Err(Stop::Difference(_)) => {}
            }
        }
        let mut report = report.lock().unwrap_or_else(PoisonError::into_inner);
        report.scripts += scripts;
        for (sum, own) in report.tallies.iter_mut().zip(tallies) {
            sum.succeeded += own.succeeded;
            sum.failed += own.failed;
            sum.signalled += own.signalled;
        }
        if result.is_err() {
            stopped.store(true, Ordering::Relaxed);
        }
        result
    };
    let results: Vec<_> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..plan.threads.max(1)).map(|_| scope.spawn(worker)).collect();
        let gone = || Err(RunError::Broken("a thread of the referee has panicked".to_owned()));
        workers.into_iter().map(|worker| worker.join().unwrap_or_else(|_| gone())).collect()
    });
    let report = report.into_inner().unwrap_or_else(PoisonError::into_inner);
    // What was found says more than that another thread could not go on.
    if report.found.is_none() {
        results.into_iter().collect::<Result<(), _>>()?;
    }
    Ok(report)
}
