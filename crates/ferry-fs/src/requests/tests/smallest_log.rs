//! The largest operations on the smallest log that a volume may have: each fits, or is done in
//! several transactions.

use crate::requests::tests::*;
use crate::volume::LOG_MIN;

const BLOCK: u64 = keys::BLOCK;
/// Blocks of a file whose extents are all of one block, each in another place: one window of the
/// extent map, and a little.
const BLOCKS: u64 = 1100;
/// Beyond everything that is written: 10 TiB.
const FAR: u64 = 10 << 40;

/// Short segments: the blocks of a file can be in many of them.
const SHORT: u64 = 256 << 10;
/// Long ones: one batch of write-back can be as long as it ever is.
const LONG: u64 = 8 << 20;

fn world(segment: u64, background: bool) -> World {
    let made = MkfsOptions {
        log_size: Some(LOG_MIN),
        segment_size: Some(segment),
        ..MkfsOptions::default()
    };
    let options = FsOptions { background, cache_bytes: 16 << 20, ..FsOptions::default() };
    World::made(192 << 20, &made, options)
}

fn block_of(n: u64) -> Vec<u8> {
    vec![n as u8 | 1; BLOCK as usize]
}

/// Writes every block of a file for itself, far from its neighbours on the device.
fn scatter(world: &World, ino: Ino, fh: u64, blocks: u64) {
    // A step without a common divisor with the number of blocks visits each of them once.
    let step = (blocks * 5 / 13..).find(|step| gcd(*step, blocks) == 1).unwrap();
    for n in 0..blocks {
        let block = n * step % blocks;
        world.write(ino, fh, block * BLOCK, &block_of(block)).unwrap();
        world.fs.data.write_back(&world.fs.table.need(ino).unwrap()).unwrap();
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn size_to(world: &World, ino: Ino, size: u64) -> Done<Attr> {
    world.set(ino, SetAttr { size: Some(size), ..SetAttr::default() })
}

#[test]
fn what_fits_one_transaction_only() {
    let world = world(SHORT, false);
    let name = "n".repeat(255);
    let file = world.file(ROOT, &name).unwrap();
    world.setxattr(file, &format!("user.{}", "x".repeat(250)), &[7; XATTR_SIZE_MAX]).unwrap();
    let link = world.symlink(ROOT, "link", &"t".repeat(4095)).unwrap();
    world.setxattr(link, &format!("trusted.{}", "x".repeat(247)), &[8; XATTR_SIZE_MAX]).unwrap();
    world.check();
    world.unlink(ROOT, &name).unwrap();
    world.unlink(ROOT, "link").unwrap();
    world.check();
}

#[test]
fn scattered_blocks_are_overwritten_in_one_go() {
    let world = world(LONG, false);
    let (ino, fh) = world.create(ROOT, "file").unwrap();
    scatter(&world, ino, fh, BLOCKS);
    let new = vec![0xaa; (BLOCKS * BLOCK) as usize];
    for (n, piece) in (0..).zip(new.chunks(1 << 20)) {
        world.write(ino, fh, n << 20, piece).unwrap();
    }
    world.check();
    assert!(world.read(ino, fh, new.len()).unwrap() == new, "the file is what was written last");
    world.release(ino, fh);
}

#[test]
fn a_huge_sparse_file_is_cut_removed_and_replaced() {
    for end in ["cut", "punch", "unlink", "replace", "exchange"] {
        let mut world = world(SHORT, false);
        let (ino, fh) = world.create(ROOT, "huge").unwrap();
        scatter(&world, ino, fh, BLOCKS);
        for n in 0..50 {
            world.write(ino, fh, FAR / 50 * n + FAR / 100, &block_of(n)).unwrap();
        }
        size_to(&world, ino, FAR).unwrap();
        world.check();
        match end {
            "cut" => drop(size_to(&world, ino, BLOCK).unwrap()),
            "punch" => {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                world
                    .me
                    .call(|cx| world.fs.fallocate(cx, ino, fh, mode, BLOCK, FAR - BLOCK))
                    .unwrap();
            }
            "unlink" => world.unlink(ROOT, "huge").unwrap(),
            _ => {
                let flags = RenameFlags { exchange: end == "exchange", ..RenameFlags::default() };
                world.file(ROOT, "small").unwrap();
                world.rename_with((ROOT, "small"), (ROOT, "huge"), flags).unwrap();
                assert_eq!(world.exists(ROOT, "small"), flags.exchange);
            }
        }
        world.check();
        if matches!(end, "cut" | "punch") {
            assert_eq!(world.attr(ino).blocks, 8, "{end}: the first block is left");
        }
        world.release(ino, fh);
        world.fs.forget(ino, 1);
        world.reopen();
        world.check();
        assert_eq!(world.stored(ino), !matches!(end, "unlink" | "replace"), "{end}");
    }
}

#[test]
fn space_is_promised_between_the_blocks_of_a_file() {
    let world = world(SHORT, false);
    let (ino, fh) = world.create(ROOT, "file").unwrap();
    for n in 0..BLOCKS {
        world.write(ino, fh, 2 * n * BLOCK, &block_of(n)).unwrap();
    }
    world.check();
    world.me.call(|cx| world.fs.fallocate(cx, ino, fh, 0, 0, 2 * BLOCKS * BLOCK)).unwrap();
    world.check();
    assert_eq!(world.attr(ino).blocks, 2 * BLOCKS * 8);
    world.release(ino, fh);
}

/// The same by many at once, in the background: nobody is refused, nobody waits for ever.
#[test]
fn large_and_small_operations_share_the_log() {
    let world = world(SHORT, true);
    let value = vec![3; XATTR_SIZE_MAX];
    std::thread::scope(|scope| {
        for worker in 0..6 {
            let (world, value) = (&world, &value);
            scope.spawn(move || {
                let (ino, fh) = world.create(ROOT, &format!("{worker}")).unwrap();
                for n in 0..20 {
                    world.setxattr(ino, &format!("user.{n}"), value).unwrap();
                    world.file(ROOT, &format!("{worker} {n}")).unwrap();
                    world.write(ino, fh, 0, &vec![n as u8; 1 << 20]).unwrap();
                }
                world.release(ino, fh);
            });
        }
    });
    world.check();
}
