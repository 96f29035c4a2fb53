//! The blocks of the database's file on the device: each twice, held against their checksums.

use super::read_ahead::{Ahead, Neighbours};
use super::segments::Segments;
use super::unit::{NEVER, Sums, header, sum_of};
use crate::completion::{Countdown, Wait};
use crate::disk::{Disk, io_error};
use crate::{Completion, Geometry, JournalError};
use ferry_device::{AlignedBuf, BLOCK_SIZE};
use ferry_env::planted::{Bug, is_planted};
use parking_lot::{Mutex, RwLock};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

mod verify;

/// Damaged blocks that are remembered, so that each is logged once.
const LOGGED_MAX: usize = 4096;

type Unit = Arc<RwLock<Sums>>;

/// Reads and writes blocks by the offset of their first copy on the device.
pub struct Pages {
    disk: Arc<Disk>,
    segments: Segments,
    /// Checksums by segment, of the units that were touched.
    units: RwLock<HashMap<u32, Unit>>,
    /// Held over every write of a page or a checksum.
    writing: Mutex<()>,
    ahead: Ahead,
    /// `None`: the device reads ahead by itself.
    neighbours: Option<Neighbours>,
    /// Device offset of the file's first block.
    header: AtomicU64,
    /// The copy of it that counts.
    header_copy: AtomicU64,
    /// Nothing may be written.
    read_only: AtomicBool,
    healed: AtomicU64,
    told: Mutex<HashSet<u64>>,
    /// Copies of blocks that were needed and are not what was written, by their offsets; at most
    /// [`LOGGED_MAX`].
    bad_copies: Mutex<BTreeSet<u64>>,
}

/// One block, read from both copies.
struct Both {
    good: AlignedBuf,
    sum: u32,
    /// Copies that are not that.
    bad: Vec<u64>,
}

impl Pages {
    pub fn new(disk: &Arc<Disk>, geo: &Geometry, read_only: bool) -> Self {
        Self {
            disk: disk.clone(),
            segments: Segments::new(geo),
            units: RwLock::default(),
            writing: Mutex::new(()),
            ahead: Ahead::default(),
            neighbours: (!disk.reads_ahead()).then(Neighbours::default),
            header: AtomicU64::new(u64::MAX),
            header_copy: AtomicU64::new(0),
            read_only: AtomicBool::new(read_only),
            healed: AtomicU64::new(0),
            told: Mutex::default(),
            bad_copies: Mutex::default(),
        }
    }

    /// Where the segments are.
    pub fn segments(&self) -> &Segments {
        &self.segments
    }

    /// Blocks of which one copy was bad.
    pub fn healed(&self) -> u64 {
        self.healed.load(Ordering::Relaxed)
    }

    /// Where a block that was read, or a checksum of it, was bad in one copy, on the device. Of the
    /// header a crash leaves copies that differ, too.
    pub fn bad_copies(&self) -> Vec<u64> {
        self.bad_copies.lock().iter().copied().collect()
    }

    /// Forgets all that was read, and from now on writes nothing if `read_only`. `first`: the
    /// segment of unit 0.
    pub fn renew(&self, first: Option<u32>, read_only: bool) {
        let _writing = self.writing.lock();
        self.units.write().clear();
        self.read_only.fetch_or(read_only, Ordering::AcqRel);
        self.set_first(first);
    }

    /// From now on writes nothing.
    pub fn end_writing(&self) {
        let _writing = self.writing.lock();
        self.read_only.store(true, Ordering::Release);
    }

    /// The segment of unit 0.
    pub fn set_first(&self, first: Option<u32>) {
        let offset = first.map_or(u64::MAX, |segment| self.segments.offset(segment));
        self.header.store(offset, Ordering::Release);
    }

    /// A unit begins in this segment.
    pub fn begin(&self, segment: u32) {
        let fresh = Sums::fresh(&self.segments, segment);
        self.units.write().insert(segment, Arc::new(RwLock::new(fresh)));
    }

    /// This segment holds no unit any more.
    pub fn forget(&self, segment: u32) {
        self.units.write().remove(&segment);
    }

