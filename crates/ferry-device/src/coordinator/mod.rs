//! The flush coordinator: everyone at the dock shares one flush; who arrives while it crosses takes the next.
//!
//! `W` counts completed writes. A flush samples `start = W` before it is issued and, when it succeeds, `durable = start`.
//! A caller wants its target (a value of `W` that covers its own writes) to be durable:
//!
//! | situation | what happens |
//! |---|---|
//! | `durable >= target` | it returns at once, without a lock |
//! | a flush is in flight with `start >= target` | it shares that flush |
//! | another flush is in flight | it boards the next one, with all others who do |
//! | none is in flight | it flushes |
//!
//! * C1: one flush is in flight per device.
//! * C2: nobody is told "durable" by a flush that started before his writes completed.
//! * C3: a failed flush advances nothing, and everyone on board gets its error. The error stays: `durable` is a
//!   prefix, what the failed flush covered may be lost (a host reports that once), and a later flush that
//!   succeeds would declare it durable. So everyone who comes later gets the error too.
//! * C4: a lone caller never waits for company.
//! * C5: the fast path takes no lock that all callers share.
//!
//! Who finishes a flush completes its passengers, after it has started the next crossing. A synchronous caller flushes on
//! its own thread, the shortest way there is; when it lands it owes the next crossing nothing but a start:
//! it hands it to a synchronous caller on board, or, with only asynchronous ones, to the device's own thread.
//! A single list of waiters with a generation number would be simpler, but it wakes everyone to look whether he was meant,
//! and a completion that is set up again while others still test it is the race that this design's ancestor had.

mod passenger;

use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering, lock};
use crate::{BlockDevice, Io, IoDone};
use passenger::{Called, Passenger, Seat, same_error};
use std::io;
use std::sync::Arc;

/// A number of completed writes that are to be durable. Comes only from a coordinator, and is meant for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Target(u64);

/// What a coordinator has done. `flushes + shared` callers were answered by a flush.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlushStats {
    /// Flushes sent to the device.
    pub flushes: u64,
    /// Callers answered by a flush that another caller is counted for.
    pub shared: u64,
    /// Callers whose writes were durable already.
    pub at_once: u64,
}

/// A value alone on its cache line, so that changing it disturbs nobody who reads another.
#[repr(align(64))]
struct Line<T>(T);

/// Shares flushes of one device among all who need them. See the module's head for the rules.
pub struct FlushCoordinator {
    device: Arc<dyn BlockDevice>,
    /// `W`.
    written: Line<AtomicU64>,
    durable: Line<AtomicU64>,
    at_once: Line<AtomicU64>,
    dock: Mutex<Dock>,
    #[cfg(test)]
    planted: tests::Planted,
}

/// Who crosses and who waits. Nothing is called with it locked.
#[derive(Default)]
struct Dock {
    /// The flush in flight.
    crossing: Option<Crossing>,
    /// A caller was told to start the next crossing and has not done so yet; people still board.
    departing: bool,
    /// Who takes the next crossing.
    boarding: Vec<Passenger>,
    /// The first flush that failed (C3).
    failed: Option<io::Error>,
    flushes: u64,
    shared: u64,
}

/// A flush in flight.
struct Crossing {
    /// `W` before it was issued.
    start: u64,
    passengers: Vec<Passenger>,
    /// Passengers and the caller that flushes on its own thread.
    callers: u64,
    /// The thread that submits it is not back from the device yet. If the flush ends before, its result is left
    /// here and that thread lands it: else a device that completes within `submit` would land inside of landing,
    /// deeper each time.
    submitting: bool,
    result: Option<io::Result<()>>,
}

/// A crossing that ended: its passengers, to be told.
struct Landed {
    passengers: Vec<Passenger>,
    result: io::Result<()>,
}

/// What the next crossing needs.
enum Next {
    /// Nobody is at the dock.
    Nothing,
    /// This synchronous caller flushes.
    Call(Arc<Seat>),
    /// The crossing has begun: submit its flush.
    Submit,
}

impl Dock {
    fn is_idle(&self) -> bool {
        self.crossing.is_none() && !self.departing
    }

    /// Begins a crossing with all on board.
    fn begin(&mut self, start: u64, captain: bool) {
        debug_assert!(self.crossing.is_none(), "C1");
        let passengers = std::mem::take(&mut self.boarding);
        let callers = passengers.len() as u64 + u64::from(captain);
        self.departing = false;
        self.flushes += 1;
        self.crossing = Some(Crossing { start, passengers, callers, submitting: !captain, result: None });
    }
}

impl Landed {
    fn tell_all(self) {
        for passenger in self.passengers {
            passenger.tell(&self.result);
        }
    }
}

