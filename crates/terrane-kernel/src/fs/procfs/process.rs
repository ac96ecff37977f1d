//! Texts and links about a process.

use super::Text;
use crate::errno::Errno;
use crate::fs::current::{self, Info};
use crate::fs::directory::copy;
use crate::fs::inode::Node;
use crate::fs::open::OpenFile;
use crate::fs::path;
use crate::fs::tree;
use crate::mm;
use alloc::vec::Vec;
use core::fmt::{self, Write};
use terrane::PAGE_SIZE;
use terrane::space::PageState;
use terrane::text::{self, Status, TextError};

macro_rules! files {
    ($($name:ident $file:literal $mode:literal;)*) => {
        /// A text.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum ProcessFile { $($name,)* }

        impl ProcessFile {
            /// All, by name.
            pub const ALL: &'static [(&'static [u8], ProcessFile)] = &[$(($file, ProcessFile::$name),)*];

            /// The permissions.
            pub fn mode(self) -> u32 {
                match self { $(ProcessFile::$name => $mode,)* }
            }
        }
    };
}

files! {
    Maps b"maps" 0o444;
    Smaps b"smaps" 0o444;
    SmapsRollup b"smaps_rollup" 0o444;
    Status b"status" 0o444;
    Stat b"stat" 0o444;
    Statm b"statm" 0o444;
    CommandLine b"cmdline" 0o444;
    Name b"comm" 0o644;
    Limits b"limits" 0o444;
    Mounts b"mounts" 0o444;
    CpuSet b"cpuset" 0o444;
    ControlGroups b"cgroup" 0o444;
    OomScore b"oom_score" 0o444;
    OomScoreAdjust b"oom_score_adj" 0o644;
    SchedulerStat b"schedstat" 0o444;
    Io b"io" 0o400;
    CoreFilter b"coredump_filter" 0o644;
    Memory b"mem" 0o600;
    PageMap b"pagemap" 0o400;
    ClearReferences b"clear_refs" 0o200;
    WaitChannel b"wchan" 0o444;
}

/// A link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Link {
    Program,
    Directory,
    Root,
}

impl Link {
    /// All, by name.
    pub const ALL: &'static [(&'static [u8], Link)] =
        &[(b"exe", Link::Program), (b"cwd", Link::Directory), (b"root", Link::Root)];

    /// What it leads to.
    ///
    /// # Errors
    /// `ENOENT`, `EACCES`.
    pub fn jump(self, pid: u32) -> Result<Option<Node>, Errno> {
        match self {
            Link::Program => {
                // By its path: a program that was removed meanwhile is not found any more.
                let path = self.read(pid)?;
                path::walk(tree::root(), &path, path::Last::Follow)?.existing().map(Some)
            }
            Link::Directory => current::directory_of(pid).map(Some),
            Link::Root => Ok(Some(tree::root().clone())),
        }
    }

    /// Its text.
    ///
    /// # Errors
    /// As [`jump`](Self::jump); `ENOMEM`.
    pub fn read(self, pid: u32) -> Result<Vec<u8>, Errno> {
        match self {
            Link::Program => {
                let info = current::info(pid).ok_or(Errno::ENOENT)?;
                copy(&info.program.ok_or(Errno::ENOENT)?)
            }
            Link::Directory => path::path_of(&current::directory_of(pid)?),
            Link::Root => copy(b"/"),
        }
    }
}

/// What `/proc/PID/fd` says that a file is.
///
/// # Errors
/// `ENOMEM`.
pub fn name_of(file: &OpenFile) -> Result<Vec<u8>, Errno> {
    let mut text = Text::default();
    let number = file.node.number;
    use crate::fs::inode::Kind;
    match &file.node.kind {
        Kind::Pipe(_) if file.path.is_empty() => write!(text, "pipe:[{number}]"),
        Kind::Event(_) => write!(text, "anon_inode:[eventfd]"),
        Kind::Timer(_) => write!(text, "anon_inode:[timerfd]"),
        Kind::Epoll(_) => write!(text, "anon_inode:[eventpoll]"),
        Kind::Signals(_) => write!(text, "anon_inode:[signalfd]"),
        Kind::UserFault(_) => write!(text, "anon_inode:[userfaultfd]"),
        Kind::Socket(_) => write!(text, "socket:[{number}]"),
        Kind::Process(_) => write!(text, "anon_inode:[pidfd]"),
        _ => {
            text.bytes = copy(&file.path)?;
            let gone = file.node.attributes.lock().links == 0;
            text.write_str(if gone { " (deleted)" } else { "" })
        }
    }
    .map_err(|_| Errno::ENOMEM)?;
    Ok(text.bytes)
}

