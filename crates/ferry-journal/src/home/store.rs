//! The open home store: checkpoints into it, views of it, and its end.

use super::database::{database, end, home_error, state_of, write_batch};
use super::file::{HomeFile, Opening};
use super::guard;
use super::salvage::Salvage;
use super::state::{HashKey, HomeState};
use super::tables::KEYS;
use super::view::HomeView;
use crate::disk::Disk;
use crate::types::{Change, Key, Point};
use crate::{Geometry, JournalError};
use parking_lot::{Mutex, RwLock};
use redb::{Database, ReadableDatabase};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What renewals leave behind.
#[derive(Default)]
pub struct Renewals {
    /// Files whose place was taken, while somebody may read them.
    pub retired: Mutex<Vec<Arc<HomeFile>>>,
    /// One failed: no other is tried.
    pub failed: AtomicBool,
}

/// The open home store.
pub struct Home {
    /// The database; `None` once the store is closed. Held over a checkpoint: no reader needs it.
    pub(super) db: Mutex<Option<Database>>,
    /// The file that it is in. Changed with `db` held.
    pub(super) file: RwLock<Arc<HomeFile>>,
    pub(super) cache_bytes: usize,
    hash_key: HashKey,
    /// Of the newest checkpoint.
    live_bytes: AtomicU64,
    pub(super) renewals: Renewals,
}

impl Home {
    /// Makes an empty home store in `segments`; the log is to be read from `point`.
    pub fn format(
        disk: &Arc<Disk>,
        geo: &Geometry,
        segments: &[u32],
        point: Point,
    ) -> Result<(), JournalError> {
        let state = HomeState { point, clean: true, live_bytes: 0 };
        let file = HomeFile::format(disk, geo, segments)?;
        let db = database(&file, 1 << 20)?;
        write_batch(&db, &geo.hash_key, std::iter::empty(), |_| state)?;
        end(Some(db));
        file.settle()
    }

    /// Opens the store as its last checkpoint left it.
    pub fn open(
        disk: &Arc<Disk>,
        geo: &Geometry,
        cache_bytes: usize,
        opening: Opening,
    ) -> Result<(Self, HomeState), JournalError> {
        let file = HomeFile::open(disk, geo, opening)?;
        // An older slot is not to count, should the newer one be damaged later: what it names may
        // be used for something else by then.
        file.settle()?;
        let db = database(&file, cache_bytes).map_err(|e| file.explain(e))?;
        let home = Self {
            db: Mutex::new(Some(db)),
            file: RwLock::new(file),
            cache_bytes,
            hash_key: geo.hash_key,
            live_bytes: AtomicU64::new(0),
            renewals: Renewals::default(),
        };
        let state = home.state()?;
        home.live_bytes.store(state.live_bytes, Ordering::Relaxed);
        Ok((home, state))
    }

    fn state(&self) -> Result<HomeState, JournalError> {
        let key = &self.hash_key;
        self.with_db(|db| guard::reading(|| state_of(&db.begin_read().map_err(home_error)?, key)))
    }

    fn with_db<T>(
        &self,
        f: impl FnOnce(&Database) -> Result<T, JournalError>,
    ) -> Result<T, JournalError> {
        match &*self.db.lock() {
            Some(db) => f(db),
            None => Err(JournalError::Closed),
        }
    }

    /// The file below: segments it owns, spare ones.
    pub fn file(&self) -> Arc<HomeFile> {
        self.file.read().clone()
    }

    /// Bytes of all keys and values, as of the newest checkpoint.
    pub fn live_bytes(&self) -> u64 {
        self.live_bytes.load(Ordering::Relaxed)
    }

    /// A view of what is there now.
    pub fn view(&self) -> Result<Arc<HomeView>, JournalError> {
        self.with_db(|db| {
            guard::reading(|| {
                let read = db.begin_read().map_err(home_error)?;
                let table = Some(read.open_table(KEYS).map_err(home_error)?);
                Ok(Arc::new(HomeView { table, point: state_of(&read, &self.hash_key)?.point }))
            })
        })
    }

    /// Writes `changes` in one transaction, durable when it returns, with the position in the log
    /// that is read next; readers are not held up. An error leaves the store as it was, and usable
    /// after [`Home::reopen`] only.
    pub fn checkpoint<'c>(
        &self,
        changes: impl Iterator<Item = (&'c Key, &'c Change)>,
        point: Point,
        clean: bool,
    ) -> Result<(), JournalError> {
        let before = i128::from(self.live_bytes.load(Ordering::Relaxed));
        let changes = changes.map(|(key, change)| (&**key, change.as_deref()));
        let written = self.with_db(|db| {
            self.file().begin();
            write_batch(db, &self.hash_key, changes, |grown| {
                let live_bytes = u64::try_from(before + grown).unwrap_or(0);
                HomeState { point, clean, live_bytes }
            })
        });
        let state = written.map_err(|e| self.file().explain(e))?;
        self.live_bytes.store(state.live_bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Opens the store again as it was at its last checkpoint, after a failed one. `read_only`:
    /// from now on nothing reaches the device.
    pub fn reopen(&self, read_only: bool) -> Result<(), JournalError> {
        let (mut db, file) = (self.db.lock(), self.file());
        file.detach_users();
        end(db.take());
        file.reload(read_only)?;
        *db = Some(database(&file, self.cache_bytes).map_err(|e| file.explain(e))?);
        Ok(())
    }

    /// The store as it is now, for reading past damage.
    pub fn salvage(&self) -> Result<Salvage, JournalError> {
        Salvage::open(&self.file())
    }

    /// Nothing that the database still writes is to reach the device.
    pub fn abandon(&self) {
        self.file().detach_users();
    }

    /// Ends the database, which is then as its last checkpoint left it.
    pub fn end(&self) {
        end(self.db.lock().take());
    }

    /// Closes the database; views must be gone.
    pub fn close(&self) -> Result<(), JournalError> {
        self.end();
        self.file().come_to_rest()
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        self.abandon();
        self.end();
    }
}
