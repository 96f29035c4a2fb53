//! `ferry copy`: file to store to file, and what is refused.

use std::os::unix::fs::{MetadataExt, symlink};

use rustix::fs::{XattrFlags, getxattr, setxattr};

use super::*;

fn mount_of(store: &Store, volume: &str, mount: &str) {
    ok(&store.ferry(&["mount", volume, mount]));
}

fn unmount(store: &Store, mount: &str) {
    ok(&store.ferry(&["umount", mount]));
}

/// Makes a tree of all kinds.
fn make_tree(at: &Path) {
    fs::create_dir(at.join("dir")).expect("a directory");
    fs::write(at.join("dir/größe 文"), contents(3)).expect("a file");
    fs::hard_link(at.join("dir/größe 文"), at.join("link")).expect("a link");
    symlink("dir/größe 文", at.join("symlink")).expect("a link");
    let sparse = fs::File::create(at.join("sparse")).expect("a file");
    sparse.write_all_at(&[7; 5000], 40 << 20).expect("a write");
    sparse.set_len(100 << 20).expect("a length");
    setxattr(at.join("sparse"), "user.test", b"value", XattrFlags::empty()).expect("an attribute");
    write_files(at, 0..20);
}

/// What a walk finds: path, inode, mode, links, size, blocks, time of change, and the contents.
type Found = (PathBuf, [u64; 5], (i64, i64), Vec<u8>);

fn tree(at: &Path) -> Vec<Found> {
    let (mut found, mut left) = (Vec::new(), vec![at.to_path_buf()]);
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(directory).expect("a directory") {
            let path = entry.expect("an entry").path();
            let meta = path.symlink_metadata().expect("it is there");
            let bytes = match (meta.is_dir(), meta.is_symlink()) {
                (true, _) => {
                    left.push(path.clone());
                    Vec::new()
                }
                (_, true) => {
                    let to = fs::read_link(&path).expect("a link");
                    to.into_os_string().into_encoded_bytes()
                }
                _ => fs::read(&path).expect("a file"),
            };
            let numbers =
                [meta.ino(), u64::from(meta.mode()), meta.nlink(), meta.size(), meta.blocks()];
            let name = path.strip_prefix(at).expect("below it").to_path_buf();
            found.push((name, numbers, (meta.mtime(), meta.mtime_nsec()), bytes));
        }
    }
    found.sort();
    found
}

#[test]
fn a_volume_goes_from_a_file_to_a_store_and_back_as_it_is() {
    let store = Store::new();
    ok(&store.ferry(&["mkfs", "local.ferry", "--size", "1G"]));
    mount_of(&store, "local.ferry", "first");
    make_tree(&store.at("first"));
    let before = tree(&store.at("first"));
    let busy = store.ferry(&["copy", "local.ferry", &store.url()]);
    fails(&busy, 1, &["local.ferry", "first"]);
    unmount(&store, "first");

    ok(&store.ferry(&["copy", "local.ferry", &store.url()]));
    ok(&store.ferry(&["fsck", &store.url()]));
    ok(&store.ferry(&["copy", &store.url(), "again.ferry"]));
    ok(&store.ferry(&["fsck", "again.ferry"]));
    mount_of(&store, "again.ferry", "second");
    assert_eq!(tree(&store.at("second")), before);
    let mut value = [0; 16];
    let len = getxattr(store.at("second").join("sparse"), "user.test", &mut value);
    assert_eq!(&value[..len.expect("an attribute")], b"value");
    // Both are used at a time, and neither sees the other.
    mount_of(&store, "local.ferry", "first");
    fs::write(store.at("first/new"), "first").expect("a file");
    fs::write(store.at("second/new"), "second").expect("a file");
    ok(&store.ferry(&["sync", "first"]));
    assert_eq!(fs::read(store.at("first/new")).expect("a file"), b"first");
    assert_eq!(fs::read(store.at("second/new")).expect("a file"), b"second");
    unmount(&store, "first");
    unmount(&store, "second");

    // What has a volume is left alone.
    fails(&store.ferry(&["copy", "local.ferry", "again.ferry"]), 1, &["again.ferry", "already"]);
    fails(&store.ferry(&["copy", "local.ferry", &store.url()]), 1, &["already"]);
    fails(&store.ferry(&["copy", "local.ferry", "local.ferry"]), 2, &["this is the volume"]);
    fails(&store.ferry(&["copy", "local.ferry", "x", "--encrypt"]), 2, &["for a copy in a store"]);
}

