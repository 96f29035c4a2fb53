//! `ferry scrub` and `ferry debug` as a user calls them, on a volume that is mounted (as root, with
//! /dev/fuse) and then is not.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

const FERRY: &str = env!("CARGO_BIN_EXE_ferry");

fn ferry(args: &[&str]) -> Output {
    Command::new(FERRY).args(args).output().expect("the command runs")
}

#[track_caller]
fn code(output: &Output, code: i32) -> String {
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

/// Each line of what `ferry debug … --json` says.
fn debug(volume: &str, args: &[&str], expected: i32) -> Vec<Value> {
    let said = code(&ferry(&[&["debug", volume, "--json"], args].concat()), expected);
    said.lines().map(|line| serde_json::from_str(line).expect("a line is an object")).collect()
}

/// A volume with a tree in it, which is unmounted when this returns.
struct Volume {
    dir: TempDir,
}

impl Volume {
    fn new() -> Self {
        let this = Self { dir: TempDir::new().expect("a directory") };
        let mnt = this.mnt();
        fs::create_dir(&mnt).expect("a mount point");
        code(&ferry(&["mkfs", &this.path(), "--size", "256M"]), 0);
        this.mount();
        fs::create_dir(mnt.join("dir")).expect("mkdir");
        fs::write(mnt.join("dir/file with blanks"), vec![7; 300_000]).expect("writes");
        fs::write(mnt.join("small"), "inline").expect("writes");
        fs::hard_link(mnt.join("small"), mnt.join("dir/again")).expect("links");
        std::os::unix::fs::symlink("dir", mnt.join("link")).expect("symlink");
        this.umount();
        this
    }
    fn path(&self) -> String {
        text(&self.dir.path().join("volume.ferry"))
    }
    fn mnt(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }
    fn mount(&self) {
        let log = format!("log={}", self.dir.path().join("log").display());
        code(&ferry(&["mount", &self.path(), &text(&self.mnt()), "-o", &log]), 0);
    }
    fn umount(&self) {
        code(&ferry(&["umount", &text(&self.mnt())]), 0);
    }
    /// Overwrites a few bytes of the volume.
    fn spoil(&self, at: u64) {
        let file = OpenOptions::new().write(true).open(self.path()).expect("opens");
        file.write_all_at(b"spoiled", at).expect("writes");
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        ferry(&["umount", "--force", &text(&self.mnt())]);
    }
}

fn text(path: &Path) -> String {
    path.to_str().expect("a temporary directory's name is UTF-8").to_owned()
}

#[test]
fn a_scrub_says_what_was_verified_and_what_is_damaged() {
    let volume = Volume::new();
    let said = code(&ferry(&["scrub", &volume.path()]), 0);
    assert!(said.contains("clean; verified 296 KiB of data"), "{said}");
    volume.mount();
    // The mount point, a directory in it, and the volume's name lead to the same scrub.
    for target in [text(&volume.mnt()), text(&volume.mnt().join("dir")), volume.path()] {
        let said = code(&ferry(&["scrub", &target, "--json"]), 0);
        let report: Value = serde_json::from_str(&said).expect("JSON");
        assert_eq!((&report["clean"], &report["complete"]), (&true.into(), &true.into()), "{said}");
        assert_eq!(report["verified"]["data_bytes"], 74 * 4096);
    }
    let stats = code(&ferry(&["stats", &text(&volume.mnt()), "--json"]), 0);
    let stats: Value = serde_json::from_str(&stats).expect("JSON");
    assert_eq!(stats["scrub"]["state"], "complete");
    assert!(stats["scrub"]["verified_bytes"].as_u64() > Some(74 * 4096));
    let mounted = ferry(&["debug", &volume.path(), "superblock"]);
    code(&mounted, 8);
    assert!(String::from_utf8_lossy(&mounted.stderr).contains("in use by process"), "{mounted:?}");
    volume.umount();

    let shown = debug(&volume.path(), &["path", "/dir/file with blanks"], 0);
    let extent = shown.iter().find(|one| one["type"] == "extent").expect("an extent");
    let at = extent["device_offset"].as_u64().expect("a place");
    volume.spoil(at + 8192 + 100);
    volume.spoil(at + 12288 + 100);
    let said = code(&ferry(&["scrub", &volume.path()]), 4);
    assert!(
        said.contains("damaged: /dir/file with blanks at byte 8192, 8192 bytes (byte "),
        "{said}"
    );
    assert!(said.contains(": 2 damaged blocks; verified 288 KiB of data"), "{said}");
    volume.mount();
    assert_eq!(code(&ferry(&["scrub", &text(&volume.mnt())]), 4).lines().count(), 2);
    volume.umount();

    code(&ferry(&["scrub", "/no/such/volume"]), 1);
    let foreign = volume.dir.path().join("foreign");
    fs::write(&foreign, vec![1; 8192]).expect("writes");
    code(&ferry(&["scrub", &text(&foreign)]), 8);
    let elsewhere = ferry(&["scrub", &text(volume.dir.path())]);
    code(&elsewhere, 1);
    assert!(
        String::from_utf8_lossy(&elsewhere.stderr).contains("no FerryFS is mounted here"),
        "{elsewhere:?}"
    );
}

#[test]
fn debug_shows_what_is_stored() {
    let volume = Volume::new();
    let path = volume.path();
    let superblock = &debug(&path, &["superblock"], 0)[0];
    assert_eq!(
        (&superblock["copies_agree"], &superblock["copy_2"]["offset"]),
        (&true.into(), &(1 << 20).into())
    );
    assert!(code(&ferry(&["debug", &path, "superblock"]), 0).contains("segment count"));

    let log = debug(&path, &["log"], 0);
    let of = |kind: &str| log.iter().filter(|one| one["type"] == kind).count();
    assert_eq!((of("home-map"), of("start"), of("end")), (2, 1, 1));
    assert!(log.iter().filter(|one| one["type"] == "record").all(|one| one["state"] == "whole"));
    assert!(
        log.iter().any(|one| one["kind"] == "durable_point")
            && log.iter().any(|one| one["keys"].as_u64() > Some(3))
    );

    let all = debug(&path, &["keys"], 0);
    assert_eq!(all.iter().filter(|one| one["type"] == "inode").count(), 5);
    assert_eq!(all[0]["type"], "counters");
    let from = all[3]["key"].as_str().expect("a key");
    assert_eq!(debug(&path, &["keys", "--from", from, "--limit", "2"], 0), all[3..5]);
    let of_root = debug(&path, &["keys", "--inode", "1"], 0);
    assert_eq!(of_root.len(), 4, "its record and three names: {of_root:?}");

    let segments = debug(&path, &["segments", "--summary"], 0);
    let uses = |used: &str| segments.iter().filter(|one| one["use"] == used).count();
    let count = superblock["copy_1"]["segment_count"].as_u64().expect("a number") as usize;
    assert_eq!(uses("free") + uses("data") + uses("home"), count);
    assert_eq!(uses("data"), 1);
    let summary = segments.iter().find(|one| one["type"] == "summary").expect("a summary");
    assert_eq!(summary["entries"][0]["file_block"], 0);

    let small = debug(&path, &["path", "small"], 0);
    let ino = small[0]["inode"].to_string();
    assert_eq!((&small[0]["inline"], &small[0]["links"]), (&true.into(), &2.into()));
    let names: Vec<_> =
        small.iter().filter(|one| one["type"] == "named").map(|one| &one["name"]).collect();
    assert!(names.len() == 2 && names.contains(&&"again".into()), "{names:?}");
    assert_eq!(debug(&path, &["inode", &ino], 0), small);
    assert_eq!(debug(&path, &["path", "/link"], 0)[0]["target"], "dir");
    for missing in [["path", "/dir/none"], ["inode", "77"]] {
        code(&ferry(&[&["debug", &path], &missing[..]].concat()), 1);
    }
}

#[test]
fn debug_shows_a_damaged_volume_as_far_as_it_can() {
    let volume = Volume::new();
    let path = volume.path();
    let superblock = &debug(&path, &["superblock"], 0)[0]["copy_1"];
    volume.spoil(0);
    let damaged = &debug(&path, &["superblock"], 4)[0];
    assert!(
        damaged["copy_1"]["damage"].is_string() && damaged["copy_2"]["size_bytes"].is_u64(),
        "{damaged}"
    );
    // The log is shown, whatever became of the home store.
    let records = debug(&path, &["log"], 0).iter().filter(|one| one["type"] == "record").count();
    for slot in 0..2 {
        volume.spoil(superblock["home_map_offsets"][slot].as_u64().expect("a number"));
    }
    let log = debug(&path, &["log"], 4);
    assert_eq!(log.iter().filter(|one| one["type"] == "record").count(), records);
    assert!(log.iter().any(|one| one["type"] == "damage"));
    // Where nothing can be read, programs are told so as they asked.
    for what in [&["keys"][..], &["segments"], &["path", "/"], &["inode", "1"]] {
        let said = debug(&path, what, 8);
        assert_eq!(said.last().map(|one| &one["type"]), Some(&"error".into()), "{said:?}");
    }
    code(&ferry(&["debug", &path, "keys"]), 8);
    let said = code(&ferry(&["scrub", &path]), 4);
    assert!(
        said.contains("damaged: home") && said.contains("nothing else can be reached"),
        "{said}"
    );
}

#[test]
fn debug_shows_the_keys_of_a_store_that_cannot_be_opened() {
    let volume = Volume::new();
    let path = volume.path();
    let before = debug(&path, &["keys"], 0);
    let superblock = &debug(&path, &["superblock"], 0)[0]["copy_1"];
    let segment = superblock["segment_len_bytes"].as_u64().expect("a number");
    for home in debug(&path, &["segments"], 0).iter().filter(|one| one["use"] == "home") {
        let first = home["offset"].as_u64().expect("a number");
        let mut block = [0; 4];
        fs::File::open(&path)
            .expect("the volume")
            .read_exact_at(&mut block, first)
            .expect("a read");
        if block == *b"redb" {
            [first, first + segment / 2].into_iter().for_each(|at| volume.spoil(at));
        }
    }
    let after = debug(&path, &["keys"], 4);
    assert_eq!(after[..before.len()], before);
    assert_eq!(after.last().expect("lines")["type"], "damage");
    assert!(debug(&path, &["inode", "1"], 4).iter().any(|one| one["type"] == "inode"));
}
