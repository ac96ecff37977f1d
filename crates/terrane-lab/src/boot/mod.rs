//! `terrane boot`: runs a Linux program on Terrane's kernel, in an emulator.
//!
//! From the bottom: [`archive`] packs files for a guest; [`sources`] makes programs of C; [`program`] says whether a guest can run a program; [`fake`] is
//! a guest of a few instructions; [`events`] are what a guest reports; [`qemu`] starts a guest and carries its streams; [`kernel`] finds the kernel's image,
//! [`symbols`] names what is in it; [`stat`] shows counters. `terrane compare` stands on all of them.

pub mod archive;
pub mod events;
pub mod fake;
pub mod kernel;
pub mod program;
pub mod qemu;
pub mod sources;
pub mod stat;
pub mod symbols;

use crate::command::measure::command_line;
use crate::failure::Failure;
use crate::measure::host;
use crate::report::json::Sink;
use crate::report::{Machine, Ordered, SCHEMA};
use archive::Archive;
use events::{Event, signal_name};
use program::{Program, read_file};
use qemu::{Accel, End, Guest, Ran, Streams};
use serde::Serialize;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The exit status when the guest took too long.
const TOO_LONG: u8 = 124;
/// The exit status when the kernel or the emulator broke down.
const BROKEN: u8 = 125;

/// Which way of locking the guest's address spaces have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Locking {
    /// One lock for a whole space.
    Classic,
    /// None in a fault, ranges in a call.
    Speculative,
}

impl Locking {
    /// Its name on the kernel's command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Classic => "classic",
            Self::Speculative => "speculative",
        }
    }
}

/// What shall run the guest's instructions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Choice {
    /// KVM where it really runs guest code, else emulation
    Auto,
    /// The processor itself, through KVM
    Kvm,
    /// Multi-threaded emulation
    Tcg,
}

/// A file for the guest.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Given {
    /// Where it is here.
    pub host: PathBuf,
    /// Where it shall be there.
    pub guest: String,
}

/// The guest's machine, as the user asked for it.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Processors.
    pub cpus: u16,
    /// Memory in bytes.
    pub memory: u64,
    /// What runs its instructions.
    pub accel: Choice,
    /// Files and folders for it.
    pub files: Vec<Given>,
    /// The program's environment, besides the ordinary.
    pub env: Vec<String>,
    /// How long it may take.
    pub timeout: Option<Duration>,
    /// The kernel's image.
    pub kernel: Option<PathBuf>,
    /// More words for the kernel's command line.
    pub words: Vec<String>,
}

/// What the user asked for.
pub struct Request {
    /// The machine.
    pub wanted: Wanted,
    /// The way of locking.
    pub locking: Locking,
    /// Whether it waits for a debugger.
    pub gdb: bool,
    /// Whether counters are shown.
    pub stat: bool,
    /// Whether the kernel's notes are shown.
    pub verbose: bool,
    /// Where the JSON report goes.
    pub json: Option<PathBuf>,
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
}

/// The report.
#[derive(Serialize)]
struct Report {
    schema: u32,
    terrane: String,
    machine: Machine,
    command: String,
    boot: Boot,
}

/// What came of the guest.
#[derive(Serialize)]
struct Boot {
    program: String,
    arguments: Vec<String>,
    cpus: u16,
    memory: u64,
    accel: &'static str,
    locking: Locking,
    status: Option<u8>,
    signal: Option<u8>,
    ready_seconds: Option<f64>,
    seconds: Option<f64>,
    counters: Ordered<u64>,
    missing_calls: Vec<u32>,
    failure: Option<String>,
}

