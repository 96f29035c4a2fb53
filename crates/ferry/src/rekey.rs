//! `ferry passphrase`: changes the passphrase of an encrypted volume.

use ferry_env::Env;
use ferry_object::{ObjectError, change_passphrase, is_encrypted};

use crate::cli::PassphraseArgs;
use crate::control::print;
use crate::error::CliError;
use crate::location::Location;
use crate::open::explain;
use crate::passphrase;

/// Runs `ferry passphrase`.
pub fn run(args: &PassphraseArgs) -> Result<(), CliError> {
    let volume = &args.volume;
    let Location::Store(url) = volume else {
        return Err(CliError::Usage(format!(
            "{volume}: only volumes in a store (s3://, dir://) are encrypted by FerryFS"
        )));
    };
    passphrase::protect_memory();
    let failed = |error: ObjectError| explain(volume, &error.into());
    let env = Env::real();
    if !is_encrypted(url, &env).map_err(failed)? {
        return Err(CliError::Failed(format!(
            "{volume}: the volume is not encrypted: only `ferry mkfs --encrypt` makes one that is"
        )));
    }
    let old = passphrase::get(volume, false)?;
    let new = passphrase::changed_encryption(volume, args.new_passphrase_file.as_deref())?;
    change_passphrase(url, &old, &new, &env).map_err(failed)?;
    print(&format!("{volume}: the new passphrase counts, and the old one does not\n"))
}
