//! Capabilities and the calls that want them. Root has all of them, and they do nothing but be told.

use super::Answer;
use crate::errno::Errno;
use crate::task::thread::current;
use crate::task::tree::tree;
use crate::user;

/// The capabilities that there are: those of Linux 6.18.
const ALL: u64 = (1 << 41) - 1;
const VERSION_1: u32 = 0x1998_0330;
const VERSION_2: u32 = 0x2007_1026;
const VERSION_3: u32 = 0x2008_0522;

/// Reads the header of `capget` and `capset`: how many groups of 32 bits there are, and of whom; `None` for a version that nobody knows,
/// which is told which there is.
fn header(at: u64) -> Result<Option<(usize, u32)>, Errno> {
    let [version, id] = user::read_value::<[u32; 2]>(at)?;
    let groups = match version {
        VERSION_1 => 1,
        VERSION_2 | VERSION_3 => 2,
        _ => {
            user::write_value(at, VERSION_3)?;
            return Ok(None);
        }
    };
    if (id as i32) < 0 {
        return Err(Errno::EINVAL);
    }
    Ok(Some((groups, id)))
}

/// `capget`.
pub fn capget(header_at: u64, to: u64) -> Answer {
    let Some((groups, id)) = header(header_at)? else {
        return if to == 0 { Ok(0) } else { Err(Errno::EINVAL) };
    };
    let own = current().process().clone();
    let privileged = match id {
        0 => own.is_privileged(),
        id => tree().thread(id).ok_or(Errno::ESRCH)?.process().is_privileged(),
    };
    let set = if privileged { ALL } else { 0 };
    if to != 0 {
        for group in 0..groups {
            let part = (set >> (32 * group)) as u32;
            // Effective, permitted, inheritable.
            user::write_value(to.wrapping_add(12 * group as u64), [part, part, 0])?;
        }
    }
    Ok(0)
}

/// `capset`: what is there may be asked for, and given up without effect.
pub fn capset(header_at: u64, from: u64) -> Answer {
    let Some((groups, id)) = header(header_at)? else { return Err(Errno::EINVAL) };
    let thread = current();
    if id != 0 && id != thread.id() {
        return Err(Errno::EPERM);
    }
    let allowed = if thread.process().is_privileged() { ALL } else { 0 };
    for group in 0..groups {
        let [effective, permitted, _] = user::read_value::<[u32; 3]>(from.wrapping_add(12 * group as u64))?;
        let part = (allowed >> (32 * group)) as u32;
        if permitted & !part != 0 || effective & !permitted != 0 {
            return Err(Errno::EPERM);
        }
    }
    Ok(0)
}

/// `setgroups`: there are no further groups, and what is set has no effect.
pub fn setgroups(count: u64, from: u64) -> Answer {
    if !current().process().is_privileged() {
        return Err(Errno::EPERM);
    }
    if count as u32 > 65536 {
        return Err(Errno::EINVAL);
    }
    for nth in 0..u64::from(count as u32) {
        user::read_value::<u32>(from.wrapping_add(4 * nth))?;
    }
    Ok(0)
}

/// `ioprio_set`: taken and ignored.
pub fn ioprio_set(which: u64, _: u64, value: u64) -> Answer {
    let class = value as u32 >> 13;
    if !(1..=3).contains(&which) || class > 3 || value as u32 & 0x1fff > 7 && class != 0 {
        return Err(Errno::EINVAL);
    }
    Ok(0)
}

/// `ioprio_get`: the usual.
pub fn ioprio_get(which: u64, _: u64) -> Answer {
    if (1..=3).contains(&which) { Ok(2 << 13 | 4) } else { Err(Errno::EINVAL) }
}

/// Calls that change the machine, which is the command line's to describe: as for a program that may not, or for what is not there.
pub fn refused(number: u64, args: [u64; 6]) -> Answer {
    const VHANGUP: u64 = 153;
    const SWAPON: u64 = 167;
    const SWAPOFF: u64 = 168;
    match number {
        // There is no terminal to hang up.
        VHANGUP => Ok(0),
        SWAPON | SWAPOFF => {
            user::read_string(args[0], 4096)?;
            Err(Errno::EINVAL)
        }
        _ => Err(Errno::EPERM),
    }
}
