//! What threads do to the same pages at the same time, and what holds all the same.
//!
//! **Hot pages** are private, written by all threads, and copied by every fork. Each thread has a pair of words in each of them, which
//! it raises one after the other, and knows at every moment: a store that is lost while another thread copies the page is
//! seen at once. In a child the words of the others stand still, and the first of a pair is at most one ahead. Each thread has a page
//! of its own beside them, which it overwrites as a whole, again and again: a store that was under way when the space was forked, and
//! lands in the child's page, is seen there.
//!
//! **Zones** are mapped, unmapped, protected, forgotten, filled in, loaded and stored to by everybody. What is found in
//! them is a word that belongs there, or what was there at first; calls may fail for holes. From time to time one thread has a zone
//! to itself, for a moment: then what the listing says of each page is what an access to it ends in. A page that a fault has
//! mapped behind an unmap or a protect, or that some processor still reaches, is found that way.

use super::content::{Base, Generation, file_word, is_possible};
use super::player::{Player, Scene};
use super::plot::{PAGE, READ_WRITE};
use super::world::{Count, HUGE_ADVICE, Trouble, World};
use std::ops::Range;
use terrane::space::MapRequest;
use terrane::vma::{Access, Advice, MapFlags, Prot};
use terrane::{Error, FaultError, PAGE_SIZE};
use terrane_hosted::{Cpu, Hosted};

/// Where the hot pages are.
const HOT: u64 = 0xa000_0000;
/// How many there are.
pub const HOT_PAGES: usize = 6;
/// Where the zones are, one beside the other.
const ZONE: u64 = 0xb000_0000;
/// How many there are: one of each kind.
pub const ZONES: usize = 4;
/// Pages of each but the last.
const ZONE_PAGES: usize = 12;
/// The last one: private memory for a huge page.
const LARGE: usize = 3;

/// Bytes of the object of a zone.
pub const ZONE_BYTES: u64 = (ZONE_PAGES * PAGE) as u64;

/// Where zone `zone` begins: beside the others, or aligned for a huge page.
fn start_of(zone: usize) -> u64 {
    if zone == LARGE { ZONE + (4 << 20) } else { ZONE + (zone * ZONE_PAGES * PAGE) as u64 }
}

/// Pages of zone `zone`.
fn pages_of(zone: usize) -> usize {
    if zone == LARGE { 512 } else { ZONE_PAGES }
}

/// What is at byte `at` of zone `zone` before anybody writes. The second maps a file.
fn base_of(zone: usize, at: u64) -> Base {
    if zone == 1 { Base::File(at) } else { Base::Zeros }
}

/// The page that `thread` overwrites.
fn own_page(thread: usize) -> u64 {
    HOT + ((HOT_PAGES + thread) * PAGE) as u64
}

/// What maps the hot pages.
pub fn hot_request(threads: usize) -> MapRequest<Hosted> {
    MapRequest::anonymous(own_page(threads) - HOT, READ_WRITE).fixed(HOT)
}

/// What maps `pages` of a zone: private memory, a private file, shared memory.
pub fn zone_request(world: &World, zone: usize, pages: Range<usize>, prot: Prot) -> MapRequest<Hosted> {
    let (offset, len) = ((pages.start * PAGE) as u64, ((pages.end - pages.start) * PAGE) as u64);
    let request = match zone {
        0 | LARGE => MapRequest::anonymous(len, prot),
        1 => MapRequest::object(&world.private_file, offset, len, prot, false),
        _ => MapRequest::object(&world.zone_memory, offset, len, prot, true),
    };
    request.fixed(start_of(zone) + offset)
}

/// What a page at `at` holds that was overwritten as a whole.
fn fill_page(bytes: &mut [u8; PAGE], at: u64, generation: Generation) {
    for (n, word) in bytes.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&generation.word(at + 8 * n as u64).to_ne_bytes());
    }
}

/// All pages of a zone.
pub fn zone_pages(zone: usize) -> Range<usize> {
    0..pages_of(zone)
}

