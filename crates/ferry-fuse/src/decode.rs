//! Decodes a request's bytes into an operation and checks every bound: a malformed request is an
//! error, never a panic.

use ferry_fs::{
    Errno, FileLock, Ino, NAME_MAX, SYMLINK_MAX, SetAttr, SetTime, Timestamp, XattrFlags,
};
use zerocopy::FromBytes;

use crate::abi::{self, InHeader, fattr, op};

/// A request's body: the operation's own structure, and the names and data that follow it. (Over
/// io_uring the two arrive in different buffers.)
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestArgs<'a> {
    pub(crate) fixed: &'a [u8],
    pub(crate) data: &'a [u8],
}

impl<'a> RequestArgs<'a> {
    /// Splits a body that came as one buffer.
    pub(crate) fn split(opcode: u32, setxattr_ext: bool, body: &'a [u8]) -> Self {
        let (fixed, data) = body.split_at(abi::op_len(opcode, setxattr_ext).min(body.len()));
        Self { fixed, data }
    }
}

/// A decoded operation.
#[derive(Debug)]
pub(crate) enum FuseOp<'a> {
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
    Statx,
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
        /// The kernel reads into its page cache.
        pages: bool,
    },
    Write {
        fh: u64,
        offset: u64,
        data: &'a [u8],
        append: bool,
        kill_suidgid: bool,
        /// It must be durable before it is answered.
        sync: bool,
        from: WriteSource,
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
    /// The answer to a notification. It needs no answer itself.
    NotifyReply,
    /// An operation that is not served; the kernel manages without it.
    Unsupported,
}

/// Where the data of a WRITE comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WriteSource {
    /// Dirty pages of the kernel's page cache.
    WriteBack,
    /// A program's write that went through the page cache, which keeps a copy.
    Through,
    /// A program's direct write, past the page cache.
    Direct,
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

fn fixed<T: FromBytes>(args: RequestArgs<'_>) -> Result<T, Errno> {
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

/// Open flags are the kernel's `int` in an unsigned field.
fn open_flags(flags: u32) -> i32 {
    flags.cast_signed()
}

/// Decodes one request.
pub(crate) fn decode<'a>(
    head: &InHeader,
    args: RequestArgs<'a>,
    setxattr_ext: bool,
) -> Result<FuseOp<'a>, Errno> {
    let mut data = args.data;
    Ok(match head.opcode {
        op::LOOKUP => FuseOp::Lookup { name: name(&mut data)? },
        op::FORGET => FuseOp::Forget { count: fixed::<abi::ForgetIn>(args)?.nlookup },
        op::BATCH_FORGET => batch_forget(args)?,
        op::GETATTR => {
            let a: abi::GetattrIn = fixed(args)?;
            FuseOp::Getattr { fh: (a.flags & abi::GETATTR_FH != 0).then_some(a.fh) }
        }
        op::STATX => FuseOp::Statx,
        op::SETATTR => setattr(&fixed(args)?),
        op::READLINK => FuseOp::Readlink,
        op::SYMLINK => symlink(&mut data)?,
        op::MKNOD => {
            let a: abi::MknodIn = fixed(args)?;
            FuseOp::Mknod { name: name(&mut data)?, mode: a.mode, rdev: a.rdev, umask: a.umask }
        }
        op::MKDIR => {
            let a: abi::MkdirIn = fixed(args)?;
            FuseOp::Mkdir { name: name(&mut data)?, mode: a.mode, umask: a.umask }
        }
        op::UNLINK => FuseOp::Unlink { name: name(&mut data)? },
        op::RMDIR => FuseOp::Rmdir { name: name(&mut data)? },
        op::RENAME => {
            let a: abi::RenameIn = fixed(args)?;
            FuseOp::Rename {
                name: name(&mut data)?,
                new_parent: a.newdir,
                new_name: name(&mut data)?,
                flags: 0,
            }
        }
        op::RENAME2 => {
            let a: abi::Rename2In = fixed(args)?;
            FuseOp::Rename {
                name: name(&mut data)?,
                new_parent: a.newdir,
                new_name: name(&mut data)?,
                flags: a.flags,
            }
        }
        op::LINK => {
            FuseOp::Link { ino: fixed::<abi::LinkIn>(args)?.oldnodeid, name: name(&mut data)? }
        }
        op::STATFS => FuseOp::Statfs,
        op::CREATE | op::TMPFILE => create(head.opcode, &fixed(args)?, &mut data)?,
        op::SETXATTR | op::GETXATTR | op::LISTXATTR | op::REMOVEXATTR => {
            xattr(head.opcode, args, setxattr_ext)?
        }
        op::OPENDIR => FuseOp::Opendir,
        op::GETLK | op::SETLK | op::SETLKW => lock(head.opcode, &fixed(args)?),
        op::INTERRUPT => FuseOp::Interrupt { unique: fixed::<abi::InterruptIn>(args)?.unique },
        op::DESTROY => FuseOp::Destroy,
        op::IOCTL => ioctl(&fixed(args)?, data)?,
        op::NOTIFY_REPLY => FuseOp::NotifyReply,
        _ => return on_handle(head.opcode, args),
    })
}

