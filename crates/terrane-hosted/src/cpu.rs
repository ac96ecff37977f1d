//! A processor in software: loads, stores and atomics through a TLB and a page table.
//!
//! Every access is an *attempt*: begin it ([`Port::enter`]), forget what others asked to forget, look in the TLB,
//! touch the memory, end it. When the TLB has nothing that will do, the attempt ends without having touched
//! anything, the page table is walked as an MMU does it (which marks the entry accessed, and dirty for a store),
//! a page fault is raised if that finds nothing, and the next attempt begins. So the state of the TLB is only a
//! matter of speed, and a processor inside an access never waits for anything.
//!
//! # Memory order
//!
//! Loads acquire, stores release, atomics are sequentially consistent; on x86-64 the first two are plain moves.
//! Aligned accesses are single copies: no other processor sees a part of one. An access that is not aligned is
//! made of bytes, in no particular order; one that crosses a page happens only if both pages allow it.
//!
//! The program that runs on these processors may race with itself, by accesses of different sizes to the same
//! bytes too. To keep that out of Rust's data races, simulated memory is touched by atomic operations only, never
//! through references. (Races of different sizes are outside what the Rust memory model describes today; every
//! processor defines them, and no compiler sees both sides.)

use crate::cpu_set::CpuSet;
use crate::error::HostedError;
use crate::machine::{Hosted, HostedMachine, Space};
use crate::tlb::{Forget, Port};
use crate::translations::{Needs, Translations};
use core::fmt;
use core::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
use terrane::addr::{PAGE_SIZE, page_floor};
use terrane::fault::Translation;
use terrane::host::Memory as _;
use terrane::page_table::PteFlags;
use terrane::stats::Counter;
use terrane::sync::{CpuId, Shared};
use terrane::vma::Access;
use terrane::{Error, FaultError};

/// Why an atomic operation did not happen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AtomicError {
    /// The address is not a multiple of the operand's size.
    Misaligned,
    /// The page fault could not be resolved.
    Fault(FaultError),
}

impl fmt::Display for AtomicError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AtomicError::Misaligned => f.write_str("atomic operation on an address that is not aligned"),
            AtomicError::Fault(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for AtomicError {}

impl From<FaultError> for AtomicError {
    fn from(error: FaultError) -> Self {
        AtomicError::Fault(error)
    }
}

/// A transfer of many bytes that ended early. The bytes before the fault have been transferred.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Interrupted {
    /// Bytes transferred.
    pub done: usize,
    /// What the access to the next one ended in.
    pub error: FaultError,
}

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} after {} bytes", self.error, self.done)
    }
}

impl std::error::Error for Interrupted {}

/// What a processor has done so far; see [`Cpu::activity`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Activity {
    /// Walks of the page table, because the TLB had no entry that would do.
    pub walks: u64,
    /// Walks that found no entry that would do either, and raised a page fault.
    pub faults: u64,
    /// Flushes of the whole TLB.
    pub flushes: u64,
}

/// A processor of a [`HostedMachine`], for one thread at a time.
///
/// It runs at most one address space; see [`switch_to`](Self::switch_to). An access to an address that the space
/// does not map, or not for this use, returns the [`FaultError`] that a kernel would turn into a signal. Without a
/// space every address is unmapped. Dropping the processor gives its number back to the machine.
pub struct Cpu {
    // The order matters twice: the words of every access come first, and `core`, which keeps alive what `port`
    // points into, is dropped after it.
    port: Port,
    tlb: Translations,
    space: Option<Shared<Space>>,
    walks: u64,
    faults: u64,
    core: terrane::machine::Cpu<Hosted>,
}

impl Cpu {
    pub(crate) fn new(machine: &HostedMachine) -> Result<Self, HostedError> {
        let tlb = Translations::new()?;
        let core = terrane::machine::Cpu::try_new(machine.machine()).map_err(|error| match error {
            Error::Again => HostedError::NoCpuFree,
            error => error.into(),
        })?;
        // SAFETY: `core` keeps the machine, and with it the host, alive for as long as the port; and it holds the
        // processor's number, so there is no other port of it.
        let port = unsafe { core.machine().host().tlb().port(core.id()) };
        Ok(Self { port, tlb, space: None, walks: 0, faults: 0, core })
    }

    /// The processor as Terrane knows it: what calls such as [`AddressSpace::map`](terrane::space::AddressSpace::map)
    /// take.
    #[inline]
    pub fn core(&self) -> &terrane::machine::Cpu<Hosted> {
        &self.core
    }