impl Player<'_> {
    /// Where the thread's pair of words in hot page `page` is; or another thread's.
    fn pair(page: usize, thread: usize) -> u64 {
        HOT + (page * PAGE + 16 * thread) as u64
    }

    /// Raises the thread's words in hot pages.
    pub fn pump(&mut self, cpu: &mut Cpu, scene: &mut Scene) -> Result<(), Trouble> {
        self.world.count(Count::Store);
        for _ in 0..8 {
            let page = self.below(HOT_PAGES);
            let at = Self::pair(page, self.thread);
            self.note("raise", scene.number, at, 16, "");
            // First what is still to be done from the last time, when memory was short.
            let [first, second] = &mut scene.hot[page];
            let words =
                if *second < *first { vec![(at + 8, second)] } else { vec![(at, first), (at + 8, second)] };
            for (at, word) in words {
                match cpu.store_u64(at, *word + 1) {
                    Ok(()) => *word += 1,
                    Err(error) if self.is_shortage(error) => break,
                    Err(error) => return Err(Trouble(format!("{error} at {at:#x}, a hot page"))),
                }
            }
        }
        let (at, mut bytes) = (own_page(self.thread), [0; PAGE]);
        self.note("overwrite", scene.number, at, PAGE_SIZE, "");
        for _ in 0..16 {
            let generation = self.generation();
            fill_page(&mut bytes, at, generation);
            // All of a page is stored to in one access, or nothing.
            match cpu.write_bytes(at, &bytes) {
                Ok(()) => scene.own = generation,
                Err(interrupted) if self.is_shortage(interrupted.error) => {}
                Err(interrupted) => return Err(Trouble(format!("{interrupted} at {at:#x}"))),
            }
        }
        let page = self.below(HOT_PAGES);
        self.check_hot(cpu, scene, page)
    }

    /// Compares the page that the thread overwrites.
    pub fn check_own(&self, cpu: &mut Cpu, scene: &Scene) -> Result<(), Trouble> {
        let (at, mut found, mut right) = (own_page(self.thread), [0; PAGE], [0; PAGE]);
        if scene.own != Generation::NONE {
            fill_page(&mut right, at, scene.own);
        }
        match cpu.read_bytes(at, &mut found) {
            Err(interrupted) if self.is_shortage(interrupted.error) => return Ok(()),
            result => result.map_err(|e| Trouble(format!("{e} at {at:#x}")))?,
        }
        match (0..PAGE).find(|&n| found[n] != right[n]) {
            None => Ok(()),
            Some(n) => Err(Trouble(format!(
                "at {:#x}, in the page that the thread overwrites, there is {:#04x}, not {:#04x} of {:?}",
                at + n as u64,
                found[n],
                right[n],
                scene.own
            ))),
        }
    }

    /// Compares the thread's words in a hot page.
    pub fn check_hot(&self, cpu: &mut Cpu, scene: &Scene, page: usize) -> Result<(), Trouble> {
        let at = Self::pair(page, self.thread);
        for (at, right) in [at, at + 8].into_iter().zip(scene.hot[page]) {
            match cpu.load_u64(at) {
                Ok(found) if found == right => {}
                Err(error) if self.is_shortage(error) => {}
                found => {
                    return Err(Trouble(format!(
                        "at {at:#x}, a hot page, there is {found:?}, not {right}: a store was lost, or came late"
                    )));
                }
            }
        }
        Ok(())
    }

    /// The words of the other threads in hot pages, and in the pages that they overwrite, of a child that nobody else runs.
    pub fn others_hot(&self, cpu: &mut Cpu) -> Result<Vec<(u64, u64)>, Trouble> {
        let mut seen = Vec::new();
        for page in 0..HOT_PAGES {
            for thread in (0..self.world.threads).filter(|&thread| thread != self.thread) {
                let at = Self::pair(page, thread);
                let (Ok(first), Ok(second)) = (cpu.load_u64(at), cpu.load_u64(at + 8)) else { continue };
                if first != second && first != second + 1 {
                    return Err(Trouble(format!(
                        "at {at:#x} of a child, a hot page, there are {first} and {second}"
                    )));
                }
                seen.extend([(at, first), (at + 8, second)]);
            }
        }
        for thread in (0..self.world.threads).filter(|&thread| thread != self.thread) {
            let words = (own_page(thread)..own_page(thread + 1)).step_by(8);
            seen.extend(words.map_while(|at| cpu.load_u64(at).ok().map(|value| (at, value))));
        }
        Ok(seen)
    }

    /// Some things to a zone that others work on as well.
    pub fn contest(&mut self, cpu: &mut Cpu, scene: &Scene) -> Result<(), Trouble> {
        let zone = self.below(ZONES);
        let world = self.world;
        if self.one_in(6) {
            let _alone = world.zones[zone].write();
            return self.inspect(cpu, scene, zone);
        }
        let _with_others = world.zones[zone].read();
        for _ in 0..8 {
            self.contest_once(cpu, scene, zone)?;
        }
        Ok(())
    }

    fn contest_once(&mut self, cpu: &mut Cpu, scene: &Scene, zone: usize) -> Result<(), Trouble> {
        let space = &scene.space;
        let all = pages_of(zone);
        // The large one as a whole, often: or no huge page would ever come.
        let pages = if zone == LARGE && self.one_in(2) {
            0..all
        } else {
            let first = self.below(all);
            first..first + 1 + self.below((all - first).min(4))
        };
        let first = pages.start;
        let (at, len) = (start_of(zone) + (first * PAGE) as u64, (pages.len() * PAGE) as u64);
        let (prot, words) = self.prot();
        let (what, result) = match self.below(20) {
            0..11 => {
                let page = if zone == LARGE { self.below(all) } else { first };
                return self.touch(cpu, scene, zone, start_of(zone) + (page * PAGE) as u64);
            }
            11 if zone == LARGE => {
                let (advice, words) = HUGE_ADVICE[self.below(HUGE_ADVICE.len())];
                self.note("advise", scene.number, at, len, words);
                ("advising", space.advise(cpu.core(), at, len, advice))
            }
            11 => return Ok(()),
            12 | 13 => {
                self.note("map", scene.number, at, len, words);
                let mut request = zone_request(self.world, zone, pages, prot);
                if self.one_in(3) {
                    request = request.with(MapFlags::POPULATE);
                }
                ("map", space.map(cpu.core(), request).map(|_| ()))
            }
            14 => {
                self.note("unmap", scene.number, at, len, "");
                ("unmap", space.unmap(cpu.core(), at, len))
            }
            15 | 16 => {
                self.note("protect", scene.number, at, len, words);
                ("protect", space.protect(cpu.core(), at, len, prot))
            }
            17 | 18 => {
                self.note("forget", scene.number, at, len, "");
                ("forgetting", space.advise(cpu.core(), at, len, Advice::DontNeed))
            }
            _ => {
                self.note("populate", scene.number, at, len, "to write");
                ("populating", space.advise(cpu.core(), at, len, Advice::PopulateWrite))
            }
        };
        self.world.count(Count::Change);
        let fails = match what {
            // Of calls that place something, only for want of memory.
            "map" | "unmap" => self.world.short && result == Err(Error::NoMemory),
            // Holes; and what must not be written is not filled in for that.
            "populating" | "advising" => {
                matches!(result, Err(Error::NoMemory | Error::Invalid | Error::BadAddress | Error::Again))
            }
            _ => result == Err(Error::NoMemory),
        };
        match result {
            Err(error) if !fails => Err(Trouble(format!("{what} failed with {} at {at:#x}", error.name()))),
            _ => Ok(()),
        }
    }

    /// A load or a store in page `at`, which may be anything.
    fn touch(&mut self, cpu: &mut Cpu, scene: &Scene, zone: usize, at: u64) -> Result<(), Trouble> {
        let at = at + (self.below(PAGE) / 8 * 8) as u64;
        let result = if self.one_in(2) {
            self.note("load", scene.number, at, 8, "");
            self.world.count(Count::Load);
            self.load_possible(cpu, zone, at).map(|result| result.map(|_| ()))?
        } else {
            self.note("store", scene.number, at, 8, "");
            self.world.count(Count::Store);
            let value = self.generation().word(at);
            cpu.store_u64(at, value)
        };
        match result {
            Ok(()) | Err(FaultError::NotMapped | FaultError::NotAllowed) => Ok(()),
            Err(error) if self.is_shortage(error) => Ok(()),
            Err(error) => Err(Trouble(format!("{error} at {at:#x}"))),
        }
    }

    /// A load that finds something that can be there, if it finds anything.
    fn load_possible(&self, cpu: &mut Cpu, zone: usize, at: u64) -> Result<Result<u64, FaultError>, Trouble> {
        let result = cpu.load_u64(at);
        match result {
            Ok(value) if !is_possible(value, at, base_of(zone, at - start_of(zone))) => {
                Err(Trouble(format!("at {at:#x} there is a word that belongs elsewhere: {value:#018x}")))
            }
            result => Ok(result),
        }
    }

    /// Compares what a listing says of each page of a zone with what accesses end in, while nobody else works on it.
    fn inspect(&mut self, cpu: &mut Cpu, scene: &Scene, zone: usize) -> Result<(), Trouble> {
        self.world.count(Count::List);
        self.note("inspect", scene.number, start_of(zone), (pages_of(zone) * PAGE) as u64, "");
        let list = scene.space.mappings(cpu.core());
        let Some(list) = self.unless_short("listing", &"the space", list)? else { return Ok(()) };
        for page in 0..pages_of(zone) {
            // Of the many of the large one, some.
            if zone == LARGE && !self.one_in(8) {
                continue;
            }
            let start = start_of(zone) + (page * PAGE) as u64;
            let at = start + (self.below(PAGE) / 8 * 8) as u64;
            let after = list.partition_point(|mapping| mapping.range.end <= at);
            let prot = list.get(after).filter(|mapping| mapping.range.contains(at)).map(|found| found.prot);
            let expected = |needs: Prot| match prot {
                None => Err(FaultError::NotMapped),
                Some(prot) if prot.is_empty() || !prot.contains(needs) => Err(FaultError::NotAllowed),
                Some(_) => Ok(()),
            };
            let load = self.load_possible(cpu, zone, at)?.map(|_| ());
            let fetch = cpu.execute(at);
            let value = self.generation().word(at);
            let store = cpu.store_u64(at, value);
            for (what, found, expected) in [
                ("a load", load, expected(Prot::empty())),
                ("a fetch", fetch, expected(Prot::EXEC)),
                ("a store", store, expected(Prot::WRITE)),
            ] {
                if found != expected && !found.is_err_and(|error| self.is_shortage(error)) {
                    let again = scene.space.mappings(cpu.core()).unwrap_or_default();
                    let again = again.iter().find(|mapping| mapping.range.contains(at)).map(|it| it.prot);
                    let present = scene.space.translate(cpu.core(), at, Access::Read).map(|it| it.flags);
                    return Err(Trouble(format!(
                        "{what} at {at:#x} ended in {found:?}, not {expected:?}, though nobody else is there: it is listed \
                         as {prot:?}, then as {again:?}, and its entry allows {present:?}"
                    )));
                }
            }
            let kept = if store.is_ok() { value } else { continue };
            if cpu.load_u64(at) != Ok(kept) {
                return Err(Trouble(format!("a store to {at:#x} was lost, though nobody else is there")));
            }
            if zone != 2 && self.one_in(3) {
                let result = scene.space.advise(cpu.core(), start, PAGE_SIZE, Advice::DontNeed);
                if self.unless_short("forgetting", &"a page of a zone", result)?.is_some() {
                    let first = if zone == 1 { file_word(at - start_of(zone)) } else { 0 };
                    match cpu.load_u64(at) {
                        Ok(value) if value == first => {}
                        Err(error) if self.is_shortage(error) => {}
                        found => {
                            return Err(Trouble(format!(
                                "at {at:#x}, which was to be forgotten, there is {found:x?}, not {first:#x}"
                            )));
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// A generation for a store.
    pub(super) fn generation(&mut self) -> Generation {
        self.stores += 1;
        Generation::new(self.thread, self.stores)
    }
}
