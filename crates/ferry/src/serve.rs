//! `ferry serve`: shares a volume with other machines.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use ferry_env::Env;
use ferry_fs::{CacheMode, Filesystem, FsOptions, LocalFs, SessionStore};
use ferry_net::{Bound, Export, NetError, Server, ServerOptions, ServerTls};
use ferry_object::ObjectError;
use parking_lot::Mutex;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::cache_size::{GivesWay, default_bytes};
use crate::cli::ServeArgs;
use crate::clients::Role;
use crate::error::CliError;
use crate::open::{How, OpenError, Opened, STOPPING, explain, on_disk, open_on_disk_when_free};
use crate::waiting::{PAUSE_MAX, pause};
use crate::{clients, daemon, logging, metrics, served, starter};

mod release;
mod standby;
#[cfg(test)]
mod tests;

/// Memory for contents that nobody asks for.
const READ_BEFORE_CACHE: usize = 16 << 20;

/// Runs the command, until a signal asks for the end.
pub fn run(args: &ServeArgs, log_level: Option<&str>) -> Result<(), CliError> {
    if args.release {
        return release::run(&args.volume);
    }
    let stamped = std::env::var_os("JOURNAL_STREAM").is_none();
    logging::start(log_level, "info", stamped).map_err(CliError::Usage)?;
    logging::log_panics();
    let address = parse(&args.listen)?;
    let tls = match &args.tls {
        Some(dir) => Some(ServerTls::load(dir).map_err(|e| CliError::Failed(e.to_string()))?),
        None => {
            allowed_plain(address.ip(), args.insecure)?;
            None
        }
    };
    daemon::prepare(false);
    // Before the volume is opened, and perhaps taken from its owner.
    let address = bind(address, if args.standby { Bound::reserve } else { Bound::new })?;
    let env = Env::real();
    let exports = if args.export.is_empty() {
        vec![Export { path: b"/".to_vec(), read_only: false }]
    } else {
        args.export.clone()
    };
    let read_only = exports.iter().all(|e| e.read_only);
    let cache_size = default_bytes();
    let how = How::new(&args.volume, read_only, args.take_over, args.force)?;
    let local = args.local_log.as_ref().map(|_| true);
    let cache = (args.cache.as_deref(), args.cache_disk);
    let on_disk = on_disk(&args.volume, cache, local, args.local_log.as_deref())?;
    let options = FsOptions {
        flush_interval_min: args.flush_interval_min.unwrap_or_default(),
        ..fs_options(how, cache_size)
    };
    let (sender, events) = mpsc::channel();
    let role = Arc::new(Mutex::new(Role::StandsBy(None)));
    let opened = if args.standby {
        standby::open(&args.volume, how, &on_disk, (&role, address.addr()), &env)?
    } else {
        let opened = open_on_disk_when_free(&args.volume, how, &on_disk, &env);
        opened.map_err(|error| match (&error, explain(&args.volume, &error)) {
            (OpenError::Store(ObjectError::InUse { .. }), CliError::Failed(why)) => {
                CliError::Failed(format!("{why}. With --standby this server waits for its turn"))
            }
            (_, explained) => explained,
        })?
    };
    let failed = |e: &dyn std::fmt::Display| CliError::Failed(format!("{}: {e}", args.volume));
    if opened.store().is_some_and(|store| !store.serves_in().is_zero()) {
        read_before(&opened, &env);
    }
    let fs = match LocalFs::open(opened.device.clone(), options, env.clone()) {
        Ok(fs) => fs,
        Err(_) if args.standby && opened.has_failed() => return Err(standby::again(false)),
        Err(error) => return Err(failed(&error)),
    };
    // It was recovered meanwhile.
    if opened.store().is_some_and(|store| store.await_alone().is_err()) {
        return Err(standby::again(false));
    }
    let gives_way = GivesWay::start(&fs, LocalFs::set_memory_limit, cache_size, &env);
    let shared = Shared { fs: &fs, opened: &opened, role: &role, events: (sender, events) };
    let served = serve(shared, args, address, tls, exports, &env);
    drop(gives_way);
    // Who has asked for the end of this process does not want it to have the volume later.
    let stands_by = args.standby && !matches!(served, Ok(Ended::Stopped));
    if matches!(served, Ok(Ended::TakenOver)) {
        // Nothing can be closed here: the volume is another server's.
        return match stands_by {
            true => Err(standby::again(false)),
            false => Err(failed(
                &"the volume has failed, or another machine has taken it over: the log says which",
            )),
        };
    }
    fs.detach();
    let closed = fs.close().map_err(|e| failed(&e));
    if stands_by && closed.is_err() && opened.has_failed() {
        return Err(standby::again(false));
    }
    let closed = closed.and(opened.close().map_err(|e| failed(&e)));
    if closed.is_ok() {
        tracing::info!(volume = %args.volume, "closed: everything is durable");
    }
    match (served, closed) {
        (Ok(Ended::Released), Ok(())) => Err(standby::again(true)),
        (served, closed) => served.map(drop).and(closed),
    }
}