    /// The number of the processor.
    #[inline]
    pub fn id(&self) -> CpuId {
        self.core.id()
    }

    /// The space that runs here.
    #[inline]
    pub fn space(&self) -> Option<&Shared<Space>> {
        self.space.as_ref()
    }

    /// What the processor has done so far.
    pub fn activity(&self) -> Activity {
        Activity { walks: self.walks, faults: self.faults, flushes: self.tlb.flushes }
    }

    /// Runs `space` from now on, as a load of the page-table base register does. Flushes the TLB, unless `space`
    /// runs already.
    pub fn switch_to(&mut self, space: &Shared<Space>) {
        if self.space.as_ref().is_some_and(|current| Shared::ptr_eq(current, space)) {
            return;
        }
        self.leave_space();
        self.port.on();
        host_state(space).insert(self.id());
        self.space = Some(space.clone());
    }

    /// Runs no space from now on.
    pub fn switch_off(&mut self) {
        self.leave_space();
        self.port.off();
    }

    fn leave_space(&mut self) {
        if let Some(space) = self.space.take() {
            self.tlb.forget_all();
            self.core.count(Counter::TlbLocalFlushAll, 1);
            host_state(&space).remove(self.id());
        }
    }

    /// One access to the page of `addr`: calls `touch` with where the byte at `addr` is. `touch` must not panic,
    /// block, or call Terrane, and must stay inside the page. A load is done again if a shoot-down overtook it.
    #[inline(always)]
    fn access<R>(&mut self, addr: u64, needs: Needs, touch: impl Fn(*mut u8) -> R) -> Result<R, FaultError> {
        loop {
            if !self.port.enter() {
                self.catch_up();
            }
            if let Some(byte) = self.tlb.lookup(addr, needs) {
                let result = touch(byte);
                let again = needs == Needs::LOAD && self.port.is_overtaken();
                self.port.leave();
                if again {
                    continue;
                }
                return Ok(result);
            }
            self.port.leave();
            self.fill(addr, needs)?;
        }
    }

    /// One access to the pages of both `first` and `last`, which are the same page or neighbours.
    fn access_two<R>(
        &mut self,
        first: u64,
        last: u64,
        needs: Needs,
        touch: impl Fn(*mut u8, *mut u8) -> R,
    ) -> Result<R, FaultError> {
        loop {
            if !self.port.enter() {
                self.catch_up();
            }
            // Neighbours have different entries, so filling one does not push out the other.
            let missing = match (self.tlb.lookup(first, needs), self.tlb.lookup(last, needs)) {
                (Some(a), Some(b)) => {
                    let result = touch(a, b);
                    let again = needs == Needs::LOAD && self.port.is_overtaken();
                    self.port.leave();
                    if again {
                        continue;
                    }
                    return Ok(result);
                }
                (None, _) => first,
                _ => page_floor(last),
            };
            self.port.leave();
            self.fill(missing, needs)?;
        }
    }

    /// Forgets what others, or calls of this processor, have asked to forget.
    #[cold]
    #[inline(never)]
    fn catch_up(&mut self) {
        let (mut all, mut pages) = (0, 0);
        let received = self.port.catch_up(|what| {
            match &what {
                Forget::All => all += 1,
                Forget::Range(range) => pages += range.pages(),
            }
            self.tlb.forget(what);
        });
        // Plain stores to words of our own: allowed inside an access.
        self.core.count(Counter::TlbRemoteFlushReceived, received);
        self.core.count(Counter::TlbLocalFlushAll, all);
        self.core.count(Counter::TlbLocalFlushOne, pages);
    }

    /// Gets a translation of `addr` into the TLB, through a page fault if need be.
    #[cold]
    #[inline(never)]
    fn fill(&mut self, addr: u64, needs: Needs) -> Result<(), FaultError> {
        let Some(space) = &self.space else {
            // Whoever is off stays off, though it has tried.
            self.port.off();
            return Err(FaultError::NotMapped);
        };
        let access = match needs {
            Needs::STORE => Access::Write,
            Needs::FETCH => Access::Execute,
            _ => Access::Read,
        };
        self.walks += 1;
        self.port.will_hold(addr, |what| {
            self.tlb.forget(what);
            self.core.count(Counter::TlbLocalFlushAll, 1);
        });
        let Translation { frame, flags } = match space.translate(&self.core, addr, access) {
            Some(translation) => translation,
            None => {
                self.faults += 1;
                space.fault(&self.core, addr, access)?
            }
        };
        let mut meets = Needs::LOAD;
        // A store through an entry that is not dirty walks again, and the walk marks it.
        if flags.contains(PteFlags::WRITE.union(PteFlags::DIRTY)) {
            meets = meets.and(Needs::STORE);
        }
        if flags.contains(PteFlags::EXEC) {
            meets = meets.and(Needs::FETCH);
        }
        let page = self.core.machine().host().bytes(frame);
        self.tlb.insert(addr, page.as_ptr(), meets);
        Ok(())
    }

