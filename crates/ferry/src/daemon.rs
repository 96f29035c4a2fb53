//! The life of a mount: started in the foreground or as a daemon, served until it is unmounted or
//! told to stop.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use ferry_fs::Filesystem;
use ferry_fuse::{Connection, Ended, MountHandle, Session, Unmount};
use parking_lot::Mutex;
use rustix::process::{Resource, Rlimit, Signal, getpid, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::asked::{Answers, Asked};
use crate::error::CliError;
use crate::hold::Holder;
use crate::listen::Address;
use crate::logging;
use crate::mounts::{self, Mount};
use crate::profiled::Profiles;
use crate::starter::OpenFile;
use crate::{bdi, metrics, socket, starter, traced, uring, utab};

/// The question whether another program may go on with the mount; its path follows.
pub const GO_ON: &str = "go-on ";
/// Requests that are under way may take so long, before another process goes on.
const REQUESTS_END: Duration = Duration::from_secs(10);
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
    /// What the process before has left, if this one goes on with its mount.
    pub before: Option<Connection>,
    /// Where what the kernel knows is noted, for a process that goes on if this one is killed.
    pub known: Option<OwnedFd>,
    /// Lets another process go on with the mount. `None`: none can.
    pub settle: Option<Settle>,
    /// Where the figures are served to Prometheus, and the question that asks for them.
    pub metrics: Option<(&'a Address, &'static str)>,
}

