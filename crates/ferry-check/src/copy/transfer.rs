//! Moves the bytes: some threads, each a chunk at a time, and a mark after each leg.

use super::plan::Plan;
use super::sums::Sums;
use super::types::{CopyError, CopyOptions, Copying, Tell, target};
use crate::inspect::Inspector;
use ferry_device::{AlignedBuf, BlockDevice};
use ferry_fs::keys::BLOCK;
use ferry_fs::volume::{CopyMark, write_copy_mark};
use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

/// Threads, and so chunks in memory.
const THREADS: usize = 8;
/// Windows of a large volume.
const WINDOWS: u64 = 64;
/// The longest window in bytes: 1 GiB of memory.
const WINDOW_MAX: u64 = 512 << 30;

/// Reads the source from this byte on.
type Read<'r> = &'r (dyn Fn(u64, &mut AlignedBuf) -> Result<(), CopyError> + Sync);

/// Copies what the plan has behind what the mark says is done, all of it durably. Returns how many
/// bytes that was, and how many blocks of them nothing needs, and are zeros instead.
pub(super) fn transfer(
    inspector: &Inspector,
    to: &Arc<dyn BlockDevice>,
    plan: &Plan,
    mut mark: CopyMark,
    options: CopyOptions,
    tell: Tell<'_>,
) -> Result<(u64, u64), CopyError> {
    let zeroed = AtomicU64::new(0);
    let before = plan.bytes_before(mark.done);
    let mut sums: Option<Sums> = None;
    while let Some(next) = next_byte(plan, mark.done) {
        let covers = |sums: &Sums| sums.range().contains(&next);
        let window = match sums.take().filter(covers) {
            Some(window) => window,
            None => {
                let bytes = window_bytes(inspector.superblock().size, options);
                Sums::load(inspector, next, bytes)?
            }
        };
        let chunks = leg(plan, next..window.range().end, options);
        let ends = chunks.last().map_or(next, |chunk| chunk.end);
        let told = plan.bytes_before(next);
        let mut progress =
            |bytes: u64| tell(Copying { bytes: told + bytes, bytes_total: plan.bytes() });
        let read = |offset: u64, buf: &mut AlignedBuf| {
            let zeros = window.read(inspector, plan, offset, buf)?;
            zeroed.fetch_add(zeros, Ordering::Relaxed);
            Ok(())
        };
        let (outcome, whole) = run(&read, &**to, &chunks, options.chunk_bytes, &mut progress);
        // What is whole in front of the first failure need not be copied again.
        let reached = chunks.get(whole).map_or(ends, |chunk| chunk.start);
        let marked = if reached > next {
            mark.done = reached;
            to.flush().map_err(target("make the copy durable")).and_then(|()| {
                write_copy_mark(&**to, &mark).map_err(target("write the mark of the copy"))
            })
        } else {
            Ok(())
        };
        // The first error says more.
        outcome?;
        marked?;
        sums = Some(window);
    }
    Ok((plan.bytes() - before, zeroed.into_inner()))
}

/// Bytes of a window: a large volume has few, each of which costs a look at all extents.
fn window_bytes(size: u64, options: CopyOptions) -> u64 {
    (size / WINDOWS / BLOCK * BLOCK).min(WINDOW_MAX).max(options.window_bytes)
}

/// The ranges that do not end before `from`.
fn ranges_from(plan: &Plan, from: u64) -> &[Range<u64>] {
    let at = plan.ranges().partition_point(|range| range.end <= from);
    plan.ranges().get(at..).unwrap_or_default()
}

/// The first byte at or behind `from` that is to be copied.
fn next_byte(plan: &Plan, from: u64) -> Option<u64> {
    Some(ranges_from(plan, from).first()?.start.max(from))
}

/// The chunks of the next leg, in a window of the device.
fn leg(plan: &Plan, window: Range<u64>, options: CopyOptions) -> Vec<Range<u64>> {
    let mut chunks = Vec::new();
    let mut left = options.leg_bytes;
    for range in ranges_from(plan, window.start) {
        let (mut at, end) = (range.start.max(window.start), range.end.min(window.end));
        while at < end && left > 0 {
            let len = options.chunk_bytes.min(end - at).min(left);
            chunks.push(at..at + len);
            (at, left) = (at + len, left - len);
        }
        if left == 0 || range.end >= window.end {
            break;
        }
    }
    chunks
}

/// Copies chunks. Returns how it ended, and how many chunks from the first one on are whole.
fn run(
    read: Read<'_>,
    to: &dyn BlockDevice,
    chunks: &[Range<u64>],
    chunk_bytes: u64,
    progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
) -> (Result<(), CopyError>, usize) {
    let next = AtomicUsize::new(0);
    let (sender, receiver) = mpsc::channel();
    let work = |sender: mpsc::Sender<(usize, Result<(), CopyError>)>| {
        let mut buf = AlignedBuf::zeroed(chunk_bytes as usize);
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(chunk) = chunks.get(at) else { return };
            let result = one(read, to, chunk, &mut buf);
            if sender.send((at, result)).is_err() {
                return;
            }
        }
    };
    let mut whole = vec![false; chunks.len()];
    let (mut outcome, mut bytes) = (Ok(()), 0);
    thread::scope(|scope| {
        let mut started = 0;
        for _ in 0..THREADS.min(chunks.len()) {
            let sender = sender.clone();
            let builder = thread::Builder::new().name("ferry-copy".into());
            // Where there is no thread to be had, the others copy what it would have.
            started += usize::from(builder.spawn_scoped(scope, || work(sender)).is_ok());
        }
        if started == 0 {
            work(sender.clone());
        }
        drop(sender);
        for (at, result) in receiver {
            let ended = match result {
                Ok(()) => {
                    whole[at] = true;
                    bytes += chunks[at].end - chunks[at].start;
                    progress(bytes).is_break().then_some(CopyError::Stopped)
                }
                Err(error) => Some(error),
            };
            if let Some(error) = ended {
                // Chunks that no thread has begun stay.
                next.store(chunks.len(), Ordering::Relaxed);
                if outcome.is_ok() {
                    outcome = Err(error);
                }
            }
        }
    });
    (outcome, whole.iter().take_while(|whole| **whole).count())
}

/// Copies one chunk.
fn one(
    read: Read<'_>,
    to: &dyn BlockDevice,
    chunk: &Range<u64>,
    buf: &mut AlignedBuf,
) -> Result<(), CopyError> {
    // The buffer was made for a whole chunk.
    buf.set_len((chunk.end - chunk.start) as usize);
    read(chunk.start, buf)?;
    to.write(chunk.start, buf).map_err(target("write the copy"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_volume_has_few_windows_in_bounded_memory() {
        let bytes = |size| window_bytes(size, CopyOptions::default());
        assert_eq!(bytes(64 << 20), 16 << 30);
        assert_eq!(bytes(1 << 40), 16 << 30);
        assert_eq!(bytes(8 << 40), 128 << 30);
        assert_eq!(bytes(1 << 50), WINDOW_MAX);
    }
}
