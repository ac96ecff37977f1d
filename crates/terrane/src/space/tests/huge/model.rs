//! Random operations on spaces of some huge pages, each predicted by a plain model: a page is mapped or not, allows what it
//! allows, and holds four words. Ranges begin and end at and beside the boundaries of blocks more often than elsewhere.
//!
//! As in the model of all kinds of mappings, a run is a seed; `TERRANE_HUGE_SEED=n` runs that seed alone and prints its
//! steps, `TERRANE_HUGE_RUNS=n` makes n runs of each configuration (default 6, of 400 steps each).

use super::super::model::{Random, from_env};
use super::*;
use crate::host::Memory;
use crate::sync::atomic::{AtomicU64, Ordering};
use alloc::vec;
use std::eprintln;

/// Pages of the spaces: part of a block, three blocks, part of another.
const PAGES: u64 = 3 * 512 + 200;
const START: u64 = BASE - 100 * PAGE_SIZE;
const SPACES: usize = 3;
/// Where words are stored in a page.
const OFFSETS: [u64; 4] = [0, 8, 2040, 4088];

#[derive(Clone, Copy, PartialEq, Debug)]
struct Page {
    prot: Prot,
    words: [u64; 4],
}

type Plain = Vec<Option<Page>>;

struct Run<'a> {
    bench: &'a Bench,
    config: SpaceConfig,
    random: Random,
    spaces: Vec<(Space, Plain)>,
    loud: bool,
}

struct Where(u64, u64);

impl Drop for Where {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("TERRANE_HUGE_SEED={} at step {}", self.0, self.1);
        }
    }
}

fn address(n: u64) -> u64 {
    START + n * PAGE_SIZE
}

impl Run<'_> {
    /// Page numbers of a range that is not empty.
    fn range(&mut self) -> core::ops::Range<u64> {
        let end = |random: &mut Random| match random.below(4) {
            0 => random.below(PAGES + 1),
            1 => (100 + random.below(4) * 512 + random.below(3)).saturating_sub(1).min(PAGES),
            _ => 100 + random.below(4) * 512,
        };
        let (a, b) = (end(&mut self.random), end(&mut self.random));
        let (a, b) = (a.min(b), a.max(b));
        match self.random.below(3) {
            0 => a.min(PAGES - 1)..(a + 1 + self.random.below(4)).min(PAGES).max(a.min(PAGES - 1) + 1),
            _ if a == b => a.min(PAGES - 1)..a.min(PAGES - 1) + 1,
            _ => a..b,
        }
    }

    fn touch(&mut self, n: usize) {
        let number = self.range().start;
        let word = self.random.below(4) as usize;
        let addr = address(number) + OFFSETS[word];
        let (space, plain) = &mut self.spaces[n];
        let page = plain[number as usize].as_mut();
        if self.random.one_in(3) {
            let expected = match page {
                None => Err(FaultError::NotMapped),
                Some(page) if page.prot.is_empty() => Err(FaultError::NotAllowed),
                Some(page) => Ok(page.words[word]),
            };
            assert_eq!(self.bench.load(space, addr), expected, "load {addr:#x}");
        } else {
            let value = self.random.next();
            let expected = match page {
                None => Err(FaultError::NotMapped),
                Some(page) if !page.prot.contains(Prot::WRITE) => Err(FaultError::NotAllowed),
                Some(page) => {
                    page.words[word] = value;
                    Ok(())
                }
            };
            assert_eq!(self.bench.store(space, addr, value), expected, "store {addr:#x}");
        }
    }

    fn step(&mut self) {
        let n = self.random.below(self.spaces.len() as u64) as usize;
        let range = self.range();
        let (addr, len) = (address(range.start), (range.end - range.start) * PAGE_SIZE);
        let pages = range.start as usize..range.end as usize;
        let what = self.random.below(100);
        if self.loud {
            eprintln!("{what} on {n} of {}: {range:?}", self.spaces.len());
        }
        let cpu = &self.bench.cpu;
        let is_full = self.spaces.len() == SPACES;
        let (space, plain) = &mut self.spaces[n];
        let part = &mut plain[pages.clone()];
        let covered = part.iter().all(Option::is_some);
        let or_hole = |covered| if covered { Ok(()) } else { Err(Error::NoMemory) };
        match what {
            0..4 => {
                assert_eq!(space.unmap(cpu, addr, len), Ok(()));
                part.fill(None);
            }
            4..14 => {
                assert_eq!(space.map(cpu, MapRequest::anonymous(len, RW).fixed(addr)), Ok(addr));
                part.fill(Some(Page { prot: RW, words: [0; 4] }));
                if self.config.huge_pages == HugePages::Madvise && self.random.one_in(2) {
                    assert_eq!(space.advise(cpu, addr, len, Advice::HugePage), Ok(()));
                }
            }
            14..24 => {
                let prot = [RW, RW, Prot::READ, Prot::empty()][self.random.below(4) as usize];
                assert_eq!(space.protect(cpu, addr, len, prot), or_hole(covered));
                part.iter_mut().map_while(Option::as_mut).for_each(|page| page.prot = prot);
            }
            24..29 => {
                assert_eq!(space.advise(cpu, addr, len, Advice::DontNeed), or_hole(covered));
                part.iter_mut().flatten().for_each(|page| page.words = [0; 4]);
            }
            29..35 => {
                let advice = [Advice::HugePage, Advice::HugePage, Advice::NoHugePage, Advice::DoDump];
                let advice = advice[self.random.below(4) as usize];
                assert_eq!(space.advise(cpu, addr, len, advice), or_hole(covered));
            }
            35..45 => {
                // Whether it comes to it does not matter to the bytes.
                if space.advise(cpu, addr, len, Advice::Collapse).is_ok() {
                    let first = addr.next_multiple_of(BLOCK_SIZE);
                    for at in (first..addr + len).step_by(BLOCK_SIZE as usize) {
                        assert!(at + BLOCK_SIZE > addr + len || is_block(self.bench, space, at));
                    }
                }
            }
            45..48 => drop(space.collapse_step(cpu, 4)),
            48..52 => {
                let writable =
                    part.iter().all(|page| page.is_some_and(|page| page.prot.contains(Prot::WRITE)));
                let done = space.advise(cpu, addr, len, Advice::PopulateWrite);
                assert_eq!(done.is_ok(), writable, "{done:?}");
            }
            52..56 => {
                if is_full {
                    let (gone, _) = self.spaces.remove(n);
                    if self.random.one_in(2) {
                        gone.destroy(cpu);
                    }
                } else {
                    let child = (space.fork(cpu).unwrap(), plain.clone());
                    self.spaces.push(child);
                }
            }
            _ => (0..4).for_each(|_| self.touch(n)),
        }
    }

    /// Every page of every space holds what the model says, to the byte.
    fn check(&self) {
        let host = self.bench.machine.host();
        for (space, plain) in &self.spaces {
            for (n, page) in plain.iter().enumerate() {
                let addr = address(n as u64);
                let Some(page) = page.filter(|page| !page.prot.is_empty()) else { continue };
                assert_eq!(self.bench.load(space, addr), Ok(page.words[0]), "{addr:#x}");
                let found = space.translate(&self.bench.cpu, addr, Access::Read).unwrap();
                let bytes = host.bytes(found.frame).cast::<[AtomicU64; 512]>();
                // SAFETY: a frame, aligned; one thread does everything.
                let words = unsafe { bytes.as_ref() };
                for (word, offset) in page.words.iter().zip(OFFSETS) {
                    assert_eq!(
                        words[offset as usize / 8].load(Ordering::Relaxed),
                        *word,
                        "{addr:#x} {offset}"
                    );
                }
                let sum = words.iter().fold(0u64, |sum, word| sum.wrapping_add(word.load(Ordering::Relaxed)));
                let expected = page.words.iter().fold(0u64, |sum, word| sum.wrapping_add(*word));
                assert_eq!(sum, expected, "{addr:#x}");
            }
        }
        let spaces: Vec<&Space> = self.spaces.iter().map(|(space, _)| space).collect();
        check_private(&self.bench.cpu, &spaces);
    }
}

