//! Contexts: the open one, which collects changes, and the data writes that it must wait for.

use crate::completion::Countdown;
use crate::log::format::{EXTENT_ENTRY, LOG_BLOCK, blocks_for};
use crate::log::record::{ExtentEntry, body_len, entry_len};
use crate::types::{Change, Changes, Key, RequestId};
use crate::view::layers::{Layer, View};
use crate::{JournalError, Seq};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;

/// The data writes of one transaction. They start before the transaction's context is known.
#[derive(Default)]
pub struct TransactionWrites {
    state: Mutex<WritesState>,
}

#[derive(Default)]
struct WritesState {
    left: u32,
    error: Option<JournalError>,
    context: Option<Arc<Countdown>>,
}

impl TransactionWrites {
    /// A write is about to start.
    pub fn started(&self) {
        self.state.lock().left += 1;
    }

    /// A write completed.
    pub fn completed(&self, result: Result<(), JournalError>) {
        let mut state = self.state.lock();
        state.left -= 1;
        if let Err(error) = result {
            state.error.get_or_insert(error);
        }
        if state.left > 0 {
            return;
        }
        if let Some(context) = state.context.take() {
            let result = state.error.take().map_or(Ok(()), Err);
            drop(state);
            context.done(result);
        }
    }

    /// The transaction joins the context that `context` counts for.
    pub fn join(&self, context: &Arc<Countdown>) {
        let mut state = self.state.lock();
        if state.left == 0 && state.error.is_none() {
            return;
        }
        context.add();
        if state.left > 0 {
            state.context = Some(context.clone());
        } else if let Some(error) = state.error.take() {
            drop(state);
            context.done(Err(error));
        }
    }
}

/// The open context: the newest changes, and the view below them.
pub struct Head {
    /// Number of the open context.
    pub seq: Seq,
    /// Its changes, except those in its rotated layers.
    pub changes: Changes,
    /// Layers of this context that scans froze; they are the first ones of the view.
    pub rotated: usize,
    /// Everything below `changes`.
    pub view: Arc<View>,
    /// Bytes of the record's body.
    pub payload: u64,
    /// Bytes of log space that the context holds: what its record takes.
    pub held: u64,
    /// Transactions that joined.
    pub transactions: u64,
    /// When the first transaction joined.
    pub since: Duration,
    /// Data extents that the transactions map.
    pub extents: Vec<ExtentEntry>,
    /// Bytes of that data.
    pub data_bytes: u64,
    /// Counts the transactions whose data writes are in flight.
    pub data: Arc<Countdown>,
    /// A checkpoint of the contexts up to here is in progress: no merged layer may reach across.
    pub barrier: Seq,
}

/// A sealed context.
pub struct Context {
    pub seq: Seq,
    /// Its layers, the newest first.
    pub layers: Vec<Arc<Layer>>,
    pub payload: u64,
    pub transactions: u64,
    /// When the first transaction joined.
    pub since: Duration,
    pub extents: Vec<ExtentEntry>,
    pub data_bytes: u64,
    pub data: Arc<Countdown>,
}

/// What a transaction adds to the open context.
pub struct Joining {
    pub changes: Changes,
    pub extents: Vec<ExtentEntry>,
    pub writes: Option<Arc<TransactionWrites>>,
    pub request: Option<RequestId>,
}

impl Joining {
    /// Most bytes that it adds to a record.
    pub fn payload(&self) -> u64 {
        body_len(&self.changes, &self.extents)
    }
}

impl Head {
    /// An empty context on top of `view`.
    pub fn new(seq: Seq, view: Arc<View>) -> Self {
        Self {
            seq,
            changes: Changes::new(),
            rotated: 0,
            view,
            payload: 0,
            held: 0,
            transactions: 0,
            since: Duration::ZERO,
            extents: Vec::new(),
            data_bytes: 0,
            data: Countdown::new(0),
            barrier: Seq(0),
        }
    }

    /// Whether no transaction has joined.
    pub fn is_empty(&self) -> bool {
        self.transactions == 0
    }

    /// Adds a transaction's changes. Returns the bytes of log that the context's record takes now.
    pub fn join(&mut self, joining: Joining) -> u64 {
        for (key, change) in joining.changes {
            self.payload += entry_len(&key, &change);
            let len = key.len();
            let before = match self.changes.entry(key) {
                std::collections::btree_map::Entry::Occupied(mut slot) => Some(slot.insert(change)),
                std::collections::btree_map::Entry::Vacant(slot) => {
                    let rotated = &self.view.layers[..self.rotated];
                    let before = rotated.iter().find_map(|l| l.changes.get(slot.key())).cloned();
                    slot.insert(change);
                    before
                }
            };
            if let Some(before) = before {
                self.payload -=
                    (crate::log::format::KEY_ENTRY + len + before.map_or(0, |v| v.len())) as u64;
            }
        }
        self.payload += (joining.extents.len() * EXTENT_ENTRY) as u64;
        self.data_bytes += joining.extents.iter().map(|e| u64::from(e.len)).sum::<u64>();
        self.extents.extend(joining.extents);
        if let Some(writes) = joining.writes {
            writes.join(&self.data);
        }
        self.transactions += 1;
        blocks_for(self.payload) * LOG_BLOCK as u64
    }

    /// Freezes the changes collected so far into a layer of the view, so that a scan can walk them
    /// without a lock.
    pub fn rotate(&mut self) {
        if self.changes.is_empty() {
            return;
        }
        let layer =
            Layer { changes: std::mem::take(&mut self.changes), first: self.seq, last: self.seq };
        let mut layers = Vec::with_capacity(self.view.layers.len() + 1);
        layers.push(Arc::new(layer));
        layers.extend_from_slice(&self.view.layers);
        self.view = Arc::new(View { layers, home: self.view.home.clone() });
        self.rotated += 1;
    }

    /// Seals the context and opens the next one.
    pub fn seal(&mut self) -> Context {
        self.rotate();
        let layers = self.view.layers[..self.rotated].to_vec();
        let barrier = self.barrier;
        let next = Head { barrier, ..Head::new(Seq(self.seq.0 + 1), self.view.clone()) };
        let done = std::mem::replace(self, next);
        Context {
            seq: done.seq,
            layers,
            payload: done.payload,
            transactions: done.transactions,
            since: done.since,
            extents: done.extents,
            data_bytes: done.data_bytes,
            data: done.data,
        }
    }

    /// The newest change of `key`, if this context has one outside of the view.
    pub fn change(&self, key: &[u8]) -> Option<&Change> {
        self.changes.get(key)
    }

    /// Replaces `old` consecutive layers by `new`; `false` if they are no longer all there.
    pub fn replace(&mut self, old: &[Arc<Layer>], new: Layer) -> bool {
        let of_this_context = new.last == self.seq;
        match self.view.replace(old, Some(Arc::new(new))) {
            Some(view) => {
                self.view = Arc::new(view);
                if of_this_context {
                    self.rotated -= old.len() - 1;
                }
                true
            }
            None => false,
        }
    }

    /// A copy of the changes in `[from, to)`, or `None` if there are more than `limit`.
    pub fn copy_range(&self, from: &[u8], to: &[u8], limit: usize) -> Option<Vec<(Key, Change)>> {
        let bounds = (std::ops::Bound::Included(from), std::ops::Bound::Excluded(to));
        let range = self.changes.range::<[u8], _>(bounds);
        let copy: Vec<_> = range.take(limit + 1).map(|(k, c)| (k.clone(), c.clone())).collect();
        (copy.len() <= limit).then_some(copy)
    }
}
