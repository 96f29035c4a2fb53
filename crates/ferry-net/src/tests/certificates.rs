//! What a client may do if its certificate names its users, and after its certificate is revoked.

use super::boundaries::Raw;
use super::*;
use crate::codec::List;
use crate::limits::Peer;
use crate::message::*;
use crate::{Address, ClientTls, Limits, ServerTls, TcpConnector, Terms, authority};

pub(super) fn limited(users: &str, groups: &str) -> Peer {
    let limits = Limits { users: users.parse().unwrap(), groups: groups.parse().unwrap() };
    Peer { certificate: b"a certificate".to_vec(), limits: Some(limits), ..Peer::default() }
}

/// A change of a file's contents, by its number and that of the open file.
type Way<'a> = &'a dyn Fn(&mut Liar, Ino, u64) -> Outcome;

/// A user on the client's machine.
fn user(uid: u32, gid: u32) -> Caller {
    Caller { uid, gid, pid: 77, umask: 0 }
}

const ALICE: Caller = Caller { uid: 1000, gid: 1000, pid: 77, umask: 0 };
pub(super) const DAEMON: Caller = Caller { uid: 0, gid: 0, pid: 0, umask: 0 };
const OPEN: i32 = libc::O_RDONLY;

pub(super) fn failed(errno: i32) -> Outcome {
    Outcome::Failed { errno }
}

/// A client that sends what it likes, about its users too.
pub(super) struct Liar {
    raw: Raw,
    seq: u64,
    files: u64,
}

impl Liar {
    fn new(world: &World, peer: Peer) -> Self {
        Self::at(world, peer, "/")
    }

    pub(super) fn at(world: &World, peer: Peer, path: &str) -> Self {
        Self { raw: Raw::at(world, peer, path.as_bytes()), seq: 0, files: 0 }
    }

    pub(super) fn says(&mut self, caller: Caller, op: Op) -> Outcome {
        self.says_early(caller, op, None)
    }

