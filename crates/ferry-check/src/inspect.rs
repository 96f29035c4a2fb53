//! Looks into a volume that nobody has mounted, for people who want to see what is stored. Nothing
//! is written, and everything is shown as it comes: memory does not grow with the volume.

use ferry_device::{AlignedBuf, BlockDevice};
use ferry_env::Env;
use ferry_fs::api::{Ino, ROOT};
use ferry_fs::error::FsError;
use ferry_fs::keys::{self, BLOCK, Dentry, Key, Segment};
use ferry_fs::space::summary;
use ferry_fs::volume::{Superblock, VolumeError, read_superblock};
use ferry_journal::{
    Bystander, Journal, JournalError, JournalOptions, Recovered, Value, read_damaged,
};
use std::collections::HashSet;
use std::sync::Arc;

pub use ferry_fs::space::summary::Entry as SummaryEntry;

/// Memory for the home store's cache, in bytes.
const HOME_CACHE_BYTES: usize = 16 << 20;
/// Blocks of a segment that are read at once.
const READ_BLOCKS: u32 = 256;

/// What a segment is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentUse {
    /// Nothing: it may be filled.
    Free,
    /// Contents of files.
    Data(Segment),
    /// The home store.
    Home,
    /// Its record cannot be decoded.
    Unknown,
}

/// A segment as its key and its blocks describe it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentInfo {
    /// Its number, counted from the first segment.
    pub index: u32,
    /// Its first byte on the volume.
    pub offset: u64,
    /// What it is used for.
    pub used: SegmentUse,
}

/// An open volume.
pub struct Inspector {
    device: Arc<dyn BlockDevice>,
    superblock: Superblock,
    journal: Journal,
    recovered: Recovered,
}

impl Inspector {
    /// Opens the volume as recovery would leave it, in memory.
    pub fn open(device: &Arc<dyn BlockDevice>, env: &Env) -> Result<Self, VolumeError> {
        let superblock = read_superblock(device)?;
        let options =
            JournalOptions { accept_damage: true, ..JournalOptions::offline(HOME_CACHE_BYTES) };
        let geometry = superblock.geometry();
        let (journal, recovered) =
            Journal::open(device.clone(), geometry, options, env.clone(), Arc::new(Bystander))?;
        Ok(Self { device: device.clone(), superblock, journal, recovered })
    }

    /// Visits, in order, each key that can be read of a volume whose store of them is so damaged
    /// that it cannot be opened: those that a repair would keep.
    pub fn readable_keys(
        device: &Arc<dyn BlockDevice>,
        env: &Env,
        visit: &mut dyn FnMut(&[u8], &Value),
    ) -> Result<(), VolumeError> {
        let superblock = read_superblock(device)?;
        read_damaged(device.clone(), superblock.geometry(), env, visit)?;
        Ok(())
    }

    /// The volume's superblock.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// The device that it is on.
    pub(crate) fn device(&self) -> &Arc<dyn BlockDevice> {
        &self.device
    }

    /// What recovery found.
    pub fn recovered(&self) -> &Recovered {
        &self.recovered
    }

    /// Each key in `[from, to)` and its value, ascending, until `visit` returns `false`.
    pub fn keys(
        &self,
        from: &[u8],
        to: &[u8],
        visit: &mut dyn FnMut(&[u8], &Value) -> bool,
    ) -> Result<(), JournalError> {
        self.journal.scan(from, to, visit)
    }

    /// A key's value.
    pub fn get(&self, key: &[u8]) -> Result<Option<Value>, JournalError> {
        self.journal.get(key)
    }

    /// Each segment of the volume, in order, until `visit` returns `false`.
    pub fn segments(
        &self,
        visit: &mut dyn FnMut(&SegmentInfo) -> bool,
    ) -> Result<(), JournalError> {
        let geometry = self.superblock.geometry();
        let home: HashSet<u32> = self.recovered.home_segments.iter().copied().collect();
        let offset =
            |index: u32| geometry.segments_offset + u64::from(index) * geometry.segment_len;
        let unrecorded = |index: u32| {
            let used = if home.contains(&index) { SegmentUse::Home } else { SegmentUse::Free };
            SegmentInfo { index, offset: offset(index), used }
        };
        let (mut next, mut go_on) = (0, true);
        self.keys(&keys::segment(0), &keys::segment_end(), &mut |key, value| {
            let Some(Key::Segment(index)) = keys::parse(key) else { return true };
            while go_on && next < index.min(geometry.segment_count) {
                go_on = visit(&unrecorded(next));
                next += 1;
            }
            if go_on {
                let used = Segment::decode(value).map_or(SegmentUse::Unknown, SegmentUse::Data);
                go_on = visit(&SegmentInfo { index, offset: offset(index), used });
                next = index.saturating_add(1);
            }
            go_on
        })?;
        while go_on && next < geometry.segment_count {
            go_on = visit(&unrecorded(next));
            next += 1;
        }
        Ok(())
    }

    /// The summary blocks of a segment that holds data: each one's block within it, and its
    /// entries.
    pub fn summaries(
        &self,
        index: u32,
        record: Segment,
        visit: &mut dyn FnMut(u32, &[SummaryEntry]) -> bool,
    ) -> std::io::Result<()> {
        let geometry = self.superblock.geometry();
        let home = summary::Home { volume_id: geometry.volume_id, segment: index };
        let begin = geometry.segments_offset + u64::from(index) * geometry.segment_len;
        let blocks = u32::try_from(geometry.segment_len / BLOCK).unwrap_or(u32::MAX);
        let filled = if index < geometry.segment_count { record.filled.min(blocks) } else { 0 };
        let mut at = 0;
        while at < filled {
            let n = READ_BLOCKS.min(filled - at);
            let mut buf = AlignedBuf::zeroed(n as usize * BLOCK as usize);
            self.device.read(begin + u64::from(at) * BLOCK, &mut buf)?;
            for (i, block) in (at..).zip(buf.chunks_exact(BLOCK as usize)) {
                if let Some(entries) = summary::decode(home, block)
                    && !visit(i, &entries)
                {
                    return Ok(());
                }
            }
            at += n;
        }
        Ok(())
    }

    /// The inode that a path from the root leads to; symbolic links are not followed. `None`: there
    /// is no such name.
    pub fn resolve(&self, path: &[u8]) -> Result<Option<Ino>, FsError> {
        let mut at = ROOT;
        for name in
            path.split(|byte| *byte == b'/').filter(|name| !name.is_empty() && *name != b".")
        {
            // Every name of the directory is looked at: the order of the keys is not believed.
            let mut found = None;
            self.keys(&keys::dentry_from(at, 0), &keys::dentry_end(at), &mut |key, value| {
                if let (Some(Key::Dentry(_, _, this)), Ok(dentry)) =
                    (keys::parse(key), Dentry::decode(value))
                    && this == name
                {
                    found = Some(dentry.ino);
                }
                found.is_none()
            })?;
            match found {
                Some(ino) => at = ino,
                None => return Ok(None),
            }
        }
        Ok(Some(at))
    }

    /// Every name of an inode: the directory and the name in it. Looks through all names of the
    /// volume.
    pub fn names(
        &self,
        ino: Ino,
        visit: &mut dyn FnMut(Ino, &[u8]) -> bool,
    ) -> Result<(), JournalError> {
        self.keys(&keys::inode(0), &keys::inode_end(u64::MAX), &mut |key, value| match (
            keys::parse(key),
            Dentry::decode(value),
        ) {
            (Some(Key::Dentry(dir, _, name)), Ok(dentry)) if dentry.ino == ino => visit(dir, name),
            _ => true,
        })
    }
}
