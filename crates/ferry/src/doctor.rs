//! `ferry doctor`: checks this machine, its mounts and its servers, and says what to do about each
//! thing that is not as it should be. `--bundle` collects what a report of a bug needs.
//!
//! * Each question has a time limit: a mount that hangs does not hang the doctor.
//! * The doctor sends no request through a mount. It asks daemons over their sockets (`list`).
//! * It changes nothing, but for the file of `--bundle`.

mod bundle;
mod check;
mod daemons;
mod machine;
mod redact;
mod space;

use std::process::ExitCode;

use ferry_env::Env;
use serde_json::Value;

use crate::cli::DoctorArgs;
use crate::control::print;
use crate::error::CliError;
use crate::fsck::error_as_json;
use crate::{list, table};

use check::{Check, Outcome};
use daemons::Daemon;

/// The exit code if something is bad.
const EXIT_BAD: u8 = 1;

/// Runs the command.
pub fn run(args: &DoctorArgs) -> Result<ExitCode, CliError> {
    look(args).inspect_err(|error| error_as_json(args.json, error))
}

fn look(args: &DoctorArgs) -> Result<ExitCode, CliError> {
    let now = Env::real().clock.wall();
    let daemons: Vec<Daemon> = list::found()?.into_iter().map(Daemon::of).collect();
    let checks: Vec<Check> = [
        machine::checks(&daemons),
        space::checks(daemons.iter().flat_map(|daemon| &daemon.holds)),
        daemons.iter().flat_map(|daemon| daemon.checks(now)).collect(),
    ]
    .concat();
    if let Some(path) = &args.bundle {
        bundle::make(path, &checks, &daemons)?;
    }
    let text = if args.json {
        let all: Vec<Value> = checks.iter().map(Check::json).collect();
        format!("{:#}\n", Value::from(all))
    } else {
        for_people(&checks)
    };
    print(&text)?;
    let bad = checks.iter().any(|check| check.outcome == Outcome::Bad);
    Ok(if bad { ExitCode::from(EXIT_BAD) } else { ExitCode::SUCCESS })
}

/// A table, and below it a sentence for each check that is not ok.
fn for_people(checks: &[Check]) -> String {
    let head = ["check", "result", "found"].map(str::to_owned);
    let rows: Vec<_> = std::iter::once(head).chain(checks.iter().map(Check::cells)).collect();
    let advice = checks.iter().filter_map(Check::sentence);
    let advice: String = advice.map(|sentence| format!("\n{sentence}\n")).collect();
    table::lines(&rows, "") + &advice
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_ok_has_a_sentence_below_the_table() {
        let checks = [
            Check::ok("kernel", "6.18"),
            Check::bad("/dev/fuse", "absent", "load the module: `modprobe fuse`".into()),
        ];
        let expected = "\
check      result  found
kernel     ok      6.18
/dev/fuse  bad     absent

bad: /dev/fuse: load the module: `modprobe fuse`
";
        assert_eq!(for_people(&checks), expected);
    }
}
