//! The counts that faults and calls keep, and what a walk of the page tables finds.

use super::model::Random;
use super::{Bench, Space, store};
use crate::addr::{PAGE_SHIFT, PAGE_SIZE};
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::HugePages;
use crate::mm::rss::{PEAK_STEP, Rss};
use crate::object::Object;
use crate::page_table::{Level, Pte, Slot};
use crate::space::{Backing, Footprint, MapRequest, Share, SpaceConfig};
use crate::testing::{TestFile, TestHost};
use crate::vma::{Advice, Prot};
use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use core::ops::ControlFlow;
use std::thread;

type Format = <TestHost as Host>::Format;

const RW: Prot = Prot::READ.union(Prot::WRITE);

/// At rest, what was counted is what is there.
pub(super) fn check_counts(cpu: &Cpu<TestHost>, space: &Space) {
    let mut found = Rss::default();
    let mut all = Footprint::default();
    for mapping in space.mappings(cpu).unwrap() {
        let footprint = space.footprint(cpu, &mapping);
        found.anon += footprint.anonymous >> PAGE_SHIFT;
        let rest = (footprint.resident - footprint.anonymous) >> PAGE_SHIFT;
        match mapping.backing {
            Backing::File => found.file += rest,
            Backing::Shared => found.shmem += rest,
            _ => assert_eq!(rest, 0, "private memory shows private pages"),
        }
        found.swap += footprint.swap >> PAGE_SHIFT;
        all += footprint;
        let split = footprint.shared_clean
            + footprint.shared_dirty
            + footprint.private_clean
            + footprint.private_dirty;
        assert_eq!(split, footprint.resident);
        assert!(footprint.referenced <= footprint.resident && footprint.huge <= footprint.anonymous);
    }
    assert_eq!(space.mm().rss(), found);
    assert_eq!(space.resident_pages(cpu), found.resident());
    let (resident, mapped) = space.mm().peaks();
    assert!(resident >= all.resident && mapped >= space.mapped_bytes());
}

/// The shares of all spaces of a machine add up to the pages that any of them maps.
pub(super) fn check_shares<'a>(cpu: &Cpu<TestHost>, spaces: impl Iterator<Item = &'a Space>) {
    let mut frames = BTreeSet::new();
    let (mut shares, mut pages) = (Share::default(), 0);
    for space in spaces {
        for mapping in space.mappings(cpu).unwrap() {
            let footprint = space.footprint(cpu, &mapping);
            shares += footprint.share;
            pages += footprint.resident >> PAGE_SHIFT;
        }
        let zero = cpu.machine().zero_frame();
        space.mm().for_each_part(cpu, space.config().range, |ram, part| {
            let _ = space.mm().page_table.for_each_run(ram, part, |run| {
                Slot::for_each_used(run.slots, |_, slot| {
                    let raw = slot.load();
                    if run.level == Level::BLOCK {
                        let first = Pte::block::<Format>(raw).map(|(first, _)| first.0);
                        frames.extend(first.into_iter().flat_map(|first| first..first + 512));
                    } else if let Some(frame) = Pte::decode::<Format>(raw).frame()
                        && frame != zero
                    {
                        frames.insert(frame.0);
                    }
                    ControlFlow::Continue(())
                })
            });
        });
    }
    let expected = (frames.len() as u64) << PAGE_SHIFT;
    // A third is rounded down to 12 bits behind the point.
    assert!(shares.bytes() <= expected, "{} of {expected}, {pages} pages", shares.bytes());
    let lost = expected - shares.bytes();
    assert!(lost <= 1 + (pages >> PAGE_SHIFT), "{} of {expected}", shares.bytes());
}

fn footprint_at(b: &Bench, space: &Space, addr: u64) -> Footprint {
    let mappings = space.mappings(&b.cpu).unwrap();
    let mapping = mappings.iter().find(|mapping| mapping.range.contains(addr)).unwrap();
    space.footprint(&b.cpu, mapping)
}

#[test]
fn forks_share_pages_and_parents_keep_theirs() {
    let b = Bench::new(2000);
    let space = b.space(SpaceConfig::default());
    let at = space.map_anonymous(&b.cpu, 8 * PAGE_SIZE).unwrap();
    (0..6).for_each(|n| b.store(&space, at + n * PAGE_SIZE, n).unwrap());
    b.load(&space, at + 7 * PAGE_SIZE).unwrap();
    let children: Vec<_> = (0..2).map(|_| space.fork(&b.cpu).unwrap()).collect();
    b.store(&children[0], at, 9).unwrap();
    let parent = footprint_at(&b, &space, at);
    // One page is shared by two, five by three; the page of zeros does not count.
    assert_eq!((parent.resident, parent.anonymous, parent.shared_dirty), (6 << 12, 6 << 12, 6 << 12));
    assert_eq!(parent.share.bytes(), 2048 + 5 * 4096 / 3);
    let child = footprint_at(&b, &children[0], at);
    assert_eq!((child.private_dirty, child.shared_dirty), (1 << 12, 5 << 12));
    // Only what it has stored to: the rest was copied as never accessed.
    assert_eq!((child.referenced, parent.referenced), (1 << 12, 6 << 12));
    for space in children.iter().chain([&space]) {
        check_counts(&b.cpu, space);
    }
    check_shares(&b.cpu, children.iter().chain([&space]));
    drop(children);
    assert_eq!(footprint_at(&b, &space, at).private_dirty, 6 << 12);
    drop(space);
    b.assert_nothing_left();
}

