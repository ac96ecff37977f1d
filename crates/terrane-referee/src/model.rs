//! A plain model of the language: pages in a map, no kernel, no Terrane. Byte-exact; for machines where the kernel is no referee.
//!
//! It knows the part of the language that does not depend on placement or limits: fixed mappings of private and shared memory and of
//! files, unmap, protect, forget, loads, stores, files, forks. What is outside of that is not asked of it ([`Model::knows`]).

use crate::operation::{DATA, NO_FILE, Op, Outcome, byte, word};
use crate::script::{PROCESSES, READ_ONLY, Setup};
use std::collections::BTreeMap;
use std::rc::Rc;
use terrane::PAGE_SIZE;

const PAGE: usize = PAGE_SIZE as usize;

/// The bytes of one page; pages that were never stored to are shared.
type Bytes = Rc<[u8; PAGE]>;

/// What a page of a process shows.
#[derive(Clone)]
struct Shown {
    prot: u64,
    shared: bool,
    /// The object and the page of it; `None` for private memory.
    object: Option<(usize, u64)>,
    /// A page of the process's own.
    own: Option<Bytes>,
}

/// A sequence of pages that several may show.
#[derive(Clone, Default)]
struct Object {
    len: u64,
    pages: BTreeMap<u64, Bytes>,
}

impl Object {
    fn page(&self, index: u64) -> Option<Bytes> {
        let inside = index < self.len.div_ceil(PAGE_SIZE);
        inside.then(|| self.pages.get(&index).cloned().unwrap_or_else(|| Rc::new([0; PAGE])))
    }

    fn set(&mut self, at: u64, value: u8) {
        let page = self.pages.entry(at / PAGE_SIZE).or_insert_with(|| Rc::new([0; PAGE]));
        Rc::make_mut(page)[(at % PAGE_SIZE) as usize] = value;
    }

    fn get(&self, at: u64) -> u8 {
        self.pages.get(&(at / PAGE_SIZE)).map_or(0, |page| page[(at % PAGE_SIZE) as usize])
    }
}

type Pages = BTreeMap<u64, Shown>;

/// The model.
pub struct Model {
    setup: Setup,
    spaces: [Option<Pages>; PROCESSES],
    /// The files, and then the shared memories.
    objects: Vec<Object>,
    acting: usize,
}

enum Fault {
    NotMapped,
    NotAllowed,
    BeyondEnd,
}

impl Model {
    /// A model with one process and empty files.
    pub fn new(setup: &Setup) -> Self {
        let mut spaces: [Option<Pages>; PROCESSES] = Default::default();
        spaces[0] = Some(Pages::new());
        Self { setup: *setup, spaces, objects: vec![Object::default(); READ_ONLY], acting: 0 }
    }

    /// The process that acts.
    pub fn acting(&self) -> usize {
        self.acting
    }

    /// The lowest free number of a process.
    pub fn free_process(&self) -> Option<usize> {
        self.spaces.iter().position(Option::is_none)
    }

    /// True for an operation whose outcome the model can tell.
    pub fn knows(&self, op: &Op) -> bool {
        let plain = |addr: u64, len: u64| {
            addr.is_multiple_of(PAGE_SIZE)
                && addr >= self.setup.start
                && (1..=self.setup.len()).contains(&len)
                && addr.saturating_add(len) <= self.setup.end()
        };
        match *op {
            Op::Map { addr, len, flags, file, offset, .. } => {
                let rest = flags as i32 & !(libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_POPULATE);
                let kind = matches!(rest - libc::MAP_FIXED, libc::MAP_PRIVATE | libc::MAP_SHARED);
                let anonymous = flags as i32 & libc::MAP_ANONYMOUS != 0;
                plain(addr, len)
                    && kind
                    && anonymous == (file == NO_FILE)
                    && (anonymous || file < READ_ONLY as u64)
                    && offset.is_multiple_of(PAGE_SIZE)
                    && offset < 1 << 40
            }
            Op::Unmap { addr, len } => plain(addr, len),
            Op::Protect { addr, len, prot } => plain(addr, len) && prot <= 7,
            Op::Advise { addr, len, advice } => plain(addr, len) && advice == 4,
            Op::Load { addr, len } => len as usize <= DATA && addr.saturating_add(len) <= self.setup.end(),
            Op::Store { addr, len, .. } => {
                len as usize <= DATA && addr.saturating_add(len) <= self.setup.end()
            }
            Op::LoadWord { addr } | Op::StoreWord { addr, .. } => addr % PAGE_SIZE <= PAGE_SIZE - 8,
            Op::Truncate { file, len } => file < READ_ONLY as u64 && len < 1 << 24,
            Op::Write { file, offset, .. } | Op::Read { file, offset, .. } => {
                file < READ_ONLY as u64 && offset < 1 << 24
            }
            Op::Fork {} | Op::Switch { .. } | Op::Exit {} => true,
            _ => false,
        }
    }

