//! Going on with the mount of a process that was killed: what it has noted ([`super::notes`])
//! becomes what this process knows, and its session is resumed as after a lost connection. `left`
//! says what becomes of the kernel's requests.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use crate::rt::collections::{HashMap, HashSet};
use ferry_env::Env;
use ferry_fs::{Errno, ErrorCursor, Ino, ROOT};

use super::change::{Nobody, Pending, Role, Waiter};
use super::connect::ClientOptions;
use super::deciding::Named;
use super::left::Came;
use super::link::LeftChange;
use super::notes::{Noted, NotedChange, NotedNode, flag};
use super::remote::RemoteFs;
use super::replay;
use super::restorer::{Numbered, Regained};
use super::tables::{Dir, Handle, Node, Tables};
use crate::error::NetError;
use crate::message::{Claim, Forgotten, Op, Outcome};
use crate::transport::Connector;

/// The inode of which the answer to an early-acknowledged change tells.
fn named_by(change: &NotedChange) -> Option<Ino> {
    let made = change.decided.map(|decided| decided.ino).filter(|ino| *ino != 0);
    match &change.op {
        _ if change.role != Role::Acknowledged => None,
        Op::Link { ino, .. } => Some(*ino),
        _ => made,
    }
}

/// What the process before knew, and inodes of which the server was not told that the kernel has
/// forgotten them.
fn tables_of(noted: &Noted) -> (Tables, Vec<NotedNode>) {
    let mut tables = Tables::default();
    tables.next_fh = noted.next_number();
    let mut expected: HashMap<Ino, u32> = HashMap::default();
    for ino in noted.changes.iter().filter_map(named_by) {
        *expected.entry(ino).or_default() += 1;
    }
    let (mut forgotten, mut lost) = (Vec::new(), Vec::new());
    for node in &noted.tables.nodes {
        let NotedNode { ino, stamp, capability, is_mapped, .. } = *node;
        let lookups = node.lookups - u64::from(node.is_ahead).min(node.lookups);
        let expected = expected.get(&ino).copied().unwrap_or_default();
        if lookups == 0 && expected == 0 {
            forgotten.push(*node);
            continue;
        }
        tables.nodes.insert(ino, Node { lookups, stamp, capability, expected, is_mapped });
        lost.extend(node.has_lost.then_some(ino));
    }
    for file in &noted.tables.files {
        let [told, closed, opened] = [(); 3].map(|()| ErrorCursor::default());
        let (ino, flags, lost) = (file.ino, file.flags, file.lost);
        tables.handles.insert(file.fh, Handle { ino, flags, lost, told, closed, opened });
    }
    for dir in &noted.tables.dirs {
        tables.dirs.insert(dir.fh, Dir { ino: dir.ino, left: Some(dir.names), ..Dir::default() });
    }
    for noted in &noted.tables.locks {
        tables.set_lock(noted.ino, noted.fh, &noted.lock);
    }
    tables.broken.extend(&lost);
    tables.was_lost(lost, noted.flags & flag::ANY_LOSS != 0);
    (tables, forgotten)
}

