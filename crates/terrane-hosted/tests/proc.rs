//! The texts of `/proc`: one parser for the running kernel's and for Terrane's, and the same values for the same mappings.

mod common;
#[path = "proc/parse.rs"]
mod parse;
#[path = "proc/sides.rs"]
mod sides;

use common::*;
use parse::Entry;
use procfs_core::FromBufRead;
use procfs_core::process::{MMapPath, MemoryMaps, SmapsRollup, Status};
use sides::{Linux, Side, Terrane, What};
use std::io::Write;
use terrane_hosted::ProcFile;

const NONE: Prot = Prot::empty();
const READ: Prot = Prot::READ;

fn kernel(file: &str) -> String {
    std::fs::read_to_string(format!("/proc/self/{file}")).unwrap()
}

/// A file of `pages` pages, in the kernel's cache and clean.
fn file(pages: usize) -> tempfile::NamedTempFile {
    // Not in /tmp, which may be memory.
    let mut file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    // One by one, so that the kernel keeps them as single pages: of a larger folio all is dirty or nothing.
    (0..pages).for_each(|_| file.write_all(&[7; 4096]).unwrap());
    file.as_file().sync_all().unwrap();
    file
}

/// True when the running kernel is as new as the one whose format this is.
fn is_new_enough() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map(|number| number.parse::<u32>().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(6), Some(18))
}

/// Checks that our names are the kernel's; an older kernel may have fewer.
fn assert_same_names(ours: &[String], theirs: &[String]) {
    let mut rest = ours.iter();
    assert!(theirs.iter().all(|name| rest.any(|ours| ours == name)), "{ours:?}\non the kernel: {theirs:?}");
    assert!(ours.len() == theirs.len() || !is_new_enough(), "{ours:?}\non the kernel: {theirs:?}");
}

/// What may differ: attributes that are about the kernel's own accounting.
const NOT_COMPARED: [&str; 2] = ["sd", "gu"];

/// Runs `act` on both sides and compares what `smaps` says of what it mapped, but for the sizes in `but`.
fn compare(pages: u64, but: &[&str], act: impl Fn(&mut dyn Side)) -> Vec<Entry> {
    let mut linux = Linux::new(pages);
    let mut terrane = Terrane::new(linux.base());
    act(&mut linux);
    act(&mut terrane);
    let (expected, found) = (linux.smaps(), terrane.smaps());
    let known: Vec<_> = expected.first().map(|entry| entry.names()).unwrap_or_default();
    let same = |entry: &Entry| {
        let mut entry = entry.clone();
        let compared = |name: &str| known.contains(&name) && !but.contains(&name);
        entry.sizes.retain(|(name, _)| compared(name));
        if let Some(flags) = &mut entry.flags {
            flags.retain(|flag| !NOT_COMPARED.contains(&flag.as_str()));
        }
        if entry.header.path == "/dev/zero (deleted)" {
            entry.header.inode = 0; // Each side counts for itself.
        }
        entry
    };
    assert_eq!(found.len(), expected.len(), "{found:#?}\non the kernel: {expected:#?}");
    for (found, expected) in found.iter().map(same).zip(expected.iter().map(same)) {
        assert_eq!(found, expected);
    }
    // The other texts agree with this one.
    let rollup = &parse::smaps(&terrane.text(ProcFile::SmapsRollup))[0];
    for name in rollup.names() {
        if !name.starts_with("Pss") && !name.starts_with("SwapPss") && name != "Locked" {
            assert_eq!(rollup.size(name), found.iter().map(|entry| entry.size(name)).sum::<u64>(), "{name}");
        }
    }
    let status = parse::status(&terrane.text(ProcFile::Status));
    let value = |name: &str| status.iter().find(|(other, _)| other == name).unwrap().1;
    assert_eq!((value("VmRSS"), value("RssAnon")), (rollup.size("Rss"), rollup.size("Anonymous")));
    assert_eq!(value("VmSize"), found.iter().map(|entry| entry.size("Size")).sum::<u64>());
    let headers: Vec<_> = found.iter().map(|entry| entry.header.clone()).collect();
    assert_eq!(parse::maps(&terrane.text(ProcFile::Maps)), headers);
    found
}

