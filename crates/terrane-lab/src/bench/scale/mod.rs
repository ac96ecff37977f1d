//! How rates grow with threads.
//!
//! One thread and several take turns, and so do those beside another thread and those alone, on the same processors; a ratio is taken
//! within each round, because machines drift between speeds ([`crate::measure::plan`] says how). All variants but one run on one machine of Terrane's, in spaces of their own ([`crate::experiments::hosted`] says why). The one
//! gives each thread a machine of its own: what it does not reach, the hardware does not give.

mod listing;
mod shapes;
mod work;

use crate::baseline::linux::{Probe, Shape};
use crate::experiments::hosted::{self, Crew};
use crate::failure::Failure;
use crate::measure::host::kernel;
use crate::measure::plan::{CaseId, Results};
use crate::measure::threads::processors;
use crate::measure::{Case, Context, Experiment, Plan};
use crate::report::{self, Asked, Role};
use parking_lot::Mutex;
use std::sync::{Arc, Weak};
use terrane::space::{Locking, Placement, SpaceConfig};
use work::Work;

/// `terrane bench scale`.
pub static BENCH: Experiment = Experiment {
    id: "scale",
    title: "what several threads get done, against one",
    source: "the promise: nothing shared; shapes of will-it-scale",
    about: "Things a second, of all threads together; n : 1 is the ratio within each round of samples, then the median. Within a \
            round, one thread is measured on each of the processors that several use, before and after them, and the mean taken; so is \
            who has another thread beside. apart, as a column: the same ratio of threads in machines apart. Every thread works on pages of its own, in page tables of its own, by calls; where a page is stored to, by a processor \
            in software that runs the space. own areas: at fixed addresses, 128 GiB apart, among 256 other mappings of a page \
            for each thread of the most there are, however many work. apart: each thread in a machine of its own, which is what the hardware gives. Clearing a page is \
            measured in turn with the faults, 64 of each, and the median of the differences taken. fork, one space: all threads copy the same space, and \
            exclude each other. beside map + unmap: another thread does that elsewhere in the same space all the while, so \
            there is one more than the column says; where that is more than the processors, it is left out. The names at the end are will-it-scale's, with threads; pages are of 4 KiB.",
    seconds: 0.3,
    runs: 15,
    memory,
    run,
};

/// A way to do it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Variant {
    /// Terrane, at fixed addresses where places matter.
    Terrane,
    /// Terrane, which gives each processor a stretch of its own.
    PerCpu,
    /// Terrane, which places mappings as Linux does.
    LinuxPlaces,
    /// Terrane with the lock of the whole space.
    Classic,
    /// Terrane, each thread in a machine of its own.
    Apart,
    /// The running kernel.
    Linux,
}

impl Variant {
    fn words(self) -> String {
        match self {
            Self::Terrane => "Terrane".to_owned(),
            Self::PerCpu => "Terrane, per-CPU placement".to_owned(),
            Self::LinuxPlaces => "Terrane, Linux's placement".to_owned(),
            Self::Classic => "Terrane, classic lock".to_owned(),
            Self::Apart => "Terrane, apart".to_owned(),
            Self::Linux => kernel(),
        }
    }

    /// Whether the same in machines apart is all that it can reach. (The kernel does other work, in other places.)
    fn has_bound(self) -> bool {
        !matches!(self, Self::Apart | Self::Linux)
    }

    fn role(self) -> Role {
        match self {
            Self::Terrane | Self::PerCpu | Self::LinuxPlaces => Role::Terrane,
            Self::Classic | Self::Apart => Role::Baseline,
            Self::Linux => Role::Linux,
        }
    }

    /// How its spaces behave.
    fn config(self) -> SpaceConfig {
        let mut config = SpaceConfig::default();
        match self {
            Self::PerCpu => config.placement = Placement::PerCpu,
            Self::Classic => config.locking = Locking::Classic,
            _ => {}
        }
        config
    }
}

