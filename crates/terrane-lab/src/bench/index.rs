//! The index: finding the mapping of an address, taking a mapping out and putting it in, searching for free space.

use super::mapped::Mapped;
use super::{memory, rig};
use crate::baseline::areas::{Areas, SIZES};
use crate::baseline::{btree, memory_set};
use crate::failure::Failure;
use crate::measure::plan::{CaseId, Results};
use crate::measure::random::Random;
use crate::measure::threads::{beside, together};
use crate::measure::timing::{black_box, per_op};
use crate::measure::{Case, Context, Experiment, Plan, Sample};
use crate::report::{self, Asked, Role};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// `terrane bench index`.
pub static BENCH: Experiment = Experiment {
    id: "index",
    title: "finding mappings and free addresses",
    source: "sources A (lookup) and C (gaps)",
    about: "Areas of 20 KiB lie 32 KiB apart. find: the area of a random address inside a random area; with several \
            threads, nanoseconds for each of them; within a round, one thread is measured on each of the processors that several use. A hit ends with what the structure itself says of the area: Terrane's \
            with the end in the leaf and a pointer to the record, the map's with the end in its node. To records: \
            the record, of 128 bytes in a place of its own, is looked at as well. Terrane pins its epoch anew for every \
            lookup and change. The thread beside takes an area out and puts it in again, all the while: a random one, \
            one behind all those that are looked up, or one of another index (then only the hardware is shared). Two lines and no \
            index: the same beside, where a lookup reads the two lines in which sixteen keys would be and a change stores to one of \
            them, and the rest of their work is done in indexes that do not meet: the least that a lookup can suffer from \
            changes that it must see. \
            erase + insert: the same, alone, the record not touched; in own areas: each thread has its half of the areas \
            of one index to choose from, one thread is alone in its half. search: four free pages in a row, the lowest, \
            where only the tail has them. memory: of 65,536 mappings of a page, made by calls.",
    seconds: 0.2,
    runs: 15,
    memory: |_| 320 << 20,
    run,
};

/// What is asked for each size: nanoseconds for a lookup, and times what a bare `BTreeMap` takes for a change.
const ASKED: [(f64, f64); 3] = [(20.0, 1.3), (35.0, 1.0), (80.0, 1.0)];

/// The length that is searched for: more than any gap between two areas.
const WANTED: u64 = 4 << 12;

fn run(context: &Context<'_>) -> Result<report::Experiment, Failure> {
    let threads = rig::threads(context)?;
    // At least two: one looks up, and one is beside it.
    let mut plan = Plan::over(threads.max(2));
    let finds = SIZES.map(|areas| {
        plan.group();
        (areas, Finds::plan(&mut plan, areas, threads))
    });
    let changes = SIZES.map(|areas| {
        plan.group();
        (areas, Changes::plan(&mut plan, areas, threads))
    });
    // All sizes take turns, because Terrane's are compared with each other.
    plan.group();
    let searches = SIZES.map(|areas| plan_searches(&mut plan, areas));
    memory::plan(&mut plan);
    let mut results = plan.run(context)?;
    for ((areas, finds), (nanoseconds, _)) in finds.iter().zip(ASKED) {
        finds.compare(&mut results, &areas.words(), threads);
        results.at_most(finds.alone, nanoseconds);
    }
    for ((areas, changes), (_, times)) in changes.iter().zip(ASKED) {
        changes.compare(&mut results, &areas.words(), threads, times);
    }
    let (small, large) = (searches[0], searches[2]);
    results.ratio("search, 64 K areas: time of linear BTreeMap / Terrane", 1.0, large[0], large[1], None);
    results.ratio("search, Terrane: time at 64 K areas / at 64", 1.0, large[1], small[1], None);
    Ok(results.report(context))
}

/// Something in which areas are looked up.
trait Lookup: Sync + Sized + 'static {
    /// What it is called.
    const VARIANT: &'static str;
    /// What a thread needs for it.
    type Thread<'a>;

    /// One that holds `areas`, for so many threads.
    fn make(areas: Areas, threads: usize) -> Result<Self, Failure>;
    /// Thread `index` begins.
    fn enter(&self, index: usize) -> Self::Thread<'_>;
    /// Something of the area that holds `address`, an even number; 0 if there is none.
    fn look_up(&self, thread: &Self::Thread<'_>, address: u64) -> u64;
}

