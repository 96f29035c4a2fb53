//! A mount's life: started in the foreground or behind the caller's back, served until it is unmounted or told to stop.

use std::io::{BufRead, BufReader, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use ferry_fs::Filesystem;
use ferry_fuse::{Handle, Session, Unmount};
use rustix::process::{Resource, Rlimit};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::error::CliError;
use crate::logging;
use crate::mounts::{self, Mount};
use crate::{bdi, shown, uring};

/// What a daemon says on its standard output when the mount can be used.
const READY: &str = "ready";
/// A mount that was ended by force is waited for so long.
const FORCED: Duration = Duration::from_secs(5);
/// Raised to this, so that a volume with many open files does not run out of descriptors for its own needs.
const OPEN_FILES: u64 = 1 << 16;
/// The kernel should end almost anything before the process that holds unwritten data; but the machine matters more.
const OOM_SCORE_ADJ: &str = "-250";

/// What every kind of mount needs.
pub struct Service<'a> {
    /// Where.
    pub mountpoint: &'a Path,
    /// How it is mounted.
    pub options: ferry_fuse::MountOptions,
    /// Words that `mount` shows beside the kernel's own.
    pub shown: Option<String>,
    /// This process was started by [`spawn`].
    pub daemon: bool,
    /// Messages of a daemon go here instead of the system log.
    pub log: Option<&'a Path>,
    /// How long a busy mount is served on after the first signal.
    pub stop_timeout: Duration,
}

/// Starts this program again with `args` as a daemon, and returns when its mount can be used.
pub fn spawn(args: &[std::ffi::OsString], log: Option<&Path>) -> Result<(), CliError> {
    let start = |e| CliError::Failed(format!("cannot start the daemon: {e}"));
    let mut daemon = Command::new("/proc/self/exe")
        .arg0("ferry")
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(start)?;
    let mut line = String::new();
    if let Some(stdout) = daemon.stdout.take() {
        BufReader::new(stdout).read_line(&mut line).map_err(start)?;
    }
    if line.trim_end() == READY {
        if log.is_none() && !logging::has_syslog() {
            eprintln!(
                "ferry: mounted; there is no system log here (/dev/log), -o log=FILE would keep the daemon's messages"
            );
        }
        return Ok(());
    }
    // It has said why on the stderr that it shares with us.
    let status = daemon.wait().map_err(start)?;
    match status.code() {
        Some(_) => Err(CliError::Daemon),
        None => Err(CliError::Failed(format!("the daemon was killed while it started ({status})"))),
    }
}

/// What the process asks of the kernel before it serves. None of it is worth failing for.
pub fn prepare(daemon: bool) {
    if daemon && let Err(error) = rustix::process::setsid() {
        tracing::debug!(%error, "no session of its own");
    }
    // Memory that the daemon needs to write back dirty data must not wait for that very data.
    if let Err(error) = rustix::process::configure_io_flusher_behavior(true) {
        tracing::debug!(%error, "PR_SET_IO_FLUSHER");
    }
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let most = limit.maximum.unwrap_or(u64::MAX);
    let wanted = Rlimit { current: Some(most.min(OPEN_FILES)), maximum: limit.maximum };
    if limit.current.is_some_and(|now| now < most.min(OPEN_FILES))
        && let Err(error) = rustix::process::setrlimit(Resource::Nofile, wanted)
    {
        tracing::debug!(%error, "RLIMIT_NOFILE");
    }
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE_ADJ) {
        tracing::debug!(%error, "oom_score_adj");
    }
}

/// Mounts `fs` and serves it until the mount is gone.
pub fn serve(fs: Arc<dyn Filesystem>, service: &Service<'_>) -> Result<(), CliError> {
    let (events, received) = mpsc::channel();
    watch_signals(events.clone())?;
    uring::offer();
    let writeback = fs.writeback_cache();
    let session = Session::mount(fs, service.mountpoint, &service.options)
        .map_err(|e| CliError::Failed(e.to_string()))?;
    bdi::raise(service.mountpoint, writeback);
    let handle = session.handle();
    let serving = thread::Builder::new().name("session".into()).spawn(move || {
        session.wait();
        // The receiver is gone only if the process ends anyway.
        let _ = events.send(Event::Ended);
    });
    serving.map_err(|e| CliError::Failed(format!("cannot start a thread: {e}")))?;
    if let Some(words) = &service.shown {
        shown::show(Path::new(&service.options.fsname), service.mountpoint, words);
    }
    announce(service)?;
    tracing::info!(volume = service.options.fsname, mountpoint = %service.mountpoint.display(), "mounted");

    await_end(&handle, &received, service.stop_timeout);
    // The next mount may be at this place already.
    if service.shown.is_some()
        && matches!(mounts::at(service.mountpoint), Ok(mount) if !mount.as_ref().is_some_and(Mount::is_ferry))
    {
        shown::forget(service.mountpoint);
    }
    notify_systemd("STOPPING=1");
    Ok(())
}

