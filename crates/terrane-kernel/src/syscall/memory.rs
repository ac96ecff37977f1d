//! The calls about memory: Terrane's, with what a program has in its registers.

use super::Answer;
use crate::errno::Errno;
use crate::mm::{self, KernelCpu, KernelHost, Space};
use crate::task::thread::current;
use crate::{fs, user};
use alloc::vec::Vec;
use terrane::Error;
use terrane::PAGE_SIZE;
use terrane::frame::NodeMask;
use terrane::page_table::{Format, X86_64};
use terrane::space::linux::OpenFile;
use terrane::space::{Policy, PolicyFlags, PolicyMode};

const MAP_ANONYMOUS: u64 = 0x20;

/// Runs `act` on the program's space.
fn with<R>(act: impl FnOnce(&Space, &KernelCpu) -> Result<R, Error>) -> Result<R, Errno> {
    let thread = current();
    Ok(mm::with_cpu(|cpu| act(thread.space(), cpu))?)
}

fn done(act: impl FnOnce(&Space, &KernelCpu) -> Result<(), Error>) -> Answer {
    with(act).map(|()| 0)
}

/// `mmap`.
pub fn mmap([addr, len, prot, flags, fd, offset]: [u64; 6]) -> Answer {
    if flags & MAP_ANONYMOUS != 0 {
        return with(|space, cpu| space.mmap(cpu, addr, len, prot, flags, None, offset));
    }
    if !offset.is_multiple_of(PAGE_SIZE) {
        return Err(Errno::EINVAL);
    }
    let mapped = fs::mapping_of(fd, prot, flags)?;
    let Some(mapped) = mapped else {
        // `/dev/zero` is memory.
        return with(|space, cpu| space.mmap(cpu, addr, len, prot, flags | MAP_ANONYMOUS, None, 0));
    };
    with(|space, cpu| {
        let file = OpenFile::<KernelHost> {
            object: &mapped.object,
            readable: mapped.readable,
            writable: mapped.writable,
            append_only: false,
        };
        space.mmap(cpu, addr, len, prot, flags, Some(&file), offset)
    })
}

/// `munmap`.
pub fn munmap(addr: u64, len: u64) -> Answer {
    done(|space, cpu| space.unmap(cpu, addr, len))
}

/// `mprotect`.
pub fn mprotect(addr: u64, len: u64, prot: u64) -> Answer {
    done(|space, cpu| space.mprotect(cpu, addr, len, prot))
}

/// `pkey_mprotect`: with no key.
pub fn pkey_mprotect(addr: u64, len: u64, prot: u64, key: u64) -> Answer {
    if key as i32 == -1 { mprotect(addr, len, prot) } else { Err(Errno::EINVAL) }
}

/// `mremap`.
pub fn mremap(addr: u64, old: u64, new: u64, flags: u64, to: u64) -> Answer {
    with(|space, cpu| space.mremap(cpu, addr, old, new, flags, to))
}

/// `brk`.
pub fn brk(end: u64) -> Answer {
    with(|space, cpu| Ok(space.brk(cpu, end)))
}

/// `msync`.
pub fn msync(addr: u64, len: u64, flags: u64) -> Answer {
    done(|space, cpu| space.msync(cpu, addr, len, flags as u32))
}

/// Pages whose residency is asked for at a time.
const CHUNK: usize = 4096;

/// `mincore`.
pub fn mincore(addr: u64, len: u64, to: u64) -> Answer {
    if !addr.is_multiple_of(PAGE_SIZE) {
        return Err(Errno::EINVAL);
    }
    let end = addr.checked_add(len).filter(|&end| end <= X86_64::USER_END).ok_or(Errno::ENOMEM)?;
    let pages = (end - addr).div_ceil(PAGE_SIZE);
    if to.checked_add(pages).is_none_or(|end| end > X86_64::USER_END) {
        return Err(Errno::EFAULT);
    }
    let mut resident = Vec::new();
    resident.try_reserve_exact(CHUNK.min(pages as usize))?;
    let mut done = 0;
    while done < pages {
        let count = (pages - done).min(CHUNK as u64);
        resident.clear();
        resident.resize(count as usize, 0);
        let at = addr + done * PAGE_SIZE;
        with(|space, cpu| space.mincore(cpu, at, count * PAGE_SIZE, &mut resident))?;
        user::write(to + done, &resident)?;
        done += count;
    }
    Ok(0)
}

/// `madvise`.
pub fn madvise(addr: u64, len: u64, advice: u64) -> Answer {
    done(|space, cpu| space.madvise(cpu, addr, len, advice as i32))
}

/// `process_madvise`.
pub fn process_madvise([fd, vector, count, advice, flags, _]: [u64; 6]) -> Answer {
    /// `PIDFD_SELF_THREAD`, `PIDFD_SELF_THREAD_GROUP`.
    const SELF: [i32; 2] = [-10000, -10001];
    if flags as u32 != 0 || count > 1024 {
        return Err(Errno::EINVAL);
    }
    let mut ranges = Vec::new();
    ranges.try_reserve_exact(count as usize)?;
    for nth in 0..count {
        let [addr, len] = user::read_value::<[u64; 2]>(vector.wrapping_add(16 * nth))?;
        ranges.push((addr, len));
    }
    if SELF.contains(&(fd as i32)) {
        return with(|space, cpu| space.process_madvise(cpu, &ranges, advice as i32, false));
    }
    // There are no descriptors of processes.
    Err(Errno::EBADF)
}

