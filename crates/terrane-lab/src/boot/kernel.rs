//! Terrane's kernel: where its image is.
//!
//! In a checkout of the repository the image is built, or brought up to date, by cargo: an image that is older than the
//! sources would tell nothing about them. Elsewhere it lies beside the command.

use crate::failure::{Failure, one_line};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The package, and the name of its image.
const NAME: &str = "terrane-kernel";

/// The image that the user named, or the one of this checkout, or the one beside this command.
///
/// # Errors
/// [`Failure::Request`] if there is none, or it cannot be built.
pub fn find(named: Option<&Path>) -> Result<PathBuf, Failure> {
    if let Some(path) = named {
        return readable(path).map(|()| path.to_owned());
    }
    if let Some(checkout) = checkout() {
        return build(&checkout);
    }
    let command =
        std::env::current_exe().map_err(|error| Failure::request("finding this program", &error))?;
    let beside = command.with_file_name(NAME);
    match beside.is_file() {
        true => Ok(beside),
        false => Err(Failure::Request(format!(
            "there is no {NAME} beside {}; name one with --kernel FILE",
            command.display()
        ))),
    }
}

/// The checkout of the repository that this command belongs to, if it is still there.
pub fn checkout() -> Option<PathBuf> {
    let command = std::env::current_exe().unwrap_or_default();
    let built_in = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2);
    command.ancestors().chain(built_in).find(|folder| is_checkout(folder)).map(Path::to_owned)
}

/// An image that the user named.
///
/// # Errors
/// [`Failure::Request`] if it cannot be read.
pub fn readable(path: &Path) -> Result<(), Failure> {
    let cannot = |error| Failure::request(format_args!("cannot read {}", path.display()), &error);
    match std::fs::File::open(path).and_then(|file| file.metadata()).map_err(cannot)?.is_file() {
        true => Ok(()),
        false => Err(Failure::Request(format!("{} is no file", path.display()))),
    }
}

fn is_checkout(folder: &Path) -> bool {
    folder.join("crates").join(NAME).join("Cargo.toml").is_file()
}

/// Builds the image with cargo, which does nothing if it is up to date.
fn build(checkout: &Path) -> Result<PathBuf, Failure> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    if !checkout.join("target/release").join(NAME).is_file() {
        eprintln!("terrane: building {NAME}, for the first time here");
    }
    let mut command = Command::new(&cargo);
    command.current_dir(checkout);
    command.args(["build", "--release", "--package", NAME, "--bin", NAME, "--features", "image", "--quiet"]);
    command.args(["--message-format", "json-render-diagnostics"]);
    let output = command.output().map_err(|error| {
        Failure::request(format_args!("building {NAME}: cannot start {}", cargo.display()), &error)
    })?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        eprint!("{said}");
        let last = said.lines().rfind(|line| line.starts_with("error")).unwrap_or("see above");
        return Err(Failure::Request(format!("cannot build {NAME}: {}", one_line(last))));
    }
    image(&String::from_utf8_lossy(&output.stdout))
        .ok_or_else(|| Failure::Request(format!("cargo does not say where {NAME} is")))
}

/// Where the program is, by what cargo says in JSON, a line for each thing that it made.
fn image(messages: &str) -> Option<PathBuf> {
    messages.lines().rev().find_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let ours = message["reason"] == "compiler-artifact" && message["target"]["name"] == NAME;
        message["executable"].as_str().filter(|_| ours).map(PathBuf::from)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_says_where_it_is() {
        let messages = r#"{"reason":"compiler-artifact","target":{"name":"build-script-build"},"executable":"/b"}
            {"reason":"compiler-artifact","target":{"name":"terrane-kernel"},"executable":"/t/release/terrane-kernel"}
            {"reason":"build-finished","success":true}"#;
        assert_eq!(image(messages), Some(PathBuf::from("/t/release/terrane-kernel")));
        assert_eq!(image("nonsense"), None);
    }

    #[test]
    fn a_named_image_must_be_there() {
        assert!(
            matches!(find(Some(Path::new("/no/such"))), Err(Failure::Request(text)) if text.contains("/no/such"))
        );
        assert!(matches!(find(Some(Path::new("/"))), Err(Failure::Request(_))));
    }
}