    fn unit(&self, segment: u32) -> Unit {
        if let Some(unit) = self.units.read().get(&segment) {
            return unit.clone();
        }
        let loaded = Sums::load(&self.disk, &self.segments, segment);
        for offset in loaded.unreadable() {
            self.note_bad_copy(*offset);
            self.tell(*offset, "the device cannot read checksums");
        }
        self.units.write().entry(segment).or_insert_with(|| Arc::new(RwLock::new(loaded))).clone()
    }

    fn is_header(&self, offset: u64) -> bool {
        offset == self.header.load(Ordering::Acquire)
    }

    /// Reads blocks that somebody is going to ask for.
    pub fn read_ahead(&self, wanted: Vec<Range<u64>>) {
        self.ahead.read(&self.disk, wanted);
    }

    /// Reads whole blocks that lie in one unit.
    pub fn read(&self, offset: u64, out: &mut AlignedBuf) -> Result<(), JournalError> {
        let (segment, block) = self.segments.block_at(offset);
        let unit = self.unit(segment);
        let blocks = out.len() / BLOCK_SIZE;
        let agreed = unit.read().agreed(block, blocks).map(<[u32]>::to_vec);
        if let Some(sums) = agreed
            && !self.is_header(offset)
        {
            if sums.iter().all(|sum| *sum == NEVER) {
                out.fill(0);
                return Ok(());
            }
            if self.ahead.copy(offset, out) && matches(out, &sums) {
                return Ok(());
            }
            let unit = self.segments.offset(segment);
            let within = unit..unit + self.segments.unit;
            if let Some(neighbours) = &self.neighbours
                && neighbours.read(&self.disk, offset, out, &within)
                && matches(out, &sums)
            {
                return Ok(());
            }
            if self.disk.read(offset, out).is_ok() && matches(out, &sums) {
                return Ok(());
            }
        }
        for (at, into) in (0..).zip(out.chunks_exact_mut(BLOCK_SIZE)) {
            into.copy_from_slice(&self.read_one(&unit, segment, block + at)?);
        }
        Ok(())
    }

    /// Reads one block that may need its second copy.
    fn read_one(&self, unit: &Unit, segment: u32, block: u32) -> Result<AlignedBuf, JournalError> {
        let (offset, said) = {
            let sums = unit.read();
            (sums.page_offset(block, 0), sums.of(block))
        };
        if said == [NEVER; 2] {
            return Ok(AlignedBuf::zeroed(BLOCK_SIZE));
        }
        if self.is_header(offset) {
            return self.read_header(&unit.read(), block);
        }
        let both = self.read_both(&unit.read(), block)?;
        if !both.bad.is_empty() {
            self.heal_page(segment, block, &both);
        }
        if said != [both.sum; 2] {
            for copy in (0..2).filter(|copy| said[*copy] != both.sum) {
                self.note_bad_copy(unit.read().sum_offset(Sums::index_of(block), copy as u64));
            }
            self.heal_sums(segment, Sums::index_of(block));
        }
        Ok(both.good)
    }

    /// Reads both copies of a block; fails if neither is what either checksum says.
    fn read_both(&self, sums: &Sums, block: u32) -> Result<Both, JournalError> {
        let said = sums.of(block);
        let mut good: Option<(AlignedBuf, u32)> = None;
        let (mut bad, mut why) = (Vec::new(), Vec::new());
        for copy in 0..2 {
            let offset = sums.page_offset(block, copy);
            let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
            let problem = match self.disk.read(offset, &mut buf) {
                Err(error) => error.to_string(),
                Ok(()) => {
                    let sum = sum_of(&buf);
                    if said.contains(&sum) && good.as_ref().is_none_or(|(_, other)| *other == sum) {
                        good.get_or_insert((buf, sum));
                        continue;
                    }
                    "its checksum does not match".to_owned()
                }
            };
            bad.push(offset);
            why.push(problem);
        }
        let Some((good, sum)) = good else { return Err(neither(sums.page_offset(block, 0), &why)) };
        Ok(Both { good, sum, bad })
    }

