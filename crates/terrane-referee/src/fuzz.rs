//! Bytes become operations, and Terrane is checked against the [`Model`]: what a fuzzer calls.
//!
//! The bytes are read greedily: a kind, then as much of each word as its meaning needs. So a fuzzer that changes a byte changes an
//! operation, not all that follow.

use crate::machine::Terrane;
use crate::model::Model;
use crate::operation::{DATA, Kind, NO_FILE, Op, Outcome, WORDS};
use crate::script::{PROCESSES, READ_ONLY, Script, Setup, line};
use terrane::PAGE_SIZE;

/// Pages of the window of a fuzzer's scripts.
const PAGES: u64 = 24;

/// Operations of a script at most.
const OPERATIONS: usize = 256;

/// The kinds that the model knows.
const KINDS: [&str; 14] = [
    "mmap",
    "munmap",
    "mprotect",
    "madvise",
    "load",
    "store",
    "load8",
    "store8",
    "ftruncate",
    "pwrite",
    "pread",
    "fork",
    "switch",
    "exit",
];

/// Reads a script from bytes. Any bytes make one; operations that the model does not know are left out.
pub fn decode(bytes: &[u8]) -> Script {
    let setup = Setup::of_pages(PAGES);
    let mut rest = bytes.iter().copied();
    let mut ops = Vec::new();
    let model = Model::new(&setup);
    while let (Some(first), true) = (rest.next(), ops.len() < OPERATIONS) {
        let name = KINDS[usize::from(first) % KINDS.len()];
        let Some(kind) = Op::NAMES.iter().position(|known| *known == name) else { break };
        let mut words = [0; WORDS];
        let is_access = matches!(name, "load" | "store" | "load8" | "store8");
        for (place, &(_, meaning)) in words.iter_mut().zip(Op::signature(kind)) {
            let mut next = || u64::from(rest.next().unwrap_or(0));
            *place = match meaning {
                Kind::Addr if is_access => {
                    setup.start + next() % PAGES * PAGE_SIZE + next() * 16 + next() % 16
                }
                Kind::Addr => setup.start + next() % PAGES * PAGE_SIZE,
                Kind::Len if is_access => (next() << 8 | next()) % (DATA as u64 / 2),
                Kind::Len if name == "ftruncate" || name.starts_with('p') => {
                    (next() << 8 | next()) % DATA as u64
                }
                Kind::Len => (1 + next() % 8) * PAGE_SIZE,
                Kind::Offset => next() % 8 * PAGE_SIZE + if name == "mmap" { 0 } else { next() },
                Kind::Prot => next() % 8,
                Kind::Map => {
                    let kinds = [libc::MAP_PRIVATE, libc::MAP_SHARED];
                    (kinds[next() as usize % 2] | libc::MAP_FIXED) as u64
                }
                Kind::Advice => 4,
                Kind::File => next() % (READ_ONLY as u64 + 1),
                Kind::Process => next() % PROCESSES as u64,
                _ => next(),
            };
        }
        // The number behind the last file stands for memory.
        if let (Some(Op::Map { .. }), true) = (Op::from_words(kind, &words), words[4] == READ_ONLY as u64) {
            words[3] |= libc::MAP_ANONYMOUS as u64;
            (words[4], words[5]) = (NO_FILE, 0);
        }
        let op = Op::from_words(kind, &words);
        ops.extend(op.filter(|op| setup.allows(op) && model.knows(op)));
    }
    Script { setup, ops }
}

/// Runs a script on Terrane and on the model.
///
/// # Errors
/// The script with what differs after its last operation.
pub fn check(terrane: &mut Terrane, script: &Script) -> Result<(), String> {
    terrane.begin(&script.setup, None)?;
    let mut model = Model::new(&script.setup);
    let compare = |at: usize, op: &Op, model: &Outcome, terrane: &Outcome| {
        if model == terrane {
            return Ok(());
        }
        let script = Script { setup: script.setup, ops: script.ops[..at.min(script.ops.len())].to_vec() };
        Err(format!(
            "{script}# then {}\n# model: {model:x?}\n# Terrane: {terrane:x?}",
            line(op, &script.setup)
        ))
    };
    for (at, op) in script.ops.iter().enumerate() {
        if model.is_pending(op) {
            continue;
        }
        let acting = model.acting();
        let child = model.free_process();
        let Some(expected) = model.act(op) else { continue };
        match (op, &expected) {
            (Op::Fork {}, Outcome::Value(..)) => terrane.fork(acting, child.unwrap_or(0))?,
            (Op::Exit {}, Outcome::Value(..)) => terrane.exit(acting),
            (Op::Fork {} | Op::Exit {} | Op::Switch { .. }, _) => {}
            _ => compare(at, op, &expected, &terrane.act(acting, op)?)?,
        }
    }
    // Every byte that can be loaded, of every process and file.
    let at = script.ops.len();
    for process in 0..PROCESSES as u64 {
        if model.act(&Op::Switch { process }) == Some(Outcome::Nothing) {
            continue;
        }
        for page in 0..script.setup.pages {
            let op = Op::Load { addr: script.setup.start + page * PAGE_SIZE, len: PAGE_SIZE };
            if let Some(expected) = model.act(&op) {
                compare(at, &op, &expected, &terrane.act(process as usize, &op)?)?;
            }
        }
    }
    for (file, part) in (0..READ_ONLY as u64).flat_map(|file| (0..8).map(move |part| (file, part))) {
        let op = Op::Read { file, offset: part * DATA as u64, len: DATA as u64 };
        if let Some(expected) = model.act(&op) {
            compare(at, &op, &expected, &terrane.act(model.acting(), &op)?)?;
        }
    }
    match terrane.lost_frames() {
        0 => Ok(()),
        lost => Err(format!("{script}# {lost} frames are not free again")),
    }
}
