//! `ferry resize` as a user calls it, on volumes that are mounted (as root, with /dev/fuse), and on
//! others.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::statvfs;
use tempfile::TempDir;

const FERRY: &str = env!("CARGO_BIN_EXE_ferry");
const MIB: u64 = 1 << 20;
/// Bytes of each file.
const FILE: usize = 3 << 20;

/// A command that would wait for ever fails its test instead.
fn ferry(args: &[&str]) -> Output {
    let mut bounded = Command::new("timeout");
    bounded.args(["--signal=KILL", "120", FERRY]).args(args).output().expect("the command runs")
}

#[track_caller]
fn ok(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[track_caller]
fn fails(output: &Output, text: &str) -> String {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && said.contains(text), "{output:?}");
    said
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a temporary directory's name is UTF-8")
}

/// A volume, and a mount point that no mount outlives.
struct TestVolume(TempDir);

impl TestVolume {
    fn new(size: &str) -> Self {
        let this = Self(TempDir::new().expect("a directory"));
        fs::create_dir(this.mnt()).expect("a mount point");
        ok(&ferry(&["mkfs", text(&this.path()), "--size", size]));
        this
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("volume.ferry")
    }

    fn mnt(&self) -> PathBuf {
        self.0.path().join("mnt")
    }

    fn mount(&self) {
        let log = format!("log={}", self.0.path().join("log").display());
        ok(&ferry(&["mount", text(&self.path()), text(&self.mnt()), "-o", &log]));
    }

    fn umount(&self) {
        ok(&ferry(&["umount", text(&self.mnt())]));
    }

    fn check(&self) {
        ok(&ferry(&["fsck", text(&self.path())]));
    }

    fn len(&self) -> u64 {
        fs::metadata(self.path()).expect("it is there").len()
    }

    /// What `df` calls the size.
    fn total(&self) -> u64 {
        let of = statvfs(self.mnt()).expect("it is mounted");
        of.f_blocks * of.f_frsize
    }
}

impl Drop for TestVolume {
    fn drop(&mut self) {
        ferry(&["umount", "--force", text(&self.mnt())]);
    }
}

/// The contents of file `n`.
fn contents(n: usize) -> Vec<u8> {
    (0..FILE).map(|at| (at / 4096 * 7 + n) as u8).collect()
}

fn name(mnt: &Path, n: usize) -> PathBuf {
    mnt.join(format!("file {n}"))
}

/// Writes file `n`. `false`: there was no space.
fn write(mnt: &Path, n: usize) -> bool {
    let written = File::create(name(mnt, n))
        .and_then(|mut file| file.write_all(&contents(n)).and_then(|()| file.sync_all()));
    match written {
        Ok(()) => true,
        Err(error) if error.kind() == ErrorKind::StorageFull => {
            fs::remove_file(name(mnt, n)).expect("it can be removed");
            false
        }
        Err(error) => panic!("file {n}: {error}"),
    }
}

#[track_caller]
fn holds(mnt: &Path, files: impl Iterator<Item = usize>) {
    for n in files {
        assert!(fs::read(name(mnt, n)).expect("it is there") == contents(n), "file {n}");
    }
}

#[test]
fn a_full_volume_grows_while_a_program_writes_and_shrinks_again() {
    let volume = TestVolume::new("128M");
    volume.mount();
    let mnt = volume.mnt();
    let full = (0..).find(|n| !write(&mnt, *n)).expect("it becomes full");
    let before = volume.total();
    let stop = AtomicBool::new(false);
    let end = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            // It finds space as soon as there is some.
            let mut n = full;
            while !stop.load(Ordering::SeqCst) && n < full + 60 {
                n += usize::from(write(&mnt, n));
            }
            n
        });
        let resized = ferry(&["resize", text(&mnt), "1G"]);
        // Otherwise it would look for space for ever.
        stop.store(!resized.status.success(), Ordering::SeqCst);
        let end = writer.join().expect("it writes");
        let said = ok(&resized);
        assert!(said.contains("1.0 GiB"), "{said}");
        end
    });
    assert_eq!(end, full + 60, "the program has written what it wanted to");
    assert!(volume.total() > before + 800 * MIB, "df shows it");
    assert_eq!(volume.len(), 1 << 30);
    holds(&mnt, 0..end);
    // It does not fit any more, and what would is said.
    let said = fails(&ferry(&["resize", text(&volume.path()), "128M"]), "it has to have");
    assert!(said.contains("bytes)") && volume.len() == 1 << 30, "{said}");
    (0..end)
        .filter(|n| n % 3 != 0)
        .for_each(|n| fs::remove_file(name(&mnt, n)).expect("it is there"));
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for n in 1000..1005 {
                assert!(write(&mnt, n), "there is space");
            }
        });
        ok(&ferry(&["resize", text(&volume.path()), "256M"]));
        writer.join().expect("it writes");
    });
    assert!(volume.len() == 256 * MIB && volume.total() < 256 * MIB, "df shows it");
    let left = || (0..end).filter(|n| n % 3 == 0).chain(1000..1005);
    holds(&mnt, left());
    volume.umount();
    volume.check();
    volume.mount();
    holds(&mnt, left());
    volume.umount();
    volume.check();
}

#[test]
fn a_volume_that_is_not_mounted_is_resized() {
    let volume = TestVolume::new("128M");
    let path = volume.path();
    volume.mount();
    (0..10).for_each(|n| assert!(write(&volume.mnt(), n)));
    volume.umount();
    // From one to the other, far beyond the slots that it was made with.
    for (size, bytes) in [("4G", 4096 * MIB), ("96M", 96 * MIB), ("80G", 81_920 * MIB)] {
        let said = ok(&ferry(&["resize", text(&path), size]));
        assert!(said.starts_with(text(&path)), "{said}");
        assert_eq!(volume.len(), bytes);
        volume.check();
    }
    fails(&ferry(&["resize", text(&path), "1M"]), "it has to have");
    fails(&ferry(&["resize", text(&path), "max"]), "say a size");
    ok(&ferry(&["resize", text(&path), "80G"]));
    volume.mount();
    holds(&volume.mnt(), 0..10);
    assert!(volume.total() > 80_000 * MIB);
    volume.umount();
    volume.check();
    // More than the host has is a warning: a sparse volume is often meant so.
    let host = statvfs(volume.0.path()).expect("it is there");
    let more = (host.f_bavail * host.f_frsize + (64 << 30)).to_string();
    let resized = ferry(&["resize", text(&path), &more]);
    ok(&resized);
    let said = String::from_utf8_lossy(&resized.stderr);
    assert!(said.contains("the file system on which it lies has"), "{said}");
}

#[test]
fn a_volume_that_cannot_be_resized_says_why() {
    let volume = TestVolume::new("64M");
    let path = volume.path();
    // In use by a process that answers no requests.
    let own = ferry::Volume::open(&path, &ferry::Options::default()).expect("it opens");
    fails(&ferry(&["resize", text(&path), "1G"]), "in use");
    own.close().expect("it closes");
    drop(own);
    // Mounted read-only.
    ok(&ferry(&["mount", text(&path), text(&volume.mnt()), "-o", "ro"]));
    fails(&ferry(&["resize", text(&path), "1G"]), "Read-only");
    volume.umount();
    // Damaged: both superblocks in front.
    let file = OpenOptions::new().write(true).open(&path).expect("opens");
    for at in [0, MIB] {
        file.write_all_at(&[7; 4096], at).expect("writes");
    }
    fails(&ferry(&["resize", text(&path), "1G"]), "ferry fsck");
    assert_eq!(volume.len(), 64 * MIB);
}
