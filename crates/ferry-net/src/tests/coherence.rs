//! What one client has done the others see at once.

use super::*;

#[test]
fn two_clients_see_each_others_changes_at_once() {
    let world = World::new(1);
    let (a, b) = (world.client(), world.client());
    let dir = a.mkdir(ROOT, "d").unwrap();
    assert_eq!(b.ino(ROOT, "d"), dir);
    let (ino, fh) = a.create(dir, "f").unwrap();
    assert_eq!(a.write(ino, fh, 0, b"one"), Ok(3));
    assert_eq!(b.ino(dir, "f"), ino);
    let other = b.open(ino).unwrap();
    assert_eq!(b.read(ino, other, 100).unwrap(), b"one", "neither closed nor synced");
    assert_eq!(b.append(ino, other, b" two"), Ok(4));
    assert_eq!(a.read(ino, fh, 100).unwrap(), b"one two");
    assert_eq!(a.append(ino, fh, b" three"), Ok(6), "at the end as it is now");
    assert_eq!(b.read(ino, other, 100).unwrap(), b"one two three");
    b.rename(dir, "f", "g").unwrap();
    assert_eq!(a.lookup(dir, "f").unwrap(), None);
    assert_eq!(a.list(dir).unwrap(), ["g"]);
    a.unlink(dir, "g").unwrap();
    assert_eq!(b.read(ino, other, 100).unwrap(), b"one two three", "it lives while it is open");
    a.close(ino, fh);
    assert_eq!(b.read(ino, other, 3).unwrap(), b"one");
}

#[test]
fn file_locks_exclude_other_clients_and_end_with_theirs() {
    let world = World::new(2);
    let (a, b) = (world.client(), world.client());
    let (ino, fh) = a.create(ROOT, "f").unwrap();
    assert_eq!(b.ino(ROOT, "f"), ino);
    let other = b.open(ino).unwrap();
    a.lock(ino, fh, 1, libc::F_WRLCK, false).unwrap();
    assert_eq!(b.lock(ino, other, 1, libc::F_WRLCK, false), Err(Errno(libc::EAGAIN)));
    let b = Arc::new(b);
    let waiting = {
        let b = b.clone();
        std::thread::spawn(move || b.lock(ino, other, 1, libc::F_WRLCK, true))
    };
    while world.figure("locks") != 1 || waiting.is_finished() {
        std::thread::yield_now();
    }
    a.lock(ino, fh, 1, libc::F_UNLCK, false).unwrap();
    assert_eq!(waiting.join().unwrap(), Ok(()));
    assert_eq!(a.lock(ino, fh, 1, libc::F_RDLCK, false), Err(Errno(libc::EAGAIN)));
    b.fs.close();
    assert_eq!(a.lock(ino, fh, 1, libc::F_RDLCK, true), Ok(()), "the holder has unmounted");
    // close(2) of any descriptor ends the owner's fcntl locks.
    a.me.call(|cx| a.fs.flush(cx, ino, fh, 1)).unwrap();
    assert_eq!(world.figure("locks"), 0);
}

#[test]
fn a_large_directory_is_listed_whole_while_another_client_changes_it() {
    let world = World::new(3);
    let (a, b) = (world.client(), world.client());
    let dir = a.mkdir(ROOT, "d").unwrap();
    assert_eq!(b.ino(ROOT, "d"), dir);
    let name = |i: u32| format!("{i:04}-{}", "x".repeat(100));
    for i in 0..600 {
        let (ino, fh) = a.create(dir, &name(i)).unwrap();
        a.close(ino, fh);
    }
    let all: Vec<String> = (0..600).map(name).collect();
    assert_eq!(b.list(dir).unwrap(), all);
    a.unlink(dir, &name(300)).unwrap();
    assert_eq!(b.list(dir).unwrap().len(), 599);
}

#[test]
fn what_a_client_forgets_the_server_forgets() {
    let world = World::new(4);
    let a = world.client();
    for i in 0..200 {
        let (ino, fh) = a.create(ROOT, &format!("f{i}")).unwrap();
        assert_eq!(a.ino(ROOT, &format!("f{i}")), ino);
        a.close(ino, fh);
        a.unlink(ROOT, &format!("f{i}")).unwrap();
        a.fs.forget(ino, 2);
    }
    assert!(a.list(ROOT).unwrap().is_empty(), "an answer behind all that was told before");
    let left = world.figure("inodes");
    assert!(left < 64, "only what is not told yet, not {left}");
    assert_eq!(world.figure("open_files"), 0);
    a.fs.close();
    while !world.server().clients().as_array().unwrap().is_empty() {
        std::thread::yield_now();
    }
}
