//! `ferry upgrade-mount`: another program goes on with a mount, while programs use it.

use std::ffi::OsString;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use ferry_env::Env;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{AtFlags, CWD, Mode as FileMode, OFlags, StatxFlags, fstat, open, statx};
use rustix::process::{PidfdFlags, pidfd_open};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::asked;
use crate::cli::UpgradeMountArgs;
use crate::control::print;
use crate::daemon::GO_ON;
use crate::error::CliError;
use crate::location::Location;
use crate::mounts::{self, Mount};
use crate::socket::printable;
use crate::waiting::{pause, timespec};
use crate::{remote, service, starter};

/// The daemon may take so long to make everything durable, before any program waits for it.
const SETTLES: Duration = Duration::from_secs(120);
/// And so long to close the volume, and the next one to open it.
const STARTS: Duration = Duration::from_secs(120);
/// A program may take so long to say its version.
const VERSION: Duration = Duration::from_secs(10);
/// How often the next daemon is looked for.
const LOOK: Duration = Duration::from_millis(5);
/// How often it is looked for where systemd gets the mount.
const LOOK_AGAIN: Duration = Duration::from_millis(500);
/// The next daemon is believed to live if it is silent for no longer.
const SILENCE: Duration = Duration::from_secs(10);

/// Runs the command.
pub fn run(args: &UpgradeMountArgs) -> Result<(), CliError> {
    let named = args.program.as_deref();
    if let (Some(unit), Some(target)) = (&args.next_start, &args.target) {
        return leave_to_next_start(target, unit, &args.arguments);
    }
    let Some(target) = &args.target else {
        return run_all(&program(named)?);
    };
    let mount = mounts::meant(target)?;
    mounts::must_be_reached(&mount)?;
    replace(&mount, &program(named)?)
}

/// Each mount for itself: one that stays with its program keeps no other one from a change.
fn run_all(program: &Path) -> Result<(), CliError> {
    let mounts = mounts::list().map_err(CliError::path("/proc/self/mountinfo", "cannot read"))?;
    let (mut tried, mut failed) = (0, 0);
    for mount in mounts::one_of_each(&mounts) {
        tried += 1;
        if let Err(error) = replace(mount, program) {
            eprintln!("ferry: {error}");
            failed += 1;
        }
    }
    match failed {
        0 => Ok(()),
        _ => Err(CliError::Failed(format!(
            "{failed} of {tried} mounts go on in the program of before"
        ))),
    }
}

/// If a unit ends to start again with the same arguments, leaves its mount to the next start;
/// returns when the unit's process has ended. Otherwise the unit stops, which unmounts.
fn leave_to_next_start(
    target: &Location,
    unit: &str,
    arguments: &[OsString],
) -> Result<(), CliError> {
    let failed = |error: io::Error| CliError::Failed(format!("{unit}: {error}"));
    let Some(main) = service::main_process() else { return Ok(()) };
    if !service::restarts(unit) {
        return Ok(());
    }
    let stops = |why: &str| {
        eprintln!("ferry: {unit}: {why}: the mount ends, and the next start makes it anew");
        Ok(())
    };
    if service::arguments_of(main).map_err(failed)? != arguments {
        return stops("its process has other arguments than ExecStop= names");
    }
    if !service::has_room(unit) {
        return stops("its FileDescriptorStoreMax= is too small");
    }
    let process = pidfd_open(main, PidfdFlags::empty()).map_err(|error| failed(error.into()))?;
    let mount = mounts::find_ferry(target)?;
    let daemon = asked::daemon(&mount);
    if daemon.and_then(service::parent_of) != Some(main) {
        return stops("another process than that of the unit has the mount");
    }
    let_go(&mount, Path::new(service::NEXT_START))?;
    let clock = Env::real().clock;
    let until = clock.monotonic() + STARTS;
    let mut ended = [PollFd::new(&process, PollFlags::IN)];
    while clock.monotonic() < until {
        match poll(&mut ended, Some(&timespec(LOOK_AGAIN))) {
            Ok(0) if asked::daemon(&mount).is_some_and(|next| Some(next) != daemon) => {
                return stops("systemd has not taken the mount, its log says why");
            }
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            other => return other.map(drop).map_err(|error| failed(error.into())),
        }
    }
    stops("its process has not ended")
}

