//! Shared memory of System V: `shmget` and its kin. A segment is a file without a name; its attachments are mappings of that, and are counted as
//! such, so that nothing is to be done when a process forks or ends.

use super::Answer;
use crate::arch;
use crate::errno::Errno;
use crate::fs::{self, Node};
use crate::mm::{self, KernelHost};
use crate::sync::Mutex;
use crate::task::thread::current;
use crate::user;
use alloc::vec::Vec;
use terrane::page_table::{Format, X86_64};
use terrane::space::linux::OpenFile;
use terrane::{AddrRange, PAGE_SIZE};

struct Segment {
    id: u32,
    /// 0 for one that nobody finds by its key.
    key: u32,
    file: Node,
    size: u64,
    mode: u32,
    /// Who has made it, who owns it: user and group.
    maker: [u32; 2],
    owner: [u32; 2],
    /// The process that made it, and the one that attached or detached it last.
    processes: [u32; 2],
    /// Attached, detached, changed: in seconds since 1970.
    times: [u64; 3],
    /// It goes with its last attachment.
    removed: bool,
}

static SEGMENTS: Mutex<Vec<Segment>> = Mutex::new(Vec::new());

const CREATE: u32 = 0o1000;
const EXCLUSIVE: u32 = 0o2000;
/// Segments at most (`SHMMNI`).
const MOST: usize = 4096;
/// In `shm_perm.mode`: to be removed, locked.
const DEST: u32 = 0o1000;

fn seconds() -> u64 {
    arch::realtime() / 1_000_000_000
}

impl Segment {
    fn attachments(&self) -> u64 {
        self.file.object().map_or(0, |object| object.lock_mappings().len() as u64)
    }

    fn may(&self, wanted: u32) -> Result<(), Errno> {
        let process = current().process().clone();
        let (user, group) = (process.user_ids()[1], process.group_ids()[1]);
        let shift = match () {
            () if user == self.owner[0] || user == self.maker[0] => 6,
            () if group == self.owner[1] || group == self.maker[1] => 3,
            () => 0,
        };
        let allowed = process.is_privileged() || wanted & !(self.mode >> shift) & 7 == 0;
        if allowed { Ok(()) } else { Err(Errno::EACCES) }
    }

    fn is_own(&self) -> bool {
        let process = current().process().clone();
        let user = process.user_ids()[1];
        process.is_privileged() || user == self.owner[0] || user == self.maker[0]
    }
}

/// Drops segments that were removed and that nobody has attached.
fn sweep(segments: &mut Vec<Segment>) {
    segments.retain(|segment| !segment.removed || segment.attachments() > 0);
}

fn find(segments: &mut [Segment], id: u32) -> Result<&mut Segment, Errno> {
    segments.iter_mut().find(|segment| segment.id == id).ok_or(Errno::EINVAL)
}

/// `shmget`.
pub fn shmget(key: u64, size: u64, flags: u64) -> Answer {
    const HUGE: u32 = 0o4000;
    let (key, flags) = (key as u32, flags as u32);
    let mut segments = SEGMENTS.lock();
    sweep(&mut segments);
    if key != 0
        && let Some(segment) = segments.iter().find(|segment| segment.key == key && !segment.removed)
    {
        if flags & CREATE != 0 && flags & EXCLUSIVE != 0 {
            return Err(Errno::EEXIST);
        }
        segment.may((flags >> 6 | flags >> 3 | flags) & 7)?;
        if size > segment.size {
            return Err(Errno::EINVAL);
        }
        return Ok(segment.id.into());
    }
    if key != 0 && flags & CREATE == 0 {
        return Err(Errno::ENOENT);
    }
    // There is no pool of huge pages.
    if flags & HUGE != 0 {
        let known = matches!(flags >> 26, 0 | 21 | 30);
        return Err(if known && size > 0 { Errno::ENOMEM } else { Errno::EINVAL });
    }
    if size == 0 || size > i64::MAX as u64 - PAGE_SIZE {
        return Err(Errno::EINVAL);
    }
    if segments.len() >= MOST {
        return Err(Errno::ENOSPC);
    }
    segments.try_reserve(1)?;
    let mut id = segments.iter().map(|segment| segment.id + 1).max().unwrap_or(0);
    while segments.iter().any(|segment| segment.id == id) {
        id = (id + 1) & 0x7fff_ffff;
    }
    let file = fs::shared_memory(key, size.next_multiple_of(PAGE_SIZE))?;
    let process = current().process().clone();
    let owner = [process.user_ids()[1], process.group_ids()[1]];
    segments.push(Segment {
        id,
        key,
        file,
        size,
        mode: flags & 0o777,
        maker: owner,
        owner,
        processes: [process.id(), 0],
        times: [0, 0, seconds()],
        removed: false,
    });
    Ok(id.into())
}

