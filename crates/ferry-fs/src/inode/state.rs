//! What the inode lock protects: attributes as programs see them, and what the journal has of the
//! contents.

use crate::api::{Attr, Ino};
use crate::cache::pages::Pages;
use crate::keys::{BLOCK, INODE_INLINE, InodeRecord};

/// A file has no more blocks than this.
const BLOCKS_MAX: u64 = i64::MAX as u64 / BLOCK;

/// What the inode lock protects.
pub struct InodeState {
    /// What programs see; its `blocks` count what waits for write-back too; its `inline` and
    /// [`INODE_INLINE`] are unused, see `logged`.
    pub rec: InodeRecord,
    /// What the journal says of the contents.
    pub logged: LoggedContents,
    /// Times in `rec` that the journal does not have yet.
    pub times_dirty: bool,
}

/// The contents as the journal has them: behind `rec` while data waits for write-back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoggedContents {
    /// Size in bytes.
    pub size: u64,
    /// Blocks mapped by extents; `rec.blocks` also counts those that wait for write-back.
    pub blocks: u64,
    /// The contents of a small file, a symlink's target.
    pub inline: Option<Box<[u8]>>,
}

impl InodeState {
    /// From the journal's record.
    pub fn from_record(mut rec: InodeRecord) -> Self {
        // A damaged volume may say anything; this much can be counted with.
        rec.blocks = rec.blocks.min(BLOCKS_MAX);
        rec.size = rec.size.min(i64::MAX as u64);
        let inline = (rec.flags & INODE_INLINE != 0)
            .then(|| std::mem::take(&mut rec.inline).into_boxed_slice());
        rec.flags &= !INODE_INLINE;
        let logged = LoggedContents { size: rec.size, blocks: rec.blocks, inline };
        if rec.mode & libc::S_IFMT == libc::S_IFREG
            && logged.inline.as_ref().is_some_and(|i| !i.is_empty())
        {
            rec.blocks += 1; // a file with contents but without blocks would be taken for a hole by archivers
        }
        Self { rec, logged, times_dirty: false }
    }

    /// The record to put into a transaction: everything that programs see, except that the contents
    /// are those that the journal already has (or that the caller has just set in `logged`).
    pub fn record(&self) -> InodeRecord {
        let mut rec = InodeRecord { inline: Vec::new(), ..self.rec.clone() };
        rec.size = self.logged.size;
        rec.blocks = self.logged.blocks;
        if let Some(inline) = &self.logged.inline {
            rec.flags |= INODE_INLINE;
            rec.inline = inline.to_vec();
        }
        rec
    }

    /// Brings the number of blocks that programs see in line with the cache.
    pub(crate) fn count_blocks(&mut self, pages: &Pages) {
        let inline = self.logged.inline.as_ref().is_some_and(|i| !i.is_empty())
            && pages.delayed + pages.flying == 0;
        self.rec.blocks = self.logged.blocks + pages.delayed + pages.flying + u64::from(inline);
    }

    /// As programs see it.
    pub fn attr(&self, ino: Ino) -> Attr {
        let rec = &self.rec;
        Attr {
            ino,
            mode: rec.mode,
            nlink: rec.nlink,
            uid: rec.uid,
            gid: rec.gid,
            rdev: rec.rdev,
            size: rec.size,
            blocks: rec.blocks * 8,
            atime: rec.atime,
            mtime: rec.mtime,
            ctime: rec.ctime,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_record_can_be_counted_with() {
        let state = InodeState::from_record(InodeRecord {
            blocks: u64::MAX,
            size: u64::MAX,
            ..InodeRecord::default()
        });
        assert_eq!((state.attr(7).blocks, state.attr(7).size), (BLOCKS_MAX * 8, i64::MAX as u64));
        assert_eq!(state.logged.blocks, BLOCKS_MAX);
    }
}
