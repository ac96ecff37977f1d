//! `terrane soak`: a long stress of random operations in which every byte is checked.
//!
//! The time is divided into episodes. Each builds a machine, with much memory or with too little, and lets threads loose on it:
//!
//! * On **one space** each thread owns *plots*, runs of pages that lie between those of the other threads: in the same VMAs, the
//!   same page tables, the same leaves of the index. It stores, loads, maps, unmaps, protects, forgets, populates, advises, writes
//!   files back, lists, and knows at every moment what each byte of its plots must be ([`content`]) and what each access
//!   must end in ([`plot`]), whatever the others do. It looks at pages of others too, of which it can say less: each word
//!   tells whether it belongs where it is. It forks the space and plays on both sides in turn.
//! * There are pages that **all threads work on** at the same time, with checks that hold under races ([`race`]).
//! * Every seventh episode, or all of them, are **pressure** ([`pressure`]): readers and writers whose memory is a quarter of what they use,
//!   with errors of the swap device.
//! * **Many spaces** fork from each other in a tree ([`family`]), go their own ways, and die.
//!
//! In the end the shared file on disk, the sums of shared counters, and the machine's use of frames and records are compared with
//! what they must be. Where memory is short, calls and accesses may fail for that reason, and must then have changed
//! nothing.
//!
//! Threads interleave as they like. A seed repeats what each thread does, not the run.

mod content;
mod family;
mod log;
mod player;
mod plot;
mod pressure;
mod race;
mod world;

pub use world::Plant;

use crate::command::measure::command_line;
use crate::failure::Failure;
use crate::measure::host;
use crate::measure::progress::Progress;
use crate::measure::threads::processors;
use crate::report::json::Sink;
use crate::report::table::{number, thousands};
use crate::report::{Counters, Machine, SCHEMA};
use serde::Serialize;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use terrane::mm::HugePages;
use terrane::space::{Locking, Placement};
use world::{COUNTS, Ended, Failed, Outcome, Terms};

/// What the user asked for.
pub struct Request {
    /// How long.
    pub seconds: f64,
    /// Where random numbers begin.
    pub seed: u64,
    /// How many threads.
    pub threads: Option<usize>,
    /// MiB of memory of each machine.
    pub memory: Option<u64>,
    /// Pressure only.
    pub pressure: bool,
    /// Always the circumstances of this episode, to hunt what was found in it.
    pub episode: Option<u64>,
    /// Where the JSON report goes.
    pub json: Option<PathBuf>,
    /// Damage to do, to see that it is noticed.
    pub plant: Option<Plant>,
}

/// The report.
#[derive(Serialize)]
struct Report {
    schema: u32,
    terrane: String,
    machine: Machine,
    command: String,
    soak: Soak,
}

/// What came of it.
#[derive(Serialize)]
struct Soak {
    seed: u64,
    threads: usize,
    seconds: f64,
    episodes: u64,
    operations: Counters,
    counters: Counters,
    failure: Option<String>,
}

/// The circumstances that follow each other.
const CIRCUMSTANCES: [(bool, bool, Locking); 6] = [
    (false, false, Locking::Speculative),
    (true, false, Locking::Speculative),
    (false, true, Locking::Speculative),
    (true, true, Locking::Speculative),
    (false, false, Locking::Classic),
    (true, true, Locking::Classic),
];

/// Of so many episodes one is pressure.
const PRESSURE: u64 = 7;

