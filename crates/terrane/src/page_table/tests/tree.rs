//! One CPU: shapes of the tree, the protocol step by step, exhaustion, the ends of the address space.

use super::for_both_formats;
use super::machine::TestMachine;
use crate::addr::{AddrRange, Frame, PAGE_SIZE};
use crate::frame::{FrameFlags, FrameList};
use crate::page_table::{BUSY, EMPTY, Format, Level, PageTable, Pte, PteFlags, SlotError, TOMBSTONE};
use core::ops::ControlFlow;
use std::vec::Vec;

const MIB2: u64 = 2 << 20;
const GIB: u64 = 1 << 30;

for_both_formats! {
    walks_find_what_was_published;
    the_ends_of_the_address_space;
    taking_and_giving_back;
    flags_change_in_place;
    blocks_are_not_tables;
    blocks_are_divided_and_gathered;
    empty_tables_go_and_used_ones_stay;
    bounds_keep_tables;
    a_closed_table_cannot_be_taken;
    exhaustion_leaves_nothing_behind;
    pairs_share_the_shape;
    a_range_never_touched_is_skipped;
    zap_waits_for_nothing_it_does_not_meet;
}

fn page<F: Format>(n: u32) -> u64 {
    F::page(Frame(n), PteFlags::READ | PteFlags::WRITE)
}

fn publish<F: Format>(
    machine: &TestMachine<F>,
    ram: &crate::frame::Ram<'_, super::machine::TestHost<F>>,
    tree: &PageTable<F>,
    addr: u64,
    raw: u64,
) {
    let _ = machine;
    tree.slot(ram, addr).unwrap().take(EMPTY).unwrap().publish(raw);
}

fn walks_find_what_was_published<F: Format>() {
    TestMachine::<F>::with_tree(64, |machine, cpu, tree| {
        let pin = cpu.pin();
        let ram = machine.ram(&pin);
        let addr = 0x1234_5678_9000;
        assert!(tree.lookup(&ram, addr).is_none() && tree.leaf_table(&ram, addr).is_none());
        let walk = tree.walk(&ram, addr).unwrap();
        assert_eq!((walk.raw, walk.level), (EMPTY, Level::root::<F>()));
        publish(machine, &ram, tree, addr, page::<F>(77));
        assert_eq!(tree.tables(), 4);
        let slot = tree.lookup(&ram, addr + 0xfff).unwrap();
        assert_eq!(
            slot.decode::<F>(),
            Pte::Page { frame: Frame(77), flags: PteFlags::READ | PteFlags::WRITE }
        );
        assert!(core::ptr::eq(slot, &tree.leaf_table(&ram, addr).unwrap()[Level::PAGE.index(addr)]));
        let walk = tree.walk(&ram, addr).unwrap();
        assert!(core::ptr::eq(walk.slot, slot) && walk.raw == page::<F>(77) && walk.level == Level::PAGE);
        // The same from the bits alone, as a processor does it.
        let mut frame = tree.root();
        for shift in [39, 30, 21, 12] {
            assert!(shift == 12 || machine.frames.meta(frame).flags().contains(FrameFlags::TABLE));
            let raw =
                ram.table(frame)[(addr >> shift) as usize & 511].load(core::sync::atomic::Ordering::Relaxed);
            assert_eq!(raw & 1, 1);
            frame = F::frame(raw);
        }
        assert_eq!(frame, Frame(77));
        let mut gone = Vec::new();
        tree.zap(&ram, AddrRange::new(addr, addr + 1), &mut |addr, pte: Pte| gone.push((addr, pte.frame())));
        assert_eq!(gone, [(addr, Some(Frame(77)))]);
        assert_eq!(slot.load(), EMPTY);
    });
}