    fn says_early(
        &mut self,
        caller: Caller,
        op: Op,
        acknowledged: Option<Acknowledged>,
    ) -> Outcome {
        if !op.is_ordered() {
            self.raw.send(&ToServer::Request { id: 1, after: 0, caller, op });
        } else {
            self.seq += 1;
            let (seq, answered, epoch) = (self.seq, self.seq - 1, 0);
            self.raw.send(&ToServer::Change { seq, answered, epoch, acknowledged, caller, op });
        }
        loop {
            match self.raw.hear() {
                Some(ToClient::Reply { outcome, .. } | ToClient::Changed { outcome, .. }) => {
                    return outcome;
                }
                Some(ToClient::Recall { .. }) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// Looks a name up, for the daemon.
    pub(super) fn ino(&mut self, parent: Ino, name: &str) -> Ino {
        match self.says(DAEMON, Op::Lookup { parent, name: name.into() }) {
            Outcome::Entry { known: Some(known) } => known.attr.ino,
            other => panic!("{name}: {other:?}"),
        }
    }

    pub(super) fn opens(&mut self, caller: Caller, ino: Ino, flags: i32) -> Result<u64, i32> {
        self.files += 1;
        let fh = self.files;
        match self.says(caller, Op::Open { ino, fh, flags, kill_suidgid: false }) {
            Outcome::Failed { errno } => Err(errno),
            _ => Ok(fh),
        }
    }
}

/// The volume, used by root and not over the network.
pub(super) struct Root<'a>(pub(super) &'a LocalFs);

impl Root<'_> {
    fn call<T: ferry_fs::inprocess::FromReply>(
        &self,
        request: impl FnOnce(&Cx<'_>) -> Answer<T>,
    ) -> T {
        InProcess::default().call(request).unwrap()
    }

    pub(super) fn set(&self, ino: Ino, (uid, gid): (u32, u32), mode: u32) {
        let (uid, gid) = (Some(uid), Some(gid));
        self.call(|cx| self.0.setattr(cx, ino, None, &SetAttr { uid, gid, ..SetAttr::default() }));
        self.call(|cx| {
            self.0.setattr(cx, ino, None, &SetAttr { mode: Some(mode), ..SetAttr::default() })
        });
    }

    pub(super) fn dir(&self, parent: Ino, name: &str, owner: (u32, u32), mode: u32) -> Ino {
        let ino = self.call(|cx| self.0.mkdir(cx, parent, name.as_bytes(), 0)).attr.unwrap().ino;
        self.set(ino, owner, mode);
        ino
    }

    pub(super) fn file(&self, parent: Ino, name: &str, owner: (u32, u32), mode: u32) -> Ino {
        let made = self.call(|cx| self.0.mknod(cx, parent, name.as_bytes(), libc::S_IFREG, 0));
        let ino = made.attr.unwrap().ino;
        self.set(ino, owner, mode);
        ino
    }

    fn attr(&self, ino: Ino) -> Attr {
        self.call(|cx| self.0.getattr(cx, ino, None)).0
    }

    fn mode(&self, ino: Ino) -> u32 {
        self.attr(ino).mode & 0o7777
    }

    pub(super) fn names(&self, dir: Ino) -> Vec<String> {
        let mut names = Vec::new();
        let Any(_) = self.call(|cx| {
            self.0.readdir(cx, dir, 0, 0, false, &mut |entry| {
                names.push(String::from_utf8_lossy(&entry.name).into_owned());
                true
            })?;
            Ok(Any(Reply::Empty))
        });
        names.retain(|name| name != "." && name != "..");
        names.sort();
        names
    }
}

/// Each operation that asks for a user's rights, about directory `dir` with the file `ino` called
/// `f`.
fn operations(dir: Ino, ino: Ino) -> Vec<Op> {
    let (parent, name, new) = (dir, || b"f".to_vec(), || b"new".to_vec());
    let set = |set: SetAttr| Op::Setattr { ino, fh: None, set };
    let (flags, rename) = (libc::O_RDWR, RenameFlags::default());
    vec![
        Op::Lookup { parent, name: name() },
        Op::Readdir { ino: dir, cookie: 0 },
        Op::Readlink { ino },
        Op::Getxattr { ino, name: b"user.a".to_vec() },
        Op::Listxattr { ino },
        Op::Open { ino, fh: 1, flags: OPEN, kill_suidgid: false },
        Op::Create { parent, name: new(), mode: 0o644, flags, fh: 2 },
        Op::Create { parent, name: name(), mode: 0o644, flags, fh: 3 },
        Op::Tmpfile { parent, mode: 0o644, flags, fh: 4 },
        Op::Mknod { parent, name: new(), mode: libc::S_IFREG | 0o644, rdev: 0 },
        Op::Mkdir { parent, name: new(), mode: 0o755 },
        Op::Symlink { parent, name: new(), target: name() },
        Op::Link { ino, parent, name: new() },
        Op::Unlink { parent, name: name() },
        Op::Rmdir { parent, name: name() },
        Op::Rename { parent, name: name(), new_parent: parent, new_name: new(), flags: rename },
        Op::Setxattr { ino, name: b"user.a".to_vec(), value: new(), flags: XattrFlags::default() },
        Op::Removexattr { ino, name: b"user.a".to_vec() },
        set(SetAttr { size: Some(7), ..SetAttr::default() }),
        set(SetAttr { mode: Some(0o600), ..SetAttr::default() }),
        set(SetAttr { uid: Some(0), ..SetAttr::default() }),
        set(SetAttr { mtime: Some(SetTime::Now), ..SetAttr::default() }),
    ]
}

#[test]
fn a_user_outside_the_certificate_is_refused() {
    let world = World::new(70);
    let root = Root(&world.fs);
    let dir = root.dir(ROOT, "open", (1000, 1000), 0o777);
    let file = root.file(dir, "f", (1000, 1000), 0o666);
    let mut liar = Liar::new(&world, limited("1000-1001", "1000"));
    assert_eq!((liar.ino(ROOT, "open"), liar.ino(dir, "f")), (dir, file));
    let before = root.attr(file);
    for caller in [
        user(0, 0),
        user(0, 1000),
        user(999, 1000),
        user(1002, 1000),
        user(1000, 0),
        user(1000, 1001),
    ] {
        for op in operations(dir, file) {
            let what = format!("{caller:?} {op:?}");
            assert_eq!(liar.says(caller, op), failed(libc::EACCES), "{what}");
        }
    }
    // The daemon itself may look things up, and open again what was open; no more.
    for op in operations(dir, file)
        .into_iter()
        .filter(|op| op.is_ordered() && !matches!(op, Op::Open { .. }))
    {
        let what = format!("{op:?}");
        assert_eq!(liar.says(DAEMON, op), failed(libc::EACCES), "{what}");
    }
    assert_eq!(root.names(dir), ["f"]);
    let after = root.attr(file);
    assert_eq!(
        (after.size, after.mode, after.uid, after.nlink),
        (before.size, before.mode, before.uid, 1)
    );
    // A user of the certificate makes what is its own.
    let made = liar.says(ALICE, Op::Mkdir { parent: dir, name: b"mine".to_vec(), mode: 0o755 });
    let Outcome::Entry { known: Some(made) } = made else { panic!("{made:?}") };
    assert_eq!((made.attr.uid, made.attr.gid), (1000, 1000));
    // What the mount itself needs works for every user.
    for op in [Op::Statfs {}, Op::Getattr { ino: ROOT }, Op::Sync {}] {
        assert!(!matches!(liar.says(user(0, 0), op), Outcome::Failed { .. }));
    }
}

#[test]
fn a_lying_client_may_do_only_what_its_users_may() {
    let world = World::new(71);
    let root = Root(&world.fs);
    let secret = root.file(ROOT, "secret", (0, 0), 0o600);
    let readable = root.file(ROOT, "shown", (0, 0), 0o644);
    let run = root.file(ROOT, "run", (0, 0), 0o711);
    let ours = root.file(ROOT, "ours", (0, 1000), 0o640);
    let closed = root.dir(ROOT, "closed", (0, 0), 0o700);
    root.file(closed, "inside", (0, 0), 0o666);
    let mut liar = Liar::new(&world, limited("1000", "1000"));
    for name in ["secret", "shown", "run", "ours", "closed"] {
        liar.ino(ROOT, name);
    }
    for caller in [ALICE, DAEMON] {
        assert_eq!(liar.opens(caller, secret, libc::O_RDONLY), Err(libc::EACCES));
        assert!(liar.opens(caller, readable, libc::O_RDONLY).is_ok());
        assert_eq!(liar.opens(caller, readable, libc::O_RDWR), Err(libc::EACCES));
        assert_eq!(liar.opens(caller, readable, libc::O_RDONLY | libc::O_TRUNC), Err(libc::EACCES));
        assert!(
            liar.opens(caller, run, libc::O_RDONLY).is_ok(),
            "a user that may execute it reads it"
        );
        assert!(liar.opens(caller, ours, libc::O_RDONLY).is_ok(), "by its group");
        assert_eq!(liar.opens(caller, ours, libc::O_WRONLY), Err(libc::EACCES));
        let inside = Op::Lookup { parent: closed, name: b"inside".to_vec() };
        assert_eq!(liar.says(caller, inside), failed(libc::EACCES));
        assert_eq!(liar.says(caller, Op::Readdir { ino: closed, cookie: 0 }), failed(libc::EACCES));
    }
    let cut = SetAttr { size: Some(0), ..SetAttr::default() };
    for op in [
        Op::Create {
            parent: ROOT,
            name: b"secret".to_vec(),
            mode: 0o644,
            flags: libc::O_RDWR,
            fh: 90,
        },
        Op::Create {
            parent: ROOT,
            name: b"new".to_vec(),
            mode: 0o644,
            flags: libc::O_RDWR,
            fh: 91,
        },
        Op::Mkdir { parent: ROOT, name: b"new".to_vec(), mode: 0o755 },
        Op::Link { ino: readable, parent: ROOT, name: b"new".to_vec() },
        Op::Unlink { parent: ROOT, name: b"shown".to_vec() },
        Op::Setattr { ino: readable, fh: None, set: cut },
        Op::Getxattr { ino: secret, name: b"user.a".to_vec() },
        Op::Removexattr { ino: readable, name: b"security.capability".to_vec() },
    ] {
        let what = format!("{op:?}");
        assert_eq!(liar.says(ALICE, op), failed(libc::EACCES), "{what}");
    }
    assert_eq!(root.names(ROOT), ["closed", "ours", "run", "secret", "shown"]);
}

#[test]
fn operations_of_owners_and_root_are_refused_to_others() {
    let world = World::new(72);
    let root = Root(&world.fs);
    let dir = root.dir(ROOT, "tmp", (0, 0), 0o1777);
    let theirs = root.file(dir, "theirs", (0, 0), 0o666);
    let mine = root.file(dir, "mine", (1000, 1000), 0o644);
    let grave = root.dir(dir, "grave", (0, 0), 0o755);
    let own = root.dir(ROOT, "own", (1000, 1000), 0o755);
    let mut liar = Liar::new(&world, limited("1000-1001", "1000-1001"));
    liar.ino(ROOT, "tmp");
    liar.ino(ROOT, "own");
    for name in ["theirs", "mine", "grave"] {
        liar.ino(dir, name);
    }
    let set = |ino, set: SetAttr| Op::Setattr { ino, fh: None, set };
    let none = SetAttr::default();
    let rename = |name: &str, new_name: &str, flags| Op::Rename {
        parent: dir,
        name: name.into(),
        new_parent: own,
        new_name: new_name.into(),
        flags,
    };
    let xattr = |ino, name: &str| Op::Setxattr {
        ino,
        name: name.into(),
        value: b"x".to_vec(),
        flags: XattrFlags::default(),
    };
    for op in [
        Op::Unlink { parent: dir, name: b"theirs".to_vec() },
        rename("theirs", "x", RenameFlags::default()),
        set(theirs, SetAttr { mode: Some(0o777), ..none }),
        set(theirs, SetAttr { mtime: Some(SetTime::At(Timestamp(1))), ..none }),
        set(theirs, SetAttr { gid: Some(1000), ..none }),
        set(theirs, SetAttr { uid: Some(1000), ..none }),
        set(mine, SetAttr { uid: Some(1001), ..none }),
        set(mine, SetAttr { uid: Some(0), ..none }),
        set(mine, SetAttr { gid: Some(0), ..none }),
        Op::Mknod { parent: dir, name: b"sda".to_vec(), mode: libc::S_IFBLK | 0o666, rdev: 0x800 },
        xattr(mine, "security.capability"),
        xattr(mine, "trusted.x"),
        xattr(theirs, "system.posix_acl_access"),
        Op::Getxattr { ino: theirs, name: b"trusted.x".to_vec() },
    ] {
        let what = format!("{op:?}");
        assert_eq!(liar.says(ALICE, op), failed(libc::EPERM), "{what}");
    }
    assert_eq!(root.names(dir), ["grave", "mine", "theirs"]);
    // Another user's directory keeps its location. The owner's changes, and a time that is now, are
    // allowed.
    root.set(dir, (0, 0), 0o777);
    let moves = |new: &str| rename("grave", new, RenameFlags::default());
    assert_eq!(liar.says(ALICE, moves("grave")), failed(libc::EACCES));
    root.set(grave, (1000, 1000), 0o755);
    assert_eq!(liar.says(ALICE, moves("grave")), Outcome::Done {});
    for op in [
        set(theirs, SetAttr { mtime: Some(SetTime::Now), ..none }),
        set(mine, SetAttr { mode: Some(0o600), ..none }),
        set(mine, SetAttr { gid: Some(1001), uid: Some(1000), ..none }),
        xattr(mine, "user.x"),
    ] {
        let what = format!("{op:?}");
        assert!(!matches!(liar.says(ALICE, op), Outcome::Failed { .. }), "{what}");
    }
    assert_eq!((root.attr(mine).uid, root.attr(mine).gid), (1000, 1001));
}

#[test]
fn a_changed_program_loses_its_privileges_even_if_not_asked() {
    let world = World::new(73);
    let root = Root(&world.fs);
    let write =
        |fh| Op::Write { fh, offset: 0, data: b"x".to_vec(), append: false, kill_suidgid: false };
    let cut = |fh| SetAttr { size: Some(0), kill_suidgid: fh, ..SetAttr::default() };
    let mut liar = Liar::new(&world, limited("1000", "1000"));
    let from = root.file(ROOT, "from", (1000, 1000), 0o644);
    liar.ino(ROOT, "from");
    let from = liar.opens(ALICE, from, libc::O_RDONLY).unwrap();
    let ways: [Way; 5] = [
        &|liar, _, fh| liar.says(ALICE, write(fh)),
        &|liar, _, fh| liar.says(DAEMON, write(fh)),
        &|liar, ino, _| liar.says(ALICE, Op::Setattr { ino, fh: None, set: cut(false) }),
        &|liar, _, fh| liar.says(ALICE, Op::Fallocate { fh, mode: 0, offset: 0, len: 4096 }),
        &|liar, _, fh| {
            liar.says(ALICE, Op::Copy { fh_in: from, off_in: 0, fh_out: fh, off_out: 0, len: 1 })
        },
    ];
    for (at, way) in ways.iter().enumerate() {
        let name = format!("program{at}");
        let ino = root.file(ROOT, &name, (0, 0), 0o6777);
        liar.ino(ROOT, &name);
        let fh = liar.opens(ALICE, ino, libc::O_RDWR).unwrap();
        assert_eq!(root.mode(ino), 0o6777);
        assert!(!matches!(way(&mut liar, ino, fh), Outcome::Failed { .. }), "{at}");
        assert_eq!(root.mode(ino), 0o777, "{at}");
    }
    let ino = root.file(ROOT, "opened", (0, 0), 0o6777);
    liar.ino(ROOT, "opened");
    liar.opens(ALICE, ino, libc::O_WRONLY | libc::O_TRUNC).unwrap();
    assert_eq!(root.mode(ino), 0o777);
    // A group outside the certificate gets no privileges.
    let set = SetAttr { mode: Some(0o6755), ..SetAttr::default() };
    for (group, mode) in [(0, 0o4755), (1000, 0o6755)] {
        let ino = root.file(ROOT, &format!("of{group}"), (1000, group), 0o644);
        liar.ino(ROOT, &format!("of{group}"));
        liar.says(ALICE, Op::Setattr { ino, fh: None, set });
        assert_eq!(root.mode(ino), mode);
        let parent = root.dir(ROOT, &format!("in{group}"), (0, group), 0o2777);
        liar.ino(ROOT, &format!("in{group}"));
        let made = liar.says(
            ALICE,
            Op::Mknod { parent, name: b"p".to_vec(), mode: libc::S_IFREG | 0o6755, rdev: 0 },
        );
        let Outcome::Entry { known: Some(made) } = made else { panic!("{made:?}") };
        assert_eq!((made.attr.gid, made.attr.mode & 0o7777), (group, mode));
    }
}

#[test]
fn an_open_file_is_used_as_it_was_opened() {
    let world = World::new(74);
    let root = Root(&world.fs);
    let drop_box = root.file(ROOT, "box", (0, 0), 0o622);
    let mut liar = Liar::new(&world, limited("1000", "1000"));
    liar.ino(ROOT, "box");
    let fh = liar.opens(ALICE, drop_box, libc::O_WRONLY).unwrap();
    let (fh_in, fh_out, len) = (fh, fh, 1);
    assert_eq!(liar.says(ALICE, Op::Read { fh, offset: 0, size: 1 }), failed(libc::EBADF));
    assert_eq!(
        liar.says(ALICE, Op::Copy { fh_in, off_in: 0, fh_out, off_out: 9, len }),
        failed(libc::EBADF)
    );
    // The kernel writes back, and reads ahead, for no particular user. A mode that changes later
    // closes nothing.
    root.set(drop_box, (0, 0), 0);
    let write =
        Op::Write { fh, offset: 0, data: b"x".to_vec(), append: false, kill_suidgid: false };
    assert_eq!(liar.says(DAEMON, write), Outcome::Count { count: 1 });
    assert_eq!(liar.says(user(0, 0), Op::Release { fh }), Outcome::Done {});
}

#[test]
fn an_acl_counts_for_the_users_of_the_certificate() {
    const UNDEFINED: u32 = u32::MAX;
    let world = World::new(75);
    let root = Root(&world.fs);
    let mut liar = Liar::new(&world, limited("1000-1001", "1000"));
    let mut opens = |user_perm: u16, group_perm: u16, mask: u16, other: u16| {
        let name = format!("f{user_perm}{group_perm}{mask}{other}");
        let ino = root.file(ROOT, &name, (0, 0), 0o600);
        let (head, owner) = (2_u32.to_le_bytes(), (1, 6, UNDEFINED));
        let entries: [(u16, u16, u32); 6] = [
            owner,
            (2, user_perm, 1000),
            (4, 0, UNDEFINED),
            (8, group_perm, 1000),
            (0x10, mask, UNDEFINED),
            (0x20, other, UNDEFINED),
        ];
        let encode = |(tag, perm, id): (u16, u16, u32)| {
            [&tag.to_le_bytes()[..], &perm.to_le_bytes(), &id.to_le_bytes()].concat()
        };
        let list = [&head[..], &entries.map(encode).concat()].concat();
        let flags = XattrFlags::default();
        root.call(|cx| world.fs.setxattr(cx, ino, b"system.posix_acl_access", &list, flags));
        liar.ino(ROOT, &name);
        let mut may = |uid| liar.opens(user(uid, 1000), ino, libc::O_RDONLY).is_ok();
        (may(1000), may(1001))
    };
    assert_eq!(opens(4, 0, 4, 0), (true, false), "the user's entry");
    assert_eq!(opens(4, 0, 2, 0), (false, false), "the mask takes it away");
    assert_eq!(opens(0, 4, 4, 0), (false, true), "the user's entry comes before the group's");
    assert_eq!(opens(0, 0, 0, 4), (false, true), "others");
}

#[test]
fn a_limited_client_acknowledges_nothing_early_and_works() {
    let mut world = World::new(76);
    let dir = Root(&world.fs).dir(ROOT, "home", (1000, 1000), 0o755);
    *world.net.peer.lock() = limited("1000", "1000");
    let me = InProcess { uid: 1000, gid: 1000, caller: 5, ..InProcess::default() };
    let client = Client { me, ..world.client() };
    assert_eq!(client.ino(ROOT, "home"), dir);
    let flags = libc::O_RDWR | libc::O_EXCL | libc::O_CREAT;
    // As git makes its objects: no user could open it like this again.
    let made = client.me.call(|cx| client.fs.create(cx, dir, b"object", 0o444, flags));
    let (ino, fh) = made.map(|(entry, opened)| (entry.attr.unwrap().ino, opened.fh)).unwrap();
    assert_eq!(client.write(ino, fh, 0, b"one"), Ok(3));
    assert_eq!(client.mkdir(dir, "d").map(drop), Ok(()));
    assert_eq!(client.fs.connection()["early_acknowledged"], 0);
    assert_eq!(world.figure("write_leases"), 0);
    assert!(world.figure("leases") > 0, "it keeps what it was told");
    let root =
        Client { me: InProcess { caller: 6, ..InProcess::default() }, fs: Arc::clone(&client.fs) };
    assert_eq!(root.create(dir, "root's").map(drop), Err(Errno(libc::EACCES)));
    assert_eq!(root.open(ino), Err(Errno(libc::EACCES)));
    assert_eq!(root.unlink(dir, "object"), Err(Errno(libc::EACCES)));
    client.sync().unwrap();
    // The daemon opens again what was open.
    drop(world.take_server());
    world.reopen();
    world.start();
    // An append on its way to the server that has ended would fail: it may have been applied.
    client.sync().unwrap();
    assert_eq!(client.append(ino, fh, b" two"), Ok(4));
    assert_eq!(client.read(ino, fh, 10).unwrap(), b"one two");
    client.close(ino, fh);
    assert_eq!(client.list(dir).unwrap(), ["d", "object"]);
}

#[test]
fn an_early_acknowledged_change_of_a_limited_client_is_refused() {
    let world = World::new(77);
    let dir = Root(&world.fs).dir(ROOT, "home", (1000, 1000), 0o755);
    let mut liar = Liar::new(&world, limited("1000", "1000"));
    liar.ino(ROOT, "home");
    assert_eq!(
        liar.says(ALICE, Op::Lease { inodes: List(vec![dir]) }),
        Outcome::Leases { held: List(vec![]) }
    );
    assert_eq!(liar.says(ALICE, Op::Numbers {}), failed(libc::EPERM));
    assert_eq!(liar.says(ALICE, Op::Reserve { bytes: 1 << 20, inodes: 64 }), failed(libc::EPERM));
    let acknowledged = Some(Acknowledged { at: Timestamp(1), ino: 1 << 40 });
    let make = Op::Mkdir { parent: dir, name: b"d".to_vec(), mode: 0o755 };
    assert!(matches!(liar.says_early(ALICE, make, acknowledged), Outcome::Failed { .. }));
    assert!(Root(&world.fs).names(dir).is_empty());
}

#[test]
fn a_request_for_leases_waits_for_what_makes_a_change_busy_even_if_it_gets_none() {
    let world = World::new(78);
    let file = Root(&world.fs).file(ROOT, "f", (1000, 1000), 0o644);
    let mut limited = Liar::new(&world, limited("1000", "1000"));
    let mut holder = Liar::new(&world, Peer::default());
    assert_eq!((limited.ino(ROOT, "f"), holder.ino(ROOT, "f")), (file, file));
    let fh = limited.opens(ALICE, file, libc::O_RDWR).unwrap();
    // What it was told at the lookup.
    limited.raw.send(&ToServer::Returned { inodes: List(vec![file]), after: 0 });
    let lease = || Op::Lease { inodes: List(vec![file]) };
    let Outcome::Leases { held } = holder.says(DAEMON, lease()) else { panic!("it is free") };
    assert_eq!(held.0.len(), 1);
    let write =
        || Op::Write { fh, offset: 0, data: b"x".into(), append: false, kill_suidgid: false };
    assert_eq!(limited.says(ALICE, write()), Outcome::Busy {});
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let leases = limited.says(ALICE, lease());
            (leases, limited.says(ALICE, write()))
        });
        assert_eq!(holder.raw.hear(), Some(ToClient::Recall { inodes: List(vec![file]) }));
        holder.raw.send(&ToServer::Returned { inodes: List(vec![file]), after: 0 });
        let none = Outcome::Leases { held: List(vec![]) };
        assert_eq!(asking.join().unwrap(), (none, Outcome::Count { count: 1 }));
    });
}

