//! Two processors that map, unmap, protect and forget in areas of their own, in one space, share a few lines, each named
//! here with its bound and its reason.
#![cfg(terrane_watch)]

mod stage;

use stage::*;
use terrane::space::Placement;

/// Operations of one processor in one round.
const OPERATIONS: u64 = 200;

const EPOCH: Exception = Exception {
    field: "machine.epoch.global",
    in_a_hundred: 8,
    why: "a CPU that has retired 32 objects (VMAs, index nodes) moves the epoch on, if no other has",
};

const POOL: Exception = Exception {
    field: "machine.frames.pool",
    in_a_hundred: 8,
    why: "frames go from a full cache to the pool, and back to an empty one, 64 at a time",
};

/// What layout changes share.
const COMMON: [Exception; 5] = [
    EPOCH,
    POOL,
    // Records beyond the 64 that a CPU keeps go through a list of all CPUs, 32 at a time; so another CPU may write them
    // next.
    Exception {
        field: "machine.records.global",
        in_a_hundred: 15,
        why: "a CPU that has none left, or more than 64, takes or gives 32 under the lock of the list",
    },
    Exception {
        field: "machine.records.records",
        in_a_hundred: 600,
        why: "the records that were exchanged: one life of a VMA writes its record some ten times",
    },
    Exception {
        field: "space.index.leaf[]",
        in_a_hundred: 0,
        why: "only when both act at once: who measures a gap that reaches into a leaf of the other, and finds it changing \
              time and again, takes its lock to look",
    },
];

/// What they share besides when leaves of the index fill up and run empty.
const SPLITS: [Exception; 5] = [
    Exception {
        field: "space.index.shape",
        in_a_hundred: 75,
        why: "splitting and merging leaves, tried once for some six calls, is for one at a time",
    },
    Exception {
        field: "space.index.root",
        in_a_hundred: 10,
        why: "the node above a leaf that is split or merged is copied; when it is the root, the root moves",
    },
    Exception {
        field: "space.index.bytes",
        in_a_hundred: 20,
        why: "counts nodes, with the structure lock held",
    },
    Exception {
        field: "space.index.node of height",
        in_a_hundred: 30,
        why: "nodes above leaves lead to leaves of both",
    },
    Exception {
        field: "an unnamed word of crates/terrane/src/",
        in_a_hundred: 30,
        why: "the same in nodes that have been replaced since, and their memory where it is used anew",
    },
];

fn assert_named(result: Result<(), String>) {
    if let Err(shared) = result {
        panic!("lines in common that are not named, or more often than said:\n{shared}");
    }
}

fn per_cpu() -> Stage {
    let mut config = SpaceConfig::default();
    config.placement = Placement::PerCpu;
    let mut stage = Stage::new(config);
    stage.sharing = Sharing::Written;
    for cpu in &mut stage.cpus {
        // Its stretch, and tables there.
        let at = stage.space.map(cpu.core(), MapRequest::anonymous(4 * AREA, RW)).unwrap();
        for table in 0..4 * AREA / TABLE {
            cpu.store_u64(at + table * TABLE, 1).unwrap();
        }
    }
    stage
}

#[test]
fn mapping_and_unmapping() {
    let act = |cpu: &mut Cpu, space: &Space, _| {
        for n in 0..OPERATIONS {
            let len = (n % 7 + 1) * PAGE;
            let at = space.map(cpu.core(), MapRequest::anonymous(len, Prot::READ)).unwrap();
            space.unmap(cpu.core(), at, len).unwrap();
        }
    };
    assert_named(per_cpu().audit(OPERATIONS, &COMMON, |_, _, _| (), act));
}

#[test]
fn mapping_touching_and_unmapping() {
    let act = |cpu: &mut Cpu, space: &Space, _| {
        for n in 0..OPERATIONS {
            let len = (n % 7 + 1) * PAGE;
            let at = space.map(cpu.core(), MapRequest::anonymous(len, RW)).unwrap();
            cpu.store_u64(at, n).unwrap();
            space.unmap(cpu.core(), at, len).unwrap();
        }
    };
    assert_named(per_cpu().audit(OPERATIONS, &COMMON, |_, _, _| (), act));
}

/// Page tables come and go.
#[test]
fn unmapping_with_tables() {
    const LEN: u64 = 2 * TABLE;
    let act = |cpu: &mut Cpu, space: &Space, _| {
        for n in 0..OPERATIONS {
            let at = space.map(cpu.core(), MapRequest::anonymous(LEN, RW)).unwrap();
            for page in [0, 1, LEN / PAGE - 1] {
                cpu.store_u64(at + page * PAGE, n).unwrap();
            }
            space.unmap(cpu.core(), at, LEN).unwrap();
        }
    };
    assert_named(per_cpu().audit(OPERATIONS, &COMMON, |_, _, _| (), act));
}

