//! The machine that a report was measured on, and how much of its memory is ours to use.

use crate::failure::Failure;
use crate::measure::threads::processors;
use crate::report::Machine;
use crate::report::table::bytes;
use std::fs;
use std::path::Path;

/// Describes this machine.
pub fn describe() -> Machine {
    let system = rustix::system::uname();
    Machine {
        cpus: processors().len(),
        model: model(),
        memory: meminfo("MemTotal:").unwrap_or(0),
        kernel: format!("{} {}", system.sysname().to_string_lossy(), system.release().to_string_lossy()),
    }
}

/// The name of the running kernel up to its minor version, as in `Linux 6.18`: what a row of a table has room for.
pub fn kernel() -> String {
    let system = rustix::system::uname();
    let release = system.release().to_string_lossy().into_owned();
    let short: Vec<&str> = release.split(['.', '-']).take(2).collect();
    format!("{} {}", system.sysname().to_string_lossy(), short.join("."))
}

/// The processor's name; its architecture where the kernel gives none.
fn model() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    info.lines()
        .find_map(|line| {
            let (key, value) = line.split_once(':')?;
            matches!(key.trim(), "model name" | "Model" | "uarch").then(|| value.trim().to_owned())
        })
        .unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// A field of `/proc/meminfo`, in bytes.
fn meminfo(field: &str) -> Option<u64> {
    kilobytes(&fs::read_to_string("/proc/meminfo").ok()?, field)
}

/// The value of the line of `text` that starts with `field` and counts kilobytes, in bytes.
fn kilobytes(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The bytes that this process may still use: what the machine has available, what its control group leaves,
/// and what its own limit on address space leaves.
fn available() -> u64 {
    let machine = meminfo("MemAvailable:").unwrap_or(u64::MAX);
    machine.min(group_leaves().unwrap_or(u64::MAX)).min(limit_leaves().unwrap_or(u64::MAX))
}

/// What the memory limit of the control group leaves; `None` if there is none. Page cache counts as used in a
/// group, but is given up on demand.
fn group_leaves() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let folder = Path::new("/sys/fs/cgroup").join(path);
    let limit = fs::read_to_string(folder.join("memory.max")).ok()?.trim().parse::<u64>().ok()?;
    let used = fs::read_to_string(folder.join("memory.current")).ok()?.trim().parse::<u64>().ok()?;
    let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let cache =
        stat.lines().find_map(|line| line.strip_prefix("inactive_file ")?.parse::<u64>().ok()).unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(cache)))
}

/// What the limit on address space (`ulimit -v`) leaves; `None` if there is none.
fn limit_leaves() -> Option<u64> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::As).current?;
    let used = kilobytes(&fs::read_to_string("/proc/self/status").ok()?, "VmSize:").unwrap_or(0);
    Some(limit.saturating_sub(used))
}

/// Fails unless there is memory for `what`, which needs `needed` bytes.
///
/// # Errors
/// [`Failure::Request`], naming both figures.
pub fn check_memory(what: &str, needed: u64) -> Result<(), Failure> {
    let available = available();
    if available >= needed {
        return Ok(());
    }
    Err(Failure::Request(format!(
        "{what} needs {} of memory, but only {} is available",
        bytes(needed),
        bytes(available)
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn describes_this_machine() {
        let machine = describe();
        assert!(machine.cpus > 0 && machine.memory > 1 << 20);
        assert!(!machine.model.is_empty());
        assert!(machine.kernel.starts_with("Linux "));
        assert!(machine.kernel.starts_with(&kernel()));
    }

    #[test]
    fn memory_is_checked() {
        assert!(check_memory("nothing", 0).is_ok());
        assert!(matches!(check_memory("everything", u64::MAX), Err(Failure::Request(_))));
        assert_eq!(kilobytes("A: 1\nMemAvailable:   12 kB\n", "MemAvailable:"), Some(12 << 10));
        assert_eq!(kilobytes("A: 1 kB\n", "B:"), None);
    }
}
