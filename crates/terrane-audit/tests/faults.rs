//! Two processors that fault in one VMA, in different page tables, write no line in common.
#![cfg(terrane_watch)]

mod stage;

use stage::*;
use terrane::stats::Counter;

/// Faults of one processor in one round.
const FAULTS: u64 = 128;

/// Nothing at all is shared: no line that both write, nor one that one of them writes and the other reads.
const NONE: &[Exception] = &[];

/// Read by faults that shoot down.
const FILTER: Exception = Exception {
    field: "tlb.lanes[].filter",
    in_a_hundred: 4,
    why: "a copy shoots its page down, and reads who may hold it; a processor writes that when it comes to 2 MiB new to it",
};

fn stores(cpu: &mut Cpu, at: u64) {
    for page in 0..FAULTS {
        cpu.store_u64(at + page * PAGE, page).unwrap();
    }
}

fn loads(cpu: &mut Cpu, at: u64) {
    for page in 0..FAULTS {
        cpu.load_u64(at + page * PAGE).unwrap();
    }
}

/// A table for the area; faults that make tables are audited by themselves.
fn with_table(cpu: &mut Cpu, _: &Space, at: u64) {
    cpu.load_u64(at + TABLE - PAGE).unwrap();
}

fn private_memory() -> Stage {
    let stage = Stage::new(SpaceConfig::default());
    stage.space.map(stage.cpus[0].core(), MapRequest::anonymous(LENGTH, RW).fixed(BASE)).unwrap();
    stage
}

/// A file of all areas, in memory, mapped.
fn file(shared: bool, prot: Prot, config: SpaceConfig) -> (Stage, tempfile::NamedTempFile) {
    let stage = Stage::new(config);
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(LENGTH).unwrap();
    let object = stage.machine.open(file.path(), true).unwrap();
    let cpu = stage.cpus[0].core();
    let request = |at| MapRequest::object(&object, 0, LENGTH, prot, shared).fixed(at);
    // Read in through another mapping, so that faults find the pages.
    let other = stage.space.map(cpu, request(BASE + (1 << 37))).unwrap();
    for k in 0..2 {
        for round in 0..=ROUNDS {
            let at = other + (area(k, round) - BASE);
            stage.space.advise(cpu, at, (FAULTS + 16) * PAGE, Advice::PopulateRead).unwrap();
            stage.space.advise(cpu, at + TABLE - PAGE, PAGE, Advice::PopulateRead).unwrap();
        }
    }
    stage.space.map(cpu, request(BASE)).unwrap();
    (stage, file)
}

fn assert_apart(result: Result<(), String>) {
    if let Err(shared) = result {
        panic!("lines in common:\n{shared}");
    }
}

#[test]
fn first_touch() {
    assert_apart(private_memory().audit(FAULTS, NONE, with_table, |cpu, _, at| stores(cpu, at)));
}

#[test]
fn reading_zeros() {
    assert_apart(private_memory().audit(FAULTS, NONE, with_table, |cpu, _, at| loads(cpu, at)));
}

#[test]
fn copying_zeros() {
    let prepare = |cpu: &mut Cpu, space: &Space, at| {
        with_table(cpu, space, at);
        loads(cpu, at);
    };
    assert_apart(private_memory().audit(FAULTS, NONE, prepare, |cpu, _, at| stores(cpu, at)));
}

#[test]
fn reading_a_file() {
    // Page by page, then with the pages around.
    for around in [PAGE, SpaceConfig::default().fault_around] {
        let mut config = SpaceConfig::default();
        config.fault_around = around;
        for shared in [false, true] {
            let (mut stage, _file) = file(shared, RW, config);
            assert_apart(stage.audit(FAULTS, NONE, with_table, |cpu, _, at| loads(cpu, at)));
        }
    }
}

#[test]
fn writing_a_shared_file() {
    let (mut stage, _file) = file(true, RW, SpaceConfig::default());
    assert_apart(stage.audit(FAULTS, NONE, with_table, |cpu, _, at| stores(cpu, at)));
}

#[test]
fn copying_a_file() {
    // At once, and after a load.
    let (mut stage, _file) = file(false, RW, SpaceConfig::default());
    assert_apart(stage.audit(FAULTS, NONE, with_table, |cpu, _, at| stores(cpu, at)));
    let (mut stage, _file) = file(false, RW, SpaceConfig::default());
    let prepare = |cpu: &mut Cpu, space: &Space, at| {
        with_table(cpu, space, at);
        loads(cpu, at);
    };
    assert_apart(stage.audit(FAULTS, NONE, prepare, |cpu, _, at| stores(cpu, at)));
}

