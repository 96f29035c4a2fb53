//! `ferry clients` and `ferry evict`: servers of this machine are asked over a [`socket`].

use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::Path;

use ferry_net::Control;
use serde_json::Value;

use crate::cli::{ClientsArgs, EvictArgs};
use crate::error::CliError;
use crate::{socket, table};

/// Names of the sockets, before the process number.
pub const PREFIX: &str = "ferry-serve-";

/// Answers from now on, in a thread that lives as long as the process.
pub fn answer(control: Control, volume: &Path, address: SocketAddr) -> io::Result<()> {
    let volume = std::path::absolute(volume)?.display().to_string();
    let address = address.to_string();
    socket::answer(&format!("{PREFIX}{}", std::process::id()), move |question| {
        match question.split_once(' ') {
            None if question == "clients" => Some(socket::object([
                ("volume", volume.clone().into()),
                ("address", address.clone().into()),
                ("clients", control.clients()),
            ])),
            Some(("evict", client)) => Some(socket::object([("evicted", control.evict(client).into())])),
            _ => None,
        }
    })
}

/// Asks one server; `None`: it is gone, or another user's.
fn ask(name: &str, question: &str) -> Option<Value> {
    let answer = socket::ask(name, question);
    answer.inspect_err(|error| eprintln!("ferry: the server at {name} does not answer: {error}")).ok()
}

/// `ferry clients`.
pub fn show(args: &ClientsArgs) -> Result<(), CliError> {
    let answers: Vec<Value> = socket::names(PREFIX)?.iter().filter_map(|name| ask(name, "clients")).collect();
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
        text.push_str(&table::render(&socket::object([(title.as_str(), client.clone())])));
    }
    text
}

/// `ferry evict`.
pub fn evict(args: &EvictArgs) -> Result<(), CliError> {
    let volume = args.volume.as_deref().map(shown).transpose()?;
    let is_meant = |client: &Value| {
        let named = ["name", "certificate"].iter().any(|key| client[key].as_str() == Some(&args.client));
        named || client["client"].as_u64() == args.client.parse().ok()
    };
    let has = |name: &String| {
        ask(name, "clients").is_some_and(|server| {
            volume.as_deref().is_none_or(|volume| server["volume"] == volume)
                && server["clients"].as_array().is_some_and(|clients| clients.iter().any(is_meant))
        })
    };
    let servers: Vec<String> = socket::names(PREFIX)?.into_iter().filter(has).collect();
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
