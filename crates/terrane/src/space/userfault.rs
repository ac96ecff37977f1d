//! Resolving faults outside the library, in the manner of Linux's `userfaultfd`: the calls of a handler.
//!
//! A [`UserFaults`] is what the file descriptor is in Linux. It is made for a space, [registers](UserFaults::register) ranges of it, [reads](UserFaults::read_events)
//! the faults there, and resolves them. The protocol is in [`fault::user`](crate::fault::user).
//!
//! Registering is a change of attributes, like advice: VMAs are divided and merged. The number of the context is
//! among the attributes, so only what belongs to one context merges.

mod forks;
mod written;

pub(super) use forks::Forks;

use super::change::Change;
use super::{AddressSpace, retry_with_memory};
use crate::addr::{AddrRange, is_page_aligned};
use crate::error::{Error, OutOfMemory};
use crate::fault::user::context::Context;
use crate::fault::user::fill::{Source, fill};
use crate::fault::user::{moves, protect};
use crate::host::Host;
use crate::machine::{Cpu, Machine};
use crate::mm::Mm;
use crate::page_table::Format;
use crate::sync::Shared;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::vma::{VmFlags, Vma};
use core::fmt;
use core::ops::ControlFlow;

pub use crate::fault::user::context::UserFeatures;
pub use crate::fault::user::{FaultKind, UserEvent, UserFault};

bitflags::bitflags! {
    /// Which faults of a range go to a handler (`UFFDIO_REGISTER_MODE_…`, with Linux's values).
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
    pub struct UserFaultModes: u64 {
        /// Pages that are not there.
        const MISSING = 1;
        /// Stores to pages that the handler has write-protected.
        const WP = 1 << 1;
        /// Pages of shared memory that are there, and not mapped here yet.
        const MINOR = 1 << 2;
    }
}

bitflags::bitflags! {
    /// How to resolve.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct Resolve: u64 {
        /// Do not wake: [`UserFaults::wake`] will.
        const DONT_WAKE = 1;
        /// Map the page write-protected, as [`UserFaults::write_protect`] would. For `copy` and `resume`.
        const WP = 1 << 1;
        /// Pages of the source that are not there count as moved. For `move_pages`.
        const ALLOW_SOURCE_HOLES = 1 << 2;
    }
}

/// A call that did not do all, or nothing at all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Incomplete {
    /// Bytes from the start of the range that have been resolved, and woken.
    pub done: u64,
    /// The errno that the call ends in: [`Error::Again`] when something was done, as in Linux.
    pub error: Error,
}

impl From<Error> for Incomplete {
    fn from(error: Error) -> Self {
        Self { done: 0, error }
    }
}

impl fmt::Display for Incomplete {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} after {} bytes", self.error, self.done)
    }
}

impl core::error::Error for Incomplete {}

/// A handler of the faults of some ranges of a space. Clones are the same handler. When the last one is dropped, its ranges are as any others, and
/// whoever waited faults anew.
///
/// Calls block; not while pinned. Addresses and lengths are in bytes and multiples of a page. Calls after the space has
/// ended return [`Error::NoSpace`].
pub struct UserFaults<H: Host>(Shared<Handler<H>>);

struct Handler<H: Host> {
    context: Shared<Context<H>>,
    machine: Shared<Machine<H>>,
    /// Ends the context when it is dropped.
    armed: AtomicBool,
}

impl<H: Host> Clone for UserFaults<H> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<H: Host> fmt::Debug for UserFaults<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UserFaults").field("context", &self.0.context.number).finish_non_exhaustive()
    }
}

impl<H: Host> AddressSpace<H> {
    /// Makes a handler of user faults, which has no ranges yet (`userfaultfd(2)`).
    ///
    /// # Errors
    /// [`Error::NoMemory`].
    pub fn user_faults(&self, cpu: &Cpu<H>, features: UserFeatures) -> Result<UserFaults<H>, Error> {
        let mm = self.shared_mm();
        let context = retry_with_memory(cpu, || {
            mm.users.add(mm, features, self.config().map_limit).map_err(|_| OutOfMemory)
        })?;
        let number = context.number;
        let handler = Handler { context, machine: mm.machine.clone(), armed: AtomicBool::new(true) };
        match Shared::try_new_or_return(handler) {
            Ok(handler) => Ok(UserFaults(handler)),
            Err(handler) => {
                mm.users.remove(number);
                handler.context.home.write().take();
                Err(Error::NoMemory)
            }
        }
    }
}

