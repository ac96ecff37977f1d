//! Where memory comes from, on a machine of several nodes.

use super::Bench;
use crate::addr::{Frame, PAGE_SHIFT, PAGE_SIZE};
use crate::error::{Error, FaultError};
use crate::frame::{Node, NodeMask};
use crate::host::FrameRange;
use crate::mm::BLOCK_SIZE;
use crate::object::Object;
use crate::space::{HugePages, MapRequest, Policy, PolicyFlags, PolicyMode, SpaceConfig};
use crate::stats::Counter;
use crate::sync::CpuId;
use crate::testing::{TestHost, TestSwap};
use crate::vma::{Advice, Prot};
use alloc::boxed::Box;
use alloc::vec::Vec;

const RW: Prot = Prot::READ.union(Prot::WRITE);

/// Three nodes: of 600, 900 and 100 frames.
fn bench() -> Bench {
    let bench = Bench::on(TestHost::new(1, 1600), 4);
    let node = |first, count, cpus| Node { frames: FrameRange { first: Frame(first), count }, cpus };
    let nodes = [node(1, 600, &[][..]), node(601, 900, &[CpuId(0), CpuId(1)]), node(1501, 100, &[CpuId(2)])];
    let frames = bench.machine.frames();
    assert_eq!(frames.set_nodes(&[]), Err(Error::Invalid));
    assert_eq!(frames.set_nodes(&[nodes[0], nodes[0]]), Err(Error::Invalid));
    assert_eq!(frames.set_nodes(&[node(1, 1601, &[])]), Err(Error::Invalid));
    assert_eq!((frames.nodes(), frames.node_of(Frame(700))), (NodeMask(1), 0));
    frames.set_nodes(&nodes).unwrap();
    assert_eq!(frames.set_nodes(&nodes), Err(Error::Exists));
    assert_eq!(frames.nodes(), NodeMask(7));
    assert_eq!([1, 600, 601, 1500, 1501, 1600].map(|n| frames.node_of(Frame(n))), [0, 0, 1, 1, 2, 2]);
    bench
}

fn policy(mode: PolicyMode, nodes: u32) -> Policy {
    Policy { mode, nodes: NodeMask(nodes) }
}

#[test]
fn pages_are_made_where_the_policy_says() {
    let bench = bench();
    let cpu = &bench.cpu;
    let space = bench.space(SpaceConfig::default());
    let at = space.map(cpu, MapRequest::anonymous(40 * PAGE_SIZE, RW)).unwrap();
    let set = |from: u64, to: u64, policy, flags| {
        space.set_policy(cpu, at + from * PAGE_SIZE, (to - from) * PAGE_SIZE, policy, flags)
    };
    set(0, 10, policy(PolicyMode::Bind, 1), PolicyFlags::empty()).unwrap();
    set(10, 20, policy(PolicyMode::Interleave, 5), PolicyFlags::empty()).unwrap();
    set(20, 30, policy(PolicyMode::Preferred, 4), PolicyFlags::empty()).unwrap();
    assert_eq!(space.mappings(cpu).unwrap().len(), 4);
    // Alike again: one mapping again.
    set(0, 30, Policy::DEFAULT, PolicyFlags::empty()).unwrap();
    assert_eq!(space.mappings(cpu).unwrap().len(), 1);
    set(0, 10, policy(PolicyMode::Bind, 1), PolicyFlags::empty()).unwrap();
    set(10, 20, policy(PolicyMode::Interleave, 5), PolicyFlags::empty()).unwrap();
    set(20, 30, policy(PolicyMode::Preferred, 4), PolicyFlags::empty()).unwrap();
    for n in 0..40 {
        bench.store(&space, at + n * PAGE_SIZE, n).unwrap();
    }
    let node = |n: u64| space.node_at(cpu, at + n * PAGE_SIZE).unwrap();
    for n in 0..10 {
        let turn = [0, 2][((at >> PAGE_SHIFT) + n + 10) as usize % 2];
        assert_eq!((node(n), node(n + 10), node(n + 20), node(n + 30)), (0, turn, 2, 1), "page {n}");
    }
    assert_eq!(space.policy_at(cpu, at + 9 * PAGE_SIZE), Ok(policy(PolicyMode::Bind, 1)));
    assert_eq!(space.policy_at(cpu, at + 35 * PAGE_SIZE), Ok(Policy::DEFAULT));
    assert_eq!(space.policy_at(cpu, at + 40 * PAGE_SIZE), Err(Error::BadAddress));
    // A child has the policies of its parent, and copies by them.
    set(0, 40, policy(PolicyMode::Bind, 4), PolicyFlags::empty()).unwrap();
    let child = space.fork(cpu).unwrap();
    bench.store(&child, at, 1).unwrap();
    assert_eq!((child.node_at(cpu, at), node(0)), (Some(2), 0));
    space.set_own_policy(cpu, policy(PolicyMode::Interleave, 3)).unwrap();
    assert_eq!((space.own_policy().nodes, child.own_policy()), (NodeMask(3), Policy::DEFAULT));
    let more = space.map(cpu, MapRequest::anonymous(4 * PAGE_SIZE, RW)).unwrap();
    for n in 0..4 {
        bench.store(&space, more + n * PAGE_SIZE, n).unwrap();
        assert_eq!(space.node_at(cpu, more + n * PAGE_SIZE), Some(((more >> PAGE_SHIFT) + n) as usize % 2));
    }
    space.destroy(cpu);
    child.destroy(cpu);
    bench.assert_nothing_left();
}

