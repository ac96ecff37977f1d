//! Huge pages: made by first touches and by collapse, divided by everything that concerns a part of them.

mod model;
mod races;

use super::rmap::check_private;
use super::{Bench, Space};
use crate::addr::{Frame, PAGE_SIZE};
use crate::error::{Error, FaultError};
use crate::mm::BLOCK_SIZE;
use crate::page_table::{Level, Pte};
use crate::space::{HugePages, Locking, MapRequest, SpaceConfig};
use crate::stats::Counter;
use crate::testing::{TestFormat, TestHost};
use crate::vma::{Access, Advice, MapFlags, Prot};
use alloc::vec::Vec;

const RW: Prot = Prot::READ.union(Prot::WRITE);
/// The last block below 1 GiB, so that the next is in another table of level 2.
const BASE: u64 = (1 << 30) - BLOCK_SIZE;

fn always() -> SpaceConfig {
    SpaceConfig { huge_pages: HugePages::Always, ..SpaceConfig::default() }
}

/// A space with `blocks` times 2 MiB mapped from [`BASE`] on.
fn mapped(bench: &Bench, config: SpaceConfig, blocks: u64) -> Space {
    let space = bench.space(config);
    let request = MapRequest::anonymous(blocks * BLOCK_SIZE, RW).fixed(BASE);
    assert_eq!(space.map(&bench.cpu, request), Ok(BASE));
    space
}

/// True when `addr` is mapped by a block, accessible or not.
fn is_block(bench: &Bench, space: &Space, addr: u64) -> bool {
    let pin = bench.cpu.pin();
    let ram = space.mm().ram(&pin);
    let walk = space.mm().page_table.walk(&ram, addr);
    walk.is_some_and(|walk| walk.level == Level::BLOCK && Pte::block::<TestFormat>(walk.raw).is_some())
}

fn count(bench: &Bench, counter: Counter) -> u64 {
    bench.machine.stats().sum(counter)
}

fn page(n: u64) -> u64 {
    BASE + n * PAGE_SIZE
}

#[test]
fn the_first_store_makes_a_block_and_unmapping_gives_it_back_whole() {
    for locking in [Locking::Speculative, Locking::Classic] {
        let bench = Bench::new(2100);
        let space = mapped(&bench, SpaceConfig { locking, ..always() }, 2);
        bench.store(&space, page(700), 7).unwrap();
        assert!(!is_block(&bench, &space, BASE) && is_block(&bench, &space, page(512)));
        assert_eq!((space.resident_pages(&bench.cpu), count(&bench, Counter::ThpFaultAlloc)), (512, 1));
        assert_eq!((bench.load(&space, page(700)), bench.load(&space, page(701))), (Ok(7), Ok(0)));
        // A load finds zeros, by a small page.
        assert_eq!(bench.load(&space, page(3)), Ok(0));
        assert!(!is_block(&bench, &space, BASE));
        assert_eq!(count(&bench, Counter::PgFault), 2);
        space.unmap(&bench.cpu, BASE, 2 * BLOCK_SIZE).unwrap();
        assert_eq!((space.resident_pages(&bench.cpu), space.page_tables()), (0, 1));
        drop(space);
        bench.assert_nothing_left();
        assert_eq!(count(&bench, Counter::ThpSplitPmd), 0);
    }
}

#[test]
fn a_stack_mapped_over_part_of_a_block_begins_with_zeros() {
    // It keeps others away from its guard gap too, which lies in the block before, but it is where the stack begins that the
    // block is divided.
    let bench = Bench::new(2100);
    let space = mapped(&bench, always(), 2);
    for n in [512, 612] {
        bench.store(&space, page(n), n).unwrap();
    }
    assert!(is_block(&bench, &space, page(512)));
    let stack = MapRequest::anonymous(424 * PAGE_SIZE, RW).with(MapFlags::GROWSDOWN).fixed(page(600));
    assert_eq!(space.map(&bench.cpu, stack), Ok(page(600)));
    let found = [512, 612, 690].map(|n| bench.load(&space, page(n)));
    assert_eq!(found, [Ok(512), Ok(0), Ok(0)]);
    drop(space);
    bench.assert_nothing_left();
}

