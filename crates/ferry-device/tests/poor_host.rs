//! A volume on host file systems that have little: ramfs has neither O_DIRECT nor hole punching nor
//! reservations, a small tmpfs has no space. Where the tests may not mount (they are not root) they
//! say so.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice, DeviceError, FileDevice, Io, OpenMode};
use ferry_env::Env;
use std::process::Command;
use std::sync::{Arc, mpsc};

/// A mounted file system, unmounted at the end.
struct Mounted(tempfile::TempDir);

impl Mounted {
    /// `None`, and a word about it, where this machine does not let us.
    fn new(kind: &str, options: &str) -> Option<Self> {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let output = Command::new("mount")
            .args(["-t", kind, "-o", options, "none"])
            .arg(dir.path())
            .output();
        if output.as_ref().is_ok_and(|output| output.status.success()) {
            return Some(Self(dir));
        }
        eprintln!("not tested, no {kind} to be had: {output:?}");
        None
    }
}

impl Drop for Mounted {
    /// A process that another test has just begun keeps the files of this one open until it runs
    /// its own program: it is tried again.
    fn drop(&mut self) {
        let again = "for i in $(seq 300); do umount \"$1\" && exit; sleep 0.1; done; exit 1";
        let unmounted = Command::new("sh").args(["-c", again, "sh"]).arg(self.0.path()).status();
        assert!(
            unmounted.is_ok_and(|status| status.success()),
            "{} stays mounted",
            self.0.path().display()
        );
    }
}

#[test]
fn missing_features_of_the_host_have_a_fallback() {
    let Some(host) = Mounted::new("ramfs", "mode=700") else { return };
    let path = host.0.path().join("volume");
    let dev = FileDevice::create(&path, 1 << 20, false, &Env::real()).unwrap();
    let mut buf = AlignedBuf::zeroed(2 * BLOCK_SIZE);
    buf.fill(7);

    dev.allocate(0, 1 << 20).unwrap();
    dev.write(0, &buf).unwrap();
    dev.discard(0, 1 << 20).unwrap();
    buf.fill(1);
    dev.read(0, &mut buf).unwrap();
    // "As before" is allowed; what is not is anything else.
    assert!(buf.iter().all(|&b| b == 7));

    let (tx, rx) = mpsc::channel();
    let flushed = tx.clone();
    let write = Io::Write {
        offset: 1 << 19,
        buf: Arc::new(buf),
        done: Box::new(move |result| tx.send(result).unwrap()),
    };
    dev.submit(vec![
        write,
        Io::Flush { done: Box::new(move |result| flushed.send(result).unwrap()) },
    ]);
    rx.iter().for_each(|result: std::io::Result<()>| result.unwrap());
    assert!(matches!(
        FileDevice::open(&path, OpenMode::ReadOnly, &Env::real()).err(),
        Some(DeviceError::InUse { .. })
    ));
    drop(dev);

    let dev = FileDevice::open(&path, OpenMode::ReadOnly, &Env::real()).unwrap();
    let mut buf = AlignedBuf::zeroed(4 * BLOCK_SIZE);
    dev.read((1 << 19) - BLOCK_SIZE as u64, &mut buf).unwrap();
    let blocks: Vec<_> =
        buf.chunks(BLOCK_SIZE).map(|block| (block[0], block[BLOCK_SIZE - 1])).collect();
    assert_eq!(blocks, [(0, 0), (7, 7), (7, 7), (0, 0)]);
}

#[test]
fn a_full_host_says_so_and_takes_writes_again_when_it_has_space() {
    let Some(host) = Mounted::new("tmpfs", "size=1m") else { return };
    let dev =
        FileDevice::create(&host.0.path().join("volume"), 16 << 20, false, &Env::real()).unwrap();
    let enospc = |result: std::io::Result<()>| {
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::ENOSPC))
    };
    let half = Arc::new(AlignedBuf::zeroed(1 << 19));
    let submit = |offset| {
        let (tx, rx) = mpsc::channel();
        let done = Box::new(move |result| tx.send(result).unwrap());
        dev.submit(vec![Io::Write { offset, buf: Arc::clone(&half), done }]);
        rx.recv().unwrap()
    };
    assert_eq!(dev.host_free(), Some(1 << 20));
    dev.allocate(0, 1 << 19).unwrap();
    assert_eq!(dev.host_free(), Some(1 << 19));
    dev.write(4 << 20, &half).unwrap();
    assert_eq!(dev.host_free(), Some(0));
    enospc(dev.allocate(8 << 20, 4096));
    enospc(dev.write(8 << 20, &half));
    enospc(submit(8 << 20));
    // The allocated space is there.
    submit(0).unwrap();
    dev.discard(4 << 20, 1 << 19).unwrap();
    submit(8 << 20).unwrap();
    dev.flush().unwrap();
}
