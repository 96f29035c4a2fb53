//! The facts of every operation, in one table: [`Op::info`]. Server and client read the same facts,
//! so no rule is written twice.
//!
//! Each row begins with [`REQUEST`] or with one of the rows for changes below it, and names what is
//! different. The table has no default row: a new operation does not compile before its facts are
//! given.

use ferry_fs::{Ino, XATTR_SIZE_MAX, target_cost, write_cost};

use super::types::{ANSWER_MIN, DirName, LISTING_MAX, Op, WALK_BYTES_MAX};

/// The stream that carries an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    /// Requests change nothing, and the server answers them in any order.
    Requests(Behind),
    /// Changes are numbered, and the server applies them in that order.
    Changes,
}

/// The newest change of its client that must be applied before a request is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Behind {
    /// The newest that touches an inode which the request names; none, if it names none.
    Inodes,
    /// The same, and every early-acknowledged change: the name may mean an inode that one of them
    /// has made.
    Early,
    /// The newest of all. A lock is taken behind what was returned before, a walk tells of what
    /// nobody can name yet, and what was removed before `Statfs` is free.
    All,
    /// The newest that says how much of the reservation is left.
    Remaining,
}

/// What an operation does with the inodes that it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Use {
    /// The session must know them, and no more: a lock, say, may be held on a file that was moved
    /// out of the export.
    Known,
    /// It opens them, and leaves them as they are: no lease covers that. They must lie inside the
    /// export.
    Opened,
    /// It depends on what they hold, or on their attributes: a request waits for the write leases
    /// of others.
    Read,
    /// It changes them. Like one that reads, a change has its turn on them: others give back all
    /// their leases first.
    Written,
}

/// The inodes that an operation names, so that the session must know them. What is claimed or
/// forgotten is not among them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Inodes<'op> {
    Few([Option<Ino>; 2]),
    List(&'op [Ino]),
    Directories(&'op [DirName]),
}

/// What a change does with the names that it looks up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Naming {
    /// It looks up none.
    Nothing,
    /// It gives an inode a name that means nothing yet, else it fails and touches nothing.
    Adds,
    /// The same, but it opens the file if the name means one.
    AddsOrOpens,
    /// It removes the name of what is no directory.
    Removes,
    RemovesDirectory,
    /// It moves a name to another one, whose inode it replaces.
    Moves,
    /// The same, and it leaves a whiteout where the name was.
    MovesLeavingWhiteout,
    /// Two names exchange their inodes.
    Exchanges,
}

impl Naming {
    /// A name that was there may mean nothing, or something else, afterwards.
    pub(crate) fn takes_names(self) -> bool {
        !matches!(self, Self::Nothing | Self::Adds | Self::AddsOrOpens)
    }

    /// The change touches what its names mean before it, too.
    pub(crate) fn touches_targets(self) -> bool {
        self.takes_names() || self == Self::AddsOrOpens
    }
}

/// The inode that a change makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Makes {
    Nothing,
    /// A regular file, a device, a socket or a named pipe.
    File,
    Directory,
    Symlink,
    /// A file without a name, of which nothing outlives a crash.
    Nameless,
}

impl Makes {
    pub(crate) fn is_inode(self) -> bool {
        self != Self::Nothing
    }

    /// It makes an inode that has a name, so it can be replayed after a crash.
    pub(crate) fn is_named_inode(self) -> bool {
        !matches!(self, Self::Nothing | Self::Nameless)
    }
}

/// What a change does to the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// It changes the session alone, so nothing of it can be lost.
    Nothing,
    /// It changes names, inodes or attributes, in one transaction that also stores the session's
    /// last applied sequence number (`docs/format.md`, marks).
    Metadata,
    /// It changes what a file holds, or its size. Contents become durable later, so the change
    /// leaves no sequence number.
    Contents,
}

/// What a client does with a change that it has sent and that a server has not answered before it
/// crashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Replay {
    /// If the last applied sequence number says that the change was not made, or if making it twice
    /// comes to the same, the client sends it again.
    Again,
    /// The same. If that number says that the change was made, its answer would say no more.
    AgainOrDone,
    /// Making it twice comes to something else, or the client does not have what it would send: it
    /// fails with `EIO`.
    Never,
}

/// What the server checks of a client whose certificate limits it (`server/rights.rs`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Check {
    /// Nothing: it concerns the session, locks or the whole volume.
    Nothing,
    /// The rights with which the file was opened.
    OpenFile,
    /// User, group, mode and access list.
    Permission,
}

/// The most that an early-acknowledged change takes out of what the server has reserved for the
/// session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cost {
    pub(crate) bytes: u64,
    pub(crate) inodes: u64,
    /// It takes an inode number.
    pub(crate) number: bool,
}

