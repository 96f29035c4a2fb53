//! `ferry mount` and `ferry bench null`.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferry_bench::null::{Cache, NullFs, NullOptions};
use ferry_device::{Env, OpenMode};
use ferry_fs::{CacheMode, Filesystem, FsOptions, LocalFs};

use crate::bench::NullArgs;
use crate::cli::MountArgs;
use crate::daemon::{self, Service};
use crate::error::CliError;
use crate::holder::{explain, open_when_free};
use crate::options::MountOptions;
use crate::{logging, mkfs, mounts, remote, shown, umount};

/// What a mount of nothing but memory shows as its source.
const NULL_NAME: &str = "null";

/// `ferry mount`, all of it or one of its halves: the one that starts a daemon, and the daemon.
pub fn run(args: &MountArgs, options: &MountOptions, log_level: Option<&str>) -> Result<(), CliError> {
    start_log(args.foreground, args.daemon, options, log_level)?;
    if options.remount {
        return remount(&args.mountpoint, options);
    }
    if !args.daemon {
        clear_place(&args.mountpoint)?;
    }
    let mountpoint = place(&args.mountpoint)?;
    let remote = remote::address(&args.volume)?;
    if let Some(address) = &remote {
        remote::check(address, args, options)?;
        if args.foreground {
            return remote::serve(address, &mountpoint, args, options);
        }
        return in_background(address.to_string().into(), mountpoint, args, options, log_level);
    }
    if options.tls.is_some() || options.insecure || options.timeout.is_some() || !options.asynchronous {
        return Err(CliError::Usage("tls, insecure, timeout and async are for ferry://HOST/ only".into()));
    }
    if args.create && mkfs::make_if_absent(&args.volume)? {
        eprintln!("ferry: made a new volume, {}", args.volume.display());
    }
    let volume = args.volume.canonicalize().map_err(|error| match error.kind() {
        ErrorKind::NotFound => CliError::Failed(format!(
            "{}: there is no such volume: `ferry mkfs` makes one, `ferry mount --create` makes and mounts it",
            args.volume.display()
        )),
        _ => CliError::path(&args.volume, "cannot open")(error),
    })?;
    let log = log_path(options)?;
    if args.foreground {
        return serve(&volume, &mountpoint, args, options, log.as_deref());
    }
    in_background(volume.into(), mountpoint, args, options, log_level)
}

/// Starts the daemon.
fn in_background(
    source: OsString,
    mountpoint: PathBuf,
    args: &MountArgs,
    options: &MountOptions,
    log_level: Option<&str>,
) -> Result<(), CliError> {
    let mut command = vec![OsString::from("mount"), source, mountpoint.into()];
    command.push("--stop-timeout".into());
    command.push(format!("{}ms", args.stop_timeout.as_millis()).into());
    daemon::spawn(&daemon_args(command, options, log_level), options.log.as_deref())
}

/// `ferry bench null`.
pub fn run_null(args: &NullArgs, options: &MountOptions, log_level: Option<&str>) -> Result<(), CliError> {
    start_log(args.foreground, args.daemon, options, log_level)?;
    if !args.daemon {
        clear_place(&args.mountpoint)?;
    }
    let mountpoint = place(&args.mountpoint)?;
    if !args.foreground {
        let command = vec![OsString::from("bench"), "null".into(), mountpoint.into()];
        return daemon::spawn(&daemon_args(command, options, log_level), options.log.as_deref());
    }
    daemon::prepare(args.daemon);
    let fs: Arc<dyn Filesystem> = Arc::new(NullFs::new(&Env::real(), null_options(options)));
    let log = log_path(options)?;
    daemon::serve(
        fs,
        &Service {
            mountpoint: &mountpoint,
            options: fuse_options(NULL_NAME.into(), options),
            shown: None,
            daemon: args.daemon,
            log: log.as_deref(),
            stop_timeout: std::time::Duration::from_secs(1),
        },
    )
}

fn serve(
    volume: &Path,
    mountpoint: &Path,
    args: &MountArgs,
    options: &MountOptions,
    log: Option<&Path>,
) -> Result<(), CliError> {
    daemon::prepare(args.daemon);
    let env = Env::real();
    let mode = if options.read_only { OpenMode::ReadOnly } else { OpenMode::ReadWrite };
    let device = open_when_free(volume, mode, &env).map_err(|e| explain(volume, &e))?;
    let failed = |e: &dyn std::fmt::Display| CliError::Failed(format!("{}: {e}", volume.display()));
    let fs_options = fs_options(options);
    let shown = options.shown_words(fs_options.flush, fs_options.fast_flush);
    let fs = LocalFs::open(device, fs_options, env).map_err(|e| failed(&e))?;
    let served = daemon::serve(
        Arc::clone(&fs) as Arc<dyn Filesystem>,
        &Service {
            mountpoint,
            options: fuse_options(volume.to_string_lossy().into_owned(), options),
            shown: Some(shown),
            daemon: args.daemon,
            log,
            stop_timeout: args.stop_timeout,
        },
    );
    let closed = fs.close().map_err(|e| failed(&e));
    match &closed {
        Ok(()) if served.is_ok() => {
            tracing::info!(volume = %volume.display(), "closed: everything is on disk")
        }
        Ok(()) => {}
        Err(error) => tracing::error!(%error, "the volume could not be closed cleanly"),
    }
    served.and(closed)
}

fn null_options(options: &MountOptions) -> NullOptions {
    let cache = match options.cache {
        CacheMode::Kernel => Cache::Kernel,
        CacheMode::Writeback => Cache::Writeback,
        CacheMode::Strict => Cache::Strict,
    };
    NullOptions { cache, ..NullOptions::default() }
}

