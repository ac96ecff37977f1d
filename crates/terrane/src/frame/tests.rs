//! Tests of the allocator as a whole: nothing is lost, nothing is handed out twice.

use super::*;
use crate::addr::Frame;
use crate::host::Ticket;
use crate::sync::CpuId;
use crate::sync::atomic::Ordering;
use crate::testing::Rig;
use alloc::{vec, vec::Vec};
use core::cell::Cell;
use proptest::prelude::*;
use std::collections::BTreeSet;

const ALL_PASSED: &dyn Fn(CpuId, Ticket) -> bool = &|_, _| true;

#[test]
fn every_frame_is_handed_out_once_and_then_none() {
    // Sizes around those of a batch, a cache and a block; ranges that begin anywhere in a block.
    for (first, count) in [(0, 0), (0, 1), (7, 63), (511, 2), (300, 513), (512, 1024), (0x12345, 3000)] {
        let rig = Rig::starting_at(Frame(first), count, 2);
        let me = rig.epoch.register().unwrap();
        let pin = me.pin();
        for round in 0..3 {
            let mut seen = BTreeSet::new();
            while let Some(frame) = rig.frames.allocate(&pin) {
                assert!(rig.frames.contains(frame));
                assert_eq!(rig.frames.meta(frame).references(), 1);
                assert!(seen.insert(frame), "{frame:?} twice");
            }
            assert_eq!((seen.len(), rig.frames.free_frames()), (count, 0));
            assert_eq!(rig.frames.allocate_block(&pin), None);
            for &frame in &seen {
                rig.frames.free(&pin, frame);
            }
            assert_eq!(rig.frames.free_frames(), count, "round {round}");
        }
    }
}

#[test]
fn what_is_freed_last_comes_first() {
    let rig = Rig::new(4096, 1);
    let me = rig.epoch.register().unwrap();
    let pin = me.pin();
    let frames: Vec<_> = (0..100).map(|_| rig.frames.allocate(&pin).unwrap()).collect();
    frames.iter().for_each(|&frame| rig.frames.free(&pin, frame));
    for &frame in frames.iter().rev() {
        assert_eq!(rig.frames.allocate(&pin), Some(frame));
    }
}

#[test]
fn a_loop_over_512_pages_stays_in_the_cache() {
    let rig = Rig::new(64 << 10, 2);
    let me = rig.epoch.register().unwrap();
    let pin = me.pin();
    let mut in_limbo = FrameList::new();
    let mut cached = None;
    for round in 0..10 {
        let mut mapped = FrameList::new();
        for _ in 0..512 {
            let frame = rig.frames.allocate(&pin).unwrap();
            mapped.push(&rig.frames, frame);
        }
        // The frames of the round before come back only now.
        rig.frames.defer(&pin, core::mem::take(&mut in_limbo), Grace { epoch: None, ticket: Ticket::PASSED });
        rig.frames.settle(&pin, ALL_PASSED);
        in_limbo = mapped;
        if round >= 2 {
            let now = rig.frames.cached(pin.cpu());
            assert_eq!(*cached.get_or_insert(now), now, "the pool was reached");
        }
    }
    while let Some(frame) = in_limbo.pop(&rig.frames) {
        rig.frames.free(&pin, frame);
    }
    assert_eq!(rig.frames.free_frames(), rig.frames.total());
}

#[test]
fn the_cache_of_an_idle_cpu_is_drained_and_that_of_a_busy_one_is_not() {
    let rig = Rig::new(256, 2);
    let (a, b) = (rig.epoch.register().unwrap(), rig.epoch.register().unwrap());
    let held: Vec<_> = {
        let pin = b.pin();
        let frames: Vec<_> = core::iter::from_fn(|| rig.frames.allocate(&pin)).collect();
        frames.iter().take(5).for_each(|&frame| rig.frames.free(&pin, frame));
        assert_eq!(rig.frames.cached(b.id()), 5);
        frames[5..].into()
    };
    let pin = a.pin();
    let busy = b.pin();
    assert_eq!(rig.frames.allocate(&pin), None);
    drop(busy);
    let found: Vec<_> = core::iter::from_fn(|| rig.frames.allocate(&pin)).collect();
    assert_eq!(found.len(), 5);
    held.into_iter().chain(found).for_each(|frame| rig.frames.free(&pin, frame));
    rig.frames.drain_cpu(&pin);
    assert_eq!((rig.frames.cached(a.id()), rig.frames.free_frames()), (0, 256));
}

