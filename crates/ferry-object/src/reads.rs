//! Reads of blocks: from memory, from what was read ahead, from the cache on disk, or from the
//! store; and what is fetched from the store ahead of readers.

use crate::ahead::{Fetch, Found};
use crate::batch::Pending;
use crate::cache::DiskCache;
use crate::device::ObjectDevice;
use crate::error::ObjectError;
use crate::executor::{Answer, Job};
use crate::format::{BLOCK, FRONT_LEN, Front, Location, ObjectRef};
use crate::runs::{RunMap, Sliced};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// So much of an object that was not read before is fetched with its front.
const FIRST_BYTES_MAX: u64 = (4 << 20) - FRONT_LEN;

/// Fronts of objects in memory, at most.
const FRONTS_MAX: usize = 4096;

impl ObjectDevice {
    /// Where the blocks of a range are.
    fn locate(&self, start: u64, len: u64) -> Result<RunMap<Where>, ObjectError> {
        let state = self.state.lock();
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        let mut found = RunMap::default();
        for run in state.map.find(start, len) {
            found.insert(run.start, run.len, Where::Store(run.value));
        }
        let pending = state.sealed.iter().map(|sealed| &*sealed.runs);
        for runs in pending.chain([&state.open.runs]) {
            for run in runs.find(start, len) {
                found.insert(run.start, run.len, Where::Memory(run.value));
            }
        }
        Ok(found)
    }

    /// What the store has of a range: where, and how many blocks.
    pub(crate) fn stored(&self, start: u64, len: u64) -> Result<Vec<(Location, u64)>, ObjectError> {
        let found = self.locate(start, len)?;
        let stored = found.iter().filter_map(|run| match run.value {
            Where::Store(location) => Some((location, run.len)),
            Where::Memory(_) => None,
        });
        Ok(stored.collect())
    }

    pub(crate) fn read_blocks(&self, start: u64, buf: &mut [u8]) -> Result<(), ObjectError> {
        let found = self.locate(start, (buf.len() / BLOCK) as u64)?;
        let mut filled = 0;
        for run in found.iter() {
            let from = (run.start - start) as usize * BLOCK;
            buf[filled..from].fill(0);
            filled = from + run.len as usize * BLOCK;
            let part = &mut buf[from..from + run.len as usize * BLOCK];
            match &run.value {
                Where::Memory(pending) => match pending.bytes(run.len) {
                    Some(bytes) => part.copy_from_slice(bytes),
                    None => part.fill(0),
                },
                Where::Store(location) => self.fetch(*location, part)?,
            }
        }
        buf[filled..].fill(0);
        self.await_term()
    }

    /// Reads blocks of an object, and verifies them.
    fn fetch(&self, location: Location, out: &mut [u8]) -> Result<(), ObjectError> {
        let from = location.block * BLOCK as u64;
        let bytes = from..from + out.len() as u64;
        let front = self.front(location.object)?;
        let stored = front.stored(&bytes)?;
        self.verified(location.object, stored, |stored| front.extract(&bytes, stored, out))
    }

    /// Hands bytes of an object to `verify`, which finds out whether they are what was written:
    /// those that were read ahead, those of the cache on disk, or those of the store.
    fn verified<T>(
        &self,
        object: ObjectRef,
        range: Range<u64>,
        mut verify: impl FnMut(&[u8]) -> Result<T, ObjectError>,
    ) -> Result<T, ObjectError> {
        let whole = self.small.lock().of(object).cloned();
        if let Some(bytes) = whole {
            let at = |offset: u64| bytes.len().min(offset as usize);
            return verify(&bytes[at(range.start)..at(range.end)]);
        }
        loop {
            let now = self.env.clock.monotonic();
            match self.ahead.read(object, &range, now, || self.access.executor.step()) {
                Found::Nothing => break,
                Found::Fetch(fetch) => {
                    self.fetched_ahead(&fetch, self.fetch_span(&fetch));
                    // There may be more to fetch now, behind a front.
                    self.start_fetchers();
                }
                Found::Bytes(bytes) => match verify(&bytes) {
                    Err(error) => {
                        tracing::debug!(%error, "what was read ahead is something else");
                        self.ahead.forget(object, &range);
                        break;
                    }
                    verified => return verified,
                },
            }
        }
        let cache = self.cache.get();
        if let Some((cache, bytes)) = cache.and_then(|it| Some((it, it.read(object, &range)?))) {
            match verify(&bytes) {
                Err(error) => {
                    tracing::debug!(%error, "the cache has something else");
                    cache.remove(object, &range);
                }
                verified => return verified,
            }
        }
        let is_wide = cache.is_some() || self.ahead.is_near_another(object, &range);
        let wide = if is_wide { DiskCache::widened(&range) } else { range.clone() };
        let bytes = self.access_of(object).get(&object.name(), Some(wide.clone()))?;
        let at = |offset: u64| bytes.len().min((offset - wide.start) as usize);
        let verified = verify(&bytes[at(range.start)..at(range.end)])?;
        match cache {
            Some(cache) => cache.add(object, wide.start, &bytes),
            // There is no more of it.
            None if wide.start == 0 && (bytes.len() as u64) < wide.end => {
                self.small.lock().add(object, Arc::new(bytes));
            }
            None if is_wide => {
                self.ahead.insert(object, wide.start, bytes, self.env.clock.monotonic());
            }
            None => {}
        }
        Ok(verified)
    }

    pub(crate) fn front(&self, object: ObjectRef) -> Result<Arc<Front>, ObjectError> {
        if let Some(front) = self.fronts.lock().get(&object) {
            return Ok(Arc::clone(front));
        }
        self.verified(object, 0..FRONT_LEN, |bytes| self.add_front(object, bytes))
    }

