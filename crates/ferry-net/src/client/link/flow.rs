//! How much of what a client sends may be on its way: what the connection carries in a moment.
//!
//! * FLOW-1: a ping is answered as soon as it arrives, so its answer says that all that was written
//!   before it has arrived, and how long that took. Pings are sent now and then, and between the
//!   pieces of whatever is sent.
//! * FLOW-2: no more is written than was under way when the newest answers took `drain` longer than
//!   a ping takes at least. So a ping, and the word that leases are given back, arrive after that
//!   time, a small part of a term, whatever buffers there are.
//! * FLOW-3: what is promised and not answered takes a few of these times
//!   ([`Flow::unanswered_max`]), so that a recall is honoured soon.

use crate::rt::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::rt::Mutex;
use ferry_env::Clock;
use tokio::sync::Notify;

use crate::client::cache::Moment;
use crate::frame;
use crate::lanes::{PIECE_MIN, Pace};
use crate::message::{FRAME_MAX, ToServer, WINDOW_BYTES};

/// What is under way should have arrived after this part of a term, beside what an empty connection
/// takes.
const DRAIN_OF_TERM: u32 = 15;
/// An empty connection takes no more than this part of a term, as far as it counts.
const SHORTEST_OF_TERM: u32 = 10;
/// Bytes under way at first,
const WINDOW_FIRST: u64 = 256 << 10;
/// at least,
const WINDOW_MIN: u64 = 16 << 10;
/// and at most.
const WINDOW_MAX: u64 = WINDOW_BYTES as u64;
/// Pings among what fills the window.
const PINGS: u64 = 4;
/// A piece is so small a part of the window.
const PIECES: u64 = 8;
/// So many windows may be promised and not answered.
const UNANSWERED_WINDOWS: u64 = 4;

struct Ping {
    number: u64,
    at: Moment,
    /// Bytes that were written before it, and those of them that were under way.
    position: u64,
    under_way: u64,
}

struct State {
    written: u64,
    arrived: u64,
    /// What was written before the newest ping.
    pinged: u64,
    number: u64,
    pings: VecDeque<Ping>,
    /// What a ping takes on an empty connection: the shortest that any took.
    shortest: Duration,
}

/// The pace of one connection.
pub(super) struct Flow {
    clock: Arc<dyn Clock>,
    drain: Duration,
    state: Mutex<State>,
    window: AtomicU64,
    bell: Notify,
}

impl Flow {
    pub(super) fn new(clock: Arc<dyn Clock>, term: Duration) -> Self {
        let (written, arrived, pinged, number) = (0, 0, 0, 0);
        let shortest = term / SHORTEST_OF_TERM;
        let state = State { written, arrived, pinged, number, pings: VecDeque::new(), shortest };
        Self {
            clock,
            drain: term / DRAIN_OF_TERM,
            state: Mutex::new(state),
            window: WINDOW_FIRST.into(),
            bell: Notify::new(),
        }
    }

    fn window(&self) -> u64 {
        self.window.load(Ordering::Relaxed)
    }

    /// Bytes that may be promised and not answered.
    pub(super) fn unanswered_max(&self) -> u64 {
        self.window() * UNANSWERED_WINDOWS
    }

    /// A ping that is sent now.
    pub(super) fn ping(&self) -> Vec<u8> {
        let mut state = self.state.lock();
        state.number += 1;
        let (number, position) = (state.number, state.written);
        let under_way = position - state.arrived;
        state.pinged = position;
        state.pings.push_back(Ping { number, at: Moment::now(&*self.clock), position, under_way });
        frame::encode(&ToServer::Ping { number })
    }

    /// It is answered: when it was sent. `None`: a later one was answered before.
    pub(super) fn ponged(&self, number: u64) -> Option<Moment> {
        let now = Moment::now(&*self.clock);
        let mut state = self.state.lock();
        let found = state.pings.iter().position(|ping| ping.number == number)?;
        let Ping { at, position, under_way, .. } = state.pings.drain(..=found).next_back()?;
        let took = now.since(at);
        let arrived = position.saturating_sub(state.arrived);
        state.arrived = state.arrived.max(position);
        state.shortest = state.shortest.min(took);
        let queued = took.saturating_sub(state.shortest);
        let window = self.window();
        let another = if queued > self.drain {
            // So much arrives in the time that it may take.
            let share = (self.drain + state.shortest).as_secs_f64() / took.as_secs_f64();
            window.min((under_way as f64 * share) as u64)
        } else if queued < self.drain / 2 && under_way >= window / 2 {
            window + arrived
        } else {
            window
        };
        self.window.store(another.clamp(WINDOW_MIN, WINDOW_MAX), Ordering::Relaxed);
        drop(state);
        self.bell.notify_one();
        Some(at)
    }

    /// A ping behind what fills a window that has shrunk, if there is none.
    pub(super) fn follow_up(&self) -> Option<Vec<u8>> {
        let waits = {
            let state = self.state.lock();
            state.pings.is_empty() && state.written - state.arrived >= self.window()
        };
        waits.then(|| self.ping())
    }

    /// For `ferry stats`: bytes under way, and how many may be.
    pub(super) fn figures(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.written - state.arrived, self.window())
    }
}

