//! Messages on a stream of bytes: the length as `u32`, then as many bytes.
//!
//! A long message may be cut into chunks, each a frame. The length of each chunk but the last says
//! that more follows ([`MORE`]). Whole messages may stand between two chunks, and say so
//! ([`BETWEEN`]). `lanes` decides what is cut.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::rt::time::{Instant, timeout, timeout_at};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};

use crate::codec::{Malformed, Wire};
use crate::message::{Acknowledged, Caller, Op};

/// A frame that has begun must be complete after this time: a peer that sends a byte a minute is
/// disconnected.
pub(crate) const FRAME_TIME_MAX: Duration = Duration::from_secs(30);

/// Bytes of a frame's length.
pub(crate) const HEAD: usize = 4;
/// In the length: the message goes on in another frame.
const MORE: u32 = 1 << 31;
/// In the length: a message between two chunks of another.
const BETWEEN: u32 = 1 << 30;
/// Most messages are no longer.
const FRAME_SMALL: usize = 256;
/// There is room for so many bytes at least where something is read,
const READ_MIN: usize = 16 << 10;
/// and a buffer that is empty keeps this much memory at most.
const IDLE_MAX: usize = 64 << 10;

/// Both ends of a connection, plain or TLS.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// A message with its length in front.
pub fn encode(message: &impl Wire) -> Vec<u8> {
    framed(|frame| message.put(frame))
}

/// [`crate::message::ToServer::Change`], without a copy of the operation.
pub fn encode_change(
    (seq, answered, epoch): (u64, u64, u32),
    acknowledged: Option<Acknowledged>,
    caller: Caller,
    op: &Op,
) -> Vec<u8> {
    framed(|frame| {
        frame.push(3);
        seq.put(frame);
        answered.put(frame);
        epoch.put(frame);
        acknowledged.put(frame);
        caller.put(frame);
        op.put(frame);
    })
}

/// [`crate::message::ToServer::Request`], without a copy of the operation.
pub fn encode_request(id: u64, after: u64, caller: Caller, op: &Op) -> Vec<u8> {
    framed(|frame| {
        frame.push(2);
        id.put(frame);
        after.put(frame);
        caller.put(frame);
        op.put(frame);
    })
}

fn framed(message: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut frame = Vec::with_capacity(FRAME_SMALL);
    put(&mut frame, message);
    frame
}

/// Appends a message with its length in front.
pub(crate) fn put(frames: &mut Vec<u8>, message: impl FnOnce(&mut Vec<u8>)) {
    let from = frames.len();
    frames.extend_from_slice(&[0; HEAD]);
    message(frames);
    let len = (frames.len() - from - HEAD) as u32;
    frames[from..from + HEAD].copy_from_slice(&len.to_le_bytes());
}

/// The messages of whole frames.
pub(crate) fn messages(frames: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = frames;
    std::iter::from_fn(move || {
        let (frame, behind) = rest.split_at_checked(HEAD + len_of(rest))?;
        rest = behind;
        Some(&frame[HEAD..])
    })
}

/// The length of the message that begins here.
pub(crate) fn len_of(frames: &[u8]) -> usize {
    frames.first_chunk::<HEAD>().map_or(0, |head| u32::from_le_bytes(*head) as usize)
}

/// Bytes of the whole frames at the beginning that come to no more than `max`.
pub(crate) fn whole_within(frames: &[u8], max: usize) -> usize {
    let mut whole = 0;
    while whole < frames.len() {
        let next = whole + HEAD + len_of(&frames[whole..]);
        if next > max {
            break;
        }
        whole = next;
    }
    whole
}

/// The head of a chunk.
pub(crate) fn chunk_head(len: usize, more: bool) -> [u8; HEAD] {
    (len as u32 | if more { MORE } else { 0 }).to_le_bytes()
}

/// These messages go between two chunks of another.
pub(crate) fn mark_between(frames: &mut [u8]) {
    let mut at = 0;
    while at < frames.len() {
        let len = len_of(&frames[at..]);
        frames[at..at + HEAD].copy_from_slice(&(len as u32 | BETWEEN).to_le_bytes());
        at += HEAD + len;
    }
}

