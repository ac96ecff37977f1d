//! Requirement D2: mapping files that are in the page cache, page by page or all at once.
//!
//! The test of source D: 160 files of 16 MB, all in the page cache; one thread, or one for each file, in one address space;
//! every page is touched, or the file is populated, and then `MADV_DONTNEED` gives the pages back. All of that is timed.
//! The source's kernel mapped a page for each fault; today's map its neighbours too, so touching is measured with
//! fault-around and without. `MAP_POPULATE` maps and unmaps the file each time, as the source's author did to compare.

use super::files::{self, stamp};
use super::hosted::{Crew, LOCKINGS, broken, check_threads, map, name, role, running, unmap};
use crate::failure::Failure;
use crate::measure::host::check_memory;
use crate::measure::plan::{CaseId, Runner};
use crate::measure::threads::{processors, together};
use crate::measure::{Case, Context, Experiment, Plan};
use crate::report;
use crate::report::table::bytes;
use std::sync::Arc;
use std::time::{Duration, Instant};
use terrane::PAGE_SIZE;
use terrane::object::Object;
use terrane::space::{Locking, MapRequest, SpaceConfig};
use terrane::sync::Shared;
use terrane::vma::{Advice, MapFlags, Prot};
use terrane_hosted::{Cpu, Hosted};

/// `terrane experiments populate`.
pub static EXPERIMENT: Experiment = Experiment {
    id: "populate",
    title: "cached files: touch, populate, map with populate",
    source: "source D, MADV_POPULATE, 2013",
    about: "Files of 16 MiB that are in the page cache are mapped page by page or by one call, and given back by \
            MADV_DONTNEED, which is in the time. One thread takes one file after the other; of many, each has its own. \
            Pages of all threads in a second.",
    seconds: 0.35,
    runs: 5,
    memory: |_| 64 << 20,
    run,
};

/// Files, unless the user says otherwise, and the length of each.
pub const FILES: usize = 160;
const LENGTH: u64 = 16 << 20;
const PAGES: u64 = LENGTH / PAGE_SIZE;
/// Memory beside the pages of the files, and for each thread.
const BESIDE: u64 = 64 << 20;
const THREAD: u64 = 256 << 10;

/// Fails unless there is room for `files` files on disk, in the system's page cache and in the machine's, and for
/// `threads` threads.
///
/// # Errors
/// [`Failure::Request`].
pub fn check(threads: Option<usize>, files: Option<usize>) -> Result<(), Failure> {
    let files = files.unwrap_or(FILES) as u64;
    check_threads(threads.unwrap_or(files as usize), 1)?;
    let hint = "or fewer files (see --files)";
    let ask = |failure| match failure {
        Failure::Request(text) => Failure::Request(format!("{text}; free some, {hint}")),
        other => other,
    };
    check_memory("‘populate’", 2 * files * LENGTH + 2 * BESIDE).map_err(ask)?;
    let folder = files::folder();
    let stat = rustix::fs::statvfs(&folder).map_err(|error| {
        Failure::request(
            format_args!("cannot make files in {} (see TMPDIR)", folder.display()),
            &error.into(),
        )
    })?;
    let (free, needed) = (stat.f_bavail.saturating_mul(stat.f_frsize), files * LENGTH);
    if free >= needed {
        return Ok(());
    }
    Err(ask(Failure::Request(format!(
        "‘populate’ needs {} of disk in {} (see TMPDIR), but only {} is available",
        bytes(needed),
        folder.display(),
        bytes(free)
    ))))
}

/// How the pages of a file get mapped.
#[derive(Clone, Copy, PartialEq)]
enum How {
    Touch { around: bool },
    Populate,
    MapPopulate,
}

const HOW: [(How, &str); 4] = [
    (How::Touch { around: false }, "touch, no fault-around"),
    (How::Touch { around: true }, "touch with fault-around"),
    (How::Populate, "MADV_POPULATE_READ"),
    (How::MapPopulate, "MAP_POPULATE + unmap"),
];

/// The files of an experiment, in the page cache of one machine.
struct Files {
    crew: Crew,
    objects: Vec<Shared<Object<Hosted>>>,
}

fn run(context: &Context<'_>) -> Result<report::Experiment, Failure> {
    let count = context.files.unwrap_or(FILES);
    let many = context.threads.unwrap_or(count);
    check_threads(many, 1)?;
    context.progress.begin(format!("making {count} files of {}", bytes(LENGTH)));
    let files = Arc::new(make(count, many)?);
    let mut plan = Plan::new();
    let mut cases = Vec::new();
    for threads in if many == 1 { vec![1] } else { vec![1, many] } {
        plan.group();
        // A smaller set is a different experiment: rows say so.
        let set = if count == FILES { String::new() } else { format!(", {count} files only") };
        let plural = if threads == 1 { "" } else { "s" };
        let metric = format!("{threads} thread{plural}{set}");
        let of_locking = LOCKINGS.map(|locking| {
            HOW.map(|(how, words)| {
                let files = files.clone();
                let set_up = move || set_up(files, threads, how, locking);
                let variant = format!("{}: {words}", name(locking));
                plan.case(Case::new(role(locking), variant, threads, metric.clone(), "pages/s", set_up))
            })
        });
        cases.push((threads, metric, of_locking));
    }
    drop(files);
    let mut results = plan.run(context)?;
    for (threads, metric, [classic, speculative]) in cases {
        let mut ratio = |words: &str, over: CaseId, under: CaseId, published| {
            results.ratio(format!("{metric}: {words}"), 1.0, over, under, published);
        };
        let [touch, _, _, map_populate] = classic;
        let published = if threads == 1 { 3710.0 / 1908.0 } else { 102_239.0 / 698.0 };
        ratio("populate / classic touch, no fault-around", speculative[2], touch, Some(published));
        ratio("populate / touch, no fault-around", speculative[2], speculative[0], None);
        ratio("populate / touch with fault-around", speculative[2], speculative[1], None);
        let published = (threads > 1).then_some(10.0);
        ratio("populate / classic MAP_POPULATE + unmap", speculative[2], map_populate, published);
        ratio("populate / MAP_POPULATE + unmap", speculative[2], speculative[3], None);
    }
    results.note(format!("The files are in {} (see TMPDIR).", files::folder().display()));
    Ok(results.report(context))
}

