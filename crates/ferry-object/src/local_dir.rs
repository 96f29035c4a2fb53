//! Local logs in directories of this machine: found, uploaded, and left under another name if
//! flushes in them are lost.
//!
//! An owner has at most one local log. Logs that older owners had are uploaded before the volume is
//! claimed, and removed behind the claim. Until then [`Note`] names their directories: a claim that
//! fails leaves nothing behind that the next opening does not find.

use crate::error::ObjectError;
use crate::executor::ThreadExecutor;
use crate::format::Id;
use crate::local::{LocalStore, Lost, NotTaken};
use crate::local_note::{Note, failed, make_directory, sync_directory};
use crate::store::{Store, Waiting};
use crate::url::StoreUrl;
use crate::volume::{Claimant, Volume};
use ferry_device::{BlockDevice, DeviceError, FileDevice, FileLock, LockHolder, OpenMode};
use ferry_env::{Env, Utc};
use ring::digest;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// The name of the log in its directory.
const FILE: &str = "ferry-local-log";
/// Bytes of the file: what may wait for the store, about. It takes space only as it fills.
const BYTES: u64 = 1 << 30;
/// The time between two messages while a log is uploaded.
const TELL_EVERY: Duration = Duration::from_secs(1);

/// Tells the user something.
pub type Tell = fn(&str);

/// The local logs of a volume on this machine.
pub(crate) struct LocalDirs<'a> {
    pub url: &'a StoreUrl,
    pub store: &'a Arc<dyn Store>,
    pub volume: &'a Volume,
    pub patience: Duration,
    pub tell: Option<Tell>,
    pub env: &'a Env,
}

/// The local log that an owner is to have, if it is to have one.
#[derive(Default)]
pub(crate) struct OwnersLog {
    /// The log in front of the store.
    pub layer: Option<Arc<LocalStore>>,
    /// What is to be done behind the claim.
    change: Option<NoteChange>,
}

/// How the note is to change when the volume is claimed.
struct NoteChange {
    note: Note,
    _lock: FileLock,
    /// The directories that it names now.
    noted: Vec<PathBuf>,
    /// The one that it is to name: that of the owner's log.
    stays: Option<PathBuf>,
    /// Directories whose logs are in the store, with these logs: while one is open here, nobody
    /// else has it, also under another name or for another user.
    uploaded: Vec<(PathBuf, Arc<LocalStore>)>,
}

impl OwnersLog {
    /// The volume is claimed: removes the logs that its owner does not have.
    pub fn claimed(self) {
        if let Some(change) = self.change
            && let Err(error) = change.carry_out()
        {
            tracing::warn!(%error, "a local log that is empty stays until the volume is opened again");
        }
    }
}

impl NoteChange {
    fn carry_out(self) -> Result<(), ObjectError> {
        let Self { note, noted, stays, uploaded, .. } = self;
        if noted != stays.as_slice() {
            // Before the files: a note that names a log that is not there refuses the volume.
            note.write(stays.as_slice())?;
        }
        uploaded.iter().try_for_each(|(directory, _open)| {
            let path = directory.join(FILE);
            fs::remove_file(&path).map_err(|error| failed(&path, &error))
        })
    }
}

