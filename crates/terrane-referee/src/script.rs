//! Scripts: a window, limits, and operations; written so that a human can read and a program replay them.
//!
//! ```text
//! window 0x501e0000 64
//! heap 16
//! mmap addr=0x0 len=0x3000 prot=rw flags=PRIVATE|ANONYMOUS file=none offset=0x0
//! store addr=w+0x1ffe len=0x4 seed=0x7
//! ```
//!
//! Addresses in the window, and a little around it, are written from its start. `#` begins a comment.

use crate::operation::{Kind, NO_FILE, Op, WORDS};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fmt::Write as _;
use std::str::FromStr;
use terrane::PAGE_SIZE;
use terrane::addr::page_ceil;

/// The end of the addresses of a program on x86-64.
pub const USER_END: u64 = 0x7fff_ffff_f000;

/// Where windows may lie: above 1 GiB and below 2 GiB, where `MAP_32BIT` looks.
pub const ARENA: std::ops::Range<u64> = 0x5000_0000..0x5100_0000;

/// Files there are, each empty at first but for [`READ_ONLY`].
pub const FILES: usize = 4;

/// The file that is open for reading only: the last.
pub const READ_ONLY: usize = 3;

/// Bytes in it: byte `n` is [`byte`](crate::operation::byte)`(READ_ONLY, n)`.
pub const READ_ONLY_LEN: usize = 3 * PAGE_SIZE as usize + 100;

/// Processes at a time.
pub const PROCESSES: usize = 4;

/// Where a script plays, and under which limits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
pub struct Setup {
    /// The first address of the window.
    pub start: u64,
    /// Its pages.
    pub pages: u64,
    /// The page of the window where the heap begins.
    pub heap: u64,
    /// `RLIMIT_MEMLOCK` in pages; `None` for none.
    pub memlock: Option<u64>,
    /// Pages that may be mapped in the window (`RLIMIT_AS`, beyond what there is anyway); `None` for no limit.
    pub mapped: Option<u64>,
}

impl Setup {
    /// A window that has the boundary of a page table in its middle.
    pub fn of_pages(pages: u64) -> Self {
        let middle = ARENA.start + (4 << 20);
        Self { start: middle - pages / 2 * PAGE_SIZE, pages, heap: pages / 4, memlock: None, mapped: None }
    }

    /// Behind the last address.
    pub fn end(&self) -> u64 {
        self.start + self.pages * PAGE_SIZE
    }

    /// Bytes of the window.
    pub fn len(&self) -> u64 {
        self.pages * PAGE_SIZE
    }

    /// True for a window of nothing, which is none.
    pub fn is_empty(&self) -> bool {
        self.pages == 0
    }

    /// Where the heap begins.
    pub fn heap_start(&self) -> u64 {
        self.start + self.heap * PAGE_SIZE
    }

    /// True when it can be prepared.
    pub fn is_valid(&self) -> bool {
        self.start.is_multiple_of(PAGE_SIZE)
            && self.start > ARENA.start
            && self.pages >= 4
            && self.pages < (ARENA.end - ARENA.start) / PAGE_SIZE
            && self.end() < ARENA.end
            && self.heap < self.pages
    }

    /// True when the range ends inside the window, or is refused wherever it is: because nothing is asked, or it wraps, or lies
    /// beyond all addresses of programs. Everything else could hit what the helper itself needs.
    fn keeps(&self, addr: u64, len: u64) -> bool {
        if addr >= USER_END {
            return true;
        }
        let inside = |addr: u64| (self.start..=self.end()).contains(&addr);
        let start = addr & !(PAGE_SIZE - 1);
        match addr.checked_add(len).and_then(page_ceil) {
            // A length that wraps, or is 0 when rounded up, is an error or nothing.
            None => true,
            Some(end) => inside(start) && inside(end),
        }
    }

    /// True when all of the bytes are in the window.
    fn touches(&self, addr: u64, len: u64) -> bool {
        addr >= self.start && addr.checked_add(len).is_some_and(|end| end <= self.end())
    }