fn fs_options(options: &MountOptions) -> FsOptions {
    let defaults = FsOptions::default();
    FsOptions {
        read_only: options.read_only,
        cache: options.cache,
        cache_bytes: options
            .cache_bytes
            .and_then(|bytes| usize::try_from(bytes).ok())
            .unwrap_or(defaults.cache_bytes),
        commit_interval: options.commit_interval.unwrap_or(defaults.commit_interval),
        flush: options.flush.unwrap_or(defaults.flush),
        fast_flush: options.fast_flush.unwrap_or(defaults.fast_flush),
        log: defaults.log,
        background: true,
        owner: rustix::process::geteuid().as_raw(),
        ..defaults
    }
}

/// What the kernel's side of the mount is told.
pub fn fuse_options(fsname: String, options: &MountOptions) -> ferry_fuse::MountOptions {
    ferry_fuse::MountOptions {
        fsname,
        read_only: options.read_only,
        allow_other: options.allow_other.then_some(true),
        nosuid: options.nosuid,
        nodev: options.nodev,
        idle_poll: options.idle_poll,
        noexec: options.noexec,
        noatime: options.noatime,
        ..ferry_fuse::MountOptions::default()
    }
}

/// The daemon's command line behind its subcommand and places.
fn daemon_args(mut command: Vec<OsString>, options: &MountOptions, log_level: Option<&str>) -> Vec<OsString> {
    command.extend(["--foreground".into(), "--daemon".into(), "-o".into(), options.to_words().into()]);
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

/// A log file that cannot be written is said before anything is mounted.
pub fn log_path(options: &MountOptions) -> Result<Option<PathBuf>, CliError> {
    let Some(log) = &options.log else { return Ok(None) };
    let opened = std::fs::OpenOptions::new().create(true).append(true).open(log);
    opened.map_err(CliError::path(log, "cannot write the log file"))?;
    Ok(Some(log.clone()))
}

/// A mount whose daemon was killed is in the way of the next one.
fn clear_place(mountpoint: &Path) -> Result<(), CliError> {
    let resolved =
        mounts::resolve(mountpoint).map_err(CliError::path(mountpoint, "cannot find the mount point"))?;
    while umount::clear_dead(&resolved)? {
        eprintln!("ferry: {}: cleared the mount of a daemon that had died", resolved.display());
    }
    Ok(())
}

fn place(mountpoint: &Path) -> Result<PathBuf, CliError> {
    let resolved =
        mountpoint.canonicalize().map_err(CliError::path(mountpoint, "cannot use the mount point"))?;
    let found =
        std::fs::metadata(&resolved).map_err(CliError::path(&resolved, "cannot use the mount point"))?;
    if !found.is_dir() {
        return Err(CliError::Failed(format!(
            "{}: not a directory: a mount point must be one",
            resolved.display()
        )));
    }
    // One would hide the other, and whatever is asked of the hidden one would reach the other.
    let there =
        mounts::at(&resolved).map_err(CliError::path(&resolved, "cannot read the table of mounts"))?;
    if let Some(mount) = there.filter(mounts::Mount::is_ferry) {
        return Err(CliError::Failed(format!(
            "{}: {} is mounted here already: choose another mount point, or unmount it first (`ferry umount {0}`)",
            resolved.display(),
            mount.source.display()
        )));
    }
    Ok(resolved)
}

/// `mount -o remount`: only what the kernel itself keeps can change.
fn remount(mountpoint: &Path, options: &MountOptions) -> Result<(), CliError> {
    use rustix::mount::{MountFlags, mount_remount};
    let mut flags = MountFlags::empty();
    flags.set(MountFlags::RDONLY, options.read_only);
    flags.set(MountFlags::NOSUID, options.nosuid);
    flags.set(MountFlags::NODEV, options.nodev);
    flags.set(MountFlags::NOEXEC, options.noexec);
    flags.set(MountFlags::NOATIME, options.noatime);
    let mount =
        mounts::find(mountpoint).map_err(CliError::path(mountpoint, "cannot read the table of mounts"))?;
    let mount =
        mount.filter(mounts::Mount::is_ferry).ok_or_else(|| CliError::NotMounted(mountpoint.into()))?;
    // mount(8) repeats what it shows.
    let shown = MountOptions::parse(&[shown::words(&mount.target)], true).unwrap_or_default();
    if options.cache != CacheMode::Kernel && options.cache != shown.cache
        || changes(options.cache_bytes, shown.cache_bytes)
        || changes(options.commit_interval, shown.commit_interval)
        || changes(options.flush, shown.flush)
        || changes(options.fast_flush, shown.fast_flush)
    {
        return Err(CliError::Usage(
            "a remount can change ro, rw, nosuid, nodev, noexec and noatime, `ferry tune` the flush policy; for others unmount first".into(),
        ));
    }
    mount_remount(&mount.target, flags, "")
        .map_err(|e| CliError::path(mountpoint, "cannot remount")(e.into()))
}

/// Something was asked for, and something else holds.
fn changes<T: PartialEq>(asked: Option<T>, holds: Option<T>) -> bool {
    asked.is_some() && asked != holds
}

/// Messages of a mount: more of them than a single command has, and with the time where nobody else adds it.
fn start_log(
    foreground: bool,
    daemon: bool,
    options: &MountOptions,
    level: Option<&str>,
) -> Result<(), CliError> {
    let stamped =
        (foreground && !daemon && std::env::var_os("JOURNAL_STREAM").is_none()) || options.log.is_some();
    logging::start(level, "info", stamped).map_err(CliError::Usage)?;
    logging::log_panics();
    Ok(())
}