#[test]
fn keeping_many_mappings() {
    let act = |cpu: &mut Cpu, space: &Space, _| {
        // Alternating, so that no two are merged.
        let prot = |n: u64| if n.is_multiple_of(2) { RW } else { Prot::READ };
        let map = |n| space.map(cpu.core(), MapRequest::anonymous(2 * PAGE, prot(n))).unwrap();
        let maps: Vec<_> = (0..OPERATIONS).map(map).collect();
        for at in maps {
            space.unmap(cpu.core(), at, 2 * PAGE).unwrap();
        }
    };
    let exceptions = [COMMON.as_slice(), &SPLITS].concat();
    assert_named(per_cpu().audit(OPERATIONS, &exceptions, |_, _, _| (), act));
}

#[test]
fn protecting() {
    let stage = || {
        let mut stage = per_cpu();
        let maps = [0, 1].map(|k: usize| {
            let cpu = &mut stage.cpus[k];
            let at = stage.space.map(cpu.core(), MapRequest::anonymous(64 * PAGE, RW)).unwrap();
            (0..64).for_each(|page| cpu.store_u64(at + page * PAGE, page).unwrap());
            at
        });
        (stage, maps)
    };
    // All of it, and a part, which divides and merges.
    for (from, to) in [(0, 64), (8, 24)] {
        let (mut stage, maps) = stage();
        let act = move |cpu: &mut Cpu, space: &Space, _| {
            let at = maps[cpu.id().0 as usize - 1] + from * PAGE;
            for n in 0..OPERATIONS {
                let prot = if n % 2 == 0 { Prot::READ } else { RW };
                space.protect(cpu.core(), at, (to - from) * PAGE, prot).unwrap();
            }
        };
        assert_named(stage.audit(OPERATIONS, &COMMON, |_, _, _| (), act));
    }
}

#[test]
fn forgetting() {
    let mut stage = per_cpu();
    let maps = [0, 1]
        .map(|k: usize| stage.space.map(stage.cpus[k].core(), MapRequest::anonymous(64 * PAGE, RW)).unwrap());
    let act = move |cpu: &mut Cpu, space: &Space, _| {
        let at = maps[cpu.id().0 as usize - 1];
        for n in 0..OPERATIONS {
            cpu.store_u64(at + n % 64 * PAGE, n).unwrap();
            space.advise(cpu.core(), at, 64 * PAGE, Advice::DontNeed).unwrap();
        }
    };
    assert_named(stage.audit(OPERATIONS, &COMMON, |_, _, _| (), act));
}

/// Each processor in a space of its own: what they share is the machine.
#[test]
fn spaces_of_their_own() {
    let mut stage = Stage::new(SpaceConfig::default());
    stage.sharing = Sharing::Written;
    let mut others = Vec::new();
    for cpu in &mut stage.cpus {
        let space = Space::try_new(cpu.core(), SpaceConfig::default()).unwrap();
        space.set_heap(cpu.core(), BASE).unwrap();
        others.push(Shared::try_new(space).unwrap());
    }
    let act = |cpu: &mut Cpu, _: &Space, _| {
        let space = &others[cpu.id().0 as usize - 1];
        cpu.switch_to(space);
        for n in 0..OPERATIONS {
            let end = BASE + (n % 9) * 4 * PAGE;
            assert_eq!(space.brk(cpu.core(), end), end);
            if n % 9 > 0 {
                cpu.store_u64(BASE, n).unwrap();
            }
            let at = space.map(cpu.core(), MapRequest::anonymous(PAGE, RW)).unwrap();
            cpu.store_u64(at, n).unwrap();
            space.unmap(cpu.core(), at, PAGE).unwrap();
        }
    };
    for (k, space) in others.iter().enumerate() {
        let mut names = terrane::names::Names::new();
        names.under(format_args!("space of {k}"), |names| space.describe(&stage.cpus[k].core().pin(), names));
        stage.names.extend(names);
    }
    assert_named(stage.audit(2 * OPERATIONS, &COMMON, |_, _, _| (), act));
}

/// One file, mapped by both: its list of mappings is one, behind one lock.
#[test]
fn mapping_a_file() {
    let mut stage = per_cpu();
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(8 * PAGE).unwrap();
    let object = stage.machine.open(file.path(), true).unwrap();
    let mut names = terrane::names::Names::new();
    names.under("object", |names| object.describe(names));
    names.field("owners of the object", &object);
    stage.names.extend(names);
    let exceptions = [
        COMMON.as_slice(),
        &[
            Exception {
                field: "object",
                in_a_hundred: 600,
                why: "mapping and unmapping change the file's list of mappings, under its lock",
            },
            Exception {
                field: "owners of the object",
                in_a_hundred: 400,
                why: "the request and the VMA own the object that they show: four changes of the count for a mapping that comes and goes",
            },
            Exception {
                field: "space.ending",
                in_a_hundred: 200,
                why: "an unmap of a file's pages tells write-back that it has yet to wait for stores",
            },
        ],
    ]
    .concat();
    let act = move |cpu: &mut Cpu, space: &Space, _| {
        for _ in 0..OPERATIONS {
            let at = space.map(cpu.core(), MapRequest::object(&object, 0, 8 * PAGE, RW, true)).unwrap();
            cpu.load_u64(at).unwrap();
            space.unmap(cpu.core(), at, 8 * PAGE).unwrap();
        }
    };
    assert_named(stage.audit(OPERATIONS, &exceptions, |_, _, _| (), act));
}
