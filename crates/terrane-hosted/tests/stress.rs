//! Everything at once, checked byte by byte.
//!
//! Several threads run on one space, and several more on a space forked from it. Each thread owns *plots*: runs of
//! pages between those of the other threads, so that mappings are split and merged across owners. It stores, loads,
//! maps, unmaps, protects, populates and discards pages of its plots at random, and keeps a model of what every
//! byte must be and what every access must end in; it forks the space, checks its plots in the child, changes
//! them there, and checks that neither side has seen the other. In between it reads pages of others, where it can check
//! less: each page carries a stamp that says whose it is, and atomics in shared memory that must add up.
//! One of the threads writes the shared file back all the time; at the end the file on disk must be the model.
//! When all is gone, so must be every frame and every record.
//!
//! One run has too little memory: there every call and every access may also fail for that reason, and then must have
//! changed nothing.
//!
//! By default this takes a few seconds. For longer or other runs, set
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `TERRANE_STRESS_SECONDS` | how long each of the runs takes | 1 |
//! | `TERRANE_STRESS_SEED` | where the random numbers start; printed when a run fails | 1 |
//! | `TERRANE_STRESS_THREADS` | threads for each of the two spaces | 3 |
//!
//! Threads interleave as they like, so a seed repeats the operations of each thread, not the run.

mod common;

use common::*;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use terrane::stats::Counter;
use terrane_hosted::Cpu;

const PAGE: usize = PAGE_SIZE as usize;
/// Pages of a plot.
const PLOT: usize = 24;
/// Plots of each kind for each thread.
const PLOTS: usize = 2;
/// Where plots of each kind begin. Plot `n` of a kind is owned by thread `n % threads`.
const BASES: [u64; 4] = [0x1000_0000, 0x2000_0000, 0x3000_0000, 0x4000_0000];
/// A page of counters in shared memory, in every space.
const COUNTERS: u64 = 0x5000_0000;

/// What is mapped in a plot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// Private memory.
    Anonymous,
    /// A private mapping of a file that nobody changes.
    PrivateFile,
    /// Shared memory. The forked space leaves it to the first.
    Shared,
    /// A shared mapping of a file. The forked space leaves it to the first.
    SharedFile,
}

const KINDS: [Kind; 4] = [Kind::Anonymous, Kind::PrivateFile, Kind::Shared, Kind::SharedFile];

impl Kind {
    fn is_shared(self) -> bool {
        matches!(self, Kind::Shared | Kind::SharedFile)
    }
}

/// What all threads use.
struct World {
    machine: HostedMachine,
    private_file: Shared<terrane::object::Object<Hosted>>,
    shared_file: Shared<terrane::object::Object<Hosted>>,
    shared_memory: Shared<terrane::object::Object<Hosted>>,
    /// What is in `private_file`.
    pattern: Vec<u8>,
    threads: usize,
    /// Memory is short, and running out of it no failure.
    short: bool,
    shortages: AtomicU64,
    stop: AtomicBool,
    operations: AtomicU64,
    forks: AtomicU64,
    additions: AtomicU64,
    /// What each plot of the shared file holds at the end.
    final_file: Mutex<Vec<(usize, Vec<u8>)>>,
}

/// A run of pages, as its owner knows it.
#[derive(Clone)]
struct Plot {
    kind: Kind,
    number: usize,
    /// What may be done with each page; `None` where nothing is mapped.
    prot: Vec<Option<Prot>>,
    /// The contents. Of shared plots there is one, whichever space is looked at.
    bytes: Rc<RefCell<Vec<u8>>>,
}

impl Plot {
    fn base(&self) -> u64 {
        BASES[self.kind as usize] + (self.number * PLOT * PAGE) as u64
    }

    /// Where the plot lies in its object.
    fn offset(&self) -> u64 {
        (self.number * PLOT * PAGE) as u64
    }

    /// The plot in a child: with contents of its own, if it is private.
    fn fork(&self) -> Self {
        let bytes = if self.kind.is_shared() {
            self.bytes.clone()
        } else {
            Rc::new(RefCell::new(self.bytes.borrow().clone()))
        };
        Self { bytes, ..self.clone() }
    }

