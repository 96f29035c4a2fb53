//! What a check of a volume says: findings, each with a stable code, and what the volume holds.

use crate::api::Ino;
use serde::Serialize;
use std::fmt;

macro_rules! codes {
    ($($(#[$doc:meta])* $id:ident = $name:literal, $means:literal, $advice:literal;)*) => {
        /// What is wrong, as programs may rely on it: [`Code::name`] of a kind of damage never changes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Code { $($(#[$doc])* $id,)* }

        impl Code {
            /// Every code.
            pub const ALL: &'static [Code] = &[$(Code::$id,)*];
            /// The stable, machine-readable name.
            pub fn name(self) -> &'static str {
                match self { $(Code::$id => $name,)* }
            }
            /// What this means for the user.
            pub fn means(self) -> &'static str {
                match self { $(Code::$id => $means,)* }
            }
            /// What to do about it.
            pub fn advice(self) -> &'static str {
                match self { $(Code::$id => $advice,)* }
            }
        }
    };
}

codes! {
    /// One of the two superblock copies is unreadable, or they differ.
    SuperblockCopy = "superblock-copy",
        "one of the two copies of the superblock is damaged; the other one is in use and nothing is lost",
        "nothing is urgent; copy to a new volume when convenient, and check the disk below";
    /// The log cannot be followed to its end.
    Log = "log",
        "the log is damaged before its durable end: changes that were acknowledged as durable cannot be read",
        "copy the volume aside before anything else; then restore from a backup";
    /// The home store cannot be read.
    HomeStore = "home-store",
        "the store of all names and attributes is damaged; what lies behind the damage was not checked",
        "copy the volume aside; copy out what a read-only mount still shows, then restore the rest from a backup";
    /// A key that no version wrote.
    UnknownKey = "unknown-key",
        "the volume holds a record of an unknown type; no file refers to it",
        "nothing is lost; if a newer version wrote this volume, check it with that version";
    /// A value that cannot be decoded.
    BadRecord = "bad-record",
        "a record cannot be decoded: what it described is lost",
        "restore the file or directory named here from a backup";
    /// The counters are absent.
    NoCounters = "no-counters",
        "the volume's counters are missing: new files could get numbers that are in use",
        "mount read-only, copy everything out, make a new volume";
    /// `next_ino` is not above every inode.
    NextIno = "next-ino",
        "a new file could get the number of one that exists",
        "mount read-only, copy everything out, make a new volume";
    /// The count of inodes is wrong.
    InodeCount = "inode-count",
        "df -i shows a wrong number; no file is harmed",
        "nothing is urgent; copy to a new volume when convenient";
    /// The count of promised blocks is wrong.
    ReservedCount = "reserved-count",
        "space counts as promised that is not, or the other way round; no file is harmed",
        "nothing is urgent; copy to a new volume when convenient";
    /// There is no root directory.
    NoRoot = "no-root",
        "the root directory is missing: the volume cannot be mounted",
        "copy the volume aside and restore from a backup";
    /// An inode's type, flags or size make no sense.
    InodeFields = "inode-fields",
        "an inode's fields contradict each other; reading it may fail or show wrong attributes",
        "restore the file from a backup, then remove the damaged one";
    /// Attributes, names or extents of an inode that has no record.
    NoInode = "no-inode",
        "attributes, names or contents belong to an inode that does not exist: its record is lost",
        "restore the file or directory from a backup";
    /// Attributes are stored but the flag is off, or the other way round.
    XattrFlag = "xattr-flag",
        "extended attributes are stored but not shown, or the other way round",
        "set the attribute again";
    /// Names in something that is no directory.
    NamesInFile = "names-in-file",
        "directory entries belong to something that is not a directory",
        "restore the directory from a backup";
    /// A dentry's cookie does not follow from its name.
    DentryHash = "dentry-hash",
        "the name is stored in the wrong place: listing shows it but opening it fails",
        "copy the file through another of its names, or restore it from a backup";
    /// The same name, or the same cookie, twice in a directory.
    DuplicateName = "duplicate-name",
        "a name or listing position exists twice in a directory: one of the files cannot be reached by it",
        "rename the one that can be reached, then look at the other";
    /// A name that cannot exist.
    BadName = "bad-name",
        "a name is empty, too long, `.`, `..`, or holds `/` or NUL: no program can open it",
        "restore the file from a backup under its right name";
    /// A name leads to no inode.
    DanglingName = "dangling-name",
        "a name leads to an inode that does not exist: opening it fails",
        "restore the file from a backup";
    /// The type in the dentry is not that of the inode.
    DentryKind = "dentry-kind",
        "a listing shows another type than the inode has",
        "check what the file holds; rename it to write the entry anew";
    /// A directory's size is not the number of its names.
    DirectorySize = "directory-size",
        "a directory says that it has another number of names than it has",
        "make a new directory and move the names there";
    /// A directory's parent is not the directory that names it.
    Parent = "parent",
        "`..` leads to the wrong directory",
        "move the directory away and back";
    /// A directory has several names.
    DirectoryNames = "directory-names",
        "a directory has more than one name, or the root has one",
        "restore the tree from a backup; do not remove one of the names";
    /// Directories that contain each other.
    Cycle = "cycle",
        "directories contain each other and cannot be reached from the root",
        "restore the tree from a backup";
    /// No name, and not waiting to be reclaimed.
    Unreachable = "unreachable",
        "a file or directory has lost its name: its space is taken but nobody can open it",
        "restore it from a backup if it is missed";
    /// The link count is wrong.
    LinkCount = "link-count",
        "the number of names is wrong: removing names could free the file too early, or never",
        "copy the file to a new name and remove the old names";
    /// An orphan key that should not be.
    OrphanKey = "orphan-key",
        "a file that still has names, or does not exist, is marked to be reclaimed",
        "copy the file out before mounting the volume read-write";
    /// An extent in something that is not a regular file.
    ExtentOwner = "extent-owner",
        "contents belong to something that is not a regular file, or that keeps its contents elsewhere",
        "restore the file from a backup";
    /// An extent starts off a block boundary or overlaps the one before.
    ExtentOverlap = "extent-overlap",
        "two stored ranges of one file overlap, or one is misplaced: which bytes are right is unknown",
        "restore the file from a backup";
    /// An extent with data beyond the end of the file.
    ExtentBeyondEnd = "extent-beyond-end",
        "data is stored behind the end of the file; it is not shown but takes space",
        "truncate the file to its size, or copy it";
    /// An extent points outside of the segments, or across two.
    ExtentPlace = "extent-place",
        "contents are said to be where no data can be: reading them fails or shows other bytes",
        "restore the file from a backup";
    /// A block belongs to two extents.
    BlockShared = "block-shared",
        "two files, or two places of one, claim the same block: at least one of them has lost its contents",
        "compare both files with a backup";
    /// A block count is wrong.
    BlockCount = "block-count",
        "du shows a wrong number; the contents are not harmed",
        "copy the file to correct it";
    /// A segment record that is impossible or contradicts the extents.
    SegmentRecord = "segment-record",
        "a segment's record is impossible, or the home store claims the segment too",
        "mount read-only, copy everything out, make a new volume";
    /// Data in a segment that is not marked as used.
    SegmentFree = "segment-free",
        "contents lie in space that counts as free: new data will overwrite them",
        "do not mount read-write; mount read-only, copy everything out, make a new volume";
    /// Data behind what the segment says is filled.
    SegmentFilled = "segment-filled",
        "contents lie in a part of a segment that counts as unwritten: new data will overwrite them",
        "do not mount read-write; mount read-only, copy everything out, make a new volume";
    /// The live count is wrong.
    SegmentLive = "segment-live",
        "the count of blocks in use is wrong: space is lost, or would be freed too early",
        "do not mount read-write if the count is too low; mount read-only and copy everything out";
    /// A block's contents do not match their checksum.
    Checksum = "checksum",
        "a block of the file is not what was written: reading it fails with EIO",
        "restore the file from a backup; check the disk below";
    /// A block cannot be read.
    ReadError = "read-error",
        "the device below could not read a block of the file",
        "restore the file from a backup; check the disk below";
}

