//! Opening a mirror: which sides have everything, and making these equal.

use super::super::component::Component;
use super::super::error::CompositeError;
use super::super::header::{ComponentHeader, MAP_OFFSETS, SIDES_MAX, Side, io_error};
use super::super::kind::Kind;
use super::map::{self, Map};
use super::shared::{Observer, Shared, bits};
use super::worker::Worker;
use crate::buffer::{AlignedBuf, BLOCK_SIZE};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Bytes that are compared at a time.
const COMPARE_LEN: u64 = 1 << 20;

/// The mirror, and its worker if it may be written.
pub(super) fn open(
    sides: Vec<Side>,
    read_only: bool,
    generation: u64,
    observer: Arc<dyn Observer>,
) -> Result<(Arc<Shared>, Option<Worker>), CompositeError> {
    let newest = newest(&sides, generation)?;
    let (fresh, stale): (Vec<Side>, Vec<Side>) =
        sides.into_iter().partition(|side| newest.active.contains(&side.header.id));
    for side in &stale {
        let why = if side.header.active.is_empty() { "was never completed" } else { "is stale" };
        tracing::error!(
            side = side.name,
            generation = side.header.generation,
            newest = newest.generation,
            "a side of the mirror {why} and is left alone; `ferry replace` builds a new one"
        );
    }
    let missing = newest.active.len() - fresh.len();
    if missing > 0 {
        tracing::error!(
            "the mirror is degraded: {missing} of {} sides are missing",
            newest.active.len()
        );
    }
    let behind = fresh.iter().any(|side| side.header.generation != newest.generation);
    let (shared, headers) = assemble(fresh, &newest, read_only);
    if read_only {
        return Ok((shared, None));
    }
    let regions = shared.regions.count();
    let mut worker = Worker {
        shared: Arc::clone(&shared),
        observer,
        headers,
        generation: newest.generation,
        unnoted: false,
        map_sequence: 0,
        map_is_durable: true,
        seen: vec![0; regions],
        rebuild: None,
        stalled: false,
        batches: 0,
    };
    worker
        .recover(missing > 0 || behind || newest.generation < generation)
        .map_err(io_error("prepare", "the mirror"))?;
    Ok((shared, Some(worker)))
}

/// The newest header. It says which sides have everything.
fn newest(sides: &[Side], generation: u64) -> Result<ComponentHeader, CompositeError> {
    for (i, side) in sides.iter().enumerate() {
        if let Some(other) = sides[..i].iter().find(|other| other.header.id == side.header.id) {
            return Err(CompositeError::Twice {
                first: other.name.clone(),
                second: side.name.clone(),
            });
        }
    }
    let newest = sides.iter().map(|side| &side.header).max_by_key(|header| header.generation);
    let newest =
        newest.filter(|header| !header.active.is_empty() && header.generation >= generation);
    let found = sides.iter().map(|side| side.header.generation).max().unwrap_or_default();
    let newest = newest.ok_or(CompositeError::Stale { found, expected: generation })?;
    let same = |side: &Side| {
        side.header.generation != newest.generation || side.header.active == newest.active
    };
    if !sides.iter().all(same) {
        return Err(CompositeError::Diverged(newest.generation));
    }
    if !sides.iter().any(|side| newest.active.contains(&side.header.id)) {
        return Err(CompositeError::Stale { found, expected: generation });
    }
    Ok(newest.clone())
}

fn assemble(
    fresh: Vec<Side>,
    newest: &ComponentHeader,
    read_only: bool,
) -> (Arc<Shared>, Vec<ComponentHeader>) {
    assert!(
        newest.kind == Kind::Mirror && fresh.len() <= SIDES_MAX,
        "the opener has looked at the headers"
    );
    // A crash while the mirror got another length leaves the old one on some sides. Until all have
    // the new one nobody uses what lies behind the shorter of both.
    let lens = fresh.iter().map(|side| side.header.len);
    let capacity = lens.min().expect("one side is in the list");
    let headers = fresh
        .iter()
        .map(|side| ComponentHeader { len: capacity, unit: newest.unit, ..side.header.clone() })
        .collect();
    let sides = fresh.into_iter().map(|side| Component::new(side.name, side.device)).collect();
    let shared = Shared::new(sides, capacity, newest.unit, read_only);
    (Arc::new(shared), headers)
}

