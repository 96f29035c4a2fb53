//! [`DiskCache`]: parts of objects on a disk of this machine.
//!
//! Objects never change, so a part is never stale. The cache may be lost or damaged at any time,
//! which costs only time: what is read from it is verified by the frames' own checksums, as what is
//! read from the store is. So nothing is made durable here, and there are no checksums beside.
//!
//! It is one file: a header, an index with an entry for each slot, and the slots, each of which has
//! a part of an object. An entry is written after its slot. If a crash loses one of the two, the
//! frames tell. While a slot is read, it may be given to another part: the reader looks afterwards
//! whether the part still has it.
//!
//! What `ferry warm` brings in is *pinned* until the next `ferry warm` begins: it evicts other
//! parts, and never its own. So it is told when the cache is full. The index says what is pinned:
//! the next opening of the volume evicts none of it.

use crate::error::ObjectError;
use crate::format::{Id, ObjectRef};
use ferry_device::FileLock;
use parking_lot::Mutex;
use quick_cache::sync::Cache;
use quick_cache::{DefaultHashBuilder, Lifecycle, OptionsBuilder, UnitWeighter};
use std::fs::{self, File, Permissions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// A cache on a disk, as a user asks for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheOptions {
    /// The directory that it is in.
    pub directory: PathBuf,
    /// Bytes of the disk that it may take.
    pub bytes: u64,
}

impl CacheOptions {
    /// The smallest cache.
    pub const BYTES_MIN: u64 = 64 << 20;
    /// The size if the user says none.
    pub const BYTES_DEFAULT: u64 = 10 << 30;
}

/// Bytes of a part: so much is read from the store at least.
pub(crate) const PART: u64 = 128 << 10;
/// The name of the file in its directory.
const FILE: &str = "ferry-cache";
const MAGIC: &[u8; 8] = b"FERRYCCH";
const VERSION: u32 = 1;
/// Bytes of the header, and a multiple for what follows.
const BLOCK: u64 = 4096;
/// Bytes of an entry of the index.
const ENTRY: u64 = 32;
/// One part of so many is not pinned.
const PINNED_REST: u64 = 8;
/// The policy divides its parts among so many tables with locks of their own.
const SHARDS: u64 = 16;
/// So many slots of each: the shards do not fill evenly, and one that is full of what was warmed
/// would give up all of it.
const SHARD_SLOTS_MIN: u64 = 4096;
/// So many slots are free when the policy is full: a new part is written before an old one leaves,
/// and each table may round its share up.
const SPARE: u64 = 2 * SHARDS;

/// A part of an object: its bytes from a multiple of [`PART`] on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Part {
    object: ObjectRef,
    number: u32,
}

/// Where a part is, and how long. Only the last part of an object may be shorter than [`PART`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slot {
    number: u32,
    len: u32,
    /// The warming that wanted it last; 0: none did.
    warming: u32,
}

impl Slot {
    /// This warming wanted it last.
    fn is_of(self, warming: u32) -> bool {
        self.warming != 0 && self.warming == warming
    }
}

/// Collects the slots of parts that the policy evicts.
#[derive(Clone, Default)]
struct Evicted {
    /// The warming whose parts stay; 0: none do.
    pinned: Arc<AtomicU32>,
}

impl Lifecycle<Part, Slot> for Evicted {
    type RequestState = Vec<u32>;

    fn is_pinned(&self, _part: &Part, slot: &Slot) -> bool {
        slot.is_of(self.pinned.load(Ordering::Relaxed))
    }

    fn on_evict(&self, slots: &mut Vec<u32>, _part: Part, slot: Slot) {
        slots.push(slot.number);
    }
}

/// Figures of a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Reads that it answered.
    pub hits: u64,
    /// Reads that went to the store.
    pub misses: u64,
    /// Bytes of the slots in use.
    pub bytes: u64,
    /// Bytes of all slots.
    pub bytes_max: u64,
    /// Parts that were not what was written.
    pub damaged: u64,
}

