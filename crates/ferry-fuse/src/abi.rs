//! The kernel's FUSE interface, version 7.45: its numbers and structures.
//!
//! Every structure has the kernel's size and layout, in the machine's byte order; `tests` below
//! hold the sizes and the offsets that matter against the kernel's header.

use ferry_env::activity::Operation;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The one major version there is.
pub(crate) const MAJOR: u32 = 7;
/// The newest minor version whose messages this crate knows.
pub(crate) const MINOR: u32 = 45;
/// The oldest minor version that it serves (Linux 4.20: since then every structure has kept its
/// size or grown compatibly).
pub(crate) const MINOR_MIN: u32 = 28;
/// Bytes of room that a read of the device needs beyond a write's data.
pub(crate) const READ_BUFFER_MIN: usize = 8192;

/// The codes of the operations.
pub(crate) mod op {
    pub(crate) const LOOKUP: u32 = 1;
    pub(crate) const FORGET: u32 = 2;
    pub(crate) const GETATTR: u32 = 3;
    pub(crate) const SETATTR: u32 = 4;
    pub(crate) const READLINK: u32 = 5;
    pub(crate) const SYMLINK: u32 = 6;
    pub(crate) const MKNOD: u32 = 8;
    pub(crate) const MKDIR: u32 = 9;
    pub(crate) const UNLINK: u32 = 10;
    pub(crate) const RMDIR: u32 = 11;
    pub(crate) const RENAME: u32 = 12;
    pub(crate) const LINK: u32 = 13;
    pub(crate) const OPEN: u32 = 14;
    pub(crate) const READ: u32 = 15;
    pub(crate) const WRITE: u32 = 16;
    pub(crate) const STATFS: u32 = 17;
    pub(crate) const RELEASE: u32 = 18;
    pub(crate) const FSYNC: u32 = 20;
    pub(crate) const SETXATTR: u32 = 21;
    pub(crate) const GETXATTR: u32 = 22;
    pub(crate) const LISTXATTR: u32 = 23;
    pub(crate) const REMOVEXATTR: u32 = 24;
    pub(crate) const FLUSH: u32 = 25;
    pub(crate) const INIT: u32 = 26;
    pub(crate) const OPENDIR: u32 = 27;
    pub(crate) const READDIR: u32 = 28;
    pub(crate) const RELEASEDIR: u32 = 29;
    pub(crate) const FSYNCDIR: u32 = 30;
    pub(crate) const GETLK: u32 = 31;
    pub(crate) const SETLK: u32 = 32;
    pub(crate) const SETLKW: u32 = 33;
    pub(crate) const ACCESS: u32 = 34;
    pub(crate) const CREATE: u32 = 35;
    pub(crate) const INTERRUPT: u32 = 36;
    pub(crate) const BMAP: u32 = 37;
    pub(crate) const DESTROY: u32 = 38;
    pub(crate) const IOCTL: u32 = 39;
    pub(crate) const POLL: u32 = 40;
    pub(crate) const NOTIFY_REPLY: u32 = 41;
    pub(crate) const BATCH_FORGET: u32 = 42;
    pub(crate) const FALLOCATE: u32 = 43;
    pub(crate) const READDIRPLUS: u32 = 44;
    pub(crate) const RENAME2: u32 = 45;
    pub(crate) const LSEEK: u32 = 46;
    pub(crate) const COPY_FILE_RANGE: u32 = 47;
    pub(crate) const SYNCFS: u32 = 50;
    pub(crate) const TMPFILE: u32 = 51;
    pub(crate) const STATX: u32 = 52;
    pub(crate) const COPY_FILE_RANGE_64: u32 = 53;
}

