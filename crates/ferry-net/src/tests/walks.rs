//! Somebody goes through a tree that another client has made: what is asked for ahead, and that
//! nobody else is the worse for it.

use ferry_env::Clock;

use super::boundaries::Raw;
use super::certificates::limited;
use super::*;
use crate::codec::List;
use crate::limits::Peer;
use crate::message::*;

/// A clock that stands still until it is set: what was done at one time is in use, until it is
/// later.
#[derive(Default)]
struct Hand(Mutex<Duration>);

impl Clock for Hand {
    fn monotonic(&self) -> Duration {
        *self.0.lock()
    }
    fn wall(&self) -> Duration {
        *self.0.lock()
    }
}

impl Hand {
    fn later(&self) {
        *self.0.lock() += Duration::from_secs(2);
    }
}

fn world(seed: u64) -> (World, Arc<Hand>) {
    let hand = Arc::new(Hand::default());
    *hand.0.lock() = Duration::from_secs(100);
    let env = Env { clock: hand.clone(), ..Env::real() };
    let world = World::serving(seed, server_options(), env);
    world.net.messages.cut_at.store(u64::MAX, Ordering::SeqCst);
    (world, hand)
}

impl Client {
    /// The same mount, another program.
    fn program(&self, caller: u32) -> Client {
        Client { fs: Arc::clone(&self.fs), me: InProcess { caller, ..InProcess::default() } }
    }

    /// Nothing that was asked for ahead is still to come.
    fn has_come(&self) {
        while self.fs.connection()["unanswered_requests"].as_u64().unwrap() > 0 {
            std::thread::yield_now();
        }
    }

    fn walks(&self) -> (u64, u64) {
        (self.figures("client_cache", "walks"), self.figures("client_cache", "walked"))
    }

    fn rmdir_(&self, dir: Ino, name: &str) -> Done {
        self.me.call(|cx| self.fs.rmdir(cx, dir, name.as_bytes()))
    }

    /// Directories with files: `dirs` below `top`, with `files` in each.
    fn make_tree(&self, top: &str, dirs: u32, files: u32) -> Ino {
        let root = self.mkdir(ROOT, top).unwrap();
        for d in 0..dirs {
            let dir = self.mkdir(root, &format!("d{d:03}")).unwrap();
            for f in 0..files {
                let (ino, fh) = self.create(dir, &format!("f{f}")).unwrap();
                self.write(ino, fh, 0, b"contents").unwrap();
                self.close(ino, fh);
            }
        }
        self.sync().unwrap();
        root
    }

    /// As `rm -r` does.
    fn remove_tree(&self, parent: Ino, name: &str, each: &mut impl FnMut()) -> Done {
        let Some(attr) = self.lookup(parent, name)? else { return Err(Errno(libc::ENOENT)) };
        if attr.mode & libc::S_IFMT != libc::S_IFDIR {
            return self.unlink(parent, name);
        }
        for inside in self.list(attr.ino)? {
            self.remove_tree(attr.ino, &inside, each)?;
        }
        each();
        self.rmdir_(parent, name)
    }

    /// As `find` does; gives how many names there are, and calls `each` behind each directory.
    /// `looks`: as `ls -lR`.
    fn find(&self, dir: Ino, looks: bool, each: &mut impl FnMut(&[String])) -> Done<usize> {
        let names = self.list(dir)?;
        each(&names);
        let mut count = names.len();
        for name in &names {
            if name.starts_with('d') || looks {
                let Some(attr) = self.lookup(dir, name)? else { return Err(Errno(libc::ENOENT)) };
                if attr.mode & libc::S_IFMT == libc::S_IFDIR {
                    count += self.find(attr.ino, looks, each)?;
                }
            }
        }
        Ok(count)
    }
}

