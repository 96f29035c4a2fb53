//! The life of a mount: started in the foreground or as a daemon, served until it is unmounted or
//! told to stop.

use std::io::{BufRead, BufReader, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use ferry_fs::Filesystem;
use ferry_fuse::{MountHandle, Session, Unmount};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Resource, Rlimit, Signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::asked::{Answers, Asked};
use crate::error::CliError;
use crate::listen::Address;
use crate::logging;
use crate::mounts::{self, Mount};
use crate::profiled::Profiles;
use crate::{bdi, metrics, traced, uring, utab};

/// What a daemon prints when the mount can be used.
const READY: &str = "ready";
/// How long to wait for a mount that was ended by force.
const FORCED: Duration = Duration::from_secs(5);
/// The limit of open files is raised to this, so that a volume with many open files does not run
/// out of descriptors.
pub const OPEN_FILES: u64 = 1 << 16;
/// When memory runs out, the kernel should kill almost any process before one that holds unwritten
/// data; but the machine matters more.
const OOM_SCORE_ADJ: &str = "-250";

/// The facts that a mount of any kind needs to be served.
pub struct Service<'a> {
    /// The mount point.
    pub mountpoint: &'a Path,
    /// The options of the mount.
    pub options: ferry_fuse::MountOptions,
    /// Options that `mount` shows beside the kernel's own.
    pub listed_options: Option<String>,
    /// [`spawn`] has started this process.
    pub daemon: bool,
    /// The file for a daemon's messages, instead of the system log.
    pub log: Option<&'a Path>,
    /// How long a busy mount is still served after the first signal.
    pub stop_timeout: Duration,
    /// Answers questions over a socket.
    pub asked: &'a Asked,
    /// Where the figures are served to Prometheus, and the question that asks for them.
    pub metrics: Option<(&'a Address, &'static str)>,
}

/// Starts this program again with `args`, as a daemon; returns when its mount can be used.
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
    // It has printed the reason on the stderr that it shares with this process.
    let status = daemon.wait().map_err(start)?;
    match status.code() {
        Some(_) => Err(CliError::Daemon),
        None => Err(CliError::Failed(format!("the daemon was killed while it started ({status})"))),
    }
}

/// If the process that started this daemon gives up waiting for the mount (Ctrl-C), the daemon
/// ends, too. The daemon is in another session, and gets no signal of that terminal.
fn end_with_starter() {
    if let Err(error) = rustix::process::set_parent_process_death_signal(Some(Signal::TERM)) {
        tracing::debug!(%error, "PR_SET_PDEATHSIG");
    }
    // That process may have ended before: then nothing reads this daemon's output.
    let stdout = rustix::stdio::stdout();
    let mut reader = [PollFd::new(&stdout, PollFlags::empty())];
    let looked = poll(&mut reader, Some(&Timespec::default()));
    if looked.is_ok() && reader[0].revents().contains(PollFlags::ERR) {
        std::process::exit(1);
    }
}

