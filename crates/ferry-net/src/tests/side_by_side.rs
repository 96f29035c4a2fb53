//! Clients that work on the same files and directories at once, and a server that crashes:
//! acknowledged changes are there again when their client is back, and changes that another client
//! has observed are there even if their client does not come back.

use std::collections::BTreeMap;

use ferry_sim::device::SimRng;

use super::boundaries::Raw;
use super::early_ack::Teller;
use super::replay::Crashing;
use super::restarts::long_terms;
use super::*;
use crate::message::{Op, Outcome, ToClient, ToServer, VERSION};

/// What should be there: the files of one directory.
type Files = BTreeMap<String, Vec<u8>>;

const NAMES: usize = 6;
const CHANGES: usize = 250;

pub(super) fn options() -> ServerOptions {
    // After a crash other clients change nothing for a term.
    ServerOptions { lease_term: Duration::from_secs(5), ..long_terms() }
}

impl Client {
    fn contents(&self, dir: Ino, name: &str) -> Option<Vec<u8>> {
        let ino = self.lookup(dir, name).unwrap()?.ino;
        let fh = self.open(ino).unwrap();
        let contents = self.read(ino, fh, 1 << 16).unwrap();
        self.close(ino, fh);
        Some(contents)
    }

    fn files(&self, dir: Ino) -> Files {
        self.list(dir)
            .unwrap()
            .into_iter()
            .map(|name| (name.clone(), self.contents(dir, &name).unwrap()))
            .collect()
    }

    fn cut_off(&self, ino: Ino, len: u64) {
        let set = SetAttr { size: Some(len), ..SetAttr::default() };
        self.me.call(|cx| self.fs.setattr(cx, ino, None, &set)).unwrap();
    }

    /// Does something at random, and the same to what should be there.
    fn act(&self, dir: Ino, files: &mut Files, rng: &mut SimRng) {
        let (name, other) = (format!("f{}", rng.index(NAMES)), format!("f{}", rng.index(NAMES)));
        let data = vec![rng.index(250) as u8 + 1; 1 + rng.index(9000)];
        let Some(old) = files.get(&name).cloned() else {
            let (ino, fh) = self.create(dir, &name).unwrap();
            self.write(ino, fh, 0, &data).unwrap();
            self.close(ino, fh);
            files.insert(name, data);
            return;
        };
        let ino = self.ino(dir, &name);
        match rng.index(8) {
            0 | 1 => {
                let at = rng.index(old.len() + 1);
                let fh = self.open(ino).unwrap();
                self.write(ino, fh, at as u64, &data).unwrap();
                self.close(ino, fh);
                let file = files.get_mut(&name).unwrap();
                file.resize(old.len().max(at + data.len()), 0);
                file[at..at + data.len()].copy_from_slice(&data);
            }
            2 => {
                let fh = self.open(ino).unwrap();
                self.append(ino, fh, &data).unwrap();
                self.close(ino, fh);
                files.get_mut(&name).unwrap().extend(data);
            }
            3 => {
                let len = rng.index(12_000);
                self.cut_off(ino, len as u64);
                files.get_mut(&name).unwrap().resize(len, 0);
            }
            4 => {
                self.rename(dir, &name, &other).unwrap();
                let moved = files.remove(&name).unwrap();
                files.insert(other, moved);
            }
            5 => {
                self.unlink(dir, &name).unwrap();
                files.remove(&name);
            }
            6 => assert_eq!(self.contents(dir, &name).as_ref(), Some(&old), "{name}"),
            _ => {
                let fh = self.open(ino).unwrap();
                self.fsync(ino, fh).unwrap();
                self.close(ino, fh);
            }
        }
        if files.values().map(Vec::len).sum::<usize>() > 1 << 18 {
            self.unlink(dir, files.pop_first().unwrap().0.as_str()).unwrap();
        }
    }
}

