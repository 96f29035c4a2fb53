//! What a program sees of a volume: names, attributes, contents, times, space.

use crate::history::{Observed, Times};
use crate::model::{Kind, Node};
use crate::world::{Trouble, World, made, wrong};
use ferry_fs::{Filesystem, Ino, ROOT};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Space as statfs and the volume's counters tell it, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// What data has, as the count of free blocks says.
    pub used: u64,
    /// Bytes that extents refer to.
    pub live: u64,
    /// Bytes of unwritten extents.
    pub unwritten: u64,
}

/// Work of the background, counted since the volume was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Segments that the cleaner emptied.
    pub cleaned: u64,
    /// Checkpoints of the journal.
    pub checkpoints: u64,
    /// Bytes written to the log, and of the log.
    pub log: (u64, u64),
    /// Records of the log that were under way at the same time, at most.
    pub in_flight_max: u64,
    /// Commits held for callers who were expected.
    pub holds: u64,
}

impl World {
    /// Everything that can be seen from the root.
    pub fn observe(&self) -> Result<Observed, Trouble> {
        let mut observed = Observed::default();
        let mut todo = vec![ROOT];
        while let Some(ino) = todo.pop() {
            if observed.tree.contains_key(&ino) {
                continue;
            }
            let (attr, _) = self.now(|cx| self.fs.getattr(cx, ino, None))?;
            if attr.ino != ino {
                return wrong(format!("inode {ino} says that it is {}", attr.ino));
            }
            observed.times.insert(ino, Times { modified: attr.mtime, changed: attr.ctime });
            let mut node = Node {
                kind: kind(attr.mode)?,
                mode: attr.mode & 0o7777,
                nlink: attr.nlink,
                xattrs: BTreeMap::new(),
                target: Vec::new(),
                entries: BTreeMap::new(),
            };
            match node.kind {
                Kind::File => {
                    let bytes = self.file(ino, attr.size)?;
                    observed.contents.insert(ino, Arc::new(bytes));
                }
                Kind::Dir => {
                    node.entries = self.list(ino)?;
                    // Each was looked up, and is forgotten when it has been observed.
                    todo.extend(node.entries.values());
                }
                Kind::Symlink => node.target = self.now(|cx| self.fs.readlink(cx, ino))?,
                Kind::Fifo => {}
            }
            if matches!(node.kind, Kind::File | Kind::Dir) {
                node.xattrs = self.xattrs(ino)?;
            }
            observed.tree.insert(ino, Arc::new(node));
        }
        for node in observed.tree.values() {
            node.entries.values().for_each(|ino| self.fs.forget(*ino, 1));
        }
        Ok(observed)
    }

    /// Inodes in use, as statfs tells.
    pub fn inodes(&self) -> Result<u64, Trouble> {
        let totals = self.now(|cx| self.fs.statfs(cx))?;
        totals
            .files
            .checked_sub(totals.files_free)
            .map_or_else(|| wrong("more inodes are free than there are"), Ok)
    }

    fn file(&self, ino: Ino, size: u64) -> Result<Vec<u8>, Trouble> {
        let opened = self.now(|cx| self.fs.open(cx, ino, libc::O_RDONLY, false))?;
        // One byte more than there should be.
        let bytes = self.read(ino, opened.fh, 0, size as usize + 1);
        self.tell(|cx| self.fs.release(cx, ino, opened.fh));
        let bytes = bytes?;
        if bytes.len() as u64 == size {
            Ok(bytes)
        } else {
            wrong(format!("inode {ino}: {} bytes of {size} read", bytes.len()))
        }
    }

    /// Lists a directory a few names at a time, and looks each name up.
    fn list(&self, dir: Ino) -> Result<BTreeMap<Vec<u8>, Ino>, Trouble> {
        let opened = self.now(|cx| self.fs.opendir(cx, dir))?;
        let mut entries = BTreeMap::new();
        let (mut cookie, mut dots) = (0, 0);
        loop {
            let mut batch = Vec::new();
            self.now(|cx| {
                self.fs.readdir(cx, dir, opened.fh, cookie, false, &mut |entry| {
                    let fits = batch.len() < 3;
                    if fits {
                        batch.push(entry.clone());
                    }
                    fits
                })
            })?;
            let Some(last) = batch.last() else { break };
            cookie = last.cookie;
            for entry in batch {
                if matches!(&*entry.name, b"." | b"..") {
                    dots += 1;
                    continue;
                }
                let found = self.now(|cx| self.fs.lookup(cx, dir, &entry.name))?;
                let ino = made(found.attr)?;
                let kind = found.attr.map(|attr| attr.mode & libc::S_IFMT);
                if ino != entry.ino || kind != Some(entry.kind) {
                    return wrong(format!(
                        "{} is listed as {} and found as {ino}",
                        entry.name.escape_ascii(),
                        entry.ino
                    ));
                }
                if entries.insert(entry.name.to_vec(), ino).is_some() {
                    return wrong(format!("{} is listed twice", entry.name.escape_ascii()));
                }
            }
        }
        self.tell(|cx| self.fs.releasedir(cx, dir, opened.fh));
        if dots == 2 {
            Ok(entries)
        } else {
            wrong(format!("directory {dir} lists {dots} of `.` and `..`"))
        }
    }

    fn xattrs(&self, ino: Ino) -> Result<BTreeMap<Vec<u8>, Vec<u8>>, Trouble> {
        let names = self.now(|cx| self.fs.listxattr(cx, ino))?;
        let names = names.split(|b| *b == 0).filter(|name| !name.is_empty());
        names
            .map(|name| Ok((name.to_vec(), self.now(|cx| self.fs.getxattr(cx, ino, name))?)))
            .collect()
    }

    /// Times of an inode that exists.
    pub fn times(&self, ino: Ino) -> Result<Times, Trouble> {
        let (attr, _) = self.now(|cx| self.fs.getattr(cx, ino, None))?;
        Ok(Times { modified: attr.mtime, changed: attr.ctime })
    }

    /// Space; exact when nothing is dirty.
    pub fn space(&self) -> Space {
        let (space, data) = (self.fs.space_totals(), self.fs.data_stats());
        Space { used: space.used, live: data.live_bytes, unwritten: data.unwritten_bytes }
    }

    /// There is room enough, in the log and for data, that no operation has to make some, which
    /// would wait for the device.
    pub fn roomy(&self) -> bool {
        let (log, space) = (self.fs.journal_stats(), self.fs.space_totals());
        2 * log.log_free_bytes > log.log_bytes && 2 * space.available > space.total
    }

    /// Something is being collected, which time will seal.
    pub fn collecting(&self) -> bool {
        self.fs.journal_stats().active_keys > 0
    }

    /// What the background did.
    pub fn work(&self) -> Work {
        let (log, data) = (self.fs.journal_stats(), self.fs.data_stats());
        Work {
            cleaned: data.cleaned_segments,
            checkpoints: log.checkpoints,
            log: (log.log_written_bytes, log.log_bytes),
            in_flight_max: log.log_in_flight_max,
            holds: log.flush.commit_delays,
        }
    }
}

fn kind(mode: u32) -> Result<Kind, Trouble> {
    let kinds = [Kind::File, Kind::Dir, Kind::Symlink, Kind::Fifo];
    let kind = kinds.into_iter().find(|kind| kind.bits() == mode & libc::S_IFMT);
    kind.map_or_else(|| wrong(format!("mode {mode:o} is of a type that nobody made")), Ok)
}
