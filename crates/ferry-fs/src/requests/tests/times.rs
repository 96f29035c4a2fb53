//! Which operation moves which time, with a clock that ticks at every look.

use crate::requests::tests::*;
use ferry_env::Clock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Each look is a second later; more passes when told.
pub(crate) struct Ticking(AtomicU64);

impl Ticking {
    pub(crate) fn new() -> Self {
        Self(AtomicU64::new(4_000_000_000))
    }
    pub(crate) fn pass(&self, secs: u64) {
        self.0.fetch_add(secs, Ordering::Relaxed);
    }
}

impl Clock for Ticking {
    fn monotonic(&self) -> Duration {
        self.wall()
    }
    fn wall(&self) -> Duration {
        Duration::from_secs(self.0.fetch_add(1, Ordering::Relaxed))
    }
}

fn ticking() -> (World, Arc<Ticking>) {
    let world = World::new();
    world.fs.close().unwrap();
    let clock = Arc::new(Ticking::new());
    let env = Env { clock: clock.clone(), entropy: Env::real().entropy };
    let fs = LocalFs::open(world.dev.clone(), world.options.clone(), env).unwrap();
    (World { dev: world.dev.clone(), fs, me: world.me, options: world.options.clone() }, clock)
}

/// Which of `ino`'s times `act` moves: access, modification, change.
fn moves(world: &World, ino: Ino, act: impl FnOnce()) -> (bool, bool, bool) {
    let before = world.attr(ino);
    act();
    let after = world.attr(ino);
    (after.atime > before.atime, after.mtime > before.mtime, after.ctime > before.ctime)
}

fn ok<T: std::fmt::Debug>(result: Done<T>) {
    result.unwrap();
}

const NONE: (bool, bool, bool) = (false, false, false);
const CHANGE: (bool, bool, bool) = (false, false, true);
const CONTENTS: (bool, bool, bool) = (false, true, true);

#[test]
fn names_move_the_times_of_directories_and_of_what_they_lead_to() {
    let (world, _) = ticking();
    let dir = world.mkdir(ROOT, "dir").unwrap();
    let file = world.file(dir, "file").unwrap();
    let two = |ino, other, act: &dyn Fn()| {
        let mut of_other = NONE;
        let of_ino = moves(&world, ino, || of_other = moves(&world, other, act));
        (of_ino, of_other)
    };
    assert_eq!(two(dir, file, &|| world.link(file, dir, "link").unwrap()), (CONTENTS, CHANGE));
    assert_eq!(two(dir, file, &|| world.unlink(dir, "link").unwrap()), (CONTENTS, CHANGE));
    assert_eq!(
        two(dir, file, &|| world.rename((dir, "file"), (dir, "new")).unwrap()),
        (CONTENTS, CHANGE)
    );
    assert_eq!(two(dir, file, &|| ok(world.symlink(dir, "sym", "x"))), (CONTENTS, NONE));
    let sub = world.mkdir(dir, "sub").unwrap();
    assert_eq!(two(dir, sub, &|| ok(world.file(sub, "x"))), (NONE, CONTENTS));
    assert_eq!(
        two(dir, sub, &|| world.rename((dir, "new"), (sub, "x")).unwrap()),
        (CONTENTS, CONTENTS)
    );
    assert_eq!(two(dir, file, &|| ok(world.file(dir, "file"))), (CONTENTS, NONE));
    let failing = || assert!(world.file(dir, "file").is_err());
    assert_eq!(two(dir, file, &failing), (NONE, NONE), "a failure moves nothing");
}

#[test]
fn attributes_move_the_change_time() {
    let (world, _) = ticking();
    let file = world.file(ROOT, "file").unwrap();
    let mode = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    assert_eq!(moves(&world, file, || ok(world.set(file, mode))), CHANGE);
    assert_eq!(
        moves(&world, file, || ok(world.set(file, SetAttr { uid: Some(3), ..mode }))),
        CHANGE
    );
    assert_eq!(moves(&world, file, || world.setxattr(file, "user.x", b"").unwrap()), CHANGE);
    let touch =
        SetAttr { atime: Some(SetTime::Now), mtime: Some(SetTime::Now), ..SetAttr::default() };
    assert_eq!(moves(&world, file, || ok(world.set(file, touch))), (true, true, true));
    let old = Timestamp::new(-3, 500_000_001);
    let set = SetAttr { mtime: Some(SetTime::At(old)), ..SetAttr::default() };
    let attr = world.set(file, set).unwrap();
    assert_eq!((attr.mtime, attr.mtime.secs(), attr.mtime.nanos()), (old, -3, 500_000_001));
}

