//! What a client may not do.

use super::*;
use crate::codec::List;
use crate::frame;
use crate::limits::Peer;
use crate::message::*;

/// A client that sends what it likes.
pub(super) struct Raw {
    runtime: tokio::runtime::Runtime,
    stream: DuplexStream,
}

impl Raw {
    pub(super) fn new(world: &World) -> Self {
        Self::connected(world, Peer::default())
    }

    pub(super) fn connected(world: &World, peer: Peer) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (ours, theirs) = duplex(1 << 20);
        world.server().serve_peer(Box::new(theirs), peer);
        Self { runtime, stream: ours }
    }

    pub(super) fn greeted(world: &World) -> Self {
        Self::of(world, Peer::default())
    }

    pub(super) fn of(world: &World, peer: Peer) -> Self {
        Self::at(world, peer, b"/")
    }

    pub(super) fn at(world: &World, peer: Peer, path: &[u8]) -> Self {
        let mut raw = Self::connected(world, peer);
        raw.send(&hello(path));
        assert!(matches!(raw.hear(), Some(ToClient::Welcome { applied: 0, resumed: false, .. })));
        raw
    }

    pub(super) fn send(&mut self, message: &ToServer) {
        self.send_bytes(&frame::encode(message));
    }

    /// Whether the server has taken it, or has room for it, after a while.
    pub(super) fn send_soon(&mut self, message: &ToServer) -> bool {
        let (bytes, stream) = (frame::encode(message), &mut self.stream);
        let sent =
            async { tokio::time::timeout(Duration::from_secs(5), stream.write_all(&bytes)).await };
        matches!(self.runtime.block_on(sent), Ok(Ok(())))
    }

    pub(super) fn send_bytes(&mut self, bytes: &[u8]) {
        // A server that has hung up hears nothing more.
        let _closed = self.runtime.block_on(self.stream.write_all(bytes));
    }

    /// The next message; `None`: the server has hung up. `Durable` may come at any time.
    pub(super) fn hear(&mut self) -> Option<ToClient> {
        loop {
            match self.runtime.block_on(read(&mut self.stream)).ok().flatten() {
                Some(ToClient::Durable { .. }) => {}
                message => return message,
            }
        }
    }

    pub(super) fn change(&mut self, seq: u64, answered: u64, op: Op) {
        let (epoch, acknowledged) = (0, None);
        self.send(&ToServer::Change {
            seq,
            answered,
            epoch,
            acknowledged,
            caller: Caller::default(),
            op,
        });
    }

    pub(super) fn ask(&mut self, op: Op) -> Outcome {
        self.ask_as(Caller::default(), op)
    }

    pub(super) fn ask_as(&mut self, caller: Caller, op: Op) -> Outcome {
        self.send(&ToServer::Request { id: 9, after: 0, caller, op });
        match self.hear() {
            Some(ToClient::Reply { id: 9, outcome, .. }) => outcome,
            other => panic!("{other:?}"),
        }
    }

    /// Sends until nothing more is taken. Returns how much was.
    fn flood(&mut self, bytes: &[u8]) -> usize {
        self.runtime.block_on(async {
            let mut sent = 0;
            while let Ok(Ok(n)) =
                tokio::time::timeout(Duration::from_millis(300), self.stream.write(&bytes[sent..]))
                    .await
                && n > 0
            {
                sent += n;
            }
            sent
        })
    }

    /// The server says why it hangs up, and does.
    pub(super) fn refused(&mut self) -> String {
        loop {
            match self.hear() {
                Some(ToClient::Refused { reason }) => {
                    assert_eq!(self.hear(), None);
                    return String::from_utf8(reason).unwrap();
                }
                Some(_) => {}
                None => panic!("not a word"),
            }
        }
    }
}

pub(super) fn hello(path: &[u8]) -> ToServer {
    ToServer::Hello {
        version: VERSION,
        session: 0,
        path: path.into(),
        name: b"raw".to_vec(),
        newest: 0,
    }
}

fn nothing() -> Op {
    Op::Nothing {}
}

/// Whatever others did, this client does not notice.
pub(super) fn assert_well(client: &Client) {
    let names = client.list(ROOT).unwrap().len();
    client.create(ROOT, &format!("well{names}")).unwrap();
}

fn changed(seq: u64, outcome: Outcome) -> ToClient {
    ToClient::Changed { seq, after: List::default(), empty: false, made: None, outcome }
}

