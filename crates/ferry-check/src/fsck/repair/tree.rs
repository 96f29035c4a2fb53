//! The tree: every name leads to an inode, every directory has one name and hangs from the root,
//! and what has lost its name is put into `/lost+found`.

use super::edits::{Change, Room, Writer, each_key};
use super::rows::{DIRECTORY, Row, Rows, kind_bits};
use crate::fsck::report::{Code, Repair};
use ferry_fs::api::{Ino, ROOT};
use ferry_fs::keys::{self, Counters, Dentry, INO_END, InodeRecord, Key};
use ferry_journal::JournalError;

/// Where files without a name are put, in the root.
const LOST_AND_FOUND: &str = "lost+found";

/// Runs the pass over the whole view.
pub(super) fn run(writer: &mut Writer<'_>) -> Result<(), JournalError> {
    let mut stray = Vec::new();
    let mut rows = Rows::load(writer.journal(), &mut |ino| stray.push(ino), &mut |_| {})?;
    for ino in stray {
        let what =
            format!("removed the mark \"to be reclaimed\" of inode {ino}, which does not exist");
        writer.say(Repair::new(Code::OrphanKey, what));
        writer.delete(&keys::orphan(ino))?;
    }
    rows.cut_circles(&mut |ino| {
        let what = "cut a circle of directories that contained each other at this one";
        let repair = Repair::new(Code::Cycle, what).of(ino);
        writer.say(repair.then("look into /lost+found and move it to its place"));
    });
    judge_orphans(writer, &mut rows)?;
    mend_names(writer, &mut rows)?;
    let lost: Vec<Ino> = rows.0.iter().filter(|row| is_lost(row)).map(|row| row.ino).collect();
    if !lost.is_empty() {
        find_names(writer, &mut rows, &lost)?;
    }
    writer.flush()
}

/// No name leads to it, and none should be missing.
fn is_lost(row: &Row) -> bool {
    let nameless = if row.kind == DIRECTORY { row.up == 0 } else { row.names == 0 };
    nameless && row.ino != ROOT && !row.orphan
}

/// What waits to be reclaimed has no name, no links and nothing in it.
fn judge_orphans(writer: &mut Writer<'_>, rows: &mut Rows) -> Result<(), JournalError> {
    for row in rows.0.iter_mut().filter(|row| row.orphan) {
        let empty = row.names == 0 && row.nlink == 0 && row.entries == 0;
        if empty && row.ino != ROOT {
            continue;
        }
        row.orphan = false;
        let what = "it is not reclaimed: it has a name, a link count, or something in it";
        writer.say(Repair::new(Code::OrphanKey, what).of(row.ino));
        writer.delete(&keys::orphan(row.ino))?;
    }
    Ok(())
}

/// Removes names that lead nowhere and names of directories beyond the one; corrects types.
fn mend_names(writer: &mut Writer<'_>, rows: &mut Rows) -> Result<(), JournalError> {
    let journal = writer.journal();
    each_key(journal, &keys::inode(0), &keys::inode_end(u64::MAX), |key, value| {
        match (keys::parse(key), Dentry::decode(value)) {
            (Some(Key::Dentry(dir, _, name)), Ok(dentry)) => {
                mend_name(writer, rows, key, dir, name, dentry)
            }
            _ => Ok(()),
        }
    })
}

fn mend_name(
    writer: &mut Writer<'_>,
    rows: &mut Rows,
    key: &[u8],
    dir: Ino,
    name: &[u8],
    dentry: Dentry,
) -> Result<(), JournalError> {
    let escaped = name.escape_ascii();
    let Some(row) = rows.get(dentry.ino) else {
        let what = format!(
            "removed the name {escaped}, which led to inode {}: that does not exist",
            dentry.ino
        );
        let repair = Repair::new(Code::DanglingName, what).of(dir);
        writer.say(repair.losing(format!("the file or directory {escaped}")));
        return writer.delete(key);
    };
    if row.kind == DIRECTORY {
        if row.ino == ROOT || row.up != dir || row.named {
            row.names -= 1;
            let what = format!(
                "removed the name {escaped} of directory {}, which has its place elsewhere",
                row.ino
            );
            writer.say(Repair::new(Code::DirectoryNames, what).of(dir));
            return writer.delete(key);
        }
        row.named = true;
    }
    if row.kind != kind_bits(dentry.kind) {
        let kind = u32::from(row.kind) << 12;
        writer.say(
            Repair::new(Code::DentryKind, format!("the entry {escaped} says the right type now"))
                .of(dir),
        );
        return writer.put(key.to_vec(), Dentry { ino: dentry.ino, kind }.encode().to_vec());
    }
    Ok(())
}

/// Gives each of `lost` a name in `/lost+found`.
fn find_names(writer: &mut Writer<'_>, rows: &mut Rows, lost: &[Ino]) -> Result<(), JournalError> {
    let Some(dir) = lost_and_found(writer, rows)? else { return Ok(()) };
    for &ino in lost.iter().filter(|ino| **ino != dir) {
        let Some(key) = writer.free_name(dir, &format!("#{ino}"))? else { continue };
        let Some(value) = writer.get(&keys::inode(ino))? else { continue };
        let Ok(mut record) = InodeRecord::decode(&value) else { continue };
        let kind = record.mode & libc::S_IFMT;
        let mut changes: Vec<Change> = vec![(key, Some(Dentry { ino, kind }.encode().to_vec()))];
        if kind == libc::S_IFDIR {
            record.parent = dir;
            changes.push((keys::inode(ino), Some(record.encode())));
        } else if record.nlink == 0 {
            record.nlink = 1;
            changes.push((keys::inode(ino), Some(record.encode())));
        }
        writer.change(changes)?;
        let what = if kind == libc::S_IFDIR { "a directory" } else { "a file" };
        let repair = Repair::new(
            Code::Unreachable,
            format!("put {what} that had lost its name into /lost+found"),
        );
        writer.say(repair.of(ino).losing("its name").then("move it to its place"));
    }
    Ok(())
}

/// The directory for what has lost its name, made if there is none. Its own counts are corrected
/// later, with all others.
fn lost_and_found(writer: &mut Writer<'_>, rows: &mut Rows) -> Result<Option<Ino>, JournalError> {
    let now = writer.now;
    for name in [LOST_AND_FOUND, "lost+found.ferry"] {
        let key = match writer.room_for(ROOT, name.as_bytes())? {
            Room::Exists(ino) if rows.get(ino).is_some_and(|row| row.kind == DIRECTORY) => {
                return Ok(Some(ino));
            }
            Room::Exists(_) | Room::Full => continue,
            Room::Free(key) => key,
        };
        let counters =
            writer.get(&keys::counters())?.and_then(|value| Counters::decode(&value).ok());
        let stored = counters.map(|counters| counters.next_ino).filter(|next| *next < INO_END);
        let ino = stored.unwrap_or(0).max(rows.last_ino() + 1);
        let record = InodeRecord {
            mode: libc::S_IFDIR | 0o700,
            nlink: 2,
            parent: ROOT,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            ..InodeRecord::default()
        };
        let counters = Counters { next_ino: ino + 1, inodes: rows.0.len() as u64 + 1 };
        writer.change(vec![
            (keys::inode(ino), Some(record.encode())),
            (key, Some(Dentry { ino, kind: libc::S_IFDIR }.encode().to_vec())),
            (keys::counters(), Some(counters.encode())),
        ])?;
        rows.push(ino, &record);
        return Ok(Some(ino));
    }
    Ok(None)
}