pub(super) fn from_text(error: TextError) -> Errno {
    match error {
        TextError::List(error) => error.into(),
        TextError::Write => Errno::ENOMEM,
    }
}

impl ProcessFile {
    /// Writes it.
    ///
    /// # Errors
    /// `ENOMEM`, `ESRCH`.
    pub fn write(self, info: &Info, thread: Option<u32>, out: &mut Text) -> Result<(), Errno> {
        let no_memory = |_: fmt::Error| Errno::ENOMEM;
        match self {
            // Written as it is read: `Reading`.
            ProcessFile::Smaps => Ok(()),
            ProcessFile::Maps | ProcessFile::SmapsRollup => {
                // A process that has ended has no mappings.
                let Some(space) = &info.space else { return Ok(()) };
                mm::with_cpu(|cpu| match self {
                    ProcessFile::Maps => text::write_maps(space, cpu, out),
                    _ => text::write_smaps_rollup(space, cpu, out),
                })
                .map_err(from_text)
            }
            ProcessFile::Status => status(info, thread, out),
            ProcessFile::Stat => stat(info, thread, out),
            ProcessFile::Statm => {
                let (status, _) = sizes(info)?;
                let shared = status.rss.file + status.rss.shmem;
                let resident = status.rss.resident();
                let pages = |bytes: u64| bytes / PAGE_SIZE;
                let (size, code, data) =
                    (pages(status.size), pages(status.code), pages(status.data + status.stack));
                writeln!(out, "{size} {resident} {shared} {code} 0 {data} 0").map_err(no_memory)
            }
            ProcessFile::CommandLine => {
                if let Some(arguments) = &info.arguments {
                    out.bytes = copy(arguments)?;
                }
                Ok(())
            }
            ProcessFile::Name => writeln!(out, "{}", name(info, thread)).map_err(no_memory),
            ProcessFile::Limits => limits(info, out).map_err(no_memory),
            ProcessFile::Mounts => super::machine::mounts(out).map_err(no_memory),
            ProcessFile::CpuSet => out.write_str("/\n").map_err(no_memory),
            ProcessFile::ControlGroups => out.write_str("0::/\n").map_err(no_memory),
            ProcessFile::OomScore => out.write_str("0\n").map_err(no_memory),
            // Nobody is killed for another's memory, so it changes nothing.
            ProcessFile::OomScoreAdjust => out.write_str("0\n").map_err(no_memory),
            ProcessFile::SchedulerStat => {
                writeln!(out, "{} 0 0", info.user_time + info.system_time).map_err(no_memory)
            }
            ProcessFile::Io => {
                let names = [
                    "rchar",
                    "wchar",
                    "syscr",
                    "syscw",
                    "read_bytes",
                    "write_bytes",
                    "cancelled_write_bytes",
                ];
                names.iter().try_for_each(|name| writeln!(out, "{name}: 0")).map_err(no_memory)
            }
            ProcessFile::CoreFilter => out.write_str("00000033\n").map_err(no_memory),
            ProcessFile::WaitChannel => out.write_str("0").map_err(no_memory),
            ProcessFile::ClearReferences => Err(Errno::EINVAL),
            // Read where they are asked for, not as a whole.
            ProcessFile::Memory | ProcessFile::PageMap => Err(Errno::EINVAL),
        }
    }

    /// A program writes to it.
    ///
    /// # Errors
    /// `EINVAL`, `EIO`, `ESRCH`.
    pub fn store(self, pid: u32, bytes: &[u8]) -> Result<(), Errno> {
        let text = core::str::from_utf8(bytes).map_err(|_| Errno::EINVAL)?.trim();
        let value = || text.parse::<i32>().map_err(|_| Errno::EINVAL);
        match self {
            ProcessFile::Name => current::set_name(pid, bytes),
            ProcessFile::OomScoreAdjust => {
                if (-1000..=1000).contains(&value()?) {
                    Ok(())
                } else {
                    Err(Errno::EINVAL)
                }
            }
            // There are no core files.
            ProcessFile::CoreFilter => Ok(()),
            // Nobody keeps which pages were touched since.
            ProcessFile::ClearReferences if (1..=5).contains(&value()?) => Ok(()),
            ProcessFile::ClearReferences => Err(Errno::EINVAL),
            _ => Err(Errno::EIO),
        }
    }
}

