//! Faults that wait for a handler, and calls that wait until it knows of them: the events that it reads, and the words that they wait on.
//!
//! # What it guarantees
//!
//! Every fault that enters is delivered once, to one reader, unless it is woken or leaves before. A fault that waits
//! is woken by the first [`wake`](Queue::wake) of its page that begins after it entered, whether its event has been read or not, and
//! by [`close`](Queue::close). Faults of one page wait each for itself and are woken together. A call waits until its event has been read.
//!
//! # How
//!
//! A CPU has at most one fault or call, so its place is that of its CPU: nothing is allocated when a fault comes. Places and order of the events are under
//! a lock, which nobody keeps while waiting; each place has a word of its own to wait on, which a waker changes under the lock. Readers
//! wait on one word that counts arrivals.
//!
//! The lock is what orders a waker's change to an entry before the look of a fault that came too late to be woken; see the head of
//! [`user`](super).
//!
//! # Who may break it
//!
//! Whoever enters while the same CPU is on the queue; whoever enters and neither waits nor leaves.

use crate::addr::{AddrRange, PAGE_SIZE};
use crate::error::OutOfMemory;
use crate::host::Host;
use crate::sync::CpuId;
use crate::sync::atomic::{AtomicU32, Ordering};
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use crossbeam_utils::CachePadded;

/// Why a fault is for a handler.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum FaultKind {
    /// There is no page. Resolved by `copy`, `zeropage`, `move_pages`.
    Missing,
    /// The handler has protected the page against stores. Resolved by `write_protect`.
    WriteProtected,
    /// The page is in the object, and not mapped. Resolved by `resume` (`UFFDIO_CONTINUE`).
    Minor,
}

/// A fault that waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct UserFault {
    /// The address of the page.
    pub addr: u64,
    /// Why it is for the handler.
    pub kind: FaultKind,
    /// Whether it is a store.
    pub write: bool,
    /// Who waits.
    pub cpu: CpuId,
}

/// What a handler reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[non_exhaustive]
pub enum UserEvent {
    /// Somebody waits for the handler to resolve a fault.
    Fault(UserFault),
    /// The pages of a range are about to be forgotten (`MADV_DONTNEED`): from now on they are zeros. Copies are refused
    /// ([`Error::Again`](crate::Error::Again)) until this has been read, and the call waits for that.
    Remove(AddrRange),
    /// A range has been unmapped, as far as it was mapped. The call waits until this has been read.
    Unmap(AddrRange),
    /// What was mapped at `from` is at `to` now, and registered there. The call waits until this has been read.
    Remap {
        /// Where it was.
        from: u64,
        /// Where it is.
        to: u64,
        /// How many bytes.
        len: u64,
    },
    /// The space has been forked. The child's ranges have a handler of their own, which
    /// [`UserFaults::forked`](crate::space::UserFaults::forked) gives for this number. The call waits until this has been read.
    Fork(u64),
}

/// Where the fault or call of one CPU stands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Free,
    /// Waits; the event has not been read.
    Unread(UserEvent),
    /// Waits; somebody has read the event.
    Read(UserFault),
}

impl Place {
    fn fault(self) -> Option<UserFault> {
        match self {
            Place::Unread(UserEvent::Fault(fault)) | Place::Read(fault) => Some(fault),
            _ => None,
        }
    }
}

struct State {
    closed: bool,
    /// Readers that are asleep or about to be.
    sleepers: usize,
    /// By CPU.
    places: Box<[Place]>,
    /// CPUs whose place is not free, in no order. Room for all.
    waiting: Vec<CpuId>,
    /// CPUs whose event has not been read, the oldest first; some may have left since. Room for all, because a CPU that leaves is
    /// taken out.
    unread: VecDeque<CpuId>,
}

/// The value of a word that is waited on.
const WAITS: u32 = 1;

