//! `terrane referee`: the same random calls, loads and stores on the running kernel and on Terrane.
//!
//! The work is done by the crate `terrane-referee`; here is what the user sees of it.

use crate::command::measure::command_line;
use crate::failure::Failure;
use crate::measure::host;
use crate::measure::progress::Progress;
use crate::report::json::Sink;
use crate::report::table::{number, thousands};
use crate::report::{Machine, SCHEMA};
use serde::Serialize;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use std::time::Instant;
use terrane_referee::kernel;
use terrane_referee::machine::Plant;
use terrane_referee::operation::Op;
use terrane_referee::run::{self, Found, Plan, RunError, Tally};
use terrane_referee::script::{Script, line};

/// The hidden command that serves as helper.
pub const COMMAND: &str = "referee-helper";

/// What to do wrong on purpose.
#[derive(Clone, Copy, clap::ValueEnum)]
pub enum Wrong {
    /// `munmap`.
    Unmap,
    /// Stores.
    Store,
    /// `mprotect`.
    Protect,
}

/// What the user asked for.
pub struct Request {
    /// The first seed.
    pub seed: u64,
    /// Operations of all seeds together.
    pub operations: u64,
    /// Operations of one seed.
    pub each: u64,
    /// Pairs that work side by side.
    pub threads: usize,
    /// A script to carry out instead.
    pub replay: Option<PathBuf>,
    /// Where the JSON report goes.
    pub json: Option<PathBuf>,
    /// Damage to do, to see that it is noticed.
    pub plant: Option<Wrong>,
}

/// The report.
#[derive(Serialize)]
struct Report {
    schema: u32,
    terrane: String,
    machine: Machine,
    command: String,
    referee: Referee,
}

/// What came of it.
#[derive(Serialize)]
struct Referee {
    seed: u64,
    seeds: u64,
    threads: usize,
    seconds: f64,
    operations: Vec<Row>,
    difference: Option<Shown>,
}

/// Operations of one kind.
#[derive(Serialize)]
struct Row {
    operation: &'static str,
    succeeded: u64,
    failed: u64,
    signalled: u64,
}

/// A difference.
#[derive(Serialize)]
struct Shown {
    seed: Option<u64>,
    script: String,
    told: String,
}

fn failure(error: RunError) -> Failure {
    match error {
        RunError::Unable(what) => Failure::Request(format!("the kernel cannot be a referee here: {what}")),
        RunError::Broken(what) => Failure::Broken(what),
    }
}

/// Serves as helper, for the command itself.
///
/// # Errors
/// [`Failure::Request`]: it does not come back else.
pub fn serve(arguments: &[String]) -> Result<(), Failure> {
    Err(Failure::Request(format!("‘{COMMAND}’: {}", kernel::serve(arguments))))
}

