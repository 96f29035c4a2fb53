//! The messages, and the limits on them. `docs/protocol.md` says what they mean.

use ferry_fs::{Attr, FileLock, Ino, RenameFlags, SetAttr, Statfs, Timestamp, XattrFlags};

use crate::codec::{List, wire_enum, wire_fields};

/// The newest version of the protocol. `protocol` has those that this release speaks.
pub const VERSION: u32 = 10;
/// Bytes of the largest read and write.
pub const IO_MAX: usize = 1 << 20;
/// Bytes of the longest message: the largest write and what goes before it.
pub const FRAME_MAX: usize = IO_MAX + (64 << 10);
/// Bytes of the longest first message, from somebody of whom nothing is known yet.
pub const HELLO_MAX: usize = 8 << 10;
/// Operations of a session that the server has taken and not answered.
pub const WINDOW_OPS: usize = 1024;
/// Bytes of those operations and their answers.
pub const WINDOW_BYTES: usize = 32 << 20;
/// The largest offset of a file, and of an entry in a directory.
pub const OFFSET_MAX: u64 = i64::MAX as u64;
/// The window counts bytes in units of so many.
pub const WINDOW_UNIT: usize = 1024;
/// Files that a session may have open.
pub const OPEN_MAX: usize = 1 << 20;
/// Bytes of names that one answer to `Readdir` holds.
pub const LISTING_MAX: usize = 32 << 10;
/// Directories that one `Walk` names.
pub const WALK_DIRS_MAX: usize = 64;
/// Entries of directories in an answer to `Walk` behind which no further directory begins.
pub const WALK_ENTRIES: usize = 512;
/// Bytes of that answer, roughly. A directory that is longer by itself is left out.
pub const WALK_BYTES_MAX: usize = 256 << 10;
/// Inodes in one `Forget`, `Claim`, `Numbered`, `Lease`, `Recall` or `Returned`.
pub const BATCH_MAX: usize = 1024;

/// In a reply: the client may keep what it learns of the inode that it asked about.
pub const LEASED: u8 = 1;
/// In a reply: the same of the inode that was found.
pub const LEASED_FOUND: u8 = 2;
/// What an answer takes beside its data, roughly: an entry with its attributes.
pub(crate) const ANSWER_MIN: usize = 256;

/// The thread on whose behalf an operation is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// The thread, in its own machine's numbers.
    pub pid: u32,
    /// For operations that make a name.
    pub umask: u32,
}

/// An inode as an answer names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// Its attributes.
    pub attr: Attr,
    /// Counts, in the session, the answers that have named an inode: `Forget` says up to which one
    /// the client has seen.
    pub stamp: u64,
    /// Proves to a server that was restarted that the client may use the inode.
    pub capability: u128,
}

/// An inode that a client knew in a session that is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Its number.
    pub ino: Ino,
    /// What the server had given with it.
    pub capability: u128,
}

/// An inode that a client forgets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forgotten {
    /// Its number.
    pub ino: Ino,
    /// The newest answer that named it, as far as the client has seen.
    pub stamp: u64,
}

/// What a client has told a program of a change that it acknowledged early, under write leases on
/// all that the change touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acknowledged {
    /// The time that the change sets.
    pub at: Timestamp,
    /// The number of what is made, out of those that [`Op::Numbers`] gave to the session; 0:
    /// nothing is made.
    pub ino: Ino,
}

/// How the server has made a change that it has decided: so it can be replayed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Made {
    /// The time that the change has set.
    pub at: Timestamp,
    /// Of a write: the file's size behind it.
    pub size: u64,
    /// The inodes that it has touched.
    pub touched: List<Ino>,
}

/// An inode of which a client holds the write lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// Its attributes.
    pub attr: Attr,
    /// It has no extended attributes and no ACL.
    pub plain: bool,
}

/// Inode numbers that a client may make inodes under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbers {
    /// The first of them.
    pub first: Ino,
    /// How many.
    pub count: u32,
    /// Proves to a server that was restarted that they are the client's.
    pub capability: u128,
}

/// An entry of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    /// The name.
    pub name: Vec<u8>,
    /// Its inode.
    pub ino: Ino,
    /// Its type.
    pub kind: u32,
    /// Where the listing goes on behind it.
    pub cookie: u64,
}

/// A name in a directory that the session knows; `.`: the directory itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirName {
    /// The directory.
    pub parent: Ino,
    /// The name.
    pub name: Vec<u8>,
}

