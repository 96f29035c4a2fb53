//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};
use ferry_device::Kind;

use ferry_journal::FlushPolicy;
use ferry_net::{Export, IdSet};

use crate::listen::Address;
use crate::location::Location;
use crate::options::{HELP as OPTIONS_HELP, one_access, parse_cache_disk, parse_flush_interval};
use crate::schedule::Schedule;
use crate::size::{parse_bytes, parse_duration};

mod look;

pub use look::*;

/// A POSIX file system in a single file, for work that makes many small files and syncs them.
#[derive(Parser, Debug)]
#[command(
    name = "ferry",
    version,
    propagate_version = true,
    max_term_width = 110,
    after_help = "\
Exit codes: 0 done, 1 failed, 2 wrong usage; fsck, scrub and debug: 0 clean, 1 repaired (fsck), stopped (scrub), 4 damage (left), 8 could not check;
diff: 0 same, 1 differs, 2 could not compare.
First steps:
  ferry mkfs data.ferry
  ferry mount data.ferry /mnt
  ferry umount /mnt"
)]
pub struct Cli {
    /// How much is said: error, warn, info, debug, trace, or a filter such as `ferry_fs=debug`
    /// (also: environment FERRY_LOG)
    #[arg(long, global = true, value_name = "LEVEL")]
    pub log_level: Option<String>,
    /// The file with the passphrase of an encrypted volume (also: environment
    /// FERRY_PASSPHRASE_FILE, mount option passphrase_file); without it the passphrase is asked for
    /// at the terminal
    #[arg(long, global = true, value_name = "FILE")]
    pub passphrase_file: Option<PathBuf>,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Make a new volume: one sparse file, which grows as it is used, or several files or block
    /// devices
    Mkfs(MkfsArgs),
    /// Mount a volume
    Mount(MountArgs),
    /// Change the passphrase of an encrypted volume in a store, mounted or not
    Passphrase(PassphraseArgs),
    /// Give a volume another size, mounted or not
    ///
    /// A volume that becomes smaller is emptied behind its new end first, while programs use it. If
    /// the command is stopped or killed, or the machine crashes, the volume has the old size or the
    /// new one, and all of its files.
    Resize(ResizeArgs),
    /// One request to a mount on each core, for the daemon that goes on with it.
    #[command(hide = true)]
    Ask {
        /// The mount point.
        mountpoint: PathBuf,
        /// Have a file open there instead, until the standard input ends.
        #[arg(long)]
        open: bool,
    },
    /// Let this version of ferry go on with a mount, while programs use it
    UpgradeMount(UpgradeMountArgs),
    /// Give a volume that an earlier release has made what volumes have that are made now, in place
    ///
    /// Nobody may have it open. If the command is stopped or killed, or the machine crashes, the
    /// volume is as it was, or upgraded, and has all of its files. The earlier release uses an
    /// upgraded volume, too.
    Upgrade(UpgradeArgs),
    /// Build a mirror's side anew on another file or block device, while it is mounted or not
    Replace(ReplaceArgs),
    /// Let other machines mount a volume: `ferry mount ferry://HOST/ MOUNTPOINT`
    Serve(ServeArgs),
    /// Show the clients of the servers that run on this machine: who they are, what they hold, what
    /// is under way
    Clients(ClientsArgs),
    /// End a client's session for good: its locks are free, its mount fails until it is mounted
    /// again
    Evict(EvictArgs),
    /// Certificates for servers and clients
    #[command(subcommand)]
    Cert(CertCommand),
    /// Unmount, and wait until everything is on disk
    ///
    /// Exit 0: the volume was closed cleanly. Exit 1: it was not, or its daemon had died (0 with
    /// --force or --lazy, which say so): what was not synced may be lost.
    Umount(UmountArgs),
    /// Check a volume that is not mounted, and repair it: exit 0 clean, 1 repaired, 4 damage
    /// (left), 8 could not check
    Fsck(FsckArgs),
    /// Read and verify everything that a volume holds, mounted or not: exit 0 clean, 4 damage, 1
    /// stopped, 8 could not check
    Scrub(ScrubArgs),
    /// Snapshots of a volume in a store, or in a file on XFS or Btrfs, mounted or not
    #[command(subcommand)]
    Snapshot(SnapshotCommand),
    /// Make a volume, which nobody has open, what it was when a snapshot was made
    ///
    /// What the volume is until then becomes a snapshot first: before-rollback, or
    /// before-rollback-2 and so on. All snapshots stay. If the command is killed, the volume is as
    /// it was, or rolled back as a whole.
    Rollback(RollbackArgs),
    /// Make a new volume, which can be written at once, of a snapshot of a volume in a store; or of
    /// a volume in a file on XFS or Btrfs, as it is or as a snapshot has it
    ///
    /// In a store it lies beside the volume: in the same bucket, or in the same directory. The
    /// volume has a pin for it, which `ferry snapshot list` shows as NAME@ID@NEW. A clone of a file
    /// lies on the same file system, and stays whatever becomes of the volume. No data is copied:
    /// what is the same in both is stored once. If the command is killed, there is no clone, or a
    /// whole one.
    Clone(CloneArgs),
    /// Copy a snapshot of a volume in a store, mounted or not, to another store; later only what
    /// that one lacks
    ///
    /// Without @NAME it makes the snapshot backup-DATE-TIME first. The target is a volume with the
    /// snapshots that were backed up: `ferry mount TARGET@NAME` shows one of them, and
    /// `ferry backup TARGET@NAME STORE` restores it. A backup that is cut off is not there; run
    /// again with @NAME, it goes on with what it had copied.
    Backup(BackupArgs),
    /// Copy a whole volume as it is, block by block, between a file or block device and a store, in
    /// any direction. A copy that is cut off is no volume; run again, it goes on where it was
    Copy(CopyArgs),
    /// Show which paths differ between two snapshots of a volume, or a snapshot and the volume:
    /// exit 0 none, 1 some, 2 could not compare
    Diff(DiffArgs),
    /// Show what is stored in a volume that is not mounted, damaged or not: exit 4 part of it is
    /// damaged, 8 could not read
    Debug(DebugArgs),
    /// Make a mounted volume, or many files on any file system, durable (sync(1) does not reach a
    /// FUSE file system)
    Sync(SyncArgs),
    /// Show the mounts and servers of this machine, and how each is
    List(ListArgs),
    /// Show the mounts and servers of this machine in a browser, with the last hour: read only
    Dashboard(DashboardArgs),
    /// Check this machine, its mounts and its servers, and say what to do: exit 0 nothing is bad, 1
    /// something is
    Doctor(DoctorArgs),
    /// Show space, log, flushes, cache and requests of a mounted volume
    Stats(StatsArgs),
    /// Show which directories of a mounted volume take the space
    Space(SpaceArgs),
    /// Show what a mounted volume does, every second
    Top(TopArgs),
    /// Show where the time of a mount or a server goes, by operation and layer
    Profile(ProfileArgs),
    /// Show each request of a mount, with its caller, path, time and error
    Trace(TraceArgs),
    /// Fetch files of a volume in a store into the cache on disk of its mount: exit 1 stopped, or
    /// not all of it is there
    Warm(WarmArgs),
    /// Give the space of what was removed back to the disk on which a mounted volume lies, as
    /// fstrim(8) does
    Trim(TrimArgs),
    /// Change how a mounted volume flushes, the size of its log, and whether a mount of a server is
    /// asynchronous
    Tune(TuneArgs),
    /// Print what a shell needs to complete the command line of ferry
    Completions(CompletionsArgs),
    /// Write the manual pages of all commands into a directory
    Man(ManArgs),
    /// Benchmarks
    #[command(disable_help_flag = true, disable_version_flag = true)]
    Bench(BenchArgs),
}