/// Runs it.
///
/// # Errors
/// [`Failure::Broken`] if there is a difference; [`Failure::Request`] for what cannot be carried out.
pub fn run(request: &Request) -> Result<(), Failure> {
    let script = request.replay.as_ref().map(read).transpose()?;
    let program =
        std::env::current_exe().map_err(|error| Failure::request("finding this program", &error))?;
    let helper = || {
        let mut command = Command::new(&program);
        command.arg(COMMAND);
        command
    };
    let plant = request.plant.map(|plant| match plant {
        Wrong::Unmap => Plant::Unmap,
        Wrong::Store => Plant::Store,
        Wrong::Protect => Plant::Protect,
    });
    host::check_memory("‘referee’", 256 << 20)?;
    let mut sink = request.json.as_deref().map(Sink::open).transpose()?;
    let mut out: Box<dyn Write> = match &sink {
        Some(sink) if sink.is_stdout() => Box::new(io::stderr()),
        _ => Box::new(io::stdout()),
    };
    let start = Instant::now();
    let seeds = request.operations.div_ceil(request.each);
    let (tallies, scripts, found) = match &script {
        Some(script) => {
            let mut judge = run::judge(&helper, plant).map_err(failure)?;
            let found = run::replay(&mut judge, script).map_err(failure)?;
            let before = script.ops.len();
            let found =
                found.map(|difference| Found { seed: None, script: script.clone(), difference, before });
            (Vec::new(), u64::from(found.is_none()), found)
        }
        None => {
            let progress = Progress::new("referee", 1, 1);
            progress.steps(request.operations as usize);
            let progress = Mutex::new(progress);
            let plan =
                Plan { seed: request.seed, seeds, operations: request.each, threads: request.threads, plant };
            let report = run::run(&plan, &helper, &|done| {
                if let Ok(progress) = progress.lock() {
                    let rate = done as f64 / start.elapsed().as_secs_f64();
                    progress.begin(format!("{}/s", number(rate)));
                    progress.advance((done as usize).saturating_sub(progress.position()));
                }
            })
            .map_err(failure)?;
            (report.tallies, report.scripts, report.found)
        }
    };
    let rows = |tallies: Vec<Tally>| -> Vec<Row> {
        let rows = tallies.into_iter().zip(Op::NAMES).filter(|(tally, _)| tally.all() > 0);
        rows.map(|(Tally { succeeded, failed, signalled }, &operation)| Row {
            operation,
            succeeded,
            failed,
            signalled,
        })
        .collect()
    };
    let referee = Referee {
        seed: request.seed,
        seeds: scripts,
        threads: request.threads,
        seconds: start.elapsed().as_secs_f64(),
        operations: rows(tallies),
        difference: found.as_ref().map(|found| Shown {
            seed: found.seed,
            script: found.script.to_string(),
            told: told(found),
        }),
    };
    out.write_all(summary(&referee, script.is_some()).as_bytes())
        .and_then(|()| out.flush())
        .map_err(|error| Failure::output("standard output", &error))?;
    if let Some(sink) = &mut sink {
        sink.write(&Report {
            schema: SCHEMA,
            terrane: env!("CARGO_PKG_VERSION").to_owned(),
            machine: host::describe(),
            command: command_line(),
            referee,
        })?;
    }
    match found {
        None => Ok(()),
        Some(found) => Err(Failure::Broken(match found.seed {
            Some(seed) => format!("Linux and Terrane differ, with seed {seed}"),
            None => "Linux and Terrane differ".to_owned(),
        })),
    }
}

fn read(path: &PathBuf) -> Result<Script, Failure> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| Failure::request(format_args!("cannot read {}", path.display()), &error))?;
    text.parse().map_err(|error| Failure::Request(format!("{}: {error}", path.display())))
}

/// What is printed in the end.
fn summary(referee: &Referee, replayed: bool) -> String {
    let all: u64 = referee.operations.iter().map(|row| row.succeeded + row.failed + row.signalled).sum();
    let mut text = if replayed {
        match referee.difference {
            None => "Linux and Terrane agree after each operation.\n".to_owned(),
            Some(_) => String::new(),
        }
    } else {
        format!(
            "{} operations from seed {} on, {} seeds without a difference, {} threads, {:.1} s\n{:>16} {:>12} {:>12} {:>12}\n",
            thousands(all),
            referee.seed,
            referee.seeds,
            referee.threads,
            referee.seconds,
            "operation",
            "succeeded",
            "failed",
            "signalled"
        )
    };
    for Row { operation, succeeded, failed, signalled } in &referee.operations {
        let [succeeded, failed, signalled] = [succeeded, failed, signalled].map(|&count| thousands(count));
        let _ = writeln!(text, "{operation:>16} {succeeded:>12} {failed:>12} {signalled:>12}");
    }
    if let Some(shown) = &referee.difference {
        let _ = write!(text, "\nA difference:\n{}", shown.told);
    }
    text
}

/// A script that shows a difference, and the difference.
fn told(found: &Found) -> String {
    let mut text = found.script.to_string();
    if let (Some(seed), true) = (found.seed, found.before > found.script.ops.len()) {
        let _ = writeln!(text, "# seed {seed}, shrunk from {} operations", found.before);
    }
    let after = match found.script.ops.get(found.difference.at) {
        Some(op) => format!("after ‘{}’", line(op, &found.script.setup)),
        None => "at the end".to_owned(),
    };
    let _ = writeln!(text, "# {:?}, {after}:", found.difference.what);
    for line in found.difference.told.lines() {
        let _ = writeln!(text, "# {line}");
    }
    text
}
