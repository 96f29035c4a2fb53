//! Holds what is on the device against the checksums in memory, both copies of it.

use super::{NEVER, Pages, header, sum_of};
use crate::BadPlace;
use ferry_device::{AlignedBuf, BLOCK_SIZE};

const BLOCK: u64 = BLOCK_SIZE as u64;

impl Pages {
    /// Both copies of the blocks `from..from + count` of the unit in `segment`. A block that one copy alone has lost is mended from
    /// the other. Returns the bytes read.
    pub fn verify(&self, segment: u32, from: u32, count: u32, found: &mut dyn FnMut(BadPlace)) -> u64 {
        let unit = self.unit(segment);
        let (mut broken, mut read) = (Vec::new(), 0);
        {
            // While nothing is written, the device has what memory says.
            let _writing = self.writing.lock();
            let sums = unit.read();
            if from == 0 {
                read += sums.verify(&self.disk, found);
            }
            let mut buf = AlignedBuf::zeroed(count as usize * BLOCK_SIZE);
            let mut one = AlignedBuf::zeroed(BLOCK_SIZE);
            for copy in 0..2 {
                let whole = self.disk.read(sums.page_place(from, copy), &mut buf).is_ok();
                read += u64::from(count) * BLOCK;
                for (block, bytes) in (from..).zip(buf.chunks_exact_mut(BLOCK_SIZE)) {
                    let (place, said) = (sums.page_place(block, copy), sums.of(block));
                    if said == [NEVER; 2] {
                        continue;
                    }
                    if !whole {
                        match self.disk.read(place, &mut one) {
                            Ok(()) => bytes.copy_from_slice(&one),
                            Err(error) => {
                                broken
                                    .push((block, BadPlace::unreadable("home store", place, BLOCK, &error)));
                                continue;
                            }
                        }
                    }
                    let good = match self.is_header(sums.page_place(block, 0)) {
                        true => header::unseal(bytes),
                        false => said.contains(&sum_of(bytes)),
                    };
                    if !good {
                        let detail = format!("the checksum of copy {} does not match", copy + 1);
                        broken.push((
                            block,
                            BadPlace { what: "home store", offset: place, len: BLOCK, detail },
                        ));
                    }
                }
            }
        }
        broken.sort_by_key(|(block, _)| *block);
        for of_block in broken.chunk_by(|a, b| a.0 == b.0) {
            // Reading it mends it, if the other copy is good.
            let other = self.read_one(&unit, segment, of_block[0].0).is_ok();
            for (_, bad) in of_block {
                let fate = if other { "the other copy is good" } else { "the other copy is lost too" };
                found(BadPlace { detail: format!("{}; {fate}", bad.detail), ..bad.clone() });
            }
        }
        read
    }
}
