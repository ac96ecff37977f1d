//! Paging by the program: threads that answer the faults of a range with pages that a [`Pager`] supplies, and fetch the rest in the
//! background. Restoring a snapshot lazily, post-copy migration of a guest, memory that lives elsewhere.
//!
//! # What it guarantees
//!
//! Each page is asked for at most once, and is in place, whole, before an access to it goes on. A page that cannot be supplied is a bus error
//! for those who touch it, and for nobody else. A page that the program has given back (`DONTNEED`) after it was there reads
//! as zeros, as any memory, and so does one that it gives back before. Where memory is short, pages wait until
//! there is some.
//!
//! # How
//!
//! Two bits a page: *claimed* by the thread that fetches it, and *there*. A thread that reads the event of a fault claims the page and those behind
//! it, up to the end of the aligned window of [`PagerConfig::batch`] pages, as far as nobody has; asks for all of them at once; and
//! copies them in, which wakes all who wait there. A page that somebody else has claimed needs no answer: it comes, and its coming wakes.
//! In between, threads claim what is next in the order of addresses.
//!
//! A program that gives pages back waits until one of the threads knows (`UserEvent::Remove`). Whoever reads such an event marks
//! the pages under the write side of a lock whose read side is held around each look at the marks and the copy that follows, so that no
//! bytes come late.
//!
//! Source: QEMU's post-copy, and the snapshot restoring of Firecracker, both over `userfaultfd`.

use crate::cpu::Cpu;
use crate::error::HostedError;
use crate::machine::{Hosted, HostedMachine, Space};
use core::fmt;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use parking_lot::{Condvar, Mutex, RwLock};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use terrane::addr::{AddrRange, PAGE_SHIFT, PAGE_SIZE};
use terrane::host::IoError;
use terrane::space::{Incomplete, Resolve, UserEvent, UserFaultModes, UserFaults, UserFeatures};
use terrane::{Error, error};

/// Where pages come from.
pub trait Pager: Send + Sync + 'static {
    /// Fills `pages`, whole pages, with what is at `offset` bytes from the start of the range. May block. Called by several threads
    /// at a time, never twice for one page.
    ///
    /// # Errors
    /// [`IoError`] when it cannot be had: whoever touches one of these pages gets a bus error.
    fn supply(&self, offset: u64, pages: &mut [u8]) -> Result<(), IoError>;
}

/// How a [`Paging`] works.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PagerConfig {
    /// Threads, each of which takes one of the machine's processors. Of several, one answers faults only.
    pub threads: usize,
    /// Pages fetched together for one fault at most: an aligned window. A power of two.
    pub batch: usize,
    /// Pages fetched together in the background; 0: nothing is fetched that nobody has asked for.
    pub background: usize,
}

impl Default for PagerConfig {
    /// Two threads, 16 pages for a fault, 64 in the background.
    fn default() -> Self {
        Self { threads: 2, batch: 16, background: 64 }
    }
}

/// A range whose pages are being supplied. Dropping it ends that: pages that are not there yet read as zeros then.
pub struct Paging {
    state: Arc<State>,
    threads: Vec<JoinHandle<()>>,
}

/// What a [`Paging`] has done so far, in pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PagingProgress {
    /// Fetched because of a fault, neighbours included.
    pub demanded: u64,
    /// Fetched in the background.
    pub drained: u64,
    /// Could not be supplied.
    pub failed: u64,
    /// Neither fetched nor discarded.
    pub missing: u64,
}

struct State {
    pager: Box<dyn Pager>,
    config: PagerConfig,
    range: AddrRange,
    faults: UserFaults<Hosted>,
    /// A bit a page: somebody fetches it, or has.
    claimed: Bits,
    /// A bit a page: it has been put in place.
    there: Bits,
    /// A bit a page: it was given back while it was on its way, so it is to be zeros.
    void: Bits,
    /// Events are read, and `void` is set, under its write side; pages are put in place under its read side.
    order: RwLock<()>,
    /// Addresses of faults whose events were read by a thread that had something else to do.
    backlog: Mutex<VecDeque<u64>>,
    /// Where the background goes on, in pages.
    next: AtomicU64,
    demanded: AtomicU64,
    drained: AtomicU64,
    failed: AtomicU64,
    missing: AtomicU64,
    ends: AtomicBool,
    /// Notified when nothing is missing any more.
    complete: Condvar,
    lock: Mutex<()>,
}

