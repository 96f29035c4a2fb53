//! Whether two inodes, one of each side, are the same file, and whether they have the same contents
//! and attributes.

use super::contents::{Contents, File};
use super::rows::Rows;
use crate::inspect::Inspector;
use ferry_fs::api::Ino;
use ferry_fs::error::FsError;
use ferry_fs::keys::{self, InodeRecord, Key};
use std::collections::{BTreeMap, HashMap};

/// What a look at two inodes found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Same,
    Contents,
    Attributes,
}

/// The inodes of both sides.
pub(super) struct Inodes<'v> {
    sides: [&'v Inspector; 2],
    contents: Contents,
    same_file: HashMap<Ino, bool>,
}

impl<'v> Inodes<'v> {
    pub(super) fn new(old: &'v Inspector, new: &'v Inspector) -> Self {
        let contents = Contents::new(old.device(), new.device());
        Self { sides: [old, new], contents, same_file: HashMap::new() }
    }

    fn record(&self, side: usize, ino: Ino) -> Result<Option<InodeRecord>, FsError> {
        let value = self.sides[side].get(&keys::inode(ino))?;
        Ok(value.map(|value| InodeRecord::decode(&value)).transpose()?)
    }

    /// Both sides have the inode, and it is the same file.
    pub(super) fn same_file(&mut self, ino: Ino) -> Result<bool, FsError> {
        if let Some(known) = self.same_file.get(&ino) {
            return Ok(*known);
        }
        let same = match (self.record(0, ino)?, self.record(1, ino)?) {
            (Some(old), Some(new)) => is_same_file(&old, &new),
            _ => false,
        };
        self.same_file.insert(ino, same);
        Ok(same)
    }

    /// Compares an inode of the old side with one of the new side; `None`: they are not of one
    /// kind.
    pub(super) fn compare(&mut self, old: Ino, new: Ino) -> Result<Option<Verdict>, FsError> {
        let (Some(a), Some(b)) = (self.record(0, old)?, self.record(1, new)?) else {
            return Ok(None);
        };
        if kind(&a) != kind(&b) {
            return Ok(None);
        }
        let has_contents = matches!(kind(&a), libc::S_IFREG | libc::S_IFLNK);
        let same_contents = if has_contents {
            // Each write moves the time of the last change, which no program can set. What only
            // the cleaner has moved since is not read.
            let untouched = old == new && self.same_file(old)? && a.ctime == b.ctime;
            let files = [(old, &a), (new, &b)];
            let [old, new] = [0, 1].map(|side| {
                let (ino, record) = files[side];
                File { volume: self.sides[side], ino, record }
            });
            self.contents.same(&old, &new, untouched)?
        } else {
            a.rdev == b.rdev
        };
        if !same_contents {
            return Ok(Some(Verdict::Contents));
        }
        let of = |record: &InodeRecord| (record.mode, record.uid, record.gid);
        let same = of(&a) == of(&b) && self.xattrs(0, old)? == self.xattrs(1, new)?;
        Ok(Some(if same { Verdict::Same } else { Verdict::Attributes }))
    }

    fn xattrs(&self, side: usize, ino: Ino) -> Result<BTreeMap<Vec<u8>, Vec<u8>>, FsError> {
        let (from, end) = (keys::xattr(ino, b""), keys::xattr_end(ino));
        let mut rows = Rows::new(self.sides[side], from, end);
        let mut all = BTreeMap::new();
        while let Some((key, value)) = rows.next()? {
            if let Some(Key::Xattr(_, name)) = keys::parse(&key) {
                all.insert(name.to_vec(), value.to_vec());
            }
        }
        Ok(all)
    }
}

/// Whether records of one number are of one file. Numbers are given once, but after a rollback
/// they are given anew: then the file was made at another time.
pub(super) fn is_same_file(old: &InodeRecord, new: &InodeRecord) -> bool {
    old.btime == new.btime && kind(old) == kind(new)
}

fn kind(record: &InodeRecord) -> u32 {
    record.mode & libc::S_IFMT
}