#[test]
fn the_kernels_own_texts_pass_the_parser() {
    assert!(parse::maps(&kernel("maps")).iter().any(|header| header.path == "[stack]"));
    assert!(parse::smaps(&kernel("smaps")).len() > 10);
    assert_eq!(parse::smaps(&kernel("smaps_rollup")).len(), 1);
    assert!(parse::status(&kernel("status")).len() > 15);
    assert!(parse::vmstat(&std::fs::read_to_string("/proc/vmstat").unwrap()).len() > 100);
}

#[test]
fn fields_have_the_kernels_names_and_order() {
    let mut terrane = Terrane::new(1 << 32);
    terrane.map(0, 4, RW, &What::Private);
    terrane.store(1);
    let names = |text: &str| -> Vec<String> {
        let entry = parse::smaps(text).into_iter().next().unwrap();
        // A key only where the processor has them.
        entry.names().into_iter().map(str::to_owned).collect()
    };
    assert_same_names(&names(&terrane.text(ProcFile::Smaps)), &names(&kernel("smaps")));
    let rollup = terrane.text(ProcFile::SmapsRollup);
    assert_same_names(&names(&rollup), &names(&kernel("smaps_rollup")));
    let header = &parse::smaps(&rollup)[0].header;
    let theirs = &parse::smaps(&kernel("smaps_rollup"))[0].header;
    assert_eq!((&header.perms, &header.path), (&theirs.perms, &theirs.path));
    assert_eq!((header.start, header.end), (1 << 32, (1 << 32) + (4 << 12)));
    let names =
        |text: &str| -> Vec<String> { parse::status(text).into_iter().map(|(name, _)| name).collect() };
    assert_same_names(&names(&terrane.text(ProcFile::Status)), &names(&kernel("status")));
    // Not all that the kernel counts; what it has too is in its order, and in front.
    let theirs = parse::vmstat(&std::fs::read_to_string("/proc/vmstat").unwrap());
    let place = |name: &str| theirs.iter().position(|(other, _)| other == name);
    let ours = parse::vmstat(&terrane.text(ProcFile::VmStat));
    let places: Vec<_> = ours.iter().map_while(|(name, _)| place(name)).collect();
    assert!(places.len() >= 20 && places.is_sorted(), "{ours:?}");
    assert!(ours[places.len()..].iter().all(|(name, _)| place(name).is_none()), "{ours:?}");
}

#[test]
fn private_memory_partly_touched() {
    let found = compare(16, &[], |side| {
        side.map(0, 8, RW, &What::Private);
        side.store(0);
        side.store(3);
        side.load(5);
        side.map(10, 2, READ, &What::Private);
        side.load(10);
    });
    assert_eq!((found[0].size("Rss"), found[1].size("Rss")), (8, 0));
}

#[test]
fn protected_memory_stays_resident() {
    compare(16, &[], |side| {
        side.map(0, 8, RW, &What::Private);
        (0..6).for_each(|page| side.store(page));
        side.protect(1, 2, NONE);
        side.protect(4, 4, READ);
        side.unmap(5, 1);
    });
}

#[test]
fn private_mapping_of_a_file() {
    let file = file(8);
    // The kernel calls pages that are mapped around a fault referenced.
    compare(16, &["Referenced"], |side| {
        side.map(0, 8, RW, &What::File { file: &file, shared: false });
        side.load(0);
        side.store(2);
        side.store(7);
    });
}

#[test]
fn shared_mapping_of_a_file() {
    let file = file(8);
    compare(16, &["Referenced"], |side| {
        side.map(0, 8, RW, &What::File { file: &file, shared: true });
        side.load(0);
        side.store(2);
        side.map(8, 4, READ, &What::File { file: &file, shared: true });
        side.load(8);
        side.protect(0, 2, READ);
    });
}

#[test]
fn pages_stored_to_at_once() {
    let file = file(8);
    compare(16, &[], |side| {
        side.map(0, 8, RW, &What::File { file: &file, shared: true });
        side.advise(0, 8, Advice::Random);
        (0..3).for_each(|page| side.store(page));
        side.advise(0, 1, Advice::DontNeed);
    });
}

#[test]
fn shared_memory() {
    compare(16, &[], |side| {
        side.map(0, 8, RW, &What::Shared);
        side.load(0);
        side.store(1);
        side.fork(&[2, 1]);
        side.store(2);
    });
}

