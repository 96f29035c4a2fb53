//! Many fsyncs that wait for a device that stalls, and what else goes on meanwhile: `pending DIR
//! FILES SECONDS BEGIN END [PID]`.
//!
//! Makes FILES files of 4 KiB in DIR, runs the shell command BEGIN (the device stalls), calls fsync
//! for each file on a thread of its own, makes, looks up and reads other files for SECONDS, and
//! runs END (the stall ends, or the device is gone). Prints one line of JSON; PID is the daemon
//! whose memory is told.

#![expect(
    clippy::disallowed_methods,
    reason = "it measures a mount in real time, and json! unwraps"
)]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{Builder, sleep};
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// Enough for a call of fsync.
const STACK: usize = 64 << 10;
const PAUSE: Duration = Duration::from_millis(5);
/// For all threads to have called fsync.
const BOARDING_MAX: Duration = Duration::from_secs(60);

fn main() -> Outcome {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [dir, files, seconds, begin, end, pid @ ..] = &arguments[..] else {
        return Err("usage: pending DIR FILES SECONDS BEGIN END [PID]".into());
    };
    let (dir, time) = (Path::new(dir), Duration::from_secs_f64(seconds.parse()?));
    let memory = || pid.first().map(|pid| memory_kib(pid)).transpose();
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?;
    let count: usize = files.parse()?;
    let files = make(dir, count)?;
    let memory_before = memory()?;

    shell(begin)?;
    let (called, answered) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| -> Outcome {
        let fsync = |file: File| {
            called.fetch_add(1, Ordering::Relaxed);
            let answer = file.sync_all();
            answered.fetch_add(1, Ordering::Relaxed);
            (answer.err().and_then(|e| e.raw_os_error()).unwrap_or(0), Instant::now())
        };
        let begun = Instant::now();
        let mut threads = Vec::with_capacity(files.len());
        for file in files {
            threads
                .push(Builder::new().stack_size(STACK).spawn_scoped(scope, move || fsync(file))?);
        }
        while called.load(Ordering::Relaxed) < threads.len() && begun.elapsed() < BOARDING_MAX {
            sleep(PAUSE);
        }
        let boarded = begun.elapsed();
        let others = others(dir, count, time)?;
        let (early, memory_stalled) = (answered.load(Ordering::Relaxed), memory()?);
        let ended = Instant::now();
        shell(end)?;
        let mut answers = BTreeMap::<i32, usize>::new();
        let mut last = ended;
        for thread in threads {
            let (errno, at) = thread.join().map_err(|_| "a thread panicked")?;
            *answers.entry(errno).or_default() += 1;
            last = last.max(at);
        }
        let said = json!({
            "pending": called.load(Ordering::Relaxed) - early,
            "answered_early": early,
            "boarding_ms": boarded.as_millis() as u64,
            "others": others,
            "answers_by_errno": answers.iter().map(|(errno, n)| (errno.to_string(), *n)).collect::<BTreeMap<_, _>>(),
            "last_answer_ms_after_the_end": (last - ended).as_millis() as u64,
            "memory_kib": { "before": memory_before, "stalled": memory_stalled },
        });
        println!("{said}");
        Ok(())
    })
}

fn make(dir: &Path, count: usize) -> Outcome<Vec<File>> {
    (0..count)
        .map(|n| {
            let mut file = File::create(dir.join(format!("pending {n}")))?;
            file.write_all(&[n as u8; 4096])?;
            Ok(file)
        })
        .collect()
}

fn shell(command: &str) -> Outcome {
    let status = Command::new("sh").args(["-c", command]).status()?;
    if status.success() { Ok(()) } else { Err(format!("{command}: {status}").into()) }
}

/// What a process has in memory.
fn memory_kib(pid: &str) -> Outcome<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}

/// Makes, looks up and reads for so long; how often, and the longest and the middle time of each,
/// in microseconds.
fn others(dir: &Path, files: usize, time: Duration) -> Outcome<serde_json::Value> {
    let (mut creates, mut lookups, mut reads) = (Vec::new(), Vec::new(), Vec::new());
    let begun = Instant::now();
    let mut n = 0;
    while begun.elapsed() < time {
        let made = dir.join(format!("meanwhile {n}"));
        creates.push(took(|| fs::write(&made, b"made while the device stalls"))?);
        lookups.push(took(|| {
            let absent = fs::metadata(dir.join(format!("absent {n}")));
            if absent.is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound) {
                Ok(())
            } else {
                Err(wrong())
            }
        })?);
        reads.push(took(|| {
            let mut contents = Vec::new();
            File::open(dir.join(format!("pending {}", n % files)))?.read_to_end(&mut contents)?;
            if contents == [(n % files) as u8; 4096] { Ok(()) } else { Err(wrong()) }
        })?);
        n += 1;
        sleep(PAUSE);
    }
    Ok(
        json!({ "rounds": n, "create_us": summary(creates), "lookup_us": summary(lookups), "read_us": summary(reads) }),
    )
}

fn wrong() -> std::io::Error {
    std::io::Error::other("not the right answer")
}

fn took(what: impl FnOnce() -> std::io::Result<()>) -> Outcome<u64> {
    let begun = Instant::now();
    what()?;
    Ok(begun.elapsed().as_micros() as u64)
}

fn summary(mut times: Vec<u64>) -> serde_json::Value {
    times.sort_unstable();
    json!({ "median": times.get(times.len() / 2), "max": times.last() })
}