/// The newest warming.
#[derive(Default)]
struct Warming {
    /// Its number; 0: there was none, or its parts are pinned no more.
    pinned: Arc<AtomicU32>,
    /// The number of the last one.
    last: AtomicU32,
    /// Parts that are pinned for it.
    parts: AtomicU64,
    /// Parts that are being fetched for it.
    fetching: AtomicU64,
}

/// Whether a part is pinned now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pinned {
    /// It is here, so many bytes long; 0 if this warming pinned it before.
    Here(u64),
    /// It is not here.
    Absent,
    /// The cache is full of what is pinned.
    Full,
}

/// Parts of a volume's objects in a file.
pub(crate) struct DiskCache {
    path: PathBuf,
    file: File,
    _lock: FileLock,
    slots: u64,
    parts: Cache<Part, Slot, UnitWeighter, DefaultHashBuilder, Evicted>,
    /// Slots that have no part. Held while a part is added or pinned.
    free: Mutex<Vec<u32>>,
    warming: Warming,
    /// The disk is full or failed: nothing is added any more.
    broken: AtomicBool,
    hits: AtomicU64,
    misses: AtomicU64,
    damaged: AtomicU64,
}

impl DiskCache {
    /// Opens the cache of a volume, or makes it. What another volume or program has there is left
    /// alone.
    pub fn open(options: &CacheOptions, volume: &Id) -> Result<Self, ObjectError> {
        let path = options.directory.join(FILE);
        let failed =
            |error: io::Error| ObjectError::Setup(format!("the cache {}: {error}", path.display()));
        fs::create_dir_all(&options.directory).map_err(failed)?;
        // What is found is looked at before anything is changed.
        let found = read_header(&path).map_err(failed)?;
        let refused = |what: &str| {
            Err(ObjectError::Setup(format!(
                "{}: {what}, and is left alone: remove it, or name another directory for the cache",
                path.display()
            )))
        };
        let slots = (options.bytes.max(CacheOptions::BYTES_MIN) - BLOCK) / (PART + ENTRY);
        match &found {
            Found::Foreign => return refused("this is no cache"),
            Found::Cache { volume: other, .. } if other != volume => {
                return refused("this is the cache of another volume");
            }
            Found::Cache { .. } | Found::Nothing => {}
        }
        let lock = match FileLock::take(&path, true).map_err(failed)? {
            Ok(lock) => lock,
            Err(holder) => return Err(ObjectError::CacheInUse { path, pid: holder.pid }),
        };
        let file = File::options().read(true).write(true).open(&path).map_err(failed)?;
        // It has parts of all users' files.
        file.set_permissions(Permissions::from_mode(0o600)).map_err(failed)?;
        let warming = Warming::default();
        let parts = Cache::with_options(
            OptionsBuilder::new()
                .estimated_items_capacity(slots as usize)
                .weight_capacity(slots - SPARE)
                .shards((slots / SHARD_SLOTS_MIN).clamp(1, SHARDS) as usize)
                .build()
                .expect("all that is needed is given"),
            UnitWeighter,
            DefaultHashBuilder::default(),
            Evicted { pinned: Arc::clone(&warming.pinned) },
        );
        let cache = Self {
            path: path.clone(),
            file,
            _lock: lock,
            slots,
            parts,
            free: Mutex::new((0..slots as u32).rev().collect()),
            warming,
            broken: AtomicBool::new(false),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            damaged: AtomicU64::new(0),
        };
        match found {
            Found::Cache { slots: before, .. } if before == slots => cache.load(),
            _ => cache.clear(volume),
        }
        .map_err(failed)?;
        Ok(cache)
    }