impl Serialize for Code {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One thing that is wrong.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// Which kind.
    pub code: Code,
    /// What exactly.
    pub what: String,
    /// The inode it concerns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ino: Option<Ino>,
    /// A path that leads there from the root, as far as one is left; bytes that are not UTF-8 are escaped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Byte in the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_offset: Option<u64>,
    /// Byte on the volume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_offset: Option<u64>,
    /// What it means.
    pub means: &'static str,
    /// What to do.
    pub advice: &'static str,
}

impl Finding {
    /// A finding about nothing in particular; see the `with_…` methods.
    pub fn new(code: Code, what: impl Into<String>) -> Self {
        Self {
            code,
            what: what.into(),
            ino: None,
            path: None,
            file_offset: None,
            device_offset: None,
            means: code.means(),
            advice: code.advice(),
        }
    }
    /// About this inode.
    pub fn of(mut self, ino: Ino) -> Self {
        self.ino = Some(ino);
        self
    }
    /// At this byte of the file.
    pub fn at(mut self, offset: u64) -> Self {
        self.file_offset = Some(offset);
        self
    }
    /// At this byte of the volume.
    pub fn on_device(mut self, offset: u64) -> Self {
        self.device_offset = Some(offset);
        self
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, self.what)?;
        match (&self.path, self.ino) {
            (Some(path), Some(ino)) => write!(f, " [{path}, inode {ino}]")?,
            (None, Some(ino)) => write!(f, " [inode {ino}]")?,
            _ => {}
        }
        if let Some(offset) = self.file_offset {
            write!(f, " at byte {offset}")?;
        }
        if let Some(offset) = self.device_offset {
            write!(f, " (byte {offset} of the volume)")?;
        }
        write!(f, "\n    means: {}\n    do:    {}", self.means, self.advice)
    }
}

