//! Messages on a stream of bytes: the length as `u32`, then as many bytes.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufWriter};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::timeout;

use crate::codec::{Malformed, Wire, decode};
use crate::message::{Op, Promised, Who};

/// A message that has begun must be complete after this time: whoever sends a byte a minute is cut off.
pub(crate) const FRAME_TIME_MAX: Duration = Duration::from_secs(30);

/// Bytes of a message's length.
const HEAD: usize = 4;
/// Most messages are no longer.
const FRAME_SMALL: usize = 256;
/// There is room for so many bytes at least where something is read,
const READ_MIN: usize = 16 << 10;
/// and so much memory is kept where nothing has begun to come.
const KEPT_MAX: usize = 64 << 10;
/// Who does not take a message for so long is gone;
const WRITE_TIME_MAX: Duration = Duration::from_secs(30);
/// nor, where more come all the time, so many bytes of them.
const WRITE_BYTES_MAX: usize = 1 << 20;

/// Both ends of a connection, plain or TLS.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// A message with its length in front.
pub fn encode(message: &impl Wire) -> Vec<u8> {
    framed(|frame| message.put(frame))
}

/// [`crate::message::ToServer::Change`], without a copy of the operation.
pub fn encode_change(
    (seq, answered, series): (u64, u64, u32),
    promised: Option<Promised>,
    who: Who,
    op: &Op,
) -> Vec<u8> {
    framed(|frame| {
        frame.push(3);
        seq.put(frame);
        answered.put(frame);
        series.put(frame);
        promised.put(frame);
        who.put(frame);
        op.put(frame);
    })
}

/// [`crate::message::ToServer::Request`], without a copy of the operation.
pub fn encode_request(id: u64, after: u64, who: Who, op: &Op) -> Vec<u8> {
    framed(|frame| {
        frame.push(2);
        id.put(frame);
        after.put(frame);
        who.put(frame);
        op.put(frame);
    })
}

fn framed(put: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut frame = Vec::with_capacity(FRAME_SMALL);
    frame.extend_from_slice(&[0; HEAD]);
    put(&mut frame);
    let len = (frame.len() - HEAD) as u32;
    frame[..HEAD].copy_from_slice(&len.to_le_bytes());
    frame
}

/// Messages as they come: what has arrived together is taken in together. Memory is taken as bytes arrive, not as they are promised.
pub(crate) struct Frames<R> {
    stream: R,
    /// A longer message is an error, before it has arrived.
    max: usize,
    bytes: Vec<u8>,
    /// Those before it were given out.
    start: usize,
}

impl<R: AsyncRead + Unpin> Frames<R> {
    pub(crate) fn new(stream: R, max: usize) -> Self {
        Self { stream, max, bytes: Vec::new(), start: 0 }
    }

    /// From now on messages may be so long.
    pub(crate) fn set_max(&mut self, max: usize) {
        self.max = max;
    }

    /// How long the next message is, as far as that has arrived.
    fn len(&self) -> Option<usize> {
        let head = self.bytes[self.start..].first_chunk::<HEAD>()?;
        Some(u32::from_le_bytes(*head) as usize)
    }

    /// The next message, if it is there as a whole.
    pub(crate) fn next(&mut self) -> Option<&[u8]> {
        let len = self.len().filter(|_| self.is_ready())?;
        let from = self.start + HEAD;
        self.start = from + len;
        Some(&self.bytes[from..self.start])
    }

    /// Whether a whole message is there.
    pub(crate) fn is_ready(&self) -> bool {
        let there = self.bytes.len() - self.start;
        self.len().is_some_and(|len| len <= self.max && there - HEAD >= len)
    }

    /// Waits until a whole message is there; `false` at the end of the stream.
    pub(crate) async fn ready(&mut self) -> io::Result<bool> {
        if self.is_ready() {
            return Ok(true);
        }
        if self.bytes.len() == self.start && self.fill().await? == 0 {
            return Ok(false);
        }
        let rest = async {
            while !self.is_ready() {
                if self.len().is_some_and(|len| len > self.max) {
                    return Err(malformed());
                }
                if self.fill().await? == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            }
            Ok(true)
        };
        timeout(FRAME_TIME_MAX, rest).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }

