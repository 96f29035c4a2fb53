//! A process that is killed between any two stores leaves what was so before the call that it was
//! in, or what is so after it.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

use super::memory::RING_WORDS;
use super::tables::NotedLock;
use super::*;
use std::collections::BTreeSet;
use std::sync::Arc;

use ferry_fs::{FileLock, Ino};
use ferry_sim::words::RecordedWords;
use proptest::collection::vec;
use proptest::prelude::*;

use crate::client::change::{Nobody, Pending, Role};
use crate::message::{Caller, Op};

fn pending(len: usize, request: u64, role: Role) -> Pending {
    // What looks like a key everywhere, to a reader beyond the last record.
    let data = (0..len as u64).flat_map(|word| (word + RING_WORDS as u64).to_le_bytes());
    let op = Op::Write {
        fh: 7,
        offset: request,
        data: data.take(len).collect(),
        append: false,
        kill_suidgid: len.is_multiple_of(2),
    };
    Pending {
        request,
        role,
        files: vec![(7, 70)],
        touched: vec![70, len as u64],
        outcome: (role == Role::Acknowledged)
            .then(|| Box::new(Outcome::Count { count: len as u64 })),
        ..Pending::new(Caller { uid: 1, gid: 2, pid: 3, umask: 4 }, op, Arc::new(Nobody))
    }
}

/// A change, as the model has it.
#[derive(Clone, Debug, PartialEq)]
struct Put {
    seq: u64,
    epoch: u32,
    len: usize,
    request: u64,
    is_acknowledged: bool,
    is_fatal: bool,
    at: u64,
}

impl Put {
    fn pending(&self) -> Pending {
        let role = if self.is_acknowledged { Role::Acknowledged } else { Role::Awaited };
        pending(self.len, self.request, role)
    }

