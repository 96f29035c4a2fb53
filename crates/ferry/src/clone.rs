//! `ferry clone`: a new volume that begins as a snapshot of another one. In the same store the
//! process that has the volume open pins what the clone needs; if there is none, this one opens the
//! volume. A volume in a file has its clone on the same file system (`snapfile.rs`).

use std::cell::OnceCell;
use std::path::Path;

use ferry_env::{Env, Utc};
use ferry_fs::Given;
use ferry_object::{Cloned, ObjectError, StoreUrl, is_encrypted, prepare_clone};

use crate::cli::CloneArgs;
use crate::control::print;
use crate::error::CliError;
use crate::location::{Location, resolved_url};
use crate::mounts;
use crate::open::{begin_timeline_in_store, explain};
use crate::rollback::volume_and_name;
use crate::socket::printable;
use crate::{passphrase, snapfile, snappath, snapshot};

/// Why a clone could not be made.
enum Failure {
    /// What the store or the volume in it says.
    Store(ObjectError),
    /// The source could not get its pin.
    NotPinned(CliError),
}

impl From<ObjectError> for Failure {
    fn from(error: ObjectError) -> Self {
        Self::Store(error)
    }
}

/// Runs the command.
pub fn run(args: &CloneArgs) -> Result<(), CliError> {
    match (&args.snapshot, &args.new) {
        (Location::Path(_), Location::Path(new)) => return clone_file(args, new),
        (volume @ Location::Path(_), new) if mounts::of(volume)?.is_none() => {
            return Err(not_there(volume, new));
        }
        _ => {}
    }
    let (volume, name) = volume_and_name(&args.snapshot, "clone", "")?;
    let (Location::Store(source), Location::Store(new)) = (&volume, &args.new) else {
        return Err(not_there(&volume, &args.new));
    };
    let env = Env::real();
    let failed = |error: ObjectError| explain(&volume, &error.into());
    let passphrase = OnceCell::new();
    if is_encrypted(source, &env).map_err(failed)? {
        passphrase::protect_memory();
        let found = passphrase::get(&volume, false)?;
        passphrase.get_or_init(|| found);
    }
    let target = prepare_clone(source, new, &env);
    let target = target.map_err(|error| explain(&args.new, &error.into()))?;
    let pin = |pin: &str| snapshot::pin(&volume, pin).map_err(Failure::NotPinned);
    let made = target.make(&name, passphrase.get(), pin).map_err(|failure| match failure {
        Failure::Store(error) => failed(error),
        Failure::NotPinned(error) => error,
    })?;
    begin_timeline_in_store(&args.new, Given::Also(0), &passphrase, &env).map_err(|error| {
        CliError::Failed(format!(
            "{error}: the clone is made, but a server of it may believe clients of {volume} what those were told there: remove the clone, and make it anew"
        ))
    })?;
    let Cloned { made_secs, pin } = made;
    let (name, made, pin) = (printable(&name), Utc::from_secs(made_secs), printable(&pin));
    let new: StoreUrl = resolved_url(new);
    print(&format!(
        "ferry: {new} is a clone of {name} (made {made}); {volume} has the pin {pin} for it\n"
    ))
}

/// Clones a volume in a file: a snapshot of it, or what it is now.
fn clone_file(args: &CloneArgs, new: &Path) -> Result<(), CliError> {
    let CloneArgs { snapshot: source, new: target } = args;
    let snapshot = source.path().and_then(snappath::wanted);
    let (volume, name) = match snapshot {
        Some((volume, name)) => (Location::Path(volume), Some(name)),
        None => (snapshot::volume_of(source)?, None),
    };
    let Location::Path(path) = &volume else { return Err(not_there(&volume, target)) };
    if target.snapshot().is_some() {
        return Err(target.not_the_volume());
    }
    if name.is_none() {
        snapshot::sync(source)?;
    }
    snapfile::clone(path, name.as_deref(), new)?;
    let of = name.map_or_else(|| "what it is now".into(), |name| printable(&name));
    print(&format!("ferry: {target} is a clone of {volume}, of {of}\n"))
}

/// The error for a place where no clone can be.
fn not_there(volume: &Location, new: &Location) -> CliError {
    match new {
        Location::Store(_) => CliError::Usage(format!(
            "{new}: a clone of {volume} is a file on the same file system: name a file there; `ferry copy` copies a volume into a store"
        )),
        Location::Path(_) => CliError::Usage(format!(
            "{new}: a clone lies beside its volume in the store ({volume}): name a place there; to have it in a file or on a device, make a \
             volume there and copy from a mount of the snapshot"
        )),
        _ => new.not_the_volume(),
    }
}