/// Bits that go from clear to set.
struct Bits(Vec<AtomicU64>);

impl Bits {
    fn try_new(count: u64) -> Result<Self, error::OutOfMemory> {
        let words = count.div_ceil(64) as usize;
        let mut bits = Vec::new();
        bits.try_reserve_exact(words).map_err(|_| error::OutOfMemory)?;
        bits.resize_with(words, || AtomicU64::new(0));
        Ok(Self(bits))
    }

    fn get(&self, n: u64) -> bool {
        self.0[(n / 64) as usize].load(Ordering::Acquire) & (1 << (n % 64)) != 0
    }

    /// Sets it; true when it was clear.
    fn set(&self, n: u64) -> bool {
        self.0[(n / 64) as usize].fetch_or(1 << (n % 64), Ordering::AcqRel) & (1 << (n % 64)) == 0
    }
}

impl Paging {
    /// Has the missing pages of `range`, memory of `space`, supplied by `pager` from now on, and starts the threads.
    ///
    /// # Errors
    /// What [`UserFaults::register`] refuses; [`HostedError::NoCpuFree`]; [`HostedError::OutOfMemory`]; [`HostedError::System`] when the
    /// system has no thread.
    pub fn start(
        machine: &HostedMachine,
        space: &Space,
        range: AddrRange,
        pager: impl Pager,
        config: PagerConfig,
    ) -> Result<Self, HostedError> {
        let config = PagerConfig {
            threads: config.threads.max(1),
            batch: config.batch.max(1).next_power_of_two(),
            ..config
        };
        let mut cpus = Vec::new();
        for _ in 0..config.threads {
            cpus.push(Cpu::new(machine)?);
        }
        let pages = range.len() >> PAGE_SHIFT;
        let (claimed, there, void) = (Bits::try_new(pages)?, Bits::try_new(pages)?, Bits::try_new(pages)?);
        let core = cpus[0].core();
        let features = UserFeatures::EVENT_REMOVE | UserFeatures::EVENT_UNMAP;
        let faults = space.user_faults(core, features)?;
        faults.register(core, range.start, range.len(), UserFaultModes::MISSING)?;
        let state = Arc::new(State {
            pager: Box::new(pager),
            config,
            range,
            faults,
            claimed,
            there,
            void,
            order: RwLock::new(()),
            backlog: Mutex::new(VecDeque::new()),
            next: AtomicU64::new(0),
            demanded: AtomicU64::new(0),
            drained: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            missing: AtomicU64::new(pages),
            ends: AtomicBool::new(false),
            complete: Condvar::new(),
            lock: Mutex::new(()),
        });
        let mut paging = Self { state, threads: Vec::new() };
        for (n, cpu) in cpus.into_iter().enumerate() {
            let drains = config.background > 0 && (n > 0 || config.threads == 1);
            let state = Arc::clone(&paging.state);
            let thread =
                thread::Builder::new().name("pager".into()).spawn(move || state.run(&cpu, drains)).map_err(
                    |error| HostedError::System(Errno::from_io_error(&error).unwrap_or(Errno::AGAIN)),
                )?;
            paging.threads.push(thread);
        }
        Ok(paging)
    }

    /// How far it has come.
    pub fn progress(&self) -> PagingProgress {
        let read = |count: &AtomicU64| count.load(Ordering::Acquire);
        let state = &*self.state;
        PagingProgress {
            demanded: read(&state.demanded),
            drained: read(&state.drained),
            failed: read(&state.failed),
            missing: read(&state.missing),
        }
    }

    /// Waits until every page is there (or discarded, or could not be supplied). For ever, if nothing is fetched in the background and
    /// nobody asks.
    pub fn wait(&self) {
        let mut guard = self.state.lock.lock();
        while self.state.missing.load(Ordering::Acquire) > 0 {
            self.state.complete.wait(&mut guard);
        }
    }

