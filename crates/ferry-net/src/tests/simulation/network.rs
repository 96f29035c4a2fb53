//! The network of a simulation: each client has its own way to the server, which carries frame by
//! frame what a seed says.
//!
//! A frame may be late, and all behind it in its direction; the connection may end at a frame; or
//! one direction carries nothing any more while the other does, until the connection ends a while
//! later. Ways know nothing of each other: what one holds back others overtake. A client that has
//! vanished is a way that carries nothing for good. A crash of the server is one step for all ways:
//! what it had sent before may have arrived, what it sends later is for nobody.

use ferry_sim::device::SimRng;

use super::super::*;
use crate::rt::{runtime, sim, task, thread, time};

/// Of so many frames so many meet this.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Faults {
    pub(super) cut: u64,
    pub(super) swallow: u64,
    pub(super) hold: u64,
    /// What a client sends arrives at so many bytes a second; 0: as it comes.
    pub(super) rate: u64,
    /// A frame takes up to so many microseconds.
    pub(super) latency: u64,
}

const OF: u64 = 10_000;
/// How long a frame is held back at most, and all behind it.
const HOLD_TIME_MAX_MS: u64 = 15;

enum Fate {
    Arrives,
    Delayed(Duration),
    Cut,
    Swallowed(Duration),
}

/// What all ways share.
pub(super) struct Net {
    pub(super) server: Mutex<Option<Arc<Server>>>,
    /// One from which that one has taken the volume. It lives, and clients find it, too.
    pub(super) former: Mutex<Option<Arc<Server>>>,
    seed: u64,
    faults: Faults,
    /// No more faults.
    pub(super) calm: AtomicBool,
    /// Counts what ends all connections.
    cuts: watch::Sender<u64>,
    frames: AtomicU64,
    /// At this frame all ends; 0: at none.
    end_at: AtomicU64,
    pub(super) ended: Box<dyn Fn() + Send + Sync>,
    swallow_ms: u64,
    /// A thread of a client may be the last to let go of it, and must not wait for its end.
    runtime: Option<runtime::Runtime>,
}

impl Drop for Net {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Net {
    pub(super) fn new(
        seed: u64,
        faults: Faults,
        swallow_ms: u64,
        ended: impl Fn() + Send + Sync + 'static,
    ) -> Arc<Self> {
        let mut runtime = runtime::Builder::new_multi_thread();
        Arc::new(Self {
            server: Mutex::default(),
            former: Mutex::default(),
            seed,
            faults,
            calm: AtomicBool::new(false),
            cuts: watch::Sender::new(0),
            frames: AtomicU64::new(0),
            end_at: AtomicU64::new(0),
            ended: Box::new(ended),
            swallow_ms,
            runtime: Some(runtime.worker_threads(1).enable_all().build().unwrap()),
        })
    }

    /// Nothing is carried any more on any connection that there is.
    pub(super) fn cut_all(&self) {
        self.cuts.send_modify(|n| *n += 1);
    }

    /// Takes the server away from those who connect.
    pub(super) fn take_server(&self) -> Server {
        let mut server = self.server.lock().take().expect("there is one");
        loop {
            match Arc::try_unwrap(server) {
                Ok(server) => return server,
                Err(shared) => server = shared,
            }
            thread::yield_now();
        }
    }

    /// All ends at the frame `later` from now on.
    pub(super) fn end_after(&self, later: u64) {
        self.end_at.store(self.frames() + later, Ordering::SeqCst);
    }

    pub(super) fn frames(&self) -> u64 {
        self.frames.load(Ordering::SeqCst)
    }

    /// A frame comes; whether it is the one at which all ends.
    fn ends_here(&self) -> bool {
        let number = self.frames.fetch_add(1, Ordering::SeqCst) + 1;
        let ends = number == self.end_at.load(Ordering::SeqCst);
        if ends {
            self.cut_all();
            (self.ended)();
        }
        ends
    }

    fn fate(&self, random: &mut SimRng) -> Fate {
        let Faults { cut, swallow, hold, .. } = self.faults;
        let drawn = random.below(OF);
        if self.calm.load(Ordering::SeqCst) {
            return Fate::Arrives;
        }
        match drawn {
            n if n < cut => Fate::Cut,
            n if n < cut + swallow => {
                Fate::Swallowed(Duration::from_millis(random.below(self.swallow_ms.max(1))))
            }
            n if n < cut + swallow + hold => {
                Fate::Delayed(Duration::from_millis(random.below(HOLD_TIME_MAX_MS)))
            }
            _ => Fate::Arrives,
        }
    }

    async fn arrive(&self, random: &mut SimRng) {
        match self.faults.latency {
            0 => task::yield_now().await,
            latency => time::sleep(Duration::from_micros(random.below(latency))).await,
        }
    }
}

/// One client's way.
pub(super) struct Way {
    net: Arc<Net>,
    id: u64,
    /// The server greets as release 0.1.0 does.
    is_before: bool,
    connections: AtomicU64,
    /// Which of two servers comes next.
    tries: AtomicU64,
    vanished: watch::Sender<bool>,
    /// Connections before this one carry nothing until they are cut, and nobody is told.
    silent_below: watch::Sender<u64>,
    /// The same of what the server says.
    deaf_below: watch::Sender<u64>,
}

impl Way {
    pub(super) fn new(net: &Arc<Net>, id: u64, is_before: bool) -> Arc<Self> {
        let (net, connections, vanished) =
            (Arc::clone(net), AtomicU64::new(0), watch::Sender::new(false));
        let tries = AtomicU64::new(0);
        let (silent_below, deaf_below) = (watch::Sender::new(0), watch::Sender::new(0));
        Arc::new(Self {
            net,
            id,
            is_before,
            connections,
            tries,
            vanished,
            silent_below,
            deaf_below,
        })
    }

