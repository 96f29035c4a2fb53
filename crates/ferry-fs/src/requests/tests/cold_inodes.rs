//! Inodes that leave memory and come back.

use crate::inode::incore::Inode;
use crate::inode::table::InodeSource;
use crate::requests::tests::*;
use std::sync::atomic::Ordering;
use std::time::Duration;

const MANY: u64 = 9000;

fn tiny(cache: CacheMode) -> World {
    let options = FsOptions { background: false, cache_bytes: 1 << 20, ..FsOptions::default() };
    World::with(FsOptions { cache, ..options })
}

/// A world in which each inode leaves memory as soon as it may.
pub(super) fn none_stays() -> World {
    tiny(CacheMode::Kernel)
}

/// All inodes that may leave memory do.
pub(super) fn all_leave(world: &World) {
    world.fs.table.trim(0);
}

fn is_in_memory(world: &World, ino: Ino) -> bool {
    world.fs.table.peek(ino).is_some()
}

fn inode(world: &World, ino: Ino) -> Arc<Inode> {
    world.fs.table.need(ino).unwrap()
}

/// Makes a file that the kernel knows and nobody has open.
fn known(world: &World, name: &str) -> Ino {
    known_in(world, ROOT, name)
}

fn known_in(world: &World, dir: Ino, name: &str) -> Ino {
    let (ino, fh) = world.create(dir, name).unwrap();
    world.release(ino, fh);
    ino
}

#[test]
fn a_known_inode_leaves_memory_and_is_forgotten_without_coming_back() {
    let world = none_stays();
    let ino = known(&world, "f");
    assert_eq!(world.lookup(ROOT, "f").unwrap().unwrap().ino, ino);
    all_leave(&world);
    assert!(!is_in_memory(&world, ino));
    let remembered = || world.fs.table.counts().remembered;
    assert_eq!(remembered(), 1);
    world.fs.forget(ino, 1);
    assert_eq!((remembered(), is_in_memory(&world, ino)), (1, false));
    world.fs.forget(ino, 1);
    assert_eq!((remembered(), is_in_memory(&world, ino)), (0, false));
}

#[test]
fn an_open_file_stays_and_a_removed_one_until_it_is_forgotten() {
    let world = none_stays();
    let (ino, fh) = world.create(ROOT, "f").unwrap();
    all_leave(&world);
    assert!(is_in_memory(&world, ino), "it is open");
    world.release(ino, fh);
    all_leave(&world);
    assert!(!is_in_memory(&world, ino));
    world.unlink(ROOT, "f").unwrap();
    all_leave(&world);
    assert_eq!(world.attr(ino).nlink, 0);
    assert!(world.stored(ino) && is_in_memory(&world, ino), "the kernel knows it");
    world.fs.forget(ino, 1);
    assert!(!world.stored(ino) && !is_in_memory(&world, ino));
    world.check();
}

#[test]
fn an_error_that_nobody_was_told_of_is_not_dropped() {
    let world = none_stays();
    let ino = known(&world, "f");
    inode(&world, ino).file.errors.add(Errno(libc::EIO));
    all_leave(&world);
    let fh = world.open(ino).unwrap();
    let told = world.me.call(|cx| world.fs.flush(cx, ino, fh, 0));
    assert_eq!(told, Err(Errno(libc::EIO)));
}

#[test]
fn an_inode_whose_errors_were_told_leaves_memory() {
    let world = none_stays();
    let files = [0, 1, 2].map(|i| {
        let (ino, first) = world.create(ROOT, &format!("f{i}")).unwrap();
        let second = world.open(ino).unwrap();
        inode(&world, ino).file.errors.add(Errno(libc::EIO));
        for fh in [first, second] {
            let told = world.me.call(|cx| world.fs.fsync(cx, ino, fh, false));
            assert_eq!(told, Err(Errno(libc::EIO)));
        }
        world.release(ino, first);
        all_leave(&world);
        assert!(is_in_memory(&world, ino), "it is open");
        world.release(ino, second);
        ino
    });
    all_leave(&world);
    for ino in files {
        assert!(!is_in_memory(&world, ino));
        let fh = world.open(ino).unwrap();
        world.me.call(|cx| world.fs.fsync(cx, ino, fh, false)).unwrap();
        world.release(ino, fh);
    }
}

