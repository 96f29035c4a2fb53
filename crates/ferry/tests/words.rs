//! Private words that the project no longer uses, each with the term of `docs/glossary.md` that
//! replaces it. The test reads all sources, scripts and texts, and names each line that has one.

use std::fs;
use std::path::{Path, PathBuf};

/// Words with one replacement.
struct Rule {
    words: &'static [&'static str],
    instead: &'static str,
    /// The folders in which the words are private; empty: all. Elsewhere they have a plain meaning.
    folders: &'static [&'static str],
}

const fn rule(words: &'static [&'static str], instead: &'static str) -> Rule {
    Rule { words, instead, folders: &[] }
}

const fn rule_in(
    folders: &'static [&'static str],
    words: &'static [&'static str],
    instead: &'static str,
) -> Rule {
    Rule { words, instead, folders }
}

/// Words that appear nowhere: not in code, comments, strings, scripts or texts.
const EVERYWHERE: &[Rule] = &[
    rule(
        &["promise", "promises", "promised", "promising"],
        "early acknowledgement; guarantee; unwritten (of an extent)",
    ),
    rule(&["series"], "epoch"),
    rule(&["purse", "purses"], "space reservation"),
    rule(&["aside"], "space reservation, reserved"),
    rule(&["disown", "disowns", "disowned", "disowning"], "fence"),
    rule(&["flying"], "in flight"),
    rule(&["crossing", "crossings"], "commit, flush in flight"),
    rule(&["dock", "docks", "docked", "boat", "boats", "seat", "seats"], "flush, waiters"),
    rule(&["passenger", "passengers"], "waiter"),
    rule(&["sail", "sails", "sailed", "sailing"], "seal (of a context)"),
    rule(&["stumble", "stumbles", "stumbled"], "replay failed"),
    rule(&["unbear", "unbears"], "revoke"),
    rule(&["sight", "sights"], "cache version"),
    rule(
        &["ticket", "tickets"],
        "capability, queue position, request id or flush number, as it means",
    ),
    rule(&["stretch", "stretches"], "range, chunk"),
    rule(&["whoever", "whomever"], "the client, the caller, each process that"),
    rule(&["redo", "redoes", "redone", "redoing", "made again"], "replay"),
    rule(&["told as lost"], "reported as a deferred error"),
];

/// Words that are no part of a Rust identifier. In sentences they are plain English, also in the
/// name of a test.
const IDENTIFIERS: &[Rule] = &[
    rule(&["who", "whos", "whom"], "client, owner, caller"),
    rule(&["news"], "message, event"),
    rule(&["moment", "moments"], "timestamp, version"),
    rule(&["place", "places"], "location, offset, slot, target"),
    rule(&["piece", "pieces"], "chunk, range"),
    rule(&["gone"], "removed, closed, ended"),
    rule(&["cargo", "cargos"], "write batch"),
    rule(&["land", "lands", "landed"], "complete"),
    rule(&["bear", "bears", "borne"], "grant"),
    rule(&["gate", "gates", "gated"], "grace-period barrier"),
    rule(&["shown"], "kernel-cached, reported, printed"),
    rule(&["kept"], "replay log; retained"),
    rule(&["price", "prices", "priced"], "reservation cost"),
    rule_in(&["crates/ferry-journal/"], &["stamp", "stamps"], "durable point"),
    // The journal has credits; tables have rows; and any test may have a late message.
    rule_in(&["crates/ferry-net/"], &["credit", "credits"], "reservation"),
    rule_in(
        &["crates/ferry-fs/", "crates/ferry-net/", "crates/ferry-journal/", "crates/ferry-device/"],
        &["row", "rows"],
        "wait queue",
    ),
    rule_in(
        &["crates/ferry-fs/", "crates/ferry-net/", "crates/ferry-fuse/"],
        &["late"],
        "blocking pool",
    ),
];

/// These files name the words in order to replace them.
const EXEMPT: &[&str] = &["docs/glossary.md", "CHANGELOG.md", "crates/ferry/tests/words.rs"];

/// A file (or the beginning of its path), a word that it may use, and why.
const ALLOWED: &[(&str, &str, &str)] = &[
    (
        "crates/ferry-net/src/server/capability.rs",
        "ticket",
        "clients hold capabilities that were hashed with this prefix",
    ),
    ("crates/ferry-net/src/tests/release_before.rs", "ticket", "the same, by release 0.1.0"),
    ("crates/ferry-net/src/transport/tls.rs", "tickets", "a field of rustls"),
];

/// Names of so many words are sentences: names of tests, and of functions that check a rule.
const SENTENCE_WORDS_MIN: usize = 5;

/// One use of a word.
struct Use {
    path: String,
    line: usize,
    word: &'static str,
    instead: &'static str,
}

