//! Requirement B6: many single-threaded processes, as in the build of source B, which gain nothing and must lose
//! nothing.
//!
//! Each worker is a job of `make`: a parent with a hundred mappings forks; the child stores to some of the pages it shares
//! with its parent, and then becomes a compiler: a new space with a program and five libraries mapped and relocated, code
//! run all over them, a heap that grows, large blocks mapped and unmapped, a source file read; and exits.

use super::files;
use super::hosted::{
    Crew, LOCKINGS, READ_WRITE, broken, check_threads, map, name, read_pages, role, running, shared, unmap,
    unmap_all, write_pages,
};
use super::program::{Image, move_heap};
use crate::failure::Failure;
use crate::measure::plan::Runner;
use crate::measure::threads::together;
use crate::measure::{Case, Context, Experiment, Plan};
use crate::report;
use std::time::{Duration, Instant};
use terrane::PAGE_SIZE;
use terrane::object::Object;
use terrane::space::{Locking, MapRequest, SpaceConfig};
use terrane::sync::Shared;
use terrane::vma::Prot;
use terrane_hosted::{Cpu, Hosted, Space};

/// `terrane experiments processes`.
pub static EXPERIMENT: Experiment = Experiment {
    id: "processes",
    title: "a build: many processes of one thread",
    source: "source B, speculative page faults v11, 2018 (kernel build)",
    about: "Every worker forks a child of a parent with 100 mappings; the child copies some pages on write, becomes a \
            compiler (a new space with a program and five libraries, relocated and run, a heap, blocks, a source file), and \
            exits. Time for a process from fork to exit.",
    seconds: 4.5,
    runs: 61,
    memory: |threads| (192 << 20) + threads.unwrap_or(16) as u64 * (32 << 20),
    run,
};

/// Mappings of a parent, and their length in pages; each is touched in part.
const PARENT_MAPPINGS: u64 = 100;
const PARENT_PAGES: u64 = 8;
/// Where heaps begin.
const HEAP: u64 = 0x5555_5600_0000;

fn run(context: &Context<'_>) -> Result<report::Experiment, Failure> {
    let workers = context.threads();
    check_threads(workers, 1)?;
    let mut plan = Plan::new();
    let [classic, speculative] = LOCKINGS.map(|locking| {
        plan.case(Case::new(
            role(locking),
            name(locking),
            workers,
            "a process, fork to exit",
            "µs",
            move || set_up(workers, locking),
        ))
    });
    let mut results = plan.run(context)?;
    let name = "time, speculative / classic (published: 0.996 to 1.0075)";
    results.ratio(name, 1.0, speculative, classic, Some(1.0));
    Ok(results.report(context))
}

/// What all processes use.
struct Build {
    images: Vec<Image>,
    source: Shared<Object<Hosted>>,
    config: SpaceConfig,
}

/// Pages of the source file.
const SOURCE: u64 = 64;

fn set_up(workers: usize, locking: Locking) -> Result<Runner<'static>, Failure> {
    let crew = Crew::shared((64 << 20) + workers as u64 * (16 << 20), workers)?;
    // A compiler of 8 MiB, and libraries from 256 KiB to 2 MiB.
    let pages = [2048, 512, 256, 128, 64, 64];
    let images = pages.iter().enumerate().map(|(number, &pages)| Image::new(&crew, number as u64, pages));
    let build = Build {
        images: images.collect::<Result<_, _>>()?,
        source: files::cached(&crew, 0, pages.len() as u64, SOURCE * PAGE_SIZE)?,
        config: SpaceConfig::with_locking(locking),
    };
    let parents = (0..workers).map(|worker| make_parent(&crew, worker, &build));
    let parents = parents.collect::<Result<Vec<_>, _>>()?;
    Ok(Box::new(move |time| {
        crew.counted(|| {
            let times = together(
                workers,
                workers,
                |_| Ok(()),
                |worker, ()| processes(&mut crew.cpu(worker), &parents[worker], &build, time),
            )?;
            Ok(vec![times.iter().sum::<f64>() / times.len() as f64])
        })
    }))
}

/// A parent: mappings that differ from their neighbours in protection, half of them touched, and where.
struct Parent {
    space: Shared<Space>,
    touched: Vec<u64>,
}

fn make_parent(crew: &Crew, worker: usize, build: &Build) -> Result<Parent, Failure> {
    let space = crew.space(build.config)?;
    let cpu = &mut *crew.cpu(worker);
    cpu.switch_to(&space);
    let mut touched = Vec::new();
    for n in 0..PARENT_MAPPINGS {
        let prot = if n % 2 == 0 { READ_WRITE } else { Prot::READ };
        let addr = map(cpu, MapRequest::anonymous(PARENT_PAGES * PAGE_SIZE, prot))?;
        if n % 2 == 0 {
            write_pages(cpu, addr, PARENT_PAGES)?;
            touched.push(addr);
        }
    }
    cpu.switch_off();
    Ok(Parent { space, touched })
}

/// Processes until `time` is over; microseconds for each.
fn processes(cpu: &mut Cpu, parent: &Parent, build: &Build, time: Duration) -> Result<f64, Failure> {
    let (start, mut count) = (Instant::now(), 0u64);
    loop {
        process(cpu, parent, build)?;
        count += 1;
        let elapsed = start.elapsed();
        if elapsed >= time {
            return Ok(elapsed.as_secs_f64() * 1e6 / count as f64);
        }
    }
}

fn process(cpu: &mut Cpu, parent: &Parent, build: &Build) -> Result<(), Failure> {
    let child = shared(parent.space.fork(cpu.core()).map_err(broken("cannot fork"))?)?;
    cpu.switch_to(&child);
    // The child's stack and variables, before it becomes another program.
    for &addr in parent.touched.iter().take(12) {
        write_pages(cpu, addr, 1)?;
        read_pages(cpu, addr + PAGE_SIZE, 2)?;
    }
    let program = shared(Space::try_new(cpu.core(), build.config).map_err(broken("cannot make a space"))?)?;
    cpu.switch_to(&program);
    unmap_all(cpu, &child)?;
    drop(child);
    compile(cpu, build)?;
    cpu.switch_off();
    unmap_all(cpu, &program)
}

fn compile(cpu: &mut Cpu, build: &Build) -> Result<(), Failure> {
    running(cpu)?.set_heap(cpu.core(), HEAP).map_err(broken("cannot have a heap"))?;
    let stack = map(cpu, MapRequest::anonymous(128 << 10, READ_WRITE))?;
    write_pages(cpu, stack, 6)?;
    let bases = build.images.iter().map(|image| image.load(cpu)).collect::<Result<Vec<_>, _>>()?;
    for (image, &base) in build.images.iter().zip(&bases) {
        image.run(cpu, base, 24)?;
    }
    let source = map(cpu, MapRequest::object(&build.source, 0, SOURCE * PAGE_SIZE, Prot::READ, false))?;
    read_pages(cpu, source, SOURCE)?;
    // The heap grows as a C library's does, by 132 KiB a time.
    for _ in 0..6 {
        let grown = move_heap(cpu, 33)?;
        write_pages(cpu, grown, 33)?;
    }
    for _ in 0..4 {
        let block = map(cpu, MapRequest::anonymous(256 << 10, READ_WRITE))?;
        write_pages(cpu, block, 64)?;
        unmap(cpu, block, 256 << 10)?;
    }
    unmap(cpu, source, SOURCE * PAGE_SIZE)
}