    /// True for a call that the model does not follow: protecting over a hole, which changes what lies before it.
    pub fn is_pending(&self, op: &Op) -> bool {
        let Op::Protect { addr, len, .. } = *op else { return false };
        let space = self.spaces[self.acting].as_ref();
        space.is_none_or(|space| {
            (addr / PAGE_SIZE..(addr + len).div_ceil(PAGE_SIZE)).any(|page| !space.contains_key(&page))
        })
    }

    /// What `op` is to end in; `None` for one that the model does not know, which changes nothing.
    pub fn act(&mut self, op: &Op) -> Option<Outcome> {
        if !self.knows(op) {
            return None;
        }
        let last = |addr: u64, len: u64| (addr + len).div_ceil(PAGE_SIZE);
        Some(match *op {
            Op::Map { addr, len, prot, flags, file, offset } => {
                let shared = flags as i32 & libc::MAP_SHARED != 0;
                let pages = addr / PAGE_SIZE..last(addr, len);
                let object = match (file, shared) {
                    (NO_FILE, false) => None,
                    (NO_FILE, true) => {
                        self.objects
                            .push(Object { len: (pages.end - pages.start) * PAGE_SIZE, ..Object::default() });
                        Some((self.objects.len() - 1, 0))
                    }
                    (file, _) => Some((file as usize, offset / PAGE_SIZE)),
                };
                let first = pages.start;
                let space = self.spaces[self.acting].as_mut()?;
                for page in pages {
                    let object = object.map(|(number, index)| (number, index + page - first));
                    space.insert(page, Shown { prot: prot & 7, shared, object, own: None });
                }
                Outcome::value(addr)
            }
            Op::Unmap { addr, len } => {
                let space = self.spaces[self.acting].as_mut()?;
                (addr / PAGE_SIZE..last(addr, len)).for_each(|page| {
                    space.remove(&page);
                });
                Outcome::value(0)
            }
            Op::Protect { addr, len, prot } => {
                let space = self.spaces[self.acting].as_mut()?;
                for page in addr / PAGE_SIZE..last(addr, len) {
                    match space.get_mut(&page) {
                        Some(shown) => shown.prot = prot,
                        None => return Some(Outcome::Errno(libc::ENOMEM)),
                    }
                }
                Outcome::value(0)
            }
            Op::Advise { addr, len, .. } => {
                let space = self.spaces[self.acting].as_mut()?;
                let mut hole = false;
                for page in addr / PAGE_SIZE..last(addr, len) {
                    match space.get_mut(&page) {
                        Some(shown) => shown.own = None,
                        None => hole = true,
                    }
                }
                if hole { Outcome::Errno(libc::ENOMEM) } else { Outcome::value(0) }
            }
            Op::Load { addr, len } => self.load(addr, len as usize),
            Op::LoadWord { addr } => self.load(addr, 8),
            Op::Store { addr, len, seed } => self.store(addr, len as usize, |n| byte(seed, n)),
            Op::StoreWord { addr, seed } => self.store(addr, 8, |n| word(seed).to_le_bytes()[n]),
            Op::Truncate { file, len } => {
                self.truncate(file as usize, len);
                Outcome::value(0)
            }
            Op::Write { file, offset, len, seed } => {
                let len = len.min(DATA as u64);
                let object = &mut self.objects[file as usize];
                if len > 0 {
                    object.len = object.len.max(offset + len);
                }
                (0..len).for_each(|n| object.set(offset + n, byte(seed, n as usize)));
                Outcome::value(len)
            }
            Op::Read { file, offset, len } => {
                let object = &self.objects[file as usize];
                let len = object.len.saturating_sub(offset).min(len).min(DATA as u64);
                Outcome::Value(len, (offset..offset + len).map(|at| object.get(at)).collect())
            }
            Op::Fork {} => match self.free_process() {
                Some(child) => {
                    self.spaces[child] = self.spaces[self.acting].clone();
                    Outcome::value(child as u64)
                }
                None => Outcome::Nothing,
            },
            Op::Switch { process } => match self.spaces.get(process as usize) {
                Some(Some(_)) => {
                    self.acting = process as usize;
                    Outcome::value(0)
                }
                _ => Outcome::Nothing,
            },
            Op::Exit {} => {
                if self.spaces.iter().flatten().count() < 2 {
                    return Some(Outcome::Nothing);
                }
                self.spaces[self.acting] = None;
                self.acting = self.spaces.iter().position(Option::is_some)?;
                Outcome::value(0)
            }
            _ => return None,
        })
    }

