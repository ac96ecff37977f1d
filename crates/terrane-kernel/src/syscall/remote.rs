//! Calls about another process: its memory, and descriptors that stand for it.
//!
//! Memory of another process is reached by going there: the thread runs the other space while it copies ([`in_space`]), so that the copies,
//! their faults and the scheduler see one and the same space. Bytes go through a buffer of the kernel's.

use super::Answer;
use crate::arch::interrupts;
use crate::errno::Errno;
use crate::fs;
use crate::fs::buffers::{Buffers, PIECE};
use crate::mm::{self, Space};
use crate::task::process::Process;
use crate::task::signal::{self, Info, SI_USER, SIGKILL};
use crate::task::thread::current;
use crate::task::tree::tree;
use crate::user;
use alloc::sync::Arc;
use alloc::vec::Vec;
use terrane::sync::Shared;

/// `PIDFD_SELF_THREAD`, `PIDFD_SELF_THREAD_GROUP`.
const SELF: [i32; 2] = [-10000, -10001];

/// Runs `act` in another space: what it copies from and to programs is there. It may block.
pub fn in_space<R>(space: &Arc<Space>, act: impl FnOnce() -> R) -> R {
    let go = |to: Arc<Space>| {
        let before = current().change(|own| own.space.replace(to));
        interrupts::without(|| mm::activate(current().private().space.as_ref()));
        before
    };
    let own = go(space.clone());
    let result = act();
    // The thread had a space, and has it again. The last reference may take the other one apart: nobody runs it by now.
    if let Some(own) = own {
        drop(go(own));
    }
    result
}

/// The process with this number.
///
/// # Errors
/// `ESRCH`; `EPERM` for one that is not the caller's to look into.
fn process(id: u64) -> Result<Shared<Process>, Errno> {
    let process = tree().process(id as u32).map(|node| node.process.clone()).ok_or(Errno::ESRCH)?;
    allowed(&process)?;
    Ok(process)
}

fn allowed(process: &Process) -> Result<(), Errno> {
    let thread = current();
    let own = thread.process();
    let [user, group] = [own.user_ids()[0], own.group_ids()[0]];
    let same =
        process.user_ids().iter().all(|&id| id == user) && process.group_ids().iter().all(|&id| id == group);
    if own.is_privileged() || same { Ok(()) } else { Err(Errno::EPERM) }
}

fn space_of(process: &Process) -> Result<Arc<Space>, Errno> {
    process.space().ok_or(Errno::ESRCH)
}

/// `process_vm_readv` and `process_vm_writev`.
pub fn process_vm([id, local, local_count, remote, remote_count, flags]: [u64; 6], writes: bool) -> Answer {
    if flags != 0 {
        return Err(Errno::EINVAL);
    }
    let local = Buffers::vector(local, local_count)?;
    if local.len() == 0 {
        return Ok(0);
    }
    let remote = Buffers::far_vector(remote, remote_count)?;
    let total = local.len().min(remote.len());
    if total == 0 {
        return Ok(0);
    }
    let space = space_of(&*process(id)?)?;
    let mut piece = local.piece(PIECE)?;
    let mut done = 0;
    while done < total {
        let want = (total - done).min(piece.len() as u64) as usize;
        let part = &mut piece[..want];
        let put = if writes {
            let got = local.read(done, part);
            in_space(&space, || remote.write(done, &part[..got]))
        } else {
            let got = in_space(&space, || remote.read(done, part));
            local.write(done, &part[..got])
        };
        done += put as u64;
        if put < want {
            break;
        }
    }
    if done == 0 { Err(Errno::EFAULT) } else { Ok(done) }
}

/// Copies between a buffer of the kernel's and the memory of a process at `at` (`/proc/PID/mem`); how many bytes.
///
/// # Errors
/// `EIO` where nothing can be read or written.
pub fn memory(space: &Arc<Space>, at: u64, bytes: &mut [u8], writes: bool) -> Result<usize, Errno> {
    let Ok(buffers) = Buffers::far_one(at, bytes.len() as u64) else { return Err(Errno::EIO) };
    let done = in_space(space, || if writes { buffers.write(0, bytes) } else { buffers.read(0, bytes) });
    if done == 0 && !bytes.is_empty() { Err(Errno::EIO) } else { Ok(done) }
}

/// `process_madvise`.
pub fn process_madvise([fd, vector, count, advice, flags, _]: [u64; 6]) -> Answer {
    if flags as u32 != 0 || count > 1024 {
        return Err(Errno::EINVAL);
    }
    let mut ranges = Vec::new();
    ranges.try_reserve_exact(count as usize)?;
    for nth in 0..count {
        let [addr, len] = user::read_value::<[u64; 2]>(vector.wrapping_add(16 * nth))?;
        ranges.push((addr, len));
    }
    let process = by_descriptor(fd)?;
    allowed(&process)?;
    let space = space_of(&process)?;
    let own = Arc::ptr_eq(&space, current().space());
    Ok(mm::with_cpu(|cpu| space.process_madvise(cpu, &ranges, advice as i32, !own))?)
}

