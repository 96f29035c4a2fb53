//! The operations of the null file system.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ferry_fs::{
    Answer, Attr, CacheMode, Cx, DirEntry, Entry, Errno, FileLock, Filesystem, Host, Ino, Mode,
    Opened, RenameFlags, SetAttr, Statfs, XattrFlags, ioctl, posix,
};

use super::node::{Body, Node};
use super::tree::{errno, index, listed};
use super::{FOREVER, NullFs};

/// `statfs` says so many blocks, of 4 KiB, whatever is in use: 1 TiB.
const BLOCKS: u64 = 1 << 28;
const FALLOC_PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;

impl Filesystem for NullFs {
    fn attach(&self, host: Arc<dyn Host>) {
        *self.host.lock() = Some(host);
    }

    fn detach(&self) {
        self.host.lock().take();
    }

    fn lookup(&self, _cx: &Cx<'_>, parent: Ino, name: &[u8]) -> Answer<Entry> {
        let tree = self.tree.read();
        let dir = tree.get(&parent).ok_or(Errno(libc::ESTALE))?;
        let ino = match name {
            b"." => Some(parent),
            b".." => Some(dir.dir()?.read().parent),
            _ => dir.dir()?.read().get(name),
        };
        Ok(ino.and_then(|ino| tree.get(&ino)).map_or_else(Self::absent, |node| Self::entry(node)))
    }

    fn forget(&self, ino: Ino, count: u64) {
        let Ok(node) = self.node(ino) else { return };
        let unused = {
            let mut state = node.state.lock();
            state.lookups = state.lookups.saturating_sub(count);
            state.lookups == 0 && state.attr.nlink == 0
        };
        if unused {
            let mut tree = self.tree.write();
            // It may have been looked up or linked since.
            let state = node.state.lock();
            if state.lookups == 0 && state.attr.nlink == 0 {
                tree.remove(&ino);
            }
        }
    }

    fn getattr(&self, _cx: &Cx<'_>, ino: Ino, _fh: Option<u64>) -> Answer<(Attr, Duration)> {
        Ok((self.node(ino)?.state.lock().attr, FOREVER))
    }

    fn setattr(
        &self,
        _cx: &Cx<'_>,
        ino: Ino,
        _fh: Option<u64>,
        set: &SetAttr,
    ) -> Answer<(Attr, Duration)> {
        let node = self.node(ino)?;
        if let Some(size) = set.size {
            self.truncate(&node, size)?;
        }
        let now = self.now();
        let mut state = node.state.lock();
        // The size is set already, with its time.
        posix::set_attributes(&mut state.attr, &SetAttr { size: None, ..*set }, now);
        Ok((state.attr, FOREVER))
    }

    fn readlink(&self, _cx: &Cx<'_>, ino: Ino) -> Answer<Vec<u8>> {
        match &self.node(ino)?.body {
            Body::Symlink(target) => Ok(target.to_vec()),
            _ => errno(libc::EINVAL),
        }
    }

    fn mknod(&self, cx: &Cx<'_>, parent: Ino, name: &[u8], mode: Mode, rdev: u32) -> Answer<Entry> {
        Ok(Self::entry(&*self.make(cx, parent, name, mode, rdev, Body::of_mode(mode, parent))?))
    }

    fn mkdir(&self, cx: &Cx<'_>, parent: Ino, name: &[u8], mode: u32) -> Answer<Entry> {
        let mode = libc::S_IFDIR | mode & 0o7777;
        Ok(Self::entry(&*self.make(cx, parent, name, mode, 0, Body::dir(parent))?))
    }

    fn symlink(&self, cx: &Cx<'_>, parent: Ino, name: &[u8], target: &[u8]) -> Answer<Entry> {
        let body = Body::Symlink(target.into());
        Ok(Self::entry(&*self.make(cx, parent, name, libc::S_IFLNK | 0o777, 0, body)?))
    }

    fn link(&self, _cx: &Cx<'_>, ino: Ino, parent: Ino, name: &[u8]) -> Answer<Entry> {
        let tree = self.tree.write();
        let node = tree.get(&ino).ok_or(Errno(libc::ESTALE))?;
        let dir = tree.get(&parent).ok_or(Errno(libc::ESTALE))?;
        let mut names = dir.dir()?.write();
        if names.get(name).is_some() {
            return errno(libc::EEXIST);
        }
        names.insert(name, ino);
        {
            let mut state = node.state.lock();
            state.attr.nlink += 1;
            state.attr.ctime = self.now();
        }
        self.touch(dir, 0);
        Ok(Self::entry(node))
    }

    fn unlink(&self, _cx: &Cx<'_>, parent: Ino, name: &[u8]) -> Answer<()> {
        self.remove(parent, name, false)?;
        self.stall(parent, name, false);
        Ok(())
    }

