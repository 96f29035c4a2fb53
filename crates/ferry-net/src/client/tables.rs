//! What a client remembers of its session, so that it can have another one: inodes that its kernel
//! knows, open files, locks.

use crate::rt::Mutex;
use crate::rt::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;

use ferry_fs::{Errno, ErrorCursor, ErrorSequence, FileLock, Ino, ROOT};

use super::cache::rename_all;
use super::change::Pending;
use super::notes::{NotedDir, NotedFile, NotedNode, Notes, TableNotes};
use crate::lock_range::set_range;
use crate::message::{Effect, Forgotten, Known, Makes, Name, OPEN_MAX, Op, WINDOW_OPS};

/// Inodes that walks have brought, and that the kernel has not asked for, at most.
const AHEAD_MAX: usize = 1 << 14;

/// An inode that the kernel knows.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Node {
    /// The kernel's count.
    pub(super) lookups: u64,
    /// The newest answer that named it.
    pub(super) stamp: u64,
    /// `None`: the server has not named it yet.
    pub(super) capability: Option<u128>,
    /// Early-acknowledged changes whose answers will name it.
    pub(super) expected: u32,
    /// The kernel has read pages of it: somebody has mapped it.
    pub(super) is_mapped: bool,
}

/// How far a request for a lock is. It changes only while the tables are locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asking {
    /// It was not sent.
    New,
    Sent,
    /// It was sent, and its program has stopped waiting.
    Interrupted,
    /// The server has made it or will not, or it was interrupted before it was sent.
    Over,
}

/// The stage of a request, which what waits for its answer shares.
#[derive(Clone)]
pub(super) struct LockStage(Arc<Mutex<Asking>>);

impl LockStage {
    pub(super) fn new() -> Self {
        Self(Arc::new(Mutex::new(Asking::New)))
    }

    fn get(&self) -> Asking {
        *self.0.lock()
    }

    fn set(&self, to: Asking) {
        *self.0.lock() = to;
    }
}

/// A request for a lock that is not sent yet.
pub(super) struct DeferredLock {
    pub(super) parked: Pending,
    pub(super) stage: LockStage,
}

impl DeferredLock {
    /// `None`: it was interrupted.
    fn send(self) -> Option<Pending> {
        let is_new = self.stage.get() == Asking::New;
        is_new.then(|| {
            self.stage.set(Asking::Sent);
            self.parked
        })
    }
}

/// What the server did for some requests of an owner is not known.
#[derive(Default)]
struct UnsettledOwner {
    interrupted: usize,
    /// What it asks for meanwhile.
    deferred: Vec<DeferredLock>,
}

/// An open file.
#[derive(Debug)]
pub(super) struct Handle {
    pub(super) ino: Ino,
    pub(super) flags: i32,
    /// A lock on it, or the file itself, did not outlive a session: everything but closing fails.
    pub(super) lost: bool,
    /// Which losses of the file's changes it was told of by fsync or close.
    pub(super) told: ErrorCursor,
    /// Which of them its newest close reported.
    pub(super) closed: ErrorCursor,
    /// Those that came before it was opened: what it writes does not build on what was lost.
    pub(super) opened: ErrorCursor,
}

/// An open directory.
#[derive(Debug, Default)]
pub(super) struct Dir {
    pub(super) ino: Ino,
    /// Which losses of the directory's changes it was told of.
    pub(super) told: ErrorCursor,
    /// Where `names` begin.
    pub(super) cookie: u64,
    /// Names that the server has sent and the kernel has not had yet.
    pub(super) names: VecDeque<Name>,
    /// The listing began with all names, as they were then.
    pub(super) whole: Option<Arc<[Name]>>,
    /// The process before was killed while it gave the kernel names out of one list, of so many.
    pub(super) left: Option<u64>,
}

/// The owner of locks on a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Owner {
    ino: Ino,
    owner: u64,
    flock: bool,
}

impl Owner {
    pub(super) fn of(ino: Ino, lock: &FileLock) -> Self {
        Self { ino, owner: lock.owner, flock: lock.flock }
    }
}

