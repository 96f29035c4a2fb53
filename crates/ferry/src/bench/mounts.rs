//! Volumes that a bench mounts for itself, all on this machine: locally, and from a server behind a network with a delay (`--rtt`).
#![expect(clippy::disallowed_methods, reason = "a network that takes its time is what this is")]

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use ferry_bench::Place;

use super::args::{MountsArgs, OnOff, RunArgs};
use super::{failed, named};
use crate::error::CliError;

/// The server must serve after this time.
const START_TIME_MAX: Duration = Duration::from_secs(30);
/// How often it is looked whether it does.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// Pieces on their way in one direction.
const PIECES_MAX: usize = 4096;
/// Bytes of a piece.
const PIECE_MAX: usize = 64 << 10;

/// What a bench has mounted for itself.
pub struct Mounts(Vec<Mount>);

impl Mounts {
    /// New volumes, mounted as it was asked for.
    pub fn new(args: &MountsArgs) -> Result<Self, CliError> {
        crate::sync::raise_open_files();
        let remote =
            args.rtt.iter().flat_map(|rtt| args.asynchronous.iter().map(|kind| Way::Remote(*rtt, *kind)));
        let ways = args.local.then_some(Way::Local).into_iter().chain(remote);
        // All are made or none is left.
        Ok(Self(ways.map(|way| Mount::new(way, &args.volumes)).collect::<Result<_, _>>()?))
    }

    /// The paths that were named, and these.
    pub fn places(&self, run: &RunArgs) -> Result<Vec<Place>, CliError> {
        let mut places = if run.on.is_empty() { Vec::new() } else { named(run)? };
        for mount in &self.0 {
            places.push(Place::on(&mount.mountpoint, None).map_err(failed)?);
        }
        Ok(places)
    }
}

/// How a volume is mounted.
#[derive(Clone, Copy)]
enum Way {
    Local,
    /// By a server behind a network of this round trip; whether the mount answers before the server.
    Remote(Duration, OnOff),
}

impl Way {
    /// What its directory is called, and so what the report calls it.
    fn name(self) -> String {
        match self {
            Self::Local => "local".into(),
            Self::Remote(rtt, OnOff::On) => format!("rtt-{}us", rtt.as_micros()),
            Self::Remote(rtt, OnOff::Off) => format!("rtt-{}us-async-off", rtt.as_micros()),
        }
    }
}

/// One of them; dropping it ends everything and removes the volume.
struct Mount {
    dir: PathBuf,
    mountpoint: PathBuf,
    server: Option<Child>,
    mounted: bool,
}

impl Mount {
    /// A new volume in `volumes`.
    fn new(way: Way, volumes: &Path) -> Result<Self, CliError> {
        let dir = volumes.join(format!("ferry-bench.{}.{}", std::process::id(), way.name()));
        fs::create_dir(&dir).map_err(CliError::path(&dir, "cannot make a directory for a volume"))?;
        let mountpoint = dir.join(way.name());
        let mut this = Self { dir, mountpoint, server: None, mounted: false };
        let volume = this.dir.join("volume.ferry");
        fs::create_dir(&this.mountpoint).map_err(CliError::path(&this.mountpoint, "cannot make it"))?;
        this.ferry(|command| command.arg("mkfs").arg(&volume))?;
        let (what, option) = match way {
            Way::Local => (volume.into_os_string(), None),
            Way::Remote(rtt, asynchronous) => {
                let server = this.serve(&volume)?;
                let relay =
                    relay(server, rtt / 2).map_err(|e| CliError::Failed(format!("cannot relay: {e}")))?;
                (format!("ferry://{relay}/").into(), (asynchronous == OnOff::Off).then_some("async=off"))
            }
        };
        this.ferry(|command| {
            command.arg("mount").arg(what).arg(&this.mountpoint);
            command.args(option.map(|option| ["-o", option]).into_iter().flatten())
        })?;
        this.mounted = true;
        Ok(this)
    }

    fn serve(&mut self, volume: &Path) -> Result<SocketAddr, CliError> {
        let log = self.dir.join("server.log");
        let stderr = File::create(&log).map_err(CliError::path(&log, "cannot write"))?;
        let mut serve = Command::new("/proc/self/exe");
        serve.arg("serve").arg(volume).args(["--listen", "127.0.0.1:0", "--grace", "0s"]);
        // As a service's journal would have it: without colours and times.
        serve.env("JOURNAL_STREAM", "0:0").env_remove("FERRY_LOG").stdout(Stdio::null()).stderr(stderr);
        // Who interrupts the bench from a terminal must not stop the server under its mount.
        serve.process_group(0);
        let started = serve.spawn().map_err(|e| CliError::Failed(format!("cannot start the server: {e}")))?;
        address_in(&log, self.server.insert(started))
    }

