//! Contents of small files, cached under leases: written here, or read.
//!
//! * CONTENTS-1: contents are cached only as a whole, of an inode under a lease of either kind.
//!   Code that drops the inode, or its attributes because it changes, drops the contents, too.
//! * CONTENTS-2: only small files are cached, and a bounded sum of all. Beyond it the least
//!   recently used are evicted.

use crate::rt::collections::HashMap;

use ferry_fs::Ino;

/// Bytes of the largest file whose contents are cached.
pub(super) const CONTENTS_MAX: u64 = 256 << 10;
/// Bytes of memory for all of them.
pub(super) const CONTENTS_TOTAL_MAX: usize = 256 << 20;
/// An eviction leaves this many bytes.
const LEFT: usize = CONTENTS_TOTAL_MAX / 4 * 3;

#[derive(Debug)]
struct File {
    bytes: Vec<u8>,
    /// When it was used last, as uses are counted.
    used: u64,
}

/// The contents of all files that are cached.
#[derive(Debug, Default)]
pub(super) struct Contents {
    files: HashMap<Ino, File>,
    /// Memory that they take.
    bytes: usize,
    uses: u64,
}

impl Contents {
    /// Memory that they take, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// This is all that the file contains.
    pub(super) fn set(&mut self, ino: Ino, bytes: Vec<u8>) {
        self.drop(ino);
        if bytes.len() as u64 > CONTENTS_MAX {
            return;
        }
        self.uses += 1;
        self.bytes += bytes.capacity();
        self.files.insert(ino, File { bytes, used: self.uses });
        self.thin();
    }

    /// Nothing is known of it any more.
    pub(super) fn drop(&mut self, ino: Ino) {
        self.bytes -= self.files.remove(&ino).map_or(0, |file| file.bytes.capacity());
    }

    /// Nothing is known but of these.
    pub(super) fn retain(&mut self, of: impl Fn(Ino) -> bool) {
        self.files.retain(|ino, _| of(*ino));
        self.bytes = self.files.values().map(|file| file.bytes.capacity()).sum();
    }

    /// Reads what a file contains, if that is known.
    pub(super) fn read(&mut self, ino: Ino, offset: u64, out: &mut [u8]) -> Option<usize> {
        let File { bytes, used } = self.files.get_mut(&ino)?;
        self.uses += 1;
        *used = self.uses;
        let start = bytes.len().min(usize::try_from(offset).unwrap_or(usize::MAX));
        let len = out.len().min(bytes.len() - start);
        out[..len].copy_from_slice(&bytes[start..start + len]);
        Some(len)
    }

    /// Changes what a file contains, if that is known; `end` is how far the change goes.
    pub(super) fn edit(&mut self, ino: Ino, end: u64, edit: impl FnOnce(&mut Vec<u8>)) {
        if end > CONTENTS_MAX {
            return self.drop(ino);
        }
        let Some(File { bytes, used }) = self.files.get_mut(&ino) else { return };
        self.uses += 1;
        *used = self.uses;
        let before = bytes.capacity();
        edit(bytes);
        self.bytes = self.bytes - before + bytes.capacity();
        self.thin();
    }

    /// Those used longest ago go, where it is too much.
    fn thin(&mut self) {
        if self.bytes <= CONTENTS_TOTAL_MAX {
            return;
        }
        let mut all: Vec<(u64, Ino)> =
            self.files.iter().map(|(ino, file)| (file.used, *ino)).collect();
        all.sort_unstable();
        for (_, ino) in all {
            if self.bytes <= LEFT {
                break;
            }
            self.drop(ino);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn least_recently_used_contents_are_evicted() {
        let mut contents = Contents::default();
        let files = (CONTENTS_TOTAL_MAX / CONTENTS_MAX as usize) as Ino;
        for ino in 0..files {
            contents.set(ino, vec![ino as u8; CONTENTS_MAX as usize]);
        }
        assert_eq!(contents.bytes(), CONTENTS_TOTAL_MAX);
        let mut out = [0; 20];
        assert_eq!(contents.read(0, 0, &mut out), Some(20));
        contents.set(files, vec![7; 100]);
        assert!(contents.bytes() <= LEFT);
        assert_eq!(contents.read(0, CONTENTS_MAX - 10, &mut out), Some(10), "it was just used");
        assert_eq!(contents.read(files, 90, &mut out), Some(10));
        assert_eq!(&out[..10], [7; 10]);
        for (ino, is_cached) in [(1, false), (files / 4 - 1, false), (files / 4 + 5, true)] {
            assert_eq!(contents.read(ino, 0, &mut out).is_some(), is_cached, "{ino}");
        }
    }

    #[test]
    fn cached_content_bytes_are_counted() {
        let mut contents = Contents::default();
        contents.set(1, Vec::new());
        for end in (1000..=CONTENTS_MAX).step_by(1000) {
            contents.edit(1, end, |bytes| bytes.resize(end as usize, 1));
            let taken: usize = contents.files.values().map(|file| file.bytes.capacity()).sum();
            assert_eq!(contents.bytes(), taken);
        }
        contents.edit(1, CONTENTS_MAX + 1, |_| unreachable!("it is too long"));
        contents.set(2, vec![0; CONTENTS_MAX as usize + 1]);
        assert_eq!((contents.bytes(), contents.files.len()), (0, 0));
        contents.set(3, vec![3; 10]);
        contents.set(3, vec![3; 20]);
        contents.set(4, vec![4; 10]);
        contents.retain(|ino| ino == 3);
        assert_eq!((contents.bytes(), contents.read(3, 0, &mut [0; 30])), (20, Some(20)));
        contents.drop(3);
        assert_eq!(contents.bytes(), 0);
    }
}