    /// A copy of the header, as the database has it.
    fn header_at(&self, offset: u64) -> Result<AlignedBuf, String> {
        let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
        self.disk.read(offset, &mut buf).map_err(|error| error.to_string())?;
        header::unseal(&mut buf)
            .then_some(buf)
            .ok_or_else(|| "its checksum does not match".to_owned())
    }

    fn read_header(&self, sums: &Sums, block: u32) -> Result<AlignedBuf, JournalError> {
        let offsets = [0, 1].map(|copy| sums.page_offset(block, copy));
        let used = self.header_copy.load(Ordering::Acquire) as usize;
        let first = match self.header_at(offsets[used]) {
            Ok(good) => return Ok(good),
            Err(why) => why,
        };
        let second =
            self.header_at(offsets[1 - used]).map_err(|why| neither(offsets[0], &[first, why]))?;
        self.tell(offsets[used], "the other copy is used");
        Ok(second)
    }

    /// Makes both copies of the header the same, before anything that one of them relies on can
    /// change. Of two that are whole and differ the one of the newer `commit` counts, which is
    /// `None` where the header does not lead to one: a crash leaves an older one, or a write that
    /// the device lost. Returns what counts, if the file has a header.
    pub fn settle_header(
        &self,
        commit: &dyn Fn(&[u8]) -> Option<u64>,
    ) -> Result<Option<AlignedBuf>, JournalError> {
        let offset = self.header.load(Ordering::Acquire);
        if offset == u64::MAX {
            return Ok(None);
        }
        let (segment, block) = self.segments.block_at(offset);
        let unit = self.unit(segment);
        if unit.read().of(block) == [NEVER; 2] {
            return Ok(None);
        }
        let offsets = [0, 1].map(|copy| unit.read().page_offset(block, copy));
        let (used, good) = match offsets.map(|offset| self.header_at(offset)) {
            [Ok(first), Ok(second)]
                if first[..] != second[..] && commit(&second) > commit(&first) =>
            {
                (1, second)
            }
            [Ok(first), _] => (0, first),
            [Err(_), Ok(second)] => (1, second),
            [Err(first), Err(second)] => return Err(neither(offsets[0], &[first, second])),
        };
        self.header_copy.store(used, Ordering::Release);
        let mut sealed = AlignedBuf::zeroed(BLOCK_SIZE);
        sealed.copy_from_slice(&good);
        header::seal(&mut sealed);
        let _writing = self.writing.lock();
        let mut wrote = false;
        for offset in offsets {
            let mut there = AlignedBuf::zeroed(BLOCK_SIZE);
            if self.disk.read(offset, &mut there).is_ok() && there[..] == sealed[..] {
                continue;
            }
            self.note_bad_copy(offset);
            self.tell(offset, "the copies of the header differ");
            if !self.read_only.load(Ordering::Acquire) {
                self.disk.write(offset, &sealed).map_err(io_error("home store"))?;
                wrote = true;
            }
        }
        if wrote {
            self.disk.flush_wait().map_err(io_error("home store"))?;
        }
        Ok(Some(good))
    }

    /// Writes the good copy over the bad ones, unless the block was given something else to hold
    /// meanwhile.
    fn heal_page(&self, segment: u32, block: u32, both: &Both) {
        let _writing = self.writing.lock();
        let unit = self.unit(segment);
        if !unit.read().of(block).contains(&both.sum) {
            return;
        }
        for &offset in &both.bad {
            self.note_bad_copy(offset);
            self.tell(offset, "the other copy is used");
            if !self.read_only.load(Ordering::Acquire)
                && let Err(error) = self.disk.write(offset, &both.good)
            {
                tracing::warn!(offset, %error, "a block of the home store could not be mended");
            }
        }
    }

    fn note_bad_copy(&self, offset: u64) {
        let mut bad_copies = self.bad_copies.lock();
        if bad_copies.len() < LOGGED_MAX {
            bad_copies.insert(offset);
        }
    }

