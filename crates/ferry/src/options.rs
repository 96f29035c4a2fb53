//! Mount options (`-o`): FerryFS's own, and those that mount(8) and /etc/fstab pass to every file
//! system.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use ferry_fs::CacheMode;
use ferry_journal::FlushPolicy;
use ferry_object::CacheOptions;

use crate::cache_size::machine_bytes;
use crate::error::CliError;
use crate::listen::Address;
use crate::size::{format_bytes, parse_bytes, parse_duration};

/// Shown by `--help` and for an unknown option.
pub const HELP: &str = "\
ro, rw              read only, or not (the default)
cache=kernel        the kernel caches reads; writes reach the daemon at once (the default)
cache=writeback     the kernel also gathers writes; ENOSPC may then come at a later write, msync, fsync or close
cache=strict        every read and write reaches the daemon (direct I/O)
cache_size=SIZE     memory for contents, inodes, names and the home store's cache, for example 512M (the default is an eighth of
                    what the machine has or its control groups allow; when memory is short, the mount gives way)
cache=/DIR          of s3:// and dir://: parts of the store's objects are cached in this directory of a local disk, which may be lost at
                    any time; beside cache=MODE
cache_disk=SIZE     the most that it takes of that disk, at least 64M (the default is 10G)
snapshot=NAME       of s3:// and dir://: this snapshot of the volume, as it was, beside the mount that uses the volume; read only. VOLUME@NAME
                    means the same
snapdir=off         of s3:// and dir://: no directory .snapshots in the root of the mount (the default is on: MOUNTPOINT/.snapshots/NAME is the
                    snapshot NAME, to be read; listings of the root do not show it)
replica=T           of s3:// and dir://: follow the volume, read only, from any machine, beside the mount or server that uses it; a newer
                    state is looked for after this time each, from 100ms to 60s (replica alone: 5s). ferry stats says how far behind it is
durability=bucket   of s3:// and dir://: an fsync is durable when the store has it (the default)
durability=local    it is durable in a log on this machine, and uploaded behind; if the machine is lost, up to 1 GiB or ten minutes of
                    what was synced is lost, too
local_log=/DIR      the directory of that log, on a disk that survives a loss of power
flush=adaptive      an fsync waits for others only where they are known to be back at once (the default);
                    flush=gather, flush=delay, flush=each: see ferry tune --help
fast_flush=T        flush=delay does not wait where flushes take less than this (default 2ms)
idle_poll=off       no thread keeps a core awake while requests come closely (see docs/performance.md; the default is on)
commit_interval=T   what nobody synced becomes durable after this time, for example 1s
flush_interval_min=T
                    an fsync that comes sooner than this after the last flush waits, and shares the next one, at most 60s: of s3:// it
                    bounds what PUTs cost; what nobody synced becomes durable after this time, too (0, the default: fsyncs do not wait)
allow_other         other users may use the mount (for a mount made by root this is the default)
allow_root          accepted, as allow_other
passphrase_file=FILE
                    the passphrase of an encrypted volume in a store
metrics=ADDR        figures for Prometheus at http://ADDR/metrics; ADDR is HOST:PORT or unix:PATH. All that reach it may read them, and
                    nothing is encrypted: 127.0.0.1:PORT is for this machine only (the default is off; see docs/metrics.md)
log=FILE            messages go to this file, not to the system log
timeout=T           of ferry://: operations wait so long for a server that is gone, then they fail (the default is 60s). A mount that is away
                    for longer than the server's --session-life (90s) loses changes that it has answered and the server has not applied,
                    whatever T is
async=off           of ferry://: each change waits for the server (the default is on: where nobody else uses a directory or file, changes
                    are answered at once, and sent to the server afterwards; see docs/semantics.md)
tls=DIR             of ferry://: the client's certificate and key (ferry cert issue makes such a directory)
insecure            of ferry://: no TLS: everybody on the way, and every user of this machine where the server is on it too, may read and change
                    everything, and may be taken for the server
suid, dev           of ferry://: set-user-id bits and device nodes have an effect (without these words a mount of a server is nosuid and nodev;
                    for root only)
