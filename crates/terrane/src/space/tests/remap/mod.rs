//! Moving, growing and shrinking mappings.

mod model;
mod races;

use super::rmap::{check_object, check_private};
use super::{Bench, Space};
use crate::addr::PAGE_SIZE;
use crate::error::Error;
use crate::mm::BLOCK_SIZE;
use crate::object::Object;
use crate::page_table::{Level, Pte};
use crate::space::{HugePages, Locking, MapRequest, SpaceConfig};
use crate::testing::{TestFile, TestFormat};
use crate::vma::{Advice, MapFlags, Prot, RemapFlags};
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt::Write;

const RW: Prot = Prot::READ.union(Prot::WRITE);
const BASE: u64 = 0x1000_0000;
const P: u64 = PAGE_SIZE;
const NONE: RemapFlags = RemapFlags::empty();
const MAY: RemapFlags = RemapFlags::MAYMOVE;
const FIXED: RemapFlags = RemapFlags::MAYMOVE.union(RemapFlags::FIXED);
const KEEP: RemapFlags = RemapFlags::MAYMOVE.union(RemapFlags::DONTUNMAP);

/// The mappings from [`BASE`] on in pages: `0-4 rw, ...`, a shared one with its first page.
fn shape(bench: &Bench, space: &Space) -> String {
    let mut text = String::new();
    for mapping in space.mappings(&bench.cpu).unwrap() {
        let page = |addr: u64| (addr - BASE) / P;
        let comma = if text.is_empty() { "" } else { ", " };
        let prot = if mapping.prot.contains(Prot::WRITE) { "rw" } else { "r" };
        write!(text, "{comma}{}-{} {prot}", page(mapping.range.start), page(mapping.range.end)).unwrap();
        if mapping.flags.contains(crate::vma::VmFlags::SHARED) {
            write!(text, "@{}", mapping.offset / P).unwrap();
        }
    }
    text
}

struct Stage {
    bench: Bench,
    space: Space,
}

impl Stage {
    fn new() -> Self {
        let bench = Bench::new(1200);
        let space = bench.space(SpaceConfig::default());
        Self { bench, space }
    }

    fn map(&self, page: u64, pages: u64, prot: Prot, flags: MapFlags) {
        let request = MapRequest::anonymous(pages * P, prot);
        let request = MapRequest { flags, ..request }.fixed(BASE + page * P);
        self.space.map(&self.bench.cpu, request).unwrap();
    }

    fn rw(&self, page: u64, pages: u64) {
        self.map(page, pages, RW, MapFlags::PRIVATE);
    }

    /// In pages, but for what is not aligned; the answer too.
    fn remap(&self, page: u64, old: u64, new: u64, flags: RemapFlags, to: u64) -> Result<u64, Error> {
        let moved =
            self.space.remap(&self.bench.cpu, BASE + page * P, old * P, new * P, flags, BASE + to * P);
        let all = check_private(&self.bench.cpu, &[&self.space]);
        assert_eq!(all, 0);
        moved.map(|addr| addr.wrapping_sub(BASE) / P)
    }

    fn store(&self, page: u64, value: u64) {
        self.bench.store(&self.space, BASE + page * P, value).unwrap();
    }

    fn load(&self, page: u64) -> u64 {
        self.bench.load(&self.space, BASE + page * P).unwrap()
    }

    fn shape(&self) -> String {
        shape(&self.bench, &self.space)
    }

    fn clear(&self) {
        self.space.unmap(&self.bench.cpu, BASE, 4096 * P).unwrap();
        assert!(self.space.mm().relocations.is_empty());
    }
}

