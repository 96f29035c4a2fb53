//! `docs/commands.md` is made of what `ferry help` prints for each command, and must be up to date.

use std::path::Path;
use std::process::Command;

/// Set to `1`, it makes the test write the file instead of comparing it.
const RENEW: &str = "FERRY_RENEW_DOCS";
/// Options that every command has; the file shows them once.
const COMMON: [&str; 3] = ["--log-level", "--help", "--version"];
/// Columns of the text, as everywhere in `docs/`.
const WIDTH: usize = 100;

const INTRODUCTION: &str = "\
# Commands

This file is generated from the definition of the command line (`crates/ferry/src/cli.rs`, and
`crates/ferry-bench/src/command/args.rs` for `ferry bench`).
A test compares the two; `FERRY_RENEW_DOCS=1 cargo test --release -p ferry --test commands`
writes the file anew. `ferry help COMMAND` prints the same.
";

/// What `ferry help` says of one command.
struct Help {
    words: Vec<String>,
    about: Vec<String>,
    usage: String,
    /// Names of its subcommands.
    commands: Vec<String>,
    arguments: Vec<Item>,
    options: Vec<Item>,
    /// What stands behind the options, as it is.
    after: Vec<String>,
}

/// An argument or option: how it is written, and its paragraphs.
struct Item {
    term: String,
    text: Vec<String>,
}

impl Help {
    fn of(words: &[&str]) -> Self {
        let output = Command::new(env!("CARGO_BIN_EXE_ferry")).arg("help").args(words).output();
        let output = output.expect("ferry runs");
        assert!(output.status.success(), "ferry help {}", words.join(" "));
        let text = String::from_utf8(output.stdout).expect("help is UTF-8");
        let mut help = Help {
            words: words.iter().map(|word| (*word).to_owned()).collect(),
            about: Vec::new(),
            usage: String::new(),
            commands: Vec::new(),
            arguments: Vec::new(),
            options: Vec::new(),
            after: Vec::new(),
        };
        help.parse(&text);
        help
    }

    fn parse(&mut self, text: &str) {
        let mut section = "about";
        for line in text.lines().map(str::trim_end) {
            if let Some(usage) = line.strip_prefix("Usage: ") {
                (self.usage, section) = (usage.to_owned(), "");
                continue;
            }
            match (section, line) {
                ("after", _) => self.after.push(line.to_owned()),
                ("about", "") => {}
                ("about", _) => self.about.push(line.to_owned()),
                (_, "Commands:" | "Arguments:" | "Options:") => section = line,
                ("Commands:", _) => {
                    self.commands.extend(line.split_whitespace().next().map(str::to_owned))
                }
                ("Options:", _) if !line.is_empty() && !line.starts_with(' ') => {
                    section = "after";
                    self.after.push(line.to_owned());
                }
                ("Arguments:", _) => add(&mut self.arguments, line),
                ("Options:", _) => add(&mut self.options, line),
                _ => assert!(line.is_empty(), "unexpected in the help of {:?}: {line}", self.words),
            }
        }
        self.commands.retain(|command| command != "help");
        self.options.retain(|option| {
            self.words.is_empty() || !COMMON.iter().any(|common| option.term.contains(common))
        });
    }

    fn title(&self) -> String {
        ["ferry"]
            .into_iter()
            .chain(self.words.iter().map(String::as_str))
            .collect::<Vec<_>>()
            .join(" ")
    }

    /// Its row in the overview.
    fn row(&self) -> String {
        let anchor = self.title().replace(' ', "-");
        format!("| [`{}`](#{anchor}) | {} |\n", self.title(), self.about[0].replace('|', "\\|"))
    }

