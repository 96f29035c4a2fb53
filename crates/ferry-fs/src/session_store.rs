//! What a server asks of the volume that it serves, beyond what every transport asks
//! ([`Filesystem`]): inode numbers and space reserved for clients, and records of sessions that
//! survive a crash.
//!
//! A client acknowledges some changes to its programs before the server has applied them. It may do
//! so only because nothing can go wrong with them any more: their inode numbers and their space are
//! reserved ([`SessionStore::reserve_numbers`], [`SessionStore::reserve_space`]). When such a
//! change comes here, its [`EarlyAck`](crate::EarlyAck) says what the client has told its program.
//!
//! Four kinds of record are kept for sessions, each under the session's number (`docs/format.md`):
//! * the **last-applied sequence number**. It joins the transaction of the change that it counts,
//!   so a crash leaves both or neither;
//! * the **durable watermark**: all changes of the session up to it are durable, contents too;
//! * **lock holder**: the session may hold file locks;
//! * **evicted**: an administrator has ended the session for good.

use crate::api::{Errno, Filesystem, Ino, ReservationId, SessionSeq};
use std::ops::Range;

/// Space that is reserved for one client. If it is dropped, what is left of it is free again.
pub trait Reservation: Send + Sync {
    /// What changes name it by.
    fn id(&self) -> ReservationId;
    /// Bytes and inodes that are left.
    fn left(&self) -> (u64, u64);
    /// Reserves more. `ENOSPC`: there is not so much, and nothing has changed.
    fn add(&self, bytes: u64, inodes: u64) -> Result<(), Errno>;
    /// Frees what exceeds this. A change that draws from it at the same time may still get that, or
    /// find less.
    fn keep_only(&self, bytes: u64, inodes: u64);
}

/// What a change will need of the volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Needed {
    /// Its record.
    Inode(Ino),
    /// What a name of a directory means, and the inode that it means.
    Name(Ino, Vec<u8>),
    /// The place of these bytes of a file, and the blocks of which they replace a part.
    Overwritten(Ino, Range<u64>),
}

/// A file system that a server can serve.
pub trait SessionStore: Filesystem {
    /// Whether a read of the volume may take as long as a request over a network.
    fn is_far(&self) -> bool;
    /// Changes that wait for their turn will need this. Where the volume is far away, what is not
    /// in memory is read meanwhile. Waits for nothing.
    fn read_ahead(&self, needed: Vec<Needed>);

    /// Whether this process surely has the volume still. A server says nothing to clients
    /// otherwise: another server may have changed what it would tell.
    fn is_surely_ours(&self) -> bool;
    /// Finds that out, and waits for the device. An error: another process has the volume.
    fn ascertain_ours(&self) -> Result<(), Errno>;

    /// Reserves `count` inode numbers, or fewer. Nobody else ever gets one of them, not even after
    /// a crash: those that are not used are lost. May wait for the device.
    fn reserve_numbers(&self, count: u32) -> Result<Range<Ino>, Errno>;
    /// Reserves space for changes that name it: `bytes` of contents and what `inodes` new names and
    /// inodes take. `ENOSPC`: there is not so much.
    fn reserve_space(&self, bytes: u64, inodes: u64) -> Result<Box<dyn Reservation>, Errno>;

    /// Records the session. Its last-applied sequence number is 0 until a change with an own number
    /// is made. The record is durable when this returns.
    fn add_session(&self, session: u128) -> Result<(), Errno>;
    /// Removes the record of a session whose client has nothing to replay. The next sync makes that
    /// durable.
    fn remove_session(&self, session: u128);
    /// The clients of these sessions must not replay anything: removes the records. Durable when
    /// this returns, also if another call has removed a record before.
    fn revoke_sessions(&self, sessions: &[u128]);
    /// All sessions that have a record.
    fn sessions(&self) -> Result<Vec<u128>, Errno>;
    /// The session's last-applied sequence number, if it has a record.
    fn last_applied(&self, session: u128) -> Result<Option<u64>, Errno>;
    /// Makes everything durable, and with it these numbers as the durable watermarks of their
    /// sessions. Waits for the device. One call at a time: a later one counts.
    fn sync_sessions(&self, upto: &[SessionSeq]) -> Result<(), Errno>;
    /// The durable watermark of a session that has a record; 0 if it was never set.
    fn durable_watermark(&self, session: u128) -> Result<u64, Errno>;

    /// Records that the session may hold file locks from now on. Durable when this returns. A
    /// read-only volume records nothing.
    fn add_lock_holder(&self, session: u128) -> Result<(), Errno>;
    /// The sessions that may have held file locks.
    fn lock_holders(&self) -> Result<Vec<u128>, Errno>;
    /// These sessions hold no locks any more, and reclaim none. Durable when this returns.
    fn remove_lock_holders(&self, sessions: &[u128]) -> Result<(), Errno>;

    /// Records that these sessions were evicted, each with its number among all evictions, and
    /// forgets the evictions of the sessions in `forgotten`. The other records of the evicted
    /// sessions go. Durable when this returns. A read-only volume records nothing.
    fn evict(&self, sessions: &[SessionSeq], forgotten: &[u128]) -> Result<(), Errno>;
    /// The sessions that were evicted, the one with the smallest number first.
    fn evicted(&self) -> Result<Vec<SessionSeq>, Errno>;

    /// Whether the inode has no extended attributes, and so no ACLs.
    fn is_plain(&self, ino: Ino) -> Result<bool, Errno>;
    /// The mount is about to end, and programs outlive it: files that they have open and that have
    /// no name stay for the next mount.
    fn keep_removed(&self);
    /// The clients that had such files open have had time to come back. Files that none of them
    /// claimed are removed.
    fn reclaim_removed(&self);
    /// Makes durable that no client relies on anything that it was told here. Nothing is changed
    /// afterwards. Waits for the device.
    fn hand_over(&self) -> Result<(), Errno>;
    /// Whether no client can rely on what it was told at an earlier mount: the volume is new, or
    /// its last mount ended with [`SessionStore::hand_over`].
    fn was_handed_over(&self) -> bool;
}
