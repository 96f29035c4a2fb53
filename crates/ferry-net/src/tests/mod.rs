//! Clients and a server in one process, with a network in memory that delays and cuts as a seed
//! says.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap, and wait for the other side")]

mod asynchronous;
mod boundaries;
mod caller;
mod certificates;
mod claims;
mod clocks;
mod coherence;
mod crashes;
mod early_ack;
mod exports;
mod fuzz;
mod go_on;
mod hostile;
mod killed;
mod leases;
mod locks;
mod losses;
mod many;
mod panics;
mod prefixes;
mod recorded_sessions;
mod refusals;
mod release_before;
mod replay;
mod restarts;
mod sessions;
mod side_by_side;
mod simulation;
mod slow;
mod space;
mod walks;

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use ferry_device::{BlockDevice, MemDevice};
use ferry_env::Env;
use ferry_fs::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::sync::watch;

use crate::codec::{Malformed, Wire, decode};
use crate::message::FRAME_MAX;
use crate::rt::Mutex;
use crate::server::WalkTimes;
use crate::{
    Bound, ClientOptions, Connecting, Connector, Control, Export, NetError, RemoteFs, Server,
    ServerOptions, ServerTls, Stream,
};

use caller::InProcess;
use release_before::Before;

type Done<T = ()> = Result<T, Errno>;

/// The server listens on this machine alone: at which address.
fn on_loopback(server: &Server, tls: Option<ServerTls>) -> SocketAddr {
    let bound = Bound::new(([127, 0, 0, 1], 0).into()).unwrap();
    let addr = bound.addr();
    server.listen(bound, tls).unwrap();
    addr
}

/// A small generator of random numbers, so that a seed says everything.
struct Random(AtomicU64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(AtomicU64::new(seed.wrapping_mul(2) + 1))
    }
    fn next(&self) -> u64 {
        let x = self.0.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }
    fn below(&self, n: u64) -> u64 {
        self.next() % n
    }
}

/// The way to a server. It may be closed, and it may cut connections after so many bytes.
struct Network {
    server: Mutex<Option<Arc<Server>>>,
    random: Random,
    /// A connection carries fewer bytes than this; 0: any number.
    cut_below: AtomicU64,
    /// Clients send so many bytes a second; 0: as many as they like.
    up_rate: Arc<AtomicU64>,
    cuts: watch::Sender<u64>,
    /// Connections before this one carry nothing, and nobody is told.
    silent_below: watch::Sender<u64>,
    /// The same of what the server says alone.
    unanswered_below: watch::Sender<u64>,
    connections: AtomicU64,
    /// What connects.
    peer: Mutex<crate::limits::Peer>,
    messages: Arc<Messages>,
    /// The server greets as release 0.1.0 does.
    is_before: AtomicBool,
    /// Not a client's: what is in flight arrives though the client has left.
    runtime: tokio::runtime::Runtime,
}

/// Messages so far, if they are counted, and the one that is not carried any more: all connections
/// are cut then.
struct Messages {
    so_far: AtomicU64,
    /// Requests of clients among them.
    requests: AtomicU64,
    cut_at: AtomicU64,
    cuts: watch::Sender<u64>,
}

impl Messages {
    /// Whether the message that comes now is the one.
    fn end_here(&self) -> bool {
        let end =
            self.so_far.fetch_add(1, Ordering::SeqCst) + 1 == self.cut_at.load(Ordering::SeqCst);
        if end {
            self.cuts.send_modify(|n| *n += 1);
        }
        end
    }
}

impl Network {
    fn new(seed: u64) -> Arc<Self> {
        let cuts = watch::Sender::new(0);
        let (so_far, requests, cut_at) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
        let messages = Messages { so_far, requests, cut_at, cuts: cuts.clone() };
        Arc::new(Self {
            server: Mutex::default(),
            random: Random::new(seed),
            cut_below: AtomicU64::new(0),
            up_rate: Arc::default(),
            cuts,
            silent_below: watch::Sender::new(0),
            unanswered_below: watch::Sender::new(0),
            connections: AtomicU64::new(0),
            peer: Mutex::default(),
            messages: Arc::new(messages),
            is_before: AtomicBool::new(false),
            runtime: tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()
                .unwrap(),
        })
    }

