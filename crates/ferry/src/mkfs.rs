//! `ferry mkfs`: makes a new volume.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferry_device::{
    BLOCK_SIZE, BlockDevice, CompositeError, CompositeOptions, CompositeVolume, DeviceError,
    FileDevice, Kind, OpenMode,
};
use ferry_env::Env;
use ferry_fs::volume::{
    MkfsOptions, SIZE_MIN, Superblock, VolumeError, check_options, mkfs, read_superblock,
    segments_of,
};
use ferry_object::{
    Compression, Made, ObjectError, OnDisk, Opening, StoreUrl, VolumeOptions, has_volume,
    is_encrypted, make_volume, open_volume, remove_volume,
};

use crate::cli::{Compress, MkfsArgs};
use crate::control::print;
use crate::error::CliError;
use crate::location::{Location, resolved_url};
use crate::open::{Opened, explain};
use crate::passphrase;
use crate::size::format_bytes;

/// The default size of a volume in a file, in bytes: the file is sparse, and takes space as it is
/// used.
const DEFAULT_SIZE: u64 = 64 << 30;

/// The same of a volume in a store, which takes only what is written: no user should meet the end
/// of it. It cannot be changed later.
const STORE_SIZE: u64 = 1 << 40;

/// Runs the command.
pub fn run(args: &MkfsArgs) -> Result<(), CliError> {
    let args = &with_endpoint(args)?;
    let made = make(args)?;
    // With all that other commands need to find it.
    let name = match &args.volume {
        Location::Store(url) => Location::Store(resolved_url(url)),
        other => other.clone(),
    };
    print(&format!(
        "{name}: a new volume of {}, log {}, id {}\n",
        format_bytes(made.size),
        format_bytes(made.log_len),
        made.name()
    ))
}

/// The arguments, with the endpoint in the volume's URL.
fn with_endpoint(args: &MkfsArgs) -> Result<MkfsArgs, CliError> {
    let Some(endpoint) = &args.endpoint else { return Ok(args.clone()) };
    let Location::Store(url) = &args.volume else {
        return Err(CliError::Usage(format!("{}: --endpoint is for s3://", args.volume)));
    };
    let url = url.clone().with_endpoint(endpoint).map_err(CliError::Usage)?;
    Ok(MkfsArgs { volume: Location::Store(url), endpoint: None, ..args.clone() })
}

/// Makes the volume with the defaults, if there is none; returns whether it did.
pub fn make_if_absent(volume: &Location) -> Result<bool, CliError> {
    let is_there = match volume {
        Location::Path(path) => path.exists(),
        Location::Store(url) => {
            has_volume(url, &Env::real()).map_err(|error| explain(volume, &error.into()))?
        }
        Location::Snapshot(..) | Location::Server(_) => return Err(volume.not_the_volume()),
    };
    Ok(!is_there && make(&MkfsArgs::of(volume.clone())).map(|_| true)?)
}

fn make(args: &MkfsArgs) -> Result<Superblock, CliError> {
    if args.size.is_some_and(|size| size < SIZE_MIN) {
        let least = SIZE_MIN >> 20;
        return Err(CliError::Failed(format!(
            "{}: a volume needs at least {least} MiB",
            args.volume
        )));
    }
    if (args.encrypt || args.compress.is_some()) && !matches!(args.volume, Location::Store(_)) {
        return Err(CliError::Usage(format!(
            "{}: --encrypt and --compress are for a volume in a store (s3://, dir://); an encrypted block device (cryptsetup) is what another volume can lie on",
            args.volume
        )));
    }
    match &args.volume {
        Location::Path(_) if args.volume.snapshot().is_some() => Err(args.volume.not_the_volume()),
        Location::Path(path) => make_on_devices(args, path),
        Location::Store(url) => make_in_store(args, url),
        Location::Snapshot(..) | Location::Server(_) => Err(args.volume.not_the_volume()),
    }
}

