//! `terrane compare`: the same program on the host, on Terrane's kernel with both ways of locking, and on Linux kernels in the same emulator.
//!
//! [`figures`] reads what programs say; [`linux`] makes a guest of a Linux kernel; [`table`] shows what came out. The variants
//! take turns, one run of each, so that a machine that slows down slows them all.

mod figures;
mod linux;
mod table;

use crate::boot::program::Program;
use crate::boot::qemu::{self, Accel, End, Guest, Streams};
use crate::boot::{self, Locking, Wanted, kernel};
use crate::command::measure::command_line;
use crate::failure::Failure;
use crate::measure::host;
use crate::measure::progress::Progress;
use crate::measure::stats::Summary;
use crate::report::json::Sink;
use crate::report::{Better, Counters, Experiment, Ordered, Ratio, Report, Role, Row, SCHEMA};
use figures::{Figure, Left, difference, figures};
use linux::Kernel;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// What the user asked for.
pub struct Request {
    /// The guests' machine.
    pub wanted: Wanted,
    /// Images of Linux kernels.
    pub linux: Vec<PathBuf>,
    /// Runs of each.
    pub runs: usize,
    /// Whether it runs on the host too.
    pub native: bool,
    /// Where the JSON report goes.
    pub json: Option<PathBuf>,
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
}

/// How long a run may take, if the user does not say.
const PATIENCE: Duration = Duration::from_secs(600);

/// Who runs the program.
enum Host {
    /// This machine.
    Native,
    /// A Linux kernel in the emulator.
    Linux(PathBuf),
    /// Terrane's kernel.
    Terrane(Locking),
}

/// One who runs the program, and what it has said so far.
struct Variant {
    name: String,
    host: Host,
    runs: Vec<Run>,
    /// Why it runs no more.
    failure: Option<Failure>,
}

/// One run.
struct Run {
    left: Left,
    figures: Vec<Figure>,
    stats: Vec<(String, u64)>,
}

/// Everything that runs need.
struct Stage<'a> {
    request: &'a Request,
    program: Program,
    qemu: PathBuf,
    accel: Accel,
    kernel: PathBuf,
    /// For Terrane's kernel, and for Linux.
    archives: (File, Option<File>),
    timeout: Duration,
}

/// Runs the comparison.
///
/// # Errors
/// [`Failure::Request`] for what cannot be carried out; [`Failure::Guest`] for a guest that breaks down; [`Failure::Broken`] if outputs differ.
pub fn run(request: &Request) -> Result<(), Failure> {
    let Request { wanted, program: typed, arguments, .. } = request;
    let program = Program::read(typed)?;
    let kernels = request.linux.iter().map(|path| Kernel::read(path)).collect::<Result<Vec<_>, _>>()?;
    let ours = boot::pack(&program, typed, arguments, wanted, |_| Ok(()))?;
    let theirs = match kernels.is_empty() {
        true => None,
        false => Some(linux::archive(&program, typed, arguments, wanted)?),
    };
    let qemu = qemu::find()?;
    let kernel = kernel::find(wanted.kernel.as_deref())?;
    let accel = boot::choose(&qemu, wanted.accel)?;
    let mut sink = request.json.as_deref().map(Sink::open).transpose()?;
    let timeout = wanted.timeout.unwrap_or(PATIENCE);
    let stage = Stage { request, program, qemu, accel, kernel, archives: (ours, theirs), timeout };
    let mut variants = variants(request, kernels);
    measure(&stage, &mut variants)?;
    let experiment = stage.report(&variants);
    let text = table::text(&experiment);
    match &sink {
        Some(sink) if sink.is_stdout() => io::stderr().write_all(text.as_bytes()),
        _ => io::stdout().write_all(text.as_bytes()),
    }
    .map_err(|error| Failure::output("standard output", &error))?;
    if let Some(sink) = &mut sink {
        sink.write(&Report {
            schema: SCHEMA,
            terrane: env!("CARGO_PKG_VERSION").to_owned(),
            machine: host::describe(),
            command: command_line(),
            experiments: vec![experiment],
        })?;
    }
    let agree = agree(&variants);
    match variants.into_iter().find_map(|variant| variant.failure) {
        Some(failure) => Err(failure),
        None => agree,
    }
}

