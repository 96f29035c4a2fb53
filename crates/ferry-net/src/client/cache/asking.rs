//! Write leases that were asked for, and what comes of it.
//!
//! What is returned while an answer is on its way is not taken from that answer: the server may
//! have taken it back already, or will.

use crate::rt::collections::HashMap;
use std::time::Duration;

use ferry_fs::Ino;

use super::version::CacheVersion;
use crate::client::clock_reading::ClockReading;

/// A lease that somebody else wanted is not asked for again for so long,
const CALM: Duration = Duration::from_millis(100);
/// or twice as long each time that it is lost again soon, so many times: giving it back waits for
/// the device.
const DOUBLED_MAX: u32 = 6;
/// Inodes of which that is remembered.
const RECENT_MAX: usize = 4096;

/// Requests for leases in flight, and leases that were lost to others.
#[derive(Default)]
pub(super) struct Asking {
    pub(super) next: u64,
    /// The inodes that were asked for and not returned since.
    pub(super) under_way: HashMap<u64, (CacheVersion, Vec<Ino>)>,
    /// When, and how long they are not asked for.
    pub(super) lost: HashMap<Ino, (ClockReading, Duration)>,
    pub(super) granted: u64,
}

impl Asking {
    /// These are returned.
    pub(super) fn forget(&mut self, inos: &[Ino]) {
        for (_, asked) in self.under_way.values_mut() {
            asked.retain(|ino| !inos.contains(ino));
        }
    }

    pub(super) fn forget_all(&mut self) {
        self.under_way.values_mut().for_each(|(_, asked)| asked.clear());
    }

    pub(super) fn lost(&mut self, ino: Ino, now: ClockReading) {
        let soon = |(at, calm): (ClockReading, Duration)| now.since(at) < 4 * calm;
        if self.lost.len() >= RECENT_MAX {
            self.lost.retain(|_, lost| soon(*lost));
        }
        let before = self.lost.get(&ino).copied().filter(|lost| soon(*lost));
        let calm = before.map_or(CALM, |(_, calm)| (2 * calm).min(CALM * (1 << DOUBLED_MAX)));
        if self.lost.len() < RECENT_MAX || before.is_some() {
            self.lost.insert(ino, (now, calm));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_that_is_lost_again_and_again_is_left_alone_for_longer() {
        let mut asking = Asking::default();
        let mut now = Duration::ZERO;
        let mut lose = |asking: &mut Asking, after: Duration| {
            now += after;
            asking.lost(7, ClockReading::at(now));
            asking.lost[&7].1
        };
        assert_eq!(lose(&mut asking, CALM), CALM);
        let mut calm = CALM;
        for _ in 0..DOUBLED_MAX {
            assert_eq!(lose(&mut asking, calm), 2 * calm);
            calm *= 2;
        }
        assert_eq!(lose(&mut asking, calm), calm, "not without end");
        assert_eq!(lose(&mut asking, 4 * calm), CALM, "it was quiet for a while");
    }
}