    fn add_front(&self, object: ObjectRef, bytes: &[u8]) -> Result<Arc<Front>, ObjectError> {
        let front = Front::decode(&self.access_of(object).codec, &object.name(), bytes)?;
        let front = Arc::new(front.expect_object(object, self.volume.id_of(object))?);
        let mut fronts = self.fronts.lock();
        if fronts.len() >= FRONTS_MAX {
            fronts.clear();
        }
        fronts.insert(object, Arc::clone(&front));
        Ok(front)
    }

    /// Has blocks fetched that will be read soon.
    pub(crate) fn read_blocks_ahead(&self, start: u64, len: u64) {
        let Ok(found) = self.locate(start, len) else { return };
        for run in found.iter() {
            if let Where::Store(location) = run.value {
                let from = location.block * BLOCK as u64;
                self.read_object_ahead(location.object, from..from + run.len * BLOCK as u64);
            }
        }
        self.start_fetchers();
    }

    /// Has contents of an object fetched that will be read soon. Where they are in the object its
    /// front tells. If that is not here, what begins with the front is fetched first.
    fn read_object_ahead(&self, object: ObjectRef, contents: Range<u64>) {
        if self.small.lock().of(object).is_some() {
            return;
        }
        let front = self.fronts.lock().get(&object).cloned();
        if let Some(front) = front {
            return self.add_ahead(object, &front, &contents);
        }
        let with_front = contents.start == 0;
        let begin = FRONT_LEN + if with_front { contents.end } else { 0 };
        if self.ahead.add_unresolved(object, contents) {
            let begin = 0..begin.min(FRONT_LEN + FIRST_BYTES_MAX);
            self.add_stored_ahead(object, &begin);
            let cached = self.cache.get().is_some_and(|cache| cache.has(object, &(0..FRONT_LEN)));
            // The rest is fetched when the begin has come; if there is no room for that, not at
            // all.
            if cached {
                self.resolve_ahead(object, self.front(object));
            } else if !self.ahead.has_begin(object) {
                self.ahead.take_unresolved(object);
            }
        }
        // The front may have come since it was looked for.
        let front = self.fronts.lock().get(&object).cloned();
        if let Some(front) = front {
            self.resolve_ahead(object, Ok(front));
        }
    }

    /// The front of an object is here: the rest of what is wanted of the object is known.
    fn resolve_ahead(&self, object: ObjectRef, front: Result<Arc<Front>, ObjectError>) {
        let wanted = self.ahead.take_unresolved(object);
        match front {
            Ok(front) => {
                wanted.iter().for_each(|contents| self.add_ahead(object, &front, contents));
            }
            Err(error) => tracing::debug!(%error, "not read ahead"),
        }
    }

    fn add_ahead(&self, object: ObjectRef, front: &Front, contents: &Range<u64>) {
        // What is wrong with the object its reader finds again.
        if let Ok(stored) = front.stored(contents) {
            self.add_stored_ahead(object, &stored);
        }
    }

    fn add_stored_ahead(&self, object: ObjectRef, range: &Range<u64>) {
        let cached =
            |part: &Range<u64>| self.cache.get().is_some_and(|cache| cache.has(object, part));
        self.ahead.add(object, range, self.env.clock.monotonic(), cached);
    }

    /// Starts jobs that fetch what is to be read ahead.
    fn start_fetchers(&self) {
        while self.ahead.wants_fetcher() {
            let me = self.me();
            let run = move || -> Answer {
                let fetched = me.ahead.next_fetch().map(|fetch| (me.fetch_span(&fetch), fetch));
                Box::new(move || {
                    me.ahead.fetcher_ended();
                    if let Some((bytes, fetch)) = fetched {
                        me.fetched_ahead(&fetch, bytes);
                    }
                    me.start_fetchers();
                })
            };
            let job = Job { upload: None, after: Duration::ZERO, run: Box::new(run) };
            self.access.executor.start(job);
        }
    }

    /// Tried once: a reader insists.
    fn fetch_span(&self, fetch: &Fetch) -> Option<Vec<u8>> {
        let access = self.access_of(fetch.object);
        let fetched = access.get_once(&fetch.object.name(), fetch.range.clone());
        fetched.inspect_err(|error| tracing::debug!(%error, "not read ahead")).ok()
    }

    fn fetched_ahead(&self, fetch: &Fetch, bytes: Option<Vec<u8>>) {
        let bytes = bytes.map(Arc::new);
        let is_begin = fetch.range.start == 0;
        if let Some(bytes) = bytes.as_ref().filter(|_| is_begin) {
            // What is wanted behind the front is noted before a reader wakes, which would ask for
            // it itself.
            let front = &bytes[..bytes.len().min(FRONT_LEN as usize)];
            self.resolve_ahead(fetch.object, self.add_front(fetch.object, front));
        }
        self.ahead.ended(fetch, bytes.clone());
        if is_begin && bytes.is_none() {
            self.ahead.take_unresolved(fetch.object);
        }
        if let (Some(bytes), Some(cache)) = (bytes, self.cache.get()) {
            cache.add(fetch.object, fetch.range.start, &bytes);
        }
    }
}

/// Where blocks are.
#[derive(Clone)]
enum Where {
    Memory(Pending),
    Store(Location),
}

impl Sliced for Where {
    fn after(&self, skip: u64) -> Self {
        match self {
            Self::Memory(pending) => Self::Memory(pending.after(skip)),
            Self::Store(location) => Self::Store(location.after(skip)),
        }
    }

    fn continues(&self, len: u64, next: &Self) -> bool {
        match (self, next) {
            (Self::Store(location), Self::Store(next)) => location.continues(len, next),
            _ => false,
        }
    }
}
