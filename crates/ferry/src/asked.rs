//! Questions to a mount's daemon over a socket, not through the mount. A caller that asks through
//! the mount waits in the kernel for as long as the daemon does not answer, and cannot be killed.
//! Over a socket (`socket.rs`) it waits for a bounded time.

use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use ferry_env::Env;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::Value;
use siphasher::sip::SipHasher13;

use crate::error::CliError;
use crate::mounts::{self, Mount};
use crate::profiled::Profiles;
use crate::socket;
use crate::waiting::pause;

/// Prefix of the sockets' names; the mount's device number, a hash of its source, and the time of
/// mounting follow. The kernel reuses the device number of an ended mount at once, while its daemon
/// may still be closing the volume. It is the daemon of another source, or of several daemons the
/// youngest has the mount.
const PREFIX: &str = "ferry-mount-";
/// The question that the daemon answers when it has closed the volume.
const END: &str = "end";
/// The question whether the daemon answers at all.
const ALIVE: &str = "alive";

/// The next daemon of a mount that goes on answers so long after it serves.
const NEXT_ANSWERS: Duration = Duration::from_secs(2);
/// How often it is looked for.
const LOOK: Duration = Duration::from_millis(5);
/// A daemon may be silent for so long.
const SILENCE: Duration = Duration::from_secs(1);
/// The kernel ends the connection of a killed daemon after it has taken the daemon's rings down. A
/// busy machine may take seconds for that.
const DEATH_TIME_MAX: Duration = Duration::from_secs(10);

/// Answers a question; `None`: the question is unknown.
pub type Answers = Arc<dyn Fn(&str) -> Option<Value> + Send + Sync>;

/// The daemon's side of the questions.
pub struct Asked {
    /// The callers that wait for the end.
    waiting: Receiver<UnixStream>,
    keep: Sender<UnixStream>,
    /// Held while a caller is being answered.
    answering: Arc<Mutex<()>>,
}

impl Asked {
    /// Answers no questions until [`Asked::listen`].
    pub fn new() -> Self {
        let (keep, waiting) = mpsc::channel();
        Self { waiting, keep, answering: Arc::default() }
    }

    /// Answers questions from now on, because the mount exists.
    pub fn listen(&self, mountpoint: &Path, answers: Answers, profiles: Profiles) {
        let listening = mounts::at(mountpoint).and_then(|mount| {
            let mount = mount.filter(Mount::is_ferry).ok_or(io::ErrorKind::NotFound)?;
            let (keep, profiles) = (self.keep.clone(), profiles.clone());
            let answering = Arc::clone(&self.answering);
            socket::take_each(&name(&mount, mounted_at()), move |question, stream| {
                let _answers = answering.lock();
                match question {
                    ALIVE => socket::say(stream, Some(socket::object([("alive", true.into())]))),
                    // The receiver is gone only if the process ends anyway.
                    END => keep.send(stream).map_err(|_| io::ErrorKind::NotConnected.into()),
                    question => match profiles.take(question, stream)? {
                        Some(stream) => socket::say(stream, answers(question)),
                        None => Ok(()),
                    },
                }
            })
        });
        if let Err(error) = listening {
            tracing::warn!(%error, "questions are answered through the mount only: a caller may have to wait for it");
        }
    }

    /// Waits until the caller that is being answered has its answer.
    pub fn finish(&self) {
        if self.answering.try_lock_for(SILENCE).is_none() {
            tracing::debug!("a caller does not take its answer");
        }
    }

    /// Tells the callers that wait for it how closing the volume ended.
    pub fn ended(&self, closed: &Result<(), CliError>) {
        let answer = match closed {
            Ok(()) => socket::object([("closed", true.into())]),
            Err(error) => socket::object([("failed", error.to_string().into())]),
        };
        for mut stream in self.waiting.try_iter() {
            if let Err(error) = stream.write_all(answer.to_string().as_bytes()) {
                tracing::debug!(%error, "a caller that waited for the end has disconnected");
            }
        }
    }
}

fn name(mount: &Mount, mounted_at: u64) -> String {
    format!("{}{mounted_at:020}", prefix(mount))
}

/// What the names of all sockets of a mount begin with.
fn prefix(mount: &Mount) -> String {
    let source = SipHasher13::new().hash(mount.source.as_os_str().as_bytes());
    format!("{PREFIX}{}-{source:016x}-", mount.device)
}

/// Nanoseconds of the machine's monotonic clock.
fn mounted_at() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // Neither number is negative.
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

/// Connects to the daemon of a mount, if it belongs to this user or to root. Root may ask the
/// daemon of any user.
fn connect(mount: &Mount) -> Option<UnixStream> {
    let names = socket::names(&prefix(mount)).ok()?;
    // The names have one length, so they are in the order of their times.
    names.iter().rev().find_map(|name| socket::connect_or_of(name, mount.owner).ok())
}

/// The process that is the daemon of a mount, also if it is stopped or hangs; `None`: no socket
/// tells.
pub fn daemon(mount: &Mount) -> Option<u32> {
    connect(mount).as_ref().and_then(socket::peer).and_then(|pid| u32::try_from(pid).ok())
}

