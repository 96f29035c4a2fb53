//! A program on one client, which knows what it was told: each step is checked against that, and
//! each loss must have been told.
//!
//! It appends records to two files that all share, and makes, renames and removes files of its own
//! in two directories that all share. What it has of its own it knows exactly, until somebody has
//! told it of a loss; then it looks what is left: of each name a state that the name has had since
//! it was durable.

use std::collections::{BTreeMap, BTreeSet};

use ferry_sim::device::SimRng;

use super::super::*;
use super::network::Way;
use super::{DIRS, Ledger, Sim, State, records};
use crate::rt::thread;

/// Names of a program's own in each directory.
const NAMES: u64 = 3;
/// A loss is over after so many tries.
const TRIES_MAX: u32 = 50;

/// What a name has: a file with these contents, which are also its own name for it.
type Held = Option<String>;
type Slot = (usize, u64);

pub(super) struct Program {
    sim: Arc<Sim>,
    id: u64,
    random: SimRng,
    way: Arc<Way>,
    client: Client,
    dirs: Vec<Ino>,
    logs: Vec<(Ino, u64)>,
    /// The file that is written under a lock.
    locked: Option<(Ino, u64)>,
    next: u64,
    /// Files that nobody changes and that its kernel knows, by their numbers in their directory.
    known: BTreeMap<u64, Ino>,
    /// What its names have had since they were durable, the newest last.
    names: BTreeMap<Slot, Vec<Held>>,
    /// Contents that are durable, and that nothing was asked that ends them.
    durable: BTreeSet<String>,
    done: String,
}

/// What is left of a program that has gone without a word.
pub(super) struct Left {
    id: u64,
    names: BTreeMap<Slot, Vec<Held>>,
    durable: BTreeSet<String>,
}

fn name(id: u64, slot: Slot) -> String {
    format!("p{id}.{}", slot.1)
}

impl Program {
    pub(super) fn new(sim: &Arc<Sim>, id: u64, random: SimRng) -> Self {
        let before_of = sim.plan.before_of;
        let is_before = before_of > 0 && id.is_multiple_of(before_of);
        let way = Way::new(&sim.net, id, is_before);
        let waiting_of = sim.plan.waiting_of;
        let client =
            super::mount(&way, id, waiting_of == 0 || !id.is_multiple_of(waiting_of), &sim.env);
        let names =
            (0..DIRS).flat_map(|dir| (0..NAMES).map(move |n| ((dir, n), vec![None]))).collect();
        let (sim, next, done) = (Arc::clone(sim), 0, String::new());
        let mut program = Self {
            sim,
            id,
            random,
            way,
            client,
            dirs: Vec::new(),
            logs: Vec::new(),
            locked: None,
            next,
            known: BTreeMap::new(),
            names,
            durable: BTreeSet::new(),
            done,
        };
        for _ in 0..TRIES_MAX {
            if program.open_all().is_ok() {
                (0..program.sim.plan.known).for_each(|n| program.know(n));
                return program;
            }
        }
        panic!("{id}: nothing can be opened");
    }

    /// Looks up the directories, and opens the shared files.
    fn open_all(&mut self) -> Done {
        for (ino, fh) in self.logs.drain(..).chain(self.locked.take()) {
            self.client.close(ino, fh);
        }
        self.dirs.clear();
        for index in 0..DIRS {
            let dir = self.client.lookup(ROOT, &format!("d{index}"))?.expect("it is durable").ino;
            let log = self.client.lookup(dir, "log")?.expect("it is durable").ino;
            self.dirs.push(dir);
            self.logs.push((log, self.client.open(log)?));
        }
        let locked = self.client.lookup(self.dirs[0], "locked")?.expect("it is durable").ino;
        self.locked = Some((locked, self.client.open(locked)?));
        Ok(())
    }

    fn say(&mut self, what: String) {
        self.sim.say(self.id, what.clone());
        self.done = what;
    }

    fn at(&self) -> String {
        format!("seed {}, program {}: {}", self.sim.seed, self.id, self.done)
    }

    /// What was told of an operation; `None`: of a loss, too, and it has been looked what is left.
    fn told<T>(&mut self, done: Done<T>) -> Option<T> {
        match done {
            Ok(value) => Some(value),
            // A file was looked up, and then lost before it was opened.
            Err(Errno(libc::ESTALE)) => {
                self.must(false, "a stale file");
                None
            }
            Err(error) => {
                self.lost(error);
                None
            }
        }
    }