fn the_ends_of_the_address_space<F: Format>() {
    TestMachine::<F>::with_tree(64, |machine, cpu, tree| {
        let pin = cpu.pin();
        let ram = machine.ram(&pin);
        for addr in [F::USER_END, 1 << 48, 1 << 63, u64::MAX] {
            assert!(tree.lookup(&ram, addr).is_none());
            assert!(matches!(tree.slot(&ram, addr), Err(SlotError::Changed)));
            assert!(tree.make_leaf_table(&ram, addr).is_err() && tree.leaf_table(&ram, addr).is_none());
            assert!(tree.walk(&ram, addr).is_none());
        }
        let all = AddrRange::new(0, u64::MAX);
        let last = F::USER_END - PAGE_SIZE;
        publish(machine, &ram, tree, 0, page::<F>(1));
        publish(machine, &ram, tree, last, page::<F>(2));
        assert_eq!(tree.tables(), 7);
        let mut seen = Vec::new();
        tree.for_each_slot(&ram, all, |addr, _| {
            seen.push(addr);
            ControlFlow::Continue(())
        });
        assert_eq!(seen, [0, last]);
        assert_eq!(machine.free_tables(&ram, tree, all, all), 0);
        let mut gone = 0;
        tree.zap(&ram, all, &mut |_, _| gone += 1);
        assert_eq!(gone, 2);
        // A ceiling at the end of the program's part frees the last table, though it reaches beyond.
        let bounds = AddrRange::new(0, F::USER_END);
        assert_eq!(machine.free_tables(&ram, tree, bounds, AddrRange::new(last, F::USER_END)), 3);
        assert_eq!(machine.free_tables(&ram, tree, bounds, bounds), 3);
        // Ranges that are empty, or beyond the end.
        tree.zap(&ram, AddrRange::new(5, 5), &mut |_, _| panic!());
        tree.zap(&ram, AddrRange::new(F::USER_END, u64::MAX), &mut |_, _| panic!());
        assert_eq!(machine.free_tables(&ram, tree, all, AddrRange::new(F::USER_END, u64::MAX)), 0);
        assert_eq!(machine.free_tables(&ram, tree, all, AddrRange::new(7, 7)), 0);
    });
}

fn taking_and_giving_back<F: Format>() {
    TestMachine::<F>::with_tree(16, |machine, cpu, tree| {
        let pin = cpu.pin();
        let ram = machine.ram(&pin);
        let slot = tree.slot(&ram, 0x5000).unwrap();
        let taken = slot.take(EMPTY).unwrap();
        assert_eq!((taken.previous(), slot.load(), slot.decode::<F>()), (EMPTY, BUSY, Pte::Busy));
        assert!(slot.take(EMPTY).is_none() && slot.take(BUSY).is_none());
        assert_eq!(slot.clear_flags::<F>(PteFlags::WRITE), BUSY);
        drop(taken);
        assert_eq!(slot.load(), EMPTY);
        slot.take(EMPTY).unwrap().publish(page::<F>(3));
        let taken = slot.take(page::<F>(3)).unwrap();
        assert!(core::ptr::eq(taken.slot(), slot));
        taken.give_back();
        assert_eq!(slot.wait_not_busy(&ram), page::<F>(3));
        assert_eq!(slot.replace(page::<F>(4), page::<F>(5)), Err(page::<F>(3)));
        assert_eq!(slot.replace(page::<F>(3), page::<F>(5)), Ok(()));
        assert_eq!((slot.clear(&ram), slot.clear(&ram)), (page::<F>(5), EMPTY));
    });
}

fn flags_change_in_place<F: Format>() {
    TestMachine::<F>::with_tree(16, |machine, cpu, tree| {
        let pin = cpu.pin();
        let ram = machine.ram(&pin);
        let slot = tree.slot(&ram, 0x5000).unwrap();
        slot.fill(page::<F>(3));
        let raw = slot.set_accessed::<F>(page::<F>(3)).unwrap();
        assert_eq!(slot.set_accessed::<F>(raw), Ok(raw));
        assert_eq!(slot.set_dirty::<F>(page::<F>(3)), Err(raw));
        let raw = slot.set_dirty::<F>(raw).unwrap();
        assert_eq!(slot.load(), raw);
        assert_eq!(F::flags(raw), PteFlags::all() - PteFlags::EXEC - PteFlags::USER_WP);
        assert_eq!(slot.write_protect::<F>(), raw);
        assert_eq!(F::flags(slot.load()), PteFlags::READ | PteFlags::ACCESSED | PteFlags::DIRTY);
        slot.clear_flags::<F>(PteFlags::ACCESSED | PteFlags::DIRTY);
        assert_eq!(slot.load(), F::page(Frame(3), PteFlags::READ));
        let none =
            Pte::NoAccess { frame: Frame(9), flags: PteFlags::READ | PteFlags::WRITE | PteFlags::DIRTY };
        assert_eq!(slot.replace(slot.load(), none.encode::<F>()), Ok(()));
        slot.write_protect::<F>();
        assert_eq!(
            slot.decode::<F>(),
            Pte::NoAccess { frame: Frame(9), flags: PteFlags::READ | PteFlags::DIRTY }
        );
        let swap = Pte::Swap(0xfff_ffff_ffff_ffff).encode::<F>();
        assert_eq!(slot.replace(slot.load(), swap), Ok(()));
        assert_eq!((slot.write_protect::<F>(), slot.load()), (swap, swap));
        slot.clear(&ram);
    });
}

