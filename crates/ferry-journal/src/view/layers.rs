//! The layers above the home store, newest first, and reading through them.
//!
//! Every layer but the newest is immutable and shared by reference: a sealed context, a durable
//! one, or several merged. So a context moves from *committing* to *overlay* without a byte being
//! touched, and a reader that holds a [`View`] sees one moment for as long as it likes, without a
//! lock.

use crate::home::HomeView;
use crate::types::{Change, Changes, Key};
use crate::{JournalError, Seq, Value};
use std::collections::btree_map;
use std::ops::Bound;
use std::sync::Arc;

/// Changes of consecutive contexts; immutable.
pub struct Layer {
    pub changes: Changes,
    /// Oldest context with changes in here.
    pub first: Seq,
    /// Newest context with changes in here.
    pub last: Seq,
}

/// All that is below the changes still being collected, as of one moment.
#[derive(Clone)]
pub struct View {
    /// The newest layer comes first.
    pub layers: Vec<Arc<Layer>>,
    pub home: Arc<HomeView>,
}

impl View {
    /// The newest value.
    pub fn get(&self, key: &[u8]) -> Result<Option<Value>, JournalError> {
        for layer in &self.layers {
            if let Some(change) = layer.changes.get(key) {
                return Ok(change.clone());
            }
        }
        self.home.get(key)
    }

    /// This view with `new` in place of the consecutive layers `old`; `None` if they are no longer
    /// all here.
    pub fn replace(&self, old: &[Arc<Layer>], new: Option<Arc<Layer>>) -> Option<View> {
        let at = self.layers.iter().position(|l| Arc::ptr_eq(l, &old[0]))?;
        let same = self.layers.len() >= at + old.len()
            && self.layers[at..at + old.len()].iter().zip(old).all(|(a, b)| Arc::ptr_eq(a, b));
        if !same {
            return None;
        }
        let mut layers = Vec::with_capacity(self.layers.len() + 1 - old.len());
        layers.extend_from_slice(&self.layers[..at]);
        layers.extend(new);
        layers.extend_from_slice(&self.layers[at + old.len()..]);
        Some(View { layers, home: self.home.clone() })
    }
}

/// Merges consecutive layers, newest first, into one that holds the newest change of each key.
pub fn merged(layers: &[Arc<Layer>]) -> Layer {
    let first = layers.iter().map(|l| l.first).min().unwrap_or_default();
    let last = layers.iter().map(|l| l.last).max().unwrap_or_default();
    let changes = Merge::all(layers).map(|(k, c)| (k.clone(), c.clone())).collect();
    Layer { changes, first, last }
}

type Source<'a> = std::iter::Peekable<btree_map::Range<'a, Key, Change>>;

/// Walks several layers at once in the order of the keys; of equal keys, the newest layer's change.
pub struct Merge<'a> {
    /// The newest layer comes first.
    sources: Vec<Source<'a>>,
}

impl<'a> Merge<'a> {
    /// Everything in `layers`, newest first.
    pub fn all(layers: &'a [Arc<Layer>]) -> Self {
        Self { sources: layers.iter().map(|l| l.changes.range::<[u8], _>(..).peekable()).collect() }
    }

    /// Keys in `[from, to)` of `maps`, newest first.
    pub fn range(maps: impl Iterator<Item = &'a Changes>, from: &[u8], to: &[u8]) -> Self {
        let bounds = (Bound::Included(from), Bound::Excluded(to));
        Self { sources: maps.map(|m| m.range::<[u8], _>(bounds).peekable()).collect() }
    }
}

impl<'a> Iterator for Merge<'a> {
    type Item = (&'a Key, &'a Change);

    fn next(&mut self) -> Option<Self::Item> {
        if let [only] = self.sources.as_mut_slice() {
            return only.next();
        }
        let least = self.sources.iter_mut().filter_map(|s| s.peek().map(|(k, _)| *k)).min()?;
        let mut newest = None;
        for source in &mut self.sources {
            if let Some(item) = source.next_if(|(k, _)| *k == least) {
                newest.get_or_insert(item);
            }
        }
        newest
    }
}
