//! Random operations against a `BTreeMap` of pages.

use super::for_both_formats;
use super::machine::TestMachine;
use crate::addr::{AddrRange, Frame, PAGE_SIZE};
use crate::page_table::{EMPTY, Format, Pte, PteFlags};
use core::ops::ControlFlow;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use std::collections::{BTreeMap, BTreeSet};
use std::vec::Vec;

#[derive(Clone, Debug)]
enum Op {
    Map { spot: usize, offset: u64, pages: u64 },
    Unmap { spot: usize, offset: u64, pages: u64, free: bool },
    Protect { spot: usize, offset: u64, pages: u64 },
    FreeAll,
}

/// Boundaries of tables of every level, and the ends of the address space.
fn spots<F: Format>() -> [u64; 6] {
    [0, 1 << 21, 1 << 30, 1 << 39, (1 << 39) + (1 << 30), F::USER_END]
}

fn range<F: Format>(spot: usize, offset: u64, pages: u64) -> AddrRange {
    let middle = spots::<F>()[spot];
    let start = (middle + offset * PAGE_SIZE).saturating_sub(600 * PAGE_SIZE);
    AddrRange::new(start, (start + pages * PAGE_SIZE).min(F::USER_END))
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let place = (0..6usize, 0..1200u64, prop_oneof![1..4u64, 1..1100u64]);
    let op = prop_oneof![
        4 => place.clone().prop_map(|(spot, offset, pages)| Op::Map { spot, offset, pages }),
        4 => (place.clone(), any::<bool>())
            .prop_map(|((spot, offset, pages), free)| Op::Unmap { spot, offset, pages, free }),
        1 => place.prop_map(|(spot, offset, pages)| Op::Protect { spot, offset, pages }),
        1 => Just(Op::FreeAll),
    ];
    prop::collection::vec(op, 1..40)
}

for_both_formats! {
    agrees_with_a_map;
}

fn agrees_with_a_map<F: Format>() {
    let config = ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() };
    TestRunner::new(config)
        .run(&ops(), |ops| {
            TestMachine::<F>::with_tree(256, |machine, cpu, tree| run(machine, cpu, tree, &ops));
            Ok(())
        })
        .unwrap();
}

fn run<F: Format>(
    machine: &TestMachine<F>,
    cpu: &crate::sync::Participant<'_>,
    tree: &crate::page_table::PageTable<F>,
    ops: &[Op],
) {
    let all = AddrRange::new(0, F::USER_END);
    let mut model: BTreeMap<u64, Pte> = BTreeMap::new();
    let mut next = 0;
    for op in ops {
        let pin = cpu.pin();
        let ram = machine.ram(&pin);
        match *op {
            Op::Map { spot, offset, pages } => {
                let range = range::<F>(spot, offset, pages);
                for addr in (range.start..range.end).step_by(PAGE_SIZE as usize) {
                    let slot = tree.slot(&ram, addr).unwrap();
                    match slot.take(EMPTY) {
                        Some(taken) => {
                            next += 1;
                            let pte = match next % 5 {
                                0 => Pte::Swap(u64::from(next)),
                                1 => Pte::NoAccess { frame: Frame(next), flags: PteFlags::READ },
                                _ => {
                                    Pte::Page { frame: Frame(next), flags: PteFlags::READ | PteFlags::WRITE }
                                }
                            };
                            taken.publish(pte.encode::<F>());
                            assert!(model.insert(addr, pte).is_none());
                        }
                        None => assert!(model.contains_key(&addr)),
                    }
                }
            }
            Op::Unmap { spot, offset, pages, free } => {
                let range = range::<F>(spot, offset, pages);
                let mut gone = Vec::new();
                tree.zap(&ram, range, &mut |addr, pte| gone.push((addr, pte)));
                let expected: Vec<_> = model.range(range.start..range.end).map(|(&a, &p)| (a, p)).collect();
                assert_eq!(gone, expected);
                model.retain(|&addr, _| !range.contains(addr));
                if free && !range.is_empty() {
                    let floor =
                        model.range(..range.start).next_back().map_or(0, |(&addr, _)| addr + PAGE_SIZE);
                    let ceiling = model.range(range.end..).next().map_or(F::USER_END, |(&addr, _)| addr);
                    machine.free_tables(&ram, tree, AddrRange::new(floor, ceiling), range);
                }
            }
            Op::Protect { spot, offset, pages } => {
                let range = range::<F>(spot, offset, pages);
                tree.for_each_slot(&ram, range, |addr, slot| {
                    assert_eq!(Pte::decode::<F>(slot.write_protect::<F>()), model[&addr]);
                    if let Pte::Page { flags, .. } | Pte::NoAccess { flags, .. } =
                        model.get_mut(&addr).unwrap()
                    {
                        flags.remove(PteFlags::WRITE);
                    }
                    ControlFlow::Continue(())
                });
            }
            Op::FreeAll => {
                machine.free_tables(&ram, tree, all, all);
                // Exactly the tables that lead to something are left.
                let tables: BTreeSet<_> =
                    model.keys().flat_map(|&addr| [21, 30, 39].map(|shift| (shift, addr >> shift))).collect();
                assert_eq!(tree.tables(), tables.len() + 1);
            }
        }
        let mut seen = Vec::new();
        tree.for_each_slot(&ram, all, |addr, slot| {
            seen.push((addr, slot.decode::<F>()));
            ControlFlow::Continue(())
        });
        assert_eq!(seen, model.iter().map(|(&addr, &pte)| (addr, pte)).collect::<Vec<_>>());
        for (spot, pages) in (0..6).flat_map(|spot| [1, 3, 700].map(|pages| (spot, pages))) {
            let range = range::<F>(spot, 600, pages);
            let met = tree.for_each_run(&ram, range, |_| ControlFlow::Break(())).is_break();
            assert_eq!(tree.is_untouched(&ram, range), !met, "{range:x?}");
        }
        for (&addr, &pte) in model.iter().step_by(97) {
            assert_eq!(tree.lookup(&ram, addr).unwrap().decode::<F>(), pte);
        }
        drop(pin);
        machine.settle(cpu);
    }
    let pin = cpu.pin();
    tree.zap(&machine.ram(&pin), all, &mut |_, _| ());
}