    /// What `access` to `page` ends in.
    fn verdict(&self, page: usize, access: Access) -> Result<(), FaultError> {
        let prot = self.prot[page].ok_or(FaultError::NotMapped)?;
        let allowed = match access {
            Access::Read => !prot.is_empty(),
            Access::Write => prot.contains(Prot::WRITE),
            Access::Execute => prot.contains(Prot::EXEC),
        };
        if allowed { Ok(()) } else { Err(FaultError::NotAllowed) }
    }

    /// What a transfer of `len` bytes from `from` on ends in.
    fn expect(&self, from: usize, len: usize, access: Access) -> Result<(), Interrupted> {
        for page in from / PAGE..(from + len).div_ceil(PAGE) {
            self.verdict(page, access)
                .map_err(|error| Interrupted { done: (page * PAGE).saturating_sub(from), error })?;
        }
        Ok(())
    }

    /// The pages are forgotten or mapped anew: private ones begin again.
    fn reset(&self, world: &World, pages: std::ops::Range<usize>) {
        let mut bytes = self.bytes.borrow_mut();
        let range = pages.start * PAGE..pages.end * PAGE;
        match self.kind {
            Kind::Anonymous => bytes[range].fill(0),
            Kind::PrivateFile => {
                let offset = self.offset() as usize;
                bytes[range.clone()]
                    .copy_from_slice(&world.pattern[offset + range.start..offset + range.end]);
            }
            Kind::Shared | Kind::SharedFile => {}
        }
    }

    fn request(&self, world: &World, pages: std::ops::Range<usize>, prot: Prot) -> MapRequest<Hosted> {
        let len = ((pages.end - pages.start) * PAGE) as u64;
        let offset = self.offset() + (pages.start * PAGE) as u64;
        let request = match self.kind {
            Kind::Anonymous => MapRequest::anonymous(len, prot),
            Kind::PrivateFile => MapRequest::object(&world.private_file, offset, len, prot, false),
            Kind::Shared => MapRequest::object(&world.shared_memory, offset, len, prot, true),
            Kind::SharedFile => MapRequest::object(&world.shared_file, offset, len, prot, true),
        };
        request.fixed(self.base() + (pages.start * PAGE) as u64)
    }
}

/// The first eight bytes of a page that has a stamp: whose page it is. Written in place of random bytes now and then.
fn stamp(kind: Kind, number: usize, page: usize, version: u64) -> u64 {
    (0xabc0 | kind as u64) << 48 | (number as u64) << 40 | (page as u64) << 32 | version & 0xffff_ffff
}

/// One thread, with what it knows about its plots in one space.
struct Player<'w> {
    world: &'w World,
    random: Random,
    version: u64,
}

