//! What the threads of an episode share, and how an episode begins and ends.

use super::content::{Generation, file_word};
use super::log::Log;
use super::player::{Player, Scene};
use super::plot::{Kind, PAGE, Page, Plot, READ_WRITE};
use super::race;
use crate::baseline::linux;
use crate::failure::Failure;
use parking_lot::{Mutex, RwLock};
use std::any::Any;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use terrane::machine::Usage;
use terrane::mm::HugePages;
use terrane::object::Object;
use terrane::space::{Locking, MapRequest, Placement, SpaceConfig};
use terrane::stats::Snapshot;
use terrane::sync::Shared;
use terrane::vma::Advice;
use terrane::{Error, PAGE_SIZE};
use terrane_hosted::{Cpu, HostFile, Hosted, HostedMachine, MachineConfig, Space, SwapFile};

/// A page of counters in shared memory, in every space.
pub const COUNTERS: u64 = 0x9000_0000;
/// Pages that the heap may have.
pub const HEAP_PAGES: usize = 64;
/// Advice about huge pages, and what it is called.
pub const HUGE_ADVICE: [(Advice, &str); 4] = [
    (Advice::HugePage, "to be huge"),
    (Advice::HugePage, "to be huge"),
    (Advice::NoHugePage, "not to be huge"),
    (Advice::Collapse, "to be huge at once"),
];
/// Spaces that fork from each other.
const FAMILIES: usize = 6;
/// Without progress for so long, a thread hangs.
const HANGS: Duration = Duration::from_secs(60);

/// What is wrong.
#[derive(Debug)]
pub struct Trouble(pub String);

/// What is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Count {
    /// Stores to several words.
    Store,
    /// Loads, and instructions fetched.
    Load,
    /// Changes of mappings, and pages forgotten or filled in.
    Change,
    /// Additions in memory that all share.
    Atomic,
    /// Forks.
    Fork,
    /// Listings.
    List,
    /// Writes to a file, compared with it.
    Sync,
    /// Calls and accesses that found no memory.
    Shortage,
}

/// Their names in reports.
pub const COUNTS: [(Count, &str); 8] = [
    (Count::Store, "stores"),
    (Count::Load, "loads"),
    (Count::Change, "changes"),
    (Count::Atomic, "atomics"),
    (Count::Fork, "forks"),
    (Count::List, "listings"),
    (Count::Sync, "syncs"),
    (Count::Shortage, "shortages"),
];

/// Damage that is done on purpose, to see that it is noticed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Plant {
    /// A byte of memory is changed.
    Byte,
    /// A frame is taken and not given back.
    Frame,
    /// A byte of a file is changed.
    File,
}

/// The circumstances of an episode.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// Where random numbers begin.
    pub seed: u64,
    /// Which one it is, counted from 0: what the circumstances follow from.
    pub episode: u64,
    /// Threads.
    pub threads: usize,
    /// Bytes of memory, if that was asked for.
    pub memory: Option<u64>,
    /// Less memory than the threads could use.
    pub short: bool,
    /// Threads give up their processors in the middle of what they do.
    pub shaken: bool,
    /// How faults are locked.
    pub locking: Locking,
    /// Where mappings go that ask for no address.
    pub placement: Placement,
    /// Which first touches make huge pages.
    pub huge_pages: HugePages,
    /// Readers and writers with a quarter of the memory that they use, and a swap device that fails; see `pressure`.
    pub pressure: bool,
    /// How long it takes.
    pub time: Duration,
    /// The damage to do.
    pub plant: Option<Plant>,
}

impl fmt::Display for Terms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = match (self.pressure, self.short) {
            (true, _) => "memory for a quarter, swap that fails",
            (false, true) => "little memory",
            (false, false) => "much memory",
        };
        let shaken = if self.shaken { ", shaken" } else { "" };
        let classic = if self.locking == Locking::Classic { ", classic lock" } else { "" };
        let placed = if self.placement == Placement::PerCpu { ", per-CPU placement" } else { "" };
        let huge = match self.huge_pages {
            HugePages::Always => ", huge pages always",
            HugePages::Madvise => "",
            HugePages::Never => ", huge pages never",
        };
        let swap = if self.swaps() && !self.pressure { " and swap" } else { "" };
        write!(f, "{memory}{swap}{shaken}{classic}{placed}{huge}")
    }
}

