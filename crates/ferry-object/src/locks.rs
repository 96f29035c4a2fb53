//! [`Locks`]: which owners of a volume are alive on this machine.

use crate::error::ObjectError;
use ferry_device::{FileLock, LockHolder};
use parking_lot::Mutex;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// Locks of this machine, one for each epoch of a volume.
///
/// A process takes the lock of an epoch before it claims that epoch, and holds it to its end. So an
/// owner on this machine whose lock is free is dead. A reader shares the lock of the next epoch: no
/// owner begins meanwhile.
pub trait Locks: Send + Sync {
    /// Holds the lock of an epoch until these locks are dropped: alone, or with other readers. If
    /// others hold it, returns one of them.
    fn hold(&self, epoch: u64, alone: bool) -> Result<Option<LockHolder>, ObjectError>;
    /// A process that holds the lock of an epoch.
    fn holder(&self, epoch: u64) -> Result<Option<LockHolder>, ObjectError>;
}

/// Locks that are files in a directory, named by their epochs.
pub struct DirLocks {
    directory: PathBuf,
    held: Mutex<Vec<FileLock>>,
}

impl DirLocks {
    /// Locks in this directory, which may be absent.
    pub fn new(directory: PathBuf) -> Self {
        Self { directory, held: Mutex::default() }
    }

    fn path(&self, epoch: u64) -> PathBuf {
        self.directory.join(format!("{epoch:016x}"))
    }

    fn take(&self, path: &Path, alone: bool) -> io::Result<Result<FileLock, LockHolder>> {
        match FileLock::take(path, alone) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                match fs::create_dir(&self.directory) {
                    Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
                    _ => FileLock::take(path, alone),
                }
            }
            other => other,
        }
    }

    /// The process that holds the newest lock that one holds alone.
    pub fn owner(&self) -> Option<u32> {
        let mut epochs = self.epochs();
        epochs.sort_unstable();
        epochs.into_iter().rev().find_map(|epoch| {
            let holder = FileLock::holder(&self.path(epoch)).ok()??;
            holder.writing.then_some(holder.pid)
        })
    }

    fn epochs(&self) -> Vec<u64> {
        let files = fs::read_dir(&self.directory).into_iter().flatten().flatten();
        let epoch = |name: &str| u64::from_str_radix(name, 16).ok();
        files.filter_map(|file| epoch(file.file_name().to_str()?)).collect()
    }

    /// Removes the files of epochs before the one before `epoch`: nobody asks for them any more.
    fn clear(&self, epoch: u64) {
        for old in self.epochs().into_iter().filter(|old| old + 1 < epoch) {
            if let Err(error) = fs::remove_file(self.path(old)) {
                tracing::debug!(%error, "an old lock stays");
            }
        }
    }
}

impl Locks for DirLocks {
    fn hold(&self, epoch: u64, alone: bool) -> Result<Option<LockHolder>, ObjectError> {
        let path = self.path(epoch);
        match self.take(&path, alone) {
            Ok(Ok(lock)) => {
                self.held.lock().push(lock);
                if alone {
                    self.clear(epoch);
                }
                Ok(None)
            }
            Ok(Err(holder)) => Ok(Some(holder)),
            // Who may only read the store keeps no owner from beginning.
            Err(error)
                if !alone
                    && matches!(
                        error.kind(),
                        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem
                    ) =>
            {
                Ok(None)
            }
            Err(error) => Err(failed(&path, &error)),
        }
    }

    fn holder(&self, epoch: u64) -> Result<Option<LockHolder>, ObjectError> {
        let path = self.path(epoch);
        FileLock::holder(&path).map_err(|error| failed(&path, &error))
    }
}

fn failed(path: &Path, error: &io::Error) -> ObjectError {
    ObjectError::Refused(format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_has_one_owner_and_keeps_readers_out() {
        let directory = tempfile::tempdir().expect("a directory");
        let locks = || DirLocks::new(directory.path().join("lock"));
        let (first, second) = (locks(), locks());
        let ours = Some(LockHolder { pid: std::process::id(), writing: true });
        assert_eq!(first.holder(7), Ok(None));
        assert_eq!(first.hold(7, true), Ok(None));
        assert_eq!(second.hold(7, true), Ok(ours));
        assert_eq!(second.hold(7, false), Ok(ours));
        assert_eq!(second.holder(7), Ok(ours));
        assert_eq!(second.owner(), Some(std::process::id()));
        drop(first);
        assert_eq!(second.holder(7), Ok(None));
        assert_eq!(second.owner(), None);
        assert_eq!(second.hold(9, true), Ok(None));
        assert_eq!(second.epochs(), [9], "epoch 7 is of no use any more");
    }

    #[test]
    fn a_reader_keeps_the_next_owner_out() {
        let directory = tempfile::tempdir().expect("a directory");
        let locks = || DirLocks::new(directory.path().join("lock"));
        let (reader, other, owner) = (locks(), locks(), locks());
        assert_eq!(reader.hold(3, false), Ok(None));
        assert_eq!(other.hold(3, false), Ok(None));
        let reading = Some(LockHolder { pid: std::process::id(), writing: false });
        assert_eq!(owner.hold(3, true), Ok(reading));
        assert_eq!(owner.owner(), None);
    }
}