#[test]
fn a_walk_of_another_clients_tree_requests_many_directories_at_once() {
    for looks in [false, true] {
        let (world, hand) = world(700);
        let (a, b) = (world.client(), world.client().program(7));
        a.make_tree("t", 60, 4);
        hand.later();
        let top = b.ino(ROOT, "t");
        let mut listed = 0;
        let mut requests = 0;
        let found = b.find(top, looks, &mut |_| {
            listed += 1;
            b.has_come();
            // From here on everything is known; in the directory that was listed when the walk
            // began perhaps not.
            if listed == 4 {
                requests = world.net.messages.requests.load(Ordering::SeqCst);
            }
        });
        assert_eq!(found, Ok(60 + 60 * 4));
        let asked = world.net.messages.requests.load(Ordering::SeqCst) - requests;
        let (walks, walked) = b.walks();
        assert!(walks >= 1 && walked >= 56, "{walks} walks, {walked} inodes");
        assert!(asked <= 4, "{asked} requests for 56 directories");
        let again = world.net.messages.requests.load(Ordering::SeqCst);
        assert_eq!(b.find(top, looks, &mut |_| {}), Ok(60 + 60 * 4));
        assert!(
            world.net.messages.requests.load(Ordering::SeqCst) - again <= 20,
            "what was not walked"
        );
    }
}

#[test]
fn removing_another_clients_tree_does_not_request_each_file() {
    let (world, hand) = world(701);
    let (a, b) = (world.client(), world.client().program(7));
    a.make_tree("t", 60, 4);
    hand.later();
    let (mut removed, mut requests) = (0, 0);
    let done = b.remove_tree(ROOT, "t", &mut || {
        removed += 1;
        b.has_come();
        if removed == 4 {
            requests = world.net.messages.requests.load(Ordering::SeqCst);
        }
    });
    assert_eq!(done, Ok(()));
    let asked = world.net.messages.requests.load(Ordering::SeqCst) - requests;
    assert!(asked <= 20, "{asked} requests for 57 directories and 228 files");
    assert_eq!(a.lookup(ROOT, "t"), Ok(None));
    assert_eq!(b.sync(), Ok(()));
    assert_eq!(b.figures("connection", "lost_changes"), 0);
}

#[test]
fn listing_one_directory_requests_nothing_else() {
    let (world, hand) = world(702);
    let (a, b) = (world.client(), world.client());
    let top = a.make_tree("t", 5, 3);
    hand.later();
    assert_eq!(b.ino(ROOT, "t"), top);
    for program in 1..5 {
        assert_eq!(b.program(program).list(top).unwrap().len(), 5);
    }
    // Nor does listing directories that have nothing to do with each other.
    let dirs: Vec<Ino> = (0..5).map(|d| b.ino(top, &format!("d{d:03}"))).collect();
    dirs.iter().for_each(|dir| assert_eq!(b.program(9).list(*dir).unwrap().len(), 3));
    assert_eq!(b.walks(), (0, 0));
}

#[test]
fn a_walk_recalls_nothing_beyond_its_position_from_a_busy_holder() {
    let (world, hand) = world(703);
    let (a, b) = (world.client(), world.client().program(7));
    let top = a.make_tree("t", 20, 3);
    let before = a.figures("client_cache", "recalled");
    assert_eq!(b.ino(ROOT, "t"), top);
    let mut listed = 0;
    let mut one = |_: &[String]| {
        listed += 1;
        b.has_come();
        let walks = b.figures("client_cache", "walks");
        // The first directories make the walk; each of them was asked for itself, and so was the
        // root of the mount.
        let recalled = a.figures("client_cache", "recalled") - before;
        assert!(recalled <= listed + 2, "{recalled} recalled for {listed} directories");
        assert!(walks > 0 || listed < 3);
    };
    assert_eq!(b.find(top, false, &mut one), Ok(20 + 60));
    assert_eq!(b.walks().1, 0, "all of it was in use");
    // When nobody works there any more it is another thing.
    hand.later();
    b.program(8).find(top, true, &mut |_| b.has_come()).unwrap();
    assert!(b.walks().1 > 40, "{:?}", b.walks());
}

