//! The model against the real file system: the same changes, each answered alike.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

use std::sync::Arc;
use std::time::Duration;

use ferry_device::{BlockDevice, MemDevice};
use ferry_env::{Clock, Env};
use ferry_fs::*;
use parking_lot::Mutex;

use super::super::contents::CONTENTS_MAX;
use super::*;

/// A clock that stands still until it is set.
#[derive(Default)]
struct Hand(Mutex<Duration>);

impl Clock for Hand {
    fn monotonic(&self) -> Duration {
        *self.0.lock()
    }
    fn wall(&self) -> Duration {
        *self.0.lock()
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }

    fn one<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}

struct World {
    fs: Arc<LocalFs>,
    hand: Arc<Hand>,
    model: Model,
    random: Random,
    dirs: Vec<Ino>,
    files: Vec<Ino>,
    handles: Vec<(u64, Ino)>,
    decided: usize,
    /// Contents that were compared.
    read: usize,
}

impl World {
    fn new(seed: u64) -> Self {
        let hand = Arc::new(Hand::default());
        *hand.0.lock() = Duration::from_secs(1_000_000);
        let env = Env { clock: Arc::clone(&hand) as Arc<dyn Clock>, ..Env::real() };
        let dev: Arc<dyn BlockDevice> = Arc::new(MemDevice::new(64 << 20));
        mkfs(&dev, &MkfsOptions::default(), &env).unwrap();
        let options = FsOptions {
            cache: CacheMode::Strict,
            cache_bytes: 8 << 20,
            background: false,
            ..FsOptions::default()
        };
        let fs = LocalFs::open(dev, options, env).unwrap();
        let mut model = Model::default();
        let (root, _) = InProcess::default().call(|cx| fs.getattr(cx, ROOT, None)).unwrap();
        model.enter(root, true, Names::default());
        let random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let (files, handles) = (Vec::new(), Vec::new());
        Self { fs, hand, model, random, dirs: vec![ROOT], files, handles, decided: 0, read: 0 }
    }

    fn name(&mut self) -> Vec<u8> {
        self.random.one(&[b"a".as_slice(), b"b", b"c", b"dd", b"e\xff"]).into()
    }

    /// A random change; the open file that it names.
    fn op(&mut self) -> (Op, Option<(u64, Ino)>) {
        let (parent, new_parent) = (self.random.one(&self.dirs), self.random.one(&self.dirs));
        let (name, new_name) = (self.name(), self.name());
        let mode = self.random.below(0o10000) as u32;
        let any: Vec<Ino> = self.files.iter().chain(&self.dirs).copied().collect();
        let ino = self.random.one(&any);
        let open = (!self.handles.is_empty()).then(|| self.random.one(&self.handles));
        let op = match self.random.below(14) {
            0 => Op::Mkdir { parent, name, mode },
            1 => {
                let kind =
                    self.random.one(&[libc::S_IFREG, libc::S_IFIFO, libc::S_IFSOCK, libc::S_IFCHR]);
                Op::Mknod { parent, name, mode: kind | mode, rdev: 0x1203 }
            }
            2 => Op::Symlink { parent, name, target: vec![b'x'; 1 + mode as usize % 200] },
            3 | 4 => {
                let flags = libc::O_RDWR | libc::O_CREAT | self.random.one(&[0, libc::O_EXCL]);
                Op::Create { parent, name, mode, flags, fh: 0 }
            }
            5 => Op::Link { ino, parent, name },
            6 => Op::Unlink { parent, name },
            7 => Op::Rmdir { parent, name },
            8 | 9 => {
                let no_replace = self.random.below(5) == 0;
                let exchange = !no_replace && self.random.below(3) == 0;
                let flags = RenameFlags { no_replace, exchange, ..RenameFlags::default() };
                Op::Rename { parent, name, new_parent, new_name, flags }
            }
            10 | 11 => {
                let some = |random: &mut Random| random.below(3) == 0;
                let time = |random: &mut Random| match random.below(3) {
                    0 => Some(SetTime::Now),
                    1 => {
                        Some(SetTime::At(Timestamp::new(random.below(2_000_000) as i64 - 1000, 7)))
                    }
                    _ => None,
                };
                let r = &mut self.random;
                let set = SetAttr {
                    mode: some(r).then_some(mode & 0o7777),
                    uid: some(r).then_some(1000),
                    gid: some(r).then_some(100),
                    size: (r.below(2) == 0).then(|| r.below(20_000)),
                    atime: time(r),
                    mtime: time(r),
                    ctime: None,
                    kill_suidgid: some(r),
                };
                Op::Setattr { ino, fh: None, set }
            }
            12 if self.random.below(3) == 0 && !self.files.is_empty() => {
                let ino = self.random.one(&self.files);
                let kill_suidgid = self.random.below(2) == 0;
                Op::Open { ino, fh: 0, flags: libc::O_RDWR | libc::O_TRUNC, kill_suidgid }
            }
            _ => {
                let (append, kill_suidgid) = (self.random.below(3) == 0, self.random.below(3) == 0);
                let data = vec![7; self.random.below(9000) as usize + 1];
                Op::Write { fh: 0, offset: self.random.below(20_000), data, append, kill_suidgid }
            }
        };
        (op, open)
    }

