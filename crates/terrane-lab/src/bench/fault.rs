//! Single page faults.

use super::rig::{self, LOCKINGS, READ_WRITE, Rig};
use crate::baseline::linux::{FILE_LENGTH, Fill, Probe};
use crate::baseline::zeroing::clear;
use crate::failure::Failure;
use crate::measure::host::kernel;
use crate::measure::plan::CaseId;
use crate::measure::threads::{beside, in_rounds, together};
use crate::measure::timing::timed;
use crate::measure::{Case, Context, Experiment, Plan, Sample};
use crate::report::{self, Asked, Role};
use std::time::Duration;
use terrane::PAGE_SIZE;
use terrane::addr::Frame;
use terrane::space::{Locking, MapRequest, SpaceConfig};
use terrane::vma::{Access, Advice, Prot};

/// `terrane bench fault`.
pub static BENCH: Experiment = Experiment {
    id: "fault",
    title: "single page faults",
    source: "sources A and B",
    about: "Every thread touches 2 MiB page by page and gives them back, untimed; nanoseconds for each fault of each \
            thread. Within a round, one thread is measured on each of the processors that several use, before and after them, and the \
            mean taken; so is who has another thread beside. By calls: of the fault handler alone; by stores: of a processor in software, with TLB and page \
            walk; apart: each thread in a machine of its own, where nothing is shared but the hardware; as a column, the same ratio there. Clearing a page is part of every first write; it is measured on frames taken, and given back, in \
            the same order. The thread beside maps and unmaps a page all the while. The file is of 16 MiB and \
            cached; fault-around is of 64 KiB.",
    seconds: 0.4,
    runs: 15,
    memory: |threads| (512 << 20) + rig::for_each_thread(threads, 128 << 20),
    run,
};

/// The memory of a machine, in bytes. Far more than is touched: each processor keeps an eighth of its share as a
/// cache, which is to hold what a thread gives back, as in a machine of ordinary size.
fn memory_for(threads: usize) -> u64 {
    (256 << 20) + threads as u64 * 2 * AREA
}

/// The pages that a thread touches: a whole page table's worth.
const PAGES: usize = 512;
/// The same in bytes.
const AREA: u64 = PAGES as u64 * PAGE_SIZE;
/// Where the areas are.
const BASE: u64 = 1 << 32;

fn run(context: &Context<'_>) -> Result<report::Experiment, Failure> {
    let threads = rig::threads(context)?;
    // At least two: one works, and one is beside it.
    let mut plan = Plan::over(threads.max(2));
    let cases = Cases::plan(&mut plan, threads);
    plan_reads(&mut plan);
    plan_file(&mut plan);
    let mut results = plan.run(context)?;
    let above = "fault, above clearing a page";
    for (role, variant, threads, fault, clearing) in [
        (Role::Linux, kernel().as_str(), 1, cases.linux, cases.clearing),
        (Role::Baseline, LOCKINGS[1].1, 1, cases.classic.alone, cases.clearing),
        (Role::Terrane, LOCKINGS[0].1, 1, cases.terrane.alone, cases.clearing),
        (Role::Terrane, LOCKINGS[0].1, threads, cases.terrane.one, cases.clearing_together),
        (Role::Baseline, "Terrane, apart", threads, cases.apart[0], cases.clearing_together),
        (Role::Terrane, "Terrane, by stores", 1, cases.stores, cases.clearing),
    ] {
        let metric = (above, "ns");
        let picks = &[fault.into(), clearing.into()];
        let above = results.derive(role, variant, threads, metric, picks, |v| v[0] - v[1]);
        if fault == cases.terrane.alone {
            results.at_most(above, 40.0);
        }
    }
    let all = [("Terrane", &cases.terrane), ("classic lock", &cases.classic)];
    let [together, churned] = cases.apart;
    for (words, touch) in all {
        let name = |over: &str| format!("{words}: a fault {over} / alone");
        for (how, several) in [("in one mapping", touch.one), ("own mappings", touch.own)] {
            let name = name(&format!("of {threads} threads, {how}"));
            results.ratio(name.clone(), 1.0, several, touch.alone, None);
            results.bound(&name, 1.0, together, cases.terrane.alone);
        }
        for (name, beside) in [
            (name("beside map + unmap"), touch.beside),
            (name("beside map + unmap, among 1000 mappings"), touch.beside_among),
        ] {
            match words {
                "Terrane" => results.asked(name.clone(), 1.0, beside, touch.alone, Asked::AtMost(1.1)),
                _ => results.ratio(name.clone(), 1.0, beside, touch.alone, None),
            }
            results.bound(&name, 1.0, churned, cases.terrane.alone);
        }
    }
    let name = format!("Terrane: a fault of {threads} threads in one mapping / in machines apart");
    results.ratio(name, 1.0, cases.terrane.one, together, None);
    let name = "Terrane: a fault beside map + unmap / the same in machines apart";
    results.ratio(name, 1.0, cases.terrane.beside, churned, None);
    let name = format!("Linux: a fault of {threads} threads in one mapping / alone");
    results.ratio(name, 1.0, cases.linux_together, cases.linux, None);
    results.ratio("Linux: a fault beside map + unmap / alone", 1.0, cases.linux_beside, cases.linux, None);
    let name = "a fault beside map + unmap: time of classic lock / Terrane";
    results.ratio(name, 1.0, cases.classic.beside, cases.terrane.beside, None);
    let name = "map + unmap beside a fault: time of classic lock / Terrane";
    results.ratio(name, 1.0, cases.classic.beside.metric(1), cases.terrane.beside.metric(1), None);
    Ok(results.report(context))
}

