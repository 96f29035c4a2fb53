//! `ferry top`: shows repeatedly what a mounted volume does in a second.

use std::fmt::Write;
use std::io::IsTerminal;
use std::time::Duration;

use ferry_env::Env;
use rustix::termios::tcgetwinsize;
use serde_json::Value;

use crate::cli::TopArgs;
use crate::control::{is_read, print, read_stats};
use crate::error::CliError;
use crate::location::Location;
use crate::size::{format_bytes, format_nanos};
use crate::socket::printable;
use crate::table::{dollars, thousands};
use crate::waiting::{stop_on_signals, wait};

/// How many kinds of requests are shown, the most frequent first.
const REQUESTS_LISTED: usize = 8;
/// The shortest interval: with shorter ones the cost of measuring would show.
const INTERVAL_MIN: Duration = Duration::from_millis(50);
/// The width of the bar that shows how full the log is, in characters.
const BAR: u64 = 40;
/// Switches the terminal to its alternate screen, without a cursor; and back.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

/// Runs until a signal stops it, the mount ends, or it has shown enough frames.
pub fn run(args: &TopArgs) -> Result<(), CliError> {
    if args.interval < INTERVAL_MIN {
        return Err(CliError::Usage(format!(
            "--interval: at least {}ms",
            INTERVAL_MIN.as_millis()
        )));
    }
    let target = &args.looked.meant()?;
    let stop = stop_on_signals()?;
    let clock = Env::real().clock;
    // The mount is opened for each frame only, so that this process does not keep it busy.
    let mut before = (read_stats(target)?, clock.monotonic());
    let volume = before.0["volume"]["id"].clone();
    let screen = Screen::enter(std::io::stdout().is_terminal())?;
    let mut left = args.count;
    while left != Some(0) {
        if !wait(args.interval, &stop) {
            return Ok(());
        }
        let now = match read_stats(target) {
            Ok(stats) if stats["volume"]["id"] == volume => (stats, clock.monotonic()),
            Err(error) if !matches!(error, CliError::NotMounted(_)) => return Err(error),
            _ => {
                drop(screen);
                return print(&format!("{}: the volume was unmounted\n", target));
            }
        };
        let rates =
            Rates { before: &before.0, now: &now.0, seconds: (now.1 - before.1).as_secs_f64() };
        if !screen.show(&frame(target, &rates))? {
            return Ok(());
        }
        before = now;
        left = left.map(|left| left - 1);
    }
    Ok(())
}

/// The terminal while frames are drawn.
struct Screen {
    terminal: bool,
}

impl Screen {
    fn enter(terminal: bool) -> Result<Self, CliError> {
        if terminal {
            print(ENTER)?;
        }
        Ok(Self { terminal })
    }

    /// Shows a frame in place of the last one, as far as there is room; without a terminal, below
    /// it. `false`: the reader has stopped reading.
    fn show(&self, frame: &str) -> Result<bool, CliError> {
        if !self.terminal {
            return is_read(&format!("{frame}\n"));
        }
        let size =
            tcgetwinsize(std::io::stdout()).ok().filter(|size| size.ws_row > 0 && size.ws_col > 0);
        let (rows, columns) =
            size.map_or((usize::MAX, usize::MAX), |size| (size.ws_row.into(), size.ws_col.into()));
        is_read(&format!("\x1b[H{}\x1b[J", cropped(frame, rows, columns)))
    }
}

/// Cuts a frame to the terminal's size: a line that wraps would shift all lines below it.
fn cropped(frame: &str, rows: usize, columns: usize) -> String {
    let crop = |line: &str| line.chars().take(columns).chain("\x1b[K".chars()).collect::<String>();
    frame.lines().take(rows).map(crop).collect::<Vec<_>>().join("\r\n")
}

impl Drop for Screen {
    fn drop(&mut self) {
        if self.terminal {
            // The last chance to restore the terminal; a failure cannot be reported.
            let _ = print(LEAVE);
        }
    }
}

/// The statistics at two times.
struct Rates<'a> {
    before: &'a Value,
    now: &'a Value,
    seconds: f64,
}

impl Rates<'_> {
    fn of(&self, pointer: &str) -> u64 {
        self.now.pointer(pointer).and_then(Value::as_u64).unwrap_or_default()
    }

    fn grown(&self, pointer: &str) -> u64 {
        let before = self.before.pointer(pointer).and_then(Value::as_u64).unwrap_or_default();
        self.of(pointer).saturating_sub(before)
    }

    /// The difference for a second.
    fn rate(&self, pointer: &str) -> u64 {
        (self.grown(pointer) as f64 / self.seconds).round() as u64
    }

    fn each(&self, sum: &str, count: &str) -> String {
        match self.grown(count) {
            0 => "-".into(),
            n => format!("{:.1}", self.grown(sum) as f64 / n as f64),
        }
    }
}