/// All of it.
#[derive(Default)]
pub(super) struct Tables {
    pub(super) nodes: HashMap<Ino, Node>,
    /// A name of each of them, as far as one is known, for the log: the newest that the kernel has
    /// used.
    pub(super) names: HashMap<Ino, (Ino, Vec<u8>)>,
    pub(super) handles: HashMap<u64, Handle>,
    pub(super) dirs: HashMap<u64, Dir>,
    /// By the open file through which each was taken. No lock outlives that: a process that closes
    /// it, or ends, gives its `fcntl` locks back first. A lock of an open file description is given
    /// back by nothing else.
    pub(super) locks: HashMap<Ino, BTreeMap<u64, Vec<FileLock>>>,
    /// Inodes that a walk has brought: the first lookup of each is counted, though the kernel has
    /// not made it yet. Oldest first.
    ahead: HashSet<Ino>,
    aged: VecDeque<Ino>,
    /// Owners of whom it is not known what the server did for them.
    unsettled: HashMap<Owner, UnsettledOwner>,
    /// Losses of changes, by inode: told to each descriptor.
    pub(super) losses: HashMap<Ino, ErrorSequence>,
    /// All of them: reported to a program that syncs the mount.
    pub(super) any_loss: ErrorSequence,
    pub(super) told_of_any: ErrorCursor,
    /// Files of which something is lost, and which nobody has tried to rename since.
    pub(super) broken: HashSet<Ino>,
    pub(super) next_fh: u64,
    /// Where all this is noted for the next process, if one may go on.
    notes: Option<TableNotes>,
}

impl Tables {
    /// From now on all is noted there.
    pub(super) fn note_in(&mut self, notes: &Arc<Notes>) {
        self.notes = Some(TableNotes::new(Arc::clone(notes)));
        notes.begin_numbers(self.next_fh);
        let inos: Vec<Ino> = self.nodes.keys().copied().collect();
        inos.into_iter().for_each(|ino| self.note_node(ino));
        let files: Vec<u64> = self.handles.keys().copied().collect();
        files.into_iter().for_each(|fh| self.note_file(fh));
        let locked: Vec<Ino> = self.locks.keys().copied().collect();
        locked.into_iter().for_each(|ino| self.note_locks(ino));
        let whole = self.dirs.iter().filter_map(|(fh, dir)| {
            let names = dir.left.or_else(|| dir.whole.as_ref().map(|all| all.len() as u64))?;
            Some(NotedDir { fh: *fh, ino: dir.ino, names })
        });
        let whole: Vec<NotedDir> = whole.collect();
        whole.iter().for_each(|dir| self.note_dir(dir));
        self.note_any_loss();
    }

    fn noted_node(&self, ino: Ino, node: &Node) -> NotedNode {
        let Node { lookups, stamp, capability, is_mapped, .. } = *node;
        let (is_ahead, has_lost) = (self.ahead.contains(&ino), self.losses.contains_key(&ino));
        NotedNode { ino, lookups, stamp, capability, is_mapped, is_ahead, has_lost }
    }

    /// What is known of an inode has changed.
    pub(super) fn note_node(&mut self, ino: Ino) {
        if self.notes.is_none() {
            return;
        }
        let node = self.nodes.get(&ino).map(|node| self.noted_node(ino, node));
        if let (Some(notes), Some(node)) = (&mut self.notes, node) {
            notes.node(&node);
        }
    }

    /// The server was told that the kernel has forgotten these, or never knew that it did.
    pub(super) fn told_forgotten(&mut self, inos: impl Iterator<Item = Ino>) {
        let Some(notes) = &mut self.notes else { return };
        inos.filter(|ino| !self.nodes.contains_key(ino)).for_each(|ino| notes.remove_node(ino));
    }

    /// The server is to be told of these.
    pub(super) fn note_forgotten(&mut self, node: &NotedNode) {
        if let Some(notes) = &mut self.notes {
            notes.node(&NotedNode { lookups: 0, ..*node });
        }
    }

