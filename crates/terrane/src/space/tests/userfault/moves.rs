//! Pages that a handler moves.

use super::*;

#[test]
fn pages_move_without_being_copied() {
    let bench = Bench::new(512);
    let space = &bench.space(SpaceConfig::default());
    let cpu = &bench.cpu;
    let faults = &handler(&bench, space);
    let to = map(&bench, space, 64, RW);
    space.protect(cpu, to + 40 * P, P, Prot::READ).unwrap();
    let from = space.map(cpu, MapRequest::anonymous(64 * P, RW).fixed(to - 128 * P)).unwrap();
    let go = |to, from, pages: u64, how| faults.move_pages(cpu, to, from, pages * P, how);
    assert_eq!(go(to, from, 1, PLAIN), failed(Error::Invalid), "not registered");
    faults.register(cpu, to, 64 * P, MISSING).unwrap();
    assert_eq!(go(to + 1, from, 1, PLAIN), failed(Error::Invalid));
    assert_eq!(go(to, from + 1, 1, PLAIN), failed(Error::Invalid));
    assert_eq!(go(to, from, 0, PLAIN), failed(Error::Invalid));
    assert_eq!(go(to, from, 1, Resolve::WP), failed(Error::Invalid));
    assert_eq!(go(to, from, 41, PLAIN), failed(Error::Invalid), "not in one mapping");
    assert_eq!(go(to + 40 * P, from, 1, PLAIN), failed(Error::Invalid), "not the same protection");
    assert_eq!(go(to, from + 80 * P, 1, PLAIN), failed(Error::NotFound), "nothing mapped");
    let shared = map_shared(&bench, space, 1);
    assert_eq!(go(to, shared, 1, PLAIN), failed(Error::Invalid));
    assert_eq!(go(to, from, 1, PLAIN), failed(Error::NotFound), "no page");
    assert_eq!(go(to, from, 1, Resolve::ALLOW_SOURCE_HOLES), Ok(()));
    for page in 0..40 {
        bench.store(space, from + page * P, 100 + page).unwrap();
    }
    let frame = space.translate(cpu, from + 3 * P, Access::Read).unwrap().frame;
    go(to, from, 40, PLAIN).unwrap();
    for page in 0..40 {
        assert_eq!(bench.load(space, to + page * P), Ok(100 + page));
        assert!(space.translate(cpu, from + page * P, Access::Read).is_none());
    }
    assert_eq!(space.translate(cpu, to + 3 * P, Access::Read).unwrap().frame, frame);
    // The reverse mapping finds it where it is.
    let mut found = Vec::new();
    assert!(crate::rmap::walk::for_each_mapping(cpu, frame, |_, _, addr, _| found.push(addr)));
    assert_eq!(found, [to + 3 * P]);
    // What is there already, and what others map too.
    bench.store(space, from, 1).unwrap();
    assert_eq!(go(to, from, 1, PLAIN), failed(Error::Exists));
    bench.store(space, from + 41 * P, 2).unwrap();
    bench.store(space, from + 42 * P, 3).unwrap();
    bench.load(space, from + 43 * P).unwrap();
    assert_eq!(go(to + 41 * P, from + 41 * P, 4, PLAIN), partly(3), "the page of zeros moves, too");
    assert_eq!(bench.load(space, to + 43 * P), Ok(0));
    let child = space.fork(cpu).unwrap();
    assert_eq!(go(to + 50 * P, from, 1, PLAIN), failed(Error::Busy));
    assert_eq!(bench.load(space, from), Ok(1));
    child.destroy(cpu);
    assert_eq!(go(to + 50 * P, from, 1, PLAIN), Ok(()));
    // A fault that waits is woken.
    bench.store(space, from + P, 77).unwrap();
    let seen = beside(
        &bench,
        |cpu| load(cpu, space, to + 60 * P),
        || {
            let event = next(faults, cpu);
            go(event.addr, from + P, 1, PLAIN).unwrap();
        },
    );
    assert_eq!(seen, Ok(77));
}
