//! A store in a plain directory.

use crate::error::ObjectError;
use crate::format::SUPER;
use crate::store::Store;
use ferry_env::Env;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What a new file system has in its root directory.
const LOST_AND_FOUND: &str = "lost+found";
/// Where objects are written before they have their names.
const TEMPORARY: &str = "tmp";
/// The mode of an object that only its user may read.
const PRIVATE: u32 = 0o600;
/// Digits of the number that ends the name of such a file.
const NUMBER_LEN: usize = 16;

/// A store in a directory: an object is a file.
///
/// An object is written to a temporary file, which is made durable and then linked under the
/// object's name: link(2) fails if the name exists, and no name ever shows half an object. Opening
/// the name with `O_EXCL` would show half an object after a crash; a rename would replace the
/// object of another writer.
pub struct DirStore {
    root: PathBuf,
    env: Env,
    /// A volume is here: where its first object is missing, its disk or share is not mounted.
    has_super: AtomicBool,
    /// Who may read and write each object: those who may do so with the volume's first object.
    mode: u32,
}

impl DirStore {
    /// The directory of the lock files, in the store's own.
    pub(crate) const LOCKS: &str = "lock";
    /// Directories that a store makes in its own.
    pub(crate) const DIRECTORIES: [&str; 9] =
        [TEMPORARY, Self::LOCKS, "e", "w", "s", "m", "c", "k", "h"];