impl Cost {
    pub(crate) const NOTHING: Self = Self { bytes: 0, inodes: 0, number: false };
    /// A new inode.
    const INODE: Self = Self { inodes: 1, number: true, ..Self::NOTHING };
    /// A new name of an inode that is there.
    const NAME: Self = Self { inodes: 1, ..Self::NOTHING };

    fn of_write(len: usize) -> Self {
        Self { bytes: write_cost(len), ..Self::NOTHING }
    }
}

/// The facts of one operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Info<'op> {
    /// The word for it in the log.
    pub(crate) what: &'static str,
    pub(crate) stream: Stream,
    pub(crate) inodes: Inodes<'op>,
    /// What it does with these inodes.
    pub(crate) uses: Use,
    /// The open file from which it reads.
    pub(crate) from: Option<u64>,
    /// The open file into which it writes.
    pub(crate) to: Option<u64>,
    /// The client's number for the file that it opens.
    pub(crate) opens: Option<u64>,
    /// The names that a change looks up, each with its directory.
    pub(crate) names: [Option<(Ino, &'op [u8])>; 2],
    pub(crate) naming: Naming,
    pub(crate) makes: Makes,
    pub(crate) effect: Effect,
    pub(crate) replay: Replay,
    /// A client may decide it alone, under write leases, and acknowledge it early.
    pub(crate) is_early: bool,
    /// It fails (`EROFS`) where the export is read-only. Opening a file for writing does, too.
    pub(crate) needs_writable: bool,
    pub(crate) check: Check,
    pub(crate) cost: Cost,
    /// Bytes that it carries for a file.
    pub(crate) data_bytes: usize,
    /// Bytes of its answer, at most, roughly: the window has to have room for them.
    pub(crate) answer_bytes_max: usize,
    /// Its answer shows what is on the volume. It waits as long as something may be missing after a
    /// crash.
    pub(crate) shows: bool,
    /// The file system may answer it later, so no thread waits for that.
    pub(crate) parks: bool,
    /// It brings a new session to where the one before it was. After a crash it counts as progress
    /// of its client.
    pub(crate) restores: bool,
    /// It gives something back, or takes a lock again: it is made though nobody waits for it any
    /// more.
    pub(crate) is_always_made: bool,
    /// Somebody waits for its answer, unless it was acknowledged early.
    pub(crate) is_awaited: bool,
}

/// A request that names nothing.
const REQUEST: Info<'static> = Info {
    what: "request",
    stream: Stream::Requests(Behind::Inodes),
    inodes: Inodes::Few([None, None]),
    uses: Use::Known,
    from: None,
    to: None,
    opens: None,
    names: [None, None],
    naming: Naming::Nothing,
    makes: Makes::Nothing,
    effect: Effect::Nothing,
    replay: Replay::Again,
    is_early: false,
    needs_writable: false,
    check: Check::Nothing,
    cost: Cost::NOTHING,
    data_bytes: 0,
    answer_bytes_max: ANSWER_MIN,
    shows: false,
    parks: false,
    restores: false,
    is_always_made: false,
    is_awaited: true,
};

/// A change of the session alone.
const SESSION: Info<'static> = Info { what: "change", stream: Stream::Changes, ..REQUEST };

/// A change of names, inodes or attributes.
const METADATA: Info<'static> = Info {
    uses: Use::Written,
    effect: Effect::Metadata,
    needs_writable: true,
    check: Check::Permission,
    ..SESSION
};

/// A change of what an open file holds.
const CONTENTS: Info<'static> = Info {
    what: "write",
    effect: Effect::Contents,
    needs_writable: true,
    check: Check::OpenFile,
    ..SESSION
};

const BEHIND_ALL: Stream = Stream::Requests(Behind::All);

fn one<'op>(ino: &Ino) -> Inodes<'op> {
    Inodes::Few([Some(*ino), None])
}

fn two<'op>(first: &Ino, second: &Ino) -> Inodes<'op> {
    Inodes::Few([Some(*first), Some(*second)])
}

/// A request that reads an inode.
fn reads<'op>(ino: &Ino) -> Info<'op> {
    Info { inodes: one(ino), uses: Use::Read, check: Check::Permission, shows: true, ..REQUEST }
}

/// A change of one name in a directory.
fn names<'op>(naming: Naming, parent: &Ino, name: &'op [u8]) -> Info<'op> {
    Info {
        inodes: one(parent),
        names: [Some((*parent, name)), None],
        naming,
        is_early: true,
        ..METADATA
    }
}

