//! Scripts that are awkward on purpose.
//!
//! The window is small, so operations collide; addresses are taken from where mappings begin and end, from the boundary of a page table, and
//! from the ends of the window; arguments are wrong now and then, each in its own way. The next operation is chosen with the listing at
//! hand, but is written down with its words, so that a script repeats without it.

use crate::deliberate;
use crate::machine;
use crate::operation::{NO_FILE, Op};
use crate::script::{ADVICE, FILES, PROCESSES, Setup, USER_END};
use crate::view::Area;
use terrane::PAGE_SIZE;

/// A generator of random numbers (splitmix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Numbers that follow from `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ 0x9e37_79b9_7f4a_7c15)
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.number() % end.max(1)
    }

    /// True once in `n` times.
    pub fn once_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// One of `list`; the default of an empty one.
    pub fn pick<T: Copy + Default>(&mut self, list: &[T]) -> T {
        list.get(self.below(list.len() as u64) as usize).copied().unwrap_or_default()
    }
}

/// What a seed's script is about.
#[derive(Clone, Debug)]
pub struct Generator {
    random: Random,
    setup: Setup,
    /// By kind: how often it comes, in proportion.
    weights: Vec<u64>,
    /// Pages of a range at most, usually.
    reach: u64,
    /// Wrong arguments come once in so many times.
    wrong: u64,
}

/// How often each kind comes, as a rule.
fn weight(name: &str) -> u64 {
    match name {
        "mmap" => 24,
        "munmap" => 8,
        "mprotect" => 14,
        "mremap" => 12,
        "brk" => 3,
        "madvise" => 12,
        "process_madvise" => 2,
        "mlock" | "mlock2" | "munlock" => 3,
        "mlockall" | "munlockall" => 1,
        "msync" => 2,
        "mincore" => 3,
        "mseal" => 1,
        "load" => 10,
        "store" => 22,
        "load8" | "store8" => 3,
        "ftruncate" => 4,
        "pwrite" => 4,
        "pread" => 2,
        "fork" => 2,
        "switch" => 4,
        "exit" => 1,
        _ => 1,
    }
}