    fn rmdir(&self, _cx: &Cx<'_>, parent: Ino, name: &[u8]) -> Answer<()> {
        self.remove(parent, name, true)
    }

    fn rename(
        &self,
        _cx: &Cx<'_>,
        parent: Ino,
        name: &[u8],
        new_parent: Ino,
        new_name: &[u8],
        flags: RenameFlags,
    ) -> Answer<()> {
        let mut tree = self.tree.write();
        let from = Arc::clone(tree.get(&parent).ok_or(Errno(libc::ESTALE))?);
        let to = Arc::clone(tree.get(&new_parent).ok_or(Errno(libc::ESTALE))?);
        self.rename_into(&mut tree, (&from, name), (&to, new_name), flags)
    }

    fn open(&self, _cx: &Cx<'_>, ino: Ino, flags: i32, kill: bool) -> Answer<Opened> {
        if flags & libc::O_TRUNC != 0 {
            let node = self.node(ino)?;
            self.truncate(&node, 0)?;
            if kill {
                clear_set_ids(&node);
            }
        }
        Ok(self.opened(None))
    }

    fn create(
        &self,
        cx: &Cx<'_>,
        parent: Ino,
        name: &[u8],
        mode: Mode,
        flags: i32,
    ) -> Answer<(Entry, Opened)> {
        let mode = libc::S_IFREG | mode & 0o7777;
        match self.make(cx, parent, name, mode, 0, Body::of_mode(mode, parent)) {
            Ok(node) => {
                self.stall(parent, name, true);
                Ok((Self::entry(&node), self.opened(Some(flags))))
            }
            Err(ferry_fs::Stop::Errno(Errno(libc::EEXIST))) if flags & libc::O_EXCL == 0 => {
                let entry = self.lookup(cx, parent, name)?;
                let ino = entry.attr.map_or(0, |a| a.ino);
                Ok((entry, self.open(cx, ino, flags, false)?))
            }
            Err(e) => Err(e),
        }
    }

    fn tmpfile(
        &self,
        cx: &Cx<'_>,
        _parent: Ino,
        mode: Mode,
        flags: i32,
    ) -> Answer<(Entry, Opened)> {
        let mode = libc::S_IFREG | mode & 0o7777 & !cx.umask;
        let ino = self.fresh_ino();
        let node =
            Arc::new(Node::new(self.attr(ino, mode, (cx.uid, cx.gid), 0), Body::of_mode(mode, 0)));
        let entry = Self::entry(&node);
        self.tree.write().insert(ino, node);
        Ok((entry, self.opened(Some(flags))))
    }

    fn read(&self, _cx: &Cx<'_>, ino: Ino, _fh: u64, offset: u64, out: &mut [u8]) -> Answer<usize> {
        let node = self.node(ino)?;
        let data = node.file()?.read();
        let from = data.get(index(offset)?.min(data.len())..).unwrap_or_default();
        let n = from.len().min(out.len());
        out[..n].copy_from_slice(&from[..n]);
        Ok(n)
    }

    fn write(
        &self,
        cx: &Cx<'_>,
        ino: Ino,
        _fh: u64,
        offset: u64,
        data: &[u8],
        append: bool,
        kill: bool,
    ) -> Answer<u64> {
        let node = self.node(ino)?;
        let mut file = node.file()?.write();
        let start = if append { file.len() } else { index(offset)? };
        let end = start.checked_add(data.len()).ok_or(Errno(libc::EFBIG))?;
        if start == file.len() {
            file.extend_from_slice(data);
        } else {
            if end > file.len() {
                file.resize(end, 0);
            }
            file[start..end].copy_from_slice(data);
        }
        self.written(&node, file.len());
        if kill {
            clear_set_ids(&node);
        }
        drop(file);
        self.slow.answer(cx, data.len() as u64)
    }

    fn flush(&self, _cx: &Cx<'_>, _ino: Ino, _fh: u64, _lock_owner: u64) -> Answer<()> {
        Ok(())
    }

    fn release(&self, _cx: &Cx<'_>, _ino: Ino, _fh: u64) {}

    fn fsync(&self, cx: &Cx<'_>, _ino: Ino, _fh: u64, _data_only: bool) -> Answer<()> {
        self.slow.flush(cx)
    }

    fn fallocate(
        &self,
        _cx: &Cx<'_>,
        ino: Ino,
        _fh: u64,
        mode: i32,
        offset: u64,
        len: u64,
    ) -> Answer<()> {
        let node = self.node(ino)?;
        let mut data = node.file()?.write();
        let start = index(offset)?;
        let end = start.checked_add(index(len)?).ok_or(Errno(libc::EFBIG))?;
        let zero = mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) != 0;
        if mode & !(FALLOC_PUNCH | libc::FALLOC_FL_ZERO_RANGE) != 0 {
            return errno(libc::EOPNOTSUPP);
        }
        if zero {
            let (start, end) = (start.min(data.len()), end.min(data.len()));
            data[start..end].fill(0);
        }
        if mode & libc::FALLOC_FL_KEEP_SIZE == 0 && end > data.len() {
            data.resize(end, 0);
        }
        self.written(&node, data.len());
        Ok(())
    }

