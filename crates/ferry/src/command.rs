//! The `ferry` command: reads its command line and runs what it asks for.
//!
//! Where to start reading: `cli` is the command line, `mount` and `daemon` a mount's life,
//! `control` what a running daemon or server is asked. [`shared`] is what the benchmarks' own
//! program has in common with this one.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{self, ExitCode};

use clap::Parser;

use crate::cli::{Cli, Command};
use crate::error::CliError;
use crate::helper::{self, Asked};
use crate::options::MountOptions;
use crate::{
    backup, cert, clients, clone, control, copy, dashboard, debug, diff, doctor, fsck, go_on, list,
    logging, mkfs, mount, pages, passphrase, profile, rekey, replace, resize, rollback, scrub,
    serve, snapshot, space, stats, sync, top, trace, umount, upgrade, warm,
};

/// The program that `ferry bench` runs, in the directory of `ferry`.
const BENCH: &str = "ferry-bench";

/// What `ferry-bench` shares with `ferry`. It is no public interface: both are built together.
pub mod shared {
    pub use crate::control::print;
    pub use crate::error::CliError;
    pub use crate::holder::Holder;
    pub use crate::logging::start as start_log;
    pub use crate::mount::{Plain, run_plain};
    pub use crate::mounts::{Mount, list as mount_list};
    pub use crate::options::MountOptions;
    pub use crate::size::{format_bytes, format_nanos, parse_bytes, parse_duration, parse_time};
    pub use crate::sync::raise_open_files;
    pub use crate::utab::words as listed_options;

    use std::process::ExitCode;

    /// Prints why a command failed, and makes the exit code.
    pub fn exit(done: Result<ExitCode, CliError>) -> ExitCode {
        done.unwrap_or_else(|error| {
            // The daemon has printed its error on the same stderr.
            if !matches!(error, CliError::Daemon) {
                eprintln!("ferry: {error}");
            }
            ExitCode::from(error.exit_code())
        })
    }
}

/// Runs the command that this process was started as.
pub fn main() -> ExitCode {
    shared::exit(match helper::parse(std::env::args_os()) {
        None => {
            let cli = help_with_bench().map_or_else(Cli::parse, |args| Cli {
                log_level: None,
                passphrase_file: None,
                command: Command::Bench(crate::cli::BenchArgs { args }),
            });
            if let Some(file) = &cli.passphrase_file {
                passphrase::use_file(file);
            }
            run(&cli.command, cli.log_level.as_deref(), false)
        }
        Some(Ok(Asked::Mount(args, sloppy))) => run(&Command::Mount(*args), None, sloppy),
        Some(Ok(Asked::Nothing)) => Ok(ExitCode::SUCCESS),
        Some(Err(error)) => Err(error),
    })
}

/// `ferry help bench …`, as arguments of the other program: it alone knows its commands.
fn help_with_bench() -> Option<Vec<OsString>> {
    let mut args = std::env::args_os().skip(1);
    let asked = args.next()? == "help" && args.next()? == "bench";
    asked.then(|| [OsString::from("help")].into_iter().chain(args).collect())
}

/// Becomes the program of the benchmarks; returns only if that fails.
fn bench(args: &[OsString], level: Option<&str>) -> CliError {
    let here =
        |e| CliError::Failed(format!("cannot tell where ferry itself is, to run {BENCH}: {e}"));
    let program = match std::env::current_exe() {
        Ok(ferry) => ferry.with_file_name(BENCH),
        Err(error) => return here(error),
    };
    let level = level.map(|level| ["--log-level", level]).into_iter().flatten();
    let error = process::Command::new(&program).args(level).args(args).exec();
    if error.kind() != std::io::ErrorKind::NotFound {
        return CliError::path(program, "cannot run the benchmarks")(error);
    }
    CliError::Failed(format!(
        "{}: there is no such program, and it has the benchmarks: `cargo build --release --package {BENCH}` makes it; it belongs \
         beside ferry",
        program.display()
    ))
}

fn run(command: &Command, level: Option<&str>, sloppy: bool) -> Result<ExitCode, CliError> {
    let words = |lists: &[String]| MountOptions::parse(lists, sloppy).map_err(CliError::Usage);
    let quietly = || {
        logging::log_panics();
        logging::start(level, "warn", false).map_err(CliError::Usage)
    };
    match command {
        Command::Mount(args) => return mount::run(args, &words(&args.options)?, level),
        Command::Serve(args) => serve::run(args, level)?,
        Command::Clients(args) => quietly().and_then(|()| clients::show(args))?,
        Command::Evict(args) => quietly().and_then(|()| clients::evict(args))?,
        Command::Cert(command) => quietly().and_then(|()| cert::run(command))?,
        Command::Mkfs(args) => quietly().and_then(|()| mkfs::run(args))?,
        Command::Passphrase(args) => quietly().and_then(|()| rekey::run(args))?,
        Command::Resize(args) => quietly().and_then(|()| resize::run(args))?,
        Command::Ask { mountpoint, open: true } => go_on::have_open(mountpoint)?,
        Command::Ask { mountpoint, open: false } => go_on::ask(mountpoint),
        Command::UpgradeMount(args) => quietly().and_then(|()| go_on::run(args))?,
        Command::Upgrade(args) => quietly().and_then(|()| upgrade::run(args))?,
        Command::Replace(args) => quietly().and_then(|()| replace::run(args))?,
        Command::Snapshot(command) => quietly().and_then(|()| snapshot::run(command))?,
        Command::Clone(args) => quietly().and_then(|()| clone::run(args))?,
        Command::Rollback(args) => quietly().and_then(|()| rollback::run(args))?,
        Command::Backup(args) => quietly().and_then(|()| backup::run(args))?,
        Command::Copy(args) => quietly().and_then(|()| copy::run(args))?,
        Command::Umount(args) => quietly().and_then(|()| umount::run(args))?,
        Command::List(args) => quietly().and_then(|()| list::run(args))?,
        Command::Stats(args) => quietly().and_then(|()| stats::run(args))?,
        Command::Space(args) => quietly().and_then(|()| space::run(args))?,
        Command::Profile(args) => quietly().and_then(|()| profile::run(args))?,
        Command::Trace(args) => quietly().and_then(|()| trace::run(args))?,
        Command::Top(args) => quietly().and_then(|()| top::run(args))?,
        Command::Dashboard(args) => quietly().and_then(|()| dashboard::run(args))?,
        Command::Scrub(args) => return quietly().and_then(|()| scrub::run(args)),
        Command::Doctor(args) => return quietly().and_then(|()| doctor::run(args)),
        Command::Diff(args) => return quietly().and_then(|()| diff::run(args)),
        Command::Debug(args) => return quietly().and_then(|()| debug::run(args)),
        Command::Sync(args) => return quietly().and_then(|()| sync::run(args)),
        Command::Warm(args) => return quietly().and_then(|()| warm::run(args)),
        Command::Trim(args) => quietly().and_then(|()| control::trim(args))?,
        Command::Tune(args) => quietly().and_then(|()| control::tune(args))?,
        Command::Completions(args) => pages::completions(args)?,
        Command::Man(args) => pages::man(args)?,
        Command::Bench(args) => return Err(bench(&args.args, level)),
        // What it finds is in its report.
        Command::Fsck(args) => {
            logging::log_panics();
            return logging::start(level, "error", false)
                .map_err(CliError::Usage)
                .and_then(|()| fsck::run(args));
        }
    }
    Ok(ExitCode::SUCCESS)
}