/// A change that makes an inode with a name.
fn makes<'op>(makes: Makes, parent: &Ino, name: &'op [u8]) -> Info<'op> {
    Info { what: "make", makes, cost: Cost::INODE, ..names(Naming::Adds, parent, name) }
}

/// Whether a file that is opened with these flags may be changed.
pub(crate) fn opens_for_writing(flags: i32) -> bool {
    flags & libc::O_ACCMODE != libc::O_RDONLY || flags & libc::O_TRUNC != 0
}

impl Op {
    /// Its facts.
    pub(crate) fn info(&self) -> Info<'_> {
        match self {
            Op::Lookup { parent, .. } => {
                Info { stream: Stream::Requests(Behind::Early), ..reads(parent) }
            }
            Op::Getattr { ino } => Info { check: Check::Nothing, ..reads(ino) },
            Op::Readlink { ino } => reads(ino),
            Op::Read { fh, size, .. } => Info {
                from: Some(*fh),
                check: Check::OpenFile,
                answer_bytes_max: *size as usize,
                shows: true,
                parks: true,
                ..REQUEST
            },
            Op::Fsync { fh, .. } => {
                Info { from: Some(*fh), check: Check::OpenFile, parks: true, ..REQUEST }
            }
            Op::Lseek { fh, .. } => {
                Info { from: Some(*fh), check: Check::OpenFile, shows: true, ..REQUEST }
            }
            Op::Readdir { ino, .. } => Info { answer_bytes_max: LISTING_MAX, ..reads(ino) },
            Op::Fsyncdir { ino, .. } => {
                Info { check: Check::OpenFile, shows: false, parks: true, ..reads(ino) }
            }
            Op::Statfs {} => Info { stream: BEHIND_ALL, shows: true, ..REQUEST },
            Op::Getxattr { ino, .. } | Op::Listxattr { ino } => {
                Info { answer_bytes_max: XATTR_SIZE_MAX, ..reads(ino) }
            }
            Op::Getlk { ino, .. } => Info { inodes: one(ino), ..REQUEST },
            Op::Lock { ino, .. } => {
                Info { stream: BEHIND_ALL, inodes: one(ino), parks: true, ..REQUEST }
            }
            Op::Sync {} => Info { stream: BEHIND_ALL, parks: true, ..REQUEST },
            Op::Stats {} => Info { parks: true, ..REQUEST },
            Op::Lease { inodes } => Info {
                inodes: Inodes::List(&inodes.0),
                answer_bytes_max: inodes.0.len() * ANSWER_MIN,
                shows: true,
                ..REQUEST
            },
            Op::Numbers {} => REQUEST,
            Op::Reserve { .. } => Info { stream: Stream::Requests(Behind::Remaining), ..REQUEST },
            Op::Walk { dirs, .. } => Info {
                stream: BEHIND_ALL,
                inodes: Inodes::Directories(&dirs.0),
                check: Check::Permission,
                answer_bytes_max: WALK_BYTES_MAX,
                shows: true,
                ..REQUEST
            },
            Op::Settled {} => REQUEST,

            Op::Setattr { ino, set, .. } => {
                let (inodes, is_early) = (one(ino), true);
                if set.size.is_some() {
                    let (effect, cost) = (Effect::Contents, Cost::of_write(0));
                    Info { what: "cut off", inodes, effect, cost, is_early, ..METADATA }
                } else {
                    Info { what: "attributes", inodes, is_early, ..METADATA }
                }
            }
            Op::Mknod { parent, name, .. } => makes(Makes::File, parent, name),
            Op::Mkdir { parent, name, .. } => makes(Makes::Directory, parent, name),
            Op::Symlink { parent, name, target } => {
                let cost = Cost { bytes: target_cost(target.len()), ..Cost::INODE };
                Info { cost, ..makes(Makes::Symlink, parent, name) }
            }
            Op::Link { ino, parent, name } => Info {
                what: "link",
                inodes: two(ino, parent),
                cost: Cost::NAME,
                ..names(Naming::Adds, parent, name)
            },
            Op::Unlink { parent, name } => Info {
                what: "remove",
                replay: Replay::AgainOrDone,
                ..names(Naming::Removes, parent, name)
            },
            Op::Rmdir { parent, name } => {
                let naming = Naming::RemovesDirectory;
                Info { what: "remove", replay: Replay::AgainOrDone, ..names(naming, parent, name) }
            }
            Op::Rename { parent, name, new_parent, new_name, flags } => Info {
                what: "rename",
                inodes: two(parent, new_parent),
                names: [Some((*parent, name)), Some((*new_parent, new_name))],
                naming: match (flags.exchange, flags.whiteout) {
                    (true, _) => Naming::Exchanges,
                    (false, true) => Naming::MovesLeavingWhiteout,
                    (false, false) => Naming::Moves,
                },
                replay: Replay::AgainOrDone,
                is_early: true,
                cost: Cost::NAME,
                ..METADATA
            },
            Op::Open { ino, fh, flags, kill_suidgid } => {
                let cuts_off = flags & libc::O_TRUNC != 0;
                let changes = cuts_off || *kill_suidgid;
                Info {
                    what: if cuts_off { "cut off" } else { "open" },
                    inodes: one(ino),
                    uses: if changes { Use::Written } else { Use::Opened },
                    opens: Some(*fh),
                    effect: if changes { Effect::Contents } else { Effect::Nothing },
                    is_early: true,
                    needs_writable: opens_for_writing(*flags),
                    check: Check::Permission,
                    cost: if cuts_off { Cost::of_write(0) } else { Cost::NOTHING },
                    restores: true,
                    ..SESSION
                }
            }
            Op::Create { parent, name, fh, .. } => {
                let naming = Naming::AddsOrOpens;
                Info { naming, opens: Some(*fh), ..makes(Makes::File, parent, name) }
            }
            // The directory stays as it is: what is made takes its group, and has no name in it.
            Op::Tmpfile { parent, fh, .. } => Info {
                inodes: one(parent),
                uses: Use::Read,
                opens: Some(*fh),
                makes: Makes::Nameless,
                replay: Replay::Never,
                cost: Cost::INODE,
                ..METADATA
            },
            Op::Write { fh, data, append, .. } => Info {
                to: Some(*fh),
                replay: if *append { Replay::Never } else { Replay::Again },
                is_early: true,
                cost: Cost::of_write(data.len()),
                data_bytes: data.len(),
                ..CONTENTS
            },
            Op::Release { .. } => {
                Info { restores: true, is_always_made: true, is_awaited: false, ..SESSION }
            }
            Op::Fallocate { fh, .. } => Info { to: Some(*fh), ..CONTENTS },
            Op::Copy { fh_in, fh_out, .. } => {
                Info { from: Some(*fh_in), to: Some(*fh_out), replay: Replay::Never, ..CONTENTS }
            }
            Op::Setxattr { ino, .. } | Op::Removexattr { ino, .. } => Info {
                what: "extended attributes",
                inodes: one(ino),
                replay: Replay::AgainOrDone,
                ..METADATA
            },
            Op::Unlock { ino, .. } => Info { inodes: one(ino), is_always_made: true, ..SESSION },
            Op::Forget { .. } => {
                Info { restores: true, is_always_made: true, is_awaited: false, ..SESSION }
            }
            Op::Claim { .. } | Op::Numbered { .. } | Op::Replayed {} => {
                Info { restores: true, ..SESSION }
            }
            Op::Nothing {} => SESSION,
            Op::Reclaim { ino, .. } => {
                Info { inodes: one(ino), restores: true, is_always_made: true, ..SESSION }
            }
            Op::Remaining { .. } => Info { is_awaited: false, ..SESSION },
        }
    }

    /// Whether it belongs to the ordered stream.
    pub fn is_ordered(&self) -> bool {
        self.info().stream == Stream::Changes
    }
}

