//! `ack run DIR LOG [--seconds N] [--threads N] [--seed S] [--sync-replacements 0|1]` works below
//! DIR until the time is up or the mount dies; `ack verify DIR LOG` says whether all that was
//! acknowledged is there (status 1 if not).

use clap::{Args, Parser};
use ferry_env::Env;
use ferry_sim::ack::{Worker, verify};
use ferry_sim::device::SimRng;
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

#[derive(Parser)]
#[command(name = "ack")]
enum Command {
    /// Work below DIR
    Run {
        dir: PathBuf,
        log: PathBuf,
        #[command(flatten)]
        options: Options,
    },
    /// Whether all that was acknowledged is there
    Verify { dir: PathBuf, log: PathBuf },
}

#[derive(Args)]
struct Options {
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    #[arg(long, default_value_t = 4)]
    threads: u64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Not 0: `Worker::syncs_replacements`
    #[arg(long, default_value_t = 0)]
    sync_replacements: u64,
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
    let result = match Command::parse() {
        Command::Run { dir, log, options } => {
            run(&dir, &log, &options).map_err(|error| vec![error.to_string()])
        }
        Command::Verify { dir, log } => std::fs::read_to_string(&log)
            .map_err(|error| vec![format!("{}: {error}", log.display())])
            .and_then(|text| verify(&dir, &text))
            .map(|files| println!("{files} files are as acknowledged")),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(wrong) => {
            wrong.iter().for_each(|line| eprintln!("{line}"));
            ExitCode::FAILURE
        }
    }
}