#[test]
fn a_snapshot_is_copied_while_its_volume_is_used() {
    let store = Store::made();
    store.mount("first");
    write_files(&store.at("first"), 0..20);
    ok(&store.ferry(&["snapshot", "create", "first", "one"]));
    write_files(&store.at("first"), 20..40);
    let busy = store.ferry(&["copy", &store.url(), "whole.ferry"]);
    fails(&busy, 1, &["VOLUME@NAME"]);
    ok(&store.ferry(&["copy", &(store.url() + "@one"), "one.ferry"]));
    ok(&store.ferry(&["fsck", "one.ferry"]));
    mount_of(&store, "one.ferry", "second");
    check_files(&store.at("second"), 0..20);
    unmount(&store, "second");
    unmount(&store, "first");
}

/// A volume in a file, with a file of noise.
fn make_local(store: &Store, size: &str, bytes: usize) {
    ok(&store.ferry(&["mkfs", "local.ferry", "--size", size]));
    mount_of(store, "local.ferry", "first");
    fs::write(store.at("first/noise"), noise(bytes)).expect("a file");
    unmount(store, "first");
}

fn is_copied(store: &Store, volume: &str, bytes: usize) {
    ok(&store.ferry(&["fsck", volume]));
    mount_of(store, volume, "second");
    assert!(fs::read(store.at("second/noise")).expect("a file") == noise(bytes));
    unmount(store, "second");
}

/// Bytes that a file, or all below a directory, takes on the disk. Objects come and go meanwhile.
fn space_of(path: &Path) -> u64 {
    match (fs::symlink_metadata(path), fs::read_dir(path)) {
        (Ok(meta), Ok(entries)) if meta.is_dir() => {
            entries.flatten().map(|entry| space_of(&entry.path())).sum()
        }
        (Ok(meta), _) => meta.blocks() * 512,
        (Err(_), _) => 0,
    }
}

const UNFINISHED: &str = "a copy that has not ended";

#[test]
fn a_copy_that_is_killed_is_refused_and_goes_on() {
    const BYTES: usize = 240 << 20;
    let store = Store::new();
    make_local(&store, "1G", BYTES);
    let url = store.url();
    // Behind the first leg: it has the log, of 64 MiB, which takes no space in the store.
    let targets = [("other.ferry", "other.ferry", 240 << 20), (url.as_str(), "store", 160 << 20)];
    for (other, path, reached) in targets {
        let mut copy = Command::new(FERRY);
        copy.args(["copy", "local.ferry", other]).current_dir(store.0.path());
        let mut copy = copy.spawn().expect("the command runs");
        while space_of(&store.at(path)) < reached {
            assert!(copy.try_wait().expect("it is ours").is_none(), "{other}: it had ended");
            std::thread::yield_now();
        }
        copy.kill().expect("it is ours");
        copy.wait().expect("it is ours");
        fails(&store.ferry(&["mount", other, "first"]), 1, &[UNFINISHED]);
        fails(&store.ferry(&["fsck", other]), 8, &[UNFINISHED]);
        fails(&store.ferry(&["mkfs", other]), 1, &[other]);
        let copied = store.ferry(&["copy", "local.ferry", other]);
        ok(&copied);
        let said = String::from_utf8(copied.stdout).expect("UTF-8");
        let sizes = said.split_once(": copied ").and_then(|(_, behind)| behind.split_once(','));
        let (now, all) = sizes.and_then(|(sizes, _)| sizes.split_once(" of ")).expect("two sizes");
        assert_ne!(now, all, "it began anew");
        is_copied(&store, other, BYTES);
    }
}

#[test]
fn a_copy_whose_target_is_full_goes_on_when_there_is_room() {
    const BYTES: usize = 40 << 20;
    let store = Store::new();
    make_local(&store, "256M", BYTES);
    fs::create_dir(store.at("small")).expect("a directory");
    let file = store.at("small/copy.ferry").display().to_string();
    for other in [file, store.url_of("small/copy")] {
        let small = Small::new(store.at("small"), 32 << 20);
        let full = store.ferry(&["copy", "local.ferry", &other]);
        fails(&full, 1, &["No space left on device", "is as it was", "run `ferry copy` again"]);
        fails(&store.ferry(&["mount", &other, "second"]), 1, &[UNFINISHED]);
        small.resize(256 << 20);
        ok(&store.ferry(&["copy", "local.ferry", &other]));
        is_copied(&store, &other, BYTES);
        ok(&store.ferry(&["fsck", "local.ferry"]));
    }
}

