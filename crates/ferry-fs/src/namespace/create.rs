//! Making inodes: files, directories, symbolic links, device nodes, and files without a name.

use crate::api::{Attr, Cx, Ino, Opened, SYMLINK_MAX};
use crate::credits::{DENTRY_BYTES, RECORD_BYTES, SMALL_BYTES};
use crate::error::FsError;
use crate::inode::incore::Inode;
use crate::inode::state::InodeState;
use crate::keys::{self, Dentry, INODE_HAS_XATTRS, INODE_INLINE, InodeRecord};
use crate::local::local_fs::{LocalFs, change_entries, errno, put_inode};
use crate::namespace::acl::{self, Acl};
use crate::namespace::names::{Found, check_dir, check_name};
use crate::posix::{first_links, inherit_group, is_dir};
use ferry_journal::{Credits, Transaction};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Most names of an inode, and most subdirectories of a directory.
pub(crate) const LINK_MAX: u32 = 1 << 31;
/// What to make.
#[derive(Clone, Copy)]
pub(crate) struct New<'n> {
    /// Type and permission bits as asked for.
    pub(crate) mode: u32,
    /// A device node's number.
    pub(crate) rdev: u32,
    /// A symbolic link's target.
    pub(crate) target: Option<&'n [u8]>,
}

/// What became of it.
pub(crate) enum Made {
    /// Made, with one lookup counted.
    New(Arc<Inode>),
    /// The name was there; a lookup of its inode is counted.
    Exists(Arc<Inode>),
}

/// The ACLs that a new inode gets from its directory.
#[derive(Default)]
struct Inherited {
    access: Option<Acl>,
    default: Option<Acl>,
}

impl Inherited {
    fn put(&self, txn: &mut Transaction<'_>, ino: Ino) {
        for (name, acl) in [(acl::ACCESS, &self.access), (acl::DEFAULT, &self.default)] {
            if let Some(acl) = acl {
                txn.put(&keys::xattr(ino, name), &acl.encode());
            }
        }
    }
}

pub(crate) fn credits(target: usize, inherit: bool) -> Credits {
    let acls = if inherit { 2 * (acl::ENCODED_MAX as u32 + 64) } else { 0 };
    let bytes = DENTRY_BYTES + 2 * RECORD_BYTES + 2 * SMALL_BYTES + target as u32 + acls;
    Credits { keys: 7, bytes, urgent: false }
}

impl LocalFs {
    /// Makes an inode under a name that does not exist; one that does is found instead.
    pub(crate) fn make(
        &self,
        cx: &Cx,
        parent: Ino,
        name: &[u8],
        new: New<'_>,
    ) -> Result<Made, FsError> {
        let how = self.how(cx);
        check_name(name)?;
        self.writable()?;
        self.admit(how, new.target.map_or(0, <[u8]>::len))?;
        self.admit_number(how)?;
        let dir = self.table.need(parent)?;
        self.load_default_acl(&dir)?;
        let mut inherit = false;
        loop {
            let txn = self.begin(how, credits(new.target.map_or(0, <[u8]>::len), inherit))?;
            let mut state = dir.state.write_now()?;
            check_dir(&state)?;
            let cookie = match self.find(&dir, &state, name)? {
                // A program that was told that the name is new cannot be given what is there.
                Found::Present(..) if cx.early_ack().is_some_and(|ack| ack.ino.is_some()) => {
                    return Err(errno(libc::EEXIST));
                }
                Found::Present(_, target) => {
                    let inode = self.target(parent, target.ino)?;
                    self.count_lookup(&inode);
                    let was_made = self.was_made(how);
                    return Ok(if was_made { Made::New(inode) } else { Made::Exists(inode) });
                }
                found => found.absent()?,
            };
            // Whether there are ACLs to inherit decides how much log space the operation needs.
            if state.rec.flags & INODE_HAS_XATTRS != 0 && !inherit {
                inherit = true;
                continue;
            }
            return self.make_at(cx, txn, (&dir, &mut state), (cookie, name), new).map(Made::New);
        }
    }

