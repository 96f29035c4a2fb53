//! What a client decides is stamped with the server's time, whatever its own clock says.

use ferry_env::Clock;

use super::*;

/// A clock of the day that somebody sets.
struct Set {
    clock: Arc<dyn Clock>,
    /// So many seconds ahead.
    ahead: AtomicU64,
}

impl Clock for Set {
    fn monotonic(&self) -> Duration {
        self.clock.monotonic()
    }
    fn wall(&self) -> Duration {
        self.clock.wall() + Duration::from_secs(self.ahead.load(Ordering::SeqCst))
    }
}

const HOUR: u64 = 3600;

/// Until it decides again, and was not only about to.
fn decides(client: &Client, dir: Ino) {
    let before = client.figures("connection", "changes");
    while client.figures("connection", "early_acknowledged") == 0
        || client.figures("connection", "changes") == before
    {
        client.mkdir(dir, "warm").unwrap();
        client.me.call(|cx| client.fs.rmdir(cx, dir, b"warm")).unwrap();
    }
}

#[test]
fn setting_a_clients_clock_changes_no_file_times() {
    let options = ServerOptions { lease_term: Duration::from_secs(1), ..server_options() };
    let world = World::with(8200, options);
    let clock = Arc::new(Set { clock: Env::real().clock, ahead: AtomicU64::new(0) });
    let env = Env { clock: clock.clone(), ..Env::real() };
    let fs = RemoteFs::connect(world.net.clone(), world.client_options("/"), &env).unwrap();
    let client = Client { fs, me: InProcess::default() };
    let dir = client.mkdir(ROOT, "d").unwrap();
    let mut last = Timestamp::default();
    // Ahead, and back again.
    for (n, hours) in [0, 1, 0].into_iter().enumerate() {
        clock.ahead.store(hours * HOUR, Ordering::SeqCst);
        decides(&client, dir);
        let (ino, _) = client.create(dir, &format!("f{n}")).unwrap();
        let reported = client.me.call(|cx| client.fs.getattr(cx, ino, None)).unwrap().0.mtime;
        assert_eq!(client.sync(), Ok(()));
        let stored = client.me.call(|cx| world.fs.getattr(cx, ino, None)).unwrap().0.mtime;
        let now = i128::try_from(Env::real().clock.wall().as_nanos()).unwrap();
        assert_eq!(stored, reported);
        assert!(
            (now - stored.0).abs() < i128::from(HOUR / 2) * 1_000_000_000,
            "{n}: {stored:?} at {now}"
        );
        assert!(stored > last, "{n}");
        last = stored;
    }
}