/// First touches by calls of one locking.
struct Touches {
    alone: CaseId,
    one: CaseId,
    own: CaseId,
    beside: CaseId,
    beside_among: CaseId,
}

/// All first touches.
struct Cases {
    clearing: CaseId,
    clearing_together: CaseId,
    terrane: Touches,
    classic: Touches,
    stores: CaseId,
    /// Threads together, and beside one that maps and unmaps, each in a machine of its own.
    apart: [CaseId; 2],
    linux: CaseId,
    linux_together: CaseId,
    linux_beside: CaseId,
}

impl Cases {
    /// Plans them in one group: all are compared with each other.
    fn plan(plan: &mut Plan<'static>, threads: usize) -> Self {
        for threads in [1, threads] {
            plan.case(Case::new(Role::Baseline, "one page, hot", threads, "clear a page", "ns", move || {
                Ok(move |time| {
                    let times = together(threads, threads, |_| Ok(clear(1)), |_, mut clear| Ok(clear(time)))?;
                    Ok(Sample::from(times.iter().sum::<f64>() / threads as f64))
                })
            }));
        }
        plan.set();
        let [clearing, clearing_together] = [1, threads].map(|threads| plan.case(clearing(threads)));
        let one = Touch { role: Role::Terrane, variant: "", locking: Locking::Speculative, ..Touch::new() };
        let apart = Touch { role: Role::Baseline, variant: "Terrane, apart", apart: true, ..one };
        let apart =
            [plan.case(Touch { threads, ..apart }.case()), plan.case(Touch { churn: true, ..apart }.case())];
        let [terrane, classic] = LOCKINGS.map(|(role, variant, locking)| {
            // Clearing and machines apart are compared with the first.
            if locking == Locking::Classic {
                plan.set();
            }
            let among = match locking {
                Locking::Speculative => "Terrane, among 1000 others",
                Locking::Classic => "Terrane, classic lock, among 1000 others",
            };
            let touch = Touch { role, variant, locking, ..one };
            Touches {
                alone: plan.case(touch.case()),
                one: plan.case(Touch { threads, ..touch }.case()),
                own: plan.case(Touch { threads, own: true, ..touch }.case()),
                beside: plan.case(Touch { churn: true, ..touch }.case()),
                beside_among: plan.case(Touch { churn: true, others: 1000, variant: among, ..touch }.case()),
            }
        });
        plan.set();
        let stores = Touch { variant: "Terrane, by stores", stores: true, ..one };
        let (alone, _, _) = (
            plan.case(stores.case()),
            plan.case(Touch { threads, ..stores }.case()),
            plan.case(Touch { churn: true, ..stores }.case()),
        );
        plan.set();
        let mut linux = |threads, churn| {
            let case = Probe::FirstTouch { threads, churn }.case(metric(false, churn), "ns");
            plan.case(if churn { case.and(CHURN, "ns") } else { case })
        };
        Self {
            clearing,
            clearing_together,
            terrane,
            classic,
            stores: alone,
            apart,
            linux: linux(1, false),
            linux_together: linux(threads, false),
            linux_beside: linux(1, true),
        }
    }
}

