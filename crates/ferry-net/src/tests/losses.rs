//! What reports a loss: each descriptor that was open, once, whatever others ask for; and nothing
//! is changed on top of it before.

use super::*;

const EIO: Errno = Errno(libc::EIO);

impl Client {
    fn close_told(&self, ino: Ino, fh: u64) -> Done {
        let told = self.me.call(|cx| self.fs.flush(cx, ino, fh, 1));
        self.close(ino, fh);
        told
    }

    fn opendir(&self, dir: Ino) -> u64 {
        self.me.call(|cx| self.fs.opendir(cx, dir)).unwrap().fh
    }

    fn fsyncdir(&self, dir: Ino, fh: u64) -> Done {
        self.me.call(|cx| self.fs.fsyncdir(cx, dir, fh, false))
    }
}

/// A client that decides alone in its directory, which has one file.
fn alone(world: &World) -> (Client, Ino, Ino) {
    let client = world.client();
    let dir = client.mkdir(ROOT, "d").unwrap();
    let (ino, fh) = client.create(dir, "f").unwrap();
    client.write(ino, fh, 0, b"kept").unwrap();
    client.close(ino, fh);
    client.sync().unwrap();
    (client, dir, ino)
}

/// Early-acknowledged changes are lost meanwhile: the next server does not know the session.
fn losing<T>(world: &World, acknowledge: impl FnOnce() -> T) -> T {
    world.net.silence_all();
    let acknowledged = acknowledge();
    world.stop();
    world.start();
    world.net.cut_all();
    acknowledged
}

/// Until it has found that something is lost. The server is not asked.
fn until_lost(client: &Client) {
    while client.fs.figures()["connection"]["lost_changes"] == 0 {
        std::thread::yield_now();
    }
}

#[test]
fn each_descriptor_reports_a_loss_once_by_fsync_or_close() {
    let world = World::new(720);
    let (client, dir, ino) = alone(&world);
    let fhs: Vec<u64> = (0..4).map(|_| client.open(ino).unwrap()).collect();
    let (other, other_fh) = client.create(dir, "other").unwrap();
    client.sync().unwrap();
    losing(&world, || client.write(ino, fhs[0], 0, b"lost").unwrap());
    assert_eq!(client.sync(), Err(EIO));
    assert_eq!(client.sync(), Ok(()), "once");
    assert_eq!(client.fsync(other, other_fh), Ok(()), "nothing of it is lost");
    for fh in &fhs[..2] {
        assert_eq!(
            client.fsync(ino, *fh),
            Err(EIO),
            "also after a sync of all, or an earlier fsync"
        );
        assert_eq!(client.fsync(ino, *fh), Ok(()), "once");
        assert_eq!(client.me.call(|cx| client.fs.flush(cx, ino, *fh, 1)), Ok(()), "once");
    }
    for _ in 0..2 {
        let copy_closed = client.me.call(|cx| client.fs.flush(cx, ino, fhs[2], 1));
        assert_eq!(copy_closed, Err(EIO), "a child closes its copy, and nobody hears of that");
    }
    assert_eq!(client.write(ino, fhs[2], 0, b"on top"), Err(EIO), "its program was not told");
    assert_eq!(client.close_told(ino, fhs[2]), Err(EIO));
    let later = client.open(ino).unwrap();
    assert_eq!(client.fsync(ino, later), Ok(()), "somebody was told before it was opened");
    assert_eq!(client.close_told(ino, fhs[3]), Err(EIO));
}

#[test]
fn an_unreported_loss_is_reported_to_the_next_open() {
    let world = World::new(721);
    let (client, _, ino) = alone(&world);
    let fh = client.open(ino).unwrap();
    client.sync().unwrap();
    losing(&world, || {
        client.write(ino, fh, 0, b"lost").unwrap();
        client.close(ino, fh);
    });
    assert_eq!(client.sync(), Err(EIO));
    let (first, second) = (client.open(ino).unwrap(), client.open(ino).unwrap());
    assert_eq!(client.write(ino, first, 0, b"NEW"), Ok(3), "it builds on what is there");
    assert_eq!((client.fsync(ino, first), client.fsync(ino, first)), (Err(EIO), Ok(())));
    assert_eq!((client.fsync(ino, second), client.fsync(ino, second)), (Err(EIO), Ok(())));
    let third = client.open(ino).unwrap();
    assert_eq!(client.fsync(ino, third), Ok(()));
    for fh in [first, second, third] {
        client.close(ino, fh);
    }
    assert_eq!(client.open(ino).and_then(|fh| client.fsync(ino, fh)), Ok(()));
}

