//! The arguments of `ferry bench`.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use ferry_bench::DeviceModel;
use ferry_bench::workload::fsync_happy::real;
use ferry_bench::workload::{
    create, fserver, fsmark, log_space, overwrite, randrw, torn, transactions,
};
#[cfg(feature = "compare")]
use ferry_fs::Locking;
use ferry_journal::{FlushPolicy, IN_FLIGHT_MAX, Wake};

use ferry::command::shared::{format_nanos, parse_bytes, parse_duration};

/// Benchmarks
#[derive(Parser, Debug)]
#[command(
    name = "ferry-bench",
    bin_name = "ferry bench",
    version,
    propagate_version = true,
    max_term_width = 110
)]
pub struct Cli {
    /// How much is said: error, warn, info, debug, trace, or a filter such as `ferry_fs=debug`
    /// (also: environment FERRY_LOG)
    #[arg(long, global = true, value_name = "LEVEL")]
    pub log_level: Option<String>,
    /// What is measured.
    #[command(subcommand)]
    pub benchmark: Benchmark,
}

/// The benchmarks.
#[derive(Subcommand, Debug)]
pub enum Benchmark {
    /// Mount a file system that keeps everything in memory and does nothing else: the floor to
    /// compare with
    Null(NullArgs),
    /// Callers that overwrite blocks and fsync, again and again, under each flush policy
    FsyncHappy(FsyncHappyArgs),
    /// Make many small files, and make them durable: not at all, one by one, or many at a time
    Fsmark(FsmarkArgs),
    /// Many workers that make, write, read, move and remove files, on a small log
    Fserver(FserverArgs),
    /// Make files without a pause, and see how long the slowest takes
    Create(CreateArgs),
    /// Unpack a tar file and remove what was in it, with tar and rm
    Untar(UntarArgs),
    /// Run any command, as git clone, and remove what it has made
    Program(ProgramArgs),
    /// Threads that take log space and give it back, and nothing else: what waiting for it costs
    LogSpace(LogSpaceArgs),
    /// Rewrite keys in the journal alone, with nobody waiting: transactions a second
    Transactions(TransactionsArgs),
    /// Random readers and random writers on one file, alone and against each other
    Randrw(RandrwArgs),
    /// Look for torn reads: threads write, read, punch, cut and extend one file, and check what
    /// they read
    Torn(TornArgs),
    /// Overwrite a file that fills much of a volume at random, and compare: what the cleaner costs
    Overwrite(OverwriteArgs),
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

/// Where a workload runs, how often, and what becomes of the report.
#[derive(Args, Debug)]
pub struct RunArgs {
    /// A directory on any file system; several take turns. Without it: in process, on a volume in
    /// memory over a model of a device
    #[arg(long, value_name = "PATH")]
    pub on: Vec<PathBuf>,
    /// How often each variant has its turn
    #[arg(long, value_name = "N", default_value_t = ferry_bench::ROUNDS, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// The report with every value as JSON (- for stdout)
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// The report as one HTML page with plots
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

/// The model of a device that a volume in memory is on. It takes real time and no processor time.
#[derive(Args, Debug)]
pub struct ModelArgs {
    /// How long a flush takes
    #[arg(long, value_parser = parse_duration, value_name = "TIME", default_value = "2ms", conflicts_with = "on")]
    pub flush_time: Duration,
    /// What writes and flushes take besides
    #[command(flatten)]
    pub queue: QueueArgs,
}

/// The rest of a device.
#[derive(Args, Debug)]
pub struct QueueArgs {
    /// How long a write takes
    #[arg(long, value_parser = parse_duration, value_name = "TIME", default_value = "20us", conflicts_with = "on")]
    pub write_time: Duration,
    /// Writes that the device works on at the same time
    #[arg(long, value_name = "N", default_value_t = 128, conflicts_with = "on", value_parser = clap::value_parser!(u32).range(1..))]
    pub queue_depth: u32,
    /// The device does flushes beside each other
    #[arg(long, conflicts_with = "on")]
    pub parallel_flushes: bool,
}

impl QueueArgs {
    /// The device with flushes of this time.
    pub fn device(&self, flush_time: Duration) -> DeviceModel {
        DeviceModel {
            flush_time,
            write_time: self.write_time,
            queue_depth: self.queue_depth,
            serial_flushes: !self.parallel_flushes,
        }
    }
}

impl ModelArgs {
    /// The device.
    pub fn device(&self) -> DeviceModel {
        self.queue.device(self.flush_time)
    }
}

impl fmt::Display for ModelArgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time =
            |time: Duration| format_nanos(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        let flushes =
            if self.queue.parallel_flushes { "beside each other" } else { "one after the other" };
        let (flush, write) = (time(self.flush_time), time(self.queue.write_time));
        write!(f, "flush {flush} {flushes}; write {write}, {} at a time", self.queue.queue_depth)
    }
}

/// `ferry bench fsync-happy`.
#[derive(Args, Debug)]
#[command(after_help = "\
Without --on: in process, each number of callers with each flush time, the policies in turn. On a path the policies take turns if it is a
FerryFS, as `ferry tune` sets them; at the end the first one is back. --virtual runs the journal alone, on a clock that is not waited for: counts
and times are exact.")]
pub struct FsyncHappyArgs {
    /// In virtual time
    #[arg(long, conflicts_with_all = ["on", "html", "time"])]
    pub r#virtual: bool,
    /// How long a flush takes; several: 16ms,500us
    #[arg(long, value_parser = parse_duration, value_delimiter = ',', value_name = "TIME", default_value = "16ms,2ms,500us,50us", conflicts_with = "on")]
    pub flush_time: Vec<Duration>,
    /// What writes and flushes take besides
    #[command(flatten)]
    pub queue: QueueArgs,
    /// The load.
    #[command(flatten)]
    pub options: real::Options,
    /// Where, how often, and the report.
    #[command(flatten)]
    pub run: RunArgs,
}

/// `ferry bench fsmark`.
#[derive(Args, Debug)]
#[command(after_help = "\
A pass is measured by itself. So that files are still dirty when it begins, mount with -o commit_interval=1h.")]
pub struct FsmarkArgs {
    /// The workload's own.
    #[command(flatten)]
    pub options: fsmark::Options,
    /// The device.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Where, how often, and the report.
    #[command(flatten)]
    pub run: RunArgs,
}

/// `ferry bench fserver`.
#[derive(Args, Debug)]
#[command(after_help = "\
A job is 100 operations, in an order of chance: 12 create, 16 write, 22 read, 24 stat, 5 rename, 4 link, 16 unlink, 1 fsync.
Ways to wake those who wait for log space (each has a volume of its own, and they take turns):
  barging  each once, with its space in hand; a running thread may take free space before it, a bounded number of times
  handoff  each once, with its space in hand, in strict order
  flag     each for whom there is room, unless it is on its way already; it takes its space itself
  all      each for whom there is room, on its way or not; it takes its space itself
Records are under way together where each fsync has its own (--policy each); the other policies let callers share one flush, and a record, instead:
  --fsync-each --policy each --write-time 1ms --flush-time 50us --log-size 64M --log-buffers 1,8 --wake handoff")]
pub struct FserverArgs {
    /// The workload's own.
    #[command(flatten)]
    pub options: fserver::Options,
    /// Size of the log
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE", default_value = "4M", conflicts_with = "on")]
    pub log_size: u64,
    /// Ways to wake; several: handoff,all
    #[arg(long, value_delimiter = ',', value_name = "WAY", default_values_t = Wake::WAYS, conflicts_with = "on")]
    pub wake: Vec<Wake>,
    /// Log records that are written at the same time; several: 1,8
    #[arg(long, value_delimiter = ',', value_name = "N", default_value = "8", conflicts_with = "on",
          value_parser = clap::value_parser!(u8).range(1..=IN_FLIGHT_MAX as i64))]
    pub log_buffers: Vec<u8>,
    /// The flush policy
    #[arg(long, value_name = "POLICY", default_value_t, conflicts_with = "on")]
    pub policy: FlushPolicy,
    /// The device.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Where, how often, and the report.
    #[command(flatten)]
    pub run: RunArgs,
}

