//! `ferry sync`: makes a whole volume durable, or many files on any file system.

use std::cell::RefCell;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Cursor, IsTerminal, Read};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ferry_sync::Options;
use indicatif::{ProgressBar, ProgressStyle};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::cli::SyncArgs;
use crate::control::sync_volume;
use crate::error::CliError;
use crate::{mounts, served};

const _: () =
    assert!(ferry_sync::SYNC_FILES == ferry_fs::ioctl::SYNC_FILES, "one request, described twice");

/// A list whose names are separated by NUL has a NUL within this many bytes: the kernel accepts no
/// longer path.
const SEPARATOR_WITHIN: u64 = 2 * libc::PATH_MAX as u64;

/// Runs the command.
pub fn run(args: &SyncArgs) -> Result<ExitCode, CliError> {
    raise_open_files();
    let bar = progress_bar(args);
    let mut failed = false;
    let mut complain = |path: &Path, error: CliError| {
        failed = true;
        bar.suspend(|| eprintln!("ferry: {}", one_line(path, &error)));
    };
    match &args.from {
        Some(list) => {
            let mut list = List::open(list)?;
            let trouble = RefCell::new(None);
            let names = std::iter::from_fn(|| {
                list.next_name().unwrap_or_else(|e| trouble.replace(Some(e)).and(None))
            });
            sync_files(args, names, &bar, &mut complain);
            if let Some(error) = trouble.take() {
                return Err(CliError::path(
                    args.from.clone().unwrap_or_default(),
                    "cannot read the list",
                )(error));
            }
        }
        None => {
            let mut files = Vec::new();
            let served = !args.recursive && served::is_any()?;
            for path in &args.paths {
                match scope_of(path, args.recursive, served) {
                    Scope::Files(path) => files.push(path),
                    Scope::Volume => sync_volume(path).unwrap_or_else(|e| complain(path, e)),
                }
            }
            sync_files(args, files.into_iter(), &bar, &mut complain);
        }
    }
    bar.finish_and_clear();
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn sync_files(
    args: &SyncArgs,
    names: impl Iterator<Item = PathBuf>,
    bar: &ProgressBar,
    complain: &mut impl FnMut(&Path, CliError),
) {
    let mut options = Options { data_only: args.data, ..Options::default() };
    if let Some(jobs) = args.jobs {
        options.jobs = jobs.into();
    }
    ferry_sync::sync_each(ferry_sync::paths(names, args.recursive), &options, |path, result| {
        bar.inc(1);
        if let Err(error) = result {
            complain(&path, CliError::path(&path, "cannot sync")(error));
        }
    });
}

enum Scope {
    Files(PathBuf),
    Volume,
}

/// Decides what an argument means; `served`: it may be a served volume. Links that the user names
/// are followed, others are not.
fn scope_of(path: &Path, recursive: bool, served: bool) -> Scope {
    // The request to the volume reports a daemon that does not answer; looking at the mount would
    // wait for it.
    let is_mount = || std::path::absolute(path).ok().and_then(|path| mounts::at(&path).ok()?);
    if !recursive && is_mount().is_some_and(|mount| mount.is_ferry()) {
        return Scope::Volume;
    }
    // A user who may not ask the server gets that error.
    if served && !matches!(served::at(path), Ok(None)) {
        return Scope::Volume;
    }
    match fs::metadata(path) {
        Ok(meta) if meta.is_dir() && !recursive => Scope::Volume,
        // The mount's daemon has died: the request to the volume reports that best.
        Err(e) if mounts::says_dead(&e) => Scope::Volume,
        _ if path.is_symlink() => Scope::Files(path.canonicalize().unwrap_or_else(|_| path.into())),
        _ => Scope::Files(path.into()),
    }
}

/// Keeps a message on one line: a file's name may contain any byte.
fn one_line(path: &Path, error: &CliError) -> String {
    let text = error.to_string();
    if path.to_str().is_some_and(|p| !p.contains(char::is_control)) {
        text
    } else {
        text.escape_debug().to_string()
    }
}

/// The names to be synced, from a file or stdin.
struct List {
    input: Box<dyn BufRead>,
    separator: u8,
}

impl List {
    fn open(path: &Path) -> Result<Self, CliError> {
        let failed = |e| CliError::path(path, "cannot read the list")(e);
        let input: Box<dyn BufRead> = if path.as_os_str() == "-" {
            Box::new(io::stdin().lock())
        } else {
            Box::new(BufReader::new(File::open(path).map_err(failed)?))
        };
        Self::new(input).map_err(failed)
    }

    fn new(mut input: Box<dyn BufRead>) -> io::Result<Self> {
        let mut start = Vec::new();
        input.by_ref().take(SEPARATOR_WITHIN).read_until(0, &mut start)?;
        let separator = if start.ends_with(&[0]) { 0 } else { b'\n' };
        Ok(Self { input: Box::new(Cursor::new(start).chain(input)), separator })
    }

    fn next_name(&mut self) -> io::Result<Option<PathBuf>> {
        loop {
            let mut name = Vec::new();
            if self.input.read_until(self.separator, &mut name)? == 0 {
                return Ok(None);
            }
            name.pop_if(|last| *last == self.separator);
            if !name.is_empty() {
                return Ok(Some(OsString::from_vec(name).into()));
            }
        }
    }
}

/// Raises the limit of open files as far as allowed: on FerryFS files are synced by the thousand.
pub fn raise_open_files() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if let Err(error) =
        setrlimit(Resource::Nofile, Rlimit { current: maximum.or(current), maximum })
    {
        tracing::debug!(%error, "the limit of open files stays");
    }
}

/// Shows a progress bar only on a terminal.
fn progress_bar(args: &SyncArgs) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let known = args.from.is_none() && !args.recursive;
    let (bar, template) = if known {
        (
            ProgressBar::new(args.paths.len() as u64),
            "{bar:40} {pos}/{len} files  {per_sec}  {eta} left",
        )
    } else {
        (ProgressBar::new_spinner(), "{spinner} {pos} files  {per_sec}  {elapsed}")
    };
    bar.with_style(
        ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &[u8]) -> Vec<String> {
        let mut list = List::new(Box::new(Cursor::new(text.to_vec()))).expect("readable");
        std::iter::from_fn(|| list.next_name().expect("readable"))
            .map(|p| p.display().to_string())
            .collect()
    }

    #[test]
    fn a_list_is_separated_by_nul_or_newline() {
        assert_eq!(names(b"a\nb c\n\nd"), ["a", "b c", "d"]);
        assert_eq!(names(b"a\nb\0c\0"), ["a\nb", "c"]);
        assert_eq!(names(b"a\0b"), ["a", "b"]);
        assert!(names(b"").is_empty());
        let long = "x".repeat(4000);
        assert_eq!(names(format!("{long}\n{long}\n{long}\n").as_bytes()), [&*long; 3]);
        assert_eq!(names(format!("{long}\0{long}").as_bytes()), [&*long; 2]);
    }
}