#[test]
fn misplaced_pages_are_told_of_or_moved() {
    let bench = bench();
    let cpu = &bench.cpu;
    let space = bench.space(SpaceConfig::default());
    let at = space.map(cpu, MapRequest::anonymous(200 * PAGE_SIZE, RW)).unwrap();
    let len = 200 * PAGE_SIZE;
    for n in 0..200 {
        bench.store(&space, at + n * PAGE_SIZE, n).unwrap();
    }
    let node = |n: u64| space.node_at(cpu, at + n * PAGE_SIZE).unwrap();
    let bind = |nodes| policy(PolicyMode::Bind, nodes);
    assert_eq!(space.set_policy(cpu, at, len, bind(1), PolicyFlags::STRICT), Err(Error::Io));
    assert_eq!((space.policy_at(cpu, at), node(7)), (Ok(Policy::DEFAULT), 1));
    space.set_policy(cpu, at, len, bind(1), PolicyFlags::STRICT | PolicyFlags::MOVE).unwrap();
    assert!((0..200).all(|n| node(n) == 0 && bench.load(&space, at + n * PAGE_SIZE) == Ok(n)));
    assert_eq!(bench.machine.stats().sum(Counter::PgMigrate), 200);
    // Shared pages stay, unless asked for.
    let child = space.fork(cpu).unwrap();
    let all = PolicyFlags::STRICT | PolicyFlags::MOVE_ALL;
    assert_eq!(
        space.set_policy(cpu, at, len, bind(2), PolicyFlags::STRICT | PolicyFlags::MOVE),
        Err(Error::Io)
    );
    assert_eq!(space.set_policy(cpu, at, len, bind(2), all), Ok(()));
    assert!((0..200).all(|n| node(n) == 1 && child.node_at(cpu, at + n * PAGE_SIZE) == Some(1)));
    // A node that is too small.
    assert_eq!(space.set_policy(cpu, at, len, bind(4), all), Err(Error::Io));
    let there: Vec<_> = (0..200).map(node).collect();
    assert!(there.iter().filter(|&&node| node == 2).count() >= 80);
    assert!((0..200).all(|n| bench.load(&child, at + n * PAGE_SIZE) == Ok(n)));
    // Arguments.
    let none = PolicyFlags::empty();
    assert_eq!(space.set_policy(cpu, at + 1, 1, bind(1), none), Err(Error::Invalid));
    assert_eq!(space.set_policy(cpu, at, 1, bind(8), none), Err(Error::Invalid));
    assert_eq!(space.set_policy(cpu, at, 1, bind(0), none), Err(Error::Invalid));
    assert_eq!(space.set_policy(cpu, at, 1, policy(PolicyMode::Default, 1), none), Err(Error::Invalid));
    assert_eq!(space.set_policy(cpu, at + len, PAGE_SIZE, bind(1), none), Err(Error::BadAddress));
    assert_eq!(space.set_policy(cpu, at, 0, bind(1), none), Ok(()));
    space.destroy(cpu);
    child.destroy(cpu);
    bench.assert_nothing_left();
}