/// What the thread beside gets done.
const CHURN: &str = "map + unmap, beside a thread that faults";

fn metric(own: bool, churn: bool) -> &'static str {
    match (own, churn) {
        (_, true) => "fault, beside a thread that maps and unmaps",
        (true, false) => "fault, threads in mappings of their own",
        (false, false) => "fault, threads in one mapping",
    }
}

/// One way to touch pages first.
#[derive(Clone, Copy)]
struct Touch {
    role: Role,
    variant: &'static str,
    locking: Locking,
    threads: usize,
    /// In mappings of their own, rather than parts of one.
    own: bool,
    /// Beside a thread that maps and unmaps.
    churn: bool,
    /// By stores of the software processor, rather than calls.
    stores: bool,
    /// Every thread in a machine of its own.
    apart: bool,
    /// Other mappings, between those that fault and the one that comes and goes.
    others: u64,
}

impl Touch {
    fn new() -> Self {
        Self {
            role: Role::Terrane,
            variant: "Terrane",
            locking: Locking::Speculative,
            threads: 1,
            own: false,
            churn: false,
            stores: false,
            apart: false,
            others: 0,
        }
    }

    fn rig(&self) -> Result<Rig, Failure> {
        Rig::new(memory_for(self.threads), self.threads + 1, SpaceConfig::with_locking(self.locking))
    }

    fn case(self) -> Case<'static> {
        let case =
            Case::new(self.role, self.variant, self.threads, metric(self.own, self.churn), "ns", move || {
                // Apart, thread `index` has processor 0 of machine `index`; else processor `index` of the one machine.
                let rigs = (0..if self.apart { self.threads + 1 } else { 1 })
                    .map(|_| {
                        let rig = self.rig()?;
                        self.map_areas(&rig)?;
                        Ok(rig)
                    })
                    .collect::<Result<Vec<_>, Failure>>()?;
                let place = move |index: usize| if self.apart { (index, 0) } else { (0, index) };
                if self.stores {
                    (0..self.threads).for_each(|index| rigs[0].cpu(index).switch_to(&rigs[0].space));
                }
                Ok(move |time| {
                    let round = |index: usize| {
                        let (rig, number) = place(index);
                        let (rig, start) = (&rigs[rig], self.start(index));
                        let mut cpu = rig.cpu(number);
                        let (took, result) = timed(|| {
                            if self.stores {
                                rig::store_pages(&mut cpu, start, AREA)
                            } else {
                                rig::fault_pages(&rig.space, &cpu, start, AREA, Access::Write)
                            }
                        });
                        result?;
                        rig.advise(&cpu, start, AREA, Advice::DontNeed)?;
                        Ok(took)
                    };
                    let seats = self.threads + usize::from(self.churn);
                    rigs[0].counted(|| {
                        let faults = || Ok(in_rounds(self.threads, seats, time, round)?.each(PAGES));
                        if !self.churn {
                            return Ok(vec![faults()?]);
                        }
                        let (rig, number) = place(self.threads);
                        let churn = || rigs[rig].churn(&rigs[rig].cpu(number));
                        let (ns, churned) = beside(self.threads, seats, churn, faults)?;
                        Ok(vec![ns, churned.ns])
                    })
                })
            });
        if self.churn { case.and(CHURN, "ns") } else { case }
    }

    /// Where thread `index` has its area. Areas begin at multiples of a page table's span, so threads do not share one,
    /// as the source advises; those that are mappings of their own have a hole behind.
    fn start(self, index: usize) -> u64 {
        BASE + index as u64 * if self.own { 2 * AREA } else { AREA }
    }

    fn map_areas(self, rig: &Rig) -> Result<(), Failure> {
        for index in 0..self.others {
            // A hole behind each, so that they never merge.
            let start = 256 * BASE + index * 2 * PAGE_SIZE;
            rig.map(MapRequest::anonymous(PAGE_SIZE, READ_WRITE).fixed(start))?;
        }
        if !self.own {
            rig.map(MapRequest::anonymous(self.threads as u64 * AREA, READ_WRITE).fixed(BASE))?;
            return Ok(());
        }
        (0..self.threads).try_for_each(|index| {
            rig.map(MapRequest::anonymous(AREA, READ_WRITE).fixed(self.start(index))).map(|_| ())
        })
    }
}

