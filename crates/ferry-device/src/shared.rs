//! Words of memory that outlive the process: a file without a name, mapped. A process that has its
//! descriptor finds the words as they were left, at whatever moment the one before was killed.
#![expect(unsafe_code, reason = "words in mapped memory")]

use crate::mapping::Mapping;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

/// The words. Those that nobody has written are 0, and take no memory.
#[derive(Debug)]
pub struct SharedWords {
    mapping: Mapping,
    count: usize,
}

/// The bytes of words.
fn bytes(words: Range<usize>) -> Range<usize> {
    words.start * size_of::<AtomicU64>()..words.end * size_of::<AtomicU64>()
}

impl SharedWords {
    /// So many new words.
    pub fn new(count: usize) -> io::Result<Self> {
        let file = memfd_create("ferry-words", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, bytes(0..count).end as u64)?;
        Self::map(file, count)
    }

    /// The words of a file that another process has made.
    pub fn of(file: OwnedFd) -> io::Result<Self> {
        let file = File::from(file);
        let count = usize::try_from(file.metadata()?.len()).unwrap_or(0) / size_of::<AtomicU64>();
        Self::map(file.into(), count)
    }

    fn map(file: OwnedFd, count: usize) -> io::Result<Self> {
        Ok(Self { mapping: Mapping::new(file, 0, bytes(0..count).end)?, count })
    }

    /// All of them.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: so many are mapped, aligned to a page, for as long as `self` lives. Any bytes are
        // a word, and all that is in the mapping is atomic.
        unsafe { std::slice::from_raw_parts(self.mapping.at().as_ptr().cast(), self.count) }
    }

    /// Brings in the memory of these words, which begin and end with pages. What fails here fails
    /// where the words are used.
    pub fn bring_in(&self, words: Range<usize>) {
        if let Err(error) = self.mapping.bring_in(bytes(words)) {
            tracing::debug!(%error, "memory is not brought in");
        }
    }

    /// Makes these words 0 again, and gives the memory of the whole pages among them back.
    pub fn make_zero(&self, words: Range<usize>) -> io::Result<()> {
        self.mapping.make_zero(bytes(words))
    }

    /// The file, for another process.
    pub fn file(&self) -> io::Result<OwnedFd> {
        self.mapping.file().as_fd().try_clone_to_owned()
    }
}

/// Words that outlive the process. The process that goes on sees each store, and in this order.
pub trait Words {
    /// A word.
    fn get(&self, at: usize) -> u64;
    /// Stores a word.
    fn set(&self, at: usize, value: u64);
    /// Stores a word if it was less.
    fn raise(&self, at: usize, value: u64);
    /// Stores bytes, the first as the lowest ones of the first word. The last word is filled up
    /// with zeros.
    fn set_bytes(&self, at: usize, bytes: &[u8]) {
        words_of(bytes).enumerate().for_each(|(word, value)| self.set(at + word, value));
    }
}

/// Bytes as words.
fn words_of(bytes: &[u8]) -> impl Iterator<Item = u64> {
    let (whole, rest) = bytes.as_chunks::<8>();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let last = (!rest.is_empty()).then_some(last);
    whole.iter().copied().chain(last).map(u64::from_le_bytes)
}

impl Words for SharedWords {
    fn get(&self, at: usize) -> u64 {
        self.words()[at].load(Ordering::Acquire)
    }

    fn set(&self, at: usize, value: u64) {
        self.words()[at].store(value, Ordering::Release);
    }

    fn raise(&self, at: usize, value: u64) {
        self.words()[at].fetch_max(value, Ordering::AcqRel);
    }

    fn set_bytes(&self, at: usize, bytes: &[u8]) {
        let words = &self.words()[at..at + bytes.len().div_ceil(8)];
        let (whole, rest) = bytes.as_chunks::<8>();
        // What is stored next comes behind them.
        for (word, bytes) in words.iter().zip(whole) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        for value in words_of(rest) {
            words[whole.len()].store(value, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
