//! A client reaches what lies below the directory that it mounts, and changes what it may change
//! there, whatever others do meanwhile.

use super::certificates::{DAEMON, Liar, Listening, Root, failed};
use super::*;
use crate::codec::List;
use crate::limits::Peer;
use crate::message::Known;
use crate::message::*;
use crate::{Limits, Terms, authority};

fn exports(words: &str) -> Vec<Export> {
    words.split(',').map(|word| word.parse().unwrap()).collect()
}

/// Clients that do not return leases are not waited for.
fn world(seed: u64, words: &str) -> World {
    let lease_term = Duration::from_millis(100);
    World::with(seed, ServerOptions { exports: exports(words), lease_term, ..server_options() })
}

fn known(outcome: Outcome) -> Known {
    match outcome {
        Outcome::Entry { known: Some(known) } => known,
        other => panic!("{other:?}"),
    }
}

fn look_up(liar: &mut Liar, parent: Ino, name: &str) -> Outcome {
    liar.says(DAEMON, Op::Lookup { parent, name: name.into() })
}

fn rename(parent: Ino, name: &str, new_parent: Ino, new_name: &str) -> Op {
    let flags = RenameFlags::default();
    Op::Rename { parent, name: name.into(), new_parent, new_name: new_name.into(), flags }
}

fn mkdir(parent: Ino, name: &str) -> Op {
    Op::Mkdir { parent, name: name.into(), mode: 0o755 }
}

fn link(ino: Ino, parent: Ino, name: &str) -> Op {
    Op::Link { ino, parent, name: name.into() }
}

fn truncate(ino: Ino) -> Op {
    Op::Setattr { ino, fh: None, set: SetAttr { size: Some(0), ..SetAttr::default() } }
}