#[test]
fn concurrent_changes_of_two_clients_survive_a_crash() {
    let first = std::env::var("SIMULATION_SEED").map_or(0, |text| text.parse().unwrap());
    for seed in first..first + 2 {
        let mut crashing = Crashing::with(900 + seed, options());
        let clients = [crashing.world.client(), crashing.world.client()];
        let dir = clients[0].mkdir(ROOT, "d").unwrap();
        assert_eq!(clients[1].ino(ROOT, "d"), dir);
        let (mut files, mut rng) = (Files::new(), SimRng::new(seed));
        for round in 0..3 {
            // Now and then one client works alone for a while.
            let mut alone = rng.index(2);
            for _ in 0..CHANGES + rng.index(CHANGES) {
                let client = if rng.index(3) == 0 { rng.index(2) } else { alone };
                if rng.index(40) == 0 {
                    alone = 1 - alone;
                    std::thread::sleep(Duration::from_millis(rng.index(150) as u64));
                }
                clients[client].act(dir, &mut files, &mut rng);
            }
            crashing.crash_and_start();
            let at = format!("seed {seed}, crash {round}");
            for client in clients.iter().chain([&crashing.world.client()]) {
                assert_eq!(client.ino(ROOT, "d"), dir, "{at}");
                assert!(client.files(dir) == files, "{at}");
                assert_eq!(client.sync(), Ok(()), "{at}: nothing is reported as lost");
                assert_eq!(client.figures("connection", "lost_changes"), 0, "{at}");
            }
        }
    }
}

#[test]
fn observed_changes_survive_without_their_client() {
    let mut crashing = Crashing::with(910, options());
    let (maker, seer) = (crashing.world.client(), crashing.world.client());
    let dir = maker.mkdir(ROOT, "d").unwrap();
    assert_eq!(seer.ino(ROOT, "d"), dir);
    // Both have used the directory just now: the server decides.
    let _warm = seer.create(dir, "seer's").unwrap();
    let (ino, fh) = maker.create(dir, "f").unwrap();
    maker.write(ino, fh, 0, b"seen").unwrap();
    maker.me.call(|cx| maker.fs.setxattr(cx, ino, b"user.a", b"1", XattrFlags::default())).unwrap();
    assert_eq!(seer.list(dir).unwrap().len(), 2);
    assert_eq!(seer.contents(dir, "f").unwrap(), b"seen");
    assert_eq!(seer.me.call(|cx| seer.fs.getxattr(cx, ino, b"user.a")).unwrap(), b"1");
    maker.write(ino, fh, 0, b"SEEN").unwrap();
    assert_eq!(seer.contents(dir, "f").unwrap(), b"SEEN");
    maker.rename(dir, "f", "g").unwrap();
    assert_eq!(seer.lookup(dir, "f").unwrap(), None);
    crashing.crash();
    // It ends with the server.
    std::mem::forget(maker);
    crashing.world.net.silence_all();
    crashing.world.start();
    assert_eq!(seer.contents(dir, "g").unwrap(), b"SEEN");
    assert_eq!(seer.me.call(|cx| seer.fs.getxattr(cx, ino, b"user.a")).unwrap(), b"1");
    assert_eq!((seer.lookup(dir, "f").unwrap(), seer.sync()), (None, Ok(())));
}

#[test]
fn durable_changes_are_not_replayed_over_later_ones() {
    for seed in 920..924 {
        let mut crashing = Crashing::with(seed, options());
        let (first, second) = (crashing.world.client(), crashing.world.client().warm_up());
        let (ino, fh) = first.create(ROOT, "f").unwrap();
        first.write(ino, fh, 0, &[0; 9000]).unwrap();
        assert!(second.contents(ROOT, "f").unwrap() == [0; 9000]);
        let theirs = second.open(ino).unwrap();
        second.sync().unwrap();
        first.write(ino, fh, 0, &[1; 9000]).unwrap();
        crashing.unheard_by_the_first(|| second.write(ino, theirs, 0, &[2; 9000]).unwrap());
        crashing.crash_and_start();
        for client in [&first, &second] {
            assert!(client.contents(ROOT, "f").unwrap() == [2; 9000], "seed {seed}");
            assert_eq!(client.sync(), Ok(()));
        }
    }
}

