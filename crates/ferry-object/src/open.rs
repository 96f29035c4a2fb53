//! A volume by the URL of its store: connecting, opening, making.

use crate::access::Access;
use crate::device::{Limits, ObjectDevice};
use crate::dir::DirStore;
use crate::error::ObjectError;
use crate::executor::ThreadExecutor;
use crate::format::{Owner, SUPER};
use crate::keys::{Encryption, Passphrase, change};
use crate::locks::{DirLocks, Locks};
use crate::store::{Store, exists};
use crate::url::StoreUrl;
use crate::volume::{Claimant, VolumeOptions, read_super};
use ferry_env::Env;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// What a volume is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// To be read while nobody owns it. Nothing is claimed.
    Read,
    /// To be owned.
    Own {
        /// From an owner that may be alive, too.
        take_over: bool,
    },
}

/// A store that answers, and what belongs to it.
struct Connected {
    store: Arc<dyn Store>,
    executor: Arc<ThreadExecutor>,
    locks: Option<Arc<dyn Locks>>,
}

fn connect(url: &StoreUrl, env: &Env) -> Result<Connected, ObjectError> {
    let executor = ThreadExecutor::new(env)
        .map_err(|error| ObjectError::Refused(format!("cannot start threads: {error}")))?;
    let executor = Arc::new(executor);
    match url {
        StoreUrl::Dir(path) => Ok(Connected {
            store: Arc::new(DirStore::open(path, env.clone())?),
            executor,
            locks: Some(Arc::new(dir_locks(path.clone()))),
        }),
    }
}

fn dir_locks(directory: PathBuf) -> DirLocks {
    DirLocks::new(directory.join(DirStore::LOCKS))
}

/// The directory of the lock files, one of which each process of this machine that uses the volume
/// has open.
pub fn lock_files(url: &StoreUrl) -> Option<PathBuf> {
    match url {
        StoreUrl::Dir(path) => Some(path.join(DirStore::LOCKS)),
    }
}

/// The process of this machine that owns the volume.
pub fn owner_here(url: &StoreUrl) -> Option<u32> {
    match url {
        StoreUrl::Dir(path) => dir_locks(path.clone()).owner(),
    }
}

/// Whether a volume has been made in a store.
pub fn has_volume(url: &StoreUrl, env: &Env) -> Result<bool, ObjectError> {
    match connect(url, env).and_then(|connected| exists(&*connected.store, SUPER)) {
        Err(ObjectError::NoStore(_)) => Ok(false),
        other => other,
    }
}

/// Opens the volume in a store. Until it is dropped, the device looks by itself for newer owners
/// and deletes what is not needed.
pub fn open_volume(
    url: &StoreUrl,
    opening: Opening,
    passphrase: Option<Passphrase>,
    env: &Env,
) -> Result<Arc<ObjectDevice>, ObjectError> {
    let Connected { store, executor, locks } = connect(url, env)?;
    let take_over = opening == Opening::Own { take_over: true };
    let claimant = Claimant { owner: this_process(), take_over, locks, passphrase };
    if opening == Opening::Read {
        return ObjectDevice::open_read_only(store, executor, &claimant, env);
    }
    let device = ObjectDevice::open(store, executor, &claimant, Limits::default(), env)?;
    device.tick_by_itself();
    Ok(device)
}

/// Whether the volume in a store is encrypted.
pub fn is_encrypted(url: &StoreUrl, env: &Env) -> Result<bool, ObjectError> {
    let Connected { store, executor, .. } = connect(url, env)?;
    Ok(read_super(&Access::new(store, executor))?.info.encrypted)
}

/// Changes the passphrase of an encrypted volume, which may be in use. Nothing else is written anew.
pub fn change_passphrase(
    url: &StoreUrl,
    old: &Passphrase,
    new: &Encryption,
    env: &Env,
) -> Result<(), ObjectError> {
    let Connected { store, executor, .. } = connect(url, env)?;
    let access = Access::new(store, executor);
    let volume = read_super(&access)?;
    change(&access, volume.key_of(), old, new, env)
}

/// Makes a volume in a store that has none, and opens it. A directory is made, if its parent exists.
/// A volume that was made before and never opened is taken. What the store refuses, as for want of
/// space, is an error of the device.
pub fn make_volume(
    url: &StoreUrl,
    options: &VolumeOptions,
    env: &Env,
) -> Result<Arc<ObjectDevice>, ObjectError> {
    let is_new = prepare(url)?;
    let Connected { store, executor, locks } = connect(url, env)?;
    let made = ObjectDevice::make(store.clone(), executor.clone(), options, env);
    if let (Err(ObjectError::Refused(_)), true, StoreUrl::Dir(path)) = (&made, is_new, url)
        && !exists(&*store, SUPER).unwrap_or(true)
        && let Err(error) = fs::remove_dir_all(path)
    {
        tracing::warn!(%error, "cannot remove {}", path.display());
    }
    made?;
    let passphrase = options.encryption.as_ref().map(|encryption| encryption.passphrase.clone());
    let claimant = Claimant { owner: this_process(), take_over: false, locks, passphrase };
    let limits = Limits { holds_refused: false, ..Limits::default() };
    ObjectDevice::open(store, executor, &claimant, limits, env)
}

/// Makes the directory of a store, or refuses one that has other files. Returns whether it made it.
fn prepare(url: &StoreUrl) -> Result<bool, ObjectError> {
    let StoreUrl::Dir(path) = url;
    let refused = |error: io::Error| ObjectError::Refused(format!("{}: {error}", path.display()));
    match fs::create_dir(path) {
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
            return Err(ObjectError::Foreign(path.join(name)));
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
