//! `linear` and `stripe`, and what all composites have in common.

use crate::composite_support::*;
use ferry_device::{
    AlignedBuf, BLOCK_SIZE, BlockDevice, HEAD_LEN, HookedDevice, Io, Kind, MemDevice, SpanDevice,
};
use proptest::prelude::*;
use std::sync::{Arc, mpsc};
use std::time::Duration;

const CHUNK: u64 = 2 * BLOCK;

fn span(kind: Kind, devices: &[Arc<HookedDevice>]) -> SpanDevice {
    let lens: Vec<u64> = devices.iter().map(|dev| dev.capacity() - HEAD_LEN).collect();
    SpanDevice::open(span_sides(kind, devices, &lens, CHUNK))
}

fn devices(lens: &[u64]) -> Vec<Arc<HookedDevice>> {
    lens.iter().map(|blocks| device(HEAD_LEN + blocks * BLOCK)).collect()
}

/// What both are asked to do; offsets and lengths in blocks.
#[derive(Clone, Debug)]
enum Step {
    Write(u64, u64, u8),
    Submit(Vec<(u64, u64, u8)>),
    Read(u64, u64),
    Discard(u64, u64),
    Flush,
}

const BLOCKS: u64 = 64;

fn range() -> impl Strategy<Value = (u64, u64)> {
    (0..BLOCKS).prop_flat_map(|at| (Just(at), 1..=(BLOCKS - at).min(20)))
}

fn step() -> impl Strategy<Value = Step> {
    let write = || (range(), any::<u8>()).prop_map(|((at, len), byte)| (at, len, byte));
    prop_oneof![
        write().prop_map(|(at, len, byte)| Step::Write(at, len, byte)),
        prop::collection::vec(write(), 1..5).prop_map(|all| {
            // Of writes to the same block at the same time any may be the last.
            let mut apart: Vec<(u64, u64, u8)> = Vec::new();
            for (at, len, byte) in all {
                if apart.iter().all(|(a, l, _)| at + len <= *a || a + l <= at) {
                    apart.push((at, len, byte));
                }
            }
            Step::Submit(apart)
        }),
        range().prop_map(|(at, len)| Step::Read(at, len)),
        range().prop_map(|(at, len)| Step::Discard(at, len)),
        Just(Step::Flush),
    ]
}

fn block_of(len: u64, byte: u8) -> AlignedBuf {
    let mut buf = AlignedBuf::zeroed((len * BLOCK) as usize);
    for (at, out) in buf.iter_mut().enumerate() {
        *out = byte.wrapping_add((at / BLOCK_SIZE) as u8);
    }
    buf
}

fn run(dev: &dyn BlockDevice, step: &Step) -> Vec<u8> {
    match step {
        Step::Write(at, len, byte) => dev.write(at * BLOCK, &block_of(*len, *byte)).unwrap(),
        Step::Submit(all) => {
            let (tx, rx) = mpsc::channel();
            let batch = all.iter().map(|(at, len, byte)| {
                let tx = tx.clone();
                let done = Box::new(move |result| tx.send(result).unwrap());
                Io::Write { offset: at * BLOCK, buf: Arc::new(block_of(*len, *byte)), done }
            });
            dev.submit(batch.collect());
            drop(tx);
            let results: Vec<std::io::Result<()>> = rx.iter().collect();
            assert_eq!(results.len(), all.len());
            results.into_iter().for_each(Result::unwrap);
        }
        Step::Read(at, len) => {
            let now = contents(dev, at * BLOCK, (len * BLOCK) as usize);
            assert!(started(dev, at * BLOCK, now.len()).unwrap()[..] == now[..]);
            return now;
        }
        Step::Discard(at, len) => dev.discard(at * BLOCK, len * BLOCK).unwrap(),
        Step::Flush => dev.flush().unwrap(),
    }
    Vec::new()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn a_composite_holds_what_a_plain_device_holds(steps in prop::collection::vec(step(), 1..40)) {
        let mirror_sides = new_mirror(2);
        let memory = Arc::default();
        let composites: [(&str, Box<dyn BlockDevice>); 3] = [
            ("linear", Box::new(span(Kind::Linear, &devices(&[7, 40, 17])))),
            ("stripe", Box::new(span(Kind::Stripe, &devices(&[22, 24, 23])))),
            ("mirror", Box::new(open(&mirror_sides, &[0, 1], &memory))),
        ];
        for (name, composite) in composites {
            prop_assert!(composite.capacity() >= BLOCKS * BLOCK);
            let plain = MemDevice::new(composite.capacity());
            for step in &steps {
                prop_assert!(run(&*composite, step) == run(&plain, step), "{name}: {step:?}");
            }
            let all = (BLOCKS * BLOCK) as usize;
            prop_assert!(contents(&*composite, 0, all) == contents(&plain, 0, all), "{name}");
        }
        let len = MIRROR_LEN as usize;
        prop_assert!(contents(&*mirror_sides[0], HEAD_LEN, len) == contents(&*mirror_sides[1], HEAD_LEN, len));
    }
}