    /// All connections that are there carry nothing any more.
    fn silence_all(&self) {
        self.silent_below.send_replace(self.connections.load(Ordering::Relaxed));
    }

    /// All connections that are there carry what clients say, and no answer any more.
    fn silence_server(&self) {
        self.unanswered_below.send_replace(self.connections.load(Ordering::Relaxed));
    }

    /// All connections that are there are cut.
    fn cut_all(&self) {
        self.cuts.send_modify(|n| *n += 1);
    }
}

impl Connector for Network {
    fn connect(&self) -> Connecting<'_> {
        Box::pin(async {
            let server = self.server.lock().clone().ok_or(io::ErrorKind::ConnectionRefused)?;
            let (ours, theirs) = duplex(1 << 16);
            let (near, far) = duplex(1 << 16);
            let peer = self.peer.lock().clone();
            server.serve_peer(Box::new(far), peer);
            let limit = self.cut_below.load(Ordering::Relaxed);
            let budget = || if limit == 0 { u64::MAX } else { self.random.below(limit) };
            let number = self.connections.fetch_add(1, Ordering::Relaxed);
            if self.messages.cut_at.load(Ordering::SeqCst) > 0 {
                let messages = Arc::clone(&self.messages);
                self.runtime.spawn(relay_messages(theirs, near, messages, self.cuts.subscribe()));
                return Ok(Box::new(ours) as Box<dyn Stream>);
            }
            let (budgets, cuts) = ([budget(), budget()], self.cuts.subscribe());
            let silent = (number, self.silent_below.subscribe(), self.unanswered_below.subscribe());
            let rate = Arc::clone(&self.up_rate);
            self.runtime
                .spawn(async move { relay(theirs, near, (budgets, &rate), cuts, silent).await });
            if self.is_before.load(Ordering::SeqCst) {
                return Ok(Box::new(Before::new(ours)) as Box<dyn Stream>);
            }
            Ok(Box::new(ours) as Box<dyn Stream>)
        })
    }
}

/// Carries so many bytes each way, then both ends see the connection closed.
async fn relay(
    a: DuplexStream,
    b: DuplexStream,
    (budgets, up_rate): ([u64; 2], &AtomicU64),
    mut cuts: watch::Receiver<u64>,
    (number, silent, unanswered): (u64, watch::Receiver<u64>, watch::Receiver<u64>),
) {
    /// `true`: to be cut; otherwise one side has closed its end.
    async fn one(
        mut from: impl AsyncReadExt + Unpin,
        mut to: impl AsyncWriteExt + Unpin,
        (budget, rate): (u64, &AtomicU64),
        (number, mut silent_below): (u64, Vec<watch::Receiver<u64>>),
    ) -> bool {
        let mut left = budget;
        let mut bytes = vec![0; 4096];
        while left > 0 {
            let most = left.min(bytes.len() as u64) as usize;
            match from.read(&mut bytes[..most]).await {
                Ok(n) if n > 0 => {
                    for below in &mut silent_below {
                        let _heard = below.wait_for(|below| number >= *below).await.map(drop);
                    }
                    tokio::time::sleep(Duration::from_micros(n as u64 % 7 * 30)).await;
                    if let Some(taken) =
                        (n as u64 * 1_000_000).checked_div(rate.load(Ordering::Relaxed))
                    {
                        tokio::time::sleep(Duration::from_micros(taken)).await;
                    }
                    if to.write_all(&bytes[..n]).await.is_err() {
                        return false;
                    }
                    left -= n as u64;
                }
                _ => {
                    let _closed = to.shutdown().await;
                    return false;
                }
            }
        }
        true
    }
    let ((ar, aw), (br, bw)) = (tokio::io::split(a), tokio::io::split(b));
    let any = AtomicU64::new(0);
    let both = async {
        let (mut up, mut down) = (
            pin!(one(ar, bw, (budgets[0], up_rate), (number, vec![silent.clone()]))),
            pin!(one(br, aw, (budgets[1], &any), (number, vec![silent, unanswered]))),
        );
        tokio::select! {
            cut = &mut up => cut || down.await,
            cut = &mut down => cut || up.await,
        }
    };
    tokio::select! {
        _ = both => {}
        _ = cuts.changed() => {}
    }
}

