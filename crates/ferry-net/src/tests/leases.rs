//! Leases: what a client caches is never older than what another client has done.

use std::sync::atomic::AtomicBool;

use super::boundaries::Raw;
use super::*;
use crate::codec::List;
use crate::message::*;

impl Client {
    fn attr(&self, ino: Ino) -> Done<Attr> {
        Ok(self.me.call(|cx| self.fs.getattr(cx, ino, None))?.0)
    }
    pub(super) fn set(&self, ino: Ino, set: SetAttr) -> Done<Attr> {
        Ok(self.me.call(|cx| self.fs.setattr(cx, ino, None, &set))?.0)
    }
    fn resize(&self, ino: Ino, size: u64) -> Done<Attr> {
        self.set(ino, SetAttr { size: Some(size), ..SetAttr::default() })
    }
    pub(super) fn link(&self, ino: Ino, dir: Ino, name: &str) -> Done {
        self.me.call(|cx| self.fs.link(cx, ino, dir, name.as_bytes())).map(drop)
    }
    fn rmdir(&self, dir: Ino, name: &str) -> Done {
        self.me.call(|cx| self.fs.rmdir(cx, dir, name.as_bytes()))
    }
    pub(super) fn move_to(&self, dir: Ino, name: &str, to: Ino, new: &str) -> Done {
        let flags = RenameFlags::default();
        self.me.call(|cx| self.fs.rename(cx, dir, name.as_bytes(), to, new.as_bytes(), flags))
    }
    /// How often it did not have to ask.
    fn hits(&self) -> u64 {
        let most = ioctl::STATS_LEN as usize;
        let stats = self.me.call(|cx| self.fs.ioctl(cx, ROOT, ioctl::STATS, &[], most)).unwrap();
        let stats: serde_json::Value =
            serde_json::from_slice(stats.strip_suffix(b"\0").unwrap()).unwrap();
        stats["client_cache"]["hits"].as_u64().unwrap()
    }
}

/// Reads the size until after it was changed: from then on it is the new one.
fn reads_nothing_old(client: &Client, ino: Ino, changed: &AtomicBool) {
    loop {
        let is_changed = changed.load(Ordering::SeqCst);
        let size = client.attr(ino).unwrap().size;
        assert!(size == 5 || !is_changed, "as it was before");
        if is_changed {
            break;
        }
    }
}

#[test]
fn a_leased_inode_is_read_from_the_cache_until_another_client_changes_it() {
    let world = World::new(200);
    let (a, b) = (world.client(), world.client());
    let dir = a.mkdir(ROOT, "d").unwrap();
    let (ino, fh) = a.create(dir, "f").unwrap();
    let before = a.hits();
    assert_eq!(a.ino(dir, "f"), ino);
    assert_eq!(a.lookup(dir, "g"), Ok(None));
    assert_eq!((a.attr(ino).unwrap().size, a.attr(dir).unwrap().nlink), (0, 2));
    assert_eq!(a.hits(), before + 4, "its own directory and file");
    assert_eq!(b.ino(ROOT, "d"), dir);
    assert_eq!(b.ino(dir, "f"), ino);
    a.write(ino, fh, 0, b"abc").unwrap();
    assert_eq!(b.attr(ino).unwrap().size, 3);
    let before = b.hits();
    assert_eq!(b.attr(ino).unwrap().size, 3);
    assert_eq!(b.hits(), before + 1);
    b.resize(ino, 1).unwrap();
    assert_eq!(a.attr(ino).unwrap().size, 1);
    b.link(ino, dir, "g").unwrap();
    assert_eq!((a.ino(dir, "g"), a.attr(ino).unwrap().nlink), (ino, 2));
    b.unlink(dir, "f").unwrap();
    assert_eq!(a.lookup(dir, "f"), Ok(None));
    assert_eq!(a.attr(ino).unwrap().nlink, 1, "by its other name");
}

