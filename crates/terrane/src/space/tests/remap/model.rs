//! Random moves among other calls, in several spaces that fork, against a plain map of pages. After each step every page's content,
//! and what the walks of the reverse mapping find, is compared.

use super::super::model::{Random, from_env};
use super::super::rmap::{check_object, check_private};
use super::super::{Bench, Space};
use super::{FIXED, KEEP, MAY, NONE, P, RW};
use crate::addr::AddrRange;
use crate::object::Object;
use crate::space::{HugePages, Locking, MapRequest, SpaceConfig};
use crate::testing::{TestFile, TestHost};
use crate::vma::{Advice, MapFlags, Prot};
use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;
use std::eprintln;

/// Pages of the arena, and of the file.
const PAGES: u64 = 48;
const FILE: u64 = 32;

/// A page of a space: which page of the file it shows (or memory), whether stores stay here, and what was stored.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Page {
    shows: Option<u64>,
    shared: bool,
    own: Option<u64>,
}

type Plain = BTreeMap<u64, Page>;

struct World {
    bench: Bench,
    random: Random,
    base: u64,
    spaces: Vec<(Space, Plain)>,
    file: Vec<u64>,
    loud: bool,
}

impl World {
    fn expected(&self, page: &Page) -> u64 {
        match (page.own, page.shows) {
            (Some(value), false_or) if !page.shared || false_or.is_none() => value,
            (_, Some(index)) => self.file[index as usize],
            _ => 0,
        }
    }

    fn step(&mut self, object: &crate::sync::Shared<Object<TestHost>>, step: u64) {
        let World { bench, random, base, spaces, file, loud } = self;
        let (cpu, base) = (&bench.cpu, *base);
        let n = random.below(spaces.len() as u64) as usize;
        let (page, len) = (random.below(PAGES - 8), 1 + random.below(8));
        let at = |page: u64| base + page * P;
        let count = spaces.len();
        let (space, plain) = &mut spaces[n];
        let what = random.below(20);
        if *loud {
            eprintln!("{step}: {what} in {n}: {page}+{len}");
        }
        match what {
            0 | 1 => {
                space.map(cpu, MapRequest::anonymous(len * P, RW).fixed(at(page))).unwrap();
                for page in page..page + len {
                    plain.insert(page, Page { shows: None, shared: false, own: None });
                }
            }
            2 | 3 => {
                let (first, shared) = (random.below(FILE - 8), random.one_in(2));
                let request = MapRequest::object(object, first * P, len * P, RW, shared).fixed(at(page));
                space.map(cpu, request).unwrap();
                for k in 0..len {
                    plain.insert(page + k, Page { shows: Some(first + k), shared, own: None });
                }
            }
            4 => {
                space.unmap(cpu, at(page), len * P).unwrap();
                plain.retain(|at, _| !(page..page + len).contains(at));
            }
            5 if count < 5 => {
                let child = space.fork(cpu).unwrap();
                let copy = plain.clone();
                spaces.push((child, copy));
            }
            6 if count > 1 => drop(spaces.swap_remove(n)),
            7 => {
                // Whole mappings only, so that the answer is plain.
                if space.advise(cpu, at(page), len * P, Advice::DontNeed).is_ok() {
                    plain
                        .iter_mut()
                        .filter(|(at, _)| (page..page + len).contains(at))
                        .for_each(|(_, page)| page.own = None);
                } else {
                    assert!((page..page + len).any(|page| !plain.contains_key(&page)));
                    plain
                        .iter_mut()
                        .filter(|(at, _)| (page..page + len).contains(at))
                        .for_each(|(_, page)| page.own = None);
                    for k in page..page + len {
                        let _ = space.advise(cpu, at(k), P, Advice::DontNeed);
                    }
                }
            }
            8 => {
                let prot = [Prot::empty(), Prot::READ][random.below(2) as usize];
                for k in page..page + len {
                    if plain.contains_key(&k) {
                        space.protect(cpu, at(k), P, prot).unwrap();
                        space.protect(cpu, at(k), P, RW).unwrap();
                    }
                }
            }
            9..=13 => {
                let to = random.below(PAGES - 8);
                let keep = random.one_in(4);
                let flags = if keep { FIXED | KEEP } else { FIXED };
                let result = space.remap(cpu, at(page), len * P, len * P, flags, at(to));
                if *loud {
                    eprintln!("to {to}, {flags:?}: {result:?}");
                }
                let overlap = to + len > page && to < page + len;
                let starts = plain.contains_key(&page);
                assert_eq!(result.is_ok(), !overlap && starts, "{result:?}");
                if result.is_ok() {
                    for k in 0..len {
                        let Some(moved) = plain.get(&(page + k)).copied() else { continue };
                        plain.insert(to + k, moved);
                        if keep {
                            plain.get_mut(&(page + k)).unwrap().own = None;
                        } else {
                            plain.remove(&(page + k));
                        }
                    }
                }
            }
            14 => {
                // Shrinks, grows in place, or does not.
                let new = 1 + random.below(8);
                let before: Vec<_> = (page..page + len).map(|page| plain.get(&page).copied()).collect();
                let flags = if random.one_in(2) { MAY } else { NONE };
                let Ok(moved) = space.remap(cpu, at(page), len * P, new * P, flags, 0) else { return };
                let to = moved.wrapping_sub(base) / P;
                if new == len {
                    return;
                }
                if new < len {
                    plain.retain(|at, _| !(page + new..page + len).contains(at));
                } else if moved == at(page) {
                    let last = before[len as usize - 1].unwrap();
                    for k in len..new {
                        let shows = last.shows.map(|index| index + 1 + k - len);
                        plain.insert(page + k, Page { shows, own: None, ..last });
                    }
                } else {
                    assert!(to > PAGES);
                    // Back into the arena, cut to its size, so that the model stays small.
                    assert_eq!(space.remap(cpu, moved, new * P, len * P, FIXED, at(page)), Ok(at(page)));
                }
            }
            _ => {
                let k = page + random.below(8);
                let (value, index) = (1 + step, plain.get(&k).and_then(|page| page.shows));
                let stored = bench.store(space, at(k), value);
                let Some(page) = plain.get_mut(&k) else { return assert!(stored.is_err()) };
                if index.is_some_and(|index| index >= FILE) {
                    return assert!(stored.is_err());
                }
                stored.unwrap();
                match (page.shared, page.shows) {
                    (true, Some(index)) => file[index as usize] = value,
                    _ => page.own = Some(value),
                }
            }
        }
    }

