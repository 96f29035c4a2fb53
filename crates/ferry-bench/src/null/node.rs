//! Inodes of the null file system.

use std::collections::{BTreeMap, HashMap};

use ferry_fs::{Attr, Errno, Ino};
use parking_lot::{Mutex, RwLock};

/// The first cookie after those of `.` (1) and `..` (2).
pub(super) const COOKIE_FIRST: u64 = 3;

/// An inode of the null file system.
pub(super) struct Node {
    pub(super) state: Mutex<State>,
    pub(super) body: Body,
}

/// What every inode has.
pub(super) struct State {
    pub(super) attr: Attr,
    /// Lookups that the kernel has not taken back.
    pub(super) lookups: u64,
}

/// What depends on its type.
pub(super) enum Body {
    File(RwLock<Vec<u8>>),
    Dir(RwLock<Dir>),
    Symlink(Box<[u8]>),
    Special,
}

/// A directory: names, and the order in which they are listed.
pub(super) struct Dir {
    pub(super) parent: Ino,
    names: HashMap<Box<[u8]>, (Ino, u64)>,
    order: BTreeMap<u64, (Box<[u8]>, Ino)>,
    next_cookie: u64,
}

impl Node {
    pub(super) fn new(attr: Attr, body: Body) -> Self {
        Self { state: Mutex::new(State { attr, lookups: 0 }), body }
    }

    pub(super) fn dir(&self) -> Result<&RwLock<Dir>, Errno> {
        match &self.body {
            Body::Dir(dir) => Ok(dir),
            _ => Err(Errno(libc::ENOTDIR)),
        }
    }

    pub(super) fn file(&self) -> Result<&RwLock<Vec<u8>>, Errno> {
        match &self.body {
            Body::File(data) => Ok(data),
            Body::Dir(_) => Err(Errno(libc::EISDIR)),
            _ => Err(Errno(libc::EINVAL)),
        }
    }

    pub(super) fn is_dir(&self) -> bool {
        matches!(self.body, Body::Dir(_))
    }
}

impl Body {
    pub(super) fn dir(parent: Ino) -> Self {
        Body::Dir(RwLock::new(Dir {
            parent,
            names: HashMap::new(),
            order: BTreeMap::new(),
            next_cookie: COOKIE_FIRST,
        }))
    }

    pub(super) fn of_mode(mode: u32, parent: Ino) -> Self {
        match mode & libc::S_IFMT {
            libc::S_IFDIR => Self::dir(parent),
            libc::S_IFREG => Self::File(RwLock::default()),
            _ => Self::Special,
        }
    }
}

impl Dir {
    pub(super) fn get(&self, name: &[u8]) -> Option<Ino> {
        self.names.get(name).map(|&(ino, _)| ino)
    }

    pub(super) fn insert(&mut self, name: &[u8], ino: Ino) {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        self.names.insert(name.into(), (ino, cookie));
        self.order.insert(cookie, (name.into(), ino));
    }

    pub(super) fn remove(&mut self, name: &[u8]) {
        if let Some((_, cookie)) = self.names.remove(name) {
            self.order.remove(&cookie);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// Names in order, after `cookie`.
    pub(super) fn after(&self, cookie: u64) -> impl Iterator<Item = (u64, &[u8], Ino)> {
        self.order.range(cookie + 1..).map(|(&c, (name, ino))| (c, &**name, *ino))
    }
}
