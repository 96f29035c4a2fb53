//! Plots as inline SVG: bars for cases that stand for themselves, lines over `x` for those of a
//! group.

use super::number;
use crate::run::{CaseReport, Metric, Report, VariantReport};
use std::fmt::Write;

/// Colours that people with any kind of colour vision can tell apart (Okabe and Ito, 2008).
const COLOURS: [&str; 7] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"];
const WIDTH: f64 = 760.0;
/// Room for names beside bars.
const LEFT: f64 = 210.0;
const RIGHT: f64 = 130.0;
const ROW: f64 = 22.0;
const HEIGHT: f64 = 320.0;

/// All plots of the first metric.
pub fn all(report: &Report) -> String {
    let Some(metric) = report.metrics.first() else { return String::new() };
    let mut out = String::new();
    let mut groups: Vec<&str> = Vec::new();
    for case in &report.cases {
        match case.x {
            Some(_) if groups.contains(&&*case.group) => {}
            Some(_) => {
                groups.push(&case.group);
                let of_group: Vec<_> = report
                    .cases
                    .iter()
                    .filter(|c| c.x.is_some() && c.group == case.group)
                    .collect();
                heading(&mut out, &case.group, metric.label);
                out.push_str(&lines(&of_group, metric));
            }
            None => {
                heading(&mut out, &case.name, metric.label);
                out.push_str(&bars(case, metric));
            }
        }
    }
    out
}

fn heading(out: &mut String, name: &str, metric: &str) {
    let _ = writeln!(out, "<h2>{}: {}</h2>", escape(name), escape(metric));
}

/// A plot of this height, and what it says to those who do not see it.
fn opened(height: f64, metric: &str) -> String {
    let label = escape(metric);
    format!(
        "<svg viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" role=\"img\" aria-label=\"{label}; the table has the medians\">\n"
    )
}

fn colour(index: usize) -> &'static str {
    COLOURS[index % COLOURS.len()]
}

fn values<'a>(variant: &'a VariantReport, metric: &str) -> &'a [f64] {
    variant.values.get(metric).map_or(&[], |values| values)
}

/// The largest value, or 1 where there is none above zero.
fn largest<'a>(variants: impl Iterator<Item = &'a VariantReport>, metric: &str) -> f64 {
    let most = variants.flat_map(|v| values(v, metric)).copied().fold(0.0, f64::max);
    if most > 0.0 { most } else { 1.0 }
}

/// A bar to the median of each variant, a dot for each turn.
fn bars(case: &CaseReport, what: &Metric) -> String {
    let metric = what.name;
    let height = ROW * case.variants.len() as f64 + 8.0;
    let scale = (WIDTH - LEFT - RIGHT) / largest(case.variants.iter(), metric);
    let mut out = opened(height, what.label);
    for (index, variant) in case.variants.iter().enumerate() {
        let top = ROW * index as f64 + 4.0;
        let middle = top + ROW / 2.0;
        let median = variant.medians.get(metric).copied().unwrap_or_default();
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\
             <rect x=\"{LEFT}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\" fill-opacity=\"0.55\"/>",
            LEFT - 8.0,
            middle + 4.0,
            escape(&variant.name),
            top + 3.0,
            median * scale,
            ROW - 6.0,
            colour(index)
        );
        for value in values(variant, metric) {
            let x = LEFT + value * scale;
            let _ = writeln!(
                out,
                "<circle cx=\"{x:.1}\" cy=\"{middle:.1}\" r=\"3\" fill=\"{}\"/>",
                colour(index)
            );
        }
        let end = values(variant, metric).iter().copied().fold(median, f64::max);
        let x = LEFT + end * scale + 8.0;
        let _ =
            writeln!(out, "<text x=\"{x:.1}\" y=\"{:.1}\">{}</text>", middle + 4.0, number(median));
    }
    out + "</svg>\n"
}