/// The arguments of `ferry completions`.
#[derive(Args, Debug)]
#[command(after_help = "\
For the shell that runs now, bash for example:
  . <(ferry completions bash)")]
pub struct CompletionsArgs {
    /// The shell
    pub shell: Shell,
}

/// The shells that can complete the command line of ferry.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Shell {
    /// GNU Bash.
    Bash,
    /// Zsh.
    Zsh,
    /// fish.
    Fish,
}

/// The arguments of `ferry man`.
#[derive(Args, Debug)]
pub struct ManArgs {
    /// The directory (made when absent). Each command has a page ferry-COMMAND.1, and ferry.1 lists
    /// them
    pub dir: PathBuf,
}

/// `ferry bench`: the program `ferry-bench` reads these.
#[derive(Args, Debug)]
pub struct BenchArgs {
    /// A benchmark and its options; --help lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    pub args: Vec<OsString>,
}

/// The arguments of `ferry mkfs`.
#[derive(Args, Clone, Debug)]
pub struct MkfsArgs {
    /// The file (made when absent) or block device that becomes the volume; or a store:
    /// s3://BUCKET/PREFIX[?endpoint=URL&profile=NAME], or dir:///DIRECTORY, one that is empty or
    /// absent
    pub volume: Location,
    /// The address of an S3 store, as in the URL
    #[arg(long, value_name = "URL")]
    pub endpoint: Option<String>,
    /// Largest size of the volume, for example 64G; space is taken only as it is used [default:
    /// 64G, or the block device's size; in a store 1T]
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    pub size: Option<u64>,
    /// Size of the log, for example 64M [default: 64M, less on a small volume]
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    pub log_size: Option<u64>,
    /// Make it even where another volume or foreign data would be lost
    #[arg(long)]
    pub force: bool,
    /// Make it of several files or block devices: linear (one behind the other), stripe (in turns),
    /// mirror (a copy on each). VOLUME is then a small text file that lists them
    #[arg(long, value_name = "KIND", requires = "components")]
    pub device: Option<Kind>,
    /// With --device: the files (made where absent) or block devices
    #[arg(value_name = "PATH", requires = "device")]
    pub components: Vec<PathBuf>,
    /// A volume in a store: whether objects are compressed; those that gain nothing are not
    /// [default: zstd]
    #[arg(long, value_name = "HOW")]
    pub compress: Option<Compress>,
    /// A volume in a store: encrypt it. Without its passphrase nothing can be read, by anybody
    #[arg(long)]
    pub encrypt: bool,
}

/// How the objects of a volume in a store are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Compress {
    /// With zstd.
    Zstd,
    /// Not at all.
    Off,
}

/// The arguments of `ferry passphrase`.
#[derive(Args, Debug)]
#[command(after_help = "\
The contents of the volume are not written anew: their key stays, and is wrapped by the new passphrase. Who has seen the old one, and a copy of \
the store from before, can still read that copy.")]
pub struct PassphraseArgs {
    /// The volume
    pub volume: Location,
    /// The file with the new passphrase; without it, it is asked for at the terminal
    #[arg(long, value_name = "FILE")]
    pub new_passphrase_file: Option<PathBuf>,
}

