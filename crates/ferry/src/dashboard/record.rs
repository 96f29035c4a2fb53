//! What the page shows: how each mount and server is, and samples of the last hour.

use std::collections::VecDeque;
use std::time::Duration;

use serde_json::Value;

use crate::list::{self, Found, Kind, State};
use crate::socket::object;
use crate::space::Daemon;

/// How often the mounts and servers are asked.
pub const INTERVAL: Duration = Duration::from_secs(5);
/// The most samples of a mount or server: those of an hour.
const SAMPLES_MAX: usize = 720;
/// The most mounts and servers, the worst first.
const SOURCES_MAX: usize = 100;

/// A figure whose course is recorded: its name for the page, and the figures of `ferry stats` of
/// which it is the sum.
type Column = (&'static str, &'static [&'static str]);

/// How often an operation was carried out is at this path.
macro_rules! count {
    ($($operation:literal),*) => { &[$(concat!("/fuse/operations/", $operation, "/count")),*] };
}

#[rustfmt::skip]
const COLUMNS: [Column; 23] = [
    ("requests", &["/fuse/requests"]),
    ("reads", count!("read")),
    ("writes", count!("write")),
    ("syncs", count!("fsync", "fsyncdir")),
    ("names", count!("create", "mkdir", "mknod", "symlink", "link", "unlink", "rmdir", "rename", "rename2", "tmpfile")),
    ("parked", &["/fuse/parked"]),
    ("transactions", &["/log/transactions"]),
    ("forces", &["/log/forces"]),
    ("flushes", &["/log/flushes"]),
    ("commits", &["/log/times/flush/count"]),
    ("commit_ns", &["/log/times/queue/total_ns", "/log/times/write/total_ns", "/log/times/flush/total_ns"]),
    ("flush_ns", &["/flush/avg_flush_ns"]),
    ("log_free", &["/log/free_bytes"]),
    ("log_waiters", &["/log/waiters"]),
    ("log_bytes", &["/log/written_bytes"]),
    ("read_bytes", &["/data/read_bytes"]),
    ("written_bytes", &["/data/written_bytes"]),
    ("cache", &["/data/cache_bytes"]),
    ("dirty", &["/data/dirty_bytes"]),
    ("used", &["/space/used"]),
    ("put_bytes", &["/store/put_bytes"]),
    ("get_bytes", &["/store/get_bytes"]),
    ("unanswered", &["/connection/unanswered_changes"]),
];

/// The figures at a time. `None`: it has no such figure, or did not answer.
struct Sample {
    tick: u64,
    time: Duration,
    values: [Option<u64>; COLUMNS.len()],
}

impl Sample {
    fn of(tick: u64, time: Duration, figures: Option<&Value>) -> Self {
        let at = |pointer: &&str| figures?.pointer(pointer)?.as_u64();
        let values = COLUMNS.map(|(_, pointers)| pointers.iter().filter_map(at).reduce(sum));
        Self { tick, time, values }
    }

    /// The time in milliseconds, and the values.
    fn json(&self) -> Value {
        std::iter::once(millis(self.time).into()).chain(self.values.map(Value::from)).collect()
    }
}

fn sum(a: u64, b: u64) -> u64 {
    a.saturating_add(b)
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// A mount or a server.
struct Source {
    /// Its number for the page.
    number: u64,
    found: Found,
    samples: VecDeque<Sample>,
}

impl Source {
    /// Whether this was found again. A server that does not answer does not say what it serves, so
    /// it is known by its process.
    fn is(&self, found: &Found) -> bool {
        let known = &self.found;
        known.kind == found.kind
            && match found.kind {
                Kind::Server if found.pid.is_some() => known.pid == found.pid,
                _ => (&known.volume, &known.at) == (&found.volume, &found.at),
            }
    }

    /// How it is, and the samples after `since`.
    fn json(&self, since: u64) -> Value {
        let new = self.samples.iter().filter(|sample| sample.tick > since);
        let mut all = list::json(&self.found);
        all["number"] = self.number.into();
        all["level"] = level(&self.found.state).name().into();
        all["figures"] = self.found.figures.clone().into();
        all["clients"] = self.found.clients.clone().into();
        all["samples"] = new.map(Sample::json).collect();
        all
    }
}

/// How bad a state is; what is worst comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    Bad,
    Note,
    Ok,
}

impl Level {
    fn name(self) -> &'static str {
        match self {
            Self::Bad => "bad",
            Self::Note => "note",
            Self::Ok => "ok",
        }
    }
}

fn level(state: &State) -> Level {
    match state {
        State::Dead
        | State::Silent
        | State::ServerAway
        | State::Refused(_)
        | State::Failed(_)
        | State::StoreHeld(_)
        | State::Components(_) => Level::Bad,
        State::Hidden(_) | State::Closed | State::StandsBy(None) => Level::Note,
        State::ReadOnly | State::Fine | State::Clients(..) | State::StandsBy(Some(_)) => Level::Ok,
    }
}

/// What was found the last time, with the last hour.
pub struct Record {
    /// Differs between processes, so that a page does not mix two of them.
    run: u64,
    /// How often the mounts and servers have been asked.
    tick: u64,
    time: Duration,
    /// The number of the next source that is new.
    next: u64,
    /// Whether the page offers maps of space.
    with_maps: bool,
    sources: Vec<Source>,
    /// Mounts and servers beyond the limit.
    left_out: usize,
}

impl Record {
    pub fn new(run: u64, with_maps: bool) -> Self {
        let (time, sources) = (Duration::ZERO, Vec::new());
        Self { run, tick: 0, time, next: 0, with_maps, sources, left_out: 0 }
    }

    /// Adds what was found at a time. What was not found again is dropped.
    pub fn add(&mut self, time: Duration, mut found: Vec<Found>) {
        self.tick += 1;
        self.time = time;
        found.sort_by_key(|one| level(&one.state));
        self.left_out = found.len().saturating_sub(SOURCES_MAX);
        found.truncate(SOURCES_MAX);
        let mut before = std::mem::take(&mut self.sources);
        for mut found in found {
            let known = before.iter().position(|source| source.is(&found));
            let known = known.map(|at| before.swap_remove(at));
            if let Some(Source { found: known, .. }) = &known
                && found.state == State::Silent
            {
                (found.volume, found.at) = (known.volume.clone(), known.at.clone());
            }
            self.next += u64::from(known.is_none());
            let new = (self.next, VecDeque::new());
            let (number, mut samples) = known.map_or(new, |known| (known.number, known.samples));
            if samples.len() == SAMPLES_MAX {
                samples.pop_front();
            }
            samples.push_back(Sample::of(self.tick, time, found.figures.as_ref()));
            self.sources.push(Source { number, found, samples });
        }
    }

    /// The process that has the volume of a source. `None`: there is none on this machine.
    pub fn daemon(&self, number: u64) -> Option<Daemon> {
        let source = self.sources.iter().find(|source| source.number == number)?;
        Daemon::of(&source.found)
    }

    /// The state, and the samples after the tick `since`, for a page that has those before.
    pub fn json(&self, now: Duration, since: u64) -> String {
        let columns: Value = COLUMNS.iter().map(|(name, _)| Value::from(*name)).collect();
        object([
            ("run", format!("{:016x}", self.run).into()),
            ("tick", self.tick.into()),
            ("now_ms", millis(now).into()),
            ("age_ms", millis(now.saturating_sub(self.time)).into()),
            ("interval_ms", millis(INTERVAL).into()),
            ("version", env!("CARGO_PKG_VERSION").into()),
            ("host", rustix::system::uname().nodename().to_string_lossy().into()),
            ("left_out", self.left_out.into()),
            ("maps", self.with_maps.into()),
            ("columns", columns),
            ("sources", self.sources.iter().map(|source| source.json(since)).collect()),
        ])
        .to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(at: &str, state: State, reads: u64) -> Found {
        let operations = object([("read", object([("count", reads.into())]))]);
        let figures = object([("fuse", object([("operations", operations)]))]);
        let (volume, at) = ("/srv/a.ferry".into(), at.into());
        let figures = Some(figures);
        Found { kind: Kind::Mount, volume, at, pid: None, state, figures, clients: Vec::new() }
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn read(record: &Record, now: u64, since: u64) -> Value {
        serde_json::from_str(&record.json(at(now), since)).expect("JSON")
    }

    #[test]
    fn a_page_gets_the_samples_that_it_lacks() {
        let mut record = Record::new(1, true);
        for second in 1..=3 {
            record.add(at(second * 5), vec![found("/mnt", State::Fine, 100 * second)]);
        }
        let all = read(&record, 16, 0);
        assert_eq!((&all["tick"], &all["age_ms"]), (&3.into(), &1000.into()));
        let reads = all["columns"].as_array().expect("names").iter().position(|it| it == "reads");
        let reads = 1 + reads.expect("it is recorded");
        let samples = |from: &Value| -> Vec<(u64, u64)> {
            let samples = from["sources"][0]["samples"].as_array().expect("samples").iter();
            let number = |it: &Value| it.as_u64().expect("a number");
            samples.map(|it| (number(&it[0]), number(&it[reads]))).collect()
        };
        assert_eq!(samples(&all), [(5000, 100), (10_000, 200), (15_000, 300)]);
        assert_eq!(samples(&read(&record, 16, 2)), [(15_000, 300)]);
        assert_eq!(samples(&read(&record, 16, 3)), []);
        assert_eq!(all["sources"][0]["samples"][0][1], Value::Null, "it has no such figure");
    }

    #[test]
    fn a_server_that_stops_to_answer_is_still_known() {
        let server = |at: &str, state: State| Found {
            kind: Kind::Server,
            pid: Some(7),
            ..found(at, state, 1)
        };
        let mut record = Record::new(1, true);
        record.add(at(0), vec![server("127.0.0.1:1", State::Clients(0, 0))]);
        record.add(at(5), vec![server("-", State::Silent)]);
        let all = read(&record, 5, 0);
        assert_eq!(all["sources"][0]["at"], "127.0.0.1:1");
        assert_eq!(all["sources"][0]["samples"].as_array().map(Vec::len), Some(2));
    }

    #[test]
    fn the_record_is_bounded() {
        let mut record = Record::new(1, true);
        let mounts = |count: usize| (0..count).map(|n| found(&format!("/{n}"), State::Fine, 1));
        for tick in 0..SAMPLES_MAX as u64 + 10 {
            record.add(at(tick), mounts(1).collect());
        }
        let all = read(&record, 0, 0);
        let samples = all["sources"][0]["samples"].as_array().map(Vec::len);
        assert_eq!(samples, Some(SAMPLES_MAX));
        let worst = found("/z", State::Dead, 1);
        record.add(at(0), mounts(SOURCES_MAX + 2).chain([worst]).collect());
        let all = read(&record, 0, 0);
        assert_eq!(all["left_out"], 3);
        assert_eq!(all["sources"].as_array().map(Vec::len), Some(SOURCES_MAX));
        assert_eq!(
            (&all["sources"][0]["at"], &all["sources"][0]["level"]),
            (&"/z".into(), &"bad".into())
        );
        record.add(at(0), Vec::new());
        assert_eq!(read(&record, 0, 0)["sources"], Value::Array(Vec::new()));
    }
}
