//! The same small program on the running kernel and on Terrane, at the same addresses.

use super::parse::{self, Entry};
use crate::common::*;
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use terrane::object::Object;
use terrane::vma::RemapFlags;
use terrane_hosted::ProcFile;

/// A program that maps things in a window, and touches them.
pub trait Side {
    /// Maps `pages` pages at page `at` of the window: private memory, or `file` from its beginning.
    fn map(&mut self, at: u64, pages: u64, prot: Prot, what: &What);
    fn load(&mut self, at: u64);
    fn store(&mut self, at: u64);
    fn protect(&mut self, at: u64, pages: u64, prot: Prot);
    fn advise(&mut self, at: u64, pages: u64, advice: Advice);
    fn unmap(&mut self, at: u64, pages: u64);
    fn lock(&mut self, at: u64, pages: u64, on_fault: bool);
    /// Moves a mapping to page `to`.
    fn remap(&mut self, at: u64, pages: u64, to: u64, new_pages: u64);
    /// Makes a child that stores to the given pages and then waits. It stays until the side is dropped.
    fn fork(&mut self, stores: &[u64]);
    /// What `smaps` says of the window.
    fn smaps(&mut self) -> Vec<Entry>;
}

pub enum What<'a> {
    Private,
    Shared,
    File { file: &'a tempfile::NamedTempFile, shared: bool },
}

const PAGE: usize = PAGE_SIZE as usize;

/// One window at a time: a child of one test would share the pages of the others.
static ALONE: Mutex<()> = Mutex::new(());

/// Addresses of this process that nothing else uses, and on Terrane the same.
pub struct Linux {
    reserved: *mut libc::c_void,
    len: usize,
    base: u64,
    end: u64,
    children: Vec<libc::pid_t>,
    _alone: MutexGuard<'static, ()>,
}

impl Linux {
    /// A window of `pages` pages, from an address of the kernel's choice, aligned to 2 MiB.
    pub fn new(pages: u64) -> Self {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let len = pages as usize * PAGE + (4 << 20);
        // SAFETY: a fresh reservation.
        let reserved = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        assert_ne!(reserved, libc::MAP_FAILED);
        let base = (reserved as u64 + PAGE_SIZE).next_multiple_of(2 << 20);
        Self { reserved, len, base, end: base + pages * PAGE_SIZE, children: Vec::new(), _alone: alone }
    }

    pub fn base(&self) -> u64 {
        self.base
    }

    fn at(&self, page: u64) -> *mut u8 {
        (self.base + page * PAGE_SIZE) as *mut u8
    }
}

impl Drop for Linux {
    fn drop(&mut self) {
        for &child in &self.children {
            // SAFETY: our child, which waits.
            unsafe {
                libc::kill(child, libc::SIGKILL);
                let mut status = 0;
                libc::waitpid(child, &mut status, 0);
                assert_eq!(std::process::ExitStatus::from_raw(status).signal(), Some(libc::SIGKILL));
            }
        }
        // SAFETY: ours, with what was mapped in it.
        unsafe { libc::munmap(self.reserved, self.len) };
    }
}

fn raw(prot: Prot) -> libc::c_int {
    prot.bits() as libc::c_int
}

impl Side for Linux {
    fn map(&mut self, at: u64, pages: u64, prot: Prot, what: &What) {
        let (flags, fd) = match what {
            What::Private => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
            What::Shared => (libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1),
            What::File { file, shared } => {
                (if *shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE }, file.as_file().as_raw_fd())
            }
        };
        // SAFETY: in our window.
        let mapped = unsafe {
            libc::mmap(self.at(at).cast(), pages as usize * PAGE, raw(prot), flags | libc::MAP_FIXED, fd, 0)
        };
        assert_eq!(mapped, self.at(at).cast());
    }

    fn load(&mut self, at: u64) {
        // SAFETY: mapped by the caller, for this.
        unsafe { self.at(at).read_volatile() };
    }

    fn store(&mut self, at: u64) {
        // SAFETY: as above.
        unsafe { self.at(at).write_volatile(1) };
    }

    fn protect(&mut self, at: u64, pages: u64, prot: Prot) {
        // SAFETY: in our window.
        assert_eq!(unsafe { libc::mprotect(self.at(at).cast(), pages as usize * PAGE, raw(prot)) }, 0);
    }

    fn advise(&mut self, at: u64, pages: u64, advice: Advice) {
        let number = (0..128).find(|&number| Advice::from_linux(number) == Some(advice)).unwrap();
        // SAFETY: in our window.
        assert_eq!(unsafe { libc::madvise(self.at(at).cast(), pages as usize * PAGE, number) }, 0);
    }

    fn unmap(&mut self, at: u64, pages: u64) {
        // Reserved again: other threads of this process must not find the hole.
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        let len = pages as usize * PAGE;
        // SAFETY: in our window.
        let reserved = unsafe { libc::mmap(self.at(at).cast(), len, libc::PROT_NONE, flags, -1, 0) };
        assert_eq!(reserved, self.at(at).cast());
    }

    fn lock(&mut self, at: u64, pages: u64, on_fault: bool) {
        let flags = if on_fault { libc::MLOCK_ONFAULT } else { 0 };
        // SAFETY: in our window.
        assert_eq!(unsafe { libc::mlock2(self.at(at).cast(), pages as usize * PAGE, flags) }, 0);
    }

    fn remap(&mut self, at: u64, pages: u64, to: u64, new_pages: u64) {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let (old, new) = (pages as usize * PAGE, new_pages as usize * PAGE);
        // SAFETY: both in our window.
        let moved = unsafe { libc::mremap(self.at(at).cast(), old, new, flags, self.at(to)) };
        assert_eq!(moved, self.at(to).cast());
        self.unmap(at, pages); // Reserved again.
    }

    fn fork(&mut self, stores: &[u64]) {
        let mut ends = [0; 2];
        // SAFETY: a pipe; then a child that makes only system calls and stores.
        unsafe {
            assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
            let child = libc::fork();
            if child == 0 {
                for &page in stores {
                    self.at(page).write_volatile(2);
                }
                libc::write(ends[1], [1u8].as_ptr().cast(), 1);
                loop {
                    libc::pause();
                }
            }
            assert!(child > 0);
            self.children.push(child);
            let mut byte = [0u8];
            assert_eq!(libc::read(ends[0], byte.as_mut_ptr().cast(), 1), 1);
            libc::close(ends[0]);
            libc::close(ends[1]);
        }
    }

    fn smaps(&mut self) -> Vec<Entry> {
        let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut list = parse::smaps(&text);
        list.retain(|entry| {
            // Without what is only reserved.
            let left_over = entry.header.perms == "---p" && entry.flags.iter().flatten().any(|f| f == "nr");
            entry.header.start >= self.base && entry.header.end <= self.end && !left_over
        });
        list
    }
}