impl Terms {
    /// How the spaces behave.
    pub(super) fn config(&self) -> SpaceConfig {
        let mut config = SpaceConfig::with_locking(self.locking);
        config.placement = self.placement;
        config.huge_pages = self.huge_pages;
        config
    }

    /// Pages that all plots have together.
    fn pages(&self) -> usize {
        let plots: usize = Kind::FIXED.iter().map(|kind| kind.plots() * kind.pages()).sum();
        let family: usize = 3 * Kind::Anonymous.pages() + Kind::Block.pages();
        plots * self.threads + FAMILIES * family + HEAP_PAGES
    }

    /// Where memory is short, every other time there is a device to swap to.
    fn swaps(&self) -> bool {
        self.short && !self.episode.is_multiple_of(2)
    }

    fn memory(&self) -> u64 {
        let all = (self.pages() * PAGE) as u64;
        // Some huge pages fit in even where memory is short.
        self.memory.unwrap_or(if self.short { all * 6 / 10 + (2 << 20) } else { (16 * all).max(256 << 20) })
    }
}

/// What all threads use.
pub struct World {
    /// The machine.
    pub machine: HostedMachine,
    /// How many threads there are.
    pub threads: usize,
    /// Memory is short, and running out of it no failure.
    pub short: bool,
    /// A file that nobody changes.
    pub private_file: Shared<Object<Hosted>>,
    /// A file that is written through mappings.
    pub shared_file: Shared<Object<Hosted>>,
    /// Memory that all spaces share.
    pub shared_memory: Shared<Object<Hosted>>,
    /// Shared memory for a zone.
    pub zone_memory: Shared<Object<Hosted>>,
    /// Held for reading by whoever works on a zone, for writing by whoever has it to himself.
    pub zones: Vec<RwLock<()>>,
    /// The counters in shared memory: their object, and what they must add up to.
    counters: Shared<Object<Hosted>>,
    /// What was added to the counters.
    pub additions: AtomicU64,
    /// Spaces that fork from each other.
    pub families: Vec<Mutex<Option<Scene>>>,
    /// The damage to do.
    pub plant: Option<Plant>,
    config: SpaceConfig,
    file: File,
    counts: [AtomicU64; COUNTS.len()],
    stop: AtomicBool,
    /// Plots of the shared file, as their owners left them.
    left: Mutex<Vec<Plot>>,
}

/// What came of an episode that went well.
pub struct Outcome {
    /// How often everything was done.
    pub counts: [u64; COUNTS.len()],
    /// What the machine counted.
    pub stats: Snapshot,
}

/// What went wrong.
pub struct Failed {
    /// In which thread, if it was in one.
    pub thread: Option<usize>,
    /// What.
    pub what: String,
    /// What the thread did last.
    pub log: String,
    /// The number of the operation.
    pub operation: u64,
}

/// How an episode ended that did not go well.
pub enum Ended {
    /// Terrane did something wrong.
    Failed(Box<Failed>),
    /// It could not be carried out.
    Broken(Failure),
}

impl From<Failure> for Ended {
    fn from(failure: Failure) -> Self {
        Self::Broken(failure)
    }
}

pub(super) fn broken<E: fmt::Display>(what: &'static str) -> impl Fn(E) -> Failure {
    move |error| Failure::Request(format!("{what}: {error}"))
}

