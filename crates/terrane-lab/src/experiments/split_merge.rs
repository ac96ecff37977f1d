//! Requirement C3: what gap sizes in the index cost where no gap changes.
//!
//! The loop of the reply in source C: a page is mapped 512 times, once more, and 512 times again; the page of the middle is
//! then protected and given back its protection, or unmapped and mapped again, a million times. The pages become one
//! mapping of 1025, so each round splits it in three and merges it again. With 64 K other mappings around, which differ
//! from their neighbours in protection, the index is four levels high and a size to be carried upwards has a way to go; the
//! page then comes back by a hint, because without gap sizes the search would be all that is measured.

use super::hosted::{Crew, broken, map, running, unmap};
use crate::baseline::linux::Probe;
use crate::failure::Failure;
use crate::measure::plan::Runner;
use crate::measure::threads::together;
use crate::measure::timing::per_op;
use crate::measure::{Case, Context, Experiment, Plan};
use crate::report::{self, Role};
use terrane::PAGE_SIZE;
use terrane::space::{MapRequest, SpaceConfig};
use terrane::vma::Prot;
use terrane_hosted::Cpu;

/// `terrane experiments split-merge`.
pub static EXPERIMENT: Experiment = Experiment {
    id: "split-merge",
    title: "splitting and merging a mapping in the middle of many",
    source: "source C, scalable unmapped-area search, 2012 (reply)",
    about: "1025 pages are mapped one by one. The one in the middle is protected and given back its protection, or \
            unmapped and mapped again, again and again: one mapping is split and becomes one. Time for both calls, with \
            gap sizes in the index and without; also with 64 K other mappings around.",
    seconds: 0.9,
    runs: 61,
    memory: |_| 192 << 20,
    run,
};

/// Pages on either side of the one in the middle.
const AROUND: u64 = 512;

/// What is done to the page in the middle.
#[derive(Clone, Copy, PartialEq)]
enum Call {
    Protect,
    Unmap,
}

fn run(context: &Context<'_>) -> Result<report::Experiment, Failure> {
    let mut plan = Plan::new();
    let mut pairs = Vec::new();
    for others in [0, 64 << 10] {
        for call in [Call::Protect, Call::Unmap] {
            plan.group();
            let among = if others == 0 { "" } else { ", among 64 K others" };
            let metric = match call {
                Call::Protect => format!("protect + protect back{among}"),
                Call::Unmap if others > 0 => format!("unmap + map at a hint{among}"),
                Call::Unmap => "unmap + map".to_owned(),
            };
            let mut case = |role, variant, gaps| {
                let set_up = move || set_up(others, call, gaps);
                plan.case(Case::new(role, variant, 1, metric.clone(), "ns", set_up))
            };
            let without = case(Role::Baseline, "index without gaps", false);
            let with = case(Role::Terrane, "index with gaps", true);
            if call == Call::Protect && others == 0 {
                plan.case(Probe::Protect { split: true }.case(metric.clone(), "ns"));
            }
            let published = (call == Call::Protect && others == 0).then_some(1.710_614 / 0.802_003);
            pairs.push((metric, published, with, without));
        }
    }
    let mut results = plan.run(context)?;
    for (metric, published, with, without) in pairs {
        results.ratio(format!("{metric}: with gaps / without"), 1.0, with, without, published);
    }
    Ok(results.report(context))
}

fn set_up(others: u64, call: Call, gaps: bool) -> Result<Runner<'static>, Failure> {
    let crew = Crew::shared(32 << 20, 1)?;
    let mut config = SpaceConfig::default();
    config.gaps = gaps;
    let space = crew.space(config)?;
    let middle = {
        let cpu = &mut *crew.cpu(0);
        cpu.switch_to(&space);
        // Half of the others above, half of them below.
        let top = map_others(cpu, space.config().range.end, others / 2)?;
        let page = |n: u64| {
            let request = MapRequest::anonymous(PAGE_SIZE, Prot::READ);
            map(cpu, MapRequest { addr: top - n * PAGE_SIZE, ..request })
        };
        let pages = (1..=2 * AROUND + 1).map(page).collect::<Result<Vec<_>, _>>()?;
        let middle = pages[AROUND as usize];
        map_others(cpu, top - (2 * AROUND + 1) * PAGE_SIZE, others / 2)?;
        middle
    };
    Ok(Box::new(move |time| {
        crew.run(&space);
        crew.counted(|| {
            together(
                1,
                1,
                |_| Ok(()),
                |_, ()| {
                    let cpu = &*crew.cpu(0);
                    let mut result = Ok(());
                    let ns = per_op(time, |n| {
                        if result.is_ok() {
                            result = (0..n).try_for_each(|_| once(cpu, call, middle, others > 0));
                        }
                    });
                    result.map(|()| ns)
                },
            )
        })
    }))
}

/// Maps `count` pages below `top` that stay mappings of their own: each may be used differently from its neighbours.
/// They go where a search would put them, without one: among so many and without gap sizes it would take minutes.
/// Returns where they end.
fn map_others(cpu: &Cpu, top: u64, count: u64) -> Result<u64, Failure> {
    let prots = [Prot::empty(), Prot::READ | Prot::WRITE];
    for n in 0..count {
        let request = MapRequest::anonymous(PAGE_SIZE, prots[n as usize % 2]);
        map(cpu, request.fixed(top - (n + 1) * PAGE_SIZE))?;
    }
    Ok(top - count * PAGE_SIZE)
}

/// The two calls of a round.
#[inline]
fn once(cpu: &Cpu, call: Call, middle: u64, hint: bool) -> Result<(), Failure> {
    match call {
        Call::Protect => {
            let space = running(cpu)?;
            space
                .protect(cpu.core(), middle, PAGE_SIZE, Prot::empty())
                .and_then(|()| space.protect(cpu.core(), middle, PAGE_SIZE, Prot::READ))
                .map_err(broken("cannot protect"))
        }
        Call::Unmap => {
            unmap(cpu, middle, PAGE_SIZE)?;
            let request = MapRequest::anonymous(PAGE_SIZE, Prot::READ);
            // With a hint there is nothing to search for, and what is left is the upkeep of the index.
            match map(cpu, MapRequest { addr: if hint { middle } else { 0 }, ..request })? {
                addr if addr == middle => Ok(()),
                addr => Err(Failure::Broken(format!("the page went to {addr:x} instead of {middle:x}"))),
            }
        }
    }
}