/// What the volume holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Holdings {
    /// Inodes of every type.
    pub inodes: u64,
    /// Directories among them.
    pub directories: u64,
    /// Regular files among them.
    pub files: u64,
    /// Inodes without a name that wait to be reclaimed (not damage).
    pub orphans: u64,
    /// Directory entries.
    pub names: u64,
    /// Extended attributes.
    pub xattrs: u64,
    /// Extents with data.
    pub extents: u64,
    /// Bytes that extents with data take.
    pub data_bytes: u64,
    /// Bytes that were promised and not written.
    pub reserved_bytes: u64,
    /// Segments with data.
    pub data_segments: u64,
    /// Segments of the home store.
    pub home_segments: u64,
    /// Contexts that recovery applied from the log.
    pub recovered_contexts: u64,
    /// The volume had not been unmounted cleanly (not damage).
    pub unclean: bool,
}

/// The result of a check.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Nothing is wrong.
    pub clean: bool,
    /// The volume's id, in hexadecimal.
    pub volume_id: String,
    /// What is wrong, at most [`FINDINGS_MAX`] of them.
    pub findings: Vec<Finding>,
    /// How many more there were.
    pub findings_not_listed: u64,
    /// What the volume holds.
    pub holdings: Holdings,
}

/// A report lists so many findings; the rest is counted.
pub const FINDINGS_MAX: usize = 1000;

/// Collects findings, bounded.
#[derive(Default)]
pub(super) struct Findings {
    pub(super) list: Vec<Finding>,
    pub(super) not_listed: u64,
}

impl Findings {
    pub(super) fn of(finding: Finding) -> Self {
        Self { list: vec![finding], not_listed: 0 }
    }
    pub(super) fn append(&mut self, other: Findings) {
        self.not_listed += other.not_listed;
        other.list.into_iter().for_each(|finding| self.add(finding));
    }
    pub(super) fn add(&mut self, finding: Finding) {
        if self.list.len() < FINDINGS_MAX {
            self.list.push(finding);
        } else {
            self.not_listed += 1;
        }
    }
}
