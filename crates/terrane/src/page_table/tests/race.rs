//! Faults against unmaps on two and more threads, with the sequence counter of an emulated VMA.

use super::for_both_formats;
use super::machine::{TestHost, TestMachine};
use crate::addr::{AddrRange, Frame, PAGE_SIZE};
use crate::frame::Ram;
use crate::page_table::{EMPTY, Format, PageTable, Pte, PteFlags, SlotError};
use crate::sync::{CpuId, Participant, SeqCount};
use core::ops::ControlFlow;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicUsize, Ordering};
use std::boxed::Box;
use std::thread;
use std::vec::Vec;

for_both_formats! {
    every_published_page_is_zapped_once;
    neighbours_lose_nothing_to_wrong_bounds;
    racing_installs_make_one_table;
}

/// How many pages the faults of a test publish.
const PAGES: usize = if cfg!(miri) { 200 } else { 20_000 };

/// A small generator: the tests need spread, not quality.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % bound
    }
}

/// Tells the other threads of a test to stop when its own ends, by a panic too.
struct Stop<'a>(&'a AtomicBool);

impl Stop<'_> {
    fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// A mapping as far as the protocol sees it, and a ledger of the pages in it.
struct Vma {
    range: AddrRange,
    seq: SeqCount,
    next: AtomicU32,
    published: Box<[AtomicU8]>,
    zapped: Box<[AtomicU8]>,
}

impl Vma {
    fn new(range: AddrRange) -> Self {
        let ledger = || (0..PAGES + 64).map(|_| AtomicU8::new(0)).collect::<Vec<_>>().into_boxed_slice();
        Self { range, seq: SeqCount::new(), next: AtomicU32::new(0), published: ledger(), zapped: ledger() }
    }

    fn is_done(&self) -> bool {
        self.next.load(Ordering::Relaxed) as usize >= PAGES
    }

    /// A speculative fault at `addr`: true when it published a page.
    fn fault<F: Format>(&self, ram: &Ram<'_, TestHost<F>>, tree: &PageTable<F>, addr: u64) -> bool {
        let Some(seq) = self.seq.read() else { return false };
        let slot = match tree.slot(ram, addr) {
            Ok(slot) => slot,
            Err(SlotError::Changed) => return false,
            Err(SlotError::OutOfMemory) => panic!("the machine is large enough"),
        };
        let Some(taken) = slot.take(EMPTY) else { return false };
        if !self.seq.unchanged_while_owned(seq) {
            return false;
        }
        // The number stands for a frame; nothing reads its bytes.
        let n = self.next.fetch_add(1, Ordering::Relaxed);
        self.published[n as usize].fetch_add(1, Ordering::Relaxed);
        taken.publish(F::page(Frame(n), PteFlags::READ | PteFlags::WRITE));
        true
    }

    fn note_zapped(&self, addr: u64, pte: Pte) {
        let Pte::Page { frame, .. } = pte else { panic!("{pte:?} at {addr:#x}") };
        assert_eq!(self.zapped[frame.0 as usize].fetch_add(1, Ordering::Relaxed), 0, "zapped twice");
    }

    fn assert_balanced(&self) {
        assert!(self.is_done());
        for (published, zapped) in self.published.iter().zip(&self.zapped) {
            assert_eq!(published.load(Ordering::Relaxed), zapped.load(Ordering::Relaxed));
        }
    }
}

/// Frees what this CPU deferred and the epoch allows.
fn collect<F: Format>(machine: &TestMachine<F>, cpu: &Participant<'_>) {
    machine.epoch.try_advance();
    machine.frames.settle(&cpu.pin(), &|_: CpuId, _| true);
}

fn every_published_page_is_zapped_once<F: Format>() {
    TestMachine::<F>::with_tree(4096, |machine, cpu, tree| {
        // Around the boundary of two GiB: tables of three levels come and go.
        let middle = 1 << 39;
        let bounds = AddrRange::new(middle - (4 << 21), middle + (4 << 21));
        let vma = &Vma::new(AddrRange::new(middle - (1 << 21), middle + (1 << 21)));
        let stop = &AtomicBool::new(false);
        thread::scope(|scope| {
            for n in 0..2 {
                scope.spawn(move || {
                    let cpu = machine.epoch.register().unwrap();
                    let stop = Stop(stop);
                    let mut random = Random(n);
                    while !vma.is_done() && !stop.is_set() {
                        let pin = cpu.pin();
                        let ram = machine.ram(&pin);
                        // Few addresses, so that the threads meet in one table and often in one line.
                        let page = vma.range.start + (random.below(2) << 21) + random.below(24) * PAGE_SIZE;
                        vma.fault(&ram, tree, page);
                    }
                });
            }
            let mut rounds = 0;
            let stop = Stop(stop);
            while !stop.is_set() {
                collect(machine, cpu);
                let pin = cpu.pin();
                let ram = machine.ram(&pin);
                vma.seq.write_begin();
                tree.zap(&ram, vma.range, &mut |addr, pte| vma.note_zapped(addr, pte));
                machine.free_tables(&ram, tree, bounds, vma.range);
                // Unmapped: nothing is there, and nothing comes.
                for _ in 0..3 {
                    tree.for_each_slot(&ram, vma.range, |addr, slot| {
                        let raw = slot.wait_not_busy(&ram);
                        assert_eq!(raw, EMPTY, "at {addr:#x} after the unmap");
                        ControlFlow::Continue(())
                    });
                }
                vma.seq.write_end();
                drop(pin);
                rounds += 1;
                if rounds % 4 == 0 {
                    thread::yield_now();
                }
            }
        });
        let pin = cpu.pin();
        tree.zap(&machine.ram(&pin), vma.range, &mut |addr, pte| vma.note_zapped(addr, pte));
        vma.assert_balanced();
    });
}

