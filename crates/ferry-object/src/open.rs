//! A volume by the URL of its store: connecting, opening, making.

use crate::access::{Access, Patience};
use crate::backup::{BackupError, BackupSource};
use crate::cache::{CacheOptions, DiskCache};
use crate::clone::Cloned;
use crate::codec::Compression;
use crate::device::{Limits, ObjectDevice};
use crate::dir::{DirStore, make_private};
use crate::error::ObjectError;
use crate::executor::ThreadExecutor;
use crate::follow::Follower;
use crate::format::{Owner, SUPER, is_object_name};
use crate::keys::{Encryption, Passphrase, change};
use crate::local_dir::{LocalDirs, OwnersLog, Tell};
use crate::locks::{DirLocks, Locks, machine_directory, machine_locks};
use crate::prove::{PROOFS, patiently, prove};
use crate::s3::{S3Settings, S3Store};
use crate::space::SnapshotSizes;
use crate::standby::Standby;
use crate::store::{Store, exists};
use crate::url::StoreUrl;
use crate::volume::{Claimant, Followed, VolumeOptions, identify, list_snapshots, read_super};
use ferry_device::Snapshot;
use ferry_env::Env;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// For how long a store that does not answer is asked again while a volume is opened or made. A
/// server that has just been started, or a network that is slow to come, is waited for; a wrong
/// address is told.
const PATIENCE: Duration = Duration::from_secs(30);

/// What a volume is opened for.
#[derive(Clone)]
pub enum Opening {
    /// To be read while nobody owns it. Nothing is claimed.
    Read,
    /// Its snapshot of this name is to be read, beside its owner. Nothing is claimed.
    Snapshot(String),
    /// To be owned.
    Own {
        /// From an owner that may be alive, too.
        take_over: bool,
        /// Also if it may have acknowledged what only its machine has. That is lost then.
        force: bool,
    },
    /// To be owned by one server of several, which writes a heartbeat. It serves nobody before
    /// [`ObjectDevice::await_alone`] has returned.
    OwnAsOneOfSeveral {
        /// From the owner of this epoch, too, which may be alive.
        from: Option<u64>,
        /// What it has read while it stood by.
        followed: Followed,
    },
}

impl Opening {
    /// To be owned, if nobody owns it.
    pub const OWN: Self = Self::Own { take_over: false, force: false };

    fn is_to_own(&self) -> bool {
        matches!(self, Self::Own { .. } | Self::OwnAsOneOfSeveral { .. })
    }
}

/// What a volume has on disks of this machine.
#[derive(Clone, Debug, Default)]
pub struct OnDisk {
    /// A cache of its objects.
    pub cache: Option<CacheOptions>,
    /// The directory of a log in which flushes are durable before the store has them.
    pub local_log: Option<PathBuf>,
    /// Tells the user what takes long, and what is lost.
    pub tell: Option<Tell>,
}

/// A store, and the threads that ask it.
struct Connected {
    store: Arc<dyn Store>,
    executor: Arc<ThreadExecutor>,
}

fn connect(url: &StoreUrl, env: &Env) -> Result<Connected, ObjectError> {
    let store: Arc<dyn Store> = match url {
        StoreUrl::Dir(path) => Arc::new(DirStore::open(path, env.clone())?),
        StoreUrl::S3(url) => {
            let settings = S3Settings::of_url(url.endpoint.as_ref(), url.profile.as_deref())?;
            Arc::new(S3Store::open(&url.location, &settings, env)?)
        }
    };
    let executor = ThreadExecutor::new(env)
        .map_err(|error| ObjectError::Refused(format!("cannot start threads: {error}")))?;
    Ok(Connected { store, executor: Arc::new(executor) })
}

/// The directory of the lock files, one of which each process of this machine that uses the volume
/// has open.
pub fn lock_files(url: &StoreUrl) -> Option<PathBuf> {
    match url {
        StoreUrl::Dir(path) => Some(path.join(DirStore::LOCKS)),
        StoreUrl::S3(url) => Some(machine_directory(&url.resolved().ok()?.name())),
    }
}

