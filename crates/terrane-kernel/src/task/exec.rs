//! New programs: `execve`.
//!
//! Everything that can fail for the program's fault is done before the old program is gone: reading its arguments, the file's headers, and mapping its segments into a
//! new space. Then the other threads end, the space is exchanged, and what the new program finds on its stack is written there; when that
//! fails (for want of memory) there is nobody left to tell, and the process is killed.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::Ordering;

use terrane::page_table::{Format, X86_64};
use terrane::space::{Limit, MapRequest, Program, SpaceConfig};
use terrane::sync::Shared;
use terrane::vma::Prot;
use terrane::{AddrRange, PAGE_SIZE, addr};

use super::elf::{self, Header, Image};
use super::exit;
use super::process::{INFINITY, Process, RLIMIT_AS, RLIMIT_DATA, RLIMIT_MEMLOCK, RLIMIT_STACK};
use super::signal::{AlternateStack, minimum_stack};
use super::thread::{CurrentThread, current};
use crate::arch::{self, TrapFrame, interrupts};
use crate::errno::Errno;
use crate::fs;
use crate::mm::{self, KernelCpu, Object, Space};
use crate::user;

/// Bytes of arguments and environment at most, as on Linux with the usual stack, and of one of them.
const STRINGS_MAX: usize = 2 << 20;
const STRING_MAX: usize = 128 << 10;
/// Where a position-independent program begins.
const BASE: u64 = 0x5555_5555_4000;
/// Words on the stack of a program besides pointers to its strings, at most; and bytes of strings of the kernel's own, its path among them.
const POINTERS: usize = 64;
const STRINGS: u64 = 8192;
/// Scripts that are run by scripts.
const SCRIPTS: usize = 4;

/// Strings one after the other, each ended by a NUL.
#[derive(Default)]
pub struct Strings {
    bytes: Vec<u8>,
    count: usize,
}

impl Strings {
    /// Adds one.
    ///
    /// # Errors
    /// `E2BIG`, `ENOMEM`.
    pub fn push(&mut self, string: &[u8]) -> Result<(), Errno> {
        if string.len() >= STRING_MAX || self.bytes.len() + string.len() >= STRINGS_MAX {
            return Err(Errno::E2BIG);
        }
        self.bytes.try_reserve(string.len() + 1)?;
        self.bytes.extend_from_slice(string);
        self.bytes.push(0);
        self.count += 1;
        Ok(())
    }

    /// Reads the strings that an array of pointers at `at` leads to; none where `at` is 0.
    ///
    /// # Errors
    /// `EFAULT`, `E2BIG`, `ENOMEM`.
    pub fn read(at: u64) -> Result<Self, Errno> {
        let mut strings = Self::default();
        if at == 0 {
            return Ok(strings);
        }
        for nth in 0.. {
            let string = user::read_value::<u64>(at.wrapping_add(8 * nth))?;
            if string == 0 {
                break;
            }
            let string = user::read_string(string, STRING_MAX).map_err(|errno| match errno {
                Errno::ENAMETOOLONG => Errno::E2BIG,
                errno => errno,
            })?;
            strings.push(&string)?;
        }
        Ok(strings)
    }

    /// Each of them.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = &self.bytes[..];
        core::iter::from_fn(move || {
            let end = rest.iter().position(|&byte| byte == 0)?;
            let (string, behind) = rest.split_at(end);
            rest = &behind[1..];
            Some(string)
        })
    }
}

/// A program that is mapped, and not running yet.
struct Loaded {
    space: Arc<Space>,
    entry: u64,
    headers_at: u64,
    headers: usize,
    /// Zeros that belong behind what came from the file: address and length.
    zeros: Vec<(u64, u64)>,
    stack: AddrRange,
}

/// `execve`: on success the frame is the new program's.
///
/// # Errors
/// As `execve`'s: the old program goes on.
pub fn execve(frame: &mut TrapFrame, path: u64, arguments: u64, environment: u64) -> Result<u64, Errno> {
    let path = user::read_string(path, 4096)?;
    let arguments = Strings::read(arguments)?;
    let environment = Strings::read(environment)?;
    let program = fs::open_program(&path)?;
    run(frame, program, &path, arguments, &environment)
}

/// `execveat`.
///
/// # Errors
/// As `execveat`'s.
pub fn execveat(frame: &mut TrapFrame, args: [u64; 6]) -> Result<u64, Errno> {
    let [directory, path, arguments, environment, flags, _] = args;
    let path = user::read_string(path, 4096)?;
    let arguments = Strings::read(arguments)?;
    let environment = Strings::read(environment)?;
    let program = fs::open_program_at(directory, &path, flags)?;
    run(frame, program, &path, arguments, &environment)
}

