//! Readers and writers whose memory is a quarter of what they use, with a swap device that fails now and then.
//!
//! There are three runs of pages: private memory, shared memory, and a file, which all threads map. Each page belongs to one thread, the
//! next to the next: they share mappings, page tables and lines of metadata. Its owner alone stores to it, always all of it, and knows
//! therefore each byte; the others look at words, each of which tells whose it is and how old, and none of which may become older again.
//! Beside that threads advise reclaim, lock pages in memory for a moment, move memory of their own from place to place, fork and look
//! at what the child has, and touch memory that a handler of user faults supplies; a reclaimer works in the background.
//!
//! Writing to swap fails once in 16 times, reading once in 64. An access that cannot have its page is told so, and has changed nothing; when
//! the device works again, at the end, every byte of every page is compared, and so is the file.

use super::world::{COUNTS, Count, Ended, Failed, Outcome, Plant, Terms, Trouble, broken};
use crate::measure::random::Random;
use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use terrane::addr::AddrRange;
use terrane::host::IoError;
use terrane::object::Object;
use terrane::space::MapRequest;
use terrane::swap::SwapDevice;
use terrane::sync::Shared;
use terrane::vma::{Advice, Prot, RemapFlags};
use terrane::{Error, FaultError, PAGE_SIZE};
use terrane_hosted::{
    Cpu, HostFile, HostedMachine, MachineConfig, Pager, PagerConfig, Paging, Reclaimer, ReclaimerConfig,
    Space, SwapFile,
};

const PAGE: usize = PAGE_SIZE as usize;
const WORDS: usize = PAGE / 8;
const RW: Prot = Prot::READ.union(Prot::WRITE);
/// Bytes of the machine, unless others are asked for.
const MEMORY: u64 = 4 << 20;
/// Where the runs are: private memory, shared memory, a file.
const RUNS: [u64; 3] = [0x1_0000_0000, 0x2_0000_0000, 0x3_0000_0000];
/// Where the memory of threads is that moves, two places each.
const MOVING: u64 = 0x4_0000_0000;
/// Pages of it, for each thread.
const MOVED: u64 = 16;
/// From one place to the next.
const APART: u64 = 1 << 24;
/// Where the memory is that a handler supplies.
const SUPPLIED: u64 = 0x5_0000_0000;
/// Pages of it.
const SUPPLIED_PAGES: u64 = 128;
/// Without progress for so long, a thread hangs.
const HANGS: Duration = Duration::from_secs(60);

/// The word at `index` of the page called `page`, stored `times` times. 0 times: zeros.
fn word(page: u64, times: u32, index: usize) -> u64 {
    if times == 0 { 0 } else { (page + 1) << 40 | u64::from(times & 0xfff_ffff) << 9 | index as u64 }
}

fn fill(bytes: &mut [u8], page: u64, times: u32) {
    for (index, bytes) in bytes.chunks_exact_mut(8).enumerate() {
        bytes.copy_from_slice(&word(page, times, index).to_ne_bytes());
    }
}

/// A device that fails now and then, as long as it is to.
struct Unreliable {
    file: SwapFile,
    works: Arc<AtomicBool>,
    turn: AtomicU64,
    seed: u64,
}

impl Unreliable {
    fn fails(&self, once_in: u64) -> bool {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        !self.works.load(Ordering::Relaxed)
            && Random::new(self.seed ^ turn.wrapping_mul(0x9e37_79b9)).next() >> 20 & (once_in - 1) == 0
    }
}

impl SwapDevice for Unreliable {
    fn slots(&self) -> u32 {
        self.file.slots()
    }

    fn read(&self, slot: u32, page: &mut [u8]) -> Result<(), IoError> {
        if self.fails(64) {
            // Not even what has arrived is to be seen by anybody.
            page.fill(0xee);
            return Err(IoError);
        }
        self.file.read(slot, page)
    }

    fn write(&self, slot: u32, page: &[u8]) -> Result<(), IoError> {
        if self.fails(16) {
            let _ = self.file.write(slot, &[0xee; PAGE]);
            return Err(IoError);
        }
        self.file.write(slot, page)
    }
}

