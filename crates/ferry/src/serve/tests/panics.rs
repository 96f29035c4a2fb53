//! `ferry serve` panics while it answers a client, because of a bug that is planted here. The tests
//! run their own program a second time, as the server.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap, and wait for the other side")]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use clap::Parser;
use ferry_env::Clock;
use ferry_fs::{Errno, Filesystem, InProcess, Ino, ROOT, ioctl};
use ferry_net::{Address, ClientOptions, RemoteFs, TcpConnector};

use crate::cli::{Cli, Command as Ferry};
use crate::location::Location;
use crate::open::{How, open_when_free};
use crate::serve::*;

/// In the serving process: the volume, and the address to listen at.
const VOLUME: &str = "FERRY_TEST_VOLUME";
const LISTEN: &str = "FERRY_TEST_LISTEN";

/// A clock that panics in a thread of the server as long as the file `armed` exists: the file
/// system asks the clock in most calls. In other threads it panics as long as `armed_outside`
/// exists.
struct Trap {
    clock: Arc<dyn Clock>,
    armed: PathBuf,
    armed_outside: PathBuf,
}

impl Trap {
    fn ask(&self) {
        let server = std::thread::current().name() == Some("ferry-server");
        let armed = if server { &self.armed } else { &self.armed_outside };
        assert!(!armed.exists(), "planted");
    }
}

impl Clock for Trap {
    fn monotonic(&self) -> Duration {
        self.ask();
        self.clock.monotonic()
    }
    fn wall(&self) -> Duration {
        self.ask();
        self.clock.wall()
    }
}

fn armed(volume: &Path) -> PathBuf {
    volume.with_extension("armed")
}

fn armed_outside(volume: &Path) -> PathBuf {
    volume.with_extension("armed-outside")
}

fn command<const N: usize>(args: [&str; N]) -> Ferry {
    Cli::try_parse_from(["ferry"].into_iter().chain(args)).unwrap().command
}

/// The server of the tests below, in a process of its own. Does nothing unless the environment asks
/// for it.
#[test]
fn serves_for_the_other_tests() {
    let Some(volume) = std::env::var_os(VOLUME).map(PathBuf::from) else { return };
    let listen = std::env::var(LISTEN).unwrap();
    let args =
        ["serve", volume.to_str().unwrap(), "--listen", &listen, "--insecure", "--grace", "1s"];
    let Ferry::Serve(args) = command(args) else { unreachable!("it serves") };
    logging::start(None, "info", false).unwrap();
    logging::log_panics();
    let clock = Arc::new(Trap {
        clock: Env::real().clock,
        armed: armed(&volume),
        armed_outside: armed_outside(&volume),
    });
    let env = Env { clock, ..Env::real() };
    let opened = open_when_free(&Location::from(&volume), How::Write, &env).unwrap();
    let options = fs_options(How::Write, 64 << 20);
    let fs = LocalFs::open(opened.device.clone(), options, env.clone()).unwrap();
    let exports = vec![Export { path: b"/".to_vec(), read_only: false }];
    let role = Arc::new(Mutex::new(Role::StandsBy(None)));
    let shared = Shared { fs: &fs, opened: &opened, role: &role, events: mpsc::channel() };
    let bound = bind(parse(&args.listen).unwrap(), Bound::new).unwrap();
    serve(shared, &args, bound, None, exports, &Env::real()).unwrap();
}

/// A server, which ends with the test, and its messages since it listens.
struct Served(Child, Option<JoinHandle<String>>);

impl Drop for Served {
    fn drop(&mut self) {
        let _ended = self.0.kill();
        let _ended = self.0.wait();
    }
}

/// Starts a server; also returns its address.
fn start(volume: &Path, listen: &str) -> (Served, String) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "serve::tests::panics::serves_for_the_other_tests", "--nocapture"])
        .env(VOLUME, volume)
        .env(LISTEN, listen)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let bound = lines.by_ref().map(Result::unwrap).find_map(|line| {
        let (_, address) = line.split_once("address=")?;
        Some(address.split_whitespace().next()?.to_owned())
    });
    // The server must not block on its output.
    let said = std::thread::spawn(move || lines.map(|line| line.unwrap() + "\n").collect());
    (Served(child, Some(said)), bound.expect("it says where it listens"))
}

struct Mounted(Arc<RemoteFs>);

