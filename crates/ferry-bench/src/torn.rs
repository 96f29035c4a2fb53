//! A checker for torn reads: many threads write slots that carry their own version and checksum, and read across them.
//!
//! The file is a row of slots of 1 byte to 1 MiB, most of them not aligned to anything. A slot is always written whole, by one call, and
//! every word of it follows from its version. A read that finds words of two versions in one slot is torn. In the first third of the file
//! each version must also be no older than what had been written when the read began; in the second third holes are punched beside, in
//! the last one the file is cut and extended.

use crate::place::File;
use crate::threads::now;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Sizes of slots, in turn. The one of 64 KiB is aligned, so that it can be punched.
const SIZES: [u64; 16] = [
    1,
    7,
    100,
    511,
    2048,
    4096,
    4097,
    8191,
    10_000,
    16_384,
    30_000,
    65_536,
    65_537,
    131_071,
    300_001,
    1 << 20,
];
/// Rows of all sizes.
const ROWS: u64 = 12;
/// The largest read and write in process.
pub const MOST: usize = 1 << 20;
/// The same on a path: the kernel passes 256 pages in one request, and a buffer need not begin at a page.
pub const MOST_ON_PATH: usize = MOST - 4096;
/// Threads that do something else than read and write slots: one punches, one cuts.
const OTHERS: u32 = 2;

/// What to run.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Threads, at least 4.
    pub threads: u32,
    /// It ends when so many slots have been read,
    pub reads: u64,
    /// or after this time.
    pub time: Duration,
    /// The largest read and write in bytes: [`MOST`] or [`MOST_ON_PATH`].
    pub most: usize,
    /// What is random follows from it.
    pub seed: u64,
}

/// What was seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Slots read and checked.
    pub reads: u64,
    /// Slots written.
    pub writes: u64,
    /// Holes punched, and sizes set.
    pub cuts: u64,
    /// Reads with parts of two versions.
    pub torn: u64,
    /// Reads of something older than what had been written before they began.
    pub stale: u64,
    /// What the first of them looked like.
    pub first: Option<String>,
}

/// One slot.
#[derive(Clone, Copy, Debug)]
struct Slot {
    offset: u64,
    len: usize,
}

/// What all threads share.
struct Run<'t> {
    target: &'t File,
    slots: Vec<Slot>,
    /// By slot: the newest version that is wholly written.
    written: Vec<AtomicU64>,
    reads: AtomicU64,
    writes: AtomicU64,
    cuts: AtomicU64,
    torn: AtomicU64,
    stale: AtomicU64,
    first: Mutex<Option<String>>,
    over: AtomicBool,
    most: usize,
}

