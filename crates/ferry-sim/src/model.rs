//! A file system in a few maps, obviously right: what a program sees after each operation.

use crate::ops::{Alloc, Move, Op, Path, SLOTS, Which};
use ferry_fs::{Ino, ROOT};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Types of inodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory with entries.
    Dir,
    /// A symbolic link.
    Symlink,
    /// A FIFO, which has no contents.
    Fifo,
}

impl Kind {
    /// The type bits of a mode.
    pub fn bits(self) -> u32 {
        match self {
            Kind::File => libc::S_IFREG,
            Kind::Dir => libc::S_IFDIR,
            Kind::Symlink => libc::S_IFLNK,
            Kind::Fifo => libc::S_IFIFO,
        }
    }
}

/// An inode, without its contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// What kind of inode it is.
    pub kind: Kind,
    /// The lower twelve bits of its mode.
    pub mode: u32,
    /// Names; of a directory 2 and one for each directory in it.
    pub nlink: u32,
    /// Extended attributes by name.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// A symbolic link's target.
    pub target: Vec<u8>,
    /// A directory's names.
    pub entries: BTreeMap<Vec<u8>, Ino>,
}

impl Node {
    fn new(kind: Kind, mode: u32) -> Self {
        let nlink = if kind == Kind::Dir { 2 } else { 1 };
        Self {
            kind,
            mode,
            nlink,
            xattrs: BTreeMap::new(),
            target: Vec::new(),
            entries: BTreeMap::new(),
        }
    }
}

/// Everything that has a name: what the guarantees for metadata are about.
pub type Tree = BTreeMap<Ino, Arc<Node>>;
/// Contents of regular files.
pub type Contents = BTreeMap<Ino, Arc<Vec<u8>>>;

/// What an operation will do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The operation succeeds.
    Done,
    /// It fails with this error.
    Fails(i32),
    /// It has no meaning here and is left out.
    Skip,
}

impl Outcome {
    /// The operation succeeds.
    pub fn is_ok(self) -> bool {
        self == Outcome::Done
    }
}

/// What an operation changed, for the record of what must survive.
#[derive(Clone, Debug, Default)]
pub struct Effects {
    /// Inodes whose metadata, names or data changed.
    pub touched: Vec<Ino>,
    /// Inodes one of whose names was made or moved.
    pub named: Vec<Ino>,
    /// A file's contents changed.
    pub contents: Option<(Ino, Change)>,
}

/// How a file's contents changed.
#[derive(Clone, Debug)]
pub enum Change {
    /// New contents, in memory until they are written back.
    Written(Arc<Vec<u8>>),
    /// A new size, which is metadata and so in order; and the contents then.
    Resized(Arc<Vec<u8>>),
    /// The file replaced another: what it holds now survives with the new name.
    Replaced,
}

/// The state that programs see.
#[derive(Clone, Debug)]
pub struct Model {
    nodes: Tree,
    contents: Contents,
    held: Vec<Option<Ino>>,
}

impl Model {
    /// Starts from a tree and its contents.
    pub fn new(nodes: Tree, contents: Contents) -> Self {
        Self { nodes, contents, held: vec![None; usize::from(SLOTS)] }
    }

    /// An empty volume: its root.
    pub fn empty() -> Self {
        Self::new(BTreeMap::from([(ROOT, Arc::new(Node::new(Kind::Dir, 0o755)))]), Contents::new())
    }

    /// What has a name.
    pub fn tree(&self) -> Tree {
        self.nodes
            .iter()
            .filter(|(_, node)| node.nlink > 0)
            .map(|(ino, node)| (*ino, node.clone()))
            .collect()
    }

    /// A file's contents.
    pub fn contents(&self, ino: Ino) -> &Arc<Vec<u8>> {
        &self.contents[&ino]
    }

    /// Contents of the files that have a name.
    pub fn all_contents(&self) -> Contents {
        let named = |ino: &Ino| self.nodes.get(ino).is_some_and(|node| node.nlink > 0);
        self.contents
            .iter()
            .filter(|(ino, _)| named(ino))
            .map(|(ino, bytes)| (*ino, bytes.clone()))
            .collect()
    }