noatime             reads move no access time (the default is relatime: at most once after a change, and once a day)
strictatime         each read that reaches the daemon moves it; not of ferry://
nodiratime          listings move no access time; not of ferry://
nodev, nosuid, noexec and their opposites, as for any file system
fstab's own words (defaults, auto, noauto, nofail, user, _netdev, comment=, x-…) are accepted and have no effect here";

/// A replica looks for a newer state after this time each, unless `replica=T` says otherwise.
const REPLICA_INTERVAL: Duration = Duration::from_secs(5);

/// The shortest `commit_interval` and `timeout`.
const TIME_MIN: Duration = Duration::from_millis(1);

/// The parsed options of `-o`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MountOptions {
    /// The volume is not changed.
    pub read_only: bool,
    /// How the kernel caches contents.
    pub cache: CacheMode,
    /// Bytes of the daemon's data cache; `None`: the default.
    pub cache_bytes: Option<u64>,
    /// The directory of the cache on disk of a volume in a store.
    pub cache_dir: Option<PathBuf>,
    /// Its size in bytes; `None`: the default.
    pub cache_disk: Option<u64>,
    /// Flushes are durable on this machine before the store has them; `None`: not given.
    pub local: Option<bool>,
    /// The snapshot that is mounted, and not the volume as it is now.
    pub snapshot: Option<String>,
    /// The volume is followed, beside its owner: time between two looks.
    pub replica: Option<Duration>,
    /// The snapshots of the volume are not below `.snapshots`.
    pub snapdir_off: bool,
    /// The directory of the local log.
    pub local_log: Option<PathBuf>,
    /// The age at which changes are committed; `None`: the default.
    pub commit_interval: Option<Duration>,
    /// The flush policy; `None`: the default.
    pub flush: Option<FlushPolicy>,
    /// If flushes take less than this on average, `flush=delay` does not wait; `None`: the default.
    pub fast_flush: Option<Duration>,
    /// Flushes follow each other after this time at the earliest; `None`: at once.
    pub flush_interval_min: Option<Duration>,
    /// No thread keeps a core awake while requests follow each other closely.
    pub idle_poll_off: bool,
    /// Other users may use the mount.
    pub allow_other: bool,
    /// The file for messages, instead of the system log.
    pub log: Option<PathBuf>,
    /// Where the figures are served to Prometheus.
    pub metrics: Option<Address>,
    /// The file with the passphrase of an encrypted volume.
    pub passphrase_file: Option<PathBuf>,
    /// How long operations wait for an unreachable server; `None`: the default.
    pub timeout: Option<Duration>,
    /// Changes are not acknowledged before the server answers.
    pub async_off: bool,
    /// The directory of the client's certificate.
    pub tls: Option<PathBuf>,
    /// The connection uses no TLS, wherever the server is.
    pub insecure: bool,
    /// Programs on the mount cannot be executed.
    pub noexec: bool,
    /// Set-user-id and set-group-id bits have no effect; `None`: not given
    /// ([`MountOptions::distrusts`]).
    pub nosuid: Option<bool>,
    /// Device nodes have no effect; `None`: not given.
    pub nodev: Option<bool>,
    /// Reads do not update access times.
    pub noatime: bool,
    /// Each read updates the access time.
    pub strictatime: bool,
    /// Listings do not update the access times of directories.
    pub nodiratime: bool,
    /// Changes an existing mount, instead of making one.
    pub remount: bool,
    /// Skips unknown options (`-s` of mount(8)).
    pub sloppy: bool,
}

impl MountOptions {
    /// Parses the options of each list in order; a later option overrides an earlier one.
    pub fn parse<S: AsRef<str>>(lists: &[S], sloppy: bool) -> Result<Self, String> {
        let mut options = Self { sloppy, ..Self::default() };
        for word in lists.iter().flat_map(|list| list.as_ref().split(',')).filter(|w| !w.is_empty())
        {
            options.take(word)?;
        }
        Ok(options)
    }

