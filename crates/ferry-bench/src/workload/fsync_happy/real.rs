//! The workload in real time: threads that overwrite blocks of their own files, on mounted paths or
//! on a modelled device.

use super::{CALLERS, Load};
use crate::counters::Counters;
use crate::error::BenchError;
use crate::model::DeviceModel;
use crate::run::{Bench, Case, Metric, Report, Sample, Variant};
use crate::stats::Histogram;
use crate::target::{Dir, Target, VolumeOptions};
use crate::threads::{now, threads};
use crate::workload::numbers::Numbers;
use ferry::command::shared::{parse_duration, parse_time};
use ferry_device::BLOCK_SIZE;
use ferry_env::Entropy;
use ferry_fs::FlushPolicy;
use std::time::Duration;

/// Blocks of each caller's file.
const BLOCKS: u64 = 16;
/// Calls of each caller before those that are counted, at most: by then `adaptive` knows the
/// callers. Where a call takes longer than a turn is counted, one.
const WARM_UP_CALLS: u64 = 6;
/// A device in memory for this is so large, in bytes: what was overwritten is soon used again.
const CAPACITY: u64 = 1 << 30;

const METRICS: [Metric; 6] = [
    Metric { name: "fsyncs_per_s", label: "fsyncs/s", more_is_better: true },
    Metric { name: "fsyncs_per_flush", label: "per flush", more_is_better: true },
    Metric { name: "p50_ms", label: "p50 ms", more_is_better: false },
    Metric { name: "p99_ms", label: "p99 ms", more_is_better: false },
    Metric { name: "cpu_us_per_fsync", label: "CPU µs", more_is_better: false },
    Metric { name: "device_late_us", label: "device late µs", more_is_better: false },
];

/// The options of the workload.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// How many callers; several: 1,16
    #[arg(long, value_delimiter = ',', value_name = "N", default_values_t = CALLERS, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub callers: Vec<u32>,
    /// What a caller takes between an answer and its next call
    #[arg(long, value_parser = parse_duration, value_name = "TIME", default_value = "0us")]
    pub think_time: Duration,
    /// So much more, at random
    #[arg(long, value_parser = parse_duration, value_name = "TIME", default_value = "0us")]
    pub jitter: Duration,
    /// Flush policies; several: each,adaptive
    #[arg(long, value_delimiter = ',', value_name = "POLICY", default_values_t = FlushPolicy::ALL)]
    pub policy: Vec<FlushPolicy>,
    /// How long a turn is counted
    #[arg(long, value_parser = parse_time, value_name = "TIME", default_value = "500ms")]
    pub time: Duration,
}

impl Options {
    /// The load of so many callers.
    pub fn load(&self, callers: u32) -> Load {
        Load { callers, think_time: self.think_time, jitter: self.jitter }
    }

    fn bench<'a>(&self, cases: Vec<Case<'a>>) -> Bench<'a> {
        let list = |texts: Vec<String>| texts.join(",");
        Bench {
            workload: "fsync-happy",
            about: "Callers overwrite blocks of their own files and fsync after each.".into(),
            metrics: METRICS.into(),
            options: vec![
                ("callers", list(self.callers.iter().map(u32::to_string).collect())),
                ("policies", list(self.policy.iter().map(|policy| policy.name().into()).collect())),
                ("turn", format!("{:?}", self.time)),
                ("think time", format!("{:?} + {:?}", self.think_time, self.jitter)),
            ],
            cases,
        }
    }

    /// `adaptive` is what the others are compared with.
    fn reference(&self) -> usize {
        self.policy.iter().position(|policy| *policy == FlushPolicy::Adaptive).unwrap_or_default()
    }
}

/// In process, a volume on each of these devices for each number of callers.
pub fn in_process(options: &Options, devices: &[DeviceModel]) -> Bench<'static> {
    let mut cases = Vec::new();
    for device in devices {
        for callers in &options.callers {
            let (options, volume, callers) = (
                options.clone(),
                VolumeOptions {
                    device: device.clone(),
                    capacity: CAPACITY,
                    ..VolumeOptions::default()
                },
                *callers,
            );
            let group = format!("flush {:?}", device.flush_time);
            cases.push(Case {
                name: format!("{group}, {}", count(callers)),
                group,
                x: Some(f64::from(callers)),
                x_label: "callers",
                reference: options.reference(),
                variants: options.policy.len(),
                open: Box::new(move || {
                    let target = std::rc::Rc::new(Target::in_process(&volume)?);
                    let variants = options.policy.iter().map(|policy| {
                        let (target, load, policy, time) =
                            (target.clone(), options.load(callers), *policy, options.time);
                        Variant::new(policy.name(), move |_| {
                            turn(&target, Some(policy), &load, time)
                        })
                    });
                    Ok(variants.collect())
                }),
            });
        }
    }
    let mut bench = options.bench(cases);
    if let Some(device) = devices.first() {
        let flushes =
            if device.serial_flushes { "one after the other" } else { "beside each other" };
        let writes =
            format!("{:?}, {} at a time; flushes {flushes}", device.write_time, device.queue_depth);
        bench.options.push(("write time", writes));
    }
    bench
}