    /// The same at the real file system.
    fn real(
        &self,
        op: &Op,
        caller: &Caller,
        open: Option<(u64, Ino)>,
    ) -> Result<(Option<Attr>, Option<u64>), Errno> {
        let me = InProcess {
            uid: caller.uid,
            gid: caller.gid,
            umask: caller.umask,
            ..InProcess::default()
        };
        let fs = &*self.fs;
        let entry = |entry: Entry| (entry.attr, None);
        match op {
            Op::Mkdir { parent, name, mode } => {
                me.call(|cx| fs.mkdir(cx, *parent, name, mode & 0o7777)).map(entry)
            }
            Op::Mknod { parent, name, mode, rdev } => {
                me.call(|cx| fs.mknod(cx, *parent, name, *mode, *rdev)).map(entry)
            }
            Op::Symlink { parent, name, target } => {
                me.call(|cx| fs.symlink(cx, *parent, name, target)).map(entry)
            }
            Op::Create { parent, name, mode, flags, .. } => {
                let made = me.call(|cx| fs.create(cx, *parent, name, mode | libc::S_IFREG, *flags));
                made.map(|(entry, opened)| (entry.attr, Some(opened.fh)))
            }
            Op::Link { ino, parent, name } => {
                me.call(|cx| fs.link(cx, *ino, *parent, name)).map(entry)
            }
            Op::Unlink { parent, name } => {
                me.call(|cx| fs.unlink(cx, *parent, name)).map(|()| (None, None))
            }
            Op::Rmdir { parent, name } => {
                me.call(|cx| fs.rmdir(cx, *parent, name)).map(|()| (None, None))
            }
            Op::Rename { parent, name, new_parent, new_name, flags } => me
                .call(|cx| fs.rename(cx, *parent, name, *new_parent, new_name, *flags))
                .map(|()| (None, None)),
            Op::Setattr { ino, set, .. } => {
                me.call(|cx| fs.setattr(cx, *ino, None, set)).map(|(attr, _)| (Some(attr), None))
            }
            Op::Open { ino, flags, kill_suidgid, .. } => {
                let opened = me.call(|cx| fs.open(cx, *ino, *flags, *kill_suidgid))?;
                Ok((None, Some(opened.fh)))
            }
            Op::Write { offset, data, append, kill_suidgid, .. } => {
                let (fh, ino) = open.unwrap();
                let count =
                    me.call(|cx| fs.write(cx, ino, fh, *offset, data, *append, *kill_suidgid))?;
                Ok((None, Some(count)))
            }
            other => panic!("{other:?}"),
        }
    }

