//! The metrics: which figure each of them is, and the text that Prometheus reads.
//!
//! A metric keeps its name and meaning between versions; the figures of `ferry stats` need not.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, prometheus_text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use serde_json::Value;

use crate::socket::object;

/// What the names of all metrics begin with.
const PREFIX: &str = "ferryfs";

struct Metric {
    /// Without [`PREFIX`], and without `_total` of a counter.
    name: &'static str,
    help: &'static str,
    kind: MetricType,
    /// The figure, as a JSON pointer. A `*` stands for each member of an object, which has the
    /// label of that name.
    at: (&'static str, Option<&'static str>),
    unit: Unit,
}

/// How a figure becomes a sample.
#[derive(Clone, Copy)]
enum Unit {
    /// A number, or a truth as 0 or 1.
    Plain,
    /// A number that is divided by this.
    Per(f64),
    /// 1 if it is this text, and otherwise 0.
    Is(&'static str),
    /// 1 if it is a text, and 0 if it is null.
    IsThere,
}

const NANOS: Unit = Unit::Per(1e9);
const MILLIS: Unit = Unit::Per(1e3);
const MICROS: Unit = Unit::Per(1e6);
use MetricType::{Counter, Gauge, Histogram};
use Unit::{Is, IsThere, Plain};

const fn metric(
    kind: MetricType,
    name: &'static str,
    help: &'static str,
    at: &'static str,
    unit: Unit,
) -> Metric {
    Metric { name, help, kind, at: (at, None), unit }
}

/// A metric of each member of an object.
const fn each(
    kind: MetricType,
    name: &'static str,
    help: &'static str,
    (at, label): (&'static str, &'static str),
    unit: Unit,
) -> Metric {
    Metric { name, help, kind, at: (at, Some(label)), unit }
}

#[rustfmt::skip]
const METRICS: &[Metric] = &[
    // Requests of the kernel.
    each(Counter, "operations", "Requests of the kernel, by operation", ("/fuse/operations/*/count", "operation"), Plain),
    each(Counter, "operation_errors", "Requests that were answered with an error, also those that a program expects", ("/fuse/operations/*/errors", "operation"), Plain),
    each(Histogram, "operation_seconds", "Time from the request to its answer, also of requests that wait", ("/fuse/operations/*/times", "operation"), NANOS),
    metric(Gauge, "parked_requests", "Requests that wait without a thread", "/fuse/parked", Plain),
    // Space.
    metric(Gauge, "volume_read_only", "1 if the volume is not changed", "/volume/read_only", Plain),
    metric(Gauge, "volume_failed", "1 if an error has ended all changes of the volume until it is opened again", "/volume/failed", IsThere),
    metric(Gauge, "space_size_bytes", "Size of the volume's space for data", "/space/total", Plain),
    metric(Gauge, "space_free_bytes", "Free space", "/space/free", Plain),
    metric(Gauge, "space_available_bytes", "Free space that programs can use", "/space/available", Plain),
    metric(Gauge, "space_used_bytes", "Space in use", "/space/used", Plain),
    metric(Gauge, "inodes", "Files and directories", "/inodes/used", Plain),
    metric(Gauge, "open_files", "Open files", "/inodes/open_files", Plain),
    metric(Gauge, "cached_names", "Names in memory", "/inodes/cached_names", Plain),
    // The log.
    metric(Gauge, "log_size_bytes", "Size of the log", "/log/bytes", Plain),
    metric(Gauge, "log_free_bytes", "Free space of the log; if there is none, changes wait", "/log/free_bytes", Plain),
    metric(Gauge, "log_waiters", "Changes that wait for space of the log now", "/log/waiters", Plain),
    metric(Counter, "log_waits", "Waits for space of the log", "/log/waits", Plain),
    metric(Counter, "log_transactions", "Transactions", "/log/transactions", Plain),
    metric(Counter, "log_commits", "Commits, each of many transactions", "/log/contexts", Plain),
    metric(Counter, "log_forces", "Requests to make changes durable, such as fsync", "/log/forces", Plain),
    metric(Counter, "log_written_bytes", "Bytes written to the log", "/log/written_bytes", Plain),
    metric(Counter, "log_checkpoints", "Checkpoints of the log", "/log/checkpoints", Plain),
    metric(Counter, "log_checkpoint_seconds", "Time that checkpoints took", "/log/checkpoint_time_ns", NANOS),
    metric(Gauge, "log_overlay_keys", "Keys in memory that are not in the home store yet", "/log/overlay_keys", Plain),
    each(Histogram, "log_stage_seconds", "Time of a commit by stage: collect, queue, write, flush; waits is the time of a change that waited for space of the log", ("/log/times/*", "stage"), NANOS),
    // Flushes.
    metric(Counter, "flushes", "Flushes of the device", "/log/flushes", Plain),
    metric(Gauge, "flush_average_seconds", "What a flush of the device takes, on a moving average", "/flush/avg_flush_ns", NANOS),
    metric(Counter, "flush_delays", "Commits that waited for others to share a flush", "/flush/commit_delays", Plain),
    metric(Counter, "flush_delay_seconds", "Time that they waited", "/flush/commit_delay_ns", NANOS),
    // The cache.
    metric(Gauge, "memory_used_bytes", "Memory that caches and tables use", "/memory/used_bytes", Plain),
    metric(Gauge, "memory_limit_bytes", "The most that they may use now", "/memory/limit_bytes", Plain),
    metric(Gauge, "cache_bytes", "Cached contents and extents", "/data/cache_bytes", Plain),
    metric(Gauge, "cache_limit_bytes", "The most of them", "/data/cache_limit_bytes", Plain),
    metric(Gauge, "cache_dirty_bytes", "Contents that are not on the device yet", "/data/dirty_bytes", Plain),
    metric(Counter, "cache_evictions", "Folios and windows evicted", "/data/evicted", Plain),
    metric(Counter, "data_read_bytes", "Contents read from the device", "/data/read_bytes", Plain),
    metric(Counter, "data_written_bytes", "Contents written to the device", "/data/written_bytes", Plain),
    metric(Counter, "data_throttled", "Times that a writer was held because too much was dirty", "/data/throttled", Plain),
    metric(Counter, "data_moved_bytes", "Contents that the cleaner moved", "/data/moved_bytes", Plain),
    // Errors of the device.
    metric(Counter, "damaged_blocks", "Blocks of contents that were found damaged when read", "/data/damaged_blocks", Plain),
    metric(Counter, "home_blocks_healed", "Blocks of the home store that were damaged and could be restored", "/log/home_blocks_healed", Plain),
    metric(Gauge, "scrub_running", "1 while a scrub runs", "/scrub/state", Is("running")),
    metric(Gauge, "scrub_damaged_blocks", "Damaged blocks that the newest scrub has found", "/scrub/damaged_blocks", Plain),
    each(Gauge, "device_active", "1 if this component of the volume is in use; 0 if it has failed, is absent or is being rebuilt", ("/devices/*/state", "device"), Is("active")),
    each(Counter, "device_read_errors", "Reads of a component that failed", ("/devices/*/read_errors", "device"), Plain),
    each(Counter, "device_write_errors", "Writes of a component that failed", ("/devices/*/write_errors", "device"), Plain),
    each(Counter, "device_repairs", "Blocks of a component that another one restored", ("/devices/*/repairs", "device"), Plain),
    each(Gauge, "device_unreadable_blocks", "Blocks that no side could read when this component was built", ("/devices/*/unreadable_blocks", "device"), Plain),
    // The store of objects.
    metric(Counter, "store_puts", "Objects written to the store", "/store/puts", Plain),
    metric(Counter, "store_put_bytes", "Bytes written to the store", "/store/put_bytes", Plain),
    metric(Counter, "store_gets", "Objects or parts of them read from the store", "/store/gets", Plain),
    metric(Counter, "store_get_bytes", "Bytes read from the store", "/store/get_bytes", Plain),
    metric(Counter, "store_deletes", "Objects deleted in the store", "/store/deletes", Plain),
    metric(Counter, "store_retries", "Requests to the store that had to be repeated", "/store/repeated", Plain),
    metric(Counter, "store_estimated_cost_dollars", "What the requests to the store cost, by the prices of AWS", "/store/estimated_cost_microdollars", MICROS),
    metric(Gauge, "store_live_bytes", "Bytes of the volume in the store that are in use", "/store/live_bytes", Plain),
    metric(Gauge, "store_unsent_bytes", "Bytes that only this machine's memory has", "/store/unsent_bytes", Plain),
    metric(Gauge, "store_held_requests", "Requests that the store does not carry out now", "/store/held/requests", Plain),
    metric(Gauge, "store_held_seconds", "Time since the first of them", "/store/held/time_ns", NANOS),
    metric(Gauge, "local_log_waiting_objects", "Objects in the local log that the store does not have yet", "/store/waiting_objects", Plain),
    metric(Gauge, "local_log_waiting_bytes", "Their bytes", "/store/waiting_bytes", Plain),
    metric(Gauge, "local_log_waiting_seconds", "Age of the oldest of them", "/store/waiting_oldest_ns", NANOS),
    metric(Counter, "disk_cache_hits", "Reads that the cache on disk answered", "/store/cache_hits", Plain),
    metric(Counter, "disk_cache_misses", "Reads that it did not", "/store/cache_misses", Plain),
    metric(Gauge, "disk_cache_bytes", "Bytes in the cache on disk", "/store/cache_bytes", Plain),
    metric(Gauge, "disk_cache_limit_bytes", "The most of them", "/store/cache_bytes_max", Plain),
    metric(Counter, "disk_cache_damaged", "Parts in the cache on disk that were damaged", "/store/cache_damaged", Plain),
    // A replica.
    metric(Gauge, "replica_behind_seconds", "The replica has all that was durable this long ago", "/replica/behind_ns", NANOS),
    metric(Counter, "replica_looks", "Looks for a newer state that succeeded", "/replica/looks", Plain),
    metric(Counter, "replica_look_errors", "Looks that failed", "/replica/looks_failed", Plain),
    metric(Counter, "replica_versions", "States that the replica has had", "/replica/versions", Plain),
    // A server.
    metric(Gauge, "server_sessions", "Clients, with those that are away", "/server/sessions", Plain),
    metric(Gauge, "server_leases", "Leases that they have", "/server/leases", Plain),
    metric(Gauge, "server_write_leases", "Write leases among them", "/server/write_leases", Plain),
    each(Counter, "server_refused_clients", "Clients that were refused, by cause", ("/server/refused/*", "cause"), Plain),
    metric(Gauge, "server_certificate_end_timestamp_seconds", "The Unix time up to which the server's certificate is good", "/server/certificate_until_secs", Plain),
    // A mount of a server.
    metric(Gauge, "client_connected", "1 while the server is connected", "/connection/connected", Plain),
    metric(Counter, "client_reconnects", "Connections after the first", "/connection/reconnects", Plain),
    metric(Gauge, "client_certificate_end_timestamp_seconds", "The Unix time up to which the client's certificate is good", "/connection/certificate_until_secs", Plain),
    metric(Gauge, "client_unanswered_changes", "Changes that the server has not answered yet", "/connection/unanswered_changes", Plain),
    metric(Gauge, "client_unanswered_seconds", "Age of the oldest of them", "/connection/unanswered_ms", MILLIS),
    metric(Counter, "client_lost_locks", "Times that locks were lost with the server", "/connection/lost_locks", Plain),
    metric(Counter, "client_lost_changes", "Changes that were acknowledged and lost", "/connection/lost_changes", Plain),
    metric(Gauge, "client_replay_log_changes", "Changes that are replayed if the server restarts", "/connection/replay_log_changes", Plain),
    metric(Gauge, "client_replay_log_bytes", "Their bytes", "/connection/replay_log_bytes", Plain),
    metric(Counter, "client_cache_hits", "Look-ups that the client's cache answered", "/client_cache/hits", Plain),
    metric(Counter, "client_cache_misses", "Look-ups that it did not", "/client_cache/misses", Plain),
    metric(Counter, "client_recalled_leases", "Leases that the server has recalled", "/client_cache/recalled", Plain),
    metric(Gauge, "client_cached_inodes", "Inodes in the client's cache", "/client_cache/inodes", Plain),
    metric(Gauge, "client_cached_names", "Names in the client's cache", "/client_cache/names", Plain),
];

/// The text for Prometheus of these figures.
pub fn page(mut figures: Value) -> String {
    // A store that holds no requests says nothing of them: a rule for an alert needs the 0.
    if let Some(store) = figures["store"].as_object_mut() {
        store
            .entry("held")
            .or_insert_with(|| object([("requests", 0.into()), ("time_ns", 0.into())]));
    }
    // A side that another one has replaced is no part of the volume any more.
    if let Some(devices) = figures["devices"].as_object_mut() {
        devices.retain(|_, one| one["state"] != "replaced");
    }
    let mut registry = Registry::with_prefix(PREFIX);
    registry.register_collector(Box::new(Figures(figures)));
    let mut text = String::new();
    prometheus_text::encode(&mut text, &registry).expect("memory takes all text");
    text
}

#[derive(Debug)]
struct Figures(Value);

impl Collector for Figures {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let version = [("version", env!("CARGO_PKG_VERSION"))];
        info(&mut encoder, ("build", "The version of ferry"), &version)?;
        if let Some(volume) = self.0["volume"].as_object() {
            let text = |key: &str| volume[key].as_str().unwrap_or_default();
            let labels = [("id", text("id")), ("label", text("label"))];
            info(&mut encoder, ("volume", "The volume"), &labels)?;
        }
        METRICS.iter().try_for_each(|metric| metric.encode(&self.0, &mut encoder))
    }
}