    /// The store in a directory that exists.
    pub fn open(root: &Path, env: Env) -> Result<Self, ObjectError> {
        match fs::metadata(root) {
            Ok(found) if !found.is_dir() => Err(ObjectError::NoStore(root.into())),
            Ok(_) => {
                let first = fs::metadata(root.join(SUPER)).map(|meta| meta.permissions().mode());
                let has_super = AtomicBool::new(first.is_ok());
                // A volume has files of all users.
                let mode = PRIVATE | first.unwrap_or(0) & 0o666;
                Ok(Self { root: root.into(), env, has_super, mode })
            }
            Err(error)
                if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) =>
            {
                Err(ObjectError::NoStore(root.into()))
            }
            Err(error) => Err(failed(root, &error)),
        }
    }

    fn canonical(&self) -> Result<PathBuf, ObjectError> {
        fs::canonicalize(&self.root).map_err(|error| failed(&self.root, &error))
    }

    /// The store is not there: a disk or a share is not mounted. Its directory may be the one on
    /// which that is mounted, and empty.
    fn is_away(&self) -> bool {
        let has_super = self.has_super.load(Ordering::Acquire);
        let sign = if has_super { self.root.join(SUPER) } else { self.root.clone() };
        fs::metadata(sign).is_err_and(|error| error.kind() == ErrorKind::NotFound)
    }

    /// Nothing is made, or counts as made, in a directory that is not the store's.
    fn must_be_here(&self) -> Result<(), ObjectError> {
        if self.is_away() { Err(self.away()) } else { Ok(()) }
    }

    fn away(&self) -> ObjectError {
        let root = self.root.display();
        ObjectError::Unavailable(format!("{root}: the directory of the store is not there"))
    }

    /// The error of a call that failed. Nothing is known of any object while the store is away.
    fn failed(&self, path: &Path, error: &io::Error) -> ObjectError {
        match failed(path, error) {
            ObjectError::NotFound(_) if self.is_away() => self.away(),
            other => other,
        }
    }

    /// The same of a call that makes something: a directory that is missing was away for a moment.
    fn not_made(&self, path: &Path, error: &io::Error) -> ObjectError {
        match self.failed(path, error) {
            ObjectError::NotFound(_) => self.away(),
            other => other,
        }
    }

    /// Whether a name in the store's directory is one that a store makes there.
    pub(crate) fn is_ours(name: &OsStr) -> bool {
        let others = [SUPER, LOST_AND_FOUND];
        Self::DIRECTORIES.iter().chain(&others).any(|ours| name == *ours)
    }

    /// Removes what processes of this host left when they were killed. Files that another host
    /// writes at this moment bear its name; what a process of this host writes there now is that of
    /// an owner that was fenced off.
    fn clear_temporary(&self) {
        let Ok(files) = fs::read_dir(self.root.join(TEMPORARY)) else { return };
        let prefix = host_prefix();
        for file in files.flatten() {
            let name = file.file_name();
            let number = name.to_str().and_then(|name| name.strip_prefix(&prefix));
            if number.is_some_and(|number| number.len() == NUMBER_LEN)
                && let Err(error) = fs::remove_file(file.path())
            {
                tracing::warn!(%error, "cannot remove {}", file.path().display());
            }
        }
    }

    /// Writes an object under a temporary name, durably.
    fn write_temporary(&self, bytes: &[u8]) -> io::Result<PathBuf> {
        let number = self.env.entropy.next_u64();
        let path =
            self.root.join(TEMPORARY).join(format!("{}{number:0NUMBER_LEN$x}", host_prefix()));
        let create = || File::options().write(true).create_new(true).mode(self.mode).open(&path);
        let mut file = match create() {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.make_directories(Path::new(TEMPORARY))?;
                create()?
            }
            other => other?,
        };
        self.share(|mode| file.set_permissions(Permissions::from_mode(mode)));
        let written = file.write_all(bytes).and_then(|()| file.sync_all());
        if let Err(error) = written {
            remove_temporary(&path);
            return Err(error);
        }
        Ok(path)
    }

    /// Links the file under the object's name, and makes the name durable.
    fn publish(&self, temporary: &Path, name: &str) -> io::Result<()> {
        let target = self.root.join(name);
        let parent = Path::new(name).parent().unwrap_or(Path::new(""));
        match fs::hard_link(temporary, &target) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.make_directories(parent)?;
                fs::hard_link(temporary, &target)?;
            }
            other => other?,
        }
        sync_directory(&self.root.join(parent))
    }

    /// Makes the directories of `path` below the store's own, durably.
    fn make_directories(&self, path: &Path) -> io::Result<()> {
        let mut at = self.root.clone();
        for name in path.components() {
            let parent = at.clone();
            at.push(name);
            match make_directory(&at, directory_mode(self.mode)) {
                Ok(()) => self.share_directory(&at),
                // Another thread may have made it and not have made it durable yet.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
            sync_directory(&parent)?;
        }
        Ok(())
    }

    fn share_directory(&self, path: &Path) {
        self.share(|mode| {
            let gives_group = fs::metadata(path)?.permissions().mode() & libc::S_ISGID;
            let mode = gives_group | directory_mode(mode);
            fs::set_permissions(path, Permissions::from_mode(mode))
        });
    }

    /// If others may use the store, too, the umask does not count. The host may have modes of its
    /// own, and refuse others.
    fn share(&self, set: impl FnOnce(u32) -> io::Result<()>) {
        if self.mode != PRIVATE
            && let Err(error) = set(self.mode)
        {
            tracing::debug!(%error, "the mode is the host's");
        }
    }
}

fn host_prefix() -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().replace('/', "_");
    format!("{host}-")
}

fn remove_temporary(path: &Path) {
    if let Err(error) = fs::remove_file(path) {
        tracing::warn!(%error, "cannot remove {}", path.display());
    }
}

fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// The mode of a directory of objects that have this mode. Who may read them may come there.
fn directory_mode(mode: u32) -> u32 {
    mode | (mode & 0o444) >> 2
}

/// Makes a directory that only its user may look into.
pub(crate) fn make_private(path: &Path) -> io::Result<()> {
    make_directory(path, directory_mode(PRIVATE))
}

fn make_directory(path: &Path, mode: u32) -> io::Result<()> {
    fs::DirBuilder::new().mode(mode).create(path)
}