/// Bytes by a number with `K`, `M`, `G` or none.
///
/// # Errors
/// What is wrong with it.
pub fn bytes(text: &str) -> Result<u64, String> {
    let (number, shift) = match text.char_indices().last() {
        Some((at, 'k' | 'K')) => (&text[..at], 10),
        Some((at, 'm' | 'M')) => (&text[..at], 20),
        Some((at, 'g' | 'G')) => (&text[..at], 30),
        _ => (text, 0),
    };
    let number: u64 = number.parse().map_err(|_| "it is a number with K, M or G, like 512M".to_owned())?;
    match number.checked_mul(1 << shift) {
        Some(bytes) if (LEAST..=1 << 40).contains(&bytes) => Ok(bytes),
        Some(bytes) if bytes < LEAST => Err(format!("a guest needs {} at least", show(LEAST))),
        _ => Err("it is at most 1024G".to_owned()),
    }
}

/// The least memory of a guest: the first megabyte, the kernel with its tables, and a little for a program.
const LEAST: u64 = 32 << 20;

/// What a guest needs besides twice its files: they are there as the archive, and as files.
const BESIDE_FILES: u64 = 24 << 20;

/// Bytes as the command line has them.
fn show(bytes: u64) -> String {
    match bytes.div_ceil(1 << 20) {
        mega if mega % 1024 == 0 => format!("{}G", mega / 1024),
        mega => format!("{mega}M"),
    }
}

/// A `HOST=GUEST` of the command line.
///
/// # Errors
/// What is wrong with it.
pub fn given(text: &str) -> Result<Given, String> {
    let Some((host, guest)) = text.rsplit_once('=') else {
        return Err("it is HOST=GUEST, like data.txt=/tmp/data.txt".to_owned());
    };
    if host.is_empty() || !guest.starts_with('/') || guest.trim_matches('/').is_empty() {
        return Err("it is HOST=GUEST, and GUEST begins with /, like data.txt=/tmp/data.txt".to_owned());
    }
    if guest.split('/').any(|part| part == "..") {
        return Err("GUEST goes straight to its place, without ..".to_owned());
    }
    if guest == "/.terrane" || guest.starts_with("/.terrane/") {
        return Err("/.terrane is the command’s own".to_owned());
    }
    let guest: Vec<_> = guest.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    Ok(Given { host: host.into(), guest: format!("/{}", guest.join("/")) })
}

/// A `NAME=VALUE` of the command line.
///
/// # Errors
/// What is wrong with it.
pub fn variable(text: &str) -> Result<String, String> {
    match text.split_once('=') {
        Some((name, _)) if !name.is_empty() => Ok(text.to_owned()),
        _ => Err("it is NAME=VALUE".to_owned()),
    }
}

/// What the program finds in its environment, the later of two with one name.
pub fn environment(more: &[String]) -> Vec<String> {
    let mut all: Vec<String> = ["PATH=/bin:/usr/bin", "HOME=/", "TERM=dumb"].map(str::to_owned).into();
    for variable in more {
        let name = variable.split('=').next().unwrap_or_default();
        all.retain(|known| known.split('=').next() != Some(name));
        all.push(variable.clone());
    }
    all
}

/// Where the program is in the guest.
pub fn guest_path(program: &Program) -> String {
    format!("/bin/{}", program.name)
}

/// The archive of a guest: the program, its arguments and environment, and the files that it is given.
///
/// # Errors
/// [`Failure::Request`] for files that cannot be read, or are there twice.
pub fn pack(
    program: &Program,
    typed: &Path,
    arguments: &[String],
    wanted: &Wanted,
    more: impl FnOnce(&mut Archive<File>) -> io::Result<()>,
) -> Result<File, Failure> {
    let failed = |error: io::Error| Failure::request("cannot make the guest’s archive", &error);
    let mut archive = Archive::new(qemu::memory_file("archive", &[]).map_err(failed)?);
    more(&mut archive).map_err(failed)?;
    let put = |archive: &mut Archive<File>, path: &str, mode, bytes: &[u8]| {
        archive.file(path, mode, bytes).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => Failure::Request(format!("there are two files for {path}")),
            _ => failed(error),
        })
    };
    put(&mut archive, &guest_path(program), 0o755, &program.bytes)?;
    let typed = typed.to_string_lossy().into_owned();
    let argv: Vec<_> = std::iter::once(typed).chain(arguments.iter().cloned()).collect();
    for (name, strings) in [("argv", argv), ("envp", environment(&wanted.env))] {
        let text: String = strings.iter().flat_map(|string| [string.as_str(), "\0"]).collect();
        put(&mut archive, &format!("/.terrane/{name}"), 0o644, text.as_bytes())?;
    }
    for given in &wanted.files {
        copy_in(&mut archive, &given.host, &given.guest, &put)?;
    }
    let needed = (BESIDE_FILES + 2 * archive.written()).max(LEAST).next_multiple_of(1 << 20);
    if wanted.memory < needed {
        return Err(Failure::Request(format!(
            "{} is too little memory: the program and its files need {} at least (--memory)",
            show(wanted.memory),
            show(needed)
        )));
    }
    archive.finish().map_err(failed)
}

