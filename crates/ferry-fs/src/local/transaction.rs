//! The common path of a change: how it is made, whether there is room, and its transaction.
//!
//! Every operation goes the same way. `how` reads from the request whether the change may wait and
//! what its maker was told. `admit` and `admit_number` refuse it if there is no room. `begin`
//! reserves log space, before any lock is taken. A change that was acknowledged early
//! ([`EarlyAck`]) keeps what its maker was told:
//!
//! * Its time is the one that the client has reported.
//! * The inode that it makes has the number that the client has reported, one of the reserved ones.
//! * Its sequence number joins its transaction. So if a crash leaves the number, it leaves the
//!   change too, and all changes of the session before it.
//! * Its space comes from a reservation (`space/reservation.rs`).
//!
//! A change of a request that is replayed after a kill of the process ([`RequestId`]) notes the
//! context that it joins, in memory that outlives the process. So the next process knows whether
//! it was made ([`LocalFs::was_made`]): if it was, the replay gives the answer and changes nothing.
//! Changes that may as well be made twice note nothing: write, fallocate, copies, a change of
//! attributes or of size, a file without a name.

use crate::api::{Cx, EarlyAck, Ino, ReservationId, SessionSeq, Timestamp};
use crate::credits::{SESSION_BYTES, with_seq};
use crate::error::FsError;
use crate::keys::{self, Number};
use crate::local::counters::Commit;
use crate::local::local_fs::{LocalFs, errno};
use crate::store::data_store::Busy;
use ferry_env::activity::{self, Layer};
use ferry_env::planted::{Bug, is_planted};
use ferry_journal::{Completion, Credits, RequestId, Seq, Transaction};
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;

/// Bytes of the log that dropping an extent takes, about.
const DROP_BYTES: u64 = 128;

/// How a change is made.
#[derive(Clone, Copy)]
pub(crate) struct How {
    /// Whether it may wait.
    pub(crate) busy: Busy,
    /// What its maker was told before it came here.
    pub(crate) ack: Option<EarlyAck>,
    /// The request that it is, if that may be replayed.
    pub(crate) request: Option<RequestId>,
}

impl How {
    /// On a thread that may wait.
    pub(crate) fn waiting(ack: Option<EarlyAck>) -> Self {
        Self { busy: Busy::Wait, ack, request: None }
    }

    /// Not acknowledged early.
    pub(crate) fn unacknowledged(busy: Busy) -> Self {
        Self { busy, ack: None, request: None }
    }

    /// A step of the change that is not its last: the numbers of the change join the last one.
    pub(crate) fn without_seq(self) -> Self {
        let ack = self.ack.map(|ack| EarlyAck { seq: None, ..ack });
        Self { ack, request: None, ..self }
    }

    /// Where the change takes its space from.
    pub(crate) fn reservation(self) -> Option<ReservationId> {
        self.ack?.reservation
    }
}

impl LocalFs {
    /// How a request's change is made. An early-acknowledged one has a thread that may wait, so
    /// that nothing is drawn from its reservation twice.
    pub(crate) fn how(&self, cx: &Cx) -> How {
        let ack = cx.early_ack();
        let busy = if ack.is_some() { Busy::Wait } else { self.patience(cx) };
        How { busy, ack, request: cx.request() }
    }

    /// The time of a change.
    pub(crate) fn time(&self, how: How) -> Timestamp {
        how.ack.map_or_else(|| self.now(), |ack| ack.at)
    }

