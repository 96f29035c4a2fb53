//! `ferry trace`: shows each request of a mount: its caller, its path, its time and its error. The
//! daemon records requests while somebody asks for them, and is asked over its socket (`asked`).

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Component, Path};
use std::time::Duration;

use ferry_env::{Env, Utc};
use ferry_fs::Ino;
use serde_json::Value;

use crate::asked;
use crate::cli::TraceArgs;
use crate::control::is_read;
use crate::error::CliError;
use crate::list::{self, Kind};
use crate::mounts::{self, Mount};
use crate::size::format_nanos;
use crate::socket::printable;
use crate::traced::{NAMES, REQUESTS};
use crate::waiting::{stop_on_signals, wait};

/// How often the daemon is asked.
const INTERVAL: Duration = Duration::from_millis(100);
/// Inodes in one question, at most; what is behind them has no path.
const NAMES_MAX: usize = 2000;
/// Directories above each other for which names are asked.
const DEPTH_MAX: usize = 64;
/// Names that are remembered, at most.
const KNOWN_MAX: usize = 1 << 20;

const ROOT: Ino = 1;

/// Runs until a signal stops it, the mount ends, or it has shown enough requests.
pub fn run(args: &TraceArgs) -> Result<(), CliError> {
    let target = args.target.clone().map_or_else(|| list::only(&[Kind::Mount]), Ok)?;
    let mount = mounts::meant(&target)?;
    let below = args.path.as_deref().map(|path| wanted(path, &mount)).transpose()?;
    let stop = stop_on_signals()?;
    let clock = Env::real().clock;
    let (mut names, mut printed) = (Names::default(), 0);
    let mut answer = ask(&mount, REQUESTS)?;
    loop {
        let next = answer["next"].as_u64().unwrap_or_default();
        let pause = if answer["more"] == true { Duration::ZERO } else { INTERVAL };
        if !wait(pause, &stop) {
            return Ok(());
        }
        answer = match ask(&mount, &format!("{REQUESTS}{next}")) {
            // Another mount may be there by now: that one is not asked for.
            Err(_) if !is_there(&mount) => {
                eprintln!("ferry: {target}: it was unmounted");
                return Ok(());
            }
            answer => answer?,
        };
        if let Some(lost @ 1..) = answer["lost"].as_u64() {
            eprintln!("ferry: {lost} requests are not shown: they came faster than they are read");
        }
        if answer["paused"] == true {
            eprintln!(
                "ferry: some requests are not shown: this command did not run meanwhile, or nobody read what it shows"
            );
        }
        let now = clock.wall().as_nanos();
        let requests = answer["requests"].as_array().map(Vec::as_slice).unwrap_or_default();
        names.learn(&mount, requests)?;
        for request in requests {
            let path = names.path_in(request);
            let is_wanted = below.as_ref().is_none_or(|below| is_below(path.as_deref(), below));
            let is_slow = request["time_ns"].as_u64().unwrap_or_default() >= slow(args);
            if !is_wanted || !is_slow {
                continue;
            }
            let begun = now.saturating_sub(request["age_ns"].as_u64().unwrap_or_default().into());
            let line = match args.json {
                true => as_json(request, begun, path),
                false => line(request, begun, path),
            };
            printed += 1;
            if !is_read(&format!("{line}\n"))? || args.count == Some(printed) {
                return Ok(());
            }
        }
    }
}

fn slow(args: &TraceArgs) -> u64 {
    args.slow.map_or(0, |slow| u64::try_from(slow.as_nanos()).unwrap_or(u64::MAX))
}

fn is_there(mount: &Mount) -> bool {
    mounts::list().is_ok_and(|all| all.iter().any(|one| one.id == mount.id))
}

fn ask(mount: &Mount, question: &str) -> Result<Value, CliError> {
    asked::must_ask(mount, question, Duration::ZERO, "")
}

/// The path that is wanted, as requests have it: from the root of the mount.
fn wanted(path: &Path, mount: &Mount) -> Result<String, CliError> {
    if path.components().any(|part| part == Component::ParentDir) {
        return Err(CliError::Usage(format!("--path: {}: give it without ..", path.display())));
    }
    let absolute = std::path::absolute(path).map_err(CliError::path(path, "cannot find"))?;
    let inside = absolute.strip_prefix(&mount.target).map_err(|_| {
        CliError::Usage(format!(
            "--path: {} is not below {}",
            path.display(),
            mount.target.display()
        ))
    })?;
    Ok(format!("/{}", inside.to_string_lossy()))
}

