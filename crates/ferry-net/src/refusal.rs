//! Why a client is not let in.

/// Why a client is not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Cause {
    /// Its certificate was revoked,
    Revoked,
    /// or has expired,
    Expired,
    /// or is of another authority, or there is none.
    Unknown,
    /// It does not speak TLS, and this server does,
    Plain,
    /// or the reverse.
    Tls,
    /// It speaks another version of the protocol.
    Version,
    /// What came was no greeting.
    NoGreeting,
    /// It may not mount that directory, or there is none.
    Path,
    /// There are too many clients.
    Full,
    /// An administrator has ended its session.
    Evicted,
    /// The server stops, or has no certificates to go by.
    Server,
}

impl Cause {
    /// All of them, with their names in `ferry stats`.
    pub(crate) const ALL: [(Cause, &str); 11] = [
        (Self::Revoked, "certificate_revoked"),
        (Self::Expired, "certificate_expired"),
        (Self::Unknown, "certificate_unknown"),
        (Self::Plain, "without_tls"),
        (Self::Tls, "with_tls"),
        (Self::Version, "version"),
        (Self::NoGreeting, "no_greeting"),
        (Self::Path, "path"),
        (Self::Full, "too_many"),
        (Self::Evicted, "evicted"),
        (Self::Server, "server"),
    ];
}

/// A client is not let in.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) cause: Cause,
    /// For a person.
    pub(crate) reason: String,
}

impl Refusal {
    pub(crate) fn new(cause: Cause, reason: impl Into<String>) -> Self {
        Self { cause, reason: reason.into() }
    }
}
