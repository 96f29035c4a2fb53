//! `ferry serve`: shares a volume with other machines.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::sync::Arc;

use ferry_device::OpenMode;
use ferry_env::Env;
use ferry_fs::{CacheMode, Filesystem, FsOptions, LocalFs, SessionStore};
use ferry_net::{Export, Server, ServerOptions, ServerTls};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::cli::ServeArgs;
use crate::error::CliError;
use crate::holder::open_when_free;
use crate::{clients, daemon, logging, served};

#[cfg(test)]
mod panics;

/// Runs the command, until a signal asks for the end.
pub fn run(args: &ServeArgs, log_level: Option<&str>) -> Result<(), CliError> {
    let stamped = std::env::var_os("JOURNAL_STREAM").is_none();
    logging::start(log_level, "info", stamped).map_err(CliError::Usage)?;
    logging::log_panics();
    let addr = address(&args.listen)?;
    let tls = match &args.tls {
        Some(dir) => Some(ServerTls::load(dir).map_err(|e| CliError::Failed(e.to_string()))?),
        None => {
            allowed_plain(addr.ip(), args.insecure)?;
            None
        }
    };
    daemon::prepare(false);
    let env = Env::real();
    let exports = if args.export.is_empty() {
        vec![Export { path: b"/".to_vec(), read_only: false }]
    } else {
        args.export.clone()
    };
    let read_only = exports.iter().all(|e| e.read_only);
    let fs = open(&args.volume, read_only, &env)?;
    let served = serve(&fs, args, addr, tls, exports, &env);
    fs.detach();
    let closed =
        fs.close().map_err(|e| CliError::Failed(format!("{}: {e}", args.volume.display())));
    if closed.is_ok() {
        tracing::info!(volume = %args.volume.display(), "closed: everything is on disk");
    }
    served.and(closed)
}

fn open(volume: &Path, read_only: bool, env: &Env) -> Result<Arc<LocalFs>, CliError> {
    let mode = if read_only { OpenMode::ReadOnly } else { OpenMode::ReadWrite };
    let device = open_when_free(volume, mode, env).map_err(|e| CliError::Failed(e.to_string()))?;
    // No kernel of this machine caches contents between the clients and this file system.
    let options = FsOptions {
        read_only,
        cache: CacheMode::Strict,
        owner: rustix::process::geteuid().as_raw(),
        keeps_removed: true,
        ..FsOptions::default()
    };
    LocalFs::open(device, options, env.clone())
        .map_err(|e| CliError::Failed(format!("{}: {e}", volume.display())))
}

fn serve(
    fs: &Arc<LocalFs>,
    args: &ServeArgs,
    addr: SocketAddr,
    tls: Option<ServerTls>,
    exports: Vec<Export>,
    env: &Env,
) -> Result<(), CliError> {
    let failed = |e: ferry_net::NetError| CliError::Failed(e.to_string());
    let options = ServerOptions {
        exports,
        session_life: args.session_life,
        grace: args.grace,
        lease_term: ServerOptions::LEASE_TERM,
        key: fs.superblock().hash_key,
    };
    // Before the first client is served: an early signal must not kill the process.
    let mut signals = Signals::new([SIGTERM, SIGINT])
        .map_err(|e| CliError::Failed(format!("cannot handle signals: {e}")))?;
    let server = Server::start(Arc::clone(fs) as Arc<dyn SessionStore>, options, env.clone())
        .map_err(failed)?;
    // The panic hook has logged why.
    server.on_panic(|| std::process::abort());
    let plain = tls.is_none();
    let bound = server.listen(addr, tls).map_err(failed)?;
    clients::answer(server.control(), &args.volume, bound)
        .map_err(|e| CliError::Failed(format!("cannot listen to `ferry clients`: {e}")))?;
    served::answer(&args.volume, Arc::downgrade(fs), server.control())
        .map_err(|e| CliError::Failed(format!("cannot listen to control requests: {e}")))?;
    tracing::info!(volume = %args.volume.display(), address = %bound, tls = !plain, "serving");
    daemon::notify_systemd("READY=1");
    signals.forever().next();
    tracing::info!("asked to stop");
    daemon::notify_systemd("STOPPING=1");
    server.stop();
    Ok(())
}

fn address(text: &str) -> Result<SocketAddr, CliError> {
    let wrong = |e: std::io::Error| {
        CliError::Usage(format!("--listen {text}: {e}; ADDRESS:PORT is wanted"))
    };
    let mut found = text.to_socket_addrs().map_err(wrong)?;
    found.next().ok_or_else(|| CliError::Usage(format!("--listen {text}: no such address")))
}

/// Without TLS everyone exposed_to reaches the port is root on the volume; on loopback that is every user
/// of this machine.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_tls_an_address_is_served_only_if_that_was_asked_for() {
        for (address, exposed_to) in [
            ("127.0.0.1:0", "every user of this machine"),
            ("[::1]:0", "every user of this machine"),
            ("0.0.0.0:0", "everybody on the network"),
        ] {
            let ip = self::address(address).expect("an address").ip();
            let said = allowed_plain(ip, false).expect_err(address).to_string();
            assert!(
                said.contains(exposed_to) && said.contains("--tls") && said.contains("--insecure"),
                "{said}"
            );
            assert!(allowed_plain(ip, true).is_ok());
        }
    }
}
