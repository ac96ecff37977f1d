//! The report model. Its JSON form is documented in `docs/json.md`; the two are kept together by a test.

pub mod json;
pub mod plot;
pub mod table;

use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};

use std::fmt;
use std::marker::PhantomData;

/// The version of the JSON form: raised when a field goes or changes its meaning, not when one is added.
pub const SCHEMA: u32 = 1;

/// Everything that one call of the command measured.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The version of Terrane.
    pub terrane: String,
    /// Where it was measured.
    pub machine: Machine,
    /// The command line that measured it.
    pub command: String,
    /// What was measured, in order.
    pub experiments: Vec<Experiment>,
}

/// The machine that a report was measured on.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Machine {
    /// Processors that the command could use.
    pub cpus: usize,
    /// The processor's name.
    pub model: String,
    /// Memory of the machine in bytes.
    pub memory: u64,
    /// The kernel and its version.
    pub kernel: String,
}

/// The results of one experiment or benchmark.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Experiment {
    /// The name on the command line.
    pub id: String,
    /// What was measured, in a few words.
    pub title: String,
    /// Where the experiment comes from.
    pub source: String,
    /// What was done, and what to know when reading the figures.
    pub note: String,
    /// The figures.
    pub rows: Vec<Row>,
    /// Comparisons of rows.
    pub ratios: Vec<Ratio>,
    /// What was counted, for each variant that counts.
    pub counters: Ordered<Counters>,
    /// Whether it is about how rates grow with threads: its tables then have a column for each number of threads, and
    /// its picture has curves.
    #[serde(skip)]
    pub scaling: bool,
}

impl Experiment {
    /// The name of the ratio of the rate of `threads` threads to that of one, for rows of `metric` and `variant`.
    pub fn scaling_name(metric: &str, variant: &str, threads: usize) -> String {
        format!("{metric}, {variant}: {threads} threads / 1")
    }

    /// That ratio, if it was worked out.
    pub fn scaling_of(&self, metric: &str, variant: &str, threads: usize) -> Option<&Ratio> {
        let name = Self::scaling_name(metric, variant, threads);
        self.ratios.iter().find(|ratio| ratio.name == name)
    }
}

/// One figure: a metric of a variant.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Row {
    /// Who did it: Terrane in one of its forms, or what it is compared with.
    pub variant: String,
    /// How many threads did it together.
    pub threads: usize,
    /// What was measured.
    pub metric: String,
    /// The unit of the three figures.
    pub unit: String,
    /// The median of the samples.
    pub median: f64,
    /// The smallest sample.
    pub min: f64,
    /// The largest sample.
    pub max: f64,
    /// What the median shall be at most, if something is asked of it.
    pub at_most: Option<f64>,
    /// Which colour it has in a picture.
    #[serde(skip)]
    pub role: Role,
}

/// One comparison.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Ratio {
    /// What is divided by what.
    pub name: String,
    /// The median of the ratios of the samples taken in the same round.
    pub value: f64,
    /// The figure published in the source, if it gives one.
    pub published: Option<f64>,
    /// What it shall be at least, if that is asked.
    pub at_least: Option<f64>,
    /// What it shall be at most, if that is asked.
    pub at_most: Option<f64>,
    /// The same ratio where nothing is shared but the hardware, measured in the same rounds: what the machine gives. `None` if
    /// that was not measured.
    pub bound: Option<f64>,
}

/// What is asked of a figure.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Asked {
    /// No less.
    AtLeast(f64),
    /// No more.
    AtMost(f64),
}

impl Asked {
    /// Whether `value` will do.
    pub fn is_met(self, value: f64) -> bool {
        match self {
            Self::AtLeast(least) => value >= least,
            Self::AtMost(most) => value <= most,
        }
    }
}

impl Row {
    /// What is asked of it.
    pub fn asked(&self) -> Option<Asked> {
        self.at_most.map(Asked::AtMost)
    }
}

impl Ratio {
    /// What is asked of it.
    pub fn asked(&self) -> Option<Asked> {
        self.at_least.map(Asked::AtLeast).or(self.at_most.map(Asked::AtMost))
    }
}

/// What a variant stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Role {
    /// What Terrane is compared with.
    #[default]
    Baseline,
    /// The running Linux kernel.
    Linux,
    /// Terrane as it is meant to be used.
    Terrane,
}

/// Which way a figure of a unit should go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Better {
    /// Times, and memory.
    Less,
    /// Rates.
    More,
}

