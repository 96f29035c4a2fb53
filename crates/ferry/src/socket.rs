//! Questions to another process of this machine, over a Unix socket in the abstract name space, which leaves no file behind; the kernel
//! says who speaks. A line asks, JSON answers.

use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use crate::error::CliError;

/// Neither side waits longer for the other.
const TIME_MAX: Duration = Duration::from_secs(10);
/// Bytes of a question, which ends with a line's end.
const QUESTION_MAX: usize = 1024;

/// Answers under that name from now on, in a thread that lives as long as the process. `None`: the question is not understood.
pub fn answer(name: &str, answer: impl Fn(&str) -> Option<Value> + Send + 'static) -> io::Result<()> {
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
    std::thread::Builder::new().name("ferry-control".into()).spawn(move || {
        for stream in listener.incoming().flatten() {
            if let Err(error) = answer_one(&answer, stream) {
                tracing::debug!(%error, "a question of another process");
            }
        }
    })?;
    Ok(())
}

fn answer_one(answer: &impl Fn(&str) -> Option<Value>, mut stream: UnixStream) -> io::Result<()> {
    bound(&stream)?;
    let answer = if is_trusted(&stream)? {
        answer(&line(&mut stream)?)
            .unwrap_or_else(|| object([("error", "another version of ferry asks".into())]))
    } else {
        object([("error", "only its own user and root may ask".into())])
    };
    stream.write_all(answer.to_string().as_bytes())
}

/// Names that begin like this, under which somebody answers.
pub fn names(prefix: &str) -> Result<BTreeSet<String>, CliError> {
    let path = Path::new("/proc/net/unix");
    let table = std::fs::read_to_string(path).map_err(CliError::path(path, "cannot look for processes"))?;
    let names = table.lines().filter_map(|line| line.rsplit_once(" @").map(|(_, name)| name));
    Ok(names.filter(|name| name.starts_with(prefix)).map(str::to_owned).collect())
}

/// Asks whoever answers under that name, if it is of this user or root's.
pub fn ask(name: &str, question: &str) -> io::Result<Value> {
    let mut stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)?;
    bound(&stream)?;
    if !is_trusted(&stream)? {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    writeln!(stream, "{question}")?;
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    let answer: Value = serde_json::from_slice(&answer)?;
    match answer["error"].as_str() {
        Some(error) => Err(io::Error::other(error.to_owned())),
        None => Ok(answer),
    }
}

/// A JSON object of these members.
pub fn object<const N: usize>(members: [(&str, Value); N]) -> Value {
    Value::from_iter(members)
}

/// A question, without the end of its line.
fn line(stream: &mut UnixStream) -> io::Result<String> {
    let mut bytes = Vec::new();
    stream.take(QUESTION_MAX as u64).read_to_end(&mut bytes)?;
    let text = String::from_utf8(bytes).map_err(|_| io::ErrorKind::InvalidData)?;
    text.strip_suffix('\n').map(str::to_owned).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn bound(stream: &UnixStream) -> io::Result<()> {
    stream.set_read_timeout(Some(TIME_MAX))?;
    stream.set_write_timeout(Some(TIME_MAX))
}

/// Whether root or this process's own user is at the other end.
fn is_trusted(stream: &UnixStream) -> io::Result<bool> {
    let peer = rustix::net::sockopt::socket_peercred(stream)?.uid;
    Ok(peer.is_root() || peer == rustix::process::geteuid())
}