/// What Linux 6.18 answers, as found by asking it.
#[test]
fn arguments_are_checked_as_linux_does() {
    let stage = Stage::new();
    let raw = |addr: u64, old: u64, new: u64, flags: RemapFlags, to: u64| {
        stage.space.remap(&stage.bench.cpu, addr, old, new, flags, to)
    };
    let (fault, invalid, memory) =
        (Err(Error::BadAddress), Err(Error::Invalid), Err::<u64, _>(Error::NoMemory));
    stage.rw(0, 4);
    // The length is not looked at when nothing is to change.
    assert_eq!(raw(BASE, 8 * P, 8 * P, NONE, 0), Ok(BASE));
    assert_eq!(raw(BASE, 1 << 46, 1 << 46, NONE, 0), Ok(BASE));
    assert_eq!(raw(BASE, 0u64.wrapping_sub(P), 0u64.wrapping_sub(P), NONE, 0), invalid);
    assert_eq!(raw(BASE, u64::MAX, u64::MAX, NONE, 0), invalid);
    // A hole.
    assert_eq!(raw(BASE + 8 * P, P, P, NONE, 0), fault);
    assert_eq!(raw(BASE + 8 * P, P, 2 * P, NONE, 0), fault);
    assert_eq!(raw(BASE + 8 * P, 2 * P, P, NONE, 0), fault);
    // Shrinking reaches as far as it says.
    assert_eq!(raw(BASE, 64 * P, 2 * P, NONE, 0), Ok(BASE));
    assert_eq!(stage.shape(), "0-2 rw");
    assert_eq!(raw(BASE, (1 << 47) - BASE + P, 2 * P, NONE, 0), invalid);
    // An old length of 0, private.
    for (flags, to) in [(MAY, 0), (NONE, 0), (FIXED, BASE), (FIXED, BASE + 16 * P)] {
        assert_eq!(raw(BASE, 0, P, flags, to), invalid);
    }
    // Addresses, lengths, flags.
    assert_eq!(raw(BASE + 1, P, P, NONE, 0), invalid);
    assert_eq!(raw(BASE, P, 0, NONE, 0), invalid);
    assert_eq!(raw(BASE, P, P, RemapFlags::from_bits_retain(8), 0), invalid);
    assert_eq!(raw(BASE, P, P, RemapFlags::FIXED, BASE + 64 * P), invalid);
    assert_eq!(raw(BASE, P, P, RemapFlags::DONTUNMAP, BASE + 64 * P), invalid);
    assert_eq!(raw(BASE, P, P, FIXED, BASE + 64 * P + 1), invalid);
    assert_eq!(raw(BASE, P, P, KEEP, BASE + 64 * P + 1), invalid);
    assert_eq!(raw(BASE, P, P, FIXED, (1 << 47) - P + 1), invalid);
    assert_eq!(raw(BASE, P, 1 << 48, MAY, 0), invalid);
    assert_eq!(raw(BASE, P, 2 * P, KEEP, 0), invalid);
    assert_eq!(raw(BASE, P, P, FIXED, 0), Err(Error::NotPermitted));
    // Both ranges have an address in common.
    stage.rw(0, 4);
    assert_eq!(stage.remap(0, 4, 4, FIXED, 2), Err(Error::BadAddress).or(invalid.map(|_| 0)));
    assert_eq!(stage.remap(0, 2, 4, FIXED, 2), Ok(2));
    assert_eq!(stage.shape(), "2-6 rw");
    // Beyond one mapping.
    stage.clear();
    stage.rw(0, 2);
    stage.map(2, 2, Prot::READ, MapFlags::PRIVATE);
    assert_eq!(stage.remap(0, 4, 6, MAY, 0), Err(Error::BadAddress));
    assert_eq!(stage.remap(0, 4, 3, FIXED, 16), Err(Error::BadAddress));
    assert_eq!(stage.remap(0, 4, 2, FIXED, 16), Ok(16));
    assert_eq!(stage.shape(), "16-18 rw");
    // No room.
    stage.rw(18, 1);
    stage.map(19, 1, Prot::READ, MapFlags::PRIVATE);
    assert_eq!(stage.remap(16, 3, 4, NONE, 0), Err(Error::NoMemory));
    assert_eq!(stage.remap(16, 2, 3, NONE, 0), Err(Error::NoMemory), "not the end of the mapping");
    assert_eq!(raw(BASE + 16 * P, P, (1 << 47) - P, MAY, 0), memory);
    drop(stage.space);
    stage.bench.assert_nothing_left();
}

