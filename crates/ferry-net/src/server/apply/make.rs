//! A change, as a call of the server's file system.

use ferry_env::activity::{self, Operation};
use ferry_fs::{Answer, Cx, Entry, Errno, FileLock, Ino, Opened, SYMLINK_MAX, XATTR_SIZE_MAX};

use super::applying::{Applying, Done, within};
use crate::message::{OFFSET_MAX, Op, Outcome, opens_for_writing};
use crate::server::session::Open;

/// The permission bits, with set-user-id, set-group-id and sticky.
const PERMISSIONS: u32 = 0o7777;

impl Applying<'_> {
    /// Makes a change of names, inodes or attributes, or of what the other two functions make.
    pub(super) fn make_any(&self, op: Op) -> Done {
        let _doing = activity::begin(Operation::Changes);
        let fs = self.fs();
        match op {
            Op::Setattr { ino, fh, mut set } => {
                set.mode = set.mode.map(|mode| mode & PERMISSIONS);
                if set.size.is_some_and(|size| size > OFFSET_MAX) {
                    return Err(Errno(libc::EFBIG));
                }
                let (ino, fh) = (self.ino(ino)?, self.optional(fh)?);
                let (attr, _) = self.call(|cx| fs.setattr(cx, ino, fh, &set))?;
                Ok(Outcome::Attributes { attr: self.attr(attr) })
            }
            Op::Mknod { parent, name, mode, rdev } => {
                let parent = self.ino(parent)?;
                let mode = mode & (libc::S_IFMT | PERMISSIONS);
                Ok(self.entry(parent, self.call(|cx| fs.mknod(cx, parent, &name, mode, rdev))?))
            }
            Op::Mkdir { parent, name, mode } => {
                let parent = self.ino(parent)?;
                Ok(self.entry(
                    parent,
                    self.call(|cx| fs.mkdir(cx, parent, &name, mode & PERMISSIONS))?,
                ))
            }
            Op::Symlink { parent, name, target } => {
                if target.is_empty() || target.contains(&0) {
                    return Err(Errno(libc::EINVAL));
                }
                if target.len() > SYMLINK_MAX {
                    return Err(Errno(libc::ENAMETOOLONG));
                }
                let parent = self.ino(parent)?;
                Ok(self.entry(parent, self.call(|cx| fs.symlink(cx, parent, &name, &target))?))
            }
            Op::Link { ino, parent, name } => {
                let (ino, parent) = (self.ino(ino)?, self.ino(parent)?);
                let nameless = self.attr_now(ino)?.nlink == 0;
                let linked = self.call(|cx| fs.link(cx, ino, parent, &name))?;
                let outcome = self.entry(parent, linked);
                if nameless {
                    self.publish(ino)?;
                }
                Ok(outcome)
            }
            Op::Unlink { parent, name } => {
                let parent = self.ino(parent)?;
                self.done(|cx| fs.unlink(cx, parent, &name))
            }
            Op::Rmdir { parent, name } => {
                let parent = self.ino(parent)?;
                self.done(|cx| fs.rmdir(cx, parent, &name))
            }
            Op::Rename { parent, name, new_parent, new_name, flags } => {
                let (parent, new_parent) = (self.ino(parent)?, self.ino(new_parent)?);
                let renamed =
                    self.done(|cx| fs.rename(cx, parent, &name, new_parent, &new_name, flags));
                if parent != new_parent {
                    self.core.moved();
                }
                renamed
            }
            Op::Setxattr { ino, name, value, flags } => {
                if value.len() > XATTR_SIZE_MAX {
                    return Err(Errno(libc::E2BIG));
                }
                let ino = self.ino(ino)?;
                self.done(|cx| fs.setxattr(cx, ino, &name, &value, flags))
            }
            Op::Removexattr { ino, name } => {
                let ino = self.ino(ino)?;
                self.done(|cx| fs.removexattr(cx, ino, &name))
            }
            op => self.make_of_session(op),
        }
    }

    /// Changes of the session itself: locks, inodes that it knows, replay, reservations.
    fn make_of_session(&self, op: Op) -> Done {
        let fs = self.fs();
        match op {
            Op::Unlock { ino, lock } => {
                self.core.locks.give_back(self.session.id, self.ino(ino)?, &lock)?;
                Ok(Outcome::Done {})
            }
            Op::Reclaim { ino, lock } => {
                // What the client sends before it hears of that must fail, too.
                self.reclaim(ino, &lock).inspect_err(|_| self.session.lock_lost(ino))?;
                Ok(Outcome::Done {})
            }
            Op::Forget { inodes } => {
                for one in &inodes.0 {
                    self.session.forget(fs, one.ino, one.stamp);
                }
                Ok(Outcome::Done {})
            }
            Op::Claim { inodes } => self.claim(&inodes),
            Op::Numbered { numbers, made } => self.numbered(&numbers, &made),
            Op::Replayed {} => self.end_replay(),
            Op::Remaining { bytes, inodes } => {
                self.session.reservations.keep_only(bytes, inodes);
                Ok(Outcome::Done {})
            }
            Op::Nothing {} => Ok(Outcome::Done {}),
            op => self.make_on_file(op),
        }
    }

    /// The client has a lock again that it had before.
    fn reclaim(&self, ino: Ino, lock: &FileLock) -> Result<(), Errno> {
        let ino = self.ino(ino)?;
        let before = self.session.had_locks();
        if before {
            self.session.record_lock_holder(self.fs());
        }
        let _leave = self.session.locking_right(None).ok_or(Errno(libc::EIO))?;
        self.core.locks.reclaim(self.session.id, before, (ino, lock))
    }

    /// A file that was made without a name has one now. It becomes durable with that: before, it
    /// would not have survived a crash, and no client could replay it.
    fn publish(&self, ino: Ino) -> Result<(), Errno> {
        match self.session.handle_of(ino) {
            Some(fh) => self.call(|cx| self.fs().fsync(cx, ino, fh, false)),
            None => self.core.sync(),
        }
    }

    /// Changes of open files.
    fn make_on_file(&self, op: Op) -> Done {
        let fs = self.fs();
        match op {
            Op::Open { ino, fh, flags, kill_suidgid } => {
                let ino = self.ino(ino)?;
                if self.session.is_open(fh) {
                    return Err(Errno(libc::EINVAL));
                }
                let opened = self.call(|cx| fs.open(cx, ino, flags, kill_suidgid))?;
                self.enter(fh, opened_as(ino, opened.fh, flags))?;
                Ok(Outcome::Done {})
            }
            Op::Create { parent, name, mode, flags, fh } => {
                let parent = self.ino(parent)?;
                // The client knew that the name is free.
                let flags = if self.early.is_some() { flags | libc::O_EXCL } else { flags };
                self.made(parent, fh, flags, |cx| {
                    fs.create(cx, parent, &name, mode & PERMISSIONS | libc::S_IFREG, flags)
                })
            }
            Op::Tmpfile { parent, mode, flags, fh } => {
                let parent = self.ino(parent)?;
                self.made(parent, fh, flags, |cx| {
                    fs.tmpfile(cx, parent, mode & PERMISSIONS | libc::S_IFREG, flags)
                })
            }
            Op::Write { fh, offset, data, append, kill_suidgid } => {
                let open = self.open_for_writing(fh)?;
                within(offset, data.len() as u64)?;
                let count = self.call(|cx| {
                    fs.write(cx, open.ino, open.fh, offset, &data, append, kill_suidgid)
                })?;
                Ok(Outcome::Count { count })
            }
            Op::Release { fh } => {
                if let Some(open) = self.session.release(fh) {
                    self.call(|cx| {
                        fs.release(cx, open.ino, open.fh);
                        Ok(())
                    })?;
                }
                Ok(Outcome::Done {})
            }
            Op::Fallocate { fh, mode, offset, len } => {
                let open = self.open_for_writing(fh)?;
                within(offset, len)?;
                self.done(|cx| fs.fallocate(cx, open.ino, open.fh, mode, offset, len))
            }
            Op::Copy { fh_in, off_in, fh_out, off_out, len } => {
                let (from, to) = (self.open(fh_in)?, self.open_for_writing(fh_out)?);
                within(off_in, len)?;
                within(off_out, len)?;
                let count = self.call(|cx| {
                    fs.copy_file_range(cx, from.ino, from.fh, off_in, to.ino, to.fh, off_out, len)
                })?;
                // The client does not have the bytes that it would have to replay.
                self.done(|cx| fs.fsync(cx, to.ino, to.fh, false))?;
                Ok(Outcome::Count { count })
            }
            _ => Err(Errno(libc::EINVAL)),
        }
    }

    fn open_for_writing(&self, fh: u64) -> Result<Open, Errno> {
        let open = self.open(fh)?;
        if open.writes { Ok(open) } else { Err(Errno(libc::EBADF)) }
    }

    fn made(
        &self,
        dir: Ino,
        fh: u64,
        flags: i32,
        request: impl FnOnce(&Cx<'_>) -> Answer<(Entry, Opened)>,
    ) -> Done {
        if self.session.is_open(fh) {
            return Err(Errno(libc::EINVAL));
        }
        let (entry, opened) = self.call(request)?;
        let attr = entry.attr.ok_or(Errno(libc::EIO))?;
        let outcome = self.entry(dir, entry);
        self.enter(fh, opened_as(attr.ino, opened.fh, flags))?;
        Ok(outcome)
    }

    fn enter(&self, fh: u64, open: Open) -> Result<(), Errno> {
        self.session.open(fh, open).inspect_err(|_| {
            let _: Result<(), _> = self.call(|cx| {
                self.fs().release(cx, open.ino, open.fh);
                Ok(())
            });
        })
    }
}

fn opened_as(ino: Ino, fh: u64, flags: i32) -> Open {
    let reads = flags & libc::O_ACCMODE != libc::O_WRONLY;
    Open { ino, fh, writes: opens_for_writing(flags), reads, lost: false }
}
