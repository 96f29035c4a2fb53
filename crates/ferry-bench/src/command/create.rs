//! `ferry bench create`: makes files without a pause.

use ferry_bench::{VolumeOptions, create, programs};

use crate::args::CreateArgs;
use crate::mounts::Mounts;
use crate::show;
use ferry::command::shared::{CliError, format_bytes};

/// Runs on given paths, or in process on a new volume in each turn.
pub fn run(args: &CreateArgs) -> Result<(), CliError> {
    let options = create::Options {
        files: args.files,
        size: usize::try_from(args.size).unwrap_or(usize::MAX),
        threads: args.threads,
        readers: args.readers,
        rounds: args.run.rounds,
    };
    let volume = VolumeOptions {
        device: args.model.device(),
        log_size: Some(args.log_size),
        ..VolumeOptions::default()
    };
    if !args.run.on.is_empty() || !args.mounts.rtt.is_empty() {
        // The mounts live until the run has ended.
        let mounts = Mounts::new(&args.mounts)?;
        let targets = mounts.targets(&args.run)?;
        if args.shell {
            return show(
                programs::by_shell(args.files, args.run.rounds, &targets),
                &args.run,
                |_| Vec::new(),
            );
        }
        return show(create::on_targets(&options, &targets), &args.run, |_| Vec::new());
    }
    if args.shell {
        return Err(CliError::Usage(
            "a shell makes files on mounts: say --on PATH, or --rtt TIME".into(),
        ));
    }
    let mut bench = create::in_process(&options, &volume);
    bench.options.push(("device", args.model.to_string()));
    bench.options.push(("log", format_bytes(args.log_size)));
    show(bench, &args.run, |_| Vec::new())
}