fn info<const N: usize>(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help): (&str, &str),
    labels: &[(&'static str, &str); N],
) -> fmt::Result {
    encoder.encode_descriptor(name, help, None, MetricType::Info)?.encode_info(labels)
}

impl Metric {
    /// Writes nothing if the volume has no such figure.
    fn encode(&self, figures: &Value, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let (at, label) = self.at;
        let samples: Vec<(&str, Sample)> = match (at.split_once("/*"), label) {
            (Some((before, after)), Some(_)) => {
                let members = figures.pointer(before).and_then(Value::as_object);
                let members = members.into_iter().flatten();
                members
                    .filter_map(|(name, member)| {
                        Some((name.as_str(), self.sample(member.pointer(after)?)?))
                    })
                    .collect()
            }
            _ => figures
                .pointer(at)
                .and_then(|it| self.sample(it))
                .map(|it| ("", it))
                .into_iter()
                .collect(),
        };
        if samples.is_empty() {
            return Ok(());
        }
        let mut family = encoder.encode_descriptor(self.name, self.help, None, self.kind)?;
        for (name, sample) in samples {
            let labels = Vec::from_iter(label.map(|label| (label, name)));
            sample.encode(self.kind, family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn sample(&self, figure: &Value) -> Option<Sample> {
        Some(match (self.kind, self.unit, figure) {
            (Histogram, ..) => Sample::Times {
                total: figure["total_ns"].as_u64()? as f64 / 1e9,
                buckets: buckets(figure)?,
            },
            (_, Is(text), _) => Sample::Number(f64::from(figure.as_str()? == text)),
            (_, IsThere, _) => Sample::Number(f64::from(figure.is_string())),
            (_, Plain, Value::Bool(yes)) => Sample::Number(f64::from(*yes)),
            (_, Plain, _) => Sample::Number(figure.as_f64()?),
            (_, Unit::Per(divisor), _) => Sample::Number(figure.as_f64()? / divisor),
        })
    }
}

/// The upper ends in seconds, and how many are in each.
fn buckets(times: &Value) -> Option<Vec<(f64, u64)>> {
    let mut below = 0;
    let mut buckets = Vec::new();
    for bucket in times["buckets"].as_array()? {
        let within = bucket[1].as_u64()?;
        buckets.push((bucket[0].as_u64()? as f64 / 1e9, within - below));
        below = within;
    }
    buckets.push((f64::INFINITY, times["count"].as_u64()? - below));
    Some(buckets)
}

enum Sample {
    Number(f64),
    Times { total: f64, buckets: Vec<(f64, u64)> },
}

impl Sample {
    fn encode(&self, kind: MetricType, mut metric: MetricEncoder<'_>) -> fmt::Result {
        match (self, kind) {
            (Self::Number(number), Counter) => {
                metric.encode_counter::<NoLabelSet, f64, f64>(number, None)
            }
            (Self::Number(number), _) => metric.encode_gauge(number),
            (Self::Times { total, buckets }, _) => {
                let count = buckets.iter().map(|(_, count)| count).sum();
                metric.encode_histogram::<NoLabelSet>(*total, count, buckets, None)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    #[test]
    fn figures_become_samples_in_base_units() {
        let figures = serde_json::from_str(
            r#"{
            "volume": {"id": "12", "label": "a \"b\"\n", "read_only": false, "failed": null},
            "fuse": {"operations": {"read": {"count": 3, "errors": 1}, "write": {"count": 2, "errors": 0}}},
            "scrub": {"state": "running"},
            "flush": {"avg_flush_ns": 2500000},
            "devices": {"/a": {"state": "failed"}, "/b": {"state": "replaced"}},
            "store": {"estimated_cost_microdollars": 1500000},
            "connection": {"unanswered_ms": null},
            "log": {"times": {"flush": {"count": 3, "total_ns": 3000000, "buckets": [[1023, 1], [4095, 2]]}}}
        }"#,
        );
        let text = page(figures.expect("JSON"));
        for lines in [
            "# HELP ferryfs_operations_total Requests of the kernel, by operation\n# TYPE ferryfs_operations_total counter\n",
            "ferryfs_operations_total{operation=\"read\"} 3.0\nferryfs_operations_total{operation=\"write\"} 2.0\n",
            "ferryfs_operation_errors_total{operation=\"read\"} 1.0\n",
            "ferryfs_volume_info{id=\"12\",label=\"a \\\"b\\\"\\n\"} 1\n",
            "ferryfs_scrub_running 1.0\n",
            "ferryfs_volume_read_only 0.0\n",
            "ferryfs_volume_failed 0.0\n",
            "ferryfs_flush_average_seconds 0.0025\n",
            "ferryfs_device_active{device=\"/a\"} 0.0\n",
            "ferryfs_store_estimated_cost_dollars_total 1.5\n",
            "ferryfs_store_held_requests 0.0\n",
            "ferryfs_log_stage_seconds_sum{stage=\"flush\"} 0.003\n",
            "ferryfs_log_stage_seconds_count{stage=\"flush\"} 3\n",
            "stage=\"flush\"} 3\n",
        ] {
            assert!(text.contains(lines), "{lines}\nin\n{text}");
        }
        assert!(!text.contains("client_unanswered_seconds"), "there is none:\n{text}");
        let counts: Vec<&str> = text
            .lines()
            .filter(|line| line.starts_with("ferryfs_log_stage_seconds_bucket"))
            .filter_map(|line| line.rsplit(' ').next())
            .collect();
        assert_eq!(counts, ["1", "2", "3"], "each bucket has those below:\n{text}");
    }

    #[test]
    fn each_metric_has_a_name_of_its_own_and_is_documented() {
        let names: BTreeSet<&str> = METRICS.iter().map(|metric| metric.name).collect();
        assert_eq!(names.len(), METRICS.len());
        let docs = include_str!("../../../../docs/metrics.md");
        for metric in METRICS {
            let (at, label) = metric.at;
            assert_eq!(at.contains("/*"), label.is_some(), "{}", metric.name);
            let bare = !["total", "count", "sum", "bucket", "info"]
                .iter()
                .any(|suffix| metric.name.ends_with(&format!("_{suffix}")));
            assert!(bare, "{}", metric.name);
            let total = if metric.kind == Counter { "_total" } else { "" };
            let row = format!("| `{PREFIX}_{}{total}` |", metric.name);
            assert!(docs.contains(&row), "docs/metrics.md has no {row}");
        }
    }

    /// The names under which samples are exported, with the labels of each.
    fn exported() -> BTreeMap<String, Vec<&'static str>> {
        let mut names = BTreeMap::from([
            (format!("{PREFIX}_build_info"), vec!["version"]),
            (format!("{PREFIX}_volume_info"), vec!["id", "label"]),
        ]);
        for metric in METRICS {
            let suffixes: &[&str] = match metric.kind {
                Counter => &["_total"],
                Histogram => &["_bucket", "_sum", "_count"],
                _ => &[""],
            };
            for suffix in suffixes {
                let labels = metric.at.1.into_iter().chain((*suffix == "_bucket").then_some("le"));
                names.insert(format!("{PREFIX}_{}{suffix}", metric.name), labels.collect());
            }
        }
        names
    }

    /// The names of metrics in a query, each with what stands in front of it.
    fn metrics_in(query: &str) -> Vec<(&str, &str)> {
        let is_name = |char: char| char.is_ascii_alphanumeric() || char == '_';
        let begins = query.match_indices(PREFIX).map(|(at, _)| at);
        let begins = begins.filter(|at| !query[..*at].ends_with(is_name));
        let named = begins.map(|at| {
            let name = &query[at..];
            (&query[..at], &name[..name.find(|char| !is_name(char)).unwrap_or(name.len())])
        });
        named.filter(|(_, name)| *name != PREFIX).collect()
    }

    /// Checks a query of a dashboard or a rule; returns how many metrics are in it.
    fn check(query: &str, printed: &str, exported: &BTreeMap<String, Vec<&str>>) -> usize {
        let metrics = metrics_in(query);
        assert!(!metrics.is_empty() || query.starts_with("up{"), "no metric: {query}");
        let mut labels = vec!["instance", "job"];
        for (before, name) in &metrics {
            let of_metric = exported.get(*name);
            labels.extend(of_metric.unwrap_or_else(|| panic!("{name} is not exported: {query}")));
            let grows =
                ["_total", "_bucket", "_sum", "_count"].iter().any(|end| name.ends_with(end));
            let rate = ["rate(", "increase("].iter().any(|function| before.ends_with(function));
            assert!(grows || !rate, "{name} is no counter: {query}");
        }
        // Labels by which a query sums, and those that its legend or message prints.
        let sums = query.split("by (").skip(1).filter_map(|rest| rest.split(')').next());
        let summed = sums.flat_map(|list| list.split(',').map(str::trim));
        let words = printed.split("{{").skip(1).filter_map(|rest| rest.split("}}").next());
        let words = words.map(str::trim).filter(|word| !word.starts_with("$value"));
        for label in summed.chain(words.map(|word| word.trim_start_matches("$labels."))) {
            assert!(labels.contains(&label), "{label} is no label of {query}");
        }
        metrics.len()
    }

    #[test]
    fn each_metric_of_the_dashboard_is_exported() {
        let text = include_str!("../../../../contrib/grafana/ferryfs.json");
        let dashboard: Value = serde_json::from_str(text).expect("JSON");
        let panels = dashboard["panels"].as_array().expect("panels");
        let (mut ids, mut metrics) = (BTreeSet::new(), 0);
        for panel in panels {
            assert!(ids.insert(panel["id"].as_u64().expect("a number")), "{}", panel["title"]);
            if panel["type"] == "row" {
                continue;
            }
            assert!(panel["fieldConfig"]["defaults"]["unit"].is_string(), "{}", panel["title"]);
            for target in panel["targets"].as_array().expect("queries") {
                let text = |key: &str| target[key].as_str().expect("a text");
                let query = text("expr");
                let instances = query.matches("{instance=~\"$instance\"}").count();
                let count = check(query, text("legendFormat"), &exported());
                assert_eq!(instances, count, "each metric is of the instances asked for: {query}");
                metrics += count;
            }
        }
        assert!(metrics > 40, "{metrics}");
    }

    #[test]
    fn each_metric_of_the_rules_is_exported() {
        let text = include_str!("../../../../contrib/prometheus/ferryfs.rules.yml");
        let rules = text.split("- alert: ").skip(1);
        let mut metrics = 0;
        for rule in rules {
            let query = rule.lines().find_map(|line| line.trim().strip_prefix("expr: "));
            let summary = rule.lines().find_map(|line| line.trim().strip_prefix("summary: "));
            let query = query.unwrap_or_else(|| panic!("no query on one line: {rule}"));
            metrics += check(query, summary.expect("a summary"), &exported());
        }
        assert!(metrics > 10, "{metrics}");
    }
}
