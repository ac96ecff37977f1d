//! What programs do to their address space when they start: images (programs and libraries) are mapped and relocated,
//! code runs, heaps grow. The calls and their order are those of a dynamic linker and a C library on Linux.

use super::files;
use super::hosted::{Crew, broken, map, running};
use crate::failure::Failure;
use terrane::PAGE_SIZE;
use terrane::object::Object;
use terrane::space::MapRequest;
use terrane::sync::Shared;
use terrane::vma::Prot;
use terrane_hosted::{Cpu, Hosted};

/// A file to be mapped as a program or a library is: constants, code, and data that is relocated.
pub struct Image {
    file: Shared<Object<Hosted>>,
    pages: u64,
}

/// Of 16 parts of an image, the first that is code, and the first that is data. Before the code lie constants.
const CODE: u64 = 4;
const DATA: u64 = 14;

impl Image {
    /// An image of `pages` pages (a multiple of 16), file `number`, in the page cache.
    ///
    /// # Errors
    /// As [`files::cached`].
    pub fn new(crew: &Crew, number: u64, pages: u64) -> Result<Self, Failure> {
        Ok(Self { file: files::cached(crew, 0, number, pages * PAGE_SIZE)?, pages })
    }

    /// The offset of part `part` of 16.
    fn part(&self, part: u64) -> u64 {
        self.pages / 16 * part * PAGE_SIZE
    }

    /// Maps and relocates it; returns where it begins. Four calls, one fault for each page of data, some for
    /// constants.
    ///
    /// # Errors
    /// [`Failure::Broken`].
    pub fn load(&self, cpu: &mut Cpu) -> Result<u64, Failure> {
        let all = self.pages * PAGE_SIZE;
        // One mapping holds the place for all, and is then replaced part by part.
        let base = map(cpu, MapRequest::object(&self.file, 0, all, Prot::READ, false))?;
        let segment = |from, to, prot| {
            let (from, to) = (self.part(from), self.part(to));
            map(cpu, MapRequest::object(&self.file, from, to - from, prot, false).fixed(base + from))
        };
        segment(CODE, DATA, Prot::READ | Prot::EXEC)?;
        segment(DATA, 16, Prot::READ | Prot::WRITE)?;
        // Symbols and relocations are read, and every page of data is written.
        let (data, end) = (base + self.part(DATA), base + all);
        let mut symbol = base;
        for page in (data..end).step_by(PAGE_SIZE as usize) {
            cpu.load_u64(symbol).map_err(broken("cannot read a symbol"))?;
            symbol = base + (symbol - base + PAGE_SIZE) % self.part(CODE);
            cpu.store_u64(page + 64, base).map_err(broken("cannot relocate"))?;
        }
        // What only the linker writes is protected from then on.
        let half = (self.part(16) - self.part(DATA)) / 2;
        running(cpu)?.protect(cpu.core(), data, half, Prot::READ).map_err(broken("cannot protect"))?;
        Ok(base)
    }

    /// Runs code: fetches from `count` pages spread over the code of the image, which [`load`](Self::load) put at
    /// `base`, and loads a constant for each.
    ///
    /// # Errors
    /// [`Failure::Broken`].
    pub fn run(&self, cpu: &mut Cpu, base: u64, count: u64) -> Result<(), Failure> {
        let code = self.part(DATA) - self.part(CODE);
        for n in 0..count {
            // Steps of a prime number of pages visit all of them in no order.
            let at = n * 37 * PAGE_SIZE;
            cpu.execute(base + self.part(CODE) + at % code).map_err(broken("cannot run"))?;
            cpu.load_u64(base + at % self.part(CODE)).map_err(broken("cannot read a constant"))?;
        }
        Ok(())
    }
}

/// Moves the end of the heap of the space that `cpu` runs by `pages` pages; returns where it was.
///
/// # Errors
/// [`Failure::Broken`].
pub fn move_heap(cpu: &Cpu, pages: i64) -> Result<u64, Failure> {
    let space = running(cpu)?;
    let old = space.heap().end;
    let new = old.wrapping_add_signed(pages * PAGE_SIZE as i64);
    if space.brk(cpu.core(), new) == new {
        Ok(old)
    } else {
        Err(Failure::Broken("the heap does not move".into()))
    }
}