fn blocks_are_not_tables<F: Format>() {
    TestMachine::<F>::with_tree(16, |machine, cpu, tree| {
        let pin = cpu.pin();
        let ram = machine.ram(&pin);
        let addr = 3 * GIB + 5 * MIB2;
        let block = F::block(Frame(0x20_0000), PteFlags::READ);
        let slot = tree.slot_at(&ram, addr + 0x7000, Level::BLOCK).unwrap();
        slot.take(EMPTY).unwrap().publish(block);
        assert!(tree.lookup(&ram, addr).is_none() && tree.leaf_table(&ram, addr).is_none());
        assert!(matches!(tree.slot(&ram, addr), Err(SlotError::Changed)));
        assert!(matches!(tree.make_leaf_table(&ram, addr), Err(SlotError::Changed)));
        let walk = tree.walk(&ram, addr + 0x1234).unwrap();
        assert_eq!((walk.raw, walk.level), (block, Level::BLOCK));
        let all = AddrRange::new(0, F::USER_END);
        let mut runs = Vec::new();
        let _ = tree.for_each_run(&ram, all, |run| {
            runs.push((run.addr, run.level, run.slots.len()));
            ControlFlow::Continue(())
        });
        assert_eq!(runs, [(addr, Level::BLOCK, 1)]);
        tree.for_each_slot(&ram, all, |_, _| panic!("a block is no leaf entry"));
        assert_eq!(machine.free_tables(&ram, tree, all, all), 0);
        tree.zap(&ram, AddrRange::new(addr, addr + MIB2 - PAGE_SIZE), &mut |_, _| panic!("in part"));
        let mut gone = Vec::new();
        tree.zap(&ram, AddrRange::new(addr, addr + MIB2), &mut |addr, pte| gone.push((addr, pte)));
        assert_eq!(gone, [(addr, Pte::Block { frame: Frame(0x20_0000), flags: PteFlags::READ })]);
        // An upper entry that is owned sends faults back.
        let taken = slot.take(EMPTY).unwrap();
        assert!(matches!(tree.slot(&ram, addr), Err(SlotError::Changed)));
        drop(taken);
        assert!(tree.slot(&ram, addr).is_ok());
    });
}