/// The arguments of `ferry replace`.
#[derive(Args, Debug)]
#[command(after_help = "\
Work goes on meanwhile. The new side counts when it is complete; if this is interrupted before, nothing is lost and it can be started again.
Interrupting the command does not stop a mounted volume's rebuild, `ferry stats` shows it.")]
pub struct ReplaceArgs {
    /// The volume
    pub volume: Location,
    /// The side to be replaced, as the volume's file lists it; it may have failed or be gone
    pub old: PathBuf,
    /// The file (made when absent) or block device to build the new side on; one that holds data is
    /// left alone
    pub new: PathBuf,
}

/// The arguments of `ferry mount`.
#[derive(Args, Clone, Debug)]
#[command(after_help = format!("Options of -o:\n{OPTIONS_HELP}\n\n\
With --foreground, SIGTERM and SIGINT unmount cleanly. If the mount is busy it is detached (new work cannot reach it) and served\n\
until its last user is gone, for at most --stop-timeout; a second signal ends it at once. What was synced is safe in every case."))]
pub struct MountArgs {
    /// The volume; one in a store as s3://BUCKET/PREFIX[?endpoint=URL&profile=NAME] or
    /// dir:///DIRECTORY; a snapshot of it with @NAME behind that (in front of the ?); or
    /// ferry://HOST[:PORT]/[PATH], what a server has (`ferry serve`)
    pub volume: Location,
    /// An existing directory
    pub mountpoint: PathBuf,
    /// Make the volume, with ferry mkfs's defaults, if it does not exist
    #[arg(long)]
    pub create: bool,
    /// A volume in a store: take it from an owner that may be alive. That one can write nothing
    /// more, and what it has not synced is lost
    #[arg(long)]
    pub take_over: bool,
    /// With --take-over: also from an owner with durability=local. What only its machine has is
    /// lost, even if it was synced
    #[arg(long, requires = "take_over")]
    pub force: bool,
    /// Mount options, separated by commas (see below)
    #[arg(short, value_name = "OPTIONS", value_parser = one_access)]
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

/// The arguments of `ferry serve`.
#[derive(Args, Debug)]
#[command(after_help = "\
Stays in the foreground; SIGTERM and SIGINT end it: what has come is answered and made durable, clients wait for the next server.
A client with a certificate that was issued without --users or --groups acts as any user that its machine names, root too: give it only to
machines whose root may read and change everything that is exported. With them the server checks ids and permissions itself.
`ferry cert revoke` takes a certificate back: the list `revoked` in --tls DIR is read whenever somebody connects.
Clients keep names, attributes and the contents of small files under leases, and answer changes before the server has made them
(`-o async=off` at a mount turns that off); each read of a larger file is a round trip to the server.
First steps:
  ferry cert init /etc/ferryfs/tls --host files.example.org
  ferry cert issue /etc/ferryfs/tls laptop --users 1000   (bring /etc/ferryfs/tls/laptop there)
  ferry serve data.ferry --listen 0.0.0.0:7373 --tls /etc/ferryfs/tls
  ferry mount ferry://files.example.org/ /mnt -o tls=/etc/ferryfs/laptop")]
pub struct ServeArgs {
    /// The volume; it must not be mounted here
    pub volume: Location,
    /// A volume in a store: take it from an owner that may be alive. That one can write nothing
    /// more, and what it has not synced is lost
    #[arg(long)]
    pub take_over: bool,
    /// With --take-over: also from an owner with durability=local. What only its machine has is
    /// lost, even if it was synced
    #[arg(long, requires = "take_over")]
    pub force: bool,
    /// A volume in a store: one server of several, all of which are started with this. Clients name
    /// all: ferry://A,B/. This one waits until the one that has the volume closes it or is silent
    /// for 4 s, then serves. One that lost it stands by
    #[arg(long, conflicts_with_all = ["take_over", "local_log"])]
    pub standby: bool,
    /// Let another server take the volume: that of this machine, started with --standby, makes all
    /// durable, closes the volume and stands by. Waits until another has it
    #[arg(long, conflicts_with_all = ["take_over", "standby"])]
    pub release: bool,
    /// A volume in a store: a directory of a local disk in which parts of the store's objects are
    /// cached. It may be lost at any time
    #[arg(long, value_name = "DIR")]
    pub cache: Option<PathBuf>,
    /// With --cache: the most that it takes of that disk [default: 10G]
    #[arg(long, value_name = "SIZE", value_parser = parse_cache_disk, requires = "cache")]
    pub cache_disk: Option<u64>,
    /// An fsync of a client that comes sooner than this after the last flush waits, and shares the
    /// next one; at most 60s. Of a volume in a store it bounds what PUTs cost [default: 0, it does
    /// not wait]
    #[arg(long, value_name = "TIME", value_parser = parse_flush_interval)]
    pub flush_interval_min: Option<Duration>,
    /// Serve figures for Prometheus at http://ADDR/metrics; ADDR is HOST:PORT or unix:PATH. All
    /// that reach it may read them, and nothing is encrypted: 127.0.0.1:PORT is for this machine
    /// only [default: off]
    #[arg(long, value_name = "ADDR")]
    pub metrics: Option<Address>,
    /// A volume in a store: durability=local. A sync is durable in a log in this directory, which
    /// must survive a loss of power, and is uploaded behind
    #[arg(long, value_name = "DIR")]
    pub local_log: Option<PathBuf>,
    /// Address and port to listen at
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:7373")]
    pub listen: String,
    /// The server's certificate and key, and the authority whose clients are let in (`ferry cert
    /// init`)
    #[arg(long, value_name = "DIR")]
    pub tls: Option<PathBuf>,
    /// Serve without TLS: everybody who reaches the address, on loopback every user of this
    /// machine, is root on the volume
    #[arg(long, conflicts_with = "tls")]
    pub insecure: bool,
    /// What clients may mount, and whether they may change it: PATH:ro or PATH:rw, several
    /// separated by commas; a :ro inside a :rw counts for those who mount what is above it, too
    /// [default: /:rw]
    #[arg(long, value_delimiter = ',', value_name = "PATH:ro|rw")]
    pub export: Vec<Export>,
    /// A client that is away for so long loses its locks, what it has open and removed, and changes
    /// that it has answered and the server has not applied
    #[arg(long, value_parser = parse_duration, value_name = "TIME", default_value = "90s")]
    pub session_life: Duration,
    /// After its start the server gives for so long only locks that clients held when it stopped,
    /// and changes nothing for its first 7 s if the one before did not stop in order: clients that
    /// have not noticed may rely on what they know
    #[arg(long, value_parser = parse_duration, value_name = "TIME", default_value = "10s")]
    pub grace: Duration,
}

/// The arguments of `ferry evict`.
#[derive(Args, Debug)]
#[command(after_help = "\
What the client has been told is done stays done; what it has under way may be done or not, and fails there with EIO. It may mount again: to keep
it out, revoke its certificate first (`ferry cert revoke`).")]
pub struct EvictArgs {
    /// The client's name, that of its certificate, or its number, as `ferry clients` shows them; a
    /// name means all of that name
    pub client: String,
    /// The volume that its server serves, where clients of several are called so
    #[arg(long)]
    pub volume: Option<Location>,
}

/// The longest life of a certificate, in days: a century.
const DAYS_MAX: i64 = 36_500;

/// The arguments of `ferry cert`.
#[derive(Subcommand, Debug)]
pub enum CertCommand {
    /// Make an authority in a directory, if there is none, and a certificate for the server
    Init {
        /// Where. The authority's secret key comes into DIR/authority, which the server does not
        /// need: you may take it away
        dir: PathBuf,
        /// A name or address under which clients reach the server, once for each [default: this
        /// machine's name, localhost]
        #[arg(long, value_name = "NAME")]
        host: Vec<String>,
        /// The server's certificate is good for so many days
        #[arg(long, value_name = "N", default_value_t = ferry_net::authority::DAYS, value_parser = clap::value_parser!(u32).range(1..=DAYS_MAX))]
        days: u32,
    },
    /// Make a certificate for a client
    Issue {
        /// The directory of `ferry cert init`, or the one where its `authority` is now
        dir: PathBuf,
        /// What the client is called
        name: String,
        /// Users that its machine may act as there, as 1000,2000-2999; the server refuses all
        /// others, root too [default: all]
        #[arg(long, value_name = "IDS")]
        users: Option<IdSet>,
        /// Groups, in the same way: all that its users are in and need [default: with --users the
        /// same numbers, else all]
        #[arg(long, value_name = "IDS")]
        groups: Option<IdSet>,
        /// What it may mount, as PATH:ro or PATH:rw, several separated by commas; where the server
        /// exports less, that counts [default: all that the server exports]
        #[arg(long, value_delimiter = ',', value_name = "PATH:ro|rw")]
        export: Vec<Export>,
        /// The certificate is good for so many days
        #[arg(long, value_name = "N", default_value_t = ferry_net::authority::DAYS, value_parser = clap::value_parser!(u32).range(1..=DAYS_MAX))]
        days: u32,
    },
    /// Take back all certificates of a client: the server ends its sessions, and does not let it in
    /// any more
    Revoke {
        /// The directory of the authority; if the server's --tls is another, bring the file
        /// `revoked` there
        dir: PathBuf,
        /// What the client is called
        name: String,
    },
}

/// The arguments of `ferry umount`.
#[derive(Args, Debug)]
pub struct UmountArgs {
    /// The mount point (or the volume)
    pub mountpoint: Location,
    /// End it at once, even if it is busy or its daemon hangs; requests under way fail. Exit 0
    /// where the daemon had died, too
    #[arg(long, short)]
    pub force: bool,
    /// Detach it now; it ends when its last user is gone
    #[arg(long, short)]
    pub lazy: bool,
    /// How long to wait until the daemon has written everything back and gone [default: 120s; with
    /// --force 10s, then it is killed]
    #[arg(long, value_parser = parse_duration, value_name = "TIME")]
    pub timeout: Option<Duration>,
}

impl MkfsArgs {
    /// A volume with the defaults.
    pub fn of(volume: Location) -> Self {
        Self {
            volume,
            endpoint: None,
            size: None,
            log_size: None,
            force: false,
            device: None,
            components: Vec::new(),
            compress: None,
            encrypt: false,
        }
    }
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

/// The arguments of `ferry fsck`.
#[derive(Args, Debug)]
pub struct FsckArgs {
    /// The volume; it must not be mounted
    pub volume: Location,
    /// Repair what can be repaired, and say what is lost; files without a name go to /lost+found.
    /// Safe to kill and to run again
    #[arg(long)]
    pub repair: bool,
    /// Do not read the blocks of the files. Otherwise each is held against its checksum; with
    /// --repair, one that is not what was written is marked as lost
    #[arg(long)]
    pub metadata_only: bool,
    /// With --repair: give up what the device cannot read. Without this a repair keeps and reports
    /// it, because the device may read it the next time: a range of a file stays mapped, and a log
    /// that needs such a block is not cut
    #[arg(long, requires = "repair")]
    pub give_up_unreadable: bool,
    /// The report as JSON on stdout
    #[arg(long)]
    pub json: bool,
}

/// The arguments of `ferry scrub`.
#[derive(Args, Debug)]
#[command(after_help = "\
A volume that is mounted or served is scrubbed by its daemon or server while it is used; Ctrl-C stops it. Only root and the user who mounted (or
serves) it may. Any other one is read by this command alone, as fast as the disk allows unless --rate is given.")]
pub struct ScrubArgs {
    /// The mount point, or any directory in it; or the volume
    #[arg(value_name = "MOUNTPOINT|VOLUME")]
    pub target: Location,
    /// Most bytes read in a second, for example 50M; 0: any number [default: 200M on a volume in
    /// use]
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    pub rate: Option<u64>,
    /// Stop the scrub that is on its way there
    #[arg(long, conflicts_with_all = ["rate", "json"])]
    pub stop: bool,
    /// The report as JSON on stdout
    #[arg(long)]
    pub json: bool,
}

impl ScrubArgs {
    /// The default of `--rate` on a mounted volume, in bytes a second.
    pub const RATE_MOUNTED: u64 = 200 << 20;
}

/// The subcommands of `ferry snapshot`.
#[derive(Subcommand, Debug)]
pub enum SnapshotCommand {
    /// Make a snapshot: it has all that the volume has now, and stays as it is
    ///
    /// First everything is synced. Work goes on meanwhile. Only root and the user who mounted (or
    /// serves) the volume may.
    #[command(after_help = "\
It can be mounted, read only, beside the volume:
  ferry mount s3://bucket/data@before-upgrade /mnt2
Run hourly, this has a snapshot of each of the last 24 hours, 7 days and 4 weeks:
  ferry snapshot create /mnt --schedule hourly=24,daily=7,weekly=4")]
    Create(SnapshotCreateArgs),
    /// Show the snapshots of a volume, the oldest one first; a volume in use elsewhere, too
    List {
        /// The mount point, or any directory in it; or the volume
        #[arg(value_name = "MOUNTPOINT|VOLUME")]
        target: Location,
        /// Show what each snapshot alone holds in the store, which its deletion would free, and
        /// what all hold together. This process reads the maps of all snapshots in the store
        #[arg(long)]
        sizes: bool,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Delete a snapshot. Space that only it needs is given back after ten minutes
    Delete(SnapshotArgs),
}

/// The arguments of `ferry snapshot create`.
#[derive(Args, Debug)]
pub struct SnapshotCreateArgs {
    /// The mount point, or any directory in it; or the volume
    #[arg(value_name = "MOUNTPOINT|VOLUME")]
    pub target: Location,
    /// The snapshot's name, at most 255 bytes, without / , @ ? and control characters
    #[arg(required_unless_present = "schedule", conflicts_with = "schedule")]
    pub name: Option<String>,
    /// Make scheduled-DATE-TIME if the shortest of these periods has none yet, and delete those
    /// that were made so and are not the first of one of the last N hours, days or weeks (in UTC)
    #[arg(long, value_name = "hourly=N,daily=N,weekly=N")]
    pub schedule: Option<Schedule>,
}

/// The arguments of `ferry snapshot delete`.
#[derive(Args, Debug)]
pub struct SnapshotArgs {
    /// The mount point, or any directory in it; or the volume
    #[arg(value_name = "MOUNTPOINT|VOLUME")]
    pub target: Location,
    /// The snapshot's name, at most 255 bytes, without / , @ ? and control characters
    pub name: String,
}

/// The arguments of `ferry rollback`.
#[derive(Args, Debug)]
pub struct RollbackArgs {
    /// The volume, and the snapshot behind an @ (in front of the ?)
    #[arg(value_name = "VOLUME@NAME")]
    pub snapshot: Location,
    /// Make no snapshot of what the volume is until then: it is lost
    #[arg(long)]
    pub discard: bool,
    /// Take the volume from an owner that may be alive. That one can write nothing more, and what
    /// it has not synced is lost
    #[arg(long)]
    pub take_over: bool,
    /// With --take-over: also from an owner with durability=local. What only its machine has is
    /// lost, even if it was synced
    #[arg(long, requires = "take_over")]
    pub force: bool,
}

/// The arguments of `ferry clone`.
#[derive(Args, Debug)]
#[command(after_help = "\
It has the same passphrase, if the volume is encrypted, and none of its snapshots. In a store, the volume must stay as long as the clone is
there. To remove a clone there, remove all its objects, then delete its pin: `ferry snapshot delete VOLUME NAME@ID@NEW`. To remove a clone
of a file, remove its file.
  ferry clone s3://bucket/data@monday s3://bucket/trial
  ferry clone /srv/data.ferry /srv/trial.ferry")]
pub struct CloneArgs {
    /// The volume, and the snapshot behind an @ (in front of the ?); of a volume in a file, without
    /// @NAME, what it is now
    #[arg(value_name = "VOLUME[@NAME]")]
    pub snapshot: Location,
    /// The new volume: an empty place beside that; or a file, which must not exist, on the same
    /// file system
    pub new: Location,
}

/// The arguments of `ferry backup`.
#[derive(Args, Debug)]
pub struct BackupArgs {
    /// The mount point, or any directory in it; or the volume; a snapshot has its name behind an @
    /// (in front of the ?)
    #[arg(value_name = "VOLUME[@NAME]")]
    pub volume: Location,
    /// The store that gets the backup, dir:///PATH or s3://BUCKET/PREFIX: empty, or with older
    /// backups of the same volume
    pub target: Location,
    /// Take the target from a process that may be alive, as a backup of a machine that died
    #[arg(long)]
    pub take_over: bool,
}

/// The arguments of `ferry copy`.
#[derive(Args, Debug)]
#[command(after_help = "\
The copy has the same inodes, times, holes and id as the volume, and none of its snapshots. Data is held
against its checksums as it is read, and the metadata of the copy is checked; `ferry fsck OTHER` reads the
data of the copy, too.
  ferry copy /var/lib/data.ferry s3://bucket/data
  ferry copy s3://bucket/data@monday /dev/sdb")]
pub struct CopyArgs {
    /// The volume, which must not be in use; or a snapshot of one in a store, which may be
    #[arg(value_name = "VOLUME[@NAME]")]
    pub volume: Location,
    /// A file that does not exist, a block device that is empty, a store that is empty or absent;
    /// or a copy that has not ended
    pub other: Location,
    /// If OTHER has a copy that has not ended, begin anew, also if that is of another volume, or of
    /// what this one was before
    #[arg(long)]
    pub restart: bool,
    /// A copy in a store: whether objects are compressed [default: zstd]
    #[arg(long, value_name = "HOW")]
    pub compress: Option<Compress>,
    /// A copy in a store: encrypt it. A copy of an encrypted volume has to be, unless it is a file
    #[arg(long)]
    pub encrypt: bool,
    /// The passphrase of the copy is in this file [default: asked for]
    #[arg(long, value_name = "FILE")]
    pub new_passphrase_file: Option<PathBuf>,
}

/// The arguments of `ferry diff`.
#[derive(Args, Debug)]
#[command(after_help = "\
A line for each path, sorted by it:
  + PATH            made
  - PATH            removed
  M PATH            contents or size changed
  A PATH            only permission bits, owner, group or extended attributes changed
  R PATH -> PATH    moved, known by its inode; what is in a moved directory is not listed
Times are not compared. Backslashes, control characters and bytes that are not UTF-8 are escaped.
  ferry diff s3://bucket/data@monday s3://bucket/data@tuesday")]
pub struct DiffArgs {
    /// The old state: VOLUME@NAME, a snapshot; or a volume that nobody has mounted
    pub old: Location,
    /// The new state
    pub new: Location,
    /// An object a line: `change` is made, removed, contents, attributes or moved; `path` is the
    /// path, and `to` the new one of what was moved
    #[arg(long)]
    pub json: bool,
}

/// The arguments of `ferry debug`.
#[derive(Args, Debug)]
pub struct DebugArgs {
    /// The volume; it must not be mounted
    pub volume: Location,
    /// What to show
    #[command(subcommand)]
    pub what: DebugCommand,
    /// JSON: one object, or one a line
    #[arg(long, global = true)]
    pub json: bool,
}

/// What `ferry debug` shows.
#[derive(Subcommand, Debug)]
pub enum DebugCommand {
    /// All copies of the superblock
    Superblock,
    /// Each record in the log, and where recovery would end
    Log,
    /// Keys and what they say
    Keys {
        /// The first key, in hexadecimal digits
        #[arg(long, value_parser = parse_hex, value_name = "HEX")]
        from: Option<Hex>,
        /// At most so many
        #[arg(long, value_name = "N")]
        limit: Option<u64>,
        /// Only those of this inode
        #[arg(long, value_name = "N")]
        inode: Option<u64>,
    },
    /// What each segment is used for
    Segments {
        /// Their summary blocks too
        #[arg(long)]
        summary: bool,
    },
    /// An inode: its record, names, attributes and extents
    Inode {
        /// Its number
        ino: u64,
    },
    /// The same of the inode that a path of the volume leads to
    Path {
        /// From the root of the volume; symbolic links are not followed
        path: std::ffi::OsString,
    },
}

/// Bytes given as hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hex(pub Vec<u8>);

fn parse_hex(text: &str) -> Result<Hex, String> {
    let digits: Option<Vec<u32>> = text.chars().map(|c| c.to_digit(16)).collect();
    match digits {
        Some(digits) if digits.len().is_multiple_of(2) => {
            Ok(Hex(digits.chunks(2).map(|pair| (pair[0] << 4 | pair[1]) as u8).collect()))
        }
        _ => Err(format!("{text:?} is not an even number of hexadecimal digits")),
    }
}

/// The arguments of `ferry sync`.
#[derive(Args, Debug)]
#[command(after_help = "\
A directory, without --recursive: the whole FerryFS volume that it is on. Files, and with --recursive all that lies below directories, on any
file system: on FerryFS as one commit for up to 2,000 files, elsewhere with many fsyncs in flight. One line on stderr for each file that failed.
  ferry sync /mnt
  ferry sync -r /mnt/checkpoint
  find . -newer stamp -print0 | ferry sync --from -
  ferry sync --wait-only /mnt/journal")]
pub struct SyncArgs {
    /// Files and directories
    #[arg(required_unless_present = "from", value_name = "PATH")]
    pub paths: Vec<PathBuf>,
    /// All that lies below the directories too, also on other file systems mounted there; symbolic
    /// links in them are not followed
    #[arg(long, short)]
    pub recursive: bool,
    /// Names of files and directories from FILE (- for stdin), separated by NUL or newline; a
    /// directory there means itself
    #[arg(long, value_name = "FILE", conflicts_with = "paths")]
    pub from: Option<PathBuf>,
    /// As fdatasync(2): times may be left out
    #[arg(long)]
    pub data: bool,
    /// Make nothing durable: wait until the next commit has what is there now, at most the mount's
    /// commit_interval and a flush (for each 256 PATHs); return at once if nothing is left to be
    /// made durable. Stores to mapped memory that the kernel has not handed over are left out
    #[arg(long, conflicts_with_all = ["recursive", "from", "data", "jobs"])]
    pub wait_only: bool,
    /// Fsyncs in flight, where files are synced one by one [default: 256]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=ferry_sync::JOBS_MAX as i64))]
    pub jobs: Option<u16>,
}

/// The arguments of `ferry warm`.
#[derive(Args, Debug)]
#[command(after_help = "\
The mount needs a cache on disk (-o cache=DIR,cache_disk=SIZE). What it has is not fetched again, other parts make room. When the cache is full
of what was warmed, the rest is left out. Ctrl-C stops; what was fetched stays. Only root and the user who mounted may.
  ferry mount s3://bucket/data /mnt -o cache=/var/cache/ferry,cache_disk=50G
  ferry warm /mnt/models /mnt/index")]
pub struct WarmArgs {
    /// Files and directories of mounts. Below directories all files are meant; symbolic links in
    /// them are not followed, and other file systems that are mounted there are left out
    #[arg(required = true, value_name = "PATH")]
    pub paths: Vec<PathBuf>,
}

/// The arguments of `ferry resize`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  ferry resize /srv/data.ferry 2T
  ferry resize /mnt 100G
  ferry resize /dev/vg0/data max
  ferry resize s3://bucket/data 4T")]
pub struct ResizeArgs {
    /// The volume, mounted, served or not; or its mount point, or any directory in it
    #[arg(value_name = "VOLUME|MOUNTPOINT")]
    pub target: Location,
    /// The size that it is to have; max: on a block device, all of it
    #[arg(value_parser = parse_new_size)]
    pub size: NewSize,
}

/// The arguments of `ferry upgrade-mount`.
#[derive(Args, Debug)]
#[command(after_help = "\
The daemon of the mount ends in order, and the program that runs this command goes on with its mount: nothing is unmounted, open files stay open,
and programs wait meanwhile. If the new program does not start, the one before goes on. It works for volumes on disks of this machine and in stores, for mounts of a server, and for replicas.
  ferry upgrade-mount /mnt
  ferry upgrade-mount --all")]
#[command(group(ArgGroup::new("mounts").required(true).args(["target", "all"])))]
pub struct UpgradeMountArgs {
    /// The mount point, or any directory in it; or the volume
    #[arg(value_name = "MOUNTPOINT|VOLUME")]
    pub target: Option<Location>,
    /// All mounts of this machine, as the packages do when they bring a newer program
    #[arg(long)]
    pub all: bool,
    /// Another program to go on
    #[arg(long, value_name = "FILE")]
    pub program: Option<PathBuf>,
    /// For a unit of systemd that ends: if UNIT restarts, its next start goes on with the mount,
    /// with the ARGUMENTS that the mount has already. Otherwise nothing happens
    #[arg(long, value_name = "UNIT", requires = "target", conflicts_with_all = ["all", "program"])]
    pub next_start: Option<String>,
    /// With --next-start: the command that the unit starts, without the name of the program
    #[arg(last = true, value_name = "ARGUMENTS", requires = "next_start")]
    pub arguments: Vec<OsString>,
}

/// The arguments of `ferry upgrade`.
#[derive(Args, Debug)]
pub struct UpgradeArgs {
    /// The volume; it must not be mounted or served
    pub volume: Location,
}

/// A size that a volume is to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewSize {
    /// All that its device has.
    Max,
    /// So many bytes.
    Bytes(u64),
}

fn parse_new_size(text: &str) -> Result<NewSize, String> {
    match text {
        "max" => Ok(NewSize::Max),
        _ => match parse_bytes(text)? {
            0 => Err("a volume has more than 0 bytes".into()),
            bytes => Ok(NewSize::Bytes(bytes)),
        },
    }
}

/// The arguments of `ferry trim`.
#[derive(Args, Debug)]
pub struct TrimArgs {
    /// The mount point, or any directory in it; or the volume, mounted or served
    #[arg(value_name = "MOUNTPOINT|VOLUME")]
    pub target: Location,
}

/// The arguments of `ferry tune`.
#[derive(Args, Debug)]
#[command(after_help = "\
Flush policies:
  each      every fsync makes its own commit and flush: to compare the others with
  delay     the first of several callers waits as long as a flush takes on average, then flushes for all who came
  gather    who comes while a commit is under way boards the next one together; nobody waits for company
  adaptive  as gather, and a commit waits for callers that have just been answered and are known to be back at once
A mount of a server (ferry://):
  ferry tune --async off /mnt")]
pub struct TuneArgs {
    /// The mount point, or any directory in it; or the volume, mounted or served
    #[arg(value_name = "MOUNTPOINT|VOLUME")]
    pub target: Location,
    /// The flush policy: adaptive, gather, delay or each
    #[arg(long, value_name = "POLICY")]
    pub flush: Option<FlushPolicy>,
    /// The policy delay does not wait where flushes take less than this on average
    #[arg(long, value_parser = parse_duration, value_name = "TIME")]
    pub fast_flush: Option<Duration>,
    /// Forget how long flushes took so far
    #[arg(long)]
    pub reset_flush_time: bool,
    /// Grow the log to this size, at most a quarter of the volume. It moves to the end of the
    /// volume, which must not be in use
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    pub log_size: Option<u64>,
    /// Of a mount of a server: whether changes may be answered before the server has made them, as
    /// the mount option async says. The next change obeys it; off waits until the server has made
    /// all that were answered
    #[arg(long = "async", value_name = "on|off", value_parser = parse_switch, conflicts_with_all = ["flush", "fast_flush", "reset_flush_time", "log_size"])]
    pub asynchronous: Option<bool>,
}

fn parse_switch(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("say on or off".into()),
    }
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
            "ferry mkfs v --device mirror a b --size 1G",
            "ferry replace v a c",
            "ferry resize v 64G",
            "ferry resize /dev/sdb max",
            "ferry mount v /mnt --create -o ro,cache=strict -o allow_other --foreground",
            "ferry umount /mnt --force --lazy",
            "ferry mkfs dir:///srv/store --size 2T",
            "ferry mount dir:///srv/store /mnt --take-over -o ro",
            "ferry serve dir:///srv/store --take-over --cache /c --cache-disk 50G",
            "ferry serve v --flush-interval-min 500ms",
            "ferry stats dir:///srv/store",
            "ferry mkfs s3://bucket/a/b --endpoint http://127.0.0.1:9000",
            "ferry mount s3://bucket/a?endpoint=https://s3.example.org&profile=work /mnt",
            "ferry umount s3://bucket",
            "ferry fsck v --json",
            "ferry fsck v --repair --metadata-only",
            "ferry fsck v --repair --give-up-unreadable",
            "ferry sync /mnt",
            "ferry scrub /mnt --rate 200M --json",
            "ferry scrub /mnt --stop",
            "ferry debug v superblock --json",
            "ferry debug v keys --from 10ff --limit 5 --inode 7",
            "ferry debug --json v segments --summary",
            "ferry debug v inode 5",
            "ferry debug v path /a/b",
            "ferry sync -r --data --jobs 16 /mnt/a b",
            "ferry sync --from -",
            "ferry stats /mnt --json --log-level debug",
            "ferry stats /mnt --snapshots",
            "ferry doctor --json --bundle report.tar.gz",
            "ferry warm /mnt /mnt2/a",
            "ferry snapshot create /mnt before",
            "ferry snapshot create /mnt --schedule hourly=24,daily=7,weekly=4",
            "ferry snapshot list s3://bucket/a --json",
            "ferry snapshot delete dir:///srv/store before",
            "ferry clone s3://bucket/a@before?endpoint=https://s3.example.org s3://bucket/b",
            "ferry rollback s3://bucket/a@before --take-over --force",
            "ferry rollback dir:///srv/store@before --discard",
            "ferry mount s3://bucket/a@before?endpoint=https://s3.example.org /mnt",
            "ferry fsck dir:///srv/store@before",
            "ferry top /mnt --interval 500ms --count 3",
            "ferry serve v --listen [::1]:0 --export /a:ro,/b:rw --session-life 5s",
            "ferry cert init d --host a --host 10.0.0.1",
            "ferry cert issue d box",
            "ferry cert issue d box --users 1000,2000-2999 --groups 100 --days 30",
            "ferry cert issue d box --users 1000 --export /home/a:rw,/home/a/b:ro",
            "ferry cert revoke d box",
            "ferry bench fsmark --on /mnt --flush-time 2ms",
            "ferry bench --help",
            "ferry completions zsh",
            "ferry man d",
            "ferry tune /mnt --log-size 256M",
            "ferry tune /mnt --flush gather --fast-flush 500us --reset-flush-time",
        ] {
            Cli::try_parse_from(line.split(' ')).unwrap_or_else(|e| panic!("{line}: {e}"));
        }
        assert!(Cli::try_parse_from(["ferry", "debug", "v", "keys", "--from", "123"]).is_err());
        for line in [
            "ferry mkfs v --size big",
            "ferry mkfs dir://srv/store",
            "ferry fsck dir://",
            "ferry fsck dir:///srv/store@",
            "ferry snapshot create /mnt",
            "ferry snapshot create /mnt before --schedule daily=7",
            "ferry snapshot create /mnt --schedule yearly=7",
            "ferry snapshot list /mnt before",
            "ferry clone dir:///srv/store@before",
            "ferry rollback dir:///srv/store before",
            "ferry rollback dir:///srv/store@before --force",
            "ferry fsck s3://bucket/a?secret=b",
            "ferry mkfs v a b",
            "ferry resize v",
            "ferry resize v +1G",
            "ferry mkfs v --device mirror",
            "ferry mkfs v --device raid6 a",
            "ferry sync",
            "ferry completions tcsh",
            "ferry warm",
            "ferry sync --from - a",
            "ferry sync --jobs 0 a",
            "ferry serve v --export a:ro",
            "ferry serve v --export /a",
            "ferry serve v --tls d --insecure",
            "ferry serve v --cache-disk 50G",
            "ferry serve v --flush-interval-min 2h",
        ] {
            assert!(Cli::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
    }
}
