//! The server crashes behind changes that it has decided itself, among others that were promised: what was synced is never told as lost, and
//! what is there neither.

use super::redo::Crashing;
use super::*;

/// A client that promises, with two directories that are durable.
fn prepared(crashing: &Crashing) -> (Client, Ino, Ino) {
    let client = crashing.world.client().warm_up();
    let (d, e) = (client.mkdir(ROOT, "d").unwrap(), client.mkdir(ROOT, "e").unwrap());
    client.sync().unwrap();
    (client, d, e)
}

impl Client {
    /// The server decides this.
    fn set_xattr(&self, ino: Ino, value: &[u8]) -> Done {
        self.me.call(|cx| self.fs.setxattr(cx, ino, b"user.a", value, XattrFlags::default()))
    }

    /// And this.
    fn move_dir(&self, from: (Ino, &str), to: (Ino, &str)) -> Done {
        let flags = RenameFlags::default();
        self.me.call(|cx| self.fs.rename(cx, from.0, from.1.as_bytes(), to.0, to.1.as_bytes(), flags))
    }

    fn sync_dir(&self, dir: Ino) -> Done {
        self.me.call(|cx| self.fs.fsyncdir(cx, dir, 0, false))
    }

    /// Nothing is said to be lost, on any way.
    fn assert_nothing_told(&self, files: &[(Ino, u64)], dirs: &[Ino]) {
        files.iter().for_each(|(ino, fh)| assert_eq!(self.fsync(*ino, *fh), Ok(()), "{ino}"));
        dirs.iter().for_each(|dir| assert_eq!(self.sync_dir(*dir), Ok(()), "{dir}"));
        assert_eq!(self.sync(), Ok(()));
        assert_eq!(self.connection_figure("lost_changes"), 0);
    }
}

#[test]
fn what_is_synced_after_it_was_given_away_is_not_told_as_lost() {
    let mut crashing = Crashing::new(600);
    let (client, d, e) = prepared(&crashing);
    let (ino, fh) = client.create(d, "f").unwrap();
    client.write(ino, fh, 0, b"synced").unwrap();
    client.set_xattr(ino, b"1").unwrap();
    assert_eq!(client.fsync(ino, fh), Ok(()));
    crashing.crash_and_start();
    assert_eq!(client.read(ino, fh, 100).unwrap(), b"synced");
    assert_eq!(client.ino(d, "f"), ino);
    // Its name was durable with it.
    client.assert_nothing_told(&[(ino, fh)], &[d, e]);
}

#[test]
fn what_came_before_a_sync_is_not_told_as_lost_because_of_what_came_behind_it() {
    let mut crashing = Crashing::new(601);
    let (client, d, e) = prepared(&crashing);
    let (ino, fh) = client.create(d, "f").unwrap();
    client.write(ino, fh, 0, b"synced").unwrap();
    assert_eq!(client.fsync(ino, fh), Ok(()));
    client.set_xattr(ino, b"1").unwrap();
    crashing.crash_and_start();
    assert_eq!(client.read(ino, fh, 100).unwrap(), b"synced");
    assert_eq!((client.sync_dir(d), client.sync_dir(e)), (Ok(()), Ok(())), "the name was synced");
    let there = client.me.call(|cx| client.fs.getxattr(cx, ino, b"user.a")).is_ok();
    assert_eq!(client.connection_figure("lost_changes"), u64::from(!there), "the attribute alone");
    assert_eq!(client.sync(), if there { Ok(()) } else { Err(Errno(libc::EIO)) });
    assert_eq!(client.sync(), Ok(()), "once");
}

#[test]
fn what_the_server_has_decided_and_is_there_is_not_told_as_lost() {
    let mut crashing = Crashing::new(602);
    let (client, d, e) = prepared(&crashing);
    client.mkdir(d, "sub").unwrap();
    client.move_dir((d, "sub"), (e, "moved")).unwrap();
    // What is synced later is behind it in the log.
    let (ino, fh) = client.create(ROOT, "other").unwrap();
    assert_eq!(client.fsync(ino, fh), Ok(()));
    crashing.crash_and_start();
    assert_eq!((client.list(d).unwrap().len(), client.list(e).unwrap()), (0, vec!["moved".to_string()]));
    client.assert_nothing_told(&[(ino, fh)], &[ROOT, d, e]);
}

#[test]
fn a_file_that_gets_its_name_when_it_is_whole_survives_with_it() {
    for synced in [false, true] {
        let mut crashing = Crashing::new(603);
        let (client, d, e) = prepared(&crashing);
        let flags = libc::O_RDWR | libc::O_TMPFILE;
        let (entry, opened) = client.me.call(|cx| client.fs.tmpfile(cx, d, 0o644, flags)).unwrap();
        let ino = entry.attr.unwrap().ino;
        client.write(ino, opened.fh, 0, &[7; 10_000]).unwrap();
        client.append(ino, opened.fh, b"end").unwrap();
        if synced {
            assert_eq!(client.fsync(ino, opened.fh), Ok(()));
        }
        let linked = client.me.call(|cx| client.fs.link(cx, ino, d, b"whole")).unwrap();
        assert_eq!(linked.attr.unwrap().nlink, 1);
        let before = client.see();
        crashing.crash_and_start();
        assert!(client.see() == before, "{synced}");
        assert_eq!(client.read(ino, opened.fh, 20_000).unwrap().len(), 10_003);
        client.assert_nothing_told(&[(ino, opened.fh)], &[d, e]);
    }
}