    /// True when `op` cannot touch anything outside of the window, whatever is mapped.
    pub fn allows(&self, op: &Op) -> bool {
        match *op {
            Op::Map { addr, len, flags, .. } => {
                // Only a fixed address is taken as it is, and without replacing only `FIXED` does harm.
                flags as i32 & libc::MAP_FIXED == 0
                    || flags as i32 & libc::MAP_FIXED_NOREPLACE == libc::MAP_FIXED_NOREPLACE
                    // Huge pages are rounded up, and what is there is gone before they are refused.
                    || flags as i32 & libc::MAP_HUGETLB == 0 && self.keeps(addr, len)
            }
            Op::Unmap { addr, len }
            | Op::Protect { addr, len, .. }
            | Op::Advise { addr, len, .. }
            | Op::Lock { addr, len }
            | Op::Lock2 { addr, len, .. }
            | Op::Unlock { addr, len }
            | Op::Sync { addr, len, .. }
            | Op::Resident { addr, len }
            | Op::Seal { addr, len, .. } => self.keeps(addr, len),
            Op::Load { addr, len } | Op::Store { addr, len, .. } => self.touches(addr, len),
            Op::ProcessAdvise { addr, len, and, for_len, .. } => {
                self.keeps(addr, len) && self.keeps(and, for_len)
            }
            Op::Remap { addr, old, new, flags, to } => {
                // A stretch in place stays in the window because there is something behind it.
                let fixed = flags as i32 & libc::MREMAP_FIXED != 0;
                self.keeps(addr, old) && (!fixed || self.keeps(to, new))
            }
            Op::LoadWord { addr } | Op::StoreWord { addr, .. } => self.touches(addr, 8),
            Op::Brk { end } => end <= self.end(),
            _ => true,
        }
    }
}

/// A window with what is to happen in it.
#[derive(Clone, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
pub struct Script {
    /// The window.
    pub setup: Setup,
    /// What happens.
    pub ops: Vec<Op>,
}

const MAP: &[(&str, u64)] = &[
    ("SHARED", 1),
    ("PRIVATE", 2),
    ("DROPPABLE", 8),
    ("FIXED", 0x10),
    ("ANONYMOUS", 0x20),
    ("32BIT", 0x40),
    ("GROWSDOWN", 0x100),
    ("LOCKED", 0x2000),
    ("NORESERVE", 0x4000),
    ("POPULATE", 0x8000),
    ("NONBLOCK", 0x1_0000),
    ("STACK", 0x2_0000),
    ("HUGETLB", 0x4_0000),
    ("SYNC", 0x8_0000),
    ("FIXED_NOREPLACE", 0x10_0000),
];
const REMAP: &[(&str, u64)] = &[("MAYMOVE", 1), ("FIXED", 2), ("DONTUNMAP", 4)];
const LOCK: &[(&str, u64)] = &[("ONFAULT", 1)];
const LOCK_ALL: &[(&str, u64)] = &[("CURRENT", 1), ("FUTURE", 2), ("ONFAULT", 4)];
const SYNC: &[(&str, u64)] = &[("ASYNC", 1), ("INVALIDATE", 2), ("SYNC", 4)];
const PROT: &[(&str, u64)] =
    &[("r", 1), ("w", 2), ("x", 4), ("GROWSDOWN", 0x0100_0000), ("GROWSUP", 0x0200_0000)];

/// The names of Linux's advice.
pub const ADVICE: &[(&str, u64)] = &[
    ("NORMAL", 0),
    ("RANDOM", 1),
    ("SEQUENTIAL", 2),
    ("WILLNEED", 3),
    ("DONTNEED", 4),
    ("FREE", 8),
    ("REMOVE", 9),
    ("DONTFORK", 10),
    ("DOFORK", 11),
    ("MERGEABLE", 12),
    ("UNMERGEABLE", 13),
    ("HUGEPAGE", 14),
    ("NOHUGEPAGE", 15),
    ("DONTDUMP", 16),
    ("DODUMP", 17),
    ("WIPEONFORK", 18),
    ("KEEPONFORK", 19),
    ("COLD", 20),
    ("PAGEOUT", 21),
    ("POPULATE_READ", 22),
    ("POPULATE_WRITE", 23),
    ("DONTNEED_LOCKED", 24),
    ("COLLAPSE", 25),
    ("GUARD_INSTALL", 102),
    ("GUARD_REMOVE", 103),
];

