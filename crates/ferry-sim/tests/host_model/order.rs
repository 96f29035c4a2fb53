//! A small file system as a sequence of states, and the search for an order in which operations
//! that ran at the same time could have run one by one (Wing and Gong, 1993, with the memory of
//! states that Lowe added in 2017).

use ferry_fs::Ino;
use std::collections::{BTreeMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// Directories, each with names of one letter, and files that everybody holds open.
pub const DIRS: usize = 2;
pub const FILES: usize = 2;

/// A directory by its number, and a name.
pub type Entry = (usize, u8);

/// One operation; files by their number, bytes by the tag that fills them.
#[derive(Clone, Debug)]
pub enum Op {
    Create(Entry),
    Mkdir(Entry),
    Unlink(Entry),
    Rmdir(Entry),
    Rename { from: Entry, to: Entry, how: How },
    Link(usize, Entry),
    Lookup(Entry),
    List(usize),
    StatDir(usize),
    Stat(usize),
    Read { file: usize, offset: usize, len: usize },
    Write { file: usize, offset: usize, len: usize, tag: u8 },
    Append { file: usize, len: usize, tag: u8 },
    Truncate { file: usize, size: usize },
    Fsync(usize),
    SyncDir(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    Replace,
    NoReplace,
    Exchange,
}

/// What an operation answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Done,
    Error(i32),
    /// The inode that was made or found.
    Ino(Option<Ino>),
    Names(BTreeMap<u8, Ino>),
    /// Link count and size.
    Stat(u64, usize),
    Bytes(Arc<Vec<u8>>),
}

/// An operation as it was seen: it took effect at some moment between `began` and `ended`.
#[derive(Clone, Debug)]
pub struct Event {
    pub thread: usize,
    pub op: Op,
    pub answer: Answer,
    pub began: u64,
    pub ended: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Node {
    File { nlink: u64 },
    Dir,
}

/// A state that an order of operations leads to.
#[derive(Clone, Debug, Hash)]
pub struct State {
    nodes: BTreeMap<Ino, Node>,
    dirs: [BTreeMap<u8, Ino>; DIRS],
    files: [Ino; FILES],
    #[allow(clippy::type_complexity, reason = "contents and their digest")]
    contents: [Contents; FILES],
}

#[derive(Clone, Debug)]
struct Contents {
    bytes: Arc<Vec<u8>>,
    digest: u32,
}

impl Hash for Contents {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.bytes.len(), self.digest).hash(state);
    }
}

impl State {
    /// File number n has the name (n modulo DIRS, n), and so many bytes of zeros.
    pub fn new(files: [Ino; FILES], len: usize) -> Self {
        let contents = Contents { bytes: Arc::new(vec![0; len]), digest: 0 };
        let mut dirs: [BTreeMap<u8, Ino>; DIRS] = Default::default();
        for (n, ino) in files.iter().enumerate() {
            dirs[n % DIRS].insert(n as u8, *ino);
        }
        let nodes = files.iter().map(|ino| (*ino, Node::File { nlink: 1 })).collect();
        Self { nodes, dirs, files, contents: std::array::from_fn(|_| contents.clone()) }
    }

    fn at(&self, (dir, name): Entry) -> Option<(Ino, Node)> {
        let ino = *self.dirs[dir].get(&name)?;
        Some((ino, self.nodes[&ino]))
    }

    /// Does it, if it can answer so; `false` if it cannot.
    fn step(&mut self, op: &Op, answer: &Answer) -> bool {
        let expected = match self.apply(op, answer) {
            Ok(expected) => expected,
            Err(errno) => Answer::Error(errno),
        };
        expected == *answer
    }

