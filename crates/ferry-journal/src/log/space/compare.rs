//! Other ways to serve those who wait for log space, which benchmarks compare.
//!
//! With `flag` and `all` a release wakes the waiters that there is room for, and each takes its
//! space itself when it runs. Until then it stays in its queue, and the next release wakes it again
//! (`all`) or looks at it again (`flag`). A woken waiter takes only what no waiter before it in the
//! queues needs, so these are first come, first served, too.

use super::{BARGES_MAX, NoGrant, Queues, Space, State, Taker, Waiter};
use crate::sync::{Arc, Ordering};

/// How waiters for log space are served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wake {
    /// Each is woken once, with its space in hand; a running thread may take free space before it,
    /// a bounded number of times.
    #[default]
    Barging,
    /// Each is woken once, with its space in hand, in strict order.
    Handoff,
    /// Each that there is room for, unless it is awake already; it takes its space itself.
    Flag,
    /// Each that there is room for, awake or not; it takes its space itself.
    All,
}

impl Wake {
    /// Every way.
    pub const WAYS: [Self; 4] = [Self::Barging, Self::Handoff, Self::Flag, Self::All];

    /// The name of the way in options.
    pub fn name(self) -> &'static str {
        match self {
            Self::Barging => "barging",
            Self::Handoff => "handoff",
            Self::Flag => "flag",
            Self::All => "all",
        }
    }

    /// Whether nobody is passed by one who came later.
    pub fn is_strict(self) -> bool {
        self != Self::Barging
    }

    /// Whether a waiter is woken once, with its space in hand.
    pub fn grants(self) -> bool {
        matches!(self, Self::Barging | Self::Handoff)
    }
}

impl std::fmt::Display for Wake {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Wake {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        let found = Self::WAYS.into_iter().find(|way| way.name() == word);
        found.ok_or_else(|| {
            format!("{word:?} is not a way to wake: use barging, handoff, flag or all")
        })
    }
}

impl Space {
    /// The same space with another way to serve waiters. Nobody waits yet.
    pub fn with(mut self, wake: Wake) -> Self {
        self.barges_max = if wake == Wake::Barging { BARGES_MAX } else { 0 };
        self.wake = wake;
        self
    }

    /// Wakes all waiters that there is room for, if this is the way; `false`: it is not.
    pub(super) fn rouses(&self, queues: &Queues) -> bool {
        match self.wake {
            Wake::Barging | Wake::Handoff => return false,
            Wake::Flag => self.rouse(queues, true),
            Wake::All => self.rouse(queues, false),
        }
        true
    }

    /// Wakes all waiters that there is room for; with `once`, except those that are awake.
    fn rouse(&self, queues: &Queues, once: bool) {
        loop {
            let free = self.free();
            let mut left = free;
            for (waiter, urgent) in queues.in_turn() {
                if left < waiter.bytes + self.floor(urgent) {
                    break;
                }
                left -= waiter.bytes;
                self.wakes.fetch_add(u64::from(waiter.rouse(once)), Ordering::Relaxed);
            }
            if self.publish(queues, false).free() <= free {
                return;
            }
        }
    }

    /// A roused waiter takes its bytes if there are enough for it and for all waiters before it.
    pub(super) fn take_own(&self, waiter: &Arc<Waiter>, urgent: bool) -> bool {
        let mut queues = self.queues.lock().expect("no holder panics");
        let Some(before) = queues.before(waiter) else {
            // Its wait has ended meanwhile.
            return false;
        };
        let floor = || before + self.floor(urgent);
        let Some(left) = self.deduct(waiter.bytes, floor, Taker::Served) else {
            return false;
        };
        queues.remove(waiter);
        self.grants.fetch_add(1, Ordering::Relaxed);
        // A release since then may have looked at what the first waiter needed before.
        if self.publish(&queues, false).free() > left.free() {
            self.pass(&mut queues);
        }
        true
    }
}

impl Queues {
    /// Bytes that the waiters before `waiter` need, if it is in a queue.
    fn before(&self, waiter: &Arc<Waiter>) -> Option<u64> {
        let mut bytes = 0;
        for (w, _) in self.in_turn() {
            if Arc::ptr_eq(w, waiter) {
                return Some(bytes);
            }
            bytes += w.bytes;
        }
        None
    }

    fn remove(&mut self, waiter: &Arc<Waiter>) {
        self.urgent.retain(|w| !Arc::ptr_eq(w, waiter));
        self.new.retain(|w| !Arc::ptr_eq(w, waiter));
    }
}

impl Waiter {
    /// Wakes it; with `once`, only if it is not awake already. Returns whether it did.
    fn rouse(&self, once: bool) -> bool {
        let mut state = self.state.lock().expect("no holder panics");
        if once && matches!(*state, State::Roused) {
            return false;
        }
        *state = State::Roused;
        drop(state);
        self.wake.notify_one();
        true
    }

    /// Sleeps until the wait has ended, or until roused: `None`.
    pub(super) fn sleep(&self) -> Option<Result<(), NoGrant>> {
        let mut state = self.state.lock().expect("no holder panics");
        loop {
            match std::mem::replace(&mut *state, State::Asleep) {
                State::Asleep => state = self.wake.wait(state).expect("no holder panics"),
                State::Roused => return None,
                State::Ended(outcome) => return Some(outcome),
            }
        }
    }
}