    fn take(&mut self, word: &str) -> Result<(), String> {
        if self.take_flag(word) || ignored(word) {
            return Ok(());
        }
        let (key, value) = word.split_once('=').map_or((word, None), |(k, v)| (k, Some(v)));
        match (key, value) {
            ("ro", None) => self.read_only = true,
            ("rw", None) => self.read_only = false,
            ("allow_other" | "allow_root", None) => self.allow_other = true,
            ("remount", None) => self.remount = true,
            ("cache", Some(dir)) if dir.starts_with('/') => self.cache_dir = Some(dir.into()),
            ("cache_disk", Some(size)) => self.cache_disk = Some(parse_cache_disk(size)?),
            ("durability", Some(word @ ("bucket" | "local"))) => self.local = Some(word == "local"),
            ("local_log", Some(dir)) if dir.starts_with('/') => self.local_log = Some(dir.into()),
            ("snapshot", Some(name)) => self.snapshot = Some(name.into()),
            ("cache", Some(mode)) => self.cache = parse_cache(mode)?,
            ("cache_size", Some(size)) => self.cache_bytes = Some(parse_cache_size(size)?),
            ("commit_interval", Some(time)) => self.commit_interval = Some(parse_time(key, time)?),
            ("flush", Some(policy)) => self.flush = Some(policy.parse()?),
            ("fast_flush", Some(time)) => self.fast_flush = Some(parse_duration(time)?),
            ("flush_interval_min", Some(time)) => {
                self.flush_interval_min = Some(parse_flush_interval(time)?);
            }
            ("replica", None) => self.replica = Some(REPLICA_INTERVAL),
            ("replica", Some(time)) => self.replica = Some(parse_replica(time)?),
            ("snapdir", Some(word @ ("on" | "off"))) => self.snapdir_off = word == "off",
            ("idle_poll", Some(word @ ("on" | "off"))) => self.idle_poll_off = word == "off",
            ("timeout", Some(time)) => self.timeout = Some(parse_time(key, time)?),
            ("async", Some(word @ ("on" | "off"))) => self.async_off = word == "off",
            ("insecure", None) => self.insecure = true,
            ("tls", Some(dir)) if !dir.is_empty() => self.tls = Some(PathBuf::from(dir)),
            ("passphrase_file", Some(file)) if !file.is_empty() => {
                self.passphrase_file = Some(PathBuf::from(file));
            }
            ("metrics", Some(address)) => {
                let parsed = address.parse().map_err(|error| format!("metrics={error}"));
                self.metrics = Some(parsed?);
            }
            ("log", Some(file)) if !file.is_empty() => {
                self.log = Some(PathBuf::from_str(file).unwrap_or_else(|never| match never {}));
            }
            // These are refused, because FerryFS does not do what they ask for.
            ("sync" | "dirsync" | "mand", None) if !self.sloppy => {
                return Err(format!("mount option {word:?} is not supported"));
            }
            _ if self.sloppy => {}
            _ => return Err(format!("unknown mount option {word:?}; known are:\n{HELP}")),
        }
        Ok(())
    }

    /// Options that set or clear a flag of the kernel.
    fn take_flag(&mut self, word: &str) -> bool {
        match word {
            "noexec" | "exec" => self.noexec = word == "noexec",
            "nosuid" | "suid" => self.nosuid = Some(word == "nosuid"),
            "nodev" | "dev" => self.nodev = Some(word == "nodev"),
            "noatime" | "atime" => self.noatime = word == "noatime",
            "strictatime" => (self.noatime, self.strictatime) = (false, true),
            "relatime" => (self.noatime, self.strictatime) = (false, false),
            "nostrictatime" => self.strictatime = false,
            "nodiratime" | "diratime" => self.nodiratime = word == "nodiratime",
            // Flags that fstab's options imply, unless a later option says otherwise.
            "user" | "users" => {
                (self.noexec, self.nosuid, self.nodev) = (true, Some(true), Some(true))
            }
            "owner" | "group" => (self.nosuid, self.nodev) = (Some(true), Some(true)),
            _ => return false,
        }
        true
    }