    fn attr(&self, ino: Ino) -> Attr {
        InProcess::default().call(|cx| self.fs.getattr(cx, ino, None)).unwrap().0
    }

    /// As the file system has it, but for what only it knows.
    fn compare(&mut self, ino: Ino, at: &str) {
        if let Some((fh, _)) = self.handles.iter().find(|(_, open)| *open == ino) {
            let (mut ours, mut theirs) = (vec![0; 40_000], vec![0; 40_000]);
            if let Some(len) = self.model.read(ino, 100, &mut ours) {
                let read =
                    InProcess::default().call(|cx| self.fs.read(cx, ino, *fh, 100, &mut theirs));
                assert_eq!(read, Ok(len), "{at}: inode {ino}");
                assert!(ours[..len] == theirs[..len], "{at}: contents of inode {ino}");
                self.read += 1;
                let attr = self.attr(ino);
                self.model.inodes.get_mut(&ino).unwrap().attr.atime = attr.atime;
            }
        }
        let (ours, theirs) = (self.model.attr(ino).expect("held"), self.attr(ino));
        assert_eq!(Attr { blocks: 0, ..ours }, Attr { blocks: 0, ..theirs }, "{at}: inode {ino}");
    }

    fn step(&mut self, at: &str) {
        *self.hand.0.lock() += Duration::from_nanos(1_000_003);
        let now = Timestamp(self.hand.wall().as_nanos() as i128);
        let (op, open) = self.op();
        if matches!(op, Op::Write { .. }) && open.is_none() {
            return;
        }
        let at = format!("{at}: {op:?}");
        let caller = Caller {
            uid: self.random.one(&[0, 1000]),
            gid: self.random.one(&[0, 100]),
            pid: 1,
            umask: self.random.one(&[0, 0o22, 0o77]),
        };
        let missing = self.random.below(40) == 0;
        let lost = missing.then(|| self.random.one(&self.dirs));
        let given_back = lost.map(|ino| (ino, self.model.inodes.remove(&ino).unwrap()));
        let real = self.real(&op, &caller, open);
        let number = match &real {
            Ok((Some(attr), _)) => attr.ino,
            _ => 99_999_999,
        };
        let mut same = op.clone();
        let made = self.model.make(&mut same, &caller, now, Some(number), open.map(|(_, ino)| ino));
        match (&made, &real) {
            (Ok(made), Ok((attr, count))) => {
                self.decided += 1;
                match (&made.outcome, attr) {
                    (Outcome::Entry { known: Some(known) }, Some(attr)) => {
                        assert_eq!(
                            Attr { blocks: 0, ..known.attr },
                            Attr { blocks: 0, ..*attr },
                            "{at}"
                        );
                        assert_eq!(made.fresh, !matches!(op, Op::Link { .. }), "{at}");
                    }
                    (Outcome::Attributes { attr: ours }, Some(attr)) => {
                        assert_eq!(
                            Attr { blocks: 0, ..*ours },
                            Attr { blocks: 0, ..*attr },
                            "{at}"
                        );
                    }
                    (Outcome::Count { count: ours }, None) => {
                        assert_eq!(Some(*ours), *count, "{at}")
                    }
                    (Outcome::Done {}, None) => {}
                    (other, _) => panic!("{at}: {other:?}"),
                }
            }
            (Err(Not::Possible(ours)), Err(theirs)) => {
                self.decided += 1;
                assert_eq!(Errno(*ours), *theirs, "{at}");
            }
            (Err(Not::Held(inos)), _) => {
                assert!(lost.is_some_and(|lost| inos.contains(&lost)), "{at}: {inos:?} are held");
            }
            (Err(Not::Known | Not::Named(..)), _) => {}
            (ours, theirs) => panic!("{at}: {ours:?}, but {theirs:?}"),
        }
        if let Some((ino, held)) = given_back {
            self.model.inodes.insert(ino, held);
        }
        // What was not decided here is learned as it is, names too.
        if made.is_err() {
            self.learn(&op);
        }
        if let Ok((attr, fh)) = &real {
            let made = attr.filter(|_| !matches!(op, Op::Setattr { .. } | Op::Link { .. }));
            if let Some(attr) = made {
                let list = if is_dir(attr.mode) { &mut self.dirs } else { &mut self.files };
                if !list.contains(&attr.ino) {
                    list.push(attr.ino);
                }
                if let Op::Create { .. } = op {
                    self.handles.push((fh.unwrap(), attr.ino));
                }
            }
        }
        let held: Vec<Ino> = self.model.inodes.keys().copied().collect();
        held.into_iter().for_each(|ino| self.compare(ino, &at));
        // A removed directory is of no use any more.
        let model = &self.model;
        self.dirs.retain(|ino| model.attr(*ino).is_some_and(|attr| attr.nlink > 0));
        // Only regular files can be written and cut off.
        self.files.retain(|ino| model.attr(*ino).is_some());
    }

