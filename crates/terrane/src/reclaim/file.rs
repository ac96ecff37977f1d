//! Pages of objects: their marks, and their way out (the protocol is in the head of [`object`](crate::object)).

use super::anon::mark_aged;
use super::{Verdict, Why};
use crate::addr::{AddrRange, Frame};
use crate::frame::{FrameFlags, Ram};
use crate::host::{Host, Ticket};
use crate::machine::Cpu;
use crate::mm::rss::PageKind;
use crate::object::Object;
use crate::page_table::{EMPTY, Format, Pte, PteFlags, Slot};
use crate::rmap::walk::{for_each_entry, for_each_mapping_of_object, for_each_range_of_object};
use crate::sync::atomic::Ordering;
use crate::vma::{VmFlags, Vma};

/// Looks at a page of an object, and takes it out if it may go.
pub(super) fn look<H: Host>(cpu: &Cpu<H>, frame: Frame, why: Why) -> Verdict {
    let flags = cpu.machine().frames().meta(frame).flags();
    if flags.intersects(FrameFlags::LOCKED | FrameFlags::WRITEBACK) {
        return Verdict::Busy;
    }
    let Some((object, index)) = Object::of_page(cpu, frame) else { return Verdict::Stays };
    if !object.is_file() && !cpu.machine().swap().is_on() {
        return Verdict::Stays;
    }
    if why != Why::Advised && is_in_use(cpu, &object, index, frame) {
        return Verdict::Stays;
    }
    let Some(_one_at_a_time) = object.try_lock_io() else { return Verdict::Busy };
    {
        let pin = cpu.pin();
        if !object.begin_leaving(&pin, index, frame) {
            return Verdict::Stays;
        }
    }
    if !unmap(cpu, &object, index, frame, why) {
        object.stay(frame);
        return Verdict::Stays;
    }
    match object.finish_leaving(cpu, index, frame) {
        Ok(()) => Verdict::Freed,
        Err(_) => Verdict::Stays,
    }
}

/// Moves a page of an object to the frame `to`, fresh from the allocator; faults find it there. False when it stays where it is; then `to`
/// is still the caller's. Not while pinned.
pub(super) fn migrate<H: Host>(cpu: &Cpu<H>, frame: Frame, to: Frame) -> bool {
    let Some((object, index)) = Object::of_page(cpu, frame) else { return false };
    let Some(_one_at_a_time) = object.try_lock_io() else { return false };
    {
        let pin = cpu.pin();
        if !object.begin_leaving(&pin, index, frame) {
            return false;
        }
    }
    unmap(cpu, &object, index, frame, Why::Moved);
    object.finish_moving(cpu, index, frame, to);
    true
}

fn is_locked<H: Host>(vma: &Vma<H>) -> bool {
    mutant!("reclaim_file_takes_locked", vma.flags().contains(VmFlags::LOCKED), false)
}

/// Takes the entry if it maps `frame`, waiting for whoever owns it; what it says.
fn take<'a, H: Host>(
    ram: &Ram<'_, H>,
    slot: &'a Slot,
    frame: Frame,
) -> Option<(crate::page_table::Taken<'a>, PteFlags)> {
    loop {
        let raw = slot.wait_not_busy(ram);
        let flags = match Pte::decode::<H::Format>(raw) {
            Pte::Page { frame: mapped, flags } | Pte::NoAccess { frame: mapped, flags }
                if mapped == frame =>
            {
                flags
            }
            _ => return None,
        };
        if let Some(taken) = slot.take(raw) {
            return Some((taken, flags));
        }
    }
}

/// Takes the marks of having been accessed away. True when there were any, or a mapping keeps its pages.
fn is_in_use<H: Host>(cpu: &Cpu<H>, object: &Object<H>, index: u64, frame: Frame) -> bool {
    let mut in_use = false;
    for_each_mapping_of_object(cpu, object, index..index + 1, |_, vma, ram, _, slot| {
        let maps = Pte::decode::<H::Format>(slot.load()).frame() == Some(frame);
        if !maps {
            return;
        }
        in_use |= is_locked(vma);
        let Some((taken, flags)) = take(ram, slot, frame) else { return };
        if !flags.contains(PteFlags::ACCESSED) || !flags.contains(PteFlags::READ) {
            return;
        }
        in_use = true;
        mark_aged(ram, frame);
        let less = H::Format::with_flags(taken.previous(), flags - PteFlags::ACCESSED);
        taken.publish(less);
    });
    in_use
}

/// Empties every entry that maps the page, which is out of use, shoots the translations down and awaits the stores. False when a mapping
/// keeps it.
fn unmap<H: Host>(cpu: &Cpu<H>, object: &Object<H>, index: u64, frame: Frame, why: Why) -> bool {
    let mut stays = false;
    let mut passing = Ticket::PASSED;
    for_each_range_of_object(cpu, object, index..index + 1, |mm, vma, range, _| {
        let mut found = AddrRange::new(0, 0);
        for_each_entry(mm, cpu, range, |ram, _, slot| {
            if stays {
                return;
            }
            let Some((taken, flags)) = take(ram, slot, frame) else { return };
            // While the entry is owned: a call that locks the mapping later finds the page gone, and brings it back.
            let used = flags.contains(PteFlags::READ | PteFlags::ACCESSED) && why != Why::Advised;
            if why != Why::Moved && (is_locked(vma) || used) {
                stays = true;
                return;
            }
            // The protection by a handler of user faults outlasts the page.
            let marked = vma.flags().contains(VmFlags::UFFD_WP) && flags.contains(PteFlags::USER_WP);
            taken.publish(if marked { Pte::UserWp.encode::<H::Format>() } else { EMPTY });
            if let Some(kind) = PageKind::from_flags(ram.meta(frame).flags()) {
                mm.uncount_page(ram.pin, kind);
            }
            found = range;
        });
        if mutant!("reclaim_ignores_ending", mm.ending.load(Ordering::SeqCst) > 0, false) {
            // An entry is empty or read-only, but a store that came before that may be under way still.
            found = range;
        }
        if !found.is_empty() {
            let pin = cpu.pin();
            let ticket = mm.shoot_down(&mm.ram(&pin), found);
            if ticket != Ticket::PASSED {
                // They pass in order: the last one's ticket stands for all.
                passing = ticket;
            }
        }
    });
    mutant!("reclaim_file_not_awaited", cpu.await_stores(passing), ());
    !stays
}
