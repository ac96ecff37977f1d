//! The emulator: finds it, starts a guest in it, carries its streams, and says how it ended.
//!
//! The guest has three serial ports: the first is the program's standard input and output, the third its standard error, the
//! second the kernel's report (see [`Event`]). Each is one end of a pair of sockets that QEMU inherits, and the archive is
//! memory that it inherits, so nothing is left behind however this ends. QEMU dies with the thread that started it.

use super::events::Event;
use super::fake;
use crate::failure::{Failure, one_line};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Signal, set_parent_process_death_signal};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// The emulator's name.
const QEMU: &str = "qemu-system-x86_64";
/// Where a debugger reaches the guest.
pub const DEBUGGER: &str = "localhost:1234";

/// What runs the guest's instructions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Accel {
    /// The processor itself.
    Kvm,
    /// The emulator, with a thread for each of the guest's processors.
    Tcg,
}

impl Accel {
    /// Its name on QEMU's command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }
}

/// A guest to start.
pub struct Guest<'a> {
    /// The emulator.
    pub qemu: &'a Path,
    /// What runs its instructions.
    pub accel: Accel,
    /// How many processors it has.
    pub cpus: u16,
    /// Its memory in bytes.
    pub memory: u64,
    /// The kernel's image.
    pub kernel: &'a Path,
    /// Its files.
    pub archive: Option<&'a File>,
    /// The kernel's command line.
    pub words: &'a str,
    /// Whether it waits for a debugger.
    pub gdb: bool,
}

/// Where a guest's streams come from and go to.
pub struct Streams<'a> {
    /// True if our standard input is the program's; else it has none.
    pub input: bool,
    /// The program's standard output.
    pub out: &'a mut (dyn Write + Send),
    /// The program's standard error.
    pub err: &'a mut (dyn Write + Send),
    /// Called for each line of the report as it comes.
    pub event: &'a mut (dyn FnMut(&Event) + Send),
}

/// How a guest ended.
#[derive(Debug)]
pub enum End {
    /// The program ended by itself.
    Exit(u8),
    /// A signal ended the program.
    Signal(u8),
    /// The kernel gave up, for this reason; the addresses of the calls, innermost first, and what it says of them.
    Panic(String, Vec<(u64, String)>),
    /// It took too long.
    Timeout,
    /// The emulator ended without a word from the kernel; what it said instead.
    Broken(String),
}

/// What came of a guest.
#[derive(Debug)]
pub struct Ran {
    /// How it ended.
    pub end: End,
    /// From the kernel's start to the program's first instruction, by the kernel's clock.
    pub ready: Option<Duration>,
    /// From the program's first instruction to its end, by ours.
    pub took: Option<Duration>,
    /// Counters, in order.
    pub stats: Vec<(String, u64)>,
    /// System calls that are not there.
    pub missing: Vec<(u32, String)>,
    /// The last lines of the kernel's own notes.
    pub notes: Vec<String>,
}

/// Notes that are kept for the case that something goes wrong.
const NOTES: usize = 40;

/// Finds the emulator.
///
/// # Errors
/// [`Failure::Request`] if there is none.
pub fn find() -> Result<PathBuf, Failure> {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&folders).map(|folder| folder.join(QEMU)).find(|path| path.is_file()).ok_or_else(
        || {
            Failure::Request(format!(
                "{QEMU} is not installed (Debian and Ubuntu: apt-get install qemu-system-x86)"
            ))
        },
    )
}

/// True if KVM really runs a guest's instructions here: there are machines where it opens and does not.
pub fn kvm_works(qemu: &Path) -> bool {
    let usable = |path| File::options().read(true).write(true).open(path).is_ok();
    usable("/dev/kvm") && runs(qemu, Accel::Kvm)
}

/// True if a guest of a few instructions comes to its end.
pub fn runs(qemu: &Path, accel: Accel) -> bool {
    let Ok(kernel) = memory_file("kernel", &fake::guest(&[(fake::END_PORT, &[fake::END])])) else {
        return false;
    };
    let mut command = command(qemu, accel, 1, 32 << 20);
    command.args(["-kernel", &inherited(&kernel)]).stdin(Stdio::null()).stdout(Stdio::null());
    command.stderr(Stdio::null());
    let Ok(mut child) = spawn(command, &[kernel.as_fd()]) else { return false };
    let status = wait(&mut child, Duration::from_secs(5));
    status.is_some_and(|status| status == fake::END_STATUS)
}

