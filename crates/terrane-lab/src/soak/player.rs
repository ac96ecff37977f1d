//! One thread: what it does to its plots, and how each result is compared with what it knows.

use super::content::{CELL, CELLS, Cell, Generation, is_possible};
use super::log::{Log, Note};
use super::plot::{Kind, PAGE, Page, Plot, READ_WRITE};
use super::world::{COUNTERS, Count, HEAP_PAGES, Plant, Trouble, World};
use crate::measure::random::Random;
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use terrane::space::MapRequest;
use terrane::sync::Shared;
use terrane::vma::{Access, Advice, MapFlags, Prot};
use terrane::{Error, FaultError, PAGE_SIZE};
use terrane_hosted::{AtomicError, Cpu, Interrupted, Space};

/// What a thread has in a space.
pub struct Scene {
    /// The space.
    pub space: Shared<Space>,
    /// Its number in the log.
    pub number: usize,
    /// The thread's plots there.
    pub plots: Vec<Plot>,
    /// What the thread's words in each hot page hold, where there are such.
    pub hot: Vec<[u64; 2]>,
    /// What it has last overwritten its own page with.
    pub own: Generation,
}

impl Scene {
    /// The same in `child`, which was forked from the space while the thread did nothing else.
    pub fn fork(&self, child: Shared<Space>, number: usize) -> Self {
        Self {
            space: child,
            number,
            plots: self.plots.iter().map(Plot::fork).collect(),
            hot: self.hot.clone(),
            own: self.own,
        }
    }
}

/// One thread.
pub struct Player<'w> {
    /// What all threads use.
    pub world: &'w World,
    /// Its number.
    pub thread: usize,
    /// Its random numbers.
    pub random: Random,
    /// What it did last.
    pub log: Arc<Mutex<Log>>,
    /// Stores so far.
    pub(super) stores: u32,
}

/// Pages of a huge page.
const HUGE: usize = 512;

impl<'w> Player<'w> {
    /// Thread `thread`, with random numbers from `seed`.
    pub fn new(world: &'w World, thread: usize, seed: u64, log: Arc<Mutex<Log>>) -> Self {
        Self { world, thread, random: Random::new(seed), log, stores: 0 }
    }

    /// A random number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        ((self.random.next() >> 32) as usize * n) >> 32
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// Says what is done next.
    pub fn note(&self, what: &'static str, space: usize, start: u64, len: u64, how: &'static str) {
        self.log.lock().note(Note { what, space, start, len, how });
    }

