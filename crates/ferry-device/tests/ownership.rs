//! Which processes may open a volume, what the others are told, and how a volume is created.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice, DeviceError, FileDevice, Io, OpenMode};
use ferry_env::Env;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;

fn scratch() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("volume");
    (dir, path)
}

fn create(path: &Path, overwrite: bool) -> Result<FileDevice, DeviceError> {
    FileDevice::create(path, 1 << 20, overwrite, &Env::real())
}

fn open(path: &Path, mode: OpenMode) -> Result<FileDevice, DeviceError> {
    FileDevice::open(path, mode, &Env::real())
}

/// The pid in the way and whether it writes.
fn holder(result: Result<FileDevice, DeviceError>) -> (u32, bool) {
    match result.err() {
        Some(DeviceError::InUse { pid, writing, .. }) => (pid, writing),
        other => panic!("not refused because of a holder: {other:?}"),
    }
}

/// Not a test of its own: what a second process does in
/// `another_process_is_refused_with_the_pid_of_the_holder`.
#[test]
#[ignore = "run by other tests, as their second process"]
fn child_process_that_holds_the_device() {
    let Some(path) = std::env::var_os("FERRY_TEST_HOLD") else { return };
    let mode = if std::env::var_os("FERRY_TEST_READ").is_some() {
        OpenMode::ReadOnly
    } else {
        OpenMode::ReadWrite
    };
    let held = open(Path::new(&path), mode).unwrap();
    if std::env::var_os("FERRY_TEST_BUSY").is_some() {
        let buf = Arc::new(AlignedBuf::zeroed(1 << 20));
        for _ in 0..256 {
            let write = Io::Write { offset: 0, buf: Arc::clone(&buf), done: Box::new(drop) };
            held.submit(vec![write, Io::Flush { done: Box::new(drop) }]);
        }
    }
    println!("\nholding");
    std::io::stdout().flush().unwrap();
    std::io::stdin().lines().next();
    drop(held);
}

/// A process of its own that holds the volume until its stdin is closed. Its output must stay open.
fn spawn_holder(path: &Path, flags: &[&str]) -> (Child, BufReader<ChildStdout>) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--ignored", "--exact", "child_process_that_holds_the_device", "--nocapture"])
        .env("FERRY_TEST_HOLD", path);
    command.envs(flags.iter().map(|flag| (flag, "1")));
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let held = output.by_ref().lines().any(|line| line.unwrap() == "holding");
    assert!(held, "the child could not open the volume");
    (child, output)
}

#[test]
fn another_process_is_refused_with_the_pid_of_the_holder() {
    let (_dir, path) = scratch();
    drop(create(&path, false).unwrap());

    let (mut writer, _output) = spawn_holder(&path, &[]);
    assert_eq!(holder(open(&path, OpenMode::ReadWrite)), (writer.id(), true));
    assert_eq!(holder(open(&path, OpenMode::ReadOnly)), (writer.id(), true));
    assert_eq!(holder(create(&path, true)), (writer.id(), true));
    // Not even a kill leaves anything behind.
    writer.kill().unwrap();
    writer.wait().unwrap();
    drop(open(&path, OpenMode::ReadWrite).unwrap());

    let (mut reader, _output) = spawn_holder(&path, &["FERRY_TEST_READ"]);
    assert_eq!(holder(open(&path, OpenMode::ReadWrite)), (reader.id(), false));
    drop(open(&path, OpenMode::ReadOnly).unwrap());
    drop(reader.stdin.take());
    assert!(reader.wait().unwrap().success());
    drop(open(&path, OpenMode::ReadWrite).unwrap());
}

#[test]
fn a_volume_is_free_once_its_owner_was_killed_and_its_last_writes_are_done() {
    let (_dir, path) = scratch();
    drop(create(&path, false).unwrap());
    for _ in 0..10 {
        let (mut writer, _output) = spawn_holder(&path, &["FERRY_TEST_BUSY"]);
        writer.kill().unwrap();
        // Before the corpse is collected.
        drop(open(&path, OpenMode::ReadWrite).unwrap());
        writer.wait().unwrap();
    }
}

