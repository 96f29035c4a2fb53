//! The phase of a client's session with its server.
//!
//! ```text
//!                 a welcome            all that restores
//!                                      it is answered
//!  ┌─► Connecting ─────────► Restoring ─────────────► Active
//!  │    (Suspect)                │  ▲                 │ │
//!  │       │                     │  └── the epoch ────┘ │
//!  │       │                     │      has ended        │
//!  │       │                     ▼                       │
//!  │       │        a goodbye: Draining ◄────────────────┤
//!  │       │                     │                       │
//!  └───────│─────────────────────┴───────────────────────┘  the connection is closed
//!          ▼
//!        Closed          the mount has ended, or the session was evicted: from any phase
//! ```
//!
//! * PHASE-1: the phase changes in [`Phase::advance`] only, which refuses what the picture does not
//!   show.
//! * PHASE-2: a session is *suspect* when there is no connection for longer than the mount's
//!   timeout. Its operations fail with `ETIMEDOUT` then. The phase does not store that: it is read
//!   from the clock, so no operation waits for a timer that is late.
//! * PHASE-3: `Closed` is the last phase. Every operation fails with its error.

use std::time::Duration;

use ferry_fs::Errno;

use super::window::Line;

pub(super) enum Phase {
    /// There is no connection.
    Connecting {
        /// Since this time, as the monotonic clock says.
        since: Duration,
        /// The server has said goodbye: it has applied nothing that it has not answered.
        clean: bool,
        /// Why the server does not let this client in, if that is what it says.
        refused: Option<String>,
    },
    /// The server has welcomed the client. All requests stand behind what restores the session.
    Restoring(Line),
    /// The session is as it was, or was never lost.
    Active(Line),
    /// The server has said goodbye and closes the connection.
    Draining(Line),
    /// Every operation fails with this error.
    Closed {
        errno: Errno,
        /// What the server said when it evicted the client.
        refused: Option<String>,
    },
}

impl Phase {
    /// Nothing was sent yet.
    pub(super) fn new(since: Duration) -> Self {
        Self::Connecting { since, clean: false, refused: None }
    }

    /// The connection.
    pub(super) fn line(&self) -> Option<&Line> {
        match self {
            Self::Restoring(line) | Self::Active(line) | Self::Draining(line) => Some(line),
            Self::Connecting { .. } | Self::Closed { .. } => None,
        }
    }

    pub(super) fn is_connected(&self) -> bool {
        self.line().is_some()
    }

    /// Since when there is no connection.
    pub(super) fn disconnected_since(&self) -> Option<Duration> {
        if let Self::Connecting { since, .. } = self { Some(*since) } else { None }
    }