#[test]
fn wrong_sequence_numbers_end_the_session() {
    let world = World::new(20);
    let honest = world.client();
    let lies: [&dyn Fn(&mut Raw); 6] = [
        &|raw| raw.change(2, 0, nothing()),
        &|raw| raw.change(1, 1, nothing()),
        &|raw| {
            raw.change(1, 0, nothing());
            raw.hear();
            raw.change(2, 1, nothing());
            raw.hear();
            raw.change(1, 1, nothing());
        },
        &|raw| raw.change(u64::MAX, 0, nothing()),
        &|raw| {
            raw.send(&ToServer::Request {
                id: 1,
                after: 0,
                caller: Caller::default(),
                op: nothing(),
            })
        },
        &|raw| raw.change(1, 0, Op::Statfs {}),
    ];
    for lie in lies {
        let mut raw = Raw::greeted(&world);
        lie(&mut raw);
        assert!(raw.refused().contains("rules"));
        assert_eq!(
            world.server().control().clients().as_array().unwrap().len(),
            1,
            "its session has ended"
        );
        assert_well(&honest);
    }
}

#[test]
fn malformed_greetings_and_messages_end_the_connection() {
    let world = World::new(21);
    let honest = world.client();
    for bytes in [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        frame::encode(&ToServer::Ping { number: 1 }),
        [&[0xff; 4][..], &[0; 100]].concat(),
        (HELLO_MAX as u32 + 1).to_le_bytes().to_vec(),
    ] {
        let mut raw = Raw::new(&world);
        raw.send_bytes(&bytes);
        assert!(raw.refused().contains("greeting"));
    }
    let mut raw = Raw::new(&world);
    raw.send(&ToServer::Hello {
        version: VERSION + 1,
        session: 0,
        path: b"/".to_vec(),
        name: Vec::new(),
        newest: 0,
    });
    assert!(raw.refused().contains("version"));
    for bytes in [vec![1, 0, 0, 0, 99], (FRAME_MAX as u32 + 1).to_le_bytes().to_vec()] {
        let mut raw = Raw::greeted(&world);
        raw.send_bytes(&bytes);
        assert!(raw.refused().contains("no message"));
    }
    assert_well(&honest);
}

#[test]
fn a_client_reaches_only_inodes_it_was_given() {
    let world = World::new(22);
    let honest = world.client();
    let (ino, fh) = honest.create(ROOT, "secret").unwrap();
    honest.write(ino, fh, 0, b"secret").unwrap();
    let mut raw = Raw::greeted(&world);
    let failed = |errno| Outcome::Failed { errno };
    assert_eq!(raw.ask(Op::Getattr { ino }), failed(libc::ESTALE), "a number that was guessed");
    assert_eq!(raw.ask(Op::Read { fh: 1, offset: 0, size: 10 }), failed(libc::EBADF));
    raw.change(1, 0, Op::Open { ino, fh: 1, flags: libc::O_RDONLY, kill_suidgid: false });
    assert_eq!(raw.hear(), Some(changed(1, failed(libc::ESTALE))));
    let claim =
        |capability| Op::Claim { inodes: crate::codec::List(vec![Claim { ino, capability }]) };
    raw.change(2, 1, claim(0));
    assert_eq!(raw.hear(), Some(changed(2, failed(libc::EPERM))), "a forged capability");
    assert_eq!(raw.ask(Op::Getattr { ino }), failed(libc::ESTALE));
    let found = raw.ask(Op::Lookup { parent: ROOT, name: b"secret".to_vec() });
    let Outcome::Entry { known: Some(known) } = found else { panic!("{found:?}") };
    // Opened for reading, it cannot be written.
    raw.change(3, 2, Op::Open { ino, fh: 1, flags: libc::O_RDONLY, kill_suidgid: false });
    assert_eq!(raw.hear(), Some(changed(3, Outcome::Done {})));
    let write =
        Op::Write { fh: 1, offset: 0, data: b"x".to_vec(), append: false, kill_suidgid: false };
    raw.change(4, 3, write);
    assert_eq!(raw.hear(), Some(changed(4, failed(libc::EBADF))));
    assert_eq!(raw.ask(Op::Read { fh: 1, offset: u64::MAX, size: 10 }), failed(libc::EINVAL));
    // The capability is good in a new session too.
    let mut again = Raw::greeted(&world);
    again.change(1, 0, claim(known.capability));
    assert!(matches!(again.hear(), Some(ToClient::Changed { outcome: Outcome::Count { .. }, .. })));
    assert!(matches!(again.ask(Op::Getattr { ino }), Outcome::Attributes { .. }));
    // Also beside one that proves nothing, which stays unknown.
    let mut third = Raw::greeted(&world);
    let (other, _) = honest.create(ROOT, "other").unwrap();
    let both =
        [(other, 0), (ino, known.capability)].map(|(ino, capability)| Claim { ino, capability });
    third.change(1, 0, Op::Claim { inodes: crate::codec::List(both.to_vec()) });
    assert!(matches!(third.hear(), Some(ToClient::Changed { outcome: Outcome::Count { .. }, .. })));
    assert!(matches!(third.ask(Op::Getattr { ino }), Outcome::Attributes { .. }));
    assert_eq!(third.ask(Op::Getattr { ino: other }), failed(libc::ESTALE));
}

