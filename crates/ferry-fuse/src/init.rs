//! INIT, the first exchange: negotiates the version, the capabilities and the limits.

use zerocopy::FromBytes;

use crate::abi::{self, InitIn, InitInExt, InitOut, init};
use crate::decode::RequestArgs;
use crate::error::Error;

/// Bytes of the largest read and write.
pub const IO_MAX: usize = 1 << 20;
const PAGE: usize = 4096;
/// Requests without a waiting process (read-ahead, write-back, asynchronous direct I/O, RELEASE)
/// that the kernel sends at a time. Its default of 12 is less than the read-ahead of two readers.
pub(crate) const BACKGROUND_MAX: u16 = 64;
/// From this number on the kernel considers the mount congested and reads ahead less.
const CONGESTION: u16 = BACKGROUND_MAX / 4 * 3;

/// Capabilities that are taken whenever the kernel offers them, and why each may be.
const ALWAYS: [u64; 14] = [
    init::ASYNC_READ, // read-ahead of one file in parallel: requests are served in any order anyway
    init::EXPORT_SUPPORT, // lookup answers "." and "..", and numbers are never reused: NFS may export the mount
    init::BIG_WRITES,     // writes of more than a page
    init::DONT_MASK,      // the umask comes with the request, for directories with a default ACL
    init::DO_READDIRPLUS, // entries with attributes,
    init::READDIRPLUS_AUTO, // when the kernel sees that they are used
    init::PARALLEL_DIROPS, // lookups and listings of one directory in parallel: the file system locks for itself
    init::POSIX_ACL,       // the kernel judges ACLs, the file system stores and inherits them
    init::MAX_PAGES,       // requests of IO_MAX instead of 128 KiB
    init::CACHE_SYMLINKS,  // targets never change
    // after one refused OPENDIR the kernel sends no more, nor RELEASEDIR, and keeps listings cached
    init::NO_OPENDIR_SUPPORT,
    // set-id bits are dropped by the file system on write, truncate and chown when the kernel says
    // so; the kernel then need not ask for security.capability before each first write of an inode
    // that it knows to have no such bits
    init::HANDLE_KILLPRIV_V2,
    init::SETXATTR_EXT, // says when setting an ACL clears the set-group-id bit
    init::DIRECT_IO_ALLOW_MMAP, // shared mappings of files that are open for direct I/O
];
// Not taken:
// * AUTO_INVAL_DATA drops a file's cached pages whenever its mtime is new to the kernel. Here the
//   kernel makes every change itself or is notified; and if other clients change files, too, it
//   would still read stale pages when two answers about one file cross.
// * EXPLICIT_INVAL_DATA: a changed size shall still drop cached pages.
// * ABORT_ERROR: ENODEV says as much.
// * ATOMIC_O_TRUNC: the kernel would send OPEN with O_TRUNC before it finds that the file is a
//   running program: the file would be emptied, and then the open refused.
// * SPLICE_*: payloads are copied once, to where they are needed.
// * NO_OPEN_SUPPORT: orphans and deferred errors depend on OPEN.
// * HANDLE_KILLPRIV: V2 is more exact.
// * SECURITY_CTX and CREATE_SUPP_GROUP: extensions that `Filesystem` does not take.
// * PASSTHROUGH, SUBMOUNTS, DAX, HAS_RESEND, ALLOW_IDMAP, REQUEST_TIMEOUT: not needed.

/// What the file system asks the kernel for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wishes {
    pub(crate) writeback_cache: bool,
    /// Other clients change the files, too.
    pub(crate) is_shared: bool,
    pub(crate) io_uring: bool,
}

/// What kernel and file system agreed on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Agreed {
    pub(crate) setxattr_ext: bool,
    /// OPENDIR may be refused.
    pub(crate) no_opendir: bool,
    pub(crate) io_uring: bool,
    /// The kernel knows a notification that makes it look a name up again,
    pub(crate) expires_names: bool,
    /// and one for all names.
    pub(crate) forgets_all_names: bool,
}

impl Agreed {
    /// As a number, for the process that goes on with the mount.
    pub(crate) fn bits(&self) -> u64 {
        let Self { setxattr_ext, no_opendir, io_uring, expires_names, forgets_all_names } = *self;
        let all = [setxattr_ext, no_opendir, io_uring, expires_names, forgets_all_names];
        all.iter().enumerate().map(|(bit, is_set)| u64::from(*is_set) << bit).sum()
    }

    pub(crate) fn from_bits(bits: u64) -> Self {
        let is_set = |bit: u32| bits >> bit & 1 != 0;
        Self {
            setxattr_ext: is_set(0),
            no_opendir: is_set(1),
            io_uring: is_set(2),
            expires_names: is_set(3),
            forgets_all_names: is_set(4),
        }
    }
}

