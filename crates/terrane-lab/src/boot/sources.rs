//! Programs in C: those of `programs/`, made when they are asked for by name, and the first process of a Linux guest.

use crate::failure::{Failure, one_line};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

/// What a program is made with besides its compiler: what `programs/Makefile` says.
const FLAGS: [&str; 7] = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-static", "-pthread", "-o"];

/// A compiler that makes static programs.
///
/// # Errors
/// [`Failure::Request`] if there is none.
pub fn compiler() -> Result<PathBuf, Failure> {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let folders: Vec<_> = std::env::split_paths(&folders).collect();
    let named: Option<OsString> = std::env::var_os("CC").filter(|name| !name.is_empty());
    let names = named.map_or_else(|| vec!["gcc".into(), "musl-gcc".into(), "cc".into()], |name| vec![name]);
    let found = names
        .iter()
        .find_map(|name| folders.iter().map(|folder| folder.join(name)).find(|path| path.is_file()));
    found.ok_or_else(|| {
        Failure::Request(
            "there is no C compiler (Debian and Ubuntu: apt-get install gcc libc6-dev)".to_owned(),
        )
    })
}

/// Makes the static program `to` of `from`.
///
/// # Errors
/// [`Failure::Request`] if that does not work.
pub fn compile(compiler: &Path, from: &Path, to: &Path) -> Result<(), Failure> {
    let failed = |error| Failure::request(format_args!("cannot make {}", to.display()), &error);
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder).map_err(failed)?;
    }
    // Others may be about to do the same: each makes its own, and the last stays.
    let own = to.with_extension(std::process::id().to_string());
    let output = Command::new(compiler).args(FLAGS).arg(&own).arg(from).output().map_err(failed)?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let first = said.lines().find(|line| line.contains("error")).unwrap_or("the compiler failed");
        return Err(Failure::Request(format!("cannot make {}: {}", to.display(), one_line(first))));
    }
    fs::rename(&own, to).map_err(failed)
}

/// The program of `programs/` that is called `name`, made if it is not there or older than its source; `None` if there is no such source.
///
/// # Errors
/// As [`compile`].
pub fn ours(name: &Path) -> Result<Option<PathBuf>, Failure> {
    let Some(checkout) = super::kernel::checkout() else { return Ok(None) };
    let folder = checkout.join("programs");
    let source = folder.join(name).with_extension("c");
    if name.extension().is_some() || !source.is_file() {
        return Ok(None);
    }
    let compiler = compiler()?;
    let kind = compiler.file_name().unwrap_or_default();
    let program = checkout.join("target/programs").join(kind).join(name);
    let age = |path: &Path| fs::metadata(path).and_then(|kind| kind.modified()).ok();
    let headers = source.parent().into_iter().chain([folder.as_path()]).flat_map(headers);
    let newest = headers.chain([source.clone()]).filter_map(|path| age(&path)).max();
    if age(&program) < newest.or(Some(SystemTime::UNIX_EPOCH)) {
        compile(&compiler, &source, &program)?;
    }
    Ok(Some(program))
}

fn headers(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|kind| kind == "h"))
        .collect()
}