    /// The pages of `range` that are not there yet will read as zeros. Pages that are there stay.
    pub fn discard(&self, range: AddrRange) {
        let _order = self.state.order.write();
        self.state.discard(range);
    }
}

impl State {
    fn pages(&self, part: AddrRange) -> Range<u64> {
        let page = |addr: u64| (addr - self.range.start) >> PAGE_SHIFT;
        if part.is_empty() { 0..0 } else { page(part.start)..page(part.end) }
    }

    fn address(&self, page: u64) -> u64 {
        self.range.start + (page << PAGE_SHIFT)
    }

    fn count(&self) -> u64 {
        self.range.len() >> PAGE_SHIFT
    }

    fn run(&self, cpu: &Cpu, drains: bool) {
        let pages = self.config.batch.max(self.config.background);
        let mut buffer = vec![0; pages * PAGE_SIZE as usize];
        while !self.ends.load(Ordering::Acquire) {
            let fault = self.backlog.lock().pop_front();
            if let Some(addr) = fault {
                self.answer(cpu, addr, &mut buffer);
                continue;
            }
            let goes_on = match self.take_events() {
                Ok(()) => true,
                // Faults first; in between, a piece of the rest.
                Err(Error::Again) => {
                    drains && self.drain(cpu, &mut buffer) || self.faults.wait_for_event(cpu.core()).is_ok()
                }
                Err(_) => false,
            };
            if !goes_on {
                return; // the space has ended
            }
        }
    }

    /// Reads some events: marks what has been given back, and puts faults on the backlog.
    fn take_events(&self) -> Result<(), Error> {
        let mut events = [UserEvent::Unmap(AddrRange::new(0, 0)); 8];
        let _order = self.order.write();
        let count = self.faults.try_read_events(&mut events)?;
        for event in &events[..count] {
            match *event {
                UserEvent::Fault(fault) => self.backlog.lock().push_back(fault.addr),
                UserEvent::Remove(range) | UserEvent::Unmap(range) => self.discard(range),
                _ => {}
            }
        }
        Ok(())
    }

    /// Makes the pages of `range` zeros, as far as they are not there. Under the write side of `order`.
    fn discard(&self, range: AddrRange) {
        for page in self.pages(range.intersection(self.range)) {
            if self.claimed.set(page) {
                self.there.set(page);
                self.arrived(1);
                // Whoever waits for it looks again, and is given zeros.
                let _ = self.faults.wake(self.address(page), PAGE_SIZE);
            } else if !self.there.get(page) {
                self.void.set(page);
            }
        }
    }

    /// Answers a fault.
    fn answer(&self, cpu: &Cpu, addr: u64, buffer: &mut [u8]) {
        let page = (addr - self.range.start) >> PAGE_SHIFT;
        if !self.claimed.get(page) {
            let batch = self.config.batch as u64;
            let run = self.claim(page..((page | (batch - 1)) + 1).min(self.count()));
            if !run.is_empty() {
                self.fetch(cpu, run, buffer, &self.demanded);
                return;
            }
        }
        if self.there.get(page) {
            // It was there and was given back, or it has come since the event: then there is nothing to do but look.
            let zeros = self.faults.zeropage(cpu.core(), addr, PAGE_SIZE, Resolve::empty());
            if zeros.is_err() {
                let _ = self.faults.wake(addr, PAGE_SIZE);
            }
        }
    }

    /// Fetches the next pages that nobody has; false when there are none.
    fn drain(&self, cpu: &Cpu, buffer: &mut [u8]) -> bool {
        let mut page = self.next.load(Ordering::Relaxed);
        while page < self.count() {
            if !self.claimed.get(page) {
                let run = self.claim(page..(page + self.config.background as u64).min(self.count()));
                if !run.is_empty() {
                    self.next.fetch_max(run.end, Ordering::Relaxed);
                    self.fetch(cpu, run, buffer, &self.drained);
                    return true;
                }
            }
            page += 1;
        }
        self.next.fetch_max(page, Ordering::Relaxed);
        false
    }

    /// Claims pages from the start of `pages` on, up to the first that somebody else has.
    fn claim(&self, pages: Range<u64>) -> Range<u64> {
        let end = pages.clone().find(|&page| !self.claimed.set(page)).unwrap_or(pages.end);
        pages.start..end
    }

