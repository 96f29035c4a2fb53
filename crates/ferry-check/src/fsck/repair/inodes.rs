//! What can be judged from the keys of one inode alone: records, attributes, names, kinds.
//! Afterwards every record, name and extent can be decoded or is gone, and every directory entry
//! stands where its name belongs.

use super::edits::{Room, Writer, each_key};
use crate::fsck::check::hex;
use crate::fsck::inode::{SIZE_MAX, contradiction};
use crate::fsck::report::{Code, Repair};
use ferry_fs::api::{Ino, NAME_MAX, ROOT, SYMLINK_MAX, XATTR_SIZE_MAX};
use ferry_fs::keys::{
    self, BLOCK, Dentry, Extent, INO_END, INODE_HAS_XATTRS, INODE_INLINE, InodeRecord, Key, Number,
};
use ferry_journal::JournalError;

/// The ACL that is part of the mode.
const ACCESS_ACL: &[u8] = b"system.posix_acl_access";

/// The keys of one inode, as far as they were seen.
#[derive(Default)]
struct Group {
    ino: Ino,
    /// `None`: absent, or undecodable.
    record: Option<InodeRecord>,
    undecodable: bool,
    xattrs: u64,
    access_acl: bool,
    names: u64,
    extents: u64,
    /// End of the last extent with data, in bytes.
    data_end: u64,
    /// The hash of the names being read, and those names.
    hash: u64,
    same_hash: Vec<(u64, Box<[u8]>)>,
}

impl Group {
    fn new(ino: Ino) -> Self {
        Self { ino, ..Self::default() }
    }

    fn kind(&self) -> Option<u32> {
        let kind = self.record.as_ref().map(|record| record.mode & libc::S_IFMT)?;
        let known = [
            libc::S_IFREG,
            libc::S_IFDIR,
            libc::S_IFLNK,
            libc::S_IFCHR,
            libc::S_IFBLK,
            libc::S_IFIFO,
            libc::S_IFSOCK,
        ];
        known
            .contains(&kind)
            .then_some(kind)
            .filter(|kind| self.ino != ROOT || *kind == libc::S_IFDIR)
    }
}

/// The state of the pass over all inodes.
pub(super) struct Inodes<'p, 'j> {
    writer: &'p mut Writer<'j>,
    group: Option<Group>,
    root_seen: bool,
}

/// Runs the pass over the whole view.
pub(super) fn run(writer: &mut Writer<'_>) -> Result<(), JournalError> {
    let journal = writer.journal();
    let mut pass = Inodes { writer, group: None, root_seen: false };
    each_key(journal, &[], &[0xff; 32], |key, value| pass.key(key, value))?;
    pass.end_group()?;
    if !pass.root_seen {
        pass.make_root()?;
    }
    pass.writer.flush()
}

impl Inodes<'_, '_> {
    fn key(&mut self, key: &[u8], value: &[u8]) -> Result<(), JournalError> {
        let Some(parsed) = keys::parse(key) else { return Ok(()) };
        let ino = match parsed {
            Key::Inode(ino) | Key::Xattr(ino, _) | Key::Dentry(ino, ..) | Key::Extent(ino, _) => {
                ino
            }
            Key::Intent(ino) => return self.intent(ino, key, value),
            Key::Mark(_) | Key::Synced(_) | Key::Locker(_) | Key::Evicted(_)
                if Number::decode(value).is_err() =>
            {
                let what = "removed a mark of what a remote client has changed";
                self.writer.say(Repair::new(Code::BadRecord, what));
                return self.writer.delete(key);
            }
            _ => return Ok(()),
        };
        if self.group.as_ref().is_none_or(|group| group.ino != ino) {
            self.end_group()?;
            self.group = Some(Group::new(ino));
        }
        let Some(group) = self.group.as_mut().filter(|group| group.ino != 0 && group.ino < INO_END)
        else {
            return Ok(());
        };
        match parsed {
            Key::Inode(_) => match InodeRecord::decode(value) {
                Ok(record) => group.record = Some(record),
                Err(_) => group.undecodable = true,
            },
            Key::Xattr(_, name) => {
                if name.len() > NAME_MAX || name.contains(&0) || value.len() > XATTR_SIZE_MAX {
                    let what = format!(
                        "removed an attribute with the impossible name or value {}",
                        hex(name)
                    );
                    self.writer
                        .say(Repair::new(Code::BadName, what).of(ino).losing("the attribute"));
                    return self.writer.delete(key);
                }
                group.xattrs += 1;
                group.access_acl |= name == ACCESS_ACL;
            }
            Key::Extent(_, offset) => {
                group.extents += 1;
                if let Ok(Extent::Data { crcs, .. }) = Extent::decode(value)
                    && offset <= SIZE_MAX
                {
                    let end = offset + crcs.len() as u64 * BLOCK;
                    group.data_end = group.data_end.max(end.min(SIZE_MAX));
                }
            }
            Key::Dentry(_, cookie, name) => return self.dentry(key, cookie, name, value),
            _ => {}
        }
        Ok(())
    }

