//! `ferry serve`: shares a volume with other machines.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;

use ferry_env::Env;
use ferry_fs::{CacheMode, Filesystem, FsOptions, LocalFs, SessionStore};
use ferry_net::{Bound, Export, NetError, Server, ServerOptions, ServerTls};
use ferry_object::OnDisk;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::cache_size::{GivesWay, default_bytes};
use crate::cli::ServeArgs;
use crate::error::CliError;
use crate::location::Location;
use crate::open::{How, Opened, STOPPING, explain, on_disk, open_on_disk_when_free};
use crate::waiting::{PAUSE_MAX, pause};
use crate::{clients, daemon, logging, metrics, served, starter};

#[cfg(test)]
mod tests;

/// Runs the command, until a signal asks for the end.
pub fn run(args: &ServeArgs, log_level: Option<&str>) -> Result<(), CliError> {
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
    let address = bind(address)?;
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
    let (opened, fs) = open(&args.volume, how, options, &on_disk, &env)?;
    let gives_way = GivesWay::start(&fs, LocalFs::set_memory_limit, cache_size, &env);
    let served = serve(&fs, args, address, tls, exports, &env);
    drop(gives_way);
    fs.detach();
    let failed = |e: &dyn std::fmt::Display| CliError::Failed(format!("{}: {e}", args.volume));
    let closed = fs.close().map_err(|e| failed(&e));
    let closed = closed.and(opened.close().map_err(|e| failed(&e)));
    if closed.is_ok() {
        tracing::info!(volume = %args.volume, "closed: everything is durable");
    }
    served.and(closed)
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

fn open(
    volume: &Location,
    how: How,
    options: FsOptions,
    on_disk: &OnDisk,
    env: &Env,
) -> Result<(Opened, Arc<LocalFs>), CliError> {
    let opened =
        open_on_disk_when_free(volume, how, on_disk, env).map_err(|e| explain(volume, &e))?;
    let fs = LocalFs::open(opened.device.clone(), options, env.clone())
        .map_err(|e| CliError::Failed(format!("{volume}: {e}")))?;
    Ok((opened, fs))
}

fn serve(
    fs: &Arc<LocalFs>,
    args: &ServeArgs,
    bound: Bound,
    tls: Option<ServerTls>,
    exports: Vec<Export>,
    env: &Env,
) -> Result<(), CliError> {
    let failed = |e: NetError| CliError::Failed(e.to_string());
    let options = ServerOptions {
        exports,
        session_life: args.session_life,
        grace: args.grace,
        lease_term: ServerOptions::LEASE_TERM,
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
    clients::answer(server.control(), &args.volume, addr)
        .map_err(|e| CliError::Failed(format!("cannot listen to `ferry clients`: {e}")))?;
    served::answer(&args.volume, Arc::downgrade(fs), server.control())
        .map_err(|e| CliError::Failed(format!("cannot listen to control requests: {e}")))?;
    let (counted, control) = (Arc::downgrade(fs), server.control());
    let figures = move || Some(served::stats(&*counted.upgrade()?, &control));
    // Held until the server has ended.
    let _endpoint = scraped.map(|bound| metrics::serve(bound, figures)).transpose()?;
    tracing::info!(volume = %args.volume, address = %addr, tls = !plain, "serving");
    starter::notify_systemd("READY=1");
    signals.forever().next();
    tracing::info!("asked to stop");
    starter::notify_systemd("STOPPING=1");
    server.stop();
    Ok(())
}

/// Takes the address. A server that is ending may still have it.
fn bind(address: SocketAddr) -> Result<Bound, CliError> {
    let clock = Env::real().clock;
    let until = clock.monotonic() + STOPPING;
    loop {
        match Bound::new(address) {
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
