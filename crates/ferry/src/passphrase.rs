//! Where the passphrase of an encrypted volume comes from: a file, or the terminal.

use std::fs::File;
use std::io::{IsTerminal, Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use ferry_object::{Encryption, Kdf, Passphrase};
use rustix::fs::MemfdFlags;
use rustix::process::DumpableBehavior;
use zeroize::Zeroizing;

use crate::error::CliError;
use crate::location::Location;

/// The environment variable that names the file.
pub const VARIABLE: &str = "FERRY_PASSPHRASE_FILE";

/// A passphrase has at most so many bytes.
const LEN_MAX: u64 = 64 << 10;

/// The file that the user named; `None`: there is none.
static FILE: OnceLock<PathBuf> = OnceLock::new();

/// The key that the process before had.
static KEY: OnceLock<Passphrase> = OnceLock::new();

/// The volume is opened with this key, whatever has become of its passphrase.
pub fn use_key(key: &[u8]) {
    protect_memory();
    if let Some(key) = Passphrase::of_key(key) {
        KEY.get_or_init(|| key);
    }
}

/// From now on passphrases come from this file.
pub fn use_file(path: &Path) {
    // A later word does not overrule the first one: options of a mount come after those of the
    // command.
    FILE.get_or_init(|| path.into());
}

/// The file that the user named.
fn file() -> Option<PathBuf> {
    FILE.get().cloned().or_else(|| std::env::var_os(VARIABLE).map(PathBuf::from))
}

/// An error if the file that the user named does not have a passphrase any more.
pub fn is_there() -> Result<(), CliError> {
    file().map_or(Ok(()), |path| read(&path).map(drop))
}

/// The passphrase in a file: its contents without the end of the last line.
pub fn read(path: &Path) -> Result<Passphrase, CliError> {
    let failed = |error| CliError::path(path, "cannot read the passphrase")(error);
    let mut bytes = Zeroizing::new(Vec::with_capacity(LEN_MAX as usize + 1));
    File::open(path).map_err(failed)?.take(LEN_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > LEN_MAX {
        return Err(CliError::Failed(format!(
            "{}: a passphrase has at most {LEN_MAX} bytes",
            path.display()
        )));
    }
    if bytes.last() == Some(&b'\n') {
        bytes.pop();
    }
    Passphrase::new(bytes).ok_or_else(|| {
        CliError::Failed(format!("{}: there is no passphrase in it", path.display()))
    })
}

/// The passphrase of a volume, from the terminal; it is asked for twice if it is a new one.
fn from_terminal(volume: &Location, is_new: bool) -> Result<Zeroizing<Vec<u8>>, CliError> {
    if !std::io::stdin().is_terminal() {
        return Err(CliError::Failed(format!(
            "{volume}: the volume is encrypted: name the file with its passphrase, with --passphrase-file FILE, the mount option \
             passphrase_file=FILE, or the environment variable {VARIABLE}"
        )));
    }
    let prompt = |text: String| {
        rpassword::prompt_password(text)
            .map(|word| Zeroizing::new(word.into_bytes()))
            .map_err(|error| CliError::Failed(format!("cannot ask for the passphrase: {error}")))
    };
    let words = if is_new { "New passphrase" } else { "Passphrase" };
    let word = prompt(format!("{words} of {volume}: "))?;
    if is_new && prompt("The same again: ".into())? != word {
        return Err(CliError::Failed("the two passphrases differ: nothing was changed".into()));
    }
    Ok(word)
}

fn ask(volume: &Location, is_new: bool) -> Result<Passphrase, CliError> {
    Passphrase::new(from_terminal(volume, is_new)?)
        .ok_or_else(|| CliError::Failed("an empty passphrase protects nothing".into()))
}

/// What opens a volume: the key that the process before had, or the passphrase from the file that
/// the user named or from the terminal.
pub fn get(volume: &Location, is_new: bool) -> Result<Passphrase, CliError> {
    match (KEY.get().filter(|_| !is_new), file()) {
        (Some(key), _) => Ok(key.clone()),
        (None, Some(path)) => read(&path),
        (None, None) => ask(volume, is_new),
    }
}

/// How a new volume is encrypted.
pub fn new_encryption(volume: &Location) -> Result<Encryption, CliError> {
    protect_memory();
    Ok(Encryption { passphrase: get(volume, true)?, kdf: Kdf::default() })
}

/// How a volume is encrypted from now on: by the passphrase in this file, or from the terminal.
pub fn changed_encryption(volume: &Location, file: Option<&Path>) -> Result<Encryption, CliError> {
    let passphrase = file.map_or_else(|| ask(volume, true), read)?;
    Ok(Encryption { passphrase, kdf: Kdf::default() })
}

/// No core dump shows the keys, and no other process of the same user reads this one's memory.
pub fn protect_memory() {
    if let Err(error) = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        tracing::warn!(%error, "a core dump of this process would show the keys of the volume");
    }
}

/// A file that a daemon reads the passphrase from.
pub struct Handed {
    /// Its path, in the daemon.
    pub path: PathBuf,
    /// It is in memory only, and there for as long as a process has it open.
    _memory: Option<File>,
}

/// The file for the daemon of an encrypted volume. Where no file is named, this asks: a daemon has
/// no terminal. `None`: the daemon finds the file as this process does.
pub fn for_daemon(
    volume: &Location,
    is_encrypted: impl Fn() -> Result<bool, CliError>,
) -> Result<Option<Handed>, CliError> {
    if let Some(path) = FILE.get() {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
        return Ok(Some(Handed { path, _memory: None }));
    }
    if file().is_some() || !is_encrypted()? {
        return Ok(None);
    }
    let word = from_terminal(volume, false)?;
    let failed = |error: std::io::Error| {
        CliError::Failed(format!("cannot hand the passphrase to the daemon: {error}"))
    };
    // The daemon inherits it.
    let memory = rustix::fs::memfd_create("passphrase", MemfdFlags::empty());
    let mut memory = File::from(memory.map_err(|error| failed(error.into()))?);
    memory.write_all(&word).map_err(failed)?;
    let path = PathBuf::from(format!("/proc/self/fd/{}", memory.as_raw_fd()));
    Ok(Some(Handed { path, _memory: Some(memory) }))
}
