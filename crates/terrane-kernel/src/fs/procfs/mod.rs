//! `/proc`, and the files of `/sys`: what is made up when it is asked for.
//!
//! `/proc` itself, `/proc/sys` and `/sys` are directories in memory, set up at start ([`set_up`]); their files, and the directories of
//! processes, are [`Entry`]s: inodes made at each lookup that say what they are about. A text is written anew whenever it is read from
//! its beginning, and stays while it is read on.

mod machine;
mod process;
mod setting;

pub use machine::{MachineFile, Memory};
pub use process::{Link, ProcessFile};
pub use setting::Setting;

use super::abi::{S_IFDIR, S_IFLNK, S_IFREG};
use super::current::{self, Info};
use super::directory::{Directory, Listed};
use super::inode::{Inode, Kind, Node, Volume};
use super::tree;
use crate::arch;
use crate::errno::Errno;
use crate::mm::{self, Space};
use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;
use core::fmt::{self, Write};
use terrane::sync::Shared;
use terrane::text::Smaps;

/// A thing that is made up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Entry {
    /// A text about the machine.
    Machine(MachineFile),
    /// A value that can be set, or at least asked for.
    Setting(Setting),
    /// `/proc/self`.
    Myself,
    /// `/proc/thread-self`.
    MyThread,
    /// `/proc/PID`, or, with a thread's number, `/proc/PID/task/TID`.
    Process(u32, Option<u32>),
    /// A file there.
    File(u32, Option<u32>, ProcessFile),
    /// A link there.
    Link(u32, Option<u32>, Link),
    /// `/proc/PID/task`.
    Tasks(u32),
    /// `/proc/PID/fd`.
    Descriptors(u32, Option<u32>),
    /// A descriptor there.
    Descriptor(u32, i32),
    /// `/proc/PID/fdinfo`.
    DescriptorTexts(u32, Option<u32>),
    /// A descriptor there.
    DescriptorText(u32, i32),
}

/// A text being written; memory that is not there ends it.
#[derive(Default)]
pub struct Text {
    pub bytes: Vec<u8>,
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.bytes.try_reserve(text.len()).map_err(|_| fmt::Error)?;
        self.bytes.extend_from_slice(text.as_bytes());
        Ok(())
    }
}

fn node(entry: Entry) -> Result<Node, Errno> {
    // The same number at each lookup: the entry's own.
    let (kind, pid, rest) = match entry {
        Entry::Machine(file) => (1, 0, file as u64),
        Entry::Setting(setting) => (2, 0, setting as u64),
        Entry::Myself => (3, 0, 0),
        Entry::MyThread => (3, 0, 1),
        Entry::Process(pid, thread) => (4, pid, u64::from(thread.unwrap_or(0))),
        Entry::File(pid, thread, file) => (5, pid, u64::from(thread.unwrap_or(0)) << 8 | file as u64),
        Entry::Link(pid, thread, link) => (6, pid, u64::from(thread.unwrap_or(0)) << 8 | link as u64),
        Entry::Tasks(pid) => (7, pid, 0),
        Entry::Descriptors(pid, thread) => (8, pid, u64::from(thread.unwrap_or(0))),
        Entry::Descriptor(pid, fd) => (9, pid, fd as u64),
        Entry::DescriptorTexts(pid, thread) => (10, pid, u64::from(thread.unwrap_or(0))),
        Entry::DescriptorText(pid, fd) => (11, pid, fd as u64),
    };
    let number = 1 << 62 | kind << 56 | u64::from(pid) << 32 | rest & 0xffff_ffff;
    Inode::with_number(Volume::Proc, Kind::Proc(entry), entry.mode(), number)
}

/// Decimal digits, without a leading zero.
fn number(name: &[u8]) -> Option<u32> {
    if name.len() > 1 && name[0] == b'0' || !name.iter().all(u8::is_ascii_digit) {
        return None;
    }
    core::str::from_utf8(name).ok()?.parse().ok()
}

