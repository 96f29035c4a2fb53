//! [`Locks`]: which owners of a volume are alive on this machine.
//!
//! The locks of a volume in a directory lie in that directory. Those of any other store lie in a
//! directory of this machine that is named by a hash of the store's name. Two names may mean one
//! store (a host and its address), and two machines may be copies of one another, or containers
//! with one number. Then each has locks of its own, and a lock that is free proves nothing. So such
//! a directory has a random number, and a claim names it ([`machine_locks`]).

use crate::dir::make_private;
use crate::error::ObjectError;
use ferry_device::{FileLock, LockHolder};
use ferry_env::Env;
use parking_lot::Mutex;
use ring::digest;
use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
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
                match make_private(&self.directory) {
                    Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
                    _ => FileLock::take(path, alone),
                }
            }
            other => other,
        }
    }

    /// Who may make locks here may take this one, too, whatever the umask says.
    fn share(&self, path: &Path) {
        let shared = fs::metadata(&self.directory).and_then(|directory| {
            let mode = directory.permissions().mode() & 0o666;
            fs::set_permissions(path, Permissions::from_mode(mode))
        });
        if let Err(error) = shared {
            tracing::debug!(%error, "another user has made the lock, or the host has its own modes");
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

    /// Removes the files of epochs before the one before `epoch`. An owner that lost the volume and
    /// is alive keeps its own: a lock whose file is absent is free.
    fn clear(&self, epoch: u64) {
        for old in self.epochs().into_iter().filter(|old| old + 1 < epoch) {
            if !matches!(FileLock::holder(&self.path(old)), Ok(None)) {
                continue;
            }
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
                self.share(&path);
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

/// Where the locks of this machine are: those of root and of services.
const SYSTEM_LOCKS: &str = "/var/lib/ferry/locks";
/// The file with the random number of a directory of locks.
const NUMBER: &str = "id";

/// The directory of this machine for the locks of the store of this name. Nothing is made.
pub(crate) fn machine_directory(store: &str) -> PathBuf {
    let hash = digest::digest(&digest::SHA256, store.as_bytes());
    let hash: String = hash.as_ref()[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    base(rustix::process::geteuid().is_root(), &variable).join(hash)
}

/// A variable of the environment. The user's home directory is known without one: mount(8) takes
/// HOME away from the helpers that it calls, and services may have none.
pub(crate) fn variable(name: &str) -> Option<OsString> {
    let home = || std::env::home_dir().filter(|_| name == "HOME");
    std::env::var_os(name).or_else(|| home().map(PathBuf::into_os_string))
}

fn base(root: bool, variable: &dyn Fn(&str) -> Option<OsString>) -> PathBuf {
    let path = |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let of_user = || path("XDG_STATE_HOME").or_else(|| Some(path("HOME")?.join(".local/state")));
    match of_user().filter(|_| !root) {
        Some(state) => state.join("ferry/locks"),
        None => SYSTEM_LOCKS.into(),
    }
}

/// The locks of this machine for the store of this name, and the number of their directory, which
/// is made if it is absent.
pub(crate) fn machine_locks(store: &str, env: &Env) -> Result<(DirLocks, String), ObjectError> {
    locks_in(machine_directory(store), store, env)
}

fn locks_in(directory: PathBuf, store: &str, env: &Env) -> Result<(DirLocks, String), ObjectError> {
    let number = number_of(&directory, store, env).map_err(|error| {
        ObjectError::Setup(format!(
            "{}: {error}: what is mounted here is noted there, so the directory must be writable",
            directory.display()
        ))
    })?;
    Ok((DirLocks::new(directory), number))
}

/// Reads the number of a directory of locks, or gives it one.
fn number_of(directory: &Path, store: &str, env: &Env) -> io::Result<String> {
    fs::create_dir_all(directory)?;
    let path = directory.join(NUMBER);
    let read = || -> io::Result<String> {
        let text = fs::read_to_string(&path)?;
        let number = text.lines().next().unwrap_or_default();
        let whole = number.len() == 32 && number.bytes().all(|byte| byte.is_ascii_hexdigit());
        if whole { Ok(number.into()) } else { Err(ErrorKind::InvalidData.into()) }
    };
    match read() {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::InvalidData) => {}
        other => return other,
    }
    let [high, low] = [env.entropy.next_u64(), env.entropy.next_u64()];
    let number = format!("{high:016x}{low:016x}");
    let temporary = directory.join(format!("{NUMBER}-{number}"));
    let mut file = fs::File::create_new(&temporary)?;
    // The second line is for people.
    let written = writeln!(file, "{number}\n{store}").and_then(|()| file.sync_all());
    // A file that is damaged is replaced. Of several processes the last one counts, and the others
    // read what it wrote, or are not known to be here: both are safe.
    let named = written.and_then(|()| fs::rename(&temporary, &path));
    if named.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    named?;
    read()
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
    fn a_directory_of_locks_has_one_number_until_it_is_lost() {
        let directory = tempfile::tempdir().expect("a directory");
        let env = Env::real();
        let at = directory.path().join("a/b");
        let number = || locks_in(at.clone(), "s3://bucket/a", &env).expect("it can be made").1;
        let first = number();
        assert_eq!(number(), first);
        let text = fs::read_to_string(at.join(NUMBER)).expect("it is there");
        assert_eq!(text, format!("{first}\ns3://bucket/a\n"));
        fs::write(at.join(NUMBER), "").expect("it can be written");
        let second = number();
        assert_ne!(second, first, "a claim that names the first number is of another machine");
        fs::remove_dir_all(&at).expect("it can be removed");
        assert_ne!(number(), second);
        let files = fs::read_dir(&at).expect("it is there").count();
        assert_eq!(files, 1, "no temporary file is left");
        let (locks, _) = locks_in(at, "s3://bucket/a", &env).expect("it is there");
        assert_eq!(locks.hold(1, true), Ok(None));
        assert_eq!(locks.owner(), Some(std::process::id()));
    }

    #[test]
    fn each_store_and_each_user_has_locks_of_its_own() {
        assert_ne!(machine_directory("s3://bucket/a"), machine_directory("s3://bucket/b"));
        let values = [("HOME", "/home/a"), ("XDG_STATE_HOME", "/home/a/state")];
        let of = |root: bool, known: usize| {
            base(root, &|name| {
                let found = values[..known].iter().find(|(key, _)| *key == name);
                found.map(|(_, value)| OsString::from(value))
            })
        };
        assert_eq!(of(true, 2), PathBuf::from(SYSTEM_LOCKS));
        assert_eq!(of(false, 2), PathBuf::from("/home/a/state/ferry/locks"));
        assert_eq!(of(false, 1), PathBuf::from("/home/a/.local/state/ferry/locks"));
        assert_eq!(of(false, 0), PathBuf::from(SYSTEM_LOCKS));
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
