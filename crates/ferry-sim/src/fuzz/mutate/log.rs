//! The log: blocks, their headers, and whole records that are read, changed, and written with all
//! their checksums right.

use super::{read, replace, scramble, write};
use crate::device::{SimDevice, SimRng};
use crate::fuzz::bases::Base;
use ferry_device::BLOCK_SIZE;
use ferry_journal::format::{
    BLOCK_HEADER, BLOCK_PAYLOAD, BlockHeader, RECORD_HEADER, RecordHeader,
};

const BLOCK: u64 = BLOCK_SIZE as u64;

/// Where the blocks of the ring are.
#[derive(Clone, Copy)]
struct Ring {
    offset: u64,
    blocks: u64,
}

impl Ring {
    fn offset(self, position: u64) -> u64 {
        self.offset + position % self.blocks * BLOCK
    }
}

pub(super) fn damage(device: &SimDevice, base: &Base, rng: &mut SimRng) {
    let ring = Ring { offset: base.superblock.log_offset, blocks: base.superblock.log_len / BLOCK };
    let headers: Vec<BlockHeader> = (0..ring.blocks)
        .filter_map(|n| BlockHeader::decode(&read(device, ring.offset(n))))
        .collect();
    if headers.is_empty() {
        return replace(device, base, ring.offset(rng.below(ring.blocks)), rng);
    }
    let block = *rng.pick(&headers);
    match rng.below(8) {
        0 => replace(device, base, ring.offset(block.position), rng),
        1 => rewrite_header(device, ring, block, rng),
        _ => {
            let starts: Vec<_> = headers.iter().filter(|block| block.index == 0).collect();
            if let Some(start) = (!starts.is_empty()).then(|| **rng.pick(&starts)) {
                rewrite(device, ring, start, rng);
            }
        }
    }
}

/// A block that says with the right checksum that it is another.
fn rewrite_header(device: &SimDevice, ring: Ring, block: BlockHeader, rng: &mut SimRng) {
    let offset = ring.offset(block.position);
    let mut buf = read(device, offset);
    let mut other = block;
    match rng.below(3) {
        0 => {
            other.position =
                *rng.pick(&[0, u64::MAX, block.position + ring.blocks, block.position + 1])
        }
        1 => other.record_id = rng.next_u64(),
        _ => other.index = *rng.pick(&[0, 1, u32::MAX, block.index.wrapping_add(1)]),
    }
    other.encode(&mut buf);
    write(device, offset, &buf);
}

/// Changes a record's header or body.
fn rewrite(device: &SimDevice, ring: Ring, start: BlockHeader, rng: &mut SimRng) {
    let first = read(device, ring.offset(start.position));
    let Some(mut header) = RecordHeader::decode(&first[BLOCK_HEADER..BLOCK_HEADER + RECORD_HEADER])
    else {
        return;
    };
    if header.blocks() > ring.blocks {
        return;
    }
    let offsets: Vec<u64> = (0..header.blocks()).map(|n| ring.offset(start.position + n)).collect();
    let mut bytes: Vec<u8> =
        offsets.iter().flat_map(|offset| read(device, *offset)[BLOCK_HEADER..].to_vec()).collect();
    let body = RECORD_HEADER..RECORD_HEADER + header.body_len as usize;
    if rng.chance(2, 3) {
        for _ in 0..1 + rng.below(3) {
            scramble(&mut bytes[body.clone()], rng);
        }
    } else {
        let odd = *rng.pick(&[
            0,
            1,
            u64::MAX,
            1 << 32,
            1 << 63,
            header.seq + 1,
            header.seq.wrapping_sub(1),
        ]);
        match rng.below(6) {
            0 => header.seq = odd,
            1 => header.durable_point = odd,
            2 => header.body_len = odd as u32,
            3 => header.keys = odd as u32,
            4 => header.extents = odd as u32,
            _ => header.prev = odd,
        }
    }
    header.body_crc = crc32c::crc32c(&bytes[body]);
    bytes[..RECORD_HEADER].copy_from_slice(&header.encode());
    for (offset, payload) in offsets.iter().zip(bytes.chunks(BLOCK_PAYLOAD)) {
        let mut buf = read(device, *offset);
        buf[BLOCK_HEADER..].copy_from_slice(payload);
        write(device, *offset, &buf);
    }
}