    /// Makes an empty cache of the file.
    fn clear(&self, volume: &Id) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.set_len(self.slot_offset(self.slots as u32))?;
        let mut header = Vec::with_capacity(BLOCK as usize);
        header.extend(MAGIC);
        header.extend(VERSION.to_le_bytes());
        header.extend((PART as u32).to_le_bytes());
        header.extend(volume);
        header.extend(self.slots.to_le_bytes());
        self.file.write_all_at(&header, 0)
    }

    /// Reads the index.
    fn load(&self) -> io::Result<()> {
        let mut index = vec![0; (self.slots * ENTRY) as usize];
        self.file.read_exact_at(&mut index, BLOCK)?;
        let entries = || {
            let numbers = 0_u32..;
            numbers.zip(index.chunks_exact(ENTRY as usize).map(decode_entry))
        };
        let mut free = self.free.lock();
        free.clear();
        let newest = entries().filter_map(|(_, entry)| Some(entry?.warming)).max().unwrap_or(0);
        self.warming.last.store(newest, Ordering::Relaxed);
        self.warming.pinned.store(newest, Ordering::Relaxed);
        for (number, entry) in entries() {
            match entry {
                // Of two slots with one part, the second one was left behind.
                Some(Entry { part, len, warming }) if !self.parts.contains_key(&part) => {
                    let mut evicted = Vec::new();
                    let slot = Slot { number, len, warming };
                    self.parts.insert_with_lifecycle(part, slot, &mut evicted);
                    free.extend(evicted);
                    self.warming.parts.fetch_add(slot.is_of(newest).into(), Ordering::Relaxed);
                }
                _ => free.push(number),
            }
        }
        Ok(())
    }

    fn slot_offset(&self, slot: u32) -> u64 {
        let index = (self.slots * ENTRY).next_multiple_of(BLOCK);
        BLOCK + index + u64::from(slot) * PART
    }

    /// The bytes of an object in a range, or up to the object's end, if all of them are here. They
    /// are not verified.
    pub fn read(&self, object: ObjectRef, range: &Range<u64>) -> Option<Vec<u8>> {
        let found = self.read_parts(object, range);
        let counter = if found.is_some() { &self.hits } else { &self.misses };
        counter.fetch_add(1, Ordering::Relaxed);
        found
    }

    fn read_parts(&self, object: ObjectRef, range: &Range<u64>) -> Option<Vec<u8>> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        let mut at = range.start;
        while at < range.end {
            let part = Part { object, number: (at / PART) as u32 };
            let slot = self.parts.get(&part)?;
            let begin = u64::from(part.number) * PART;
            let end = range.end.min(begin + u64::from(slot.len));
            let filled = (at - range.start) as usize;
            if at < end {
                let into = &mut bytes[filled..(end - range.start) as usize];
                let from = self.slot_offset(slot.number) + (at - begin);
                self.file.read_exact_at(into, from).ok()?;
            }
            // It may have been evicted meanwhile.
            if self.parts.peek(&part).map(|slot| slot.number) != Some(slot.number) {
                return None;
            }
            if u64::from(slot.len) < PART {
                bytes.truncate((end.max(at) - range.start) as usize);
                return Some(bytes);
            }
            at = begin + PART;
        }
        Some(bytes)
    }

    /// Whether all of a range of an object is here, which is not read.
    pub fn has(&self, object: ObjectRef, range: &Range<u64>) -> bool {
        let mut parts = range.start / PART..range.end.div_ceil(PART);
        parts.all(|number| self.parts.contains_key(&Part { object, number: number as u32 }))
    }

    /// The range that is read from the store where this one is not here: whole parts.
    pub fn widened(range: &Range<u64>) -> Range<u64> {
        range.start - range.start % PART..range.end.next_multiple_of(PART)
    }

    /// Adds the bytes of an object from a multiple of a part's length on, which end at such a
    /// multiple or at the object's end.
    pub fn add(&self, object: ObjectRef, start: u64, bytes: &[u8]) {
        for (n, bytes) in bytes.chunks(PART as usize).enumerate() {
            let number = (start / PART) as u32 + n as u32;
            if !self.add_or_break(Part { object, number }, bytes, 0) {
                return;
            }
        }
    }

    /// Adds a part; `false`: the cache takes nothing more.
    fn add_or_break(&self, part: Part, bytes: &[u8], warming: u32) -> bool {
        if self.is_broken() {
            return false;
        }
        if let Err(error) = self.add_part(part, bytes, warming)
            && !self.broken.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(%error, "the cache {} gets nothing more: its disk is full or has failed", self.path.display());
        }
        !self.is_broken()
    }

    /// The disk is full or failed: nothing is added any more.
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    fn add_part(&self, part: Part, bytes: &[u8], warming: u32) -> io::Result<()> {
        let mut free = self.free.lock();
        if self.parts.contains_key(&part) {
            return Ok(());
        }
        if free.is_empty() && warming == 0 {
            self.unpin(&mut free);
        }
        let Some(number) = free.pop() else { return Ok(()) };
        let len = bytes.len() as u32;
        let written = self
            .file
            .write_all_at(bytes, self.slot_offset(number))
            .and_then(|()| self.write_entry(number, &Entry { part, len, warming }.encode()));
        if written.is_err() {
            free.push(number);
            return written;
        }
        let mut evicted = Vec::new();
        self.parts.insert_with_lifecycle(part, Slot { number, len, warming }, &mut evicted);
        self.warming.parts.fetch_add(u64::from(warming != 0), Ordering::Relaxed);
        free.extend(evicted);
        Ok(())
    }

    /// Pinned parts have taken the spare slots, too, and leave none for what is read. A part
    /// leaves, and from now on the policy may evict what was pinned.
    fn unpin(&self, free: &mut Vec<u32>) {
        self.warming.pinned.store(0, Ordering::Relaxed);
        let first = self.parts.iter().next().map(|(part, _)| part);
        free.extend(first.and_then(|part| self.parts.remove(&part)).map(|(_, slot)| slot.number));
    }

    /// A new warming begins: what an earlier one has pinned may be evicted.
    pub fn begin_warming(&self) {
        let _free = self.free.lock();
        let next = self.warming.last.load(Ordering::Relaxed).wrapping_add(1).max(1);
        self.warming.last.store(next, Ordering::Relaxed);
        self.warming.pinned.store(next, Ordering::Relaxed);
        self.warming.parts.store(0, Ordering::Relaxed);
    }

    /// Pins a part, if it is here and there is room for one more.
    pub fn pin(&self, object: ObjectRef, number: u64) -> Pinned {
        let part = Part { object, number: number as u32 };
        let mut free = self.free.lock();
        let warming = self.warming.pinned.load(Ordering::Relaxed);
        let slot = match self.parts.peek(&part) {
            Some(slot) if slot.warming == warming => return Pinned::Here(0),
            _ if !self.may_pin() => return Pinned::Full,
            None => return Pinned::Absent,
            Some(slot) => slot,
        };
        let mut evicted = Vec::new();
        let pinned = Slot { warming, ..slot };
        if self.parts.replace_with_lifecycle(part, pinned, true, &mut evicted).is_err() {
            return Pinned::Absent;
        }
        let entry = Entry { part, len: slot.len, warming };
        if let Err(error) = self.write_entry(slot.number, &entry.encode()) {
            tracing::debug!(%error, "a part is pinned until the cache is closed only");
        }
        self.warming.parts.fetch_add(1, Ordering::Relaxed);
        // The value that was replaced counts as evicted.
        free.extend(evicted.into_iter().filter(|number| *number != slot.number));
        Pinned::Here(slot.len.into())
    }

    /// Reserves room for parts that are to be fetched and pinned, for so many at most. Returns for
    /// how many; [`DiskCache::fetched`] ends that.
    pub fn reserve(&self, parts: u64) -> u64 {
        let _free = self.free.lock();
        let taken = self.warming.parts.load(Ordering::Relaxed)
            + self.warming.fetching.load(Ordering::Relaxed);
        let reserved = parts.min(self.pinned_max().saturating_sub(taken));
        self.warming.fetching.fetch_add(reserved, Ordering::Relaxed);
        reserved
    }

    /// So many parts are being fetched no more.
    pub fn fetched(&self, parts: u64) {
        self.warming.fetching.fetch_sub(parts, Ordering::Relaxed);
    }

    /// As [`DiskCache::add`], and pins what it adds. `false`: not all of it is here now.
    pub fn add_pinned(&self, object: ObjectRef, start: u64, bytes: &[u8]) -> bool {
        bytes.chunks(PART as usize).enumerate().all(|(n, bytes)| {
            let number = start / PART + n as u64;
            let part = Part { object, number: number as u32 };
            match self.pin(object, number) {
                Pinned::Here(_) => true,
                Pinned::Full => false,
                Pinned::Absent => {
                    let warming = self.warming.pinned.load(Ordering::Relaxed);
                    self.add_or_break(part, bytes, warming) && self.parts.contains_key(&part)
                }
            }
        })
    }

    /// So many parts may be pinned. What is read otherwise, as the tables of the file system, has
    /// the rest.
    fn pinned_max(&self) -> u64 {
        self.slots - self.slots / PINNED_REST
    }

    /// Whether one more part may be pinned.
    fn may_pin(&self) -> bool {
        self.warming.parts.load(Ordering::Relaxed) < self.pinned_max()
    }

    fn write_entry(&self, slot: u32, entry: &[u8; ENTRY as usize]) -> io::Result<()> {
        self.file.write_all_at(entry, BLOCK + u64::from(slot) * ENTRY)
    }

    /// Forgets what it has of a range: that is not what was written.
    pub fn remove(&self, object: ObjectRef, range: &Range<u64>) {
        self.damaged.fetch_add(1, Ordering::Relaxed);
        let mut free = self.free.lock();
        for number in range.start / PART..range.end.div_ceil(PART) {
            let part = Part { object, number: number as u32 };
            if let Some((_, slot)) = self.parts.remove(&part) {
                if let Err(error) = self.write_entry(slot.number, &[0; ENTRY as usize]) {
                    tracing::debug!(%error, "an entry of the cache stays");
                }
                free.push(slot.number);
            }
        }
    }

    /// Its figures.
    pub fn stats(&self) -> CacheStats {
        CacheStats {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            bytes: self.parts.len() as u64 * PART,
            bytes_max: self.slots * PART,
            damaged: self.damaged.load(Ordering::Relaxed),
        }
    }
}