    fn note_file(&mut self, fh: u64) {
        if let (Some(notes), Some(handle)) = (&mut self.notes, self.handles.get(&fh)) {
            let Handle { ino, flags, lost, .. } = *handle;
            notes.file(&NotedFile { fh, ino, flags, lost });
        }
    }

    /// The kernel is given names out of one list.
    pub(super) fn note_dir(&mut self, dir: &NotedDir) {
        if let Some(notes) = &mut self.notes {
            notes.dir(dir);
        }
    }

    /// The server was told that an open file or directory is closed, or its number means nothing.
    pub(super) fn told_closed(&mut self, fh: u64) {
        if let Some(notes) = &mut self.notes {
            notes.remove_file(fh);
        }
    }

    /// The locks of a file are these, and the server was told.
    pub(super) fn note_locks(&mut self, ino: Ino) {
        let Some(notes) = &mut self.notes else { return };
        let through = self.locks.get(&ino).into_iter().flatten();
        notes.locks(ino, through.flat_map(|(fh, locks)| locks.iter().map(|lock| (*fh, *lock))));
    }

    fn note_any_loss(&self) {
        if let Some(notes) = &self.notes {
            notes.any_loss(self.any_loss.untold(&self.told_of_any).is_some());
        }
    }

    /// An early-acknowledged change is about to be lost: a process that is killed now has not told
    /// anybody.
    pub(super) fn note_loss(&mut self, touched: &[Ino]) {
        let lost: Vec<NotedNode> = touched
            .iter()
            .filter_map(|ino| Some(self.noted_node(*ino, self.nodes.get(ino)?)))
            .collect();
        if let Some(notes) = &mut self.notes {
            lost.iter().for_each(|node| notes.node(&NotedNode { has_lost: true, ..*node }));
            notes.any_loss(true);
        }
    }

    /// A new number for an open file or directory.
    pub(super) fn fresh_fh(&mut self) -> u64 {
        self.next_fh += 1;
        self.next_fh
    }

    /// The same for a file that a program opens, if there is room for one more at the server.
    pub(super) fn open_fh(&mut self) -> Result<u64, Errno> {
        // Those that are being opened are not in the table yet.
        if self.handles.len() + WINDOW_OPS >= OPEN_MAX {
            Err(Errno(libc::ENFILE))
        } else {
            Ok(self.fresh_fh())
        }
    }

    /// An answer has named an inode, and the kernel is told. One without a stamp is of an
    /// early-acknowledged change, and counted before.
    pub(super) fn learn(&mut self, known: &Known) {
        if known.attr.ino == ROOT || known.stamp == 0 {
            return;
        }
        let counted = u64::from(self.ahead.remove(&known.attr.ino));
        let node = self.nodes.entry(known.attr.ino).or_default();
        node.lookups += 1 - counted;
        node.capability = Some(known.capability);
        node.stamp = node.stamp.max(known.stamp);
        self.note_node(known.attr.ino);
    }

    /// A walk has named an inode; `kept`: it is cached, so the kernel may hear of it without
    /// another answer. Else it may have to be forgotten at once.
    pub(super) fn learn_ahead(&mut self, known: &Known, deferred: bool) -> Option<Forgotten> {
        let ino = known.attr.ino;
        if ino == ROOT {
            return None;
        }
        if !deferred && !self.nodes.contains_key(&ino) {
            return Some(Forgotten { ino, stamp: known.stamp });
        }
        let node = self.nodes.entry(ino).or_insert_with(|| {
            self.ahead.insert(ino);
            self.aged.push_back(ino);
            Node { lookups: 1, ..Node::default() }
        });
        node.capability = Some(known.capability);
        node.stamp = node.stamp.max(known.stamp);
        self.note_node(ino);
        None
    }

    /// Those that nobody has asked for, and of which there are too many.
    pub(super) fn too_far_ahead(&mut self) -> Vec<Ino> {
        let surplus = self.aged.len().saturating_sub(AHEAD_MAX);
        let aged: Vec<Ino> = self.aged.drain(..surplus).collect();
        aged.into_iter().filter(|ino| self.ahead.remove(ino)).collect()
    }