impl Worker {
    /// Records which sides are active, and makes the sides equal.
    fn recover(&mut self, raise: bool) -> io::Result<()> {
        let dead = || io::Error::from_raw_os_error(libc::EIO);
        if raise {
            let live = self.shared.live.load(Ordering::SeqCst);
            let failed = self.raise(live);
            if failed != 0 && !self.put_out(failed, &dead()) {
                return Err(dead());
            }
            // Only now that a side has it: where all failed, all would be stale for good.
            self.announce(0);
        }
        let dirty = self.read_maps();
        let live = self.shared.live.load(Ordering::SeqCst);
        if live.count_ones() > 1 && dirty.contains(&true) {
            let count = dirty.iter().filter(|dirty| **dirty).count();
            let bytes = count as u64 * self.shared.regions.region_len();
            tracing::warn!(
                regions = count,
                bytes,
                "the mirror was not closed cleanly: its sides are made equal"
            );
            for i in (0..dirty.len()).filter(|i| dirty[*i]) {
                self.make_equal(i)?;
            }
        }
        // The map is clean only when the copies are durable; `write_map` flushes what it wrote
        // itself, after them.
        let failed = self.flush_sides(self.shared.live.load(Ordering::SeqCst));
        if failed != 0 && !self.put_out(failed, &dead()) {
            return Err(dead());
        }
        self.write_map(&vec![false; dirty.len()], true)
    }

    /// Regions that any side calls dirty; all, if one has no map that is whole.
    fn read_maps(&mut self) -> Vec<bool> {
        let regions = self.shared.regions.count();
        let mut dirty = vec![false; regions];
        for (_, side) in self.shared.those(self.shared.live.load(Ordering::SeqCst)) {
            let mut newest: Option<Map> = None;
            let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
            for offset in MAP_OFFSETS {
                if side.device().read(offset, &mut block).is_err() {
                    continue;
                }
                let found = map::decode(&block, &self.headers[0].set);
                newest = newest.into_iter().chain(found).max_by_key(|map| map.sequence);
            }
            match newest {
                Some(map) => {
                    self.map_sequence = self.map_sequence.max(map.sequence);
                    let region_len = self.shared.regions.region_len();
                    let bits = map.regions(self.shared.capacity(), region_len);
                    dirty.iter_mut().zip(bits).for_each(|(dirty, bit)| *dirty |= bit);
                }
                None => dirty.fill(true),
            }
        }
        dirty
    }

    /// Copies what differs in a region from one side to the others. Any side will do: all that was
    /// flushed is on each.
    fn make_equal(&mut self, region: usize) -> io::Result<()> {
        let len = self.shared.regions.region_len();
        let end = ((region as u64 + 1) * len).min(self.shared.capacity());
        let mut at = region as u64 * len;
        while at < end {
            let len = COMPARE_LEN.min(end - at);
            self.make_range_equal(at, len as usize)?;
            at += len;
        }
        Ok(())
    }

    fn make_range_equal(&mut self, at: u64, len: usize) -> io::Result<()> {
        let live = self.shared.live.load(Ordering::SeqCst);
        let mut from = AlignedBuf::zeroed(len);
        let whole = self.shared.those(live).find(|(_, side)| side.read(at, &mut from).is_ok());
        let Some((source, _)) = whole else {
            // A bad block of each side: the others are made equal, one by one.
            return self.make_blocks_equal(at, len);
        };
        self.give_others(source, at, &from)
    }

    /// Writes `from`, which `source` has, to the other sides where they have something else.
    fn give_others(&mut self, source: usize, at: u64, from: &AlignedBuf) -> io::Result<()> {
        let live = self.shared.live.load(Ordering::SeqCst);
        let mut to = AlignedBuf::zeroed(from.len());
        for i in bits(live & !(1 << source)) {
            let side = Arc::clone(self.shared.side(i));
            let equal = side.read(at, &mut to).is_ok() && to[..] == from[..];
            if let Some(error) = (!equal).then(|| side.write(at, from).err()).flatten()
                && !self.put_out(1 << i, &error)
            {
                return Err(error);
            }
        }
        Ok(())
    }

    /// A block that no side can read is left as it is: its readers get the error.
    fn make_blocks_equal(&mut self, at: u64, len: usize) -> io::Result<()> {
        let mut from = AlignedBuf::zeroed(BLOCK_SIZE);
        let mut unreadable = 0_u64;
        for at in (at..at + len as u64).step_by(BLOCK_SIZE) {
            let live = self.shared.live.load(Ordering::SeqCst);
            let source = self.shared.those(live).find(|(_, side)| side.read(at, &mut from).is_ok());
            match source.map(|(source, _)| source) {
                Some(source) => self.give_others(source, at, &from)?,
                None => unreadable += 1,
            }
        }
        if unreadable > 0 {
            tracing::error!(
                offset = at,
                blocks = unreadable,
                "no side of the mirror can read some blocks"
            );
        }
        Ok(())
    }
}