/// The same, for threads that change it meanwhile.
trait Change: Lookup {
    /// Takes the area at `start` out and puts it in again.
    fn erase_insert(&self, thread: &mut Self::Thread<'_>, start: u64) -> Result<(), Failure>;
}

impl Lookup for Mapped {
    const VARIANT: &'static str = "Terrane";
    type Thread<'a> = super::mapped::Thread<'a>;

    fn make(areas: Areas, threads: usize) -> Result<Self, Failure> {
        Self::new(areas, threads)
    }

    fn enter(&self, index: usize) -> Self::Thread<'_> {
        self.thread(index)
    }

    #[inline]
    fn look_up(&self, thread: &Self::Thread<'_>, address: u64) -> u64 {
        self.find(thread, address)
    }
}

impl Change for Mapped {
    #[inline]
    fn erase_insert(&self, thread: &mut Self::Thread<'_>, start: u64) -> Result<(), Failure> {
        Self::erase_insert(self, thread, start)
    }
}

/// The same index, where each hit looks at the record.
struct ToRecords(Mapped);

impl Lookup for ToRecords {
    const VARIANT: &'static str = "Terrane, to records";
    type Thread<'a> = super::mapped::Thread<'a>;

    fn make(areas: Areas, threads: usize) -> Result<Self, Failure> {
        Mapped::new(areas, threads).map(Self)
    }

    fn enter(&self, index: usize) -> Self::Thread<'_> {
        self.0.thread(index)
    }

    #[inline]
    fn look_up(&self, thread: &Self::Thread<'_>, address: u64) -> u64 {
        self.0.find_record(thread, address).unwrap_or(0)
    }
}

/// What no index can do without, by which changes that lookups must see disturb them: a lookup reads the two lines in which the
/// keys of sixteen areas are, a change stores to one of them. All other work, that of lookups and of changes, is done in indexes
/// that do not meet.
struct Lines {
    areas: Areas,
    keys: Vec<Line>,
    looked_up: Mapped,
    changed: Mapped,
}

/// The keys of eight areas.
#[repr(align(64))]
struct Line([AtomicU64; 8]);

impl Lookup for Lines {
    const VARIANT: &'static str = "two lines and no index";
    type Thread<'a> = [super::mapped::Thread<'a>; 2];

    fn make(areas: Areas, threads: usize) -> Result<Self, Failure> {
        let lines = areas.count.div_ceil(16) * 2;
        let keys = (0..lines).map(|_| Line([const { AtomicU64::new(0) }; 8])).collect();
        let [looked_up, changed] = [Mapped::new(areas, threads)?, Mapped::new(areas, threads)?];
        Ok(Self { areas, keys, looked_up, changed })
    }

    fn enter(&self, index: usize) -> Self::Thread<'_> {
        [self.looked_up.thread(index), self.changed.thread(index)]
    }

    #[inline]
    fn look_up(&self, [thread, _]: &Self::Thread<'_>, address: u64) -> u64 {
        let first = (self.areas.index(address) / 16 * 2) as usize;
        let [one, two] = [first, first + 1].map(|line| self.keys[line].0[0].load(Ordering::Relaxed));
        // Even numbers, all of them; but the lookup has to wait for them.
        self.looked_up.find(thread, address ^ ((one | two) & 1))
    }
}

impl Change for Lines {
    #[inline]
    fn erase_insert(&self, [_, thread]: &mut Self::Thread<'_>, start: u64) -> Result<(), Failure> {
        self.changed.erase_insert(thread, start)?;
        // Some other number each time, of which nobody reads more than the lowest bit.
        let area = self.areas.index(start) as usize;
        let key = &self.keys[area / 8].0[area % 8];
        key.store(key.load(Ordering::Relaxed).wrapping_add(2), Ordering::Relaxed);
        Ok(())
    }
}

/// The two common reader-writer locks; which of them is better depends on the machine and the load.
macro_rules! locked {
    ($lock:ty, $variant:literal) => {
        impl Lookup for $lock {
            const VARIANT: &'static str = $variant;
            type Thread<'a> = ();

            fn make(areas: Areas, _: usize) -> Result<Self, Failure> {
                Ok(Self::new(areas))
            }

            fn enter(&self, _: usize) {}

            #[inline]
            fn look_up(&self, (): &(), address: u64) -> u64 {
                btree::Locked::find(self, address).map_or(0, |(start, _)| start)
            }
        }

        impl Change for $lock {
            #[inline]
            fn erase_insert(&self, (): &mut (), start: u64) -> Result<(), Failure> {
                btree::Locked::erase_insert(self, start);
                Ok(())
            }
        }
    };
}

locked!(btree::Std, "RwLock<BTreeMap> (std)");
locked!(btree::ParkingLot, "RwLock<BTreeMap> (parking_lot)");

