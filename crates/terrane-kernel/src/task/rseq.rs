//! Restartable sequences: a program's thread knows its CPU without a system call, and begins a sequence anew that was interrupted.

use super::signal::{self, Info, SIGSEGV};
use super::thread::{CurrentThread, current};
use crate::arch::{self, TrapFrame};
use crate::errno::Errno;
use crate::user;
use core::sync::atomic::Ordering;

/// What a thread has registered.
#[derive(Clone, Copy, Debug)]
pub struct Area {
    at: u64,
    len: u32,
    signature: u32,
}

const UNREGISTER: u64 = 1;
/// The least length, and the alignment.
const LEN: u32 = 32;
/// `cpu_id` where none is.
const UNINITIALIZED: u32 = u32::MAX;

/// `rseq`.
pub fn rseq(at: u64, len: u64, flags: u64, signature: u64) -> Result<u64, Errno> {
    let thread = current();
    let (len, signature) = (len as u32, signature as u32);
    let old = thread.private().rseq;
    if flags & UNREGISTER != 0 {
        let old = old.filter(|_| flags == UNREGISTER).ok_or(Errno::EINVAL)?;
        if old.at != at || old.len != len {
            return Err(Errno::EINVAL);
        }
        if old.signature != signature {
            return Err(Errno::EPERM);
        }
        user::write_value(at, [0u32, UNINITIALIZED])?;
        thread.change(|own| own.rseq = None);
        return Ok(0);
    }
    if flags != 0 {
        return Err(Errno::EINVAL);
    }
    if let Some(old) = old {
        let same = old.at == at && old.len == len;
        return Err(match (same, old.signature == signature) {
            (false, _) => Errno::EINVAL,
            (true, false) => Errno::EPERM,
            (true, true) => Errno::EBUSY,
        });
    }
    if !at.is_multiple_of(LEN.into()) || len < LEN {
        return Err(Errno::EINVAL);
    }
    user::read_value::<[u8; LEN as usize]>(at)?;
    user::write_value(at + 8, 0u64)?;
    thread.change(|own| own.rseq = Some(Area { at, len, signature }));
    thread.rseq_stale.store(true, Ordering::Relaxed);
    Ok(0)
}

/// Before a return to user mode, or a handler: says which CPU it is, and breaks off a sequence that was interrupted.
pub fn update(thread: &CurrentThread, frame: &mut TrapFrame) {
    let Some(area) = thread.private().rseq else { return };
    // What comes from here on makes it stale again, and `before_user` comes back.
    thread.rseq_stale.store(false, Ordering::Relaxed);
    if refresh(&area, frame).is_err() {
        thread.change(|own| own.rseq = None);
        signal::force(thread, Info::from_kernel(SIGSEGV));
    }
}

fn refresh(area: &Area, frame: &mut TrapFrame) -> Result<(), Errno> {
    let cpu = arch::cpu_index() as u32;
    user::write_value(area.at, [cpu, cpu])?;
    // One node; and a number that no other thread of the space has at the time: its CPU's.
    user::write_value(area.at + 20, [0u32, cpu])?;
    let sequence = user::read_value::<u64>(area.at + 8)?;
    if sequence == 0 {
        return Ok(());
    }
    let [version, start, length, abort] = user::read_value::<[u64; 4]>(sequence)?;
    if version as u32 != 0 {
        return Err(Errno::EINVAL);
    }
    if frame.rip.wrapping_sub(start) < length {
        let signature = user::read_value::<u32>(abort.wrapping_sub(4))?;
        if signature != area.signature || abort.wrapping_sub(start) < length {
            return Err(Errno::EINVAL);
        }
        frame.rip = abort;
    }
    user::write_value(area.at + 8, 0u64)
}