impl<H: Host> UserFaults<H> {
    /// Runs `act` with the space, which stays meanwhile.
    fn home<R, E: From<Error>>(&self, act: impl FnOnce(&Mm<H>) -> Result<R, E>) -> Result<R, E> {
        let home = self.0.context.home.read();
        match &*home {
            Some(mm) => act(mm),
            None => Err(Error::NoSpace.into()),
        }
    }

    /// Has the faults of `modes` in `len` bytes at `addr` delivered here. What was registered in other modes before is registered in
    /// these, unless they are among those. O(log n) and the VMAs of the range.
    ///
    /// # Errors
    /// [`Error::Invalid`]: no modes; an unaligned or empty range, or one beyond the space; nothing mapped there; a mapping that
    /// is neither private memory nor shared memory (for `MINOR`: not shared memory). [`Error::NotPermitted`]: a mapping that can never be written.
    /// [`Error::Busy`]: one that another handler has. [`Error::NoMemory`].
    pub fn register(&self, cpu: &Cpu<H>, addr: u64, len: u64, modes: UserFaultModes) -> Result<(), Error> {
        if modes.is_empty() || !UserFaultModes::all().contains(modes) {
            return Err(Error::Invalid);
        }
        let context = &*self.0.context;
        self.home(|mm| {
            let range = checked_range(mm, addr, len)?;
            let modes = vm_modes(modes);
            let number = context.number;
            let new = |flags: VmFlags| {
                if flags.user_context() == number && flags.contains(modes) {
                    flags
                } else {
                    flags.with_user_context(number, modes)
                }
            };
            let mut change = Change::begin(mm, cpu, range);
            let check = |vma: &Vma<H>, flags: VmFlags| {
                if !can_be_registered(vma, flags, modes, context.features) {
                    Err(Error::Invalid)
                } else if !flags.contains(VmFlags::MAYWRITE) {
                    Err(Error::NotPermitted)
                } else if flags.user_context() != 0 && flags.user_context() != number {
                    Err(Error::Busy)
                } else {
                    Ok(())
                }
            };
            change_flags(&mut change, range, check, new, context.map_limit)?;
            drop(change);
            cpu.tidy();
            Ok(())
        })
    }

    /// Makes the faults of `len` bytes at `addr` ordinary ones again, and wakes those that wait. Write-protection by the handler is
    /// taken away.
    ///
    /// # Errors
    /// [`Error::Invalid`]: a range as for [`register`](Self::register), or a mapping in it that another handler has.
    /// [`Error::NoMemory`].
    pub fn unregister(&self, cpu: &Cpu<H>, addr: u64, len: u64) -> Result<(), Error> {
        let context = &*self.0.context;
        self.home(|mm| {
            let range = checked_range(mm, addr, len)?;
            let wakes_first = mutant!("user_unregister_wakes_first", false, true);
            if wakes_first {
                context.queue.wake(mm.machine.host(), range);
            }
            let mut change = Change::begin(mm, cpu, range);
            let check = |vma: &Vma<H>, flags: VmFlags| {
                let other = flags.user_context() != 0 && flags.user_context() != context.number;
                if other || !can_be_registered(vma, flags, flags, context.features) {
                    Err(Error::Invalid)
                } else {
                    Ok(())
                }
            };
            let new = |flags: VmFlags| flags.difference(VmFlags::UFFD);
            change_flags(&mut change, range, check, new, context.map_limit)?;
            protect::clear(mm, cpu, range);
            drop(change);
            if !wakes_first {
                context.queue.wake(mm.machine.host(), range);
            }
            cpu.tidy();
            Ok(())
        })
    }

    /// Takes events that nobody has read, the oldest first, up to as many as there is room for; returns how many. Does not wait.
    ///
    /// # Errors
    /// [`Error::Again`] when there is none; [`Error::NoSpace`].
    pub fn try_read_events(&self, events: &mut [UserEvent]) -> Result<usize, Error> {
        match self.0.context.queue.read(self.0.machine.host(), events) {
            None => Err(Error::NoSpace),
            Some(0) => Err(Error::Again),
            Some(count) => Ok(count),
        }
    }

    /// True when there is an event that nobody has read.
    pub fn has_events(&self) -> bool {
        self.0.context.queue.has_unread()
    }

    /// The same, but waits for an event. Returns 0 after [`interrupt`](Self::interrupt), and may do so for no reason.
    ///
    /// # Errors
    /// [`Error::NoSpace`].
    pub fn read_events(&self, cpu: &Cpu<H>, events: &mut [UserEvent]) -> Result<usize, Error> {
        self.0.context.queue.read_or_wait(self.0.machine.host(), cpu.id(), events).ok_or(Error::NoSpace)
    }

