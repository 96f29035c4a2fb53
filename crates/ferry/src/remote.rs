//! `ferry mount ferry://…`: mounts a server's volume.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ferry_env::Env;
use ferry_fs::{CacheMode, Filesystem};
use ferry_net::{Address, ClientOptions, ClientTls, RemoteFs, TcpConnector};
use serde_json::Value;

use crate::asked::{self, Answers, Asked};
use crate::cli::MountArgs;
use crate::daemon::{self, Service};
use crate::error::CliError;
use crate::mount;
use crate::mounts::Mount;
use crate::options::MountOptions;

/// How long operations wait for an unreachable server, unless `timeout=` says otherwise.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The server's address, if the source is one.
pub fn address(source: &Path) -> Result<Option<Address>, CliError> {
    match source.to_str().filter(|source| Address::is_meant(source)) {
        Some(source) => source
            .parse()
            .map(Some)
            .map_err(|e: ferry_net::NetError| CliError::Usage(e.to_string())),
        None => Ok(None),
    }
}

/// Refuses options that make no sense for a server's volume or are not safe.
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
    let trusts = options.nosuid == Some(false) || options.nodev == Some(false);
    if trusts && !rustix::process::geteuid().is_root() {
        return Err(CliError::Usage(
            "suid and dev are for root: what a server says of its files would give privileges here"
                .into(),
        ));
    }
    if options.strictatime || options.nodiratime {
        return Err(CliError::Usage(
            "strictatime and nodiratime have no effect here: the server keeps access times, as relatime does; noatime works".into(),
        ));
    }
    if options.tls.is_some() || options.insecure {
        return Ok(());
    }
    Err(CliError::Usage(format!(
        "{}: the server must be authenticated: give -o tls=DIR (`ferry cert issue` at the server makes it), or -o insecure if everybody \
         on the way (and every user of this machine, where the server is on it too) may read and change everything",
        address.host
    )))
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
    let env = Env::real();
    if let Some(ending) = tls.as_ref().and_then(|tls| tls.ending(env.clock.wall())) {
        // The user who mounts sees it, and the mount's log records it.
        eprintln!(
            "ferry: warning: this client's certificate {ending}: `ferry cert issue` at the server makes a new one"
        );
        tracing::warn!(
            "this client's certificate {ending}: `ferry cert issue` at the server makes a new one"
        );
    }
    let client = ClientOptions {
        server: address.to_string(),
        path: address.path.clone().into_bytes(),
        name: rustix::system::uname().nodename().to_bytes().to_vec(),
        timeout: options.timeout.unwrap_or(TIMEOUT),
        asynchronous: options.asynchronous,
        noatime: options.noatime,
    };
    let connector = Arc::new(TcpConnector::new(address.clone(), tls));
    let fs = RemoteFs::connect(connector, client, &env).map_err(failed)?;
    let mut fuse = mount::fuse_options(address.to_string(), options, true);
    fuse.read_only |= fs.is_read_only();
    let log = mount::log_path(options)?;
    let asked = Asked::new();
    let answers = answers(&fs);
    let served = daemon::serve(
        fs as Arc<dyn Filesystem>,
        &Service {
            mountpoint,
            options: fuse,
            listed_options: None,
            daemon: args.daemon,
            log: log.as_deref(),
            stop_timeout: args.stop_timeout,
            asked: &asked,
        },
        answers,
    );
    asked.ended(&served);
    served
}

/// The question that asks for what the mount knows without its server.
const FIGURES: &str = "figures";
/// The message that the mount's end is forced.
const ABANDON: &str = "abandon";

fn answers(fs: &Arc<RemoteFs>) -> Answers {
    let fs = Arc::downgrade(fs);
    Box::new(move |question| {
        let fs = fs.upgrade()?;
        match question {
            FIGURES => Some(fs.figures()),
            ABANDON => {
                fs.abandon();
                Some(Value::Null)
            }
            _ => None,
        }
    })
}

/// Tells a mount that is about to end not to wait for its server.
pub fn abandon(mount: &Mount) {
    if mount.is_remote() {
        // A mount that does not get the message ends a little later.
        let _heard = asked::ask(mount, ABANDON);
    }
}

/// What a remote mount knows without its server. `None`: it is no remote mount, or its daemon does
/// not answer.
pub fn figures(mount: &Mount) -> Result<Option<Value>, CliError> {
    if mount.is_remote() { asked::ask(mount, FIGURES) } else { Ok(None) }
}