#[test]
fn a_silent_holder_does_not_delay_a_walk() {
    let (world, hand) = world(704);
    let b = world.client().program(7);
    let top = b.make_tree("t", 6, 2);
    b.fs.close();
    world.until_nobody_is_there();
    drop(b);
    let b = world.client().program(7);
    let mut raw = Raw::greeted(&world);
    let ino = |parent: Ino, name: &str, raw: &mut Raw| match raw
        .ask(Op::Lookup { parent, name: name.into() })
    {
        Outcome::Entry { known: Some(known) } => known.attr.ino,
        other => panic!("{other:?}"),
    };
    assert_eq!(ino(ROOT, "t", &mut raw), top);
    let held: Vec<Ino> = (3..6).map(|d| ino(top, &format!("d{d:03}"), &mut raw)).collect();
    match raw.ask(Op::Lease { inodes: List(held.clone()) }) {
        Outcome::Leases { held: granted } => assert_eq!(granted.0.len(), held.len()),
        other => panic!("{other:?}"),
    }
    hand.later();
    assert_eq!(b.ino(ROOT, "t"), top);
    for dir in ["d000", "d001"] {
        if dir == "d000" {
            assert_eq!(b.list(top).unwrap().len(), 6);
        }
        let ino = b.ino(top, dir);
        assert_eq!(b.list(ino).unwrap().len(), 2);
    }
    b.has_come();
    let (walks, walked) = b.walks();
    assert!(walks > 0 && walked > 0);
    let mut recalled = Vec::new();
    while recalled.len() < held.len() {
        match raw.hear() {
            Some(ToClient::Recall { inodes }) => recalled.extend(inodes.0),
            other => panic!("{other:?}"),
        }
    }
    recalled.sort_unstable();
    assert_eq!(recalled, held, "each once, and together");
    // A program that needs one waits until it is returned.
    raw.send(&ToServer::Returned { inodes: List(held), after: 0 });
    let ino = b.ino(top, "d004");
    assert_eq!(b.list(ino).unwrap().len(), 2);
}

/// The directories themselves.
fn dir_names(dirs: &[Ino]) -> List<DirName> {
    List(dirs.iter().map(|dir| DirName { parent: *dir, name: b".".to_vec() }).collect())
}

fn walk(raw: &mut Raw, dirs: &[Ino], purpose: Purpose) -> Outcome {
    raw.ask(Op::Walk { dirs: dir_names(dirs), purpose })
}

