//! Encodes answers as the bytes that the kernel expects.

use std::fmt;
use std::ops::Deref;
use std::time::Duration;

use ferry_fs::{
    Attr, DirEntry, Entry, Errno, FileLock, Opened, Reply, SharedBytes, Statfs, Timestamp,
};
use zerocopy::IntoBytes;

use crate::abi::{self, fopen, op};

/// The longest validity sent, in seconds: the kernel counts in jiffies, and 136 years are enough.
const VALID_SECS_MAX: u64 = u32::MAX as u64;
/// The block size in attributes, in bytes.
const BLOCK: u32 = 4096;
/// Bytes of the longest answer that is not data.
pub(crate) const SMALL_MAX: usize = size_of::<abi::StatxOut>();
const CREATED: usize = size_of::<abi::EntryOut>() + size_of::<abi::OpenOut>();
const _: () = assert!(CREATED <= SMALL_MAX);

/// What the form of an answer depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AnswerForm {
    pub(crate) opcode: u32,
    /// Bytes of the requester's buffer; 0 for an extended attribute asks for its length only.
    pub(crate) size: u32,
}

/// An answer to be sent.
#[derive(Debug)]
pub(crate) enum AnswerBody {
    /// This many bytes at the start of the output buffer.
    Out(usize),
    /// Bytes outside the output buffer.
    Bytes(AnswerBytes<'static>),
}

/// The body of an answer that is not in the output buffer.
pub(crate) enum AnswerBytes<'a> {
    Borrowed(&'a [u8]),
    Owned(Vec<u8>),
    Shared(SharedBytes),
}

impl AnswerBytes<'_> {
    /// Bytes that can be kept for later; nothing large is copied.
    pub(crate) fn keep(self) -> AnswerBytes<'static> {
        match self {
            AnswerBytes::Borrowed(bytes) => AnswerBytes::Owned(bytes.to_vec()),
            AnswerBytes::Owned(bytes) => AnswerBytes::Owned(bytes),
            AnswerBytes::Shared(bytes) => AnswerBytes::Shared(bytes),
        }
    }
}

impl Deref for AnswerBytes<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            AnswerBytes::Borrowed(bytes) => bytes,
            AnswerBytes::Owned(bytes) => bytes,
            AnswerBytes::Shared(bytes) => bytes,
        }
    }
}

impl fmt::Debug for AnswerBytes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}

fn valid(d: Duration) -> (u64, u32) {
    (d.as_secs().min(VALID_SECS_MAX), d.subsec_nanos())
}

fn attr(a: &Attr) -> abi::Attr {
    abi::Attr {
        ino: a.ino,
        size: a.size,
        blocks: a.blocks,
        atime: a.atime.secs().cast_unsigned(),
        mtime: a.mtime.secs().cast_unsigned(),
        ctime: a.ctime.secs().cast_unsigned(),
        atimensec: a.atime.nanos(),
        mtimensec: a.mtime.nanos(),
        ctimensec: a.ctime.nanos(),
        mode: a.mode,
        nlink: a.nlink,
        uid: a.uid,
        gid: a.gid,
        rdev: a.rdev,
        blksize: BLOCK,
        flags: 0,
    }
}

fn entry_out(e: &Entry) -> abi::EntryOut {
    let (entry_valid, entry_valid_nsec) = valid(e.entry_valid);
    let (attr_valid, attr_valid_nsec) = valid(e.attr_valid);
    abi::EntryOut {
        nodeid: e.attr.map_or(0, |a| a.ino),
        generation: 0, // numbers are never used twice
        entry_valid,
        attr_valid,
        entry_valid_nsec,
        attr_valid_nsec,
        attr: e.attr.as_ref().map(attr).unwrap_or_default(),
    }
}

fn open_out(o: Opened) -> abi::OpenOut {
    let flag = |set: bool, bit: u32| if set { bit } else { 0 };
    let open_flags = flag(o.direct_io, fopen::DIRECT_IO)
        | flag(o.keep_cache, fopen::KEEP_CACHE)
        | flag(o.cache_dir, fopen::CACHE_DIR)
        | flag(o.no_flush, fopen::NOFLUSH)
        | flag(o.parallel_direct_writes, fopen::PARALLEL_DIRECT_WRITES);
    abi::OpenOut { fh: o.fh, open_flags, backing_id: 0 }
}

fn put<T: IntoBytes + zerocopy::Immutable>(out: &mut [u8], value: &T) -> Result<AnswerBody, Errno> {
    let bytes = value.as_bytes();
    out.get_mut(..bytes.len()).ok_or(Errno(libc::EIO))?.copy_from_slice(bytes);
    Ok(AnswerBody::Out(bytes.len()))
}

pub(crate) fn entry(form: AnswerForm, out: &mut [u8], e: &Entry) -> Result<AnswerBody, Errno> {
    // Only a lookup may answer that there is no such name.
    if e.attr.is_none() && form.opcode != op::LOOKUP {
        return Err(Errno(libc::EIO));
    }
    put(out, &entry_out(e))
}

