//! The helper: carries operations out on its own address space.
//!
//! It allocates nothing while it serves: all it needs is its stack, its static memory, and the shared memory.

use super::channel::{Message, Slot, ask, status};
use super::prepare::{self, FIRST_FILE, Unable, errno};
use super::probe::{self, Fault};
use crate::operation::{DATA, Op, byte, word};
use crate::script::{PROCESSES, Setup};
use core::ptr;
use core::time::Duration;

/// How long to wait before a look whether the referee is still there.
const PATIENCE: Duration = Duration::from_secs(2);

/// Serves as a helper; `arguments` are what [`Kernel::start`](super::Kernel::start) has added to the command. Returns only if that
/// cannot be, and says why.
pub fn serve(arguments: &[String]) -> String {
    let [fd, referee] = arguments else {
        return "it is started by ‘terrane referee’, not by hand".to_owned();
    };
    let (Ok(fd), Ok(referee)) = (fd.parse::<i32>(), referee.parse::<i32>()) else {
        return "it is started by ‘terrane referee’, not by hand".to_owned();
    };
    let size = size_of::<Slot>() * (PROCESSES + 1);
    // SAFETY: a new mapping of what the referee has prepared; a file that is shorter would raise a signal, and end us.
    let shared = unsafe {
        libc::mmap(ptr::null_mut(), size, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, fd, 0)
    };
    if shared == libc::MAP_FAILED {
        return "it is started by ‘terrane referee’, not by hand".to_owned();
    }
    // SAFETY: as many slots as the mapping has room for, for as long as the process lives; zeros are valid slots.
    let slots = unsafe { core::slice::from_raw_parts(shared.cast::<Slot>(), PROCESSES + 1) };
    let mut helper = Helper { slots, slot: 0, referee, buffer: vec![0; 256 << 10], unable: None };
    // SAFETY: plain calls; nobody else is in the process.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0);
        libc::signal(libc::SIGCHLD, libc::SIG_IGN);
    }
    helper.unable = if probe::install() {
        prepare::fill_around_arena(&mut helper.buffer).err()
    } else {
        Some(("catching signals", errno()))
    };
    helper.run()
}

struct Helper {
    slots: &'static [Slot],
    /// Which of them is ours.
    slot: usize,
    referee: i32,
    /// For texts of `/proc`.
    buffer: Vec<u8>,
    /// Why it cannot serve.
    unable: Option<Unable>,
}

fn exit() -> ! {
    // SAFETY: ends the process without running anything of the parent's.
    unsafe { libc::_exit(0) }
}

impl Helper {
    fn run(&mut self) -> ! {
        loop {
            let slot = &self.slots[self.slot];
            while !slot.await_request(PATIENCE) {
                // SAFETY: asks whether the process exists.
                if unsafe { libc::kill(self.referee, 0) } != 0 && errno() == libc::ESRCH {
                    exit();
                }
            }
            // SAFETY: it is our turn, and this is the only reference of this process.
            let message = unsafe { slot.message() };
            let last = message.kind == ask::EXIT;
            message.len = 0;
            self.answer(message);
            // A child answers for its own slot only: this one is its parent's.
            if ptr::eq(slot, &self.slots[self.slot]) {
                slot.answered();
            }
            if last {
                exit();
            }
        }
    }

    fn answer(&mut self, message: &mut Message) {
        let result = match message.kind {
            _ if self.unable.is_some() => {
                let (what, errno) = self.unable.unwrap_or_default();
                Answer::Unable(what, errno)
            }
            ask::FORK => match self.fork(message.words[0] as usize) {
                Some(answer) => answer,
                None => return,
            },
            ask::PREPARE => self.prepare(message),
            ask::EXIT => Answer::Value(0),
            kind => match Op::from_words(kind as usize, &message.words) {
                Some(op) => act(&op, message),
                None => Answer::Unable("an unknown operation", 0),
            },
        };
        message.extra = [0; 2];
        (message.status, message.value) = match result {
            Answer::Value(value) => (status::VALUE, value),
            Answer::Errno(errno) => (status::ERRNO, errno as u64),
            Answer::Fault(done, fault) => {
                message.extra = [fault.signal as u64, fault.code as u64];
                (status::SIGNAL, done)
            }
            Answer::Unable(what, errno) => {
                let len = what.len().min(DATA);
                message.data[..len].copy_from_slice(&what.as_bytes()[..len]);
                message.len = len as u64;
                (status::UNABLE, errno as u64)
            }
        };
    }

    /// Makes a process for the slot in word 0. Returns the answer in the parent, and `None` in the child.
    fn fork(&mut self, slot: usize) -> Option<Answer> {
        // SAFETY: a child with a copy of everything; there are no other threads whose locks it could miss.
        match unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } {
            0 => {
                self.slot = slot;
                None
            }
            -1 => Some(Answer::Unable("forking", errno())),
            child => Some(Answer::Value(child as u64)),
        }
    }

    /// Prepares this process for a script; answers with the numbers of its files.
    fn prepare(&mut self, message: &mut Message) -> Answer {
        let [start, pages, heap, memlock, mapped, _] = message.words;
        let optional = |word: u64| (word != u64::MAX).then_some(word);
        let setup = Setup { start, pages, heap, memlock: optional(memlock), mapped: optional(mapped) };
        match prepare::begin(&setup, &mut self.buffer) {
            Ok((inodes, memlock)) => {
                for (place, inode) in message.data.chunks_exact_mut(8).zip(inodes) {
                    place.copy_from_slice(&inode.to_le_bytes());
                }
                message.len = 8 * inodes.len() as u64;
                Answer::Value(memlock)
            }
            Err((what, errno)) => Answer::Unable(what, errno),
        }
    }
}

