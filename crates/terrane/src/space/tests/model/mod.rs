//! Random operations on several spaces, each predicted by a plain model ([`plain`]).
//!
//! Every result is compared: addresses, errors, the kind of signal, words loaded, bytes in files. After each step the
//! list of mappings must cover exactly what the model says, sorted and disjoint, with what could be merged merged;
//! every so often every page of every space is looked at; at the end everything is counted back to where it was.
//!
//! A run is a seed. When one fails, it prints the seed and the step; `TERRANE_MODEL_SEED=n` runs that seed alone and
//! prints its steps, `TERRANE_MODEL_STEPS=n` cuts every run after n steps. `TERRANE_MODEL_RUNS=n` makes n runs of each
//! configuration (default 18, of 2000 steps each).

mod plain;

use super::accounts;
use super::{Bench, Space};
use crate::addr::{AddrRange, PAGE_SHIFT, PAGE_SIZE};
use crate::error::Error;
use crate::object::Object;
use crate::space::{HugePages, Locking, MapRequest, SpaceConfig};
use crate::sync::Shared;
use crate::testing::{TestFile, TestHost};
use crate::vma::{Access, Advice, MapFlags, Prot, VmFlags};
use alloc::vec;
use alloc::vec::Vec;
use core::ops::ControlFlow;
use plain::{BASE, LIMITS, PAGES, Plain};
use std::eprintln;

/// Spaces at once.
const SPACES: usize = 4;
/// Pages of the longest object.
const OBJECT_PAGES: u64 = 40;

/// A small random generator (xorshift64*), the same everywhere.
pub(in crate::space::tests) struct Random(u64);

impl Random {
    pub(in crate::space::tests) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(in crate::space::tests) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    /// Below `bound`.
    pub(in crate::space::tests) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// True once in `n`.
    pub(in crate::space::tests) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// The number in an environment variable.
pub(in crate::space::tests) fn from_env(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// An object that is there from the beginning, and its file.
struct Real {
    object: Shared<Object<TestHost>>,
    file: Option<TestFile>,
}

/// A space and what it should be.
struct Both {
    space: Space,
    plain: Plain,
}

struct Run<'a> {
    bench: &'a Bench,
    random: Random,
    spaces: Vec<Both>,
    real: Vec<Real>,
    objects: Vec<plain::Object>,
    refusing: bool,
    config: SpaceConfig,
    loud: bool,
}

/// Says where a run failed.
struct Where {
    seed: u64,
    step: u64,
}

impl Drop for Where {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("TERRANE_MODEL_SEED={} TERRANE_MODEL_STEPS={}", self.seed, self.step + 1);
        }
    }
}

macro_rules! say {
    ($run:expr, $($what:tt)*) => { if $run.loud { eprintln!($($what)*) } };
}

