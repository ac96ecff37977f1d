//! The machine: memory, processors and files put together as a [`Host`].

use crate::cpu::Cpu;
use crate::cpu_set::CpuSet;
use crate::error::HostedError;
use crate::file::HostFile;
use crate::memory::Memory;
use crate::swap::SwapFile;
use crate::tlb::Tlb;
use crate::{MAX_CPUS, wait};
use core::fmt;
use core::ptr::NonNull;
use std::path::Path;
use terrane::addr::{AddrRange, Frame};
use terrane::host::{self, Back, FrameRange, Host, Observe, ShootDown, Ticket, Wait};
use terrane::identity::Identity;
use terrane::machine::Machine;
use terrane::object::Object;
use terrane::page_table::X86_64;
use terrane::space::AddressSpace;
use terrane::stats::Event;
use terrane::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use terrane::sync::{CpuId, Shared};

/// An address space of a hosted machine.
pub type Space = AddressSpace<Hosted>;

/// Where events go: called with the processor and the event, while locks may be held. It must be quick, must not
/// panic, and must not call back into the machine.
pub type EventSink = Box<dyn Fn(CpuId, Event) + Send + Sync>;

/// What a machine is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MachineConfig {
    /// Bytes of memory, rounded up to whole frames. They are reserved at once and used when touched.
    pub memory: u64,
    /// How many processors there can be at a time: 1 to [`MAX_CPUS`].
    pub cpus: usize,
    /// Asks the system to back the memory with huge pages. Faster, but what the process holds then grows by 2 MiB
    /// at a time.
    pub huge_pages: bool,
    /// Uses `membarrier(2)`, so that accesses need no fence. Without it, or where the system refuses it, each
    /// access makes one; slower, and good for comparing.
    pub membarrier: bool,
    /// Makes threads give up their processor now and then in the middle of what they do, wherever Terrane asks the host
    /// for something. For tests: interleavings that take a run of bad luck become common, above all with more
    /// threads than processors.
    pub shaken: bool,
}

impl Default for MachineConfig {
    /// 64 MiB, twice as many processors as the system has (a thread that waits keeps its processor), huge pages,
    /// `membarrier`, not shaken.
    fn default() -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, |cpus| cpus.get());
        Self {
            memory: 64 << 20,
            cpus: (2 * cpus + 2).min(MAX_CPUS),
            huge_pages: true,
            membarrier: true,
            shaken: false,
        }
    }
}

/// The host side of the machine: what Terrane asks for memory, shoot-downs, waiting and events.
///
/// Made by [`HostedMachine::new`]; users see it as a type parameter.
pub struct Hosted {
    memory: Memory,
    tlb: Tlb,
    sink: Option<EventSink>,
    /// Counts the places where a shaken machine could yield; `None` for one that is not shaken.
    shaken: Option<AtomicU64>,
}

impl Hosted {
    pub(crate) fn tlb(&self) -> &Tlb {
        &self.tlb
    }

    /// A place where another thread may well come in between.
    #[inline]
    fn shake(&self) {
        if let Some(places) = &self.shaken {
            shake(places);
        }
    }
}

#[cold]
fn shake(places: &AtomicU64) {
    // Fibonacci hashing: irregular enough not to fall in step with what the threads do.
    let place = places.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    // Once in 128 times: often enough to meet every gap, and still to get on.
    if place >> 57 == 0 {
        rustix::thread::sched_yield();
    }
}

impl fmt::Debug for Hosted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hosted")
            .field("frames", &self.memory.frames())
            .field("fenced", &self.tlb.is_fenced())
            .finish_non_exhaustive()
    }
}

// SAFETY: the frames are one reservation that lives and stays in place as long as the host, and that nothing else
// in the process knows of.
unsafe impl host::Memory for Hosted {
    fn frames(&self) -> FrameRange {
        self.memory.frames()
    }

    fn back_by_huge_pages(&self) -> Option<Back> {
        self.memory.back()
    }

    #[inline]
    fn bytes(&self, frame: Frame) -> NonNull<u8> {
        self.shake();
        self.memory.bytes(frame)
    }
}

// SAFETY: the protocol in the head of `tlb` is the contract of the trait.
unsafe impl host::Tlb for Hosted {
    type Space = CpuSet;

    #[inline]
    fn shoot_down(&self, cpu: CpuId, space: &CpuSet, range: AddrRange) -> ShootDown {
        self.shake();
        self.tlb.shoot_down(cpu, space, range)
    }

    #[inline]
    fn has_passed(&self, cpu: CpuId, ticket: Ticket) -> bool {
        self.tlb.has_passed(cpu, ticket)
    }

    fn settle(&self, cpu: CpuId, ticket: Ticket) {
        self.tlb.settle(cpu, ticket);
    }
}

impl Wait for Hosted {
    fn wait(&self, _cpu: CpuId, word: &AtomicU32, value: u32) {
        wait::wait(word, value);
    }

    fn wake_all(&self, word: &AtomicU32) {
        wait::wake_all(word);
    }

    #[inline]
    fn relax(&self, _cpu: CpuId, rounds: u32) {
        wait::relax(rounds);
    }
}

