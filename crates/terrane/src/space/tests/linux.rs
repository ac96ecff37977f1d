//! The calls by Linux's numbers: what Linux 6.18 answered when it was asked the same.

use super::{Bench, Space};
use crate::addr::PAGE_SIZE as P;
use crate::error::Error;
use crate::object::Object;
use crate::space::linux::{OpenFile, PROT_GROWSDOWN, PROT_GROWSUP};
use crate::space::{MapRequest, SpaceConfig};
use crate::testing::{TestFile, TestHost};
use crate::vma::{MapFlags, Prot, VmFlags};
use alloc::string::String;
use core::fmt::Write;

const RW: Prot = Prot::READ.union(Prot::WRITE);
const BASE: u64 = 0x1000_0000;
const DOWN: u64 = PROT_GROWSDOWN as u64;
const UP: u64 = PROT_GROWSUP as u64;

/// Arguments of `mmap`, and what it answers.
type Case<'a> = (u64, u64, u64, u64, Option<&'a OpenFile<'a, TestHost>>, u64, Result<(), Error>);

struct Stage {
    bench: Bench,
    space: Space,
}

impl Stage {
    fn new() -> Self {
        let bench = Bench::new(600);
        let space = bench.space(SpaceConfig::default());
        Self { bench, space }
    }

    fn map(&self, page: u64, pages: u64, flags: MapFlags) {
        let request = MapRequest { flags, ..MapRequest::anonymous(pages * P, RW) };
        self.space.map(&self.bench.cpu, request.fixed(BASE + page * P)).unwrap();
    }

    fn shape(&self) -> String {
        let mut text = String::new();
        for mapping in self.space.mappings(&self.bench.cpu).unwrap() {
            let page = |addr: u64| (addr - BASE) / P;
            let comma = if text.is_empty() { "" } else { ", " };
            let bits = mapping.prot.bits();
            write!(text, "{comma}{}-{} {bits}", page(mapping.range.start), page(mapping.range.end)).unwrap();
        }
        text
    }

    fn end(self) {
        drop(self.space);
        self.bench.assert_nothing_left();
    }
}

#[test]
fn mprotect_changes_what_lies_before_a_hole() {
    let stage = Stage::new();
    let protect = |addr: u64, len, prot| stage.space.mprotect(&stage.bench.cpu, addr, len, prot);
    let page = |n: u64| BASE + n * P;
    let (hole, invalid) = (Err(Error::NoMemory), Err(Error::Invalid));
    stage.map(0, 4, MapFlags::PRIVATE);
    stage.map(6, 2, MapFlags::PRIVATE);
    assert_eq!(protect(page(1), 8 * P, 1), hole);
    assert_eq!(stage.shape(), "0-1 3, 1-4 1, 6-8 3");
    assert_eq!(protect(page(5), 2 * P, 1), hole);
    assert_eq!(protect(page(0), P, 1 | DOWN | UP), invalid);
    assert_eq!(protect(page(0), 0, 1 | DOWN), Ok(()));
    assert_eq!(protect(page(0) + 1, 0, 1), invalid);
    assert_eq!(protect(page(0), u64::MAX, 1), hole);
    assert_eq!(protect(page(0), 0u64.wrapping_sub(2 * P), 0x10), hole.or(Err(Error::NoMemory)));
    assert_eq!(protect(page(0), P, 0x10), invalid);
    assert_eq!(protect(page(0), P, 8 | 3), Ok(()));
    assert_eq!(protect(page(0), 0, 0x10), Ok(()));
    assert_eq!(protect(page(0), P, 3 | DOWN), invalid);
    assert_eq!(protect(page(0), P, 3 | UP), invalid);
    assert_eq!(protect(page(4), P, 3 | DOWN), hole);
    assert_eq!(protect(page(4), 3 * P, 3 | DOWN), invalid);
    assert_eq!(protect(page(0), u64::MAX, 0x10), hole);
    assert_eq!(stage.shape(), "0-1 3, 1-4 1, 6-8 3");
    stage.end();
}

