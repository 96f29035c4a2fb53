//! The journal's own damage: a log that cannot be followed to its durable end is cut there, a home
//! store with keys that cannot be read is written anew from all that can be.

use super::blocks::Blocks;
use super::edits::Repairs;
use super::{Segments, Volume, journal_options, open};
use crate::fsck::report::{Code, Repair};
use crate::fsck::volume::bad_copies;
use ferry_fs::keys::{self, Key};
use ferry_fs::volume::VolumeError;
use ferry_journal::{
    FoundState, Journal, JournalError, LogDamage, LostKeys, home_unit_bytes, read_damaged,
    rebuild_home,
};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Segments tried for a new home store beside those that it surely takes.
const SPARE: usize = 4;

/// Cuts the log where it is damaged. The structure of what is left is looked at in the next round.
pub(super) fn cut_log(volume: Volume<'_>, repairs: &mut Repairs) -> Result<(), VolumeError> {
    let (journal, recovered) = open(volume, true)?;
    if let Some(damage) = &recovered.log_damage {
        repairs.add(of_log(damage));
    }
    journal.close()?;
    Ok(())
}

/// Reads both copies of all of the home store: what one alone has lost is written anew from the
/// other.
pub(super) fn mend_copies(volume: Volume<'_>, repairs: &mut Repairs) -> Result<(), VolumeError> {
    let Volume { dev, sb, env } = volume;
    let read = |read_only| -> Result<BTreeSet<u64>, VolumeError> {
        let (options, client) = (journal_options(read_only, false), Arc::new(Segments::default()));
        let (journal, _) = Journal::open(dev.clone(), sb.geometry(), options, env.clone(), client)?;
        let offsets = bad_copies(&journal, sb.home_map_offsets, true, &mut |_| true);
        journal.close()?;
        Ok(offsets)
    };
    let bad = read(false)?;
    // Where the device refuses a write, or does not keep it, nothing is better than before.
    let left = if bad.is_empty() { BTreeSet::new() } else { read(true)? };
    for offset in bad.difference(&left) {
        let what =
            format!("wrote the block at byte {offset} of the volume anew, from its other copy");
        repairs.add(Repair::new(Code::HomeCopy, what).then("check the disk below"));
    }
    Ok(())
}

fn of_log(damage: &LogDamage) -> Repair {
    let what = format!("cut the log at byte {} of the volume: {}", damage.offset, damage.detail);
    let (from, to) = (damage.lost_from.0, damage.lost_to.0);
    let lost = format!(
        "the newest changes, though they had been made durable: contexts {from} to {to}, perhaps more"
    );
    let code = if damage.unreadable.is_some() { Code::LogUnreadable } else { Code::Log };
    Repair::new(code, what).losing(lost).then("compare what was changed last with a backup")
}