fn variants(request: &Request, kernels: Vec<Kernel>) -> Vec<Variant> {
    let native = request.native.then(|| (format!("{}, host", host::kernel()), Host::Native));
    let linux = kernels.into_iter().map(|kernel| (kernel.name, Host::Linux(kernel.image)));
    let lockings = [Locking::Classic, Locking::Speculative];
    let terrane = lockings.map(|locking| (format!("Terrane, {}", locking.name()), Host::Terrane(locking)));
    let mut variants: Vec<Variant> = Vec::new();
    for (mut name, host) in native.into_iter().chain(linux).chain(terrane) {
        // Two images of one version.
        while variants.iter().any(|variant| variant.name == name) {
            name.push('′');
        }
        variants.push(Variant { name, host, runs: Vec::new(), failure: None });
    }
    variants
}

/// Runs all variants in turn.
fn measure(stage: &Stage<'_>, variants: &mut [Variant]) -> Result<(), Failure> {
    let progress = Progress::new(&stage.program.name, 1, 1);
    progress.steps(stage.request.runs * variants.len());
    for _ in 0..stage.request.runs {
        for variant in variants.iter_mut().filter(|variant| variant.failure.is_none()) {
            progress.begin(variant.name.clone());
            let run = match &variant.host {
                Host::Native => stage.native(),
                Host::Linux(image) => {
                    stage.guest(&variant.name, image, stage.archives.1.as_ref(), linux::WORDS)
                }
                Host::Terrane(locking) => {
                    let words = boot::words(&stage.program, *locking, true, &stage.request.wanted.words);
                    stage.guest(&variant.name, &stage.kernel, Some(&stage.archives.0), &words)
                }
            };
            match run {
                Ok(run) => variant.runs.push(run),
                // The others are still worth seeing.
                Err(failure @ Failure::Guest { .. }) => variant.failure = Some(failure),
                Err(failure) => return Err(failure),
            }
            progress.advance(1);
        }
    }
    Ok(())
}

