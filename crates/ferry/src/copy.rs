//! `ferry copy`: a whole volume, as it is, from a file, a block device or a store to another one.
//! This process has the source open to read it, and the copy to write it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ferry_check::copy::{Checked, Copied, CopyError, CopyOptions, Copying, copy_checked};
use ferry_device::{BlockDevice, CompositeError, CompositeVolume, DeviceError, FileDevice};
use ferry_env::Env;
use ferry_fs::Given;
use ferry_fs::volume::{Superblock, VolumeError, read_copy_mark, read_superblock};
use ferry_object::{
    Compression, Made, ObjectError, Opening, StoreUrl, VolumeOptions, compression_of, is_encrypted,
    make_volume, open_to_copy, remove_volume,
};

use crate::backup::{refuse_same, resolved};
use crate::cli::{Compress, CopyArgs};
use crate::control::print;
use crate::error::CliError;
use crate::location::Location;
use crate::mkfs::refuse_device_directory;
use crate::open::{OpenError, Opened, begin_timeline, explain, open_source_when_free};
use crate::passphrase;
use crate::size::{format_bytes, format_nanos};
use crate::waiting::{go_on, progress_bar, stop_on_signals_or_end};

/// What this process made for the copy.
enum New {
    /// It was there before.
    Nothing,
    /// A file.
    File(PathBuf),
    /// A volume in a store.
    Store(StoreUrl),
}

/// Where the copy goes.
struct Target {
    opened: Opened,
    new: New,
}

/// Runs the command.
pub fn run(args: &CopyArgs) -> Result<(), CliError> {
    refuse(args)?;
    let (env, stop) = (Env::real(), stop_on_signals_or_end()?);
    let begun = env.clock.monotonic();
    keep_secret(args, &env)?;
    let source = open_source_when_free(&args.volume, &env);
    let source = source.map_err(|error| source_refused(&args.volume, &error))?;
    let failed = |error: VolumeError| CliError::Failed(format!("{}: {error}", args.volume));
    let sb = read_superblock(&source.device).map_err(failed)?;
    // What is there already may be refused at once. Nothing else is made until the volume is known
    // to be whole: that takes long, and what was made may have got another owner then.
    let there = match &args.other {
        Location::Path(path) if path.exists() => Some(open_file(args, path, sb.size, &env)?),
        _ => None,
    };
    let checked = check(args, &source, &stop, &env)?;
    let Target { opened, new } = match (there, &args.other) {
        (Some(there), _) => there,
        (None, Location::Path(path)) => open_file(args, path, sb.size, &env)?,
        (None, Location::Store(url)) => open_store(args, url, &sb, &env)?,
        (None, other) => return Err(other.not_the_volume()),
    };
    let copied = copy_with_bar(args, &checked, (&source, &opened), &stop, &env);
    // A device that has failed is not asked.
    let can_tell = opened.store().is_none_or(|store| store.failure().is_none());
    let is_empty = || matches!(read_superblock(&opened.device), Err(VolumeError::Empty));
    if copied.is_err() && can_tell && is_empty() {
        // Nothing of the copy is there, so nothing is left to go on with.
        // It is removed while nobody else can open it.
        remove(new, &env);
        drop(opened);
        return copied.map(drop);
    }
    let Copied { bytes, bytes_total, zeroed } = copied?;
    if zeroed > 0 {
        tracing::warn!(
            "{}: {zeroed} blocks that no file uses cannot be read: the copy has zeros there",
            args.volume
        );
    }
    if args.volume.snapshot().is_some() {
        begin_timeline(&args.other, opened, Given::Also(0), &env).map_err(|error| {
            CliError::Failed(format!(
                "{error}: the copy is whole, but a server of it may believe clients of {} what those were told there: remove the copy, and make it anew",
                args.volume
            ))
        })?;
    } else {
        opened.close().map_err(|error| explain(&args.other, &error.into()))?;
    }
    let time = env.clock.monotonic().saturating_sub(begun);
    let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let other = &args.other;
    print(&format!(
        "{other}: copied {} of {}, {}\nTo read its data once, too: ferry fsck '{other}'\nTo use it: ferry mount '{other}' MOUNTPOINT\n",
        format_bytes(bytes),
        format_bytes(bytes_total),
        format_nanos(nanos).trim()
    ))
}

