//! `ferry rollback`: makes a volume what it was when a snapshot was made. This process owns the
//! volume meanwhile. That of a volume in a file is in `snapfile.rs`.

use std::cell::OnceCell;

use ferry_env::{Env, Utc};
use ferry_fs::volume::read_superblock;
use ferry_fs::{Given, LocalFs};
use ferry_object::{ObjectError, Replaced, RolledBack};

use crate::cli::RollbackArgs;
use crate::control::print;
use crate::error::CliError;
use crate::location::Location;
use crate::mounts;
use crate::open::{How, begin_timeline_in_store, explain, open_with_passphrase};
use crate::socket::printable;
use crate::{snapfile, snappath};

/// Runs the command.
pub fn run(args: &RollbackArgs) -> Result<(), CliError> {
    let (volume, name) = volume_and_name(&args.snapshot, "rollback", "unmount it, and ")?;
    let how = How::new(&volume, false, args.take_over, args.force)?;
    let replaced = if args.discard { Replaced::Discarded } else { Replaced::Snapshot };
    let (env, passphrase) = (Env::real(), OnceCell::new());
    let opened = open_with_passphrase(&volume, how, &passphrase, &env);
    let opened = opened.map_err(|error| explain(&volume, &error))?;
    let limit = LocalFs::limit_of_numbers(&opened.device, &env).ok();
    let given = |is_copied: bool| match limit {
        Some(limit) if !is_copied => Given::Below(limit),
        _ => Given::Also(limit.unwrap_or(0)),
    };
    let rolled_back = match (opened.store(), volume.path()) {
        (Some(device), _) => {
            let rolled_back = device.roll_back(&name, replaced).map_err(|error| match error {
                ObjectError::TooManySnapshots(_) => CliError::Failed(format!(
                    "{volume}: {error}, or lose what the volume is now (--discard)"
                )),
                error => explain(&volume, &error.into()),
            })?;
            drop(opened);
            // This process does not own it any more.
            let given = given(rolled_back.is_copied);
            begin_timeline_in_store(&volume, given, &passphrase, &env).map_err(|error| {
                CliError::Failed(format!(
                    "{error}: the volume is what it was in {name}, but clients that have it mounted may take new files for old ones: unmount it on all of them"
                ))
            })?;
            rolled_back
        }
        (None, Some(path)) => {
            let id = read_superblock(&opened.device).ok().map(|superblock| superblock.volume_id);
            snapfile::roll_back(path, (id, given(false)), &name, replaced)?
        }
        (None, None) => return Err(volume.no_snapshots()),
    };
    let RolledBack { made_secs, before, is_copied: _ } = rolled_back;
    let before = before.map_or_else(
        || "what it was before is discarded".into(),
        |before| format!("what it was before is in the snapshot {before}"),
    );
    let (name, made) = (printable(&name), Utc::from_secs(made_secs));
    print(&format!("ferry: {volume} is what it was in {name} (made {made}); {before}\n"))
}

/// The volume, and the name of the snapshot, that a command is given. `first`: what it wants of a
/// volume that is mounted.
pub fn volume_and_name(
    snapshot: &Location,
    command: &str,
    first: &str,
) -> Result<(Location, String), CliError> {
    match snapshot {
        Location::Snapshot(url, name) => Ok((Location::Store(url.clone()), name.clone())),
        Location::Store(_) => Err(CliError::Usage(format!(
            "{snapshot}: name the snapshot behind the volume, VOLUME@NAME; `ferry snapshot list {snapshot}` shows them"
        ))),
        Location::Path(path) => match (snappath::wanted(path), mounts::of(snapshot)?) {
            (Some((volume, name)), _) => Ok((Location::Path(volume), name)),
            (None, Some(mount)) if mount.is_local() => Err(CliError::Usage(format!(
                "{snapshot}: that is a mount: {first}name the snapshot by the volume: `ferry {command} {}@NAME`",
                mount.volume()
            ))),
            (None, _) => Err(CliError::Usage(format!(
                "{snapshot}: name the snapshot behind the volume, VOLUME@NAME; `ferry snapshot list VOLUME` shows them"
            ))),
        },
        Location::Server(_) => Err(snapshot.not_the_volume()),
    }
}
