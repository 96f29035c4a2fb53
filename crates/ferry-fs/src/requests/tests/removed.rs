//! Space of removed files: whoever finds none waits for it, statfs counts it at once, and the host
//! gets it back.

use crate::requests::tests::pressure::Thread;
use crate::requests::tests::*;
use ferry_env::Clock;
use std::time::Duration;

/// Time that goes a thousand times slower: nothing that is waited for comes too late.
struct Slow(Arc<dyn Clock>);

impl Clock for Slow {
    fn monotonic(&self) -> Duration {
        self.0.monotonic() / 1000
    }
    fn wall(&self) -> Duration {
        self.0.wall()
    }
}

/// A volume with threads, and time that hardly passes.
fn world() -> World {
    let dev: Arc<dyn BlockDevice> = Arc::new(MemDevice::new(32 << 20));
    mkfs(&dev, &MkfsOptions::default(), &Env::real()).unwrap();
    let options = FsOptions { cache_bytes: 8 << 20, ..FsOptions::default() };
    let real = Env::real();
    let env = Env { clock: Arc::new(Slow(real.clock)), entropy: real.entropy };
    let fs = LocalFs::open(dev.clone(), options.clone(), env).unwrap();
    World { dev, fs, me: InProcess::default(), options }
}

/// Writes to the file until the volume is full. The last that fits is not larger than a block.
fn fill(world: &World, ino: Ino, fh: u64) -> u64 {
    let (mut at, mut len) = (0, 1 << 20);
    loop {
        match world.write(ino, fh, at, &vec![7; len]) {
            Ok(_) => at += len as u64,
            Err(error) if len == 4096 => {
                assert_eq!(error, Errno(libc::ENOSPC));
                return at;
            }
            Err(_) => len /= 2,
        }
    }
}

/// A new file with these contents, which is removed again.
fn write_all(world: &World, name: &str, contents: &[u8]) {
    let (ino, fh) = world.create(ROOT, name).unwrap();
    assert_eq!(world.write(ino, fh, 0, contents), Ok(contents.len() as u64));
    world.release(ino, fh);
    world.unlink(ROOT, name).unwrap();
    world.fs.forget(ino, 1);
}

fn statfs(world: &World) -> Statfs {
    world.me.call(|cx| world.fs.statfs(cx)).unwrap()
}

/// The volume is full with one file; it is closed and removed, and the kernel has not forgotten it
/// yet.
fn removed_and_not_forgotten(world: &World) -> Ino {
    let (ino, fh) = world.create(ROOT, "large").unwrap();
    fill(world, ino, fh);
    world.release(ino, fh);
    world.unlink(ROOT, "large").unwrap();
    ino
}

#[test]
fn a_write_waits_for_the_space_of_a_removed_file() {
    let world = world();
    let (other, fh) = world.create(ROOT, "other").unwrap();
    let ino = removed_and_not_forgotten(&world);
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| world.write(other, fh, 0, &vec![8; 1 << 20]));
        while !world.fs.data.holds_writers() && !writing.is_finished() {
            std::thread::yield_now();
        }
        world.fs.forget(ino, 1);
        writing.join().unwrap().unwrap();
    });
    world.release(other, fh);
    world.fs.forget(other, 1);
    world.check();
}

#[test]
fn who_waits_for_removed_space_leaves_the_thread_to_the_kernel() {
    let world = world();
    let (other, fh) = world.create(ROOT, "other").unwrap();
    let ino = removed_and_not_forgotten(&world);
    let (thread, answers) = Thread::new();
    let written = world.fs.write(&thread.cx(), other, fh, 0, &vec![8; 1 << 20], false, false);
    assert!(matches!(written, Err(Stop::Parked)), "{written:?}");
    let longer = SetAttr { size: Some(10_000), ..SetAttr::default() };
    let sized = world.fs.setattr(&thread.cx(), other, None, &longer);
    assert!(matches!(sized, Err(Stop::Parked)), "{sized:?}");
    let promised = world.fs.fallocate(&thread.cx(), other, fh, 0, 0, 2 << 20);
    assert!(matches!(promised, Err(Stop::Parked)), "{promised:?}");
    world.fs.forget(ino, 1);
    for _ in 0..3 {
        answers.recv().unwrap().1.unwrap();
    }
    world.release(other, fh);
    world.fs.forget(other, 1);
    world.check();
}

/// A file that a program holds open keeps its space; nobody waits for it longer than the kernel
/// needs to close what is closed.
#[test]
fn an_open_file_without_a_name_is_not_waited_for() {
    let world = World::with(FsOptions { cache_bytes: 8 << 20, ..FsOptions::default() });
    let (ino, fh) = world.create(ROOT, "large").unwrap();
    fill(&world, ino, fh);
    world.unlink(ROOT, "large").unwrap();
    let (other, other_fh) = world.create(ROOT, "other").unwrap();
    let refused = world.write(other, other_fh, 0, &[8; 10_000]);
    assert_eq!(refused, Err(Errno(libc::ENOSPC)));
    for (ino, fh) in [(ino, fh), (other, other_fh)] {
        world.release(ino, fh);
        world.fs.forget(ino, 1);
    }
    write_all(&world, "again", &vec![9; 1 << 20]);
    world.check();
}

#[test]
fn statfs_counts_what_is_being_removed_as_free() {
    let world = world();
    let (ino, fh) = world.create(ROOT, "large").unwrap();
    world.write(ino, fh, 0, &vec![7; 8 << 20]).unwrap();
    let before = statfs(&world);
    world.unlink(ROOT, "large").unwrap();
    assert_eq!(statfs(&world).blocks_available, before.blocks_available, "it is open");
    world.release(ino, fh);
    let after = statfs(&world);
    assert_eq!(after.blocks_available, before.blocks_available + (8 << 20) / 4096);
    assert_eq!(after.blocks_free, before.blocks_free + (8 << 20) / 4096);
    world.fs.forget(ino, 1);
}

/// Metadata grows into segments and shrinks again: what is there for all stays the same, and what
/// is removed is free at once.
#[test]
fn statfs_has_one_total_and_knows_of_removed_metadata() {
    let world =
        World::with(FsOptions { background: false, cache_bytes: 8 << 20, ..FsOptions::default() });
    let new = statfs(&world);
    let mut made = 0;
    while world.file(ROOT, &format!("file {made}")).is_ok() {
        let (ino, fh) = (world.ino(ROOT, &format!("file {made}")), 0);
        let fh = world.open(ino).unwrap_or(fh);
        let written = world.write(ino, fh, 0, &[7; 1800]);
        world.release(ino, fh);
        made += 1;
        if made % 256 == 0 {
            world.fs.journal.checkpoint().unwrap();
            assert_eq!(statfs(&world).blocks, new.blocks);
        }
        if written.is_err() {
            break;
        }
    }
    assert!(statfs(&world).blocks_available < new.blocks_available / 8);
    for n in 0..made {
        world.unlink(ROOT, &format!("file {n}")).unwrap();
    }
    let end = statfs(&world);
    assert_eq!(end.blocks, new.blocks);
    let (free, all) = (end.blocks_available, new.blocks_available);
    assert!(free > all - all / 5, "{free} of {all} blocks are free");
    write_all(&world, "large", &vec![9; (free * 4096) as usize - (3 << 20)]);
    world.check();
}
