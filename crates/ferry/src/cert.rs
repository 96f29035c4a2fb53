//! `ferry cert`: a small certificate authority for servers and clients.

use ferry_net::authority;

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
        CertCommand::Issue { dir, name } => {
            let made = authority::issue(dir, name).map_err(failed)?;
            println!("made a client's certificate: bring {} to that machine, for -o tls=", made.display());
        }
    }
    Ok(())
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
