//! `ferry mount ferry://…`: mounts a server's volume.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ferry_env::Env;
use ferry_fs::{CacheMode, Filesystem};
use ferry_net::{
    Address, Carried, ClientOptions, ClientTls, Noted, Notes, RemoteFs, TcpConnector, ends_soon,
    renewal,
};
use serde_json::Value;

use crate::asked::{self, Answers, Asked};
use crate::cli::MountArgs;
use crate::daemon::{self, Served, Service, Settle};
use crate::error::CliError;
use crate::hold::{self, Held, Holder, Open};
use crate::mounts::{self, Mount};
use crate::options::{MountOptions, async_word};
use crate::socket::object;
use crate::utab;
use crate::waiting::pause;

/// How long operations wait for an unreachable server, unless `timeout=` says otherwise.
const TIMEOUT: Duration = Duration::from_secs(60);
/// How often a mount is asked whether the server has made all.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Refuses options that make no sense for a server's volume or are not safe.
pub fn check(address: &Address, args: &MountArgs, options: &MountOptions) -> Result<(), CliError> {
    if args.create {
        return Err(CliError::Usage("--create: a volume is made where it is served".into()));
    }
    if args.take_over {
        return Err(CliError::Usage("--take-over: the server owns the volume".into()));
    }
    if options.cache == CacheMode::Writeback
        || options.cache_bytes.is_some()
        || options.commit_interval.is_some()
        || options.flush_interval_min.is_some()
        || options.flush.is_some()
        || options.fast_flush.is_some()
    {
        return Err(CliError::Usage(
            "cache=writeback, cache_size, commit_interval, flush, fast_flush and flush_interval_min are the server's business: give them \
             where the volume is mounted or served"
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
        address
    )))
}

/// Connects, mounts and serves until the mount is gone.
pub fn serve(
    address: &Address,
    mountpoint: &Path,
    held: Option<Held>,
    args: &MountArgs,
    options: &MountOptions,
) -> Result<(), CliError> {
    daemon::prepare(args.daemon);
    let failed = |e: ferry_net::NetError| CliError::Failed(e.to_string());
    let tls = options.tls.as_deref().map(ClientTls::load).transpose().map_err(failed)?;
    let env = Env::real();
    let until = tls.as_ref().and_then(ClientTls::until);
    if let Some(ending) = until.and_then(|until| ends_soon(until, env.clock.wall())) {
        // The user who mounts sees it, and the mount's log records it.
        let renewal = renewal(None);
        eprintln!("ferry: warning: this client's certificate {ending}: {renewal}");
        tracing::warn!("this client's certificate {ending}: {renewal}");
    }
    let notes = if Holder::get().is_some() { new_notes() } else { None };
    if let (Some(holder), Some(_)) = (Holder::get(), &notes) {
        holder.keep_far()?;
    }
    let client = ClientOptions {
        server: address.to_string(),
        path: address.path.clone().into_bytes(),
        name: rustix::system::uname().nodename().to_bytes().to_vec(),
        timeout: options.timeout.unwrap_or(TIMEOUT),
        asynchronous: !options.async_off,
        noatime: options.noatime,
        notes: notes.clone(),
    };
    let connector = Arc::new(TcpConnector::new(address.clone(), tls));
    let fs = match &held {
        None => RemoteFs::connect(connector, client, &env),
        Some(Held { open: Open::Carried(bytes, _), .. }) => {
            let carried = Carried::decode(bytes).ok_or_else(hold::other_form)?;
            RemoteFs::go_on(connector, client, &carried, &env)
        }
        Some(Held { open: Open::Known(file), .. }) => {
            let noted = left(file)?;
            let (open, known) = noted.counts();
            tracing::warn!(open, known, "a process was killed: this one goes on with its session");
            RemoteFs::go_on_left(connector, client, noted, &env)
        }
    };
    let fs = fs.map_err(failed)?;
    let mut fuse = options.for_kernel(address.to_string(), true);
    fuse.read_only |= fs.is_read_only();
    let log = options.log_path()?;
    let asked = Asked::new();
    let answers = answers(&fs, until);
    let listed = async_word(fs.is_asynchronous());
    let settled = Arc::downgrade(&fs);
    let settle: Settle = Arc::new(move |leave| {
        let fs = settled.upgrade().ok_or("the mount is ending")?;
        fs.settle().map_err(|error| format!("the server cannot make all durable now: {error}"))?;
        leave()
    });
    let served = daemon::serve(
        Arc::clone(&fs) as Arc<dyn Filesystem>,
        &mut Service {
            before: held.map(|held| held.connection),
            known: notes.as_deref().map(Notes::file).transpose().map_err(no_memory)?,
            settle: Holder::get().map(|_| settle),
            mountpoint,
            options: fuse,
            listed_options: Some(listed),
            daemon: args.daemon,
            log: log.as_deref(),
            stop_timeout: args.stop_timeout,
            asked: &asked,
            metrics: options.metrics.as_ref().map(|address| (address, FIGURES)),
        },
        answers,
    );
    let served = served.and_then(|served| leave(&fs, mountpoint, served));
    asked.ended(&served);
    served
}

