//! A file system in memory, without a journal. It shows what remains of an operation's cost if the
//! file system itself costs next to nothing. FerryFS is compared with this floor, so it tells the
//! kernel to cache the same.

mod node;
mod ops;
mod slow;
mod tree;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ferry_env::{Clock, Env};
use ferry_fs::{Attr, CacheMode, Entry, Errno, Host, Ino, Opened, ROOT, Timestamp};
use parking_lot::{Mutex, RwLock};

use node::{Body, Node};
use slow::Slow;

/// How long the kernel may cache names and attributes: only the kernel changes them.
const FOREVER: Duration = Duration::MAX;

/// All inodes by number.
type Tree = HashMap<Ino, Arc<Node>>;

/// How the null file system behaves.
#[derive(Clone, Copy, Debug, Default)]
pub struct NullOptions {
    /// As the mount option of the same name.
    pub cache: CacheMode,
    /// The time of an fsync; they run one after the other. So a file of this file system is a slow
    /// device for a volume.
    pub flush_time: Duration,
    /// While a file called `stall` is in the root directory, no write and no fsync is answered.
    pub stalls: bool,
}

/// The null file system.
pub struct NullFs {
    options: NullOptions,
    clock: Arc<dyn Clock>,
    /// Every inode that has a name or is known to the kernel. Namespace changes hold it for
    /// writing.
    tree: RwLock<Tree>,
    next_ino: AtomicU64,
    host: Mutex<Option<Arc<dyn Host>>>,
    slow: Slow,
}

impl NullFs {
    /// Makes an empty file system.
    pub fn new(env: &Env, options: NullOptions) -> Self {
        let clock = Arc::clone(&env.clock);
        let fs = Self {
            slow: Slow::new(options.flush_time),
            options,
            clock,
            tree: RwLock::default(),
            next_ino: AtomicU64::new(ROOT + 1),
            host: Mutex::new(None),
        };
        let root = Node::new(fs.attr(ROOT, libc::S_IFDIR | 0o755, (0, 0), 2), Body::dir(ROOT));
        fs.tree.write().insert(ROOT, Arc::new(root));
        fs
    }

    fn now(&self) -> Timestamp {
        Timestamp(self.clock.wall().as_nanos().cast_signed())
    }

    fn attr(&self, ino: Ino, mode: u32, (uid, gid): (u32, u32), nlink: u32) -> Attr {
        let now = self.now();
        let times = (now, now, now);
        let (atime, mtime, ctime) = times;
        Attr { ino, mode, nlink, uid, gid, rdev: 0, size: 0, blocks: 0, atime, mtime, ctime }
    }

    fn node(&self, ino: Ino) -> Result<Arc<Node>, Errno> {
        self.tree.read().get(&ino).cloned().ok_or(Errno(libc::ESTALE))
    }

    /// A name was made or removed: the name `stall` begins or ends a stall.
    fn stall(&self, parent: Ino, name: &[u8], stalls: bool) {
        if self.options.stalls && parent == ROOT && name == b"stall" {
            self.slow.stall(stalls);
        }
    }

    fn fresh_ino(&self) -> Ino {
        self.next_ino.fetch_add(1, Ordering::Relaxed)
    }

    /// The node as the answer to a lookup, which is counted.
    fn entry(node: &Node) -> Entry {
        let mut state = node.state.lock();
        state.lookups += 1;
        Entry { attr: Some(state.attr), entry_valid: FOREVER, attr_valid: FOREVER }
    }

    fn absent() -> Entry {
        Entry { attr: None, entry_valid: FOREVER, attr_valid: FOREVER }
    }

    /// Opens a node; `flags`: those of open(2) if the file was just made.
    fn opened(&self, made: Option<i32>) -> Opened {
        let strict = self.options.cache == CacheMode::Strict;
        let bypass = self.options.cache == CacheMode::Kernel
            && made.is_some_and(|flags| flags & libc::O_ACCMODE == libc::O_WRONLY);
        Opened {
            fh: 0,
            direct_io: strict || bypass,
            keep_cache: !strict && !bypass,
            parallel_direct_writes: strict,
            no_flush: true,
            cache_dir: true,
        }
    }
}
