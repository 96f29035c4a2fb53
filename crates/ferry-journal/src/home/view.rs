//! The home store as of one checkpoint, through redb.

use super::database::home_error;
use super::guard;
use super::tables::Bytes;
use crate::types::Point;
use crate::{JournalError, Value};
use redb::ReadOnlyTable;
use std::ops::Bound;
use std::sync::Arc;

/// Keys of the home store, in order.
pub type HomeRange = redb::Range<'static, Bytes, Bytes>;

/// The home store as of one checkpoint. Pages that it shows are not reused while it lives.
pub struct HomeView {
    /// `None` once the store is closed.
    pub(super) table: Option<ReadOnlyTable<Bytes, Bytes>>,
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
    pub fn range(&self, from: &[u8], to: &[u8]) -> Result<HomeRange, JournalError> {
        let table = self.table()?;
        let range = (Bound::Included(from), Bound::Excluded(to));
        guard::reading(|| table.range::<&[u8]>(range).map_err(home_error))
    }
}

/// What is done with each key; `false`: that was enough.
type Visit<'a> = &'a mut dyn FnMut(&[u8], &Value) -> Result<bool, JournalError>;

impl HomeView {
    /// Hands all keys to `visit`, ascending; `false` if it had enough.
    pub fn each(&self, visit: Visit<'_>) -> Result<bool, JournalError> {
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

/// The next key of the home store in a scan.
pub struct HomeEntry {
    pub key: redb::AccessGuard<'static, Bytes>,
    pub value: redb::AccessGuard<'static, Bytes>,
}

impl HomeEntry {
    pub fn next(range: &mut HomeRange) -> Result<Option<Self>, JournalError> {
        guard::reading(|| {
            let Some((key, value)) = range.next().transpose().map_err(home_error)? else {
                return Ok(None);
            };
            // What a page that makes no sense panics at, panics here.
            let _ = (key.value(), value.value());
            Ok(Some(Self { key, value }))
        })
    }
}
