//! A file that workloads read and write: one that is open on any mounted path, or in process.

use rustix::fs::FallocateFlags;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// An open file. All of it may be called from many threads at once.
pub trait Target: Sync {
    /// Reads up to `out.len()` bytes at `offset`; fewer only at the end of the file.
    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<usize>;
    /// Writes all of `data` at `offset`, by one call.
    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()>;
    /// Truncates or extends.
    fn set_len(&self, len: u64) -> io::Result<()>;
    /// Makes a hole.
    fn punch(&self, offset: u64, len: u64) -> io::Result<()>;
}

impl Target for File {
    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, out, offset)
    }

    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        match FileExt::write_at(self, data, offset)? {
            n if n == data.len() => Ok(()),
            n => Err(io::Error::other(format!("only {n} of {} bytes were written", data.len()))),
        }
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        File::set_len(self, len)
    }

    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(self, hole, offset, len)?)
    }
}
