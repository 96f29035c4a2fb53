//! A checker for torn reads: many threads write slots that carry their own version and checksum,
//! and read across them.
//!
//! The file consists of slots of 1 byte to 1 MiB, most of them unaligned. A slot is always written
//! whole, by one call, and its version determines every word of it. A read that finds words of two
//! versions in one slot is torn. In the first third of the file a version must also be no older
//! than what had been written when the read began. In the second third, holes are punched at the
//! same time. The last third belongs to a thread that truncates the file there and extends it
//! again: by appends, by writes behind the end, and by setting its size.
//!
//! Small slots are read and written more often than large ones, so that all sizes take about as
//! much time.

use crate::target::File;
use crate::threads::now;
use ferry::command::shared::parse_time;
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
/// The number of groups, each with slots of all sizes.
const GROUPS: u64 = 12;
/// The largest read and write in process.
pub const MOST: usize = 1 << 20;
/// The same on a path: the kernel passes 256 pages in one request, and a buffer need not begin at a
/// page.
pub const MOST_ON_PATH: usize = MOST - 4096;
/// The number of threads that do something besides reading slots: one punches holes, one truncates.
const OTHERS: u32 = 2;
/// The reads between two of their operations.
const READS_BETWEEN: u32 = 16;
/// The fixed cost of a slot, as a number of bytes.
const SLOT_COST: u64 = 4096;
/// The limits, in bytes, up to which a read continues to the next slots: one is picked at random.
const SPANS: [u64; 16] = {
    let (one, few, many) = (0, 16 << 10, 128 << 10);
    [one, one, one, one, one, few, few, few, few, few, few, few, few, many, many, 1 << 20]
};

/// The options of a run.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct Plan {
    /// Threads
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(4..=256))]
    pub threads: u32,
    /// End when so many blocks have been read
    #[arg(long, value_name = "N", default_value_t = u64::MAX, hide_default_value = true)]
    pub reads: u64,
    /// End after this time
    #[arg(long, value_parser = parse_time, value_name = "TIME", default_value = "10s")]
    pub time: Duration,
    /// The largest read and write in bytes: [`MOST`] or [`MOST_ON_PATH`].
    #[arg(skip = MOST)]
    pub most: usize,
    /// The seed of all random choices
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
}

/// The results of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Slots read and checked.
    pub reads: u64,
    /// The slots written.
    pub writes: u64,
    /// Holes punched, and sizes set.
    pub cuts: u64,
    /// Reads with parts of two versions.
    pub torn: u64,
    /// Reads of something older than what had been written before they began.
    pub stale: u64,
    /// A description of the first such read.
    pub first: Option<String>,
}

/// A slot of the file.
#[derive(Clone, Copy, Debug)]
struct Slot {
    offset: u64,
    len: usize,
}

/// The state that all threads share.
struct Run<'t> {
    target: &'t File,
    slots: Vec<Slot>,
    /// By slot: the sum of what it and those before it are to be picked with.
    odds: Vec<u64>,
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
        odds: odds(&slots),
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
                            1 => run.cut(&mut random, &mut buf),
                            _ if me - OTHERS < writers => {
                                run.write(&mut random, (me - OTHERS, writers), &mut buf)
                            }
                            _ => Ok(()),
                        };
                        let reads = if me < OTHERS {
                            READS_BETWEEN
                        } else {
                            u32::from(me >= OTHERS + writers)
                        };
                        for _ in 0..reads {
                            result = result.and_then(|()| run.read(&mut random, &mut buf));
                        }
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

