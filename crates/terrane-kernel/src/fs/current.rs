//! What files need to know of the thread that calls, and `/proc` of all processes: the seam to `task`.

use super::inode::Node;
use super::open::Open;
use super::table::Files;
use super::tree::root;
use crate::arch;
use crate::errno::Errno;
use crate::mm::{self, Object, Space};
use crate::sync::SpinLock;
use crate::task::process::{LIMITS, RLIMIT_NOFILE};
use crate::task::thread::{Thread, current, try_current};
use crate::task::{sched, signal, tree};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt::{self, Write};
use core::sync::atomic::Ordering;
use terrane::mm::Layout;
use terrane::sync::Shared;

/// The directory in which relative paths begin, the one that absolute paths begin in, and the mask of permissions. Threads of a process share it
/// as a rule.
pub struct Cwd {
    state: SpinLock<State>,
}

#[derive(Clone)]
struct State {
    /// `None` for the root of all.
    directory: Option<Node>,
    root: Option<Node>,
    umask: u32,
}

impl Cwd {
    /// The root, and Linux's usual mask.
    pub const fn new() -> Self {
        Self { state: SpinLock::new(State { directory: None, root: None, umask: 0o022 }) }
    }

    /// The same for another process.
    ///
    /// # Errors
    /// None; as the descriptor table's.
    pub fn fork(&self) -> Result<Self, Errno> {
        Ok(Self { state: SpinLock::new(self.state.lock().clone()) })
    }

    /// The directory.
    pub fn directory(&self) -> Node {
        self.state.lock().directory.clone().unwrap_or_else(|| root().clone())
    }

    /// Where absolute paths begin.
    pub fn root(&self) -> Node {
        self.state.lock().root.clone().unwrap_or_else(|| root().clone())
    }

    /// Lets them begin elsewhere (`chroot`).
    pub fn set_root(&self, node: Node) {
        let before = self.state.lock().root.replace(node);
        drop(before);
    }

    /// Goes to another.
    pub fn set_directory(&self, node: Node) {
        let before = self.state.lock().directory.replace(node);
        drop(before);
    }

    /// The permissions that new files do not get.
    pub fn umask(&self) -> u32 {
        self.state.lock().umask
    }

    /// Sets them; what was set before.
    pub fn set_umask(&self, umask: u32) -> u32 {
        core::mem::replace(&mut self.state.lock().umask, umask & 0o777)
    }
}

impl Default for Cwd {
    fn default() -> Self {
        Self::new()
    }
}

/// `SIGPIPE`.
pub const SIGPIPE: u32 = 13;
/// `SIGXFSZ`.
pub const SIGXFSZ: u32 = 25;

/// The descriptors of the thread that calls.
pub fn files() -> Shared<Files> {
    current().files().clone()
}

/// Where its absolute paths begin; the root of all before there are threads.
pub fn root_directory() -> Node {
    try_current().map_or_else(|| root().clone(), |thread| thread.cwd().root())
}

/// Its directory.
pub fn cwd() -> Shared<Cwd> {
    current().cwd().clone()
}

/// The memory of the thread that calls.
pub fn space() -> Arc<Space> {
    current().space().clone()
}

/// True when a process runs in `space` that is not to end.
pub fn is_used(space: &Arc<Space>) -> bool {
    tree::tree().processes().iter().any(|node| {
        let process = &node.process;
        process.exit_status().is_none() && process.space().is_some_and(|other| Arc::ptr_eq(&other, space))
    })
}

/// Signals of `set` that wait for the thread that calls.
pub fn waiting_signals(set: u64) -> u64 {
    current().waiting_signals().0 & set
}

/// Takes one of them.
pub fn take_signal(set: u64) -> Option<signal::Info> {
    let (thread, set) = (current(), signal::Set(set));
    thread.pending.take(set).or_else(|| thread.process().pending.take(set))
}

/// Runs `act`, which waits, and has the thread that calls woken by signals of `set` even if it does not want them.
pub fn awaiting<R>(set: u64, act: impl FnOnce() -> R) -> R {
    let thread = current();
    thread.awaited.store(set, Ordering::SeqCst);
    let result = act();
    thread.awaited.store(0, Ordering::SeqCst);
    result
}

/// The memory of a process, for who may look into it.
///
/// # Errors
/// `ESRCH`, `EACCES`.
pub fn space_of(pid: u32) -> Result<Arc<Space>, Errno> {
    let process = tree::tree().process(pid).map(|node| node.process.clone()).ok_or(Errno::ESRCH)?;
    let own = current();
    if !own.process().is_privileged() && own.process().user_ids() != process.user_ids() {
        return Err(Errno::EACCES);
    }
    process.space().ok_or(Errno::ESRCH)
}

/// The permissions that new files do not get.
pub fn umask() -> u32 {
    current().cwd().umask()
}

/// The number of the process that calls.
pub fn pid() -> u32 {
    current().process().id()
}

/// The number of the thread that calls.
pub fn tid() -> u32 {
    current().id()
}

/// True when a signal waits for the thread that calls.
pub fn has_signal() -> bool {
    current().has_signal()
}

