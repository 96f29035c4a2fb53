//! The `ferry` command.
//!
//! Where to start reading: `cli` is the command line, `mount` and `daemon` a mount's life, `control` what a running daemon is asked.

mod bdi;
mod bench;
mod cert;
mod cli;
mod clients;
mod control;
mod daemon;
mod debug;
mod error;
mod fsck;
mod helper;
mod holder;
mod logging;
mod memory;
mod mkfs;
mod mount;
mod mounts;
mod object;
mod options;
mod remote;
mod replace;
mod scrub;
mod serve;
mod shown;
mod size;
mod socket;
mod sync;
mod table;
mod top;
mod umount;
mod uring;

use std::process::ExitCode;

use clap::Parser;

use bench::BenchCommand;
use cli::{Cli, Command};
use error::CliError;
use helper::Asked;
use options::MountOptions;

fn main() -> ExitCode {
    let done = match helper::parse(std::env::args_os()) {
        None => {
            let cli = Cli::parse();
            run(&cli.command, cli.log_level.as_deref(), false)
        }
        Some(Ok(Asked::Mount(args, sloppy))) => run(&Command::Mount(args), None, sloppy),
        Some(Ok(Asked::Nothing)) => Ok(ExitCode::SUCCESS),
        Some(Err(error)) => Err(error),
    };
    done.unwrap_or_else(|error| {
        // The daemon has said its own error on the same stderr.
        if !matches!(error, CliError::Daemon) {
            eprintln!("ferry: {error}");
        }
        ExitCode::from(error.exit_code())
    })
}

fn run(command: &Command, level: Option<&str>, sloppy: bool) -> Result<ExitCode, CliError> {
    let words = |lists: &[String]| MountOptions::parse(lists, sloppy).map_err(CliError::Usage);
    let quietly = || logging::start(level, "warn", false).map_err(CliError::Usage);
    match command {
        Command::Mount(args) => mount::run(args, &words(&args.options)?, level)?,
        Command::Bench(BenchCommand::Null(args)) => mount::run_null(args, &words(&args.options)?, level)?,
        Command::Serve(args) => serve::run(args, level)?,
        Command::Clients(args) => quietly().and_then(|()| clients::show(args))?,
        Command::Evict(args) => quietly().and_then(|()| clients::evict(args))?,
        Command::Cert(command) => quietly().and_then(|()| cert::run(command))?,
        Command::Mkfs(args) => quietly().and_then(|()| mkfs::run(args))?,
        Command::Replace(args) => quietly().and_then(|()| replace::run(args))?,
        Command::Umount(args) => quietly().and_then(|()| umount::run(args))?,
        Command::Stats(args) => quietly().and_then(|()| control::stats(args))?,
        Command::Top(args) => quietly().and_then(|()| top::run(args))?,
        Command::Scrub(args) => return quietly().and_then(|()| scrub::run(args)),
        Command::Debug(args) => return quietly().and_then(|()| debug::run(args)),
        Command::Sync(args) => return quietly().and_then(|()| sync::run(args)),
        Command::Tune(args) => quietly().and_then(|()| control::tune(args))?,
        Command::Bench(command) => quietly().and_then(|()| bench::run(command))?,
        Command::Fsck(args) => return quietly().and_then(|()| fsck::run(args)),
    }
    Ok(ExitCode::SUCCESS)
}
