//! Random operations against a byte vector.

use crate::file::tests::*;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Op {
    Write(u64, usize),
    Append(usize),
    Truncate(u64),
    Allocate(u64, u64, bool),
    Punch(u64, u64),
    Zero(u64, u64, bool),
    Read(u64, usize),
    Seek(u64),
    WriteBack,
    WriteBackAll,
    Evict,
    Clean,
    Reopen,
    Crash,
}

/// Offsets gather at the edges of blocks and windows.
fn offset(max: u64) -> impl Strategy<Value = u64> {
    prop_oneof![
        0..max,
        (0..max / BLOCK).prop_map(|b| b * BLOCK),
        (1..max / BLOCK).prop_map(|b| b * BLOCK - 1),
        0_u64..3000,
        Just(crate::extents::WINDOW_BLOCKS * BLOCK - 5000),
    ]
}

fn len() -> impl Strategy<Value = usize> {
    prop_oneof![1_usize..300, 1_usize..20_000, Just(4096), Just(16_384), 1_usize..200_000]
}

fn op() -> impl Strategy<Value = Op> {
    const MAX: u64 = 5 << 20;
    prop_oneof![
        6 => (offset(MAX), len()).prop_map(|(o, l)| Op::Write(o, l)),
        3 => len().prop_map(Op::Append),
        2 => offset(MAX).prop_map(Op::Truncate),
        1 => (offset(MAX), len(), any::<bool>()).prop_map(|(o, l, k)| Op::Allocate(o, l as u64, k)),
        2 => (offset(MAX), len()).prop_map(|(o, l)| Op::Punch(o, l as u64)),
        1 => (offset(MAX), len(), any::<bool>()).prop_map(|(o, l, k)| Op::Zero(o, l as u64, k)),
        4 => (offset(MAX), len()).prop_map(|(o, l)| Op::Read(o, l)),
        1 => offset(MAX).prop_map(Op::Seek),
        3 => Just(Op::WriteBack),
        1 => Just(Op::WriteBackAll),
        2 => Just(Op::Evict),
        1 => Just(Op::Clean),
        1 => Just(Op::Reopen),
        1 => Just(Op::Crash),
    ]
}

struct Run {
    volume: Volume,
    model: Vec<u8>,
    /// What the journal has after the last whole write-back: what a crash leaves when nothing was
    /// changed since.
    synced: Option<Vec<u8>>,
    seed: u64,
}

impl Run {
    fn file(&self) -> Arc<Inode> {
        self.volume.inodes.inode(7).unwrap().unwrap()
    }

    fn write(&mut self, offset: u64, len: usize) {
        self.seed += 1;
        let data = pattern(self.seed, len);
        self.volume.write(&self.file(), offset, &data);
        let end = offset as usize + len;
        if self.model.len() < end {
            self.model.resize(end, 0);
        }
        self.model[offset as usize..end].copy_from_slice(&data);
        self.synced = None;
    }

    fn zero(&mut self, from: u64, len: u64) {
        let to = ((from + len) as usize).min(self.model.len());
        if (from as usize) < to {
            self.model[from as usize..to].fill(0);
        }
        self.synced = None;
    }

    fn allocate(&mut self, mode: i32, offset: u64, len: u64, keep: bool) {
        let mode = mode | if keep { libc::FALLOC_FL_KEEP_SIZE } else { 0 };
        self.volume.store.fallocate(&self.file(), mode, offset, len, &mut |_| ()).unwrap();
        if !keep && self.model.len() < (offset + len) as usize {
            self.model.resize((offset + len) as usize, 0);
        }
        self.synced = None;
    }