    /// Those among these (`None`: all) that nobody has asked for.
    pub(super) fn ahead(&mut self, among: Option<&[Ino]>) -> Vec<Ino> {
        match among {
            Some(inos) if self.ahead.is_empty() => inos[..0].to_vec(),
            Some(inos) => inos.iter().copied().filter(|ino| self.ahead.remove(ino)).collect(),
            None => {
                self.aged.clear();
                self.ahead.drain().collect()
            }
        }
    }

    /// The kernel knows an inode by this name. Gives the one by which it knew it before, if that
    /// was another.
    pub(super) fn name(&mut self, ino: Ino, dir: Ino, name: &[u8]) -> Option<(Ino, Vec<u8>)> {
        let is_new = self.names.get(&ino).is_none_or(|(d, n)| *d != dir || n != name);
        (is_new && self.nodes.contains_key(&ino))
            .then(|| self.names.insert(ino, (dir, name.to_vec())))?
    }

    /// Whether the kernel knows anything by this name.
    pub(super) fn has_name(&self, name: &(Ino, Vec<u8>)) -> bool {
        self.names.values().any(|other| other == name)
    }

    /// The kernel has renamed what it knew by the first name, whatever that is.
    pub(super) fn rename(&mut self, from: (Ino, &[u8]), to: (Ino, &[u8]), exchange: bool) {
        rename_all(self.names.values_mut().map(|(dir, name)| (dir, name)), from, to, exchange);
    }

    /// An early-acknowledged change names an inode to the kernel; its answer is yet to come.
    pub(super) fn expect(&mut self, ino: Ino) {
        let node = self.nodes.entry(ino).or_default();
        node.lookups += 1;
        node.expected += 1;
        self.note_node(ino);
    }

    /// The answer has come, or never will (`None`). Gives what was known of the inode if the kernel
    /// knows it no more.
    pub(super) fn confirm(&mut self, ino: Ino, known: Option<&Known>) -> Option<Node> {
        let node = self.nodes.get_mut(&ino)?;
        node.expected = node.expected.saturating_sub(1);
        if let Some(known) = known {
            node.capability = Some(known.capability);
            node.stamp = node.stamp.max(known.stamp);
        }
        self.forget(ino, 0)
    }

    /// The kernel is told of an inode again, from the cache; `false`: it does not know it any
    /// more, and the server must say it.
    pub(super) fn relearn(&mut self, ino: Ino) -> bool {
        let Some(node) = self.nodes.get_mut(&ino) else { return false };
        node.lookups += u64::from(!self.ahead.remove(&ino));
        self.note_node(ino);
        true
    }

    /// The kernel takes lookups back; gives what was known of the inode if it knows it no more.
    pub(super) fn forget(&mut self, ino: Ino, count: u64) -> Option<Node> {
        let node = self.nodes.get_mut(&ino)?;
        node.lookups = node.lookups.saturating_sub(count);
        if node.lookups > 0 || node.expected > 0 {
            self.note_node(ino);
            return None;
        }
        self.names.remove(&ino);
        self.broken.remove(&ino);
        let node = self.nodes.remove(&ino)?;
        let noted = self.noted_node(ino, &node);
        if let Some(notes) = &mut self.notes {
            notes.forgotten(&noted);
        }
        Some(node)
    }

    /// A new session has named nothing yet.
    pub(super) fn begin_stamps(&mut self) {
        self.nodes.values_mut().for_each(|node| node.stamp = 0);
        if self.notes.is_some() {
            let inos: Vec<Ino> = self.nodes.keys().copied().collect();
            inos.into_iter().for_each(|ino| self.note_node(ino));
        }
    }

    /// An inode was replayed in a new session; whether the kernel knows it.
    pub(super) fn known_again(&mut self, ino: Ino, known: &Known) -> bool {
        let node = self.nodes.get_mut(&ino);
        let is_known = node
            .map(|node| (node.capability, node.stamp) = (Some(known.capability), known.stamp))
            .is_some();
        self.note_node(ino);
        is_known
    }