/// Makes a volume in a store.
fn make_in_store(args: &MkfsArgs, url: &StoreUrl) -> Result<Superblock, CliError> {
    if args.device.is_some() || args.force {
        return Err(CliError::Usage(format!(
            "{url}: --device and --force are for files and block devices; a store with a volume is never overwritten"
        )));
    }
    let (env, options) = (Env::real(), options(args));
    let failed = |error: ObjectError| explain(&args.volume, &error.into());
    let capacity = whole(args.size.unwrap_or(STORE_SIZE));
    let boundary = segments_of(capacity, &options, &env);
    let boundary = boundary.map_err(|error| refused(&args.volume, &error))?;
    let encryption = match args.encrypt {
        true => Some(passphrase::new_encryption(&args.volume)?),
        false => None,
    };
    let compression = match args.compress {
        Some(Compress::Off) => Compression::Off,
        Some(Compress::Zstd) | None => Compression::Zstd,
    };
    let volume =
        VolumeOptions { compression, encryption, ..VolumeOptions::new(capacity, boundary) };
    let made = match make_volume(url, &volume, &env) {
        Err(ObjectError::VolumeExists) => half_made(args, url, &volume, &env),
        made => made,
    };
    // From here on this process owns the volume.
    let Made { device, is_new, warnings } = made.map_err(failed)?;
    for warning in warnings {
        tracing::warn!("{url}: {warning}");
    }
    let made = (|| {
        let opened = Opened::in_store(device.clone());
        let made = mkfs(&opened.device, &options, &env);
        // Why the device failed says more than that it did.
        device.failure().map_or(Ok(()), Err)?;
        opened.close().map(|()| made)
    })();
    if !matches!(made, Ok(Ok(_))) && is_new {
        // Half a volume under the name that the user chose would only be in the way.
        remove_volume(url, &env);
    }
    made.map_err(failed)?.map_err(|error| refused(&args.volume, &error))
}

/// Opens a volume whose making was interrupted, so that it can be ended. Any other volume is an
/// error, and left as it is.
fn half_made(
    args: &MkfsArgs,
    url: &StoreUrl,
    options: &VolumeOptions,
    env: &Env,
) -> Result<Made, ObjectError> {
    // Another volume may be encrypted, or not.
    if is_encrypted(url, env)? != options.encryption.is_some() {
        return Err(ObjectError::VolumeExists);
    }
    let passphrase = options.encryption.as_ref().map(|encryption| &encryption.passphrase);
    let found: Arc<dyn BlockDevice> =
        match open_volume(url, Opening::Read, passphrase.cloned(), &OnDisk::default(), env) {
            Err(ObjectError::WrongPassphrase) => return Err(ObjectError::VolumeExists),
            found => found?,
        };
    let is_half = matches!(read_superblock(&found), Err(VolumeError::Empty))
        && args.size.is_none_or(|size| whole(size) == found.capacity());
    drop(found);
    if !is_half {
        return Err(ObjectError::VolumeExists);
    }
    let opening = Opening::OWN;
    let device = open_volume(url, opening, passphrase.cloned(), &OnDisk::default(), env)?;
    Ok(Made { device, is_new: false, warnings: Vec::new() })
}

fn make_on_devices(args: &MkfsArgs, volume: &Path) -> Result<Superblock, CliError> {
    let env = Env::real();
    for path in std::iter::once(volume).chain(args.components.iter().map(PathBuf::as_path)) {
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
        return make_composite(args, volume, kind, &env);
    }
    if gets_its_size(args, volume) {
        let checked = check_options(whole(args.size.unwrap_or(DEFAULT_SIZE)), &options(args), &env);
        checked.map_err(|error| refused(&args.volume, &error))?;
    }
    let (device, created) = open(args, volume, &env)?;
    let device: Arc<dyn BlockDevice> = Arc::new(device);
    let made = mkfs(&device, &options(args), &env);
    made.inspect(|made| warn_of_small_host(&args.volume, made.size, &*device)).map_err(|error| {
        if created {
            // A half-made volume under the name that the user chose would block the next attempt.
            if let Err(error) = std::fs::remove_file(volume) {
                tracing::warn!(%error, "cannot remove {}", volume.display());
            }
        }
        refused(&args.volume, &error)
    })
}

/// Whether the volume is a file that has no size yet, or loses its size.
fn gets_its_size(args: &MkfsArgs, volume: &Path) -> bool {
    let found = std::fs::metadata(volume);
    found.map_or(true, |found| found.is_file() && (args.force || found.len() == 0))
}

