//! `ferry resize` of volumes on several files and block devices, mounted (as root, with /dev/fuse)
//! and not.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::statvfs;
use tempfile::TempDir;

const FERRY: &str = env!("CARGO_BIN_EXE_ferry");
const MIB: u64 = 1 << 20;
/// Bytes in front of each component.
const HEAD: u64 = MIB;
/// Bytes of each file.
const FILE: usize = 3 << 20;

fn run(program: &str, args: &[&str]) -> Output {
    let mut bounded = Command::new("timeout");
    bounded.args(["--signal=KILL", "120", program]).args(args).output().expect("it runs")
}

/// A command that would wait for ever fails its test instead.
fn ferry(args: &[&str]) -> Output {
    run(FERRY, args)
}

#[track_caller]
fn ok(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[track_caller]
fn fails(output: &Output, text: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains(text), "{output:?}");
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a temporary directory's name is UTF-8")
}

/// A volume, and a mount point that no mount outlives.
struct TestVolume(TempDir);

impl TestVolume {
    /// On these components; names are those of files in its directory.
    fn new(kind: &str, components: &[&str], size: &str) -> Self {
        let this = Self(TempDir::new().expect("a directory"));
        fs::create_dir(this.mnt()).expect("a mount point");
        let paths: Vec<PathBuf> = components.iter().map(|name| this.at(name)).collect();
        let volume = this.at("volume");
        let mut args = vec!["mkfs", text(&volume), "--size", size, "--device", kind];
        args.extend(paths.iter().map(|path| text(path)));
        ok(&ferry(&args));
        this
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().canonicalize().expect("it is there").join(name)
    }

    fn mnt(&self) -> PathBuf {
        self.at("mnt")
    }

    fn mount(&self) {
        let log = format!("log={}", self.at("log").display());
        ok(&ferry(&["mount", text(&self.at("volume")), text(&self.mnt()), "-o", &log]));
    }

    fn umount(&self) {
        ok(&ferry(&["umount", text(&self.mnt())]));
    }

    fn check(&self) {
        ok(&ferry(&["fsck", text(&self.at("volume"))]));
    }

    fn resize(&self, size: &str) -> String {
        ok(&ferry(&["resize", text(&self.at("volume")), size]))
    }

    /// Bytes of the component behind its head.
    fn len(&self, name: &str) -> u64 {
        fs::metadata(self.at(name)).expect("it is there").len() - HEAD
    }

    /// What `df` calls the size.
    fn total(&self) -> u64 {
        let of = statvfs(self.mnt()).expect("it is mounted");
        of.f_blocks * of.f_frsize
    }

    fn name(&self, n: usize) -> PathBuf {
        self.mnt().join(format!("file {n}"))
    }

    /// Writes file `n`. `false`: there was no space.
    fn write(&self, n: usize) -> bool {
        let written = File::create(self.name(n))
            .and_then(|mut file| file.write_all(&contents(n)).and_then(|()| file.sync_all()));
        match written {
            Ok(()) => true,
            Err(error) if error.kind() == ErrorKind::StorageFull => {
                fs::remove_file(self.name(n)).expect("it can be removed");
                false
            }
            Err(error) => panic!("file {n}: {error}"),
        }
    }

    fn fill(&self) -> usize {
        (0..).find(|n| !self.write(*n)).expect("it becomes full")
    }

    /// Leaves each third of so many files.
    fn thin_out(&self, files: usize) {
        let removed = (0..files).filter(|n| n % 3 != 0);
        removed.for_each(|n| fs::remove_file(self.name(n)).expect("it is there"));
    }

    #[track_caller]
    fn holds(&self, files: impl Iterator<Item = usize>) {
        for n in files {
            let found = fs::read(self.name(n)).expect("it is there");
            assert!(found == contents(n), "file {n}");
        }
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

/// A full volume grows while a program waits for space, and shrinks while one writes. Returns the
/// files that it holds.
fn grow_and_shrink(volume: &TestVolume) -> Vec<usize> {
    volume.mount();
    let full = volume.fill();
    let stop = AtomicBool::new(false);
    let end = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut n = full;
            while !stop.load(Ordering::SeqCst) && n < full + 40 {
                n += usize::from(volume.write(n));
            }
            n
        });
        let resized = ferry(&["resize", text(&volume.mnt()), "1G"]);
        // Otherwise it would look for space for ever.
        stop.store(!resized.status.success(), Ordering::SeqCst);
        let end = writer.join().expect("it writes");
        ok(&resized);
        end
    });
    assert_eq!(end, full + 40, "the program has written what it wanted to");
    assert!(volume.total() > 800 * MIB, "df shows it");
    volume.holds(0..end);
    volume.thin_out(end);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| (1000..1005).all(|n| volume.write(n)));
        volume.resize("256M");
        assert!(writer.join().expect("it writes"), "there is space");
    });
    assert!(volume.total() < 256 * MIB, "df shows it");
    let left: Vec<usize> = (0..end).filter(|n| n % 3 == 0).chain(1000..1005).collect();
    volume.holds(left.iter().copied());
    volume.umount();
    volume.check();
    volume.mount();
    volume.holds(left.iter().copied());
    left
}