    fn check(&self, object: &crate::sync::Shared<Object<TestHost>>, loads: bool) {
        let spaces: Vec<&Space> = self.spaces.iter().map(|(space, _)| space).collect();
        check_private(&self.bench.cpu, &spaces);
        check_object(&self.bench.cpu, object, &spaces);
        for (space, plain) in &self.spaces {
            let mapped = plain.len() as u64 * P;
            let arena = AddrRange::new(self.base, self.base + (PAGES + 16) * P);
            let listed: u64 = space
                .mappings(&self.bench.cpu)
                .unwrap()
                .iter()
                .map(|mapping| mapping.range.intersection(arena).len())
                .sum();
            assert_eq!(listed, mapped);
            assert_eq!(space.mapped_bytes(), mapped);
            for (&page, state) in plain.iter().filter(|_| loads) {
                let found = self.bench.load(space, self.base + page * P);
                if state.shows.is_some_and(|index| index >= FILE) && state.own.is_none() {
                    assert!(found.is_err());
                } else {
                    assert_eq!(found, Ok(self.expected(state)), "page {page}: {state:?}");
                }
            }
        }
    }
}

#[test]
fn random_moves_in_forking_spaces() {
    let only = from_env("TERRANE_REMAP_SEED");
    let runs = from_env("TERRANE_REMAP_RUNS").unwrap_or(16);
    let seeds = only.map_or(0..runs, |seed| seed..seed + 1);
    for seed in seeds {
        eprintln!("seed {seed}");
        let bench = Bench::on(TestHost::with_tickets(1, 2500), 3);
        let words: Vec<u8> = (0..FILE)
            .flat_map(|page| {
                let mut bytes = vec![0; P as usize];
                bytes[..8].copy_from_slice(&(7000 + page).to_ne_bytes());
                bytes
            })
            .collect();
        let object = Object::file(&bench.machine, TestFile::new(&words)).unwrap();
        let locking = if seed % 4 == 3 { Locking::Classic } else { Locking::Speculative };
        let config = SpaceConfig { fault_around: P << (seed % 3), locking, ..SpaceConfig::default() };
        let space = bench.space(config);
        // Across the boundary of a table.
        let base = (1 << 30) - 20 * P;
        let file = (0..FILE).map(|page| 7000 + page).collect();
        let random = Random::new(seed);
        let loud = only.is_some();
        let mut world = World { bench, random, base, spaces: vec![(space, Plain::new())], file, loud };
        for step in 0..from_env("TERRANE_REMAP_STEPS").unwrap_or(400) {
            world.step(&object, step);
            world.check(&object, step % 3 == 0);
        }
        world.spaces.clear();
        drop(object);
        world.bench.assert_nothing_left();
    }
}