    /// An inode that was created without an answer exists, with this capability and stamp, or does
    /// not. Gives what was known of it if the kernel does not know it any more.
    pub(super) fn found(&mut self, ino: Ino, named: Option<(u128, u64)>) -> Option<Node> {
        let node = self.nodes.get_mut(&ino)?;
        node.expected = node.expected.saturating_sub(1);
        if let Some((capability, stamp)) = named {
            (node.capability, node.stamp) = (Some(capability), node.stamp.max(stamp));
        }
        self.forget(ino, 0)
    }

    /// An open file has this number from now on.
    pub(super) fn add_handle(&mut self, fh: u64, ino: Ino, flags: i32) {
        let losses = self.losses.get(&ino);
        let told = losses.map(ErrorSequence::sample).unwrap_or_default();
        let opened = losses.map(ErrorSequence::end).unwrap_or_default();
        self.handles.insert(
            fh,
            Handle { ino, flags, lost: false, told, closed: ErrorCursor::default(), opened },
        );
        self.note_file(fh);
    }

    /// The file is closed. Gives the locks that end with it.
    pub(super) fn remove_handle(&mut self, fh: u64) -> Option<(Ino, Vec<FileLock>)> {
        let Handle { ino, closed, .. } = self.handles.remove(&fh)?;
        if let Some(losses) = self.losses.get(&ino) {
            losses.released(&closed);
        }
        self.forget_losses(ino);
        let through = self.locks.get_mut(&ino)?;
        let locks = through.remove(&fh)?;
        if through.is_empty() {
            self.locks.remove(&ino);
        }
        Some((ino, locks))
    }

    /// An open directory has this number from now on.
    pub(super) fn add_dir(&mut self, fh: u64, ino: Ino) {
        let told = self.losses.get(&ino).map(ErrorSequence::sample).unwrap_or_default();
        self.dirs.insert(fh, Dir { ino, told, ..Dir::default() });
    }

    /// The directory is closed.
    pub(super) fn remove_dir(&mut self, fh: u64) {
        if let Some(dir) = self.dirs.remove(&fh) {
            self.forget_losses(dir.ino);
        }
        self.told_closed(fh);
    }

    /// Where a listing goes on; `None`: it has ended. If a process was killed that gave the
    /// kernel names out of one list, nobody knows that list any more: it begins anew.
    pub(super) fn listing_goes_on(&mut self, fh: u64, cookie: u64) -> Option<u64> {
        let Some(names) = self.dirs.get_mut(&fh).and_then(|dir| dir.left.take()) else {
            return Some(cookie);
        };
        if cookie != 0 && cookie >= names {
            self.dirs.entry(fh).and_modify(|dir| dir.left = Some(names));
            return None;
        }
        self.told_closed(fh);
        Some(0)
    }

    /// What was told, and nobody has open any more, need not be remembered.
    fn forget_losses(&mut self, ino: Ino) {
        let is_open = |tables: &Self| {
            tables.handles.values().any(|handle| handle.ino == ino)
                || tables.dirs.values().any(|dir| dir.ino == ino)
        };
        if self.losses.get(&ino).is_some_and(ErrorSequence::is_told) && !is_open(self) {
            self.losses.remove(&ino);
            self.note_node(ino);
        }
    }

    /// Changes of these are lost.
    pub(super) fn damage(&mut self, inos: impl IntoIterator<Item = Ino>) {
        for ino in inos {
            self.losses.entry(ino).or_default().add(Errno(libc::EIO));
            self.any_loss.add(Errno(libc::EIO));
            self.note_node(ino);
        }
        self.note_any_loss();
    }

    /// A process that was killed has lost changes of these, and not everybody was told.
    pub(super) fn was_lost(&mut self, inos: Vec<Ino>, any_loss: bool) {
        for ino in inos {
            self.losses.entry(ino).or_default().add(Errno(libc::EIO));
        }
        if any_loss {
            self.any_loss.add(Errno(libc::EIO));
        }
    }