fn frame(target: &Location, r: &Rates<'_>) -> String {
    let mut out = String::new();
    let name = [&r.now["volume"]["label"], &r.now["volume"]["id"]];
    let name = name
        .iter()
        .filter_map(|name| name.as_str())
        .find(|name| !name.is_empty())
        .unwrap_or_default();
    let bytes = |pointer: &str| format_bytes(r.of(pointer));
    let _ = writeln!(
        out,
        "{}  {name}  {} free of {}  {} inodes",
        target,
        bytes("/space/available"),
        bytes("/space/total"),
        thousands(r.of("/inodes/used"))
    );
    let _ = writeln!(out);
    let count = |pointer: &str| thousands(r.rate(pointer));
    let size = |pointer: &str| format!("{}/s", format_bytes(r.rate(pointer)));
    let rows = [
        ("requests/s", count("/fuse/requests"), "data written", size("/data/written_bytes")),
        ("transactions/s", count("/log/transactions"), "data read", size("/data/read_bytes")),
        ("fsyncs/s", count("/log/forces"), "log written", size("/log/written_bytes")),
        ("commits/s", count("/log/contexts"), "dirty", bytes("/data/dirty_bytes")),
        ("flushes/s", count("/log/flushes"), "cached", bytes("/data/cache_bytes")),
        ("checkpoints/s", count("/log/checkpoints"), "home store", bytes("/log/home_bytes")),
    ];
    for (left, rate, right, value) in rows {
        let _ = writeln!(out, "  {left:<16}{rate:>12}    {right:<14}{value:>14}");
    }
    let _ = writeln!(
        out,
        "  a commit: {} transactions, {} fsyncs",
        r.each("/log/transactions", "/log/contexts"),
        r.each("/log/forces", "/log/contexts")
    );
    store(&mut out, r);
    log(&mut out, r);
    requests(&mut out, r);
    out
}

/// Thirty days.
const SECONDS_OF_A_MONTH: u64 = 30 * 24 * 3600;

/// What an object store is asked for, and whether it does not do it.
fn store(out: &mut String, r: &Rates<'_>) {
    if r.now["store"].is_null() {
        return;
    }
    let count = |pointer: &str| thousands(r.rate(pointer));
    let size = |pointer: &str| format_bytes(r.rate(pointer));
    let _ = writeln!(
        out,
        "\nstore: {} PUTs/s of {}/s, {} GETs/s of {}/s, {} unsent",
        count("/store/puts"),
        size("/store/put_bytes"),
        count("/store/gets"),
        size("/store/get_bytes"),
        format_bytes(r.of("/store/unsent_bytes")),
    );
    let cost = "/store/estimated_cost_microdollars";
    if r.now.pointer(cost).is_some() {
        let month = r.rate(cost).saturating_mul(SECONDS_OF_A_MONTH);
        let _ = writeln!(
            out,
            "  estimated cost: {} until now, {} a month at this rate",
            dollars(r.of(cost)),
            dollars(month),
        );
    }
    if r.now["store"].get("waiting_objects").is_some() {
        let _ = writeln!(
            out,
            "  local log: {} objects of {} wait for the store, the oldest for {}",
            thousands(r.of("/store/waiting_objects")),
            format_bytes(r.of("/store/waiting_bytes")),
            format_nanos(r.of("/store/waiting_oldest_ns")),
        );
    }
    if let Some(reason) = r.now["store"]["held"]["reason"].as_str() {
        let _ = writeln!(
            out,
            "  held for {}: {} requests: {}",
            format_nanos(r.of("/store/held/time_ns")),
            thousands(r.of("/store/held/requests")),
            printable(reason)
        );
    }
}

fn log(out: &mut String, r: &Rates<'_>) {
    let all = r.of("/log/bytes");
    let taken = all.saturating_sub(r.of("/log/free_bytes"));
    let full = (taken * BAR).checked_div(all).unwrap_or_default() as usize;
    let bar = format!("{}{}", "#".repeat(full), ".".repeat(BAR as usize - full));
    let _ = writeln!(out, "\nlog [{bar}] {} of {}", format_bytes(taken), format_bytes(all));
    let _ = writeln!(
        out,
        "  waiting {}, waits/s {}, p99 {}, longest {}",
        r.of("/log/waiters"),
        thousands(r.rate("/log/waits")),
        format_nanos(r.of("/log/times/waits/p99_ns")),
        format_nanos(r.of("/log/times/waits/max_ns"))
    );
}

