//! What a client remembers of its session, so that it can have another one: inodes that its kernel knows, open files, locks.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use ferry_fs::{FileLock, Ino, ROOT};

use super::Parked;
use crate::message::{Forgotten, Known, Name, Op};
use crate::server::set_range;

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
    pub(super) ticket: Option<u128>,
    /// Promised changes whose answers will name it.
    pub(super) expected: u32,
}

/// An open file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Handle {
    pub(super) ino: Ino,
    pub(super) flags: i32,
    /// A lock on it, or the file itself, did not outlive a session: everything but closing fails.
    pub(super) lost: bool,
}

/// An open directory.
#[derive(Debug, Default)]
pub(super) struct Dir {
    /// Where `names` begin.
    pub(super) cookie: u64,
    /// Names that the server has sent and the kernel has not had yet.
    pub(super) names: VecDeque<Name>,
    /// The listing began with all names, as they were then.
    pub(super) whole: Option<Arc<[Name]>>,
}

/// Who holds locks on a file.
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
    /// A name of each of them, as far as one is known, for the log: the newest that the kernel has used.
    pub(super) names: HashMap<Ino, (Ino, Vec<u8>)>,
    pub(super) handles: HashMap<u64, Handle>,
    pub(super) dirs: HashMap<u64, Dir>,
    pub(super) locks: HashMap<Ino, Vec<FileLock>>,
    /// Inodes that a walk has brought: the first lookup of each is counted, though the kernel has not made it yet. Oldest first.
    ahead: HashSet<Ino>,
    aged: VecDeque<Ino>,
    /// Owners of whom it is not known what the server did for them, and what they ask for meanwhile.
    unsettled: HashMap<Owner, Vec<Parked>>,
    /// Inodes that may have lost changes, which nobody was told yet.
    damaged: HashSet<Ino>,
    next_fh: u64,
}

impl Tables {
    /// A new number for an open file or directory.
    pub(super) fn fresh_fh(&mut self) -> u64 {
        self.next_fh += 1;
        self.next_fh
    }

    /// An answer has named an inode, and the kernel is told. One without a stamp is of a promised change, and counted before.
    pub(super) fn learn(&mut self, known: &Known) {
        if known.attr.ino == ROOT || known.stamp == 0 {
            return;
        }
        let counted = u64::from(self.ahead.remove(&known.attr.ino));
        let node = self.nodes.entry(known.attr.ino).or_default();
        node.lookups += 1 - counted;
        node.ticket = Some(known.ticket);
        node.stamp = node.stamp.max(known.stamp);
    }