#[test]
fn policy_and_advice_decide() {
    let bench = Bench::new(3000);
    let touched = |config: HugePages, advice: Option<Advice>| {
        let space = mapped(&bench, SpaceConfig { huge_pages: config, ..SpaceConfig::default() }, 1);
        if let Some(advice) = advice {
            space.advise(&bench.cpu, BASE, BLOCK_SIZE, advice).unwrap();
        }
        bench.store(&space, BASE, 1).unwrap();
        is_block(&bench, &space, BASE)
    };
    use HugePages::{Always, Madvise, Never};
    for (config, advice, expected) in [
        (Never, None, false),
        (Never, Some(Advice::HugePage), false),
        (Madvise, None, false),
        (Madvise, Some(Advice::HugePage), true),
        (Always, None, true),
        (Always, Some(Advice::NoHugePage), false),
    ] {
        assert_eq!(touched(config, advice), expected, "{config:?} {advice:?}");
    }
    // A VMA that does not cover all of the 2 MiB gets small pages.
    let space = mapped(&bench, always(), 2);
    space.unmap(&bench.cpu, page(600), PAGE_SIZE).unwrap();
    bench.store(&space, page(599), 1).unwrap();
    bench.store(&space, page(0), 1).unwrap();
    assert!(!is_block(&bench, &space, page(599)) && is_block(&bench, &space, page(0)));
    drop(space);
    bench.assert_nothing_left();
    assert_eq!(
        (Advice::from_linux(14), Advice::from_linux(25)),
        (Some(Advice::HugePage), Some(Advice::Collapse))
    );
}

#[test]
fn populate_makes_blocks() {
    let bench = Bench::new(3000);
    let space = mapped(&bench, always(), 3);
    space.advise(&bench.cpu, page(100), 2 * BLOCK_SIZE, Advice::PopulateWrite).unwrap();
    assert_eq!((space.resident_pages(&bench.cpu), count(&bench, Counter::ThpFaultAlloc)), (3 * 512, 3));
    assert_eq!(count(&bench, Counter::PgFault), 0);
    space.advise(&bench.cpu, BASE, 3 * BLOCK_SIZE, Advice::PopulateRead).unwrap();
    drop(space);
    bench.assert_nothing_left();
}

#[test]
fn without_a_block_there_are_small_pages() {
    let bench = Bench::new(1300);
    let space = mapped(&bench, always(), 2);
    // One frame of each block is in use.
    let hoard: Vec<Frame> = {
        let pin = bench.cpu.pin();
        (0..1200).map(|_| bench.machine.frames().allocate(&pin).unwrap()).collect()
    };
    {
        let pin = bench.cpu.pin();
        hoard
            .iter()
            .filter(|frame| frame.0 % 3 != 0)
            .for_each(|&frame| bench.machine.frames().free(&pin, frame));
    }
    bench.store(&space, BASE, 5).unwrap();
    assert!(!is_block(&bench, &space, BASE));
    assert_eq!((count(&bench, Counter::ThpFaultFallback), bench.load(&space, BASE)), (1, Ok(5)));
    assert_eq!(
        (space.advise(&bench.cpu, BASE, BLOCK_SIZE, Advice::Collapse), bench.load(&space, BASE)),
        (Err(Error::NoMemory), Ok(5))
    );
    assert_eq!(count(&bench, Counter::ThpCollapseAllocFailed), 1);
    drop(space);
    let pin = bench.cpu.pin();
    hoard.iter().filter(|frame| frame.0 % 3 == 0).for_each(|&frame| bench.machine.frames().free(&pin, frame));
    drop(pin);
    bench.assert_nothing_left();
}

/// Fills the first block, a word a page.
fn filled(bench: &Bench, config: SpaceConfig) -> Space {
    let space = mapped(bench, config, 2);
    for n in 0..512 {
        bench.store(&space, page(n) + 8, n + 1).unwrap();
    }
    assert!(is_block(bench, &space, BASE));
    space
}

/// The pages of the first block but `but` hold what [`filled`] stored.
fn assert_filled(bench: &Bench, space: &Space, but: impl Fn(u64) -> bool) {
    for n in (0..512).filter(|&n| !but(n)) {
        assert_eq!(bench.load(space, page(n) + 8), Ok(n + 1), "page {n}");
    }
}