/// Asks the daemon of a mount to end, so that another process goes on.
fn let_go(mount: &Mount, program: &Path) -> Result<(), CliError> {
    let question = format!("{GO_ON}{}", program.display());
    let why = ", and if no other process goes on with the mount just now";
    let answer = asked::must_ask(mount, &question, SETTLES, why)?;
    answer["refused"].as_str().map_or(Ok(()), |why| {
        Err(CliError::Failed(format!("{}: {}", mount.target.display(), printable(why))))
    })
}

/// Lets the daemon of a mount end, and waits until `program` goes on.
fn replace(mount: &Mount, program: &Path) -> Result<(), CliError> {
    let failed = |why: &str| CliError::Failed(format!("{}: {why}", mount.target.display()));
    if remote::figures(mount)?.as_ref().is_some_and(remote::is_away) {
        eprintln!(
            "ferry: {}: its server is away, and must make all durable first: waits for it",
            mount.target.display()
        );
    }
    let before = asked::daemon(mount);
    let_go(mount, program)?;
    let clock = Env::real().clock;
    let asked_at = clock.monotonic();
    let next = next_daemon(mount, before, || clock.monotonic() - asked_at < STARTS)?;
    let paused = clock.monotonic() - asked_at;
    let runs = std::fs::read_link(format!("/proc/{next}/exe"));
    if runs.is_ok_and(|runs| runs != program) {
        return Err(failed(
            "the new program did not start, its log says why; the one before goes on",
        ));
    }
    print(&format!(
        "{}: process {next} goes on; requests waited for up to {} ms\n",
        mount.target.display(),
        paused.as_millis()
    ))
}

/// Makes one request to a mount on each core. The queue of a core fetches what the kernel has held
/// back only with the answer to a request. A daemon must not wait for itself, so this is a process
/// of its own; it may wait as any program does.
pub fn ask(mountpoint: &Path) {
    let Ok(cores) = sched_getaffinity(None) else { return };
    std::thread::scope(|scope| {
        for core in (0..CpuSet::MAX_CPU).filter(|core| cores.is_set(*core)) {
            scope.spawn(move || {
                let mut own = CpuSet::new();
                own.set(core);
                // Only the request counts, not its answer.
                let _pinned = sched_setaffinity(None, &own);
                let how = AtFlags::STATX_FORCE_SYNC;
                let _answered = statx(CWD, mountpoint, how, StatxFlags::BASIC_STATS);
            });
        }
    });
}

/// Has a file without a name open on a mount until the standard input ends, and prints its number.
/// A daemon that leaves its mount needs one that the kernel knows.
pub fn have_open(mountpoint: &Path) -> Result<(), CliError> {
    let failed = |error| CliError::path(mountpoint, "cannot open a file without a name")(error);
    let how = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = open(mountpoint, how, FileMode::RUSR).map_err(|error| failed(error.into()))?;
    let found = fstat(&file).map_err(|error| failed(error.into()))?;
    print(&format!("{}\n", found.st_ino))?;
    std::io::stdin().read_to_end(&mut Vec::new()).map(drop).map_err(failed)
}

/// The program that is to go on: this one, if no other is named.
fn program(named: Option<&Path>) -> Result<PathBuf, CliError> {
    let path = match named {
        Some(path) => path.to_owned(),
        None => std::env::current_exe().map_err(CliError::path("/proc/self/exe", "cannot find"))?,
    };
    let found = path.canonicalize().map_err(CliError::path(&path, "cannot find"))?;
    let version = starter::first_line(Command::new(&found).arg("--version"), VERSION);
    let (version, succeeded) =
        version.map_err(CliError::path(&found, "cannot be asked for its version"))?;
    if !succeeded || !version.starts_with("ferry ") {
        return Err(CliError::Failed(format!("{}: that is no ferry", found.display())));
    }
    Ok(found)
}

/// The process that goes on, once it answers.
fn next_daemon(
    mount: &Mount,
    before: Option<u32>,
    has_time: impl Fn() -> bool,
) -> Result<u32, CliError> {
    while has_time() {
        if let Some(pid) = asked::daemon(mount).filter(|pid| Some(*pid) != before)
            && asked::lives(mount, SILENCE)
        {
            return Ok(pid);
        }
        let mounts = mounts::list().unwrap_or_default();
        if !mounts.iter().any(|other| other.id == mount.id) {
            return Err(CliError::NotMounted(mount.target.clone()));
        }
        pause(LOOK);
    }
    Err(CliError::Failed(format!(
        "{}: no daemon has gone on after {} s: look into its log",
        mount.target.display(),
        STARTS.as_secs()
    )))
}
