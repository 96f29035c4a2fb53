//! `ferry backup`: copies a snapshot of a volume in a store to another store, which is a volume
//! with the snapshots that were backed up. This process owns the target meanwhile.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ferry_env::Env;
use ferry_object::{
    BackedUp, BackupError, BackupSource, Copying, Made, ObjectDevice, ObjectError, StoreUrl,
    open_backup,
};

use crate::cli::BackupArgs;
use crate::control::print;
use crate::error::CliError;
use crate::location::{Location, resolved_url};
use crate::open::{Opened, backup_source_in_store, explain};
use crate::size::{format_bytes, format_nanos};
use crate::snapshot;
use crate::socket::printable;
use crate::table::thousands;
use crate::waiting::{go_on, progress_bar, stop_on_signals};

/// What is backed up, and where to.
struct Backup<'a> {
    /// As the user named it: a mount, too.
    given: &'a Location,
    volume: Location,
    target: &'a Location,
    stop: Arc<AtomicBool>,
    env: Env,
}

/// Runs the command.
pub fn run(args: &BackupArgs) -> Result<(), CliError> {
    let (volume, name) = match &args.volume {
        Location::Snapshot(url, name) => (Location::Store(url.clone()), Some(name.clone())),
        Location::Path(_) if args.volume.snapshot().is_some() => {
            return Err(args.volume.no_snapshots());
        }
        other => (snapshot::volume_of(other)?, None),
    };
    let Location::Store(from) = &volume else { return Err(volume.no_snapshots()) };
    let Location::Store(to) = &args.target else {
        return Err(CliError::Usage(format!(
            "{}: a backup goes to a store: s3://BUCKET/PREFIX or dir:///PATH is wanted",
            args.target
        )));
    };
    refuse_same(from, to)?;
    let env = Env::real();
    let begun = env.clock.monotonic();
    let (given, target, stop) = (&args.volume, &args.target, stop_on_signals()?);
    let backup = Backup { given, volume: volume.clone(), target, stop, env: env.clone() };
    let source = backup_source_in_store(&volume, from, &env).map_err(|e| explain(&volume, &e))?;
    let source = Arc::new(source);
    if let Some(name) = &name {
        source.check(name).map_err(|error| explain(&volume, &error.into()))?;
    }
    let opened = open_backup(to, &source, args.take_over, &env);
    let Made { device, warnings, .. } = opened.map_err(|error| backup.explain(error))?;
    // It is closed in any case, so that other machines need not take it over.
    let _opened = Opened::in_store(device.clone());
    for warning in warnings {
        tracing::warn!("{to}: {warning}");
    }
    let name = name.map_or_else(|| backup.make_snapshot(), Ok)?;
    let done = backup.copy(&device, &source, &name)?;
    let time = env.clock.monotonic().saturating_sub(begun);
    let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let copy = args.target.with_snapshot(&name)?;
    print(&format!("{copy}: {}, {}\n{}", what(&done), format_nanos(nanos).trim(), next(&copy, to)))
}

/// What was done.
fn what(done: &BackedUp) -> String {
    match done {
        BackedUp::WasThere => "the backup was there already".into(),
        BackedUp::Copied { objects, bytes, objects_total, bytes_total } => format!(
            "copied {} of {} objects, {} of {}",
            thousands(*objects),
            thousands(*objects_total),
            format_bytes(*bytes),
            format_bytes(*bytes_total)
        ),
    }
}

/// What the user may do next.
fn next(copy: &Location, to: &StoreUrl) -> String {
    format!(
        "To look into it: ferry mount '{copy}' MOUNTPOINT\n\
         To restore it: ferry backup '{copy}' STORE, and mount STORE; or mount '{to}' itself, which takes no backups any more once \
         it was mounted for writing.\n\
         If clients of a server still have the volume mounted: ferry rollback --discard STORE@NAME, before STORE is served\n"
    )
}