#[test]
fn several_mappings_move_together() {
    let stage = Stage::new();
    let setup = || {
        stage.clear();
        stage.rw(0, 2);
        stage.map(2, 1, Prot::READ, MapFlags::PRIVATE);
        stage.rw(4, 2);
    };
    setup();
    stage.map(32, 16, Prot::READ, MapFlags::PRIVATE);
    stage.store(5, 55);
    // What corresponds to a hole stays.
    assert_eq!(stage.remap(0, 8, 8, FIXED, 34), Ok(34));
    assert_eq!(stage.shape(), "32-34 r, 34-36 rw, 36-38 r, 38-40 rw, 40-48 r");
    assert_eq!(stage.load(39), 55);
    assert_eq!(stage.remap(0, 8, 8, FIXED, 34), Err(Error::BadAddress));
    assert_eq!(stage.remap(33, 6, 6, FIXED, 0), Ok(0));
    assert_eq!(stage.shape(), "0-1 r, 1-3 rw, 3-5 r, 5-6 rw, 32-33 r, 39-40 rw, 40-48 r");
    // A hole at the start is none.
    assert_eq!(stage.remap(38, 4, 4, FIXED, 64), Err(Error::BadAddress));
    setup();
    assert_eq!(stage.remap(0, 4, 4, FIXED | KEEP, 64), Ok(64));
    assert_eq!(
        stage.shape(),
        "0-2 rw, 2-3 r, 4-6 rw, 32-33 r, 39-40 rw, 40-48 r, 64-66 rw, 66-67 r"
            .replace("32-33 r, 39-40 rw, 40-48 r, ", "")
    );
    assert_eq!(stage.remap(0, 3, 3, KEEP, 512), Err(Error::BadAddress), "one mapping only");
    drop(stage.space);
    stage.bench.assert_nothing_left();
}

#[test]
fn moved_mappings_merge_as_in_linux() {
    let stage = Stage::new();
    // Memory with pages comes home; memory without is at home everywhere.
    stage.rw(0, 4);
    stage.store(0, 1);
    stage.store(1, 2);
    assert_eq!(stage.remap(1, 1, 1, FIXED, 16), Ok(16));
    assert_eq!(stage.shape(), "0-1 rw, 2-4 rw, 16-17 rw");
    stage.rw(17, 1);
    assert_eq!(stage.shape(), "0-1 rw, 2-4 rw, 16-17 rw, 17-18 rw", "not where it belongs");
    assert_eq!(stage.remap(16, 1, 1, FIXED, 1), Ok(1));
    assert_eq!((stage.shape().as_str(), stage.load(1)), ("0-4 rw, 17-18 rw", 2));
    stage.clear();
    stage.rw(0, 4);
    assert_eq!(stage.remap(3, 1, 1, FIXED, 16), Ok(16));
    stage.rw(17, 1);
    assert_eq!(stage.shape(), "0-3 rw, 16-18 rw");
    assert_eq!(stage.remap(0, 1, 1, FIXED, 3), Ok(3));
    assert_eq!(stage.shape(), "1-4 rw, 16-18 rw");
    // The old range stays.
    stage.clear();
    stage.rw(0, 4);
    stage.store(1, 9);
    assert_eq!(stage.remap(1, 1, 1, KEEP | FIXED, 16), Ok(16));
    assert_eq!(stage.shape(), "0-4 rw, 16-17 rw");
    assert_eq!((stage.load(1), stage.load(16)), (0, 9));
    stage.clear();
    stage.rw(0, 4);
    assert_eq!(stage.remap(0, 4, 4, KEEP | FIXED, 4), Ok(4));
    assert_eq!(stage.shape(), "0-8 rw");
    stage.clear();
    stage.rw(0, 4);
    stage.store(0, 1);
    assert_eq!(stage.remap(0, 2, 2, FIXED, 4), Ok(4));
    assert_eq!((stage.shape().as_str(), stage.load(4)), ("2-4 rw, 4-6 rw", 1));
    drop(stage.space);
    stage.bench.assert_nothing_left();
}

