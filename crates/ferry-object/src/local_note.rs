//! [`Note`]: which directories of this machine have local logs of a volume.
//!
//! It is a file in the machine's own directory of the volume, so that no opening passes over a log,
//! whatever its options are. The absolute paths of the directories are in it, with a NUL between
//! two. A directory is noted before a claim names its log, and until its log is removed behind a
//! claim that does not.

use crate::error::ObjectError;
use crate::locks::machine_directory;
use ferry_device::FileLock;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The name of the note in the machine's directory of the volume.
const NAME: &str = "local-log";

/// The note of a volume.
pub(crate) struct Note {
    path: PathBuf,
}

impl Note {
    /// The note about the volume in the store of this name.
    pub fn new(store: &str) -> Self {
        Self { path: machine_directory(store).join(NAME) }
    }

    /// Nobody else changes the note until the lock is dropped.
    pub fn lock(&self) -> Result<FileLock, ObjectError> {
        let path = self.path.with_extension("lock");
        let lock = self.make_parent().and_then(|()| FileLock::take(&path, true));
        lock.map_err(|error| failed(&path, &error))?.map_err(ObjectError::Locked)
    }

    /// The directories that it names.
    pub fn read(&self) -> Result<Vec<PathBuf>, ObjectError> {
        let text = match fs::read(&self.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.map_err(|error| failed(&self.path, &error))?,
        };
        let paths = text.split(|byte| *byte == 0).filter(|path| !path.is_empty());
        Ok(paths.map(|path| OsStr::from_bytes(path).into()).collect())
    }

    /// Names these directories, durably. The caller has the lock.
    pub fn write(&self, directories: &[PathBuf]) -> Result<(), ObjectError> {
        let written =
            if directories.is_empty() { self.remove() } else { self.replace(directories) };
        written.map_err(|error| failed(&self.path, &error))
    }

    fn replace(&self, directories: &[PathBuf]) -> io::Result<()> {
        let paths: Vec<&[u8]> =
            directories.iter().map(|path| path.as_os_str().as_bytes()).collect();
        let new = self.path.with_extension("new");
        self.make_parent()?;
        fs::write(&new, paths.join(&0))?;
        fs::File::open(&new)?.sync_all()?;
        fs::rename(&new, &self.path)?;
        sync_directory(&self.path)
    }

    fn remove(&self) -> io::Result<()> {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            other => other.and_then(|()| sync_directory(&self.path)),
        }
    }

    fn make_parent(&self) -> io::Result<()> {
        make_directory(self.path.parent().unwrap_or(&self.path))
    }
}

/// Makes a directory, and those above it, if they are absent. They survive a loss of power.
pub(crate) fn make_directory(directory: &Path) -> io::Result<()> {
    let absent: Vec<&Path> = directory.ancestors().take_while(|path| !path.exists()).collect();
    fs::create_dir_all(directory)?;
    absent.into_iter().try_for_each(sync_directory)
}

/// Makes the name of a file durable.
pub(crate) fn sync_directory(file: &Path) -> io::Result<()> {
    let parent = file.parent().filter(|parent| !parent.as_os_str().is_empty());
    fs::File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}

/// The error for a file of a local log.
pub(crate) fn failed(path: &Path, error: &io::Error) -> ObjectError {
    ObjectError::Setup(format!("the local log, {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_names_several_directories_and_one_opening_changes_it() {
        let directory = tempfile::tempdir().expect("a directory");
        let note = || Note { path: directory.path().join("machine/local-log") };
        assert_eq!(note().read(), Ok(Vec::new()));
        let lock = note().lock().expect("it is free");
        assert!(matches!(note().lock(), Err(ObjectError::Locked(holder)) if holder.writing));
        for paths in [vec!["/a/b".into()], vec!["/a/b".into(), "/c d".into()], Vec::new()] {
            note().write(&paths).expect("it can be written");
            assert_eq!(note().read(), Ok(paths));
        }
        drop(lock);
        drop(note().lock().expect("it is free"));
    }
}
