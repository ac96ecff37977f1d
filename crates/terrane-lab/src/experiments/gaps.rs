//! Requirement C4: the search for free addresses among tens of thousands of mappings.
//!
//! In the manner of the source's test program (`agua_frag_test`): it maps tens of thousands of pieces of random sizes, then
//! unmaps many of them and maps as many again, round after round, and takes the time of each round. Neighbours never
//! merge, because the protection alternates at random among four. The order of unmapping is random, so free space
//! is in fragments: the highest that fits is taken, and few of those that come first do.

use super::hosted::{Crew, map, unmap};
use crate::failure::Failure;
use crate::measure::plan::Runner;
use crate::measure::random::Random;
use crate::measure::threads::together;
use crate::measure::timing::timed;
use crate::measure::{Case, Context, Experiment, Plan};
use crate::report::{self, Role};
use std::time::{Duration, Instant};
use terrane::PAGE_SIZE;
use terrane::space::{MapRequest, SpaceConfig};
use terrane::vma::Prot;
use terrane_hosted::Cpu;

/// `terrane experiments gaps`.
pub static EXPERIMENT: Experiment = Experiment {
    id: "gaps",
    title: "free addresses among tens of thousands of mappings",
    source: "source C, scalable unmapped-area search, 2012",
    about: "50,000 mappings of 1 to 64 pages, none like its neighbours. A round unmaps 2,000 of them, chosen at random, \
            and maps 2,000 new ones: the mean and the worst time of a round, with the search that looks at one mapping \
            after the other (Linux before 3.8) and with the index's.",
    seconds: 4.5,
    runs: 7,
    memory: |_| 256 << 20,
    run,
};

/// Mappings.
const PIECES: usize = 50_000;
/// How many of them a round replaces.
const REPLACED: usize = 2_000;
/// The longest, in pages; a power of two.
const LONGEST: u64 = 64;

fn run(context: &Context<'_>) -> Result<report::Experiment, Failure> {
    let mut plan = Plan::new();
    let mut case = |role, variant, linear_search| {
        let set_up = move || set_up(linear_search);
        plan.case(Case::new(role, variant, 1, "a round, mean", "ms", set_up).and("a round, worst", "ms"))
    };
    let linear = case(Role::Baseline, "linear search", true);
    let indexed = case(Role::Terrane, "gaps in the index", false);
    let mut results = plan.run(context)?;
    results.ratio(
        "mean, linear / index (published: 294 ms / 38 ms)",
        1.0,
        linear,
        indexed,
        Some(294.0 / 38.0),
    );
    let (linear, indexed) = (linear.metric(1), indexed.metric(1));
    results.ratio(
        "worst, linear / index (published: 609 ms / 60 ms)",
        1.0,
        linear,
        indexed,
        Some(609.0 / 60.0),
    );
    Ok(results.report(context))
}

/// A mapping: where it begins, and its length in bytes.
type Piece = (u64, u64);

fn set_up(linear_search: bool) -> Result<Runner<'static>, Failure> {
    let crew = Crew::shared(32 << 20, 1)?;
    let mut config = SpaceConfig::default();
    config.linear_search = linear_search;
    let space = crew.space(config)?;
    // Both variants see the same sizes and the same victims.
    let mut random = Random::new(3);
    let mut pieces = {
        let cpu = &mut *crew.cpu(0);
        cpu.switch_to(&space);
        let pieces = (0..PIECES).map(|_| map_piece(cpu, &mut random));
        let mut pieces = pieces.collect::<Result<Vec<_>, _>>()?;
        // What is measured is the state that rounds lead to, not the first ones, which find space without fragments.
        for _ in 0..PIECES / REPLACED {
            round(cpu, &mut pieces, &mut random)?;
        }
        pieces
    };
    Ok(Box::new(move |time| {
        crew.run(&space);
        let (pieces, random) = (parking_lot::Mutex::new(&mut pieces), parking_lot::Mutex::new(&mut random));
        crew.counted(|| {
            let figures = together(
                1,
                1,
                |_| Ok(()),
                |_, ()| rounds(&crew.cpu(0), &mut pieces.lock(), &mut random.lock(), time),
            )?;
            Ok(figures[0].to_vec())
        })
    }))
}

/// Rounds until `time` is over; the mean and the worst, in milliseconds.
fn rounds(cpu: &Cpu, pieces: &mut [Piece], random: &mut Random, time: Duration) -> Result<[f64; 2], Failure> {
    let (start, mut count, mut sum, mut worst) = (Instant::now(), 0, Duration::ZERO, Duration::ZERO);
    while count == 0 || start.elapsed() < time {
        let (took, done) = timed(|| round(cpu, pieces, random));
        done?;
        (count, sum, worst) = (count + 1, sum + took, worst.max(took));
    }
    Ok([sum / count, worst].map(|time| time.as_secs_f64() * 1e3))
}

/// Replaces pieces: each time, one chosen at random goes and another one comes.
fn round(cpu: &Cpu, pieces: &mut [Piece], random: &mut Random) -> Result<(), Failure> {
    for _ in 0..REPLACED {
        let victim = (((random.next() >> 32) * pieces.len() as u64) >> 32) as usize;
        let (addr, len) = pieces[victim];
        unmap(cpu, addr, len)?;
        pieces[victim] = map_piece(cpu, random)?;
    }
    Ok(())
}

/// Maps a piece of random size.
fn map_piece(cpu: &Cpu, random: &mut Random) -> Result<Piece, Failure> {
    /// What pieces allow: neighbours that happen to be alike become one mapping, as they would in Linux, and are
    /// parted again when one goes.
    const PROTS: [Prot; 4] =
        [Prot::empty(), Prot::READ, Prot::READ.union(Prot::WRITE), Prot::READ.union(Prot::EXEC)];
    let bits = random.next();
    let len = ((bits >> 58 & (LONGEST - 1)) + 1) * PAGE_SIZE;
    let addr = map(cpu, MapRequest::anonymous(len, PROTS[(bits >> 40) as usize % PROTS.len()]))?;
    Ok((addr, len))
}
