//! What a new session is told, so that it is where the one before was: inodes that the kernel
//! knows, changes to replay, open files, locks.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use crate::rt::collections::HashSet;
use ferry_fs::{Errno, FileLock, Ino};

use super::change::{Nobody, Pending, Waiter};
use super::link::restore::{Before, Restore, Restored};
use super::losses::Loss;
use super::remote::RemoteFs;
use super::replay::{self, Plan, Step};
use super::tables::Handle;
use crate::codec::List;
use crate::message::{BATCH_MAX, Caller, Claim, Forgotten, Op, Outcome};

impl RemoteFs {
    /// A lock that is held is the server's again as it was; if not, it is lost.
    pub(super) fn reclaim(&self, ino: Ino, lock: FileLock) {
        let waiter = Arc::new(Regained { fs: self.this.clone(), ino });
        self.link.change(Pending::new(Caller::default(), Op::Reclaim { ino, lock }, waiter));
    }
}

pub(super) struct Restorer(pub(super) Weak<RemoteFs>);

impl Restore for Restorer {
    fn restore(&self, before: Before) -> Restored {
        let Some(fs) = self.0.upgrade() else { return Restored::default() };
        let forgotten = std::mem::take(&mut *fs.forgotten.lock());
        let mut tables = fs.tables.lock();
        tables.told_forgotten(forgotten.into_iter().map(|one| one.ino));
        for ino in tables.ahead(None) {
            let _of_the_old_session = tables.forget(ino, 1);
            tables.told_forgotten([ino].into_iter());
        }
        let mut plan = match before {
            Before::Clean => None,
            Before::Ended => {
                for ino in tables.lose_locked() {
                    tracing::error!(
                        inode = ino,
                        "the lock on an open file is lost, for the server was out of reach too long: using the file fails now"
                    );
                }
                None
            }
            Before::Crashed(replayable) => Some(Plan::new(replayable, &mut tables)),
        };
        let pending = |op, waiter| Pending::new(Caller::default(), op, waiter);
        let mut all = Vec::new();
        if let Some(plan) = &mut plan {
            fs.lost.fetch_add(plan.losses.len() as u64, Ordering::Relaxed);
            tables.damage(plan.lost.iter().copied());
            fs.losses.lock().append(&mut plan.losses);
            // Otherwise more may come until everything is replayed.
            fs.losses_are_known.store(!plan.at_all, Ordering::Relaxed);
            for ino in std::mem::take(&mut plan.unnamed) {
                let _removed = tables.confirm(ino, None);
            }
            for (numbers, made) in std::mem::take(&mut plan.numbers) {
                let waiter = Arc::new(Numbered { fs: self.0.clone(), made: made.clone() });
                all.push(pending(
                    Op::Numbered { numbers, made: List(made) },
                    waiter as Arc<dyn Waiter>,
                ));
            }
        }
        let mut needed: HashSet<Ino> = tables.handles.values().map(|handle| handle.ino).collect();
        needed.extend(tables.locks.keys());
        needed.extend(plan.iter().flat_map(|plan| plan.needed.iter()));
        let (mut claims, mut rest) = (Vec::new(), Vec::with_capacity(tables.nodes.len()));
        tables.begin_stamps();
        for (ino, node) in &tables.nodes {
            let list = if needed.contains(ino) { &mut claims } else { &mut rest };
            list.extend(node.capability.map(|capability| Claim { ino: *ino, capability }));
        }
        claims.extend(plan.iter().flat_map(|plan| plan.claims.iter().copied()));
        claims.sort_unstable_by_key(|claim| claim.ino);
        for claims in claims.chunks(BATCH_MAX) {
            all.push(pending(
                Op::Claim { inodes: List(claims.to_vec()) },
                Arc::new(Nobody) as Arc<dyn Waiter>,
            ));
        }
        for step in plan.iter_mut().flat_map(|plan| std::mem::take(&mut plan.steps)) {
            all.push(match step {
                Step::Open { ino, fh } => {
                    let op = Op::Open { ino, fh, flags: libc::O_RDWR, kill_suidgid: false };
                    pending(op, Arc::new(Nobody))
                }
                Step::Change { pending, is_unanswered } => {
                    replay::pending(&self.0, *pending, is_unanswered)
                }
            });
        }
        let regained = |op, ino| {
            pending(op, Arc::new(Regained { fs: self.0.clone(), ino }) as Arc<dyn Waiter>)
        };
        let there = tables.handles.iter().filter(|(_, handle)| !handle.lost);
        let (locked, others): (Vec<_>, Vec<_>) =
            there.partition(|(_, handle)| tables.locks.contains_key(&handle.ino));
        let open = |(fh, handle): (&u64, &Handle)| {
            // It exists, permission was checked, and nothing is to be truncated.
            let flags = handle.flags & !(libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC);
            let op = Op::Open { ino: handle.ino, fh: *fh, flags, kill_suidgid: false };
            regained(op, handle.ino)
        };
        // Behind the files that they are of, which are lost if a lock is. Before all others, which
        // may be many: the locks are nobody else's yet.
        all.extend(locked.into_iter().map(open));
        let locks = tables.all_locks();
        all.extend(locks.map(|(ino, lock)| regained(Op::Reclaim { ino, lock }, ino)));
        all.extend(others.into_iter().map(open));
        if let Some(plan) = plan {
            let closes = plan.opened.iter().map(|fh| Op::Release { fh: *fh });
            let last = closes.chain(replay::forget(&plan.forgotten));
            all.extend(last.map(|op| pending(op, Arc::new(Nobody) as Arc<dyn Waiter>)));
            if plan.at_all {
                all.push(pending(Op::Replayed {}, Arc::new(replay::Done(self.0.clone()))));
            }
        }
        Restored { first: all, rest }
    }

