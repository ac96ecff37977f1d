//! The language of the referee: what a process asks of its address space, one operation a line.
//!
//! An operation is a name and a few words. The words keep the values of Linux's interface, wrong ones included, because wrong
//! arguments are half of what is to be compared. Whatever an operation has is a `u64`, so that it crosses to another process as plain
//! words, a fuzzer's bytes make one, and a shrinker can go over the words of any operation without knowing it.

use serde::{Deserialize, Serialize};

/// What a word of an operation means, and so how it is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// An address.
    Addr,
    /// A number of bytes.
    Len,
    /// Bytes from the start of a file.
    Offset,
    /// `PROT_…`.
    Prot,
    /// `MAP_…`.
    Map,
    /// `MREMAP_…`.
    Remap,
    /// `MADV_…`.
    Advice,
    /// `MLOCK_…`.
    Lock,
    /// `MCL_…`.
    LockAll,
    /// `MS_…`.
    Sync,
    /// A file: its number, or [`NO_FILE`].
    File,
    /// A process: its number.
    Process,
    /// What the bytes of a store begin with.
    Seed,
    /// A plain number.
    Number,
}

/// The file of an anonymous mapping.
pub const NO_FILE: u64 = u64::MAX;

/// Words of an operation at most.
pub const WORDS: usize = 6;

/// Bytes that one operation moves at most.
pub const DATA: usize = 16 << 10;