/// Refuses what cannot be copied, before anything is opened.
fn refuse(args: &CopyArgs) -> Result<(), CliError> {
    let CopyArgs { volume, other, .. } = args;
    if let Location::Server(_) = volume {
        return Err(volume.not_the_volume());
    }
    if other.snapshot().is_some() {
        return Err(other.not_the_volume());
    }
    let in_store = args.encrypt || args.compress.is_some() || args.new_passphrase_file.is_some();
    if in_store && !matches!(other, Location::Store(_)) {
        return Err(CliError::Usage(format!(
            "{other}: --encrypt, --compress and --new-passphrase-file are for a copy in a store (s3://, dir://)"
        )));
    }
    if args.new_passphrase_file.is_some() && !args.encrypt {
        return Err(CliError::Usage(
            "--new-passphrase-file is for --encrypt: give that, too".into(),
        ));
    }
    let is_inside = match (volume.store(), other) {
        (Some(from), Location::Store(to)) => return refuse_same(from, to),
        (Some(StoreUrl::Dir(from)), Location::Path(path)) => {
            resolved(path).starts_with(resolved(from))
        }
        (None, Location::Path(path)) => volume.path().map(resolved) == Some(resolved(path)),
        _ => false,
    };
    match is_inside {
        true => Err(CliError::Usage(format!(
            "{other}: this is the volume, or lies in its store: choose another place, best on other disks"
        ))),
        false => Ok(()),
    }
}

/// What is encrypted comes into another store only encrypted. A file cannot be.
fn keep_secret(args: &CopyArgs, env: &Env) -> Result<(), CliError> {
    let CopyArgs { volume, other, encrypt, .. } = args;
    let Some(url) = volume.store().filter(|_| !encrypt) else { return Ok(()) };
    if !is_encrypted(url, env).map_err(|error| explain(volume, &error.into()))? {
        return Ok(());
    }
    if let Location::Store(_) = other {
        return Err(CliError::Usage(format!(
            "{volume}: it is encrypted, so a copy in a store is to be, too: give --encrypt"
        )));
    }
    tracing::warn!("{other} is not encrypted, as {volume} is: it can be read without a passphrase");
    Ok(())
}

fn source_refused(volume: &Location, error: &OpenError) -> CliError {
    let advice = "To copy it while it is used: make a snapshot (`ferry snapshot create`) and copy VOLUME@NAME";
    match (volume, error) {
        // Nobody is to take a volume from its mount for a copy.
        (Location::Store(_), OpenError::Store(ObjectError::InUse { owner, since, .. })) => {
            CliError::Failed(format!(
                "{volume}: in use by {owner}, since {since}. {advice}. Else unmount it there first"
            ))
        }
        (Location::Store(_), OpenError::Store(ObjectError::Locked(_))) => {
            CliError::Failed(format!("{}. {advice}", explain(volume, error)))
        }
        (
            Location::Path(path),
            OpenError::Device(CompositeError::Device(DeviceError::InUse { .. })),
        ) if path.is_file() => CliError::Failed(format!("{}. {advice}", explain(volume, error))),
        _ => explain(volume, error),
    }
}

/// Opens the file or block device for the copy. A file that does not exist is made.
fn open_file(args: &CopyArgs, path: &Path, size: u64, env: &Env) -> Result<Target, CliError> {
    let other = &args.other;
    refuse_device_directory(path)?;
    if CompositeVolume::is_at(path) {
        return Err(CliError::Usage(format!(
            "{other}: this lists the components of a volume: a copy goes to one file, one block device or a store"
        )));
    }
    let failed = |error: DeviceError| explain(other, &CompositeError::from(error).into());
    let target =
        |device: FileDevice, new: New| Target { opened: Opened::on_disk(Arc::new(device)), new };
    match FileDevice::create(path, size, false, env) {
        Ok(device) => return Ok(target(device, New::File(path.into()))),
        Err(DeviceError::Exists(_)) => {}
        Err(error) => return Err(failed(error)),
    }
    let device = FileDevice::open_to_fill(path, size, env).map_err(failed)?;
    let (holds_data, is_file) =
        (device.next_data(0) < device.capacity(), !device.is_block_device());
    let target = target(device, New::Nothing);
    let marked = read_copy_mark(&*target.opened.device);
    let marked = marked.map_err(|error| CliError::path(path, "cannot read it")(error))?;
    // Of a block device only the beginning is looked at. A file that this command made has no data
    // until it has a mark.
    if is_file
        && holds_data
        && marked.is_none()
        && matches!(read_superblock(&target.opened.device), Err(VolumeError::Empty))
    {
        return Err(CliError::Failed(format!(
            "{other}: {}, and is left alone: choose another place",
            VolumeError::Foreign
        )));
    }
    Ok(target)
}

