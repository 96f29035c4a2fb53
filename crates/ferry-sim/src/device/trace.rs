//! What a device was asked to do, and what a crash in between may leave of it.
//!
//! A change is *issued* (from then on it may reach the medium) and later *completed*. A flush that
//! *began* after a change completed, and *ended* well, makes it durable. At a crash every durable
//! change is there; of the others, any may be there, be lost, or be there in part, sector by
//! sector. Changes that a failed flush covered stay uncertain for good: a host reports such a
//! failure once and then forgets it.

use super::image::{Image, SECTORS};
use super::world::SimRng;
use ferry_device::{AlignedBuf, BLOCK_SIZE};
use std::ops::Range;
use std::sync::Arc;

/// A change of the contents; ranges are in blocks.
#[derive(Clone)]
pub(super) enum Change {
    Write { first: u64, buf: Arc<AlignedBuf> },
    Discard { blocks: Range<u64> },
}

impl Change {
    pub fn apply(&self, image: &mut Image) {
        match self {
            Self::Write { first, buf } => image.write(*first, buf),
            Self::Discard { blocks } => image.discard(blocks.clone()),
        }
    }

    fn blocks(&self) -> Range<u64> {
        match self {
            Self::Write { first, buf } => *first..*first + (buf.len() / BLOCK_SIZE) as u64,
            Self::Discard { blocks } => blocks.clone(),
        }
    }

    /// Applies some of its sectors.
    fn apply_torn(&self, image: &mut Image, rng: &mut SimRng) {
        let blocks = self.blocks().count();
        for (n, block) in self.blocks().enumerate() {
            let new = match self {
                Self::Write { buf, .. } => Some(&buf[n * BLOCK_SIZE..(n + 1) * BLOCK_SIZE]),
                Self::Discard { .. } => None,
            };
            // Most blocks of a long write are there or not; some are torn themselves.
            let sectors = match rng.below(if blocks == 1 { 1 } else { 3 }) {
                0 => rng.next_u64() as u8,
                1 => 0,
                _ => u8::MAX,
            };
            if sectors != 0 {
                image.write_torn(block, new, sectors);
            }
        }
    }
}

const _: () = assert!(SECTORS == u8::BITS as usize, "one bit for each sector of a block");

/// One step of the device's life. Numbers are indices of changes and flushes, which are counted as
/// they are issued and begin.
enum Event {
    Issued,
    Completed(usize),
    FlushBegan,
    FlushEnded { flush: usize, effect: FlushEffect },
}

/// What a flush did to the changes that it covered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FlushEffect {
    /// They are durable.
    Durable,
    /// It failed, and they are uncertain for good.
    Doomed,
    /// Nothing, although it said otherwise.
    Nothing,
}

/// How a change stands at some point of the trace.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Standing {
    InFlight,
    Completed,
    Durable,
    Doomed,
}

/// Everything since the trace began.
#[derive(Default)]
pub(super) struct Trace {
    changes: Vec<Change>,
    events: Vec<Event>,
    flushes: usize,
}

impl Trace {
    pub fn len(&self) -> usize {
        self.events.len()
    }

    pub fn issue(&mut self, change: Change) -> usize {
        self.changes.push(change);
        self.events.push(Event::Issued);
        self.changes.len() - 1
    }

    pub fn complete(&mut self, change: usize) -> &Change {
        self.events.push(Event::Completed(change));
        &self.changes[change]
    }

    pub fn begin_flush(&mut self) -> usize {
        self.events.push(Event::FlushBegan);
        self.flushes += 1;
        self.flushes - 1
    }

    pub fn end_flush(&mut self, flush: usize, effect: FlushEffect) {
        self.events.push(Event::FlushEnded { flush, effect });
    }

    /// Just before and just after the end of each flush that said it was well.
    pub fn flush_points(&self) -> Vec<usize> {
        let ended = |event: &Event| matches!(event, Event::FlushEnded { effect, .. } if *effect != FlushEffect::Doomed);
        let ends = (0..self.events.len()).filter(|&at| ended(&self.events[at]));
        let mut points: Vec<_> = ends.flat_map(|at| [at, at + 1]).collect();
        points.dedup();
        points
    }

    /// How each change issued before `point` stands there.
    fn standings(&self, point: usize) -> Vec<Standing> {
        let mut standings = Vec::new();
        // For each flush, the changes that it covers.
        let mut covered: Vec<Vec<usize>> = Vec::new();
        let mut completed = Vec::new();
        for event in &self.events[..point] {
            match event {
                Event::Issued => standings.push(Standing::InFlight),
                Event::Completed(change) => {
                    standings[*change] = Standing::Completed;
                    completed.push(*change);
                }
                Event::FlushBegan => covered.push(completed.clone()),
                Event::FlushEnded { effect: FlushEffect::Nothing, .. } => {}
                Event::FlushEnded { flush, effect } => {
                    let standing = match effect {
                        FlushEffect::Doomed => Standing::Doomed,
                        _ => Standing::Durable,
                    };
                    for &change in &covered[*flush] {
                        if standings[change] == Standing::Completed {
                            standings[change] = standing;
                        }
                    }
                    completed.retain(|&change| standings[change] == Standing::Completed);
                }
            }
        }
        standings
    }

    /// Makes of `image`, the contents before the trace, what a crash at `point` might leave.
    pub fn crash(&self, point: usize, image: &mut Image, rng: &mut SimRng) {
        let standings = self.standings(point);
        let last_volatile = standings.iter().rposition(|&standing| standing != Standing::Durable);
        let fate = Fate::choose(rng);
        // In the order of issue: of two changes of one block the later one wins, if it survives.
        // (The order of two that are in flight at once is not defined; a caller that issues such a
        // pair has lost already.)
        for (n, standing) in standings.into_iter().enumerate() {
            let survival = match standing {
                Standing::Durable => Survival::Whole,
                _ => fate.of_one(Some(n) == last_volatile, rng),
            };
            match survival {
                Survival::Whole => self.changes[n].apply(image),
                Survival::Lost => {}
                Survival::Torn => self.changes[n].apply_torn(image, rng),
            }
        }
    }
}

/// The kinds of crash. Some of each are wanted: with every change deciding for itself, the extremes
/// would hardly come up.
#[derive(Clone, Copy)]
enum Fate {
    AllLost,
    AllKept,
    AllKeptButLastTorn,
    Mixed,
    MixedAndTorn,
}

enum Survival {
    Whole,
    Lost,
    Torn,
}

impl Fate {
    fn choose(rng: &mut SimRng) -> Self {
        use Fate::*;
        *rng.pick(&[
            AllLost,
            AllKept,
            AllKeptButLastTorn,
            Mixed,
            Mixed,
            MixedAndTorn,
            MixedAndTorn,
            MixedAndTorn,
        ])
    }

    fn of_one(self, last: bool, rng: &mut SimRng) -> Survival {
        match self {
            Self::AllLost => Survival::Lost,
            Self::AllKeptButLastTorn if last => Survival::Torn,
            Self::AllKept | Self::AllKeptButLastTorn => Survival::Whole,
            Self::Mixed if last => Survival::Torn,
            Self::Mixed => {
                if rng.chance(1, 2) {
                    Survival::Whole
                } else {
                    Survival::Lost
                }
            }
            Self::MixedAndTorn => match rng.below(3) {
                0 => Survival::Whole,
                1 => Survival::Lost,
                _ => Survival::Torn,
            },
        }
    }
}
