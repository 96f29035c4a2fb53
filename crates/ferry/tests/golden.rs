//! Golden volumes: each release makes some once, and every later one reads and changes them (needs
//! root and /dev/fuse). `docs/compatibility.md` says how to make those of a release.

#[path = "shared/holder.rs"]
mod holder;
#[path = "golden/manifest.rs"]
mod manifest;
#[path = "golden/tree.rs"]
mod tree;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use holder::holder_of;

const FERRY: &str = env!("CARGO_BIN_EXE_ferry");
/// A packed volume finds its second copies behind so many bytes (a power of two).
const WINDOW_LOG: u32 = 26;

/// The volumes, each packed with its manifest.
fn archives() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// A directory with a volume and a mount point, which no mount outlives.
struct Golden {
    dir: TempDir,
    /// The program that the volume is used with.
    ferry: PathBuf,
}

impl Golden {
    fn new(ferry: &Path) -> Self {
        let dir = TempDir::new().expect("a directory");
        fs::create_dir(dir.path().join("mnt")).expect("a mount point");
        Self { dir, ferry: ferry.to_owned() }
    }

    /// The volume of an archive.
    fn unpacked(archive: &Path) -> Self {
        let this = Self::new(Path::new(FERRY));
        let packed = File::open(archive).expect("it opens");
        let mut unpacking = zstd::Decoder::new(packed).expect("a decoder");
        unpacking.window_log_max(WINDOW_LOG).expect("a window");
        tar::Archive::new(unpacking).unpack(this.dir.path()).expect("it unpacks");
        // A mirror names its sides by their absolute paths.
        if this.at("a").exists() {
            let listed = fs::read_to_string(this.at("volume")).expect("it lists its sides");
            let moved = |line: &str| match line.strip_prefix("component ") {
                Some(side) => {
                    let side = Path::new(side).file_name().expect("a name");
                    format!("component {}\n", this.dir.path().join(side).display())
                }
                None => format!("{line}\n"),
            };
            let listed: String = listed.lines().map(moved).collect();
            fs::write(this.at("volume"), listed).expect("it is written");
        }
        this
    }