/// Warns if the host has less space than the volume may come to need. That is often intended, so it
/// is said once; a mount warns again only if the host is nearly full.
fn warn_of_small_host(volume: &Location, size: u64, device: &dyn BlockDevice) {
    if let Some(has) = device.host_free() {
        warn_if_short(volume, size, size, has);
    }
}

/// The same for a volume that has got another size, and has taken some of its space. Its files may
/// lie on several hosts. A block device has all of its space.
pub fn warn_of_full_host(volume: &Location, path: &Path, size: u64) {
    let files = CompositeVolume::listed(path).unwrap_or_else(|| vec![path.into()]);
    let mut hosts: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    for file in files {
        let Ok(found) = std::fs::metadata(&file) else { continue };
        if let (true, Ok(host)) = (found.is_file(), rustix::fs::statvfs(&file)) {
            let has = host.f_bavail.saturating_mul(host.f_frsize);
            let needs = found.len().saturating_sub(found.blocks() * 512);
            hosts.entry(found.dev()).or_insert((0, has)).0 += needs;
        }
    }
    hosts.into_values().for_each(|(needs, has)| warn_if_short(volume, size, needs, has));
}

fn warn_if_short(volume: &Location, size: u64, needs: u64, has: u64) {
    if has >= needs {
        return;
    }
    tracing::warn!(
        "{volume}: the volume takes space as it fills, up to {}, and the file system on which it lies has {} left",
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

fn refused(volume: &Location, error: &VolumeError) -> CliError {
    let more = match error {
        VolumeError::Foreign => ", which is left alone; `ferry mkfs --force` would overwrite it",
        _ => "",
    };
    CliError::Failed(format!("{volume}: {error}{more}"))
}

/// Makes a volume of several components.
fn make_composite(
    args: &MkfsArgs,
    descriptor: &Path,
    kind: Kind,
    env: &Env,
) -> Result<Superblock, CliError> {
    let composite = CompositeOptions {
        kind,
        paths: args.components.clone(),
        size: args.size.unwrap_or(DEFAULT_SIZE),
        overwrite: args.force,
    };
    let made = CompositeVolume::create(descriptor, &composite, env);
    let volume = Arc::new(made.map_err(|e| explain(&args.volume, &e.into()))?);
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
fn open(args: &MkfsArgs, path: &Path, env: &Env) -> Result<(FileDevice, bool), CliError> {
    let size = whole(args.size.unwrap_or(DEFAULT_SIZE));
    match FileDevice::create(path, size, false, env) {
        Ok(device) => Ok((device, true)),
        Err(DeviceError::Exists(_)) => reopen(args, path, env).map(|device| (device, false)),
        Err(error) => Err(failed(&args.volume, size, error)),
    }
}

/// Opens an existing file or device. An empty file, or one that `--force` gives up, gets the
/// requested size; a block device, and a file that is large enough already, keep theirs.
fn reopen(args: &MkfsArgs, path: &Path, env: &Env) -> Result<FileDevice, CliError> {
    let failed = |e| failed(&args.volume, whole(args.size.unwrap_or(DEFAULT_SIZE)), e);
    let size = whole(args.size.unwrap_or(DEFAULT_SIZE));
    let file = std::fs::metadata(path).is_ok_and(|m| m.is_file());
    if gets_its_size(args, path) {
        return FileDevice::create(path, size, true, env).map_err(failed);
    }
    let device = FileDevice::open(path, OpenMode::ReadWrite, env).map_err(failed)?;
    if file && device.capacity() < SIZE_MIN {
        return Err(refused(&args.volume, &VolumeError::Foreign));
    }
    Ok(device)
}

/// Rounds a size to whole blocks.
fn whole(size: u64) -> u64 {
    size - size % BLOCK_SIZE as u64
}

fn failed(volume: &Location, size: u64, error: DeviceError) -> CliError {
    match &error {
        DeviceError::Io { source, .. } if source.raw_os_error() == Some(libc::EFBIG) => {
            CliError::Failed(format!(
                "{volume}: the file system there takes no file of {}: choose a smaller --size, or another file system (ext4 takes 16 TiB, XFS 8 EiB)",
                format_bytes(size)
            ))
        }
        _ => explain(volume, &CompositeError::from(error).into()),
    }
}
