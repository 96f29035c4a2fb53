//! Changes of the null file system's tree: names, and what hangs on them.

use std::sync::Arc;

use ferry_fs::{Answer, Cx, DirEntry, Errno, Ino, RenameFlags, posix};

use super::node::{Body, Dir, Node};
use super::{NullFs, Tree};

pub(super) fn errno<T>(code: i32) -> Answer<T> {
    Err(Errno(code).into())
}

pub(super) fn index(offset: u64) -> Result<usize, Errno> {
    usize::try_from(offset).map_err(|_| Errno(libc::EFBIG))
}

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
        let (mode, gid) = posix::inherit_group((above.mode, above.gid), (mode & !cx.umask, cx.gid));
        let mut attr = self.attr(ino, mode, (cx.uid, gid), posix::first_links(mode));
        attr.rdev = rdev;
        if let Body::Symlink(target) = &body {
            attr.size = target.len() as u64;
        }
        let node = Arc::new(Node::new(attr, body));
        tree.insert(ino, Arc::clone(&node));
        names.insert(name, ino);
        self.touch(&dir, i32::from(posix::is_dir(mode)));
        Ok(node)
    }

    /// A directory's names changed, and its subdirectories by so many.
    pub(super) fn touch(&self, dir: &Node, subdirs: i32) {
        let now = self.now();
        let mut state = dir.state.lock();
        posix::count_entries(&mut state.attr, 0, subdirs, now);
    }

    /// Takes one name off an inode, and the inode if nothing holds it any more.
    pub(super) fn drop_name(&self, tree: &mut Tree, node: &Node) {
        let mut state = node.state.lock();
        posix::drop_link(&mut state.attr, self.now());
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
        check_removable(&node, dir)?;
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
        let size = index(size)?;
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
        if flags.whiteout {
            return errno(libc::EINVAL);
        }
        let get = |dir: &Node, name: &[u8]| -> Result<Option<Ino>, Errno> {
            Ok(dir.dir()?.read().get(name))
        };
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
            check_removable(victim, node.is_dir())?;
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

fn check_removable(node: &Node, as_dir: bool) -> Result<(), Errno> {
    let empty = !matches!(&node.body, Body::Dir(below) if !below.read().is_empty());
    posix::check_removable(node.state.lock().attr.mode, u64::from(!empty), as_dir)
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
        if cookie < at && !sink(&DirEntry { name: name.into(), ino, kind, cookie: at, entry: None })
        {
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