    /// Waits until there is an event, and leaves it for whoever reads it (`poll`). Returns after [`interrupt`](Self::interrupt), and may do
    /// so for no reason.
    ///
    /// # Errors
    /// [`Error::NoSpace`].
    pub fn wait_for_event(&self, cpu: &Cpu<H>) -> Result<(), Error> {
        self.0.context.queue.wait_for_event(self.0.machine.host(), cpu.id()).ok_or(Error::NoSpace)
    }

    /// Makes those who wait in [`read_events`](Self::read_events) or [`wait_for_event`](Self::wait_for_event) return.
    pub fn interrupt(&self) {
        self.0.context.queue.interrupt(self.0.machine.host());
    }

    /// Faults that wait, whether their events have been read or not.
    pub fn waiting(&self) -> usize {
        self.0.context.queue.waiting()
    }

    /// The handler of a child's ranges, of which [`UserEvent::Fork`] has told with this number; `None` when it has been fetched. As
    /// long as it is not, the child's faults wait.
    ///
    /// # Errors
    /// [`Error::NoMemory`]; it can be fetched again.
    pub fn forked(&self, number: u64) -> Result<Option<UserFaults<H>>, Error> {
        let Some(context) = self.0.context.peek_forked(number) else { return Ok(None) };
        // Room first: what is taken must not be dropped, or the child's ranges are ordinary ones.
        let handler = Handler { context, machine: self.0.machine.clone(), armed: AtomicBool::new(false) };
        let handler = Shared::try_new(handler)?;
        if self.0.context.take_forked(Some(number)).is_none() {
            return Ok(None);
        }
        handler.armed.store(true, Ordering::Relaxed);
        Ok(Some(UserFaults(handler)))
    }

    /// Puts `bytes`, whole pages, at `to`, where nothing is yet, and wakes (`UFFDIO_COPY`). Some 64 pages are installed under one pin.
    ///
    /// # Errors
    /// [`Error::Invalid`]: unaligned, empty, a file's mapping, or `WP` where that is not registered. [`Error::NotFound`]: not in one mapping
    /// that is registered. [`Error::Exists`]: the page is there. [`Error::BadAddress`]: beyond the end of the object.
    /// [`Error::NoMemory`]; [`Error::Again`] when some of the pages have been put there, which [`Incomplete::done`] says.
    pub fn copy(&self, cpu: &Cpu<H>, to: u64, bytes: &[u8], how: Resolve) -> Result<(), Incomplete> {
        let allowed = Resolve::DONT_WAKE.union(Resolve::WP);
        self.fill(cpu, to, bytes.len() as u64, how, allowed, Source::Bytes(bytes))
    }

    /// The same with zeros (`UFFDIO_ZEROPAGE`): for private memory the frame of zeros, which takes no memory.
    ///
    /// # Errors
    /// As [`copy`](Self::copy).
    pub fn zeropage(&self, cpu: &Cpu<H>, addr: u64, len: u64, how: Resolve) -> Result<(), Incomplete> {
        self.fill(cpu, addr, len, how, Resolve::DONT_WAKE, Source::Zeros)
    }

    /// Maps the pages of shared memory that are in memory, and wakes (`UFFDIO_CONTINUE`).
    ///
    /// # Errors
    /// As [`copy`](Self::copy); [`Error::BadAddress`] also for a page that is not in memory.
    pub fn resume(&self, cpu: &Cpu<H>, addr: u64, len: u64, how: Resolve) -> Result<(), Incomplete> {
        let allowed = Resolve::DONT_WAKE.union(Resolve::WP);
        self.fill(cpu, addr, len, how, allowed, Source::Cached)
    }

    /// Declares pages that are not there lost (`UFFDIO_POISON`): who touches them gets a bus error until the range is unmapped or
    /// forgotten.
    ///
    /// # Errors
    /// As [`copy`](Self::copy).
    pub fn poison(&self, cpu: &Cpu<H>, addr: u64, len: u64, how: Resolve) -> Result<(), Incomplete> {
        self.fill(cpu, addr, len, how, Resolve::DONT_WAKE, Source::Poison)
    }

    fn fill(
        &self,
        cpu: &Cpu<H>,
        addr: u64,
        len: u64,
        how: Resolve,
        allowed: Resolve,
        source: Source<'_>,
    ) -> Result<(), Incomplete> {
        self.home(|mm| {
            let range = checked_range(mm, addr, len)?;
            if !allowed.contains(how) {
                return Err(Error::Invalid.into());
            }
            let _filling = self.filling()?;
            let (done, result) = fill(mm, cpu, range, source, how.contains(Resolve::WP));
            self.settle(mm, range, done, result, how)
        })
    }

