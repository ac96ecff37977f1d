//! The command line.

use crate::baseline::linux;
use crate::command::{list, measure};
use crate::failure::{Failure, one_line};
use crate::measure::Experiment;
use crate::measure::threads::processors;
use crate::soak::Plant;
use crate::{bench, boot, compare, experiments, referee, soak};
use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;

/// Measures Terrane, a virtual-memory manager, beside its baselines and beside the kernel it runs on.
///
/// Figures of different machines, or of different hours, do not compare. So everything that is compared is measured
/// in one run, and the variants take turns: one sample of each, then the next sample of each.
#[derive(Parser)]
#[command(name = "terrane", version, after_help = after_help())]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Repeats the published experiments: classic against speculative faults, linear against indexed search, and so on
    #[command(after_help = after_help_of("experiments", experiments::ALL))]
    Experiments {
        #[command(flatten)]
        selection: Selection,
        /// Files of 16 MiB for ‘populate’, on disk and twice in memory; its rows then name the number [default: 160]
        #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u16).range(1..=4096))]
        files: Option<u16>,
    },
    /// Measures single operations beside BTreeMap, the crate memory_set and the running kernel
    #[command(after_help = after_help_of("bench", bench::ALL))]
    Bench(Selection),
    /// Stresses Terrane with random operations of many threads, and checks every byte
    #[command(after_help = AFTER_SOAK)]
    Soak {
        /// How long
        #[arg(long, value_name = "S", default_value = "10", allow_negative_numbers = true, value_parser = long)]
        seconds: f64,
        /// Where random numbers begin: what each thread does follows from it, how threads interleave does not
        #[arg(long, value_name = "N", default_value = "1")]
        seed: u64,
        /// Threads that work together [default: two a processor, at least 4]
        #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u16).range(1..=64))]
        threads: Option<u16>,
        /// Memory of the machine; when it is short, calls may fail for that [default: much and too little in turn]
        #[arg(long, value_name = "MIB", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(4..=65536))]
        memory: Option<u32>,
        /// Only readers and writers with a quarter of the memory that they use, and a swap device that fails now and then
        #[arg(long, conflicts_with = "episode")]
        pressure: bool,
        /// Writes a report as JSON (see docs/json.md); - is standard output, and the text then goes to standard error
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
        /// Always the circumstances of this episode, counted from 0: to hunt what was found in it
        #[arg(long, value_name = "N")]
        episode: Option<u64>,
        /// Does damage on purpose, to see that it is noticed
        #[arg(long, value_name = "WHAT", hide = true)]
        plant: Option<Plant>,
    },
    /// Has the running kernel judge Terrane: the same random calls, loads and stores on both
    #[command(after_help = AFTER_REFEREE)]
    Referee {
        /// The first seed: a script of operations follows from each
        #[arg(long, value_name = "N", default_value = "1")]
        seed: u64,
        /// Operations of all seeds together
        #[arg(long, value_name = "N", default_value = "100000", allow_negative_numbers = true, value_parser = clap::value_parser!(u64).range(1..=1_000_000_000_000))]
        operations: u64,
        /// Operations of one seed
        #[arg(long, value_name = "N", default_value = "1000", allow_negative_numbers = true, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
        each: u64,
        /// Pairs of a helper process and a Terrane machine that work side by side [default: one a processor]
        #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u16).range(1..=64))]
        threads: Option<u16>,
        /// Carries out this script instead
        #[arg(long, value_name = "FILE")]
        replay: Option<PathBuf>,
        /// Writes a report as JSON (see docs/json.md); - is standard output, and the text then goes to standard error
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
        /// Does something wrong on purpose, to see that it is noticed
        #[arg(long, value_name = "WHAT", hide = true)]
        plant: Option<referee::Wrong>,
    },
    /// Runs a Linux program on Terrane’s kernel, in an emulator
    #[command(after_help = AFTER_BOOT, args_override_self = true)]
    Boot {
        #[command(flatten)]
        guest: GuestOptions,
        /// How address spaces are locked: one lock for each, or none in a fault and ranges in a call
        #[arg(long, value_name = "HOW", default_value = "speculative", hide_possible_values = false)]
        locking: boot::Locking,
        /// Waits for a debugger before the first instruction, and says how to attach one
        #[arg(long)]
        gdb: bool,
        /// Prints the counters in the end, as perf stat does
        #[arg(long)]
        stat: bool,
        /// Shows the kernel’s own notes
        #[arg(long)]
        verbose: bool,
        /// Writes a report as JSON (see docs/json.md); - is standard output, and the program’s goes to standard error
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
        /// A static ELF program for x86-64, or the name of one in programs/
        program: PathBuf,
        /// What it is called with
        #[arg(value_name = "ARG", trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Runs a Linux program on the host, on Terrane’s kernel, and on Linux kernels in the same emulator
    #[command(after_help = AFTER_COMPARE, args_override_self = true)]
    Compare {
        #[command(flatten)]
        guest: GuestOptions,
        /// Also on this Linux kernel (a bzImage), in the same emulator; may be repeated
        #[arg(long, value_name = "KERNEL")]
        linux: Vec<PathBuf>,
        /// Runs of each; the table shows their medians
        #[arg(long, value_name = "R", default_value = "1", allow_negative_numbers = true, value_parser = clap::value_parser!(u16).range(1..=1000))]
        runs: u16,
        /// Does not run it on the host
        #[arg(long)]
        no_host: bool,
        /// Writes a report as JSON (see docs/json.md); - is standard output, and the table then goes to standard error
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
        /// A static ELF program for x86-64, or the name of one in programs/
        program: PathBuf,
        /// What it is called with
        #[arg(value_name = "ARG", trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Lists what can be measured, and which source each repeats
    List,
    /// Serves as the helper of the referee
    #[command(name = referee::COMMAND, hide = true)]
    RefereeHelper {
        /// What the referee says
        #[arg(allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Serves one measurement of the kernel, for the other commands
    #[command(name = linux::COMMAND, hide = true)]
    LinuxProbe {
        /// What to measure
        probe: String,
    },
}

/// The guest's machine.
#[derive(Args)]
struct GuestOptions {
    /// Processors of the guest
    #[arg(long, value_name = "N", default_value = "2", allow_negative_numbers = true, value_parser = clap::value_parser!(u16).range(1..=64))]
    cpus: u16,
    /// Memory of the guest, with K, M or G
    #[arg(long, value_name = "SIZE", default_value = "1G", allow_negative_numbers = true, value_parser = boot::bytes)]
    memory: u64,
    /// Puts a file or a folder into the guest; may be repeated
    #[arg(long = "file", value_name = "HOST=GUEST", value_parser = boot::given)]
    files: Vec<boot::Given>,
    /// Sets a variable of the program’s environment; may be repeated
    #[arg(long, value_name = "NAME=VALUE", value_parser = boot::variable)]
    env: Vec<String>,
    /// Ends the guest after this time [default: none]
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = long)]
    timeout: Option<f64>,
    /// What runs the guest’s instructions
    #[arg(long, value_name = "WHAT", default_value = "auto")]
    accel: boot::Choice,
    /// Terrane’s kernel [default: that of this checkout, built if need be, or the one beside this command]
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
    /// Adds a word to the kernel’s command line, like swap=64M; may be repeated
    #[arg(long = "append", value_name = "WORD")]
    words: Vec<String>,
}