/// `INIT` flags; those above bit 31 travel in `flags2`.
pub(crate) mod init {
    pub(crate) const ASYNC_READ: u64 = 1 << 0;
    pub(crate) const POSIX_LOCKS: u64 = 1 << 1;
    pub(crate) const EXPORT_SUPPORT: u64 = 1 << 4;
    pub(crate) const BIG_WRITES: u64 = 1 << 5;
    pub(crate) const DONT_MASK: u64 = 1 << 6;
    pub(crate) const FLOCK_LOCKS: u64 = 1 << 10;
    pub(crate) const DO_READDIRPLUS: u64 = 1 << 13;
    pub(crate) const READDIRPLUS_AUTO: u64 = 1 << 14;
    pub(crate) const ASYNC_DIO: u64 = 1 << 15;
    pub(crate) const WRITEBACK_CACHE: u64 = 1 << 16;
    pub(crate) const PARALLEL_DIROPS: u64 = 1 << 18;
    pub(crate) const POSIX_ACL: u64 = 1 << 20;
    pub(crate) const MAX_PAGES: u64 = 1 << 22;
    pub(crate) const CACHE_SYMLINKS: u64 = 1 << 23;
    pub(crate) const NO_OPENDIR_SUPPORT: u64 = 1 << 24;
    pub(crate) const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    pub(crate) const SETXATTR_EXT: u64 = 1 << 29;
    pub(crate) const INIT_EXT: u64 = 1 << 30;
    pub(crate) const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
    pub(crate) const OVER_IO_URING: u64 = 1 << 41;
}

/// The bits of `setattr_in.valid`.
pub(crate) mod fattr {
    pub(crate) const MODE: u32 = 1 << 0;
    pub(crate) const UID: u32 = 1 << 1;
    pub(crate) const GID: u32 = 1 << 2;
    pub(crate) const SIZE: u32 = 1 << 3;
    pub(crate) const ATIME: u32 = 1 << 4;
    pub(crate) const MTIME: u32 = 1 << 5;
    pub(crate) const FH: u32 = 1 << 6;
    pub(crate) const ATIME_NOW: u32 = 1 << 7;
    pub(crate) const MTIME_NOW: u32 = 1 << 8;
    pub(crate) const CTIME: u32 = 1 << 10;
    pub(crate) const KILL_SUIDGID: u32 = 1 << 11;
}

