//! Calls that change the layout.

use super::rig::{READ_WRITE, Rig, broken};
use crate::baseline::areas::Areas;
use crate::baseline::linux::Probe;
use crate::baseline::memory_set;
use crate::failure::Failure;
use crate::measure::host::kernel;
use crate::measure::plan::CaseId;
use crate::measure::timing::per_op;
use crate::measure::{Case, Context, Experiment, Plan, Sample};
use crate::report::{self, Role};
use terrane::PAGE_SIZE;
use terrane::space::{MapRequest, SpaceConfig};
use terrane::vma::Prot;

/// `terrane bench map`.
pub static BENCH: Experiment = Experiment {
    id: "map",
    title: "map, unmap, protect and brk",
    source: "sources C and E",
    about: "map + unmap: one page that nobody touches, among so many other mappings of a page, whose protections \
            alternate. split + merge: two calls of mprotect on a page in the middle of a mapping of 1025 pages. \
            change: the same on a mapping of its own. brk: grow the heap by 128 KiB and shrink it again. All figures \
            are for both calls. The kernel grants a process 65,530 mappings.",
    seconds: 0.35,
    runs: 7,
    memory: |_| 640 << 20,
    run,
};

/// How many other mappings there are, and how many Linux gets.
const OTHERS: [(Areas, Option<usize>); 4] = [
    (Areas { count: 10 }, Some(10)),
    (Areas { count: 1 << 10 }, Some(1 << 10)),
    (Areas { count: 64 << 10 }, Some(60_000)),
    (Areas { count: 1 << 20 }, None),
];

fn run(context: &Context<'_>) -> Result<report::Experiment, Failure> {
    let mut plan = Plan::new();
    // One group: the sizes are compared with each other.
    let mut linux = Vec::new();
    let terrane = OTHERS.map(|(areas, for_linux)| {
        let metric = format!("map + unmap among {} others", areas.words());
        if let Some(mappings) = for_linux {
            let variant = if mappings == 60_000 { format!("{}, among 60,000", kernel()) } else { kernel() };
            linux.push(plan.case(Probe::MapUnmap { mappings }.case_named(variant, &metric, "ns")));
            plan_memory_set(&mut plan, areas, &metric);
        }
        plan_terrane(&mut plan, areas, &metric)
    });
    plan.group();
    let mut calls = Vec::new();
    for (split, metric) in [(true, "split + merge by protect"), (false, "change in place by protect")] {
        let linux = plan.case(Probe::Protect { split }.case(metric, "ns"));
        calls.push((metric, linux, plan_protect(&mut plan, split, metric)));
    }
    let metric = "brk, grow + shrink";
    let brk = plan.case(Probe::Brk.case(metric, "ns"));
    calls.push((metric, brk, plan_brk(&mut plan, metric)));
    let mut results = plan.run(context)?;
    for (case, (areas, _)) in terrane.into_iter().zip(OTHERS).skip(1) {
        let name = format!("map + unmap, Terrane: time among {} mappings / among 10", areas.words());
        results.ratio(name, 1.0, case, terrane[0], None);
    }
    results.ratio("map + unmap, Linux: time among 60,000 mappings / among 10", 1.0, linux[2], linux[0], None);
    results.ratio("map + unmap among 1 K: time of Linux / Terrane", 1.0, linux[1], terrane[1], None);
    for (metric, linux, terrane) in calls {
        results.ratio(format!("{metric}: time of Linux / Terrane"), 1.0, linux, terrane, None);
    }
    Ok(results.report(context))
}

fn plan_memory_set(plan: &mut Plan<'static>, areas: Areas, metric: &str) {
    plan.case(Case::new(Role::Baseline, "memory_set, without pages", 1, metric, "ns", move || {
        let mut set = memory_set::set(areas);
        Ok(move |time| {
            let ns = per_op(time, |n| {
                (0..n).for_each(|_| memory_set::map_unmap(&mut set, areas.start(areas.count)));
            });
            Ok(Sample::from(ns))
        })
    }));
}

fn plan_terrane(plan: &mut Plan<'static>, areas: Areas, metric: &str) -> CaseId {
    plan.case(Case::new(Role::Terrane, "Terrane", 1, metric, "ns", move || {
        let rig = Rig::new(8 << 20, 1, SpaceConfig::default())?;
        // Protections alternate so that neighbours do not merge; none is that of the page which comes and goes.
        for index in 0..areas.count {
            let prot = if index % 2 == 0 { Prot::READ } else { Prot::empty() };
            rig.map(MapRequest::anonymous(PAGE_SIZE, prot))?;
        }
        if rig.space.map_count() as u64 != areas.count {
            return Err(Failure::Broken("mappings have merged".into()));
        }
        Ok(move |time| rig.repeat(time, |cpu| rig.churn(cpu)))
    }))
}

fn plan_protect(plan: &mut Plan<'static>, split: bool, metric: &str) -> CaseId {
    plan.case(Case::new(Role::Terrane, "Terrane", 1, metric, "ns", move || {
        let rig = Rig::new(8 << 20, 1, SpaceConfig::default())?;
        let (before, prot) = if split { (512, Prot::READ) } else { (1, Prot::empty()) };
        let start = rig.map(MapRequest::anonymous((2 * before + 1) * PAGE_SIZE, prot))? + before * PAGE_SIZE;
        // In place: never what its neighbours have, so nothing splits or merges.
        let (there, back) = if split { (Prot::empty(), Prot::READ) } else { (Prot::READ, READ_WRITE) };
        rig.protect(&rig.cpu(0), start, back)?;
        Ok(move |time| {
            rig.repeat(time, |cpu| {
                rig.protect(cpu, start, there)?;
                rig.protect(cpu, start, back)
            })
        })
    }))
}

fn plan_brk(plan: &mut Plan<'static>, metric: &str) -> CaseId {
    const STEP: u64 = 128 << 10;
    plan.case(Case::new(Role::Terrane, "Terrane", 1, metric, "ns", || {
        let rig = Rig::new(8 << 20, 1, SpaceConfig::default())?;
        let start = 1 << 32;
        rig.space.set_heap(rig.cpu(0).core(), start).map_err(|e| broken("set up a heap")(&e))?;
        // The heap is not empty when it grows: a program's seldom is.
        let end = start + STEP;
        let brk = move |rig: &Rig, cpu: &terrane_hosted::Cpu, end: u64| {
            if rig.space.brk(cpu.core(), end) == end {
                return Ok(());
            }
            Err(Failure::Broken("cannot move the end of the heap".into()))
        };
        brk(&rig, &rig.cpu(0), end)?;
        Ok(move |time| {
            rig.repeat(time, |cpu| {
                brk(&rig, cpu, end + STEP)?;
                brk(&rig, cpu, end)
            })
        })
    }))
}