    fn section(&self) -> String {
        let mut out = format!("\n## {}\n\n", self.title());
        for paragraph in &self.about {
            out += &(wrapped(&format!("{}.", paragraph.trim_end_matches('.')), "", "") + "\n");
        }
        out += &format!("    {}\n", self.usage);
        for items in [&self.arguments, &self.options] {
            for (index, item) in items.iter().enumerate() {
                let first = item.text.first().map_or("", String::as_str);
                out += if index == 0 { "\n" } else { "" };
                out += &wrapped(&format!("`{}`: {first}", item.term), "* ", "  ");
                for more in item.text.iter().skip(1) {
                    out += &wrapped(more, if more.starts_with("- ") { "  " } else { "\n  " }, "  ");
                }
            }
        }
        if !self.after.is_empty() {
            out += "\n```text\n";
            self.after.iter().for_each(|line| out += &format!("{line}\n"));
            out += "```\n";
        }
        out
    }
}

/// Adds a line of a list of arguments: it begins one, goes on with one, or divides its paragraphs.
fn add(items: &mut Vec<Item>, line: &str) {
    // Text on a line of its own stands ten columns in; no term does.
    let text = line.trim_start();
    if text.is_empty() {
        return;
    }
    if line.len() - text.len() < 10 {
        let (term, text) = text.split_once("  ").unwrap_or((text, ""));
        let text = text.trim();
        let text = if text.is_empty() { Vec::new() } else { vec![text.to_owned()] };
        items.push(Item { term: term.to_owned(), text });
    } else if let Some(item) = items.last_mut() {
        match item.text.last_mut() {
            // A default stands on its own in the long form, and behind the text in the short one.
            Some(before) if text.starts_with("[default: ") => *before = format!("{before} {text}"),
            _ => item.text.push(text.to_owned()),
        }
    }
}

/// The words of a text in lines of at most `WIDTH` columns: the first behind `first`, the others
/// behind `next`.
fn wrapped(text: &str, first: &str, next: &str) -> String {
    let mut out = first.to_owned();
    let mut column = first.trim_start_matches('\n').len();
    let mut begins = true;
    for word in text.split_whitespace() {
        if !begins && column + 1 + word.chars().count() > WIDTH {
            out += &format!("\n{next}{word}");
            column = next.len() + word.chars().count();
        } else {
            out += if begins { "" } else { " " };
            out += word;
            column += usize::from(!begins) + word.chars().count();
        }
        begins = false;
    }
    out + "\n"
}

/// A command and all below it, in the order of the definition.
fn walk(words: &[&str], found: &mut Vec<Help>) {
    let help = Help::of(words);
    let below = help.commands.clone();
    found.push(help);
    for command in &below {
        walk(&[words, &[command]].concat(), found);
    }
}

/// `ferry help bench` needs `ferry-bench` beside `ferry`. The tests of the workspace build it; if
/// this package is tested alone and it is not there, cargo builds it here.
fn build_bench() {
    let ferry = Path::new(env!("CARGO_BIN_EXE_ferry"));
    if ferry.with_file_name("ferry-bench").exists() {
        return;
    }
    let release = ferry.parent().is_some_and(|dir| dir.ends_with("release"));
    let built = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--package", "ferry-bench"])
        .args(release.then_some("--release"))
        .status();
    assert!(built.is_ok_and(|status| status.success()), "ferry-bench is built");
}

#[test]
fn the_list_of_commands_is_up_to_date() {
    build_bench();
    let mut found = Vec::new();
    walk(&[], &mut found);
    assert!(found.len() > 30, "{} commands", found.len());
    let mut text = INTRODUCTION.to_owned() + "\n| command | what it does |\n|---|---|\n";
    found.iter().filter(|help| help.commands.is_empty()).for_each(|help| text += &help.row());
    found.iter().for_each(|help| text += &help.section());
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/commands.md");
    if std::env::var_os(RENEW).is_some_and(|value| value == "1") {
        std::fs::write(&file, &text).expect("docs/commands.md can be written");
    }
    let there = std::fs::read_to_string(&file).unwrap_or_default();
    let different = text.lines().zip(there.lines()).position(|(a, b)| a != b);
    assert!(
        there == text,
        "docs/commands.md is not what `ferry help` says (from line {}); to renew it: \
         {RENEW}=1 cargo test --release -p ferry --test commands",
        different.unwrap_or_else(|| text.lines().count().min(there.lines().count())) + 1
    );
}
