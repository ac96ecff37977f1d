//! Protection that stores take away by themselves, and who asks what was stored to.

use super::*;
use crate::space::tests::model::Random;
use std::collections::BTreeSet;

fn all_written(bench: &Bench, space: &Space, at: u64, pages: u64, protect: bool) -> BTreeSet<u64> {
    let mut found = [AddrRange::new(0, 0); 3];
    let mut set = BTreeSet::new();
    let (mut next, end) = (at, at + pages * P);
    while next < end {
        let (count, reached) = space.written(&bench.cpu, next, end - next, protect, &mut found).unwrap();
        for range in &found[..count] {
            set.extend((range.start..range.end).step_by(P as usize).map(|addr| (addr - at) / P));
        }
        assert!(reached > next);
        next = reached;
    }
    set
}

#[test]
fn stores_take_the_protection_away() {
    let bench = Bench::new(512);
    let space = &bench.space(SpaceConfig::default());
    let cpu = &bench.cpu;
    let faults = &space.user_faults(cpu, UserFeatures::WP_ASYNC).unwrap();
    let file = Object::file(&bench.machine, TestFile::new(&[1; 20 * 4096])).unwrap();
    let file_at = |shared| space.map(cpu, MapRequest::object(&file, 0, 16 * P, RW, shared)).unwrap();
    let mut random = Random::new(1);
    // As in Linux any memory will do, in this mode alone.
    let (private, mapped) = (file_at(false), file_at(true));
    assert_eq!(faults.register(cpu, mapped, P, MISSING | WP), Err(Error::Invalid));
    assert_eq!(handler(&bench, space).register(cpu, mapped, P, WP), Err(Error::Invalid));
    for at in [map(&bench, space, 16, RW), map_shared(&bench, space, 16), private, mapped] {
        faults.register(cpu, at, 16 * P, WP).unwrap();
        faults.write_protect(cpu, at, 16 * P, true, PLAIN).unwrap();
        for _ in 0..20 {
            let stored: BTreeSet<u64> = (0..random.below(9)).map(|_| random.below(16)).collect();
            let _ = bench.load(space, at + random.below(16) * P).unwrap();
            stored.iter().for_each(|page| bench.store(space, at + page * P, 7).unwrap());
            assert_eq!(all_written(&bench, space, at, 16, false), stored);
            assert_eq!(all_written(&bench, space, at, 16, true), stored);
        }
        assert!(all_written(&bench, space, at, 16, true).is_empty());
        // Once more without a page: what is not there is remembered.
        space.advise(cpu, at, 4 * P, Advice::DontNeed).unwrap();
        faults.unregister(cpu, at, 16 * P).unwrap();
        bench.store(space, at + P, 1).unwrap();
        assert!(all_written(&bench, space, at, 16, false).is_empty(), "not registered any more");
    }
    assert_eq!(faults.try_read_events(&mut [none()]), Err(Error::Again));
    assert_eq!(space.written(cpu, 1, P, false, &mut []), Err(Error::Invalid));
}

#[test]
fn no_store_is_missed_beside_a_scan() {
    let bench = Bench::new(512);
    let space = &bench.space(SpaceConfig::default());
    let faults = &space.user_faults(&bench.cpu, UserFeatures::WP_ASYNC).unwrap();
    let at = map(&bench, space, 8, RW);
    faults.register(&bench.cpu, at, 8 * P, WP).unwrap();
    // The copy that a scan keeps up to date, as a migration does.
    let mut copy = [0; 8];
    let update = |copy: &mut [u64; 8]| {
        for page in all_written(&bench, space, at, 8, true) {
            copy[page as usize] = bench.load(space, at + page * P).unwrap();
        }
    };
    thread::scope(|scope| {
        let machine = &bench.machine;
        let writer = scope.spawn(move || {
            let cpu = Cpu::try_new(machine).unwrap();
            let mut random = Random::new(2);
            for n in 1..4000 {
                store(&cpu, space, at + random.below(8) * P, n).unwrap();
            }
        });
        while !writer.is_finished() {
            update(&mut copy);
        }
    });
    update(&mut copy);
    for (page, &value) in copy.iter().enumerate() {
        assert_eq!(bench.load(space, at + page as u64 * P), Ok(value));
    }
}