/// Supplies the pages that a handler is asked for.
struct Supplier;

impl Pager for Supplier {
    fn supply(&self, offset: u64, pages: &mut [u8]) -> Result<(), IoError> {
        for (n, bytes) in pages.chunks_exact_mut(PAGE).enumerate() {
            fill(bytes, offset / PAGE_SIZE + n as u64, 1);
        }
        Ok(())
    }
}

/// What all threads use.
struct World {
    machine: HostedMachine,
    space: Shared<Space>,
    threads: usize,
    /// Pages of each run.
    pages: u64,
    plant: Option<Plant>,
    stop: AtomicBool,
    counts: [AtomicU64; COUNTS.len()],
    /// Operations of each thread.
    progress: Vec<AtomicU64>,
}

impl World {
    fn count(&self, what: Count) {
        self.counts[COUNTS.iter().position(|&(count, _)| count == what).unwrap_or(0)]
            .fetch_add(1, Ordering::Relaxed);
    }

    fn counts(&self) -> [u64; COUNTS.len()] {
        std::array::from_fn(|n| self.counts[n].load(Ordering::Relaxed))
    }

    /// Where page `page` of all runs is.
    fn address(&self, page: u64) -> u64 {
        RUNS[(page / self.pages) as usize] + page % self.pages * PAGE_SIZE
    }

    /// False for errors that may be: of swap, and for want of memory.
    fn is_wrong(&self, error: FaultError) -> bool {
        let excused = matches!(error, FaultError::Io | FaultError::OutOfMemory);
        if excused {
            self.count(Count::Shortage);
        }
        !excused
    }

    /// What a call gave, if it did not fail for want of memory or swap.
    fn unless_short<T>(&self, what: &str, result: Result<T, Error>) -> Result<Option<T>, Trouble> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(Error::NoMemory | Error::Again | Error::Io) => {
                self.count(Count::Shortage);
                Ok(None)
            }
            Err(error) => Err(Trouble(format!("{what} failed with {}", error.name()))),
        }
    }
}

/// One thread, and what it knows.
struct Player<'w> {
    world: &'w World,
    thread: usize,
    random: Random,
    /// How often each of its pages was stored to: every so many-th of all.
    times: Vec<u32>,
    /// The age of the word that it looks at in each page of all runs.
    seen: Vec<u32>,
    /// The memory that moves: how often stored to, and whether it is at its second place.
    moved: Vec<u32>,
    second: bool,
    planted: bool,
}