    /// The options that `mount` shows although the kernel does not know them, with the flush policy
    /// in effect.
    pub fn listed_words(&self, flush: FlushPolicy, fast_flush: Duration) -> String {
        let mut words = self.cache_words();
        words.extend([flush_word(flush), fast_flush_word(fast_flush)]);
        words.join(",")
    }

    /// Whether set-id bits, and whether device nodes, have no effect. By default they have an
    /// effect on this machine's own volumes, and none on a server's: its files give no privileges
    /// here.
    pub fn distrusts(&self, remote: bool) -> (bool, bool) {
        (self.nosuid.unwrap_or(remote), self.nodev.unwrap_or(remote))
    }

    /// The options for the kernel; `remote`: the mount is of a server's volume.
    pub fn for_kernel(&self, fsname: String, remote: bool) -> ferry_fuse::MountOptions {
        let (nosuid, nodev) = self.distrusts(remote);
        ferry_fuse::MountOptions {
            fsname,
            read_only: self.read_only,
            allow_other: self.allow_other.then_some(true),
            nosuid,
            nodev,
            idle_poll: !self.idle_poll_off,
            noexec: self.noexec,
            noatime: self.noatime,
            strictatime: self.strictatime,
            nodiratime: self.nodiratime,
            ..ferry_fuse::MountOptions::default()
        }
    }

    /// The directory and the size of the cache on disk.
    pub fn cache_disk(&self) -> (Option<&Path>, Option<u64>) {
        (self.cache_dir.as_deref(), self.cache_disk)
    }

    /// Checks, before anything is mounted, that the log file can be written.
    pub fn log_path(&self) -> Result<Option<PathBuf>, CliError> {
        let Some(log) = &self.log else { return Ok(None) };
        let opened = std::fs::OpenOptions::new().create(true).append(true).open(log);
        opened.map_err(CliError::path(log, "cannot write the log file"))?;
        Ok(Some(log.clone()))
    }

    /// The same of a replica, which flushes nothing.
    pub fn own_words(&self) -> String {
        self.cache_words().join(",")
    }

    fn cache_words(&self) -> Vec<String> {
        let mut words = vec![format!("cache={}", self.cache.name())];
        words.extend(self.cache_bytes.map(|bytes| format!("cache_size={bytes}")));
        words.extend(self.cache_dir.as_ref().map(|dir| format!("cache={}", dir.display())));
        words.extend(self.cache_disk.map(|bytes| format!("cache_disk={bytes}")));
        words.extend(
            self.local
                .map(|local| format!("durability={}", if local { "local" } else { "bucket" })),
        );
        words.extend(self.local_log.as_ref().map(|dir| format!("local_log={}", dir.display())));
        words.extend(
            self.commit_interval.map(|time| format!("commit_interval={}ms", time.as_millis())),
        );
        words.extend(
            self.flush_interval_min
                .map(|time| format!("flush_interval_min={}ms", time.as_millis())),
        );
        words.extend(self.replica.map(|time| format!("replica={}ms", time.as_millis())));
        words
    }

    /// The options as text again, for the daemon that a mount starts.
    pub fn to_words(&self) -> String {
        let mut words = vec![if self.read_only { "ro" } else { "rw" }.to_owned()];
        words.extend(self.cache_words());
        words.extend(self.flush.map(flush_word));
        words.extend(self.fast_flush.map(fast_flush_word));
        words.extend(self.snapdir_off.then(|| "snapdir=off".to_owned()));
        words.extend(self.idle_poll_off.then(|| "idle_poll=off".to_owned()));
        words.extend(self.timeout.map(|time| format!("timeout={}ms", time.as_millis())));
        words.extend(self.async_off.then(|| async_word(false)));
        words.extend(self.metrics.as_ref().map(|address| format!("metrics={address}")));
        words.extend(self.insecure.then(|| "insecure".to_owned()));
        words.extend(self.allow_other.then(|| "allow_other".to_owned()));
        words.extend(self.nosuid.map(|off| if off { "nosuid" } else { "suid" }.to_owned()));
        words.extend(self.nodev.map(|off| if off { "nodev" } else { "dev" }.to_owned()));
        let flags = [
            (self.noexec, "noexec"),
            (self.strictatime, "strictatime"),
            (self.noatime, "noatime"),
            (self.nodiratime, "nodiratime"),
        ];
        words.extend(flags.iter().filter(|(on, _)| *on).map(|(_, word)| (*word).to_owned()));
        words.join(",")
    }
}

