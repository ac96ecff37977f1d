//! Where mappings go: each CPU's own stretch, and candidates that others take first.

use super::{Bench, Space};
use crate::addr::{AddrRange, PAGE_SIZE};
use crate::error::Error;
use crate::machine::Cpu;
use crate::space::{MapRequest, Placement, SpaceConfig};
use crate::testing::TestHost;
use crate::vma::{MapFlags, Prot};
use alloc::vec::Vec;

const RW: Prot = Prot::READ.union(Prot::WRITE);
/// Small: the stretches of the nine CPUs are 2 MiB each.
const SMALL: AddrRange = AddrRange { start: 0x1_0000, end: 256 << 20 };

fn per_cpu(range: AddrRange) -> SpaceConfig {
    SpaceConfig { range, placement: Placement::PerCpu, ..SpaceConfig::default() }
}

fn map(space: &Space, cpu: &Cpu<TestHost>, pages: u64) -> Result<u64, Error> {
    space.map(cpu, MapRequest::anonymous(pages * PAGE_SIZE, RW))
}

#[test]
fn each_cpu_has_addresses_of_its_own_and_uses_them_again() {
    let bench = Bench::new(64);
    let other = Cpu::try_new(&bench.machine).unwrap();
    let space = bench.space(per_cpu(AddrRange::new(0x1_0000, 1 << 46)));
    let mine: Vec<u64> = (0..4).map(|_| map(&space, &bench.cpu, 1).unwrap()).collect();
    let theirs: Vec<u64> = (0..4).map(|_| map(&space, &other, 1).unwrap()).collect();
    // From above within the stretch, side by side; those of the two far from each other.
    assert!(mine.windows(2).all(|pair| pair[1] + PAGE_SIZE == pair[0]), "{mine:x?}");
    assert!(theirs.windows(2).all(|pair| pair[1] + PAGE_SIZE == pair[0]), "{theirs:x?}");
    assert!(mine[3].abs_diff(theirs[3]) >= 64 << 30);
    // Freed by whomever, used again by whose stretch it is.
    space.unmap(&other, mine[1], PAGE_SIZE).unwrap();
    assert_eq!(map(&space, &bench.cpu, 1), Ok(mine[1]));
    // A large one goes where Linux would put it: to the highest gap.
    let large = map(&space, &other, 5 << 18).unwrap();
    assert!(large + (5 << 30) <= 1 << 46);
    // Hints and fixed addresses are what they were.
    let hint = MapRequest { addr: 0x12_3000, ..MapRequest::anonymous(PAGE_SIZE, RW) };
    assert_eq!(space.map(&other, hint), Ok(0x12_3000));
    // A child goes on in its parent's stretches.
    let child = space.fork(&bench.cpu).unwrap();
    child.unmap(&bench.cpu, mine[2], PAGE_SIZE).unwrap();
    assert_eq!(map(&child, &bench.cpu, 1), Ok(mine[2]));
    drop((space, child));
    bench.assert_nothing_left();
}

#[test]
fn no_address_is_out_of_reach() {
    let bench = Bench::new(64);
    let space = bench.space(per_cpu(SMALL));
    let mut mapped = 0;
    // 128 KiB is the most that goes to a stretch of 2 MiB.
    while let Ok(addr) = map(&space, &bench.cpu, 32) {
        assert!(SMALL.covers(AddrRange::new(addr, addr + 32 * PAGE_SIZE)));
        mapped += 32;
    }
    while map(&space, &bench.cpu, 1).is_ok() {
        mapped += 1;
    }
    assert_eq!(mapped, SMALL.pages(), "all of it is mapped");
    assert_eq!(map(&space, &bench.cpu, 1), Err(Error::NoMemory));
    space.unmap(&bench.cpu, SMALL.start + 0x5000, PAGE_SIZE).unwrap();
    assert_eq!(map(&space, &bench.cpu, 1), Ok(SMALL.start + 0x5000));
    drop(space);
    bench.assert_nothing_left();
}

#[test]
fn threads_that_want_the_same_addresses_all_get_some() {
    for placement in [Placement::Linux, Placement::PerCpu] {
        let bench = Bench::new(64);
        let space = bench.space(SpaceConfig { placement, ..SpaceConfig::default() });
        let space = &space;
        let mut all: Vec<AddrRange> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|n| {
                    let cpu = Cpu::try_new(&bench.machine).unwrap();
                    scope.spawn(move || {
                        let mut kept = Vec::new();
                        for round in 0..200 {
                            let prot = if (round + n) % 2 == 0 { RW } else { Prot::READ };
                            let flags = if round % 32 == 7 { MapFlags::GROWSDOWN } else { MapFlags::empty() };
                            let pages = 1 + (round * 7 + n) % 5;
                            let request = MapRequest::anonymous(pages * PAGE_SIZE, prot).with(flags);
                            let addr = space.map(&cpu, request).unwrap();
                            if round % 3 == 0 {
                                space.unmap(&cpu, addr, pages * PAGE_SIZE).unwrap();
                            } else {
                                kept.push(AddrRange::new(addr, addr + pages * PAGE_SIZE));
                            }
                        }
                        kept
                    })
                })
                .collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        all.sort();
        assert!(all.windows(2).all(|pair| pair[0].end <= pair[1].start), "{placement:?}: given twice");
        let pages: u64 = all.iter().map(AddrRange::pages).sum();
        assert_eq!(space.mapped_bytes(), pages * PAGE_SIZE);
        let listed: u64 = space.mappings(&bench.cpu).unwrap().iter().map(|m| m.range.pages()).sum();
        assert_eq!(listed, pages);
    }
}
