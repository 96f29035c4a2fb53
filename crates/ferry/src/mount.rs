//! `ferry mount`, and mounts of file systems that need no volume.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use ferry_env::Env;
use ferry_fs::error::FsError;
use ferry_fs::{
    AccessTimes, CacheMode, Carried, Errno, Filesystem, FsOptions, Known, LeftBehind, LocalFs,
    SessionStore, VolumeError, WithSnapshots,
};
use ferry_net::ServerOptions;
use ferry_object::is_encrypted;

use crate::asked::Asked;
use crate::cache_size::{GivesWay, default_bytes};
use crate::cli::MountArgs;
use crate::control::STATS;
use crate::daemon::{self, Served, Service, Settle};
use crate::error::CliError;
use crate::hold::{self, Held, Holder, Open};
use crate::location::{Location, resolve};
use crate::open::{How, Opened, explain, on_disk, open_on_disk_when_free};
use crate::options::MountOptions;
use crate::passphrase::Handed;
use crate::size::format_bytes;
use crate::spaced::Walks;
use crate::waiting::pause;
use crate::{logging, mkfs, mounts, passphrase, remote, replica, snappath, starter, umount, utab};

/// A host is short of space if it has less than this, or less than the volume's size divided by
/// `HOST_LOW_SHARE`.
pub const HOST_LOW_BYTES: u64 = 1 << 30;
const HOST_LOW_SHARE: u64 = 20;

/// Runs `ferry mount`: in the foreground, or one of three parts: the process that starts a daemon,
/// its holder, and the daemon.
pub fn run(
    args: &MountArgs,
    options: &MountOptions,
    log_level: Option<&str>,
) -> Result<ExitCode, CliError> {
    start_log(args.foreground, args.daemon, options, log_level)?;
    if args.foreground && !options.remount && Holder::get().is_none() {
        // It may have inherited the passphrase.
        passphrase::protect_memory();
        let handed = if args.daemon { None } else { handed_passphrase(args, options)? };
        let handed = handed.as_ref().map(|handed| handed.path.as_path());
        return hold::run(args.daemon, options.log.as_deref(), handed);
    }
    let held = Holder::get().map(Holder::held).transpose()?.flatten();
    let goes_on = held.is_some();
    let mounted = mount(args, options, log_level, held);
    if let Err(error) = &mounted
        && goes_on
    {
        // Nobody reads what this process prints.
        tracing::error!(%error, "this process does not go on with the mount");
    }
    mounted.map(|()| ExitCode::SUCCESS)
}

fn mount(
    args: &MountArgs,
    options: &MountOptions,
    log_level: Option<&str>,
    held: Option<Held>,
) -> Result<(), CliError> {
    if let Some(key) = held.as_ref().and_then(|held| held.key.as_ref()) {
        passphrase::use_key(key);
    }
    if let Some(file) = &options.passphrase_file {
        passphrase::use_file(file);
    }
    if options.remount {
        return remount(&args.mountpoint, options);
    }
    if !args.daemon && held.is_none() {
        clear_dead_mount(&args.mountpoint)?;
    }
    if options.replica.is_some() {
        replica::check(args, options)?;
    }
    // A snapshot is mounted by its own name, which the table of mounts shows, and is only read.
    let volume = match &options.snapshot {
        Some(name) => args.volume.with_snapshot(name)?,
        None => args.volume.clone(),
    };
    let read_only = options.read_only || options.replica.is_some() || volume.snapshot().is_some();
    let args = &MountArgs { volume, ..args.clone() };
    let options = &MountOptions { read_only, ..options.clone() };
    on_disk(&args.volume, options.cache_disk(), options.local, options.local_log.as_deref())?;
    let mountpoint = match &held {
        // It sends no request to the mount, which nobody would answer.
        Some(held) => held.mountpoint.clone(),
        None => usable_mountpoint(&args.mountpoint)?,
    };
    if let Location::Server(address) = &args.volume {
        remote::check(address, args, options)?;
        if args.foreground {
            return remote::serve(address, &mountpoint, held, args, options);
        }
        return in_background(address.to_string().into(), mountpoint, args, options, log_level);
    }
    if options.tls.is_some() || options.insecure || options.timeout.is_some() || options.async_off {
        let write = args.volume.as_server().map(|server| format!(": write {server}"));
        return Err(CliError::Usage(format!(
            "tls, insecure, timeout and async are for ferry://HOST/ only{}",
            write.unwrap_or_default()
        )));
    }
    // Who goes on with a mount takes nothing from anybody: the process before had the volume.
    let take_over = args.take_over && held.is_none();
    let how = How::new(&args.volume, options.read_only, take_over, args.force)?;
    // What goes on is there, and may only be away.
    if args.create && held.is_none() && mkfs::make_if_absent(&args.volume)? {
        eprintln!("ferry: made a new volume, {}", args.volume);
    }
    let source = source(&args.volume)?;
    let log = options.log_path()?;
    if let (true, Some(interval)) = (args.foreground, options.replica) {
        let log = log.as_deref();
        return replica::serve(&source, interval, &mountpoint, held, args, options, log);
    }
    if args.foreground {
        return serve(&source, how, &mountpoint, held, args, options, log.as_deref());
    }
    in_background(source.into(), mountpoint, args, options, log_level)
}