/// An inode as a walk tells of it: under a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The inode.
    pub known: Known,
    /// It is the write lease.
    pub writes: bool,
    /// Under the write lease: it has no extended attributes and no ACL.
    pub plain: bool,
}

/// What a name means by which a walk was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Which of those that were asked for.
    pub index: u32,
    /// What it means.
    pub ino: Ino,
}

/// How far a session had come that this server has ended: what its last connection may have lost.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Former {
    /// Its changes up to this one are durable, contents too.
    pub durable: u64,
    /// The answers that the client had not confirmed, in their order. No change behind these was
    /// applied.
    pub answers: List<Answered>,
}

/// The answer to a change of a session that has ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Answered {
    /// The number of the change.
    pub seq: u64,
    /// As in `Changed`.
    pub made: Option<Made>,
    /// How it ended.
    pub outcome: Outcome,
}

/// All names of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The directory.
    pub ino: Ino,
    /// Its names, with `.` and `..`.
    pub names: List<Name>,
}

wire_enum! {
    /// What somebody does who goes through a tree: each takes what the one before takes, and more.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    pub enum Purpose {
        /// Lists directories.
        1 => List {},
        /// Looks at what is in them.
        2 => Look {},
        /// Removes it, under write leases.
        3 => Remove {},
    }
}

impl Default for Purpose {
    fn default() -> Self {
        Self::List {}
    }
}

wire_fields! {
    Caller { uid, gid, pid, umask }
    Known { attr, stamp, capability }
    Claim { ino, capability }
    Forgotten { ino, stamp }
    Acknowledged { at, ino }
    Made { at, size, touched }
    Held { attr, plain }
    Numbers { first, count, capability }
    Name { name, ino, kind, cookie }
    DirName { parent, name }
    Seen { known, writes, plain }
    Found { index, ino }
    Listed { ino, names }
    Former { durable, answers }
    Answered { seq, made, outcome }
}

wire_enum! {
    /// An operation. Those up to 31, and `Settled`, change nothing and may be replayed and in any
    /// order; the others are ordered.
    #[derive(Clone, Debug, PartialEq)]
    pub enum Op {
        1 => Lookup { parent: Ino, name: Vec<u8> },
        2 => Getattr { ino: Ino },
        3 => Readlink { ino: Ino },
        4 => Read { fh: u64, offset: u64, size: u32 },
        5 => Fsync { fh: u64, data_only: bool },
        6 => Lseek { fh: u64, offset: u64, whence: i32 },
        7 => Readdir { ino: Ino, cookie: u64 },
        8 => Fsyncdir { ino: Ino, data_only: bool },
        9 => Statfs {},
        10 => Getxattr { ino: Ino, name: Vec<u8> },
        11 => Listxattr { ino: Ino },
        12 => Getlk { ino: Ino, lock: FileLock },
        /// Takes a lock, at once (else `EAGAIN`) or when it can be had. Asking again for what one
        /// has is harmless.
        13 => Lock { ino: Ino, lock: FileLock, wait: bool },
        /// Makes the whole volume durable.
        14 => Sync {},
        /// The server's counters, as JSON.
        15 => Stats {},
        /// Asks for the write leases of inodes.
        16 => Lease { inodes: List<Ino> },
        /// Asks for inode numbers, for what the client will make.
        17 => Numbers {},
        /// Asks for space that early-acknowledged changes draw from, beside what is left of what
        /// was given before.
        18 => Reserve { bytes: u64, inodes: u64 },
        /// Asks for directories before anybody looks at them, with what is below them: what others
        /// use is left out.
        19 => Walk { dirs: List<DirName>, purpose: Purpose },

        32 => Setattr { ino: Ino, fh: Option<u64>, set: SetAttr },
        33 => Mknod { parent: Ino, name: Vec<u8>, mode: u32, rdev: u32 },
        34 => Mkdir { parent: Ino, name: Vec<u8>, mode: u32 },
        35 => Symlink { parent: Ino, name: Vec<u8>, target: Vec<u8> },
        36 => Link { ino: Ino, parent: Ino, name: Vec<u8> },
        37 => Unlink { parent: Ino, name: Vec<u8> },
        38 => Rmdir { parent: Ino, name: Vec<u8> },
        39 => Rename { parent: Ino, name: Vec<u8>, new_parent: Ino, new_name: Vec<u8>, flags: RenameFlags },
        40 => Open { ino: Ino, fh: u64, flags: i32, kill_suidgid: bool },
        41 => Create { parent: Ino, name: Vec<u8>, mode: u32, flags: i32, fh: u64 },
        42 => Tmpfile { parent: Ino, mode: u32, flags: i32, fh: u64 },
        43 => Write { fh: u64, offset: u64, data: Vec<u8>, append: bool, kill_suidgid: bool },
        44 => Release { fh: u64 },
        45 => Fallocate { fh: u64, mode: i32, offset: u64, len: u64 },
        46 => Copy { fh_in: u64, off_in: u64, fh_out: u64, off_out: u64, len: u64 },
        47 => Setxattr { ino: Ino, name: Vec<u8>, value: Vec<u8>, flags: XattrFlags },
        48 => Removexattr { ino: Ino, name: Vec<u8> },
        /// Gives a lock back.
        49 => Unlock { ino: Ino, lock: FileLock },
        50 => Forget { inodes: List<Forgotten> },
        /// In a new session: these inodes were known in the old one.
        51 => Claim { inodes: List<Claim> },
        /// In the place of an operation that nobody wants any more.
        52 => Nothing {},
        /// In a new session: this lock was held in the old one.
        53 => Reclaim { ino: Ino, lock: FileLock },
        /// To a server that has taken the place of one that crashed: these numbers were given to
        /// the client, and these inodes made under them.
        54 => Numbered { numbers: Numbers, made: List<Ino> },
        /// All changes that the client had acknowledged early are replayed or given up. The answer
        /// says that they are durable, and counts the durable changes of the session.
        55 => Replayed {},
        /// So much is left here of what `Reserve` has given: the rest is returned.
        56 => Remaining { bytes: u64, inodes: u64 },
        /// The client has heard that: others may change what it has replayed. Not ordered.
        57 => Settled {},
    }
}

