//! The arguments of the commands that look at mounts and servers.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::listen::Address;
use crate::location::Location;
use crate::profiled::SECS_MAX;
use crate::size::parse_duration;

/// What a command looks at.
#[derive(Args, Debug)]
pub struct Looked {
    /// The mount point, or any directory in it; or the volume, mounted or served; without it the
    /// only mount or server of this machine
    #[arg(value_name = "MOUNTPOINT|VOLUME")]
    pub target: Option<Location>,
}

/// The arguments of `ferry list`.
#[derive(Args, Debug)]
pub struct ListArgs {
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// The arguments of `ferry clients`.
#[derive(Args, Debug)]
pub struct ClientsArgs {
    /// All that is known of each, not a line
    #[arg(long, conflicts_with = "json")]
    pub details: bool,
    /// As JSON, for programs
    #[arg(long)]
    pub json: bool,
}

/// The arguments of `ferry dashboard`.
#[derive(Args, Debug)]
#[command(after_help = "\
It prints the address of the page, with a token that nothing else has: who has the address may read the page. It asks the mounts and servers
every 5 s as `ferry list` does, sees those that answer its user, and forgets the last hour when it ends (Ctrl-C). See docs/dashboard.md.")]
pub struct DashboardArgs {
    /// 127.0.0.1:PORT or another address of this machine alone, where a token is demanded; or
    /// unix:PATH, a socket that its owner and root can use without one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:9821")]
    pub listen: Address,
    /// Do not offer maps of space, which show names of directories: for a page that others see
    #[arg(long)]
    pub no_map: bool,
}

/// The arguments of `ferry doctor`.
#[derive(Args, Debug)]
#[command(after_help = "\
A mount or server that hangs is reported, and holds the command up for some seconds at most. The file of --bundle has: the versions, what was
checked, the lines of the table of mounts, the statistics of each mount and server, and the last 200 lines of each log that is a file.
Keys, passphrases, headers of requests and the names of files in volumes are removed from it. Paths of volumes and mount points, the names of
clients and addresses are left in it: look at it before you send it.")]
pub struct DoctorArgs {
    /// As JSON
    #[arg(long)]
    pub json: bool,
    /// Also make this file, a tar archive for a report of a bug. It must not exist
    #[arg(long, value_name = "FILE.tar.gz")]
    pub bundle: Option<PathBuf>,
}

/// The arguments of `ferry stats`.
#[derive(Args, Debug)]
pub struct StatsArgs {
    #[command(flatten)]
    pub looked: Looked,
    /// Of a volume in a store: also what its snapshots hold there and the volume does not need;
    /// with --json what each alone holds, too. This process reads the maps of all in the store
    #[arg(long)]
    pub snapshots: bool,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// The arguments of `ferry space`.
#[derive(Args, Debug)]
#[command(after_help = "\
The process that has the volume walks through it, not this one through the mount: only root and its own user may ask, on the machine that
has the volume. It takes a quarter of a processor. Ctrl-C stops it. A file with several names counts once, as with du. What changes meanwhile
may be counted in part. Of each directory the largest ones in it are listed, and the others are added up.
  ferry space /mnt
  ferry space /mnt/home --depth 2
  ferry space /srv/data.ferry --json")]
pub struct SpaceArgs {
    #[command(flatten)]
    pub looked: Looked,
    /// List so many levels of directories
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u8).range(1..=4))]
    pub depth: u8,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// The arguments of `ferry top`.
#[derive(Args, Debug)]
#[command(
    after_help = "It ends with Ctrl-C, or when the volume is unmounted. Where stdout is no terminal, one picture follows the other."
)]
pub struct TopArgs {
    #[command(flatten)]
    pub looked: Looked,
    /// Time between two looks
    #[arg(long, value_parser = parse_duration, value_name = "TIME", default_value = "1s")]
    pub interval: Duration,
    /// End after so many
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,
}

/// The arguments of `ferry profile`.
#[derive(Args, Debug)]
#[command(after_help = "\
The daemon looks about 800 times a second at what its threads do and at what waits without a thread, only while
this command runs. `ms/s`: milliseconds of it in each second, over 1000 where several are under way together.
  ferry profile /mnt
  ferry profile /mnt --seconds 20 --svg profile.svg")]
pub struct ProfileArgs {
    #[command(flatten)]
    pub looked: Looked,
    /// How long to look, in seconds
    #[arg(long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u64).range(1..=SECS_MAX))]
    pub seconds: u64,
    /// Print what was seen as JSON
    #[arg(long)]
    pub json: bool,
    /// Also write a line for each stack to this file, as tools read it that draw flame graphs
    #[arg(long, value_name = "FILE")]
    pub folded: Option<PathBuf>,
    /// Also draw a flame graph into this file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// The arguments of `ferry trace`.
#[derive(Args, Debug)]
#[command(after_help = "\
It ends with Ctrl-C, or when the volume is unmounted. The daemon records requests only while this command
runs. A path is shown as far as it is known: of files that were open before, only if their directory is cached.
  ferry trace /mnt --slow 10ms
  ferry trace /mnt --path /mnt/project --json")]
pub struct TraceArgs {
    /// The mount point, or any directory in it; without it the only mount of this machine
    #[arg(value_name = "MOUNTPOINT")]
    pub target: Option<Location>,
    /// Only requests to this file or directory and what is below it
    #[arg(long, value_name = "PATH")]
    pub path: Option<PathBuf>,
    /// Only requests that took at least so long
    #[arg(long, value_parser = parse_duration, value_name = "TIME")]
    pub slow: Option<Duration>,
    /// End after so many
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// Print each request as a line of JSON
    #[arg(long)]
    pub json: bool,
}
