//! The calls about memory: Terrane's, with what a program has in its registers.

use super::Answer;
use crate::errno::Errno;
use crate::mm::{self, KernelCpu, KernelHost, Space};
use crate::task::thread::current;
use crate::{fs, user};
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};
use terrane::AddrRange;
use terrane::Error;
use terrane::PAGE_SIZE;
use terrane::frame::NodeMask;
use terrane::page_table::{Format, X86_64};
use terrane::space::linux::OpenFile;
use terrane::space::{Policy, PolicyFlags, PolicyMode};
use terrane::vma::VmFlags;

const MAP_ANONYMOUS: u64 = 0x20;
const MAP_LOCKED: u64 = 0x2000;
const MAP_HUGETLB: u64 = 0x4_0000;

/// Runs `act` on the program's space.
fn with<R>(act: impl FnOnce(&Space, &KernelCpu) -> Result<R, Error>) -> Result<R, Errno> {
    let thread = current();
    Ok(mm::with_cpu(|cpu| act(thread.space(), cpu))?)
}

fn done(act: impl FnOnce(&Space, &KernelCpu) -> Result<(), Error>) -> Answer {
    with(act).map(|()| 0)
}

/// What `max_map_count` says: VMAs that a program may have.
pub static MAP_COUNT_MAX: AtomicU64 = AtomicU64::new(65530);

/// Whether the program may have `more` VMAs.
///
/// They are counted where they are, and a look at all of the counts is not for each call: the thread looks again after as many calls as cannot
/// reach the limit, with some for the others that may be at it too. So a program that nears the limit looks each time.
fn has_room(more: u64) -> bool {
    let thread = current();
    let checks = thread.private().maps_before_look;
    if checks > 0 {
        thread.change(|own| own.maps_before_look = checks - 1);
        return true;
    }
    let limit = MAP_COUNT_MAX.load(Ordering::Relaxed);
    let count = thread.space().map_count() as u64;
    let left = limit.saturating_sub(count);
    thread.change(|own| own.maps_before_look = (left / 128).min(64) as u32);
    count + more <= limit
}

const WRITE: u64 = 2;
const EXEC: u64 = 4;

fn refuses_new_code() -> bool {
    current().process().no_new_code.load(Ordering::Relaxed) != 0
}

/// Whether something in the range is not executable now, or would be writable too.
fn gains_code(addr: u64, len: u64, prot: u64) -> Result<bool, Errno> {
    if prot & WRITE != 0 {
        return Ok(true);
    }
    let mut at = addr;
    let end = addr.saturating_add(len);
    while at < end {
        let found = with(|space, cpu| {
            let pin = cpu.pin();
            Ok(space.mm().next_vma(&pin, at, end).map(|(_, seen)| (seen.range, seen.flags)))
        })?;
        let Some((range, flags)) = found else { break };
        if !flags.contains(VmFlags::EXEC) {
            return Ok(true);
        }
        at = range.end;
    }
    Ok(false)
}

/// Whether a call that changes `len` bytes at `addr` would divide a VMA: twice with `both`, else at either end.
fn divides(addr: u64, len: u64, both: bool) -> bool {
    let thread = current();
    let space = thread.space();
    let end = addr.saturating_add(len).next_multiple_of(PAGE_SIZE);
    mm::with_cpu(|cpu| {
        let pin = cpu.pin();
        let at = |at: u64| space.mm().vma_at(&pin, at).map(|(_, seen)| seen.range);
        let starts_in = at(addr).is_some_and(|range| range.start < addr);
        let ends_in = at(end.saturating_sub(1)).is_some_and(|range| range.end > end);
        if both { starts_in && at(addr).is_some_and(|range| range.end > end) } else { starts_in || ends_in }
    })
}

/// `mmap`.
pub fn mmap([addr, len, prot, flags, fd, offset]: [u64; 6]) -> Answer {
    if prot & (WRITE | EXEC) == WRITE | EXEC && refuses_new_code() {
        return Err(Errno::EACCES);
    }
    // As Linux: one more than there may be.
    if !has_room(0) && len != 0 {
        return Err(Errno::ENOMEM);
    }
    if flags & MAP_HUGETLB != 0 && flags & MAP_ANONYMOUS != 0 {
        // Of the pools of huge pages, none has any.
        let known = matches!(flags >> 26 & 0x3f, 0 | 21 | 30);
        return Err(if known && len != 0 { Errno::ENOMEM } else { Errno::EINVAL });
    }
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
        let flags = if mapped.secret { flags | MAP_LOCKED } else { flags };
        space.mmap(cpu, addr, len, prot, flags, Some(&file), offset)
    })
}

/// `munmap`.
pub fn munmap(addr: u64, len: u64) -> Answer {
    if !has_room(1) && divides(addr, len, true) {
        return Err(Errno::ENOMEM);
    }
    done(|space, cpu| space.unmap(cpu, addr, len))
}