/// A volume whose server listens, with an authority.
pub(super) struct Listening {
    pub(super) world: World,
    pub(super) dir: tempfile::TempDir,
    pub(super) port: u16,
}

impl Listening {
    pub(super) fn new(seed: u64) -> Self {
        Self::of(World::new(seed))
    }

    pub(super) fn of(world: World) -> Self {
        let dir = tempfile::tempdir().unwrap();
        authority::init(dir.path(), &["localhost".into()], authority::DAYS).unwrap();
        let tls = ServerTls::load(dir.path()).unwrap();
        let port = on_loopback(&world.server(), Some(tls)).port();
        Self { world, dir, port }
    }

    pub(super) fn connect(&self, name: &str) -> Result<Client, NetError> {
        self.connect_at(name, "/")
    }

    /// A connection that sends nothing.
    pub(super) fn stranger(&self) -> std::net::TcpStream {
        std::net::TcpStream::connect(("127.0.0.1", self.port)).unwrap()
    }

    pub(super) fn connect_at(&self, name: &str, path: &str) -> Result<Client, NetError> {
        let address = Address::of_host("localhost", Some(self.port), path);
        let tls = ClientTls::load(&self.dir.path().join(name)).unwrap();
        let options = ClientOptions {
            name: name.into(),
            timeout: Duration::from_secs(1),
            ..self.world.client_options(path)
        };
        let fs = RemoteFs::connect(
            Arc::new(TcpConnector::new(address, Some(tls))),
            options,
            &Env::real(),
        )?;
        Ok(Client { fs, me: InProcess { uid: 1000, gid: 1000, caller: 5, ..InProcess::default() } })
    }
}

