//! What a listing of many mappings costs a thread that maps and unmaps meanwhile.

use super::{Machines, Variant};
use crate::baseline::linux::{CALLS, Probe};
use crate::experiments::hosted::broken;
use crate::failure::Failure;
use crate::measure::plan::{CaseId, Results, Runner};
use crate::measure::rate::{Done, rates};
use crate::measure::threads::beside;
use crate::measure::timing::{black_box, timed};
use crate::measure::{Case, Plan};
use crate::report::Asked;
use std::sync::Arc;
use terrane::PAGE_SIZE;
use terrane::space::MapRequest;
use terrane::vma::Prot;

/// Mappings in the list.
const MAPPINGS: u64 = 10_000;

/// What the thread beside does.
#[derive(Clone, Copy, PartialEq)]
enum Beside {
    Nothing,
    /// Lists the mappings of the same space.
    Lists,
    /// Lists those of another space: what the hardware makes of it.
    ListsAnother,
}

/// The cases of one variant.
struct Cases {
    variant: Variant,
    alone: CaseId,
    lists: CaseId,
    another: Option<CaseId>,
}

/// All cases.
pub struct Listing(Vec<Cases>);

impl Listing {
    /// Plans them, in one group.
    pub fn plan(plan: &mut Plan<'static>, machines: &Arc<Machines>) -> Self {
        let variants = [Variant::Terrane, Variant::PerCpu, Variant::Classic, Variant::Linux];
        Self(variants.into_iter().map(|variant| Cases::plan(plan, machines, variant)).collect())
    }

    /// Adds the ratios.
    pub fn compare(&self, results: &mut Results) {
        for Cases { variant, alone, lists, another } in &self.0 {
            let words = variant.words();
            let name = format!("map + unmap, {words}: time beside a listing of 10,000 mappings / alone");
            match variant {
                Variant::Terrane | Variant::PerCpu => {
                    results.asked(name.clone(), 1.0, *lists, *alone, Asked::AtMost(1.1));
                }
                _ => results.ratio(name.clone(), 1.0, *lists, *alone, None),
            }
            if let Some(another) = another {
                results.bound(&name, 1.0, *another, *alone);
                let name = format!("map + unmap, {words}: time beside a listing of another space / alone");
                results.ratio(name, 1.0, *another, *alone, None);
            }
        }
    }
}

impl Cases {
    fn plan(plan: &mut Plan<'static>, machines: &Arc<Machines>, variant: Variant) -> Self {
        plan.set();
        let metric = |beside: Beside| match beside {
            Beside::Nothing => "map + unmap a page among 10,000 mappings",
            Beside::Lists => "map + unmap a page, beside a listing of the 10,000",
            Beside::ListsAnother => "map + unmap a page, beside a listing of another space",
        };
        let mut case = |beside: Beside| {
            if variant == Variant::Linux {
                let read = beside == Beside::Lists;
                let probe = Probe::Listing { mappings: MAPPINGS as usize, read };
                return plan.case(probe.case(metric(beside), "ns"));
            }
            let machines = machines.clone();
            plan.case(Case::new(variant.role(), variant.words(), 1, metric(beside), "ns", move || {
                set_up(&machines, variant, beside)
            }))
        };
        Self {
            variant,
            alone: case(Beside::Nothing),
            lists: case(Beside::Lists),
            another: (variant != Variant::Linux).then(|| case(Beside::ListsAnother)),
        }
    }
}

fn set_up(machines: &Machines, variant: Variant, what: Beside) -> Result<Runner<'static>, Failure> {
    let crew = machines.all.clone();
    let spaces = [crew.space(variant.config())?, crew.space(variant.config())?];
    for space in &spaces {
        let cpu = crew.cpu(1);
        for index in 0..MAPPINGS {
            // Protections alternate so that neighbours do not merge; none is that of the page which comes and goes.
            let prot = if index % 2 == 0 { Prot::READ } else { Prot::empty() };
            space.map(cpu.core(), MapRequest::anonymous(PAGE_SIZE, prot)).map_err(broken("cannot map"))?;
        }
    }
    Ok(Box::new(move |time| {
        let (space, listed) = (&spaces[0], &spaces[usize::from(what == Beside::ListsAnother)]);
        let pair = |cpu: &terrane_hosted::Cpu| {
            let request = MapRequest::anonymous(PAGE_SIZE, Prot::WRITE);
            let start = space.map(cpu.core(), request).map_err(broken("cannot map"))?;
            space.unmap(cpu.core(), start, PAGE_SIZE).map_err(broken("cannot unmap"))
        };
        let work = || {
            rates(
                1,
                2,
                time,
                |index| Ok(crew.cpu(index)),
                |_, cpu| {
                    let (took, result) = timed(|| (0..CALLS).try_for_each(|_| pair(cpu)));
                    result.map(|()| Done::new(CALLS, took))
                },
            )
        };
        crew.counted(|| {
            let all = if what == Beside::Nothing {
                work()?
            } else {
                let list = || {
                    let list = listed.mappings(crew.cpu(1).core()).map_err(broken("cannot list"))?;
                    if (black_box(&list).len() as u64) < MAPPINGS {
                        return Err(Failure::Broken("a listing lacks mappings".to_owned()));
                    }
                    Ok(())
                };
                beside(1, 2, list, work)?.0
            };
            Ok(vec![1e9 / all.rate()])
        })
    }))
}