    /// Fails if changes of the file may have been lost of which this descriptor was not told; that
    /// is told now.
    pub(super) fn tell_of_loss(&self, fh: u64) -> Result<(), Errno> {
        let told = self
            .handles
            .get(&fh)
            .and_then(|handle| self.losses.get(&handle.ino)?.tell(&handle.told));
        told.map_or(Ok(()), Err)
    }

    /// The same as the descriptor is closed, perhaps a copy of it: fsync and the next close tell it
    /// again.
    pub(super) fn tell_of_loss_at_close(&self, fh: u64) -> Result<(), Errno> {
        let told = self.handles.get(&fh).and_then(|handle| {
            self.losses.get(&handle.ino)?.tell_at_close(&handle.told, &handle.closed)
        });
        told.map_or(Ok(()), Err)
    }

    /// The same of a directory.
    pub(super) fn tell_of_loss_in(&self, ino: Ino, fh: u64) -> Result<(), Errno> {
        let Some(losses) = self.losses.get(&ino) else { return Ok(()) };
        let told = match self.dirs.get(&fh) {
            Some(dir) => losses.tell(&dir.told),
            None => losses.tell(&losses.sample()),
        };
        told.map_or(Ok(()), Err)
    }

    /// The same of any changes at all, for a program that syncs the mount.
    pub(super) fn tell_of_any_loss(&self) -> Result<(), Errno> {
        let told = self.any_loss.tell(&self.told_of_any).map_or(Ok(()), Err);
        self.note_any_loss();
        told
    }

    /// What a descriptor was opened with, if it can be used.
    pub(super) fn usable(&self, fh: u64) -> Result<i32, Errno> {
        match self.handles.get(&fh) {
            Some(handle) if handle.lost => Err(Errno(libc::EIO)),
            Some(handle) => Ok(handle.flags),
            None => Err(Errno(libc::EBADF)),
        }
    }

    /// Whether it may be written to: not before its program was told of what was lost while it had
    /// the file open.
    pub(super) fn writable(&self, fh: u64) -> Result<(), Errno> {
        self.usable(fh)?;
        let untold = |handle: &Handle| {
            let losses = self.losses.get(&handle.ino)?;
            losses.untold(&handle.told).and(losses.untold(&handle.opened))
        };
        self.handles.get(&fh).and_then(untold).map_or(Ok(()), Err)
    }

    /// The inodes with a handle that writes, each once.
    pub(super) fn open_for_writing(&self) -> Vec<Ino> {
        let writes = |handle: &&Handle| handle.flags & libc::O_ACCMODE != libc::O_RDONLY;
        let open: HashSet<Ino> = self.handles.values().filter(writes).map(|h| h.ino).collect();
        open.into_iter().collect()
    }

    /// Changes are lost, of nobody knows what.
    pub(super) fn damage_open_files(&mut self) {
        let open: HashSet<Ino> = self.handles.values().map(|handle| handle.ino).collect();
        self.damage(open);
        self.any_loss.add(Errno(libc::EIO));
        self.note_any_loss();
    }

    /// An early-acknowledged change is not applied.
    pub(super) fn lost(&mut self, op: &Op, touched: &[Ino]) {
        let info = op.info();
        if let Some(handle) = info.opens.and_then(|fh| self.handles.get_mut(&fh)) {
            handle.lost = true;
        }
        info.opens.into_iter().for_each(|fh| self.note_file(fh));
        if info.effect == Effect::Nothing {
            return;
        }
        self.damage(touched.iter().copied());
        self.breaks(op, touched);
    }

    /// An early-acknowledged change is lost: the files that it has changed, or made, get no other
    /// name before a program was told. Directories do.
    fn breaks(&mut self, op: &Op, touched: &[Ino]) {
        let info = op.info();
        let dirs: Vec<Ino> = info.directories().collect();
        if !dirs.is_empty() && info.makes != Makes::File {
            return;
        }
        self.broken.extend(touched.iter().filter(|ino| !dirs.contains(ino)));
    }

