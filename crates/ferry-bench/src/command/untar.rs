//! `ferry bench untar`: times tar and rm.

use std::fs::File;
use std::io;

use ferry_bench::programs;

use crate::args::UntarArgs;
use crate::mounts::Mounts;
use crate::show;
use ferry::command::shared::CliError;

/// On mounts: tar and rm know nothing else.
pub fn run(args: &UntarArgs) -> Result<(), CliError> {
    if args.run.on.is_empty() && args.mounts.rtt.is_empty() {
        return Err(CliError::Usage("say where to unpack: --on PATH, or --rtt TIME".into()));
    }
    let unreadable = || CliError::path(&args.tar, "cannot read");
    let tar = args.tar.canonicalize().map_err(unreadable())?;
    let mut file = File::open(&tar).map_err(unreadable())?;
    io::copy(&mut file, &mut io::sink()).map_err(unreadable())?;
    let mounts = Mounts::new(&args.mounts)?;
    let targets = mounts.targets(&args.run)?;
    show(programs::untar(&tar, args.run.rounds, &targets), &args.run, |_| Vec::new())
}
