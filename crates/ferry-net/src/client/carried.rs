//! What a process that goes on with a mount needs of the one before: the session with its numbers,
//! what the kernel knows, and what programs have open and locked.
//!
//! * CARRIED-1: the process before has waited until nothing of its session was unanswered and all
//!   that it had answered was durable. So no change, and no answer, is carried.
//! * CARRIED-2: it leaves the session without a goodbye. The next process resumes it, as after a
//!   lost connection: leases end with its greeting, locks stay.
//! * CARRIED-3: what the kernel may have cached is carried, and forgotten before that greeting.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::rt::collections::{BTreeMap, HashMap};
use ferry_fs::{ErrorCursor, ErrorSequence, FileLock, Ino, ToForget};

use super::tables::{Dir, Handle, Node, Tables};
use crate::codec::{Input, List, Malformed, Wire, decode, wire_fields};
use crate::message::Name;

/// What the encoded form begins with; the number is that of the form.
const MAGIC: u64 = u64::from_le_bytes(*b"ferrygr1");

/// What is carried from one process to the next.
#[derive(Debug, Default, PartialEq)]
pub struct Carried {
    pub(super) session: Session,
    pub(super) to_forget: ToForget,
    next_fh: u64,
    nodes: List<CarriedNode>,
    names: List<CarriedName>,
    files: List<CarriedFile>,
    dirs: List<CarriedDir>,
    locks: List<CarriedLock>,
    losses: List<CarriedLoss>,
    broken: List<Ino>,
    any_loss: u64,
    told_of_any: u64,
}

/// A session, and how far its numbers are.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Session {
    pub(super) id: u128,
    /// Of the server that has it.
    pub(super) boot: u128,
    pub(super) read_only: bool,
    /// Changes may be acknowledged early.
    pub(super) early_acks: bool,
    /// Some were lost, once at least.
    pub(super) lossy: bool,
    /// The server has reserved space for the session.
    pub(super) has_reserved: bool,
    /// The newest change.
    pub(super) newest: u64,
    pub(super) epoch: u32,
    /// The number of the next request.
    pub(super) next_request: u64,
}

#[derive(Debug, PartialEq)]
struct CarriedNode {
    ino: Ino,
    lookups: u64,
    stamp: u64,
    capability: Option<u128>,
    is_mapped: bool,
}

#[derive(Debug, PartialEq)]
struct CarriedName {
    ino: Ino,
    dir: Ino,
    name: Vec<u8>,
}

#[derive(Debug, PartialEq)]
struct CarriedFile {
    fh: u64,
    ino: Ino,
    flags: i32,
    lost: bool,
    told: u64,
    closed: u64,
    opened: u64,
}

#[derive(Debug, PartialEq)]
struct CarriedDir {
    fh: u64,
    ino: Ino,
    told: u64,
    cookie: u64,
    names: List<Name>,
    whole: Option<List<Name>>,
}

#[derive(Debug, PartialEq)]
struct CarriedLock {
    ino: Ino,
    fh: u64,
    lock: FileLock,
}

#[derive(Debug, PartialEq)]
struct CarriedLoss {
    ino: Ino,
    errors: u64,
}

wire_fields! {
    Session { id, boot, read_only, early_acks, lossy, has_reserved, newest, epoch, next_request }
    CarriedNode { ino, lookups, stamp, capability, is_mapped }
    CarriedName { ino, dir, name }
    CarriedFile { fh, ino, flags, lost, told, closed, opened }
    CarriedDir { fh, ino, told, cookie, names, whole }
    CarriedLock { ino, fh, lock }
    CarriedLoss { ino, errors }
    Carried {
        session, to_forget, next_fh, nodes, names, files, dirs, locks, losses, broken, any_loss, told_of_any,
    }
}

impl Wire for ToForget {
    fn put(&self, out: &mut Vec<u8>) {
        let named = |names: &[(Ino, Box<[u8]>)]| {
            let names = names.iter().map(|(dir, name)| CarriedName {
                ino: 0,
                dir: *dir,
                name: name.to_vec(),
            });
            List(names.collect())
        };
        List(self.inodes.clone()).put(out);
        named(&self.names).put(out);
        named(&self.removed).put(out);
        List(self.contents.clone()).put(out);
    }

    fn get(input: &mut Input<'_>) -> Result<Self, Malformed> {
        let named = |List(names): List<CarriedName>| {
            names.into_iter().map(|CarriedName { dir, name, .. }| (dir, name.into())).collect()
        };
        let List(inodes) = List::get(input)?;
        let (names, removed) = (named(List::get(input)?), named(List::get(input)?));
        let List(contents) = List::get(input)?;
        Ok(Self { inodes, names, removed, contents })
    }
}

