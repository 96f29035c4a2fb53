//! What every device must do, on each implementation.

use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice, FileDevice, Io, MemDevice, OpenMode};
use ferry_env::Env;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};

const BLOCK: u64 = BLOCK_SIZE as u64;

/// A device and what it keeps on the host while it is tested.
struct Case {
    name: &'static str,
    dev: Arc<dyn BlockDevice>,
    _dir: Option<tempfile::TempDir>,
}

fn file_in(name: &'static str, dir: tempfile::TempDir, len: u64) -> Case {
    let dev = FileDevice::create(&dir.path().join("volume"), len, false, &Env::real()).unwrap();
    Case { name, dev: Arc::new(dev), _dir: Some(dir) }
}

/// A directory on a file system with O_DIRECT (the build's own), and one in memory if the machine
/// has it.
fn cases(len: u64) -> Vec<Case> {
    let mut cases = vec![
        Case { name: "memory", dev: Arc::new(MemDevice::new(len)), _dir: None },
        file_in("file", tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap(), len),
    ];
    if let Ok(dir) = tempfile::tempdir_in(PathBuf::from("/dev/shm")) {
        cases.push(file_in("tmpfs", dir, len));
    }
    cases
}

fn filled(len: usize, seed: u64) -> AlignedBuf {
    let mut buf = AlignedBuf::zeroed(len);
    for (at, byte) in buf.iter_mut().enumerate() {
        *byte = (seed.wrapping_mul(31).wrapping_add(at as u64 * 7) >> 2) as u8 | 1;
    }
    buf
}

fn read(dev: &dyn BlockDevice, offset: u64, len: usize) -> Vec<u8> {
    let mut buf = filled(len, 999);
    dev.read(offset, &mut buf).unwrap();
    buf.to_vec()
}

#[test]
fn untouched_ranges_read_as_zeros_and_writes_are_read_back() {
    for case in cases(1 << 20) {
        let dev = &*case.dev;
        assert_eq!(dev.capacity(), 1 << 20, "{}", case.name);
        assert!(read(dev, 0, 1 << 20).iter().all(|&b| b == 0), "{}", case.name);
        // Across the boundaries of what the memory device takes at once.
        let long = filled(3 * 64 * 1024, 1);
        dev.write(15 * BLOCK, &long).unwrap();
        let last = filled(BLOCK_SIZE, 2);
        dev.write((1 << 20) - BLOCK, &last).unwrap();
        dev.flush().unwrap();
        assert!(read(dev, 15 * BLOCK, long.len()) == *long, "{}", case.name);
        assert!(read(dev, (1 << 20) - BLOCK, BLOCK_SIZE) == *last, "{}", case.name);
        assert!(read(dev, 14 * BLOCK, BLOCK_SIZE).iter().all(|&b| b == 0), "{}", case.name);
        assert!(read(dev, 63 * BLOCK, BLOCK_SIZE).iter().all(|&b| b == 0), "{}", case.name);
    }
}

#[test]
fn transfers_outside_the_device_or_of_half_blocks_are_refused() {
    for case in cases(1 << 20) {
        let dev = &*case.dev;
        let mut buf = AlignedBuf::zeroed(2 * BLOCK_SIZE);
        for offset in [(1 << 20) - BLOCK, 1 << 20, u64::MAX - BLOCK + 1, 512] {
            let einval = |result: io::Result<()>| {
                assert_eq!(
                    result.unwrap_err().raw_os_error(),
                    Some(libc::EINVAL),
                    "{} {offset}",
                    case.name
                );
            };
            einval(dev.read(offset, &mut buf));
            einval(dev.write(offset, &buf));
            einval(dev.discard(offset, 2 * BLOCK));
            einval(dev.allocate(offset, 2 * BLOCK));
            let (tx, rx) = mpsc::channel();
            let done = Box::new(move |result| tx.send(result).unwrap());
            dev.submit(vec![Io::Write {
                offset,
                buf: Arc::new(AlignedBuf::zeroed(2 * BLOCK_SIZE)),
                done,
            }]);
            einval(rx.recv().unwrap());
        }
    }
}

#[test]
fn a_batch_longer_than_any_queue_completes_each_request_once() {
    const WRITES: u64 = 3_000;
    for case in cases(WRITES * BLOCK) {
        let (tx, rx) = mpsc::channel();
        let batch = (0..WRITES)
            .map(|n| {
                let tx = tx.clone();
                let done =
                    Box::new(move |result: io::Result<()>| tx.send((n, result.is_ok())).unwrap());
                Io::Write { offset: n * BLOCK, buf: Arc::new(filled(BLOCK_SIZE, n)), done }
            })
            .collect();
        drop(tx);
        case.dev.submit(batch);
        let mut seen: Vec<_> = rx.iter().collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..WRITES).map(|n| (n, true)).collect::<Vec<_>>(), "{}", case.name);
        for n in 0..WRITES {
            assert!(
                read(&*case.dev, n * BLOCK, BLOCK_SIZE) == *filled(BLOCK_SIZE, n),
                "{} {n}",
                case.name
            );
        }
    }
}