/// All slots of the file. One of 64 KiB begins at a block; the one before it is longer for that.
fn slots(most: usize) -> Vec<Slot> {
    let mut offset: u64 = 0;
    let mut slots: Vec<Slot> = Vec::new();
    for size in (0..GROUPS).flat_map(|_| SIZES) {
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

/// How likely each slot is, as sums.
fn odds(slots: &[Slot]) -> Vec<u64> {
    let mut sum = 0;
    let one = |slot: &Slot| {
        sum += (MOST as u64 + SLOT_COST) / (slot.len as u64 + SLOT_COST);
        sum
    };
    slots.iter().map(one).collect()
}

impl Run<'_> {
    fn pick(&self, random: &mut Random) -> usize {
        let at = random.below(self.odds.last().copied().unwrap_or_default());
        self.odds.partition_point(|sum| *sum <= at)
    }

    fn third(&self, n: usize) -> Range<usize> {
        let len = self.slots.len();
        len * n / 3..len * (n + 1) / 3
    }

    /// Writes a slot that is this writer's, of the first two thirds.
    fn write(
        &self,
        random: &mut Random,
        (me, writers): (u32, u32),
        buf: &mut [u8],
    ) -> io::Result<()> {
        let at = self.pick(random);
        if at % writers as usize != me as usize || at >= self.third(2).start {
            return Ok(());
        }
        self.put(at, buf, |data, slot| self.target.write_at(data, slot.offset))
    }

    /// Gives a slot its next version.
    fn put(
        &self,
        at: usize,
        buf: &mut [u8],
        write: impl FnOnce(&[u8], Slot) -> io::Result<()>,
    ) -> io::Result<()> {
        let (slot, version) = (self.slots[at], self.written[at].load(Ordering::Relaxed) + 1);
        let buf = &mut buf[..slot.len];
        fill(at, version, buf);
        write(buf, slot)?;
        self.written[at].store(version, Ordering::Release);
        self.writes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Reads several adjacent slots by one call and checks each.
    fn read(&self, random: &mut Random, buf: &mut [u8]) -> io::Result<()> {
        let first = self.pick(random);
        let most = SPANS[random.below(SPANS.len() as u64) as usize].min(self.most as u64);
        let start = self.slots[first].offset;
        let fits = |s: &&Slot| s.offset + s.len as u64 - start <= most;
        let count = self.slots[first..].iter().take_while(fits).count().max(1);
        let slots = first..first + count;
        let mut before = [0; SIZES.len() * GROUPS as usize];
        for (before, written) in before.iter_mut().zip(&self.written[slots.clone()]) {
            *before = written.load(Ordering::Acquire);
        }
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
            Err(byte) => {
                self.found(&self.torn, at, slot, format!("changes its version at byte {byte}"))
            }
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
        first.get_or_insert_with(|| {
            format!("slot {at} ({} bytes at {}) {what}", slot.len, slot.offset)
        });
    }

    /// Makes a hole of a slot whose ends lie at blocks: that is one step.
    fn punch(&self, random: &mut Random) -> io::Result<()> {
        let third = self.third(1);
        let mut slots = third.map(|at| self.slots[at]).filter(|slot| slot.len == 65_536);
        let count = slots.clone().count() as u64;
        if let Some(slot) = slots.nth(random.below(count) as usize) {
            self.target.punch(slot.offset, slot.len as u64)?;
            self.cuts.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Truncates the file between two slots, and extends it again.
    fn cut(&self, random: &mut Random, buf: &mut [u8]) -> io::Result<()> {
        let third = self.third(2);
        let at = third.start + random.below(third.len() as u64) as usize;
        self.target.set_len(self.slots[at].offset)?;
        self.cuts.fetch_add(1, Ordering::Relaxed);
        let last = (at + 1 + random.below(8) as usize).min(third.end);
        for at in at..last {
            self.put(at, buf, |data, slot| {
                let end = self.target.append(data)?;
                if end != slot.offset + slot.len as u64 {
                    self.found(
                        &self.torn,
                        at,
                        slot,
                        format!("was appended so that it ends at {end}"),
                    );
                }
                Ok(())
            })?;
        }
        let beyond = last + random.below(4) as usize;
        match self.slots.get(beyond) {
            // The range in between is a hole.
            Some(_) if random.below(2) == 0 => {
                self.put(beyond, buf, |data, slot| self.target.write_at(data, slot.offset))
            }
            Some(slot) => self.target.set_len(slot.offset),
            None => Ok(()),
        }
    }
}

/// What word `i` of slot `at` is in a version, but for `i` itself. The first word is the version.
fn base(at: usize, version: u64) -> u64 {
    (version ^ (at as u64) << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17)
}

fn fill(at: usize, version: u64, out: &mut [u8]) {
    if out.len() < 8 {
        return out.fill(version as u8);
    }
    let base = base(at, version);
    let (words, rest) = out.as_chunks_mut::<8>();
    for (i, word) in (0_u64..).zip(words.iter_mut()) {
        *word = (base ^ i).to_le_bytes();
    }
    rest.copy_from_slice(&(base ^ words.len() as u64).to_le_bytes()[..rest.len()]);
    words[0] = version.to_le_bytes();
}

/// The version of a whole slot, 0 if it is all zeros; else where it is of another.
fn version_of(at: usize, bytes: &[u8]) -> Result<u64, usize> {
    let (words, rest) = bytes.as_chunks::<8>();
    let Some(first) = words.first() else {
        let other = bytes.iter().position(|b| *b != bytes[0]);
        return other.map_or(Ok(u64::from(bytes[0])), Err);
    };
    let version = u64::from_le_bytes(*first);
    let base = base(at, version);
    let expected = |i: u64| if version == 0 { 0 } else { base ^ i };
    // All of it first, then, if something differs, where: so the loop has no branch.
    let differs = |(i, word): (u64, &[u8; 8])| u64::from_le_bytes(*word) ^ expected(i);
    let any = (0..).zip(words).skip(1).fold(0, |any, word| any | differs(word));
    if any != 0 {
        let at = (0..).zip(words).skip(1).position(|word| differs(word) != 0).unwrap_or_default();
        return Err((at + 1) * 8);
    }
    if rest != &expected(words.len() as u64).to_le_bytes()[..rest.len()] {
        return Err(words.len() * 8);
    }
    Ok(version)
}

/// A small generator of random numbers: Knuth's constants, the high bits.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
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
        assert!(slots.iter().filter(|s| s.len == 65_536).count() as u64 >= GROUPS / 2);
    }
}