/// `shmat`.
pub fn shmat(id: u64, addr: u64, flags: u64) -> Answer {
    const READ_ONLY: u32 = 0o10000;
    const ROUND: u32 = 0o20000;
    const REMAP: u32 = 0o40000;
    const EXECUTE: u32 = 0o100000;
    let flags = flags as u32;
    if (id as i32) < 0 {
        return Err(Errno::EINVAL);
    }
    let addr = if flags & ROUND != 0 { addr & !(PAGE_SIZE - 1) } else { addr };
    if !addr.is_multiple_of(PAGE_SIZE) || addr == 0 && flags & REMAP != 0 {
        return Err(Errno::EINVAL);
    }
    let (file, size) = {
        let mut segments = SEGMENTS.lock();
        sweep(&mut segments);
        let segment = find(&mut segments, id as u32)?;
        segment.may(if flags & READ_ONLY != 0 { 4 } else { 6 } | u32::from(flags & EXECUTE != 0))?;
        (segment.file.clone(), segment.size)
    };
    let object = file.object().ok_or(Errno::EINVAL)?;
    let prot = 1 | if flags & READ_ONLY == 0 { 2 } else { 0 } | if flags & EXECUTE != 0 { 4 } else { 0 };
    const SHARED: u64 = 1;
    const FIXED: u64 = 0x10;
    const NO_REPLACE: u64 = 0x10_0000;
    let place = match addr {
        0 => 0,
        _ if flags & REMAP != 0 => FIXED,
        _ => NO_REPLACE,
    };
    let file = OpenFile::<KernelHost> {
        object,
        readable: true,
        writable: flags & READ_ONLY == 0,
        append_only: false,
    };
    let thread = current();
    let mapped =
        mm::with_cpu(|cpu| thread.space().mmap(cpu, addr, size, prot, SHARED | place, Some(&file), 0));
    let at = mapped.map_err(|error| match Errno::from(error) {
        Errno::EEXIST => Errno::EINVAL,
        errno => errno,
    })?;
    if let Ok(segment) = find(&mut SEGMENTS.lock(), id as u32) {
        segment.times[0] = seconds();
        segment.processes[1] = thread.process().id();
    }
    Ok(at)
}

/// `shmdt`: unmaps what is left of the attachment at `addr`.
pub fn shmdt(addr: u64) -> Answer {
    if !addr.is_multiple_of(PAGE_SIZE) || addr >= X86_64::USER_END {
        return Err(Errno::EINVAL);
    }
    let thread = current();
    let space = thread.space();
    let mut segments = SEGMENTS.lock();
    let mut found: Option<(u64, u64)> = None;
    let mut at = addr;
    loop {
        // A part of the attachment: a segment's pages, where they would lie if it began at `addr`.
        let part = mm::with_cpu(|cpu| {
            let _steady = space.mm().share(cpu, AddrRange::new(addr, X86_64::USER_END));
            let pin = cpu.pin();
            let limit = found.map_or(u64::MAX, |(_, size)| addr.saturating_add(size));
            let (vma, seen) = space.mm().next_vma(&pin, at, limit)?;
            let number = vma.object().map_or(0, |object| object.number());
            Some((seen.range, number, seen.index_of(seen.range.start)))
        });
        let Some((range, number, index)) = part else { break };
        at = range.end;
        let segment = segments
            .iter_mut()
            .find(|segment| segment.file.object().is_some_and(|object| object.number() == number));
        let Some(segment) = segment else {
            if found.is_none() && range.start > addr.saturating_add(MOST_PAGES << 12) {
                break;
            }
            continue;
        };
        let begins = range.start.checked_sub(index << 12) == Some(addr);
        if !begins || found.is_some_and(|(other, _)| other != number) {
            continue;
        }
        if found.is_none() {
            segment.times[1] = seconds();
            segment.processes[1] = thread.process().id();
        }
        found = Some((number, segment.size.next_multiple_of(PAGE_SIZE)));
        mm::with_cpu(|cpu| space.unmap(cpu, range.start, range.end - range.start))?;
    }
    sweep(&mut segments);
    if found.is_some() { Ok(0) } else { Err(Errno::EINVAL) }
}