/// Clears as many frames as an area has, taken and given back as faults and the giving back of an area do it.
fn clearing(threads: usize) -> Case<'static> {
    Case::new(Role::Baseline, "frames of Terrane", threads, "clear a page", "ns", move || {
        let rig = Rig::new(memory_for(threads), threads + 1, SpaceConfig::default())?;
        Ok(move |time| {
            let rounds = in_rounds(threads, threads, time, |index| {
                let (machine, cpu) = (rig.machine.machine(), rig.cpu(index));
                let pin = cpu.core().pin();
                let ram = machine.ram(&pin);
                let frames: Vec<Frame> = std::iter::from_fn(|| ram.allocate()).take(PAGES).collect();
                let (took, ()) = timed(|| frames.iter().for_each(|&frame| ram.zero(frame)));
                frames.iter().rev().for_each(|&frame| ram.free(frame));
                if frames.len() < PAGES { Err(Failure::Broken("too few frames".into())) } else { Ok(took) }
            })?;
            Ok(Sample::from(rounds.each(PAGES)))
        })
    })
}

/// Plans loads from memory that nobody has written.
fn plan_reads(plan: &mut Plan<'static>) {
    plan.group();
    let metric = "fault for reading: the page of zeros";
    plan.case(Probe::FirstRead.case(metric, "ns"));
    for (role, variant, locking) in LOCKINGS {
        plan.case(Case::new(role, variant, 1, metric, "ns", move || {
            let rig = Touch { locking, ..Touch::new() }.rig()?;
            rig.map(MapRequest::anonymous(AREA, READ_WRITE).fixed(BASE))?;
            Ok(move |time| {
                rig.counted(|| {
                    let rounds = in_rounds(1, 1, time, |index| {
                        let cpu = rig.cpu(index);
                        let (took, result) =
                            timed(|| rig::fault_pages(&rig.space, &cpu, BASE, AREA, Access::Read));
                        result?;
                        rig.advise(&cpu, BASE, AREA, Advice::DontNeed)?;
                        Ok(took)
                    })?;
                    Ok(vec![rounds.each(PAGES)])
                })
            })
        }));
    }
}

/// Plans loads from every page of a cached file, by processors in software.
fn plan_file(plan: &mut Plan<'static>) {
    plan.group();
    let metric = "touch a cached file, for each page";
    plan.case(Probe::File { how: Fill::Touch, threads: 1 }.case(metric, "ns"));
    for (around, words) in [(PAGE_SIZE, "without fault-around"), (64 << 10, "with fault-around")] {
        for (role, variant, locking) in LOCKINGS {
            let variant = format!("{variant}, {words}");
            plan.case(Case::new(role, variant, 1, metric, "ns", move || {
                let mut config = SpaceConfig::with_locking(locking);
                config.fault_around = around;
                let rig = Rig::new(32 << 20, 1, config)?;
                let file = rig.cached_file(FILE_LENGTH as u64)?;
                rig.cpu(0).switch_to(&rig.space);
                Ok(move |time: Duration| {
                    rig.counted(|| {
                        let rounds = in_rounds(1, 1, time, |_| {
                            let request = MapRequest::object(&file, 0, FILE_LENGTH as u64, Prot::READ, true);
                            let start = rig.map(request)?;
                            let mut cpu = rig.cpu(0);
                            let (took, result) =
                                timed(|| rig::load_pages(&mut cpu, start, FILE_LENGTH as u64));
                            result?;
                            rig.unmap(&cpu, start, FILE_LENGTH as u64)?;
                            Ok(took)
                        })?;
                        Ok(vec![rounds.each(FILE_LENGTH / PAGE_SIZE as usize)])
                    })
                })
            }));
        }
    }
}