    fn apply(&mut self, op: &Op) {
        let file = self.file();
        let store = Arc::clone(&self.volume.store);
        match *op {
            Op::Write(offset, len) => self.write(offset, len),
            Op::Append(len) => {
                let data = pattern(self.seed, len);
                let end = store.write(&file, At::End, &data, Touch::Nothing).unwrap();
                self.model.extend_from_slice(&data);
                assert_eq!(end, self.model.len() as u64);
                self.synced = None;
            }
            Op::Truncate(size) => {
                store.set_size(&file, size, &mut |_| ()).unwrap();
                self.model.resize(size as usize, 0);
                self.synced = None;
            }
            Op::Allocate(offset, len, keep) => self.allocate(0, offset, len, keep),
            Op::Punch(offset, len) => {
                self.zero(offset, len);
                self.allocate(libc::FALLOC_FL_PUNCH_HOLE, offset, len, true);
            }
            Op::Zero(offset, len, keep) => {
                self.zero(offset, len);
                self.allocate(libc::FALLOC_FL_ZERO_RANGE, offset, len, keep);
            }
            Op::Read(offset, len) => {
                let from = (offset as usize).min(self.model.len());
                let to = (from + len).min(self.model.len());
                assert!(
                    self.volume.read(&file, offset, len) == self.model[from..to],
                    "read at {offset}+{len}"
                );
            }
            Op::Seek(offset) => self.seek(&file, offset),
            Op::WriteBack | Op::WriteBackAll => {
                let seq = if matches!(op, Op::WriteBack) {
                    store.write_back(&file)
                } else {
                    store.write_back_all()
                };
                seq.unwrap();
                assert!(!store.is_dirty(&file));
                self.volume.check();
                self.synced = Some(self.model.clone());
            }
            Op::Evict => self.volume.evict(),
            Op::Clean => {
                store.clean_once().unwrap();
                self.volume.check();
            }
            Op::Reopen => {
                self.volume.reopen(true);
                self.synced = Some(self.model.clone());
            }
            Op::Crash => {
                if let Some(synced) = self.synced.clone() {
                    self.volume.reopen(false);
                    assert!(synced == self.model);
                }
            }
        }
        assert_eq!(self.file().state.read().rec.size, self.model.len() as u64);
    }

    /// What is said to be a hole must be zeros, and the answers must lie where they may.
    fn seek(&self, file: &Arc<Inode>, offset: u64) {
        let (size, store) = (self.model.len() as u64, &self.volume.store);
        if offset >= size {
            assert_eq!(
                store.seek(file, offset, libc::SEEK_DATA).unwrap_err().errno(),
                Errno(libc::ENXIO)
            );
            return;
        }
        let data = store.seek(file, offset, libc::SEEK_DATA).unwrap_or(size);
        assert!(
            data >= offset && self.model[offset as usize..data as usize].iter().all(|b| *b == 0)
        );
        let hole = store.seek(file, offset, libc::SEEK_HOLE).unwrap();
        assert!(hole >= offset && hole <= size && (hole == offset) == (data != offset));
    }
}

fn run(ops: &[Op], segment_len: u64, cache: usize) {
    let volume = Volume::new(((64 << 20) / segment_len) as u32, segment_len, cache, false);
    volume.create(7);
    let mut run = Run { volume, model: Vec::new(), synced: None, seed: 0 };
    for op in ops {
        run.apply(op);
    }
    run.volume.evict();
    assert!(run.volume.read(&run.file(), 0, run.model.len() + 1) == run.model);
    run.volume.reopen(true);
    assert!(run.volume.read(&run.file(), 0, run.model.len() + 1) == run.model);
    run.volume.remove(7);
    run.volume.store.close().unwrap();
    run.volume.check();
    assert_eq!(run.volume.store.table.used(), (0, 0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, max_shrink_iters: 400, ..ProptestConfig::default() })]

    #[test]
    fn a_file_is_what_was_written(ops in prop::collection::vec(op(), 1..60)) {
        run(&ops, 256 << 10, 64 << 20);
    }

    #[test]
    fn a_file_is_what_was_written_with_a_tiny_cache(ops in prop::collection::vec(op(), 1..60)) {
        run(&ops, 1 << 20, 256 << 10);
    }
}
