//! `ferry rollback`: makes a volume in a store what it was when a snapshot was made. This process
//! owns the volume meanwhile.

use ferry_env::{Env, Utc};
use ferry_object::{ObjectError, Replaced, RolledBack};

use crate::cli::RollbackArgs;
use crate::control::print;
use crate::error::CliError;
use crate::location::Location;
use crate::mounts::{self, Mount};
use crate::open::{How, explain, open_when_free};
use crate::socket::printable;

/// Runs the command.
pub fn run(args: &RollbackArgs) -> Result<(), CliError> {
    let (volume, name) = volume_and_name(&args.snapshot, "rollback", "unmount it, and ")?;
    let how = How::new(&volume, false, args.take_over, args.force)?;
    let replaced = if args.discard { Replaced::Discarded } else { Replaced::Snapshot };
    let opened = open_when_free(&volume, how, &Env::real()).map_err(|e| explain(&volume, &e))?;
    let Some(device) = opened.store() else { return Err(volume.no_snapshots()) };
    let rolled_back = device.roll_back(name, replaced).map_err(|error| match error {
        ObjectError::TooManySnapshots(_) => CliError::Failed(format!(
            "{volume}: {error}, or lose what the volume is now (--discard)"
        )),
        error => explain(&volume, &error.into()),
    })?;
    let RolledBack { made_secs, before } = rolled_back;
    let before = before.map_or_else(
        || "what it was before is discarded".into(),
        |before| format!("what it was before is in the snapshot {before}"),
    );
    let (name, made) = (printable(name), Utc::from_secs(made_secs));
    print(&format!("ferry: {volume} is what it was in {name} (made {made}); {before}\n"))
}

/// The volume, and the name of the snapshot, that a command is given. `first`: what it wants of a
/// volume that is mounted.
pub fn volume_and_name<'a>(
    snapshot: &'a Location,
    command: &str,
    first: &str,
) -> Result<(Location, &'a str), CliError> {
    match snapshot {
        Location::Snapshot(url, name) => Ok((Location::Store(url.clone()), name)),
        Location::Store(_) => Err(CliError::Usage(format!(
            "{snapshot}: name the snapshot behind the volume, VOLUME@NAME; `ferry snapshot list {snapshot}` shows them"
        ))),
        Location::Path(_) => match mounts::of(snapshot).filter(Mount::is_ferry) {
            Some(mount) if mount.volume().store().is_some() => Err(CliError::Usage(format!(
                "{snapshot}: that is a mount: {first}name the snapshot by the volume: `ferry {command} {}@NAME`",
                mount.volume()
            ))),
            _ => Err(snapshot.no_snapshots()),
        },
        Location::Server(_) => Err(snapshot.not_the_volume()),
    }
}
