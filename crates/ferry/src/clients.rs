//! `ferry clients` and `ferry evict`: ask the servers of this machine over a [`socket`].

use std::io::{self, Write};
use std::net::SocketAddr;

use ferry_net::{Control, VERSION};
use serde_json::Value;

use crate::cli::{ClientsArgs, EvictArgs};
use crate::error::CliError;
use crate::location::Location;
use crate::{socket, table};

/// Prefix of the sockets' names; the process number follows.
pub const PREFIX: &str = "ferry-serve-";

/// Answers questions from now on, in a thread that lives as long as the process.
pub fn answer(control: Control, volume: &Location, address: SocketAddr) -> io::Result<()> {
    let volume = printed_as(volume)?;
    let address = address.to_string();
    socket::answer(&format!("{PREFIX}{}", std::process::id()), move |question| {
        match question.split_once(' ') {
            None if question == "clients" => Some(socket::object([
                ("volume", volume.clone().into()),
                ("address", address.clone().into()),
                ("clients", control.clients()),
                ("refused", control.refused()),
            ])),
            Some(("evict", client)) => {
                Some(socket::object([("evicted", control.evict(client).into())]))
            }
            _ => None,
        }
    })
}

/// Asks one server; `None`: it has ended, or belongs to another user.
fn ask(name: &str, question: &str) -> Option<Value> {
    let answer = socket::ask(name, question);
    answer
        .inspect_err(|error| {
            eprintln!("ferry: the server at {} does not answer: {error}", socket::printable(name))
        })
        .ok()
}

/// The servers of this machine: what `of` makes of the name of its socket, and of its clients;
/// `None`: it has ended, or belongs to another user.
pub fn servers<T: Send>(of: impl Fn(&str, Option<Value>) -> T + Sync) -> Result<Vec<T>, CliError> {
    let names: Vec<String> = socket::names(PREFIX)?.into_iter().collect();
    Ok(socket::ask_each(&names, |name| of(name, ask(name, "clients"))))
}

/// Runs `ferry clients`.
pub fn show(args: &ClientsArgs) -> Result<(), CliError> {
    let answers: Vec<Value> = servers(|_, answer| answer)?.into_iter().flatten().collect();
    let mut text = String::new();
    if args.json {
        text = format!("{:#}\n", Value::from(answers));
    } else if answers.is_empty() {
        text.push_str("no server runs here (`ferry serve`)\n");
    } else {
        for server in &answers {
            text.push_str(&for_people(server, args.details));
        }
    }
    io::stdout().write_all(text.as_bytes()).map_err(CliError::path("stdout", "cannot write"))
}

/// The columns of a client's line.
const COLUMNS: [&str; 7] =
    ["client", "name", "certificate", "address", "path", "state", "oldest change"];

fn cells(client: &Value) -> [String; 7] {
    let text = |key: &str| socket::printable(client[key].as_str().unwrap_or("-"));
    let state = if client["connected"] == true { "connected" } else { "away" };
    let read_only = if client["read_only"] == true { ", ro" } else { "" };
    let oldest =
        match (client["oldest_ms"].as_u64(), client["unanswered"].as_u64().unwrap_or_default()) {
            (Some(ms), unanswered) => {
                format!("{}.{} s of {unanswered}", ms / 1000, ms % 1000 / 100)
            }
            (None, _) => "-".into(),
        };
    let number = client["client"].to_string();
    let older = client["protocol"].as_u64().filter(|version| *version != u64::from(VERSION));
    let older = older.map(|version| format!(", protocol {version}")).unwrap_or_default();
    let state = format!("{state}{read_only}{older}");
    [number, text("name"), text("certificate"), text("address"), text("path"), state, oldest]
}

/// A line for each client, under the columns' names.
fn lines(clients: &[Value]) -> String {
    let rows: Vec<_> =
        std::iter::once(COLUMNS.map(str::to_owned)).chain(clients.iter().map(cells)).collect();
    table::lines(&rows, "  ")
}