    /// The error with which operations fail at this time, if they do.
    pub(super) fn errno(&self, now: Duration, timeout: Duration) -> Option<Errno> {
        match self {
            Self::Closed { errno, .. } => Some(*errno),
            Self::Connecting { since, .. } if now.saturating_sub(*since) >= timeout => {
                Some(Errno(libc::ETIMEDOUT))
            }
            _ => None,
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        matches!(self, Self::Closed { .. })
    }

    /// The server before has ended in good order.
    pub(super) fn is_clean(&self) -> bool {
        matches!(self, Self::Connecting { clean: true, .. })
    }

    /// The process before had heard the goodbye.
    pub(super) fn set_clean(&mut self) {
        if let Self::Connecting { clean, .. } = self {
            *clean = true;
        }
    }

    /// What the server says to a client that it does not let in, or has evicted.
    pub(super) fn refusal(&self) -> Option<&String> {
        match self {
            Self::Connecting { refused, .. } | Self::Closed { refused, .. } => refused.as_ref(),
            Self::Restoring(_) | Self::Active(_) | Self::Draining(_) => None,
        }
    }

    /// The newest attempt was refused, or it was not. Whether that is new.
    pub(super) fn set_refusal(&mut self, reason: Option<String>) -> bool {
        match self {
            Self::Connecting { refused, .. } => {
                let is_new = *refused != reason;
                *refused = reason;
                is_new
            }
            _ => false,
        }
    }

    /// There is a connection, and the server has welcomed the client.
    pub(super) fn connect(&mut self, line: Line) {
        self.advance(Self::Restoring(line));
    }

    /// All that restores the session is answered, or not.
    pub(super) fn set_restored(&mut self, restored: bool) {
        match self {
            Self::Restoring(line) if restored => {
                let next = Self::Active(line.clone());
                self.advance(next);
            }
            Self::Active(line) if !restored => {
                let next = Self::Restoring(line.clone());
                self.advance(next);
            }
            _ => {}
        }
    }

    /// The server has said goodbye.
    pub(super) fn drain(&mut self) {
        if let Self::Restoring(line) | Self::Active(line) = self {
            let next = Self::Draining(line.clone());
            self.advance(next);
        }
    }

    /// The connection is closed, and nothing was heard since this time.
    pub(super) fn disconnect(&mut self, since: Duration) {
        if self.is_connected() {
            let clean = matches!(self, Self::Draining(_));
            self.advance(Self::Connecting { since, clean, refused: None });
        }
    }

    /// Nothing goes on any more. The first error stays.
    pub(super) fn close(&mut self, errno: Errno, refused: Option<String>) {
        if !self.is_closed() {
            self.advance(Self::Closed { errno, refused });
        }
    }

    /// The only place where the phase changes.
    fn advance(&mut self, next: Self) {
        let is_legal = match (&*self, &next) {
            (Self::Closed { .. }, _) => false,
            (_, Self::Closed { .. }) => true,
            (Self::Connecting { .. }, Self::Restoring(_)) => true,
            (Self::Restoring(_), Self::Active(_) | Self::Draining(_)) => true,
            (Self::Active(_), Self::Restoring(_) | Self::Draining(_)) => true,
            (now, Self::Connecting { .. }) => now.is_connected(),
            _ => false,
        };
        assert!(is_legal, "a session that is {} cannot become {}", self.name(), next.name());
        *self = next;
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Connecting { .. } => "connecting",
            Self::Restoring(_) => "restoring",
            Self::Active(_) => "active",
            Self::Draining(_) => "draining",
            Self::Closed { .. } => "closed",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn line() -> Line {
        crate::lanes::line().0
    }

    #[test]
    fn a_goodbye_is_remembered_until_the_next_welcome() {
        let mut phase = Phase::new(Duration::ZERO);
        phase.connect(line());
        phase.drain();
        assert!(phase.is_connected() && !phase.is_clean());
        phase.disconnect(SECOND);
        assert!(phase.is_clean());
        assert!(phase.set_refusal(Some("no".into())) && phase.is_clean());
        assert!(!phase.set_refusal(Some("no".into())), "it is the same");
        phase.connect(line());
        phase.disconnect(SECOND);
        assert!(!phase.is_clean() && phase.refusal().is_none());
    }

    #[test]
    fn operations_fail_while_a_session_is_suspect_and_when_it_is_closed() {
        let mut phase = Phase::new(SECOND);
        assert_eq!(phase.errno(2 * SECOND, 2 * SECOND), None);
        assert_eq!(phase.errno(3 * SECOND, 2 * SECOND), Some(Errno(libc::ETIMEDOUT)));
        phase.connect(line());
        phase.set_restored(true);
        assert_eq!(phase.errno(9 * SECOND, SECOND), None);
        phase.close(Errno(libc::EIO), None);
        phase.close(Errno(libc::ENOTCONN), None);
        assert_eq!(phase.errno(9 * SECOND, SECOND), Some(Errno(libc::EIO)), "the first error");
    }

    #[test]
    #[should_panic(expected = "cannot become")]
    fn a_closed_session_never_connects_again() {
        let mut phase = Phase::new(Duration::ZERO);
        phase.close(Errno(libc::EIO), None);
        phase.connect(line());
    }
}