/// Messages as they come: what has arrived together is taken in together. Memory is taken as bytes
/// arrive, not as the length announces.
pub(crate) struct Frames<R> {
    stream: R,
    /// A longer message is an error, before it has arrived.
    max: usize,
    /// A message may come in chunks.
    has_chunks: bool,
    bytes: Vec<u8>,
    /// Those before it were given out.
    start: usize,
    /// Counts bytes as they arrive.
    heard: Arc<AtomicU64>,
    /// The chunks of a message that is not complete.
    chunks: Vec<u8>,
    /// One that was put together, while it is looked at.
    whole: Vec<u8>,
    /// When the frame that has begun must be complete.
    deadline: Option<Instant>,
}

impl<R: AsyncRead + Unpin> Frames<R> {
    pub(crate) fn new(stream: R, max: usize) -> Self {
        let (bytes, chunks, whole) = (Vec::new(), Vec::new(), Vec::new());
        Self {
            stream,
            max,
            has_chunks: true,
            bytes,
            start: 0,
            chunks,
            whole,
            deadline: None,
            heard: Arc::default(),
        }
    }

    /// From now on messages may be so long, and come in chunks or not.
    pub(crate) fn expect(&mut self, max: usize, has_chunks: bool) {
        (self.max, self.has_chunks) = (max, has_chunks);
    }

    /// From now on bytes are counted there.
    pub(crate) fn count_in(&mut self, heard: &Arc<AtomicU64>) {
        self.heard = Arc::clone(heard);
    }

    /// How long the next frame is, as far as that has arrived, and what it says of itself.
    fn head(&self) -> Option<(usize, u32)> {
        let head = u32::from_le_bytes(*self.bytes[self.start..].first_chunk::<HEAD>()?);
        let kind = if self.has_chunks { head & (MORE | BETWEEN) } else { 0 };
        Some(((head ^ kind) as usize, kind))
    }

    /// What has come is a message, or the beginning of one.
    fn check(&self) -> io::Result<()> {
        let Some((len, kind)) = self.head() else { return Ok(()) };
        let before = if kind == BETWEEN { 0 } else { self.chunks.len() };
        let sense =
            kind != MORE | BETWEEN && (kind == 0 || kind == MORE || !self.chunks.is_empty());
        if before + len <= self.max && sense { Ok(()) } else { Err(malformed()) }
    }

    /// The next message, if it is there as a whole.
    pub(crate) fn next(&mut self) -> Option<&[u8]> {
        if !self.is_ready() {
            return None;
        }
        let (len, kind) = self.head()?;
        let from = self.start + HEAD;
        (self.start, self.deadline) = (from + len, None);
        let frame = &self.bytes[from..self.start];
        if kind == BETWEEN || self.chunks.is_empty() {
            return Some(frame);
        }
        self.chunks.extend_from_slice(frame);
        self.whole = std::mem::take(&mut self.chunks);
        Some(&self.whole)
    }

    /// Whether a whole message is there. Pieces that are there are put together.
    pub(crate) fn is_ready(&mut self) -> bool {
        loop {
            let Some((len, kind)) = self.head() else { return false };
            let there = self.bytes.len() - self.start - HEAD;
            if there < len || self.check().is_err() {
                return false;
            }
            if kind != MORE {
                return true;
            }
            let from = self.start + HEAD;
            self.chunks.extend_from_slice(&self.bytes[from..from + len]);
            (self.start, self.deadline) = (from + len, None);
        }
    }