    fn noted(&self) -> NotedChange {
        let Pending { caller, op, role, files, decided, touched, request, outcome, .. } =
            self.pending();
        let (seq, epoch, is_fatal) = (self.seq, self.epoch, self.is_fatal);
        NotedChange {
            seq,
            epoch,
            request,
            role,
            caller,
            decided,
            files,
            touched,
            outcome: outcome.map(|outcome| *outcome),
            op,
            is_fatal,
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Call {
    Put {
        len: usize,
        request: u64,
        is_acknowledged: bool,
    },
    Answer,
    Fatal(usize),
    /// What is answered is durable; `true`: the next change, too.
    Durable(bool),
    /// Some of the changes stay placeholders, the others get other numbers.
    Epoch(usize),
    /// `true`: all of the session before is durable.
    Session(bool),
}

fn call() -> impl Strategy<Value = Call> {
    prop_oneof![
        6 => (0..60_usize, 0..5_u64, any::<bool>())
            .prop_map(|(len, request, is_acknowledged)| Call::Put { len, request, is_acknowledged }),
        5 => Just(Call::Answer),
        1 => (0..4_usize).prop_map(Call::Fatal),
        3 => any::<bool>().prop_map(Call::Durable),
        1 => (0..4_usize).prop_map(Call::Epoch),
        1 => any::<bool>().prop_map(Call::Session),
    ]
}

#[derive(Clone, Debug, Default)]
struct Model {
    changes: Vec<Put>,
    session: u128,
    epoch: u32,
    answered: u64,
    durable: u64,
}

/// Session, epoch, newest answered change, how far all is durable, and the other changes.
type Stream = (u128, u32, u64, u64, Vec<NotedChange>);

impl Model {
    fn last(&self) -> u64 {
        self.changes.last().map_or(self.answered, |last| last.seq)
    }

    fn state(&self) -> Stream {
        let changes = self.changes.iter().map(Put::noted).collect();
        (self.session, self.epoch, self.answered, self.durable, changes)
    }

    fn push(&mut self, ring: &mut Ring<RecordedWords>, put: Put) {
        let mut put = Put { seq: self.last() + 1, epoch: self.epoch, ..put };
        put.at = ring.put((put.seq, put.epoch), &mut put.pending());
        self.changes.push(put);
    }

    fn make(&mut self, ring: &mut Ring<RecordedWords>, call: Call) {
        match call {
            Call::Put { len, request, is_acknowledged } => {
                let (seq, epoch, is_fatal, at) = (0, 0, false, 0);
                let put = Put { seq, epoch, len, request, is_acknowledged, is_fatal, at };
                self.push(ring, put);
            }
            Call::Answer if !self.changes.is_empty() => {
                self.answered = self.changes.remove(0).seq;
                ring.answered(self.answered, self.changes.first().map(|first| first.at));
            }
            Call::Answer => {}
            Call::Fatal(which) => {
                if let Some(put) = self.changes.get_mut(which) {
                    put.is_fatal = true;
                    ring.set_fatal(put.at);
                }
            }
            Call::Durable(next) => {
                self.durable = self.answered + u64::from(next && !self.changes.is_empty());
                ring.durable(self.durable);
            }
            Call::Epoch(sent) => {
                let (before, sent) =
                    (std::mem::take(&mut self.changes), sent.min(self.changes.len()));
                ring.begin();
                for put in &before[..sent] {
                    let mut put = Put { len: 0, request: 0, is_fatal: false, ..put.clone() };
                    put.at = ring.put((put.seq, put.epoch), &mut put.pending());
                    self.changes.push(put);
                }
                self.epoch += 1;
                for put in before {
                    self.push(ring, Put { is_fatal: false, ..put });
                }
                self.durable = self.durable.min(self.answered);
                ring.commit((self.session, 9), (self.epoch, self.answered, self.durable));
            }
            Call::Session(is_durable) => {
                let before = std::mem::take(&mut self.changes);
                ring.begin();
                // It would be true of the numbers of one session only.
                ring.durable(u64::MAX);
                (self.session, self.epoch, self.answered) = (self.session + 1, 0, 5);
                self.durable = if is_durable { 5 } else { 0 };
                for put in before {
                    self.push(ring, Put { is_fatal: false, ..put });
                }
                ring.commit((self.session, 9), (self.epoch, self.answered, self.durable));
            }
        }
    }
}

fn changes_in(memory: &RecordedWords) -> Stream {
    let base = base_in(memory).unwrap();
    let changes = ring::left_in(memory, &base).expect("it is whole");
    let answered = changes.first().map_or(base.answered, |first| first.seq - 1);
    (base.session, base.epoch, answered, base.durable, changes)
}

proptest! {
    #[test]
    fn a_kill_between_any_two_stores_leaves_one_of_both_streams(calls in vec(call(), 1..40)) {
        let notes = Arc::new(Notes::on(RecordedWords::default()));
        // The end of the ring is in the middle of all this.
        let mut ring = Ring::beginning_at(Arc::clone(&notes), RING_WORDS as u64 - 100);
        let mut model = Model::default();
        ring.commit((0, 9), (0, 0, 0));
        let seen = RecordedWords::default();
        notes.memory.take_stores().into_iter().for_each(|(at, value)| seen.set(at, value));
        for call in calls {
            let before = model.state();
            model.make(&mut ring, call);
            let after = model.state();
            let stores = notes.memory.take_stores();
            let last = stores.len();
            for (number, (at, value)) in stores.into_iter().enumerate() {
                seen.set(at, value);
                let found = changes_in(&seen);
                prop_assert!(found == before || found == after, "{call:?} at {number}: {found:?}");
                prop_assert!(number + 1 < last || found == after, "{call:?}: {found:?}");
            }
            prop_assert_eq!(changes_in(&seen), after);
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Note {
    Node(Ino, u64, Option<u128>),
    Forgotten(Ino),
    Told(Ino),
    Opened(u64, Ino),
    Closed(u64),
    Listing(u64, u64),
    Locks(Ino, u64, u64),
}

fn note() -> impl Strategy<Value = Note> {
    let ino = || 1..4_u64;
    prop_oneof![
        (ino(), 1..4_u64, any::<bool>()).prop_map(|(ino, lookups, is_named)| {
            Note::Node(ino, lookups, is_named.then_some(u128::from(ino) << 64 | 5))
        }),
        ino().prop_map(Note::Forgotten),
        ino().prop_map(Note::Told),
        (1..4_u64, ino()).prop_map(|(fh, ino)| Note::Opened(fh, ino)),
        (1..6_u64).prop_map(Note::Closed),
        (4..6_u64, 0..9_u64).prop_map(|(fh, names)| Note::Listing(fh, names)),
        (ino(), 0..3_u64, 1..3_u64).prop_map(|(ino, count, step)| Note::Locks(ino, count, step)),
    ]
}

/// Lookups and capability of each inode; open files; listings.
type Tables =
    (BTreeMap<Ino, (u64, Option<u128>)>, BTreeMap<u64, Ino>, BTreeMap<u64, u64>, BTreeSet<String>);

fn locks(ino: Ino, count: u64, step: u64) -> Vec<(u64, FileLock)> {
    let lock = |number: u64| FileLock {
        start: number * step,
        end: u64::MAX,
        kind: libc::F_WRLCK,
        pid: u32::MAX - 1,
        owner: ino,
        flock: number.is_multiple_of(2),
    };
    (0..count).map(|number| (number + 1, lock(number))).collect()
}

fn tables_in(memory: &RecordedWords) -> Tables {
    let noted = NotedTables::of(memory);
    (
        noted.nodes.iter().map(|node| (node.ino, (node.lookups, node.capability))).collect(),
        noted.files.iter().map(|file| (file.fh, file.ino)).collect(),
        noted.dirs.iter().map(|dir| (dir.fh, dir.names)).collect(),
        noted.locks.iter().map(|lock| format!("{lock:?}")).collect(),
    )
}

fn make(notes: &mut TableNotes<RecordedWords>, model: &mut Tables, note: Note) {
    let (nodes, files, dirs, all_locks) = model;
    match note {
        Note::Node(ino, lookups, capability) => {
            nodes.insert(ino, (lookups, capability));
            notes.node(&NotedNode { ino, lookups, capability, ..NotedNode::default() });
        }
        Note::Forgotten(ino) => {
            let capability = nodes.get(&ino).and_then(|(_, capability)| *capability);
            nodes.entry(ino).and_modify(|node| node.0 = 0);
            notes.forgotten(&NotedNode { ino, capability, ..NotedNode::default() });
        }
        Note::Told(ino) => {
            nodes.remove(&ino);
            notes.remove_node(ino);
        }
        Note::Opened(fh, ino) => {
            files.insert(fh, ino);
            notes.file(&NotedFile { fh, ino, flags: -1, lost: false });
        }
        Note::Closed(fh) => {
            files.remove(&fh);
            dirs.remove(&fh);
            notes.remove_file(fh);
        }
        Note::Listing(fh, names) => {
            dirs.insert(fh, names);
            notes.dir(&NotedDir { fh, ino: 1, names });
        }
        Note::Locks(ino, count, step) => {
            let now = locks(ino, count, step);
            all_locks.retain(|text| !text.contains(&format!("NotedLock {{ ino: {ino},")));
            for (fh, lock) in &now {
                all_locks.insert(format!("{:?}", NotedLock { ino, fh: *fh, lock: *lock }));
            }
            notes.locks(ino, now.into_iter());
        }
    }
}

proptest! {
    #[test]
    fn a_kill_between_any_two_stores_leaves_what_the_kernel_knows(
        calls in vec(note(), 1..40),
    ) {
        let notes = Arc::new(Notes::on(RecordedWords::default()));
        let mut tables = TableNotes::new(Arc::clone(&notes));
        let mut model = Tables::default();
        let seen = RecordedWords::default();
        notes.memory.take_stores().into_iter().for_each(|(at, value)| seen.set(at, value));
        for call in calls {
            let before = model.clone();
            make(&mut tables, &mut model, call);
            for (at, value) in notes.memory.take_stores() {
                seen.set(at, value);
                let (nodes, files, dirs, locks) = tables_in(&seen);
                for (ino, node) in &nodes {
                    let is_one = [&before, &model].iter().any(|of| of.0.get(ino) == Some(node));
                    let capability = before.0.get(ino).map(|node| node.1);
                    // Its capability does not change, but may come or go with the lookups.
                    prop_assert!(is_one || capability.is_some(), "{call:?}: {node:?}");
                }
                prop_assert!(files == before.1 || files == model.1);
                prop_assert!(dirs == before.2 || dirs == model.2);
                let (had, has) = (&before.3, &model.3);
                prop_assert!(had.intersection(has).all(|lock| locks.contains(lock)));
                prop_assert!(locks.iter().all(|lock| had.contains(lock) || has.contains(lock)));
                // No lock goes before all new ones are there.
                let all_new = has.iter().all(|lock| locks.contains(lock));
                prop_assert!(all_new || had.iter().all(|lock| locks.contains(lock)));
            }
            prop_assert_eq!(&tables_in(&seen), &model);
        }
    }
}

#[test]
fn answers_are_found_by_the_requests_of_the_kernel() {
    let notes = Notes::new().unwrap();
    for request in 1..=ANSWERS_MAX as u64 + 1 {
        notes.answered(request, Some(request + 1), &Outcome::Count { count: request });
    }
    let noted = Notes::left(notes.file().unwrap()).unwrap();
    assert_eq!(noted.answers.len(), ANSWERS_MAX, "the oldest one had to go");
    let outcome = Outcome::Count { count: 2 };
    assert_eq!(noted.answers.get(&2), Some(&NotedAnswer { opens: 3, outcome }));
    notes.set_flag(flag::LOSSY, true);
    notes.set_flag(flag::RESERVED, true);
    notes.set_flag(flag::LOSSY, false);
    assert_eq!(Notes::left(notes.file().unwrap()).unwrap().flags, flag::RESERVED);
}

#[test]
fn a_ring_without_room_says_so_until_it_is_empty() {
    let notes = Notes::new().unwrap();
    let mut ring = Ring::new(Arc::clone(&notes));
    let mut last = 0;
    while !ring.is_full() {
        last += 1;
        ring.put((last, 0), &mut pending(1 << 20, last, Role::Awaited));
    }
    assert!(last > 32, "twice what may be unanswered and acknowledged");
    assert!(Notes::left(notes.file().unwrap()).is_none());
    ring.answered(last - 1, Some(0));
    assert!(Notes::left(notes.file().unwrap()).is_none(), "the last one is not noted");
    ring.answered(last, None);
    let noted = Notes::left(notes.file().unwrap()).expect("all is noted again");
    assert_eq!((noted.base.answered, noted.changes.len()), (last, 0));
    ring.put((last + 1, 0), &mut pending(9, 1, Role::Acknowledged));
    assert_eq!(Notes::left(notes.file().unwrap()).unwrap().changes.len(), 1);
}