fn seen(outcome: Outcome) -> (Vec<Seen>, Vec<Listed>, Vec<u32>) {
    match outcome {
        Outcome::Walked { inodes, dirs, rest, .. } => (inodes.0, dirs.0, rest.0),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_walk_reveals_nothing_outside_the_export() {
    let mut options = server_options();
    options.exports = vec![
        Export { path: b"/t".to_vec(), read_only: false },
        Export { path: b"/r".to_vec(), read_only: true },
    ];
    let world = World::with(705, options);
    let make = |dir: Ino, name: &str, mode: u32| {
        let me = InProcess::default();
        me.call(|cx| world.fs.mkdir(cx, dir, name.as_bytes(), mode)).unwrap().attr.unwrap().ino
    };
    let (top, read_only, secret) =
        (make(ROOT, "t", 0o755), make(ROOT, "r", 0o755), make(ROOT, "secret", 0o755));
    let (open, closed) = (make(top, "open", 0o755), make(top, "closed", 0o700));
    let (in_open, in_closed) = (make(open, "a", 0o755), make(closed, "b", 0o755));
    make(read_only, "c", 0o755);

    let mut raw = Raw::at(&world, Peer::default(), b"/t");
    let (inodes, dirs, rest) =
        seen(walk(&mut raw, &[secret, open, 0, u64::MAX], Purpose::Remove {}));
    assert!(inodes.is_empty() && dirs.is_empty() && rest.is_empty(), "nothing was named before");
    let (inodes, dirs, _) = seen(walk(&mut raw, &[ROOT, ROOT], Purpose::Remove {}));
    let mut told: Vec<Ino> = inodes.iter().map(|seen| seen.known.attr.ino).collect();
    told.sort_unstable();
    let mut all = vec![ROOT, open, closed, in_open, in_closed];
    all.sort_unstable();
    assert_eq!(told, all, "each once");
    assert!(inodes.iter().all(|seen| seen.writes && seen.plain));
    let root = dirs.iter().find(|dir| dir.ino == ROOT).expect("it was listed");
    let dots: Vec<Ino> = root
        .names
        .0
        .iter()
        .filter(|name| name.name.starts_with(b"."))
        .map(|name| name.ino)
        .collect();
    assert_eq!(dots, [ROOT, ROOT], "what is above is the root itself");
    for name in ["..", "", "no", "a/b"] {
        let dirs = List(vec![DirName { parent: ROOT, name: name.into() }]);
        let (inodes, ..) = seen(raw.ask(Op::Walk { dirs, purpose: Purpose::List {} }));
        assert!(inodes.is_empty(), "{name}");
    }
    assert_eq!(
        walk(&mut raw, &[ROOT; WALK_DIRS_MAX + 1], Purpose::List {}),
        Outcome::Failed { errno: libc::EINVAL }
    );

    let mut reader = Raw::at(&world, Peer::default(), b"/r");
    let (inodes, ..) = seen(walk(&mut reader, &[ROOT], Purpose::Remove {}));
    assert!(inodes.len() == 2 && inodes.iter().all(|seen| !seen.writes));

    for mut done in [raw, reader] {
        done.send(&ToServer::Bye {});
        assert_eq!(done.hear(), None);
    }
    let mut raw = Raw::at(&world, limited("1000", "1000"), b"/t");
    let op = Op::Walk { dirs: dir_names(&[ROOT]), purpose: Purpose::Remove {} };
    let alice = Caller { uid: 1000, gid: 1000, pid: 77, umask: 0 };
    let (inodes, dirs, _) = seen(raw.ask_as(alice, op.clone()));
    assert!(inodes.iter().all(|seen| !seen.writes && seen.known.attr.ino != in_closed));
    let listed: Vec<Ino> = dirs.iter().map(|dir| dir.ino).collect();
    assert!(listed.contains(&open) && !listed.contains(&closed), "{listed:?}");
    let (_, dirs, _) = seen(raw.ask_as(Caller { uid: 1001, ..alice }, op));
    assert!(dirs.is_empty(), "a user of somebody else's");
}

/// One that was asked for by an old name is brought for another reason, if it is there.
#[test]
fn a_walk_resolves_the_names_of_its_request() {
    let world = World::with(713, server_options());
    let me = InProcess::default();
    let make = |name: &[u8]| {
        me.call(|cx| world.fs.mkdir(cx, ROOT, name, 0o755)).unwrap().attr.unwrap().ino
    };
    let (b, moved) = (make(b"b"), make(b"x"));
    let flags = ferry_fs::RenameFlags::default();
    me.call(|cx| world.fs.rename(cx, ROOT, b"x", b, b"y", flags)).unwrap();
    let mut raw = Raw::at(&world, Peer::default(), b"/");
    let dirs = ["x", "b"].map(|name| DirName { parent: ROOT, name: name.into() });
    let outcome = raw.ask(Op::Walk { dirs: List(dirs.into()), purpose: Purpose::Look {} });
    let Outcome::Walked { inodes, found, .. } = outcome else { panic!("{outcome:?}") };
    let mut brought: Vec<Ino> = inodes.0.iter().map(|seen| seen.known.attr.ino).collect();
    brought.sort_unstable();
    let mut both = vec![b, moved];
    both.sort_unstable();
    assert_eq!(brought, both);
    assert_eq!(found.0, [Found { index: 1, ino: b }]);
}

#[test]
fn a_walk_answer_is_bounded_and_lists_what_is_left() {
    let (world, hand) = world(706);
    let a = world.client();
    let top = a.make_tree("t", 80, 20);
    let wide = a.mkdir(ROOT, "wide").unwrap();
    for f in 0..2500 {
        let name = format!("{f:040}");
        a.me.call(|cx| a.fs.mknod(cx, wide, name.as_bytes(), libc::S_IFREG | 0o644, 0)).unwrap();
    }
    a.fs.close();
    world.until_nobody_is_there();
    hand.later();
    let mut raw = Raw::greeted(&world);
    // A walk waits for nobody's leases to end on what it begins with.
    let first = raw.ask(Op::Lookup { parent: ROOT, name: b"t".to_vec() });
    assert!(matches!(first, Outcome::Entry { known: Some(_) }));
    let (inodes, dirs, rest) = seen(walk(&mut raw, &[ROOT], Purpose::Look {}));
    assert!(rest.is_empty() && dirs.iter().all(|dir| dir.ino != wide), "too long for any answer");
    assert!(inodes.len() > WALK_ENTRIES / 2);
    let mut left: Vec<Ino> = (0..80)
        .map(|d| match raw.ask(Op::Lookup { parent: top, name: format!("d{d:03}").into() }) {
            Outcome::Entry { known: Some(known) } => known.attr.ino,
            other => panic!("{other:?}"),
        })
        .collect();
    let (mut answers, mut found) = (0, 0);
    while !left.is_empty() {
        let (now, later) = left.split_at(left.len().min(WALK_DIRS_MAX));
        let (_, dirs, rest) = seen(walk(&mut raw, now, Purpose::Look {}));
        let rest: Vec<Ino> = rest.iter().map(|at| now[*at as usize]).collect();
        assert!(!dirs.is_empty());
        found += dirs.iter().map(|dir| dir.names.0.len() - 2).sum::<usize>();
        answers += 1;
        left = [&rest[..], later].concat();
    }
    assert!(found == 80 * 20 && (3..=8).contains(&answers), "{found} in {answers}");
}

/// Three clients, one operation after the other, on a network that cuts: each walk sees what is
/// there.
fn one_order(seed: u64) {
    const DIRS: u64 = 6;
    let world = World::new(seed);
    let clients = [world.client(), world.client(), world.client()];
    let top = clients[0].mkdir(ROOT, "t").unwrap();
    let below = |n| world.net.random.below(n);
    let mut tree =
        std::collections::BTreeMap::<u64, (Ino, std::collections::BTreeMap<u64, Ino>)>::new();
    world.net.cut_below.store(40_000, Ordering::Relaxed);
    for step in 0..400 {
        if step % 100 == 50 {
            world.net.cut_all();
        }
        let which = below(3) as usize;
        let client = &clients[which];
        let (d, f) = (below(DIRS), below(4));
        let (dir_name, name) = (format!("d{d}"), format!("f{f}"));
        let at = format!("seed {seed}, step {step}, client {which}, {dir_name}/{name}");
        assert_eq!(client.ino(ROOT, "t"), top, "{at}");
        let dir = client.lookup(top, &dir_name).expect(&at).map(|attr| attr.ino);
        assert_eq!(dir, tree.get(&d).map(|(ino, _)| *ino), "{at}");
        match (below(10), tree.get_mut(&d)) {
            (0..4, None) => {
                let ino = client.mkdir(top, &dir_name).expect(&at);
                tree.insert(d, (ino, Default::default()));
            }
            (0..4, Some((dir, files))) => match client.create(*dir, &name) {
                Ok((ino, fh)) => {
                    client.close(ino, fh);
                    assert_eq!(files.insert(f, ino), None, "{at}");
                }
                Err(error) => {
                    assert!(error == Errno(libc::EEXIST) && files.contains_key(&f), "{at}: {error}")
                }
            },
            (4, Some((dir, files))) => {
                let expected = files.remove(&f).map(drop).ok_or(Errno(libc::ENOENT));
                assert_eq!(client.unlink(*dir, &name), expected, "{at}");
            }
            (5, Some(_)) => {
                client.program(step).remove_tree(top, &dir_name, &mut || {}).expect(&at);
                tree.remove(&d);
            }
            (6..10, _) => {
                // One program walks again and again, others once.
                let program = client.program(if below(2) == 0 { 5 } else { 1000 + step });
                let mut found = std::collections::BTreeMap::new();
                for dir_name in program.list(top).expect(&at) {
                    let dir = program.ino(top, &dir_name);
                    let mut files = std::collections::BTreeMap::new();
                    for name in program.list(dir).expect(&at) {
                        let attr = program.lookup(dir, &name).expect(&at).expect(&at);
                        files.insert(name[1..].parse().unwrap(), attr.ino);
                    }
                    found.insert(dir_name[1..].parse().unwrap(), (dir, files));
                }
                assert_eq!(found, tree, "{at}");
                if below(12) == 0 {
                    program.remove_tree(ROOT, "t", &mut || {}).expect(&at);
                    tree.clear();
                    assert_eq!(clients[(which + 1) % 3].lookup(ROOT, "t"), Ok(None), "{at}");
                    return one_order_ends(&clients);
                }
            }
            _ => {}
        }
    }
    one_order_ends(&clients);
}

fn one_order_ends(clients: &[Client]) {
    for client in clients {
        assert_eq!(client.sync(), Ok(()));
        assert_eq!(client.figures("connection", "lost_changes"), 0);
    }
}

#[test]
fn a_walk_beside_other_clients_sees_the_current_state() {
    (710..716).for_each(one_order);
}

#[derive(Clone, Copy, PartialEq)]
enum Ends {
    Connection,
    Server,
}

/// One client removes a tree of another; the connection or the server ends at a message. Whether it
/// came to that.
fn ends_at(message: u64, ends: Ends) -> bool {
    let world = World::new(800 + message);
    let a = world.client();
    a.make_tree("t", 4, 1);
    a.fs.close();
    world.until_nobody_is_there();
    world.net.messages.cut_at.store(message, Ordering::SeqCst);
    let at = format!("message {message}");
    let over = std::sync::atomic::AtomicBool::new(false);
    let mut cuts = world.net.cuts.subscribe();
    std::thread::scope(|scope| {
        let (world, over) = (&world, &over);
        let crashing = (ends == Ends::Server).then(|| {
            scope.spawn(move || {
                let _cut = world.net.runtime.block_on(cuts.changed());
                if !over.load(Ordering::SeqCst) {
                    drop(world.take_server());
                    world.start();
                }
            })
        });
        let client = loop {
            match world.mount("/") {
                Ok(client) => break client.program(7),
                Err(error) => assert!(matches!(error, NetError::Reach { .. }), "{at}: {error}"),
            }
        };
        loop {
            let is_removed = match client.remove_tree(ROOT, "t", &mut || {}) {
                Ok(()) | Err(Errno(libc::ENOENT)) => {
                    client.lookup(ROOT, "t").is_ok_and(|found| found.is_none())
                }
                Err(error) => {
                    assert!(ends == Ends::Server, "{at}: {error}");
                    assert!(
                        matches!(error, Errno(libc::EIO | libc::ESTALE | libc::ENOTEMPTY)),
                        "{at}: {error}"
                    );
                    false
                }
            };
            let synced = client.sync();
            assert!(synced.is_ok() || ends == Ends::Server, "{at}: {synced:?}");
            if is_removed && synced.is_ok() {
                break;
            }
        }
        if world.net.messages.so_far.load(Ordering::SeqCst) < message {
            over.store(true, Ordering::SeqCst);
            world.net.cut_all();
        }
        if let Some(crashing) = crashing {
            crashing.join().unwrap();
        }
        client.fs.close();
    });
    let found = InProcess::default().call(|cx| world.fs.lookup(cx, ROOT, b"t")).unwrap();
    assert!(found.attr.is_none(), "{at}: it was removed");
    world.net.messages.so_far.load(Ordering::SeqCst) >= message
}

#[test]
fn programs_do_not_notice_a_connection_that_closes_during_a_walk() {
    let reached = (1..).take_while(|message| ends_at(*message, Ends::Connection)).count();
    assert!(reached > 20, "{reached}");
}

#[test]
fn a_server_crash_during_a_walk_leaves_no_partial_listing() {
    let reached = (1..).take_while(|message| ends_at(*message, Ends::Server)).count();
    assert!(reached > 20, "{reached}");
}