    fn make_at(
        &self,
        cx: &Cx,
        mut txn: Transaction<'_>,
        (dir, dir_state): (&Inode, &mut InodeState),
        (cookie, name): (u64, &[u8]),
        new: New<'_>,
    ) -> Result<Arc<Inode>, FsError> {
        let subdirectory = is_dir(new.mode);
        if subdirectory && dir_state.rec.nlink >= LINK_MAX {
            return Err(errno(libc::EMLINK));
        }
        let (rec, inherited) = self.new_record(cx, dir.ino, dir_state, new)?;
        let ino = self.number_for(cx.early_ack())?;
        let target = Dentry { ino, kind: rec.mode & libc::S_IFMT };
        inherited.put(&mut txn, ino);
        txn.put(&keys::inode(ino), &rec.encode());
        txn.put(&keys::dentry(dir.ino, cookie, name), &target.encode());
        change_entries(dir_state, 1, i32::from(subdirectory), rec.ctime);
        put_inode(&mut txn, dir.ino, dir_state);

        let inode = self.add_new(ino, rec);
        if dir.dir.insert(cookie, name, target) {
            self.table.dir_entries_grew(1);
        }
        let seq = self.counters.commit_made(txn);
        self.committed(seq, &[dir, &inode]);
        Ok(inode)
    }

    /// A new inode in memory, known by one lookup.
    fn add_new(&self, ino: Ino, rec: InodeRecord) -> Arc<Inode> {
        let directory = is_dir(rec.mode);
        let inode = Arc::new(Inode::new(ino, rec));
        self.count_lookup(&inode);
        self.table.insert(&inode);
        // A number that is not in the table would be dropped from the queue of cached directories.
        if directory {
            self.table.cache_dir(&inode, BTreeMap::new());
        }
        inode
    }

    /// A new inode's record: its owner, its mode, what it inherits.
    fn new_record(
        &self,
        cx: &Cx,
        parent: Ino,
        dir: &InodeState,
        new: New<'_>,
    ) -> Result<(InodeRecord, Inherited), FsError> {
        let now = self.time(self.how(cx));
        let (mode, gid) = inherit_group((dir.rec.mode, dir.rec.gid), (new.mode, cx.gid));
        let mut rec = InodeRecord {
            mode,
            uid: cx.uid,
            gid,
            nlink: first_links(mode),
            rdev: new.rdev,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            ..InodeRecord::default()
        };
        let inherited = self.inherit(cx, parent, dir, &mut rec.mode)?;
        if inherited.access.is_some() || inherited.default.is_some() {
            rec.flags |= INODE_HAS_XATTRS;
        }
        if is_dir(rec.mode) {
            rec.parent = parent;
        }
        if let Some(target) = new.target {
            rec.flags |= INODE_INLINE;
            rec.inline = target.to_vec();
            rec.size = target.len() as u64;
        }
        Ok((rec, inherited))
    }

    /// Reads what a new inode inherits. It is looked up again with the directory's lock, and found
    /// in memory: nobody waits for that lock while the store is asked.
    fn load_default_acl(&self, dir: &Inode) -> Result<(), FsError> {
        if self.data.is_far() && dir.state.read_now()?.rec.flags & INODE_HAS_XATTRS != 0 {
            self.stored_acl(dir.ino, acl::DEFAULT)?;
        }
        Ok(())
    }

    /// The directory's default ACL takes the place of the umask.
    fn inherit(
        &self,
        cx: &Cx,
        parent: Ino,
        dir: &InodeState,
        mode: &mut u32,
    ) -> Result<Inherited, FsError> {
        if *mode & libc::S_IFMT == libc::S_IFLNK {
            return Ok(Inherited::default());
        }
        let default = match dir.rec.flags & INODE_HAS_XATTRS {
            0 => None,
            _ => self.stored_acl(parent, acl::DEFAULT)?,
        };
        let Some(default) = default else {
            *mode &= !(cx.umask & 0o777);
            return Ok(Inherited::default());
        };
        let mut access = default.clone();
        let more_than_mode = access.restrict_to_mode(mode);
        Ok(Inherited {
            access: more_than_mode.then_some(access),
            default: is_dir(*mode).then_some(default),
        })
    }

