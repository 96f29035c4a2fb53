//! The traits: a file system, and the transport that has mounted it.

use crate::api::answer::{Answer, Cx};
use crate::api::types::{
    Attr, DirEntry, Entry, Errno, FileLock, Ino, Mode, Opened, RenameFlags, SetAttr, Statfs,
    Timestamp, XattrFlags,
};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// What a mounted file system may ask of the transport.
pub trait Host: Send + Sync {
    /// The kernel must forget the cached attributes.
    fn invalidate_attributes(&self, ino: Ino);
    /// The kernel must forget attributes, and look up names again before it uses them; then `done`
    /// is called, by another thread. Not if the mount ends before.
    fn forget(&self, what: ToForget, done: Box<dyn FnOnce() + Send>);
    /// The kernel must forget all contents of these files that it has cached; then `done` is
    /// called, by another thread. It waits for reads of them that are under way. Not if the mount
    /// ends before.
    fn forget_contents(&self, files: Vec<Ino>, done: Box<dyn FnOnce() + Send>);
    /// The kernel must forget all that it has cached of these inodes, and look up every name again:
    /// a process that has served it was killed. Returns at once. `done` is called, by another
    /// thread, when it looks up names and attributes again.
    fn forget_all(&self, known: Vec<Ino>, done: Box<dyn FnOnce() + Send>);
    /// Whether [`Host::forget`] can be done for names.
    fn forgets_names(&self) -> bool;
    /// The transport's counters, for `stats`.
    fn stats(&self) -> serde_json::Value;
}

/// What the kernel must forget.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToForget {
    /// The attributes of these,
    pub inodes: Vec<Ino>,
    /// what these mean,
    pub names: Vec<(Ino, Box<[u8]>)>,
    /// that these are there, and with them what has no other name and is not open,
    pub removed: Vec<(Ino, Box<[u8]>)>,
    /// and, behind the word that all this is forgotten, the contents of these: what programs have
    /// stored in mapped memory is written first.
    pub contents: Vec<Ino>,
}

impl ToForget {
    /// Both.
    pub fn append(&mut self, other: Self) {
        self.inodes.extend(other.inodes);
        self.names.extend(other.names);
        self.removed.extend(other.removed);
        self.contents.extend(other.contents);
    }
}

/// An inode, a directory in which it has a name, and the name.
pub type CachedName = (Ino, Ino, Box<[u8]>);

