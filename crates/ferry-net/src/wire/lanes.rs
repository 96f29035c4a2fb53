//! What is sent on a connection: two lanes, one of which never waits for the other.
//!
//! * LANE-1: a message of the first lane waits for at most one chunk of the second. Longer messages
//!   of the second lane are cut into chunks (`frame`). A slow connection has small chunks; a fast
//!   one cuts nothing.
//! * LANE-2: each lane keeps its order. Between the two there is none: a message of the first lane
//!   must not rely on an earlier one of the second.
//! * LANE-3: the second lane is written as far as its [`Pace`] allows. Bytes in the sockets of both
//!   sides and in the network delay the first lane too, so a pace bounds them.
//! * LANE-4: a server writes only what was true when nobody else could change it: the pace is asked
//!   whether that is so, after it was decided what is to be written.

use crate::rt::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::time::Duration;

use crate::rt::time::{Instant, timeout};
use tokio::io::{AsyncWrite, AsyncWriteExt, BufWriter};
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::frame::{self, HEAD};
use crate::protocol::{Outbound, Protocol};

/// A peer that takes no message for this long is considered dead.
const WRITE_TIME_MAX: Duration = Duration::from_secs(30);
/// The same, if it takes fewer bytes than this in that time.
const WRITE_BYTES_MAX: usize = 1 << 20;
/// Bytes that are written together.
const BUFFER: usize = 64 << 10;

/// Bytes of the shortest chunk.
pub(crate) const CHUNK_MIN: usize = 4 << 10;

enum Item<T> {
    Frames {
        frames: Vec<u8>,
        with: T,
        first: bool,
    },
    /// What comes behind it is sent in this protocol.
    Speaks(Outbound),
}

/// Sends messages of the newest protocol, one or more at a time. What travels with them is dropped
/// when they are on their way.
pub(crate) struct Line<T> {
    items: UnboundedSender<Item<T>>,
    protocol: Protocol,
}

impl<T> Clone for Line<T> {
    fn clone(&self) -> Self {
        Self { items: self.items.clone(), protocol: self.protocol }
    }
}

impl<T> Line<T> {
    /// On the second lane.
    pub(crate) fn send(&self, frames: Vec<u8>, with: T) {
        let _sent = self.items.send(Item::Frames { frames, with, first: false });
    }

    /// On the first lane.
    pub(crate) fn send_first(&self, frames: Vec<u8>, with: T) {
        let _sent = self.items.send(Item::Frames { frames, with, first: true });
    }

    /// From now on this connection has that protocol. It begins with the newest.
    pub(crate) fn speak(self, protocol: Protocol, outbound: Outbound) -> Self {
        if protocol != self.protocol {
            let _sent = self.items.send(Item::Speaks(outbound));
        }
        Self { protocol, ..self }
    }

    /// The protocol of the connection, as far as it is known here.
    pub(crate) fn protocol(&self) -> Protocol {
        self.protocol
    }
}

/// A line, and what comes out of it.
pub(crate) fn line<T>() -> (Line<T>, Outgoing<T>) {
    let (sender, incoming) = unbounded_channel();
    let (first, second, outbound) = (VecDeque::new(), VecDeque::new(), Outbound::default());
    let line = Line { items: sender, protocol: Protocol::default() };
    (line, Outgoing { incoming, closed: false, outbound, first, second, at: 0, cut: 0 })
}

/// How fast the second lane is written, and in which chunks.
pub(crate) trait Pace: Send + Sync {
    /// Bytes of the next chunk; `None`: not yet.
    fn chunk(&self) -> Option<usize>;
    /// So many bytes of either lane were written. Gives what is to be sent behind them at once.
    fn wrote(&self, bytes: usize) -> Option<Vec<u8>>;
    /// So many bytes have left, which took so long.
    fn left(&self, bytes: usize, took: Duration);
    /// Notified when there may be a chunk again.
    fn bell(&self) -> &Notify;
    /// Whether what was sent so far may be written: what it says is true.
    fn is_sure(&self) -> bool {
        true
    }
    /// Finds that out, for as long as it takes; `false`: it is not, and nothing may be written any
    /// more.
    fn ascertain(&self) -> Pin<Box<dyn Future<Output = bool> + Send + '_>> {
        Box::pin(std::future::ready(true))
    }
}

/// What was sent and is not written yet.
pub(crate) struct Outgoing<T> {
    incoming: UnboundedReceiver<Item<T>>,
    /// Nobody can send any more.
    closed: bool,
    outbound: Outbound,
    first: VecDeque<(Vec<u8>, T)>,
    second: VecDeque<(Vec<u8>, T)>,
    /// Of the first in the second lane, so many bytes are written,
    at: usize,
    /// and behind those so many are the rest of a message that was cut.
    cut: usize,
}

impl<T> Outgoing<T> {
    fn put(&mut self, item: Item<T>) {
        match item {
            Item::Frames { frames, with, first } => {
                let (frames, first) = self.outbound.translate(frames, first);
                let lane = if first { &mut self.first } else { &mut self.second };
                if !frames.is_empty() {
                    lane.push_back((frames, with));
                }
            }
            Item::Speaks(outbound) => self.outbound = outbound,
        }
    }