    /// Waits until a whole message is there; `false` at the end of the stream.
    pub(crate) async fn ready(&mut self) -> io::Result<bool> {
        while !self.is_ready() {
            if !self.more().await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits until something more is there, be it a part of a message; `false` at the end of the
    /// stream.
    pub(crate) async fn more(&mut self) -> io::Result<bool> {
        self.check()?;
        let begun = self.bytes.len() > self.start;
        let come = if begun {
            let deadline = *self.deadline.get_or_insert_with(|| Instant::now() + FRAME_TIME_MAX);
            timeout_at(deadline, self.fill())
                .await
                .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??
        } else {
            self.fill().await?
        };
        if come == 0 {
            let between = !begun && self.chunks.is_empty();
            return if between { Ok(false) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
        }
        self.check()?;
        Ok(true)
    }

    /// Takes in what has arrived.
    async fn fill(&mut self) -> io::Result<usize> {
        self.bytes.drain(..std::mem::take(&mut self.start));
        if self.bytes.is_empty() && self.bytes.capacity() > IDLE_MAX {
            self.bytes = Vec::new();
        }
        self.whole = Vec::new();
        if self.bytes.capacity() == self.bytes.len() {
            self.bytes.reserve(READ_MIN.max(self.bytes.len()));
        }
        let len = self.stream.read_buf(&mut self.bytes).await?;
        self.heard.fetch_add(len as u64, Ordering::Relaxed);
        Ok(len)
    }

    /// What comes now is nobody's.
    pub(crate) async fn discard(&mut self) {
        let _end = tokio::io::copy(&mut self.stream, &mut tokio::io::sink()).await;
    }
}

/// The next message's bytes, and not one behind them; `None` at the end of the stream. A length
/// beyond `max` is an error before anything is read, and so is one that was cut.
pub(crate) async fn read_bytes(
    stream: &mut (impl AsyncRead + Unpin),
    max: usize,
) -> io::Result<Option<Vec<u8>>> {
    match read_frame(stream, max).await? {
        Some((0, bytes)) => Ok(Some(bytes)),
        Some(_) => Err(malformed()),
        None => Ok(None),
    }
}

/// The same of a frame, which may be a chunk: with what its head says beside the length.
pub(crate) async fn read_frame(
    stream: &mut (impl AsyncRead + Unpin),
    max: usize,
) -> io::Result<Option<(u32, Vec<u8>)>> {
    let mut head = [0; HEAD];
    if stream.read(&mut head[..1]).await? == 0 {
        return Ok(None);
    }
    let rest = async {
        stream.read_exact(&mut head[1..]).await?;
        let head = u32::from_le_bytes(head);
        let len = (head & !(MORE | BETWEEN)) as usize;
        if len > max {
            return Err(malformed());
        }
        // Memory is taken as bytes arrive, not as the length announces.
        let mut bytes = Vec::new();
        stream.take(len as u64).read_to_end(&mut bytes).await?;
        if bytes.len() < len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(Some((head & (MORE | BETWEEN), bytes)))
    };
    timeout(FRAME_TIME_MAX, rest).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

pub(crate) fn malformed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, Malformed)
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;

    fn run<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("there are threads").block_on(future)
    }

    fn with_length(message: &[u8]) -> Vec<u8> {
        [&(message.len() as u32).to_le_bytes()[..], message].concat()
    }

    #[test]
    fn messages_are_reassembled_from_any_fragments() {
        const LONG: usize = 70_000;
        for chunks in [1, 7, 1 << 20] {
            run(async {
                let sent: Vec<Vec<u8>> =
                    (0..24).map(|n| vec![n as u8; [3, 0, 1000, LONG][n % 4]]).collect();
                let all: Vec<u8> = sent.iter().flat_map(|message| with_length(message)).collect();
                let (mut near, far) = tokio::io::duplex(chunks);
                let writing = crate::rt::spawn(async move { near.write_all(&all).await });
                let mut frames = Frames::new(far, LONG);
                assert!(frames.next().is_none() && !frames.is_ready());
                for message in &sent {
                    assert!(frames.ready().await.expect("it comes") && frames.is_ready());
                    assert_eq!(frames.next(), Some(&message[..]));
                }
                assert!(!frames.ready().await.expect("it has ended between two messages"));
                writing.await.expect("it does not panic").expect("all was taken");
            });
        }
    }

    #[test]
    fn a_message_that_is_too_long_or_does_not_end_is_an_error() {
        let bytes = [with_length(&[1; 10]), with_length(&[2; 11])].concat();
        let kinds = [(bytes.len(), io::ErrorKind::InvalidData), (12, io::ErrorKind::UnexpectedEof)];
        for (len, kind) in kinds {
            run(async {
                let mut frames = Frames::new(&bytes[..len], 10);
                if len > 14 {
                    assert!(frames.ready().await.expect("the first is whole"));
                    assert_eq!(frames.next(), Some(&[1; 10][..]));
                }
                assert!(frames.next().is_none());
                assert_eq!(frames.ready().await.map_err(|error| error.kind()), Err(kind));
            });
        }
    }
}