#[test]
fn copying_after_a_fork() {
    let mut stage = private_memory();
    for k in 0..2 {
        for round in 0..=ROUNDS {
            with_table(&mut stage.cpus[k], &stage.space, area(k, round));
            stores(&mut stage.cpus[k], area(k, round));
        }
    }
    let child = stage.space.fork(stage.cpus[0].core()).unwrap();
    assert_apart(stage.audit(FAULTS, &[FILTER], |_, _, _| (), |cpu, _, at| stores(cpu, at)));
    // The last sharer takes the page without a copy.
    drop(child);
}

#[test]
fn taking_over_after_a_fork() {
    let mut stage = private_memory();
    for k in 0..2 {
        for round in 0..=ROUNDS {
            with_table(&mut stage.cpus[k], &stage.space, area(k, round));
            stores(&mut stage.cpus[k], area(k, round));
        }
    }
    drop(stage.space.fork(stage.cpus[0].core()).unwrap());
    assert_apart(stage.audit(FAULTS, NONE, |_, _, _| (), |cpu, _, at| stores(cpu, at)));
}

#[test]
fn shared_memory() {
    let stage = || {
        let stage = Stage::new(SpaceConfig::default());
        stage.space.map(stage.cpus[0].core(), MapRequest::shared_anonymous(LENGTH, RW).fixed(BASE)).unwrap();
        stage
    };
    assert_apart(stage().audit(FAULTS, NONE, with_table, |cpu, _, at| stores(cpu, at)));
}

#[test]
fn populating() {
    for advice in [Advice::PopulateRead, Advice::PopulateWrite] {
        let act = |cpu: &mut Cpu, space: &Space, at| {
            space.advise(cpu.core(), at, FAULTS * PAGE, advice).unwrap();
        };
        assert_apart(private_memory().audit(FAULTS, NONE, with_table, act));
        let (mut stage, _file) = file(advice == Advice::PopulateWrite, RW, SpaceConfig::default());
        assert_apart(stage.audit(FAULTS, NONE, with_table, act));
    }
}

/// Huge pages come from the pool, each under its lock.
const BLOCKS: [Exception; 1] = [Exception {
    field: "machine.frames.pool",
    in_a_hundred: 200,
    why: "a huge page is 512 frames at once, which no cache of a CPU holds: they come from the pool, under its lock",
}];

fn huge_memory() -> Stage {
    let stage = private_memory();
    stage.space.advise(stage.cpus[0].core(), BASE, LENGTH, Advice::HugePage).unwrap();
    stage
}

/// Four huge pages in each area.
fn huge_stores(cpu: &mut Cpu, _: &Space, at: u64) {
    (0..4).for_each(|block| cpu.store_u64(at + block * TABLE + 5 * PAGE, 1).unwrap());
}

#[test]
fn first_touch_of_huge_pages() {
    let mut stage = huge_memory();
    assert_apart(stage.audit(4, &BLOCKS, |_, _, _| (), huge_stores));
    let made = stage.machine.machine().stats().sum(Counter::ThpFaultAlloc);
    assert_eq!(made, 2 * 4 * (ROUNDS + 1));
}

/// Huge pages are divided when one of several sharers writes; the page written is copied.
#[test]
fn copying_of_huge_pages_after_a_fork() {
    let mut stage = huge_memory();
    for k in 0..2 {
        (0..=ROUNDS).for_each(|round| huge_stores(&mut stage.cpus[k], &stage.space, area(k, round)));
    }
    let child = stage.space.fork(stage.cpus[0].core()).unwrap();
    let act = |cpu: &mut Cpu, _: &Space, at: u64| {
        (0..FAULTS).for_each(|page| cpu.store_u64(at + page * 16 * PAGE, 1).unwrap())
    };
    let exceptions = [BLOCKS[0], FILTER];
    assert_apart(stage.audit(FAULTS, &exceptions, |_, _, _| (), act));
    drop(child);
}

#[test]
fn taking_over_huge_pages_after_a_fork() {
    let mut stage = huge_memory();
    for k in 0..2 {
        (0..=ROUNDS).for_each(|round| huge_stores(&mut stage.cpus[k], &stage.space, area(k, round)));
    }
    drop(stage.space.fork(stage.cpus[0].core()).unwrap());
    assert_apart(stage.audit(4, NONE, |_, _, _| (), huge_stores));
}