impl Player<'_> {
    fn below(&mut self, n: u64) -> u64 {
        ((self.random.next() >> 32) * n) >> 32
    }

    /// One of its pages: which of its own, and which of all.
    fn own(&mut self) -> (usize, u64) {
        let n = self.below(self.times.len() as u64);
        (n as usize, n * self.world.threads as u64 + self.thread as u64)
    }

    /// The name of page `n` of the memory that moves, and where it is.
    fn moving(&self, n: u64) -> (u64, u64) {
        let thread = self.thread as u64;
        let name = 3 * self.world.pages + thread * MOVED + n;
        (name, self.place(self.second) + n * PAGE_SIZE)
    }

    fn place(&self, second: bool) -> u64 {
        MOVING + (2 * self.thread as u64 + u64::from(second)) * APART
    }

    fn step(&mut self, cpu: &mut Cpu) -> Result<(), Trouble> {
        match self.below(100) {
            0..35 => self.store(cpu),
            35..55 => {
                let (n, page) = self.own();
                self.check(cpu, page, self.world.address(page), self.times[n])
            }
            55..80 => self.look(cpu),
            80..86 => self.advise(cpu),
            86..91 => self.lock(cpu),
            91..94 => self.travel(cpu),
            94..99 => self.supplied(cpu),
            _ => self.fork(cpu),
        }
    }

    fn overwrite(&self, cpu: &mut Cpu, page: u64, at: u64, times: u32) -> Result<bool, Trouble> {
        self.world.count(Count::Store);
        let mut bytes = [0; PAGE];
        fill(&mut bytes, page, times);
        match cpu.write_bytes(at, &bytes) {
            Ok(()) => Ok(true),
            Err(interrupted) if interrupted.done == 0 && !self.world.is_wrong(interrupted.error) => Ok(false),
            Err(interrupted) => Err(Trouble(format!("a store to {at:#x} ended in {interrupted:?}"))),
        }
    }

    fn store(&mut self, cpu: &mut Cpu) -> Result<(), Trouble> {
        let (n, page) = self.own();
        let at = self.world.address(page);
        if self.overwrite(cpu, page, at, self.times[n] + 1)? {
            self.times[n] += 1;
            if self.world.plant == Some(Plant::Byte) && !self.planted {
                self.planted = cpu.store_u8(at + 77, 0xa5).is_ok();
            }
        }
        Ok(())
    }

    /// Compares every byte of a page.
    fn check(&self, cpu: &mut Cpu, page: u64, at: u64, times: u32) -> Result<(), Trouble> {
        self.world.count(Count::Load);
        let mut found = [0; PAGE];
        match cpu.read_bytes(at, &mut found) {
            Ok(()) => compare(&found, page, times, &format!("memory at {at:#x}")),
            Err(interrupted) if !self.world.is_wrong(interrupted.error) => Ok(()),
            Err(interrupted) => Err(Trouble(format!("a load from {at:#x} ended in {interrupted:?}"))),
        }
    }

    /// Looks at a word of any page: it belongs there, and is not older than before.
    fn look(&mut self, cpu: &mut Cpu) -> Result<(), Trouble> {
        self.world.count(Count::Load);
        let page = self.below(3 * self.world.pages);
        // Always the same one.
        let index = (page as usize * 7 + self.thread) % WORDS;
        let at = self.world.address(page) + 8 * index as u64;
        match cpu.load_u64(at) {
            Ok(found) => {
                let times = (found >> 9) as u32 & 0xfff_ffff;
                let seen = &mut self.seen[page as usize];
                if found != word(page, times, index) || times < *seen {
                    return Err(Trouble(format!(
                        "at {at:#x} there is {found:#018x}: not what belongs there, or older than {seen}, which was there before"
                    )));
                }
                *seen = times;
                Ok(())
            }
            Err(error) if !self.world.is_wrong(error) => Ok(()),
            Err(error) => Err(Trouble(format!("{error} at {at:#x}"))),
        }
    }

    /// Some pages of a run: where, and how many bytes.
    fn some(&mut self, most: u64) -> (u64, u64) {
        let run = RUNS[self.below(3) as usize];
        let first = self.below(self.world.pages);
        let len = 1 + self.below(most.min(self.world.pages - first));
        (run + first * PAGE_SIZE, len * PAGE_SIZE)
    }

    fn advise(&mut self, cpu: &mut Cpu) -> Result<(), Trouble> {
        self.world.count(Count::Change);
        let (at, len) = self.some(32);
        let advice = [Advice::PageOut, Advice::Cold, Advice::PopulateRead][self.below(3) as usize];
        match self.world.space.advise(cpu.core(), at, len, advice) {
            // What a populate says of a page that cannot be read.
            Err(Error::BadAddress) if advice == Advice::PopulateRead => Ok(()),
            // Somebody has locked some of it.
            Err(Error::Invalid) if advice != Advice::PopulateRead => Ok(()),
            result => self.world.unless_short("advising", result).map(drop),
        }
    }

    /// Locks some pages in memory, for a moment.
    fn lock(&mut self, cpu: &mut Cpu) -> Result<(), Trouble> {
        self.world.count(Count::Change);
        let (at, len) = self.some(4);
        let space = &self.world.space;
        self.world.unless_short("mlock", space.mlock(cpu.core(), at, len))?;
        self.world.unless_short("munlock", space.munlock(cpu.core(), at, len)).map(drop)
    }

    /// Stores to the memory that moves, compares it, and moves it.
    fn travel(&mut self, cpu: &mut Cpu) -> Result<(), Trouble> {
        self.world.count(Count::Change);
        for _ in 0..4 {
            let n = self.below(MOVED);
            let (name, at) = self.moving(n);
            let times = &mut self.moved[n as usize];
            *times += 1;
            let times = *times;
            if !self.overwrite(cpu, name, at, times)? {
                self.moved[n as usize] -= 1;
            }
        }
        let (from, to) = (self.place(self.second), self.place(!self.second));
        let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
        let moved = self.world.space.remap(cpu.core(), from, MOVED * PAGE_SIZE, MOVED * PAGE_SIZE, flags, to);
        self.second ^= self.world.unless_short("mremap", moved)?.is_some();
        let n = self.below(MOVED);
        let (name, at) = self.moving(n);
        self.check(cpu, name, at, self.moved[n as usize])
    }

    /// Compares a page that a handler supplies.
    fn supplied(&mut self, cpu: &mut Cpu) -> Result<(), Trouble> {
        let page = self.below(SUPPLIED_PAGES);
        self.check(cpu, page, SUPPLIED + page * PAGE_SIZE, 1)
    }

    /// Forks: the child has the thread's private pages as they are, whatever becomes of them here.
    fn fork(&mut self, cpu: &mut Cpu) -> Result<(), Trouble> {
        let Some(child) = self.world.unless_short("fork", self.world.space.fork(cpu.core()))? else {
            return Ok(());
        };
        self.world.count(Count::Fork);
        let Ok(child) = Shared::try_new(child) else { return Ok(()) };
        let before = self.times.clone();
        for _ in 0..4 {
            self.store(cpu)?;
        }
        cpu.switch_to(&child);
        for _ in 0..8 {
            let (n, page) = self.own();
            if page < self.world.pages {
                self.check(cpu, page, self.world.address(page), before[n])?;
            }
        }
        cpu.switch_to(&self.world.space);
        Ok(())
    }

    /// Compares all that the thread knows, when nothing fails any more.
    fn check_finally(&mut self, cpu: &mut Cpu) -> Result<(), Trouble> {
        let mut pages: Vec<(u64, u64, u32)> = Vec::new();
        for (n, &times) in self.times.iter().enumerate() {
            let page = n as u64 * self.world.threads as u64 + self.thread as u64;
            pages.push((page, self.world.address(page), times));
        }
        for (n, &times) in self.moved.iter().enumerate() {
            let (name, at) = self.moving(n as u64);
            pages.push((name, at, times));
        }
        for (page, at, times) in pages {
            let mut found = [0; PAGE];
            let mut tries = 0;
            while let Err(interrupted) = cpu.read_bytes(at, &mut found) {
                tries += 1;
                // All threads read at once, and each needs a frame for a moment.
                if interrupted.error != FaultError::OutOfMemory || tries > 1000 {
                    return Err(Trouble(format!("in the end a load from {at:#x} ended in {interrupted:?}")));
                }
                thread::yield_now();
            }
            compare(&found, page, times, &format!("memory at {at:#x}, in the end"))?;
        }
        Ok(())
    }
}