/// Runs it.
///
/// # Errors
/// [`Failure::Broken`] if Terrane did something wrong; [`Failure::Request`] for what cannot be carried out.
pub fn run(request: &Request) -> Result<(), Failure> {
    let threads = request.threads.unwrap_or_else(|| (2 * processors().len()).max(4));
    host::check_memory("‘soak’", 256 << 20)?;
    let mut sink = request.json.as_deref().map(Sink::open).transpose()?;
    let mut out: Box<dyn Write> = match &sink {
        Some(sink) if sink.is_stdout() => Box::new(io::stderr()),
        _ => Box::new(io::stdout()),
    };
    let start = Instant::now();
    let total = Duration::from_secs_f64(request.seconds);
    let progress = Progress::new("soak", 1, 1);
    progress.steps((total.as_millis() / 100).max(1) as usize);
    let mut operations = Counters::from(COUNTS.map(|(_, name)| (name, 0)));
    let mut counters = Counters::default();
    let (mut episodes, mut failure) = (0, None);
    while failure.is_none() && (episodes == 0 || start.elapsed() < total) {
        let terms = terms(request, threads, episodes, total.saturating_sub(start.elapsed()));
        let so_far: u64 = operations.iter().map(|(_, &count)| count).sum();
        let tick = |counts: &[u64; COUNTS.len()]| {
            let done = so_far + counts.iter().sum::<u64>();
            let rate = done as f64 / start.elapsed().as_secs_f64();
            progress.begin(format!("{} operations, {}/s · {terms}", thousands(done), number(rate)));
            progress
                .advance((start.elapsed().as_millis() as usize / 100).saturating_sub(progress.position()));
        };
        let result =
            if terms.pressure { pressure::episode(&terms, tick) } else { world::episode(&terms, tick) };
        episodes += 1;
        match result {
            Ok(Outcome { counts, stats }) => {
                for ((_, name), count) in COUNTS.into_iter().zip(counts) {
                    *operations.entry(name) += count;
                }
                for (name, value) in stats.iter().filter(|&(_, value)| value != 0) {
                    *counters.entry(name) += value;
                }
            }
            Err(Ended::Failed(failed)) => failure = Some((told(&terms, &failed), failed.what)),
            Err(Ended::Broken(failure)) => return Err(failure),
        }
    }
    drop(progress);
    let seconds = start.elapsed().as_secs_f64();
    let report = Report {
        schema: SCHEMA,
        terrane: env!("CARGO_PKG_VERSION").to_owned(),
        machine: host::describe(),
        command: command_line(),
        soak: Soak {
            seed: request.seed,
            threads,
            seconds,
            episodes,
            operations,
            counters,
            failure: failure.as_ref().map(|(told, _)| told.clone()),
        },
    };
    out.write_all(summary(&report.soak).as_bytes())
        .and_then(|()| out.flush())
        .map_err(|e| Failure::output("standard output", &e))?;
    if let Some(sink) = &mut sink {
        sink.write(&report)?;
    }
    match failure {
        None => Ok(()),
        Some((told, what)) => {
            eprintln!("{told}");
            Err(Failure::Broken(format!(
                "soak has found something wrong, with seed {}: {what}",
                request.seed
            )))
        }
    }
}

/// What is printed in the end.
fn summary(soak: &Soak) -> String {
    let plural = if soak.episodes == 1 { "" } else { "s" };
    let mut text = format!(
        "Seed {}, {} threads, {} episode{plural} in {:.1} s: {}\n",
        soak.seed,
        soak.threads,
        soak.episodes,
        soak.seconds,
        if soak.failure.is_some() { "something is wrong" } else { "every byte was right" }
    );
    for (name, &count) in soak.operations.iter() {
        let rate = number(count as f64 / soak.seconds);
        let _ = writeln!(text, "  {:>14}  {name:<10}  {rate:>9}/s", thousands(count));
    }
    text.push_str("What the machines counted:\n");
    for (name, &count) in soak.counters.iter() {
        let _ = writeln!(text, "  {:>14}  {name}", thousands(count));
    }
    text
}

/// The circumstances of episode `number`, for which there is `left` time.
fn terms(request: &Request, threads: usize, number: u64, left: Duration) -> Terms {
    let random = request.seed.wrapping_mul(1_000_003).wrapping_add(number);
    let number = request.episode.unwrap_or(number);
    let (short, shaken, locking) = CIRCUMSTANCES[number as usize % CIRCUMSTANCES.len()];
    // Long enough to get anywhere, short enough that all have their turn.
    let time = Duration::from_secs_f64((request.seconds / 12.0).clamp(0.4, 20.0)).min(left);
    // Each of the circumstances has its turn with either.
    let rounds = number / CIRCUMSTANCES.len() as u64;
    let placement = if (number + rounds).is_multiple_of(2) { Placement::PerCpu } else { Placement::Linux };
    Terms {
        seed: random,
        episode: number,
        threads,
        memory: request.memory.map(|mib| mib << 20),
        short: short || request.memory.is_some(),
        shaken,
        locking,
        placement,
        huge_pages: [HugePages::Madvise, HugePages::Always, HugePages::Never][number as usize / 2 % 3],
        // The last of seven, so that a short run begins with the others.
        pressure: request.pressure || number % PRESSURE == PRESSURE - 1,
        time,
        plant: request.plant,
    }
}

/// All that is known of what went wrong.
fn told(terms: &Terms, failed: &Failed) -> String {
    let Failed { thread, what, log, operation } = failed;
    let whose = match thread {
        Some(thread) => format!("thread {thread}, operation {operation}"),
        None => "at the end".to_owned(),
    };
    let mut text = format!(
        "In episode {}, with {terms} ({} threads, random numbers {}), {whose}:\n  {what}",
        terms.episode, terms.threads, terms.seed
    );
    if !log.is_empty() {
        text.push_str("\nThe last operations of the thread:\n");
        text.push_str(log.trim_end());
    }
    text
}
