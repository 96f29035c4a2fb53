//! Changes of blocks that are in memory only, and the objects that are made of them.

use crate::format::{BLOCK, DATA_MAX, Entry, EntryKind};
use crate::runs::{Run, RunMap, Sliced};
use std::collections::HashMap;
use std::sync::Arc;
use twox_hash::XxHash3_128;

/// What was written to a run of blocks.
#[derive(Clone, Debug)]
pub(crate) enum Pending {
    /// Zeros.
    Zeros,
    /// Bytes, from this block of the buffer on.
    Data { buffer: Arc<Vec<u8>>, block: u64 },
}

impl Pending {
    /// The bytes of a run of `len` blocks; `None`: zeros.
    pub fn bytes(&self, len: u64) -> Option<&[u8]> {
        match self {
            Self::Zeros => None,
            Self::Data { buffer, block } => {
                let start = *block as usize * BLOCK;
                Some(&buffer[start..start + len as usize * BLOCK])
            }
        }
    }
}

impl Sliced for Pending {
    fn after(&self, skip: u64) -> Self {
        match self {
            Self::Zeros => Self::Zeros,
            Self::Data { buffer, block } => {
                Self::Data { buffer: Arc::clone(buffer), block: block + skip }
            }
        }
    }

    fn continues(&self, len: u64, next: &Self) -> bool {
        match (self, next) {
            (Self::Zeros, Self::Zeros) => true,
            (Self::Data { buffer, block }, Self::Data { buffer: other, block: at }) => {
                Arc::ptr_eq(buffer, other) && block + len == *at
            }
            _ => false,
        }
    }
}

/// Changes that go to the store together.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub runs: RunMap<Pending>,
    /// Bytes of memory that its data takes.
    pub bytes: usize,
}

impl Batch {
    /// Adds a change, in place of what it overwrites.
    pub fn insert(&mut self, start: u64, len: u64, value: Pending) {
        let data_len = |value: &Pending, len: u64| value.bytes(len).map_or(0, <[u8]>::len);
        self.bytes += data_len(&value, len);
        for run in self.runs.insert(start, len, value) {
            self.bytes -= data_len(&run.value, run.len);
        }
    }
}

/// Which changes become data objects, and where those end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    /// Contiguous data of at least so many blocks goes to data objects.
    pub data_run_min: u64,
    /// A data object has at most so many bytes.
    pub data_max: usize,
    /// Blocks at which a data object ends: the first, and one every so many from there on.
    pub boundary: (u64, u64),
}

impl Layout {
    /// The number of the range between two boundaries that the block is in.
    fn range(&self, block: u64) -> u64 {
        let (first, len) = self.boundary;
        block.checked_sub(first).map_or(0, |behind| 1 + behind / len)
    }
}

/// The contents of an object. A block that is there already is referred to, where no run of the map
/// ends by that: the map of a file whose blocks are all equal would have a run for each of them.
#[derive(Default)]
struct Contents {
    bytes: Vec<u8>,
    known: HashMap<u128, u32>,
}

impl Contents {
    /// Returns the number of a block that is equal to this one, and adds the block if it must. The
    /// run that the block continues goes on at `next` in these contents.
    fn add(&mut self, block: &[u8], next: Option<u32>) -> u32 {
        let end = (self.bytes.len() / BLOCK) as u32;
        if let Some(next) = next
            && next < end
            && self.block(next) == block
        {
            return next;
        }
        let hash = XxHash3_128::oneshot(block);
        let known = *self.known.entry(hash).or_insert(end);
        if next.is_none() && known < end && self.block(known) == block {
            return known;
        }
        self.bytes.extend_from_slice(block);
        end
    }

    fn block(&self, number: u32) -> &[u8] {
        let at = number as usize * BLOCK;
        &self.bytes[at..at + BLOCK]
    }
}

/// What becomes of a batch.
pub(crate) struct Built {
    /// Contents of the data objects.
    pub data: Vec<Vec<u8>>,
    /// Contents of the log object.
    pub contents: Vec<u8>,
    /// Its entries. [`EntryKind::Data`] numbers the data objects from 0.
    pub entries: Vec<Entry>,
}

struct Builder {
    layout: Layout,
    data: Vec<Contents>,
    /// The data object that is being filled, by the range between boundaries.
    filling: HashMap<u64, usize>,
    log: Contents,
    entries: Vec<Entry>,
}

/// Makes objects of changes.
pub(crate) fn build(runs: &RunMap<Pending>, layout: Layout) -> Built {
    let mut builder = Builder {
        layout,
        data: Vec::new(),
        filling: HashMap::new(),
        log: Contents::default(),
        entries: Vec::new(),
    };
    let mut together: Vec<Run<Pending>> = Vec::new();
    for run in runs.iter() {
        if let Some(last) = together.last()
            && (last.end() != run.start || matches!(run.value, Pending::Zeros))
        {
            builder.add(&std::mem::take(&mut together));
        }
        match run.value {
            Pending::Zeros => builder.entry(run.start, run.len, EntryKind::Zeros),
            Pending::Data { .. } => together.push(run),
        }
    }
    builder.add(&together);
    Built {
        data: builder.data.into_iter().map(|data| data.bytes).collect(),
        contents: builder.log.bytes,
        entries: builder.entries,
    }
}

