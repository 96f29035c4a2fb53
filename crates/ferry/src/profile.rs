//! `ferry profile`: where a daemon's time goes, by operation and layer. The daemon samples what its
//! threads do, and what waits without a thread, while somebody asks (`profiled`). This side counts
//! that together: as a table, as folded stacks, or as a flame graph (`flame`).

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use crate::cli::ProfileArgs;
use crate::control::print;
use crate::error::CliError;
use crate::flame::{self, Frame};
use crate::location::Location;
use crate::mounts;
use crate::profiled::PROFILE;
use crate::size::format_nanos;
use crate::socket::{self, printable};
use crate::{asked, served};

/// What daemons do that no request waits for.
const BACKGROUND: &str = "background";

/// Takes a profile and shows it.
pub fn run(args: &ProfileArgs) -> Result<(), CliError> {
    let target = &args.looked.meant()?;
    let answer = ask(target, args.seconds)?;
    let profile = Profile::of(&answer);
    let write = |path: &Path, text: &str| {
        std::fs::write(path, text).map_err(CliError::path(path, "cannot write"))
    };
    if let Some(path) = &args.folded {
        write(path, &profile.folded())?;
    }
    if let Some(path) = &args.svg {
        let title = format!("{target}: {} s", args.seconds);
        write(path, &flame::draw(&title, profile.samples, &profile.all()))?;
    }
    match args.json {
        true => print(&format!("{answer:#}\n")),
        false => print(&profile.table()),
    }
}

fn ask(target: &Location, seconds: u64) -> Result<Value, CliError> {
    let (question, time) = (format!("{PROFILE}{seconds}"), Duration::from_secs(seconds));
    if let Some(server) = served::at(target)? {
        let failed =
            |error| CliError::Failed(format!("{target}: no profile of its server: {error}"));
        return socket::ask_for(&server, &question, time).map_err(failed);
    }
    let mount = mounts::meant(target)?;
    let why = ", has served the mount all the time, and does not take several profiles already";
    asked::must_ask(&mount, &question, time, why)
}

/// A profile, as it is shown.
struct Profile {
    time: Duration,
    samples: u64,
    /// Threads that waited for work, added up over all samples.
    idle: u64,
    /// What programs or clients have asked for, and all else.
    requests: Frame,
    background: Frame,
    /// How many requests of each kind there were.
    made: BTreeMap<String, u64>,
}

impl Profile {
    fn of(answer: &Value) -> Self {
        let number = |name: &str| answer[name].as_u64().unwrap_or_default();
        let (mut requests, mut background) = (Frame::default(), Frame::default());
        for one in answer["stacks"].as_array().into_iter().flatten() {
            let layers = one["layers"].as_array().into_iter().flatten();
            let names = std::iter::once(&one["operation"]).chain(layers);
            let names: Vec<_> = names.filter_map(Value::as_str).map(printable).collect();
            let group = if one["background"] == true { &mut background } else { &mut requests };
            group.add(&names, one["count"].as_u64().unwrap_or_default());
        }
        let made = answer["requests"].as_object().into_iter().flatten();
        Self {
            time: Duration::from_nanos(number("time_ns")),
            samples: number("samples"),
            idle: number("idle"),
            requests,
            background,
            made: made.filter_map(|(name, made)| Some((name.clone(), made.as_u64()?))).collect(),
        }
    }

    /// The requests, and what is done in the background as one frame beside them.
    fn all(&self) -> Frame {
        let mut all = Frame::default();
        let mut add = |before: &[String], frame: &Frame| {
            each_stack(frame, &mut before.to_vec(), &mut |names, own| all.add(names, own));
        };
        add(&[], &self.requests);
        add(&[BACKGROUND.into()], &self.background);
        all
    }

    /// A line for each stack: its names, outermost first, and how often it was seen. Tools that
    /// draw flame graphs read that.
    fn folded(&self) -> String {
        let mut lines = String::new();
        each_stack(&self.all(), &mut Vec::new(), &mut |names, own| {
            let _ = writeln!(lines, "{} {own}", names.join(";"));
        });
        lines
    }

    fn table(&self) -> String {
        let samples = self.samples.max(1) as f64;
        let at_a_time = |count: u64| count as f64 / samples;
        let mut out = format!(
            "{:.1} s, {} samples. At a time: {:.2} requests, {:.2} in the background; {:.1} threads wait for work\n",
            self.time.as_secs_f64(),
            self.samples,
            at_a_time(self.requests.count),
            at_a_time(self.background.count),
            at_a_time(self.idle),
        );
        let groups = [("requests", &self.requests), (BACKGROUND, &self.background)];
        let groups = groups.map(|(title, group)| {
            let mut rows = vec![Row::titles(title)];
            self.add_rows(group, (0, group.count), &mut rows);
            rows
        });
        let names = groups.iter().flatten().map(|row| row.name.chars().count());
        let width = names.max().unwrap_or_default();
        if self.requests.count == 0 {
            out.push_str("no program or client asked for anything meanwhile\n");
        }
        // A group in which nothing was seen has no table.
        for rows in groups.iter().filter(|rows| rows.len() > 1) {
            out.push('\n');
            for Row { name, cells: [share, time, rate, each] } in rows {
                let line = format!("{name:width$}  {share:>7}  {time:>8}  {rate:>10}  {each:>8}");
                let _ = writeln!(out, "{}", line.trim_end());
            }
        }
        out
    }

