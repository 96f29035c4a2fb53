//! Giving an inode another name.

use crate::api::{Attr, Ino};
use crate::credits::{DENTRY_BYTES, FULL_RECORD_BYTES, RECORD_BYTES, SMALL_BYTES};
use crate::error::FsError;
use crate::inode::incore::Inode;
use crate::inode::locked::Locked;
use crate::keys::{self, Dentry};
use crate::local::local_fs::{LocalFs, change_entries, errno, put_inode};
use crate::local::transaction::How;
use crate::namespace::create::LINK_MAX;
use crate::namespace::names::{check_dir, check_name};
use crate::posix::is_dir;
use ferry_journal::Credits;

impl LocalFs {
    /// Links `ino` as `parent`/`name`, and counts a lookup of it.
    pub(crate) fn do_link(
        &self,
        how: How,
        ino: Ino,
        parent: Ino,
        name: &[u8],
    ) -> Result<Attr, FsError> {
        check_name(name)?;
        self.writable()?;
        self.admit(how, 0)?;
        let dir = self.table.need(parent)?;
        let inode = self.table.need(ino)?;
        if is_dir(inode.state.read_now()?.rec.mode) {
            return Err(errno(libc::EPERM));
        }
        if self.was_made(how) {
            self.count_lookup(&inode);
            let attr = inode.state.read().attr(ino);
            return Ok(attr);
        }
        let bytes = DENTRY_BYTES + RECORD_BYTES + FULL_RECORD_BYTES + SMALL_BYTES;
        let mut txn = self.begin(how, Credits { keys: 4, bytes, urgent: false })?;
        let mut locked = Locked::new([&*dir, &*inode])?;
        check_dir(locked.state(&dir))?;
        let cookie = self.find(&dir, locked.state(&dir), name)?.absent()?;
        let now = self.time(how);

        let state = locked.state(&inode);
        if state.rec.nlink >= LINK_MAX {
            return Err(errno(libc::EMLINK));
        }
        if state.rec.nlink == 0 {
            // A removed file stays removed; one made without a name is no orphan any more.
            if !inode.clear_flag(Inode::LINKABLE) {
                return Err(errno(libc::ENOENT));
            }
            inode.clear_flag(Inode::NAMELESS);
            self.data.removed().leave(ino, &*self.env.clock);
            txn.delete(&keys::orphan(ino));
        }
        state.rec.nlink += 1;
        state.rec.ctime = now;
        let target = Dentry { ino, kind: state.rec.mode & libc::S_IFMT };
        put_inode(&mut txn, ino, state);
        self.count_lookup(&inode);
        let attr = state.attr(ino);

        let dir_state = locked.state(&dir);
        change_entries(dir_state, 1, 0, now);
        put_inode(&mut txn, dir.ino, dir_state);
        txn.put(&keys::dentry(dir.ino, cookie, name), &target.encode());
        if dir.dir.insert(cookie, name, target) {
            self.table.dir_entries_grew(1);
        }
        self.committed(txn.commit(), &[&dir, &inode]);
        Ok(attr)
    }
}