/// Makes changes durable, so that another process may go on with the mount, and then leaves it by
/// calling the other function. An error says why not.
pub type Settle = Arc<dyn Fn(&Leave<'_>) -> Result<(), String> + Send + Sync>;
/// Why no other process can go on with a mount that is about to end here.
pub const ENDS: &str = "another process goes on with the mount just now, or it is being unmounted";
/// Leaves the mount; an error says why not.
pub type Leave<'a> = dyn Fn() -> Result<(), String> + 'a;

/// How a mount has ended, for this process.
pub enum Served {
    /// It is gone.
    Unmounted,
    /// This program goes on with it.
    HandedOver(Connection, PathBuf),
}

/// Prepares the process before it serves a mount. A failure of any step is no reason to fail.
pub fn prepare(daemon: bool) {
    if Holder::get().is_some() {
        // Nobody else could end it, or go on with its mount.
        if let Err(error) = rustix::process::set_parent_process_death_signal(Some(Signal::KILL)) {
            tracing::debug!(%error, "PR_SET_PDEATHSIG");
        }
    } else {
        starter::prepare(daemon);
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
    service: &mut Service<'_>,
    answers: Answers,
) -> Result<Served, CliError> {
    let (events, received) = mpsc::channel();
    watch_signals(events.clone())?;
    uring::offer();
    let writeback = fs.writeback_cache();
    // Before the mount: if the address is in use, nothing is mounted.
    let goes_on = service.before.is_some();
    let bind = |(address, question): (&Address, _)| Ok((address.bind("metrics=")?, question));
    let bound = without_if(goes_on, service.metrics.map(bind))?;
    let traced_fs = Arc::downgrade(&fs);
    let session = match service.before.take() {
        Some(before) => {
            before.check().map_err(|e| CliError::Failed(e.to_string()))?;
            // What the process before had noted counts until this one serves, and no longer.
            let survives = keep(service, Some(&before))?;
            Holder::get().map_or(Ok(()), Holder::begins)?;
            let session = Session::go_on(fs, service.mountpoint, &service.options, before);
            session.inspect_err(|error| give_up(error, service.mountpoint, survives))
        }
        None => Session::mount(fs, service.mountpoint, &service.options),
    };
    let session = session.map_err(|e| CliError::Failed(e.to_string()))?;
    if !goes_on {
        let connection = session.connection().map_err(|e| CliError::Failed(e.to_string()))?;
        keep(service, connection.as_ref())?;
    }
    if !goes_on {
        bdi::raise(service.mountpoint, writeback);
    }
    let handle = session.handle();
    let answered = with_trace(session.handle(), traced_fs, Arc::clone(&answers));
    let course = Arc::new(Mutex::new(Course::Served));
    let answered = with_successor(session.handle(), service.settle.clone(), &course, answered);
    let counted = session.handle();
    let profiles = Profiles::new(move || counted.stats());
    service.asked.listen(service.mountpoint, answered, profiles);
    // Held until the mount has ended.
    let endpoint = bound.map(|(bound, question)| metrics::serve(bound, move || answers(question)));
    let _endpoint = without_if(goes_on, endpoint)?;
    let serving = thread::Builder::new().name("session".into()).spawn(move || {
        // The receiver is gone only if the process ends anyway.
        let _ = events.send(Event::Ended(session.wait()));
    });
    serving.map_err(|e| CliError::Failed(format!("cannot start a thread: {e}")))?;
    if let Some(words) = &service.listed_options {
        utab::show(Path::new(&service.options.fsname), service.mountpoint, words);
    }
    announce(service).inspect_err(|_| stop(&handle, FORCED))?;
    if goes_on && let Err(error) = starter::ask_on_each_core(service.mountpoint) {
        tracing::warn!(%error, "programs may wait until others use the mount");
    }
    tracing::info!(volume = service.options.fsname, mountpoint = %service.mountpoint.display(), "mounted");

    let ended = await_end(&handle, &received, service.stop_timeout, &course);
    // Who asks for another process holds this until the mount is handed over.
    let program = || match &*course.lock() {
        Course::GoesOn(program) => Some(program.clone()),
        Course::Served | Course::Ends => None,
    };
    if let Ended::HandedOver(connection) = ended
        && let Some(program) = program()
    {
        // Who has asked for it must hear of it before this process ends.
        service.asked.finish();
        return Ok(Served::HandedOver(connection, program));
    }
    if let Some(holder) = Holder::get()
        && let Err(error) = holder.keep_nothing()
    {
        tracing::debug!(%error, "the holder");
    }
    // The next mount may use this mount point already.
    if service.listed_options.is_some()
        && matches!(mounts::at(service.mountpoint), Ok(mount) if !mount.as_ref().is_some_and(Mount::is_ferry))
    {
        utab::forget(service.mountpoint);
    }
    notify("STOPPING=1");
    Ok(Served::Unmounted)
}

/// What the metrics need. A mount that programs use goes on without.
fn without_if<T>(goes_on: bool, made: Option<Result<T, CliError>>) -> Result<Option<T>, CliError> {
    match made {
        Some(Err(error)) if goes_on => {
            tracing::error!(%error, "the mount goes on without its metrics");
            Ok(None)
        }
        made => made.transpose(),
    }
}

/// Ends what this process cannot go on with, though it may have answered some requests. If the
/// mount survives a kill, this process ends as if it was killed, and the next one goes on from what
/// it has noted. In order it could not end: its threads may serve requests yet.
fn give_up(error: &ferry_fuse::Error, mountpoint: &Path, survives: bool) {
    if survives {
        tracing::error!(%error, "it cannot serve the mount: it ends as if it was killed");
        let _ended = kill_process(getpid(), Signal::KILL);
    } else if let Err(undone) = ferry_fuse::unmount(mountpoint, Unmount::Force) {
        tracing::error!(%undone, "cannot unmount");
    }
}

/// Gives the holder what another process needs to go on if this one is killed. Returns whether one
/// can.
fn keep(service: &Service<'_>, connection: Option<&Connection>) -> Result<bool, CliError> {
    match (Holder::get(), connection, &service.known) {
        (Some(holder), Some(connection), Some(known)) if connection.survives_a_kill() => {
            holder.keep(connection, known, service.mountpoint).map(|()| true)
        }
        _ => Ok(false),
    }
}

/// Lets another process go on with the mount, if somebody asks for it.
fn with_successor(
    handle: MountHandle,
    settle: Option<Settle>,
    course: &Arc<Mutex<Course>>,
    answers: Answers,
) -> Answers {
    let course = Arc::clone(course);
    Arc::new(move |question| {
        let Some(program) = question.strip_prefix(GO_ON) else { return answers(question) };
        let done = match &settle {
            None => Err("this mount cannot go on in another process: unmount it, and mount it with the other program".into()),
            Some(settle) => settle(&|| {
                let mut course = course.lock();
                if *course != Course::Served {
                    return Err(ENDS.into());
                }
                match hand_over(&handle) {
                    Ok(true) => {
                        *course = Course::GoesOn(program.into());
                        Ok(())
                    }
                    Ok(false) => Err(format!(
                        "requests are under way that have not ended for {} s: try again later",
                        REQUESTS_END.as_secs()
                    )),
                    Err(error) => Err(error.to_string()),
                }
            }),
        };
        Some(match done {
            Ok(()) => socket::object([("going", true.into())]),
            Err(why) => socket::object([("refused", why.into())]),
        })
    })
}

/// Leaves the mount, while a process of its own has a file open there.
fn hand_over(handle: &MountHandle) -> Result<bool, ferry_fuse::Error> {
    let file = OpenFile::start(handle.mountpoint())
        .inspect_err(|error| tracing::debug!(%error, "no file of its own is open"));
    let ino = file.as_ref().ok().map(|file| file.ino);
    handle.hand_over(REQUESTS_END, ino)
}

/// Answers the questions of `ferry trace`, too.
fn with_trace(handle: MountHandle, fs: Weak<dyn Filesystem>, answers: Answers) -> Answers {
    Arc::new(move |question| traced::answer(&handle, &fs, question).or_else(|| answers(question)))
}

/// Returns when the mount has ended or must end: a first signal asks for it, a second one or the
/// timeout forces it.
fn await_end(
    handle: &MountHandle,
    received: &Receiver<Event>,
    stop_timeout: Duration,
    course: &Mutex<Course>,
) -> Ended {
    let mut stage = Stage::Serving;
    loop {
        let event = match stage {
            Stage::Serving => received.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Stage::Stopping => received.recv_timeout(stop_timeout),
            Stage::Forced => received.recv_timeout(FORCED),
        };
        stage = match (event, stage) {
            (Ok(Event::Ended(how)), _) => return how,
            (Err(RecvTimeoutError::Disconnected), _) => return Ended::Unmounted,
            (Ok(Event::Signal), Stage::Serving) => {
                let mut course = course.lock();
                if *course == Course::Served {
                    *course = Course::Ends;
                    stop(handle, stop_timeout);
                    Stage::Stopping
                } else {
                    // The event that it was handed over follows.
                    Stage::Serving
                }
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
                return Ended::Unmounted;
            }
        };
    }
}

/// What becomes of a mount. Whichever comes first, another process or a signal, is the only one.
#[derive(PartialEq)]
enum Course {
    Served,
    /// This process ends it.
    Ends,
    /// This program goes on with it.
    GoesOn(PathBuf),
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
    Ended(Ended),
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

/// Tells systemd and the process that started this daemon that the mount can be used.
fn announce(service: &Service<'_>) -> Result<(), CliError> {
    notify("READY=1");
    let failed = |e| CliError::Failed(format!("cannot become a daemon: {e}"));
    if service.daemon {
        logging::detach(service.log).map_err(failed)?;
    }
    match Holder::get() {
        // The holder tells the starter, which ends then: the holder must not end with it.
        Some(holder) => {
            if service.daemon {
                starter::leave_terminal().map_err(failed)?;
            }
            holder.ready()
        }
        None if service.daemon => starter::leave().map_err(failed),
        None => Ok(()),
    }
}

/// Tells systemd, by way of the holder if there is one.
fn notify(state: &str) {
    match Holder::get() {
        None => starter::notify_systemd(state),
        Some(holder) => {
            if let Err(error) = holder.notify(state) {
                tracing::warn!(%error, "cannot notify systemd");
            }
        }
    }
}