impl<'op> Info<'op> {
    /// The inodes that it names, whatever it does with them.
    pub(crate) fn inodes(&self) -> impl Iterator<Item = Ino> + use<'op> {
        let (few, list, dirs): ([Option<Ino>; 2], &[Ino], &[DirName]) = match self.inodes {
            Inodes::Few(few) => (few, &[], &[]),
            Inodes::List(list) => ([None, None], list, &[]),
            Inodes::Directories(dirs) => ([None, None], &[], dirs),
        };
        few.into_iter()
            .flatten()
            .chain(list.iter().copied())
            .chain(dirs.iter().map(|dir| dir.parent))
    }

    /// The same, if it does so much with them, or more.
    pub(crate) fn inodes_with(&self, least: Use) -> impl Iterator<Item = Ino> + use<'op> {
        let inodes = if self.uses >= least { self.inodes } else { Inodes::Few([None, None]) };
        Info { inodes, ..*self }.inodes()
    }

    /// The open files that it uses: the one that it reads comes first.
    pub(crate) fn handles(&self) -> impl Iterator<Item = u64> + use<> {
        self.from.into_iter().chain(self.to)
    }

    /// The names that a change looks up, each with its directory.
    pub(crate) fn names(&self) -> impl Iterator<Item = (Ino, &'op [u8])> + use<'op> {
        self.names.into_iter().flatten()
    }

    /// The directories of these names.
    pub(crate) fn directories(&self) -> impl Iterator<Item = Ino> + use<'op> {
        self.names().map(|(dir, _)| dir)
    }
}

#[cfg(test)]
mod tests;
