//! How far a session has come: one state, and all of its transitions.
//!
//! ```text
//!              welcomed                           drain              close
//! Connecting ─────────────────────────▶ Active ──────────▶ Draining ──────────▶ Closed(reason)
//!     │                                   ▲                ▲  (from every phase)
//!     │ taken up                  settled │                │ drain
//!     ▼                          given up │                │
//!  Restoring(Running) ─ replayed ─▶ Restoring(Done) ───────┤
//!     │        │                          ▲                │
//!     │        └─ replay failed           │ replayed       │
//!     │                  ▼                │                │
//!     └───────▶ Restoring(Failed) ────────┴────────────────┘
//! ```
//!
//! * *Connecting*: the server has made the session and has not welcomed its client yet.
//! * *Restoring*: the server took the place of one that crashed, and waits for the client's replay
//!   ([`Replay`]). The session is one of those for which the grace-period barrier is closed.
//! * *Active*: the session applies what the client sends.
//! * *Draining*: the server stops. The session applies the changes that it has and takes no more.
//!   What was not replayed goes to the next server, so this phase keeps the state of the replay.
//! * *Closed*: the session has ended. It takes nothing, answers nothing and gets no lock.
//!
//! What is no phase, because it goes on through several of them: whether the client has a
//! connection (`Link`; a client that is away may come back in each phase), what the thread that
//! applies changes is at (`Worker`), and whether the volume has a record of the session
//! (`Registration`, which has a lock of its own because a fence changes it under the lock of the
//! leases).

/// How far a session has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::server) enum Phase {
    Connecting,
    Restoring(Replay),
    Active,
    Draining(Replay),
    Closed(CloseReason),
}

/// How far the client's replay has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::server) enum Replay {
    /// Each replayed change was applied so far.
    Running,
    /// A replayed change could not be applied. The server applies what follows, but does not keep
    /// it durable on its own: the client has to hear of the failure first.
    Failed,
    /// There is nothing to replay, or no more. While the session is restoring, the client has not
    /// said yet that it knows this (`Settled`).
    Done,
}

/// Why a session has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::server) enum CloseReason {
    /// The client has said that it needs nothing any more.
    Left,
    /// The client has broken the rules of the protocol.
    Violation,
    /// An administrator has ended it, or its certificate was revoked.
    Evicted,
    /// The client was away for too long.
    Away,
    /// The server has stopped, and everything of the session is durable.
    Stopped,
    /// The server has stopped, and the client may have changes for the next one: the session's
    /// records stay on the volume.
    HandedOver,
}

/// What moves a session from phase to phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// The session is the one of a server that crashed.
    TakenUp,
    /// A connection is told that it goes on here.
    Welcomed,
    ReplayFailed,
    /// The client has replayed everything.
    Replayed,
    /// The server waits for the replay no longer.
    GivenUp,
    /// The client knows that what it has replayed is durable.
    Settled,
    /// The server stops.
    Drain,
    Close(CloseReason),
}

impl Phase {
    /// The phase behind `event`; `None`: it must not happen in this phase.
    pub(super) fn after(self, event: Event) -> Option<Self> {
        Some(match (self, event) {
            (Self::Closed(reason), Event::Close(_)) => Self::Closed(reason),
            (_, Event::Close(reason)) => Self::Closed(reason),
            // What was under way when the session ended changes nothing any more.
            (Self::Closed(_), Event::TakenUp | Event::Welcomed) => return None,
            (Self::Closed(reason), _) => Self::Closed(reason),

            (Self::Connecting, Event::TakenUp) => Self::Restoring(Replay::Running),
            (_, Event::TakenUp) => return None,

            (Self::Connecting, Event::Welcomed) => Self::Active,
            (phase, Event::Welcomed) => phase,

            (_, Event::Drain) => Self::Draining(self.replay()),

            (Self::Restoring(Replay::Running | Replay::Failed), Event::ReplayFailed) => {
                Self::Restoring(Replay::Failed)
            }
            (Self::Draining(Replay::Running | Replay::Failed), Event::ReplayFailed) => {
                Self::Draining(Replay::Failed)
            }
            (_, Event::ReplayFailed) => return None,

            // A client may say so at any time.
            (Self::Restoring(_), Event::Replayed) => Self::Restoring(Replay::Done),
            (Self::Draining(_), Event::Replayed | Event::GivenUp) => Self::Draining(Replay::Done),
            (phase, Event::Replayed) => phase,
            (Self::Restoring(_), Event::GivenUp) => Self::Active,
            (phase, Event::GivenUp) => phase,

            (phase, Event::Settled) if phase.replays() => return None,
            (Self::Restoring(_), Event::Settled) => Self::Active,
            (phase, Event::Settled) => phase,
        })
    }

