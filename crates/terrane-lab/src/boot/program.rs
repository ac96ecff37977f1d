//! The program that a guest shall run: is it one that can?

use super::sources;
use crate::failure::Failure;
use object::elf::{EM_X86_64, ET_DYN, ET_EXEC, FileHeader64, PT_INTERP, PT_LOAD};
use object::endian::Endianness;
use object::read::elf::{FileHeader, ProgramHeader};
use std::fs;
use std::path::{Path, PathBuf};

/// A program for a guest.
pub struct Program {
    /// Its name, without folders.
    pub name: String,
    /// Where it lies on the host.
    pub path: PathBuf,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

impl Program {
    /// Reads the program at `path`. What is not there may be one of `programs/`, by its name, which is then made; or a name
    /// without `/` is looked up in `PATH`, as a shell does.
    ///
    /// # Errors
    /// [`Failure::Request`] if it is not a static ELF program for x86-64.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let path = find(path)?;
        let bytes = read_file(&path)?;
        check(&bytes).map_err(|what| Failure::Request(format!("{} {what}", path.display())))?;
        let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        Ok(Self { name, path, bytes })
    }
}

fn find(path: &Path) -> Result<PathBuf, Failure> {
    if path.exists() {
        return Ok(path.to_owned());
    }
    if let Some(program) = sources::ours(path)? {
        return Ok(program);
    }
    let folders = match path.components().count() {
        1 => std::env::var_os("PATH").unwrap_or_default(),
        _ => return Ok(path.to_owned()),
    };
    let found = std::env::split_paths(&folders).map(|folder| folder.join(path)).find(|path| path.is_file());
    Ok(found.unwrap_or_else(|| path.to_owned()))
}

/// The bytes of a file for a guest.
///
/// # Errors
/// [`Failure::Request`] if it cannot be read or is no file.
pub fn read_file(path: &Path) -> Result<Vec<u8>, Failure> {
    let failed = |error| Failure::request(format_args!("cannot read {}", path.display()), &error);
    let kind = fs::metadata(path).map_err(failed)?;
    if kind.is_dir() {
        return Err(Failure::Request(format!("{} is a folder", path.display())));
    }
    if kind.len() > super::archive::LIMIT {
        return Err(Failure::Request(format!("{} is larger than 4 GiB", path.display())));
    }
    fs::read(path).map_err(failed)
}

/// What is wrong with `bytes` as a program, in words that follow its name.
fn check(bytes: &[u8]) -> Result<(), &'static str> {
    const BROKEN: &str = "is a broken ELF file";
    if bytes.starts_with(b"#!") {
        return Err("is a script; a guest runs ELF programs only");
    }
    if !bytes.starts_with(b"\x7fELF") {
        return Err("is not an ELF program");
    }
    match (bytes.get(4), bytes.get(5)) {
        (Some(2), Some(1)) => {}
        (Some(1), _) => {
            return Err("is a 32-bit program; a guest runs x86-64 programs only (build it with -m64)");
        }
        (Some(2), Some(2)) => {
            return Err("is a program for another processor; a guest runs x86-64 programs only");
        }
        _ => return Err(BROKEN),
    }
    let header = FileHeader64::<Endianness>::parse(bytes).map_err(|_| BROKEN)?;
    let endian = header.endian().map_err(|_| BROKEN)?;
    if header.e_machine(endian) != EM_X86_64 {
        return Err("is a program for another processor; a guest runs x86-64 programs only");
    }
    if !matches!(header.e_type(endian), ET_EXEC | ET_DYN) {
        return Err("is an ELF file, but no program");
    }
    let segments = header.program_headers(endian, bytes).map_err(|_| BROKEN)?;
    if segments.iter().any(|segment| segment.p_type(endian) == PT_INTERP) {
        return Err("is dynamically linked; a guest runs static programs only (build it with -static)");
    }
    let loads: Vec<_> = segments.iter().filter(|segment| segment.p_type(endian) == PT_LOAD).collect();
    if loads.is_empty() {
        return Err("is an ELF file, but no program");
    }
    if loads.iter().any(|segment| segment.data(endian, bytes).is_err()) {
        return Err(BROKEN);
    }
    // A library that has no interpreter is not a program either.
    if header.e_type(endian) == ET_DYN && header.e_entry(endian) == 0 {
        return Err("is a library, not a program");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::fake;

    #[test]
    fn static_programs_for_this_processor_only() {
        let good = fake::guest(&[]);
        assert_eq!(check(&good), Ok(()));
        let changed = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            check(&bytes).unwrap_err()
        };
        assert!(check(b"#!/bin/sh\n").unwrap_err().contains("script"));
        assert!(check(b"hello").unwrap_err().contains("not an ELF"));
        assert!(check(b"").unwrap_err().contains("not an ELF"));
        assert!(check(b"\x7fELF").unwrap_err().contains("broken"));
        assert!(changed(4, 1).contains("32-bit"));
        assert!(changed(5, 2).contains("another processor"));
        assert!(changed(18, 183).contains("another processor"));
        assert!(changed(16, 1).contains("no program"));
        // The first segment's kind.
        assert!(changed(64, PT_INTERP as u8).contains("dynamically linked"));
        for cut in 0..good.len() {
            assert!(check(&good[..cut]).is_err(), "{cut}");
        }
    }

    #[test]
    fn files_must_be_there() {
        let text = |failure| match failure {
            Err(Failure::Request(text)) => text,
            _ => panic!("it should be refused"),
        };
        assert!(text(Program::read(Path::new("/no/such/file")).map(drop)).contains("No such file"));
        assert!(text(Program::read(Path::new("/")).map(drop)).contains("is a folder"));
    }
}