/// Operations on an open file.
fn on_handle<'a>(opcode: u32, args: RequestArgs<'a>) -> Result<FuseOp<'a>, Errno> {
    Ok(match opcode {
        op::OPEN => {
            let a: abi::OpenIn = fixed(args)?;
            FuseOp::Open {
                flags: open_flags(a.flags),
                kill_suidgid: a.open_flags & abi::OPEN_KILL_SUIDGID != 0,
            }
        }
        op::READ => {
            let a: abi::ReadIn = fixed(args)?;
            let pages = a.read_flags & abi::READ_LOCKOWNER == 0;
            FuseOp::Read { fh: a.fh, offset: a.offset, size: a.size, pages }
        }
        op::READDIR | op::READDIRPLUS => {
            let a: abi::ReadIn = fixed(args)?;
            FuseOp::Readdir {
                fh: a.fh,
                cookie: a.offset,
                size: a.size,
                plus: opcode == op::READDIRPLUS,
            }
        }
        op::WRITE => write(&fixed(args)?, args.data)?,
        op::RELEASE => {
            let a: abi::ReleaseIn = fixed(args)?;
            let unlock = a.release_flags & abi::RELEASE_FLOCK_UNLOCK != 0;
            FuseOp::Release { fh: a.fh, flock_unlock: unlock.then_some(a.lock_owner) }
        }
        op::RELEASEDIR => FuseOp::Releasedir { fh: fixed::<abi::ReleaseIn>(args)?.fh },
        op::FSYNC | op::FSYNCDIR => {
            let a: abi::FsyncIn = fixed(args)?;
            let data_only = a.fsync_flags & abi::FSYNC_FDATASYNC != 0;
            if opcode == op::FSYNC {
                FuseOp::Fsync { fh: a.fh, data_only }
            } else {
                FuseOp::Fsyncdir { fh: a.fh, data_only }
            }
        }
        op::FLUSH => {
            let a: abi::FlushIn = fixed(args)?;
            FuseOp::Flush { fh: a.fh, lock_owner: a.lock_owner }
        }
        op::FALLOCATE => {
            let a: abi::FallocateIn = fixed(args)?;
            FuseOp::Fallocate {
                fh: a.fh,
                mode: a.mode.cast_signed(),
                offset: a.offset,
                len: a.length,
            }
        }
        op::LSEEK => {
            let a: abi::LseekIn = fixed(args)?;
            FuseOp::Lseek { fh: a.fh, offset: a.offset, whence: a.whence.cast_signed() }
        }
        op::COPY_FILE_RANGE | op::COPY_FILE_RANGE_64 => {
            let a: abi::CopyFileRangeIn = fixed(args)?;
            FuseOp::CopyFileRange {
                fh_in: a.fh_in,
                off_in: a.off_in,
                ino_out: a.nodeid_out,
                fh_out: a.fh_out,
                off_out: a.off_out,
                len: a.len,
                wide: opcode == op::COPY_FILE_RANGE_64,
            }
        }
        // ACCESS: the kernel checks permissions itself (default_permissions). BMAP, POLL, SYNCFS:
        // not needed. The kernel sends each of them once, then never again.
        _ => FuseOp::Unsupported,
    })
}

