//! What belongs to one inode: its record, attributes, names and extents, as they come in key order.

use super::check::{Checker, Current, SameHash, hex};
use super::report::{Code, Finding, LostRange};
use super::space::Misplaced;
use ferry_fs::api::{Ino, NAME_MAX, SYMLINK_MAX, XATTR_SIZE_MAX};
use ferry_fs::extents::WINDOW_BLOCKS;
use ferry_fs::keys::{
    BLOCK, BadRecord, Dentry, Extent, INO_END, INODE_HAS_XATTRS, INODE_INLINE, InodeRecord,
};

/// The largest size of a file, in bytes.
pub(super) const SIZE_MAX: u64 = i64::MAX as u64;
/// No extent crosses a multiple of so many bytes of its file.
pub(super) const WINDOW: u64 = WINDOW_BLOCKS * BLOCK;
/// Names whose hash is equal, at most.
const SAME_HASH_MAX: usize = 256;

impl Checker<'_> {
    pub(super) fn inode(&mut self, ino: Ino, value: &[u8]) -> Result<(), BadRecord> {
        self.end_inode();
        let record = InodeRecord::decode(value)?;
        self.tree.inode(ino, &record);
        match record.mode & libc::S_IFMT {
            libc::S_IFDIR => self.holdings.directories += 1,
            libc::S_IFREG => self.holdings.files += 1,
            _ => {}
        }
        if let Some(what) = contradiction(ino, &record) {
            self.findings.add(Finding::new(Code::InodeFields, what).of(ino));
        }
        self.current = Some(Current { ino, record: Some(record), ..Current::default() });
        Ok(())
    }

    /// The inode that `ino`'s key belongs to; reports once if there is none.
    fn owner(&mut self, ino: Ino) -> &mut Current {
        if self.current.as_ref().is_none_or(|current| current.ino != ino) {
            self.end_inode();
            let what = "there are attributes, names or extents of it, but no readable record";
            self.findings.add(Finding::new(Code::NoInode, what).of(ino));
        }
        self.current.get_or_insert_with(|| Current { ino, ..Current::default() })
    }

    /// The last key of the current inode was seen.
    pub(super) fn end_inode(&mut self) {
        let Some(current) = self.current.take() else { return };
        let Some(record) = current.record else { return };
        let flagged = record.flags & INODE_HAS_XATTRS != 0;
        // Attributes of an inode without names go before its record does.
        let going = record.nlink == 0 && flagged;
        if flagged != current.has_xattrs && !going {
            let what = if flagged {
                "it has the flag but no attributes"
            } else {
                "it has attributes but no flag"
            };
            self.findings.add(Finding::new(Code::XattrFlag, what).of(current.ino));
        }
        if record.mode & libc::S_IFMT == libc::S_IFDIR && record.size != current.names {
            let what =
                format!("it is said to have {} names, there are {}", record.size, current.names);
            self.findings.add(Finding::new(Code::DirectorySize, what).of(current.ino));
        }
        if record.blocks != current.blocks {
            let what = format!(
                "it is said to have {} blocks, there are {}",
                record.blocks, current.blocks
            );
            self.findings.add(Finding::new(Code::BlockCount, what).of(current.ino));
        }
    }

    pub(super) fn xattr(&mut self, ino: Ino, name: &[u8], value: &[u8]) {
        self.holdings.xattrs += 1;
        self.owner(ino).has_xattrs = true;
        if name.len() > NAME_MAX || name.contains(&0) || value.len() > XATTR_SIZE_MAX {
            let what = format!(
                "an attribute's name {} or value of {} bytes is impossible",
                hex(name),
                value.len()
            );
            self.findings.add(Finding::new(Code::BadName, what).of(ino));
        }
    }

    pub(super) fn dentry(
        &mut self,
        dir: Ino,
        cookie: u64,
        name: &[u8],
        value: &[u8],
    ) -> Result<(), BadRecord> {
        self.holdings.names += 1;
        let owner = self.owner(dir);
        owner.names += 1;
        let kind = owner.record.as_ref().map(|record| record.mode & libc::S_IFMT);
        if kind.is_some_and(|kind| kind != libc::S_IFDIR) && !owner.misfit_reported {
            owner.misfit_reported = true;
            self.findings
                .add(Finding::new(Code::NamesInFile, "it is no directory but holds names").of(dir));
        }
        if name.len() > NAME_MAX
            || name == b"."
            || name == b".."
            || name.iter().any(|&b| b == b'/' || b == 0)
        {
            let what = format!("the directory holds the impossible name {}", name.escape_ascii());
            self.findings.add(Finding::new(Code::BadName, what).of(dir));
        }
        let right = (self.name_hash)(name);
        if cookie >> 8 != right {
            let what = format!(
                "the name {} is stored under hash {:#x}, it belongs under {right:#x}",
                name.escape_ascii(),
                cookie >> 8
            );
            self.findings.add(Finding::new(Code::DentryHash, what).of(dir));
        }
        self.duplicates(dir, cookie, name);
        let dentry = Dentry::decode(value)?;
        if kind.is_some() {
            self.tree.name(dentry.ino, dentry.kind);
        }
        Ok(())
    }

    /// Names with the same hash stand together: holds each against those before it.
    fn duplicates(&mut self, dir: Ino, cookie: u64, name: &[u8]) {
        let (hash, disambiguator) = (cookie >> 8, cookie as u8);
        let group = &mut self.owner(dir).same_hash;
        if group.hash != hash {
            *group = SameHash { hash, names: Vec::new() };
        }
        let full = group.names.len() >= SAME_HASH_MAX;
        let twice = full || group.names.iter().any(|(d, n)| *d == disambiguator || **n == *name);
        if !full {
            group.names.push((disambiguator, name.into()));
        }
        if twice {
            let what =
                format!("the name {} or its listing position is there twice", name.escape_ascii());
            self.findings.add(Finding::new(Code::DuplicateName, what).of(dir));
        }
    }

    pub(super) fn extent(&mut self, ino: Ino, offset: u64, value: &[u8]) -> Result<(), BadRecord> {
        let extent = Extent::decode(value)?;
        let blocks = extent.blocks();
        let owner = self.owner(ino);
        owner.blocks = owner.blocks.saturating_add(blocks);
        let end = blocks
            .checked_mul(BLOCK)
            .and_then(|len| offset.checked_add(len))
            .filter(|&end| end <= SIZE_MAX + 1);
        let crosses = end.is_some_and(|end| (end - 1) / WINDOW != offset / WINDOW);
        let overlaps = offset < owner.extent_end || !offset.is_multiple_of(BLOCK) || crosses;
        owner.extent_end = owner.extent_end.max(end.unwrap_or(u64::MAX));
        let (kind, inline, size) = match &owner.record {
            Some(r) => (r.mode & libc::S_IFMT, r.flags & INODE_INLINE != 0, r.size),
            None => (libc::S_IFREG, false, SIZE_MAX),
        };
        let data = matches!(extent, Extent::Data { .. });
        if (kind != libc::S_IFREG || (inline && data)) && !owner.misfit_reported {
            owner.misfit_reported = true;
            let what = if inline {
                "its contents are in its record, and in extents too"
            } else {
                "it is no regular file but has extents"
            };
            self.findings.add(Finding::new(Code::ExtentOwner, what).of(ino).at(offset));
        }
        if overlaps || end.is_none() {
            let what =
                format!("an extent of {blocks} blocks overlaps its neighbour or is misplaced");
            self.findings.add(Finding::new(Code::ExtentOverlap, what).of(ino).at(offset));
        }
        match extent {
            Extent::Data { block, crcs } => {
                if !inline
                    && end.is_some_and(|end| {
                        end > size.checked_next_multiple_of(BLOCK).unwrap_or(u64::MAX)
                    })
                {
                    let what =
                        format!("{blocks} blocks of data reach beyond the file's {size} bytes");
                    self.beyond_end
                        .add(Finding::new(Code::ExtentBeyondEnd, what).of(ino).at(offset));
                }
                self.data_extent(ino, offset, block, &crcs);
            }
            Extent::Unwritten { .. } => {
                let bytes = blocks.saturating_mul(BLOCK);
                self.holdings.reserved_bytes = self.holdings.reserved_bytes.saturating_add(bytes);
            }
            Extent::Lost { .. } => {
                let bytes = blocks.saturating_mul(BLOCK);
                self.holdings.lost_bytes = self.holdings.lost_bytes.saturating_add(bytes);
                self.losses.add(LostRange { ino, path: None, file_offset: offset, bytes });
            }
        }
        Ok(())
    }

    fn data_extent(&mut self, ino: Ino, offset: u64, block: u64, crcs: &[u32]) {
        let blocks = crcs.len() as u64;
        self.holdings.extents += 1;
        self.holdings.data_bytes += blocks * BLOCK;
        match self.space.claim(block, blocks) {
            Ok(()) => {}
            Err(Misplaced::Outside) => {
                let what = format!(
                    "an extent of {blocks} blocks is said to start at block {block} of the volume"
                );
                self.findings.add(Finding::new(Code::ExtentLocation, what).of(ino).at(offset));
                return;
            }
            Err(Misplaced::Shared { first, blocks }) => {
                let what = format!("{blocks} of its blocks belong to another extent too");
                let device = first.saturating_mul(BLOCK);
                self.findings.add(
                    Finding::new(Code::BlockShared, what).of(ino).at(offset).on_device(device),
                );
            }
        }
        if let Some(verifier) = &mut self.verifier {
            verifier.check(ino, offset, block, crcs, &mut self.findings);
        }
    }
}