/// Three clients, one operation after the other, on a network that cuts connections: every answer
/// is what one order gives, attributes too.
fn one_order(seed: u64) {
    #[derive(Clone)]
    struct Node {
        ino: Ino,
        dir: bool,
        size: u64,
        mode: u32,
        names: u32,
    }
    let world = World::new(seed);
    let clients = [world.client(), world.client(), world.client()];
    world.net.cut_below.store(20_000, Ordering::Relaxed);
    let below = |n| world.net.random.below(n);
    let dirs = [clients[0].mkdir(ROOT, "d0").unwrap(), clients[1].mkdir(ROOT, "d1").unwrap()];
    for client in &clients {
        assert_eq!((client.ino(ROOT, "d0"), client.ino(ROOT, "d1")), (dirs[0], dirs[1]));
    }
    let mut nodes: Vec<Node> = Vec::new();
    let mut names = std::collections::BTreeMap::<(usize, String), usize>::new();
    for step in 0..500 {
        if step % 200 == 100 {
            world.net.cut_all();
        }
        let which = below(3) as usize;
        let client = &clients[which];
        let (index, name) = (below(2) as usize, format!("n{}", below(5)));
        let dir = dirs[index];
        let key = (index, name.clone());
        let found = names.get(&key).copied();
        let at = format!("seed {seed}, step {step}, client {which}, d{index}/{name}");
        let absent = Err(Errno(libc::ENOENT));
        match below(12) {
            0 => match client.create(dir, &name) {
                Ok((ino, fh)) => {
                    assert_eq!(found, None, "{at}");
                    client.close(ino, fh);
                    names.insert(key, nodes.len());
                    nodes.push(Node { ino, dir: false, size: 0, mode: 0o644, names: 1 });
                }
                Err(error) => {
                    assert!(error == Errno(libc::EEXIST) && found.is_some(), "{at}: {error}")
                }
            },
            1 => match client.mkdir(dir, &name) {
                Ok(ino) => {
                    assert_eq!(found, None, "{at}");
                    names.insert(key, nodes.len());
                    nodes.push(Node { ino, dir: true, size: 0, mode: 0o755, names: 2 });
                }
                Err(error) => {
                    assert!(error == Errno(libc::EEXIST) && found.is_some(), "{at}: {error}")
                }
            },
            2 => {
                let is_dir = found.is_some_and(|node| nodes[node].dir);
                let done =
                    if is_dir { client.rmdir(dir, &name) } else { client.unlink(dir, &name) };
                assert_eq!(done, if found.is_some() { Ok(()) } else { absent }, "{at}");
                if let Some(node) = names.remove(&key) {
                    nodes[node].names = if is_dir { 0 } else { nodes[node].names - 1 };
                }
            }
            3 => {
                let to = below(2) as usize;
                let new = (to, format!("m{}", below(5)));
                if names.contains_key(&new) {
                    continue;
                }
                let done = client.move_to(dir, &name, dirs[to], &new.1);
                assert_eq!(done, if found.is_some() { Ok(()) } else { absent }, "{at} to {new:?}");
                if let Some(node) = names.remove(&key) {
                    names.insert(new, node);
                }
            }
            4 if found.is_some_and(|node| !nodes[node].dir) => {
                let node = found.unwrap();
                let new = (index, format!("m{}", below(5)));
                assert_eq!(client.ino(dir, &name), nodes[node].ino, "{at}");
                let done = client.link(nodes[node].ino, dir, &new.1);
                let taken = names.contains_key(&new);
                assert_eq!(
                    done,
                    if taken { Err(Errno(libc::EEXIST)) } else { Ok(()) },
                    "{at} to {new:?}"
                );
                if !taken {
                    names.insert(new, node);
                    nodes[node].names += 1;
                }
            }
            5 if found.is_some() => {
                let node = &mut nodes[found.unwrap()];
                assert_eq!(client.ino(dir, &name), node.ino, "{at}");
                if below(2) == 0 && !node.dir {
                    node.size = below(100);
                    assert_eq!(client.resize(node.ino, node.size).unwrap().size, node.size, "{at}");
                } else {
                    node.mode = below(0o1000) as u32;
                    let set = SetAttr { mode: Some(node.mode), ..SetAttr::default() };
                    assert_eq!(client.set(node.ino, set).unwrap().mode & 0o7777, node.mode, "{at}");
                }
            }
            6 => {
                let expected: Vec<String> = names
                    .keys()
                    .filter(|(p, _)| *p == index)
                    .map(|(_, name)| name.clone())
                    .collect();
                assert_eq!(client.list(dir), Ok(expected), "{at}");
                let children =
                    names.iter().filter(|((p, _), node)| *p == index && nodes[**node].dir).count();
                assert_eq!(client.attr(dir).unwrap().nlink, 2 + children as u32, "{at}");
            }
            _ => {
                let seen = client.lookup(dir, &name).unwrap_or_else(|e| panic!("{at}: {e}"));
                let all = |attr: &Attr| {
                    let size =
                        if attr.mode & libc::S_IFMT == libc::S_IFDIR { 0 } else { attr.size };
                    (attr.ino, size, attr.mode & 0o7777, attr.nlink)
                };
                let expected =
                    found.map(|node| &nodes[node]).map(|n| (n.ino, n.size, n.mode, n.names));
                assert_eq!(seen.as_ref().map(all), expected, "{at}");
                if let Some(attr) = seen {
                    assert_eq!(
                        client.attr(attr.ino).as_ref().map(all),
                        Ok(expected.unwrap()),
                        "{at}"
                    );
                }
            }
        }
    }
    assert!(clients.iter().map(Client::hits).sum::<u64>() > 100, "{seed}: leases were to be used");
    assert!(world.figure("connections") > 4, "{seed}: the network was to cut");
}