    fn pack(&self, archive: &Path) {
        let packed = File::create(archive).expect("it is made");
        let mut packing = zstd::Encoder::new(packed, 19).expect("an encoder");
        packing.long_distance_matching(true).expect("a choice");
        packing.window_log(WINDOW_LOG).expect("a window");
        let mut files = tar::Builder::new(packing);
        for name in ["manifest", "volume", "a", "b"].map(|name| self.at(name)) {
            if name.exists() {
                let short = name.file_name().expect("a name");
                files.append_path_with_name(&name, short).expect("it is packed");
            }
        }
        if self.at("store").exists() {
            files.append_dir_all("store", self.at("store")).expect("it is packed");
        }
        files.into_inner().and_then(zstd::Encoder::finish).expect("it is packed");
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn mnt(&self) -> PathBuf {
        self.at("mnt")
    }

    fn volume(&self) -> String {
        if self.at("store").exists() {
            format!("dir://{}", self.at("store").display())
        } else {
            self.at("volume").display().to_string()
        }
    }

    fn ferry(&self, args: &[&str]) -> Output {
        let mut bounded = Command::new("timeout");
        bounded.args(["--signal=KILL", "100"]).arg(&self.ferry).args(args);
        bounded.current_dir(self.dir.path()).output().expect("the command runs")
    }

    #[track_caller]
    fn ok(&self, args: &[&str]) {
        let output = self.ferry(args);
        assert!(output.status.success(), "{args:?}: {output:?}");
    }

    fn mount(&self) {
        self.mount_of(&self.volume());
    }

    fn mount_of(&self, volume: &str) {
        let log = format!("log={}", self.at("log").display());
        self.ok(&["mount", volume, "mnt", "-o", &log]);
    }

    fn umount(&self) {
        self.ok(&["umount", "mnt"]);
    }

    /// Ends the mount's daemon as a crash does.
    fn kill(&self) {
        let stats = self.ferry(&["stats", "mnt", "--json"]);
        let stats: Value = serde_json::from_slice(&stats.stdout).expect("statistics are JSON");
        let daemon = stats["fuse"]["daemon"].as_i64().and_then(|pid| i32::try_from(pid).ok());
        let daemon = daemon.and_then(Pid::from_raw).expect("a process");
        // The daemon ends with its holder.
        kill_process(holder_of(daemon), Signal::KILL).expect("it is ours");
    }

    fn fsck(&self) {
        self.ok(&["fsck", &self.volume()]);
    }

    #[track_caller]
    fn shows(&self, manifest: &str) {
        let found = manifest::of(&self.mnt());
        let differs = manifest.lines().zip(found.lines()).find(|(wanted, found)| wanted != found);
        assert!(differs.is_none(), "{differs:?}");
        assert_eq!(manifest.len(), found.len());
    }

    fn manifest(&self) -> String {
        fs::read_to_string(self.at("manifest")).expect("it is UTF-8")
    }

    /// Makes both halves of the tree. A checkpoint has moved the first.
    fn fill(&self, names: usize) {
        self.mount();
        tree::first(&self.mnt(), names);
        self.umount();
        self.mount();
        tree::last(&self.mnt());
    }

    /// Changes the mounted tree, and checks and compares it behind another mount.
    #[track_caller]
    fn change(&self) {
        tree::change(&self.mnt());
        self.write_manifest();
        self.umount();
        self.fsck();
        self.mount();
        self.shows(&self.manifest());
        self.umount();
        self.fsck();
    }

    fn write_manifest(&self) {
        fs::write(self.at("manifest"), manifest::of(&self.mnt())).expect("it is written");
    }
}

impl Drop for Golden {
    fn drop(&mut self) {
        self.ferry(&["umount", "--force", "mnt"]);
    }
}

fn each(mut work: impl FnMut(&Path)) {
    let mut volumes = 0;
    for entry in fs::read_dir(archives()).expect("it lists") {
        let path = entry.expect("an entry").path();
        if path.to_string_lossy().ends_with(".tar.zst") {
            println!("{}", path.display());
            work(&path);
            volumes += 1;
        }
    }
    assert_ne!(volumes, 0);
}

#[test]
fn golden_volumes_are_read_changed_and_checked() {
    each(|archive| {
        let golden = Golden::unpacked(archive);
        let made = golden.manifest();
        golden.fsck();
        golden.mount();
        golden.shows(&made);
        let log = fs::read_to_string(golden.at("log")).expect("the daemon's log");
        let is_killed = archive.to_string_lossy().ends_with("-killed.tar.zst");
        assert_eq!(log.contains("recovered from the log"), is_killed, "{log}");
        golden.change();
        // The snapshot is what the volume was.
        if golden.at("store").exists() {
            let snapshot = format!("{}@first", golden.volume());
            golden.ok(&["fsck", &snapshot]);
            golden.mount_of(&snapshot);
            golden.shows(&made);
            golden.umount();
        }
    });
}

#[test]
fn golden_volumes_are_upgraded_in_place() {
    each(|archive| {
        let golden = Golden::unpacked(archive);
        let upgrade = || {
            let output = golden.ferry(&["upgrade", &golden.volume()]);
            assert!(output.status.success(), "{output:?}");
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        let is_old = archive.to_string_lossy().contains("0.1.0-");
        let said = upgrade();
        assert_eq!(said.contains("upgraded: a third copy"), is_old, "{said}");
        let said = upgrade();
        assert!(said.contains("it has all that volumes of this release have"), "{said}");
        golden.fsck();
        golden.mount();
        golden.shows(&golden.manifest());
        let refused = golden.ferry(&["upgrade", &golden.volume()]);
        assert!(!refused.status.success(), "it is mounted: {refused:?}");
        golden.change();
    });
}

/// `FERRY_OLD`: the program of an earlier release; `FERRY_OLD_WITHOUT_STORES`: set if it knows no
/// volumes in a store, as 0.1.0.
#[test]
#[ignore = "needs the program of an earlier release"]
fn the_program_before_reads_and_changes_what_this_one_has_changed() {
    let old = PathBuf::from(std::env::var_os("FERRY_OLD").expect("a path"));
    each(|archive| {
        let mut golden = Golden::unpacked(archive);
        if golden.at("store").exists() && std::env::var_os("FERRY_OLD_WITHOUT_STORES").is_some() {
            return;
        }
        golden.mount();
        tree::change(&golden.mnt());
        golden.write_manifest();
        golden.umount();
        golden.ferry = old.clone();
        golden.fsck();
        golden.mount();
        golden.shows(&golden.manifest());
        fs::write(golden.mnt().join("by the old program"), vec![1; 100_000]).expect("written");
        golden.write_manifest();
        golden.umount();
        golden.ferry = FERRY.into();
        golden.fsck();
        golden.mount();
        golden.shows(&golden.manifest());
        golden.umount();
    });
}

/// `FERRY_GOLDEN`: the program of the release; `FERRY_GOLDEN_KINDS`: of file, mirror, killed and
/// store those that it can make; `FERRY_GOLDEN_NAME`: how the volumes are called.
#[test]
#[ignore = "makes the golden volumes of a release"]
fn golden_volumes_are_made() {
    let variable = |name| std::env::var(name).expect("it is set");
    let program = PathBuf::from(variable("FERRY_GOLDEN"));
    for kind in variable("FERRY_GOLDEN_KINDS").split_whitespace() {
        let golden = Golden::new(&program);
        match kind {
            "mirror" => {
                golden.ok(&["mkfs", "volume", "--device", "mirror", "--size", "16M", "a", "b"])
            }
            "store" => {
                fs::create_dir(golden.at("store")).expect("a directory");
                golden.ok(&["mkfs", &golden.volume()]);
            }
            _ => golden.ok(&["mkfs", "volume", "--size", "16M"]),
        }
        // One large directory is enough: the volumes are small.
        golden.fill(if kind == "file" { 5000 } else { 200 });
        if kind == "killed" {
            // An orphan lasts until the daemon is killed. It is not in the manifest.
            let orphan = golden.mnt().join("orphan");
            let held = File::create(&orphan).expect("it is made");
            held.write_all_at(&[1; 100_000], 1 << 20).expect("it is written");
            fs::remove_file(&orphan).expect("it is removed");
            golden.write_manifest();
            golden.ok(&["sync", "mnt"]);
            golden.kill();
            drop(held);
            golden.ok(&["umount", "--force", "mnt"]);
        } else {
            golden.write_manifest();
            golden.umount();
            if kind == "store" {
                golden.ok(&["snapshot", "create", &golden.volume(), "first"]);
            }
        }
        let name = format!("{}-{kind}.tar.zst", variable("FERRY_GOLDEN_NAME"));
        golden.pack(&archives().join(name));
    }
}