    /// Moves the pages of `len` bytes at `from`, private memory of the same space, to `to`, where nothing is yet, without
    /// copying, and wakes (`UFFDIO_MOVE`). Nothing is left at `from`.
    ///
    /// # Errors
    /// [`Error::Invalid`]: unaligned or empty; ranges that do not lie in one mapping each; not private memory; different protection;
    /// no permission to store; `to` not registered here. [`Error::NotFound`]: nothing mapped, or a page of the source that is not there.
    /// [`Error::Exists`]: there is a page at the destination. [`Error::Busy`]: somebody else maps the page too, or it is
    /// swapped out. [`Error::NoMemory`]; [`Error::Again`] when some of the pages have been moved.
    pub fn move_pages(
        &self,
        cpu: &Cpu<H>,
        to: u64,
        from: u64,
        len: u64,
        how: Resolve,
    ) -> Result<(), Incomplete> {
        self.home(|mm| {
            let target = checked_range(mm, to, len)?;
            let source = checked_range(mm, from, len)?;
            if !Resolve::DONT_WAKE.union(Resolve::ALLOW_SOURCE_HOLES).contains(how) {
                return Err(Error::Invalid.into());
            }
            let holes = how.contains(Resolve::ALLOW_SOURCE_HOLES);
            let terms = moves::Terms { number: self.0.context.number, holes };
            let _filling = self.filling()?;
            let (done, result) = moves::move_pages(mm, cpu, target, source, terms);
            self.settle(mm, target, done, result, how)
        })
    }

    /// Write-protects the pages of `len` bytes at `addr` (`on`), so that stores to them are delivered, or takes that away and wakes
    /// (`UFFDIO_WRITEPROTECT`). When it returns, no store to a protected page is under way.
    ///
    /// # Errors
    /// [`Error::Invalid`]: unaligned, empty, or `on` together with [`Resolve::DONT_WAKE`]. [`Error::NotFound`]: nothing mapped, or a
    /// mapping that is not registered for it; what lies before is done. [`Error::NoMemory`].
    pub fn write_protect(
        &self,
        cpu: &Cpu<H>,
        addr: u64,
        len: u64,
        on: bool,
        how: Resolve,
    ) -> Result<(), Error> {
        if !Resolve::DONT_WAKE.contains(how) || on && !how.is_empty() {
            return Err(Error::Invalid);
        }
        self.home(|mm| {
            let range = checked_range(mm, addr, len)?;
            let unpopulated = self.0.context.features.contains(UserFeatures::WP_UNPOPULATED);
            {
                let _filling = self.filling()?;
                protect::write_protect(mm, cpu, range, on, unpopulated)?;
            }
            if !on && how.is_empty() {
                self.0.context.queue.wake(mm.machine.host(), range);
            }
            Ok(())
        })
    }

    /// Wakes the faults that wait in `len` bytes at `addr`: they look again (`UFFDIO_WAKE`).
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unaligned or empty range, or one beyond the space.
    pub fn wake(&self, addr: u64, len: u64) -> Result<(), Error> {
        self.home(|mm| {
            let range = checked_range(mm, addr, len)?;
            self.0.context.queue.wake(mm.machine.host(), range);
            Ok(())
        })
    }

    /// Keeps calls from announcing that they change what is mapped.
    ///
    /// # Errors
    /// [`Error::Again`] when one has, and its event has not been read.
    fn filling(&self) -> Result<lock_api::RwLockReadGuard<'_, H::RwLock, ()>, Error> {
        let filling = self.0.context.filling.read();
        if self.0.context.queue.is_changing() { Err(Error::Again) } else { Ok(filling) }
    }

    /// Wakes what has been resolved, and says what the call came to.
    fn settle(
        &self,
        mm: &Mm<H>,
        range: AddrRange,
        done: u64,
        result: Result<(), Error>,
        how: Resolve,
    ) -> Result<(), Incomplete> {
        if done > 0 && !how.contains(Resolve::DONT_WAKE) {
            let resolved = AddrRange::new(range.start, range.start + done);
            self.0.context.queue.wake(mm.machine.host(), resolved);
        }
        result.map_err(|error| Incomplete { done, error: if done > 0 { Error::Again } else { error } })
    }
}