/// Puts a file, or a folder with all that is in it, into the archive.
fn copy_in(
    archive: &mut Archive<File>,
    host: &Path,
    guest: &str,
    put: &impl Fn(&mut Archive<File>, &str, u32, &[u8]) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let failed = |error| Failure::request(format_args!("cannot read {}", host.display()), &error);
    let kind = fs::metadata(host).map_err(failed)?;
    if !kind.is_dir() {
        return put(archive, guest, kind.permissions().mode() & 0o777, &read_file(host)?);
    }
    archive.folder(guest).map_err(failed)?;
    let mut names = fs::read_dir(host)
        .and_then(|entries| entries.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>())
        .map_err(failed)?;
    names.sort();
    for name in names {
        let to = format!("{guest}/{}", name.to_string_lossy());
        copy_in(archive, &host.join(&name), &to, put)?;
    }
    Ok(())
}

/// What shall run the guest's instructions here.
///
/// # Errors
/// [`Failure::Request`] if the user wants KVM and it does not work.
pub fn choose(qemu: &Path, choice: Choice) -> Result<Accel, Failure> {
    match choice {
        Choice::Tcg => Ok(Accel::Tcg),
        Choice::Auto if qemu::kvm_works(qemu) => Ok(Accel::Kvm),
        Choice::Auto => Ok(Accel::Tcg),
        Choice::Kvm if qemu::kvm_works(qemu) => Ok(Accel::Kvm),
        Choice::Kvm => Err(Failure::Request(
            "KVM does not run guest code here; leave out --accel, or say --accel tcg".to_owned(),
        )),
    }
}

/// The kernel's command line.
pub fn words(program: &Program, locking: Locking, stat: bool, more: &[String]) -> String {
    let mut words = format!("init={} locking={}", guest_path(program), locking.name());
    if stat {
        words.push_str(" stat=1");
    }
    for word in more {
        words.push(' ');
        words.push_str(word);
    }
    words
}

