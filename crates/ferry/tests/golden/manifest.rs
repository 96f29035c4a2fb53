//! What a tree is, as a text that two versions of FerryFS can be compared by: a line for each name,
//! and one for each of its extended attributes.

use std::fmt::Write;
use std::fs::{self, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use ring::digest::{SHA256, digest};
use rustix::fs::{lgetxattr, llistxattr};

/// All below `root`, and `root`, in the order of the names. Access times are left out: reading
/// changes them.
pub fn of(root: &Path) -> String {
    let mut text = String::new();
    add(&mut text, root, root);
    text
}

fn add(text: &mut String, root: &Path, path: &Path) {
    let meta = fs::symlink_metadata(path).expect("it is there");
    let name = path.strip_prefix(root).expect("it is below").as_os_str().as_bytes();
    writeln!(
        text,
        "/{} mode={:o} ino={} owner={}:{} links={} rdev={:x} mtime={}.{:09} ctime={}.{:09} {}",
        name.escape_ascii(),
        meta.mode(),
        meta.ino(),
        meta.uid(),
        meta.gid(),
        meta.nlink(),
        meta.rdev(),
        meta.mtime(),
        meta.mtime_nsec(),
        meta.ctime(),
        meta.ctime_nsec(),
        contents(path, &meta),
    )
    .expect("a text grows");
    let mut names = Vec::with_capacity(64 << 10);
    llistxattr(path, rustix::buffer::spare_capacity(&mut names)).expect("it lists attributes");
    let mut names: Vec<&[u8]> = names.split(|byte| *byte == 0).filter(|n| !n.is_empty()).collect();
    names.sort_unstable();
    for name in names {
        let mut value = Vec::with_capacity(64 << 10);
        lgetxattr(path, name, rustix::buffer::spare_capacity(&mut value)).expect("it has it");
        let (name, hash) = (name.escape_ascii(), sha256(&value));
        writeln!(text, "  {name} bytes={} sha256={hash}", value.len()).expect("a text grows");
    }
    if meta.is_dir() {
        let mut below: Vec<_> = fs::read_dir(path)
            .expect("it lists")
            .map(|entry| entry.expect("an entry").path())
            .collect();
        below.sort_unstable();
        below.iter().for_each(|path| add(text, root, path));
    }
}

fn contents(path: &Path, meta: &Metadata) -> String {
    if meta.is_file() {
        let bytes = fs::read(path).expect("it is read");
        assert_eq!(bytes.len() as u64, meta.len(), "{}", path.display());
        format!("bytes={} blocks={} sha256={}", bytes.len(), meta.blocks(), sha256(&bytes))
    } else if meta.is_symlink() {
        let target = fs::read_link(path).expect("it is read");
        format!("target={}", target.as_os_str().as_bytes().escape_ascii())
    } else {
        String::new()
    }
}

fn sha256(bytes: &[u8]) -> String {
    digest(&SHA256, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}
