//! Pages of files that are in the page cache.

use super::memory::{Memory, page_size};
use super::{Fill, can_populate, file_failure, folder};
use crate::failure::Failure;
use crate::measure::Sample;
use crate::measure::plan::Runner;
use crate::measure::threads::in_rounds;
use crate::measure::timing::timed;
use rustix::mm::{Advice, MapFlags};
use std::fs::File;
use std::io::{self, Write};

/// The length of each file, as in source D.
pub const LENGTH: usize = 16 << 20;

/// A file of [`LENGTH`] bytes without a name, gone when closed. Having just been written, it is in the page cache.
pub fn cached_file() -> Result<File, Failure> {
    let folder = folder();
    let make = || -> io::Result<File> {
        let mut file = tempfile::tempfile_in(&folder)?;
        let block: Vec<u8> = (0..1usize << 20).map(|index| (index / page_size()) as u8).collect();
        for _ in 0..LENGTH / block.len() {
            file.write_all(&block)?;
        }
        Ok(file)
    };
    make().map_err(|e| file_failure(&folder, &e))
}

/// Threads that map all pages of a file each, all starting together. Timed is what maps the pages, and only that.
pub fn fill(how: Fill, threads: usize) -> Result<Runner<'static>, Failure> {
    let files: Vec<File> = (0..threads).map(|_| cached_file()).collect::<Result<_, _>>()?;
    if how == Fill::Populate {
        can_populate(Memory::file(&files[0], LENGTH, MapFlags::empty())?.advise(Advice::LinuxPopulateRead))?;
    }
    Ok(Box::new(move |time| {
        let rounds = in_rounds(threads, threads, time, |index| {
            let file = &files[index];
            if how == Fill::MapPopulate {
                let (took, memory) = timed(|| Memory::file(file, LENGTH, MapFlags::POPULATE));
                return memory.map(|_| took);
            }
            let memory = Memory::file(file, LENGTH, MapFlags::empty())?;
            let (took, result) = timed(|| match how {
                Fill::Populate => memory.advise(Advice::LinuxPopulateRead),
                _ => {
                    memory.read_pages();
                    Ok(())
                }
            });
            can_populate(result)?;
            Ok(took)
        })?;
        Ok(Sample::from(rounds.each(LENGTH / page_size())))
    }))
}