impl Lookup for memory_set::Set {
    const VARIANT: &'static str = "memory_set";
    type Thread<'a> = ();

    fn make(areas: Areas, _: usize) -> Result<Self, Failure> {
        Ok(memory_set::set(areas))
    }

    fn enter(&self, _: usize) {}

    #[inline]
    fn look_up(&self, (): &(), address: u64) -> u64 {
        memory_set::find(self, address).unwrap_or(0)
    }
}

impl Lookup for btree::Records {
    const VARIANT: &'static str = "RwLock<BTreeMap>, to records";
    type Thread<'a> = ();

    fn make(areas: Areas, _: usize) -> Result<Self, Failure> {
        Ok(Self::new(areas))
    }

    fn enter(&self, _: usize) {}

    #[inline]
    fn look_up(&self, (): &(), address: u64) -> u64 {
        self.find(address).unwrap_or(0)
    }
}

/// The cases of lookups.
struct Finds {
    /// One thread, in a map of records.
    records: CaseId,
    /// One thread, under either lock.
    locks: [CaseId; 2],
    locks_together: [CaseId; 2],
    alone: CaseId,
    to_records: CaseId,
    together: CaseId,
    /// Beside a thread that changes what [`BESIDE`] says.
    beside: [CaseId; 3],
    /// Lines alone, beside changes of others and of the same.
    lines: [CaseId; 2],
}

impl Finds {
    fn plan(plan: &mut Plan<'static>, areas: Areas, threads: usize) -> Self {
        plan.case(find_alone::<memory_set::Set>(Role::Baseline, areas));
        let locks = [
            plan.case(find_alone::<btree::Std>(Role::Baseline, areas)),
            plan.case(find_alone::<btree::ParkingLot>(Role::Baseline, areas)),
        ];
        let locks_together = [
            plan.case(find_together::<btree::Std>(Role::Baseline, areas, threads)),
            plan.case(find_together::<btree::ParkingLot>(Role::Baseline, areas, threads)),
        ];
        let records = plan.case(find_alone::<btree::Records>(Role::Baseline, areas));
        let to_records = plan.case(find_alone::<ToRecords>(Role::Terrane, areas));
        plan.set();
        let alone = plan.case(find_alone::<Mapped>(Role::Terrane, areas));
        let together = plan.case(find_together::<Mapped>(Role::Terrane, areas, threads));
        let beside = BESIDE.map(|(beside, _)| plan.case(find_beside::<Mapped>(Role::Terrane, areas, beside)));
        plan.set();
        plan.case(find_beside::<btree::ParkingLot>(Role::Baseline, areas, Beside::Random));
        for (beside, _) in BESIDE {
            plan.case(find_beside::<btree::Std>(Role::Baseline, areas, beside));
        }
        plan.set();
        let lines = [Beside::Other, Beside::Random]
            .map(|beside| plan.case(find_beside::<Lines>(Role::Baseline, areas, beside)));
        Self { lines, records, locks, locks_together, alone, to_records, together, beside }
    }

    fn compare(&self, results: &mut Results, areas: &str, threads: usize) {
        if let Some(best) = results.lowest(&self.locks) {
            let together =
                self.locks_together[self.locks.iter().position(|&id| best == id.into()).unwrap_or(0)];
            let name = format!("find, {areas} areas: time of Terrane / the faster RwLock<BTreeMap>");
            results.ratio(name, 1.0, self.alone, best, None);
            let name =
                format!("find, {areas} areas, RwLock<BTreeMap>: lookups/s of {threads} threads / of one");
            results.ratio(name, threads as f64, best, together, None);
        }
        let name = format!("find, {areas} areas, to records: time of Terrane / RwLock<BTreeMap>");
        results.ratio(name, 1.0, self.to_records, self.records, None);
        let name = format!("find, {areas} areas, Terrane: lookups/s of {threads} threads / of one");
        match threads {
            2 => results.asked(name, 2.0, self.alone, self.together, Asked::AtLeast(1.95)),
            _ => results.ratio(name, threads as f64, self.alone, self.together, None),
        }
        for (beside, (what, which)) in self.beside.into_iter().zip(BESIDE) {
            let name = format!("find, {areas} areas, Terrane: lookups/s beside changes of {which} / alone");
            match what {
                Beside::Other => results.ratio(name, 1.0, self.alone, beside, None),
                _ => {
                    results.asked(name.clone(), 1.0, self.alone, beside, Asked::AtLeast(0.95));
                    // The last one: of another index.
                    results.bound(&name, 1.0, self.alone, self.beside[2]);
                }
            }
        }
        // What the hardware leaves of the figure for random areas.
        let [apart, same] = self.lines;
        let name = format!(
            "find, {areas} areas, two lines and no index: lookups/s beside stores to them / to others"
        );
        results.ratio(name, 1.0, apart, same, None);
    }
}

