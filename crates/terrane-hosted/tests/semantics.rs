//! The tables of `docs/semantics.md` against the code.

mod common;

use common::*;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use terrane::object::Object;
use terrane::space::linux::OpenFile;
use terrane::vma::RemapFlags;

const STATES: [&str; 5] = ["done", "partial", "differs", "refused", "absent"];

/// A row of a table: its cells by the names of their columns.
struct Row {
    section: String,
    cells: BTreeMap<String, String>,
    line: usize,
}

impl Row {
    fn cell(&self, column: &str) -> &str {
        self.cells.get(column).map_or("", String::as_str)
    }

    /// What stands in the cell between backticks.
    fn code(&self, column: &str) -> &str {
        self.cell(column).split('`').nth(1).unwrap_or("")
    }

    fn name(&self) -> &str {
        ["call", "flag", "limit"]
            .map(|column| self.code(column))
            .into_iter()
            .find(|name| !name.is_empty())
            .unwrap_or("")
    }

    fn number(&self) -> u64 {
        let text = self.cell("number");
        let number = match text.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16),
            None => text.parse(),
        };
        number.unwrap_or_else(|_| panic!("line {}: no number: {text:?}", self.line))
    }

    fn is_taken(&self) -> bool {
        ["done", "partial", "differs"].contains(&self.cell("state"))
    }

    /// The type that the heading names.
    fn kind(&self) -> Option<&str> {
        self.section.rsplit_once("(`")?.1.strip_suffix("`)")
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn document() -> String {
    fs::read_to_string(root().join("docs/semantics.md")).unwrap()
}

/// All rows that have a state.
fn rows() -> Vec<Row> {
    let (mut section, mut columns, mut rows) = (String::new(), Vec::new(), Vec::new());
    for (n, line) in document().lines().enumerate() {
        if let Some(heading) = line.strip_prefix("## ") {
            section = heading.to_owned();
        }
        let Some(inside) = line.strip_prefix('|').and_then(|line| line.strip_suffix('|')) else {
            columns.clear();
            continue;
        };
        let cells: Vec<_> = inside.split('|').map(|cell| cell.trim().to_owned()).collect();
        if columns.is_empty() {
            columns = cells;
        } else if !cells.iter().all(|cell| cell.starts_with("---"))
            && columns.iter().any(|column| column == "state")
        {
            assert_eq!(cells.len(), columns.len(), "line {}", n + 1);
            let cells = columns.iter().cloned().zip(cells).collect();
            rows.push(Row { section: section.clone(), cells, line: n + 1 });
        }
    }
    // The table that explains the states comes first.
    rows.retain(|row| !row.section.is_empty());
    rows
}

/// The library's sources, without its tests.
fn sources() -> Vec<(PathBuf, String)> {
    let (mut list, mut open) = (Vec::new(), vec![root().join("crates/terrane/src")]);
    while let Some(path) = open.pop() {
        if path.is_dir() {
            let inside = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path());
            open.extend(inside.filter(|path| !path.ends_with("tests") && !path.ends_with("tests.rs")));
        } else {
            let text = fs::read_to_string(&path).unwrap();
            list.push((path, text));
        }
    }
    list
}

/// The numbers that a type takes: the constants of a set of flags, or what `from_linux` of an enum knows. For a name that
/// ends in `_`, those of the public constants that begin like it.
fn numbers_of(kind: &str) -> Option<Vec<u64>> {
    let sources = sources();
    let number = |text: &str| {
        let text = text.trim().replace('_', "");
        let (value, shift) = text.split_once("<<").unwrap_or((&text, "0"));
        let value = value.trim();
        let value = match value.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16),
            None => value.parse(),
        };
        Some(value.ok()? << shift.trim().parse::<u32>().ok()?)
    };
    if kind.ends_with('_') {
        let begin = format!("pub const {kind}");
        let lines = sources.iter().flat_map(|(_, text)| text.lines());
        let values = lines.filter(|line| line.starts_with(&begin)).filter_map(|line| line.split_once('='));
        return Some(values.filter_map(|(_, value)| number(value.trim_end_matches(';'))).collect());
    }
    for (_, text) in &sources {
        if let Some((_, body)) = text.split_once(&format!("pub struct {kind}: ")) {
            let body = body.split_once("\n    }").unwrap().0;
            let constants = body.lines().filter_map(|line| line.trim().strip_prefix("const "));
            let values = constants.map(|line| line.split_once('=').unwrap().1.trim_end_matches(';'));
            return Some(
                values.map(|value| number(value).unwrap_or_else(|| panic!("{kind}: {value}"))).collect(),
            );
        }
        if text.contains(&format!("Option<{kind}> {{")) && text.contains("fn from_linux(") {
            let arms = text.lines().filter_map(|line| line.trim().split_once(&format!(" => {kind}::")));
            return Some(arms.filter_map(|(value, _)| number(value)).collect());
        }
    }
    None
}