/// Runs the program; its exit status, or 128 and the number of the signal that killed it.
///
/// # Errors
/// [`Failure::Request`] for what cannot be carried out, [`Failure::Guest`] for a guest that does not come to its own end.
pub fn run(request: &Request) -> Result<u8, Failure> {
    let Request { wanted, program: typed, arguments, .. } = request;
    let program = Program::read(typed)?;
    let archive = pack(&program, typed, arguments, wanted, |_| Ok(()))?;
    let qemu = qemu::find()?;
    let kernel = kernel::find(wanted.kernel.as_deref())?;
    let accel = choose(&qemu, wanted.accel)?;
    let mut sink = request.json.as_deref().map(Sink::open).transpose()?;
    let words = words(&program, request.locking, request.stat || sink.is_some(), &wanted.words);
    if request.gdb {
        eprintln!(
            "terrane: the guest waits; in another terminal: gdb -ex 'target remote {}' {}",
            qemu::DEBUGGER,
            kernel.display()
        );
    }
    let mut out: Box<dyn Write + Send> = match &sink {
        Some(sink) if sink.is_stdout() => Box::new(io::stderr()),
        _ => Box::new(io::stdout()),
    };
    let verbose = request.verbose;
    let mut event = move |event: &Event| tell(event, verbose);
    let guest = Guest {
        qemu: &qemu,
        accel,
        cpus: wanted.cpus,
        memory: wanted.memory,
        kernel: &kernel,
        archive: Some(&archive),
        words: &words,
        gdb: request.gdb,
    };
    let streams = Streams { input: true, out: &mut out, err: &mut io::stderr(), event: &mut event };
    let ran = qemu::run(&guest, streams, wanted.timeout)?;
    if request.stat {
        let line = std::iter::once(program.name.as_str()).chain(arguments.iter().map(String::as_str));
        eprint!("{}", stat::text(&line.collect::<Vec<_>>().join(" "), &ran.stats, ran.took));
    }
    let result = outcome(&ran, &kernel, wanted.timeout);
    if let Some(sink) = &mut sink {
        let mut counters = Ordered::default();
        ran.stats.iter().for_each(|(name, value)| *counters.entry(name) = *value);
        sink.write(&Report {
            schema: SCHEMA,
            terrane: env!("CARGO_PKG_VERSION").to_owned(),
            machine: host::describe(),
            command: command_line(),
            boot: Boot {
                program: program.path.display().to_string(),
                arguments: arguments.clone(),
                cpus: wanted.cpus,
                memory: wanted.memory,
                accel: accel.name(),
                locking: request.locking,
                status: if let End::Exit(status) = ran.end { Some(status) } else { None },
                signal: if let End::Signal(number) = ran.end { Some(number) } else { None },
                ready_seconds: ran.ready.map(|time| time.as_secs_f64()),
                seconds: ran.took.map(|time| time.as_secs_f64()),
                counters,
                missing_calls: ran.missing.iter().map(|&(number, _)| number).collect(),
                failure: match &result {
                    Err(Failure::Guest { message, .. }) => Some(message.clone()),
                    _ => None,
                },
            },
        })?;
    }
    if result.is_ok() && ran.ready.is_none() && !request.verbose {
        // The program did not even start: the kernel has said why.
        ran.notes.iter().for_each(|note| eprintln!("kernel: {note}"));
    }
    if let (Ok(_), End::Signal(number)) = (&result, &ran.end) {
        eprintln!("terrane: {} was killed by signal {number} ({})", program.name, signal_name(*number));
    }
    result
}

/// Says what the user must know at once.
fn tell(event: &Event, verbose: bool) {
    match event {
        Event::MissingCall(number, name) => {
            let space = if name.is_empty() { "" } else { " " };
            eprintln!("terrane: system call {number}{space}{name} is not there (ENOSYS)");
        }
        Event::Log(text) | Event::Note(text) if verbose => eprintln!("kernel: {text}"),
        Event::Ready(Some(time)) if verbose => {
            eprintln!("kernel: ready after {:.3} s", *time as f64 / 1e9);
        }
        _ => {}
    }
}