/// The bits of `open_out.open_flags`.
pub(crate) mod fopen {
    pub(crate) const DIRECT_IO: u32 = 1 << 0;
    pub(crate) const KEEP_CACHE: u32 = 1 << 1;
    pub(crate) const CACHE_DIR: u32 = 1 << 3;
    pub(crate) const NOFLUSH: u32 = 1 << 5;
    pub(crate) const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// The fields that statx(2) gets: those of stat(2), and the birth time.
pub(crate) const STATX_MASK: u32 = 0xfff;
pub(crate) const GETATTR_FH: u32 = 1 << 0;
pub(crate) const OPEN_KILL_SUIDGID: u32 = 1 << 0;
/// Set if a program reads directly; not set if the page cache reads.
pub(crate) const READ_LOCKOWNER: u32 = 1 << 1;
pub(crate) const WRITE_CACHE: u32 = 1 << 0;
pub(crate) const WRITE_LOCKOWNER: u32 = 1 << 1;
pub(crate) const WRITE_KILL_SUIDGID: u32 = 1 << 2;
pub(crate) const RELEASE_FLOCK_UNLOCK: u32 = 1 << 1;
pub(crate) const FSYNC_FDATASYNC: u32 = 1 << 0;
pub(crate) const LK_FLOCK: u32 = 1 << 0;
pub(crate) const SETXATTR_ACL_KILL_SGID: u32 = 1 << 0;
pub(crate) const IOCTL_UNRESTRICTED: u32 = 1 << 1;
pub(crate) const NOTIFY_INVAL_INODE: i32 = 2;
pub(crate) const NOTIFY_INVAL_ENTRY: i32 = 3;
pub(crate) const NOTIFY_RETRIEVE: i32 = 5;
pub(crate) const NOTIFY_INC_EPOCH: i32 = 8;
/// Keep the name, but look it up before its next use.
pub(crate) const EXPIRE_ONLY: u32 = 1 << 0;
/// The first version that knows [`EXPIRE_ONLY`]; an older one takes it for a removed name, and
/// detaches everything mounted below.
pub(crate) const EXPIRE_ONLY_MINOR: u32 = 38;
/// The minor version from which on the kernel knows [`NOTIFY_INC_EPOCH`].
pub(crate) const INC_EPOCH_MINOR: u32 = 44;

/// Declares structures of the interface: all fields are integers or structures of them, without
/// padding.
macro_rules! wire {
    ($($name:ident { $($field:ident: $ty:ty),* $(,)? })*) => {$(
        #[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        pub(crate) struct $name { $(pub(crate) $field: $ty),* }
    )*};
}

wire! {
    InHeader { len: u32, opcode: u32, unique: u64, nodeid: u64, uid: u32, gid: u32, pid: u32, total_extlen: u16, padding: u16 }
    OutHeader { len: u32, error: i32, unique: u64 }
    Attr {
        ino: u64, size: u64, blocks: u64, atime: u64, mtime: u64, ctime: u64,
        atimensec: u32, mtimensec: u32, ctimensec: u32, mode: u32, nlink: u32, uid: u32, gid: u32, rdev: u32,
        blksize: u32, flags: u32,
    }
    EntryOut {
        nodeid: u64, generation: u64, entry_valid: u64, attr_valid: u64, entry_valid_nsec: u32, attr_valid_nsec: u32,
        attr: Attr,
    }
    ForgetIn { nlookup: u64 }
    ForgetOne { nodeid: u64, nlookup: u64 }
    BatchForgetIn { count: u32, dummy: u32 }
    GetattrIn { flags: u32, dummy: u32, fh: u64 }
    AttrOut { attr_valid: u64, attr_valid_nsec: u32, dummy: u32, attr: Attr }
    StatxIn { getattr_flags: u32, reserved: u32, fh: u64, sx_flags: u32, sx_mask: u32 }
    SxTime { sec: i64, nsec: u32, reserved: i32 }
    Statx {
        mask: u32, blksize: u32, attributes: u64, nlink: u32, uid: u32, gid: u32, mode: u16, spare: u16, ino: u64, size: u64,
        blocks: u64, attributes_mask: u64, atime: SxTime, btime: SxTime, ctime: SxTime, mtime: SxTime, rdev_major: u32,
        rdev_minor: u32, dev_major: u32, dev_minor: u32, spare2: [u64; 14],
    }
    StatxOut { attr_valid: u64, attr_valid_nsec: u32, flags: u32, spare: [u64; 2], stat: Statx }
    MknodIn { mode: u32, rdev: u32, umask: u32, padding: u32 }
    MkdirIn { mode: u32, umask: u32 }
    RenameIn { newdir: u64 }
    Rename2In { newdir: u64, flags: u32, padding: u32 }
    LinkIn { oldnodeid: u64 }
    SetattrIn {
        valid: u32, padding: u32, fh: u64, size: u64, lock_owner: u64, atime: u64, mtime: u64, ctime: u64,
        atimensec: u32, mtimensec: u32, ctimensec: u32, mode: u32, unused4: u32, uid: u32, gid: u32, unused5: u32,
    }
    OpenIn { flags: u32, open_flags: u32 }
    CreateIn { flags: u32, mode: u32, umask: u32, open_flags: u32 }
    OpenOut { fh: u64, open_flags: u32, backing_id: i32 }
    ReleaseIn { fh: u64, flags: u32, release_flags: u32, lock_owner: u64 }
    FlushIn { fh: u64, unused: u32, padding: u32, lock_owner: u64 }
    ReadIn { fh: u64, offset: u64, size: u32, read_flags: u32, lock_owner: u64, flags: u32, padding: u32 }
    WriteIn { fh: u64, offset: u64, size: u32, write_flags: u32, lock_owner: u64, flags: u32, padding: u32 }
    WriteOut { size: u32, padding: u32 }
    StatfsOut {
        blocks: u64, bfree: u64, bavail: u64, files: u64, ffree: u64, bsize: u32, namelen: u32, frsize: u32,
        padding: u32, spare: [u32; 6],
    }
    FsyncIn { fh: u64, fsync_flags: u32, padding: u32 }
    SetxattrIn { size: u32, flags: u32, setxattr_flags: u32, padding: u32 }
    SetxattrInShort { size: u32, flags: u32 }
    GetxattrIn { size: u32, padding: u32 }
    GetxattrOut { size: u32, padding: u32 }
    Lock { start: u64, end: u64, kind: u32, pid: u32 }
    LkIn { fh: u64, owner: u64, lk: Lock, lk_flags: u32, padding: u32 }
    LkOut { lk: Lock }
    InitIn { major: u32, minor: u32, max_readahead: u32, flags: u32 }
    InitInExt { flags2: u32, unused: [u32; 11] }
    InitOut {
        major: u32, minor: u32, max_readahead: u32, flags: u32, max_background: u16, congestion_threshold: u16,
        max_write: u32, time_gran: u32, max_pages: u16, map_alignment: u16, flags2: u32, max_stack_depth: u32,
        request_timeout: u16, unused16: u16, unused: [u32; 5],
    }
    InterruptIn { unique: u64 }
    IoctlIn { fh: u64, flags: u32, cmd: u32, arg: u64, in_size: u32, out_size: u32 }
    IoctlOut { result: i32, flags: u32, in_iovs: u32, out_iovs: u32 }
    FallocateIn { fh: u64, offset: u64, length: u64, mode: u32, padding: u32 }
    Dirent { ino: u64, off: u64, namelen: u32, kind: u32 }
    LseekIn { fh: u64, offset: u64, whence: u32, padding: u32 }
    LseekOut { offset: u64 }
    CopyFileRangeIn {
        fh_in: u64, off_in: u64, nodeid_out: u64, fh_out: u64, off_out: u64, len: u64, flags: u64,
    }
    CopyFileRangeOut { bytes_copied: u64 }
    NotifyInvalInode { ino: u64, off: i64, len: i64 }
    NotifyRetrieve { notify_unique: u64, nodeid: u64, offset: u64, size: u32, padding: u32 }
    NotifyInvalEntry { parent: u64, namelen: u32, flags: u32 }
    UringEntInOut { flags: u64, commit_id: u64, payload_sz: u32, padding: u32, reserved: u64 }
    UringCmdReq { flags: u64, commit_id: u64, qid: u16, padding: [u8; 6] }
}

/// `FUSE_IO_URING_CMD_…`: register an entry; answer it and fetch the next request.
pub(crate) const URING_REGISTER: u32 = 1;
pub(crate) const URING_COMMIT_AND_FETCH: u32 = 2;
/// Offsets of the parts of an io_uring entry's header buffer, and its size.
pub(crate) const URING_OP_IN: usize = 128;
pub(crate) const URING_RING_ENT: usize = 256;
pub(crate) const URING_HEADER: usize = 288;

/// Bytes of a request's own structure, which precedes names and data. (That of `SETXATTR` depends
/// on what was negotiated.)
pub(crate) fn op_len(opcode: u32, setxattr_ext: bool) -> usize {
    match opcode {
        op::FORGET => size_of::<ForgetIn>(),
        op::BATCH_FORGET => size_of::<BatchForgetIn>(),
        op::GETATTR => size_of::<GetattrIn>(),
        op::SETATTR => size_of::<SetattrIn>(),
        op::STATX => size_of::<StatxIn>(),
        op::MKNOD => size_of::<MknodIn>(),
        op::MKDIR => size_of::<MkdirIn>(),
        op::RENAME => size_of::<RenameIn>(),
        op::RENAME2 => size_of::<Rename2In>(),
        op::LINK => size_of::<LinkIn>(),
        op::OPEN | op::OPENDIR => size_of::<OpenIn>(),
        op::CREATE | op::TMPFILE => size_of::<CreateIn>(),
        op::READ | op::READDIR | op::READDIRPLUS => size_of::<ReadIn>(),
        op::WRITE => size_of::<WriteIn>(),
        op::RELEASE | op::RELEASEDIR => size_of::<ReleaseIn>(),
        op::FSYNC | op::FSYNCDIR => size_of::<FsyncIn>(),
        op::SETXATTR if setxattr_ext => size_of::<SetxattrIn>(),
        op::SETXATTR => size_of::<SetxattrInShort>(),
        op::GETXATTR | op::LISTXATTR => size_of::<GetxattrIn>(),
        op::FLUSH => size_of::<FlushIn>(),
        op::GETLK | op::SETLK | op::SETLKW => size_of::<LkIn>(),
        op::INTERRUPT => size_of::<InterruptIn>(),
        op::IOCTL => size_of::<IoctlIn>(),
        op::FALLOCATE => size_of::<FallocateIn>(),
        op::LSEEK => size_of::<LseekIn>(),
        op::COPY_FILE_RANGE | op::COPY_FILE_RANGE_64 => size_of::<CopyFileRangeIn>(),
        op::INIT => size_of::<InitIn>(),
        _ => 0,
    }
}

/// Whether the kernel waits for an answer to such a request.
pub(crate) fn has_answer(opcode: u32) -> bool {
    !matches!(opcode, op::FORGET | op::BATCH_FORGET | op::INTERRUPT | op::NOTIFY_REPLY)
}

/// An operation, as profiles and counters call it.
pub(crate) fn operation(opcode: u32) -> Operation {
    match opcode {
        op::LOOKUP => Operation::Lookup,
        op::FORGET => Operation::Forget,
        op::GETATTR => Operation::Getattr,
        op::SETATTR => Operation::Setattr,
        op::READLINK => Operation::Readlink,
        op::SYMLINK => Operation::Symlink,
        op::MKNOD => Operation::Mknod,
        op::MKDIR => Operation::Mkdir,
        op::UNLINK => Operation::Unlink,
        op::RMDIR => Operation::Rmdir,
        op::RENAME => Operation::Rename,
        op::LINK => Operation::Link,
        op::OPEN => Operation::Open,
        op::READ => Operation::Read,
        op::WRITE => Operation::Write,
        op::STATFS => Operation::Statfs,
        op::RELEASE => Operation::Release,
        op::FSYNC => Operation::Fsync,
        op::SETXATTR => Operation::Setxattr,
        op::GETXATTR => Operation::Getxattr,
        op::LISTXATTR => Operation::Listxattr,
        op::REMOVEXATTR => Operation::Removexattr,
        op::FLUSH => Operation::Flush,
        op::INIT => Operation::Init,
        op::OPENDIR => Operation::Opendir,
        op::READDIR => Operation::Readdir,
        op::RELEASEDIR => Operation::Releasedir,
        op::FSYNCDIR => Operation::Fsyncdir,
        op::GETLK => Operation::Getlk,
        op::SETLK => Operation::Setlk,
        op::SETLKW => Operation::Setlkw,
        op::ACCESS => Operation::Access,
        op::CREATE => Operation::Create,
        op::INTERRUPT => Operation::Interrupt,
        op::BMAP => Operation::Bmap,
        op::DESTROY => Operation::Destroy,
        op::IOCTL => Operation::Ioctl,
        op::POLL => Operation::Poll,
        op::NOTIFY_REPLY => Operation::NotifyReply,
        op::BATCH_FORGET => Operation::BatchForget,
        op::FALLOCATE => Operation::Fallocate,
        op::READDIRPLUS => Operation::Readdirplus,
        op::RENAME2 => Operation::Rename2,
        op::LSEEK => Operation::Lseek,
        op::COPY_FILE_RANGE => Operation::CopyFileRange,
        op::SYNCFS => Operation::Syncfs,
        op::TMPFILE => Operation::Tmpfile,
        op::STATX => Operation::Statx,
        op::COPY_FILE_RANGE_64 => Operation::CopyFileRange64,
        _ => Operation::Unknown,
    }
}

/// The same, for people.
pub(crate) fn op_name(opcode: u32) -> &'static str {
    operation(opcode).name()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn structures_have_the_kernels_sizes() {
        let sizes = [
            (size_of::<InHeader>(), 40),
            (size_of::<OutHeader>(), 16),
            (size_of::<Attr>(), 88),
            (size_of::<EntryOut>(), 128),
            (size_of::<ForgetOne>(), 16),
            (size_of::<GetattrIn>(), 16),
            (size_of::<AttrOut>(), 104),
            (size_of::<StatxIn>(), 24),
            (size_of::<Statx>(), 256),
            (size_of::<StatxOut>(), 288),
            (size_of::<MknodIn>(), 16),
            (size_of::<MkdirIn>(), 8),
            (size_of::<Rename2In>(), 16),
            (size_of::<SetattrIn>(), 88),
            (size_of::<OpenIn>(), 8),
            (size_of::<CreateIn>(), 16),
            (size_of::<OpenOut>(), 16),
            (size_of::<ReleaseIn>(), 24),
            (size_of::<FlushIn>(), 24),
            (size_of::<ReadIn>(), 40),
            (size_of::<WriteIn>(), 40),
            (size_of::<StatfsOut>(), 80),
            (size_of::<FsyncIn>(), 16),
            (size_of::<SetxattrIn>(), 16),
            (size_of::<LkIn>(), 48),
            (size_of::<LkOut>(), 24),
            (size_of::<InitIn>() + size_of::<InitInExt>(), 64),
            (size_of::<InitOut>(), 64),
            (size_of::<IoctlIn>(), 32),
            (size_of::<IoctlOut>(), 16),
            (size_of::<FallocateIn>(), 32),
            (size_of::<Dirent>(), 24),
            (size_of::<LseekIn>(), 24),
            (size_of::<CopyFileRangeIn>(), 56),
            (size_of::<NotifyInvalInode>(), 24),
            (size_of::<NotifyInvalEntry>(), 16),
            (size_of::<NotifyRetrieve>(), 32),
            (size_of::<UringEntInOut>(), 32),
            (size_of::<UringCmdReq>(), 24),
        ];
        for (i, (ours, kernels)) in sizes.into_iter().enumerate() {
            assert_eq!(ours, kernels, "structure number {i} of this list");
        }
        assert_eq!(URING_RING_ENT + size_of::<UringEntInOut>(), URING_HEADER);
    }

    #[test]
    fn fields_are_where_the_kernel_has_them() {
        assert_eq!(offset_of!(InHeader, total_extlen), 36);
        assert_eq!(offset_of!(Attr, mode), 60);
        assert_eq!(offset_of!(EntryOut, attr), 40);
        assert_eq!(offset_of!(SetattrIn, mode), 68);
        assert_eq!(offset_of!(SetattrIn, uid), 76);
        assert_eq!(offset_of!(InitOut, time_gran), 24);
        assert_eq!(offset_of!(InitOut, max_pages), 28);
        assert_eq!(offset_of!(InitOut, flags2), 32);
        assert_eq!(offset_of!(InitOut, request_timeout), 40);
        assert_eq!(offset_of!(WriteIn, write_flags), 20);
        assert_eq!(offset_of!(UringCmdReq, qid), 16);
        assert_eq!(offset_of!(StatfsOut, frsize), 48);
        assert_eq!(offset_of!(Statx, btime), 80);
        assert_eq!(offset_of!(Statx, rdev_major), 128);
    }
}