/// Writes the home store anew elsewhere, so that its map names no segment with data. `false`: there
/// is no room.
pub(super) fn move_away(
    volume: Volume<'_>,
    give_up: bool,
    repairs: &mut Repairs,
) -> Result<bool, VolumeError> {
    let what = "wrote the store of all names and attributes anew, apart from the data of files that its map claimed";
    match rewrite(volume, give_up, repairs, Repair::new(Code::HomeClaim, what)) {
        Ok(rewritten) => Ok(rewritten),
        Err(VolumeError::Option(_)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Writes the home store anew. Nothing is changed where nothing of it can be read.
pub(super) fn rebuild(
    volume: Volume<'_>,
    give_up: bool,
    repairs: &mut Repairs,
) -> Result<(), VolumeError> {
    let what = "wrote the store of all names and attributes anew; all of it could be read";
    let repair = Repair::new(Code::HomeStore, what).then("check the disk below");
    rewrite(volume, give_up, repairs, repair).map(drop)
}

/// The same; `whole` is what is said where nothing was lost. `false`: nothing can be read.
fn rewrite(
    volume: Volume<'_>,
    give_up: bool,
    repairs: &mut Repairs,
    whole: Repair,
) -> Result<bool, VolumeError> {
    let Volume { dev, sb, env } = volume;
    let geometry = sb.geometry();
    let Some((free, home)) = free_segments(volume)? else { return Ok(false) };
    let log_units = (2 * sb.log_len).div_ceil(home_unit_bytes(sb.segment_len)) as usize;
    let mut wanted = home + log_units + SPARE;
    let rebuilt = loop {
        let list = &free[..wanted.min(free.len())];
        take_from_host(volume, list)?;
        match rebuild_home(dev.clone(), geometry, env, list, give_up) {
            Ok(rebuilt) => break rebuilt,
            Err(JournalError::HomeNeeds { segments }) if list.len() < free.len() => {
                wanted = (segments as usize).max(2 * wanted);
            }
            Err(JournalError::HomeNeeds { segments }) => {
                let mib = (u64::from(segments) * sb.segment_len) >> 20;
                return Err(VolumeError::Option(format!(
                    "there is not enough space to repair: it takes {mib} MiB of free segments; nothing was changed: mount it with `-o ro` and copy the files elsewhere"
                )));
            }
            Err(error @ JournalError::Unreadable { .. }) => {
                return Err(VolumeError::Unreadable(error));
            }
            Err(error) => return Err(error.into()),
        }
    };
    if let Some(damage) = &rebuilt.log_damage {
        repairs.add(of_log(damage));
    }
    match rebuilt.found {
        Some(found) => repairs.add(of_found(found)),
        None if rebuilt.lost.is_empty() => repairs.add(whole),
        None => {}
    }
    rebuilt.lost.iter().for_each(|gap| repairs.add(of_gap(gap)));
    Ok(true)
}

/// The host's space is allocated before the volume counts on it.
fn take_from_host(Volume { dev, sb, .. }: Volume<'_>, segments: &[u32]) -> Result<(), VolumeError> {
    for segment in segments {
        let at = sb.segments_offset + u64::from(*segment) * sb.segment_len;
        dev.allocate(at, sb.segment_len)
            .map_err(|source| VolumeError::Io { what: "take space from the host", source })?;
    }
    Ok(())
}

fn of_found(found: FoundState) -> Repair {
    let what = "wrote the store of all names and attributes anew, from what else is left of it and of the log";
    let repair = Repair::new(Code::HomeStore, what);
    if found.complete {
        return repair.then("nothing is missing; check the disk below");
    }
    repair
        .losing("it may be out of date: the newest changes may be missing, what was removed may be back")
        .then("compare what was changed last with a backup")
}

fn of_gap(gap: &LostKeys) -> Repair {
    let retained = match gap.doubtful {
        0 => String::new(),
        keys => format!(" (but for {keys} records that may be right)"),
    };
    let what = format!(
        "wrote the store of all names and attributes anew, without what lies at byte {} of the volume{retained}: {}",
        gap.offset, gap.detail
    );
    let side = |key: &[u8], none: &str| match keys::parse(key) {
        Some(Key::Inode(ino)) => format!("the record of inode {ino}"),
        Some(Key::Xattr(ino, name)) => format!("attribute {} of inode {ino}", name.escape_ascii()),
        Some(Key::Dentry(dir, _, name)) => {
            format!("the name {} in directory {dir}", name.escape_ascii())
        }
        Some(Key::Extent(ino, offset)) => format!("byte {offset} of inode {ino}"),
        Some(Key::Segment(segment)) => format!("the record of segment {segment}"),
        Some(Key::Orphan(ino) | Key::Intent(ino)) => format!("the mark of inode {ino}"),
        Some(
            Key::Mark(session)
            | Key::Synced(session)
            | Key::Locker(session)
            | Key::Evicted(session),
        ) => {
            format!("the mark of session {session:032x}")
        }
        Some(Key::Counters | Key::Unwritten) => "the counters".to_owned(),
        None => none.to_owned(),
    };
    let (after, before) = (side(&gap.after, "the first key"), side(&gap.before, "the last key"));
    let lost = format!("what was stored between {after} and {before}");
    Repair::new(Code::HomeStore, what)
        .losing(lost)
        .then("see below what became of it; restore that from a backup")
}

/// Segments that nothing readable claims, and how many the home store has. `None`: nothing is
/// readable.
fn free_segments(
    Volume { dev, sb, env }: Volume<'_>,
) -> Result<Option<(Vec<u32>, usize)>, VolumeError> {
    let geometry = sb.geometry();
    let mut blocks = Blocks::none(&geometry);
    let (mut keys, mut recorded) = (0_u64, BTreeSet::new());
    let home = read_damaged(dev.clone(), geometry, env, &mut |key, value| {
        keys += 1;
        blocks.note(key, value);
        if let Some(Key::Segment(index)) = keys::parse(key) {
            recorded.insert(index);
        }
    })?;
    let mut free = blocks.unclaimed();
    free.retain(|segment| !recorded.contains(segment) && !home.contains(segment));
    Ok((keys > 0).then(|| (free.into_iter().collect(), home.len())))
}