fn flush_asynchronously(dev: &dyn BlockDevice) -> std::io::Result<()> {
    let (tx, rx) = mpsc::channel();
    dev.submit(vec![Io::Flush { done: Box::new(move |result| tx.send(result).unwrap()) }]);
    rx.recv().unwrap()
}

#[test]
fn a_flush_goes_to_those_that_were_written_since_their_last() {
    for kind in [Kind::Linear, Kind::Stripe] {
        let parts = devices(&[16, 16, 16]);
        let dev = span(kind, &parts);
        let flushes = || parts.iter().map(|part| flushes(part)).collect::<Vec<_>>();
        // What an earlier process wrote may not be durable.
        dev.flush().unwrap();
        assert_eq!(flushes(), [1, 1, 1]);
        let second = if kind == Kind::Linear { 16 * BLOCK } else { CHUNK };
        dev.write(second, &filled(BLOCK_SIZE, 1)).unwrap();
        flush_asynchronously(&dev).unwrap();
        assert_eq!(flushes(), [1, 2, 1], "{kind}");
        dev.flush().unwrap();
        flush_asynchronously(&dev).unwrap();
        assert_eq!(flushes(), [1, 2, 1], "{kind}");
        dev.write(0, &filled(BLOCK_SIZE, 1)).unwrap();
        dev.discard(second, BLOCK).unwrap();
        dev.flush().unwrap();
        assert_eq!(flushes(), [2, 3, 1], "{kind}");
    }
}

#[test]
fn a_failed_flush_stays_due() {
    let parts = devices(&[16, 16]);
    let dev = span(Kind::Linear, &parts);
    dev.flush().unwrap();
    dev.write(0, &filled(BLOCK_SIZE, 1)).unwrap();
    parts[0].fail_after(CHANGES, 0);
    assert_eq!(dev.flush().unwrap_err().raw_os_error(), Some(libc::EIO));
    assert_eq!(flush_asynchronously(&dev).unwrap_err().raw_os_error(), Some(libc::EIO));
    assert_eq!(dev.write(0, &filled(BLOCK_SIZE, 1)).unwrap_err().raw_os_error(), Some(libc::EIO));
    // The other component works.
    dev.write(16 * BLOCK, &filled(BLOCK_SIZE, 1)).unwrap();
    parts[0].heal();
    dev.flush().unwrap();
    assert_eq!(flushes(&parts[0]), 2);
    let stats = dev.components();
    assert_eq!((stats[0].write_errors, stats[1].write_errors), (3, 0));
}

#[test]
fn the_timing_is_that_of_the_slowest_that_a_flush_was_sent_to() {
    let times = [1, 16, 4].map(Duration::from_millis);
    let parts: Vec<_> =
        times.iter().map(|t| device_with_flush_time(HEAD_LEN + 16 * BLOCK, *t)).collect();
    let dev = span(Kind::Linear, &parts);
    assert_eq!(dev.flush_timing().samples, 0);
    dev.flush().unwrap();
    assert_eq!((dev.flush_timing().avg, dev.flush_timing().samples), (times[1], 1));
    dev.reset_flush_timing();
    for (at, slowest) in [(0, times[0]), (32, times[2]), (0, times[2]), (16, times[1])] {
        dev.write(at * BLOCK, &filled(BLOCK_SIZE, 1)).unwrap();
        dev.flush().unwrap();
        assert_eq!(dev.flush_timing().avg, slowest);
    }
}

#[test]
fn ranges_outside_the_device_are_refused() {
    let dev = span(Kind::Stripe, &devices(&[16, 16]));
    let end = dev.capacity();
    let einval = |result: std::io::Result<()>| {
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EINVAL))
    };
    einval(dev.write(end, &filled(BLOCK_SIZE, 1)));
    einval(dev.read(end - BLOCK, &mut AlignedBuf::zeroed(2 * BLOCK_SIZE)));
    einval(dev.discard(end, BLOCK));
    einval(dev.allocate(512, BLOCK));
    let (tx, rx) = mpsc::channel();
    let done = Box::new(move |result| tx.send(result).unwrap());
    dev.submit(vec![Io::Write { offset: end, buf: Arc::new(filled(BLOCK_SIZE, 1)), done }]);
    einval(rx.recv().unwrap());
}