/// Blocks, tables and pages at random distances, aligned and not.
#[test]
fn random_moves_of_huge_pages() {
    const BLOCK: u64 = 512;
    for seed in 0..6 {
        let bench = Bench::on(TestHost::with_tickets(1, 14000), 3);
        let config = SpaceConfig { huge_pages: HugePages::Always, ..SpaceConfig::default() };
        let mut random = Random::new(seed);
        let base = (1 << 30) - 2 * BLOCK * P;
        let at = |page: u64| base + page * P;
        let mut spaces = vec![(bench.space(config), BTreeMap::<u64, u64>::new(), BTreeMap::<u64, ()>::new())];
        for step in 0..60 {
            let n = random.below(spaces.len() as u64) as usize;
            let skew = if random.one_in(3) { random.below(40) } else { 0 };
            let (page, len) = (random.below(4) * BLOCK + skew, (1 + random.below(2)) * BLOCK);
            let len = if random.one_in(4) { len - random.below(300) } else { len };
            let count = spaces.len();
            let (space, words, mapped) = &mut spaces[n];
            let cpu = &bench.cpu;
            match random.below(10) {
                0 | 1 => {
                    let request =
                        MapRequest::anonymous(len * P, RW).fixed(at(page)).with(MapFlags::NORESERVE);
                    space.map(cpu, request).unwrap();
                    words.retain(|at, _| !(page..page + len).contains(at));
                    mapped.extend((page..page + len).map(|page| (page, ())));
                }
                2 if count < 3 => {
                    let child = (space.fork(cpu).unwrap(), words.clone(), mapped.clone());
                    spaces.push(child);
                }
                3 if count > 1 => drop(spaces.swap_remove(n)),
                4..=6 => {
                    let to = random.below(4) * BLOCK + if random.one_in(2) { 0 } else { random.below(30) };
                    let result = space.remap(cpu, at(page), len * P, len * P, FIXED, at(to));
                    if result.is_err() {
                        continue;
                    }
                    for k in 0..len {
                        if mapped.remove(&(page + k)).is_none() {
                            continue;
                        }
                        mapped.insert(to + k, ());
                        words.remove(&(to + k));
                        if let Some(word) = words.remove(&(page + k)) {
                            words.insert(to + k, word);
                        }
                    }
                }
                _ => {
                    for _ in 0..4 {
                        let page = random.below(6 * BLOCK);
                        if bench.store(space, at(page), step + 1).is_ok() {
                            assert!(mapped.contains_key(&page));
                            words.insert(page, step + 1);
                        }
                    }
                }
            }
            let all: Vec<&Space> = spaces.iter().map(|(space, ..)| space).collect();
            if step % 6 == 0 {
                check_private(&bench.cpu, &all);
            }
            for (space, words, _) in &spaces {
                for (&page, &word) in words {
                    assert_eq!(bench.load(space, at(page)), Ok(word), "seed {seed} step {step}");
                }
            }
        }
        spaces.clear();
        bench.assert_nothing_left();
    }
}
