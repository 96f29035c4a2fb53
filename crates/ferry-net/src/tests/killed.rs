//! The process of a client is killed, and another one goes on with its mount from what it had
//! noted.

use std::sync::mpsc::{Receiver, channel};

use super::replay::Crashing;
use super::*;
use crate::{Noted, Notes};
use ferry_fs::RequestId;
use ferry_fs::inprocess::FromReply;

const EAGAIN: Errno = Errno(libc::EAGAIN);

/// A client whose process may be killed.
struct Mortal {
    client: Client,
    notes: Arc<Notes>,
}

impl Mortal {
    fn mount(world: &World, asynchronous: bool) -> Self {
        let notes = Notes::new().unwrap();
        let of = Some(Arc::clone(&notes));
        let options = ClientOptions { asynchronous, notes: of, ..world.client_options("/") };
        Self { client: world.mount_with(options).unwrap(), notes }
    }

    /// Nothing of it does anything any more.
    fn killed(self) -> Noted {
        self.client.fs.kill();
        let noted = Notes::left(self.notes.file().unwrap()).expect("all is noted");
        // It says no goodbye.
        std::mem::forget(self.client);
        noted
    }

    /// The next process. Its kernel has not asked for anything again.
    fn next(world: &World, noted: Noted) -> Self {
        let notes = Notes::new().unwrap();
        let of = Some(Arc::clone(&notes));
        let options = ClientOptions { notes: of, ..world.client_options("/") };
        let fs = RemoteFs::go_on_left(world.net.clone(), options, noted, &Env::real()).unwrap();
        fs.attach(Arc::new(Forgets::default()));
        Self { client: Client { fs, me: InProcess::default() }, notes }
    }

    /// It is killed, and the next process has no request of the kernel to begin again.
    fn goes_on(self, world: &World) -> Self {
        let next = Self::next(world, self.killed());
        next.client.fs.goes_on();
        next
    }
}

/// A request with the transport's number.
struct Asked {
    number: u64,
    tell: Mutex<Option<std::sync::mpsc::Sender<Result<Reply, Errno>>>>,
}

impl Park for Asked {
    fn park(&self, _interrupt: Option<Interrupt>) -> Complete {
        let tell = self.tell.lock().take().expect("a request parks once");
        Box::new(move |answer| drop(tell.send(answer)))
    }

    fn request(&self) -> Option<RequestId> {
        Some(RequestId { slot: 0, unique: self.number })
    }
}

/// The answer to a request, when it is there.
struct Told(Receiver<Result<Reply, Errno>>);

impl Told {
    fn is_there(&self) -> bool {
        // Nobody looks again.
        self.0.try_recv().is_ok()
    }

    fn wait<T: FromReply>(self) -> Done<T> {
        Ok(T::from_reply(self.0.recv().unwrap()?).unwrap())
    }

    fn made(self) -> (Ino, u64) {
        let (entry, opened): (Entry, Opened) = self.wait().unwrap();
        (entry.attr.unwrap().ino, opened.fh)
    }
}

/// Begins a request.
fn begin<T: Into<Reply>>(number: u64, request: impl FnOnce(&Cx) -> Answer<T>) -> Told {
    let (tell, told) = channel();
    let park = Asked { number, tell: Mutex::new(Some(tell.clone())) };
    match request(&Cx { uid: 0, gid: 0, pid: 1, umask: 0, park: &park }) {
        Ok(answer) => tell.send(Ok(answer.into())).unwrap(),
        Err(Stop::Errno(errno)) => tell.send(Err(errno)).unwrap(),
        Err(Stop::Parked) => {}
    }
    Told(told)
}

const CREATES: i32 = libc::O_RDWR | libc::O_EXCL | libc::O_CREAT;