fn blocks_are_divided_and_gathered<F: Format>() {
    TestMachine::<F>::with_tree(16, |machine, cpu, tree| {
        let pin = cpu.pin();
        let ram = machine.ram(&pin);
        let addr = GIB - MIB2;
        let all = AddrRange::new(addr, GIB);
        let first = Frame(0x20_0000);
        let slot = tree.slot_at(&ram, addr, Level::BLOCK).unwrap();
        assert!(core::ptr::eq(tree.block_slot(&ram, GIB - 1).unwrap(), slot));
        let visible = PteFlags::READ | PteFlags::WRITE | PteFlags::DIRTY;
        for flags in [visible, PteFlags::ACCESSED, PteFlags::empty()] {
            let block = Pte::Block { frame: first, flags };
            slot.take(EMPTY).unwrap().publish(block.encode::<F>());
            let table = ram.allocate().unwrap();
            // What the entry was a moment ago is not divided.
            assert!(!tree.divide(&ram, slot, F::block(first, PteFlags::READ), table, || panic!()));
            let tables = tree.tables();
            let mut shot_down = false;
            assert!(tree.divide(&ram, slot, block.encode::<F>(), table, || {
                assert_eq!(slot.load(), BUSY);
                shot_down = true;
            }));
            assert!(shot_down && tree.tables() == tables + 1);
            // A sweep that came for the block finds a table, and leaves it.
            assert_eq!(slot.clear_block::<F, _>(&ram), Err(F::table(table)));
            let mut expected = first.0;
            tree.for_each_slot(&ram, all, |at, slot| {
                let frame = Frame(expected);
                let page = match flags.contains(PteFlags::READ) {
                    true => Pte::Page { frame, flags },
                    false => Pte::NoAccess { frame, flags },
                };
                assert_eq!(
                    (at, slot.decode::<F>()),
                    (addr + u64::from(expected - first.0) * PAGE_SIZE, page)
                );
                expected += 1;
                ControlFlow::Continue(())
            });
            assert_eq!(expected, first.0 + 512);
            // Back: an entry that is owned by someone else is waited for elsewhere; here all are free.
            let entries = tree.leaf_table(&ram, addr).unwrap();
            entries[7].clear(&ram);
            let before: Vec<u64> = entries.iter().map(|slot| slot.take_any(&ram).unwrap().keep()).collect();
            assert!(before[7] == EMPTY && entries.iter().all(|slot| slot.load() == BUSY));
            assert!(entries[7].take(EMPTY).is_none() && entries[8].take(before[8]).is_none());
            // Given back and taken again: nothing has changed.
            entries.iter().zip(&before).for_each(|(slot, &raw)| slot.resume(raw).give_back());
            assert!(entries.iter().zip(&before).all(|(slot, &raw)| slot.load() == raw));
            for slot in entries {
                slot.take_any(&ram).unwrap().keep();
            }
            let gone = tree.gather(&ram, addr, block, || assert_eq!(slot.load(), BUSY)).unwrap();
            assert_eq!((gone, slot.load(), tree.tables()), (table, block.encode::<F>(), tables));
            // Whoever stands in the old table can take nothing.
            assert!(
                entries.iter().all(|slot| slot.take(slot.load()).is_none() && slot.take_any(&ram).is_none())
            );
            assert!(tree.gather(&ram, addr, block, || panic!()).is_none(), "it is a block");
            ram.free(gone);
            let mut gone = Vec::new();
            tree.zap(&ram, all, &mut |addr, pte| gone.push((addr, pte)));
            assert_eq!(gone, [(addr, block)]);
        }
    });
}

fn empty_tables_go_and_used_ones_stay<F: Format>() {
    TestMachine::<F>::with_tree(64, |machine, cpu, tree| {
        let pin = cpu.pin();
        let ram = machine.ram(&pin);
        let all = AddrRange::new(0, F::USER_END);
        // Four leaf tables in two GiB; one page in the last entry of the second.
        for addr in [0, MIB2, GIB, GIB + MIB2] {
            tree.make_leaf_table(&ram, addr).unwrap();
        }
        publish(machine, &ram, tree, 2 * MIB2 - PAGE_SIZE, page::<F>(1));
        assert_eq!(tree.tables(), 1 + 1 + 2 + 4);
        assert_eq!(machine.free_tables(&ram, tree, all, all), 3 + 1);
        assert_eq!(tree.tables(), 4);
        // The table that stays is open as before, in every entry.
        for index in 0..511 {
            let slot = tree.lookup(&ram, MIB2 + index * PAGE_SIZE).unwrap();
            slot.take(EMPTY).unwrap().give_back();
        }
        tree.zap(&ram, all, &mut |addr, _| assert_eq!(addr, 2 * MIB2 - PAGE_SIZE));
        assert_eq!(machine.free_tables(&ram, tree, all, AddrRange::new(MIB2, MIB2 + 1)), 3);
        assert_eq!(tree.tables(), 1);
        // And it can be made anew.
        publish(machine, &ram, tree, MIB2, page::<F>(1));
        assert_eq!(tree.tables(), 4);
        tree.zap(&ram, all, &mut |_, _| ());
    });
}

