//! The home store: a redb database whose file is made of segments of the volume.
//!
//! It is always consistent as of its own checkpoint: one redb transaction brings the changes, the number of the newest
//! context among them, and where the log goes on from there.

mod ahead;
mod backend;
mod batches;
mod buffer;
mod links;
pub mod map;
mod pages;
mod place;
mod renew;
mod salvage;
mod shape;
mod state;
#[cfg(test)]
mod tests;
mod tree;
mod unit;

pub use backend::{HomeFile, Opening, Suspect};
pub use batches::Batches;
pub use renew::Renewal;
use renew::Renewals;
pub use salvage::{Found, Salvage};
use state::HashKey;
pub use state::HomeState;
pub use tree::Tree;
pub use tree::search::{Search, Weight};
pub use unit::unit_bytes;

use crate::disk::Disk;
use crate::layers::Merge;
use crate::{Geometry, JournalError, Seq, Value, guard};
use parking_lot::{Mutex, RwLock};
use redb::{Database, ReadOnlyTable, ReadTransaction, ReadableDatabase, TableDefinition, WriteTransaction};
use std::mem::ManuallyDrop;
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

type Bytes = &'static [u8];
const KEYS: TableDefinition<'static, Bytes, Bytes> = TableDefinition::new("keys");
const META: TableDefinition<'static, u8, Bytes> = TableDefinition::new("meta");
const META_POINT: u8 = 0;

/// A place in the log between two records, and what lies before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Point {
    /// Newest context before it.
    pub seq: Seq,
    /// Position of the block where the next record starts.
    pub position: u64,
    /// Id of the record before it.
    pub id: u64,
}

/// The home store as of one checkpoint. Pages that it shows are not reused while it lives.
pub struct HomeView {
    /// `None` once the store is closed.
    table: Option<ReadOnlyTable<Bytes, Bytes>>,
    /// Of the checkpoint.
    pub point: Point,
}

impl HomeView {
    /// What is left to see of a closed store.
    pub fn closed() -> Arc<Self> {
        Arc::new(Self { table: None, point: Point::default() })
    }

    fn table(&self) -> Result<&ReadOnlyTable<Bytes, Bytes>, JournalError> {
        self.table.as_ref().ok_or(JournalError::Closed)
    }

    /// The value of `key`.
    pub fn get(&self, key: &[u8]) -> Result<Option<Value>, JournalError> {
        let table = self.table()?;
        guard::reading(|| Ok(table.get(key).map_err(home_error)?.map(|v| Value::from(v.value()))))
    }

    /// Keys in `[from, to)`.
    pub fn range(&self, from: &[u8], to: &[u8]) -> Result<redb::Range<'static, Bytes, Bytes>, JournalError> {
        let table = self.table()?;
        let range = (Bound::Included(from), Bound::Excluded(to));
        guard::reading(|| table.range::<&[u8]>(range).map_err(home_error))
    }
}

/// What is done with each key; `false`: that was enough.
type Visit<'a> = &'a mut dyn FnMut(&[u8], &Value) -> Result<bool, JournalError>;

