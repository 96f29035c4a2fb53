//! Words that outlive a process, which remember each store: a process may be killed behind any.

use ferry_device::Words;
use parking_lot::Mutex;
use std::collections::HashMap;

/// Where, and what.
type Store = (usize, u64);

/// The words that were stored, and each store.
#[derive(Debug, Default)]
pub struct RecordedWords(Mutex<(HashMap<usize, u64>, Vec<Store>)>);

impl Words for RecordedWords {
    fn get(&self, at: usize) -> u64 {
        self.0.lock().0.get(&at).copied().unwrap_or_default()
    }

    fn set(&self, at: usize, value: u64) {
        let (words, stores) = &mut *self.0.lock();
        words.insert(at, value);
        stores.push((at, value));
    }

    fn raise(&self, at: usize, value: u64) {
        self.set(at, self.get(at).max(value));
    }
}

impl RecordedWords {
    /// The words after so many stores.
    pub fn after(&self, stores: usize) -> Self {
        let words = self.0.lock().1[..stores].iter().copied().collect();
        Self(Mutex::new((words, Vec::new())))
    }

    /// How many stores there were.
    pub fn stores(&self) -> usize {
        self.0.lock().1.len()
    }

    /// The stores since this was called last.
    pub fn take_stores(&self) -> Vec<Store> {
        std::mem::take(&mut self.0.lock().1)
    }
}
