//! `ferry doctor --bundle`: what a report of a bug needs, in a tar archive. What may have secrets
//! in it goes through [`Redactor`]. Nothing comes from the environment.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use ferry_env::Env;
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::Value;
use tar::{Builder, Header};

use crate::cache_size::machine_bytes;
use crate::error::CliError;
use crate::list;
use crate::mounts::FS_TYPE;
use crate::socket::object;

use super::check::Check;
use super::daemons::Daemon;
use super::machine::release;
use super::redact::{REMOVED, Redactor};

/// So many lines of the end of each log.
const LOG_LINES: usize = 200;
/// Only the user who made it may read it.
const MODE: u32 = 0o600;
/// The directory in which everything in the archive is.
const ROOT: &str = "ferry-doctor";

/// Makes the file, or none at all. One that exists is left alone.
pub fn make(path: &Path, checks: &[Check], daemons: &[Daemon]) -> Result<(), CliError> {
    let made = OpenOptions::new().write(true).create_new(true).mode(MODE).open(path);
    let file = made.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => {
            let path = path.display();
            CliError::Failed(format!("{path}: it exists, and is left alone: name another file"))
        }
        _ => CliError::path(path, "cannot make")(error),
    })?;
    if let Err(error) = write(file, checks, daemons) {
        // If it stays, the next try says so.
        let _ = std::fs::remove_file(path);
        return Err(CliError::path(path, "cannot write")(error));
    }
    eprintln!(
        "ferry: {}: made; secrets and names of files were removed, paths of volumes and addresses were not: look at it before you send it",
        path.display()
    );
    Ok(())
}

fn write(file: File, checks: &[Check], daemons: &[Daemon]) -> io::Result<()> {
    let mut archive = Archive::new(file);
    let redactor = Redactor::new(paths(daemons));
    archive.json("system.json", &system())?;
    let all: Value = checks.iter().map(|check| redactor.json(&check.json())).collect();
    archive.json("checks.json", &all)?;
    let all: Value =
        daemons.iter().map(|daemon| redactor.json(&list::json(&daemon.found))).collect();
    archive.json("list.json", &all)?;
    archive.add("mounts.txt", redactor.text(&mount_table()).as_bytes())?;
    for (index, daemon) in daemons.iter().enumerate() {
        // The number is that of the line in list.json.
        let name = format!("{}-{index}", daemon.found.kind.name());
        let silent = || object([("error", "it does not answer".into())]);
        let stats =
            daemon.found.figures.as_ref().map_or_else(silent, |figures| redactor.json(figures));
        archive.json(&format!("stats/{name}.json"), &stats)?;
        let Some(log) = daemon.log_end() else { continue };
        let log = log.map_or_else(
            |error| format!("the log cannot be read: {error}\n"),
            |log| redactor.log(&log, LOG_LINES),
        );
        archive.add(&format!("log/{name}.txt"), log.as_bytes())?;
    }
    archive.end()
}

/// Versions, and how large the machine is. Its name is not there.
fn system() -> Value {
    let (name, cores) = (rustix::system::uname(), std::thread::available_parallelism());
    object([
        ("ferry", env!("CARGO_PKG_VERSION").into()),
        ("kernel", release().into()),
        ("kernel_version", name.version().to_string_lossy().into()),
        ("machine", name.machine().to_string_lossy().into()),
        ("cpus", cores.map_or(0, usize::from).into()),
        ("memory_bytes", machine_bytes().into()),
    ])
}

/// The lines of the table of mounts that are of FerryFS, without names of directories in volumes.
fn mount_table() -> String {
    let table = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
    let table = String::from_utf8_lossy(&table);
    let ours = format!(" - {FS_TYPE} ");
    let lines = table.lines().filter(|line| line.contains(&ours));
    lines.map(|line| without_root(line) + "\n").collect()
}

/// A line of the table of mounts. The fourth field of a bind mount is a directory of its volume.
fn without_root(line: &str) -> String {
    let mut fields: Vec<_> = line.split(' ').collect();
    if let Some(root) = fields.get_mut(3).filter(|root| **root != "/") {
        *root = REMOVED;
    }
    fields.join(" ")
}

/// Paths of the set-up, which may stay in texts.
fn paths(daemons: &[Daemon]) -> Vec<String> {
    let of_daemon = |daemon: &Daemon| {
        let names = [daemon.found.volume.clone(), daemon.found.at.clone()].into_iter();
        let held = daemon.holds.iter().map(|(path, _)| path.display().to_string());
        names.chain(held).collect::<Vec<_>>()
    };
    daemons.iter().flat_map(of_daemon).collect()
}

struct Archive {
    tar: Builder<GzEncoder<File>>,
    /// Seconds since 1970.
    now: u64,
}

impl Archive {
    fn new(file: File) -> Self {
        let now = Env::real().clock.wall().as_secs();
        Self { tar: Builder::new(GzEncoder::new(file, Compression::default())), now }
    }

    fn json(&mut self, name: &str, value: &Value) -> io::Result<()> {
        self.add(name, format!("{value:#}\n").as_bytes())
    }

    fn add(&mut self, name: &str, contents: &[u8]) -> io::Result<()> {
        let mut header = Header::new_gnu();
        header.set_size(contents.len() as u64);
        header.set_mode(MODE);
        header.set_mtime(self.now);
        self.tar.append_data(&mut header, format!("{ROOT}/{name}"), contents)
    }

    fn end(self) -> io::Result<()> {
        let mut file = self.tar.into_inner()?.finish()?;
        file.flush()?;
        file.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_of_a_bind_mount_has_no_name() {
        let line = |root: &str| format!("42 27 0:39 {root} /srv/w rw - fuse.ferry /a.ferry rw");
        assert_eq!(without_root(&line("/wedding")), line(REMOVED));
        assert_eq!(without_root(&line("/")), line("/"));
    }
}