#[test]
fn a_directory_moved_out_of_an_export_is_out_of_reach() {
    let world = world(950, "/:rw,/pub:rw");
    let root = Root(&world.fs);
    let (public, private) =
        (root.dir(ROOT, "pub", (0, 0), 0o755), root.dir(ROOT, "private", (0, 0), 0o755));
    let dir = root.dir(public, "d", (0, 0), 0o755);
    let deep = root.dir(dir, "deep", (0, 0), 0o755);
    let (file, open) =
        (root.file(deep, "f", (0, 0), 0o644), root.file(deep, "open", (0, 0), 0o644));
    let fixed = root.dir(public, "kept", (0, 0), 0o755);
    let mut inside = Liar::at(&world, Peer::default(), "/pub");
    let mut all = Liar::at(&world, Peer::default(), "/");
    let mut capabilities = Vec::new();
    for (parent, name, ino) in
        [(ROOT, "d", dir), (dir, "deep", deep), (deep, "f", file), (deep, "open", open)]
    {
        let known = known(look_up(&mut inside, parent, name));
        assert_eq!(known.attr.ino, ino);
        capabilities.push(Claim { ino, capability: known.capability });
    }
    inside.ino(ROOT, "kept");
    let fh = inside.opens(DAEMON, open, libc::O_RDWR).unwrap();
    for name in ["pub", "private"] {
        all.ino(ROOT, name);
    }
    // Within the export nothing is lost.
    assert_eq!(all.says(DAEMON, rename(public, "d", public, "e")), Outcome::Done {});
    assert_eq!(inside.ino(dir, "deep"), deep);
    assert_eq!(all.ino(public, "kept"), fixed);
    assert_eq!(all.says(DAEMON, rename(public, "e", fixed, "e")), Outcome::Done {});
    assert_eq!(inside.ino(deep, "f"), file);

    assert_eq!(all.says(DAEMON, rename(fixed, "e", private, "d")), Outcome::Done {});
    root.dir(deep, "secret", (0, 0), 0o755);
    for ino in [dir, deep] {
        for op in [
            Op::Lookup { parent: ino, name: b"..".to_vec() },
            Op::Lookup { parent: ino, name: b"secret".to_vec() },
            Op::Lookup { parent: ino, name: b".".to_vec() },
            Op::Readdir { ino, cookie: 0 },
            Op::Getattr { ino },
            Op::Listxattr { ino },
            mkdir(ino, "mine"),
            rename(ino, "f", ROOT, "f"),
            rename(ROOT, "kept", ino, "kept"),
            Op::Unlink { parent: ino, name: b"f".to_vec() },
            Op::Create {
                parent: ino,
                name: b"f".to_vec(),
                mode: 0o644,
                flags: libc::O_RDWR,
                fh: 9,
            },
        ] {
            let what = format!("{op:?}");
            assert_eq!(inside.says(DAEMON, op), failed(libc::ESTALE), "{what}");
        }
    }
    for op in [Op::Getattr { ino: file }, truncate(file), link(file, ROOT, "f")] {
        let what = format!("{op:?}");
        assert_eq!(inside.says(DAEMON, op), failed(libc::ESTALE), "{what}");
    }
    assert_eq!(inside.opens(DAEMON, file, libc::O_RDONLY), Err(libc::ESTALE));
    let dir_name = |parent, name: &str| DirName { parent, name: name.into() };
    let walk = Op::Walk {
        dirs: List(vec![dir_name(dir, "."), dir_name(dir, "deep")]),
        purpose: Purpose::Look {},
    };
    let Outcome::Walked { inodes, dirs, .. } = inside.says(DAEMON, walk) else { panic!("no walk") };
    assert!(inodes.0.is_empty() && dirs.0.is_empty(), "{inodes:?}");
    let Outcome::Leases { held } = inside.says(DAEMON, Op::Lease { inodes: List(vec![dir, file]) })
    else {
        panic!("no answer");
    };
    assert!(held.0.is_empty());
    // What is open is used as it was opened.
    assert!(matches!(inside.says(DAEMON, Op::Getattr { ino: open }), Outcome::Attributes { .. }));
    let write =
        Op::Write { fh, offset: 0, data: b"x".to_vec(), append: false, kill_suidgid: false };
    assert_eq!(inside.says(DAEMON, write), Outcome::Count { count: 1 });
    // Capabilities lead there no more than numbers do.
    let mut again = Liar::at(&world, Peer::default(), "/pub");
    again.says(DAEMON, Op::Claim { inodes: List(capabilities.clone()) });
    for ino in [dir, deep, file, open] {
        assert_eq!(again.says(DAEMON, Op::Getattr { ino }), failed(libc::ESTALE), "{ino}");
    }
    // It comes back, and can be reached again.
    assert_eq!(all.says(DAEMON, rename(private, "d", public, "d")), Outcome::Done {});
    inside.ino(deep, "secret");
    again.says(DAEMON, Op::Claim { inodes: List(capabilities) });
    assert!(matches!(again.says(DAEMON, Op::Getattr { ino: file }), Outcome::Attributes { .. }));
    assert_eq!(again.ino(deep, ".."), dir);
}

#[test]
fn a_removed_directory_with_an_open_file_stays_within_bounds() {
    let world = world(951, "/pub:rw");
    let root = Root(&world.fs);
    let public = root.dir(ROOT, "pub", (0, 0), 0o755);
    let dir = root.dir(public, "d", (0, 0), 0o755);
    let file = root.file(dir, "f", (0, 0), 0o644);
    let mut liar = Liar::at(&world, Peer::default(), "/pub");
    assert_eq!((liar.ino(ROOT, "d"), liar.ino(dir, "f")), (dir, file));
    liar.opens(DAEMON, file, libc::O_RDWR).unwrap();
    for op in [
        Op::Unlink { parent: dir, name: b"f".to_vec() },
        Op::Rmdir { parent: ROOT, name: b"d".to_vec() },
        rename(ROOT, "none", dir, "x"),
    ] {
        let _whatever = liar.says(DAEMON, op);
    }
    for op in [Op::Getattr { ino: file }, Op::Getattr { ino: dir }, truncate(file)] {
        assert!(matches!(liar.says(DAEMON, op), Outcome::Attributes { .. }));
    }
}

