//! The device that takes real time: what it does and in which order; never sooner than it says, and
//! without processor time.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

use ferry_bench::model::ModelDevice;
use ferry_bench::{DeviceModel, now};
use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice, Io};
use rustix::time::{ClockId, clock_gettime};
use std::sync::{Arc, mpsc};
use std::time::Duration;

const FLUSH: Duration = Duration::from_millis(30);
const WRITE: Duration = Duration::from_millis(5);

fn device(queue_depth: u32, serial_flushes: bool) -> Arc<ModelDevice> {
    let model = DeviceModel { flush_time: FLUSH, write_time: WRITE, queue_depth, serial_flushes };
    let device = ModelDevice::new(model, 1 << 20).unwrap();
    device.begin();
    device
}

fn block(byte: u8) -> AlignedBuf {
    let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
    buf.fill(byte);
    buf
}

/// Submits `count` requests at once; how long it took until each had ended.
fn times(
    device: &ModelDevice,
    count: u64,
    request: impl Fn(u64, ferry_device::IoDone) -> Io,
) -> Vec<Duration> {
    let (told, tell) = mpsc::channel();
    let begin = now();
    let batch = (0..count).map(|n| {
        let told = told.clone();
        request(n, Box::new(move |result| told.send((result, now() - begin)).unwrap()))
    });
    device.submit(batch.collect());
    (0..count)
        .map(|_| {
            let (result, took) = tell.recv().unwrap();
            result.unwrap();
            took
        })
        .collect()
}

fn write(n: u64, done: ferry_device::IoDone) -> Io {
    Io::Write { offset: n * BLOCK_SIZE as u64, buf: Arc::new(block(n as u8 + 1)), done }
}

#[test]
fn a_written_block_is_there_when_the_write_has_ended_and_not_before() {
    let device = device(1, true);
    let mut found = AlignedBuf::zeroed(BLOCK_SIZE);
    let (told, tell) = mpsc::channel();
    device.submit(vec![write(2, Box::new(move |result| told.send(result).unwrap()))]);
    device.read(2 * BLOCK_SIZE as u64, &mut found).unwrap();
    assert_eq!(found[0], 0);
    tell.recv().unwrap().unwrap();
    device.read(2 * BLOCK_SIZE as u64, &mut found).unwrap();
    assert_eq!(found[..], block(3)[..]);
    device.write(0, &block(9)).unwrap();
    device.read(0, &mut found).unwrap();
    assert_eq!(found[0], 9);
}

#[test]
fn writes_wait_for_a_free_queue_slot() {
    let took = times(&device(2, true), 5, write);
    for (n, took) in (0..).zip(took) {
        assert!(took >= WRITE * (n / 2 + 1), "write {n} took {took:?}");
    }
}

#[test]
fn flushes_follow_one_another_or_run_beside_each_other() {
    let flush = |_, done| Io::Flush { done };
    let serial = device(1, true);
    for (n, took) in (1..).zip(times(&serial, 3, flush)) {
        assert!(took >= FLUSH * n, "flush {n} took {took:?}");
    }
    assert!(serial.flush_timing().avg >= FLUSH);
    assert_eq!((serial.flush_timing().samples, serial.done().flushes), (3, 3));
    // That they are not one after the other: 100 of them would take 3 s.
    let parallel = device(1, false);
    let took = times(&parallel, 100, flush);
    assert!(took.iter().all(|took| *took >= FLUSH && *took < FLUSH * 90), "{took:?}");
    let lateness = parallel.take_lateness();
    assert_eq!(lateness.count(), 100);
    assert!(
        lateness.quantile(0.5) <= lateness.quantile(0.99)
            && lateness.quantile(0.99) <= lateness.quantile(1.0),
        "{lateness:?}"
    );
    assert_eq!(parallel.take_lateness().count(), 0);
}

#[test]
fn waiting_takes_no_processor_time() {
    let used = || Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap();
    let model = DeviceModel { flush_time: Duration::from_millis(300), ..DeviceModel::default() };
    let device = ModelDevice::new(model, 1 << 20).unwrap();
    device.begin();
    let before = used();
    device.flush().unwrap();
    // Other tests of this process run beside, and do next to nothing; a thread that spins would use
    // 300 ms.
    let spent = used() - before;
    assert!(spent < Duration::from_millis(150), "{spent:?}");
}

#[test]
fn requests_in_flight_end_when_the_device_is_dropped() {
    let (told, tell) = mpsc::channel();
    let device = device(1, true);
    device.submit(vec![Io::Flush {
        done: Box::new(move |result| told.send(result.is_ok()).unwrap()),
    }]);
    drop(device);
    assert_eq!(tell.recv(), Ok(true));
}