    fn apply(&mut self, op: &Op, told: &Answer) -> Result<Answer, i32> {
        match op {
            Op::Create(entry) => return self.make(*entry, Node::File { nlink: 1 }, told),
            Op::Mkdir(entry) => return self.make(*entry, Node::Dir, told),
            Op::Unlink(entry) => {
                match self.at(*entry).ok_or(libc::ENOENT)? {
                    (_, Node::Dir) => return Err(libc::EISDIR),
                    (ino, Node::File { .. }) => self.drop_name(ino),
                }
                self.dirs[entry.0].remove(&entry.1);
            }
            Op::Rmdir(entry) => {
                let (ino, node) = self.at(*entry).ok_or(libc::ENOENT)?;
                if node != Node::Dir {
                    return Err(libc::ENOTDIR);
                }
                self.nodes.remove(&ino);
                self.dirs[entry.0].remove(&entry.1);
            }
            Op::Rename { from, to, how } => self.rename(*from, *to, *how)?,
            Op::Link(file, entry) => {
                if self.at(*entry).is_some() {
                    return Err(libc::EEXIST);
                }
                let ino = self.files[*file];
                let Some(Node::File { nlink }) = self.nodes.get_mut(&ino) else {
                    return Err(libc::ENOENT);
                };
                *nlink += 1;
                self.dirs[entry.0].insert(entry.1, ino);
            }
            Op::Lookup(entry) => return Ok(Answer::Ino(self.at(*entry).map(|(ino, _)| ino))),
            Op::List(dir) => return Ok(Answer::Names(self.dirs[*dir].clone())),
            Op::StatDir(dir) => {
                let below =
                    self.dirs[*dir].values().filter(|ino| self.nodes[ino] == Node::Dir).count();
                return Ok(Answer::Stat(2 + below as u64, self.dirs[*dir].len()));
            }
            Op::Stat(file) => {
                let nlink = match self.nodes.get(&self.files[*file]) {
                    Some(Node::File { nlink }) => *nlink,
                    _ => 0,
                };
                return Ok(Answer::Stat(nlink, self.contents[*file].bytes.len()));
            }
            Op::Read { file, offset, len } => {
                let bytes = &self.contents[*file].bytes;
                let start = (*offset).min(bytes.len());
                let found = &bytes[start..(start + len).min(bytes.len())];
                // The answer itself where it is right: nothing is copied then.
                return match told {
                    Answer::Bytes(told) if ***told == *found => Ok(Answer::Bytes(told.clone())),
                    _ => Err(0),
                };
            }
            Op::Write { file, offset, len, tag } => self.write(*file, *offset, *len, *tag),
            Op::Append { file, len, tag } => {
                let end = self.contents[*file].bytes.len();
                self.write(*file, end, *len, *tag);
            }
            Op::Truncate { file, size } => self.change(*file, |bytes| bytes.resize(*size, 0)),
            Op::Fsync(_) | Op::SyncDir(_) => {}
        }
        Ok(Answer::Done)
    }

    fn make(&mut self, entry: Entry, node: Node, told: &Answer) -> Result<Answer, i32> {
        if self.at(entry).is_some() {
            return Err(libc::EEXIST);
        }
        match told {
            Answer::Ino(Some(ino)) if !self.nodes.contains_key(ino) => {
                self.nodes.insert(*ino, node);
                self.dirs[entry.0].insert(entry.1, *ino);
                Ok(told.clone())
            }
            _ => Err(0),
        }
    }

    /// A file has a name less.
    fn drop_name(&mut self, ino: Ino) {
        match self.nodes.get_mut(&ino) {
            Some(Node::File { nlink }) if *nlink > 1 => *nlink -= 1,
            _ => drop(self.nodes.remove(&ino)),
        }
    }

    fn rename(&mut self, from: Entry, to: Entry, how: How) -> Result<(), i32> {
        let (source, node) = self.at(from).ok_or(libc::ENOENT)?;
        let target = self.at(to);
        match (how, target) {
            (How::NoReplace, Some(_)) => return Err(libc::EEXIST),
            (How::Exchange, None) => return Err(libc::ENOENT),
            (_, Some((target, _))) if target == source => return Ok(()),
            (How::Exchange, Some((target, _))) => {
                self.dirs[from.0].insert(from.1, target);
                self.dirs[to.0].insert(to.1, source);
                return Ok(());
            }
            (_, Some((victim, Node::File { .. }))) => {
                if node == Node::Dir {
                    return Err(libc::ENOTDIR);
                }
                self.drop_name(victim);
            }
            (_, Some((victim, Node::Dir))) => {
                if node != Node::Dir {
                    return Err(libc::EISDIR);
                }
                self.nodes.remove(&victim);
            }
            (_, None) => {}
        }
        self.dirs[from.0].remove(&from.1);
        self.dirs[to.0].insert(to.1, source);
        Ok(())
    }