    /// Checks that an instruction can be fetched from `addr`, resolving the fault if there is one.
    ///
    /// # Errors
    /// The fault, if it cannot be resolved.
    #[inline]
    pub fn execute(&mut self, addr: u64) -> Result<(), FaultError> {
        self.access(addr, Needs::FETCH, |_| ())
    }

    /// Copies from `addr` on into `buffer`, page by page. Not atomic: others may write meanwhile.
    ///
    /// # Errors
    /// [`Interrupted`]: the fault, and how many bytes were read before it.
    pub fn read_bytes(&mut self, addr: u64, buffer: &mut [u8]) -> Result<(), Interrupted> {
        let buffer_start = buffer.as_mut_ptr();
        self.pages(addr, buffer.len(), Needs::LOAD, |page, done, len| {
            // SAFETY: `page` has `len` bytes that are touched by atomics only; so has the buffer from `done` on,
            // and it is borrowed for this call.
            unsafe { copy_out(page, buffer_start.add(done), len) }
        })
    }

    /// Copies `bytes` to `addr` and on, page by page. Not atomic: others may see a part.
    ///
    /// # Errors
    /// [`Interrupted`]: the fault, and how many bytes were written before it.
    pub fn write_bytes(&mut self, addr: u64, bytes: &[u8]) -> Result<(), Interrupted> {
        self.pages(addr, bytes.len(), Needs::STORE, |page, done, len| {
            // SAFETY: `page` has `len` bytes that are touched by atomics only; so has the slice from `done` on.
            unsafe { copy_in(page, bytes.as_ptr().add(done), len) }
        })
    }

    /// Sets the `len` bytes from `addr` on to `byte`, page by page. Not atomic.
    ///
    /// # Errors
    /// [`Interrupted`]: the fault, and how many bytes were written before it.
    pub fn fill_bytes(&mut self, addr: u64, len: usize, byte: u8) -> Result<(), Interrupted> {
        self.pages(addr, len, Needs::STORE, |page, _, len| {
            // SAFETY: `page` has `len` bytes that are touched by atomics only.
            unsafe { set(page, byte, len) }
        })
    }

    /// Calls `touch` with each page's part of the range: where it is, how many bytes came before, and its length.
    fn pages(
        &mut self,
        addr: u64,
        len: usize,
        needs: Needs,
        touch: impl Fn(*mut u8, usize, usize),
    ) -> Result<(), Interrupted> {
        let mut done = 0;
        while done < len {
            let interrupted = |error| Interrupted { done, error };
            let at = addr.checked_add(done as u64).ok_or(interrupted(FaultError::NotMapped))?;
            let part = (len - done).min((PAGE_SIZE - at % PAGE_SIZE) as usize);
            self.access(at, needs, |page| touch(page, done, part)).map_err(interrupted)?;
            done += part;
        }
        Ok(())
    }

    /// A load that is not aligned.
    #[cold]
    fn load_split<const N: usize>(&mut self, addr: u64) -> Result<[u8; N], FaultError> {
        let (last, split) = ends(addr, N)?;
        self.access_two(addr, last, Needs::LOAD, |first, last| {
            let mut bytes = [0; N];
            for (n, byte) in bytes.iter_mut().enumerate() {
                // SAFETY: bytes below `split` follow `first` in its page, the others end with `last` in its page;
                // all are touched by atomics only.
                *byte = unsafe { byte_at(first, last, n, split, N) }.load(Ordering::Acquire);
            }
            bytes
        })
    }

    /// A store that is not aligned.
    #[cold]
    fn store_split<const N: usize>(&mut self, addr: u64, bytes: [u8; N]) -> Result<(), FaultError> {
        let (last, split) = ends(addr, N)?;
        self.access_two(addr, last, Needs::STORE, |first, last| {
            for (n, byte) in bytes.iter().enumerate() {
                // SAFETY: as in `load_split`.
                unsafe { byte_at(first, last, n, split, N) }.store(*byte, Ordering::Release);
            }
        })
    }
}

impl Drop for Cpu {
    fn drop(&mut self) {
        self.switch_off();
    }
}

