#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

use super::image::SECTOR_SIZE;
use super::*;
use std::collections::BTreeSet;
use std::sync::mpsc;

const BLOCK: u64 = BLOCK_SIZE as u64;
const EIO: i32 = 5;
const ENOSPC: i32 = 28;
/// Crashes made of one trace; each kind of fate comes up among so many.
const SEEDS: u64 = 200;

fn block_of(byte: u8) -> AlignedBuf {
    blocks_of(1, byte)
}

fn blocks_of(blocks: usize, byte: u8) -> AlignedBuf {
    let mut buf = AlignedBuf::zeroed(blocks * BLOCK_SIZE);
    buf.fill(byte);
    buf
}

fn read(dev: &SimDevice, block: u64) -> Vec<u8> {
    let mut buf = block_of(0xee);
    dev.read(block * BLOCK, &mut buf).unwrap();
    buf.to_vec()
}

/// The byte that fills the block, if one does.
fn whole(dev: &SimDevice, block: u64) -> Option<u8> {
    let bytes = read(dev, block);
    bytes.iter().all(|&b| b == bytes[0]).then_some(bytes[0])
}

fn write(dev: &SimDevice, block: u64, byte: u8) {
    dev.write(block * BLOCK, &block_of(byte)).unwrap();
}

/// What all crashes at `point` make of a block: the bytes that fill it wholly, and whether any is
/// torn.
fn fates(dev: &SimDevice, point: usize, block: u64) -> (BTreeSet<u8>, bool) {
    let images = (0..SEEDS).map(|seed| dev.crash_image(point, &mut SimRng::new(seed)));
    let found: Vec<_> = images.map(|image| whole(&image, block)).collect();
    (found.iter().flatten().copied().collect(), found.contains(&None))
}

fn errno_of(result: io::Result<()>) -> Option<i32> {
    result.err().and_then(|error| error.raw_os_error())
}

/// Submits and gives the channel that is told.
fn submit(dev: &SimDevice, make: impl FnOnce(IoDone) -> Io) -> mpsc::Receiver<io::Result<()>> {
    let (tx, rx) = mpsc::channel();
    dev.submit(vec![make(Box::new(move |result| tx.send(result).unwrap()))]);
    rx
}

fn submit_write(dev: &SimDevice, block: u64, byte: u8) -> mpsc::Receiver<io::Result<()>> {
    submit(dev, |done| Io::Write { offset: block * BLOCK, buf: Arc::new(block_of(byte)), done })
}

#[test]
fn numbers_follow_from_the_seed_and_stay_in_their_range() {
    let numbers =
        |seed| (0..1_000).scan(SimRng::new(seed), |rng, _| Some(rng.below(10))).collect::<Vec<_>>();
    assert_eq!(numbers(7), numbers(7));
    assert_ne!(numbers(7), numbers(8));
    assert_eq!(numbers(7).into_iter().collect::<BTreeSet<_>>(), (0..10).collect());
}

#[test]
fn simulated_time_moves_only_when_it_is_told_to() {
    let (env, clock) = sim_env(1);
    let (before, wall) = (env.clock.monotonic(), env.clock.wall());
    assert_eq!(env.clock.monotonic(), before);
    clock.advance(std::time::Duration::from_millis(16));
    assert_eq!(env.clock.monotonic() - before, std::time::Duration::from_millis(16));
    assert_eq!(env.clock.wall() - wall, std::time::Duration::from_millis(16));
    assert_eq!(env.entropy.next_u64(), sim_env(1).0.entropy.next_u64());
}

#[test]
fn reads_see_writes_and_discards_at_once() {
    let dev = SimDevice::new(8 * BLOCK);
    assert_eq!(whole(&dev, 3), Some(0));
    dev.write(2 * BLOCK, &blocks_of(3, 7)).unwrap();
    dev.discard(3 * BLOCK, BLOCK).unwrap();
    assert_eq!(
        [1, 2, 3, 4, 5].map(|block| whole(&dev, block)),
        [Some(0), Some(7), Some(0), Some(7), Some(0)]
    );
    for offset in [512, 8 * BLOCK, u64::MAX - BLOCK + 1] {
        assert_eq!(errno_of(dev.write(offset, &block_of(1))), Some(EINVAL));
        assert_eq!(errno_of(dev.read(offset, &mut block_of(1))), Some(EINVAL));
    }
}