#[test]
fn what_waits_for_write_back_stays() {
    let world = none_stays();
    let (ino, fh) = world.create(ROOT, "f").unwrap();
    world.write(ino, fh, 0, &[7; 5000]).unwrap();
    world.release(ino, fh);
    all_leave(&world);
    assert!(is_in_memory(&world, ino));
    let before = world.attr(ino);
    world.fs.sync().unwrap();
    all_leave(&world);
    assert!(!is_in_memory(&world, ino));
    assert_eq!(world.attr(ino), before, "size, blocks and times come back");
    let fh = world.open(ino).unwrap();
    assert_eq!(world.read(ino, fh, 9000).unwrap(), [7; 5000]);
}

#[test]
fn times_are_logged_before_the_inode_leaves() {
    let world = none_stays();
    let ino = known(&world, "f");
    world.fs.sync().unwrap();
    let at = Timestamp(world.attr(ino).atime.0 + Duration::from_secs(5).as_nanos() as i128);
    {
        let inode = inode(&world, ino);
        let mut state = inode.state.write();
        state.rec.atime = at;
        state.times_dirty = true;
    }
    all_leave(&world);
    assert!(is_in_memory(&world, ino), "the journal does not have the time");
    world.fs.sync().unwrap();
    all_leave(&world);
    assert!(!is_in_memory(&world, ino));
    assert_eq!(world.attr(ino).atime, at);
}

#[test]
fn that_the_kernel_has_mapped_a_file_is_remembered() {
    let world = tiny(CacheMode::Strict);
    let (ino, fh) = world.create(ROOT, "f").unwrap();
    world.me.call(|cx| world.fs.read_pages(cx, ino, fh, 0, &mut [0; 10])).unwrap();
    world.release(ino, fh);
    world.fs.sync().unwrap();
    all_leave(&world);
    assert!(!is_in_memory(&world, ino));
    let fh = world.open(ino).unwrap();
    assert!(world.fs.keeps_pages(ino, fh));
}

#[test]
fn what_an_unprivileged_write_takes_away_is_known_of_an_inode_that_has_left() {
    let world = none_stays();
    let ino = known(&world, "f");
    world.set(ino, SetAttr { mode: Some(0o4755), ..SetAttr::default() }).unwrap();
    all_leave(&world);
    assert!(world.fs.loses_privileges(ino));
}

#[test]
fn a_directory_that_leaves_takes_its_cached_names_along() {
    let world = none_stays();
    let dir = world.mkdir(ROOT, "dir").unwrap();
    let names: Vec<String> = (0..100).map(|i| format!("f{i}")).collect();
    assert!(names.iter().all(|name| world.file(dir, name).is_ok()));
    assert!(world.fs.table.dir_entries() >= 100);
    all_leave(&world);
    assert!(!is_in_memory(&world, dir));
    assert!(world.fs.table.dir_entries() < 100);
    assert!(names.iter().all(|name| world.exists(dir, name)));
    assert_eq!(world.list(dir).len(), 100);
    assert!(world.fs.table.dir_entries() <= 102, "nothing is counted twice");
    world.check();
}

fn world() -> (World, Vec<Ino>) {
    let dev: Arc<dyn BlockDevice> = Arc::new(MemDevice::new(256 << 20));
    mkfs(&dev, &MkfsOptions::default(), &Env::real()).unwrap();
    let options = FsOptions { background: false, cache_bytes: 32 << 20, ..FsOptions::default() };
    let fs = LocalFs::open(dev.clone(), options.clone(), Env::real()).unwrap();
    let world = World { dev, fs, me: InProcess::default(), options };
    let files = (0..2 * MANY).map(|i| world.file(ROOT, &format!("f{i}")).unwrap()).collect();
    world.fs.sync().unwrap();
    (world, files)
}