impl From<GuestOptions> for boot::Wanted {
    fn from(options: GuestOptions) -> Self {
        let GuestOptions { cpus, memory, files, env, timeout, accel, kernel, words } = options;
        Self { cpus, memory, accel, files, env, timeout: timeout.map(Duration::from_secs_f64), kernel, words }
    }
}

#[derive(Args)]
struct Selection {
    /// What to measure; everything if none is named
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Threads that work together, where several do [default: one a processor, at least 2]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Seconds that each variant is measured for, all its runs together [default: set by each experiment]
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = seconds)]
    seconds: Option<f64>,
    /// Samples taken of each variant; the table shows their median, min and max [default: set by each experiment]
    #[arg(long, value_name = "R", allow_negative_numbers = true, value_parser = clap::value_parser!(u16).range(1..=1000))]
    runs: Option<u16>,
    /// Writes a report as JSON (see docs/json.md); - is standard output, and tables then go to standard error
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draws a picture of each experiment into this folder, as SVG
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
}

/// What a stress is, and what comes out.
const AFTER_SOAK: &str = "\
Every thread owns runs of pages between those of the others and knows what each of their bytes must be: it stores, loads, maps,
unmaps, protects, forgets, populates, advises, moves the break, writes files back, lists, forks and plays on in the child. Beside
that, spaces fork from each other in a tree. Machines with much memory and with too little, shaken ones, and both ways of locking
take turns; where memory is short, calls may fail, but no byte may be lost. In the end the file on disk, the sums of shared
counters and the use of frames are checked too.

What is printed when something is wrong: the circumstances, the thread, what was expected and what was there, and the thread's last
operations. A thread that ends no operation for a minute counts as wrong.

Examples:
  terrane soak --seconds 600 --seed 7
  terrane soak --threads 8 --memory 8 --json -
  terrane soak --pressure --seconds 60

Exit status: 0 every byte was right, 1 something is wrong, 2 wrong arguments, too little memory, a file that cannot be written.";

