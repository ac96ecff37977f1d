//! Archives of files for a guest: cpio of the form `newc`, as kernels take it for their first file system.
//!
//! Every header is made of `070701` and thirteen numbers of eight hexadecimal digits; names end with NUL; names and contents
//! are filled up to multiples of four bytes. A file named `TRAILER!!!` ends it.

use std::collections::BTreeSet;
use std::io::{self, Write};

/// The most that one file of the form can hold.
pub const LIMIT: u64 = u32::MAX as u64;

/// An archive that is being written. Folders on the way to a file are put in by themselves.
pub struct Archive<W> {
    out: W,
    known: BTreeSet<String>,
    number: u32,
    written: u64,
}

const FOLDER: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const DEVICE: u32 = 0o020_000;

impl<W: Write> Archive<W> {
    /// An archive that goes to `out`.
    pub fn new(out: W) -> Self {
        Self { out, known: BTreeSet::new(), number: 0, written: 0 }
    }

    /// Bytes that were written.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// True if there is something at `path`.
    pub fn has(&self, path: &str) -> bool {
        self.known.contains(name(path))
    }

    /// Puts a file at `path` with the permissions `mode`.
    ///
    /// # Errors
    /// Those of writing; [`io::ErrorKind::FileTooLarge`] if it does not fit the form; [`io::ErrorKind::AlreadyExists`] if something is there.
    pub fn file(&mut self, path: &str, mode: u32, contents: &[u8]) -> io::Result<()> {
        self.parents(path)?;
        self.entry(path, FILE | mode & 0o7777, (0, 0), contents)
    }

    /// Puts a folder at `path`, unless there is one.
    ///
    /// # Errors
    /// Those of writing.
    pub fn folder(&mut self, path: &str) -> io::Result<()> {
        if name(path).is_empty() || self.has(path) {
            return Ok(());
        }
        self.parents(path)?;
        self.entry(path, FOLDER | 0o755, (0, 0), &[])
    }

    /// Puts a character device at `path`.
    ///
    /// # Errors
    /// As [`file`](Self::file).
    pub fn device(&mut self, path: &str, major: u32, minor: u32) -> io::Result<()> {
        self.parents(path)?;
        self.entry(path, DEVICE | 0o600, (major, minor), &[])
    }

    /// Writes the end, and gives back what it was written to.
    ///
    /// # Errors
    /// Those of writing.
    pub fn finish(mut self) -> io::Result<W> {
        self.header("TRAILER!!!", 0, (0, 0), 0)?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn parents(&mut self, path: &str) -> io::Result<()> {
        match name(path).rsplit_once('/') {
            Some((parent, _)) => self.folder(parent),
            None => Ok(()),
        }
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), contents: &[u8]) -> io::Result<()> {
        let name = name(path).to_owned();
        let length =
            u32::try_from(contents.len()).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
        if self.known.contains(&name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        self.header(&name, mode, device, length)?;
        self.known.insert(name);
        self.bytes(contents)?;
        self.fill()
    }

    fn header(&mut self, name: &str, mode: u32, device: (u32, u32), length: u32) -> io::Result<()> {
        self.number += 1;
        let links = if mode & FOLDER != 0 { 2 } else { 1 };
        // Number, mode, owner, group, links, time, length, device of the file (two), device it is (two), name's length, sum.
        let fields =
            [self.number, mode, 0, 0, links, 0, length, 0, 0, device.0, device.1, name.len() as u32 + 1, 0];
        let mut header = String::from("070701");
        for field in fields {
            header.push_str(&format!("{field:08x}"));
        }
        self.bytes(header.as_bytes())?;
        self.bytes(name.as_bytes())?;
        self.bytes(&[0])?;
        self.fill()
    }

    fn bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len() as u64;
        self.out.write_all(bytes)
    }

    fn fill(&mut self) -> io::Result<()> {
        let rest = (4 - self.written % 4) % 4;
        self.bytes(&[0; 4][..rest as usize])
    }
}

/// Names in an archive have no leading `/`.
fn name(path: &str) -> &str {
    path.trim_matches('/')
}

/// How the kernel reads archives: the very code.
#[cfg(test)]
#[path = "../../../terrane-kernel/src/fs/cpio.rs"]
mod kernel;

#[cfg(test)]
mod tests {
    use super::*;