impl Player<'_> {
    /// Some pages of a plot.
    fn pages(&mut self) -> std::ops::Range<usize> {
        let start = self.random.below(PLOT as u64) as usize;
        let most = if self.random.one_in(3) { PLOT - start } else { (PLOT - start).min(4) };
        start..start + 1 + self.random.below(most as u64) as usize
    }

    /// Some bytes of a plot, the stamps left out: where, and how many.
    fn bytes(&mut self) -> (usize, usize) {
        let from = self.random.below((PLOT * PAGE) as u64) as usize;
        let most = (PLOT * PAGE - from).min(if self.random.one_in(3) { 5 * PAGE } else { 60 });
        (from, 1 + self.random.below(most as u64) as usize)
    }

    fn store(&mut self, cpu: &mut Cpu, plot: &Plot) {
        let (from, len) = self.bytes();
        let mut new = vec![0; len];
        self.random.fill(&mut new);
        let mut model = plot.bytes.borrow_mut();
        // Stamps keep saying whose page it is: what would hit one takes over what is there.
        for n in 0..len {
            if (from + n) % PAGE < 8 {
                new[n] = model[from + n];
            }
        }
        let expected = plot.expect(from, len, Access::Write);
        let at = plot.base() + from as u64;
        let result = match (len, self.random.one_in(2)) {
            (8.., true) if from % PAGE + 8 <= PAGE => {
                new.truncate(8);
                let value = u64::from_ne_bytes(new[..].try_into().unwrap());
                let result = cpu.store_u64(at, value);
                if !result.is_err_and(|error| self.is_shortage(error)) {
                    assert_eq!(result, plot.verdict(from / PAGE, Access::Write), "{plot:?} at {at:#x}");
                }
                if result.is_ok() {
                    model[from..from + 8].copy_from_slice(&new);
                }
                return;
            }
            _ => cpu.write_bytes(at, &new),
        };
        let done = self.done(result, expected, len, plot);
        model[from..from + done].copy_from_slice(&new[..done]);
    }

    /// Compares what a transfer ended in with what it should have; returns how many bytes were transferred.
    fn done(
        &self,
        result: Result<(), Interrupted>,
        expected: Result<(), Interrupted>,
        len: usize,
        plot: &Plot,
    ) -> usize {
        let done =
            |result: Result<(), Interrupted>| result.map_or_else(|interrupted| interrupted.done, |()| len);
        if result.is_err_and(|interrupted| self.is_shortage(interrupted.error)) {
            assert!(done(result) <= done(expected), "{plot:?}");
        } else {
            assert_eq!(result, expected, "{plot:?}");
        }
        done(result)
    }

    /// True for a fault that failed because memory is short, if that may be.
    fn is_shortage(&self, error: FaultError) -> bool {
        let shortage = self.world.short && error == FaultError::OutOfMemory;
        self.world.shortages.fetch_add(u64::from(shortage), Ordering::Relaxed);
        shortage
    }

    /// What a call gave; `None` when memory is short, and that may be.
    fn unless_short<T>(&self, result: Result<T, Error>) -> Option<T> {
        match result {
            Err(Error::NoMemory) if self.world.short => {
                self.world.shortages.fetch_add(1, Ordering::Relaxed);
                None
            }
            result => Some(result.unwrap()),
        }
    }

    fn store_stamp(&mut self, cpu: &mut Cpu, plot: &Plot) {
        let page = self.random.below(PLOT as u64) as usize;
        self.version += 1;
        let value = stamp(plot.kind, plot.number, page, self.version);
        let result = cpu.store_u64(plot.base() + (page * PAGE) as u64, value);
        if !result.is_err_and(|error| self.is_shortage(error)) {
            assert_eq!(result, plot.verdict(page, Access::Write), "{plot:?}");
        }
        if result.is_ok() {
            plot.bytes.borrow_mut()[page * PAGE..page * PAGE + 8].copy_from_slice(&value.to_ne_bytes());
        }
    }

    fn load(&mut self, cpu: &mut Cpu, plot: &Plot) {
        let (from, len) = self.bytes();
        self.check(cpu, plot, from, len);
    }

    /// Reads bytes and compares every one.
    fn check(&self, cpu: &mut Cpu, plot: &Plot, from: usize, len: usize) {
        let mut read = vec![0x5a; len];
        let at = plot.base() + from as u64;
        let expected = plot.expect(from, len, Access::Read);
        let done = self.done(cpu.read_bytes(at, &mut read), expected, len, plot);
        let model = plot.bytes.borrow();
        if let Some(n) = (0..done).find(|&n| read[n] != model[from + n]) {
            panic!(
                "{plot:?}: at {:#x} (cpu {:?}) there is {:#04x}, not {:#04x}",
                at + n as u64,
                cpu.id(),
                read[n],
                model[from + n]
            );
        }
    }

    /// Reads everything that can be read, and a little of what cannot.
    fn check_all(&mut self, cpu: &mut Cpu, plot: &Plot) {
        for page in 0..PLOT {
            if plot.verdict(page, Access::Read).is_ok() || self.random.one_in(8) {
                self.check(cpu, plot, page * PAGE, PAGE);
            }
        }
    }

    fn change_layout(&mut self, cpu: &mut Cpu, space: &Space, plot: &mut Plot) {
        let pages = self.pages();
        let (at, len) =
            (plot.base() + (pages.start * PAGE) as u64, ((pages.end - pages.start) * PAGE) as u64);
        let whole = plot.prot[pages.clone()].iter().all(Option::is_some);
        // Mostly pages that can be used: what fails has nothing to compare.
        let prot = match self.random.below(12) {
            0 => Prot::empty(),
            1 => Prot::READ,
            2 => Prot::READ | Prot::EXEC,
            _ => RW,
        };
        match self.random.below(8) {
            0 if self.random.one_in(2) => {
                let Some(()) = self.unless_short(space.unmap(cpu.core(), at, len)) else { return };
                plot.prot[pages].fill(None);
            }
            1 | 2 => {
                let mut request = plot.request(self.world, pages.clone(), prot);
                if self.random.one_in(3) {
                    request = request.with(MapFlags::POPULATE);
                }
                let Some(mapped) = self.unless_short(space.map(cpu.core(), request)) else { return };
                assert_eq!(mapped, at);
                plot.prot[pages.clone()].fill(Some(prot));
                plot.reset(self.world, pages);
            }
            3 => {
                let mut request = plot.request(self.world, pages.clone(), prot);
                request.flags.remove(MapFlags::FIXED);
                request.flags.insert(MapFlags::FIXED_NOREPLACE);
                if plot.prot[pages.clone()].iter().all(Option::is_none) {
                    let Some(mapped) = self.unless_short(space.map(cpu.core(), request)) else { return };
                    assert_eq!(mapped, at);
                    plot.prot[pages.clone()].fill(Some(prot));
                    plot.reset(self.world, pages);
                } else {
                    assert_eq!(space.map(cpu.core(), request), Err(Error::Exists));
                }
            }
            4 if whole => {
                let Some(()) = self.unless_short(space.protect(cpu.core(), at, len, prot)) else { return };
                plot.prot[pages].fill(Some(prot));
            }
            5 if whole => {
                space.advise(cpu.core(), at, len, Advice::DontNeed).unwrap();
                plot.reset(self.world, pages);
            }
            _ if whole => {
                let (advice, access) = if self.random.one_in(2) {
                    (Advice::PopulateRead, Access::Read)
                } else {
                    (Advice::PopulateWrite, Access::Write)
                };
                let possible = pages.clone().all(|page| plot.verdict(page, access).is_ok());
                let result = space.advise(cpu.core(), at, len, advice);
                let short = self.world.short && result == Err(Error::NoMemory);
                assert!(short || result.is_ok() == possible, "{advice:?}: {result:?} for {plot:?}");
            }
            _ => {}
        }
    }

    /// Looks at a page of anybody's.
    fn look_elsewhere(&mut self, cpu: &mut Cpu) {
        let kind = KINDS[self.random.below(4) as usize];
        let number = self.random.below((PLOTS * self.world.threads) as u64) as usize;
        let page = self.random.below(PLOT as u64) as usize;
        let at = BASES[kind as usize] + ((number * PLOT + page) * PAGE) as u64;
        match cpu.load_u64(at) {
            Ok(0) | Err(FaultError::NotMapped | FaultError::NotAllowed) => {}
            Ok(value) if kind == Kind::PrivateFile => {
                let offset = (number * PLOT + page) * PAGE;
                let original = u64::from_ne_bytes(self.world.pattern[offset..offset + 8].try_into().unwrap());
                assert!(value == original || value >> 32 == stamp(kind, number, page, 0) >> 32, "{value:#x}");
            }
            Ok(value) => {
                assert_eq!(value >> 32, stamp(kind, number, page, 0) >> 32, "a foreign page at {at:#x}")
            }
            Err(error) => assert!(self.is_shortage(error), "{error} at {at:#x}"),
        }
    }

    fn add(&mut self, cpu: &mut Cpu) {
        let value = self.random.below(100);
        match cpu.fetch_add_u64(COUNTERS + 8 * self.random.below(4), value) {
            Ok(_) => {}
            Err(AtomicError::Fault(error)) if self.is_shortage(error) => return,
            Err(error) => panic!("{error}"),
        }
        self.world.additions.fetch_add(value, Ordering::Relaxed);
    }

    /// Forks, and plays alternately on both sides.
    fn fork(&mut self, cpu: &mut Cpu, space: &Shared<Space>, plots: &mut [Plot], depth: u32) {
        let Some(child) = self.unless_short(space.fork(cpu.core())) else { return };
        let child = Shared::try_new(child).unwrap();
        self.world.forks.fetch_add(1, Ordering::Relaxed);
        let mut theirs: Vec<Plot> = plots.iter().map(Plot::fork).collect();
        for _ in 0..self.random.below(4) {
            cpu.switch_to(&child);
            for plot in &theirs {
                self.check_all(cpu, plot);
            }
            for _ in 0..20 {
                self.step(cpu, &child, &mut theirs);
            }
            if depth > 0 && self.random.one_in(3) {
                self.fork(cpu, &child, &mut theirs, depth - 1);
            }
            cpu.switch_to(space);
            for _ in 0..20 {
                self.step(cpu, space, plots);
            }
            for plot in plots.iter() {
                self.check_all(cpu, plot);
            }
        }
        cpu.switch_to(space);
    }

    fn step(&mut self, cpu: &mut Cpu, space: &Space, plots: &mut [Plot]) {
        let index = self.random.below(plots.len() as u64) as usize;
        let plot = &mut plots[index];
        match self.random.below(20) {
            0..6 => self.store(cpu, plot),
            6..8 => self.store_stamp(cpu, plot),
            8..14 => self.load(cpu, plot),
            14..17 => self.change_layout(cpu, space, plot),
            17 => self.look_elsewhere(cpu),
            18 => self.add(cpu),
            _ if self.random.one_in(20) => {
                let mappings = space.mappings(cpu.core()).unwrap();
                assert!(mappings.windows(2).all(|pair| pair[0].range.end <= pair[1].range.start));
            }
            _ => {}
        }
        self.world.operations.fetch_add(1, Ordering::Relaxed);
    }
}