/// The directory of the process whose number `name` is.
///
/// # Errors
/// `ENOMEM`.
pub fn process(name: &[u8]) -> Result<Option<Node>, Errno> {
    match number(name) {
        // A thread's number leads to its process too, though no listing says so.
        Some(pid) if current::exists(pid) => node(Entry::Process(pid, None)).map(Some),
        _ => Ok(None),
    }
}

impl Entry {
    /// The type, as in `st_mode`.
    pub fn file_type(self) -> u32 {
        match self {
            Entry::Machine(_) | Entry::Setting(_) | Entry::File(..) | Entry::DescriptorText(..) => S_IFREG,
            Entry::Myself | Entry::MyThread | Entry::Link(..) | Entry::Descriptor(..) => S_IFLNK,
            Entry::Process(..) | Entry::Tasks(_) | Entry::Descriptors(..) | Entry::DescriptorTexts(..) => {
                S_IFDIR
            }
        }
    }

    fn mode(self) -> u32 {
        match self {
            Entry::Setting(setting) if setting.is_writable() => 0o644,
            Entry::File(_, _, file) => file.mode(),
            Entry::Descriptors(..) => 0o500,
            Entry::Descriptor(..) => 0o700,
            _ if self.file_type() == S_IFLNK => 0o777,
            _ if self.file_type() == S_IFDIR => 0o555,
            _ => 0o444,
        }
    }

    /// The length that `stat` gives.
    pub fn len(self) -> u64 {
        match self {
            Entry::Setting(setting) => setting.len(),
            Entry::Descriptor(..) => 64,
            _ => 0,
        }
    }

    /// What `name` leads to in it.
    ///
    /// # Errors
    /// `ENOTDIR`, `ENOMEM`.
    pub fn lookup(self, name: &[u8]) -> Result<Option<Node>, Errno> {
        let found = match self {
            Entry::Process(pid, thread) => {
                if current::info(pid).is_none() {
                    None
                } else {
                    Self::in_process(pid, thread).find(|&(other, _)| other == name).map(|(_, entry)| entry)
                }
            }
            Entry::Tasks(pid) => number(name)
                .filter(|&thread| current::info(pid).is_some_and(|info| info.threads.contains(&thread)))
                .map(|thread| Entry::Process(pid, Some(thread))),
            Entry::Descriptors(pid, _) | Entry::DescriptorTexts(pid, _) => {
                let fd = number(name).and_then(|fd| i32::try_from(fd).ok());
                let open = fd.filter(|&fd| current::file_of(pid, fd).is_ok());
                let is_link = matches!(self, Entry::Descriptors(..));
                open.map(
                    |fd| {
                        if is_link { Entry::Descriptor(pid, fd) } else { Entry::DescriptorText(pid, fd) }
                    },
                )
            }
            _ => return Err(Errno::ENOTDIR),
        };
        found.map(node).transpose()
    }

    /// The entries of a process's directory.
    fn in_process(pid: u32, thread: Option<u32>) -> impl Iterator<Item = (&'static [u8], Entry)> {
        let files = ProcessFile::ALL.iter().map(move |&(name, file)| (name, Entry::File(pid, thread, file)));
        let links = Link::ALL.iter().map(move |&(name, link)| (name, Entry::Link(pid, thread, link)));
        let tasks = thread.is_none().then_some((b"task".as_slice(), Entry::Tasks(pid)));
        let descriptors = [
            (b"fd".as_slice(), Entry::Descriptors(pid, thread)),
            (b"fdinfo".as_slice(), Entry::DescriptorTexts(pid, thread)),
        ];
        files.chain(links).chain(tasks).chain(descriptors)
    }

