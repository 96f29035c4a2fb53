//! Opens volumes, wherever they lie, once nobody else has them open.

use std::cell::OnceCell;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ferry_device::{
    BlockDevice, ComponentHeader, CompositeError, CompositeVolume, DeviceError, FileDevice,
    OpenMode,
};
use ferry_env::Env;
use ferry_fs::{Given, LocalFs};
use ferry_object::{
    BackupSource, CacheOptions, Followed, Follower, ObjectDevice, ObjectError, OnDisk, Opening,
    Passphrase, Snapshot, SnapshotSizes, Standby, StoreUrl, backup_source, follow_volume,
    open_to_copy, open_volume, snapshot_sizes, snapshots_of, stand_by,
};

use crate::error::CliError;
use crate::holder::{Holder, LOOK_AGAIN};
use crate::location::Location;
use crate::waiting::pause;
use crate::{clients, mounts, passphrase, snappath, socket};

/// How often a volume that a process reads is checked again.
const READER_LOOKS: u32 = 20;
/// How long a daemon whose mount is gone may take to close its volume before the volume counts as
/// in use.
const CLOSING: Duration = Duration::from_secs(30);
/// The same for a server, which usually keeps running.
pub const STOPPING: Duration = Duration::from_secs(3);

/// What a volume is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// To be read.
    Read,
    /// To be changed.
    Write,
    /// To be changed; one in a store is taken from an owner that may be alive.
    TakeOver,
    /// As `TakeOver`, also if what only the owner's machine has is lost.
    Force,
}

impl How {
    /// For a command that takes a volume over if asked to. Nothing is taken over to be read.
    pub fn new(
        volume: &Location,
        read_only: bool,
        take_over: bool,
        force: bool,
    ) -> Result<Self, CliError> {
        match (volume, read_only, take_over) {
            (_, true, false) => Ok(Self::Read),
            (_, false, false) => Ok(Self::Write),
            (Location::Store(_), false, true) if force => Ok(Self::Force),
            (Location::Store(_), false, true) => Ok(Self::TakeOver),
            (Location::Store(_), true, true) => Err(CliError::Usage(
                "--take-over: a volume that is only read is not taken over: mount it once without ro".into(),
            )),
            (Location::Snapshot(..), _, true) => {
                Err(CliError::Usage(format!("{volume}: --take-over: a snapshot has no owner")))
            }
            _ => Err(CliError::Usage(format!(
                "{volume}: --take-over is for volumes in a store (s3://, dir://)"
            ))),
        }
    }

    fn mode(self) -> OpenMode {
        if self == Self::Read { OpenMode::ReadOnly } else { OpenMode::ReadWrite }
    }

    fn opening(self) -> Opening {
        match self {
            Self::Read => Opening::Read,
            Self::Write => Opening::OWN,
            Self::TakeOver => Opening::Own { take_over: true, force: false },
            Self::Force => Opening::Own { take_over: true, force: true },
        }
    }
}

/// A volume that this process has open. One in a store is closed when this is dropped, if
/// [`Opened::close`] did not do it.
pub struct Opened {
    /// Where its bytes are.
    pub device: Arc<dyn BlockDevice>,
    store: Option<Arc<ObjectDevice>>,
}

impl Opened {
    /// Of a device in a store.
    pub fn in_store(device: Arc<ObjectDevice>) -> Self {
        Self { device: device.clone(), store: Some(device) }
    }

    /// Of a file or a block device.
    pub fn on_disk(device: Arc<dyn BlockDevice>) -> Self {
        Self { device, store: None }
    }

    /// The device, if it is in a store.
    pub fn store(&self) -> Option<&ObjectDevice> {
        self.store.as_deref()
    }

    /// Whether it is in a store and has failed, as when another owner has taken it.
    pub fn has_failed(&self) -> bool {
        self.store.as_ref().is_some_and(|store| store.failure().is_some())
    }

    /// Says in the store that nobody has the volume open any more. The device must not be used
    /// afterwards.
    pub fn close(mut self) -> Result<(), ObjectError> {
        self.store.take().map_or(Ok(()), |store| store.close())
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // A device that has failed has said so.
        if let Some(store) = self.store.take().filter(|store| store.failure().is_none())
            && let Err(error) = store.close()
        {
            tracing::warn!(%error, "the volume is not marked as closed in its store");
        }
    }
}

