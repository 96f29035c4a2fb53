//! `ferry list`: the mounts and servers of this machine, with their states. Each is asked over a
//! [`socket`], so that one which hangs does not hold the command up for long.

use serde_json::Value;

use crate::cli::ListArgs;
use crate::control::{STATS, print};
use crate::error::CliError;
use crate::mounts::{self, Mount};
use crate::socket::printable;
use crate::{asked, clients, remote, socket, table};

/// A mount or a server.
struct Found {
    kind: &'static str,
    /// What is mounted or served.
    volume: String,
    /// The mount point, or the address.
    at: String,
    pid: Option<u64>,
    state: String,
}

/// Runs the command.
pub fn run(args: &ListArgs) -> Result<(), CliError> {
    let mounts = mounts::list().map_err(CliError::path("/proc", "cannot read the mounts of"))?;
    let ferry = mounts.iter().filter(|mount| mount.is_ferry());
    let mut all: Vec<Found> = ferry.map(|mount| of_mount(mount, &mounts)).collect();
    all.extend(clients::servers()?.into_iter().map(|(name, answer)| of_server(&name, &answer)));
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

fn of_mount(mount: &Mount, mounts: &[Mount]) -> Found {
    let answer = if mount.is_remote() { remote::figures(mount) } else { asked::ask(mount, STATS) };
    let pid = asked::daemon(mount).map(u64::from);
    let state = match (mounts::cover(mount, mounts), answer) {
        (Some(over), _) => format!("hidden by {}", over.source.display()),
        (None, Ok(None)) if pid.is_none() => "its daemon has died, or is another user's".into(),
        (None, Err(_) | Ok(None)) => "does not answer".into(),
        (None, Ok(Some(figures))) => state_by(mount, &figures),
    };
    let (volume, at) = (mount.source.display().to_string(), mount.target.display().to_string());
    Found { kind: "mount", volume, at, pid, state }
}

/// What its own figures say of a mount that answers; what is worst comes first.
fn state_by(mount: &Mount, figures: &Value) -> String {
    let disks = figures["devices"].as_object().into_iter().flatten();
    let bad = disks.filter_map(|(path, disk)| Some((path, disk["state"].as_str()?)));
    let bad: Vec<String> = bad
        .filter(|(_, state)| !matches!(*state, "active" | "replaced"))
        .map(|(path, state)| format!("{path} is {state}"))
        .collect();
    if figures["connection"]["connected"] == false {
        return "its server is away".into();
    }
    if let Some(reason) = figures["store"]["held"]["reason"].as_str() {
        return format!("waits for its store: {reason}");
    }
    if !bad.is_empty() {
        return bad.join(", ");
    }
    if mount.read_only || figures["volume"]["read_only"] == true { "read-only" } else { "ok" }
        .into()
}

fn of_server(name: &str, answer: &Option<Value>) -> Found {
    let pid = name.rsplit_once('-').and_then(|(_, pid)| pid.parse().ok());
    let text = |key: &str| answer.as_ref().and_then(|all| all[key].as_str()).unwrap_or("-");
    let count = |all: &Value| {
        let there = |client: &&Value| client["connected"] == true;
        let clients = all["clients"].as_array().map(Vec::as_slice).unwrap_or_default();
        format!(
            "{} of {} clients are connected",
            clients.iter().filter(there).count(),
            clients.len()
        )
    };
    let state = answer.as_ref().map_or_else(|| "does not answer".into(), count);
    let (volume, at) = (text("volume").to_owned(), text("address").to_owned());
    Found { kind: "server", volume, at, pid, state }
}

fn json(found: &Found) -> Value {
    let Found { kind, volume, at, pid, state } = found;
    socket::object([
        ("kind", (*kind).into()),
        ("state", state.clone().into()),
        ("process", (*pid).into()),
        ("volume", volume.clone().into()),
        ("at", at.clone().into()),
    ])
}

fn cells(found: &Found) -> [String; 5] {
    let pid = found.pid.map_or_else(|| "-".into(), |pid| pid.to_string());
    let text = [&found.volume, &found.at].map(|text| printable(text));
    let [volume, at] = text;
    [found.kind.into(), printable(&found.state), pid, volume, at]
}
