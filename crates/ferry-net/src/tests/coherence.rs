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

/// Memory that a client takes for contents.
fn cached(client: &Client) -> u64 {
    let most = ioctl::STATS_LEN as usize;
    let stats = client.me.call(|cx| client.fs.ioctl(cx, ROOT, ioctl::STATS, &[], most)).unwrap();
    let stats: serde_json::Value =
        serde_json::from_slice(stats.strip_suffix(b"\0").unwrap()).unwrap();
    stats["client_cache"]["contents_bytes"].as_u64().unwrap()
}

#[test]
fn a_read_file_stays_cached_until_another_client_changes_it() {
    let world = World::new(5);
    let (a, b) = (world.client(), world.client());
    let (ino, fh) = a.create(ROOT, "f").unwrap();
    assert_eq!(a.write(ino, fh, 0, &[1; 5000]), Ok(5000));
    assert_eq!(b.ino(ROOT, "f"), ino);
    let other = b.open(ino).unwrap();
    assert_eq!(cached(&b), 0);
    assert_eq!(b.read(ino, other, 100).unwrap(), [1; 100]);
    // If a lease was being returned elsewhere meanwhile, nothing is cached: asked for once
    // more, it is.
    while cached(&b) == 0 {
        assert_eq!(b.ino(ROOT, "f"), ino);
        assert_eq!(b.read(ino, other, 100).unwrap(), [1; 100]);
    }
    assert_eq!(cached(&b), 5000, "all of it, though a part was asked for");
    assert_eq!(b.read(ino, other, 9000).unwrap(), [1; 5000]);
    assert_eq!(a.write(ino, fh, 4999, &[2; 2]), Ok(2));
    assert_eq!(cached(&b), 0);
    assert_eq!(b.read(ino, other, 9000).unwrap()[4998..], [1, 2, 2]);
    assert_eq!(b.ino(ROOT, "f"), ino);
    assert_eq!(b.read(ino, other, 1).unwrap(), [1]);
    assert_eq!(b.append(ino, other, &[3]), Ok(1));
    assert_eq!(b.read(ino, other, 9000).unwrap()[4999..], [2, 2, 3]);
    assert_eq!(a.read(ino, fh, 9000).unwrap()[4999..], [2, 2, 3]);
    let cut = SetAttr { size: Some(0), ..SetAttr::default() };
    a.me.call(|cx| a.fs.setattr(cx, ino, Some(fh), &cut)).unwrap();
    assert!(b.read(ino, other, 9000).unwrap().is_empty());
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
fn the_server_forgets_inodes_that_a_client_forgets() {
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
    world.until_nobody_is_there();
}

/// One file, as all clients must see it.
struct Told {
    ino: Ino,
    contents: Vec<u8>,
}

/// Three clients, one operation after the other, on a network that cuts: every result is what one
/// order gives.
fn one_order(seed: u64) {
    let world = World::new(seed);
    let clients = [world.client(), world.client(), world.client()];
    world.net.cut_below.store(6000, Ordering::Relaxed);
    let below = |n| world.net.random.below(n);
    let mut files: Vec<Told> = Vec::new();
    let mut names = std::collections::BTreeMap::<String, usize>::new();
    let mut open: [Vec<(u64, usize)>; 3] = Default::default();
    for step in 0..350 {
        if step % 50 == 10 {
            world.net.cut_all();
        }
        let which = below(3) as usize;
        let (client, open) = (&clients[which], &mut open[which]);
        let name = format!("n{}", below(8));
        let at = format!("seed {seed}, step {step}, client {which}, {name}");
        match below(9) {
            0 | 1 => match client.create(ROOT, &name) {
                Ok((ino, fh)) => {
                    assert_eq!(names.insert(name, files.len()), None, "{at}: made twice");
                    open.push((fh, files.len()));
                    files.push(Told { ino, contents: Vec::new() });
                }
                Err(error) => {
                    assert!(
                        error == Errno(libc::EEXIST) && names.contains_key(&name),
                        "{at}: {error}"
                    )
                }
            },
            2 => {
                let known = names.remove(&name).is_some();
                assert_eq!(
                    client.unlink(ROOT, &name),
                    if known { Ok(()) } else { Err(Errno(libc::ENOENT)) },
                    "{at}"
                );
            }
            3 => {
                let to = format!("n{}", below(8));
                let known = names.contains_key(&name);
                let expected = if known { Ok(()) } else { Err(Errno(libc::ENOENT)) };
                assert_eq!(client.rename(ROOT, &name, &to), expected, "{at} to {to}");
                if let Some(file) = names.remove(&name) {
                    names.insert(to, file);
                }
            }
            4 => {
                let found = client.lookup(ROOT, &name).unwrap_or_else(|e| panic!("{at}: {e}"));
                let expected = names
                    .get(&name)
                    .map(|file| (files[*file].ino, files[*file].contents.len() as u64));
                assert_eq!(found.map(|attr| (attr.ino, attr.size)), expected, "{at}");
                if let Some(file) = names.get(&name) {
                    open.push((
                        client.open(files[*file].ino).unwrap_or_else(|e| panic!("{at}: {e}")),
                        *file,
                    ));
                }
            }
            5 if !open.is_empty() => {
                let (fh, file) = open.swap_remove(below(open.len() as u64) as usize);
                client.close(files[file].ino, fh);
            }
            6 => assert_eq!(client.list(ROOT), Ok(names.keys().cloned().collect()), "{at}"),
            _ if !open.is_empty() => {
                let (fh, file) = open[below(open.len() as u64) as usize];
                let Told { ino, contents } = &mut files[file];
                match below(3) {
                    0 => {
                        let line = [which as u8 + b'a'; 100];
                        assert_eq!(client.append(*ino, fh, &line), Ok(100), "{at}");
                        contents.extend_from_slice(&line);
                    }
                    1 if !contents.is_empty() => {
                        let offset = below(contents.len() as u64);
                        assert_eq!(client.write(*ino, fh, offset, b"!"), Ok(1), "{at}");
                        contents[offset as usize] = b'!';
                    }
                    _ => assert_eq!(&client.read(*ino, fh, 1 << 20).expect(&at), contents, "{at}"),
                }
            }
            _ => {}
        }
    }
    assert!(world.figure("connections") > 6, "{seed}: the network was to cut");
}

#[test]
fn three_clients_see_one_order_of_all_changes() {
    (100..104).for_each(one_order);
}

#[test]
fn a_lock_keeps_clients_apart_whenever_the_network_cuts() {
    const ROUNDS: u64 = 25;
    let world = World::new(110);
    let clients = [world.client(), world.client(), world.client()];
    let (ino, fh) = clients[0].create(ROOT, "counter").unwrap();
    clients[0].write(ino, fh, 0, &[0; 8]).unwrap();
    world.net.cut_below.store(3000, Ordering::Relaxed);
    world.net.cut_all();
    std::thread::scope(|scope| {
        for client in &clients {
            scope.spawn(|| {
                assert_eq!(client.ino(ROOT, "counter"), ino);
                let fh = client.open(ino).unwrap();
                for _ in 0..ROUNDS {
                    client.lock(ino, fh, 1, libc::F_WRLCK, true).unwrap();
                    let old =
                        u64::from_le_bytes(client.read(ino, fh, 8).unwrap().try_into().unwrap());
                    client.write(ino, fh, 0, &(old + 1).to_le_bytes()).unwrap();
                    client.lock(ino, fh, 1, libc::F_UNLCK, false).unwrap();
                }
            });
        }
    });
    assert_eq!(clients[0].read(ino, fh, 8).unwrap(), (3 * ROUNDS).to_le_bytes());
    assert_eq!(world.figure("locks"), 0);
    assert!(world.figure("connections") > 6);
}
