//! From a request's bytes to an operation, with every bound checked: a malformed request is an error, never a panic.

use ferry_fs::{Errno, FileLock, Ino, NAME_MAX, SYMLINK_MAX, SetAttr, SetTime, Timestamp, XattrFlags};
use zerocopy::FromBytes;

use crate::abi::{self, InHeader, fattr, op};

/// A request's body: the operation's own structure, and the names and data that follow it. (Through io_uring the two
/// arrive in different places.)
#[derive(Clone, Copy, Debug)]
pub(crate) struct Args<'a> {
    pub(crate) fixed: &'a [u8],
    pub(crate) data: &'a [u8],
}

impl<'a> Args<'a> {
    /// Splits a body that came in one piece.
    pub(crate) fn split(opcode: u32, setxattr_ext: bool, body: &'a [u8]) -> Self {
        let (fixed, data) = body.split_at(abi::op_len(opcode, setxattr_ext).min(body.len()));
        Self { fixed, data }
    }
}

/// An operation, decoded.
#[derive(Debug)]
pub(crate) enum Op<'a> {
    Lookup {
        name: &'a [u8],
    },
    Forget {
        count: u64,
    },
    BatchForget {
        all: Forgets<'a>,
    },
    Getattr {
        fh: Option<u64>,
    },
    Setattr {
        fh: Option<u64>,
        set: SetAttr,
    },
    Readlink,
    Symlink {
        name: &'a [u8],
        target: &'a [u8],
    },
    Mknod {
        name: &'a [u8],
        mode: u32,
        rdev: u32,
        umask: u32,
    },
    Mkdir {
        name: &'a [u8],
        mode: u32,
        umask: u32,
    },
    Unlink {
        name: &'a [u8],
    },
    Rmdir {
        name: &'a [u8],
    },
    Rename {
        name: &'a [u8],
        new_parent: Ino,
        new_name: &'a [u8],
        flags: u32,
    },
    Link {
        ino: Ino,
        name: &'a [u8],
    },
    Open {
        flags: i32,
        kill_suidgid: bool,
    },
    Read {
        fh: u64,
        offset: u64,
        size: u32,
        /// For the page cache.
        pages: bool,
    },
    Write {
        fh: u64,
        offset: u64,
        data: &'a [u8],
        append: bool,
        kill_suidgid: bool,
        /// To be durable before it is answered.
        sync: bool,
    },
    Statfs,
    Release {
        fh: u64,
        flock_unlock: Option<u64>,
    },
    Fsync {
        fh: u64,
        data_only: bool,
    },
    Setxattr {
        name: &'a [u8],
        value: &'a [u8],
        flags: XattrFlags,
    },
    Getxattr {
        name: &'a [u8],
        size: u32,
    },
    Listxattr {
        size: u32,
    },
    Removexattr {
        name: &'a [u8],
    },
    Flush {
        fh: u64,
        lock_owner: u64,
    },
    Opendir,
    Readdir {
        fh: u64,
        cookie: u64,
        size: u32,
        plus: bool,
    },
    Releasedir {
        fh: u64,
    },
    Fsyncdir {
        fh: u64,
        data_only: bool,
    },
    Getlk {
        fh: u64,
        lock: FileLock,
    },
    Setlk {
        fh: u64,
        lock: FileLock,
        wait: bool,
    },
    Create {
        name: &'a [u8],
        mode: u32,
        umask: u32,
        flags: i32,
    },
    Tmpfile {
        mode: u32,
        umask: u32,
        flags: i32,
    },
    Interrupt {
        unique: u64,
    },
    Destroy,
    Ioctl {
        cmd: u32,
        input: &'a [u8],
        out_max: usize,
    },
    Fallocate {
        fh: u64,
        mode: i32,
        offset: u64,
        len: u64,
    },
    Lseek {
        fh: u64,
        offset: u64,
        whence: i32,
    },
    CopyFileRange {
        fh_in: u64,
        off_in: u64,
        ino_out: Ino,
        fh_out: u64,
        off_out: u64,
        len: u64,
        wide: bool,
    },
    /// An answer to a notification that expects none.
    NotifyReply,
    /// Nothing that is served; the kernel does without.
    Unsupported,
}

/// The inodes of a `BATCH_FORGET`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Forgets<'a>(&'a [u8]);

