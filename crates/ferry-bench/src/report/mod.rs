//! A report as a table, as JSON, and as one HTML page with plots that needs nothing else.

mod html;
mod plot;
mod table;

use crate::run::{Report, VariantReport};
use crate::stats::{INTERVAL_ROUNDS_MIN, Interval, Ratio};

impl Report {
    /// For a terminal.
    pub fn to_table(&self) -> String {
        table::render(self)
    }

    /// For programs; `cases[].variants[].values` has every value measured.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::to_value(self).expect("numbers and strings are JSON")
    }

    /// The name for people.
    pub fn to_html(&self) -> String {
        html::render(self)
    }
}

/// A number with as many digits as are worth reading.
fn number(value: f64) -> String {
    let digits = match value.abs() {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 1.0 || v == 0.0 => 2,
        _ => 3,
    };
    let text = format!("{value:.digits$}");
    let (whole, fraction) =
        text.split_once('.').map_or((&*text, ""), |(w, _)| (w, &text[w.len()..]));
    let (sign, whole) = whole.strip_prefix('-').map_or(("", whole), |rest| ("-", rest));
    let mut out = String::from(sign);
    for (i, digit) in whole.chars().enumerate() {
        if i > 0 && (whole.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out + fraction
}

/// A ratio, with its interval where there were enough rounds.
fn ratio(variant: &VariantReport) -> String {
    match variant.ratio {
        Some(Ratio { value, interval: Some(Interval { low, high }) }) => {
            format!("{value:.3} [{low:.3}, {high:.3}]")
        }
        Some(Ratio { value, interval: None }) => format!("{value:.3}"),
        None => String::new(),
    }
}

/// What the ratios of a report come with.
fn intervals(report: &Report) -> String {
    if report.rounds as usize >= INTERVAL_ROUNDS_MIN {
        return format!("with {:.0} % intervals", 100.0 * report.confidence);
    }
    format!("without intervals, for which {INTERVAL_ROUNDS_MIN} rounds are needed")
}

/// What the last column of a table says.
fn ratio_title(report: &Report) -> String {
    let mut references = report.cases.iter().map(|case| &case.reference);
    match references.next() {
        Some(first) if references.all(|other| other == first) => format!("to {first}"),
        _ => "to the first".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Machine;
    use crate::run::{CONFIDENCE, CaseReport, Metric};

    fn variant(name: &str, rates: &[f64]) -> VariantReport {
        VariantReport {
            name: name.into(),
            values: [("rate", rates.to_vec())].into(),
            medians: [("rate", rates[0])].into(),
            ratio: (name == "b")
                .then_some(Ratio { value: 2.0, interval: Some(Interval { low: 1.5, high: 2.5 }) }),
        }
    }

    fn report(xs: &[Option<f64>]) -> Report {
        let case = |x: &Option<f64>| CaseReport {
            name: format!("case <{x:?}>"),
            group: "group".into(),
            x: *x,
            x_label: "callers",
            reference: "a".into(),
            variants: vec![variant("a", &[1234.5, 1300.0]), variant("b", &[2.0, 3.0])],
        };
        Report {
            workload: "none",
            about: "Does nothing & well.".into(),
            machine: Machine::this(),
            options: [("files", "3".to_owned())].into(),
            metrics: vec![Metric { name: "rate", label: "files/s", more_is_better: true }],
            rounds: 2,
            confidence: CONFIDENCE,
            cases: xs.iter().map(case).collect(),
            notes: vec!["A note.".into()],
        }
    }

    #[test]
    fn numbers_are_short() {
        for (value, text) in [
            (0.0, "0.00"),
            (0.0314, "0.031"),
            (9.876, "9.88"),
            (98.76, "98.8"),
            (1234567.8, "1,234,568"),
            (-1234.0, "-1,234"),
        ] {
            assert_eq!(number(value), text);
        }
    }

    #[test]
    fn a_table_has_each_variant_with_its_ratio() {
        let text = report(&[None]).to_table();
        for part in
            ["case <None>", "files/s", "1,234", "2.000 [1.500, 2.500]", "to a", "A note.", "CPUs"]
        {
            assert!(text.contains(part), "{part:?} in\n{text}");
        }
    }

    #[test]
    fn json_has_every_value() {
        let json = report(&[Some(1.0)]).to_json();
        assert_eq!(json["cases"][0]["variants"][0]["values"]["rate"][1], 1300.0);
        assert_eq!(json["cases"][0]["variants"][1]["ratio"]["interval"]["low"], 1.5);
        assert_eq!(json["options"]["files"], "3");
    }

    #[test]
    fn html_stands_alone_and_is_well_formed() {
        for report in [report(&[None, None]), report(&[Some(1.0), Some(4.0), Some(16.0)])] {
            let html = report.to_html();
            assert!(!html.contains("http") && !html.contains("src="), "nothing from elsewhere");
            assert!(html.contains("<svg") && html.contains("Does nothing &amp; well."), "{html}");
            assert!(html.contains("case &lt;") && !html.contains("case <"), "names are escaped");
            for tag in ["svg", "table", "tr", "td", "th", "text", "g", "html", "body"] {
                let opened = html.matches(&format!("<{tag}>")).count()
                    + html.matches(&format!("<{tag} ")).count();
                assert_eq!(opened, html.matches(&format!("</{tag}>")).count(), "{tag}");
            }
            let has_axes = report.cases.iter().any(|case| case.x.is_some());
            for part in ["callers (logarithmic)", "files/s (logarithmic)"] {
                assert_eq!(html.contains(part), has_axes, "{part}");
            }
            assert!(!html.contains("NaN") && !html.contains("inf"), "{html}");
        }
    }
}
