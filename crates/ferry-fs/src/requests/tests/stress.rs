//! Many threads at once, in few directories, so that they meet; then every rule must hold.

use crate::requests::tests::*;

/// A cheap sequence of numbers that follows from its seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % sides
    }
}

/// Errors that the others may cause.
const EXPECTED: [i32; 9] = [
    libc::ENOENT,
    libc::EEXIST,
    libc::ENOTDIR,
    libc::EISDIR,
    libc::ENOTEMPTY,
    libc::EINVAL,
    libc::ESTALE,
    libc::EPERM,
    libc::ENODATA,
];

fn act(world: &World, dirs: &[Ino], dice: &mut Dice) -> Done {
    let mut place = || (dirs[dice.roll(dirs.len())], ["a", "b", "c"][dice.roll(3)]);
    let ((da, na), (db, nb)) = (place(), place());
    match dice.roll(12) {
        0..3 => world.mkdir(da, na).map(drop),
        3 | 4 => {
            let (ino, fh) = world.create(da, na)?;
            let written = world.write(ino, fh, 0, b"contents");
            world.release(ino, fh);
            world.fs.forget(ino, 1);
            written.map(drop)
        }
        5 => world.unlink(da, na),
        6 => world.rmdir(da, na),
        7 => world.rename((da, na), (db, nb)),
        8 => world.rename_with(
            (da, na),
            (db, nb),
            RenameFlags { no_replace: false, exchange: true, whiteout: false },
        ),
        9 => {
            let Some(attr) = world.lookup(da, na)? else { return Ok(()) };
            let linked = world.link(attr.ino, db, nb);
            let _ = world.setxattr(attr.ino, "user.x", b"v");
            world.fs.forget(attr.ino, 1);
            linked
        }
        10 => world.me.call(|cx| {
            world.fs.readdir(cx, da, 0, 0, true, &mut |entry| {
                if let Some(attr) = entry.entry.and_then(|e| e.attr) {
                    world.fs.forget(attr.ino, 1);
                }
                true
            })
        }),
        _ => world.me.call(|cx| world.fs.fsyncdir(cx, da, 0, false)),
    }
}

#[test]
fn threads_that_meet_leave_a_volume_that_keeps_every_rule() {
    let mut world = World::with(FsOptions { cache_bytes: 8 << 20, ..FsOptions::default() });
    let mut dirs = vec![ROOT];
    for name in ["x", "y", "z"] {
        dirs.push(world.mkdir(dirs[dirs.len() / 2], name).unwrap());
    }
    // Kept known, so that the numbers stay valid when the directories move or go.
    let known: Vec<_> = dirs.iter().map(|d| world.fs.table.get(*d).unwrap().unwrap()).collect();
    known.iter().for_each(|inode| {
        inode.lookups.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    });
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let (world, dirs) = (&world, &dirs);
            scope.spawn(move || {
                let mut dice = Dice(seed);
                for _ in 0..3000 {
                    if let Err(error) = act(world, dirs, &mut dice) {
                        assert!(EXPECTED.contains(&error.0), "{error}");
                    }
                }
            });
        }
    });
    drop(known);
    world.check();
    world.reopen();
    let waited = (0..1_000_000).any(|_| {
        std::thread::yield_now();
        world.fs.reclaimer.waiting() == 0
    });
    assert!(waited, "what was removed is reclaimed in the background");
    world.check();
    assert!(
        world
            .fs
            .table
            .all()
            .iter()
            .all(|inode| inode.lookups.load(std::sync::atomic::Ordering::Relaxed) == 0)
    );
}