impl fmt::Debug for Cpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cpu")
            .field("id", &self.id())
            .field("activity", &self.activity())
            .finish_non_exhaustive()
    }
}

fn host_state(space: &Space) -> &CpuSet {
    space.host_state()
}

/// The last of `len` bytes from `addr` on, and how many of them lie on the first page.
fn ends(addr: u64, len: usize) -> Result<(u64, usize), FaultError> {
    let last = addr.checked_add(len as u64 - 1).ok_or(FaultError::NotMapped)?;
    let split = (PAGE_SIZE - addr % PAGE_SIZE).min(len as u64) as usize;
    Ok((last, split))
}

/// Byte `n` of an access of `len` bytes that begins at `first` and whose last byte is at `last`.
///
/// # Safety
/// The bytes below `split` lie behind `first` in one allocation, the others before `last` in one; `n < len`.
#[inline]
unsafe fn byte_at<'a>(first: *mut u8, last: *mut u8, n: usize, split: usize, len: usize) -> &'a AtomicU8 {
    // SAFETY: by the caller.
    unsafe { AtomicU8::from_ptr(if n < split { first.add(n) } else { last.sub(len - 1 - n) }) }
}

macro_rules! loads_and_stores {
    ($($atomic:ident $int:ident $load:ident $store:ident;)*) => {
        impl Cpu {$(
            #[doc = concat!("Loads a `", stringify!($int), "` in the byte order of the host.")]
            ///
            /// # Errors
            /// The fault, if it cannot be resolved.
            #[inline]
            pub fn $load(&mut self, addr: u64) -> Result<$int, FaultError> {
                if !addr.is_multiple_of(size_of::<$int>() as u64) {
                    return self.load_split(addr).map($int::from_ne_bytes);
                }
                self.access(addr, Needs::LOAD, |at| {
                    // SAFETY: aligned, so all in the page, which is memory of the machine for as long as the
                    // access lasts and is touched by atomics only.
                    unsafe { $atomic::from_ptr(at.cast()) }.load(Ordering::Acquire)
                })
            }

            #[doc = concat!("Stores a `", stringify!($int), "` in the byte order of the host.")]
            ///
            /// # Errors
            /// The fault, if it cannot be resolved; nothing has been stored then.
            #[inline]
            pub fn $store(&mut self, addr: u64, value: $int) -> Result<(), FaultError> {
                if !addr.is_multiple_of(size_of::<$int>() as u64) {
                    return self.store_split(addr, value.to_ne_bytes());
                }
                self.access(addr, Needs::STORE, |at| {
                    // SAFETY: as for the load.
                    unsafe { $atomic::from_ptr(at.cast()) }.store(value, Ordering::Release);
                })
            }
        )*}
    };
}

loads_and_stores! {
    AtomicU8 u8 load_u8 store_u8;
    AtomicU16 u16 load_u16 store_u16;
    AtomicU32 u32 load_u32 store_u32;
    AtomicU64 u64 load_u64 store_u64;
}

macro_rules! atomics {
    ($($atomic:ident $int:ident $add:ident $swap:ident $exchange:ident;)*) => {
        impl Cpu {$(
            /// Adds `value`, wrapping, and returns what was there before.
            ///
            /// # Errors
            /// [`AtomicError`]; nothing has been stored then.
            #[inline]
            pub fn $add(&mut self, addr: u64, value: $int) -> Result<$int, AtomicError> {
                self.atomic(addr, size_of::<$int>(), |at| {
                    // SAFETY: aligned, so all in the page, which is memory of the machine for as long as the
                    // access lasts and is touched by atomics only.
                    unsafe { $atomic::from_ptr(at.cast()) }.fetch_add(value, Ordering::SeqCst)
                })
            }

            /// Stores `value` and returns what was there before.
            ///
            /// # Errors
            /// [`AtomicError`]; nothing has been stored then.
            #[inline]
            pub fn $swap(&mut self, addr: u64, value: $int) -> Result<$int, AtomicError> {
                self.atomic(addr, size_of::<$int>(), |at| {
                    // SAFETY: as above.
                    unsafe { $atomic::from_ptr(at.cast()) }.swap(value, Ordering::SeqCst)
                })
            }

            /// Stores `new` if `current` is there; `Ok` when it was, else `Err`, each with what was there. Like the
            /// processor's instruction it needs a page that may be written, whether it stores or not.
            ///
            /// # Errors
            /// [`AtomicError`]; nothing has been stored then.
            #[inline]
            pub fn $exchange(
                &mut self,
                addr: u64,
                current: $int,
                new: $int,
            ) -> Result<Result<$int, $int>, AtomicError> {
                self.atomic(addr, size_of::<$int>(), |at| {
                    // SAFETY: as above.
                    unsafe { $atomic::from_ptr(at.cast()) }
                        .compare_exchange(current, new, Ordering::SeqCst, Ordering::SeqCst)
                })
            }
        )*}
    };
}