/// What is in the file of a cache.
enum Found {
    Nothing,
    Foreign,
    Cache { volume: Id, slots: u64 },
}

fn read_header(path: &Path) -> io::Result<Found> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Nothing),
        other => other?,
    };
    if file.metadata()?.len() == 0 {
        return Ok(Found::Nothing);
    }
    let mut header = [0; 40];
    match file.read_exact_at(&mut header, 0) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(Found::Foreign),
        other => other?,
    }
    let [version, part] = [&header[8..12], &header[12..16]];
    if &header[..8] != MAGIC {
        return Ok(Found::Foreign);
    }
    let mut volume = Id::default();
    volume.copy_from_slice(&header[16..32]);
    let same = version == VERSION.to_le_bytes() && part == (PART as u32).to_le_bytes();
    let slots = u64::from_le_bytes(header[32..40].try_into().expect("it has 8 bytes"));
    // A cache of another version is made anew.
    Ok(Found::Cache { volume, slots: if same { slots } else { 0 } })
}

/// What the index says of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    part: Part,
    /// Bytes of the part.
    len: u32,
    /// The warming that wanted it last; 0: none did.
    warming: u32,
}

impl Entry {
    fn encode(self) -> [u8; ENTRY as usize] {
        let mut entry = [0; ENTRY as usize];
        entry[..8].copy_from_slice(&self.part.object.epoch.to_le_bytes());
        entry[8..16].copy_from_slice(&self.part.object.number.to_le_bytes());
        entry[16..20].copy_from_slice(&self.part.number.to_le_bytes());
        entry[20..24].copy_from_slice(&self.len.to_le_bytes());
        entry[24..28].copy_from_slice(&self.warming.to_le_bytes());
        entry
    }
}

