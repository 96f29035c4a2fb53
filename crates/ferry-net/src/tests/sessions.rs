//! Connections are cut at any byte: nothing is lost, nothing is done twice.

use super::*;

/// One client's history on a network that cuts each connection after fewer than `limit` bytes. Each
/// operation's result is exact: a change that was applied twice, or not at all, shows as an error,
/// a missing or a double line.
fn history(seed: u64, limit: u64) {
    let world = World::new(seed);
    let client = world.client();
    let (log, fh) = client.create(ROOT, "log").unwrap();
    world.net.cut_below.store(limit, Ordering::Relaxed);
    // The present connection is not limited: the next ones are.
    let (mut expected, mut names) = (Vec::new(), std::collections::BTreeSet::new());
    let mut reconnected = false;
    for i in 0..400_u64 {
        if i == 10 {
            world.net.cut_all();
        }
        let line = format!("{seed}:{i}\n");
        match world.net.random.below(5) {
            0 => {
                let name = format!("f{i}");
                let (ino, fh) = client
                    .create(ROOT, &name)
                    .unwrap_or_else(|e| panic!("{seed}: create {name}: {e}"));
                client.close(ino, fh);
                names.insert(name);
            }
            1 if !names.is_empty() => {
                let name = names.pop_first().unwrap();
                client.unlink(ROOT, &name).unwrap_or_else(|e| panic!("{seed}: unlink {name}: {e}"));
            }
            2 if !names.is_empty() => {
                let (name, new) = (names.pop_last().unwrap(), format!("r{i}"));
                client
                    .rename(ROOT, &name, &new)
                    .unwrap_or_else(|e| panic!("{seed}: rename {name}: {e}"));
                names.insert(new);
            }
            3 => {
                assert_eq!(
                    client.lookup(ROOT, "log").unwrap().unwrap().size,
                    expected.len() as u64,
                    "{seed}"
                );
            }
            _ => {
                let n = client
                    .append(log, fh, line.as_bytes())
                    .unwrap_or_else(|e| panic!("{seed}: append: {e}"));
                assert_eq!(n, line.len() as u64);
                expected.extend_from_slice(line.as_bytes());
            }
        }
        reconnected |= world.figure("connections") > 2;
    }
    client.sync().unwrap();
    reconnected |= world.figure("connections") > 2;
    assert!(reconnected, "{seed}: the network was to cut");
    client.fsync(log, fh).unwrap();
    assert_eq!(client.read(log, fh, 1 << 20).unwrap(), expected, "{seed}");
    names.insert("log".into());
    assert_eq!(client.list(ROOT).unwrap(), names.into_iter().collect::<Vec<_>>(), "{seed}");
    assert_eq!(world.figure("open_files"), 1, "{seed}: everything else was closed, once");
}

#[test]
fn a_session_outlives_its_connections_and_applies_each_change_once() {
    // Unanswered changes are sent again on each connection: with fewer bytes it takes long until
    // all have arrived.
    for seed in 0..4 {
        history(seed, 6000 + seed * 2000);
    }
}

#[test]
fn many_programs_on_a_network_that_cuts_connections() {
    let world = World::new(50);
    let client = Arc::new(world.client());
    world.net.cut_below.store(20_000, Ordering::Relaxed);
    world.net.cut_all();
    let threads: Vec<_> = (0..8)
        .map(|t| {
            let client = client.clone();
            std::thread::spawn(move || {
                let dir = client.mkdir(ROOT, &format!("d{t}")).unwrap();
                for i in 0..60 {
                    let (ino, fh) = client.create(dir, &format!("f{i}")).unwrap();
                    assert_eq!(client.append(ino, fh, &[t; 300]), Ok(300));
                    assert_eq!(client.append(ino, fh, &[t; 300]), Ok(300));
                    if i % 10 == 0 {
                        client.fsync(ino, fh).unwrap();
                    }
                    assert_eq!(client.read(ino, fh, 1000).unwrap(), [t; 600]);
                    client.close(ino, fh);
                }
                assert_eq!(client.list(dir).unwrap().len(), 60);
            })
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
    assert!(world.figure("connections") > 3);
}

#[test]
fn a_client_that_is_away_too_long_gets_a_new_session() {
    // Its leases outlive its session until their term is over.
    let lease_term = Duration::from_millis(500);
    let options = ServerOptions { session_life: Duration::ZERO, lease_term, ..server_options() };
    let world = World::with(60, options);
    let client = world.client();
    let (ino, fh) = client.create(ROOT, "f").unwrap();
    client.write(ino, fh, 0, b"kept").unwrap();
    client.sync().unwrap();
    // Connections fail until the session has ended.
    let server = world.net.server.lock().take().unwrap();
    world.net.cut_all();
    while !server.control().clients().as_array().unwrap().is_empty() {
        std::thread::yield_now();
    }
    *world.net.server.lock() = Some(server);
    assert_eq!(client.read(ino, fh, 100).unwrap(), b"kept", "the file was opened again");
    assert_eq!(client.append(ino, fh, b"!"), Ok(1));
    assert_eq!(client.fsync(ino, fh), Ok(()), "the server was there all the time: nothing is lost");
    client.sync().unwrap();
    assert_eq!(world.figure("open_files"), 1);
}
