//! What frames are compiled against in the models.

pub use loom::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
pub use loom::sync::{Mutex, MutexGuard, RwLock};

pub fn zeros(words: usize) -> FrameWords {
    FrameWords((0..words).map(|_| AtomicU64::new(0)).collect())
}

/// Words that end with the process: nothing is noted of them.
pub struct FrameWords(Box<[AtomicU64]>);

impl std::ops::Deref for FrameWords {
    type Target = [AtomicU64];
    fn deref(&self) -> &[AtomicU64] {
        &self.0
    }
}

#[derive(Clone, Copy)]
pub struct Unsaved;

impl FrameWords {
    pub fn memory(&self) -> usize {
        self.0.len() * 8
    }
    pub fn is_held(&self) -> bool {
        false
    }
    pub fn note(&self, _ino: u64, _index: u64, _first: usize, _unsaved: Unsaved) {}
    pub fn publish(&self) {}
    pub fn withdraw(&self) {}
    pub fn take_note(&self, _old: &Self, _first: usize) {}
}
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap()
}
pub fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    mutex.try_lock().ok()
}
