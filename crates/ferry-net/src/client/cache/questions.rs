//! Requests for write leases: which make sense, and what is done with their answers.

use ferry_fs::{Attr, Ino, Timestamp};

use super::state::{Cache, State};
use crate::client::clock_reading::ClockReading;
use crate::message::Held;

impl State {
    /// Whether it makes sense to ask for these leases.
    pub(in crate::client) fn may_ask(&self, inos: &[Ino], now: ClockReading) -> bool {
        let calm = |ino| self.asking.lost.get(ino).is_none_or(|(at, calm)| now.since(*at) >= *calm);
        self.is_valid(now) && inos.iter().all(calm)
    }

    /// Leases are about to be asked for; gives the number of the question.
    pub(in crate::client) fn ask(&mut self, inos: &[Ino]) -> u64 {
        let version = self.version();
        self.asking.next += 1;
        let number = self.asking.next;
        self.asking.under_way.insert(number, (version, inos.to_vec()));
        number
    }

    /// A question is answered. Gives what is not held nevertheless, and is to be returned.
    pub(in crate::client) fn granted(
        &mut self,
        question: u64,
        held: &[Held],
        now: ClockReading,
    ) -> Vec<Ino> {
        let (version, asked) = self.asking.under_way.remove(&question).unwrap_or_default();
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
            let fresh = slot.changing == 0 && slot.begun <= version.event;
            let withdrawn = self.kernel_cached.is_withdrawn(attr.ino);
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

    /// These are dropped: the server wants them back (`wanted`), or they are not needed.
    /// To be called before the server is told, and [`State::given_back`] behind it, without
    /// unlocking in between. If the kernel has something to forget first, they are withdrawn
    /// instead, and this is called again behind that.
    pub(in crate::client) fn recall(&mut self, inos: &[Ino], wanted: bool, now: ClockReading) {
        self.returns += 1;
        self.asking.forget(inos);
        self.walks.leave_out(inos);
        for ino in inos {
            self.kernel_cached.forget(*ino, wanted, now.monotonic);
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
    pub(in crate::client) fn drop_held(&mut self, now: ClockReading) -> Vec<Ino> {
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
        self.returns += 1;
    }
}

impl Cache {
    /// A question will not be answered.
    pub(in crate::client) fn unanswered(&self, question: u64) {
        self.state.lock().asking.under_way.remove(&question);
    }
}