/// The exit status for how a guest ended.
///
/// # Errors
/// [`Failure::Guest`] for one that did not come to its own end; what led to it goes to standard error before.
pub fn outcome(ran: &Ran, kernel: &Path, timeout: Option<Duration>) -> Result<u8, Failure> {
    let last_notes = || ran.notes.iter().for_each(|note| eprintln!("kernel: {note}"));
    match &ran.end {
        End::Exit(status) => Ok(*status),
        End::Signal(number) => Ok(128 + *number),
        End::Panic(why, _) if why.contains("too little memory") => {
            Err(Failure::Request("that is too little memory for the kernel (--memory)".to_owned()))
        }
        End::Panic(why, frames) => {
            last_notes();
            eprint!("{}", symbols::backtrace(kernel, frames));
            Err(Failure::Guest { message: format!("the kernel panicked: {why}"), status: BROKEN })
        }
        End::Timeout => {
            let seconds = timeout.unwrap_or_default().as_secs_f64();
            Err(Failure::Guest { message: format!("ended after {seconds} s (--timeout)"), status: TOO_LONG })
        }
        End::Broken(said) if said.contains("Cannot allocate memory") || said.contains("guest memory") => {
            Err(Failure::Request(format!("this machine has too little memory for the guest: {said}")))
        }
        End::Broken(said) => {
            last_notes();
            let panic = ran.notes.iter().find(|note| note.contains("Kernel panic"));
            let why = match panic {
                Some(panic) => panic,
                None if said.is_empty() => "the guest ended without a word",
                None => said,
            };
            Err(Failure::Guest { message: format!("the emulator ended early: {why}"), status: BROKEN })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_has_units() {
        assert_eq!(bytes("1G"), Ok(1 << 30));
        assert_eq!(bytes("64m"), Ok(64 << 20));
        assert_eq!(bytes("65536K"), Ok(64 << 20));
        assert_eq!(bytes("67108864"), Ok(64 << 20));
        for text in ["", "G", "x", "-1G", "1", "31M", "99999999999G", "2048G", "1.5G"] {
            assert!(bytes(text).is_err(), "{text}");
        }
        assert_eq!((show(1 << 30), show(100 << 20)), ("1G".to_owned(), "100M".to_owned()));
    }

    #[test]
    fn files_go_to_whole_paths() {
        let ok = |text: &str| given(text).map(|given| (given.host.display().to_string(), given.guest));
        assert_eq!(ok("a=/b"), Ok(("a".into(), "/b".into())));
        assert_eq!(ok("a=b=/c//./d/"), Ok(("a=b".into(), "/c/d".into())));
        for text in ["a", "=/b", "a=", "a=b", "a=/", "a=/b/../c", "a=/.terrane/argv", "a=/.terrane"] {
            assert!(given(text).is_err(), "{text}");
        }
    }

    #[test]
    fn variables_replace() {
        let environment = environment(&["A=1".into(), "HOME=/x".into(), "A=2".into()]);
        assert_eq!(environment, ["PATH=/bin:/usr/bin", "TERM=dumb", "HOME=/x", "A=2"]);
        assert!(variable("A=").is_ok() && variable("=b").is_err() && variable("A").is_err());
    }

    #[test]
    fn an_archive_has_everything_and_nothing_twice() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("sub")).unwrap();
        fs::write(folder.path().join("sub/file"), "inside").unwrap();
        let program = Program { name: "p".into(), path: "x/p".into(), bytes: fake::guest(&[]) };
        let mut wanted = Wanted {
            cpus: 1,
            memory: 64 << 20,
            accel: Choice::Auto,
            files: vec![Given { host: folder.path().into(), guest: "/data".into() }],
            env: vec![],
            timeout: None,
            kernel: None,
            words: vec![],
        };
        let packed = |wanted: &Wanted| {
            pack(&program, Path::new("x/p"), &["-a".into(), "b c".into()], wanted, |_| Ok(()))
        };
        let mut bytes = Vec::new();
        let mut file = packed(&wanted).unwrap();
        io::Seek::rewind(&mut file).unwrap();
        io::Read::read_to_end(&mut file, &mut bytes).unwrap();
        let has = |text: &str| bytes.windows(text.len()).any(|window| window == text.as_bytes());
        assert!(has("data/sub/file\0") && has("inside") && has("bin/p\0"));
        assert!(has("x/p\0-a\0b c\0") && has("HOME=/\0"));
        wanted.files.push(Given { host: folder.path().join("sub/file"), guest: "/bin/p".into() });
        let refused = |wanted: &Wanted| match packed(wanted) {
            Err(Failure::Request(text)) => text,
            _ => panic!("it should be refused"),
        };
        assert!(refused(&wanted).contains("two files for /bin/p"));
        wanted.files.clear();
        fs::write(folder.path().join("big"), vec![0; 40 << 20]).unwrap();
        wanted.files.push(Given { host: folder.path().join("big"), guest: "/big".into() });
        assert!(refused(&wanted).contains("64M is too little memory"));
    }
}
