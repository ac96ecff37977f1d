//! Readers beside a writer.

use super::*;
use core::sync::atomic::AtomicBool;
use std::thread;
use std::vec::Vec;

const P: u64 = PAGE_SIZE;
/// Stable entries lie every this many pages, one page long; everything between them is the writer's.
const STRIDE: u64 = 16;

/// A writer changes everything around `count` entries that never change; the readers must find these at any moment,
/// and never anything that has been freed.
fn churn<const N: usize, const F: usize>(seed: u64, count: u64, rounds: usize) {
    let epoch = Epoch::try_new(3).unwrap();
    let index = Index::<Record, N, F>::try_new(AddrRange::new(0, count * STRIDE * P), true).unwrap();
    let done = AtomicBool::new(false);
    let mut reserve = Reserve::new();
    let writer = epoch.register().unwrap();
    for nth in 0..count {
        let pin = writer.pin();
        index.reserve(&mut reserve, 1).unwrap();
        let start = nth * STRIDE * P;
        index.insert(&mut reserve, &pin, AddrRange::new(start, start + P), Record::leak(start, start + P, 0));
    }
    thread::scope(|scope| {
        for reader in 0..2 {
            let (epoch, index, done) = (&epoch, &index, &done);
            scope.spawn(move || {
                let cpu = epoch.register().unwrap();
                let mut random = Random(seed + 100 + reader);
                let mut found = 0u64;
                while !done.load(Ordering::Relaxed) {
                    let pin = cpu.pin();
                    for _ in 0..4 {
                        let start = random.below(count) * STRIDE * P;
                        let addr = start + random.below(P);
                        let record = index.find(&pin, addr).expect("a stable entry was missed");
                        assert_eq!(record.range(), (start, start + P));
                        let addr = random.below(count * STRIDE * P);
                        if let Some(record) = index.find(&pin, addr) {
                            found += 1;
                            assert_ne!(record.start(), POISON, "freed under a pin");
                            assert_ne!(record.end(), POISON, "freed under a pin");
                        }
                    }
                }
                assert!(found > 0);
            });
        }
        write(&index, &mut reserve, &writer, seed, count, rounds);
        done.store(true, Ordering::Relaxed);
    });
    check(&index);
}

/// Fills and empties the space between the stable entries, in stretches, so that leaves split, merge and are swallowed.
fn write<const N: usize, const F: usize>(
    index: &Index<Record, N, F>,
    reserve: &mut Reserve<Record, N, F>,
    writer: &Participant<'_>,
    seed: u64,
    count: u64,
    rounds: usize,
) {
    let mut random = Random(seed);
    let mut live: Vec<Vec<NonNull<Record>>> = (0..count).map(|_| Vec::new()).collect();
    for _ in 0..rounds {
        let first = random.below(count);
        for nth in first..(first + 1 + random.below(12)).min(count) {
            let pin = writer.pin();
            let base = nth * STRIDE;
            let mine = &mut live[nth as usize];
            if mine.is_empty() {
                let each = 1 + random.below(3);
                for page in (base + 1..base + STRIDE).step_by(each as usize) {
                    index.reserve(reserve, 1).unwrap();
                    let record = Record::leak(page * P, (page + 1) * P, 0);
                    index.insert(reserve, &pin, AddrRange::new(page * P, (page + 1) * P), record);
                    mine.push(record);
                }
            } else if mine.len() > 1 {
                // All but one go; that one takes their place as far as it can.
                let keep = mine.swap_remove(random.below(mine.len() as u64) as usize);
                for record in mine.drain(..) {
                    index.reserve(reserve, 0).unwrap();
                    // SAFETY: in the index, so alive.
                    let taken = remove(index, reserve, &pin, unsafe { record.as_ref() }.start());
                    assert_eq!(taken, Some(record));
                    retire(&pin, record, true);
                }
                // SAFETY: as above.
                let record = unsafe { keep.as_ref() };
                let (start, end) = record.range();
                if end < (base + STRIDE) * P {
                    assert!(index.extend_up(reserve, &pin, end, (base + STRIDE) * P, |record| {
                        record.end.store((base + STRIDE) * P, Ordering::Relaxed);
                        true
                    }));
                }
                if start > (base + 1) * P {
                    assert!(index.extend_down(reserve, &pin, start, (base + 1) * P, |record| {
                        record.start.store((base + 1) * P, Ordering::Relaxed);
                        true
                    }));
                }
                mine.push(keep);
            } else if let Some(record) = mine.pop() {
                index.reserve(reserve, 0).unwrap();
                // SAFETY: as above.
                let taken = remove(index, reserve, &pin, unsafe { record.as_ref() }.start());
                assert_eq!(taken, Some(record));
                retire(&pin, record, true);
            }
            drop(pin);
            writer.collect();
        }
    }
}

#[test]
fn stable_entries_are_never_missed_in_small_nodes() {
    churn::<4, 4>(1, 40, 1500);
    churn::<4, 4>(2, 400, 1500);
}

#[test]
fn stable_entries_are_never_missed_in_real_nodes() {
    churn::<{ super::super::LEAF_SLOTS }, { super::super::FANOUT }>(3, 2000, 2500);
}
