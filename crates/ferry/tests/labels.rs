//! The labels of rules (`LEASE-3`; see `ARCHITECTURE.md`): each rule is stated once, and each label
//! that is cited is stated.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The Rust sources below `crates/`, and the texts in `docs/` and beside it.
fn files(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root.join("crates"), root.join("docs")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder of the project can be read") {
            let path = entry.expect("so can its entries").path();
            match path.extension().and_then(|e| e.to_str()) {
                _ if path.is_dir() => folders.push(path),
                Some("rs" | "md") => found.push(path),
                _ => {}
            }
        }
    }
    found.push(root.join("ARCHITECTURE.md"));
    found
}

/// The subject and the number of a word such as `WALK-LEASE-3`.
fn label(word: &str) -> Option<(&str, u32)> {
    let (subject, number) = word.rsplit_once('-')?;
    let is_subject = subject
        .split('-')
        .all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_uppercase()));
    Some((subject, number.parse().ok()?)).filter(|_| is_subject)
}

/// The label that a line states: `//! * LEASE-3: …` or `* LOCK-4. …`.
fn stated(line: &str) -> Option<(&str, u32)> {
    let rule = line.trim_start_matches(['/', '!', ' ']).strip_prefix("* ")?;
    let word = rule.split([':', '.']).next()?;
    label(word)
}

/// All labels in a line.
fn cited(line: &str) -> impl Iterator<Item = (&str, u32)> {
    line.split(|c: char| !c.is_ascii_alphanumeric() && c != '-').filter_map(label)
}

#[test]
fn each_rule_is_stated_once_and_each_cited_rule_is_stated() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let texts: Vec<_> = files(&root)
        .into_iter()
        .filter(|path| !path.ends_with("tests/labels.rs"))
        .map(|path| (fs::read_to_string(&path).expect("a file of the project is text"), path))
        .collect();

    let mut rules = BTreeMap::new();
    for (text, path) in &texts {
        for rule in text.lines().filter_map(stated) {
            let earlier = rules.insert(rule, path);
            assert!(earlier.is_none(), "{rule:?} is stated in {path:?} and in {earlier:?}");
        }
    }
    assert!(rules.len() > 100, "{} rules", rules.len());

    let subjects: BTreeSet<_> = rules.keys().map(|(subject, _)| *subject).collect();
    for (text, path) in &texts {
        for rule in text.lines().flat_map(cited).filter(|(subject, _)| subjects.contains(subject)) {
            assert!(rules.contains_key(&rule), "{path:?} cites {rule:?}, which nothing states");
        }
    }
}
