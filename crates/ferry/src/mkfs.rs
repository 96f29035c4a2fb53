//! `ferry mkfs`.

use std::path::Path;
use std::sync::Arc;

use ferry_device::{
    BLOCK_SIZE, BlockDevice, CompositeOptions, CompositeVolume, DeviceError, Env, FileDevice, Kind, OpenMode,
};
use ferry_fs::volume::{MkfsOptions, SIZE_MIN, Superblock, VolumeError, mkfs};

use crate::cli::MkfsArgs;
use crate::control::print;
use crate::error::CliError;
use crate::holder::explain;
use crate::size::format_bytes;

/// Size of a volume in a file, in bytes, if nobody says another: it is sparse, so what counts is what is used.
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

/// Makes the volume with the defaults, if there is no file of that name. Says whether it did.
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
    if let Some(kind) = args.device {
        return make_composite(args, kind, &env);
    }
    let (device, created) = open(args, &env)?;
    let device: Arc<dyn BlockDevice> = Arc::new(device);
    mkfs(&device, &options(args), &env).map_err(|error| {
        if created {
            // Half a volume under the name that the user chose would only be in the way.
            if let Err(error) = std::fs::remove_file(&args.volume) {
                tracing::warn!(%error, "cannot remove {}", args.volume.display());
            }
        }
        refused(&args.volume, &error)
    })
}

fn refused(volume: &Path, error: &VolumeError) -> CliError {
    let more = match error {
        VolumeError::Foreign => ", which is left alone; `ferry mkfs --force` would overwrite it",
        _ => "",
    };
    CliError::Failed(format!("{}: {error}{more}", volume.display()))
}

/// A volume of several components.
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
    // The devices were looked at; what an earlier volume has left behind their heads is not in the way. `size` was shared out.
    let options = MkfsOptions { size: 0, force: true, ..options(args) };
    let made = mkfs(&device, &options, env);
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

/// The device, and whether its file was made just now. A file that is there is used only if it is empty or `--force` was given.
fn open(args: &MkfsArgs, env: &Env) -> Result<(FileDevice, bool), CliError> {
    let path = &args.volume;
    let size = whole(args.size.unwrap_or(DEFAULT_SIZE));
    match FileDevice::create(path, size, false, env) {
        Ok(device) => Ok((device, true)),
        Err(DeviceError::Exists(_)) => reopen(args, env).map(|device| (device, false)),
        Err(error) => Err(failed(path, error)),
    }
}

/// Opens what is there already. A file that `--force` gives up, or that is empty, gets the size that was asked for; a block
/// device, and a file that somebody has made large enough, keep theirs.
fn reopen(args: &MkfsArgs, env: &Env) -> Result<FileDevice, CliError> {
    let path = &args.volume;
    let file = std::fs::metadata(path).is_ok_and(|m| m.is_file());
    let empty = std::fs::metadata(path).is_ok_and(|m| m.len() == 0);
    if file && (args.force || empty) {
        return FileDevice::create(path, whole(args.size.unwrap_or(DEFAULT_SIZE)), true, env)
            .map_err(|e| failed(path, e));
    }
    let device = FileDevice::open(path, OpenMode::ReadWrite, env).map_err(|e| failed(path, e))?;
    if file && device.capacity() < SIZE_MIN {
        return Err(refused(path, &VolumeError::Foreign));
    }
    Ok(device)
}

/// A size in whole blocks.
fn whole(size: u64) -> u64 {
    size - size % BLOCK_SIZE as u64
}

fn failed(volume: &Path, error: DeviceError) -> CliError {
    explain(volume, &error.into())
}
