//! Extended attributes.
//!
//! An inode without any says so in its record, so that asking costs no look into the journal. ACLs
//! are attributes whose changes reach the mode bits as well.

use crate::api::{Ino, XATTR_SIZE_MAX, XattrFlags};
use crate::credits::{XATTR_NAME_MAX, xattr_credits};
use crate::error::FsError;
use crate::inode::incore::Inode;
use crate::inode::state::InodeState;
use crate::keys::{self, INODE_HAS_XATTRS, Key};
use crate::local::local_fs::{LocalFs, errno, put_inode};
use crate::local::transaction::How;
use crate::namespace::acl::{self, Acl};
use crate::patience;
use crate::posix::is_dir;
use ferry_journal::{Credits, JournalError, Transaction};

/// Names of one inode, each with its NUL, take at most so many bytes: what listxattr(2) can return.
const LIST_MAX: usize = 65536;
/// The attribute that gives a program privileges; a write to the file takes it away.
const CAPABILITY: &[u8] = b"security.capability";

/// Refuses names that cannot be.
fn check_name(name: &[u8]) -> Result<(), FsError> {
    if name.len() > XATTR_NAME_MAX {
        return Err(errno(libc::ERANGE));
    }
    let spaces: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];
    match spaces.iter().find_map(|space| name.strip_prefix(*space)) {
        Some(b"") => Err(errno(libc::EINVAL)),
        Some(_) => Ok(()),
        None if name == acl::ACCESS || name == acl::DEFAULT => Ok(()),
        None => Err(errno(libc::EOPNOTSUPP)),
    }
}

impl LocalFs {
    pub(crate) fn do_getxattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>, FsError> {
        let inode = self.table.need(ino)?;
        // Nobody waits for the lock while the store is asked.
        let flags = inode.state.read_now()?.rec.flags;
        if flags & INODE_HAS_XATTRS == 0 {
            return Err(errno(libc::ENODATA));
        }
        check_name(name)?;
        patience::may_wait()?;
        let value = self.journal.get(&keys::xattr(ino, name))?;
        value.map(|v| v.to_vec()).ok_or(errno(libc::ENODATA))
    }

    pub(crate) fn do_listxattr(&self, ino: Ino) -> Result<Vec<u8>, FsError> {
        let inode = self.table.need(ino)?;
        let flags = inode.state.read_now()?.rec.flags;
        let mut list = Vec::new();
        if flags & INODE_HAS_XATTRS != 0 {
            self.each_xattr(ino, &mut |name| {
                list.extend_from_slice(name);
                list.push(0);
            })?;
        }
        Ok(list)
    }

    fn each_xattr(&self, ino: Ino, visit: &mut dyn FnMut(&[u8])) -> Result<(), FsError> {
        patience::may_wait()?;
        self.journal.scan(&keys::xattr(ino, b""), &keys::xattr_end(ino), &mut |key, _| {
            if let Some(Key::Xattr(_, name)) = keys::parse(key) {
                visit(name);
            }
            true
        })?;
        Ok(())
    }

    /// Reads what a change of the attributes looks at. The change looks again with the inode lock,
    /// and finds it in memory: nobody waits for that lock while the store is asked.
    fn load_xattrs(&self, inode: &Inode) -> Result<(), FsError> {
        let flags = inode.state.read_now()?.rec.flags;
        if flags & INODE_HAS_XATTRS == 0 || !self.data.is_far() {
            return Ok(());
        }
        self.each_xattr(inode.ino, &mut |_| {})
    }

    fn has_xattr(&self, ino: Ino, state: &InodeState, name: &[u8]) -> Result<bool, FsError> {
        let has_any = state.rec.flags & INODE_HAS_XATTRS != 0;
        Ok(has_any && self.journal.get(&keys::xattr(ino, name))?.is_some())
    }

    pub(crate) fn do_setxattr(
        &self,
        how: How,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        flags: XattrFlags,
    ) -> Result<(), FsError> {
        self.writable()?;
        check_name(name)?;
        if value.len() > XATTR_SIZE_MAX {
            return Err(errno(libc::E2BIG));
        }
        if self.was_made(how) {
            return Ok(());
        }
        patience::may_wait()?;
        // There are no reservations for attributes.
        self.data.admit(how.busy, None, 0)?;
        let inode = self.table.need(ino)?;
        self.load_xattrs(&inode)?;
        let mut txn = match self.begin(how, xattr_credits(name.len(), value.len())) {
            // A volume that an older version has made may have a smaller log.
            Err(FsError::Journal(JournalError::TooLarge { .. })) => {
                return Err(errno(libc::ENOSPC));
            }
            begun => begun?,
        };
        let mut state = inode.state.write();
        let stored = self.has_xattr(ino, &state, name)?;
        if stored && flags.create {
            return Err(errno(libc::EEXIST));
        }
        if !stored && flags.replace {
            return Err(errno(libc::ENODATA));
        }
        match name {
            acl::ACCESS => {
                self.set_access_acl(&mut txn, ino, &mut state, value, flags.acl_kill_sgid)?
            }
            acl::DEFAULT => self.set_default_acl(&mut txn, ino, &mut state, value)?,
            _ => {
                if !stored {
                    self.check_list(ino, &state, name)?;
                }
                txn.put(&keys::xattr(ino, name), value);
                state.rec.flags |= INODE_HAS_XATTRS;
            }
        }
        state.rec.ctime = self.time(how);
        put_inode(&mut txn, ino, &mut state);
        self.committed(txn.commit(), &[&inode]);
        Ok(())
    }