pub(crate) fn attributes(out: &mut [u8], a: &Attr, d: Duration) -> Result<AnswerBody, Errno> {
    let (attr_valid, attr_valid_nsec) = valid(d);
    put(out, &abi::AttrOut { attr_valid, attr_valid_nsec, dummy: 0, attr: attr(a) })
}

/// Attributes, and when the inode was made.
pub(crate) fn statx(
    out: &mut [u8],
    a: &Attr,
    d: Duration,
    born: Timestamp,
) -> Result<AnswerBody, Errno> {
    let (attr_valid, attr_valid_nsec) = valid(d);
    let time = |t: Timestamp| abi::SxTime { sec: t.secs(), nsec: t.nanos(), reserved: 0 };
    let stat = abi::Statx {
        mask: abi::STATX_MASK,
        blksize: BLOCK,
        nlink: a.nlink,
        uid: a.uid,
        gid: a.gid,
        mode: a.mode as u16,
        ino: a.ino,
        size: a.size,
        blocks: a.blocks,
        atime: time(a.atime),
        btime: time(born),
        ctime: time(a.ctime),
        mtime: time(a.mtime),
        rdev_major: a.rdev >> 8 & 0xfff,
        rdev_minor: a.rdev & 0xff | a.rdev >> 12 & 0xf_ff00,
        ..abi::Statx::default()
    };
    put(out, &abi::StatxOut { attr_valid, attr_valid_nsec, flags: 0, spare: [0; 2], stat })
}

pub(crate) fn opened(out: &mut [u8], o: Opened) -> Result<AnswerBody, Errno> {
    put(out, &open_out(o))
}

pub(crate) fn created(
    form: AnswerForm,
    out: &mut [u8],
    e: &Entry,
    o: Opened,
) -> Result<AnswerBody, Errno> {
    entry(form, out, e)?;
    let (_, rest) = out.split_at_mut(size_of::<abi::EntryOut>());
    put(rest, &open_out(o))?;
    Ok(AnswerBody::Out(CREATED))
}

pub(crate) fn count(form: AnswerForm, out: &mut [u8], n: u64) -> Result<AnswerBody, Errno> {
    match form.opcode {
        op::LSEEK => put(out, &abi::LseekOut { offset: n }),
        op::COPY_FILE_RANGE_64 => put(out, &abi::CopyFileRangeOut { bytes_copied: n }),
        _ => {
            let size = u32::try_from(n).map_err(|_| Errno(libc::EIO))?;
            put(out, &abi::WriteOut { size, padding: 0 })
        }
    }
}

pub(crate) fn data(form: AnswerForm, out: &mut [u8], bytes: Vec<u8>) -> Result<AnswerBody, Errno> {
    let len = u32::try_from(bytes.len()).map_err(|_| Errno(libc::EIO))?;
    match form.opcode {
        op::GETXATTR | op::LISTXATTR if form.size == 0 => {
            put(out, &abi::GetxattrOut { size: len, padding: 0 })
        }
        op::GETXATTR | op::LISTXATTR if len > form.size => Err(Errno(libc::ERANGE)),
        op::READ if len > form.size => Err(Errno(libc::EIO)),
        op::IOCTL if len > form.size => Err(Errno(libc::EIO)),
        op::IOCTL => {
            let head = abi::IoctlOut::default();
            let mut answer = Vec::with_capacity(size_of::<abi::IoctlOut>() + bytes.len());
            answer.extend_from_slice(head.as_bytes());
            answer.extend_from_slice(&bytes);
            Ok(AnswerBody::Bytes(AnswerBytes::Owned(answer)))
        }
        _ => Ok(AnswerBody::Bytes(AnswerBytes::Owned(bytes))),
    }
}

pub(crate) fn statfs(out: &mut [u8], s: &Statfs) -> Result<AnswerBody, Errno> {
    put(
        out,
        &abi::StatfsOut {
            blocks: s.blocks,
            bfree: s.blocks_free,
            bavail: s.blocks_available,
            files: s.files,
            ffree: s.files_free,
            bsize: s.block_size,
            namelen: ferry_fs::NAME_MAX as u32,
            frsize: s.block_size,
            padding: 0,
            spare: [0; 6],
        },
    )
}

pub(crate) fn lock(out: &mut [u8], l: &FileLock) -> Result<AnswerBody, Errno> {
    let lk = abi::Lock { start: l.start, end: l.end, kind: l.kind.cast_unsigned(), pid: l.pid };
    put(out, &abi::LkOut { lk })
}