/// The error of a call that failed. What another try may mend is [`ObjectError::Unavailable`].
fn failed(path: &Path, error: &io::Error) -> ObjectError {
    let text = format!("{}: {error}", path.display());
    match error.kind() {
        ErrorKind::NotFound => ObjectError::NotFound(path.display().to_string()),
        ErrorKind::PermissionDenied
        | ErrorKind::ReadOnlyFilesystem
        | ErrorKind::NotADirectory
        | ErrorKind::StorageFull
        | ErrorKind::QuotaExceeded => ObjectError::Refused(text),
        _ => ObjectError::Unavailable(text),
    }
}

impl Store for DirStore {
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Vec<u8>, ObjectError> {
        let path = self.root.join(name);
        let read = || {
            let mut file = File::open(&path)?;
            let mut bytes = Vec::new();
            match &range {
                None => file.read_to_end(&mut bytes)?,
                Some(range) => {
                    file.seek(SeekFrom::Start(range.start))?;
                    file.take(range.end - range.start).read_to_end(&mut bytes)?
                }
            };
            Ok(bytes)
        };
        let is_missing = |error: &io::Error| error.kind() == ErrorKind::NotFound;
        let mut found = read();
        // The directory may have come back since.
        if found.as_ref().is_err_and(is_missing) && !self.is_away() {
            found = read();
        }
        found.map_err(|error| match self.failed(&path, &error) {
            ObjectError::NotFound(_) => ObjectError::NotFound(name.into()),
            other => other,
        })
    }

    fn create(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        let fail = |error: &io::Error| self.not_made(&self.root.join(name), error);
        self.must_be_here()?;
        let temporary = self.write_temporary(bytes).map_err(|error| fail(&error))?;
        let published = self.publish(&temporary, name);
        remove_temporary(&temporary);
        published.map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists => ObjectError::Exists(name.into()),
            _ => fail(&error),
        })?;
        if name == SUPER {
            self.has_super.store(true, Ordering::Release);
        }
        self.must_be_here()
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        match self.create(name, bytes) {
            // An earlier try had linked it, and may not have made the name durable.
            Err(ObjectError::Exists(_)) => {
                let path = self.root.join(name);
                let parent = path.parent().unwrap_or(&self.root);
                sync_directory(parent).map_err(|error| self.failed(&path, &error))
            }
            other => other,
        }
    }

    fn delete(&self, name: &str) -> Result<(), ObjectError> {
        let path = self.root.join(name);
        match fs::remove_file(&path) {
            Ok(()) if name == SUPER => {
                self.has_super.store(false, Ordering::Release);
                Ok(())
            }
            Ok(()) => Ok(()),
            Err(error) => match self.failed(&path, &error) {
                ObjectError::NotFound(_) => Ok(()),
                failed => Err(failed),
            },
        }
    }

    /// The last name of its path, in which nothing is a symbolic link.
    fn name(&self) -> Result<String, ObjectError> {
        let path = self.canonical()?;
        let name = path.file_name().and_then(OsStr::to_str).map(str::to_owned);
        name.ok_or_else(|| ObjectError::Setup(format!("{}: its name is not UTF-8", path.display())))
    }

    fn beside(&self, name: &str) -> Result<Arc<dyn Store>, ObjectError> {
        let path = self.canonical()?;
        // A name is one component: nothing else of the machine is read.
        if name.contains('/') || matches!(name, "" | "." | "..") {
            return Err(ObjectError::Setup(format!("{name:?} is no name of a directory")));
        }
        let beside = path.parent().unwrap_or(&path).join(name);
        Ok(Arc::new(Self::open(&beside, self.env.clone())?))
    }

    /// A directory may be as new as the name in it.
    fn make_durable(&self, names: &mut dyn Iterator<Item = String>) -> Result<(), ObjectError> {
        let mut directories = BTreeSet::new();
        for name in names {
            directories.extend(Path::new(&name).ancestors().skip(1).map(PathBuf::from));
        }
        directories.iter().try_for_each(|directory| {
            let path = self.root.join(directory);
            sync_directory(&path).map_err(|error| self.failed(&path, &error))
        })
    }

    fn settle(&self) {
        self.clear_temporary();
    }

    fn list(&self, prefix: &str) -> Result<Vec<String>, ObjectError> {
        let mut names = Vec::new();
        self.walk(prefix, |name, _| {
            names.push(name);
            Ok(())
        })?;
        names.sort_unstable();
        Ok(names)
    }

    fn list_sizes(&self, prefix: &str) -> Result<Vec<(String, u64)>, ObjectError> {
        let mut sizes = Vec::new();
        self.walk(prefix, |name, entry| {
            match entry.metadata() {
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                found => sizes.push((name, found?.len())),
            }
            Ok(())
        })?;
        sizes.sort_unstable();
        Ok(sizes)
    }
}

