//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

use crate::options::HELP as OPTIONS_HELP;
use crate::size::{parse_bytes, parse_duration};

/// A POSIX file system in a single file, for work that makes many small files and syncs them.
#[derive(Parser, Debug)]
#[command(
    name = "ferry",
    version,
    propagate_version = true,
    max_term_width = 110,
    after_help = "\
Exit codes: 0 done, 1 failed, 2 wrong usage; ferry fsck: 0 clean, 4 damage found, 8 could not check.
First steps:
  ferry mkfs data.ferry
  ferry mount data.ferry /mnt
  ferry umount /mnt"
)]
pub struct Cli {
    /// How much is said: error, warn, info, debug, trace, or a filter such as `ferry_fs=debug` (also: environment FERRY_LOG)
    #[arg(long, global = true, value_name = "LEVEL")]
    pub log_level: Option<String>,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Make a new volume: one sparse file, which grows as it is used
    Mkfs(MkfsArgs),
    /// Mount a volume
    Mount(MountArgs),
    /// Unmount, and wait until everything is on disk
    Umount(UmountArgs),
    /// Check a volume that is not mounted: exit 0 clean, 4 damage, 8 could not check
    Fsck(FsckArgs),
    /// Make everything on a mounted volume durable (sync(1) does not reach a FUSE file system)
    Sync(MountpointArgs),
    /// Show space, log, flushes, cache and requests of a mounted volume
    Stats(StatsArgs),
    /// Benchmarks
    #[command(subcommand)]
    Bench(BenchCommand),
}

/// `ferry mkfs`.
#[derive(Args, Debug)]
pub struct MkfsArgs {
    /// The file (made when absent) or block device that becomes the volume
    pub volume: PathBuf,
    /// Largest size of the volume, for example 64G; space is taken only as it is used [default: 64G, or the block device's size]
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    pub size: Option<u64>,
    /// Size of the log, for example 64M [default: 64M, less on a small volume]
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    pub log_size: Option<u64>,
    /// Make it even where another volume or foreign data would be lost
    #[arg(long)]
    pub force: bool,
}

/// `ferry mount`.
#[derive(Args, Debug)]
#[command(after_help = format!("Options of -o:\n{OPTIONS_HELP}\n\n\
With --foreground, SIGTERM and SIGINT unmount cleanly. If the mount is busy it is detached (new work cannot reach it) and served\n\
until its last user is gone, for at most --stop-timeout; a second signal ends it at once. What was synced is safe in every case."))]
pub struct MountArgs {
    /// The volume
    pub volume: PathBuf,
    /// An existing directory
    pub mountpoint: PathBuf,
    /// Make the volume, with ferry mkfs's defaults, if it does not exist
    #[arg(long)]
    pub create: bool,
    /// Mount options, separated by commas (see below)
    #[arg(short, value_name = "OPTIONS")]
    pub options: Vec<String>,
    /// Stay in the foreground (for systemd and for debugging); messages go to stderr
    #[arg(long, short)]
    pub foreground: bool,
    /// How long a busy mount is served on after SIGTERM
    #[arg(long, value_parser = parse_duration, value_name = "TIME", default_value = "30s")]
    pub stop_timeout: Duration,
    /// The process is the daemon that a mount in the background has started.
    #[arg(long, hide = true)]
    pub daemon: bool,
}

/// `ferry umount`.
#[derive(Args, Debug)]
pub struct UmountArgs {
    /// The mount point (or the volume)
    pub mountpoint: PathBuf,
    /// End it at once, even if it is busy or its daemon hangs; requests under way fail
    #[arg(long, short)]
    pub force: bool,
    /// Detach it now; it ends when its last user is gone
    #[arg(long, short)]
    pub lazy: bool,
    /// How long to wait until the daemon has written everything back and gone [default: 120s; with --force 10s, then it is killed]
    #[arg(long, value_parser = parse_duration, value_name = "TIME")]
    pub timeout: Option<Duration>,
}

impl MountArgs {
    /// The default of `--stop-timeout`.
    pub const STOP_TIMEOUT: Duration = Duration::from_secs(30);
}

impl UmountArgs {
    /// The default of `--timeout`.
    pub const TIMEOUT: Duration = Duration::from_secs(120);
    /// The default of `--timeout` with `--force`.
    pub const TIMEOUT_FORCED: Duration = Duration::from_secs(10);
}

/// `ferry fsck`.
#[derive(Args, Debug)]
pub struct FsckArgs {
    /// The volume; it must not be mounted
    pub volume: PathBuf,
    /// The report as JSON on stdout
    #[arg(long)]
    pub json: bool,
}

/// A mount point alone.
#[derive(Args, Debug)]
pub struct MountpointArgs {
    /// The mount point, or any directory in it
    pub mountpoint: PathBuf,
}

/// `ferry stats`.
#[derive(Args, Debug)]
pub struct StatsArgs {
    /// The mount point, or any directory in it
    pub mountpoint: PathBuf,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// `ferry bench`.
#[derive(Subcommand, Debug)]
pub enum BenchCommand {
    /// Mount a file system that keeps everything in memory and does nothing else: the floor to compare with
    Null(NullArgs),
}

/// `ferry bench null`.
#[derive(Args, Debug)]
pub struct NullArgs {
    /// An existing directory
    pub mountpoint: PathBuf,
    /// Mount options, as for `ferry mount`
    #[arg(short, value_name = "OPTIONS")]
    pub options: Vec<String>,
    /// Stay in the foreground
    #[arg(long, short)]
    pub foreground: bool,
    /// The process is the daemon that a mount in the background has started.
    #[arg(long, hide = true)]
    pub daemon: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_documented_commands_parse() {
        for line in [
            "ferry mkfs v --size 64G --log-size 64M --force",
            "ferry mount v /mnt --create -o ro,cache=strict -o allow_other --foreground",
            "ferry umount /mnt --force --lazy",
            "ferry fsck v --json",
            "ferry sync /mnt",
            "ferry stats /mnt --json --log-level debug",
            "ferry bench null /mnt",
        ] {
            Cli::try_parse_from(line.split(' ')).unwrap_or_else(|e| panic!("{line}: {e}"));
        }
        assert!(Cli::try_parse_from(["ferry", "mkfs", "v", "--size", "big"]).is_err());
    }
}
