//! The server crashes behind changes that it has decided itself, among early-acknowledged ones:
//! what was synced is never reported as lost, and what is there neither; what is left of each inode
//! is a state that it has had.

use std::collections::{BTreeMap, BTreeSet};

use super::replay::Crashing;
use super::restarts::long_terms;
use super::*;

/// A client that acknowledges early, with two directories that are durable.
fn prepared(crashing: &Crashing) -> (Client, Ino, Ino) {
    let client = crashing.world.client().warm_up();
    let (d, e) = (client.mkdir(ROOT, "d").unwrap(), client.mkdir(ROOT, "e").unwrap());
    client.sync().unwrap();
    (client, d, e)
}

impl Client {
    /// The server decides this.
    fn set_xattr(&self, ino: Ino, value: &[u8]) -> Done {
        self.me.call(|cx| self.fs.setxattr(cx, ino, b"user.a", value, XattrFlags::default()))
    }

    /// And this.
    fn move_dir(&self, from: (Ino, &str), to: (Ino, &str)) -> Done {
        let flags = RenameFlags::default();
        self.me
            .call(|cx| self.fs.rename(cx, from.0, from.1.as_bytes(), to.0, to.1.as_bytes(), flags))
    }

    fn sync_dir(&self, dir: Ino) -> Done {
        self.me.call(|cx| self.fs.fsyncdir(cx, dir, 0, false))
    }

    /// Nothing is said to be lost, on any way.
    fn assert_nothing_told(&self, files: &[(Ino, u64)], dirs: &[Ino]) {
        files.iter().for_each(|(ino, fh)| assert_eq!(self.fsync(*ino, *fh), Ok(()), "{ino}"));
        dirs.iter().for_each(|dir| assert_eq!(self.sync_dir(*dir), Ok(()), "{dir}"));
        assert_eq!(self.sync(), Ok(()));
        assert_eq!(self.figures("connection", "lost_changes"), 0);
    }
}

#[test]
fn changes_synced_after_a_lease_was_returned_are_not_reported_lost() {
    let mut crashing = Crashing::new(600);
    let (client, d, e) = prepared(&crashing);
    let (ino, fh) = client.create(d, "f").unwrap();
    client.write(ino, fh, 0, b"synced").unwrap();
    client.set_xattr(ino, b"1").unwrap();
    assert_eq!(client.fsync(ino, fh), Ok(()));
    crashing.crash_and_start();
    assert_eq!(client.read(ino, fh, 100).unwrap(), b"synced");
    assert_eq!(client.ino(d, "f"), ino);
    // Its name was durable with it.
    client.assert_nothing_told(&[(ino, fh)], &[d, e]);
}

#[test]
fn changes_synced_by_another_client_are_not_reported_lost() {
    let mut crashing = Crashing::new(610);
    let (client, d, e) = prepared(&crashing);
    let other = crashing.world.client();
    let (ino, fh) = client.create(d, "f").unwrap();
    client.write(ino, fh, 0, b"first").unwrap();
    client.fsync(ino, fh).unwrap();
    let dir = other.ino(ROOT, "d");
    assert_eq!(other.ino(dir, "f"), ino);
    let theirs = other.open(ino).unwrap();
    assert_eq!(other.read(ino, theirs, 100).unwrap(), b"first");
    // It has just returned its lease: the server decides this, and others see it.
    client.write(ino, fh, 0, b"second").unwrap();
    assert_eq!(other.read(ino, theirs, 100).unwrap(), b"second");
    assert_eq!(other.fsync(ino, theirs), Ok(()));
    // What the server has said before that has come, too.
    client.me.call(|cx| client.fs.statfs(cx)).unwrap();
    crashing.crash_and_start();
    assert_eq!(client.read(ino, fh, 100).unwrap(), b"second");
    client.assert_nothing_told(&[(ino, fh)], &[d, e]);
    assert_eq!(other.fsync(ino, theirs), Ok(()));
}