impl Pace for Flow {
    fn piece(&self) -> Option<usize> {
        let state = self.state.lock();
        let window = self.window();
        let room = state.written - state.arrived < window;
        room.then(|| ((window / PIECES) as usize).clamp(PIECE_MIN, FRAME_MAX))
    }

    fn wrote(&self, bytes: usize) -> Option<Vec<u8>> {
        let due = {
            let mut state = self.state.lock();
            state.written += bytes as u64;
            state.written - state.pinged >= self.window() / PINGS
        };
        due.then(|| self.ping())
    }

    fn left(&self, _bytes: usize, _took: Duration) {}

    fn bell(&self) -> &Notify {
        &self.bell
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::decode;
    use crate::frame::HEAD;

    #[derive(Default)]
    struct Hands(Mutex<Duration>);

    impl Clock for Hands {
        fn monotonic(&self) -> Duration {
            *self.0.lock()
        }
        fn wall(&self) -> Duration {
            self.monotonic()
        }
    }

    /// A line of so many bytes a second with a client at one end: what it writes arrives in order,
    /// and pings are answered at once.
    struct Pipe {
        hands: Arc<Hands>,
        flow: Flow,
        rate: f64,
        delay: Duration,
        /// When it is empty.
        free_at: Duration,
        /// Pings and when their answers arrive.
        answers: VecDeque<(Duration, u64)>,
        worst: Duration,
        carried: u64,
    }

    impl Pipe {
        fn new(rate: f64, delay: Duration) -> Self {
            let hands = Arc::new(Hands::default());
            let flow = Flow::new(hands.clone(), Duration::from_secs(6));
            // The first ping finds nothing before it.
            flow.ping();
            *hands.0.lock() = 2 * delay;
            flow.ponged(1);
            let (free_at, answers, worst) = (Duration::ZERO, VecDeque::new(), Duration::ZERO);
            Self { hands, flow, rate, delay, free_at, answers, worst, carried: 0 }
        }

        fn carry(&mut self, bytes: usize) {
            let now = self.hands.monotonic();
            self.free_at =
                self.free_at.max(now) + Duration::from_secs_f64(bytes as f64 / self.rate);
            self.carried += bytes as u64;
        }

        fn ping(&mut self, ping: &[u8]) {
            let Ok(ToServer::Ping { number }) = decode(&ping[HEAD..]) else {
                panic!("it is a ping")
            };
            self.carry(ping.len());
            let at = self.free_at + 2 * self.delay;
            self.worst = self.worst.max(at - self.hands.monotonic());
            self.answers.push_back((at, number));
        }

        /// Somebody has more to send than is carried for so long.
        fn fill(&mut self, time: Duration) {
            let end = self.hands.monotonic() + time;
            while self.hands.monotonic() < end {
                while let Some(piece) = self.flow.piece() {
                    self.carry(piece);
                    if let Some(ping) = self.flow.wrote(piece) {
                        self.ping(&ping);
                    }
                }
                let (at, number) =
                    self.answers.pop_front().expect("what fills the window has pings in it");
                *self.hands.0.lock() = at.max(self.hands.monotonic());
                self.flow.ponged(number);
                if let Some(ping) = self.flow.follow_up() {
                    self.ping(&ping);
                }
            }
        }
    }

    #[test]
    fn what_is_under_way_arrives_within_a_part_of_the_term() {
        for (kilobytes, bound) in [(25, 1500), (125, 700), (500, 600), (1250, 600), (12500, 600)] {
            let mut pipe = Pipe::new(f64::from(kilobytes) * 1000.0, Duration::from_millis(10));
            pipe.fill(Duration::from_secs(20));
            pipe.worst = Duration::ZERO;
            let carried = pipe.carried;
            pipe.fill(Duration::from_secs(20));
            assert!(
                pipe.worst < Duration::from_millis(bound),
                "{kilobytes} kB/s: {:?}",
                pipe.worst
            );
            let part = (pipe.carried - carried) as f64 / (f64::from(kilobytes) * 20_000.0);
            assert!(part > 0.9, "{kilobytes} kB/s: only {part} of what the line carries");
            assert!(pipe.flow.unanswered_max() as f64 / pipe.rate < 6.0);
        }
    }

    #[test]
    fn a_fast_connection_carries_all_that_may_be_under_way_and_cuts_nothing() {
        let mut pipe = Pipe::new(1e9, Duration::from_millis(10));
        pipe.fill(Duration::from_secs(2));
        assert_eq!(pipe.flow.window(), WINDOW_MAX);
        assert_eq!(pipe.flow.piece(), Some(FRAME_MAX));
    }

    #[test]
    fn the_answer_to_a_later_ping_speaks_for_those_before_it() {
        let flow = Flow::new(Arc::new(Hands::default()), Duration::from_secs(6));
        for bytes in [10, 20, 30] {
            assert_eq!(flow.wrote(bytes), None);
            flow.ping();
        }
        assert!(flow.ponged(2).is_some());
        assert_eq!(flow.figures().0, 30);
        assert!(flow.ponged(1).is_none() && flow.ponged(2).is_none() && flow.ponged(9).is_none());
        assert_eq!(flow.figures().0, 30, "what was not asked is not answered");
    }
}