#[test]
fn growing_in_place_joins_what_follows() {
    let stage = Stage::new();
    stage.rw(0, 4);
    stage.rw(6, 1);
    assert_eq!(stage.remap(0, 4, 6, NONE, 0), Ok(0));
    assert_eq!(stage.shape(), "0-7 rw");
    assert_eq!(stage.remap(0, 2, 4, NONE, 0), Err(Error::NoMemory));
    assert_eq!(stage.remap(0, 7, 8, NONE, 0), Ok(0));
    assert_eq!(stage.shape(), "0-8 rw");
    // Up to a stack: its guard gap is not looked at.
    stage.map(300, 1, RW, MapFlags::PRIVATE | MapFlags::GROWSDOWN);
    assert_eq!(stage.remap(0, 8, 300, NONE, 0), Ok(0));
    assert_eq!(stage.shape(), "0-300 rw, 300-301 rw");
    // No room: it moves, and its pages with it.
    stage.store(299, 7);
    let moved = stage.remap(0, 300, 700, MAY, 0).unwrap();
    assert_eq!(stage.load(moved + 299), 7);
    assert_eq!(stage.load(moved + 300), 0);
    // A child's memory, whose anon_vma has forks above it, grows in place, too.
    stage.clear();
    stage.rw(0, 2);
    stage.store(1, 1);
    let child = stage.space.fork(&stage.bench.cpu).unwrap();
    assert_eq!(child.remap(&stage.bench.cpu, BASE, 2 * P, 5 * P, NONE, 0), Ok(BASE));
    assert!(shape(&stage.bench, &child).starts_with("0-5 rw"));
    drop((child, stage.space));
    stage.bench.assert_nothing_left();
}

#[test]
fn shared_mappings_are_shown_twice() {
    let stage = Stage::new();
    let shared = || {
        stage.clear();
        stage.map(0, 4, RW, MapFlags::SHARED);
    };
    shared();
    assert_eq!(stage.remap(0, 0, 1, NONE, 0), Err(Error::NoMemory));
    // The place is cleared first, and then there is nothing to show.
    assert_eq!(stage.remap(0, 0, 2, FIXED, 0), Err(Error::BadAddress));
    assert_eq!(stage.shape(), "2-4 rw@2");
    shared();
    assert_eq!(stage.remap(1, 0, 8, FIXED, 16), Ok(16));
    assert_eq!(stage.shape(), "0-4 rw@0, 16-24 rw@1");
    stage.store(2, 22);
    assert_eq!(stage.load(17), 22);
    assert_eq!(stage.remap(1, 0, 2, FIXED, 0), Err(Error::Invalid));
    assert_eq!(stage.remap(1, 0, 2, FIXED, 2), Ok(2));
    assert_eq!(stage.shape(), "0-2 rw@0, 2-4 rw@1, 16-24 rw@1");
    let other = stage.remap(1, 0, 3, MAY, 0).unwrap();
    assert_eq!((stage.load(other + 1), stage.load(3)), (22, 22));
    drop(stage.space);
    stage.bench.assert_nothing_left();
}