/// Where what another process needs outlives this one. `None`: the mount ends with it.
fn new_notes() -> Option<Arc<Notes>> {
    let notes = Notes::new();
    notes
        .inspect_err(|error| tracing::warn!(%error, "the mount ends if its process is killed"))
        .ok()
}

fn no_memory(error: std::io::Error) -> CliError {
    CliError::Failed(format!("the memory that outlives this process: {error}"))
}

/// What a process has left that was killed.
fn left(file: &OwnedFd) -> Result<Noted, CliError> {
    Notes::left(file.try_clone().map_err(no_memory)?).ok_or_else(hold::other_form)
}

/// Leaves the mount to another process, if it is to go on there.
fn leave(fs: &RemoteFs, mountpoint: &Path, served: Served) -> Result<(), CliError> {
    let (Served::HandedOver(connection, program), Some(holder)) = (served, Holder::get()) else {
        return Ok(());
    };
    let carried = fs.carry();
    fs.detach();
    let carried = carried.map_err(|error| {
        CliError::Failed(format!("the session with the server is over: {error}"))
    })?;
    let (open, known) = carried.counts();
    holder.leave(&connection, &carried.encode(), mountpoint, &program)?;
    tracing::info!(program = %program.display(), open, known, "another process goes on");
    Ok(())
}

/// The question that asks for what the mount knows without its server.
const FIGURES: &str = "figures";
/// The questions that switch early acknowledgement, and the one how far that is.
const ASYNC_ON: &str = "async=on";
const ASYNC_OFF: &str = "async=off";
const ASYNC: &str = "async";
/// The message that the mount's end is forced.
const ABANDON: &str = "abandon";

/// `until`: the second of Unix time up to which the client's certificate is good.
fn answers(fs: &Arc<RemoteFs>, until: Option<u64>) -> Answers {
    let fs = Arc::downgrade(fs);
    Arc::new(move |question| {
        let fs = fs.upgrade()?;
        match question {
            FIGURES => {
                let mut figures = fs.figures();
                figures["connection"]["certificate_until_secs"] = until.into();
                Some(figures)
            }
            ASYNC_ON | ASYNC_OFF => {
                let switched = fs.set_asynchronous(question == ASYNC_ON);
                if switched {
                    tracing::info!("{question} from now on");
                }
                Some(how_asynchronous(&fs))
            }
            ASYNC => Some(how_asynchronous(&fs)),
            ABANDON => {
                fs.abandon();
                Some(Value::Null)
            }
            _ => None,
        }
    })
}

fn how_asynchronous(fs: &RemoteFs) -> Value {
    let unanswered = fs.unanswered().map_or(Value::Null, Value::from);
    object([("async", fs.is_asynchronous().into()), ("unanswered", unanswered)])
}

/// Switches early acknowledgement of the mount that `path` is, or is on. Switching it off waits
/// until the server has made all changes that were answered before.
pub fn switch(path: &Path, on: bool) -> Result<(), CliError> {
    let failed = |why: String| CliError::Failed(format!("{}: {why}", path.display()));
    let Some(mount) = mounts::above(path).filter(Mount::is_ferry) else {
        return Err(CliError::NotMounted(path.into()));
    };
    if !mount.is_remote() {
        return Err(failed(
            "--async is for a mount of a server (ferry://): this one has the volume itself".into(),
        ));
    }
    let ask = |question: &str| {
        let answer = asked::ask(&mount, question)?.filter(|answer| answer["async"].is_boolean());
        answer.ok_or_else(|| {
            failed("its daemon tells only root and the user who has mounted it, with the same version of ferry".into())
        })
    };
    let mut now = ask(if on { ASYNC_ON } else { ASYNC_OFF })?;
    while now["async"] == on && !on {
        match now["unanswered"].as_u64() {
            Some(0) => break,
            Some(_) => pause(POLL_INTERVAL),
            None => {
                return Err(failed(
                    "async is off, but the server is away, and has not made all changes that were answered before".into(),
                ));
            }
        }
        now = ask(ASYNC)?;
    }
    match (on, now["async"] == on) {
        (_, true) => {
            utab::change(&mount.target, &[async_word(on)]);
            Ok(())
        }
        (true, false) => Err(failed(
            "the server lets this client answer no change before it is made: its certificate is limited".into(),
        )),
        (false, false) => Err(failed("somebody else has switched async on meanwhile".into())),
    }
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

/// Whether the figures of a remote mount say that its server is away.
pub fn is_away(figures: &Value) -> bool {
    figures["connection"]["connected"] == false
}