    /// Takes over all that the file system says of the inodes and names of a change.
    fn learn(&mut self, op: &Op) {
        let all: Vec<Ino> = self.model.inodes.keys().copied().collect();
        for ino in all {
            let attr = self.attr(ino);
            self.model.inodes.get_mut(&ino).unwrap().attr = attr;
        }
        let names: Vec<(Ino, &Vec<u8>)> = match op {
            Op::Rename { parent, name, new_parent, new_name, .. } => {
                vec![(*parent, name), (*new_parent, new_name)]
            }
            Op::Mkdir { parent, name, .. }
            | Op::Mknod { parent, name, .. }
            | Op::Symlink { parent, name, .. }
            | Op::Create { parent, name, .. }
            | Op::Link { parent, name, .. }
            | Op::Unlink { parent, name }
            | Op::Rmdir { parent, name } => vec![(*parent, name)],
            _ => Vec::new(),
        };
        for (dir, name) in names {
            let Ok(found) = InProcess::default().call(|cx| self.fs.lookup(cx, dir, name)) else {
                continue;
            };
            let what = found.attr.map_or(Name::Absent, |attr| Name::Is(attr.ino));
            self.model.learn_name(dir, name, what);
            if let Some(attr) = found.attr
                && !self.model.holds(attr.ino)
            {
                self.model.enter(attr, true, Names::default());
            }
        }
    }
}

#[test]
fn the_model_decides_as_the_file_system_does() {
    let (mut decided, mut read) = (0, 0);
    for seed in 0..24 {
        let mut world = World::new(seed);
        for step in 0..400 {
            world.step(&format!("seed {seed}, step {step}"));
        }
        decided += world.decided;
        read += world.read;
    }
    assert!(read > 1000, "{read} files were read");
    assert!(decided > 24 * 250, "{decided} of {} only", 24 * 400);
}

fn held(ino: Ino, mode: u32) -> Attr {
    let time = Timestamp(0);
    let (nlink, uid, gid, rdev, size, blocks) = (2, 0, 0, 0, 0, 0);
    Attr { ino, mode, nlink, uid, gid, rdev, size, blocks, atime: time, mtime: time, ctime: time }
}