#[test]
fn a_client_stays_within_its_export() {
    let export = |path: &str, read_only| Export { path: path.into(), read_only };
    let options = ServerOptions {
        exports: vec![export("/pub", true), export("/pub/incoming", false)],
        ..server_options()
    };
    let world = World::with(23, options);
    let me = InProcess::default();
    let made = |dir, name: &[u8]| {
        let entry = me.call(|cx| world.fs.mkdir(cx, dir, name, 0o755)).unwrap();
        entry.attr.unwrap().ino
    };
    let public = made(ROOT, b"pub");
    let incoming = made(public, b"incoming");
    assert!(matches!(world.mount("/"), Err(NetError::Refused { .. })));
    assert!(matches!(world.mount("/pub/../other"), Err(NetError::Refused { .. })));
    assert!(matches!(world.mount("/pub/missing"), Err(NetError::Refused { .. })));

    let reader = world.mount("/pub").unwrap();
    assert!(reader.fs.is_read_only());
    assert_eq!(reader.create(ROOT, "x"), Err(Errno(libc::EROFS)));
    assert_eq!(reader.list(ROOT).unwrap(), ["incoming"]);
    assert_eq!(reader.ino(ROOT, "incoming"), incoming);
    assert_eq!(reader.lookup(ROOT, "..").unwrap().unwrap().ino, ROOT, "nothing is above the root");
    assert_eq!(
        reader.lookup(incoming, "..").unwrap().unwrap().ino,
        ROOT,
        "the export's root is the root"
    );

    let writer = world.mount("//pub/incoming/").unwrap();
    assert!(!writer.fs.is_read_only());
    let (ino, _) = writer.create(ROOT, "x").unwrap();
    assert_eq!(reader.ino(incoming, "x"), ino);
}

#[test]
fn a_client_that_floods_and_does_not_read_delays_no_other() {
    let world = World::new(24);
    let honest = world.client();
    let mut raw = Raw::greeted(&world);
    let (ino, fh) = honest.create(ROOT, "big").unwrap();
    honest.write(ino, fh, 0, &vec![1; IO_MAX]).unwrap();
    assert!(matches!(
        raw.ask(Op::Lookup { parent: ROOT, name: b"big".to_vec() }),
        Outcome::Entry { .. }
    ));
    raw.change(1, 0, Op::Open { ino, fh: 1, flags: libc::O_RDONLY, kill_suidgid: false });
    raw.hear();
    let read = ToServer::Request {
        id: 1,
        after: 0,
        caller: Caller::default(),
        op: Op::Read { fh: 1, offset: 0, size: IO_MAX as u32 },
    };
    let flood = frame::encode(&read).repeat(100_000);
    // The server takes what its window holds, and no more of it.
    assert!(raw.flood(&flood) < flood.len(), "a window without end");
    assert_well(&honest);
    // Requests that would wait for a change that never comes.
    let lock = FileLock { end: 9, kind: libc::F_RDLCK, ..FileLock::default() };
    let op = Op::Lock { ino: ROOT, lock, wait: true };
    let never =
        frame::encode(&ToServer::Request { id: 1, after: 1 << 40, caller: Caller::default(), op });
    let mut raw = Raw::greeted(&world);
    let flood = never.repeat(100_000);
    assert!(raw.flood(&flood) < flood.len());
    assert_well(&honest);
    assert_eq!(honest.read(ino, fh, IO_MAX).unwrap().len(), IO_MAX);
}

