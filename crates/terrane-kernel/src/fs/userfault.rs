//! `userfaultfd`: a program resolves its own faults. The protocol is Terrane's ([`terrane::space::UserFaults`]); this is the descriptor.
//!
//! # Waiting for events
//!
//! Whoever puts an event on a handler's queue waits right after that, by the host's `wait`: a fault for its page, a call for its reader. There the kernel
//! [rings](announce) one bell for all descriptors, and who reads or polls looks again. Nothing is rung while there is no descriptor.
//!
//! # Ends
//!
//! A fault waits until it is resolved, and cannot be interrupted by a signal. When a process is to end, its handlers are
//! [ended](space_ends) first: their ranges become ordinary memory, the faults are resolved, and the threads can go.

use super::bell::Bell;
use super::{abi, current, descriptors};
use crate::errno::Errno;
use crate::mm::{self, KernelCpu, KernelHost, Space};
use crate::sync::SpinLock;
use crate::user;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicUsize, Ordering};
use terrane::PAGE_SIZE;
use terrane::space::{FaultKind, Incomplete, Resolve, UserEvent, UserFaultModes, UserFaults, UserFeatures};
use terrane::sync::Shared;

type Handler = UserFaults<KernelHost>;

/// What all descriptors have in common: whoever waits for an event looks again when this rings.
static BELL: Bell = Bell::new();
/// Descriptors that there are.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// Their states, for the end of spaces.
static ALL: SpinLock<Vec<Shared<State>>> = SpinLock::new(Vec::new());

struct State {
    /// The space that it was made in.
    space: Arc<Space>,
    /// Made by `UFFDIO_API`; `None` before, and once the space ends.
    handler: SpinLock<Option<Handler>>,
    /// What the program wants; `None` before it has said so.
    features: SpinLock<Option<u64>>,
}

/// What a `userfaultfd` stands for.
pub struct UserFault {
    state: Shared<State>,
}

/// Somebody is about to wait inside Terrane, perhaps for an event to be read.
#[inline]
pub fn announce() {
    if COUNT.load(Ordering::Relaxed) != 0 {
        BELL.ring();
    }
}

/// A process is to end that runs in `space`: if no other does, nobody waits for the handlers of the space any more. Holds nothing.
pub fn space_ends(space: &Arc<Space>) {
    if COUNT.load(Ordering::Relaxed) == 0 || current::is_used(space) {
        return;
    }
    loop {
        let found = ALL
            .lock()
            .iter()
            .find(|state| Arc::ptr_eq(&state.space, space) && state.handler.lock().is_some())
            .cloned();
        let Some(state) = found else { break };
        let handler = state.handler.lock().take();
        drop(handler);
        BELL.ring();
    }
}

/// Features that there are: Terrane's, those that all memory has anyway, and those of pools of huge pages, which there are none of. Bits 8 and 11 would
/// want the number of the thread and the byte of each fault.
const FEATURES: u64 = 0b1_1111_0110_1111_1111;

/// The calls of a descriptor that has told its features, and of its ranges.
const API_IOCTLS: u64 = 1 << 0x3f | 1 << 0 | 1 << 1;
const WAKE: u64 = 1 << 2;
const COPY: u64 = 1 << 3;
const ZEROPAGE: u64 = 1 << 4;
const MOVE: u64 = 1 << 5;
const WRITEPROTECT: u64 = 1 << 6;
const CONTINUE: u64 = 1 << 7;
const POISON: u64 = 1 << 8;

/// Bytes of `struct uffd_msg`.
const MESSAGE: usize = 32;

/// `userfaultfd`.
pub fn userfaultfd(flags: u32) -> Result<u64, Errno> {
    const USER_MODE_ONLY: u32 = 1;
    if flags & !(abi::O_CLOEXEC | abi::O_NONBLOCK | USER_MODE_ONLY) != 0 {
        return Err(Errno::EINVAL);
    }
    // A copy of the kernel's faults as the program does, also where the program would do without.
    let fault = UserFault::try_new(current::space(), None)?;
    descriptors::open(
        super::inode::Kind::UserFault(fault),
        abi::O_RDWR | flags & abi::O_NONBLOCK,
        flags & abi::O_CLOEXEC != 0,
    )
}

