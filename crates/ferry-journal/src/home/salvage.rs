//! The database opened for reading past damage (`crate::salvage` says how).

use super::backend::{HomeFile, Marker};
use super::{Bytes, HomeState, KEYS, database, end, home_error, state_of};
use crate::layers::Key;
use crate::verify::Step;
use crate::{JournalError, Value, guard};
use ferry_device::{BLOCK_SIZE, Entropy};
use redb::{Database, ReadTransaction, ReadableDatabase};
use std::collections::HashSet;
use std::sync::Arc;

/// Memory for its pages: they are read once.
const CACHE_BYTES: usize = 1 << 20;
/// Keys that may come again, or out of order, one after another; pages that are whole and lead in a circle bring more.
const STRAY_MAX: u32 = 1 << 20;

/// What comes next in the order of the pages.
pub enum Found {
    /// A key and its value.
    Key(Key, Value),
    /// A block that cannot be read; keys may be missing here.
    Damage {
        /// On the device, in bytes.
        offset: u64,
        /// What is wrong with it.
        detail: String,
    },
}

/// A walk over all that is readable.
pub struct Salvage {
    marker: Marker,
    range: Option<redb::Range<'static, Bytes, Bytes>>,
    newest: Option<Key>,
    stray: u32,
    /// What the store says of itself.
    pub state: Result<HomeState, JournalError>,
    db: Option<Database>,
    copy: Arc<HomeFile>,
    /// Its segments are not used for anything else meanwhile.
    _original: Arc<HomeFile>,
}

impl Salvage {
    pub fn open(file: &Arc<HomeFile>, entropy: &dyn Entropy) -> Result<Self, JournalError> {
        let mut marker = Marker::default();
        for part in marker.chunks_exact_mut(8) {
            part.copy_from_slice(&entropy.next_u64().to_le_bytes());
        }
        let copy = file.salvage(marker);
        let db = database(&copy, CACHE_BYTES)?;
        let opened = guard::calling(|| {
            let read: ReadTransaction = db.begin_read().map_err(home_error)?;
            let range = read.open_table(KEYS).map_err(home_error)?.range::<&[u8]>(..).map_err(home_error)?;
            Ok((range, guard::calling(|| state_of(&read))))
        });
        match opened {
            Ok((range, state)) => Ok(Self {
                marker,
                range: Some(range),
                newest: None,
                stray: 0,
                state,
                db: Some(db),
                copy,
                _original: file.clone(),
            }),
            Err(error) => {
                end(Some(db));
                Err(error)
            }
        }
    }

    /// The next key, which is greater than all before it, or damage; an error if nothing further can be found.
    pub fn next(&mut self) -> Result<Option<Found>, JournalError> {
        loop {
            let Some(range) = &mut self.range else { return Ok(None) };
            let next = guard::calling(|| {
                let next = range.next().transpose().map_err(home_error)?;
                Ok(next.map(|(key, value)| (Key::from(key.value()), Value::from(value.value()))))
            })?;
            let Some((key, value)) = next else { return Ok(None) };
            if *key == self.marker && value.len() >= 8 {
                let (offset, detail) = value.split_at(8);
                let offset = u64::from_le_bytes(offset.try_into().unwrap_or_default());
                return Ok(Some(Found::Damage { offset, detail: String::from_utf8_lossy(detail).into() }));
            }
            if self.newest.as_ref().is_some_and(|newest| *newest >= key) {
                self.stray += 1;
                if self.stray < STRAY_MAX {
                    continue;
                }
                let detail = "its pages lead in a circle".to_owned();
                return Err(JournalError::Damaged { what: "home store", offset: 0, detail });
            }
            self.stray = 0;
            self.newest = Some(key.clone());
            return Ok(Some(Found::Key(key, value)));
        }
    }
}

impl Salvage {
    /// Blocks of the file with pages that the database uses; below a page that cannot be read, none are known. `None`: `step` ended it.
    pub fn used(mut self, step: Step<'_>) -> Option<HashSet<u64>> {
        let mut counted = 0;
        loop {
            let next = self.next();
            let read = (self.copy.seen().blocks.len() - counted) * BLOCK_SIZE;
            counted += read / BLOCK_SIZE;
            if read > 0 && !step(read as u64) {
                return None;
            }
            if !matches!(next, Ok(Some(_))) {
                break;
            }
        }
        self.end_walk();
        // What the database keeps for itself it reads when it looks for damage on its own. When it finds some, it goes on with pages
        // that it does not use any more.
        self.copy.seen().until_damage = true;
        let whole = !self.copy.seen().damage;
        if let Some(db) = self.db.as_mut().filter(|_| whole)
            && let Err(error) = guard::calling(|| db.check_integrity().map(drop).map_err(home_error))
        {
            tracing::debug!(%error, "the database's own look at its pages ended early");
        }
        let mut used = std::mem::take(&mut self.copy.seen().blocks);
        used.insert(0);
        Some(used)
    }

    fn end_walk(&mut self) {
        let range = self.range.take();
        if let Err(error) = guard::calling(|| {
            drop(range);
            Ok(())
        }) {
            tracing::debug!(%error, "a walk past damage did not end cleanly");
        }
    }
}

impl Drop for Salvage {
    fn drop(&mut self) {
        self.end_walk();
        end(self.db.take());
    }
}
