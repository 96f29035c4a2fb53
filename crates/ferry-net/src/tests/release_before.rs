//! A server that greets as release 0.1.0 does: so its clients speak protocol 8. And what such
//! clients and newer ones do on one volume.

use std::hash::Hasher;
use std::pin::Pin;
use std::task::{Context, Poll};

use siphasher::sip128::{Hasher128, SipHasher24};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::boundaries::Raw;
use super::replay::Crashing;
use super::*;
use crate::codec::List;
use crate::limits::Peer;
use crate::message::{Claim, Op, Outcome, ToClient, ToServer, WINDOW_OPS};

/// What release 0.1.0 says to a newer client.
const REFUSAL: &str =
    "the client speaks version 10 of the protocol, the server 8: install the same FerryFS on both";

/// A connection to a server whose greeting is that of release 0.1.0.
pub(super) struct Before<S> {
    stream: S,
    greeted: bool,
    /// What is left to read, if the client is refused.
    refusal: Option<Vec<u8>>,
}

impl<S> Before<S> {
    pub(super) fn new(stream: S) -> Self {
        Self { stream, greeted: false, refusal: None }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Before<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if !std::mem::replace(&mut self.greeted, true) {
            assert_eq!(bytes[4], 1, "a client begins with a whole greeting");
            if bytes[5..9] == 10_u32.to_le_bytes() {
                let refused = ToClient::Refused { reason: REFUSAL.into() };
                self.refusal = Some(crate::frame::encode(&refused));
            }
        }
        match self.refusal {
            Some(_) => Poll::Ready(Ok(bytes.len())),
            None => Pin::new(&mut self.stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Before<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Some(refusal) = &mut self.refusal else {
            return Pin::new(&mut self.stream).poll_read(cx, out);
        };
        let len = refusal.len().min(out.remaining());
        out.put_slice(&refusal.drain(..len).collect::<Vec<u8>>());
        Poll::Ready(Ok(()))
    }
}

impl World {
    /// Whether those who connect from now on find a server of release 0.1.0.
    fn set_before(&self, is_before: bool) {
        self.net.is_before.store(is_before, Ordering::SeqCst);
    }

    /// A client that speaks protocol 8.
    fn client_of_8(&self) -> Client {
        self.set_before(true);
        let client = self.client();
        super::claims::until("protocol 8", || client.fs.connection()["protocol"] == 8);
        self.set_before(false);
        client
    }

    /// The protocols of all clients, in the order of their arrival.
    fn protocols(&self) -> Vec<u64> {
        let clients = self.server().control().clients();
        let protocol = |client: &serde_json::Value| client["protocol"].as_u64().unwrap();
        clients.as_array().unwrap().iter().map(protocol).collect()
    }
}

const NAMES: usize = 40;

#[test]
fn clients_of_both_protocols_work_on_one_volume() {
    let world = World::new(880);
    let (before, newest) = (world.client_of_8(), world.client());
    assert_eq!(world.protocols(), [8, 10]);
    let dir = before.mkdir(ROOT, "dir").unwrap();
    for n in 0..NAMES {
        let (maker, other) = if n % 2 == 0 { (&before, &newest) } else { (&newest, &before) };
        let name = n.to_string();
        let theirs = other.ino(ROOT, "dir");
        let (ino, fh) = maker.create(maker.ino(ROOT, "dir"), &name).unwrap();
        let contents = vec![n as u8; 1000 * n];
        maker.write(ino, fh, 0, &contents).unwrap();
        assert_eq!(other.ino(theirs, &name), ino);
        let at_other = other.open(ino).unwrap();
        assert_eq!(other.read(ino, at_other, 1 << 20).unwrap(), contents);
        other.append(ino, at_other, b"and more").unwrap();
        maker.fsync(ino, fh).unwrap();
        assert!(maker.read(ino, fh, 1 << 20).unwrap().ends_with(b"and more"));
        maker.rename(dir, &name, &format!("{n} renamed")).unwrap();
        assert_eq!(other.lookup(theirs, &name), Ok(None));
        maker.close(ino, fh);
        other.close(ino, at_other);
    }
    assert_eq!(before.list(dir).unwrap(), newest.list(dir).unwrap());
    let white = RenameFlags { whiteout: true, ..RenameFlags::default() };
    let leave_whiteout = |client: &Client, from: &str, to: &str| {
        let (from, to) = (from.as_bytes(), to.as_bytes());
        client.me.call(|cx| client.fs.rename(cx, dir, from, dir, to, white))
    };
    assert_eq!(leave_whiteout(&before, "0 renamed", "there"), Err(Errno(libc::EINVAL)));
    assert!(newest.lookup(dir, "0 renamed").unwrap().is_some(), "nothing was changed");
    leave_whiteout(&newest, "0 renamed", "there").unwrap();
    assert!(before.lookup(dir, "there").unwrap().is_some());
}

#[test]
fn a_client_of_protocol_8_waits_for_the_answer_to_each_change() {
    let world = World::new(881);
    let before = world.client_of_8();
    assert!(!before.fs.is_asynchronous() && !before.fs.set_asynchronous(true));
    let (ino, fh) = before.create(ROOT, "x").unwrap();
    before.write(ino, fh, 0, &[1; 1 << 20]).unwrap();
    assert_eq!(before.fs.unanswered(), Ok(0));
    assert_eq!(before.fs.reserved(), (0, 0));
    assert!(world.client().fs.is_asynchronous());
}

#[test]
fn locks_are_shared_and_kept_over_connections_of_both_protocols() {
    let world = World::new(882);
    let (before, newest) = (world.client_of_8(), world.client());
    let (ino, fh) = before.create(ROOT, "x").unwrap();
    before.lock(ino, fh, 1, libc::F_WRLCK, false).unwrap();
    let at_newest = newest.open(newest.ino(ROOT, "x")).unwrap();
    let again = || newest.lock(ino, at_newest, 2, libc::F_WRLCK, false);
    assert_eq!(again(), Err(Errno(libc::EAGAIN)));
    for protocol in [8, 10] {
        world.set_before(protocol == 8);
        world.net.cut_all();
        before.write(ino, fh, 0, b"on another connection").unwrap();
        assert_eq!(before.fs.connection()["protocol"], protocol);
        // The newest client does not go back.
        world.set_before(false);
        assert_eq!(again(), Err(Errno(libc::EAGAIN)));
    }
    assert_eq!(world.protocols(), [10, 10], "the server was upgraded under the mount");
    before.lock(ino, fh, 1, libc::F_UNLCK, false).unwrap();
    assert_eq!(again(), Ok(()));
}

#[test]
fn a_mount_that_acknowledges_early_does_not_go_back_to_protocol_8() {
    let world = World::new(883);
    let options = ClientOptions { timeout: Duration::from_secs(5), ..world.client_options("/") };
    let client = world.mount_with(options).unwrap();
    let (ino, fh) = client.create(ROOT, "x").unwrap();
    world.set_before(true);
    world.net.cut_all();
    let refusal = || client.fs.connection()["refused"].as_str().map(str::to_owned);
    super::claims::until("a refusal", || refusal().as_deref() == Some(REFUSAL));
    world.set_before(false);
    client.write(ino, fh, 0, b"well").unwrap();
    assert_eq!(client.fs.connection()["protocol"], 10);
}

#[test]
fn what_a_crash_takes_a_client_of_protocol_8_replays() {
    // A server that has crashed applies no new change for a term.
    let (grace, lease_term) = (Duration::from_secs(10), Duration::from_secs(2));
    let options = ServerOptions { grace, lease_term, ..server_options() };
    let mut crashing = Crashing::with(884, options);
    let before = crashing.world.client_of_8();
    let (ino, fh) = before.create(ROOT, "x").unwrap();
    before.lock(ino, fh, 1, libc::F_WRLCK, false).unwrap();
    for round in 0..4_u8 {
        // The last server is a newer one.
        crashing.world.set_before(round < 3);
        before.append(ino, fh, &[round; 1000]).unwrap();
        if round == 1 {
            before.fsync(ino, fh).unwrap();
        }
        crashing.crash_and_start();
        assert_eq!(before.read(ino, fh, 1 << 20).unwrap().len(), 1000 * (usize::from(round) + 1));
    }
    assert_eq!(before.fs.connection()["protocol"], 10);
    let newest = crashing.world.client();
    let at_newest = newest.open(newest.ino(ROOT, "x")).unwrap();
    before.lock(ino, fh, 1, libc::F_UNLCK, false).unwrap();
    let all: Vec<u8> = (0..4).flat_map(|round| [round; 1000]).collect();
    assert_eq!(newest.read(ino, at_newest, 1 << 20).unwrap(), all);
}

/// Release 0.1.0 does not record who holds locks, so the next server lets nobody have them again.
/// There are more of them than the window holds: what opens the file anew waits for room.
#[test]
fn a_file_whose_locks_are_lost_in_an_upgrade_can_be_opened_anew() {
    for crashes in [false, true] {
        let options = ServerOptions { lease_term: Duration::from_millis(500), ..server_options() };
        let mut world = World::with(888, options);
        let before = world.client_of_8();
        let (ino, fh) = before.create(ROOT, "x").unwrap();
        before.write(ino, fh, 0, b"before").unwrap();
        before.sync().unwrap();
        let byte = |at| FileLock { start: at, end: at, owner: 1, pid: 1, ..FileLock::default() };
        for at in 0..2 * WINDOW_OPS as u64 {
            let kind = if at % 2 == 0 { libc::F_WRLCK } else { libc::F_RDLCK };
            let lock = FileLock { kind, ..byte(at) };
            before.me.call(|cx| before.fs.setlk(cx, ino, fh, &lock, false)).unwrap();
        }
        if crashes {
            drop(world.take_server())
        } else {
            world.stop()
        }
        world.reopen();
        world.fs.remove_lock_holders(&world.fs.lock_holders().unwrap()).unwrap();
        std::thread::scope(|scope| {
            let unanswered = || before.fs.connection()["unanswered_changes"].as_u64().unwrap();
            let writing = scope.spawn(|| before.write(ino, fh, 0, b"behind"));
            super::claims::until("the write", || unanswered() == 1);
            let opening = scope.spawn(|| before.open(ino));
            super::claims::until("the open", || unanswered() == 2);
            world.start();
            assert_eq!(writing.join().unwrap(), Err(Errno(libc::EIO)), "{crashes}: it had a lock");
            let anew = opening.join().unwrap().expect("it is opened anew");
            assert_eq!(before.read(ino, anew, 100).unwrap(), b"before");
            assert_eq!(before.write(ino, anew, 0, b"anew"), Ok(4));
            assert_eq!(before.fsync(ino, anew), Ok(()));
            assert_eq!(before.lock(ino, anew, 1, libc::F_WRLCK, false), Ok(()));
            assert_eq!(before.read(ino, fh, 100), Err(Errno(libc::EIO)));
        });
    }
}

#[test]
fn a_client_of_protocol_8_hears_that_it_is_evicted() {
    let world = World::new(885);
    let before = world.client_of_8();
    let (ino, fh) = before.create(ROOT, "x").unwrap();
    world.set_before(true);
    assert_eq!(world.server().control().evict("1"), 1);
    super::claims::until("eviction", || before.write(ino, fh, 0, b"x") == Err(Errno(libc::EIO)));
    let refused = before.fs.connection()["refused"].as_str().unwrap().to_owned();
    assert!(refused.contains("evicted by the server's administrator"), "{refused}");
}

/// What a server of release 0.1.0 gives a client of `path` with an inode.
fn claim(world: &World, path: &str, ino: Ino) -> Claim {
    let mut hasher = SipHasher24::new_with_key(&world.options.key);
    hasher.write(b"ferry ticket\0");
    hasher.write_u64(ino);
    hasher.write(path.as_bytes());
    Claim { ino, capability: hasher.finish128().as_u128() }
}

#[test]
fn a_capability_of_release_0_1_0_is_good_for_what_it_proves() {
    let world = World::new(887);
    let maker = world.client();
    let dir = maker.mkdir(ROOT, "dir").unwrap();
    let below = maker.mkdir(dir, "below").unwrap();
    let (ino, fh) = maker.create(dir, "x").unwrap();
    maker.close(ino, fh);
    maker.sync().unwrap();
    let knows = |path: &str, claims: &[Claim], ino: Ino| {
        let mut raw = Raw::at(&world, Peer::default(), path.as_bytes());
        raw.change(1, 0, Op::Claim { inodes: List(claims.to_vec()) });
        let Some(ToClient::Changed { outcome, .. }) = raw.hear() else { panic!("no answer") };
        let is_good = matches!(outcome, Outcome::Count { .. });
        let attributes = raw.ask(Op::Getattr { ino });
        (is_good, matches!(attributes, Outcome::Attributes { .. }))
    };
    assert_eq!(knows("/", &[claim(&world, "/", ino)], ino), (true, true));
    // It does not say in which directory a file was found.
    assert_eq!(knows("/dir", &[claim(&world, "/dir", ino)], ino), (true, false));
    assert_eq!(knows("/dir", &[claim(&world, "/dir", below)], below), (true, true));
    // It is for that inode, and for who mounts that path.
    assert_eq!(knows("/dir", &[claim(&world, "/", below)], below), (false, false));
    let other = Claim { ino, ..claim(&world, "/", below) };
    assert_eq!(knows("/", &[other], ino), (false, false));
}

#[test]
fn a_chunk_on_a_connection_of_protocol_8_is_no_message() {
    let world = World::new(886);
    let mut raw = Raw::connected(&world, Peer::default());
    let ToServer::Hello { session, path, name, newest, .. } = super::boundaries::hello(b"/") else {
        panic!("no greeting")
    };
    raw.send(&ToServer::Hello { version: 8, session, path, name, newest });
    // It is not of the newest protocol.
    assert_eq!(raw.hear(), None);
    raw.send_bytes(&(1_u32 | 1 << 31).to_le_bytes());
    raw.send_bytes(&[5]);
    let Some(ToClient::Refused { reason }) = raw.hear() else { panic!("it is taken") };
    assert_eq!(reason, b"the client sent what is no message");
}
