//! What is still to be warmed, and for whom.

use crate::format::ObjectRef;
use ferry_device::{WarmDone, Warmed};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Requests under way at a time. Beside them, and those of readers ahead, the executor has threads
/// left for uploads.
const FETCHES_MAX: usize = 6;

/// What one caller wants warmed. When the last of its tasks ends, or is dropped, it is answered.
pub(crate) struct Batch {
    result: Mutex<io::Result<Warmed>>,
    done: Mutex<Option<WarmDone>>,
}

impl Batch {
    /// `done` is called at its end.
    pub fn new(done: WarmDone) -> Self {
        Self { result: Mutex::new(Ok(Warmed::default())), done: Mutex::new(Some(done)) }
    }

    /// Something was warmed, unless it has failed.
    pub fn add(&self, change: impl FnOnce(&mut Warmed)) {
        if let Ok(warmed) = &mut *self.result.lock() {
            change(warmed);
        }
    }

    /// It ends with this error.
    pub fn fail(&self, error: io::Error) {
        *self.result.lock() = Err(error);
    }

    /// Nothing more is fetched for it.
    pub fn has_ended(&self) -> bool {
        self.result.lock().as_ref().map_or(true, |warmed| warmed.full)
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        if let Some(done) = self.done.get_mut().take() {
            done(std::mem::replace(self.result.get_mut(), Ok(Warmed::default())));
        }
    }
}

/// What a task brings in.
pub(crate) enum Wanted {
    /// These contents of the object. Its front tells where they are.
    Contents(Vec<Range<u64>>),
    /// These parts, which are not in the cache.
    Parts(Range<u64>),
}

/// A part of a batch, in one object.
pub(crate) struct Task {
    pub batch: Arc<Batch>,
    pub object: ObjectRef,
    pub wanted: Wanted,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Task>,
    /// Jobs that carry tasks out.
    running: usize,
}

/// What is still to be warmed.
#[derive(Default)]
pub(crate) struct Warming(Mutex<Queue>);

impl Warming {
    /// Adds tasks behind all others.
    pub fn push(&self, tasks: impl IntoIterator<Item = Task>) {
        self.0.lock().tasks.extend(tasks);
    }

    /// Adds tasks that come next, in this order.
    pub fn push_next(&self, tasks: Vec<Task>) {
        let mut queue = self.0.lock();
        tasks.into_iter().rev().for_each(|task| queue.tasks.push_front(task));
    }

    /// A task for one more job, if one more may run. It calls [`Warming::ended`].
    pub fn begin(&self) -> Option<Task> {
        let mut queue = self.0.lock();
        let task = if queue.running < FETCHES_MAX { queue.tasks.pop_front() } else { None };
        queue.running += usize::from(task.is_some());
        task
    }

    /// A job has ended.
    pub fn ended(&self) {
        self.0.lock().running -= 1;
    }
}
