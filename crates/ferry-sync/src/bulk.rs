//! Syncs batches of open files on FerryFS. Each batch is one ioctl, on a thread of its own: the
//! next batch is collected while one becomes durable.

use crate::sys::{self, BULK_FILES_MAX, BulkMessage};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{Receiver, Sender};

/// Open files of one FerryFS, at most [`BULK_FILES_MAX`].
pub struct BulkBatch<F> {
    pub files: Vec<F>,
    pub inos: Vec<u64>,
}

impl<F> Default for BulkBatch<F> {
    fn default() -> Self {
        Self { files: Vec::new(), inos: Vec::new() }
    }
}

/// Whether the file system knows the request, and the answer would cover stores to mapped memory.
pub fn understood(file: BorrowedFd<'_>) -> bool {
    sys::write_back_waits() && sys::bulk_sync(file, &mut BulkMessage::new(false)).is_ok()
}

/// Makes batches durable until there are no more. Answers for each file, in order: `None` if it is
/// durable (and closed); else the file, because only fsync on its descriptor can report its error.
pub fn commit_all<F: AsFd>(
    batches: Receiver<BulkBatch<F>>,
    answers: Sender<Vec<Option<F>>>,
    data_only: bool,
) {
    let mut message = BulkMessage::new(data_only);
    for batch in batches {
        assert!(batch.inos.len() <= BULK_FILES_MAX && batch.inos.len() == batch.files.len());
        let Some(first) = batch.files.first() else { continue };
        message.count = batch.inos.len() as u32;
        message.files[..batch.inos.len()].copy_from_slice(&batch.inos);
        let synced = sys::bulk_sync(first.as_fd(), &mut message);
        let durable = |at: usize| synced.is_ok() && message.files[at] == 0;
        let answer =
            batch.files.into_iter().enumerate().map(|(at, file)| (!durable(at)).then_some(file));
        if answers.send(answer.collect()).is_err() {
            return; // the caller has gone
        }
    }
}