    fn fatal(&self, op: &Op) {
        let Some(fs) = self.0.upgrade() else { return };
        let mut tables = fs.tables.lock();
        match op {
            // Using it says that it is not known.
            Op::Claim { inodes } => {
                for claim in &inodes.0 {
                    tables.nodes.entry(claim.ino).and_modify(|node| node.capability = None);
                    tables.note_node(claim.ino);
                }
            }
            Op::Open { ino, .. } | Op::Reclaim { ino, .. } => drop(tables.lose(*ino)),
            _ => {}
        }
    }

    fn claimed(&self, inos: &[Claim], stamp: u64) {
        let Some(fs) = self.0.upgrade() else { return };
        let forgotten: Vec<Ino> = {
            let mut tables = fs.tables.lock();
            let known = |claim: &&Claim| {
                let node = tables.nodes.get_mut(&claim.ino);
                let is_forgotten = node.map(|node| node.stamp = node.stamp.max(stamp)).is_none();
                tables.note_node(claim.ino);
                is_forgotten
            };
            inos.iter().filter(known).map(|claim| claim.ino).collect()
        };
        // The kernel has forgotten them meanwhile.
        forgotten.into_iter().for_each(|ino| fs.forgotten(Forgotten { ino, stamp }));
    }

    fn damaged(&self, changes: &[&Pending]) {
        if let Some(fs) = self.0.upgrade() {
            let mut tables = fs.tables.lock();
            changes.iter().for_each(|change| tables.lost(&change.op, &change.touched));
        }
    }

    fn is_losing(&self, change: &Pending) {
        if let Some(fs) = self.0.upgrade() {
            fs.tables.lock().note_loss(&change.touched);
        }
    }

    fn has_locks(&self, of: Option<Ino>) -> bool {
        let Some(fs) = self.0.upgrade() else { return false };
        let tables = fs.tables.lock();
        of.map_or(!tables.locks.is_empty(), |ino| tables.locks.contains_key(&ino))
    }

    fn lost(&self, changes: Vec<Pending>) {
        let Some(fs) = self.0.upgrade() else { return };
        fs.report_lost(&[], changes.iter().map(Loss::of_change).collect());
        fs.tell_losses();
        for change in changes {
            if let Some(ino) = change.decided.map(|decided| decided.ino).filter(|ino| *ino != 0) {
                fs.confirm(ino, None);
            } else if let Op::Link { ino, .. } = change.op {
                fs.confirm(ino, None);
            }
        }
    }

    fn entered(&self) {
        if let Some(fs) = self.0.upgrade()
            && fs.losses_are_known.swap(false, Ordering::Relaxed)
        {
            fs.tell_losses();
        }
    }

    fn refuses(&self, op: &Op, files: &[(u64, Ino)]) -> bool {
        self.0.upgrade().is_some_and(|fs| fs.tables.lock().refuses(op, files))
    }

    fn given_up(&self, inos: Option<&[Ino]>) {
        let Some(fs) = self.0.upgrade() else { return };
        let ahead = fs.tables.lock().ahead(inos);
        fs.forget_ahead(&ahead);
    }

    fn busy(&self, change: Pending) {
        if let Some(fs) = self.0.upgrade() {
            fs.borrow(change);
        }
    }

    fn lacks_space(&self, change: Pending) {
        match self.0.upgrade() {
            Some(fs) => fs.find_space(change),
            None => change.waiter.fail(Errno(libc::ENOSPC)),
        }
    }

    fn hurry(&self) {
        if let Some(fs) = self.0.upgrade() {
            fs.hurry();
        }
    }

    fn differs(&self, ino: Ino) {
        let Some(fs) = self.0.upgrade() else { return };
        crate::rt::broken(&format!(
            "the server's attributes of inode {ino} are not as decided here"
        ));
        fs.link.give_back(&[ino]);
    }

    fn tick(&self) {
        if let Some(fs) = self.0.upgrade() {
            fs.tell_forgotten();
        }
    }
}

/// Inodes that were made without an answer are known in a new session.
pub(super) struct Numbered {
    pub(super) fs: Weak<RemoteFs>,
    pub(super) made: Vec<Ino>,
}

impl Waiter for Numbered {
    fn answer(&self, outcome: Outcome, _leased: u8) {
        let (Some(fs), Outcome::Claimed { claims, stamp }) = (self.fs.upgrade(), outcome) else {
            return;
        };
        for ino in &self.made {
            let claim = claims.0.iter().find(|claim| claim.ino == *ino);
            let node = fs.tables.lock().found(*ino, claim.map(|claim| (claim.capability, stamp)));
            fs.removed_from_tables(*ino, node);
        }
    }

    fn fail(&self, _errno: Errno) {}
}

/// An open file or a lock is there again in a new session, or is lost.
pub(super) struct Regained {
    pub(super) fs: Weak<RemoteFs>,
    pub(super) ino: Ino,
}

impl Waiter for Regained {
    fn answer(&self, outcome: Outcome, _leased: u8) {
        if let (Some(fs), Outcome::Failed { errno }) = (self.fs.upgrade(), outcome) {
            tracing::error!(
                inode = self.ino,
                errno,
                "an open file or a lock on it is lost: using the file fails now"
            );
            let (ino, locks) = (self.ino, fs.tables.lock().lose(self.ino));
            locks.into_iter().for_each(|lock| fs.tell(Op::Unlock { ino, lock }));
            fs.link.fail_unsent(ino);
        }
    }

    fn fail(&self, _errno: Errno) {}
}