impl<'a> Forgets<'a> {
    pub(crate) fn iter(self) -> impl Iterator<Item = abi::ForgetOne> + 'a {
        self.0
            .chunks_exact(size_of::<abi::ForgetOne>())
            .filter_map(|chunk| abi::ForgetOne::read_from_bytes(chunk).ok())
    }
}

const MALFORMED: Errno = Errno(libc::EIO);

fn fixed<T: FromBytes>(args: Args<'_>) -> Result<T, Errno> {
    T::read_from_prefix(args.fixed).map(|(value, _)| value).map_err(|_| MALFORMED)
}

/// Takes the bytes before the next NUL.
fn string<'a>(data: &mut &'a [u8]) -> Result<&'a [u8], Errno> {
    let end = data.iter().position(|&b| b == 0).ok_or(MALFORMED)?;
    let (taken, rest) = data.split_at(end);
    *data = &rest[1..];
    Ok(taken)
}

fn name<'a>(data: &mut &'a [u8]) -> Result<&'a [u8], Errno> {
    let name = string(data)?;
    if name.is_empty() || name.contains(&b'/') {
        return Err(MALFORMED);
    }
    if name.len() > NAME_MAX {
        return Err(Errno(libc::ENAMETOOLONG));
    }
    Ok(name)
}

fn xattr_name<'a>(data: &mut &'a [u8]) -> Result<&'a [u8], Errno> {
    let name = string(data)?;
    if name.is_empty() { Err(MALFORMED) } else { Ok(name) }
}

/// Open flags travel as the kernel's `int` in an unsigned field.
fn open_flags(flags: u32) -> i32 {
    flags.cast_signed()
}

/// Decodes one request.
pub(crate) fn decode<'a>(head: &InHeader, args: Args<'a>, setxattr_ext: bool) -> Result<Op<'a>, Errno> {
    let mut data = args.data;
    Ok(match head.opcode {
        op::LOOKUP => Op::Lookup { name: name(&mut data)? },
        op::FORGET => Op::Forget { count: fixed::<abi::ForgetIn>(args)?.nlookup },
        op::BATCH_FORGET => batch_forget(args)?,
        op::GETATTR => {
            let a: abi::GetattrIn = fixed(args)?;
            Op::Getattr { fh: (a.flags & abi::GETATTR_FH != 0).then_some(a.fh) }
        }
        op::SETATTR => setattr(&fixed(args)?),
        op::READLINK => Op::Readlink,
        op::SYMLINK => symlink(&mut data)?,
        op::MKNOD => {
            let a: abi::MknodIn = fixed(args)?;
            Op::Mknod { name: name(&mut data)?, mode: a.mode, rdev: a.rdev, umask: a.umask }
        }
        op::MKDIR => {
            let a: abi::MkdirIn = fixed(args)?;
            Op::Mkdir { name: name(&mut data)?, mode: a.mode, umask: a.umask }
        }
        op::UNLINK => Op::Unlink { name: name(&mut data)? },
        op::RMDIR => Op::Rmdir { name: name(&mut data)? },
        op::RENAME => {
            let a: abi::RenameIn = fixed(args)?;
            Op::Rename { name: name(&mut data)?, new_parent: a.newdir, new_name: name(&mut data)?, flags: 0 }
        }
        op::RENAME2 => {
            let a: abi::Rename2In = fixed(args)?;
            Op::Rename {
                name: name(&mut data)?,
                new_parent: a.newdir,
                new_name: name(&mut data)?,
                flags: a.flags,
            }
        }
        op::LINK => Op::Link { ino: fixed::<abi::LinkIn>(args)?.oldnodeid, name: name(&mut data)? },
        op::STATFS => Op::Statfs,
        op::CREATE | op::TMPFILE => create(head.opcode, &fixed(args)?, &mut data)?,
        op::SETXATTR | op::GETXATTR | op::LISTXATTR | op::REMOVEXATTR => {
            xattr(head.opcode, args, setxattr_ext)?
        }
        op::OPENDIR => Op::Opendir,
        op::GETLK | op::SETLK | op::SETLKW => lock(head.opcode, &fixed(args)?),
        op::INTERRUPT => Op::Interrupt { unique: fixed::<abi::InterruptIn>(args)?.unique },
        op::DESTROY => Op::Destroy,
        op::IOCTL => ioctl(&fixed(args)?, data)?,
        op::NOTIFY_REPLY => Op::NotifyReply,
        _ => return on_handle(head.opcode, args),
    })
}

