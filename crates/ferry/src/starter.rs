//! What a daemon has to do with the process that starts it, and with systemd.

use std::io::{self, BufRead, BufReader, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};

use crate::error::CliError;
use crate::logging;
use crate::waiting::timespec;

/// What a daemon prints when the mount can be used.
const READY: &str = "ready";

/// A process may take so long to open a file.
const OPENS: Duration = Duration::from_secs(5);

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

/// This program, to be started as one that uses a mount (`go_on`).
fn asking(mountpoint: &Path) -> Command {
    let mut asking = Command::new("/proc/self/exe");
    asking.arg0("ferry").arg("ask").arg(mountpoint);
    asking
}

/// Starts this program as one that makes a request to a mount on each core.
pub fn ask_on_each_core(mountpoint: &Path) -> io::Result<()> {
    await_end(asking(mountpoint).stdin(Stdio::null()).stdout(Stdio::null()).spawn()?)
}

/// Waits for the end of a process that uses the mount, in a thread of its own.
fn await_end(mut process: Child) -> io::Result<()> {
    let waiting = std::thread::Builder::new().name("ask".into());
    waiting.spawn(move || process.wait()).map(drop)
}

/// A file without a name that a process of its own has open on a mount, until this is dropped.
pub struct OpenFile {
    /// Its number.
    pub ino: u64,
    /// The process ends with its input.
    _input: Option<ChildStdin>,
}

impl OpenFile {
    /// Starts the process.
    pub fn start(mountpoint: &Path) -> io::Result<Self> {
        let mut process = asking(mountpoint)
            .arg("--open")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let (_input, output) = (process.stdin.take(), process.stdout.take());
        // The close of its file is for the process that goes on.
        await_end(process)?;
        let number = line(output, OPENS)?;
        let ino = number.parse().map_err(|_| io::Error::from(io::ErrorKind::UnexpectedEof))?;
        Ok(Self { ino, _input })
    }
}

/// The first line that a process prints, in this time.
fn line(output: Option<ChildStdout>, time: Duration) -> io::Result<String> {
    let output = output.ok_or(io::ErrorKind::UnexpectedEof)?;
    let mut says = [PollFd::new(&output, PollFlags::IN)];
    if poll(&mut says, Some(&timespec(time)))? == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let mut line = String::new();
    BufReader::new(output).read_line(&mut line)?;
    Ok(line.trim_end().into())
}

/// The first line of a program that ends by itself in this time, and whether it has succeeded.
pub fn first_line(program: &mut Command, time: Duration) -> io::Result<(String, bool)> {
    let mut process = program.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let ended = pidfd_open(Pid::from_child(&process), PidfdFlags::empty())?;
    let mut has_ended = [PollFd::new(&ended, PollFlags::IN)];
    if poll(&mut has_ended, Some(&timespec(time)))? == 0 {
        process.kill()?;
        process.wait()?;
        return Err(io::ErrorKind::TimedOut.into());
    }
    let succeeded = process.wait()?.success();
    Ok((line(process.stdout.take(), Duration::ZERO)?, succeeded))
}

/// Prepares a daemon, or its holder.
pub fn prepare(daemon: bool) {
    if daemon {
        if let Err(error) = rustix::process::setsid() {
            tracing::debug!(%error, "no session of its own");
        }
        end_with_starter();
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

/// Tells the process that started this one that the mount can be used. From here on this one ends
/// by itself, or by a signal.
pub fn leave() -> io::Result<()> {
    if let Err(error) = rustix::process::set_parent_process_death_signal(None) {
        tracing::debug!(%error, "PR_SET_PDEATHSIG");
    }
    let mut out = std::io::stdout().lock();
    writeln!(out, "{READY}").and_then(|()| out.flush())?;
    drop(out);
    leave_terminal()
}

/// From here on a daemon uses neither the caller's directory nor its terminal. What it says goes to
/// its log.
pub fn leave_terminal() -> io::Result<()> {
    rustix::process::chdir("/")?;
    let null = std::fs::OpenOptions::new().write(true).open("/dev/null")?;
    Ok(rustix::stdio::dup2_stdout(&null)?)
}

/// As sd_notify(3): sends one datagram to the socket that systemd names. Without systemd nothing
/// happens.
pub fn notify_systemd(state: &str) {
    let sent = systemd().and_then(|socket| match socket {
        Some(socket) => socket.send(state.as_bytes()).map(drop),
        None => Ok(()),
    });
    if let Err(error) = sent {
        tracing::warn!(%error, "cannot notify systemd");
    }
}

/// The socket at which systemd listens to this process.
pub fn systemd() -> io::Result<Option<UnixDatagram>> {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return Ok(None) };
    let address = match name.as_encoded_bytes() {
        [b'@', rest @ ..] => SocketAddr::from_abstract_name(rest),
        _ => SocketAddr::from_pathname(&name),
    }?;
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(&address)?;
    Ok(Some(socket))
}