#[test]
fn pages_of_files_and_their_copies_move() {
    let bench = Bench::new(600);
    let object = Object::file(&bench.machine, TestFile::new(&[7; 16 * 4096])).unwrap();
    let space = bench.space(SpaceConfig::default());
    for shared in [true, false] {
        let request = MapRequest::object(&object, 0, 16 * P, RW, shared).fixed(BASE);
        space.map(&bench.cpu, request).unwrap();
        for page in [0, 3, 15] {
            bench.store(&space, BASE + page * P, 100 + page).unwrap();
        }
        bench.load(&space, BASE + 8 * P).unwrap();
        // Out of the middle, off by pages from any table's boundary.
        let to = BASE + 777 * P;
        assert_eq!(space.remap(&bench.cpu, BASE + 2 * P, 10 * P, 10 * P, FIXED, to), Ok(to));
        check_private(&bench.cpu, &[&space]);
        check_object(&bench.cpu, &object, &[&space]);
        assert_eq!(bench.load(&space, to + P), Ok(103));
        assert_eq!(bench.load(&space, BASE + 2 * P).ok(), None);
        let child = space.fork(&bench.cpu).unwrap();
        bench.store(&space, to + P, 104).unwrap();
        assert_eq!(child.remap(&bench.cpu, to, 10 * P, 10 * P, FIXED, BASE + 2 * P), Ok(BASE + 2 * P));
        check_private(&bench.cpu, &[&space, &child]);
        check_object(&bench.cpu, &object, &[&space, &child]);
        assert_eq!(bench.load(&child, BASE + 3 * P), Ok(if shared { 104 } else { 103 }));
        // Truncation finds them, wherever they are.
        object.set_len(&bench.cpu, 3 * P);
        check_object(&bench.cpu, &object, &[&space, &child]);
        assert!(bench.load(&space, to + P).is_err() && bench.load(&child, BASE + 3 * P).is_err());
        object.set_len(&bench.cpu, 16 * P);
        space.unmap(&bench.cpu, BASE, 4096 * P).unwrap();
    }
    drop((space, object));
    bench.assert_nothing_left();
}

#[test]
fn shared_pages_are_found_after_forks_and_moves() {
    for locking in [Locking::Speculative, Locking::Classic] {
        let bench = Bench::new(900);
        let space = bench.space(SpaceConfig::with_locking(locking));
        let cpu = &bench.cpu;
        space.map(cpu, MapRequest::anonymous(8 * P, RW).fixed(BASE)).unwrap();
        for page in 0..8 {
            bench.store(&space, BASE + page * P, page).unwrap();
        }
        let place = |n: u64| BASE + (1 + n) * 611 * P;
        let go = |space: &Space, from: u64, to: u64| {
            assert_eq!(space.remap(cpu, from, 8 * P, 8 * P, FIXED, to), Ok(to));
        };
        go(&space, BASE, place(0));
        assert!(space.mm().relocations.is_empty(), "nobody shares them");
        let child = space.fork(cpu).unwrap();
        go(&space, place(0), place(1));
        assert_eq!(space.mm().relocations.len(), 1);
        go(&child, place(0), place(2));
        let grandchild = child.fork(cpu).unwrap();
        let all = [&space, &child, &grandchild];
        assert_eq!(check_private(cpu, &all), 8);
        for (n, space) in all.into_iter().enumerate() {
            bench.store(space, place([1, 2, 2][n]) + n as u64 * P, 50).unwrap();
        }
        assert_eq!(check_private(cpu, &all), 8);
        // Home again, onward, and the end of who had them first.
        go(&grandchild, place(2), place(0));
        go(&child, place(2), place(3));
        assert_eq!(check_private(cpu, &all), 8);
        assert!(grandchild.mm().relocations.is_empty());
        drop(space);
        assert_eq!(check_private(cpu, &[&child, &grandchild]), 6);
        child.unmap(cpu, place(3), 8 * P).unwrap();
        assert!(child.mm().relocations.is_empty());
        assert_eq!(check_private(cpu, &[&child, &grandchild]), 0);
        drop((child, grandchild));
        bench.assert_nothing_left();
    }
}

fn is_block(bench: &Bench, space: &Space, addr: u64) -> bool {
    let pin = bench.cpu.pin();
    let walk = space.mm().page_table.walk(&space.mm().ram(&pin), addr);
    walk.is_some_and(|walk| walk.level == Level::BLOCK && Pte::block::<TestFormat>(walk.raw).is_some())
}

