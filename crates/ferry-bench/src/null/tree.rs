//! Changes of the null file system's tree: names, and what hangs on them.

use std::sync::Arc;

use ferry_fs::{Answer, Cx, DirEntry, Errno, Ino, RenameFlags};

use super::node::{Body, Dir, Node};
use super::ops::{errno, place};
use super::{NullFs, Tree};

impl NullFs {
    /// Makes an inode and its name.
    pub(super) fn make(
        &self,
        cx: &Cx<'_>,
        parent: Ino,
        name: &[u8],
        mode: u32,
        rdev: u32,
        body: Body,
    ) -> Answer<Arc<Node>> {
        let mut tree = self.tree.write();
        let dir = Arc::clone(tree.get(&parent).ok_or(Errno(libc::ESTALE))?);
        let mut names = dir.dir()?.write();
        if names.get(name).is_some() {
            return errno(libc::EEXIST);
        }
        let ino = self.fresh_ino();
        let above = dir.state.lock().attr;
        let is_dir = mode & libc::S_IFMT == libc::S_IFDIR;
        let setgid = above.mode & libc::S_ISGID != 0;
        let gid = if setgid { above.gid } else { cx.gid };
        let mode = mode & !cx.umask | if setgid && is_dir { libc::S_ISGID } else { 0 };
        let mut attr = self.attr(ino, mode, (cx.uid, gid), if is_dir { 2 } else { 1 });
        attr.rdev = rdev;
        if let Body::Symlink(target) = &body {
            attr.size = target.len() as u64;
        }
        let node = Arc::new(Node::new(attr, body));
        tree.insert(ino, Arc::clone(&node));
        names.insert(name, ino);
        self.touch(&dir, i32::from(is_dir));
        Ok(node)
    }

    /// A directory's names changed, and its subdirectories by so many.
    pub(super) fn touch(&self, dir: &Node, subdirs: i32) {
        let now = self.now();
        let mut state = dir.state.lock();
        state.attr.mtime = now;
        state.attr.ctime = now;
        state.attr.nlink = state.attr.nlink.saturating_add_signed(subdirs);
    }

    /// Takes one name off an inode, and the inode if nothing holds it any more.
    pub(super) fn drop_name(&self, tree: &mut Tree, node: &Node) {
        let mut state = node.state.lock();
        let gone = if node.is_dir() { 2 } else { 1 };
        state.attr.nlink = state.attr.nlink.saturating_sub(gone);
        state.attr.ctime = self.now();
        if state.attr.nlink == 0 && state.lookups == 0 {
            tree.remove(&state.attr.ino);
        }
    }

    pub(super) fn remove(&self, parent: Ino, name: &[u8], dir: bool) -> Answer<()> {
        let mut tree = self.tree.write();
        let above = Arc::clone(tree.get(&parent).ok_or(Errno(libc::ESTALE))?);
        let mut names = above.dir()?.write();
        let ino = names.get(name).ok_or(Errno(libc::ENOENT))?;
        let node = Arc::clone(tree.get(&ino).ok_or(Errno(libc::ESTALE))?);
        match (&node.body, dir) {
            (Body::Dir(_), false) => return errno(libc::EISDIR),
            (Body::Dir(below), true) if !below.read().is_empty() => return errno(libc::ENOTEMPTY),
            (Body::Dir(_), true) | (_, false) => {}
            (_, true) => return errno(libc::ENOTDIR),
        }
        names.remove(name);
        self.touch(&above, -i32::from(dir));
        self.drop_name(&mut tree, &node);
        Ok(())
    }

    /// A file's contents changed: its size, blocks and times follow.
    pub(super) fn written(&self, node: &Node, size: usize) {
        let now = self.now();
        let attr = &mut node.state.lock().attr;
        attr.size = size as u64;
        attr.blocks = attr.size.div_ceil(512);
        attr.mtime = now;
        attr.ctime = now;
    }

    pub(super) fn truncate(&self, node: &Node, size: u64) -> Result<(), Errno> {
        let size = place(size)?;
        let mut data = node.file()?.write();
        data.resize(size, 0);
        self.written(node, size);
        Ok(())
    }

    /// Puts `ino` under `name` in place of what is there; the tree is locked for writing.
    pub(super) fn rename_into(
        &self,
        tree: &mut Tree,
        (from, name): (&Node, &[u8]),
        (to, new_name): (&Node, &[u8]),
        flags: RenameFlags,
    ) -> Answer<()> {
        let get = |dir: &Node, name: &[u8]| -> Result<Option<Ino>, Errno> { Ok(dir.dir()?.read().get(name)) };
        let ino = get(from, name)?.ok_or(Errno(libc::ENOENT))?;
        let node = Arc::clone(tree.get(&ino).ok_or(Errno(libc::ESTALE))?);
        let victim = match get(to, new_name)? {
            Some(victim) if flags.no_replace || victim == ino => {
                return if victim == ino { Ok(()) } else { errno(libc::EEXIST) };
            }
            Some(victim) => Some(Arc::clone(tree.get(&victim).ok_or(Errno(libc::ESTALE))?)),
            None if flags.exchange => return errno(libc::ENOENT),
            None => None,
        };
        let victim_ino = victim.as_ref().map(|v| v.state.lock().attr.ino);
        if let (Some(victim), false) = (&victim, flags.exchange) {
            match (node.is_dir(), &victim.body) {
                (true, Body::Dir(dir)) if !dir.read().is_empty() => return errno(libc::ENOTEMPTY),
                (true, Body::Dir(_)) => {}
                (true, _) => return errno(libc::ENOTDIR),
                (false, Body::Dir(_)) => return errno(libc::EISDIR),
                (false, _) => {}
            }
        }
        from.dir()?.write().remove(name);
        to.dir()?.write().remove(new_name);
        to.dir()?.write().insert(new_name, ino);
        self.moved(from, to, &node)?;
        match (victim, victim_ino) {
            (Some(victim), Some(number)) if flags.exchange => {
                from.dir()?.write().insert(name, number);
                self.moved(to, from, &victim)?;
            }
            (Some(victim), _) => {
                self.touch(to, -i32::from(victim.is_dir()));
                self.drop_name(tree, &victim);
            }
            _ => {}
        }
        Ok(())
    }

    pub(super) fn moved(&self, from: &Node, to: &Node, node: &Node) -> Result<(), Errno> {
        let subdir = i32::from(node.is_dir());
        self.touch(from, -subdir);
        self.touch(to, subdir);
        if let Body::Dir(dir) = &node.body {
            dir.write().parent = to.state.lock().attr.ino;
        }
        node.state.lock().attr.ctime = self.now();
        Ok(())
    }
}

/// Gives a directory's entries after `cookie` to `sink` until it has enough.
pub(super) fn listed(
    tree: &Tree,
    dir: &Dir,
    own: Ino,
    cookie: u64,
    plus: bool,
    sink: &mut dyn FnMut(&DirEntry) -> bool,
) {
    for (at, name, ino) in [(1, &b"."[..], own), (2, b"..", dir.parent)] {
        let kind = libc::S_IFDIR;
        if cookie < at && !sink(&DirEntry { name: name.into(), ino, kind, cookie: at, entry: None }) {
            return;
        }
    }
    for (at, name, ino) in dir.after(cookie) {
        let Some(node) = tree.get(&ino) else { continue };
        let entry = plus.then(|| NullFs::entry(node));
        let kind = node.state.lock().attr.mode & libc::S_IFMT;
        if !sink(&DirEntry { name: name.into(), ino, kind, cookie: at, entry }) {
            if plus {
                node.state.lock().lookups -= 1;
            }
            return;
        }
    }
}
