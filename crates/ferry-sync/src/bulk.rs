//! FerryFS's way: batches of open files, each one call of the ioctl, on a thread of its own, so that the next batch is collected
//! while one becomes durable.

use crate::sys::{self, BULK_FILES_MAX, Message};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{Receiver, Sender};

/// Open files of one FerryFS, at most [`BULK_FILES_MAX`].
pub struct Batch<F> {
    pub files: Vec<F>,
    pub inos: Vec<u64>,
}

impl<F> Default for Batch<F> {
    fn default() -> Self {
        Self { files: Vec::new(), inos: Vec::new() }
    }
}

/// Whether the file system knows the request, and its answer would cover what was stored through mappings.
pub fn understood(file: BorrowedFd<'_>) -> bool {
    sys::hand_over_waits() && sys::bulk_sync(file, &mut Message::new(false)).is_ok()
}

/// Makes batches durable until there are no more. Says of each file, in order: `None`, it is durable (and closed); or gives it back,
/// because only fsync on its descriptor can say what it is about it.
pub fn commit_all<F: AsFd>(batches: Receiver<Batch<F>>, answers: Sender<Vec<Option<F>>>, data_only: bool) {
    let mut message = Message::new(data_only);
    for batch in batches {
        assert!(batch.inos.len() <= BULK_FILES_MAX && batch.inos.len() == batch.files.len());
        let Some(first) = batch.files.first() else { continue };
        message.count = batch.inos.len() as u32;
        message.files[..batch.inos.len()].copy_from_slice(&batch.inos);
        let asked = sys::bulk_sync(first.as_fd(), &mut message);
        let durable = |at: usize| asked.is_ok() && message.files[at] == 0;
        let answer = batch.files.into_iter().enumerate().map(|(at, file)| (!durable(at)).then_some(file));
        if answers.send(answer.collect()).is_err() {
            return; // nobody waits any more
        }
    }
}