#[test]
fn changes_in_a_shared_directory_continue_after_a_crash() {
    type Act = fn(&Client, Ino, (Ino, u64)) -> Done;
    let ops: [(&str, Act); 8] = [
        ("mkdir", |client, dir, _| client.mkdir(dir, "new").map(drop)),
        ("create", |client, dir, _| client.create(dir, "new").map(drop)),
        ("unlink", |client, dir, _| client.unlink(dir, "f")),
        ("rename", |client, dir, _| client.rename(dir, "f", "g")),
        ("link", |client, dir, (ino, _)| {
            client.me.call(|cx| client.fs.link(cx, ino, dir, b"g")).map(drop)
        }),
        ("write", |client, _, (ino, fh)| client.write(ino, fh, 3, b"written").map(drop)),
        ("attributes", |client, _, (ino, _)| {
            let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
            client.me.call(|cx| client.fs.setattr(cx, ino, None, &set)).map(drop)
        }),
        ("extended attributes", |client, _, (ino, _)| {
            client.me.call(|cx| client.fs.setxattr(cx, ino, b"user.a", b"1", XattrFlags::default()))
        }),
    ];
    for (seed, (name, op)) in (930..).zip(ops) {
        let mut crashing = Crashing::with(seed, options());
        let (client, other) =
            (crashing.world.client().warm_up(), crashing.world.client().warm_up());
        let dir = client.mkdir(ROOT, "d").unwrap();
        let file = client.create(dir, "f").unwrap();
        client.write(file.0, file.1, 0, b"contents").unwrap();
        assert_eq!(other.ino(ROOT, "d"), dir);
        let mut expected = other.files(dir);
        client.sync().unwrap();
        // What the other client has just changed is made durable first.
        let theirs = other.open(other.ino(dir, "f")).unwrap();
        other.write(file.0, theirs, 0, b"CONTENTS").unwrap();
        other.create(dir, "other's").unwrap();
        assert_eq!(crashing.crash_under(|| op(&client, dir, file)), Ok(()), "{name}");
        expected.insert("f".into(), b"CONTENTS".into());
        expected.insert("other's".into(), Vec::new());
        let f = expected["f"].clone();
        match name {
            "mkdir" => assert!(client.me.call(|cx| client.fs.rmdir(cx, dir, b"new")).is_ok()),
            "create" => drop(expected.insert("new".into(), Vec::new())),
            "unlink" => drop(expected.remove("f")),
            "rename" => drop((expected.remove("f"), expected.insert("g".into(), f))),
            "link" => drop(expected.insert("g".into(), f)),
            "write" => drop(expected.insert("f".into(), b"CONwritten".into())),
            "attributes" => {
                assert_eq!(client.lookup(dir, "f").unwrap().unwrap().mode & 0o777, 0o600)
            }
            _ => assert!(other.me.call(|cx| other.fs.getxattr(cx, file.0, b"user.a")).is_ok()),
        }
        for client in [&client, &other] {
            assert!(client.files(dir) == expected, "{name}");
            assert_eq!(client.sync(), Ok(()), "{name}");
        }
    }
}

#[test]
fn a_grant_waits_until_changes_of_others_are_durable() {
    for seed in 940..943 {
        let mut crashing = Crashing::with(seed, options());
        let (first, second) =
            (crashing.world.client().warm_up(), crashing.world.client().warm_up());
        let (ino, fh) = first.create(ROOT, "f").unwrap();
        first.write(ino, fh, 0, &[9; 9000]).unwrap();
        assert!(second.contents(ROOT, "f").unwrap() == [9; 9000]);
        let theirs = second.open(ino).unwrap();
        second.sync().unwrap();
        first.write(ino, fh, 0, &[1; 9000]).unwrap();
        let set = SetAttr { mode: Some(0o640), ..SetAttr::default() };
        let done = crashing.held(
            || {
                std::thread::scope(|scope| {
                    // This asks for the lease, and the other comes while it is granted.
                    scope.spawn(|| {
                        second.me.call(|cx| second.fs.setattr(cx, ino, None, &set)).map(drop)
                    });
                    std::thread::sleep(Duration::from_millis(100));
                    second.me.call(|cx| second.fs.fallocate(cx, ino, theirs, 3, 0, 9000))
                })
            },
            |_| std::thread::sleep(Duration::from_millis(300)),
        );
        assert_eq!(done, Ok(()));
        crashing.crash_and_start();
        let found = crashing.world.client().contents(ROOT, "f").unwrap();
        assert!(found == [0; 9000], "seed {seed}: the older change is on top");
    }
}

#[test]
fn a_copy_by_the_server_is_durable() {
    const LEN: usize = 3 << 20;
    let mut crashing = Crashing::with(950, options());
    let client = crashing.world.client().warm_up();
    let (a, fa) = client.create(ROOT, "a").unwrap();
    let (b, fb) = client.create(ROOT, "b").unwrap();
    for n in 0..6 {
        client.write(a, fa, n << 19, &[5; 1 << 19]).unwrap();
    }
    client.sync().unwrap();
    let copy =
        |from, len| client.me.call(|cx| client.fs.copy_file_range(cx, a, fa, from, b, fb, 0, len));
    assert_eq!(
        copy(LEN as u64 - 1000, 1 << 30),
        Err(Errno(libc::EOPNOTSUPP)),
        "the kernel reads and writes it"
    );
    client.write(b, fb, 0, b"before").unwrap();
    assert_eq!(copy(0, LEN as u64), Ok(LEN as u64));
    client.write(a, fa, 0, &[6; 20_000]).unwrap();
    crashing.crash_and_start();
    let size = |name| client.lookup(ROOT, name).unwrap().unwrap().size;
    assert_eq!((size("a"), size("b")), (LEN as u64, LEN as u64));
    assert!(client.read(b, fb, 1 << 20).unwrap() == [5; 1 << 20]);
    assert!(client.read(a, fa, 20_001).unwrap() == [&[6; 20_000][..], &[5]].concat());
    assert_eq!((client.fsync(b, fb), client.sync()), (Ok(()), Ok(())));
}