/// The process of this machine that owns the volume.
pub fn owner_here(url: &StoreUrl) -> Option<u32> {
    DirLocks::new(lock_files(url)?).owner()
}

/// How this process opens a volume.
fn claimant(
    url: &StoreUrl,
    opening: &Opening,
    passphrase: Option<Passphrase>,
    env: &Env,
) -> Result<Claimant, ObjectError> {
    let mut owner = this_process();
    let locks = match url {
        StoreUrl::Dir(path) => DirLocks::new(path.join(DirStore::LOCKS)),
        StoreUrl::S3(url) => {
            let name = url.resolved()?.name();
            match machine_locks(&name, env) {
                Ok((locks, number)) => {
                    owner.machine = format!("{}-{number}", owner.machine);
                    locks
                }
                // A reader without the right to write there knows nothing of dead owners.
                Err(error) if matches!(opening, Opening::Read) => {
                    tracing::debug!(%error, "no locks on this machine");
                    owner.machine = String::new();
                    DirLocks::new(machine_directory(&name))
                }
                Err(error) => return Err(error),
            }
        }
    };
    let locks = Some(Arc::new(locks) as Arc<dyn Locks>);
    let claimant = Claimant { owner, locks, passphrase, ..Claimant::default() };
    Ok(match opening {
        Opening::Read | Opening::Snapshot(_) => claimant,
        Opening::Own { take_over, force } => {
            Claimant { take_over: *take_over, force: *force, ..claimant }
        }
        Opening::OwnAsOneOfSeveral { from, followed } => Claimant {
            take_over: from.is_some(),
            only_from: *from,
            followed: followed.clone(),
            beats: true,
            serves_later: true,
            ..claimant
        },
    })
}

fn limits() -> Limits {
    Limits { patience: PATIENCE, ..Limits::default() }
}

/// Whether a volume has been made in a store.
pub fn has_volume(url: &StoreUrl, env: &Env) -> Result<bool, ObjectError> {
    let found = connect(url, env)
        .and_then(|Connected { store, executor }| patiently(&*executor, || exists(&*store, SUPER)));
    match found {
        Err(ObjectError::NoStore(_)) => Ok(false),
        other => other,
    }
}

/// Opens the volume in a store, with what is asked for on disks of this machine. What a local log
/// here has is uploaded first. Until it is dropped, the device looks by itself for newer owners and
/// deletes what is not needed.
pub fn open_volume(
    url: &StoreUrl,
    opening: Opening,
    passphrase: Option<Passphrase>,
    on_disk: &OnDisk,
    env: &Env,
) -> Result<Arc<ObjectDevice>, ObjectError> {
    open_with(url, opening, passphrase, on_disk, limits(), env)
}

/// The same for a copy of the volume, or to one: what the store refuses, as for want of space, is
/// an error of the device, and is not tried again without end.
pub fn open_to_copy(
    url: &StoreUrl,
    opening: Opening,
    passphrase: Option<Passphrase>,
    tell: Option<Tell>,
    env: &Env,
) -> Result<Arc<ObjectDevice>, ObjectError> {
    let on_disk = OnDisk { tell, ..OnDisk::default() };
    open_with(url, opening, passphrase, &on_disk, Limits { holds: false, ..limits() }, env)
}

