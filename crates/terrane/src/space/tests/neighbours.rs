//! Calls about ranges side by side: each thread owns runs of pages of one region, alternating with those of the others, and
//! knows at any time what its pages hold and allow, whatever the neighbours do at the edges.
//!
//! All threads map the same private memory, or the same object at the same offsets, so that their VMAs merge with and are
//! divided by those of their neighbours all the time. `TERRANE_RACES_MS` as for the other races; `TERRANE_MODEL_SEED`.

use super::model::{Random, from_env};
use super::{Bench, Space, load, store};
use crate::addr::{AddrRange, PAGE_SIZE};
use crate::error::{Error, FaultError};
use crate::machine::Cpu;
use crate::object::Object;
use crate::space::{Locking, MapRequest, SpaceConfig};
use crate::sync::Shared;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::testing::TestHost;
use crate::vma::{Advice, MapFlags, Prot};
use alloc::vec::Vec;
use std::time::{Duration, Instant};

const RW: Prot = Prot::READ.union(Prot::WRITE);
const BASE: u64 = 0x5000_0000;
const THREADS: usize = 3;
/// Pages of the region, and of a run.
const PAGES: usize = 72;
const RUN: usize = 3;

/// What a thread knows of one of its pages.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Page {
    Unmapped,
    /// What is allowed, and what a load finds.
    Private(Prot, u64),
    /// What is allowed; the content is the object's.
    Object(Prot),
}

struct Owner<'a> {
    cpu: Cpu<TestHost>,
    space: &'a Space,
    object: &'a Shared<Object<TestHost>>,
    number: usize,
    random: Random,
    pages: Vec<Page>,
    /// What the object holds in this thread's pages.
    object_holds: Vec<u64>,
    value: u64,
}

fn addr_of(page: usize) -> u64 {
    BASE + page as u64 * PAGE_SIZE
}