impl World {
    fn new(machine: &HostedMachine, terms: &Terms) -> Result<Self, Failure> {
        let bytes = |kind: Kind| (kind.plots() * terms.threads * kind.pages() * PAGE) as u64;
        let object = |file: File| {
            let file = HostFile::new(file).map_err(broken("cannot open a file"))?;
            Object::file(machine.machine(), file).map_err(broken("cannot open a file"))
        };
        let memory =
            |len| Object::shared_memory(machine.machine(), len).map_err(broken("cannot make shared memory"));
        let private = linux::sparse_file(bytes(Kind::PrivateFile))?;
        let words: Vec<u8> =
            (0..bytes(Kind::PrivateFile)).step_by(8).flat_map(|at| file_word(at).to_ne_bytes()).collect();
        private.write_all_at(&words, 0).map_err(|e| Failure::request("cannot write a file", &e))?;
        let file = linux::sparse_file(bytes(Kind::SharedFile))?;
        let shared = file.try_clone().map_err(|e| Failure::request("cannot open a file", &e))?;
        Ok(Self {
            machine: machine.clone(),
            threads: terms.threads,
            short: terms.short,
            private_file: object(private)?,
            shared_file: object(shared)?,
            shared_memory: memory(bytes(Kind::Shared))?,
            zone_memory: memory(race::ZONE_BYTES)?,
            zones: (0..race::ZONES).map(|_| RwLock::new(())).collect(),
            counters: memory(PAGE_SIZE)?,
            additions: AtomicU64::new(0),
            families: (0..FAMILIES).map(|_| Mutex::new(None)).collect(),
            plant: terms.plant,
            config: terms.config(),
            file,
            counts: Default::default(),
            stop: AtomicBool::new(false),
            left: Mutex::new(Vec::new()),
        })
    }

