//! Spaces that share pages: what one stores is never seen through a translation that another has given up.

use super::{Bench, Space, store};
use crate::addr::PAGE_SIZE;
use crate::host::Memory;
use crate::machine::Cpu;
use crate::space::{HugePages, MapRequest, SpaceConfig};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::testing::TestHost;
use crate::vma::{Access, Advice, Prot};

const RW: Prot = Prot::READ.union(Prot::WRITE);
const BLOCK: u64 = 512 * PAGE_SIZE;

/// A load of the parent's is under way while the parent gives the page up by `leave` and the child stores to it.
fn load_outlasts(config: SpaceConfig, leave: impl Fn(&Cpu<TestHost>, &Space, u64) + Sync) {
    let bench = Bench::on(TestHost::with_tickets(512, 4000), 8);
    let space = bench.space(config);
    let request = MapRequest { align: BLOCK, ..MapRequest::anonymous(BLOCK, RW) };
    let at = space.map(&bench.cpu, request).unwrap();
    bench.store(&space, at, 1).unwrap();
    let child = space.fork(&bench.cpu).unwrap();
    let host = bench.machine.host();
    let under_way = host.access(bench.cpu.id());
    let found = space.translate(&bench.cpu, at, Access::Read).unwrap();
    let (machine, leave, parent, child_ref) = (&bench.machine, &leave, &space, &child);
    std::thread::scope(|scope| {
        let leaver = scope.spawn(move || leave(&Cpu::try_new(machine).unwrap(), parent, at));
        let storer = scope.spawn(move || {
            let cpu = Cpu::try_new(machine).unwrap();
            while parent.translate(&cpu, at, Access::Read).is_some() {
                std::thread::yield_now();
            }
            store(&cpu, child_ref, at, 2).unwrap();
        });
        storer.join().unwrap();
        let word = host.bytes(found.frame);
        // SAFETY: a word of a frame that is not used anew before the access has ended.
        let seen = unsafe { &*word.as_ptr().cast::<AtomicU64>() }.load(Ordering::SeqCst);
        drop(under_way);
        leaver.join().unwrap();
        assert_eq!(seen, 1, "the child's store is seen by the parent");
    });
    assert_eq!(bench.load(&child, at), Ok(2));
    space.destroy(&bench.cpu);
    child.destroy(&bench.cpu);
    bench.cpu.quiesce();
    bench.assert_nothing_left();
}

#[test]
fn a_load_under_way_does_not_see_what_another_space_stores() {
    type Way<'a> = &'a (dyn Fn(&Cpu<TestHost>, &Space, u64) + Sync);
    let ways: [Way<'_>; 3] = [
        &|cpu, space, at| space.unmap(cpu, at, BLOCK).unwrap(),
        &|cpu, space, at| space.advise(cpu, at, BLOCK, Advice::DontNeed).unwrap(),
        &|cpu, space, at| space.advise(cpu, at, BLOCK, Advice::GuardInstall).unwrap(),
    ];
    for leave in ways {
        load_outlasts(SpaceConfig::default(), leave);
    }
    let huge = || SpaceConfig { huge_pages: HugePages::Always, ..SpaceConfig::default() };
    for leave in &ways[..2] {
        load_outlasts(huge(), leave);
    }
}
