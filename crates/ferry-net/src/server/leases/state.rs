//! The state of one lease of one session.
//!
//! ```text
//!          granted to write               sent            recalled
//! (none) ──────────────────▶ Granting(n) ─────▶ Held ──────────────▶ Recalled
//!    │                            ▲            ▲ │ ▲                 │    │
//!    └── granted to read ─────────┼────────────┘ │ └── reconnected ──┘    │
//!                                 └──────────────┴─ granted to write ─────┘
//!
//! (none) ◀── changes applied ── Returning ◀── returned behind changes ── Granting, Held, Recalled
//! (none) ◀── returned at once, term over, fence recorded, session ended ── from every state
//! ```
//!
//! `n` is the number of answers that grant the lease and are not sent. The last one leads to
//! *Held*.
//!
//! A read lease begins as *Held*: the table enters it before the inode is read, and a recall may
//! overtake the answer. The client notices that, because it remembers what it has returned since
//! it asked. A write lease begins as *Granting*, because the table must not recall it before the
//! answer that grants it has been sent (LEASE-8).
//!
//! *Fenced* is no state here: a fence takes all leases of a session at once, so the session has it
//! ([`super::table::Holder::is_fenced`]). While that is set, each of its leases counts for nobody.
//!
//! Whether the lease is a write lease is a fact beside its state: a read lease that becomes a write
//! lease goes through *Granting*, from any state but *Returning*.

/// The state of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeaseState {
    /// The server has not yet sent so many answers that grant it.
    Granting { answers: u16 },
    /// The client relies on it, or is about to hear of it.
    Held,
    /// The server has asked the client to return it, and has no answer.
    Recalled,
    /// The client has returned it. It counts until the server has applied the changes that the
    /// client had made under it.
    Returning,
}

/// What happens to a lease that is not removed by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeaseEvent {
    /// An answer is to grant it, as a write lease.
    Granted,
    /// Such an answer was sent, or will not be.
    GrantSent,
    /// The server asks the client to return it.
    Recalled,
    /// The client has returned it, behind changes that are not applied yet.
    Returned,
    /// Its client has a new connection, and a recall on the old one may be lost.
    Reconnected,
}

impl LeaseState {
    /// The state behind `event`; `None`: it must not happen in this state.
    pub(super) fn after(self, event: LeaseEvent) -> Option<Self> {
        use LeaseEvent::{GrantSent, Granted, Recalled, Reconnected, Returned};
        Some(match (self, event) {
            (Self::Granting { answers }, Granted) => {
                Self::Granting { answers: answers.saturating_add(1) }
            }
            (Self::Held | Self::Recalled, Granted) => Self::Granting { answers: 1 },
            (Self::Granting { answers: 2.. }, GrantSent) => {
                let Self::Granting { answers } = self else { return None };
                Self::Granting { answers: answers - 1 }
            }
            (Self::Granting { .. }, GrantSent) => Self::Held,
            // The lease that the answer grants was removed meanwhile, and this is another one, or
            // the client has returned it unasked.
            (state, GrantSent) => state,
            (Self::Held, Recalled) => Self::Recalled,
            (Self::Granting { .. } | Self::Held | Self::Recalled, Returned) => Self::Returning,
            (Self::Recalled, Reconnected) => Self::Held,
            (state, Reconnected) => state,
            (Self::Returning, Granted | Returned)
            | (Self::Granting { .. } | Self::Recalled | Self::Returning, Recalled) => return None,
        })
    }

    /// Whether the client knows that it has to return it, or has done so.
    pub(super) fn is_leaving(self) -> bool {
        matches!(self, Self::Recalled | Self::Returning)
    }

    /// Whether a recall may be sent now.
    pub(super) fn may_be_recalled(self) -> bool {
        self == Self::Held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recall_waits_for_the_answers_that_grant_and_is_sent_once() {
        use LeaseEvent::{GrantSent, Granted, Recalled, Reconnected, Returned};
        let after = |state: LeaseState, events: &[LeaseEvent]| {
            events.iter().try_fold(state, |state, event| state.after(*event))
        };
        let granting = LeaseState::Granting { answers: 1 };
        assert_eq!(after(granting, &[Granted, GrantSent]), Some(granting));
        assert_eq!(after(granting, &[Granted, GrantSent, GrantSent]), Some(LeaseState::Held));
        assert_eq!(after(granting, &[Recalled]), None);
        assert_eq!(after(granting, &[GrantSent, Recalled]), Some(LeaseState::Recalled));
        assert_eq!(after(granting, &[GrantSent, Recalled, Recalled]), None);
        assert_eq!(after(granting, &[GrantSent, Recalled, Reconnected]), Some(LeaseState::Held));
        assert_eq!(after(granting, &[Returned, GrantSent]), Some(LeaseState::Returning));
        assert_eq!(after(LeaseState::Recalled, &[Granted]), Some(granting));
        assert_eq!(after(LeaseState::Recalled, &[Returned, Granted]), None);
        assert_eq!(after(LeaseState::Returning, &[Returned]), None);
    }
}
