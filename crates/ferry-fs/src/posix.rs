//! Rules of POSIX, as Linux applies them: pure functions of attributes, names and requests.
//!
//! Each rule stands here once. The local file system, the model by which a client decides changes
//! alone, and the null file system of the benchmarks use them. Nothing here reads or stores
//! anything.

use crate::api::{Attr, Errno, NAME_MAX, SetAttr, SetTime, Timestamp};
use crate::keys::InodeRecord;

/// Whether a mode is that of a directory.
pub fn is_dir(mode: u32) -> bool {
    mode & libc::S_IFMT == libc::S_IFDIR
}

/// Whether a mode is that of a regular file.
pub fn is_regular(mode: u32) -> bool {
    mode & libc::S_IFMT == libc::S_IFREG
}

/// The attributes that the rules change.
pub struct Parts<'a> {
    mode: &'a mut u32,
    nlink: &'a mut u32,
    uid: &'a mut u32,
    gid: &'a mut u32,
    size: &'a mut u64,
    atime: &'a mut Timestamp,
    mtime: &'a mut Timestamp,
    ctime: &'a mut Timestamp,
}

/// What has attributes: the record of an inode, or what a program is told of it.
pub trait Attributes {
    /// Its attributes, to be changed.
    fn parts(&mut self) -> Parts<'_>;
}

macro_rules! attributes {
    ($($of:ty),*) => {$(
        impl Attributes for $of {
            fn parts(&mut self) -> Parts<'_> {
                let Self { mode, nlink, uid, gid, size, atime, mtime, ctime, .. } = self;
                Parts { mode, nlink, uid, gid, size, atime, mtime, ctime }
            }
        }
    )*};
}
attributes!(Attr, InodeRecord);

/// The mode after a write or a change of owner by a caller without privileges. Set-group-id without
/// the group's right to execute stays: it once meant mandatory locking.
pub fn without_set_ids(mode: u32) -> u32 {
    match mode & libc::S_IXGRP {
        _ if is_dir(mode) => mode,
        0 => mode & !libc::S_ISUID,
        _ => mode & !(libc::S_ISUID | libc::S_ISGID),
    }
}

/// Whether the mode has set-id bits that a write by a caller without privileges clears.
pub fn has_set_ids(mode: u32) -> bool {
    without_set_ids(mode) != mode
}

/// Applies a request to change attributes, all but the size itself.
pub fn set_attributes(of: &mut impl Attributes, set: &SetAttr, now: Timestamp) {
    let resolve = |time: SetTime| match time {
        SetTime::Now => now,
        SetTime::At(at) => at,
    };
    let Parts { mode, uid, gid, atime, mtime, ctime, .. } = of.parts();
    if set.kill_suidgid || set.uid.is_some() || set.gid.is_some() {
        *mode = without_set_ids(*mode);
    }
    *uid = set.uid.unwrap_or(*uid);
    *gid = set.gid.unwrap_or(*gid);
    if let Some(bits) = set.mode {
        *mode = *mode & libc::S_IFMT | bits & 0o7777;
    }
    if set.size.is_some() {
        *mtime = now;
    }
    *atime = set.atime.map_or(*atime, resolve);
    *mtime = set.mtime.map_or(*mtime, resolve);
    *ctime = set.ctime.unwrap_or(now);
}

/// Mode and group of an inode that is made in a directory. A directory with set-group-id passes its
/// group on, and the bit to directories.
pub fn inherit_group((dir_mode, dir_gid): (u32, u32), (mode, gid): (u32, u32)) -> (u32, u32) {
    match dir_mode & libc::S_ISGID {
        0 => (mode, gid),
        bit if is_dir(mode) => (mode | bit, dir_gid),
        _ => (mode, dir_gid),
    }
}

/// Links of an inode that is made with a name: a directory also counts its own `.`.
pub fn first_links(mode: u32) -> u32 {
    if is_dir(mode) { 2 } else { 1 }
}