impl Better {
    /// Of a unit: rates should be high, times and memory low; other units are neither.
    pub fn of(unit: &str) -> Option<Self> {
        match unit {
            "ns" | "µs" | "ms" | "s" | "bytes" => Some(Self::Less),
            _ if unit.ends_with("/s") || unit.ends_with("/min") => Some(Self::More),
            _ => None,
        }
    }

    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            Self::Less => "less is better",
            Self::More => "more is better",
        }
    }
}

/// A JSON object that keeps its order.
#[derive(Clone, PartialEq, Debug)]
pub struct Ordered<T>(Vec<(String, T)>);

/// Counters of one variant, in printing order.
pub type Counters = Ordered<u64>;

impl<T> Default for Ordered<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> Ordered<T> {
    /// True if nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The value called `name`.
    pub fn get(&self, name: &str) -> Option<&T> {
        self.iter().find(|&(n, _)| n == name).map(|(_, value)| value)
    }

    /// Names and values, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &T)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value))
    }
}

impl<T: Default> Ordered<T> {
    /// The value called `name`, made at the end if there is none.
    pub fn entry(&mut self, name: &str) -> &mut T {
        let at = self.0.iter().position(|(n, _)| n == name).unwrap_or_else(|| {
            self.0.push((name.to_owned(), T::default()));
            self.0.len() - 1
        });
        &mut self.0[at].1
    }
}

impl Counters {
    /// Adds every counter of `other`.
    pub fn add(&mut self, other: &Counters) {
        for (name, &value) in other.iter() {
            let sum = self.entry(name);
            *sum = sum.saturating_add(value);
        }
    }
}

impl<const N: usize> From<[(&str, u64); N]> for Counters {
    fn from(counters: [(&str, u64); N]) -> Self {
        Self(counters.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
    }
}

impl<T: Serialize> Serialize for Ordered<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter())
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Ordered<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Entries<T> {
            type Value = Ordered<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Ordered(entries))
            }
        }
        deserializer.deserialize_map(Entries(PhantomData))
    }
}

/// A report with something in every field, for tests.
#[cfg(test)]
pub fn sample() -> Report {
    let row = |variant: &str, threads, metric: &str, unit: &str, median: f64, role| Row {
        variant: variant.into(),
        threads,
        metric: metric.into(),
        unit: unit.into(),
        median,
        min: median * 0.9,
        max: median * 1.07,
        at_most: (unit == "ns").then_some(20.0),
        role,
    };
    Report {
        schema: SCHEMA,
        terrane: "0.1.0".into(),
        machine: Machine {
            cpus: 2,
            model: "A processor".into(),
            memory: 8 << 30,
            kernel: "Linux 6.18.0".into(),
        },
        command: "terrane experiments multi-fault".into(),
        experiments: vec![Experiment {
            id: "multi-fault".into(),
            title: "Page faults of many threads".into(),
            source: "A, asynchronous page fault, 2009".into(),
            note: "Every thread touches 2 MiB page by page and gives them back.".into(),
            rows: vec![
                row("classic", 2, "faults, separate areas", "faults/s", 4_312_807.0, Role::Baseline),
                row("speculative", 2, "faults, separate areas", "faults/s", 12_905_113.0, Role::Terrane),
                row("Linux 6.18", 2, "faults, separate areas", "faults/s", 806_222.0, Role::Linux),
                row("classic", 2, "faults beside a churner", "faults/s", 312_807.0, Role::Baseline),
                row("speculative", 2, "faults beside a churner", "faults/s", 11_905_113.0, Role::Terrane),
                row("RwLock<BTreeMap> & co", 1, "find", "ns", 26.43, Role::Baseline),
            ],
            ratios: vec![
                Ratio {
                    name: "speculative / classic, separate areas".into(),
                    value: 2.992,
                    published: Some(2.06),
                    at_least: Some(1.9),
                    at_most: None,
                    bound: Some(1.97),
                },
                Ratio {
                    name: "speculative / classic, beside a churner".into(),
                    value: 38.1,
                    published: None,
                    at_least: None,
                    at_most: Some(1.1),
                    bound: None,
                },
            ],
            counters: {
                let mut counters = Ordered::default();
                *counters.entry("speculative") = Counters::from([
                    ("pgfault", 1_706_379),
                    ("speculative_pgfault", 1_674_599),
                    ("spf_vma_changed", 30_588),
                    ("nr_tlb_remote_flush", 0),
                ]);
                counters
            },
            scaling: false,
        }],
    }
}
