//! Files for experiments: real ones, without a name, gone when closed, whatever becomes of the command.

use super::hosted::{Crew, broken};
use crate::failure::Failure;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use terrane::PAGE_SIZE;
use terrane::object::Object;
use terrane::sync::Shared;
use terrane_hosted::{HostFile, Hosted};

/// Where files are made: the folder for temporary files (`TMPDIR`).
pub fn folder() -> PathBuf {
    std::env::temp_dir()
}

/// Fails unless files can be made there.
///
/// # Errors
/// [`Failure::Request`].
pub fn check() -> Result<(), Failure> {
    let folder = folder();
    tempfile::tempfile_in(&folder).map(drop).map_err(|error| refusal(&folder, &error))
}

fn refusal(folder: &Path, error: &io::Error) -> Failure {
    Failure::request(format_args!("cannot make files in {} (see TMPDIR)", folder.display()), error)
}

/// Bytes written at a time.
const BLOCK: usize = 1 << 20;

/// What page `page` of file `number` begins with: no two pages are alike.
pub fn stamp(number: u64, page: u64) -> u64 {
    number << 32 | page | 1 << 63
}

/// Makes file `number`, of `len` bytes (whole pages), every page with its [`stamp`], and reads it into the page cache of
/// the machine of `crew`, on its processor `cpu`.
///
/// # Errors
/// [`Failure::Request`] if the file cannot be made.
pub fn cached(crew: &Crew, cpu: usize, number: u64, len: u64) -> Result<Shared<Object<Hosted>>, Failure> {
    let folder = folder();
    let file = make(&folder, number, len).map_err(|error| refusal(&folder, &error))?;
    let file = HostFile::new(file).map_err(broken("cannot use a file"))?;
    let machine = crew.machine().machine();
    let object = Object::file(machine, file).map_err(broken("cannot use a file"))?;
    let cpu = crew.cpu(cpu);
    for page in 0..object.pages() {
        object.read_in(cpu.core(), page, false).map_err(broken("cannot read a file"))?;
    }
    match object.resident() as u64 * PAGE_SIZE {
        resident if resident == len => Ok(object),
        resident => {
            Err(Failure::Broken(format!("of a file of {len} bytes, {resident} are in the page cache")))
        }
    }
}

fn make(folder: &Path, number: u64, len: u64) -> io::Result<File> {
    let mut file = tempfile::tempfile_in(folder)?;
    let mut block = vec![0x5a; BLOCK.min(len as usize)];
    for at in (0..len).step_by(BLOCK) {
        let size = block.len().min((len - at) as usize);
        for offset in (0..size).step_by(PAGE_SIZE as usize) {
            let page = (at + offset as u64) / PAGE_SIZE;
            block[offset..offset + 8].copy_from_slice(&stamp(number, page).to_ne_bytes());
        }
        file.write_all(&block[..size])?;
    }
    Ok(file)
}