/// Whether a daemon of the mount lives: it answers, or has nothing to say for so long, because it
/// hangs. A killed one is silent, too, until the kernel has closed its files, but it has ended.
pub fn lives(mount: &Mount, silence: Duration) -> bool {
    let Some(stream) = connect(mount) else { return false };
    let pid = socket::peer(&stream);
    if stream.set_read_timeout(Some(silence)).is_err() {
        return true;
    }
    match socket::ask_on(stream, ALIVE) {
        Ok(_) => true,
        Err(error) => {
            socket::is_silence(&error) && !pid.and_then(Pid::from_raw).is_some_and(has_ended)
        }
    }
}

/// Whether a process has ended. What it had open may be open for a while longer.
fn has_ended(pid: Pid) -> bool {
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(process) => {
            let mut ended = [PollFd::new(&process, PollFlags::IN)];
            poll(&mut ended, Some(&Timespec::default())).is_ok_and(|count| count > 0)
        }
        Err(error) => error == Errno::SRCH,
    }
}

/// Asks the daemon of a mount. `None`: no daemon answers this user over a socket. An error: the
/// daemon does not answer in time.
pub fn ask(mount: &Mount, question: &str) -> Result<Option<Value>, CliError> {
    ask_for(mount, question, Duration::ZERO)
}

/// As [`ask_for`], for a question that the daemon answers unless it is of another version. `why`
/// names what else may keep it from answering.
pub fn must_ask(
    mount: &Mount,
    question: &str,
    time: Duration,
    why: &str,
) -> Result<Value, CliError> {
    if let Some(answer) = ask_for(mount, question, time)? {
        return Ok(answer);
    }
    if has_died(mount) {
        return Err(mounts::died(&mount.target));
    }
    Err(CliError::Failed(format!(
        "{}: its daemon answers root and the user who has mounted it, if it is of the same version of ferry{why}",
        mount.target.display()
    )))
}

/// Whether the daemon behind a mount has died. Attributes may come from the kernel's cache, as if
/// it were alive; statfs(2) always asks the daemon.
pub fn is_dead(target: &Path) -> bool {
    rustix::fs::statvfs(target).is_err_and(|e| mounts::says_dead(&e.into()))
}

/// As [`is_dead`], without a request to a daemon that lives and may hang.
pub fn has_died(mount: &Mount) -> bool {
    fate(mount) == Fate::Died
}

/// What became of a daemon.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It lives, or another process has gone on.
    Lives,
    /// The kernel has ended the mount's connection.
    Died,
    /// It is gone, and the kernel's requests wait for another one.
    Awaited,
}

/// Finds out what became of the daemon of a mount.
pub fn fate(mount: &Mount) -> Fate {
    if lives(mount, SILENCE) {
        return Fate::Lives;
    }
    let (tell, told) = mpsc::channel();
    let target = mount.target.clone();
    // A caller that has waited long enough no longer listens.
    let asking = move || tell.send(is_dead(&target)).unwrap_or_default();
    let started = std::thread::Builder::new().name("ferry-dead".into()).spawn(asking);
    match started.ok().and_then(|_| told.recv_timeout(DEATH_TIME_MAX).ok()) {
        Some(true) => Fate::Died,
        Some(false) => Fate::Lives,
        None => Fate::Awaited,
    }
}

/// The error of a request to a mount that no process serves.
pub fn awaited(mount: &Mount) -> CliError {
    CliError::Failed(format!(
        "{}: no process has served this mount for {} s, and programs wait for the next one: the log of the mount, or of its unit, says why \
         none can start. It goes on by itself when one has; `ferry umount --force` ends the mount",
        mount.target.display(),
        DEATH_TIME_MAX.as_secs()
    ))
}

/// As [`ask`], for an answer that takes the daemon at least `time`.
pub fn ask_for(mount: &Mount, question: &str, time: Duration) -> Result<Option<Value>, CliError> {
    let clock = Env::real().clock;
    let until = clock.monotonic() + NEXT_ANSWERS;
    loop {
        match ask_one(mount, question, time)? {
            // While a mount goes from one process to the next, none answers.
            Answer::NoDaemon if clock.monotonic() < until => match fate(mount) {
                Fate::Lives => pause(LOOK),
                Fate::Died => return Ok(None),
                Fate::Awaited => return Err(awaited(mount)),
            },
            Answer::Given(answer) => return Ok(Some(answer)),
            Answer::NoDaemon | Answer::Refused => return Ok(None),
        }
    }
}

/// What becomes of a question.
enum Answer {
    Given(Value),
    /// The daemon is of another version, or does not answer this user.
    Refused,
    /// There is none, or it has ended before it answered.
    NoDaemon,
}

