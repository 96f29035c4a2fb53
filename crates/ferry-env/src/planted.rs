//! Bugs that tests plant, to show that a simulation or a model check would find them.
//!
//! The code that a bug would break asks [`is_planted`]. Without the feature `planted` that is
//! always false, and the compiler removes the branch: no program that is installed has one. The
//! feature is on in every build of tests, because the crates enable it for their
//! `dev-dependencies`. So tests that plant bugs and all other tests share one build.

#[cfg(feature = "planted")]
pub use on::{Planted, PlantedHere, is_planted, plant, plant_here};

/// A bug that a test must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Bug {
    /// No bug: the code is as it should be.
    None,
    /// Device, against FLUSH-2: a caller shares the flush in flight, whenever that started.
    SharesAnyFlush,
    /// Device, against FLUSH-2: writes that completed during a flush count as flushed.
    SamplesAfterTheFlush,
    /// Device, against FLUSH-3: after a failure the next flush may succeed.
    ForgetsFailures,
    /// Device, a mirror: a writer stays in regions that have another length meanwhile.
    OldRegions,
    /// Device: callers that wait for the next flush are never answered.
    ForgetsWaiters,
    /// Journal: a held seal has no deadline.
    HoldsForEver,
    /// Journal: a lone caller is held, too.
    HoldsTheLone,
    /// Journal: a force is answered when the record is written; the flush comes with the next one.
    EarlyAnswer,
    /// Journal: a record that is written when a flush ends counts as flushed, even if the flush
    /// began before.
    JoinedFlush,
    /// Journal: a failed flush counts as successful.
    SwallowedError,
    /// Journal: a transaction goes to the log as two contexts.
    HalfContext,
    /// Journal: recovery takes any whole record at the position of the next one, even one of an
    /// earlier history.
    StaleRecord,
    /// Journal: only the first copy of each block of the home store is written.
    SingleCopy,
    /// Journal: a new home store replaces the old one before it is flushed.
    UnflushedRenewal,
    /// Journal: opening leaves the mark which says that the home store is at rest.
    StaleRestMark,
    /// File system: a segment is reused before the transaction that freed it is durable.
    EarlyReuse,
    /// File system: a file that loses its last name is not noted as an orphan.
    ForgottenOrphan,
    /// File system: a read without a lock does not check that nobody changed what it copied.
    UncheckedRead,
    /// File system: a last-applied sequence number is durable before its change is applied.
    EarlyLastApplied,
    /// File system: a durable watermark is durable before the changes that it covers.
    EarlyWatermark,
    /// File system: inode numbers are reserved beyond the limit that is stored.
    UnraisedLimit,
    /// Server: a change that arrives again is applied again.
    AppliedTwice,
    /// Server: changes are reported as durable before they are.
    EarlyDurable,
    /// Server: a session that ends keeps its file locks.
    RetainedLocks,
    /// Server: it begins without the locks that clients held at the one before.
    ForgottenLocks,
    /// Client: it relies on its leases beyond the end of their term.
    EndlessTerm,
    /// Object store: a flush ends when its own log object is answered, whatever is missing before
    /// it.
    FlushBeforeGap,
    /// Object store: a log object is sent while data objects that it names are not answered.
    LogBeforeData,
    /// Object store: a new owner writes no root before it follows the log.
    NoTakeoverRoot,
    /// Object store: entries of log objects are installed in the order of the answers.
    InstalledInAnyOrder,
    /// Object store: the collector deletes fences, too.
    DeletedFence,
    /// Object store: a sweep looks for a newer claim before it lists, and takes what it does not
    /// know for an orphan, of a newer owner too.
    SweptAfterLook,
    /// Object store: a sweep deletes what only the log behind the takeover root names.
    SweptLog,
    /// Object store: what is found in place of an object, as in the cache on disk, is not checked
    /// for being that object.
    CachedAnother,
    /// Object store: the collector deletes what only a snapshot needs.
    ForgottenPin,
    /// Object store: a sweep deletes what only a snapshot needs.
    SweptPinned,
    /// Object store: who opens a snapshot follows the log behind its root.
    SnapshotFollowsLog,
    /// Object store: the root that goes back to a snapshot has the first number of the log that the
    /// snapshot's root had.
    RolledBackLog,
    /// Object store: a clone's `super` is created before its pin.
    PinnedBehindSuper,
    /// Object store: what was repacked takes the place of what was written meanwhile.
    RepackedAnyway,
    /// Object store: an owner answers reads, and a server its clients, however long ago it looked
    /// for a newer claim.
    ReadsAfterTerm,
    /// A simulated store: what an owner flushes behind the fence is acknowledged.
    AcknowledgedAfterFence,
    /// Object store: a new owner does not wait for the term of older owners if the last one is
    /// dead, which may not have waited itself.
    SkippedTerm,
    /// Object store: a new owner does not wait for the term of an older one that may be alive.
    ServedInTerm,
    /// Object store, local log: an object is acknowledged before its record is flushed.
    AcknowledgedBeforeLocalFlush,
    /// Object store, local log: a log object whose name another owner has taken counts as uploaded.
    UploadedOverAnother,
    /// Object store, local log: a log object is uploaded before data objects that it may name.
    UploadedBeforeData,
    /// Object store, local log: a root is created before what it needs is uploaded.
    RootBeforeUploads,
}

/// Whether a test has planted this bug: there are none in this build.
#[cfg(not(feature = "planted"))]
pub const fn is_planted(_: Bug) -> bool {
    false
}

#[cfg(feature = "planted")]
mod on {
    use super::Bug;
    use std::cell::Cell;
    use std::marker::PhantomData;
    use std::sync::atomic::{AtomicU8, Ordering};
    use std::sync::{Mutex, MutexGuard, PoisonError};

    /// The bug that is planted in the whole process.
    static EVERYWHERE: AtomicU8 = AtomicU8::new(Bug::None as u8);
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

    thread_local! {
        /// The bug that is planted in this thread.
        static HERE: Cell<Bug> = const { Cell::new(Bug::None) };
    }

    /// The bug stays planted as long as this lives.
    #[must_use = "the bug is removed when this is dropped"]
    pub struct Planted {
        _one_at_a_time: MutexGuard<'static, ()>,
    }

    /// The bug stays planted in this thread as long as this lives.
    #[must_use = "the bug is removed when this is dropped"]
    pub struct PlantedHere {
        not_send: PhantomData<*const ()>,
    }

    /// Plants a bug in the whole process. Waits until no other test has one: a test that must not
    /// run beside a bug plants [`Bug::None`].
    pub fn plant(bug: Bug) -> Planted {
        let one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        EVERYWHERE.store(bug as u8, Ordering::Relaxed);
        Planted { _one_at_a_time: one }
    }

    /// Plants a bug in this thread, for a model checker that runs the whole model on one thread.
    pub fn plant_here(bug: Bug) -> PlantedHere {
        HERE.set(bug);
        PlantedHere { not_send: PhantomData }
    }

    /// Whether a test has planted this bug.
    pub fn is_planted(bug: Bug) -> bool {
        EVERYWHERE.load(Ordering::Relaxed) == bug as u8 || HERE.get() == bug
    }

    impl Drop for Planted {
        fn drop(&mut self) {
            EVERYWHERE.store(Bug::None as u8, Ordering::Relaxed);
        }
    }

    impl Drop for PlantedHere {
        fn drop(&mut self) {
            let Self { not_send: PhantomData } = self;
            HERE.set(Bug::None);
        }
    }
}