/// Sends it a signal that its call has caused.
pub fn send_signal(signal: u32) {
    signal::send_to_current(signal);
}

/// Numbers of descriptors are below this.
pub fn file_limit() -> u64 {
    current().process().limit(RLIMIT_NOFILE)
}

/// Files do not become longer than this.
pub fn file_size_limit() -> u64 {
    const RLIMIT_FSIZE: usize = 1;
    current().process().limit(RLIMIT_FSIZE)
}

/// Gives `file` a descriptor.
///
/// # Errors
/// `EMFILE`, `ENOMEM`.
pub fn add_file(file: Open, close_on_exec: bool) -> Result<u64, Errno> {
    files().add(file, close_on_exec, 0, file_limit()).map(|fd| fd as u64)
}

/// Gives the thread that calls a descriptor table of its own.
///
/// # Errors
/// `ENOMEM`.
pub fn unshare_files() -> Result<(), Errno> {
    let thread = current();
    let own = Shared::try_new(thread.files().fork()?)?;
    let before = thread.change(|private| private.files.replace(own));
    drop(before);
    Ok(())
}

/// Runs `act` with the mask of signals at `mask`, if that is not 0, as `ppoll` does.
///
/// # Errors
/// `EINVAL` for another `size` than 8, `EFAULT`; what `act` returns.
pub fn with_mask(mask: u64, size: u64, act: impl FnOnce() -> Result<u64, Errno>) -> Result<u64, Errno> {
    signal::set_temporary_mask(mask, size)?;
    let result = act();
    signal::end_temporary_mask(result == Err(Errno::EINTR));
    result
}

/// The process group of the process that calls.
pub fn group() -> u32 {
    let pid = pid();
    tree::tree().process(pid).map_or(0, |node| node.group)
}

/// True when somebody maps the object so that stores reach it, or may come to.
pub fn is_mapped_writable(object: &Object) -> bool {
    mm::with_cpu(|cpu| terrane::rmap::walk::is_mapped_for_stores(cpu, object))
}

/// A name of 15 bytes at most.
#[derive(Clone, Copy, Default)]
pub struct Name([u8; 16]);

impl Name {
    /// The name of a program, by its path.
    fn of_path(path: &[u8]) -> Self {
        let last = path.rsplit(|&byte| byte == b'/').next().unwrap_or_default();
        let mut name = [0; 16];
        let len = last.len().min(15);
        name[..len].copy_from_slice(&last[..len]);
        Self(name)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let len = self.0.iter().position(|&byte| byte == 0).unwrap_or(16);
        self.0[..len].utf8_chunks().try_for_each(|part| {
            f.write_str(part.valid())?;
            part.invalid().iter().try_for_each(|_| f.write_char('?'))
        })
    }
}

/// What `/proc` tells of a process.
pub struct Info {
    pub pid: u32,
    pub parent: u32,
    pub group: u32,
    pub session: u32,
    /// `R`, `S`, `T` or `Z`.
    pub state: u8,
    pub name: Name,
    pub threads: Vec<u32>,
    /// `None` once it has ended.
    pub space: Option<Arc<Space>>,
    /// The path of its program.
    pub program: Option<Shared<Vec<u8>>>,
    /// What it was started with, each ended by NUL.
    pub arguments: Option<Shared<Vec<u8>>>,
    pub layout: Layout,
    /// In ns.
    pub user_time: u64,
    pub system_time: u64,
    pub began: u64,
    pub faults: u64,
    /// How often it gave its CPU up, by itself and not.
    pub switches: (u64, u64),
    /// Waiting for its first thread and for any; blocked by its first thread; ignored, caught.
    pub signals: [u64; 5],
    pub uids: [u32; 3],
    pub gids: [u32; 3],
    pub limits: [(u64, u64); LIMITS],
}

/// True when there is a process, or a thread, with this number.
pub fn exists(pid: u32) -> bool {
    let tree = tree::tree();
    tree.process(pid).is_some() || tree.thread(pid).is_some()
}