/// The option `async=on` or `async=off`.
pub fn async_word(on: bool) -> String {
    format!("async={}", if on { "on" } else { "off" })
}

/// The option `flush=POLICY`.
pub fn flush_word(policy: FlushPolicy) -> String {
    format!("flush={policy}")
}

/// The option `fast_flush=TIME`, in microseconds.
pub fn fast_flush_word(time: Duration) -> String {
    match time.as_micros() {
        micros if micros.is_multiple_of(1000) => format!("fast_flush={}ms", micros / 1000),
        micros => format!("fast_flush={micros}us"),
    }
}

/// Whether an option is for mount(8), fstab, systemd or libfuse, and means nothing to the file
/// system itself. `default_permissions` is always on.
fn ignored(word: &str) -> bool {
    const WORDS: [&str; 18] = [
        "defaults",
        "auto",
        "noauto",
        "nofail",
        "nouser",
        "nousers",
        "noowner",
        "nogroup",
        "_netdev",
        "async",
        "silent",
        "loud",
        "lazytime",
        "nolazytime",
        "iversion",
        "noiversion",
        "nomand",
        "default_permissions",
    ];
    // The second line has options that mount(8) reads from a mount before it remounts it.
    const PREFIXES: [&str; 12] = [
        "x-",
        "X-",
        "comment=",
        "uhelper=",
        "helper=",
        "subtype=", //
        "user_id=",
        "group_id=",
        "rootmode=",
        "max_read=",
        "blksize=",
        "fd=",
    ];
    WORDS.contains(&word) || PREFIXES.iter().any(|p| word.starts_with(p))
}

/// Refuses a list that asks for both ways of access. Of several `-o` the last one wins: mount(8)
/// and scripts append theirs.
pub fn one_access(list: &str) -> Result<String, String> {
    let has = |wanted: &str| list.split(',').any(|word| word == wanted);
    if has("ro") && has("rw") {
        return Err("ro and rw contradict each other: give one of them".into());
    }
    Ok(list.to_owned())
}

/// Parses a time of at least [`TIME_MIN`]: less cannot be handed on to the daemon, and would mean
/// that there is no time at all.
fn parse_time(key: &str, text: &str) -> Result<Duration, String> {
    let time = parse_duration(text)?;
    if time < TIME_MIN {
        return Err(format!("{key}={text} is too short: it must be at least 1ms"));
    }
    Ok(time)
}

/// Parses a least interval between flushes. A program whose syncs took longer than the longest one
/// would be taken for one that hangs.
pub fn parse_flush_interval(text: &str) -> Result<Duration, String> {
    const FLUSH_INTERVAL_MAX: Duration = Duration::from_secs(60);
    let time = parse_duration(text)?;
    let fits = time.is_zero() || (TIME_MIN..=FLUSH_INTERVAL_MAX).contains(&time);
    if !fits {
        return Err(format!("flush_interval_min={text}: from 1ms to 60s, or 0 for none"));
    }
    Ok(time)
}

/// Parses the time between two looks of a replica. It is far below the grace after which an owner
/// deletes what it does not need.
fn parse_replica(text: &str) -> Result<Duration, String> {
    let time = parse_duration(text)?;
    if !(Duration::from_millis(100)..=Duration::from_secs(60)).contains(&time) {
        return Err(format!("replica={text}: from 100ms to 60s"));
    }
    Ok(time)
}

