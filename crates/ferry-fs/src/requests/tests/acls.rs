//! POSIX ACLs: how they and the mode bits follow each other.

use crate::requests::tests::*;
use libc::S_IFDIR;

pub(super) const ACCESS: &str = "system.posix_acl_access";
pub(super) const DEFAULT: &str = "system.posix_acl_default";
const NONE: u32 = u32::MAX;

/// A list in the kernel's form, from (tag, permissions, id).
fn list(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut out = 2_u32.to_le_bytes().to_vec();
    for (tag, perm, id) in entries {
        out.extend_from_slice(&tag.to_le_bytes());
        out.extend_from_slice(&perm.to_le_bytes());
        out.extend_from_slice(&id.to_le_bytes());
    }
    out
}

/// Owner, user 1000, group, mask, others.
pub(super) fn named(owner: u16, user: u16, group: u16, mask: u16, other: u16) -> Vec<u8> {
    list(&[
        (1, owner, NONE),
        (2, user, 1000),
        (4, group, NONE),
        (16, mask, NONE),
        (32, other, NONE),
    ])
}

fn minimal(owner: u16, group: u16, other: u16) -> Vec<u8> {
    list(&[(1, owner, NONE), (4, group, NONE), (32, other, NONE)])
}

fn mode(world: &World, ino: Ino) -> u32 {
    world.attr(ino).mode & 0o7777
}

#[test]
fn an_acl_sets_the_mode_and_chmod_changes_the_acl() {
    let mut world = World::new();
    let file = world.file(ROOT, "file").unwrap();
    world.setxattr(file, ACCESS, &named(7, 6, 4, 5, 1)).unwrap();
    assert_eq!(mode(&world, file), 0o751);
    world.set(file, SetAttr { mode: Some(0o4620), ..SetAttr::default() }).unwrap();
    assert_eq!(world.getxattr(file, ACCESS).unwrap(), named(6, 6, 4, 2, 0));
    assert_eq!(mode(&world, file), 0o4620);
    world.reopen();
    assert_eq!(world.getxattr(file, ACCESS).unwrap(), named(6, 6, 4, 2, 0));
    world.setxattr(file, ACCESS, &minimal(7, 5, 4)).unwrap();
    assert_eq!(mode(&world, file), 0o4754);
    assert_eq!(code(world.getxattr(file, ACCESS)), libc::ENODATA, "the mode says all of it");
    world.setxattr(file, ACCESS, &named(7, 6, 4, 5, 1)).unwrap();
    world.me.call(|cx| world.fs.removexattr(cx, file, ACCESS.as_bytes())).unwrap();
    assert_eq!(world.me.call(|cx| world.fs.listxattr(cx, file)).unwrap(), b"");
    world.check();
}

#[test]
fn setting_an_acl_clears_set_group_id_when_asked() {
    let world = World::new();
    let file = world.file(ROOT, "file").unwrap();
    world.set(file, SetAttr { mode: Some(0o2755), ..SetAttr::default() }).unwrap();
    let set = |acl_kill_sgid| {
        let flags = XattrFlags { acl_kill_sgid, ..XattrFlags::default() };
        world
            .me
            .call(|cx| world.fs.setxattr(cx, file, ACCESS.as_bytes(), &minimal(7, 5, 5), flags))
            .unwrap();
        mode(&world, file)
    };
    assert_eq!(set(false), 0o2755);
    assert_eq!(set(true), 0o755);
}

#[test]
fn a_default_list_is_inherited_in_place_of_the_umask() {
    let mut world = World::new();
    world.me.umask = 0o077;
    let dir = world.mkdir(ROOT, "dir").unwrap();
    world.setxattr(dir, DEFAULT, &named(7, 6, 5, 7, 1)).unwrap();
    assert_eq!(mode(&world, dir), 0o700, "a default list does not concern the directory itself");

    let file = world.mknod(dir, "file", libc::S_IFREG | 0o664).unwrap();
    assert_eq!(mode(&world, file), 0o660);
    assert_eq!(world.getxattr(file, ACCESS).unwrap(), named(6, 6, 5, 6, 0));
    assert_eq!(code(world.getxattr(file, DEFAULT)), libc::ENODATA);

    let sub = world.mkdir(dir, "sub").unwrap();
    assert_eq!(mode(&world, sub), 0o751 & 0o755);
    assert_eq!(world.getxattr(sub, DEFAULT).unwrap(), named(7, 6, 5, 7, 1));
    assert_eq!(world.getxattr(sub, ACCESS).unwrap(), named(7, 6, 5, 5, 1));
    let (entry, opened) =
        world.me.call(|cx| world.fs.tmpfile(cx, sub, 0o666, libc::O_RDWR)).unwrap();
    let temp = entry.attr.unwrap();
    assert_eq!(temp.mode & 0o777, 0o660);
    world.release(temp.ino, opened.fh);
    world.fs.forget(temp.ino, 1);

    let link = world.symlink(dir, "link", "x").unwrap();
    assert_eq!(mode(&world, link), 0o777, "a symbolic link has no list");
    world.check();
}

#[test]
fn a_minimal_default_list_gives_modes_only() {
    let mut world = World::new();
    world.me.umask = 0o077;
    let dir = world.mkdir(ROOT, "dir").unwrap();
    world.setxattr(dir, DEFAULT, &minimal(7, 5, 4)).unwrap();
    let file = world.mknod(dir, "file", libc::S_IFREG | 0o666).unwrap();
    assert_eq!(mode(&world, file), 0o644);
    assert_eq!(code(world.getxattr(file, ACCESS)), libc::ENODATA);
    let sub = world.mkdir(dir, "sub").unwrap();
    assert_eq!(world.getxattr(sub, DEFAULT).unwrap(), minimal(7, 5, 4));
    world.setxattr(dir, DEFAULT, b"").unwrap();
    let file = world.mknod(dir, "umasked", libc::S_IFREG | 0o666).unwrap();
    assert_eq!(mode(&world, file), 0o600, "without a default list the umask counts");
    world.check();
}

#[test]
fn impossible_acls_are_refused() {
    let world = World::new();
    let file = world.file(ROOT, "file").unwrap();
    let link = world.symlink(ROOT, "link", "x").unwrap();
    assert_eq!(code(world.setxattr(file, DEFAULT, &minimal(7, 5, 5))), libc::EACCES);
    world.setxattr(file, DEFAULT, b"").unwrap();
    assert_eq!(code(world.setxattr(link, ACCESS, &minimal(7, 5, 5))), libc::EOPNOTSUPP);
    assert_eq!(code(world.setxattr(file, ACCESS, &minimal(9, 5, 5))), libc::EINVAL);
    let many: Vec<_> = (0..600).map(|id| (2, 7, id)).collect();
    let mut entries = vec![(1, 7, NONE)];
    entries.extend(many);
    entries.extend([(4, 7, NONE), (16, 7, NONE), (32, 7, NONE)]);
    assert_eq!(code(world.setxattr(file, ACCESS, &list(&entries))), libc::ENOSPC);
    assert_eq!(world.attr(file).mode & S_IFDIR, 0);
    world.check();
}
