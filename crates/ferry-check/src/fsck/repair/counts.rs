//! Everything that is counted: links, names, inodes, unwritten blocks, blocks of segments. Each is
//! corrected from what is there.

use super::edits::{Writer, each_key};
use super::rows::{DIRECTORY, Row, Rows};
use crate::fsck::report::{Code, Repair};
use crate::fsck::space::Space;
use ferry_fs::api::{Ino, ROOT};
use ferry_fs::keys::{self, Counters, Extent, INO_END, InodeRecord, Key, Number, Segment};
use ferry_journal::{Geometry, JournalError};
use std::collections::HashSet;

/// Runs the pass over the whole view.
pub(super) fn run(
    writer: &mut Writer<'_>,
    geometry: &Geometry,
    home: &[u32],
) -> Result<(), JournalError> {
    let mut used = Used { space: Space::new(geometry), unwritten: 0 };
    let rows = Rows::load(writer.journal(), &mut |_| {}, &mut |extent| used.add(extent))?;
    for row in &rows.0 {
        mend_row(writer, row)?;
    }
    mend_counters(writer, &rows)?;
    drop(rows);
    mend_space(writer, used, home)?;
    writer.flush()
}

/// What an inode's record should say, from the names.
fn mend_row(writer: &mut Writer<'_>, row: &Row) -> Result<(), JournalError> {
    let directory = row.kind == DIRECTORY;
    let nlink = match (directory, row.orphan) {
        (true, false) => row.subdirs.saturating_add(2),
        (true, true) => 0,
        (false, _) => row.names,
    };
    let size = if directory { u64::from(row.entries) } else { row.size };
    let parent = match directory {
        true if row.ino == ROOT && row.parent == 0 => 0,
        true if row.ino == ROOT => ROOT,
        true if row.up != 0 => row.up,
        _ => row.parent,
    };
    if (nlink, size, parent) == (row.nlink, row.size, row.parent) {
        return Ok(());
    }
    let Some(value) = writer.get(&keys::inode(row.ino))? else { return Ok(()) };
    let Ok(record) = InodeRecord::decode(&value) else { return Ok(()) };
    let mut say = |code, what: String| writer.say(Repair::new(code, what).of(row.ino));
    if nlink != row.nlink {
        say(Code::LinkCount, format!("its link count was {}, it is {nlink}", row.nlink));
    }
    if size != row.size {
        say(Code::DirectorySize, format!("it was said to have {} names, it has {size}", row.size));
    }
    if parent != row.parent {
        say(Code::Parent, format!("its parent was said to be {}, it is {parent}", row.parent));
    }
    writer.put(keys::inode(row.ino), InodeRecord { nlink, size, parent, ..record }.encode())
}

fn mend_counters(writer: &mut Writer<'_>, rows: &Rows) -> Result<(), JournalError> {
    let stored = writer.get(&keys::counters())?;
    let known = stored.is_some();
    let stored = stored.and_then(|value| Counters::decode(&value).ok());
    let limit = stored.map(|counters| counters.next_ino).filter(|next| *next < INO_END);
    let next_ino: Ino = limit.unwrap_or(0).max(rows.last_ino() + 1);
    let right = Counters { next_ino, inodes: rows.0.len() as u64 };
    if stored == Some(right) {
        return Ok(());
    }
    match stored {
        None => {
            let code = if known { Code::BadRecord } else { Code::NoCounters };
            let what = format!("made the counters anew: new files get numbers from {next_ino} on");
            writer.say(Repair::new(code, what));
        }
        Some(stored) => {
            if stored.next_ino != next_ino {
                let what = format!(
                    "new files get numbers from {next_ino} on, not from {}",
                    stored.next_ino
                );
                writer.say(Repair::new(Code::NextIno, what));
            }
            if stored.inodes != right.inodes {
                let what = format!(
                    "{} inodes were said to exist, there are {}",
                    stored.inodes, right.inodes
                );
                writer.say(Repair::new(Code::InodeCount, what));
            }
        }
    }
    writer.put(keys::counters(), right.encode())
}

/// What extents take.
struct Used {
    space: Space,
    /// Blocks of unwritten extents.
    unwritten: u64,
}

impl Used {
    fn add(&mut self, extent: &[u8]) {
        match Extent::decode(extent) {
            Ok(Extent::Data { block, crcs }) => drop(self.space.claim(block, crcs.len() as u64)),
            Ok(Extent::Unwritten { blocks }) => {
                self.unwritten = self.unwritten.saturating_add(blocks)
            }
            Ok(Extent::Lost { .. }) | Err(_) => {}
        }
    }
}

fn mend_space(writer: &mut Writer<'_>, used: Used, home: &[u32]) -> Result<(), JournalError> {
    let journal = writer.journal();
    let Used { mut space, unwritten } = used;
    let stored = writer.get(&keys::unwritten())?;
    if stored.as_ref().map_or(Ok(0), |value| Number::decode(value).map(|n| n.0)) != Ok(unwritten) {
        let readable = stored.as_ref().is_none_or(|value| Number::decode(value).is_ok());
        let code = if readable { Code::ReservedCount } else { Code::BadRecord };
        writer.say(Repair::new(code, format!("{unwritten} blocks count as unwritten now")));
        writer.put(keys::unwritten(), Number(unwritten).encode())?;
    }
    let home: HashSet<u32> = home.iter().copied().collect();
    each_key(journal, &keys::segment(0), &keys::segment_end(), |key, value| {
        match keys::parse(key) {
            Some(Key::Segment(index)) => mend_segment(writer, &mut space, &home, index, value),
            _ => Ok(()),
        }
    })?;
    for (index, used) in space.rest() {
        let what = format!("segment {index} counts as used now, for {} blocks", used.live);
        writer.say(Repair::new(Code::SegmentFree, what));
        writer.put(keys::segment(index), Segment { filled: used.end, live: used.live }.encode())?;
    }
    Ok(())
}

/// A segment's record, and what extents say of the segment.
fn mend_segment(
    writer: &mut Writer<'_>,
    space: &mut Space,
    home: &HashSet<u32>,
    index: u32,
    value: &[u8],
) -> Result<(), JournalError> {
    let used = space.take(index);
    let (live, end) = used.as_ref().map_or((0, 0), |used| (used.live, used.end));
    let stored = Segment::decode(value);
    if index >= space.segment_count() || home.contains(&index) {
        let what = format!("removed the record of segment {index}, which is not one for data");
        writer.say(Repair::new(Code::SegmentRecord, what));
        return writer.delete(&keys::segment(index));
    }
    let whole = space.segment_blocks() as u32;
    let possible = stored.as_ref().ok().filter(|s| s.filled <= whole && s.live <= s.filled);
    // Of a record that makes no sense only what extents say is believed; nothing more is written
    // into the segment.
    let filled = possible.map_or(whole, |s| s.filled.max(end));
    if stored == Ok(Segment { filled, live }) {
        return Ok(());
    }
    let (code, what) = match (&stored, possible) {
        (Err(_), _) => (Code::BadRecord, "made the record anew".to_owned()),
        (_, None) => (Code::SegmentRecord, "corrected an impossible record".to_owned()),
        (Ok(s), _) if s.filled < end => {
            (Code::SegmentFilled, format!("{filled} blocks count as filled now"))
        }
        (Ok(s), _) => {
            (Code::SegmentLive, format!("{} blocks were said to be in use, {live} are", s.live))
        }
    };
    writer.say(Repair::new(code, format!("segment {index}: {what}")));
    if live == 0 {
        return writer.delete(&keys::segment(index));
    }
    writer.put(keys::segment(index), Segment { filled, live }.encode())
}