    fn lseek(&self, _cx: &Cx<'_>, ino: Ino, _fh: u64, offset: u64, whence: i32) -> Answer<u64> {
        let size = self.node(ino)?.state.lock().attr.size;
        match whence {
            _ if offset >= size => errno(libc::ENXIO),
            libc::SEEK_DATA => Ok(offset),
            libc::SEEK_HOLE => Ok(size),
            _ => errno(libc::EINVAL),
        }
    }

    fn copy_file_range(
        &self,
        _cx: &Cx<'_>,
        _ino_in: Ino,
        _fh_in: u64,
        _off_in: u64,
        _ino_out: Ino,
        _fh_out: u64,
        _off_out: u64,
        _len: u64,
    ) -> Answer<u64> {
        errno(libc::EOPNOTSUPP) // the kernel copies by itself
    }

    fn opendir(&self, _cx: &Cx<'_>, _ino: Ino) -> Answer<Opened> {
        Ok(self.opened(None))
    }

    fn readdir(
        &self,
        _cx: &Cx<'_>,
        ino: Ino,
        _fh: u64,
        cookie: u64,
        plus: bool,
        sink: &mut dyn FnMut(&DirEntry) -> bool,
    ) -> Answer<()> {
        let node = self.node(ino)?;
        // The tree is locked before directories, and as long.
        let tree = self.tree.read();
        let dir = node.dir()?.read();
        listed(&tree, &dir, ino, cookie, plus, sink);
        Ok(())
    }

    fn releasedir(&self, _cx: &Cx<'_>, _ino: Ino, _fh: u64) {}

    fn fsyncdir(&self, _cx: &Cx<'_>, _ino: Ino, _fh: u64, _data_only: bool) -> Answer<()> {
        Ok(())
    }

    fn statfs(&self, _cx: &Cx<'_>) -> Answer<Statfs> {
        Ok(Statfs {
            block_size: 4096,
            blocks: BLOCKS,
            blocks_free: BLOCKS,
            blocks_available: BLOCKS,
            files: self.next_ino.load(Ordering::Relaxed),
            files_free: BLOCKS,
        })
    }

    fn setxattr(
        &self,
        _cx: &Cx<'_>,
        _ino: Ino,
        _name: &[u8],
        _value: &[u8],
        _flags: XattrFlags,
    ) -> Answer<()> {
        errno(libc::EOPNOTSUPP)
    }

    fn getxattr(&self, _cx: &Cx<'_>, _ino: Ino, _name: &[u8]) -> Answer<Vec<u8>> {
        errno(libc::ENODATA)
    }

    fn listxattr(&self, _cx: &Cx<'_>, _ino: Ino) -> Answer<Vec<u8>> {
        Ok(Vec::new())
    }

    fn removexattr(&self, _cx: &Cx<'_>, _ino: Ino, _name: &[u8]) -> Answer<()> {
        errno(libc::ENODATA)
    }

    fn getlk(&self, _cx: &Cx<'_>, _ino: Ino, _fh: u64, _lock: &FileLock) -> Answer<FileLock> {
        errno(libc::ENOSYS)
    }

    fn setlk(
        &self,
        _cx: &Cx<'_>,
        _ino: Ino,
        _fh: u64,
        _lock: &FileLock,
        _wait: bool,
    ) -> Answer<()> {
        errno(libc::ENOSYS)
    }

    fn is_shared(&self) -> bool {
        false
    }

    fn writeback_cache(&self) -> bool {
        self.options.cache == CacheMode::Writeback
    }

    fn ioctl(
        &self,
        _cx: &Cx<'_>,
        _ino: Ino,
        cmd: u32,
        _input: &[u8],
        out_max: usize,
    ) -> Answer<Vec<u8>> {
        match (cmd, &*self.host.lock()) {
            (ioctl::SYNC, _) => Ok(Vec::new()),
            (ioctl::STATS, Some(host)) => {
                let stats: serde_json::Map<_, _> =
                    [("fuse".to_owned(), host.stats())].into_iter().collect();
                let mut text = serde_json::Value::from(stats).to_string().into_bytes();
                text.truncate(out_max.saturating_sub(1));
                text.push(0);
                Ok(text)
            }
            _ => errno(libc::ENOTTY),
        }
    }
}

fn clear_set_ids(node: &Node) {
    let attr = &mut node.state.lock().attr;
    attr.mode = posix::without_set_ids(attr.mode);
}
