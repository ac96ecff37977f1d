//! The anon pointer of a VMA: set by a fault without a lock, beside a change that freezes, decides and closes.

use crate::host::Model;
use crate::orders::Orders::Messages;
use crate::orders::{check, check_caught};
use loom::thread;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use terrane::AddrRange;
use terrane::machine::{Machine, Record};
use terrane::rmap::AnonVma;
use terrane::sync::Shared;
use terrane::vma::{Anon, VmFlags, Vma};

struct Scene {
    vma: NonNull<Vma<Model>>,
    _record: Box<Record>,
    _machine: Shared<Machine<Model>>,
}

// SAFETY: a `Vma` may be used by all threads, and lives as long as its record.
unsafe impl Sync for Scene {}
// SAFETY: as above.
unsafe impl Send for Scene {}

/// An anon_vma, or what stands for one: its address.
type Node = NonNull<AnonVma<Model>>;

impl Scene {
    fn new() -> Arc<Self> {
        let machine = Machine::try_new(Model::new(24, true), 1).unwrap();
        let mut record = Box::new(Record::new());
        let range = AddrRange::new(0, 4096);
        let record_at = NonNull::from(&mut *record);
        let vma = Vma::create(record_at, &machine, range, VmFlags::empty(), 0, None, ptr::null());
        let scene = Self { vma, _record: record, _machine: machine };
        assert!(matches!(scene.vma().anon(), Anon::None));
        Arc::new(scene)
    }

    fn vma(&self) -> &Vma<Model> {
        // SAFETY: made above, of a record that is alive.
        unsafe { self.vma.as_ref() }
    }

    /// What a fault does that finds none. True when it installed its own.
    fn install(&self) -> bool {
        let fresh = make();
        let installed = self.vma().install_anon(fresh);
        if !installed {
            discard(fresh);
        }
        installed
    }
}

fn make() -> Node {
    let node = AnonVma::try_new(ptr::null()).unwrap();
    // SAFETY: fresh. The look touches it: a later one by another thread must be ordered behind.
    assert!(unsafe { node.as_ref() }.space().is_null());
    node
}

fn discard(node: Node) {
    // SAFETY: nobody else has it: it was installed nowhere, or the VMA is closed.
    unsafe {
        assert!(node.as_ref().space().is_null());
        AnonVma::discard(node);
    }
}

/// A fault against the end of the VMA: what the fault leaves on it, the end takes away.
fn closing() {
    let scene = Scene::new();
    let other = Arc::clone(&scene);
    let fault = thread::spawn(move || other.install());
    let taken = scene.vma().close_anon().map(discard).is_some();
    let installed = fault.join().unwrap();
    assert_eq!(installed, taken, "an anon_vma was left on a VMA that is gone");
    assert!(matches!(scene.vma().anon(), Anon::Closed));
}

/// A fault against a merge that decides which anon_vma the VMA gets: one of them does.
fn freezing() {
    let scene = Scene::new();
    let other = Arc::clone(&scene);
    let fault = thread::spawn(move || other.install());
    let vma = scene.vma();
    vma.freeze_anon();
    let mine = match vma.anon() {
        Anon::Frozen => {
            let mine = make();
            vma.thaw_anon(Some(mine));
            Some(mine)
        }
        Anon::Some(other) => {
            assert!(other.space().is_null());
            None
        }
        Anon::None | Anon::Closed => panic!("neither frozen nor set"),
    };
    let installed = fault.join().unwrap();
    assert!(installed != mine.is_some(), "two anon_vmas, or none");
    let left = vma.close_anon().expect("one of them");
    assert!(mine.is_none_or(|mine| mine == left), "not the one that was decided on");
    discard(left);
}

#[test]
fn an_anon_vma_has_one_owner() {
    check(Messages, 3, closing);
    check(Messages, 3, freezing);
}

#[test]
fn the_anon_pointer_needs_its_looks_and_orders() {
    check_caught("anon_installed_over", Messages, 3, closing);
    check_caught("anon_installed_over", Messages, 3, freezing);
    check_caught("anon_installed_relaxed", Messages, 3, closing);
    check_caught("anon_frozen_over", Messages, 3, freezing);
}
