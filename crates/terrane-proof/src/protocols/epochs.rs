//! Pins: what a pinned processor can see is not freed, neither objects nor frames.

use super::Rig;
use crate::orders::Orders::Total;
use crate::orders::{check, check_caught};
use loom::cell::UnsafeCell;
use loom::thread;
use std::ptr::NonNull;
use std::sync::Arc;
use terrane::Frame;
use terrane::frame::{FrameList, Grace};
use terrane::host::Ticket;
use terrane::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use terrane::sync::{CpuId, Epoch, Freeing, Participant, Recent, RetireLink};

#[repr(C)]
struct Object {
    link: RetireLink,
    value: UnsafeCell<u64>,
}

unsafe fn free(link: NonNull<RetireLink>, _: &mut Freeing<'_>) {
    // SAFETY: the link is the first field of an object that `retiring` owns to its end.
    let object = unsafe { link.cast::<Object>().as_ref() };
    // SAFETY: nobody may see the object any more; loom checks it.
    object.value.with_mut(|value| unsafe { *value = 0 });
}

// SAFETY: the value is used under the protocol that is to be checked; loom watches it.
unsafe impl Sync for Object {}

struct Scene {
    epoch: Epoch,
    current: AtomicPtr<Object>,
    object: Box<Object>,
}

// SAFETY: the object is used under the protocol that is to be checked; loom watches its value.
unsafe impl Sync for Scene {}
// SAFETY: as above.
unsafe impl Send for Scene {}

impl Scene {
    /// One object, in its place, and two processors.
    fn new() -> (Arc<Self>, [CpuId; 2]) {
        let object = Box::new(Object { link: RetireLink::new(), value: UnsafeCell::new(7) });
        let scene = Arc::new(Scene {
            epoch: Epoch::try_new(2).unwrap(),
            current: AtomicPtr::new(std::ptr::from_ref(&*object).cast_mut()),
            object,
        });
        let ids = [(); 2].map(|()| {
            let me = scene.epoch.register().unwrap();
            drop(me.pin());
            me.id()
        });
        (scene, ids)
    }
}

/// A reader against someone who unlinks, retires and frees.
fn retiring() {
    let (scene, ids) = Scene::new();
    assert!(!scene.current.load(Ordering::Relaxed).is_null());
    let other = Arc::clone(&scene);
    let reader = thread::spawn(move || {
        // SAFETY: this thread is that processor.
        let me = unsafe { other.epoch.participant(ids[1]) };
        // So that there are two epochs in which it may be pinned.
        other.epoch.try_advance();
        let pin = me.pin();
        // SAFETY: what is linked is an object that is not freed while the pin lasts.
        if let Some(object) = unsafe { other.current.load(Ordering::Acquire).as_ref() } {
            // SAFETY: read only; loom checks it.
            assert_eq!(object.value.with(|value| unsafe { *value }), 7);
        }
        drop(pin);
    });
    // SAFETY: this thread is that processor.
    let me = unsafe { scene.epoch.participant(ids[0]) };
    {
        let pin = me.pin();
        scene.current.store(std::ptr::null_mut(), Ordering::Release);
        // SAFETY: unlinked, and owned by the scene until the end.
        unsafe { Participant::retire(&pin, NonNull::from(&scene.object.link), free) };
    }
    let freed = me.collect_now() + me.collect_now();
    reader.join().unwrap();
    // Nobody is pinned any more: what is left must come back now.
    assert_eq!(freed + me.collect_now() + me.collect_now(), 1);
}

/// A reader that keeps what it found from one pin to the next, against someone who unlinks, retires and frees.
fn remembering() {
    let (scene, ids) = Scene::new();
    let other = Arc::clone(&scene);
    let reader = thread::spawn(move || {
        // SAFETY: this thread is that processor.
        let me = unsafe { other.epoch.participant(ids[1]) };
        let recent = Recent::new();
        {
            let pin = me.pin();
            // SAFETY: what is linked is an object that is not freed while the pin lasts.
            if let Some(object) = unsafe { other.current.load(Ordering::Acquire).as_ref() } {
                // SAFETY: retired by `Participant::retire`.
                unsafe { recent.set(&pin, object) };
            }
        }
        let pin = me.pin();
        // SAFETY: an object, as above.
        if let Some(object) = unsafe { recent.get::<Object>(&pin) } {
            // SAFETY: read only; loom checks it.
            assert_eq!(object.value.with(|value| unsafe { *value }), 7);
        }
        drop(pin);
    });
    // SAFETY: this thread is that processor.
    let me = unsafe { scene.epoch.participant(ids[0]) };
    {
        let pin = me.pin();
        scene.current.store(std::ptr::null_mut(), Ordering::Release);
        // SAFETY: unlinked, and owned by the scene until the end.
        unsafe { Participant::retire(&pin, NonNull::from(&scene.object.link), free) };
    }
    let freed = me.collect_now() + me.collect_now();
    reader.join().unwrap();
    assert_eq!(freed + me.collect_now() + me.collect_now(), 1);
}

