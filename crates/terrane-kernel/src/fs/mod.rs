//! To come.

use crate::errno::Errno;
use crate::mm::{self, Object};
use alloc::vec::Vec;
use terrane::sync::Shared;

/// See the files' own module.
pub struct Files(());
impl Files {
    pub fn try_new() -> Result<Self, Errno> {
        Ok(Self(()))
    }
    pub fn fork(&self) -> Result<Self, Errno> {
        Ok(Self(()))
    }
    pub fn close_on_exec(&self) {}
}
pub struct Cwd(());
impl Cwd {
    pub fn new() -> Self {
        Self(())
    }
    pub fn fork(&self) -> Result<Self, Errno> {
        Ok(Self(()))
    }
}
pub struct Inode(Object);
pub type Node = Shared<Inode>;
impl Inode {
    pub fn object(&self) -> Option<&Object> {
        Some(&self.0)
    }
}
pub struct Mapped {
    pub object: Object,
    pub readable: bool,
    pub writable: bool,
    pub append_only: bool,
    pub zero: bool,
}
static ARCHIVE: crate::task::lock::Lock<&'static [u8]> = crate::task::lock::Lock::new(&[]);
pub fn init(archive: &'static [u8]) {
    *ARCHIVE.lock() = archive;
}
fn hex(bytes: &[u8]) -> usize {
    usize::from_str_radix(core::str::from_utf8(bytes).unwrap_or("0"), 16).unwrap_or(0)
}
fn find(path: &[u8]) -> Result<&'static [u8], Errno> {
    let archive = *ARCHIVE.lock();
    let mut at = 0;
    let path = path.strip_prefix(b"/").unwrap_or(path);
    while at + 110 <= archive.len() {
        let header = &archive[at..at + 110];
        let (size, name) = (hex(&header[54..62]), hex(&header[94..102]));
        let found = &archive[at + 110..at + 110 + name - 1];
        let data = (at + 110 + name).next_multiple_of(4);
        let found = found.strip_prefix(b"/").unwrap_or(found);
        if found == path {
            return Ok(&archive[data..data + size]);
        }
        at = (data + size).next_multiple_of(4);
    }
    Err(Errno::ENOENT)
}
pub fn read_whole(path: &[u8]) -> Result<Vec<u8>, Errno> {
    Ok(find(path)?.to_vec())
}
pub fn open_program(path: &[u8]) -> Result<(Node, Vec<u8>), Errno> {
    let bytes = find(path)?;
    let object = terrane::object::Object::shared_memory(mm::machine(), bytes.len() as u64)?;
    mm::with_cpu(|cpu| object.write(cpu, 0, bytes))?;
    Ok((Shared::try_new(Inode(object))?, path.to_vec()))
}
pub fn open_program_at(_: u64, path: &[u8], _: u64) -> Result<(Node, Vec<u8>), Errno> {
    open_program(path)
}
pub fn mapping_of(_: u64, _: u64, _: u64) -> Result<Mapped, Errno> {
    Err(Errno::EBADF)
}
pub fn syscall(number: u64, args: &[u64; 6]) -> Option<Result<u64, Errno>> {
    let stream = if args[0] == 2 { crate::console::Stream::Error } else { crate::console::Stream::Output };
    match number {
        1 => {
            let mut done = 0;
            while done < args[2] {
                let mut bytes = [0; 256];
                let part = (args[2] - done).min(256) as usize;
                if let Err(errno) = crate::user::read(&mut bytes[..part], args[1] + done) {
                    return Some(Err(errno));
                }
                crate::console::write(stream, &bytes[..part]);
                done += part as u64;
            }
            Some(Ok(done))
        }
        20 => {
            let mut total = 0;
            for nth in 0..args[2] {
                let Ok([at, len]) = crate::user::read_value::<[u64; 2]>(args[1] + 16 * nth) else { return Some(Err(Errno::EFAULT)) };
                if len > 0 {
                    let _ = syscall(1, &[args[0], at, len, 0, 0, 0]);
                }
                total += len;
            }
            Some(Ok(total))
        }
        16 => Some(Err(Errno::ENOTTY)),
        3 => Some(Ok(0)),
        _ => None,
    }
}