/// Carries message by message each way, up to the one that ends all.
async fn relay_messages(
    a: DuplexStream,
    b: DuplexStream,
    messages: Arc<Messages>,
    mut cuts: watch::Receiver<u64>,
) {
    async fn one(
        mut from: impl AsyncReadExt + Unpin,
        mut to: impl AsyncWriteExt + Unpin,
        (messages, up): (&Messages, bool),
    ) {
        let max = crate::message::FRAME_MAX;
        while let Ok(Some((kind, bytes))) = crate::frame::read_frame(&mut from, max).await {
            let len = (bytes.len() as u32 | kind).to_le_bytes();
            // A request begins with its number among the messages.
            messages.requests.fetch_add(u64::from(up && bytes[0] == 2), Ordering::SeqCst);
            if messages.end_here() || to.write_all(&[&len[..], &bytes].concat()).await.is_err() {
                return;
            }
        }
    }
    let ((ar, aw), (br, bw)) = (tokio::io::split(a), tokio::io::split(b));
    tokio::select! {
        () = one(ar, bw, (&messages, true)) => {}
        () = one(br, aw, (&messages, false)) => {}
        _ = cuts.changed() => {}
    }
}

/// The next message of the newest protocol.
async fn read<T: Wire>(stream: &mut (impl AsyncReadExt + Unpin)) -> io::Result<Option<T>> {
    let bytes = crate::frame::read_bytes(stream, FRAME_MAX).await?;
    let malformed = |Malformed| crate::frame::malformed();
    bytes.map(|bytes| decode(&bytes).map_err(malformed)).transpose()
}

/// A volume in memory, its server, and the network.
struct World {
    dev: Arc<dyn BlockDevice>,
    fs: Arc<LocalFs>,
    net: Arc<Network>,
    options: ServerOptions,
    env: Env,
}

const WALK_TIMES: WalkTimes =
    WalkTimes { in_use: Duration::from_millis(20), wait_max: Duration::from_secs(1) };

/// A kernel that notes what it is to forget.
#[derive(Default)]
struct Forgets(Mutex<ToForget>);

impl Host for Forgets {
    fn invalidate_attributes(&self, _ino: Ino) {}
    fn forget(&self, what: ToForget, done: Box<dyn FnOnce() + Send>) {
        self.0.lock().append(what);
        done();
    }
    fn forget_contents(&self, _files: Vec<Ino>, done: Box<dyn FnOnce() + Send>) {
        done();
    }
    fn forget_all(&self, _known: Vec<Ino>, done: Box<dyn FnOnce() + Send>) {
        done();
    }
    fn forgets_names(&self) -> bool {
        true
    }
    fn stats(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
}

fn server_options() -> ServerOptions {
    ServerOptions {
        exports: vec![Export { path: b"/".to_vec(), read_only: false }],
        session_life: Duration::from_secs(60),
        grace: Duration::ZERO,
        returns: Duration::ZERO,
        silent: Duration::ZERO,
        lease_term: Duration::from_secs(6),
        key: [7; 16],
    }
}

fn fs_options() -> FsOptions {
    let cache_bytes = 16 << 20;
    FsOptions { cache: CacheMode::Strict, cache_bytes, keeps_removed: true, ..FsOptions::default() }
}

impl World {
    fn new(seed: u64) -> Self {
        Self::with(seed, server_options())
    }

    fn with(seed: u64, options: ServerOptions) -> Self {
        Self::on(Arc::new(MemDevice::new(128 << 20)), seed, options)
    }