/// Compares all bytes of a page.
fn compare(found: &[u8; PAGE], page: u64, times: u32, where_: &str) -> Result<(), Trouble> {
    let mut right = [0; PAGE];
    fill(&mut right, page, times);
    let Some(n) = (0..PAGE).find(|&n| found[n] != right[n]) else { return Ok(()) };
    let many = (0..PAGE).filter(|&n| found[n] != right[n]).count();
    Err(Trouble(format!(
        "byte {n} of {where_} is {:#04x}, not {:#04x}, and so are {many} of the page, which was stored to {times} times",
        found[n], right[n]
    )))
}

/// Plays an episode. `tick` is called ten times a second with what was counted so far.
///
/// # Errors
/// When something is wrong, or it cannot be carried out.
pub fn episode(terms: &Terms, mut tick: impl FnMut(&[u64; COUNTS.len()])) -> Result<Outcome, Ended> {
    let memory = terms.memory.unwrap_or(MEMORY);
    let threads = terms.threads;
    // A processor for each, for the reclaimer, the handler and the end.
    let config =
        MachineConfig { memory, cpus: threads + 3, shaken: terms.shaken, ..MachineConfig::default() };
    let machine = HostedMachine::new(config).map_err(broken("cannot build a machine"))?;
    let works = Arc::new(AtomicBool::new(false));
    let file = memfd_create("swap", MemfdFlags::CLOEXEC).map_err(broken("cannot make a file for swap"))?;
    let file = SwapFile::new(file, 8 * memory).map_err(broken("cannot make a file for swap"))?;
    let device = Unreliable { file, works: works.clone(), turn: AtomicU64::new(0), seed: terms.seed };
    machine.machine().swap_on(Box::new(device)).map_err(broken("cannot swap"))?;
    let mut cpu = machine.cpu().map_err(broken("cannot have a processor"))?;
    cpu.core().quiesce();
    let before = machine.machine().usage();

    // As many for each thread.
    let pages = (4 * memory / PAGE_SIZE / 3).next_multiple_of(threads as u64);
    let len = pages * PAGE_SIZE;
    let disk = File::from(memfd_create("file", MemfdFlags::CLOEXEC).map_err(broken("cannot make a file"))?);
    disk.set_len(len).map_err(broken("cannot make a file"))?;
    let host = HostFile::new(disk.try_clone().map_err(broken("cannot make a file"))?);
    let object = Object::file(machine.machine(), host.map_err(broken("cannot open a file"))?)
        .map_err(broken("cannot open a file"))?;
    let space = Space::try_new(cpu.core(), terms.config()).map_err(broken("cannot make a space"))?;
    let space = Shared::try_new(space).map_err(broken("cannot make a space"))?;
    let mut requests = vec![
        MapRequest::anonymous(len, RW).fixed(RUNS[0]),
        MapRequest::shared_anonymous(len, RW).fixed(RUNS[1]),
        MapRequest::object(&object, 0, len, RW, true).fixed(RUNS[2]),
        MapRequest::anonymous(SUPPLIED_PAGES * PAGE_SIZE, RW).fixed(SUPPLIED),
    ];
    for thread in 0..threads as u64 {
        requests.push(MapRequest::anonymous(MOVED * PAGE_SIZE, RW).fixed(MOVING + 2 * thread * APART));
    }
    for request in requests {
        space.map(cpu.core(), request).map_err(broken("cannot map"))?;
    }
    let reclaimer = Reclaimer::start(&machine, ReclaimerConfig::for_machine(&machine));
    let reclaimer = reclaimer.map_err(broken("cannot start the reclaimer"))?;
    let supplied = AddrRange::new(SUPPLIED, SUPPLIED + SUPPLIED_PAGES * PAGE_SIZE);
    let pager = PagerConfig { threads: 1, batch: 4, background: 0 };
    let paging = Paging::start(&machine, &space, supplied, Supplier, pager);
    let paging = paging.map_err(broken("cannot start the handler"))?;

    let world = World {
        machine: machine.clone(),
        space,
        threads,
        pages,
        plant: terms.plant,
        stop: AtomicBool::new(false),
        counts: Default::default(),
        progress: (0..threads).map(|_| AtomicU64::new(0)).collect(),
    };
    let failed = Mutex::new(None);
    let times = Mutex::new(vec![0; 3 * pages as usize]);
    let checking = std::sync::Barrier::new(threads);
    thread::scope(|scope| {
        let playing: Vec<_> = (0..threads)
            .map(|thread| {
                let (world, failed, times, works, checking) = (&world, &failed, &times, &works, &checking);
                let seed = terms.seed.wrapping_mul(1000).wrapping_add(thread as u64);
                scope.spawn(move || {
                    let result =
                        catch_unwind(AssertUnwindSafe(|| play(world, thread, seed, checking, works, times)));
                    let what = match result {
                        Ok(Ok(())) => return,
                        Ok(Err(Trouble(what))) => what,
                        Err(panic) => format!("panicked: {}", super::world::words_of(&*panic)),
                    };
                    let operation = world.progress[thread].load(Ordering::Relaxed);
                    let log = String::new();
                    failed.lock().get_or_insert(Failed { thread: Some(thread), what, log, operation });
                })
            })
            .collect();
        let start = Instant::now();
        let mut seen = (0, start);
        while !playing.iter().all(thread::ScopedJoinHandle::is_finished) {
            thread::sleep(Duration::from_millis(20));
            if start.elapsed() >= terms.time || failed.lock().is_some() {
                world.stop.store(true, Ordering::Relaxed);
            }
            let counts = world.counts();
            tick(&counts);
            let all: u64 = counts.iter().sum();
            if all != seen.0 {
                seen = (all, Instant::now());
            } else if seen.1.elapsed() > HANGS {
                eprintln!("soak: with {terms}, no thread has done anything for {} seconds", HANGS.as_secs());
                std::process::exit(1);
            }
        }
    });
    drop((paging, reclaimer));
    if let Some(failed) = failed.into_inner() {
        return Err(Ended::Failed(Box::new(failed)));
    }
    let result = end(world, &mut cpu, object, &disk, &times.into_inner(), before.frames_free);
    result.map_err(|Trouble(what)| {
        Ended::Failed(Box::new(Failed { thread: None, what, log: String::new(), operation: 0 }))
    })
}

