//! Listings of a plain model of a layout, in which calls change records step by step while a reader passes.

use super::log::{Log, Piece};
use super::{Covered, History, restore};
use crate::addr::AddrRange;
use crate::sync::Epoch;
use crate::sync::atomic::AtomicU64;
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;

const PAGE: u64 = 0x1000;

struct Numbers(u64);

impl Numbers {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end
    }
}

/// Records by a number that is never used twice, as a reader that has found one holds on to it.
#[derive(Clone, Default)]
struct Records {
    next: usize,
    live: BTreeMap<usize, Piece>,
}

impl Records {
    fn insert(&mut self, piece: Piece) {
        self.live.insert(self.next, piece);
        self.next += 1;
    }

    fn sorted(&self) -> Vec<Piece> {
        let mut list: Vec<_> = self.live.values().copied().collect();
        list.sort_by_key(|piece| piece.range.start);
        list
    }

    fn overlapping(&self, range: AddrRange) -> Option<usize> {
        let inside = self.live.iter().filter(|(_, piece)| piece.range.overlaps(range));
        inside.min_by_key(|(_, piece)| piece.range.start).map(|(id, _)| *id)
    }

    fn edge(&self, at: u64) -> Option<(usize, usize)> {
        let low = self.live.iter().find(|(_, piece)| piece.range.end == at)?.0;
        let high = self.live.iter().find(|(_, piece)| piece.range.start == at)?.0;
        Some((*low, *high))
    }

    fn image(&self, range: AddrRange, visit: &mut dyn FnMut(Piece)) {
        self.sorted().into_iter().filter(|piece| piece.range.overlaps(range)).for_each(visit);
    }
}

/// What calls see of the listing.
#[derive(Clone, Copy, Default)]
struct View<'a> {
    log: Option<&'a Log>,
    /// The index is being read.
    reading: bool,
}

/// A call: what it makes of its range, and how far it is.
#[derive(Clone)]
struct Call {
    range: AddrRange,
    /// `None` unmaps; else the attributes to be; mapped anew where `maps`.
    flags: Option<u64>,
    maps: bool,
    /// Takes up with its neighbours whatever it can.
    merges: bool,
    /// Where the next step goes on.
    at: u64,
    merging: Option<u64>,
    entered: bool,
    /// Writes to the log.
    aware: bool,
}

impl Call {
    fn random(numbers: &mut Numbers, pages: u64) -> Call {
        let start = numbers.below(pages);
        let len = 1 + numbers.below((pages - start).min(6));
        let range = AddrRange::new(start * PAGE, (start + len) * PAGE);
        let kind = numbers.below(3);
        Call {
            range,
            flags: (kind > 0).then(|| numbers.below(3)),
            maps: kind == 1,
            merges: numbers.below(3) > 0,
            at: range.start,
            merging: None,
            entered: false,
            aware: false,
        }
    }

    fn note(&self, records: &Records, id: usize, view: View, covered: &Covered) {
        let piece = records.live[&id];
        if let Some(log) = view.log.filter(|log| view.reading && !covered.contains(log.number(), piece.range))
        {
            log.note(piece);
            covered.add(log.number(), piece.range);
        }
    }

    /// Cuts `id` at the ends of the range; returns the part inside, which is a record of its own then.
    fn cut(&self, records: &mut Records, id: usize) -> usize {
        let piece = records.live[&id];
        let inside = piece.clip(self.range);
        if piece.range.end > self.range.end {
            records.insert(piece.clip(AddrRange::new(self.range.end, piece.range.end)));
        }
        if piece.range.start < self.range.start {
            records.insert(inside);
            records.live.insert(id, piece.clip(AddrRange::new(piece.range.start, self.range.start)));
            return records.next - 1;
        }
        records.live.insert(id, inside);
        id
    }