#[test]
fn after_a_fork() {
    compare(16, &[], |side| {
        side.map(0, 8, RW, &What::Private);
        (0..6).for_each(|page| side.store(page));
        side.fork(&[0, 6]);
        side.store(1);
        side.fork(&[]);
        side.advise(5, 1, Advice::DontNeed);
    });
}

#[test]
fn advice_shows_in_the_flags() {
    compare(32, &[], |side| {
        for (n, advice) in [
            Advice::Sequential,
            Advice::Random,
            Advice::DontFork,
            Advice::WipeOnFork,
            Advice::DontDump,
            Advice::HugePage,
            Advice::NoHugePage,
        ]
        .into_iter()
        .enumerate()
        {
            side.map(n as u64 * 2, 2, RW, &What::Private);
            side.advise(n as u64 * 2, 2, advice);
        }
        side.map(20, 1, Prot::READ | Prot::EXEC, &What::Private);
        side.map(22, 1, Prot::EXEC, &What::Private);
        side.map(24, 1, RW, &What::Shared);
        side.map(26, 1, NONE, &What::Shared);
    });
}

#[test]
fn locked_memory() {
    let file = file(4);
    let found = compare(32, &["Referenced"], |side| {
        side.map(0, 8, RW, &What::Private);
        side.store(0);
        side.lock(2, 4, false);
        side.map(10, 8, RW, &What::Private);
        side.lock(10, 8, true);
        side.store(11);
        side.map(20, 4, READ, &What::File { file: &file, shared: true });
        side.lock(20, 4, false);
        side.fork(&[3, 11]);
    });
    assert!(found.iter().any(|entry| entry.size("Locked") > 0));
}

#[test]
fn moved_memory() {
    let file = file(4);
    compare(64, &["Referenced"], |side| {
        side.map(0, 8, RW, &What::Private);
        (0..5).for_each(|page| side.store(page));
        side.remap(1, 4, 20, 6);
        side.store(25);
        side.map(30, 4, RW, &What::File { file: &file, shared: true });
        side.store(30);
        side.fork(&[30, 20]);
        side.remap(30, 4, 40, 4);
        side.remap(20, 6, 50, 3);
    });
}

#[test]
fn guards_and_pages_that_are_not_needed() {
    // The kernel says that a page may be forgotten once it has come to it.
    let found = compare(32, &["LazyFree"], |side| {
        side.map(0, 16, RW, &What::Private);
        (0..12).for_each(|page| side.store(page));
        side.advise(1, 2, Advice::GuardInstall);
        side.advise(4, 4, Advice::Free);
        side.store(5);
        side.load(6);
        side.advise(8, 2, Advice::Cold);
        side.advise(14, 1, Advice::GuardInstall);
        side.advise(2, 1, Advice::GuardRemove);
    });
    assert_eq!(found[0].size("LazyFree"), 12);
}

#[test]
fn huge_pages() {
    let mut probe = Linux::new(1024);
    let touch = |side: &mut dyn Side| {
        side.map(0, 1024, RW, &What::Private);
        side.advise(0, 1024, Advice::HugePage);
        side.store(3);
    };
    touch(&mut probe);
    if probe.smaps()[0].size("AnonHugePages") == 0 {
        eprintln!("the kernel gives no huge pages");
        return;
    }
    drop(probe);
    let found = compare(1024, &[], |side| {
        touch(side);
        side.fork(&[3, 4]);
        side.store(600);
        side.unmap(1000, 24);
    });
    assert_eq!(found[0].eligible, Some(1));
}

