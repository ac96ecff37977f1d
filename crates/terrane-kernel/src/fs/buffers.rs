//! The buffers of a program that a call reads into or writes from, and the kernel's own in between.
//!
//! Bytes go through a buffer of the kernel's, because what they come from is looked at with locks held or pinned, and a copy from or to a
//! program may fault.

use super::abi::{IOV_MAX, MAX_TRANSFER, USER_END};
use super::current;
use super::descriptors::{is_secret, may_be_secrets};
use crate::errno::Errno;
use crate::user;
use alloc::vec::Vec;

/// Bytes that are copied at a time, at most.
pub const PIECE: usize = 1 << 16;

/// A part of a program's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    pub at: u64,
    pub len: u64,
}

/// The buffers of a call: one as a rule.
pub struct Buffers {
    one: [Part; 1],
    many: Vec<Part>,
    total: u64,
    /// Of another program than the one that calls.
    far: bool,
}

/// Whether what the space that runs here has at `address` is nobody else's to look at.
fn hides(address: u64) -> bool {
    may_be_secrets() && {
        let space = current::space();
        crate::mm::with_cpu(|cpu| {
            let pin = cpu.pin();
            space.mm().vma_at(&pin, address).and_then(|(vma, _)| vma.object().cloned())
        })
        .is_some_and(|object| is_secret(&object))
    }
}

/// True when the bytes can lie in a program's memory at all.
pub fn is_users(at: u64, len: u64) -> bool {
    at.checked_add(len).is_some_and(|end| end <= USER_END)
}

impl Buffers {
    /// One buffer.
    ///
    /// # Errors
    /// `EFAULT` when it cannot be a program's.
    pub fn one(at: u64, len: u64) -> Result<Self, Errno> {
        if !is_users(at, len) {
            return Err(Errno::EFAULT);
        }
        let len = len.min(MAX_TRANSFER);
        Ok(Self { one: [Part { at, len }], many: Vec::new(), total: len, far: false })
    }

    /// The same of another program.
    ///
    /// # Errors
    /// As [`one`](Self::one).
    pub fn far_one(at: u64, len: u64) -> Result<Self, Errno> {
        Ok(Self { far: true, ..Self::one(at, len)? })
    }

    /// The `count` buffers that the array of `struct iovec` at `at` describes.
    ///
    /// # Errors
    /// `EINVAL` for too many, or for a negative length; `EFAULT`, `ENOMEM`.
    pub fn vector(at: u64, count: u64) -> Result<Self, Errno> {
        if count > IOV_MAX {
            return Err(Errno::EINVAL);
        }
        let mut many = Vec::new();
        many.try_reserve_exact(count as usize)?;
        for n in 0..count {
            let [at, len]: [u64; 2] = user::read_value(at + n * 16)?;
            many.push(Part { at, len });
        }
        // All lengths are looked at before the first address.
        if many.iter().any(|part| part.len > i64::MAX as u64) {
            return Err(Errno::EINVAL);
        }
        let mut total = 0;
        for part in &mut many {
            if !is_users(part.at, part.len) {
                return Err(Errno::EFAULT);
            }
            part.len = part.len.min(MAX_TRANSFER - total);
            total += part.len;
        }
        Ok(Self { one: [Part { at: 0, len: 0 }], many, total, far: false })
    }

    /// The same for buffers of another program, whose addresses are looked at when they are used.
    ///
    /// # Errors
    /// As [`vector`](Self::vector), but for the addresses described.
    pub fn far_vector(at: u64, count: u64) -> Result<Self, Errno> {
        if count > IOV_MAX {
            return Err(Errno::EINVAL);
        }
        let mut many = Vec::new();
        many.try_reserve_exact(count as usize)?;
        let mut total = 0u64;
        for n in 0..count {
            let [at, len]: [u64; 2] = user::read_value(at.wrapping_add(n * 16))?;
            if len > i64::MAX as u64 {
                return Err(Errno::EINVAL);
            }
            // What is no address of any program's ends the copy, where a copy comes to it.
            let len = len.min(MAX_TRANSFER - total);
            many.push(Part { at, len });
            total += len;
        }
        Ok(Self { one: [Part { at: 0, len: 0 }], many, total, far: true })
    }

    /// Bytes in all.
    pub fn len(&self) -> u64 {
        self.total
    }

    /// Leaves only the first `len` bytes.
    pub fn shorten(&mut self, len: u64) {
        self.total = self.total.min(len);
        let mut left = self.total;
        for part in self.one.iter_mut().chain(&mut self.many) {
            part.len = part.len.min(left);
            left -= part.len;
        }
    }

    fn parts(&self) -> &[Part] {
        if self.many.is_empty() { &self.one } else { &self.many }
    }

    /// A buffer of the kernel's for them, of at most `limit` bytes.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn piece(&self, limit: usize) -> Result<Vec<u8>, Errno> {
        let mut piece = Vec::new();
        let len = usize::try_from(self.total).map_or(limit, |total| total.min(limit));
        piece.try_reserve_exact(len)?;
        piece.resize(len, 0);
        Ok(piece)
    }

    /// Copies the bytes from `at` on out of the program's buffers, as many as `to` takes; how many could be read.
    pub fn read(&self, at: u64, to: &mut [u8]) -> usize {
        self.for_each(at, to.len(), |address, from, to_len| {
            user::read(&mut to[from..from + to_len], address).is_ok()
        })
    }

    /// Copies bytes into the program's buffers, from `at` on; how many could be written.
    pub fn write(&self, at: u64, from: &[u8]) -> usize {
        self.for_each(at, from.len(), |address, begin, len| {
            user::write(address, &from[begin..begin + len]).is_ok()
        })
    }

    fn for_each(&self, at: u64, count: usize, mut copy: impl FnMut(u64, usize, usize) -> bool) -> usize {
        let (mut skip, mut done) = (at, 0);
        for part in self.parts() {
            if skip >= part.len {
                skip -= part.len;
                continue;
            }
            let mut within = skip;
            skip = 0;
            while within < part.len && done < count {
                // Page by page, so that what lies before a hole is copied.
                let address = part.at.wrapping_add(within);
                let page = 4096 - (address & 4095);
                let len = page.min(part.len - within).min((count - done) as u64) as usize;
                if self.far && hides(address) || !copy(address, done, len) {
                    return done;
                }
                within += len as u64;
                done += len;
            }
        }
        done
    }
}