#[test]
fn flushed_writes_survive_every_crash_and_others_may_not() {
    let dev = SimDevice::new(8 * BLOCK);
    write(&dev, 0, 1);
    dev.flush().unwrap();
    write(&dev, 0, 2);
    write(&dev, 1, 3);
    dev.discard(2 * BLOCK, BLOCK).unwrap();
    let end = dev.trace_len();
    assert_eq!(fates(&dev, end, 0), (BTreeSet::from([1, 2]), true));
    assert_eq!(fates(&dev, end, 1), (BTreeSet::from([0, 3]), true));
    dev.flush().unwrap();
    assert_eq!(fates(&dev, dev.trace_len(), 0), (BTreeSet::from([2]), false));
    // Before the end of a flush nothing is certain, after it all is.
    let points = dev.flush_points();
    assert_eq!(points.len(), 4);
    assert_eq!(fates(&dev, points[2], 0).0, BTreeSet::from([1, 2]));
    assert_eq!(fates(&dev, points[3], 0).0, BTreeSet::from([2]));
    // Before the first write nothing can be there.
    assert_eq!(fates(&dev, 0, 0), (BTreeSet::from([0]), false));
}

#[test]
fn tears_are_between_sectors_and_writes_are_lost_independently() {
    let dev = SimDevice::new(8 * BLOCK);
    let mut seen = BTreeSet::new();
    write(&dev, 0, 1);
    write(&dev, 1, 2);
    dev.write(2 * BLOCK, &blocks_of(2, 3)).unwrap();
    for seed in 0..SEEDS {
        let image = dev.crash_image(dev.trace_len(), &mut SimRng::new(seed));
        for (block, new) in [(0, 1), (1, 2), (2, 3), (3, 3)] {
            for sector in read(&image, block).chunks(SECTOR_SIZE) {
                assert!(
                    sector.iter().all(|&b| b == 0) || sector.iter().all(|&b| b == new),
                    "seed {seed}"
                );
            }
        }
        seen.insert((whole(&image, 0), whole(&image, 1)));
    }
    for first in [None, Some(0), Some(1)] {
        for second in [None, Some(0), Some(2)] {
            assert!(seen.contains(&(first, second)), "never {first:?} with {second:?}");
        }
    }
}

#[test]
fn a_crash_image_follows_from_the_seed_and_can_crash_again() {
    let dev = SimDevice::new(64 * BLOCK);
    let mut rng = SimRng::new(3);
    for n in 0..200_u64 {
        write(&dev, rng.below(64), n as u8);
        if rng.chance(1, 20) {
            dev.flush().unwrap();
        }
    }
    let contents = |dev: &SimDevice| (0..64).map(|block| read(dev, block)).collect::<Vec<_>>();
    for point in [0, 100, dev.trace_len()] {
        let image = dev.crash_image(point, &mut SimRng::new(9));
        assert!(contents(&image) == contents(&dev.crash_image(point, &mut SimRng::new(9))));
        // Its own past is durable, its own writes are not.
        assert_eq!(image.trace_len(), 0);
        write(&image, 5, 255);
        let again = image.crash_image(0, &mut SimRng::new(1));
        assert!(
            (0..64)
                .filter(|&block| block != 5)
                .all(|block| read(&again, block) == read(&image, block))
        );
        assert_ne!(whole(&again, 5), Some(255));
    }
}

#[test]
fn blocks_that_were_never_written_may_hold_an_older_volume() {
    let dev = SimDevice::new(4 * BLOCK);
    dev.scribble(BLOCK, 2 * BLOCK, &mut SimRng::new(5));
    let old = read(&dev, 1);
    assert!(old.iter().any(|&b| b != 0) && old != read(&dev, 2));
    write(&dev, 1, 9);
    let lost = (0..SEEDS).map(|seed| dev.crash_image(dev.trace_len(), &mut SimRng::new(seed)));
    assert!(lost.into_iter().any(|image| read(&image, 1) == old));
    dev.restart_trace();
    assert_eq!((dev.trace_len(), whole(&dev.crash_image(0, &mut SimRng::new(1)), 1)), (0, Some(9)));
}