/// A line for each variant over the cases of a group; both axes are logarithmic.
fn lines(cases: &[&CaseReport], what: &Metric) -> String {
    let metric = what.name;
    let axes = Axes::new(cases, metric);
    let mut out = opened(HEIGHT, what.label);
    axes.draw(&mut out, cases, what.label);
    let names = cases.first().map_or(&[][..], |case| &case.variants);
    for (index, variant) in names.iter().enumerate() {
        let mut points = String::new();
        for case in cases {
            let Some(found) = case.of(&variant.name) else { continue };
            let x = axes.x(case.x.unwrap_or_default());
            for value in values(found, metric) {
                let y = axes.y(*value);
                let _ = writeln!(
                    out,
                    "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.5\" fill=\"{}\"/>",
                    colour(index)
                );
            }
            if let Some(median) = found.medians.get(metric) {
                let _ = write!(points, "{x:.1},{:.1} ", axes.y(*median));
            }
        }
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" style=\"fill:{colour}\">{}</text>",
            points.trim_end(),
            WIDTH - RIGHT + 10.0,
            20.0 + 18.0 * index as f64,
            escape(&variant.name),
            colour = colour(index)
        );
    }
    out + "</svg>\n"
}

/// The logarithmic axes of a plot with lines.
struct Axes {
    x: (f64, f64),
    y: (f64, f64),
}

const AXIS_LEFT: f64 = 100.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 46.0;

impl Axes {
    fn new(cases: &[&CaseReport], metric: &str) -> Self {
        let log = |value: f64| value.max(f64::MIN_POSITIVE).log10();
        let all = cases.iter().flat_map(|case| &case.variants).flat_map(|v| values(v, metric));
        let positive: Vec<f64> = all.copied().filter(|value| *value > 0.0).collect();
        let low = positive.iter().copied().fold(f64::MAX, f64::min);
        let high = positive.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
        let y = if positive.is_empty() { (0.0, 1.0) } else { (log(low).floor(), log(high).ceil()) };
        let xs: Vec<f64> = cases.iter().filter_map(|case| case.x).map(log).collect();
        let x = (
            xs.iter().copied().fold(f64::MAX, f64::min),
            xs.iter().copied().fold(f64::MIN, f64::max),
        );
        let widen =
            |(low, high): (f64, f64)| if high > low { (low, high) } else { (low - 0.5, low + 0.5) };
        Self { x: widen(x), y: widen(y) }
    }

    fn x(&self, value: f64) -> f64 {
        let part = (value.max(f64::MIN_POSITIVE).log10() - self.x.0) / (self.x.1 - self.x.0);
        AXIS_LEFT + 10.0 + part * (WIDTH - RIGHT - AXIS_LEFT - 20.0)
    }

    fn y(&self, value: f64) -> f64 {
        let part = (value.max(f64::MIN_POSITIVE).log10() - self.y.0) / (self.y.1 - self.y.0);
        HEIGHT - BOTTOM - part.clamp(0.0, 1.0) * (HEIGHT - BOTTOM - TOP)
    }

    fn draw(&self, out: &mut String, cases: &[&CaseReport], metric: &str) {
        for decade in self.y.0.ceil() as i32..=self.y.1.floor() as i32 {
            let (value, right) = (10_f64.powi(decade), WIDTH - RIGHT);
            let y = self.y(value);
            let _ = writeln!(
                out,
                "<line x1=\"{AXIS_LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                AXIS_LEFT - 8.0,
                y + 4.0,
                number(value)
            );
        }
        for value in cases.iter().filter_map(|case| case.x) {
            let (x, y) = (self.x(value), HEIGHT - 28.0);
            let _ = writeln!(
                out,
                "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{value}</text>"
            );
        }
        let (across, up) = ((AXIS_LEFT + WIDTH - RIGHT) / 2.0, (TOP + HEIGHT - BOTTOM) / 2.0);
        let label = cases.first().map_or("", |case| case.x_label);
        let _ = writeln!(
            out,
            "<text x=\"{across:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{} (logarithmic)</text>\
             <text transform=\"translate(16 {up:.1}) rotate(-90)\" text-anchor=\"middle\">{} (logarithmic)</text>",
            HEIGHT - 8.0,
            escape(label),
            escape(metric)
        );
    }
}

/// Text between tags.
pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
