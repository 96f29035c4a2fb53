//! `ferry list`: the mounts and servers of this machine, with their states. Each is asked over a
//! [`socket`], so that one which hangs does not hold the command up for long.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt;
use std::thread;

use rustix::process::{Uid, geteuid};
use serde_json::Value;

use crate::cli::{ListArgs, Looked};
use crate::clients::Said;
use crate::control::{STATS, print};
use crate::error::CliError;
use crate::location::Location;
use crate::mounts::{self, Mount};
use crate::socket::printable;
use crate::{asked, clients, remote, served, socket, table};

/// A mount or a server.
pub struct Found {
    pub kind: Kind,
    /// What is mounted or served.
    pub volume: String,
    /// The mount point, or the address.
    pub at: String,
    pub pid: Option<u64>,
    pub state: State,
    /// What it says of itself: `ferry stats`, or of a remote mount its own part of it. `None`: it
    /// does not answer.
    pub figures: Option<Value>,
    /// Of a server: its clients, as `ferry clients --json` prints them.
    pub clients: Vec<Value>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Mount,
    Server,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Mount => "mount",
            Self::Server => "server",
        }
    }
}

impl Found {
    /// What commands take for it: the mount point, or the volume that is served. `None`: a server
    /// that does not say which that is.
    fn into_name(self) -> Option<String> {
        match (self.kind, self.state) {
            (Kind::Mount, _) => Some(self.at),
            (Kind::Server, State::Closed | State::Silent) => None,
            (Kind::Server, _) => Some(self.volume),
        }
    }
}

/// How a mount or a server is. Of a mount, what is worst comes first.
#[derive(Debug, PartialEq, Eq)]
pub enum State {
    /// Another mount is on top of this one: the source of that.
    Hidden(String),
    /// Nobody answers for a mount.
    Dead,
    /// It does not answer in time.
    Silent,
    /// It answers others: root, or its own user. The daemon of a mount answers its own version of
    /// ferry, too.
    Closed,
    /// A remote mount without its server.
    ServerAway,
    /// A remote mount that its server has ended, or does not let in: why.
    Refused(String),
    /// Nothing can be changed any more: why not.
    Failed(String),
    /// The store does not carry out requests: why not.
    StoreHeld(String),
    /// Components that are not in use, with the state of each.
    Components(Vec<String>),
    ReadOnly,
    Fine,
    /// A server that answers: clients that are connected, and all.
    Clients(usize, usize),
    /// A server that waits for the volume, and who has it.
    StandsBy(Option<String>),
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hidden(by) => write!(f, "hidden by {by}"),
            Self::Dead => f.write_str("no daemon answers for it"),
            Self::Silent => f.write_str("does not answer"),
            Self::Closed => f.write_str("answers no questions of this user"),
            Self::ServerAway => f.write_str("its server is away"),
            Self::Refused(reason) => write!(f, "its server refuses it: {reason}"),
            Self::Failed(reason) => write!(f, "has failed: {reason}"),
            Self::StoreHeld(reason) => write!(f, "waits for its store: {reason}"),
            Self::Components(states) => f.write_str(&states.join(", ")),
            Self::ReadOnly => f.write_str("read-only"),
            Self::Fine => f.write_str("ok"),
            Self::Clients(connected, all) => {
                write!(f, "{connected} of {all} clients are connected")
            }
            Self::StandsBy(Some(owner)) => write!(f, "stands by; {owner} has the volume"),
            Self::StandsBy(None) => f.write_str("stands by; nobody has the volume"),
        }
    }
}

/// Runs the command.
pub fn run(args: &ListArgs) -> Result<(), CliError> {
    let all = found()?;
    if args.json {
        let all: Vec<Value> = all.iter().map(json).collect();
        return print(&format!("{:#}\n", Value::from(all)));
    }
    if all.is_empty() {
        return print("nothing is mounted or served here (`ferry mount`, `ferry serve`)\n");
    }
    let head = ["kind", "state", "process", "volume", "at"].map(str::to_owned);
    let rows: Vec<_> = std::iter::once(head).chain(all.iter().map(cells)).collect();
    print(&table::lines(&rows, ""))
}

