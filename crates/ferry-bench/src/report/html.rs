//! One page: what was run, plots, a table.

use super::plot::{self, escape};
use super::table::visible_metrics;
use super::{intervals, number, ratio, ratio_title};
use crate::run::Report;
use std::fmt::Write;

const STYLE: &str = "\
body{font:15px/1.45 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}\
h1{font-size:1.5rem}h2{font-size:1.1rem;margin:1.6rem 0 .4rem}p{margin:.3rem 0}svg{max-width:100%;height:auto}\
table{border-collapse:collapse;margin-top:1rem}td,th{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #ddd}\
td:nth-child(-n+2),th:nth-child(-n+2){text-align:left}text{font:12px system-ui,sans-serif;fill:#222}";

pub fn render(report: &Report) -> String {
    let title = escape(&format!("ferry bench {}", report.workload));
    let mut out = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title><style>{STYLE}</style></head>\n<body>\n\
         <h1>{title}</h1>\n<p>{}</p>\n<p>{}</p>\n",
        escape(&report.about),
        escape(&report.machine.line())
    );
    let options: Vec<_> =
        report.options.iter().map(|(name, value)| format!("{name} {value}")).collect();
    let _ = writeln!(
        out,
        "<p>{}; rounds: {}, in turn; a dot is one turn, a bar or line the median; ratios {}.</p>",
        escape(&options.join(", ")),
        report.rounds,
        intervals(report)
    );
    out.push_str(&plot::all(report));
    out.push_str(&table(report));
    for note in &report.notes {
        let _ = writeln!(out, "<p>{}</p>", escape(note));
    }
    out + "</body></html>\n"
}

fn table(report: &Report) -> String {
    let metrics = visible_metrics(report);
    let mut out = String::from("<h2>Medians</h2>\n<table>\n<tr><th></th><th></th>");
    for metric in &metrics {
        let _ = write!(out, "<th>{}</th>", escape(metric.label));
    }
    let _ = writeln!(out, "<th>{}</th></tr>", escape(&ratio_title(report)));
    for case in &report.cases {
        for (index, variant) in case.variants.iter().enumerate() {
            let name = if index == 0 { escape(&case.name) } else { String::new() };
            let _ = write!(out, "<tr><td>{name}</td><td>{}</td>", escape(&variant.name));
            for metric in &metrics {
                let value = variant.medians.get(metric.name).map_or("-".to_owned(), |v| number(*v));
                let _ = write!(out, "<td>{value}</td>");
            }
            let _ = writeln!(out, "<td>{}</td></tr>", escape(&ratio(variant)));
        }
    }
    out + "</table>\n"
}