    /// Whether a change would be made on top of what is lost: through a file that was open then, by
    /// a program that was not told, or as a new name of it. The new name is refused once: a program
    /// that tries again knows.
    pub(super) fn refuses(&mut self, op: &Op, files: &[(u64, Ino)]) -> bool {
        let named = if let Op::Setattr { fh, .. } = op { *fh } else { None };
        let is_always_made = op.info().is_always_made;
        if !is_always_made
            && files.iter().map(|(fh, _)| *fh).chain(named).any(|fh| self.writable(fh).is_err())
        {
            return true;
        }
        let ino = match op {
            _ if self.broken.is_empty() => None,
            Op::Link { ino, .. } => Some(*ino),
            Op::Rename { parent, name, .. } => {
                let is_named = |ino: &&Ino| {
                    self.names.get(ino).is_some_and(|(dir, known)| dir == parent && known == name)
                };
                self.broken.iter().find(is_named).copied()
            }
            _ => None,
        };
        ino.is_some_and(|ino| self.broken.remove(&ino))
    }

    /// A lock was taken through an open file. All that its owner has of the file goes with that one
    /// from now on: an owner that comes through several is a process, and closing any of them ends
    /// all. So there are no more locks here than at the server, where those that touch become one.
    /// If the open file is closed, nothing would release the lock, so it is released.
    pub(super) fn set_lock(&mut self, ino: Ino, fh: u64, lock: &FileLock) {
        if !self.handles.contains_key(&fh) {
            return self.remove_lock(ino, lock);
        }
        let through = self.locks.entry(ino).or_default();
        let mut own = Vec::new();
        through.retain(|_, locks| {
            own.extend(locks.extract_if(.., |l| l.owner == lock.owner && l.flock == lock.flock));
            !locks.is_empty()
        });
        set_range(&mut own, lock);
        through.entry(fh).or_default().append(&mut own);
        self.note_locks(ino);
    }

    /// A lock was returned, through whatever open file it was taken.
    pub(super) fn remove_lock(&mut self, ino: Ino, lock: &FileLock) {
        let unlock = FileLock { kind: libc::F_UNLCK, ..*lock };
        let Some(through) = self.locks.get_mut(&ino) else { return };
        through.retain(|_, locks| {
            set_range(locks, &unlock);
            !locks.is_empty()
        });
        if through.is_empty() {
            self.locks.remove(&ino);
        }
    }

    /// All locks on a file.
    fn locks_on(&self, ino: Ino) -> impl Iterator<Item = &FileLock> {
        self.locks.get(&ino).into_iter().flat_map(BTreeMap::values).flatten()
    }

    /// All locks.
    pub(super) fn all_locks(&self) -> impl Iterator<Item = (Ino, FileLock)> {
        self.locks.keys().flat_map(|ino| self.locks_on(*ino).map(|lock| (*ino, *lock)))
    }

    /// What the owner of `lock` has of its range.
    pub(super) fn locks_within(&self, ino: Ino, lock: &FileLock) -> Vec<FileLock> {
        let own = self.locks_on(ino).filter(|l| l.owner == lock.owner && l.flock == lock.flock);
        let within = own.filter(|l| l.start <= lock.end && lock.start <= l.end);
        within
            .map(|l| FileLock { start: l.start.max(lock.start), end: l.end.min(lock.end), ..*l })
            .collect()
    }

    /// The same, with the ranges that it does not have as locks of kind `F_UNLCK`.
    pub(super) fn ranges(&self, ino: Ino, lock: &FileLock) -> Vec<FileLock> {
        let mut ranges = self.locks_within(ino, lock);
        let unlock = FileLock { kind: libc::F_UNLCK, ..*lock };
        let mut gaps = vec![unlock];
        for range in &ranges {
            gaps = gaps
                .into_iter()
                .flat_map(|gap| {
                    let left = (gap.start < range.start)
                        .then(|| FileLock { end: gap.end.min(range.start - 1), ..gap });
                    let right = (range.end < gap.end)
                        .then(|| FileLock { start: gap.start.max(range.end + 1), ..gap });
                    left.into_iter().chain(right)
                })
                .collect();
        }
        ranges.extend(gaps);
        ranges
    }