/// A directory has so many entries and subdirectories more. Its size is the number of its entries.
/// On a damaged volume both may have been too small.
pub fn count_entries(dir: &mut impl Attributes, entries: i64, subdirectories: i32, now: Timestamp) {
    let Parts { nlink, size, mtime, ctime, .. } = dir.parts();
    *size = size.saturating_add_signed(entries);
    *nlink = nlink.saturating_add_signed(subdirectories);
    (*mtime, *ctime) = (now, now);
}

/// An inode loses a name, a directory its only one.
pub fn drop_link(of: &mut impl Attributes, now: Timestamp) {
    let Parts { mode, nlink, ctime, .. } = of.parts();
    *ctime = now;
    *nlink = if is_dir(*mode) { 0 } else { nlink.saturating_sub(1) };
}

/// Whether an inode's name may be removed, or given to another inode that is a directory (`as_dir`)
/// or none. `entries`: what a directory holds.
pub fn check_removable(mode: u32, entries: u64, as_dir: bool) -> Result<(), Errno> {
    match (as_dir, is_dir(mode)) {
        (false, true) => Err(Errno(libc::EISDIR)),
        (true, false) => Err(Errno(libc::ENOTDIR)),
        (true, true) if entries > 0 => Err(Errno(libc::ENOTEMPTY)),
        _ => Ok(()),
    }
}

/// Refuses what cannot be the name of a new entry.
pub fn check_name(name: &[u8]) -> Result<(), Errno> {
    match name {
        b"" => Err(Errno(libc::ENOENT)),
        _ if name.len() > NAME_MAX => Err(Errno(libc::ENAMETOOLONG)),
        b"." | b".." => Err(Errno(libc::EEXIST)),
        _ if name.contains(&b'/') || name.contains(&0) => Err(Errno(libc::EINVAL)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_id_bits_are_cleared_except_on_directories() {
        let file = libc::S_IFREG;
        assert_eq!(without_set_ids(file | 0o6755), file | 0o755);
        assert_eq!(without_set_ids(file | 0o6745), file | 0o2745, "the group may not execute it");
        assert_eq!(without_set_ids(libc::S_IFDIR | 0o6755), libc::S_IFDIR | 0o6755);
    }

    #[test]
    fn a_mode_has_set_ids_if_a_write_clears_some() {
        let (file, dir) = (libc::S_IFREG, libc::S_IFDIR);
        for mode in [file | 0o4644, file | 0o2755, file | 0o6745] {
            assert!(has_set_ids(mode), "{mode:o}");
            assert!(!has_set_ids(without_set_ids(mode)), "{mode:o}");
        }
        for mode in [file | 0o1755, file | 0o2745, dir | 0o6755] {
            assert!(!has_set_ids(mode), "{mode:o}");
        }
    }

    #[test]
    fn a_set_group_id_directory_passes_its_group_on() {
        let (file, dir) = (libc::S_IFREG | 0o644, libc::S_IFDIR | 0o755);
        assert_eq!(inherit_group((dir, 5), (file, 7)), (file, 7));
        assert_eq!(inherit_group((dir | 0o2000, 5), (file, 7)), (file, 5));
        assert_eq!(inherit_group((dir | 0o2000, 5), (dir, 7)), (dir | 0o2000, 5));
    }

    #[test]
    fn only_names_of_the_right_kind_are_removable() {
        let (file, dir) = (libc::S_IFREG, libc::S_IFDIR);
        assert_eq!(check_removable(file, 9, false), Ok(()));
        assert_eq!(check_removable(dir, 0, true), Ok(()));
        assert_eq!(check_removable(dir, 1, true), Err(Errno(libc::ENOTEMPTY)));
        assert_eq!(check_removable(dir, 0, false), Err(Errno(libc::EISDIR)));
        assert_eq!(check_removable(file, 0, true), Err(Errno(libc::ENOTDIR)));
    }
}