/// Makes the process of the current thread run the program in `node`, which was opened as `name`.
///
/// # Errors
/// As `execve`'s.
pub fn run(
    frame: &mut TrapFrame,
    program: (fs::Node, Vec<u8>),
    name: &[u8],
    mut arguments: Strings,
    environment: &Strings,
) -> Result<u64, Errno> {
    let (mut node, mut path) = program;
    if arguments.count == 0 {
        // As in Linux since 5.18: there is always a name.
        arguments.push(b"")?;
    }
    let mut executed = copied(name)?;
    for _ in 0..SCRIPTS {
        let mut start = [0; 256];
        let object = node.object().ok_or(Errno::EACCES)?.clone();
        let len = read(&object, 0, &mut start)?;
        let Some((interpreter, argument)) = script(&start[..len]) else {
            let loaded = load(&object, &arguments, environment)?;
            let thread = current();
            become_loaded(&thread, frame, loaded, &arguments, environment, &executed, path)?;
            return Ok(0);
        };
        let mut longer = Strings::default();
        longer.push(interpreter)?;
        if !argument.is_empty() {
            longer.push(argument)?;
        }
        longer.push(&executed)?;
        for argument in arguments.iter().skip(1) {
            longer.push(argument)?;
        }
        arguments = longer;
        executed = copied(interpreter)?;
        (node, path) = fs::open_program(interpreter)?;
    }
    Err(Errno::ELOOP)
}

fn copied(bytes: &[u8]) -> Result<Vec<u8>, Errno> {
    let mut copy = Vec::new();
    copy.try_reserve_exact(bytes.len())?;
    copy.extend_from_slice(bytes);
    Ok(copy)
}

/// The interpreter of a script and its argument, from the script's first bytes.
fn script(start: &[u8]) -> Option<(&[u8], &[u8])> {
    let line = start.strip_prefix(b"#!")?;
    let line = line.split(|&byte| byte == b'\n').next()?.trim_ascii();
    let end = line.iter().position(|byte| matches!(byte, b' ' | b'\t')).unwrap_or(line.len());
    let (interpreter, argument) = line.split_at(end);
    (!interpreter.is_empty()).then_some((interpreter, argument.trim_ascii()))
}

fn read(object: &Object, offset: u64, buffer: &mut [u8]) -> Result<usize, Errno> {
    Ok(mm::with_cpu(|cpu| object.read(cpu, offset, buffer))?)
}

/// The limits of a process for a space: privileged processes may lock what they like, as on Linux.
pub fn apply_limits(process: &Process, space: &Space) {
    let limit = |resource: usize| Some(process.limit(resource)).filter(|&limit| limit != INFINITY);
    space.set_limit(Limit::Address, limit(RLIMIT_AS));
    space.set_limit(Limit::Data, limit(RLIMIT_DATA));
    space.set_limit(Limit::Stack, limit(RLIMIT_STACK));
    let locked = if process.is_privileged() { None } else { limit(RLIMIT_MEMLOCK) };
    space.set_limit(Limit::Locked, locked);
}

/// Maps the program in `object` into a new space.
fn load(object: &Object, arguments: &Strings, environment: &Strings) -> Result<Loaded, Errno> {
    let mut header = [0; elf::HEADER];
    let len = read(object, 0, &mut header)?;
    let header = Header::parse(&header[..len])?;
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(header.headers_len())?;
    bytes.resize(header.headers_len(), 0);
    if read(object, header.headers_at, &mut bytes)? < bytes.len() {
        return Err(Errno::ENOEXEC);
    }
    let image = header.image(&bytes)?;
    if image.has_interpreter {
        // As where the loader that it names does not exist.
        return Err(Errno::ENOENT);
    }
    let thread = current();
    let process = thread.process();
    let stack_limit = process.limit(RLIMIT_STACK);
    let stack_limit = Some(stack_limit).filter(|&limit| limit != INFINITY);
    let mut config = mm::space_config();
    config.map_top = SpaceConfig::for_program::<X86_64>(stack_limit).map_top;
    mm::with_cpu(|cpu| {
        let space = mm::new_space(cpu, config)?;
        apply_limits(process, &space);
        let mapped = map(cpu, &space, object, &header, &image, arguments, environment);
        mapped.map(|(zeros, stack, base)| Loaded {
            space,
            entry: header.entry.wrapping_add(base),
            headers_at: image.headers_at.wrapping_add(base),
            headers: header.headers,
            zeros,
            stack,
        })
    })
}

