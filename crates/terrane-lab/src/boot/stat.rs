//! A guest's counters, in the manner of `perf stat`.

use crate::report::table::thousands;
use std::fmt::Write as _;
use std::time::Duration;

/// The counters that come first, by Terrane's names, and how `perf` would call them.
const FIRST: [(&str, &str); 8] = [
    ("pgfault", "page-faults"),
    ("speculative_pgfault", "speculative-faults"),
    ("spf_vma_changed", "spf_vma_changed"),
    ("spf_vma_noanon", "spf_vma_noanon"),
    ("spf_vma_notsup", "spf_vma_notsup"),
    ("spf_vma_access", "spf_vma_access"),
    ("spf_pmd_changed", "spf_pmd_changed"),
    ("nr_tlb_remote_flush", "tlb-shoot-downs"),
];

/// The counters as text: those that the sources name always, of the others those that counted something.
pub fn text(program: &str, stats: &[(String, u64)], took: Option<Duration>) -> String {
    let mut text = format!("\n Counters of the guest for ‘{program}’:\n\n");
    let value = |name: &str| stats.iter().find(|(known, _)| known == name).map(|&(_, value)| value);
    let faults = value("pgfault").unwrap_or(0);
    for (name, shown) in FIRST {
        let count = value(name).unwrap_or(0);
        let note = match (name, took) {
            ("pgfault", Some(took)) if !took.is_zero() => {
                format!("{:>12.0} /s", faults as f64 / took.as_secs_f64())
            }
            ("speculative_pgfault", _) if faults > 0 => {
                format!("{:>12.1} % of all", count as f64 * 100.0 / faults as f64)
            }
            _ => String::new(),
        };
        line(&mut text, count, shown, &note);
    }
    for (name, count) in stats {
        if *count > 0 && !FIRST.iter().any(|(known, _)| known == name) {
            line(&mut text, *count, name, "");
        }
    }
    if let Some(took) = took {
        let _ = writeln!(text, "\n{:>18.6} seconds, by the host’s clock\n", took.as_secs_f64());
    }
    text
}

fn line(text: &mut String, count: u64, name: &str, note: &str) {
    let line = format!("{:>18}      {name:<28}", thousands(count));
    let _ = match note {
        "" => writeln!(text, "{}", line.trim_end()),
        _ => writeln!(text, "{line}# {note}"),
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_reads_as_perf_stat_does() {
        let stats = [("speculative_pgfault", 900), ("pgfault", 1000), ("pgcow", 0), ("pgreuse", 1234)]
            .map(|(name, value)| (name.to_owned(), value));
        let text = text("a b", &stats, Some(Duration::from_millis(500)));
        let lines: Vec<_> = text.lines().map(str::trim).collect();
        assert_eq!(lines[1], "Counters of the guest for ‘a b’:");
        let faults = lines.iter().find(|line| line.contains("page-faults")).unwrap();
        assert!(faults.starts_with("1,000 ") && faults.ends_with("2000 /s"), "{text}");
        assert!(lines.iter().any(|line| line.ends_with("90.0 % of all")), "{text}");
        assert!(lines.contains(&"0      spf_vma_changed") && !text.contains("pgcow"), "{text}");
        assert!(lines.iter().any(|line| line.starts_with("1,234 ") && line.ends_with("pgreuse")), "{text}");
        assert!(text.contains("0.500000 seconds"));
    }
}