fn ask_one(mount: &Mount, question: &str, time: Duration) -> Result<Answer, CliError> {
    let Some(stream) = connect(mount) else {
        let names = socket::names(&prefix(mount)).unwrap_or_default();
        let is_other = names.iter().any(|name| socket::owner(name).is_some());
        return Ok(if is_other { Answer::Refused } else { Answer::NoDaemon });
    };
    let pid = socket::peer(&stream);
    match socket::ask_on_for(stream, question, time) {
        Ok(answer) => Ok(Answer::Given(answer)),
        Err(error) if socket::is_silence(&error) => Err(silent(mount, pid)),
        Err(error) if socket::is_end(&error) => Ok(Answer::NoDaemon),
        Err(_) => Ok(Answer::Refused),
    }
}

fn silent(mount: &Mount, pid: Option<i32>) -> CliError {
    let pid = pid.map_or("?".into(), |pid| pid.to_string());
    CliError::Failed(format!(
        "{}: its daemon (process {pid}) has not answered for {} s: it is stopped, or hangs; `kill -CONT {pid}` lets a stopped one go on, \
         `ferry umount --force` ends it",
        mount.target.display(),
        socket::TIME_MAX.as_secs()
    ))
}

/// Refuses a request to a mount whose daemon does not answer: the request would wait in the kernel.
pub fn must_answer(path: &Path) -> Result<(), CliError> {
    match mounts::above(path).filter(Mount::is_ferry) {
        Some(mount) => ask(&mount, ALIVE).map(drop),
        None => Ok(()),
    }
}

/// A connection on which the daemon says when it has closed the volume.
pub struct End(UnixStream);

impl End {
    /// Connects; call it before the mount ends. `None`: no daemon answers this user.
    pub fn of(mount: &Mount, timeout: Duration) -> Option<Self> {
        let mut stream = connect(mount)?;
        stream.set_read_timeout(Some(timeout.max(Duration::from_secs(1)))).ok()?;
        writeln!(stream, "{END}").ok()?;
        stream.shutdown(std::net::Shutdown::Write).ok()?;
        Some(Self(stream))
    }

    /// Waits until the daemon has closed the volume; says how that ended.
    pub fn told(mut self) -> Result<(), String> {
        // If the time is over, the caller waits no longer.
        let Ok(answer) = socket::whole(&mut self.0) else { return Ok(()) };
        if answer.is_empty() {
            return Err("its daemon ended before it had closed the volume".into());
        }
        let answer: Value = serde_json::from_slice(&answer).unwrap_or_default();
        answer["failed"].as_str().map_or(Ok(()), |failed| Err(socket::printable(failed)))
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::disallowed_methods, reason = "tests may unwrap")]
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener};

    use super::*;

    /// The kernel gives the device number of an ended mount to the next one at once.
    #[test]
    fn a_daemon_that_closes_another_volume_is_not_asked() {
        let device = format!("test-reused:{}", std::process::id());
        let (closing, _listener) = mount_and_listener(&device);
        let mount = Mount { source: "/another.ferry".into(), ..closing };
        assert!(!lives(&mount, Duration::from_millis(10)), "its own daemon was killed");
    }

    /// A mount of this device number, and the listener of what would be its daemon.
    fn mount_and_listener(device: &str) -> (Mount, UnixListener) {
        let mount = Mount {
            id: 1,
            parent: 0,
            target: "/nowhere".into(),
            source: "/nowhere.ferry".into(),
            fs_type: mounts::FS_TYPE.into(),
            device: device.into(),
            owner: None,
            read_only: false,
        };
        let address = SocketAddr::from_abstract_name(name(&mount, mounted_at())).unwrap();
        (mount, UnixListener::bind_addr(&address).unwrap())
    }

    #[test]
    fn a_daemon_that_cuts_the_connection_is_dead_and_a_silent_one_lives() {
        let device = format!("test:{}", std::process::id());
        let (mount, listener) = mount_and_listener(&device);
        // The kernel completes connections by itself: a daemon that hangs accepts none.
        assert!(lives(&mount, Duration::from_millis(10)));
        let hung_up = std::thread::spawn(move || drop((listener.accept(), listener.accept())));
        assert!(!lives(&mount, Duration::from_secs(60)));
        hung_up.join().unwrap();
        assert!(!lives(&mount, Duration::from_secs(60)));
    }

    /// As after a kill, until the kernel has closed the daemon's files: here another process has
    /// the listener open, which a process made that has ended.
    #[test]
    fn a_silent_daemon_that_has_ended_is_dead() {
        let device = format!("test-ended:{}", std::process::id());
        let (mount, listener) = mount_and_listener(&device);
        drop(listener);
        let listen = "import socket, subprocess, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind('\\0' + sys.argv[1])
listener.listen()
held = subprocess.Popen(['sleep', '60'], pass_fds=[listener.fileno()], stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL)
print(held.pid)";
        let python = std::process::Command::new("python3")
            .args(["-c", listen, &name(&mount, mounted_at())])
            .output()
            .unwrap();
        let held = String::from_utf8(python.stdout).unwrap().trim().parse().unwrap();
        assert!(connect(&mount).is_some(), "the kernel completes connections");
        assert!(!lives(&mount, Duration::from_millis(10)));
        rustix::process::kill_process(Pid::from_raw(held).unwrap(), rustix::process::Signal::KILL)
            .unwrap();
    }
}
