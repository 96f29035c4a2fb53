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

/// Who does not take a message for so long is gone.
const WRITE_TIME_MAX: Duration = Duration::from_secs(30);

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
    let mut frame = vec![0; 4];
    put(&mut frame);
    let len = (frame.len() - 4) as u32;
    frame[..4].copy_from_slice(&len.to_le_bytes());
    frame
}

/// The next message's bytes; `None` at the end of the stream. A length beyond `max` is an error before anything is read or kept.
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
            loop {
                writer.write_all(&next.0).await?;
                match frames.try_recv() {
                    Ok(another) => next = another,
                    Err(_) => return writer.flush().await,
                }
            }
        });
        if !matches!(sent.await, Ok(Ok(()))) {
            break;
        }
    }
    let _closed = timeout(WRITE_TIME_MAX, writer.shutdown()).await;
}