#[test]
fn calls_about_a_part_divide_it() {
    let bench = Bench::new(6000);
    for part in [0..1, 511..512, 100..200, 300..512, 0..300] {
        let at = |n: u64| page(part.start) + n;
        let len = (part.end - part.start) * PAGE_SIZE;
        let inside = |n: u64| part.contains(&n);
        let (cpu, first) = (&bench.cpu, at(8));

        let space = filled(&bench, always());
        space.unmap(cpu, at(0), len).unwrap();
        assert!(!is_block(&bench, &space, BASE));
        assert_eq!(bench.load(&space, first), Err(FaultError::NotMapped));
        assert_filled(&bench, &space, inside);
        check_private(cpu, &[&space]);

        let space = filled(&bench, always());
        space.advise(cpu, at(0), len, Advice::DontNeed).unwrap();
        assert_eq!(bench.load(&space, first), Ok(0));
        assert_filled(&bench, &space, inside);

        let space = filled(&bench, always());
        space.protect(cpu, at(0), len, Prot::READ).unwrap();
        assert_eq!(bench.store(&space, first, 9), Err(FaultError::NotAllowed));
        assert_filled(&bench, &space, |_| false);
        space.protect(cpu, at(0), len, Prot::empty()).unwrap();
        assert_eq!(bench.load(&space, first), Err(FaultError::NotAllowed));
        space.protect(cpu, at(0), len, RW).unwrap();
        assert_filled(&bench, &space, |_| false);
        bench.store(&space, first, 9).unwrap();

        let space = filled(&bench, always());
        space.map(cpu, MapRequest::anonymous(len, RW).fixed(at(0))).unwrap();
        assert_eq!(bench.load(&space, first), Ok(0));
        assert_filled(&bench, &space, inside);

        // No page is touched, but a VMA's boundary comes into the block.
        let space = filled(&bench, always());
        space.advise(cpu, at(0), len, Advice::DontFork).unwrap();
        assert!(!is_block(&bench, &space, BASE));
        let child = space.fork(cpu).unwrap();
        assert_eq!(bench.load(&child, first), Err(FaultError::NotMapped));
        assert_filled(&bench, &child, inside);
        check_private(cpu, &[&space, &child]);
    }
    let space = bench.space(always());
    space.set_heap(&bench.cpu, BASE).unwrap();
    space.brk(&bench.cpu, BASE + BLOCK_SIZE);
    bench.store(&space, page(10), 3).unwrap();
    assert!(is_block(&bench, &space, BASE));
    space.brk(&bench.cpu, page(50));
    assert_eq!(
        (bench.load(&space, page(10)), bench.load(&space, page(50))),
        (Ok(3), Err(FaultError::NotMapped))
    );
    assert_eq!(space.resident_pages(&bench.cpu), 50);
    drop(space);
    bench.assert_nothing_left();
}

#[test]
fn all_of_it_is_protected_and_hidden_as_one() {
    let bench = Bench::new(1600);
    let space = filled(&bench, always());
    let protect = |prot| space.protect(&bench.cpu, BASE, 2 * BLOCK_SIZE, prot).unwrap();
    protect(Prot::READ);
    assert_eq!(bench.store(&space, page(4), 9), Err(FaultError::NotAllowed));
    assert_filled(&bench, &space, |_| false);
    protect(Prot::empty());
    assert_eq!(bench.load(&space, page(4)), Err(FaultError::NotAllowed));
    assert!(is_block(&bench, &space, BASE));
    let child = space.fork(&bench.cpu).unwrap();
    assert_eq!(space.resident_pages(&bench.cpu), 512);
    check_private(&bench.cpu, &[&space, &child]);
    protect(RW | Prot::EXEC);
    assert_filled(&bench, &space, |_| false);
    drop(child);
    bench.store(&space, page(4) + 8, 5).unwrap();
    assert!(is_block(&bench, &space, BASE));
    let translation = space.translate(&bench.cpu, page(5), Access::Execute).unwrap();
    assert_eq!(space.translate(&bench.cpu, page(4), Access::Write).unwrap().frame.0 + 1, translation.frame.0);
    // A hidden block that is divided, and one that goes.
    protect(Prot::empty());
    space.unmap(&bench.cpu, page(5), PAGE_SIZE).unwrap();
    space.protect(&bench.cpu, BASE, 5 * PAGE_SIZE, RW).unwrap();
    assert_eq!(
        (bench.load(&space, page(4) + 8), bench.load(&space, page(6))),
        (Ok(5), Err(FaultError::NotAllowed))
    );
    assert_eq!(count(&bench, Counter::ThpSplitPmd), 1);
    drop(space);
    bench.assert_nothing_left();
}

