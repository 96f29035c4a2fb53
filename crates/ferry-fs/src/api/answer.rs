//! Answers: at once, or later by a request that parks; and what a request says of its caller.

use crate::api::types::{
    Attr, DirEntry, Entry, Errno, FileLock, Ino, Listing, Opened, Statfs, Timestamp,
};
use ferry_device::ReadRing;
use ferry_env::activity::{self, Layer};
use ferry_journal::RequestId;
use std::marker::PhantomData;
use std::time::Duration;

/// Why an operation gives no answer now.
#[derive(Debug)]
pub enum Stop {
    /// It failed.
    Errno(Errno),
    /// The request was parked; its [`Parked`] handle will be completed.
    Parked,
}

impl From<Errno> for Stop {
    fn from(e: Errno) -> Self {
        Stop::Errno(e)
    }
}

/// What an operation returns.
pub type Answer<T> = Result<T, Stop>;

/// Every form that a parked answer can take.
#[derive(Debug)]
pub enum Reply {
    /// Nothing but success.
    Empty,
    /// A name looked up or made.
    Entry(Entry),
    /// Attributes.
    Attr(Attr, Duration),
    /// The same, and when the inode was made.
    Statx(Attr, Duration, Timestamp),
    /// An opened file or directory.
    Opened(Opened),
    /// A file made and opened.
    Created(Entry, Opened),
    /// Bytes taken by a write or a copy, or a position.
    Count(u64),
    /// Bytes read: of a file, a link's target, an attribute's value.
    Data(Vec<u8>),
    /// Bytes read, in memory that somebody may use again afterwards.
    Shared(SharedBytes),
    /// Directory entries, in order.
    Dir(Vec<DirEntry>),
    /// A file system's totals.
    Statfs(Statfs),
    /// A lock that stands in the way, or none.
    Lock(FileLock),
}

macro_rules! reply_from {
    ($($t:ty => $v:ident),*) => {$(
        impl From<$t> for Reply { fn from(x: $t) -> Reply { Reply::$v(x) } }
    )*};
}
reply_from!(Entry => Entry, Opened => Opened, u64 => Count, Vec<u8> => Data, Vec<DirEntry> => Dir, Statfs => Statfs, FileLock => Lock);

impl From<()> for Reply {
    fn from((): ()) -> Self {
        Reply::Empty
    }
}

impl From<(Attr, Duration)> for Reply {
    fn from((a, t): (Attr, Duration)) -> Self {
        Reply::Attr(a, t)
    }
}

impl From<(Attr, Duration, Timestamp)> for Reply {
    fn from((a, t, born): (Attr, Duration, Timestamp)) -> Self {
        Reply::Statx(a, t, born)
    }
}

impl From<(Entry, Opened)> for Reply {
    fn from((e, o): (Entry, Opened)) -> Self {
        Reply::Created(e, o)
    }
}

/// Bytes that nobody changes while they are shared.
pub type SharedBytes = std::sync::Arc<ferry_device::AlignedBuf>;

/// Takes the reply of a parked request; given by the transport.
pub type Complete = Box<dyn FnOnce(Result<Reply, Errno>) + Send>;
/// Called once if the requester no longer waits (a signal, the mount's end). The transport has then
/// already answered `EINTR`; a later completion is dropped.
pub type Interrupt = Box<dyn FnOnce() + Send>;

/// The transport's side of parking.
pub trait Park {
    /// Keeps the current request open. Called at most once a request.
    fn park(&self, interrupt: Option<Interrupt>) -> Complete;
    /// Whether the request has its thread to itself, so that what would park may as well wait.
    fn may_wait(&self) -> bool {
        false
    }
    /// Bytes of a listing that its asker has room for.
    fn listing_bytes(&self) -> usize {
        Listing::BYTES_MIN
    }
    /// The ring of the calling thread, if the transport has one that reads for others.
    fn read_ring(&self) -> Option<&dyn ReadRing> {
        None
    }
    /// What the maker of the change was told before the change came here. Only a server's caller
    /// answers more than `None`.
    fn early_ack(&self) -> Option<EarlyAck> {
        None
    }
    /// The number of the request, if the next process replays it should this one be killed. What
    /// wraps another one passes that of the other one on.
    fn request(&self) -> Option<RequestId>;
}

/// A request whose answer comes later. Dropping it without an answer answers `EIO`.
pub struct Parked<T> {
    complete: Option<Complete>,
    answer: PhantomData<fn(T)>,
}

impl<T: Into<Reply>> Parked<T> {
    /// Answers the request.
    pub fn complete(mut self, result: Result<T, Errno>) {
        if let Some(complete) = self.complete.take() {
            complete(result.map(Into::into));
        }
    }
}

impl<T> Drop for Parked<T> {
    fn drop(&mut self) {
        if let Some(complete) = self.complete.take() {
            complete(Err(Errno(libc::EIO)));
        }
    }
}

/// The caller of a request, and how to park the request.
#[derive(Clone, Copy)]
pub struct Cx<'a> {
    /// File-system user id.
    pub uid: u32,
    /// File-system group id.
    pub gid: u32,
    /// Process id, 0 where unknown.
    pub pid: u32,
    /// The process's umask, for operations that make a name (it applies only without a default
    /// ACL).
    pub umask: u32,
    /// How to park.
    pub park: &'a dyn Park,
}

/// What a client has told a program about a change that it acknowledged before the change came
/// here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EarlyAck {
    /// The time of the change: whatever it sets to "now" gets exactly this time.
    pub at: Timestamp,
    /// The number of the inode that it makes, a reserved one
    /// ([`SessionStore::reserve_numbers`](crate::SessionStore::reserve_numbers)). Each can be used
    /// once. `EEXIST`: the number is not reserved, or was used.
    pub ino: Option<Ino>,
    /// The change's place in its session, stored in the change's own transaction. Changes of a
    /// session that have one are made one after the other. Changes that may as well be applied
    /// twice have none: write, fallocate, copies, and a change of size.
    pub seq: Option<SessionSeq>,
    /// Where the change takes its space from, if there is enough.
    pub reservation: Option<ReservationId>,
}

/// A sequence number of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionSeq {
    /// The session.
    pub session: u128,
    /// The number of its change.
    pub seq: u64,
}

/// Names a [`Reservation`](crate::Reservation).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReservationId(pub u64);

impl Cx<'_> {
    /// Parks the request.
    pub fn park<T: Into<Reply>>(&self, interrupt: Option<Interrupt>) -> Parked<T> {
        Parked { complete: Some(self.park.park(interrupt)), answer: PhantomData }
    }

    /// The same; a profile shows that the request waits in this layer.
    pub(crate) fn park_in<T: Into<Reply>>(
        &self,
        layer: Layer,
        interrupt: Option<Interrupt>,
    ) -> Parked<T> {
        let _inside = activity::enter(layer);
        self.park(interrupt)
    }

    /// Says whether the change was acknowledged before it came here, and how. Never, with a mount.
    pub(crate) fn early_ack(&self) -> Option<EarlyAck> {
        self.park.early_ack()
    }

    /// The number of the request, if it may be replayed.
    pub fn request(&self) -> Option<RequestId> {
        self.park.request()
    }
}