#[test]
fn the_model_decides_nothing_about_unknown_inodes() {
    let mut model = Model::default();
    // It has entries of which nothing is known.
    model.enter(Attr { size: 3, ..held(ROOT, libc::S_IFDIR | 0o755) }, true, Names::default());
    let (caller, at) = (Caller::default(), Timestamp(9));
    let make = |model: &mut Model, mut op: Op| {
        model.make(&mut op, &caller, at, Some(10), None).unwrap_err()
    };
    let mkdir = |name: &str| Op::Mkdir { parent: ROOT, name: name.into(), mode: 0o755 };
    assert_eq!(make(&mut model, mkdir("a")), Not::Named(ROOT, b"a".to_vec()));
    model.learn_name(ROOT, b"a", Name::Is(7));
    assert_eq!(make(&mut model, mkdir("a")), Not::Possible(libc::EEXIST));
    let unlink = Op::Unlink { parent: ROOT, name: b"a".into() };
    assert_eq!(make(&mut model, unlink.clone()), Not::Held(vec![7]));
    model.learn_name(ROOT, b"b", Name::Absent);
    assert_eq!(
        model.make(&mut mkdir("b"), &caller, at, None, None).unwrap_err(),
        Not::Known,
        "no number"
    );
    let rename = Op::Rename {
        parent: ROOT,
        name: b"a".into(),
        new_parent: 8,
        new_name: b"a".into(),
        flags: RenameFlags::default(),
    };
    assert_eq!(make(&mut model, rename), Not::Held(vec![8]));
    assert_eq!(model.attr(ROOT).unwrap().ctime, Timestamp(0));
    model.enter(held(9, libc::S_IFDIR | 0o755), false, Names::default());
    let inherits = Op::Mkdir { parent: 9, name: b"a".into(), mode: 0o755 };
    assert_eq!(make(&mut model, inherits), Not::Known, "an ACL may be inherited");
    assert_eq!(
        make(
            &mut model,
            Op::Setattr { ino: 9, fh: None, set: SetAttr { mode: Some(0), ..SetAttr::default() } }
        ),
        Not::Known
    );
}

#[test]
fn contents_of_small_new_files_are_cached() {
    let mut model = Model::default();
    model.enter(held(ROOT, libc::S_IFDIR | 0o755), true, Names::default());
    let (caller, at) = (Caller::default(), Timestamp(9));
    let write = |model: &mut Model, offset, data| {
        let mut write = Op::Write { fh: 1, offset, data, append: false, kill_suidgid: false };
        model.make(&mut write, &caller, at, None, Some(10)).unwrap();
    };
    let mut create = Op::Create { parent: ROOT, name: b"f".to_vec(), mode: 0o644, flags: 0, fh: 1 };
    model.make(&mut create, &caller, at, Some(10), None).unwrap();
    let mut out = [0; 100];
    assert_eq!(model.read(10, 0, &mut out), Some(0));
    write(&mut model, 10, vec![7; CONTENTS_MAX as usize - 10]);
    assert_eq!(model.read(10, 0, &mut out[..11]), Some(11));
    assert_eq!(out[..12], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7, 0]);
    assert_eq!(model.read(10, CONTENTS_MAX - 10, &mut out), Some(10));
    assert_eq!(model.read(10, u64::MAX, &mut out), Some(0));
    write(&mut model, 20, vec![1; CONTENTS_MAX as usize]);
    assert_eq!(model.read(10, 0, &mut out), None, "it is too long now");
    model.contents.set(10, vec![1; 50]);
    model.enter(held(10, libc::S_IFREG), true, Names::default());
    assert_eq!(model.read(10, 0, &mut out), None, "the lease is another one");
    model.contents.set(10, vec![1; 50]);
    assert!(model.drop(10) && model.read(10, 0, &mut out).is_none());
    model.contents.set(10, vec![1; 50]);
    model.clear();
    assert_eq!((model.contents.bytes(), model.names), (0, 0));
}

#[test]
fn least_recently_used_leases_are_returned_first() {
    let mut model = Model::default();
    for ino in 0..=HELD_INODES_MAX as Ino {
        model.enter(held(ino + 10, libc::S_IFREG), true, Names::default());
    }
    let mut used = Op::Setattr { ino: 10, fh: None, set: SetAttr::default() };
    model.make(&mut used, &Caller::default(), Timestamp(1), None, None).unwrap();
    let surplus = model.surplus();
    assert_eq!(surplus.len(), HELD_INODES_MAX / 2);
    assert!(!surplus.contains(&10) && model.holds(10) && !model.holds(11));
    assert!(model.surplus().is_empty());
    assert_eq!(model.clear().len(), HELD_INODES_MAX / 2 + 1);
}
