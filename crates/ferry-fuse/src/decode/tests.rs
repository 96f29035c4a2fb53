use proptest::prelude::*;
use zerocopy::IntoBytes;

use super::*;

fn head(opcode: u32) -> InHeader {
    InHeader { opcode, unique: 2, nodeid: 1, ..InHeader::default() }
}

fn decoded(opcode: u32, body: &[u8]) -> Result<FuseOp<'_>, Errno> {
    decode(&head(opcode), RequestArgs::split(opcode, true, body), true)
}

proptest! {
    /// Whatever arrives, decoding ends, and what it gives lies inside what arrived.
    #[test]
    fn random_bytes_never_panic(opcode in 0_u32..64, ext: bool, body in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(op) = decode(&head(opcode), RequestArgs::split(opcode, ext, &body), ext) {
            check(&op, body.len());
        }
    }

    /// The same with plausible strings behind a random structure, so that decoding gets further.
    #[test]
    fn random_structures_before_strings_never_panic(
        opcode in 0_u32..64,
        fixed in prop::collection::vec(0_u8..3, 0..64),
        names in prop::collection::vec("[a-z/]{0,8}", 0..4),
    ) {
        let mut body = fixed;
        body.resize(abi::op_len(opcode, true), 1);
        for name in names {
            body.extend_from_slice(name.as_bytes());
            body.push(0);
        }
        if let Ok(op) = decoded(opcode, &body) {
            check(&op, body.len());
        }
    }
}

fn check(op: &FuseOp<'_>, len: usize) {
    match op {
        FuseOp::Write { data, .. } => assert!(data.len() <= len),
        FuseOp::BatchForget { all } => {
            assert!(all.iter().count() * size_of::<abi::ForgetOne>() <= len)
        }
        FuseOp::Lookup { name } | FuseOp::Create { name, .. } | FuseOp::Unlink { name } => {
            assert!(!name.is_empty() && !name.contains(&0) && name.len() <= NAME_MAX);
        }
        _ => {}
    }
}

#[test]
fn names_are_checked() {
    assert!(matches!(decoded(op::LOOKUP, b"abc\0"), Ok(FuseOp::Lookup { name: b"abc" })));
    assert_eq!(decoded(op::LOOKUP, b"abc").expect_err("no NUL"), MALFORMED);
    assert_eq!(decoded(op::LOOKUP, b"\0").expect_err("empty"), MALFORMED);
    assert_eq!(decoded(op::LOOKUP, b"a/b\0").expect_err("a path"), MALFORMED);
    let mut long = vec![b'x'; NAME_MAX];
    long.push(0);
    assert!(decoded(op::LOOKUP, &long).is_ok());
    long.insert(0, b'x');
    assert_eq!(decoded(op::LOOKUP, &long).expect_err("256 bytes"), Errno(libc::ENAMETOOLONG));
}

#[test]
fn both_names_of_a_rename_and_its_flags_arrive() {
    let fixed = abi::Rename2In { newdir: 9, flags: libc::RENAME_EXCHANGE, padding: 0 };
    let body = [fixed.as_bytes(), b"old\0new\0"].concat();
    match decoded(op::RENAME2, &body) {
        Ok(FuseOp::Rename { name: b"old", new_parent: 9, new_name: b"new", flags }) => {
            assert_eq!(flags, libc::RENAME_EXCHANGE);
        }
        other => panic!("{other:?}"),
    }
    assert!(decoded(op::RENAME2, &body[..body.len() - 1]).is_err(), "the second name has no end");
}

#[test]
fn a_write_shorter_than_it_says_is_malformed() {
    let fixed =
        abi::WriteIn { size: 4, flags: libc::O_APPEND.cast_unsigned(), ..abi::WriteIn::default() };
    let full = [fixed.as_bytes(), b"data"].concat();
    assert!(matches!(
        decoded(op::WRITE, &full),
        Ok(FuseOp::Write { data: b"data", append: true, .. })
    ));
    assert_eq!(decoded(op::WRITE, &full[..full.len() - 1]).expect_err("short"), MALFORMED);
}

#[test]
fn a_written_back_page_is_never_an_append() {
    let flags = libc::O_APPEND.cast_unsigned();
    let fixed = abi::WriteIn { flags, write_flags: abi::WRITE_CACHE, ..abi::WriteIn::default() };
    assert!(matches!(
        decoded(op::WRITE, fixed.as_bytes()),
        Ok(FuseOp::Write { append: false, .. })
    ));
}

