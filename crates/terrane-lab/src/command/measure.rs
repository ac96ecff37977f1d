//! `terrane experiments` and `terrane bench`: measure, and show what came out.

use crate::experiments;
use crate::failure::Failure;
use crate::measure::progress::Progress;
use crate::measure::{Context, Experiment, host};
use crate::report::json::Sink;
use crate::report::plot::Folder;
use crate::report::{self, Report, SCHEMA, table};
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

/// What the user asked for.
pub struct Request {
    /// The command: what pictures of single operations are told apart by.
    pub command: &'static str,
    /// What to measure.
    pub selected: Vec<&'static Experiment>,
    /// How many threads work together.
    pub threads: Option<usize>,
    /// How many files there are.
    pub files: Option<usize>,
    /// How long each case is measured, in seconds.
    pub seconds: Option<f64>,
    /// How many samples are taken.
    pub runs: Option<usize>,
    /// Where the JSON report goes.
    pub json: Option<PathBuf>,
    /// Where the pictures go.
    pub plot: Option<PathBuf>,
}

/// Measures what was asked for. Everything that can be refused is refused before the first measurement.
///
/// # Errors
/// [`Failure::Request`] for too little memory and for files that cannot be written; whatever stops a measurement.
pub fn run(request: &Request) -> Result<(), Failure> {
    for experiment in &request.selected {
        host::check_memory(&format!("‘{}’", experiment.id), (experiment.memory)(request.threads))?;
    }
    // Benchmarks have names of their own and are not among the experiments, though some are called alike.
    if request.command == "experiments" {
        experiments::check(&request.selected, request.threads, request.files)?;
    }
    let mut sink = request.json.as_deref().map(Sink::open).transpose()?;
    let folder = request.plot.as_deref().map(Folder::open).transpose()?;
    // Standard output can carry only one thing.
    let mut out: Box<dyn Write> = match &sink {
        Some(sink) if sink.is_stdout() => Box::new(io::stderr()),
        _ => Box::new(io::stdout()),
    };
    let mut print = |text: &str| {
        out.write_all(text.as_bytes())
            .and_then(|()| out.flush())
            .map_err(|e| Failure::output("standard output", &e))
    };
    let mut report = Report {
        schema: SCHEMA,
        terrane: env!("CARGO_PKG_VERSION").to_owned(),
        machine: host::describe(),
        command: command_line(),
        experiments: Vec::new(),
    };
    print(&table::head(&report))?;
    for (number, experiment) in request.selected.iter().enumerate() {
        let result = measure(experiment, request, number + 1)?;
        print(&table::experiment(&result))?;
        if let Some(folder) = &folder {
            let name = match request.command {
                "experiments" => result.id.clone(),
                command => format!("{command}-{}", result.id),
            };
            let path = folder.draw(&name, &report, &result)?;
            print(&format!("\n  Picture: {}\n", path.display()))?;
        }
        report.experiments.push(result);
    }
    match &mut sink {
        Some(sink) => sink.write(&report),
        None => Ok(()),
    }
}

fn measure(experiment: &Experiment, request: &Request, number: usize) -> Result<report::Experiment, Failure> {
    let progress = Progress::new(experiment.id, number, request.selected.len());
    let context = Context {
        experiment,
        threads: request.threads,
        files: request.files,
        time: Duration::from_secs_f64(request.seconds.unwrap_or(experiment.seconds)),
        runs: request.runs.unwrap_or(experiment.runs),
        progress: &progress,
    };
    (experiment.run)(&context)
}

/// The command line, without the path of the program.
pub fn command_line() -> String {
    let arguments = std::env::args_os().skip(1).map(|argument| argument.to_string_lossy().into_owned());
    std::iter::once("terrane".to_owned()).chain(arguments).collect::<Vec<_>>().join(" ")
}