#[test]
fn memory_bound_to_a_full_node_is_swapped_and_others_stay() {
    let bench = bench();
    let cpu = &bench.cpu;
    let space = bench.space(SpaceConfig::default());
    let far = space.map(cpu, MapRequest::anonymous(300 * PAGE_SIZE, RW)).unwrap();
    for n in 0..300 {
        bench.store(&space, far + n * PAGE_SIZE, n).unwrap();
    }
    let at = space.map(cpu, MapRequest::anonymous(250 * PAGE_SIZE, RW)).unwrap();
    space.set_policy(cpu, at, 250 * PAGE_SIZE, policy(PolicyMode::Bind, 4), PolicyFlags::empty()).unwrap();
    // Without swap it is an error, though other nodes have memory.
    let full = (0..250).find(|n| bench.store(&space, at + n * PAGE_SIZE, *n).is_err()).unwrap();
    assert!(full > 80 && full <= 100, "{full}");
    assert_eq!(bench.store(&space, at + full * PAGE_SIZE, 1), Err(FaultError::OutOfMemory));
    bench.machine.swap_on(Box::new(TestSwap::new(1024))).unwrap();
    for n in 0..250 {
        bench.store(&space, at + n * PAGE_SIZE, n).unwrap();
    }
    assert!(bench.machine.stats().sum(Counter::PswpOut) >= 150);
    for n in 0..300 {
        assert!(space.translate(cpu, far + n * PAGE_SIZE, crate::vma::Access::Read).is_some());
    }
    for n in 0..250 {
        assert_eq!(bench.load(&space, at + n * PAGE_SIZE), Ok(n));
    }
    space.destroy(cpu);
    bench.assert_nothing_left();
}

#[test]
fn pages_of_shared_memory_come_by_the_policies_of_the_object() {
    let bench = bench();
    let cpu = &bench.cpu;
    let space = bench.space(SpaceConfig::default());
    let at = space.map(cpu, MapRequest::shared_anonymous(40 * PAGE_SIZE, RW)).unwrap();
    let set = |from: u64, to: u64, policy, flags| {
        space.set_policy(cpu, at + from * PAGE_SIZE, (to - from) * PAGE_SIZE, policy, flags)
    };
    let node = |n: u64| space.node_at(cpu, at + n * PAGE_SIZE);
    set(0, 10, policy(PolicyMode::Bind, 1), PolicyFlags::empty()).unwrap();
    set(10, 20, policy(PolicyMode::Interleave, 5), PolicyFlags::empty()).unwrap();
    set(20, 30, policy(PolicyMode::Preferred, 4), PolicyFlags::empty()).unwrap();
    for n in 0..40 {
        if n % 2 == 0 {
            bench.store(&space, at + n * PAGE_SIZE, n).unwrap();
        }
        assert_eq!(bench.load(&space, at + n * PAGE_SIZE), Ok(if n % 2 == 0 { n } else { 0 }));
    }
    for n in 0..10 {
        let turn = [0, 2][n as usize % 2];
        let nodes = [node(n), node(n + 10), node(n + 20), node(n + 30)];
        assert_eq!(nodes, [Some(0), Some(turn), Some(2), Some(1)], "page {n}");
    }
    // They move as others do.
    set(0, 40, policy(PolicyMode::Interleave, 3), PolicyFlags::MOVE | PolicyFlags::STRICT).unwrap();
    for n in 0..40 {
        // Not mapped before it is touched.
        assert_eq!(bench.load(&space, at + n * PAGE_SIZE), Ok(if n % 2 == 0 { n } else { 0 }));
        assert_eq!(node(n), Some(n as usize % 2));
    }
    // A node that is full is none, for who is bound to it.
    let more = space.map(cpu, MapRequest::shared_anonymous(200 * PAGE_SIZE, RW)).unwrap();
    space.set_policy(cpu, more, 200 * PAGE_SIZE, policy(PolicyMode::Bind, 4), PolicyFlags::empty()).unwrap();
    let end = (0..200).find(|n| bench.store(&space, more + n * PAGE_SIZE, 1).is_err()).unwrap();
    assert!(end > 80 && end <= 100, "{end}");
    assert_eq!(bench.store(&space, more + end * PAGE_SIZE, 1), Err(FaultError::OutOfMemory));
    space.destroy(cpu);
    bench.assert_nothing_left();
}