    /// One step, as short as the real ones that a reader sees as a whole. False when the call is over.
    fn step(&mut self, records: &mut Records, view: View, seen: &[Covered; 2]) -> bool {
        if !self.entered {
            self.entered = true;
            let [images, _] = seen;
            if let Some(log) = view.log.filter(|log| self.aware && !images.contains(log.number(), self.range))
            {
                log.image(self.range, |visit| records.image(self.range, visit));
                images.add(log.number(), self.range);
            }
            return true;
        }
        if let Some(at) = self.merging {
            return self.merge(records, at, view, &seen[1]);
        }
        let rest = AddrRange::new(self.at, self.range.end);
        let Some(id) = records.overlapping(rest).filter(|_| self.at < self.range.end) else {
            if let Some(flags) = self.flags.filter(|_| self.maps) {
                let pgoff = self.range.start >> 12;
                records.insert(Piece { range: self.range, flags, pgoff, object: 1 });
            }
            self.merging = self.merges.then_some(self.range.end);
            return self.merges;
        };
        let piece = records.live[&id];
        self.at = piece.range.end;
        if !self.range.covers(piece.range) {
            self.note(records, id, view, &seen[1]);
        }
        let inside = self.cut(records, id);
        match self.flags.filter(|_| !self.maps) {
            Some(flags) => records.live.get_mut(&inside).unwrap().flags = flags,
            None => drop(records.live.remove(&inside)),
        }
        true
    }

    fn merge(&mut self, records: &mut Records, at: u64, view: View, notes: &Covered) -> bool {
        if let Some((low, high)) = records.edge(at) {
            let (a, b) = (records.live[&low], records.live[&high]);
            if a.is_alike(&b) {
                for (id, piece) in [(low, a), (high, b)] {
                    if !self.range.covers(piece.range) {
                        self.note(records, id, view, notes);
                    }
                }
                records.live.remove(&high);
                records.live.get_mut(&low).unwrap().range.end = b.range.end;
            }
        }
        // Downwards, to the start of the range.
        let below = records.live.values().map(|piece| piece.range.start);
        let below = below.filter(|start| (self.range.start..at).contains(start)).max();
        self.merging = below.or((at > self.range.start).then_some(self.range.start));
        self.merging.is_some()
    }
}

/// The reader: looks up a few records at a time, and reads each of them later.
struct Reader {
    at: u64,
    found: Vec<usize>,
    seen: Vec<Piece>,
}

impl Reader {
    fn step(&mut self, records: &Records, numbers: &mut Numbers) -> bool {
        if let Some(id) = self.found.pop() {
            self.seen.extend(records.live.get(&id));
            return true;
        }
        let mut next: Vec<_> =
            records.live.iter().filter(|(_, piece)| piece.range.start >= self.at).collect();
        next.sort_by_key(|(_, piece)| piece.range.start);
        next.truncate(1 + numbers.below(4) as usize);
        let Some((_, last)) = next.last() else { return false };
        self.at = last.range.start + PAGE;
        self.found = next.iter().rev().map(|(id, _)| **id).collect();
        true
    }
}

/// Attributes page by page.
fn attributes(pieces: &[Piece], pages: u64) -> Vec<Option<Piece>> {
    let page = |index: u64| AddrRange::new(index * PAGE, (index + 1) * PAGE);
    let of = |page| pieces.iter().find(|piece| piece.range.overlaps(page)).map(|piece| piece.clip(page));
    (0..pages).map(|index| of(page(index))).collect()
}

/// What to leave out, to see it missed.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Broken {
    Nothing,
    Images,
    Notes,
    Waiting,
    Grace,
}