macro_rules! operations {
    ($($(#[$doc:meta])* $variant:ident $name:literal { $($field:ident: $kind:ident),* })*) => {
        /// One operation. The fields are the arguments of the system call of that name.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "lowercase")]
        pub enum Op {
            $($(#[$doc])* #[allow(missing_docs, reason = "the arguments of the call of that name")] $variant { $($field: u64),* },)*
        }

        /// The kinds of operations, for tables.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        enum Tag { $($variant),* }

        impl Op {
            /// The names of all kinds, by [`kind`](Self::kind).
            pub const NAMES: &'static [&'static str] = &[$($name),*];

            /// The number of its kind.
            pub fn kind(&self) -> usize {
                match self { $(Op::$variant { .. } => Tag::$variant as usize,)* }
            }

            /// What the words of operations of kind `kind` are called and mean.
            pub fn signature(kind: usize) -> &'static [(&'static str, Kind)] {
                const ALL: &[&[(&str, Kind)]] = &[$(&[$((stringify!($field), Kind::$kind)),*]),*];
                ALL.get(kind).copied().unwrap_or(&[])
            }

            /// Its words; those that it does not have are 0.
            pub fn words(&self) -> [u64; WORDS] {
                match *self {
                    $(Op::$variant { $($field),* } => {
                        let own: &[u64] = &[$($field),*];
                        let mut words = [0; WORDS];
                        words[..own.len()].copy_from_slice(own);
                        words
                    })*
                }
            }

            /// The operation of kind `kind` with these words; `None` for a kind that there is not.
            #[allow(unused_mut, unused_variables, unused_assignments, reason = "some have no words")]
            pub fn from_words(kind: usize, words: &[u64; WORDS]) -> Option<Op> {
                let mut next = words.iter().copied();
                $(if kind == Tag::$variant as usize {
                    $(let $field = next.next().unwrap_or(0);)*
                    return Some(Op::$variant { $($field),* });
                })*
                None
            }
        }
    };
}

operations! {
    /// `mmap`; the file is [`NO_FILE`] for memory.
    Map "mmap" { addr: Addr, len: Len, prot: Prot, flags: Map, file: File, offset: Offset }
    /// `munmap`.
    Unmap "munmap" { addr: Addr, len: Len }
    /// `mprotect`.
    Protect "mprotect" { addr: Addr, len: Len, prot: Prot }
    /// `mremap`.
    Remap "mremap" { addr: Addr, old: Len, new: Len, flags: Remap, to: Addr }
    /// `brk`, the system call: returns the break.
    Brk "brk" { end: Addr }
    /// `madvise`.
    Advise "madvise" { addr: Addr, len: Len, advice: Advice }
    /// `process_madvise` of the process itself, for two ranges.
    ProcessAdvise "process_madvise" { addr: Addr, len: Len, and: Addr, for_len: Len, advice: Advice }
    /// `mlock`.
    Lock "mlock" { addr: Addr, len: Len }
    /// `mlock2`.
    Lock2 "mlock2" { addr: Addr, len: Len, flags: Lock }
    /// `munlock`.
    Unlock "munlock" { addr: Addr, len: Len }
    /// `mlockall`.
    LockAll "mlockall" { flags: LockAll }
    /// `munlockall`.
    UnlockAll "munlockall" {}
    /// `msync`.
    Sync "msync" { addr: Addr, len: Len, flags: Sync }
    /// `mincore`.
    Resident "mincore" { addr: Addr, len: Len }
    /// `mseal`.
    Seal "mseal" { addr: Addr, len: Len, flags: Number }
    /// Loads bytes, in ascending order.
    Load "load" { addr: Addr, len: Len }
    /// Stores bytes, in ascending order: see [`byte`].
    Store "store" { addr: Addr, len: Len, seed: Seed }
    /// Loads eight bytes at once.
    LoadWord "load8" { addr: Addr }
    /// Stores eight bytes at once.
    StoreWord "store8" { addr: Addr, seed: Seed }
    /// `ftruncate`.
    Truncate "ftruncate" { file: File, len: Len }
    /// `pwrite`.
    Write "pwrite" { file: File, offset: Offset, len: Len, seed: Seed }
    /// `pread`.
    Read "pread" { file: File, offset: Offset, len: Len }
    /// Makes a child, which has the lowest free number; the parent goes on acting.
    Fork "fork" {}
    /// Lets another process act. Does nothing if there is none with that number.
    Switch "switch" { process: Process }
    /// Ends the process that acts, and the one with the lowest number goes on. Does nothing for the last.
    Exit "exit" {}
}

/// Byte number `n` of a store with this seed.
#[inline]
pub fn byte(seed: u64, n: usize) -> u8 {
    (seed as u8).wrapping_add((n as u8).wrapping_mul(3)).wrapping_add((n >> 8) as u8)
}

/// The eight bytes of a store of a word.
#[inline]
pub fn word(seed: u64) -> u64 {
    u64::from_le_bytes(core::array::from_fn(|n| byte(seed, n)))
}

/// What came of an operation.
#[derive(Clone, PartialEq, Eq, Debug, Hash)]
pub enum Outcome {
    /// It returned this, and these bytes.
    Value(u64, Vec<u8>),
    /// It failed with this errno.
    Errno(i32),
    /// A load or a store raised a signal after so many bytes, which are given for a load.
    Signal {
        /// `SIGSEGV` or `SIGBUS`.
        signal: i32,
        /// `si_code`.
        code: i32,
        /// Bytes that were loaded or stored before.
        done: u64,
        /// Those of a load.
        bytes: Vec<u8>,
    },
    /// There was nothing to do: see [`Op::Switch`], [`Op::Exit`].
    Nothing,
}

impl Outcome {
    /// A result without bytes.
    pub fn value(value: u64) -> Self {
        Outcome::Value(value, Vec::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_make_the_operation_they_came_from() {
        for kind in 0..Op::NAMES.len() {
            let words = core::array::from_fn(|n| 10 * kind as u64 + n as u64);
            let op = Op::from_words(kind, &words).unwrap();
            assert_eq!(op.kind(), kind);
            let own = Op::signature(kind).len();
            assert_eq!(op.words()[..own], words[..own]);
            assert!(op.words()[own..].iter().all(|&word| word == 0));
        }
        assert_eq!(Op::from_words(Op::NAMES.len(), &[0; WORDS]), None);
    }
}
