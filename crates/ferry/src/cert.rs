//! `ferry cert`: a small certificate authority for servers and clients.

use ferry_net::{IdSet, Limits, authority};

use crate::cli::CertCommand;
use crate::error::CliError;

/// Runs the command.
pub fn run(command: &CertCommand) -> Result<(), CliError> {
    let failed = |e: ferry_net::NetError| CliError::Failed(e.to_string());
    match command {
        CertCommand::Init { dir, host } => {
            let hosts = if host.is_empty() { own_names() } else { host.clone() };
            authority::init(dir, &hosts).map_err(failed)?;
            println!(
                "made an authority and a server's certificate for {}: {}",
                hosts.join(", "),
                dir.display()
            );
        }
        CertCommand::Issue { dir, name, users, groups } => {
            let limits = limits(users.as_ref(), groups.as_ref());
            let made = authority::issue(dir, name, limits.as_ref()).map_err(failed)?;
            println!("made a client's certificate: bring {} to that machine, for -o tls=", made.display());
        }
        CertCommand::Revoke { dir, name } => {
            let revoked = authority::revoke(dir, name).map_err(failed)?;
            let what = if revoked == 0 { "was revoked before".into() } else { format!("revoked: {revoked}") };
            println!("{what}; `ferry evict` ends what a client has now (`ferry clients` lists them)");
        }
    }
    Ok(())
}

/// Whom a certificate may act as; `None`: anybody. Who names only users means groups of the same numbers.
fn limits(users: Option<&IdSet>, groups: Option<&IdSet>) -> Option<Limits> {
    let (users, groups) = match (users, groups) {
        (None, None) => return None,
        (Some(users), None) => (users.clone(), users.clone()),
        (None, Some(groups)) => (IdSet::all(), groups.clone()),
        (Some(users), Some(groups)) => (users.clone(), groups.clone()),
    };
    Some(Limits { users, groups })
}

/// What this machine is called, here and by itself.
fn own_names() -> Vec<String> {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let mut names = vec!["localhost".to_owned(), "127.0.0.1".to_owned(), "::1".to_owned()];
    if name != "localhost" {
        names.insert(0, name);
    }
    names
}