    /// A name. Those in something that is no directory go when all of its keys were seen.
    fn dentry(
        &mut self,
        key: &[u8],
        cookie: u64,
        name: &[u8],
        value: &[u8],
    ) -> Result<(), JournalError> {
        let Some(group) = self.group.as_mut() else { return Ok(()) };
        let dir = group.ino;
        if group.kind().is_some_and(|kind| kind != libc::S_IFDIR) {
            group.names += 1;
            return Ok(());
        }
        let escaped = name.escape_ascii();
        let impossible = name.len() > NAME_MAX
            || name == b"."
            || name == b".."
            || name.contains(&b'/')
            || name.contains(&0);
        if impossible {
            let what = format!("removed the impossible name {escaped} from the directory");
            let repair = Repair::new(Code::BadName, what).of(dir).losing("the name");
            self.writer.say(
                repair.then("look into /lost+found for what it led to, if it had no other name"),
            );
            return self.writer.delete(key);
        }
        let Ok(dentry) = Dentry::decode(value) else {
            let what = format!("removed the name {escaped}, which led to nothing that can be read");
            let repair = Repair::new(Code::BadRecord, what).of(dir).losing("where the name led");
            self.writer.say(
                repair.then("look into /lost+found for what it led to, if it had no other name"),
            );
            return self.writer.delete(key);
        };
        group.names += 1;
        let right = self.writer.hash(name);
        if cookie >> 8 != right {
            return self.move_name(Code::DentryHash, dir, key, name, dentry);
        }
        if group.hash != right {
            group.hash = right;
            group.same_hash.clear();
        }
        let twice = group.same_hash.iter().any(|(c, n)| *c == cookie || **n == *name);
        if twice {
            return self.move_name(Code::DuplicateName, dir, key, name, dentry);
        }
        group.same_hash.push((cookie, name.into()));
        Ok(())
    }

    /// The key of a name is not where it belongs, or not alone there: moves it, or removes it where
    /// the name exists already.
    fn move_name(
        &mut self,
        code: Code,
        dir: Ino,
        key: &[u8],
        name: &[u8],
        dentry: Dentry,
    ) -> Result<(), JournalError> {
        self.writer.delete(key)?;
        let escaped = name.escape_ascii();
        match self.writer.room_for(dir, name)? {
            Room::Free(free) => {
                self.writer.say(
                    Repair::new(code, format!("stored the name {escaped} in its right place"))
                        .of(dir),
                );
                self.writer.put(free, dentry.encode().to_vec())
            }
            Room::Exists(ino) => {
                let repair =
                    Repair::new(code, format!("removed the second entry of the name {escaped}"))
                        .of(dir);
                self.writer.say(if ino == dentry.ino {
                    repair
                } else {
                    repair
                        .losing(format!("this name of inode {}", dentry.ino))
                        .then("look into /lost+found for it, if it had no other name")
                });
                Ok(())
            }
            Room::Full => {
                let what =
                    format!("removed the name {escaped}, for which there is no position left");
                let repair = Repair::new(code, what)
                    .of(dir)
                    .losing(format!("this name of inode {}", dentry.ino));
                self.writer
                    .say(repair.then("look into /lost+found for it, if it had no other name"));
                Ok(())
            }
        }
    }