impl Op {
    /// Units that it holds in the window: of what came, or of what goes back.
    pub(crate) fn units(&self, message: usize) -> usize {
        message.max(self.info().answer_bytes_max).min(2 * IO_MAX) / WINDOW_UNIT + 1
    }
}

wire_enum! {
    /// How an operation ended.
    #[derive(Clone, Debug, PartialEq)]
    pub enum Outcome {
        1 => Failed { errno: i32 },
        2 => Done {},
        /// A name looked up or made; `None`: there is none.
        3 => Entry { known: Option<Known> },
        4 => Attributes { attr: Attr },
        5 => Count { count: u64 },
        6 => Data { bytes: Vec<u8> },
        7 => Listing { names: List<Name> },
        8 => Totals { totals: Statfs },
        9 => Blocker { lock: FileLock },
        /// Write leases: of those that were asked for, or of fewer.
        10 => Leases { held: List<Held> },
        /// Inode numbers.
        11 => Numbers { numbers: Numbers },
        /// Another session has, or is about to get, the write lease of what the change touches: it
        /// was not made.
        12 => Busy {},
        /// An earlier early-acknowledged change of its epoch has failed: this one was not made.
        13 => Dropped {},
        /// Inodes that are there and that the client may use.
        14 => Claimed { claims: List<Claim>, stamp: u64 },
        /// So much was reserved: what was asked for, or less.
        15 => Space { bytes: u64, inodes: u64 },
        /// What a walk has come by, each inode leased and each directory whole; what it was asked
        /// for; and what of that had no room.
        18 => Walked { inodes: List<Seen>, dirs: List<Listed>, found: List<Found>, rest: List<u32> },
    }
}

wire_enum! {
    /// From a client.
    #[derive(Clone, Debug, PartialEq)]
    pub enum ToServer {
        /// The first message of a connection.
        1 => Hello {
            /// The version of the protocol that the client speaks.
            version: u32,
            /// The session to go on with; 0: none.
            session: u128,
            /// What to mount: an absolute path on the volume.
            path: Vec<u8>,
            /// What the server's messages call the client.
            name: Vec<u8>,
            /// The newest change of the session that was given a number.
            newest: u64,
        },
        /// An operation of the unordered stream.
        2 => Request {
            /// The client's number for it.
            id: u64,
            /// It is made when this change has been applied.
            after: u64,
            /// The caller.
            caller: Caller,
            /// What.
            op: Op,
        },
        /// An operation of the ordered stream.
        3 => Change {
            /// Its place in the stream: 1, 2, 3, …
            seq: u64,
            /// Answers up to this one have arrived.
            answered: u64,
            /// The epoch that it belongs to: each ends with an early-acknowledged change that
            /// fails.
            epoch: u32,
            /// What the client has told the program already; `None`: it waits for the answer.
            acknowledged: Option<Acknowledged>,
            /// The caller.
            caller: Caller,
            /// What.
            op: Op,
        },
        /// Nobody waits for that request any more.
        4 => Cancel {
            /// Its number.
            id: u64,
        },
        /// Is the server there? And has what was sent before arrived?
        5 => Ping {
            /// The client's number for it.
            number: u64,
        },
        /// The session ends; nothing of it is needed any more.
        6 => Bye {},
        /// What was kept of these inodes is kept no more: asked for by `Recall`, or not.
        7 => Returned {
            /// Which.
            inodes: List<Ino>,
            /// They are returned when this change has been applied. It may still be on its way.
            after: u64,
        },
    }
}