/// Opens the store for the copy. One that is empty gets a volume that reads as zeros.
fn open_store(
    args: &CopyArgs,
    url: &StoreUrl,
    sb: &Superblock,
    env: &Env,
) -> Result<Target, CliError> {
    let other = &args.other;
    let failed = |error: ObjectError| target_refused(other, error);
    let encryption = match args.encrypt {
        true => {
            passphrase::protect_memory();
            Some(passphrase::changed_encryption(other, args.new_passphrase_file.as_deref())?)
        }
        false => None,
    };
    let compression = args.compress.map(compression).unwrap_or_default();
    let boundary = (sb.segments_offset, sb.segment_len);
    let options =
        VolumeOptions { compression, encryption, ..VolumeOptions::new(sb.size, boundary) };
    let (device, new) = match make_volume(url, &options, env) {
        Ok(Made { device, is_new, warnings }) => {
            for warning in warnings {
                tracing::warn!("{url}: {warning}");
            }
            device.tick_by_itself();
            if !is_new {
                // Its first object was there, with the options that it was begun with.
                let refused = refuse_other_options(args, url, env);
                if let Err(error) = refused {
                    drop(Opened::in_store(device).close());
                    return Err(error);
                }
            }
            (device, if is_new { New::Store(url.clone()) } else { New::Nothing })
        }
        Err(ObjectError::VolumeExists) => {
            refuse_other_options(args, url, env)?;
            let passphrase = options.encryption.map(|encryption| encryption.passphrase);
            let open = |opening| open_to_copy(url, opening, passphrase.clone(), None, env);
            // A volume is not claimed to find out that it is one.
            let found: Arc<dyn BlockDevice> = open(Opening::Read).map_err(failed)?;
            let marked = read_copy_mark(&*found);
            let marked = marked.map_err(|error| CliError::Failed(format!("{other}: {error}")))?;
            if marked.is_none() && !matches!(read_superblock(&found), Err(VolumeError::Empty)) {
                return Err(failed(ObjectError::VolumeExists));
            }
            drop(found);
            let own = Opening::OWN;
            (open(own).map_err(failed)?, New::Nothing)
        }
        Err(error) => return Err(failed(error)),
    };
    Ok(Target { opened: Opened::in_store(device), new })
}

/// Why there cannot be a copy in a store. Nobody is to take a store from a copy that runs.
fn target_refused(other: &Location, error: ObjectError) -> CliError {
    CliError::Failed(match error {
        ObjectError::NoStore(_) => {
            format!("{error}: make its parent, or mount the disk that it is on")
        }
        ObjectError::InUse { owner, since, .. } => format!(
            "{other}: in use by {owner}, since {since}: wait until that has ended, or choose another place"
        ),
        error => return explain(other, &error.into()),
    })
}

fn compression(wanted: Compress) -> Compression {
    match wanted {
        Compress::Off => Compression::Off,
        Compress::Zstd => Compression::Zstd,
    }
}

/// A copy that has not ended goes on only as it was begun, also if it begins anew.
fn refuse_other_options(args: &CopyArgs, url: &StoreUrl, env: &Env) -> Result<(), CliError> {
    let other = &args.other;
    let failed = |error: ObjectError| explain(other, &error.into());
    let encrypted = is_encrypted(url, env).map_err(failed)?;
    if encrypted == args.encrypt {
        let found = compression_of(url, env).map_err(failed)?;
        return match args.compress.is_none_or(|wanted| compression(wanted) == found) {
            true => Ok(()),
            false => Err(CliError::Failed(format!(
                "{other}: there is a volume here already, with another --compress. If it is a copy that has not ended, go on without that; \
                 else choose another place"
            ))),
        };
    }
    let (what, how) = match encrypted {
        true => ("encrypted", "with"),
        false => ("not encrypted", "without"),
    };
    Err(CliError::Failed(format!(
        "{other}: there is a volume here already, which is {what}. If it is a copy that has not ended, go on {how} --encrypt; else choose \
         another place"
    )))
}

/// Checks the volume that is to be copied.
fn check(
    args: &CopyArgs,
    source: &Opened,
    stop: &AtomicBool,
    env: &Env,
) -> Result<Checked, CliError> {
    Checked::new(&source.device, env, &mut |_| go_on(stop)).map_err(|error| {
        let failure = source.store().and_then(|store| store.failure());
        copy_failed(args, error, failure)
    })
}