fn bounds_keep_tables<F: Format>() {
    TestMachine::<F>::with_tree(64, |machine, cpu, tree| {
        let pin = cpu.pin();
        let ram = machine.ram(&pin);
        let range = AddrRange::new(GIB + MIB2, GIB + 3 * MIB2);
        let fill = || {
            for addr in [GIB, GIB + MIB2, GIB + 2 * MIB2, GIB + 3 * MIB2] {
                tree.make_leaf_table(&ram, addr).unwrap();
            }
        };
        let free =
            |floor, ceiling, range| machine.free_tables(&ram, tree, AddrRange::new(floor, ceiling), range);
        fill();
        // One page too narrow on either side.
        assert_eq!(free(GIB + MIB2 + PAGE_SIZE, F::USER_END, AddrRange::new(GIB + MIB2, GIB + 2 * MIB2)), 0);
        assert_eq!(free(0, GIB + 2 * MIB2 - PAGE_SIZE, AddrRange::new(GIB + MIB2, GIB + 2 * MIB2)), 0);
        // Exactly the tables of the range; the level above sticks out.
        assert_eq!(free(range.start, range.end, range), 2);
        fill();
        // Part of a range's outer tables, when the bounds allow it.
        assert_eq!(free(GIB, GIB + 4 * MIB2, AddrRange::new(range.start - 1, range.end + 1)), 4);
        fill();
        // The GiB as a whole, and not the 512 GiB above it.
        assert_eq!(free(GIB, 2 * GIB, AddrRange::new(GIB, 2 * GIB)), 4 + 1);
        assert_eq!(tree.tables(), 2);
    });
}

fn a_closed_table_cannot_be_taken<F: Format>() {
    TestMachine::<F>::with_tree(64, |machine, cpu, tree| {
        let pin = cpu.pin();
        let ram = machine.ram(&pin);
        let all = AddrRange::new(0, F::USER_END);
        let table = tree.make_leaf_table(&ram, GIB).unwrap();
        let owned = table[100].take(EMPTY).unwrap();
        assert_eq!(machine.free_tables(&ram, tree, all, all), 0);
        owned.give_back();
        assert_eq!(machine.free_tables(&ram, tree, all, all), 3);
        // A fault that walked here before stands in a dead table: it gets nothing, and leaves nothing.
        for (index, slot) in table.iter().enumerate() {
            assert_eq!(slot.load(), if index % 8 == 0 { TOMBSTONE } else { EMPTY });
            assert!(slot.take(EMPTY).is_none() && slot.take(slot.load()).is_none());
            assert_eq!(slot.clear(&ram), EMPTY);
            assert_eq!(slot.load(), if index % 8 == 0 { TOMBSTONE } else { EMPTY });
        }
        assert_eq!(table[0].decode::<F>(), Pte::Tombstone);
        // Walking again finds a new table.
        let again = tree.make_leaf_table(&ram, GIB).unwrap();
        assert!(!core::ptr::eq(table, again));
        again[8].take(EMPTY).unwrap().give_back();
    });
}

fn exhaustion_leaves_nothing_behind<F: Format>() {
    // Frames for 0, 1, 2 and 3 of the four tables, then for all.
    for frames in 1..=4 {
        TestMachine::<F>::with_tree(frames, |machine, cpu, tree| {
            let pin = cpu.pin();
            let ram = machine.ram(&pin);
            let all = AddrRange::new(0, F::USER_END);
            let result = tree.slot(&ram, GIB);
            if frames < 4 {
                assert!(matches!(result, Err(SlotError::OutOfMemory)));
                assert!(matches!(tree.make_leaf_table(&ram, GIB), Err(SlotError::OutOfMemory)));
                assert!(tree.lookup(&ram, GIB).is_none());
            } else {
                assert!(result.is_ok());
                assert!(matches!(tree.slot(&ram, 0), Err(SlotError::OutOfMemory)));
            }
            assert_eq!(tree.tables(), frames);
            assert_eq!(machine.frames.free_frames(), 0);
            assert_eq!(
                machine.free_tables(&ram, tree, all, AddrRange::new(GIB, GIB + PAGE_SIZE)),
                frames - 1
            );
            assert_eq!(tree.tables(), 1);
        });
    }
    let machine = TestMachine::<F>::new(1);
    let cpu = machine.epoch.register().unwrap();
    let pin = cpu.pin();
    let ram = machine.ram(&pin);
    let mut only = PageTable::<F>::try_new(&ram).unwrap();
    assert!(PageTable::<F>::try_new(&ram).is_err());
    only.destroy(&ram);
    assert_eq!(machine.frames.free_frames(), 1);
}

