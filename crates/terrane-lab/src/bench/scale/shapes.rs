//! The shapes of will-it-scale on Terrane, by processors in software that run the space.

use super::{Machines, Variant};
use crate::baseline::linux::{CALLS, Probe, Shape, Work, sparse_file};
use crate::experiments::hosted::{READ_WRITE, broken, patiently};
use crate::failure::Failure;
use crate::measure::plan::{CaseId, Runner};
use crate::measure::rate::{Done, rates};
use crate::measure::{Case, Plan};
use std::sync::Arc;
use std::time::Instant;
use terrane::PAGE_SIZE;
use terrane::object::Object;
use terrane::space::MapRequest;
use terrane::sync::Shared;
use terrane::vma::Advice;
use terrane_hosted::{Cpu, HostFile, Hosted, Space};

/// Who does it.
pub fn variants(shape: Shape) -> &'static [Variant] {
    use Variant::{Classic, Linux, LinuxPlaces, PerCpu};
    match shape {
        // The heap is where it is.
        Shape::Brk1 => &[LinuxPlaces, Classic, Linux],
        _ => &[PerCpu, LinuxPlaces, Classic, Linux],
    }
}

/// In words.
pub fn words(shape: Shape) -> &'static str {
    match shape {
        Shape::PageFault1 => "touch 128 MiB of private memory, unmap",
        Shape::PageFault2 => "touch 128 MiB of a private file, unmap",
        Shape::PageFault3 => "touch 128 MiB of a shared file, unmap",
        Shape::Mmap1 => "map + unmap 128 MiB of memory",
        Shape::Mmap2 => "map + unmap 128 MiB of a private file",
        Shape::TlbFlush1 => "touch a page of a private file, give it back, load",
        Shape::Brk1 => "grow and shrink the one heap by a page",
    }
}

/// Plans a case for every number of threads.
pub fn plan(
    plan: &mut Plan<'static>,
    machines: &Arc<Machines>,
    shape: Shape,
    variant: Variant,
    metric: &str,
    counts: &[usize],
) -> Vec<CaseId> {
    let case = |&threads: &usize| {
        if variant == Variant::Linux {
            return Probe::Scale { work: Work::Shape(shape, machines.length), threads, churn: false }
                .case(metric, shape.unit());
        }
        let machines = machines.clone();
        Case::new(variant.role(), variant.words(), threads, metric, shape.unit(), move || {
            set_up(&machines, shape, variant, threads)
        })
    };
    counts.iter().map(|threads| plan.case(case(threads))).collect()
}

/// Files, one for each thread.
pub type Files = Vec<Shared<Object<Hosted>>>;

impl Machines {
    /// The files of the present group of cases, the same for all of them: they are cached in memory, and twice would be too much.
    fn files(&self) -> Result<Arc<Files>, Failure> {
        let mut last = self.files.lock();
        if let Some(files) = last.upgrade() {
            return Ok(files);
        }
        let file = |_| {
            let file = HostFile::new(sparse_file(self.length)?).map_err(broken("cannot open a file"))?;
            Object::file(self.all.machine().machine(), file).map_err(broken("cannot open a file"))
        };
        let files = Arc::new((1..self.apart.len()).map(file).collect::<Result<Files, Failure>>()?);
        *last = Arc::downgrade(&files);
        Ok(files)
    }
}

/// Sets a shape up; each sample is a rate of all threads.
pub fn set_up(
    machines: &Machines,
    shape: Shape,
    variant: Variant,
    threads: usize,
) -> Result<Runner<'static>, Failure> {
    let crew = machines.all.clone();
    let mut config = variant.config();
    config.fault_around = PAGE_SIZE;
    let space = crew.space(config)?;
    let files = if shape.maps_file() { machines.files()? } else { Arc::new(Vec::new()) };
    let length = machines.length;
    if shape == Shape::Brk1 {
        space.set_heap(crew.cpu(0).core(), HEAP).map_err(broken("cannot set up a heap"))?;
        space.brk(crew.cpu(0).core(), HEAP + (1 << 20));
    }
    Ok(Box::new(move |time| {
        (0..threads).for_each(|index| crew.cpu(index).switch_to(&space));
        let step = |index: usize, cpu: &mut Cpu| do_step(shape, &space, cpu, files.get(index), length);
        let sample = crew.counted(|| {
            let all =
                rates(threads, threads, time, |index| Ok(crew.cpu(index)), |index, cpu| step(index, cpu))?;
            Ok(vec![all.rate()])
        });
        (0..threads).for_each(|index| crew.cpu(index).switch_off());
        sample
    }))
}

/// Where the heap begins.
const HEAP: u64 = 1 << 32;

fn do_step(
    shape: Shape,
    space: &Space,
    cpu: &mut Cpu,
    file: Option<&Shared<Object<Hosted>>>,
    length: u64,
) -> Result<Done, Failure> {
    let start = Instant::now();
    let request = || match file {
        Some(file) => MapRequest::object(file, 0, length, READ_WRITE, shape.is_shared()),
        None => MapRequest::anonymous(length, READ_WRITE),
    };
    let map = |cpu: &Cpu| space.map(cpu.core(), request()).map_err(broken("cannot map"));
    let unmap = |cpu: &Cpu, at| space.unmap(cpu.core(), at, length).map_err(broken("cannot unmap"));
    let pages = length / PAGE_SIZE;
    let things = match shape {
        Shape::Mmap1 | Shape::Mmap2 => {
            for _ in 0..CALLS {
                let at = map(cpu)?;
                unmap(cpu, at)?;
            }
            CALLS
        }
        Shape::PageFault1 | Shape::PageFault2 | Shape::PageFault3 => {
            let at = map(cpu)?;
            for page in 0..pages {
                patiently("cannot store", || cpu.store_u8(at + page * PAGE_SIZE, 1))?;
            }
            unmap(cpu, at)?;
            pages
        }
        Shape::TlbFlush1 => {
            let at = map(cpu)?;
            // All the pages of a mapping would take the time of several samples.
            let pages = pages.min(2048);
            for at in (at..).step_by(PAGE_SIZE as usize).take(pages as usize) {
                patiently("cannot store", || cpu.store_u8(at, 1))?;
                space
                    .advise(cpu.core(), at, PAGE_SIZE, Advice::DontNeed)
                    .map_err(broken("cannot give a page back"))?;
                if patiently("cannot load", || cpu.load_u8(at))? != 0 {
                    return Err(Failure::Broken("a page is still there".to_owned()));
                }
            }
            unmap(cpu, at)?;
            pages
        }
        Shape::Brk1 => {
            // Beside other threads that do the same to the one heap: neither call need have its way.
            for _ in 0..CALLS {
                space.brk(cpu.core(), HEAP + (1 << 20) + PAGE_SIZE);
                space.brk(cpu.core(), HEAP + (1 << 20));
            }
            2 * CALLS
        }
    };
    Ok(Done::new(things, start.elapsed()))
}