/// How far from its beginning the first part of an attachment is looked for, in pages.
const MOST_PAGES: u64 = 1 << 20;

/// `shmctl`.
pub fn shmctl(id: u64, command: u64, at: u64) -> Answer {
    const REMOVE: u32 = 0;
    const SET: u32 = 1;
    const STAT: u32 = 2;
    const INFO: u32 = 3;
    const LOCK: u32 = 11;
    const UNLOCK: u32 = 12;
    const SHM_STAT: u32 = 13;
    const SHM_INFO: u32 = 14;
    const SHM_STAT_ANY: u32 = 15;
    let command = command as u32 & !0x100;
    if (id as i32) < 0 {
        return Err(Errno::EINVAL);
    }
    let mut segments = SEGMENTS.lock();
    sweep(&mut segments);
    let last = segments.len().saturating_sub(1) as u64;
    match command {
        INFO => {
            user::write_value(
                at,
                [u64::MAX - (1 << 24), 1, MOST as u64, MOST as u64, u64::MAX - (1 << 24), 0, 0, 0, 0],
            )?;
            Ok(last)
        }
        SHM_INFO => {
            let pages: u64 = segments.iter().map(|segment| segment.size.div_ceil(PAGE_SIZE)).sum();
            let resident: usize = segments
                .iter()
                .filter_map(|segment| segment.file.object())
                .map(|object| object.resident())
                .sum();
            user::write_value(at, [segments.len() as u64, pages, resident as u64, 0, 0, 0])?;
            Ok(last)
        }
        STAT | SHM_STAT | SHM_STAT_ANY => {
            let segment = if command == STAT {
                &*find(&mut segments, id as u32)?
            } else {
                segments.get(id as usize).ok_or(Errno::EINVAL)?
            };
            if command != SHM_STAT_ANY {
                segment.may(4)?;
            }
            let mode = segment.mode | if segment.removed { DEST } else { 0 };
            let key = if segment.removed { 0 } else { segment.key };
            let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
            let [attached, detached, changed] = segment.times;
            user::write_value(
                at,
                [
                    pair(key, segment.owner[0]),
                    pair(segment.owner[1], segment.maker[0]),
                    pair(segment.maker[1], mode),
                    0,
                    0,
                    0,
                    segment.size,
                    attached,
                    detached,
                    changed,
                    pair(segment.processes[0], segment.processes[1]),
                    segment.attachments(),
                    0,
                    0,
                ],
            )?;
            Ok(if command == STAT { 0 } else { segment.id.into() })
        }
        SET => {
            let [key_uid, gid, cuid_mode] = user::read_value::<[u64; 3]>(at)?;
            let segment = find(&mut segments, id as u32)?;
            if !segment.is_own() {
                return Err(Errno::EPERM);
            }
            segment.owner = [(key_uid >> 32) as u32, gid as u32];
            segment.mode = (cuid_mode >> 32) as u32 & 0o777;
            segment.times[2] = seconds();
            Ok(0)
        }
        REMOVE => {
            let segment = find(&mut segments, id as u32)?;
            if !segment.is_own() {
                return Err(Errno::EPERM);
            }
            segment.removed = true;
            sweep(&mut segments);
            Ok(0)
        }
        // In memory anyway, but for what reclaim swaps out.
        LOCK | UNLOCK => {
            let segment = find(&mut segments, id as u32)?;
            if segment.is_own() { Ok(0) } else { Err(Errno::EPERM) }
        }
        _ => Err(Errno::EINVAL),
    }
}