/// Why a server ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    /// A signal has asked for it.
    Stopped,
    /// Another server is to have the volume.
    Released,
    /// Another process has taken the volume, or it has failed: nothing more can be said of it.
    TakenOver,
}

/// Reads what recovery will read, while nothing can become durable yet: the device remembers it.
fn read_before(opened: &Opened, env: &Env) {
    let options = FsOptions { background: false, ..fs_options(How::Read, READ_BEFORE_CACHE) };
    let read = LocalFs::open(opened.device.clone(), options, env.clone());
    if let Err(error) = read.map_err(|error| error.to_string()).and_then(|fs| {
        fs.detach();
        fs.close().map_err(|error| error.to_string())
    }) {
        tracing::debug!(%error, "recovery will read the volume by itself");
    }
}

fn fs_options(how: How, cache_bytes: usize) -> FsOptions {
    FsOptions {
        read_only: how == How::Read,
        // No kernel of this machine caches contents between the clients and this file system.
        cache: CacheMode::Strict,
        cache_bytes,
        owner: rustix::process::geteuid().as_raw(),
        keeps_removed: true,
        ..FsOptions::default()
    }
}

/// What a server has.
struct Shared<'a> {
    fs: &'a Arc<LocalFs>,
    opened: &'a Opened,
    role: &'a Arc<Mutex<Role>>,
    events: (mpsc::Sender<Ended>, mpsc::Receiver<Ended>),
}