wire_enum! {
    /// From the server.
    #[derive(Clone, Debug, PartialEq)]
    pub enum ToClient {
        /// The answer to `Hello`.
        1 => Welcome {
            /// The session's number, a secret.
            session: u128,
            /// Another one after each start of the server.
            boot: u128,
            /// The session that was asked for goes on.
            resumed: bool,
            /// The newest change of the session that was applied.
            applied: u64,
            /// Its changes up to this one are durable, contents too.
            durable: u64,
            /// Nothing can be changed.
            read_only: bool,
            /// The client may acknowledge changes early. Otherwise it waits for the answer to each:
            /// so must one whose certificate limits it.
            early_acks: bool,
            /// Leases last for so many milliseconds after the last ping that was answered was sent.
            term_ms: u32,
            /// The epoch of changes that goes on.
            epoch: u32,
            /// The server's clock.
            now: Timestamp,
            /// The server is the successor of one that crashed, and waits for the client's replay.
            /// Of the changes up to this one, those that are neither writes nor changes of
            /// attributes are there.
            mark: Option<u64>,
            /// This server has ended the session that was asked for, and remembers how far it had
            /// come. The session that begins here is another one.
            former: Option<Former>,
        },
        /// The connection ends, and why.
        2 => Refused {
            /// For a person.
            reason: Vec<u8>,
        },
        /// Answers a request.
        3 => Reply {
            /// Its number.
            id: u64,
            /// What the client may keep: the inode that was asked about ([`LEASED`]), the one that
            /// was found ([`LEASED_FOUND`]).
            leased: u8,
            /// How it ended.
            outcome: Outcome,
        },
        /// Answers a change.
        4 => Changed {
            /// Its place.
            seq: u64,
            /// What the client may keep of the inodes that were changed.
            after: List<Attr>,
            /// The directory that was made is empty, and may be kept so.
            empty: bool,
            /// Of a change that was not acknowledged early, in a session whose client keeps a
            /// replay log.
            made: Option<Made>,
            /// How it ended.
            outcome: Outcome,
        },
        /// Answers `Ping`.
        5 => Pong {
            /// Its number.
            number: u64,
            /// The term of the leases goes on.
            renewed: bool,
            /// The epoch of changes that goes on. It may have ended without a change that says so:
            /// with the leases of a client of which nothing was heard.
            epoch: u32,
            /// Changes of the session up to this one are durable.
            durable: u64,
            /// The server's clock.
            now: Timestamp,
        },
        /// The server stops. What it has answered is durable, what it has not answered was not
        /// applied.
        6 => Goodbye {},
        /// An administrator has ended this session for good (`ferry evict`). A client that goes on
        /// with it does not know what was done meanwhile.
        7 => Evicted {
            /// For a person.
            reason: Vec<u8>,
        },
        /// Somebody else is about to change these inodes: nothing of them may be kept, and
        /// `Returned` says so.
        8 => Recall {
            /// Which.
            inodes: List<Ino>,
        },
        /// Changes of the session up to this one are durable: nobody has to make them again.
        9 => Durable {
            /// The newest of them.
            seq: u64,
        },
        /// Before `Pong`: names of inodes that the client knows and that other clients have taken
        /// away. While its kernel keeps them, what has no other name takes space.
        10 => Removed {
            /// Which, [`BATCH_MAX`] at most.
            names: List<DirName>,
        },
        /// Another client finds no space: what this one has and does not need is to be returned
        /// at once.
        13 => Lack {},
        /// The server ends, for a change has panicked there: nobody knows whether it was made. It
        /// is not to be sent again.
        12 => Fatal {
            /// The change.
            seq: u64,
        },
        /// Another client has synced an inode: changes of the session up to this one that touch it
        /// are durable. Not each time.
        11 => Synced {
            /// The inode.
            ino: Ino,
            /// The newest of the changes.
            seq: u64,
        },
    }
}