impl std::fmt::Debug for Plot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} plot {} [", self.kind, self.number)?;
        for prot in &self.prot {
            let letter = match prot {
                None => '.',
                Some(prot) if prot.is_empty() => '0',
                Some(prot) if prot.contains(Prot::WRITE) => 'w',
                Some(prot) if prot.contains(Prot::EXEC) => 'x',
                Some(_) => 'r',
            };
            write!(f, "{letter}")?;
        }
        f.write_str("]")
    }
}

/// Plots of all kinds, or of the private ones, for one thread: everything mapped, nothing stored.
fn plots_of(world: &World, thread: usize, shared_too: bool) -> Vec<Plot> {
    let mut plots = Vec::new();
    for kind in KINDS {
        if kind.is_shared() && !shared_too {
            continue;
        }
        for n in 0..PLOTS {
            let plot = Plot {
                kind,
                number: n * world.threads + thread,
                prot: vec![Some(RW); PLOT],
                bytes: Rc::new(RefCell::new(vec![0; PLOT * PAGE])),
            };
            plot.reset(world, 0..PLOT);
            plots.push(plot);
        }
    }
    plots
}

/// One thread on one space.
fn play(world: &World, space: &Shared<Space>, thread: usize, first: bool, seed: u64) {
    let mut cpu = world.machine.cpu().unwrap();
    cpu.switch_to(space);
    let mut plots = plots_of(world, thread, first);
    let mut player = Player { world, random: Random::new(seed), version: seed << 8 };
    while !world.stop.load(Ordering::Relaxed) {
        for _ in 0..100 {
            player.step(&mut cpu, space, &mut plots);
        }
        if player.random.one_in(8) {
            player.fork(&mut cpu, space, &mut plots, 1);
        }
        if first && thread == 0 && player.random.one_in(2) {
            player.unless_short(world.shared_file.write_back(cpu.core()));
        }
    }
    for plot in &mut plots {
        player.check_all(&mut cpu, plot);
        // Once more with everything readable: what could not be read just now is compared too.
        for page in 0..PLOT {
            let at = plot.base() + (page * PAGE) as u64;
            if plot.prot[page].is_some()
                && player.unless_short(space.protect(cpu.core(), at, PAGE_SIZE, Prot::READ)).is_some()
            {
                plot.prot[page] = Some(Prot::READ);
            }
        }
        player.check_all(&mut cpu, plot);
        if plot.kind == Kind::SharedFile {
            world.final_file.lock().unwrap().push((plot.offset() as usize, plot.bytes.borrow().clone()));
        }
    }
}