fn pairs_share_the_shape<F: Format>() {
    TestMachine::<F>::with_tree(64, |machine, cpu, tree| {
        let pin = cpu.pin();
        let ram = machine.ram(&pin);
        let mut child = PageTable::<F>::try_new(&ram).unwrap();
        let addrs = [MIB2 - PAGE_SIZE, MIB2, MIB2 + 7 * PAGE_SIZE, 5 * GIB];
        for (n, &addr) in addrs.iter().enumerate() {
            publish(machine, &ram, tree, addr, page::<F>(n as u32));
        }
        // A table of the parent that is empty, and a page outside of the range.
        tree.make_leaf_table(&ram, 7 * GIB).unwrap();
        publish(machine, &ram, tree, MIB2 - 2 * PAGE_SIZE, page::<F>(100));
        let block = F::block(Frame(0x20_0000), PteFlags::READ);
        tree.slot_at(&ram, 6 * GIB, Level::BLOCK).unwrap().fill(block);
        let range = AddrRange::new(MIB2 - PAGE_SIZE, 10 * GIB);
        tree.for_each_pair(&child, &ram, range, |pair| {
            assert_eq!(pair.parent.len(), pair.child.len());
            for (from, to) in pair.parent.iter().zip(pair.child) {
                if from.load() != EMPTY {
                    from.write_protect::<F>();
                    to.fill(from.load());
                }
            }
            ControlFlow::Continue(())
        })
        .unwrap();
        let mut copied = Vec::new();
        child.for_each_slot(&ram, AddrRange::new(0, F::USER_END), |addr, slot| {
            assert_eq!(slot.load(), tree.lookup(&ram, addr).unwrap().load());
            copied.push(addr);
            ControlFlow::Continue(())
        });
        assert_eq!(copied, addrs);
        // The root, one for 512 GiB, three for the GiB, three of leaves.
        assert_eq!(child.tables(), 1 + 1 + 3 + 3);
        assert_eq!(child.walk(&ram, 6 * GIB).unwrap().raw, block);
        // Out of memory in the middle.
        let mut sink = FrameList::new();
        let mut poor = PageTable::<F>::try_new(&ram).unwrap();
        while machine.frames.free_frames() > 3 {
            sink.push(&machine.frames, ram.allocate().unwrap());
        }
        let result = tree.for_each_pair(&poor, &ram, range, |_| ControlFlow::Continue(()));
        assert_eq!(result, Err(SlotError::OutOfMemory));
        while let Some(frame) = sink.pop(&machine.frames) {
            ram.free(frame);
        }
        let all = AddrRange::new(0, F::USER_END);
        for tree in [tree, &child] {
            tree.zap(&ram, all, &mut |_, _| ());
        }
        poor.destroy(&ram);
        child.destroy(&ram);
    });
}

fn a_range_never_touched_is_skipped<F: Format>() {
    TestMachine::<F>::with_tree(16, |machine, cpu, tree| {
        let pin = cpu.pin();
        let ram = machine.ram(&pin);
        publish(machine, &ram, tree, 0, page::<F>(0));
        let mut runs = 0;
        let _ = tree.for_each_run(&ram, AddrRange::new(PAGE_SIZE, 100 * GIB), |run| {
            runs += 1;
            assert_eq!((run.addr, run.slots.len()), (PAGE_SIZE, 511));
            ControlFlow::Continue(())
        });
        assert_eq!(runs, 1);
        let broken = tree.for_each_run(&ram, AddrRange::new(0, 1), |_| ControlFlow::Break(()));
        assert!(broken.is_break());
        tree.zap(&ram, AddrRange::new(0, 1), &mut |_, _| ());
    });
}

fn zap_waits_for_nothing_it_does_not_meet<F: Format>() {
    TestMachine::<F>::with_tree(16, |machine, cpu, tree| {
        let pin = cpu.pin();
        let ram = machine.ram(&pin);
        let table = tree.make_leaf_table(&ram, 0).unwrap();
        let (before, behind) = (table[9].take(EMPTY).unwrap(), table[12].take(EMPTY).unwrap());
        table[10].fill(page::<F>(1));
        table[11].fill(Pte::Guard.encode::<F>());
        let mut gone = Vec::new();
        tree.zap(&ram, AddrRange::new(10 * PAGE_SIZE, 12 * PAGE_SIZE), &mut |addr, pte| {
            gone.push((addr, pte))
        });
        assert_eq!(gone.len(), 2);
        assert_eq!(gone[1], (11 * PAGE_SIZE, Pte::Guard));
        drop((before, behind));
    });
}
