//! `ferry mkfs`: makes a new volume.

use std::path::Path;
use std::sync::Arc;

use ferry_device::{
    BLOCK_SIZE, BlockDevice, CompositeOptions, CompositeVolume, DeviceError, FileDevice, Kind,
    OpenMode,
};
use ferry_env::Env;
use ferry_fs::volume::{MkfsOptions, SIZE_MIN, Superblock, VolumeError, check_options, mkfs};

use crate::cli::MkfsArgs;
use crate::control::print;
use crate::error::CliError;
use crate::holder::explain;
use crate::size::format_bytes;

/// The default size of a volume in a file, in bytes: the file is sparse, and takes space as it is
/// used.
const DEFAULT_SIZE: u64 = 64 << 30;

/// Runs the command.
pub fn run(args: &MkfsArgs) -> Result<(), CliError> {
    let made = make(args)?;
    print(&format!(
        "{}: a new volume of {}, log {}, id {}\n",
        args.volume.display(),
        format_bytes(made.size),
        format_bytes(made.log_len),
        made.name()
    ))
}

/// Makes the volume with the defaults, if there is no file of that name; returns whether it did.
pub fn make_if_absent(volume: &Path) -> Result<bool, CliError> {
    if volume.exists() {
        return Ok(false);
    }
    let args = MkfsArgs {
        volume: volume.into(),
        size: None,
        log_size: None,
        force: false,
        device: None,
        components: Vec::new(),
    };
    make(&args).map(|_| true)
}

fn make(args: &MkfsArgs) -> Result<Superblock, CliError> {
    let env = Env::real();
    if args.size.is_some_and(|size| size < SIZE_MIN) {
        let least = SIZE_MIN >> 20;
        return Err(CliError::Failed(format!(
            "{}: a volume needs at least {least} MiB",
            args.volume.display()
        )));
    }
    for path in std::iter::once(&args.volume).chain(&args.components) {
        refuse_device_directory(path)?;
    }
    if let Some(kind) = args.device {
        // Block devices keep their size, and the volume has that size.
        let of_files =
            !args.components.iter().any(|path| std::fs::metadata(path).is_ok_and(|m| !m.is_file()));
        if args.size.is_some() || of_files {
            let checked =
                check_options(whole(args.size.unwrap_or(DEFAULT_SIZE)), &options(args), &env);
            checked.map_err(|error| refused(&args.volume, &error))?;
        }
        return make_composite(args, kind, &env);
    }
    if gets_its_size(args) {
        let checked = check_options(whole(args.size.unwrap_or(DEFAULT_SIZE)), &options(args), &env);
        checked.map_err(|error| refused(&args.volume, &error))?;
    }
    let (device, created) = open(args, &env)?;
    let device: Arc<dyn BlockDevice> = Arc::new(device);
    let made = mkfs(&device, &options(args), &env);
    made.inspect(|made| warn_of_small_host(&args.volume, made.size, &*device)).map_err(|error| {
        if created {
            // A half-made volume under the name that the user chose would block the next attempt.
            if let Err(error) = std::fs::remove_file(&args.volume) {
                tracing::warn!(%error, "cannot remove {}", args.volume.display());
            }
        }
        refused(&args.volume, &error)
    })
}

/// Whether the volume is a file that has no size yet, or loses its size.
fn gets_its_size(args: &MkfsArgs) -> bool {
    let found = std::fs::metadata(&args.volume);
    found.map_or(true, |found| found.is_file() && (args.force || found.len() == 0))
}

/// Warns if the host has less space than the volume may come to need. That is often intended, so it
/// is said once; a mount warns again only if the host is nearly full.
fn warn_of_small_host(volume: &Path, size: u64, device: &dyn BlockDevice) {
    let Some(has) = device.host_free().filter(|has| *has < size) else { return };
    tracing::warn!(
        "{}: the volume takes space as it fills, up to {}, and the file system on which it lies has {} left",
        volume.display(),
        format_bytes(size),
        format_bytes(has)
    );
}