    fn take_in(&mut self) {
        while let Ok(item) = self.incoming.try_recv() {
            self.put(item);
        }
    }

    /// Bytes of the next chunk of the second lane: a message at least, if none may be cut. When no
    /// sender is left, the pace does not matter either.
    fn chunk(&self, pace: &dyn Pace) -> Option<usize> {
        let (frames, _) = self.second.front()?;
        let chunk = pace.chunk().or_else(|| self.closed.then_some(CHUNK_MIN))?;
        let whole = || HEAD + frame::len_of(&frames[self.at..]);
        Some(if self.outbound.has_chunks() { chunk } else { chunk.max(whole()) })
    }

    /// Waits until something may be written; `false`: all is, and nothing more will come.
    async fn ready(&mut self, pace: &dyn Pace) -> bool {
        loop {
            self.take_in();
            if !self.first.is_empty() || self.chunk(pace).is_some() {
                return true;
            }
            if self.closed {
                return !self.second.is_empty();
            }
            let waits = !self.second.is_empty();
            let item = crate::rt::select! {
                item = self.incoming.recv() => item,
                () = pace.bell().notified(), if waits => continue,
            };
            match item {
                Some(item) => self.put(item),
                None => self.closed = true,
            }
        }
    }

    /// Writes what is next, if anything may be written now; gives its bytes.
    async fn write_next(
        &mut self,
        writer: &mut (impl AsyncWrite + Unpin),
        pace: &dyn Pace,
    ) -> io::Result<Option<usize>> {
        self.take_in();
        // What came in now may not be true, though what came before was.
        if !pace.is_sure() {
            return Ok(None);
        }
        if let Some((mut frames, _with)) = self.first.pop_front() {
            if self.cut > 0 {
                frame::mark_between(&mut frames);
            }
            writer.write_all(&frames).await?;
            return Ok(Some(frames.len()));
        }
        let (Some(chunk), Some((frames, _))) = (self.chunk(pace), self.second.front()) else {
            return Ok(None);
        };
        let mut written = 0;
        if self.cut == 0 {
            let whole = frame::whole_within(&frames[self.at..], chunk);
            if whole > 0 {
                writer.write_all(&frames[self.at..self.at + whole]).await?;
                self.at += whole;
                written = whole;
            } else {
                self.cut = frame::len_of(&frames[self.at..]);
                self.at += HEAD;
            }
        }
        if self.cut > 0 {
            let len = self.cut.min(chunk);
            writer.write_all(&frame::chunk_head(len, len < self.cut)).await?;
            writer.write_all(&frames[self.at..self.at + len]).await?;
            self.at += len;
            self.cut -= len;
            written = HEAD + len;
        }
        if self.at == frames.len() {
            self.second.pop_front();
            self.at = 0;
        }
        Ok(Some(written))
    }

    /// What was sent and comes next, for tests: of the first lane, then of the second.
    #[cfg(test)]
    pub(crate) fn try_recv(&mut self) -> Option<(Vec<u8>, T)> {
        self.take_in();
        self.first.pop_front().or_else(|| self.second.pop_front())
    }
}

/// Writes what is sent, several messages at once where they come fast, until nobody can send any
/// more or the other side does not take it.
pub(crate) async fn write_all<T>(
    writer: impl AsyncWrite + Unpin,
    mut outgoing: Outgoing<T>,
    pace: &dyn Pace,
) {
    let mut writer = BufWriter::with_capacity(BUFFER, writer);
    while outgoing.ready(pace).await {
        if !pace.is_sure() && !pace.ascertain().await {
            break;
        }
        let begun = Instant::now();
        let sent = timeout(WRITE_TIME_MAX, async {
            let mut bytes = 0;
            while bytes < WRITE_BYTES_MAX {
                let Some(more) = outgoing.write_next(&mut writer, pace).await? else { break };
                bytes += more;
                if let Some(behind) = pace.wrote(more) {
                    let (mut behind, _) = outgoing.outbound.translate(behind, true);
                    if outgoing.cut > 0 {
                        frame::mark_between(&mut behind);
                    }
                    writer.write_all(&behind).await?;
                }
            }
            writer.flush().await.map(|()| bytes)
        });
        match sent.await {
            Ok(Ok(bytes)) => pace.left(bytes, begun.elapsed()),
            _ => break,
        }
    }
    let _closed = timeout(WRITE_TIME_MAX, writer.shutdown()).await;
}

/// The pace of a side that writes as fast as the other takes it. It bounds only the time that one
/// chunk takes.
pub(crate) struct AsTaken {
    chunk: std::sync::atomic::AtomicUsize,
    never: Notify,
}

/// A chunk should be written after this time.
const CHUNK_TIME: Duration = Duration::from_millis(20);
/// What is less says nothing of how fast it was taken.
const TOLD_BYTES: usize = 32 << 10;

impl Default for AsTaken {
    fn default() -> Self {
        Self { chunk: crate::message::FRAME_MAX.into(), never: Notify::new() }
    }
}

