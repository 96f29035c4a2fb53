//! `ferry replace`: rebuilds a side of a mirror and shows progress; through the daemon or server
//! that has the volume open, if there is one.

use std::io;
use std::path::{Path, PathBuf};

use ferry_device::{BlockDevice, ComponentState, ComponentStats, CompositeError, CompositeVolume};
use ferry_env::Env;

use crate::cli::ReplaceArgs;
use crate::control::{Control, print, stats_of};
use crate::error::CliError;
use crate::location::Location;
use crate::mkfs::refuse_device_directory;
use crate::open::{self, open_composite_when_free};
use crate::waiting::{PAUSE_MAX, pause, progress_bar};

/// The form of the progress bar.
const BAR: &str = "{bar:40} {bytes}/{total_bytes}  {binary_bytes_per_sec}  {eta} left";

/// The progress of a rebuild.
enum Progress {
    Copied(u64, u64),
    /// The number of blocks that no side could read.
    Complete(u64),
    Failed,
}

/// Runs the command.
pub fn run(args: &ReplaceArgs) -> Result<(), CliError> {
    let what = "not a mirror: it has no components, and only a mirror's side can be replaced";
    let Some(path) = args.volume.path() else {
        return Err(CliError::Failed(format!("{}: {what}", args.volume)));
    };
    let volume = path.canonicalize().map_err(CliError::path(path, "cannot open"))?;
    let old = std::path::absolute(&args.old).map_err(CliError::path(&args.old, "cannot find"))?;
    if !CompositeVolume::is_at(&volume) {
        return Err(CliError::Failed(format!("{}: {what}", args.volume)));
    }
    let new = std::path::absolute(&args.new).map_err(CliError::path(&args.new, "cannot find"))?;
    refuse_device_directory(&new)?;
    let unreadable = match Control::find(&Location::from(&volume))? {
        Some(control) => while_in_use(args, &control, &old, &new)?,
        None => alone(args, &volume, &old, &new)?,
    };
    let name = &args.volume;
    if unreadable > 0 {
        eprintln!(
            "ferry: {name}: no side could read {unreadable} blocks of 4 KiB. {} has zeros there, which count as damage; \
             `ferry scrub {name}` says which files they belong to",
            new.display()
        );
    }
    print(&format!("{name}: {} has replaced {}\n", new.display(), old.display()))
}

/// Has the daemon or server rebuild. Returns how many blocks could not be read.
fn while_in_use(
    args: &ReplaceArgs,
    control: &Control,
    old: &Path,
    new: &Path,
) -> Result<u64, CliError> {
    ferry_fuse::control::replace(control, old, new).map_err(|error| explain(args, &error))?;
    // The path without symbolic links, as in the volume's file.
    let name = new.canonicalize().unwrap_or_else(|_| PathBuf::from(new));
    watch(args, || {
        let stats = stats_of(control)?;
        let devices = stats["devices"].as_object();
        let device = devices
            .and_then(|all| all.iter().find(|(path, _)| name.to_string_lossy().ends_with(*path)));
        let number = |key: &str| device.and_then(|(_, one)| one[key].as_u64()).unwrap_or_default();
        Ok(match device.and_then(|(_, one)| one["state"].as_str()) {
            Some("rebuilding") => {
                Progress::Copied(number("rebuilt_bytes"), number("rebuild_bytes"))
            }
            Some("active") => Progress::Complete(number("unreadable_blocks")),
            _ => Progress::Failed,
        })
    })
}

/// Rebuilds in this process, if the volume is not mounted. Returns how many blocks could not be
/// read.
fn alone(args: &ReplaceArgs, volume: &Path, old: &Path, new: &Path) -> Result<u64, CliError> {
    let env = Env::real();
    let device = open_composite_when_free(volume, &env)
        .map_err(|e| open::explain(&Location::from(volume), &e))?;
    device.begin_replace(old, new).map_err(|error| match error {
        CompositeError::Foreign(_) => holds_data(new),
        other => CliError::Failed(format!("{}: {other}", args.volume)),
    })?;
    let name = new.canonicalize().map_err(CliError::path(new, "cannot find"))?;
    watch(args, || {
        let is_new = |one: &ComponentStats| Path::new(&one.name) == name;
        let Some(side) = device.components().into_iter().find(is_new) else {
            return Ok(Progress::Failed);
        };
        Ok(match side.state {
            ComponentState::Rebuilding => {
                let (done, total) = side.rebuilt.unwrap_or_default();
                Progress::Copied(done, total)
            }
            ComponentState::Active => Progress::Complete(side.unreadable),
            _ => Progress::Failed,
        })
    })
}

/// Shows a progress bar until the rebuild has ended. Returns how many blocks could not be read.
fn watch(
    args: &ReplaceArgs,
    mut look: impl FnMut() -> Result<Progress, CliError>,
) -> Result<u64, CliError> {
    let bar = progress_bar(BAR);
    loop {
        match look()? {
            Progress::Copied(done, total) => {
                bar.set_length(total);
                bar.set_position(done);
            }
            Progress::Complete(unreadable) => {
                bar.finish_and_clear();
                return Ok(unreadable);
            }
            Progress::Failed => {
                bar.finish_and_clear();
                let new = args.new.display();
                return Err(CliError::Failed(format!(
                    "{new}: the new side failed and is not used; the volume goes on with the sides it had (its log says more)"
                )));
            }
        }
        pause(PAUSE_MAX);
    }
}

fn holds_data(new: &Path) -> CliError {
    let what = "it holds data, which is left alone: remove it, or wipe the device's first MiB";
    CliError::Failed(format!("{}: {what}", new.display()))
}

/// The message for the daemon's answer; its log has the details.
fn explain(args: &ReplaceArgs, error: &io::Error) -> CliError {
    let (volume, old, new) = (&args.volume, args.old.display(), args.new.display());
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
        Some(libc::EPERM) => {
            format!("{volume}: only root and the user who mounted it may replace a side")
        }
        Some(libc::ENOSPC) => format!("{new}: too small for a side of {volume}"),
        _ => format!("{volume}: cannot replace {old} by {new}: {error}"),
    })
}