    /// Counts one.
    pub fn count(&self, count: Count) {
        self.counts[count as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// What was counted.
    fn counts(&self) -> [u64; COUNTS.len()] {
        std::array::from_fn(|at| self.counts[at].load(Ordering::Relaxed))
    }

    /// Bytes of the file that is written through mappings.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn read_file(&self, offset: u64, len: usize) -> Result<Vec<u8>, Trouble> {
        let mut bytes = vec![0; len];
        self.file
            .read_exact_at(&mut bytes, offset)
            .map_err(|e| Trouble(format!("cannot read the file: {e}")))?;
        Ok(bytes)
    }

    /// A space; `None` when memory is short.
    pub fn space(&self, player: &Player<'_>, cpu: &Cpu) -> Result<Option<Shared<Space>>, Trouble> {
        let space = Space::try_new(cpu.core(), self.config);
        let Some(space) = player.unless_short("making a space", &"nothing", space)? else { return Ok(None) };
        Ok(Shared::try_new(space).ok())
    }

    /// The request that maps the counters.
    pub fn counters_request(&self) -> MapRequest<Hosted> {
        MapRequest::object(&self.counters, 0, PAGE_SIZE, READ_WRITE, true).fixed(COUNTERS)
    }

    /// The space that all threads share, with all plots mapped.
    fn first_space(&self, cpu: &Cpu) -> Result<Shared<Space>, Error> {
        let space = Space::try_new(cpu.core(), self.config)?;
        space.set_heap(cpu.core(), Kind::Heap.base())?;
        for kind in Kind::FIXED {
            for number in 0..kind.plots() * self.threads {
                let plot = Plot::fixed(kind, number);
                space.map(cpu.core(), plot.request(self, &(0..plot.pages.len()), READ_WRITE))?;
            }
        }
        space.map(cpu.core(), self.counters_request())?;
        space.map(cpu.core(), race::hot_request(self.threads))?;
        for zone in 0..race::ZONES {
            space.map(cpu.core(), race::zone_request(self, zone, race::zone_pages(zone), READ_WRITE))?;
        }
        Ok(Shared::try_new(space)?)
    }

    /// What thread `thread` has in that space.
    fn scene(&self, space: &Shared<Space>, thread: usize) -> Scene {
        let mut plots = Vec::new();
        for kind in Kind::FIXED {
            for n in 0..kind.plots() {
                let mut plot = Plot::fixed(kind, n * self.threads + thread);
                plot.pages.fill(Page::mapped(READ_WRITE));
                plots.push(plot);
            }
        }
        if thread == 0 {
            plots.push(Plot::new(Kind::Heap, 0, Kind::Heap.base(), HEAP_PAGES));
        }
        Scene {
            space: space.clone(),
            number: 0,
            plots,
            hot: vec![[0; 2]; race::HOT_PAGES],
            own: Generation::NONE,
        }
    }

    /// The whole life of a thread.
    fn play(
        &self,
        space: &Shared<Space>,
        thread: usize,
        seed: u64,
        log: &Arc<Mutex<Log>>,
    ) -> Result<(), Trouble> {
        let mut cpu = self.machine.cpu().map_err(|e| Trouble(format!("cannot have a processor: {e}")))?;
        let mut scene = self.scene(space, thread);
        let mut player = Player::new(self, thread, seed, log.clone());
        while !self.stop.load(Ordering::Relaxed) {
            cpu.switch_to(space);
            for _ in 0..64 {
                player.step(&mut cpu, &mut scene)?;
            }
            if player.one_in(8) {
                player.fork(&mut cpu, &mut scene, 1)?;
            }
            if player.one_in(2) {
                player.play_family(&mut cpu, 32)?;
            }
        }
        cpu.switch_off();
        // First what gives memory back.
        for family in &self.families {
            if let Some(mut slot) = family.try_lock()
                && let Some(scene) = slot.as_ref()
            {
                cpu.switch_to(&scene.space);
                player.check_some(&mut cpu, scene, 1)?;
                cpu.switch_off();
                *slot = None;
            }
        }
        cpu.switch_to(space);
        for page in 0..race::HOT_PAGES {
            player.check_hot(&mut cpu, &scene, page)?;
        }
        player.check_own(&mut cpu, &scene)?;
        player.check_finally(&mut cpu, &mut scene)?;
        let files = scene.plots.into_iter().filter(|plot| plot.kind == Kind::SharedFile);
        self.left.lock().extend(files);
        Ok(())
    }

    /// When all threads have ended: sums, the file, and that nothing is left. Consumes what holds memory.
    fn end(self, cpu: &mut Cpu, space: Shared<Space>, before: &Usage) -> Result<Outcome, Trouble> {
        cpu.switch_to(&space);
        let mut sum = 0;
        for n in 0..4 {
            sum += cpu
                .load_u64(COUNTERS + 8 * n)
                .map_err(|e| Trouble(format!("cannot read the counters: {e}")))?;
        }
        let additions = self.additions.load(Ordering::Relaxed);
        if sum != additions {
            return Err(Trouble(format!("counters add up to {sum}, not to {additions}")));
        }
        cpu.switch_off();
        // Writing takes a frame for a moment: what the space has is given back first.
        drop(space);
        cpu.core().quiesce();
        self.shared_file
            .write_back(cpu.core())
            .map_err(|e| Trouble(format!("cannot write the file back: {e}")))?;
        if self.plant == Some(Plant::File) {
            let mut byte = self.read_file(100, 1)?;
            byte[0] ^= 1;
            let _ = self.file.write_all_at(&byte, 100);
        }
        {
            let player = Player::new(&self, 0, 0, Arc::default());
            for plot in self.left.lock().iter() {
                player.compare_file(plot, 0..plot.pages.len())?;
            }
        }
        let (machine, counts, plant) = (self.machine.clone(), self.counts(), self.plant);
        let stats = machine.machine().stats().snapshot();
        drop(self);
        cpu.core().quiesce();
        if plant == Some(Plant::Frame) {
            let pin = cpu.core().pin();
            let _ = machine.machine().ram(&pin).allocate();
        }
        let after = machine.machine().usage();
        if (after.frames_free, after.vmas) != (before.frames_free, before.vmas) {
            return Err(Trouble(format!(
                "when all was gone, {} of {} frames were free, not {}, and {} records in use, not {}",
                after.frames_free, after.frames_total, before.frames_free, after.vmas, before.vmas
            )));
        }
        Ok(Outcome { counts, stats })
    }
}

/// Sets the flag when its thread ends other than well.
struct StopOthers<'a> {
    stop: &'a AtomicBool,
    running: &'a AtomicUsize,
    well: bool,
}