#[test]
fn a_change_before_a_sync_is_not_reported_lost_with_a_later_one() {
    let mut crashing = Crashing::new(601);
    let (client, d, e) = prepared(&crashing);
    let (ino, fh) = client.create(d, "f").unwrap();
    client.write(ino, fh, 0, b"synced").unwrap();
    assert_eq!(client.fsync(ino, fh), Ok(()));
    client.set_xattr(ino, b"1").unwrap();
    crashing.crash_and_start();
    assert_eq!(client.read(ino, fh, 100).unwrap(), b"synced");
    assert_eq!((client.sync_dir(d), client.sync_dir(e)), (Ok(()), Ok(())), "the name was synced");
    let there = client.me.call(|cx| client.fs.getxattr(cx, ino, b"user.a")).is_ok();
    assert_eq!(
        client.figures("connection", "lost_changes"),
        u64::from(!there),
        "the attribute alone"
    );
    assert_eq!(client.sync(), if there { Ok(()) } else { Err(Errno(libc::EIO)) });
    assert_eq!(client.sync(), Ok(()), "once");
}

#[test]
fn surviving_server_decided_changes_are_not_reported_lost() {
    let mut crashing = Crashing::new(602);
    let (client, d, e) = prepared(&crashing);
    client.mkdir(d, "sub").unwrap();
    client.move_dir((d, "sub"), (e, "moved")).unwrap();
    // What is synced later is behind it in the log.
    let (ino, fh) = client.create(ROOT, "other").unwrap();
    assert_eq!(client.fsync(ino, fh), Ok(()));
    crashing.crash_and_start();
    assert_eq!(
        (client.list(d).unwrap().len(), client.list(e).unwrap()),
        (0, vec!["moved".to_string()])
    );
    client.assert_nothing_told(&[(ino, fh)], &[ROOT, d, e]);
}

#[test]
fn a_file_linked_when_complete_survives_with_its_name() {
    for synced in [false, true] {
        let mut crashing = Crashing::new(603);
        let (client, d, e) = prepared(&crashing);
        let flags = libc::O_RDWR | libc::O_TMPFILE;
        let (entry, opened) = client.me.call(|cx| client.fs.tmpfile(cx, d, 0o644, flags)).unwrap();
        let ino = entry.attr.unwrap().ino;
        client.write(ino, opened.fh, 0, &[7; 10_000]).unwrap();
        client.append(ino, opened.fh, b"end").unwrap();
        if synced {
            assert_eq!(client.fsync(ino, opened.fh), Ok(()));
        }
        let linked = client.me.call(|cx| client.fs.link(cx, ino, d, b"whole")).unwrap();
        assert_eq!(linked.attr.unwrap().nlink, 1);
        let before = client.see();
        crashing.crash_and_start();
        assert!(client.see() == before, "{synced}");
        assert_eq!(client.read(ino, opened.fh, 20_000).unwrap().len(), 10_003);
        client.assert_nothing_told(&[(ino, opened.fh)], &[d, e]);
    }
}

/// What is seen of an inode: what it holds, its mode, its time, and an attribute.
type Known = (Vec<u8>, u32, Timestamp, Option<Vec<u8>>);

impl Client {
    fn states(&self) -> BTreeMap<Ino, Known> {
        let mut states: BTreeMap<Ino, Known> = BTreeMap::new();
        let mut names: BTreeMap<String, (Ino, BTreeSet<(String, Ino)>)> = BTreeMap::new();
        names.insert(String::new(), (ROOT, BTreeSet::new()));
        for (path, (attr, contents)) in self.see() {
            let (dir, name) = path.rsplit_once('/').unwrap();
            names.get_mut(dir).unwrap().1.insert((name.into(), attr.ino));
            if attr.mode & libc::S_IFMT == libc::S_IFDIR {
                names.insert(path, (attr.ino, BTreeSet::new()));
            } else {
                let xattr = self.me.call(|cx| self.fs.getxattr(cx, attr.ino, b"user.a")).ok();
                states.insert(attr.ino, (contents, attr.mode, attr.mtime, xattr));
            }
        }
        for (ino, names) in names.into_values() {
            states.insert(ino, (format!("{names:?}").into_bytes(), 0, Timestamp::default(), None));
        }
        states
    }
}

/// Early-acknowledged changes, changes that the server decides, and another client.
struct Script {
    d: Ino,
    e: Ino,
    files: BTreeMap<&'static str, (Ino, u64)>,
}

const STEPS: usize = 20;

impl Script {
    fn make(&mut self, client: &Client, dir: Ino, name: &'static str) {
        self.files.insert(name, client.create(dir, name).unwrap());
    }