impl RemoteFs {
    /// Goes on with a mount whose process was killed. It connects when the transport has begun all
    /// requests again that it has found ([`ferry_fs::Filesystem::goes_on`]).
    pub fn go_on_left(
        connector: Arc<dyn Connector>,
        options: ClientOptions,
        noted: Noted,
        env: &Env,
    ) -> Result<Arc<Self>, NetError> {
        let (mut tables, forgotten) = tables_of(&noted);
        if let Some(notes) = &options.notes {
            tables.note_in(notes);
            forgotten.iter().for_each(|node| tables.note_forgotten(node));
            for (request, answer) in &noted.answers {
                let opens = (answer.opens != 0).then_some(answer.opens);
                notes.answered(*request, opens, &answer.outcome);
            }
        }
        let is_known = |node: &NotedNode| node.capability.is_some();
        let forgotten = forgotten.iter().filter(|node| is_known(node));
        let forgotten = forgotten.map(|node| Forgotten { ino: node.ino, stamp: node.stamp });
        // The kernel knows the root without a lookup.
        let known = noted.tables.nodes.iter().map(|node| node.ino);
        let known: Vec<Ino> = known.chain([ROOT]).collect();
        let claims = if noted.is_unclaimed() {
            let claim = |(ino, node): (&Ino, &Node)| {
                node.capability.map(|capability| Claim { ino: *ino, capability })
            };
            tables.nodes.iter().filter_map(claim).collect()
        } else {
            Vec::new()
        };
        let handles: HashSet<u64> = tables.handles.keys().copied().collect();
        let unnamed: HashSet<Ino> = {
            let nodes = tables.nodes.iter();
            nodes.filter(|(_, node)| node.capability.is_none()).map(|(ino, _)| *ino).collect()
        };
        let fs = Self::new(connector, &options, env, tables)?;
        fs.forgotten.lock().extend(forgotten);
        let mut requests = HashMap::default();
        for (request, answer) in &noted.answers {
            let came = (Came::To(answer.outcome.clone()), answer.opens);
            requests.insert(*request, came);
        }
        for change in noted.changes.iter().filter(|change| change.request != 0) {
            let came = match &change.outcome {
                Some(outcome) => Came::To(outcome.clone()),
                None => Came::Waits(change.seq),
            };
            let opens = change.op.info().opens.unwrap_or_default();
            requests.insert(change.request, (came, opens));
        }
        let changes = noted.changes.iter().map(|change| LeftChange {
            pending: fs.left_pending(change, &handles, &unnamed),
            epoch: change.epoch,
            is_fatal: change.is_fatal,
        });
        fs.link.resume_left(&noted, changes.collect(), claims);
        fs.left.set(requests, known);
        fs.is_left.store(true, Ordering::SeqCst);
        let _granted = fs.set_asynchronous(options.asynchronous);
        Ok(fs)
    }

    /// A change as it stood in the stream of the process before.
    fn left_pending(
        &self,
        change: &NotedChange,
        handles: &HashSet<u64>,
        unnamed: &HashSet<Ino>,
    ) -> Pending {
        let fs = self.this.clone();
        let NotedChange { request, role, caller, decided, .. } = *change;
        let op = change.op.clone();
        let waiter: Arc<dyn Waiter> = match (&op, role) {
            (_, Role::Acknowledged) => match named_by(change) {
                Some(ino) => Arc::new(Named { fs, ino }),
                None => Arc::new(Nobody),
            },
            (Op::Open { ino, fh, .. }, Role::Restores) if handles.contains(fh) => {
                Arc::new(Regained { fs, ino: *ino })
            }
            (Op::Reclaim { ino, .. }, _) => Arc::new(Regained { fs, ino: *ino }),
            (Op::Numbered { made, .. }, _) => Arc::new(Numbered { fs, made: made.0.clone() }),
            (Op::Replayed {}, _) => Arc::new(replay::Done(fs)),
            _ if request != 0 => Arc::new(Abandoned { fs, opens: op.info().opens }),
            _ => Arc::new(Nobody),
        };
        let (files, touched) = (change.files.clone(), change.touched.clone());
        let outcome = change.outcome.clone().map(Box::new);
        let pending = Pending {
            role,
            files,
            decided,
            touched,
            request,
            outcome,
            ..Pending::new(caller, op, waiter)
        };
        if !matches!(role, Role::Replayed { .. }) {
            return pending;
        }
        let number = decided.map_or(0, |decided| decided.ino);
        let named = if let Op::Link { ino, .. } = &pending.op { *ino } else { number };
        replay::pending(&self.this, pending, unnamed.contains(&named))
    }
}

/// The program of a change had stopped waiting when its process was killed: what it has opened or
/// named is given back.
struct Abandoned {
    fs: Weak<RemoteFs>,
    opens: Option<u64>,
}

impl Waiter for Abandoned {
    fn answer(&self, outcome: Outcome, _leased: u8) {
        let Some(fs) = self.fs.upgrade() else { return };
        if matches!(outcome, Outcome::Failed { .. }) {
            return;
        }
        if let Some(fh) = self.opens {
            fs.release_handle(fh);
        }
        if let Outcome::Entry { known: Some(known) } = outcome {
            fs.tables.lock().learn(&known);
            fs.forget_known(known.attr.ino, 1);
        }
    }

    fn fail(&self, _errno: Errno) {}
}