impl<H: Host> Drop for Handler<H> {
    fn drop(&mut self) {
        if !*self.armed.get_mut() {
            return;
        }
        // The housekeeper before the home: a space that ends takes them in this order.
        Cpu::as_housekeeper(&self.machine, |cpu| {
            let mut home = self.context.home.write();
            if let Some(mm) = home.take() {
                // The VMAs first: their faults wait until the end, and none comes after it.
                unregister_all(&mm, cpu, self.context.number);
                self.context.queue.close(self.machine.host());
                mm.users.remove(self.context.number);
            }
        });
        // Those of children that nobody has fetched.
        while let Some(context) = self.context.take_forked(None) {
            end_context(context, &self.machine);
        }
    }
}

/// Ends a context that no handler has.
fn end_context<H: Host>(context: Shared<Context<H>>, machine: &Shared<Machine<H>>) {
    drop(Handler { context, machine: machine.clone(), armed: AtomicBool::new(true) });
}

/// Takes context `number` off all VMAs. Needs no memory, for none is divided.
fn unregister_all<H: Host>(mm: &Mm<H>, cpu: &Cpu<H>, number: u16) {
    let range = mm.index.limits();
    let mut change = Change::begin(mm, cpu, range);
    let mut at = range.start;
    loop {
        let found = {
            let pin = cpu.pin();
            let mut found = None;
            change.for_each(&pin, AddrRange::new(at, range.end), |_, seen| {
                if seen.flags.user_context() != number {
                    return ControlFlow::Continue(());
                }
                found = Some(seen);
                ControlFlow::Break(())
            });
            found
        };
        let Some(seen) = found else { break };
        change.set_flags(seen.range, |flags| flags.difference(VmFlags::UFFD));
        if seen.flags.contains(VmFlags::UFFD_WP) {
            protect::clear(mm, cpu, seen.range);
        }
        at = seen.range.end;
        if at >= range.end {
            break;
        }
    }
    change.merge_around(range);
    drop(change);
    cpu.tidy();
}

/// Checks each VMA in `range`, holes allowed, and changes their attributes to `new` of what they are.
fn change_flags<H: Host>(
    change: &mut Change<'_, H>,
    range: AddrRange,
    check: impl Fn(&Vma<H>, VmFlags) -> Result<(), Error>,
    new: impl Fn(VmFlags) -> VmFlags,
    map_limit: Option<usize>,
) -> Result<(), Error> {
    let (mut result, mut changes) = (Err(Error::Invalid), false);
    let splits = {
        let pin = change.cpu.pin();
        change.for_each(&pin, range, |vma, seen| {
            result = check(vma, seen.flags);
            changes |= new(seen.flags) != seen.flags;
            if result.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        result?;
        if !changes {
            return Ok(());
        }
        change.splits(&pin, range)
    };
    // Each division by itself, as in Linux; but all are looked at before the first.
    if splits > 0 && map_limit.is_some_and(|limit| change.mm.index.len() + splits > limit) {
        return Err(Error::NoMemory);
    }
    change.plan_splits()?;
    change.plan(&change.cpu.pin(), splits)?;
    change.alter(range, |_, flags| new(flags));
    change.cut_blocks();
    Ok(())
}

/// True for memory that may be registered in `modes`, as far as its kind goes.
fn can_be_registered<H: Host>(vma: &Vma<H>, flags: VmFlags, modes: VmFlags, features: UserFeatures) -> bool {
    if flags.intersects(VmFlags::DROPPABLE.union(VmFlags::PFNMAP).union(VmFlags::IO)) {
        return false;
    }
    let any = features.contains(UserFeatures::WP_ASYNC) && modes & VmFlags::UFFD_MODES == VmFlags::UFFD_WP;
    match vma.object() {
        None => !modes.contains(VmFlags::UFFD_MINOR),
        Some(object) => any || !object.is_file(),
    }
}

fn vm_modes(modes: UserFaultModes) -> VmFlags {
    let mut flags = VmFlags::empty();
    flags.set(VmFlags::UFFD_MISSING, modes.contains(UserFaultModes::MISSING));
    flags.set(VmFlags::UFFD_WP, modes.contains(UserFaultModes::WP));
    flags.set(VmFlags::UFFD_MINOR, modes.contains(UserFaultModes::MINOR));
    flags
}

/// The range, if it is one that a handler may name.
fn checked_range<H: Host>(mm: &Mm<H>, addr: u64, len: u64) -> Result<AddrRange, Error> {
    let limits = mm.index.limits();
    let end = addr.checked_add(len).filter(|&end| end <= H::Format::USER_END.min(limits.end));
    match end {
        Some(end) if is_page_aligned(addr) && is_page_aligned(len) && len > 0 && addr >= limits.start => {
            Ok(AddrRange::new(addr, end))
        }
        _ => Err(Error::Invalid),
    }
}
