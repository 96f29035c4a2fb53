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

/// A damaged place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Damage {
    /// Where.
    pub part: Part,
    /// What is wrong.
    pub what: String,
    /// The file or directory that it belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ino: Option<Ino>,
    /// A path that leads there; bytes that are not printable are escaped. `None` for a file without
    /// a name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// First damaged byte of the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_offset: Option<u64>,
    /// Damaged bytes, where that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub length: Option<u64>,
    /// First damaged byte of the volume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_offset: Option<u64>,
}

impl Damage {
    /// Of no file.
    pub(crate) fn of_part(part: Part, what: impl Into<String>) -> Self {
        let what = what.into();
        Self {
            part,
            what,
            ino: None,
            path: None,
            file_offset: None,
            length: None,
            device_offset: None,
        }
    }

    /// Whether `next` goes on where this ends.
    fn is_followed_by(&self, next: &Damage) -> bool {
        let behind = |offset: Option<u64>| Some(offset? + self.length?);
        self.part == Part::Data
            && (self.part, self.ino, &self.what) == (next.part, next.ino, &next.what)
            && next.file_offset.is_some()
            && behind(self.file_offset) == next.file_offset
            && behind(self.device_offset) == next.device_offset
    }
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.path, self.ino) {
            (Some(path), _) => write!(f, "{path}")?,
            (None, Some(ino)) => write!(f, "inode {ino} (without a name)")?,
            (None, None) => write!(f, "{}", format!("{:?}", self.part).to_lowercase())?,
        }
        if let Some(offset) = self.file_offset {
            write!(f, ", at byte {offset}")?;
        }
        if let Some(length) = self.length {
            write!(f, ", {length} bytes")?;
        }
        if let Some(offset) = self.device_offset {
            write!(f, " (byte {offset} of the volume)")?;
        }
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
        self.damaged_blocks += damage.length.map_or(1, |length| length.div_ceil(BLOCK).max(1));
        if let Some(last) = self.damage.last_mut().filter(|last| last.is_followed_by(&damage)) {
            last.length = Some(last.length.unwrap_or(0) + damage.length.unwrap_or(0));
        } else if self.damage.len() < DAMAGE_MAX {
            self.damage.push(damage);
        } else {
            self.damage_not_listed += 1;
        }
    }
}
