//! The holder: a process that does nothing but start the one that serves a mount, and start another
//! one when the mount is to go on in a newer program. Between the two it has the mount's connection
//! to the kernel, so the mount never ends. It outlives all of them, and they end with it.
//!
//! From the moment of the mount the holder keeps what a process needs that goes on if the serving
//! one is *killed*: the connection, and the memory in which that one notes what the kernel knows. A
//! process that ends by itself has ended the mount.
//!
//! The two sides speak over a socket, whose name the serving process finds in its environment. A
//! holder may be of an older version than the process that it starts: messages are never changed,
//! only added, and both sides ignore those that they do not know.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::{self, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ferry_env::{Clock, Env};
use ferry_fs::{Known, LeftWords};
use ferry_fuse::Connection;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix,
    SocketFlags, SocketType, accept_with, bind, connect, listen, recvmsg, socket_with,
};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, geteuid, getpid, getppid, kill_process,
    pidfd_open, pidfd_send_signal, waitid,
};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use zeroize::Zeroizing;

use crate::error::CliError;
use crate::held::{
    CONNECTION, DEVICE, HeldThings, MOUNTPOINT, RIGHTS, end, memory, read_all, send,
};
use crate::waiting::timespec;
use crate::{logging, passphrase, service, starter};

/// The environment variable with the name of the holder's socket.
const SOCKET: &str = "FERRY_HOLDER";
/// The program of the holder itself.
const OWN: &str = "/proc/self/exe";
/// The longest message: the longest path, and a word.
const MESSAGE_MAX: usize = 8192;

/// A process may take so long to go on with a mount. A volume was closed in order, so there is
/// nothing to recover.
const STARTS: Duration = Duration::from_secs(60);
/// One that has to recover the volume may take so long.
const RECOVERS: Duration = Duration::from_secs(600);
/// For how long it is tried again to open the volume of a mount that goes on.
const TRIES: Duration = Duration::from_secs(600);
/// The same for a mount whose process was killed, if the volume is on a disk of this machine.
const TRIES_KILLED: Duration = Duration::from_secs(10);
/// It may be a request that kills one process after the other. So deaths in a row count: one of a
/// process that has served for less than `AT_ONCE` counts as [`AT_ONCE_DEATHS`], and each second
/// that one has served makes up for as many. At [`DEATHS_MAX`] the mount ends.
const AT_ONCE: Duration = Duration::from_millis(300);
const AT_ONCE_DEATHS: u32 = 120;
const DEATHS_MAX: u32 = 1000;
/// A process that has closed everything ends within this time, unless it waits in the kernel.
const ENDS: Duration = Duration::from_millis(20);
/// And the pause between two tries.
const REST: Duration = Duration::from_secs(1);

/// The names of what is held.
const MEMORY: &str = "memory";
const CARRIED: &str = "carried";
/// What the process before had noted of the kernel when it was killed.
const KNOWN: &str = "known";
/// There if what is mounted is in a store or at a server, which may be away.
const FAR: &str = "far";
/// The epoch of the newest of this holder's processes that has claimed a volume in a store.
const EPOCH: &str = "epoch";
/// The key of an encrypted volume.
const KEY: &str = "key";

/// What a process says to the other: a word, and what belongs to it.
struct Message {
    bytes: Vec<u8>,
    descriptor: Option<OwnedFd>,
}

impl Message {
    /// The word, and the rest behind a blank.
    fn split(&self) -> (&[u8], &[u8]) {
        let at = self.bytes.iter().position(|byte| *byte == b' ');
        at.map_or((&self.bytes, &[]), |at| (&self.bytes[..at], &self.bytes[at + 1..]))
    }
}

