//! Requirement B6: the search load of source B, `ebizzy -mTt N`.
//!
//! What ebizzy 0.3 does, repeated here call by call, with all of its memory in a space of Terrane's: it begins with ten
//! chunks of 512 KiB (65,536 records of a word each, counted up from 0) that all threads read. Each of its `-t N` threads
//! then makes records until time is over: it chooses a chunk at random, allocates a chunk of its own, by `mmap` under
//! `-m`, fills it, and frees it by `munmap`. To fill is to copy the chosen chunk and to look for a random key in the copy
//! by binary search; with `-T` it is only to touch the new chunk, one store for each page. The source measured with
//! `-T`, so this is the published comparison; the copying form is shown beside. Threads share nothing but the address
//! space and the chunks that they read.

use super::hosted::{
    Crew, LOCKINGS, READ_WRITE, broken, check_threads, map, name, patiently, role, speculative_share, unmap,
    write_pages,
};
use crate::failure::Failure;
use crate::measure::plan::Runner;
use crate::measure::random::Random;
use crate::measure::threads::together;
use crate::measure::{Case, Context, Experiment, Plan};
use crate::report;
use std::time::{Duration, Instant};
use terrane::PAGE_SIZE;
use terrane::space::{Locking, MapRequest, SpaceConfig};
use terrane_hosted::Cpu;

/// `terrane experiments ebizzy`.
pub static EXPERIMENT: Experiment = Experiment {
    id: "ebizzy",
    title: "a search load: many threads map, fill, search and unmap",
    source: "source B, speculative page faults v11, 2018",
    about: "As ebizzy -mTt N: every thread maps 512 KiB, touches them page by page and unmaps them, again and again. \
            Without -T it copies a chunk of records there instead and looks for a random one by binary search.",
    seconds: 2.8,
    runs: 7,
    memory: |threads| (160 << 20) + threads.unwrap_or(THREADS) as u64 * (32 << 20),
    run,
};

/// Threads of the source's smaller machine.
const THREADS: usize = 16;
/// Chunks that the threads copy from, and the length of each.
const CHUNKS: u64 = 10;
const CHUNK: u64 = 512 << 10;
/// Bytes of a record.
const RECORD: u64 = 8;
const RECORDS: u64 = CHUNK / RECORD;

fn run(context: &Context<'_>) -> Result<report::Experiment, Failure> {
    let threads = context.threads.unwrap_or(THREADS);
    check_threads(threads, 1)?;
    let mut plan = Plan::new();
    let mut pairs = Vec::new();
    for touch in [true, false] {
        plan.group();
        let metric = if touch { "-mT: touch" } else { "-m: copy and search" };
        let cases = LOCKINGS.map(|locking| {
            let case = Case::new(role(locking), name(locking), threads, metric, "records/s", move || {
                set_up(threads, touch, locking)
            });
            plan.case(match locking {
                Locking::Classic => case,
                Locking::Speculative => case.and(format!("{metric}: faults handled speculatively"), "%"),
            })
        });
        pairs.push((touch, metric, cases));
    }
    let mut results = plan.run(context)?;
    for (touch, metric, [classic, speculative]) in pairs {
        let published = touch.then_some(2.0069);
        results.ratio(
            format!("records/s, speculative / classic, {metric}"),
            1.0,
            speculative,
            classic,
            published,
        );
    }
    results.note("Published with 16 CPUs: 98.1 % of the faults were speculative.");
    Ok(results.report(context))
}

fn set_up(threads: usize, touch: bool, locking: Locking) -> Result<Runner<'static>, Failure> {
    let crew = Crew::shared((64 << 20) + threads as u64 * (16 << 20), threads)?;
    let space = crew.space(SpaceConfig::with_locking(locking))?;
    crew.run(&space);
    let chunks = {
        let cpu = &mut *crew.cpu(0);
        (0..CHUNKS).map(|_| make_chunk(cpu)).collect::<Result<Vec<_>, _>>()?
    };
    let mut seed = 0;
    Ok(Box::new(move |time| {
        seed += threads as u64;
        crew.run(&space);
        let mut sample = crew.counted(|| {
            let start = Instant::now();
            let records = together(
                threads,
                threads,
                |index| Ok(Random::new(seed + index as u64)),
                |index, random| make_records(&mut crew.cpu(index), &chunks, touch, random, time),
            )?;
            Ok(vec![records.iter().sum::<u64>() as f64 / start.elapsed().as_secs_f64()])
        })?;
        if locking == Locking::Speculative {
            let share = speculative_share(&sample);
            sample.values.push(share);
        }
        Ok(sample)
    }))
}

/// Maps a chunk and fills it with its records.
fn make_chunk(cpu: &mut Cpu) -> Result<u64, Failure> {
    let chunk = map(cpu, MapRequest::anonymous(CHUNK, READ_WRITE))?;
    for record in 0..RECORDS {
        cpu.store_u64(chunk + record * RECORD, record).map_err(broken("cannot store a record"))?;
    }
    Ok(chunk)
}

/// Makes records until `time` is over; returns how many.
fn make_records(
    cpu: &mut Cpu,
    chunks: &[u64],
    touch: bool,
    mut random: Random,
    time: Duration,
) -> Result<u64, Failure> {
    let mut buffer = [0; PAGE_SIZE as usize];
    let (start, mut records) = (Instant::now(), 0);
    while start.elapsed() < time {
        let from = chunks[below(&mut random, chunks.len() as u64) as usize];
        let own = map(cpu, MapRequest::anonymous(CHUNK, READ_WRITE))?;
        if touch {
            write_pages(cpu, own, CHUNK / PAGE_SIZE)?;
        } else {
            for at in (0..CHUNK).step_by(buffer.len()) {
                cpu.read_bytes(from + at, &mut buffer).map_err(broken("cannot copy"))?;
                patiently("cannot copy", || cpu.write_bytes(own + at, &buffer).map_err(|end| end.error))?;
            }
            let key = below(&mut random, RECORDS);
            if search(cpu, own, key)? != Some(key) {
                return Err(Failure::Broken(format!("record {key} is not where it was copied to")));
            }
        }
        unmap(cpu, own, CHUNK)?;
        records += 1;
    }
    Ok(records)
}

/// A random number below `limit`.
fn below(random: &mut Random, limit: u64) -> u64 {
    ((random.next() >> 32) * limit) >> 32
}

/// The number of the record that is `key`, by binary search.
fn search(cpu: &mut Cpu, records: u64, key: u64) -> Result<Option<u64>, Failure> {
    let (mut low, mut high) = (0, RECORDS);
    while low < high {
        let middle = low + (high - low) / 2;
        let found = cpu.load_u64(records + middle * RECORD).map_err(broken("cannot load a record"))?;
        match found.cmp(&key) {
            std::cmp::Ordering::Equal => return Ok(Some(middle)),
            std::cmp::Ordering::Less => low = middle + 1,
            std::cmp::Ordering::Greater => high = middle,
        }
    }
    Ok(None)
}
