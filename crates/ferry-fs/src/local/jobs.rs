//! What the threads of the pools do for the file system `F`. A transport's thread serves every
//! program of a core, so it must not wait: what may have to wait becomes a job.
//!
//! The blocking pool has three parts, so that one kind of wait does not keep the others from
//! running: changes, changes that take many transactions, and fsyncs. Reads of contents, reads of
//! metadata and snapshots have pools of their own.

use crate::api::{Parked, Reply};
use crate::inode::incore::Inode;
use crate::local::handles::Handle;
use crate::local::pool::Work;
use std::sync::Arc;

/// A job gets the file system.
pub(crate) type Job<F> = Box<dyn FnOnce(&F) + Send>;

/// A kind of work that is a job and no more: its name, that of its threads, and how many there may
/// be. A thread takes one job at a time.
macro_rules! job {
    ($(#[$what:meta])* $name:ident, $thread:literal, $(#[$why:meta])* $most:literal) => {
        $(#[$what])*
        pub(crate) struct $name<F>(pub(crate) Job<F>);

        impl<F: 'static> Work<F> for $name<F> {
            const NAME: &'static str = $thread;
            $(#[$why])*
            const THREADS_MAX: usize = $most;
            const TOGETHER: bool = false;

            fn run(these: Vec<Self>, fs: &F) {
                these.into_iter().for_each(|job| (job.0)(fs));
            }
        }
    };
}

job! {
    /// A change that has to wait for log space or for write-back.
    BlockingChange, "ferry-change",
    /// So many changes stand in the wait queues for log space and for the cache, in the order in
    /// which they came. The others wait for these.
    32
}

job! {
    /// A request that must read metadata which may be far away.
    MetadataRead, "ferry-metadata",
    /// The store is asked for so much at the same time.
    32
}

job! {
    /// What a change will need is read before its turn comes.
    ReadAhead, "ferry-ahead",
    /// The store is asked for so much at the same time, beside what somebody waits for.
    32
}

job! {
    /// A change that takes many transactions, as cutting off a million extents does; or a look at
    /// the extents of many files.
    BlockingDrop, "ferry-drop",
    2
}

job! {
    /// A change of the volume's snapshots. It waits for the store, for as long as that does not
    /// answer.
    SnapshotChange, "ferry-snapshot",
    /// The device changes its snapshots one after the other.
    1
}

/// An fsync that must wait before its data can be sent: much is in flight to the device already (or
/// the data is much), the log is full, or another thread changes the file. The data of all fsyncs
/// that have gathered is written back together.
pub(crate) struct BlockingFsync<F> {
    /// Files to be written back.
    pub(crate) files: Vec<Arc<Inode>>,
    /// What follows. It writes back itself whatever of the files is still dirty, and gets the error
    /// if that fails.
    pub(crate) then: Job<F>,
}

/// A read that must wait for the device.
pub(crate) struct PooledRead {
    pub(crate) handle: Arc<Handle>,
    /// First byte.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) len: usize,
    pub(crate) parked: Parked<Reply>,
}