/// What the table of mounts shows as the source.
fn source(volume: &Location) -> Result<PathBuf, CliError> {
    let Some(path) = volume.path() else {
        return volume.resolved().map_err(CliError::path(volume.to_string(), "cannot open"));
    };
    if let Some((volume, name)) = snappath::split(path) {
        return match snappath::open(&volume, &name) {
            Ok(_) => Ok(snappath::path_of(&volume, &name)),
            Err(error) if error.kind() == ErrorKind::NotFound => Err(CliError::Failed(format!(
                "{}: there is no such snapshot; `ferry snapshot list VOLUME` shows those that are",
                path.display()
            ))),
            Err(error) => Err(CliError::path(path, "cannot open")(error)),
        };
    }
    path.canonicalize().map_err(|error| match error.kind() {
        ErrorKind::NotFound => CliError::Failed(match volume.as_server() {
            Some(server) => format!(
                "{volume}: there is no such volume on this machine; one that a server has is named {server}"
            ),
            None => format!(
                "{volume}: there is no such volume: `ferry mkfs` makes one, `ferry mount --create` makes and mounts it"
            ),
        }),
        _ => CliError::path(path, "cannot open")(error),
    })
}

/// Starts the daemon, and returns when the mount can be used.
fn in_background(
    source: OsString,
    mountpoint: PathBuf,
    args: &MountArgs,
    options: &MountOptions,
    log_level: Option<&str>,
) -> Result<(), CliError> {
    let mut command = vec![OsString::from("mount"), source, mountpoint.into()];
    if args.take_over {
        command.push("--take-over".into());
    }
    if args.force {
        command.push("--force".into());
    }
    command.push("--stop-timeout".into());
    command.push(format!("{}ms", args.stop_timeout.as_millis()).into());
    if let Some(file) = &handed_passphrase(args, options)? {
        command.extend(["--passphrase-file".into(), file.path.clone().into()]);
    }
    starter::spawn(&daemon_args(command, options, log_level), options.log.as_deref())
}

/// The file from which the process that serves reads the passphrase, if that process does not find
/// it by itself: it has no terminal, or must not read from it.
fn handed_passphrase(args: &MountArgs, options: &MountOptions) -> Result<Option<Handed>, CliError> {
    if let Some(file) = &options.passphrase_file {
        passphrase::use_file(file);
    }
    let Some(url) = args.volume.store() else { return Ok(None) };
    passphrase::for_daemon(&args.volume, || {
        is_encrypted(url, &Env::real()).map_err(|error| explain(&args.volume, &error.into()))
    })
}

/// A mount of a file system that needs no volume.
pub struct Plain<'a> {
    /// The mount point.
    pub mountpoint: &'a Path,
    /// The mount's source, as `mount` shows it; also the subcommand of this program that mounts it.
    pub name: &'a str,
    /// This process serves the mount, instead of starting a daemon.
    pub foreground: bool,
    /// This process is the daemon.
    pub daemon: bool,
}

