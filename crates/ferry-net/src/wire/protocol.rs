//! The protocols that this release speaks: its own, and that of the release before (0.1.0). Both
//! sides are written for the newest one. What the older one has instead is here, and nowhere else.
//!
//! | protocol 10 | in protocol 8 |
//! |---|---|
//! | `Ping` and `Pong` have a number | the server answers pings in order, so the client counts |
//! | `Pong` has the server's clock | the client goes on from the clock of `Welcome` |
//! | `Evicted` has a reason | it has none |
//! | `Welcome` says how far a session had come that has ended | it does not |
//! | `Lack` | missing: the client returns space with its next ping |
//! | `Fatal` | the change is answered with `EIO` |
//! | a rename may leave a whiteout | the server says `EINVAL` |
//! | `Returned` may name a change that is still to come | the client sends it behind that change |
//! | two lanes, and long messages in chunks | one lane, but for pings; whole messages |
//! | changes are acknowledged early | a client of this release waits for each answer |
//! | a session is recorded with its first change | with the first question for inode numbers |

use crate::rt::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::rt::Mutex;
use ferry_env::Clock;
use ferry_fs::Timestamp;

use crate::codec::{Input, List, Malformed, Wire, decode};
use crate::frame;
use crate::message::{Acknowledged, Caller, Op, Outcome, ToClient, ToServer, VERSION};

/// The version of release 0.1.0.
const VERSION_BEFORE: u32 = 8;
/// What a server of 0.1.0 says to a client of this release begins so.
const REFUSED_BY_BEFORE: &[u8] = b"the client speaks version 10 of the protocol, the server 8:";
/// For a client whose server says no more than that it was evicted.
const EVICTED: &[u8] = b"evicted by the server's administrator";
/// Pings without an answer: a server of protocol 8 leaves more than 16 at a time unanswered.
const PINGS_MAX: usize = 15;

/// The number of a request for whose answer nobody waits.
const NOBODY: u64 = u64::MAX;

/// Numbers of messages and of an operation.
const CHANGE: u8 = 3;
const WELCOME: u8 = 1;
const PING: u8 = 5;
const PONG: u8 = 5;
const EVICTION: u8 = 7;
const RETURNED: u8 = 7;
const FATAL: u8 = 12;
const LACK: u8 = 13;
const RENAME: u8 = 39;

/// The protocol of a connection, as its greeting says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Protocol {
    /// Of release 0.1.0.
    V8,
    /// The newest.
    #[default]
    V10,
}

impl Protocol {
    pub(crate) fn version(self) -> u32 {
        match self {
            Self::V8 => VERSION_BEFORE,
            Self::V10 => VERSION,
        }
    }

    /// The protocol with this version, if this release speaks it.
    pub(crate) fn of(version: u32) -> Option<Self> {
        [Self::V8, Self::V10].into_iter().find(|protocol| protocol.version() == version)
    }

    /// All of them, for people.
    pub(crate) fn all() -> String {
        format!("{VERSION_BEFORE} and {VERSION}")
    }

    /// Long messages come in chunks.
    pub(crate) fn has_chunks(self) -> bool {
        self == Self::V10
    }

    /// A client of this release acknowledges changes early. A server of 0.1.0 ends the leases of a
    /// client on a slow connection though it sends, and what it has acknowledged would be lost.
    pub(crate) fn has_early_acks(self) -> bool {
        self == Self::V10
    }

    /// What a client sends first. A server of 0.1.0 waits after a crash for the replay of sessions
    /// that had asked for inode numbers, so the client asks, and does not use them.
    pub(crate) fn first_request(self) -> Option<Vec<u8>> {
        let ask = || frame::encode_request(NOBODY, 0, Caller::default(), &Op::Numbers {});
        (self == Self::V8).then(ask)
    }

    /// The protocol in which a client that was answered so greets again; `None`: the answer
    /// counts.
    pub(crate) fn instead(self, answer: &ToClient) -> Option<Self> {
        match answer {
            ToClient::Refused { reason } if reason.starts_with(REFUSED_BY_BEFORE) => {
                (self == Self::V10).then_some(Self::V8)
            }
            _ => None,
        }
    }