impl UserFault {
    fn try_new(space: Arc<Space>, made: Option<(Handler, u64)>) -> Result<Self, Errno> {
        let (handler, features) = made.unzip();
        let state = Shared::try_new(State {
            space,
            handler: SpinLock::new(handler),
            features: SpinLock::new(features),
        })?;
        let mut all = ALL.lock();
        all.try_reserve(1)?;
        all.push(state.clone());
        COUNT.fetch_add(1, Ordering::Relaxed);
        Ok(Self { state })
    }

    fn handler(&self) -> Result<Handler, Errno> {
        let told = self.state.features.lock().is_some();
        self.state.handler.lock().clone().ok_or(if told { Errno::ESRCH } else { Errno::EINVAL })
    }

    /// Where to wait for events.
    pub fn bell(&self) -> &'static Bell {
        &BELL
    }

    /// What `poll` says.
    pub fn ready(&self) -> u32 {
        match self.handler() {
            Ok(handler) if handler.has_events() => abi::POLLIN,
            Ok(_) => 0,
            Err(_) => abi::POLLERR,
        }
    }

    /// Reads one event, as `struct uffd_msg`.
    ///
    /// # Errors
    /// `EINVAL` for too small a buffer, or before the features are told; `EAGAIN`, `ERESTARTSYS`, `ENOMEM`.
    pub fn read(&self, buffer: &mut [u8], blocks: bool) -> Result<usize, Errno> {
        let features = self.state.features.lock().ok_or(Errno::EINVAL)?;
        if buffer.len() < MESSAGE {
            return Err(Errno::EINVAL);
        }
        let event = loop {
            let rings = BELL.rings();
            let mut events = [UserEvent::Fork(0)];
            match self.handler()?.try_read_events(&mut events) {
                Ok(1..) => break events[0],
                Ok(0) | Err(terrane::Error::Again) => {}
                // The space has ended: there will be none.
                Err(_) => return Ok(0),
            }
            if !blocks {
                return Err(Errno::EAGAIN);
            }
            BELL.wait(|| BELL.rings() != rings)?;
        };
        let message = self.message(event, features)?;
        buffer[..MESSAGE].copy_from_slice(&message);
        Ok(MESSAGE)
    }

    fn message(&self, event: UserEvent, features: u64) -> Result<[u8; MESSAGE], Errno> {
        const PAGEFAULT: u8 = 0x12;
        const FORK: u8 = 0x13;
        const REMAP: u8 = 0x14;
        const REMOVE: u8 = 0x15;
        const UNMAP: u8 = 0x16;
        let (number, words) = match event {
            UserEvent::Fault(fault) => {
                let kind = match fault.kind {
                    FaultKind::WriteProtected => 2,
                    FaultKind::Minor => 4,
                    FaultKind::Missing => 0,
                };
                (PAGEFAULT, [u64::from(fault.write) | kind, fault.addr, 0])
            }
            UserEvent::Remove(range) => (REMOVE, [range.start, range.end, 0]),
            UserEvent::Unmap(range) => (UNMAP, [range.start, range.end, 0]),
            UserEvent::Remap { from, to, len } => (REMAP, [from, to, len]),
            UserEvent::Fork(number) => {
                let handler = self.handler()?.forked(number)?.ok_or(Errno::ESRCH)?;
                // Of whose space it is only its end matters, and that ends the handler by itself.
                let fault = Self::try_new(self.state.space.clone(), Some((handler, features)))?;
                let kind = super::inode::Kind::UserFault(fault);
                let fd = descriptors::open(kind, abi::O_RDWR, false)?;
                (FORK, [fd & 0xffff_ffff, 0, 0])
            }
            _ => return Err(Errno::EAGAIN),
        };
        let mut message = [0; MESSAGE];
        message[0] = number;
        for (place, word) in message[8..].chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        Ok(message)
    }

    /// `ioctl`.
    ///
    /// # Errors
    /// As `ioctl_userfaultfd(2)`.
    pub fn ioctl(&self, request: u32, at: u64) -> Result<u64, Errno> {
        const fn number(nr: u32, size: u32) -> u32 {
            3 << 30 | size << 16 | 0xaa << 8 | nr
        }
        const API: u32 = number(0x3f, 24);
        const REGISTER: u32 = number(0, 32);
        const UNREGISTER: u32 = 2 << 30 | 16 << 16 | 0xaa << 8 | 1;
        const DO_WAKE: u32 = 2 << 30 | 16 << 16 | 0xaa << 8 | 2;
        const DO_COPY: u32 = number(3, 40);
        const DO_ZEROPAGE: u32 = number(4, 32);
        const DO_MOVE: u32 = number(5, 40);
        const DO_WRITEPROTECT: u32 = number(6, 24);
        const DO_CONTINUE: u32 = number(7, 32);
        const DO_POISON: u32 = number(8, 32);
        if request == API {
            return self.api(at);
        }
        let handler = self.handler()?;
        let on = |act: &dyn Fn(&KernelCpu) -> Result<(), terrane::Error>| -> Result<u64, Errno> {
            mm::with_cpu(act)?;
            Ok(0)
        };
        match request {
            REGISTER => {
                let [addr, len, modes] = user::read_value::<[u64; 3]>(at)?;
                let modes = UserFaultModes::from_bits(modes).filter(|modes| !modes.is_empty());
                let modes = modes.ok_or(Errno::EINVAL)?;
                on(&|cpu| handler.register(cpu, addr, len, modes))?;
                let mut calls = WAKE | COPY | ZEROPAGE | MOVE | POISON;
                if modes.contains(UserFaultModes::WP) {
                    calls |= WRITEPROTECT;
                }
                if modes.contains(UserFaultModes::MINOR) {
                    calls |= CONTINUE;
                }
                user::write_value(at + 24, calls)?;
                Ok(0)
            }
            UNREGISTER => {
                let [addr, len] = user::read_value::<[u64; 2]>(at)?;
                on(&|cpu| handler.unregister(cpu, addr, len))
            }
            DO_WAKE => {
                let [addr, len] = user::read_value::<[u64; 2]>(at)?;
                on(&|_| handler.wake(addr, len))
            }
            DO_COPY => {
                let [to, from, len, mode] = user::read_value::<[u64; 4]>(at)?;
                check(to, len)?;
                if from.checked_add(len).is_none() {
                    return Err(Errno::EINVAL);
                }
                let how = Resolve::from_bits(mode).ok_or(Errno::EINVAL)?;
                let result = copy(&handler, to, from, len, how);
                answer(at + 32, len, result)
            }
            DO_ZEROPAGE | DO_CONTINUE | DO_POISON => {
                let [addr, len, mode] = user::read_value::<[u64; 3]>(at)?;
                check(addr, len)?;
                let how = Resolve::from_bits(mode).ok_or(Errno::EINVAL)?;
                let result = mm::with_cpu(|cpu| match request {
                    DO_ZEROPAGE => handler.zeropage(cpu, addr, len, how),
                    DO_CONTINUE => handler.resume(cpu, addr, len, how),
                    _ => handler.poison(cpu, addr, len, how),
                });
                answer(at + 24, len, result)
            }
            DO_MOVE => {
                let [to, from, len, mode] = user::read_value::<[u64; 4]>(at)?;
                check(to, len)?;
                check(from, len)?;
                // `UFFDIO_MOVE_MODE_ALLOW_SRC_HOLES` is bit 1.
                if mode & !3 != 0 {
                    return Err(Errno::EINVAL);
                }
                let mut how = Resolve::empty();
                how.set(Resolve::DONT_WAKE, mode & 1 != 0);
                how.set(Resolve::ALLOW_SOURCE_HOLES, mode & 2 != 0);
                let result = mm::with_cpu(|cpu| handler.move_pages(cpu, to, from, len, how));
                answer(at + 32, len, result)
            }
            DO_WRITEPROTECT => {
                let [addr, len, mode] = user::read_value::<[u64; 3]>(at)?;
                if mode & !3 != 0 {
                    return Err(Errno::EINVAL);
                }
                let how = if mode & 2 != 0 { Resolve::DONT_WAKE } else { Resolve::empty() };
                on(&|cpu| handler.write_protect(cpu, addr, len, mode & 1 != 0, how))
            }
            _ => Err(Errno::EINVAL),
        }
    }

    /// `UFFDIO_API`: the program says which features it wants, and is told which there are.
    fn api(&self, at: u64) -> Result<u64, Errno> {
        const API: u64 = 0xaa;
        let [api, wanted, _] = user::read_value::<[u64; 3]>(at)?;
        let known = api == API && wanted & !FEATURES == 0;
        let again = self.state.features.lock().is_some();
        if !known || again {
            user::write_value(at, [0u64; 3])?;
            return Err(Errno::EINVAL);
        }
        let features = UserFeatures::from_bits_truncate(wanted);
        let handler = mm::with_cpu(|cpu| self.state.space.user_faults(cpu, features))?;
        *self.state.handler.lock() = Some(handler);
        *self.state.features.lock() = Some(wanted);
        user::write_value(at, [API, FEATURES, API_IOCTLS])?;
        Ok(0)
    }
}