/// Reads from the pages of a process (`/proc/PID/mem`), or what its page table says of each (`pagemap`), 8 bytes a page.
///
/// # Errors
/// `ESRCH`, `EACCES`; `EIO` where nothing is mapped; `EINVAL` for a part of a page's word.
pub fn read_memory(pid: u32, file: ProcessFile, offset: u64, buffer: &mut [u8]) -> Result<usize, Errno> {
    let space = current::space_of(pid)?;
    if file == ProcessFile::Memory {
        return crate::syscall::memory_of(&space, offset, buffer, false);
    }
    const WORD: usize = 8;
    if !offset.is_multiple_of(WORD as u64) || !buffer.len().is_multiple_of(WORD) {
        return Err(Errno::EINVAL);
    }
    let end = crate::fs::abi::USER_END / PAGE_SIZE;
    let first = offset / WORD as u64;
    let count = (buffer.len() / WORD).min(end.saturating_sub(first) as usize);
    let mut states = Vec::new();
    states.try_reserve_exact(count.min(512))?;
    for (nth, part) in buffer[..count * WORD].chunks_mut(512 * WORD).enumerate() {
        states.clear();
        states.resize(part.len() / WORD, PageState::default());
        let at = (first + 512 * nth as u64) * PAGE_SIZE;
        mm::with_cpu(|cpu| space.pagemap(cpu, at, &mut states))?;
        for (place, state) in part.chunks_exact_mut(WORD).zip(&states) {
            place.copy_from_slice(&word_of(state).to_ne_bytes());
        }
    }
    Ok(count * WORD)
}

fn word_of(state: &PageState) -> u64 {
    let bit = |set: bool, bit: u32| u64::from(set) << bit;
    let frame = state.frame.map_or(0, |frame| u64::from(frame.0));
    frame
        | bit(state.exclusive, 56)
        | bit(state.protected, 57)
        | bit(state.guard, 58)
        | bit(state.shared, 61)
        | bit(state.swapped, 62)
        | bit(state.frame.is_some(), 63)
}

/// Writes to the pages of a process.
///
/// # Errors
/// As [`read_memory`].
pub fn write_memory(pid: u32, offset: u64, bytes: &[u8]) -> Result<usize, Errno> {
    let space = current::space_of(pid)?;
    let mut copy = copy(bytes)?;
    crate::syscall::memory_of(&space, offset, &mut copy, true)
}

/// The sizes of a process's memory, zeros once it has ended; and the number of its mappings.
fn sizes(info: &Info) -> Result<(Status, usize), Errno> {
    let Some(space) = &info.space else { return Ok((Status::default(), 0)) };
    let status = mm::with_cpu(|cpu| Status::of(space, cpu)).map_err(from_text)?;
    Ok((status, space.map_count()))
}

/// The name of the process, or of one of its threads.
fn name(info: &Info, thread: Option<u32>) -> current::Name {
    thread.and_then(current::name_of_thread).unwrap_or(info.name)
}

fn status(info: &Info, thread: Option<u32>, out: &mut Text) -> Result<(), Errno> {
    let no_memory = |_: fmt::Error| Errno::ENOMEM;
    let state = match info.state {
        b'R' => "R (running)",
        b'T' => "T (stopped)",
        b'Z' => "Z (zombie)",
        _ => "S (sleeping)",
    };
    let pid = thread.unwrap_or(info.pid);
    writeln!(out, "Name:\t{}\nUmask:\t{:04o}\nState:\t{state}", name(info, thread), current::umask())
        .map_err(no_memory)?;
    writeln!(out, "Tgid:\t{}\nNgid:\t0\nPid:\t{pid}\nPPid:\t{}\nTracerPid:\t0", info.pid, info.parent)
        .map_err(no_memory)?;
    for (kind, [real, effective, saved]) in [("Uid", info.uids), ("Gid", info.gids)] {
        writeln!(out, "{kind}:\t{real}\t{effective}\t{saved}\t{effective}").map_err(no_memory)?;
    }
    writeln!(out, "FDSize:\t{}\nGroups:\t ", current::descriptor_room()).map_err(no_memory)?;
    writeln!(
        out,
        "NStgid:\t{0}\nNSpid:\t{pid}\nNSpgid:\t{1}\nNSsid:\t{2}\nKthread:\t0",
        info.pid, info.group, info.session
    )
    .map_err(no_memory)?;
    if let Some(space) = &info.space {
        mm::with_cpu(|cpu| text::write_status(space, cpu, out)).map_err(from_text)?;
    }
    writeln!(out, "untag_mask:\t0xffffffffffffffff\nThreads:\t{}\nSigQ:\t0/32767", info.threads.len())
        .map_err(no_memory)?;
    let [pending, common, blocked, ignored, caught] = info.signals;
    writeln!(out, "SigPnd:\t{pending:016x}\nShdPnd:\t{common:016x}\nSigBlk:\t{blocked:016x}")
        .map_err(no_memory)?;
    writeln!(out, "SigIgn:\t{ignored:016x}\nSigCgt:\t{caught:016x}").map_err(no_memory)?;
    let all = (1u64 << 41) - 1;
    for (set, value) in [("Inh", 0), ("Prm", all), ("Eff", all), ("Bnd", all), ("Amb", 0)] {
        writeln!(out, "Cap{set}:\t{value:016x}").map_err(no_memory)?;
    }
    out.write_str("NoNewPrivs:\t0\nSeccomp:\t0\nSeccomp_filters:\t0\n").map_err(no_memory)?;
    let cpus = crate::arch::cpu_count();
    let mask = u64::MAX >> (64 - cpus.min(64));
    writeln!(out, "Cpus_allowed:\t{mask:x}").map_err(no_memory)?;
    if cpus == 1 {
        out.write_str("Cpus_allowed_list:\t0\n")
    } else {
        writeln!(out, "Cpus_allowed_list:\t0-{}", cpus - 1)
    }
    .map_err(no_memory)?;
    writeln!(out, "Mems_allowed:\t1\nMems_allowed_list:\t0").map_err(no_memory)?;
    writeln!(
        out,
        "voluntary_ctxt_switches:\t{}\nnonvoluntary_ctxt_switches:\t{}",
        info.switches.0, info.switches.1
    )
    .map_err(no_memory)
}