impl Owner<'_> {
    /// Some pages of one of the own runs.
    fn choose(&mut self) -> core::ops::Range<usize> {
        let runs = (PAGES / RUN / THREADS) as u64;
        let run = self.random.below(runs) as usize * THREADS + self.number;
        let first = self.random.below(RUN as u64) as usize;
        let count = 1 + self.random.below((RUN - first) as u64) as usize;
        run * RUN + first..run * RUN + first + count
    }

    fn some_prot(&mut self) -> Prot {
        match self.random.below(4) {
            0 => Prot::READ,
            1 => Prot::empty(),
            _ => RW,
        }
    }

    fn step(&mut self) {
        let range = self.choose();
        let (addr, len) = (addr_of(range.start), (range.end - range.start) as u64 * PAGE_SIZE);
        let all_mapped = range.clone().all(|page| self.pages[page] != Page::Unmapped);
        match self.random.below(10) {
            0 | 1 => {
                let prot = self.some_prot();
                self.space.map(&self.cpu, MapRequest::anonymous(len, prot).fixed(addr)).unwrap();
                range.clone().for_each(|page| self.pages[page] = Page::Private(prot, 0));
            }
            2 => {
                let prot = self.some_prot();
                let request = MapRequest::object(self.object, addr - BASE, len, prot, true).fixed(addr);
                self.space.map(&self.cpu, request).unwrap();
                range.clone().for_each(|page| self.pages[page] = Page::Object(prot));
            }
            3 => {
                self.space.unmap(&self.cpu, addr, len).unwrap();
                range.clone().for_each(|page| self.pages[page] = Page::Unmapped);
            }
            4 | 5 => {
                let new = self.some_prot();
                let done = self.space.protect(&self.cpu, addr, len, new);
                assert_eq!(done, if all_mapped { Ok(()) } else { Err(Error::NoMemory) }, "{range:?}");
                for page in range.clone() {
                    match &mut self.pages[page] {
                        Page::Private(prot, _) | Page::Object(prot) => *prot = new,
                        // What lies behind a hole stays as it is.
                        Page::Unmapped => break,
                    }
                }
            }
            6 => {
                let done = self.space.advise(&self.cpu, addr, len, Advice::DontNeed);
                assert_eq!(done, if all_mapped { Ok(()) } else { Err(Error::NoMemory) }, "{range:?}");
                for page in range.clone() {
                    if let Page::Private(_, value) = &mut self.pages[page] {
                        *value = 0;
                    }
                }
            }
            7 => {
                let request = MapRequest::anonymous(len, RW).with(MapFlags::FIXED_NOREPLACE);
                let free = range.clone().all(|page| self.pages[page] == Page::Unmapped);
                let done = self.space.map(&self.cpu, MapRequest { addr, ..request });
                assert_eq!(done, if free { Ok(addr) } else { Err(Error::Exists) }, "{range:?}");
                if free {
                    range.clone().for_each(|page| self.pages[page] = Page::Private(RW, 0));
                }
            }
            _ => range.clone().for_each(|page| self.store(page)),
        }
        range.for_each(|page| self.check(page));
    }

    fn store(&mut self, page: usize) {
        self.value += 1;
        let value = (self.number as u64) << 48 | self.value;
        let done = store(&self.cpu, self.space, addr_of(page), value);
        match &mut self.pages[page] {
            Page::Unmapped => assert_eq!(done, Err(FaultError::NotMapped), "page {page}"),
            Page::Private(prot, holds) if prot.contains(Prot::WRITE) => {
                assert_eq!(done, Ok(()), "page {page}");
                *holds = value;
            }
            Page::Object(prot) if prot.contains(Prot::WRITE) => {
                assert_eq!(done, Ok(()), "page {page}");
                self.object_holds[page] = value;
            }
            _ => assert_eq!(done, Err(FaultError::NotAllowed), "page {page}"),
        }
    }

    fn check(&self, page: usize) {
        let found = load(&self.cpu, self.space, addr_of(page));
        let expected = match self.pages[page] {
            Page::Unmapped => Err(FaultError::NotMapped),
            Page::Private(prot, _) | Page::Object(prot) if prot.is_empty() => Err(FaultError::NotAllowed),
            Page::Private(_, value) => Ok(value),
            Page::Object(_) => Ok(self.object_holds[page]),
        };
        assert_eq!(found, expected, "page {page}: {:?}", self.pages[page]);
    }

    /// What a listing says of the own pages.
    fn check_listing(&self) {
        let mappings = self.space.mappings(&self.cpu).unwrap();
        assert!(mappings.is_sorted_by_key(|mapping| mapping.range.start));
        for page in (0..PAGES).filter(|page| page / RUN % THREADS == self.number) {
            let range = AddrRange::new(addr_of(page), addr_of(page + 1));
            let mut over = mappings.iter().filter(|mapping| mapping.range.overlaps(range));
            let (first, second) = (over.next(), over.next());
            assert!(second.is_none() && first.is_none_or(|mapping| mapping.range.covers(range)));
            let expected = match self.pages[page] {
                Page::Unmapped => None,
                Page::Private(prot, _) => Some((prot, false)),
                Page::Object(prot) => Some((prot, true)),
            };
            assert_eq!(first.map(|mapping| (mapping.prot, mapping.shared)), expected, "page {page}");
        }
    }
}

#[test]
fn each_thread_finds_its_own_pages_as_it_left_them() {
    let seed = from_env("TERRANE_MODEL_SEED").unwrap_or(1);
    for locking in [Locking::Speculative, Locking::Classic] {
        let bench = Bench::on(TestHost::with_tickets(1, 1000), 8);
        let space = bench.space(SpaceConfig::with_locking(locking));
        let object = Object::shared_memory(&bench.machine, PAGES as u64 * PAGE_SIZE).unwrap();
        let time = Duration::from_millis(from_env("TERRANE_RACES_MS").unwrap_or(350) * 2);
        let (end, failed) = (Instant::now() + time, AtomicBool::new(false));
        let steps: u64 = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS)
                .map(|number| {
                    let mut owner = Owner {
                        cpu: Cpu::try_new(&bench.machine).unwrap(),
                        space: &space,
                        object: &object,
                        number,
                        random: Random::new(seed * 100 + number as u64),
                        pages: alloc::vec![Page::Unmapped; PAGES],
                        object_holds: alloc::vec![0; PAGES],
                        value: 0,
                    };
                    let failed = &failed;
                    scope.spawn(move || {
                        struct Tell<'a>(&'a AtomicBool);
                        impl Drop for Tell<'_> {
                            fn drop(&mut self) {
                                self.0.fetch_or(std::thread::panicking(), Ordering::Relaxed);
                            }
                        }
                        let _tell = Tell(failed);
                        let mut steps = 0;
                        while Instant::now() < end && !failed.load(Ordering::Relaxed) {
                            owner.step();
                            steps += 1;
                            if steps % 16 == 0 {
                                owner.check_listing();
                            }
                        }
                        steps
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert!(steps > 100, "{steps} steps");
        drop((space, object));
        bench.assert_nothing_left();
    }
}
