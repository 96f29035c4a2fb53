//! Reads blocks of the device, many at once where they are wanted one after the other.

use ferry_device::{AlignedBuf, BlockDevice};
use ferry_fs::keys::BLOCK;
use std::io;
use std::sync::Arc;

/// Blocks read at once at most, and how far behind the last ones the next may be to count as one
/// after the other.
pub(crate) const READ_BLOCKS: u64 = 256;

/// A block that is not what was written, and has no other copy that is.
pub(crate) struct Unreadable {
    /// Which of those that were wanted.
    pub(crate) block: u64,
    /// What is wrong with it.
    pub(crate) what: String,
}

/// Reads through one buffer.
pub(crate) struct Reader {
    device: Arc<dyn BlockDevice>,
    /// Nearly every block is going to be read.
    all: bool,
    end: u64,
    buffer: AlignedBuf,
    /// First block in `buffer`, and how many are.
    from: u64,
    len: u64,
    failed: Option<u64>,
}

impl Reader {
    /// `all`: nearly every block is going to be read.
    pub(crate) fn new(device: &Arc<dyn BlockDevice>, all: bool) -> Self {
        Self {
            device: device.clone(),
            all,
            end: device.capacity() / BLOCK,
            buffer: AlignedBuf::zeroed(BLOCK as usize),
            from: 0,
            len: 0,
            failed: None,
        }
    }

    /// The block is there and has this checksum.
    pub(crate) fn matches(&mut self, dev: u64, crc: u32) -> bool {
        let read = self.blocks(dev, 1).map(crc32c::crc32c);
        let matches = read.as_ref().is_ok_and(|read| *read == crc) || self.elsewhere(dev, crc);
        if !matches && read.is_err() {
            self.failed = Some(dev);
        }
        matches
    }

    /// Another copy of the device has the block with this checksum.
    pub(crate) fn elsewhere(&self, dev: u64, crc: u32) -> bool {
        let mut one = AlignedBuf::zeroed(BLOCK as usize);
        self.device.read_matching(dev * BLOCK, &mut one, &|bytes| crc32c::crc32c(bytes) == crc)
    }

    /// The last attempt to read this block failed.
    pub(crate) fn failed(&self, dev: u64) -> bool {
        self.failed == Some(dev)
    }

    /// The contents of up to [`READ_BLOCKS`] blocks.
    pub(crate) fn blocks(&mut self, dev: u64, count: u64) -> io::Result<&[u8]> {
        let held = self.from..self.from + self.len;
        if !(held.contains(&dev) && dev + count <= held.end) {
            let next = self.all && (held.start..=held.end + READ_BLOCKS).contains(&dev);
            let ahead = READ_BLOCKS.min(self.end.saturating_sub(dev));
            // A bad block behind those that are wanted is not theirs.
            if !(next && ahead > count && self.load(dev, ahead).is_ok()) {
                self.load(dev, count)?;
            }
        }
        let at = ((dev - self.from) * BLOCK) as usize;
        Ok(&self.buffer[at..at + (count * BLOCK) as usize])
    }

    /// The contents of up to [`READ_BLOCKS`] blocks that have these checksums.
    pub(crate) fn verified(&mut self, dev: u64, crcs: &[u32]) -> Result<Vec<u8>, Unreadable> {
        let count = crcs.len() as u64;
        if dev.checked_add(count).is_none_or(|end| end > self.end) {
            return Err(Unreadable { block: 0, what: "it is said to be behind the volume".into() });
        }
        let (mut bytes, error) = match self.blocks(dev, count) {
            Ok(bytes) => (bytes.to_vec(), None),
            Err(error) => (vec![0; crcs.len() * BLOCK as usize], Some(error)),
        };
        for (at, (found, crc)) in (0..).zip(bytes.chunks_exact_mut(BLOCK as usize).zip(crcs)) {
            let wanted = |bytes: &[u8]| crc32c::crc32c(bytes) == *crc;
            if error.is_none() && wanted(found) {
                continue;
            }
            let mut one = AlignedBuf::zeroed(BLOCK as usize);
            let address = (dev + at) * BLOCK;
            let alone = self.device.read(address, &mut one).is_ok() && wanted(&one);
            if !alone && !self.device.read_matching(address, &mut one, &wanted) {
                let what = error.map_or("the checksum does not match".into(), |e| e.to_string());
                return Err(Unreadable { block: at, what });
            }
            found.copy_from_slice(&one);
        }
        Ok(bytes)
    }

    fn load(&mut self, dev: u64, blocks: u64) -> io::Result<()> {
        let bytes = (blocks * BLOCK) as usize;
        if self.buffer.len() != bytes {
            self.buffer = AlignedBuf::zeroed(bytes);
        }
        self.len = 0;
        self.device.read(dev * BLOCK, &mut self.buffer)?;
        (self.from, self.len) = (dev, blocks);
        Ok(())
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "tests may unwrap")]
mod tests {
    use super::*;
    use ferry_device::MemDevice;

    #[test]
    fn the_reader_returns_the_devices_blocks_in_any_order() {
        let device: Arc<dyn BlockDevice> = Arc::new(MemDevice::new(1000 * BLOCK));
        for block in 0..1000 {
            let mut buf = AlignedBuf::zeroed(BLOCK as usize);
            buf[..8].copy_from_slice(&u64::to_le_bytes(block));
            device.write(block * BLOCK, &buf).unwrap();
        }
        for all in [false, true] {
            let mut reader = Reader::new(&device, all);
            for (dev, count) in [
                (0, 1),
                (1, 3),
                (2, 250),
                (255, 2),
                (600, 1),
                (601, 1),
                (999, 1),
                (998, 2),
                (3, 256),
            ] {
                let bytes = reader.blocks(dev, count).unwrap();
                assert_eq!(bytes.len() as u64, count * BLOCK);
                for (i, block) in bytes.chunks_exact(BLOCK as usize).enumerate() {
                    assert_eq!(block[..8], u64::to_le_bytes(dev + i as u64), "{dev} {count}");
                }
            }
            assert!(reader.blocks(1000, 1).is_err() && reader.blocks(999, 2).is_err());
            assert!(!reader.matches(1000, 0) && reader.failed(1000) && !reader.failed(1));
        }
    }
}