    /// A request for a lock is interrupted. If it was sent, its owner's next requests wait here.
    pub(super) fn interrupt_lock(&mut self, owner: Owner, stage: &LockStage) {
        match stage.get() {
            Asking::New => stage.set(Asking::Over),
            Asking::Sent => {
                stage.set(Asking::Interrupted);
                self.unsettled.entry(owner).or_default().interrupted += 1;
            }
            Asking::Interrupted | Asking::Over => {}
        }
    }

    /// A request is to be sent: now, if it is given back. One that was interrupted never is.
    pub(super) fn defer(&mut self, owner: Owner, deferred: DeferredLock) -> Option<Pending> {
        match self.unsettled.get_mut(&owner) {
            Some(unsettled) => {
                unsettled.deferred.push(deferred);
                None
            }
            None => deferred.send(),
        }
    }

    /// The server has made a request, or will not. If it was the last one of its owner that is
    /// interrupted, this gives the requests that waited: they are to be sent.
    pub(super) fn settle(&mut self, owner: Owner, stage: &LockStage) -> Vec<Pending> {
        let was_interrupted = stage.get() == Asking::Interrupted;
        stage.set(Asking::Over);
        let Some(unsettled) = self.unsettled.get_mut(&owner).filter(|_| was_interrupted) else {
            return Vec::new();
        };
        unsettled.interrupted -= 1;
        if unsettled.interrupted > 0 {
            return Vec::new();
        }
        let deferred = self.unsettled.remove(&owner).unwrap_or_default().deferred;
        deferred.into_iter().filter_map(DeferredLock::send).collect()
    }

    /// Whether an owner has `fcntl` locks on a file.
    pub(super) fn has_locks(&self, ino: Ino, owner: u64) -> bool {
        self.locks_on(ino).any(|l| l.owner == owner && !l.flock)
    }

    /// Open files of this inode can be used no more. Gives the locks on it, which are lost, too.
    pub(super) fn lose(&mut self, ino: Ino) -> Vec<FileLock> {
        let files: Vec<u64> =
            self.handles.iter().filter(|(_, h)| h.ino == ino).map(|(fh, _)| *fh).collect();
        for fh in files {
            self.handles.entry(fh).and_modify(|handle| handle.lost = true);
            self.note_file(fh);
        }
        let lost = self.locks.remove(&ino).unwrap_or_default().into_values().flatten().collect();
        self.note_locks(ino);
        lost
    }

    /// The session has ended at a server that goes on: others may have had its locks since. Gives
    /// the files that had any.
    pub(super) fn lose_locked(&mut self) -> Vec<Ino> {
        let locked: Vec<Ino> = self.locks.keys().copied().collect();
        for ino in &locked {
            self.lose(*ino);
        }
        locked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_locks_of_one_owner_are_merged() {
        let mut tables = Tables::default();
        [1, 2].iter().for_each(|fh| tables.add_handle(*fh, 5, libc::O_RDWR));
        let byte = |at| FileLock {
            start: at,
            end: at,
            kind: libc::F_WRLCK,
            owner: 7,
            ..FileLock::default()
        };
        for at in 0..100 {
            tables.set_lock(5, 1 + at % 2, &byte(at));
        }
        assert_eq!(
            tables.all_locks().collect::<Vec<_>>(),
            [(5, FileLock { start: 0, ..byte(99) })]
        );
        tables.set_lock(5, 1, &FileLock { owner: 8, ..byte(200) });
        assert_eq!(tables.remove_handle(1), Some((5, vec![FileLock { owner: 8, ..byte(200) }])));
        assert_eq!(tables.remove_handle(2).map(|(_, locks)| locks.len()), Some(1));
        assert_eq!(tables.all_locks().count(), 0);
    }
}