/// Answers the kernel's `INIT`.
pub(crate) fn negotiate(args: RequestArgs<'_>, wishes: Wishes) -> Result<(InitOut, Agreed), Error> {
    let (hello, _) = InitIn::read_from_prefix(args.fixed).map_err(|_| Error::Handshake)?;
    if hello.major != abi::MAJOR || hello.minor < abi::MINOR_MIN {
        return Err(Error::Version { major: hello.major, minor: hello.minor });
    }
    let mut offered = u64::from(hello.flags);
    if offered & init::INIT_EXT != 0 {
        let (ext, _) = InitInExt::read_from_prefix(args.data).map_err(|_| Error::Handshake)?;
        offered |= u64::from(ext.flags2) << 32;
    }
    let mut wanted = init::INIT_EXT | ALWAYS.iter().fold(0, |all, flag| all | flag);
    if wishes.writeback_cache {
        wanted |= init::WRITEBACK_CACHE;
    }
    // Makes a large direct read or write parallel requests. The kernel drops its pages before such
    // a write, and once more only after a synchronous one: `request/direct_write.rs` does the
    // latter for files of which the kernel may have pages. With the write-back cache these may be
    // dirty.
    if !wishes.writeback_cache {
        wanted |= init::ASYNC_DIO;
    }
    if wishes.is_shared {
        wanted |= init::POSIX_LOCKS | init::FLOCK_LOCKS;
    }
    if wishes.io_uring {
        wanted |= init::OVER_IO_URING;
    }
    let taken = offered & wanted;
    let out = InitOut {
        major: abi::MAJOR,
        minor: hello.minor.min(abi::MINOR),
        max_readahead: hello.max_readahead,
        flags: (taken & u64::from(u32::MAX)) as u32,
        flags2: (taken >> 32) as u32,
        max_background: BACKGROUND_MAX,
        congestion_threshold: CONGESTION,
        max_write: IO_MAX as u32,
        time_gran: 1, // nanosecond
        max_pages: (IO_MAX / PAGE) as u16,
        ..InitOut::default()
    };
    let agreed = Agreed {
        setxattr_ext: taken & init::SETXATTR_EXT != 0,
        no_opendir: taken & init::NO_OPENDIR_SUPPORT != 0,
        io_uring: taken & init::OVER_IO_URING != 0,
        expires_names: out.minor >= abi::EXPIRE_ONLY_MINOR,
        forgets_all_names: out.minor >= abi::INC_EPOCH_MINOR,
    };
    Ok((out, agreed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    const PLAIN: Wishes = Wishes { writeback_cache: false, is_shared: false, io_uring: false };

    fn hello(minor: u32, flags: u64) -> Vec<u8> {
        let base = InitIn { major: 7, minor, max_readahead: 131_072, flags: flags as u32 };
        let ext = InitInExt { flags2: (flags >> 32) as u32, unused: [0; 11] };
        [base.as_bytes(), ext.as_bytes()].concat()
    }

    fn answer(minor: u32, flags: u64, wishes: Wishes) -> Result<(InitOut, Agreed), Error> {
        negotiate(RequestArgs::split(abi::op::INIT, false, &hello(minor, flags)), wishes)
    }

    #[test]
    fn only_what_is_offered_and_wanted_is_taken() {
        let offered =
            init::INIT_EXT | init::BIG_WRITES | init::WRITEBACK_CACHE | init::OVER_IO_URING;
        let (out, agreed) = answer(45, offered, PLAIN).expect("a current kernel");
        assert_eq!(u64::from(out.flags), init::INIT_EXT | init::BIG_WRITES);
        assert_eq!(out.flags2, 0);
        assert!(!agreed.setxattr_ext && !agreed.io_uring);

        let all = Wishes { writeback_cache: true, is_shared: true, io_uring: true };
        let (out, agreed) = answer(45, offered, all).expect("a current kernel");
        assert_eq!(u64::from(out.flags), offered & u64::from(u32::MAX));
        assert_eq!(u64::from(out.flags2) << 32, init::OVER_IO_URING);
        assert!(agreed.io_uring);
    }

    #[test]
    fn direct_writes_are_asynchronous_unless_the_kernel_holds_writes_back() {
        for writeback_cache in [false, true] {
            let wishes = Wishes { writeback_cache, ..PLAIN };
            let (out, _) = answer(45, init::ASYNC_DIO, wishes).expect("a current kernel");
            assert_eq!(u64::from(out.flags) & init::ASYNC_DIO != 0, !writeback_cache);
        }
    }

    #[test]
    fn the_older_minor_version_is_used_and_too_old_kernels_are_refused() {
        assert_eq!(answer(31, 0, PLAIN).expect("old but served").0.minor, 31);
        assert_eq!(answer(99, 0, PLAIN).expect("newer than this crate").0.minor, abi::MINOR);
        assert!(matches!(answer(12, 0, PLAIN), Err(Error::Version { minor: 12, .. })));
        let short = [0_u8; 7];
        let args = RequestArgs::split(abi::op::INIT, false, &short);
        assert!(matches!(negotiate(args, PLAIN), Err(Error::Handshake)));
    }
}
