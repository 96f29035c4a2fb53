//! `ack run DIR LOG [--seconds N] [--threads N] [--seed S] [--sync-replacements 0|1]` works below DIR until the time is up or
//! the mount dies; `ack verify DIR LOG` says whether all that was acknowledged is there (status 1
//! if not).

use ferry_env::Env;
use ferry_sim::ack::{Worker, verify};
use ferry_sim::device::SimRng;
use std::fs::OpenOptions;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

const USAGE: &str = "usage: ack run DIR LOG [--seconds N] [--threads N] [--seed S] [--sync-replacements 0|1]\n       ack verify DIR LOG";

struct Options {
    seconds: u64,
    threads: u64,
    seed: u64,
    /// Not 0: `Worker::syncs_replacements`.
    sync_replacements: u64,
}

fn parse(words: &[String]) -> Option<Options> {
    let mut options = Options { seconds: 60, threads: 4, seed: 1, sync_replacements: 0 };
    for pair in words.chunks(2) {
        let [name, value] = pair else { return None };
        let value = value.parse().ok()?;
        match &**name {
            "--seconds" => options.seconds = value,
            "--threads" => options.threads = value,
            "--seed" => options.seed = value,
            "--sync-replacements" => options.sync_replacements = value,
            _ => return None,
        }
    }
    Some(options)
}

fn run(dir: &Path, log: &Path, options: &Options) -> std::io::Result<()> {
    let log = OpenOptions::new().append(true).create_new(true).open(log)?;
    let env = Env::real();
    let end = env.clock.monotonic() + Duration::from_secs(options.seconds);
    let stop = || env.clock.monotonic() >= end;
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..options.threads)
            .map(|number| {
                let rng = SimRng::new(options.seed << 16 | number);
                let worker = Worker {
                    root: dir,
                    log: &log,
                    number,
                    rng,
                    syncs_replacements: options.sync_replacements > 0,
                };
                scope.spawn(|| worker.work(&stop))
            })
            .collect();
        for (number, worker) in workers.into_iter().enumerate() {
            let (acknowledged, result) = worker.join().expect("a worker does not panic");
            let end = result
                .map_or_else(|error| format!("then {error}"), |()| "until the time was up".into());
            println!("thread {number}: {acknowledged} changes acknowledged, {end}");
        }
    });
    Ok(())
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (command, dir, log, rest) = match &words[..] {
        [command, dir, log, rest @ ..] => (&**command, Path::new(dir), Path::new(log), rest),
        _ => ("", Path::new(""), Path::new(""), &[][..]),
    };
    let result = match (command, parse(rest)) {
        ("run", Some(options)) => run(dir, log, &options).map_err(|error| vec![error.to_string()]),
        ("verify", Some(_)) => std::fs::read_to_string(log)
            .map_err(|error| vec![format!("{}: {error}", log.display())])
            .and_then(|text| verify(dir, &text))
            .map(|files| println!("{files} files are as acknowledged")),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(wrong) => {
            wrong.iter().for_each(|line| eprintln!("{line}"));
            ExitCode::FAILURE
        }
    }
}