/// Everybody is looked at once, so that the oldest go.
fn visit(world: &World) {
    for i in 0..2 * MANY {
        assert!(world.exists(ROOT, &format!("f{i}")));
    }
}

#[test]
fn fsync_of_an_inode_that_was_evicted_meanwhile_is_honest() {
    let (world, _) = world();
    let ino = world.file(ROOT, "new").unwrap();
    let seq = world.fs.newest.load(Ordering::Acquire);
    assert!(world.fs.journal.durable().0 < seq, "not durable yet");
    visit(&world);
    assert!(world.fs.journal.durable().0 < seq, "still not");
    assert!(!is_in_memory(&world, ino));
    let found = world.lookup(ROOT, "new").unwrap().unwrap();
    assert_eq!(found.ino, ino);
    let fh = world.open(ino).unwrap();
    world.me.call(|cx| world.fs.fsync(cx, ino, fh, false)).unwrap();
    assert!(world.fs.journal.durable().0 >= seq, "fsync lied");
}

#[test]
fn an_inode_that_was_busy_when_its_turn_came_leaves_memory_later() {
    let (world, _) = world();
    let (ino, fh) = world.create(ROOT, "dirty").unwrap();
    world.me.call(|cx| world.fs.write(cx, ino, fh, 0, &[1; 9000], false, false)).unwrap();
    world.release(ino, fh);
    world.fs.forget(ino, 1);
    visit(&world);
    world.fs.sync().unwrap();
    visit(&world);
    visit(&world);
    assert!(world.fs.table.peek(ino).is_none());
}

#[test]
fn inodes_loaded_by_the_store_leave_memory() {
    let (world, files) = world();
    for ino in files {
        let inode = world.fs.table.inode(ino).unwrap().unwrap();
        assert_eq!(inode.ino, ino);
    }
    let counts = world.fs.table.counts();
    assert!(counts.resident <= 8192 + 16, "{counts:?}");
    assert_eq!(world.fs.stats()["inodes"]["in_memory"], counts.resident);
}

#[test]
fn contents_give_way_to_inodes_and_all_to_a_lower_limit() {
    let world =
        World::with(FsOptions { background: false, cache_bytes: 16 << 20, ..FsOptions::default() });
    let memory = |what: &str| world.fs.stats()["memory"][what].as_u64().unwrap();
    world.fs.set_memory_limit(16 << 20);
    let contents_most = || world.fs.stats()["data"]["cache_limit_bytes"].as_u64().unwrap();
    let alone = contents_most();
    let dir = world.mkdir(ROOT, "dir").unwrap();
    for i in 0..3000 {
        known_in(&world, dir, &format!("f{i}"));
    }
    world.fs.set_memory_limit(16 << 20);
    let taken = ["inodes_bytes", "remembered_bytes", "names_bytes"].map(memory);
    assert!(taken.iter().all(|bytes| *bytes > 0), "{taken:?}");
    assert_eq!(contents_most(), (12 << 20) - taken.iter().sum::<u64>());
    assert!(contents_most() < alone);

    world.fs.set_memory_limit(5 << 20);
    assert_eq!(memory("limit_bytes"), 5 << 20);
    assert!(memory("inodes_bytes") < taken[0] && memory("remembered_bytes") > taken[1]);
    assert!(contents_most() < 1 << 20);
    assert_eq!(memory("cache_size_bytes"), 16 << 20);
    world.fs.set_memory_limit(usize::MAX);
    assert_eq!(memory("limit_bytes"), 16 << 20, "never more than was asked for");
    assert!(contents_most() > 10 << 20);
}
