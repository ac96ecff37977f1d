//! Advice, locking in memory, stacks, `mincore`, `msync`, device memory: what Linux 6.18 does, as found out by trying it there.

mod device;
mod entries;
mod grow;
mod holes;
mod lock;
mod mincore;
mod sync;

use super::{Bench, Space};
use crate::addr::PAGE_SIZE;
use crate::error::{Error, FaultError};
use crate::object::Object;
use crate::space::{Locking, MapRequest, SpaceConfig};
use crate::sync::Shared;
use crate::testing::{TestFile, TestHost};
use crate::vma::{Advice, Prot};
use alloc::vec::Vec;

const RW: Prot = Prot::READ.union(Prot::WRITE);
/// Where the tests map.
const BASE: u64 = 0x1_0000_0000;

fn both(test: impl Fn(&Bench, SpaceConfig)) {
    for locking in [Locking::Speculative, Locking::Classic] {
        let bench = Bench::new(4000);
        test(&bench, SpaceConfig::with_locking(locking));
        bench.assert_nothing_left();
    }
}

fn page(n: u64) -> u64 {
    BASE + n * PAGE_SIZE
}

/// Maps private memory at pages `first..first + count` of the tests' area.
fn memory(b: &Bench, space: &Space, first: u64, count: u64) -> u64 {
    space.map(&b.cpu, MapRequest::anonymous(count * PAGE_SIZE, RW).fixed(page(first))).unwrap()
}

/// The listing, addresses as pages of the tests' area.
fn listing(b: &Bench, space: &Space) -> Vec<(u64, u64)> {
    let page = |addr: u64| addr.wrapping_sub(BASE) / PAGE_SIZE;
    let mappings = space.mappings(&b.cpu).unwrap();
    mappings.iter().map(|m| (page(m.range.start), page(m.range.end))).collect()
}

/// Maps `object` at pages from `first` on.
fn map_object(
    b: &Bench,
    space: &Space,
    object: &Shared<Object<TestHost>>,
    first: u64,
    count: u64,
    shared: bool,
) -> u64 {
    let request = MapRequest::object(object, 0, count * PAGE_SIZE, RW, shared);
    space.map(&b.cpu, request.fixed(page(first))).unwrap()
}
