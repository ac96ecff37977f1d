//! Cases that take turns.
//!
//! The processors of a machine are not alike. Those of a virtual machine run at different speeds, at times by a factor of 1.7, depending
//! on who else is on the host; and the speeds change within seconds. A ratio of two cases says something of the cases only if both
//! were measured on the same processors, and at the same time. So:
//!
//! * A plan [`over`](Plan::over) several processors takes each sample in several *passes*, between which the threads move on by a
//!   processor. One thread is measured on each of the processors that several use together, and who works beside another on each of
//!   those on which it is measured alone. The value of the sample is the mean of its passes, whatever they say: rates of threads
//!   are added, and times averaged, in the same way.
//! * The cases of a [`set`](Plan::set), which are those that are compared, go through their passes right after each other, every
//!   other pass in the opposite order: one thread, several, several, one. What changes steadily meanwhile hits all alike.
//! * Samples are short and many, and the ratio is the median of those within the rounds: a change of speed spoils a round, and does not
//!   move the median.

use super::Context;
use super::stats::Summary;
use super::threads;
use crate::failure::Failure;
use crate::report::{self, Asked, Counters, Ratio, Role, Row};
use std::time::Duration;

/// The part of a sample's time that a case runs before the first sample, to warm up; what it measures then is
/// thrown away.
const WARM_UP: f64 = 0.25;

/// What one turn of a case gave.
#[derive(Debug)]
pub struct Sample {
    /// A value for each metric of the case.
    pub values: Vec<f64>,
    /// What was counted meanwhile.
    pub counters: Counters,
}

impl Sample {
    /// Adds what another pass gave.
    fn add(&mut self, part: &Self) {
        self.values.iter_mut().zip(&part.values).for_each(|(sum, value)| *sum += value);
        self.counters.add(&part.counters);
    }
}

impl From<f64> for Sample {
    fn from(value: f64) -> Self {
        Self { values: vec![value], counters: Counters::default() }
    }
}

/// The most passes of a sample.
const PASSES: usize = 8;

/// Takes one sample of about the given length, or its part of one pass.
pub type Runner<'a> = Box<dyn FnMut(Duration) -> Result<Sample, Failure> + 'a>;

/// A variant measured with a number of threads.
pub struct Case<'a> {
    role: Role,
    variant: String,
    threads: usize,
    metrics: Vec<(String, &'static str)>,
    set_up: Box<dyn FnOnce() -> Result<Runner<'a>, Failure> + 'a>,
}

impl<'a> Case<'a> {
    /// A case that measures one thing, called `metric` and counted in `unit`.
    ///
    /// `set_up` is called when the turn of the case's group comes, and what it made is dropped when the group is
    /// done. If it returns [`Failure::Unsupported`], the case is left out and the report says why.
    pub fn new<R>(
        role: Role,
        variant: impl Into<String>,
        threads: usize,
        metric: impl Into<String>,
        unit: &'static str,
        set_up: impl FnOnce() -> Result<R, Failure> + 'a,
    ) -> Self
    where
        R: FnMut(Duration) -> Result<Sample, Failure> + 'a,
    {
        Self {
            role,
            variant: variant.into(),
            threads,
            metrics: vec![(metric.into(), unit)],
            set_up: Box::new(move || Ok(Box::new(set_up()?) as Runner<'a>)),
        }
    }

    /// The same case, measuring another thing as well: every sample has one more value.
    pub fn and(mut self, metric: impl Into<String>, unit: &'static str) -> Self {
        self.metrics.push((metric.into(), unit));
        self
    }
}

/// A case of a plan: the name by which results are asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CaseId(usize);

impl CaseId {
    /// The case's metric number `index`, counted from 0.
    pub fn metric(self, index: usize) -> Pick {
        Pick { case: self.0, metric: index }
    }
}

/// One metric of one case.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pick {
    case: usize,
    metric: usize,
}

impl From<CaseId> for Pick {
    fn from(id: CaseId) -> Self {
        id.metric(0)
    }
}

/// Cases to be measured, in groups. The cases of a group take turns; groups follow each other.
pub struct Plan<'a> {
    cases: Vec<Case<'a>>,
    /// Where each group but the first starts.
    groups: Vec<usize>,
    /// Where sets start, other than with a group.
    sets: Vec<usize>,
    /// How many processors the threads move over.
    processors: usize,
}

