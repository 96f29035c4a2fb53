//! What a check of a volume says: findings, each with a stable code, and what the volume holds.

use ferry_fs::api::Ino;
use ferry_fs::keys::BLOCK;
use ferry_fs::scrub::Location;
use serde::Serialize;
use std::fmt;

macro_rules! codes {
    ($($(#[$doc:meta])* $id:ident = $name:literal, $means:literal, $advice:literal;)*) => {
        /// What is wrong, as programs may rely on it: [`Code::name`] of a kind of damage never
        /// changes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Code { $($(#[$doc])* $id,)* }

        impl Code {
            /// Every code, in the order of this list.
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
    /// A superblock copy is unreadable, or they differ.
    SuperblockCopy = "superblock-copy",
        "a copy of the superblock is damaged; another one is in use and nothing is lost",
        "run `ferry fsck --repair`, which writes it anew; check the disk below";
    /// The log cannot be followed to its end.
    Log = "log",
        "the log is damaged before its durable end: changes that were acknowledged as durable cannot be read",
        "copy the volume first; then run `ferry fsck --repair`, which cuts the log there, and compare what was changed last with a backup";
    /// The device cannot read a block of the log that is needed.
    LogUnreadable = "log-unreadable",
        "the device cannot read a block of the log that is needed: it may hold changes that were acknowledged as durable",
        "try again: the next time the device may read it; else copy the volume to another disk; `ferry fsck --repair --give-up-unreadable` cuts the log there";
    /// The home store cannot be read.
    HomeStore = "home-store",
        "the store of all names and attributes is damaged; what lies behind the damage was not checked",
        "copy the volume first; then run `ferry fsck --repair`, which keeps all that can be read and says what is lost";
    /// One of the two slots of the home map is bad.
    HomeMap = "home-map",
        "one of the two copies of the map that says where names and attributes are stored is damaged; the other one is in use and nothing is lost",
        "run `ferry fsck --repair`, which writes it anew (so does the next mount); check the disk below";
    /// One of the two copies of a block of the home store is bad.
    HomeCopy = "home-copy",
        "a block of the store of all names and attributes is bad in one of its two copies; the other one is in use and nothing is lost",
        "run `ferry fsck --repair`, which writes it anew (so does a mount that reads it); check the disk below";
    /// A segment with data is the home store's, too.
    HomeClaim = "home-claim",
        "a segment belongs to the data of files and to the store of all names and attributes, too: the next change may overwrite what files hold",
        "do not mount read-write before `ferry fsck --repair`, which writes the store anew elsewhere";
    /// The volume's file was shorter than the volume.
    CutOff = "cut-off",
        "the end of the volume was cut off: what lay there is lost",
        "bring back the rest, or a backup; else `ferry fsck --repair` gives the file its length again and says what is lost";
    /// A key that no version wrote.
    UnknownKey = "unknown-key",
        "the volume holds a record of an unknown type; no file refers to it",
        "nothing is lost; if a newer version wrote this volume, check it with that version (a repair leaves it alone)";
    /// A value that cannot be decoded.
    BadRecord = "bad-record",
        "a record cannot be decoded: what it described is lost",
        "run `ferry fsck --repair`; then restore the file or directory named here from a backup";
    /// The counters are absent.
    NoCounters = "no-counters",
        "the volume's counters are missing: new files could get numbers that are in use",
        "run `ferry fsck --repair`";
    /// `next_ino` is not above every inode.
    NextIno = "next-ino",
        "a new file could get the number of one that exists",
        "run `ferry fsck --repair` before mounting the volume read-write";
    /// The count of inodes is wrong.
    InodeCount = "inode-count",
        "df -i shows a wrong number; no file is harmed",
        "run `ferry fsck --repair`; nothing is urgent";
    /// The count of unwritten blocks is wrong.
    ReservedCount = "reserved-count",
        "the count of space that fallocate took and nobody wrote is wrong; no file is harmed",
        "run `ferry fsck --repair`; nothing is urgent";
    /// There is no root directory.
    NoRoot = "no-root",
        "the root directory is missing: the volume cannot be mounted",
        "run `ferry fsck --repair`: it makes a new root, and what has lost its name goes to /lost+found";
    /// An inode's type, flags or size make no sense.
    InodeFields = "inode-fields",
        "an inode's fields contradict each other; reading it may fail or show wrong attributes",
        "run `ferry fsck --repair`; then compare the file with a backup";
    /// Attributes, names or extents of an inode that has no record.
    NoInode = "no-inode",
        "attributes, names or contents belong to an inode that does not exist: its record is lost",
        "run `ferry fsck --repair`: what has contents or names left is kept, owner and permissions are lost";
    /// Attributes are stored but the flag is off, or the other way round.
    XattrFlag = "xattr-flag",
        "extended attributes are stored but not shown, or the other way round",
        "run `ferry fsck --repair`";
    /// Names in something that is no directory.
    NamesInFile = "names-in-file",
        "directory entries belong to something that is not a directory",
        "run `ferry fsck --repair`: the files go to /lost+found, if they have no other name";
    /// A dentry's cookie does not follow from its name.
    DentryHash = "dentry-hash",
        "the name is stored in the wrong place: listing shows it but opening it fails",
        "run `ferry fsck --repair`: it stores the name where it belongs";
    /// The same name, or the same cookie, twice in a directory.
    DuplicateName = "duplicate-name",
        "a name or listing position exists twice in a directory: one of the files cannot be reached by it",
        "run `ferry fsck --repair`: one stays; the other file goes to /lost+found, if it has no other name";
    /// A name that cannot exist.
    BadName = "bad-name",
        "a name is empty, too long, `.`, `..`, or holds `/` or NUL: no program can open it",
        "run `ferry fsck --repair`: the file goes to /lost+found, if it has no other name";
    /// A name leads to no inode.
    DanglingName = "dangling-name",
        "a name leads to an inode that does not exist: opening it fails",
        "run `ferry fsck --repair`, which removes the name; then restore the file from a backup";
    /// The type in the dentry is not that of the inode.
    DentryKind = "dentry-kind",
        "a listing shows another type than the inode has",
        "run `ferry fsck --repair`";
    /// A directory's size is not the number of its names.
    DirectorySize = "directory-size",
        "a directory says that it has another number of names than it has",
        "run `ferry fsck --repair`";
    /// A directory's parent is not the directory that names it.
    Parent = "parent",
        "`..` leads to the wrong directory",
        "run `ferry fsck --repair`";
    /// A directory has several names.
    DirectoryNames = "directory-names",
        "a directory has more than one name, or the root has one",
        "do not remove one of the names; run `ferry fsck --repair`, which keeps the one that the directory says";
    /// Directories that contain each other.
    Cycle = "cycle",
        "directories contain each other and cannot be reached from the root",
        "run `ferry fsck --repair`: the directories go to /lost+found, with all that is in them";
    /// No name, and not waiting to be reclaimed.
    Unreachable = "unreachable",
        "a file or directory has lost its name: its space is taken but nobody can open it",
        "run `ferry fsck --repair`: it goes to /lost+found";
    /// The link count is wrong.
    LinkCount = "link-count",
        "the number of names is wrong: removing names could free the file too early, or never",
        "run `ferry fsck --repair` before removing any name of it";
    /// An orphan key that should not be.
    OrphanKey = "orphan-key",
        "a file that still has names, or does not exist, is marked to be reclaimed",
        "run `ferry fsck --repair` before mounting the volume read-write";
    /// An extent in something that is not a regular file.
    ExtentOwner = "extent-owner",
        "contents belong to something that is not a regular file, or that keeps its contents elsewhere",
        "run `ferry fsck --repair`";
    /// An extent starts off a block boundary or overlaps the one before.
    ExtentOverlap = "extent-overlap",
        "two stored ranges of one file overlap, or one is misplaced: which bytes are right is unknown",
        "run `ferry fsck --repair`: what the checksums do not settle is marked as lost; then compare with a backup";
    /// An extent with data beyond the end of the file.
    ExtentBeyondEnd = "extent-beyond-end",
        "data is stored behind the end of the file; it is not shown but takes space",
        "run `ferry fsck --repair`: the file then ends behind that data; look whether it belongs there";
    /// An extent points outside of the segments, or across two.
    ExtentLocation = "extent-location",
        "contents are said to be where no data can be: reading them fails or shows other bytes",
        "run `ferry fsck --repair`, which marks the range as lost; then restore the file from a backup";
    /// A block belongs to two extents.
    BlockShared = "block-shared",
        "two files, or two ranges of one, claim the same block: at least one of them has lost its contents",
        "run `ferry fsck --repair`: the file whose checksum is right keeps it; then restore the other from a backup";
    /// A block count is wrong.
    BlockCount = "block-count",
        "du shows a wrong number; the contents are not harmed",
        "run `ferry fsck --repair`; nothing is urgent";
    /// A segment record that is impossible or contradicts the extents.
    SegmentRecord = "segment-record",
        "a segment's record is impossible, or the home store claims the segment too",
        "run `ferry fsck --repair` before mounting the volume read-write";
    /// Data in a segment that is not marked as used.
    SegmentFree = "segment-free",
        "contents lie in space that counts as free: new data will overwrite them",
        "do not mount read-write before `ferry fsck --repair`";
    /// Data behind what the segment says is filled.
    SegmentFilled = "segment-filled",
        "contents lie in a part of a segment that counts as unwritten: new data will overwrite them",
        "do not mount read-write before `ferry fsck --repair`";
    /// The live count is wrong.
    SegmentLive = "segment-live",
        "the count of blocks in use is wrong: space is lost, or would be freed too early",
        "do not mount read-write before `ferry fsck --repair`";
    /// A block's contents do not match their checksum.
    Checksum = "checksum",
        "a block of the file is not what was written: reading it fails with EIO",
        "restore the file from a backup, or `ferry fsck --repair` marks the block as lost; check the disk below";
    /// A block cannot be read.
    ReadError = "read-error",
        "the device below could not read a block of the file: reading it fails with EIO",
        "try again: the next time the device may read it; else restore the file from a backup, or give the range up with `ferry fsck --repair --give-up-unreadable`; check the disk below";
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
    /// The kind of damage.
    pub code: Code,
    /// What exactly is wrong, for people.
    pub what: String,
    /// Where it is.
    #[serde(flatten)]
    pub location: Location,
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
            location: Location::default(),
            means: code.means(),
            advice: code.advice(),
        }
    }
    /// About this inode.
    pub fn of(mut self, ino: Ino) -> Self {
        self.location.ino = Some(ino);
        self
    }
    /// At this byte of the file.
    pub fn at(mut self, offset: u64) -> Self {
        self.location.file_offset = Some(offset);
        self
    }
    /// So many blocks.
    pub fn blocks(mut self, blocks: u64) -> Self {
        self.location.length = Some(blocks * BLOCK);
        self
    }
    /// At this byte of the volume.
    pub fn on_device(mut self, offset: u64) -> Self {
        self.location.device_offset = Some(offset);
        self
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, self.what)?;
        self.location.write_owner(f)?;
        self.location.write_range(f)
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
    /// Directory entries in all directories.
    pub names: u64,
    /// Extended attributes of all inodes.
    pub xattrs: u64,
    /// Extents with data.
    pub extents: u64,
    /// Bytes that extents with data take.
    pub data_bytes: u64,
    /// Bytes of unwritten extents.
    pub reserved_bytes: u64,
    /// Bytes of files that an earlier repair had to give up: reading them fails.
    pub lost_bytes: u64,
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
    /// The blocks of files were read too; otherwise nothing is said of what they hold.
    pub data_read: bool,
    /// The volume's id, in hexadecimal.
    pub volume_id: String,
    /// What is wrong, at most [`FINDINGS_MAX`] of them.
    pub findings: Vec<Finding>,
    /// How many more there were.
    pub findings_not_listed: u64,
    /// What was repaired, at most [`FINDINGS_MAX`] of them; always empty after a check.
    pub repairs: Vec<Repair>,
    /// How many repairs there were in all.
    pub repaired: u64,
    /// Ranges of files that a repair had to give up (known, and no damage any more), at most
    /// [`FINDINGS_MAX`] of them.
    pub lost: Vec<LostRange>,
    /// How many more there are.
    pub lost_not_listed: u64,
    /// What the volume holds.
    pub holdings: Holdings,
}

/// A report lists so many findings; the rest is counted.
pub const FINDINGS_MAX: usize = 1000;

/// One thing that was repaired.
#[derive(Clone, Debug, Serialize)]
pub struct Repair {
    /// What had been wrong.
    pub code: Code,
    /// What was done.
    pub what: String,
    /// The inode it concerns, and a path that leads there now.
    #[serde(flatten)]
    pub location: Location,
    /// What is lost for good.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lost: Option<String>,
    /// What to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<&'static str>,
}

impl Repair {
    pub(super) fn new(code: Code, what: impl Into<String>) -> Self {
        Self { code, what: what.into(), location: Location::default(), lost: None, advice: None }
    }
    /// The volume's file had `found` bytes and got back its length.
    pub fn of_length(found: u64, expected: u64) -> Self {
        let what = format!(
            "the volume's file had been cut off at byte {found}; it is {expected} bytes long again"
        );
        Self::new(Code::CutOff, what)
            .losing(format!("what was stored from byte {found} of the volume on"))
    }
    /// About this inode.
    pub(super) fn of(mut self, ino: Ino) -> Self {
        self.location.ino = Some(ino);
        self
    }
    /// This is lost.
    pub(super) fn losing(mut self, lost: impl Into<String>) -> Self {
        self.lost = Some(lost.into());
        self.advice = self.advice.or(Some("restore it from a backup if it is missed"));
        self
    }
    /// The user is to do this.
    pub(super) fn then(mut self, advice: &'static str) -> Self {
        self.advice = Some(advice);
        self
    }
}

impl fmt::Display for Repair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "repaired {}: {}", self.code, self.what)?;
        self.location.write_owner(f)?;
        if let Some(lost) = &self.lost {
            write!(f, "; lost: {lost}")?;
        }
        if let Some(advice) = self.advice {
            write!(f, "; do: {advice}")?;
        }
        Ok(())
    }
}

