//! `ferry replace`: a new side for a mirror, with progress; through the daemon where the volume is mounted.

use std::fs::File;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ferry_device::{BlockDevice, ComponentState, ComponentStats, CompositeError, CompositeVolume, Env};
use indicatif::{ProgressBar, ProgressStyle};
use rustix::event::{Timespec, poll};
use serde_json::Value;

use crate::cli::ReplaceArgs;
use crate::control::print;
use crate::error::CliError;
use crate::holder::{self, mounted, open_composite_when_free};
use crate::mounts;

/// How often progress is looked at.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// How far a rebuild is.
enum Progress {
    Copied(u64, u64),
    Complete,
    Failed,
}

/// Runs the command.
pub fn run(args: &ReplaceArgs) -> Result<(), CliError> {
    let volume = args.volume.canonicalize().map_err(CliError::path(&args.volume, "cannot open"))?;
    let old = std::path::absolute(&args.old).map_err(CliError::path(&args.old, "cannot find"))?;
    if !CompositeVolume::is_at(&volume) {
        let what = "not a mirror: it has no components, and only a mirror's side can be replaced";
        return Err(CliError::Failed(format!("{}: {what}", args.volume.display())));
    }
    let new = std::path::absolute(&args.new).map_err(CliError::path(&args.new, "cannot find"))?;
    if mounted(&volume) {
        while_mounted(args, &volume, &old, &new)?;
    } else {
        alone(args, &volume, &old, &new)?;
    }
    print(&format!("{}: {} has taken the place of {}\n", args.volume.display(), new.display(), old.display()))
}

/// The daemon does it.
fn while_mounted(args: &ReplaceArgs, volume: &Path, old: &Path, new: &Path) -> Result<(), CliError> {
    let unreadable = || CliError::path(volume, "cannot ask the daemon of");
    let mount = mounts::find(volume).map_err(unreadable())?;
    let mount = mount.ok_or_else(|| CliError::NotMounted(volume.into()))?;
    mounts::must_be_reached(&mount)?;
    let root = File::open(&mount.target).map_err(CliError::path(&mount.target, "cannot open"))?;
    ferry_fuse::control::replace(&root, old, new).map_err(|error| explain(args, &error))?;
    // By its name without symbolic links, as the volume's file has it.
    let name = new.canonicalize().unwrap_or_else(|_| PathBuf::from(new));
    watch(args, || {
        let stats = ferry_fuse::control::stats(&root).map_err(unreadable())?;
        let stats: Value = serde_json::from_slice(&stats).map_err(|e| unreadable()(e.into()))?;
        let devices = stats["devices"].as_object();
        let device =
            devices.and_then(|all| all.iter().find(|(path, _)| name.to_string_lossy().ends_with(*path)));
        let number = |key: &str| device.and_then(|(_, one)| one[key].as_u64()).unwrap_or_default();
        Ok(match device.and_then(|(_, one)| one["state"].as_str()) {
            Some("rebuilding") => Progress::Copied(number("rebuilt_bytes"), number("rebuild_bytes")),
            Some("active") => Progress::Complete,
            _ => Progress::Failed,
        })
    })
}

/// Nobody has it mounted: this process does it.
fn alone(args: &ReplaceArgs, volume: &Path, old: &Path, new: &Path) -> Result<(), CliError> {
    let env = Env::real();
    let device = open_composite_when_free(volume, &env).map_err(|e| holder::explain(volume, &e))?;
    device.begin_replace(old, new).map_err(|error| match error {
        CompositeError::Foreign(_) => holds_data(new),
        other => CliError::Failed(format!("{}: {other}", args.volume.display())),
    })?;
    let name = new.canonicalize().map_err(CliError::path(new, "cannot find"))?;
    watch(args, || {
        let is_new = |one: &ComponentStats| Path::new(&one.name) == name;
        let state = device.components().into_iter().find(is_new).map(|one| (one.state, one.rebuilt));
        Ok(match state {
            Some((ComponentState::Rebuilding, copied)) => {
                let (done, total) = copied.unwrap_or_default();
                Progress::Copied(done, total)
            }
            Some((ComponentState::Active, _)) => Progress::Complete,
            _ => Progress::Failed,
        })
    })
}

/// Shows a bar to people until the rebuild has ended.
fn watch(args: &ReplaceArgs, mut look: impl FnMut() -> Result<Progress, CliError>) -> Result<(), CliError> {
    let bar = progress_bar();
    loop {
        match look()? {
            Progress::Copied(done, total) => {
                bar.set_length(total);
                bar.set_position(done);
            }
            Progress::Complete => {
                bar.finish_and_clear();
                return Ok(());
            }
            Progress::Failed => {
                bar.finish_and_clear();
                let new = args.new.display();
                return Err(CliError::Failed(format!(
                    "{new}: the new side failed and is not used; the volume goes on with the sides it had (its log says more)"
                )));
            }
        }
        let wait = Timespec { tv_sec: 0, tv_nsec: i64::from(LOOK_AGAIN.subsec_nanos()) };
        poll(&mut [], Some(&wait)).map_err(|e| CliError::Failed(format!("cannot wait: {e}")))?;
    }
}

fn progress_bar() -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style =
        ProgressStyle::with_template("{bar:40} {bytes}/{total_bytes}  {binary_bytes_per_sec}  {eta} left");
    ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn holds_data(new: &Path) -> CliError {
    let what = "it holds data, which is left alone: remove it, or wipe the device's first MiB";
    CliError::Failed(format!("{}: {what}", new.display()))
}

/// What the daemon's answer means; its log says more.
fn explain(args: &ReplaceArgs, error: &io::Error) -> CliError {
    let (volume, old, new) = (args.volume.display(), args.old.display(), args.new.display());
    CliError::Failed(match error.raw_os_error() {
        Some(libc::EOPNOTSUPP | libc::ENOTTY) => {
            format!("{volume}: not a mirror: only a mirror's side can be replaced")
        }
        Some(libc::ENXIO) => format!("{old}: not a side of {volume} (that file lists them)"),
        Some(libc::EEXIST) => return holds_data(&args.new),
        Some(libc::ENOTBLK) => format!("{new}: neither a regular file nor a block device"),
        Some(libc::ETXTBSY) => format!("{new}: in use, by this volume or another process"),
        Some(libc::ENOENT | libc::EACCES | libc::EROFS) => {
            format!("{new}: the daemon cannot open or make it: {error}")
        }
        Some(libc::EBUSY) => format!("{volume}: a side is being rebuilt already"),
        Some(libc::EPERM) => format!("{volume}: only root and who has mounted it may replace a side"),
        Some(libc::ENOSPC) => format!("{new}: too small for a side of {volume}"),
        _ => format!("{volume}: cannot replace {old} by {new}: {error}"),
    })
}