impl Drop for StopOthers<'_> {
    fn drop(&mut self) {
        if !self.well {
            self.stop.store(true, Ordering::Relaxed);
        }
        self.running.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Plays an episode. `tick` is called ten times a second with what was counted so far.
pub fn episode(terms: &Terms, mut tick: impl FnMut(&[u64; COUNTS.len()])) -> Result<Outcome, Ended> {
    let config = MachineConfig {
        memory: terms.memory(),
        cpus: terms.threads + 1,
        shaken: terms.shaken,
        ..MachineConfig::default()
    };
    let machine = HostedMachine::new(config).map_err(broken("cannot build a machine"))?;
    if terms.swaps() {
        let file = rustix::fs::memfd_create("swap", rustix::fs::MemfdFlags::CLOEXEC);
        let file = file.map_err(broken("cannot make a file for swap"))?;
        let swap = SwapFile::new(file, 4 * terms.memory()).map_err(broken("cannot make a file for swap"))?;
        machine.machine().swap_on(Box::new(swap)).map_err(broken("cannot swap"))?;
    }
    let mut cpu = machine.cpu().map_err(broken("cannot have a processor"))?;
    cpu.core().quiesce();
    let before = machine.machine().usage();
    let world = World::new(&machine, terms)?;
    let space = world.first_space(&cpu).map_err(broken("cannot set the space up"))?;
    let logs: Vec<Arc<Mutex<Log>>> = (0..terms.threads).map(|_| Arc::default()).collect();
    let running = AtomicUsize::new(terms.threads);
    let failed = Mutex::new(None);
    thread::scope(|scope| {
        for (thread, log) in logs.iter().enumerate() {
            let (world, space, running, failed) = (&world, &space, &running, &failed);
            let seed = terms.seed.wrapping_mul(1000).wrapping_add(thread as u64);
            scope.spawn(move || {
                let mut guard = StopOthers { stop: &world.stop, running, well: false };
                let result = catch_unwind(AssertUnwindSafe(|| world.play(space, thread, seed, log)));
                let what = match result {
                    Ok(Ok(())) => {
                        guard.well = true;
                        return;
                    }
                    Ok(Err(Trouble(what))) => what,
                    Err(panic) => format!("panicked: {}", words_of(&*panic)),
                };
                failed.lock().get_or_insert_with(|| fail(thread, what, &log.lock()));
            });
        }
        watch(terms, &world, &running, &logs, &failed, &mut tick);
    });
    if let Some(failed) = failed.into_inner() {
        return Err(Ended::Failed(Box::new(failed)));
    }
    world.end(&mut cpu, space, &before).map_err(|Trouble(what)| {
        Ended::Failed(Box::new(Failed { thread: None, what, log: String::new(), operation: 0 }))
    })
}

fn fail(thread: usize, what: String, log: &Log) -> Failed {
    Failed { thread: Some(thread), what, log: log.to_string(), operation: log.operations }
}

pub(super) fn words_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without words")
}

/// Waits until the time is over and all threads have ended. A thread that hangs cannot be ended, so then the whole process is.
fn watch(
    terms: &Terms,
    world: &World,
    running: &AtomicUsize,
    logs: &[Arc<Mutex<Log>>],
    failed: &Mutex<Option<Failed>>,
    tick: &mut impl FnMut(&[u64; COUNTS.len()]),
) {
    let start = Instant::now();
    let mut seen: Vec<(u64, Instant)> = vec![(0, start); logs.len()];
    let mut ticked = start;
    while running.load(Ordering::Relaxed) > 0 {
        thread::sleep(Duration::from_millis(5));
        if start.elapsed() >= terms.time {
            world.stop.store(true, Ordering::Relaxed);
        }
        if ticked.elapsed() < Duration::from_millis(100) {
            continue;
        }
        ticked = Instant::now();
        tick(&world.counts());
        for (thread, (log, seen)) in logs.iter().zip(&mut seen).enumerate() {
            let log = log.lock();
            if log.operations != seen.0 {
                *seen = (log.operations, ticked);
            } else if seen.1.elapsed() > HANGS && Arc::strong_count(&logs[thread]) > 1 {
                let what = format!("no operation ended for {} seconds", HANGS.as_secs());
                let failed = failed.lock().take().unwrap_or_else(|| fail(thread, what, &log));
                eprintln!("{}", super::told(terms, &failed));
                std::process::exit(1);
            }
        }
    }
}