/// `None`: the slot has no part.
fn decode_entry(entry: &[u8]) -> Option<Entry> {
    let u64_at = |at: usize| Some(u64::from_le_bytes(entry.get(at..at + 8)?.try_into().ok()?));
    let u32_at = |at: usize| Some(u32::from_le_bytes(entry.get(at..at + 4)?.try_into().ok()?));
    let object = ObjectRef { epoch: u64_at(0)?, number: u64_at(8)? };
    let (part, len) = (Part { object, number: u32_at(16)? }, u32_at(20)?);
    let found = Entry { part, len, warming: u32_at(24)? };
    (len > 0 && u64::from(len) <= PART).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OBJECT: ObjectRef = ObjectRef { epoch: 3, number: 5 };
    const VOLUME: Id = [7; 16];

    fn options(directory: &Path) -> CacheOptions {
        CacheOptions { directory: directory.join("a/b"), bytes: CacheOptions::BYTES_MIN }
    }

    fn open(directory: &Path) -> DiskCache {
        DiskCache::open(&options(directory), &VOLUME).expect("it can be opened")
    }

    /// Bytes that tell where they are from.
    fn bytes(object: u64, len: usize) -> Vec<u8> {
        let word = |n: usize| (object << 32 | n as u64).to_le_bytes();
        (0..len.div_ceil(8)).flat_map(word).take(len).collect()
    }

    #[test]
    fn what_was_added_is_read_in_any_range_also_when_it_is_opened_again() {
        let directory = tempfile::tempdir().expect("a directory");
        let whole = bytes(5, 300_000);
        let cache = open(directory.path());
        assert_eq!(cache.read(OBJECT, &(0..10)), None);
        cache.add(OBJECT, 0, &whole);
        let check = |cache: &DiskCache| {
            for range in [0..10, 131_000..131_100, 1..262_145, 0..300_000, 299_990..300_000] {
                let wanted = &whole[range.start as usize..range.end as usize];
                assert_eq!(cache.read(OBJECT, &range).as_deref(), Some(wanted), "{range:?}");
            }
            assert_eq!(cache.read(OBJECT, &(299_000..400_000)).as_deref(), Some(&whole[299_000..]));
            assert_eq!(cache.read(OBJECT, &(300_000..300_100)), Some(vec![]), "behind its end");
            assert_eq!(cache.read(ObjectRef { epoch: 4, ..OBJECT }, &(0..10)), None);
        };
        check(&cache);
        drop(cache);
        let cache = open(directory.path());
        check(&cache);
        assert_eq!(cache.stats().bytes, 3 * PART);
        cache.remove(OBJECT, &(0..1));
        assert_eq!(cache.read(OBJECT, &(0..10)), None);
        assert!(cache.read(OBJECT, &(PART..PART + 10)).is_some());
        drop(cache);
        assert_eq!(open(directory.path()).read(OBJECT, &(0..10)), None);
    }

    #[test]
    fn a_part_of_the_middle_is_added_alone() {
        let directory = tempfile::tempdir().expect("a directory");
        let cache = open(directory.path());
        let whole = bytes(5, 4 << 17);
        let range = DiskCache::widened(&(PART + 5..2 * PART + 1));
        assert_eq!(range, PART..3 * PART);
        cache.add(OBJECT, range.start, &whole[range.start as usize..range.end as usize]);
        assert_eq!(cache.read(OBJECT, &(PART - 1..PART + 1)), None);
        assert_eq!(cache.read(OBJECT, &(3 * PART - 1..3 * PART + 1)), None);
        let wanted = &whole[PART as usize..3 * PART as usize];
        assert_eq!(cache.read(OBJECT, &range).as_deref(), Some(wanted));
    }

    #[test]
    fn a_full_cache_evicts_and_what_is_used_again_stays() {
        let directory = tempfile::tempdir().expect("a directory");
        let cache = open(directory.path());
        let object = |number: u64| ObjectRef { epoch: 1, number };
        cache.add(object(0), 0, &bytes(0, 1000));
        for number in 1..2000 {
            cache.add(object(number), 0, &bytes(number, 1000));
            assert_eq!(cache.read(object(number), &(0..1000)), Some(bytes(number, 1000)));
            assert_eq!(cache.read(object(0), &(0..1000)), Some(bytes(0, 1000)), "after {number}");
        }
        let (slots, free) = (cache.slots, cache.free.lock().len() as u64);
        assert_eq!(cache.parts.len() as u64 + free, slots, "no slot is lost");
        assert!(free <= SPARE && cache.stats().bytes <= CacheOptions::BYTES_MIN);
        let length = fs::metadata(&cache.path).expect("it is there").len();
        assert!(length <= CacheOptions::BYTES_MIN + BLOCK, "{length}");
        let found =
            (1..2000).filter_map(|number| Some((number, cache.read(object(number), &(0..1000))?)));
        let found: Vec<_> = found.collect();
        assert!(found.len() > 300, "{}", found.len());
        assert!(found.iter().all(|(number, found)| *found == bytes(*number, 1000)));
    }

    #[test]
    fn what_is_warmed_evicts_what_is_there_until_the_cache_is_full_and_stays() {
        let directory = tempfile::tempdir().expect("a directory");
        let cache = open(directory.path());
        let object = |number: u64| ObjectRef { epoch: 1, number };
        for number in 0..2000 {
            cache.add(object(number), 0, &bytes(number, 1000));
        }
        let warm = |from: u64| {
            cache.begin_warming();
            let wanted = from..from + 2000;
            let is_in = |number: &u64| match cache.pin(object(*number), 0) {
                Pinned::Here(_) => true,
                Pinned::Absent => cache.add_pinned(object(*number), 0, &bytes(*number, 1000)),
                Pinned::Full => false,
            };
            wanted.take_while(is_in).count() as u64
        };
        let all_are_here = |from: u64, count: u64| {
            let here = |number| cache.has(object(number), &(0..1000));
            let missing: Vec<_> = (from..from + count).filter(|number| !here(*number)).collect();
            assert!(missing.is_empty(), "{from}, {count}: {missing:?}");
        };
        let most = cache.slots - cache.slots / PINNED_REST;
        let count = warm(5000);
        assert_eq!(count, most);
        all_are_here(5000, count);
        // Nothing evicts them, and what is read otherwise has the rest.
        for number in 10_000..14_000 {
            cache.add(object(number), 0, &bytes(number, 1000));
        }
        all_are_here(5000, count);
        // What is there already is not fetched, and another warming takes its place.
        assert_eq!((warm(5000), warm(20_000)), (count, most));
        all_are_here(20_000, most);
        let (slots, free) = (cache.slots, cache.free.lock().len() as u64);
        assert_eq!(cache.parts.len() as u64 + free, slots, "no slot is lost");
    }

    #[test]
    fn what_was_warmed_stays_when_the_cache_is_opened_again() {
        let directory = tempfile::tempdir().expect("a directory");
        let object = |number: u64| ObjectRef { epoch: 1, number };
        let cache = open(directory.path());
        let add = |cache: &DiskCache, number: u64| {
            cache.add(object(number), 0, &bytes(number, 1000));
        };
        (0..2000).for_each(|number| add(&cache, number));
        cache.begin_warming();
        // Some were there, and get their pin as they are.
        for number in 1900..2200 {
            let found = cache.pin(object(number), 0) != Pinned::Absent;
            assert!(found || cache.add_pinned(object(number), 0, &bytes(number, 1000)));
        }
        drop(cache);
        for _ in 0..2 {
            let cache = open(directory.path());
            // As an opening of the volume does, which reads much once.
            (10_000..14_000).for_each(|number| add(&cache, number));
            for number in 1900..2200 {
                let found = cache.read(object(number), &(0..1000));
                assert_eq!(found, Some(bytes(number, 1000)), "{number}");
            }
            assert_eq!(cache.warming.parts.load(Ordering::Relaxed), 300);
        }
        let cache = open(directory.path());
        cache.begin_warming();
        (20_000..24_000).for_each(|number| add(&cache, number));
        let stayed = (1900..2200).filter(|number| cache.has(object(*number), &(0..1000))).count();
        assert!(stayed < 300, "another warming has begun");
    }

    #[test]
    fn pinned_parts_that_took_the_spare_slots_do_not_keep_out_what_is_read_later() {
        let directory = tempfile::tempdir().expect("a directory");
        let cache = open(directory.path());
        let object = |number: u64| ObjectRef { epoch: 1, number };
        cache.begin_warming();
        // As if no share of the tables were left.
        let pinned = cache.warming.pinned.load(Ordering::Relaxed);
        for number in 0..cache.slots {
            cache
                .add_part(Part { object: object(number), number: 0 }, &[1; 100], pinned)
                .expect("");
        }
        assert!(cache.free.lock().is_empty());
        for number in 10_000..12_000 {
            cache.add(object(number), 0, &bytes(number, 1000));
        }
        assert!(cache.has(object(11_999), &(0..1000)));
    }

    #[test]
    fn a_reader_beside_writers_gets_what_was_written_or_nothing() {
        let directory = tempfile::tempdir().expect("a directory");
        let cache = Arc::new(open(directory.path()));
        let object = |number: u64| ObjectRef { epoch: 1, number };
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                let cache = Arc::clone(&cache);
                scope.spawn(move || {
                    for n in 0..3000 {
                        let number = (n * 7 + thread * 13) % 900;
                        match cache.read(object(number), &(0..5000)) {
                            // What is read beside an eviction is verified by its frames.
                            Some(found) => assert_eq!(found.len(), 5000),
                            None => cache.add(object(number), 0, &bytes(number, 5000)),
                        }
                    }
                });
            }
        });
        assert_eq!(cache.parts.len() as u64 + cache.free.lock().len() as u64, cache.slots);
    }

    #[test]
    fn what_is_another_volumes_or_no_cache_or_in_use_is_left_alone() {
        let directory = tempfile::tempdir().expect("a directory");
        let options = options(directory.path());
        let said = |volume: &Id| match DiskCache::open(&options, volume) {
            Err(error @ (ObjectError::Setup(_) | ObjectError::CacheInUse { .. })) => {
                error.to_string()
            }
            Err(error) => panic!("{error:?}"),
            Ok(_) => panic!("it is refused"),
        };
        let cache = open(directory.path());
        cache.add(OBJECT, 0, &bytes(5, 1000));
        assert!(said(&VOLUME).contains(&format!("in use by process {}", std::process::id())));
        drop(cache);
        assert!(said(&[8; 16]).contains("the cache of another volume"));
        let cache = open(directory.path());
        assert_eq!(cache.read(OBJECT, &(0..1000)), Some(bytes(5, 1000)), "it is as it was");
        drop(cache);
        // Of another size it begins empty.
        let larger = CacheOptions { bytes: 2 * options.bytes, ..options.clone() };
        let cache = DiskCache::open(&larger, &VOLUME).expect("it is of this volume");
        assert_eq!(cache.read(OBJECT, &(0..1000)), None);
        drop(cache);
        let file = options.directory.join(FILE);
        for text in ["mine", "this is a longer text, and no cache of a volume at all"] {
            fs::write(&file, text).expect("it can be written");
            assert!(said(&VOLUME).contains("this is no cache"));
            assert_eq!(fs::read_to_string(&file).expect("it is there"), text);
        }
    }
}