/// `mprotect`.
pub fn mprotect(addr: u64, len: u64, prot: u64) -> Answer {
    if prot & EXEC != 0 && refuses_new_code() && gains_code(addr, len, prot)? {
        return Err(Errno::EACCES);
    }
    if !has_room(1) && divides(addr, len, false) {
        return Err(Errno::ENOMEM);
    }
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

/// `remap_file_pages`: maps another part of the file that is shown at `addr` there, as Linux does since it has no other way.
pub fn remap_file_pages([addr, len, prot, page, flags, _]: [u64; 6]) -> Answer {
    const NONBLOCK: u64 = 0x1_0000;
    const FIXED_SHARED: u64 = 0x11;
    const POPULATE: u64 = 0x8000;
    let (start, len) = (addr & !(PAGE_SIZE - 1), len & !(PAGE_SIZE - 1));
    if prot != 0 || start.checked_add(len).is_none_or(|end| end <= start) {
        return Err(Errno::EINVAL);
    }
    if page.checked_add(len / PAGE_SIZE).is_none_or(|end| end > u64::MAX / PAGE_SIZE) {
        return Err(Errno::EINVAL);
    }
    with(|space, cpu| {
        // From the first page on, one object, shared, without holes and alike.
        let mut at = start;
        let mut found = None;
        while at < start + len {
            let _steady = space.mm().share(cpu, AddrRange::new(at, start + len));
            let pin = cpu.pin();
            let (vma, seen) = space.mm().vma_at(&pin, at).ok_or(Error::Invalid)?;
            let object =
                vma.object().filter(|_| seen.flags.contains(VmFlags::SHARED)).ok_or(Error::Invalid)?;
            let flags = seen.flags;
            match &found {
                None => found = Some((object.clone(), flags)),
                Some((first, before)) if first.number() == object.number() && *before == flags => {}
                Some(_) => return Err(Error::Invalid),
            }
            at = seen.range.end;
        }
        let (object, seen) = found.ok_or(Error::Invalid)?;
        let has = |flag: VmFlags, bit: u64| if seen.contains(flag) { bit } else { 0 };
        let prot = has(VmFlags::READ, 1) | has(VmFlags::WRITE, 2) | has(VmFlags::EXEC, 4);
        let how = FIXED_SHARED | POPULATE | flags & NONBLOCK | has(VmFlags::LOCKED, 0x2000);
        let writable = seen.contains(VmFlags::MAYWRITE);
        let file = OpenFile::<KernelHost> { object: &object, readable: true, writable, append_only: false };
        space.mmap(cpu, start, len, prot, how, Some(&file), page * PAGE_SIZE)?;
        Ok(0)
    })
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
    const MERGEABLE: i32 = 12;
    const UNMERGEABLE: i32 = 13;
    // Nothing looks for equal pages, as on Linux until it is told to.
    if let MERGEABLE | UNMERGEABLE = advice as i32 {
        return advise_nothing(addr, len);
    }
    done(|space, cpu| space.madvise(cpu, addr, len, advice as i32))
}

/// The checks of an advice that has no effect.
fn advise_nothing(addr: u64, len: u64) -> Answer {
    let aligned = addr.is_multiple_of(PAGE_SIZE).then(|| len.checked_next_multiple_of(PAGE_SIZE)).flatten();
    let end = aligned.and_then(|len| addr.checked_add(len)).ok_or(Errno::EINVAL)?;
    let mut at = addr;
    while at < end {
        let next = with(|space, cpu| {
            let pin = cpu.pin();
            Ok(space.mm().vma_at(&pin, at).map(|(_, seen)| seen.range.end))
        })?;
        at = next.ok_or(Errno::ENOMEM)?;
    }
    Ok(0)
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
pub(super) fn nodes(at: u64, max: u64) -> Result<NodeMask, Errno> {
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
            // What is no page of its own there, but the one of zeros, is on the first.
            let node = with(|space, cpu| Ok(space.node_at(cpu, addr)))?;
            (node.unwrap_or(0) as i32, there)
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

/// `set_mempolicy_home_node`: the one node.
pub fn set_mempolicy_home_node(addr: u64, len: u64, node: u64, flags: u64) -> Answer {
    if !addr.is_multiple_of(PAGE_SIZE) || flags != 0 || node != 0 {
        return Err(Errno::EINVAL);
    }
    // What ends at the end of all addresses is empty, as on Linux.
    let len = len.checked_next_multiple_of(PAGE_SIZE).unwrap_or(0);
    let end = addr.checked_add(len).ok_or(Errno::EINVAL)?;
    // As Linux: memory without a policy is passed over, other policies than of bound memory have no home, and some memory must have one.
    let mut at = addr;
    let mut any = addr == end;
    while at < end {
        let next = with(|space, cpu| {
            let pin = cpu.pin();
            Ok(space.mm().next_vma(&pin, at, end).map(|(_, seen)| seen.range))
        })?;
        let Some(range) = next else { break };
        let policy = with(|space, cpu| space.policy_at(cpu, range.start))?;
        match policy.mode {
            PolicyMode::Default => {}
            PolicyMode::Bind => any = true,
            _ => return Err(Errno::EOPNOTSUPP),
        }
        at = range.end;
    }
    if any { Ok(0) } else { Err(Errno::ENOENT) }
}