#[test]
fn a_lost_unnamed_file_takes_no_other_change_with_it() {
    let mut crashing = Crashing::with(951, options());
    let client = crashing.world.client().warm_up();
    let dir = client.mkdir(ROOT, "d").unwrap();
    client.sync().unwrap();
    client.me.call(|cx| client.fs.tmpfile(cx, dir, 0o600, libc::O_RDWR)).map(drop).unwrap();
    let (ino, fh) = client.create(dir, "f").unwrap();
    client.write(ino, fh, 0, b"answered").unwrap();
    crashing.crash_and_start();
    assert_eq!(client.fsync(ino, fh), Ok(()));
    assert_eq!(client.contents(dir, "f").unwrap(), b"answered");
}

/// Each is allowed only because the other was made before it, and they touch nothing in common.
#[test]
fn moves_of_directories_by_two_clients_survive_a_crash() {
    for seed in 960..966 {
        let mut crashing = Crashing::with(seed, options());
        let (first, second) =
            (crashing.world.client().warm_up(), crashing.world.client().warm_up());
        let (p, q) = (first.mkdir(ROOT, "p").unwrap(), first.mkdir(ROOT, "q").unwrap());
        let b = first.mkdir(q, "b").unwrap();
        let c = first.mkdir(b, "c").unwrap();
        let a = first.mkdir(c, "a").unwrap();
        let d = first.mkdir(a, "d").unwrap();
        first.sync().unwrap();
        for (dir, name, ino) in [(ROOT, "q", q), (q, "b", b), (b, "c", c), (c, "a", a), (a, "d", d)]
        {
            assert_eq!(second.ino(dir, name), ino);
        }
        let flags = RenameFlags::default();
        first.me.call(|cx| first.fs.rename(cx, c, b"a", p, b"a", flags)).unwrap();
        second.me.call(|cx| second.fs.rename(cx, q, b"b", d, b"b", flags)).unwrap();
        crashing.crash_and_start();
        let third = crashing.world.client();
        let mut dir = ROOT;
        for (name, ino) in [("p", p), ("a", a), ("d", d), ("b", b), ("c", c)] {
            assert_eq!(third.ino(dir, name), ino, "seed {seed}");
            dir = ino;
        }
        assert_eq!((first.sync(), second.sync()), (Ok(()), Ok(())), "seed {seed}");
    }
}

#[test]
fn a_refused_change_does_not_count_as_durable() {
    let mut crashing = Crashing::with(970, options());
    let other = crashing.world.client();
    let dir = other.mkdir(ROOT, "d").unwrap();
    let mut teller = Teller::new(&crashing.world);
    assert_eq!(teller.lookup(ROOT, "d"), dir);
    let _numbers = teller.numbers();
    assert_eq!(teller.lease(&[dir]).len(), 1);
    let set = |mode| SetAttr { mode: Some(mode), ..SetAttr::default() };
    let chmod = |mode| Op::Setattr { ino: dir, fh: None, set: set(mode) };
    let good = teller.acknowledge(chmod(0o700));
    let (name, value) = (b"nonsense".to_vec(), vec![1]);
    teller.acknowledge(Op::Setxattr { ino: dir, name, value, flags: XattrFlags::default() });
    let dropped = teller.acknowledge(chmod(0o711));
    assert_eq!(teller.changed(dropped), Outcome::Dropped {});
    other.sync().unwrap();
    let session = teller.session;
    crashing.crash_and_start();
    let mut raw = Raw::new(&crashing.world);
    let (path, name) = (b"/".into(), b"t".to_vec());
    raw.send(&ToServer::Hello { version: VERSION, session, path, name, newest: dropped });
    let Some(ToClient::Welcome { mark, durable, .. }) = raw.hear() else { panic!("no welcome") };
    assert_eq!((mark, durable), (Some(good), good));
}