/// What the referee does, and what comes out.
const AFTER_REFEREE: &str = "\
A helper process prepares a window of its address space, and Terrane has a space with the same window. The same operations run on both:
mmap and its relatives, loads, stores, files that grow and shrink, forks. After each, both must agree: on the result or errno, on
bytes or the signal, on the listing of the window, and on the pages that are there.

What is printed when they differ: a script, shrunk to what matters, which --replay carries out again; and the difference.

Examples:
  terrane referee --operations 1000000 --seed 7
  terrane referee --replay difference.script

Exit status: 0 no difference, 1 there is one, 2 wrong arguments, a kernel that cannot be asked, a file that cannot be written.";

/// What a guest is, and what comes out.
const AFTER_BOOT: &str = "\
The program is any static Linux program for x86-64: build one with gcc -static or musl-gcc -static. It starts in a machine of its
own, as the first process of Terrane’s kernel, with the files that it is given and nothing else: it lies in /bin, /tmp and /dev/shm
are there to write to. Its standard streams are those of the command. The emulator is qemu-system-x86_64.

Examples:
  gcc -O2 -static -pthread hello.c -o hello
  terrane boot ./hello world                                 as if it were ./hello world
  terrane boot --cpus 4 --memory 2G --stat ./hello           four processors; how many faults it had
  terrane boot --locking classic --stat ./hello              the same under the lock of old
  terrane boot --file data.txt=/tmp/data.txt ./cat /tmp/data.txt
  terrane boot --gdb ./hello                                 look at the kernel while it runs

Exit status: that of the program; 128 and the number of the signal that killed it; 2 wrong arguments, no emulator, a program that a
guest cannot run, too little memory; 124 it took longer than --timeout; 125 the kernel panicked or the emulator ended early.";

/// What is compared, and what comes out.
const AFTER_COMPARE: &str = "\
Standard output and exit status must be the same everywhere. Lines NAME VALUE UNIT on standard error are figures, and become the
table; times (ns, us, ms, s) should be low and rates (…/s) high. The programs of the repository’s folder programs/ are made of
their sources by name: multi-fault, map-unmap, faults, gaps, split-merge, populate, heap, ebizzy, processes, startup; -h behind
the name says what each does.

A Linux kernel runs in the same emulator with the same processors and memory, from a file system of the program and a first process
that is made here. Debian’s packages hold such images: apt-get download linux-image-cloud-amd64 says the name of the newest, and
dpkg-deb -x PACKAGE.deb FOLDER unpacks FOLDER/boot/vmlinuz-….

Examples:
  terrane compare multi-fault -t 2
  terrane compare --cpus 2 --linux vmlinuz-6.1 --linux vmlinuz-6.12 map-unmap
  terrane compare --runs 5 --json report.json ./hello

Exit status: 0 all agree, 1 outputs differ, 2 wrong arguments, no emulator, a program that a guest cannot run, too little memory;
124 a run took longer than --timeout [600 s unless told]; 125 a kernel panicked or the emulator ended early.";

/// A number of seconds for something that may go on for days.
fn long(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=1e7).contains(&seconds) => Ok(seconds),
        _ => Err("it is a number from 0.1 to 10000000".to_owned()),
    }
}

/// A sensible number of seconds.
fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.001..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("it is a number from 0.001 to 3600".to_owned()),
    }
}

fn after_help() -> String {
    "Examples:
  terrane list                                   what there is
  terrane experiments                            all experiments, within two minutes
  terrane experiments multi-fault --threads 4    one of them, with four threads
  terrane bench index --json - > index.json      a report for programs to read
  terrane bench --plot pictures                  a picture of each
  terrane soak --seconds 60                      stress it, and check every byte
  terrane referee                                compare it with the running kernel, call by call
  terrane boot ./hello                           run a static Linux program on Terrane’s kernel
  terrane compare multi-fault                    run one on the host and there, and compare

Exit status: 0 done, 1 a measurement broke off, 2 wrong arguments, too little memory, a file that cannot be written."
        .to_owned()
}

fn after_help_of(command: &str, all: &[&Experiment]) -> String {
    let mut text = String::from("Names:\n");
    text.push_str(&list::lines(all, false));
    let example = all.first().map_or("", |experiment| experiment.id);
    let _ = write!(
        text,
        "
What the columns mean:
  threads    how many do it together; times are for each, rates for all
  median     of the samples, one a run; min and max are the extremes
  here       a ratio within each round of samples, then the median
  published  the source's figure, on the source's own machine
  counters   as in /proc/vmstat, summed over all samples

Examples:
  terrane {command} {example} --seconds 5 --runs 21      steadier figures
  terrane {command} --json report.json --plot pictures"
    );
    text
}