    /// Adds a row for each frame inside `frame`, which lies so deep in its group; the group was
    /// seen so often.
    fn add_rows(&self, frame: &Frame, (depth, group): (usize, u64), rows: &mut Vec<Row>) {
        let seconds = self.time.as_secs_f64().max(f64::MIN_POSITIVE);
        for (name, inside) in frame.ranked() {
            let share = inside.count as f64 / group.max(1) as f64;
            let at_a_time = inside.count as f64 / self.samples.max(1) as f64;
            let made = self.made.get(name).filter(|made| depth == 0 && **made > 0);
            let rate = made.map(|made| format!("{:.0}", *made as f64 / seconds));
            let each = made.map(|made| (at_a_time * seconds / *made as f64 * 1e9) as u64);
            rows.push(Row {
                name: format!("{}{name}", "  ".repeat(depth)),
                cells: [
                    format!("{:.1} %", share * 100.0),
                    format!("{:.1}", at_a_time * 1000.0),
                    rate.unwrap_or_default(),
                    each.map(format_nanos).unwrap_or_default(),
                ],
            });
            self.add_rows(inside, (depth + 1, group), rows);
        }
    }
}

/// A row of the table.
struct Row {
    name: String,
    /// Its share of its group, how many milliseconds of it there were in a second, and of an
    /// operation how many requests there were in a second and how long one took.
    cells: [String; 4],
}

impl Row {
    fn titles(group: &str) -> Self {
        let cells = ["share", "ms/s", "requests/s", "each"];
        Self { name: group.into(), cells: cells.map(String::from) }
    }
}

/// Calls `visit` with each stack below `frame` that was seen itself, behind the names `above`.
fn each_stack(frame: &Frame, above: &mut Vec<String>, visit: &mut impl FnMut(&[String], u64)) {
    for (name, inside) in &frame.inside {
        above.push(name.clone());
        let own = inside.own();
        if own > 0 {
            visit(above, own);
        }
        each_stack(inside, above, visit);
        above.pop();
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::disallowed_methods, reason = "tests may unwrap")]
    use super::*;
    use serde_json::json;

    fn profile() -> Profile {
        let stack = |operation: &str, layers: &[&str], background: bool, count: u64| {
            json!({
                "operation": operation, "layers": layers, "background": background, "count": count,
            })
        };
        Profile::of(&json!({
            "time_ns": 2_000_000_000_u64, "samples": 1000, "idle": 2500,
            "stacks": [
                stack("create", &["file system"], false, 300),
                stack("create", &["file system", "journal"], false, 100),
                stack("create", &[], false, 100),
                stack("fsync", &["commit", "device flush"], false, 1500),
                stack("write-back", &["device write"], true, 50),
            ],
            "requests": {"create": 5000, "fsync": 10},
        }))
    }

    #[test]
    fn a_table_has_operations_and_layers_with_their_shares_and_times() {
        let table = profile().table();
        assert_eq!(
            table,
            "\
2.0 s, 1000 samples. At a time: 2.00 requests, 0.05 in the background; 2.5 threads wait for work

requests            share      ms/s  requests/s      each
fsync              75.0 %    1500.0           5  300.00 ms
  commit           75.0 %    1500.0
    device flush   75.0 %    1500.0
create             25.0 %     500.0        2500  200.0 µs
  file system      20.0 %     400.0
    journal         5.0 %     100.0

background          share      ms/s  requests/s      each
write-back        100.0 %      50.0
  device write    100.0 %      50.0
"
        );
    }

    #[test]
    fn folded_stacks_count_what_was_seen_in_no_layer_inside() {
        assert_eq!(
            profile().folded(),
            "\
background;write-back;device write 50
create 100
create;file system 300
create;file system;journal 100
fsync;commit;device flush 1500
"
        );
    }

    #[test]
    fn an_idle_daemon_has_no_table_and_no_stack() {
        let idle = Profile::of(&json!({"time_ns": 1, "samples": 10, "idle": 90, "stacks": []}));
        assert_eq!(idle.folded(), "");
        assert_eq!(
            idle.table(),
            "0.0 s, 10 samples. At a time: 0.00 requests, 0.00 in the background; 9.0 threads wait for work\n\
             no program or client asked for anything meanwhile\n"
        );
    }

    #[test]
    fn names_of_another_process_cannot_steer_the_terminal() {
        let stacks = json!([{"operation": "\u{1b}[2J", "layers": [], "count": 1}]);
        let profile = Profile::of(&json!({"samples": 1, "time_ns": 1, "stacks": stacks}));
        assert!(!profile.table().contains('\u{1b}') && !profile.folded().contains('\u{1b}'));
    }
}