/// The machines, which all cases take turns on.
pub struct Machines {
    /// One for all threads and one more.
    all: Arc<Crew>,
    /// One for each thread and one more.
    apart: Vec<Arc<Crew>>,
    /// The most threads that work together.
    threads: usize,
    /// Bytes that the shapes map.
    length: u64,
    /// The files of the shapes.
    files: Mutex<Weak<shapes::Files>>,
}

impl Machines {
    fn new(threads: usize) -> Result<Self, Failure> {
        let seats = threads + 1;
        Ok(Self {
            all: Crew::shared(half_of_machine(threads), seats)?,
            apart: (0..seats).map(|_| Crew::used(APART, 1).map(Arc::new)).collect::<Result<_, _>>()?,
            threads,
            length: Shape::length(threads),
            files: Mutex::new(Weak::new()),
        })
    }

    /// For two threads, and in a hurry.
    #[cfg(test)]
    fn small() -> Self {
        Self {
            all: Arc::new(Crew::fresh(64 << 20, 3).unwrap()),
            apart: (0..3).map(|_| Arc::new(Crew::fresh(16 << 20, 1).unwrap())).collect(),
            threads: 2,
            length: 4 << 20,
            files: Mutex::new(Weak::new()),
        }
    }
}

/// The memory of a machine that one thread has to itself, in bytes. Far more than is touched: each processor keeps a part of its
/// share as a cache, which is to hold what a thread gives back.
const APART: u64 = 128 << 20;

/// Half of what the machine for all threads has, in bytes: a file that is cached and a copy of it for each thread, and then some.
fn half_of_machine(threads: usize) -> u64 {
    threads as u64 * (Shape::length(threads) + (32 << 20))
}

fn memory(threads: Option<usize>) -> u64 {
    let threads = most(threads);
    let linux = 4 * threads as u64 * Shape::length(threads);
    2 * half_of_machine(threads) + (threads as u64 + 1) * APART + linux
}

/// The most threads that work together: what the user asked for, or one a processor, but at least two.
fn most(asked: Option<usize>) -> usize {
    asked.unwrap_or_else(|| processors().len().max(2))
}

/// 1, 2, 4 and so on, and the most.
fn counts(most: usize) -> Vec<usize> {
    let mut counts: Vec<usize> =
        std::iter::successors(Some(1), |n| Some(2 * n)).take_while(|&n| n < most).collect();
    counts.push(most);
    counts
}

fn run(context: &Context<'_>) -> Result<report::Experiment, Failure> {
    let most = most(context.threads);
    hosted::check_threads(most, 2)?;
    let machines = Arc::new(Machines::new(most)?);
    let counts = counts(most);
    let mut plan = Plan::over(most);
    let mut lines = Vec::new();
    for work in Work::ALL {
        plan.group();
        for &variant in work.variants() {
            plan.set();
            for churn in [false, true] {
                lines.push(Line::plan(&mut plan, &machines, work, variant, churn, &fitting(&counts, churn)));
            }
        }
    }
    let mut curves = Vec::new();
    for shape in Shape::ALL {
        plan.group();
        for &variant in shapes::variants(shape) {
            plan.set();
            let metric = format!("{}: {}", shape.name(), shapes::words(shape));
            let cases = shapes::plan(&mut plan, &machines, shape, variant, &metric, &counts);
            curves.push((metric, variant, cases));
        }
    }
    plan.group();
    let listing = listing::Listing::plan(&mut plan, &machines);
    let mut results = plan.run(context)?;
    for line in &lines {
        line.compare(find(&lines, line.work, Variant::Apart, line.churn), &mut results, &counts);
    }
    for line in lines.iter().filter(|line| line.churn) {
        let of = |variant| {
            Some((find(&lines, line.work, variant, true)?, find(&lines, line.work, variant, false)?))
        };
        line.compare_alone(of(line.variant), of(Variant::Apart), &mut results);
    }
    for (metric, variant, cases) in &curves {
        scaling(&mut results, metric, *variant, cases, None, &counts, 0, None);
    }
    listing.compare(&mut results);
    if let Some(threads) = counts.iter().find(|&&threads| !fit(threads, true)) {
        results.note(format!(
            "Beside map + unmap, {threads} threads and the one beside are more than the {} processors here: that is left out.",
            processors().len()
        ));
    }
    let mut report = results.report(context);
    report.scaling = true;
    Ok(report)
}

