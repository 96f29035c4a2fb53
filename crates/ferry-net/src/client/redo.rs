//! After a crash of the server: which of the kept changes are made again, and how.
//!
//! * REPLAY-1: a change is made again only behind all that came before it of the same inodes: what
//!   builds on something that is lost is lost, too.
//! * REPLAY-2: what is not durable was seen by nobody else, and nobody else has changed anything on
//!   top of it.
//!
//! What the mark covers is there, with all names and inodes; contents may be missing nevertheless,
//! so writes are made again whether it covers them or not, and with them the changes of attributes
//! that came behind. That comes to the same however often it is done: writes have fixed places, and
//! the times are those that were promised. Only the time of the last change (`ctime`) of an inode
//! that was written and then linked, renamed or unlinked may be that of the write.

use crate::rt::collections::{HashMap, HashSet};
use std::sync::Weak;

use ferry_fs::{Errno, Ino, SetAttr, XattrFlags};

use super::RemoteFs;
use super::link::{KeptChange, Pending, Redo, Waiter};
use super::losses::Loss;
use super::tables::Tables;
use super::waiting::Nobody;
use crate::codec::List;
use crate::message::{BATCH_MAX, Claim, Effect, Forgotten, Known, Numbers, Op, Outcome};

/// What is to be done.
pub(super) struct Plan {
    /// Numbers under which inodes are made again, or have been made without an answer.
    pub(super) numbers: Vec<(Numbers, Vec<Ino>)>,
    /// Inodes that are known again for it, and that the kernel does not know.
    pub(super) claims: Vec<Claim>,
    /// Inodes that changes touch which are not durable: they are claimed before anything of it is
    /// made, so that what loses its last name there stays for those who know it.
    pub(super) needed: HashSet<Ino>,
    /// In their order, with the files opened for them.
    pub(super) steps: Vec<Step>,
    /// To be closed at the end.
    pub(super) opened: Vec<u64>,
    /// To be forgotten at the end.
    pub(super) forgotten: Vec<Ino>,
    /// Inodes of changes that cannot be made again.
    pub(super) lost: Vec<Ino>,
    /// These changes.
    pub(super) losses: Vec<Loss>,
    /// Inodes of which something is lost.
    broken: HashSet<Ino>,
    /// Those of them that may not be there.
    unmade: HashSet<Ino>,
    /// Inodes of which no answer will come: the change that would have named them is there.
    pub(super) unnamed: Vec<Ino>,
    /// The server waits for it.
    pub(super) at_all: bool,
}

pub(super) enum Step {
    Open { ino: Ino, fh: u64 },
    Change(Box<KeptChange>),
}

impl Plan {
    pub(super) fn new(redo: Redo, tables: &mut Tables) -> Self {
        let Redo { changes, mark, durable, older, overflow, claims, numbers, made: made_before } =
            redo;
        let mut plan = Self {
            numbers: Vec::new(),
            claims,
            needed: changes
                .iter()
                .flat_map(|change| change.touched.iter().copied().chain(change.op.info().inodes()))
                .collect(),
            steps: Vec::new(),
            opened: Vec::new(),
            forgotten: Vec::new(),
            lost: Vec::new(),
            losses: Vec::new(),
            broken: HashSet::default(),
            unmade: HashSet::default(),
            unnamed: Vec::new(),
            at_all: mark.is_some(),
        };
        plan.losses.extend(older.iter().copied().map(Loss::some_of));
        plan.broken.extend(&older);
        plan.unmade.extend(&older);
        plan.lost.extend(older);
        if overflow {
            tables.damage_open_files();
        }
        let Some(mark) = mark else {
            plan.claims.clear();
            plan.unnamed = made_before;
            changes.into_iter().for_each(|change| plan.lose(change));
            return plan;
        };
        // A name of theirs is gone, and they may be.
        let gone: HashSet<Ino> = changes
            .iter()
            .filter(|change| change.seq <= mark)
            .filter(|change| change.op.info().naming.takes_names())
            .flat_map(|change| change.touched.iter().copied())
            .collect();
        let (again, mut made) = plan.choose(changes, (mark, durable));
        made.extend(made_before);
        let fresh: Vec<Ino> =
            again.iter().map(KeptChange::number).filter(|ino| *ino != 0).collect();
        for range in numbers {
            let within =
                |ino: &&Ino| (range.first..range.first + Ino::from(range.count)).contains(*ino);
            let mut found: Vec<Ino> = made.iter().filter(within).copied().collect();
            if found.is_empty() && !fresh.iter().any(|ino| within(&ino)) {
                continue;
            }
            while found.len() > BATCH_MAX {
                let rest = found.split_off(BATCH_MAX);
                plan.numbers.push((range, std::mem::replace(&mut found, rest)));
            }
            plan.numbers.push((range, found));
        }
        let claimed = plan.claims.iter().map(|claim| claim.ino);
        let unknown = |ino: &Ino| !tables.nodes.contains_key(ino);
        plan.forgotten = claimed.chain(made).chain(fresh).filter(unknown).collect();
        plan.order(again, &gone, tables);
        plan
    }