#[test]
fn a_full_volume_of_several_files_grows_while_a_program_writes_and_shrinks_again() {
    for (kind, lens) in [("linear", [64, 192]), ("stripe", [128; 2])] {
        let volume = TestVolume::new(kind, &["a", "b"], "128M");
        let left = grow_and_shrink(&volume);
        assert_eq!(["a", "b"].map(|name| volume.len(name) / MIB), lens);
        // Not mounted, and up to sizes at which everything behind the data moves.
        volume.umount();
        for (size, bytes) in [("8G", 8192 * MIB), ("300M", 300 * MIB)] {
            volume.resize(size);
            let both = volume.len("a") + volume.len("b");
            assert!((bytes..bytes + MIB).contains(&both), "{kind}: {both}");
            volume.check();
        }
        fails(&ferry(&["resize", text(&volume.at("volume")), "max"]), "say a size");
        fails(&ferry(&["resize", text(&volume.at("volume")), "17M"]), "it has to have");
        volume.mount();
        volume.holds(left.into_iter());
        volume.umount();
        volume.check();
    }
}

#[test]
fn a_mirror_grows_and_shrinks_and_then_loses_a_side_and_gets_another() {
    let volume = TestVolume::new("mirror", &["a", "b"], "128M");
    let left = grow_and_shrink(&volume);
    assert_eq!(["a", "b"].map(|name| volume.len(name) / MIB), [256; 2]);
    volume.umount();
    // It grows with one side alone: the other one is stale when it comes back.
    fs::rename(volume.at("b"), volume.at("lost")).expect("it is a file");
    volume.mount();
    volume.resize("512M");
    assert!(volume.write(2000));
    volume.umount();
    fs::rename(volume.at("lost"), volume.at("b")).expect("it is a file");
    volume.mount();
    assert_eq!(volume.len("b"), 256 * MIB, "it is left alone");
    let [list, old, new] = ["volume", "b", "c"].map(|name| volume.at(name));
    ok(&ferry(&["replace", text(&list), text(&old), text(&new)]));
    assert_eq!(volume.len("c"), 512 * MIB);
    volume.resize("600M");
    assert_eq!(["a", "b", "c"].map(|name| volume.len(name) / MIB), [600, 256, 600]);
    assert!(volume.write(2001));
    let files = || left.iter().copied().chain(2000..2002);
    volume.holds(files());
    volume.umount();
    volume.check();
    // The new side has everything.
    fs::remove_file(volume.at("a")).expect("it is a file");
    volume.mount();
    volume.holds(files());
    volume.umount();
    volume.check();
}

/// A loop device over a sparse file, taken down at the end.
struct Loop {
    device: PathBuf,
    dir: TempDir,
}

impl Loop {
    /// `None`, and a word about it, where this machine does not let us.
    fn new(bytes: u64) -> Option<Self> {
        let dir = TempDir::new().expect("a directory");
        let file = dir.path().join("backing");
        File::create(&file).expect("a file").set_len(bytes).expect("a length");
        let made = run("losetup", &["--find", "--show", text(&file)]);
        if !made.status.success() {
            eprintln!("not tested, no loop device to be had: {made:?}");
            return None;
        }
        let device = PathBuf::from(String::from_utf8_lossy(&made.stdout).trim());
        Some(Self { device, dir })
    }

    fn set_len(&self, bytes: u64) {
        let file = OpenOptions::new().write(true).open(self.dir.path().join("backing"));
        file.expect("it is there").set_len(bytes).expect("a length");
        ok(&run("losetup", &["--set-capacity", text(&self.device)]));
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        run("losetup", &["--detach", text(&self.device)]);
    }
}

#[test]
fn a_volume_whose_block_devices_have_become_longer_gets_all_of_them() {
    for kind in ["linear", "stripe", "mirror"] {
        let lens = [HEAD + 96 * MIB, HEAD + 128 * MIB];
        let [Some(first), Some(second)] = lens.map(Loop::new) else { return };
        let [a, b] = [&first, &second].map(|one| text(&one.device).to_owned());
        // What is used of two, with so many MiB each.
        let all = |a: u64, b: u64| match kind {
            "linear" => a + b,
            "stripe" => 2 * a.min(b),
            _ => a.min(b),
        };
        let volume = TestVolume::new(kind, &[&a, &b], "64M");
        volume.mount();
        let files = volume.fill();
        let before = volume.total();
        let more = (all(96, 128) + 1).to_string() + "M";
        fails(&ferry(&["resize", text(&volume.mnt()), &more]), "it can have");
        first.set_len(HEAD + 200 * MIB);
        second.set_len(HEAD + 300 * MIB);
        volume.resize("max");
        // In front the linear one uses what it used before.
        let bytes = if kind == "linear" { all(96, 300) } else { all(200, 300) } * MIB;
        let now = volume.total();
        assert!(now > before + 50 * MIB && now < bytes, "{kind}: {before} {now} of {bytes}");
        assert!(volume.write(files), "there is space");
        volume.holds(0..=files);
        volume.umount();
        volume.check();
        volume.mount();
        volume.thin_out(files);
        volume.resize(&(all(96, 128).to_string() + "M"));
        assert!(volume.total() < now, "{kind}");
        volume.holds((0..=files).filter(|n| n % 3 == 0));
        volume.resize("max");
        assert_eq!(volume.total(), now, "{kind}");
        volume.umount();
        volume.check();
    }
}
