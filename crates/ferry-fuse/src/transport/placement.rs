//! Which core the thread of a queue runs on.
//!
//! A program that waits for each answer leaves its core to the thread that serves it: on the same
//! core nothing else has to be woken. A program that has many reads under way goes on meanwhile.
//! Its requests all come through the queue of its own core, so the two would share one core while
//! the others are idle. So a thread with many reads under way, more than those of other cores, runs
//! on the other cores (`docs/decisions.md` has the figures).

use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// With so many reads under way on average, the thread leaves its core.
const MANY: u32 = 7;
/// With fewer than so many, it comes back.
const FEW: u32 = 4;
/// The average is one over so many turns of the thread, about; it decides as often.
const TURNS: u32 = 64;

/// Reads under way in each queue of a mount, on average, times [`TURNS`].
#[derive(Clone)]
pub(crate) struct Loads(Arc<[Load]>);

/// Each in a cache line of its own: its thread writes it often, the others read it now and then.
#[derive(Default)]
#[repr(align(64))]
struct Load(AtomicU32);

impl Loads {
    pub(crate) fn new(queues: u16) -> Self {
        Self((0..queues).map(|_| Load::default()).collect())
    }

    /// The mean of all queues but this one.
    fn of_others(&self, queue: usize) -> u32 {
        let others = self.0.iter().enumerate().filter(|(other, _)| *other != queue);
        let sum: u32 = others.map(|(_, load)| load.0.load(Ordering::Relaxed)).sum();
        sum / (self.0.len() as u32 - 1).max(1)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cores {
    /// The one whose queue the thread serves.
    Own,
    /// All others that the process may use.
    Others,
}

/// When to move.
struct Mover {
    cores: Cores,
    /// Reads under way, on average, times [`TURNS`].
    average: u32,
    /// Since the last decision.
    turns: u32,
}

impl Mover {
    const fn new() -> Self {
        Self { cores: Cores::Own, average: 0, turns: 0 }
    }

    /// A turn has ended. `others`: the average of the other queues. Returns where the thread has to
    /// go now.
    fn end_turn(&mut self, reads: usize, others: impl Fn() -> u32) -> Option<Cores> {
        let reads = u32::try_from(reads).unwrap_or(u32::MAX).min(1 << 16);
        self.average = self.average - self.average / TURNS + reads;
        self.turns += 1;
        if self.turns < TURNS {
            return None;
        }
        self.turns = 0;
        self.cores = match self.cores {
            Cores::Own if self.average >= MANY * TURNS && others() * 4 <= self.average => {
                Cores::Others
            }
            Cores::Others if self.average < FEW * TURNS || others() * 2 > self.average => {
                Cores::Own
            }
            Cores::Own | Cores::Others => return None,
        };
        Some(self.cores)
    }
}

/// The calling thread's cores.
pub(super) struct Placement {
    queue: usize,
    loads: Loads,
    own: CpuSet,
    /// `None`: the process may use no other core.
    others: Option<CpuSet>,
    mover: Mover,
}

impl Placement {
    /// Pins the calling thread to the core of its queue.
    pub(super) fn enter(queue: usize, loads: Loads) -> rustix::io::Result<Self> {
        if queue >= CpuSet::MAX_CPU {
            return Err(Errno::INVAL);
        }
        let mut others = sched_getaffinity(None)?;
        others.unset(queue);
        let mut own = CpuSet::new();
        own.set(queue);
        sched_setaffinity(None, &own)?;
        let others = (others.count() > 0).then_some(others);
        Ok(Self { queue, loads, own, others, mover: Mover::new() })
    }

    /// Pins the thread to the core of its queue again, where it stays; `false`: that is not
    /// possible.
    pub(super) fn stay(&mut self) -> bool {
        self.others = None;
        sched_setaffinity(None, &self.own).is_ok()
    }

    /// The thread has served what came, and has so many reads under way.
    pub(super) fn end_turn(&mut self, reads: usize) {
        let Some(others) = &self.others else { return };
        let moves = self.mover.end_turn(reads, || self.loads.of_others(self.queue));
        // A queue that has nothing to do has no turns in which its average would fall.
        let load = if reads == 0 { 0 } else { self.mover.average };
        self.loads.0[self.queue].0.store(load, Ordering::Relaxed);
        let moved = match moves {
            None => return,
            Some(Cores::Own) => sched_setaffinity(None, &self.own),
            Some(Cores::Others) => sched_setaffinity(None, others),
        };
        if let Err(error) = moved {
            tracing::debug!(%error, "cannot move a FUSE queue's thread to another core");
            self.others = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Turns until the thread moves, at most so many.
    fn turns(mover: &mut Mover, reads: usize, others: u32, most: u32) -> Option<u32> {
        (1..=most).find(|_| mover.end_turn(reads, || others * TURNS).is_some())
    }

    #[test]
    fn a_thread_leaves_its_core_while_many_reads_are_under_way() {
        let mut mover = Mover::new();
        assert_eq!(turns(&mut mover, 6, 0, 10_000), None, "too few");
        assert!(turns(&mut mover, 16, 0, 2 * TURNS).is_some());
        assert_eq!(mover.cores, Cores::Others);
        assert_eq!(turns(&mut mover, 5, 0, 10_000), None, "still enough");
        assert!(turns(&mut mover, 1, 0, 4 * TURNS).is_some());
        assert_eq!(mover.cores, Cores::Own);
    }

    #[test]
    fn a_thread_stays_while_other_cores_have_as_much_to_do() {
        let mut mover = Mover::new();
        assert_eq!(turns(&mut mover, 16, 16, 10_000), None);
        assert!(turns(&mut mover, 16, 2, 2 * TURNS).is_some());
        assert!(turns(&mut mover, 16, 20, 2 * TURNS).is_some(), "it comes back");
        assert_eq!(mover.cores, Cores::Own);
    }

    #[test]
    fn a_burst_moves_nothing_and_moves_are_rare() {
        let mut mover = Mover::new();
        for _ in 0..1000 {
            assert_eq!(turns(&mut mover, 100, 0, 3), None, "three turns are a burst");
            assert_eq!(turns(&mut mover, 0, 0, 4 * TURNS), None);
        }
        assert!(turns(&mut mover, 64, 0, 2 * TURNS).is_some());
        for reads in [0, 64].into_iter().cycle().take(100) {
            let moved = turns(&mut mover, reads, 0, 100 * TURNS);
            assert!(moved.is_some_and(|turns| turns >= TURNS), "{moved:?}");
        }
    }

    #[test]
    fn a_thread_that_may_use_one_core_stays_there() {
        let one = std::thread::spawn(|| {
            let allowed = sched_getaffinity(None).expect("the thread's cores");
            let core = (0..CpuSet::MAX_CPU).find(|core| allowed.is_set(*core)).expect("one");
            let mut own = CpuSet::new();
            own.set(core);
            sched_setaffinity(None, &own).expect("pins");
            let loads = Loads::new(core as u16 + 1);
            let mut placement = Placement::enter(core, loads).expect("pins");
            (0..10 * TURNS).for_each(|_| placement.end_turn(100));
            sched_getaffinity(None).expect("the thread's cores") == own
        });
        assert!(one.join().expect("no panic"));
    }

    #[test]
    fn the_load_of_other_queues_is_their_mean() {
        let loads = Loads::new(3);
        for (queue, load) in [(0, 10), (1, 30), (2, 50)] {
            loads.0[queue].0.store(load, Ordering::Relaxed);
        }
        assert_eq!((loads.of_others(0), loads.of_others(2)), (40, 20));
        assert_eq!(Loads::new(1).of_others(0), 0);
    }
}