#[test]
fn a_client_that_is_killed_goes_on_with_all_that_it_was_told() {
    let world = World::new(950);
    let (mut mortal, other) = (Mortal::mount(&world, true), world.client());
    let client = &mortal.client;
    let (ino, fh) = client.create(ROOT, "file").unwrap();
    let dir = client.mkdir(ROOT, "dir").unwrap();
    let (removed, removed_fh) = client.create(dir, "removed").unwrap();
    client.write(removed, removed_fh, 0, b"contents").unwrap();
    client.unlink(dir, "removed").unwrap();
    client.lock(ino, fh, 7, libc::F_WRLCK, false).unwrap();
    let mut expected = Vec::new();
    for turn in 0..20_u8 {
        let client = &mortal.client;
        // They are acknowledged, and wait for company: most were not sent.
        client.append(ino, fh, &[turn; 100]).unwrap();
        expected.extend([turn; 100]);
        for number in 0..5 {
            client.mkdir(dir, &format!("{turn}-{number}")).unwrap();
        }
        client.rename(dir, &format!("{turn}-0"), &format!("moved-{turn}")).unwrap();
        mortal = mortal.goes_on(&world);
        let client = &mortal.client;
        let theirs = other.open(other.ino(ROOT, "file")).unwrap();
        assert_eq!(other.lock(ino, theirs, 1, libc::F_WRLCK, false), Err(EAGAIN), "it is held");
        assert_eq!(client.read(ino, fh, 1 << 20).unwrap(), expected);
        assert_eq!(other.read(ino, theirs, 1 << 20).unwrap(), expected);
        assert_eq!(client.read(removed, removed_fh, 100).unwrap(), b"contents");
        assert_eq!(client.list(dir).unwrap().len(), 5 * (usize::from(turn) + 1));
        other.close(ino, theirs);
    }
    let client = &mortal.client;
    client.lock(ino, fh, 7, libc::F_UNLCK, false).unwrap();
    client.close(ino, fh);
    client.close(removed, removed_fh);
    client.sync().unwrap();
    // Behind what it has closed.
    other.sync().unwrap();
    assert_eq!(world.figure("open_files"), 0, "the server knew each open file");
    assert_eq!(world.figure("locks"), 0);
    assert_eq!(client.fs.figures()["connection"]["lost_changes"], 0);
}

#[test]
fn a_request_that_had_come_to_a_change_is_not_applied_twice() {
    let world = World::new(951);
    let mortal = Mortal::mount(&world, false);
    let client = &mortal.client;
    client.create(ROOT, "removed").unwrap();
    let before = client.create(ROOT, "file").unwrap();
    world.net.silence_server();
    let other = world.client();
    let fs = &client.fs;
    let unlinks = begin(21, |cx| fs.unlink(cx, ROOT, b"removed"));
    let creates = begin(22, |cx| fs.create(cx, ROOT, b"new", 0o644, CREATES));
    let nobodys = begin(23, |cx| fs.create(cx, ROOT, b"nobody's", 0o644, CREATES));
    while other.lookup(ROOT, "nobody's").unwrap().is_none() {
        std::thread::yield_now();
    }
    assert!(![unlinks, creates, nobodys].iter().any(Told::is_there));
    let noted = mortal.killed();
    let next = Mortal::next(&world, noted);
    let fs = &next.client.fs;
    // Without the number: it would find nothing to remove, and a file where it makes one.
    let unlinks = begin(21, |cx| fs.unlink(cx, ROOT, b"removed"));
    let creates = begin(22, |cx| fs.create(cx, ROOT, b"new", 0o644, CREATES));
    fs.goes_on();
    assert_eq!(unlinks.wait(), Ok(()));
    let (ino, fh) = creates.made();
    assert_ne!(fh, before.1);
    next.client.write(ino, fh, 0, b"it is open").unwrap();
    assert_eq!(next.client.read(ino, fh, 100).unwrap(), b"it is open");
    assert_eq!(next.client.unlink(ROOT, "removed"), Err(Errno(libc::ENOENT)));
    next.client.sync().unwrap();
    assert_eq!(world.figure("open_files"), 3, "nobody waits for the fourth");
}