impl FlushCoordinator {
    /// A coordinator for `device`. All flushes of the device are to go through it.
    pub fn new(device: Arc<dyn BlockDevice>) -> Arc<Self> {
        Arc::new(Self {
            device,
            written: Line(AtomicU64::new(0)),
            durable: Line(AtomicU64::new(0)),
            at_once: Line(AtomicU64::new(0)),
            dock: Mutex::new(Dock::default()),
            #[cfg(test)]
            planted: tests::Planted::Nothing,
        })
    }

    /// The device below, for reads and writes.
    pub fn device(&self) -> &Arc<dyn BlockDevice> {
        &self.device
    }

    /// To be called once for each write, after it completed and before anyone who relies on it asks for a target.
    /// Returns a target that covers it, and all that completed before.
    pub fn write_completed(&self) -> Target {
        // Release: whoever samples `W` afterwards flushes after this write completed.
        Target(self.written.0.fetch_add(1, Ordering::AcqRel) + 1)
    }

    /// Covers every write that was reported before.
    pub fn target(&self) -> Target {
        Target(self.written.0.load(Ordering::Acquire))
    }

    /// Calls `done` once all writes that `target` covers are durable: at once, on the thread that ends the flush, or
    /// on one that shares it.
    pub fn flush(self: &Arc<Self>, target: Target, done: IoDone) {
        if self.is_durable(target) {
            self.at_once.0.fetch_add(1, Ordering::Relaxed);
            return done(Ok(()));
        }
        let mut dock = lock(&self.dock);
        if let Some(answer) = self.answer_now(&dock, target) {
            drop(dock);
            return done(answer);
        }
        let idle = dock.is_idle();
        self.board(&mut dock, target, Passenger::Told(done));
        if idle {
            self.start_next(dock, None);
        }
    }

    /// Waits until all writes that `target` covers are durable. With no flush in flight the calling thread does it itself.
    /// Not for completions: on the thread that would end the flush in flight it waits for ever.
    pub fn flush_wait(self: &Arc<Self>, target: Target) -> io::Result<()> {
        if self.is_durable(target) {
            self.at_once.0.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        let mut dock = lock(&self.dock);
        if let Some(answer) = self.answer_now(&dock, target) {
            return answer;
        }
        if dock.is_idle() {
            return self.cross(dock);
        }
        let seat = Arc::new(Seat::default());
        self.board(&mut dock, target, Passenger::Seated(Arc::clone(&seat)));
        drop(dock);
        match seat.wait() {
            Called::Landed(result) => result,
            Called::Flush => self.cross(lock(&self.dock)),
        }
    }

    /// Flushes for one caller alone, beside whatever else is in flight: C1 and the sharing do not hold for it. For
    /// comparison, on devices that answer each flush for itself. After a failure it fails, too (C3).
    pub fn flush_alone(self: &Arc<Self>, done: IoDone) {
        let mut dock = lock(&self.dock);
        if let Some(error) = dock.failed.as_ref().map(same_error) {
            drop(dock);
            return done(Err(error));
        }
        dock.flushes += 1;
        drop(dock);
        let me = Arc::clone(self);
        let ended = move |result: io::Result<()>| {
            let mut dock = lock(&me.dock);
            let result = match (result, &dock.failed) {
                // What this one covered may be what the other one lost.
                (Ok(()), Some(error)) => Err(same_error(error)),
                (Err(error), _) => {
                    me.remember(&mut dock, &error);
                    Err(error)
                }
                (ok, None) => ok,
            };
            drop(dock);
            done(result);
        };
        self.device.submit(vec![Io::Flush { done: Box::new(ended) }]);
    }

    /// What has been done so far.
    pub fn stats(&self) -> FlushStats {
        let dock = lock(&self.dock);
        let at_once = self.at_once.0.load(Ordering::Relaxed);
        FlushStats { flushes: dock.flushes, shared: dock.shared, at_once }
    }

    fn is_durable(&self, target: Target) -> bool {
        self.durable.0.load(Ordering::Acquire) >= target.0
    }

    /// Under the lock: a flush may have landed since the caller looked. Everything durable before a failure stays so.
    fn answer_now(&self, dock: &Dock, target: Target) -> Option<io::Result<()>> {
        if self.is_durable(target) {
            self.at_once.0.fetch_add(1, Ordering::Relaxed);
            return Some(Ok(()));
        }
        dock.failed.as_ref().map(|error| Err(same_error(error)))
    }

    fn board(&self, dock: &mut Dock, target: Target, passenger: Passenger) {
        match &mut dock.crossing {
            Some(crossing) if self.covers(crossing.start, target) => {
                crossing.callers += 1;
                crossing.passengers.push(passenger);
            }
            _ => dock.boarding.push(passenger),
        }
    }

    /// C2.
    fn covers(&self, start: u64, target: Target) -> bool {
        #[cfg(test)]
        if self.planted == tests::Planted::SharesAnyCrossing {
            return true;
        }
        start >= target.0
    }

    /// Flushes on this thread, for the caller and all on board, and starts what comes next.
    fn cross<'a>(self: &'a Arc<Self>, mut dock: MutexGuard<'a, Dock>) -> io::Result<()> {
        dock.begin(self.target().0, true);
        drop(dock);
        let result = self.device.flush();
        let mine = match &result {
            Ok(()) => Ok(()),
            Err(error) => Err(same_error(error)),
        };
        let mut dock = lock(&self.dock);
        let landed = self.land(&mut dock, result);
        self.start_next(dock, Some(landed));
        mine
    }