    /// It must be so, unless something was lost; then that is told now. Returns whether it is so.
    fn must(&mut self, so: bool, what: &str) -> bool {
        if so {
            return true;
        }
        self.sim.say(self.id, format!("{}: {what}", self.done));
        let told = self.client.sync();
        assert_eq!(
            told,
            Err(Errno(libc::EIO)),
            "{}: {what}, and nobody was told of a loss",
            self.at()
        );
        self.lost(Errno(libc::EIO));
        false
    }

    /// Something may be lost: all of it is told, then it is looked what is left.
    fn lost(&mut self, error: Errno) {
        assert_eq!(error, Errno(libc::EIO), "{}", self.at());
        if self.sim.all_come_back() {
            return self.unknown();
        }
        assert!(self.sim.is_rough(), "{}: nothing may be lost", self.at());
        self.sim.say(self.id, format!("{}: looks what is left", self.done));
        self.sim.losses.fetch_add(1, Ordering::SeqCst);
        for _ in 0..TRIES_MAX {
            if self.client.sync().is_err() || self.open_all().is_err() {
                continue;
            }
            let Ok(left) = self.look() else { continue };
            // Nothing was lost while it looked.
            if self.client.sync().is_ok() {
                self.sim.ledger.lock().doubt(self.id);
                return self.believe(&left);
            }
        }
        panic!("{}: losses do not end", self.at());
    }

    /// A crash came before the answer: whether this one was made nobody knows. All that was
    /// answered is there, or is replayed.
    fn unknown(&mut self) {
        assert_eq!(self.client.sync(), Ok(()), "{}: nothing else may be lost", self.at());
        self.sim.ledger.lock().synced(self.id, None);
        for _ in 0..TRIES_MAX {
            if self.open_all().is_ok()
                && let Ok(left) = self.look()
            {
                return self.believe(&left);
            }
        }
        panic!("{}: nothing can be opened any more", self.at());
    }

    /// What its names have now.
    fn look(&self) -> Done<BTreeMap<Slot, Held>> {
        let mut all = BTreeMap::new();
        for slot in self.names.keys() {
            all.insert(*slot, self.held(*slot)?);
        }
        Ok(all)
    }

    fn held(&self, slot: Slot) -> Done<Held> {
        let Some(attr) = self.client.lookup(self.dirs[slot.0], &name(self.id, slot))? else {
            return Ok(None);
        };
        let fh = self.client.open(attr.ino)?;
        let bytes = self.client.read(attr.ino, fh, 100);
        self.client.close(attr.ino, fh);
        Ok(Some(String::from_utf8_lossy(&bytes?).into_owned()))
    }

    fn believe(&mut self, left: &BTreeMap<Slot, Held>) {
        check(&self.at(), &self.names, &self.durable, left);
        for (slot, held) in left {
            self.names.insert(*slot, vec![held.clone()]);
        }
        self.all_durable();
    }

    /// All that is there is durable: a sync has said so.
    fn all_durable(&mut self) {
        for states in self.names.values_mut() {
            states.drain(..states.len() - 1);
        }
        let there = self.names.values().filter_map(|states| states[0].clone());
        self.durable = there.filter(|tag| !tag.is_empty()).collect();
    }

    fn newest(&self, slot: Slot) -> Held {
        self.names[&slot].last().cloned().flatten()
    }

    fn becomes(&mut self, slot: Slot, held: Held) {
        self.names.get_mut(&slot).expect("one of its own").push(held);
    }

    fn slot(&mut self) -> Slot {
        (self.random.below(DIRS as u64) as usize, self.random.below(NAMES))
    }

    pub(super) fn step(&mut self) {
        if self.sim.plan.locked_of > 0 && self.random.chance(1, self.sim.plan.locked_of) {
            return self.write_locked();
        }
        match self.random.below(if self.sim.plan.known > 0 { 26 } else { 22 }) {
            0..6 => self.append(),
            6..8 => self.read_log(),
            8..9 => self.sync_log(),
            9..13 => self.make(),
            13..15 => self.rename(),
            15..16 => self.remove(),
            16..17 => self.look_at_one(),
            17..18 => self.sync(),
            // A client that wants a lock after a crash waits until the grace period is over.
            18..19 if !self.sim.all_come_back() => self.lock(),
            19..21 => self.walk(),
            21..22 => self.list(),
            _ => {
                let n = self.random.below(self.sim.plan.known);
                self.know(n);
            }
        }
    }