impl Mounted {
    fn at(address: &str, asynchronous: bool) -> Self {
        let address: SocketAddr = address.parse().unwrap();
        let server = Address::of_host(&address.ip().to_string(), Some(address.port()), "/");
        let options = ClientOptions {
            server: address.to_string(),
            path: b"/".to_vec(),
            name: b"test".to_vec(),
            timeout: Duration::from_secs(60),
            asynchronous,
            noatime: false,
            notes: None,
        };
        let connector = Arc::new(TcpConnector::new(server, None));
        Self(RemoteFs::connect(connector, options, &Env::real()).unwrap())
    }

    fn mkdir(&self, name: &str) -> Result<(), Errno> {
        InProcess::default().call(|cx| self.0.mkdir(cx, ROOT, name.as_bytes(), 0o755)).map(drop)
    }

    fn lookup(&self, name: &str) -> Option<Ino> {
        let found = InProcess::default().call(|cx| self.0.lookup(cx, ROOT, name.as_bytes()));
        found.unwrap().attr.map(|attr| attr.ino)
    }

    fn sync(&self) -> Result<(), Errno> {
        InProcess::default().call(|cx| self.0.ioctl(cx, ROOT, ioctl::SYNC, &[], 0)).map(drop)
    }

    fn acknowledged_early(&self) -> u64 {
        self.0.figures()["connection"]["early_acknowledged"].as_u64().unwrap()
    }
}

/// A new volume, in a directory of its own.
fn new_volume() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let volume = dir.path().join("volume.ferry");
    let Ferry::Mkfs(args) = command(["mkfs", volume.to_str().unwrap()]) else {
        unreachable!("it is mkfs")
    };
    crate::mkfs::run(&args).unwrap();
    (dir, volume)
}

/// The server panics while it makes a directory, and the next one is there; returns the answer that
/// the client got first.
fn falls(asynchronous: bool) -> (Result<(), Errno>, Mounted, Served, tempfile::TempDir) {
    let (dir, volume) = new_volume();
    let (mut server, address) = start(&volume, "127.0.0.1:0");
    let client = Mounted::at(&address, asynchronous);
    let mut n = 0;
    while n == 0 || asynchronous && client.acknowledged_early() == 0 {
        client.mkdir(&format!("before{n}")).unwrap();
        n += 1;
    }
    assert_eq!(client.sync(), Ok(()));
    std::fs::write(armed(&volume), b"").unwrap();
    let (server, made) = std::thread::scope(|scope| {
        let making = scope.spawn(|| client.mkdir("fatal"));
        assert!(!server.0.wait().unwrap().success(), "it has ended itself");
        std::fs::remove_file(armed(&volume)).unwrap();
        (start(&volume, &address).0, making.join().unwrap())
    });
    (made, client, server, dir)
}

#[test]
fn a_change_that_panics_fails_and_is_not_sent_to_the_next_server() {
    let (made, client, _server, _dir) = falls(false);
    assert_eq!(made, Err(Errno(libc::EIO)));
    assert_eq!(client.lookup("fatal"), None);
    assert!(client.lookup("before0").is_some());
    assert_eq!(client.mkdir("after"), Ok(()));
}

#[test]
fn an_early_acknowledged_change_that_panics_is_reported_as_lost_and_earlier_ones_are_not() {
    let (made, client, _server, _dir) = falls(true);
    if made.is_ok() {
        assert_eq!(client.sync(), Err(Errno(libc::EIO)), "it is lost");
    } else {
        assert_eq!(made, Err(Errno(libc::EIO)));
    }
    assert_eq!(client.sync(), Ok(()), "told once");
    assert_eq!(client.lookup("fatal"), None);
    assert!(client.lookup("before0").is_some());
    assert_eq!(client.mkdir("after"), Ok(()));
}

/// A thread of the volume panics, for nobody's change: the log says what that means, and the next
/// server has all that was durable.
#[test]
fn a_panic_outside_a_request_says_what_it_means_and_what_to_do() {
    let (_dir, volume) = new_volume();
    let (mut server, address) = start(&volume, "127.0.0.1:0");
    let client = Mounted::at(&address, true);
    client.mkdir("before").unwrap();
    assert_eq!(client.sync(), Ok(()));
    std::fs::write(armed_outside(&volume), b"").unwrap();
    client.mkdir("after").unwrap();
    assert!(!server.0.wait().unwrap().success(), "it has ended itself");
    std::fs::remove_file(armed_outside(&volume)).unwrap();
    let said = server.1.take().unwrap().join().unwrap();
    for part in [
        "ferry stopped itself",
        "planted",
        "a bug in ferry",
        "the volume is safe",
        "Start the same",
        "report",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let _server = start(&volume, &address).0;
    assert!(client.lookup("before").is_some());
    assert_eq!(client.sync(), Ok(()), "nothing is lost");
    assert!(client.lookup("after").is_some());
}