#[test]
fn three_clients_see_one_order_of_names_and_attributes() {
    (210..213).for_each(one_order);
}

/// A growing file is never seen smaller than it was before the question, nor larger than any client
/// has asked for.
#[test]
fn reads_under_leases_are_sequentially_consistent() {
    const STEPS: u64 = 100;
    let world = World::new(220);
    let clients = [world.client(), world.client(), world.client()];
    let dir = clients[0].mkdir(ROOT, "d").unwrap();
    let (ino, _) = clients[0].create(dir, "f").unwrap();
    for client in &clients {
        assert_eq!(client.ino(ROOT, "d"), dir);
        assert_eq!(client.ino(dir, "f"), ino);
    }
    world.net.cut_below.store(30_000, Ordering::Relaxed);
    world.net.cut_all();
    let (begun, done, over) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let watch = |client: usize| {
            let (client, begun, done, over) = (&clients[client], &begun, &done, &over);
            move || {
                while !over.load(Ordering::SeqCst) {
                    let least = done.load(Ordering::SeqCst);
                    let size = client.attr(ino).unwrap().size;
                    let most = begun.load(Ordering::SeqCst);
                    assert!(least <= size && size <= most, "{least} <= {size} <= {most}");
                    let least = done.load(Ordering::SeqCst);
                    assert!(
                        client.lookup(dir, &format!("f{least}")).unwrap().is_some() || least == 0
                    );
                    let next = begun.load(Ordering::SeqCst) + 2;
                    if client.lookup(dir, &format!("f{next}")).unwrap().is_some() {
                        assert!(begun.load(Ordering::SeqCst) >= next);
                    }
                }
            }
        };
        // The client that changes has a second program that reads.
        let watching = [scope.spawn(watch(0)), scope.spawn(watch(1)), scope.spawn(watch(2))];
        for step in 1..=STEPS {
            let client = &clients[step as usize % 2];
            begun.store(step, Ordering::SeqCst);
            let (made, fh) = client.create(dir, &format!("f{step}")).unwrap();
            client.close(made, fh);
            client.resize(ino, step).unwrap();
            done.store(step, Ordering::SeqCst);
        }
        over.store(true, Ordering::SeqCst);
        watching.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn three_clients_in_one_directory_all_make_progress() {
    const FILES: u64 = 60;
    /// A client alone makes no more than these.
    const ALONE_MAX: u64 = 20_000;
    let world = World::new(230);
    let clients = [world.client(), world.client(), world.client()];
    let dir = clients[0].mkdir(ROOT, "d").unwrap();
    let made: Vec<AtomicU64> = (0..3).map(|_| AtomicU64::new(0)).collect();
    std::thread::scope(|scope| {
        for (which, client) in clients.iter().enumerate() {
            let made = &made;
            scope.spawn(move || {
                assert_eq!(client.ino(ROOT, "d"), dir);
                let mut left_behind = true;
                for i in 0.. {
                    if i >= FILES && !left_behind {
                        break;
                    }
                    assert!(i < ALONE_MAX, "nobody is left behind");
                    let name = format!("{which}-{i}");
                    assert_eq!(client.lookup(dir, &name), Ok(None));
                    let (ino, fh) = client.create(dir, &name).unwrap();
                    assert_eq!(client.ino(dir, &name), ino);
                    client.close(ino, fh);
                    made[which].fetch_add(1, Ordering::SeqCst);
                    left_behind = made.iter().any(|made| made.load(Ordering::SeqCst) == 0);
                }
            });
        }
    });
    let all: u64 = made.iter().map(|made| made.load(Ordering::SeqCst)).sum();
    assert_eq!(clients[1].list(dir).unwrap().len() as u64, all);
}

/// A client that takes a lease and falls silent delays others for one term, not longer.
#[test]
fn a_lease_that_is_not_returned_ends_with_its_term() {
    let term = Duration::from_millis(1500);
    let world = World::with(240, ServerOptions { lease_term: term, ..server_options() });
    let client = world.client();
    let (ino, fh) = client.create(ROOT, "f").unwrap();
    let mut silent = Raw::greeted(&world);
    let caller = Caller::default();
    let lookup = Op::Lookup { parent: ROOT, name: b"f".to_vec() };
    silent.send(&ToServer::Request { id: 1, after: 0, caller, op: lookup });
    let reply = silent.hear();
    assert!(
        matches!(reply, Some(ToClient::Reply { id: 1, leased, .. }) if leased == LEASED | LEASED_FOUND),
        "{reply:?}"
    );
    let begun = Env::real().clock;
    assert_eq!(client.write(ino, fh, 0, b"x"), Ok(1));
    let waited = begun.monotonic();
    assert!(waited > term / 4 && waited < Duration::from_secs(10), "{waited:?}");
    assert_eq!(silent.hear(), Some(ToClient::Recall { inodes: List(vec![ino]) }));
    // A client that returns the lease is not waited for. One that only sends pings is, for as long
    // as it may rely on its lease.
    silent.send(&ToServer::Ping { number: 1 });
    let pong = |said: &Option<ToClient>| match said {
        Some(ToClient::Pong { renewed, epoch: 0, durable: 0, .. }) => *renewed,
        other => panic!("{other:?}"),
    };
    assert!(pong(&silent.hear()), "it has none any more");
    silent.send(&ToServer::Request { id: 2, after: 0, caller, op: Op::Getattr { ino } });
    assert!(matches!(silent.hear(), Some(ToClient::Reply { id: 2, leased: LEASED, .. })));
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| client.write(ino, fh, 0, b"y"));
        assert_eq!(silent.hear(), Some(ToClient::Recall { inodes: List(vec![ino]) }));
        // Its term counts from the recall: soon its pings renew nothing.
        let mut renewed = || {
            silent.send(&ToServer::Ping { number: 1 });
            pong(&silent.hear())
        };
        while renewed() {
            std::thread::yield_now();
        }
        assert!(!writing.is_finished());
        silent.send(&ToServer::Request { id: 3, after: 0, caller, op: Op::Getattr { ino } });
        assert!(
            matches!(silent.hear(), Some(ToClient::Reply { id: 3, leased: 0, .. })),
            "it is to be changed"
        );
        silent.send(&ToServer::Returned { inodes: List(vec![ino]), after: 0 });
        assert_eq!(writing.join().unwrap(), Ok(1));
    });
}

