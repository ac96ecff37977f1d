//! The kernel that the command runs on, measured by its own system calls.
//!
//! Some of this would disturb the command itself: sixty thousand mappings, a heap that moves, a fork of a process
//! that holds gigabytes for another experiment. So every [`Probe`] is measured in a fresh process, which is this
//! same program called with a hidden command. The process stays for all samples of its case and waits in between;
//! it reads the length of a sample, and where its threads have moved to, as a line on its standard input, answers with a line of JSON, and ends when its
//! input does, so it cannot outlive the command.

mod calls;
mod faults;
mod files;
mod forks;
mod memory;
mod scale;

pub use files::{LENGTH as FILE_LENGTH, cached_file};
pub use scale::{AREA, CALLS, FORKED, POPULATED, Shape, TOUCHED, Work, sparse_file};

use crate::failure::Failure;
use crate::measure::plan::Runner;
use crate::measure::{Case, Sample, host, threads};
use crate::report::{Counters, Role};
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

/// The hidden command that serves a probe.
pub const COMMAND: &str = "linux-probe";

/// One thing that is measured of Linux.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Probe {
    /// First touch of anonymous pages: nanoseconds a page and thread. With `churn`, beside a thread that maps and
    /// unmaps a page all the while; a second value is then the nanoseconds of its mmap and munmap together.
    FirstTouch {
        /// Threads that fault.
        threads: usize,
        /// Whether another thread maps and unmaps.
        churn: bool,
    },
    /// First touch of anonymous pages by reads: nanoseconds a page.
    FirstRead,
    /// The experiment of source A: faults a second of all threads together.
    MultiFault {
        /// Threads that fault.
        threads: usize,
        /// In mappings of their own, rather than parts of one.
        separate: bool,
        /// Whether another thread maps and unmaps.
        churn: bool,
    },
    /// `MADV_POPULATE_READ` or `_WRITE` of anonymous memory: nanoseconds a page.
    Populate {
        /// For writing.
        write: bool,
    },
    /// mmap and munmap of one page that nobody touches, among this many other mappings: nanoseconds for both.
    MapUnmap {
        /// Other mappings.
        mappings: usize,
    },
    /// Two mprotect calls: nanoseconds for both.
    Protect {
        /// They split a mapping in the middle and merge it again; else they change one that stands alone.
        split: bool,
    },
    /// Two brk calls that grow and shrink the heap: nanoseconds for both.
    Brk,
    /// A read of every page of a cached file: nanoseconds a page.
    File {
        /// How the pages get mapped.
        how: Fill,
        /// Threads, each with a file of its own.
        threads: usize,
    },
    /// fork with so much memory touched, in microseconds; a second value is until the child has exited as well.
    Fork {
        /// MiB touched.
        mib: usize,
    },
    /// The same with this many mappings of a page, all touched.
    ForkMappings {
        /// Mappings.
        mappings: usize,
    },
    /// The first write to a page after fork, while both processes have it: nanoseconds a page.
    CopyOnWrite,
    /// Threads that do the same, each for itself: a rate of all together.
    Scale {
        /// What they do.
        work: Work,
        /// How many they are.
        threads: usize,
        /// Whether another one maps and unmaps.
        churn: bool,
    },
    /// mmap and munmap of a page among this many other mappings: nanoseconds for both.
    Listing {
        /// Other mappings.
        mappings: usize,
        /// Beside a thread that reads the list of mappings all the while.
        read: bool,
    },
}

/// A way to map the pages of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fill {
    /// Touch one after the other; the kernel maps cached neighbours with each fault.
    Touch,
    /// `MADV_POPULATE_READ`.
    Populate,
    /// `MAP_POPULATE`.
    MapPopulate,
}

/// What the probe's process answers.
#[derive(Debug, Serialize, Deserialize)]
enum Reply {
    /// Ready, or a sample.
    Values(Vec<f64>, Counters),
    /// This kernel cannot do it.
    Unsupported(String),
    /// It went wrong.
    Broken(String),
}

impl From<Failure> for Reply {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Unsupported(why) => Self::Unsupported(why),
            Failure::Broken(why) | Failure::Request(why) | Failure::Guest { message: why, .. } => {
                Self::Broken(why)
            }
            Failure::Closed => Self::Broken("the pipe is closed".into()),
        }
    }
}

