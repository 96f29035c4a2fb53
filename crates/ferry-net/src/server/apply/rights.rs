//! What a client may do whose certificate names the users and groups as which it may act.
//!
//! Otherwise the client's kernel checks permission (`default_permissions`). The server does not
//! trust a limited client to name the right user or to have checked anything, so it checks itself,
//! before the file system sees the operation:
//! * RIGHTS-1: the user and the group of an operation are of the certificate; so are those that
//!   `chown` gives.
//! * RIGHTS-2: the operation does only what mode bits, ACL, owner and sticky bit allow. A request
//!   does not say in which other groups its user is: each group of the certificate counts where
//!   that allows more. So a client that lies gets what some user of its certificate may do, and no
//!   more.
//! * RIGHTS-3: a change of a program's contents takes its privileges away, asked or not. Only the
//!   owner gives some, and only to groups of the certificate. Devices and attributes of the system
//!   are for root alone.
//! * RIGHTS-4: an open file is used as it was opened, whichever user does it: the kernel reads and
//!   writes for no particular user.
//! * RIGHTS-5: the client acknowledges nothing early, because the server might refuse what it
//!   decides alone.
//!
//! Requests of the client's daemon itself (user 0, group 0, thread 0) look names up and open files
//! again that were open: the daemon may do what any user of the certificate may. If root (user 0)
//! is among the users, it may do everything that RIGHTS-1 allows.

use ferry_fs::{Attr, Errno, InProcess, Ino, SessionStore, SetAttr, SetTime, posix};

use super::applying::Applying;
use crate::limits::Limits;
use crate::message::{Caller, Check, Op};
use crate::server::session::Open;

const READ: u32 = 4;
const WRITE: u32 = 2;
const EXECUTE: u32 = 1;
/// The attribute with an inode's access list.
const ACCESS_LIST: &[u8] = b"system.posix_acl_access";
/// Tags of its entries, and bytes of its head and of each.
const ACL_USER: u16 = 0x02;
const ACL_GROUP_OBJ: u16 = 0x04;
const ACL_GROUP: u16 = 0x08;
const ACL_MASK: u16 = 0x10;
const ACL_HEAD: usize = 4;

const NOT_ALLOWED: Errno = Errno(libc::EACCES);
const NOT_THE_OWNER: Errno = Errno(libc::EPERM);

type Done = Result<(), Errno>;

/// The user that asks, and as which users it may act.
struct Rights<'a> {
    limits: &'a Limits,
    caller: Caller,
    /// The client's daemon, for itself.
    daemon: bool,
}

/// An entry of an access list.
struct AclEntry {
    tag: u16,
    perm: u32,
    id: u32,
}

/// Decodes the form that the file system gives, which has checked it.
fn entries(list: &[u8]) -> Vec<AclEntry> {
    let (entries, _) = list.get(ACL_HEAD..).unwrap_or_default().as_chunks::<8>();
    let entry = |&[t0, t1, p0, p1, i0, i1, i2, i3]: &[u8; 8]| AclEntry {
        tag: u16::from_le_bytes([t0, t1]),
        perm: u32::from(u16::from_le_bytes([p0, p1])),
        id: u32::from_le_bytes([i0, i1, i2, i3]),
    };
    entries.iter().map(entry).collect()
}

impl Rights<'_> {
    /// RIGHTS-1.
    fn is_named(&self) -> bool {
        self.limits.users.has(self.caller.uid) && self.limits.groups.has(self.caller.gid)
    }

    fn is_root(&self) -> bool {
        self.caller.uid == 0 && self.limits.users.has(0)
    }

    fn owns(&self, attr: &Attr) -> bool {
        if self.daemon { self.limits.users.has(attr.uid) } else { self.caller.uid == attr.uid }
    }

    fn is_user(&self, id: u32) -> bool {
        if self.daemon { self.limits.users.has(id) } else { self.caller.uid == id }
    }

    /// RIGHTS-2: what is allowed, of reading, writing and executing.
    fn allowed(&self, attr: &Attr, list: &[AclEntry]) -> u32 {
        let (owner, group, other) = (attr.mode >> 6 & 7, attr.mode >> 3 & 7, attr.mode & 7);
        if self.is_root() {
            return READ | WRITE | EXECUTE;
        }
        if self.owns(attr) {
            // A file may be opened again after a crash although its mode has changed since: an
            // owner could change the mode back.
            return if self.daemon { READ | WRITE | EXECUTE } else { owner };
        }
        // If there is a mask, it is the mode's middle digit.
        let masked = list.iter().any(|entry| entry.tag == ACL_MASK);
        let mask = if masked { group } else { 7 };
        let named = list.iter().filter(|entry| entry.tag == ACL_USER && self.is_user(entry.id));
        let named = named.map(|entry| entry.perm & mask).reduce(|a, b| a | b);
        if let (Some(perm), false) = (named, self.daemon) {
            return perm;
        }
        let of_groups = list.iter().map(|entry| match entry.tag {
            ACL_GROUP_OBJ if self.limits.groups.has(attr.gid) => entry.perm & mask,
            ACL_GROUP if self.limits.groups.has(entry.id) => entry.perm & mask,
            _ => 0,
        });
        let of_groups = of_groups.fold(0, |a, b| a | b);
        let by_mode = if list.is_empty() && self.limits.groups.has(attr.gid) { group } else { 0 };
        named.unwrap_or(0) | of_groups | by_mode | other
    }
}

