//! `ferry clients` and `ferry evict`: servers of this machine are asked over a Unix socket in the abstract name space, which leaves
//! no file behind; the kernel says who speaks. A line asks, JSON answers.

use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use ferry_net::Control;
use serde_json::Value;

use crate::cli::{ClientsArgs, EvictArgs};
use crate::error::CliError;
use crate::table;

/// Names of the sockets, before the process number.
const PREFIX: &str = "ferry-serve-";
/// Neither side waits longer for the other.
const TIME_MAX: Duration = Duration::from_secs(10);
/// Bytes of a question, which ends with a line's end.
const QUESTION_MAX: usize = 1024;

/// Answers from now on, in a thread that lives as long as the process.
pub fn answer(control: Control, volume: &Path, address: SocketAddr) -> io::Result<()> {
    let volume = std::path::absolute(volume)?.display().to_string();
    let name = format!("{PREFIX}{}", std::process::id());
    let listener = UnixListener::bind_addr(&UnixAddr::from_abstract_name(name)?)?;
    std::thread::Builder::new().name("ferry-control".into()).spawn(move || {
        for stream in listener.incoming().flatten() {
            if let Err(error) = answer_one(&control, &volume, address, stream) {
                tracing::debug!(%error, "a question about clients");
            }
        }
    })?;
    Ok(())
}

fn answer_one(
    control: &Control,
    volume: &str,
    address: SocketAddr,
    mut stream: UnixStream,
) -> io::Result<()> {
    bound(&stream)?;
    let answer = if !is_trusted(&stream)? {
        object([("error", "only the server's own user and root may ask".into())])
    } else {
        let question = line(&mut stream)?;
        match question.split_once(' ') {
            None if question == "clients" => {
                let address = address.to_string();
                object([
                    ("volume", volume.into()),
                    ("address", address.into()),
                    ("clients", control.clients()),
                ])
            }
            Some(("evict", client)) => object([("evicted", control.evict(client).into())]),
            _ => object([("error", "another version of ferry asks".into())]),
        }
    };
    stream.write_all(answer.to_string().as_bytes())
}

fn object<const N: usize>(members: [(&str, Value); N]) -> Value {
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

/// The servers' sockets, without the leading zero byte of their names.
fn servers() -> Result<BTreeSet<String>, CliError> {
    let path = Path::new("/proc/net/unix");
    let table = std::fs::read_to_string(path).map_err(CliError::path(path, "cannot look for servers"))?;
    let names = table.lines().filter_map(|line| line.rsplit_once(" @").map(|(_, name)| name));
    Ok(names.filter(|name| name.starts_with(PREFIX)).map(str::to_owned).collect())
}

/// Asks one server; `None`: it is gone, or another user's.
fn ask(name: &str, question: &str) -> Option<Value> {
    let asked = || -> io::Result<Value> {
        let mut stream = UnixStream::connect_addr(&UnixAddr::from_abstract_name(name)?)?;
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
    };
    asked().inspect_err(|error| eprintln!("ferry: the server at {name} does not answer: {error}")).ok()
}

/// `ferry clients`.
pub fn show(args: &ClientsArgs) -> Result<(), CliError> {
    let answers: Vec<Value> = servers()?.iter().filter_map(|name| ask(name, "clients")).collect();
    let mut text = String::new();
    if args.json {
        text = format!("{:#}\n", Value::from(answers));
    } else if answers.is_empty() {
        text.push_str("no server runs here (`ferry serve`)\n");
    } else {
        for server in &answers {
            text.push_str(&for_people(server));
        }
    }
    io::stdout().write_all(text.as_bytes()).map_err(CliError::path("stdout", "cannot write"))
}

fn for_people(server: &Value) -> String {
    let of = |key: &str| server[key].as_str().unwrap_or_default().to_owned();
    let mut text = format!("{} at {}\n", of("volume"), of("address"));
    let clients = server["clients"].as_array().map(Vec::as_slice).unwrap_or_default();
    if clients.is_empty() {
        text.push_str("  no clients\n");
    }
    for client in clients {
        let title = format!("{} {}", client["client"], client["name"].as_str().unwrap_or_default());
        text.push_str(&table::render(&object([(title.as_str(), client.clone())])));
    }
    text
}

/// `ferry evict`.
pub fn evict(args: &EvictArgs) -> Result<(), CliError> {
    let volume = args.volume.as_deref().map(shown).transpose()?;
    let is_meant = |client: &Value| {
        client["name"].as_str() == Some(&args.client) || client["client"].as_u64() == args.client.parse().ok()
    };
    let has = |name: &String| {
        ask(name, "clients").is_some_and(|server| {
            volume.as_deref().is_none_or(|volume| server["volume"] == volume)
                && server["clients"].as_array().is_some_and(|clients| clients.iter().any(is_meant))
        })
    };
    let servers: Vec<String> = servers()?.into_iter().filter(has).collect();
    let [server] = &servers[..] else {
        let why = if servers.is_empty() { "no client is" } else { "clients of several servers are" };
        let what = if servers.is_empty() { "" } else { ", and give --volume" };
        return Err(CliError::Failed(format!("{why} called {:?}: see `ferry clients`{what}", args.client)));
    };
    let answer = ask(server, &format!("evict {}", args.client));
    match answer.and_then(|answer| answer["evicted"].as_u64()) {
        Some(evicted) if evicted > 0 => {
            println!("evicted: {evicted}");
            Ok(())
        }
        _ => Err(CliError::Failed(format!("{} was not evicted: it has just gone", args.client))),
    }
}

/// A volume's path as servers show it.
fn shown(volume: &Path) -> Result<String, CliError> {
    let path = std::path::absolute(volume).map_err(CliError::path(volume, "no path"))?;
    Ok(path.display().to_string())
}