fn serve(
    shared: Shared<'_>,
    args: &ServeArgs,
    bound: Bound,
    tls: Option<ServerTls>,
    exports: Vec<Export>,
    env: &Env,
) -> Result<Ended, CliError> {
    let Shared { fs, opened, role, events: (sender, events) } = shared;
    let failed = |e: NetError| CliError::Failed(e.to_string());
    let lease_term = if args.standby { standby::LEASE_TERM } else { ServerOptions::LEASE_TERM };
    let options = ServerOptions {
        exports,
        session_life: args.session_life,
        grace: args.grace,
        returns: if args.standby { standby::RETURNS } else { Duration::ZERO },
        silent: opened.store().map_or(Duration::ZERO, |store| store.alone_for()),
        lease_term,
        key: fs.superblock().capability_key(),
    };
    // Before the first client is served: an early signal must not kill the process.
    let mut signals = Signals::new([SIGTERM, SIGINT])
        .map_err(|e| CliError::Failed(format!("cannot handle signals: {e}")))?;
    let scraped = args.metrics.as_ref().map(|address| address.bind("metrics=")).transpose()?;
    let server = Server::start(Arc::clone(fs) as Arc<dyn SessionStore>, options, env.clone())
        .map_err(failed)?;
    // The panic hook has logged why.
    server.on_panic(|| std::process::abort());
    let plain = tls.is_none();
    let addr = bound.addr();
    server.listen(bound, tls).map_err(failed)?;
    let (released, can_release) = (sender.clone(), args.standby);
    let release = move || can_release && released.send(Ended::Released).is_ok();
    *role.lock() = Role::Serves(server.control(), Box::new(release));
    if !args.standby {
        clients::answer(Arc::clone(role), &args.volume, addr)
            .map_err(|e| CliError::Failed(format!("cannot listen to `ferry clients`: {e}")))?;
    }
    served::answer(&args.volume, Arc::downgrade(fs), server.control())
        .map_err(|e| CliError::Failed(format!("cannot listen to control requests: {e}")))?;
    let (counted, control) = (Arc::downgrade(fs), server.control());
    let figures = move || Some(served::stats(&*counted.upgrade()?, &control));
    // Held until the server has ended.
    let _endpoint = scraped.map(|bound| metrics::serve(bound, figures)).transpose()?;
    tracing::info!(volume = %args.volume, address = %addr, tls = !plain, "serving");
    starter::notify_systemd("READY=1");
    let watching = move || {
        // The receiver is gone only if the process ends anyway.
        if signals.forever().next().is_some() {
            sender.send(Ended::Stopped).unwrap_or_default();
        }
    };
    std::thread::Builder::new()
        .name("ferry-signals".into())
        .spawn(watching)
        .map_err(|e| CliError::Failed(format!("cannot start a thread: {e}")))?;
    let ended = await_end(opened, &events);
    if ended == Ended::TakenOver {
        // Its clients hear nothing more from this server, and look for the other one.
        drop(server);
        return Ok(if is_asked_to_stop(&events) { Ended::Stopped } else { ended });
    }
    tracing::info!(?ended, "asked to stop");
    if ended == Ended::Stopped {
        starter::notify_systemd("STOPPING=1");
    }
    server.stop();
    Ok(if is_asked_to_stop(&events) { Ended::Stopped } else { ended })
}

/// Whether a signal has come since.
fn is_asked_to_stop(events: &mpsc::Receiver<Ended>) -> bool {
    events.try_iter().any(|event| event == Ended::Stopped)
}

/// Waits until somebody asks for the end, or the volume is another server's.
fn await_end(opened: &Opened, events: &mpsc::Receiver<Ended>) -> Ended {
    loop {
        match events.recv_timeout(PAUSE_MAX) {
            Ok(ended) => return ended,
            Err(_) if opened.has_failed() => return Ended::TakenOver,
            Err(_) => {}
        }
    }
}

/// Takes the address. A server that is ending may still have it.
fn bind(
    address: SocketAddr,
    take: fn(SocketAddr) -> Result<Bound, NetError>,
) -> Result<Bound, CliError> {
    let clock = Env::real().clock;
    let until = clock.monotonic() + STOPPING;
    loop {
        match take(address) {
            Err(NetError::Listen { error, .. })
                if error.kind() == ErrorKind::AddrInUse && clock.monotonic() < until =>
            {
                pause(PAUSE_MAX);
            }
            other => return other.map_err(|error| CliError::Failed(error.to_string())),
        }
    }
}

fn parse(text: &str) -> Result<SocketAddr, CliError> {
    let wrong = |e: std::io::Error| {
        CliError::Usage(format!("--listen {text}: {e}; ADDRESS:PORT is wanted"))
    };
    let mut found = text.to_socket_addrs().map_err(wrong)?;
    found.next().ok_or_else(|| CliError::Usage(format!("--listen {text}: no such address")))
}

/// Without TLS everyone who reaches the port is root on the volume; on loopback that is
/// every user of this machine.
fn allowed_plain(ip: IpAddr, insecure: bool) -> Result<(), CliError> {
    if insecure {
        return Ok(());
    }
    let exposed_to =
        if ip.is_loopback() { "every user of this machine" } else { "everybody on the network" };
    Err(CliError::Usage(format!(
        "{ip} can be reached by {exposed_to}, and would serve them as root: give --tls DIR (`ferry cert init DIR` makes one), or --insecure if \
         they may read and change everything"
    )))
}