#[test]
fn a_copy_has_the_contents_and_a_life_of_its_own() {
    let dev = SimDevice::new(4 * BLOCK);
    write(&dev, 0, 1);
    write(&dev, 1, 2);
    dev.restart_trace();
    dev.discard(0, BLOCK).unwrap();
    write(&dev, 2, 3);
    let copy = dev.copy();
    let seen = |dev: &SimDevice| (0..4).map(|block| whole(dev, block)).collect::<Vec<_>>();
    assert_eq!(seen(&copy), [Some(0), Some(2), Some(3), Some(0)]);
    assert_eq!(copy.trace_len(), 0);
    write(&copy, 1, 9);
    assert_eq!((whole(&dev, 1), whole(&copy, 1)), (Some(2), Some(9)));
    assert_eq!(
        seen(&copy.crash_image(0, &mut SimRng::new(1))),
        [Some(0), Some(2), Some(3), Some(0)]
    );
    // What was discarded before the trace stays discarded.
    dev.restart_trace();
    assert_eq!(
        seen(&dev.crash_image(0, &mut SimRng::new(1))),
        [Some(0), Some(2), Some(3), Some(0)]
    );
}

#[test]
fn each_operation_can_fail_once_or_from_then_on() {
    let dev = SimDevice::new(4 * BLOCK);
    let operations: [(Op, &dyn Fn() -> io::Result<()>); 5] = [
        (Op::Read, &|| dev.read(0, &mut block_of(0))),
        (Op::Write, &|| dev.write(0, &block_of(1))),
        (Op::Flush, &|| dev.flush()),
        (Op::Discard, &|| dev.discard(0, BLOCK)),
        (Op::Allocate, &|| dev.allocate(0, BLOCK)),
    ];
    for (op, run) in operations {
        let outcomes = || (0..5).map(|_| errno_of(run())).collect::<Vec<_>>();
        dev.inject(Fault { op, after: 2, errno: EIO, sticky: false });
        assert_eq!(outcomes(), [None, None, Some(EIO), None, None], "{op:?}");
        dev.inject(Fault { op, after: 1, errno: ENOSPC, sticky: true });
        assert_eq!(
            outcomes(),
            [None, Some(ENOSPC), Some(ENOSPC), Some(ENOSPC), Some(ENOSPC)],
            "{op:?}"
        );
        // The others go on.
        assert!(
            operations.iter().filter(|(other, _)| *other != op).all(|(_, run)| run().is_ok()),
            "{op:?}"
        );
        dev.heal();
        assert_eq!(outcomes(), [None; 5], "{op:?}");
    }
}

#[test]
fn submitted_requests_fail_as_well() {
    let dev = SimDevice::new(4 * BLOCK);
    dev.inject(Fault { op: Op::Write, after: 0, errno: ENOSPC, sticky: false });
    dev.inject(Fault { op: Op::Flush, after: 0, errno: EIO, sticky: false });
    assert_eq!(errno_of(submit_write(&dev, 0, 1).recv().unwrap()), Some(ENOSPC));
    assert_eq!(errno_of(submit(&dev, |done| Io::Flush { done }).recv().unwrap()), Some(EIO));
    assert_eq!(errno_of(submit_write(&dev, 9, 1).recv().unwrap()), Some(EINVAL));
    submit_write(&dev, 0, 1).recv().unwrap().unwrap();
    assert_eq!(whole(&dev, 0), Some(1));
}

#[test]
fn a_failed_write_is_not_read_back_and_may_survive_a_crash() {
    let dev = SimDevice::new(4 * BLOCK);
    dev.inject(Fault { op: Op::Write, after: 0, errno: EIO, sticky: false });
    assert_eq!(errno_of(dev.write(0, &block_of(1))), Some(EIO));
    assert_eq!(whole(&dev, 0), Some(0));
    dev.flush().unwrap();
    assert_eq!(fates(&dev, dev.trace_len(), 0), (BTreeSet::from([0, 1]), true));
    // Written again and flushed, it is.
    write(&dev, 0, 2);
    dev.flush().unwrap();
    assert_eq!(fates(&dev, dev.trace_len(), 0), (BTreeSet::from([2]), false));
}