/// What in a record cannot be, whatever else the volume holds.
pub(super) fn contradiction(ino: Ino, record: &InodeRecord) -> Option<String> {
    let kind = record.mode & libc::S_IFMT;
    let inline = record.flags & INODE_INLINE != 0;
    if ino == 0 {
        return Some("inode number 0 means \"none\"".into());
    }
    if ino >= INO_END {
        return Some("no inode number can be so high".into());
    }
    match kind {
        libc::S_IFREG if record.size > SIZE_MAX => {
            Some(format!("a size of {} bytes is impossible", record.size))
        }
        libc::S_IFLNK if !inline || record.size == 0 || record.size > SYMLINK_MAX as u64 => {
            Some(format!("a symbolic link with a target of {} bytes is impossible", record.size))
        }
        libc::S_IFREG | libc::S_IFLNK => None,
        libc::S_IFDIR | libc::S_IFCHR | libc::S_IFBLK | libc::S_IFIFO | libc::S_IFSOCK
            if inline =>
        {
            Some("something that is no file and no link has contents".into())
        }
        libc::S_IFDIR | libc::S_IFCHR | libc::S_IFBLK | libc::S_IFIFO | libc::S_IFSOCK => None,
        _ => Some(format!("the type in mode {:o} is unknown", record.mode)),
    }
    .or_else(|| {
        let unknown = record.flags & !(INODE_INLINE | INODE_HAS_XATTRS);
        (unknown != 0).then(|| format!("unknown flags {unknown:#x}"))
    })
}
