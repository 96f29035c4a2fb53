//! Extended attributes: names, sizes and flags.

use crate::requests::tests::*;

fn set_with(world: &World, ino: Ino, name: &str, create: bool, replace: bool) -> Done {
    let flags = XattrFlags { create, replace, acl_kill_sgid: false };
    world.me.call(|cx| world.fs.setxattr(cx, ino, name.as_bytes(), b"v", flags))
}

#[test]
fn attributes_are_kept_listed_and_removed() {
    let mut world = World::new();
    let file = world.file(ROOT, "file").unwrap();
    for (name, value) in [("user.b", &b"two"[..]), ("trusted.a", b""), ("security.c", &[0; 65536])]
    {
        world.setxattr(file, name, value).unwrap();
    }
    world.reopen();
    assert_eq!(world.getxattr(file, "security.c").unwrap().len(), 65536);
    assert_eq!(world.getxattr(file, "trusted.a").unwrap(), b"");
    let list = world.me.call(|cx| world.fs.listxattr(cx, file)).unwrap();
    assert_eq!(list, b"security.c\0trusted.a\0user.b\0");
    let remove = |name: &str| world.me.call(|cx| world.fs.removexattr(cx, file, name.as_bytes()));
    for name in ["user.b", "trusted.a", "security.c"] {
        remove(name).unwrap();
        assert_eq!(code(remove(name)), libc::ENODATA);
        world.check();
    }
    assert_eq!(code(world.getxattr(file, "user.b")), libc::ENODATA);
}

#[test]
fn flags_and_limits() {
    let world = World::new();
    let file = world.file(ROOT, "file").unwrap();
    assert_eq!(code(set_with(&world, file, "user.x", false, true)), libc::ENODATA);
    set_with(&world, file, "user.x", true, false).unwrap();
    assert_eq!(code(set_with(&world, file, "user.x", true, false)), libc::EEXIST);
    set_with(&world, file, "user.x", false, true).unwrap();
    assert_eq!(code(world.setxattr(file, "user.", b"")), libc::EINVAL);
    assert_eq!(code(world.setxattr(file, "system.other", b"")), libc::EOPNOTSUPP);
    assert_eq!(code(world.setxattr(file, "none", b"")), libc::EOPNOTSUPP);
    assert_eq!(code(world.setxattr(file, "user.big", &[0; 65537])), libc::E2BIG);
    let longest = format!("user.{}", "n".repeat(250));
    world.setxattr(file, &longest, b"").unwrap();
    assert_eq!(code(world.setxattr(file, &format!("{longest}n"), b"")), libc::ERANGE);
    let full = (0..).find_map(|i| world.setxattr(file, &format!("user.{i:0>250}"), b"").err());
    assert_eq!(full, Some(Errno(libc::ENOSPC)));
    let list = world.me.call(|cx| world.fs.listxattr(cx, file)).unwrap();
    assert!(list.len() <= 65536 && list.len() > 65536 - 256, "{} bytes of names", list.len());
    world.setxattr(file, "user.x", b"an old one may change").unwrap();
    world.check();
}
