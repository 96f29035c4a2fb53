//! [`Standby`]: waits for a volume until its owner has closed it, or is silent.
//!
//! * STANDBY-1: an owner that says so in its claim *beats*: from the claim on it puts an object
//!   each second ([`crate::beats`]). An owner that does not beat may be idle, and is waited for
//!   until it closes the volume.
//! * STANDBY-2: silence is the time between looks that the store has answered, and that found
//!   nothing new. A look without an answer begins it anew: an outage of the store is no silence.
//!   Looks that lie far apart count little: this machine may have slept.
//! * STANDBY-3: a volume is closed if its newest root says so and nobody has claimed it since. Who
//!   has claimed it may be dead before it writes a root: it beats, or is silent, as any owner.
//! * STANDBY-4: a silent owner is named by its epoch, and only from that one the volume is taken:
//!   another one may have it by then.
//! * STANDBY-5: who takes a volume over from a silent owner that lives after all loses nothing and
//!   mixes nothing up: the claim and the fences decide, not the silence ([`crate::volume`]).

use crate::error::ObjectError;
use crate::follow::{Follower, Owned};
use crate::volume::Followed;
use std::time::Duration;

/// An owner that is silent for so long is taken for dead: some heartbeats.
const SILENCE: Duration = Duration::from_secs(4);
/// The pause between two looks.
const LOOK: Duration = Duration::from_millis(500);
/// Bytes of the log's objects in memory, for the moment when the volume is this server's: as much
/// as the log of a file system has.
const REMEMBERED: usize = 64 << 20;

/// What a look has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// Nobody has the volume.
    Closed,
    /// Its owner is silent, though it should beat.
    Silent {
        /// The owner's.
        epoch: u64,
    },
    /// Somebody has it. It is to be looked at again after [`Standby::PAUSE`].
    InUse {
        /// It is silent, and does not beat: whether it lives, only its machine or its user knows.
        may_be_dead: bool,
    },
}

/// How long the owner has been silent, as far as looks tell (STANDBY-2).
#[derive(Debug, Default)]
struct Silence {
    /// When the last look began that was answered.
    looked: Option<Duration>,
    lasts: Duration,
}

impl Silence {
    /// A look begins that may not be answered. Returns when the one before began, if that was.
    fn look(&mut self) -> Option<Duration> {
        self.looked.take()
    }

    /// The look that began then has found something new.
    fn heard(&mut self, begun: Duration) {
        *self = Self { looked: Some(begun), lasts: Duration::ZERO };
    }

    /// It has found nothing new; `before`: what [`Silence::look`] said. Returns whether the silence
    /// lasts long enough.
    fn nothing(&mut self, begun: Duration, before: Option<Duration>) -> bool {
        let Some(before) = before else {
            self.heard(begun);
            return false;
        };
        self.looked = Some(begun);
        self.lasts += begun.saturating_sub(before).min(2 * LOOK);
        self.lasts >= SILENCE
    }
}

/// Stands by for a volume. The module's documentation has the rules.
pub struct Standby {
    follower: Follower,
    owner: Option<Owned>,
    /// The owner's next heartbeat.
    next_beat: u64,
    silence: Silence,
}

impl Standby {
    /// The pause between two looks.
    pub const PAUSE: Duration = LOOK;

    /// For the volume that is followed.
    pub fn new(mut follower: Follower) -> Self {
        follower.remember(REMEMBERED);
        let silence = Silence::default();
        Self { follower, owner: None, next_beat: 0, silence }
    }

    /// Who has the volume, as far as is known.
    pub fn owner(&self) -> Option<&str> {
        self.owner.as_ref().filter(|_| !self.is_closed()).map(|owner| owner.name.as_str())
    }

    /// What was read of the log, for the claim.
    pub fn followed(&self) -> Followed {
        self.follower.followed()
    }

    fn epoch(&self) -> u64 {
        self.owner.as_ref().map_or(0, |owner| owner.epoch)
    }

    /// STANDBY-3.
    fn is_closed(&self) -> bool {
        let (epoch, is_closed) = self.follower.newest();
        is_closed && self.epoch() <= epoch
    }

    /// Looks at the volume once. An error: the store did not answer, or what it has is damaged.
    pub fn look(&mut self) -> Result<Found, ObjectError> {
        let begun = self.follower.now();
        let before = self.silence.look();
        let is_new = self.follower.find_newer(false)?.is_some();
        let (epoch, is_closed) = self.follower.newest();
        let may_be_another = is_closed || epoch > self.epoch();
        let is_new = (may_be_another && self.ask_for_owner()?) | is_new | self.hears_beat()?;
        let is_silent = match is_new {
            true => {
                self.silence.heard(begun);
                false
            }
            // The owner may have another one behind it, or this machine may have slept for longer
            // than heartbeats stay.
            false if self.silence.nothing(begun, before) => {
                self.silence.heard(begun);
                !self.ask_for_owner()? && !self.finds_beat()?
            }
            false => false,
        };
        Ok(match &self.owner {
            _ if self.is_closed() => Found::Closed,
            Some(owner) if is_silent && owner.beats => Found::Silent { epoch: owner.epoch },
            _ => Found::InUse { may_be_dead: is_silent },
        })
    }

    /// Asks who owns the volume. Returns whether that is another one.
    fn ask_for_owner(&mut self) -> Result<bool, ObjectError> {
        let owner = self.follower.owner()?;
        let epoch = owner.as_ref().map_or(0, |owner| owner.epoch);
        let is_another = epoch != self.epoch();
        self.owner = owner;
        if is_another {
            self.next_beat = 0;
            self.finds_beat()?;
        }
        Ok(is_another)
    }

    /// Whether the owner has beaten since the last look.
    fn hears_beat(&mut self) -> Result<bool, ObjectError> {
        let first = self.next_beat;
        if let Some(owner) = self.owner.as_ref().filter(|owner| owner.beats) {
            while self.follower.has_beat(owner.epoch, self.next_beat)? {
                self.next_beat += 1;
            }
        }
        Ok(self.next_beat > first)
    }

    /// The same, of heartbeats of which those in between may be removed.
    fn finds_beat(&mut self) -> Result<bool, ObjectError> {
        let newest = self.follower.newest_beat(self.epoch())?;
        let next = newest.map_or(0, |newest| newest + 1).max(self.next_beat);
        Ok(std::mem::replace(&mut self.next_beat, next) != next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks at these times; `true`: it was answered, and there was nothing new. Returns the time
    /// at which the silence was long enough.
    fn silent_at(looks: &[(u64, bool)]) -> Option<u64> {
        let mut silence = Silence::default();
        silence.heard(Duration::ZERO);
        looks.iter().find_map(|(at, answered)| {
            let before = silence.look();
            let is_silent = *answered && silence.nothing(Duration::from_millis(*at), before);
            is_silent.then_some(*at)
        })
    }

    #[test]
    fn only_answered_looks_tell_of_silence_and_those_far_apart_tell_little() {
        let every = |step: u64, count: u64| (1..=count).map(move |n| (n * step, true));
        let steady: Vec<_> = every(500, 20).collect();
        assert_eq!(silent_at(&steady), Some(4000));
        let mut outage = steady.clone();
        outage[4].1 = false;
        assert_eq!(silent_at(&outage), Some(7000), "it begins anew behind the outage");
        // This machine has slept for an hour between two looks.
        let slept: Vec<_> =
            every(500, 2).chain(every(500, 20).map(|(at, is)| (at + 3_600_000, is))).collect();
        assert_eq!(silent_at(&slept), Some(3_602_500), "an hour counts for a second");
    }
}
