//! Requirement E3: thousands of forked tasks that grow and shrink their heaps.
//!
//! As in the load of source E (AIM7, shared): tasks are forked from one parent, whose memory is touched, so that their
//! reverse mappings hang together. Each grows its heap once, which as in Linux makes a VMA of its own beside the
//! forked one; from then on a job is to grow the heap above that, touch what was added, and give it back, some times
//! over. Workers run the tasks in turn. The end of a VMA moves twice each time; the baseline takes the reverse-mapping
//! lock of the heap for it, as Linux did before 2.6.32.

use super::hosted::{Crew, READ_WRITE, broken, check_threads, map, shared, write_pages};
use super::program::move_heap;
use crate::failure::Failure;
use crate::measure::plan::Runner;
use crate::measure::threads::together;
use crate::measure::{Case, Context, Experiment, Plan};
use crate::report::{self, Role};
use std::time::{Duration, Instant};
use terrane::space::{MapRequest, SpaceConfig};
use terrane::sync::Shared;
use terrane_hosted::{Cpu, Space};

/// `terrane experiments heap`.
pub static EXPERIMENT: Experiment = Experiment {
    id: "heap",
    title: "thousands of forked tasks grow and shrink their heaps",
    source: "source E, avoid unnecessary anon_vma lock acquisition, 2009",
    about: "2,000 tasks, forked from one parent, run in turn. A job grows the heap by 64 KiB, touches it page by page and \
            gives it back, eight times. Published: with the lock in brk the throughput jumps between 65 K and 130 K jobs a \
            minute, without it stays at 130 K.",
    seconds: 4.0,
    runs: 11,
    memory: |_| 832 << 20,
    run,
};

/// Tasks.
const TASKS: usize = 2000;
/// How often a job moves the end up and down, and by how many pages.
const MOVES: u64 = 8;
const PAGES: u64 = 16;
/// Where heaps begin.
const HEAP: u64 = 0x5555_5600_0000;

fn run(context: &Context<'_>) -> Result<report::Experiment, Failure> {
    let workers = context.threads();
    check_threads(workers, 1)?;
    let mut plan = Plan::new();
    let [with, without] = [(Role::Baseline, "lock in brk", true), (Role::Terrane, "no lock in brk", false)]
        .map(|(role, variant, lock)| {
            let case =
                Case::new(role, variant, workers, "throughput", "jobs/min", move || set_up(workers, lock));
            plan.case(case.and("reverse-mapping locks in brk, a job", "locks"))
        });
    let mut results = plan.run(context)?;
    results.ratio("jobs/min, no lock / lock (published: 1 to 2)", 1.0, without, with, Some(2.0));
    results.spread("spread over the runs, max / min, lock", with, Some(2.0));
    results.spread("spread over the runs, max / min, no lock", without, Some(1.0));
    Ok(results.report(context))
}

fn set_up(workers: usize, lock: bool) -> Result<Runner<'static>, Failure> {
    let crew = Crew::shared(384 << 20, workers)?;
    let mut config = SpaceConfig::default();
    config.rmap_lock_on_end_move = lock;
    let tasks = fork_tasks(&crew, config)?;
    let mut next = vec![0; workers];
    Ok(Box::new(move |time| {
        let places: Vec<_> = next.iter_mut().map(parking_lot::Mutex::new).collect();
        let (mut sample, jobs) = crew.counted_with(|| {
            let start = Instant::now();
            let jobs = together(
                workers,
                workers,
                |_| Ok(()),
                |worker, ()| {
                    // Each worker has every so-manyth task.
                    let tasks: Vec<_> = tasks.iter().skip(worker).step_by(workers).collect();
                    jobs(&mut crew.cpu(worker), &tasks, &mut places[worker].lock(), time)
                },
            )?;
            let jobs = jobs.iter().sum::<u64>() as f64;
            Ok((vec![jobs * 60.0 / start.elapsed().as_secs_f64()], jobs))
        })?;
        let locks = sample.counters.get(terrane::stats::Counter::RmapLock.name()).copied().unwrap_or(0);
        // Shown, above all, when it is nought.
        *sample.counters.entry(terrane::stats::Counter::RmapLock.name()) = locks;
        sample.values.push(locks as f64 / jobs);
        Ok(sample)
    }))
}

/// A parent with memory and a heap, and its children, each with a heap that it has grown.
fn fork_tasks(crew: &Crew, config: SpaceConfig) -> Result<Vec<Shared<Space>>, Failure> {
    let parent = crew.space(config)?;
    let cpu = &mut *crew.cpu(0);
    cpu.switch_to(&parent);
    parent.set_heap(cpu.core(), HEAP).map_err(broken("cannot have a heap"))?;
    let heap = move_heap(cpu, 32)?;
    write_pages(cpu, heap, 32)?;
    let data = map(cpu, MapRequest::anonymous(256 << 10, READ_WRITE))?;
    write_pages(cpu, data, 64)?;
    let mut tasks = Vec::with_capacity(TASKS);
    for _ in 0..TASKS {
        let task = shared(parent.fork(cpu.core()).map_err(broken("cannot fork"))?)?;
        cpu.switch_to(&task);
        let grown = move_heap(cpu, 1)?;
        write_pages(cpu, grown, 1)?;
        tasks.push(task);
    }
    cpu.switch_off();
    Ok(tasks)
}

/// Jobs of `tasks` in turn, from number `next` on, until `time` is over; returns how many.
fn jobs(cpu: &mut Cpu, tasks: &[&Shared<Space>], next: &mut usize, time: Duration) -> Result<u64, Failure> {
    let (start, mut count) = (Instant::now(), 0);
    while start.elapsed() < time {
        if let Some(task) = tasks.get(*next % tasks.len().max(1)) {
            cpu.switch_to(task);
            for _ in 0..MOVES {
                let grown = move_heap(cpu, PAGES as i64)?;
                write_pages(cpu, grown, PAGES)?;
                move_heap(cpu, -(PAGES as i64))?;
            }
        }
        *next += 1;
        count += 1;
    }
    cpu.switch_off();
    Ok(count)
}