/// Makes a listing amidst calls; false when it is not the layout of the moment. `running`: calls are under way at the moment.
fn listing(seed: u64, running: bool, broken: Broken) -> bool {
    const CPUS: usize = 3;
    let mut numbers = Numbers::new(seed);
    let pages = 8 + numbers.below(40);
    let mut records = Records::default();
    for _ in 0..numbers.below(40) {
        let mut call = Call::random(&mut numbers, pages);
        while call.step(&mut records, View::default(), &Default::default()) {}
    }
    let known: [[Covered; 2]; CPUS] = Default::default();
    let mut calls: Vec<Option<Call>> = vec![None; CPUS];
    let begin = |numbers: &mut Numbers, calls: &[Option<Call>]| {
        let call = Call::random(numbers, pages);
        calls.iter().flatten().all(|other| !other.range.overlaps(call.range)).then_some(call)
    };
    if running {
        for cpu in 0..CPUS {
            calls[cpu] = begin(&mut numbers, &calls);
            for _ in 0..numbers.below(6) {
                let call = &mut calls[cpu];
                if call.as_mut().is_some_and(|call| !call.step(&mut records, View::default(), &known[cpu])) {
                    *call = None;
                }
            }
        }
    }
    // The moment. What is under way comes before it; nobody who comes later does.
    let log: Box<[Log]> = Log::try_new(1 + seed, 4000).unwrap();
    let log = &log[0];
    let mut expected = records.clone();
    let mut before = calls.clone();
    before
        .iter_mut()
        .flatten()
        .for_each(|call| while call.step(&mut expected, View::default(), &Default::default()) {});
    let mut reader = Reader { at: 0, found: vec![], seen: vec![] };
    loop {
        let cpu = numbers.below(CPUS as u64 + 1) as usize;
        let unaware = calls.iter().flatten().any(|call| !call.aware) && broken != Broken::Waiting;
        let view = View { log: Some(log), reading: !unaware || broken == Broken::Grace };
        match calls.get_mut(cpu) {
            None if unaware => {}
            None => {
                if !reader.step(&records, &mut numbers) {
                    break;
                }
            }
            Some(Some(call)) => {
                if !call.step(&mut records, view, &known[cpu]) {
                    calls[cpu] = None;
                }
            }
            Some(None) => {
                calls[cpu] = begin(&mut numbers, &calls);
                if let Some(call) = &mut calls[cpu] {
                    call.aware = true;
                    if broken == Broken::Images {
                        call.entered = true;
                    }
                }
            }
        }
    }
    let mut seen = reader.seen;
    if broken != Broken::Notes {
        seen.extend(log.notes());
    }
    assert!(!log.has_overflowed());
    let restored = restore(seen, log).unwrap();
    assert!(restored.is_sorted_by(|a, b| a.range.end <= b.range.start), "{restored:x?}");
    let expected = expected.sorted();
    match running {
        // Where two calls meet at the moment, whether their VMAs are one is open.
        true => attributes(&restored, pages) == attributes(&expected, pages),
        false => restored == expected,
    }
}

#[test]
fn a_listing_is_the_layout_of_one_moment() {
    for seed in 0..1500 {
        assert!(listing(seed, false, Broken::Nothing), "seed {seed}");
        assert!(listing(seed, true, Broken::Nothing), "seed {seed}, amidst calls");
    }
}

#[test]
fn without_one_of_its_parts_it_is_not() {
    for (broken, at_least) in
        [(Broken::Images, 50), (Broken::Notes, 3), (Broken::Waiting, 3), (Broken::Grace, 1)]
    {
        let wrong = (0..600).filter(|seed| !listing(*seed, true, broken)).count();
        assert!(wrong >= at_least, "{broken:?}: {wrong} of 600");
    }
}

fn piece(start: u64, end: u64, flags: u64) -> Piece {
    Piece { range: AddrRange::new(start * PAGE, end * PAGE), flags, pgoff: start, object: 0 }
}

fn pages(start: u64, end: u64) -> AddrRange {
    AddrRange::new(start * PAGE, end * PAGE)
}