#[test]
fn a_copy_of_what_the_volume_was_before_begins_anew_only_when_asked() {
    const BYTES: usize = 40 << 20;
    let store = Store::new();
    make_local(&store, "256M", BYTES);
    fs::create_dir(store.at("small")).expect("a directory");
    let other = store.url_of("small/copy");
    let small = Small::new(store.at("small"), 32 << 20);
    let full = store.ferry(&["copy", "local.ferry", &other, "--compress", "off"]);
    fails(&full, 1, &["No space left on device"]);
    small.resize(256 << 20);
    mount_of(&store, "local.ferry", "first");
    fs::write(store.at("first/late"), "late").expect("a file");
    unmount(&store, "first");
    let copy = ["copy", "local.ferry", &other];
    fails(&store.ferry(&copy), 1, &["of what this one was before", "--restart"]);
    let restart = |more: &[&str]| store.ferry(&[&copy[..], &["--restart"], more].concat());
    fails(&restart(&["--compress", "zstd"]), 1, &["another --compress"]);
    fs::write(store.at("word"), "a word").expect("a passphrase");
    let encrypt = ["--encrypt", "--new-passphrase-file", "word"];
    fails(&restart(&encrypt), 1, &["which is not encrypted", "without --encrypt"]);
    ok(&restart(&[]));
    is_copied(&store, &other, BYTES);
    mount_of(&store, &other, "second");
    assert_eq!(fs::read(store.at("second/late")).expect("a file"), b"late");
    unmount(&store, "second");
    // It is a volume now, which nothing overwrites.
    fails(&restart(&[]), 1, &["already"]);
}

#[test]
fn encrypted_volumes_are_copied_and_a_copy_has_a_passphrase_of_its_own() {
    let store = Store::new();
    for (name, word) in [("old", "open sesame\n"), ("new", "a better one")] {
        fs::write(store.at(name), word).expect("a passphrase");
    }
    let (url, to) = (store.url(), store.url_of("other"));
    let mkfs = ["mkfs", &url, "--size", "1G", "--encrypt", "--passphrase-file", "old"];
    ok(&store.ferry(&mkfs));
    ok(&store.try_mount("first", &["-o", "passphrase_file=old"]));
    let text = "a line that nobody may read\n".repeat(5000);
    fs::write(store.at("first/hidden"), &text).expect("a file");
    unmount(&store, "first");

    fails(&store.ferry(&["copy", &url, &to]), 2, &["it is encrypted", "--encrypt"]);
    let copy = |words: &[&str]| store.ferry(&[&["copy", &url, &to, "--encrypt"], words].concat());
    let own = ["--compress", "off", "--new-passphrase-file", "new", "--passphrase-file"];
    fails(&copy(&[&own[..], &["new"]].concat()), 1, &["not the passphrase of the volume"]);
    assert!(!store.at("other").exists(), "nothing is left");
    ok(&copy(&[&own[..], &["old"]].concat()));
    let mut grep = Command::new("grep");
    grep.args(["-rlE", "nobody may read|sesame|hidden"]).arg(store.at("other"));
    let found = grep.output().expect("grep runs");
    assert!(found.stdout.is_empty(), "{found:?}");
    ok(&store.ferry(&["fsck", &to, "--passphrase-file", "new"]));
    let old = store.ferry(&["fsck", &to, "--passphrase-file", "old"]);
    fails(&old, 8, &["not the passphrase of the volume"]);

    ok(&store.ferry(&["copy", &to, "plain.ferry", "--passphrase-file", "new"]));
    ok(&store.ferry(&["fsck", "plain.ferry"]));
    mount_of(&store, "plain.ferry", "second");
    assert_eq!(fs::read_to_string(store.at("second/hidden")).expect("a file"), text);
    unmount(&store, "second");
}

#[test]
fn data_that_one_side_of_a_mirror_has_wrong_is_copied_from_the_other() {
    const BYTES: usize = 8 << 20;
    let store = Store::new();
    let mkfs = ["mkfs", "local.ferry", "--size", "256M", "--device", "mirror", "a", "b"];
    ok(&store.ferry(&mkfs));
    mount_of(&store, "local.ferry", "first");
    fs::write(store.at("first/noise"), noise(BYTES)).expect("a file");
    unmount(&store, "first");
    // Blocks of the file: some on one side, others on the other one.
    let wanted = noise(BYTES);
    for (side, first) in [("a", 100), ("b", 900)] {
        let bytes = fs::read(store.at(side)).expect("a file");
        let file = fs::File::options().write(true).open(store.at(side)).expect("a file");
        for block in wanted.chunks(4096).skip(first).take(200) {
            let at = bytes.chunks(4096).position(|found| found == block).expect("it has the data");
            file.write_all_at(b"damaged", at as u64 * 4096).expect("a write");
        }
    }
    ok(&store.ferry(&["copy", "local.ferry", "other.ferry"]));
    is_copied(&store, "other.ferry", BYTES);
}