    fn intent(&mut self, ino: Ino, key: &[u8], value: &[u8]) -> Result<(), JournalError> {
        self.end_group()?;
        if Number::decode(value).is_ok() {
            return Ok(());
        }
        // The truncation was logged together with the new size.
        let record =
            self.writer.get(&keys::inode(ino))?.and_then(|value| InodeRecord::decode(&value).ok());
        let what = "made the note of a begun truncation anew, from the file's size";
        self.writer.say(Repair::new(Code::BadRecord, what).of(ino));
        match record {
            Some(record) => self.writer.put(key.to_vec(), Number(record.size).encode()),
            None => self.writer.delete(key),
        }
    }

    /// All keys of an inode were seen.
    fn end_group(&mut self) -> Result<(), JournalError> {
        let Some(mut group) = self.group.take() else { return Ok(()) };
        let ino = group.ino;
        self.root_seen |= ino == ROOT;
        if ino == 0 || ino >= INO_END {
            let count = self.writer.delete_range(&keys::inode(ino), &keys::inode_end(ino))?;
            let what =
                format!("removed {count} keys of inode number {ino}, which no file ever had");
            self.writer.say(Repair::new(Code::InodeFields, what).losing("what they described"));
            return Ok(());
        }
        match (group.kind(), group.record.take()) {
            (Some(_), Some(record)) => self.mend(&group, record),
            (_, unknown) => self.make_record(&group, unknown),
        }
    }

    /// There is a record of a known type.
    fn mend(&mut self, group: &Group, mut record: InodeRecord) -> Result<(), JournalError> {
        let ino = group.ino;
        let kind = record.mode & libc::S_IFMT;
        let before = record.clone();
        if let Some(why) = contradiction(ino, &record) {
            if kind == libc::S_IFLNK
                && (record.flags & INODE_INLINE == 0
                    || record.size == 0
                    || record.size > SYMLINK_MAX as u64)
            {
                return self.remove(
                    Code::InodeFields,
                    ino,
                    "removed a symbolic link without a target",
                    "the link",
                );
            }
            record.flags &= INODE_INLINE | INODE_HAS_XATTRS;
            if kind != libc::S_IFREG && kind != libc::S_IFLNK {
                record.flags &= !INODE_INLINE;
                record.inline = Vec::new();
            }
            let repair =
                Repair::new(Code::InodeFields, format!("corrected the record: {why}")).of(ino);
            if kind == libc::S_IFREG && record.size > SIZE_MAX {
                record.size = group.data_end;
                let repair =
                    repair.losing("the size of the file: it ends behind the last of its data now");
                self.writer.say(repair.then("compare it with a backup"));
            } else {
                self.writer.say(repair);
            }
        }
        let flagged = record.flags & INODE_HAS_XATTRS != 0;
        if flagged != (group.xattrs > 0) && !(record.nlink == 0 && flagged) {
            record.flags ^= INODE_HAS_XATTRS;
            let what = if flagged {
                "the record no longer says that it has attributes"
            } else {
                "its attributes are shown again"
            };
            let repair = Repair::new(Code::XattrFlag, what).of(ino);
            self.writer.say(if flagged {
                repair.losing("its attributes, if it had any")
            } else {
                repair
            });
        }
        if group.names > 0 && kind != libc::S_IFDIR {
            let count =
                self.writer.delete_range(&keys::dentry_from(ino, 0), &keys::dentry_end(ino))?;
            let what =
                format!("removed {count} directory entries from something that is not a directory");
            let repair = Repair::new(Code::NamesInFile, what).of(ino).losing("these names");
            self.writer.say(repair.then("look into /lost+found for what they led to"));
        }
        if group.extents > 0 && kind != libc::S_IFREG {
            self.drop_extents(ino, "something that is no regular file")?;
        }
        if record == before { Ok(()) } else { self.writer.put(keys::inode(ino), record.encode()) }
    }

