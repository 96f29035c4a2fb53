//! Listings: in pieces, under change, and of directories too large for the cache.

use crate::inode::dir_cache::LOAD_MAX;
use crate::requests::tests::*;

/// Lists `most` entries behind `cookie`: names with their cookies.
fn chunk(world: &World, dir: Ino, cookie: u64, most: usize, plus: bool) -> Vec<DirEntry> {
    let mut out = Vec::new();
    world
        .me
        .call(|cx| {
            world.fs.readdir(cx, dir, 0, cookie, plus, &mut |entry| {
                if out.len() < most {
                    out.push(entry.clone());
                    return true;
                }
                false
            })
        })
        .unwrap();
    out
}

fn lookups(world: &World, ino: Ino) -> u64 {
    world
        .fs
        .table
        .peek(ino)
        .map_or(0, |inode| inode.lookups.load(std::sync::atomic::Ordering::Relaxed))
}

#[test]
fn a_listing_has_each_remaining_name_once_despite_changes() {
    for evicted in [false, true] {
        let world = World::new();
        let dir = world.mkdir(ROOT, "dir").unwrap();
        for i in 0..500 {
            world.file(dir, &format!("stays-{i}")).unwrap();
            world.file(dir, &format!("goes-{i}")).unwrap();
        }
        let (mut seen, mut cookie, mut round) = (BTreeMap::new(), 0, 0);
        loop {
            let got = chunk(&world, dir, cookie, 7, false);
            let Some(last) = got.last() else { break };
            assert!(last.cookie > cookie, "cookies grow");
            cookie = last.cookie;
            got.iter().for_each(|e| *seen.entry(e.name.clone()).or_insert(0) += 1);
            if round < 500 {
                world.unlink(dir, &format!("goes-{round}")).unwrap();
                world.file(dir, &format!("comes-{round}")).unwrap();
            }
            if evicted {
                world.fs.table.peek(dir).unwrap().dir.clear();
            }
            round += 1;
        }
        assert!(seen.values().all(|times| *times == 1));
        let stays = seen.keys().filter(|name| name.starts_with(b"stays-")).count();
        assert_eq!(
            (stays, seen.contains_key(&b"."[..]), seen.contains_key(&b".."[..])),
            (500, true, true)
        );
    }
}

#[test]
fn an_entry_that_did_not_fit_counts_no_lookup() {
    let world = World::new();
    let inos: Vec<_> = (0..100).map(|i| world.file(ROOT, &format!("f{i}")).unwrap()).collect();
    let got = chunk(&world, ROOT, 0, 10, true);
    let named: Vec<_> =
        got.iter().filter_map(|e| e.entry.and_then(|e| e.attr)).map(|a| a.ino).collect();
    assert_eq!((got.len(), named.len()), (10, 8), "dots carry no entry");
    for ino in inos {
        assert_eq!(lookups(&world, ino), u64::from(named.contains(&ino)));
    }
    let rest = chunk(&world, ROOT, got[9].cookie, 1000, true);
    assert_eq!(rest.len(), 92);
}

#[test]
fn a_directory_too_large_for_the_cache() {
    let world = World::with(FsOptions { background: false, ..FsOptions::default() });
    let dir = world.mkdir(ROOT, "large").unwrap();
    let count = LOAD_MAX + 100;
    for i in 0..count {
        world.mknod(dir, &format!("{i}"), libc::S_IFIFO).unwrap();
    }
    let inode = world.fs.table.get(dir).unwrap().unwrap();
    assert_eq!(inode.dir.clear() as u64, count);
    assert!(world.exists(dir, "77") && !world.exists(dir, "none"));
    assert!(!inode.dir.is_complete(), "one lookup does not load it");
    assert_eq!(code(world.file(dir, "78")), libc::EEXIST);
    world.file(dir, "another").unwrap();
    world.unlink(dir, "another").unwrap();
    world.rename((dir, "79"), (dir, "renamed")).unwrap();
    assert_eq!(world.list(dir).len() as u64, count);
    assert!(!inode.dir.is_complete(), "and neither does a listing");
}