#[test]
fn an_answer_that_the_kernel_had_not_got_is_given_by_the_next_process() {
    let world = World::new(952);
    for asynchronous in [false, true] {
        let mortal = Mortal::mount(&world, asynchronous);
        let fs = Arc::clone(&mortal.client.fs);
        let name = format!("{asynchronous}");
        let (_, first) = mortal.client.create(ROOT, &format!("{name} first")).unwrap();
        let creates = begin(31, |cx| fs.create(cx, ROOT, name.as_bytes(), 0o644, CREATES));
        let (ino, fh) = creates.made();
        let writes = begin(32, |cx| fs.write(cx, ino, fh, 0, b"once", true, false));
        assert_eq!(writes.wait(), Ok(4_u64));
        drop(fs);
        // The kernel has heard of neither, or of both: it asks again.
        let mut mortal = mortal;
        for _ in 0..3 {
            let next = Mortal::next(&world, mortal.killed());
            let fs = &next.client.fs;
            let creates = begin(31, |cx| fs.create(cx, ROOT, name.as_bytes(), 0o644, CREATES));
            let writes = begin(32, |cx| fs.write(cx, ino, fh, 0, b"once", true, false));
            fs.goes_on();
            assert_eq!(creates.made(), (ino, fh));
            assert_eq!(writes.wait(), Ok(4_u64));
            assert_eq!(next.client.read(ino, fh, 100).unwrap(), b"once");
            mortal = next;
        }
        let other = mortal.client.create(ROOT, &format!("{name} other")).unwrap();
        assert!(other.1 != fh && other.1 != first, "a number is given once");
        mortal.client.fs.close();
    }
}

#[test]
fn a_client_that_is_killed_while_the_server_is_away_waits_for_it() {
    let mut world = World::new(953);
    world.options.grace = Duration::from_secs(1);
    let mortal = Mortal::mount(&world, true);
    let client = &mortal.client;
    let (ino, fh) = client.create(ROOT, "file").unwrap();
    client.lock(ino, fh, 7, libc::F_WRLCK, false).unwrap();
    client.append(ino, fh, b"before ").unwrap();
    world.stop();
    let next = Mortal::next(&world, mortal.killed());
    next.client.fs.goes_on();
    let next = next.goes_on(&world);
    let fs = Arc::clone(&next.client.fs);
    let appends = begin(41, |cx| fs.write(cx, ino, fh, 0, b"after", true, false));
    world.reopen();
    world.start();
    assert_eq!(appends.wait(), Ok(5_u64));
    assert_eq!(next.client.read(ino, fh, 100).unwrap(), b"before after");
    let other = world.client();
    let theirs = other.open(other.ino(ROOT, "file")).unwrap();
    assert_eq!(other.lock(ino, theirs, 1, libc::F_WRLCK, false), Err(EAGAIN), "it was reclaimed");
}

/// The server and the client are killed, and others go on.
fn both_killed(crashing: &mut Crashing, mortal: Mortal, server_first: bool) -> Mortal {
    let noted = if server_first {
        crashing.crash();
        mortal.killed()
    } else {
        let noted = mortal.killed();
        crashing.crash();
        noted
    };
    crashing.world.start();
    let next = Mortal::next(&crashing.world, noted);
    next.client.fs.goes_on();
    next
}

/// The client and the server are killed, in one order or the other.
#[test]
fn what_both_have_lost_is_told_to_who_has_it_open() {
    for server_first in [true, false] {
        let mut crashing = Crashing::new(954);
        crashing.world.start();
        let mortal = Mortal::mount(&crashing.world, true);
        let client = &mortal.client;
        let (ino, fh) = client.create(ROOT, "durable").unwrap();
        client.write(ino, fh, 0, b"durable").unwrap();
        client.fsync(ino, fh).unwrap();
        client.sync().unwrap();
        crashing.hold();
        let (lost, lost_fh) = client.create(ROOT, "lost").unwrap();
        client.write(lost, lost_fh, 0, b"not durable").unwrap();
        // The server has both.
        until_answered(client);
        let next = both_killed(&mut crashing, mortal, server_first);
        let client = &next.client;
        assert_eq!(client.read(ino, fh, 100).unwrap(), b"durable", "{server_first}");
        let synced = client.fsync(lost, lost_fh);
        let is_there = client.lookup(ROOT, "lost").unwrap().is_some();
        assert!(synced == Err(Errno(libc::EIO)) || is_there, "{server_first}: {synced:?}");
        assert_eq!(client.sync(), Err(Errno(libc::EIO)), "a sync hears of it");
        assert_eq!(client.sync(), Ok(()), "once");
    }
}