    fn on(dev: Arc<dyn BlockDevice>, seed: u64, options: ServerOptions) -> Self {
        Self::all(dev, seed, options, Env::real())
    }

    /// A server with a clock of its own.
    fn serving(seed: u64, options: ServerOptions, env: Env) -> Self {
        Self::all(Arc::new(MemDevice::new(128 << 20)), seed, options, env)
    }

    fn all(dev: Arc<dyn BlockDevice>, seed: u64, options: ServerOptions, env: Env) -> Self {
        mkfs(&dev, &MkfsOptions::default(), &Env::real()).unwrap();
        let fs = LocalFs::open(dev.clone(), fs_options(), Env::real()).unwrap();
        let world = Self { dev, fs, net: Network::new(seed), options, env };
        world.start();
        world
    }

    fn start(&self) {
        self.start_on(self.fs.clone());
    }

    fn start_on(&self, fs: Arc<dyn SessionStore>) {
        let server =
            Server::start_with(fs, self.options.clone(), self.env.clone(), WALK_TIMES).unwrap();
        *self.net.server.lock() = Some(Arc::new(server));
    }

    fn server(&self) -> Arc<Server> {
        self.net.server.lock().clone().unwrap()
    }

    /// Returns when the server knows that all clients have left.
    fn until_nobody_is_there(&self) {
        while !self.server().control().clients().as_array().unwrap().is_empty() {
            std::thread::yield_now();
        }
    }

    fn take_server(&self) -> Server {
        let mut server = self.net.server.lock().take().unwrap();
        // A connection that is just being made holds it for a short time.
        loop {
            match Arc::try_unwrap(server) {
                Ok(server) => return server,
                Err(shared) => server = shared,
            }
            std::thread::yield_now();
        }
    }

    /// The server stops as it should, and another starts on the same volume.
    fn stop(&self) {
        self.take_server().stop();
    }

    /// The volume is closed and opened again.
    fn reopen(&mut self) {
        self.fs.detach();
        self.fs.close().unwrap();
        self.fs = LocalFs::open(self.dev.clone(), fs_options(), Env::real()).unwrap();
    }

    fn client(&self) -> Client {
        self.mount("/").expect("the server is there")
    }

    fn client_options(&self, path: &str) -> ClientOptions {
        ClientOptions {
            server: "memory".into(),
            path: path.into(),
            name: b"test".to_vec(),
            timeout: Duration::from_secs(20),
            asynchronous: true,
            noatime: false,
            notes: None,
        }
    }

    fn mount(&self, path: &str) -> Result<Client, NetError> {
        self.mount_with(self.client_options(path))
    }

    fn mount_with(&self, options: ClientOptions) -> Result<Client, NetError> {
        let fs = RemoteFs::connect(self.net.clone(), options, &Env::real())?;
        Ok(Client { fs, me: InProcess::default() })
    }

    /// One whose changes wait for the server.
    fn waiting_client(&self) -> Client {
        let options = ClientOptions { asynchronous: false, ..self.client_options("/") };
        self.mount_with(options).expect("the server is there")
    }