    fn truncate(&mut self, file: usize, len: u64) {
        let object = &mut self.objects[file];
        let first = len.div_ceil(PAGE_SIZE);
        if len <= object.len {
            object.pages.retain(|&index, _| index < first);
            if let (within @ 1.., Some(page)) =
                ((len % PAGE_SIZE) as usize, object.pages.get_mut(&(len / PAGE_SIZE)))
            {
                Rc::make_mut(page)[within..].fill(0);
            }
            // Private copies behind the end go too.
            for shown in self.spaces.iter_mut().flatten().flat_map(BTreeMap::values_mut) {
                if shown.object.is_some_and(|(number, index)| number == file && index >= first) {
                    shown.own = None;
                }
            }
        }
        self.objects[file].len = len;
    }

    /// The bytes of a page that may be loaded from.
    fn page(&self, addr: u64) -> Result<Bytes, Fault> {
        let space = self.spaces[self.acting].as_ref().ok_or(Fault::NotMapped)?;
        let shown = space.get(&(addr / PAGE_SIZE)).ok_or(Fault::NotMapped)?;
        // What may be written or executed may be read, on these processors.
        if shown.prot == 0 {
            return Err(Fault::NotAllowed);
        }
        match (&shown.own, shown.object) {
            (Some(own), _) => Ok(own.clone()),
            (None, None) => Ok(Rc::new([0; PAGE])),
            (None, Some((number, index))) => self.objects[number].page(index).ok_or(Fault::BeyondEnd),
        }
    }

    fn load(&self, addr: u64, len: usize) -> Outcome {
        let mut bytes = Vec::with_capacity(len);
        while bytes.len() < len {
            let at = addr + bytes.len() as u64;
            match self.page(at) {
                Ok(page) => {
                    let within = (at % PAGE_SIZE) as usize;
                    let count = (PAGE - within).min(len - bytes.len());
                    bytes.extend_from_slice(&page[within..within + count]);
                }
                Err(fault) => return signal(&fault, bytes.len(), bytes),
            }
        }
        Outcome::Value(len as u64, bytes)
    }

    fn store(&mut self, addr: u64, len: usize, value: impl Fn(usize) -> u8) -> Outcome {
        let mut done = 0;
        while done < len {
            let at = addr + done as u64;
            let count = (PAGE - (at % PAGE_SIZE) as usize).min(len - done);
            let bytes: Vec<u8> = (done..done + count).map(&value).collect();
            if let Err(fault) = self.store_page(at, &bytes) {
                return signal(&fault, done, Vec::new());
            }
            done += count;
        }
        Outcome::value(len as u64)
    }

    fn store_page(&mut self, at: u64, bytes: &[u8]) -> Result<(), Fault> {
        let space = self.spaces[self.acting].as_ref().ok_or(Fault::NotMapped)?;
        let shown = space.get(&(at / PAGE_SIZE)).ok_or(Fault::NotMapped)?;
        if shown.prot & 2 == 0 {
            return Err(Fault::NotAllowed);
        }
        let (shared, object) = (shown.shared, shown.object);
        let mut page = self.page(at)?;
        let within = (at % PAGE_SIZE) as usize;
        if let (true, Some((number, index))) = (shared, object) {
            (0..bytes.len())
                .for_each(|n| self.objects[number].set(index * PAGE_SIZE + (within + n) as u64, bytes[n]));
            return Ok(());
        }
        Rc::make_mut(&mut page)[within..within + bytes.len()].copy_from_slice(bytes);
        if let Some(shown) =
            self.spaces[self.acting].as_mut().and_then(|space| space.get_mut(&(at / PAGE_SIZE)))
        {
            shown.own = Some(page);
        }
        Ok(())
    }
}

fn signal(fault: &Fault, done: usize, bytes: Vec<u8>) -> Outcome {
    let (signal, code) = match fault {
        Fault::NotMapped => (libc::SIGSEGV, 1),
        Fault::NotAllowed => (libc::SIGSEGV, 2),
        Fault::BeyondEnd => (libc::SIGBUS, 2),
    };
    Outcome::Signal { signal, code, done: done as u64, bytes }
}
