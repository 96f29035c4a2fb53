//! `ferry warm`: fetches files of a volume in a store into the cache on disk of its mount.
//!
//! This process finds the files, and asks the daemon for a few of them at a time. The daemon
//! fetches what their contents need, in parallel, past the page cache. Two requests are under way:
//! while the last parts of one arrive, the other one keeps the connections busy.

use std::collections::{HashSet, VecDeque};
use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::Builder;
use std::time::Duration;

use ferry_env::Env;
use ferry_fs::ioctl::WARM_FILES_MAX;
use ferry_fuse::control::{self, Warmed};
use parking_lot::Mutex;

use crate::asked;
use crate::cli::WarmArgs;
use crate::control::{explain, open, print, read_stats};
use crate::error::CliError;
use crate::location::Location;
use crate::mounts::{self, Mount};
use crate::size::{format_bytes, format_nanos};
use crate::table::thousands;
use crate::waiting::{PAUSE_MAX, progress_bar, stop_on_signals};

/// Bytes of files that one request asks for, about.
const REQUEST_BYTES: u64 = 32 << 20;
/// Requests under way.
const REQUESTS: usize = 2;

/// A regular file of a mount.
struct Found {
    ino: u64,
    size: u64,
}

/// What one request asks for: whole files, or a range of one.
struct Portion {
    files: Vec<u64>,
    range: Range<u64>,
    bytes: u64,
}

/// What was warmed, and what was not.
#[derive(Default)]
struct Totals {
    files: u64,
    bytes: u64,
    fetched: u64,
    cached: u64,
    time: Duration,
    stopped: bool,
}