/// Lookups of one thread: independent ones, which a processor may overlap as far as the code lets it, and a chain in
/// which each address depends on the last result.
fn find_alone<L: Lookup>(role: Role, areas: Areas) -> Case<'static> {
    Case::new(role, L::VARIANT, 1, format!("find, {} areas", areas.words()), "ns", move || {
        let map = L::make(areas, 1)?;
        Ok(move |time: Duration| {
            let independent = find::<L, false>(&map, 1, time / 2, areas)?;
            let chain = find::<L, true>(&map, 1, time / 2, areas)?;
            Ok(Sample { values: vec![independent, chain], counters: report::Counters::default() })
        })
    })
    .and(format!("find, {} areas, each after the result of the last", areas.words()), "ns")
}

fn find_together<L: Lookup>(role: Role, areas: Areas, threads: usize) -> Case<'static> {
    Case::new(role, L::VARIANT, threads, format!("find, {} areas", areas.words()), "ns", move || {
        let map = L::make(areas, threads)?;
        Ok(move |time| find::<L, false>(&map, threads, time, areas).map(Sample::from))
    })
}

/// What the thread beside a lookup changes.
#[derive(Clone, Copy, PartialEq)]
enum Beside {
    /// Any area that is looked up.
    Random,
    /// An area behind all that are looked up.
    Behind,
    /// Areas of another index: what remains is what the hardware shares.
    Other,
}

const BESIDE: [(Beside, &str); 3] =
    [(Beside::Random, "random areas"), (Beside::Behind, "one area behind"), (Beside::Other, "another index")];

/// Lookups beside a thread that changes areas.
fn find_beside<C: Change>(role: Role, areas: Areas, beside_what: Beside) -> Case<'static> {
    let which = BESIDE.iter().find(|(beside, _)| *beside == beside_what).map_or("", |(_, which)| which);
    let metric = format!("find, {} areas, beside a thread that changes {which}", areas.words());
    Case::new(role, C::VARIANT, 1, metric, "ns", move || {
        // The area behind is there for the churner alone.
        let map = C::make(Areas { count: areas.count + u64::from(beside_what == Beside::Behind) }, 2)?;
        let other = if beside_what == Beside::Other { Some(C::make(areas, 2)?) } else { None };
        Ok(move |time| {
            let mut numbers = Random::new(99);
            let changed = other.as_ref().unwrap_or(&map);
            let churn = || {
                let start = match beside_what {
                    Beside::Behind => areas.start(areas.count),
                    Beside::Random | Beside::Other => areas.any(&mut numbers),
                };
                changed.erase_insert(&mut changed.enter(1), start)
            };
            let (ns, _) = beside(1, 2, churn, || find::<C, false>(&map, 1, time, areas))?;
            Ok(Sample::from(ns))
        })
    })
}

/// Looks up random addresses on `threads` threads together; nanoseconds for each lookup of each thread.
///
/// In a `CHAIN` the next address depends on the last result, as the next instruction of a faulting program does.
fn find<L: Lookup, const CHAIN: bool>(
    map: &L,
    threads: usize,
    time: Duration,
    areas: Areas,
) -> Result<f64, Failure> {
    let times = together(
        threads,
        threads.max(2),
        |index| Ok((map.enter(index), Random::new(index as u64))),
        |_, (thread, mut random)| {
            let mut last = 0;
            Ok(per_op(time, |n| {
                for _ in 0..n {
                    let address = areas.hit(&mut random) ^ if CHAIN { last & 1 } else { 0 };
                    last = black_box(map.look_up(&thread, address));
                }
            }))
        },
    )?;
    Ok(times.iter().sum::<f64>() / times.len() as f64)
}

/// The cases of changes.
struct Changes {
    btree: CaseId,
    terrane: CaseId,
    /// Each thread in its own areas: one, and all.
    own: [CaseId; 2],
}