    /// Fetches `run`, which is claimed, and puts it in place.
    fn fetch(&self, cpu: &Cpu, run: Range<u64>, buffer: &mut [u8], count: &AtomicU64) {
        let pages = run.end - run.start;
        let bytes = &mut buffer[..(pages << PAGE_SHIFT) as usize];
        match self.pager.supply(run.start << PAGE_SHIFT, bytes) {
            Ok(()) => {
                self.put(cpu, run.clone(), |addr, skip, len| {
                    let bytes = &bytes[skip as usize..(skip + len) as usize];
                    self.faults.copy(cpu.core(), addr, bytes, Resolve::DONT_WAKE)
                });
                count.fetch_add(pages, Ordering::AcqRel);
            }
            Err(IoError) => {
                self.put(cpu, run.clone(), |addr, _, len| {
                    self.faults.poison(cpu.core(), addr, len, Resolve::DONT_WAKE)
                });
                self.failed.fetch_add(pages, Ordering::AcqRel);
            }
        }
        for page in run.clone() {
            self.there.set(page);
        }
        self.arrived(pages);
        // Only now: who is woken, finds the page gone again and comes back is told from one whose page has yet to come.
        let _ = self.faults.wake(self.address(run.start), pages << PAGE_SHIFT);
    }

    /// Calls `act` with an address, its distance from the start of `run`, and a length, until all of the run has been dealt with; what
    /// has been given back meanwhile becomes zeros.
    fn put(&self, cpu: &Cpu, run: Range<u64>, act: impl Fn(u64, u64, u64) -> Result<(), Incomplete>) {
        let mut page = run.start;
        while page < run.end {
            let result = {
                let _order = self.order.read();
                let addr = self.address(page);
                if self.void.get(page) {
                    self.faults.zeropage(cpu.core(), addr, PAGE_SIZE, Resolve::DONT_WAKE)
                } else {
                    let end = (page..run.end).find(|&page| self.void.get(page)).unwrap_or(run.end);
                    act(addr, (page - run.start) << PAGE_SHIFT, (end - page) << PAGE_SHIFT)
                        .map_err(|incomplete| (incomplete, end))
                        .or_else(|(incomplete, end)| match incomplete {
                            // Several mappings by now: page by page.
                            Incomplete { error: Error::NotFound, .. } if end - page > 1 => {
                                act(addr, (page - run.start) << PAGE_SHIFT, PAGE_SIZE)?;
                                Err(Incomplete { done: PAGE_SIZE, error: Error::Again })
                            }
                            incomplete => Err(incomplete),
                        })
                        .and_then(|()| {
                            Err(Incomplete { done: (end - page) << PAGE_SHIFT, error: Error::Again })
                        })
                }
            };
            match result {
                Err(Incomplete { done, .. }) if done > 0 => page += done >> PAGE_SHIFT,
                // Something is being given back, and somebody must read that.
                Err(Incomplete { error: Error::Again, .. }) => {
                    let _ = self.take_events();
                }
                Err(Incomplete { error: Error::NoMemory, .. }) => {
                    // Somebody else may give memory back.
                    if self.ends.load(Ordering::Acquire) {
                        return;
                    }
                    thread::sleep(core::time::Duration::from_millis(1));
                }
                // Zeros; or there is something, or nothing is mapped any more.
                _ => page += 1,
            }
        }
    }

    fn arrived(&self, pages: u64) {
        if self.missing.fetch_sub(pages, Ordering::AcqRel) == pages {
            let _guard = self.lock.lock();
            self.complete.notify_all();
        }
    }
}

impl Drop for Paging {
    fn drop(&mut self) {
        self.state.ends.store(true, Ordering::Release);
        for thread in self.threads.drain(..) {
            // Again, for it may be between its look at the mark and its wait.
            while !thread.is_finished() {
                self.state.faults.interrupt();
                thread::sleep(core::time::Duration::from_micros(50));
            }
            // A thread that panicked has nothing left to say.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Paging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Paging")
            .field("range", &self.state.range)
            .field("progress", &self.progress())
            .finish_non_exhaustive()
    }
}