fn is_below(path: Option<&str>, above: &str) -> bool {
    let Some(rest) = path.and_then(|path| path.strip_prefix(above.trim_end_matches('/'))) else {
        return false;
    };
    rest.is_empty() || rest.starts_with('/')
}

/// The names that requests have told, or the daemon.
#[derive(Default)]
struct Names {
    /// Of each inode a directory in which it is, and its name there.
    of: HashMap<Ino, (Ino, String)>,
    at: HashMap<(Ino, String), Ino>,
    /// The daemon has been asked for these in vain.
    unknown: HashSet<Ino>,
}

impl Names {
    /// Learns what requests tell, and asks the daemon for what they do not.
    fn learn(&mut self, mount: &Mount, requests: &[Value]) -> Result<(), CliError> {
        if self.of.len().max(self.at.len()).max(self.unknown.len()) > KNOWN_MAX {
            *self = Self::default();
        }
        requests.iter().for_each(|request| self.note(request));
        let mut wanted: BTreeSet<Ino> = requests.iter().filter_map(inode).collect();
        for _ in 0..DEPTH_MAX {
            // Those whose names are known lead to the directories above.
            let tops: BTreeSet<Ino> = wanted.iter().map(|ino| self.top(*ino)).collect();
            let is_open = |ino: &Ino| *ino != ROOT && !self.unknown.contains(ino);
            let asked: Vec<Ino> = tops.into_iter().filter(is_open).take(NAMES_MAX).collect();
            if asked.is_empty() {
                break;
            }
            let answer = ask(mount, &format!("{NAMES}{asked:?}"))?;
            self.unknown.extend(&asked);
            for name in answer["names"].as_array().into_iter().flatten() {
                if let (Some(ino), Some(dir), Some(name)) =
                    (name[0].as_u64(), name[1].as_u64(), name[2].as_str())
                {
                    self.set(ino, dir, name);
                }
            }
            wanted = asked.into_iter().collect();
        }
        Ok(())
    }

    fn note(&mut self, request: &Value) {
        let (Some(dir), Some(name)) = (inode(request), request["name"].as_str()) else { return };
        if request["errno"].is_i64() {
            return;
        }
        if let Some(found) = request["found"].as_u64() {
            self.set(found, dir, name);
        }
        if let (Some(to), Some(to_name)) =
            (request["to_inode"].as_u64(), request["to_name"].as_str())
            && let Some(moved) = self.at.remove(&(dir, name.to_owned()))
        {
            let other = self.at.get(&(to, to_name.to_owned())).copied();
            self.set(moved, to, to_name);
            if request["exchanges"] == true
                && let Some(other) = other
            {
                self.set(other, dir, name);
            }
        }
    }

    fn set(&mut self, ino: Ino, dir: Ino, name: &str) {
        self.unknown.remove(&ino);
        self.of.insert(ino, (dir, name.into()));
        self.at.insert((dir, name.into()), ino);
    }

    /// The highest directory above an inode to which the names lead.
    fn top(&self, ino: Ino) -> Ino {
        let mut at = ino;
        for _ in 0..DEPTH_MAX {
            match self.of.get(&at) {
                Some((dir, _)) => at = *dir,
                None => break,
            }
        }
        at
    }

    /// The path from the root of the mount, as far as it is known.
    fn path(&self, ino: Ino) -> Option<String> {
        let (mut parts, mut at) = (Vec::new(), ino);
        while at != ROOT {
            let (dir, name) = self.of.get(&at).filter(|_| parts.len() < DEPTH_MAX)?;
            parts.push(format!("/{name}"));
            at = *dir;
        }
        parts.reverse();
        Some(if parts.is_empty() { "/".into() } else { parts.concat() })
    }

    /// The path that a request is about.
    fn path_in(&self, request: &Value) -> Option<String> {
        let path = self.path(inode(request)?)?;
        Some(match request["name"].as_str() {
            Some(name) => format!("{}/{name}", path.trim_end_matches('/')),
            None => path,
        })
    }
}

fn inode(request: &Value) -> Option<Ino> {
    // Of what concerns no file, as statfs, it is 0 or the root.
    request["inode"].as_u64().filter(|ino| *ino != 0)
}