/// Encodes the answer of a request that was parked.
pub(crate) fn reply(form: AnswerForm, out: &mut [u8], reply: Reply) -> Result<AnswerBody, Errno> {
    match reply {
        Reply::Empty => Ok(AnswerBody::Out(0)),
        Reply::Entry(e) => entry(form, out, &e),
        Reply::Attr(a, d) => attributes(out, &a, d),
        Reply::Statx(a, d, born) => statx(out, &a, d, born),
        Reply::Opened(o) => opened(out, o),
        Reply::Created(e, o) => created(form, out, &e, o),
        Reply::Count(n) => count(form, out, n),
        Reply::Data(bytes) => data(form, out, bytes),
        Reply::Shared(bytes) if bytes.len() > form.size as usize => Err(Errno(libc::EIO)),
        Reply::Shared(bytes) => Ok(AnswerBody::Bytes(AnswerBytes::Shared(bytes))),
        Reply::Dir(entries) => {
            let size = usize::try_from(form.size).unwrap_or(0);
            let mut bytes = vec![0; size];
            let mut list = DirListing::new(&mut bytes, form.opcode == op::READDIRPLUS);
            let fits = entries.iter().all(|e| list.push(e));
            let used = list.used;
            bytes.truncate(used);
            // The file system has counted a lookup of each entry: none can be left out.
            if fits {
                Ok(AnswerBody::Bytes(AnswerBytes::Owned(bytes)))
            } else {
                Err(Errno(libc::EIO))
            }
        }
        Reply::Statfs(s) => statfs(out, &s),
        Reply::Lock(l) => lock(out, &l),
    }
}

/// A directory listing under construction.
pub(crate) struct DirListing<'a> {
    out: &'a mut [u8],
    pub(crate) used: usize,
    plus: bool,
}

impl<'a> DirListing<'a> {
    pub(crate) fn new(out: &'a mut [u8], plus: bool) -> Self {
        Self { out, used: 0, plus }
    }

    /// Appends an entry; `false` if there is no room for it.
    pub(crate) fn push(&mut self, e: &DirEntry) -> bool {
        let head = if self.plus { size_of::<abi::EntryOut>() } else { 0 };
        let fixed = head + size_of::<abi::Dirent>();
        let len = (fixed + e.name.len()).next_multiple_of(8);
        let Some(slot) = self.out.get_mut(self.used..).and_then(|rest| rest.get_mut(..len)) else {
            return false;
        };
        if self.plus {
            // Node 0 is "not looked up": the kernel then takes the name and type alone.
            let entry = e.entry.as_ref().map(entry_out).unwrap_or_default();
            slot[..head].copy_from_slice(entry.as_bytes());
        }
        let dirent = abi::Dirent {
            ino: e.ino,
            off: e.cookie,
            namelen: e.name.len() as u32,
            kind: (e.kind & libc::S_IFMT) >> 12,
        };
        slot[head..fixed].copy_from_slice(dirent.as_bytes());
        slot[fixed..fixed + e.name.len()].copy_from_slice(&e.name);
        slot[fixed + e.name.len()..].fill(0);
        self.used += len;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dir_entry(name: &[u8]) -> DirEntry {
        DirEntry { name: name.into(), ino: 7, kind: libc::S_IFREG, cookie: 3, entry: None }
    }

    #[test]
    fn a_listing_pads_to_eight_bytes_and_stops_when_full() {
        let mut out = [0xff_u8; 64];
        let mut list = DirListing::new(&mut out, false);
        assert!(list.push(&dir_entry(b"abc")));
        assert_eq!(list.used, 32);
        assert!(list.push(&dir_entry(b"abcdefgh")));
        assert_eq!(list.used, 64);
        assert!(!list.push(&dir_entry(b"x")));
        assert_eq!(&out[24..32], b"abc\0\0\0\0\0");
        assert_eq!(out[16], 3, "the name's length");
        assert_eq!(out[20], 8, "a regular file's type");
    }

    #[test]
    fn an_endless_validity_is_cut_to_what_the_kernel_can_count() {
        let mut out = [0_u8; SMALL_MAX];
        let e = Entry { attr: None, entry_valid: Duration::MAX, attr_valid: Duration::ZERO };
        entry(AnswerForm { opcode: op::LOOKUP, size: 0 }, &mut out, &e)
            .expect("a negative entry is an answer");
        assert_eq!(out[..8], [0; 8], "node 0");
        assert_eq!(out[16..24], u64::from(u32::MAX).to_ne_bytes());
        assert!(entry(AnswerForm { opcode: op::MKDIR, size: 0 }, &mut out, &e).is_err());
    }

    #[test]
    fn an_attribute_longer_than_the_buffer_is_erange_and_size_zero_asks_for_the_length() {
        let mut out = [0_u8; SMALL_MAX];
        let form = |size| AnswerForm { opcode: op::GETXATTR, size };
        assert_eq!(data(form(2), &mut out, vec![1; 3]).expect_err("too long"), Errno(libc::ERANGE));
        assert!(
            matches!(data(form(3), &mut out, vec![1; 3]), Ok(AnswerBody::Bytes(b)) if *b == [1; 3])
        );
        assert!(matches!(data(form(0), &mut out, vec![1; 3]), Ok(AnswerBody::Out(8))));
        assert_eq!(out[0], 3);
    }
}
