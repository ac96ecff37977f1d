//! Random operations against a plain ordered map.

use super::*;
use core::ops::ControlFlow;
use std::collections::{BTreeMap, BTreeSet};
use std::vec::Vec;

const P: u64 = PAGE_SIZE;

struct Model<'e, const N: usize, const F: usize> {
    cpu: &'e Participant<'e>,
    index: Index<Record, N, F>,
    reserve: Reserve<Record, N, F>,
    /// Start, in pages, to end and record.
    map: BTreeMap<u64, (u64, NonNull<Record>)>,
    /// The limits, in pages.
    low: u64,
    high: u64,
    random: Random,
    /// Where the last insertion of a run ended.
    run: u64,
    /// Borders, in pages, that no entry has spanned since they were made.
    fences: BTreeSet<u64>,
}

impl<'e, const N: usize, const F: usize> Model<'e, N, F> {
    fn new(cpu: &'e Participant<'e>, seed: u64, low: u64, high: u64, gaps: bool) -> Self {
        let index = Index::try_new(AddrRange::new(low * P, high * P), gaps).unwrap();
        Self {
            cpu,
            index,
            reserve: Reserve::new(),
            map: BTreeMap::new(),
            low,
            high,
            random: Random(seed),
            run: low,
            fences: BTreeSet::new(),
        }
    }

    /// The free pages around `page`, or `None` when it is taken.
    fn gap(&self, page: u64) -> Option<(u64, u64)> {
        let below = self.map.range(..=page).next_back().map_or(self.low, |(_, &(end, _))| end);
        let above = self.map.range(page + 1..).next().map_or(self.high, |(&start, _)| start);
        (below <= page).then_some((below, above))
    }

    fn insert(&mut self, pin: &Pin<'_>, start: u64, end: u64) {
        let guard = if self.random.below(8) == 0 { self.random.below(6) * P } else { 0 };
        let record = Record::leak(start * P, end * P, guard);
        self.index.insert(&mut self.reserve, pin, AddrRange::new(start * P, end * P), record);
        assert!(self.map.insert(start, (end, record)).is_none());
    }

    fn take(&mut self, pin: &Pin<'_>, start: u64) {
        let (_, record) = self.map.remove(&start).unwrap();
        assert_eq!(remove(&self.index, &mut self.reserve, pin, start * P), Some(record));
        retire(pin, record, false);
    }

    fn some_entry(&mut self) -> Option<(u64, u64, NonNull<Record>)> {
        let page = self.low + self.random.below(self.high - self.low);
        let (&start, &(end, record)) = self.map.range(page..).next().or_else(|| self.map.iter().next())?;
        Some((start, end, record))
    }

    /// One random operation. `grow` is the percentage of insertions among insertions and removals.
    fn step(&mut self, pin: &Pin<'_>, grow: u64) {
        let inserts = self.random.below(3);
        // Sometimes without: removals then find an empty reserve and must leave merging undone.
        if self.random.below(16) != 0 {
            self.index.reserve(&mut self.reserve, 2 + inserts as usize).unwrap();
        } else {
            self.index.reserve(&mut self.reserve, 2).unwrap();
        }
        match self.random.below(100) {
            0..60 if self.random.below(100) < grow => {
                let page = self.low + self.random.below(self.high - self.low);
                let Some((below, above)) = self.gap(page) else { return };
                let start = below.max(page - self.random.below(3).min(page - below));
                let end = above.min(start + 1 + self.random.below(4));
                self.insert(pin, start, end);
            }
            0..60 => {
                let Some((start, ..)) = self.some_entry() else { return };
                self.take(pin, start);
            }
            60..70 => {
                // A run, upwards.
                let page = if self.run < self.high { self.run } else { self.low };
                self.run = page + 1;
                if let Some((_, above)) = self.gap(page) {
                    let end = above.min(page + 1 + self.random.below(2));
                    self.insert(pin, page, end);
                    self.run = end;
                }
            }
            70..76 => {
                let Some((start, end, _)) = self.some_entry() else { return };
                let limit = self.gap(end).map_or(end, |(_, above)| above);
                let new = start + 1 + self.random.below(limit - start);
                self.move_end(pin, start, end, new);
            }
            76..82 => {
                let Some((start, end, record)) = self.some_entry() else { return };
                let limit = match start.checked_sub(1).and_then(|page| self.gap(page)) {
                    Some((below, _)) if start > self.low => below,
                    _ => start,
                };
                let new = limit + self.random.below(end - limit);
                self.move_start(pin, start, new);
                self.map.remove(&start);
                self.map.insert(new, (end, record));
            }
            82..88 => self.divide(pin),
            88..92 => {
                let Some((start, end, _)) = self.some_entry() else { return };
                self.join(pin, start, end);
            }
            92..95 => {
                let Some((start, end, record)) = self.some_entry() else { return };
                let new = Record::leak(start * P, end * P, 0);
                assert_eq!(self.index.replace(&mut self.reserve, pin, start * P, new), Some(record));
                self.map.insert(start, (end, new));
                retire(pin, record, false);
            }
            95 => {
                let page = self.low + self.random.below(self.high - self.low);
                self.index.fence(&mut self.reserve, pin, page * P).unwrap();
                if self.fences.len() < 12 {
                    self.fences.insert(page);
                }
            }
            _ => {
                // All of a range, as `munmap` does it.
                let from = self.low + self.random.below(self.high - self.low);
                let to = from + self.random.below(24);
                let starts: Vec<u64> = self.map.range(from..to).map(|(&start, _)| start).collect();
                for start in starts {
                    self.take(pin, start);
                }
            }
        }
        assert_eq!(self.index.len(), self.map.len());
        let (fences, map) = (&mut self.fences, &self.map);
        fences.retain(|&page| map.range(..page).next_back().is_none_or(|(_, &(end, _))| end <= page));
    }