/// The line of this work by this variant.
fn find(lines: &[Line], work: Work, variant: Variant, churn: bool) -> Option<&Line> {
    lines.iter().find(|line| (line.work, line.variant, line.churn) == (work, variant, churn))
}

/// One work by one variant, for every number of threads.
struct Line {
    work: Work,
    variant: Variant,
    churn: bool,
    cases: Vec<CaseId>,
}

impl Line {
    fn plan(
        plan: &mut Plan<'static>,
        machines: &Arc<Machines>,
        work: Work,
        variant: Variant,
        churn: bool,
        counts: &[usize],
    ) -> Self {
        let mut cases = Vec::new();
        for &threads in counts {
            let metric = metric(work, churn);
            let case = match (variant, work.of_linux()) {
                (Variant::Linux, Some(same)) => {
                    Probe::Scale { work: same, threads, churn }.case(metric, work.unit())
                }
                _ => {
                    let machines = machines.clone();
                    Case::new(variant.role(), variant.words(), threads, metric, work.unit(), move || {
                        work::set_up(&machines, work, variant, threads, churn)
                    })
                }
            };
            let above = has_clearing(work, variant, churn);
            cases.push(plan.case(if above { case.and(above_clearing(work), "ns") } else { case }));
        }
        Self { work, variant, churn, cases }
    }

    /// Several threads against one. `apart` is the line of threads in machines apart.
    fn compare(&self, apart: Option<&Self>, results: &mut Results, counts: &[usize]) {
        let asked = match (self.variant, self.churn) {
            (Variant::Terrane | Variant::PerCpu, false) => self.work.asked(),
            _ => None,
        };
        let above = has_clearing(self.work, self.variant, self.churn);
        let whole = asked.filter(|_| !above);
        let counts = &fitting(counts, self.churn);
        let apart = apart.filter(|_| self.variant.has_bound()).map(|line| &line.cases[..]);
        let words = metric(self.work, self.churn);
        scaling(results, &words, self.variant, &self.cases, apart, counts, 0, whole);
        if above {
            let words = above_clearing(self.work);
            scaling(results, &words, self.variant, &self.cases, apart, counts, 1, asked);
            if self.variant == Variant::Terrane {
                results.at_most(self.cases[0].metric(1), 40.0);
            }
        }
    }

    /// One thread beside one that maps and unmaps, against the same alone; both also in machines `apart`.
    fn compare_alone(
        &self,
        here: Option<(&Self, &Self)>,
        apart: Option<(&Self, &Self)>,
        results: &mut Results,
    ) {
        let Some((beside, alone)) = here else { return };
        let (work, variant) = (self.work.words(), self.variant.words());
        let ours = matches!(self.variant, Variant::Terrane | Variant::PerCpu);
        let (name, asked) = if self.work == Work::Find {
            (
                format!("{work}, {variant}: rate beside map + unmap / alone"),
                ours.then_some(Asked::AtLeast(0.95)),
            )
        } else {
            let asked = (ours && self.work.is_fault()).then_some(Asked::AtMost(1.1));
            (format!("{work}, {variant}: time beside map + unmap / alone"), asked)
        };
        // Of rates.
        let divide = |beside: &Self, alone: &Self| match self.work {
            Work::Find => (beside.cases[0], alone.cases[0]),
            _ => (alone.cases[0], beside.cases[0]),
        };
        let (over, under) = divide(beside, alone);
        match asked {
            Some(asked) => results.asked(name.clone(), 1.0, over, under, asked),
            None => results.ratio(name.clone(), 1.0, over, under, None),
        }
        if let Some((beside, alone)) = apart.filter(|_| self.variant.has_bound()) {
            let (over, under) = divide(beside, alone);
            results.bound(&name, 1.0, over, under);
        }
    }
}

