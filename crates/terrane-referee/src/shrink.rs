//! Making a script that shows a difference small: fewer operations (delta debugging), then simpler arguments.

use crate::judge::What;
use crate::operation::{Kind, Op};
use crate::script::Script;
use crate::{deliberate, machine};
use terrane::PAGE_SIZE;

/// Scripts that are tried at most.
const TRIES: usize = 4000;

/// Shrinks `script`, for which `shows` says what differs and after which operation. Any difference of the same sort counts as the
/// same.
pub fn shrink(script: &Script, mut shows: impl FnMut(&Script) -> Option<(What, usize)>) -> Script {
    let mut tries = 0;
    let Some((what, at)) = shows(script) else { return script.clone() };
    // The kind of the operation after which they differ: what differs after another is another difference.
    let kind_at = |script: &Script, at: usize| script.ops.get(at).map(Op::kind);
    let kind = kind_at(script, at);
    let mut fails = |script: &Script| {
        tries += 1;
        if tries > TRIES {
            return None;
        }
        let same = |&(found, at): &(What, usize)| {
            found == what && (kind_at(script, at) == kind || what != What::Outcome)
        };
        shows(script).filter(same).map(|(_, at)| at)
    };
    let mut best = script.clone();
    loop {
        let before = (best.ops.len(), best.clone());
        fewer(&mut best, &mut fails);
        simpler(&mut best, &mut fails);
        if before == (best.ops.len(), best.clone()) {
            return best;
        }
    }
}

fn cut(script: &mut Script, at: usize) {
    script.ops.truncate(at + 1);
}

fn fewer(best: &mut Script, fails: &mut impl FnMut(&Script) -> Option<usize>) {
    if let Some(at) = fails(best) {
        cut(best, at);
    }
    let mut piece = (best.ops.len() / 2).max(1);
    loop {
        let mut at = 0;
        while at < best.ops.len() {
            let mut candidate = best.clone();
            candidate.ops.drain(at..(at + piece).min(best.ops.len()));
            match fails(&candidate) {
                Some(end) => {
                    cut(&mut candidate, end);
                    *best = candidate;
                }
                None => at += piece,
            }
        }
        if piece == 1 {
            return;
        }
        piece /= 2;
    }
}

/// Words to try for one that means `kind`, simplest first.
fn candidates(kind: Kind, word: u64) -> Vec<u64> {
    let mut list = match kind {
        Kind::Addr => vec![0, word & !(PAGE_SIZE - 1)],
        Kind::Len => vec![
            PAGE_SIZE,
            2 * PAGE_SIZE,
            (word / 2) & !(PAGE_SIZE - 1),
            word.wrapping_sub(PAGE_SIZE),
            word & !(PAGE_SIZE - 1),
            1,
        ],
        Kind::Offset => vec![0, PAGE_SIZE, word & !(PAGE_SIZE - 1)],
        Kind::Prot => vec![3, 1],
        Kind::Seed => vec![1],
        Kind::File | Kind::Process => vec![0],
        // One bit less each.
        _ => (0..64).filter(|bit| word >> bit & 1 == 1).map(|bit| word & !(1 << bit)).collect(),
    };
    // Never back to what is larger, or two simple words would take turns for ever.
    list.retain(
        |&candidate| if kind == Kind::Prot { word != 3 && candidate != word } else { candidate < word },
    );
    list
}

fn simpler(best: &mut Script, fails: &mut impl FnMut(&Script) -> Option<usize>) {
    let mut attempt = |best: &mut Script, candidate: Script| {
        if candidate.setup.is_valid()
            && candidate.ops.iter().all(|op| {
                candidate.setup.allows(op)
                    && machine::is_supported(op)
                    && !deliberate::excludes(op, &candidate.setup)
            })
            && candidate != *best
            && fails(&candidate).is_some()
        {
            *best = candidate;
        }
    };
    let limits = crate::script::Setup { memlock: None, mapped: None, ..best.setup };
    let candidate = Script { setup: limits, ops: best.ops.clone() };
    attempt(best, candidate);
    for at in 0..best.ops.len() {
        for (place, &(_, kind)) in Op::signature(best.ops[at].kind()).iter().enumerate() {
            let word = best.ops[at].words()[place];
            // What is simple already stays.
            if (kind == Kind::Prot && word == 3) || (kind == Kind::Seed && word == 1) {
                continue;
            }
            for simple in candidates(kind, word) {
                let Some(op) = best.ops.get(at) else { break };
                if op.words()[place] != word {
                    break;
                }
                let mut words = op.words();
                words[place] = simple;
                let mut candidate = best.clone();
                if let Some(op) = Op::from_words(op.kind(), &words) {
                    candidate.ops[at] = op;
                    attempt(best, candidate);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::script::Setup;

    #[test]
    fn what_matters_is_left() {
        let setup = Setup { memlock: Some(3), ..Setup::of_pages(64) };
        let ops = (0..200u64)
            .map(|n| Op::Store { addr: setup.start + 7 * n, len: 1 + 13 * n, seed: n })
            .collect::<Vec<_>>();
        let script = Script { setup, ops };
        let mut tried = 0;
        // Wrong after a long store that follows one with an odd seed.
        let small = shrink(&script, |script| {
            tried += 1;
            let odd =
                script.ops.iter().position(|op| matches!(op, Op::Store { seed, .. } if seed % 2 == 1))?;
            let long = script.ops[odd + 1..]
                .iter()
                .position(|op| matches!(op, Op::Store { len, .. } if *len > 1000))?;
            Some((What::Outcome, odd + 1 + long))
        });
        assert_eq!(small.ops.len(), 2, "{small}");
        assert_eq!(small.setup.memlock, None);
        assert!(matches!(small.ops[0], Op::Store { seed: 1, .. }), "{small}");
        assert!(tried < 500, "{tried}");
    }
}
