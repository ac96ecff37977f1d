//! Many pages for one call.

use super::rig::{self, READ_WRITE, Rig, broken};
use crate::baseline::linux::{FILE_LENGTH, Fill, Probe};
use crate::failure::Failure;
use crate::measure::host::kernel;
use crate::measure::plan::CaseId;
use crate::measure::threads::in_rounds;
use crate::measure::timing::timed;
use crate::measure::{Case, Context, Experiment, Plan};
use crate::report::{self, Role};
use terrane::PAGE_SIZE;
use terrane::space::{MapRequest, SpaceConfig};
use terrane::vma::{Advice, MapFlags, Prot};

/// `terrane bench populate`.
pub static BENCH: Experiment = Experiment {
    id: "populate",
    title: "populate against touching",
    source: "source D",
    about: "Anonymous: 8 MiB by MADV_POPULATE, for writing also by stores page after page. File: all pages of a \
            cached file of 16 MiB for each thread, mapped anew each time; touched by loads, of a processor in \
            software for Terrane. Nanoseconds a page of each thread, without the unmapping.",
    seconds: 0.35,
    runs: 7,
    memory: |threads| (256 << 20) + rig::for_each_thread(threads, 192 << 20),
    run,
};

/// What is populated of anonymous memory, in bytes.
const ANONYMOUS: u64 = 8 << 20;
/// The length of a file, in bytes.
const FILE: u64 = FILE_LENGTH as u64;

fn run(context: &Context<'_>) -> Result<report::Experiment, Failure> {
    let mut plan = Plan::new();
    let threads = rig::threads(context)?;
    plan.case(Probe::Populate { write: false }.case("anonymous, for reading", "ns"));
    plan_anonymous(&mut plan, Some(Advice::PopulateRead), "Terrane", "anonymous, for reading");
    plan.group();
    plan.case(Probe::Populate { write: true }.case("anonymous, for writing", "ns"));
    let touched = plan_anonymous(&mut plan, None, "Terrane, touch by stores", "anonymous, for writing");
    let populated =
        plan_anonymous(&mut plan, Some(Advice::PopulateWrite), "Terrane", "anonymous, for writing");
    let files = [1, threads].map(|threads| {
        plan.group();
        Files::plan(&mut plan, threads)
    });
    let mut results = plan.run(context)?;
    results.ratio("anonymous, Terrane: time of touching / populate", 1.0, touched, populated, None);
    for files in files {
        let threads = files.threads;
        let plural = if threads == 1 { "" } else { "s" };
        for (words, touch, populate) in [
            ("Terrane: touch without fault-around / populate", files.touch_alone, files.populate),
            ("Terrane: touch with fault-around / populate", files.touch, files.populate),
            ("Terrane: map with populate / populate", files.map_populate, files.populate),
            ("Linux: touch with fault-around / populate", files.linux_touch, files.linux_populate),
        ] {
            results.ratio(format!("{words}, {threads} thread{plural}"), 1.0, touch, populate, None);
        }
    }
    results.note(format!("The files are in {} (see TMPDIR).", std::env::temp_dir().display()));
    Ok(results.report(context))
}

/// Plans anonymous memory filled in by advice, or by stores.
fn plan_anonymous(
    plan: &mut Plan<'static>,
    advice: Option<Advice>,
    variant: &'static str,
    metric: &'static str,
) -> CaseId {
    plan.case(Case::new(Role::Terrane, variant, 1, metric, "ns", move || {
        let rig = Rig::new(32 << 20, 1, SpaceConfig::default())?;
        let start = rig.map(MapRequest::anonymous(ANONYMOUS, READ_WRITE))?;
        rig.cpu(0).switch_to(&rig.space);
        Ok(move |time| {
            rig.counted(|| {
                let rounds = in_rounds(1, 1, time, |_| {
                    let mut cpu = rig.cpu(0);
                    let (took, result) = timed(|| match advice {
                        Some(advice) => rig.advise(&cpu, start, ANONYMOUS, advice),
                        None => rig::store_pages(&mut cpu, start, ANONYMOUS),
                    });
                    result?;
                    rig.advise(&cpu, start, ANONYMOUS, Advice::DontNeed)?;
                    Ok(took)
                })?;
                Ok(vec![rounds.each((ANONYMOUS / PAGE_SIZE) as usize)])
            })
        })
    }))
}

/// The cases of files.
struct Files {
    threads: usize,
    linux_touch: CaseId,
    linux_populate: CaseId,
    touch_alone: CaseId,
    touch: CaseId,
    populate: CaseId,
    map_populate: CaseId,
}

impl Files {
    fn plan(plan: &mut Plan<'static>, threads: usize) -> Self {
        let metric = if threads == 1 { "cached file" } else { "cached files, threads together" };
        let mut linux = |how, words: &str| {
            plan.case(Probe::File { how, threads }.case_named(format!("{}, {words}", kernel()), metric, "ns"))
        };
        let linux_touch = linux(Fill::Touch, "touch with fault-around");
        let linux_populate = linux(Fill::Populate, "MADV_POPULATE_READ");
        linux(Fill::MapPopulate, "MAP_POPULATE");
        let mut terrane = |how, around, words: &str| {
            let role = if how == Fill::Touch { Role::Baseline } else { Role::Terrane };
            plan.case(file_case(how, around, threads, role, format!("Terrane, {words}"), metric))
        };
        let around = SpaceConfig::default().fault_around;
        Self {
            threads,
            linux_touch,
            linux_populate,
            touch_alone: terrane(Fill::Touch, PAGE_SIZE, "touch without fault-around"),
            touch: terrane(Fill::Touch, around, "touch with fault-around"),
            populate: terrane(Fill::Populate, around, "MADV_POPULATE_READ"),
            map_populate: terrane(Fill::MapPopulate, around, "MAP_POPULATE"),
        }
    }
}

/// Threads that map all pages of a file each, in one space, all starting together.
fn file_case(
    how: Fill,
    around: u64,
    threads: usize,
    role: Role,
    variant: String,
    metric: &'static str,
) -> Case<'static> {
    Case::new(role, variant, threads, metric, "ns", move || {
        let mut config = SpaceConfig::default();
        config.fault_around = around;
        let rig = Rig::new((16 << 20) + threads as u64 * 2 * FILE, threads, config)?;
        let files = (0..threads).map(|_| rig.cached_file(FILE)).collect::<Result<Vec<_>, _>>()?;
        (0..threads).for_each(|index| rig.cpu(index).switch_to(&rig.space));
        Ok(move |time| {
            rig.counted(|| {
                let rounds = in_rounds(threads, threads, time, |index| {
                    let mut cpu = rig.cpu(index);
                    let request = || MapRequest::object(&files[index], 0, FILE, Prot::READ, true);
                    let map = |cpu: &terrane_hosted::Cpu, request| {
                        rig.space.map(cpu.core(), request).map_err(|e| broken("map a file")(&e))
                    };
                    let (start, took) = if how == Fill::MapPopulate {
                        let (took, start) = timed(|| map(&cpu, request().with(MapFlags::POPULATE)));
                        (start?, took)
                    } else {
                        let start = map(&cpu, request())?;
                        let (took, result) = timed(|| match how {
                            Fill::Populate => rig.advise(&cpu, start, FILE, Advice::PopulateRead),
                            _ => rig::load_pages(&mut cpu, start, FILE),
                        });
                        result?;
                        (start, took)
                    };
                    rig.unmap(&cpu, start, FILE)?;
                    Ok(took)
                })?;
                Ok(vec![rounds.each((FILE / PAGE_SIZE) as usize)])
            })
        })
    })
}
