//! `ferry serve --release`: the server of this machine lets another one take the volume.

use std::time::Duration;

use ferry_env::Env;

use crate::clients::{self, RELEASE, SERVES, STANDS_BY};
use crate::control::print;
use crate::error::CliError;
use crate::location::Location;
use crate::socket;
use crate::waiting::pause;

/// A server may take so long to make everything durable and to close the volume, and another one
/// to open it.
const TAKES: Duration = Duration::from_secs(120);
/// So many looks a server may be absent that begins anew.
const ABSENT_MAX: u32 = 100;
/// How often it is looked whether another one has it.
const LOOK: Duration = Duration::from_millis(50);

/// Asks the server that has the volume, and waits until another one has it.
pub fn run(volume: &Location) -> Result<(), CliError> {
    let name =
        clients::printed_as(volume).map_err(CliError::path(volume.to_string(), "no path"))?;
    let failed = |why: &str| CliError::Failed(format!("{volume}: {why}"));
    let (answers, others) = clients::answers()?;
    let here = || answers.iter().filter(|(_, said)| said["volume"] == name);
    let Some((server, _)) = here().find(|(_, said)| said["role"] == SERVES) else {
        return Err(failed(&match here().next() {
            Some(_) => "the server that runs here stands by: it has nothing to release".into(),
            None => others.unwrap_or_else(|| "no server of it runs here".into()),
        }));
    };
    let answer = socket::ask(server, RELEASE);
    if !answer.is_ok_and(|answer| answer["released"] == true) {
        return Err(failed(
            "its server was not started with --standby: nobody would know that the volume is free",
        ));
    }
    let clock = Env::real().clock;
    let (until, mut has_left, mut absent) = (clock.monotonic() + TAKES, false, 0);
    while clock.monotonic() < until {
        pause(LOOK);
        let said = socket::ask(server, "clients");
        has_left |= said.as_ref().is_err_and(socket::is_end);
        let said = said.unwrap_or_default();
        match (said["role"].as_str(), said["owner"].as_str()) {
            (Some(STANDS_BY), Some(owner)) => {
                return print(&format!("{volume}: {} has it\n", socket::printable(owner)));
            }
            (Some(SERVES), _) if has_left => {
                return Err(failed("no other server has taken it: the one here has it again"));
            }
            (Some(STANDS_BY), None) => has_left = true,
            // It begins anew, or has been ended meanwhile.
            (None, _) if has_left => {
                absent += 1;
                if absent > ABSENT_MAX {
                    return Err(failed(
                        "its server has ended: `ferry clients` shows on each machine who has the volume",
                    ));
                }
            }
            _ => {}
        }
    }
    Err(failed("no other server has taken it: look into the log of the one here"))
}
