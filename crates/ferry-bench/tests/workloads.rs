//! The workloads run through, and what FerryFS counted is what the workload did.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

use clap::ValueEnum;
use ferry_bench::workload::fsmark::{self, SyncMode};
use ferry_bench::workload::fsync_happy::real;
use ferry_bench::workload::{create, fserver, log_space, transactions};
use ferry_bench::{DeviceModel, Target, TurnTarget, VolumeOptions};
use ferry_fs::{FlushPolicy, FsOptions, LogOptions};
use ferry_journal::Wake;
use std::time::Duration;

fn device() -> DeviceModel {
    DeviceModel { flush_time: Duration::from_millis(4), ..DeviceModel::default() }
}

#[test]
fn fsmark_counts_files_flushes_and_commits() {
    let fs = FsOptions { commit_interval: Duration::from_secs(3600), ..FsOptions::default() };
    let volume =
        VolumeOptions { device: device(), capacity: 1 << 30, fs, ..VolumeOptions::default() };
    let host = tempfile::tempdir().unwrap();
    let targets = [Target::in_process(&volume).unwrap(), Target::on(host.path(), None).unwrap()];
    let options = fsmark::Options {
        files: 50,
        size: 4096,
        threads: 1,
        sync: SyncMode::value_variants().into(),
    };
    let report = fsmark::bench(&options, &targets).run(2, |_| ()).unwrap();
    assert_eq!(report.cases.len(), 2);
    let of = |case: usize, name: &str, metric| {
        report.cases[case].of(name).unwrap().values[metric].clone()
    };
    // The background may flush once beside them.
    let once = 1.0 / f64::from(options.files);
    let about = |name: &str, metric, expected: f64| {
        let values = of(0, name, metric);
        let right = |value: &f64| (expected..=expected + once + 1e-9).contains(value);
        assert!(values.len() == 2 && values.iter().all(right), "{name}, {metric}: {values:?}");
    };
    about("in process none", "flushes_per_file", 0.0);
    about("in process each", "flushes_per_file", 1.0);
    about("in process each", "commits_per_file", 1.0);
    assert_eq!(of(1, "in process async", "dirty_bytes_per_file"), [4096.0, 4096.0]);
    assert_eq!(
        of(1, "in process async", "commits_per_file"),
        [0.02, 0.02],
        "all of them are one commit"
    );
    assert_eq!(of(1, "in process pass", "flushes_per_file")[0], 1.0);
    let on_host = report.cases[1].of(&format!("{} async", host.path().display())).unwrap();
    assert!(
        on_host.medians["files_per_s"] > 0.0 && !on_host.values.contains_key("flushes_per_file")
    );
}

#[test]
fn fserver_waits_for_log_space_and_hands_it_over() {
    // A checkpoint takes several flushes, and half of the log is less than what so many workers
    // bring meanwhile, on a slow machine too.
    let device = DeviceModel { flush_time: Duration::from_millis(200), ..DeviceModel::default() };
    let volume = VolumeOptions {
        device,
        capacity: 256 << 20,
        log_size: Some(1 << 20),
        fs: FsOptions { cache_bytes: 16 << 20, ..FsOptions::default() },
    };
    let options = fserver::Options { workers: 48, fsync_each: false, time: Duration::from_secs(2) };
    assert_eq!(fserver::MIX.iter().map(|(_, n)| n).sum::<u32>(), 100);
    let logs = Wake::WAYS.map(|wake| LogOptions { wake, ..LogOptions::default() });
    let report = fserver::in_process(&options, &volume, &logs).run(1, |_| ()).unwrap();
    let of = |name: &str, metric| report.cases[0].of(name).unwrap().medians[metric];
    assert!(Wake::WAYS.iter().all(|wake| of(wake.name(), "jobs_per_min") > 0.0));
    assert!(of("handoff", "waits_per_job") > 0.0, "the log is too large for the test: {report:?}");
    assert_eq!(of("handoff", "wakes_per_grant"), 1.0);
    assert_eq!(of("barging", "wakes_per_grant"), 1.0);
    let host = tempfile::tempdir().unwrap();
    let targets = [Target::on(host.path(), None).unwrap()];
    let options = fserver::Options { fsync_each: true, time: Duration::from_millis(50), ..options };
    let report = fserver::on_targets(&options, &targets).run(1, |_| ()).unwrap();
    assert!(report.cases[0].variants[0].medians["jobs_per_min"] > 0.0);
}

