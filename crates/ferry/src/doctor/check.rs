//! A check and its outcome, and the time limit of a question.

use std::sync::mpsc;
use std::thread;

use serde_json::Value;

use crate::socket::{TIME_MAX, object, printable};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Ok,
    /// It works, and could be better, or the doctor cannot tell.
    Note,
    Bad,
}

impl Outcome {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Bad => "bad",
        }
    }
}

/// What was checked, and how it is.
#[derive(Clone, Debug)]
pub struct Check {
    pub what: String,
    pub outcome: Outcome,
    pub found: String,
    /// What to do; `None` if it is ok.
    pub advice: Option<String>,
}

impl Check {
    pub fn ok(what: impl Into<String>, found: impl Into<String>) -> Self {
        Self { what: what.into(), outcome: Outcome::Ok, found: found.into(), advice: None }
    }

    pub fn note(what: impl Into<String>, found: impl Into<String>, advice: String) -> Self {
        let (what, found) = (what.into(), found.into());
        Self { what, outcome: Outcome::Note, found, advice: Some(advice) }
    }

    pub fn bad(what: impl Into<String>, found: impl Into<String>, advice: String) -> Self {
        Self { outcome: Outcome::Bad, ..Self::note(what, found, advice) }
    }

    pub fn json(&self) -> Value {
        object([
            ("check", self.what.clone().into()),
            ("result", self.outcome.name().into()),
            ("found", self.found.clone().into()),
            ("advice", self.advice.clone().into()),
        ])
    }

    pub fn cells(&self) -> [String; 3] {
        [printable(&self.what), self.outcome.name().into(), printable(&self.found)]
    }

    /// What to do, as a line.
    pub fn sentence(&self) -> Option<String> {
        let advice = self.advice.as_ref()?;
        Some(printable(&format!("{}: {}: {advice}", self.outcome.name(), self.what)))
    }
}

/// A word of a command line, as a shell reads it: a path may have anything in it.
pub fn quoted(word: &str) -> String {
    let is_plain = |char: char| char.is_ascii_alphanumeric() || "/._-+:@%,".contains(char);
    match word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// Looks at something that may hang, such as a file on a network file system. `None`: it takes
/// longer than [`TIME_MAX`]. The thread is left to itself then, and ends with the process.
pub fn within<T: Send + 'static>(look: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (seen, result) = mpsc::channel();
    let looking = move || {
        // If nobody waits any more, what it saw is of no use.
        let _ = seen.send(look());
    };
    thread::Builder::new().name("look".into()).spawn(looking).ok()?;
    result.recv_timeout(TIME_MAX).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_in_a_command_is_one_word_of_it() {
        for (path, word) in [
            ("/mnt/a-b_1.x", "/mnt/a-b_1.x"),
            ("/mnt/a b", "'/mnt/a b'"),
            ("/tmp/x;reboot", "'/tmp/x;reboot'"),
            ("/tmp/$(reboot)`", "'/tmp/$(reboot)`'"),
            ("/tmp/'; reboot", r"'/tmp/'\''; reboot'"),
        ] {
            assert_eq!(quoted(path), word);
        }
    }
}