/// What the mode and the access list of an inode allow, of reading, writing and executing.
fn allowed(fs: &dyn SessionStore, rights: &Rights<'_>, attr: &Attr) -> Result<u32, Errno> {
    let mut list = Vec::new();
    if !fs.is_plain(attr.ino)? {
        list = match InProcess::default().call(|cx| fs.getxattr(cx, attr.ino, ACCESS_LIST)) {
            Ok(list) => list,
            Err(Errno(libc::ENODATA)) => Vec::new(),
            Err(errno) => return Err(errno),
        };
    }
    Ok(rights.allowed(attr, &entries(&list)))
}

/// Whether some user of a certificate may search a directory, which lies on the way to what its
/// client mounts.
pub(in crate::server) fn may_search(fs: &dyn SessionStore, limits: &Limits, dir: &Attr) -> bool {
    let rights = Rights { limits, caller: Caller::default(), daemon: true };
    allowed(fs, &rights, dir).is_ok_and(|allowed| allowed & EXECUTE != 0)
}

impl Applying<'_> {
    /// Whether this client may do it; what it must not ask for besides is taken out. For a
    /// certificate without limits nothing is checked.
    pub(super) fn permit(&self, op: &mut Op) -> Done {
        let Some(limits) = &self.session.peer.limits else { return Ok(()) };
        let Caller { uid, gid, pid, .. } = self.caller;
        let daemon = (uid, gid, pid) == (0, 0, 0);
        let rights = Rights { limits, caller: self.caller, daemon };
        match op.info().check {
            Check::Nothing => return Ok(()),
            Check::OpenFile => return self.permit_on_file(&rights, op),
            Check::Permission => {}
        }
        if self.early.is_some() {
            return Err(NOT_THE_OWNER); // RIGHTS-5
        }
        let for_itself = daemon && (!op.is_ordered() || matches!(op, Op::Open { .. }));
        if !rights.is_named() && !for_itself {
            return Err(NOT_ALLOWED);
        }
        self.permit_named(&rights, op)
    }

    /// Whether the user that asks may list and search a directory, by the volume's number.
    pub(in crate::server) fn may_walk(&self, dir: Ino) -> bool {
        let Some(limits) = &self.session.peer.limits else { return true };
        let rights = Rights { limits, caller: self.caller, daemon: false };
        let may = || self.may_inside(&rights, &self.inside(dir)?, READ | EXECUTE);
        rights.is_named() && may().is_ok()
    }

    /// RIGHTS-4, and RIGHTS-3 of contents.
    fn permit_on_file(&self, rights: &Rights<'_>, op: &mut Op) -> Done {
        let reads = |fh: u64| match self.session.handle(fh) {
            Some(open) if !open.reads => Err(Errno(libc::EBADF)),
            _ => Ok(()),
        };
        match op {
            Op::Read { fh, .. } => reads(*fh),
            Op::Write { kill_suidgid, .. } => {
                *kill_suidgid |= !rights.is_root();
                Ok(())
            }
            Op::Fallocate { fh, .. } => self.unprivilege(rights, *fh),
            Op::Copy { fh_in, fh_out, .. } => {
                reads(*fh_in)?;
                self.unprivilege(rights, *fh_out)
            }
            _ => Ok(()),
        }
    }

    /// Takes a program's privileges away when its contents are about to change in a way that does
    /// not do so itself.
    fn unprivilege(&self, rights: &Rights<'_>, fh: u64) -> Done {
        let Some(Open { ino, fh, writes: true, .. }) = self.session.handle(fh) else {
            return Ok(());
        };
        let has_set_ids = posix::has_set_ids(self.inside(ino)?.mode);
        if rights.is_root() || (!has_set_ids && self.fs().is_plain(ino)?) {
            return Ok(());
        }
        let set = SetAttr { kill_suidgid: true, ..SetAttr::default() };
        InProcess::default().call(|cx| self.fs().setattr(cx, ino, Some(fh), &set)).map(drop)
    }

    fn permit_named(&self, rights: &Rights<'_>, op: &mut Op) -> Done {
        match op {
            Op::Lookup { parent: ino, .. } => self.may(rights, *ino, EXECUTE),
            Op::Readdir { ino, .. } => self.may(rights, *ino, READ),
            Op::Readlink { .. } | Op::Listxattr { .. } => Ok(()),
            Op::Getxattr { ino, name } if name.starts_with(b"user.") => {
                self.may(rights, *ino, READ)
            }
            Op::Getxattr { name, .. } if name.starts_with(b"trusted.") && !rights.is_root() => {
                Err(NOT_THE_OWNER)
            }
            Op::Getxattr { .. } => Ok(()),
            Op::Open { ino, flags, kill_suidgid, .. } => {
                *kill_suidgid |= *flags & libc::O_TRUNC != 0 && !rights.is_root();
                let ino = self.ino(*ino)?;
                self.may_open(rights, ino, *flags)
            }
            Op::Create { parent, name, mode, flags, .. } => match self.named(*parent, name)? {
                Some(attr) if *flags & libc::O_EXCL == 0 => {
                    self.may(rights, *parent, EXECUTE)?;
                    let truncates = *flags & libc::O_TRUNC != 0 && !rights.is_root();
                    if truncates && posix::has_set_ids(attr.mode) {
                        return Err(NOT_ALLOWED); // RIGHTS-3: it could not be taken away here
                    }
                    self.may_open(rights, attr.ino, *flags)
                }
                _ => self.may_make(rights, *parent, Some(mode)),
            },
            Op::Mknod { parent, mode, .. } => {
                if [libc::S_IFCHR, libc::S_IFBLK].contains(&(*mode & libc::S_IFMT))
                    && !rights.is_root()
                {
                    return Err(NOT_THE_OWNER);
                }
                self.may_make(rights, *parent, Some(mode))
            }
            Op::Tmpfile { parent, mode, .. } => self.may_make(rights, *parent, Some(mode)),
            Op::Mkdir { parent, mode, .. } => {
                // As mkdir(2): set-group-id comes from the parent alone.
                *mode &= !(libc::S_ISUID | libc::S_ISGID);
                self.may_make(rights, *parent, None)
            }
            Op::Symlink { parent, .. } | Op::Link { parent, .. } => {
                self.may_make(rights, *parent, None)
            }
            Op::Unlink { parent, name } | Op::Rmdir { parent, name } => {
                self.may_remove(rights, *parent, name).map(drop)
            }
            Op::Rename { parent, name, new_parent, new_name, flags } => {
                let moved = self.may_remove(rights, *parent, name)?;
                let replaced =
                    self.may_remove(rights, *new_parent, new_name)?.filter(|_| flags.exchange);
                // A directory that moves gets another `..`.
                let is_directory = |attr: &Attr| attr.mode & libc::S_IFMT == libc::S_IFDIR;
                let mut both = moved.into_iter().chain(replaced).filter(|attr| is_directory(attr));
                if parent == new_parent {
                    return Ok(());
                }
                both.try_for_each(|attr| self.may_inside(rights, &attr, WRITE))
            }
            Op::Setattr { ino, fh, set } => self.may_set(rights, *ino, *fh, set),
            Op::Setxattr { ino, name, flags, .. } if name.starts_with(b"system.") => {
                let attr = self.attr_of(*ino)?;
                flags.acl_kill_sgid |= !rights.limits.groups.has(attr.gid) && !rights.is_root();
                if rights.owns(&attr) || rights.is_root() { Ok(()) } else { Err(NOT_THE_OWNER) }
            }
            Op::Removexattr { ino, name } if name.starts_with(b"system.") => {
                let attr = self.attr_of(*ino)?;
                if rights.owns(&attr) || rights.is_root() { Ok(()) } else { Err(NOT_THE_OWNER) }
            }
            Op::Setxattr { ino, name, .. } | Op::Removexattr { ino, name }
                if name.starts_with(b"user.") =>
            {
                self.may(rights, *ino, WRITE)
            }
            // The kernel does this before a write.
            Op::Removexattr { ino, name } if name == b"security.capability" => {
                self.may(rights, *ino, WRITE)
            }
            _ if rights.is_root() => Ok(()),
            _ => Err(NOT_THE_OWNER),
        }
    }

    /// The attributes of an inode, by the volume's number.
    fn inside(&self, ino: Ino) -> Result<Attr, Errno> {
        Ok(InProcess::default().call(|cx| self.fs().getattr(cx, ino, None))?.0)
    }

    /// The same, by the client's.
    fn attr_of(&self, ino: Ino) -> Result<Attr, Errno> {
        self.inside(self.ino(ino)?)
    }

    /// What a name means, if anything.
    fn named(&self, dir: Ino, name: &[u8]) -> Result<Option<Attr>, Errno> {
        let dir = self.ino(dir)?;
        let found = InProcess::default().call(|cx| self.fs().lookup(cx, dir, name));
        let attr = match found {
            Ok(entry) => entry.attr,
            Err(Errno(libc::ENOENT)) => None,
            Err(errno) => return Err(errno),
        };
        if let Some(attr) = &attr {
            self.fs().forget(attr.ino, 1);
        }
        Ok(attr)
    }

    fn may(&self, rights: &Rights<'_>, ino: Ino, wanted: u32) -> Done {
        self.may_inside(rights, &self.attr_of(ino)?, wanted)
    }

    fn may_inside(&self, rights: &Rights<'_>, attr: &Attr, wanted: u32) -> Done {
        if wanted & !self.allowed(rights, attr)? == 0 { Ok(()) } else { Err(NOT_ALLOWED) }
    }

    fn allowed(&self, rights: &Rights<'_>, attr: &Attr) -> Result<u32, Errno> {
        allowed(self.fs(), rights, attr)
    }

    /// A user that may execute a program may read it, because the client executes it.
    fn may_open(&self, rights: &Rights<'_>, ino: Ino, flags: i32) -> Done {
        let attr = self.inside(ino)?;
        let mut wanted = match flags & libc::O_ACCMODE {
            libc::O_RDONLY => READ,
            libc::O_WRONLY => WRITE,
            _ => READ | WRITE,
        };
        if flags & libc::O_TRUNC != 0 {
            wanted |= WRITE;
        }
        let mut allowed = self.allowed(rights, &attr)?;
        if allowed & EXECUTE != 0 && attr.mode & libc::S_IFMT == libc::S_IFREG {
            allowed |= READ;
        }
        if wanted & !allowed == 0 { Ok(()) } else { Err(NOT_ALLOWED) }
    }

    /// Makes a new name in `dir`, of an inode with this mode. In a directory with set-group-id the
    /// inode gets the directory's group.
    fn may_make(&self, rights: &Rights<'_>, dir: Ino, mode: Option<&mut u32>) -> Done {
        let dir = self.attr_of(dir)?;
        self.may_inside(rights, &dir, WRITE | EXECUTE)?;
        let foreign = dir.mode & libc::S_ISGID != 0 && !rights.limits.groups.has(dir.gid);
        if let (Some(mode), true, false) = (mode, foreign, rights.is_root()) {
            *mode &= !libc::S_ISGID;
        }
        Ok(())
    }

    /// Takes a name out of a directory. Returns what it means.
    fn may_remove(
        &self,
        rights: &Rights<'_>,
        dir: Ino,
        name: &[u8],
    ) -> Result<Option<Attr>, Errno> {
        let attr = self.attr_of(dir)?;
        self.may_inside(rights, &attr, WRITE | EXECUTE)?;
        let found = self.named(dir, name)?;
        let sticky = attr.mode & libc::S_ISVTX != 0 && !rights.owns(&attr) && !rights.is_root();
        match found {
            Some(found) if sticky && !rights.owns(&found) => Err(NOT_THE_OWNER),
            found => Ok(found),
        }
    }

    fn may_set(&self, rights: &Rights<'_>, ino: Ino, fh: Option<u64>, set: &mut SetAttr) -> Done {
        let ino = self.ino(ino)?;
        let attr = self.inside(ino)?;
        let Limits { users, groups } = rights.limits;
        let root = rights.is_root();
        let owner = rights.owns(&attr) || root;
        let explicit = |time: Option<SetTime>| matches!(time, Some(SetTime::At(_)));
        let owners = set.mode.is_some()
            || set.uid.is_some()
            || set.gid.is_some()
            || set.ctime.is_some()
            || explicit(set.atime)
            || explicit(set.mtime);
        if owners && !owner {
            return Err(NOT_THE_OWNER);
        }
        // RIGHTS-1: root gives a file to users of the certificate, an owner to nobody.
        let gives_away = set.uid.is_some_and(|uid| uid != attr.uid && !(root && users.has(uid)));
        if gives_away || set.gid.is_some_and(|gid| gid != attr.gid && !groups.has(gid)) {
            return Err(NOT_THE_OWNER);
        }
        if let Some(mode) = &mut set.mode
            && !root
            && !groups.has(set.gid.unwrap_or(attr.gid))
        {
            *mode &= !libc::S_ISGID;
        }
        let open = fh.and_then(|fh| self.session.handle(fh));
        let writes = open.is_some_and(|open| open.ino == ino && open.writes);
        if set.size.is_some() {
            set.kill_suidgid |= !root;
            if !writes {
                self.may_inside(rights, &attr, WRITE)?;
            }
        } else if (set.atime.is_some() || set.mtime.is_some()) && !owner && !writes {
            self.may_inside(rights, &attr, WRITE)?;
        }
        Ok(())
    }
}
