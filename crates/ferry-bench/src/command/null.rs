//! `ferry bench null`: mounts the null file system.

use std::sync::Arc;

use ferry::command::shared::{CliError, MountOptions, Plain, run_plain};
use ferry_bench::null::{NullFs, NullOptions};
use ferry_env::Env;

use crate::args::NullArgs;

/// What the mount shows as its source; and this subcommand.
const NAME: &str = "null";

/// Mounts it, or is the daemon of such a mount.
pub fn run(args: &NullArgs, log_level: Option<&str>) -> Result<(), CliError> {
    let options = MountOptions::parse(&args.options, false).map_err(CliError::Usage)?;
    let mount = Plain {
        mountpoint: &args.mountpoint,
        name: NAME,
        foreground: args.foreground,
        daemon: args.daemon,
    };
    run_plain(&mount, &options, log_level, |cache| {
        Arc::new(NullFs::new(&Env::real(), NullOptions { cache, ..NullOptions::default() }))
    })
}