/// Adds the ratios of several threads to one: of rates, or (`metric` 1) of times. `apart` are the same cases in machines apart.
#[allow(clippy::too_many_arguments, reason = "the columns of a table")]
fn scaling(
    results: &mut Results,
    words: &str,
    variant: Variant,
    cases: &[CaseId],
    apart: Option<&[CaseId]>,
    counts: &[usize],
    metric: usize,
    asked: Option<f64>,
) {
    let divide = |threads: usize, one: CaseId, several: CaseId| {
        let (one, several) = (one.metric(metric), several.metric(metric));
        if metric == 0 { (1.0, several, one) } else { (threads as f64, one, several) }
    };
    for (at, &threads) in counts.iter().enumerate().skip(1) {
        let name = report::Experiment::scaling_name(words, &variant.words(), threads);
        let (factor, over, under) = divide(threads, cases[0], cases[at]);
        match asked.filter(|_| threads == 2) {
            Some(least) => results.asked(name.clone(), factor, over, under, Asked::AtLeast(least)),
            None => results.ratio(name.clone(), factor, over, under, None),
        }
        if let Some(apart) = apart {
            let (factor, over, under) = divide(threads, apart[0], apart[at]);
            results.bound(&name, factor, over, under);
        }
    }
}

/// Whether several threads, and the one beside, have processors of their own: else it is the scheduler that is measured, and
/// no ratio is worth telling.
fn fit(threads: usize, churn: bool) -> bool {
    !churn || threads < processors().len()
}

/// Those numbers of threads that are measured: those that fit, and one thread, which is compared with itself alone.
fn fitting(counts: &[usize], churn: bool) -> Vec<usize> {
    counts.iter().copied().filter(|&threads| threads == 1 || fit(threads, churn)).collect()
}

fn metric(work: Work, churn: bool) -> String {
    let beside = if churn { ", beside map + unmap" } else { "" };
    format!("{}{beside}", work.words())
}

fn above_clearing(work: Work) -> String {
    format!("{}: a fault above clearing the page", work.words())
}

/// Whether the time above clearing pages is measured.
fn has_clearing(work: Work, variant: Variant, churn: bool) -> bool {
    work.is_fault() && variant != Variant::Linux && !churn
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn threads_double_up_to_the_most() {
        assert_eq!(counts(1), [1]);
        assert_eq!(counts(2), [1, 2]);
        assert_eq!(counts(6), [1, 2, 4, 6]);
        assert_eq!(counts(8), [1, 2, 4, 8]);
    }

    #[test]
    fn every_work_and_every_shape_gives_its_figures() {
        let machines = Machines::small();
        for work in Work::ALL {
            for &variant in work.variants().iter().filter(|&&variant| variant != Variant::Linux) {
                for (threads, churn) in [(1, false), (2, true)] {
                    let runner = match work::set_up(&machines, work, variant, threads, churn) {
                        Err(Failure::Unsupported(_)) => continue,
                        runner => runner,
                    };
                    let sample = runner.unwrap()(Duration::from_millis(1)).unwrap();
                    assert_eq!(sample.values.len(), 1 + usize::from(has_clearing(work, variant, churn)));
                    assert!(sample.values[0] > 1.0, "{work:?} {variant:?} {sample:?}");
                }
            }
        }
        for shape in Shape::ALL {
            let mut runner = shapes::set_up(&machines, shape, Variant::Terrane, 2).unwrap();
            let sample = runner(Duration::from_millis(1)).unwrap();
            assert!(sample.values[0] > 1.0, "{shape:?} {sample:?}");
        }
    }
}