/// On mounted file systems: each FerryFS with each policy, every other one as it is.
pub fn on_targets<'a>(options: &Options, targets: &'a [Target]) -> Result<Bench<'a>, BenchError> {
    let mut kinds = Vec::new();
    for target in targets {
        match target.is_ferry()? {
            true => kinds.extend(options.policy.iter().map(|policy| (target, Some(*policy)))),
            false => kinds.push((target, None)),
        }
    }
    let cases = options.callers.iter().map(|callers| {
        let (load, time) = (options.load(*callers), options.time);
        let variants = kinds.iter().map(|(target, policy)| {
            let name = policy
                .map_or(target.name().to_owned(), |policy| format!("{} {policy}", target.name()));
            let (target, policy, load) = (*target, *policy, load.clone());
            Variant::new(name, move |_| turn(target, policy, &load, time))
        });
        let is_reference =
            |(_, policy): &(_, Option<FlushPolicy>)| *policy == Some(FlushPolicy::Adaptive);
        let mut case = Case::new(count(*callers), variants.collect());
        (case.group, case.x, case.x_label) = ("paths".into(), Some(f64::from(*callers)), "callers");
        case.reference = kinds.iter().position(is_reference).unwrap_or_default();
        case
    });
    Ok(options.bench(cases.collect()))
}

fn count(callers: u32) -> String {
    if callers == 1 { "1 caller".into() } else { format!("{callers} callers") }
}

/// What a caller counted.
struct Counted {
    calls: u64,
    rate: f64,
    latency: Histogram,
}

fn turn(
    target: &Target,
    policy: Option<FlushPolicy>,
    load: &Load,
    time: Duration,
) -> Result<Sample, BenchError> {
    let dir = target.root().mkdir("turn")?;
    for caller in 0..load.callers {
        dir.create(&caller.to_string())?.write_at(&[1; BLOCK_SIZE * BLOCKS as usize], 0)?;
    }
    target.sync()?;
    if let Some(policy) = policy {
        target.tune(policy)?;
    }
    target.take_lateness();
    let before = Counters::of(target)?;
    let counted = threads(load.callers, |caller| call(&dir, caller, load, time))?;
    let spent = Counters::of(target)?.since(&before);
    let lateness = target.take_lateness();
    drop(dir);
    target.root().remove_tree("turn")?;

    let calls: u64 = counted.iter().map(|caller| caller.calls).sum();
    let mut latency = Histogram::default();
    counted.iter().for_each(|caller| latency.merge(&caller.latency));
    let mut sample = Sample::from([
        ("fsyncs_per_s", counted.iter().map(|caller| caller.rate).sum()),
        ("p50_ms", latency.quantile_ms(0.5)),
        ("p99_ms", latency.quantile_ms(0.99)),
        ("cpu_us_per_fsync", spent.cpu_s * 1e6 / calls as f64),
    ]);
    if let Some(flushes) = spent.flushes {
        sample.insert("fsyncs_per_flush", calls as f64 / flushes.max(1.0));
    }
    if let Some(lateness) = lateness {
        sample.insert("device_late_us", lateness.quantile_ms(0.5) * 1e3);
    }
    Ok(sample)
}

/// One caller. Its rate is that of whole calls, from the first after the warm-up to the one under
/// way when time is up.
fn call(dir: &Dir, caller: u32, load: &Load, time: Duration) -> Result<Counted, BenchError> {
    let file = dir.open(&caller.to_string())?;
    let numbers = Numbers::new(u64::from(caller));
    let (mut calls, mut latency, start) = (0, Histogram::default(), now());
    let (mut last, mut begin) = (start, None);
    while begin.is_none_or(|begin| last - begin < time) {
        let block = numbers.next_u64() % BLOCKS;
        file.write_at(&[calls as u8; BLOCK_SIZE], block * BLOCK_SIZE as u64)?;
        let asked = now();
        file.sync()?;
        calls += 1;
        if begin.is_some() {
            latency.add(now() - asked);
        }
        let pause = load.think_time + numbers.below(load.jitter);
        if !pause.is_zero() {
            think(pause);
        }
        last = now();
        if begin.is_none() && (calls == WARM_UP_CALLS || last - start >= time) {
            begin = Some(last);
        }
    }
    let rate = latency.count() as f64 / (last - begin.unwrap_or(start)).as_secs_f64();
    Ok(Counted { calls, rate, latency })
}

/// The caller does something else.
#[expect(clippy::disallowed_methods, reason = "what it does is to let time pass")]
fn think(pause: Duration) {
    std::thread::sleep(pause);
}

/// What the report says of `adaptive`: where another policy is distinguishably faster.
pub fn verdict(report: &Report) -> Vec<String> {
    let adaptive = FlushPolicy::Adaptive.name();
    let mut notes = Vec::new();
    for case in report.cases.iter().filter(|case| case.reference.ends_with(adaptive)) {
        let ferry =
            |name: &str| FlushPolicy::ALL.iter().any(|policy| name.ends_with(policy.name()));
        for variant in case.variants.iter().filter(|variant| ferry(&variant.name)) {
            let Some(ratio) = variant.ratio else { continue };
            if let Some(interval) = ratio.interval.filter(|interval| interval.low > 1.0) {
                notes.push(format!(
                    "{}: {} is distinguishably faster than {}: {:.3} [{:.3}, {:.3}]",
                    case.name,
                    variant.name,
                    case.reference,
                    ratio.value,
                    interval.low,
                    interval.high
                ));
            }
        }
    }
    if notes.is_empty()
        && report.cases.iter().any(|case| case.reference.ends_with(adaptive))
        && report.rounds > 1
    {
        notes.push(format!("{adaptive} is nowhere distinguishably slower than another policy"));
    }
    notes
}
