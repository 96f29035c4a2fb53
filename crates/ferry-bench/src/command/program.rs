//! `ferry bench program`: times any command.

use ferry_bench::programs;

use crate::args::ProgramArgs;
use crate::mounts::Mounts;
use crate::show;
use ferry::command::shared::CliError;

/// On mounts: programs know nothing else.
pub fn run(args: &ProgramArgs) -> Result<(), CliError> {
    if args.run.on.is_empty() && args.mounts.rtt.is_empty() {
        return Err(CliError::Usage("say where to run it: --on PATH, or --rtt TIME".into()));
    }
    let mounts = Mounts::new(&args.mounts)?;
    let targets = mounts.targets(&args.run)?;
    show(programs::by_command(&args.command, args.run.rounds, &targets), &args.run, |_| Vec::new())
}