/// Copies, and shows how far it is.
fn copy_with_bar(
    args: &CopyArgs,
    checked: &Checked,
    (source, target): (&Opened, &Opened),
    stop: &AtomicBool,
    env: &Env,
) -> Result<Copied, CliError> {
    let bar = progress_bar("{bar:40} {bytes}/{total_bytes}  {bytes_per_sec}  {eta} left");
    let mut tell = |Copying { bytes, bytes_total }: Copying| {
        bar.set_length(bytes_total);
        bar.set_position(bytes);
        go_on(stop)
    };
    let options = CopyOptions { restart: args.restart, ..CopyOptions::default() };
    let copied = copy_checked(checked, &target.device, options, env, &mut tell);
    bar.finish_and_clear();
    copied.map_err(|error| {
        // Why a device failed says more than that it did.
        let device = match error {
            CopyError::Target { .. } => target,
            _ => source,
        };
        let failure = device.store().and_then(|store| store.failure());
        copy_failed(args, error, failure)
    })
}

/// The message for a copy that was not made.
fn copy_failed(args: &CopyArgs, error: CopyError, failure: Option<ObjectError>) -> CliError {
    let CopyArgs { volume, other, .. } = args;
    let again = "run `ferry copy` again to go on";
    let is_snapshot = volume.snapshot().is_some();
    CliError::Failed(match error {
        // A store that did not answer is no damage.
        CopyError::Source(_) | CopyError::SourceDamaged { .. } if failure.is_some() => {
            failure.map_or_else(String::new, |failure| explain(volume, &failure.into()).to_string())
        }
        CopyError::Source(_) => format!("{volume}: {error}"),
        CopyError::SourceDamaged { .. } if is_snapshot => format!(
            "{volume}: {error}. A snapshot cannot be repaired: copy another one, or its files from a mount of it"
        ),
        CopyError::SourceDamaged { .. } => format!(
            "{volume}: {error}. Save what it lies on first, as with ddrescue, or its files from a mount with -o ro; then run \
             `ferry fsck --repair`, and copy it then"
        ),
        CopyError::SourceRead { .. } | CopyError::SourceUnread { .. }
            if volume.name_in_store().is_some() =>
        {
            let why = failure.map_or_else(
                || format!("{volume}: {error}"),
                |failure| explain(volume, &failure.into()).to_string(),
            );
            format!(
                "{why}. If the snapshot was deleted, or the volume used meanwhile, make a new snapshot, and copy that with --restart; \
                 if its store did not answer, {again}"
            )
        }
        CopyError::SourceUnread { .. } => format!(
            "{volume}: {error}. No file has its data there. Save what it lies on, as with ddrescue, or its files from a mount with -o ro"
        ),
        CopyError::SourceRead { .. } | CopyError::SourceData { .. } if is_snapshot => format!(
            "{volume}: {error}. `ferry fsck` says which file that is. A snapshot cannot be repaired: copy another one, or its other files \
             from a mount of it"
        ),
        CopyError::SourceRead { .. } | CopyError::SourceData { .. } => format!(
            "{volume}: {error}. `ferry fsck` says which file that is. Save the other files first, from a mount with -o ro. Then restore \
             or remove that file, and {again}, with --restart"
        ),
        CopyError::NotEmpty(VolumeError::Exists { label }) => format!(
            "{other}: there is a FerryFS volume here already ({label}), which is left alone: choose another place"
        ),
        CopyError::TooSmall { .. } if matches!(other, Location::Store(_)) => format!(
            "{other}: {error}: what is here was begun with another size, by a copy or `ferry mkfs` that did not end. Remove its store, \
             or choose another place"
        ),
        CopyError::TooSmall { .. } | CopyError::NotEmpty(_) => {
            format!("{other}: {error}. It is left alone: choose another place")
        }
        CopyError::OtherState => {
            format!("{other}: {error}, and is left alone: `ferry copy --restart` begins it anew")
        }
        CopyError::Target { .. } => {
            let why = failure.map_or_else(
                || format!("{other}: {error}"),
                |failure| explain(other, &failure.into()).to_string(),
            );
            format!("{why}; {volume} is as it was. Mend that, then {again}")
        }
        CopyError::TargetDamaged { .. } => format!(
            "{other}: {error}: look whether its disk is sound, then run `ferry copy --restart`; {volume} is as it was"
        ),
        CopyError::Stopped => format!("{other}: stopped; {again}"),
    })
}

/// Removes what was made for a copy that has not begun.
fn remove(new: New, env: &Env) {
    match new {
        New::Nothing => {}
        New::File(path) => {
            if let Err(error) = std::fs::remove_file(&path) {
                tracing::warn!(%error, "cannot remove {}", path.display());
            }
        }
        New::Store(url) => remove_volume(&url, env),
    }
}