fn neighbours_lose_nothing_to_wrong_bounds<F: Format>() {
    TestMachine::<F>::with_tree(4096, |machine, cpu, tree| {
        // Two mappings in one leaf table, and a caller that frees tables as if the other one were not there.
        let base = 7 << 30;
        let everything = AddrRange::new(0, F::USER_END);
        let vma = &Vma::new(AddrRange::new(base, base + 16 * PAGE_SIZE));
        let kept = &AtomicUsize::new(0);
        let stop = &AtomicBool::new(false);
        let freed = &AtomicUsize::new(0);
        thread::scope(|scope| {
            scope.spawn(move || {
                let cpu = machine.epoch.register().unwrap();
                let stop = Stop(stop);
                let mut random = Random(5);
                while !vma.is_done() && !stop.is_set() {
                    let addr = vma.range.start + random.below(16) * PAGE_SIZE;
                    let published = {
                        let pin = cpu.pin();
                        vma.fault(&machine.ram(&pin), tree, addr)
                    };
                    if published {
                        kept.fetch_add(1, Ordering::Relaxed);
                        // Long enough, at times, for a table to be closed and unlinked.
                        for _ in 0..random.below(8) * 64 {
                            core::hint::spin_loop();
                        }
                        let pin = cpu.pin();
                        let ram = machine.ram(&pin);
                        // No unmap touches this mapping: the page is there for every later walk.
                        let slot = tree.lookup(&ram, addr).expect("the table was freed with a page in it");
                        vma.note_zapped(addr, Pte::decode::<F>(slot.clear(&ram)));
                    }
                }
            });
            let stop = Stop(stop);
            while !stop.is_set() {
                collect(machine, cpu);
                let pin = cpu.pin();
                let ram = machine.ram(&pin);
                freed.fetch_add(machine.free_tables(&ram, tree, everything, vma.range), Ordering::Relaxed);
            }
        });
        assert_eq!(kept.load(Ordering::Relaxed), vma.next.load(Ordering::Relaxed) as usize);
        vma.assert_balanced();
    });
}

fn racing_installs_make_one_table<F: Format>() {
    TestMachine::<F>::with_tree(1024, |machine, cpu, tree| {
        let rounds = if cfg!(miri) { 5 } else { 2_000 };
        let barrier = &std::sync::Barrier::new(2);
        let all = AddrRange::new(0, F::USER_END);
        thread::scope(|scope| {
            scope.spawn(move || {
                let cpu = machine.epoch.register().unwrap();
                for round in 0..rounds {
                    barrier.wait();
                    publish(machine, &cpu, tree, round, 1);
                    barrier.wait();
                }
            });
            for round in 0..rounds {
                barrier.wait();
                publish(machine, cpu, tree, round, 0);
                barrier.wait();
                // Whoever lost the race uses the winner's tables and has given its own back.
                assert_eq!(tree.tables(), 4);
                {
                    let pin = cpu.pin();
                    let ram = machine.ram(&pin);
                    let mut gone = 0;
                    tree.zap(&ram, all, &mut |_, _| gone += 1);
                    assert_eq!(gone, 2);
                    assert_eq!(machine.free_tables(&ram, tree, all, all), 3);
                }
                collect(machine, cpu);
            }
        });
    });
}

fn publish<F: Format>(
    machine: &TestMachine<F>,
    cpu: &Participant<'_>,
    tree: &PageTable<F>,
    round: u64,
    n: u64,
) {
    loop {
        let pin = cpu.pin();
        let ram = machine.ram(&pin);
        match tree.slot(&ram, (round << 30) + n * PAGE_SIZE) {
            Ok(slot) => {
                slot.take(EMPTY).unwrap().publish(F::page(Frame(n as u32), PteFlags::READ));
                return;
            }
            Err(error) => assert_eq!(error, SlotError::Changed),
        }
    }
}