    /// It is not made again.
    fn lose(&mut self, change: KeptChange) {
        self.losses.push(Loss::of(&change.op, change.file.or(change.touched.first().copied())));
        self.broken.extend(&change.touched);
        if change.op.info().makes.is_named_inode() {
            self.unmade.extend(change.split().1);
            self.unmade.insert(change.number());
        }
        self.lost.extend(change.touched);
    }

    /// Those that are made again; and inodes that were made without an answer.
    fn choose(
        &mut self,
        changes: Vec<KeptChange>,
        (mark, durable): (u64, u64),
    ) -> (Vec<KeptChange>, Vec<Ino>) {
        let (mut again, mut made) = (Vec::new(), Vec::new());
        let mut written: HashSet<Ino> = HashSet::default();
        for change in changes {
            let sets = matches!(change.op, Op::Setattr { .. });
            let content = change.op.info().effect == Effect::Contents;
            let ino = change.touched.first().copied();
            let behind_a_write = sets && ino.is_some_and(|ino| written.contains(&ino));
            if change.seq <= durable || change.seq <= mark && !content && !behind_a_write {
                match &change.op {
                    op if change.unanswered && op.info().makes.is_named_inode() => {
                        made.push(change.number())
                    }
                    Op::Link { ino, .. } if change.unanswered => self.unnamed.push(*ino),
                    _ => {}
                }
                continue;
            }
            let (dirs, others) = change.split();
            let broken = |ino: &Ino| self.broken.contains(ino);
            let builds_on_it = dirs.iter().any(broken)
                || others.iter().any(|ino| self.unmade.contains(ino))
                || change.needs(&others) && others.iter().any(broken);
            if change.lost || builds_on_it {
                self.lose(change);
                continue;
            }
            if content {
                written.extend(ino);
            }
            again.push(change);
        }
        (again, made)
    }

    /// Opens each file that is written, or that programs have open, before the first change that
    /// touches it: it may lose its name.
    fn order(&mut self, again: Vec<KeptChange>, gone: &HashSet<Ino>, tables: &mut Tables) {
        let written = again.iter().filter(|change| change.op.info().to.is_some());
        let mut wanted: HashSet<Ino> = written.filter_map(|change| change.file).collect();
        wanted
            .extend(tables.handles.values().filter(|handle| !handle.lost).map(|handle| handle.ino));
        let mut files: HashMap<Ino, u64> = HashMap::default();
        for mut change in again {
            change.quiet |= change.touched.iter().any(|ino| gone.contains(ino));
            let mut opens: Vec<Step> = Vec::new();
            for ino in change.touched.iter().filter(|ino| wanted.contains(ino)) {
                files.entry(*ino).or_insert_with(|| {
                    let fh = tables.fresh_fh();
                    self.opened.push(fh);
                    opens.push(Step::Open { ino: *ino, fh });
                    fh
                });
            }
            let makes = change.op.info().makes.is_named_inode();
            change.op = again_op(change.op, change.file.and_then(|ino| files.get(&ino).copied()));
            if makes {
                self.steps.push(Step::Change(Box::new(change)));
                self.steps.append(&mut opens);
            } else {
                self.steps.append(&mut opens);
                self.steps.push(Step::Change(Box::new(change)));
            }
        }
    }
}