    fn write(&mut self, file: usize, offset: usize, len: usize, tag: u8) {
        self.change(file, |bytes| {
            bytes.resize(bytes.len().max(offset + len), 0);
            bytes[offset..offset + len].fill(tag);
        });
    }

    fn change(&mut self, file: usize, edit: impl FnOnce(&mut Vec<u8>)) {
        let contents = &mut self.contents[file];
        let mut bytes = (*contents.bytes).clone();
        edit(&mut bytes);
        contents.digest = crc32c::crc32c(&bytes);
        contents.bytes = Arc::new(bytes);
    }

    fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        hasher.finish()
    }
}

/// There is an order of the events, none before one that had ended when it began, in which each
/// answers as it did.
pub fn has_order(start: &State, events: &[Event]) -> bool {
    assert!(events.len() <= 64, "the set of those that are done is one number");
    search(start, events, 0, &mut HashSet::new())
}

fn search(state: &State, events: &[Event], done: u64, seen: &mut HashSet<(u64, u64)>) -> bool {
    let open = |i: &usize| done & (1 << i) == 0;
    let Some(first_end) = (0..events.len()).filter(open).map(|i| events[i].ended).min() else {
        return true;
    };
    if !seen.insert((done, state.digest())) {
        return false;
    }
    (0..events.len()).filter(open).filter(|i| events[*i].began <= first_end).any(|i| {
        let mut next = state.clone();
        next.step(&events[i].op, &events[i].answer) && search(&next, events, done | 1 << i, seen)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(thread: usize, op: Op, answer: Answer, began: u64, ended: u64) -> Event {
        Event { thread, op, answer, began, ended }
    }

    fn write(tag: u8, began: u64, ended: u64) -> Event {
        event(0, Op::Write { file: 0, offset: 0, len: 4, tag }, Answer::Done, began, ended)
    }

    fn read(found: [u8; 4], began: u64, ended: u64) -> Event {
        let answer = Answer::Bytes(Arc::new(found.to_vec()));
        event(1, Op::Read { file: 0, offset: 0, len: 4 }, answer, began, ended)
    }

    #[test]
    fn a_read_during_a_write_sees_all_of_it_or_nothing() {
        let start = State::new([10, 11], 4);
        for (found, fine) in
            [([0; 4], true), ([7; 4], true), ([7, 7, 0, 0], false), ([8; 4], false)]
        {
            assert_eq!(has_order(&start, &[write(7, 0, 3), read(found, 1, 2)]), fine, "{found:?}");
        }
    }

    #[test]
    fn a_read_behind_a_write_sees_it() {
        let start = State::new([10, 11], 4);
        assert!(has_order(&start, &[write(7, 0, 1), read([7; 4], 2, 3)]));
        assert!(!has_order(&start, &[write(7, 0, 1), read([0; 4], 2, 3)]));
        let two = [write(7, 0, 5), write(8, 1, 2), read([8; 4], 3, 4), read([7; 4], 6, 7)];
        assert!(has_order(&start, &two));
        let back = [write(7, 0, 1), write(8, 2, 9), read([8; 4], 3, 4), read([7; 4], 5, 6)];
        assert!(!has_order(&start, &back), "what was seen does not go away");
    }

    #[test]
    fn of_two_creates_of_one_name_one_succeeds() {
        let start = State::new([10, 11], 0);
        let make = |thread, answer| event(thread, Op::Create((0, 3)), answer, 0, 9);
        let exists = Answer::Error(libc::EEXIST);
        assert!(has_order(&start, &[make(0, Answer::Ino(Some(20))), make(1, exists.clone())]));
        assert!(!has_order(
            &start,
            &[make(0, Answer::Ino(Some(20))), make(1, Answer::Ino(Some(21)))]
        ));
        assert!(!has_order(&start, &[make(0, exists.clone()), make(1, exists)]));
    }
}