/// `mlock`.
pub fn mlock(addr: u64, len: u64) -> Answer {
    done(|space, cpu| space.mlock(cpu, addr, len))
}

/// `mlock2`.
pub fn mlock2(addr: u64, len: u64, flags: u64) -> Answer {
    done(|space, cpu| space.mlock2(cpu, addr, len, flags as u32))
}

/// `munlock`.
pub fn munlock(addr: u64, len: u64) -> Answer {
    done(|space, cpu| space.munlock(cpu, addr, len))
}

/// `mlockall`.
pub fn mlockall(flags: u64) -> Answer {
    done(|space, cpu| space.mlockall(cpu, flags as u32))
}

/// `munlockall`.
pub fn munlockall() -> Answer {
    with(|space, cpu| {
        space.munlockall(cpu);
        Ok(0)
    })
}

/// `mseal`.
pub fn mseal(addr: u64, len: u64, flags: u64) -> Answer {
    done(|space, cpu| space.mseal(cpu, addr, len, flags))
}

/// Reads a set of nodes: `max` bits at `at`, of which the last does not count, as on Linux.
fn nodes(at: u64, max: u64) -> Result<NodeMask, Errno> {
    let bits = max.saturating_sub(1);
    if at == 0 || bits == 0 {
        return Ok(NodeMask(0));
    }
    if bits > 8 * PAGE_SIZE {
        return Err(Errno::EINVAL);
    }
    let mut mask = 0;
    for word in 0..bits.div_ceil(64) {
        let left = bits - 64 * word;
        let value = user::read_value::<u64>(at + 8 * word)?;
        let value = if left < 64 { value & ((1 << left) - 1) } else { value };
        if word > 0 && value != 0 || value >> 32 != 0 {
            return Err(Errno::EINVAL);
        }
        mask |= value as u32;
    }
    Ok(NodeMask(mask))
}

/// The policy with Linux's number `mode`: `MPOL_PREFERRED_MANY` and `MPOL_LOCAL` by those that come to the same on one node.
fn policy(mode: u64, nodes: NodeMask) -> Result<Policy, Errno> {
    /// `MPOL_F_STATIC_NODES`, `MPOL_F_RELATIVE_NODES`: how nodes are renumbered, which they are not here.
    const FLAGS: u64 = 3 << 14;
    let mode = match mode & 0xffff_ffff & !FLAGS {
        0 => PolicyMode::Default,
        1 if nodes.is_empty() => PolicyMode::Default,
        1 => PolicyMode::Preferred,
        2 => PolicyMode::Bind,
        3 => PolicyMode::Interleave,
        4 if nodes.is_empty() => PolicyMode::Default,
        5 if !nodes.is_empty() => PolicyMode::Preferred,
        _ => return Err(Errno::EINVAL),
    };
    Ok(Policy { mode, nodes })
}

/// `mbind`.
pub fn mbind([addr, len, mode, at, max, flags]: [u64; 6]) -> Answer {
    let flags = u32::try_from(flags).ok().and_then(PolicyFlags::from_bits).ok_or(Errno::EINVAL)?;
    let policy = policy(mode, nodes(at, max)?)?;
    done(|space, cpu| space.set_policy(cpu, addr, len, policy, flags))
}

/// `set_mempolicy`.
pub fn set_mempolicy(mode: u64, at: u64, max: u64) -> Answer {
    let policy = policy(mode, nodes(at, max)?)?;
    done(|space, cpu| space.set_own_policy(cpu, policy))
}

/// `get_mempolicy`.
pub fn get_mempolicy([mode, to, max, addr, flags, _]: [u64; 6]) -> Answer {
    const NODE: u64 = 1;
    const ADDR: u64 = 2;
    const ALLOWED: u64 = 4;
    if flags & !(NODE | ADDR | ALLOWED) != 0 || flags & ALLOWED != 0 && flags & (NODE | ADDR) != 0 {
        return Err(Errno::EINVAL);
    }
    let there = NodeMask(1);
    if to != 0 && max < 1 {
        return Err(Errno::EINVAL);
    }
    let (number, nodes) = match flags {
        ALLOWED => (0, there),
        0 if addr != 0 => return Err(Errno::EINVAL),
        0 => with(|space, _| Ok(space.own_policy())).map(|policy| (policy.mode as i32, policy.nodes))?,
        ADDR => {
            with(|space, cpu| space.policy_at(cpu, addr)).map(|policy| (policy.mode as i32, policy.nodes))?
        }
        flags if flags == NODE | ADDR => {
            user::read_value::<u8>(addr)?;
            let node = with(|space, cpu| Ok(space.node_at(cpu, addr)))?;
            (node.ok_or(Errno::EFAULT)? as i32, there)
        }
        _ => return Err(Errno::EINVAL),
    };
    if mode != 0 {
        user::write_value(mode, number)?;
    }
    if to != 0 {
        user::write_value(to, u64::from(nodes.0))?;
        let rest = (max.saturating_sub(1)).div_ceil(64).saturating_sub(1);
        user::clear(to + 8, 8 * rest.min(512))?;
    }
    Ok(0)
}
