//! `ferry space`: which directories take the space of a volume. The process that has it adds that
//! up (`spaced`), and is asked over its socket: no request passes through the mount.

use std::os::unix::fs::MetadataExt;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use ferry_fs::Ino;
use serde_json::Value;

use crate::cli::SpaceArgs;
use crate::control::{explain, print};
use crate::error::CliError;
use crate::list::{Found, Kind};
use crate::location::Location;
use crate::mounts::{self, Mount};
use crate::size::format_bytes;
use crate::socket::printable;
use crate::spaced::{self, LOOK, REFUSED, STOP};
use crate::waiting::{progress_bar, stop_on_signals, wait};
use crate::{asked, served, socket, table};

/// How often the daemon is asked how far it is.
const INTERVAL: Duration = Duration::from_millis(200);
/// The form of the progress bar.
const BAR: &str = "{bar:40} {pos}/{len} files and directories  {eta} left";
/// Behind a sum of directories that are not listed.
const OTHERS: &str = "(others)";

/// The process that has a volume.
pub enum Daemon {
    Mount(Mount),
    /// A server, by the name of its socket.
    Server(String),
}

impl Daemon {
    /// That of a mount or server. `None`: it has no volume of this machine, or has ended.
    pub fn of(found: &Found) -> Option<Self> {
        match found.kind {
            Kind::Server => served::sockets_of(found.pid?).pop().map(Self::Server),
            Kind::Mount => {
                let is = |mount: &Mount| {
                    let at = mount.target.display().to_string();
                    mount.is_ferry()
                        && !mount.is_remote()
                        && at == found.at
                        && mount.source.display().to_string() == found.volume
                };
                mounts::list().ok()?.into_iter().rfind(is).map(Self::Mount)
            }
        }
    }

    fn ask(&self, question: &str) -> Result<Value, CliError> {
        let answer = match self {
            Self::Mount(mount) => asked::must_ask(mount, question, Duration::ZERO, "")?,
            Self::Server(name) => socket::ask(name, question).map_err(|error| {
                CliError::Failed(format!("the server of the volume does not answer: {error}"))
            })?,
        };
        match answer[REFUSED].as_str() {
            Some(why) => Err(CliError::Failed(printable(why))),
            None => Ok(answer),
        }
    }
}

/// Has the space below a directory added up, or that of all the volume. `told` is given how many
/// files and directories were counted, and of how many. `None`: it was stopped.
pub fn count(
    daemon: &Daemon,
    depth: usize,
    dir: Option<Ino>,
    stop: &AtomicBool,
    told: impl Fn(u64, u64),
) -> Result<Option<Value>, CliError> {
    let walk = daemon.ask(&spaced::question(depth, dir))?["walk"].as_u64().unwrap_or_default();
    loop {
        let answer = daemon.ask(&format!("{LOOK}{walk}"))?;
        if answer["tree"].is_object() {
            return Ok(Some(answer));
        }
        let number = |key: &str| answer[key].as_u64().unwrap_or_default();
        told(number("counted"), number("of"));
        if !wait(INTERVAL, stop) {
            daemon.ask(&format!("{STOP}{walk}"))?;
            return Ok(None);
        }
    }
}

/// Runs the command.
pub fn run(args: &SpaceArgs) -> Result<(), CliError> {
    let target = &args.looked.meant()?;
    let (daemon, dir) = meant(target)?;
    let stop = stop_on_signals()?;
    let bar = progress_bar(BAR);
    let told = |counted, of| {
        bar.set_length(of);
        bar.set_position(counted);
    };
    let counted = count(&daemon, args.depth.into(), dir, &stop, told);
    bar.finish_and_clear();
    let named = |error: CliError| match error {
        CliError::Failed(why) => CliError::Failed(format!("{target}: {why}")),
        other => other,
    };
    let Some(answer) = counted.map_err(named)? else {
        return Err(CliError::Failed(format!("{target}: stopped")));
    };
    print(&if args.json { format!("{answer:#}\n") } else { for_people(&answer) })
}

/// The process that has the volume, and the directory in it; `None`: all of it.
fn meant(target: &Location) -> Result<(Daemon, Option<Ino>), CliError> {
    if let Some(socket) = served::at(target)? {
        return Ok((Daemon::Server(socket), None));
    }
    let mount = mounts::meant(target)?;
    mounts::must_be_reached(&mount)?;
    let daemon = of_volume(target, mount)?;
    let Some(path) = target.path() else { return Ok((daemon, None)) };
    asked::must_answer(path)?;
    let attributes = std::fs::metadata(path).map_err(|e| explain(path, "cannot open", e))?;
    Ok((daemon, attributes.is_dir().then(|| attributes.ino())))
}

/// A mount that has a volume.
fn of_volume(target: &Location, mount: Mount) -> Result<Daemon, CliError> {
    if mount.is_remote() {
        return Err(CliError::Failed(format!(
            "{target}: mounted from {}: `ferry space` is for the machine that has the volume",
            mount.source.display()
        )));
    }
    Ok(Daemon::Mount(mount))
}

/// A line for each directory, the largest first, each under the one that it is in.
fn for_people(answer: &Value) -> String {
    let tree = &answer["tree"];
    let head = ["space", "share", "files", "directories", "path"].map(str::to_owned);
    let mut rows = vec![head, line(tree, tree, "/".into())];
    add_lines(tree, tree, "", &mut rows);
    let number = |key: &str| answer[key].as_u64().unwrap_or_default();
    let mut text = table::lines(&rows, "");
    let time = Duration::from_nanos(number("time_ns"));
    text.push_str(&format!("counted in {:.1} s\n", time.as_secs_f64()));
    match number("missed") {
        0 => {}
        missed => text.push_str(&format!("{missed} changed meanwhile, or could not be read\n")),
    }
    text
}

fn add_lines(tree: &Value, all: &Value, above: &str, rows: &mut Vec<[String; 5]>) {
    for one in tree["largest"].as_array().into_iter().flatten() {
        let name = printable(one["name"].as_str().unwrap_or_default());
        let path = format!("{above}/{name}");
        rows.push(line(one, all, path.clone()));
        add_lines(one, all, &path, rows);
    }
    let others = &tree["others"];
    if others["directories"].as_u64().is_some_and(|count| count > 0) {
        rows.push(line(others, all, format!("{above}/{OTHERS}")));
    }
}

fn line(of: &Value, all: &Value, path: String) -> [String; 5] {
    let number = |value: &Value, key: &str| value[key].as_u64().unwrap_or_default();
    let bytes = number(of, "bytes");
    let share = bytes as f64 * 100.0 / number(all, "bytes").max(1) as f64;
    [
        format_bytes(bytes),
        format!("{share:.1} %"),
        number(of, "files").to_string(),
        number(of, "directories").to_string(),
        path,
    ]
}
