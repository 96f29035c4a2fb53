//! `ferry cert`: a small certificate authority for servers and clients.

use ferry_net::{IdSet, Limits, Terms, authority};

use crate::cli::CertCommand;
use crate::error::CliError;

/// Runs the command.
pub fn run(command: &CertCommand) -> Result<(), CliError> {
    let failed = |e: ferry_net::NetError| CliError::Failed(e.to_string());
    match command {
        CertCommand::Init { dir, host, days } => {
            let hosts = if host.is_empty() { own_names() } else { host.clone() };
            authority::init(dir, &hosts, *days).map_err(failed)?;
            println!(
                "made a server's certificate for {}, good for {days} days: {}",
                hosts.join(", "),
                dir.display()
            );
            println!(
                "{} has the authority's secret key, which the server does not need: you may keep it elsewhere",
                dir.join("authority").display()
            );
        }
        CertCommand::Issue { dir, name, users, groups, export, days } => {
            let limits = limits(users.as_ref(), groups.as_ref());
            let terms = Terms { limits, exports: export.clone() };
            let made = authority::issue(dir, name, &terms, *days).map_err(failed)?;
            println!(
                "made a client's certificate, good for {days} days: bring {} to that machine, for -o tls=",
                made.display()
            );
        }
        CertCommand::Revoke { dir, name } => {
            let revoked = authority::revoke(dir, name).map_err(failed)?;
            let what = if revoked == 0 {
                "was revoked before".into()
            } else {
                format!("revoked: {revoked}")
            };
            println!("{what}; servers with this list end the client's sessions within seconds");
        }
    }
    Ok(())
}

/// The users and groups that a certificate may act as; `None`: all. If only users are named, groups
/// of the same numbers are meant.
fn limits(users: Option<&IdSet>, groups: Option<&IdSet>) -> Option<Limits> {
    let (users, groups) = match (users, groups) {
        (None, None) => return None,
        (Some(users), None) => (users.clone(), users.clone()),
        (None, Some(groups)) => (IdSet::all(), groups.clone()),
        (Some(users), Some(groups)) => (users.clone(), groups.clone()),
    };
    Some(Limits { users, groups })
}

/// The names of this machine: its host name, and the names of its loopback interface.
fn own_names() -> Vec<String> {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let mut names = vec!["localhost".to_owned(), "127.0.0.1".to_owned(), "::1".to_owned()];
    if name != "localhost" {
        names.insert(0, name);
    }
    names
}
