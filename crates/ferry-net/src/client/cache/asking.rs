//! Write leases that were asked for, and what comes of it.
//!
//! What is given back while an answer is on its way is not taken from that answer: the server may
//! have taken it back already, or will.

use crate::rt::collections::HashMap;
use std::time::Duration;

use ferry_fs::{Attr, Ino, Timestamp};

use super::{Cache, Moment, Sight, State};
use crate::message::Held;

/// A lease that somebody else wanted is not asked for again for so long,
const CALM: Duration = Duration::from_millis(100);
/// or twice as long each time that it is lost again soon, so many times: giving it back waits for
/// the device.
const DOUBLED_MAX: u32 = 6;
/// Inodes of which that is remembered.
const RECENT_MAX: usize = 4096;

/// Requests for leases under way, and leases that were lost to others.
#[derive(Default)]
pub(super) struct Asking {
    next: u64,
    /// The inodes that were asked for and not given back since.
    under_way: HashMap<u64, (Sight, Vec<Ino>)>,
    /// When, and how long they are not asked for.
    lost: HashMap<Ino, (Moment, Duration)>,
    pub(super) granted: u64,
}

impl Asking {
    /// These are given back.
    fn forget(&mut self, inos: &[Ino]) {
        for (_, asked) in self.under_way.values_mut() {
            asked.retain(|ino| !inos.contains(ino));
        }
    }

    pub(super) fn forget_all(&mut self) {
        self.under_way.values_mut().for_each(|(_, asked)| asked.clear());
    }

    fn lost(&mut self, ino: Ino, now: Moment) {
        let soon = |(at, calm): (Moment, Duration)| now.since(at) < 4 * calm;
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

impl State {
    /// Whether it makes sense to ask for these leases.
    pub(in crate::client) fn may_ask(&self, inos: &[Ino], now: Moment) -> bool {
        let calm = |ino| self.asking.lost.get(ino).is_none_or(|(at, calm)| now.since(*at) >= *calm);
        self.is_valid(now) && inos.iter().all(calm)
    }

    /// Leases are about to be asked for; gives the number of the question.
    pub(in crate::client) fn ask(&mut self, inos: &[Ino]) -> u64 {
        let sight = self.sight();
        self.asking.next += 1;
        let number = self.asking.next;
        self.asking.under_way.insert(number, (sight, inos.to_vec()));
        number
    }

    /// A question is answered. Gives what is not held nevertheless, and is to be given back.
    pub(in crate::client) fn granted(
        &mut self,
        question: u64,
        held: &[Held],
        now: Moment,
    ) -> Vec<Ino> {
        let (sight, asked) = self.asking.under_way.remove(&question).unwrap_or_default();
        for ino in asked.iter().filter(|ino| !held.iter().any(|held| held.attr.ino == **ino)) {
            self.asking.lost(*ino, now);
        }
        let mut refused = Vec::new();
        for Held { attr, plain } in held {
            if self.model.holds(attr.ino) {
                continue;
            }
            let slot = *self.slot(attr.ino);
            // The server has answered behind those that began before.
            let fresh = slot.changing == 0 && slot.begun <= sight.moment;
            let withdrawn = self.shown.is_withdrawn(attr.ino);
            if !fresh || withdrawn || !asked.contains(&attr.ino) || !self.is_valid(now) {
                refused.push(attr.ino);
                continue;
            }
            self.hold(*attr, *plain);
        }
        refused
    }

    /// A write lease was granted: what is known becomes the model's.
    pub(super) fn hold(&mut self, attr: Attr, plain: bool) {
        let names = self.nodes.remove(&attr.ino).map(|node| node.names).unwrap_or_default();
        self.names -= names.len();
        self.model.enter(attr, plain, names);
        self.asking.granted += 1;
    }

    /// These are no longer kept, for the server wants them back (`wanted`), or they are not needed.
    /// To be called before the server is told, and [`State::given_back`] behind it, without
    /// unlocking in between. If the kernel has something to forget first, they are withdrawn
    /// instead, and this is called again behind that.
    pub(in crate::client) fn recall(&mut self, inos: &[Ino], wanted: bool, now: Moment) {
        self.epoch += 1;
        self.asking.forget(inos);
        self.walks.leave_out(inos);
        for ino in inos {
            self.shown.forget(*ino, wanted, now.monotonic);
            self.drop_node(*ino);
            let held = self.model.drop(*ino);
            if wanted {
                self.recalled += 1;
                if held {
                    self.asking.lost(*ino, now);
                }
            }
        }
    }

    /// All write leases are given up, and with them what was decided under them.
    pub(in crate::client) fn drop_held(&mut self, now: Moment) -> Vec<Ino> {
        self.drop_all(now)
    }

    /// How inodes are at the server when all of our changes of them are made; gives those that were
    /// not decided so.
    pub(in crate::client) fn settle(&mut self, attrs: &[Attr]) -> Vec<Ino> {
        let mut differing = Vec::new();
        for theirs in attrs {
            let Some(ours) = self.model.attr(theirs.ino) else { continue };
            let inexact = |attr: Attr| Attr { blocks: 0, atime: Timestamp(0), ..attr };
            if inexact(ours) == inexact(*theirs) {
                self.model.learn_blocks(theirs.ino, theirs.blocks);
            } else {
                differing.push(theirs.ino);
            }
        }
        differing
    }

    /// The server was told.
    pub(in crate::client) fn given_back(&mut self) {
        self.epoch += 1;
    }
}

impl Cache {
    /// A question will not be answered.
    pub(in crate::client) fn unanswered(&self, question: u64) {
        self.state.lock().asking.under_way.remove(&question);
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
            asking.lost(7, Moment::at(now));
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