fn for_people(server: &Value, details: bool) -> String {
    let of = |key: &str| socket::printable(server[key].as_str().unwrap_or_default());
    let mut text = format!("{} at {}\n", of("volume"), of("address"));
    let clients = server["clients"].as_array().map(Vec::as_slice).unwrap_or_default();
    if clients.is_empty() {
        text.push_str("  no clients\n");
    }
    if !details && !clients.is_empty() {
        text.push_str(&lines(clients));
    }
    for client in clients.iter().filter(|_| details) {
        let name = socket::printable(client["name"].as_str().unwrap_or_default());
        let title = format!("{} {name}", client["client"]);
        text.push_str(&table::render(&socket::object([(title.as_str(), client.clone())])));
    }
    let refused = server["refused"].as_object().into_iter().flatten();
    let refused =
        refused.filter_map(|(cause, times)| Some((cause, times.as_u64().filter(|n| *n > 0)?)));
    let refused: Vec<String> = refused.map(|(cause, times)| format!("{cause} {times}")).collect();
    if !refused.is_empty() {
        text.push_str(&format!("  refused: {}\n", refused.join(", ")));
    }
    text
}

/// Runs `ferry evict`.
pub fn evict(args: &EvictArgs) -> Result<(), CliError> {
    let name = |volume| printed_as(volume).map_err(CliError::path(volume.to_string(), "no path"));
    let volume = args.volume.as_ref().map(name).transpose()?;
    let is_meant = |client: &Value| {
        let named =
            ["name", "certificate"].iter().any(|key| client[key].as_str() == Some(&args.client));
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
        let why =
            if servers.is_empty() { "no client is" } else { "clients of several servers are" };
        let what = if servers.is_empty() { "" } else { ", and give --volume" };
        return Err(CliError::Failed(format!(
            "{why} called {:?}: see `ferry clients`{what}",
            args.client
        )));
    };
    let answer = ask(server, &format!("evict {}", args.client));
    match answer.and_then(|answer| answer["evicted"].as_u64()) {
        Some(evicted) if evicted > 0 => {
            println!("evicted: {evicted}");
            Ok(())
        }
        _ => Err(CliError::Failed(format!(
            "{} was not evicted: it has just disconnected",
            args.client
        ))),
    }
}

/// Where a volume lies, as servers show it.
fn printed_as(volume: &Location) -> io::Result<String> {
    let name = volume.path().map_or_else(|| volume.resolved(), std::path::absolute)?;
    Ok(name.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_one_line_unless_details_are_asked_for() {
        let client =
            |number: u64, certificate: Option<&str>, connected: bool, oldest: Option<u64>| {
                socket::object([
                    ("client", number.into()),
                    ("name", "laptop".into()),
                    ("certificate", certificate.into()),
                    ("address", connected.then_some("10.0.0.7:5555").into()),
                    ("path", "/home".into()),
                    ("read_only", (!connected).into()),
                    ("connected", connected.into()),
                    ("unanswered", 3.into()),
                    ("oldest_ms", oldest.into()),
                ])
            };
        let clients =
            vec![client(1, Some("alice"), true, Some(1260)), client(12, None, false, None)];
        let server = socket::object([
            ("volume", "/v".into()),
            ("address", "10.0.0.1:7373".into()),
            ("clients", clients.into()),
            ("refused", socket::object([("certificate_revoked", 3.into()), ("version", 0.into())])),
        ]);
        let expected = "\
/v at 10.0.0.1:7373
  client  name    certificate  address        path   state      oldest change
  1       laptop  alice        10.0.0.7:5555  /home  connected  1.2 s of 3
  12      laptop  -            -              /home  away, ro   -
  refused: certificate_revoked 3
";
        assert_eq!(for_people(&server, false), expected);
        let details = for_people(&server, true);
        assert!(details.contains("oldest_ms") || details.contains("oldest ms"), "{details}");
    }
}