/// Prepares the process before it serves a mount. A failure of any step is no reason to fail.
pub fn prepare(daemon: bool) {
    if daemon && let Err(error) = rustix::process::setsid() {
        tracing::debug!(%error, "no session of its own");
    }
    if daemon {
        end_with_starter();
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

/// Mounts `fs` and serves it until the mount is gone. `answers` answers questions over a socket.
pub fn serve(
    fs: Arc<dyn Filesystem>,
    service: &Service<'_>,
    answers: Answers,
) -> Result<(), CliError> {
    let (events, received) = mpsc::channel();
    watch_signals(events.clone())?;
    uring::offer();
    let writeback = fs.writeback_cache();
    // Before the mount: if the address is in use, nothing is mounted.
    let bound =
        service.metrics.map(|(address, question)| Ok((address.bind("metrics=")?, question)));
    let bound = bound.transpose()?;
    let traced_fs = Arc::downgrade(&fs);
    let session = Session::mount(fs, service.mountpoint, &service.options)
        .map_err(|e| CliError::Failed(e.to_string()))?;
    bdi::raise(service.mountpoint, writeback);
    let handle = session.handle();
    let answered = with_trace(session.handle(), traced_fs, Arc::clone(&answers));
    let counted = session.handle();
    let profiles = Profiles::new(move || counted.stats());
    service.asked.listen(service.mountpoint, answered, profiles);
    // Held until the mount has ended.
    let _endpoint = bound
        .map(|(bound, question)| metrics::serve(bound, move || answers(question)))
        .transpose()?;
    let serving = thread::Builder::new().name("session".into()).spawn(move || {
        session.wait();
        // The receiver is gone only if the process ends anyway.
        let _ = events.send(Event::Ended);
    });
    serving.map_err(|e| CliError::Failed(format!("cannot start a thread: {e}")))?;
    if let Some(words) = &service.listed_options {
        utab::show(Path::new(&service.options.fsname), service.mountpoint, words);
    }
    announce(service).inspect_err(|_| stop(&handle, FORCED))?;
    tracing::info!(volume = service.options.fsname, mountpoint = %service.mountpoint.display(), "mounted");

    await_end(&handle, &received, service.stop_timeout);
    // The next mount may use this mount point already.
    if service.listed_options.is_some()
        && matches!(mounts::at(service.mountpoint), Ok(mount) if !mount.as_ref().is_some_and(Mount::is_ferry))
    {
        utab::forget(service.mountpoint);
    }
    notify_systemd("STOPPING=1");
    Ok(())
}

/// Answers the questions of `ferry trace`, too.
fn with_trace(handle: MountHandle, fs: Weak<dyn Filesystem>, answers: Answers) -> Answers {
    Arc::new(move |question| traced::answer(&handle, &fs, question).or_else(|| answers(question)))
}

/// Returns when the mount has ended or must end: a first signal asks for it, a second one or the
/// timeout forces it.
fn await_end(handle: &MountHandle, received: &Receiver<Event>, stop_timeout: Duration) {
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
                // The kernel ends the connection when this process ends, after it has closed the
                // volume.
                tracing::warn!("still in use: closing the volume under it");
                return;
            }
        };
    }
}

/// The stages of ending a mount.
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

/// Turns SIGTERM and SIGINT into events. SIGHUP (the terminal is gone) is no reason to end.
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

/// Unmounts if the mount is not in use; otherwise detaches it, and the kernel ends it with its last
/// user.
fn stop(handle: &MountHandle, timeout: Duration) {
    tracing::info!("asked to stop");
    if let Err(error) = handle.unmount(Unmount::Normal) {
        tracing::warn!(%error, "in use: detached, and served until its last user is gone or {} s have passed", timeout.as_secs());
        end(handle, Unmount::Lazy);
    }
}

fn end(handle: &MountHandle, how: Unmount) {
    if let Err(error) = handle.unmount(how) {
        tracing::error!(%error, ?how, "cannot unmount");
    }
}

/// Tells the process that started this daemon that the mount can be used.
fn announce(service: &Service<'_>) -> Result<(), CliError> {
    notify_systemd("READY=1");
    if !service.daemon {
        return Ok(());
    }
    let failed = |e| CliError::Failed(format!("cannot become a daemon: {e}"));
    logging::detach(service.log).map_err(failed)?;
    if let Err(error) = rustix::process::set_parent_process_death_signal(None) {
        tracing::debug!(%error, "PR_SET_PDEATHSIG");
    }
    // From here on the daemon uses neither the caller's directory nor its terminal.
    rustix::process::chdir("/").map_err(|e| failed(e.into()))?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{READY}").and_then(|()| out.flush()).map_err(failed)?;
    let null = std::fs::OpenOptions::new().write(true).open("/dev/null").map_err(failed)?;
    rustix::stdio::dup2_stdout(&null).map_err(|e| failed(e.into()))
}

/// As sd_notify(3): sends one datagram to the socket that systemd names. Without systemd nothing
/// happens.
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