impl Run<'_> {
    /// A page's address in the arena, or near it.
    fn page(&mut self) -> u64 {
        match self.random.below(40) {
            0 => BASE + PAGES * PAGE_SIZE,
            1 => BASE - PAGE_SIZE,
            _ => BASE + self.random.below(PAGES) * PAGE_SIZE,
        }
    }

    /// A length in bytes: mostly a few pages.
    fn len(&mut self) -> u64 {
        match self.random.below(60) {
            0 => 0,
            1 => u64::MAX - self.random.below(3 * PAGE_SIZE),
            2..=8 => self.random.below(60 * PAGE_SIZE),
            9..=20 => 1 + self.random.below(3 * PAGE_SIZE),
            _ => (1 + self.random.below(12)) * PAGE_SIZE,
        }
    }

    /// A range: as a rule aligned.
    fn range(&mut self) -> (u64, u64) {
        let skew = if self.random.one_in(50) { self.random.below(PAGE_SIZE) } else { 0 };
        (self.page() + skew, self.len())
    }

    fn prot(&mut self) -> Prot {
        match self.random.below(8) {
            0 => Prot::empty(),
            1 => Prot::READ,
            2 => Prot::READ | Prot::EXEC,
            3 => Prot::all(),
            4 => Prot::from_bits_truncate(self.random.below(8) as u32),
            _ => Prot::READ | Prot::WRITE,
        }
    }

    fn map(&mut self, n: usize) {
        let object = (self.random.below(10) < 5).then(|| self.random.below(self.real.len() as u64) as usize);
        let mut flags = if self.random.below(10) < 6 { MapFlags::PRIVATE } else { MapFlags::SHARED };
        for (flag, odds) in [
            (MapFlags::FIXED, 3),
            (MapFlags::FIXED_NOREPLACE, 8),
            (MapFlags::LOW_2GIB, 8),
            (MapFlags::POPULATE, 6),
            (MapFlags::GROWSDOWN, 60),
            (MapFlags::NORESERVE, 20),
            (MapFlags::STACK, 20),
            (MapFlags::SHARED, 80),
        ] {
            flags.set(flag, flags.contains(flag) || self.random.one_in(odds));
        }
        let fixed = flags.intersects(MapFlags::FIXED | MapFlags::FIXED_NOREPLACE);
        let (addr, len) = self.range();
        let addr = if fixed || self.random.one_in(2) { addr } else { 0 };
        let mut offset = self.random.below(OBJECT_PAGES) * PAGE_SIZE;
        if self.random.one_in(3) && addr != 0 {
            // In line with the address, so that neighbours continue each other.
            offset = (addr.wrapping_sub(BASE) >> PAGE_SHIFT) % OBJECT_PAGES * PAGE_SIZE;
        }
        if self.random.one_in(60) {
            offset = [1, i64::MAX as u64 & !0xfff, !0xfff][self.random.below(3) as usize];
        }
        let request = MapRequest {
            addr,
            len,
            prot: self.prot(),
            flags,
            object: object.map(|object| self.real[object].object.clone()),
            offset,
            align: PAGE_SIZE,
        };
        let both = &mut self.spaces[n];
        let expected = both.plain.map(&mut self.objects, &request, object);
        say!(
            self,
            "map {object:?} {addr:#x} {len:#x} {:?} {flags:?} {offset:#x}: {expected:x?}",
            request.prot
        );
        assert_eq!(both.space.map(&self.bench.cpu, request), expected);
    }

    fn touch(&mut self, n: usize) {
        let offset = [0, 8, 2040, 4088][self.random.below(4) as usize];
        let addr = self.page() + offset;
        let (both, cpu) = (&mut self.spaces[n], &self.bench.cpu);
        match self.random.below(8) {
            0 => {
                let expected = both.plain.load(&mut self.objects, addr, Access::Execute);
                say!(self, "fetch {addr:#x}: {expected:?}");
                let found = super::access(cpu, &both.space, addr, Access::Execute, |word| {
                    word.load(core::sync::atomic::Ordering::Relaxed)
                });
                assert_eq!(found, expected);
            }
            1..=3 => {
                let expected = both.plain.load(&mut self.objects, addr, Access::Read);
                say!(self, "load {addr:#x}: {expected:?}");
                assert_eq!(self.bench.load(&both.space, addr), expected);
            }
            _ => {
                // What is stored behind the end of a file in its last page is nobody's business.
                let behind = both.plain.page(addr).is_some_and(|page| {
                    !page.flags.is_private()
                        && page.shows.is_some_and(|(object, index)| {
                            let end = index * PAGE_SIZE + offset + 8;
                            let object = &self.objects[object];
                            end > object.len && index < object.pages()
                        })
                });
                if behind {
                    return;
                }
                let value = self.random.next();
                let expected = both.plain.store(&mut self.objects, addr, value);
                say!(self, "store {addr:#x} {value:#x}: {expected:?}");
                assert_eq!(self.bench.store(&both.space, addr, value), expected);
            }
        }
    }

    fn advise(&mut self, n: usize) {
        let (addr, len) = self.range();
        let all = [
            Advice::Normal,
            Advice::Random,
            Advice::Sequential,
            Advice::WillNeed,
            Advice::DontNeed,
            Advice::DontNeed,
            Advice::DontFork,
            Advice::DoFork,
            Advice::DoFork,
            Advice::DontDump,
            Advice::DoDump,
            Advice::WipeOnFork,
            Advice::KeepOnFork,
            Advice::PopulateRead,
            Advice::PopulateWrite,
            Advice::HugePage,
            Advice::NoHugePage,
            Advice::Collapse,
            Advice::DontNeedLocked,
            Advice::Free,
            Advice::Cold,
            // Not `PageOut`: it writes to files, and forgets what was freed, when it likes; see `tests::reclaim`.
            Advice::Remove,
            Advice::GuardInstall,
            Advice::GuardRemove,
            Advice::GuardRemove,
        ];
        let advice = all[self.random.below(all.len() as u64) as usize];
        let both = &mut self.spaces[n];
        let long = len > LIMITS.len() * 2;
        if long && addr.checked_add(len).is_some() {
            return;
        }
        // A file that refuses to be written refuses holes too, after some of the pages.
        if advice == Advice::Remove && self.refusing {
            return;
        }
        let expected = both.plain.advise(&mut self.objects, addr, len, advice);
        say!(self, "advise {addr:#x} {len:#x} {advice:?}: {expected:?}");
        assert_eq!(both.space.advise(&self.bench.cpu, addr, len, advice), expected);
    }

    fn sync(&mut self, n: usize) {
        if self.random.one_in(6) {
            self.refusing = !self.refusing;
            for file in self.real.iter().filter_map(|real| real.file.as_ref()) {
                file.refuse_writes(self.refusing);
            }
        }
        if self.random.one_in(3) {
            let object = self.random.below(self.real.len() as u64) as usize;
            let expected = plain::write_back(&mut self.objects, object, self.refusing);
            say!(self, "write back {object}: {expected:?}");
            assert_eq!(self.real[object].object.write_back(&self.bench.cpu), expected);
        } else {
            let (addr, len) = self.range();
            if len > LIMITS.len() * 2 {
                return;
            }
            let both = &self.spaces[n];
            let mappings = both.space.mappings(&self.bench.cpu).unwrap();
            let ends = mappings.iter().map(|mapping| mapping.range.end).collect();
            let expected = both.plain.sync(&mut self.objects, addr, len, self.refusing, &ends);
            say!(self, "sync {addr:#x} {len:#x}: {expected:?}");
            assert_eq!(both.space.sync(&self.bench.cpu, addr, len), expected);
        }
        self.check_files();
    }

    fn check_files(&self) {
        for (real, object) in self.real.iter().zip(&self.objects) {
            if let (Some(file), Some(expected)) = (&real.file, &object.file) {
                assert!(file.holds(expected), "the file's bytes differ");
            }
        }
    }

    fn set_len(&mut self) {
        let number = self.random.below(self.real.len() as u64) as usize;
        let mut len = self.random.below(OBJECT_PAGES * PAGE_SIZE);
        if self.random.one_in(2) {
            len &= !(PAGE_SIZE - 1);
        }
        say!(self, "set_len {number} {len:#x}");
        let real = &self.real[number];
        let before = self.objects[number].len;
        let mut spaces: Vec<&mut Plain> = self.spaces.iter_mut().map(|both| &mut both.plain).collect();
        plain::set_len(&mut self.objects, &mut spaces, number, len);
        let cut = len < before;
        if let (false, Some(file)) = (cut, &real.file) {
            file.set_len(len as usize);
        }
        real.object.set_len(&self.bench.cpu, len);
        if let (true, Some(file)) = (cut, &real.file) {
            file.set_len(len as usize);
        }
    }

    fn brk(&mut self, n: usize) {
        let both = &mut self.spaces[n];
        let (start, now) = both.plain.heap;
        let end = match self.random.below(12) {
            0 => 0,
            1 => u64::MAX - self.random.below(2 * PAGE_SIZE),
            2 => start,
            3..=6 => now + self.random.below(6 * PAGE_SIZE),
            7..=9 => now - self.random.below(6 * PAGE_SIZE).min(now - start),
            _ => start + self.random.below(30 * PAGE_SIZE),
        };
        if start == 0 && self.random.one_in(2) {
            let start = BASE + self.random.below(40 * PAGE_SIZE);
            both.plain.heap = (start, start);
            say!(self, "heap {start:#x}");
            assert_eq!(both.space.set_heap(&self.bench.cpu, start), Ok(()));
            return;
        }
        let expected = both.plain.brk(end);
        say!(self, "brk {end:#x}: {expected:#x}");
        assert_eq!(both.space.brk(&self.bench.cpu, end), expected);
    }

    fn fork_or_drop(&mut self, n: usize) {
        if self.spaces.len() == SPACES || (self.spaces.len() > 1 && self.random.one_in(3)) {
            say!(self, "drop");
            let gone = self.spaces.remove(n);
            if self.random.one_in(2) {
                gone.space.destroy(&self.bench.cpu);
            }
        } else if self.random.one_in(5) {
            say!(self, "new");
            self.spaces.push(Both {
                space: self.bench.space(self.config),
                plain: Plain::new(!self.config.bottom_up),
            });
        } else {
            say!(self, "fork");
            let both = &mut self.spaces[n];
            let child = Both { space: both.space.fork(&self.bench.cpu).unwrap(), plain: both.plain.fork() };
            self.check_layout(&child);
            self.spaces.push(child);
        }
    }

    fn step(&mut self) {
        let n = self.random.below(self.spaces.len() as u64) as usize;
        say!(self, "space {n} of {}:", self.spaces.len());
        match self.random.below(100) {
            0..12 => self.map(n),
            12..20 => {
                let (addr, len) = self.range();
                let expected = self.spaces[n].plain.unmap(addr, len);
                say!(self, "unmap {addr:#x} {len:#x}: {expected:?}");
                assert_eq!(self.spaces[n].space.unmap(&self.bench.cpu, addr, len), expected);
            }
            20..30 => {
                let ((addr, len), prot) = (self.range(), self.prot());
                let expected = self.spaces[n].plain.protect(addr, len, prot);
                say!(self, "protect {addr:#x} {len:#x} {prot:?}: {expected:?}");
                assert_eq!(self.spaces[n].space.protect(&self.bench.cpu, addr, len, prot), expected);
            }
            30..40 => self.advise(n),
            40..44 => self.sync(n),
            44..46 => self.set_len(),
            46..54 => self.brk(n),
            54..56 => self.fork_or_drop(n),
            _ => {
                self.touch(n);
                return;
            }
        }
        if let Some(both) = self.spaces.get(n) {
            self.check_layout(both);
        }
    }

    /// The mappings cover exactly what the model says, and nothing is left unmerged.
    fn check_layout(&self, both: &Both) {
        let list = both.space.mappings(&self.bench.cpu).unwrap();
        assert_eq!(list.len(), both.space.map_count());
        assert_eq!(both.space.mapped_bytes(), both.plain.mapped() << PAGE_SHIFT);
        assert_eq!(list.iter().map(|mapping| mapping.range.pages()).sum::<u64>(), both.plain.mapped());
        let mut last = BASE;
        for mapping in &list {
            let AddrRange { start, end } = mapping.range;
            assert!(last <= start && start < end && end <= LIMITS.end, "{list:x?}");
            last = end;
            assert_eq!((mapping.prot, mapping.shared), (mapping.flags.prot(), !mapping.flags.is_private()));
            let mut offset = mapping.offset;
            for page in both.plain.pages_of(mapping.range) {
                let page = page.as_ref().expect("mapped, though it should not be");
                // Whether memory that was once writable still counts depends on what was stored.
                let flags = mapping.flags.difference(VmFlags::ACCOUNT.union(VmFlags::STICKY));
                assert!(!page.guard || mapping.flags.contains(VmFlags::MAYBE_GUARD));
                assert_eq!(page.flags.bits(), flags.bits(), "in {:x?}", mapping.range);
                match page.shows {
                    Some((_, index)) => assert_eq!(offset, index << PAGE_SHIFT),
                    None => assert_eq!(mapping.offset, 0),
                }
                offset += PAGE_SIZE;
            }
        }
        self.check_merged(both);
    }

    /// No neighbours are left that could be one VMA: alike, and at most one of them with an anon_vma, that of no fork.
    fn check_merged(&self, both: &Both) {
        let pin = self.bench.cpu.pin();
        let mut before: Option<&crate::vma::Vma<TestHost>> = None;
        both.space.mm().index.for_each(&pin, LIMITS, |vma| {
            if let Some(low) =
                before.filter(|low| low.end() == vma.start() && low.flags().merges_with(vma.flags()))
            {
                let mut separate = match (low.object(), vma.object()) {
                    (None, None) => false,
                    (Some(a), Some(b)) => {
                        !Shared::ptr_eq(a, b) || low.pgoff() + low.range().pages() != vma.pgoff()
                    }
                    _ => true,
                };
                separate |= match (low.anon_vma(), vma.anon_vma()) {
                    (None, None) => false,
                    (Some(a), Some(b)) => !core::ptr::eq(a, b) || low.kin() != vma.kin(),
                    (Some(one), None) | (None, Some(one)) => both.plain.forked && !one.is_root(),
                };
                // A stack that has grown down to another is not merged with it.
                separate |= vma.flags().contains(VmFlags::GROWSDOWN);
                // What fork empties could be merged in the child, but fork copies VMA by VMA.
                separate |= both.plain.forked && vma.flags().contains(VmFlags::WIPEONFORK);
                assert!(separate, "not merged: {:x?} {:x?}", low.range(), vma.range());
            }
            before = Some(vma);
            ControlFlow::Continue(())
        });
    }

    /// Every page of every space loads what the model says.
    fn check_all(&mut self) {
        accounts::check_shares(&self.bench.cpu, self.spaces.iter().map(|both| &both.space));
        for both in &mut self.spaces {
            for n in 0..PAGES {
                for offset in [0, 2040] {
                    let addr = BASE + n * PAGE_SIZE + offset;
                    let expected = both.plain.load(&mut self.objects, addr, Access::Read);
                    assert_eq!(self.bench.load(&both.space, addr), expected, "at {addr:#x}");
                }
            }
        }
    }
}