/// `ferry bench create`.
#[derive(Args, Debug)]
pub struct CreateArgs {
    /// The workload's own.
    #[command(flatten)]
    pub options: create::Options,
    /// By a shell, one after the other, as `echo foobarbaz >FILE`; on mounts
    #[arg(long, conflicts_with_all = ["size", "threads", "readers", "log_size"])]
    pub shell: bool,
    /// Size of the log
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE", default_value = "64M", conflicts_with_all = ["on", "rtt"])]
    pub log_size: u64,
    /// Mounts of its own.
    #[command(flatten)]
    pub mounts: MountsArgs,
    /// The device.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Where, how often, and the report.
    #[command(flatten)]
    pub run: RunArgs,
}

/// Mounts that a bench makes for itself, in turn with what --on names.
#[derive(Args, Debug)]
pub struct MountsArgs {
    /// On remote mounts of this machine, each with a server behind a network of this round trip, in
    /// turn with what --on names: 0us,1ms
    #[arg(long, value_parser = parse_duration, value_delimiter = ',', value_name = "TIME")]
    pub rtt: Vec<Duration>,
    /// Whether those mounts answer before the server does; several: on,off
    #[arg(
        long = "async",
        value_name = "on|off",
        value_delimiter = ',',
        default_value = "on",
        requires = "rtt",
        id = "async"
    )]
    pub asynchronous: Vec<OnOff>,
    /// On a local mount, too
    #[arg(long, requires = "rtt")]
    pub local: bool,
    /// Where the volumes of all these mounts are
    #[arg(long, value_name = "DIR", default_value = "/var/tmp", requires = "rtt")]
    pub volumes: PathBuf,
}

