//! Damage of every kind in every area of a volume. Half of it comes with checksums put right, so
//! that what makes no sense gets past them.

mod home;
mod keys;
mod log;

use super::bases::Base;
use crate::device::{SimDevice, SimRng};
use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice};
use ferry_fs::volume::SUPERBLOCK_PLACES;
use std::sync::Arc;

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Bytes of the superblock that mean something.
const SUPERBLOCK_FIELDS: usize = 208;
/// Where the superblock's checksum is.
const SUPERBLOCK_CRC: usize = BLOCK_SIZE - 4;
/// Where a summary's checksum is.
const SUMMARY_CRC: usize = 36;

/// What was done to a volume as a whole.
pub struct Damage {
    /// Bytes that are left of it.
    pub capacity: u64,
}

/// Damages `image`, a copy of `base`.
pub fn damage(image: &Arc<SimDevice>, base: &Base, rng: &mut SimRng) -> Damage {
    let mut capacity = image.capacity();
    for _ in 0..1 + rng.below(4) {
        match rng.below(16) {
            0 => superblock(image, rng),
            1..4 => log::damage(image, base, rng),
            4 | 5 if base.home => home::map(image, base, rng),
            6 | 7 if base.home => home::pages(image, base, rng),
            8 => segment(image, base, rng),
            9 | 10 => anywhere(image, base, rng),
            11 if rng.chance(1, 3) => capacity = cut(base, capacity, rng),
            _ => keys::damage(image, base, rng),
        }
    }
    Damage { capacity }
}

/// The block at `at`; zeros where the device has none.
fn read(device: &SimDevice, at: u64) -> AlignedBuf {
    read_long(device, at, BLOCK_SIZE)
}

fn read_long(device: &SimDevice, at: u64, len: usize) -> AlignedBuf {
    let mut buf = AlignedBuf::zeroed(len);
    device.read(at, &mut buf).expect("the block is inside, and there are no faults");
    buf
}

fn write(device: &SimDevice, at: u64, buf: &AlignedBuf) {
    device.write(at, buf).expect("the block is inside, and there are no faults");
}

/// Changes some bytes.
fn scramble(bytes: &mut [u8], rng: &mut SimRng) {
    if bytes.is_empty() {
        return;
    }
    let at = rng.index(bytes.len());
    let rest = &mut bytes[at..];
    match rng.below(9) {
        0..3 => rest[0] ^= 1 << rng.below(8),
        3 => rest[0] = rng.next_u64() as u8,
        4 | 5 => {
            let value: u64 =
                *rng.pick(&[0, 1, 2, 255, 4095, 4096, 1 << 31, u64::MAX, i64::MAX as u64, 1 << 63]);
            let value = if rng.chance(1, 2) { value } else { value.wrapping_sub(rng.below(3)) };
            let bytes = if rng.chance(1, 2) { value.to_le_bytes() } else { value.to_be_bytes() };
            let len = (*rng.pick(&[2, 4, 8])).min(rest.len());
            let from = if rng.chance(1, 2) { 0 } else { 8 - len };
            rest[..len].copy_from_slice(&bytes[from..from + len]);
        }
        6 => {
            let len = 1 + rng.index(rest.len());
            rest[..len.min(600)].fill(if rng.chance(1, 2) { 0 } else { 0xff });
        }
        7 => {
            let len = (1 + rng.index(rest.len())).min(64);
            rng.fill(&mut rest[..len]);
        }
        _ => {
            // A small step up or down, of a number in either order of its bytes.
            let i = (*rng.pick(&[0, 3, 7])).min(rest.len() - 1);
            rest[i] = rest[i].wrapping_add(*rng.pick(&[1, 255, 2]));
        }
    }
}

/// Makes another block of `block`, as media and drivers do.
fn replace(device: &SimDevice, base: &Base, block: u64, rng: &mut SimRng) {
    let mut buf = read(device, block);
    match rng.below(7) {
        0 => buf.fill(0),
        1 => rng.fill(&mut buf),
        2 => buf = read(device, *rng.pick(&base.used)),
        3 => buf = read(&base.old, block),
        4 => {
            let other = *rng.pick(&base.used);
            write(device, block, &read(device, other));
            return write(device, other, &buf);
        }
        5 => buf[512 * rng.index(8)..][..512].fill(0),
        _ => scramble(&mut buf, rng),
    }
    write(device, block, &buf);
}

fn put_crc(bytes: &mut [u8], covered: std::ops::Range<usize>, at: usize) {
    let crc = crc32c::crc32c(&bytes[covered]);
    bytes[at..at + 4].copy_from_slice(&crc.to_le_bytes());
}

fn superblock(device: &SimDevice, rng: &mut SimRng) {
    let mut buf = read(device, *rng.pick(&SUPERBLOCK_PLACES));
    let fields = if rng.chance(7, 8) { SUPERBLOCK_FIELDS } else { BLOCK_SIZE };
    // The magic and the version are known to be looked at.
    let from = if rng.chance(3, 4) { 16 } else { 0 };
    scramble(&mut buf[from..fields], rng);
    if rng.chance(3, 4) {
        put_crc(&mut buf, 0..SUPERBLOCK_CRC, SUPERBLOCK_CRC);
    }
    match rng.below(3) {
        0 => SUPERBLOCK_PLACES.iter().for_each(|offset| write(device, *offset, &buf)),
        n => write(device, SUPERBLOCK_PLACES[n as usize - 1], &buf),
    }
}

/// Used blocks of segments that are not the home store's.
fn data_blocks(device: &SimDevice, base: &Base) -> Vec<u64> {
    let segments = home::segments(device, base);
    let from = base.superblock.segments_offset;
    let in_home =
        |at: u64| segments.contains(&(((at - from) / base.superblock.segment_len) as u32));
    base.used.iter().copied().filter(|at| *at >= from && !in_home(*at)).collect()
}

/// Data, or a summary of it: the summary with its checksum put right.
fn segment(device: &SimDevice, base: &Base, rng: &mut SimRng) {
    let blocks = data_blocks(device, base);
    let summaries: Vec<u64> =
        blocks.iter().copied().filter(|at| read(device, *at).starts_with(b"FERRYSUM")).collect();
    if let (false, true) = (summaries.is_empty(), rng.chance(2, 3)) {
        let at = *rng.pick(&summaries);
        let mut buf = read(device, at);
        scramble(&mut buf[8..200], rng);
        buf[SUMMARY_CRC..SUMMARY_CRC + 4].fill(0);
        put_crc(&mut buf, 0..BLOCK_SIZE, SUMMARY_CRC);
        write(device, at, &buf);
    } else if !blocks.is_empty() {
        replace(device, base, *rng.pick(&blocks), rng);
    }
}

fn anywhere(device: &SimDevice, base: &Base, rng: &mut SimRng) {
    replace(device, base, *rng.pick(&base.used), rng);
}

/// The file was cut short, perhaps within what is used.
fn cut(base: &Base, capacity: u64, rng: &mut SimRng) -> u64 {
    let last = base.used.last().copied().unwrap_or(0);
    let end =
        if rng.chance(1, 2) { rng.below(capacity) } else { last + rng.below(capacity - last) };
    (end / BLOCK * BLOCK).min(capacity)
}
