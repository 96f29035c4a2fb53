//! What a process has left in its [`SharedBuffers`](crate::SharedBuffers).

use crate::buffer::AlignedBuf;
use crate::shared_buffers::{SHARED_BUFFERS_BYTES, SLOT_BYTES, SLOTS_AT};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

/// Buffers of a process that has ended.
#[derive(Debug)]
pub struct LeftBuffers {
    file: File,
    from: u64,
}

impl LeftBuffers {
    /// At the end of this file.
    pub fn of(file: OwnedFd) -> io::Result<Self> {
        let file = File::from(file);
        let from = file.metadata()?.len().checked_sub(SHARED_BUFFERS_BYTES as u64);
        Ok(Self { file, from: from.ok_or(io::ErrorKind::InvalidData)? })
    }

    /// `len` bytes of each buffer that was to be written to `offset`: one may be what was written
    /// there earlier.
    pub fn that_go_to(&self, offset: u64, len: usize) -> io::Result<Vec<AlignedBuf>> {
        let mut heads = vec![0; SLOTS_AT];
        self.read(&mut heads, 0)?;
        let sought = (offset + 1).to_ne_bytes();
        let heads = heads.chunks_exact(sought.len()).enumerate();
        let found = heads.filter(|(_, head)| *head == sought && len <= SLOT_BYTES);
        let read = |(number, _)| {
            let mut buf = AlignedBuf::zeroed(len);
            self.read(&mut buf, SLOTS_AT + number * SLOT_BYTES)?;
            Ok(buf)
        };
        found.map(read).collect()
    }

    fn read(&self, out: &mut [u8], at: usize) -> io::Result<()> {
        self.file.read_exact_at(out, self.from + at as u64)
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "tests may unwrap")]
mod tests {
    use super::*;
    use crate::buffer::BLOCK_SIZE;
    use crate::shared::SharedWords;
    use crate::shared_buffers::{SLOTS, SharedBuffers};

    #[test]
    fn the_next_process_finds_a_buffer_by_where_it_goes() {
        let words = SharedWords::new(512).unwrap();
        let buffers = SharedBuffers::behind(words.file().unwrap()).unwrap();
        let left = LeftBuffers::of(words.file().unwrap()).unwrap();
        let mut all = Vec::new();
        for (number, blocks) in [1, 3, 1040, 7].into_iter().enumerate() {
            let mut buf = AlignedBuf::shared(&buffers, blocks * BLOCK_SIZE).unwrap();
            buf.fill(number as u8 + 1);
            buf.goes_to(number as u64 * 4096);
            all.push(buf);
        }
        let found = |offset, len| left.that_go_to(offset, len).unwrap();
        for (number, buf) in all.iter().enumerate() {
            let found = found(number as u64 * 4096, buf.len());
            assert_eq!(found.len(), 1);
            assert_eq!(found[0][..], buf[..]);
        }
        assert!(found(4 * 4096, 4096).is_empty());
        assert!(found(0, SLOT_BYTES + BLOCK_SIZE).is_empty());
        // Two that went to the same offset, one after the other.
        all[3].goes_to(0);
        assert_eq!(found(0, 4096).len(), 2);
    }

    #[test]
    fn each_slot_belongs_to_one_buffer_and_comes_back() {
        let words = SharedWords::new(512).unwrap();
        let buffers = SharedBuffers::behind(words.file().unwrap()).unwrap();
        assert!(AlignedBuf::shared(&buffers, SLOT_BYTES + BLOCK_SIZE).is_none());
        for round in 0..2 {
            let mut all: Vec<_> =
                (0..SLOTS).map(|_| AlignedBuf::shared(&buffers, BLOCK_SIZE).unwrap()).collect();
            assert!(AlignedBuf::shared(&buffers, BLOCK_SIZE).is_none(), "{round}");
            for (number, buf) in all.iter_mut().enumerate() {
                buf.fill(number as u8);
            }
            for (number, buf) in all.iter().enumerate() {
                assert!(buf.iter().all(|byte| *byte == number as u8), "{number}");
            }
        }
        drop(AlignedBuf::shared(&buffers, SLOT_BYTES));
    }
}
