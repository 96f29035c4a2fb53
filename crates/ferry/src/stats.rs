//! `ferry stats`: shows what the process that has a volume open counts, and on request what the
//! volume's snapshots hold in its store.

use serde_json::Value;

use crate::cli::StatsArgs;
use crate::control::{print, read_stats};
use crate::error::CliError;
use crate::location::Location;
use crate::{mounts, remote, snapshot, socket, table};

/// Runs the command.
pub fn run(args: &StatsArgs) -> Result<(), CliError> {
    let printed = show_stats(args);
    if let (true, Err(error)) = (args.json, &printed) {
        print(&format!("{:#}\n", socket::object([("error", error.to_string().into())])))?;
    }
    printed
}

fn show_stats(args: &StatsArgs) -> Result<(), CliError> {
    let target = &args.looked.meant()?;
    // This process asks the store. So no request of the mount waits for it, and Ctrl-C ends it.
    let held = args.snapshots.then(|| snapshot::figures(target, args.json)).transpose()?;
    let mut value = match own_figures(target)? {
        Some(figures) => {
            eprintln!(
                "ferry: {}: its server is away: these are this machine's own figures",
                target
            );
            figures
        }
        None => read_stats(target)?,
    };
    if let (Some(held), Value::Object(sections)) = (held, &mut value) {
        sections.insert("snapshots".into(), held);
    }
    let text = if args.json { format!("{value:#}\n") } else { table::render(&value) };
    print(&text)
}

/// The figures of a remote mount whose server is away. They need no answer of the server.
fn own_figures(target: &Location) -> Result<Option<Value>, CliError> {
    let Some(mount) = mounts::of(target)? else { return Ok(None) };
    Ok(remote::figures(&mount)?.filter(remote::is_away))
}