fn environment(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// Says which seed it was, if the test fails.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("TERRANE_STRESS_SEED={}", self.0);
        }
    }
}

/// Makes a machine, with plenty of memory or too little, and plays on it.
fn run(locking: Locking, membarrier: bool, shaken: bool, plenty: bool) {
    let seed = Seed(environment("TERRANE_STRESS_SEED", 1));
    let threads = environment("TERRANE_STRESS_THREADS", 3).clamp(1, 40) as usize;
    let time = Duration::from_secs_f64(
        std::env::var("TERRANE_STRESS_SECONDS").ok().and_then(|value| value.parse().ok()).unwrap_or(1.0),
    );
    let size = PLOTS * threads * PLOT * PAGE;
    let mut pattern = vec![0; size];
    Random::new(seed.0).fill(&mut pattern);
    let (private_file, shared_file) =
        (tempfile::NamedTempFile::new().unwrap(), tempfile::NamedTempFile::new().unwrap());
    std::fs::write(private_file.path(), &pattern).unwrap();
    shared_file.as_file().set_len(size as u64).unwrap();
    // What the plots of the two spaces take, and little more.
    let short = 5 * size as u64;
    let config = MachineConfig {
        memory: if plenty { 512 << 20 } else { short },
        cpus: 2 * threads + 1,
        huge_pages: true,
        membarrier,
        shaken,
    };
    let machine = HostedMachine::new(config).unwrap();
    let mut cpu = machine.cpu().unwrap();
    cpu.core().quiesce();
    let usage_before = machine.machine().usage();
    let world = World {
        private_file: machine.open(private_file.path(), false).unwrap(),
        shared_file: machine.open(shared_file.path(), true).unwrap(),
        shared_memory: terrane::object::Object::shared_memory(machine.machine(), size as u64).unwrap(),
        pattern,
        threads,
        short: !plenty,
        shortages: AtomicU64::new(0),
        stop: AtomicBool::new(false),
        operations: AtomicU64::new(0),
        forks: AtomicU64::new(0),
        additions: AtomicU64::new(0),
        final_file: Mutex::new(Vec::new()),
        machine: machine.clone(),
    };
    {
        let first = space(&cpu, locking);
        cpu.switch_to(&first);
        for thread in 0..threads {
            for plot in plots_of(&world, thread, true) {
                first.map(cpu.core(), plot.request(&world, 0..PLOT, RW)).unwrap();
            }
        }
        let counters = MapRequest::shared_anonymous(PAGE_SIZE, RW).fixed(COUNTERS);
        first.map(cpu.core(), counters).unwrap();
        let second = Shared::try_new(first.fork(cpu.core()).unwrap()).unwrap();
        let seed = seed.0;
        thread::scope(|scope| {
            let world = &world;
            for thread in 0..threads {
                for (n, space) in [&first, &second].into_iter().enumerate() {
                    let name = format!("space {n} thread {thread}");
                    let seed = seed * 1000 + (2 * thread + n) as u64;
                    thread::Builder::new()
                        .name(name)
                        .spawn_scoped(scope, move || {
                            // Whoever fails stops the others.
                            let stop = StopAll(&world.stop);
                            play(world, space, thread, n == 0, seed);
                            drop(stop);
                        })
                        .unwrap();
                }
            }
            let end = Instant::now() + time;
            while Instant::now() < end && !world.stop.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(5));
            }
            world.stop.store(true, Ordering::Relaxed);
        });
        let sum: u64 = (0..4).map(|n| cpu.load_u64(COUNTERS + 8 * n).unwrap()).sum();
        assert_eq!(sum, world.additions.load(Ordering::Relaxed), "an addition was lost");
        cpu.switch_off();
        drop((first, second));
        world.shared_file.write_back(cpu.core()).unwrap();
        let on_disk = std::fs::read(shared_file.path()).unwrap();
        for (offset, bytes) in world.final_file.lock().unwrap().iter() {
            let differs = bytes.iter().zip(&on_disk[*offset..]).position(|(a, b)| a != b);
            assert!(differs.is_none(), "the file differs at {:#x}", offset + differs.unwrap_or(0));
        }
    }
    let stats = machine.machine().stats().snapshot();
    println!(
        "{locking:?}: {} operations, {} forks, {} faults, {} of them speculative, {} copies, {} remote flushes, {} shortages",
        world.operations.load(Ordering::Relaxed),
        world.forks.load(Ordering::Relaxed),
        stats.get(Counter::PgFault),
        stats.get(Counter::SpeculativePgFault),
        stats.get(Counter::PgCow),
        stats.get(Counter::TlbRemoteFlush),
        world.shortages.load(Ordering::Relaxed),
    );
    drop(world);
    cpu.core().quiesce();
    let usage = machine.machine().usage();
    assert_eq!(usage.vmas, 0, "records are left: {usage:?}");
    assert_eq!(usage.frames_free, usage_before.frames_free, "frames are lost: {usage:?}");
}

/// Stops everyone when its thread panics.
struct StopAll<'a>(&'a AtomicBool);

impl Drop for StopAll<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

#[test]
fn speculative() {
    run(Locking::Speculative, true, false, true);
}

#[test]
fn classic() {
    run(Locking::Classic, true, false, true);
}

#[test]
fn speculative_and_shaken() {
    run(Locking::Speculative, true, true, true);
}

#[test]
fn speculative_without_membarrier() {
    run(Locking::Speculative, false, false, true);
}

#[test]
fn speculative_with_little_memory() {
    run(Locking::Speculative, true, false, false);
}