    /// The entries whose numbers are above `from`, at most `limit`.
    ///
    /// # Errors
    /// `ENOTDIR`, `ENOENT` when the process is gone, `ENOMEM`.
    pub fn list(self, from: u64, limit: usize) -> Result<Vec<Listed>, Errno> {
        let mut listed = Vec::new();
        let base = super::directory::FIRST + 1;
        let mut add = |number: u64, name: &[u8], entry: Entry| {
            if base + number > from && listed.len() < limit {
                listed.try_reserve(1)?;
                let name = super::directory::copy(name)?;
                let inode = node(entry)?.number;
                listed.push(Listed { name, next: base + number, inode, file_type: entry.file_type() });
            }
            Ok::<(), Errno>(())
        };
        match self {
            Entry::Process(pid, thread) => {
                current::info(pid).ok_or(Errno::ENOENT)?;
                for (n, (name, entry)) in Self::in_process(pid, thread).enumerate() {
                    add(n as u64, name, entry)?;
                }
            }
            Entry::Tasks(pid) => {
                let info = current::info(pid).ok_or(Errno::ENOENT)?;
                for &thread in &info.threads {
                    add(u64::from(thread), decimal(thread)?.as_slice(), Entry::Process(pid, Some(thread)))?;
                }
            }
            Entry::Descriptors(pid, _) | Entry::DescriptorTexts(pid, _) => {
                let first = (from + 1).saturating_sub(base) as usize;
                for fd in current::descriptors_of(pid, first, limit)? {
                    let entry = if matches!(self, Entry::Descriptors(..)) {
                        Entry::Descriptor(pid, fd as i32)
                    } else {
                        Entry::DescriptorText(pid, fd as i32)
                    };
                    add(fd as u64, decimal(fd as u32)?.as_slice(), entry)?;
                }
            }
            _ => return Err(Errno::ENOTDIR),
        }
        Ok(listed)
    }

    /// The directory in which it lies.
    ///
    /// # Errors
    /// `ENOENT`, `ENOMEM`.
    pub fn parent(self) -> Result<Node, Errno> {
        match self {
            Entry::Process(_, None) => proc_root(),
            Entry::Process(pid, Some(_)) => node(Entry::Tasks(pid)),
            Entry::Tasks(pid) => node(Entry::Process(pid, None)),
            Entry::Descriptors(pid, thread) | Entry::DescriptorTexts(pid, thread) => {
                node(Entry::Process(pid, thread))
            }
            _ => Err(Errno::ENOTDIR),
        }
    }

    /// Its path, if it is a directory.
    ///
    /// # Errors
    /// `ENOENT`, `ENOMEM`.
    pub fn path(self) -> Result<Vec<u8>, Errno> {
        let mut text = Text::default();
        let process = |text: &mut Text, pid: u32, thread: Option<u32>| match thread {
            Some(thread) => write!(text, "/proc/{pid}/task/{thread}"),
            None => write!(text, "/proc/{pid}"),
        };
        match self {
            Entry::Process(pid, thread) => process(&mut text, pid, thread),
            Entry::Tasks(pid) => write!(text, "/proc/{pid}/task"),
            Entry::Descriptors(pid, thread) => {
                process(&mut text, pid, thread).and_then(|()| text.write_str("/fd"))
            }
            Entry::DescriptorTexts(pid, thread) => {
                process(&mut text, pid, thread).and_then(|()| text.write_str("/fdinfo"))
            }
            _ => return Err(Errno::ENOENT),
        }
        .map_err(|_| Errno::ENOMEM)?;
        Ok(text.bytes)
    }

    /// What a link leads to that leads there without a path.
    ///
    /// # Errors
    /// `ENOENT`.
    pub fn jump(self) -> Result<Option<Node>, Errno> {
        match self {
            Entry::Descriptor(pid, fd) => Ok(Some(current::file_of(pid, fd)?.node.clone())),
            Entry::Link(pid, _, link) => link.jump(pid),
            _ => Ok(None),
        }
    }

    /// What `readlink` gives.
    ///
    /// # Errors
    /// `ENOENT`, `ENOMEM`, `EINVAL` for what is no link.
    pub fn read_link(self) -> Result<Vec<u8>, Errno> {
        match self {
            Entry::Myself => decimal(current::pid()),
            Entry::MyThread => {
                let mut text = Text::default();
                write!(text, "{}/task/{}", current::pid(), current::tid()).map_err(|_| Errno::ENOMEM)?;
                Ok(text.bytes)
            }
            Entry::Descriptor(pid, fd) => process::name_of(&*current::file_of(pid, fd)?),
            Entry::Link(pid, _, link) => link.read(pid),
            _ => Err(Errno::EINVAL),
        }
    }