/// A client that is cut off, and does not know it, uses nothing that others may have changed
/// meanwhile.
#[test]
fn a_client_that_is_cut_off_stops_caching_at_the_end_of_its_term() {
    let term = Duration::from_millis(800);
    let world = World::with(250, ServerOptions { lease_term: term, ..server_options() });
    let (a, b) = (world.client(), world.client());
    let (ino, _) = a.create(ROOT, "f").unwrap();
    assert_eq!(b.ino(ROOT, "f"), ino);
    world.net.silence_all();
    let other = world.client();
    assert_eq!(other.ino(ROOT, "f"), ino);
    let changed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| reads_nothing_old(&b, ino, &changed));
        other.resize(ino, 5).unwrap();
        changed.store(true, Ordering::SeqCst);
        // Only now they notice, and connect again.
        world.net.cut_all();
        reading.join().unwrap();
    });
    assert_eq!(a.attr(ino).unwrap().size, 5);
}

/// A restarted server changes nothing while clients of the previous one may rely on their leases.
#[test]
fn a_restarted_server_waits_for_leases_of_the_previous_one() {
    let term = Duration::from_millis(800);
    let options =
        ServerOptions { lease_term: term, grace: Duration::from_secs(5), ..server_options() };
    let mut world = World::with(260, options);
    // No client waits for the first server of a new volume, and here all servers have one file
    // system.
    drop(world.take_server());
    world.reopen();
    world.start();
    let (a, b) = (world.client(), world.client());
    let (ino, _) = a.create(ROOT, "f").unwrap();
    assert_eq!(b.ino(ROOT, "f"), ino);
    world.net.silence_all();
    // It crashes; and those who are connected learn of it later than others.
    let crashed = world.net.server.lock().take();
    world.start();
    let other = world.client();
    assert_eq!(other.ino(ROOT, "f"), ino);
    let changed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| reads_nothing_old(&b, ino, &changed));
        other.resize(ino, 5).unwrap();
        changed.store(true, Ordering::SeqCst);
        drop(crashed);
        world.net.cut_all();
        reading.join().unwrap();
    });
    assert_eq!(a.attr(ino).unwrap().size, 5);
}
