//! A transaction: changes that become visible together.

use crate::commit::context::{Joining, TransactionWrites};
use crate::disk::io_error;
use crate::engine::core::Core;
use crate::log::format::KEY_MAX;
use crate::log::record::ExtentEntry;
use crate::types::{Changes, Key, RequestId};
use crate::{Completion, DataExtent, JournalError, Seq, Value};
use ferry_env::planted::{Bug, is_planted};
use std::sync::Arc;

/// Changes that become visible together. Dropping it without [`Transaction::commit`] forgets them.
pub struct Transaction<'j> {
    pub(crate) core: &'j Arc<Core>,
    pub(crate) changes: Changes,
    pub(crate) extents: Vec<ExtentEntry>,
    pub(crate) writes: Option<Arc<TransactionWrites>>,
    /// Bytes of log space, until the context has them.
    pub(crate) reserved: Option<u64>,
    pub(crate) request: Option<RequestId>,
}

impl Transaction<'_> {
    /// The value as this transaction sees it: its own change, else the newest committed one.
    pub fn get(&self, key: &[u8]) -> Result<Option<Value>, JournalError> {
        match self.changes.get(key) {
            Some(change) => Ok(change.clone()),
            None => self.core.get(key),
        }
    }

    /// Sets `key`.
    ///
    /// # Panics
    /// When the key is longer than 65535 bytes.
    pub fn put(&mut self, key: &[u8], value: &[u8]) {
        self.change(key, Some(Value::from(value)));
    }

    /// The request that it is for: [`JournalClient::joins`](crate::JournalClient::joins) is called
    /// with it.
    pub fn set_request(&mut self, request: Option<RequestId>) {
        self.request = request;
    }

    /// Removes `key`, if it is there.
    pub fn delete(&mut self, key: &[u8]) {
        self.change(key, None);
    }

    fn change(&mut self, key: &[u8], change: Option<Value>) {
        assert!(key.len() <= KEY_MAX, "a key of {} bytes", key.len());
        match self.changes.get_mut(key) {
            Some(earlier) => *earlier = change,
            None => drop(self.changes.insert(Key::from(key), change)),
        }
    }

    /// Data that the keys of this transaction map. The journal starts the device write itself at
    /// once, holds the context's flush until it completed, and logs its checksum; `written` is
    /// called when the write completed.
    pub fn write_data(&mut self, extent: DataExtent, written: Completion) {
        let DataExtent { offset, buf, crc } = extent;
        self.extents.push(ExtentEntry { offset, len: buf.len() as u32, crc });
        let writes = self.writes.get_or_insert_default().clone();
        writes.started();
        let request = self.core.disk.write_request("data", offset, buf, move |result| {
            let result = result.map_err(io_error("data"));
            writes.completed(result.clone());
            written(result);
        });
        self.core.disk.submit(vec![request]);
    }

    /// Merges the changes into the current context (memory only). Returns the context's number.
    pub fn commit(mut self) -> Seq {
        if is_planted(Bug::HalfContext) {
            self.core.commit_first_half(&mut self.changes);
        }
        let joining = Joining {
            changes: std::mem::take(&mut self.changes),
            extents: std::mem::take(&mut self.extents),
            writes: self.writes.take(),
            request: self.request.take(),
        };
        let reserved = self.reserved.take().expect("only a commit takes them, and ends it");
        self.core.commit(joining, reserved)
    }
}

impl Drop for Transaction<'_> {
    fn drop(&mut self) {
        if let Some(bytes) = self.reserved {
            self.core.end(bytes);
        }
    }
}
