//! Clients that answer changes before the server has made them.

use super::certificates::Root;
use super::*;

impl Client {
    pub(super) fn figures(&self, of: &str, figure: &str) -> u64 {
        let most = ioctl::STATS_LEN as usize;
        let stats = self.me.call(|cx| self.fs.ioctl(cx, ROOT, ioctl::STATS, &[], most)).unwrap();
        let stats: serde_json::Value =
            serde_json::from_slice(stats.strip_suffix(b"\0").unwrap()).unwrap();
        stats[of][figure].as_u64().unwrap()
    }
    pub(super) fn fsync_dir(&self, dir: Ino) -> Done {
        self.me.call(|cx| self.fs.fsyncdir(cx, dir, 0, false))
    }
    pub(super) fn size(&self, ino: Ino) -> u64 {
        self.me.call(|cx| self.fs.getattr(cx, ino, None)).unwrap().0.size
    }
}

/// A client with a directory of its own in which it decides alone.
fn alone(world: &World) -> (Client, Ino) {
    let client = world.client();
    let dir = client.mkdir(ROOT, "d").unwrap();
    // The first ones ask for what is needed.
    let (ino, fh) = client.create(dir, "first").unwrap();
    client.write(ino, fh, 0, b"first").unwrap();
    client.close(ino, fh);
    client.sync().unwrap();
    (client, dir)
}

#[test]
fn changes_under_write_leases_are_acknowledged_early_and_not_lost() {
    let world = World::new(400);
    let (client, dir) = alone(&world);
    // Nothing comes or goes any more, and nobody has noticed yet.
    world.net.silence_all();
    let below = client.mkdir(dir, "below").unwrap();
    let mut files = Vec::new();
    for i in 0..50_u8 {
        let (ino, fh) = client.create(below, &format!("f{i}")).unwrap();
        assert_eq!(client.write(ino, fh, 0, &[i; 100]), Ok(100));
        assert_eq!(client.append(ino, fh, b"end"), Ok(3));
        assert_eq!(client.size(ino), 103);
        files.push((ino, fh));
    }
    assert_eq!(client.read(files[7].0, files[7].1, 50), Ok(vec![7; 50]), "from memory");
    client.rename(below, "f0", "g0").unwrap();
    client.unlink(below, "f1").unwrap();
    let names = client.list(below).unwrap();
    assert!(names.len() == 49 && names.contains(&"g0".into()) && !names.contains(&"f1".into()));
    assert_eq!(client.lookup(below, "f1"), Ok(None));
    assert_eq!(client.create(below, "f2").map(drop), Err(Errno(libc::EEXIST)));
    assert_eq!(client.size(below), 49);
    assert_eq!(client.unlink(below, "f1"), Err(Errno(libc::ENOENT)));
    let (again, fh) = client.create(below, "f1").unwrap();
    assert_ne!(again, files[1].0, "numbers are used once");
    client.close(again, fh);
    world.net.cut_all();
    // Another client sees all of it, applied once and in order.
    let other = world.client();
    assert_eq!(other.ino(ROOT, "d"), dir);
    assert_eq!(other.ino(dir, "below"), below);
    assert_eq!(other.list(below).unwrap().len(), 50);
    for (i, (ino, fh)) in files.iter().enumerate().skip(2) {
        assert_eq!(other.ino(below, &format!("f{i}")), *ino);
        let handle = other.open(*ino).unwrap();
        let mut contents = vec![i as u8; 100];
        contents.extend(b"end");
        assert_eq!(other.read(*ino, handle, 1000), Ok(contents));
        client.close(*ino, *fh);
    }
    assert_eq!((other.ino(below, "g0"), other.ino(below, "f1")), (files[0].0, again));
    client.sync().unwrap();
    assert_eq!(client.figures("connection", "lost_changes"), 0);
}

#[test]
fn other_clients_see_early_acknowledged_changes() {
    let world = World::new(401);
    let (a, dir) = alone(&world);
    let b = world.client();
    assert_eq!(b.ino(ROOT, "d"), dir);
    for round in 0..20_u8 {
        let (ino, fh) = a.create(dir, &format!("a{round}")).unwrap();
        a.write(ino, fh, 0, &[round; 10]).unwrap();
        assert_eq!(b.ino(dir, &format!("a{round}")), ino);
        assert_eq!(b.size(ino), 10);
        let other = b.open(ino).unwrap();
        assert_eq!(b.append(ino, other, b"b"), Ok(1));
        assert_eq!(a.size(ino), 11);
        assert_eq!(a.append(ino, fh, b"a"), Ok(1), "at the end as it is now");
        assert_eq!(b.read(ino, other, 100).unwrap()[10..], *b"ba");
        b.close(ino, other);
        b.unlink(dir, &format!("a{round}")).unwrap();
        assert_eq!(a.lookup(dir, &format!("a{round}")), Ok(None));
        a.close(ino, fh);
    }
    for client in [&a, &b] {
        assert_eq!(client.figures("connection", "lost_changes"), 0);
    }
}