impl<'a> Plan<'a> {
    /// A plan with nothing in it, whose threads stay where they are.
    pub fn new() -> Self {
        Self::over(1)
    }

    /// A plan with nothing in it, each of whose cases is measured on every one of so many processors (or as many as there are): the
    /// most that its threads use together.
    pub fn over(processors: usize) -> Self {
        Self { cases: Vec::new(), groups: Vec::new(), sets: Vec::new(), processors }
    }

    /// Begins a new group. Cases that are compared with each other belong in one.
    pub fn group(&mut self) {
        self.groups.push(self.cases.len());
    }

    /// Begins a new set within the group: the cases that follow are measured right after each other.
    pub fn set(&mut self) {
        self.sets.push(self.cases.len());
    }

    /// Adds a case to the present group.
    pub fn case(&mut self, case: Case<'a>) -> CaseId {
        self.cases.push(case);
        CaseId(self.cases.len() - 1)
    }

    /// Measures every case.
    ///
    /// # Errors
    /// The first failure of a case, other than [`Failure::Unsupported`] at set-up.
    pub fn run(self, context: &Context<'_>) -> Result<Results, Failure> {
        let total = self.cases.len();
        context.progress.steps(total * (context.runs + 1));
        let sample_time = context.time.div_f64(context.runs as f64 + WARM_UP);
        let mut results = Results {
            cases: Vec::with_capacity(total),
            ratios: Vec::new(),
            notes: Vec::new(),
            missing: Vec::new(),
        };
        let (sets, processors) = (self.sets, self.processors.min(threads::processors().len()));
        let mut cases = self.cases.into_iter().enumerate().peekable();
        for end in self.groups.into_iter().chain([total]) {
            let mut group = Vec::new();
            while let Some((index, case)) = cases.next_if(|&(index, _)| index < end) {
                group.push((index, measure_ready(case, &mut results)?));
            }
            let mut group: Vec<_> = group.chunk_by_mut(|_, (index, _)| !sets.contains(index)).collect();
            run_group(&mut group, context, sample_time, processors, &mut results)?;
        }
        Ok(results)
    }
}

/// Sets `case` up and makes room for its results; `None` if this machine cannot run it.
fn measure_ready<'a>(case: Case<'a>, results: &mut Results) -> Result<Option<Runner<'a>>, Failure> {
    let runner = match (case.set_up)() {
        Ok(runner) => Some(runner),
        Err(Failure::Unsupported(why)) => {
            results.leave_out(&case.variant, &case.metrics[0].0, why);
            None
        }
        Err(failure) => return Err(failure),
    };
    results.cases.push(Measured {
        role: case.role,
        variant: case.variant,
        threads: case.threads,
        series: case
            .metrics
            .into_iter()
            .map(|(metric, unit)| Series { metric, unit, samples: Vec::new(), at_most: None })
            .collect(),
        counters: Counters::default(),
    });
    Ok(runner)
}

/// A case that is ready, and its number.
type Ready<'a> = (usize, Option<Runner<'a>>);