/// Mounts the file system that `make` returns for the cache mode.
pub fn run_plain(
    mount: &Plain<'_>,
    options: &MountOptions,
    log_level: Option<&str>,
    make: impl FnOnce(CacheMode) -> Arc<dyn Filesystem>,
) -> Result<(), CliError> {
    start_log(mount.foreground, mount.daemon, options, log_level)?;
    if options.metrics.is_some() {
        return Err(CliError::Usage(format!("metrics: {} counts nothing", mount.name)));
    }
    if !mount.daemon {
        clear_dead_mount(mount.mountpoint)?;
    }
    let mountpoint = usable_mountpoint(mount.mountpoint)?;
    if !mount.foreground {
        let command = vec![OsString::from(mount.name), mountpoint.into()];
        return starter::spawn(&daemon_args(command, options, log_level), options.log.as_deref());
    }
    daemon::prepare(mount.daemon);
    let (log, asked) = (options.log_path()?, Asked::new());
    let served = daemon::serve(
        make(options.cache),
        &mut Service {
            mountpoint: &mountpoint,
            before: None,
            known: None,
            settle: None,
            options: options.for_kernel(mount.name.into(), false),
            listed_options: None,
            daemon: mount.daemon,
            log: log.as_deref(),
            stop_timeout: std::time::Duration::from_secs(1),
            asked: &asked,
            metrics: None,
        },
        Arc::new(|_| None),
    );
    let served = served.map(drop);
    asked.ended(&served);
    served
}

fn serve(
    source: &Path,
    how: How,
    mountpoint: &Path,
    held: Option<Held>,
    args: &MountArgs,
    options: &MountOptions,
    log: Option<&Path>,
) -> Result<(), CliError> {
    daemon::prepare(args.daemon);
    let env = Env::real();
    let volume = Location::parse(source.as_os_str()).map_err(CliError::Usage)?;
    let on_disk =
        on_disk(&volume, options.cache_disk(), options.local, options.local_log.as_deref())?;
    let opened = open_on_disk_when_free(&volume, how, &on_disk, &env);
    let opened = opened.map_err(|e| explain(&volume, &e))?;
    let failed = |e: &dyn std::fmt::Display| CliError::Failed(format!("{volume}: {e}"));
    let had_others = match &held {
        Some(held) => had_others(held, &opened)?,
        None => false,
    };
    // With `writeback` the kernel would go on with the sizes that it has.
    let survives = options.cache != CacheMode::Writeback;
    let known = Holder::get().filter(|_| survives).and_then(|_| hold::new_known());
    let left = held.as_ref().and_then(|held| held.open.left()).transpose()?;
    left.iter().for_each(hold::give_back_saved);
    let left = left.map(|words| LeftBehind { words, had_others });
    // What has another form is found before the volume is changed: the program of before can go on.
    let (mut carried, mut in_order) = (None, None);
    if let Some(Open::Carried(bytes, memory)) = held.as_ref().map(|held| &held.open) {
        let found = Carried::decode(bytes).ok_or_else(hold::other_form)?;
        let memory = memory.try_clone().map_err(|e| failed(&e))?;
        in_order = Some(Arc::new(found.in_order(memory)));
        carried = Some(found);
    }
    let goes_on = held.is_some();
    let fs_options =
        FsOptions { goes_on, known: known.clone(), left, in_order, ..fs_options(options) };
    let listed = options.listed_words(fs_options.flush, fs_options.fast_flush);
    let cache_size = fs_options.cache_bytes;
    let fs = LocalFs::open(opened.device.clone(), fs_options, env.clone());
    let fs = fs.map_err(|error| match error {
        VolumeError::Changed { .. } => hold::cannot_go_on(&format!("{volume}: {error}")),
        error => failed(&error),
    })?;
    if matches!(how, How::TakeOver | How::Force) && !fs.was_handed_over() {
        await_leases(&volume, &opened, &env);
    }
    let gives_way = GivesWay::start(&fs, LocalFs::set_memory_limit, cache_size, &env);
    let before = held.as_ref().map(|_| take_over(&fs, carried)).transpose()?;
    if before.is_none() && !options.read_only {
        warn_of_small_host(&volume, &fs);
    }
    let asked = Asked::new();
    let (answering, walks) = (Arc::downgrade(&fs), Walks::new(Arc::downgrade(&fs)));
    let shows_snapshots = !options.snapdir_off && volume.snapshot().is_none();
    let with_snapshots = || WithSnapshots::new(&fs, before.as_ref());
    let with_snapshots = shows_snapshots.then(with_snapshots).flatten();
    let settled = Arc::downgrade(&fs);
    let settle: Settle = Arc::new(move |leave| {
        passphrase::is_there().map_err(|error| error.to_string())?;
        let fs = settled.upgrade().ok_or(daemon::ENDS)?;
        fs.sync().map_err(|error| format!("the volume cannot be synced: {error}"))?;
        leave()
    });
    if let (Some(holder), Some(_), Some(store)) = (Holder::get(), &known, opened.store()) {
        holder.keep_store(Some(store.stats().epoch), store.key().as_ref().map(|key| &key[..]))?;
    }
    let served = daemon::serve(
        match &with_snapshots {
            Some(with) => Arc::clone(with) as Arc<dyn Filesystem>,
            None => Arc::clone(&fs) as Arc<dyn Filesystem>,
        },
        &mut Service {
            mountpoint,
            before: held.map(|held| held.connection),
            known: known.as_deref().map(Known::file).transpose().map_err(|e| failed(&e))?,
            settle: Holder::get().map(|_| settle),
            options: options.for_kernel(source.to_string_lossy().into_owned(), false),
            listed_options: Some(listed),
            daemon: args.daemon,
            log,
            stop_timeout: args.stop_timeout,
            asked: &asked,
            metrics: options.metrics.as_ref().map(|address| (address, STATS)),
        },
        Arc::new(move |question| match question {
            STATS => Some(answering.upgrade()?.stats()),
            other => walks.answer(other),
        }),
    );
    drop(gives_way);
    let carry = || with_snapshots.as_ref().map_or_else(|| fs.carry(), |with| with.carry());
    let carried = matches!(served, Ok(Served::HandedOver(..))).then(carry);
    if carried.is_some() {
        fs.detach();
    }
    // A mount that was ended by force may still have requests under way. The volume is closed
    // before those to snapshots have ended, which may wait for the store.
    if let Some(with) = &with_snapshots {
        with.end();
    }
    // A program that was killed has left its read.
    if let Some(store) = opened.store() {
        store.give_up_reads();
    }
    // A mount gives no leases. If no server had any out before it, the next server begins at once.
    if served.is_ok()
        && fs.was_handed_over()
        && let Err(error) = fs.hand_over()
    {
        tracing::warn!(%error, "the next server of the volume will begin with a grace period");
    }
    let closed = fs.close().map_err(|e| failed(&e));
    let closed = closed.and(opened.close().map_err(|e| failed(&e)));
    if let (Some(carried), Ok(Served::HandedOver(connection, program))) = (carried, &served)
        && let Some(holder) = Holder::get()
    {
        let carried = if closed.is_ok() { fs.closed(carried) } else { carried };
        let (open, known) = carried.counts();
        holder.leave(connection, &carried.encode(), mountpoint, program)?;
        tracing::info!(program = %program.display(), open, known, "another process goes on");
    }
    match &closed {
        Ok(()) if served.is_ok() => {
            tracing::info!(%volume, "closed: everything is durable")
        }
        Ok(()) => {}
        Err(error) => tracing::error!(%error, "the volume could not be closed cleanly"),
    }
    asked.ended(&closed);
    if let Some(with) = with_snapshots {
        with.close();
    }
    served.and(closed)
}