/// A missing name below /dev is a typing error: the volume would be a file in memory, in place of a
/// device. /dev/shm is for files.
pub fn refuse_device_directory(path: &Path) -> Result<(), CliError> {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.into());
    let parent = absolute.parent().unwrap_or(&absolute);
    let parent = parent.canonicalize().unwrap_or_else(|_| parent.into());
    if path.exists() || !parent.starts_with("/dev") || parent.starts_with("/dev/shm") {
        return Ok(());
    }
    Err(CliError::Failed(format!(
        "{}: there is no such device, and no file is made below /dev: look at `lsblk` for the right name",
        path.display()
    )))
}

fn refused(volume: &Path, error: &VolumeError) -> CliError {
    let more = match error {
        VolumeError::Foreign => ", which is left alone; `ferry mkfs --force` would overwrite it",
        _ => "",
    };
    CliError::Failed(format!("{}: {error}{more}", volume.display()))
}

/// Makes a volume of several components.
fn make_composite(args: &MkfsArgs, kind: Kind, env: &Env) -> Result<Superblock, CliError> {
    let composite = CompositeOptions {
        kind,
        paths: args.components.clone(),
        size: args.size.unwrap_or(DEFAULT_SIZE),
        overwrite: args.force,
    };
    let made = CompositeVolume::create(&args.volume, &composite, env);
    let volume = Arc::new(made.map_err(|e| explain(&args.volume, &e))?);
    let device: Arc<dyn BlockDevice> = volume.clone();
    // The devices were checked; leftovers of an earlier volume behind their headers do no harm.
    // `size` is divided among them already.
    let options = MkfsOptions { size: 0, force: true, ..options(args) };
    let made = mkfs(&device, &options, env);
    if let Ok(made) = &made {
        warn_of_small_host(&args.volume, made.size, &*device);
    }
    drop(device);
    made.map_err(|error| {
        if let Some(volume) = Arc::into_inner(volume) {
            volume.remove_created();
        }
        refused(&args.volume, &error)
    })
}

fn options(args: &MkfsArgs) -> MkfsOptions {
    MkfsOptions {
        size: args.size.unwrap_or(0),
        log_size: args.log_size,
        force: args.force,
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        ..MkfsOptions::default()
    }
}

/// Opens or makes the device; says whether it made the file. An existing file is used only if it is
/// empty or `--force` was given.
fn open(args: &MkfsArgs, env: &Env) -> Result<(FileDevice, bool), CliError> {
    let path = &args.volume;
    let size = whole(args.size.unwrap_or(DEFAULT_SIZE));
    match FileDevice::create(path, size, false, env) {
        Ok(device) => Ok((device, true)),
        Err(DeviceError::Exists(_)) => reopen(args, env).map(|device| (device, false)),
        Err(error) => Err(failed(path, size, error)),
    }
}

/// Opens an existing file or device. An empty file, or one that `--force` gives up, gets the
/// requested size; a block device, and a file that is large enough already, keep theirs.
fn reopen(args: &MkfsArgs, env: &Env) -> Result<FileDevice, CliError> {
    let path = &args.volume;
    let size = whole(args.size.unwrap_or(DEFAULT_SIZE));
    let file = std::fs::metadata(path).is_ok_and(|m| m.is_file());
    if gets_its_size(args) {
        return FileDevice::create(path, size, true, env).map_err(|e| failed(path, size, e));
    }
    let device =
        FileDevice::open(path, OpenMode::ReadWrite, env).map_err(|e| failed(path, size, e))?;
    if file && device.capacity() < SIZE_MIN {
        return Err(refused(path, &VolumeError::Foreign));
    }
    Ok(device)
}

/// Rounds a size to whole blocks.
fn whole(size: u64) -> u64 {
    size - size % BLOCK_SIZE as u64
}

fn failed(volume: &Path, size: u64, error: DeviceError) -> CliError {
    match &error {
        DeviceError::Io { source, .. } if source.raw_os_error() == Some(libc::EFBIG) => {
            CliError::Failed(format!(
                "{}: the file system there takes no file of {}: choose a smaller --size, or another file system (ext4 takes 16 TiB, XFS 8 EiB)",
                volume.display(),
                format_bytes(size)
            ))
        }
        _ => explain(volume, &error.into()),
    }
}