/// The mounts and servers of this machine.
pub fn found() -> Result<Vec<Found>, CliError> {
    let mounts = mounts::list().map_err(CliError::path("/proc", "cannot read the mounts of"))?;
    let ferry: Vec<&Mount> = mounts.iter().filter(|mount| mount.is_ferry()).collect();
    // Both at the same time: in each a process may hang.
    thread::scope(|scope| {
        let servers = scope.spawn(|| clients::servers(of_server));
        let mut all = socket::ask_each(&ferry, |mount| of_mount(mount, &mounts));
        all.extend(servers.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
        Ok(all)
    })
}

impl Looked {
    /// What is meant.
    pub fn meant(&self) -> Result<Location, CliError> {
        let target = self.target.clone();
        target.map_or_else(|| only(&[Kind::Mount, Kind::Server]), Ok)
    }
}

/// The only one of these kinds on this machine.
pub fn only(kinds: &[Kind]) -> Result<Location, CliError> {
    only_of(found()?, kinds)
}

fn only_of(all: Vec<Found>, kinds: &[Kind]) -> Result<Location, CliError> {
    let (wanted, others): (Vec<Found>, Vec<Found>) =
        all.into_iter().partition(|one| kinds.contains(&one.kind));
    let is_closed = wanted.iter().any(|one| one.state == State::Closed);
    let is_silent = wanted.iter().any(|one| one.state == State::Silent);
    // Several servers of this machine may stand by for one volume.
    let names: BTreeSet<String> = wanted.into_iter().filter_map(Found::into_name).collect();
    match names.len() {
        0 if is_closed => Err(CliError::Failed(
            "the server here is another user's, and answers its own user only".into(),
        )),
        0 if is_silent => {
            Err(CliError::Failed("the server here does not answer: `ferry doctor` says more".into()))
        }
        0 if !others.is_empty() => Err(CliError::Usage(
            "this is for mounts, and no FerryFS is mounted here (`ferry mount`): a server alone is none"
                .into(),
        )),
        0 => Err(CliError::Usage(
            "no FerryFS is mounted or served here (`ferry mount`, `ferry serve`)".into(),
        )),
        1 => {
            let only: String = names.into_iter().collect();
            Location::parse(OsStr::new(&only)).map_err(CliError::Usage)
        }
        _ => Err(CliError::Usage(format!(
            "there are several here: name one of {}",
            names.iter().map(|name| printable(name)).collect::<Vec<_>>().join(", ")
        ))),
    }
}

fn of_mount(mount: &Mount, mounts: &[Mount]) -> Found {
    let answer = if mount.is_remote() { remote::figures(mount) } else { asked::ask(mount, STATS) };
    let pid = asked::daemon(mount).map(u64::from);
    let state = match (mounts::cover(mount, mounts), &answer) {
        (Some(over), _) => State::Hidden(over.source.display().to_string()),
        (None, Ok(None) | Err(_)) if pid.is_none() && would_hear(mount.owner, geteuid()) => {
            State::Dead
        }
        (None, Ok(None)) => State::Closed,
        (None, Err(_)) => State::Silent,
        (None, Ok(Some(figures))) => state_by(mount.read_only, figures),
    };
    let (volume, at) = (mount.source.display().to_string(), mount.target.display().to_string());
    let figures = answer.ok().flatten();
    Found { kind: Kind::Mount, volume, at, pid, state, figures, clients: Vec::new() }
}

/// Whether a user would get an answer from the daemon of a mount of this owner: from those of root,
/// and the user's own.
fn would_hear(owner: Option<u32>, user: Uid) -> bool {
    let is_trusted = |owner: u32| owner == 0 || owner == user.as_raw();
    user.is_root() || owner.is_none_or(is_trusted)
}

/// What the figures say of a volume that is mounted or served.
fn state_by(is_read_only: bool, figures: &Value) -> State {
    let disks = figures["devices"].as_object().into_iter().flatten();
    let bad = disks.filter_map(|(path, disk)| Some((path, disk["state"].as_str()?)));
    let bad: Vec<String> = bad
        .filter(|(_, state)| !matches!(*state, "active" | "replaced"))
        .map(|(path, state)| format!("{path} is {state}"))
        .collect();
    if remote::is_away(figures) {
        let refused = figures["connection"]["refused"].as_str();
        return refused.map_or(State::ServerAway, |reason| State::Refused(reason.into()));
    }
    if let Some(reason) = figures["volume"]["failed"].as_str() {
        return State::Failed(reason.into());
    }
    if let Some(reason) = figures["store"]["held"]["reason"].as_str() {
        return State::StoreHeld(reason.into());
    }
    if !bad.is_empty() {
        return State::Components(bad);
    }
    let read_only = is_read_only || figures["volume"]["read_only"] == true;
    if read_only { State::ReadOnly } else { State::Fine }
}

fn of_server(name: &str, said: Said) -> Found {
    let is_closed = matches!(said, Said::Closed);
    let answer = said.answer();
    // Any user may bind a name with any number in it.
    let pid = socket::process(name).map(u64::from);
    let text = |key: &str| answer.as_ref().and_then(|all| all[key].as_str()).unwrap_or("-");
    let figures = answer.as_ref().and(pid).and_then(served::stats_of);
    let state = match is_closed {
        true => State::Closed,
        false => server_state(answer.as_ref(), figures.as_ref()),
    };
    let (volume, at) = (text("volume").to_owned(), text("address").to_owned());
    let clients = answer.as_ref().and_then(|all| all["clients"].as_array().cloned());
    let clients = clients.unwrap_or_default();
    Found { kind: Kind::Server, volume, at, pid, state, figures, clients }
}

/// How a server is, by what it says of its clients, and how its volume is.
fn server_state(answer: Option<&Value>, figures: Option<&Value>) -> State {
    let Some(answer) = answer else { return State::Silent };
    if answer["role"] == clients::STANDS_BY {
        return State::StandsBy(answer["owner"].as_str().map(str::to_owned));
    }
    match figures.map(|figures| state_by(false, figures)) {
        None | Some(State::Fine | State::ReadOnly) => {
            let there = |client: &&Value| client["connected"] == true;
            let clients = answer["clients"].as_array().map(Vec::as_slice).unwrap_or_default();
            State::Clients(clients.iter().filter(there).count(), clients.len())
        }
        Some(worse) => worse,
    }
}

/// As `ferry list --json` prints it.
pub fn json(found: &Found) -> Value {
    let Found { kind, volume, at, pid, state, .. } = found;
    socket::object([
        ("kind", kind.name().into()),
        ("state", state.to_string().into()),
        ("process", (*pid).into()),
        ("volume", volume.clone().into()),
        ("at", at.clone().into()),
    ])
}

fn cells(found: &Found) -> [String; 5] {
    let pid = found.pid.map_or_else(|| "-".into(), |pid| pid.to_string());
    let text = [&found.volume, &found.at].map(|text| printable(text));
    let [volume, at] = text;
    [found.kind.name().into(), printable(&found.state.to_string()), pid, volume, at]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::socket::object;

    #[test]
    fn only_a_daemon_that_would_answer_is_dead_if_it_does_not() {
        let hears = |owner: u32, user: u32| would_hear(Some(owner), Uid::from_raw(user));
        assert!(hears(1000, 0) && hears(1000, 1000) && hears(0, 1000));
        assert!(!hears(1000, 1001), "the daemons of other users do not answer a user");
    }

    #[test]
    fn the_only_mount_or_server_needs_no_name() {
        let one = |kind: Kind, volume: &str, at: &str| Found {
            kind,
            volume: volume.into(),
            at: at.into(),
            pid: None,
            state: State::Fine,
            figures: None,
            clients: Vec::new(),
        };
        let mount = || one(Kind::Mount, "/srv/a.ferry", "/mnt");
        let server = || one(Kind::Server, "/srv/b.ferry", "[::]:7373");
        let both = [Kind::Mount, Kind::Server];
        let only = |all, kinds: &[Kind]| only_of(all, kinds).map(|found| found.to_string());
        assert_eq!(only(vec![mount()], &both).expect("one"), "/mnt");
        assert_eq!(only(vec![server()], &both).expect("one"), "/srv/b.ferry");
        assert_eq!(only(vec![mount(), server()], &[Kind::Mount]).expect("one"), "/mnt");
        let several = only(vec![mount(), server()], &both).expect_err("two").to_string();
        assert!(several.contains("name one of /mnt, /srv/b.ferry"), "{several}");
        let standby = only(vec![server(), server()], &both).expect("both have one volume");
        assert_eq!(standby, "/srv/b.ferry");
        let none = only(vec![server()], &[Kind::Mount]).expect_err("none").to_string();
        assert!(none.contains("this is for mounts"), "{none}");
        let none = only(vec![], &both).expect_err("none").to_string();
        assert!(none.contains("mounted or served here"), "{none}");
        let other = |state| Found { state, ..one(Kind::Server, "-", "-") };
        for state in [State::Closed, State::Silent] {
            assert_eq!(only(vec![other(state), mount()], &both).expect("one"), "/mnt");
        }
        let closed = only(vec![other(State::Closed)], &both).expect_err("none").to_string();
        assert!(closed.contains("its own user"), "{closed}");
        let silent = only(vec![other(State::Silent)], &both).expect_err("none").to_string();
        assert!(silent.contains("does not answer:"), "{silent}");
    }

    #[test]
    fn a_mount_that_its_server_refuses_is_told_from_one_whose_server_is_away() {
        let state = |refused: Value| {
            let connection = object([("connected", false.into()), ("refused", refused)]);
            state_by(false, &object([("connection", connection)]))
        };
        assert_eq!(state(Value::Null), State::ServerAway);
        assert_eq!(state("evicted".into()), State::Refused("evicted".into()));
    }

    #[test]
    fn a_server_that_answers_others_only_is_closed() {
        assert_eq!(of_server("ferry-serve-test", Said::Closed).state, State::Closed);
        assert_eq!(of_server("ferry-serve-test", Said::Nothing).state, State::Silent);
    }

    #[test]
    fn a_server_is_as_its_volume_is() {
        let client = |connected: bool| object([("connected", connected.into())]);
        let clients = object([("clients", [true, false].map(client).into_iter().collect())]);
        let state = |figures: Option<&Value>| server_state(Some(&clients), figures);
        let of_state = |state: &str| object([("state", state.into())]);
        let devices = |sides| object([("devices", object::<2>(sides))]);
        let degraded = devices([("/a", of_state("active")), ("/b", of_state("failed"))]);
        assert_eq!(state(Some(&degraded)), State::Components(vec!["/b is failed".into()]));
        let held = object([("held", object([("reason", "no route".into())]))]);
        let held = object([("store", held)]);
        assert_eq!(state(Some(&held)), State::StoreHeld("no route".into()));
        let failed = object([("volume", object([("failed", "I/O error".into())]))]);
        assert_eq!(state(Some(&failed)), State::Failed("I/O error".into()));
        let fine = devices([("/a", of_state("active")), ("/b", of_state("replaced"))]);
        for figures in [Some(&fine), None] {
            assert_eq!(state(figures), State::Clients(1, 2));
        }
        assert_eq!(server_state(None, None), State::Silent);
    }
}