fn requests(out: &mut String, r: &Rates<'_>) {
    let Some(operations) = r.now.pointer("/fuse/operations").and_then(Value::as_object) else {
        return;
    };
    let rate = |name: &String| (r.rate(&format!("/fuse/operations/{name}/count")), name.clone());
    let mut rates: Vec<_> = operations.keys().map(rate).filter(|(rate, _)| *rate > 0).collect();
    rates.sort_by(|a, b| b.cmp(a));
    let _ = writeln!(out, "\nrequests/s");
    for (rate, name) in rates.iter().take(REQUESTS_LISTED) {
        let _ = writeln!(out, "  {name:<16}{:>12}", thousands(*rate));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_cut_to_the_terminal() {
        assert_eq!(cropped("one\nträger\nthree\n", 2, 4), "one\x1b[K\r\nträg\x1b[K");
        assert_eq!(cropped("one\n", usize::MAX, usize::MAX), "one\x1b[K");
    }

    #[test]
    fn a_frame_shows_the_difference_of_two_readings() {
        let at = |n: u64| -> Value {
            let (contexts, transactions, requests, lookups) = (10 * n, 55 * n, 3000 * n, 2000 * n);
            let text = format!(
                r#"{{
                "volume": {{ "label": "", "id": "1234" }}, "space": {{ "total": {}, "available": {} }}, "inodes": {{ "used": 7 }},
                "log": {{ "bytes": 4096, "free_bytes": 1024, "contexts": {contexts}, "transactions": {transactions}, "forces": 0, "waiters": 3 }},
                "fuse": {{ "requests": {requests}, "operations": {{ "lookup": {{ "count": {lookups} }}, "open": {{ "count": 0 }} }} }}
                }}"#,
                1 << 30,
                1 << 29
            );
            serde_json::from_str(&text).expect("it is JSON")
        };
        let (before, now) = (at(1), at(3));
        let text =
            frame(&Location::from("/mnt"), &Rates { before: &before, now: &now, seconds: 2.0 });
        for line in [
            "/mnt  1234  512 MiB free of 1.0 GiB  7 inodes\n",
            "  requests/s             3,000    data written           0 B/s\n",
            "  a commit: 5.5 transactions, 0.0 fsyncs\n",
            "log [##############################..........] 3.0 KiB of 4.0 KiB\n",
            "  waiting 3, waits/s 0,",
            "\nrequests/s\n  lookup                 2,000\n",
        ] {
            assert!(text.contains(line), "{line:?} in\n{text}");
        }
        assert!(!text.contains("open"), "what did not happen is not shown:\n{text}");
        assert!(!text.contains("store: "), "there is none:\n{text}");
    }

    #[test]
    fn a_frame_says_what_the_store_holds_up() {
        let at = |puts: u64| -> Value {
            let text = format!(
                r#"{{ "store": {{ "puts": {puts}, "put_bytes": {}, "unsent_bytes": 4096,
                "estimated_cost_microdollars": {}, "waiting_objects": 1200, "waiting_bytes": 8192,
                "waiting_oldest_ns": 3000000000,
                "held": {{ "requests": 2, "time_ns": 12000000000, "reason": "no \u001bbucket" }} }} }}"#,
                puts << 10,
                puts * 5
            );
            serde_json::from_str(&text).expect("it is JSON")
        };
        let (before, now) = (at(10), at(20));
        let text =
            frame(&Location::from("/mnt"), &Rates { before: &before, now: &now, seconds: 2.0 });
        let line = "store: 5 PUTs/s of 5.0 KiB/s, 0 GETs/s of 0 B/s, 4.0 KiB unsent\n";
        assert!(text.contains(line), "{text}");
        let line = "  estimated cost: $0.0001 until now, $64.8000 a month at this rate\n";
        assert!(text.contains(line), "{text}");
        let line =
            "  local log: 1,200 objects of 8.0 KiB wait for the store, the oldest for 3.00 s\n";
        assert!(text.contains(line), "{text}");
        assert!(
            text.contains("  held for 12.00 s: 2 requests: no ") && !text.contains('\u{1b}'),
            "{text}"
        );
    }
}