impl HomeView {
    /// Hands all keys to `visit`, ascending; `false` if it had enough.
    fn each(&self, visit: Visit<'_>) -> Result<bool, JournalError> {
        let table = self.table()?;
        let mut range = guard::reading(|| table.range::<&[u8]>(..).map_err(home_error))?;
        let mut next = || {
            guard::reading(|| {
                let next = range.next().transpose().map_err(home_error)?;
                Ok(next.map(|(key, value)| (Vec::from(key.value()), Value::from(value.value()))))
            })
        };
        while let Some((key, value)) = next()? {
            if !visit(&key, &value)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The open home store.
pub struct Home {
    /// The database; `None` once the store is closed. Held over a checkpoint: nobody who reads comes here.
    db: Mutex<Option<Database>>,
    /// The file that it is in. Changed with `db` held.
    file: RwLock<Arc<HomeFile>>,
    cache_bytes: usize,
    hash_key: HashKey,
    /// Of the newest checkpoint.
    live_bytes: AtomicU64,
    renewals: Renewals,
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

    /// Opens it.
    pub fn open(
        disk: &Arc<Disk>,
        geo: &Geometry,
        cache_bytes: usize,
        opening: Opening,
    ) -> Result<(Self, HomeState), JournalError> {
        let file = HomeFile::open(disk, geo, opening)?;
        // An older slot is not to count, should the newer one be damaged later: what it names may be used for something else by then.
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

    fn with_db<T>(&self, f: impl FnOnce(&Database) -> Result<T, JournalError>) -> Result<T, JournalError> {
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

    /// Writes `changes` in one transaction, durable when it returns, with the place in the log that is read next;
    /// readers are not held up. An error leaves the store as it was, and usable after [`Home::reopen`] only.
    pub fn checkpoint(&self, changes: Merge<'_>, point: Point, clean: bool) -> Result<(), JournalError> {
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

    /// Opens the store again as it was at its last checkpoint, after a failed one. `read_only`: from now on nothing
    /// reaches the device.
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

fn state_of(read: &ReadTransaction, key: &HashKey) -> Result<HomeState, JournalError> {
    let meta = read.open_table(META).map_err(home_error)?;
    let bytes = meta.get(META_POINT).map_err(home_error)?;
    bytes
        .and_then(|b| HomeState::decode(b.value(), key))
        .ok_or_else(|| JournalError::Home("it does not say where the log goes on".into()))
}

/// Makes one change; by how many bytes the keys and values grew.
fn apply(
    keys: &mut redb::Table<'_, Bytes, Bytes>,
    key: &[u8],
    value: Option<&[u8]>,
) -> Result<i128, JournalError> {
    let (before, after) = match value {
        Some(value) => (keys.insert(key, value).map_err(home_error)?, (key.len() + value.len()) as i128),
        None => (keys.remove(key).map_err(home_error)?, 0),
    };
    Ok(after - before.map_or(0, |b| (key.len() + b.value().len()) as i128))
}

/// Makes changes in one transaction, durable when it returns; `state` says what the store says of itself then, from how
/// many bytes it grew by.
fn write_batch<'a>(
    db: &Database,
    key: &HashKey,
    changes: impl Iterator<Item = (&'a [u8], Option<&'a [u8]>)>,
    state: impl FnOnce(i128) -> HomeState,
) -> Result<HomeState, JournalError> {
    let mut write = ManuallyDrop::new(guard::calling(|| db.begin_write().map_err(home_error))?);
    let mut panicked = true;
    let filled = guard::calling(|| {
        let filled = fill(&mut write, key, changes, state);
        panicked = false;
        filled
    });
    if panicked {
        return filled;
    }
    guard::calling(|| {
        let write = ManuallyDrop::into_inner(write);
        let state = filled?;
        write.commit().map_err(home_error)?;
        Ok(state)
    })
}

/// Puts the changes into the transaction. What a panic of the database leaves behind is not dropped, and the transaction must not be
/// either: the destructors would panic once more, while the first panic unwinds, and that ends the process. A database that is dropped
/// before its transaction stays as it is.
fn fill<'a>(
    write: &mut WriteTransaction,
    key: &HashKey,
    changes: impl Iterator<Item = (&'a [u8], Option<&'a [u8]>)>,
    state: impl FnOnce(i128) -> HomeState,
) -> Result<HomeState, JournalError> {
    write.set_quick_repair(true);
    let mut grown = 0;
    let mut keys = ManuallyDrop::new(write.open_table(KEYS).map_err(home_error)?);
    let mut applied = Ok(());
    for (changed, change) in changes {
        match apply(&mut keys, changed, change) {
            Ok(by) => grown += by,
            Err(error) => {
                applied = Err(error);
                break;
            }
        }
    }
    drop(ManuallyDrop::into_inner(keys));
    applied?;
    let state = state(grown);
    let mut meta = ManuallyDrop::new(write.open_table(META).map_err(home_error)?);
    let noted = meta.insert(META_POINT, state.encode(key).as_slice()).map(drop).map_err(home_error);
    drop(ManuallyDrop::into_inner(meta));
    noted.map(|()| state)
}

fn database(file: &Arc<HomeFile>, cache_bytes: usize) -> Result<Database, JournalError> {
    file.check_header()?;
    guard::calling(|| {
        redb::Builder::new().set_cache_size(cache_bytes).create_with_backend(file.user()).map_err(home_error)
    })
}

impl Drop for Home {
    fn drop(&mut self) {
        self.abandon();
        self.end();
    }
}

/// Ends a database. It is then as its last commit left it.
fn end(db: Option<Database>) {
    guard::ending(db);
}

/// Any error of redb as ours.
pub fn home_error(error: impl Into<redb::Error>) -> JournalError {
    match error.into() {
        redb::Error::Io(e) => backend::error_of(e),
        redb::Error::Corrupted(detail) => JournalError::Damaged { what: "home store", offset: 0, detail },
        other => JournalError::Home(other.to_string().into()),
    }
}
