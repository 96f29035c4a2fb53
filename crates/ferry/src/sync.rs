//! `ferry sync`: makes a whole volume durable, or many files on any file system; or waits until
//! that has happened.

use std::cell::RefCell;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::thread::{self, Builder};

use ferry_sync::Options;
use indicatif::ProgressBar;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::cli::SyncArgs;
use crate::control::{sync_volume, wait_for_file, wait_for_volume};
use crate::error::CliError;
use crate::location::Location;
use crate::waiting::progress_bar;
use crate::{mounts, served};

const _: () =
    assert!(ferry_sync::SYNC_FILES == ferry_fs::ioctl::SYNC_FILES, "one request, described twice");

/// A list whose names are separated by NUL has a NUL within this many bytes: the kernel accepts no
/// longer path.
const SEPARATOR_WITHIN: u64 = 2 * libc::PATH_MAX as u64;

/// Runs the command.
pub fn run(args: &SyncArgs) -> Result<ExitCode, CliError> {
    raise_open_files();
    let bar = files_bar(args);
    let mut failed = false;
    let mut complain = |path: &Path, error: CliError| {
        failed = true;
        bar.suspend(|| eprintln!("ferry: {}", one_line(path, &error)));
    };
    match &args.from {
        None if args.wait_only => {
            let served = served::is_any()?;
            for (path, error) in wait_for_all(&args.paths, served) {
                complain(path, error);
            }
        }
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
                    Scope::Volume(volume) => {
                        sync_volume(&volume).unwrap_or_else(|e| complain(path, e))
                    }
                }
            }
            sync_files(args, files.into_iter(), &bar, &mut complain);
        }
    }
    bar.finish_and_clear();
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Waits for all paths at a time: what they have now goes into one commit. Returns those that
/// failed.
fn wait_for_all(paths: &[PathBuf], served: bool) -> Vec<(&Path, CliError)> {
    let next = AtomicUsize::new(0);
    let (fail, failed) = channel();
    let wait = || {
        while let Some(path) = paths.get(next.fetch_add(1, Ordering::Relaxed)) {
            let waited = match scope_of(path, false, served) {
                Scope::Files(path) if is_special(&path) => {
                    wait_for_volume(&Location::from(folder_of(&path)))
                }
                Scope::Files(path) => wait_for_file(&path),
                Scope::Volume(volume) => wait_for_volume(&volume),
            };
            if let Err(error) = waited {
                fail.send((path.as_path(), error)).expect("the receiver lives");
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..paths.len().min(ferry_sync::JOBS) {
            // Without a further thread those that there are wait for the rest.
            let _started = Builder::new().spawn_scoped(scope, wait);
        }
        wait();
    });
    failed.try_iter().collect()
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
    Volume(Location),
}

/// Decides what an argument means; `served`: it may be a served volume. Links that the user names
/// are followed, others are not.
fn scope_of(path: &Path, recursive: bool, served: bool) -> Scope {
    let volume = match Location::parse(path.as_os_str()) {
        Ok(Location::Path(_)) | Err(_) => Location::from(path),
        Ok(volume) => return Scope::Volume(volume),
    };
    // The request to the volume reports a daemon that does not answer; looking at the mount would
    // wait for it.
    let is_mount = || std::path::absolute(path).ok().and_then(|path| mounts::at(&path).ok()?);
    if !recursive && is_mount().is_some_and(|mount| mount.is_ferry()) {
        return Scope::Volume(volume);
    }
    // A user who may not ask the server gets that error.
    if served && !matches!(served::at(&volume), Ok(None)) {
        return Scope::Volume(volume);
    }
    match fs::metadata(path) {
        Ok(meta) if meta.is_dir() && !recursive => Scope::Volume(volume),
        // The mount's daemon has died: the request to the volume reports that best.
        Err(e) if mounts::says_dead(&e) => Scope::Volume(volume),
        _ if path.is_symlink() => Scope::Files(path.canonicalize().unwrap_or_else(|_| path.into())),
        _ => Scope::Files(path.into()),
    }
}

/// Whether an open would wait, or ask something other than the file system: a FIFO, a device, a
/// socket.
fn is_special(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|meta| !meta.is_file())
}

/// The folder that a path is in.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
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

/// The progress of files, of which so many are known.
fn files_bar(args: &SyncArgs) -> ProgressBar {
    if args.from.is_none() && !args.recursive {
        let bar = progress_bar("{bar:40} {pos}/{len} files  {per_sec}  {eta} left");
        bar.set_length(args.paths.len() as u64);
        bar
    } else {
        let bar = progress_bar("{spinner} {pos} files  {per_sec}  {elapsed}");
        bar.unset_length();
        bar
    }
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
