//! Runs programs that users run, which send one request after the other: a shell makes small files,
//! tar unpacks a tree, any other command makes its files, and rm removes them.

use crate::error::BenchError;
use crate::run::{Bench, Case, Metric, Sample, Variant};
use crate::target::Target;
use crate::threads::now;
use std::path::Path;
use std::process::Command;

const METRICS: [Metric; 4] = [
    Metric { name: "untar_s", label: "tar -xf s", more_is_better: false },
    Metric { name: "sync_s", label: "synced after s", more_is_better: false },
    Metric { name: "rm_s", label: "rm -r s", more_is_better: false },
    Metric { name: "entries", label: "entries", more_is_better: true },
];

const PROGRAM_METRICS: [Metric; 4] = [
    Metric { name: "program_s", label: "program s", more_is_better: false },
    METRICS[1],
    METRICS[2],
    METRICS[3],
];

const SHELL_METRICS: [Metric; 3] = [
    Metric { name: "create_s", label: "create s", more_is_better: false },
    Metric { name: "sync_s", label: "synced after s", more_is_better: false },
    Metric { name: "rm_s", label: "rm -r s", more_is_better: false },
];
/// What the shell runs.
const SCRIPT: &str = "for ((i = 1; i <= $2; i++)); do echo foobarbaz >\"$1/$i\" || exit; done";

/// One shell makes `files` small files in one directory, and rm removes them, on each of the
/// targets in turn.
pub fn by_shell(files: u32, targets: &[Target]) -> Bench<'_> {
    let make = move |top: &Path| {
        let mut shell = Command::new("bash");
        shell.args(["-c", SCRIPT, "bash"]).arg(top).arg(files.to_string());
        shell
    };
    let variants = targets.iter().map(|target| {
        Variant::new(target.name(), move |_| {
            let Turn { made, synced, removed, entries } = turn(target, make)?;
            if entries != u64::from(files) {
                return Err(BenchError::Option(format!("{entries} files are there of {files}")));
            }
            Ok(Sample::from([("create_s", made), ("sync_s", synced), ("rm_s", removed)]))
        })
    });
    Bench {
        workload: "create",
        about: "A shell makes files, as `echo foobarbaz >FILE`; what is missing until they are durable; rm removes them.".into(),
        metrics: SHELL_METRICS.into(),
        options: vec![("files", files.to_string())],
        cases: vec![Case::new(format!("create {files} files by a shell"), variants.collect())],
    }
}

/// A shell runs `command` in a new directory, and rm removes what it has left there, on each of the
/// targets in turn.
pub fn by_command<'a>(command: &str, targets: &'a [Target]) -> Bench<'a> {
    let run = command.to_owned();
    let variants = turns(targets, "program_s", move |top| {
        let mut shell = Command::new("bash");
        shell.args(["-c", &run]).current_dir(top);
        shell
    });
    Bench {
        workload: "program",
        about:
            "A program runs in a new directory; what is missing until it is durable; rm removes it."
                .into(),
        metrics: PROGRAM_METRICS.into(),
        options: vec![("command", command.to_owned())],
        cases: vec![Case::new("program", variants)],
    }
}

/// Unpacks `tar`, which is better not compressed, on each of the targets in turn.
pub fn untar<'a>(tar: &Path, targets: &'a [Target]) -> Bench<'a> {
    let file = tar.to_owned();
    let variants = turns(targets, "untar_s", move |top| {
        let mut unpack = Command::new("tar");
        unpack.arg("-xf").arg(&file).arg("-C").arg(top);
        unpack
    });
    Bench {
        workload: "untar",
        about: "tar unpacks a tree; what is missing until it is durable; rm removes it.".into(),
        metrics: METRICS.into(),
        options: vec![("tar", tar.display().to_string())],
        cases: vec![Case::new("untar", variants)],
    }
}

/// Runs a turn on each of the targets; `metric` is the time of the program that `make` returns.
fn turns<'a>(
    targets: &'a [Target],
    metric: &'static str,
    make: impl Fn(&Path) -> Command + Clone + 'a,
) -> Vec<Variant<'a>> {
    let variants = targets.iter().map(|target| {
        let make = make.clone();
        Variant::new(target.name(), move |_| {
            let Turn { made, synced, removed, entries } = turn(target, &make)?;
            let entries = ("entries", entries as f64);
            Ok(Sample::from([(metric, made), ("sync_s", synced), ("rm_s", removed), entries]))
        })
    });
    variants.collect()
}

/// Seconds, and the number of entries.
struct Turn {
    made: f64,
    synced: f64,
    removed: f64,
    entries: u64,
}

/// Runs a program in a new directory, then rm, which removes the directory.
fn turn(target: &Target, make: impl Fn(&Path) -> Command) -> Result<Turn, BenchError> {
    let Some(root) = target.path() else {
        return Err(BenchError::Option("programs work on mounted file systems only".into()));
    };
    let top = root.join("turn");
    std::fs::create_dir(&top).map_err(BenchError::path(&top, "cannot make a directory"))?;
    target.sync()?;
    let begun = now();
    ended(&mut make(&top))?;
    let made = now();
    target.sync()?;
    let synced = now();
    let entries = entries_below(&top).map_err(BenchError::path(&top, "cannot list"))?;
    let removing = now();
    ended(Command::new("rm").arg("-r").arg(&top))?;
    let removed = now();
    target.sync()?;
    Ok(Turn {
        made: (made - begun).as_secs_f64(),
        synced: (synced - made).as_secs_f64(),
        removed: (removed - removing).as_secs_f64(),
        entries,
    })
}

/// Runs a program that must succeed.
fn ended(command: &mut Command) -> Result<(), BenchError> {
    let program = command.get_program().to_owned();
    let failed = BenchError::path(Path::new(&program), "cannot run");
    let status = command.status().map_err(failed)?;
    if status.success() {
        return Ok(());
    }
    Err(BenchError::path(Path::new(&program), "has failed")(std::io::Error::other(
        status.to_string(),
    )))
}

fn entries_below(dir: &Path) -> std::io::Result<u64> {
    let mut count = 0;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        count += 1;
        if entry.file_type()?.is_dir() {
            count += entries_below(&entry.path())?;
        }
    }
    Ok(count)
}