impl DirStore {
    /// Tells `found` each name that begins with `prefix`.
    fn walk(
        &self,
        prefix: &str,
        mut found: impl FnMut(String, &fs::DirEntry) -> io::Result<()>,
    ) -> Result<(), ObjectError> {
        let (directory, _) = prefix.rsplit_once('/').unwrap_or(("", prefix));
        let mut todo = vec![PathBuf::from(directory)];
        while let Some(directory) = todo.pop() {
            let path = self.root.join(&directory);
            let read = || fs::read_dir(&path).map_err(|error| self.failed(&path, &error));
            // The store may have come back since.
            let entries = match read() {
                Err(ObjectError::NotFound(_)) => match read() {
                    Err(ObjectError::NotFound(_)) => continue,
                    other => other?,
                },
                other => other?,
            };
            for entry in entries {
                let entry = entry.map_err(|error| self.failed(&path, &error))?;
                let name = directory.join(entry.file_name());
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    let others = [TEMPORARY, Self::LOCKS, LOST_AND_FOUND];
                    let is_other = others.iter().any(|other| name == Path::new(other));
                    todo.extend((!is_other).then_some(name));
                } else if let Some(name) = name.to_str().filter(|name| name.starts_with(prefix)) {
                    found(name.to_owned(), &entry).map_err(|error| self.failed(&path, &error))?;
                }
            }
        }
        self.must_be_here()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    fn store() -> (tempfile::TempDir, DirStore) {
        let directory = tempfile::tempdir().expect("a directory");
        let store = DirStore::open(directory.path(), Env::real()).expect("it is there");
        (directory, store)
    }

    #[test]
    fn an_object_is_read_as_it_was_written_and_listed_by_its_name() {
        let (directory, store) = store();
        assert_eq!(store.get("a/b", None), Err(ObjectError::NotFound("a/b".into())));
        assert_eq!(store.list("a/"), Ok(vec![]));
        store.put("a/x/1", b"12345").expect("put");
        store.put("a/x/1", b"12345").expect("put again");
        store.create("a/b", b"").expect("create");
        store.create("c", b"other").expect("create");
        assert_eq!(store.get("a/x/1", None), Ok(b"12345".to_vec()));
        assert_eq!(store.get("a/x/1", Some(1..3)), Ok(b"23".to_vec()));
        assert_eq!(store.get("a/x/1", Some(4..9)), Ok(b"5".to_vec()));
        assert_eq!(store.list("a/"), Ok(vec!["a/b".into(), "a/x/1".into()]));
        let sizes = [("a/b".to_owned(), 0), ("a/x/1".to_owned(), 5)];
        assert_eq!(store.list_sizes("a/"), Ok(sizes.to_vec()));
        let names = |names: &[&str]| names.iter().map(|name| (*name).into()).collect::<Vec<_>>();
        let durable = |all: &[&str]| store.make_durable(&mut names(all).into_iter());
        durable(&["a/x/1", "a/b", "c"]).expect("they are there");
        assert!(matches!(durable(&["b/x/1"]), Err(ObjectError::NotFound(_))));
        store.delete("a/b").expect("delete");
        store.delete("a/b").expect("delete again");
        assert_eq!(store.list("a/"), Ok(vec!["a/x/1".into()]));
        let left = fs::read_dir(directory.path().join(TEMPORARY)).expect("it is there").count();
        assert_eq!(left, 0, "no temporary file is left");
    }