fn names(kind: Kind) -> Option<&'static [(&'static str, u64)]> {
    Some(match kind {
        Kind::Prot => PROT,
        Kind::Map => MAP,
        Kind::Remap => REMAP,
        Kind::Lock => LOCK,
        Kind::LockAll => LOCK_ALL,
        Kind::Sync => SYNC,
        _ => return None,
    })
}

/// Writes `value` as a word of this kind.
pub fn show(kind: Kind, value: u64, setup: &Setup) -> String {
    if let Some(names) = names(kind) {
        let mut rest = value;
        let mut parts = Vec::new();
        for &(name, bit) in names {
            if rest & bit == bit {
                rest &= !bit;
                parts.push(name.to_owned());
            }
        }
        if rest != 0 {
            parts.push(format!("{rest:#x}"));
        }
        return if parts.is_empty() { "0".to_owned() } else { parts.join("|") };
    }
    match kind {
        Kind::Addr if (setup.start..=setup.end() + PAGE_SIZE).contains(&value) => {
            format!("w+{:#x}", value - setup.start)
        }
        Kind::Advice => match ADVICE.iter().find(|&&(_, number)| number == value) {
            Some((name, _)) => (*name).to_owned(),
            None => format!("{value:#x}"),
        },
        Kind::File if value == NO_FILE => "none".to_owned(),
        Kind::File | Kind::Process | Kind::Number => value.to_string(),
        _ => format!("{value:#x}"),
    }
}

fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// Reads what [`show`] writes.
pub fn read(kind: Kind, text: &str, setup: &Setup) -> Option<u64> {
    let named = |names: &[(&str, u64)], part: &str| {
        names.iter().find(|(name, _)| *name == part).map(|&(_, bit)| bit).or_else(|| number(part))
    };
    match kind {
        Kind::Addr => match text.strip_prefix("w+") {
            Some(rest) => setup.start.checked_add(number(rest)?),
            None => number(text),
        },
        Kind::Advice => named(ADVICE, text),
        Kind::File if text == "none" => Some(NO_FILE),
        _ => match names(kind) {
            Some(names) => text.split('|').try_fold(0, |all, part| Some(all | named(names, part)?)),
            None => number(text),
        },
    }
}

/// Writes an operation as a line.
pub fn line(op: &Op, setup: &Setup) -> String {
    let mut text = Op::NAMES[op.kind()].to_owned();
    for (&(name, kind), word) in Op::signature(op.kind()).iter().zip(op.words()) {
        let _ = write!(text, " {name}={}", show(kind, word, setup));
    }
    text
}

fn parse_op(text: &str, setup: &Setup) -> Result<Op, String> {
    let mut parts = text.split_whitespace();
    let name = parts.next().unwrap_or_default();
    let kind = Op::NAMES.iter().position(|known| *known == name);
    let kind = kind.ok_or_else(|| format!("‘{name}’ is no operation"))?;
    let signature = Op::signature(kind);
    let mut words = [0; WORDS];
    let mut given = 0;
    for part in parts {
        let wrong = || format!("‘{part}’ is nothing that ‘{name}’ has");
        let (key, value) = part.split_once('=').ok_or_else(wrong)?;
        let place = signature.iter().position(|(name, _)| *name == key).ok_or_else(wrong)?;
        words[place] = read(signature[place].1, value, setup).ok_or_else(wrong)?;
        given |= 1 << place;
    }
    if given != (1 << signature.len()) - 1 {
        let all: Vec<_> = signature.iter().map(|(name, _)| *name).collect();
        return Err(format!("‘{name}’ needs {}", all.join(", ")));
    }
    let op = Op::from_words(kind, &words).ok_or("no such operation")?;
    if setup.allows(&op) { Ok(op) } else { Err(format!("‘{text}’ reaches beyond the window")) }
}

