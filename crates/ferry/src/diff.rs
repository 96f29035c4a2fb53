//! `ferry diff`: which paths differ between two snapshots of a volume, or a snapshot and the
//! volume.

use std::cell::OnceCell;
use std::process::ExitCode;

use ferry_check::Difference;
use ferry_check::inspect::Inspector;
use ferry_device::{CompositeError, DeviceError};
use ferry_env::Env;
use ferry_object::{ObjectError, Passphrase};
use serde_json::Value;

use crate::cli::DiffArgs;
use crate::control::print;
use crate::error::CliError;
use crate::location::{Location, resolved_url};
use crate::object;
use crate::open::{How, OpenError, Opened, explain, open_with_passphrase};

/// As diff(1): they differ.
const EXIT_DIFFERS: u8 = 1;

/// Runs the command.
pub fn run(args: &DiffArgs) -> Result<ExitCode, CliError> {
    compare(args).map_err(|error| match error {
        CliError::Usage(_) => error,
        // Exit code 1 says that they differ.
        error => CliError::CouldNotCompare(error.to_string()),
    })
}

fn compare(args: &DiffArgs) -> Result<ExitCode, CliError> {
    let DiffArgs { old, new, json } = args;
    let env = Env::real();
    // The passphrase of one store is asked for once.
    let passphrases = [OnceCell::new(), OnceCell::new()];
    let stores = [old, new].map(|volume| volume.store().map(|url| resolved_url(url).to_string()));
    let of_new = usize::from(stores[0] != stores[1]);
    let opened = [open(old, &passphrases[0], &env)?, open(new, &passphrases[of_new], &env)?];
    let read = |volume: &Location, opened: &Opened| {
        let failed = |what: String| CliError::Failed(format!("{volume}: {what}"));
        let inspector =
            Inspector::open(&opened.device, &env).map_err(|error| failed(error.to_string()))?;
        match &inspector.recovered().log_damage {
            None => Ok(inspector),
            Some(damage) => {
                Err(failed(format!("its log is damaged: {}; run `ferry fsck`", damage.detail)))
            }
        }
    };
    let (old_keys, new_keys) = (read(old, &opened[0])?, read(new, &opened[1])?);
    let ids = [&old_keys, &new_keys].map(|volume| volume.superblock().id());
    if ids[0] != ids[1] {
        return Err(CliError::Failed(format!(
            "{old} and {new} are of two volumes, {} and {}: only states of one volume can be compared; for others mount both and use `diff -r`",
            ids[0], ids[1]
        )));
    }
    let found = ferry_check::diff(&old_keys, &new_keys)
        .map_err(|error| CliError::Failed(format!("cannot compare {old} and {new}: {error}")))?;
    drop((old_keys, new_keys));
    let line = |one: &Difference| if *json { as_json(one).to_string() } else { as_text(one) };
    print(&found.iter().map(|one| line(one) + "\n").collect::<String>())?;
    for (volume, opened) in [old, new].into_iter().zip(opened) {
        opened.close().map_err(|error| explain(volume, &error.into()))?;
    }
    Ok(if found.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(EXIT_DIFFERS) })
}

fn open(
    volume: &Location,
    passphrase: &OnceCell<Passphrase>,
    env: &Env,
) -> Result<Opened, CliError> {
    open_with_passphrase(volume, How::Read, passphrase, env).map_err(|error| match (&error, volume) {
        (
            OpenError::Store(ObjectError::InUse { .. } | ObjectError::Locked(_))
            | OpenError::Device(CompositeError::Device(DeviceError::InUse { .. })),
            Location::Store(_) | Location::Path(_),
        ) => CliError::Failed(format!(
            "{volume}: in use, so it changes: name a snapshot of it; `ferry snapshot create {volume} NAME` makes one"
        )),
        _ => explain(volume, &error),
    })
}

fn as_text(difference: &Difference) -> String {
    match difference {
        Difference::Made(path) => format!("+ {}", printable(path)),
        Difference::Removed(path) => format!("- {}", printable(path)),
        Difference::Contents(path) => format!("M {}", printable(path)),
        Difference::Attributes(path) => format!("A {}", printable(path)),
        Difference::Moved { from, to } => format!("R {} -> {}", printable(from), printable(to)),
    }
}

fn as_json(difference: &Difference) -> Value {
    let change = match difference {
        Difference::Made(_) => "made",
        Difference::Removed(_) => "removed",
        Difference::Contents(_) => "contents",
        Difference::Attributes(_) => "attributes",
        Difference::Moved { .. } => "moved",
    };
    let mut json = object!({ "change": change, "path": printable(difference.path()) });
    if let Difference::Moved { to, .. } = difference {
        json["to"] = printable(to).into();
    }
    json
}

/// A path as text. Backslashes, control characters and bytes that are not UTF-8 are escaped, so
/// that no two paths look alike.
fn printable(path: &[u8]) -> String {
    let mut text = String::with_capacity(path.len());
    for chunk in path.utf8_chunks() {
        for char in chunk.valid().chars() {
            if char.is_control() || char == '\\' {
                text.extend(char.escape_default());
            } else {
                text.push(char);
            }
        }
        text.push_str(&chunk.invalid().escape_ascii().to_string());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_paths_look_alike() {
        let texts = [
            (&b"/a b"[..], "/a b"),
            ("/äß".as_bytes(), "/äß"),
            (b"/a\nb", "/a\\nb"),
            (b"/a\\nb", "/a\\\\nb"),
            (b"/\xff\xc3x", "/\\xff\\xc3x"),
            (b"/\x1b[2J", "/\\u{1b}[2J"),
        ];
        for (path, text) in texts {
            assert_eq!(printable(path), text);
        }
    }
}