fn open_with(
    url: &StoreUrl,
    opening: Opening,
    passphrase: Option<Passphrase>,
    on_disk: &OnDisk,
    limits: Limits,
    env: &Env,
) -> Result<Arc<ObjectDevice>, ObjectError> {
    // A wrong passphrase is found before anything is changed.
    let (mut access, volume) = identify(access(url, env)?, passphrase.as_ref())?;
    // A cache that cannot be used is found before the volume is claimed.
    let cache = on_disk.cache.as_ref().map(|options| DiskCache::open(options, &volume.id));
    let cache = cache.transpose()?;
    let (patience, tell) = (PATIENCE, on_disk.tell);
    let claimant = || claimant(url, &opening, passphrase.clone(), env);
    let locals = |store| LocalDirs { url, store, volume: &volume, patience, tell, env };
    let mut local = OwnersLog::default();
    let device = match &opening {
        Opening::Snapshot(name) => {
            ObjectDevice::snapshot_identified(access, volume, name, limits, env)?
        }
        Opening::Read => {
            let mut claimant = claimant()?;
            locals(&access.store).refuse_unread(&mut claimant)?;
            ObjectDevice::observe_identified(access, volume, &claimant, limits, env)?
        }
        Opening::Own { .. } | Opening::OwnAsOneOfSeveral { .. } => {
            let mut claimant = Claimant { tell, ..claimant()? };
            local = locals(&access.store).open(on_disk.local_log.as_deref(), &mut claimant)?;
            if let Some(layer) = &local.layer {
                access.store = layer.clone();
            }
            ObjectDevice::claim_identified(access, volume, &claimant, limits, env)?
        }
    };
    let layer = local.layer.clone();
    local.claimed();
    if let Some(cache) = cache {
        device.use_cache(cache);
    }
    if let Some(layer) = layer {
        layer.serve();
    }
    if opening.is_to_own() {
        device.tick_by_itself();
    }
    Ok(device)
}

/// Follows the volume in a store, which may be in use. Nothing is claimed.
pub fn follow_volume(
    url: &StoreUrl,
    passphrase: Option<&Passphrase>,
    cache: Option<&CacheOptions>,
    env: &Env,
) -> Result<Follower, ObjectError> {
    let (access, volume) = identify(access(url, env)?, passphrase)?;
    let cache = cache.map(|options| DiskCache::open(options, &volume.id)).transpose()?;
    Ok(Follower::new(access, volume, cache, limits(), env))
}

/// Stands by for the volume in a store. Nothing is claimed.
pub fn stand_by(
    url: &StoreUrl,
    passphrase: Option<&Passphrase>,
    env: &Env,
) -> Result<Standby, ObjectError> {
    Ok(Standby::new(follow_volume(url, passphrase, None, env)?))
}

/// The snapshots of the volume in a store, which may be in use.
pub fn snapshots_of(
    url: &StoreUrl,
    passphrase: Option<&Passphrase>,
    env: &Env,
) -> Result<Vec<Snapshot>, ObjectError> {
    let (access, volume) = identify(access(url, env)?, passphrase)?;
    list_snapshots(&access, &volume)
}

/// What the snapshots of the volume in a store hold. It may be in use.
pub fn snapshot_sizes(
    url: &StoreUrl,
    passphrase: Option<&Passphrase>,
    env: &Env,
) -> Result<SnapshotSizes, ObjectError> {
    let (access, volume) = identify(access(url, env)?, passphrase)?;
    SnapshotSizes::read(&access, &volume)
}

/// Access to the store of a volume.
fn access(url: &StoreUrl, env: &Env) -> Result<Access, ObjectError> {
    let Connected { store, executor } = connect(url, env)?;
    Ok(Access::new(store, executor, Patience::Opening(limits().patience), env))
}

/// Whether the volume in a store is encrypted.
pub fn is_encrypted(url: &StoreUrl, env: &Env) -> Result<bool, ObjectError> {
    read_super(&access(url, env)?).map(|volume| volume.info.encrypted)
}

/// What the owners of the volume in a store compress with.
pub fn compression_of(url: &StoreUrl, env: &Env) -> Result<Compression, ObjectError> {
    read_super(&access(url, env)?).map(|volume| volume.info.compression)
}

/// Changes the passphrase of an encrypted volume, which may be in use. Nothing else is written
/// anew.
pub fn change_passphrase(
    url: &StoreUrl,
    old: &Passphrase,
    new: &Encryption,
    env: &Env,
) -> Result<(), ObjectError> {
    let access = access(url, env)?;
    let volume = read_super(&access)?;
    change(&access, volume.key_of(), old, new, env)
}

/// A volume that was made, and is open.
pub struct Made {
    /// Its device. What the store refuses, as for want of space, is an error of the device.
    pub device: Arc<ObjectDevice>,
    /// There was nothing of it before.
    pub is_new: bool,
    /// What the user should know of the store.
    pub warnings: Vec<String>,
}