    /// The inode behind a held handle.
    pub fn held(&self, slot: u8) -> Option<Ino> {
        self.held[usize::from(slot)]
    }

    /// Inodes that exist, with a name or without.
    pub fn inodes(&self) -> u64 {
        self.nodes.len() as u64
    }

    /// An inode that is there.
    pub fn node(&self, ino: Ino) -> &Arc<Node> {
        &self.nodes[&ino]
    }

    /// The inode is there, with a name or without.
    pub fn exists(&self, ino: Ino) -> bool {
        self.nodes.contains_key(&ino)
    }

    /// The inode that a path leads to.
    pub fn resolve(&self, path: &Path) -> Option<Ino> {
        path.0
            .iter()
            .try_fold(ROOT, |dir, n| self.nodes[&dir].entries.get(&Path::name(*n)).copied())
    }

    /// The directory in which a path's last name is, if it is a directory, and the name.
    pub fn parent(&self, path: &Path) -> Option<(Ino, Vec<u8>)> {
        let (last, dirs) = path.0.split_last()?;
        let dir = self.resolve(&Path(dirs.to_vec()))?;
        (self.nodes[&dir].kind == Kind::Dir).then(|| (dir, Path::name(*last)))
    }

    /// The inode that an operation on a file's contents means.
    pub fn which(&self, which: &Which) -> Option<Ino> {
        match which {
            Which::At(path) => self.resolve(path).filter(|ino| self.nodes[ino].kind == Kind::File),
            Which::Held(slot) => self.held(*slot),
        }
    }

    /// The inode that an operation makes durable.
    pub fn synced_by(&self, op: &Op) -> Option<Ino> {
        match op {
            Op::Fsync(which, _) => self.which(which),
            Op::FsyncDir(path) => self.resolve(path),
            _ => None,
        }
    }

    /// Paths of everything of this kind; of files and directories of any kind for `None`.
    pub fn paths(&self, kind: Option<Kind>) -> Vec<Path> {
        let mut paths = Vec::new();
        let mut todo = vec![(ROOT, Path(Vec::new()))];
        while let Some((ino, path)) = todo.pop() {
            let node = &self.nodes[&ino];
            for n in 0..crate::ops::NAMES {
                if let Some(child) = node.entries.get(&Path::name(n)) {
                    todo.push((*child, Path([&path.0[..], &[n]].concat())));
                }
            }
            if kind.is_none_or(|kind| kind == node.kind) {
                paths.push(path);
            }
        }
        paths
    }

    /// Directories from which `ino` hangs, itself among them.
    pub fn above(&self, ino: Ino) -> Vec<Ino> {
        let mut found = vec![ino];
        let mut i = 0;
        while let Some(&at) = found.get(i) {
            for (dir, node) in &self.nodes {
                if node.entries.values().any(|child| *child == at) && !found.contains(dir) {
                    found.push(*dir);
                }
            }
            i += 1;
        }
        found
    }

    fn edit(&mut self, ino: Ino) -> &mut Node {
        Arc::make_mut(self.nodes.get_mut(&ino).expect("the outcome said that it is there"))
    }