    /// Finds out which copy of a checksum block is right, for each block of which they differ, and
    /// writes them again.
    fn heal_sums(&self, segment: u32, index: u32) {
        let _writing = self.writing.lock();
        let unit = self.unit(segment);
        let mut sums = unit.write();
        for block in sums.covered(index) {
            let said = sums.of(block);
            if said[0] != said[1]
                && let Ok(both) = self.read_both(&sums, block)
            {
                sums.set(block, both.sum);
            }
        }
        self.tell(sums.sum_offset(index, 0), "a checksum differs from its copy");
        self.write_sums(&mut sums);
    }

    /// Writes the checksum blocks that differ from the device's; `writing` is held.
    fn write_sums(&self, sums: &mut Sums) {
        if self.read_only.load(Ordering::Acquire) {
            return;
        }
        for (offset, buf) in sums.take_dirty() {
            if let Err(error) = self.disk.write(offset, &buf) {
                sums.not_written(offset);
                tracing::warn!(offset, %error, "checksums of the home store could not be mended");
            }
        }
    }

    /// Counts a block that is not as it was written (once, where it stays so), and says so once.
    fn tell(&self, offset: u64, what: &str) {
        let new = {
            let mut told = self.told.lock();
            told.len() < LOGGED_MAX && told.insert(offset)
        };
        if new || !self.read_only.load(Ordering::Acquire) {
            self.healed.fetch_add(1, Ordering::Relaxed);
        }
        if !new {
            return;
        }
        tracing::warn!(
            offset,
            what,
            "a block of the home store is damaged in one of its two copies"
        );
    }

    /// Writes runs of blocks, each within one unit, and their checksums if `of` says whose; waits
    /// until the writes completed.
    pub fn write(
        &self,
        runs: Vec<(u64, AlignedBuf)>,
        of: Option<&[u32]>,
    ) -> Result<(), JournalError> {
        let _writing = self.writing.lock();
        let mut writes: Vec<(u64, Arc<AlignedBuf>)> = Vec::new();
        for (offset, mut run) in runs {
            let (segment, block) = self.segments.block_at(offset);
            let unit = self.unit(segment);
            let mut sums = unit.write();
            for (at, bytes) in (0..).zip(run.chunks_exact_mut(BLOCK_SIZE)) {
                if self.is_header(offset + u64::from(at) * BLOCK_SIZE as u64) {
                    header::seal(bytes);
                    sums.set(block + at, 1);
                } else {
                    sums.set(block + at, sum_of(bytes));
                }
            }
            let run = Arc::new(run);
            writes.push((offset, run.clone()));
            if !is_planted(Bug::SingleCopy) {
                writes.push((offset + sums.distance(), run));
            }
        }
        for segment in of.unwrap_or_default() {
            let unit = self.units.read().get(segment).cloned();
            let dirty = unit.map(|unit| unit.write().take_dirty()).unwrap_or_default();
            writes.extend(dirty.into_iter().map(|(offset, buf)| (offset, Arc::new(buf))));
        }
        if writes.is_empty() {
            return Ok(());
        }
        Wait::until(|done: Completion| {
            let left = Countdown::new(writes.len() as u32);
            let requests = writes.into_iter().map(|(offset, buf)| {
                let left = left.clone();
                self.disk.write_request("home store", offset, buf, move |r| {
                    left.done(r.map_err(io_error("home store")))
                })
            });
            let requests = requests.collect();
            left.then(done);
            self.disk.submit(requests);
        })
    }
}

/// Whether all blocks are what their checksums say; those that were never written become zeros.
fn matches(blocks: &mut AlignedBuf, sums: &[u32]) -> bool {
    blocks.chunks_exact_mut(BLOCK_SIZE).zip(sums).all(|(block, sum)| {
        if *sum == NEVER {
            block.fill(0);
        }
        *sum == NEVER || *sum == sum_of(block)
    })
}

fn neither(offset: u64, why: &[String]) -> JournalError {
    let detail = match why {
        [a, b] if a == b => format!("both copies of the block: {a}"),
        _ => format!("the block's copies: {}", why.join("; ")),
    };
    JournalError::Damaged { what: "home store", offset, detail }
}
