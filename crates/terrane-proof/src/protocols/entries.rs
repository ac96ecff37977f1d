//! Entries of the page table: a fault against a change of its mapping, against the end of its table, against those
//! who find what it published.

use super::{Rig, page};
use crate::host::ModelFormat;
use crate::orders::Orders::{Messages, Total};
use crate::orders::{check, check_caught};
use loom::thread;
use std::sync::Arc;
use terrane::AddrRange;
use terrane::frame::{FrameList, Ram};
use terrane::page_table::{EMPTY, Format, PageTable, Pte, PteFlags};
use terrane::sync::SeqCount;

type Table = PageTable<ModelFormat>;

/// One VMA with its page tables.
struct Vma {
    rig: Arc<Rig>,
    table: Table,
    seq: SeqCount,
}

const READ: PteFlags = PteFlags::READ;

impl Vma {
    /// With the leaf table of page 0 if `leaf`.
    fn new(leaf: bool) -> Arc<Self> {
        let rig = Rig::new();
        let table = {
            let me = rig.cpu(0);
            let pin = me.pin();
            let ram = rig.ram(&pin);
            let table = Table::try_new(&ram).unwrap();
            if leaf {
                for n in 0..4 {
                    assert_eq!(table.slot(&ram, page(n)).unwrap().load(), EMPTY);
                }
            }
            // Touches the upper entry.
            assert!(table.lookup(&ram, page(0)).is_none() != leaf);
            table
        };
        let seq = SeqCount::new();
        seq.read().unwrap();
        Arc::new(Self { rig, table, seq })
    }