    /// A message of a client.
    pub(crate) fn decode_client(self, message: &[u8]) -> Result<ToServer, Malformed> {
        match (self, message) {
            (Self::V10, _) => decode(message),
            (Self::V8, [PING]) => Ok(ToServer::Ping { number: 0 }),
            (Self::V8, [PING, ..]) => Err(Malformed),
            (Self::V8, _) if is_rename(message) => decode(&[message, &[0]].concat()),
            (Self::V8, _) => decode(message),
        }
    }

    /// A message of a server. `asked` gives the ping that a `Pong` answers, and the server's clock.
    pub(crate) fn decode_server(
        self,
        message: &[u8],
        asked: impl FnOnce() -> Option<(u64, Timestamp)>,
    ) -> Result<ToClient, Malformed> {
        match (self, message) {
            (Self::V10, _) => decode(message),
            // Nothing of a session that has ended.
            (Self::V8, [WELCOME, ..]) => decode(&[message, &[0]].concat()),
            (Self::V8, [PONG, rest @ ..]) => {
                let Pong { renewed, epoch, durable } = decode(rest)?;
                let (number, now) = asked().ok_or(Malformed)?;
                Ok(ToClient::Pong { number, renewed, epoch, durable, now })
            }
            (Self::V8, [EVICTION]) => Ok(ToClient::Evicted { reason: EVICTED.to_vec() }),
            (Self::V8, [EVICTION | FATAL | LACK, ..]) => Err(Malformed),
            (Self::V8, _) => decode(message),
        }
    }

    /// What a server sends.
    pub(crate) fn of_server(self) -> Outbound {
        match self {
            Self::V8 => Outbound::Server8,
            Self::V10 => Outbound::Newest,
        }
    }

    /// What a client sends that was welcomed, and the pings that it has sent.
    pub(crate) fn of_client(self, welcome: &ToClient, clock: &Arc<dyn Clock>) -> (Outbound, Pings) {
        let pings = Pings {
            unanswered: Arc::default(),
            welcomed: (Timestamp(0), clock.monotonic()),
            clock: Arc::clone(clock),
        };
        match (self, welcome) {
            (Self::V8, ToClient::Welcome { now, applied, .. }) => {
                let pings = Pings { welcomed: (*now, clock.monotonic()), ..pings };
                let unanswered = Arc::clone(&pings.unanswered);
                let client = Client8 { pings: unanswered, sent: *applied, held: Vec::new() };
                (Outbound::Client8(client), pings)
            }
            _ => (Outbound::Newest, pings),
        }
    }
}

/// `Pong` of protocol 8.
struct Pong {
    renewed: bool,
    epoch: u32,
    durable: u64,
}

crate::codec::wire_fields! {
    Pong { renewed, epoch, durable }
}

/// Whether a client's message is a change of a name to another one. Then its last byte says in
/// protocol 10 whether a whiteout is left.
fn is_rename(message: &[u8]) -> bool {
    let op = |input: &mut Input<'_>| {
        let number = u8::get(input)?;
        let (_seq, _answered, _epoch) = (u64::get(input)?, u64::get(input)?, u32::get(input)?);
        let (_acknowledged, _caller) = (Option::<Acknowledged>::get(input)?, Caller::get(input)?);
        Ok::<_, Malformed>((number, u8::get(input)?))
    };
    op(&mut Input::new(message)) == Ok((CHANGE, RENAME))
}

/// Numbers of pings that are not answered, in order.
type Unanswered = Arc<Mutex<VecDeque<u64>>>;

/// The pings of a client on one connection of protocol 8.
pub(crate) struct Pings {
    unanswered: Unanswered,
    /// The server's clock in its `Welcome`, and when that came.
    welcomed: (Timestamp, Duration),
    clock: Arc<dyn Clock>,
}

impl Pings {
    /// The ping that is answered next, and about what time it is at the server.
    pub(crate) fn answered(&self) -> Option<(u64, Timestamp)> {
        let (Timestamp(welcomed), at) = self.welcomed;
        let since = self.clock.monotonic().saturating_sub(at).as_nanos();
        let now = Timestamp(welcomed.saturating_add(i128::try_from(since).unwrap_or(i128::MAX)));
        self.unanswered.lock().pop_front().map(|number| (number, now))
    }
}

/// What one side sends on a connection.
#[derive(Default)]
pub(crate) enum Outbound {
    #[default]
    Newest,
    Server8,
    Client8(Client8),
}