/// Types whose numbers are given to a call, which may take more than the type has.
const BY_CALL: [&str; 2] = ["MapFlags", "Prot"];

/// Numbers above those that Linux has: the library's own.
const OWN: u64 = 0x8000_0000;

#[test]
fn every_row_has_one_of_the_states() {
    let rows = rows();
    assert!(rows.len() > 80);
    for row in &rows {
        assert!(STATES.contains(&row.cell("state")), "line {}: {}", row.line, row.cell("state"));
        if row.cell("state") == "refused" {
            assert!(row.code("remark").starts_with('E'), "line {}: with which errno?", row.line);
        }
        if row.cell("state") == "partial" || row.cell("state") == "differs" {
            assert!(!row.cell("remark").is_empty(), "line {}: how?", row.line);
        }
    }
    let differences = document().split_once("## Deliberate differences").unwrap().1.to_owned();
    for row in rows.iter().filter(|row| row.cell("state") == "differs") {
        assert!(differences.contains(&format!("`{}`", row.name())), "line {}: no reason given", row.line);
    }
}

#[test]
fn the_types_take_what_the_tables_say() {
    let rows = rows();
    let mut kinds: Vec<_> = rows.iter().filter_map(Row::kind).collect();
    kinds.dedup();
    assert!(kinds.contains(&"MapFlags") && kinds.contains(&"Advice"));
    for kind in kinds {
        let known = numbers_of(kind).unwrap_or_default();
        let of_kind: Vec<_> =
            rows.iter().filter(|row| row.kind() == Some(kind) && !row.code("flag").is_empty()).collect();
        for row in &of_kind {
            let (name, number) = (row.code("flag"), row.number());
            if BY_CALL.contains(&kind) || row.cell("state") == "refused" {
                continue;
            }
            let taken = known.contains(&number);
            assert_eq!(row.is_taken(), taken, "line {}: `{name}` is {}", row.line, row.cell("state"));
        }
        for number in known.into_iter().filter(|&number| number < OWN) {
            assert!(of_kind.iter().any(|row| row.number() == number), "{kind}: no row for {number:#x}");
        }
    }
}

#[test]
fn every_call_has_its_row() {
    let (rows, document, sources) = (rows(), document(), sources());
    let calls: Vec<_> = rows.iter().filter(|row| row.section == "Calls").collect();
    let declared = |name: &str| {
        let (of, name) = name.rsplit_once("::").unwrap_or(("AddressSpace", name));
        let function = [format!("pub fn {name}("), format!("pub fn {name}<")];
        let implementation = format!(" {of}<H>");
        sources
            .iter()
            .any(|(_, text)| text.contains(&implementation) && function.iter().any(|f| text.contains(f)))
    };
    for row in &calls {
        let entry = row.code("entry point");
        assert_eq!(entry.is_empty(), row.cell("state") == "absent", "line {}", row.line);
        assert!(entry.is_empty() || declared(entry), "line {}: there is no `{entry}`", row.line);
    }
    // And the other way round.
    let own = document.split_once("Calls of Terrane's own").unwrap().1.split_once("\n\n").unwrap().0;
    let own: Vec<_> = own.split('`').skip(1).step_by(2).collect();
    for (path, text) in sources.iter().filter(|(path, _)| path.to_str().unwrap().contains("src/space/")) {
        let mut inside = false;
        for line in text.lines() {
            if line.starts_with("impl<") {
                inside = line.contains(" AddressSpace<H> {");
            }
            let Some(function) = line.strip_prefix("    pub fn ").filter(|_| inside) else { continue };
            let name = function.split(['(', '<']).next().unwrap();
            let listed = own.contains(&name) || calls.iter().any(|row| row.code("entry point") == name);
            assert!(listed, "no row for `{name}` of {}", path.display());
        }
    }
    let config = &sources.iter().find(|(path, _)| path.ends_with("space/config.rs")).unwrap().1;
    let limits: Vec<_> = rows.iter().filter(|row| row.section == "Limits").collect();
    for row in &limits {
        let field = row.code("field of `SpaceConfig`");
        let field =
            if field.is_empty() { row.cell("field of `SpaceConfig`").trim_matches('`') } else { field };
        assert_eq!(field.is_empty(), row.cell("state") == "absent", "line {}", row.line);
        assert!(field.is_empty() || config.contains(&format!("pub {field}:")), "line {}", row.line);
    }
    for line in config.lines().filter_map(|line| line.trim().strip_prefix("pub ")) {
        if let Some((field, _)) = line.split_once(':').filter(|(field, _)| field.ends_with("_limit")) {
            assert!(
                limits.iter().any(|row| row.cell("field of `SpaceConfig`").contains(field)),
                "no row for {field}"
            );
        }
    }
}