#[test]
fn early_acknowledgement_stops_when_the_window_is_full() {
    const FILES: usize = 2000;
    let world = World::new(402);
    let (client, dir) = alone(&world);
    let client = Arc::new(client);
    world.net.silence_all();
    let made = Arc::new(AtomicU64::new(0));
    let making = {
        let (client, made) = (Arc::clone(&client), Arc::clone(&made));
        std::thread::spawn(move || {
            for i in 0..FILES {
                client.me.call(|cx| {
                    client.fs.mknod(cx, dir, format!("n{i}").as_bytes(), libc::S_IFREG, 0)
                })?;
                made.fetch_add(1, Ordering::SeqCst);
            }
            Done::Ok(())
        })
    };
    while made.load(Ordering::SeqCst) < 800 {
        std::thread::yield_now();
    }
    std::thread::sleep(Duration::from_millis(50));
    assert!(made.load(Ordering::SeqCst) < 1024, "the others wait");
    world.net.cut_all();
    making.join().unwrap().unwrap();
    assert_eq!(client.list(dir).unwrap().len(), FILES + 1);
    assert_eq!(client.figures("connection", "lost_changes"), 0);
}

#[test]
fn a_lost_change_is_reported_once_by_each_fsync_and_by_sync() {
    let world = World::new(403);
    let (client, dir) = alone(&world);
    let (old, old_fh) = client.create(dir, "old").unwrap();
    client.sync().unwrap();
    world.net.silence_all();
    let (ino, fh) = client.create(dir, "new").unwrap();
    client.write(old, old_fh, 0, b"lost").unwrap();
    client.mkdir(dir, "sub").unwrap();
    // Another server, which does not know the session.
    world.stop();
    world.start();
    world.net.cut_all();
    assert_eq!(client.fsync(old, old_fh), Err(Errno(libc::EIO)), "its write is lost");
    assert_eq!(client.fsync(old, old_fh), Ok(()), "once");
    assert_eq!(client.fsync_dir(dir), Err(Errno(libc::EIO)), "names are lost");
    assert_eq!(client.fsync(ino, fh), Err(Errno(libc::EIO)), "it does not exist");
    assert_eq!(client.sync(), Err(Errno(libc::EIO)), "not all of it was told");
    assert_eq!(client.sync(), Ok(()));
    assert_eq!(client.list(dir).unwrap(), ["first", "old"]);
    assert_eq!(client.size(old), 0);
    assert!(client.figures("connection", "lost_changes") >= 3);
    // Work goes on.
    let (ino, fh) = client.create(dir, "new").unwrap();
    client.write(ino, fh, 0, b"kept").unwrap();
    assert_eq!(client.fsync(ino, fh), Ok(()));
    assert_eq!(client.fsync_dir(dir), Ok(()));
}

#[test]
fn an_unmount_waits_until_early_acknowledged_changes_are_applied() {
    let world = World::new(404);
    let (client, dir) = alone(&world);
    let names: Vec<String> = (0..300).map(|i| format!("f{i:03}")).collect();
    for name in &names {
        let (ino, fh) = client.create(dir, name).unwrap();
        client.write(ino, fh, 0, name.as_bytes()).unwrap();
        client.close(ino, fh);
    }
    client.fs.close();
    let other = world.client();
    assert_eq!(other.ino(ROOT, "d"), dir);
    assert_eq!(other.list(dir).unwrap()[..300], names);
    let ino = other.ino(dir, "f299");
    let fh = other.open(ino).unwrap();
    assert_eq!(other.read(ino, fh, 10).unwrap(), b"f299");
}

#[test]
fn the_server_forgets_inodes_that_the_kernel_forgets_before_they_are_confirmed() {
    let world = World::new(405);
    let (client, dir) = alone(&world);
    for i in 0..200 {
        let (ino, fh) = client.create(dir, &format!("f{i}")).unwrap();
        client.close(ino, fh);
        client.unlink(dir, &format!("f{i}")).unwrap();
        client.fs.forget(ino, 1);
    }
    client.sync().unwrap();
    client.list(ROOT).unwrap();
    let left = world.figure("inodes");
    assert!(left < 70, "only what is not told yet, not {left}");
    assert_eq!(world.figure("open_files"), 0);
}