    /// How far the replay has come.
    pub(super) fn replay(self) -> Replay {
        match self {
            Self::Restoring(replay) | Self::Draining(replay) => replay,
            Self::Connecting | Self::Active | Self::Closed(_) => Replay::Done,
        }
    }

    /// Whether the client may still replay changes.
    pub(super) fn replays(self) -> bool {
        self.replay() != Replay::Done
    }

    /// Whether the server waits for the client after a crash.
    pub(super) fn is_restoring(self) -> bool {
        matches!(self, Self::Restoring(_))
    }

    pub(super) fn is_draining(self) -> bool {
        matches!(self, Self::Draining(_))
    }

    /// Whether what its client sends still counts.
    pub(super) fn takes_messages(self) -> bool {
        !matches!(self, Self::Draining(_) | Self::Closed(_))
    }

    pub(super) fn is_closed(self) -> bool {
        matches!(self, Self::Closed(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(events: &[Event]) -> Option<Phase> {
        events.iter().try_fold(Phase::Connecting, |phase, event| phase.after(*event))
    }

    #[test]
    fn a_session_that_replays_is_active_when_its_client_knows_that_it_is_durable() {
        use Event::{GivenUp, ReplayFailed, Replayed, Settled, TakenUp, Welcomed};
        assert_eq!(after(&[TakenUp, Welcomed]), Some(Phase::Restoring(Replay::Running)));
        assert_eq!(after(&[TakenUp, Welcomed, Settled]), None, "there is something to replay");
        let failed = [TakenUp, Welcomed, ReplayFailed, Welcomed];
        assert_eq!(after(&failed), Some(Phase::Restoring(Replay::Failed)));
        let replayed = [TakenUp, Welcomed, ReplayFailed, Replayed];
        assert_eq!(after(&replayed), Some(Phase::Restoring(Replay::Done)));
        assert_eq!(after(&[TakenUp, Replayed, ReplayFailed]), None);
        assert_eq!(after(&[TakenUp, Welcomed, Replayed, Settled]), Some(Phase::Active));
        assert_eq!(after(&[TakenUp, Welcomed, GivenUp, Settled]), Some(Phase::Active));
        assert_eq!(after(&[Welcomed, Replayed, Settled]), Some(Phase::Active));
        assert_eq!(after(&[Welcomed, ReplayFailed]), None);
        assert_eq!(after(&[Welcomed, TakenUp]), None);
    }

    #[test]
    fn a_server_that_stops_keeps_the_state_of_the_replay() {
        use Event::{Drain, ReplayFailed, Replayed, TakenUp, Welcomed};
        assert_eq!(after(&[Welcomed, Drain, Drain]), Some(Phase::Draining(Replay::Done)));
        let replaying = [TakenUp, Welcomed, Drain];
        assert_eq!(after(&replaying), Some(Phase::Draining(Replay::Running)));
        let failed = [TakenUp, Welcomed, Drain, ReplayFailed, Welcomed];
        assert_eq!(after(&failed), Some(Phase::Draining(Replay::Failed)));
        let replayed = [TakenUp, Welcomed, Drain, Replayed];
        assert_eq!(after(&replayed), Some(Phase::Draining(Replay::Done)));
    }

    #[test]
    fn a_closed_session_stays_closed_and_welcomes_nobody() {
        use Event::{Close, Drain, GivenUp, ReplayFailed, Replayed, Settled, TakenUp, Welcomed};
        let closed = Phase::Closed(CloseReason::Left);
        for before in [&[][..], &[Welcomed], &[TakenUp], &[Welcomed, Drain]] {
            let events = [before, &[Close(CloseReason::Left)]].concat();
            assert_eq!(after(&events), Some(closed), "{before:?}");
        }
        let afterwards =
            [ReplayFailed, Replayed, GivenUp, Settled, Drain, Close(CloseReason::Away)];
        assert!(afterwards.iter().all(|event| closed.after(*event) == Some(closed)));
        assert!(closed.after(Welcomed).is_none() && closed.after(TakenUp).is_none());
    }
}
