//! Control requests to a served volume, which has no mount on this machine: `ferry serve` answers
//! them over a [`socket`]. They are the same as those of a mount ([`ferry_fs::ioctl`]), and
//! `LocalFs` answers both.

use std::hash::Hasher;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Weak;

use ferry_fs::{Errno, Filesystem, InProcess, LocalFs, ROOT, ioctl};
use ferry_net::Control;
use serde_json::Value;
use siphasher::sip::SipHasher13;

use crate::error::CliError;
use crate::location::Location;
use crate::spaced::Walks;
use crate::{mounts, profiled, socket};

/// Prefix of the sockets' names. A hash of the volume's path and the process number follow: one
/// server may be ending while the next one of the same volume answers.
const PREFIX: &str = "ferry-volume-";
/// The question whether the server has the volume.
const ALIVE: &str = "alive";
/// The most bytes of an answer. A socket carries more than an ioctl.
const ANSWER_MAX: usize = 1 << 20;

/// Answers requests from now on, for as long as somebody holds the file system. A caller that may
/// ask (`socket`) may ask for anything. The statistics have the server's own beside those of the
/// volume.
pub fn answer(volume: &Location, fs: Weak<LocalFs>, server: Control) -> io::Result<()> {
    let path = volume.path().map_or_else(|| volume.identity(), Path::canonicalize)?;
    let name = format!("{}{}", prefix(&path), std::process::id());
    let walks = Walks::new(fs.clone());
    socket::answer_each(&name, move |question, stream| {
        if let Some(time) = profiled::time_of(question) {
            return profiled::profile(stream, time, &|| Value::Null);
        }
        let fs = fs.upgrade()?;
        if question == ALIVE {
            return Some(socket::object([("alive", true.into())]));
        }
        if let Some(answer) = walks.answer(question) {
            return Some(answer);
        }
        let (request, message) = serde_json::from_str::<(u32, Vec<u8>)>(question).ok()?;
        let answer =
            InProcess::default().call(|cx| fs.ioctl(cx, ROOT, request, &message, ANSWER_MAX));
        let answer = match answer {
            Ok(stats) if request == ioctl::STATS => {
                with_server(&stats, &server).map_err(|_| Errno(libc::EIO))
            }
            other => other,
        };
        Some(match answer {
            Ok(bytes) => socket::object([("answer", bytes.into())]),
            Err(error) => socket::object([("errno", error.0.into())]),
        })
    })
}

/// The socket of the server that has this volume. `None`: no server has it. An error: a server has
/// it and does not answer, or not to this user.
pub fn at(volume: &Location) -> Result<Option<String>, CliError> {
    if !is_any()? {
        return Ok(None);
    }
    let unknown = |e| CliError::path(volume.to_string(), "cannot open")(e);
    // A mount point is no volume, and looking at it would wait for its daemon.
    if let Some(path) = volume.path() {
        let absolute = std::path::absolute(path).map_err(unknown)?;
        if mounts::at(&absolute).is_ok_and(|mount| mount.is_some()) {
            return Ok(None);
        }
    }
    let resolved = volume.identity().map_err(unknown)?;
    let mut silent = None;
    for name in socket::names(&prefix(&resolved))? {
        match socket::ask(&name, ALIVE) {
            Ok(_) => return Ok(Some(name)),
            Err(error) => silent = Some((name, error)),
        }
    }
    let Some((name, error)) = silent else { return Ok(None) };
    let pid = socket::printable(name.rsplit_once('-').map_or("?", |(_, pid)| pid));
    let why = match error.kind() {
        _ if socket::is_silence(&error) => {
            format!(
                "has not answered for {} s: it is stopped, or hangs",
                socket::TIME_MAX.as_secs()
            )
        }
        // The server has ended meanwhile.
        io::ErrorKind::ConnectionRefused => return Ok(None),
        _ => format!("does not answer: {error}"),
    };
    Err(CliError::Failed(format!("{volume}: its server (process {pid}) {why}")))
}

/// Whether a server runs on this machine.
pub fn is_any() -> Result<bool, CliError> {
    Ok(!socket::names(PREFIX)?.is_empty())
}

/// Sends a request to the server at a socket, and waits for as long as it takes.
pub fn ask(socket: &str, request: u32, message: &[u8]) -> io::Result<Vec<u8>> {
    let mut answer = socket::ask_patiently(socket, &question(request, message))?;
    Ok(serde_json::from_value(answer["answer"].take())?)
}

fn question(request: u32, message: &[u8]) -> String {
    Value::from(vec![Value::from(request), Value::from(message)]).to_string()
}

/// The statistics of the volume that a process serves. `None`: it does not answer in time.
pub fn stats_of(process: u64) -> Option<Value> {
    let asked = |name: String| socket::ask(&name, &question(ioctl::STATS, &[])).ok();
    let mut answer = sockets_of(process).into_iter().find_map(asked)?;
    let bytes: Vec<u8> = serde_json::from_value(answer["answer"].take()).ok()?;
    serde_json::from_slice(&bytes).ok()
}

/// The sockets that say that they are of this process. Any user may bind a name with any number in
/// it.
pub fn sockets_of(process: u64) -> Vec<String> {
    let id = process.to_string();
    let ours = |name: &String| name.rsplit_once('-').is_some_and(|(_, number)| number == id);
    socket::names(PREFIX).map_or_else(|_| Vec::new(), |all| all.into_iter().filter(ours).collect())
}

/// The statistics of a volume together with those of its server.
fn with_server(stats: &[u8], server: &Control) -> serde_json::Result<Vec<u8>> {
    let text = stats.split(|byte| *byte == 0).next().unwrap_or_default();
    let mut stats: Value = serde_json::from_slice(text)?;
    add_server(&mut stats, server);
    serde_json::to_vec(&stats)
}

/// The same, of a volume that this process has.
pub fn stats(fs: &LocalFs, server: &Control) -> Value {
    let mut stats = fs.stats();
    add_server(&mut stats, server);
    stats
}

fn add_server(stats: &mut Value, server: &Control) {
    let (leases, write_leases) = server.leases();
    stats["server"]["sessions"] = server.sessions().into();
    stats["server"]["leases"] = leases.into();
    stats["server"]["write_leases"] = write_leases.into();
    stats["server"]["refused"] = server.refused();
    stats["server"]["certificate_until_secs"] = server.certificate_until().into();
}

fn prefix(volume: &Path) -> String {
    let mut hasher = SipHasher13::new();
    hasher.write(volume.as_os_str().as_bytes());
    format!("{PREFIX}{:016x}-", hasher.finish())
}