    /// The connection that there is carries nothing any more. The next one does, when this one is
    /// cut.
    pub(super) fn silence(&self) {
        self.silent_below.send_replace(self.connections.load(Ordering::Relaxed));
    }

    /// The server hears the client, and the client hears nothing, until this connection is cut.
    pub(super) fn deafen(&self) {
        self.deaf_below.send_replace(self.connections.load(Ordering::Relaxed));
    }

    /// It carries again what comes on new connections.
    pub(super) fn return_again(&self) {
        self.vanished.send_replace(false);
    }

    /// From now on it carries nothing, and nobody is told.
    pub(super) fn vanish(&self) {
        self.vanished.send_replace(true);
    }
}

impl Connector for Way {
    fn stay(&self) {
        self.tries.fetch_sub(1, Ordering::Relaxed);
    }

    fn connect(&self) -> Connecting<'_> {
        Box::pin(async {
            let net = &self.net;
            // Before the server is looked for: that of a later moment does not answer on a
            // connection of an earlier one.
            let cuts = net.cuts.subscribe();
            let server = net.server.lock().clone().ok_or(io::ErrorKind::ConnectionRefused)?;
            let former = net.former.lock().clone();
            // The servers are tried in turn.
            let is_odd = self.tries.fetch_add(1, Ordering::Relaxed) % 2 == 1;
            let server = former.filter(|_| is_odd).unwrap_or(server);
            if *self.vanished.borrow() {
                return Err(io::ErrorKind::ConnectionRefused.into());
            }
            let (ours, theirs) = duplex(1 << 16);
            let (near, far) = duplex(1 << 16);
            server.serve_stream(Box::new(far));
            let number = self.connections.fetch_add(1, Ordering::Relaxed);
            let random =
                |direction| SimRng::new(net.seed << 24 ^ self.id << 16 ^ number << 1 ^ direction);
            let (vanished, silent_below) =
                (self.vanished.subscribe(), [self.silent_below.subscribe()].to_vec());
            let up = Ends { cuts, vanished, number, silent_below };
            let mut down = up.clone();
            down.silent_below.push(self.deaf_below.subscribe());
            let both = relay(theirs, near, [(random(0), up), (random(1), down)], Arc::clone(net));
            net.runtime.as_ref().expect("it lives as long as this").spawn(both);
            if self.is_before {
                return Ok(Box::new(Before::new(ours)) as Box<dyn Stream>);
            }
            Ok(Box::new(ours) as Box<dyn Stream>)
        })
    }
}

/// What ends a connection, said or unsaid.
#[derive(Clone)]
struct Ends {
    cuts: watch::Receiver<u64>,
    vanished: watch::Receiver<bool>,
    number: u64,
    /// Silent, if the connection's number is below one of these.
    silent_below: Vec<watch::Receiver<u64>>,
}

async fn relay(a: DuplexStream, b: DuplexStream, [up, down]: [(SimRng, Ends); 2], net: Arc<Net>) {
    async fn one(
        mut from: impl AsyncReadExt + Unpin,
        mut to: impl AsyncWriteExt + Unpin,
        (mut random, ends): (SimRng, Ends),
        (net, is_up): (&Net, bool),
    ) {
        let Ends { cuts, vanished, number, mut silent_below } = ends;
        let max = crate::message::FRAME_MAX;
        while let Ok(Some((kind, bytes))) = crate::frame::read_frame(&mut from, max).await {
            sim::note(|| format!("frame {} {} bytes up {is_up}", bytes[0], bytes.len()));
            if net.ends_here() {
                return;
            }
            match net.fate(&mut random) {
                Fate::Arrives => net.arrive(&mut random).await,
                Fate::Delayed(time) => time::sleep(time).await,
                Fate::Cut => return,
                Fate::Swallowed(time) => {
                    let nowhere =
                        async { tokio::io::copy(&mut from, &mut tokio::io::sink()).await };
                    let _silence = time::timeout(time, nowhere).await;
                    return;
                }
            }
            if let Some(taken) =
                (bytes.len() as u64 * 1000).checked_div(net.faults.rate).filter(|_| is_up)
            {
                time::sleep(Duration::from_millis(taken)).await;
            }
            for below in &mut silent_below {
                let _heard = below.wait_for(|below| number >= *below).await.map(drop);
            }
            if *vanished.borrow() {
                let nowhere = async { tokio::io::copy(&mut from, &mut tokio::io::sink()).await };
                let _end = nowhere.await;
                return;
            }
            let len = (bytes.len() as u32 | kind).to_le_bytes();
            let whole = [&len[..], &bytes].concat();
            // What was sent behind a crash arrives nowhere.
            if cuts.has_changed().unwrap_or(true) || to.write_all(&whole).await.is_err() {
                return;
            }
        }
        // A client that has vanished does not hang up.
        if *vanished.borrow() {
            std::future::pending::<()>().await;
        }
    }
    let ((ar, aw), (br, bw)) = (tokio::io::split(a), tokio::io::split(b));
    let mut ended = up.1.cuts.clone();
    crate::rt::select! {
        () = one(ar, bw, up, (&net, true)) => {}
        () = one(br, aw, down, (&net, false)) => {}
        _ = ended.changed() => {}
    }
}
