//! `ferry mount ferry://…`: a mount of what a server has.

use std::net::ToSocketAddrs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ferry_device::Env;
use ferry_fs::{CacheMode, Filesystem};
use ferry_net::{Address, ClientOptions, ClientTls, RemoteFs, TcpConnector};
use serde_json::Value;

use crate::cli::MountArgs;
use crate::daemon::{self, Service};
use crate::error::CliError;
use crate::options::MountOptions;
use crate::{mount, socket};

/// Operations wait so long for a server that is gone, unless `timeout=` says otherwise.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The server that is to be mounted, if it is one.
pub fn address(source: &Path) -> Result<Option<Address>, CliError> {
    match source.to_str().filter(|source| Address::is_meant(source)) {
        Some(source) => {
            source.parse().map(Some).map_err(|e: ferry_net::NetError| CliError::Usage(e.to_string()))
        }
        None => Ok(None),
    }
}

/// Refuses what makes no sense for a server's volume, and what would not be safe.
pub fn check(address: &Address, args: &MountArgs, options: &MountOptions) -> Result<(), CliError> {
    if args.create {
        return Err(CliError::Usage("--create: a volume is made where it is served".into()));
    }
    if options.cache == CacheMode::Writeback
        || options.cache_bytes.is_some()
        || options.commit_interval.is_some()
        || options.flush.is_some()
        || options.fast_flush.is_some()
    {
        return Err(CliError::Usage(
            "cache=writeback, cache_size, commit_interval, flush and fast_flush are the server's business: give them where the \
             volume is mounted or served"
                .into(),
        ));
    }
    if options.tls.is_some() || options.insecure || is_loopback(address) {
        return Ok(());
    }
    Err(CliError::Usage(format!(
        "{} is another machine: give -o tls=DIR with what `ferry cert issue` has made there, or -o insecure if everybody on the way \
         may read and change everything",
        address.host
    )))
}

fn is_loopback(address: &Address) -> bool {
    let found = (address.host.as_str(), address.port).to_socket_addrs();
    found.is_ok_and(|mut all| all.all(|addr| addr.ip().is_loopback()))
}

/// Connects, mounts and serves until the mount is gone.
pub fn serve(
    address: &Address,
    mountpoint: &Path,
    args: &MountArgs,
    options: &MountOptions,
) -> Result<(), CliError> {
    daemon::prepare(args.daemon);
    let failed = |e: ferry_net::NetError| CliError::Failed(e.to_string());
    let tls = options.tls.as_deref().map(ClientTls::load).transpose().map_err(failed)?;
    let client = ClientOptions {
        server: address.to_string(),
        path: address.path.clone().into_bytes(),
        name: rustix::system::uname().nodename().to_bytes().to_vec(),
        timeout: options.timeout.unwrap_or(TIMEOUT),
        asynchronous: options.asynchronous,
    };
    let connector = Arc::new(TcpConnector::new(address.clone(), tls));
    let fs = RemoteFs::connect(connector, client, &Env::real()).map_err(failed)?;
    if let Err(error) = answer(&fs, mountpoint) {
        tracing::warn!(%error, "`ferry stats` and `ferry umount --force` cannot ask this mount while its server is away");
    }
    let mut fuse = mount::fuse_options(address.to_string(), options);
    fuse.read_only |= fs.is_read_only();
    let log = mount::log_path(options)?;
    daemon::serve(
        fs as Arc<dyn Filesystem>,
        &Service {
            mountpoint,
            options: fuse,
            shown: None,
            daemon: args.daemon,
            log: log.as_deref(),
            stop_timeout: args.stop_timeout,
        },
    )
}

/// Names of the sockets of remote mounts, before the process number.
const PREFIX: &str = "ferry-mount-";

/// What the mount knows without its server, for who asks while that is away.
fn answer(fs: &Arc<RemoteFs>, mountpoint: &Path) -> std::io::Result<()> {
    let (fs, place) = (Arc::downgrade(fs), mountpoint.display().to_string());
    socket::answer(&format!("{PREFIX}{}", std::process::id()), move |question| {
        let fs = fs.upgrade().filter(|_| question == "figures")?;
        Some(socket::object([("mountpoint", place.clone().into()), ("figures", fs.figures())]))
    })
}

/// What the remote mount at `target` knows without its server. `None`: there is none that answers.
pub fn figures(target: &Path) -> Option<Value> {
    let place = target.display().to_string();
    let mut answers =
        socket::names(PREFIX).ok()?.into_iter().filter_map(|name| socket::ask(&name, "figures").ok());
    answers.find(|answer| answer["mountpoint"] == place).map(|mut answer| answer["figures"].take())
}