    #[test]
    fn while_the_directory_is_not_there_nothing_is_said_of_any_object() {
        let (directory, store) = store();
        let (at, away) = (directory.path().to_owned(), directory.path().with_extension("away"));
        store.put("a/1", b"12345").expect("put");
        fs::rename(&at, &away).expect("it is ours");
        fn unavailable<T>(answer: Result<T, ObjectError>) -> bool {
            matches!(answer, Err(ObjectError::Unavailable(_)))
        }
        assert!(unavailable(store.get("a/1", None)) && unavailable(store.get("a/2", None)));
        assert!(unavailable(store.list("a/")) && unavailable(store.list_sizes("")));
        assert!(unavailable(store.create("a/2", b"")) && unavailable(store.put("a/2", b"")));
        assert!(unavailable(store.delete("a/1")) && unavailable(store.delete("a/2")));
        assert!(unavailable(store.make_durable(&mut ["a/1".to_owned()].into_iter())));
        fs::rename(&away, &at).expect("it is ours");
        assert_eq!(store.list(""), Ok(vec!["a/1".into()]));
        assert_eq!(store.get("a/2", None), Err(ObjectError::NotFound("a/2".into())));
    }

    #[test]
    fn an_empty_directory_in_the_place_of_a_store_is_not_taken_for_it() {
        let (directory, store) = store();
        let (at, away) = (directory.path().to_owned(), directory.path().with_extension("away"));
        store.create(SUPER, b"volume").expect("create");
        store.put("a/1", b"12345").expect("put");
        for store in [store, DirStore::open(&at, Env::real()).expect("it is there")] {
            fs::rename(&at, &away).expect("it is ours");
            fs::create_dir(&at).expect("its mount point");
            fn unavailable<T>(answer: Result<T, ObjectError>) -> bool {
                matches!(answer, Err(ObjectError::Unavailable(_)))
            }
            assert!(unavailable(store.get("a/1", None)) && unavailable(store.get("a/2", None)));
            assert!(unavailable(store.list("a/")) && unavailable(store.list_sizes("")));
            assert!(unavailable(store.create("a/2", b"")) && unavailable(store.put("a/2", b"")));
            assert!(unavailable(store.delete("a/1")));
            assert_eq!(fs::read_dir(&at).expect("it is there").count(), 0, "nothing was made");
            fs::remove_dir(&at).expect("it is empty");
            fs::rename(&away, &at).expect("it is ours");
            assert_eq!(store.get("a/1", None), Ok(b"12345".to_vec()));
        }
    }

    #[test]
    fn of_many_creates_of_one_name_one_succeeds() {
        let (_directory, store) = store();
        for round in 0..20 {
            let (name, barrier) = (format!("e/{round}"), Barrier::new(8));
            let wins: usize = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..8_u8)
                    .map(|n| {
                        let (store, name, barrier) = (&store, &name, &barrier);
                        scope.spawn(move || {
                            barrier.wait();
                            usize::from(store.create(name, &[n; 5000]).is_ok())
                        })
                    })
                    .collect();
                threads.into_iter().map(|thread| thread.join().expect("no panic")).sum()
            });
            assert_eq!(wins, 1);
            let bytes = store.get(&name, None).expect("it is there");
            assert!(bytes.len() == 5000 && bytes.iter().all(|byte| *byte == bytes[0]));
        }
    }

    #[test]
    fn what_a_killed_process_left_is_removed_and_other_hosts_files_stay() {
        let (directory, store) = store();
        store.create("a", b"1").expect("create");
        let file = |name: String| directory.path().join(TEMPORARY).join(name);
        let left = file(format!("{}{:016x}", host_prefix(), 7));
        let others = file(format!("{}b-{:016x}", host_prefix(), 7));
        for path in [&left, &others] {
            fs::write(path, b"half").expect("it can be written");
        }
        store.settle();
        assert!(!left.exists() && others.exists());
        assert_eq!(store.list(""), Ok(vec!["a".into()]), "temporary files are no objects");
    }
}
