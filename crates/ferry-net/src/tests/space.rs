//! Space of several clients: what is reserved for one is what it needs, and comes back when it
//! does not need it any more, whatever becomes of connections between.

use super::*;

/// Nobody takes longer, on however slow a machine.
const PATIENCE: Duration = Duration::from_secs(120);

impl World {
    /// Bytes that are free on the volume.
    pub(super) fn free_bytes(&self) -> u64 {
        let totals = InProcess::default().call(|cx| self.fs.statfs(cx)).unwrap();
        totals.blocks_available * u64::from(totals.block_size)
    }

    /// Clients say every 50 ms that they are there, and what they do not need.
    fn of_short_terms(seed: u64, bytes: u64) -> Self {
        let options = ServerOptions { lease_term: Duration::from_millis(150), ..server_options() };
        Self::on(Arc::new(MemDevice::new(bytes)), seed, options)
    }

    fn reserved(&self) -> (u64, u64) {
        (self.figure("reserved_bytes"), self.figure("reserved_inodes"))
    }
}

fn wait_until(what: &str, done: impl Fn() -> bool) {
    let start = std::time::Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Makes files of `len` bytes in a directory until there is no room, or there are so many; gives
/// what fsync has said is there.
fn make_files(client: &Client, dir: Ino, len: usize, count: usize) -> Vec<(String, Ino)> {
    let mut made = Vec::new();
    for n in 0..count {
        let name = format!("{n}");
        let (ino, fh) = match client.create(dir, &name) {
            Err(Errno(libc::ENOSPC)) => break,
            created => created.unwrap(),
        };
        let written = client.write(ino, fh, 0, &vec![n as u8; len]);
        assert_eq!(client.fsync(ino, fh), Ok(()), "what was answered has space");
        client.close(ino, fh);
        made.push((name, ino));
        match written {
            Err(Errno(libc::ENOSPC)) => break,
            written => assert_eq!(written, Ok(len as u64)),
        }
    }
    made
}

fn remove_files(client: &Client, dir: Ino, made: &[(String, Ino)]) {
    for (name, ino) in made {
        client.unlink(dir, name).unwrap();
        client.fs.forget(*ino, 1);
    }
}

#[test]
fn unneeded_reservations_are_returned() {
    let world = World::of_short_terms(801, 96 << 20);
    let clients: Vec<_> = (0..3).map(|_| world.client()).collect();
    let dirs: Vec<_> = (0..3).map(|n| clients[n].mkdir(ROOT, &format!("d{n}")).unwrap()).collect();
    wait_until("it does not come back", || world.reserved() == (0, 0));
    let free = world.free_bytes();
    for round in 0..3 {
        let made: Vec<_> = std::thread::scope(|scope| {
            let each = |(client, dir)| scope.spawn(move || make_files(client, dir, 9000, 300));
            let all: Vec<_> = clients.iter().zip(dirs.iter().copied()).map(each).collect();
            all.into_iter().map(|one| one.join().unwrap()).collect()
        });
        assert!(made.iter().all(|made| made.len() == 300), "round {round}: there is room for all");
        wait_until("it does not come back", || world.reserved() == (0, 0));
        assert!(clients.iter().all(|client| client.fs.reserved() == (0, 0)));
        for ((client, dir), made) in clients.iter().zip(&dirs).zip(&made) {
            remove_files(client, *dir, made);
        }
        wait_until("removed files keep their space", || {
            clients.iter().for_each(|client| client.sync().unwrap());
            world.free_bytes() + (3 << 20) >= free && world.reserved() == (0, 0)
        });
    }
    assert_eq!(
        clients.iter().map(|client| client.fs.connection()["epoch"].as_u64().unwrap()).sum::<u64>(),
        0
    );
}

#[test]
fn a_small_volume_serves_the_client_that_needs_space() {
    let world = World::of_short_terms(802, 64 << 20);
    let clients: Vec<_> = (0..3).map(|_| world.client()).collect();
    let dirs: Vec<_> = (0..3).map(|n| clients[n].mkdir(ROOT, &format!("d{n}")).unwrap()).collect();
    let free = world.free_bytes() + world.reserved().0;
    for (client, dir) in clients.iter().zip(&dirs) {
        // The others had it all just before.
        wait_until("what was removed is not free", || world.free_bytes() + (4 << 20) >= free);
        let made = make_files(client, *dir, 1_000_000, usize::MAX);
        let stored = made.len() as u64 * 1_000_000;
        assert!(stored > free / 4 * 3, "{stored} bytes of {free}");
        remove_files(client, *dir, &made);
    }
    drop(clients);
    wait_until("a client that has left has nothing", || world.reserved() == (0, 0));
}

/// The client never believes in more than the server has reserved for it; and what was lost on the
/// way comes back.
#[test]
fn reservations_do_not_leak_when_connections_close() {
    let world = World::of_short_terms(803, 128 << 20);
    let client = world.client();
    let dir = client.mkdir(ROOT, "d").unwrap();
    let is_quiet = || {
        let now = client.fs.connection();
        now["connected"] == true
            && now["unanswered_changes"] == 0
            && now["unanswered_requests"] == 0
    };
    for round in 0..40_u64 {
        world
            .net
            .cut_below
            .store(if round % 2 == 0 { 20_000 + 1000 * round } else { 0 }, Ordering::Relaxed);
        world.net.cut_all();
        for n in 0..40 {
            let (ino, fh) = client.create(dir, &format!("{round} {n}")).unwrap();
            client.write(ino, fh, 0, &[1; 5000]).unwrap();
            client.close(ino, fh);
        }
        let (before, quiet) = (client.fs.reserved(), is_quiet());
        let left = (world.figure("granted_bytes"), world.figure("granted_inodes"));
        let reserved = world.reserved();
        if quiet && is_quiet() && client.fs.reserved() == before {
            assert!(left.0 >= before.0 && left.1 >= before.1, "{round}: {before:?} of {left:?}");
            assert!(
                reserved.0 >= left.0 && reserved.1 >= left.1,
                "{round}: {left:?} of {reserved:?}"
            );
        }
    }
    world.net.cut_below.store(0, Ordering::Relaxed);
    wait_until("it leaks", || {
        is_quiet() && world.reserved() == (0, 0) && client.fs.reserved() == (0, 0)
    });
    client.sync().unwrap();
    assert_eq!(client.list(dir).unwrap().len(), 40 * 40);
}

#[test]
fn a_kernel_drops_inodes_whose_name_another_client_removed() {
    let world = World::of_short_terms(804, 64 << 20);
    let (maker, other, third) = (world.client(), world.client(), world.client());
    let (kernel, idle) = (Arc::new(Forgets::default()), Arc::new(Forgets::default()));
    maker.fs.attach(Arc::clone(&kernel) as Arc<dyn ferry_fs::Host>);
    third.fs.attach(Arc::clone(&idle) as Arc<dyn ferry_fs::Host>);
    let dir = maker.mkdir(ROOT, "d").unwrap();
    let free = world.free_bytes();
    let mut known = Vec::new();
    for name in ["removed", "moved", "kept"] {
        let (ino, fh) = maker.create(dir, name).unwrap();
        for mib in 0..4 {
            assert_eq!(maker.write(ino, fh, mib << 20, &vec![1; 1 << 20]), Ok(1 << 20));
        }
        maker.fsync(ino, fh).unwrap();
        maker.close(ino, fh);
        known.push(ino);
    }
    maker.mkdir(dir, "directory").unwrap();
    let dir = other.ino(ROOT, "d");
    other.unlink(dir, "removed").unwrap();
    other.rename(dir, "moved", "elsewhere").unwrap();
    other.unlink(dir, "elsewhere").unwrap();
    other.rename(dir, "directory", "elsewhere").unwrap();
    let (its, fh) = other.create(dir, "its own").unwrap();
    other.close(its, fh);
    other.unlink(dir, "its own").unwrap();
    let removed =
        ["removed", "moved", "elsewhere", "elsewhere"].map(|name| (dir, name.as_bytes().into()));
    wait_until("the maker's kernel is not told", || kernel.0.lock().removed.len() >= removed.len());
    known[..2].iter().for_each(|ino| maker.fs.forget(*ino, 1));
    let ours = |client: &Client| {
        client.sync().unwrap();
        client.fs.reserved().0 + world.reserved().0
    };
    wait_until("what was removed is not free", || {
        [&maker, &other, &third].iter().all(|client| ours(client) == 0)
            && world.free_bytes() + (5 << 20) >= free
    });
    assert_eq!(
        kernel.0.lock().removed,
        removed,
        "nothing of directories, and of what it does not know"
    );
    assert_eq!(idle.0.lock().removed, [], "a kernel that knows nothing is not told");
    assert!(maker.lookup(dir, "kept").unwrap().is_some());
}

impl World {
    /// A volume with room for so many bytes. (What clients write goes over a slow network.)
    fn with_room(seed: u64, bytes: u64) -> Self {
        let world = Self::on(Arc::new(MemDevice::new(96 << 20)), seed, server_options());
        let taken = world.free_bytes() - bytes;
        let flags = libc::O_RDWR | libc::O_CREAT;
        let taking =
            InProcess::default().call(|cx| world.fs.create(cx, ROOT, b"taken", 0o644, flags));
        let (entry, opened) = taking.unwrap();
        let ino = entry.attr.unwrap().ino;
        let all = |cx: &Cx<'_>| world.fs.fallocate(cx, ino, opened.fh, 0, 0, taken);
        InProcess::default().call(all).unwrap();
        world
    }
}

/// A file that fills the volume, and what was written of it.
fn fill(client: &Client, dir: Ino, name: &str) -> (Ino, u64, u64) {
    let (ino, fh) = client.create(dir, name).unwrap();
    let mut len = 0;
    loop {
        match client.write(ino, fh, len, &vec![1; 1 << 20]) {
            Err(Errno(libc::ENOSPC)) => return (ino, fh, len),
            written => len += written.unwrap(),
        }
    }
}

#[test]
fn space_of_removed_files_is_free_for_the_next_write() {
    let world = World::with_room(805, 8 << 20);
    let client = world.client();
    let dir = client.mkdir(ROOT, "d").unwrap();
    for round in 0..2 {
        let (ino, fh, len) = fill(&client, dir, "large");
        assert!(len >= 4 << 20, "{len}");
        client.close(ino, fh);
        client.unlink(dir, "large").unwrap();
        // No ping comes in this time that would tell the server of it.
        client.fs.forget(ino, 1);
        let (ino, fh) = client.create(dir, "next").unwrap();
        for mib in 0..3 {
            assert_eq!(
                client.write(ino, fh, mib << 20, &vec![2; 1 << 20]),
                Ok(1 << 20),
                "round {round}"
            );
        }
        client.close(ino, fh);
        client.unlink(dir, "next").unwrap();
        client.fs.forget(ino, 1);
    }
}

/// The kernel closes and forgets behind the back of the program: a write that is on its way already
/// waits for that.
#[test]
fn a_write_waits_for_space_that_the_kernel_is_about_to_release() {
    let world = World::with_room(806, 8 << 20);
    let (client, waiting) = (world.client(), world.waiting_client());
    client.mkdir(ROOT, "d").unwrap();
    for client in [&client, &waiting] {
        let dir = client.ino(ROOT, "d");
        let (ino, fh, _) = fill(client, dir, "large");
        client.unlink(dir, "large").unwrap();
        let (next, next_fh) = client.create(dir, "next").unwrap();
        std::thread::scope(|scope| {
            let changes = client.fs.connection()["changes"].as_u64().unwrap();
            let written = scope.spawn(|| client.write(next, next_fh, 0, &vec![2; 1 << 20]));
            wait_until("it is not sent", || {
                client.fs.connection()["changes"].as_u64().unwrap() > changes
            });
            client.close(ino, fh);
            client.fs.forget(ino, 1);
            assert_eq!(written.join().unwrap(), Ok(1 << 20));
        });
        client.close(next, next_fh);
        client.unlink(dir, "next").unwrap();
        client.fs.forget(next, 1);
    }
}

/// What other clients have reserved, and what their kernels know of what was removed, comes back
/// before anybody hears that there is no space.
#[test]
fn a_full_volume_reclaims_unneeded_reservations_of_other_clients() {
    let world = World::with_room(807, 24 << 20);
    let (client, other) = (world.client(), world.client());
    let kernel = Arc::new(Forgets::default());
    other.fs.attach(Arc::clone(&kernel) as Arc<dyn ferry_fs::Host>);
    let dir = client.mkdir(ROOT, "d").unwrap();
    let its = other.mkdir(ROOT, "other").unwrap();
    // Small writes, each of which takes more of the reservation than it needs: so there is some
    // left.
    let (ino, fh) = other.create(its, "f").unwrap();
    wait_until("it has no reservation", || {
        other.write(ino, fh, 0, b"x").unwrap();
        other.fs.reserved().0 > 0
    });
    let (large, large_fh) = other.create(its, "large").unwrap();
    for mib in 0..8 {
        other.write(large, large_fh, mib << 20, &vec![3; 1 << 20]).unwrap();
    }
    other.close(large, large_fh);
    other.sync().unwrap();
    // It is known to the other's kernel alone, which is told to forget it.
    client.unlink(client.ino(ROOT, "other"), "large").unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            wait_until("its kernel is not told", || !kernel.0.lock().removed.is_empty());
            other.fs.forget(large, 1);
        });
        let (file, file_fh, len) = fill(&client, dir, "mine");
        assert_eq!(world.reserved().0, 0, "{len}: all that was reserved is used");
        client.close(file, file_fh);
    });
    let left = world.free_bytes();
    assert!(left < 2 << 20, "{left} bytes are left");
    let reported = client.me.call(|cx| client.fs.statfs(cx)).unwrap();
    assert!(
        reported.blocks_available * u64::from(reported.block_size) <= left + (1 << 20),
        "df says what is there"
    );
}