#[test]
fn completions_may_submit_and_threads_that_submitted_may_exit() {
    for case in cases(1 << 20) {
        let (tx, rx) = mpsc::channel();
        let threads: Vec<_> = (0..4_u64)
            .map(|n| {
                let (tx, dev) = (tx.clone(), Arc::clone(&case.dev));
                // Write, then flush from the write's completion, then write again from the flush's.
                std::thread::spawn(move || {
                    let again = Arc::clone(&dev);
                    let write = |value, done| Io::Write {
                        offset: n * BLOCK,
                        buf: Arc::new(filled(BLOCK_SIZE, value)),
                        done,
                    };
                    let last = write(n + 100, Box::new(move |result| tx.send(result).unwrap()));
                    let after_flush = Arc::clone(&dev);
                    let flushed = Box::new(move |result: io::Result<()>| {
                        result.unwrap();
                        after_flush.submit(vec![last]);
                    });
                    let written = Box::new(move |result: io::Result<()>| {
                        result.unwrap();
                        again.submit(vec![Io::Flush { done: flushed }]);
                    });
                    dev.submit(vec![write(n, written)]);
                })
            })
            .collect();
        drop(tx);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let results: Vec<_> = rx.iter().collect();
        assert_eq!(results.len(), 4, "{}", case.name);
        assert!(results.iter().all(Result::is_ok), "{} {results:?}", case.name);
        for n in 0..4 {
            assert!(
                read(&*case.dev, n * BLOCK, BLOCK_SIZE) == *filled(BLOCK_SIZE, n + 100),
                "{}",
                case.name
            );
        }
    }
}

#[test]
fn dropping_the_device_first_completes_what_was_submitted() {
    for case in cases(1 << 20) {
        let (tx, rx) = mpsc::channel();
        for n in 0..256_u64 {
            let tx = tx.clone();
            let done = Box::new(move |result| tx.send(result).unwrap());
            case.dev.submit(vec![Io::Write {
                offset: n * BLOCK,
                buf: Arc::new(filled(BLOCK_SIZE, n)),
                done,
            }]);
        }
        drop(tx);
        drop(case.dev);
        let results: Vec<io::Result<()>> = rx.try_iter().collect();
        assert_eq!(results.len(), 256, "{}", case.name);
        assert!(results.iter().all(Result::is_ok), "{}", case.name);
    }
}

#[test]
fn the_last_handle_may_be_dropped_by_a_completion() {
    for case in cases(1 << 20) {
        let (tx, rx) = mpsc::channel();
        let last = Arc::clone(&case.dev);
        let done = Box::new(move |result: io::Result<()>| {
            drop(last);
            tx.send(result).unwrap();
        });
        let dev = Arc::downgrade(&case.dev);
        case.dev.submit(vec![Io::Flush { done }]);
        drop(case.dev);
        rx.recv().unwrap().unwrap();
        assert!(dev.upgrade().is_none(), "{}", case.name);
    }
}

#[test]
fn discarded_ranges_read_as_zeros_and_the_rest_is_kept() {
    for case in cases(1 << 20) {
        let dev = &*case.dev;
        let all = filled(1 << 20, 5);
        dev.write(0, &all).unwrap();
        dev.flush().unwrap();
        dev.discard(3 * BLOCK, 40 * BLOCK).unwrap();
        dev.discard(0, 0).unwrap();
        let now = read(dev, 0, 1 << 20);
        let hole = 3 * BLOCK_SIZE..43 * BLOCK_SIZE;
        assert!(now[hole.clone()].iter().all(|&b| b == 0), "{}", case.name);
        assert!(
            now[..hole.start] == all[..hole.start] && now[hole.end..] == all[hole.end..],
            "{}",
            case.name
        );
    }
}

#[test]
fn only_what_was_flushed_to_hardware_has_a_timing() {
    for case in cases(1 << 20) {
        let dev = &*case.dev;
        assert_eq!(dev.flush_timing().samples, 0);
        dev.flush().unwrap();
        let (tx, rx) = mpsc::channel();
        dev.submit(vec![Io::Flush { done: Box::new(move |result| tx.send(result).unwrap()) }]);
        rx.recv().unwrap().unwrap();
        let expected = if case.name == "memory" { 0 } else { 2 };
        assert_eq!(dev.flush_timing().samples, expected, "{}", case.name);
        dev.reset_flush_timing();
        assert_eq!(dev.flush_timing().samples, 0, "{}", case.name);
    }
}

#[test]
fn memory_is_taken_only_by_what_was_written() {
    let dev = MemDevice::new(1 << 40);
    assert_eq!(dev.resident(), 0);
    dev.write((1 << 40) - BLOCK, &filled(BLOCK_SIZE, 1)).unwrap();
    dev.write(60 * 1024, &filled(2 * BLOCK_SIZE, 1)).unwrap();
    read(&dev, 1 << 30, 1 << 20);
    assert_eq!(dev.resident(), 3 * 64 * 1024);
    dev.discard(0, 128 * 1024).unwrap();
    assert_eq!(dev.resident(), 64 * 1024);
}

#[test]
fn a_reader_cannot_write() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("volume");
    drop(FileDevice::create(&path, 1 << 20, false, &Env::real()).unwrap());
    let dev = FileDevice::open(&path, OpenMode::ReadOnly, &Env::real()).unwrap();
    let erofs =
        |result: io::Result<()>| assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EROFS));
    erofs(dev.write(0, &filled(BLOCK_SIZE, 1)));
    erofs(dev.discard(0, BLOCK));
    erofs(dev.allocate(0, BLOCK));
    let (tx, rx) = mpsc::channel();
    let done = Box::new(move |result| tx.send(result).unwrap());
    dev.submit(vec![Io::Write { offset: 0, buf: Arc::new(filled(BLOCK_SIZE, 1)), done }]);
    erofs(rx.recv().unwrap());
    dev.flush().unwrap();
    assert!(read(&dev, 0, 1 << 20).iter().all(|&b| b == 0));
}