#[test]
fn policies_of_shared_memory_hold_for_all_of_its_mappings() {
    let bench = bench();
    let cpu = &bench.cpu;
    let (one, two) = (bench.space(SpaceConfig::default()), bench.space(SpaceConfig::default()));
    let memory = Object::shared_memory(&bench.machine, 40 * PAGE_SIZE).unwrap();
    let show = |space: &super::Space, from: u64, to: u64, shared| {
        let len = (to - from) * PAGE_SIZE;
        space.map(cpu, MapRequest::object(&memory, from * PAGE_SIZE, len, RW, shared)).unwrap()
    };
    let (bind, none) = (|nodes| policy(PolicyMode::Bind, nodes), PolicyFlags::empty());
    let at = show(&one, 10, 30, true);
    one.set_policy(cpu, at, 10 * PAGE_SIZE, bind(1), none).unwrap();
    // Through another mapping of other pages, in another space, and later.
    let other = show(&two, 0, 40, true);
    two.set_own_policy(cpu, bind(4)).unwrap();
    let at_two = |n: u64| two.policy_at(cpu, other + n * PAGE_SIZE).unwrap();
    assert_eq!([5, 10, 19, 20].map(at_two), [bind(4), bind(1), bind(1), bind(4)]);
    for n in 0..40 {
        bench.store(&two, other + n * PAGE_SIZE, n).unwrap();
        assert_eq!(two.node_at(cpu, other + n * PAGE_SIZE), Some(if (10..20).contains(&n) { 0 } else { 2 }));
    }
    // What is set last counts, whoever sets it; and it stays when its mapping goes.
    two.set_policy(cpu, other + 15 * PAGE_SIZE, 10 * PAGE_SIZE, bind(2), none).unwrap();
    assert_eq!([9, 14].map(|n| one.policy_at(cpu, at + n * PAGE_SIZE)), [Ok(bind(2)); 2]);
    two.destroy(cpu);
    let later = show(&one, 0, 40, true);
    assert_eq!(
        [14, 15, 24, 25].map(|n| one.policy_at(cpu, later + n * PAGE_SIZE).unwrap().nodes.0),
        [1, 2, 2, 0]
    );
    one.set_policy(cpu, later, 40 * PAGE_SIZE, bind(1), none).unwrap();
    one.set_policy(cpu, later, 40 * PAGE_SIZE, Policy::DEFAULT, none).unwrap();
    assert_eq!(one.policy_at(cpu, at), Ok(Policy::DEFAULT), "gone for all");
    // More ranges than an object has places for.
    let refused = (0..40).find(|n| {
        one.set_policy(cpu, later + n * PAGE_SIZE, PAGE_SIZE, bind(1 + *n as u32 % 2), none).is_err()
    });
    assert_eq!(refused, Some(32));
    one.destroy(cpu);
    drop(memory);
    bench.assert_nothing_left();
}

/// Two nodes of three blocks each and a little more, for CPUs in the second one.
fn bench_for_blocks() -> Bench {
    let bench = Bench::on(TestHost::new(1, 4200), 4);
    let node = |first, count, cpus| Node { frames: FrameRange { first: Frame(first), count }, cpus };
    let nodes = [node(1, 2100, &[][..]), node(2101, 2100, &[CpuId(0), CpuId(1), CpuId(2), CpuId(3)])];
    bench.machine.frames().set_nodes(&nodes).unwrap();
    bench
}