impl Changes {
    /// Plans changes of random areas.
    fn plan(plan: &mut Plan<'static>, areas: Areas, threads: usize) -> Self {
        let metric = format!("erase + insert, {} areas", areas.words());
        plan.case(Case::new(Role::Baseline, "memory_set", 1, &metric, "ns", move || {
            let mut set = memory_set::set(areas);
            Ok(move |time| {
                change(time, areas, |start| {
                    memory_set::unmap_map(&mut set, start);
                    Ok(())
                })
            })
        }));
        let btree = plan.case(Case::new(Role::Baseline, "BTreeMap", 1, &metric, "ns", move || {
            let mut map = btree::map(areas);
            Ok(move |time| {
                change(time, areas, |start| {
                    btree::erase_insert(&mut map, start);
                    Ok(())
                })
            })
        }));
        let terrane = plan.case(Case::new(Role::Terrane, "Terrane", 1, &metric, "ns", move || {
            let map = Mapped::new(areas, 1)?;
            Ok(move |time| {
                let mut thread = map.thread(0);
                change(time, areas, |start| map.erase_insert(&mut thread, start))
            })
        }));
        plan.case(change_own::<btree::ParkingLot>(Role::Baseline, areas, threads, threads));
        let own = [1, threads]
            .map(|working| plan.case(change_own::<Mapped>(Role::Terrane, areas, working, threads)));
        Self { btree, terrane, own }
    }

    fn compare(&self, results: &mut Results, areas: &str, threads: usize, most: f64) {
        let name = format!("erase + insert, {areas} areas: time of Terrane / BTreeMap");
        results.asked(name, 1.0, self.terrane, self.btree, Asked::AtMost(most));
        let name = format!(
            "erase + insert, {areas} areas, Terrane: changes/s of {threads} threads in own areas / of one"
        );
        results.ratio(name, threads as f64, self.own[0], self.own[1], None);
    }
}

/// Changes of `working` threads, each among its part of the areas of one map: one of `threads` parts.
fn change_own<C: Change>(role: Role, areas: Areas, working: usize, threads: usize) -> Case<'static> {
    let metric = format!("erase + insert, {} areas, each thread in its own", areas.words());
    Case::new(role, C::VARIANT, working, metric, "ns", move || {
        let map = C::make(areas, threads)?;
        let part = areas.count / threads as u64;
        Ok(move |time| {
            let times = together(
                working,
                threads.max(2),
                |index| Ok((map.enter(index), Random::new(index as u64), index as u64 * part)),
                |_, (mut thread, mut random, first)| {
                    let mut result = Ok(());
                    let ns = per_op(time, |n| {
                        for _ in 0..n {
                            let start = areas.start(first + (random.next() >> 40) % part);
                            if let Err(failure) = map.erase_insert(&mut thread, start) {
                                result = Err(failure);
                            }
                        }
                    });
                    result.map(|()| ns)
                },
            )?;
            Ok(Sample::from(times.iter().sum::<f64>() / times.len() as f64))
        })
    })
}

/// Changes random areas; nanoseconds for each change.
fn change(
    time: Duration,
    areas: Areas,
    mut change: impl FnMut(u64) -> Result<(), Failure>,
) -> Result<Sample, Failure> {
    let mut random = Random::new(5);
    let mut result = Ok(());
    let ns = per_op(time, |n| {
        for _ in 0..n {
            if let Err(failure) = change(areas.any(&mut random)) {
                result = Err(failure);
            }
        }
    });
    result.map(|()| Sample::from(ns))
}

/// Plans searches; returns the linear one's and Terrane's.
fn plan_searches(plan: &mut Plan<'static>, areas: Areas) -> [CaseId; 2] {
    let metric = format!("search, {} areas", areas.words());
    plan.case(Case::new(Role::Baseline, "memory_set", 1, &metric, "ns", move || {
        let set = memory_set::set(areas);
        Ok(move |time| Ok(search(time, || memory_set::search(&set, black_box(WANTED), areas.limits()))))
    }));
    let linear = plan.case(Case::new(Role::Baseline, "BTreeMap, linear", 1, &metric, "ns", move || {
        let map = btree::map(areas);
        Ok(move |time| Ok(search(time, || btree::search(&map, black_box(WANTED), areas.limits()))))
    }));
    let terrane = plan.case(Case::new(Role::Terrane, "Terrane", 1, &metric, "ns", move || {
        let map = Mapped::new(areas, 1)?;
        Ok(move |time| {
            let thread = map.thread(0);
            Ok(search(time, || map.search(&thread, black_box(WANTED))))
        })
    }));
    [linear, terrane]
}

/// Searches for free space; nanoseconds for each search.
fn search(time: Duration, mut search: impl FnMut() -> Option<u64>) -> Sample {
    Sample::from(per_op(time, |n| {
        for _ in 0..n {
            black_box(search());
        }
    }))
}
