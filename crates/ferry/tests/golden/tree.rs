//! The tree of a golden volume: everything that the format has.

use std::fs::{self, File, FileTimes, OpenOptions};
use std::os::unix::fs::{FileExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::time::{Duration, SystemTime};

use rustix::fs::{CWD, FallocateFlags, FileType, Mode, XattrFlags, makedev, mknodat, setxattr};

/// An access list: its owner rwx, user 1 r-x, group r--, mask r-x, others nothing.
const ACL: [u8; 44] = {
    let entries: [[u8; 8]; 5] = [
        [1, 0, 7, 0, 0xff, 0xff, 0xff, 0xff],
        [2, 0, 5, 0, 1, 0, 0, 0],
        [4, 0, 4, 0, 0xff, 0xff, 0xff, 0xff],
        [16, 0, 5, 0, 0xff, 0xff, 0xff, 0xff],
        [32, 0, 0, 0, 0xff, 0xff, 0xff, 0xff],
    ];
    let mut bytes = [0; 44];
    bytes[0] = 2;
    let mut at = 0;
    while at < 40 {
        bytes[4 + at] = entries[at / 8][at % 8];
        at += 1;
    }
    bytes
};

fn bytes(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 512 * 7 + at % 251 + seed) as u8).collect()
}

fn write(path: &Path, contents: &[u8]) {
    fs::write(path, contents).expect("it is written");
}

fn set(path: &Path, name: &str, value: &[u8]) {
    setxattr(path, name, value, XattrFlags::empty()).expect("the attribute is set");
}

fn set_mtime(path: &Path, since_1970: Duration) {
    let times = FileTimes::new().set_modified(SystemTime::UNIX_EPOCH + since_1970);
    File::open(path).and_then(|file| file.set_times(times)).expect("its time is set");
}

fn names_in(dir: &Path) -> usize {
    fs::read_dir(dir).expect("it lists").count()
}

/// The first half, which a checkpoint has moved to the home store. `names`: of the large directory.
pub fn first(root: &Path, names: usize) {
    let at = |name: &str| root.join(name);
    for dir in ["files", "links", "special", "attributes", "deep/er/and/deeper"] {
        fs::create_dir_all(at(dir)).expect("a directory");
    }
    write(&at("files/empty"), b"");
    write(&at("files/inline"), b"a small file lies in its inode");
    write(&at("files/block"), &bytes(4096, 1));
    write(&at("files/large"), &bytes(700_001, 2));
    // Two files that grow in turns have extents that lie apart.
    let grow = ["files/turns.0", "files/turns.1"].map(|name| File::create(at(name)).expect("made"));
    for turn in 0..8 {
        for (seed, file) in grow.iter().enumerate() {
            file.write_all_at(&bytes(8192, seed), turn * 8192).expect("it is written");
            file.sync_all().expect("it is durable");
        }
    }
    let sparse = File::create(at("files/sparse")).expect("made");
    for offset in [0, 1 << 20, (1 << 32) + 5] {
        sparse.write_all_at(b"between holes", offset).expect("it is written");
    }
    sparse.set_len(3 << 20).expect("it is cut");
    let unwritten = File::create(at("files/unwritten")).expect("made");
    rustix::fs::fallocate(&unwritten, FallocateFlags::KEEP_SIZE, 0, 64 << 10).expect("allocated");
    rustix::fs::fallocate(&sparse, FallocateFlags::empty(), 64 << 10, 8 << 10).expect("allocated");
    let mut permissions = fs::metadata(at("files/block")).expect("it is there").permissions();
    permissions.set_mode(0o4751);
    chown(at("files/block"), Some(1000), Some(70_000)).expect("its owner is set");
    fs::set_permissions(at("files/block"), permissions).expect("its mode is set");
    for nanoseconds in [1, 999_999_999] {
        let path = at(&format!("files/time.{nanoseconds}"));
        write(&path, b"");
        set_mtime(&path, Duration::new(1_000_000_000, nanoseconds));
    }
    write(&at("files/time.far"), b"");
    set_mtime(&at("files/time.far"), Duration::new(5_000_000_000, 5));

    write(&at(&"n".repeat(255)), b"a long name");
    write(&at("new\nline and \u{e9}"), b"");
    fs::hard_link(at("files/inline"), at("links/inline")).expect("a link");
    fs::hard_link(at("files/large"), at("deep/er/and/deeper/large")).expect("a link");
    symlink("../files/inline", at("links/short")).expect("a link");
    symlink("x/".repeat(2000), at("links/long")).expect("a link");
    for (name, kind, device) in [
        ("fifo", FileType::Fifo, 0),
        ("socket", FileType::Socket, 0),
        ("null", FileType::CharacterDevice, makedev(1, 3)),
        ("loop", FileType::BlockDevice, makedev(7, 300)),
    ] {
        let mode = Mode::from_raw_mode(0o640);
        mknodat(CWD, at("special").join(name), kind, mode, device).expect("a node");
    }
    write(&at("attributes/file"), b"");
    set(&at("attributes/file"), "user.small", b"value");
    set(&at("attributes/file"), "user.empty", b"");
    set(&at("attributes/file"), "trusted.large", &bytes(30_000, 3));
    set(&at("attributes/file"), "system.posix_acl_access", &ACL);
    set(&at("attributes"), "system.posix_acl_default", &ACL);
    write(&at("attributes/inherits"), b"");

    fs::create_dir(at("names")).expect("a directory");
    for number in 0..names {
        write(&root.join(format!("names/name {number}")), b"");
    }
    for number in 0..200 {
        write(&root.join(format!("removed.{number}")), &bytes(number * 50, number));
    }
}