    /// Name, mode and contents of all entries, read by the rules of the form.
    fn read(mut bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let whole = bytes.len();
        let mut entries = Vec::new();
        loop {
            assert_eq!(&bytes[..6], b"070701");
            let field = |n: usize| {
                let text = std::str::from_utf8(&bytes[6 + 8 * n..14 + 8 * n]).unwrap();
                u32::from_str_radix(text, 16).unwrap() as usize
            };
            let (mode, length, named) = (field(1), field(6), field(11));
            let name = std::str::from_utf8(&bytes[110..110 + named - 1]).unwrap().to_owned();
            assert_eq!(bytes[110 + named - 1], 0);
            let start = (110 + named).next_multiple_of(4);
            if name == "TRAILER!!!" {
                assert_eq!(start, bytes.len());
                return entries;
            }
            entries.push((name, mode as u32, bytes[start..start + length].to_vec()));
            bytes = &bytes[(start + length).next_multiple_of(4)..];
            assert_eq!((whole - bytes.len()) % 4, 0);
        }
    }

    #[test]
    fn what_is_put_in_comes_out() {
        let mut archive = Archive::new(Vec::new());
        archive.file("/a/b/c", 0o755, b"hello").unwrap();
        archive.file("/a/d", 0o644, b"").unwrap();
        archive.folder("/a/b/").unwrap();
        archive.device("/dev/console", 5, 1).unwrap();
        assert!(archive.has("/a/b") && archive.has("a/d") && !archive.has("/b"));
        let clash = archive.file("/a/d", 0o644, b"again").unwrap_err();
        assert_eq!(clash.kind(), io::ErrorKind::AlreadyExists);
        let expected = [
            ("a", 0o040_755, &b""[..]),
            ("a/b", 0o040_755, b""),
            ("a/b/c", 0o100_755, b"hello"),
            ("a/d", 0o100_644, b""),
            ("dev", 0o040_755, b""),
            ("dev/console", 0o020_600, b""),
        ];
        let read = read(&archive.finish().unwrap());
        let read: Vec<_> =
            read.iter().map(|(name, mode, bytes)| (name.as_str(), *mode, &bytes[..])).collect();
        assert_eq!(read, expected);
    }

    /// An archive of files with names and contents of many lengths; what is in it.
    fn some(seed: u32) -> (Vec<u8>, Vec<(String, Vec<u8>)>) {
        let mut state = seed;
        let mut random = |below: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) % below
        };
        let mut archive = Archive::new(Vec::new());
        let mut put = Vec::new();
        for number in 0..random(12) {
            let name = format!("{number}{}", "x".repeat(random(9) as usize));
            let contents: Vec<u8> = (0..random(11)).map(|_| random(256) as u8).collect();
            archive.file(&name, 0o644, &contents).unwrap();
            put.push((name, contents));
        }
        (archive.finish().unwrap(), put)
    }

    fn read_by_kernel(bytes: &[u8]) -> Vec<(String, Vec<u8>)> {
        let text = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
        kernel::members(bytes).map(|member| (text(member.name), member.bytes.to_vec())).collect()
    }

    #[test]
    fn the_kernel_reads_what_is_written() {
        for seed in 0..200 {
            let (bytes, put) = some(seed);
            assert_eq!(read_by_kernel(&bytes), put, "seed {seed}");
            let modes =
                kernel::members(&bytes).all(|member| member.mode == 0o100_644 && member.modified == 0);
            assert!(modes, "seed {seed}");
        }
    }

    #[test]
    fn the_kernel_reads_the_whole_files_of_what_is_cut_off() {
        let (bytes, put) = (0..).map(some).find(|(_, put)| put.len() > 5).unwrap();
        for end in 0..bytes.len() {
            let read = read_by_kernel(&bytes[..end]);
            assert_eq!(read[..], put[..read.len()], "cut off at {end}");
        }
    }

    #[test]
    fn the_kernel_survives_what_is_no_archive() {
        let (bytes, put) = (0..).map(some).find(|(_, put)| put.len() > 5).unwrap();
        for place in 0..bytes.len() {
            for value in [0, b'0', b'f', b'g', 0xff] {
                let mut spoilt = bytes.clone();
                spoilt[place] = value;
                // One header says where the next is: so there may be fewer, and never more than fit.
                assert!(read_by_kernel(&spoilt).len() <= put.len() + 1);
            }
        }
    }
}
