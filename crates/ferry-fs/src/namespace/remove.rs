//! Removing names.

use crate::api::{Ino, Timestamp};
use crate::credits::{DENTRY_BYTES, RECORD_BYTES, SMALL_BYTES};
use crate::error::FsError;
use crate::inode::incore::Inode;
use crate::inode::locked::Locked;
use crate::inode::state::InodeState;
use crate::keys::{self, INODE_INLINE, InodeRecord};
use crate::local::local_fs::{LocalFs, change_entries, errno, put_inode};
use crate::local::transaction::How;
use crate::namespace::names::{check_dir, check_name};
use crate::posix::{self, is_regular};
use ferry_env::planted::{Bug, is_planted};
use ferry_journal::{Credits, Transaction};

/// What may be removed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// All but a directory.
    File,
    /// An empty directory.
    Directory,
}

/// Removing gives space back: it may use the log space that is kept for that.
pub(crate) const UNLINK_CREDITS: Credits = Credits {
    keys: 5,
    bytes: DENTRY_BYTES + 2 * RECORD_BYTES + crate::credits::FULL_RECORD_BYTES + 2 * SMALL_BYTES,
    urgent: true,
};

impl LocalFs {
    /// Removes a name and, with the last one, makes the inode an orphan.
    pub(crate) fn do_remove(
        &self,
        how: How,
        parent: Ino,
        name: &[u8],
        kind: Kind,
    ) -> Result<(), FsError> {
        match name {
            b"." => return Err(errno(libc::EINVAL)),
            b".." => return Err(errno(libc::ENOTEMPTY)),
            _ => check_name(name)?,
        }
        self.writable()?;
        if self.was_made(how) {
            return Ok(());
        }
        let dir = self.table.need(parent)?;
        loop {
            let child = self.glance(&dir, name)?.ok_or(errno(libc::ENOENT))?;
            let mut txn = self.begin(how, UNLINK_CREDITS)?;
            let mut locked = Locked::new([&*dir, &*child])?;
            check_dir(locked.state(&dir))?;
            let (cookie, target) = self.find(&dir, locked.state(&dir), name)?.present()?;
            if target.ino != child.ino {
                continue;
            }
            check_removable(locked.state(&child), kind)?;
            let now = self.time(how);
            self.drop_name(&mut txn, &child, locked.state(&child), now);
            let dir_state = locked.state(&dir);
            change_entries(dir_state, -1, -i32::from(kind == Kind::Directory), now);
            put_inode(&mut txn, dir.ino, dir_state);
            txn.delete(&keys::dentry(dir.ino, cookie, name));
            if dir.dir.remove(cookie) {
                self.table.dir_entries_shrank(1);
            }
            self.committed(txn.commit(), &[&dir, &child]);
            drop(locked);
            self.reclaim_if_unknown(&child);
            return Ok(());
        }
    }

    /// The inode loses a name, a directory its only one. Without names it is an orphan.
    pub(crate) fn drop_name(
        &self,
        txn: &mut Transaction<'_>,
        child: &Inode,
        state: &mut InodeState,
        now: Timestamp,
    ) {
        posix::drop_link(&mut state.rec, now);
        if state.rec.nlink > 0 {
            return put_inode(txn, child.ino, state);
        }
        child.set_flag(Inode::NAMELESS);
        self.note_linkable(child.ino, false);
        if !is_planted(Bug::ForgottenOrphan) {
            txn.put(&keys::orphan(child.ino), &[keys::VALUE_VERSION]);
        }
        // Nobody reads an orphan file that is not open, or only from another machine: its small
        // contents need not go to the log once more. Another process may go on with an open one. A
        // symlink keeps its target: a record without one would be damage.
        if !is_regular(state.rec.mode) || child.is_open() || self.options.keeps_removed {
            return put_inode(txn, child.ino, state);
        }
        let flags = state.rec.flags & !INODE_INLINE;
        let slim = InodeRecord { flags, inline: Vec::new(), ..state.record() };
        txn.put(&keys::inode(child.ino), &slim.encode());
    }
}

/// Whether the rules let this inode's name go.
pub(crate) fn check_removable(state: &InodeState, kind: Kind) -> Result<(), FsError> {
    Ok(posix::check_removable(state.rec.mode, state.rec.size, kind == Kind::Directory)?)
}