#[test]
fn mprotect_begins_where_a_stack_does() {
    let stage = Stage::new();
    let protect = |page: u64, pages: u64, prot: u64| {
        stage.space.mprotect(&stage.bench.cpu, BASE + page * P, pages * P, prot | DOWN)
    };
    stage.map(10, 8, MapFlags::PRIVATE | MapFlags::GROWSDOWN);
    assert_eq!(protect(12, 1, 1), Ok(()));
    assert_eq!(stage.shape(), "10-13 1, 13-18 3");
    assert_eq!(protect(8, 3, 0), Ok(()));
    assert_eq!(stage.shape(), "10-11 0, 11-13 1, 13-18 3");
    assert_eq!(protect(8, 2, 0), Err(Error::NoMemory));
    assert_eq!(protect(12, 100, 0), Err(Error::NoMemory));
    assert_eq!(stage.shape(), "10-18 0");
    stage.end();
}

#[test]
fn mmap_checks_in_the_order_of_linux() {
    let stage = Stage::new();
    let object = Object::file(&stage.bench.machine, TestFile::new(&[0; 16 * 4096])).unwrap();
    let open = |readable, writable| OpenFile { object: &object, readable, writable, append_only: false };
    let (rw, ro, wo) = (open(true, true), open(true, false), open(false, true));
    let map = |addr, len, prot, flags, file: Option<&OpenFile<'_, _>>, offset: u64| {
        stage.space.mmap(&stage.bench.cpu, addr, len, prot, flags, file, offset)
    };
    let (rw, ro, wo) = (Some(&rw), Some(&ro), Some(&wo));
    let page = |n: u64| BASE + n * P;
    let cases: &[Case<'_>] = &[
        (0, 0, 3, 0x22, None, 0, Err(Error::Invalid)),
        (0, 0, 3, 0x22, None, 1, Err(Error::Invalid)),
        (0, u64::MAX, 3, 0x22, None, 0, Err(Error::NoMemory)),
        (0, 0u64.wrapping_sub(2 * P), 3, 0x22, None, 0, Err(Error::NoMemory)),
        (0, P, 3, 0x20, None, 0, Err(Error::Invalid)),
        (0, P, 3, 0x23, None, 0, Err(Error::Invalid)),
        (0, P, 3, 0x24, None, 0, Err(Error::Invalid)),
        (0, P, 3, 0x2f, None, 0, Err(Error::Invalid)),
        (0, P, 3, 0x2, None, 0, Err(Error::BadFile)),
        (0, 0, 3, 0x2, None, 0, Err(Error::BadFile)),
        (page(0) + 1, P, 3, 0x32, None, 0, Err(Error::Invalid)),
        ((1 << 47) - P + 1, P, 3, 0x32, None, 0, Err(Error::NoMemory)),
        ((1 << 47) + 1, P, 3, 0x32, None, 0, Err(Error::NoMemory)),
        (page(0), 1 << 47, 3, 0x32, None, 0, Err(Error::NoMemory)),
        (page(0), P, 3, 0x32, None, 0, Ok(())),
        (0, P, 3, 0x32, None, 0, Err(Error::NotPermitted)),
        (0, P + 1, 3, 0x30, None, 0, Err(Error::NotPermitted)),
        (page(0), P, 3, 0x10_0020, None, 0, Err(Error::Exists)),
        (page(0), P, 3, 0x10_0000, ro, 0, Err(Error::Exists)),
        (page(0), P, 3, 0x10_0003, rw, 0, Err(Error::Exists)),
        (page(4), P, 3, 0x10_0003, rw, 0, Err(Error::Unsupported)),
        (page(4), P, 3, 0x10_0001, rw, 0, Ok(())),
        (page(8), P, 3, 0x11, ro, 0, Err(Error::Access)),
        (page(8), P, 1, 0x11, ro, 0, Ok(())),
        (page(8), P, 1, 0x12, wo, 0, Err(Error::Access)),
        (page(8), P, 2, 0x11, wo, 0, Err(Error::Access)),
        (page(8), P, 3, 0x12, ro, 0, Ok(())),
        (page(8), P, 1, 0x13, rw, 0, Ok(())),
        (page(8), P, 1, 0x8_0013, rw, 0, Err(Error::Unsupported)),
        (page(8), P, 1, 0x8_0011, rw, 0, Ok(())),
        (page(8), P, 1, 0x1000_0013, rw, 0, Ok(())),
        (page(8), P, 1, 0x4_0011, rw, 0, Err(Error::Invalid)),
        (page(8), P, 1, 0x10, rw, 0, Err(Error::Invalid)),
        (page(8), P, 1, 0x18, rw, 0, Err(Error::Invalid)),
        (page(8), P, 3, 0x111, rw, 0, Err(Error::Invalid)),
        (page(8), P, 3, 0x112, rw, 0, Err(Error::Invalid)),
        (page(8), P, 3, 0x131, None, 0, Err(Error::Invalid)),
        (page(8), P, 3, 0x38, None, 0, Ok(())),
        (page(8), P, 3, 0x2038, None, 0, Err(Error::Invalid)),
        (page(8), P, 3, 0x138, None, 0, Err(Error::Invalid)),
        (page(9), P, 3, 0x4_0032, None, 0, Err(Error::Invalid)),
        (page(20), P, 3, 0x2_0032, None, 0, Ok(())),
        (page(22), P, 3, 0x4032, None, 0, Ok(())),
        (page(24), P, 3, 0x2032, None, 0, Ok(())),
        (page(32), P, 0x13, 0x32, None, 0, Ok(())),
        (page(44), P, 1, 0x11, ro, 0, Ok(())),
        (0, P, 1, 2, rw, 1 << 63, Err(Error::Overflow)),
        (0, P, 1, 2, rw, (1 << 63) - P, Err(Error::Overflow)),
        (0, P, 1, 2, rw, 0u64.wrapping_sub(P), Err(Error::Overflow)),
        (page(50), 2 * P, 1, 0x32, None, 0u64.wrapping_sub(P), Ok(())),
    ];
    for (n, &(addr, len, prot, flags, file, offset, expected)) in cases.iter().enumerate() {
        let found = map(addr, len, prot, flags, file, offset);
        assert_eq!(found.map(drop), expected, "case {n}");
    }
    let flags = |n: u64| {
        let found = stage.space.mappings(&stage.bench.cpu).unwrap();
        found.iter().find(|mapping| mapping.range.start == page(n)).unwrap().flags
    };
    let droppable = VmFlags::DROPPABLE | VmFlags::NORESERVE | VmFlags::WIPEONFORK | VmFlags::DONTDUMP;
    assert!(flags(8).contains(droppable));
    assert!(flags(20).contains(VmFlags::NOHUGEPAGE) && flags(22).contains(VmFlags::NORESERVE));
    assert!(flags(24).contains(VmFlags::LOCKED));
    assert!(
        stage.space.translate(&stage.bench.cpu, page(24), crate::vma::Access::Write).is_some(),
        "filled in"
    );
    // Opened for reading only: never to be written.
    assert!(!flags(44).contains(VmFlags::MAYWRITE));
    assert_eq!(stage.space.mprotect(&stage.bench.cpu, page(44), P, 3), Err(Error::Access));
    let low = map(0, P, 3, 0x62, None, 0).unwrap();
    assert!(low < 1 << 31);
    let appending = OpenFile { append_only: true, ..open(true, true) };
    assert_eq!(map(0, P, 1, 1, Some(&appending), 0), Err(Error::Access));
    drop(object);
    stage.end();
}