/// Until the process knows that the connection is closed.
fn until_away(client: &Client) {
    while client.fs.figures()["connection"]["connected"] == true {
        std::thread::yield_now();
    }
}

fn until_answered(client: &Client) {
    while client.fs.figures()["connection"]["unanswered_changes"] != 0 {
        std::thread::yield_now();
    }
}

#[test]
fn nothing_is_lost_if_the_server_has_stopped_in_order_before_the_kill() {
    for asynchronous in [true, false] {
        let mut world = World::new(956);
        let mortal = Mortal::mount(&world, asynchronous);
        let client = &mortal.client;
        let dir = client.mkdir(ROOT, "dir").unwrap();
        let (ino, fh) = client.create(dir, "file").unwrap();
        client.write(ino, fh, 0, b"durable").unwrap();
        client.fsync(ino, fh).unwrap();
        let (other, other_fh) = client.create(ROOT, "not synced").unwrap();
        client.write(other, other_fh, 0, b"the server does that").unwrap();
        world.stop();
        until_away(client);
        // Another one is killed while it waits for the server.
        let next = Mortal::next(&world, mortal.killed());
        next.client.fs.goes_on();
        let next = next.goes_on(&world);
        world.reopen();
        world.start();
        let client = &next.client;
        assert_eq!(client.fsync(ino, fh), Ok(()), "{asynchronous}");
        assert_eq!(client.fsync(other, other_fh), Ok(()), "{asynchronous}");
        assert_eq!(client.append(ino, fh, b", and more"), Ok(10), "{asynchronous}");
        assert_eq!(client.sync(), Ok(()), "{asynchronous}");
        assert_eq!(client.read(ino, fh, 100).unwrap(), b"durable, and more");
        assert_eq!(client.read(other, other_fh, 100).unwrap(), b"the server does that");
        assert_eq!(client.fs.figures()["connection"]["lost_changes"], 0);
        client.fs.close();
    }
}

#[test]
fn a_change_that_waits_for_a_server_that_has_stopped_in_order_is_made_after_a_kill() {
    let mut world = World::new(957);
    let mortal = Mortal::mount(&world, true);
    let client = &mortal.client;
    let (ino, fh) = client.create(ROOT, "file").unwrap();
    client.write(ino, fh, 0, b"before ").unwrap();
    world.stop();
    until_away(client);
    let fs = Arc::clone(&client.fs);
    let appends = begin(51, |cx| fs.write(cx, ino, fh, 0, b"once", true, false));
    drop(fs);
    assert!(!appends.is_there());
    let mut mortal = mortal;
    for is_back in [false, true] {
        let next = Mortal::next(&world, mortal.killed());
        let fs = Arc::clone(&next.client.fs);
        let appends = begin(51, |cx| fs.write(cx, ino, fh, 0, b"once", true, false));
        fs.goes_on();
        if is_back {
            world.reopen();
            world.start();
            assert_eq!(appends.wait(), Ok(4_u64));
        }
        mortal = next;
    }
    let client = &mortal.client;
    assert_eq!(client.read(ino, fh, 100).unwrap(), b"before once");
    assert_eq!(client.sync(), Ok(()));
}

/// The client and the server are killed, in one order or the other. What was durable before stays,
/// and nobody hears of an error.
#[test]
fn nothing_is_lost_with_both_if_all_was_durable() {
    for (asynchronous, syncs_all, server_first) in
        [(true, true, true), (true, true, false), (true, false, true), (false, true, false)]
    {
        let case = (asynchronous, syncs_all, server_first);
        let mut crashing = Crashing::new(958);
        crashing.world.start();
        let mortal = Mortal::mount(&crashing.world, asynchronous);
        let client = &mortal.client;
        let (ino, fh) = client.create(ROOT, "durable").unwrap();
        client.write(ino, fh, 0, b"durable").unwrap();
        if syncs_all {
            client.sync().unwrap();
        } else {
            // It covers all that the client has changed.
            client.fsync(ino, fh).unwrap();
        }
        crashing.hold();
        // What is opened and closed is not to be made durable.
        let again = client.open(ino).unwrap();
        client.close(ino, client.open(ino).unwrap());
        until_answered(client);
        let next = both_killed(&mut crashing, mortal, server_first);
        let client = &next.client;
        assert_eq!(client.read(ino, fh, 100).unwrap(), b"durable", "{case:?}");
        assert_eq!(client.fsync(ino, fh), Ok(()), "{case:?}");
        assert_eq!(client.fsync(ino, again), Ok(()), "{case:?}");
        assert_eq!(client.sync(), Ok(()), "{case:?}");
        assert_eq!(client.fs.figures()["connection"]["lost_changes"], 0, "{case:?}");
    }
}

