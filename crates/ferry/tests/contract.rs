//! `docs/semantics.md` is the contract. Each guarantee in it has a test, and each test that it
//! names exists.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// A crate or script, and the name of a test in it: `("ferry-fs", "some_rule")`. A script without a
/// name stands for all its tests.
type Cited = (String, Option<String>);

/// The title of an entry, and what follows it up to the next entry.
type Entry = (String, String);

/// The entries of all lists in a text. An entry begins with a line `* **Title.** `.
fn titled(text: &str) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    let mut inside = false;
    for line in text.lines() {
        if let Some(entry) = line.strip_prefix("* **") {
            let (title, rest) = entry
                .split_once(".**")
                .expect("a title fits in its line and ends with a full stop");
            entries.push((title.to_owned(), rest.to_owned()));
            inside = true;
        } else if inside && line.starts_with("  ") {
            let (_, rest) = entries.last_mut().expect("an entry has begun");
            rest.push(' ');
            rest.push_str(line.trim());
        } else {
            inside = false;
        }
    }
    entries
}

/// Parses `` `ferry-fs`: `one_rule`, `another`; `sync.sh`: `check`; `attributes.py` ``.
fn cited(list: &str) -> Vec<Cited> {
    let word = |text: &str| {
        let word = text.trim().strip_prefix('`').and_then(|text| text.strip_suffix('`'));
        word.filter(|word| !word.contains('`'))
            .unwrap_or_else(|| panic!("{text:?} is no name in {list:?}"))
            .to_owned()
    };
    let group = |group: &str| match group.split_once("`:") {
        Some((owner, names)) => {
            names.split(',').map(|name| (word(&format!("{owner}`")), Some(word(name)))).collect()
        }
        None => vec![(word(group), None)],
    };
    list.split(';').flat_map(group).collect()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The names of functions with a test attribute.
fn tests_in(source: &str) -> BTreeSet<String> {
    let (mut names, mut attributed) = (BTreeSet::new(), false);
    for line in source.lines().map(str::trim) {
        let declared = line.split_once("fn ").filter(|(before, _)| {
            before.split(' ').all(|word| matches!(word, "" | "pub" | "async"))
        });
        if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
            attributed = true;
        } else if let Some((_, rest)) = declared {
            if std::mem::take(&mut attributed) {
                names.insert(rest.split(['(', '<']).next().unwrap_or(rest).to_owned());
            }
        } else if !line.starts_with("#[") && !line.starts_with("//") {
            attributed = false;
        }
    }
    names
}

fn tests_below(folder: &Path, names: &mut BTreeSet<String>) {
    for entry in
        std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
    {
        let path = entry.expect("the folder can be listed").path();
        if path.is_dir() {
            tests_below(&path, names);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            names.extend(tests_in(&std::fs::read_to_string(&path).expect("a source can be read")));
        }
    }
}

/// Looks tests up; the sources of a crate are read once.
#[derive(Default)]
struct Tests(BTreeMap<String, BTreeSet<String>>);

impl Tests {
    fn exist(&mut self, (owner, name): &Cited) -> bool {
        let script = root().join("scripts/suites").join(owner);
        if owner.contains('.') {
            let Ok(source) = std::fs::read_to_string(script) else { return false };
            return name.as_ref().is_none_or(|name| {
                let (shell, python) = (format!("{name}() {{"), format!("def {name}("));
                source.lines().any(|line| line.starts_with(&shell) || line.starts_with(&python))
            });
        }
        let (home, Some(name)) = (root().join("crates").join(owner), name) else { return false };
        if Path::new(name).extension().is_some() {
            return std::fs::read_to_string(home.join(name))
                .is_ok_and(|source| !tests_in(&source).is_empty());
        }
        if !home.is_dir() {
            return false;
        }
        let names = self.0.entry(owner.clone()).or_insert_with(|| {
            let mut names = BTreeSet::new();
            tests_below(&home, &mut names);
            names
        });
        names.contains(name)
    }
}

/// The guarantees, and the appendix with their tests.
fn contract() -> (Vec<Entry>, Vec<Entry>) {
    let text =
        std::fs::read_to_string(root().join("docs/semantics.md")).expect("the contract is there");
    let (guarantees, appendices) =
        text.split_once("\n## Appendix A: ").expect("the guarantees end before appendix A");
    let (_, appendix) = appendices.split_once("\n## Appendix B: ").expect("appendix B follows");
    (titled(guarantees), titled(appendix))
}

#[test]
fn every_guarantee_has_an_entry_in_the_appendix() {
    let titles =
        |entries: Vec<Entry>| entries.into_iter().map(|(title, _)| title).collect::<Vec<_>>();
    let (guarantees, appendix) = contract();
    let (guarantees, appendix) = (titles(guarantees), titles(appendix));
    assert!(guarantees.len() > 100, "{} guarantees", guarantees.len());
    assert_eq!(
        guarantees.iter().collect::<BTreeSet<_>>().len(),
        guarantees.len(),
        "two guarantees have one title"
    );
    let differs = guarantees.iter().zip(&appendix).find(|(guarantee, entry)| guarantee != entry);
    assert!(
        differs.is_none(),
        "a guarantee, and what stands at its position in the appendix: {differs:?}"
    );
    assert_eq!(
        guarantees.len(),
        appendix.len(),
        "the last guarantees, or the last entries of the appendix, stand alone"
    );
}

#[test]
fn every_test_that_the_contract_names_exists() {
    let (_, appendix) = contract();
    let cited: BTreeSet<Cited> = appendix.iter().flat_map(|(_, list)| cited(list)).collect();
    assert!(cited.len() > 200, "{} tests", cited.len());
    let mut tests = Tests::default();
    let missing: Vec<_> = cited.iter().filter(|test| !tests.exist(test)).collect();
    assert!(missing.is_empty(), "not there: {missing:#?}");
}

#[test]
fn an_invented_test_is_noticed() {
    let mut tests = Tests::default();
    let cited = cited(
        " `ferry`: `an_invented_test_is_noticed`, `every_test_that_is_named_here_exists`, `titled`, `tests/tour.rs`, `tests/no.rs`; \
         `ferry-no`: `some_rule`; `sync.sh`: `lost_device`, `found_device`; `onefile.py`: `appends`; `attributes.py`; `no.py`",
    );
    let missing: Vec<_> = cited
        .into_iter()
        .filter(|test| !tests.exist(test))
        .map(|(owner, name)| name.unwrap_or(owner))
        .collect();
    assert_eq!(
        missing,
        [
            "every_test_that_is_named_here_exists",
            "titled",
            "tests/no.rs",
            "some_rule",
            "found_device",
            "no.py"
        ]
    );
}