#[test]
fn a_read_only_export_inside_a_mounted_one_is_read_only() {
    let certificate = || Peer { exports: exports("/a:rw,/a/way/b:ro"), ..Peer::default() };
    for (seed, server, peer) in
        [(952, "/a:rw,/a/way/b:ro", Peer::default()), (953, "/:rw", certificate())]
    {
        let world = world(seed, server);
        let root = Root(&world.fs);
        let a = root.dir(ROOT, "a", (0, 0), 0o755);
        *world.net.peer.lock() = peer.clone();
        let said = world.mount("/a").map(drop).unwrap_err().to_string();
        assert!(said.contains("/a/way/b") && said.contains("make it first"), "{said}");
        let way = root.dir(a, "way", (0, 0), 0o755);
        let held = root.dir(way, "b", (0, 0), 0o755);
        let inner = root.dir(held, "inner", (0, 0), 0o755);
        let (file, other) =
            (root.file(inner, "f", (0, 0), 0o644), root.file(a, "other", (0, 0), 0o644));
        let mut liar = Liar::at(&world, peer.clone(), "/a");
        assert_eq!(
            (liar.ino(ROOT, "way"), liar.ino(way, "b"), liar.ino(held, "inner")),
            (way, held, inner)
        );
        assert_eq!((liar.ino(inner, "f"), liar.ino(ROOT, "other")), (file, other));
        for dir in [held, inner] {
            for op in [
                mkdir(dir, "new"),
                rename(dir, "f", ROOT, "f"),
                rename(dir, "inner", ROOT, "inner"),
                rename(ROOT, "other", dir, "other"),
                link(other, dir, "other"),
                Op::Create {
                    parent: dir,
                    name: b"f".to_vec(),
                    mode: 0o644,
                    flags: libc::O_RDWR,
                    fh: 9,
                },
                Op::Tmpfile { parent: dir, mode: 0o644, flags: libc::O_RDWR, fh: 9 },
                Op::Unlink { parent: dir, name: b"f".to_vec() },
                Op::Setattr {
                    ino: dir,
                    fh: None,
                    set: SetAttr { mode: Some(0), ..SetAttr::default() },
                },
                Op::Removexattr { ino: dir, name: b"user.x".to_vec() },
            ] {
                let what = format!("{op:?}");
                assert_eq!(liar.says(DAEMON, op), failed(libc::EROFS), "{what}");
            }
        }
        assert_eq!(liar.says(DAEMON, truncate(file)), failed(libc::EROFS));
        assert_eq!(liar.opens(DAEMON, file, libc::O_RDWR), Err(libc::EROFS));
        assert_eq!(liar.opens(DAEMON, file, libc::O_RDONLY | libc::O_TRUNC), Err(libc::EROFS));
        // Neither by a name elsewhere, nor by moving the directory.
        assert_eq!(liar.says(DAEMON, link(file, ROOT, "mine")), failed(libc::EXDEV));
        for op in [
            rename(way, "b", ROOT, "c"),
            rename(ROOT, "way", ROOT, "gone"),
            rename(ROOT, "other", ROOT, "way"),
            Op::Rmdir { parent: way, name: b"b".to_vec() },
        ] {
            let what = format!("{op:?}");
            assert_eq!(liar.says(DAEMON, op), failed(libc::EBUSY), "{what}");
        }
        let Outcome::Leases { held: leased } =
            liar.says(DAEMON, Op::Lease { inodes: List(vec![held, inner, file]) })
        else {
            panic!("no answer");
        };
        assert!(leased.0.is_empty(), "what it would decide alone would be refused");
        // It reads there, and changes what is beside it.
        assert!(liar.opens(DAEMON, file, libc::O_RDONLY).is_ok());
        assert!(matches!(liar.says(DAEMON, truncate(other)), Outcome::Attributes { .. }));
        assert!(matches!(liar.says(DAEMON, mkdir(way, "new")), Outcome::Entry { .. }));
        assert_eq!(
            (root.names(a), root.names(inner)),
            (vec!["other".to_owned(), "way".into()], vec!["f".into()])
        );
        // A client that mounts it, or something in it, changes nothing at all.
        assert!(world.mount("/a/way/b").unwrap().fs.is_read_only());
        assert!(world.mount("/a/way/b/inner").unwrap().fs.is_read_only());
        // An honest client does the same, though it asks for leases and decides what it can.
        let client = world.mount("/a").unwrap();
        let (way, held) = (client.ino(ROOT, "way"), client.ino(way, "b"));
        assert_eq!(client.create(held, "x").map(drop), Err(Errno(libc::EROFS)));
        assert!(client.create(way, "x").is_ok());
        assert_eq!(client.sync(), Ok(()));
    }
}

