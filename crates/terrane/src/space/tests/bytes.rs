//! Bytes of objects that the host reads and writes, beside mappings and under reclaim.

use super::Bench;
use super::model::{Random, from_env};
use crate::addr::PAGE_SIZE;
use crate::error::Error;
use crate::host::FrameRange;
use crate::machine::Cpu;
use crate::object::Object;
use crate::space::{MapRequest, SpaceConfig};
use crate::testing::{TestFile, TestHost, TestSwap};
use crate::vma::{Advice, Prot};
use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;
use std::sync::atomic::{AtomicBool, Ordering};

const RW: Prot = Prot::READ.union(Prot::WRITE);

/// A vector of bytes, an object, and a mapping of it are the same thing, whatever is done to which.
#[test]
fn reads_writes_and_mappings_meet() {
    let mut random = Random::new(from_env("TERRANE_SEED").unwrap_or(7));
    let bench = Bench::new(220);
    bench.machine.swap_on(Box::new(TestSwap::new(1024))).unwrap();
    let pages = 300u64;
    for is_file in [false, true] {
        let object = if is_file {
            Object::file(&bench.machine, TestFile::new(&vec![0; (pages * PAGE_SIZE) as usize])).unwrap()
        } else {
            Object::shared_memory(&bench.machine, pages * PAGE_SIZE).unwrap()
        };
        let space = bench.space(SpaceConfig::default());
        let at = space.map(&bench.cpu, MapRequest::object(&object, 0, pages * PAGE_SIZE, RW, true)).unwrap();
        let mut plain = vec![0u8; (pages * PAGE_SIZE) as usize];
        for round in 0..3000u64 {
            let offset = random.below(plain.len() as u64 + 100) as usize;
            let len = random.below(3 * PAGE_SIZE) as usize;
            let end = (offset + len).min(plain.len());
            let here = offset.min(end)..end;
            match random.below(4) {
                0 => {
                    let bytes: Vec<u8> = (0..len).map(|n| (n as u64 * 7 + round) as u8).collect();
                    assert_eq!(object.write(&bench.cpu, offset as u64, &bytes), Ok(here.len()));
                    plain[here.clone()].copy_from_slice(&bytes[..here.len()]);
                }
                1 => {
                    let word = offset.min(plain.len() - 8) & !7;
                    bench.store(&space, at + word as u64, round << 32 | round).unwrap();
                    plain[word..word + 8].copy_from_slice(&(round << 32 | round).to_ne_bytes());
                }
                2 => {
                    let word = offset.min(plain.len() - 8) & !7;
                    let expected = u64::from_ne_bytes(plain[word..word + 8].try_into().unwrap());
                    assert_eq!(bench.load(&space, at + word as u64), Ok(expected));
                }
                _ => {
                    let mut bytes = vec![0xa5; len];
                    assert_eq!(object.read(&bench.cpu, offset as u64, &mut bytes), Ok(here.len()));
                    assert!(bytes[..here.len()] == plain[here.clone()], "round {round}, {here:?}");
                    assert!(bytes[here.len()..].iter().all(|&byte| byte == 0xa5));
                }
            }
            if round % 64 == 0 {
                let _ = space.advise(&bench.cpu, at, pages * PAGE_SIZE, Advice::PageOut);
            }
        }
        space.destroy(&bench.cpu);
        drop(object);
    }
    bench.assert_nothing_left();
}

#[test]
fn untouched_memory_reads_as_zeros_and_stays_untouched() {
    let bench = Bench::new(64);
    let object = Object::shared_memory(&bench.machine, 3 * PAGE_SIZE + 5).unwrap();
    let mut bytes = [1; 100];
    assert_eq!(object.read(&bench.cpu, 3 * PAGE_SIZE - 50, &mut bytes), Ok(55));
    assert!(bytes[..55].iter().all(|&byte| byte == 0) && bytes[55] == 1);
    assert_eq!(object.read(&bench.cpu, u64::MAX, &mut bytes), Ok(0));
    assert_eq!((object.resident(), object.write(&bench.cpu, 3 * PAGE_SIZE, b"123456")), (0, Ok(5)));
    assert_eq!(object.resident(), 1);
    let frames = FrameRange { first: crate::addr::Frame(1 << 20), count: 1 };
    let device = Object::device(&bench.machine, frames).unwrap();
    assert_eq!(device.read(&bench.cpu, 0, &mut bytes), Err(Error::NoDevice));
}

#[test]
fn what_cannot_be_had_is_an_error() {
    let bench = Bench::new(40);
    let object = Object::shared_memory(&bench.machine, 1000 * PAGE_SIZE).unwrap();
    let page = [3; PAGE_SIZE as usize];
    let mut written = 0;
    while object.write(&bench.cpu, written * PAGE_SIZE, &page) == Ok(page.len()) {
        written += 1;
    }
    assert!((1..40).contains(&written));
    assert_eq!(object.write(&bench.cpu, written * PAGE_SIZE, &page), Err(Error::NoMemory));
    let mut bytes = page;
    assert_eq!(object.read(&bench.cpu, 0, &mut bytes), Ok(page.len()));
    assert!(bytes == page);
}

/// Also when an assertion fails: the other thread must end.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Pages go to swap and come back while they are written: no write is lost.
#[test]
fn writes_beside_reclaim() {
    let host = TestHost::new(2, 120);
    let bench = Bench::on(host, 8);
    bench.machine.swap_on(Box::new(TestSwap::new(1024))).unwrap();
    let pages = 32u64;
    let object = Object::shared_memory(&bench.machine, pages * PAGE_SIZE).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let cpu = Cpu::try_new(&bench.machine).unwrap();
            let space = super::Space::try_new(&cpu, SpaceConfig::default()).unwrap();
            let request = MapRequest::object(&object, 0, pages * PAGE_SIZE, RW, true);
            let at = space.map(&cpu, request).unwrap();
            while !stop.load(Ordering::Relaxed) {
                for n in 0..pages {
                    let _ = super::load(&cpu, &space, at + n * PAGE_SIZE);
                }
                let _ = space.advise(&cpu, at, pages * PAGE_SIZE, Advice::PageOut);
            }
            space.destroy(&cpu);
        });
        let _stop = Stop(&stop);
        // Whole pages, so that a copy made in the middle of a write shows.
        let mut read = vec![0; PAGE_SIZE as usize];
        for round in 1..600u64 {
            let bytes = vec![round as u8; PAGE_SIZE as usize];
            for n in 0..pages {
                object.write(&bench.cpu, n * PAGE_SIZE, &bytes).unwrap();
            }
            for n in 0..pages {
                object.read(&bench.cpu, n * PAGE_SIZE, &mut read).unwrap();
                assert!(read == bytes, "page {n} in round {round}");
            }
        }
    });
}