type Mapped = (Vec<(u64, u64)>, AddrRange, u64);

fn map(
    cpu: &KernelCpu,
    space: &Space,
    object: &Object,
    header: &Header,
    image: &Image,
    arguments: &Strings,
    environment: &Strings,
) -> Result<Mapped, Errno> {
    let (start, end) = image.range();
    let base = if header.is_relative { BASE.checked_sub(start).ok_or(Errno::ENOMEM)? } else { 0 };
    let end = end.checked_add(base).filter(|&end| end < X86_64::USER_END).ok_or(Errno::ENOMEM)?;
    let mut zeros = Vec::new();
    zeros.try_reserve_exact(image.segments.len())?;
    let mut code = AddrRange { start: 0, end: 0 };
    for segment in image.segments.iter().filter(|segment| segment.in_memory > 0) {
        let at = segment.addr + base;
        let first = addr::page_floor(at);
        let file_end = at + segment.in_file;
        let mapped_end = if segment.in_file > 0 { page_ceil(file_end)? } else { first };
        if mapped_end > first {
            let offset = addr::page_floor(segment.offset);
            let request = MapRequest::object(object, offset, mapped_end - first, segment.prot, false);
            space.map(cpu, request.fixed(first))?;
        }
        let memory_end = page_ceil(at + segment.in_memory)?;
        if memory_end > mapped_end {
            let request = MapRequest::anonymous(memory_end - mapped_end, segment.prot);
            space.map(cpu, request.fixed(mapped_end))?;
        }
        if segment.in_memory > segment.in_file && segment.in_file > 0 && file_end < mapped_end {
            let until = mapped_end.min(at + segment.in_memory);
            // The rest of the page, too, as in Linux: it is what the heap may begin with.
            let until = if segment.prot.contains(Prot::WRITE) { mapped_end } else { until };
            zeros.push((file_end, until - file_end));
        }
        if segment.prot.contains(Prot::EXEC) {
            code = AddrRange { start: at, end: at + segment.in_file };
        }
    }
    let pointers = 8 * (arguments.count + environment.count + POINTERS) as u64;
    let strings = (arguments.bytes.len() + environment.bytes.len()) as u64;
    let program = Program {
        stack_top: X86_64::USER_END,
        stack_bytes: strings + pointers + STRINGS,
        executable_stack: image.executable_stack,
        heap: page_ceil(end)?,
        code,
    };
    let stack = space.start_program(cpu, &program)?;
    Ok((zeros, stack, base))
}

fn page_ceil(value: u64) -> Result<u64, Errno> {
    addr::page_ceil(value).ok_or(Errno::ENOMEM)
}

/// Exchanges the programs. An error, once the other threads are told to end, is for a process that ends.
fn become_loaded(
    thread: &CurrentThread,
    frame: &mut TrapFrame,
    loaded: Loaded,
    arguments: &Strings,
    environment: &Strings,
    executed: &[u8],
    path: Vec<u8>,
) -> Result<(), Errno> {
    let process = thread.process();
    be_alone(thread)?;
    exit::leave_memory(thread);
    let old = process.set_space(Some(loaded.space.clone()));
    let own = thread.change(|own| own.space.replace(loaded.space.clone()));
    interrupts::without(|| mm::activate(Some(&loaded.space)));
    // The last reference takes the old space apart.
    drop(old);
    drop(own);
    if let Some(vfork) = thread.change(|own| own.vfork.take()) {
        vfork.done();
    }
    let written = finish(thread, frame, &loaded, arguments, environment, executed);
    let renewed = renew(thread, executed, path, arguments);
    if written.is_err() || renewed.is_err() {
        // There is nobody left to tell.
        exit::kill_process(process);
    }
    Ok(())
}

/// Ends the other threads, and makes this one the leader.
///
/// # Errors
/// `EINTR` when this thread is to end itself: it returns to where it does.
fn be_alone(thread: &CurrentThread) -> Result<(), Errno> {
    let process = thread.process();
    if process.execs.compare_exchange(0, thread.id(), Ordering::SeqCst, Ordering::SeqCst).is_err() {
        return Err(Errno::EINTR);
    }
    exit::tell_others(thread);
    let alone = || process.threads.load(Ordering::SeqCst) == 1;
    process.threads_changed.wait_uninterrupted(|| alone() || process.exit_status().is_some());
    let _tree = super::tree::tree();
    if process.exit_status().is_some() {
        process.execs.store(0, Ordering::SeqCst);
        return Err(Errno::EINTR);
    }
    thread.set_id(process.id());
    process.execs.store(0, Ordering::SeqCst);
    Ok(())
}

