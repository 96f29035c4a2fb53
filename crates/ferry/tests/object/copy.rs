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

/// What a walk shows: path, inode, mode, links, size, blocks, time of change, and the contents.
fn tree(at: &Path) -> Vec<(PathBuf, [u64; 5], (i64, i64), Vec<u8>)> {
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

#[test]
fn a_copy_that_is_killed_is_refused_and_goes_on() {
    let store = Store::new();
    ok(&store.ferry(&["mkfs", "local.ferry", "--size", "4G"]));
    mount_of(&store, "local.ferry", "first");
    fs::write(store.at("first").join("noise"), noise(400 << 20)).expect("a file");
    unmount(&store, "first");
    let url = store.url();
    for other in [url.as_str(), "other.ferry"] {
        let mut killed = Command::new("timeout");
        killed.args(["--signal=KILL", "0.4", FERRY, "copy", "local.ferry", other]);
        let ended = killed.current_dir(store.0.path()).status().expect("the command runs");
        if !ended.success() && store.ferry(&["fsck", other]).status.code() != Some(0) {
            let refused = store.ferry(&["mount", other, "first"]);
            assert!(!refused.status.success(), "{refused:?}");
            ok(&store.ferry(&["copy", "local.ferry", other]));
        }
        ok(&store.ferry(&["fsck", other]));
    }
}