impl fmt::Display for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let setup = &self.setup;
        writeln!(f, "window {:#x} {}", setup.start, setup.pages)?;
        writeln!(f, "heap {}", setup.heap)?;
        if let Some(pages) = setup.memlock {
            writeln!(f, "memlock {pages}")?;
        }
        if let Some(pages) = setup.mapped {
            writeln!(f, "mapped {pages}")?;
        }
        for op in &self.ops {
            writeln!(f, "{}", line(op, setup))?;
        }
        Ok(())
    }
}

impl FromStr for Script {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut setup = Setup::of_pages(64);
        let mut ops = Vec::new();
        let mut has_window = false;
        for (at, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            let fail = |what: String| format!("line {}: {what}", at + 1);
            let mut parts = line.split_whitespace();
            let Some(first) = parts.next() else { continue };
            let mut next = || parts.next().and_then(number);
            let header = match first {
                "window" => {
                    has_window = true;
                    (setup.start, setup.pages) = next().zip(next()).unwrap_or((0, 0));
                    true
                }
                "heap" => {
                    setup.heap = next().unwrap_or(u64::MAX);
                    true
                }
                "memlock" => {
                    setup.memlock = Some(next().ok_or_else(|| fail("a number of pages".to_owned()))?);
                    true
                }
                "mapped" => {
                    setup.mapped = Some(next().ok_or_else(|| fail("a number of pages".to_owned()))?);
                    true
                }
                _ => false,
            };
            if !header {
                if !setup.is_valid() {
                    return Err(fail("the window, or the heap in it, cannot be".to_owned()));
                }
                ops.push(parse_op(line, &setup).map_err(fail)?);
            } else if !ops.is_empty() {
                return Err(fail(format!("‘{first}’ comes before all operations")));
            }
        }
        if has_window && setup.is_valid() {
            Ok(Self { setup, ops })
        } else {
            Err("there is no valid window".to_owned())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_are_read_as_they_were_written() {
        let setup = Setup { memlock: Some(7), mapped: Some(40), ..Setup::of_pages(32) };
        let mut ops = Vec::new();
        for kind in 0..Op::NAMES.len() {
            for round in 0..40u64 {
                let words = core::array::from_fn(|n| match Op::signature(kind).get(n) {
                    Some((_, Kind::Addr)) => setup.start + round * 0x1234,
                    Some((_, Kind::Advice)) => round * 3,
                    Some((_, Kind::File)) if round % 2 == 0 => NO_FILE,
                    _ => 1u64.checked_shl(round as u32).unwrap_or(0) | (n as u64),
                });
                ops.extend(Op::from_words(kind, &words).filter(|op| setup.allows(op)));
            }
        }
        assert!(ops.len() > 400);
        let script = Script { setup, ops };
        assert_eq!(script.to_string().parse::<Script>().unwrap(), script);
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (text, part) in [
            ("window 0 64", "valid window"),
            ("fly", "‘fly’ is no operation"),
            ("munmap addr=w+0x0", "needs addr, len"),
            ("munmap addr=w+0x0 length=1", "‘length=1’"),
            ("munmap addr=w+0x0 len=0x41000", "beyond the window"),
            ("mmap addr=0x1000 len=1 prot=r flags=PRIVATE|FIXED file=none offset=0", "beyond"),
            ("munlockall\nheap 3", "line 2: ‘heap’"),
        ] {
            let error = text.parse::<Script>().unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn nothing_outside_of_the_window_is_touched() {
        let setup = Setup::of_pages(16);
        let (start, end) = (setup.start, setup.end());
        for (addr, len, good) in [
            (start, setup.len(), true),
            (start, setup.len() + 1, false),
            (start - 1, 1, false),
            (end - 1, 1, true),
            (end - 1, 2, false),
            (start, u64::MAX, true),
            (start, 1 << 46, false),
            (0, 4096, false),
            (0, 0, false),
            (USER_END, 4096, true),
            (u64::MAX, 1, true),
        ] {
            assert_eq!(setup.allows(&Op::Unmap { addr, len }), good, "{addr:#x} {len:#x}");
        }
    }
}
