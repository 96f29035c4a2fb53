//! Callers that do not wait for each other: fsyncs are answered later than they were asked for,
//! while other operations go on, and the device completes its requests late and in any order. So
//! several records of the log are under way together.
//!
//! One thread does it all, so a run stays a function of its seed. It must not wait for a device
//! that waits for it: where room has to be made, or all is asked for, the device catches up first.

use crate::device::{SimDevice, SimRng};
use crate::history::{Guarantee, History};
use crate::ops::{Op, Which};
use crate::world::{Trouble, Waiter, World};
use ferry_fs::{Cx, Filesystem, Ino, Reply, Stop};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Callers that may wait at the same time.
const CALLERS_MAX: usize = 12;
/// How often time passes, at most, until everyone is answered: no policy holds anybody for long.
const PAUSES_MAX: usize = 1000;
/// How much, each time.
const PAUSE: Duration = Duration::from_millis(5);

/// What the device says that a flush takes.
const FLUSH_TIME: Duration = Duration::from_millis(4);

/// How an operation went.
pub(crate) enum Step {
    Done,
    DeviceFailed,
}

/// An fsync that is not answered yet, with what its caller has open.
struct Asked {
    answer: Waiter,
    ino: Ino,
    fh: u64,
    dir: bool,
    /// The handle was there before.
    held: bool,
    caller: u32,
    known: Vec<Ino>,
    guarantee: Guarantee,
}

/// A device that completes requests late, and the callers that wait for it.
pub(crate) struct Overlap {
    pub(crate) device: Arc<SimDevice>,
    pub(crate) rng: SimRng,
    asked: Vec<Asked>,
    /// Callers that do not wait. Those that were answered last come first: they are the first to
    /// return.
    callers: VecDeque<u32>,
}

impl Overlap {
    /// From now on `device` completes requests late.
    pub fn new(device: &Arc<SimDevice>, rng: SimRng) -> Self {
        device.set_hold(true);
        // So slow that a policy that waits for company does.
        device.set_flush_time(FLUSH_TIME);
        let callers = (1..=CALLERS_MAX as u32).collect();
        Self { device: device.clone(), rng, asked: Vec::new(), callers }
    }

    /// As many callers wait as may.
    pub(crate) fn is_full(&self) -> bool {
        self.asked.len() >= CALLERS_MAX
    }

    /// The device completes one request.
    pub(crate) fn complete_one(
        &mut self,
        world: &World,
        history: &mut History,
    ) -> Result<(), Trouble> {
        let held = self.device.held();
        if held > 0 {
            self.device.release(self.rng.index(held));
        }
        self.collect(world, history)
    }

    /// Takes the answers that have come.
    fn collect(&mut self, world: &World, history: &mut History) -> Result<(), Trouble> {
        let mut result = Ok(());
        let now = self.device.trace_len();
        let mut at = 0;
        while let Some(asked) = self.asked.get(at) {
            let Some(answer) = asked.answer.0.lock().take() else {
                at += 1;
                continue;
            };
            let asked = self.asked.remove(at);
            self.callers.push_front(asked.caller);
            match answer {
                Ok(Reply::Empty) => history.answered(asked.guarantee.clone(), now),
                Ok(_) => {
                    result =
                        Err(Trouble::Wrong("an fsync got the answer of another request".into()))
                }
                Err(errno) => result = Err(errno.into()),
            }
            result = result.and(asked.end(world));
        }
        result
    }

    /// Completes everything, and lets time pass, until all are answered. Then the device is prompt,
    /// until `resume`.
    pub(crate) fn catch_up(&mut self, world: &World, history: &mut History) -> Result<(), Trouble> {
        while self.device.held() > 0 {
            self.complete_one(world, history)?;
        }
        self.device.set_hold(false);
        for _ in 0..PAUSES_MAX {
            self.collect(world, history)?;
            if self.asked.is_empty() {
                return Ok(());
            }
            world.clock.advance(PAUSE);
            world.fs.tick().map_err(|error| Trouble::Errno(error.errno().0))?;
        }
        Err(Trouble::Wrong(format!(
            "{} fsyncs are not answered although all is done",
            self.asked.len()
        )))
    }

