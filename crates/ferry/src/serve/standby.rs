//! One server of several: it waits for the volume, and goes back to that when it has lost it.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use ferry_env::Env;
use ferry_object::{Found, OnDisk, Standby};
use parking_lot::Mutex;

use crate::clients::{self, Role};
use crate::error::CliError;
use crate::execute::execute;
use crate::location::Location;
use crate::open::{How, OpenError, Opened, explain, open_for_one_of_several, stand_by_in_store};
use crate::starter;
use crate::waiting::pause;

/// The term of leases. It is shorter than that of a server alone: the next server waits for it.
pub const LEASE_TERM: Duration = Duration::from_secs(3);
/// How long the clients of another server may take to find this one. They try a server for 2 s
/// that does not answer, later for 5 s at times, and then the next one.
pub const RETURNS: Duration = Duration::from_secs(8);
/// Set for a server that has released the volume.
const RELEASED: &str = "FERRY_RELEASED";
/// Such a server leaves the volume to others for so long.
const LEAVES: Duration = Duration::from_secs(15);

/// Waits until the volume is this server's, and opens it.
pub fn open(
    volume: &Location,
    how: How,
    on_disk: &OnDisk,
    (role, address): (&Arc<Mutex<Role>>, SocketAddr),
    env: &Env,
) -> Result<Opened, CliError> {
    let Location::Store(url) = volume else {
        return Err(CliError::Usage(format!(
            "{volume}: --standby is for volumes in a store (s3://, dir://)"
        )));
    };
    if how != How::Write {
        return Err(CliError::Usage("--standby is for servers whose clients may write".into()));
    }
    let wrong = |error: OpenError| explain(volume, &error);
    let standby = stand_by_in_store(volume, url, env).map_err(wrong)?;
    clients::answer(Arc::clone(role), volume, address)
        .map_err(|e| CliError::Failed(format!("cannot listen to `ferry clients`: {e}")))?;
    let leaves = if std::env::var_os(RELEASED).is_some() { LEAVES } else { Duration::ZERO };
    let leaves_until = env.clock.monotonic() + leaves;
    let mut waiting = Waiting { volume, standby, leaves_until, said: None, role, env };
    starter::notify_systemd("READY=1");
    tracing::info!(%volume, %address, "stands by");
    loop {
        let claims = (waiting.turn(), waiting.standby.followed());
        match open_for_one_of_several(volume, url, claims, on_disk, env) {
            Ok(opened) => return Ok(opened),
            Err(error) => waiting.say(&explain(volume, &error).to_string()),
        }
        waiting.pause();
    }
}

struct Waiting<'a> {
    volume: &'a Location,
    standby: Standby,
    /// Others are to have the volume until then.
    leaves_until: Duration,
    /// What was logged last of why this waits.
    said: Option<String>,
    role: &'a Mutex<Role>,
    env: &'a Env,
}

impl Waiting<'_> {
    /// Returns when it may be this server's turn: the epoch of the owner from which the volume is
    /// to be taken, if that one may be alive.
    fn turn(&mut self) -> Option<u64> {
        loop {
            let found = self.standby.look();
            *self.role.lock() = Role::StandsBy(self.standby.owner().map(str::to_owned));
            match found {
                Ok(Found::Closed) if self.env.clock.monotonic() >= self.leaves_until => {
                    return None;
                }
                Ok(Found::Silent { epoch }) => {
                    let owner = self.standby.owner().unwrap_or("its owner");
                    tracing::warn!(volume = %self.volume, "{owner} is silent: this server takes the volume over");
                    return Some(epoch);
                }
                // If it was of this machine, that it is dead can be found out.
                Ok(Found::InUse { may_be_dead: true }) => return None,
                Ok(Found::Closed | Found::InUse { .. }) => {}
                Err(error) => self.say(&explain(self.volume, &error.into()).to_string()),
            }
            self.pause();
        }
    }

    fn pause(&self) {
        let until = self.env.clock.monotonic() + Standby::PAUSE;
        while self.env.clock.monotonic() < until {
            pause(until.saturating_sub(self.env.clock.monotonic()));
        }
    }

    /// Logs why this waits, once.
    fn say(&mut self, why: &str) {
        // Numbers change while the reason stays, as the time for which somebody has the volume.
        let is_digit = |c: char| c.is_ascii_digit();
        if self.said.as_deref().map(|said| said.replace(is_digit, ""))
            != Some(why.replace(is_digit, ""))
        {
            tracing::warn!("stands by on: {why}");
            self.said = Some(why.into());
        }
    }
}

/// Begins anew as a server that stands by. It returns only if that fails. `released`: others are
/// to have the volume.
pub fn again(released: bool) -> CliError {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("ferry").args(std::env::args_os().skip(1).collect::<Vec<OsString>>());
    match released {
        true => command.env(RELEASED, "1"),
        false => command.env_remove(RELEASED),
    };
    CliError::Failed(format!("cannot stand by again: {}", execute(command)))
}