    /// A submitted flush has ended.
    fn ended(self: &Arc<Self>, result: io::Result<()>) {
        let mut dock = lock(&self.dock);
        let crossing = dock.crossing.as_mut().expect("the crossing that was submitted");
        if crossing.submitting {
            crossing.result = Some(result);
            return;
        }
        let landed = self.land(&mut dock, result);
        self.start_next(dock, Some(landed));
    }

    /// Ends the crossing in flight: makes its start durable, or fails all who are here (C3).
    fn land(&self, dock: &mut Dock, result: io::Result<()>) -> Landed {
        let crossing = dock.crossing.take().expect("a crossing in flight");
        dock.shared += crossing.callers - 1;
        let mut passengers = crossing.passengers;
        match &result {
            // Under the lock, and starts only grow: this never goes back.
            Ok(()) => self.durable.0.store(self.durable_after(crossing.start), Ordering::Release),
            Err(error) => {
                passengers.append(&mut dock.boarding);
                self.remember(dock, error);
            }
        }
        Landed { passengers, result }
    }

    fn durable_after(&self, start: u64) -> u64 {
        #[cfg(test)]
        if self.planted == tests::Planted::SamplesAfterTheFlush {
            return self.target().0;
        }
        start
    }

    fn remember(&self, dock: &mut Dock, error: &io::Error) {
        #[cfg(test)]
        if self.planted == tests::Planted::ForgetsFailures {
            return;
        }
        dock.failed = Some(same_error(error));
    }

    /// With the dock idle: starts the next crossing if anyone is on board, then tells those who landed.
    fn start_next<'a>(self: &'a Arc<Self>, mut dock: MutexGuard<'a, Dock>, mut landed: Option<Landed>) {
        loop {
            let next = self.depart(&mut dock);
            drop(dock);
            let ended = match next {
                Next::Nothing => None,
                Next::Call(seat) => {
                    seat.call(Called::Flush);
                    None
                }
                Next::Submit => self.submit(),
            };
            // The crossing that ended within `submit` still counts as in flight: what these call cannot disturb it.
            if let Some(landed) = landed.take() {
                landed.tell_all();
            }
            let Some(result) = ended else { return };
            dock = lock(&self.dock);
            landed = Some(self.land(&mut dock, result));
        }
    }

    fn depart(&self, dock: &mut Dock) -> Next {
        debug_assert!(dock.is_idle(), "C1");
        #[cfg(test)]
        if self.planted == tests::Planted::LeavesBoardersBehind {
            return if dock.flushes == 0 { self.begin_submitted(dock) } else { Next::Nothing };
        }
        if dock.boarding.is_empty() {
            return Next::Nothing;
        }
        let seated = dock.boarding.iter().position(|passenger| matches!(passenger, Passenger::Seated(_)));
        match seated.map(|at| dock.boarding.swap_remove(at)) {
            Some(Passenger::Seated(seat)) => {
                dock.departing = true;
                Next::Call(seat)
            }
            _ => self.begin_submitted(dock),
        }
    }

    fn begin_submitted(&self, dock: &mut Dock) -> Next {
        dock.begin(self.target().0, false);
        Next::Submit
    }

    /// Submits the flush of the crossing that just began; its result, if it ended already.
    fn submit(self: &Arc<Self>) -> Option<io::Result<()>> {
        let me = Arc::clone(self);
        self.device.submit(vec![Io::Flush { done: Box::new(move |result| me.ended(result)) }]);
        let mut dock = lock(&self.dock);
        let crossing = dock.crossing.as_mut().expect("only the submitting thread lands it");
        let result = crossing.result.take();
        crossing.submitting = result.is_some();
        result
    }
}

#[cfg(test)]
mod tests;