/// What there is to tell about a process; `None` when there is none.
pub fn info(pid: u32) -> Option<Info> {
    let mut threads = Vec::new();
    // Before the lock is taken, which must not be held for long.
    threads.try_reserve(64).ok()?;
    let mut info = {
        let tree = tree::tree();
        let pid = if tree.process(pid).is_some() { pid } else { tree.thread(pid)?.process().id() };
        let node = tree.process(pid)?;
        let process = &node.process;
        let ended = *process.ended.lock();
        let mut info = Info {
            pid,
            parent: node.parent,
            group: node.group,
            session: node.session,
            state: b'S',
            name: Name::default(),
            threads: Vec::new(),
            space: None,
            program: process.program.lock().clone(),
            arguments: process.arguments.lock().clone(),
            layout: Layout::default(),
            user_time: ended.time - ended.in_kernel.min(ended.time),
            system_time: ended.in_kernel,
            began: process.began,
            faults: ended.faults,
            switches: (ended.voluntary, ended.preempted),
            signals: [0; 5],
            uids: process.user_ids(),
            gids: process.group_ids(),
            limits: *process.limits.lock(),
        };
        for thread in tree.threads_of(process) {
            if threads.try_reserve(1).is_err() {
                break;
            }
            threads.push(thread.id());
            let (all, kernel) = (thread.run_time(), thread.kernel_time());
            info.system_time += kernel.min(all);
            info.user_time += all - kernel.min(all);
            info.faults += thread.faults.load(Ordering::Relaxed);
            info.switches.0 += thread.voluntary.load(Ordering::Relaxed);
            info.switches.1 += thread.preempted.load(Ordering::Relaxed);
            if thread.id() == pid {
                info.signals[2] = thread.mask().0;
            }
            if is_running(thread) {
                info.state = b'R';
            }
        }
        if process.stopped.load(Ordering::Relaxed) {
            info.state = b'T';
        }
        if node.is_zombie() {
            info.state = b'Z';
        }
        let (ignored, caught) = process.actions().sets();
        (info.signals[3], info.signals[4]) = (ignored.0, caught.0);
        info.space = process.space();
        info
    };
    info.threads = threads;
    info.layout = info.space.as_ref().map(|space| space.layout()).unwrap_or_default();
    info.name = info.program.as_ref().map(|path| Name::of_path(path)).unwrap_or_default();
    if info.pid == self::pid() {
        let own = current().private().name;
        if own[0] != 0 {
            info.name = Name(own);
        }
    }
    Some(info)
}

fn is_running(thread: &Thread) -> bool {
    thread.state.load(Ordering::Relaxed) == sched::RUNNING
}

/// The processes, ascending.
///
/// # Errors
/// `ENOMEM`.
pub fn processes() -> Result<Vec<u32>, Errno> {
    let mut pids = Vec::new();
    let tree = tree::tree();
    pids.try_reserve(tree.processes().len())?;
    pids.extend(tree.processes().iter().map(|node| node.process.id()));
    drop(tree);
    pids.sort_unstable();
    Ok(pids)
}

/// Threads that run or could, and all.
pub fn loads() -> (usize, usize) {
    let tree = tree::tree();
    let all = tree.threads().count();
    (tree.threads().filter(|thread| is_running(thread)).count(), all)
}

/// The greatest number of a process.
pub fn last_pid() -> u32 {
    tree::tree().processes().iter().map(|node| node.process.id()).max().unwrap_or(0)
}

/// How long all threads that there are have run, in their programs and in the kernel. In ns.
pub fn times() -> (u64, u64) {
    let tree = tree::tree();
    let mut times = (0, 0);
    for node in tree.processes() {
        let ended = node.process.ended.lock();
        times.0 += ended.time - ended.in_kernel.min(ended.time);
        times.1 += ended.in_kernel;
    }
    for thread in tree.threads() {
        let (all, kernel) = (thread.run_time(), thread.kernel_time());
        times.0 += all - kernel.min(all);
        times.1 += kernel.min(all);
    }
    times
}

/// How long all CPUs together had nothing to do. In ns.
pub fn idle_time() -> u64 {
    let (user, system) = times();
    (arch::now() * arch::cpu_count() as u64).saturating_sub(user + system)
}

/// What descriptor `fd` of a process stands for: of the one that calls, for those of others are their own.
///
/// # Errors
/// `ENOENT`, `EACCES`.
pub fn file_of(pid: u32, fd: i32) -> Result<Open, Errno> {
    if pid != self::pid() {
        return Err(Errno::EACCES);
    }
    files().get_path(fd).map_err(|_| Errno::ENOENT)
}

/// The descriptors of a process from `from` on, at most `limit`.
///
/// # Errors
/// `EACCES` for another process than the one that calls, `ENOMEM`.
pub fn descriptors_of(pid: u32, from: usize, limit: usize) -> Result<Vec<usize>, Errno> {
    if pid != self::pid() {
        return Err(Errno::EACCES);
    }
    files().list(from, limit)
}

/// Numbers for which the descriptor table has room.
pub fn descriptor_room() -> usize {
    current().files().capacity()
}

/// The directory of a process: of the one that calls.
///
/// # Errors
/// `EACCES` for another.
pub fn directory_of(pid: u32) -> Result<Node, Errno> {
    if pid != self::pid() {
        return Err(Errno::EACCES);
    }
    Ok(cwd().directory())
}

/// The name of a thread, if it is the one that calls and has one of its own.
pub fn name_of_thread(tid: u32) -> Option<Name> {
    let thread = current();
    let own = thread.private().name;
    (thread.id() == tid && own[0] != 0).then_some(Name(own))
}

/// Names the thread that calls.
///
/// # Errors
/// `EINVAL` for another.
pub fn set_name(pid: u32, bytes: &[u8]) -> Result<(), Errno> {
    let thread = current();
    if thread.process().id() != pid && thread.id() != pid {
        return Err(Errno::EINVAL);
    }
    let bytes = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    let mut name = [0; 16];
    let len = bytes.len().min(15);
    name[..len].copy_from_slice(&bytes[..len]);
    thread.change(|own| own.name = name);
    Ok(())
}