/// Runs the command.
pub fn run(args: &WarmArgs) -> Result<ExitCode, CliError> {
    let stop = stop_on_signals()?;
    let clock = Env::real().clock;
    let begun = clock.monotonic();
    let (mut totals, mut complaints) = (Totals::default(), Vec::new());
    // All are looked at before anything is fetched.
    let paths = args.paths.iter().map(|path| usable(path).map(|mount| (path, mount)));
    let paths: Vec<_> = paths.collect::<Result<_, _>>()?;
    let mut begins = HashSet::new();
    for (path, mount) in paths {
        if !totals.stopped {
            let begins = begins.insert(mount.device);
            warm(path, begins, &stop, &mut totals, &mut complaints)?;
        }
    }
    for complaint in &complaints {
        eprintln!("ferry: {complaint}");
    }
    totals.time = clock.monotonic().saturating_sub(begun);
    print(&last_line(&totals))?;
    let whole = complaints.is_empty() && !totals.stopped;
    Ok(if whole { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The mount that a path is on, if its daemon is one that has a store and answers.
fn usable(path: &Path) -> Result<Mount, CliError> {
    let mount = mounts::above(path).filter(Mount::is_ferry);
    if let Some(remote) = mount.as_ref().filter(|mount| mount.is_remote()) {
        return Err(CliError::Failed(format!(
            "{}: mounted from {}, and the cache on disk is the server's (`ferry serve --cache DIR`): whatever is read here once is in it, \
             for example by `tar -cf - {0} | wc -c`",
            path.display(),
            remote.source.display()
        )));
    }
    asked::must_answer(path)?;
    let kind = fs::metadata(path).map_err(|e| explain(path, "cannot warm", e))?.file_type();
    if !kind.is_file() && !kind.is_dir() {
        let path = path.display();
        return Err(CliError::Failed(format!("{path}: neither a file nor a directory")));
    }
    mount.ok_or_else(|| CliError::NotMounted(path.into()))
}

/// Warms one path.
fn warm(
    path: &Path,
    begins: bool,
    stop: &Arc<AtomicBool>,
    totals: &mut Totals,
    complaints: &mut Vec<String>,
) -> Result<(), CliError> {
    let root = Arc::new(open(path)?);
    // A request for no file finds out whether it can be done at all.
    control::warm(&*root, begins, &(0..0), &[]).map_err(|e| refused(path, e))?;
    let found = find(path, stop, complaints)?;
    let bytes = found.iter().map(|file| file.size).sum();
    let (files, before) = (found.len() as u64, totals.bytes);
    let bar = progress_bar("{bar:40} {bytes}/{total_bytes}  {bytes_per_sec}  {eta} left  {msg}");
    bar.set_length(bytes);
    let work = Arc::new(Work { portions: Mutex::new(portions(found)), stop: Arc::clone(stop) });
    let (tell, told) = channel();
    for _ in 0..REQUESTS {
        let (work, root, tell) = (Arc::clone(&work), Arc::clone(&root), tell.clone());
        // It is not waited for at the end: a request to a store that is away takes long.
        let started =
            Builder::new().name("warm".into()).spawn(move || work.carry_out(&root, &tell));
        started.map_err(|e| CliError::Failed(format!("cannot start a thread: {e}")))?;
    }
    drop(tell);
    let mut full = false;
    let ended = loop {
        match told.recv_timeout(PAUSE_MAX) {
            Ok(Ok((portion, warmed))) => {
                full |= warmed.full;
                note(totals, &portion, warmed);
                bar.inc(portion.bytes);
                bar.set_message(format!("{} fetched", format_bytes(totals.fetched)));
                if full {
                    work.portions.lock().clear();
                }
            }
            Ok(Err(_)) if stop.load(Ordering::Relaxed) => break Ok(()),
            Ok(Err(error)) => break Err(refused(path, error)),
            Err(RecvTimeoutError::Timeout) if stop.load(Ordering::Relaxed) => break Ok(()),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break Ok(()),
        }
    };
    bar.finish_and_clear();
    totals.stopped = stop.load(Ordering::Relaxed);
    totals.files += files;
    if full {
        complaints.push(full_text(path, totals.bytes - before, bytes));
    }
    ended
}

fn note(totals: &mut Totals, portion: &Portion, warmed: Warmed) {
    totals.fetched += warmed.fetched_bytes;
    totals.cached += warmed.cached_bytes;
    if !warmed.full {
        totals.bytes += portion.bytes;
    }
}

fn full_text(path: &Path, warmed: u64, bytes: u64) -> String {
    let stats = read_stats(&Location::from(path)).unwrap_or_default();
    let size = stats["store"]["cache_bytes_max"].as_u64().map(format_bytes).unwrap_or_default();
    format!(
        "{}: too large for the cache on disk ({size}), which is full of it now: about {} of {} are there; a mount with a larger cache_disk \
         holds more",
        path.display(),
        format_bytes(warmed),
        format_bytes(bytes)
    )
}

fn last_line(totals: &Totals) -> String {
    let nanos = u64::try_from(totals.time.as_nanos()).unwrap_or(u64::MAX);
    format!(
        "{}{} file{}: {} read from the store, {} were there already, {}\n",
        if totals.stopped { "stopped: " } else { "" },
        thousands(totals.files),
        if totals.files == 1 { "" } else { "s" },
        format_bytes(totals.fetched),
        format_bytes(totals.cached),
        format_nanos(nanos).trim()
    )
}

/// Portions that nobody has asked for yet.
struct Work {
    portions: Mutex<VecDeque<Portion>>,
    stop: Arc<AtomicBool>,
}

impl Work {
    /// Asks for one portion after the other, and tells what came of it.
    fn carry_out(&self, mount: &fs::File, tell: &Sender<io::Result<(Portion, Warmed)>>) {
        let next = || self.portions.lock().pop_front();
        while let Some(portion) = next().filter(|_| !self.stop.load(Ordering::Relaxed)) {
            let warmed = control::warm(mount, false, &portion.range, &portion.files);
            let failed = warmed.is_err();
            // Nobody listens any more if the command has ended.
            if tell.send(warmed.map(|warmed| (portion, warmed))).is_err() || failed {
                return;
            }
        }
    }
}

/// Cuts files into portions.
fn portions(found: Vec<Found>) -> VecDeque<Portion> {
    let mut all: VecDeque<Portion> = VecDeque::new();
    let whole = 0..REQUEST_BYTES;
    for file in found {
        if file.size > REQUEST_BYTES {
            let mut at = 0;
            while at < file.size {
                let range = at..file.size.min(at + REQUEST_BYTES);
                at = range.end;
                let bytes = range.end - range.start;
                all.push_back(Portion { files: vec![file.ino], range, bytes });
            }
            continue;
        }
        match all.back_mut() {
            Some(last)
                if last.range == whole
                    && last.bytes + file.size <= REQUEST_BYTES
                    && last.files.len() < WARM_FILES_MAX =>
            {
                last.files.push(file.ino);
                last.bytes += file.size;
            }
            _ => all.push_back(Portion {
                files: vec![file.ino],
                range: whole.clone(),
                bytes: file.size,
            }),
        }
    }
    all
}

/// The regular files at and below a path, each once. What cannot be read is complained of.
fn find(
    path: &Path,
    stop: &AtomicBool,
    complaints: &mut Vec<String>,
) -> Result<Vec<Found>, CliError> {
    let failed = |path: &Path, error| CliError::path(path, "cannot be read")(error);
    let top = fs::metadata(path).map_err(|e| failed(path, e))?;
    let bar = progress_bar("{spinner} {pos} files  {per_sec}  {elapsed}");
    bar.unset_length();
    let (mut found, mut links) = (Vec::new(), HashSet::new());
    let mut todo = Vec::new();
    let mut look = |at: PathBuf, meta: &fs::Metadata, todo: &mut Vec<PathBuf>| {
        if meta.dev() != top.dev() {
            return;
        }
        if meta.is_dir() {
            todo.push(at);
        } else if meta.is_file() && (meta.nlink() == 1 || links.insert(meta.ino())) {
            bar.inc(1);
            found.push(Found { ino: meta.ino(), size: meta.len() });
        }
    };
    look(path.into(), &top, &mut todo);
    while let Some(directory) = todo.pop().filter(|_| !stop.load(Ordering::Relaxed)) {
        let entries = match fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(error) => {
                complaints.push(failed(&directory, error).to_string());
                continue;
            }
        };
        for entry in entries {
            let looked = entry.and_then(|entry| {
                let meta = entry.metadata()?;
                look(entry.path(), &meta, &mut todo);
                Ok(())
            });
            match looked {
                // It was removed meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => complaints.push(failed(&directory, error).to_string()),
                Ok(()) => {}
            }
        }
    }
    bar.finish_and_clear();
    Ok(found)
}

fn refused(path: &Path, error: io::Error) -> CliError {
    let name = path.display();
    CliError::Failed(match error.raw_os_error() {
        Some(libc::EOPNOTSUPP) => {
            format!("{name}: nothing to warm: its volume is on this machine, not in a store")
        }
        Some(libc::ENOMEDIUM) => format!(
            "{name}: its mount has no cache on disk to be filled: mount it with -o cache=DIR,cache_disk=SIZE"
        ),
        Some(libc::ENOSPC) => format!(
            "{name}: the disk of the cache is full or has failed: make room there, and mount anew"
        ),
        Some(libc::EPERM) => format!("{name}: only root and the user who mounted it may warm it"),
        Some(libc::EIO) => format!(
            "{name}: something could not be read from the store; the log of the mount's daemon says what"
        ),
        _ => return explain(path, "cannot warm", error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_files_share_requests_and_large_ones_take_several() {
        let sizes = [0, 5, REQUEST_BYTES - 5, 1, 2 * REQUEST_BYTES + 7, 3];
        let found = sizes.iter().enumerate();
        let found = found.map(|(n, size)| Found { ino: n as u64 + 1, size: *size }).collect();
        let cut: Vec<_> =
            portions(found).into_iter().map(|p| (p.files, p.range, p.bytes)).collect();
        let (all, size) = (0..REQUEST_BYTES, REQUEST_BYTES);
        assert_eq!(
            cut,
            [
                (vec![1, 2, 3], all.clone(), size),
                (vec![4], all.clone(), 1),
                (vec![5], all.clone(), size),
                (vec![5], size..2 * size, size),
                (vec![5], 2 * size..2 * size + 7, 7),
                (vec![6], all, 3),
            ]
        );
        let many = (1..=2 * WARM_FILES_MAX as u64 + 1).map(|ino| Found { ino, size: 1 }).collect();
        let cut: Vec<_> = portions(many).into_iter().map(|portion| portion.files.len()).collect();
        assert_eq!(cut, [WARM_FILES_MAX, WARM_FILES_MAX, 1]);
    }
}