#[test]
fn a_limited_certificate_mounts_only_where_it_may_search() {
    let world = World::new(81);
    let root = Root(&world.fs);
    let closed = root.dir(ROOT, "closed", (0, 0), 0o700);
    let open = root.dir(closed, "open", (0, 0), 0o777);
    root.dir(open, "below", (1000, 1000), 0o777);
    let mount = |peer: Peer, path: &str| {
        *world.net.peer.lock() = peer;
        world.mount(path).map(drop).map_err(|error| error.to_string())
    };
    for path in ["/closed/open", "/closed/open/below", "/closed/missing"] {
        let said = mount(limited("1000", "1000"), path).unwrap_err();
        assert!(said.contains("may not search /closed"), "{said}");
        assert!(!said.contains("no such directory"), "it does not learn what is there: {said}");
    }
    // A client that reaches the directory may mount it: what is in it is checked then.
    assert_eq!(mount(limited("1000", "1000"), "/closed"), Ok(()));
    for peer in [limited("0", "0"), Peer::default()] {
        assert_eq!(mount(peer, "/closed/open"), Ok(()));
    }
    // Its owner, its group and all others, each by its own bits.
    for (mode, users, groups, may) in [
        (0o710, "1000", "7", true),
        (0o710, "1000", "8", false),
        (0o701, "1000", "8", true),
        (0o010, "7", "8", true),
        (0o100, "1000,7", "8", true),
        (0o666, "1000", "8", false),
    ] {
        root.set(closed, (7, 7), mode);
        let mounted = mount(limited(users, groups), "/closed/open/below");
        assert_eq!(mounted.is_ok(), may, "{mode:o} {users} {groups}: {mounted:?}");
    }
}

