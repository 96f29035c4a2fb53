//! A network between a client and a server on this machine: a relay of TCP connections that limits,
//! delays, stalls and cuts them.
//!
//! Each direction has its own rate and delay. Bytes above the rate stay in the sockets before the
//! relay, as in the queue of a router: a sender that is too fast first fills buffers, and is then
//! slowed down.
#![expect(clippy::disallowed_methods, reason = "a network that takes its time is what this is")]

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// The most chunks in flight in one direction.
const CHUNKS_MAX: usize = 4096;
/// The bytes of a chunk if no rate is set.
const CHUNK_MAX: usize = 64 << 10;
/// If a rate is set, a chunk has the bytes of this time,
const CHUNK_TIME: Duration = Duration::from_millis(4);
/// but at least this many bytes.
const CHUNK_MIN: usize = 1024;
/// If a rate is set, the size of a socket's buffer, in bytes.
const QUEUE_BYTES: usize = 128 << 10;

/// Bytes a second; `None`: unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rate(pub Option<u64>);

impl FromStr for Rate {
    type Err = String;

    /// Parses `10Mbit`, `500kbit`, `1Gbit` a second, or `unlimited`.
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "unlimited" {
            return Ok(Self(None));
        }
        let units = [("kbit", 125), ("Mbit", 125_000), ("Gbit", 125_000_000)];
        let found = units
            .iter()
            .find_map(|(unit, bytes)| Some((text.strip_suffix(unit)?.parse().ok()?, bytes)));
        match found {
            Some((number, bytes)) if number > 0 => {
                Ok(Self(Some(u64::saturating_mul(number, *bytes))))
            }
            _ => Err(format!("{text:?} is no rate: write 500kbit, 10Mbit, 1Gbit, or unlimited")),
        }
    }
}

/// The rate and the delay of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Way {
    /// The rate of the direction.
    pub rate: Rate,
    /// The delay of each byte.
    pub delay: Duration,
}

/// A direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// From the connecting side to the server.
    Up,
    /// From the server to the connecting side.
    Down,
}

/// The state of one direction, for all connections.
#[derive(Default)]
struct Direction {
    way: Mutex<Way>,
    /// It carries nothing, and neither side is told.
    held: Mutex<bool>,
    released: Condvar,
    /// Bytes carried so far.
    carried: AtomicU64,
}

impl Direction {
    fn hold(&self, held: bool) {
        *self.held.lock() = held;
        self.released.notify_all();
    }

    fn wait_until_released(&self) {
        let mut held = self.held.lock();
        while *held {
            self.released.wait(&mut held);
        }
    }
}

struct Shared {
    to: SocketAddr,
    up: Direction,
    down: Direction,
    /// New connections are closed at once.
    refuses: AtomicBool,
    /// All connections are cut when this many bytes have been carried.
    cut_at: AtomicU64,
    connections: Mutex<Vec<Weak<(TcpStream, TcpStream)>>>,
}

impl Shared {
    fn side(&self, side: Side) -> &Direction {
        match side {
            Side::Up => &self.up,
            Side::Down => &self.down,
        }
    }

    fn carried(&self) -> u64 {
        self.up.carried.load(Ordering::Relaxed) + self.down.carried.load(Ordering::Relaxed)
    }

