//! Words of memory that outlive the process: a file without a name, mapped. A process that has its
//! descriptor finds the words as they were left, at whatever moment the one before was killed.
#![expect(unsafe_code, reason = "memory from mmap(2)")]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// The words. Those that nobody has written are 0, and take no memory.
#[derive(Debug)]
pub struct SharedWords {
    file: OwnedFd,
    at: NonNull<AtomicU64>,
    count: usize,
}

// SAFETY: the mapping is the struct's own, and all that is in it is atomic.
unsafe impl Send for SharedWords {}
// SAFETY: the same.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// So many new words.
    pub fn new(count: usize) -> io::Result<Self> {
        let file = memfd_create("ferry-words", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, (count * size_of::<AtomicU64>()) as u64)?;
        Self::map(file, count)
    }

    /// The words of a file that another process has made.
    pub fn of(file: OwnedFd) -> io::Result<Self> {
        let file = File::from(file);
        let count = usize::try_from(file.metadata()?.len()).unwrap_or(0) / size_of::<AtomicU64>();
        Self::map(file.into(), count)
    }

    fn map(file: OwnedFd, count: usize) -> io::Result<Self> {
        let (access, how) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
        let len = count * size_of::<AtomicU64>();
        // SAFETY: a new mapping, which nobody else in this process knows.
        let at = unsafe { mmap(ptr::null_mut(), len, access, how, &file, 0) }?;
        let at = NonNull::new(at.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { file, at, count })
    }

    /// All of them.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: so many are mapped, aligned to a page, for as long as `self` lives. Any bytes are
        // a word.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.count) }
    }

    /// The file, for another process.
    pub fn file(&self) -> io::Result<OwnedFd> {
        self.file.as_fd().try_clone_to_owned()
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        let len = self.count * size_of::<AtomicU64>();
        // SAFETY: the mapping is the struct's own, and nothing borrows it any more.
        let unmapped = unsafe { munmap(self.at.as_ptr().cast(), len) };
        debug_assert!(unmapped.is_ok(), "it is mapped");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn another_mapping_of_the_file_has_the_same_words() {
        let words = SharedWords::new(1 << 20).expect("memory");
        words.words()[(1 << 20) - 1].store(5, Ordering::Release);
        let other = SharedWords::of(words.file().expect("a descriptor")).expect("it is mapped");
        drop(words);
        assert_eq!(other.words().len(), 1 << 20);
        assert_eq!(other.words()[(1 << 20) - 1].load(Ordering::Acquire), 5);
        assert_eq!(other.words()[0].load(Ordering::Acquire), 0);
    }
}