#[test]
fn what_is_remembered_is_not_freed() {
    check(Total, 2, remembering);
}

#[test]
fn remembering_needs_the_epoch() {
    for name in ["recent_of_any_epoch", "advance_past_pins", "grace_of_one"] {
        check_caught(name, Total, 2, remembering);
    }
}

#[test]
fn what_a_pin_sees_is_not_freed() {
    check(Total, 2, retiring);
}

#[test]
fn reclamation_needs_every_part() {
    for name in
        ["advance_past_pins", "grace_of_one", "pin_without_fence", "stamped_when_retired", "unpin_relaxed"]
    {
        check_caught(name, Total, 2, retiring);
    }
}

/// A frame that is unlinked, deferred behind the epoch and used anew, under the eyes of a reader that found it.
fn frames_anew() {
    frames_anew_beside(false);
}

/// The same, where only a third thread moves the epoch on.
fn frames_anew_while_another_advances() {
    frames_anew_beside(true);
}

fn frames_anew_beside(other_advances: bool) {
    let rig = Rig::new();
    let frame = {
        let me = rig.cpu(0);
        let pin = me.pin();
        rig.ram(&pin).allocate().unwrap()
    };
    rig.write(frame, 7);
    let linked = Arc::new(AtomicU32::new(frame.0));
    assert_eq!(linked.load(Ordering::Relaxed), frame.0);
    let (other, place) = (Arc::clone(&rig), Arc::clone(&linked));
    let reader = thread::spawn(move || {
        let me = other.cpu(1);
        let pin = me.pin();
        match place.load(Ordering::Acquire) {
            0 => {}
            found => assert_eq!(other.read(Frame(found)), 7, "the frame is used anew"),
        }
        drop(pin);
    });
    let other = Arc::clone(&rig);
    let advance = move || {
        other.epoch.try_advance();
        other.epoch.try_advance();
    };
    let (advance, advancer) =
        if other_advances { (None, Some(thread::spawn(advance))) } else { (Some(advance), None) };
    let me = rig.cpu(0);
    {
        let pin = me.pin();
        // As an upper entry is unlinked; `Epoch::now` is ordered behind it because both are `SeqCst`.
        linked.swap(0, Ordering::SeqCst);
        let mut list = FrameList::new();
        list.push(&rig.frames, frame);
        rig.ram(&pin).defer(list, Grace { epoch: Some(rig.epoch.now()), ticket: Ticket::PASSED });
    }
    if let Some(advance) = advance {
        advance();
    }
    let pin = me.pin();
    if rig.frames.settle(&pin, &|_, _| true) == 1 {
        // Freed last, allocated first.
        let anew = rig.ram(&pin).allocate().unwrap();
        assert_eq!(anew, frame);
        rig.write(anew, 9);
    }
    drop(pin);
    reader.join().unwrap();
    if let Some(advancer) = advancer {
        advancer.join().unwrap();
    }
}

#[test]
fn a_frame_is_not_used_anew_under_a_pin() {
    check(Total, 2, frames_anew);
    check(Total, 2, frames_anew_while_another_advances);
}

#[test]
fn deferred_frames_need_the_epoch() {
    for name in ["advance_past_pins", "pin_without_fence", "limbo_ignores_epoch"] {
        check_caught(name, Total, 2, frames_anew);
    }
}

#[test]
fn whoever_advances_needs_both_fences() {
    for name in ["advance_without_fence", "advance_without_acquire"] {
        check_caught(name, Total, 2, frames_anew_while_another_advances);
    }
}