impl Probe {
    /// The threads that a row of this probe is about.
    fn threads(&self) -> usize {
        match *self {
            Self::FirstTouch { threads, .. }
            | Self::MultiFault { threads, .. }
            | Self::File { threads, .. }
            | Self::Scale { threads, .. } => threads,
            _ => 1,
        }
    }

    /// A case of a plan that measures this probe.
    pub fn case<'a>(self, metric: impl Into<String>, unit: &'static str) -> Case<'a> {
        self.case_named(host::kernel(), metric, unit)
    }

    /// The same, for a row that must say more than `Linux`.
    pub fn case_named<'a>(self, variant: String, metric: impl Into<String>, unit: &'static str) -> Case<'a> {
        let threads = self.threads();
        Case::new(Role::Linux, variant, threads, metric, unit, move || {
            let mut process = Process::start(&self)?;
            Ok(move |time| process.sample(time))
        })
    }
}

/// A process that serves a probe.
struct Process {
    child: Child,
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
}

impl Process {
    /// Starts it and waits until it is ready.
    fn start(probe: &Probe) -> Result<Self, Failure> {
        let text = serde_json::to_string(probe).map_err(|e| Failure::Broken(e.to_string()))?;
        let mut child = Command::new("/proc/self/exe")
            .args([COMMAND, &text])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| Failure::broken("cannot start a process", e))?;
        let (to, from) = (child.stdin.take(), child.stdout.take());
        let from = from.ok_or_else(|| Failure::Broken("a process has no output".into()))?;
        let mut process = Self { child, to, from: BufReader::new(from) };
        process.reply()?;
        Ok(process)
    }

    /// Takes a sample of about `time`.
    fn sample(&mut self, time: Duration) -> Result<Sample, Failure> {
        let Some(to) = &mut self.to else { return Err(Failure::Closed) };
        let (by, of) = threads::turned();
        writeln!(to, "{} {by} {of}", time.as_nanos())
            .map_err(|e| Failure::broken("cannot ask the measuring process", e))?;
        self.reply()
    }

    fn reply(&mut self) -> Result<Sample, Failure> {
        let mut line = String::new();
        self.from
            .read_line(&mut line)
            .map_err(|e| Failure::broken("cannot hear the measuring process", e))?;
        match serde_json::from_str(&line) {
            Ok(Reply::Values(values, counters)) => Ok(Sample { values, counters }),
            Ok(Reply::Unsupported(why)) => Err(Failure::Unsupported(why)),
            Ok(Reply::Broken(why)) => Err(Failure::Broken(why)),
            Err(_) => Err(Failure::Broken("the measuring process ended without an answer".into())),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The end of its input is the end of the process.
        self.to = None;
        let _ = self.child.wait();
    }
}

/// Serves the probe that `text` describes: the whole life of the process.
///
/// # Errors
/// [`Failure::Request`] if `text` is no probe, or the pipes to the command that called break.
pub fn serve(text: &str) -> Result<(), Failure> {
    let probe: Probe = serde_json::from_str(text)
        .map_err(|_| Failure::Request(format!("{COMMAND} is called by other commands, not by hand")))?;
    let mut runner = match set_up(&probe) {
        Ok(runner) => runner,
        Err(failure) => return answer(&failure.into()),
    };
    answer(&Reply::Values(Vec::new(), Counters::default()))?;
    for line in io::stdin().lines() {
        let line = line.map_err(|_| Failure::Closed)?;
        let numbers: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
        let &[nanoseconds, by, of] = &numbers[..] else { return Err(Failure::Closed) };
        let before = memory::counters();
        let _turned = threads::turn(by as usize, of as usize);
        let reply = match runner(Duration::from_nanos(nanoseconds)) {
            Ok(mut sample) => {
                sample.counters.add(&memory::counted_since(&before));
                Reply::Values(sample.values, sample.counters)
            }
            Err(failure) => failure.into(),
        };
        answer(&reply)?;
    }
    Ok(())
}

fn answer(reply: &Reply) -> Result<(), Failure> {
    let text = serde_json::to_string(reply).map_err(|e| Failure::Broken(e.to_string()))?;
    let mut out = io::stdout().lock();
    writeln!(out, "{text}").and_then(|()| out.flush()).map_err(|e| Failure::output("the calling command", &e))
}