/// The whole life of a thread.
fn play(
    world: &World,
    thread: usize,
    seed: u64,
    checking: &std::sync::Barrier,
    works: &AtomicBool,
    times: &Mutex<Vec<u32>>,
) -> Result<(), Trouble> {
    let mut player = Player {
        world,
        thread,
        random: Random::new(seed),
        times: vec![0; (3 * world.pages) as usize / world.threads],
        seen: vec![0; 3 * world.pages as usize],
        moved: vec![0; MOVED as usize],
        second: false,
        planted: false,
    };
    let played = catch_unwind(AssertUnwindSafe(|| {
        let mut cpu = world.machine.cpu().map_err(|e| Trouble(format!("cannot have a processor: {e}")))?;
        cpu.switch_to(&world.space);
        while !world.stop.load(Ordering::Relaxed) {
            player.step(&mut cpu)?;
            world.progress[thread].fetch_add(1, Ordering::Relaxed);
        }
        Ok(cpu)
    }));
    world.stop.store(true, Ordering::Relaxed);
    // Also who has failed: the others would wait for ever.
    checking.wait();
    works.store(true, Ordering::Relaxed);
    checking.wait();
    let mut cpu = match played {
        Ok(result) => result?,
        Err(panic) => std::panic::resume_unwind(panic),
    };
    player.check_finally(&mut cpu)?;
    let mut all = times.lock();
    for (n, &times) in player.times.iter().enumerate() {
        all[n * world.threads + thread] = times;
    }
    Ok(())
}