/// Clients of the server from which the volume was taken rely on what they have cached for a while.
/// Nothing is changed before.
fn await_leases(volume: &Location, opened: &Opened, env: &Env) {
    let silent = opened.store().map_or(Duration::ZERO, |store| store.alone_for());
    let left = ServerOptions::leases_left(ServerOptions::LEASE_TERM, silent);
    tracing::info!(%volume, ?left, "waits for the leases of the server before");
    let until = env.clock.monotonic() + left;
    while env.clock.monotonic() < until {
        pause(until - env.clock.monotonic());
    }
}

/// Whether a volume in a store had other owners since the process before had it, which was killed:
/// another machine may have taken it while the store could not be reached from here.
fn had_others(held: &Held, opened: &Opened) -> Result<bool, CliError> {
    let (Some(before), Some(store), Some(holder)) = (held.epoch, opened.store(), Holder::get())
    else {
        return Ok(false);
    };
    let epoch = store.stats().epoch;
    let had_others = epoch > before + 1;
    if had_others {
        tracing::warn!("others had the volume meanwhile: all that was changed before may be lost");
    } else {
        // If this process is killed, too, the next one must still find those others.
        holder.claimed(epoch)?;
    }
    Ok(had_others)
}

/// Takes over what programs have open. `carried`: as a process has left it in order.
fn take_over(fs: &LocalFs, carried: Option<Carried>) -> Result<Carried, CliError> {
    let failed = |error: FsError| {
        let why = format!("what programs have open: {error}");
        match error {
            FsError::Errno(Errno(libc::ESTALE)) => hold::cannot_go_on(&why),
            _ => CliError::Failed(why),
        }
    };
    let Some(carried) = carried else {
        return fs.take_over_left().map_err(failed)?.ok_or_else(hold::other_form);
    };
    fs.take_over(&carried).map_err(failed)?;
    Ok(carried)
}