#[test]
fn a_certificate_names_the_users_it_may_act_as() {
    let listening = Listening::new(78);
    let dir = Root(&listening.world.fs).dir(ROOT, "open", (0, 0), 0o777);
    let ids = |text: &str| text.parse().unwrap();
    for (name, users, groups, allowed) in [
        ("alice", "1000", "1000", true),
        ("bob", "1001-1999", "1000", false),
        ("carol", "1000", "1001", false),
        ("root", "0,1000", "0-9999", true),
    ] {
        let limits = Limits { users: ids(users), groups: ids(groups) };
        authority::issue(
            listening.dir.path(),
            name,
            &Terms { limits: Some(limits), exports: vec![] },
            authority::DAYS,
        )
        .unwrap();
        let client = listening.connect(name).unwrap();
        let daemon = Client { me: InProcess::default(), fs: Arc::clone(&client.fs) };
        assert_eq!(daemon.ino(ROOT, "open"), dir);
        assert_eq!(client.mkdir(dir, name).is_ok(), allowed, "{name}");
        let root = Client { me: InProcess { caller: 5, ..InProcess::default() }, fs: client.fs };
        assert_eq!(root.mkdir(dir, "root's").is_ok(), name == "root", "{name}");
    }
    // Without limits, as ever.
    authority::issue(listening.dir.path(), "anybody", &Terms::default(), authority::DAYS).unwrap();
    let client = listening.connect("anybody").unwrap();
    assert!(Client { me: InProcess::default(), fs: client.fs }.mkdir(ROOT, "top").is_ok());
}

