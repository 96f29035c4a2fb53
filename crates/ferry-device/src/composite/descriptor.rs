//! The volume's own file: text that lists where the components are. Every component says itself
//! what it is; this file says where to look, and, for a mirror, the newest generation, so that a
//! stale side that is found alone is known as stale.
//!
//! It is replaced as a whole (a new file, renamed). The process that has it open owns the volume,
//! as with a volume in a single file.

use super::error::CompositeError;
use super::header::hex;
use super::kind::Kind;
use crate::error::DeviceError;
use crate::file::{FileDevice, OpenMode};
use ferry_env::Env;
use parking_lot::Mutex;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// The first line of every descriptor.
const MAGIC: &str = "FerryFS composite volume 1";
/// A longest descriptor, in bytes.
const LEN_MAX: u64 = 256 << 10;

/// What the file says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Descriptor {
    pub set: [u8; 16],
    pub kind: Kind,
    /// The newest generation of a mirror.
    pub generation: u64,
    /// Where components are, or may be.
    pub components: Vec<String>,
}

impl Descriptor {
    fn to_text(&self) -> String {
        let mut text = format!(
            "{MAGIC}\n# Written by ferry. Paths may be changed while it is not mounted; the components know themselves.\n\
             set {}\nkind {}\ngeneration {}\n",
            hex(&self.set),
            self.kind,
            self.generation
        );
        self.components.iter().for_each(|path| text.push_str(&format!("component {path}\n")));
        text
    }

    fn parse(text: &str) -> Result<Self, String> {
        let mut lines = text.lines();
        if lines.next() != Some(MAGIC) {
            return Err("not the file of a volume of several components".into());
        }
        let (mut set, mut kind, mut generation, mut components) = (None, None, None, Vec::new());
        for line in lines.filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let bad = || format!("a line that makes no sense: {line:?}");
            match line.split_once(' ').ok_or_else(bad)? {
                ("set", hex) => set = Some(parse_set(hex).ok_or_else(bad)?),
                ("kind", word) => kind = Some(word.parse().map_err(|_| bad())?),
                ("generation", number) => generation = Some(number.parse().map_err(|_| bad())?),
                ("component", path) => components.push(path.to_owned()),
                _ => return Err(bad()),
            }
        }
        let missing = |what| format!("the line with the {what} is missing");
        let set = set.ok_or_else(|| missing("set"))?;
        let kind = kind.ok_or_else(|| missing("kind"))?;
        let generation = generation.ok_or_else(|| missing("generation"))?;
        Ok(Self { set, kind, generation, components })
    }
}

fn parse_set(text: &str) -> Option<[u8; 16]> {
    let number = u128::from_str_radix(text, 16).ok().filter(|_| text.len() == 32)?;
    Some(number.to_be_bytes())
}

/// Whether the file begins like a descriptor.
pub(super) fn is_descriptor(path: &Path) -> bool {
    let mut front = [0; MAGIC.len()];
    let regular = fs::metadata(path).is_ok_and(|found| found.is_file());
    let read = regular && File::open(path).and_then(|mut file| file.read_exact(&mut front)).is_ok();
    read && front == *MAGIC.as_bytes()
}

/// What the descriptor at `path` says now, also if another process owns it. `None`: it is none.
pub(super) fn listed(path: &Path) -> Option<Descriptor> {
    let short = is_descriptor(path) && fs::metadata(path).ok()?.len() <= LEN_MAX;
    Descriptor::parse(&short.then(|| fs::read_to_string(path))?.ok()?).ok()
}

/// The descriptor file, owned by this handle.
pub(super) struct DescriptorFile {
    path: PathBuf,
    env: Env,
    state: Mutex<State>,
}

struct State {
    descriptor: Descriptor,
    /// Held for its lock alone.
    _owner: FileDevice,
}

impl DescriptorFile {
    pub fn open(path: &Path, mode: OpenMode, env: &Env) -> Result<Self, CompositeError> {
        let owner = FileDevice::open(path, mode, env)?;
        let bad = |detail: String| CompositeError::Descriptor { path: path.into(), detail };
        let len = fs::metadata(path).map_or(0, |found| found.len());
        if len > LEN_MAX {
            return Err(bad("too long for the file of a volume of several components".into()));
        }
        let text =
            fs::read_to_string(path).map_err(|error| bad(format!("cannot be read: {error}")))?;
        let descriptor = Descriptor::parse(&text).map_err(bad)?;
        let state = Mutex::new(State { descriptor, _owner: owner });
        Ok(Self { path: path.into(), env: env.clone(), state })
    }

    /// Makes the file, or replaces what is there.
    pub fn create(path: &Path, descriptor: &Descriptor, env: &Env) -> Result<Self, CompositeError> {
        let owner = write(path, descriptor, env)?;
        let state = Mutex::new(State { descriptor: descriptor.clone(), _owner: owner });
        Ok(Self { path: path.into(), env: env.clone(), state })
    }

    pub fn get(&self) -> Descriptor {
        self.state.lock().descriptor.clone()
    }

    /// Replaces the descriptor durably.
    pub fn change(&self, change: impl FnOnce(&mut Descriptor)) -> Result<(), CompositeError> {
        let mut state = self.state.lock();
        let mut changed = state.descriptor.clone();
        change(&mut changed);
        if changed != state.descriptor {
            let owner = write(&self.path, &changed, &self.env)?;
            *state = State { descriptor: changed, _owner: owner };
        }
        Ok(())
    }
}

/// Writes a new file, owns it, and gives it the name.
fn write(path: &Path, descriptor: &Descriptor, env: &Env) -> Result<FileDevice, CompositeError> {
    let failed = |what| move |source| DeviceError::Io { what, path: path.into(), source };
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().ok_or_else(|| failed("write")(io::ErrorKind::InvalidInput.into()))?);
    name.push(".new");
    let new = parent.join(name);
    let written = File::create(&new).and_then(|mut file| {
        file.write_all(descriptor.to_text().as_bytes())?;
        file.sync_all()
    });
    written.map_err(failed("write"))?;
    let owner = FileDevice::open(&new, OpenMode::ReadWrite, env)?;
    let named = fs::rename(&new, path).and_then(|()| File::open(parent)?.sync_all());
    named.map_err(failed("replace"))?;
    Ok(owner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_data_is_read_back() {
        let descriptor = Descriptor {
            set: *b"0123456789abcdef",
            kind: Kind::Stripe,
            generation: 7,
            components: vec!["/srv/a b".into(), "/dev/sdb".into()],
        };
        assert_eq!(Descriptor::parse(&descriptor.to_text()), Ok(descriptor.clone()));
        for (what, with) in [
            ("kind stripe", "kind raid6"),
            ("generation 7", "generation many"),
            ("set ", "set 00"),
            ("kind stripe\n", ""),
            ("FerryFS", "Other"),
            ("component /srv/a b", "nonsense"),
        ] {
            let text = descriptor.to_text().replace(what, with);
            assert!(Descriptor::parse(&text).is_err(), "{text}");
        }
    }
}