#[test]
fn a_directory_is_loaded_once_lookups_have_cost_as_much() {
    let world = World::new();
    let dir = world.mkdir(ROOT, "d").unwrap();
    for i in 0..1000 {
        world.mknod(dir, &format!("{i}"), libc::S_IFIFO).unwrap();
    }
    let inode = world.fs.table.get(dir).unwrap().unwrap();
    for _ in 0..2 {
        assert_eq!(inode.dir.clear(), 1000);
        let looked_up =
            (0..).take_while(|i| world.exists(dir, &i.to_string()) && !inode.dir.is_complete());
        assert_eq!(looked_up.count(), 249, "four listed for each");
    }
    world.check();
}

#[test]
fn equal_hashes_share_a_cookie_base() {
    // 54 bits do not collide by chance: entries are planted with the base of another name's hash.
    let world = World::new();
    let (base, target) =
        (world.fs.hash.base(b"wanted"), crate::keys::Dentry { ino: 1, kind: libc::S_IFDIR });
    let dir = world.fs.table.get(ROOT).unwrap().unwrap();
    let mut txn = world
        .fs
        .journal
        .begin(ferry_journal::Credits { keys: 256, bytes: 1 << 15, urgent: false })
        .unwrap();
    for i in 0..256_u64 {
        if i != 3 {
            txn.put(&keys::dentry(ROOT, base + i, format!("{i}").as_bytes()), &target.encode());
        }
    }
    txn.commit();
    let state = dir.state.read();
    let stored = |name: &[u8]| world.fs.find_stored(ROOT, base, name).unwrap();
    use crate::namespace::names::Found;
    assert_eq!(stored(b"wanted"), Found::Absent(Some(base + 3)));
    assert_eq!(stored(b"200"), Found::Present(base + 200, target));
    world.fs.load_dir(&dir).unwrap();
    assert_eq!(world.fs.find(&dir, &state, b"wanted").unwrap(), Found::Absent(Some(base + 3)));
}

#[test]
fn cold_inodes_and_unused_directories_leave_memory() {
    let world = World::new();
    for d in 0..20 {
        let dir = world.mkdir(ROOT, &format!("d{d}")).unwrap();
        for f in 0..1000 {
            world.mknod(dir, &format!("f{f}"), libc::S_IFIFO).unwrap();
        }
    }
    assert!(
        world.fs.table.counts().resident < 9000,
        "{} inodes in memory",
        world.fs.table.counts().resident
    );
    let dir = world.ino(ROOT, "d0");
    assert_eq!(world.list(dir).len(), 1000);
    assert!(world.exists(dir, "f7"));
    world.check();
}

#[test]
fn cached_inodes_and_names_stay_bounded() {
    assert!(
        size_of::<crate::inode::incore::Inode>() <= 656,
        "{} bytes",
        size_of::<crate::inode::incore::Inode>()
    );
    let world = World::new();
    for i in 0..5000 {
        world.mkdir(ROOT, &format!("{i}")).unwrap();
        world.rmdir(ROOT, &format!("{i}")).unwrap();
    }
    assert!(world.fs.table.cached_dirs() < 2000, "directories that are gone leave the queue");
    assert_eq!((world.fs.table.counts().resident, world.fs.table.dir_entries()), (1, 0));
}

#[test]
fn anything_is_found_by_its_number_while_it_is_there() {
    let mut world = World::new();
    let file = world.file(ROOT, "f").unwrap();
    let dir = world.mkdir(ROOT, "d").unwrap();
    world.reopen();
    for ino in [file, dir] {
        assert_eq!(world.ino(ino, "."), ino);
    }
    assert_eq!(world.lookup(file, "..").unwrap_err(), Errno(libc::ENOTDIR));
    let fh = world.open(file).unwrap();
    world.me.call(|cx| world.fs.unlink(cx, ROOT, b"f")).unwrap();
    assert_eq!(world.ino(file, "."), file, "it lives while it is open");
    world
        .me
        .call(|cx| {
            world.fs.release(cx, file, fh);
            Ok(())
        })
        .unwrap();
    assert_eq!(world.lookup(file, ".").unwrap_err(), Errno(libc::ESTALE));
}