/// Sources, scripts and texts of the project, by their paths below its root.
fn files(root: &Path) -> Vec<String> {
    const FOLDERS: [&str; 5] = ["crates", "docs", "scripts", "contrib", ".ci"];
    let name = |path: &Path| {
        path.strip_prefix(root).expect("it is below the root").to_str().expect("UTF-8").to_owned()
    };
    let is_text = |path: &Path| match path.extension().and_then(|e| e.to_str()) {
        None => !path.starts_with(root.join("crates")),
        Some(extension) => {
            ["rs", "md", "sh", "py", "c", "h", "toml", "service", "example"].contains(&extension)
        }
    };
    let mut found = Vec::new();
    let mut folders: Vec<PathBuf> = FOLDERS.iter().map(|folder| root.join(folder)).collect();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder of the project can be listed") {
            let path = entry.expect("so can its entries").path();
            if path.is_dir() {
                folders.push(path);
            } else if is_text(&path) {
                found.push(name(&path));
            }
        }
    }
    for entry in fs::read_dir(root).expect("the project can be listed") {
        let path = entry.expect("so can its entries").path();
        if path.extension().is_some_and(|extension| extension == "md") {
            found.push(name(&path));
        }
    }
    found.sort();
    found
}

/// The words of an identifier or a sentence, in lower case: `TlsTicket_of` is `tls`, `ticket`,
/// `of`.
fn words(text: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut before = ' ';
    let mut chars = text.chars().peekable();
    while let Some(char) = chars.next() {
        if char.is_ascii_alphabetic() {
            let next_is_small = chars.peek().is_some_and(char::is_ascii_lowercase);
            let begins = !before.is_ascii_alphabetic()
                || char.is_ascii_uppercase() && (before.is_ascii_lowercase() || next_is_small);
            if begins {
                words.push(String::new());
            }
            words.last_mut().expect("a word has begun").push(char.to_ascii_lowercase());
        }
        before = char;
    }
    words
}

/// A Rust source with blanks in place of comments, strings and characters.
fn code(source: &str) -> String {
    let bytes = source.as_bytes();
    let mut out = bytes.to_vec();
    let find = |from: usize, what: &str| {
        let found = bytes[from..].windows(what.len()).position(|part| part == what.as_bytes());
        found.map_or(bytes.len(), |at| from + at + what.len())
    };
    let mut at = 0;
    while at < bytes.len() {
        let rest = &bytes[at..];
        let is_name = at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_');
        let hashes = rest.iter().skip(1).take_while(|byte| **byte == b'#').count();
        let end = match rest {
            [b'/', b'/', ..] => find(at, "\n") - 1,
            [b'/', b'*', ..] => find(at, "*/"),
            [b'r', ..] if !is_name && rest.get(1 + hashes) == Some(&b'"') => {
                find(at + hashes + 2, &format!("\"{}", "#".repeat(hashes)))
            }
            [b'"', ..] => {
                let mut end = at + 1;
                while end < bytes.len() && bytes[end] != b'"' {
                    end += if bytes[end] == b'\\' { 2 } else { 1 };
                }
                end + 1
            }
            [b'\'', b'\\', ..] => find(at + 3, "'"),
            [b'\'', _, b'\'', ..] => at + 3,
            _ => {
                at += 1;
                continue;
            }
        };
        let end = end.clamp(at + 1, bytes.len());
        out[at..end].iter_mut().filter(|byte| **byte != b'\n').for_each(|byte| *byte = b' ');
        at = end;
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// The identifiers in a line of code. The name of a test is none: it is a sentence.
fn identifiers(line: &str, names_test: bool) -> Vec<Vec<String>> {
    let names = line.split(|char: char| !char.is_alphanumeric() && char != '_');
    let names = names.filter(|name| !name.is_empty());
    let names = names.skip_while(|name| names_test && *name != "fn");
    let names = names.skip(if names_test { 2 } else { 0 });
    names.map(words).filter(|words| words.len() < SENTENCE_WORDS_MIN).collect()
}

/// Whether the words contain a rule's word, which may be several words in a row.
fn contain(words: &[String], rule_word: &str) -> bool {
    let wanted: Vec<&str> = rule_word.split(' ').collect();
    words.windows(wanted.len()).any(|part| part.iter().zip(&wanted).all(|(a, b)| a == b))
}

/// The uses of private words in a file.
fn uses(path: &str, text: &str) -> Vec<Use> {
    let mut found = Vec::new();
    let applies = |rule: &&Rule| {
        rule.folders.is_empty() || rule.folders.iter().any(|folder| path.starts_with(folder))
    };
    let mut look = |line: usize, words: &[String], rules: &'static [Rule]| {
        for rule in rules.iter().filter(applies) {
            for word in rule.words.iter().filter(|word| contain(words, word)) {
                found.push(Use { path: path.into(), line, word, instead: rule.instead });
            }
        }
    };
    for (index, line) in text.lines().enumerate() {
        look(index + 1, &words(line), EVERYWHERE);
    }
    if path.ends_with(".rs") {
        let mut in_test = false;
        for (index, line) in code(text).lines().enumerate() {
            let names_test = in_test && line.contains("fn ");
            in_test = line.trim_start().starts_with("#[test]")
                || line.trim_start().starts_with("#[tokio::test")
                || in_test && !names_test;
            for identifier in identifiers(line, names_test) {
                // The name of the standard library for what happens where it is.
                if !contain(&identifier, "in place") {
                    look(index + 1, &identifier, IDENTIFIERS);
                }
            }
        }
    }
    found
}

/// rustfmt leaves comments as wide as they are.
#[test]
fn comments_end_at_column_100() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("the project");
    let mut wide = Vec::new();
    for path in files(root).into_iter().filter(|path| path.ends_with(".rs")) {
        let text = fs::read_to_string(root.join(&path)).expect("a source");
        let lines = (1..).zip(text.lines());
        let lines = lines.filter(|(_, line)| line.trim_start().starts_with("//"));
        wide.extend(
            lines
                .filter(|(_, line)| line.chars().count() > 100)
                .map(|(number, _)| format!("{path}:{number}")),
        );
    }
    assert!(wide.is_empty(), "comments beyond column 100:\n{}", wide.join("\n"));
}