    /// What a call gave; `None` when memory is short, and that may be.
    pub fn unless_short<T>(
        &self,
        what: &str,
        plot: &dyn std::fmt::Display,
        result: Result<T, Error>,
    ) -> Result<Option<T>, Trouble> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(Error::NoMemory | Error::Again) if self.world.short => {
                self.world.count(Count::Shortage);
                Ok(None)
            }
            Err(error) => Err(Trouble(format!("{what} failed with {} for {plot}", error.name()))),
        }
    }

    /// True for a fault that failed because memory is short, if that may be.
    pub(super) fn is_shortage(&self, error: FaultError) -> bool {
        let shortage = self.world.short && error == FaultError::OutOfMemory;
        if shortage {
            self.world.count(Count::Shortage);
        }
        shortage
    }

    /// Does one thing.
    pub fn step(&mut self, cpu: &mut Cpu, scene: &mut Scene) -> Result<(), Trouble> {
        // In the space that all threads share, some of it is done to what they share.
        if !scene.hot.is_empty() && self.one_in(6) {
            return self.pump(cpu, scene);
        }
        if scene.number == 0 && self.one_in(5) {
            return self.contest(cpu, scene);
        }
        let index = self.below(scene.plots.len());
        match self.below(100) {
            0..30 => self.store(cpu, scene, index),
            30..38 => self.store_words(cpu, scene, index),
            38..66 => {
                let plot = &scene.plots[index];
                let from = self.below(plot.pages.len() * PAGE);
                let most = if self.one_in(4) { 5 * PAGE } else { 60 };
                let len = 1 + self.below((plot.pages.len() * PAGE - from).min(most));
                self.check(cpu, scene.number, &scene.plots[index], from, len)
            }
            66..84 => self.change(cpu, scene, index),
            84..88 => self.look_elsewhere(cpu, scene),
            88..91 => self.add(cpu, scene),
            91..93 => self.float(cpu, scene),
            93..95 => self.fetch(cpu, scene, index),
            95..97 => self.sync(cpu, scene, index),
            97 => self.list(cpu, scene),
            98 if self.one_in(4) => {
                // What a host does in the background.
                self.note("collapse", scene.number, 0, 0, "a few tables");
                let budget = 1 + self.below(8);
                scene.space.collapse_step(cpu.core(), budget);
                Ok(())
            }
            _ => self.advise_attributes(cpu, scene, index),
        }
    }

    /// Stores whole cells.
    fn store(&mut self, cpu: &mut Cpu, scene: &mut Scene, index: usize) -> Result<(), Trouble> {
        self.world.count(Count::Store);
        let plot = &scene.plots[index];
        let all = plot.pages.len() * CELLS;
        let first = self.below(all);
        let most = if self.one_in(4) { 4 * CELLS } else { 3 };
        let cells = 1 + self.below((all - first).min(most));
        let new = Cell::whole(self.generation());
        let mut bytes = vec![0; cells * CELL];
        for (n, bytes) in bytes.chunks_exact_mut(CELL).enumerate() {
            new.fill(bytes, plot.start + ((first + n) * CELL) as u64, super::content::Base::Zeros);
        }
        let from = first * CELL;
        let at = plot.start + from as u64;
        self.note("store", scene.number, at, bytes.len() as u64, "");
        let expected = plot.expect(from, bytes.len(), Access::Write);
        let done = self.done(cpu.write_bytes(at, &bytes), expected, bytes.len(), plot)?;
        // Pages are stored to one after the other, so a transfer that ends early ends between cells.
        (0..done / CELL).for_each(|n| plot.set_cell(first + n, new));
        self.plant(cpu, plot, first, done)
    }

    /// Stores some words of a cell, one by one.
    fn store_words(&mut self, cpu: &mut Cpu, scene: &mut Scene, index: usize) -> Result<(), Trouble> {
        self.world.count(Count::Store);
        let plot = &scene.plots[index];
        let cell = self.below(plot.pages.len() * CELLS);
        let old = plot.cell(cell);
        if !old.is_whole() {
            // Stored to in part once more, it would be in three.
            return Ok(());
        }
        let words = 1 + self.below(CELL / 8);
        let generation = self.generation();
        let at = plot.start + (cell * CELL) as u64;
        let mut bytes = [0; CELL];
        Cell::whole(generation).fill(&mut bytes, at, super::content::Base::Zeros);
        self.note("store words", scene.number, at, 8 * words as u64, "");
        let expected = plot.verdict(cell / CELLS, Access::Write);
        for (n, word) in bytes.chunks_exact(8).take(words).enumerate() {
            let value =
                u64::from_ne_bytes([word[0], word[1], word[2], word[3], word[4], word[5], word[6], word[7]]);
            match cpu.store_u64(at + 8 * n as u64, value) {
                Err(error) if self.is_shortage(error) => return Ok(()),
                result if result != expected => {
                    return Err(Trouble(format!(
                        "a store to {at:#x} ended in {result:?}, not {expected:?}, in {plot}"
                    )));
                }
                Err(_) => return Ok(()),
                Ok(()) => plot.set_cell(cell, old.overwritten(generation, 8 * (n + 1))),
            }
        }
        Ok(())
    }

    /// Compares what a transfer ended in with what it should have; returns how many bytes were transferred.
    fn done(
        &self,
        result: Result<(), Interrupted>,
        expected: Result<(), Interrupted>,
        len: usize,
        plot: &Plot,
    ) -> Result<usize, Trouble> {
        let done =
            |result: Result<(), Interrupted>| result.map_or_else(|interrupted| interrupted.done, |()| len);
        let short = result.is_err_and(|interrupted| self.is_shortage(interrupted.error));
        if result != expected && !(short && done(result) <= done(expected)) {
            return Err(Trouble(format!("a transfer ended in {result:?}, not {expected:?}, in {plot}")));
        }
        Ok(done(result))
    }

    /// Reads bytes and compares every one.
    pub fn check(
        &self,
        cpu: &mut Cpu,
        space: usize,
        plot: &Plot,
        from: usize,
        len: usize,
    ) -> Result<(), Trouble> {
        self.world.count(Count::Load);
        let at = plot.start + from as u64;
        self.note("load", space, at, len as u64, "");
        let mut read = vec![0x5a; len];
        let expected = plot.expect(from, len, Access::Read);
        let done = self.done(cpu.read_bytes(at, &mut read), expected, len, plot)?;
        self.compare(plot, from, &read[..done], "memory")
    }

    /// Compares bytes found at byte `from` of a plot with what must be there.
    pub fn compare(&self, plot: &Plot, from: usize, found: &[u8], where_: &str) -> Result<(), Trouble> {
        let mut right = vec![0; found.len()];
        plot.fill(from, &mut right);
        let Some(n) = (0..found.len()).find(|&n| found[n] != right[n]) else { return Ok(()) };
        let many = (0..found.len()).filter(|&n| found[n] != right[n]).count();
        Err(Trouble(format!(
            "at {:#x} there is {:#04x} in {where_}, not {:#04x}, and so {many} of {} bytes from {:#x} on: {}, in \
             {plot}",
            plot.start + (from + n) as u64,
            found[n],
            right[n],
            found.len(),
            plot.start + from as u64,
            plot.cell((from + n) / CELL),
        )))
    }

    /// Reads all that can be read, and a little of what cannot, of one plot in `of`.
    pub fn check_some(&mut self, cpu: &mut Cpu, scene: &Scene, of: usize) -> Result<(), Trouble> {
        for plot in &scene.plots {
            if !self.one_in(of) {
                continue;
            }
            for page in 0..plot.pages.len() {
                if plot.verdict(page, Access::Read).is_ok() || self.one_in(8) {
                    self.check(cpu, scene.number, plot, page * PAGE, PAGE)?;
                }
            }
        }
        Ok(())
    }

    /// Some pages of a plot.
    fn pages(&mut self, plot: &Plot) -> Range<usize> {
        let start = self.below(plot.pages.len());
        let left = plot.pages.len() - start;
        let most = if self.one_in(3) { left } else { left.min(4) };
        start..start + 1 + self.below(most)
    }

    /// Mostly protections that can be used: what fails has nothing to compare.
    pub(super) fn prot(&mut self) -> (Prot, &'static str) {
        match self.below(12) {
            0 => (Prot::empty(), "to nothing"),
            1 | 2 => (Prot::READ, "to read"),
            3 => (Prot::READ | Prot::EXEC, "to execute"),
            _ => (READ_WRITE, "to write"),
        }
    }

    /// Maps, unmaps, protects, populates or forgets pages.
    fn change(&mut self, cpu: &mut Cpu, scene: &mut Scene, index: usize) -> Result<(), Trouble> {
        self.world.count(Count::Change);
        let (space, number) = (&scene.space, scene.number);
        let plot = &mut scene.plots[index];
        let pages = self.pages(plot);
        let range = plot.range(&pages);
        let (prot, words) = self.prot();
        let whole = plot.is_whole(&pages);
        // What the heap maps, and what the space places, comes and goes as a whole.
        let fixed = !matches!(plot.kind, Kind::Heap | Kind::Float);
        let say = |me: &Self, what, how| me.note(what, number, range.start, range.len(), how);
        match self.below(16) {
            0 | 1 if fixed => {
                say(self, "unmap", "");
                let result = space.unmap(cpu.core(), range.start, range.len());
                if self.unless_short("unmap", plot, result)?.is_some() {
                    plot.pages[pages.clone()].fill(Page::HOLE);
                    plot.reset(pages);
                }
            }
            2..5 if fixed => {
                let mut request = plot.request(self.world, &pages, prot);
                let populate = self.one_in(3);
                if populate {
                    request = request.with(MapFlags::POPULATE);
                }
                let replace = self.one_in(2);
                if !replace {
                    request.flags.remove(MapFlags::FIXED);
                    request.flags.insert(MapFlags::FIXED_NOREPLACE);
                }
                say(self, if replace { "map" } else { "map in free space" }, words);
                let result = space.map(cpu.core(), request);
                if !replace && plot.pages[pages.clone()].iter().any(|page| page.prot.is_some()) {
                    if result != Err(Error::Exists) {
                        return Err(Trouble(format!("a mapping over {plot} gave {result:?}")));
                    }
                    return Ok(());
                }
                match self.unless_short("map", plot, result)? {
                    Some(at) if at != range.start => {
                        return Err(Trouble(format!("mapped at {at:#x} instead of {:#x}", range.start)));
                    }
                    Some(_) => {
                        plot.pages[pages.clone()].fill(Page::mapped(prot));
                        plot.reset(pages);
                    }
                    None => {}
                }
            }
            5..8 if whole => {
                say(self, "protect", words);
                let result = space.protect(cpu.core(), range.start, range.len(), prot);
                if self.unless_short("protect", plot, result)?.is_some() {
                    plot.pages[pages].iter_mut().for_each(|page| page.prot = Some(prot));
                }
            }
            8..11 if whole => {
                say(self, "forget", "");
                let result = space.advise(cpu.core(), range.start, range.len(), Advice::DontNeed);
                if self.unless_short("forgetting", plot, result)?.is_some() {
                    plot.reset(pages);
                }
            }
            11..14 if whole => {
                let (advice, access, words) = if self.one_in(2) {
                    (Advice::PopulateRead, Access::Read, "to read")
                } else {
                    (Advice::PopulateWrite, Access::Write, "to write")
                };
                let possible = pages.clone().all(|page| plot.verdict(page, access).is_ok());
                self.note("populate", number, range.start, range.len(), words);
                let result = space.advise(cpu.core(), range.start, range.len(), advice);
                let short = self.world.short && matches!(result, Err(Error::NoMemory | Error::Again));
                if !short && result.is_ok() != possible {
                    return Err(Trouble(format!("{advice:?} gave {result:?} for {plot}")));
                }
            }
            _ if plot.kind == Kind::Heap => self.brk(cpu, scene, index)?,
            _ => {}
        }
        Ok(())
    }

    /// Moves the end of the heap.
    fn brk(&mut self, cpu: &mut Cpu, scene: &mut Scene, index: usize) -> Result<(), Trouble> {
        let plot = &mut scene.plots[index];
        let bytes = self.below(HEAP_PAGES * PAGE);
        let end = plot.start + bytes as u64;
        self.note("move the break", scene.number, plot.start, bytes as u64, "");
        let before = scene.space.heap().end;
        let now = scene.space.brk(cpu.core(), end);
        if now != end {
            if self.world.short && now == before {
                self.world.count(Count::Shortage);
                return Ok(());
            }
            return Err(Trouble(format!("the break is at {now:#x}, not {end:#x}, for {plot}")));
        }
        let pages = bytes.div_ceil(PAGE);
        for page in 0..HEAP_PAGES {
            if page >= pages {
                plot.pages[page] = Page::HOLE;
                plot.reset(page..page + 1);
            } else if plot.pages[page].prot.is_none() {
                plot.pages[page] = Page::mapped(READ_WRITE);
            }
        }
        Ok(())
    }

    /// Advice that changes no page, but splits and merges mappings, and what a fork does with them.
    fn advise_attributes(&mut self, cpu: &mut Cpu, scene: &mut Scene, index: usize) -> Result<(), Trouble> {
        self.world.count(Count::Change);
        let plot = &mut scene.plots[index];
        let pages = self.pages(plot);
        if !plot.is_whole(&pages) {
            return Ok(());
        }
        let range = plot.range(&pages);
        let own = !matches!(plot.kind, Kind::PrivateFile | Kind::Shared | Kind::SharedFile);
        // Page by page: what it does in the model.
        type Effect = fn(&mut Page);
        let nothing: Effect = |_| {};
        let choices: [(Advice, &str, Effect); 9] = [
            (Advice::DontFork, "not to be forked", |page| page.dont_fork = true),
            (Advice::DoFork, "to be forked", |page| page.dont_fork = false),
            (Advice::WipeOnFork, "to be wiped", |page| page.wipe = true),
            (Advice::KeepOnFork, "to be kept", |page| page.wipe = false),
            (Advice::Random, "random", nothing),
            (Advice::Sequential, "sequential", nothing),
            (Advice::Normal, "normal", nothing),
            (Advice::DontDump, "not to be dumped", nothing),
            (Advice::WillNeed, "needed soon", nothing),
        ];
        let extra = super::world::HUGE_ADVICE;
        let choice = self.below(choices.len() + extra.len());
        let (advice, words, effect) = match choices.get(choice) {
            Some(&choice) => choice,
            None => {
                let (advice, words) = extra[choice - choices.len()];
                (advice, words, nothing)
            }
        };
        // Where a child has a hole, something else could come to lie: between fixed addresses nothing does.
        let stays = matches!(plot.kind, Kind::Heap | Kind::Float);
        if advice == Advice::WipeOnFork && !own || advice == Advice::DontFork && stays {
            return Ok(());
        }
        self.note("advise", scene.number, range.start, range.len(), words);
        let result = scene.space.advise(cpu.core(), range.start, range.len(), advice);
        if choice >= choices.len() && matches!(result, Err(Error::Invalid | Error::Again | Error::NoMemory)) {
            // Not for this mapping, or not now.
            return Ok(());
        }
        if self.unless_short("advice", plot, result)?.is_some() {
            plot.pages[pages].iter_mut().for_each(effect);
        }
        Ok(())
    }

    /// Looks at a page of anybody's.
    fn look_elsewhere(&mut self, cpu: &mut Cpu, scene: &Scene) -> Result<(), Trouble> {
        self.world.count(Count::Load);
        let kind = Kind::FIXED[self.below(Kind::FIXED.len())];
        let foreign = Plot::fixed(kind, self.below(kind.plots() * self.world.threads));
        let from = self.below(foreign.pages.len() * PAGE) / 8 * 8;
        let at = foreign.start + from as u64;
        self.note("look elsewhere", scene.number, at, 8, "");
        match cpu.load_u64(at) {
            Err(FaultError::NotMapped | FaultError::NotAllowed) => Ok(()),
            Err(error) if self.is_shortage(error) => Ok(()),
            Err(error) => Err(Trouble(format!("{error} at {at:#x}"))),
            Ok(value) if is_possible(value, at, foreign.base(from)) => Ok(()),
            Ok(value) => Err(Trouble(format!("at {at:#x} there is a foreign word: {value:#018x}"))),
        }
    }

    /// Adds to a counter in shared memory, which all spaces have.
    fn add(&mut self, cpu: &mut Cpu, scene: &Scene) -> Result<(), Trouble> {
        self.world.count(Count::Atomic);
        let value = self.below(100) as u64;
        let at = COUNTERS + 8 * self.below(4) as u64;
        self.note("add", scene.number, at, 8, "");
        match cpu.fetch_add_u64(at, value) {
            Ok(_) => {
                self.world.additions.fetch_add(value, Ordering::Relaxed);
                Ok(())
            }
            Err(AtomicError::Fault(error)) if self.is_shortage(error) => Ok(()),
            Err(error) => Err(Trouble(format!("an addition at {at:#x} failed: {error}"))),
        }
    }

    /// Maps a few pages anywhere, or unmaps some of those.
    fn float(&mut self, cpu: &mut Cpu, scene: &mut Scene) -> Result<(), Trouble> {
        self.world.count(Count::Change);
        let floats = scene.plots.iter().filter(|plot| plot.kind == Kind::Float).count();
        if floats < 4 && self.one_in(2) {
            // Now and then what a huge page fits into, once in a space.
            let large = scene.plots.iter().all(|plot| plot.pages.len() < HUGE) && self.one_in(8);
            let pages = if large { HUGE + self.below(64) } else { 1 + self.below(20) };
            let len = (pages * PAGE) as u64;
            self.note("map anywhere", scene.number, 0, len, "");
            let mut request = MapRequest::anonymous(len, READ_WRITE);
            request.align = if large { (HUGE * PAGE) as u64 } else { PAGE_SIZE };
            let result = scene.space.map(cpu.core(), request);
            let Some(start) = self.unless_short("map anywhere", &"a new mapping", result)? else {
                return Ok(());
            };
            let mut plot = Plot::new(Kind::Float, 0, start, pages);
            plot.pages.fill(Page::mapped(READ_WRITE));
            let range = plot.range(&(0..pages));
            let taken = scene.plots.iter().find(|other| {
                let mapped = |page: &usize| other.pages[*page].prot.is_some();
                (0..other.pages.len())
                    .filter(mapped)
                    .any(|page| !other.range(&(page..page + 1)).intersection(range).is_empty())
            });
            if let Some(other) = taken {
                return Err(Trouble(format!("{range:?} was given out, which is in use by {other}")));
            }
            scene.plots.push(plot);
            return Ok(());
        }
        let Some(index) = scene.plots.iter().position(|plot| plot.kind == Kind::Float) else { return Ok(()) };
        let plot = &scene.plots[index];
        let range = plot.range(&(0..plot.pages.len()));
        self.check(cpu, scene.number, plot, 0, plot.pages.len() * PAGE)?;
        self.note("unmap", scene.number, range.start, range.len(), "what was placed");
        let result = scene.space.unmap(cpu.core(), range.start, range.len());
        if self.unless_short("unmap", plot, result)?.is_some() {
            scene.plots.remove(index);
        }
        Ok(())
    }

    /// Fetches an instruction.
    fn fetch(&mut self, cpu: &mut Cpu, scene: &Scene, index: usize) -> Result<(), Trouble> {
        self.world.count(Count::Load);
        let plot = &scene.plots[index];
        let page = self.below(plot.pages.len());
        self.note("fetch", scene.number, plot.address(page), 1, "");
        let (result, expected) = (cpu.execute(plot.address(page)), plot.verdict(page, Access::Execute));
        if result == expected || result.is_err_and(|error| self.is_shortage(error)) {
            return Ok(());
        }
        Err(Trouble(format!("fetching from page {page} gave {result:?}, not {expected:?}, for {plot}")))
    }

    /// Writes pages of a file back, and compares the file.
    fn sync(&mut self, cpu: &mut Cpu, scene: &Scene, index: usize) -> Result<(), Trouble> {
        let plot = &scene.plots[index];
        if plot.kind != Kind::SharedFile {
            return Ok(());
        }
        self.world.count(Count::Sync);
        let pages = self.pages(plot);
        let range = plot.range(&pages);
        self.note("sync", scene.number, range.start, range.len(), "");
        let result = if self.one_in(2) && plot.is_whole(&pages) {
            scene.space.sync(cpu.core(), range.start, range.len())
        } else {
            let first = (plot.offset() / PAGE_SIZE) as usize;
            let pages = (first + pages.start) as u64..(first + pages.end) as u64;
            self.world.shared_file.write_back_pages(cpu.core(), pages)
        };
        if self.unless_short("writing back", plot, result)?.is_none() {
            return Ok(());
        }
        self.compare_file(plot, pages)
    }

    /// Compares pages of the real file.
    pub fn compare_file(&self, plot: &Plot, pages: Range<usize>) -> Result<(), Trouble> {
        let from = pages.start * PAGE;
        let found = self.world.read_file(plot.offset() + from as u64, pages.len() * PAGE)?;
        self.compare(plot, from, &found, "the file")
    }

    /// Lists the mappings: those of the thread's own plots are as it has left them, whatever others do.
    fn list(&mut self, cpu: &mut Cpu, scene: &Scene) -> Result<(), Trouble> {
        self.world.count(Count::List);
        self.note("list", scene.number, 0, 0, "");
        let result = scene.space.mappings(cpu.core());
        let Some(list) = self.unless_short("listing", &"the space", result)? else { return Ok(()) };
        if let Some(pair) = list.windows(2).find(|pair| pair[0].range.end > pair[1].range.start) {
            return Err(Trouble(format!("a listing has {} before {}", pair[0], pair[1])));
        }
        for plot in &scene.plots {
            for page in 0..plot.pages.len() {
                let at = plot.address(page);
                let after = list.partition_point(|mapping| mapping.range.end <= at);
                let found = list.get(after).filter(|mapping| mapping.range.contains(at));
                if found.map(|mapping| mapping.prot) != plot.pages[page].prot {
                    return Err(Trouble(format!(
                        "a listing has {} for page {page} of {plot}",
                        found.map_or("nothing".to_owned(), ToString::to_string)
                    )));
                }
            }
        }
        Ok(())
    }

    /// Reads everything for the last time, having made it readable.
    pub fn check_finally(&mut self, cpu: &mut Cpu, scene: &mut Scene) -> Result<(), Trouble> {
        self.check_some(cpu, scene, 1)?;
        let space = &scene.space;
        for plot in &mut scene.plots {
            let mut page = 0;
            while page < plot.pages.len() {
                let mapped = plot.pages[page..].iter().take_while(|page| page.prot.is_some()).count();
                let pages = page..page + mapped;
                page = pages.end + 1;
                if mapped == 0 {
                    continue;
                }
                let range = plot.range(&pages);
                self.note("protect", scene.number, range.start, range.len(), "to read, for the last time");
                let result = space.protect(cpu.core(), range.start, range.len(), Prot::READ);
                if self.unless_short("protect", plot, result)?.is_some() {
                    plot.pages[pages.clone()].iter_mut().for_each(|page| page.prot = Some(Prot::READ));
                }
                for page in pages {
                    if plot.verdict(page, Access::Read).is_err() {
                        continue;
                    }
                    // Where memory is short, what is not there cannot be looked at; what is there needs none.
                    self.check(cpu, scene.number, plot, page * PAGE, PAGE)?;
                }
            }
        }
        Ok(())
    }

    /// For the check of the checks: does damage now and then, if that was asked for. `done` bytes of cells from `first` on have just
    /// been stored.
    fn plant(&mut self, cpu: &mut Cpu, plot: &Plot, first: usize, done: usize) -> Result<(), Trouble> {
        let now = self.world.plant == Some(Plant::Byte) && self.thread == 0 && done > 0;
        if !now || !self.one_in(50) {
            return Ok(());
        }
        let at = plot.start + (first * CELL) as u64;
        let damaged = cpu.load_u8(at).and_then(|byte| cpu.store_u8(at, byte ^ 1));
        damaged.map_err(|e| Trouble(format!("cannot do the damage asked for: {e}")))
    }
}