#[test]
fn a_write_says_whether_it_must_be_durable() {
    let sync = |flags: i32, write_flags| {
        let fixed =
            abi::WriteIn { flags: flags.cast_unsigned(), write_flags, ..abi::WriteIn::default() };
        match decoded(op::WRITE, fixed.as_bytes()) {
            Ok(FuseOp::Write { sync, .. }) => sync,
            other => panic!("{other:?}"),
        }
    };
    assert!(sync(libc::O_DSYNC, 0) && sync(libc::O_SYNC, 0));
    assert!(!sync(libc::O_DIRECT | libc::O_APPEND, 0));
    assert!(
        !sync(libc::O_SYNC, abi::WRITE_CACHE),
        "the kernel's write-back has an fsync of its own"
    );
}

#[test]
fn setattr_uses_only_fields_marked_valid() {
    let fixed = abi::SetattrIn {
        valid: fattr::SIZE | fattr::ATIME | fattr::ATIME_NOW | fattr::MTIME | fattr::KILL_SUIDGID,
        size: 5,
        mtime: (-2_i64).cast_unsigned(),
        mtimensec: 7,
        uid: 1,
        mode: 0o100_777,
        ..abi::SetattrIn::default()
    };
    let Ok(FuseOp::Setattr { fh: None, set }) = decoded(op::SETATTR, fixed.as_bytes()) else {
        panic!("a whole setattr")
    };
    assert_eq!((set.size, set.uid, set.mode), (Some(5), None, None));
    assert_eq!(set.atime, Some(SetTime::Now));
    assert_eq!(set.mtime, Some(SetTime::At(Timestamp::new(-2, 7))));
    assert!(set.kill_suidgid);
}

#[test]
fn setxattr_has_its_flags_in_the_long_form_only() {
    let long = abi::SetxattrIn {
        size: 2,
        flags: libc::XATTR_CREATE.cast_unsigned(),
        setxattr_flags: abi::SETXATTR_ACL_KILL_SGID,
        padding: 0,
    };
    let body = [long.as_bytes(), b"user.a\0vv"].concat();
    match decoded(op::SETXATTR, &body) {
        Ok(FuseOp::Setxattr { name: b"user.a", value: b"vv", flags }) => {
            assert!(flags.create && !flags.replace && flags.acl_kill_sgid);
        }
        other => panic!("{other:?}"),
    }
    let short = abi::SetxattrInShort { size: 1, flags: libc::XATTR_REPLACE.cast_unsigned() };
    let body = [short.as_bytes(), b"user.a\0v"].concat();
    let args = RequestArgs::split(op::SETXATTR, false, &body);
    match decode(&head(op::SETXATTR), args, false) {
        Ok(FuseOp::Setxattr { value: b"v", flags, .. }) => {
            assert!(flags.replace && !flags.acl_kill_sgid)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_batch_of_forgets_has_the_stated_length() {
    let list = [abi::ForgetOne { nodeid: 2, nlookup: 3 }, abi::ForgetOne { nodeid: 4, nlookup: 5 }];
    let with_count = |count| {
        let fixed = abi::BatchForgetIn { count, dummy: 0 };
        [fixed.as_bytes(), list.as_bytes()].concat()
    };
    let body = with_count(2);
    let Ok(FuseOp::BatchForget { all }) = decoded(op::BATCH_FORGET, &body) else {
        panic!("a whole batch")
    };
    assert_eq!(all.iter().map(|f| (f.nodeid, f.nlookup)).collect::<Vec<_>>(), [(2, 3), (4, 5)]);
    assert!(decoded(op::BATCH_FORGET, &with_count(3)).is_err());
    assert!(decoded(op::BATCH_FORGET, &with_count(u32::MAX)).is_err());
}

#[test]
fn flock_and_fcntl_locks_are_distinguished() {
    let mut fixed = abi::LkIn { owner: 8, lk_flags: abi::LK_FLOCK, ..abi::LkIn::default() };
    match decoded(op::SETLKW, fixed.as_bytes()) {
        Ok(FuseOp::Setlk { lock, wait: true, .. }) => assert!(lock.flock && lock.owner == 8),
        other => panic!("{other:?}"),
    }
    fixed.lk_flags = 0;
    assert!(
        matches!(decoded(op::GETLK, fixed.as_bytes()), Ok(FuseOp::Getlk { lock, .. }) if !lock.flock)
    );
}

#[test]
fn operations_that_are_not_served_are_unsupported() {
    for opcode in [0, op::ACCESS, op::BMAP, op::POLL, op::SYNCFS, 48, 4096, u32::MAX] {
        assert!(matches!(decoded(opcode, &[]), Ok(FuseOp::Unsupported)), "{opcode}");
    }
}