/// A hosted space that has the window at the same addresses.
pub struct Terrane {
    machine: HostedMachine,
    cpu: Cpu,
    space: Shared<Space>,
    base: u64,
    children: Vec<Shared<Space>>,
    /// Objects of files, as a kernel keeps one for each.
    files: Vec<(std::path::PathBuf, Shared<Object<Hosted>>)>,
}

impl Terrane {
    pub fn new(base: u64) -> Self {
        let machine = machine(64, 2);
        let (cpu, space) = cpu_with_space(&machine);
        Self { machine, cpu, space, base, children: Vec::new(), files: Vec::new() }
    }

    fn at(&self, page: u64) -> u64 {
        self.base + page * PAGE_SIZE
    }

    pub fn text(&self, file: ProcFile) -> String {
        self.cpu.proc_text(&self.space, file).unwrap()
    }
}

impl Side for Terrane {
    fn map(&mut self, at: u64, pages: u64, prot: Prot, what: &What) {
        let len = pages * PAGE_SIZE;
        let request = match what {
            What::Private => MapRequest::anonymous(len, prot),
            What::Shared => MapRequest::shared_anonymous(len, prot),
            What::File { file, shared } => {
                let known = self.files.iter().find(|(path, _)| path == file.path());
                let object = match known {
                    Some((_, object)) => object.clone(),
                    None => {
                        let object = self.machine.open(file.path(), true).unwrap();
                        self.files.push((file.path().to_owned(), object.clone()));
                        object
                    }
                };
                MapRequest::object(&object, 0, len, prot, *shared)
            }
        };
        let at = self.at(at);
        assert_eq!(self.space.map(self.cpu.core(), request.fixed(at)), Ok(at));
    }

    fn load(&mut self, at: u64) {
        self.cpu.load_u64(self.at(at)).unwrap();
    }

    fn store(&mut self, at: u64) {
        self.cpu.store_u64(self.at(at), 1).unwrap();
    }

    fn protect(&mut self, at: u64, pages: u64, prot: Prot) {
        self.space.protect(self.cpu.core(), self.at(at), pages * PAGE_SIZE, prot).unwrap();
    }

    fn advise(&mut self, at: u64, pages: u64, advice: Advice) {
        self.space.advise(self.cpu.core(), self.at(at), pages * PAGE_SIZE, advice).unwrap();
    }

    fn unmap(&mut self, at: u64, pages: u64) {
        self.space.unmap(self.cpu.core(), self.at(at), pages * PAGE_SIZE).unwrap();
    }

    fn lock(&mut self, at: u64, pages: u64, on_fault: bool) {
        self.space.mlock2(self.cpu.core(), self.at(at), pages * PAGE_SIZE, u32::from(on_fault)).unwrap();
    }

    fn remap(&mut self, at: u64, pages: u64, to: u64, new_pages: u64) {
        let (old, new) = (pages * PAGE_SIZE, new_pages * PAGE_SIZE);
        let (flags, to) = (RemapFlags::MAYMOVE | RemapFlags::FIXED, self.at(to));
        assert_eq!(self.space.remap(self.cpu.core(), self.at(at), old, new, flags, to), Ok(to));
    }

    fn fork(&mut self, stores: &[u64]) {
        let child = Shared::try_new(self.space.fork(self.cpu.core()).unwrap()).unwrap();
        self.cpu.switch_to(&child);
        for &page in stores {
            self.store(page);
        }
        self.cpu.switch_to(&self.space.clone());
        self.children.push(child);
    }

    fn smaps(&mut self) -> Vec<Entry> {
        parse::smaps(&self.text(ProcFile::Smaps))
    }
}