/// See the [module](self).
pub struct Queue<H: Host> {
    state: lock_api::Mutex<H::Mutex, State>,
    /// By CPU: [`WAITS`] until woken.
    words: Box<[CachePadded<AtomicU32>]>,
    /// Moves with every arrival.
    arrivals: AtomicU32,
    /// Calls that have been announced and whose events have not been read.
    announced: AtomicU32,
}

impl<H: Host> Queue<H> {
    /// An empty queue for CPUs with numbers below `cpus`.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_new(cpus: usize) -> Result<Self, OutOfMemory> {
        let (mut places, mut waiting, mut unread, mut words) =
            (Vec::new(), Vec::new(), VecDeque::new(), Vec::new());
        places.try_reserve_exact(cpus).map_err(|_| OutOfMemory)?;
        waiting.try_reserve_exact(cpus).map_err(|_| OutOfMemory)?;
        unread.try_reserve_exact(cpus).map_err(|_| OutOfMemory)?;
        words.try_reserve_exact(cpus).map_err(|_| OutOfMemory)?;
        places.resize(cpus, Place::Free);
        words.resize_with(cpus, || CachePadded::new(AtomicU32::new(0)));
        let places = places.into_boxed_slice();
        Ok(Self {
            state: lock_api::Mutex::new(State { closed: false, sleepers: 0, places, waiting, unread }),
            words: words.into_boxed_slice(),
            arrivals: AtomicU32::new(0),
            announced: AtomicU32::new(0),
        })
    }

    /// Says that a call will put an event on the queue that is no fault, or [retract](Self::retract) it.
    pub fn announce(&self) {
        self.announced.fetch_add(1, Ordering::SeqCst);
    }

    /// The event that was announced does not come, or is over.
    pub fn retract(&self) {
        self.announced.fetch_sub(1, Ordering::SeqCst);
    }

    /// True while an event that is no fault has been announced and not been read.
    pub fn is_changing(&self) -> bool {
        self.announced.load(Ordering::SeqCst) != 0
    }

    /// Puts an event of `cpu`, the calling one, on the queue. It then either [waits](Self::wait) or [leaves](Self::leave). False when the
    /// queue is closed. Not while pinned.
    pub fn enter(&self, host: &H, cpu: CpuId, event: UserEvent) -> bool {
        let mut state = self.state.lock();
        if state.closed {
            return false;
        }
        let Some(place) = state.places.get_mut(cpu.index()) else { return false };
        debug_assert!(*place == Place::Free, "a CPU waits twice at a time");
        *place = Place::Unread(event);
        state.waiting.push(cpu);
        state.unread.push_back(cpu);
        self.words[cpu.index()].store(WAITS, Ordering::Relaxed);
        self.tell_readers(host, &mut state);
        true
    }

    /// Waits until `cpu`'s fault is woken, or the event of its call has been read. Not while pinned.
    pub fn wait(&self, host: &H, cpu: CpuId) {
        let word = &*self.words[cpu.index()];
        let order = mutant!("user_wait_relaxed", Ordering::Acquire, Ordering::Relaxed);
        while word.load(order) == WAITS {
            host.wait(cpu, word, WAITS);
        }
    }

    /// Takes the fault of `cpu` off the queue, if nobody has yet.
    pub fn leave(&self, cpu: CpuId) {
        let mut state = self.state.lock();
        if matches!(state.places[cpu.index()], Place::Unread(_)) {
            state.unread.retain(|&other| other != cpu);
        }
        if state.places[cpu.index()] != Place::Free {
            state.places[cpu.index()] = Place::Free;
            state.waiting.retain(|&other| other != cpu);
        }
        self.words[cpu.index()].store(0, Ordering::Relaxed);
    }

    /// Wakes the faults whose pages touch `range`; returns how many. O(faults that wait).
    pub fn wake(&self, host: &H, range: AddrRange) -> usize {
        let mut state = self.state.lock();
        self.wake_locked(host, &mut state, |place| {
            place.fault().is_some_and(|fault| fault.addr < range.end && range.start < fault.addr + PAGE_SIZE)
        })
    }

    fn wake_locked(&self, host: &H, state: &mut State, which: impl Fn(Place) -> bool) -> usize {
        let State { places, waiting, unread, .. } = state;
        let mut woken = 0;
        waiting.retain(|&cpu| {
            let place = &mut places[cpu.index()];
            if !which(*place) {
                return true;
            }
            if let Place::Unread(event) = *place {
                unread.retain(|&other| other != cpu);
                if !matches!(event, UserEvent::Fault(_)) {
                    self.retract();
                }
            }
            *place = Place::Free;
            let word = &*self.words[cpu.index()];
            word.store(0, mutant!("user_wake_relaxed", Ordering::Release, Ordering::Relaxed));
            host.wake_all(word);
            woken += 1;
            false
        });
        woken
    }

    /// Takes up to `events.len()` events that nobody has read, the oldest first; returns how many. `None` when the queue is closed.
    pub fn read(&self, host: &H, events: &mut [UserEvent]) -> Option<usize> {
        let mut state = self.state.lock();
        self.read_locked(host, &mut state, events)
    }

    fn read_locked(&self, host: &H, state: &mut State, events: &mut [UserEvent]) -> Option<usize> {
        if state.closed {
            return None;
        }
        let mut count = 0;
        for place in events {
            let Some(cpu) = state.unread.pop_front() else { break };
            let Place::Unread(event) = state.places[cpu.index()] else { continue };
            if let UserEvent::Fault(fault) = event {
                state.places[cpu.index()] = Place::Read(fault);
            } else {
                // The call goes on.
                state.places[cpu.index()] = Place::Free;
                state.waiting.retain(|&other| other != cpu);
                self.retract();
                let word = &*self.words[cpu.index()];
                word.store(0, Ordering::Release);
                host.wake_all(word);
            }
            *place = event;
            count += 1;
        }
        Some(count)
    }

    /// True when there are events that nobody has read.
    pub fn has_unread(&self) -> bool {
        !self.state.lock().unread.is_empty()
    }

    /// The same, but waits until there is an event (or [`interrupt`](Self::interrupt) is called: 0 then). Not while pinned.
    pub fn read_or_wait(&self, host: &H, cpu: CpuId, events: &mut [UserEvent]) -> Option<usize> {
        let count = self.read(host, events)?;
        if count > 0 || events.is_empty() {
            return Some(count);
        }
        self.wait_for_event(host, cpu)?;
        self.read(host, events)
    }

    /// Waits until there is an event, or [`interrupt`](Self::interrupt) is called; may return early. `None` when the queue is closed. Not
    /// while pinned.
    pub fn wait_for_event(&self, host: &H, cpu: CpuId) -> Option<()> {
        let seen = {
            let mut state = self.state.lock();
            if state.closed {
                return None;
            }
            if !state.unread.is_empty() {
                return Some(());
            }
            state.sleepers += 1;
            self.arrivals.load(Ordering::Relaxed)
        };
        host.wait(cpu, &self.arrivals, seen);
        self.state.lock().sleepers -= 1;
        Some(())
    }

    /// Makes those who wait for an event return without one.
    pub fn interrupt(&self, host: &H) {
        let mut state = self.state.lock();
        self.tell_readers(host, &mut state);
    }

    fn tell_readers(&self, host: &H, state: &mut State) {
        self.arrivals.fetch_add(1, Ordering::Release);
        if mutant!("user_event_nobody_told", state.sleepers > 0, false) {
            host.wake_all(&self.arrivals);
        }
    }

    /// Wakes everybody and takes no more faults.
    pub fn close(&self, host: &H) {
        let mut state = self.state.lock();
        state.closed = true;
        self.wake_locked(host, &mut state, |_| true);
        self.tell_readers(host, &mut state);
    }

    /// Faults that wait.
    pub fn waiting(&self) -> usize {
        let state = self.state.lock();
        state.waiting.iter().filter(|cpu| state.places[cpu.index()].fault().is_some()).count()
    }
}