/// The same change, without the files of the session that is gone.
fn again_op(op: Op, file: Option<u64>) -> Op {
    match op {
        Op::Create { parent, name, mode, .. } => {
            Op::Mknod { parent, name, mode: libc::S_IFREG | mode & 0o7777, rdev: 0 }
        }
        Op::Open { ino, kill_suidgid, .. } => {
            let set = SetAttr { size: Some(0), kill_suidgid, ..SetAttr::default() };
            Op::Setattr { ino, fh: None, set }
        }
        Op::Setattr { ino, set, .. } => Op::Setattr { ino, fh: None, set },
        Op::Write { fh, offset, data, append, kill_suidgid } => {
            Op::Write { fh: file.unwrap_or(fh), offset, data, append, kill_suidgid }
        }
        Op::Fallocate { fh, mode, offset, len } => {
            Op::Fallocate { fh: file.unwrap_or(fh), mode, offset, len }
        }
        // It may be there, or not.
        Op::Setxattr { ino, name, value, .. } => {
            Op::Setxattr { ino, name, value, flags: XattrFlags::default() }
        }
        op => op,
    }
}

/// What is to be forgotten, whatever the server has named since.
pub(super) fn forget(inos: &[Ino]) -> impl Iterator<Item = Op> {
    inos.chunks(BATCH_MAX).map(|batch| {
        let inodes = batch.iter().map(|ino| Forgotten { ino: *ino, stamp: u64::MAX }).collect();
        Op::Forget { inodes: List(inodes) }
    })
}

/// A change as it is sent again.
pub(super) fn pending(fs: &Weak<RemoteFs>, change: KeptChange) -> Pending {
    let KeptChange { who, op, promised, touched, file, quiet, unanswered, .. } = change;
    let fh = op.info().to;
    let named = match &op {
        op if op.info().makes.is_named_inode() => promised.map(|promised| promised.ino),
        Op::Link { ino, .. } => Some(*ino),
        _ => None,
    };
    let loss = Loss::of(&op, file.or(touched.first().copied()));
    let waiter = Redoing {
        fs: fs.clone(),
        touched: touched.clone(),
        loss,
        named,
        quiet,
        expected: unanswered,
    };
    Pending {
        files: fh.zip(file).into_iter().collect(),
        promised,
        touched,
        quiet,
        ..Pending::new(who, op, std::sync::Arc::new(waiter))
    }
}

/// A change is made again, or is lost.
struct Redoing {
    fs: Weak<RemoteFs>,
    touched: Vec<Ino>,
    loss: Loss,
    /// The inode that the answer names.
    named: Option<Ino>,
    quiet: bool,
    /// The first answer never came.
    expected: bool,
}

impl Redoing {
    fn named(&self, fs: &RemoteFs, known: Option<&Known>) {
        let Some(ino) = self.named else { return };
        match known {
            _ if self.expected => fs.confirm(ino, known),
            Some(known) => fs.known_again(ino, known),
            None => {}
        }
    }
}

impl Waiter for Redoing {
    fn answer(&self, outcome: Outcome, _leased: u8) {
        let Some(fs) = self.fs.upgrade() else { return };
        match outcome {
            Outcome::Failed { errno } => {
                self.named(&fs, None);
                let absent = matches!(errno, libc::ESTALE | libc::ENOENT | libc::EBADF);
                if !(self.quiet && absent) {
                    tracing::debug!(errno, "a change cannot be made again");
                    fs.cannot_redo(&self.touched, vec![self.loss.clone()]);
                }
            }
            Outcome::Entry { known: Some(known) } => self.named(&fs, Some(&known)),
            _ => {}
        }
    }

    fn fail(&self, _errno: Errno) {}
}

/// All is made again.
pub(super) struct Done(pub(super) Weak<RemoteFs>);

impl Waiter for Done {
    fn answer(&self, outcome: Outcome, _leased: u8) {
        let Some(fs) = self.0.upgrade() else { return };
        if let Outcome::Count { count } = outcome {
            fs.link.durable(count);
        }
        let settled = Pending::new(Default::default(), Op::Settled {}, std::sync::Arc::new(Nobody));
        fs.link.request(settled);
        fs.tell_losses();
    }

    fn fail(&self, _errno: Errno) {}
}