#[test]
fn a_certificate_mounts_only_its_exports() {
    let listening = Listening::new(954);
    let root = Root(&listening.world.fs);
    let home = root.dir(ROOT, "home", (0, 0), 0o755);
    root.dir(home, "alice", (1000, 1000), 0o755);
    let limits = || "ferryfs:users=1000;groups=1000".parse::<Limits>().ok();
    for (name, limits, words) in [
        ("alice", limits(), "/home/alice:rw"),
        ("reader", None, "/home:ro"),
        ("writer", None, "/home:rw"),
    ] {
        authority::issue(
            listening.dir.path(),
            name,
            &Terms { limits, exports: exports(words) },
            authority::DAYS,
        )
        .unwrap();
    }
    for (name, path, read_only) in [
        ("alice", "/home/alice", Some(false)),
        ("alice", "/home", None),
        ("alice", "/", None),
        ("reader", "/home/alice", Some(true)),
        ("reader", "/home", Some(true)),
        ("reader", "/", None),
        ("writer", "/home", Some(false)),
    ] {
        let mounted = listening.connect_at(name, path).map(|client| client.fs.is_read_only());
        match (mounted, read_only) {
            (Ok(mounted), Some(read_only)) => assert_eq!(mounted, read_only, "{name} {path}"),
            (Err(NetError::Refused { reason, .. }), None) => {
                assert!(reason.contains("/home"), "{reason}")
            }
            (other, _) => panic!("{name} {path}: {other:?}"),
        }
    }
    let reader = listening.connect_at("reader", "/home/alice").unwrap();
    assert_eq!(reader.create(ROOT, "x").map(drop), Err(Errno(libc::EROFS)));
}

/// A file handle is a number and nothing else. A session that may use the whole volume gets the
/// file, if that has a name or is open. Others get what they know.
#[test]
fn an_unrestricted_session_opens_inodes_by_number() {
    let world = world(954, "/:rw,/pub:rw");
    let root = Root(&world.fs);
    let public = root.dir(ROOT, "pub", (0, 0), 0o755);
    let dir = root.dir(public, "d", (0, 0), 0o755);
    let (file, other) =
        (root.file(dir, "f", (0, 0), 0o644), root.file(dir, "other", (0, 0), 0o644));
    let mut all = Liar::at(&world, Peer::default(), "/");
    let mut inside = Liar::at(&world, Peer::default(), "/pub");
    let limits = Some(Limits { users: "1000".parse().unwrap(), groups: "1000".parse().unwrap() });
    let mut limited = Liar::at(&world, Peer { limits, ..Peer::default() }, "/");
    for ino in [file, dir] {
        assert_eq!(known(look_up(&mut all, ino, ".")).attr.ino, ino);
        assert_eq!(look_up(&mut inside, ino, "."), failed(libc::ESTALE), "nobody has named it");
        assert_eq!(look_up(&mut limited, ino, "."), failed(libc::ESTALE), "nobody has named it");
    }
    assert_eq!(all.ino(dir, ".."), public);
    assert_eq!(look_up(&mut all, 1 << 40, "."), failed(libc::ESTALE), "it never was there");
    // A known file lies where it was found, however often it is asked for.
    assert_eq!((inside.ino(ROOT, "d"), inside.ino(dir, "f")), (dir, file));
    for _ in 0..2 {
        assert_eq!(known(look_up(&mut inside, file, ".")).attr.ino, file);
        assert!(matches!(
            inside.says(DAEMON, Op::Getattr { ino: file }),
            Outcome::Attributes { .. }
        ));
    }
    // Without a name it is there as long as a client has it open, even if others know it.
    let fh = all.opens(DAEMON, other, libc::O_RDONLY);
    assert_eq!(fh, Err(libc::ESTALE), "it was not named");
    all.ino(dir, "other");
    let fh = all.opens(DAEMON, other, libc::O_RDONLY).unwrap();
    assert_eq!(
        all.says(DAEMON, Op::Unlink { parent: dir, name: b"other".to_vec() }),
        Outcome::Done {}
    );
    assert_eq!(known(look_up(&mut all, other, ".")).attr.nlink, 0);
    assert_eq!(all.says(DAEMON, Op::Release { fh }), Outcome::Done {});
    assert_eq!(look_up(&mut all, other, "."), failed(libc::ESTALE));
}