#[test]
fn images_are_put_in_place_of_what_was_read() {
    let log = &Log::try_new(1, 100).unwrap()[0];
    // Read: one VMA all over. It was three, and a hole; the middle one went on beyond the range of the image.
    log.image(pages(2, 6), |visit| {
        visit(piece(1, 3, 7));
        visit(piece(4, 8, 8));
    });
    // A later image of a part, and beyond, tells only of what lies beyond.
    log.image(pages(5, 10), |visit| visit(piece(5, 10, 9)));
    let restored = restore(vec![piece(0, 12, 7)], log).unwrap();
    let expected = [piece(0, 3, 7), piece(4, 6, 8), piece(6, 10, 9), piece(10, 12, 7)];
    assert_eq!(restored, expected);
    assert!(restore(vec![], &Log::try_new(1, 0).unwrap()[0]).unwrap().is_empty());
}

#[test]
fn a_log_that_is_full_says_so() {
    let log = &Log::try_new(5, 3).unwrap()[0];
    log.image(pages(0, 3), |visit| visit(piece(0, 3, 1)));
    assert!(!log.has_overflowed());
    log.image(pages(4, 6), |visit| visit(piece(4, 6, 1)));
    log.note(piece(9, 10, 1));
    assert!(log.has_overflowed() && log.notes().next().is_none());
    assert_eq!(restore(vec![piece(0, 9, 2)], log).unwrap(), [piece(0, 3, 1), piece(3, 9, 2)]);
}

#[test]
fn the_first_heap_counts() {
    let log = &Log::try_new(5, 3).unwrap()[0];
    assert_eq!(log.first_heap(), None);
    log.heap(pages(1, 2));
    log.heap(pages(1, 5));
    assert_eq!(log.first_heap(), Some(pages(1, 2)));
}

#[test]
fn what_is_covered_is_remembered_for_one_listing() {
    let covered = Covered::default();
    assert!(!covered.contains(1, pages(0, 1)));
    covered.add(1, pages(4, 6));
    covered.add(1, pages(6, 8));
    assert!(covered.contains(1, pages(5, 8)) && !covered.contains(1, pages(5, 9)));
    assert!(!covered.contains(2, pages(5, 8)));
    (0..3).for_each(|at| covered.add(1, pages(20 + 2 * at, 21 + 2 * at)));
    assert!(covered.contains(1, pages(5, 8)) && covered.contains(1, pages(24, 25)));
    covered.add(1, pages(30, 31));
    assert!(!covered.contains(1, pages(5, 8)), "forgotten for the newest");
    covered.add(2, pages(1, 2));
    assert!(covered.contains(2, pages(1, 2)) && !covered.contains(1, pages(24, 25)));
}

#[test]
fn a_log_is_found_while_its_listing_lasts() {
    let epoch = Epoch::try_new(2).unwrap();
    let (me, other) = (epoch.register().unwrap(), epoch.register().unwrap());
    let history = History::<parking_lot::RawMutex>::new();
    assert_eq!(history.active(), 0);
    let numbers = AtomicU64::new(0);
    for number in 1..100 {
        let pages = history.record(&me, &numbers, 8, |recording| {
            assert!(history.active() == number && history.reading() == 0);
            {
                let pin = other.pin();
                assert!(history.log(&pin, number + 1).is_none());
                history.log(&pin, number).unwrap().note(piece(0, number, 1));
            }
            recording.begin_reading(&me, |_| unreachable!("nobody is pinned"));
            assert_eq!(history.reading(), number);
            recording.log().notes().map(|note| note.range.pages()).sum::<u64>()
        });
        assert_eq!(pages, Ok(number));
        assert!(history.active() == 0 && history.reading() == 0);
        assert!(history.log(&other.pin(), number).is_none());
    }
    // Reading does not begin while somebody is pinned who has not seen that it does.
    let mut pin = Some(other.pin());
    let mut waited = 0;
    let read = history.record(&me, &numbers, 8, |recording| {
        recording.begin_reading(&me, |rounds| {
            assert_eq!(rounds, waited);
            waited += 1;
            if waited == 5 {
                pin = None;
            }
        });
    });
    assert!(read.is_ok() && pin.is_none() && waited == 5);
    me.collect_all();
}