/// Makes a volume in a store that has none, and opens it. A directory is made, if its parent
/// exists; an S3 store is proven first. A volume that was made before and never opened is taken.
pub fn make_volume(
    url: &StoreUrl,
    options: &VolumeOptions,
    env: &Env,
) -> Result<Made, ObjectError> {
    let mut is_new = prepare(url)?;
    let Connected { store, executor } = connect(url, env)?;
    let mut warnings = Vec::new();
    // What is left of a volume, or of a clone that was not made, is no place for one.
    let nothing_there = is_free(url, &*store, &executor)?;
    if let StoreUrl::S3(_) = url {
        is_new = nothing_there;
        if is_new {
            warnings = prove(&*store, &*executor, env)?;
        }
    }
    let passphrase = options.encryption.as_ref().map(|encryption| encryption.passphrase.clone());
    let claimant = claimant(url, &Opening::OWN, passphrase, env)?;
    let made = ObjectDevice::make(store.clone(), executor.clone(), options, env);
    if let (Err(ObjectError::Refused(_)), true, StoreUrl::Dir(_)) = (&made, is_new, url)
        && !exists(&*store, SUPER).unwrap_or(true)
    {
        remove_volume(url, env);
    }
    made?;
    let limits = Limits { holds: false, ..limits() };
    let device = ObjectDevice::open(store, executor, &claimant, limits, env)?;
    Ok(Made { device, is_new, warnings })
}

/// A free place for a clone.
pub struct NewClone {
    source: StoreUrl,
    name: String,
    /// A directory that was made for it.
    made: Option<PathBuf>,
    env: Env,
}

/// Finds out whether a clone of the volume at `source` can be at `new`. A directory for it is made.
pub fn prepare_clone(
    source: &StoreUrl,
    new: &StoreUrl,
    env: &Env,
) -> Result<NewClone, ObjectError> {
    let name = source.name_beside(new)?;
    let is_new = prepare(new)?;
    let made = match new {
        StoreUrl::Dir(path) if is_new => Some(path.clone()),
        StoreUrl::Dir(_) | StoreUrl::S3(_) => None,
    };
    let target = NewClone { source: source.clone(), name, made, env: env.clone() };
    let is_free = connect(new, env)
        .and_then(|Connected { store, executor }| is_free(new, &*store, &executor));
    match is_free {
        Ok(true) => Ok(target),
        Ok(false) => Err(ObjectError::VolumeExists),
        Err(error) => {
            target.remove_directories();
            Err(error)
        }
    }
}

impl NewClone {
    /// Makes the clone, of a snapshot. `pin` has the owner of the source make the snapshot of the
    /// name that it is given.
    pub fn make<E: From<ObjectError>>(
        self,
        snapshot: &str,
        passphrase: Option<&Passphrase>,
        pin: impl FnOnce(&str) -> Result<(), E>,
    ) -> Result<Cloned, E> {
        let Self { source, name, made: _, env } = &self;
        let made = connect(source, env).map_err(E::from).and_then(|connected| {
            let Connected { store, executor } = connected;
            let names = (snapshot, name.as_str());
            ObjectDevice::make_clone((store, executor), names, passphrase, PATIENCE, env, pin)
        });
        made.inspect_err(|_| self.remove_directories())
    }

    /// Removes the directory that was made. Directories that are not empty stay.
    fn remove_directories(&self) {
        let Some(path) = &self.made else { return };
        let below = DirStore::DIRECTORIES.iter().map(|name| path.join(name));
        for directory in below.chain([path.clone()]) {
            if let Err(error) = fs::remove_dir(&directory) {
                tracing::debug!(%error, "{} stays", directory.display());
            }
        }
    }
}

/// The volume in a store, whose snapshots are to be backed up. It may be in use.
pub fn backup_source(
    url: &StoreUrl,
    passphrase: Option<&Passphrase>,
    env: &Env,
) -> Result<BackupSource, ObjectError> {
    BackupSource::identified(identify(access(url, env)?, passphrase)?)
}