macro_rules! numbers {
    ($($name:ident)*) => { [$((stringify!($name), libc::$name as u64),)*] };
}

#[test]
fn names_have_linuxs_numbers() {
    let known: BTreeMap<_, _> = numbers!(
        PROT_READ PROT_WRITE PROT_EXEC PROT_GROWSDOWN PROT_GROWSUP
        MAP_SHARED MAP_PRIVATE MAP_SHARED_VALIDATE MAP_FIXED MAP_ANONYMOUS MAP_32BIT MAP_GROWSDOWN MAP_DENYWRITE
        MAP_EXECUTABLE MAP_LOCKED MAP_NORESERVE MAP_POPULATE MAP_NONBLOCK MAP_STACK MAP_HUGETLB MAP_SYNC
        MAP_FIXED_NOREPLACE MREMAP_MAYMOVE MREMAP_FIXED MREMAP_DONTUNMAP
        MADV_NORMAL MADV_RANDOM MADV_SEQUENTIAL MADV_WILLNEED MADV_DONTNEED MADV_FREE MADV_REMOVE MADV_DONTFORK
        MADV_DOFORK MADV_MERGEABLE MADV_UNMERGEABLE MADV_HUGEPAGE MADV_NOHUGEPAGE MADV_DONTDUMP MADV_DODUMP
        MADV_WIPEONFORK MADV_KEEPONFORK MADV_COLD MADV_PAGEOUT MADV_POPULATE_READ MADV_POPULATE_WRITE MADV_HWPOISON
        MLOCK_ONFAULT MCL_CURRENT MCL_FUTURE MCL_ONFAULT MS_ASYNC MS_INVALIDATE MS_SYNC
    )
    .into_iter()
    .collect();
    let rows = rows();
    for (name, number) in &known {
        let row = rows.iter().find(|row| row.code("flag") == *name);
        assert_eq!(row.unwrap_or_else(|| panic!("no row for {name}")).number(), *number, "{name}");
    }
}

fn stage() -> (HostedMachine, Cpu, Shared<Space>) {
    let machine = machine(64, 2);
    let (cpu, space) = cpu_with_space(&machine);
    (machine, cpu, space)
}

fn check(row: &Row, result: Result<(), Error>) {
    match result {
        Ok(()) => assert!(row.is_taken(), "line {}: taken", row.line),
        Err(error) => {
            assert_eq!(row.cell("state"), "refused", "line {}: {error}", row.line);
            assert_eq!(row.code("remark"), error.name(), "line {}", row.line);
        }
    }
}

#[test]
fn mmap_takes_and_refuses_what_the_table_says() {
    const AT: u64 = 1 << 32;
    const LEN: u64 = 2 << 20;
    for row in rows().iter().filter(|row| row.kind() == Some("MapFlags") && !row.code("flag").is_empty()) {
        let (machine, cpu, space) = stage();
        let number = row.number();
        // What is validated are the flags of a file's mapping.
        let object = Object::shared_memory(machine.machine(), LEN).unwrap();
        let file = OpenFile { object: &object, readable: true, writable: true, append_only: false };
        let file = (number == libc::MAP_SHARED_VALIDATE as u64).then_some(file);
        let kind = if number & 0xf == 0 { libc::MAP_PRIVATE as u64 } else { 0 };
        let memory = if file.is_none() { libc::MAP_ANONYMOUS as u64 } else { 0 };
        let flags = number | kind | memory;
        let result = space.mmap(cpu.core(), AT, LEN, 3, flags, file.as_ref(), 0);
        check(row, result.map(drop));
    }
}