/// What a client sends in protocol 8.
pub(crate) struct Client8 {
    pings: Unanswered,
    /// The newest change that the server has, or that was sent.
    sent: u64,
    /// Leases that are returned behind changes which were not sent, with the changes.
    held: Vec<(u64, Vec<u8>)>,
}

impl Outbound {
    /// Long messages may be cut into chunks.
    pub(crate) fn has_chunks(&self) -> bool {
        matches!(self, Self::Newest)
    }

    /// Whole frames of the newest protocol in that of the connection, and whether they go in the
    /// first lane. Some have no counterpart.
    pub(crate) fn translate(&mut self, frames: Vec<u8>, first: bool) -> (Vec<u8>, bool) {
        let mut translated = Vec::new();
        match self {
            Self::Newest => (frames, first),
            Self::Server8 => {
                for message in frame::messages(&frames) {
                    put_of_server(message, &mut translated);
                }
                (translated, false)
            }
            Self::Client8(client) => {
                let mut only_pings = true;
                for message in frame::messages(&frames) {
                    only_pings &= message.first() == Some(&PING);
                    client.put(message, &mut translated);
                }
                (translated, first && only_pings)
            }
        }
    }
}

fn put_of_server(message: &[u8], out: &mut Vec<u8>) {
    let special = matches!(message, [WELCOME | PONG | EVICTION | FATAL | LACK, ..]);
    match special.then(|| decode::<ToClient>(message)) {
        Some(Ok(mut welcome @ ToClient::Welcome { .. })) => {
            if let ToClient::Welcome { former, .. } = &mut welcome {
                *former = None;
            }
            frame::put(out, |out| {
                welcome.put(out);
                // The last field, which protocol 8 does not have, is one byte then.
                out.pop();
            });
        }
        Some(Ok(ToClient::Pong { renewed, epoch, durable, .. })) => {
            frame::put(out, |out| {
                out.push(PONG);
                Pong { renewed, epoch, durable }.put(out);
            });
        }
        Some(Ok(ToClient::Evicted { .. })) => frame::put(out, |out| out.push(EVICTION)),
        Some(Ok(ToClient::Fatal { seq })) => {
            let outcome = Outcome::Failed { errno: libc::EIO };
            let (after, empty, made) = (List::default(), false, None);
            let answer = ToClient::Changed { seq, after, empty, made, outcome };
            frame::put(out, |out| answer.put(out));
        }
        Some(Ok(ToClient::Lack {})) => {}
        _ => frame::put(out, |out| out.extend_from_slice(message)),
    }
}

impl Client8 {
    fn put(&mut self, message: &[u8], out: &mut Vec<u8>) {
        match message.first().copied() {
            Some(PING) => self.put_ping(message, out),
            Some(RETURNED) => match decode::<ToServer>(message) {
                Ok(ToServer::Returned { after, .. }) if after > self.sent => {
                    self.held.push((after, message.to_vec()));
                }
                _ => frame::put(out, |out| out.extend_from_slice(message)),
            },
            Some(CHANGE) => {
                frame::put(out, |out| match message {
                    [before @ .., _, _, whiteout] if is_rename(message) => {
                        // What protocol 8 cannot say becomes what no server does.
                        let flags = &message[before.len()..before.len() + 2];
                        out.extend_from_slice(before);
                        out.extend_from_slice(if *whiteout == 0 { flags } else { &[1, 1] });
                    }
                    _ => out.extend_from_slice(message),
                });
                let seq = message[1..].first_chunk().map_or(0, |seq| u64::from_le_bytes(*seq));
                self.sent = self.sent.max(seq);
                let sent = self.sent;
                for (_, returned) in self.held.extract_if(.., |(after, _)| *after <= sent) {
                    frame::put(out, |out| out.extend_from_slice(&returned));
                }
            }
            _ => frame::put(out, |out| out.extend_from_slice(message)),
        }
    }

    /// The answers come in this order. A ping that the server might not answer is not sent.
    fn put_ping(&self, message: &[u8], out: &mut Vec<u8>) {
        let mut unanswered = self.pings.lock();
        if let Ok(ToServer::Ping { number }) = decode(message)
            && unanswered.len() < PINGS_MAX
        {
            unanswered.push_back(number);
            frame::put(out, |out| out.push(PING));
        }
    }
}

#[cfg(test)]
mod tests;