enum Answer {
    Value(u64),
    Errno(i32),
    Fault(u64, Fault),
    Unable(&'static str, i32),
}

fn returned(result: i64) -> Answer {
    if result == -1 { Answer::Errno(errno()) } else { Answer::Value(result as u64) }
}

macro_rules! call {
    ($number:expr $(, $argument:expr)*) => {
        // SAFETY: the operation was checked to stay inside the window, where nothing is that Rust knows of.
        returned(unsafe { libc::syscall($number $(, $argument)*) })
    };
}

fn descriptor(file: u64) -> i32 {
    i32::try_from(file).map_or(-1, |file| FIRST_FILE + file)
}

/// Carries an operation out.
fn act(op: &Op, message: &mut Message) -> Answer {
    match *op {
        Op::Map { addr, len, prot, flags, file, offset } => {
            call!(libc::SYS_mmap, addr, len, prot, flags, descriptor(file), offset)
        }
        Op::Unmap { addr, len } => call!(libc::SYS_munmap, addr, len),
        Op::Protect { addr, len, prot } => call!(libc::SYS_mprotect, addr, len, prot),
        Op::Remap { addr, old, new, flags, to } => call!(libc::SYS_mremap, addr, old, new, flags, to),
        Op::Brk { end } => call!(libc::SYS_brk, end),
        Op::Advise { addr, len, advice } => call!(libc::SYS_madvise, addr, len, advice),
        Op::ProcessAdvise { addr, len, and, for_len, advice } => {
            let ranges = [addr, len, and, for_len];
            // SAFETY: asks for a descriptor of this process.
            let me = unsafe { libc::syscall(libc::SYS_pidfd_open, libc::getpid(), 0) };
            let result = call!(libc::SYS_process_madvise, me, ranges.as_ptr(), 2, advice, 0);
            // SAFETY: the descriptor is ours.
            unsafe { libc::close(me as i32) };
            result
        }
        Op::Lock { addr, len } => call!(libc::SYS_mlock, addr, len),
        Op::Lock2 { addr, len, flags } => call!(libc::SYS_mlock2, addr, len, flags),
        Op::Unlock { addr, len } => call!(libc::SYS_munlock, addr, len),
        Op::LockAll { flags } => call!(libc::SYS_mlockall, flags),
        Op::UnlockAll {} => call!(libc::SYS_munlockall),
        Op::Sync { addr, len, flags } => call!(libc::SYS_msync, addr, len, flags),
        Op::Resident { addr, len } => {
            let result = call!(libc::SYS_mincore, addr, len, message.data.as_mut_ptr());
            if let Answer::Value(_) = result {
                // Only the lowest bit says something.
                message.len = len.div_ceil(terrane::PAGE_SIZE).min(DATA as u64);
                message.data[..message.len as usize].iter_mut().for_each(|byte| *byte &= 1);
            }
            result
        }
        Op::Seal { addr, len, flags } => call!(libc::SYS_mseal, addr, len, flags),
        Op::Load { addr, len } => {
            let len = (len as usize).min(DATA);
            // SAFETY: into the message; what is loaded is in the window.
            let (done, fault) = unsafe { probe::copy(message.data.as_mut_ptr().addr() as u64, addr, len) };
            message.len = done as u64;
            ended(done, fault, addr, len)
        }
        Op::Store { addr, len, seed } => {
            let len = (len as usize).min(DATA);
            message.data[..len].iter_mut().enumerate().for_each(|(n, place)| *place = byte(seed, n));
            // SAFETY: into the window; see `call`.
            let (done, fault) = unsafe { probe::copy(addr, message.data.as_ptr().addr() as u64, len) };
            ended(done, fault, addr, len)
        }
        Op::LoadWord { addr } => {
            // SAFETY: a load from the window.
            match unsafe { probe::load(addr) } {
                Ok(value) => {
                    message.data[..8].copy_from_slice(&value.to_le_bytes());
                    message.len = 8;
                    Answer::Value(8)
                }
                Err(fault) => ended(0, Some(fault), addr, 8),
            }
        }
        Op::StoreWord { addr, seed } => {
            // SAFETY: a store to the window; see `call`.
            match unsafe { probe::store(addr, word(seed)) } {
                Ok(()) => Answer::Value(8),
                Err(fault) => ended(0, Some(fault), addr, 8),
            }
        }
        Op::Truncate { file, len } => call!(libc::SYS_ftruncate, descriptor(file), len),
        Op::Write { file, offset, len, seed } => {
            let len = (len as usize).min(DATA);
            message.data[..len].iter_mut().enumerate().for_each(|(n, place)| *place = byte(seed, n));
            call!(libc::SYS_pwrite64, descriptor(file), message.data.as_ptr(), len, offset)
        }
        Op::Read { file, offset, len } => {
            let len = (len as usize).min(DATA);
            let result = call!(libc::SYS_pread64, descriptor(file), message.data.as_mut_ptr(), len, offset);
            if let Answer::Value(got) = result {
                message.len = got;
            }
            result
        }
        // The referee's side of these is in other requests.
        Op::Fork {} | Op::Switch { .. } | Op::Exit {} => {
            Answer::Unable("an operation that is none of ours", 0)
        }
    }
}

fn ended(done: usize, fault: Option<Fault>, addr: u64, len: usize) -> Answer {
    match fault {
        None => Answer::Value(done as u64),
        // The kernel names the byte, or the page, that could not be touched. Elsewhere the helper itself went wrong.
        Some(fault) if (addr & !0xfff..addr + len as u64).contains(&fault.addr) => {
            Answer::Fault(done as u64, fault)
        }
        Some(fault) => Answer::Unable("an access outside of the window raised a signal", fault.signal),
    }
}