/// The second half, which changes the first.
pub fn last(root: &Path) {
    let at = |name: &str| root.join(name);
    for number in 0..200 {
        fs::remove_file(root.join(format!("removed.{number}"))).expect("it is removed");
    }
    for number in (0..names_in(&at("names"))).step_by(10) {
        let name = |what| root.join(format!("names/{what} {number}"));
        fs::rename(name("name"), name("renamed")).expect("it is renamed");
    }
    fs::rename(at("deep/er"), at("links/deep")).expect("it is moved");
    write(&at("files/later"), &bytes(100_000, 4));
    let over = OpenOptions::new().write(true).open(at("files/large")).expect("it opens");
    over.write_all_at(&bytes(5000, 5), 300_000).expect("it is written");
    over.set_len(650_000).expect("it is cut");
    set(&at("attributes/file"), "user.small", b"another value");
    set(&at("links"), "user.of a directory", &bytes(3000, 6));
    rustix::fs::removexattr(at("attributes/file"), "user.empty").expect("it is removed");
    fs::remove_file(at("special/socket")).expect("it is removed");
}

/// What a test does to a golden volume: of each kind of change one at least.
pub fn change(root: &Path) {
    let at = |name: &str| root.join(name);
    write(&at("files/new"), &bytes(200_000, 7));
    fs::create_dir(at("new")).expect("a directory");
    let over = OpenOptions::new().write(true).open(at("files/large")).expect("it opens");
    over.write_all_at(&bytes(9000, 8), 100_001).expect("it is written");
    write(&at("links/inline"), &bytes(20_000, 9));
    fs::rename(at("names"), at("new/names")).expect("it is moved");
    fs::rename(at("files/later"), at("files/turns.0")).expect("it replaces");
    fs::remove_file(at("links/long")).expect("it is removed");
    fs::hard_link(at("files/sparse"), at("new/sparse")).expect("a link");
    symlink("names", at("new/link")).expect("a link");
    set(&at("attributes/file"), "user.new", b"new");
    set(&at("attributes/file"), "trusted.large", &bytes(20_000, 10));
    for number in (1..names_in(&at("new/names"))).step_by(10) {
        fs::remove_file(root.join(format!("new/names/name {number}"))).expect("it is removed");
        write(&root.join(format!("new/names/added {number}")), b"");
    }
}
