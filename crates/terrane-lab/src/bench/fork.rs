//! Copies of address spaces.

use super::rig::{self, READ_WRITE, Rig, broken};
use crate::baseline::linux::Probe;
use crate::failure::Failure;
use crate::measure::plan::CaseId;
use crate::measure::timing::timed;
use crate::measure::{Case, Context, Experiment, Plan};
use crate::report::{self, Role};
use std::time::{Duration, Instant};
use terrane::PAGE_SIZE;
use terrane::space::{MapRequest, SpaceConfig};
use terrane::sync::Shared;
use terrane::vma::Prot;
use terrane_hosted::Space;

/// `terrane bench fork`.
pub static BENCH: Experiment = Experiment {
    id: "fork",
    title: "fork and copy on write",
    source: "sources B and E",
    about: "fork: until the call returns to the parent, with so much memory touched, or with so many mappings of a \
            page, all touched; and until the child, which does nothing, is gone. Linux makes and ends a process \
            besides. copy: the first write to a page that two spaces share, while both have it.",
    seconds: 0.35,
    runs: 7,
    memory: |_| 768 << 20,
    run,
};

/// The mappings of the parent that has many.
const MAPPINGS: usize = 10_000;
/// What the child writes, in bytes.
const WRITTEN: u64 = 8 << 20;

fn run(context: &Context<'_>) -> Result<report::Experiment, Failure> {
    let mut plan = Plan::new();
    let mut pairs = Vec::new();
    for mib in [1, 64, 256] {
        plan.group();
        let words = format!("{mib} MiB touched");
        let linux = plan.case(named(Probe::Fork { mib }, &words));
        pairs.push((words.clone(), linux, plan_fork(&mut plan, Parent::Memory(mib as u64), &words), mib));
    }
    plan.group();
    let words = "10,000 mappings";
    let linux = plan.case(named(Probe::ForkMappings { mappings: MAPPINGS }, words));
    pairs.push((words.to_owned(), linux, plan_fork(&mut plan, Parent::Mappings(MAPPINGS as u64), words), 0));
    plan.group();
    let metric = "copy on write";
    let linux_copy = plan.case(Probe::CopyOnWrite.case(metric, "ns"));
    let copy = plan_copy(&mut plan, true, "Terrane, by stores", metric);
    plan_copy(&mut plan, false, "Terrane", metric);
    let mut results = plan.run(context)?;
    for (words, linux, terrane, mib) in pairs {
        results.ratio(format!("fork, {words}: time of Linux / Terrane"), 1.0, linux, terrane, None);
        if mib == 256 {
            let pages = (mib << 20) as f64 / PAGE_SIZE as f64;
            let metric = "fork, 256 MiB touched, for each page";
            for (role, variant, case) in [
                (Role::Linux, crate::measure::host::kernel(), linux),
                (Role::Terrane, "Terrane".to_owned(), terrane),
            ] {
                let picks = &[case.into()];
                results.derive(role, &variant, 1, (metric, "ns"), picks, |v| v[0] * 1000.0 / pages);
            }
        }
    }
    results.ratio("copy on write: time of Linux / Terrane by stores", 1.0, linux_copy, copy, None);
    Ok(results.report(context))
}

fn named(probe: Probe, words: &str) -> Case<'static> {
    probe.case(format!("fork, {words}"), "µs").and(format!("fork + exit, {words}"), "µs")
}

/// What is forked.
#[derive(Clone, Copy)]
enum Parent {
    /// One mapping of so many MiB.
    Memory(u64),
    /// So many mappings of a page.
    Mappings(u64),
}

impl Parent {
    fn make(self) -> Result<Rig, Failure> {
        let memory = match self {
            Self::Memory(mib) => mib << 20,
            Self::Mappings(count) => count * PAGE_SIZE,
        };
        // Tables of parent and children beside the pages.
        let rig = Rig::new(memory + (16 << 20) + memory / 64, 1, SpaceConfig::default())?;
        rig.cpu(0).switch_to(&rig.space);
        match self {
            Self::Memory(mib) => {
                let start = rig.map(MapRequest::anonymous(mib << 20, READ_WRITE))?;
                rig::store_pages(&mut rig.cpu(0), start, mib << 20)?;
            }
            Self::Mappings(count) => {
                for index in 0..count {
                    // Protections alternate so that neighbours do not merge.
                    let prot = READ_WRITE | if index % 2 == 0 { Prot::empty() } else { Prot::EXEC };
                    let start = rig.map(MapRequest::anonymous(PAGE_SIZE, prot))?;
                    rig::store_pages(&mut rig.cpu(0), start, PAGE_SIZE)?;
                }
            }
        }
        Ok(rig)
    }
}

fn plan_fork(plan: &mut Plan<'static>, parent: Parent, words: &str) -> CaseId {
    let case = Case::new(Role::Terrane, "Terrane", 1, format!("fork, {words}"), "µs", move || {
        let rig = parent.make()?;
        Ok(move |time| {
            rig.counted(|| {
                rig::alone(&rig, |cpu| {
                    let start = Instant::now();
                    let (mut forks, mut wholes, mut rounds) = (Duration::ZERO, Duration::ZERO, 0u32);
                    while rounds == 0 || start.elapsed() < time {
                        let begun = Instant::now();
                        let child = rig.space.fork(cpu.core()).map_err(|e| broken("fork")(&e))?;
                        forks += begun.elapsed();
                        child.destroy(cpu.core());
                        wholes += begun.elapsed();
                        rounds += 1;
                    }
                    let each = |sum: Duration| sum.as_nanos() as f64 / 1000.0 / f64::from(rounds);
                    Ok(vec![each(forks), each(wholes)])
                })
            })
        })
    });
    plan.case(case.and(format!("fork + exit, {words}"), "µs"))
}

/// Plans a child that writes to every page it shares with its parent, by stores or by calls of the fault handler.
fn plan_copy(plan: &mut Plan<'static>, stores: bool, variant: &str, metric: &str) -> CaseId {
    plan.case(Case::new(Role::Terrane, variant, 1, metric, "ns", move || {
        let rig = Rig::new(48 << 20, 1, SpaceConfig::default())?;
        rig.cpu(0).switch_to(&rig.space);
        let start = rig.map(MapRequest::anonymous(WRITTEN, READ_WRITE))?;
        rig::store_pages(&mut rig.cpu(0), start, WRITTEN)?;
        Ok(move |time| {
            rig.counted(|| {
                rig::alone(&rig, |cpu| {
                    let begun = Instant::now();
                    let (mut sum, mut rounds) = (Duration::ZERO, 0u64);
                    while rounds == 0 || begun.elapsed() < time {
                        let child = rig.space.fork(cpu.core()).map_err(|e| broken("fork")(&e))?;
                        let child: Shared<Space> = Shared::try_new(child).map_err(|e| broken("fork")(&e))?;
                        if stores {
                            cpu.switch_to(&child);
                        }
                        let (took, result) = timed(|| {
                            if stores {
                                rig::store_pages(cpu, start, WRITTEN)
                            } else {
                                rig::fault_pages(&child, cpu, start, WRITTEN, terrane::vma::Access::Write)
                            }
                        });
                        result?;
                        sum += took;
                        rounds += 1;
                        cpu.switch_to(&rig.space);
                    }
                    Ok(vec![sum.as_nanos() as f64 / ((WRITTEN / PAGE_SIZE) * rounds) as f64])
                })
            })
        })
    }))
}