/// Takes all samples of one group, set after set: a warm-up of every case, then a sample of every case, again and again.
fn run_group(
    group: &mut [&mut [Ready<'_>]],
    context: &Context<'_>,
    sample_time: Duration,
    processors: usize,
    results: &mut Results,
) -> Result<(), Failure> {
    for round in 0..=context.runs {
        for set in group.iter_mut() {
            let time = if round == 0 { sample_time.mul_f64(WARM_UP) } else { sample_time };
            let samples = run_set(set, context, time, processors, round, results)?;
            for ((index, _), sample) in set.iter().zip(samples) {
                if let Some(sample) = sample.filter(|_| round > 0) {
                    results.cases[*index].take(sample);
                }
            }
            context.progress.advance(set.len());
        }
    }
    Ok(())
}

/// Takes one sample of every case of a set: in as many passes as there are processors, forth and back.
fn run_set(
    set: &mut [Ready<'_>],
    context: &Context<'_>,
    time: Duration,
    processors: usize,
    round: usize,
    results: &Results,
) -> Result<Vec<Option<Sample>>, Failure> {
    let passes = processors.clamp(1, PASSES);
    let mut samples: Vec<Option<Sample>> = set.iter().map(|_| None).collect();
    for pass in 0..passes {
        // Another processor begins each round; where there are more than passes, all have their turn in the end.
        let _turned = threads::turn(round + pass * processors / passes, processors);
        for step in 0..set.len() {
            let backwards = (round * passes + pass) % 2 == 1;
            let at = if backwards { set.len() - 1 - step } else { step };
            let (index, Some(runner)) = &mut set[at] else { continue };
            let case = &results.cases[*index];
            context.progress.begin(format!("{} · {}", case.series[0].metric, case.variant));
            let mut part = runner(time.div_f64(passes as f64))?;
            part.values.iter_mut().for_each(|value| *value /= passes as f64);
            match &mut samples[at] {
                Some(sample) => sample.add(&part),
                sample => *sample = Some(part),
            }
        }
    }
    Ok(samples)
}

/// The samples of one metric, in the order in which they were taken.
struct Series {
    metric: String,
    unit: &'static str,
    samples: Vec<f64>,
    at_most: Option<f64>,
}

/// A measured case.
struct Measured {
    role: Role,
    variant: String,
    threads: usize,
    series: Vec<Series>,
    counters: Counters,
}

impl Measured {
    fn take(&mut self, sample: Sample) {
        for (series, value) in self.series.iter_mut().zip(sample.values) {
            series.samples.push(value);
        }
        self.counters.add(&sample.counters);
    }
}

/// What a plan measured. Ratios and rows worked out from several cases are added before it becomes a report.
pub struct Results {
    cases: Vec<Measured>,
    ratios: Vec<Ratio>,
    notes: Vec<String>,
    missing: Vec<Missing>,
}

/// A variant that this machine cannot run.
struct Missing {
    variant: String,
    why: String,
    metrics: Vec<String>,
}

impl Missing {
    fn note(&self) -> String {
        let others = match self.metrics.len() - 1 {
            0 => String::new(),
            1 => " and one other".to_owned(),
            n => format!(" and {n} others"),
        };
        format!("{} is left out of “{}”{others}: {}.", self.variant, self.metrics[0], self.why)
    }
}

impl Results {
    /// Says that `variant` could not be measured.
    fn leave_out(&mut self, variant: &str, metric: &str, why: String) {
        let metric = metric.to_owned();
        match self.missing.iter_mut().find(|missing| missing.variant == variant && missing.why == why) {
            Some(missing) if missing.metrics.contains(&metric) => {}
            Some(missing) => missing.metrics.push(metric),
            None => self.missing.push(Missing { variant: variant.to_owned(), why, metrics: vec![metric] }),
        }
    }

    /// The samples of a metric.
    fn samples(&self, pick: Pick) -> &[f64] {
        self.cases
            .get(pick.case)
            .and_then(|case| case.series.get(pick.metric))
            .map_or(&[], |series| &series.samples)
    }

    /// The median of a metric; `None` if it was left out.
    pub fn median(&self, pick: impl Into<Pick>) -> Option<f64> {
        Summary::of(self.samples(pick.into())).map(|summary| summary.median)
    }

    /// Of several metrics that were measured, the one with the lowest median.
    pub fn lowest(&self, picks: &[CaseId]) -> Option<Pick> {
        let measured = picks.iter().filter_map(|&id| Some((self.median(id)?, Pick::from(id))));
        measured.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, pick)| pick)
    }

    /// `f` of the samples of several metrics, taken round by round, so that what drifts cancels out.
    fn by_round(&self, picks: &[Pick], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
        let rounds = picks.iter().map(|&pick| self.samples(pick).len()).min().unwrap_or(0);
        (0..rounds)
            .map(|round| f(&picks.iter().map(|&pick| self.samples(pick)[round]).collect::<Vec<_>>()))
            .collect()
    }

    /// Adds the ratio `factor * over / under`: the median of the ratios within each round.
    /// Does nothing if one of the two was left out.
    pub fn ratio(
        &mut self,
        name: impl Into<String>,
        factor: f64,
        over: impl Into<Pick>,
        under: impl Into<Pick>,
        published: Option<f64>,
    ) {
        self.push_ratio(name, factor, over.into(), under.into(), published, None);
    }

    /// The same, with what is asked of it.
    pub fn asked(
        &mut self,
        name: impl Into<String>,
        factor: f64,
        over: impl Into<Pick>,
        under: impl Into<Pick>,
        asked: Asked,
    ) {
        self.push_ratio(name, factor, over.into(), under.into(), None, Some(asked));
    }

    fn push_ratio(
        &mut self,
        name: impl Into<String>,
        factor: f64,
        over: Pick,
        under: Pick,
        published: Option<f64>,
        asked: Option<Asked>,
    ) {
        let ratios = self.by_round(&[over, under], |v| factor * v[0] / v[1]);
        if let Some(summary) = Summary::of(&ratios) {
            let (at_least, at_most) = match asked {
                Some(Asked::AtLeast(least)) => (Some(least), None),
                Some(Asked::AtMost(most)) => (None, Some(most)),
                None => (None, None),
            };
            self.ratios.push(Ratio {
                name: name.into(),
                value: summary.median,
                published,
                at_least,
                at_most,
                bound: None,
            });
        }
    }

    /// Adds the ratio of the largest sample of a metric to the smallest: how steady it is from run to run.
    pub fn spread(&mut self, name: impl Into<String>, pick: impl Into<Pick>, published: Option<f64>) {
        if let Some(summary) = Summary::of(self.samples(pick.into())) {
            self.ratios.push(Ratio {
                name: name.into(),
                value: summary.max / summary.min,
                published,
                at_least: None,
                at_most: None,
                bound: None,
            });
        }
    }

    /// Says of the ratios called `name` that `factor * over / under` is all that this machine gives: the same where nothing is
    /// shared but the hardware. Does nothing if one of the two was left out.
    pub fn bound(&mut self, name: &str, factor: f64, over: impl Into<Pick>, under: impl Into<Pick>) {
        let bounds = self.by_round(&[over.into(), under.into()], |v| factor * v[0] / v[1]);
        if let Some(summary) = Summary::of(&bounds) {
            let named = self.ratios.iter_mut().filter(|ratio| ratio.name == name);
            named.for_each(|ratio| ratio.bound = Some(summary.median));
        }
    }

    /// Says that a metric shall be `most` at most.
    pub fn at_most(&mut self, pick: impl Into<Pick>, most: f64) {
        let pick = pick.into();
        let series = self.cases.get_mut(pick.case).and_then(|case| case.series.get_mut(pick.metric));
        if let Some(series) = series {
            series.at_most = Some(most);
        }
    }

    /// Adds a case that was not measured but worked out, round by round, from others: `f` gets a sample of each.
    pub fn derive(
        &mut self,
        role: Role,
        variant: &str,
        threads: usize,
        metric: (&str, &'static str),
        picks: &[Pick],
        f: impl Fn(&[f64]) -> f64,
    ) -> CaseId {
        let samples = self.by_round(picks, f);
        self.cases.push(Measured {
            role,
            variant: variant.to_owned(),
            threads,
            series: vec![Series { metric: metric.0.to_owned(), unit: metric.1, samples, at_most: None }],
            counters: Counters::default(),
        });
        CaseId(self.cases.len() - 1)
    }

    /// Adds a sentence to the report's note.
    pub fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// The report. Rows of the same metric come together, in the order in which their metrics first appear.
    pub fn report(self, context: &Context<'_>) -> report::Experiment {
        let mut rows: Vec<(Row, usize)> = Vec::new();
        let mut metrics: Vec<(String, &'static str)> = Vec::new();
        let mut counters = report::Ordered::<Counters>::default();
        for case in self.cases {
            for series in case.series {
                let Some(summary) = Summary::of(&series.samples) else { continue };
                let key = (series.metric.clone(), series.unit);
                let place = metrics.iter().position(|metric| *metric == key).unwrap_or_else(|| {
                    metrics.push(key);
                    metrics.len() - 1
                });
                let row = Row {
                    variant: case.variant.clone(),
                    threads: case.threads,
                    metric: series.metric,
                    unit: series.unit.to_owned(),
                    median: summary.median,
                    min: summary.min,
                    max: summary.max,
                    at_most: series.at_most,
                    role: case.role,
                };
                rows.push((row, place));
            }
            if !case.counters.is_empty() {
                counters.entry(&case.variant).add(&case.counters);
            }
        }
        rows.sort_by_key(|&(_, place)| place);
        report::Experiment {
            id: context.experiment.id.to_owned(),
            title: context.experiment.title.to_owned(),
            source: context.experiment.source.to_owned(),
            note: std::iter::once(context.experiment.about.to_owned())
                .chain(self.missing.iter().map(Missing::note))
                .chain(self.notes)
                .collect::<Vec<_>>()
                .join(" "),
            rows: rows.into_iter().map(|(row, _)| row).collect(),
            ratios: self.ratios,
            counters,
            scaling: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::{Experiment, progress::Progress};
    use std::cell::RefCell;

    static EXPERIMENT: Experiment = Experiment {
        id: "test",
        title: "Test",
        source: "none",
        about: "About.",
        seconds: 1.0,
        runs: 3,
        memory: |_| 0,
        run: |_| Err(Failure::Closed),
    };

    fn with_context<T>(runs: usize, f: impl FnOnce(&Context<'_>) -> T) -> T {
        let progress = Progress::hidden();
        f(&Context {
            experiment: &EXPERIMENT,
            threads: None,
            files: None,
            time: Duration::from_secs(1),
            runs,
            progress: &progress,
        })
    }

    #[test]
    fn cases_of_a_group_take_turns_and_groups_follow_each_other() {
        let turns = RefCell::new(String::new());
        let case = |name: char| {
            let turns = &turns;
            Case::new(Role::Baseline, name, 1, "m", "ns", move || {
                Ok(move |_| {
                    turns.borrow_mut().push(name);
                    Ok(Sample::from(1.0))
                })
            })
        };
        let mut plan = Plan::new();
        plan.case(case('A'));
        plan.case(case('B'));
        plan.group();
        plan.case(case('C'));
        with_context(2, |context| plan.run(context)).unwrap();
        assert_eq!(*turns.borrow(), "ABBAABCCC");
    }

    #[test]
    fn cases_of_a_set_go_forth_and_back_and_are_measured_on_every_processor() {
        let processors = threads::processors().len().min(2);
        let turns = RefCell::new(Vec::new());
        let case = |name: char| {
            let turns = &turns;
            Case::new(Role::Baseline, name, 1, "m", "ns", move || {
                Ok(move |_| {
                    let processor = threads::processor_of(0);
                    turns.borrow_mut().push((name, processor));
                    // The first processor is half as fast.
                    Ok(Sample::from(if processor == threads::processors()[0] { 20.0 } else { 10.0 }))
                })
            })
        };
        let mut plan = Plan::over(2);
        plan.case(case('A'));
        plan.case(case('B'));
        plan.set();
        plan.case(case('C'));
        let results = with_context(2, |context| plan.run(context)).unwrap();
        let turns = turns.into_inner();
        let names: String = turns.iter().map(|&(name, _)| name).collect();
        if processors == 2 {
            assert_eq!(names, "ABBACCABBACCABBACC");
            let round = |turns: &[(char, usize)]| turns.iter().map(|&(_, at)| at).collect::<Vec<_>>();
            let [first, second] = [threads::processors()[0], threads::processors()[1]];
            assert_eq!(round(&turns[..6]), [first, first, second, second, first, second]);
            assert_eq!(round(&turns[6..12]), [second, second, first, first, second, first]);
            assert_eq!(results.samples(CaseId(0).into()), [15.0, 15.0]);
        } else {
            assert_eq!(names, "ABCBACABC");
        }
        assert_eq!(threads::processor_of(0), threads::processors()[0], "moved back in the end");
    }

    #[test]
    fn the_time_of_a_case_is_shared_by_its_samples() {
        let times = RefCell::new(Vec::new());
        let mut plan = Plan::new();
        plan.case(Case::new(Role::Baseline, "a", 1, "m", "ns", || {
            Ok(|time: Duration| {
                times.borrow_mut().push(time.as_secs_f64());
                Ok(Sample::from(1.0))
            })
        }));
        with_context(4, |context| plan.run(context)).unwrap();
        let times = times.into_inner();
        assert_eq!(times.len(), 5);
        assert!((times.iter().sum::<f64>() - 1.0).abs() < 1e-6, "{times:?}");
        assert!(times[0] < times[1]);
    }

    /// A case that returns the given values, one a sample; the warm-up gets the first and is forgotten.
    fn series(
        role: Role,
        variant: &'static str,
        metric: &'static str,
        values: &'static [f64],
    ) -> Case<'static> {
        Case::new(role, variant, 1, metric, "ns", move || {
            let mut next = std::iter::once(values[0]).chain(values.iter().copied());
            Ok(move |_| {
                let counters = Counters::from([("pgfault", 2)]);
                Ok(Sample { values: vec![next.next().unwrap_or(0.0)], counters })
            })
        })
    }

    #[test]
    fn ratios_pair_the_samples_of_a_round() {
        let mut plan = Plan::new();
        // The machine slows down by half from round to round; b always takes twice as long as a.
        let a = plan.case(series(Role::Baseline, "a", "m", &[100.0, 150.0, 225.0]));
        let b = plan.case(series(Role::Terrane, "b", "m", &[200.0, 300.0, 450.0]));
        let mut results = with_context(3, |context| plan.run(context)).unwrap();
        results.ratio("b / a", 1.0, b, a, Some(2.5));
        results.asked("c", 1.0, b, a, Asked::AtMost(1.5));
        results.bound("c", 1.0, a, b);
        results.at_most(b, 7.0);
        results.derive(Role::Terrane, "b over a", 1, ("d", "ns"), &[a.into(), b.into()], |v| v[1] - v[0]);
        assert_eq!(results.lowest(&[b, a]), Some(a.into()));
        let report = with_context(3, |context| results.report(context));
        let ratio = Ratio { name: "b / a".into(), value: 2.0, published: Some(2.5), ..Ratio::default() };
        let asked = Ratio {
            name: "c".into(),
            published: None,
            at_most: Some(1.5),
            bound: Some(0.5),
            ..ratio.clone()
        };
        assert_eq!(report.ratios, [ratio, asked]);
        assert_eq!(report.rows.iter().map(|row| row.at_most).collect::<Vec<_>>(), [None, Some(7.0), None]);
        assert_eq!(report.rows.len(), 3);
        assert_eq!((report.rows[2].median, report.rows[2].min, report.rows[2].max), (150.0, 100.0, 225.0));
        assert_eq!(report.counters.get("a").and_then(|counters| counters.get("pgfault")), Some(&6));
    }

    #[test]
    fn rows_of_a_metric_stand_together_and_unsupported_cases_leave_a_note() {
        let mut plan = Plan::new();
        plan.case(series(Role::Baseline, "a", "first", &[1.0]));
        plan.case(series(Role::Baseline, "a", "second", &[1.0]));
        let missing = plan.case(Case::new(Role::Linux, "old kernel", 1, "first", "ns", || {
            Err::<fn(Duration) -> Result<Sample, Failure>, _>(Failure::Unsupported("too old".into()))
        }));
        let b = plan.case(series(Role::Terrane, "b", "first", &[1.0]));
        let mut results = with_context(1, |context| plan.run(context)).unwrap();
        results.ratio("nothing to compare", 1.0, b, missing, None);
        let report = with_context(1, |context| results.report(context));
        let metrics: Vec<_> =
            report.rows.iter().map(|row| (row.metric.as_str(), row.variant.as_str())).collect();
        assert_eq!(metrics, [("first", "a"), ("first", "b"), ("second", "a")]);
        assert!(report.ratios.is_empty());
        assert_eq!(report.note, "About. old kernel is left out of “first”: too old.");
    }
}