impl Pace for AsTaken {
    fn chunk(&self) -> Option<usize> {
        Some(self.chunk.load(std::sync::atomic::Ordering::Relaxed))
    }

    fn wrote(&self, _bytes: usize) -> Option<Vec<u8>> {
        None
    }

    fn left(&self, bytes: usize, took: Duration) {
        if bytes >= TOLD_BYTES {
            let chunk = bytes as f64 * CHUNK_TIME.as_secs_f64() / took.as_secs_f64().max(1e-6);
            let chunk = (chunk as usize).clamp(CHUNK_MIN, crate::message::FRAME_MAX);
            self.chunk.store(chunk, std::sync::atomic::Ordering::Relaxed);
        }
    }

    fn bell(&self) -> &Notify {
        &self.never
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;
    use crate::frame::Frames;

    /// So many bytes at a time, as long as there is leave.
    struct Steps {
        chunk: usize,
        leave: std::sync::atomic::AtomicUsize,
        bell: Notify,
    }

    impl Steps {
        fn new(chunk: usize, leave: usize) -> Self {
            Self { chunk, leave: leave.into(), bell: Notify::new() }
        }

        fn allow(&self, chunks: usize) {
            self.leave.fetch_add(chunks, std::sync::atomic::Ordering::SeqCst);
            self.bell.notify_one();
        }
    }

    impl Pace for Steps {
        fn chunk(&self) -> Option<usize> {
            (self.leave.load(std::sync::atomic::Ordering::SeqCst) > 0).then_some(self.chunk)
        }
        fn wrote(&self, bytes: usize) -> Option<Vec<u8>> {
            let whole = bytes > 100;
            self.leave.fetch_sub(usize::from(whole), std::sync::atomic::Ordering::SeqCst);
            whole.then(|| message(&[0xee; 2]))
        }
        fn left(&self, _bytes: usize, _took: Duration) {}
        fn bell(&self) -> &Notify {
            &self.bell
        }
    }

    fn message(bytes: &[u8]) -> Vec<u8> {
        [&(bytes.len() as u32).to_le_bytes()[..], bytes].concat()
    }

    #[test]
    fn a_message_of_the_first_lane_waits_for_one_chunk_at_most() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        runtime.expect("there are threads").block_on(async {
            let (near, far) = tokio::io::duplex(1 << 20);
            let pace = std::sync::Arc::new(Steps::new(1000, 1));
            let (line, outgoing) = line();
            let paced = std::sync::Arc::clone(&pace);
            let writing = crate::rt::spawn(async move { write_all(near, outgoing, &*paced).await });
            let mut frames = Frames::new(far, 10_000);
            // Two short ones and a long one travel together.
            let long: Vec<u8> = (0..4500).map(|n| n as u8).collect();
            line.send([message(&[1; 20]), message(&[2; 30]), message(&long)].concat(), ());
            for expected in [&[1; 20][..], &[2; 30]] {
                assert!(frames.ready().await.expect("it comes"));
                assert_eq!(frames.next(), Some(expected));
            }
            // A chunk of the long one is written, then what its pace sends behind it.
            assert!(frames.ready().await.expect("it comes"));
            assert_eq!(frames.next(), Some(&[0xee; 2][..]));
            for n in 1..=4u8 {
                line.send_first(message(&[n; 5]), ());
                assert!(
                    frames.ready().await.expect("it comes though the rest of the long one waits")
                );
                assert_eq!(frames.next(), Some(&[n; 5][..]));
                pace.allow(1);
                if n < 4 {
                    assert!(frames.ready().await.expect("behind the next chunk"));
                    assert_eq!(frames.next(), Some(&[0xee; 2][..]));
                }
            }
            pace.allow(1);
            drop(line);
            let mut rest = Vec::new();
            while frames.ready().await.expect("they come") {
                rest.push(frames.next().expect("one").to_vec());
            }
            assert!(rest.contains(&long), "it is whole");
            assert!(
                rest.iter()
                    .filter(|message| **message != long)
                    .all(|message| **message == [0xee; 2])
            );
            writing.await.expect("it does not panic");
        });
    }

    #[test]
    fn a_slow_but_steady_peer_is_not_considered_dead() {
        const FRAMES: usize = 8000;
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        runtime.expect("there are threads").block_on(async {
            let (near, mut far) = tokio::io::duplex(1 << 16);
            let (line, frames) = line();
            (0..FRAMES).for_each(|_| line.send_first(vec![1; 1024], ()));
            drop(line);
            let writing =
                crate::rt::spawn(async { write_all(near, frames, &AsTaken::default()).await });
            let (mut taken, mut chunk) = (0, vec![0; 1024]);
            while let Ok(n @ 1..) = far.read(&mut chunk).await {
                taken += n;
                crate::rt::time::sleep(Duration::from_millis(10)).await;
            }
            writing.await.expect("it does not panic");
            assert_eq!(taken, FRAMES * 1024, "a frame every 10 ms is a sign of life");
        });
    }
}