#[test]
fn huge_pages_move_whole_where_they_fit() {
    let bench = Bench::new(5000);
    let space = bench.space(SpaceConfig { huge_pages: HugePages::Always, ..SpaceConfig::default() });
    let (cpu, len) = (&bench.cpu, 2 * BLOCK_SIZE);
    let home = 1 << 30;
    space.map(cpu, MapRequest::anonymous(len, RW).fixed(home)).unwrap();
    let words = [0, 5, 511, 512, 1023];
    for page in words {
        bench.store(&space, home + page * P, 1 + page).unwrap();
    }
    assert!(is_block(&bench, &space, home) && is_block(&bench, &space, home + BLOCK_SIZE));
    let check = |at: u64, spaces: &[&Space]| {
        for page in words {
            assert_eq!(bench.load(spaces[0], at + page * P), Ok(1 + page));
        }
        check_private(cpu, spaces)
    };
    // To another table of level 2.
    let far = (7 << 30) - BLOCK_SIZE;
    let before = space.page_tables();
    assert_eq!(space.remap(cpu, home, len, len, FIXED, far), Ok(far));
    assert!(is_block(&bench, &space, far) && is_block(&bench, &space, far + BLOCK_SIZE));
    assert_eq!(check(far, &[&space]), 0);
    assert!(space.page_tables() <= before + 3, "no tables of pages");
    // Shared, and whole all the same.
    let child = space.fork(cpu).unwrap();
    assert_eq!(child.remap(cpu, far, len, len, FIXED, home), Ok(home));
    assert!(is_block(&bench, &child, home));
    assert_eq!(check(home, &[&child, &space]), 1024);
    // Not aligned: divided, all of them, in both spaces' own way.
    let skew = home + 5 * BLOCK_SIZE + 3 * P;
    assert_eq!(child.remap(cpu, home, len, len, FIXED, skew), Ok(skew));
    assert!(!is_block(&bench, &child, skew + BLOCK_SIZE) && is_block(&bench, &space, far));
    assert_eq!(check(skew, &[&child, &space]), 1024);
    // A table of pages moves whole, too.
    let other = skew + 8 * BLOCK_SIZE;
    let tables = child.page_tables();
    assert_eq!(child.remap(cpu, skew, len, len, FIXED, other), Ok(other));
    assert_eq!(child.page_tables(), tables);
    assert_eq!(check(other, &[&child, &space]), 1024);
    // A part of a block.
    assert_eq!(space.remap(cpu, far + 3 * P, 600 * P, 600 * P, FIXED, home), Ok(home));
    assert_eq!(bench.load(&space, home + 2 * P), Ok(6));
    assert_eq!((bench.load(&space, far), bench.load(&space, far + 1023 * P)), (Ok(1), Ok(1024)));
    assert_eq!(check_private(cpu, &[&child, &space]), 1024);
    // Shrinking and moving at once divides in the middle.
    let at = child.map(cpu, MapRequest { align: BLOCK_SIZE, ..MapRequest::anonymous(len, RW) }).unwrap();
    bench.store(&child, at + 512 * P, 1).unwrap();
    bench.store(&child, at + 700 * P, 2).unwrap();
    assert_eq!(child.remap(cpu, at, len, 600 * P, FIXED, home), Ok(home));
    assert_eq!((bench.load(&child, home + 512 * P), child.map_count()), (Ok(1), 2));
    assert_eq!(check_private(cpu, &[&child, &space]), 1024);
    drop((space, child));
    bench.assert_nothing_left();
}

#[test]
fn what_is_forgotten_and_hidden_moves_as_it_is() {
    let stage = Stage::new();
    let (space, cpu) = (&stage.space, &stage.bench.cpu);
    stage.rw(0, 8);
    for page in 0..8 {
        stage.store(page, page + 1);
    }
    space.protect(cpu, BASE + 2 * P, 2 * P, Prot::empty()).unwrap();
    space.advise(cpu, BASE + 5 * P, P, Advice::DontNeed).unwrap();
    assert_eq!(stage.remap(0, 8, 8, FIXED, 513), Ok(513));
    assert_eq!(stage.shape().split(", ").count(), 3);
    space.protect(cpu, BASE + 515 * P, 2 * P, RW).unwrap();
    let words: Vec<u64> = (0..8).map(|page| stage.load(513 + page)).collect();
    assert_eq!(words, [1, 2, 3, 4, 5, 0, 7, 8]);
    assert_eq!(space.map_count(), 1);
    drop(stage.space);
    stage.bench.assert_nothing_left();
}
