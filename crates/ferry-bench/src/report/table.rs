//! A table for a terminal.

use super::{intervals, number, ratio, ratio_title};
use crate::run::{CaseReport, Metric, Report};
use std::fmt::Write;

pub fn render(report: &Report) -> String {
    let mut out = format!("{}: {}\n{}\n", report.workload, report.about, report.machine.line());
    let options: Vec<_> =
        report.options.iter().map(|(name, value)| format!("{name} {value}")).collect();
    let _ = writeln!(out, "{}", options.join(", "));
    let rounds = if report.rounds == 1 { "1 round" } else { "rounds in turn" };
    let count = if report.rounds == 1 { String::new() } else { format!("{} ", report.rounds) };
    let _ = writeln!(
        out,
        "medians of {count}{rounds}; ratios of {} {}\n",
        report.metrics.first().map_or("", |metric| metric.label),
        intervals(report)
    );
    let rows = rows(report);
    let widths: Vec<usize> = (0..rows[0].len())
        .map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default())
        .collect();
    for row in &rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let pad = " ".repeat(width - cell.chars().count());
            // Words to the left, numbers to the right.
            let _ = if column < 2 {
                write!(line, "{cell}{pad}  ")
            } else {
                write!(line, "{pad}{cell}  ")
            };
        }
        let _ = writeln!(out, "{}", line.trim_end());
    }
    for note in &report.notes {
        let _ = write!(out, "\n{note}\n");
    }
    out
}

fn rows(report: &Report) -> Vec<Vec<String>> {
    let metrics: Vec<&Metric> = visible_metrics(report);
    let mut heading = vec![String::new(), String::new()];
    heading.extend(metrics.iter().map(|metric| metric.label.to_owned()));
    heading.push(ratio_title(report));
    let mut rows = vec![heading];
    for case in &report.cases {
        rows.extend(case_rows(case, &metrics));
    }
    rows
}

/// Metrics that some variant has.
pub fn visible_metrics(report: &Report) -> Vec<&Metric> {
    let has = |metric: &&Metric| {
        report
            .cases
            .iter()
            .flat_map(|case| &case.variants)
            .any(|v| v.medians.contains_key(metric.name))
    };
    report.metrics.iter().filter(has).collect()
}

fn case_rows(case: &CaseReport, metrics: &[&Metric]) -> Vec<Vec<String>> {
    let row = |(index, variant): (usize, &crate::run::VariantReport)| {
        let mut row =
            vec![if index == 0 { case.name.clone() } else { String::new() }, variant.name.clone()];
        row.extend(
            metrics
                .iter()
                .map(|m| variant.medians.get(m.name).map_or("-".to_owned(), |v| number(*v))),
        );
        row.push(ratio(variant));
        row
    };
    case.variants.iter().enumerate().map(row).collect()
}
