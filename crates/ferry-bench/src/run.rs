//! Runs variants in turn, for some rounds: other load of the machine, and its changes over time,
//! affect all of them.

use crate::error::BenchError;
use crate::machine::Machine;
use crate::stats::{Ratio, median, ratio};
use serde::Serialize;
use std::cell::Cell;
use std::collections::BTreeMap;

/// The default number of rounds.
pub const ROUNDS: u32 = 5;
/// The probability with which all intervals of one case together hold the true ratios.
pub const CONFIDENCE: f64 = 0.95;

/// A quantity that is measured in each turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Metric {
    /// The name for programs: lower-case words with underscores.
    pub name: &'static str,
    /// The name for people.
    pub label: &'static str,
    /// Whether more of it is better.
    pub more_is_better: bool,
}

/// The results of one turn, by the names of metrics; a metric may be missing.
pub type Sample = BTreeMap<&'static str, f64>;

/// One of the variants compared in a case.
pub struct Variant<'a> {
    /// Its name in reports.
    pub name: String,
    /// Runs one turn; the argument is the number of the round.
    pub turn: Box<dyn FnMut(u32) -> Result<Sample, BenchError> + 'a>,
}

impl<'a> Variant<'a> {
    /// Makes a variant.
    pub fn new(
        name: impl Into<String>,
        turn: impl FnMut(u32) -> Result<Sample, BenchError> + 'a,
    ) -> Self {
        Self { name: name.into(), turn: Box::new(turn) }
    }
}

/// Variants that are compared with each other under the same circumstances.
pub struct Case<'a> {
    /// Its name in reports.
    pub name: String,
    /// Cases of one group with an `x` make one plot.
    pub group: String,
    /// The number that differs between the cases of a group.
    pub x: Option<f64>,
    /// The label of that number.
    pub x_label: &'static str,
    /// The index of the variant that the others are compared with; if there is none, nothing is
    /// compared.
    pub reference: usize,
    /// The number of variants.
    pub variants: usize,
    /// Prepares what the variants need, which lives as long as they do.
    pub open: Box<dyn FnOnce() -> Result<Vec<Variant<'a>>, BenchError> + 'a>,
}

impl<'a> Case<'a> {
    /// A case of its own, whose variants are compared with its first one.
    pub fn new(name: impl Into<String>, variants: Vec<Variant<'a>>) -> Self {
        let count = variants.len();
        let open = Box::new(move || Ok(variants));
        Self {
            name: name.into(),
            group: String::new(),
            x: None,
            x_label: "",
            reference: 0,
            variants: count,
            open,
        }
    }
}

/// The options of the workload.
pub struct Bench<'a> {
    /// The workload's name.
    pub workload: &'static str,
    /// What it does, in a sentence.
    pub about: String,
    /// What is measured; the first one is compared and plotted.
    pub metrics: Vec<Metric>,
    /// The options: names and values.
    pub options: Vec<(&'static str, String)>,
    /// What is compared.
    pub cases: Vec<Case<'a>>,
}

/// The progress of a run.
#[derive(Clone, Debug)]
pub struct Progress {
    /// Set it to end the run before the next turn: its files are removed, and it has no result.
    pub stop: Cell<bool>,
    /// The turns that have ended.
    pub done: u64,
    /// The number of all turns.
    pub all: u64,
    /// The turn that begins.
    pub now: String,
}

/// The results of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The workload's name.
    pub workload: &'static str,
    /// What it does.
    pub about: String,
    /// The machine that ran it.
    pub machine: Machine,
    /// The options: names and values.
    pub options: BTreeMap<&'static str, String>,
    /// What was measured; the first one is compared.
    pub metrics: Vec<Metric>,
    /// How often each variant had its turn.
    pub rounds: u32,
    /// The probability with which all intervals of a case together hold the true ratios.
    pub confidence: f64,
    /// What was compared.
    pub cases: Vec<CaseReport>,
    /// Notes for the reader.
    pub notes: Vec<String>,
}

/// The results of a case.
#[derive(Clone, Debug, Serialize)]
pub struct CaseReport {
    /// The name in reports.
    pub name: String,
    /// The group that it belongs to.
    pub group: String,
    /// Its value of `x` in the group.
    pub x: Option<f64>,
    /// The label of `x`.
    pub x_label: &'static str,
    /// The variant that the others are compared with.
    pub reference: String,
    /// The variants, in their order.
    pub variants: Vec<VariantReport>,
}

/// The results of a variant.
#[derive(Clone, Debug, Serialize)]
pub struct VariantReport {
    /// The name in reports.
    pub name: String,
    /// Every value of each metric, in the order of the rounds.
    pub values: BTreeMap<&'static str, Vec<f64>>,
    /// The median of each metric.
    pub medians: BTreeMap<&'static str, f64>,
    /// The first metric divided by that of the reference in the same rounds.
    pub ratio: Option<Ratio>,
}

