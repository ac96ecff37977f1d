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
use super::share::share_pages;
use super::userfault::Forks;
use crate::error::{Error, OutOfMemory};
use crate::host::Host;
use crate::index::Reserve;
use crate::machine::Cpu;
use crate::stats::Counter;
use crate::sync::atomic::Ordering;
use crate::vma::{VmFlags, Vma};
use core::ptr::NonNull;

impl<H: Host> AddressSpace<H> {
    /// A copy of the space: the same mappings, private ones with the same content until either side stores. Mappings advised
    /// `DontFork` are left out, those advised `WipeOnFork` are empty in the child. O(VMAs and private pages).
    ///
    /// Waits until handlers of user faults that want to know ([`UserFeatures::EVENT_FORK`](super::UserFeatures::EVENT_FORK)) have
    /// read of it.
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
        let child = Self::try_new(cpu, self.config_now()).map_err(|_| OutOfMemory)?;
        let result = loop {
            let mut forks = match Forks::announce(cpu, self.mm()) {
                Ok(forks) => forks,
                Err(error) => break Err(error),
            };
            match self.copy_into(cpu, &child, &mut forks) {
                Ok(false) => {}
                Ok(true) => break Ok(forks),
                Err(error) => break Err(error),
            }
        };
        match result {
            Ok(forks) => {
                forks.done();
                Ok(child)
            }
            Err(error) => {
                child.destroy(cpu);
                Err(error)
            }
        }
    }

    /// False, and nothing done, when a handler of user faults has come that was not told.
    fn copy_into(&self, cpu: &Cpu<H>, child: &Self, forks: &mut Forks<'_, H>) -> Result<bool, OutOfMemory> {
        let _heap = self.mm().heap.lock();
        let all = self.mm().exclude(cpu, self.config().range);
        if !forks.are_all(self.mm()) {
            return Ok(false);
        }
        forks.make(child.shared_mm(), self.config().map_limit)?;
        // It stays as it is here: a listing need not wait.
        all.committed();
        let mut copy = Change::begin(child.mm(), cpu, self.config().range);
        child.mm().heap.set(self.mm().heap.range());
        child.mm().policies.copy_from(&self.mm().policies);
        child.mm().layout.set(self.mm().layout.get());
        if self.mm().may_be_sealed() {
            child.mm().expect_seals();
        }
        if self.mm().may_have_blocks() {
            child.mm().expect_blocks();
        }
        if let (Some(mine), Some(theirs)) = (&self.stretches, &child.stretches) {
            theirs.copy_from(mine);
        }
        self.mm().expect_sharers();
        child.mm().expect_sharers();
        // Before a page is shared: a walk looks for it in the child, too.
        child.mm().relocations.copy_from(&self.mm().relocations)?;
        let (mut protected, mut kin) = (false, 0);
        self.mm().forking.store(true, Ordering::SeqCst);
        let mut next = 0;
        let mut result = Ok(());
        loop {
            let found = {
                let pin = cpu.pin();
                self.mm().index.first_ending_after(&pin, next).map(NonNull::from)
            };
            let Some(vma) = found else { break };
            // SAFETY: in the index, and no other call changes anything: the whole space is ours.
            let vma = unsafe { vma.as_ref() };
            next = vma.end();
            if vma.flags().contains(VmFlags::DONTCOPY) {
                continue;
            }
            kin += 1;
            result = self.copy_vma(cpu, &mut copy, child, (vma, kin), forks, &mut protected);
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
            mutant!("fork_not_awaited", cpu.await_stores(ticket), ());
        } else {
            cpu.count(Counter::TlbFlushSkipped, 1);
        }
        self.mm().forking.store(false, Ordering::Release);
        result.map(|()| true)
    }

    fn copy_vma(
        &self,
        cpu: &Cpu<H>,
        copy: &mut Change<'_, H>,
        child: &Self,
        (vma, kin): (&Vma<H>, u32),
        forks: &mut Forks<'_, H>,
        protected: &mut bool,
    ) -> Result<(), OutOfMemory> {
        copy.plan(&cpu.pin(), 1)?;
        let seen = vma.snapshot();
        child.check_commit(seen.flags, seen.range.pages()).map_err(|_| OutOfMemory)?;
        // From here on no fault sets the anon_vma or maps a page: one that did would be missed. Under the lock of the leaf, because a
        // change in one step may be about it that has not seen that the space is held (`space::at_once`).
        let at = seen.range.start;
        let begun =
            self.mm().index.edit(&mut Reserve::new(), &cpu.pin(), at, 0, |vma, _| vma.seq.write_begin());
        debug_assert!(begun.is_some());
        let result = (|| {
            let wipe = seen.flags.contains(VmFlags::WIPEONFORK);
            let anon = match vma.anon_vma().filter(|_| !wipe) {
                Some(anon) => {
                    Some(anon.for_fork(&self.mm().machine, &cpu.participant(), child.mm().cookie())?)
                }
                None => None,
            };
            // Nothing is locked in a child, and its faults are nobody's, or its own handler's.
            let flags = forks.flags(seen.flags.difference(VmFlags::LOCKED_MASK));
            copy.insert(cpu.pin(), seen.range, flags, seen.pgoff, vma.object().cloned());
            let marks = flags.contains(VmFlags::UFFD_WP) && !wipe;
            let copies = anon.is_some() || marks || flags.contains(VmFlags::MAYBE_GUARD) && !wipe;
            if let Some(anon) = anon {
                let pin = cpu.pin();
                if let Some(made) = child.mm().index.find(&pin, seen.range.start) {
                    made.install_anon(anon);
                    made.set_kin(kin);
                }
            }
            if !copies {
                return Ok(());
            }
            // Private copies of a file's pages vanish when the file is cut short, whatever range is held: that
            // walk holds this lock, and would free a page between our look at its entry and our counting it.
            let _mappings = copy.lock_mappings(vma.object());
            share_pages(self.mm(), child.mm(), cpu, seen.range, marks, protected)
        })();
        vma.seq.write_end();
        result
    }
}
