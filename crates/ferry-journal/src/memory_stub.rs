//! Stand-in with the final interface (memory only), to be replaced by the real journal.
use crate::*;
use ferry_device::{BlockDevice, Env};
use parking_lot::Mutex;
use std::collections::BTreeMap;

/// An open journal.
pub struct Journal {
    map: Mutex<BTreeMap<Vec<u8>, Value>>,
    dev: Arc<dyn BlockDevice>,
}

/// Changes that become visible together. Dropping it without [`Transaction::commit`] forgets them.
pub struct Transaction<'j> {
    journal: &'j Journal,
    puts: BTreeMap<Vec<u8>, Option<Value>>,
    data: Vec<DataExtent>,
}

impl Journal {
    /// Lays out an empty journal: writes the whole log once, an empty home store and both map slots, then flushes.
    /// `first_segments` are given to the home store.
    pub fn format(_dev: &Arc<dyn BlockDevice>, _geo: &Geometry, _first_segments: &[u32], _env: &Env) -> Result<(), JournalError> {
        Ok(())
    }
    /// Opens and recovers.
    pub fn open(dev: Arc<dyn BlockDevice>, _geo: Geometry, _options: JournalOptions, _env: Env, _client: Arc<dyn JournalClient>) -> Result<(Self, Recovered), JournalError> {
        Ok((Self { map: Mutex::default(), dev }, Recovered::default()))
    }
    /// Reserves log space, waiting for it in turn; take no lock that a checkpoint or another transaction wants before.
    pub fn begin(&self, _credits: Credits) -> Result<Transaction<'_>, JournalError> {
        Ok(Transaction { journal: self, puts: BTreeMap::new(), data: Vec::new() })
    }
    /// The newest committed value.
    pub fn get(&self, key: &[u8]) -> Result<Option<Value>, JournalError> {
        Ok(self.map.lock().get(key).cloned())
    }
    /// Calls `visit` for each key in `[from, to)`, ascending, until it returns `false`. No lock of the journal is held
    /// during `visit`; it sees one moment of the view.
    pub fn scan(&self, from: &[u8], to: &[u8], visit: &mut dyn FnMut(&[u8], &Value) -> bool) -> Result<(), JournalError> {
        let found: Vec<_> = self.map.lock().range(from.to_vec()..to.to_vec()).map(|(k, v)| (k.clone(), v.clone())).collect();
        for (k, v) in found {
            if !visit(&k, &v) {
                break;
            }
        }
        Ok(())
    }
    /// Calls `done` once `seq` and all before it are durable (at once if they are).
    pub fn force(&self, _seq: Seq, done: Completion) {
        done(Ok(()));
    }
    /// The context that a transaction committed now would join.
    pub fn current(&self) -> Seq {
        Seq(1)
    }
    /// Newest durable context.
    pub fn durable(&self) -> Seq {
        Seq(0)
    }
    /// Newest context covered by a durable stamp (see [`JournalClient::stamped`]).
    pub fn stamped(&self) -> Seq {
        Seq(0)
    }
    /// Makes everything committed so far durable *and stamped*, then returns: what it freed is reusable.
    pub fn force_stamped(&self) -> Result<(), JournalError> {
        Ok(())
    }
    /// Writes the overlay home and moves the log's tail, then returns.
    pub fn checkpoint(&self) -> Result<(), JournalError> {
        Ok(())
    }
    /// Does due background work (`commit_interval` passed, log idle); only for `background: false`.
    pub fn tick(&self) -> Result<(), JournalError> {
        Ok(())
    }
    /// The largest `Credits::bytes` (keys counted with their overhead) that `begin` accepts.
    pub fn max_transaction_bytes(&self) -> u64 {
        1 << 20
    }
    /// Forces, checkpoints, marks the log clean and stops the threads. Idempotent.
    pub fn close(&self) -> Result<(), JournalError> {
        Ok(())
    }
}

impl Transaction<'_> {
    /// The value as this transaction sees it: its own change, else the newest committed one.
    pub fn get(&self, key: &[u8]) -> Result<Option<Value>, JournalError> {
        match self.puts.get(key) {
            Some(v) => Ok(v.clone()),
            None => self.journal.get(key),
        }
    }
    /// Sets `key`.
    pub fn put(&mut self, key: &[u8], value: &[u8]) {
        self.puts.insert(key.to_vec(), Some(value.into()));
    }
    /// Removes `key`, if it is there.
    pub fn delete(&mut self, key: &[u8]) {
        self.puts.insert(key.to_vec(), None);
    }
    /// Data that the keys of this transaction map. The journal starts the device write itself at once, holds the
    /// context's flush until it completed, and logs its checksum; `written` is called when the write completed.
    pub fn write_data(&mut self, extent: DataExtent, _written: Completion) {
        self.data.push(extent);
    }
    /// Merges the changes into the current context (memory only). Returns the context's number.
    pub fn commit(self) -> Seq {
        for d in &self.data {
            self.journal.dev.write(d.offset, &d.buf).expect("stub");
        }
        let mut map = self.journal.map.lock();
        for (k, v) in self.puts {
            match v {
                Some(v) => map.insert(k, v),
                None => map.remove(&k),
            };
        }
        Seq(1)
    }
}