#[test]
fn forks_share_it_until_someone_stores() {
    let bench = Bench::new(3000);
    let space = filled(&bench, always());
    let child = space.fork(&bench.cpu).unwrap();
    assert!(is_block(&bench, &space, BASE) && is_block(&bench, &child, BASE));
    let used = bench.machine.usage().frames_free;
    bench.store(&child, page(3) + 8, 99).unwrap();
    assert!(is_block(&bench, &space, BASE) && !is_block(&bench, &child, BASE));
    // One table, one page.
    assert_eq!(used - bench.machine.usage().frames_free, 2);
    assert_filled(&bench, &space, |_| false);
    assert_filled(&bench, &child, |n| n == 3);
    check_private(&bench.cpu, &[&space, &child]);
    let grandchild = child.fork(&bench.cpu).unwrap();
    bench.store(&space, page(4) + 8, 98).unwrap();
    assert!(!is_block(&bench, &space, BASE));
    assert_filled(&bench, &grandchild, |n| n == 3);
    check_private(&bench.cpu, &[&space, &child, &grandchild]);
    assert_eq!(count(&bench, Counter::ThpSplitPmd), 2);
    drop((space, child, grandchild));
    // The last owner stores in place.
    let space = filled(&bench, always());
    space.fork(&bench.cpu).unwrap().destroy(&bench.cpu);
    let reused = count(&bench, Counter::PgReuse);
    bench.store(&space, page(3) + 8, 4).unwrap();
    assert!(is_block(&bench, &space, BASE));
    assert_eq!(count(&bench, Counter::PgReuse), reused + 1);
    drop(space);
    bench.assert_nothing_left();
}

#[test]
fn frames_of_a_block_that_both_sides_gave_up_come_back() {
    let bench = Bench::on(TestHost::with_tickets(1, 3000), 3);
    let space = filled(&bench, always());
    let child = space.fork(&bench.cpu).unwrap();
    child.unmap(&bench.cpu, page(0), 100 * PAGE_SIZE).unwrap();
    // The first hundred are gone with this; the rest when the child goes.
    space.unmap(&bench.cpu, BASE, BLOCK_SIZE).unwrap();
    assert_filled(&bench, &child, |n| n < 100);
    drop((space, child));
    bench.assert_nothing_left();
    let space = filled(&bench, always());
    space.advise(&bench.cpu, BASE, BLOCK_SIZE, Advice::DontNeed).unwrap();
    assert_eq!(bench.load(&space, page(3)), Ok(0));
    drop(space);
    bench.assert_nothing_left();
}

#[test]
fn collapse_keeps_every_byte() {
    for locking in [Locking::Speculative, Locking::Classic] {
        let bench = Bench::on(TestHost::with_tickets(1, 4000), 3);
        let space = mapped(&bench, SpaceConfig::with_locking(locking), 2);
        let collapse = |space: &Space| space.advise(&bench.cpu, BASE, BLOCK_SIZE, Advice::Collapse);
        assert_eq!(collapse(&space), Err(Error::Invalid), "nothing is there");
        for n in 0..512 {
            match n % 4 {
                0 => bench.store(&space, page(n) + n * 8, n).unwrap_or(()),
                1 => drop(bench.load(&space, page(n))),
                _ => {}
            }
        }
        let check = |space: &Space| {
            for n in 0..512 {
                assert_eq!(bench.load(space, page(n) + n * 8), Ok(if n % 4 == 0 { n } else { 0 }));
            }
        };
        let tables = space.page_tables();
        collapse(&space).unwrap();
        assert!(is_block(&bench, &space, BASE));
        assert_eq!((space.page_tables(), space.resident_pages(&bench.cpu)), (tables - 1, 512));
        check(&space);
        check_private(&bench.cpu, &[&space]);
        collapse(&space).unwrap();
        bench.store(&space, page(1), 5).unwrap();
        bench.store(&space, page(1), 0).unwrap();
        // Shared and divided, then gathered again: the child's pages are its own from then on.
        let child = space.fork(&bench.cpu).unwrap();
        bench.store(&child, page(9), 1).unwrap();
        bench.store(&child, page(9), 0).unwrap();
        assert!(!is_block(&bench, &child, BASE));
        collapse(&child).unwrap();
        assert!(is_block(&bench, &child, BASE));
        check(&child);
        check(&space);
        check_private(&bench.cpu, &[&space, &child]);
        bench.store(&child, page(2), 77).unwrap();
        assert_eq!(bench.load(&space, page(2)), Ok(0));
        assert_eq!(count(&bench, Counter::ThpCollapseAlloc), 2);
        // What is not for blocks is refused.
        let refused = |prot: Prot, advice: Option<Advice>| {
            space.protect(&bench.cpu, page(600), PAGE_SIZE, prot).unwrap();
            if let Some(advice) = advice {
                space.advise(&bench.cpu, page(512), BLOCK_SIZE, advice).unwrap();
            }
            space.advise(&bench.cpu, page(512), BLOCK_SIZE, Advice::Collapse)
        };
        bench.store(&space, page(530), 1).unwrap();
        assert_eq!(refused(Prot::READ, None), Err(Error::Invalid));
        assert_eq!(refused(RW, Some(Advice::NoHugePage)), Err(Error::Invalid));
        assert_eq!(refused(RW, Some(Advice::HugePage)), Ok(()));
        space.unmap(&bench.cpu, page(512), BLOCK_SIZE).unwrap();
        assert_eq!(
            space.advise(&bench.cpu, BASE, 2 * BLOCK_SIZE, Advice::Collapse),
            Err(Error::NoMemory),
            "a hole"
        );
        drop((space, child));
        bench.assert_nothing_left();
    }
}

