//! Models of frames under loom, which tries every interleaving and every order in which memory may
//! show the stores of others (`docs/locking.md`, rules FRAME-1 to FRAME-6).
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

/// Here it is always asserted.
macro_rules! checked {
    ($($what:tt)*) => {
        assert!($($what)*)
    };
}

#[allow(dead_code, reason = "the model needs a part of it")]
#[path = "../src/cache/frame.rs"]
mod frame;

#[allow(dead_code, reason = "the model needs a part of it")]
#[path = "../src/cache/node.rs"]
mod node;

/// Where `frame.rs` finds it.
mod cache {
    pub(crate) use super::node;
}

/// What `frame.rs` is compiled against here.
#[allow(dead_code, unused_imports, reason = "the model needs a part of it")]
#[path = "frames/sync.rs"]
mod sync;

use frame::{Frame, copied};
use loom::thread;
use std::sync::Arc;
use sync::{AtomicU64, Mutex, Ordering, RwLock, lock};

const LEN: usize = 8;

fn frames(n: u64) -> Arc<Vec<Frame>> {
    Arc::new((0..n).map(|index| Frame::new(index, 0, LEN, Arc::default())).collect())
}

/// One try of a read over all frames: their first bytes, if they were steady.
fn read(frames: &[Frame], checked: bool) -> Option<Vec<u8>> {
    let sampled: Vec<u64> = frames.iter().map(Frame::sample).collect::<Option<_>>()?;
    let copies = frames.iter().map(|frame| {
        let mut out = [0; LEN];
        frame.copy_out(0, &mut out);
        assert!(out.iter().all(|b| *b == out[0]), "a word is torn");
        out[0]
    });
    let copies: Vec<u8> = copies.collect();
    copied();
    let still = frames.iter().zip(sampled).all(|(frame, seq)| frame.is_still(seq));
    (still || !checked).then_some(copies)
}

/// A write over frames that nobody else changes.
fn write(frames: &[Frame], value: u8) {
    frames.iter().for_each(Frame::begin);
    frames.iter().for_each(|frame| frame.copy_in(0, &[value; LEN]));
    frames.iter().for_each(Frame::end);
}

fn one_writer_one_reader(checked: bool) {
    loom::model(move || {
        let frames = frames(2);
        let writer = {
            let frames = Arc::clone(&frames);
            thread::spawn(move || write(&frames, 1))
        };
        if let Some(seen) = read(&frames, checked) {
            assert!(seen[0] == seen[1], "torn: {seen:?}");
        }
        writer.join().unwrap();
        assert_eq!(read(&frames, true), Some(vec![1, 1]));
    });
}

#[test]
fn a_read_sees_all_of_a_write_or_nothing() {
    one_writer_one_reader(true);
}

#[test]
#[should_panic(expected = "torn")]
fn without_the_check_the_model_finds_a_torn_read() {
    one_writer_one_reader(false);
}

/// A writer that shares the inode lock, as `share.rs` has it: all frames or none, and no lock while
/// it waits.
fn write_shared(frames: &[Frame], pages: &Mutex<()>, value: u8) {
    loop {
        let page_lock = lock(pages);
        let reserved: Vec<_> = frames.iter().map_while(Frame::reserve).collect();
        if let Some(busy) = frames.get(reserved.len()) {
            drop((reserved, page_lock));
            busy.wait();
            continue;
        }
        frames.iter().for_each(Frame::begin);
        drop(page_lock);
        frames.iter().for_each(|frame| frame.copy_in(0, &[value; LEN]));
        frames.iter().for_each(Frame::end);
        return;
    }
}

fn bounded() -> loom::model::Builder {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model
}

#[test]
fn two_writers_never_change_a_frame_together_and_none_waits_for_ever() {
    bounded().check(|| {
        let (frames, pages) = (frames(2), Arc::new(Mutex::new(())));
        let other = {
            let (frames, pages) = (Arc::clone(&frames), Arc::clone(&pages));
            thread::spawn(move || write_shared(&frames, &pages, 1))
        };
        write_shared(&frames[1..], &pages, 2);
        other.join().unwrap();
        let seen = read(&frames, true).unwrap();
        assert!(seen == [1, 1] || seen == [1, 2], "{seen:?}");
    });
}