    fn with_ram<R>(&self, cpu: u32, act: impl FnOnce(&Ram<'_, crate::host::Model>) -> R) -> R {
        let me = self.rig.cpu(cpu);
        let pin = me.pin();
        act(&self.rig.ram(&pin))
    }

    /// Steps 1 to 7 of a fault at page `n`; true when it published.
    fn fault(&self, cpu: u32, n: u64, validate: bool) -> bool {
        self.with_ram(cpu, |ram| {
            let Some(seq) = self.seq.read() else { return false };
            let Ok(slot) = self.table.slot(ram, page(n)) else { return false };
            let frame = ram.allocate().unwrap();
            self.rig.write(frame, 7);
            let published = slot.take(EMPTY).is_some_and(|taken| {
                if validate && !self.seq.unchanged_while_owned(seq) {
                    return false;
                }
                taken.publish(ModelFormat::page(frame, READ));
                true
            });
            if !published {
                ram.free(frame);
            }
            published
        })
    }

    /// Makes `change`, and sweeps the whole leaf; how many pages the sweep finds. Pinned from the start: a pin in
    /// between would be a fence.
    fn sweep(&self, cpu: u32, change: fn(&SeqCount)) -> usize {
        let mut found = 0;
        self.with_ram(cpu, |ram| {
            change(&self.seq);
            self.table.zap(ram, AddrRange::new(0, page(4)), &mut |_, pte| {
                let Pte::Page { frame, .. } = pte else { panic!("a strange entry") };
                assert_eq!(self.rig.read(frame), 7);
                found += 1;
            });
        });
        found
    }

    fn is_mapped(&self, n: u64) -> bool {
        self.with_ram(0, |ram| {
            let slot = self.table.lookup(ram, page(n));
            slot.is_some_and(|slot| matches!(slot.decode::<ModelFormat>(), Pte::Page { .. }))
        })
    }
}

/// A fault against a change that ends in a sweep: what the fault published, the sweep has found.
fn swept(leaf: bool, change: fn(&SeqCount)) {
    let vma = Vma::new(leaf);
    let other = Arc::clone(&vma);
    let fault = thread::spawn(move || other.fault(1, 1, true));
    let found = vma.sweep(0, change);
    let published = fault.join().unwrap();
    assert_eq!(usize::from(published), found, "an entry was left behind");
    assert!(!vma.is_mapped(1));
}

fn killed() {
    swept(true, SeqCount::kill);
}

fn killed_without_table() {
    swept(false, SeqCount::kill);
}

fn bracketed() {
    swept(true, |seq| seq.write_begin());
}

fn bracketed_before_another_step() {
    swept(true, |seq| seq.write_begin_before(|| ()));
}

fn bracketed_together() {
    swept(true, |seq| SeqCount::write_begin_all([None, Some(seq)]));
}

#[test]
fn a_sweep_leaves_nothing_behind() {
    check(Total, 3, killed);
    check(Total, 3, bracketed);
    check(Total, 3, bracketed_together);
    check(Total, 3, bracketed_before_another_step);
}

#[test]
fn a_sweep_leaves_nothing_behind_in_a_table_that_a_fault_makes() {
    check(Total, 2, killed_without_table);
}

#[test]
fn a_sweep_needs_the_fence_the_validation_and_their_order() {
    check_caught("kill_without_fence", Total, 3, killed);
    check_caught("write_begin_without_fence", Total, 3, bracketed);
    check_caught("write_begin_all_unordered", Total, 3, bracketed_together);
    check_caught("write_begin_before_unordered", Total, 3, bracketed_before_another_step);
    for name in ["validate_never", "validate_relaxed"] {
        check_caught(name, Total, 3, killed);
    }
    check_caught("kill_without_fence", Total, 2, killed_without_table);
}

/// A table that has become empty is freed beside a fault that has walked to it. `n`: the entry of the fault, a head
/// of its line or not.
fn closing(n: u64) {
    let vma = Vma::new(true);
    let other = Arc::clone(&vma);
    let fault = thread::spawn(move || other.fault(1, n, false));
    vma.with_ram(0, |ram| {
        let mut sink = FrameList::new();
        vma.table.free_tables(ram, 0, page(16), AddrRange::new(0, page(4)), &mut sink);
    });
    assert_eq!(fault.join().unwrap(), vma.is_mapped(n), "a page was published in a table that is gone");
}

fn closing_beside_head() {
    closing(0);
}

fn closing_beside_rest() {
    closing(3);
}

#[test]
fn a_closed_table_takes_nothing() {
    check(Total, 3, closing_beside_head);
    check(Total, 3, closing_beside_rest);
}

#[test]
fn closing_needs_its_fence_and_the_look_at_the_head() {
    for name in ["take_never_looks", "take_looks_relaxed", "take_acquires_only", "close_without_fence"] {
        check_caught(name, Total, 3, closing_beside_rest);
    }
}

/// Whoever finds a page finds its bytes.
fn bytes() {
    let vma = Vma::new(true);
    let other = Arc::clone(&vma);
    let fault = thread::spawn(move || other.fault(1, 1, true));
    vma.with_ram(0, |ram| {
        let slot = vma.table.lookup(ram, page(1)).unwrap();
        if let Pte::Page { frame, .. } = slot.decode::<ModelFormat>() {
            assert_eq!(vma.rig.read(frame), 7);
        }
    });
    assert!(fault.join().unwrap());
}

/// Two faults at one entry: one of them publishes.
fn twice() {
    let vma = Vma::new(false);
    let other = Arc::clone(&vma);
    let fault = thread::spawn(move || other.fault(1, 1, true));
    let mine = vma.fault(0, 1, true);
    let published = usize::from(fault.join().unwrap()) + usize::from(mine);
    assert!(published <= 1 && usize::from(vma.is_mapped(1)) == published);
    assert_eq!(vma.table.tables(), 2);
}

#[test]
fn a_page_comes_with_its_bytes() {
    check(Messages, 3, bytes);
    check(Total, 2, twice);
}

#[test]
fn publishing_needs_its_order() {
    check_caught("publish_relaxed", Messages, 3, bytes);
    check_caught("take_without_looking", Total, 2, twice);
}
