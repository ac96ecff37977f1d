//! Faults on anonymous memory, one by one and many for one call.

use super::calls::churn;
use super::can_populate;
use super::memory::{Memory, page_size};
use crate::failure::Failure;
use crate::measure::Sample;
use crate::measure::plan::Runner;
use crate::measure::threads::{Gate, beside, in_rounds};
use crate::measure::timing::timed;
use crate::report::Counters;
use rustix::mm::{Advice, ProtFlags};
use std::time::Duration;

/// What each thread touches in a round, as in source A. A whole page table's worth.
const AREA: usize = 2 << 20;

/// Threads that touch page after page of their part of one mapping, give the pages back, and start together again.
/// Only the touching is timed; its rounds begin together, so all threads fault at the same time.
pub fn first_touch(threads: usize, with_churn: bool) -> Result<Runner<'static>, Failure> {
    // Aligned to the span of a page table, so that threads do not share one, as the source advises.
    let memory = Memory::anonymous(AREA * (threads + 1), ProtFlags::READ | ProtFlags::WRITE)?;
    let first = memory.at(0).align_offset(AREA);
    Ok(Box::new(move |time| {
        let touch = |index: usize| -> Result<Duration, Failure> {
            let offset = first + index * AREA;
            let (took, ()) = timed(|| memory.write_pages(offset, AREA));
            memory
                .advise_part(offset, AREA, Advice::LinuxDontNeed)
                .map_err(|e| Failure::broken("cannot give pages back", e))?;
            Ok(took)
        };
        let seats = threads + usize::from(with_churn);
        let fault = || Ok(in_rounds(threads, seats, time, touch)?.each(AREA / page_size()));
        let values = if with_churn {
            let (ns, churned) = beside(threads, seats, churn, fault)?;
            vec![ns, churned.ns]
        } else {
            vec![fault()?]
        };
        Ok(Sample { values, counters: Counters::default() })
    }))
}

/// A thread that reads page after page of fresh memory, which maps the page of zeros, and gives the pages back,
/// untimed.
pub fn first_read() -> Result<Runner<'static>, Failure> {
    let memory = Memory::anonymous(AREA, ProtFlags::READ | ProtFlags::WRITE)?;
    Ok(Box::new(move |time| {
        let rounds = in_rounds(1, 1, time, |_| {
            let (took, ()) = timed(|| memory.read_pages());
            memory.advise(Advice::LinuxDontNeed).map_err(|e| Failure::broken("cannot give pages back", e))?;
            Ok(took)
        })?;
        Ok(Sample::from(rounds.each(AREA / page_size())))
    }))
}

/// The experiment of source A: threads touch their areas, meet, and give the pages back, all the time; faults a
/// second of all threads, with everything counted in. The areas are mappings of their own, each with a hole behind,
/// or parts of one.
pub fn multi_fault(threads: usize, separate: bool, with_churn: bool) -> Result<Runner<'static>, Failure> {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // The kernel would make neighbouring mappings one: what lies between them keeps them apart.
    let areas: Vec<(Memory, Memory)> = (0..if separate { threads } else { 1 })
        .map(|_| {
            let length = 4 * AREA * if separate { 1 } else { threads };
            Ok((Memory::anonymous(length, prot)?, Memory::anonymous(page_size(), ProtFlags::empty())?))
        })
        .collect::<Result<_, Failure>>()?;
    Ok(Box::new(move |time| {
        // All have touched before the first gives back: nobody's pages come straight from a neighbour.
        let gate = Gate::new(threads);
        let round = |index: usize| -> Result<Duration, Failure> {
            let (area, place) = if separate { (index, 0) } else { (0, index) };
            let memory = &areas[area].0;
            memory.write_pages(4 * AREA * place, AREA);
            gate.wait();
            memory
                .advise_part(4 * AREA * place, AREA, Advice::LinuxDontNeed)
                .map_err(|e| Failure::broken("cannot give pages back", e))?;
            Ok(Duration::ZERO)
        };
        let seats = threads + usize::from(with_churn);
        let faults = || {
            let rounds = in_rounds(threads, seats, time, round)?;
            let faults = rounds.count as f64 * (threads * AREA / page_size()) as f64;
            Ok(faults / rounds.wall.as_secs_f64())
        };
        Ok(Sample::from(if with_churn { beside(threads, seats, churn, faults)?.0 } else { faults()? }))
    }))
}

/// `MADV_POPULATE_READ` or `_WRITE` of 8 MiB, again and again.
pub fn populate(write: bool) -> Result<Runner<'static>, Failure> {
    let memory = Memory::anonymous(8 << 20, ProtFlags::READ | ProtFlags::WRITE)?;
    let advice = if write { Advice::LinuxPopulateWrite } else { Advice::LinuxPopulateRead };
    can_populate(memory.advise(advice))?;
    Ok(Box::new(move |time| {
        let rounds = in_rounds(1, 1, time, |_| {
            memory.advise(Advice::LinuxDontNeed).map_err(|e| Failure::broken("cannot give pages back", e))?;
            let (took, result) = timed(|| memory.advise(advice));
            can_populate(result)?;
            Ok(took)
        })?;
        Ok(Sample::from(rounds.each(memory.length() / page_size())))
    }))
}