impl LocalDirs<'_> {
    /// What tells the store from others.
    fn store_name(&self) -> String {
        self.url.resolved().unwrap_or_else(|_| self.url.clone()).name()
    }

    fn note(&self) -> Note {
        Note::new(&self.store_name())
    }

    /// The number that the volume has in its log. A copy of the store has the volume's own number,
    /// and must not get what only the original's log has.
    fn number_in_log(&self) -> Id {
        let mut hash = digest::Context::new(&digest::SHA256);
        hash.update(&self.volume.id);
        hash.update(self.store_name().as_bytes());
        let mut id = Id::default();
        let len = id.len();
        id.copy_from_slice(&hash.finish().as_ref()[..len]);
        id
    }

    fn say(&self, text: &str) {
        tracing::warn!("{text}");
        if let Some(tell) = self.tell {
            tell(text);
        }
    }

    /// Uploads what the local logs on this machine have, and opens the one that is wanted.
    /// `claimant` learns which logs are in the store.
    pub fn open(
        &self,
        wanted: Option<&Path>,
        claimant: &mut Claimant,
    ) -> Result<OwnersLog, ObjectError> {
        let wanted = wanted.map(usable).transpose()?;
        let note = self.note();
        if wanted.is_none() && note.read()?.is_empty() {
            return Ok(OwnersLog::default());
        }
        let lock = note.lock()?;
        let mut noted = note.read()?;
        let mut uploaded: Vec<(PathBuf, Arc<LocalStore>)> = Vec::new();
        for directory in &noted {
            let mut known = wanted.iter().chain(uploaded.iter().map(|(path, _)| path));
            if known.any(|known| is_same(known, directory)) {
                continue;
            }
            let path = directory.join(FILE);
            if path.exists() {
                uploaded.push((directory.clone(), self.uploaded(&path, claimant)?));
            } else if !claimant.force {
                return Err(missing(&path));
            }
        }
        let mut layer = None;
        if let Some(directory) = &wanted {
            let path = directory.join(FILE);
            let is_noted = noted.iter().any(|noted| is_same(noted, directory));
            if is_noted && !path.exists() && !claimant.force {
                return Err(missing(&path));
            }
            let opened = self.uploaded(&path, claimant)?;
            if !noted.contains(directory) {
                noted.push(directory.clone());
                note.write(&noted)?;
            }
            claimant.local = Some(opened.id());
            layer = Some(opened);
        }
        let change = NoteChange { note, _lock: lock, noted, stays: wanted, uploaded };
        Ok(OwnersLog { layer, change: Some(change) })
    }

    /// Refuses a volume of whose flushes some are in a local log only: a reader would not see them.
    pub fn refuse_unread(&self, claimant: &mut Claimant) -> Result<(), ObjectError> {
        let noted = self.note().read()?;
        noted.iter().try_for_each(|noted| self.refuse_unread_in(&noted.join(FILE), claimant))
    }

    fn refuse_unread_in(&self, path: &Path, claimant: &mut Claimant) -> Result<(), ObjectError> {
        if !path.exists() {
            return Err(missing(path));
        }
        let device = match FileDevice::open(path, OpenMode::ReadOnly, self.env) {
            // The owner lives. That is said better by who looks at its claim.
            Err(DeviceError::InUse { .. }) => return Ok(()),
            other => other.map_err(|error| ObjectError::Setup(error.to_string()))?,
        };
        let layer = self.layer(path, Arc::new(device))?;
        let Lost { flushes, .. } = layer.lost();
        if layer.cut() > 0 {
            return Err(ObjectError::Setup(format!(
                "{}: this local log is damaged: the {} flushes behind the damage are lost, and its store may lack those \
                 before it: mount the volume once, which uploads what is left, then try again",
                path.display(),
                layer.cut()
            )));
        }
        if layer.waiting().is_some_and(|waiting| waiting.objects > 0) {
            return Err(ObjectError::Setup(format!(
                "{}: this local log has {flushes} flushes of the volume that its store may lack: mount the volume once, \
                 which uploads them, then try again",
                path.display()
            )));
        }
        claimant.uploaded.push(layer.id());
        Ok(())
    }

    fn layer(
        &self,
        path: &Path,
        device: Arc<dyn BlockDevice>,
    ) -> Result<Arc<LocalStore>, ObjectError> {
        let executor = ThreadExecutor::new(self.env)
            .map_err(|error| ObjectError::Refused(format!("cannot start threads: {error}")))?;
        let (store, window) = (Arc::clone(self.store), self.volume.info.window);
        let layer = LocalStore::open(
            store,
            Arc::new(executor),
            device,
            self.number_in_log(),
            window,
            self.patience,
            self.env,
        );
        layer.map_err(|why| {
            let path = path.display();
            ObjectError::Setup(match why {
                NotTaken::OtherVolume => format!(
                    "{path}: this is the local log of another volume, or of a copy of this one, or of this one under another \
                     address, and is left alone: name another directory; if that volume is gone, remove the file"
                ),
                NotTaken::Foreign => format!(
                    "{path}: this is no local log, and is left alone: remove it, or name another directory"
                ),
                NotTaken::Failed(error) => format!("the local log {path}: {error}"),
            })
        })
    }

    /// The log at a path, which is made if it is absent. What it had is in the store, or is left
    /// under another name.
    fn uploaded(
        &self,
        path: &Path,
        claimant: &mut Claimant,
    ) -> Result<Arc<LocalStore>, ObjectError> {
        loop {
            let device = match FileDevice::open(path, OpenMode::ReadWrite, self.env) {
                Err(DeviceError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {
                    FileDevice::create(path, BYTES, false, self.env)
                }
                other => other,
            };
            let device = device.map_err(|error| match error {
                DeviceError::InUse { pid, writing, .. } => {
                    ObjectError::Locked(LockHolder { pid, writing })
                }
                error => ObjectError::Setup(error.to_string()),
            })?;
            let layer = self.layer(path, Arc::new(device))?;
            match self.upload(&layer) {
                Ok(()) if layer.cut() == 0 => {
                    claimant.uploaded.push(layer.id());
                    return Ok(layer);
                }
                Ok(()) => {
                    claimant.uploaded.push(layer.id());
                    let left_as = self.rename_lost(path)?;
                    self.say(&format!(
                        "the local log was damaged: {} synced changes behind the damage are lost, and what was before it \
                         is in the volume; the log is left as {}",
                        layer.cut(),
                        left_as.display()
                    ));
                }
                Err(ObjectError::Fenced { epoch }) => {
                    let lost = layer.lost();
                    let left_as = self.rename_lost(path)?;
                    self.say(&lost_text(lost, epoch, &left_as));
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Uploads, and tells how far that is if it takes long.
    fn upload(&self, layer: &LocalStore) -> Result<(), ObjectError> {
        let (ended, end) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while end.recv_timeout(TELL_EVERY) == Err(mpsc::RecvTimeoutError::Timeout) {
                    let Waiting { objects, bytes, .. } = layer.waiting().unwrap_or_default();
                    let held =
                        layer.held().map_or(String::new(), |held| format!(" ({})", held.reason));
                    self.say(&format!(
                        "the local log is uploaded: {objects} objects are left, {} KiB{held}",
                        bytes.div_ceil(1024)
                    ));
                }
            });
            let uploaded = layer.upload_all();
            drop(ended);
            uploaded
        })
    }

    /// Gives the file a name under which nobody looks for it.
    fn rename_lost(&self, path: &Path) -> Result<PathBuf, ObjectError> {
        let secs = self.env.clock.wall().as_secs();
        let names = (0..).map(|n| path.with_file_name(format!("{FILE}.lost-{}", secs + n)));
        let left_as = names.into_iter().find(|left_as| !left_as.exists()).unwrap_or_default();
        fs::rename(path, &left_as)
            .and_then(|()| sync_directory(path))
            .map_err(|error| failed(path, &error))?;
        Ok(left_as)
    }
}

/// The directory, which is made if it is absent, without symbolic links.
fn usable(directory: &Path) -> Result<PathBuf, ObjectError> {
    make_directory(directory)
        .and_then(|()| directory.canonicalize())
        .map_err(|error| failed(directory, &error))
}

/// Whether two paths lead to one directory, as through a symbolic link or a bind mount.
fn is_same(one: &Path, other: &Path) -> bool {
    let number = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino())).ok();
    one == other || number(one).is_some_and(|one| number(other) == Some(one))
}

fn missing(path: &Path) -> ObjectError {
    ObjectError::Setup(format!(
        "{}: the local log of this volume is not there, and may have what was synced and is not in the store: mount the \
         disk that it is on, or give its directory the old name back. If it is lost, `--take-over --force` goes on without it",
        path.display()
    ))
}

fn lost_text(lost: Lost, epoch: Option<u64>, left_as: &Path) -> String {
    let since = Utc::from_secs(lost.since_secs);
    let by = epoch.map_or(String::new(), |epoch| format!(" (epoch {epoch})"));
    format!(
        "another owner took the volume over{by} before this machine had uploaded everything: {} flushes since \
         {since} are lost; their log is left as {}",
        lost.flushes,
        left_as.display()
    )
}
