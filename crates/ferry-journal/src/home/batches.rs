//! Filling a new home store, in transactions of bounded size.

use super::database::{database, end, write_batch};
use super::file::HomeFile;
use super::state::{HashKey, HomeState};
use crate::types::Point;
use crate::{JournalError, Value};
use redb::Database;
use std::sync::Arc;

/// Bytes of keys and values in one transaction.
const BATCH_BYTES: u64 = 8 << 20;
/// Memory for pages.
const CACHE_BYTES: usize = 16 << 20;

/// A home store that is being filled.
pub struct Batches {
    db: Option<Database>,
    hash_key: HashKey,
    collected: Vec<(Box<[u8]>, Value)>,
    /// Bytes collected, bytes written.
    bytes: u64,
    written: u64,
    keys: u64,
}

impl Batches {
    pub fn new(file: &Arc<HomeFile>) -> Result<Self, JournalError> {
        let db = Some(database(file, CACHE_BYTES)?);
        let hash_key = file.hash_key();
        Ok(Self { db, hash_key, collected: Vec::new(), bytes: 0, written: 0, keys: 0 })
    }

    /// Adds a key.
    pub fn put(&mut self, key: &[u8], value: &Value) -> Result<(), JournalError> {
        self.collected.push((key.into(), value.clone()));
        self.bytes += (key.len() + value.len()) as u64;
        self.keys += 1;
        if self.bytes < BATCH_BYTES { Ok(()) } else { self.write(Point::default(), false) }
    }

    fn write(&mut self, point: Point, clean: bool) -> Result<(), JournalError> {
        let Some(db) = &self.db else { return Err(JournalError::Closed) };
        self.written += std::mem::take(&mut self.bytes);
        let state = HomeState { point, clean, live_bytes: self.written };
        let changes = std::mem::take(&mut self.collected);
        write_batch(db, &self.hash_key, changes.iter().map(|(k, v)| (&**k, Some(&**v))), |_| state)
            .map(drop)
    }

    /// Writes the rest; the log is to be read from `point`; `clean` as in [`HomeState`]. How many
    /// keys there are.
    pub fn finish(mut self, point: Point, clean: bool) -> Result<u64, JournalError> {
        self.write(point, clean)?;
        end(self.db.take());
        Ok(self.keys)
    }
}

impl Drop for Batches {
    fn drop(&mut self) {
        end(self.db.take());
    }
}
