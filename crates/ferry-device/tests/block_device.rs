//! A volume on a block device: a loop device, where the tests may make one (root, and a kernel with
//! free loop devices).
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

use ferry_device::{
    AlignedBuf, BLOCK_SIZE, BlockDevice, DeviceError, FileDevice, FlushCoordinator, OpenMode,
};
use ferry_env::Env;
use std::fs;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

const SIZE: u64 = 16 << 20;

/// A loop device over a sparse file, taken down at the end.
struct Loop {
    device: PathBuf,
    dir: tempfile::TempDir,
}

impl Loop {
    /// `None`, and a word about it, where this machine does not let us.
    fn new() -> Option<Self> {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let file = dir.path().join("backing");
        fs::File::create(&file).unwrap().set_len(SIZE).unwrap();
        let output = Command::new("losetup").args(["--find", "--show"]).arg(&file).output();
        match output {
            Ok(output) if output.status.success() => {
                let device = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim());
                Some(Self { device, dir })
            }
            refused => {
                eprintln!("not tested, no loop device to be had: {refused:?}");
                None
            }
        }
    }

    /// Bytes that the backing file takes.
    fn backing_bytes(&self) -> u64 {
        fs::metadata(self.dir.path().join("backing")).unwrap().blocks() * 512
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let detached = Command::new("losetup").arg("--detach").arg(&self.device).status();
        assert!(
            detached.is_ok_and(|status| status.success()),
            "{} stays behind",
            self.device.display()
        );
    }
}

fn open(path: &Path, mode: OpenMode) -> Result<FileDevice, DeviceError> {
    FileDevice::open(path, mode, &Env::real())
}

#[test]
fn a_block_device_is_written_discarded_and_owned_like_a_file() {
    let Some(on) = Loop::new() else { return };
    // Writing over a device must be asked for, and asks for no more than there is.
    let create = |size, overwrite| FileDevice::create(&on.device, size, overwrite, &Env::real());
    assert!(matches!(create(SIZE, false).err(), Some(DeviceError::Exists(_))));
    assert!(matches!(create(SIZE + 4096, true).err(), Some(DeviceError::Size { limit: SIZE, .. })));

    let dev = create(SIZE, true).unwrap();
    assert!(dev.is_block_device());
    assert_eq!((dev.capacity(), dev.host_free()), (SIZE, None));
    let refused = open(&on.device, OpenMode::ReadOnly).err();
    assert!(
        matches!(refused, Some(DeviceError::InUse { pid, writing: true, .. }) if pid == std::process::id())
    );

    let mut buf = AlignedBuf::zeroed(1 << 20);
    buf.fill(3);
    dev.allocate(0, SIZE).unwrap();
    let shared = FlushCoordinator::new(std::sync::Arc::new(dev));
    shared.device().write(1 << 20, &buf).unwrap();
    shared.flush_wait(shared.write_completed()).unwrap();
    assert!(on.backing_bytes() >= 1 << 20);
    shared.device().discard(1 << 20, 1 << 20).unwrap();
    shared.device().flush().unwrap();
    assert!(on.backing_bytes() < 1 << 20);
    shared.device().read(1 << 20, &mut buf).unwrap();
    assert!(buf.iter().all(|&b| b == 0));
    drop(shared);

    let readers = [
        open(&on.device, OpenMode::ReadOnly).unwrap(),
        open(&on.device, OpenMode::ReadOnly).unwrap(),
    ];
    assert!(matches!(
        open(&on.device, OpenMode::ReadWrite).err(),
        Some(DeviceError::InUse { writing: false, .. })
    ));
    let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
    readers.iter().for_each(|reader| reader.read(SIZE - 4096, &mut block).unwrap());
}

#[test]
fn a_device_that_the_kernel_uses_is_refused() {
    let Some(on) = Loop::new() else { return };
    // An exclusive open is what a mount holds.
    let mounted =
        fs::OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(&on.device).unwrap();
    assert!(matches!(open(&on.device, OpenMode::ReadWrite).err(), Some(DeviceError::Busy(_))));
    drop(mounted);
    drop(open(&on.device, OpenMode::ReadWrite).unwrap());
}