/// A range of a file that cannot be read any more, and that a repair has marked so.
#[derive(Clone, Debug, Serialize)]
pub struct LostRange {
    /// The file that has the range.
    pub ino: Ino,
    /// A path that leads there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// First byte of the range in the file.
    pub file_offset: u64,
    /// Bytes, in whole blocks.
    pub bytes: u64,
}

impl fmt::Display for LostRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.as_deref().map(|path| format!("{path}, ")).unwrap_or_default();
        let end = self.file_offset.saturating_add(self.bytes);
        write!(
            f,
            "known loss: bytes {} to {end} of [{path}inode {}] cannot be read",
            self.file_offset, self.ino
        )?;
        write!(f, "; do: write the file anew, or remove it")
    }
}

/// Collects lost ranges, bounded. Neighbours become one.
#[derive(Default)]
pub(super) struct Losses {
    pub(super) list: Vec<LostRange>,
    pub(super) not_listed: u64,
}

impl Losses {
    pub(super) fn add(&mut self, range: LostRange) {
        let full = self.list.len() >= FINDINGS_MAX;
        match self.list.last_mut() {
            Some(last)
                if last.ino == range.ino && last.file_offset + last.bytes == range.file_offset =>
            {
                last.bytes += range.bytes;
            }
            _ if full => self.not_listed += 1,
            _ => self.list.push(range),
        }
    }
}

/// Collects findings, bounded. Neighbouring blocks become one.
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
    /// Adds one; what goes on where the last one ends becomes a part of it.
    pub(super) fn add(&mut self, finding: Finding) {
        let goes_on = |last: &mut Finding| {
            (last.code, &last.what) == (finding.code, &finding.what)
                && last.location.join(&finding.location)
        };
        if self.list.last_mut().is_some_and(goes_on) {
            // It has become a part of the last one.
        } else if self.list.len() < FINDINGS_MAX {
            self.list.push(finding);
        } else {
            self.not_listed += 1;
        }
    }
}