impl Bench<'_> {
    /// Runs all cases, one after the other; in each round every variant has a turn, and each round
    /// another one is first.
    pub fn run(
        self,
        rounds: u32,
        mut progress: impl FnMut(&Progress),
    ) -> Result<Report, BenchError> {
        let machine = Machine::this();
        let turns = |case: &Case<'_>| case.variants as u64 * u64::from(rounds);
        let mut at = Progress {
            stop: Cell::new(false),
            done: 0,
            all: self.cases.iter().map(turns).sum(),
            now: String::new(),
        };
        let mut cases = Vec::new();
        for case in self.cases {
            let (name, group, x, reference) =
                (case.name, case.group, (case.x, case.x_label), case.reference);
            let mut variants = (case.open)()?;
            let mut samples = vec![Vec::new(); variants.len()];
            for round in 0..rounds {
                for turn in 0..variants.len() {
                    let index = (turn + round as usize) % variants.len();
                    at.now = format!("{name} {}", variants[index].name);
                    progress(&at);
                    if at.stop.get() {
                        return Err(BenchError::Interrupted);
                    }
                    samples[index].push((variants[index].turn)(round)?);
                    at.done += 1;
                }
            }
            at.now.clear();
            progress(&at);
            let names = variants.into_iter().map(|variant| variant.name).collect();
            cases.push(CaseReport::new(
                (name, group, x),
                reference,
                names,
                &samples,
                &self.metrics,
            ));
        }
        Ok(Report {
            workload: self.workload,
            about: self.about,
            machine,
            options: self.options.into_iter().collect(),
            metrics: self.metrics,
            rounds,
            confidence: CONFIDENCE,
            cases,
            notes: Vec::new(),
        })
    }
}

impl CaseReport {
    fn new(
        (name, group, (x, x_label)): (String, String, (Option<f64>, &'static str)),
        reference: usize,
        names: Vec<String>,
        samples: &[Vec<Sample>],
        metrics: &[Metric],
    ) -> Self {
        let first = metrics.first().map_or("", |metric| metric.name);
        let of = |index: usize, metric| -> Vec<f64> {
            samples[index].iter().filter_map(|sample| sample.get(metric).copied()).collect()
        };
        // Bonferroni correction: each interval is a little wider, so that all of them together
        // hold.
        let confidence = 1.0 - (1.0 - CONFIDENCE) / (names.len().max(2) - 1) as f64;
        let reference_name = names.get(reference).cloned().unwrap_or_default();
        let variants = names.into_iter().enumerate().map(|(index, name)| {
            let values: BTreeMap<_, _> = metrics
                .iter()
                .map(|m| (m.name, of(index, m.name)))
                .filter(|(_, v)| !v.is_empty())
                .collect();
            let medians =
                values.iter().filter_map(|(name, values)| Some((*name, median(values)?))).collect();
            let compared = index != reference && reference < samples.len();
            let ratio = compared
                .then(|| ratio(&of(index, first), &of(reference, first), confidence))
                .flatten();
            VariantReport { name, values, medians, ratio }
        });
        Self { variants: variants.collect(), name, group, x, x_label, reference: reference_name }
    }

    /// The results of a variant.
    pub fn of(&self, variant: &str) -> Option<&VariantReport> {
        self.variants.iter().find(|v| v.name == variant)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    const RATE: Metric = Metric { name: "rate", label: "rate", more_is_better: true };

    fn bench<'a>(turns: &'a RefCell<Vec<(String, u32)>>) -> Bench<'a> {
        let variant = |name: &'static str, rate: f64| {
            Variant::new(name, move |round| {
                turns.borrow_mut().push((name.to_owned(), round));
                Ok(Sample::from([("rate", rate * f64::from(round + 1))]))
            })
        };
        let case = Case::new("case", vec![variant("a", 1.0), variant("b", 2.0), variant("c", 0.5)]);
        Bench {
            workload: "none",
            about: String::new(),
            metrics: vec![RATE],
            options: vec![],
            cases: vec![case],
        }
    }

    #[test]
    fn every_variant_has_a_turn_in_each_round_and_everyone_is_first_once() {
        let turns = RefCell::default();
        let mut heard = Vec::new();
        let report = bench(&turns).run(3, |at| heard.push((at.done, at.all))).expect("it runs");
        let order: Vec<_> =
            turns.borrow().iter().map(|(name, round)| format!("{name}{round}")).collect();
        assert_eq!(order, ["a0", "b0", "c0", "b1", "c1", "a1", "c2", "a2", "b2"]);
        assert_eq!(heard.first(), Some(&(0, 9)));
        assert_eq!(heard.last(), Some(&(9, 9)));
        let b = report.cases[0].of("b").expect("b was run");
        assert_eq!(b.values["rate"], [2.0, 4.0, 6.0]);
        assert_eq!(b.medians["rate"], 4.0);
        let ratio = b.ratio.expect("three rounds");
        assert!((ratio.value - 2.0).abs() < 1e-9 && ratio.interval.is_none(), "{ratio:?}");
        assert_eq!(report.cases[0].of("a").and_then(|a| a.ratio), None, "it is the reference");
    }

    #[test]
    fn a_run_is_stopped_before_the_next_turn() {
        let turns = RefCell::default();
        let stopped = bench(&turns).run(3, |at| at.stop.set(at.done == 2));
        assert!(matches!(stopped, Err(BenchError::Interrupted)), "{stopped:?}");
        assert_eq!(turns.borrow().len(), 2);
    }

    #[test]
    fn one_round_gives_no_interval() {
        let turns = RefCell::default();
        let report = bench(&turns).run(1, |_| ()).expect("it runs");
        assert!(report.cases[0].variants.iter().all(|v| v.ratio.is_none()));
    }
}