/// Operations on an open file.
fn on_handle<'a>(opcode: u32, args: Args<'a>) -> Result<Op<'a>, Errno> {
    Ok(match opcode {
        op::OPEN => {
            let a: abi::OpenIn = fixed(args)?;
            Op::Open { flags: open_flags(a.flags), kill_suidgid: a.open_flags & abi::OPEN_KILL_SUIDGID != 0 }
        }
        op::READ => {
            let a: abi::ReadIn = fixed(args)?;
            let pages = a.read_flags & abi::READ_LOCKOWNER == 0;
            Op::Read { fh: a.fh, offset: a.offset, size: a.size, pages }
        }
        op::READDIR | op::READDIRPLUS => {
            let a: abi::ReadIn = fixed(args)?;
            Op::Readdir { fh: a.fh, cookie: a.offset, size: a.size, plus: opcode == op::READDIRPLUS }
        }
        op::WRITE => write(&fixed(args)?, args.data)?,
        op::RELEASE => {
            let a: abi::ReleaseIn = fixed(args)?;
            let unlock = a.release_flags & abi::RELEASE_FLOCK_UNLOCK != 0;
            Op::Release { fh: a.fh, flock_unlock: unlock.then_some(a.lock_owner) }
        }
        op::RELEASEDIR => Op::Releasedir { fh: fixed::<abi::ReleaseIn>(args)?.fh },
        op::FSYNC | op::FSYNCDIR => {
            let a: abi::FsyncIn = fixed(args)?;
            let data_only = a.fsync_flags & abi::FSYNC_FDATASYNC != 0;
            if opcode == op::FSYNC {
                Op::Fsync { fh: a.fh, data_only }
            } else {
                Op::Fsyncdir { fh: a.fh, data_only }
            }
        }
        op::FLUSH => {
            let a: abi::FlushIn = fixed(args)?;
            Op::Flush { fh: a.fh, lock_owner: a.lock_owner }
        }
        op::FALLOCATE => {
            let a: abi::FallocateIn = fixed(args)?;
            Op::Fallocate { fh: a.fh, mode: a.mode.cast_signed(), offset: a.offset, len: a.length }
        }
        op::LSEEK => {
            let a: abi::LseekIn = fixed(args)?;
            Op::Lseek { fh: a.fh, offset: a.offset, whence: a.whence.cast_signed() }
        }
        op::COPY_FILE_RANGE | op::COPY_FILE_RANGE_64 => {
            let a: abi::CopyFileRangeIn = fixed(args)?;
            Op::CopyFileRange {
                fh_in: a.fh_in,
                off_in: a.off_in,
                ino_out: a.nodeid_out,
                fh_out: a.fh_out,
                off_out: a.off_out,
                len: a.len,
                wide: opcode == op::COPY_FILE_RANGE_64,
            }
        }
        // STATX: GETATTR says all there is (no birth time is kept); ACCESS: the kernel judges itself
        // (default_permissions); BMAP, POLL, SYNCFS: nothing to say. Each is asked once, then never again.
        _ => Op::Unsupported,
    })
}

fn batch_forget(args: Args<'_>) -> Result<Op<'_>, Errno> {
    let count = usize::try_from(fixed::<abi::BatchForgetIn>(args)?.count).map_err(|_| MALFORMED)?;
    let bytes = count.checked_mul(size_of::<abi::ForgetOne>()).ok_or(MALFORMED)?;
    Ok(Op::BatchForget { all: Forgets(args.data.get(..bytes).ok_or(MALFORMED)?) })
}

fn setattr<'a>(a: &abi::SetattrIn) -> Op<'a> {
    let has = |bit: u32| a.valid & bit != 0;
    let time = |bit: u32, now: u32, secs: u64, nanos: u32| {
        let at = SetTime::At(Timestamp::new(secs.cast_signed(), nanos));
        has(bit).then_some(if has(now) { SetTime::Now } else { at })
    };
    let set = SetAttr {
        mode: has(fattr::MODE).then_some(a.mode & 0o7777),
        uid: has(fattr::UID).then_some(a.uid),
        gid: has(fattr::GID).then_some(a.gid),
        size: has(fattr::SIZE).then_some(a.size),
        atime: time(fattr::ATIME, fattr::ATIME_NOW, a.atime, a.atimensec),
        mtime: time(fattr::MTIME, fattr::MTIME_NOW, a.mtime, a.mtimensec),
        ctime: has(fattr::CTIME).then(|| Timestamp::new(a.ctime.cast_signed(), a.ctimensec)),
        kill_suidgid: has(fattr::KILL_SUIDGID),
    };
    Op::Setattr { fh: has(fattr::FH).then_some(a.fh), set }
}

fn symlink<'a>(data: &mut &'a [u8]) -> Result<Op<'a>, Errno> {
    let name = name(data)?;
    let target = string(data)?;
    if target.is_empty() {
        return Err(MALFORMED);
    }
    if target.len() > SYMLINK_MAX {
        return Err(Errno(libc::ENAMETOOLONG));
    }
    Ok(Op::Symlink { name, target })
}