    /// Does it. `n` is the operation's number (it decides the bytes written), `new` the number of a
    /// new inode.
    pub fn apply(&mut self, op: &Op, n: usize, new: Ino) -> Effects {
        match op {
            Op::Create(path) => self.make(path, Kind::File, new, Vec::new()),
            Op::Mkdir(path) => self.make(path, Kind::Dir, new, Vec::new()),
            Op::Fifo(path) => self.make(path, Kind::Fifo, new, Vec::new()),
            Op::Symlink(path, len) => self.make(path, Kind::Symlink, new, target(n, *len)),
            Op::Link(from, to) => self.link(self.resolve(from).expect("judged"), to),
            Op::LinkHeld(slot, to) => self.link(self.held(*slot).expect("judged"), to),
            Op::Unlink(path) | Op::Rmdir(path) => self.remove(path),
            Op::Rename(from, to, how) => self.rename(from, to, *how),
            Op::Write(which, offset, len) => self.write(which, *offset, &pattern(n, *len)),
            Op::Append(which, len) => {
                let end = self.contents[&self.which(which).expect("judged")].len() as u64;
                self.write(which, end, &pattern(n, *len))
            }
            Op::Truncate(which, size) => {
                self.change(which, |bytes| bytes.resize(*size as usize, 0), Change::Resized)
            }
            Op::Fallocate(which, how, offset, len) => {
                self.change(which, |bytes| fallocate(bytes, *how, *offset, *len), Change::Written)
            }
            Op::SetXattr(path, name, len) => self.edit_at(path, |node| {
                node.xattrs.insert(xattr_name(*name), pattern(n, u64::from(*len)));
            }),
            Op::RemoveXattr(path, name) => {
                self.edit_at(path, |node| drop(node.xattrs.remove(&xattr_name(*name))))
            }
            Op::Chmod(path, mode) => self.edit_at(path, |node| node.mode = *mode),
            Op::Hold(path, slot) => {
                self.held[usize::from(*slot)] = self.resolve(path);
                Effects::default()
            }
            Op::HoldTmp(_, slot) => {
                let node = Node {
                    nlink: 0,
                    xattrs: BTreeMap::from([(TMPFILE.to_vec(), Vec::new())]),
                    ..Node::new(Kind::File, FILE_MODE)
                };
                self.nodes.insert(new, Arc::new(node));
                self.contents.insert(new, Arc::default());
                self.held[usize::from(*slot)] = Some(new);
                Effects { touched: vec![new], ..Effects::default() }
            }
            Op::Release(slot) => {
                let ino = self.held[usize::from(*slot)].take().expect("judged");
                self.forget(ino);
                Effects::default()
            }
            Op::Read(..) | Op::Fsync(..) | Op::FsyncDir(_) | Op::Sync | Op::Trim | Op::Tick(_) => {
                Effects::default()
            }
        }
    }

    fn make(&mut self, path: &Path, kind: Kind, new: Ino, target: Vec<u8>) -> Effects {
        let (dir, name) = self.parent(path).expect("judged");
        let mode = match kind {
            Kind::Dir => DIR_MODE,
            Kind::Symlink => 0o777,
            Kind::File | Kind::Fifo => FILE_MODE,
        };
        self.nodes.insert(new, Arc::new(Node { target, ..Node::new(kind, mode) }));
        if kind == Kind::File {
            self.contents.insert(new, Arc::default());
        }
        self.put(dir, name, new);
        Effects { touched: vec![new, dir], named: vec![new], contents: None }
    }

    fn link(&mut self, ino: Ino, to: &Path) -> Effects {
        let (dir, name) = self.parent(to).expect("judged");
        let node = self.edit(ino);
        node.nlink += 1;
        node.xattrs.remove(TMPFILE);
        self.put(dir, name, ino);
        Effects { touched: vec![ino, dir], named: vec![ino], contents: None }
    }

    fn remove(&mut self, path: &Path) -> Effects {
        let (dir, name) = self.parent(path).expect("judged");
        let ino = self.take(dir, &name);
        let touched = vec![ino, dir];
        self.drop_name(ino);
        Effects { touched, ..Effects::default() }
    }

    /// Puts a name into a directory.
    fn put(&mut self, dir: Ino, name: Vec<u8>, ino: Ino) {
        let is_dir = self.nodes[&ino].kind == Kind::Dir;
        let node = self.edit(dir);
        node.entries.insert(name, ino);
        node.nlink += u32::from(is_dir);
    }

    /// Takes a name out of a directory.
    fn take(&mut self, dir: Ino, name: &[u8]) -> Ino {
        let ino = self.edit(dir).entries.remove(name).expect("judged");
        if self.nodes[&ino].kind == Kind::Dir {
            self.edit(dir).nlink -= 1;
        }
        ino
    }

    fn drop_name(&mut self, ino: Ino) {
        let node = self.edit(ino);
        node.nlink = if node.kind == Kind::Dir { 0 } else { node.nlink - 1 };
        self.forget(ino);
    }

    /// Nobody may know it any more.
    fn forget(&mut self, ino: Ino) {
        if self.nodes[&ino].nlink == 0 && !self.held.contains(&Some(ino)) {
            self.nodes.remove(&ino);
            self.contents.remove(&ino);
        }
    }