    /// Begins the transaction that makes a change, or the last one if the change takes several. It
    /// reserves log space. [`FsError::WouldWait`] if it would have to wait for that and the caller
    /// must not.
    pub(crate) fn begin(&self, how: How, credits: Credits) -> Result<Transaction<'_>, FsError> {
        let begin = |credits| {
            let mut txn = match how.busy {
                Busy::Refuse => self.journal.try_begin(credits)?.ok_or(FsError::WouldWait)?,
                Busy::Wait | Busy::Skip => self.journal.begin(credits)?,
            };
            txn.set_request(how.request);
            Ok(txn)
        };
        let Some(SessionSeq { session, seq }) = how.ack.and_then(|ack| ack.seq) else {
            return begin(credits);
        };
        if is_planted(Bug::EarlyLastApplied) {
            let mut early =
                self.journal.begin(Credits { keys: 1, bytes: SESSION_BYTES, urgent: false })?;
            early.put(&keys::mark(session), &Number(seq).encode());
            self.force(early.commit())?;
            return begin(credits);
        }
        let mut txn = begin(with_seq(credits))?;
        txn.put(&keys::mark(session), &Number(seq).encode());
        Ok(txn)
    }

    /// Whether the process before has made this change, durably, and was killed before its answer
    /// was noted. Nothing has happened behind it that its maker could see: its kernel holds others
    /// off until the answer comes.
    pub(crate) fn was_made(&self, how: How) -> bool {
        how.request.is_some_and(|request| {
            self.made_before.get().is_some_and(|made| made.contains(&request.unique))
        })
    }

    /// Refuses a change that adds to the metadata if there is no room, and none reserved for it.
    /// `target`: bytes of a symbolic link's target.
    pub(crate) fn admit(&self, how: How, target: usize) -> Result<(), FsError> {
        // One that is there has its room.
        if self.was_made(how) {
            return Ok(());
        }
        self.data.admit(how.busy, how.reservation(), target)
    }

    /// The number of a new inode. Nothing may fail after it.
    pub(crate) fn number_for(&self, ack: Option<EarlyAck>) -> Result<Ino, FsError> {
        let Some(ino) = ack.and_then(|ack| ack.ino) else { return Ok(self.counters.next_ino()) };
        // An earlier mount has reserved or used its numbers.
        let is_new =
            || Ok::<_, FsError>(ino >= self.counters.first() || self.table.get(ino)?.is_none());
        if is_new()? && self.counters.use_number(ino) { Ok(ino) } else { Err(errno(libc::EEXIST)) }
    }

    /// Makes sure that the operation can take an inode number; called before the operation begins.
    /// Once in a million inodes it waits for a flush, or is [`FsError::WouldWait`] if the caller
    /// must not.
    pub(crate) fn admit_number(&self, how: How) -> Result<(), FsError> {
        match how.busy {
            _ if !self.counters.is_short() || self.was_made(how) => Ok(()),
            Busy::Refuse => Err(FsError::WouldWait),
            Busy::Wait | Busy::Skip => {
                self.counters.raise(|commit| self.limit_made_durable(commit))
            }
        }
    }

    pub(crate) fn limit_made_durable(&self, commit: &mut Commit<'_>) -> Result<(), FsError> {
        let seq = commit(self.journal.begin(Credits { keys: 1, bytes: 64, urgent: false })?);
        self.force(seq)
    }

    /// What to do where putting things into contexts would have to wait: a transport's thread must
    /// not, nor need it.
    pub(crate) fn patience(&self, cx: &Cx) -> Busy {
        if self.options.background && !cx.park.may_wait() { Busy::Refuse } else { Busy::Wait }
    }

    /// Waits until `seq` is durable.
    pub(crate) fn force(&self, seq: Seq) -> Result<(), FsError> {
        if seq <= self.journal.durable() {
            return Ok(());
        }
        await_context(|done| self.journal.force(seq, done))
    }

    /// So many blocks, or, where the log is small, as many as can be dropped with a quarter of it:
    /// more wait for a checkpoint.
    pub(crate) fn fits_log(&self, blocks: u64) -> u64 {
        blocks.min(2 * self.journal.max_transaction_bytes() / DROP_BYTES)
    }
}

/// Waits until the completion that `start` gets is called.
pub(crate) fn await_context(start: impl FnOnce(Completion)) -> Result<(), FsError> {
    let _waiting = activity::enter(Layer::Commit);
    let outcome = Arc::new((Mutex::new(None), Condvar::new()));
    let theirs = outcome.clone();
    start(Box::new(move |durable| {
        *theirs.0.lock() = Some(durable);
        theirs.1.notify_one();
    }));
    let mut durable = outcome.0.lock();
    loop {
        if let Some(durable) = durable.take() {
            return durable.map_err(FsError::from);
        }
        outcome.1.wait(&mut durable);
    }
}