/// Runs the plan on an empty file.
pub fn run(target: &File, plan: Plan) -> io::Result<Seen> {
    let slots = slots(plan.most);
    let end = slots.last().map_or(0, |s| s.offset + s.len as u64);
    target.set_len(end)?;
    let run = Run {
        written: slots.iter().map(|_| AtomicU64::new(0)).collect(),
        slots,
        target,
        reads: AtomicU64::new(0),
        writes: AtomicU64::new(0),
        cuts: AtomicU64::new(0),
        torn: AtomicU64::new(0),
        stale: AtomicU64::new(0),
        first: Mutex::default(),
        over: AtomicBool::new(false),
        most: plan.most,
    };
    let until = now() + plan.time;
    let writers = (plan.threads - OTHERS) / 2;
    let result = std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (0..plan.threads)
            .map(|me| {
                scope.spawn(move || {
                    let mut random = Random(plan.seed ^ u64::from(me + 1) << 32);
                    let mut buf = vec![0; plan.most];
                    let mut result = Ok(());
                    while result.is_ok() && !run.over.load(Ordering::Relaxed) {
                        result = match me {
                            0 => run.punch(&mut random),
                            1 => run.cut(&mut random),
                            _ if me - OTHERS < writers => {
                                run.write(&mut random, (me - OTHERS, writers), &mut buf)
                            }
                            _ => run.read(&mut random, &mut buf),
                        };
                        if run.reads.load(Ordering::Relaxed) >= plan.reads || now() >= until {
                            run.over.store(true, Ordering::Relaxed);
                        }
                    }
                    run.over.store(true, Ordering::Relaxed);
                    result
                })
            })
            .collect();
        threads
            .into_iter()
            .try_for_each(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    result?;
    Ok(Seen {
        reads: run.reads.into_inner(),
        writes: run.writes.into_inner(),
        cuts: run.cuts.into_inner(),
        torn: run.torn.into_inner(),
        stale: run.stale.into_inner(),
        first: run.first.into_inner().unwrap_or_else(PoisonError::into_inner),
    })
}

/// The row of slots. One of 64 KiB begins at a block; the one before it is longer for that.
fn slots(most: usize) -> Vec<Slot> {
    let mut offset: u64 = 0;
    let mut slots: Vec<Slot> = Vec::new();
    for size in (0..ROWS).flat_map(|_| SIZES) {
        let size = size.min(most as u64);
        if size == 65_536
            && let Some(last) = slots.last_mut()
        {
            let aligned = offset.next_multiple_of(4096);
            last.len += (aligned - offset) as usize;
            offset = aligned;
        }
        slots.push(Slot { offset, len: size as usize });
        offset += size;
    }
    slots
}

impl Run<'_> {
    fn third(&self, n: usize) -> Range<usize> {
        let len = self.slots.len();
        len * n / 3..len * (n + 1) / 3
    }

    /// Writes a slot that is this writer's.
    fn write(&self, random: &mut Random, (me, writers): (u32, u32), buf: &mut [u8]) -> io::Result<()> {
        let at = random.below(self.slots.len() as u64 / u64::from(writers)) * u64::from(writers);
        let at = at as usize + me as usize;
        let Some(slot) = self.slots.get(at).copied() else { return Ok(()) };
        let version = self.written[at].load(Ordering::Relaxed) + 1;
        let buf = &mut buf[..slot.len];
        fill(at, version, buf);
        self.target.write_at(buf, slot.offset)?;
        self.written[at].store(version, Ordering::Release);
        self.writes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Reads a row of slots by one call and checks each.
    fn read(&self, random: &mut Random, buf: &mut [u8]) -> io::Result<()> {
        let first = random.below(self.slots.len() as u64) as usize;
        let most = [1, self.most as u64][random.below(2) as usize];
        let start = self.slots[first].offset;
        let fits = |s: &&Slot| s.offset + s.len as u64 - start <= most;
        let count = self.slots[first..].iter().take_while(fits).count().max(1);
        let slots = first..first + count;
        let before: Vec<u64> =
            self.written[slots.clone()].iter().map(|w| w.load(Ordering::Acquire)).collect();
        let end = self.slots[slots.end - 1];
        let len = (end.offset - start) as usize + end.len;
        let got = self.target.read_at(&mut buf[..len], start)?;
        for (at, before) in slots.clone().zip(before) {
            let slot = self.slots[at];
            let from = (slot.offset - start) as usize;
            let bytes = &buf[from.min(got)..(from + slot.len).min(got)];
            self.check(at, slot, before, bytes);
        }
        self.reads.fetch_add(count as u64, Ordering::Relaxed);
        Ok(())
    }

    fn check(&self, at: usize, slot: Slot, before: u64, bytes: &[u8]) {
        let may_be_cut = self.third(2).contains(&at);
        if bytes.is_empty() && may_be_cut {
            return;
        }
        if bytes.len() < slot.len {
            return self.found(&self.torn, at, slot, format!("ends after {} bytes", bytes.len()));
        }
        match version_of(at, bytes) {
            Err(byte) => self.found(&self.torn, at, slot, format!("changes its version at byte {byte}")),
            Ok(version) => {
                // Of a slot of less than a word only the low byte is known.
                let stale = if slot.len < 8 { false } else { version < before };
                if stale && self.third(0).contains(&at) {
                    let what = format!("has version {version}, and {before} had been written");
                    self.found(&self.stale, at, slot, what);
                }
            }
        }
    }

    fn found(&self, counter: &AtomicU64, at: usize, slot: Slot, what: String) {
        counter.fetch_add(1, Ordering::Relaxed);
        let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert_with(|| format!("slot {at} ({} bytes at {}) {what}", slot.len, slot.offset));
    }

    /// Makes a hole of a slot whose ends lie at blocks: that is one step.
    fn punch(&self, random: &mut Random) -> io::Result<()> {
        let third = self.third(1);
        let at = third.start + random.below(third.len() as u64) as usize;
        let slot = self.slots[at];
        if slot.len == 65_536 {
            self.target.punch(slot.offset, slot.len as u64)?;
            self.cuts.fetch_add(1, Ordering::Relaxed);
        }
        // Most of the time others are to get on.
        std::thread::yield_now();
        Ok(())
    }

    /// Cuts the file at the border of two slots, or extends it.
    fn cut(&self, random: &mut Random) -> io::Result<()> {
        let third = self.third(2);
        let at = third.start + random.below(third.len() as u64) as usize;
        self.target.set_len(self.slots[at].offset)?;
        self.cuts.fetch_add(1, Ordering::Relaxed);
        std::thread::yield_now();
        Ok(())
    }
}

/// Word `i` of slot `at` in a version; the first is the version itself.
fn word(at: usize, version: u64, i: u64) -> u64 {
    if i == 0 {
        version
    } else {
        (version ^ (at as u64) << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17) ^ i
    }
}

fn fill(at: usize, version: u64, out: &mut [u8]) {
    if out.len() < 8 {
        return out.fill(version as u8);
    }
    for (i, bytes) in (0..).zip(out.chunks_mut(8)) {
        bytes.copy_from_slice(&word(at, version, i).to_le_bytes()[..bytes.len()]);
    }
}

/// The version of a whole slot, 0 if it is all zeros; else where it is of another.
fn version_of(at: usize, bytes: &[u8]) -> Result<u64, usize> {
    let Some((first, _)) = bytes.split_first_chunk::<8>() else {
        let other = bytes.iter().position(|b| *b != bytes[0]);
        return other.map_or(Ok(u64::from(bytes[0])), Err);
    };
    let version = u64::from_le_bytes(*first);
    for (i, part) in (0_u64..).zip(bytes.chunks(8)).skip(1) {
        let expected = if version == 0 { 0 } else { word(at, version, i) };
        if part != &expected.to_le_bytes()[..part.len()] {
            return Err(i as usize * 8);
        }
    }
    Ok(version)
}

/// A small generator of random numbers: Knuth's constants, the high bits.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_of_two_versions_is_found_whatever_its_size() {
        for size in [2, 7, 9, 100, 4097] {
            let (mut old, mut new) = (vec![0; size], vec![0; size]);
            fill(3, 8, &mut old);
            fill(3, 9, &mut new);
            assert_eq!((version_of(3, &old), version_of(3, &new)), (Ok(8), Ok(9)));
            for cut in 1..size {
                let mixed = [&old[..cut], &new[cut..]].concat();
                assert!(
                    mixed == old || mixed == new || version_of(3, &mixed).is_err(),
                    "{size} cut at {cut}"
                );
            }
            let half_zero = [&old[..size / 2], &vec![0; size - size / 2][..]].concat();
            assert!(version_of(3, &half_zero).is_err());
        }
        assert_eq!(version_of(3, &[0; 50]), Ok(0));
    }

    #[test]
    fn slots_follow_each_other_and_those_that_are_punched_lie_at_blocks() {
        let slots = slots(MOST);
        let mut end = 0;
        for slot in &slots {
            assert_eq!(slot.offset, end);
            assert!(slot.len <= MOST);
            assert!(slot.len != 65_536 || slot.offset % 4096 == 0);
            end += slot.len as u64;
        }
        assert!(slots.iter().filter(|s| s.len == 65_536).count() as u64 >= ROWS / 2);
    }
}