#[test]
fn writes_of_a_failed_flush_are_not_durable_after_the_next() {
    let dev = SimDevice::new(4 * BLOCK);
    write(&dev, 0, 1);
    dev.inject(Fault { op: Op::Flush, after: 0, errno: EIO, sticky: false });
    assert_eq!(errno_of(dev.flush()), Some(EIO));
    write(&dev, 1, 2);
    dev.flush().unwrap();
    let end = dev.trace_len();
    assert_eq!(fates(&dev, end, 0), (BTreeSet::from([0, 1]), true));
    assert_eq!(fates(&dev, end, 1), (BTreeSet::from([2]), false));
    assert_eq!(dev.flush_points().len(), 2, "a flush that failed is no boundary");
}

#[test]
fn a_lying_flush_makes_nothing_durable() {
    let dev = SimDevice::new(4 * BLOCK);
    dev.set_flush_lies(true);
    write(&dev, 0, 1);
    dev.flush().unwrap();
    assert_eq!(fates(&dev, dev.trace_len(), 0), (BTreeSet::from([0, 1]), true));
    dev.set_flush_lies(false);
    dev.flush().unwrap();
    assert_eq!(fates(&dev, dev.trace_len(), 0), (BTreeSet::from([1]), false));
}

#[test]
fn held_requests_complete_in_the_order_of_their_release() {
    let dev = SimDevice::new(4 * BLOCK);
    dev.set_hold(true);
    let first = submit_write(&dev, 0, 1);
    let second = submit_write(&dev, 1, 2);
    assert_eq!((dev.held(), whole(&dev, 0), whole(&dev, 1)), (2, Some(0), Some(0)));
    assert!(first.try_recv().is_err() && second.try_recv().is_err());
    assert!(dev.release(1));
    second.try_recv().unwrap().unwrap();
    assert!(first.try_recv().is_err());
    assert_eq!((dev.held(), whole(&dev, 0), whole(&dev, 1)), (1, Some(0), Some(2)));
    assert!(!dev.release(1));
    dev.release_all(&mut SimRng::new(1));
    first.try_recv().unwrap().unwrap();
}

#[test]
fn a_flush_covers_only_what_completed_before_it_began() {
    let dev = SimDevice::new(4 * BLOCK);
    dev.set_hold(true);
    let writes = [submit_write(&dev, 0, 1), submit_write(&dev, 1, 2)];
    assert!(dev.release(0));
    let flush = submit(&dev, |done| Io::Flush { done });
    // The second write completes while the flush is under way.
    assert!(dev.release(0));
    assert!(dev.release(0));
    flush.try_recv().unwrap().unwrap();
    writes.iter().for_each(|write| write.try_recv().unwrap().unwrap());
    let end = dev.trace_len();
    assert_eq!(fates(&dev, end, 0), (BTreeSet::from([1]), false));
    assert_eq!(fates(&dev, end, 1), (BTreeSet::from([0, 2]), true));
}

#[test]
fn completions_may_submit() {
    let dev = Arc::new(SimDevice::new(4 * BLOCK));
    dev.set_hold(true);
    let (tx, rx) = mpsc::channel();
    let again = Arc::clone(&dev);
    let flush_after = Box::new(move |result: io::Result<()>| {
        result.unwrap();
        again.submit(vec![Io::Flush { done: Box::new(move |result| tx.send(result).unwrap()) }]);
    });
    dev.submit(vec![Io::Write { offset: 0, buf: Arc::new(block_of(1)), done: flush_after }]);
    dev.release_all(&mut SimRng::new(2));
    rx.try_recv().unwrap().unwrap();
    assert_eq!(fates(&dev, dev.trace_len(), 0), (BTreeSet::from([1]), false));
}

#[test]
fn free_space_of_the_host_is_what_the_test_says() {
    let dev = SimDevice::new(4 * BLOCK);
    assert_eq!(dev.host_free(), None);
    dev.set_host_free(Some(12_288));
    assert_eq!(dev.host_free(), Some(12_288));
    assert_eq!(dev.crash_image(0, &mut SimRng::new(1)).host_free(), Some(12_288));
}