#[test]
fn pages_of_objects_are_shared_by_those_who_map_them() {
    let b = Bench::new(2000);
    let space = b.space(SpaceConfig::default());
    let object = Object::file(&b.machine, TestFile::new(&[1; 16 * 4096])).unwrap();
    let map = |shared, prot| {
        space.map(&b.cpu, MapRequest::object(&object, 0, 16 * PAGE_SIZE, prot, shared)).unwrap()
    };
    let first = map(true, RW);
    space.advise(&b.cpu, first, 16 * PAGE_SIZE, Advice::PopulateRead).unwrap();
    b.store(&space, first, 7).unwrap();
    let alone = footprint_at(&b, &space, first);
    assert_eq!(
        (alone.private_clean, alone.private_dirty, alone.share.bytes()),
        (15 << 12, 1 << 12, 16 << 12)
    );
    let second = map(false, RW);
    space.advise(&b.cpu, second, 4 * PAGE_SIZE, Advice::PopulateRead).unwrap();
    b.store(&space, second + 3 * PAGE_SIZE, 7).unwrap();
    let both = footprint_at(&b, &space, first);
    assert_eq!((both.shared_dirty, both.shared_clean, both.private_clean), (1 << 12, 2 << 12, 13 << 12));
    assert_eq!(both.share.bytes(), (13 << 12) + 3 * 2048);
    let other = footprint_at(&b, &space, second);
    assert_eq!((other.anonymous, other.private_dirty, other.resident), (1 << 12, 1 << 12, 4 << 12));
    assert_eq!(other.share_file.bytes(), 3 * 2048);
    check_counts(&b.cpu, &space);
    check_shares(&b.cpu, [&space].into_iter());
    assert_eq!(space.mm().rss(), Rss { anon: 1, file: 19, shmem: 0, swap: 0 });
    object.set_len(&b.cpu, 2 * PAGE_SIZE);
    assert_eq!(space.mm().rss(), Rss { anon: 0, file: 4, shmem: 0, swap: 0 });
    check_counts(&b.cpu, &space);
    drop((space, object));
    b.assert_nothing_left();
}

#[test]
fn huge_pages_count_as_many_and_collapse_counts_what_was_missing() {
    let b = Bench::new(3000);
    let space = b.space(SpaceConfig { huge_pages: HugePages::Always, ..SpaceConfig::default() });
    let huge = MapRequest { align: 2 << 20, ..MapRequest::anonymous(4 << 20, RW) };
    let at = space.map(&b.cpu, huge).unwrap();
    b.store(&space, at, 1).unwrap();
    let footprint = footprint_at(&b, &space, at);
    assert_eq!((footprint.huge, footprint.private_dirty), (2 << 20, 2 << 20));
    check_counts(&b.cpu, &space);
    let child = space.fork(&b.cpu).unwrap();
    check_counts(&b.cpu, &child);
    check_shares(&b.cpu, [&space, &child].into_iter());
    space.unmap(&b.cpu, at + PAGE_SIZE, PAGE_SIZE).unwrap();
    check_counts(&b.cpu, &space);
    assert_eq!(footprint_at(&b, &space, at).huge, 0);
    // A load makes a table; what the collapser adds is counted.
    b.load(&space, at + (2 << 20)).unwrap();
    b.store(&space, at + (3 << 20), 1).unwrap();
    let before = space.mm().rss().anon;
    space.advise(&b.cpu, at + (2 << 20), 2 << 20, Advice::Collapse).unwrap();
    assert_eq!(space.mm().rss().anon, before + 511);
    check_counts(&b.cpu, &space);
    check_shares(&b.cpu, [&space, &child].into_iter());
    drop((space, child));
    b.assert_nothing_left();
}

#[test]
fn a_peak_is_remembered() {
    let b = Bench::new(2000);
    let space = b.space(SpaceConfig::default());
    let at = space.map_anonymous(&b.cpu, 200 * PAGE_SIZE).unwrap();
    space.advise(&b.cpu, at, 200 * PAGE_SIZE, Advice::PopulateWrite).unwrap();
    space.unmap(&b.cpu, at, 150 * PAGE_SIZE).unwrap();
    assert_eq!(space.mm().peaks(), (200 * PAGE_SIZE, 200 * PAGE_SIZE));
    assert_eq!(space.mm().rss().resident(), 50);
    // Little by little, less than a step is lost.
    for n in 150..200 {
        space.unmap(&b.cpu, at + n * PAGE_SIZE, PAGE_SIZE).unwrap();
    }
    let again = space.map_anonymous(&b.cpu, 300 * PAGE_SIZE).unwrap();
    space.advise(&b.cpu, again, 300 * PAGE_SIZE, Advice::PopulateWrite).unwrap();
    for n in 0..300 {
        space.unmap(&b.cpu, again + n * PAGE_SIZE, PAGE_SIZE).unwrap();
    }
    let (resident, mapped) = space.mm().peaks();
    assert!(resident > (300 - PEAK_STEP) * PAGE_SIZE && mapped > (300 - PEAK_STEP) * PAGE_SIZE);
    drop(space);
    b.assert_nothing_left();
}

