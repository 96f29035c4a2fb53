//! The directory `.snapshots`: which snapshots there are.

use crate::api::{Attr, DirEntry, Errno, ROOT, Timestamp};
use crate::snapdir::number::DIRECTORY;
use ferry_device::BlockDevice;
use parking_lot::Mutex;
use std::sync::Arc;

/// Its name, in the root.
pub(crate) const NAME: &[u8] = b".snapshots";
/// Cookies below this one are `.`, `..` and the start. Those of snapshots are their numbers, behind
/// this one: they ascend, and never move.
const FIRST_COOKIE: u64 = 16;

/// The list that programs saw last.
struct Seen {
    numbers: Vec<u64>,
    /// When it was found to be another one than before.
    changed: Timestamp,
}

/// The directory.
pub(crate) struct Directory {
    dev: Arc<dyn BlockDevice>,
    seen: Mutex<Seen>,
    made: Timestamp,
}

impl Directory {
    pub(crate) fn new(dev: Arc<dyn BlockDevice>, now: Timestamp) -> Self {
        let seen = Seen { numbers: Vec::new(), changed: now };
        Self { dev, seen: Mutex::new(seen), made: now }
    }

    /// When the mount began.
    pub(crate) fn made(&self) -> Timestamp {
        self.made
    }

    /// Its attributes. The time of its last change tells the kernel whether the listing that it has
    /// cached is still right, so no two lists have the same.
    pub(crate) fn attr(&self, now: Timestamp) -> Result<Attr, Errno> {
        let numbers: Vec<u64> = self.list()?.into_iter().map(|(number, _)| number).collect();
        let mut seen = self.seen.lock();
        if seen.numbers != numbers {
            seen.changed = now.max(Timestamp(seen.changed.0 + 1));
            seen.numbers = numbers;
        }
        Ok(Attr {
            ino: DIRECTORY,
            mode: libc::S_IFDIR | 0o555,
            nlink: 2 + seen.numbers.len() as u32,
            uid: 0,
            gid: 0,
            rdev: 0,
            size: 0,
            blocks: 0,
            atime: seen.changed,
            mtime: seen.changed,
            ctime: seen.changed,
        })
    }

    /// The number of the snapshot of this name.
    pub(crate) fn find(&self, name: &[u8]) -> Result<Option<u64>, Errno> {
        let mut all = self.list()?.into_iter();
        Ok(all.find(|(_, one)| one.as_bytes() == name).map(|(number, _)| number))
    }

    /// Lists from `cookie`; `number_of` says which inode the root of a snapshot is.
    pub(crate) fn entries(
        &self,
        cookie: u64,
        number_of: impl Fn(u64) -> Result<u64, Errno>,
        sink: &mut dyn FnMut(&DirEntry) -> bool,
    ) -> Result<(), Errno> {
        let dots = [(1, &b"."[..], DIRECTORY), (2, b"..", ROOT)];
        for (own, name, ino) in dots {
            if cookie < own && !sink(&entry(name, ino, own)) {
                return Ok(());
            }
        }
        for (number, name) in self.list()? {
            let own = FIRST_COOKIE + number;
            if cookie < own && !sink(&entry(name.as_bytes(), number_of(number)?, own)) {
                return Ok(());
            }
        }
        Ok(())
    }

    fn list(&self) -> Result<Vec<(u64, String)>, Errno> {
        let errno = |error: std::io::Error| Errno(error.raw_os_error().unwrap_or(libc::EIO));
        self.dev.snapshot_numbers().map_err(errno)
    }
}

/// Attributes would be those of a snapshot that is not open.
fn entry(name: &[u8], ino: u64, cookie: u64) -> DirEntry {
    DirEntry { name: name.into(), ino, kind: libc::S_IFDIR, cookie, entry: None }
}