    /// Looks a file up that nobody changes, or uses its inode: that is known, whatever has become
    /// of the server. Or has it forgotten.
    fn know(&mut self, n: u64) {
        self.say(format!("knows {n}"));
        let Some(ino) = self.known.get(&n).copied() else {
            let dir = self.client.lookup(ROOT, "known");
            let found = dir.and_then(|dir| {
                self.client.lookup(dir.expect("it is durable").ino, &n.to_string())
            });
            if let Some(found) = self.told(found) {
                self.known.insert(n, found.expect("it is durable").ino);
            }
            return;
        };
        if self.random.chance(1, 3) {
            self.known.remove(&n);
            return self.client.fs.forget(ino, 1);
        }
        let attr = self.client.me.call(|cx| self.client.fs.getattr(cx, ino, None));
        if let Some((attr, _)) = self.told(attr) {
            assert_eq!(attr.ino, ino, "{}", self.at());
        }
    }

    fn append(&mut self) {
        let index = self.random.index(DIRS);
        let number = self.next;
        self.next += 1;
        self.say(format!("appends {number} to {index}"));
        let record = (index, self.id, number);
        self.sim.ledger.lock().states.insert(record, State::Doubtful);
        let (ino, fh) = self.logs[index];
        let done = self.client.append(ino, fh, records::bytes(self.id, number).as_bytes());
        if let Some(count) = self.told(done) {
            assert_eq!(count, records::LEN, "{}", self.at());
            self.sim.ledger.lock().states.insert(record, State::Acknowledged);
        }
    }

    fn read_log(&mut self) {
        let index = self.random.index(DIRS);
        self.say(format!("reads {index}"));
        let before = self.sim.ledger.lock().acknowledged(index);
        let (ino, fh) = self.logs[index];
        let read = self.client.read(ino, fh, 1 << 20);
        if let Some(bytes) = self.told(read) {
            self.sim.ledger.lock().seen(index, &bytes, &before, &self.at());
        }
    }

    fn sync_log(&mut self) {
        let index = self.random.index(DIRS);
        self.say(format!("syncs {index}"));
        let (ino, fh) = self.logs[index];
        let data_only = self.random.chance(1, 2);
        let done = self.client.me.call(|cx| self.client.fs.fsync(cx, ino, fh, data_only));
        if self.told(done).is_some() {
            self.sim.ledger.lock().synced(self.id, Some(index));
        }
    }

    fn make(&mut self) {
        let slot = self.slot();
        let tag = format!("{}:{}", self.id, self.next);
        self.next += 1;
        self.say(format!("makes {slot:?} {tag}"));
        let is_there = self.newest(slot).is_some();
        match self.client.create(self.dirs[slot.0], &name(self.id, slot)) {
            Ok((ino, fh)) => {
                // If what was there is lost, this is what is left of it.
                self.becomes(slot, Some(String::new()));
                if !self.must(!is_there, "made, though it was there") {
                    self.becomes(slot, Some(String::new()));
                }
                let done = self.client.write(ino, fh, 0, tag.as_bytes());
                if self.told_of_file(slot, &tag, done).is_none() {
                    return self.client.close(ino, fh);
                }
                if self.random.chance(1, 4) {
                    let done = self.client.fsync(ino, fh);
                    if self.told(done).is_some() && self.newest(slot).as_ref() == Some(&tag) {
                        self.names.insert(slot, vec![Some(tag.clone())]);
                        self.durable.insert(tag);
                    }
                }
                self.client.close(ino, fh);
            }
            Err(Errno(libc::EEXIST)) => {
                self.must(is_there, "not made, though it was not there");
            }
            Err(error) => {
                self.becomes(slot, Some(String::new()));
                self.lost(error);
            }
        }
    }

    /// The first write of a file, done or perhaps not.
    fn told_of_file(&mut self, slot: Slot, tag: &str, done: Done<u64>) -> Option<u64> {
        self.becomes(slot, Some(tag.into()));
        self.told(done)
    }

    fn rename(&mut self) {
        let (from, to) = (self.slot(), self.slot());
        self.say(format!("renames {from:?} to {to:?}"));
        if from == to {
            return;
        }
        let (moved, replaced) = (self.newest(from), self.newest(to));
        // A loss that nobody was told of yet may have brought back what was there before.
        let may_be_moved: Vec<Held> =
            self.names[&from].iter().filter(|state| state.is_some()).cloned().collect();
        let (old, new) = (name(self.id, from), name(self.id, to));
        let done = self.client.move_to(self.dirs[from.0], &old, self.dirs[to.0], &new);
        match done {
            Err(Errno(libc::ENOENT)) => {
                self.must(moved.is_none(), "not there to be renamed");
            }
            done => {
                if let (false, Some(replaced)) = (may_be_moved.is_empty(), &replaced) {
                    self.durable.remove(replaced);
                }
                may_be_moved.into_iter().for_each(|state| self.becomes(to, state));
                if moved.is_some() {
                    self.becomes(from, None);
                    self.becomes(to, moved.clone());
                }
                if self.told(done).is_some() {
                    self.must(moved.is_some(), "renamed, though it was not there");
                }
            }
        }
    }