/// Why a volume could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It is on a device of this machine.
    #[error(transparent)]
    Device(#[from] CompositeError),
    /// It is in a store.
    #[error(transparent)]
    Store(#[from] ObjectError),
    /// It is encrypted, and its passphrase cannot be had.
    #[error("{0}")]
    Passphrase(CliError),
    /// A server has it, or it is a snapshot and was to be changed.
    #[error("the volume itself is wanted")]
    NotTheVolume,
}

impl OpenError {
    /// If a process of this machine has the volume open: whether it may write.
    fn user_writes(&self) -> Option<bool> {
        match self {
            Self::Device(CompositeError::Device(DeviceError::InUse { writing, .. })) => {
                Some(*writing)
            }
            Self::Store(ObjectError::Locked(holder)) => Some(holder.writing),
            // The owner before this one closes the volume first, and lets go of its cache then.
            Self::Store(
                ObjectError::InUse { pid: Some(_), .. } | ObjectError::CacheInUse { .. },
            ) => Some(true),
            _ => None,
        }
    }
}

/// Opens a volume. One whose mount is gone but whose daemon still writes back (umount(8) does not
/// wait for that) is waited for; one that is mounted is refused at once.
pub fn open_when_free(volume: &Location, how: How, env: &Env) -> Result<Opened, OpenError> {
    open_with_passphrase(volume, how, &OnceCell::new(), env)
}

/// The same. A passphrase that `passphrase` has is not asked for.
pub fn open_with_passphrase(
    volume: &Location,
    how: How,
    passphrase: &OnceCell<Passphrase>,
    env: &Env,
) -> Result<Opened, OpenError> {
    let on_disk = OnDisk { tell: Some(tell), ..OnDisk::default() };
    when_free(volume, || open(volume, how, &on_disk, passphrase, env))
}

/// A volume in a store that was rolled back, or is a clone, goes on in a timeline of its own.
/// `given`: the inode numbers of what it was, or of its source.
pub fn begin_timeline_in_store(
    volume: &Location,
    given: Given,
    passphrase: &OnceCell<Passphrase>,
    env: &Env,
) -> Result<(), CliError> {
    let opened = open_with_passphrase(volume, How::Write, passphrase, env);
    begin_timeline(volume, opened.map_err(|error| explain(volume, &error))?, given, env)
}

/// The same for a volume that is open. It is closed.
pub fn begin_timeline(
    volume: &Location,
    opened: Opened,
    given: Given,
    env: &Env,
) -> Result<(), CliError> {
    let failed = |error: &dyn std::fmt::Display| CliError::Failed(format!("{volume}: {error}"));
    LocalFs::begin_timeline(&opened.device, given, env).map_err(|error| failed(&error))?;
    opened.close().map_err(|error| failed(&error))
}

/// Opens a volume, with what one in a store has on disks of this machine.
pub fn open_on_disk_when_free(
    volume: &Location,
    how: How,
    on_disk: &OnDisk,
    env: &Env,
) -> Result<Opened, OpenError> {
    // The passphrase is asked for once.
    let passphrase = OnceCell::new();
    when_free(volume, || open(volume, how, on_disk, &passphrase, env))
}

fn tell(text: &str) {
    eprintln!("ferry: {text}");
}

/// What a user asks for on disks of this machine; an error if the volume is not in a store.
pub fn on_disk(
    volume: &Location,
    (directory, bytes): (Option<&Path>, Option<u64>),
    local: Option<bool>,
    local_log: Option<&Path>,
) -> Result<OnDisk, CliError> {
    let local_log = match (local, local_log) {
        (Some(true), None) => {
            return Err(CliError::Usage(
                "durability=local: say in which directory the local log is (local_log=/DIR): a disk that survives a loss of power"
                    .into(),
            ));
        }
        (Some(true), Some(directory)) if volume.store().is_some() => Some(directory),
        (Some(true), Some(_)) => {
            return Err(CliError::Usage(format!(
                "{volume}: durability=local is for volumes in a store (s3://, dir://)"
            )));
        }
        (_, Some(_)) => {
            return Err(CliError::Usage(
                "local_log is for durability=local: give that, too".into(),
            ));
        }
        (_, None) => None,
    };
    let cache = cache_options(volume, directory, bytes)?;
    Ok(OnDisk { cache, local_log: local_log.map(Into::into), tell: Some(tell) })
}

/// The cache that a user asks for; an error if the volume is not in a store.
fn cache_options(
    volume: &Location,
    directory: Option<&Path>,
    bytes: Option<u64>,
) -> Result<Option<CacheOptions>, CliError> {
    match (directory, volume.store()) {
        (None, _) if bytes.is_some() => Err(CliError::Usage(
            "cache_disk is the size of the cache on disk: say where that is, too (cache=DIR)"
                .into(),
        )),
        (None, _) => Ok(None),
        (Some(directory), Some(_)) => Ok(Some(CacheOptions {
            directory: directory.into(),
            bytes: bytes.unwrap_or(CacheOptions::BYTES_DEFAULT),
        })),
        (Some(_), None) => Err(CliError::Usage(format!(
            "{volume}: a cache on disk is for volumes in a store (s3://, dir://)"
        ))),
    }
}

/// Opens a volume, or a snapshot, that is to be copied. A store that fails is an error.
pub fn open_source_when_free(volume: &Location, env: &Env) -> Result<Opened, OpenError> {
    let passphrase = OnceCell::new();
    let Some(url) = volume.store() else {
        return open_with_passphrase(volume, How::Read, &passphrase, env);
    };
    let opening = match volume.snapshot() {
        Some(name) => Opening::Snapshot(name),
        None => Opening::Read,
    };
    when_free(volume, || {
        let opened = open_in_store(volume, &passphrase, |passphrase| {
            open_to_copy(url, opening.clone(), passphrase.cloned(), Some(tell), env)
        });
        opened.map(Opened::in_store)
    })
}

/// Opens a volume that must be of several components.
pub fn open_composite_when_free(volume: &Path, env: &Env) -> Result<CompositeVolume, OpenError> {
    let open = || Ok(CompositeVolume::open(volume, OpenMode::ReadWrite, env)?);
    when_free(&Location::from(volume), open)
}

fn when_free<T>(
    volume: &Location,
    open: impl Fn() -> Result<T, OpenError>,
) -> Result<T, OpenError> {
    // A writer or a reader has it open.
    let in_use = |opened: &Result<T, OpenError>| opened.as_ref().err()?.user_writes();
    let mut opened = open();
    if in_use(&opened).is_none() || mounted(volume) {
        return opened;
    }
    // The lock does not name readers. The reader may be about to end: the daemon of a read-only
    // mount that umount(8) has ended.
    for _ in 0..READER_LOOKS {
        if in_use(&opened) != Some(false) {
            break;
        }
        pause(LOOK_AGAIN);
        opened = open();
    }
    if in_use(&opened) != Some(true) {
        return opened;
    }
    let holder = Holder::of(volume);
    if let Some(holder) = &holder {
        eprintln!(
            "ferry: {volume}: waits for process {}, which still has it open; Ctrl-C gives up",
            holder.pid
        );
    }
    if let Some(holder) = holder
        && let Err(error) = holder.wait(if is_served(holder.pid) { STOPPING } else { CLOSING })
    {
        tracing::debug!(%error, "waiting for the last user of a volume");
    }
    open()
}

/// Opens what is in a store. If it is encrypted, its passphrase is got then.
fn open_in_store<T>(
    volume: &Location,
    passphrase: &OnceCell<Passphrase>,
    open: impl Fn(Option<&Passphrase>) -> Result<T, ObjectError>,
) -> Result<T, OpenError> {
    let opened = match open(passphrase.get()) {
        Err(ObjectError::PassphraseWanted) => {
            let found = passphrase::get(volume, false).map_err(OpenError::Passphrase)?;
            open(Some(passphrase.get_or_init(|| found)))
        }
        opened => opened,
    }?;
    if passphrase.get().is_some() {
        passphrase::protect_memory();
    }
    Ok(opened)
}

/// The volume in a store, whose snapshots are to be backed up. It may be in use.
pub fn backup_source_in_store(
    volume: &Location,
    url: &StoreUrl,
    env: &Env,
) -> Result<BackupSource, OpenError> {
    open_in_store(volume, &OnceCell::new(), |passphrase| backup_source(url, passphrase, env))
}

/// The volume in a store, to be followed while it is in use.
pub fn follow_in_store(
    volume: &Location,
    cache: Option<&CacheOptions>,
    env: &Env,
) -> Result<Follower, OpenError> {
    let url = volume.store().ok_or(OpenError::NotTheVolume)?;
    open_in_store(volume, &OnceCell::new(), |passphrase| follow_volume(url, passphrase, cache, env))
}

/// Stands by for the volume in a store.
pub fn stand_by_in_store(
    volume: &Location,
    url: &StoreUrl,
    env: &Env,
) -> Result<Standby, OpenError> {
    open_in_store(volume, &OnceCell::new(), |passphrase| stand_by(url, passphrase, env))
}

/// Opens the volume in a store for one server of several, which writes a heartbeat. `from`: from
/// the owner of this epoch, too, which may be alive; `followed`: what it has read while it stood
/// by.
pub fn open_for_one_of_several(
    volume: &Location,
    url: &StoreUrl,
    (from, followed): (Option<u64>, Followed),
    on_disk: &OnDisk,
    env: &Env,
) -> Result<Opened, OpenError> {
    let opening = Opening::OwnAsOneOfSeveral { from, followed };
    // The passphrase may have changed since this server stands by.
    let opened = open_in_store(volume, &OnceCell::new(), |passphrase| {
        open_volume(url, opening.clone(), passphrase.cloned(), on_disk, env)
    });
    opened.map(Opened::in_store)
}

/// The snapshots of the volume in a store, which may be in use.
pub fn snapshots_in_store(
    volume: &Location,
    url: &StoreUrl,
    env: &Env,
) -> Result<Vec<Snapshot>, OpenError> {
    open_in_store(volume, &OnceCell::new(), |passphrase| snapshots_of(url, passphrase, env))
}

/// What the snapshots of the volume in a store hold. It may be in use.
pub fn sizes_in_store(
    volume: &Location,
    url: &StoreUrl,
    env: &Env,
) -> Result<SnapshotSizes, OpenError> {
    open_in_store(volume, &OnceCell::new(), |passphrase| snapshot_sizes(url, passphrase, env))
}

fn open(
    volume: &Location,
    how: How,
    on_disk: &OnDisk,
    passphrase: &OnceCell<Passphrase>,
    env: &Env,
) -> Result<Opened, OpenError> {
    let in_store = |url: &StoreUrl, opening: Opening| {
        let opened = open_in_store(volume, passphrase, |passphrase| {
            open_volume(url, opening.clone(), passphrase.cloned(), on_disk, env)
        });
        opened.map(Opened::in_store)
    };
    let path = match volume {
        Location::Path(_) if how != How::Read && volume.snapshot().is_some() => {
            return Err(OpenError::NotTheVolume);
        }
        Location::Path(path) => path,
        Location::Store(url) => return in_store(url, how.opening()),
        Location::Snapshot(url, name) if how == How::Read => {
            return in_store(url, Opening::Snapshot(name.clone()));
        }
        Location::Snapshot(..) | Location::Server(_) => return Err(OpenError::NotTheVolume),
    };
    let device = match snappath::split(path) {
        Some((volume, name)) => open_snapshot(&volume, &name, env),
        None if CompositeVolume::is_at(path) => {
            let device = CompositeVolume::open(path, how.mode(), env)?;
            return Ok(Opened::on_disk(Arc::new(device)));
        }
        None => FileDevice::open(path, how.mode(), env),
    };
    let device = device.map_err(CompositeError::from)?;
    // Opening the volume reports any other read error better.
    if matches!(ComponentHeader::read(&device), Ok(Some(_))) {
        return Err(CompositeError::OneComponent(path.clone()).into());
    }
    Ok(Opened::on_disk(Arc::new(device)))
}

/// Opens a snapshot of a volume in a file.
fn open_snapshot(volume: &Path, name: &str, env: &Env) -> Result<FileDevice, DeviceError> {
    let path = snappath::path_of(volume, name);
    match snappath::open(volume, name) {
        Ok(file) => FileDevice::of_file(file, &path, OpenMode::ReadOnly, env),
        Err(source) => Err(DeviceError::Io { what: "open", path, source }),
    }
}

/// The message for a volume that could not be opened: which process has it, and where it is
/// mounted; or what is wrong, and what to do.
pub fn explain(volume: &Location, error: &OpenError) -> CliError {
    CliError::Failed(match error {
        OpenError::Device(CompositeError::Device(DeviceError::InUse { pid, .. })) => {
            format!("{error}{}", until_when(volume, *pid))
        }
        OpenError::Device(error) => error.to_string(),
        OpenError::Store(error) => explain_store(volume, error),
        OpenError::Passphrase(error) => error.to_string(),
        OpenError::NotTheVolume => volume.not_the_volume().to_string(),
    })
}

/// What has to happen before a volume can be opened that a process of this machine has open.
fn until_when(volume: &Location, pid: u32) -> String {
    match mounts::find(volume) {
        Ok(Some(mount)) if mount.is_ferry() => {
            format!(", mounted on {}: unmount it first", mount.target.display())
        }
        _ if is_served(pid) => ", `ferry serve`: stop that first".into(),
        _ => ": wait until that has ended".into(),
    }
}

fn explain_store(volume: &Location, error: &ObjectError) -> String {
    // A snapshot is made of a volume.
    let made = volume.store().map_or_else(|| volume.to_string(), StoreUrl::to_string);
    match error {
        ObjectError::NoStore(_) => format!(
            "{error}: make it, or mount the disk that it is on; `ferry mkfs {made}` makes a volume where its parent exists"
        ),
        ObjectError::Foreign(_) if matches!(volume.store(), Some(StoreUrl::Dir(_))) => {
            format!("{error}, and is left alone: choose an empty directory")
        }
        ObjectError::Foreign(_) => {
            format!("{error}, and is left alone: choose another prefix")
        }
        ObjectError::Unavailable(_) => format!(
            "{volume}: {error}: look whether its address is right and whether it runs, then try again"
        ),
        ObjectError::NoVolume => {
            format!("{volume}: there is no FerryFS volume here; `ferry mkfs {made}` makes one")
        }
        ObjectError::UnfinishedBackup => format!(
            "{volume}: a backup was begun here that has not ended: run `ferry backup` again to go on, or remove the store"
        ),
        ObjectError::VolumeExists => format!(
            "{volume}: there is a FerryFS volume here already, which is left alone: mount it, or choose another place"
        ),
        ObjectError::InUse { owner, since, pid } => {
            let alive = pid.map_or_else(
                || ": unmount it there. If that machine is dead or cannot be reached".into(),
                |pid| format!("{}. If it hangs", until_when(volume, pid)),
            );
            format!(
                "{volume}: in use by {owner}, since {since}{alive}, `ferry mount --take-over` (or `ferry serve --take-over`) takes the volume \
                 from it: it can write nothing more, and what it has not synced is lost"
            )
        }
        ObjectError::NotUploaded { owner } => format!(
            "{volume}: {owner} has or had it with durability=local, and may have synced what only the local log of its machine has: \
             mount the volume there, or unmount it there, which uploads that. If that machine is lost, `--take-over --force` takes \
             the volume, and what it had not uploaded is lost"
        ),
        ObjectError::Locked(holder) => {
            format!("{volume}: in use by process {}{}", holder.pid, until_when(volume, holder.pid))
        }
        ObjectError::WrongPassphrase => format!(
            "{volume}: {error}; nothing was changed. Without the right one nothing in it can be read"
        ),
        ObjectError::ClaimLost { .. } => {
            format!(
                "{volume}: another process opens it at this moment: look who has it, then try again"
            )
        }
        ObjectError::NotFound(name) => format!(
            "{volume}: the object {name} is missing: the store has lost it, or somebody removed it. Bring it back, or a backup of the whole store"
        ),
        ObjectError::Damaged { .. } => format!(
            "{volume}: {error}. Bring that object back from a backup, or the whole store; a store must be copied as a whole"
        ),
        ObjectError::Version { .. } => {
            format!("{volume}: {error}: use the version of FerryFS that wrote it, or a newer one")
        }
        _ => format!("{volume}: {error}"),
    }
}

/// Whether that process is a server.
fn is_served(pid: u32) -> bool {
    socket::names(clients::PREFIX)
        .is_ok_and(|names| names.contains(&format!("{}{pid}", clients::PREFIX)))
}

/// Whether this process sees a mount of it. If the table of mounts cannot be read, the answer is
/// yes.
pub fn mounted(volume: &Location) -> bool {
    let Ok(source) = volume.resolved() else { return false };
    mounts::list().map_or(true, |all| all.iter().any(|m| m.is_ferry() && m.has_source(&source)))
}
