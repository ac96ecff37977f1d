//! The audit audited: what is planted is found, and named.
#![cfg(terrane_watch)]

mod stage;

use stage::*;
use std::sync::Arc;
use terrane::names::Names;
use terrane::sync::atomic::{AtomicU64, Ordering};
use terrane_audit::compare::badly_placed;
use terrane_audit::shared_lines;

/// A host whose sink counts all events in one word, as a careless one would.
#[test]
fn a_planted_counter_is_found_and_named() {
    let events = Arc::new(AtomicU64::new(0));
    let sink = {
        let events = events.clone();
        Box::new(move |_, _| {
            events.fetch_add(1, Ordering::Relaxed);
        })
    };
    let config = MachineConfig { memory: 64 << 20, cpus: 3, ..MachineConfig::default() };
    let machine = HostedMachine::with_events(config, sink).unwrap();
    let mut stage = Stage::on(machine, SpaceConfig::default());
    stage.space.map(stage.cpus[0].core(), MapRequest::anonymous(LENGTH, RW).fixed(BASE)).unwrap();
    let mut planted = Names::new();
    planted.field("events of the sink", &*events);
    stage.names.extend(planted);
    let touch =
        |page: u64| move |cpu: &mut Cpu, _: &Space, at: u64| cpu.store_u64(at + page * PAGE, 1).unwrap();
    let shared = stage.audit(1, &[], touch(0), touch(1)).unwrap_err();
    for part in ["events of the sink", "CPU 1 changes", "CPU 2 changes", "tests/audit.rs:"] {
        assert!(shared.contains(part), "{shared}");
    }
    assert_eq!(shared.matches("line 0x").count() as u64, ROUNDS, "nothing else is shared: {shared}");
    // As an exception it is allowed: twice in a fault (pgfault and speculative_pgfault), and not once.
    let exception = |in_a_hundred| [Exception { field: "events of", in_a_hundred, why: "planted" }];
    let error = stage.again(1, &exception(100), touch(2)).unwrap_err();
    assert!(error.contains("2 times in 1 operations, more than 100 in 100 (planted)"), "{error}");
    stage.again(1, &exception(200), touch(3)).unwrap();
}

#[test]
fn words_on_one_line_are_found_though_each_has_one_writer() {
    #[repr(align(64))]
    struct Line([AtomicU64; 8]);
    let line = Line(Default::default());
    let mut names = Names::new();
    names.field("left", &line.0[2]);
    names.field("right", &line.0[3]);
    let (a, ()) = record("A", true, || line.0[2].store(1, Ordering::Relaxed));
    let (b, ()) = record("B", true, || line.0[3].store(1, Ordering::Relaxed));
    let shared = shared_lines(&[a.clone(), b], &names, Sharing::Written);
    assert_eq!(shared.len(), 1);
    let fields: Vec<_> = shared[0].uses.iter().map(|write| (&*write.who, &*write.field)).collect();
    assert_eq!(fields, [("A", "left"), ("B", "right")]);
    let (c, _) = record("C", true, || line.0[2].load(Ordering::Relaxed));
    let both = [a, c];
    assert!(shared_lines(&both, &names, Sharing::Written).is_empty(), "a load is no write");
    let read = shared_lines(&both, &names, Sharing::Read);
    assert!(read.len() == 1 && read[0].to_string().contains("read by another"), "{read:?}");
    assert!(
        terrane_audit::check(&both, &names, Sharing::Written, Some(1), &[])
            .unwrap_err()
            .contains("C wrote nothing")
    );
}

/// Which CPU's a name is.
fn owner(name: &str) -> Option<u32> {
    const OF_CPUS: &[&str] = &[
        "machine.epoch.slots[",
        "machine.stats[",
        "machine.frames.cpus[",
        "machine.records.cpus[",
        "machine.range_nodes[",
        "tlb.lanes[",
        "tlb.shooters[",
        "space.mapped.shards[",
        "space.page_table.tables.shards[",
        "space.reserves[",
    ];
    let rest = OF_CPUS.iter().find_map(|of| name.strip_prefix(of))?;
    rest.split_once(']')?.0.parse().ok()
}

/// What belongs to a CPU shares no line with what belongs to another, whatever they do.
#[test]
fn what_belongs_to_a_cpu_lies_apart() {
    let stage = Stage::new(SpaceConfig::default());
    let names = stage.all_names();
    let kinds: std::collections::BTreeSet<_> = names
        .iter()
        .filter(|(_, name)| owner(name).is_some())
        .filter_map(|(_, name)| name.split('[').next())
        .collect();
    assert_eq!(kinds.len(), 10, "{kinds:?}");
    let found = badly_placed(&names, owner);
    assert!(found.is_empty(), "{found:#?}");
    // And a name is found for a word of each.
    for (range, name) in names.iter().filter(|(_, name)| owner(name).is_some()) {
        assert_eq!(names.of(range.start).and_then(|name| owner(&name)), owner(name), "{name}");
    }
}