impl Observe for Hosted {
    #[inline]
    fn event(&self, cpu: CpuId, event: Event) {
        self.shake();
        if let Some(sink) = &self.sink {
            sink(cpu, event);
        }
    }
}

impl Host for Hosted {
    type Format = X86_64;
    type File = HostFile;
    type RwLock = crate::locks::RawRwLock;
    type Mutex = crate::locks::RawMutex;
}

/// A machine in user space. Clones are the same machine; it lives until the last clone, processor, space and object
/// is gone.
#[derive(Clone)]
pub struct HostedMachine(Shared<Machine<Hosted>>);

impl HostedMachine {
    /// Builds a machine.
    ///
    /// # Errors
    /// [`HostedError::NoMemoryAsked`], [`HostedError::MemoryTooLarge`], [`HostedError::BadCpuCount`] for a
    /// configuration that cannot be had; [`HostedError::System`] or [`HostedError::OutOfMemory`] when the system
    /// does not give what it takes.
    pub fn new(config: MachineConfig) -> Result<Self, HostedError> {
        Self::build(config, None)
    }

    /// Builds a machine whose events go to `sink`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_events(config: MachineConfig, sink: EventSink) -> Result<Self, HostedError> {
        Self::build(config, Some(sink))
    }

    fn build(config: MachineConfig, sink: Option<EventSink>) -> Result<Self, HostedError> {
        if !(1..=MAX_CPUS).contains(&config.cpus) {
            return Err(HostedError::BadCpuCount { asked: config.cpus });
        }
        let memory = Memory::new(config.memory, config.huge_pages)?;
        // One more than asked for: Terrane's housekeeper.
        let tlb = Tlb::new(config.cpus + 1, config.membarrier)?;
        let shaken = config.shaken.then(AtomicU64::default);
        let host = Hosted { memory, tlb, sink, shaken };
        Ok(Self(Machine::try_new(host, config.cpus)?))
    }

    /// The machine as Terrane knows it: its counters, its use of memory.
    #[inline]
    pub fn machine(&self) -> &Shared<Machine<Hosted>> {
        &self.0
    }

    /// A processor, for one thread at a time; it runs no space yet.
    ///
    /// # Errors
    /// [`HostedError::NoCpuFree`] when as many exist as the machine was made for; [`HostedError::OutOfMemory`].
    pub fn cpu(&self) -> Result<Cpu, HostedError> {
        Cpu::new(self)
    }

    /// Opens the file at `path` for mapping; with `writable`, what is written to shared mappings of it reaches the
    /// file when it is synchronised.
    ///
    /// # Errors
    /// As [`HostFile::open`], and [`HostedError::OutOfMemory`].
    pub fn open(
        &self,
        path: impl AsRef<Path>,
        writable: bool,
    ) -> Result<Shared<Object<Hosted>>, HostedError> {
        let path = path.as_ref();
        let file = HostFile::open(path, writable)?;
        // As the system's own listings show it; a path that is gone by now is shown as it was given.
        let shown = path.canonicalize();
        let identity = file.identity(shown.as_deref().unwrap_or(path))?;
        let object = Object::file(&self.0, file)?;
        object.set_identity(identity)?;
        Ok(object)
    }

    /// Memory of `len` bytes that listings call `/memfd:name`, as the system does for `memfd_create`.
    ///
    /// # Errors
    /// [`HostedError::OutOfMemory`].
    pub fn memfd(&self, name: &str, len: u64) -> Result<Shared<Object<Hosted>>, HostedError> {
        let object = Object::shared_memory(&self.0, len)?;
        let identity = Identity::try_new(0, 1, object.number(), &format!("/memfd:{name}"))?;
        identity.set_deleted();
        object.set_identity(identity)?;
        Ok(object)
    }

    /// Swaps to the file at `path`, of `bytes` bytes, from now on; it is made if it is not there. Returns the number by which
    /// [`Machine::swap_off`] takes it out of use.
    ///
    /// # Errors
    /// As [`SwapFile::create`], and [`HostedError::Refused`] when the machine has had eight swap devices.
    pub fn swap_on(&self, path: impl AsRef<Path>, bytes: u64) -> Result<u32, HostedError> {
        Ok(self.0.swap_on(Box::new(SwapFile::create(path, bytes)?))?)
    }

    /// True when the system refused `membarrier`, or it was not asked for, so that each access makes a fence.
    pub fn is_fenced(&self) -> bool {
        self.0.host().tlb.is_fenced()
    }
}

impl fmt::Debug for HostedMachine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HostedMachine").field(self.0.host()).finish()
    }
}

#[cfg(terrane_watch)]
impl HostedMachine {
    /// The names of everything in the machine and its host, for the cache-line audit.
    pub fn describe(&self, names: &mut terrane::names::Names) {
        names.field("machine", &*self.0);
        names.field("tlb", self.0.host().tlb());
        let host::FrameRange { first, count } = self.0.host().memory.frames();
        let start = self.0.host().memory.bytes(first).addr().get();
        names.under("bytes of frame ", |names| {
            let size = terrane::PAGE_SIZE as usize;
            names.array(start..start + count * size, size, |frame| frame.to_string(), &[]);
        });
    }
}