#[test]
fn the_collapser_goes_round() {
    let bench = Bench::new(6000);
    let space = mapped(&bench, SpaceConfig { collapse_max_none: 500, ..SpaceConfig::default() }, 6);
    for block in 0..6 {
        let pages = if block == 2 { 5 } else { 20 };
        (0..pages).for_each(|n| bench.store(&space, page(block * 512 + n * 3), n).unwrap());
    }
    let child = space.fork(&bench.cpu).unwrap();
    (0..20).for_each(|n| bench.store(&child, page(512 + n * 3), 9).unwrap());
    // Nothing was advised.
    assert_eq!(space.collapse_step(&bench.cpu, 100).collapsed, 0);
    space.advise(&bench.cpu, BASE, 5 * BLOCK_SIZE, Advice::HugePage).unwrap();
    // All pages but those of the second block are shared.
    let step = space.collapse_step(&bench.cpu, 100);
    assert_eq!((step.collapsed, step.wrapped), (1, true));
    assert_eq!(count(&bench, Counter::ThpScanExceedShare), 4);
    assert!(is_block(&bench, &space, page(512)));
    child.destroy(&bench.cpu);
    let mut collapsed = 0;
    for _ in 0..3 {
        collapsed += space.collapse_step(&bench.cpu, 3).collapsed;
    }
    assert_eq!(collapsed, 3);
    let blocks: Vec<bool> = (0..6).map(|block| is_block(&bench, &space, page(block * 512))).collect();
    assert_eq!(blocks, [true, true, false, true, true, false]);
    assert!(count(&bench, Counter::ThpScanExceedNone) > 0);
    for block in 0..6 {
        let pages = if block == 2 { 5 } else { 20 };
        (0..pages).for_each(|n| assert_eq!(bench.load(&space, page(block * 512 + n * 3)), Ok(n)));
    }
    check_private(&bench.cpu, &[&space]);
    drop(space);
    bench.assert_nothing_left();
}

#[test]
fn what_cannot_be_divided_for_want_of_memory_stays_as_it_is() {
    let bench = Bench::new(1400);
    let space = filled(&bench, always());
    let child = space.fork(&bench.cpu).unwrap();
    let hoard: Vec<Frame> = {
        let pin = bench.cpu.pin();
        core::iter::from_fn(|| bench.machine.frames().allocate(&pin)).collect()
    };
    let (cpu, at) = (&bench.cpu, page(7));
    let layout = space.mappings(cpu).unwrap();
    assert_eq!(space.unmap(cpu, at, PAGE_SIZE), Err(Error::NoMemory));
    assert_eq!(space.protect(cpu, at, PAGE_SIZE, Prot::READ), Err(Error::NoMemory));
    assert_eq!(space.advise(cpu, at, PAGE_SIZE, Advice::DontNeed), Err(Error::NoMemory));
    assert_eq!(space.advise(cpu, at, PAGE_SIZE, Advice::DontDump), Err(Error::Again));
    assert_eq!(space.map(cpu, MapRequest::anonymous(PAGE_SIZE, RW).fixed(at)), Err(Error::NoMemory));
    assert_eq!(bench.store(&space, at, 3), Err(FaultError::OutOfMemory));
    assert_eq!(space.mappings(cpu).unwrap(), layout);
    assert!(is_block(&bench, &space, BASE));
    assert_filled(&bench, &space, |_| false);
    assert_filled(&bench, &child, |_| false);
    // What needs no division is possible.
    space.unmap(cpu, BASE, BLOCK_SIZE).unwrap();
    {
        let pin = cpu.pin();
        hoard.into_iter().for_each(|frame| bench.machine.frames().free(&pin, frame));
    }
    assert_filled(&bench, &child, |_| false);
    drop((space, child));
    bench.assert_nothing_left();
}