impl Carried {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        MAGIC.put(&mut out);
        self.put(&mut out);
        out
    }

    /// From bytes; `None`: another form, or not whole.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let rest = bytes.strip_prefix(&MAGIC.to_le_bytes())?;
        decode(rest).ok()
    }

    /// How many open files and known inodes it has.
    pub fn counts(&self) -> (usize, usize) {
        (self.files.0.len(), self.nodes.0.len())
    }

    /// Of a session at rest.
    pub(super) fn new(session: Session, to_forget: ToForget, tables: &Tables) -> Self {
        let nodes = tables.nodes.iter().map(|(ino, node)| {
            let Node { lookups, stamp, capability, is_mapped, .. } = *node;
            CarriedNode { ino: *ino, lookups, stamp, capability, is_mapped }
        });
        let names = tables.names.iter().map(|(ino, (dir, name))| CarriedName {
            ino: *ino,
            dir: *dir,
            name: name.clone(),
        });
        let files = tables.handles.iter().map(|(fh, handle)| CarriedFile {
            fh: *fh,
            ino: handle.ino,
            flags: handle.flags,
            lost: handle.lost,
            told: handle.told.value(),
            closed: handle.closed.value(),
            opened: handle.opened.value(),
        });
        let dirs = tables.dirs.iter().map(|(fh, dir)| CarriedDir {
            fh: *fh,
            ino: dir.ino,
            told: dir.told.value(),
            cookie: dir.cookie,
            names: List(dir.names.iter().cloned().collect()),
            whole: dir.whole.as_ref().map(|names| List(names.to_vec())),
        });
        let locks = tables.locks.iter().flat_map(|(ino, through)| {
            let each = through.iter().flat_map(|(fh, locks)| locks.iter().map(|lock| (*fh, *lock)));
            each.map(|(fh, lock)| CarriedLock { ino: *ino, fh, lock })
        });
        let losses = tables.losses.iter();
        let losses = losses.map(|(ino, all)| CarriedLoss { ino: *ino, errors: all.value() });
        Self {
            session,
            to_forget,
            next_fh: tables.next_fh,
            nodes: List(nodes.collect()),
            names: List(names.collect()),
            files: List(files.collect()),
            dirs: List(dirs.collect()),
            locks: List(locks.collect()),
            losses: List(losses.collect()),
            broken: List(tables.broken.iter().copied().collect()),
            any_loss: tables.any_loss.value(),
            told_of_any: tables.told_of_any.value(),
        }
    }

    /// The tables of the process before.
    pub(super) fn tables(&self) -> Tables {
        let mut tables = Tables::default();
        tables.told_of_any = ErrorCursor::at(self.told_of_any);
        tables.broken = self.broken.0.iter().copied().collect();
        tables.next_fh = self.next_fh;
        tables.any_loss.restore(self.any_loss);
        for node in &self.nodes.0 {
            let CarriedNode { ino, lookups, stamp, capability, is_mapped } = *node;
            tables.nodes.insert(ino, Node { lookups, stamp, capability, expected: 0, is_mapped });
        }
        for CarriedName { ino, dir, name } in &self.names.0 {
            tables.names.insert(*ino, (*dir, name.clone()));
        }
        for file in &self.files.0 {
            let CarriedFile { fh, ino, flags, lost, told, closed, opened } = *file;
            let [told, closed, opened] = [told, closed, opened].map(ErrorCursor::at);
            tables.handles.insert(fh, Handle { ino, flags, lost, told, closed, opened });
        }
        for CarriedDir { fh, ino, told, cookie, names, whole } in &self.dirs.0 {
            let dir = Dir {
                ino: *ino,
                told: ErrorCursor::at(*told),
                cookie: *cookie,
                names: VecDeque::from(names.0.clone()),
                whole: whole.as_ref().map(|List(names)| Arc::from(names.as_slice())),
                left: None,
            };
            tables.dirs.insert(*fh, dir);
        }
        for CarriedLock { ino, fh, lock } in &self.locks.0 {
            let through: &mut BTreeMap<u64, Vec<FileLock>> = tables.locks.entry(*ino).or_default();
            through.entry(*fh).or_default().push(*lock);
        }
        let losses: &mut HashMap<Ino, ErrorSequence> = &mut tables.losses;
        for CarriedLoss { ino, errors } in &self.losses.0 {
            losses.entry(*ino).or_default().restore(*errors);
        }
        tables
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferry_fs::Errno;

    #[test]
    fn a_program_that_was_not_told_of_a_loss_is_told_once_by_the_next_process() {
        let mut tables = Tables::default();
        for (fh, ino) in [(1, 5), (2, 5), (3, 6)] {
            tables.add_handle(fh, ino, libc::O_RDWR);
        }
        tables.add_dir(4, 7);
        tables.damage([5, 7]);
        assert_eq!(tables.tell_of_loss(1), Err(Errno(libc::EIO)));
        let carried = Carried::new(Session::default(), ToForget::default(), &tables);
        let next = Carried::decode(&carried.encode()).expect("it is whole").tables();
        assert_eq!(next.tell_of_loss(1), Ok(()), "it was told before");
        assert_eq!(next.tell_of_loss(2), Err(Errno(libc::EIO)));
        assert_eq!(next.tell_of_loss(2), Ok(()));
        assert_eq!(next.tell_of_loss(3), Ok(()));
        assert_eq!(next.tell_of_loss_in(7, 4), Err(Errno(libc::EIO)));
        assert_eq!(next.tell_of_any_loss(), Err(Errno(libc::EIO)));
    }

    #[test]
    fn what_a_kernel_is_to_forget_is_carried() {
        let name = |text: &str| (7, Box::from(text.as_bytes()));
        let to_forget = ToForget {
            inodes: vec![1, 2],
            names: vec![name("a"), name("b")],
            removed: vec![name("c")],
            contents: vec![3],
        };
        let carried = Carried::new(Session::default(), to_forget, &Tables::default());
        assert_eq!(Carried::decode(&carried.encode()), Some(carried));
    }
}
