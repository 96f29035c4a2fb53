//! What a scrub has found.

use crate::api::Ino;
use crate::keys::BLOCK;
use ferry_journal::{Geometry, JournalError};
use serde::Serialize;
use std::fmt;

/// So many damaged places are listed; the rest is counted.
pub const DAMAGE_MAX: usize = 10_000;

/// Which part of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    /// A copy of the superblock.
    Superblock,
    /// A record that recovery would need.
    Log,
    /// The home store: its map or a block of its file.
    Home,
    /// A key, or its value.
    Keys,
    /// Contents of a file.
    Data,
}

impl Part {
    /// Which part it is whose damage keeps the journal from being opened, and where, as far as that
    /// is known. `None`: the error is none of damage.
    pub fn of_error(geometry: &Geometry, error: &JournalError) -> Option<(Self, Option<u64>)> {
        match error {
            JournalError::Damaged { offset, .. } | JournalError::Unreadable { offset, .. } => {
                let log = geometry.log_offset..geometry.log_offset + geometry.log_len;
                Some((if log.contains(offset) { Self::Log } else { Self::Home }, Some(*offset)))
            }
            JournalError::Home(_) => Some((Self::Home, None)),
            _ => None,
        }
    }
}

/// Where something is wrong, as far as that is known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Location {
    /// The file or directory that it belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ino: Option<Ino>,
    /// A path that leads there; bytes that are not printable are escaped. `None` for a file without
    /// a name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// First byte in the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_offset: Option<u64>,
    /// Bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub length: Option<u64>,
    /// First byte on the volume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_offset: Option<u64>,
}

impl Location {
    /// Adds `next` to this range of a file, if it goes on where this ends.
    pub fn join(&mut self, next: &Self) -> bool {
        let behind = |offset: Option<u64>| Some(offset? + self.length?);
        let goes_on = self.ino == next.ino
            && next.file_offset.is_some()
            && behind(self.file_offset) == next.file_offset
            && behind(self.device_offset) == next.device_offset;
        match (self.length, next.length) {
            (Some(length), Some(more)) if goes_on => self.length = Some(length + more),
            _ => return false,
        }
        true
    }

    /// Writes the file and the path, in brackets, where there is one.
    pub fn write_owner(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.path, self.ino) {
            (Some(path), Some(ino)) => write!(f, " [{path}, inode {ino}]"),
            (None, Some(ino)) => write!(f, " [inode {ino}]"),
            _ => Ok(()),
        }
    }

    /// Writes the range, as far as it is known.
    pub fn write_range(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(offset) = self.file_offset {
            write!(f, " at byte {offset}")?;
        }
        if let Some(length) = self.length {
            write!(f, ", {length} bytes")?;
        }
        if let Some(offset) = self.device_offset {
            write!(f, " (byte {offset} of the volume)")?;
        }
        Ok(())
    }
}

/// A damaged place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Damage {
    /// The part of the volume.
    pub part: Part,
    /// What is wrong.
    pub what: String,
    /// Where it is.
    #[serde(flatten)]
    pub location: Location,
}

impl Damage {
    pub(crate) fn new(part: Part, what: impl Into<String>, location: Location) -> Self {
        Self { part, what: what.into(), location }
    }
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.location.path, self.location.ino) {
            (Some(path), _) => write!(f, "{path}")?,
            (None, Some(ino)) => write!(f, "inode {ino} (without a name)")?,
            (None, None) => write!(f, "{}", format!("{:?}", self.part).to_lowercase())?,
        }
        f.write_str(if self.location.file_offset.is_some() { "," } else { "" })?;
        self.location.write_range(f)?;
        write!(f, ": {}", self.what)
    }
}

/// What was read and held against its checksum, or decoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Verified {
    /// Bytes of files' contents.
    pub data_bytes: u64,
    /// Extents that they are in.
    pub extents: u64,
    /// Keys.
    pub keys: u64,
    /// Bytes of them and their values.
    pub key_bytes: u64,
    /// Bytes of the home store's file and map.
    pub home_bytes: u64,
    /// Bytes of the log.
    pub log_bytes: u64,
    /// Whole copies of the superblock.
    pub superblocks: u64,
}

impl Verified {
    /// All bytes that were read.
    pub fn bytes(&self) -> u64 {
        self.data_bytes + self.key_bytes + self.home_bytes + self.log_bytes
    }
}

/// The result of a scrub.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ScrubReport {
    /// It was not stopped before the end.
    pub complete: bool,
    /// No damage was found.
    pub clean: bool,
    /// What was verified.
    pub verified: Verified,
    /// Blocks that were overwritten or removed before they could be read.
    pub passed_blocks: u64,
    /// Damaged blocks and keys.
    pub damaged_blocks: u64,
    /// Where, at most [`DAMAGE_MAX`] places; neighbouring blocks of a file are one place.
    pub damage: Vec<Damage>,
    /// Places beyond those.
    pub damage_not_listed: u64,
}

impl ScrubReport {
    /// Notes a damaged place.
    pub(crate) fn add(&mut self, damage: Damage) {
        let length = damage.location.length;
        self.damaged_blocks += length.map_or(1, |length| length.div_ceil(BLOCK).max(1));
        let goes_on = |last: &mut Damage| {
            (last.part, damage.part) == (Part::Data, Part::Data)
                && last.what == damage.what
                && last.location.join(&damage.location)
        };
        if self.damage.last_mut().is_some_and(goes_on) {
            // It has become a part of the last one.
        } else if self.damage.len() < DAMAGE_MAX {
            self.damage.push(damage);
        } else {
            self.damage_not_listed += 1;
        }
    }
}
