//! After a crash of the server: which changes of the replay log are replayed, and how.
//!
//! * REPLAY-1: a change is replayed only behind all earlier changes of the same inodes. If one of
//!   these is lost, the change is lost, too.
//! * REPLAY-2: no other client has seen a change that is not durable, and none has changed anything
//!   on top of it.
//!
//! The server tells the last-applied sequence number of the session. Names and inodes of changes up
//! to it survive, but contents may be missing. So all writes are replayed, whether that number
//! covers them or not, and with them the changes of attributes that followed. A replay may be
//! repeated: writes have fixed offsets, and times are those that were acknowledged. The one
//! difference is `ctime` of an inode that was written and then linked, renamed or unlinked: it may
//! be the time of the write.

use std::sync::{Arc, Weak};

use crate::rt::collections::{HashMap, HashSet};

use ferry_fs::{Errno, Ino, SetAttr, XattrFlags};

use super::change::{Change, Nobody, Pending, Role, Stage, Waiter};
use super::losses::Loss;
use super::remote::RemoteFs;
use super::replay_log::Replayable;
use super::tables::Tables;
use crate::codec::List;
use crate::message::{BATCH_MAX, Claim, Effect, Forgotten, Known, Numbers, Op, Outcome};

/// What is to be done.
pub(super) struct Plan {
    /// Ranges of inode numbers that a replay uses, or that unanswered changes have used.
    pub(super) numbers: Vec<(Numbers, Vec<Ino>)>,
    /// Inodes that are known again for it, and that the kernel does not know.
    pub(super) claims: Vec<Claim>,
    /// Inodes that the replayed changes touch. They are claimed first, so that an inode that loses
    /// its last name in the replay stays for programs that have it open.
    pub(super) needed: HashSet<Ino>,
    /// In their order, with the files opened for them.
    pub(super) steps: Vec<Step>,
    /// To be closed at the end.
    pub(super) opened: Vec<u64>,
    /// To be forgotten at the end.
    pub(super) forgotten: Vec<Ino>,
    /// Inodes of changes that cannot be replayed.
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
    Open {
        ino: Ino,
        fh: u64,
    },
    /// `is_unanswered`: the answer that would have named what it makes never arrived.
    Change {
        pending: Box<Pending>,
        is_unanswered: bool,
    },
}

impl Plan {
    pub(super) fn new(replayable: Replayable, tables: &mut Tables) -> Self {
        let Replayable {
            changes,
            last_applied,
            durable,
            older,
            overflow,
            claims,
            numbers,
            made: made_before,
        } = replayable;
        let mut plan = Self {
            numbers: Vec::new(),
            claims,
            needed: changes
                .iter()
                .flat_map(|change| {
                    let pending = &change.pending;
                    pending.touched.iter().copied().chain(pending.op.info().inodes())
                })
                .collect(),
            steps: Vec::new(),
            opened: Vec::new(),
            forgotten: Vec::new(),
            lost: Vec::new(),
            losses: Vec::new(),
            broken: HashSet::default(),
            unmade: HashSet::default(),
            unnamed: Vec::new(),
            at_all: last_applied.is_some(),
        };
        plan.losses.extend(older.iter().copied().map(Loss::some_of));
        plan.broken.extend(&older);
        plan.unmade.extend(&older);
        plan.lost.extend(older);
        if overflow {
            tables.damage_open_files();
        }
        let Some(last_applied) = last_applied else {
            plan.claims.clear();
            plan.unnamed = made_before;
            changes.into_iter().for_each(|change| plan.lose(change));
            return plan;
        };
        // They have lost a name, and may not exist any more.
        let unlinked: HashSet<Ino> = changes
            .iter()
            .filter(|change| change.seq <= last_applied)
            .filter(|change| change.pending.op.info().naming.takes_names())
            .flat_map(|change| change.pending.touched.iter().copied())
            .collect();
        let (again, mut made) = plan.choose(changes, (last_applied, durable));
        made.extend(made_before);
        let fresh: Vec<Ino> = again.iter().map(Change::number).filter(|ino| *ino != 0).collect();
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
        plan.order(again, &unlinked, tables);
        plan
    }

    /// It is not replayed.
    fn lose(&mut self, mut change: Change) {
        if change.stage() != Stage::Lost {
            change.advance(Stage::Lost);
        }
        let pending = &change.pending;
        self.losses.push(Loss::of_change(pending));
        self.broken.extend(&pending.touched);
        if pending.op.info().makes.is_named_inode() {
            self.unmade.extend(change.split().1);
            self.unmade.insert(change.number());
        }
        self.lost.extend(change.pending.touched);
    }