impl Builder {
    /// Adds data without a hole in it.
    fn add(&mut self, together: &[Run<Pending>]) {
        let blocks: u64 = together.iter().map(|run| run.len).sum();
        let apart = blocks >= self.layout.data_run_min;
        for run in together {
            let bytes = run.value.bytes(run.len).unwrap_or_default();
            for (n, block) in bytes.chunks_exact(BLOCK).enumerate() {
                let at = run.start + n as u64;
                let kind = if block.iter().all(|byte| *byte == 0) {
                    EntryKind::Zeros
                } else if apart {
                    self.add_data(at, block)
                } else {
                    let next = self.next(at, None);
                    EntryKind::Here { block: self.log.add(block, next) }
                };
                self.entry(at, 1, kind);
            }
        }
    }

    fn add_data(&mut self, at: u64, block: &[u8]) -> EntryKind {
        let range = self.layout.range(at);
        let full = |data: &Contents| data.bytes.len() + BLOCK > self.layout.data_max.min(DATA_MAX);
        let open = self.filling.get(&range).copied().filter(|n| !full(&self.data[*n]));
        let number = open.unwrap_or_else(|| {
            self.data.push(Contents::default());
            self.filling.insert(range, self.data.len() - 1);
            self.data.len() - 1
        });
        let next = self.next(at, Some(number as u64));
        EntryKind::Data { number: number as u64, block: self.data[number].add(block, next) }
    }

    /// Where in the contents of this data object, or of the log object, the last entry goes on, if
    /// the block continues it.
    fn next(&self, at: u64, data: Option<u64>) -> Option<u32> {
        let last = self.entries.last().filter(|last| last.end() == at)?;
        match (last.value.after(last.len), data) {
            (EntryKind::Here { block }, None) => Some(block),
            (EntryKind::Data { number, block }, Some(data)) if number == data => Some(block),
            _ => None,
        }
    }

    fn entry(&mut self, start: u64, len: u64, value: EntryKind) {
        if let Some(last) = self.entries.last_mut()
            && last.end() == start
            && last.value.continues(last.len, &value)
        {
            last.len += len;
        } else {
            self.entries.push(Entry { start, len, value });
        }
    }
}

impl Sliced for EntryKind {
    fn after(&self, skip: u64) -> Self {
        match *self {
            Self::Zeros => Self::Zeros,
            Self::Here { block } => Self::Here { block: block + skip as u32 },
            Self::Data { number, block } => Self::Data { number, block: block + skip as u32 },
        }
    }

    fn continues(&self, len: u64, next: &Self) -> bool {
        self.after(len) == *next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(blocks: &[u8]) -> Pending {
        let bytes = blocks.iter().flat_map(|byte| vec![*byte; BLOCK]).collect();
        Pending::Data { buffer: Arc::new(bytes), block: 0 }
    }

    fn layout() -> Layout {
        Layout { data_run_min: 4, data_max: DATA_MAX, boundary: (2, 8) }
    }

    #[test]
    fn zeros_and_equal_blocks_are_stored_once() {
        let mut batch = Batch::default();
        batch.insert(0, 3, data(&[1, 0, 1]));
        batch.insert(8, 1, data(&[2]));
        batch.insert(10, 1, data(&[1]));
        batch.insert(20, 100, Pending::Zeros);
        let built = build(&batch.runs, layout());
        assert_eq!(built.contents.len(), 2 * BLOCK);
        assert!(built.data.is_empty());
        let here = |start, block| Entry { start, len: 1, value: EntryKind::Here { block } };
        let zeros = |start, len| Entry { start, len, value: EntryKind::Zeros };
        let expected =
            [here(0, 0), zeros(1, 1), here(2, 0), here(8, 1), here(10, 0), zeros(20, 100)];
        assert_eq!(built.entries, expected);
    }

    #[test]
    fn equal_blocks_end_no_run() {
        let mut batch = Batch::default();
        batch.insert(0, 3, data(&[1, 1, 2]));
        batch.insert(20, 2, data(&[1, 1]));
        batch.insert(30, 2, data(&[1, 2]));
        batch.insert(100, 6, data(&[1, 1, 1, 1, 1, 1]));
        let built = build(&batch.runs, layout());
        let here = |start, len, block| Entry { start, len, value: EntryKind::Here { block } };
        let large = Entry { start: 100, len: 6, value: EntryKind::Data { number: 0, block: 0 } };
        let expected = [here(0, 3, 0), here(20, 2, 0), here(30, 1, 0), here(31, 1, 3), large];
        assert_eq!(built.entries, expected);
    }

    #[test]
    fn large_runs_become_data_objects_that_end_at_boundaries() {
        let mut batch = Batch::default();
        batch.insert(0, 5, data(&[1, 2, 3, 4, 5]));
        batch.insert(5, 1, data(&[6]));
        batch.insert(30, 3, data(&[7, 8, 9]));
        let built = build(&batch.runs, layout());
        assert_eq!(built.data.iter().map(Vec::len).collect::<Vec<_>>(), [2 * BLOCK, 4 * BLOCK]);
        assert_eq!(built.contents.len(), 3 * BLOCK);
        let run =
            |start, len, number| Entry { start, len, value: EntryKind::Data { number, block: 0 } };
        assert_eq!(built.entries[..2], [run(0, 2, 0), run(2, 4, 1)]);
    }

    #[test]
    fn a_batch_counts_the_bytes_that_were_not_overwritten() {
        let mut batch = Batch::default();
        batch.insert(0, 4, data(&[1, 2, 3, 4]));
        batch.insert(1, 1, data(&[5]));
        batch.insert(3, 9, Pending::Zeros);
        assert_eq!(batch.bytes, 3 * BLOCK);
    }
}