/// Returns when the mount has ended, or must: a first signal asks for it, a second one or the timeout forces it.
fn await_end(handle: &Handle, received: &Receiver<Event>, stop_timeout: Duration) {
    let mut stage = Stage::Serving;
    loop {
        let event = match stage {
            Stage::Serving => received.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Stage::Stopping => received.recv_timeout(stop_timeout),
            Stage::Forced => received.recv_timeout(FORCED),
        };
        stage = match (event, stage) {
            (Ok(Event::Ended) | Err(RecvTimeoutError::Disconnected), _) => return,
            (Ok(Event::Signal), Stage::Serving) => {
                stop(handle, stop_timeout);
                Stage::Stopping
            }
            (_, Stage::Serving | Stage::Stopping) => {
                tracing::warn!("still in use: ended now; requests under way fail");
                end(handle, Unmount::Force);
                Stage::Forced
            }
            (_, Stage::Forced) => {
                // The kernel ends the connection when this process does, which is when the volume is closed.
                tracing::warn!("still in use: closing the volume under it");
                return;
            }
        };
    }
}

/// How far the end of a mount has come.
#[derive(Clone, Copy)]
enum Stage {
    Serving,
    Stopping,
    Forced,
}

enum Event {
    Signal,
    Ended,
}

/// SIGTERM and SIGINT become events; SIGHUP (the terminal has gone) is no reason to end.
fn watch_signals(events: Sender<Event>) -> Result<(), CliError> {
    let failed = |e| CliError::Failed(format!("cannot handle signals: {e}"));
    signal_hook::flag::register(SIGHUP, Arc::new(AtomicBool::new(false))).map_err(failed)?;
    let mut signals = Signals::new([SIGTERM, SIGINT]).map_err(failed)?;
    let watching = thread::Builder::new().name("signals".into()).spawn(move || {
        for _ in signals.forever() {
            if events.send(Event::Signal).is_err() {
                return;
            }
        }
    });
    watching.map(drop).map_err(failed)
}

/// Unmounts if nobody uses it; otherwise takes it out of sight, and the kernel ends it with its last user.
fn stop(handle: &Handle, timeout: Duration) {
    tracing::info!("asked to stop");
    if let Err(error) = handle.unmount(Unmount::Normal) {
        tracing::warn!(%error, "in use: detached, and served until its last user is gone or {} s have passed", timeout.as_secs());
        end(handle, Unmount::Lazy);
    }
}

fn end(handle: &Handle, how: Unmount) {
    if let Err(error) = handle.unmount(how) {
        tracing::error!(%error, ?how, "cannot unmount");
    }
}

/// Tells whoever started us that the mount can be used.
fn announce(service: &Service<'_>) -> Result<(), CliError> {
    notify_systemd("READY=1");
    if !service.daemon {
        return Ok(());
    }
    let failed = |e| CliError::Failed(format!("cannot become a daemon: {e}"));
    logging::detach(service.log).map_err(failed)?;
    // Nothing below keeps the caller's directory or terminal busy.
    rustix::process::chdir("/").map_err(|e| failed(e.into()))?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{READY}").and_then(|()| out.flush()).map_err(failed)?;
    let null = std::fs::OpenOptions::new().write(true).open("/dev/null").map_err(failed)?;
    rustix::stdio::dup2_stdout(&null).map_err(|e| failed(e.into()))
}

/// sd_notify(3): one datagram to the socket that systemd names. Without systemd nothing happens.
pub fn notify_systemd(state: &str) {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let address = match name.as_encoded_bytes() {
        [b'@', rest @ ..] => SocketAddr::from_abstract_name(rest),
        _ => SocketAddr::from_pathname(&name),
    };
    let sent = address.and_then(|to| UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &to));
    if let Err(error) = sent {
        tracing::warn!(%error, "cannot notify systemd");
    }
}