#[test]
fn names_and_marks() {
    let machine = machine(16, 2);
    let (cpu, space) = cpu_with_space(&machine);
    let heap = 1 << 32;
    space.set_heap(cpu.core(), heap).unwrap();
    assert_eq!(space.brk(cpu.core(), heap + 5000), heap + 5000);
    let memfd = machine.memfd("two\nlines", 8192).unwrap();
    let at = space.map(cpu.core(), MapRequest::object(&memfd, 4096, 4096, READ, true)).unwrap();
    let path = tempfile::tempdir().unwrap();
    let path = path.path().join("a file\nwith \\ in it");
    std::fs::write(&path, [1; 4096]).unwrap();
    let object = machine.open(&path, false).unwrap();
    let file = space.map(cpu.core(), MapRequest::object(&object, 0, 4096, READ, false)).unwrap();
    std::fs::remove_file(&path).unwrap();
    object.identity().unwrap().set_deleted();
    let stack = MapRequest::anonymous(8192, RW).with(MapFlags::GROWSDOWN);
    let stack = space.map(cpu.core(), stack.fixed(1 << 40)).unwrap();
    let text = cpu.proc_text(&space, ProcFile::Maps).unwrap();
    let list = parse::maps(&text);
    let path_at = |addr: u64| list.iter().find(|header| header.start == addr).unwrap().path.clone();
    assert_eq!(path_at(heap), "[heap]");
    assert_eq!(path_at(at), "/memfd:two\\012lines (deleted)");
    let shown = path.to_str().unwrap().replace('\n', "\\012");
    assert_eq!(path_at(file), format!("{shown} (deleted)"));
    assert_eq!(path_at(stack), "[stack]");
    // The listing knows an object that is unmapped and gone by the time it is asked about.
    let listing = space.listing(cpu.core()).unwrap();
    drop((object, memfd));
    space.unmap(cpu.core(), at, 4096).unwrap();
    cpu.core().quiesce();
    let number = listing.mappings.iter().find(|mapping| mapping.range.start == at).unwrap().object;
    assert_eq!(listing.identity(number).unwrap().path(), "/memfd:two\nlines");
}

/// Sums of the parser that other programs use.
fn with_procfs(maps: &MemoryMaps) -> (usize, u64) {
    (maps.len(), maps.iter().filter_map(|map| map.extension.map.get("Rss")).sum())
}

#[test]
fn the_parser_of_others_reads_both() {
    let theirs = MemoryMaps::from_buf_read(kernel("smaps").as_bytes()).unwrap();
    assert!(with_procfs(&theirs).1 > 0);
    let mut terrane = Terrane::new(1 << 32);
    let file = file(4);
    terrane.map(0, 4, RW, &What::Private);
    terrane.map(8, 4, READ, &What::File { file: &file, shared: true });
    (0..3).for_each(|page| terrane.store(page));
    terrane.load(8);
    let ours = MemoryMaps::from_buf_read(terrane.text(ProcFile::Smaps).as_bytes()).unwrap();
    assert_eq!(with_procfs(&ours), (2, 7 << 12));
    let map = ours.iter().last().unwrap();
    assert_eq!(map.pathname, MMapPath::Path(file.path().to_owned()));
    let mine = |text: &str| parse::smaps(text).into_iter().next_back().unwrap();
    let same = mine(&terrane.text(ProcFile::Smaps));
    assert_eq!(
        (map.address.0, map.address.1, map.inode),
        (same.header.start, same.header.end, same.header.inode)
    );
    for (name, value) in &same.sizes {
        assert_eq!(map.extension.map[name], value << 10, "{name}");
    }
    let keys: std::collections::BTreeSet<_> = map.extension.map.keys().collect();
    let theirs: std::collections::BTreeSet<_> = theirs.iter().next().unwrap().extension.map.keys().collect();
    assert!(keys.is_superset(&theirs) && (keys == theirs || !is_new_enough()));
    let rollup = terrane.text(ProcFile::SmapsRollup);
    let rollup = SmapsRollup::from_buf_read(rollup.as_bytes()).unwrap().memory_map_rollup;
    assert_eq!(rollup.iter().next().unwrap().pathname, MMapPath::Rollup);
    assert_eq!(with_procfs(&rollup), (1, 7 << 12));
    assert_eq!(MemoryMaps::from_buf_read(terrane.text(ProcFile::Maps).as_bytes()).unwrap().len(), 2);
    // The lines about memory in place of the kernel's own.
    let mut text = String::new();
    for line in kernel("status").lines() {
        if line.starts_with("VmPeak") {
            text.push_str(&terrane.text(ProcFile::Status));
        }
        let memory = ["Vm", "Rss", "Huge", "Core", "THP"].iter().any(|start| line.starts_with(start));
        if !memory {
            text.push_str(line);
            text.push('\n');
        }
    }
    let status = Status::from_buf_read(text.as_bytes()).unwrap();
    assert_eq!((status.vmsize, status.vmrss), (Some(32), Some(28)));
    assert_eq!((status.rssanon, status.rssfile, status.vmdata), (Some(12), Some(16), Some(16)));
    assert_eq!((status.thp_enabled, status.core_dumping), (Some(true), Some(false)));
}