#[test]
fn contents_move_modification_and_change_time() {
    let (world, _) = ticking();
    let (file, fh) = world.create(ROOT, "file").unwrap();
    assert_eq!(moves(&world, file, || ok(world.write(file, fh, 0, b"x"))), CONTENTS);
    let size = SetAttr { size: Some(100), ..SetAttr::default() };
    assert_eq!(moves(&world, file, || ok(world.set(file, size))), CONTENTS);
    let truncate =
        || ok(world.me.call(|cx| world.fs.open(cx, file, libc::O_RDWR | libc::O_TRUNC, false)));
    assert_eq!(moves(&world, file, truncate), CONTENTS);
    assert_eq!(world.attr(file).size, 0);
    world.release(file, fh);
}

#[test]
fn reading_moves_the_access_time_once_after_a_change_and_once_a_day() {
    let (mut world, clock) = ticking();
    let (file, fh) = world.create(ROOT, "file").unwrap();
    world.write(file, fh, 0, b"x").unwrap();
    let accessed = (true, false, false);
    assert_eq!(moves(&world, file, || ok(world.read(file, fh, 1))), accessed);
    assert_eq!(moves(&world, file, || ok(world.read(file, fh, 1))), NONE);
    clock.pass(25 * 60 * 60);
    assert_eq!(moves(&world, file, || ok(world.read(file, fh, 1))), accessed);
    let link = world.symlink(ROOT, "link", "x").unwrap();
    assert_eq!(
        moves(&world, link, || ok(world.me.call(|cx| world.fs.readlink(cx, link)))),
        accessed
    );
    assert_eq!(moves(&world, ROOT, || ok(Ok(world.list(ROOT)))), accessed);
    assert_eq!(moves(&world, ROOT, || ok(Ok(world.list(ROOT)))), NONE);
    world.release(file, fh);
    let before = [file, link, ROOT].map(|ino| world.attr(ino).atime);
    world.reopen();
    assert_eq!(
        [file, link, ROOT].map(|ino| world.attr(ino).atime),
        before,
        "a clean unmount keeps them"
    );
}

#[test]
fn access_times_move_as_the_mount_and_the_descriptor_say() {
    use crate::AccessTimes::{Always, Never, Relative};
    for (access_times, directories) in
        [(Never, true), (Relative, true), (Relative, false), (Always, true)]
    {
        let options = FsOptions {
            background: false,
            access_times,
            directory_access_times: directories,
            ..FsOptions::default()
        };
        let world = World::with(options);
        let dir = world.mkdir(ROOT, "dir").unwrap();
        let file = world.file(dir, "file").unwrap();
        let fh = world.open(file).unwrap();
        world.me.call(|cx| world.fs.write(cx, file, fh, 0, b"data", false, false)).unwrap();
        let read = |fh: u64| assert_eq!(world.read(file, fh, 4).unwrap(), b"data");
        let quiet = world
            .me
            .call(|cx| world.fs.open(cx, file, libc::O_RDONLY | libc::O_NOATIME, false))
            .unwrap()
            .fh;
        assert_eq!(moves(&world, file, || read(quiet)), NONE, "{access_times:?}");
        let first = moves(&world, file, || read(fh));
        assert_eq!(first.0, access_times != Never, "{access_times:?}");
        let second = moves(&world, file, || read(fh));
        assert_eq!(second.0, access_times == Always, "{access_times:?}");
        let listed = moves(&world, dir, || drop(world.list(dir)));
        assert_eq!(listed.0, access_times != Never && directories, "{access_times:?}");
        world.release(file, quiet);
        world.release(file, fh);
        world.check();
    }
}
