//! Renders statistics: a JSON object as a table, with one section for each object in it.

use std::fmt::Write;

use serde_json::{Map, Value};

use crate::size::{format_bytes, format_nanos};

/// Renders `value`; the names contain the units (`…_bytes`, `…_ns`).
pub fn render(value: &Value) -> String {
    let mut out = String::new();
    match value {
        Value::Object(map) => section(&mut out, "", map),
        other => drop(writeln!(out, "{other}")),
    }
    out
}

/// Rows, each column as wide as its widest cell.
pub fn lines<const N: usize>(rows: &[[String; N]], indent: &str) -> String {
    let width = |at: usize| rows.iter().map(|row| row[at].chars().count()).max().unwrap_or(0);
    let line = |row: &[String; N]| {
        let cells =
            row.iter().enumerate().map(|(at, cell)| format!("{cell:<width$}", width = width(at)));
        format!("{indent}{}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}

fn section(out: &mut String, title: &str, map: &Map<String, Value>) {
    if let Some(columns) = common_columns(map) {
        heading(out, title);
        return grid(out, map, &columns);
    }
    let rows: Vec<(String, String)> =
        map.iter().filter(|(_, v)| !v.is_object()).map(|(k, v)| (label(k), cell(k, v))).collect();
    if !rows.is_empty() {
        heading(out, title);
        let width = rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or_default();
        for (name, text) in rows {
            let _ = writeln!(out, "  {name:width$}  {text}");
        }
    }
    for (key, value) in map {
        if let Value::Object(inner) = value {
            let path =
                if title.is_empty() { label(key) } else { format!("{title}, {}", label(key)) };
            section(out, &path, inner);
        }
    }
}

/// Histograms, beside a time's percentiles and beside the counts of an operation: too wide for a
/// table.
const HIDDEN: [&str; 2] = ["buckets", "times"];

fn heading(out: &mut String, title: &str) {
    if !title.is_empty() {
        let gap = if out.is_empty() { "" } else { "\n" };
        let _ = writeln!(out, "{gap}{title}");
    }
}

/// The keys of the members, if all are objects with the same keys: they make one table.
fn common_columns(map: &Map<String, Value>) -> Option<Vec<String>> {
    let mut shapes = map.values().map(|v| v.as_object().map(columns));
    let first = shapes.next()??;
    let scalar = |v: &Value| v.as_object().is_some_and(|row| row.values().all(|v| !v.is_object()));
    (map.len() > 1
        && shapes.all(|shape| shape.as_ref() == Some(&first))
        && map.values().all(scalar))
    .then_some(first)
}

fn columns(row: &Map<String, Value>) -> Vec<String> {
    row.keys().filter(|key| !HIDDEN.contains(&key.as_str())).cloned().collect()
}

fn grid(out: &mut String, map: &Map<String, Value>, columns: &[String]) {
    let width = map.keys().map(|k| k.chars().count()).max().unwrap_or_default();
    let titles: String = columns.iter().map(|c| format!("  {:>12}", label(c))).collect();
    let _ = writeln!(out, "  {:width$}{titles}", "");
    for (name, row) in map {
        let cells: String =
            columns.iter().map(|c| format!("  {:>12}", cell(c, &row[c]).trim())).collect();
        let _ = writeln!(out, "  {:width$}{cells}", label(name));
    }
}

/// The name without its unit, which the value shows.
fn label(key: &str) -> String {
    let units = ["_bytes", "_ns", "_microdollars"];
    let name = units.iter().find_map(|unit| key.strip_suffix(unit));
    name.unwrap_or(key).replace('_', " ")
}

fn cell(key: &str, value: &Value) -> String {
    match value {
        Value::Number(n) => match n.as_u64() {
            Some(n) if key.ends_with("_bytes") || key == "bytes" => {
                format!("{:>12}", format_bytes(n))
            }
            Some(n) if key.ends_with("_microdollars") => format!("{:>12}", dollars(n)),
            Some(n) if key.ends_with("_ns") => format!("{:>12}", format_nanos(n)),
            Some(n) => format!("{:>12}", thousands(n)),
            None => format!("{:>12}", n.to_string()),
        },
        Value::String(s) => s.clone(),
        Value::Array(items) => {
            items.iter().map(|v| cell(key, v).trim().to_owned()).collect::<Vec<_>>().join(" ")
        }
        // There is no average of nothing.
        Value::Null => format!("{:>12}", "-"),
        Value::Bool(yes) => if *yes { "yes" } else { "no" }.to_owned(),
        other => other.to_string(),
    }
}

/// Formats millionths of a dollar, to a hundredth of a cent.
pub fn dollars(micros: u64) -> String {
    format!("${}.{:04}", thousands(micros / 1_000_000), micros % 1_000_000 / 100)
}

/// Formats 1234567 as `1,234,567`.
pub fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rendered(json: &str) -> String {
        render(&serde_json::from_str(json).expect("JSON"))
    }

    #[test]
    fn sections_follow_the_objects_and_units_the_names() {
        let text = rendered(
            r#"{ "volume": "/srv/a", "clean": true,
                 "log": { "used_bytes": 1536, "waits": 1234567, "stage": { "flush_ns": 130000 } } }"#,
        );
        let lines = [
            "  volume  /srv/a",
            "  clean   yes",
            "\nlog\n",
            "1.5 KiB\n",
            "  1,234,567\n",
            "\nlog, stage\n",
        ];
        for line in lines {
            assert!(text.contains(line), "{line:?} in\n{text}");
        }
        assert!(text.contains("130.0 µs"), "{text}");
        let text = rendered(r#"{"store": {"estimated_cost_microdollars": 1234567890}}"#);
        assert!(text.contains("  estimated cost   $1,234.5678\n"), "{text}");
    }

    #[test]
    fn rows_of_one_shape_share_a_table() {
        let text = rendered(
            r#"{ "operations": { "lookup": {"count": 12345, "errors": 0}, "open": {"count": 2, "errors": 1} } }"#,
        );
        let expected = "operations
                 count        errors
  lookup        12,345             0
  open               2             1
";
        assert_eq!(text, expected);
    }

    #[test]
    fn values_of_any_shape_are_rendered() {
        assert_eq!(rendered("[1, 2]"), "[1,2]\n");
        assert_eq!(rendered(r#"{"a": [1, 2048], "b": -1}"#), "  a  1 2,048\n  b            -1\n");
    }
}