/// Behind a lost change come some that cannot be lost: they do not hide it.
#[test]
fn what_both_have_lost_is_told_whatever_came_behind_it() {
    for asynchronous in [true, false] {
        let mut crashing = Crashing::new(959);
        crashing.world.start();
        let mortal = Mortal::mount(&crashing.world, asynchronous);
        let client = &mortal.client;
        let (ino, fh) = client.create(ROOT, "file").unwrap();
        let (other, other_fh) = client.create(ROOT, "other").unwrap();
        client.write(ino, fh, 0, b"durable").unwrap();
        client.sync().unwrap();
        crashing.hold();
        client.write(ino, fh, 0, b"LOST").unwrap();
        for _ in 0..3 {
            client.close(other, client.open(other).unwrap());
        }
        until_answered(client);
        // The process in between has nothing that is not answered.
        let mortal = mortal.goes_on(&crashing.world);
        client_is_there(&mortal.client, other, other_fh);
        let next = both_killed(&mut crashing, mortal, false);
        let client = &next.client;
        assert_eq!(client.fsync(ino, fh), Err(Errno(libc::EIO)), "{asynchronous}");
        assert_eq!(client.sync(), Err(Errno(libc::EIO)), "{asynchronous}");
        assert_eq!(client.sync(), Ok(()), "{asynchronous}");
        client.fs.close();
    }
}

/// It has connected, and the server has answered it.
fn client_is_there(client: &Client, ino: Ino, fh: u64) {
    assert_eq!(client.read(ino, fh, 1).unwrap(), b"");
    client.close(ino, client.open(ino).unwrap());
    until_answered(client);
}

#[test]
fn a_listing_that_was_cut_off_by_a_kill_begins_anew() {
    let world = World::new(955);
    let mortal = Mortal::mount(&world, true);
    let client = &mortal.client;
    let list = |client: &Client, (dir, fh): (Ino, u64), cookie: u64, most: usize| {
        let mut names = Vec::new();
        let Any(answer) = client
            .me
            .call(|cx| {
                client.fs.readdir(cx, dir, fh, cookie, false, &mut |entry| {
                    names.push(entry.clone());
                    names.len() < most
                })?;
                Ok(Any(Reply::Empty))
            })
            .unwrap();
        if let Reply::Dir(entries) = answer { entries } else { names }
    };
    // Of the first ones the server decides.
    let dirs = (0..50).map(|turn| {
        let dir = client.mkdir(ROOT, &format!("dir{turn}")).unwrap();
        for number in 0..9 {
            client.mkdir(dir, &format!("{number}")).unwrap();
        }
        let open = || client.me.call(|cx| client.fs.opendir(cx, dir)).unwrap().fh;
        ((dir, open()), (dir, open()))
    });
    let (cut_off, ended) = dirs
        .into_iter()
        .find(|(cut_off, _)| list(client, *cut_off, 0, 4).len() == 4)
        .expect("a directory of which the client has the list");
    let all = list(client, ended, 0, 100);
    assert_eq!(all.len(), 11);
    let mortal = mortal.goes_on(&world).goes_on(&world);
    let client = &mortal.client;
    assert_eq!(list(client, ended, all[10].cookie, 100).len(), 0, "it had come to its end");
    let anew = list(client, cut_off, all[3].cookie, 100);
    assert_eq!(anew.len(), 11, "no name is missing");
    assert_eq!(list(client, cut_off, anew[10].cookie, 100).len(), 0);
}