/// A file system. Names are bytes without `/` and NUL, never empty; the kernel resolves `.` and
/// `..`, except that `lookup` answers both. Permission is the kernel's to check
/// (`default_permissions`), except where a method says otherwise.
///
/// `lookup`, `mknod`, `mkdir`, `symlink`, `link`, `create`, `tmpfile` and each `plus` entry count
/// one lookup on the inode they return; it lives until `forget` took all of them back and its last
/// name and handle are gone.
pub trait Filesystem: Send + Sync + 'static {
    /// Called once, before the first request.
    fn attach(&self, host: Arc<dyn Host>);
    /// Each request that the process before has left was begun. Called once, behind
    /// [`Filesystem::attach`]; other requests may have come since.
    fn goes_on(&self) {}
    /// The mount is gone: nothing is open, no inode is known to the kernel any more.
    fn detach(&self);

    /// Finds a name. A missing name is `Ok` with `attr: None`.
    fn lookup(&self, cx: &Cx, parent: Ino, name: &[u8]) -> Answer<Entry>;
    /// Takes back `count` lookups.
    fn forget(&self, ino: Ino, count: u64);
    /// Reads attributes; the duration is how long they may be cached.
    fn getattr(&self, cx: &Cx, ino: Ino, fh: Option<u64>) -> Answer<(Attr, Duration)>;
    /// The same, and when the inode was made. `ENOSYS`: that is not known of any inode.
    fn statx(&self, cx: &Cx, ino: Ino) -> Answer<(Attr, Duration, Timestamp)> {
        let born = self.birth_time(ino).ok_or(Errno(libc::ENOSYS))?;
        self.getattr(cx, ino, None).map(|(attr, valid)| (attr, valid, born))
    }
    /// When the inode was made, where that is known.
    fn birth_time(&self, _ino: Ino) -> Option<Timestamp> {
        None
    }
    /// Whether directories change by requests of this mount alone, so that the kernel may keep
    /// listings.
    fn keeps_listings(&self) -> bool {
        !self.is_shared()
    }
    /// Whether a change of its contents by an unprivileged caller may take set-id bits of
    /// the inode.
    fn loses_privileges(&self, _ino: Ino) -> bool {
        false
    }
    /// Changes attributes.
    fn setattr(
        &self,
        cx: &Cx,
        ino: Ino,
        fh: Option<u64>,
        set: &SetAttr,
    ) -> Answer<(Attr, Duration)>;
    /// A symbolic link's target.
    fn readlink(&self, cx: &Cx, ino: Ino) -> Answer<Vec<u8>>;
    /// Makes a regular file, device node, FIFO or socket.
    fn mknod(&self, cx: &Cx, parent: Ino, name: &[u8], mode: Mode, rdev: u32) -> Answer<Entry>;
    /// Makes a directory.
    fn mkdir(&self, cx: &Cx, parent: Ino, name: &[u8], mode: u32) -> Answer<Entry>;
    /// Makes a symbolic link.
    fn symlink(&self, cx: &Cx, parent: Ino, name: &[u8], target: &[u8]) -> Answer<Entry>;
    /// Gives an inode another name.
    fn link(&self, cx: &Cx, ino: Ino, parent: Ino, name: &[u8]) -> Answer<Entry>;
    /// Removes a name that is not a directory.
    fn unlink(&self, cx: &Cx, parent: Ino, name: &[u8]) -> Answer<()>;
    /// Removes an empty directory.
    fn rmdir(&self, cx: &Cx, parent: Ino, name: &[u8]) -> Answer<()>;
    /// Renames.
    fn rename(
        &self,
        cx: &Cx,
        parent: Ino,
        name: &[u8],
        new_parent: Ino,
        new_name: &[u8],
        flags: RenameFlags,
    ) -> Answer<()>;

    /// Opens a file; `flags` are those of open(2). `O_TRUNC` truncates; `kill_suidgid` says that it
    /// then also clears those bits.
    fn open(&self, cx: &Cx, ino: Ino, flags: i32, kill_suidgid: bool) -> Answer<Opened>;
    /// Makes a file (or opens the one that is there, unless `O_EXCL`) and opens it.
    fn create(
        &self,
        cx: &Cx,
        parent: Ino,
        name: &[u8],
        mode: Mode,
        flags: i32,
    ) -> Answer<(Entry, Opened)>;
    /// Makes and opens a file without a name.
    fn tmpfile(&self, cx: &Cx, parent: Ino, mode: Mode, flags: i32) -> Answer<(Entry, Opened)>;
    /// Reads up to `out.len()` bytes at `offset` into `out`; fewer only at the end of the file.
    /// Returns the number.
    fn read(&self, cx: &Cx, ino: Ino, fh: u64, offset: u64, out: &mut [u8]) -> Answer<usize>;
    /// The same, for what the kernel keeps of files that programs have mapped into memory.
    fn read_pages(&self, cx: &Cx, ino: Ino, fh: u64, offset: u64, out: &mut [u8]) -> Answer<usize> {
        self.read(cx, ino, fh, offset, out)
    }
    /// Whether the kernel may have pages of the file that a direct write through this handle does
    /// not change. The answer is asked for behind a write: a read of pages that it
    /// does not know of begins after the write.
    fn keeps_pages(&self, _ino: Ino, _fh: u64) -> bool {
        false
    }
    /// The kernel may take the file for longer than it is: what is appended goes to its end here,
    /// wherever the kernel has put it.
    fn finds_end(&self, _ino: Ino) -> bool {
        false
    }
    /// Another process goes on with the mount, and the kernel was to forget this and has not.
    fn left_to_forget(&self, _left: ToForget) {}
    /// Some regular files that the kernel knows, if there are any.
    fn known_files(&self) -> Vec<Ino> {
        Vec::new()
    }
    /// Of each of these that has names in cached directories: it, one such directory and its name
    /// there. For messages.
    fn cached_names(&self, _inodes: &BTreeSet<Ino>) -> Vec<CachedName> {
        Vec::new()
    }
    /// The files that are open for writing. Of other files the kernel has no page that it has not
    /// written back: closing a file, and unmapping it, writes its pages back.
    fn open_for_writing(&self) -> Vec<Ino> {
        Vec::new()
    }
    /// Writes all of `data`, or fails. `append`: at the end, whatever `offset` says.
    #[expect(clippy::too_many_arguments, reason = "the request's own shape")]
    fn write(
        &self,
        cx: &Cx,
        ino: Ino,
        fh: u64,
        offset: u64,
        data: &[u8],
        append: bool,
        kill_suidgid: bool,
    ) -> Answer<u64>;
    /// A descriptor was closed (not the last one, perhaps). Reports a pending write error.
    fn flush(&self, cx: &Cx, ino: Ino, fh: u64, lock_owner: u64) -> Answer<()>;
    /// The handle's last descriptor was closed.
    fn release(&self, cx: &Cx, ino: Ino, fh: u64);
    /// Makes the file durable. Parks.
    fn fsync(&self, cx: &Cx, ino: Ino, fh: u64, data_only: bool) -> Answer<()>;
    /// Allocates, punches or zeroes; `mode` as fallocate(2). Set-id bits go as on a write, unless
    /// root asks; so with copies.
    fn fallocate(&self, cx: &Cx, ino: Ino, fh: u64, mode: i32, offset: u64, len: u64)
    -> Answer<()>;
    /// `SEEK_DATA` or `SEEK_HOLE`.
    fn lseek(&self, cx: &Cx, ino: Ino, fh: u64, offset: u64, whence: i32) -> Answer<u64>;
    /// Copies within the file system; returns the bytes copied.
    #[expect(
        clippy::too_many_arguments,
        reason = "two files, two places, a length: the system call's own shape"
    )]
    fn copy_file_range(
        &self,
        cx: &Cx,
        ino_in: Ino,
        fh_in: u64,
        off_in: u64,
        ino_out: Ino,
        fh_out: u64,
        off_out: u64,
        len: u64,
    ) -> Answer<u64>;

    /// Opens a directory. A mount of a file system that is not shared need not do that: it lists
    /// with handle 0.
    fn opendir(&self, cx: &Cx, ino: Ino) -> Answer<Opened>;
    /// Lists from `cookie` (0: the start), `.` and `..` first, until `sink` returns `false`, which
    /// says that the entry it was just given did not fit (its lookup, if any, does not count).
    fn readdir(
        &self,
        cx: &Cx,
        ino: Ino,
        fh: u64,
        cookie: u64,
        plus: bool,
        sink: &mut dyn FnMut(&DirEntry) -> bool,
    ) -> Answer<()>;
    /// Closes a directory.
    fn releasedir(&self, cx: &Cx, ino: Ino, fh: u64);
    /// Makes a directory's entries durable. Parks.
    fn fsyncdir(&self, cx: &Cx, ino: Ino, fh: u64, data_only: bool) -> Answer<()>;

    /// Totals.
    fn statfs(&self, cx: &Cx) -> Answer<Statfs>;
    /// Sets an extended attribute. POSIX ACLs are the attributes `system.posix_acl_access` and
    /// `_default` in the kernel's binary form.
    fn setxattr(
        &self,
        cx: &Cx,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        flags: XattrFlags,
    ) -> Answer<()>;
    /// Reads an extended attribute.
    fn getxattr(&self, cx: &Cx, ino: Ino, name: &[u8]) -> Answer<Vec<u8>>;
    /// All names, each ended by NUL.
    fn listxattr(&self, cx: &Cx, ino: Ino) -> Answer<Vec<u8>>;
    /// Removes an extended attribute.
    fn removexattr(&self, cx: &Cx, ino: Ino, name: &[u8]) -> Answer<()>;

    /// Tests for a lock (only where the implementer keeps locks itself, see
    /// [`Filesystem::is_shared`]).
    fn getlk(&self, cx: &Cx, ino: Ino, fh: u64, lock: &FileLock) -> Answer<FileLock>;
    /// Takes or releases a lock; with `wait` it parks until it has it.
    fn setlk(&self, cx: &Cx, ino: Ino, fh: u64, lock: &FileLock, wait: bool) -> Answer<()>;
    /// Others change the files, too: locks go through `getlk` and `setlk`. Otherwise the kernel
    /// keeps them, for this mount alone.
    fn is_shared(&self) -> bool;
    /// The kernel should use its write-back cache.
    fn writeback_cache(&self) -> bool;
    /// FerryFS's own requests (see [`ioctl`](crate::api::ioctl)); the answer's bytes, at most
    /// `out_max`. Unknown: `ENOTTY`.
    fn ioctl(&self, cx: &Cx, ino: Ino, cmd: u32, input: &[u8], out_max: usize) -> Answer<Vec<u8>>;
}