    /// A walk has named an inode; `kept`: the kernel may hear of it without another answer. Else it may have to be forgotten at once.
    pub(super) fn learn_ahead(&mut self, known: &Known, kept: bool) -> Option<Forgotten> {
        let ino = known.attr.ino;
        if ino == ROOT {
            return None;
        }
        if !kept && !self.nodes.contains_key(&ino) {
            return Some(Forgotten { ino, stamp: known.stamp });
        }
        let node = self.nodes.entry(ino).or_insert_with(|| {
            self.ahead.insert(ino);
            self.aged.push_back(ino);
            Node { lookups: 1, ..Node::default() }
        });
        node.ticket = Some(known.ticket);
        node.stamp = node.stamp.max(known.stamp);
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

    /// The kernel knows an inode by this name. Gives the one by which it knew it before, if that was another.
    pub(super) fn name(&mut self, ino: Ino, dir: Ino, name: &[u8]) -> Option<(Ino, Vec<u8>)> {
        let is_new = self.names.get(&ino).is_none_or(|(d, n)| *d != dir || n != name);
        (is_new && self.nodes.contains_key(&ino)).then(|| self.names.insert(ino, (dir, name.to_vec())))?
    }

    /// Whether the kernel knows anything by this name.
    pub(super) fn has_name(&self, name: &(Ino, Vec<u8>)) -> bool {
        self.names.values().any(|other| other == name)
    }

    /// The kernel has renamed what it knew by the first name, whatever that is.
    pub(super) fn rename(&mut self, from: (Ino, &[u8]), to: (Ino, &[u8]), exchange: bool) {
        for (dir, name) in self.names.values_mut() {
            if (*dir, &**name) == from {
                (*dir, *name) = (to.0, to.1.into());
            } else if exchange && (*dir, &**name) == to {
                (*dir, *name) = (from.0, from.1.into());
            }
        }
    }

    /// A promised change names an inode to the kernel; its answer is yet to come.
    pub(super) fn expect(&mut self, ino: Ino) {
        let node = self.nodes.entry(ino).or_default();
        node.lookups += 1;
        node.expected += 1;
    }

    /// The answer has come, or never will (`None`). Gives what was known of the inode if the kernel knows it no more.
    pub(super) fn confirm(&mut self, ino: Ino, known: Option<&Known>) -> Option<Node> {
        let node = self.nodes.get_mut(&ino)?;
        node.expected = node.expected.saturating_sub(1);
        if let Some(known) = known {
            node.ticket = Some(known.ticket);
            node.stamp = node.stamp.max(known.stamp);
        }
        self.forget(ino, 0)
    }

    /// The kernel is told of an inode again, by what is kept; `false`: it does not know it any more, and the server must say it.
    pub(super) fn learn_again(&mut self, ino: Ino) -> bool {
        let Some(node) = self.nodes.get_mut(&ino) else { return false };
        node.lookups += u64::from(!self.ahead.remove(&ino));
        true
    }

    /// The kernel takes lookups back; gives what was known of the inode if it knows it no more.
    pub(super) fn forget(&mut self, ino: Ino, count: u64) -> Option<Node> {
        let node = self.nodes.get_mut(&ino)?;
        node.lookups = node.lookups.saturating_sub(count);
        if node.lookups > 0 || node.expected > 0 {
            return None;
        }
        self.names.remove(&ino);
        self.nodes.remove(&ino)
    }

    /// An inode was made again in a new session; whether the kernel knows it.
    pub(super) fn known_again(&mut self, ino: Ino, known: &Known) -> bool {
        let node = self.nodes.get_mut(&ino);
        node.map(|node| (node.ticket, node.stamp) = (Some(known.ticket), known.stamp)).is_some()
    }

    /// An inode that was made without an answer is there, with this ticket and stamp, or is gone again. Gives what was known of it if the kernel
    /// does not know it any more.
    pub(super) fn found(&mut self, ino: Ino, named: Option<(u128, u64)>) -> Option<Node> {
        let node = self.nodes.get_mut(&ino)?;
        node.expected = node.expected.saturating_sub(1);
        if let Some((ticket, stamp)) = named {
            (node.ticket, node.stamp) = (Some(ticket), node.stamp.max(stamp));
        }
        self.forget(ino, 0)
    }

    /// Changes of these are lost.
    pub(super) fn damage(&mut self, inos: &[Ino]) {
        self.damaged.extend(inos);
    }

    /// Whether changes of the inode (`None`: of any) may have been lost of which nobody was told; whoever asks tells.
    pub(super) fn take_damage(&mut self, ino: Option<Ino>) -> bool {
        match ino {
            Some(ino) => self.damaged.remove(&ino),
            None => !std::mem::take(&mut self.damaged).is_empty(),
        }
    }

    /// Changes are lost, of nobody knows what.
    pub(super) fn damage_open_files(&mut self) {
        self.damaged.extend(self.handles.values().map(|handle| handle.ino));
    }

    /// A change that was promised is not made.
    pub(super) fn lost(&mut self, op: &Op, touched: &[Ino]) {
        match op {
            Op::Open { fh, flags, .. } | Op::Create { fh, flags, .. } => {
                if let Some(handle) = self.handles.get_mut(fh) {
                    handle.lost = true;
                }
                if matches!(op, Op::Open { .. }) && flags & libc::O_TRUNC == 0 {
                    return;
                }
            }
            _ => {}
        }
        self.damaged.extend(touched);
    }

    /// A lock was taken or given back.
    pub(super) fn set_lock(&mut self, ino: Ino, lock: &FileLock) {
        let locks = self.locks.entry(ino).or_default();
        set_range(locks, lock);
        if locks.is_empty() {
            self.locks.remove(&ino);
        }
    }

    /// What the owner of `lock` has of its range.
    pub(super) fn locks_within(&self, ino: Ino, lock: &FileLock) -> Vec<FileLock> {
        let all = self.locks.get(&ino).into_iter().flatten();
        let own = all.filter(|l| l.owner == lock.owner && l.flock == lock.flock);
        let within = own.filter(|l| l.start <= lock.end && lock.start <= l.end);
        within.map(|l| FileLock { start: l.start.max(lock.start), end: l.end.min(lock.end), ..*l }).collect()
    }

    /// The same, with what it does not have as pieces of kind `F_UNLCK`.
    pub(super) fn pieces(&self, ino: Ino, lock: &FileLock) -> Vec<FileLock> {
        let mut pieces = self.locks_within(ino, lock);
        let unlock = FileLock { kind: libc::F_UNLCK, ..*lock };
        let mut gaps = vec![unlock];
        for piece in &pieces {
            gaps = gaps
                .into_iter()
                .flat_map(|gap| {
                    let left = (gap.start < piece.start)
                        .then(|| FileLock { end: gap.end.min(piece.start - 1), ..gap });
                    let right = (piece.end < gap.end)
                        .then(|| FileLock { start: gap.start.max(piece.end + 1), ..gap });
                    left.into_iter().chain(right)
                })
                .collect();
        }
        pieces.extend(gaps);
        pieces
    }

    /// From now on requests of this owner are kept.
    pub(super) fn unsettle(&mut self, owner: Owner) {
        self.unsettled.entry(owner).or_default();
    }

    /// Keeps a request of an unsettled owner; gives it back if it can be sent.
    pub(super) fn defer(&mut self, owner: Owner, parked: Parked) -> Option<Parked> {
        match self.unsettled.get_mut(&owner) {
            Some(kept) => {
                kept.push(parked);
                None
            }
            None => Some(parked),
        }
    }

    /// The owner is settled; gives what was kept.
    pub(super) fn settle(&mut self, owner: Owner) -> Vec<Parked> {
        self.unsettled.remove(&owner).unwrap_or_default()
    }

    /// Whether an owner has `fcntl` locks on a file.
    pub(super) fn has_locks(&self, ino: Ino, owner: u64) -> bool {
        self.locks.get(&ino).is_some_and(|locks| locks.iter().any(|l| l.owner == owner && !l.flock))
    }

    /// Open files of this inode can be used no more.
    pub(super) fn lose(&mut self, ino: Ino) {
        self.handles.values_mut().filter(|h| h.ino == ino).for_each(|h| h.lost = true);
    }
}
