//! What a process that goes on with the mount of a replica needs of the one before: the version
//! that programs saw last, and the files that they have open (REPLICA-7).

use crate::api::Ino;
use crate::known::{KnownFile, LeftWords, ReplicaVersion};
use ferry_journal::Recovered;
use std::collections::BTreeMap;
use zerocopy::{FromBytes, IntoBytes};

/// What the encoded form begins with; the number is that of the form.
const MAGIC: u64 = u64::from_le_bytes(*b"ferryrp1");
/// Words of the encoded form before the open files.
const HEAD: usize = 8;

/// What is carried from one process to the next.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CarriedReplica {
    /// The number of the volume.
    pub(crate) volume: [u64; 2],
    /// What programs saw last.
    pub(crate) version: ReplicaVersion,
    /// Open files: their handles and the numbers of their inodes, as programs see them.
    pub(crate) files: Vec<(u64, Ino)>,
}

impl CarriedReplica {
    /// What a process has left that was killed. `None`: not all of it had room.
    pub fn left(words: &LeftWords) -> Option<Self> {
        let left = words.known(&Recovered::default(), true)?;
        let files = left.files.iter().map(|file| (file.fh, file.ino)).collect();
        Some(Self { volume: left.volume, version: left.version, files })
    }

    /// The root of the version that programs saw last.
    pub fn root(&self) -> u64 {
        self.version.root
    }

    /// How many files are open.
    pub fn open(&self) -> usize {
        self.files.len()
    }

    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let Self { volume, version, files } = self;
        let ReplicaVersion { timeline, says, root, log } = *version;
        let head: [u64; HEAD] =
            [MAGIC, volume[0], volume[1], timeline, says[0], says[1], root, log];
        let mut words = head.to_vec();
        words.extend(files.iter().flat_map(|(fh, ino)| [*fh, *ino]));
        words.as_bytes().to_vec()
    }

    /// From bytes; `None`: another form, or not whole.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (head, mut rest) = <[u64; HEAD]>::read_from_prefix(bytes).ok()?;
        let [magic, one, other, timeline, low, high, root, log] = head;
        let mut files = Vec::new();
        while !rest.is_empty() {
            let ([fh, ino], behind) = <[u64; 2]>::read_from_prefix(rest).ok()?;
            files.push((fh, ino));
            rest = behind;
        }
        let version = ReplicaVersion { timeline, says: [low, high], root, log };
        (magic == MAGIC).then_some(Self { volume: [one, other], version, files })
    }
}

/// The handles of open files. A number is never 0.
///
/// A close that a process had served when it was killed may come again. So no number comes twice:
/// the upper half counts the files that are opened, in each process from a random number on.
#[derive(Debug, Default)]
pub(crate) struct Handles {
    /// The upper half of the next number.
    next: u32,
    /// By the lower halves of their numbers.
    files: BTreeMap<u32, (u64, Ino)>,
    /// Lower halves that are free, below the highest one.
    free: Vec<u32>,
}

impl Handles {
    /// With the files that are open.
    pub(crate) fn new(next: u32, open: &[(u64, Ino)]) -> Self {
        let files: BTreeMap<u32, _> = open.iter().map(|file| (file.0 as u32, *file)).collect();
        let end = files.last_key_value().map_or(1, |(last, _)| last + 1);
        let free = (1..end).filter(|slot| !files.contains_key(slot)).collect();
        Self { next, files, free }
    }

    /// The number of a file that is open from now on.
    pub(crate) fn add(&mut self, ino: Ino) -> u64 {
        let slot = self.free.pop().unwrap_or(self.files.len() as u32 + 1);
        let fh = u64::from(self.next) << 32 | u64::from(slot);
        self.next = self.next.wrapping_add(1);
        self.files.insert(slot, (fh, ino));
        fh
    }

    /// It is not any more: its inode. `None`: it was not.
    pub(crate) fn remove(&mut self, fh: u64) -> Option<Ino> {
        let slot = fh as u32;
        let (_, ino) = *self.files.get(&slot).filter(|(number, _)| *number == fh)?;
        self.files.remove(&slot);
        self.free.push(slot);
        Some(ino)
    }

    /// All of them.
    pub(crate) fn all(&self) -> Vec<(u64, Ino)> {
        self.files.values().copied().collect()
    }
}

/// What outlives a process that is killed.
pub(crate) fn known_file((fh, ino): (u64, Ino)) -> KnownFile {
    KnownFile { fh, ino, ..KnownFile::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_carried_is_read_as_it_was_written_and_nothing_else_is() {
        let version = ReplicaVersion { timeline: 3, says: [4, 5], root: 6, log: 7 };
        for files in [vec![], vec![(8, 9), (10, 11)]] {
            let carried = CarriedReplica { volume: [1, 2], version, files };
            let bytes = carried.encode();
            assert_eq!(CarriedReplica::decode(&bytes), Some(carried));
            assert_eq!(CarriedReplica::decode(&bytes[..bytes.len() - 1]), None);
            assert_eq!(CarriedReplica::decode(&bytes[8..]), None);
        }
    }

    #[test]
    fn a_handle_closes_its_own_file_once_also_in_the_next_process() {
        let mut before = Handles::new(7, &[]);
        let fhs: Vec<u64> = (0..5).map(|ino| before.add(ino)).collect();
        assert_eq!((before.remove(fhs[1]), before.remove(fhs[1])), (Some(1), None));
        assert_eq!(before.remove(fhs[4]), Some(4));
        // The close may come again when the same process has opened another file.
        let again = before.add(9);
        assert_eq!(before.remove(fhs[4]), None);
        assert_eq!(before.remove(again), Some(9));
        let mut after = Handles::new(1000, &before.all());
        // Two of these have the lower halves of handles that are closed.
        let new: Vec<u64> = (10..14).map(|ino| after.add(ino)).collect();
        assert_eq!((after.remove(fhs[1]), after.remove(fhs[4])), (None, None));
        let mut all = after.all();
        all.sort_unstable_by_key(|(_, ino)| *ino);
        assert_eq!(all[..3], [(fhs[0], 0), (fhs[2], 2), (fhs[3], 3)]);
        assert_eq!(all[3..], [(new[0], 10), (new[1], 11), (new[2], 12), (new[3], 13)]);
        let mut lower: Vec<u32> = all.iter().map(|(fh, _)| *fh as u32).collect();
        lower.sort_unstable();
        assert_eq!(lower, [1, 2, 3, 4, 5, 6, 7], "they are used again");
    }
}