/// Whether something is done.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnOff {
    /// It is.
    On,
    /// It is not.
    Off,
}

/// `ferry bench untar`.
#[derive(Args, Debug)]
#[command(after_help = "\
The programs are tar and rm, as a user runs them: tar -xf FILE, until it has ended; then what is missing until all of it is durable; rm -r.")]
pub struct UntarArgs {
    /// A tar file, best an uncompressed one: it is read once before, so that it is in memory
    #[arg(long, value_name = "FILE")]
    pub tar: PathBuf,
    /// Mounts of its own.
    #[command(flatten)]
    pub mounts: MountsArgs,
    /// Where, how often, and the report.
    #[command(flatten)]
    pub run: RunArgs,
}

/// `ferry bench program`.
#[derive(Args, Debug)]
#[command(after_help = "\
A shell runs the command in a new, empty directory of each target; then what is missing until all of it is durable; rm -r. What it prints is shown.")]
pub struct ProgramArgs {
    /// What the shell runs, for example 'git clone -q /srv/project.git .'
    #[arg(long, value_name = "COMMAND")]
    pub command: String,
    /// Mounts of its own.
    #[command(flatten)]
    pub mounts: MountsArgs,
    /// Where, how often, and the report.
    #[command(flatten)]
    pub run: RunArgs,
}

/// `ferry bench log-space`.
#[derive(Args, Debug)]
#[command(after_help = "\
An operation takes 3 blocks of 4 KiB, computes, and gives 2 back; the third lies in the log until the tail moves, a quarter of the log at a time.
Ways to serve those who wait: as for `ferry bench fserver`. In process.")]
pub struct LogSpaceArgs {
    /// The workload's own.
    #[command(flatten)]
    pub options: log_space::Options,
    /// How often, and the report; --on is refused.
    #[command(flatten)]
    pub run: RunArgs,
}