/// A reader that takes the page lock finds frames that keep still, or waits for who copies.
#[test]
fn under_the_page_lock_steady_frames_stay_so() {
    bounded().check(|| {
        let (frames, pages) = (frames(2), Arc::new(Mutex::new(())));
        let writer = {
            let (frames, pages) = (Arc::clone(&frames), Arc::clone(&pages));
            thread::spawn(move || write_shared(&frames, &pages, 1))
        };
        loop {
            let page_lock = lock(&pages);
            if let Some(busy) = frames.iter().find(|frame| frame.is_changing()) {
                drop(page_lock);
                busy.wait();
                continue;
            }
            let seen = read(&frames, true).expect("nobody may begin");
            assert!(seen[0] == seen[1], "torn: {seen:?}");
            break;
        }
        writer.join().unwrap();
    });
}

/// A read inside `size`, as `share.rs` has it.
fn read_inside(frame: &Frame, size: &AtomicU64, end: u64) -> Option<[u8; LEN]> {
    if end > size.load(Ordering::Acquire) {
        return None;
    }
    let seq = frame.sample()?;
    let mut out = [0; LEN];
    frame.copy_out(0, &mut out);
    copied();
    let inside = end <= size.load(Ordering::Relaxed);
    (frame.is_still(seq) && inside).then_some(out)
}

#[test]
fn a_read_beside_a_truncation_never_shows_what_was_cut_as_zeros() {
    loom::model(|| {
        let (frames, size) = (frames(1), Arc::new(AtomicU64::new(8)));
        write(&frames, 7);
        let cutter = {
            let (frames, size) = (Arc::clone(&frames), Arc::clone(&size));
            thread::spawn(move || {
                size.store(4, Ordering::Release);
                frames[0].begin();
                frames[0].zero(4, 8);
                frames[0].end();
            })
        };
        if let Some(seen) = read_inside(&frames[0], &size, 8) {
            assert_eq!(seen, [7; LEN]);
        }
        cutter.join().unwrap();
    });
}

/// A truncation holds the inode lock alone, a write inside the size shares it, a read takes none.
#[test]
fn no_write_brings_back_truncated_bytes_and_no_read_is_torn() {
    bounded().check(|| {
        let (frames, pages, size) =
            (frames(1), Arc::new(Mutex::new(())), Arc::new(AtomicU64::new(8)));
        let state = Arc::new(RwLock::new(8));
        let writer = {
            let (frames, pages, state) =
                (Arc::clone(&frames), Arc::clone(&pages), Arc::clone(&state));
            thread::spawn(move || {
                let state = state.read().unwrap();
                if *state >= LEN {
                    write_shared(&frames, &pages, 7);
                }
            })
        };
        let cutter = {
            let (frames, pages, size) =
                (Arc::clone(&frames), Arc::clone(&pages), Arc::clone(&size));
            thread::spawn(move || {
                let mut state = state.write().unwrap();
                let _page_lock = lock(&pages);
                size.store(4, Ordering::Release);
                frames[0].begin();
                frames[0].zero(4, 8);
                frames[0].end();
                *state = 4;
            })
        };
        if let Some(seen) = read_inside(&frames[0], &size, 8) {
            assert!(seen == [0; LEN] || seen == [7; LEN], "torn: {seen:?}");
        }
        writer.join().unwrap();
        cutter.join().unwrap();
        let mut out = [9; LEN];
        frames[0].copy_out(0, &mut out);
        assert_eq!(out[4..], [0; 4], "the write came back");
    });
}

#[test]
fn a_read_beside_an_append_sees_all_of_it_or_is_outside() {
    loom::model(|| {
        let (frames, size) = (frames(1), Arc::new(AtomicU64::new(4)));
        let appender = {
            let (frames, size) = (Arc::clone(&frames), Arc::clone(&size));
            thread::spawn(move || {
                frames[0].begin();
                frames[0].copy_in(4, &[7; 4]);
                size.store(8, Ordering::Release);
                frames[0].end();
            })
        };
        if let Some(seen) = read_inside(&frames[0], &size, 8) {
            assert_eq!(seen, [0, 0, 0, 0, 7, 7, 7, 7]);
        }
        appender.join().unwrap();
    });
}

/// What is written in place of a frame that was given up is never read together with its old bytes.
#[test]
fn a_frame_that_was_given_up_is_not_taken_for_steady() {
    loom::model(|| {
        let frames = frames(2);
        let evictor = {
            let frames = Arc::clone(&frames);
            thread::spawn(move || {
                frames[0].give_up();
                write(&frames[1..], 1);
            })
        };
        if let Some(seen) = read(&frames, true) {
            assert_eq!(seen, [0, 0]);
        }
        evictor.join().unwrap();
    });
}