/// What of a process does not outlive its program.
fn renew(thread: &CurrentThread, executed: &[u8], path: Vec<u8>, arguments: &Strings) -> Result<(), Errno> {
    let process = thread.process();
    let actions = process.actions().copy();
    actions.reset();
    process.set_actions(Shared::try_new(actions)?);
    process.timers.forget_created();
    process.has_execed.store(true, Ordering::Relaxed);
    process.barriers.store(0, Ordering::Relaxed);
    let files = Shared::try_new(thread.files().fork()?)?;
    files.close_on_exec();
    thread.change(|own| own.files = Some(files));
    // SAFETY: it is the current thread.
    unsafe {
        thread.with_fpu(|fpu| {
            fpu.reset();
            interrupts::without(|| fpu.restore());
        });
    }
    thread.fs_base.store(0, Ordering::Relaxed);
    thread.gs_base.store(0, Ordering::Relaxed);
    arch::set_fs_base(0);
    arch::set_gs_base(0);
    let name = executed.rsplit(|&byte| byte == b'/').next().unwrap_or(executed);
    thread.change(|own| {
        own.alternate_stack = AlternateStack::default();
        own.name = [0; 16];
        let len = name.len().min(15);
        own.name[..len].copy_from_slice(&name[..len]);
    });
    let arguments = Shared::try_new(copied(&arguments.bytes)?)?;
    let before = process.arguments.lock().replace(arguments);
    drop(before);
    *process.program.lock() = Some(Shared::try_new(path)?);
    Ok(())
}

/// Writes what the program finds in its memory, and sets its registers.
fn finish(
    thread: &CurrentThread,
    frame: &mut TrapFrame,
    loaded: &Loaded,
    arguments: &Strings,
    environment: &Strings,
    executed: &[u8],
) -> Result<(), Errno> {
    for &(at, len) in &loaded.zeros {
        // As in Linux: what may not be written stays as the file has it.
        let _ = user::clear(at, len);
    }
    let mut sp = loaded.stack.end - 8;
    let mut put = |bytes: &[u8]| {
        sp -= bytes.len() as u64;
        user::write(sp, bytes).map(|()| sp)
    };
    put(&[0])?;
    let name = put(executed)?;
    let environment_at = put(&environment.bytes)?;
    let arguments_at = put(&arguments.bytes)?;
    let platform = put(b"x86_64\0")?;
    let mut random = [0; 16];
    random[..8].copy_from_slice(&arch::random().to_ne_bytes());
    random[8..].copy_from_slice(&arch::random().to_ne_bytes());
    let random = put(&random)?;
    let process = thread.process();
    let [uid, euid, ..] = process.user_ids();
    let [gid, egid, ..] = process.group_ids();
    let auxiliary: [[u64; 2]; 21] = [
        [51, minimum_stack(thread)],
        [16, hwcap()],
        [6, PAGE_SIZE],
        [17, 100],
        [3, loaded.headers_at],
        [4, 56],
        [5, loaded.headers as u64],
        [7, 0],
        [8, 0],
        [9, loaded.entry],
        [11, uid.into()],
        [12, euid.into()],
        [13, gid.into()],
        [14, egid.into()],
        [23, 0],
        [25, random],
        [26, 0],
        [31, name],
        [15, platform],
        // The part of `rseq`'s area that is in use, and its alignment.
        [27, 28],
        [28, 32],
    ];
    let mut words = Vec::new();
    let count = 1 + arguments.count + 1 + environment.count + 1 + 2 * auxiliary.len() + 2;
    words.try_reserve_exact(count)?;
    words.push(arguments.count as u64);
    for (strings, start) in [(arguments, arguments_at), (environment, environment_at)] {
        let mut at = start;
        for string in strings.iter() {
            words.push(at);
            at += string.len() as u64 + 1;
        }
        words.push(0);
    }
    words.extend(auxiliary.as_flattened());
    words.extend([0, 0]);
    let sp = (sp - 8 * count as u64) & !15;
    for (nth, chunk) in words.chunks(64).enumerate() {
        let mut bytes = [0; 512];
        for (bytes, word) in bytes.chunks_exact_mut(8).zip(chunk) {
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
        user::write(sp + 512 * nth as u64, &bytes[..8 * chunk.len()])?;
    }
    *frame = TrapFrame::user(loaded.entry, sp);
    Ok(())
}

/// `AT_HWCAP`: what the processor says of itself first.
fn hwcap() -> u64 {
    arch::cpu::cpuid(1, 0).edx.into()
}