#[test]
fn what_many_processors_count_adds_up() {
    const THREADS: u64 = 4;
    let b = Bench::on(TestHost::with_tickets(1, 8000), 8);
    let space = b.space(SpaceConfig::default());
    let file = Object::file(&b.machine, TestFile::new(&[3; 64 * 4096])).unwrap();
    let memory = Object::shared_memory(&b.machine, 64 * PAGE_SIZE).unwrap();
    let base = 1 << 32;
    let maps = |at: u64| {
        [
            MapRequest::anonymous(64 * PAGE_SIZE, RW).fixed(at),
            MapRequest::object(&file, 0, 64 * PAGE_SIZE, RW, false).fixed(at + (1 << 20)),
            MapRequest::object(&file, 0, 64 * PAGE_SIZE, RW, true).fixed(at + (2 << 20)),
            MapRequest::object(&memory, 0, 64 * PAGE_SIZE, RW, true).fixed(at + (3 << 20)),
        ]
    };
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (space, machine, maps) = (&space, &b.machine, &maps);
            scope.spawn(move || {
                let cpu = Cpu::try_new(machine).unwrap();
                let mut random = Random::new(thread);
                for _ in 0..1500 {
                    // Everybody everywhere: one maps what another touches and a third unmaps.
                    let at = base + (random.below(4) << 24);
                    let area = random.below(4);
                    let page = at + (area << 20) + random.below(64) * PAGE_SIZE;
                    match random.below(12) {
                        0 => {
                            let request = maps(at).into_iter().nth(area as usize).unwrap();
                            space.map(&cpu, request).unwrap();
                        }
                        1 => space.unmap(&cpu, page, (1 + random.below(32)) * PAGE_SIZE).unwrap(),
                        2 => {
                            let _ = space.advise(&cpu, page, random.below(16) * PAGE_SIZE, Advice::DontNeed);
                        }
                        3 if random.one_in(20) => drop(space.fork(&cpu).unwrap()),
                        4 if random.one_in(20) => {
                            // A listing and its sums beside all that.
                            for mapping in space.mappings(&cpu).unwrap() {
                                space.footprint(&cpu, &mapping);
                            }
                        }
                        5..8 => {
                            let _ = super::load(&cpu, space, page);
                        }
                        _ => {
                            let _ = store(&cpu, space, page, thread);
                        }
                    }
                }
            });
        }
    });
    check_counts(&b.cpu, &space);
    check_shares(&b.cpu, [&space].into_iter());
    drop((space, file, memory));
    b.assert_nothing_left();
}

#[test]
fn holes_in_objects_and_guards_are_counted() {
    let b = Bench::new(2000);
    let space = b.space(SpaceConfig::default());
    let object = Object::file(&b.machine, TestFile::new(&[1; 16 * 4096])).unwrap();
    let map = |shared| space.map(&b.cpu, MapRequest::object(&object, 0, 16 * PAGE_SIZE, RW, shared)).unwrap();
    let (shared, private) = (map(true), map(false));
    for at in [shared, private] {
        space.advise(&b.cpu, at, 16 * PAGE_SIZE, Advice::PopulateRead).unwrap();
    }
    b.store(&space, private, 7).unwrap();
    space.advise(&b.cpu, shared, 4 * PAGE_SIZE, Advice::Remove).unwrap();
    assert_eq!(space.mm().rss(), Rss { anon: 1, file: 24, shmem: 0, swap: 0 });
    check_counts(&b.cpu, &space);
    let at = space.map_anonymous(&b.cpu, 8 * PAGE_SIZE).unwrap();
    space.advise(&b.cpu, at, 8 * PAGE_SIZE, Advice::PopulateWrite).unwrap();
    space.advise(&b.cpu, at + PAGE_SIZE, 2 * PAGE_SIZE, Advice::GuardInstall).unwrap();
    space.advise(&b.cpu, at + 4 * PAGE_SIZE, 2 * PAGE_SIZE, Advice::Free).unwrap();
    b.store(&space, at + 4 * PAGE_SIZE, 7).unwrap();
    let footprint = footprint_at(&b, &space, at);
    assert_eq!((footprint.anonymous, footprint.lazy_free), (6 << 12, 1 << 12));
    assert_eq!((footprint.private_clean, footprint.private_dirty), (1 << 12, 5 << 12));
    check_counts(&b.cpu, &space);
    drop((space, object));
    b.assert_nothing_left();
}