impl Generator {
    /// A generator for seed `seed`.
    pub fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let pages = random.pick(&[16, 32, 64, 64, 128, 256, 1024]);
        let mut setup = Setup::of_pages(pages);
        setup.heap = random.below(pages);
        if random.once_in(4) {
            setup.memlock = Some(random.below(pages));
        }
        if random.once_in(8) {
            setup.mapped = Some(pages / 4 + random.below(pages));
        }
        // Each seed has its favourites, and things that it does not do.
        let weights = Op::NAMES.iter().map(|name| match random.below(8) {
            0 => 0,
            1 => 4 * weight(name),
            _ => weight(name),
        });
        let mut weights: Vec<u64> = weights.collect();
        for (name, least) in [("mmap", 10), ("store", 5)] {
            if let Some(at) = Op::NAMES.iter().position(|known| *known == name) {
                weights[at] = weights[at].max(least);
            }
        }
        // A sealed window is soon a dull one.
        if let (Some(at), true) = (Op::NAMES.iter().position(|name| *name == "mseal"), !random.once_in(5)) {
            weights[at] = 0;
        }
        let reach = random.pick(&[3, 6, 12, pages / 2]).max(2);
        let wrong = random.pick(&[8, 30, 100]);
        Self { random, setup, weights, reach, wrong }
    }

    /// The window, and the limits.
    pub fn setup(&self) -> &Setup {
        &self.setup
    }

    /// The next operation, for a process with these mappings.
    pub fn operation(&mut self, areas: &[Area]) -> Op {
        loop {
            let op = self.any(areas);
            if self.setup.allows(&op) && machine::is_supported(&op) && !deliberate::excludes(&op, &self.setup)
            {
                return op;
            }
        }
    }

    fn any(&mut self, areas: &[Area]) -> Op {
        let mut at = self.random.below(self.weights.iter().sum());
        let kind = self.weights.iter().position(|&weight| {
            let here = at < weight;
            at = at.wrapping_sub(weight);
            here
        });
        match Op::NAMES[kind.unwrap_or(0)] {
            "mmap" => self.map(areas),
            "munmap" => {
                let (addr, len) = self.range(areas);
                Op::Unmap { addr, len }
            }
            "mprotect" => {
                let (addr, len) = self.range(areas);
                Op::Protect { addr, len, prot: self.prot() }
            }
            "mremap" => self.remap(areas),
            "brk" => {
                let page = self.setup.heap + self.random.below(self.setup.pages - self.setup.heap + 1);
                let end = self.setup.start + page * PAGE_SIZE;
                let end =
                    if self.random.once_in(3) { end.wrapping_sub(self.random.below(PAGE_SIZE)) } else { end };
                Op::Brk { end: if self.random.once_in(6) { 0 } else { end.min(self.setup.end()) } }
            }
            "madvise" => {
                let (addr, len) = self.range(areas);
                Op::Advise { addr, len, advice: self.advice() }
            }
            "process_madvise" => {
                let ((addr, len), (and, for_len)) = (self.range(areas), self.range(areas));
                Op::ProcessAdvise { addr, len, and, for_len, advice: self.advice() }
            }
            "mlock" => {
                let (addr, len) = self.loose_range(areas);
                Op::Lock { addr, len }
            }
            "mlock2" => {
                let (addr, len) = self.loose_range(areas);
                let flags = if self.wrong() { self.random.below(8) } else { self.random.below(2) };
                Op::Lock2 { addr, len, flags }
            }
            "munlock" => {
                let (addr, len) = self.loose_range(areas);
                Op::Unlock { addr, len }
            }
            "mlockall" => {
                let end = if self.wrong() { 16 } else { 8 };
                Op::LockAll { flags: self.random.below(end) }
            }
            "munlockall" => Op::UnlockAll {},
            "msync" => {
                let (addr, len) = self.range(areas);
                let flags =
                    if self.wrong() { self.random.below(16) } else { self.random.pick(&[4, 1, 6, 0, 2]) };
                Op::Sync { addr, len, flags }
            }
            "mincore" => {
                let (addr, len) = self.range(areas);
                Op::Resident { addr, len }
            }
            "mseal" => {
                let (addr, len) = self.range(areas);
                Op::Seal { addr, len, flags: u64::from(self.wrong()) }
            }
            "load" => {
                let (addr, len) = self.bytes(areas);
                Op::Load { addr, len }
            }
            "store" => {
                let (addr, len) = self.bytes(areas);
                Op::Store { addr, len, seed: self.random.below(256) }
            }
            "load8" => Op::LoadWord { addr: self.bytes(areas).0 },
            "store8" => Op::StoreWord { addr: self.bytes(areas).0, seed: self.random.below(256) },
            "ftruncate" => {
                let len = if self.wrong() { 1 << 63 } else { self.file_place() };
                Op::Truncate { file: self.file(), len }
            }
            "pwrite" => {
                let (offset, len) = (self.file_place(), self.small());
                Op::Write { file: self.file(), offset, len, seed: self.random.below(256) }
            }
            "pread" => {
                let (offset, len) = (self.file_place(), self.small());
                Op::Read { file: self.file(), offset, len }
            }
            "fork" => Op::Fork {},
            "switch" => Op::Switch { process: self.random.below(PROCESSES as u64) },
            _ => Op::Exit {},
        }
    }

    fn wrong(&mut self) -> bool {
        self.random.once_in(self.wrong)
    }

    fn file(&mut self) -> u64 {
        self.random.below(FILES as u64)
    }

    /// A number of bytes that one operation moves.
    fn small(&mut self) -> u64 {
        match self.random.below(4) {
            0 => 1 + self.random.below(16),
            1 => self.random.below(3 * PAGE_SIZE),
            2 => PAGE_SIZE,
            _ => 1 + self.random.below(PAGE_SIZE),
        }
    }

    fn file_place(&mut self) -> u64 {
        let page = self.random.below(self.setup.pages.min(32) + 1) * PAGE_SIZE;
        match self.random.below(4) {
            0 => page,
            1 => page + 1,
            2 => page.saturating_sub(1),
            _ => page + self.random.below(PAGE_SIZE),
        }
    }

    fn prot(&mut self) -> u64 {
        if self.random.once_in(3 * self.wrong) {
            // `PROT_SEM`, what there is not, `PROT_GROWSDOWN`, `PROT_GROWSUP`.
            return self.random.below(8) | self.random.pick(&[8, 16, 1 << 24, 1 << 24, 1 << 25, 3 << 24]);
        }
        self.random.pick(&[3, 3, 3, 3, 3, 1, 1, 0, 0, 7, 5, 2, 4, 6])
    }

    fn advice(&mut self) -> u64 {
        if self.wrong() { self.random.below(128) } else { self.random.pick(ADVICE_NUMBERS) }
    }

    fn page(&mut self) -> u64 {
        self.setup.start + self.random.below(self.setup.pages) * PAGE_SIZE
    }

    /// The first address of a page worth looking at.
    fn place(&mut self, areas: &[Area]) -> u64 {
        let (start, end) = (self.setup.start, self.setup.end());
        let at = match self.random.below(8) {
            0 => self.page(),
            1 => self.random.pick(&[start, end - PAGE_SIZE, 0x5040_0000, 0x5040_0000 - PAGE_SIZE]),
            _ if areas.is_empty() => self.page(),
            n => {
                let area = areas[self.random.below(areas.len() as u64) as usize];
                match n {
                    2 | 3 => area.start,
                    4 => area.end,
                    5 => area.end - PAGE_SIZE,
                    6 => area.start - PAGE_SIZE,
                    _ => area.start + self.random.below((area.end - area.start) / PAGE_SIZE) * PAGE_SIZE,
                }
            }
        };
        at.clamp(start, end - PAGE_SIZE)
    }

    fn pages(&mut self) -> u64 {
        let reach = self.reach;
        match self.random.below(8) {
            0..=2 => 1,
            3 => 2,
            7 => 1 + self.random.below(self.setup.pages),
            _ => 1 + self.random.below(reach),
        }
    }

    /// A range of whole pages, cut off at the end of the window; sometimes a wrong one.
    fn range(&mut self, areas: &[Area]) -> (u64, u64) {
        let addr = self.place(areas);
        let rest = self.setup.end() - addr;
        let len = match self.random.below(10) {
            // The rest of a mapping, or all of it.
            0 | 1 => areas.iter().find(|area| area.end > addr).map_or(rest, |area| area.end - addr),
            _ => self.pages() * PAGE_SIZE,
        };
        let len = len.min(rest);
        if !self.wrong() {
            return (addr, len);
        }
        match self.random.below(10) {
            0 => (addr, 0),
            1 => (addr + 1 + self.random.below(PAGE_SIZE - 1), len - PAGE_SIZE.min(len)),
            2 => (addr, len - self.random.below(PAGE_SIZE)),
            3 => (addr, u64::MAX),
            4 => (addr, addr.wrapping_neg()),
            5 => (addr, addr.wrapping_neg() - PAGE_SIZE + 1),
            6 => (
                self.random.pick(&[USER_END, 1 << 63, !0xfff]),
                self.random.pick(&[0, 1, PAGE_SIZE, u64::MAX]),
            ),
            7 => (addr, self.random.number() | 1 << 63),
            8 => (addr | 0xfff, 0),
            _ => (addr, 1),
        }
    }

    /// A range for calls that round addresses themselves.
    fn loose_range(&mut self, areas: &[Area]) -> (u64, u64) {
        let (addr, len) = self.range(areas);
        if len > PAGE_SIZE && self.random.once_in(3) {
            let off = self.random.below(PAGE_SIZE);
            return (addr + off, len - off - self.random.below(PAGE_SIZE - off));
        }
        (addr, len)
    }

    /// Bytes in the window, often over the end of a page.
    fn bytes(&mut self, areas: &[Area]) -> (u64, u64) {
        let page = self.place(areas);
        let addr = match self.random.below(4) {
            0 => page,
            1 => page + PAGE_SIZE - 1 - self.random.below(16),
            _ => page + self.random.below(PAGE_SIZE),
        };
        (addr, self.small().min(self.setup.end() - addr))
    }

    fn map(&mut self, areas: &[Area]) -> Op {
        let random = &mut self.random;
        let shared = random.once_in(3);
        let file = if random.once_in(2) { self.file() } else { NO_FILE };
        let mut flags = if shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
        if file == NO_FILE {
            flags |= libc::MAP_ANONYMOUS;
        }
        let (mut addr, mut len) = self.range(areas);
        match self.random.below(8) {
            0..=2 => flags |= libc::MAP_FIXED,
            3 => flags |= libc::MAP_FIXED_NOREPLACE,
            // A hint; or none.
            4 => {}
            _ => addr = 0,
        }
        if addr != 0 && flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) == 0 && self.random.once_in(4) {
            addr = addr.wrapping_add(self.random.below(3 * PAGE_SIZE));
        }
        let rare = [
            libc::MAP_NORESERVE,
            libc::MAP_POPULATE,
            libc::MAP_POPULATE,
            libc::MAP_POPULATE | libc::MAP_NONBLOCK,
            libc::MAP_NONBLOCK,
            libc::MAP_LOCKED,
            libc::MAP_STACK,
            libc::MAP_GROWSDOWN,
            libc::MAP_32BIT,
            0x8,
            libc::MAP_HUGETLB,
            libc::MAP_SYNC,
            libc::MAP_DENYWRITE,
            // `MAP_SHARED_VALIDATE`, of what is shared.
            0x2,
        ];
        for flag in rare {
            if self.random.once_in(24) {
                flags |= flag;
            }
        }
        let mut offset = if file == NO_FILE { 0 } else { self.random.below(12) * PAGE_SIZE };
        // Often what continues a neighbour.
        if file != NO_FILE && self.random.once_in(2) {
            let beside = areas
                .iter()
                .find(|area| area.end == addr && area.shows == crate::view::Shows::File(file as usize));
            if let Some(area) = beside {
                offset = area.offset + (area.end - area.start);
            }
        }
        if self.wrong() {
            match self.random.below(8) {
                6 => flags ^= 1 << self.random.below(32),
                7 => flags |= (self.random.number() & self.random.number()) as i32,
                0 => flags ^= libc::MAP_PRIVATE,
                1 => flags ^= libc::MAP_SHARED,
                2 if file != NO_FILE => offset += 1 + self.random.below(PAGE_SIZE - 1),
                3 if file != NO_FILE => {
                    offset = self.random.pick(&[!0xfff, 1 << 62, i64::MAX as u64 & !0xfff])
                }
                4 => {
                    len = self.random.pick(&[USER_END, 1 << 47, u64::MAX, u64::MAX - 0xffe, 1 << 63, 1 << 40])
                }
                _ => addr = addr.wrapping_add(self.random.below(PAGE_SIZE)),
            }
        }
        Op::Map { addr, len, prot: self.prot(), flags: flags as u32 as u64, file, offset }
    }

    fn remap(&mut self, areas: &[Area]) -> Op {
        let (addr, old) = self.range(areas);
        let new = match self.random.below(4) {
            0 => old,
            1 => old.saturating_sub(PAGE_SIZE),
            2 => old.wrapping_add(PAGE_SIZE),
            _ => self.pages() * PAGE_SIZE,
        };
        let flags =
            if self.wrong() { self.random.below(16) } else { self.random.pick(&[0, 1, 1, 1, 3, 3, 3, 5, 7]) };
        let (to, _) = self.range(areas);
        let old = if self.random.once_in(20) { 0 } else { old };
        let to = if flags & 2 != 0 {
            to.min(self.setup.end().saturating_sub(new).max(self.setup.start))
        } else {
            to
        };
        Op::Remap { addr, old, new, flags, to: if self.random.once_in(4) && flags & 2 == 0 { 0 } else { to } }
    }
}

const ADVICE_NUMBERS: &[u64] = &{
    let mut numbers = [0; ADVICE.len()];
    let mut n = 0;
    while n < numbers.len() {
        numbers[n] = ADVICE[n].1;
        n += 1;
    }
    numbers
};