    pub(crate) fn resume(&self) {
        self.device.set_hold(true);
    }

    /// Completes everything and ends. `faulty`: the device may have failed, and somebody may hear
    /// it only now.
    pub fn settle(
        mut self,
        world: &World,
        history: &mut History,
        faulty: bool,
    ) -> Result<Step, String> {
        let step = judge(self.catch_up(world, history), faulty)?;
        if let Step::DeviceFailed = step {
            self.abandon(world, history);
        }
        Ok(step)
    }

    /// The device has failed: what is under way ends somehow, and a caller that is told "done"
    /// relies on it.
    pub fn abandon(mut self, world: &World, history: &mut History) {
        while self.device.held() > 0 {
            // One after the other hears of the failure.
            drop(self.complete_one(world, history));
        }
        self.device.set_hold(false);
        drop(self.collect(world, history));
    }

    /// Asks for an fsync; `None` if it was answered at once.
    pub(crate) fn ask(
        &mut self,
        world: &World,
        op: &Op,
        guarantee: Guarantee,
    ) -> Result<Option<Guarantee>, Trouble> {
        let fs = &world.fs;
        let mut known = Vec::new();
        let (ino, fh, held) = match op {
            Op::Fsync(Which::Held(slot), _) => {
                let (ino, fh) =
                    world.held[usize::from(*slot)].expect("the model knows which handles are held");
                (ino, fh, true)
            }
            Op::Fsync(Which::At(path), _) => {
                let ino = world.walk(path, &mut known)?;
                (ino, world.now(|cx| fs.open(cx, ino, libc::O_RDWR, false))?.fh, false)
            }
            Op::FsyncDir(path) => {
                let ino = world.walk(path, &mut known)?;
                (ino, world.now(|cx| fs.opendir(cx, ino))?.fh, false)
            }
            _ => unreachable!("only fsyncs come here"),
        };
        let dir = matches!(op, Op::FsyncDir(_));
        let caller = *self.callers.front().expect("not all of them wait");
        let asked =
            Asked { answer: Waiter::default(), ino, fh, dir, held, caller, known, guarantee };
        let cx = Cx { uid: 0, gid: 0, pid: caller, umask: 0, park: &asked.answer };
        let data_only = matches!(op, Op::Fsync(_, true));
        let answer =
            if dir { fs.fsyncdir(&cx, ino, fh, false) } else { fs.fsync(&cx, ino, fh, data_only) };
        match answer {
            Err(Stop::Parked) => {
                self.callers.pop_front();
                self.asked.push(asked);
                Ok(None)
            }
            Ok(()) => {
                let guarantee = asked.guarantee.clone();
                asked.end(world).map(|()| Some(guarantee))
            }
            Err(Stop::Errno(errno)) => {
                drop(asked.end(world));
                Err(errno.into())
            }
        }
    }
}

impl Asked {
    /// Closes what was open for it.
    fn end(self, world: &World) -> Result<(), Trouble> {
        let fs = &world.fs;
        let mut closed = Ok(());
        if self.dir {
            world.tell(|cx| fs.releasedir(cx, self.ino, self.fh));
        } else if !self.held {
            closed = world.done(|cx| fs.flush(cx, self.ino, self.fh, 0));
            world.tell(|cx| fs.release(cx, self.ino, self.fh));
        }
        world.forget(&self.known);
        closed
    }
}

/// An error of a device that was made to fail ends the life; any other is a failure.
pub(crate) fn judge(result: Result<(), Trouble>, faulty: bool) -> Result<Step, String> {
    match result {
        Ok(()) => Ok(Step::Done),
        Err(Trouble::Errno(libc::EIO | libc::EROFS) | Trouble::Close(libc::EIO)) if faulty => {
            Ok(Step::DeviceFailed)
        }
        Err(trouble) => Err(format!("an fsync that was under way: {trouble:?}")),
    }
}