fn set_up(probe: &Probe) -> Result<Runner<'static>, Failure> {
    match *probe {
        Probe::FirstTouch { threads, churn } => faults::first_touch(threads, churn),
        Probe::FirstRead => faults::first_read(),
        Probe::MultiFault { threads, separate, churn } => faults::multi_fault(threads, separate, churn),
        Probe::Populate { write } => faults::populate(write),
        Probe::MapUnmap { mappings } => calls::map_unmap(mappings),
        Probe::Protect { split } => calls::protect(split),
        Probe::Brk => calls::brk(),
        Probe::File { how, threads } => files::fill(how, threads),
        Probe::Fork { mib } => forks::fork(mib),
        Probe::ForkMappings { mappings } => forks::fork_mappings(mappings),
        Probe::CopyOnWrite => forks::copy_on_write(),
        Probe::Scale { work, threads, churn } => scale::set_up(work, threads, churn),
        Probe::Listing { mappings, read } => scale::listing(mappings, read),
    }
}

/// True if this kernel has `MADV_POPULATE_READ` and `_WRITE` (Linux 5.14).
fn can_populate(result: rustix::io::Result<()>) -> Result<(), Failure> {
    match result {
        Err(rustix::io::Errno::INVAL) => {
            Err(Failure::Unsupported("this kernel has no MADV_POPULATE_READ and MADV_POPULATE_WRITE".into()))
        }
        other => other.map_err(|e| Failure::broken("cannot populate", e)),
    }
}

/// Where files for measurements are made: the folder for temporary files (`TMPDIR`).
fn folder() -> std::path::PathBuf {
    std::env::temp_dir()
}

/// How a failure to make such a file is told.
fn file_failure(folder: &Path, error: &io::Error) -> Failure {
    Failure::request(format_args!("cannot make files in {} (see TMPDIR)", folder.display()), error)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every probe, in this very process: the loops themselves.
    #[test]
    fn every_probe_gives_its_figures() {
        let scale = |work, threads, churn| (Probe::Scale { work, threads, churn }, 1);
        let shapes = Shape::ALL.into_iter().filter(|&shape| shape != Shape::Brk1);
        for (probe, values) in [
            (Probe::FirstTouch { threads: 1, churn: false }, 1),
            (Probe::FirstTouch { threads: 2, churn: true }, 2),
            (Probe::FirstRead, 1),
            (Probe::MultiFault { threads: 2, separate: true, churn: false }, 1),
            (Probe::MultiFault { threads: 1, separate: false, churn: true }, 1),
            (Probe::Populate { write: false }, 1),
            (Probe::Populate { write: true }, 1),
            (Probe::MapUnmap { mappings: 10 }, 1),
            (Probe::Protect { split: true }, 1),
            (Probe::Protect { split: false }, 1),
            (Probe::File { how: Fill::Touch, threads: 1 }, 1),
            (Probe::File { how: Fill::Populate, threads: 2 }, 1),
            (Probe::File { how: Fill::MapPopulate, threads: 1 }, 1),
            (Probe::Listing { mappings: 100, read: true }, 1),
            scale(Work::Fault { own: false }, 2, true),
            scale(Work::Fault { own: true }, 2, false),
            scale(Work::Map { touched: false }, 2, false),
            scale(Work::Map { touched: true }, 2, false),
            scale(Work::Protect { touched: false }, 2, false),
            scale(Work::Protect { touched: true }, 2, true),
            scale(Work::Populate, 2, false),
        ]
        .into_iter()
        .chain(shapes.map(|shape| scale(Work::Shape(shape, 4 << 20), 2, false)))
        {
            let sample = match set_up(&probe).and_then(|mut runner| runner(Duration::from_millis(2))) {
                Err(Failure::Unsupported(_)) => continue,
                sample => sample.unwrap(),
            };
            assert_eq!(sample.values.len(), values, "{probe:?}");
            // The kernel cannot map, unmap or fault in less than ten nanoseconds; a loop optimised away can.
            assert!(
                sample.values.iter().all(|&value| value > 10.0 && value.is_finite()),
                "{probe:?}: {sample:?}"
            );
        }
    }

    #[test]
    fn too_many_mappings_are_not_attempted() {
        assert!(matches!(
            set_up(&Probe::MapUnmap { mappings: usize::MAX / 2 }),
            Err(Failure::Unsupported(_))
        ));
    }

    #[test]
    fn nonsense_is_no_probe() {
        assert!(matches!(serve("{}"), Err(Failure::Request(_))));
    }
}