/// The process that has made a request. The kernel's own requests have none.
fn caller(request: &Value) -> String {
    match request["process"].as_u64() {
        None | Some(0) => "kernel".into(),
        Some(pid) => format!("{}[{pid}]", request["caller"].as_str().unwrap_or("?")),
    }
}

fn error(request: &Value) -> Option<String> {
    let errno = i32::try_from(request["errno"].as_i64()?).ok()?;
    let text = std::io::Error::from_raw_os_error(errno).to_string();
    Some(text.split(" (os error").next().unwrap_or_default().to_owned())
}

fn as_json(request: &Value, begun: u128, path: Option<String>) -> String {
    let mut request = request.clone();
    if let Some(facts) = request.as_object_mut() {
        facts.remove("age_ns");
        facts.insert("begun_ns".into(), u64::try_from(begun).unwrap_or(u64::MAX).into());
        facts.insert("path".into(), path.into());
    }
    request.to_string()
}

/// A request for people.
fn line(request: &Value, begun: u128, path: Option<String>) -> String {
    let number = |key: &str| request[key].as_u64().unwrap_or_default();
    let path = path.unwrap_or_else(|| match request["name"].as_str() {
        Some(name) => format!("inode {}/{name}", number("inode")),
        None => format!("inode {}", number("inode")),
    });
    let operation = request["operation"].as_str().unwrap_or_default();
    let range = request["bytes"].as_u64().map(|bytes| format!("  {bytes} at {}", number("offset")));
    let to = request["to_name"].as_str().map(|name| format!("  to {name}"));
    let is_missing = operation == "lookup" && request["found"].is_null();
    let missing = is_missing.then(|| "no such name".to_owned());
    let end = error(request).or(missing).map(|error| format!("  {error}"));
    let at = Utc::from_secs(u64::try_from(begun / 1_000_000_000).unwrap_or_default()).to_string();
    let at = at.trim_end_matches(" UTC");
    let micros = begun / 1000 % 1_000_000;
    let parts = [range, to, end].into_iter().flatten();
    let tail: String = parts.collect();
    printable(&format!(
        "{at}.{micros:06} UTC {:>10}  {}  {operation} {path}{tail}",
        format_nanos(number("time_ns")),
        caller(request)
    ))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::disallowed_methods, reason = "tests may unwrap")]
    use super::*;
    use serde_json::json;

    #[test]
    fn a_path_is_put_together_from_what_requests_told() {
        let mut names = Names::default();
        let found = |dir: Ino, name: &str, ino: Ino| json!({"operation": "lookup", "inode": dir, "name": name, "found": ino});
        names.note(&found(1, "a", 2));
        names.note(&found(2, "b", 3));
        let write = json!({"operation": "write", "inode": 3});
        assert_eq!(names.path_in(&write).as_deref(), Some("/a/b"));
        assert_eq!(names.path_in(&found(2, "c", 4)).as_deref(), Some("/a/c"));
        names.note(&json!({"inode": 2, "name": "b", "to_inode": 1, "to_name": "d"}));
        assert_eq!(names.path_in(&write).as_deref(), Some("/d"));
        names.note(&json!({"inode": 1, "name": "d", "to_inode": 2, "to_name": "e", "errno": 2}));
        assert_eq!(names.path_in(&write).as_deref(), Some("/d"), "that one failed");
        names.note(&found(1, "f", 5));
        let exchange = |exchanges: bool| json!({"inode": 1, "name": "d", "to_inode": 1, "to_name": "f", "exchanges": exchanges});
        names.note(&exchange(true));
        let other = json!({"operation": "write", "inode": 5});
        assert_eq!(names.path_in(&write).as_deref(), Some("/f"));
        assert_eq!(names.path_in(&other).as_deref(), Some("/d"));
        assert_eq!(names.path(9), None);
        assert_eq!(names.path(ROOT).as_deref(), Some("/"));
    }

    #[test]
    fn a_path_is_below_another_by_whole_names() {
        for (path, above, is) in [
            ("/a/b", "/a", true),
            ("/a", "/a", true),
            ("/ab", "/a", false),
            ("/a", "/", true),
            ("/", "/", true),
            ("/b", "/a", false),
        ] {
            assert_eq!(is_below(Some(path), above), is, "{path} {above}");
        }
        assert!(!is_below(None, "/"));
    }
}