    /// Takes in what has arrived.
    async fn fill(&mut self) -> io::Result<usize> {
        self.bytes.drain(..std::mem::take(&mut self.start));
        if self.bytes.is_empty() && self.bytes.capacity() > KEPT_MAX {
            self.bytes = Vec::new();
        }
        if self.bytes.capacity() == self.bytes.len() {
            self.bytes.reserve(READ_MIN.max(self.bytes.len()));
        }
        self.stream.read_buf(&mut self.bytes).await
    }

    /// What comes now is nobody's.
    pub(crate) async fn discard(&mut self) {
        let _end = tokio::io::copy(&mut self.stream, &mut tokio::io::sink()).await;
    }
}

/// The next message's bytes, and not one behind them; `None` at the end of the stream. A length beyond `max` is an error before anything is read or kept.
pub(crate) async fn read_bytes(
    stream: &mut (impl AsyncRead + Unpin),
    max: usize,
) -> io::Result<Option<Vec<u8>>> {
    let mut head = [0; 4];
    if stream.read(&mut head[..1]).await? == 0 {
        return Ok(None);
    }
    let rest = async {
        stream.read_exact(&mut head[1..]).await?;
        let len = u32::from_le_bytes(head) as usize;
        if len > max {
            return Err(malformed());
        }
        // Memory is taken as bytes arrive, not as they are promised.
        let mut bytes = Vec::new();
        stream.take(len as u64).read_to_end(&mut bytes).await?;
        if bytes.len() < len { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(Some(bytes)) }
    };
    timeout(FRAME_TIME_MAX, rest).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

/// The next message.
pub(crate) async fn read<T: Wire>(
    stream: &mut (impl AsyncRead + Unpin),
    max: usize,
) -> io::Result<Option<T>> {
    let Some(bytes) = read_bytes(stream, max).await? else { return Ok(None) };
    decode(&bytes).map(Some).map_err(|Malformed| malformed())
}

pub(crate) fn malformed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, Malformed)
}

/// Sends frames as they come, several at once where they come fast, until nobody can send any more or the other side does not
/// take them. What travels with a frame is dropped when the frame is on its way.
pub(crate) async fn write_all<T>(
    writer: impl AsyncWrite + Unpin,
    mut frames: UnboundedReceiver<(Vec<u8>, T)>,
) {
    let mut writer = BufWriter::with_capacity(64 << 10, writer);
    while let Some(mut next) = frames.recv().await {
        let sent = timeout(WRITE_TIME_MAX, async {
            let mut bytes = 0;
            loop {
                writer.write_all(&next.0).await?;
                bytes += next.0.len();
                let more = if bytes < WRITE_BYTES_MAX { frames.try_recv().ok() } else { None };
                let Some(another) = more else { return writer.flush().await };
                next = another;
            }
        });
        if !matches!(sent.await, Ok(Ok(()))) {
            break;
        }
    }
    let _closed = timeout(WRITE_TIME_MAX, writer.shutdown()).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("there are threads").block_on(future)
    }

    fn with_length(message: &[u8]) -> Vec<u8> {
        [&(message.len() as u32).to_le_bytes()[..], message].concat()
    }

    #[test]
    fn messages_are_taken_whole_however_they_come() {
        const LONG: usize = 70_000;
        for pieces in [1, 7, 1 << 20] {
            run(async {
                let sent: Vec<Vec<u8>> = (0..24).map(|n| vec![n as u8; [3, 0, 1000, LONG][n % 4]]).collect();
                let all: Vec<u8> = sent.iter().flat_map(|message| with_length(message)).collect();
                let (mut near, far) = tokio::io::duplex(pieces);
                let writing = tokio::spawn(async move { near.write_all(&all).await });
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

    #[test]
    fn who_takes_frames_slowly_but_always_is_not_gone() {
        const FRAMES: usize = 8000;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        runtime.expect("there are threads").block_on(async {
            let (near, mut far) = tokio::io::duplex(1 << 16);
            let (line, frames) = tokio::sync::mpsc::unbounded_channel();
            (0..FRAMES).for_each(|_| line.send((vec![1; 1024], ())).expect("it listens"));
            drop(line);
            let writing = tokio::spawn(write_all(near, frames));
            let (mut taken, mut piece) = (0, vec![0; 1024]);
            while let Ok(n @ 1..) = far.read(&mut piece).await {
                taken += n;
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            writing.await.expect("it does not panic");
            assert_eq!(taken, FRAMES * 1024, "a frame every 10 ms is a sign of life");
        });
    }
}