    /// True for what is too large for a text: it is read where it is asked for.
    pub fn is_memory(self) -> bool {
        matches!(self, Entry::File(_, _, ProcessFile::Memory | ProcessFile::PageMap))
    }

    /// Reads from it, where it [is memory](Self::is_memory).
    ///
    /// # Errors
    /// As [`process::read_memory`].
    pub fn read_memory(self, offset: u64, buffer: &mut [u8]) -> Result<usize, Errno> {
        match self {
            Entry::File(pid, _, file) => process::read_memory(pid, file, offset, buffer),
            _ => Err(Errno::EINVAL),
        }
    }

    /// Writes to it, where it is memory.
    ///
    /// # Errors
    /// As [`process::read_memory`]; `EINVAL`.
    pub fn write_memory(self, offset: u64, bytes: &[u8]) -> Result<usize, Errno> {
        match self {
            Entry::File(pid, _, ProcessFile::Memory) => process::write_memory(pid, offset, bytes),
            _ => Err(Errno::EINVAL),
        }
    }

    /// The text that it reads now.
    ///
    /// # Errors
    /// `ESRCH` when its process has ended, `EISDIR`, `ENOMEM`.
    pub fn text(self) -> Result<Reading, Errno> {
        let mut text = Text::default();
        match self {
            Entry::Machine(file) => file.write(&mut text).map_err(|_| Errno::ENOMEM)?,
            Entry::Setting(setting) => setting.write(&mut text).map_err(|_| Errno::ENOMEM)?,
            Entry::File(pid, thread, file) => {
                let info: Info = current::info(pid).ok_or(Errno::ESRCH)?;
                if let (ProcessFile::Smaps, Some(space)) = (file, &info.space) {
                    let rest = Shared::try_new(mm::with_cpu(|cpu| Smaps::new(space, cpu))?)?;
                    return Ok(Reading { text, rest: Some((Arc::downgrade(space), rest)), begun: true });
                }
                file.write(&info, thread, &mut text)?;
            }
            Entry::DescriptorText(pid, fd) => {
                let file = current::file_of(pid, fd)?;
                let position = *file.position.lock();
                write!(
                    text,
                    "pos:\t{position}\nflags:\t0{:o}\nmnt_id:\t1\nino:\t{}\n",
                    file.flags(),
                    file.node.number
                )
                .map_err(|_| Errno::ENOMEM)?;
            }
            _ => return Err(Errno::EISDIR),
        }
        Ok(Reading { text, rest: None, begun: true })
    }

    /// A program writes to it.
    ///
    /// # Errors
    /// `EINVAL` for what it does not take, `EIO` for what cannot be written.
    pub fn store(self, bytes: &[u8]) -> Result<(), Errno> {
        match self {
            Entry::Setting(setting) => setting.store(bytes),
            Entry::File(pid, _, file) => file.store(pid, bytes),
            _ => Err(Errno::EIO),
        }
    }
}

/// A text that is being read. `smaps` can be long, and many look only at its beginning: so it is written as far as it is asked for.
#[derive(Default)]
pub struct Reading {
    text: Text,
    rest: Option<(Weak<Space>, Shared<Smaps>)>,
    /// It has been begun.
    begun: bool,
}

impl Reading {
    /// Nothing has been read of it yet.
    pub fn is_new(&self) -> bool {
        !self.begun
    }