    fn move_end(&mut self, pin: &Pin<'_>, start: u64, end: u64, new: u64) {
        let (index, reserve) = (&self.index, &mut self.reserve);
        if new > end {
            // First one that declines: the index stays as it is.
            assert!(!index.extend_up(reserve, pin, end * P, new * P, |_| false));
            assert!(!index.extend_up(reserve, pin, start * P + P / 2, new * P, |_| unreachable!()));
            assert!(index.extend_up(reserve, pin, end * P, new * P, |record| {
                assert_eq!(record.range(), (start * P, end * P));
                record.end.store(new * P, Ordering::Relaxed);
                true
            }));
        } else {
            let done = index.edit(reserve, pin, new * P - 1, 0, |record, edit| {
                assert_eq!(edit.range(), AddrRange::new(start * P, end * P));
                record.end.store(new * P, Ordering::Relaxed);
                edit.set_end(new * P);
            });
            assert_eq!(done, Some(()));
        }
        self.map.get_mut(&start).unwrap().0 = new;
    }

    fn move_start(&mut self, pin: &Pin<'_>, start: u64, new: u64) {
        let (index, reserve) = (&self.index, &mut self.reserve);
        if new < start {
            assert!(!index.extend_down(reserve, pin, start * P, new * P, |_| false));
            assert!(index.extend_down(reserve, pin, start * P, new * P, |record| {
                assert_eq!(record.start(), start * P);
                record.start.store(new * P, Ordering::Relaxed);
                true
            }));
        } else {
            let done = index.edit(reserve, pin, start * P, 0, |record, edit| {
                assert_eq!(edit.range().start, start * P);
                record.start.store(new * P, Ordering::Relaxed);
                edit.set_start(new * P);
            });
            assert_eq!(done, Some(()));
        }
    }

    /// As `mprotect` does it: one entry becomes two or three. Or as `munmap` does: the middle is gone then.
    fn divide(&mut self, pin: &Pin<'_>) {
        let Some((start, end, low)) = self.some_entry() else { return };
        if end - start < 3 {
            return;
        }
        let first = start + 1 + self.random.below(end - start - 2);
        let second = first + 1 + self.random.below(end - first - 1);
        let (hole, three) = (self.random.below(2) == 0, self.random.below(2) == 0);
        let high = Record::leak(second * P, end * P, 0);
        let middle = Record::leak(first * P, second * P, 0);
        let at = (start + self.random.below(end - start)) * P;
        let inserts = 1 + usize::from(three && !hole);
        let done = self.index.edit(&mut self.reserve, pin, at, inserts, |record, edit| {
            assert_eq!((NonNull::from(record), edit.range()), (low, AddrRange::new(start * P, end * P)));
            edit.divide(second * P, high);
            if hole {
                edit.set_end(first * P);
            } else if three {
                edit.divide(first * P, middle);
            }
            record.end.store(edit.range().end, Ordering::Relaxed);
            edit.range().end / P
        });
        self.map.insert(start, (done.unwrap(), low));
        self.map.insert(second, (end, high));
        if three && !hole {
            self.map.insert(first, (second, middle));
        } else {
            retire(pin, middle, false);
        }
    }

    /// Joins the entry with the next one, if they touch.
    fn join(&mut self, pin: &Pin<'_>, start: u64, end: u64) {
        let next = self.map.get(&end).copied();
        let Some((far, high)) = next else {
            let none = self.index.join(&mut self.reserve, pin, end * P, |_, _| unreachable!());
            return assert!(none.is_none());
        };
        assert!(self.index.join(&mut self.reserve, pin, end * P, |_, _| false).is_none());
        let gone = self.index.join(&mut self.reserve, pin, end * P, |low, high| {
            assert_eq!((low.range(), high.range()), ((start * P, end * P), (end * P, far * P)));
            low.end.store(far * P, Ordering::Relaxed);
            true
        });
        assert_eq!(gone, Some(high));
        self.map.get_mut(&start).unwrap().0 = far;
        self.map.remove(&end);
        retire(pin, high, false);
    }