/// With empty caches, frames come from the pool, 64 at a time.
#[test]
fn filling_caches_from_the_pool() {
    const PAGES: u64 = 1500;
    let exceptions = [Exception {
        field: "machine.frames.pool",
        in_a_hundred: 4,
        why: "frames come from the pool 64 at a time, under its lock: two writes (lock, unlock) in 64 faults",
    }];
    let act = |cpu: &mut Cpu, _: &Space, at| {
        for page in 0..PAGES {
            cpu.store_u64(at + page * PAGE, page).unwrap();
        }
    };
    let tables = |cpu: &mut Cpu, _: &Space, at| {
        for table in 0..3 {
            cpu.load_u64(at + (table + 1) * TABLE - PAGE).unwrap();
        }
    };
    assert_apart(private_memory().audit(PAGES, &exceptions, tables, act));
}

/// Touches two thousand pages on the first processor and lets the second one forget those that `takes` picks.
fn hand_over(stage: &mut Stage, takes: impl Fn(u64) -> bool) {
    let at = BASE + LENGTH;
    stage.warm_up();
    let [a, b] = &mut stage.cpus;
    stage.space.map(a.core(), MapRequest::anonymous(AREA, RW).fixed(at)).unwrap();
    (0..800).for_each(|page| a.store_u64(at + page * PAGE, page).unwrap());
    for page in (0..800).filter(|page| takes(*page)) {
        stage.space.advise(b.core(), at + page * PAGE, PAGE, Advice::DontNeed).unwrap();
    }
    stage.space.unmap(a.core(), at, AREA).unwrap();
}

/// Two frames share a line of metadata. They come from the pool in pairs and go back in pairs, and a processor that frees
/// what another touched takes over pairs, unless it picks single pages.
#[test]
fn frames_that_change_hands() {
    let round = |cpu: &mut Cpu, _: &Space, at: u64| stores(cpu, at);
    let tables = |cpu: &mut Cpu, space: &Space, at: u64| with_table(cpu, space, at);
    let mut stage = private_memory();
    hand_over(&mut stage, |page| page < 400);
    assert_apart(stage.audit(FAULTS, NONE, tables, round));
    let mut stage = private_memory();
    hand_over(&mut stage, |page| page % 2 == 0);
    let exceptions = [Exception {
        field: "machine.frames.metas",
        in_a_hundred: 1000,
        why: "single frames that were freed by another processor than their neighbours",
    }];
    assert_apart(stage.audit(FAULTS, &exceptions, tables, round));
}

/// Eight upper entries share a line: processors that make tables within 16 MiB of one another meet there, once for 512
/// pages each.
#[test]
fn making_page_tables_side_by_side() {
    let mut stage = private_memory();
    let exceptions = [Exception {
        field: "space.page_table.table of level 2",
        in_a_hundred: 200,
        why: "the upper entry that is taken and published is where the processor looks for it",
    }];
    // The second processor's area begins one table behind the first one's.
    let base = BASE + LENGTH;
    stage.space.map(stage.cpus[0].core(), MapRequest::anonymous(AREA, RW).fixed(base)).unwrap();
    let act = |cpu: &mut Cpu, _: &Space, at| {
        let (k, round) = ((at - BASE) / AREA / (ROUNDS + 1), (at - BASE) / AREA % (ROUNDS + 1));
        cpu.store_u64(base + (2 * round + k) * TABLE, 1).unwrap();
    };
    let shared = stage.audit(1, NONE, |_, _, _| (), act).unwrap_err();
    assert!(shared.contains("table of level 2 at 0x1000000000, entry "), "{shared}");
    let mut stage = private_memory();
    stage.space.map(stage.cpus[0].core(), MapRequest::anonymous(AREA, RW).fixed(base)).unwrap();
    assert_apart(stage.audit(1, &exceptions, |_, _, _| (), act));
}

/// A page table is made once for 512 pages.
#[test]
fn making_page_tables() {
    let act = |cpu: &mut Cpu, _: &Space, at| {
        for table in 0..8 {
            cpu.store_u64(at + table * TABLE, 1).unwrap();
        }
    };
    assert_apart(private_memory().audit(8, NONE, |_, _, _| (), act));
}
