//! Cases that take turns.

use super::Context;
use super::stats::Summary;
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

impl From<f64> for Sample {
    fn from(value: f64) -> Self {
        Self { values: vec![value], counters: Counters::default() }
    }
}

/// Takes one sample of about the given length.
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
#[derive(Default)]
pub struct Plan<'a> {
    cases: Vec<Case<'a>>,
    /// Where each group but the first starts.
    groups: Vec<usize>,
}

impl<'a> Plan<'a> {
    /// A plan with nothing in it.
    pub fn new() -> Self {
        Self::default()
    }

    /// Begins a new group. Cases that are compared with each other belong in one.
    pub fn group(&mut self) {
        self.groups.push(self.cases.len());
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
        let mut cases = self.cases.into_iter().enumerate().peekable();
        for end in self.groups.into_iter().chain([total]) {
            let mut group = Vec::new();
            while let Some((index, case)) = cases.next_if(|&(index, _)| index < end) {
                group.push((index, measure_ready(case, &mut results)?));
            }
            run_group(&mut group, context, sample_time, &mut results)?;
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

/// Takes all samples of one group: a warm-up of every case, then a sample of every case, again and again.
fn run_group(
    group: &mut [(usize, Option<Runner<'_>>)],
    context: &Context<'_>,
    sample_time: Duration,
    results: &mut Results,
) -> Result<(), Failure> {
    for round in 0..=context.runs {
        for (index, runner) in group.iter_mut() {
            if let Some(runner) = runner {
                let case = &mut results.cases[*index];
                context.progress.begin(format!("{} · {}", case.series[0].metric, case.variant));
                if round == 0 {
                    runner(sample_time.mul_f64(WARM_UP))?;
                } else {
                    case.take(runner(sample_time)?);
                }
            }
            context.progress.advance(1);
        }
    }
    Ok(())
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
            });
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
        assert_eq!(*turns.borrow(), "ABABABCCC");
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
        results.asked("b / a", 1.0, b, a, Asked::AtMost(1.5));
        results.at_most(b, 7.0);
        results.derive(Role::Terrane, "b over a", 1, ("d", "ns"), &[a.into(), b.into()], |v| v[1] - v[0]);
        assert_eq!(results.lowest(&[b, a]), Some(a.into()));
        let report = with_context(3, |context| results.report(context));
        let ratio =
            Ratio { name: "b / a".into(), value: 2.0, published: Some(2.5), at_least: None, at_most: None };
        let asked = Ratio { published: None, at_most: Some(1.5), ..ratio.clone() };
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