/// When all threads have ended: the file, and that nothing is left.
fn end(
    world: World,
    cpu: &mut Cpu,
    object: Shared<Object<terrane_hosted::Hosted>>,
    disk: &File,
    times: &[u32],
    free: usize,
) -> Result<Outcome, Trouble> {
    let counts = world.counts();
    let World { machine, space, pages, plant, .. } = world;
    cpu.switch_off();
    drop(space);
    cpu.core().quiesce();
    object.write_back(cpu.core()).map_err(|e| Trouble(format!("cannot write the file back: {e}")))?;
    drop(object);
    if plant == Some(Plant::File) {
        let _ = disk.write_all_at(&[0xa5], 77);
    }
    for n in 0..pages {
        let mut found = [0; PAGE];
        disk.read_exact_at(&mut found, n * PAGE_SIZE)
            .map_err(|e| Trouble(format!("cannot read the file: {e}")))?;
        let page = 2 * pages + n;
        compare(&found, page, times[page as usize], &format!("page {n} of the file"))?;
    }
    let stats = machine.machine().stats().snapshot();
    cpu.core().quiesce();
    if plant == Some(Plant::Frame) {
        let pin = cpu.core().pin();
        let _ = machine.machine().ram(&pin).allocate();
    }
    let (now, in_swap) = (machine.machine().usage().frames_free, machine.machine().swap().usage().1);
    if (now, in_swap) != (free, 0) {
        return Err(Trouble(format!(
            "when all was gone, {now} frames were free, not {free}, and {in_swap} pages were in swap"
        )));
    }
    Ok(Outcome { counts, stats })
}