    /// Runs this program with other arguments. A daemon that it leaves behind keeps the file of messages.
    fn ferry(&self, arguments: impl FnOnce(&mut Command) -> &mut Command) -> Result<(), CliError> {
        let messages = self.dir.join("messages");
        let stderr = File::create(&messages).map_err(CliError::path(&messages, "cannot write"))?;
        let mut command = Command::new("/proc/self/exe");
        let status = arguments(&mut command).stdout(Stdio::null()).stderr(stderr).status();
        let failed = |what: &str| CliError::Failed(format!("a mount for the bench: {}", what.trim()));
        match status {
            Ok(status) if status.success() => Ok(()),
            Ok(_) => Err(failed(&fs::read_to_string(&messages).unwrap_or_default())),
            Err(error) => Err(failed(&error.to_string())),
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if self.mounted
            && let Err(error) =
                self.ferry(|command| command.args(["umount", "--force"]).arg(&self.mountpoint))
        {
            eprintln!("ferry: {error}");
        }
        if let Some(mut server) = self.server.take() {
            // Nobody needs what it has.
            let _killed = server.kill();
            let _ended = server.wait();
        }
        // Not through a mount that is still there: the directory is not empty then.
        let _gone = fs::remove_dir(&self.mountpoint);
        for name in ["volume.ferry", "server.log", "messages"] {
            let _gone = fs::remove_file(self.dir.join(name));
        }
        let _gone = fs::remove_dir(&self.dir);
    }
}

/// Where a server listens: it says so in its log.
fn address_in(log: &Path, server: &mut Child) -> Result<SocketAddr, CliError> {
    let deadline = Instant::now() + START_TIME_MAX;
    loop {
        let text = fs::read_to_string(log).map_err(CliError::path(log, "cannot read"))?;
        let address = text.split_once("address=").and_then(|(_, rest)| rest.split_once(' '));
        if let Some(address) = address.and_then(|(address, _)| address.parse().ok()) {
            return Ok(address);
        }
        let ended = server.try_wait().is_ok_and(|status| status.is_some());
        if ended || Instant::now() > deadline {
            return Err(CliError::Failed(format!("the server does not start: {}", text.trim())));
        }
        thread::sleep(LOOK_INTERVAL);
    }
}

/// Carries connections to `server`; each piece arrives `delay` after it was sent. Lives as long as the process.
fn relay(server: SocketAddr, delay: Duration) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    thread::Builder::new().name("relay".into()).spawn(move || {
        for client in listener.incoming().flatten() {
            if let Err(error) = carry(&client, server, delay) {
                tracing::warn!(%error, "no connection through the relay");
            }
        }
    })?;
    Ok(address)
}

fn carry(client: &TcpStream, server: SocketAddr, delay: Duration) -> io::Result<()> {
    let server = TcpStream::connect(server)?;
    for (from, to) in [(client, &server), (&server, client)] {
        let (mut from, mut to) = (from.try_clone()?, to.try_clone()?);
        to.set_nodelay(true)?;
        let (send, receive) = sync_channel(PIECES_MAX);
        thread::Builder::new().spawn(move || take(&mut from, &send, delay))?;
        thread::Builder::new().spawn(move || give(&mut to, &receive))?;
    }
    Ok(())
}

fn take(from: &mut TcpStream, pieces: &SyncSender<(Instant, Vec<u8>)>, delay: Duration) {
    let mut bytes = vec![0; PIECE_MAX];
    while let Ok(n @ 1..) = from.read(&mut bytes) {
        if pieces.send((Instant::now() + delay, bytes[..n].to_vec())).is_err() {
            break;
        }
    }
}

fn give(to: &mut TcpStream, pieces: &Receiver<(Instant, Vec<u8>)>) {
    for (due, bytes) in pieces {
        thread::sleep(due.saturating_duration_since(Instant::now()));
        if to.write_all(&bytes).is_err() {
            break;
        }
    }
    // Whoever hangs up: the other side learns of it.
    let _gone = to.shutdown(Shutdown::Both);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_relay_carries_both_ways_and_takes_its_time() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let server = listener.local_addr().expect("bound");
        let echo = thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("the relay");
            let mut bytes = [0; 4];
            while stream.read_exact(&mut bytes).is_ok() {
                stream.write_all(&bytes).expect("open");
            }
        });
        let address = relay(server, Duration::from_millis(5)).expect("a relay");
        let mut stream = TcpStream::connect(address).expect("the relay");
        for word in [b"ping", b"pong"] {
            let begun = Instant::now();
            stream.write_all(word).expect("open");
            let mut bytes = [0; 4];
            stream.read_exact(&mut bytes).expect("an echo");
            assert_eq!(&bytes, word);
            assert!(begun.elapsed() >= Duration::from_millis(10));
        }
        drop(stream);
        echo.join().expect("it learns that the client has gone");
    }
}
