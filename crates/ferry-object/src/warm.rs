//! Warming: what lies in ranges of the device is brought into the cache on disk, with many requests
//! at a time. Nothing of it stays in memory.

use crate::cache::{DiskCache, PART, Pinned};
use crate::device::ObjectDevice;
use crate::error::ObjectError;
use crate::executor::{Answer, Job};
use crate::format::{BLOCK, FRONT_LEN, ObjectRef};
use crate::warming::{Batch, Task, Wanted};
use ferry_device::WarmDone;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Parts that one request fetches, at most: 4 MiB.
const SPAN_PARTS_MAX: u64 = (4 << 20) / PART;
impl ObjectDevice {
    /// Warms blocks. `begins`: what was warmed before may be evicted.
    pub(crate) fn warm_blocks(&self, begins: bool, ranges: &[Range<u64>], done: WarmDone) {
        let Some(cache) = self.cache.get() else {
            return done(Err(io::Error::from_raw_os_error(libc::ENOMEDIUM)));
        };
        if begins {
            cache.begin_warming();
        }
        let mut objects: BTreeMap<ObjectRef, Vec<Range<u64>>> = BTreeMap::new();
        for range in ranges {
            let (start, len) = (range.start, range.end - range.start);
            match self.stored(start, len) {
                Err(error) => return done(Err(error.into())),
                Ok(runs) => runs.into_iter().for_each(|(location, len)| {
                    let from = location.block * BLOCK as u64;
                    let contents = from..from + len * BLOCK as u64;
                    objects.entry(location.object).or_default().push(contents);
                }),
            }
        }
        let batch = Arc::new(Batch::new(done));
        let tasks = objects.into_iter().map(|(object, contents)| Task {
            batch: Arc::clone(&batch),
            object,
            wanted: Wanted::Contents(contents),
        });
        self.warming.push(tasks);
        self.start_warming();
    }

    fn start_warming(&self) {
        while let Some(task) = self.warming.begin() {
            let me = self.me();
            let run = move || -> Answer {
                me.warm(task);
                Box::new(move || {
                    me.warming.ended();
                    me.start_warming();
                })
            };
            let job = Job { upload: None, after: Duration::ZERO, run: Box::new(run) };
            self.access.executor.start(job);
        }
    }

    fn warm(&self, task: Task) {
        let Some(cache) = self.cache.get().filter(|_| !task.batch.has_ended()) else { return };
        let warmed = match &task.wanted {
            Wanted::Contents(contents) => self.warm_contents(cache, &task, contents),
            Wanted::Parts(parts) => self.warm_parts(cache, &task, parts),
        };
        if let Err(error) = warmed {
            tracing::warn!(%error, "cannot warm a part of the object {}", task.object.name());
            task.batch.fail(error.into());
        }
    }

    /// Finds out which parts of an object are wanted, and which of them the cache lacks. Those are
    /// fetched next.
    fn warm_contents(
        &self,
        cache: &DiskCache,
        task: &Task,
        contents: &[Range<u64>],
    ) -> Result<(), ObjectError> {
        // The front is wanted in the cache, too, for the next mount.
        let begin = 0..FRONT_LEN.div_ceil(PART);
        match cache.pin(task.object, 0) {
            Pinned::Absent => self.warm_parts(cache, task, &begin)?,
            Pinned::Here(bytes) => task.batch.add(|warmed| warmed.cached_bytes += bytes),
            Pinned::Full => {
                task.batch.add(|warmed| warmed.full = true);
                return Ok(());
            }
        }
        let front = self.front(task.object)?;
        let mut parts = BTreeSet::new();
        for contents in contents {
            let stored = front.stored(contents)?;
            parts.extend(stored.start / PART..stored.end.div_ceil(PART));
        }
        let mut spans: Vec<Range<u64>> = Vec::new();
        for part in parts.into_iter().filter(|part| !begin.contains(part)) {
            match cache.pin(task.object, part) {
                Pinned::Here(bytes) => task.batch.add(|warmed| warmed.cached_bytes += bytes),
                Pinned::Full => {
                    task.batch.add(|warmed| warmed.full = true);
                    break;
                }
                Pinned::Absent => match spans.last_mut() {
                    Some(last) if last.end == part && part - last.start < SPAN_PARTS_MAX => {
                        last.end += 1;
                    }
                    _ => spans.push(part..part + 1),
                },
            }
        }
        let tasks = spans.into_iter().map(|parts| Task {
            batch: Arc::clone(&task.batch),
            object: task.object,
            wanted: Wanted::Parts(parts),
        });
        self.warming.push_next(tasks.collect());
        Ok(())
    }

    fn warm_parts(
        &self,
        cache: &DiskCache,
        task: &Task,
        parts: &Range<u64>,
    ) -> Result<(), ObjectError> {
        // Others fetch at the same time: what there will be no room for is not asked for.
        let wanted = parts.end - parts.start;
        let reserved = cache.reserve(wanted);
        if reserved < wanted {
            task.batch.add(|warmed| warmed.full = true);
        }
        if reserved == 0 {
            return Ok(());
        }
        let range = parts.start * PART..(parts.start + reserved) * PART;
        let fetched = self.access_of(task.object).get(&task.object.name(), Some(range.clone()));
        let added =
            fetched.as_ref().is_ok_and(|bytes| cache.add_pinned(task.object, range.start, bytes));
        cache.fetched(reserved);
        let bytes = fetched?;
        if !added && cache.is_broken() {
            task.batch.fail(io::Error::from_raw_os_error(libc::ENOSPC));
            return Ok(());
        }
        task.batch.add(|warmed| {
            warmed.fetched_bytes += bytes.len() as u64;
            warmed.full |= !added;
        });
        Ok(())
    }
}
