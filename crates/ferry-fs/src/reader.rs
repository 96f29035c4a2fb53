//! [`Reader`]: an open file system that never changes, below a mount that has several of them:
//! snapshots of the volume, or versions of one that is followed.
//!
//! The kernel's lookups and open files are not counted there: what it knows must outlast a reader.

use crate::api::{Answer, Attr, Cx, DirEntry, Entry, Errno, Filesystem, Ino, Listing, ROOT};
use crate::inprocess::{FromReply, InProcess};
use crate::local::local_fs::LocalFs;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Files that are open here, at most.
const FILES_MAX: usize = 64;

/// Which inode numbers programs see, and for how long the kernel may cache what is told of them.
pub(crate) trait Outer: Copy {
    /// The kernel may cache names and attributes for so long.
    const VALID: Duration;
    /// The number that programs see of an inode. `EOVERFLOW`: it is too high to be one, on a
    /// damaged volume.
    fn outer(self, ino: Ino) -> Result<Ino, Errno>;
    /// What programs see of the directory above the root.
    fn above_root(self) -> Ino;
}

/// An open file system. The kernel knows no handles of its files: a file that is read is opened
/// here, so that what comes next is read ahead, and stays open until many others were read.
pub(crate) struct Reader {
    pub(crate) fs: Arc<LocalFs>,
    /// Files and their handles; the one that was read last is the last.
    files: Mutex<VecDeque<(Ino, u64)>>,
}

impl Reader {
    pub(crate) fn new(fs: Arc<LocalFs>) -> Self {
        Self { fs, files: Mutex::default() }
    }

    /// Makes a request of the file system.
    pub(crate) fn ask<T: FromReply>(
        &self,
        request: impl FnOnce(&LocalFs, &Cx) -> Answer<T>,
    ) -> Result<T, Errno> {
        InProcess::default().call(|cx| request(&self.fs, cx))
    }

    /// Makes a request with a handle of the file.
    pub(crate) fn ask_of_file<T: FromReply>(
        &self,
        ino: Ino,
        mut request: impl FnMut(&LocalFs, &Cx, u64) -> Answer<T>,
    ) -> Result<T, Errno> {
        let fh = match self.last_used(ino) {
            Some(fh) => fh,
            None => self.open(ino)?,
        };
        match self.ask(|fs, cx| request(fs, cx, fh)) {
            // Others have read so many files meanwhile that it was closed.
            Err(Errno(libc::EBADF)) => {
                let fh = self.ask(|fs, cx| fs.open(cx, ino, libc::O_RDONLY, false))?.fh;
                let answer = self.ask(|fs, cx| request(fs, cx, fh));
                self.fs.do_release(fh);
                answer
            }
            answer => answer,
        }
    }

    fn last_used(&self, ino: Ino) -> Option<u64> {
        let mut files = self.files.lock();
        let at = files.iter().rposition(|(open, _)| *open == ino)?;
        let file = files.remove(at)?;
        files.push_back(file);
        Some(file.1)
    }

    fn open(&self, ino: Ino) -> Result<u64, Errno> {
        let fh = self.ask(|fs, cx| fs.open(cx, ino, libc::O_RDONLY, false))?.fh;
        let closed = {
            let mut files = self.files.lock();
            files.push_back((ino, fh));
            if files.len() > FILES_MAX { files.pop_front() } else { None }
        };
        if let Some((_, fh)) = closed {
            self.fs.do_release(fh);
        }
        Ok(fh)
    }

    /// The attributes of an inode, as programs see them.
    pub(crate) fn attributes<O: Outer>(
        &self,
        outer: O,
        ino: Ino,
    ) -> Result<(Attr, Duration), Errno> {
        let (attr, _) = self.ask(|fs, cx| fs.getattr(cx, ino, None))?;
        Ok((Attr { ino: outer.outer(attr.ino)?, ..attr }, O::VALID))
    }

    /// Finds a name.
    pub(crate) fn look_up<O: Outer>(
        &self,
        outer: O,
        parent: Ino,
        name: &[u8],
    ) -> Result<Entry, Errno> {
        self.found(outer, self.ask(|fs, cx| fs.lookup(cx, parent, name))?)
    }

    /// What the file system has counted is taken back: nobody else counts.
    fn found<O: Outer>(&self, outer: O, entry: Entry) -> Result<Entry, Errno> {
        let mut entry = Entry {
            entry_valid: entry.entry_valid.min(O::VALID),
            attr_valid: entry.attr_valid.min(O::VALID),
            ..entry
        };
        if let Some(attr) = &mut entry.attr {
            self.fs.forget(attr.ino, 1);
            attr.ino = outer.outer(attr.ino)?;
        }
        Ok(entry)
    }

    /// What `into` has room for of a listing.
    pub(crate) fn listing<O: Outer>(
        &self,
        outer: O,
        ino: Ino,
        cookie: u64,
        mut into: Listing,
    ) -> Result<Vec<DirEntry>, Errno> {
        let plus = into.plus;
        let mut take = |entry: &DirEntry| into.push(entry);
        let listed = self.ask(|fs, cx| fs.readdir(cx, ino, 0, cookie, plus, &mut take));
        let entries = into.entries.into_iter().map(|one| {
            let entry = one.entry.map(|entry| self.found(outer, entry)).transpose();
            let is_up = ino == ROOT && *one.name == *b"..";
            let number = if is_up { Ok(outer.above_root()) } else { outer.outer(one.ino) };
            (entry, number, one)
        });
        // All lookups are taken back, whatever fails.
        let entries: Vec<_> = entries.collect();
        listed?;
        let whole =
            |(entry, ino, one): (Result<Option<Entry>, Errno>, Result<Ino, Errno>, DirEntry)| {
                Ok(DirEntry { entry: entry?, ino: ino?, ..one })
            };
        entries.into_iter().map(whole).collect()
    }

    /// Reads so many bytes of a file; fewer only at its end.
    pub(crate) fn read(&self, ino: Ino, offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
        let mut bytes = vec![0; len];
        let read = self.ask_of_file(ino, |fs, cx, fh| fs.read(cx, ino, fh, offset, &mut bytes))?;
        bytes.truncate(read);
        Ok(bytes)
    }
}