    /// Counts bytes; says whether the connections are cut before them.
    fn cuts_here(&self, direction: &Direction, bytes: usize) -> bool {
        direction.carried.fetch_add(bytes as u64, Ordering::Relaxed);
        let at = self.cut_at.load(Ordering::Relaxed);
        let cuts = at != 0
            && self.carried() >= at
            && self.cut_at.compare_exchange(at, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if cuts {
            self.cut();
        }
        cuts
    }

    fn cut(&self) {
        for connection in std::mem::take(&mut *self.connections.lock()) {
            if let Some(connection) = connection.upgrade() {
                let _closed =
                    (connection.0.shutdown(Shutdown::Both), connection.1.shutdown(Shutdown::Both));
            }
        }
    }
}

/// A relay. It lives as long as the process.
pub struct Relay {
    shared: Arc<Shared>,
    address: SocketAddr,
}

impl Relay {
    /// Forwards connections to `listen` to `to`.
    pub fn start(listen: SocketAddr, to: SocketAddr, up: Way, down: Way) -> io::Result<Self> {
        let listener = TcpListener::bind(listen)?;
        let address = listener.local_addr()?;
        let direction = |way| Direction { way: Mutex::new(way), ..Direction::default() };
        let shared = Arc::new(Shared {
            to,
            up: direction(up),
            down: direction(down),
            refuses: AtomicBool::new(false),
            cut_at: AtomicU64::new(0),
            connections: Mutex::default(),
        });
        let carrying = Arc::clone(&shared);
        thread::Builder::new().name("relay".into()).spawn(move || {
            for client in listener.incoming().flatten() {
                if carrying.refuses.load(Ordering::Relaxed) {
                    continue;
                }
                if let Err(error) = carry(client, &carrying) {
                    tracing::warn!(%error, "no connection through the relay");
                }
            }
        })?;
        Ok(Self { shared, address })
    }

    /// The address that it listens at.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets the rate and the delay of a direction from now on.
    pub fn set(&self, side: Side, change: impl FnOnce(&mut Way)) {
        change(&mut self.shared.side(side).way.lock());
    }

    /// Stalls a direction, without telling either side; or ends the stall.
    pub fn hold(&self, side: Side, held: bool) {
        self.shared.side(side).hold(held);
    }

    /// Cuts all connections, and drops the bytes in flight. New connections are possible.
    pub fn cut(&self) {
        self.shared.cut();
    }

    /// Cuts all connections when this many more bytes have been carried, in both directions
    /// together.
    pub fn cut_after(&self, bytes: u64) {
        self.shared.cut_at.store(self.shared.carried() + bytes.max(1), Ordering::Relaxed);
    }

    /// Closes new connections at once, or forwards them again.
    pub fn refuse(&self, refuses: bool) {
        self.shared.refuses.store(refuses, Ordering::Relaxed);
    }