/// The exit status of `child`, if it ends within `time`; it does not live longer.
fn wait(child: &mut Child, time: Duration) -> Option<i32> {
    let start = Instant::now();
    while start.elapsed() < time {
        match child.try_wait() {
            Ok(Some(status)) => return status.code(),
            Ok(None) => thread::sleep(Duration::from_millis(5)),
            Err(_) => break,
        }
    }
    let _ = child.kill();
    let _ = child.wait();
    None
}

/// A file in memory that holds `bytes`.
///
/// # Errors
/// Those of the system calls.
pub fn memory_file(name: &str, bytes: &[u8]) -> io::Result<File> {
    let mut file = File::from(memfd_create(name, MemfdFlags::CLOEXEC)?);
    file.write_all(bytes)?;
    Ok(file)
}

/// The name of a file that a child inherits.
fn inherited(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// A command line without anything that a guest sees but its processors, its memory and the port that ends it.
fn command(qemu: &Path, accel: Accel, cpus: u16, memory: u64) -> Command {
    let mut command = Command::new(qemu);
    command.args(["-nodefaults", "-no-user-config", "-machine", "pc", "-display", "none", "-no-reboot"]);
    command.args(["-device", &format!("isa-debug-exit,iobase={:#x},iosize=4", fake::END_PORT)]);
    command.args(["-smp", &cpus.to_string(), "-m", &format!("size={}K", memory >> 10)]);
    command.args(match accel {
        Accel::Kvm => ["-accel", "kvm", "-cpu", "host"],
        Accel::Tcg => ["-accel", "tcg,thread=multi", "-cpu", "max"],
    });
    command
}

/// Starts `command`, which inherits `files` under the numbers they have here, and dies with this thread.
fn spawn(mut command: Command, files: &[BorrowedFd<'_>]) -> io::Result<Child> {
    let numbers: Vec<_> = files.iter().map(AsRawFd::as_raw_fd).collect();
    // SAFETY: between fork and exec only system calls are made. The numbers are those of open files: `files` outlives the
    // start, and the closure goes with `command`, which is not started again.
    unsafe {
        command.pre_exec(move || {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            for &number in &numbers {
                fcntl_setfd(BorrowedFd::borrow_raw(number), FdFlags::empty())?;
            }
            Ok(())
        });
    }
    command.spawn()
}

/// What the threads that carry streams tell.
enum Told {
    /// The report is at its end: QEMU is ending.
    Over,
    /// Nobody takes what the program writes.
    Closed(io::Error),
}

/// Runs `guest` to its end, or for `timeout`.
///
/// # Errors
/// [`Failure::Request`] if it cannot be started, [`Failure::Closed`] and [`Failure::Request`] if its output cannot be written.
pub fn run(guest: &Guest<'_>, streams: Streams<'_>, timeout: Option<Duration>) -> Result<Ran, Failure> {
    let pair = || UnixStream::pair().map_err(|error| Failure::request("cannot make a socket", &error));
    let ports = [pair()?, pair()?, pair()?];
    let mut command = command(guest.qemu, guest.accel, guest.cpus, guest.memory);
    command.arg("-kernel").arg(guest.kernel).args(["-append", guest.words]);
    if let Some(archive) = guest.archive {
        command.args(["-initrd", &inherited(archive)]);
    }
    if guest.gdb {
        command.args(["-S", "-gdb", &format!("tcp:{DEBUGGER}")]);
    }
    for (number, (_, theirs)) in ports.iter().enumerate() {
        command.args(["-chardev", &format!("socket,id=port{number},fd={}", theirs.as_raw_fd())]);
        command.args(["-serial", &format!("chardev:port{number}")]);
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut files: Vec<BorrowedFd<'_>> = ports.iter().map(|(_, theirs)| theirs.as_fd()).collect();
    files.extend(guest.archive.map(AsFd::as_fd));
    let mut child = spawn(command, &files)
        .map_err(|error| Failure::request(format_args!("cannot start {}", guest.qemu.display()), &error))?;
    // Their ends are closed here, so that ours see the end of the emulator.
    let ours = ports.map(|(ours, _)| ours);
    let ran = carry(&mut child, ours, streams, timeout);
    let _ = child.kill();
    let _ = child.wait();
    ran
}

/// Carries the streams until the guest ends.
fn carry(
    child: &mut Child,
    [out, report, err]: [UnixStream; 3],
    streams: Streams<'_>,
    timeout: Option<Duration>,
) -> Result<Ran, Failure> {
    let Streams { input, out: to_out, err: to_err, event } = streams;
    let to_guest = out.try_clone().map_err(|error| Failure::request("cannot share a socket", &error))?;
    // This thread may wait for our input for ever. It is not waited for.
    let (start, started) = mpsc::channel();
    thread::spawn(move || {
        // What comes before the kernel has set up its port is lost.
        if started.recv().is_ok() {
            feed(input, to_guest);
        }
    });
    let complaint = child.stderr.take();
    let (tell, told) = mpsc::channel();
    let mut listener = Listener::default();
    let (stopped, said) = thread::scope(|scope| {
        let said = scope.spawn(move || {
            let mut text = String::new();
            complaint.map(|mut from| from.read_to_string(&mut text));
            text
        });
        for (from, to) in [(out, to_out), (err, to_err)] {
            let tell = tell.clone();
            scope.spawn(move || {
                if let Err(error) = copy(from, to) {
                    let _ = tell.send(Told::Closed(error));
                }
            });
        }
        scope.spawn(|| {
            listener.listen(report, event, start);
            let _ = tell.send(Told::Over);
        });
        let stopped = match timeout {
            None => told.recv().ok(),
            Some(time) => told.recv_timeout(time).ok(),
        };
        match &stopped {
            // It ends by itself: what it still has to say comes.
            Some(Told::Over) => drop(child.wait()),
            _ => drop(child.kill()),
        }
        (stopped, said.join().unwrap_or_default())
    });
    let end = match (listener.end(), stopped) {
        (Some(end), _) => end,
        (None, None) => End::Timeout,
        (None, Some(Told::Closed(error))) => return Err(Failure::output("standard output", &error)),
        (None, Some(Told::Over)) => End::Broken(one_line(&said)),
    };
    Ok(Ran {
        end,
        ready: listener.ready,
        took: listener.began.zip(listener.ended).map(|(began, ended)| ended - began),
        stats: listener.stats,
        missing: listener.missing,
        notes: listener.notes.into(),
    })
}

/// Carries what the program writes, as it comes.
fn copy(mut from: UnixStream, to: &mut (dyn Write + Send)) -> io::Result<()> {
    let mut buffer = [0; 4096];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(length) => {
                to.write_all(&buffer[..length])?;
                to.flush()?;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // The emulator went away.
            Err(_) => return Ok(()),
        }
    }
}

/// The byte that ends a program's standard input, and the byte that quotes one.
const END_OF_INPUT: u8 = 0x04;
const QUOTE: u8 = 0x16;

/// Carries our standard input to the program, if it shall have it, and then its end.
fn feed(input: bool, mut to: UnixStream) {
    let mut buffer = [0; 4096];
    let mut stdin = io::stdin();
    let mut more = input;
    while more {
        match stdin.read(&mut buffer) {
            Ok(0) => more = false,
            Ok(length) if to.write_all(&quoted(&buffer[..length])).is_err() => return,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => more = false,
        }
    }
    let _ = to.write_all(&[END_OF_INPUT]);
}

fn quoted(bytes: &[u8]) -> Vec<u8> {
    let mut quoted = Vec::with_capacity(bytes.len());
    for &byte in bytes {
        if matches!(byte, END_OF_INPUT | QUOTE) {
            quoted.push(QUOTE);
        }
        quoted.push(byte);
    }
    quoted
}

/// What the report has said so far.
#[derive(Default)]
struct Listener {
    ready: Option<Duration>,
    began: Option<Instant>,
    ended: Option<Instant>,
    ordinary: Option<End>,
    panic: Option<String>,
    frames: Vec<(u64, String)>,
    stats: Vec<(String, u64)>,
    missing: Vec<(u32, String)>,
    notes: VecDeque<String>,
}

impl Listener {
    /// Reads the report to its end; tells `start` when the program begins.
    fn listen(
        &mut self,
        report: UnixStream,
        event: &mut (dyn FnMut(&Event) + Send),
        start: mpsc::Sender<()>,
    ) {
        let mut lines = BufReader::new(report);
        let mut line = Vec::new();
        // Bytes that are no text may come from a kernel that is beside itself.
        while matches!(lines.read_until(b'\n', &mut line), Ok(1..)) {
            let said = Event::parse(&String::from_utf8_lossy(&line));
            line.clear();
            event(&said);
            if matches!(said, Event::Ready(_)) {
                let _ = start.send(());
            }
            self.take(said);
        }
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Ready(nanoseconds) => {
                self.began = Some(Instant::now());
                self.ready = nanoseconds.map(Duration::from_nanos);
            }
            Event::Exit(status) => self.finish(End::Exit(status)),
            Event::Signal(number) => self.finish(End::Signal(number)),
            Event::Panic(why) => drop(self.panic.get_or_insert(why)),
            Event::Frame(address, name) => self.frames.push((address, name)),
            Event::Stat(name, value) => match self.stats.iter_mut().find(|(known, _)| *known == name) {
                Some((_, known)) => *known = value,
                None => self.stats.push((name, value)),
            },
            Event::MissingCall(number, name) => {
                if !self.missing.iter().any(|&(known, _)| known == number) {
                    self.missing.push((number, name));
                }
            }
            Event::Log(note) | Event::Note(note) => {
                if self.notes.len() == NOTES {
                    self.notes.pop_front();
                }
                self.notes.push_back(note);
            }
        }
    }

    fn finish(&mut self, end: End) {
        self.ended = Some(Instant::now());
        self.ordinary = Some(end);
    }

    /// How the kernel says that it ended.
    fn end(&mut self) -> Option<End> {
        match self.panic.take() {
            Some(why) => Some(End::Panic(why, std::mem::take(&mut self.frames))),
            None => self.ordinary.take(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::fake::{END, END_PORT, guest};

    /// What a guest of these writes says and does; nothing without QEMU.
    fn ran(writes: &[(u16, &[u8])], seconds: u64) -> Option<(Ran, String, String)> {
        let Ok(qemu) = find() else {
            eprintln!("skipped: {QEMU} is not installed");
            return None;
        };
        let image = memory_file("kernel", &guest(writes)).unwrap();
        // Its name here, as QEMU does not inherit it.
        let kernel = PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), image.as_raw_fd()));
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let streams = Streams { input: false, out: &mut out, err: &mut err, event: &mut |_| {} };
        let guest = Guest {
            qemu: &qemu,
            accel: Accel::Tcg,
            cpus: 1,
            memory: 64 << 20,
            kernel: &kernel,
            archive: None,
            words: "",
            gdb: false,
        };
        let ran = run(&guest, streams, Some(Duration::from_secs(seconds))).unwrap();
        Some((ran, String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap()))
    }

    const OUT: u16 = 0x3f8;
    const REPORT: u16 = 0x2f8;
    const ERR: u16 = 0x3e8;

    #[test]
    fn streams_and_the_status_arrive() {
        let report = b"hello\n@ready 5000000\n@stat pgfault 7\n@nosys 321 bpf\n@nosys 321 bpf\n@exit 42\n";
        let writes: &[(u16, &[u8])] =
            &[(OUT, b"one\n"), (REPORT, report), (ERR, b"two\n"), (OUT, b"three\n"), (END_PORT, &[END])];
        let Some((ran, out, err)) = ran(writes, 60) else { return };
        assert!(matches!(ran.end, End::Exit(42)), "{ran:?}");
        assert_eq!((out.as_str(), err.as_str()), ("one\nthree\n", "two\n"));
        assert_eq!(ran.ready, Some(Duration::from_millis(5)));
        assert!(ran.took.is_some());
        assert_eq!(ran.stats, [("pgfault".to_owned(), 7)]);
        assert_eq!(ran.missing, [(321, "bpf".to_owned())]);
        assert_eq!(ran.notes, ["hello"]);
    }

    #[test]
    fn a_panic_comes_with_its_frames() {
        let report = b"@panic no more\n@frame 0xffffffff80100000\n@frame 0xffffffff80100010 main\n";
        let Some((ran, ..)) = ran(&[(REPORT, report), (END_PORT, &[END])], 60) else { return };
        let End::Panic(why, frames) = ran.end else { panic!("{ran:?}") };
        assert_eq!(why, "no more");
        let expected = [(0xffff_ffff_8010_0000, ""), (0xffff_ffff_8010_0010, "main")];
        assert_eq!(frames, expected.map(|(address, name)| (address, name.to_owned())));
    }

    #[test]
    fn a_guest_that_does_not_end_is_ended() {
        let Some((ran, out, _)) = ran(&[(OUT, b"here\n")], 2) else { return };
        assert!(matches!(ran.end, End::Timeout), "{ran:?}");
        assert_eq!(out, "here\n");
    }

    #[test]
    fn an_end_without_a_word_is_told() {
        let Some((ran, ..)) = ran(&[(END_PORT, &[END])], 60) else { return };
        assert!(matches!(ran.end, End::Broken(_)), "{ran:?}");
    }

    #[test]
    fn code_runs_under_emulation() {
        if let Ok(qemu) = find() {
            assert!(runs(&qemu, Accel::Tcg));
        }
    }

    #[test]
    fn input_is_quoted() {
        assert_eq!(quoted(b"a\x04b\x16"), b"a\x16\x04b\x16\x16");
    }
}
