//! Requirement A4: threads that do nothing but fault.
//!
//! The program of source A: every thread has 8 MiB, touches the first 2 MiB page by page, waits for the others, and gives
//! the pages back with `MADV_DONTNEED`. Between the areas lie pages that keep the areas from becoming one mapping.

use super::hosted::{
    Crew, LOCKINGS, READ_WRITE, broken, check_threads, map, name, role, running, unmap, write_pages,
};
use crate::baseline::linux::Probe;
use crate::failure::Failure;
use crate::measure::plan::{Runner, Sample};
use crate::measure::threads::{Gate, beside, in_rounds};
use crate::measure::timing::timed;
use crate::measure::{Case, Context, Experiment, Plan};
use crate::report;
use std::time::Duration;
use terrane::PAGE_SIZE;
use terrane::space::{Locking, MapRequest, SpaceConfig};
use terrane::vma::{Advice, Prot};

/// `terrane experiments multi-fault`.
pub static EXPERIMENT: Experiment = Experiment {
    id: "multi-fault",
    title: "page faults of many threads",
    source: "source A, asynchronous page fault, 2009",
    about: "Every thread touches 2 MiB page by page, meets the others, gives the pages back, and begins again: faults of \
            all threads in a second, and the time for a touch alone. In areas of their own, in parts of one area, and \
            each with another thread beside that maps and unmaps a page all the while.",
    seconds: 1.0,
    runs: 7,
    memory: |threads| (128 << 20) + threads.unwrap_or(16) as u64 * (12 << 20),
    run,
};

/// What a thread has, and what of it it touches.
const AREA: u64 = 8 << 20;
const TOUCHED: u64 = 2 << 20;
const PAGES: u64 = TOUCHED / PAGE_SIZE;

/// How the threads' areas lie, and whether they are left in peace.
#[derive(Clone, Copy)]
struct Form {
    threads: usize,
    separate: bool,
    churn: bool,
}

impl Form {
    /// In words, for rows.
    fn words(self) -> String {
        let areas = if self.separate { "separate areas" } else { "one area" };
        let beside = if self.churn { ", beside map + unmap" } else { "" };
        format!("{areas}{beside}")
    }

    /// Threads in all.
    fn seats(self) -> usize {
        self.threads + usize::from(self.churn)
    }
}

fn run(context: &Context<'_>) -> Result<report::Experiment, Failure> {
    let threads = context.threads();
    check_threads(threads, 2)?;
    let mut plan = Plan::new();
    let mut pairs = Vec::new();
    for churn in [false, true] {
        for separate in [true, false] {
            plan.group();
            // The thread beside takes the place of one that faults: three threads on two processors would
            // measure the scheduler.
            let threads = if churn { threads.saturating_sub(1).max(1) } else { threads };
            let form = Form { threads, separate, churn };
            let cases = LOCKINGS.map(|locking| plan.case(case(form, locking)));
            plan.case(Probe::MultiFault { threads, separate, churn }.case(form.words(), "faults/s"));
            pairs.push((form, cases));
        }
    }
    let mut results = plan.run(context)?;
    for (form, [classic, speculative]) in pairs {
        // The source's is the form with areas of their own and nobody beside.
        let published = (form.separate && !form.churn).then_some(35_949_073.0 / 17_481_387.0);
        let words = form.words();
        results.ratio(
            format!("faults/s, speculative / classic, {words}"),
            1.0,
            speculative,
            classic,
            published,
        );
    }
    results.note("Linux counts faults a second too, but its threads trap, which those of a machine in user space do not.");
    Ok(results.report(context))
}

fn case<'a>(form: Form, locking: Locking) -> Case<'a> {
    let words = form.words();
    let case = Case::new(role(locking), name(locking), form.threads, words.clone(), "faults/s", move || {
        set_up(form, locking)
    });
    let case = case.and(format!("{words}: a touch, each thread"), "ns");
    if form.churn { case.and(format!("{words}: pairs of the thread beside"), "pairs/s") } else { case }
}

fn set_up(form: Form, locking: Locking) -> Result<Runner<'static>, Failure> {
    let crew = Crew::shared((64 << 20) + form.seats() as u64 * (6 << 20), form.seats())?;
    let space = crew.space(SpaceConfig::with_locking(locking))?;
    crew.run(&space);
    let areas = areas(&crew, form)?;
    Ok(Box::new(move |time| {
        crew.run(&space);
        sample(&crew, form, &areas, time)
    }))
}

/// Maps the areas; returns where each thread's begins.
fn areas(crew: &Crew, form: Form) -> Result<Vec<u64>, Failure> {
    let cpu = crew.cpu(0);
    let apart = || map(&cpu, MapRequest::anonymous(PAGE_SIZE, Prot::empty()));
    let area = |len| map(&cpu, MapRequest::anonymous(len, READ_WRITE));
    let threads = form.threads as u64;
    if form.separate {
        return (0..threads)
            .map(|_| {
                let start = area(AREA)?;
                apart().map(|_| start)
            })
            .collect();
    }
    let start = area(AREA * threads)?;
    apart()?;
    Ok((0..threads).map(|index| start + index * AREA).collect())
}

fn sample(crew: &Crew, form: Form, areas: &[u64], time: Duration) -> Result<Sample, Failure> {
    // All have touched before the first gives back: nobody's frames come straight from a neighbour.
    let gate = Gate::new(form.threads);
    let round = |index: usize| -> Result<Duration, Failure> {
        let cpu = &mut *crew.cpu(index);
        let (took, touched) = timed(|| write_pages(cpu, areas[index], PAGES));
        gate.wait();
        touched?;
        let space = running(cpu)?;
        space
            .advise(cpu.core(), areas[index], TOUCHED, Advice::DontNeed)
            .map_err(broken("cannot give pages back"))?;
        Ok(took)
    };
    let faults = || -> Result<[f64; 2], Failure> {
        let rounds = in_rounds(form.threads, form.seats(), time, round)?;
        let faults = rounds.count as f64 * form.threads as f64 * PAGES as f64;
        Ok([faults / rounds.wall.as_secs_f64(), rounds.each(PAGES as usize)])
    };
    crew.counted(|| {
        if !form.churn {
            return Ok(faults()?.to_vec());
        }
        let cpu = &mut *crew.cpu(form.threads);
        let churn = move || {
            let addr = map(cpu, MapRequest::anonymous(PAGE_SIZE, READ_WRITE))?;
            unmap(cpu, addr, PAGE_SIZE)
        };
        let ([rate, touch], churned) = beside(form.threads, form.seats(), churn, faults)?;
        Ok(vec![rate, touch, 1e9 / churned.ns])
    })
}