#[test]
fn a_client_without_a_valid_certificate_is_refused() {
    use crate::{Address, ClientTls, ServerTls, TcpConnector, Terms, authority};
    let world = World::new(25);
    let dir = tempfile::tempdir().unwrap();
    let (ca, stranger) = (dir.path().join("ca"), dir.path().join("stranger"));
    authority::init(&ca, &["localhost".into()], authority::DAYS).unwrap();
    authority::init(&stranger, &["localhost".into()], authority::DAYS).unwrap();
    assert!(authority::init(&ca, &[], authority::DAYS).is_err(), "nothing is overwritten");
    assert!(authority::issue(&ca, "../x", &Terms::default(), authority::DAYS).is_err());
    let ours = authority::issue(&ca, "laptop", &Terms::default(), authority::DAYS).unwrap();
    let theirs = authority::issue(&stranger, "laptop", &Terms::default(), authority::DAYS).unwrap();
    let server = world.server();
    let bound = on_loopback(&server, Some(ServerTls::load(&ca).unwrap()));
    let connect = |host: &str, tls: Option<ClientTls>| {
        let address = Address::of_host(host, Some(bound.port()), "/");
        let options = ClientOptions {
            server: address.to_string(),
            path: b"/".to_vec(),
            name: b"laptop".to_vec(),
            timeout: Duration::from_secs(5),
            asynchronous: true,
            noatime: false,
            notes: None,
        };
        RemoteFs::connect(Arc::new(TcpConnector::new(address, tls)), options, &Env::real())
    };
    let fs = connect("localhost", Some(ClientTls::load(&ours).unwrap())).unwrap();
    Client { fs, me: InProcess::default() }.create(ROOT, "f").unwrap();
    assert!(
        connect("127.0.0.1", Some(ClientTls::load(&ours).unwrap())).is_err(),
        "another name than certified"
    );
    assert!(
        connect("localhost", Some(ClientTls::load(&theirs).unwrap())).is_err(),
        "another authority"
    );
    assert!(connect("localhost", None).is_err(), "no certificate");
    assert!(ClientTls::load(&ca).is_err(), "the server's directory is no client's");
}

#[test]
fn a_superseded_connection_is_closed() {
    let world = World::new(27);
    let mut old = Raw::new(&world);
    old.send(&hello(b"/"));
    let Some(ToClient::Welcome { session, .. }) = old.hear() else { panic!("no welcome") };
    let mut new = Raw::new(&world);
    new.send(&ToServer::Hello {
        version: VERSION,
        session,
        path: b"/".to_vec(),
        name: b"raw".to_vec(),
        newest: 0,
    });
    assert!(matches!(new.hear(), Some(ToClient::Welcome { resumed: true, .. })));
    // A greeting may be taken in after the client has replaced that connection by another: the old
    // one must not seem alive.
    old.send(&ToServer::Ping { number: 1 });
    assert!(old.hear().is_none(), "neither a lease nor a sign of life");
    new.send(&ToServer::Ping { number: 1 });
    assert!(matches!(new.hear(), Some(ToClient::Pong { .. })));
    world.server().control().evict("raw");
    assert!(matches!(new.hear(), Some(ToClient::Evicted { .. })));
    new.send(&ToServer::Ping { number: 1 });
    assert!(new.hear().is_none(), "its session has ended");
}

/// The kernel sends an offset before the beginning as one behind every end.
#[test]
fn seek_finds_no_data_and_no_hole_behind_the_end() {
    let world = World::new(28);
    let client = world.client();
    let (ino, fh) = client.create(ROOT, "f").unwrap();
    client.write(ino, fh, 0, &[7; 4096]).unwrap();
    let seek = |offset, whence| client.me.call(|cx| client.fs.lseek(cx, ino, fh, offset, whence));
    assert_eq!((seek(0, libc::SEEK_DATA), seek(0, libc::SEEK_HOLE)), (Ok(0), Ok(4096)));
    for offset in [4096, i64::MAX as u64, u64::MAX] {
        for whence in [libc::SEEK_DATA, libc::SEEK_HOLE] {
            assert_eq!(seek(offset, whence), Err(Errno(libc::ENXIO)), "{offset}");
        }
    }
}