#[test]
fn a_second_handle_in_the_same_process_is_refused_and_takes_nothing_from_the_first() {
    let (_dir, path) = scratch();
    let first = create(&path, false).unwrap();
    let me = std::process::id();
    for _ in 0..2 {
        // Classic POSIX locks would be lost here, when the refused handle is closed.
        assert_eq!(holder(open(&path, OpenMode::ReadWrite)), (me, true));
        drop(fs::File::open(&path).unwrap());
    }
    let message = open(&path, OpenMode::ReadOnly).err().unwrap().to_string();
    assert_eq!(message, format!("{} is in use by process {me}", path.display()));
    drop(first);
    for _ in 0..100 {
        // Free at once, each time.
        drop(open(&path, OpenMode::ReadWrite).unwrap());
    }
}

#[test]
fn an_existing_file_is_overwritten_only_on_demand() {
    let (_dir, path) = scratch();
    fs::write(&path, "a letter").unwrap();
    assert!(matches!(create(&path, false).err(), Some(DeviceError::Exists(p)) if p == path));
    assert_eq!(fs::read(&path).unwrap(), b"a letter");
    let dev = create(&path, true).unwrap();
    let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
    buf.fill(7);
    dev.read(0, &mut buf).unwrap();
    assert!(buf.iter().all(|&b| b == 0));
    assert_eq!(dev.capacity(), 1 << 20);
}

#[test]
fn new_volumes_are_private_and_sparse_and_space_is_taken_and_given_back() {
    let (_dir, path) = scratch();
    let dev = create(&path, false).unwrap();
    let blocks = || fs::metadata(&path).unwrap().blocks() * 512;
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    assert_eq!(blocks(), 0);
    let free = dev.host_free().unwrap();
    assert!(free > 1 << 20, "{free}");
    dev.allocate(0, 1 << 19).unwrap();
    assert!(blocks() >= 1 << 19);
    dev.discard(0, 1 << 19).unwrap();
    assert!(blocks() < 1 << 19);
    assert_eq!(fs::metadata(&path).unwrap().len(), 1 << 20);
}

#[test]
fn a_file_cut_short_reads_as_zeros_behind_its_end() {
    let (_dir, path) = scratch();
    let dev = create(&path, false).unwrap();
    let mut buf = AlignedBuf::zeroed(4 * BLOCK_SIZE);
    buf.fill(9);
    dev.write(0, &buf).unwrap();
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(2 * BLOCK_SIZE as u64).unwrap();
    dev.read(0, &mut buf).unwrap();
    assert!(buf[..2 * BLOCK_SIZE].iter().all(|&b| b == 9));
    assert!(buf[2 * BLOCK_SIZE..].iter().all(|&b| b == 0));
    dev.read(8 * BLOCK_SIZE as u64, &mut buf).unwrap();
    assert!(buf.iter().all(|&b| b == 0));
}

#[test]
fn a_file_that_cannot_be_a_volume_is_refused() {
    let (dir, path) = scratch();
    let missing = open(&path, OpenMode::ReadWrite).err().unwrap();
    assert!(
        matches!(&missing, DeviceError::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound)
    );
    assert!(matches!(open(dir.path(), OpenMode::ReadOnly).err(), Some(DeviceError::WrongKind(_))));
    assert!(matches!(
        open(Path::new("/dev/null"), OpenMode::ReadOnly).err(),
        Some(DeviceError::WrongKind(_))
    ));
    for size in [0, 1, 4097, u64::MAX, 1 << 62] {
        let refused = FileDevice::create(&path, size, false, &Env::real()).err();
        assert!(matches!(refused, Some(DeviceError::Size { .. })), "{size}");
        assert!(!path.exists());
    }
    // Larger than the host can make a file: nothing is left behind.
    let refused = FileDevice::create(&path, (1 << 62) - 4096, false, &Env::real()).err();
    assert!(matches!(refused, Some(DeviceError::Io { what: "resize", .. })), "{refused:?}");
    assert!(!path.exists());
}

#[test]
fn a_file_without_bytes_gets_its_size_and_any_other_stays() {
    let (_dir, path) = scratch();
    fs::write(&path, b"").unwrap();
    let fill = |size| FileDevice::open_to_fill(&path, size, &Env::real());
    let device = fill(1 << 20).unwrap();
    assert_eq!(device.capacity(), 1 << 20);
    assert!(holder(fill(1 << 20)).1);
    drop(device);
    assert_eq!(fill(2 << 20).unwrap().capacity(), 1 << 20);
}