fn run(seed: u64, steps: u64, config: SpaceConfig, tickets: bool, loud: bool) {
    const FRAMES: usize = 1200;
    let mut at = Where { seed, step: 0 };
    let host = if tickets { TestHost::with_tickets(1, FRAMES) } else { TestHost::new(1, FRAMES) };
    let bench = Bench::on(host, 3);
    let mut random = Random::new(seed);
    let mut real = Vec::new();
    let mut objects = Vec::new();
    for kind in 0..3 {
        let mut bytes = vec![0; random.below(30 * PAGE_SIZE) as usize];
        bytes.iter_mut().step_by(367).for_each(|byte| *byte = random.next() as u8);
        let file = if kind == 0 { TestFile::read_only(&bytes) } else { TestFile::new(&bytes) };
        objects.push(plain::Object::file(&bytes, kind > 0));
        real.push(Real { object: Object::file(&bench.machine, file.clone()).unwrap(), file: Some(file) });
    }
    let len = random.below(30 * PAGE_SIZE);
    objects.push(plain::Object::memory(len));
    real.push(Real { object: Object::shared_memory(&bench.machine, len).unwrap(), file: None });
    let spaces = vec![Both { space: bench.space(config), plain: Plain::new(!config.bottom_up) }];
    let mut run = Run { bench: &bench, random, spaces, real, objects, refusing: false, config, loud };
    for step in 0..steps {
        at.step = step;
        run.step();
        if step % 8 == 0 {
            run.spaces.iter().for_each(|both| accounts::check_counts(&bench.cpu, &both.space));
        }
        if step % 500 == 499 {
            run.check_all();
        }
    }
    run.check_all();
    // What is dirty is written when the last owner goes.
    for (number, real) in run.real.iter().enumerate() {
        real.file.iter().for_each(|file| file.refuse_writes(false));
        plain::write_back(&mut run.objects, number, false).unwrap();
    }
    run.spaces.clear();
    run.real.iter_mut().for_each(|real| {
        real.object = Object::shared_memory(&bench.machine, 0).unwrap();
    });
    bench.cpu.quiesce();
    run.check_files();
    drop(run);
    bench.assert_nothing_left();
}