    fn rename(&mut self, from: &Path, to: &Path, how: Move) -> Effects {
        let (from_dir, from_name) = self.parent(from).expect("judged");
        let (to_dir, to_name) = self.parent(to).expect("judged");
        let target = self.nodes[&to_dir].entries.get(&to_name).copied();
        let source = self.nodes[&from_dir].entries[&from_name];
        if target == Some(source) {
            // The kernel answers for itself here. Without it an exchange, which changes no name,
            // moves the times.
            let touched =
                if how == Move::Exchange { vec![source, from_dir, to_dir] } else { Vec::new() };
            return Effects { touched, ..Effects::default() };
        }
        let source = self.take(from_dir, &from_name);
        let mut effects = Effects {
            touched: vec![source, from_dir, to_dir],
            named: vec![source],
            contents: None,
        };
        if let Some(target) = target {
            self.take(to_dir, &to_name);
            effects.touched.push(target);
            if how == Move::Exchange {
                self.put(from_dir, from_name, target);
                effects.named.push(target);
            } else {
                self.drop_name(target);
                if self.nodes[&source].kind == Kind::File {
                    effects.contents = Some((source, Change::Replaced));
                }
            }
        }
        self.put(to_dir, to_name, source);
        effects
    }

    fn write(&mut self, which: &Which, offset: u64, data: &[u8]) -> Effects {
        let at = offset as usize;
        self.change(
            which,
            |bytes| {
                bytes.resize(bytes.len().max(at + data.len()), 0);
                bytes[at..at + data.len()].copy_from_slice(data);
            },
            Change::Written,
        )
    }

    fn change(
        &mut self,
        which: &Which,
        edit: impl FnOnce(&mut Vec<u8>),
        change: fn(Arc<Vec<u8>>) -> Change,
    ) -> Effects {
        let ino = self.which(which).expect("judged");
        let mut bytes = (*self.contents[&ino]).clone();
        edit(&mut bytes);
        let bytes = Arc::new(bytes);
        self.contents.insert(ino, bytes.clone());
        Effects { touched: vec![ino], named: Vec::new(), contents: Some((ino, change(bytes))) }
    }

    fn edit_at(&mut self, path: &Path, edit: impl FnOnce(&mut Node)) -> Effects {
        let ino = self.resolve(path).expect("judged");
        edit(self.edit(ino));
        Effects { touched: vec![ino], ..Effects::default() }
    }
}

/// Permission bits of new files.
pub const FILE_MODE: u32 = 0o644;
/// Permission bits of new directories.
pub const DIR_MODE: u32 = 0o755;
/// Marks, in the model alone, a file that never had a name.
const TMPFILE: &[u8] = b"\0tmpfile";

/// The name of attribute number `n`.
pub fn xattr_name(n: u8) -> Vec<u8> {
    format!("user.attribute-{n}").into_bytes()
}

/// What operation number `n` writes: no byte is zero, and two operations' bytes hardly ever agree
/// for long.
pub fn pattern(n: usize, len: u64) -> Vec<u8> {
    let mut x = (n as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut bytes = vec![0; len as usize];
    for part in bytes.chunks_mut(8) {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        for (byte, drawn) in part.iter_mut().zip(x.to_le_bytes()) {
            *byte = drawn.max(1);
        }
    }
    bytes
}

/// The target of the symbolic link that operation number `n` makes.
pub fn target(n: usize, len: u16) -> Vec<u8> {
    pattern(n, u64::from(len)).iter().map(|b| b'a' + b % 26).collect()
}

/// What fallocate(2) does to contents.
fn fallocate(bytes: &mut Vec<u8>, how: Alloc, offset: u64, len: u64) {
    let (start, end) = (offset as usize, (offset + len) as usize);
    if matches!(how, Alloc::Extend | Alloc::Zero) {
        bytes.resize(bytes.len().max(end), 0);
    }
    if matches!(how, Alloc::Punch | Alloc::Zero | Alloc::ZeroKeep) {
        let (start, end) = (start.min(bytes.len()), end.min(bytes.len()));
        bytes[start..end].fill(0);
    }
}

mod outcome;
#[cfg(test)]
mod tests;