    /// Another name must fit into what listxattr(2) can return.
    fn check_list(&self, ino: Ino, state: &InodeState, name: &[u8]) -> Result<(), FsError> {
        if state.rec.flags & INODE_HAS_XATTRS == 0 {
            return Ok(());
        }
        let mut len = name.len() + 1;
        self.each_xattr(ino, &mut |name| len += name.len() + 1)?;
        if len > LIST_MAX { Err(errno(libc::ENOSPC)) } else { Ok(()) }
    }

    /// An inode's own list: what the mode bits can say goes there, and only more is stored.
    fn set_access_acl(
        &self,
        txn: &mut Transaction<'_>,
        ino: Ino,
        state: &mut InodeState,
        value: &[u8],
        kill_sgid: bool,
    ) -> Result<(), FsError> {
        if state.rec.mode & libc::S_IFMT == libc::S_IFLNK {
            return Err(errno(libc::EOPNOTSUPP));
        }
        let list = Acl::decode(value)?;
        let key = keys::xattr(ino, acl::ACCESS);
        match list.as_ref().filter(|list| !list.is_minimal()) {
            Some(list) => {
                put_acl(txn, &key, list)?;
                state.rec.flags |= INODE_HAS_XATTRS;
            }
            None => self.delete_xattr(txn, ino, state, acl::ACCESS)?,
        }
        if let Some(list) = list {
            state.rec.mode = state.rec.mode & !0o777 | list.mode();
        }
        if kill_sgid {
            state.rec.mode &= !libc::S_ISGID;
        }
        Ok(())
    }

    /// The list that a directory's new entries get.
    fn set_default_acl(
        &self,
        txn: &mut Transaction<'_>,
        ino: Ino,
        state: &mut InodeState,
        value: &[u8],
    ) -> Result<(), FsError> {
        match Acl::decode(value)? {
            Some(_) if !is_dir(state.rec.mode) => Err(errno(libc::EACCES)),
            Some(list) => {
                state.rec.flags |= INODE_HAS_XATTRS;
                put_acl(txn, &keys::xattr(ino, acl::DEFAULT), &list)
            }
            None => self.delete_xattr(txn, ino, state, acl::DEFAULT),
        }
    }

    /// Deletes one attribute; the record says so if it was the last.
    fn delete_xattr(
        &self,
        txn: &mut Transaction<'_>,
        ino: Ino,
        state: &mut InodeState,
        name: &[u8],
    ) -> Result<(), FsError> {
        if state.rec.flags & INODE_HAS_XATTRS == 0 {
            return Ok(());
        }
        let mut others = false;
        self.each_xattr(ino, &mut |other| others |= other != name)?;
        txn.delete(&keys::xattr(ino, name));
        if !others {
            state.rec.flags &= !INODE_HAS_XATTRS;
        }
        Ok(())
    }

    pub(crate) fn do_removexattr(&self, how: How, ino: Ino, name: &[u8]) -> Result<(), FsError> {
        self.writable()?;
        check_name(name)?;
        if self.was_made(how) {
            return Ok(());
        }
        self.remove_xattr(how, &*self.table.need(ino)?, name)
    }

    fn remove_xattr(&self, how: How, inode: &Inode, name: &[u8]) -> Result<(), FsError> {
        patience::may_wait()?;
        self.load_xattrs(inode)?;
        let mut txn = self.begin(how, Credits { urgent: true, ..xattr_credits(name.len(), 0) })?;
        let mut state = inode.state.write();
        if !self.has_xattr(inode.ino, &state, name)? {
            return Err(errno(libc::ENODATA));
        }
        self.delete_xattr(&mut txn, inode.ino, &mut state, name)?;
        state.rec.ctime = self.time(how);
        put_inode(&mut txn, inode.ino, &mut state);
        self.committed(txn.commit(), &[inode]);
        Ok(())
    }

    /// A change of a program's contents takes its file capabilities away.
    pub(crate) fn drop_capability(&self, how: How, inode: &Inode) -> Result<(), FsError> {
        if inode.state.read_now()?.rec.flags & INODE_HAS_XATTRS == 0 {
            return Ok(());
        }
        // A mark comes with the rest of the change, which is still to be made.
        match self.remove_xattr(how.without_seq(), inode, CAPABILITY) {
            Err(FsError::Errno(e)) if e.0 == libc::ENODATA => Ok(()),
            result => result,
        }
    }
}

fn put_acl(txn: &mut Transaction<'_>, key: &[u8], list: &Acl) -> Result<(), FsError> {
    let value = list.encode();
    if value.len() > acl::ENCODED_MAX {
        return Err(errno(libc::ENOSPC));
    }
    txn.put(key, &value);
    Ok(())
}