/// `ferry bench transactions`.
#[derive(Args, Debug)]
#[command(after_help = "\
A transaction reserves log space for one key, puts one value and commits, as a file system does to change an inode. In process, on a new journal
in each turn.")]
pub struct TransactionsArgs {
    /// The workload's own.
    #[command(flatten)]
    pub options: transactions::Options,
    /// The device.
    #[command(flatten)]
    pub model: ModelArgs,
    /// How often, and the report; --on is refused.
    #[command(flatten)]
    pub run: RunArgs,
}

/// `ferry bench randrw`.
#[derive(Args, Debug)]
#[cfg_attr(
    feature = "compare",
    command(after_help = "\
Who excludes whom on one file (in process):
  range  those that touch the same folios of 64 KiB: what FerryFS does
  folio  the same for writes inside one folio; longer ones exclude all others
  inode  a writer excludes all others, as XFS has it")
)]
pub struct RandrwArgs {
    /// The workload's own.
    #[command(flatten)]
    pub options: randrw::Options,
    /// The rule of exclusion between readers and writers; several: range,inode
    #[cfg(feature = "compare")]
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "RULE",
        default_value = "range",
        conflicts_with = "on"
    )]
    pub lock: Vec<Locking>,
    /// The device.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Where, how often, and the report.
    #[command(flatten)]
    pub run: RunArgs,
}

/// `ferry bench overwrite`.
#[derive(Args, Debug)]
pub struct OverwriteArgs {
    /// The workload's own.
    #[command(flatten)]
    pub options: overwrite::Options,
    /// Size of the volume, in process
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE", default_value = "1G", conflicts_with = "on")]
    pub capacity: u64,
    /// Memory for contents, in process
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE", default_value = "128M", conflicts_with = "on")]
    pub cache_size: u64,
    /// The device.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Where, how often, and the report.
    #[command(flatten)]
    pub run: RunArgs,
}

/// `ferry bench torn`.
#[derive(Args, Debug)]
#[command(
    after_help = "Ends with exit code 1 if a read was torn or stale. On a path it makes a file of 20 MiB and removes it."
)]
pub struct TornArgs {
    /// A directory on any file system. Without it: in process, on a volume in memory
    #[arg(long, value_name = "PATH")]
    pub on: Option<PathBuf>,
    /// The workload's own.
    #[command(flatten)]
    pub plan: torn::Plan,
    /// Memory for contents, in process
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE", default_value = "256M", conflicts_with = "on")]
    pub cache_size: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_lines_are_read_as_documented() {
        for line in [
            "create --files 1000000 --threads 4 --readers 2 --log-size 64M",
            "create --on /mnt/a",
            "log-space --waiters 48,400 --wake barging,handoff,flag,all --log-size 256K --json -",
            "transactions --threads 2 --keys 10000 --bytes 100 --log-size 4M --commit-interval 1s",
            "fserver --workers 8 --log-size 1M --wake handoff,all --log-buffers 1,8 --policy each --fsync-each",
            "null /mnt",
            "fsync-happy --virtual --flush-time 16ms,50us --callers 1,16 --policy each,adaptive --json -",
            "fsync-happy --parallel-flushes --time 1s --rounds 9 --json a.json --html a.html",
            "fsync-happy --on /mnt --on /var/tmp --policy adaptive",
            "fsmark --files 100 --size 4K --threads 4 --sync each,async --flush-time 16ms --write-time 20us --queue-depth 8",
            "fsmark --on /mnt",
        ] {
            Cli::try_parse_from(["bench"].into_iter().chain(line.split(' ')))
                .unwrap_or_else(|e| panic!("{line}: {e}"));
        }
        for line in [
            "fsmark --on /mnt --flush-time 2ms",
            "fsync-happy --virtual --on /mnt",
            "fsmark --rounds 0",
        ] {
            assert!(
                Cli::try_parse_from(["bench"].into_iter().chain(line.split(' '))).is_err(),
                "{line}"
            );
        }
    }
}