/// Parses the size of a cache on disk.
pub fn parse_cache_disk(text: &str) -> Result<u64, String> {
    let (bytes, least) = (parse_bytes(text)?, CacheOptions::BYTES_MIN);
    if bytes < least {
        return Err(format!("{text}: a cache on disk has at least {}", format_bytes(least)));
    }
    Ok(bytes)
}

/// Parses the size of the cache. A size that is too small to work with, or larger than the
/// machine's memory, is a typing error.
fn parse_cache_size(text: &str) -> Result<u64, String> {
    const CACHE_SIZE_MIN: u64 = 1 << 20;
    let bytes = parse_bytes(text)?;
    let memory = machine_bytes();
    if bytes < CACHE_SIZE_MIN {
        return Err(format!("cache_size={text} is {bytes} bytes: it must be at least 1M"));
    }
    if bytes > memory {
        let memory = format_bytes(memory);
        return Err(format!("cache_size={text} is more than the memory of this machine, {memory}"));
    }
    Ok(bytes)
}

fn parse_cache(mode: &str) -> Result<CacheMode, String> {
    match mode {
        "kernel" => Ok(CacheMode::Kernel),
        "writeback" => Ok(CacheMode::Writeback),
        "strict" => Ok(CacheMode::Strict),
        _ => Err(format!(
            "cache={mode} is not known: use cache=kernel, cache=writeback or cache=strict"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_fstab_line_is_accepted_as_it_stands() {
        let words = "defaults,noauto,nofail,_netdev,x-systemd.automount,comment=mine,rw,relatime,dev,suid,exec";
        let options = MountOptions::parse(&[words], false).expect("all are known");
        let expected =
            MountOptions { nosuid: Some(false), nodev: Some(false), ..MountOptions::default() };
        assert_eq!(options, expected);
    }

    #[test]
    fn a_servers_files_give_no_privileges_unless_that_was_asked_for() {
        for (words, local, remote) in [
            ("rw", (false, false), (true, true)),
            ("defaults", (false, false), (true, true)),
            ("suid", (false, false), (false, true)),
            ("dev", (false, false), (true, false)),
            ("suid,dev", (false, false), (false, false)),
            ("suid,user", (true, true), (true, true)),
            ("nosuid,nodev", (true, true), (true, true)),
        ] {
            let options = MountOptions::parse(&[words], false).expect(words);
            assert_eq!(
                (options.distrusts(false), options.distrusts(true)),
                (local, remote),
                "{words}"
            );
            assert_eq!(MountOptions::parse(&[options.to_words()], false), Ok(options), "{words}");
        }
    }

    #[test]
    fn later_options_override_earlier_ones() {
        let lists = [
            "ro,cache=strict,cache_size=64M",
            "commit_interval=200ms,allow_other,rw,cache=writeback,log=/var/log/f",
        ];
        let options = MountOptions::parse(&lists, false).expect("all are known");
        assert!(!options.read_only && options.allow_other);
        assert_eq!(options.cache, CacheMode::Writeback);
        assert_eq!(options.cache_bytes, Some(64 << 20));
        assert_eq!(options.commit_interval, Some(Duration::from_millis(200)));
        assert_eq!(options.log, Some("/var/log/f".into()));
    }

    #[test]
    fn an_impossible_cache_size_is_refused() {
        for (text, part) in
            [("cache_size=12", "at least 1M"), ("cache_size=1000T", "more than the memory")]
        {
            let error = MountOptions::parse(&[text], false).expect_err("nonsense");
            assert!(error.contains(text) && error.contains(part), "{error}");
        }
        assert!(MountOptions::parse(&["cache_size=1M"], false).is_ok());
    }

    #[test]
    fn a_least_interval_between_flushes_has_bounds() {
        for text in ["flush_interval_min=61s", "flush_interval_min=1us", "flush_interval_min=1h"] {
            let error = MountOptions::parse(&[text], false).expect_err("nonsense");
            assert!(error.contains(text) && error.contains("from 1ms to 60s"), "{error}");
        }
        for (text, time) in [("60s", 60_000), ("1ms", 1), ("0", 0)] {
            let options = MountOptions::parse(&[format!("flush_interval_min={text}")], false);
            let time = Some(Duration::from_millis(time));
            assert_eq!(options.expect("it is known").flush_interval_min, time, "{text}");
        }
    }

    #[test]
    fn a_replica_looks_neither_without_end_nor_hardly_ever() {
        for text in ["replica=0", "replica=99ms", "replica=61s", "replica=x"] {
            assert!(MountOptions::parse(&[text], false).is_err(), "{text}");
        }
        for (text, millis) in [("replica", 5000), ("replica=2", 2000), ("replica=100ms", 100)] {
            let options = MountOptions::parse(&[text], false).expect("it is known");
            assert_eq!(options.replica, Some(Duration::from_millis(millis)), "{text}");
        }
    }

    #[test]
    fn a_time_of_nothing_is_refused() {
        for text in ["commit_interval=0", "commit_interval=500us", "timeout=0s"] {
            let error = MountOptions::parse(&[text], false).expect_err("nonsense");
            assert!(error.contains(text) && error.contains("at least 1ms"), "{error}");
        }
        assert!(MountOptions::parse(&["commit_interval=1ms,fast_flush=0"], false).is_ok());
    }

    #[test]
    fn one_list_has_one_way_of_access() {
        for list in ["ro,rw", "rw,noatime,ro"] {
            assert!(one_access(list).expect_err(list).contains("contradict"), "{list}");
        }
        for list in ["ro", "rw,cache=strict", ""] {
            assert_eq!(one_access(list).as_deref(), Ok(list));
        }
    }

    #[test]
    fn options_that_a_remount_repeats_are_accepted() {
        let words = "remount,ro,noatime,user_id=0,group_id=0,default_permissions,allow_other,max_read=1048576";
        let options = MountOptions::parse(&[words], false).expect("all are known");
        assert!(options.remount && options.read_only && options.noatime);
    }

    #[test]
    fn the_last_access_time_option_wins() {
        let parse = |words: &str| MountOptions::parse(&[words], false).expect("all are known");
        let flags = |words: &str| {
            let options = parse(words);
            (options.noatime, options.strictatime, options.nodiratime)
        };
        assert_eq!(flags("noatime,strictatime"), (false, true, false));
        assert_eq!(flags("strictatime,relatime,nodiratime"), (false, false, true));
        assert_eq!(flags("nodiratime,diratime,noatime"), (true, false, false));
        let strict = parse("strictatime,nodiratime");
        assert_eq!(MountOptions::parse(&[strict.to_words()], false), Ok(strict));
    }

    #[test]
    fn user_means_nosuid_nodev_noexec_until_overridden() {
        let options = MountOptions::parse(&["user,exec"], false).expect("known");
        assert!(options.nosuid == Some(true) && options.nodev == Some(true) && !options.noexec);
    }

    #[test]
    fn an_unknown_word_is_an_error_unless_sloppy() {
        let error = MountOptions::parse(&["ro,cahce=kernel"], false).expect_err("a typing error");
        assert!(error.contains("cahce=kernel") && error.contains("cache=kernel"), "{error}");
        assert!(MountOptions::parse(&["cache=fast"], false).is_err());
        assert!(MountOptions::parse(&["log="], false).is_err());
        assert!(MountOptions::parse(&["flush=never"], false).is_err());
        assert!(MountOptions::parse(&["sync"], false).is_err());
        assert!(MountOptions::parse(&["cahce=kernel"], true).is_ok());
    }

    #[test]
    fn options_survive_the_way_to_the_daemon() {
        let text = "ro,cache=strict,cache=/var/a,cache_disk=50G,durability=local,local_log=/var/b,cache_size=1G,commit_interval=1500ms,flush_interval_min=250ms,flush=delay,fast_flush=500us,replica=250ms,snapdir=off,idle_poll=off,timeout=5s,async=off,metrics=unix:/run/a,insecure,allow_other,noexec,nodev,suid,noatime,nodiratime";
        let options = MountOptions::parse(&[text], false).expect("known");
        assert_eq!(MountOptions::parse(&[options.to_words()], false), Ok(options));
    }
}