    /// Compares queries at a few random places.
    fn compare_some(&mut self, pin: &Pin<'_>) {
        for _ in 0..2 {
            let page = self.low + self.random.below(self.high - self.low);
            let addr = page * P + self.random.below(P);
            self.compare_at(pin, addr);
        }
        self.compare_search(pin);
    }

    fn compare_at(&self, pin: &Pin<'_>, addr: u64) {
        let page = addr / P;
        let before = self.map.range(..=page).next_back().map(|(&start, &(end, record))| (start, end, record));
        let hit = before.filter(|&(_, end, _)| page < end).map(|(_, _, record)| record);
        assert_eq!(self.index.find(pin, addr).map(NonNull::from), hit, "find {addr:#x}");
        assert_eq!(self.index.find_exact(pin, addr).map(NonNull::from), hit, "find_exact {addr:#x}");
        let next = self.map.range(page + 1..).next().map(|(_, &(_, record))| record);
        assert_eq!(
            self.index.first_ending_after(pin, addr).map(NonNull::from),
            hit.or(next),
            "after {addr:#x}"
        );
        let last = self.map.range(..addr.div_ceil(P)).next_back().map(|(_, &(_, record))| record);
        assert_eq!(self.index.last_starting_before(pin, addr).map(NonNull::from), last, "before {addr:#x}");
        let above = self.map.range(addr.div_ceil(P)..).next().map(|(_, &(_, record))| record);
        let beside =
            |within| self.index.neighbours(pin, addr, within).map(|item| item.map(|(_, entry)| entry));
        let [low, high] = beside(AddrRange::new(0, u64::MAX));
        assert_eq!((low.map(NonNull::from), high.map(NonNull::from)), (last, above), "beside {addr:#x}");
        // What does not reach a part of the addresses may be left out, and nothing else.
        let within = AddrRange::new(addr.saturating_sub(P), addr + 2 * P);
        let [low, high] = beside(within).map(|entry| entry.map(NonNull::from));
        let end = self.map.range(..addr.div_ceil(P)).next_back().map(|(_, &(end, _))| end * P);
        let start = self.map.range(addr.div_ceil(P)..).next().map(|(&start, _)| start * P);
        assert!(low == last || low.is_none() && end.is_none_or(|end| end < within.start), "below {addr:#x}");
        assert!(
            high == above || high.is_none() && start.is_none_or(|start| within.end < start),
            "above {addr:#x}"
        );
    }

    /// The search against trying every page.
    fn compare_search(&mut self, pin: &Pin<'_>) {
        let span = self.high - self.low + 8;
        let bound = |random: &mut Random| match random.below(3) {
            0 => (self.low.saturating_sub(4) + random.below(span)) * P,
            _ => 0,
        };
        let (low, high) = (bound(&mut self.random), bound(&mut self.random));
        let alignment = 1 << self.random.below(5);
        let longest = if self.random.below(4) == 0 { 64 } else { 6 };
        let request = GapRequest {
            length: (1 + self.random.below(longest)) * P,
            low,
            high: if high == 0 { u64::MAX } else { high },
            direction: if self.random.below(2) == 0 { Direction::TopDown } else { Direction::BottomUp },
            align_mask: if self.random.below(2) == 0 { 0 } else { alignment * P - 1 },
            align_offset: self.random.below(alignment) * P,
        };
        let expected = self.place(&request);
        assert_eq!(self.index.search(pin, &request), expected, "{request:x?}");
        let from = match request.direction {
            Direction::TopDown => u64::MAX,
            Direction::BottomUp => 0,
        };
        assert_eq!(self.index.search_linear(pin, &request, from), expected, "{request:x?}");
        // From elsewhere it may find another place, but finds one whenever there is one.
        let from = (self.low + self.random.below(self.high - self.low)) * P;
        let found = self.index.search_linear(pin, &request, from);
        assert_eq!(found.is_some(), expected.is_some());
        let there = |addr| GapRequest { low: addr, high: addr + request.length, ..request };
        assert!(found.is_none_or(|addr| low <= addr && self.place(&there(addr)) == found));
    }