atomics! {
    AtomicU32 u32 fetch_add_u32 swap_u32 compare_exchange_u32;
    AtomicU64 u64 fetch_add_u64 swap_u64 compare_exchange_u64;
}

impl Cpu {
    #[inline(always)]
    fn atomic<R>(&mut self, addr: u64, size: usize, touch: impl Fn(*mut u8) -> R) -> Result<R, AtomicError> {
        if !addr.is_multiple_of(size as u64) {
            return Err(AtomicError::Misaligned);
        }
        Ok(self.access(addr, Needs::STORE, touch)?)
    }
}

const WORD: usize = size_of::<u64>();

/// Splits `len` bytes from `at` on into bytes before the first whole word, whole words, and bytes after.
fn by_words(at: *mut u8, len: usize) -> (usize, usize, usize) {
    let before = (at.addr().wrapping_neg() % WORD).min(len);
    let words = (len - before) / WORD;
    (before, words, len - before - words * WORD)
}

/// Copies `len` bytes of simulated memory into the program's.
///
/// # Safety
/// `from` is valid for `len` bytes that are touched by atomics only, `to` for `len` bytes that are the caller's.
unsafe fn copy_out(from: *mut u8, to: *mut u8, len: usize) {
    let (before, words, after) = by_words(from, len);
    // SAFETY: the parts make up `len` bytes, and the words of `from` are aligned.
    unsafe {
        for n in 0..before {
            to.add(n).write(AtomicU8::from_ptr(from.add(n)).load(Ordering::Relaxed));
        }
        let (from, to) = (from.add(before), to.add(before));
        for n in 0..words {
            let word = AtomicU64::from_ptr(from.cast::<u64>().add(n)).load(Ordering::Relaxed);
            to.cast::<u64>().add(n).write_unaligned(word);
        }
        for n in words * WORD..words * WORD + after {
            to.add(n).write(AtomicU8::from_ptr(from.add(n)).load(Ordering::Relaxed));
        }
    }
    // The loads of the transfer come before what follows it, as loads of words do.
    core::sync::atomic::fence(Ordering::Acquire);
}

/// Copies `len` bytes of the program's memory into simulated memory.
///
/// # Safety
/// `to` is valid for `len` bytes that are touched by atomics only, `from` for `len` bytes that nobody writes.
unsafe fn copy_in(to: *mut u8, from: *const u8, len: usize) {
    // What came before the transfer is seen by whoever sees a part of it, as with stores of words.
    core::sync::atomic::fence(Ordering::Release);
    let (before, words, after) = by_words(to, len);
    // SAFETY: the parts make up `len` bytes, and the words of `to` are aligned.
    unsafe {
        for n in 0..before {
            AtomicU8::from_ptr(to.add(n)).store(from.add(n).read(), Ordering::Relaxed);
        }
        let (to, from) = (to.add(before), from.add(before));
        for n in 0..words {
            let word = from.cast::<u64>().add(n).read_unaligned();
            AtomicU64::from_ptr(to.cast::<u64>().add(n)).store(word, Ordering::Relaxed);
        }
        for n in words * WORD..words * WORD + after {
            AtomicU8::from_ptr(to.add(n)).store(from.add(n).read(), Ordering::Relaxed);
        }
    }
}

/// Sets `len` bytes of simulated memory.
///
/// # Safety
/// `to` is valid for `len` bytes that are touched by atomics only.
unsafe fn set(to: *mut u8, byte: u8, len: usize) {
    core::sync::atomic::fence(Ordering::Release);
    let (before, words, after) = by_words(to, len);
    let pattern = u64::from_ne_bytes([byte; WORD]);
    // SAFETY: the parts make up `len` bytes, and the words are aligned.
    unsafe {
        for n in (0..before).chain(before + words * WORD..before + words * WORD + after) {
            AtomicU8::from_ptr(to.add(n)).store(byte, Ordering::Relaxed);
        }
        let to = to.add(before).cast::<u64>();
        for n in 0..words {
            AtomicU64::from_ptr(to.add(n)).store(pattern, Ordering::Relaxed);
        }
    }
}
