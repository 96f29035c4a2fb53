//! Inodes that leave memory and come back.

use crate::requests::tests::*;
use crate::store::data_store::InodeSource;
use std::sync::atomic::Ordering;

const MANY: u64 = 9000;

fn world() -> (World, Vec<Ino>) {
    let dev: Arc<dyn BlockDevice> = Arc::new(MemDevice::new(256 << 20));
    mkfs(&dev, &MkfsOptions::default(), &Env::real()).unwrap();
    let options = FsOptions { background: false, cache_bytes: 64 << 20, ..FsOptions::default() };
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
fn inodes_that_the_data_half_loads_leave_memory() {
    let (world, files) = world();
    for ino in files {
        let inode = world.fs.table.inode(ino).unwrap().unwrap();
        assert_eq!(inode.ino, ino);
    }
    assert!(world.fs.table.len() <= 8192 + 16, "{}", world.fs.table.len());
}