    fn figure(&self, of: &str) -> u64 {
        sum_of(&self.server().control(), of)
    }
}

/// What all clients of a server have of something.
fn sum_of(control: &Control, of: &str) -> u64 {
    control.clients().as_array().unwrap().iter().map(|c| c[of].as_u64().unwrap()).sum()
}

/// Whatever was answered.
struct Any(Reply);

impl ferry_fs::inprocess::FromReply for Any {
    fn from_reply(reply: Reply) -> Option<Self> {
        Some(Any(reply))
    }
}

/// A client, as a kernel uses it.
struct Client {
    fs: Arc<RemoteFs>,
    me: InProcess,
}

impl Client {
    fn lookup(&self, dir: Ino, name: &str) -> Done<Option<Attr>> {
        Ok(self.me.call(|cx| self.fs.lookup(cx, dir, name.as_bytes()))?.attr)
    }
    fn ino(&self, dir: Ino, name: &str) -> Ino {
        self.lookup(dir, name).unwrap().unwrap_or_else(|| panic!("{name} is missing")).ino
    }
    fn mkdir(&self, dir: Ino, name: &str) -> Done<Ino> {
        let entry = self.me.call(|cx| self.fs.mkdir(cx, dir, name.as_bytes(), 0o755))?;
        Ok(entry.attr.unwrap().ino)
    }
    fn create(&self, dir: Ino, name: &str) -> Done<(Ino, u64)> {
        let flags = libc::O_RDWR | libc::O_EXCL | libc::O_CREAT;
        let made = self.me.call(|cx| self.fs.create(cx, dir, name.as_bytes(), 0o644, flags));
        made.map(|(entry, opened)| (entry.attr.unwrap().ino, opened.fh))
    }
    fn open(&self, ino: Ino) -> Done<u64> {
        Ok(self.me.call(|cx| self.fs.open(cx, ino, libc::O_RDWR, false))?.fh)
    }
    fn write(&self, ino: Ino, fh: u64, offset: u64, data: &[u8]) -> Done<u64> {
        self.me.call(|cx| self.fs.write(cx, ino, fh, offset, data, false, false))
    }
    fn append(&self, ino: Ino, fh: u64, data: &[u8]) -> Done<u64> {
        self.me.call(|cx| self.fs.write(cx, ino, fh, 0, data, true, false))
    }
    fn read(&self, ino: Ino, fh: u64, len: usize) -> Done<Vec<u8>> {
        self.me.call(|cx| {
            let mut out = vec![0; len];
            let n = self.fs.read(cx, ino, fh, 0, &mut out)?;
            out.truncate(n);
            Ok(out)
        })
    }
    fn close(&self, ino: Ino, fh: u64) {
        self.me
            .call(|cx| {
                self.fs.release(cx, ino, fh);
                Ok(())
            })
            .unwrap();
    }
    fn fsync(&self, ino: Ino, fh: u64) -> Done {
        self.me.call(|cx| self.fs.fsync(cx, ino, fh, false))
    }
    fn sync(&self) -> Done {
        self.me.call(|cx| self.fs.ioctl(cx, ROOT, ioctl::SYNC, &[], 0)).map(drop)
    }
    fn unlink(&self, dir: Ino, name: &str) -> Done {
        self.me.call(|cx| self.fs.unlink(cx, dir, name.as_bytes()))
    }
    fn rename(&self, dir: Ino, from: &str, to: &str) -> Done {
        let flags = RenameFlags::default();
        self.me.call(|cx| self.fs.rename(cx, dir, from.as_bytes(), dir, to.as_bytes(), flags))
    }
    fn lock(&self, ino: Ino, fh: u64, owner: u64, kind: i32, wait: bool) -> Done {
        let lock = FileLock { start: 0, end: u64::MAX, kind, pid: 1, owner, flock: false };
        self.me.call(|cx| self.fs.setlk(cx, ino, fh, &lock, wait))
    }
    /// All names of a directory.
    fn list(&self, dir: Ino) -> Done<Vec<String>> {
        let fh = self.me.call(|cx| self.fs.opendir(cx, dir))?.fh;
        let (mut names, mut cookie) = (Vec::new(), 0);
        loop {
            let mut batch = Vec::new();
            let Any(answer) = self.me.call(|cx| {
                self.fs.readdir(cx, dir, fh, cookie, false, &mut |entry| {
                    batch.push(entry.clone());
                    true
                })?;
                Ok(Any(Reply::Empty))
            })?;
            if let Reply::Dir(entries) = answer {
                batch = entries;
            }
            let Some(last) = batch.last() else { break };
            cookie = last.cookie;
            names.extend(batch.iter().map(|e| String::from_utf8_lossy(&e.name).into_owned()));
        }
        names.retain(|name| name != "." && name != "..");
        names.sort();
        Ok(names)
    }
}
