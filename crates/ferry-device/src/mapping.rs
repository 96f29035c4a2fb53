//! A part of a file without a name, mapped for all processes that have the file.
#![expect(unsafe_code, reason = "memory from mmap(2)")]

use rustix::fs::{FallocateFlags, fallocate};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};

/// The mapping, and the file. The type that uses its bytes says who else may.
#[derive(Debug)]
pub struct Mapping {
    file: OwnedFd,
    from: u64,
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is the struct's own, and the struct looks at none of its bytes.
unsafe impl Send for Mapping {}
// SAFETY: the same.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// `len` bytes of the file from byte `from` on, which is the first of a page.
    pub fn new(file: OwnedFd, from: u64, len: usize) -> io::Result<Self> {
        let (access, how) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
        // SAFETY: a new mapping, which nobody else in this process knows.
        let at = unsafe { mmap(ptr::null_mut(), len, access, how, &file, from) }?;
        let at = NonNull::new(at.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let mapping = Self { file, from, at, len };
        // Most of it is a hole, which a dump of the process would fill.
        mapping.advise(0..len, Advice::LinuxDontDump)?;
        Ok(mapping)
    }

    pub fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// The first byte. All are mapped for as long as `self` lives.
    pub fn at(&self) -> NonNull<u8> {
        self.at
    }

    /// Brings in the memory of these bytes, which begin and end with pages. That takes two thirds
    /// of the time that it takes page by page.
    pub fn bring_in(&self, bytes: Range<usize>) -> io::Result<()> {
        self.advise(bytes, Advice::LinuxPopulateWrite)
    }

    fn advise(&self, bytes: Range<usize>, advice: Advice) -> io::Result<()> {
        assert!(bytes.start <= bytes.end && bytes.end <= self.len, "{bytes:?} are not mapped");
        // SAFETY: these bytes are mapped, and none of the advice here changes one.
        Ok(unsafe { madvise(self.at.add(bytes.start).as_ptr().cast(), bytes.len(), advice) }?)
    }

    /// Makes these bytes 0, and gives the memory of the whole pages among them back.
    pub fn make_zero(&self, bytes: Range<usize>) -> io::Result<()> {
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&self.file, how, self.from + bytes.start as u64, bytes.len() as u64)?)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is the struct's own, and nothing borrows it any more.
        let unmapped = unsafe { munmap(self.at.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "it is mapped");
    }
}