#[test]
fn advise_takes_and_refuses_what_the_table_says() {
    let rows = rows();
    let row_of = |number: i32| {
        let number = number as u64;
        rows.iter().find(|row| row.kind() == Some("Advice") && row.number() == number)
    };
    for number in 0..1000 {
        let advice = Advice::from_linux(number);
        let taken = row_of(number).is_some_and(Row::is_taken);
        assert_eq!(advice.is_some(), taken, "{number}: {advice:?}");
        let Some(advice) = advice else { continue };
        let (_machine, mut cpu, space) = stage();
        let private = MapRequest { align: 2 << 20, ..MapRequest::anonymous(2 << 20, RW) };
        let private = space.map(cpu.core(), private).unwrap();
        cpu.store_u64(private, 1).unwrap();
        let shared = space.map(cpu.core(), MapRequest::shared_anonymous(2 << 20, RW)).unwrap();
        let results = [private, shared].map(|at| space.advise(cpu.core(), at, 2 << 20, advice));
        assert!(results.contains(&Ok(())), "{advice:?} is taken, and does nothing: {results:?}");
    }
    assert_eq!(Advice::from_linux(-1), None);
}

#[test]
fn mprotect_takes_and_refuses_what_the_table_says() {
    for row in rows().iter().filter(|row| row.kind() == Some("Prot")) {
        let (_machine, cpu, space) = stage();
        let stack = MapRequest::anonymous(8192, RW).with(MapFlags::GROWSDOWN);
        let at = space.map(cpu.core(), stack.fixed(1 << 32)).unwrap();
        check(row, space.mprotect(cpu.core(), at, 8192, row.number()));
    }
}

#[test]
fn msync_takes_what_the_table_says() {
    let rows = rows();
    for number in [1, 2, 4, 8, 16] {
        let (_machine, cpu, space) = stage();
        let at = space.map(cpu.core(), MapRequest::shared_anonymous(8192, RW)).unwrap();
        let taken = rows
            .iter()
            .any(|row| row.kind() == Some("SyncFlags") && row.number() == number && row.is_taken());
        assert_eq!(space.msync(cpu.core(), at, 8192, number as u32).is_ok(), taken, "{number:#x}");
    }
}

#[test]
fn locks_take_what_the_tables_say() {
    let rows = rows();
    let taken = |kind: &str, number: u32| {
        rows.iter().any(|row| row.kind() == Some(kind) && row.number() == u64::from(number) && row.is_taken())
    };
    for number in [1, 2, 4, 8, 16, 1 << 31] {
        let (_machine, cpu, space) = stage();
        let at = space.map(cpu.core(), MapRequest::anonymous(8192, RW)).unwrap();
        let locked = space.mlock2(cpu.core(), at, 8192, number);
        assert_eq!(locked.is_ok(), taken("LockFlags", number), "mlock2 with {number:#x}");
        // With the one that asks for something now, for those that say how.
        let all = space.mlockall(cpu.core(), number | 1);
        assert_eq!(all.is_ok(), taken("LockAllFlags", number), "mlockall with {number:#x}");
    }
}

#[test]
fn moves_take_what_the_table_says() {
    let rows = rows();
    let taken = |number: u32| {
        let of_kind = rows.iter().filter(|row| row.kind() == Some("RemapFlags"));
        of_kind.into_iter().any(|row| row.number() == u64::from(number) && row.is_taken())
    };
    for number in [1, 2, 4, 8, 16] {
        let (_machine, cpu, space) = stage();
        let at = space.map(cpu.core(), MapRequest::anonymous(8192, RW)).unwrap();
        // To move is what the others are about.
        let flags = RemapFlags::from_bits_retain(number | 1);
        let moved = space.remap(cpu.core(), at, 8192, 8192, flags, 1 << 32);
        assert_eq!(moved.is_ok(), taken(number), "{flags:?}: {moved:?}");
    }
}