#[test]
fn blocks_form_again() {
    // Two whole blocks between two halves.
    let rig = Rig::starting_at(Frame(256), 1536, 2);
    let (a, b) = (rig.epoch.register().unwrap(), rig.epoch.register().unwrap());
    let pin = a.pin();
    for _ in 0..3 {
        let one = rig.frames.allocate_block(&pin).unwrap();
        let two = rig.frames.allocate_block(&pin).unwrap();
        assert_eq!([one.0.min(two.0), one.0.max(two.0)], [512, 1024]);
        assert_eq!(rig.frames.allocate_block(&pin), None);
        rig.frames.free_block(&pin, one);
        // The other one comes back frame by frame, through the caches of both CPUs.
        {
            let other = b.pin();
            for frame in two.0..two.0 + 512 {
                rig.frames.free(if frame % 2 == 0 { &pin } else { &other }, Frame(frame));
            }
        }
        assert_eq!(rig.frames.free_frames(), 1536);
        // Small allocations leave the whole block alone as long as others will do.
        let small: Vec<_> = (0..512).map(|_| rig.frames.allocate(&pin).unwrap()).collect();
        let block = rig.frames.allocate_block(&pin).unwrap();
        rig.frames.free_block(&pin, block);
        small.into_iter().for_each(|frame| rig.frames.free(&pin, frame));
    }
}

#[test]
fn limbo_keeps_its_order_and_waits_for_both() {
    let rig = Rig::new(4096, 2);
    let (a, b) = (rig.epoch.register().unwrap(), rig.epoch.register().unwrap());
    let reached = Cell::new(0);
    let has_passed = |cpu: CpuId, ticket: Ticket| {
        assert_eq!(cpu, a.id());
        ticket.0 <= reached.get()
    };
    let mut stamps = Vec::new();
    {
        let pin = a.pin();
        for (ticket, count) in [(1, 1), (2, 100), (3, 2)] {
            let mut list = FrameList::new();
            for _ in 0..count {
                list.push(&rig.frames, rig.frames.allocate(&pin).unwrap());
            }
            let epoch = (ticket != 3).then(|| rig.epoch.now());
            stamps.push(Grace { epoch, ticket: Ticket(ticket) });
            rig.frames.defer(&pin, list, stamps[stamps.len() - 1]);
        }
        rig.frames.defer(&pin, FrameList::new(), stamps[0]);
        assert_eq!(rig.frames.oldest_deferred(&pin), Some(stamps[0]));
        assert_eq!((rig.frames.deferred(a.id()), rig.frames.deferred_frames()), (103, 103));
        assert_eq!(rig.frames.free_frames(), 4096 - 103);
        // The ticket alone is not enough for the first, nor is anything for those behind it.
        reached.set(9);
        assert_eq!(rig.frames.settle(&pin, &has_passed), 0);
        reached.set(0);
    }
    rig.epoch.try_advance();
    rig.epoch.try_advance();
    {
        let pin = a.pin();
        // Nor is the epoch.
        assert_eq!(rig.frames.settle(&pin, &has_passed), 0);
        reached.set(1);
        assert_eq!(rig.frames.settle(&pin, &has_passed), 1);
        assert_eq!(rig.frames.oldest_deferred_by(&pin), Some((a.id(), stamps[1])));
    }
    // The CPU leaves; another frees the rest, by the tickets of the first.
    let pin = b.pin();
    assert_eq!(rig.frames.take_over(&pin, a.id()), Some(102));
    assert_eq!((rig.frames.deferred(a.id()), rig.frames.deferred(b.id())), (0, 102));
    assert_eq!(rig.frames.take_over(&pin, a.id()), Some(0));
    assert_eq!(rig.frames.settle(&pin, &has_passed), 0);
    reached.set(3);
    assert_eq!(rig.frames.settle(&pin, &has_passed), 102);
    assert_eq!((rig.frames.deferred_frames(), rig.frames.free_frames()), (0, 4096));
    assert_eq!(rig.frames.oldest_deferred(&pin), None);
}