#[test]
fn a_revoked_certificate_is_refused() {
    let listening = Listening::new(79);
    let at = listening.dir.path();
    for name in ["laptop", "other"] {
        authority::issue(at, name, &Terms::default(), authority::DAYS).unwrap();
    }
    let (laptop, other) =
        (listening.connect("laptop").unwrap(), listening.connect("other").unwrap());
    laptop.create(ROOT, "f").unwrap();
    assert!(authority::revoke(at, "nobody").is_err());
    assert_eq!(authority::revoke(at, "laptop").unwrap(), 1);
    assert_eq!(authority::revoke(at, "laptop").unwrap(), 0, "already");
    let refused = listening.connect("laptop").err().unwrap().to_string();
    assert!(refused.contains("certificate (laptop) was revoked"), "{refused}");
    assert!(refused.contains("move DIR/laptop away or remove it"), "{refused}");
    // Its session ends, and the connector that had connected before is refused.
    while laptop.sync().is_ok() {
        std::thread::yield_now();
    }
    assert_eq!(laptop.create(ROOT, "late").map(drop), Err(Errno(libc::EIO)));
    let control = listening.world.server().control();
    while control.clients().as_array().unwrap().len() > 1 {
        std::thread::yield_now();
    }
    drop(laptop);
    assert!(other.create(ROOT, "h").is_ok());
    assert!(listening.connect("other").is_ok());
    // Another one of the same name is another certificate. The old one stays revoked though its
    // directory is removed.
    std::fs::rename(at.join("laptop"), at.join("old")).unwrap();
    authority::issue(at, "laptop", &Terms::default(), authority::DAYS).unwrap();
    assert!(listening.connect("laptop").is_ok());
    assert!(listening.connect("old").is_err());
    // Both are known by name, wherever their files are.
    std::fs::rename(at.join("laptop"), at.join("new")).unwrap();
    assert_eq!(authority::revoke(at, "laptop").unwrap(), 1);
    assert!(listening.connect("new").is_err());
    // If the list cannot be read, every client is refused.
    std::fs::write(at.join("revoked"), [0xff, 0xfe]).unwrap();
    assert!(listening.connect("other").is_err());
}