/// Makes the files and reads them into the page cache of a machine for `threads` threads.
fn make(count: usize, threads: usize) -> Result<Files, Failure> {
    let memory = count as u64 * LENGTH + BESIDE + threads as u64 * THREAD;
    let crew = Crew::fresh(memory, threads)?;
    // One part of the files by each maker.
    let makers = processors().len().min(threads);
    let share = count.div_ceil(makers);
    let parts = together(
        makers,
        makers,
        |_| Ok(()),
        |maker, ()| {
            let numbers = (maker * share).min(count)..((maker + 1) * share).min(count);
            numbers
                .map(|number| files::cached(&crew, maker, number as u64, LENGTH))
                .collect::<Result<Vec<_>, _>>()
        },
    )?;
    Ok(Files { crew, objects: parts.into_iter().flatten().collect() })
}

fn set_up(files: Arc<Files>, threads: usize, how: How, locking: Locking) -> Result<Runner<'static>, Failure> {
    let mut config = SpaceConfig::with_locking(locking);
    if how == (How::Touch { around: false }) {
        config.fault_around = PAGE_SIZE;
    }
    let space = files.crew.space(config)?;
    let starts = {
        let cpu = &mut *files.crew.cpu(0);
        cpu.switch_to(&space);
        let starts = files.objects.iter().map(|object| match how {
            How::MapPopulate => Ok(0),
            _ => map(cpu, request(object)),
        });
        let starts = starts.collect::<Result<Vec<_>, _>>()?;
        cpu.switch_off();
        starts
    };
    Ok(Box::new(move |time| {
        files.crew.counted(|| {
            let start = Instant::now();
            let passes = together(
                threads,
                threads,
                |_| Ok(()),
                |index, ()| {
                    let cpu = &mut *files.crew.cpu(index);
                    cpu.switch_to(&space);
                    let passes = passes(cpu, &files, &starts, how, (index, threads), time);
                    cpu.switch_off();
                    passes
                },
            )?;
            Ok(vec![(passes.iter().sum::<u64>() * PAGES) as f64 / start.elapsed().as_secs_f64()])
        })
    }))
}

/// The whole of a file, private and for reading.
fn request(object: &Shared<Object<Hosted>>) -> MapRequest<Hosted> {
    MapRequest::object(object, 0, LENGTH, Prot::READ, false)
}

/// Maps all pages of one file after the other, and gives them back, until `time` is over; returns how many files
/// that were. Thread `index` of `threads` begins with file `index` and stays with it if there is one for each.
fn passes(
    cpu: &mut Cpu,
    files: &Files,
    starts: &[u64],
    how: How,
    (index, threads): (usize, usize),
    time: Duration,
) -> Result<u64, Failure> {
    let (begin, mut count) = (Instant::now(), 0);
    let mut file = index % starts.len();
    loop {
        let object = &files.objects[file];
        if how == How::MapPopulate {
            let start = map(cpu, request(object).with(MapFlags::POPULATE))?;
            check_last(cpu, start, file)?;
            unmap(cpu, start, LENGTH)?;
        } else {
            let start = starts[file];
            match how {
                How::Touch { .. } => touch(cpu, start, file)?,
                _ => {
                    let space = running(cpu)?;
                    let populated = space.advise(cpu.core(), start, LENGTH, Advice::PopulateRead);
                    populated.map_err(broken("cannot populate"))?;
                    check_last(cpu, start, file)?;
                }
            }
            let space = running(cpu)?;
            let given_back = space.advise(cpu.core(), start, LENGTH, Advice::DontNeed);
            given_back.map_err(broken("cannot give pages back"))?;
        }
        count += 1;
        if begin.elapsed() >= time {
            return Ok(count);
        }
        if threads < starts.len() {
            file = (file + threads) % starts.len();
        }
    }
}

/// Reads the stamp of every page of `file`, which is mapped at `start`.
fn touch(cpu: &mut Cpu, start: u64, file: usize) -> Result<(), Failure> {
    (0..PAGES).try_for_each(|page| check_page(cpu, start, file, page))
}

/// Reads the stamp of the last page.
fn check_last(cpu: &mut Cpu, start: u64, file: usize) -> Result<(), Failure> {
    check_page(cpu, start, file, PAGES - 1)
}

/// Reads the stamp of a page, which says whether it is the right one.
#[inline]
fn check_page(cpu: &mut Cpu, start: u64, file: usize, page: u64) -> Result<(), Failure> {
    match cpu.load_u64(start + page * PAGE_SIZE).map_err(broken("cannot load"))? {
        found if found == stamp(file as u64, page) => Ok(()),
        found => Err(Failure::Broken(format!("page {page} of file {file} reads {found:x}"))),
    }
}