impl Drop for UserFault {
    fn drop(&mut self) {
        let handler = self.state.handler.lock().take();
        let own = {
            let mut all = ALL.lock();
            let place = all.iter().position(|state| Shared::ptr_eq(state, &self.state));
            place.map(|place| all.swap_remove(place))
        };
        COUNT.fetch_sub(1, Ordering::Relaxed);
        drop(handler);
        drop(own);
        BELL.ring();
    }
}

/// `UFFDIO_COPY`: some pages at a time, through a buffer of the kernel's.
fn copy(handler: &Handler, to: u64, from: u64, len: u64, how: Resolve) -> Result<(), Incomplete> {
    const PIECE: u64 = 16 * PAGE_SIZE;
    let failed = |done: u64, error: terrane::Error| {
        let error = if done > 0 { terrane::Error::Again } else { error };
        Err(Incomplete { done, error })
    };
    let aligned = to.is_multiple_of(PAGE_SIZE) && len.is_multiple_of(PAGE_SIZE) && len > 0;
    if !aligned || to.checked_add(len).is_none() || from.checked_add(len).is_none() {
        return failed(0, terrane::Error::Invalid);
    }
    let mut bytes = Vec::new();
    let piece = len.min(PIECE) as usize;
    if bytes.try_reserve_exact(piece).is_err() {
        return failed(0, terrane::Error::NoMemory);
    }
    bytes.resize(piece, 0);
    let mut done = 0;
    while done < len {
        let part = &mut bytes[..(len - done).min(PIECE) as usize];
        if user::read(part, from + done).is_err() {
            return failed(done, terrane::Error::BadAddress);
        }
        match mm::with_cpu(|cpu| handler.copy(cpu, to + done, part, how)) {
            Ok(()) => done += part.len() as u64,
            Err(incomplete) => return failed(done + incomplete.done, incomplete.error),
        }
    }
    Ok(())
}

/// Whether pages of the program's may be there: the whole call is refused otherwise, and nothing is answered.
fn check(addr: u64, len: u64) -> Result<(), Errno> {
    let aligned = addr.is_multiple_of(PAGE_SIZE) && len.is_multiple_of(PAGE_SIZE) && len > 0;
    let inside = addr.checked_add(len).is_some_and(|end| end <= abi::USER_END);
    if aligned && inside { Ok(()) } else { Err(Errno::EINVAL) }
}

/// Writes what a call has done to `at`: bytes, or the negative errno; and says the errno.
fn answer(at: u64, len: u64, result: Result<(), Incomplete>) -> Result<u64, Errno> {
    let (told, errno) = match result {
        Ok(()) => (len as i64, None),
        Err(Incomplete { done, error }) => {
            let errno = Errno::from(error);
            (if done > 0 { done as i64 } else { -i64::from(errno.0) }, Some(errno))
        }
    };
    user::write_value(at, told)?;
    errno.map_or(Ok(0), Err)
}