    fn remove(&mut self) {
        let slot = self.slot();
        self.remove_one(slot);
    }

    fn remove_one(&mut self, slot: Slot) {
        self.say(format!("removes {slot:?}"));
        let was = self.newest(slot);
        if let Some(tag) = &was {
            self.durable.remove(tag);
        }
        match self.client.unlink(self.dirs[slot.0], &name(self.id, slot)) {
            Err(Errno(libc::ENOENT)) => {
                self.must(was.is_none(), "not there to be removed");
            }
            done => {
                self.becomes(slot, None);
                if self.told(done).is_some() {
                    self.must(was.is_some(), "removed, though it was not there");
                }
            }
        }
    }

    fn look_at_one(&mut self) {
        let slot = self.slot();
        self.say(format!("looks at {slot:?}"));
        let held = self.held(slot);
        if let Some(held) = self.told(held) {
            let expected = self.newest(slot);
            self.must(held == expected, &format!("{held:?} instead of {expected:?}"));
        }
    }

    fn list(&mut self) {
        let index = self.random.index(DIRS);
        self.say(format!("lists {index}"));
        let listed = self.client.list(self.dirs[index]);
        if let Some(listed) = self.told(listed) {
            let mine = format!("p{}.", self.id);
            let found: Vec<&String> =
                listed.iter().filter(|name| name.starts_with(&mine)).collect();
            let there = self.names.iter().filter(|((dir, _), states)| {
                *dir == index && states.last().is_some_and(Option::is_some)
            });
            let expected: Vec<String> = there.map(|(slot, _)| name(self.id, *slot)).collect();
            let so = found.len() == expected.len()
                && found.iter().zip(&expected).all(|(a, b)| **a == *b);
            self.must(so, &format!("{found:?} instead of {expected:?}"));
        }
    }

    /// Goes through all that there is, as `ls -lR` does; at times it removes one of its names where
    /// it comes by.
    fn walk(&mut self) {
        self.say("walks".into());
        let top = self.client.list(ROOT);
        if self.told(top).is_none() {
            return;
        }
        let removes = self.random.chance(1, 2);
        for index in 0..DIRS {
            self.say(format!("walks, and has come to {index}"));
            let dir = self.dirs[index];
            let listed = self.client.list(dir);
            let Some(listed) = self.told(listed) else { return };
            for n in 0..NAMES {
                let slot = (index, n);
                let expected = self.newest(slot);
                let is_listed = listed.contains(&name(self.id, slot));
                self.must(is_listed == expected.is_some(), "listed or not");
                // Something may have been lost, and told, just now.
                let expected = self.newest(slot);
                let held = self.held(slot);
                let Some(held) = self.told(held) else { return };
                self.must(held == expected, &format!("{held:?} instead of {expected:?}"));
            }
            if removes && let Some(n) = (0..NAMES).find(|n| self.newest((index, *n)).is_some()) {
                self.remove_one((index, n));
            }
        }
    }

    fn sync(&mut self) {
        self.say("syncs all".into());
        let done = self.client.sync();
        if self.told(done).is_some() {
            self.sim.ledger.lock().synced(self.id, None);
            self.all_durable();
        }
    }

    /// Waits for a lock that all want, and gives it back.
    fn lock(&mut self) {
        self.say("locks".into());
        let (ino, fh) = self.logs[0];
        let locked = self.client.lock(ino, fh, self.id, libc::F_WRLCK, true);
        let opened = self.told(locked);
        // A lock may be held though taking it was told to have failed: its owner gives it back.
        let unlocked = self.client.lock(ino, fh, self.id, libc::F_UNLCK, false);
        if opened.is_some() {
            self.told(unlocked);
        }
    }