    /// Makes a node that is not opened.
    pub(crate) fn do_make(
        &self,
        cx: &Cx,
        parent: Ino,
        name: &[u8],
        new: New<'_>,
    ) -> Result<Attr, FsError> {
        match self.make(cx, parent, name, new)? {
            Made::New(inode) => {
                let attr = inode.state.read().attr(inode.ino);
                Ok(attr)
            }
            Made::Exists(inode) => {
                self.forget_inode(&inode, 1);
                Err(errno(libc::EEXIST))
            }
        }
    }

    /// Makes a symbolic link.
    pub(crate) fn do_symlink(
        &self,
        cx: &Cx,
        parent: Ino,
        name: &[u8],
        target: &[u8],
    ) -> Result<Attr, FsError> {
        if target.is_empty() {
            return Err(errno(libc::ENOENT));
        }
        if target.len() > SYMLINK_MAX {
            return Err(errno(libc::ENAMETOOLONG));
        }
        let new = New { mode: libc::S_IFLNK | 0o777, rdev: 0, target: Some(target) };
        self.do_make(cx, parent, name, new)
    }

    /// Makes a file, or finds it, and opens it.
    pub(crate) fn do_create(
        &self,
        cx: &Cx,
        parent: Ino,
        name: &[u8],
        mode: u32,
        flags: i32,
    ) -> Result<(Attr, Opened), FsError> {
        let new = New { mode: libc::S_IFREG | mode & 0o7777, rdev: 0, target: None };
        let inode = match self.make(cx, parent, name, new)? {
            Made::New(inode) => {
                let opened = self.open_handle(cx, &inode, flags, true);
                let attr = inode.state.read().attr(inode.ino);
                return Ok((attr, opened));
            }
            Made::Exists(inode) => inode,
        };
        let opened = match flags & libc::O_EXCL {
            0 => self.open_existing(cx, &inode, flags),
            _ => Err(errno(libc::EEXIST)),
        };
        match opened {
            Ok(opened) => {
                let attr = inode.state.read().attr(inode.ino);
                Ok((attr, opened))
            }
            Err(error) => {
                self.forget_inode(&inode, 1);
                Err(error)
            }
        }
    }

    fn open_existing(&self, cx: &Cx, inode: &Arc<Inode>, flags: i32) -> Result<Opened, FsError> {
        let mode = inode.state.read_now()?.rec.mode;
        match mode & libc::S_IFMT {
            libc::S_IFREG => self.do_open(cx, inode, flags, false),
            libc::S_IFDIR => Err(errno(libc::EISDIR)),
            _ => Err(errno(libc::EEXIST)),
        }
    }

    /// Makes and opens a file without a name: an orphan from birth, until it is linked.
    pub(crate) fn do_tmpfile(
        &self,
        cx: &Cx,
        parent: Ino,
        mode: u32,
        flags: i32,
    ) -> Result<(Attr, Opened), FsError> {
        self.writable()?;
        let how = self.how(cx);
        self.admit(how, 0)?;
        self.admit_number(how)?;
        let dir = self.table.need(parent)?;
        self.load_default_acl(&dir)?;
        let mut txn = self.begin(how, credits(0, true))?;
        let (mut rec, inherited) = {
            let dir_state = dir.state.read_now()?;
            check_dir(&dir_state)?;
            let new = New { mode: libc::S_IFREG | mode & 0o7777, rdev: 0, target: None };
            self.new_record(cx, parent, &dir_state, new)?
        };
        rec.nlink = 0;
        let ino = self.number_for(cx.early_ack())?;
        inherited.put(&mut txn, ino);
        txn.put(&keys::inode(ino), &rec.encode());
        txn.put(&keys::orphan(ino), &[keys::VALUE_VERSION]);
        let inode = self.add_new(ino, rec);
        let attr = inode.state.read().attr(ino);
        inode.set_flag(Inode::NAMELESS);
        if flags & libc::O_EXCL == 0 {
            inode.set_flag(Inode::LINKABLE);
            self.note_linkable(ino, true);
        }
        let opened = self.open_handle(cx, &inode, flags, true);
        let seq = self.counters.commit_made(txn);
        self.committed(seq, &[&inode]);
        Ok((attr, opened))
    }
}