#[test]
fn each_open_directory_reports_a_loss_once() {
    let world = World::new(722);
    let (client, dir, _) = alone(&world);
    let open = [client.opendir(dir), client.opendir(dir)];
    losing(&world, || client.mkdir(dir, "lost").unwrap());
    assert_eq!(client.sync(), Err(EIO));
    for fh in open {
        assert_eq!((client.fsyncdir(dir, fh), client.fsyncdir(dir, fh)), (Err(EIO), Ok(())));
    }
    let later = client.opendir(dir);
    assert_eq!(client.fsyncdir(dir, later), Ok(()));
}

#[test]
fn a_write_after_a_loss_fails_until_the_loss_is_reported() {
    let world = World::new(723);
    let (client, _, ino) = alone(&world);
    let (fh, second, reader) =
        (client.open(ino).unwrap(), client.open(ino).unwrap(), client.open(ino).unwrap());
    client.sync().unwrap();
    losing(&world, || client.write(ino, fh, 0, b"lost").unwrap());
    until_lost(&client);
    let cut = SetAttr { size: Some(0), ..SetAttr::default() };
    let fallocate = |fh| client.me.call(|cx| client.fs.fallocate(cx, ino, fh, 0, 0, 4096));
    for fh in [fh, second] {
        for _ in 0..2 {
            assert_eq!(client.write(ino, fh, 4, b"later"), Err(EIO));
            assert_eq!(fallocate(fh), Err(EIO));
            assert_eq!(
                client.me.call(|cx| client.fs.setattr(cx, ino, Some(fh), &cut)).map(drop),
                Err(EIO)
            );
        }
    }
    assert_eq!(client.read(ino, reader, 10).unwrap(), b"kept");
    assert_eq!(client.fsync(ino, fh), Err(EIO));
    assert_eq!(client.write(ino, second, 4, b"later"), Err(EIO), "its program was not told");
    assert_eq!(client.write(ino, fh, 4, b"later"), Ok(5));
    assert_eq!(client.read(ino, reader, 10).unwrap(), b"keptlater");
}

/// The server lives, and takes the leases away from a client of which it hears nothing.
#[test]
fn a_descriptor_does_not_write_on_top_of_changes_lost_with_an_epoch() {
    let options = ServerOptions { lease_term: Duration::from_millis(500), ..server_options() };
    let world = World::with(724, options);
    let (client, dir, ino) = alone(&world);
    let fh = client.open(ino).unwrap();
    client.write(ino, fh, 0, b"KEPT").unwrap();
    client.sync().unwrap();
    world.net.silence_all();
    client.write(ino, fh, 0, b"lost").unwrap();
    let other = world.client();
    assert_eq!(other.ino(ROOT, "d"), dir);
    assert_eq!(other.ino(dir, "f"), ino);
    let theirs = other.open(ino).unwrap();
    other.write(ino, theirs, 0, b"OTHER").unwrap();
    std::thread::scope(|scope| {
        // One waits for the server when the loss is found.
        let queued = scope.spawn(|| client.write(ino, fh, 5, b"queued"));
        world.net.cut_all();
        until_lost(&client);
        assert_eq!(queued.join().unwrap(), Err(EIO));
    });
    assert_eq!(client.write(ino, fh, 5, b"later"), Err(EIO));
    assert_eq!(client.close_told(ino, fh), Err(EIO));
    let fh = client.open(ino).unwrap();
    assert_eq!(client.read(ino, fh, 20).unwrap(), b"OTHER");
    assert_eq!(client.write(ino, fh, 5, b"!"), Ok(1));
}