/// Warns if the host may soon lack the space that the volume takes as it fills.
fn warn_of_small_host(volume: &Location, fs: &LocalFs) {
    let size = fs.superblock().size;
    let Some((needs, has)) = fs.host_needs().filter(|(needs, has)| is_short(*needs, *has, size))
    else {
        return;
    };
    tracing::warn!(
        "{volume}: it may come to need {} more, and the file system on which it lies has {} left: when that is full, nothing more can be \
         written to the volume; make room there",
        format_bytes(needs),
        format_bytes(has)
    );
}

/// Whether the host has less than the volume may come to need, and less than a twentieth of the
/// volume or 1 GiB, so that it may be full soon. A sparse volume that is larger than its host is
/// often intended. `ferry mkfs` has warned of it, and a warning at each mount would hide what
/// matters.
pub fn is_short(needs: u64, has: u64, size: u64) -> bool {
    needs > has && has < HOST_LOW_BYTES.max(size / HOST_LOW_SHARE)
}

fn fs_options(options: &MountOptions) -> FsOptions {
    let defaults = FsOptions::default();
    FsOptions {
        read_only: options.read_only,
        cache: options.cache,
        access_times: match (options.noatime, options.strictatime) {
            (true, _) => AccessTimes::Never,
            (_, true) => AccessTimes::Always,
            _ => AccessTimes::Relative,
        },
        directory_access_times: !options.nodiratime,
        cache_bytes: options
            .cache_bytes
            .and_then(|bytes| usize::try_from(bytes).ok())
            .unwrap_or_else(default_bytes),
        commit_interval: options.commit_interval.unwrap_or(defaults.commit_interval),
        flush: options.flush.unwrap_or(defaults.flush),
        fast_flush: options.fast_flush.unwrap_or(defaults.fast_flush),
        flush_interval_min: options.flush_interval_min.unwrap_or_default(),
        log: defaults.log,
        background: true,
        owner: rustix::process::geteuid().as_raw(),
        ..defaults
    }
}

/// The daemon's command line: `command` (subcommand, source and mount point) and the options.
fn daemon_args(
    mut command: Vec<OsString>,
    options: &MountOptions,
    log_level: Option<&str>,
) -> Vec<OsString> {
    command.extend([
        "--foreground".into(),
        "--daemon".into(),
        "-o".into(),
        options.to_words().into(),
    ]);
    if let Some(log) = &options.log {
        let mut word = OsString::from("log=");
        word.push(std::path::absolute(log).unwrap_or_else(|_| log.clone()));
        command.extend(["-o".into(), word]);
    }
    if let Some(dir) = &options.tls {
        let mut word = OsString::from("tls=");
        word.push(std::path::absolute(dir).unwrap_or_else(|_| dir.clone()));
        command.extend(["-o".into(), word]);
    }
    if let Some(level) = log_level {
        command.extend(["--log-level".into(), level.into()]);
    }
    command
}

/// Clears the mount of a killed daemon, which would block the next mount.
fn clear_dead_mount(mountpoint: &Path) -> Result<(), CliError> {
    let resolved =
        resolve(mountpoint).map_err(CliError::path(mountpoint, "cannot find the mount point"))?;
    while umount::clear_dead(&resolved)? {
        say_cleared(&resolved);
    }
    Ok(())
}

fn say_cleared(mountpoint: &Path) {
    eprintln!("ferry: {}: cleared the mount of a daemon that had died", mountpoint.display());
}