/// Returns how many huge pages were made by touches, divided, and made by collapse.
fn run(seed: u64, config: SpaceConfig, loud: bool) -> [u64; 3] {
    let mut at = Where(seed, 0);
    let frames = 12_000;
    let host = if seed % 16 < 8 { TestHost::with_tickets(1, frames) } else { TestHost::new(1, frames) };
    let bench = Bench::on(host, 3);
    let first = (bench.space(config), vec![None; PAGES as usize]);
    let mut run = Run { bench: &bench, config, random: Random::new(seed), spaces: vec![first], loud };
    for step in 0..400 {
        at.1 = step;
        run.step();
        if run.spaces.is_empty() {
            run.spaces.push((bench.space(run.config), vec![None; PAGES as usize]));
        }
        if step % 100 == 99 {
            run.check();
        }
    }
    drop(run);
    bench.assert_nothing_left();
    [Counter::ThpFaultAlloc, Counter::ThpSplitPmd, Counter::ThpCollapseAlloc]
        .map(|counter| count(&bench, counter))
}

fn runs(config: SpaceConfig, salt: u64) {
    let only = from_env("TERRANE_HUGE_SEED");
    let mut seen = [0; 3];
    for n in 0..from_env("TERRANE_HUGE_RUNS").unwrap_or(6) {
        let seed = n * 8 + salt;
        if only.is_none_or(|only| only == seed) {
            let counts = run(seed, config, only.is_some());
            (0..3).for_each(|n| seen[n] += counts[n]);
        }
    }
    assert!(only.is_some() || seen.iter().all(|&count| count > 0), "something was not tested: {seen:?}");
}

#[test]
fn random_calls_where_everything_is_huge() {
    runs(always(), 0);
}

#[test]
fn random_calls_where_advice_decides() {
    runs(SpaceConfig::default(), 1);
}

#[test]
fn random_calls_with_the_lock_of_the_space() {
    runs(SpaceConfig { locking: Locking::Classic, ..always() }, 2);
}