#[test]
fn a_resumed_tls_session_is_checked_for_revocation_again() {
    let listening = Listening::new(80);
    let at = listening.dir.path();
    authority::issue(at, "laptop", &Terms::default(), authority::DAYS).unwrap();
    let tls = ClientTls::load(&at.join("laptop")).unwrap();
    let address = Address::of_host("localhost", Some(listening.port), "/");
    let connector = TcpConnector::new(address, Some(tls));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // What the server answers to this client, which greets when the handshake is over and `then`
    // has been done.
    let word = |then: &dyn Fn()| {
        runtime.block_on(async {
            let mut stream = connector.connect().await.unwrap();
            then();
            stream.write_all(&crate::frame::encode(&super::boundaries::hello(b"/"))).await.unwrap();
            read::<ToClient>(&mut stream).await.unwrap()
        })
    };
    assert!(matches!(word(&|| {}), Some(ToClient::Welcome { .. })));
    // Also one that had made its connection before.
    let revoked = word(&|| assert_eq!(authority::revoke(at, "laptop").unwrap(), 1));
    for said in [revoked, word(&|| {})] {
        let Some(ToClient::Refused { reason }) = said else { panic!("{said:?}") };
        assert!(String::from_utf8_lossy(&reason).contains("was revoked"));
    }
}
