//! Volumes that a bench makes and mounts itself, all on this machine: locally, and from a server
//! behind a network with a delay (`--rtt`).
#![expect(clippy::disallowed_methods, reason = "a network that takes its time is what this is")]

use std::fs::{self, File};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ferry_bench::Target;
use ferry_bench::relay::Relay;

use crate::args::{MountsArgs, OnOff, RunArgs};
use crate::{failed, paths};
use ferry::command::shared::CliError;

/// The longest time that a server may take to start.
const START_TIME_MAX: Duration = Duration::from_secs(30);
/// The interval between two checks of whether it has started.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// The mounts that a bench has made.
pub struct Mounts(Vec<Mount>);

impl Mounts {
    /// Makes new volumes and mounts them as the options say.
    pub fn new(args: &MountsArgs) -> Result<Self, CliError> {
        ferry::command::shared::raise_open_files();
        let remote = args
            .rtt
            .iter()
            .flat_map(|rtt| args.asynchronous.iter().map(|kind| Way::Remote(*rtt, *kind)));
        let ways = args.local.then_some(Way::Local).into_iter().chain(remote);
        // If one fails, none is left.
        Ok(Self(ways.map(|way| Mount::new(way, &args.volumes)).collect::<Result<_, _>>()?))
    }

    /// The given paths, and these mounts.
    pub fn targets(&self, run: &RunArgs) -> Result<Vec<Target>, CliError> {
        let mut targets = paths(run)?;
        for mount in &self.0 {
            targets.push(Target::on(&mount.mountpoint, None).map_err(failed)?);
        }
        Ok(targets)
    }
}

/// How a volume is mounted.
#[derive(Clone, Copy)]
enum Way {
    Local,
    /// From a server behind a network of this round trip; whether the mount acknowledges early.
    Remote(Duration, OnOff),
}

impl Way {
    /// The name of its directory, and so its name in the report.
    fn name(self) -> String {
        match self {
            Self::Local => "local".into(),
            Self::Remote(rtt, OnOff::On) => format!("rtt-{}us", rtt.as_micros()),
            Self::Remote(rtt, OnOff::Off) => format!("rtt-{}us-async-off", rtt.as_micros()),
        }
    }
}

/// One mount; dropping it unmounts, ends the server and removes the volume.
struct Mount {
    dir: PathBuf,
    mountpoint: PathBuf,
    server: Option<Child>,
    mounted: bool,
}

impl Mount {
    /// Makes a new volume in `volumes`, and mounts it.
    fn new(way: Way, volumes: &Path) -> Result<Self, CliError> {
        let dir = volumes.join(format!("ferry-bench.{}.{}", std::process::id(), way.name()));
        fs::create_dir(&dir)
            .map_err(CliError::path(&dir, "cannot make a directory for a volume"))?;
        let mountpoint = dir.join(way.name());
        let mut this = Self { dir, mountpoint, server: None, mounted: false };
        let volume = this.dir.join("volume.ferry");
        fs::create_dir(&this.mountpoint)
            .map_err(CliError::path(&this.mountpoint, "cannot make it"))?;
        this.ferry(|command| command.arg("mkfs").arg(&volume))?;
        let (what, option) = match way {
            Way::Local => (volume.into_os_string(), None),
            Way::Remote(rtt, asynchronous) => {
                let server = this.serve(&volume)?;
                let delayed = ferry_bench::relay::Way { delay: rtt / 2, ..Default::default() };
                let relay =
                    Relay::start(SocketAddr::from(([127, 0, 0, 1], 0)), server, delayed, delayed)
                        .map_err(|e| CliError::Failed(format!("cannot relay: {e}")))?;
                (
                    format!("ferry://{}/", relay.address()).into(),
                    Some(if asynchronous == OnOff::Off {
                        "insecure,async=off"
                    } else {
                        "insecure"
                    }),
                )
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
        let mut serve = Command::new(ferry()?);
        serve.arg("serve").arg(volume).args([
            "--listen",
            "127.0.0.1:0",
            "--insecure",
            "--grace",
            "0s",
        ]);
        // Logs as for a service's journal: without colours and times.
        serve
            .env("JOURNAL_STREAM", "0:0")
            .env_remove("FERRY_LOG")
            .stdout(Stdio::null())
            .stderr(stderr);
        // An interrupt from the terminal must not stop the server under its mount.
        serve.process_group(0);
        let started =
            serve.spawn().map_err(|e| CliError::Failed(format!("cannot start the server: {e}")))?;
        address_in(&log, self.server.insert(started))
    }

    /// Runs `ferry`. A daemon that it leaves behind keeps the file of messages.
    fn ferry(&self, arguments: impl FnOnce(&mut Command) -> &mut Command) -> Result<(), CliError> {
        let messages = self.dir.join("messages");
        let stderr = File::create(&messages).map_err(CliError::path(&messages, "cannot write"))?;
        let mut command = Command::new(ferry()?);
        let status = arguments(&mut command).stdout(Stdio::null()).stderr(stderr).status();
        let failed =
            |what: &str| CliError::Failed(format!("a mount for the bench: {}", what.trim()));
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
            // Its data is not needed.
            let _killed = server.kill();
            let _ended = server.wait();
        }
        // This does not remove a directory that is still a mount point.
        let _removed = fs::remove_dir(&self.mountpoint);
        for name in ["volume.ferry", "server.log", "messages"] {
            let _removed = fs::remove_file(self.dir.join(name));
        }
        let _removed = fs::remove_dir(&self.dir);
    }
}

/// The program `ferry`, in the directory of this one.
fn ferry() -> Result<PathBuf, CliError> {
    let own = std::env::current_exe().map_err(|e| {
        CliError::Failed(format!("cannot tell where ferry-bench itself is, to run ferry: {e}"))
    })?;
    let ferry = own.with_file_name("ferry");
    if ferry.exists() {
        return Ok(ferry);
    }
    Err(CliError::Failed(format!(
        "{}: there is no such program, and mounts need it: `cargo build --release --package ferry` makes it; it belongs beside \
         ferry-bench",
        ferry.display()
    )))
}

/// The address that a server listens at, as its log says.
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