    /// What the search must find: in every gap, tries page after page from the better end.
    fn place(&self, request: &GapRequest) -> Option<u64> {
        let (low, high) = ((request.low / P).max(self.low), (request.high / P).min(self.high));
        let length = request.length / P;
        let aligned = |&page: &u64| ((page * P) ^ request.align_offset) & request.align_mask == 0;
        let entries = self.map.iter().map(|(&start, &(end, record))| {
            // SAFETY: in the index, so alive.
            (start, end, unsafe { record.as_ref() }.guard_below() / P)
        });
        let mut end_before = self.low;
        let gaps = entries
            .chain([(self.high, self.high, 0)])
            .map(|(start, end, guard)| (std::mem::replace(&mut end_before, end).max(low), start, guard));
        let gaps: Vec<_> = gaps.collect();
        if request.direction == Direction::BottomUp {
            return gaps.into_iter().find_map(|(bottom, start, guard)| {
                let top = start.saturating_sub(guard).min(high);
                (bottom..(top + 1).saturating_sub(length)).find(aligned).map(|page| page * P)
            });
        }
        let mut high = high;
        gaps.into_iter().rev().find_map(|(bottom, start, guard)| {
            let fit = |top: u64| (bottom..(top + 1).saturating_sub(length)).rev().find(aligned);
            let limit = start.saturating_sub(guard);
            if fit(start.min(high))? + length > limit {
                // As in Linux: from now on below all of the guard, whatever else lies in it.
                high = high.min(limit);
            }
            fit(start.min(high)).map(|page| page * P)
        })
    }

    /// Compares everything.
    fn compare(&mut self, pin: &Pin<'_>) {
        let borders = check(&self.index);
        for page in &self.fences {
            assert!(*page == self.low || borders.contains(&(page * P)), "no border at page {page}");
        }
        for (&start, &(end, _)) in &self.map {
            for addr in [start * P, start * P + 1, end * P - 1, end * P] {
                self.compare_at(pin, addr);
            }
        }
        let from = self.low + self.random.below(self.high - self.low);
        for (from, to) in [(0, self.high + 1), (from, from + 1 + self.random.below(200))] {
            let stop = self.random.below(400) as usize;
            let mut seen = Vec::new();
            self.index.for_each(pin, AddrRange::new(from * P, to * P), |record| {
                seen.push(NonNull::from(record));
                if seen.len() > stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            let overlapping = self.map.iter().filter(|&(&start, &(end, _))| start < to && end > from);
            assert_eq!(seen, overlapping.map(|(_, &(_, record))| record).take(stop + 1).collect::<Vec<_>>());
        }
    }
}

impl<const N: usize, const F: usize> Drop for Model<'_, N, F> {
    fn drop(&mut self) {
        let pin = self.cpu.pin();
        for (_, (_, record)) in core::mem::take(&mut self.map) {
            retire(&pin, record, false);
        }
    }
}

fn run<const N: usize, const F: usize>(seed: u64, pages: u64, operations: usize, gaps: bool) -> usize {
    let epoch = Epoch::try_new(1).unwrap();
    let cpu = epoch.register().unwrap();
    let mut model = Model::<N, F>::new(&cpu, seed, 3, 3 + pages, gaps);
    let mut tallest = 0;
    let mut grow = 50;
    for operation in 0..operations {
        // Tides: the index fills, stays, and empties.
        if operation % 1500 == 0 {
            grow = [30, 50, 80, 95][model.random.below(4) as usize];
        }
        let pin = cpu.pin();
        model.step(&pin, grow);
        if operation % 20 == 0 {
            model.compare_some(&pin);
        }
        if operation % 600 == 0 {
            model.compare(&pin);
            tallest = tallest.max(model.index.root().1);
        }
        drop(pin);
        cpu.collect();
    }
    model.compare(&cpu.pin());
    tallest
}

fn small_nodes(seeds: core::ops::Range<u64>) {
    let tallest = seeds.map(|seed| run::<4, 4>(seed, 400, 60_000, true)).max();
    assert!(tallest >= Some(4), "{tallest:?} levels");
}

#[test]
fn small_nodes_behave_like_the_model() {
    small_nodes(0..5);
}

#[test]
fn small_nodes_behave_like_the_model_with_other_seeds() {
    small_nodes(5..10);
}

#[test]
fn other_small_nodes_behave_like_the_model() {
    for seed in 10..14 {
        run::<8, 4>(seed, 400, 30_000, true);
        run::<4, 8>(seed, 300, 30_000, true);
    }
}

#[test]
fn real_nodes_behave_like_the_model() {
    for seed in 20..22 {
        let tallest = run::<{ super::super::LEAF_SLOTS }, { super::super::FANOUT }>(seed, 1500, 60_000, true);
        assert!(tallest >= 1);
    }
}

#[test]
fn without_hints_it_behaves_like_the_model() {
    for seed in 30..32 {
        run::<4, 4>(seed, 300, 30_000, false);
    }
}
