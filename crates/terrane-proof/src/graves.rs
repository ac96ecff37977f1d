//! An allocator that notices uses of freed memory.
//!
//! While a model runs, what its thread frees is kept as it is and used for nothing else; an atomic operation on it
//! fails the model. So a node of the index that is freed too early is found at the first look at it, and
//! without the undefined behaviour that a real use would be.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use terrane::sync::atomic::Access;

struct Keeper;

#[global_allocator]
static KEEPER: Keeper = Keeper;

thread_local! {
    static KEPT: RefCell<Option<BTreeMap<usize, Layout>>> = const { RefCell::new(None) };
    /// True while the map itself is at work: what it frees is not kept.
    static BUSY: Cell<bool> = const { Cell::new(false) };
}

/// Runs `act` on what is kept, unless it is at work already or the thread is ending.
fn with<R>(act: impl FnOnce(&mut Option<BTreeMap<usize, Layout>>) -> R) -> Option<R> {
    if BUSY.try_with(|busy| busy.replace(true)).unwrap_or(true) {
        return None;
    }
    let result = KEPT.try_with(|kept| kept.try_borrow_mut().ok().map(|mut kept| act(&mut kept)));
    let _ = BUSY.try_with(|busy| busy.set(false));
    result.ok().flatten()
}

/// From now on what this thread frees is kept.
pub fn open() {
    close();
    with(|kept| *kept = Some(BTreeMap::new()));
}

/// Frees what was kept.
pub fn close() {
    let kept = with(Option::take).flatten();
    for (address, layout) in kept.into_iter().flatten() {
        // SAFETY: was given to `dealloc` with this layout, and kept instead.
        unsafe { System.dealloc(std::ptr::with_exposed_provenance_mut(address), layout) };
    }
}

/// Fails when `access` is to memory that was freed.
///
/// # Panics
/// Then.
pub fn look(access: &Access) {
    let hit = with(|kept| {
        let (&start, layout) = kept.as_ref()?.range(..=access.addr).next_back()?;
        (access.addr < start + layout.size()).then_some(())
    });
    assert!(hit.flatten().is_none(), "freed memory is used: {access:?}");
}

// SAFETY: passes everything on to the system's allocator, and frees later or not at all.
unsafe impl GlobalAlloc for Keeper {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        let kept = with(|kept| kept.as_mut().map(|kept| _ = kept.insert(at.expose_provenance(), layout)));
        if kept.flatten().is_none() {
            // SAFETY: the caller's promise.
            unsafe { System.dealloc(at, layout) };
        }
    }
}
