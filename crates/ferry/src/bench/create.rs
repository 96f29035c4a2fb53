//! `ferry bench create`.

use ferry_bench::{Place, VolumeOptions, create};

use super::args::CreateArgs;
use super::remote::RemoteMount;
use super::{failed, places, show};
use crate::error::CliError;
use crate::size::format_bytes;

/// On paths as they are; in process on a new volume in each turn.
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
    if !args.run.on.is_empty() || !args.rtt.is_empty() {
        // They live as long as they are worked on.
        let mounts = args.rtt.iter().map(|rtt| RemoteMount::new(*rtt, &args.volumes));
        let mounts = mounts.collect::<Result<Vec<_>, _>>()?;
        let mut places = if args.run.on.is_empty() { Vec::new() } else { places(&args.run, &volume)? };
        for mount in &mounts {
            places.push(Place::on(mount.path(), None).map_err(failed)?);
        }
        return show(create::on_places(&options, &places), &args.run, |_| Vec::new());
    }
    let mut bench = create::in_process(&options, &volume);
    bench.options.push(("device", args.model.to_string()));
    bench.options.push(("log", format_bytes(args.log_size)));
    show(bench, &args.run, |_| Vec::new())
}