/// Refuses a target that is in the source, or the other way round.
pub fn refuse_same(from: &StoreUrl, to: &StoreUrl) -> Result<(), CliError> {
    let inside = |outer: &StoreUrl, inner: &StoreUrl| match (outer, inner) {
        (StoreUrl::Dir(outer), StoreUrl::Dir(inner)) => {
            resolved(inner).starts_with(resolved(outer))
        }
        (StoreUrl::S3(_), StoreUrl::S3(_)) => {
            let [outer, inner] = [outer, inner].map(|url| resolved_url(url).name());
            let split = |name: &str| {
                let (path, query) = name.split_once('?').unwrap_or((name, ""));
                (format!("{path}/"), query.to_owned())
            };
            let ((outer, at), (inner, other)) = (split(&outer), split(&inner));
            at == other && inner.starts_with(&outer)
        }
        _ => false,
    };
    if inside(from, to) || inside(to, from) {
        return Err(CliError::Usage(format!(
            "{to}: this is the store of the volume, or one is in the other: choose another store, best on other disks"
        )));
    }
    Ok(())
}

/// A path without symbolic links, as far as it exists.
pub fn resolved(path: &Path) -> std::path::PathBuf {
    match (path.canonicalize(), path.parent(), path.file_name()) {
        (Ok(found), ..) => found,
        (Err(_), Some(parent), Some(name)) => resolved(parent).join(name),
        _ => path.into(),
    }
}

impl Backup<'_> {
    /// Makes a snapshot of what the volume is now.
    fn make_snapshot(&self) -> Result<String, CliError> {
        let name = snapshot::dated("backup-", self.env.clock.wall().as_secs());
        snapshot::make(self.given, &self.volume, &name)?;
        print(&format!("{}: made the snapshot {name}\n", self.volume))?;
        Ok(name)
    }

    fn copy(
        &self,
        device: &ObjectDevice,
        source: &Arc<BackupSource>,
        name: &str,
    ) -> Result<BackedUp, CliError> {
        let bar =
            progress_bar("{bar:40} {bytes}/{total_bytes}  {bytes_per_sec}  {eta} left  {msg}");
        let mut tell = |copying: Copying| {
            bar.set_length(copying.bytes_total);
            bar.set_position(copying.bytes);
            let Copying { objects, objects_total, .. } = copying;
            bar.set_message(format!("{objects} of {objects_total} objects"));
            go_on(&self.stop)
        };
        let done = device.back_up(source, name, &mut tell);
        bar.finish_and_clear();
        done.map_err(|error| {
            let goes_on = match &error {
                BackupError::Source(error) | BackupError::Target(error) => error.may_be_mended(),
                error => *error == BackupError::Stopped,
            };
            match (self.explain(error), self.volume.with_snapshot(name)) {
                (CliError::Failed(text), Ok(again)) if goes_on => CliError::Failed(format!(
                    "{text}; older backups there are as they were. To go on: ferry backup '{again}' '{}'",
                    self.target
                )),
                (error, _) => error,
            }
        })
    }

    /// The message for a backup that was not made.
    fn explain(&self, error: BackupError) -> CliError {
        let Self { volume, target, .. } = self;
        CliError::Failed(match error {
            BackupError::Source(error) => return explain(volume, &error.into()),
            BackupError::Target(ObjectError::InUse { owner, since, .. }) => format!(
                "{target}: in use by {owner}, since {since}: unmount it there, or wait for that backup. If that machine is dead or cannot be \
                 reached, `ferry backup --take-over` takes it"
            ),
            BackupError::Target(ObjectError::SnapshotExists(name)) => format!(
                "{target}: it has another snapshot {}: delete that one, or name another one of {volume}",
                printable(&name)
            ),
            BackupError::Target(error) => return explain(target, &error.into()),
            BackupError::Deleted(_) => format!("{volume}: {error}"),
            BackupError::OwnVolume { .. } => {
                format!("{target}: {error}, which a backup would overwrite: choose another store")
            }
            BackupError::OtherVolume => format!("{target}: {error}: choose another store"),
            BackupError::Differs(_) => {
                format!("{target}: {error}. Remove it there: the next backup copies it anew")
            }
            BackupError::Ahead => format!(
                "{target}: {volume} was restored from a backup, and {error}: back it up to another store"
            ),
            BackupError::Forked(_) => format!("{target}: {error}: choose another store"),
            BackupError::Stopped => format!("{target}: stopped"),
        })
    }
}
