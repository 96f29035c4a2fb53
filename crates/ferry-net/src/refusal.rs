//! Why the server refuses a client.

/// Why a client is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Cause {
    /// Its certificate was revoked.
    Revoked,
    /// Its certificate has expired.
    Expired,
    /// Its certificate is of another authority, or there is none.
    Unknown,
    /// It does not speak TLS, and this server does.
    Plain,
    /// It speaks TLS, and this server does not.
    Tls,
    /// It speaks another version of the protocol.
    Version,
    /// The first message was no greeting.
    NoGreeting,
    /// It may not mount that directory, or there is none.
    Path,
    /// There are too many clients.
    Full,
    /// An administrator has ended its session.
    Evicted,
    /// The server stops, or has no list of revoked certificates.
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

/// A client is refused.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) cause: Cause,
    /// For people.
    pub(crate) reason: String,
}

impl Refusal {
    pub(crate) fn new(cause: Cause, reason: impl Into<String>) -> Self {
        Self { cause, reason: reason.into() }
    }
}