/// The next message; `None`: the other side has ended.
fn receive(socket: &OwnedFd) -> io::Result<Option<Message>> {
    let (mut bytes, mut space) = (vec![0; MESSAGE_MAX], [MaybeUninit::uninit(); RIGHTS]);
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let parts = &mut [IoSliceMut::new(&mut bytes)];
    let got = recvmsg(socket, parts, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    bytes.truncate(got);
    Ok((got > 0).then_some(Message { bytes, descriptor }))
}

/// Whether the other side is this process. Its number says it only among the processes of this
/// user: another user may have had a process of that number, and left its connection.
fn is_of(socket: &OwnedFd, process: Pid) -> io::Result<bool> {
    let peer = socket_peercred(socket)?;
    Ok(peer.pid == process && peer.uid == geteuid())
}

fn new_socket() -> io::Result<OwnedFd> {
    let kind = (AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    Ok(socket_with(kind.0, kind.1, kind.2, None)?)
}

/// The serving process's side.
pub struct Holder(OwnedFd);

/// What the process before has left.
pub struct Held {
    /// The mount's connection to the kernel.
    pub connection: Connection,
    /// What programs have open there.
    pub open: Open,
    /// Where it is mounted.
    pub mountpoint: PathBuf,
    /// The epoch in which that process had a volume in a store, if it was killed.
    pub epoch: Option<u64>,
    /// The key of an encrypted volume, if that process was killed.
    pub key: Option<Zeroizing<Vec<u8>>>,
}

/// What programs have open.
pub enum Open {
    /// As the process before has left it in order, in the form of the kind of mount; and the memory
    /// where that is, which all share who go on with it.
    Carried(Vec<u8>, OwnedFd),
    /// That process was killed: where it has noted what the kernel knows.
    Known(OwnedFd),
}

impl Open {
    /// The memory of a process that was killed.
    pub fn left(&self) -> Option<Result<LeftWords, CliError>> {
        let Self::Known(file) = self else { return None };
        Some(left_words(file))
    }
}

/// The memory in which a process of a volume's mount has noted what the kernel knows.
pub fn left_words(file: &OwnedFd) -> Result<LeftWords, CliError> {
    let file = file.try_clone().map_err(|error| CliError::Failed(error.to_string()))?;
    LeftWords::of(file).ok_or_else(other_form)
}

/// Gives back the memory of a process before that nobody needs, while this one recovers. If it is
/// not given back here, it is once the holder has another memory.
pub fn give_back_saved(left: &LeftWords) {
    let left = left.clone();
    let body = move || left.give_back_saved();
    let thread = std::thread::Builder::new().name("ferry-left".into()).spawn(body);
    if let Err(error) = thread {
        tracing::warn!(%error, "memory of the process before is given back at the end only");
    }
}

/// Where what the kernel knows outlives this process. `None`: it ends with it.
pub fn new_known() -> Option<Arc<Known>> {
    let known = Known::new().map(Arc::new);
    known
        .inspect_err(|error| tracing::warn!(%error, "the mount ends if its process is killed"))
        .ok()
}

/// No process can go on with the mount, and the holder need not try it again. The error says why.
pub fn cannot_go_on(why: &str) -> CliError {
    if let Some(Err(error)) = Holder::get().map(|holder| holder.say(&[b"never"], None)) {
        tracing::debug!(%error, "the holder");
    }
    CliError::Failed(why.into())
}

/// The open files have another form.
pub fn other_form() -> CliError {
    cannot_go_on("the open files of the mount have another form in this version")
}

static HOLDER: OnceLock<Option<Holder>> = OnceLock::new();

impl Holder {
    /// The one that has started this process, if one has.
    pub fn get() -> Option<&'static Self> {
        HOLDER.get_or_init(|| Self::connect(&std::env::var_os(SOCKET)?)).as_ref()
    }

    fn connect(name: &OsStr) -> Option<Self> {
        let connected = SocketAddrUnix::new_abstract_name(name.as_bytes()).and_then(|address| {
            let socket = new_socket().map_err(|_| rustix::io::Errno::IO)?;
            connect(&socket, &address)?;
            Ok(socket)
        });
        let socket = connected.inspect_err(|error| tracing::warn!(%error, "no holder")).ok()?;
        // The name is free for any user once the holder has ended.
        is_of(&socket, getppid()?).ok()?.then_some(Self(socket))
    }

    fn say(&self, parts: &[&[u8]], descriptor: Option<&OwnedFd>) -> Result<(), CliError> {
        send(&self.0, parts, descriptor)
            .map_err(|error| CliError::Failed(format!("the holder of the mount: {error}")))
    }

    /// What the process before has left: this one goes on with its mount.
    pub fn held(&self) -> Result<Option<Held>, CliError> {
        let failed = |error: io::Error| CliError::Failed(format!("the holder: {error}"));
        self.say(&[b"ask"], None)?;
        let mut all = BTreeMap::new();
        while let Some(message) = receive(&self.0).map_err(failed)? {
            match message.split() {
                (b"end", _) => break,
                (b"held", what) => {
                    let what = Message { bytes: what.to_vec(), descriptor: message.descriptor };
                    let (name, rest) = what.split();
                    all.insert(name.to_vec(), (rest.to_vec(), what.descriptor));
                }
                _ => {}
            }
        }
        if all.is_empty() {
            return Ok(None);
        }
        let mut take = |name: &str| all.remove(name.as_bytes()).unwrap_or_default();
        let incomplete = || CliError::Failed("the holder has not all of the mount".into());
        let (mountpoint, _) = take(MOUNTPOINT);
        let epoch = String::from_utf8(take(EPOCH).0).ok().and_then(|epoch| epoch.parse().ok());
        let mut descriptor = |name: &str| take(name).1.ok_or_else(incomplete);
        let connection = Connection { device: descriptor(DEVICE)?, memory: descriptor(MEMORY)? };
        let open = match descriptor(KNOWN) {
            Ok(known) => Open::Known(known),
            Err(_) => {
                let memory = descriptor(CARRIED)?;
                Open::Carried(
                    read_all(memory.try_clone().map_err(failed)?).map_err(failed)?,
                    memory,
                )
            }
        };
        let key = descriptor(KEY).ok().map(read_all).transpose().map_err(failed)?;
        let mountpoint = PathBuf::from(OsStr::from_bytes(&mountpoint));
        Ok(Some(Held { connection, open, mountpoint, epoch, key: key.map(Zeroizing::new) }))
    }

    /// This process, which goes on with a mount, has the volume in this epoch. It may be killed
    /// before [`Holder::keep`].
    pub fn claimed(&self, epoch: u64) -> Result<(), CliError> {
        self.say(&[b"hold", EPOCH.as_bytes(), epoch.to_string().as_bytes()], None)
    }

    /// Before [`Holder::keep`]: what is mounted may be away when this process is killed, and is
    /// waited for.
    pub fn keep_far(&self) -> Result<(), CliError> {
        self.say(&[b"keep", FAR.as_bytes()], None)
    }

    /// Before [`Holder::keep`]: the volume is in a store, and encrypted if it has a `key`. `epoch`:
    /// if this process owns the volume.
    pub fn keep_store(&self, epoch: Option<u64>, key: Option<&[u8]>) -> Result<(), CliError> {
        self.keep_far()?;
        if let Some(epoch) = epoch {
            self.say(&[b"keep", EPOCH.as_bytes(), epoch.to_string().as_bytes()], None)?;
        }
        key.map_or(Ok(()), |key| {
            self.say(&[b"keep", KEY.as_bytes()], Some(&memory("ferry-key", key)?))
        })
    }

    /// This process, which goes on with a mount, answers requests from now on.
    pub fn begins(&self) -> Result<(), CliError> {
        self.say(&[b"begins"], None)
    }

    /// If this process is killed from now on, another one goes on with the mount.
    pub fn keep(
        &self,
        connection: &Connection,
        known: &OwnedFd,
        mountpoint: &Path,
    ) -> Result<(), CliError> {
        self.say_all(b"keep", connection, (KNOWN, known), mountpoint)?;
        self.say(&[b"serving"], None)
    }

    /// What the next process needs, whatever kind of mount it is, and `more`.
    fn say_all(
        &self,
        word: &[u8],
        connection: &Connection,
        more: (&str, &OwnedFd),
        mountpoint: &Path,
    ) -> Result<(), CliError> {
        for (name, descriptor) in [(DEVICE, &connection.device), (MEMORY, &connection.memory), more]
        {
            self.say(&[word, name.as_bytes()], Some(descriptor))?;
        }
        if let Ok(Some(number)) = ferry_fuse::connection(mountpoint) {
            self.say(&[word, CONNECTION.as_bytes(), number.to_string().as_bytes()], None)?;
        }
        self.say(&[word, MOUNTPOINT.as_bytes(), mountpoint.as_os_str().as_bytes()], None)
    }

    /// The mount is gone: nobody goes on with it.
    pub fn keep_nothing(&self) -> Result<(), CliError> {
        self.say(&[b"serving"], None)
    }

    /// Leaves a mount to the next process, which runs `program`, once this one has ended.
    pub fn leave(
        &self,
        connection: &Connection,
        carried: &[u8],
        mountpoint: &Path,
        program: &Path,
    ) -> Result<(), CliError> {
        let carried = memory("ferry-carried", carried)?;
        self.say_all(b"hold", connection, (CARRIED, &carried), mountpoint)?;
        self.say(&[b"next", program.as_os_str().as_bytes()], None)
    }

    /// The mount can be used.
    pub fn ready(&self) -> Result<(), CliError> {
        self.say(&[b"ready"], None)
    }

    /// As [`starter::notify_systemd`], which listens to the holder only.
    pub fn notify(&self, state: &str) -> Result<(), CliError> {
        self.say(&[b"notify", state.as_bytes()], None)
    }
}

/// The holder's side: one process that it has started.
struct Served {
    child: Child,
    /// Once it has connected.
    socket: Option<OwnedFd>,
    is_ready: bool,
    /// It has found that no process can go on with the mount, or has recovered for too long.
    is_last: bool,
    /// The program that goes on when it has ended.
    next: Option<PathBuf>,
    /// When the mount could be used.
    since: Duration,
    /// It has closed all that it had open, and is about to end.
    is_ending: bool,
}

impl Served {
    /// It was started, and has not connected.
    fn new(child: Child) -> Self {
        Self {
            child,
            socket: None,
            is_ready: false,
            is_last: false,
            next: None,
            since: Duration::ZERO,
            is_ending: false,
        }
    }
}

/// What the holder does.
struct Holding {
    listener: OwnedFd,
    name: String,
    /// The holder is in the background.
    daemon: bool,
    /// Where its messages go then.
    log: Option<PathBuf>,
    /// The file with the passphrase that the user has typed.
    passphrase: Option<PathBuf>,
    signals: UnixStream,
    /// A signal has asked for the end.
    is_to_end: bool,
    /// Where it is mounted, if systemd had the mount.
    next_start: Option<OsString>,
    /// For the process that goes on now.
    things: HeldThings,
    /// What the serving process is saying for the case that it is killed.
    saying: HeldThings,
    /// What it has said; empty: its death ends the mount.
    if_killed: HeldThings,
    /// Deaths in a row, see [`DEATHS_MAX`].
    deaths: u32,
    /// The times of one clock are compared: each has a start of its own.
    clock: Arc<dyn Clock>,
}

/// Runs as the holder: starts this program again with the same arguments, and its successors.
/// Returns when the mount has ended. `passphrase`: a file for who serves.
pub fn run(
    daemon: bool,
    log: Option<&Path>,
    passphrase: Option<&Path>,
) -> Result<ExitCode, CliError> {
    starter::prepare(daemon);
    let failed = |error: io::Error| CliError::Failed(format!("cannot hold a mount: {error}"));
    let mut holding = Holding::new(daemon, log, passphrase).map_err(failed)?;
    let mut program = PathBuf::from(OWN);
    // The newer program, if this one goes on because that one was killed again and again.
    let mut newer = None;
    let clock = Arc::clone(&holding.clock);
    // When the mount was left last, and for how long it is tried to go on with it.
    let (mut left, mut tries) = (Duration::ZERO, TRIES);
    loop {
        let mut served = holding.start(&program).map_err(|error| {
            CliError::Failed(format!("cannot start {}: {error}", program.display()))
        });
        let status = match &mut served {
            Ok(served) => holding.watch(served).map_err(failed)?,
            Err(_) => None,
        };
        let now = clock.monotonic();
        if served.as_ref().is_ok_and(|served| holding.was_killed(served, status, now)) {
            let is_far = holding.things.contains_key(FAR.as_bytes());
            (left, tries) = (now, if is_far { TRIES } else { TRIES_KILLED });
            if let (Ok(mut served), None) = (served, status) {
                // It ends when the next one has answered what it waits for.
                let reaping = std::thread::Builder::new().spawn(move || served.child.wait());
                reaping.map_err(failed)?;
            }
            if holding.deaths >= DEATHS_MAX / 2 && program != Path::new(OWN) {
                tracing::error!(program = %program.display(), "it is killed again and again: the program before goes on");
                newer = Some(std::mem::replace(&mut program, OWN.into()));
            }
            continue;
        }
        // A process that was killed has left its memory in a form that perhaps only its own program
        // can read.
        let is_known = holding.things.contains_key(KNOWN.as_bytes());
        let is_last = served.as_ref().is_ok_and(|served| served.is_last);
        if is_known
            && is_last
            && let Some(newer) = newer.take()
        {
            tracing::error!(program = %newer.display(), "the program before cannot go on: the newer one does");
            program = newer;
            continue;
        }
        let has_time = now < left + tries;
        let needs_itself = is_known && has_time && !is_last && served.is_ok();
        let ended = || status.map_or("it was not started".into(), |status| status.to_string());
        match served {
            Ok(Served { next: Some(next), .. }) => {
                // What it has closed in order is not gone on with from what it had noted.
                holding.if_killed.clear();
                (program, left, tries) = (next, clock.monotonic(), TRIES);
                newer = None;
                if program == Path::new(service::NEXT_START) {
                    match service::leave(&holding.things) {
                        Ok(()) => return Ok(ExitCode::SUCCESS),
                        Err(error) => {
                            tracing::error!(%error, "the next start cannot get the mount")
                        }
                    }
                    program = OWN.into();
                }
            }
            // The program of before can go on: the mount is as that one has left it.
            Ok(Served { is_ready: false, .. }) | Err(_)
                if !holding.things.is_empty() && !needs_itself && program != Path::new(OWN) =>
            {
                tracing::error!(program = %program.display(), ended = ended(), "it does not go on with the mount: the program before does");
                program = OWN.into();
                if is_known {
                    left = now;
                }
            }
            // systemd has the mount yet, and asks for the end of this start.
            Ok(Served { is_ready: false, .. }) if holding.is_to_end && service::has_all() => {
                return Ok(code(status));
            }
            // The store may be away, or the network.
            Ok(Served { is_ready: false, is_last: false, .. })
                if !holding.things.is_empty() && has_time =>
            {
                tracing::error!(
                    ended = ended(),
                    "it does not go on with the mount now: it is tried again, and programs wait"
                );
                if holding.rest().map_err(failed)? {
                    return Ok(code(status));
                }
            }
            Err(error) => return Err(error),
            Ok(Served { is_ready: false, .. }) if !holding.things.is_empty() => {
                let seconds = (clock.monotonic() - left).as_secs();
                tracing::error!(seconds, "no process can go on with the mount: it ends");
                holding.end();
                return Ok(code(status));
            }
            Ok(_) => return Ok(code(status)),
        }
    }
}

fn code(status: Option<ExitStatus>) -> ExitCode {
    match status.and_then(|status| status.code()) {
        Some(code) => u8::try_from(code).map_or(ExitCode::FAILURE, ExitCode::from),
        None => ExitCode::FAILURE,
    }
}

impl Holding {
    fn new(daemon: bool, log: Option<&Path>, passphrase: Option<&Path>) -> io::Result<Self> {
        let (signals, sender) = UnixStream::pair()?;
        for signal in [SIGTERM, SIGINT] {
            signal_hook::low_level::pipe::register(signal, sender.try_clone()?)?;
        }
        // The terminal's end is no reason to end.
        signal_hook::flag::register(SIGHUP, Arc::default())?;
        let listener = new_socket()?;
        let own = getpid().as_raw_nonzero();
        let name = format!("ferry-holder-{own}-{:016x}", Env::real().entropy.next_u64());
        bind(&listener, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
        listen(&listener, 1)?;
        let [log, passphrase] = [log, passphrase].map(|path| path.map(Path::to_owned));
        let things = service::take().map_err(io::Error::other)?;
        let mountpoint = things.get(MOUNTPOINT.as_bytes());
        let next_start = mountpoint.map(|(path, _)| OsString::from_vec(path.clone()));
        let [saying, if_killed] = Default::default();
        let (is_to_end, deaths) = (false, 0);
        let clock = Env::real().clock;
        Ok(Self {
            listener,
            name,
            daemon,
            log,
            passphrase,
            signals,
            is_to_end,
            next_start,
            things,
            saying,
            if_killed,
            deaths,
            clock,
        })
    }

    fn start(&self, program: &Path) -> io::Result<Served> {
        let mut command = Command::new(program);
        command.arg0("ferry").args(std::env::args_os().skip(1)).env(SOCKET, &self.name);
        if let Some(path) = &self.passphrase {
            command.env(passphrase::VARIABLE, path);
        }
        // Ctrl-C reaches the holder, which passes it on: the other one would take it for two.
        let child = command.process_group(0).spawn()?;
        Ok(Served::new(child))
    }

    /// Waits before the next try. Returns whether a signal has asked for the end.
    fn rest(&mut self) -> io::Result<bool> {
        let mut watched = [PollFd::new(&self.signals, PollFlags::IN)];
        match poll(&mut watched, Some(&timespec(REST))) {
            Ok(signalled) => self.is_to_end |= signalled > 0,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(self.is_to_end)
    }

    /// Does what the process asks for, until it has ended. One that is to go on with a mount, and
    /// does not within [`STARTS`], is killed. `None`: it was killed, and has not ended because it
    /// waits for what the next one must answer.
    fn watch(&mut self, served: &mut Served) -> io::Result<Option<ExitStatus>> {
        let pid = Pid::from_child(&served.child);
        let ended = pidfd_open(pid, PidfdFlags::empty())?;
        let clock = Arc::clone(&self.clock);
        let recovers = self.things.contains_key(KNOWN.as_bytes());
        let time = if recovers { RECOVERS } else { STARTS };
        let until = clock.monotonic() + time;
        loop {
            let (listener, signals) = (&self.listener, &self.signals);
            let socket = served.socket.as_ref().map_or(listener.as_fd(), AsFd::as_fd);
            let mut watched = [
                PollFd::new(&socket, PollFlags::IN),
                PollFd::new(signals, PollFlags::IN),
                PollFd::new(&ended, PollFlags::IN),
            ];
            let is_starting = !served.is_ready && !self.things.is_empty();
            let is_stuck = served.is_ending && served.next.is_none() && !self.if_killed.is_empty();
            let left = until.saturating_sub(clock.monotonic());
            let left = is_stuck.then_some(ENDS).or(is_starting.then_some(left)).map(timespec);
            match poll(&mut watched, left.as_ref()) {
                Ok(0) if is_stuck => return Ok(None),
                Ok(0) => {
                    tracing::error!(
                        "it has not gone on with the mount for {} s: it is killed",
                        time.as_secs()
                    );
                    // Another process would take as long for the same.
                    served.is_last |= recovers;
                    let _ended = kill_process(pid, Signal::KILL);
                    return served.child.wait().map(Some);
                }
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            let [says, signalled, has_ended] = watched.map(|one| !one.revents().is_empty());
            if signalled {
                let mut count = [0; 64];
                let _taken = self.signals.read(&mut count)?;
                self.is_to_end = true;
                // One that is to go on with a mount is told when it can end that in order.
                if served.is_ready || !(is_starting || self.next_start.is_some()) {
                    let _ended = kill_process(pid, Signal::TERM);
                } else if service::has_all() && service::restarts_now() {
                    self.leave_to_next_start(served, pid)?;
                    continue;
                }
            }
            // Strangers who connect do not keep it from being found that the process has ended.
            if says && !(has_ended && served.socket.is_none()) {
                // The holder outlives what goes wrong with one process.
                if let Err(error) = self.hear(served, pid) {
                    tracing::warn!(%error, "a message of the serving process");
                    served.socket = None;
                }
            } else if has_ended {
                // Whatever it has said was heard before.
                return served.child.wait().map(Some);
            }
        }
    }

    /// Whether another process is to go on, because this one was killed while it served, or while
    /// it recovered what another one has left that was killed.
    /// `None`: it has closed everything, and still waits in the kernel.
    fn was_killed(&mut self, served: &Served, status: Option<ExitStatus>, now: Duration) -> bool {
        let signal = match status {
            Some(status) if status.signal().is_none() => return false,
            status => status.and_then(|status| status.signal()),
        };
        let recovered = self.if_killed.is_empty() && self.things.contains_key(KNOWN.as_bytes());
        if self.if_killed.is_empty() && !recovered
            || self.is_to_end
            || served.is_last
            || served.next.is_some()
        {
            return false;
        }
        let served_for = if served.is_ready { now - served.since } else { Duration::ZERO };
        let counts = if served_for < AT_ONCE { AT_ONCE_DEATHS } else { 1 };
        let outlived = AT_ONCE_DEATHS.saturating_mul(served_for.as_secs() as u32);
        self.deaths = self.deaths.saturating_sub(outlived) + counts;
        if self.deaths >= DEATHS_MAX {
            tracing::error!(signal, "one process after the other was killed: the mount ends");
            self.end();
            self.things.clear();
            return false;
        }
        tracing::error!(signal, "the serving process was killed: another one goes on");
        if !recovered {
            self.things = std::mem::take(&mut self.if_killed);
        }
        self.saying.clear();
        true
    }

    /// The mount ends, with all requests. A process that was killed may have its descriptor yet,
    /// for it waits for the answer to one of them.
    fn end(&self) {
        [&self.things, &self.if_killed].into_iter().for_each(end);
        service::took();
    }

    /// Kills the process, if systemd has all of the mount yet: the next start gets it.
    fn leave_to_next_start(&mut self, served: &mut Served, pid: Pid) -> io::Result<()> {
        // It answers no request until this is decided.
        kill_process(pid, Signal::STOP)?;
        let how = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let heard = waitid(WaitId::Pid(pid), how).map_err(io::Error::from);
        let heard = heard.and_then(|_| self.hear_all(served, pid));
        let signal = if heard.is_ok() && service::has_all() { Signal::KILL } else { Signal::CONT };
        if let Err(error) = heard {
            tracing::warn!(%error, "it is told to end when it serves");
        }
        Ok(kill_process(pid, signal)?)
    }

    /// Hears what a process that is stopped has said before.
    fn hear_all(&mut self, served: &mut Served, pid: Pid) -> io::Result<()> {
        while let Some(socket) = &served.socket {
            let mut says = [PollFd::new(socket, PollFlags::IN)];
            match poll(&mut says, Some(&timespec(Duration::ZERO))) {
                Ok(0) => break,
                Ok(_) => self.hear(served, pid)?,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Ends the process, for a signal that has come before it was ready. systemd runs no
    /// `ExecStop=` for a unit that has not started yet: so that is done here.
    fn stop(&self, pid: Pid) -> io::Result<()> {
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        let leave = self.next_start.as_deref().and_then(service::exec_stop);
        let body = move || {
            if let Some(Err(error)) = leave.map(|mut command| command.status()) {
                tracing::warn!(%error, "the next start makes the mount anew");
            }
            // It has ended if the mount is left to the next start.
            let _ended = pidfd_send_signal(&process, Signal::TERM);
        };
        std::thread::Builder::new().name("ferry-stop".into()).spawn(body).map(drop)
    }

    fn hear(&mut self, served: &mut Served, pid: Pid) -> io::Result<()> {
        let Some(socket) = &served.socket else {
            let socket = accept_with(&self.listener, SocketFlags::CLOEXEC)?;
            served.socket = is_of(&socket, pid)?.then_some(socket);
            return Ok(());
        };
        let Some(message) = receive(socket)? else {
            (served.socket, served.is_ending) = (None, true);
            return Ok(());
        };
        let (word, rest) = message.split();
        match word {
            b"ask" => {
                for (name, (rest, descriptor)) in &self.things {
                    send(socket, &[b"held", name, rest], descriptor.as_ref())?;
                }
                send(socket, &[b"end"], None)?;
            }
            b"hold" => {
                let what = Message { bytes: rest.to_vec(), descriptor: message.descriptor };
                let (name, rest) = what.split();
                self.things.insert(name.to_vec(), (rest.to_vec(), what.descriptor));
            }
            b"keep" => {
                let what = Message { bytes: rest.to_vec(), descriptor: message.descriptor };
                let (name, rest) = what.split();
                self.saying.insert(name.to_vec(), (rest.to_vec(), what.descriptor));
            }
            b"serving" => {
                // What the process before has left is used from now on.
                self.things.clear();
                service::took();
                self.if_killed = std::mem::take(&mut self.saying);
            }
            // What the process before has left is older from now on, also in systemd.
            b"begins" => {
                self.things.clear();
                service::took();
            }
            b"never" => served.is_last = true,
            b"next" => served.next = Some(OsStr::from_bytes(rest).into()),
            b"notify" => starter::notify_systemd(&String::from_utf8_lossy(rest)),
            b"ready" => {
                (served.is_ready, served.since) = (true, self.clock.monotonic());
                self.things.clear();
                service::took();
                // It may have come while no process was there to take it.
                if self.is_to_end {
                    self.stop(pid)?;
                }
                if self.daemon {
                    logging::detach(self.log.as_deref())?;
                    starter::leave()?;
                }
            }
            _ => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A holder whose processes have noted something.
    fn holding(things: HeldThings) -> Holding {
        let (signals, _) = UnixStream::pair().expect("two sockets");
        let [saying, if_killed] = Default::default();
        Holding {
            listener: new_socket().expect("a socket"),
            name: String::new(),
            daemon: false,
            log: None,
            passphrase: None,
            signals,
            is_to_end: false,
            next_start: None,
            things,
            saying,
            if_killed,
            deaths: 0,
            clock: Env::real().clock,
        }
    }

    /// A process that has not served yet.
    fn starting() -> Served {
        let mut child = Command::new("true").spawn().expect("it runs");
        child.wait().expect("it ends");
        Served::new(child)
    }

    const KILLED: i32 = 9;
    const FAILED: i32 = 1 << 8;

    fn known() -> HeldThings {
        HeldThings::from([(KNOWN.as_bytes().to_vec(), (Vec::new(), None))])
    }

    #[test]
    fn a_process_that_is_killed_while_it_recovers_is_followed_by_another_one_some_times() {
        let (mut holding, starting) = (holding(known()), starting());
        let [killed, failed] = [KILLED, FAILED].map(|status| Some(ExitStatus::from_raw(status)));
        assert!(!holding.was_killed(&starting, failed, Duration::ZERO));
        let mut deaths = 0;
        // Each recovery takes longer than a start is tried.
        while holding.was_killed(&starting, killed, TRIES_KILLED * 2 * deaths) {
            assert!(holding.things.contains_key(KNOWN.as_bytes()), "the next one needs it");
            deaths += 1;
        }
        assert_eq!(deaths, DEATHS_MAX / AT_ONCE_DEATHS);
        assert!(holding.things.is_empty(), "the mount has ended");
    }

    #[test]
    fn a_process_that_was_killed_before_it_had_a_mount_is_followed_by_none() {
        let (mut holding, mut starting) = (holding(HeldThings::new()), starting());
        let killed = Some(ExitStatus::from_raw(KILLED));
        assert!(!holding.was_killed(&starting, killed, Duration::ZERO));
        holding.things = known();
        starting.is_last = true;
        assert!(!holding.was_killed(&starting, killed, Duration::ZERO), "it has said so");
    }
}
