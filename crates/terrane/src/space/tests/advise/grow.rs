//! Stacks that grow.

use super::super::races::Stage;
use super::*;
use crate::vma::MapFlags;
use std::thread;

/// Maps a stack at pages `first..first + count`.
fn stack(b: &Bench, space: &Space, first: u64, count: u64, prot: Prot) -> u64 {
    let request = MapRequest::anonymous(count * PAGE_SIZE, prot).with(MapFlags::GROWSDOWN);
    space.map(&b.cpu, request.fixed(page(first))).unwrap()
}

#[test]
fn a_fault_below_a_stack_lets_it_grow() {
    both(|b, config| {
        let space = b.space(config);
        stack(b, &space, 3000, 2, RW);
        b.store(&space, page(2999), 7).unwrap();
        assert_eq!(listing(b, &space), [(2999, 3002)]);
        assert_eq!(b.load(&space, page(2900)), Ok(0));
        assert_eq!((listing(b, &space), b.load(&space, page(2999))), (Vec::from([(2900, 3002)]), Ok(7)));
        assert_eq!(space.mapped_bytes(), 102 * PAGE_SIZE);
        // The guard gap to what may be accessed: 256 pages behind its end.
        memory(b, &space, 2000, 1);
        assert_eq!(b.load(&space, page(2256)), Err(FaultError::NotMapped));
        assert_eq!(b.load(&space, page(2257)), Ok(0));
        // To what nobody may access there is none.
        space.protect(&b.cpu, page(2000), PAGE_SIZE, Prot::empty()).unwrap();
        assert_eq!(b.load(&space, page(2001)), Ok(0));
        assert_eq!(b.load(&space, page(1999)), Err(FaultError::NotMapped));
        assert_eq!(listing(b, &space), [(2000, 2001), (2001, 3002)]);
        // Calls do not let it grow.
        space.unmap(&b.cpu, page(2000), 2 * PAGE_SIZE).unwrap();
        let populated = space.advise(&b.cpu, page(2000), PAGE_SIZE, Advice::PopulateRead);
        assert_eq!(populated, Err(Error::NoMemory));
        assert_eq!(space.mlock(&b.cpu, page(2000), PAGE_SIZE), Err(Error::NoMemory));
        assert_eq!(listing(b, &space), [(2002, 3002)]);
    });
}

#[test]
fn stacks_do_not_keep_away_from_stacks_and_grow_before_they_refuse() {
    both(|b, config| {
        let space = b.space(config);
        stack(b, &space, 3000, 2, Prot::READ);
        assert_eq!(b.store(&space, page(2999), 1), Err(FaultError::NotAllowed));
        assert_eq!(listing(b, &space), [(2999, 3002)]);
        stack(b, &space, 2900, 2, RW);
        assert_eq!(b.load(&space, page(2990)), Ok(0));
        assert_eq!(b.load(&space, page(2902)), Ok(0));
        assert_eq!(listing(b, &space), [(2900, 2902), (2902, 3002)]);
        // A mapping that is no stack does not grow.
        memory(b, &space, 5000, 1);
        assert_eq!(b.load(&space, page(4999)), Err(FaultError::NotMapped));
    });
}

#[test]
fn limits_of_stacks() {
    both(|b, config| {
        let (stack_limit, memlock_limit) = (Some(2048 * PAGE_SIZE), Some(8 * PAGE_SIZE));
        let space = b.space(SpaceConfig { stack_limit, memlock_limit, ..config });
        let end = stack(b, &space, 3000, 2, RW) + 2 * PAGE_SIZE;
        assert_eq!(b.load(&space, end - 2048 * PAGE_SIZE), Ok(0));
        assert_eq!(b.load(&space, end - 2049 * PAGE_SIZE), Err(FaultError::NotMapped));
        stack(b, &space, 6000, 2, RW);
        space.mlock(&b.cpu, page(6000), 2 * PAGE_SIZE).unwrap();
        assert_eq!(b.load(&space, page(5995)), Ok(0));
        assert_eq!(space.locked_bytes(), 7 * PAGE_SIZE);
        assert_eq!(
            space.resident_pages(&b.cpu),
            2,
            "of the grown part only what was touched, and that reads zeros"
        );
        assert_eq!(b.load(&space, page(5993)), Err(FaultError::NotMapped));
        let space = b.space(SpaceConfig { address_limit: Some(10 * PAGE_SIZE), ..config });
        stack(b, &space, 3000, 2, RW);
        assert_eq!(b.load(&space, page(2991)), Err(FaultError::NotMapped));
        assert_eq!(b.load(&space, page(2992)), Ok(0));
        // The lowest address.
        let space = b.space(config);
        let low = config.range.start + 2 * PAGE_SIZE;
        let request = MapRequest::anonymous(PAGE_SIZE, RW).with(MapFlags::GROWSDOWN);
        space.map(&b.cpu, request.fixed(low)).unwrap();
        assert_eq!(b.load(&space, config.range.start - PAGE_SIZE), Err(FaultError::NotMapped));
        assert_eq!(b.load(&space, config.range.start), Ok(0));
    });
}

/// Threads that touch one stack ever further down while others map and unmap below it, fixed and wherever there is room:
/// it stays one mapping, nothing that is stored is lost, and nothing is found mapped twice.
#[test]
fn stacks_grow_among_faults_and_calls() {
    for locking in [Locking::Speculative, Locking::Classic] {
        let bench = Bench::on(TestHost::with_tickets(1, 4000), 12);
        let config = SpaceConfig { map_top: page(5000), ..SpaceConfig::with_locking(locking) };
        let space = bench.space(config);
        let stage = Stage::new();
        stack(&bench, &space, 4000, 2, RW);
        thread::scope(|scope| {
            for number in 0..2 {
                let (mut me, space) = (stage.worker(&bench, number + 3), &space);
                scope.spawn(move || {
                    let mut depth = 0;
                    while me.goes_on() && depth < 500 {
                        depth += me.random.below(4);
                        let at = page(4000 - depth) + 8 * number;
                        me.store(space, at, depth + 1).unwrap();
                        let seen = page(4000 - me.random.below(depth + 1)) + 8 * number;
                        let found = me.load(space, seen).unwrap();
                        assert!(found == 0 || page(4001 - found) == seen - 8 * number);
                    }
                });
            }
            let (mut me, space) = (stage.worker(&bench, 9), &space);
            scope.spawn(move || {
                while me.goes_on() {
                    // Within the guard gap of where the stack may come to be, and beyond.
                    let at = page(2800 + me.random.below(440));
                    let request = MapRequest::anonymous(PAGE_SIZE, RW);
                    space.map(&me.cpu, request.fixed(at)).unwrap();
                    me.store(space, at, 1).unwrap();
                    space.unmap(&me.cpu, at, PAGE_SIZE).unwrap();
                    let other = space.map_anonymous(&me.cpu, PAGE_SIZE).unwrap();
                    space.unmap(&me.cpu, other, PAGE_SIZE).unwrap();
                }
            });
        });
        let found = listing(&bench, &space);
        assert!(found.len() == 1 && found[0].0 >= 3500 - 4 && found[0].1 == 4002, "{found:?}");
        space.destroy(&bench.cpu);
        bench.assert_nothing_left();
    }
}
