//! A page that leaves its object, against a fault that maps it: Dekker's pattern with the page's flags and the entry.

use super::page;
use crate::host::{Model, ModelFormat};
use crate::orders::Orders::Total;
use crate::orders::{check, check_caught};
use loom::thread;
use std::sync::Arc;
use terrane::machine::{Cpu, Machine};
use terrane::object::Object;
use terrane::page_table::{EMPTY, Format, PageTable, Pte, PteFlags};
use terrane::sync::Shared;
use terrane::{Frame, PAGE_SIZE, proof};

struct Scene {
    machine: Shared<Machine<Model>>,
    object: Shared<Object<Model>>,
    table: PageTable<ModelFormat>,
    frame: Frame,
}

// SAFETY: a page table may be used by all threads.
unsafe impl Sync for Scene {}
// SAFETY: as above.
unsafe impl Send for Scene {}

impl Scene {
    fn new(cpus: &[Cpu<Model>; 2], machine: &Shared<Machine<Model>>) -> Self {
        let object = Object::shared_memory(machine, PAGE_SIZE).unwrap();
        let (frame, table) = {
            let pin = cpus[0].pin();
            let ram = machine.ram(&pin);
            let frame = object.make_page(&pin, 0).unwrap().unwrap();
            assert!(object.still_holds(&pin, 0, frame));
            let table = PageTable::try_new(&ram).unwrap();
            for n in 0..4 {
                assert_eq!(table.slot(&ram, page(n)).unwrap().load(), EMPTY);
            }
            (frame, table)
        };
        drop(cpus[1].pin());
        Self { machine: machine.clone(), object, table, frame }
    }

    /// What a fault does that has found the page; true when it mapped it.
    fn map(&self, cpu: &Cpu<Model>) -> bool {
        let pin = cpu.pin();
        let ram = self.machine.ram(&pin);
        let slot = self.table.slot(&ram, page(1)).unwrap();
        let Some(taken) = slot.take(EMPTY) else { return false };
        if !self.object.still_holds(&pin, 0, self.frame) {
            return false;
        }
        taken.publish(ModelFormat::page(self.frame, PteFlags::READ));
        true
    }

    /// What reclaim does: the page out of use, then its entries. Whether it found one.
    fn leave(&self, cpu: &Cpu<Model>) -> bool {
        let pin = cpu.pin();
        let ram = self.machine.ram(&pin);
        assert!(proof::begin_leaving(&self.object, &pin, 0, self.frame));
        let slot = self.table.lookup(&ram, page(1)).unwrap();
        matches!(Pte::decode::<ModelFormat>(slot.clear(&ram)), Pte::Page { .. })
    }
}

fn mapped_or_not() {
    let machine = Machine::try_new(Model::new(24, true), 2).unwrap();
    let cpus = [Cpu::try_new(&machine).unwrap(), Cpu::try_new(&machine).unwrap()];
    let scene = Arc::new(Scene::new(&cpus, &machine));
    let [mine, theirs] = cpus;
    let other = Arc::clone(&scene);
    let fault = thread::spawn(move || {
        let mapped = other.map(&theirs);
        (mapped, theirs)
    });
    let found = scene.leave(&mine);
    let (mapped, theirs) = fault.join().unwrap();
    assert_eq!(mapped, found, "a page that is leaving stays mapped");
    // The model ends here: what the machine does at its end is no part of it.
    std::mem::forget((mine, theirs, scene, machine));
}

#[test]
fn a_page_that_leaves_is_mapped_by_nobody() {
    check(Total, 2, mapped_or_not);
}

#[test]
fn leaving_needs_the_fence() {
    check_caught("leave_without_fence", Total, 2, mapped_or_not);
}