/// Does what the command line says; the exit status.
///
/// # Errors
/// [`Failure::Request`] for a command line that makes no sense; else those of the command.
pub fn run() -> Result<u8, Failure> {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return explain(&error).map(|()| 0),
    };
    match cli.command {
        Command::Boot { guest, locking, gdb, stat, verbose, json, program, arguments } => {
            let wanted = guest.into();
            boot::run(&boot::Request { wanted, locking, gdb, stat, verbose, json, program, arguments })
        }
        Command::Compare { guest, linux, runs, no_host, json, program, arguments } => {
            let (wanted, runs) = (guest.into(), usize::from(runs));
            compare::run(&compare::Request {
                wanted,
                linux,
                runs,
                native: !no_host,
                json,
                program,
                arguments,
            })
            .map(|()| 0)
        }
        command => carry_out(command).map(|()| 0),
    }
}

/// Does what has no exit status of its own.
fn carry_out(command: Command) -> Result<(), Failure> {
    match command {
        Command::Boot { .. } | Command::Compare { .. } => Ok(()),
        Command::Experiments { selection, files } => {
            measure("experiments", experiments::ALL, selection, files.map(usize::from))
        }
        Command::Bench(selection) => measure("bench", bench::ALL, selection, None),
        Command::Soak { seconds, seed, threads, memory, pressure, episode, json, plant } => {
            soak::run(&soak::Request {
                seconds,
                seed,
                threads: threads.map(usize::from),
                memory: memory.map(u64::from),
                pressure,
                episode,
                json,
                plant,
            })
        }
        Command::Referee { seed, operations, each, threads, replay, json, plant } => {
            referee::run(&referee::Request {
                seed,
                operations,
                each: each.min(operations),
                threads: threads.map_or_else(|| processors().len().max(1), usize::from),
                replay,
                json,
                plant,
            })
        }
        Command::RefereeHelper { arguments } => referee::serve(&arguments),
        Command::List => list::run(),
        Command::LinuxProbe { probe } => linux::serve(&probe),
    }
}

fn measure(
    command: &'static str,
    all: &[&'static Experiment],
    selection: Selection,
    files: Option<usize>,
) -> Result<(), Failure> {
    measure::run(&measure::Request {
        command,
        selected: select(command, all, &selection.names)?,
        threads: selection.threads.map(usize::from),
        files,
        seconds: selection.seconds,
        runs: selection.runs.map(usize::from),
        json: selection.json,
        plot: selection.plot,
    })
}

/// Those of `all` that are named, in the order named and once each; all of them if `names` is empty.
fn select(
    command: &str,
    all: &[&'static Experiment],
    names: &[String],
) -> Result<Vec<&'static Experiment>, Failure> {
    if names.is_empty() {
        return Ok(all.to_vec());
    }
    let mut selected: Vec<&'static Experiment> = Vec::new();
    for name in names {
        let Some(&experiment) = all.iter().find(|experiment| experiment.id == name) else {
            let known = all.iter().map(|experiment| experiment.id).collect::<Vec<_>>().join(", ");
            return Err(Failure::Request(format!(
                "‘{name}’ is unknown to ‘terrane {command}’, which has {known} (see ‘terrane list’)"
            )));
        };
        if !selected.iter().any(|chosen| chosen.id == experiment.id) {
            selected.push(experiment);
        }
    }
    Ok(selected)
}

/// Help and version go to standard output and are no failure; everything else becomes one line.
fn explain(error: &clap::Error) -> Result<(), Failure> {
    let text = error.render().to_string();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            std::io::stdout().write_all(text.as_bytes()).map_err(|e| Failure::output("standard output", &e))
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand => {
            Err(Failure::Request(
                "a command is missing: experiments, bench, soak, referee, boot, compare or list (see ‘terrane --help’)"
                    .to_owned(),
            ))
        }
        // What clap says first is what is wrong; its tips and usage follow after blank lines.
        _ => {
            let what = text.split("\n\n").next().unwrap_or_default();
            let what = one_line(what.strip_prefix("error: ").unwrap_or(what));
            Err(Failure::Request(format!("{what} (see ‘terrane --help’)")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn names_select() {
        let ids = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
            select("bench", bench::ALL, &names).map(|chosen| chosen.iter().map(|e| e.id).collect::<Vec<_>>())
        };
        assert_eq!(ids(&["map", "index", "map"]).unwrap(), ["map", "index"]);
        assert_eq!(ids(&[]).unwrap().len(), bench::ALL.len());
        assert!(matches!(ids(&["nothing"]), Err(Failure::Request(text)) if text.contains("index, fault")));
    }

    #[test]
    fn seconds_are_sensible() {
        assert_eq!(seconds("0.5"), Ok(0.5));
        for text in ["0", "-1", "nan", "inf", "1e9", "x"] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }
}
