//! How redb is called: batches of changes in one transaction, its errors, and its end.

use super::file::{HomeFile, error_of};
use super::guard;
use super::state::{HashKey, HomeState};
use super::tables::{Bytes, KEYS, META, META_POINT};
use crate::JournalError;
use redb::{Database, ReadTransaction, WriteTransaction};
use std::mem::ManuallyDrop;
use std::sync::Arc;

pub fn state_of(read: &ReadTransaction, key: &HashKey) -> Result<HomeState, JournalError> {
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
        Some(value) => {
            (keys.insert(key, value).map_err(home_error)?, (key.len() + value.len()) as i128)
        }
        None => (keys.remove(key).map_err(home_error)?, 0),
    };
    Ok(after - before.map_or(0, |b| (key.len() + b.value().len()) as i128))
}

/// Makes changes in one transaction, durable when it returns; `state` says what the store says of
/// itself then, from how many bytes it grew by.
pub fn write_batch<'a>(
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

/// Puts the changes into the transaction. What a panic of the database leaves behind is not
/// dropped, and the transaction must not be either: the destructors would panic once more, while
/// the first panic unwinds, and that ends the process. A database that is dropped before its
/// transaction stays as it is.
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

pub fn database(file: &Arc<HomeFile>, cache_bytes: usize) -> Result<Database, JournalError> {
    file.check_header()?;
    guard::calling(|| {
        redb::Builder::new()
            .set_cache_size(cache_bytes)
            .create_with_backend(file.user())
            .map_err(home_error)
    })
}

/// Ends a database. It is then as its last commit left it.
pub fn end(db: Option<Database>) {
    guard::ending(db);
}

/// Any error of redb as ours.
pub fn home_error(error: impl Into<redb::Error>) -> JournalError {
    match error.into() {
        redb::Error::Io(e) => error_of(e),
        redb::Error::Corrupted(detail) => {
            JournalError::Damaged { what: "home store", offset: 0, detail }
        }
        other => JournalError::Home(other.to_string().into()),
    }
}