impl Stage<'_> {
    /// A run in the emulator.
    fn guest(&self, name: &str, kernel: &Path, archive: Option<&File>, words: &str) -> Result<Run, Failure> {
        let wanted = &self.request.wanted;
        let guest = Guest {
            qemu: &self.qemu,
            accel: self.accel,
            cpus: wanted.cpus,
            memory: wanted.memory,
            kernel,
            archive,
            words,
            gdb: false,
        };
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let streams = Streams { input: false, out: &mut out, err: &mut err, event: &mut |_| {} };
        let ran = qemu::run(&guest, streams, Some(self.timeout))?;
        let said = String::from_utf8_lossy(&err).into_owned();
        let status = match boot::outcome(&ran, kernel, Some(self.timeout)) {
            Ok(status) => status,
            Err(Failure::Guest { message, status }) => {
                eprint!("{}{said}", String::from_utf8_lossy(&out));
                return Err(Failure::Guest { message: format!("{name}: {message}"), status });
            }
            Err(failure) => return Err(failure),
        };
        debug_assert!(matches!(ran.end, End::Exit(_) | End::Signal(_)));
        let mut figures = figures(&said);
        if let Some(took) = ran.took {
            figures.push(Figure { name: "whole-run".into(), value: took.as_secs_f64(), unit: "s".into() });
        }
        if let Some(ready) = ran.ready {
            figures.push(Figure { name: "boot".into(), value: ready.as_secs_f64(), unit: "s".into() });
        }
        warn(name, status, &said);
        Ok(Run { left: Left { output: out, status }, figures, stats: ran.stats })
    }

    /// A run on this machine.
    fn native(&self) -> Result<Run, Failure> {
        let failed =
            |error| Failure::request(format_args!("cannot run {}", self.program.path.display()), &error);
        // Not looked up in PATH.
        let path = self.program.path.canonicalize().map_err(failed)?;
        let mut command = Command::new(&path);
        command.arg0(&self.request.program).args(&self.request.arguments).env_clear();
        let environment = boot::environment(&self.request.wanted.env);
        command.envs(environment.iter().filter_map(|variable| variable.split_once('=')));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let start = Instant::now();
        let mut child = command.spawn().map_err(failed)?;
        let (out, err) = (read(child.stdout.take()), read(child.stderr.take()));
        let status = wait(&mut child, self.timeout).map_err(failed)?;
        let took = start.elapsed();
        let (Ok(out), Ok(err)) = (out.join(), err.join()) else {
            return Err(Failure::Broken("cannot read what the program says".to_owned()));
        };
        let Some(status) = status else {
            return Err(Failure::Guest {
                message: "the program on the host took too long".into(),
                status: 124,
            });
        };
        let said = String::from_utf8_lossy(&err).into_owned();
        let mut figures = figures(&said);
        figures.push(Figure { name: "whole-run".into(), value: took.as_secs_f64(), unit: "s".into() });
        warn("the host", status, &said);
        Ok(Run { left: Left { output: out, status }, figures, stats: Vec::new() })
    }

    /// The figures of all runs as a report: a row for each figure and variant, and ratios of Terrane to the others.
    fn report(&self, variants: &[Variant]) -> Experiment {
        let wanted = &self.request.wanted;
        let mut rows = Vec::new();
        let mut ratios = Vec::new();
        let mut names: Vec<(&str, &str)> = Vec::new();
        for figure in variants.iter().flat_map(|variant| &variant.runs).flat_map(|run| &run.figures) {
            if !names.contains(&(&figure.name, &figure.unit)) {
                names.push((&figure.name, &figure.unit));
            }
        }
        // What every run has comes last.
        names.sort_by_key(|(name, _)| matches!(*name, "whole-run" | "boot"));
        for &(name, unit) in &names {
            for variant in variants {
                let Some(summary) = Summary::of(&variant.samples(name)) else { continue };
                rows.push(Row {
                    variant: variant.name.clone(),
                    threads: usize::from(wanted.cpus),
                    metric: name.to_owned(),
                    unit: unit.to_owned(),
                    median: summary.median,
                    min: summary.min,
                    max: summary.max,
                    at_most: None,
                    role: variant.role(),
                });
            }
            let (Some(better), Some((ours, others))) = (Better::of(unit), variants.split_last()) else {
                continue;
            };
            for other in others {
                if let Some(value) = times_better(better, &ours.samples(name), &other.samples(name)) {
                    let name = format!("{name}: {} against {}", ours.name, other.name);
                    ratios.push(Ratio { name, value, ..Ratio::default() });
                }
            }
        }
        let mut counters: Ordered<Counters> = Ordered::default();
        for variant in variants {
            for (name, value) in variant.runs.iter().flat_map(|run| &run.stats) {
                *counters.entry(&variant.name).entry(name) += value;
            }
        }
        let line: Vec<&str> = std::iter::once(self.program.name.as_str())
            .chain(self.request.arguments.iter().map(String::as_str))
            .collect();
        Experiment {
            id: self.program.name.clone(),
            title: line.join(" "),
            source: "terrane compare".to_owned(),
            note: format!(
                "{} processors and {} MiB for each guest, {}, {} {} of each; the host has {} processors.",
                wanted.cpus,
                wanted.memory >> 20,
                match self.accel {
                    Accel::Kvm => "under KVM",
                    Accel::Tcg => "under emulation",
                },
                self.request.runs,
                if self.request.runs == 1 { "run" } else { "runs" },
                host::describe().cpus
            ),
            rows,
            ratios,
            counters,
            scaling: false,
        }
    }
}

impl Variant {
    /// What its runs say of a figure.
    fn samples(&self, name: &str) -> Vec<f64> {
        let figures = self.runs.iter().flat_map(|run| &run.figures);
        figures.filter(|figure| figure.name == name).map(|figure| figure.value).collect()
    }

    fn role(&self) -> Role {
        match self.host {
            Host::Native | Host::Linux(_) => Role::Linux,
            Host::Terrane(Locking::Classic) => Role::Baseline,
            Host::Terrane(Locking::Speculative) => Role::Terrane,
        }
    }
}