/// The process that a descriptor stands for.
fn by_descriptor(fd: u64) -> Result<Shared<Process>, Errno> {
    if SELF.contains(&(fd as i32)) { Ok(current().process().clone()) } else { fs::process_of(fd as i32) }
}

/// `process_mrelease`: what ends gives its memory back by itself, so there is only to look.
pub fn process_mrelease(fd: u64, flags: u64) -> Answer {
    if flags as u32 != 0 {
        return Err(Errno::EINVAL);
    }
    let process = by_descriptor(fd)?;
    if process.space().is_none() {
        return Err(Errno::ESRCH);
    }
    if process.exit_status().is_none() {
        return Err(Errno::EINVAL);
    }
    Ok(0)
}

/// `pidfd_open`.
pub fn pidfd_open(id: u64, flags: u64) -> Answer {
    const NONBLOCK: u64 = 0o4000;
    const THREAD: u64 = 0o200;
    if flags & 0xffff_ffff & !(NONBLOCK | THREAD) != 0 || id as i32 <= 0 {
        return Err(Errno::EINVAL);
    }
    let tree = tree();
    let process = match tree.process(id as u32) {
        Some(node) => node.process.clone(),
        None => match tree.thread(id as u32) {
            Some(thread) if flags & THREAD != 0 => thread.process().clone(),
            Some(_) => return Err(Errno::ENOENT),
            None => return Err(Errno::ESRCH),
        },
    };
    drop(tree);
    fs::open_process(process, flags as u32 & 0o4000)
}

/// `pidfd_send_signal`.
pub fn pidfd_send_signal(fd: u64, number: u64, info: u64, flags: u64) -> Answer {
    if flags as u32 & !7 != 0 {
        return Err(Errno::EINVAL);
    }
    let process = by_descriptor(fd)?;
    let number = number as u32;
    if number > signal::COUNT {
        return Err(Errno::EINVAL);
    }
    let mut told = Info::from_process(number, SI_USER, current().process().id());
    if info != 0 {
        let words = user::read_value::<[u32; 4]>(info)?;
        if words[0] != number {
            return Err(Errno::EINVAL);
        }
        told.code = words[2] as i32;
        told.words = user::read_value::<[u64; 4]>(info + 16)?;
    }
    let tree = tree();
    let node = tree.process(process.id()).filter(|node| Shared::ptr_eq(&node.process, &process));
    let node = node.filter(|node| !node.is_zombie()).ok_or(Errno::ESRCH)?;
    if number != 0 {
        if number == SIGKILL {
            told.words = [0; 4];
        }
        signal::send_to_process(&tree, &node.process, told)?;
    }
    Ok(0)
}

/// `move_pages`: there is one node, and everything that is in memory is on it.
pub fn move_pages([id, count, pages, nodes, status, flags]: [u64; 6]) -> Answer {
    const MOVE: u64 = 2;
    const MOVE_ALL: u64 = 4;
    if flags & 0xffff_ffff & !(MOVE | MOVE_ALL) != 0 {
        return Err(Errno::EINVAL);
    }
    let space = match id as u32 {
        0 => current().space().clone(),
        _ => space_of(&*process(id)?)?,
    };
    for nth in 0..count {
        let addr = user::read_value::<u64>(pages.wrapping_add(8 * nth))?;
        if nodes != 0 {
            match user::read_value::<i32>(nodes.wrapping_add(4 * nth))? {
                0 => {}
                _ => return Err(Errno::ENODEV),
            }
        }
        let mut there = [0];
        let at = addr & !4095;
        let found = mm::with_cpu(|cpu| match space.mincore(cpu, at, 4096, &mut there) {
            Err(_) => -Errno::EFAULT.0,
            Ok(()) if space.node_at(cpu, at).is_none() => -Errno::ENOENT.0,
            Ok(()) => 0,
        });
        user::write_value(status.wrapping_add(4 * nth), found)?;
    }
    Ok(0)
}

/// `migrate_pages`: from the one node to the one node.
pub fn migrate_pages(id: u64, max: u64, old: u64, new: u64) -> Answer {
    super::memory::nodes(old, max)?;
    let new = super::memory::nodes(new, max)?;
    if id as u32 != 0 {
        process(id)?;
    }
    if new.0 & 1 == 0 { Err(Errno::EINVAL) } else { Ok(0) }
}