    fn drop_extents(&mut self, ino: Ino, whose: &str) -> Result<(), JournalError> {
        let count = self.writer.delete_range(&keys::extent(ino, 0), &keys::extent_end(ino))?;
        let what = format!("removed {count} extents of {whose}");
        self.writer.say(
            Repair::new(Code::ExtentOwner, what).of(ino).losing("what they held, if anything"),
        );
        Ok(())
    }

    /// There is no record, or its type is unknown: what else there is says what it was.
    fn make_record(
        &mut self,
        group: &Group,
        unknown: Option<InodeRecord>,
    ) -> Result<(), JournalError> {
        let ino = group.ino;
        let code = match &unknown {
            Some(_) if ino == ROOT => Code::NoRoot,
            Some(_) => Code::InodeFields,
            None if group.undecodable => Code::BadRecord,
            None if ino == ROOT => Code::NoRoot,
            None => Code::NoInode,
        };
        let inline = unknown.as_ref().is_some_and(|record| record.flags & INODE_INLINE != 0);
        if ino != ROOT && group.names == 0 && group.extents == 0 && !inline {
            let lost = "whatever it was: no contents and no names of it are left";
            return self.remove(
                code,
                ino,
                "removed what was left of an inode without a readable record",
                lost,
            );
        }
        let directory = ino == ROOT || group.names > 0;
        let known = unknown.is_some();
        let now = self.writer.now;
        let mut record = unknown.unwrap_or_else(|| InodeRecord {
            mode: if directory { 0o700 } else { 0o600 },
            nlink: 1,
            parent: if ino == ROOT { ROOT } else { 0 },
            size: group.data_end,
            // More than there are: what look like holes may have been contents.
            blocks: if directory { 0 } else { u64::MAX },
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            ..InodeRecord::default()
        });
        record.mode = record.mode & 0o7777 | if directory { libc::S_IFDIR } else { libc::S_IFREG };
        record.flags &= INODE_INLINE;
        if directory {
            record.flags = 0;
            record.inline = Vec::new();
            record.size = group.names;
        } else if !inline && record.size > SIZE_MAX {
            record.size = group.data_end;
        }
        let mut xattrs = group.xattrs;
        if !known && group.access_acl {
            self.writer.delete(&keys::xattr(ino, ACCESS_ACL))?;
            xattrs -= 1;
        }
        if xattrs > 0 {
            record.flags |= INODE_HAS_XATTRS;
        }
        if directory && group.extents > 0 {
            self.drop_extents(ino, "a directory")?;
        }
        let what = match (directory, known) {
            (true, _) => "made a new record for a directory from its entries",
            (false, true) => {
                "took something of an unknown type for a regular file, which it has the contents of"
            }
            (false, false) => {
                "made a new record for a file from its contents; its size is a guess, in whole blocks"
            }
        };
        let lost = if known {
            "its type"
        } else {
            "owner, permissions and times: it belongs to root alone now"
        };
        self.writer.say(
            Repair::new(code, what)
                .of(ino)
                .losing(lost)
                .then("set what is missing with chown and chmod"),
        );
        self.writer.put(keys::inode(ino), record.encode())
    }

    fn remove(&mut self, code: Code, ino: Ino, what: &str, lost: &str) -> Result<(), JournalError> {
        self.writer.delete_range(&keys::inode(ino), &keys::inode_end(ino))?;
        self.writer.say(Repair::new(code, format!("{what} (inode {ino})")).losing(lost));
        Ok(())
    }

    fn make_root(&mut self) -> Result<(), JournalError> {
        self.make_record(&Group::new(ROOT), None)
    }
}
