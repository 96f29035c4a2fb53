//! `docs/tour.md` and `CONTRIBUTING.md` name files and functions; each of them must exist.

use std::path::Path;

/// Whether a line belongs to one of the tables: its first cell is a number.
fn is_numbered(line: &str) -> bool {
    line.strip_prefix("| ").and_then(|line| line.split(" |").next()?.parse::<u32>().ok()).is_some()
}

/// A line of one of the tables: the file below `crates/`, and the function.
fn step(line: &str) -> Option<(&str, &str)> {
    let mut cells = line.strip_prefix("| ")?.split(" | ").skip(1);
    let mut of = || cells.next()?.trim().strip_prefix('`')?.strip_suffix('`');
    Some((of()?, of()?))
}

/// Checks a document of the project that has so many steps, at least.
fn check(document: &str, least: usize) {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("it is below crates/");
    let text =
        std::fs::read_to_string(crates.join("..").join(document)).expect("the document is there");
    let numbered: Vec<_> = text.lines().filter(|line| is_numbered(line)).collect();
    let steps: Vec<_> = numbered.iter().filter_map(|line| step(line)).collect();
    assert_eq!(
        steps.len(),
        numbered.len(),
        "each numbered line of {document} names a file and a function"
    );
    assert!(steps.len() >= least, "{document}: {} steps", steps.len());
    let missing = |(file, function): &(&str, &str)| {
        let source = std::fs::read_to_string(crates.join(file)).unwrap_or_default();
        !source.contains(&format!("fn {function}(")) && !source.contains(&format!("fn {function}<"))
    };
    let missing: Vec<_> = steps.into_iter().filter(missing).collect();
    assert!(missing.is_empty(), "{document} names what is not there: {missing:?}");
}

#[test]
fn every_function_of_the_tour_exists() {
    check("docs/tour.md", 41);
}

#[test]
fn every_function_of_the_guide_for_contributors_exists() {
    check("CONTRIBUTING.md", 16);
}