/// Opens the backup of a volume to own it, or makes it in a store that has none: a directory is
/// made, if its parent exists; an S3 store is proven first. A store that is something else is
/// refused, and left as it is. `take_over`: from an owner that may be alive, too.
pub fn open_backup(
    url: &StoreUrl,
    source: &BackupSource,
    take_over: bool,
    env: &Env,
) -> Result<Made, BackupError> {
    let target = BackupError::Target;
    let mut is_new = prepare(url).map_err(target)?;
    let Connected { store, executor } = connect(url, env).map_err(target)?;
    let limits = Limits { holds: false, ..limits() };
    let access = Access::new(store.clone(), executor.clone(), Patience::Opening(PATIENCE), env);
    let mut warnings = Vec::new();
    if let StoreUrl::S3(_) = url
        && !source.has_begun(&access)?
    {
        is_new = is_free(url, &*store, &executor).map_err(target)?;
        if is_new {
            warnings = prove(&*store, &*executor, env).map_err(target)?;
        }
    }
    let claimant = claimant(url, &Opening::Own { take_over, force: false }, None, env);
    let device = source.open_target(store, executor, &claimant.map_err(target)?, limits, env)?;
    Ok(Made { device, is_new, warnings })
}

/// Removes what was made of a volume by a process that owns it, and that could not make it whole.
pub fn remove_volume(url: &StoreUrl, env: &Env) {
    let removed = match url {
        StoreUrl::Dir(path) => fs::remove_dir_all(path).map_err(|error| error.to_string()),
        StoreUrl::S3(_) => connect(url, env)
            .and_then(|Connected { store, executor }| {
                let mut names = patiently(&*executor, || store.list(""))?;
                // Without it the rest is no volume, if this is interrupted.
                names.insert(0, SUPER.into());
                names
                    .iter()
                    .filter(|name| is_ours(name))
                    .try_for_each(|name| patiently(&*executor, || store.delete(name)))
            })
            .map_err(|error| error.to_string()),
    };
    if let Err(error) = removed {
        tracing::warn!("{url}: what was made of a volume is left there: {error}");
    }
}

/// Whether an object's name is one that a volume has, or the proof of its store.
fn is_ours(name: &str) -> bool {
    is_object_name(name) || name.starts_with(PROOFS)
}

/// Whether there is no volume below a prefix, not even a part of one. One that has other objects is
/// refused.
fn is_free(
    url: &StoreUrl,
    store: &dyn Store,
    executor: &ThreadExecutor,
) -> Result<bool, ObjectError> {
    if patiently(executor, || exists(store, SUPER))? {
        // Whether it is whole is found out later.
        return Ok(false);
    }
    for name in patiently(executor, || store.sample())? {
        if !is_ours(&name) {
            return Err(ObjectError::Foreign(format!("{url}: the object {name}")));
        }
        if is_object_name(&name) {
            return Err(ObjectError::Setup(format!(
                "there are objects of a volume here ({name}), but its object {SUPER} is missing: \
                 if a `ferry clone` makes a clone here, wait for it. If none does, bring {SUPER} \
                 back, remove the others, or choose another place"
            )));
        }
    }
    Ok(true)
}

/// Makes the directory of a store, or refuses one that has other files. Returns whether it made it.
fn prepare(url: &StoreUrl) -> Result<bool, ObjectError> {
    let StoreUrl::Dir(path) = url else { return Ok(false) };
    let refused = |error: io::Error| ObjectError::Refused(format!("{}: {error}", path.display()));
    match make_private(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(ObjectError::NoStore(path.parent().unwrap_or(path).into()));
        }
        Err(error) => return Err(refused(error)),
        Ok(()) => return Ok(true),
    }
    for entry in fs::read_dir(path).map_err(refused)? {
        let name = entry.map_err(refused)?.file_name();
        if !DirStore::is_ours(&name) {
            return Err(ObjectError::Foreign(path.join(name).display().to_string()));
        }
    }
    Ok(false)
}

/// This process, for claims.
fn this_process() -> Owner {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let boot = read("/proc/sys/kernel/random/boot_id");
    let machine = read("/etc/machine-id");
    Owner {
        host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        // Without a number of its own a machine is known until its next start.
        machine: if machine.is_empty() { boot.clone() } else { machine },
        boot,
        pid: std::process::id(),
    }
}