#[test]
fn huge_pages_come_from_where_the_policy_says() {
    let bench = bench_for_blocks();
    let cpu = &bench.cpu;
    let config = SpaceConfig { huge_pages: HugePages::Always, ..SpaceConfig::default() };
    let at = 1 << 30;
    // What each of four blocks gets: its node, and whether it is one.
    let touched = |policy: Policy, advice: Option<Advice>| {
        let space = bench.space(config);
        space.map(cpu, MapRequest::anonymous(4 * BLOCK_SIZE, RW).fixed(at)).unwrap();
        space.set_policy(cpu, at, 4 * BLOCK_SIZE, policy, PolicyFlags::empty()).unwrap();
        if let Some(advice) = advice {
            space.advise(cpu, at, 4 * BLOCK_SIZE, advice).unwrap();
        }
        let found: Vec<_> = (0..4)
            .map(|n| {
                let addr = at + n * BLOCK_SIZE + 5 * PAGE_SIZE;
                bench.store(&space, addr, n).unwrap();
                let last = space.node_at(cpu, addr + PAGE_SIZE);
                assert!(last.is_none() || last == space.node_at(cpu, addr), "one block, two nodes");
                (space.node_at(cpu, addr).unwrap(), last.is_some())
            })
            .collect();
        space.destroy(cpu);
        cpu.quiesce();
        found
    };
    let [node, other] = [0, 1].map(|node| (node, true));
    // Three blocks are there on each node.
    assert_eq!(touched(Policy::DEFAULT, None), [other, other, other, node]);
    assert_eq!(touched(policy(PolicyMode::Bind, 1), None), [node, node, node, (0, false)]);
    assert_eq!(touched(policy(PolicyMode::Bind, 3), None), [node, node, node, other]);
    assert_eq!(touched(policy(PolicyMode::Preferred, 1), None), [node, node, node, (0, false)]);
    assert_eq!(touched(policy(PolicyMode::Preferred, 1), Some(Advice::HugePage)), [node, node, node, other]);
    assert_eq!(touched(policy(PolicyMode::Interleave, 3), None), [node, other, node, other]);
    assert_eq!(touched(policy(PolicyMode::Interleave, 1), None), [node, node, node, (0, false)]);
    bench.assert_nothing_left();
}

#[test]
fn huge_pages_elsewhere_are_told_of_or_moved_page_by_page() {
    let bench = bench_for_blocks();
    let cpu = &bench.cpu;
    let space = bench.space(SpaceConfig { huge_pages: HugePages::Always, ..SpaceConfig::default() });
    let (at, len) = (1 << 30, 2 * BLOCK_SIZE);
    space.map(cpu, MapRequest::anonymous(len, RW).fixed(at)).unwrap();
    let blocks = policy(PolicyMode::Interleave, 3);
    space.set_policy(cpu, at, len, blocks, PolicyFlags::empty()).unwrap();
    for n in 0..1024 {
        bench.store(&space, at + n * PAGE_SIZE, n).unwrap();
    }
    assert_eq!(bench.machine.stats().sum(Counter::ThpFaultAlloc), 2);
    // They are as they should be, block by block.
    assert_eq!(space.set_policy(cpu, at, len, blocks, PolicyFlags::STRICT), Ok(()));
    let bind = policy(PolicyMode::Bind, 2);
    assert_eq!(space.set_policy(cpu, at, len, bind, PolicyFlags::STRICT), Err(Error::Io));
    space.set_policy(cpu, at, len, bind, PolicyFlags::STRICT | PolicyFlags::MOVE).unwrap();
    assert_eq!(bench.machine.stats().sum(Counter::PgMigrate), 512);
    assert_eq!(bench.machine.stats().sum(Counter::ThpSplitPmd), 1);
    for n in 0..1024 {
        let addr = at + n * PAGE_SIZE;
        assert_eq!((space.node_at(cpu, addr), bench.load(&space, addr)), (Some(1), Ok(n)));
    }
    // Collapsing follows the policy, too.
    space.set_policy(cpu, at, len, policy(PolicyMode::Bind, 1), PolicyFlags::empty()).unwrap();
    space.advise(cpu, at, len, Advice::Collapse).unwrap();
    assert_eq!(space.node_at(cpu, at), Some(0));
    assert_eq!(space.node_at(cpu, at + BLOCK_SIZE), Some(1), "it was one before");
    assert!((0..1024).all(|n| bench.load(&space, at + n * PAGE_SIZE) == Ok(n)));
    space.destroy(cpu);
    bench.assert_nothing_left();
}