fn create<'a>(opcode: u32, a: &abi::CreateIn, data: &mut &'a [u8]) -> Result<Op<'a>, Errno> {
    let flags = open_flags(a.flags);
    if opcode == op::TMPFILE {
        return Ok(Op::Tmpfile { mode: a.mode, umask: a.umask, flags });
    }
    Ok(Op::Create { name: name(data)?, mode: a.mode, umask: a.umask, flags })
}

fn write<'a>(a: &abi::WriteIn, data: &'a [u8]) -> Result<Op<'a>, Errno> {
    let size = usize::try_from(a.size).map_err(|_| MALFORMED)?;
    // A page written back has its place, whatever the descriptor that is borrowed for it was opened with.
    let flags = if a.write_flags & abi::WRITE_CACHE == 0 { open_flags(a.flags) } else { 0 };
    Ok(Op::Write {
        fh: a.fh,
        offset: a.offset,
        data: data.get(..size).ok_or(MALFORMED)?,
        append: flags & libc::O_APPEND != 0,
        kill_suidgid: a.write_flags & abi::WRITE_KILL_SUIDGID != 0,
        // `O_SYNC` contains it.
        sync: flags & libc::O_DSYNC != 0,
    })
}

fn xattr<'a>(opcode: u32, args: Args<'a>, setxattr_ext: bool) -> Result<Op<'a>, Errno> {
    let mut data = args.data;
    Ok(match opcode {
        op::SETXATTR => {
            let (size, flags, ext) = if setxattr_ext {
                let a: abi::SetxattrIn = fixed(args)?;
                (a.size, a.flags, a.setxattr_flags)
            } else {
                let a: abi::SetxattrInShort = fixed(args)?;
                (a.size, a.flags, 0)
            };
            let name = xattr_name(&mut data)?;
            let size = usize::try_from(size).map_err(|_| MALFORMED)?;
            let flags = open_flags(flags);
            let flags = XattrFlags {
                create: flags & libc::XATTR_CREATE != 0,
                replace: flags & libc::XATTR_REPLACE != 0,
                acl_kill_sgid: ext & abi::SETXATTR_ACL_KILL_SGID != 0,
            };
            Op::Setxattr { name, value: data.get(..size).ok_or(MALFORMED)?, flags }
        }
        op::GETXATTR => {
            Op::Getxattr { size: fixed::<abi::GetxattrIn>(args)?.size, name: xattr_name(&mut data)? }
        }
        op::LISTXATTR => Op::Listxattr { size: fixed::<abi::GetxattrIn>(args)?.size },
        _ => Op::Removexattr { name: xattr_name(&mut data)? },
    })
}

fn lock<'a>(opcode: u32, a: &abi::LkIn) -> Op<'a> {
    let lock = FileLock {
        start: a.lk.start,
        end: a.lk.end,
        kind: a.lk.kind.cast_signed(),
        pid: a.lk.pid,
        owner: a.owner,
        flock: a.lk_flags & abi::LK_FLOCK != 0,
    };
    match opcode {
        op::GETLK => Op::Getlk { fh: a.fh, lock },
        _ => Op::Setlk { fh: a.fh, lock, wait: opcode == op::SETLKW },
    }
}

fn ioctl<'a>(a: &abi::IoctlIn, data: &'a [u8]) -> Result<Op<'a>, Errno> {
    if a.flags & abi::IOCTL_UNRESTRICTED != 0 {
        return Err(Errno(libc::ENOTTY)); // only a character device may send these
    }
    let size = usize::try_from(a.in_size).map_err(|_| MALFORMED)?;
    let out_max = usize::try_from(a.out_size).map_err(|_| MALFORMED)?;
    Ok(Op::Ioctl { cmd: a.cmd, input: data.get(..size).ok_or(MALFORMED)?, out_max })
}

#[cfg(test)]
mod tests;