fn runs(config: SpaceConfig, salt: u64) {
    let steps = from_env("TERRANE_MODEL_STEPS").unwrap_or(2000);
    let only = from_env("TERRANE_MODEL_SEED");
    for n in 0..from_env("TERRANE_MODEL_RUNS").unwrap_or(18) {
        // The configuration is part of the seed.
        let seed = n * 8 + salt;
        if only.is_none_or(|only| only == seed) {
            run(seed, steps, config, n % 2 == 1, only.is_some());
        }
    }
}

const RANGE: SpaceConfig = SpaceConfig {
    placement: crate::space::Placement::Linux,
    locking: Locking::Speculative,
    fault_around: 64 << 10,
    huge_pages: HugePages::Madvise,
    collapse_max_none: 511,
    range: LIMITS,
    map_top: 0,
    bottom_up: false,
    colour_mask: 0,
    map_limit: None,
    address_limit: None,
    stack_limit: None,
    data_limit: None,
    memlock_limit: None,
    gaps: true,
    linear_search: false,
    rmap_lock_on_end_move: false,
};

#[test]
fn speculative_with_fault_around() {
    runs(RANGE, 0);
}

#[test]
fn speculative_without_fault_around() {
    runs(SpaceConfig { fault_around: PAGE_SIZE, ..RANGE }, 1);
}

#[test]
fn classic_with_fault_around() {
    runs(SpaceConfig { locking: Locking::Classic, ..RANGE }, 2);
}

#[test]
fn classic_without_fault_around() {
    runs(SpaceConfig { locking: Locking::Classic, fault_around: PAGE_SIZE, ..RANGE }, 3);
}

#[test]
fn from_below_without_gaps_with_a_large_window() {
    runs(SpaceConfig { bottom_up: true, gaps: false, fault_around: 2 << 20, ..RANGE }, 4);
}

#[test]
fn with_the_locks_of_old() {
    let old = SpaceConfig { locking: Locking::Classic, rmap_lock_on_end_move: true, ..RANGE };
    runs(old, 5);
}

#[test]
fn a_range_that_ends_at_the_end_of_the_address_space_is_refused() {
    let bench = Bench::new(100);
    let space = bench.space(RANGE);
    assert_eq!(space.protect(&bench.cpu, BASE, !0xfff, Prot::READ), Err(Error::NoMemory));
    drop(space);
    bench.assert_nothing_left();
}