#[test]
fn create_times_every_file() {
    let volume =
        VolumeOptions { capacity: 1 << 30, log_size: Some(1 << 20), ..VolumeOptions::default() };
    let options = create::Options { files: 4000, size: 11, threads: 2, readers: 1 };
    let report = create::bench(&options, &[TurnTarget::NewVolume(volume)]).run(1, |_| ()).unwrap();
    let of = |metric| report.cases[0].of("in process").unwrap().medians[metric];
    assert!(of("checkpoints") > 0.0 && of("read_max_ms") > 0.0 && of("p999_ms") >= of("p99_ms"));
}

#[test]
fn transactions_go_several_times_round_a_small_log() {
    let options = transactions::Options {
        threads: 2,
        keys: 5000,
        bytes: 100,
        log_size: 1 << 20,
        commit_interval: Duration::from_millis(5),
        time: Duration::from_millis(300),
    };
    let report = transactions::bench(&options, &device()).run(1, |_| ()).unwrap();
    let of = |metric| report.cases[0].of("journal").unwrap().medians[metric];
    assert!(
        of("transactions_per_s") > 1000.0 && of("log_bytes") > 0.0 && of("checkpoints") > 0.0,
        "{report:?}"
    );
    let small = transactions::Options { log_size: 4096, ..options };
    assert!(transactions::bench(&small, &device()).run(1, |_| ()).is_err());
}

#[test]
fn fsync_happy_shares_flushes_in_real_time() {
    let options = real::Options {
        policy: vec![FlushPolicy::Each, FlushPolicy::Adaptive],
        callers: vec![1, 4],
        time: Duration::from_millis(60),
        think_time: Duration::ZERO,
        jitter: Duration::from_micros(50),
    };
    let report = real::in_process(&options, &[device()]).run(2, |_| ()).unwrap();
    let shared = |case: usize, policy| {
        report.cases[case].of(policy).unwrap().values["fsyncs_per_flush"].clone()
    };
    // The journal's own thread may have committed something once besides.
    for alone in [shared(0, "each"), shared(0, "adaptive"), shared(1, "each")] {
        assert!(alone.iter().all(|shared| (0.8..=1.0).contains(shared)), "{report:?}");
    }
    assert!(shared(1, "adaptive").iter().all(|shared| *shared > 1.0), "{report:?}");
    assert_eq!(report.cases[1].reference, "adaptive");
    let host = tempfile::tempdir().unwrap();
    let targets = [Target::on(host.path(), None).unwrap()];
    let report = real::on_targets(&options, &targets).unwrap().run(2, |_| ()).unwrap();
    assert_eq!(report.cases[1].variants.len(), 1, "no policies where no FerryFS is");
    assert!(real::verdict(&report).is_empty());
}

#[test]
fn log_space_is_served_in_every_way() {
    let options = log_space::Options {
        waiters: vec![48],
        wake: Wake::WAYS.into(),
        log_size: 256 << 10,
        time: Duration::from_millis(200),
    };
    let report = log_space::bench(&options).unwrap().run(1, |_| ()).unwrap();
    let of = |wake: Wake, metric| report.cases[0].of(wake.name()).unwrap().medians[metric];
    for wake in Wake::WAYS {
        assert!(of(wake, "ops_per_s") > 0.0 && of(wake, "waits_per_op") > 0.0, "{report:?}");
        assert_eq!(of(wake, "wakes_per_grant") == 1.0, wake.grants(), "{report:?}");
        assert_eq!(of(wake, "barges_per_op") > 0.0, !wake.is_strict(), "{report:?}");
    }
    let small = log_space::Options { log_size: 16 << 10, ..options };
    assert!(log_space::bench(&small).is_err());
}