    /// Writes under a lock that all want: what it has written is there until it gives the lock
    /// back.
    fn write_locked(&mut self) {
        self.say("locks, to write".into());
        let (ino, fh) = self.locked.expect("it is open");
        let locked = self.client.lock(ino, fh, self.id, libc::F_WRLCK, true);
        if self.told(locked).is_some() {
            for _ in 0..3 {
                let tag = format!("{:>8}:{:>8}", self.id, self.next);
                self.next += 1;
                self.say(format!("writes {tag} under the lock"));
                let done = self.client.write(ino, fh, 0, tag.as_bytes());
                if self.told(done).is_none() {
                    break;
                }
                let read = self.client.read(ino, fh, 100);
                let Some(read) = self.told(read) else { break };
                let read = String::from_utf8_lossy(&read).into_owned();
                // After a loss its files are opened again, and the lock is not held any more.
                if !self.must(read == tag, &format!("{read:?} is there instead")) {
                    break;
                }
            }
        }
        if self.sim.all_come_back() {
            assert_eq!(self.client.fs.connection()["lost_locks"], 0, "{}", self.at());
        }
        let (ino, fh) = self.locked.expect("it is open");
        let unlocked = self.client.lock(ino, fh, self.id, libc::F_UNLCK, false);
        self.told(unlocked);
    }

    /// Goes without a word.
    pub(super) fn vanish(self) -> Left {
        self.say_vanished();
        self.sim.ledger.lock().doubt(self.id);
        let Self { sim, id, names, durable, way, client, .. } = self;
        way.vanish();
        // It would say goodbye, which nobody hears.
        sim.ending.lock().push(thread::spawn(move || drop(client)));
        Left { id, names, durable }
    }

    fn say_vanished(&self) {
        self.sim.say(self.id, "has gone without a word".into());
    }

    /// The network is well: all is made durable, and is as it should be.
    pub(super) fn finish(mut self) -> Left {
        self.say("ends".into());
        // A crash may come as late as this.
        let left = loop {
            let done = self.client.sync();
            if self.told(done).is_none() {
                continue;
            }
            self.sim.ledger.lock().synced(self.id, None);
            self.all_durable();
            let left = self.look();
            if let Some(left) = self.told(left) {
                break left;
            }
        };
        let so = left.iter().all(|(slot, held)| self.newest(*slot) == *held);
        assert!(so, "{}: {left:?} instead of {:?}", self.at(), self.names);
        self.client.fs.close();
        self.sim.say(self.id, "has ended".into());
        Left { id: self.id, names: self.names, durable: self.durable }
    }
}

/// Whether what is left may be left.
fn check(
    at: &str,
    names: &BTreeMap<Slot, Vec<Held>>,
    durable: &BTreeSet<String>,
    left: &BTreeMap<Slot, Held>,
) {
    let mut found = BTreeSet::new();
    for (slot, held) in left {
        let states = &names[slot];
        let may_be = |state: &Held| match (state, held) {
            (Some(tag), Some(held)) if durable.contains(tag) => held == tag,
            // Contents that were not durable may be lost in part.
            (Some(tag), Some(held)) => tag.starts_with(held.trim_end_matches('\0')),
            (state, held) => state == held,
        };
        assert!(
            states.iter().any(may_be),
            "{at}: {slot:?} has {held:?}, which it has never had: {states:?}"
        );
        if let Some(tag) = held.as_ref().filter(|tag| !tag.is_empty()) {
            assert!(found.insert(tag.clone()), "{at}: {tag} is there twice");
        }
    }
    for tag in durable {
        assert!(found.contains(tag), "{at}: {tag} was durable, and is lost; left is {left:?}");
    }
}

impl Left {
    /// On a volume that nobody uses.
    pub(super) fn check(&self, fs: &LocalFs, at: &str) {
        let left = self.names.keys().map(|slot| {
            let dir = super::inode(fs, ROOT, &format!("d{}", slot.0)).expect("it is durable");
            let held = super::inode(fs, dir, &name(self.id, *slot));
            (*slot, held.map(|ino| String::from_utf8_lossy(&super::contents(fs, ino)).into_owned()))
        });
        check(&format!("{at}, program {}", self.id), &self.names, &self.durable, &left.collect());
    }
}

impl Ledger {
    /// Whether it is durable is not known of what was not synced.
    fn doubt(&mut self, id: u64) {
        for ((_, by, _), state) in &mut self.states {
            if *by == id && *state == State::Acknowledged {
                *state = State::Doubtful;
            }
        }
    }

    fn synced(&mut self, id: u64, index: Option<usize>) {
        for ((at, by, _), state) in &mut self.states {
            if *by == id && *state == State::Acknowledged && index.is_none_or(|index| index == *at)
            {
                *state = State::Durable;
            }
        }
    }
}
