//! A Linux kernel as a guest: its image, and an archive in which a first process of ours runs the program.

use crate::boot::archive::Archive;
use crate::boot::program::{Program, read_file};
use crate::boot::{Wanted, guest_path, pack, sources};
use crate::failure::Failure;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// A kernel to compare with.
pub struct Kernel {
    /// Where its image is.
    pub image: PathBuf,
    /// Its name and version, for a table.
    pub name: String,
}

impl Kernel {
    /// The kernel whose image is at `path`.
    ///
    /// # Errors
    /// [`Failure::Request`] if it is no image of a Linux kernel for x86.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        match version(&read_file(path)?) {
            Some(version) => Ok(Self { image: path.to_owned(), name: format!("Linux {}", short(&version)) }),
            None => Err(Failure::Request(format!(
                "{} is no Linux kernel for x86 (a bzImage, as /boot/vmlinuz-…)",
                path.display()
            ))),
        }
    }
}

/// The kernel's command line. Its console is the report; it has what makes it fastest, and does not give up when an emulator on
/// a busy machine is late with the first ticks.
pub const WORDS: &str = "no_timer_check console=ttyS1 quiet loglevel=3 panic=-1 rdinit=/init 8250.nr_uarts=4 tsc=reliable mitigations=off";

/// The version that an image states: the header of the boot protocol says where.
fn version(image: &[u8]) -> Option<String> {
    if image.get(0x202..0x206)? != b"HdrS" {
        return None;
    }
    let at = usize::from(u16::from_le_bytes(image.get(0x20e..0x210)?.try_into().ok()?)) + 0x200;
    let text = image.get(at..)?.split(|&byte| byte == 0).next()?;
    Some(std::str::from_utf8(text).ok()?.split_whitespace().next()?.to_owned())
}

/// The first two numbers of a version.
fn short(version: &str) -> String {
    version.split(['.', '-', '+']).take(2).collect::<Vec<_>>().join(".")
}

/// An archive for a Linux guest.
///
/// # Errors
/// [`Failure::Request`] for files that cannot be read, and if there is no C compiler for the first process.
pub fn archive(
    program: &Program,
    typed: &Path,
    arguments: &[String],
    wanted: &Wanted,
) -> Result<File, Failure> {
    let init = init()?;
    let path = format!("{}\0", guest_path(program));
    pack(program, typed, arguments, wanted, |archive: &mut Archive<File>| -> io::Result<()> {
        archive.file("/init", 0o755, &init)?;
        archive.file("/.terrane/program", 0o644, path.as_bytes())?;
        archive.device("/dev/console", 5, 1)?;
        ["/proc", "/sys", "/tmp"].into_iter().try_for_each(|folder| archive.folder(folder))
    })
}

/// The first process, made of its source.
fn init() -> Result<Vec<u8>, Failure> {
    let folder = tempfile::tempdir().map_err(|error| Failure::request("cannot make a folder", &error))?;
    let (source, program) = (folder.path().join("init.c"), folder.path().join("init"));
    fs::write(&source, include_str!("init.c"))
        .map_err(|error| Failure::request(format_args!("cannot write {}", source.display()), &error))?;
    sources::compile(&sources::compiler()?, &source, &program)?;
    read_file(&program)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_states_its_version() {
        let mut image = vec![0; 0x1000];
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x20e..0x210].copy_from_slice(&0x300u16.to_le_bytes());
        let text = b"6.12.9+deb12-cloud-amd64 (builder) #1 SMP\0";
        image[0x500..0x500 + text.len()].copy_from_slice(text);
        assert_eq!(version(&image).as_deref(), Some("6.12.9+deb12-cloud-amd64"));
        assert_eq!(short("6.12.9+deb12-cloud-amd64"), "6.12");
        assert_eq!(short("6.1-rc3"), "6.1");
        image[0x20e..0x210].copy_from_slice(&0xf000u16.to_le_bytes());
        assert_eq!(version(&image), None);
        assert_eq!(version(b"\x7fELF"), None);
    }

    #[test]
    fn the_first_process_can_be_made() {
        match sources::compiler() {
            Ok(_) => assert!(init().unwrap().starts_with(b"\x7fELF")),
            Err(_) => eprintln!("skipped: there is no C compiler"),
        }
    }
}