    /// The bytes that a direction has carried so far.
    pub fn carried(&self, side: Side) -> u64 {
        self.shared.side(side).carried.load(Ordering::Relaxed)
    }
}

fn carry(client: TcpStream, shared: &Arc<Shared>) -> io::Result<()> {
    let server = TcpStream::connect(shared.to)?;
    let both = Arc::new((client, server));
    shared.connections.lock().retain(|other| other.strong_count() > 0);
    shared.connections.lock().push(Arc::downgrade(&both));
    for side in [Side::Up, Side::Down] {
        let (from, to) = if side == Side::Up { (&both.0, &both.1) } else { (&both.1, &both.0) };
        let (mut from, mut to) = (from.try_clone()?, to.try_clone()?);
        if shared.side(side).way.lock().rate.0.is_some() {
            rustix::net::sockopt::set_socket_recv_buffer_size(&from, QUEUE_BYTES)?;
        }
        to.set_nodelay(true)?;
        let (send, receive) = sync_channel(CHUNKS_MAX);
        let (taking, giving) = (Arc::clone(shared), Arc::clone(shared));
        let alive = Arc::clone(&both);
        thread::Builder::new().spawn(move || take(&mut from, &send, taking.side(side)))?;
        thread::Builder::new().spawn(move || {
            give(&mut to, &receive, side, &giving);
            // If one side closes, the other side is closed, too.
            let _closed = to.shutdown(Shutdown::Both);
            drop(alive);
        })?;
    }
    Ok(())
}

/// Reads from one side, no faster than the rate.
fn take(from: &mut TcpStream, chunks: &SyncSender<(Instant, Vec<u8>)>, direction: &Direction) {
    let mut bytes = vec![0; CHUNK_MAX];
    let mut free_at = Instant::now();
    loop {
        let rate = direction.way.lock().rate.0;
        let most = rate.map_or(CHUNK_MAX, |rate| {
            ((rate as f64 * CHUNK_TIME.as_secs_f64()) as usize).clamp(CHUNK_MIN, CHUNK_MAX)
        });
        let Ok(n @ 1..) = from.read(&mut bytes[..most]) else { return };
        if let Some(rate) = rate {
            free_at = free_at.max(Instant::now()) + Duration::from_secs_f64(n as f64 / rate as f64);
            thread::sleep(free_at.saturating_duration_since(Instant::now()));
        }
        let due = Instant::now() + direction.way.lock().delay;
        if chunks.send((due, bytes[..n].to_vec())).is_err() {
            return;
        }
    }
}

fn give(to: &mut TcpStream, chunks: &Receiver<(Instant, Vec<u8>)>, side: Side, shared: &Shared) {
    let direction = shared.side(side);
    for (due, bytes) in chunks {
        thread::sleep(due.saturating_duration_since(Instant::now()));
        direction.wait_until_released();
        if shared.cuts_here(direction, bytes.len()) || to.write_all(&bytes).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that echoes.
    fn echo() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound");
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                thread::spawn(move || {
                    let (mut from, mut to) = (stream.try_clone().expect("a descriptor"), stream);
                    let _copied = io::copy(&mut from, &mut to);
                });
            }
        });
        address
    }

    fn through(relay: &Relay) -> TcpStream {
        TcpStream::connect(relay.address()).expect("the relay")
    }

    fn any_port() -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], 0))
    }

    fn exchange(stream: &mut TcpStream, len: usize) -> io::Result<Duration> {
        let begun = Instant::now();
        stream.write_all(&vec![7; len])?;
        let mut bytes = vec![0; len];
        stream.read_exact(&mut bytes)?;
        assert!(bytes.iter().all(|byte| *byte == 7));
        Ok(begun.elapsed())
    }

    #[test]
    fn each_direction_takes_its_time() {
        let delayed = Way { delay: Duration::from_millis(5), ..Way::default() };
        let relay = Relay::start(any_port(), echo(), delayed, delayed).expect("a relay");
        let mut stream = through(&relay);
        for _ in 0..2 {
            assert!(exchange(&mut stream, 4).expect("it is carried") >= Duration::from_millis(10));
        }
        let slow = Way { rate: "1Mbit".parse().expect("a rate"), ..Way::default() };
        let relay = Relay::start(any_port(), echo(), slow, Way::default()).expect("a relay");
        let mut stream = through(&relay);
        assert!(
            exchange(&mut stream, 25_000).expect("it is carried") >= Duration::from_millis(195)
        );
        assert!(relay.carried(Side::Up) == 25_000 && relay.carried(Side::Down) == 25_000);
    }

    #[test]
    fn a_connection_is_cut_at_the_given_byte() {
        let relay =
            Relay::start(any_port(), echo(), Way::default(), Way::default()).expect("a relay");
        let mut stream = through(&relay);
        exchange(&mut stream, 100).expect("it is carried");
        relay.cut();
        exchange(&mut stream, 100).expect_err("it is cut");
        let mut stream = through(&relay);
        relay.cut_after(250);
        exchange(&mut stream, 100).expect("it is carried");
        exchange(&mut stream, 100).expect_err("it is cut");
        exchange(&mut through(&relay), 1000).expect("the next one is carried");
        relay.refuse(true);
        exchange(&mut through(&relay), 100).expect_err("it is refused");
    }

    #[test]
    fn held_bytes_arrive_when_they_are_released() {
        let relay =
            Relay::start(any_port(), echo(), Way::default(), Way::default()).expect("a relay");
        let mut stream = through(&relay);
        relay.hold(Side::Down, true);
        stream.write_all(&[7; 100]).expect("open");
        while relay.carried(Side::Up) < 100 {
            thread::yield_now();
        }
        assert_eq!(relay.carried(Side::Down), 0);
        relay.hold(Side::Down, false);
        stream.read_exact(&mut [0; 100]).expect("it arrives");
    }

    #[test]
    fn rates_are_read_as_they_are_written() {
        for (text, rate) in
            [("10Mbit", Some(1_250_000)), ("500kbit", Some(62_500)), ("unlimited", None)]
        {
            assert_eq!(text.parse(), Ok(Rate(rate)));
        }
        for text in ["", "10", "0Mbit", "Mbit", "-1Mbit", "1.5Mbit", "10M"] {
            assert!(text.parse::<Rate>().is_err(), "{text}");
        }
    }
}
