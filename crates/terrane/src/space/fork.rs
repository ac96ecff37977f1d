//! Copying a space (requirement B4: fork).
//!
//! Private pages become shared, read-only in both spaces, with their reference counted; whoever stores first gets a copy.
//! Pages of objects are not copied: the child faults them in.
//!
//! # Why no page and no store is lost
//!
//! A VMA of the parent is held (its counter odd) while its own pages are shared, one VMA at a time, so no page comes in
//! unseen. A page is counted for the child *before* the parent's entry loses its permission to store, so the last sharer is
//! never mistaken.
//!
//! Losing the permission in the entry is not the end of stores: a processor may be in the middle of one through its old
//! translation. If another thread copied the page now, the parent would lose the store; if the child ran, its page would
//! change under it. So fork waits until the shoot-down has passed before it returns, and until then
//! ([`Mm::forking`]) no fault of the parent copies a shared page: it goes to the locked path and waits. All other faults
//! go on.

use super::AddressSpace;
use super::change::Change;
use crate::addr::AddrRange;
use crate::error::{Error, OutOfMemory};
use crate::frame::{FrameFlags, Ram};
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::Mm;
use crate::page_table::{BUSY, Format, Pte, PteFlags, Slot, SlotError};
use crate::sync::atomic::Ordering;
use crate::vma::{VmFlags, Vma};
use core::ops::ControlFlow;
use core::ptr::NonNull;

impl<H: Host> AddressSpace<H> {
    /// A copy of the space: the same mappings, private ones with the same content until either side stores. Mappings advised
    /// `DontFork` are left out, those advised `WipeOnFork` are empty in the child. O(VMAs and private pages).
    ///
    /// # Errors
    /// [`Error::NoMemory`]; the parent is as before (its pages lose their permission to store until the next fault).
    pub fn fork(&self, cpu: &Cpu<H>) -> Result<Self, Error> {
        match self.try_fork(cpu) {
            Err(OutOfMemory) => {
                cpu.find_memory();
                Ok(self.try_fork(cpu)?)
            }
            Ok(child) => Ok(child),
        }
    }

    fn try_fork(&self, cpu: &Cpu<H>) -> Result<Self, OutOfMemory> {
        let child = Self::try_new(cpu, *self.config()).map_err(|_| OutOfMemory)?;
        let result = self.copy_into(cpu, &child);
        if result.is_err() {
            child.destroy(cpu);
            return Err(OutOfMemory);
        }
        Ok(child)
    }

    fn copy_into(&self, cpu: &Cpu<H>, child: &Self) -> Result<(), OutOfMemory> {
        let parent = Change::begin(self.mm(), cpu);
        let mut copy = Change::begin(child.mm(), cpu);
        copy.layout.heap = parent.layout.heap;
        let mut protected = false;
        self.mm().forking.store(true, Ordering::SeqCst);
        let mut next = 0;
        let mut result = Ok(());
        loop {
            let found = {
                let pin = cpu.pin();
                self.mm().index.first_ending_after(&pin, next).map(NonNull::from)
            };
            let Some(vma) = found else { break };
            // SAFETY: in the index, under the layout lock that we hold for writing.
            let vma = unsafe { vma.as_ref() };
            next = vma.end();
            if vma.flags().contains(VmFlags::DONTCOPY) {
                continue;
            }
            result = self.copy_vma(cpu, &mut copy, child, vma, &mut protected);
            if result.is_err() {
                break;
            }
        }
        if protected {
            let ticket = {
                let pin = cpu.pin();
                self.mm().shoot_down(&self.mm().ram(&pin), self.config().range)
            };
            // The pages must stand still before either side copies or shows them.
            cpu.await_stores(ticket);
        }
        self.mm().forking.store(false, Ordering::Release);
        result
    }

    fn copy_vma(
        &self,
        cpu: &Cpu<H>,
        copy: &mut Change<'_, H>,
        child: &Self,
        vma: &Vma<H>,
        protected: &mut bool,
    ) -> Result<(), OutOfMemory> {
        copy.plan(&cpu.pin(), 1)?;
        let seen = vma.snapshot();
        // From here on no fault sets the anon_vma or maps a page: one that did would be missed.
        vma.seq.write_begin();
        let result = (|| {
            let wipe = seen.flags.contains(VmFlags::WIPEONFORK);
            let anon = match vma.anon_vma().filter(|_| !wipe) {
                Some(anon) => {
                    Some(anon.for_fork(&self.mm().machine, &cpu.participant(), child.mm().cookie())?)
                }
                None => None,
            };
            copy.insert(cpu.pin(), seen.range, seen.flags, seen.pgoff, vma.object().cloned());
            let Some(anon) = anon else { return Ok(()) };
            {
                let pin = cpu.pin();
                if let Some(made) = child.mm().index.find(&pin, seen.range.start) {
                    made.install_anon(anon);
                }
            }
            // Private copies of a file's pages vanish when the file is cut short, whatever the layout lock says: that
            // walk holds this lock, and would free a page between our look at its entry and our counting it.
            let _mappings = copy.lock_mappings(vma.object());
            share_pages(self.mm(), child.mm(), cpu, seen.range, protected)
        })();
        vma.seq.write_end();
        result
    }
}

/// Makes the private pages of `range` shared between the two.
fn share_pages<H: Host>(
    parent: &Mm<H>,
    child: &Mm<H>,
    cpu: &Cpu<H>,
    range: AddrRange,
    protected: &mut bool,
) -> Result<(), OutOfMemory> {
    let mut result = Ok(());
    parent.for_each_part(cpu, range, |ram, part| {
        if result.is_err() {
            return;
        }
        result = parent.page_table.for_each_pair(&child.page_table, ram, part, |pair| {
            Slot::for_each_used(pair.parent, |index, slot| {
                *protected |= share_entry::<H>(ram, slot, &pair.child[index]);
                ControlFlow::Continue(())
            })
        });
    });
    // Nobody else changes the child's tables, so only memory can be missing.
    result.map_err(|_: SlotError| OutOfMemory)
}

/// Shares one page. Returns true when the parent's processors may hold a translation that allows stores.
fn share_entry<H: Host>(ram: &Ram<'_, H>, slot: &Slot, copy: &Slot) -> bool {
    let mut raw = slot.load();
    let mut counted = false;
    loop {
        if raw == BUSY {
            raw = slot.wait_not_busy(ram);
            continue;
        }
        let (frame, flags, hidden) = match Pte::decode::<H::Format>(raw) {
            Pte::Page { frame, flags } => (frame, flags, false),
            Pte::NoAccess { frame, flags } => (frame, flags, true),
            _ => return false,
        };
        let meta = ram.frames.meta(frame);
        if !meta.flags().contains(FrameFlags::ANON) {
            // A page of an object, or the zeros: the child finds it again by itself.
            return false;
        }
        if !counted {
            meta.inc_references();
            counted = true;
        }
        let shared = flags.difference(PteFlags::WRITE);
        if !hidden && flags.contains(PteFlags::WRITE) {
            match slot.replace(raw, H::Format::with_flags(raw, shared)) {
                Ok(()) => {}
                // The processor has set a mark meanwhile. The page is the same: nobody unmaps while we hold the lock.
                Err(now) => {
                    raw = now;
                    continue;
                }
            }
        }
        let entry = if hidden {
            Pte::NoAccess { frame, flags: shared }
        } else {
            // The child has not used it yet.
            Pte::Page { frame, flags: shared.difference(PteFlags::ACCESSED) }
        };
        copy.fill(entry.encode::<H::Format>());
        return !hidden && flags.contains(PteFlags::WRITE);
    }
}