    /// Up to `len` bytes from `from` on. Where more is written for that, it is as much as Linux would: what is said of so many mappings as
    /// fit into a page, and no part of the next.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn read(&mut self, from: usize, len: usize) -> Result<&[u8], Errno> {
        const PAGE: usize = 4096;
        let mut end = from.saturating_add(len);
        while self.text.bytes.len() < end
            && let Some((space, rest)) = &mut self.rest
        {
            let before = self.text.bytes.len();
            let more = match (space.upgrade(), Shared::get_mut(rest)) {
                (Some(space), Some(rest)) => mm::with_cpu(|cpu| rest.write_next(&space, cpu, &mut self.text)),
                // A space that has gone has no more to tell.
                _ => Ok(false),
            };
            if !more.map_err(process::from_text)? {
                self.rest = None;
            }
            if before > from && self.text.bytes.len() > from.saturating_add(PAGE) {
                end = before;
            }
        }
        let end = end.min(self.text.bytes.len());
        Ok(self.text.bytes.get(from..end).unwrap_or_default())
    }
}

/// A number in decimal.
///
/// # Errors
/// `ENOMEM`.
fn decimal(value: u32) -> Result<Vec<u8>, Errno> {
    let mut text = Text::default();
    write!(text, "{value}").map_err(|_| Errno::ENOMEM)?;
    Ok(text.bytes)
}

fn proc_root() -> Result<Node, Errno> {
    tree::root().directory().and_then(|root| root.get(b"proc")).ok_or(Errno::ENOENT)
}

/// The directories of processes among the entries of `/proc`, behind the others.
///
/// # Errors
/// `ENOMEM`.
pub fn list_processes(from: u64, limit: usize) -> Result<Vec<Listed>, Errno> {
    /// Above the numbers of ordinary entries.
    const BASE: u64 = 1 << 40;
    let mut listed = Vec::new();
    for pid in current::processes()? {
        let next = BASE + u64::from(pid);
        if next > from && listed.len() < limit {
            listed.try_reserve(1)?;
            let inode = node(Entry::Process(pid, None))?.number;
            listed.push(Listed { name: decimal(pid)?, next, inode, file_type: S_IFDIR });
        }
    }
    Ok(listed)
}

/// Makes `/proc` and `/sys`.
///
/// # Errors
/// `ENOMEM`.
pub fn set_up() -> Result<(), Errno> {
    let root = tree::root();
    let mut directory = Directory::new(Some(root.clone()));
    directory.has_processes = true;
    let proc = tree::create(root, b"proc", Kind::Directory(directory), 0o555)?;
    let enter = |parent: &Node, name: &[u8], entry: Entry| {
        parent.directory().ok_or(Errno::ENOTDIR)?.insert(name, &node(entry)?)
    };
    enter(&proc, b"self", Entry::Myself)?;
    enter(&proc, b"thread-self", Entry::MyThread)?;
    for &(name, file) in MachineFile::IN_PROC {
        enter(&proc, name, Entry::Machine(file))?;
    }
    let at = |path: &[u8]| -> Result<(Node, Vec<u8>), Errno> {
        let mut here = root.clone();
        let mut names = path.split(|&byte| byte == b'/').skip(1).peekable();
        while let Some(name) = names.next() {
            if names.peek().is_none() {
                return Ok((here, super::directory::copy(name)?));
            }
            let there = here.directory().and_then(|directory| directory.get(name));
            here = match there {
                Some(there) => there,
                None => tree::create_directory(&here, name, 0o755)?,
            };
        }
        Err(Errno::EINVAL)
    };
    for &(path, setting) in Setting::ALL {
        let (parent, name) = at(path)?;
        enter(&parent, &name, Entry::Setting(setting))?;
    }
    for &(path, file) in MachineFile::ELSEWHERE {
        let (parent, name) = at(path)?;
        enter(&parent, &name, Entry::Machine(file))?;
    }
    for cpu in 0..arch::cpu_count() {
        let mut path = Text::default();
        // The directories are what programs count.
        write!(path, "/sys/devices/system/cpu/cpu{cpu}/topology/x").map_err(|_| Errno::ENOMEM)?;
        at(&path.bytes)?;
        let mut path = Text::default();
        write!(path, "/sys/devices/system/node/node0/cpu{cpu}/x").map_err(|_| Errno::ENOMEM)?;
        at(&path.bytes)?;
    }
    Ok(())
}