#[test]
fn no_private_word_is_used() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("a root");
    let (mut found, mut allowed) = (Vec::new(), Vec::new());
    let files = files(&root);
    assert!(files.len() > 500, "{} files", files.len());
    for path in files.iter().filter(|path| !EXEMPT.contains(&path.as_str())) {
        let text = fs::read_to_string(root.join(path)).expect("a file of the project is text");
        for one in uses(path, &text) {
            let entry = ALLOWED.iter().position(|(at, word, _)| {
                one.path.starts_with(at) && contain(&words(word), one.word)
            });
            match entry {
                Some(entry) => allowed.push(entry),
                None => found.push(one),
            }
        }
    }
    let lines: Vec<String> = found
        .iter()
        .map(|one| format!("{}:{}: `{}`: say {}", one.path, one.line, one.word, one.instead))
        .collect();
    assert!(
        lines.is_empty(),
        "{} private words; docs/glossary.md has the terms:\n{}",
        lines.len(),
        lines.join("\n")
    );
    let unused: Vec<_> = (0..ALLOWED.len()).filter(|entry| !allowed.contains(entry)).collect();
    assert!(unused.is_empty(), "entries of ALLOWED that nothing needs: {unused:?}");
}

#[test]
fn words_of_identifiers_are_told_apart() {
    assert_eq!(
        words("TLSTicket_of HTTPServer2go"),
        ["tls", "ticket", "of", "http", "server", "go"]
    );
    assert_eq!(words("PURSE_MAX: u64"), ["purse", "max", "u"]);
    assert!(words("—").is_empty());
}

#[test]
fn comments_and_strings_are_no_code() {
    let source = "let who = r#\"gone\"#; // shown\nlet x: &'a str = \"kept\\\"row\"; let c = '\"'; /* news */ place();";
    let left: Vec<_> = code(source).split_whitespace().map(str::to_owned).collect();
    assert_eq!(
        left,
        [
            "let", "who", "=", ";", "let", "x:", "&'a", "str", "=", ";", "let", "c", "=", ";",
            "place();"
        ]
    );
}

#[test]
fn a_private_word_is_found_where_it_is_banned_and_only_there() {
    let found = |path: &str, text: &str| {
        uses(path, text).iter().map(|one| (one.line, one.word)).collect::<Vec<_>>()
    };
    let source = "// who is gone, is shown in place of a piece\nfn f(who: u8) {}\n#[test]\nfn nothing_is_kept() { let kept = 1; }\nptr.drop_in_place();\n";
    assert_eq!(found("crates/ferry-fs/src/a.rs", source), [(2, "who"), (4, "kept")]);
    assert_eq!(
        found("docs/a.md", "Nothing is made\nagain; it was made again."),
        [(2, "made again")]
    );
    assert_eq!(found("crates/ferry/src/a.rs", "let late_rows = credits;"), []);
    assert_eq!(
        found("crates/ferry-net/src/a.rs", "let late_rows = credits;"),
        [(1, "rows"), (1, "late"), (1, "credits")]
    );
    assert_eq!(found("scripts/a", "a_boat who"), [(1, "boat")]);
}