#[test]
fn with_async_off_every_change_waits_for_the_server() {
    let world = World::new(406);
    let client = world.waiting_client();
    let dir = client.mkdir(ROOT, "d").unwrap();
    let (ino, fh) = client.create(dir, "f").unwrap();
    client.write(ino, fh, 0, b"x").unwrap();
    assert_eq!(client.figures("client_cache", "held_inodes"), 0);
    assert_eq!(client.figures("connection", "early_acknowledged"), 0);
    // It does not stop one that works so.
    let (other, theirs) = alone_in(&world, "e");
    assert_eq!(client.ino(ROOT, "e"), theirs);
    let (ino, fh) = client.create(theirs, "mine").unwrap();
    client.write(ino, fh, 0, b"mine").unwrap();
    assert_eq!(other.ino(theirs, "mine"), ino);
    assert_eq!(other.size(ino), 4);
}

#[test]
fn async_is_switched_from_the_next_change_on_and_nothing_is_lost() {
    let world = World::new(407);
    let (client, dir) = alone(&world);
    let fs = &client.fs;
    world.net.silence_all();
    client.mkdir(dir, "early").unwrap();
    let early = fs.unanswered().unwrap();
    assert_ne!(early, 0);
    assert!(fs.set_asynchronous(false) && !fs.is_asynchronous());
    let sent = || fs.connection()["unanswered_changes"].as_u64().unwrap();
    let before = sent();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| client.mkdir(dir, "waits").unwrap());
        while sent() == before && !waiting.is_finished() {
            std::thread::yield_now();
        }
        assert!(!waiting.is_finished(), "it waits for the server");
        assert_eq!(fs.unanswered(), Ok(early));
        world.net.cut_all();
        waiting.join().unwrap();
    });
    assert_eq!(fs.unanswered(), Ok(0), "they were sent before the one that has waited");
    assert!(fs.set_asynchronous(true) && fs.is_asynchronous());
    client.mkdir(dir, "may wait").unwrap();
    client.sync().unwrap();
    world.net.silence_all();
    client.mkdir(dir, "late").unwrap();
    assert_ne!(fs.unanswered(), Ok(0));
    world.net.cut_all();
    let names = ["early", "first", "late", "may wait", "waits"];
    let reader = world.client();
    let dir = reader.ino(ROOT, "d");
    assert_eq!(reader.list(dir).unwrap(), names);
    assert_eq!(client.figures("connection", "lost_changes"), 0);
}

fn alone_in(world: &World, name: &str) -> (Client, Ino) {
    let client = world.client();
    let dir = client.mkdir(ROOT, name).unwrap();
    let (ino, fh) = client.create(dir, "first").unwrap();
    client.write(ino, fh, 0, b"first").unwrap();
    (client, dir)
}

#[test]
fn an_unmount_without_a_connection_reconnects_and_sends_all_changes() {
    let world = World::new(760);
    let client = world.client();
    client.mkdir(ROOT, "before").unwrap();
    client.sync().unwrap();
    let connected = || client.fs.connection()["connected"] == true;
    world.net.silence_all();
    client.mkdir(ROOT, "told").unwrap();
    assert!(Root(&world.fs).names(ROOT) == ["before"], "the server has not heard of it");
    let server = world.net.server.lock().take();
    world.net.cut_all();
    while connected() {
        std::thread::yield_now();
    }
    let (tell, closed) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            client.fs.close();
            tell.send(()).unwrap();
        });
        assert!(
            closed.recv_timeout(Duration::from_millis(300)).is_err(),
            "it waits for the server"
        );
        *world.net.server.lock() = server;
        closed.recv().unwrap();
    });
    assert_eq!(Root(&world.fs).names(ROOT), ["before", "told"]);
    world.until_nobody_is_there();
    // One that is forced waits for nobody.
    let forced = world.client();
    forced.mkdir(ROOT, "forced").unwrap();
    forced.sync().unwrap();
    world.net.silence_all();
    forced.mkdir(ROOT, "lost").unwrap();
    drop(world.take_server());
    world.net.cut_all();
    forced.fs.abandon();
    forced.fs.close();
    assert_eq!(Root(&world.fs).names(ROOT), ["before", "forced", "told"]);
}