#[test]
fn a_stamp_is_never_taken_for_an_earlier_one() {
    let rig = Rig::new(64, 1);
    let me = rig.epoch.register().unwrap();
    let defer = |epoch| {
        let pin = me.pin();
        let mut list = FrameList::new();
        list.push(&rig.frames, rig.frames.allocate(&pin).unwrap());
        rig.frames.defer(&pin, list, Grace { epoch, ticket: Ticket::PASSED });
    };
    let stamp = rig.epoch.now();
    defer(Some(stamp));
    // Long enough in limbo for the 15 bits to come round.
    for _ in 0..(1 << 15) + 1 {
        assert!(rig.epoch.try_advance());
    }
    let pin = me.pin();
    let seen = rig.frames.oldest_deferred(&pin).unwrap().epoch.unwrap();
    assert!(seen >= stamp && seen <= rig.epoch.now());
    assert_eq!(rig.frames.settle(&pin, ALL_PASSED), 0);
    drop(pin);
    rig.epoch.try_advance();
    let pin = me.pin();
    assert_eq!(rig.frames.settle(&pin, ALL_PASSED), 1);
}

#[test]
fn lists_keep_their_order() {
    let rig = Rig::new(100, 1);
    let me = rig.epoch.register().unwrap();
    let pin = me.pin();
    let frames: Vec<_> = (0..10).map(|_| rig.frames.allocate(&pin).unwrap()).collect();
    let (mut one, mut two) = (FrameList::new(), FrameList::new());
    one.append(&rig.frames, FrameList::new());
    frames[..4].iter().for_each(|&frame| one.push(&rig.frames, frame));
    frames[4..].iter().for_each(|&frame| two.push(&rig.frames, frame));
    one.append(&rig.frames, two);
    let mut all = FrameList::new();
    all.append(&rig.frames, one);
    assert_eq!(all.len(), 10);
    for &frame in &frames {
        assert_eq!(all.pop(&rig.frames), Some(frame));
        assert_eq!(rig.frames.meta(frame).index(), 0);
    }
    assert!(all.is_empty() && all.pop(&rig.frames).is_none());
}