    /// The changes that are replayed, and inodes that unanswered changes have created.
    fn choose(
        &mut self,
        changes: Vec<Change>,
        (last_applied, durable): (u64, u64),
    ) -> (Vec<Change>, Vec<Ino>) {
        let (mut again, mut made) = (Vec::new(), Vec::new());
        let mut written: HashSet<Ino> = HashSet::default();
        for change in changes {
            let sets = matches!(change.pending.op, Op::Setattr { .. });
            let content = change.pending.op.info().effect == Effect::Contents;
            let ino = change.pending.touched.first().copied();
            let is_unanswered = change.stage().is_unanswered();
            let behind_a_write = sets && ino.is_some_and(|ino| written.contains(&ino));
            if change.seq <= durable || change.seq <= last_applied && !content && !behind_a_write {
                match &change.pending.op {
                    op if is_unanswered && op.info().makes.is_named_inode() => {
                        made.push(change.number())
                    }
                    Op::Link { ino, .. } if is_unanswered => self.unnamed.push(*ino),
                    _ => {}
                }
                continue;
            }
            let (dirs, others) = change.split();
            let broken = |ino: &Ino| self.broken.contains(ino);
            let builds_on_it = dirs.iter().any(broken)
                || others.iter().any(|ino| self.unmade.contains(ino))
                || change.needs(&others) && others.iter().any(broken);
            if matches!(change.stage(), Stage::Lost | Stage::Fatal) || builds_on_it {
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
    fn order(&mut self, again: Vec<Change>, unlinked: &HashSet<Ino>, tables: &mut Tables) {
        let written = again.iter().filter(|change| change.pending.op.info().to.is_some());
        let mut wanted: HashSet<Ino> =
            written.filter_map(|change| change.pending.first_file()).collect();
        wanted
            .extend(tables.handles.values().filter(|handle| !handle.lost).map(|handle| handle.ino));
        let mut files: HashMap<Ino, u64> = HashMap::default();
        for change in again {
            let is_unanswered = change.stage().is_unanswered();
            let mut pending = change.pending;
            let was_tolerant = pending.role == Role::Replayed { tolerant: true };
            let tolerant = was_tolerant || pending.touched.iter().any(|ino| unlinked.contains(ino));
            pending.role = Role::Replayed { tolerant };
            let mut opens: Vec<Step> = Vec::new();
            for ino in pending.touched.iter().filter(|ino| wanted.contains(ino)) {
                files.entry(*ino).or_insert_with(|| {
                    let fh = tables.fresh_fh();
                    self.opened.push(fh);
                    opens.push(Step::Open { ino: *ino, fh });
                    fh
                });
            }
            let makes = pending.op.info().makes.is_named_inode();
            let file = pending.first_file().and_then(|ino| files.get(&ino).copied());
            pending.op = replayed_op(pending.op, file);
            let step = Step::Change { pending: Box::new(pending), is_unanswered };
            if makes {
                self.steps.push(step);
                self.steps.append(&mut opens);
            } else {
                self.steps.append(&mut opens);
                self.steps.push(step);
            }
        }
    }
}

/// The same change, without the open files of the session before.
fn replayed_op(op: Op, file: Option<u64>) -> Op {
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

/// A change as it is replayed.
pub(super) fn pending(fs: &Weak<RemoteFs>, pending: Pending, is_unanswered: bool) -> Pending {
    let op = &pending.op;
    let named = match op {
        op if op.info().makes.is_named_inode() => pending.decided.map(|decided| decided.ino),
        Op::Link { ino, .. } => Some(*ino),
        _ => None,
    };
    let file = pending.first_file();
    let files = op.info().to.zip(file).into_iter().collect();
    let waiter = Replaying {
        fs: fs.clone(),
        touched: pending.touched.clone(),
        loss: Loss::of_change(&pending),
        named,
        tolerant: pending.role == Role::Replayed { tolerant: true },
        expected: is_unanswered,
    };
    let Pending { caller, op, decided, touched, role, request, outcome, .. } = pending;
    let pending = Pending::new(caller, op, Arc::new(waiter));
    Pending { files, decided, touched, role, request, outcome, ..pending }
}

/// Hears whether a change could be replayed.
struct Replaying {
    fs: Weak<RemoteFs>,
    touched: Vec<Ino>,
    loss: Loss,
    /// The inode that the answer names.
    named: Option<Ino>,
    tolerant: bool,
    /// The first answer never came.
    expected: bool,
}

impl Replaying {
    fn named(&self, fs: &RemoteFs, known: Option<&Known>) {
        let Some(ino) = self.named else { return };
        match known {
            _ if self.expected => fs.confirm(ino, known),
            Some(known) => fs.known_again(ino, known),
            None => {}
        }
    }
}

impl Waiter for Replaying {
    fn answer(&self, outcome: Outcome, _leased: u8) {
        let Some(fs) = self.fs.upgrade() else { return };
        match outcome {
            Outcome::Failed { errno } => {
                self.named(&fs, None);
                let absent = matches!(errno, libc::ESTALE | libc::ENOENT | libc::EBADF);
                if !(self.tolerant && absent) {
                    tracing::debug!(errno, "a change cannot be replayed");
                    fs.report_lost(&self.touched, vec![self.loss.clone()]);
                }
            }
            Outcome::Entry { known: Some(known) } => self.named(&fs, Some(&known)),
            _ => {}
        }
    }

    fn fail(&self, _errno: Errno) {}
}

/// Hears that the replay is complete.
pub(super) struct Done(pub(super) Weak<RemoteFs>);

impl Waiter for Done {
    fn answer(&self, outcome: Outcome, _leased: u8) {
        let Some(fs) = self.0.upgrade() else { return };
        if let Outcome::Count { count } = outcome {
            fs.link.durable(count);
        }
        let settled = Pending::new(Default::default(), Op::Settled {}, Arc::new(Nobody));
        fs.link.request(settled);
        fs.tell_losses();
    }

    fn fail(&self, _errno: Errno) {}
}
