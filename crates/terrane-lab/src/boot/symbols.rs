//! Names for the addresses in a kernel's backtrace.

use addr2line::Loader;
use std::fmt::Write as _;
use std::path::Path;

/// The backtrace as text, a line or two for each call, innermost first. What the image does not know stays an address.
///
/// `frames` are the addresses, the first of the instruction itself and the others of returns, each with what the kernel
/// says of it.
pub fn backtrace(image: &Path, frames: &[(u64, String)]) -> String {
    let loader = Loader::new(image).ok();
    let mut text = String::new();
    for (number, (address, said)) in frames.iter().enumerate() {
        // A return goes to what follows the call.
        let at = address.saturating_sub(u64::from(number > 0));
        let mut names = loader.as_ref().map(|loader| names(loader, at)).unwrap_or_default();
        if names.is_empty() {
            names.push(if said.is_empty() { "?".to_owned() } else { said.clone() });
        }
        for (inner, name) in names.iter().enumerate() {
            match inner {
                0 => drop(writeln!(text, "{number:>4}: {address:#018x} {name}")),
                _ => drop(writeln!(text, "{:>25}{name}", "")),
            }
        }
    }
    text
}

/// The function at `address`, and those that it was made part of, with their places.
fn names(loader: &Loader, address: u64) -> Vec<String> {
    let mut names = Vec::new();
    if let Ok(mut frames) = loader.find_frames(address) {
        while let Ok(Some(frame)) = frames.next() {
            let function = frame.function.as_ref().and_then(|name| name.demangle().ok().map(String::from));
            let place = frame.location.as_ref().and_then(|place| Some((place.file?, place.line?)));
            let function = function.unwrap_or_else(|| "?".to_owned());
            names.push(match place {
                Some((file, line)) => format!("{function} at {file}:{line}"),
                None => function,
            });
        }
    }
    if names.iter().all(|name| name.starts_with('?'))
        && let Some(name) = loader.find_symbol(address)
    {
        names.clear();
        names.push(addr2line::demangle_auto(name.into(), None).into_owned());
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[inline(never)]
    extern "C" fn landmark() {}

    #[test]
    fn functions_have_names() {
        // This test's own program is an image like any other, but for where it is loaded.
        let Ok(program) = std::env::current_exe() else { return };
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let start = u64::from_str_radix(maps.split('-').next().unwrap(), 16).unwrap();
        let text = backtrace(&program, &[(landmark as *const () as u64 - start, String::new())]);
        assert!(text.contains("landmark"), "{text}");
    }

    #[test]
    fn an_image_that_is_not_there_names_nothing() {
        let text = backtrace(Path::new("/no/such"), &[(0x10, "main".into()), (0x20, String::new())]);
        assert_eq!(text, "   0: 0x0000000000000010 main\n   1: 0x0000000000000020 ?\n");
    }
}
