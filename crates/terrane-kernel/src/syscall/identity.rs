//! Who a process is: numbers, groups, sessions, users.

use super::Answer;
use crate::errno::Errno;
use crate::task::exec;
use crate::task::thread::current;
use crate::task::tree::tree;
use crate::user;
use core::sync::atomic::Ordering;

/// `getpid`.
pub fn getpid() -> Answer {
    Ok(current().process().id().into())
}

/// `gettid`.
pub fn gettid() -> Answer {
    Ok(current().id().into())
}

/// `getppid`.
pub fn getppid() -> Answer {
    let id = current().process().id();
    Ok(tree().process(id).map_or(0, |node| node.parent).into())
}

/// `getpgid`.
pub fn getpgid(id: u64) -> Answer {
    let id = if id as i32 == 0 { current().process().id() } else { id as u32 };
    tree().process(id).map(|node| node.group.into()).ok_or(Errno::ESRCH)
}

/// `getsid`.
pub fn getsid(id: u64) -> Answer {
    let id = if id as i32 == 0 { current().process().id() } else { id as u32 };
    tree().process(id).map(|node| node.session.into()).ok_or(Errno::ESRCH)
}

/// `setpgid`.
pub fn setpgid(id: u64, group: u64) -> Answer {
    let me = current().process().id();
    let id = if id as i32 == 0 { me } else { id as u32 };
    if (group as i32) < 0 {
        return Err(Errno::EINVAL);
    }
    let group = if group as i32 == 0 { id } else { group as u32 };
    let mut tree = tree();
    let my_session = tree.process(me).map_or(0, |node| node.session);
    let exists = tree.processes().iter().any(|node| node.group == group && node.session == my_session);
    let node = tree.process_mut(id).ok_or(Errno::ESRCH)?;
    if id != me {
        if node.parent != me {
            return Err(Errno::ESRCH);
        }
        if node.session != my_session {
            return Err(Errno::EPERM);
        }
        if node.process.has_execed.load(Ordering::Relaxed) {
            return Err(Errno::EACCES);
        }
    }
    if node.session == id || group != id && !exists {
        return Err(Errno::EPERM);
    }
    node.group = group;
    Ok(0)
}

/// `setsid`.
pub fn setsid() -> Answer {
    let me = current().process().id();
    let mut tree = tree();
    if tree.processes().iter().any(|node| node.group == me) {
        return Err(Errno::EPERM);
    }
    let node = tree.process_mut(me).ok_or(Errno::ESRCH)?;
    (node.group, node.session) = (me, me);
    Ok(me.into())
}

/// `getuid`.
pub fn getuid() -> Answer {
    Ok(current().process().user_ids()[0].into())
}

/// `geteuid`.
pub fn geteuid() -> Answer {
    Ok(current().process().user_ids()[1].into())
}

/// `getgid`.
pub fn getgid() -> Answer {
    Ok(current().process().group_ids()[0].into())
}

/// `getegid`.
pub fn getegid() -> Answer {
    Ok(current().process().group_ids()[1].into())
}

const USER: usize = 0;
const GROUP: usize = 1;
/// As it is.
const KEEP: u32 = u32::MAX;

/// Sets ids of a kind; those that are [`KEEP`] stay. Without privilege only to what one of them is.
fn set_ids(kind: usize, new: [u32; 3]) -> Answer {
    let thread = current();
    let process = thread.process();
    let privileged = process.is_privileged();
    {
        let mut ids = process.ids.lock();
        let old = ids[kind];
        let allowed = |id: &u32| *id == KEEP || privileged || old.contains(id);
        if !new.iter().all(allowed) {
            return Err(Errno::EPERM);
        }
        for (id, new) in ids[kind].iter_mut().zip(new) {
            if new != KEEP {
                *id = new;
            }
        }
    }
    // What privilege allowed beyond the limits.
    exec::apply_limits(process, thread.space());
    Ok(0)
}

/// `setuid`.
pub fn setuid(id: u64) -> Answer {
    let id = id as u32;
    let all = current().process().is_privileged();
    set_ids(USER, if all { [id; 3] } else { [KEEP, id, KEEP] })
}

/// `setgid`.
pub fn setgid(id: u64) -> Answer {
    let id = id as u32;
    let all = current().process().is_privileged();
    set_ids(GROUP, if all { [id; 3] } else { [KEEP, id, KEEP] })
}

/// `setreuid`.
pub fn setreuid(real: u64, effective: u64) -> Answer {
    let (real, effective) = (real as u32, effective as u32);
    let saved = if real != KEEP || effective != KEEP { effective } else { KEEP };
    set_ids(USER, [real, effective, saved])
}

/// `setregid`.
pub fn setregid(real: u64, effective: u64) -> Answer {
    let (real, effective) = (real as u32, effective as u32);
    let saved = if real != KEEP || effective != KEEP { effective } else { KEEP };
    set_ids(GROUP, [real, effective, saved])
}

/// `setresuid`.
pub fn setresuid(real: u64, effective: u64, saved: u64) -> Answer {
    set_ids(USER, [real as u32, effective as u32, saved as u32])
}

/// `setresgid`.
pub fn setresgid(real: u64, effective: u64, saved: u64) -> Answer {
    set_ids(GROUP, [real as u32, effective as u32, saved as u32])
}

fn put_ids(ids: [u32; 3], to: [u64; 3]) -> Answer {
    for (id, to) in ids.into_iter().zip(to) {
        user::write_value(to, id)?;
    }
    Ok(0)
}

/// `getresuid`.
pub fn getresuid(real: u64, effective: u64, saved: u64) -> Answer {
    put_ids(current().process().user_ids(), [real, effective, saved])
}

/// `getresgid`.
pub fn getresgid(real: u64, effective: u64, saved: u64) -> Answer {
    put_ids(current().process().group_ids(), [real, effective, saved])
}

/// `uname`: a Linux as far as programs ask, of the version whose calls these are.
pub fn uname(to: u64) -> Answer {
    let mut bytes = [0; 6 * 65];
    let words: [&[u8]; 6] =
        [b"Linux", b"terrane", b"6.18.0-terrane", b"#1 SMP PREEMPT Terrane", b"x86_64", b"(none)"];
    for (place, word) in bytes.chunks_exact_mut(65).zip(words) {
        place[..word.len()].copy_from_slice(word);
    }
    user::write(to, &bytes)?;
    Ok(0)
}