    fn write(&self, client: &Client, name: &str, data: &[u8]) {
        let (ino, fh) = self.files[name];
        assert_eq!(client.append(ino, fh, data), Ok(data.len() as u64));
    }

    fn step(&mut self, (client, other): (&Client, &Client), step: usize) {
        let (d, e) = (self.d, self.e);
        match step {
            0 => self.make(client, d, "a"),
            1 => self.write(client, "a", b"one "),
            2 => client.set_xattr(self.files["a"].0, b"first").unwrap(),
            3 => self.write(client, "a", b"two "),
            4 => drop(client.mkdir(d, "sub").unwrap()),
            5 => {
                let sub = client.ino(d, "sub");
                self.make(client, sub, "x");
            }
            6 => self.write(client, "x", &[7; 5000]),
            7 => client.move_dir((d, "sub"), (e, "moved")).unwrap(),
            8 => self.write(client, "x", b"behind the move"),
            9 => drop(client.mkdir(client.ino(e, "moved"), "y").unwrap()),
            10 => {
                assert_eq!((other.ino(ROOT, "d"), other.list(d).is_ok()), (d, true));
                other.create(d, "other's").unwrap();
            }
            11 => self.make(client, d, "b"),
            12 => self.write(client, "b", b"b "),
            13 => client.rename(d, "b", "c").unwrap(),
            14 => self.write(client, "b", b"renamed "),
            15 => {
                let (ino, fh) = self.files["a"];
                client.me.call(|cx| client.fs.fallocate(cx, ino, fh, 0, 0, 9000)).unwrap();
            }
            16 => self.write(client, "a", b"three"),
            17 => client.set_xattr(self.files["a"].0, b"second").unwrap(),
            18 => client.unlink(d, "c").unwrap(),
            19 => drop(client.mkdir(d, "last").unwrap()),
            _ => unreachable!("there are no more"),
        }
    }
}

#[test]
fn server_decided_changes_are_replayed_beside_other_clients() {
    for steps in 0..=STEPS {
        let mut crashing = Crashing::new(700 + steps as u64);
        let (client, d, e) = prepared(&crashing);
        let other = crashing.world.client();
        let mut script = Script { d, e, files: BTreeMap::new() };
        for step in 0..steps {
            script.step((&client, &other), step);
            if (steps + step) % 6 == 5 {
                client.sync().unwrap();
            }
        }
        let before = client.states();
        crashing.crash_and_start();
        assert_eq!(client.states(), before, "{steps} steps");
        assert_eq!((client.sync(), other.sync()), (Ok(()), Ok(())), "{steps} steps");
        assert_eq!(crashing.world.client().states(), before, "{steps} steps: seen by another");
    }
}

#[test]
fn the_first_changes_of_a_mount_are_replayed() {
    let mut crashing = Crashing::new(604);
    let client = crashing.world.client();
    let dir = client.mkdir(ROOT, "first").unwrap();
    let (ino, fh) = client.create(dir, "f").unwrap();
    client.write(ino, fh, 0, b"written").unwrap();
    let before = client.see();
    crashing.crash_and_start();
    if client.sync().is_ok() {
        assert!(client.see() == before);
        assert_eq!(client.read(ino, fh, 100).unwrap(), b"written");
    }
    assert_eq!(client.sync(), Ok(()), "once");
}

#[test]
fn a_second_replay_does_not_overwrite_data_synced_by_another_client() {
    // Others change nothing for a term.
    let options = ServerOptions { lease_term: Duration::from_secs(8), ..long_terms() };
    let mut crashing = Crashing::with(605, options);
    let (client, d, e) = prepared(&crashing);
    let (ino, fh) = client.create(d, "f").unwrap();
    client.write(ino, fh, 0, b"first").unwrap();
    crashing.crash_and_start();
    let other = crashing.world.client();
    assert_eq!((other.ino(ROOT, "d"), other.ino(d, "f")), (d, ino));
    let theirs = other.open(ino).unwrap();
    other.write(ino, theirs, 0, b"SECOND").unwrap();
    assert_eq!(other.fsync(ino, theirs), Ok(()));
    crashing.crash_and_start();
    for (client, fh, dirs) in [(&client, fh, &[d, e][..]), (&other, theirs, &[d])] {
        assert_eq!(client.read(ino, fh, 100).unwrap(), b"SECOND");
        client.assert_nothing_told(&[(ino, fh)], dirs);
    }
}