fn batch_forget(args: RequestArgs<'_>) -> Result<FuseOp<'_>, Errno> {
    let count = usize::try_from(fixed::<abi::BatchForgetIn>(args)?.count).map_err(|_| MALFORMED)?;
    let bytes = count.checked_mul(size_of::<abi::ForgetOne>()).ok_or(MALFORMED)?;
    Ok(FuseOp::BatchForget { all: Forgets(args.data.get(..bytes).ok_or(MALFORMED)?) })
}

fn setattr<'a>(a: &abi::SetattrIn) -> FuseOp<'a> {
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
    FuseOp::Setattr { fh: has(fattr::FH).then_some(a.fh), set }
}

fn symlink<'a>(data: &mut &'a [u8]) -> Result<FuseOp<'a>, Errno> {
    let name = name(data)?;
    let target = string(data)?;
    if target.is_empty() {
        return Err(MALFORMED);
    }
    if target.len() > SYMLINK_MAX {
        return Err(Errno(libc::ENAMETOOLONG));
    }
    Ok(FuseOp::Symlink { name, target })
}

fn create<'a>(opcode: u32, a: &abi::CreateIn, data: &mut &'a [u8]) -> Result<FuseOp<'a>, Errno> {
    let flags = open_flags(a.flags);
    if opcode == op::TMPFILE {
        return Ok(FuseOp::Tmpfile { mode: a.mode, umask: a.umask, flags });
    }
    Ok(FuseOp::Create { name: name(data)?, mode: a.mode, umask: a.umask, flags })
}

fn write<'a>(a: &abi::WriteIn, data: &'a [u8]) -> Result<FuseOp<'a>, Errno> {
    let size = usize::try_from(a.size).map_err(|_| MALFORMED)?;
    // A page that is written back has its own offset, whatever the flags of the descriptor that the
    // kernel uses for it.
    let has = |bit: u32| a.write_flags & bit != 0;
    let flags = if has(abi::WRITE_CACHE) { 0 } else { open_flags(a.flags) };
    Ok(FuseOp::Write {
        fh: a.fh,
        offset: a.offset,
        data: data.get(..size).ok_or(MALFORMED)?,
        append: flags & libc::O_APPEND != 0,
        kill_suidgid: has(abi::WRITE_KILL_SUIDGID),
        // `O_SYNC` contains it.
        sync: flags & libc::O_DSYNC != 0,
        from: match (has(abi::WRITE_CACHE), has(abi::WRITE_LOCKOWNER)) {
            (true, _) => WriteSource::WriteBack,
            (_, true) => WriteSource::Direct,
            _ => WriteSource::Through,
        },
    })
}

fn xattr<'a>(opcode: u32, args: RequestArgs<'a>, setxattr_ext: bool) -> Result<FuseOp<'a>, Errno> {
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
            FuseOp::Setxattr { name, value: data.get(..size).ok_or(MALFORMED)?, flags }
        }
        op::GETXATTR => FuseOp::Getxattr {
            size: fixed::<abi::GetxattrIn>(args)?.size,
            name: xattr_name(&mut data)?,
        },
        op::LISTXATTR => FuseOp::Listxattr { size: fixed::<abi::GetxattrIn>(args)?.size },
        _ => FuseOp::Removexattr { name: xattr_name(&mut data)? },
    })
}

fn lock<'a>(opcode: u32, a: &abi::LkIn) -> FuseOp<'a> {
    let lock = FileLock {
        start: a.lk.start,
        end: a.lk.end,
        kind: a.lk.kind.cast_signed(),
        pid: a.lk.pid,
        owner: a.owner,
        flock: a.lk_flags & abi::LK_FLOCK != 0,
    };
    match opcode {
        op::GETLK => FuseOp::Getlk { fh: a.fh, lock },
        _ => FuseOp::Setlk { fh: a.fh, lock, wait: opcode == op::SETLKW },
    }
}

fn ioctl<'a>(a: &abi::IoctlIn, data: &'a [u8]) -> Result<FuseOp<'a>, Errno> {
    if a.flags & abi::IOCTL_UNRESTRICTED != 0 {
        return Err(Errno(libc::ENOTTY)); // only a character device may send these
    }
    let size = usize::try_from(a.in_size).map_err(|_| MALFORMED)?;
    let out_max = usize::try_from(a.out_size).map_err(|_| MALFORMED)?;
    Ok(FuseOp::Ioctl { cmd: a.cmd, input: data.get(..size).ok_or(MALFORMED)?, out_max })
}

#[cfg(test)]
mod tests;
