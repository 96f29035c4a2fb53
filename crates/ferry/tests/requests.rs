//! How many requests the kernel sends for each file, for programs that people run. A request costs
//! two context switches: this is what bounds the speed of work on many small files. These tests
//! need root and /dev/fuse. With `--nocapture` they print the counts.
//!
//! The bounds are those of a kernel that knows FUSE_NO_OPENDIR_SUPPORT (5.1 and later).

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rustix::fs::XattrFlags;
use rustix::io::Errno;
use serde_json::Value;
use tempfile::TempDir;

const FERRY: &str = env!("CARGO_BIN_EXE_ferry");
/// Files of the tree, in as many directories as this.
const DIRECTORIES: usize = 8;
const FILES: usize = 400;

fn ferry(args: &[&str]) -> Output {
    Command::new(FERRY).args(args).output().expect("the command runs")
}

fn ok(output: &Output) {
    assert!(output.status.success(), "{output:?}");
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a temporary directory's name is UTF-8")
}

/// A mounted volume with a tree of files in it, which no test outlives.
struct Tree(TempDir);

impl Tree {
    fn new() -> Self {
        let this = Self(TempDir::new().expect("a directory"));
        fs::create_dir(this.mnt()).expect("a mount point");
        ok(&ferry(&["mkfs", text(&this.volume()), "--size", "256M"]));
        this.mount();
        for directory in 0..DIRECTORIES {
            let directory = this.mnt().join("tree").join(directory.to_string());
            fs::create_dir_all(&directory).expect("mkdir");
            for file in 0..FILES / DIRECTORIES {
                fs::write(directory.join(file.to_string()), "contents\n").expect("writes");
            }
        }
        this
    }

    fn volume(&self) -> PathBuf {
        self.0.path().join("volume.ferry")
    }

    fn mnt(&self) -> PathBuf {
        self.0.path().join("mnt")
    }

    fn mount(&self) {
        let log = format!("log={}", self.0.path().join("log").display());
        ok(&ferry(&["mount", text(&self.volume()), text(&self.mnt()), "-o", &log]));
    }

    /// The kernel then knows nothing of the tree.
    fn remount(&self) {
        ok(&ferry(&["umount", text(&self.mnt())]));
        self.mount();
    }

    /// Requests of each kind so far. Asking is one request itself, an ioctl. FORGETs are left out:
    /// how many come as one message depends on the time that a program takes.
    fn requests(&self) -> BTreeMap<String, u64> {
        let stats = ferry(&["stats", text(&self.mnt()), "--json"]);
        ok(&stats);
        let stats: Value = serde_json::from_slice(&stats.stdout).expect("statistics are JSON");
        let operations = stats["fuse"]["operations"].as_object().expect("counters of operations");
        let count = |value: &Value| value["count"].as_u64().expect("a count");
        operations
            .iter()
            .filter(|(name, _)| !["ioctl", "forget", "batch_forget"].contains(&name.as_str()))
            .map(|(name, value)| (name.clone(), count(value)))
            .collect()
    }

    /// Runs a program in the mount. It sends at most `bound` requests for each file, and at most
    /// those of `none` that the directories need.
    #[track_caller]
    fn sends(&self, bound: f64, none: &[&str], program: &[&str]) {
        let before = self.requests();
        let output = Command::new(program[0]).args(&program[1..]).current_dir(self.mnt()).output();
        // grep has found nothing then.
        assert!(matches!(output.expect("runs").status.code(), Some(0 | 1)), "{program:?}");
        self.check(bound, none, &before, &format!("{program:?}"));
    }

    #[track_caller]
    fn check(&self, bound: f64, none: &[&str], before: &BTreeMap<String, u64>, what: &str) {
        let mut sent = self.requests();
        for (name, count) in &mut sent {
            *count -= before.get(name).copied().unwrap_or(0);
        }
        sent.retain(|_, count| *count > 0);
        let each = sent.values().sum::<u64>() as f64 / FILES as f64;
        println!("{each:6.3} requests a file: {what}: {sent:?}");
        assert!(each <= bound, "{what}: {each} requests a file: {sent:?}");
        for name in none {
            let count = sent.get(*name).copied().unwrap_or(0);
            assert!(count <= 4 * DIRECTORIES as u64, "{what}: {name}: {sent:?}");
        }
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        ferry(&["umount", "--force", text(&self.mnt())]);
    }
}

/// What a program sends for each directory is a share of the bounds: there are 50 files in one.
#[test]
fn programs_send_few_requests_for_each_file() {
    let tree = Tree::new();
    let dirs = ["opendir", "releasedir", "readdir", "readdirplus"];

    // open, lookup, create, copy_file_range, getxattr (of a capability, and of the ACL), listxattr
    // twice, setattr, setxattr (ACL), two releases, and getattr of the directory.
    tree.sends(13.4, &dirs, &["cp", "-a", "tree", "copy"]);

    tree.remount();
    tree.sends(0.1, &dirs, &["find", "tree"]);
    tree.remount();
    // The ACL: the kernel remembers that there is none.
    tree.sends(1.2, &dirs, &["ls", "-lR", "tree"]);
    tree.sends(0.1, &dirs, &["ls", "-lR", "tree"]);
    // open, read, release.
    tree.sends(3.2, &dirs, &["grep", "-r", "what no file holds", "tree"]);
    // The access time may have changed: getattr in place of read.
    tree.sends(3.1, &dirs, &["grep", "-r", "what no file holds", "tree"]);
    tree.sends(2.1, &dirs, &["grep", "-r", "what no file holds", "tree"]);
    // unlink, and getattr of the directory.
    tree.sends(2.2, &dirs, &["rm", "-r", "copy"]);

    // getattr of the directory, lookup, create, release.
    let before = tree.requests();
    for file in 0..FILES {
        fs::File::create(tree.mnt().join(file.to_string())).expect("creates");
    }
    tree.check(4.1, &dirs, &before, "empty files");
}

/// Else `ls -l` would ask for the label of each file.
#[test]
fn a_file_without_a_label_says_that_labels_are_not_supported() {
    let tree = Tree::new();
    let file = tree.mnt().join("tree/0/0");
    let mut value = [0; 64];
    let label = |value: &mut [u8; 64]| rustix::fs::getxattr(&file, "security.selinux", value);
    assert_eq!(label(&mut value), Err(Errno::OPNOTSUPP));
    assert_eq!(rustix::fs::getxattr(&file, "user.absent", &mut value), Err(Errno::NODATA));

    let stored = b"system_u:object_r:etc_t:s0";
    rustix::fs::setxattr(&file, "security.selinux", stored, XattrFlags::CREATE).expect("is stored");
    assert_eq!(label(&mut value).map(|len| &value[..len]), Ok(&stored[..]));
}