fn usable_mountpoint(mountpoint: &Path) -> Result<PathBuf, CliError> {
    while let Err(error) = std::fs::metadata(mountpoint)
        && mounts::says_dead(&error)
    {
        // It was killed, but had not ended when it was looked at.
        umount::detach_dead(mountpoint)?;
        say_cleared(mountpoint);
    }
    let resolved = mountpoint
        .canonicalize()
        .map_err(CliError::path(mountpoint, "cannot use the mount point"))?;
    let found = std::fs::metadata(&resolved)
        .map_err(CliError::path(&resolved, "cannot use the mount point"))?;
    if !found.is_dir() {
        return Err(CliError::Failed(format!(
            "{}: not a directory: a mount point must be one",
            resolved.display()
        )));
    }
    // One mount would hide the other, and requests to the hidden one would reach the other.
    let there = mounts::at(&resolved)
        .map_err(CliError::path(&resolved, "cannot read the table of mounts"))?;
    if let Some(mount) = there.filter(mounts::Mount::is_ferry) {
        return Err(CliError::Failed(format!(
            "{}: {} is mounted here already: choose another mount point, or unmount it first (`ferry umount {0}`)",
            resolved.display(),
            mount.source.display()
        )));
    }
    Ok(resolved)
}

/// Runs `mount -o remount`: only options that the kernel itself keeps can change.
fn remount(mountpoint: &Path, options: &MountOptions) -> Result<(), CliError> {
    use rustix::mount::{MountFlags, mount_remount};
    let mut flags = MountFlags::empty();
    flags.set(MountFlags::RDONLY, options.read_only);
    flags.set(MountFlags::NOEXEC, options.noexec);
    // The daemon maintains access times, as its first options said; these flags only show that.
    flags.set(MountFlags::NOATIME, options.noatime);
    flags.set(MountFlags::STRICTATIME, options.strictatime);
    flags.set(MountFlags::NODIRATIME, options.nodiratime);
    let mount = mounts::find_ferry(&Location::from(mountpoint))?;
    let (nosuid, nodev) = options.distrusts(mount.is_remote());
    flags.set(MountFlags::NOSUID, nosuid);
    flags.set(MountFlags::NODEV, nodev);
    // mount(8) repeats the options that it shows.
    let listed = MountOptions::parse(&[utab::words(&mount.target)], true).unwrap_or_default();
    if options.cache != CacheMode::Kernel && options.cache != listed.cache
        || changes(options.cache_bytes, listed.cache_bytes)
        || changes(options.replica, listed.replica)
        || changes(options.commit_interval, listed.commit_interval)
        || changes(options.flush_interval_min, listed.flush_interval_min)
        || changes(options.flush, listed.flush)
        || changes(options.fast_flush, listed.fast_flush)
        || options.snapshot.is_some() && options.snapshot != mount.volume().snapshot()
    {
        return Err(CliError::Usage(
            "a remount can change ro, rw, nosuid, nodev and noexec, `ferry tune` the flush policy; for others unmount first".into(),
        ));
    }
    mount_remount(&mount.target, flags, "")
        .map_err(|e| CliError::path(mountpoint, "cannot remount")(e.into()))
}

/// Whether an option was given that differs from the one in effect.
fn changes<T: PartialEq>(asked: Option<T>, holds: Option<T>) -> bool {
    asked.is_some() && asked != holds
}

/// Starts the log of a mount: at a more verbose level than other commands, and with the time if the
/// system log does not add it.
fn start_log(
    foreground: bool,
    daemon: bool,
    options: &MountOptions,
    level: Option<&str>,
) -> Result<(), CliError> {
    let stamped = (foreground && !daemon && std::env::var_os("JOURNAL_STREAM").is_none())
        || options.log.is_some();
    logging::start(level, "info", stamped).map_err(CliError::Usage)?;
    logging::log_panics();
    if daemon && level.is_none() {
        logging::show_warnings_only(options.log.as_deref());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_warns_when_the_host_is_nearly_full_and_not_because_a_volume_is_sparse() {
        const GIB: u64 = 1 << 30;
        assert!(!is_short(64 * GIB, 40 * GIB, 64 * GIB), "a default volume on a smaller disk");
        assert!(is_short(64 * GIB, 3 * GIB, 64 * GIB), "less than a twentieth");
        assert!(is_short(GIB, GIB - 1, 2 * GIB), "less than 1 GiB");
        assert!(!is_short(GIB / 2, GIB / 2, 64 * GIB), "all that it may need is there");
    }
}