/// How many times as good ours is: the median over the runs.
fn times_better(better: Better, ours: &[f64], other: &[f64]) -> Option<f64> {
    let ratios: Vec<f64> = ours
        .iter()
        .zip(other)
        .map(|(ours, other)| match better {
            Better::More => ours / other,
            Better::Less => other / ours,
        })
        .collect();
    Summary::of(&ratios).map(|summary| summary.median)
}

/// What a program says when it fails is not to be lost.
fn warn(name: &str, status: u8, said: &str) {
    if status != 0 {
        said.lines().for_each(|line| eprintln!("{name}: {line}"));
    }
}

/// Every run must leave what the first left.
fn agree(variants: &[Variant]) -> Result<(), Failure> {
    let mut all = variants.iter().flat_map(|variant| variant.runs.iter().map(move |run| (variant, run)));
    let Some((first, expected)) = all.next() else { return Ok(()) };
    let mut told = Vec::new();
    for (variant, run) in all {
        if let Some(what) = difference(&expected.left, &run.left) {
            told.push(format!("{} differs from {}: {what}", variant.name, first.name));
        }
    }
    told.dedup();
    match told.is_empty() {
        true => Ok(()),
        false => Err(Failure::Broken(told.join("; "))),
    }
}

fn read(stream: Option<impl Read + Send + 'static>) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // What came before an error is still worth something.
        let _ = stream.map(|mut stream| stream.read_to_end(&mut bytes));
        bytes
    })
}

/// The status of a child as a shell has it; `None` if it had to be ended.
fn wait(child: &mut Child, timeout: Duration) -> io::Result<Option<u8>> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            let signal = status.signal().map(|number| 128 + number);
            return Ok(status.code().or(signal).map(|status| status as u8));
        }
        if start.elapsed() > timeout {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(2));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variant(name: &str, host: Host, runs: &[(&str, u8, f64)]) -> Variant {
        let run = |&(output, status, value): &(&str, u8, f64)| Run {
            left: Left { output: output.into(), status },
            figures: vec![Figure { name: "pair".into(), value, unit: "µs".into() }],
            stats: vec![],
        };
        Variant { name: name.into(), host, runs: runs.iter().map(run).collect(), failure: None }
    }

    #[test]
    fn all_runs_must_agree() {
        let good = [("a", 0, 1.0), ("a", 0, 2.0)];
        let host = variant("host", Host::Native, &good);
        assert!(agree(&[host]).is_ok());
        let all = [
            variant("host", Host::Native, &good),
            variant("classic", Host::Terrane(Locking::Classic), &[("a", 0, 1.0), ("b", 0, 1.0)]),
            variant("speculative", Host::Terrane(Locking::Speculative), &good),
        ];
        assert!(
            matches!(agree(&all), Err(Failure::Broken(text)) if text.starts_with("classic differs from host"))
        );
    }

    #[test]
    fn ratios_say_how_many_times_as_good() {
        assert_eq!(times_better(Better::Less, &[1.0, 2.0, 1.0], &[3.0, 6.0, 30.0]), Some(3.0));
        assert_eq!(times_better(Better::More, &[3.0], &[1.5]), Some(2.0));
        assert_eq!(times_better(Better::More, &[], &[1.5]), None);
    }

    #[test]
    fn variants_have_names_of_their_own() {
        let request = Request {
            wanted: Wanted {
                cpus: 2,
                memory: 1 << 30,
                accel: boot::Choice::Tcg,
                files: vec![],
                env: vec![],
                timeout: None,
                kernel: None,
                words: vec![],
            },
            linux: vec![],
            runs: 1,
            native: false,
            json: None,
            program: "p".into(),
            arguments: vec![],
        };
        let kernel = || Kernel { image: "k".into(), name: "Linux 6.1".into() };
        let names: Vec<_> =
            variants(&request, vec![kernel(), kernel()]).into_iter().map(|variant| variant.name).collect();
        assert_eq!(names, ["Linux 6.1", "Linux 6.1′", "Terrane, classic", "Terrane, speculative"]);
    }
}