fn stat(info: &Info, thread: Option<u32>, out: &mut Text) -> Result<(), Errno> {
    let (status, _) = sizes(info)?;
    let ticks = |ns: u64| ns / 10_000_000;
    let pid = thread.unwrap_or(info.pid);
    let (layout, (user, system)) = (info.layout, (ticks(info.user_time), ticks(info.system_time)));
    let mut write = || {
        write!(
            out,
            "{pid} ({}) {} {} {} {} 0 -1 ",
            name(info, thread),
            info.state as char,
            info.parent,
            info.group,
            info.session
        )?;
        // Flags, faults (minor, of children; major, of children), times (own, of children), priority, niceness.
        write!(out, "4194304 {} 0 {} 0 {user} {system} 0 0 20 0 ", info.faults, 0)?;
        write!(
            out,
            "{} 0 {} {} {} ",
            info.threads.len(),
            ticks(info.began),
            status.size,
            status.rss.resident()
        )?;
        // The limit of what is in memory; code, stack; registers; signals.
        write!(out, "18446744073709551615 {} {} {} 0 0 ", layout.code.start, layout.code.end, layout.stack)?;
        write!(
            out,
            "{} {} {} {} 0 0 0 17 0 0 0 0 0 0 ",
            info.signals[0], info.signals[2], info.signals[3], info.signals[4]
        )?;
        // Data, the heap's start, arguments, environment, exit code: not told.
        writeln!(out, "0 0 0 0 0 0 0 0")
    };
    write().map_err(|_| Errno::ENOMEM)
}

fn limits(info: &Info, out: &mut Text) -> fmt::Result {
    const NAMES: [(&str, &str); 16] = [
        ("Max cpu time", "seconds"),
        ("Max file size", "bytes"),
        ("Max data size", "bytes"),
        ("Max stack size", "bytes"),
        ("Max core file size", "bytes"),
        ("Max resident set", "bytes"),
        ("Max processes", "processes"),
        ("Max open files", "files"),
        ("Max locked memory", "bytes"),
        ("Max address space", "bytes"),
        ("Max file locks", "locks"),
        ("Max pending signals", "signals"),
        ("Max msgqueue size", "bytes"),
        ("Max nice priority", ""),
        ("Max realtime priority", ""),
        ("Max realtime timeout", "us"),
    ];
    struct Limit(u64);
    impl fmt::Display for Limit {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            if self.0 == u64::MAX { f.pad("unlimited") } else { fmt::Display::fmt(&self.0, f) }
        }
    }
    writeln!(out, "{:<25} {:<20} {:<20} {:<10}", "Limit", "Soft Limit", "Hard Limit", "Units")?;
    for ((name, unit), (soft, hard)) in NAMES.iter().zip(info.limits) {
        writeln!(out, "{name:<25} {:<20} {:<20} {unit:<10}", Limit(soft), Limit(hard))?;
    }
    Ok(())
}