/// A step of the model-based test; the first number is the CPU.
#[derive(Clone, Debug)]
enum Step {
    Allocate(usize, usize),
    Free(usize, usize),
    AllocateBlock(usize),
    FreeBlock(usize),
    BreakBlock,
    Defer(usize, usize, Option<()>, u64),
    Settle(usize),
    TakeOver(usize),
    Drain(usize),
    Advance,
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let cpu = 0..2usize;
    prop_oneof![
        6 => (cpu.clone(), 1..200usize).prop_map(|(cpu, count)| Step::Allocate(cpu, count)),
        5 => (cpu.clone(), 1..200usize).prop_map(|(cpu, count)| Step::Free(cpu, count)),
        2 => cpu.clone().prop_map(Step::AllocateBlock),
        1 => cpu.clone().prop_map(Step::FreeBlock),
        1 => Just(Step::BreakBlock),
        3 => (cpu.clone(), 0..100usize, prop::option::of(Just(())), 0..40u64)
            .prop_map(|(cpu, count, epoch, ticket)| Step::Defer(cpu, count, epoch, ticket)),
        3 => cpu.clone().prop_map(Step::Settle),
        1 => cpu.clone().prop_map(Step::TakeOver),
        1 => cpu.prop_map(Step::Drain),
        2 => Just(Step::Advance),
        2 => (1..10u64).prop_map(Step::Pass),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// After every step, each frame is free, held or deferred; in the end all are free and all blocks whole.
    #[test]
    fn frames_are_conserved(first in 0..1024u32, count in 0..2600usize, steps in prop::collection::vec(step(), 1..80)) {
        let rig = Rig::starting_at(Frame(first), count, 2);
        let frames = &rig.frames;
        let cpus = [rig.epoch.register().unwrap(), rig.epoch.register().unwrap()];
        let mut held: Vec<Frame> = Vec::new();
        let mut blocks: Vec<Frame> = Vec::new();
        let mut own = BTreeSet::new();
        // For each batch, oldest first, of each CPU: frames and grace.
        let mut limbo: [Vec<(Vec<Frame>, Grace)>; 2] = Default::default();
        let mut passed = 0;
        for step in steps {
            match step {
                Step::Allocate(cpu, n) => {
                    let pin = cpus[cpu].pin();
                    for _ in 0..n {
                        let Some(frame) = frames.allocate(&pin) else {
                            prop_assert_eq!(frames.free_frames(), 0);
                            break;
                        };
                        prop_assert!(own.insert(frame));
                        let meta = frames.meta(frame);
                        prop_assert_eq!((meta.references(), meta.index(), meta.spare()), (1, 0, 0));
                        prop_assert!(meta.owner().is_null() && meta.flags().is_empty());
                        held.push(frame);
                    }
                }
                Step::Free(cpu, n) => {
                    let pin = cpus[cpu].pin();
                    for frame in held.drain(held.len().saturating_sub(n)..) {
                        own.remove(&frame);
                        frames.free(&pin, frame);
                    }
                }
                Step::AllocateBlock(cpu) => {
                    let pin = cpus[cpu].pin();
                    if let Some(block) = frames.allocate_block(&pin) {
                        prop_assert_eq!(block.0 % 512, 0);
                        for frame in block.0..block.0 + 512 {
                            prop_assert!(frames.contains(Frame(frame)) && own.insert(Frame(frame)));
                        }
                        blocks.push(block);
                    } else {
                        // No CPU is busy, so every block must really lack a frame.
                        let whole = (first.div_ceil(512)..(first + count as u32) / 512).find(|block| {
                            (block * 512..block * 512 + 512).all(|frame| {
                                let deferred = limbo.iter().flatten().any(|(batch, _)| batch.contains(&Frame(frame)));
                                !own.contains(&Frame(frame)) && !deferred
                            })
                        });
                        prop_assert_eq!(whole, None);
                    }
                }
                Step::FreeBlock(cpu) => {
                    if let Some(block) = blocks.pop() {
                        own.retain(|frame| frame.0 / 512 != block.0 / 512 );
                        frames.free_block(&cpus[cpu].pin(), block);
                    }
                }
                Step::BreakBlock => {
                    if let Some(block) = blocks.pop() {
                        held.extend((block.0..block.0 + 512).map(Frame));
                    }
                }
                Step::Defer(cpu, n, epoch, ticket) => {
                    let pin = cpus[cpu].pin();
                    let batch: Vec<_> = held.drain(held.len().saturating_sub(n)..).collect();
                    let mut list = FrameList::new();
                    for &frame in &batch {
                        own.remove(&frame);
                        list.push(frames, frame);
                    }
                    // The CPU in the ticket, to see that it stays with the batch.
                    let ticket = Ticket(if ticket == 0 { 0 } else { ticket << 1 | cpu as u64 });
                    let grace = Grace { epoch: epoch.map(|()| rig.epoch.now()), ticket };
                    frames.defer(&pin, list, grace);
                    if !batch.is_empty() {
                        limbo[cpu].push((batch, grace));
                    }
                }
                Step::Settle(cpu) => {
                    let pin = cpus[cpu].pin();
                    let has_passed = |cpu: CpuId, ticket: Ticket| {
                        assert_eq!(ticket.0 & 1, u64::from(cpu.0));
                        ticket.0 >> 1 <= passed
                    };
                    let over = limbo[cpu].iter().take_while(|(_, grace)| {
                        grace.ticket.0 >> 1 <= passed && grace.epoch.is_none_or(|stamp| rig.epoch.has_passed(stamp))
                    });
                    let over = over.count();
                    let expected: usize = limbo[cpu].drain(..over).map(|(batch, _)| batch.len()).sum();
                    prop_assert_eq!(frames.settle(&pin, &has_passed), expected);
                    prop_assert_eq!(frames.oldest_deferred(&pin), limbo[cpu].first().map(|(_, grace)| *grace));
                }
                Step::TakeOver(cpu) => {
                    let pin = cpus[cpu].pin();
                    let from: Vec<_> = limbo[1 - cpu].drain(..).collect();
                    let moved = from.iter().map(|(batch, _)| batch.len()).sum();
                    prop_assert_eq!(frames.take_over(&pin, cpus[1 - cpu].id()), Some(moved));
                    limbo[cpu].extend(from);
                }
                Step::Drain(cpu) => {
                    frames.drain_cpu(&cpus[cpu].pin());
                    prop_assert_eq!(frames.cached(cpus[cpu].id()), 0);
                }
                Step::Advance => {
                    rig.epoch.try_advance();
                }
                Step::Pass(more) => passed += more,
            }
            let deferred: usize = limbo.iter().flatten().map(|(batch, _)| batch.len()).sum();
            prop_assert_eq!(frames.deferred_frames(), deferred);
            prop_assert_eq!(frames.free_frames() + deferred + held.len() + blocks.len() * 512, count);
        }
        rig.epoch.try_advance();
        rig.epoch.try_advance();
        let pin = cpus[0].pin();
        held.into_iter().for_each(|frame| frames.free(&pin, frame));
        blocks.into_iter().for_each(|block| frames.free_block(&pin, block));
        frames.take_over(&pin, cpus[1].id());
        frames.settle(&pin, ALL_PASSED);
        prop_assert_eq!((frames.free_frames(), frames.deferred_frames()), (count, 0));
        let whole = ((first + count as u32) / 512).saturating_sub(first.div_ceil(512)) as usize;
        let again: Vec<_> = core::iter::from_fn(|| frames.allocate_block(&pin)).collect();
        prop_assert_eq!(again.len(), whole);
        let rest = core::iter::from_fn(|| frames.allocate(&pin)).count();
        prop_assert_eq!(rest, count - whole * 512);
    }
}

#[test]
fn threads_never_get_one_frame() {
    const FRAMES: usize = 1700;
    let rig = Rig::new(FRAMES, 4);
    std::thread::scope(|scope| {
        for id in 1..=3u64 {
            let rig = &rig;
            scope.spawn(move || {
                let me = rig.epoch.register().unwrap();
                let mut held = Vec::new();
                let mut random = id;
                for _ in 0..3000 {
                    random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let (choice, count) = (random >> 60, (random >> 40) as usize % 300);
                    let pin = me.pin();
                    let ram = rig.ram(&pin);
                    let take = |frame: Frame| {
                        let mark = &ram.table(frame)[7];
                        assert_eq!(mark.swap(id, Ordering::Relaxed), 0, "{frame:?} has another holder");
                        frame
                    };
                    let give = |frame: Frame| {
                        let mark = &ram.table(frame)[7];
                        assert_eq!(mark.swap(0, Ordering::Relaxed), id, "{frame:?} was taken away");
                        frame
                    };
                    match choice {
                        0..=6 => {
                            for _ in 0..count {
                                let Some(frame) = ram.allocate() else { break };
                                held.push(take(frame));
                            }
                        }
                        7 => {
                            if let Some(block) = rig.frames.allocate_block(&pin) {
                                let mut frames = (block.0..block.0 + 512).map(Frame);
                                frames
                                    .clone()
                                    .map(take)
                                    .for_each(|frame| assert!(frame.0 / 512 == block.0 / 512));
                                assert!(frames.all(|frame| give(frame) == frame));
                                rig.frames.free_block(&pin, block);
                            }
                        }
                        8..=10 => {
                            let mut list = FrameList::new();
                            for frame in held.drain(held.len().saturating_sub(count)..) {
                                list.push(&rig.frames, give(frame));
                            }
                            ram.defer(list, Grace { epoch: Some(rig.epoch.now()), ticket: Ticket::PASSED });
                        }
                        11 => {
                            rig.frames.settle(&pin, ALL_PASSED);
                        }
                        _ => {
                            for frame in held.drain(held.len().saturating_sub(count)..) {
                                ram.free(give(frame));
                            }
                        }
                    }
                    drop(pin);
                    rig.epoch.try_advance();
                }
                let pin = me.pin();
                let ram = rig.ram(&pin);
                for frame in held {
                    ram.table(frame)[7].store(0, Ordering::Relaxed);
                    ram.free(frame);
                }
            });
        }
    });
    rig.epoch.try_advance();
    rig.epoch.try_advance();
    let me = rig.epoch.register().unwrap();
    let pin = me.pin();
    for cpu in 0..3 {
        rig.frames.take_over(&pin, CpuId(cpu));
    }
    rig.frames.settle(&pin, ALL_PASSED);
    assert_eq!((rig.frames.free_frames(), rig.frames.deferred_frames()), (FRAMES, 0));
    let mut seen = BTreeSet::new();
    while let Some(frame) = rig.frames.allocate(&pin) {
        assert!(seen.insert(frame));
    }
    assert_eq!(seen.len(), FRAMES);
}
