//! `ferry clients` and `ferry evict`: ask the servers of this machine over a [`socket`].

use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use ferry_net::{Control, VERSION};
use parking_lot::Mutex;
use rustix::process::Uid;
use serde_json::Value;

use crate::cli::{ClientsArgs, EvictArgs};
use crate::control::print;
use crate::error::CliError;
use crate::location::Location;
use crate::{mounts, socket, table};

/// Prefix of the sockets' names; the process number follows.
pub const PREFIX: &str = "ferry-serve-";

/// The role of a server that waits for the volume, and of one that has it.
pub const STANDS_BY: &str = "stands by";
pub const SERVES: &str = "serves";
/// The question that asks a server to let another one take the volume.
pub const RELEASE: &str = "release";

/// What a server does.
pub enum Role {
    /// Another one has the volume, as far as is known: this one.
    StandsBy(Option<String>),
    /// It serves. A caller that asks it to release the volume is told whether it will.
    Serves(Control, Box<dyn Fn() -> bool + Send>),
}

impl Role {
    fn said(&self) -> (&'static str, Value, Value, Value) {
        match self {
            Self::StandsBy(owner) => {
                (STANDS_BY, owner.clone().into(), Value::Array(Vec::new()), Value::Null)
            }
            Self::Serves(control, _) => (SERVES, Value::Null, control.clients(), control.refused()),
        }
    }
}

/// Answers questions from now on, in a thread that lives as long as the process.
pub fn answer(role: Arc<Mutex<Role>>, volume: &Location, address: SocketAddr) -> io::Result<()> {
    let volume = printed_as(volume)?;
    let address = address.to_string();
    socket::answer(&format!("{PREFIX}{}", std::process::id()), move |question| {
        let role = role.lock();
        match (question.split_once(' '), &*role) {
            (None, role) if question == "clients" => {
                let (does, owner, clients, refused) = role.said();
                Some(socket::object([
                    ("volume", volume.clone().into()),
                    ("address", address.clone().into()),
                    ("role", does.into()),
                    ("owner", owner),
                    ("clients", clients),
                    ("refused", refused),
                ]))
            }
            (None, Role::Serves(_, release)) if question == RELEASE => {
                Some(socket::object([("released", release().into())]))
            }
            (Some(("evict", client)), Role::Serves(control, _)) => {
                Some(socket::object([("evicted", control.evict(client).into())]))
            }
            _ => None,
        }
    })
}

/// What a server says.
pub enum Said {
    Answer(Value),
    /// It answers others: root, or its own user.
    Closed,
    /// It does not answer.
    Nothing,
    /// It has just ended.
    Ended,
}

impl Said {
    pub fn answer(self) -> Option<Value> {
        match self {
            Self::Answer(answer) => Some(answer),
            Self::Closed | Self::Nothing | Self::Ended => None,
        }
    }
}

/// Asks one server.
fn ask(name: &str, question: &str) -> Said {
    match socket::ask(name, question) {
        Ok(answer) => Said::Answer(answer),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Said::Closed,
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Said::Ended,
        Err(error) => {
            eprintln!("ferry: the server at {} does not answer: {error}", socket::printable(name));
            Said::Nothing
        }
    }
}

/// Says of the users whose servers do not answer this one; `None`: there are none.
fn of_others(owners: &BTreeSet<u32>) -> Option<String> {
    let names: Vec<String> = owners.iter().map(|uid| mounts::user(*uid)).collect();
    (!names.is_empty()).then(|| {
        format!("a server of {} runs here, and answers its own user only", names.join(", "))
    })
}

/// The servers of this machine: what `of` makes of the name of its socket, and of what it says of
/// its clients.
pub fn servers<T: Send>(of: impl Fn(&str, Said) -> T + Sync) -> Result<Vec<T>, CliError> {
    let names: Vec<String> = socket::names(PREFIX)?.into_iter().collect();
    let asked = socket::ask_each(&names, |name| match ask(name, "clients") {
        Said::Ended => None,
        said => Some(of(name, said)),
    });
    Ok(asked.into_iter().flatten().collect())
}

/// The servers that answer, by their sockets; and what is said of others.
pub type Answers = (Vec<(String, Value)>, Option<String>);

/// Asks all servers of this machine for their clients.
pub fn answers() -> Result<Answers, CliError> {
    let (mut answers, mut owners, mut is_silent) = (Vec::new(), BTreeSet::new(), false);
    for (name, said) in servers(|name, said| (name.to_owned(), said))? {
        match said {
            Said::Answer(answer) => answers.push((name, answer)),
            Said::Closed => owners.extend(socket::owner(&name).map(Uid::as_raw)),
            // What is known of it was said.
            Said::Nothing | Said::Ended => is_silent = true,
        }
    }
    let others = of_others(&owners);
    let silent = || is_silent.then(|| "a server runs here, which does not answer".to_owned());
    let others = others.or_else(silent);
    Ok((answers, others))
}

/// Runs `ferry clients`.
pub fn show(args: &ClientsArgs) -> Result<(), CliError> {
    let (answers, others) = answers()?;
    let answers: Vec<Value> = answers.into_iter().map(|(_, answer)| answer).collect();
    let text = match (args.json, answers.is_empty(), &others) {
        (true, ..) => format!("{:#}\n", Value::from(answers.clone())),
        (false, true, Some(_)) => String::new(),
        (false, true, None) => "no server runs here (`ferry serve`)\n".into(),
        (false, false, _) => {
            answers.iter().map(|server| for_people(server, args.details)).collect()
        }
    };
    print(&text)?;
    match others {
        Some(others) if answers.is_empty() => Err(CliError::Failed(others)),
        Some(others) => {
            eprintln!("ferry: {others}");
            Ok(())
        }
        None => Ok(()),
    }
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
    if server["role"] == STANDS_BY {
        let owner = server["owner"].as_str().map_or("nobody".into(), socket::printable);
        text.push_str(&format!("  stands by; {owner} has the volume\n"));
        return text;
    }
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
    let has = |server: &Value| {
        volume.as_deref().is_none_or(|volume| server["volume"] == volume)
            && server["clients"].as_array().is_some_and(|clients| clients.iter().any(is_meant))
    };
    let (answers, others) = answers()?;
    let servers: Vec<&String> =
        answers.iter().filter(|(_, server)| has(server)).map(|(name, _)| name).collect();
    let [server] = servers[..] else {
        if let (true, Some(others)) = (servers.is_empty(), others) {
            return Err(CliError::Failed(format!("{}: not found: {others}", args.client)));
        }
        let why =
            if servers.is_empty() { "no client is" } else { "clients of several servers are" };
        let what = if servers.is_empty() { "" } else { ", and give --volume" };
        return Err(CliError::Failed(format!(
            "{why} called {:?}: see `ferry clients`{what}",
            args.client
        )));
    };
    let answer = ask(server, &format!("evict {}", args.client)).answer();
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
pub fn printed_as(volume: &Location) -> io::Result<String> {
    let name = volume.path().map_or_else(|| volume.resolved(), std::path::absolute)?;
    Ok(name.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_said_whose_servers_do_not_answer() {
        assert_eq!(of_others(&BTreeSet::new()), None);
        let said = of_others(&BTreeSet::from([0, 1001])).expect("there are some");
        assert!(said.starts_with("a server of root, user 1001 runs here"), "{said}");
    }

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
