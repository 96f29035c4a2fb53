//! `ferry bench` on real mounts (these need root and /dev/fuse).

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use serde_json::Value;
use tempfile::TempDir;

/// `ferry`, which runs `ferry-bench` from its own directory. `cargo test --workspace` has built it;
/// cargo builds it here if it tests this package alone and it is not there.
fn program() -> &'static Path {
    static FERRY: OnceLock<PathBuf> = OnceLock::new();
    FERRY.get_or_init(|| {
        let bench = Path::new(env!("CARGO_BIN_EXE_ferry-bench"));
        let ferry = bench.with_file_name("ferry");
        if !ferry.exists() {
            let release = bench.parent().is_some_and(|dir| dir.ends_with("release"));
            let built = Command::new(env!("CARGO"))
                .args(["build", "--quiet", "--package", "ferry"])
                .args(release.then_some("--release"))
                .status();
            assert!(built.is_ok_and(|status| status.success()), "ferry is built");
        }
        ferry
    })
}

fn path(path: &Path) -> &str {
    path.to_str().expect("a temporary directory's name is UTF-8")
}

fn ferry(args: &[&str]) -> Output {
    Command::new(program()).args(args).output().expect("the command runs")
}

fn ok(args: &[&str]) -> Vec<u8> {
    let output = ferry(args);
    assert!(output.status.success(), "{output:?}");
    output.stdout
}

fn json(args: &[&str]) -> Value {
    serde_json::from_slice(&ok(args)).expect("JSON")
}

fn is_empty(dir: &Path) -> bool {
    std::fs::read_dir(dir).expect("readable").next().is_none()
}

/// A FerryFS mount and a directory beside it, on the host's file system.
struct Targets {
    dir: TempDir,
}

impl Targets {
    fn new(options: &str) -> Self {
        let targets = Self { dir: TempDir::new().expect("a directory") };
        let (volume, log) = (targets.dir.path().join("volume"), targets.dir.path().join("log"));
        for dir in ["mnt", "host"] {
            std::fs::create_dir(targets.dir.path().join(dir)).expect("a directory");
        }
        ok(&["mkfs", path(&volume), "--size", "256M"]);
        let options = format!("{options},log={}", log.display());
        ok(&["mount", path(&volume), &targets.at("mnt"), "-o", &options]);
        targets
    }

    fn at(&self, name: &str) -> String {
        path(&self.dir.path().join(name)).to_owned()
    }
}

impl Drop for Targets {
    fn drop(&mut self) {
        ferry(&["umount", "--force", &self.at("mnt")]);
    }
}

#[test]
fn policies_take_turns_on_a_mount_and_the_first_one_is_back_at_the_end() {
    let targets = Targets::new("flush=gather");
    let (mnt, host, html) = (targets.at("mnt"), targets.at("host"), targets.at("report.html"));
    let line = [
        "bench",
        "fsync-happy",
        "--on",
        &mnt,
        "--on",
        &host,
        "--callers",
        "1,2",
        "--policy",
        "each,adaptive",
        "--time",
        "100ms",
        "--rounds",
        "2",
        "--json",
        "-",
        "--html",
        &html,
    ];
    let report = json(&line);
    let case = &report["cases"][1];
    assert_eq!(case["name"], "2 callers");
    let names: Vec<_> =
        case["variants"].as_array().expect("variants").iter().map(|v| v["name"].clone()).collect();
    assert_eq!(names, ["mnt each", "mnt adaptive", "host"]);
    assert_eq!(case["reference"], "mnt adaptive");
    for variant in case["variants"].as_array().expect("variants") {
        assert_eq!(
            variant["values"]["fsyncs_per_s"].as_array().map(Vec::len),
            Some(2),
            "{variant}"
        );
    }
    // What the other caller's flush has made durable needs none of its own; on a busy machine that
    // is more often so.
    let per_flush = case["variants"][0]["values"]["fsyncs_per_flush"].as_array().expect("values");
    let fewest = per_flush.iter().filter_map(Value::as_f64).fold(f64::INFINITY, f64::min);
    assert!(fewest < 1.5, "{per_flush:?}");
    assert!(std::fs::read_to_string(&html).expect("a report").contains("<svg"));
    assert_eq!(json(&["stats", &mnt, "--json"])["flush"]["policy"], "gather");
    assert!(is_empty(Path::new(&mnt)) && is_empty(Path::new(&host)), "nothing is left");
    ok(&["umount", &mnt]);
}

#[test]
fn files_are_counted_with_their_flushes_and_commits() {
    let targets = Targets::new("commit_interval=1h");
    let mnt = targets.at("mnt");
    let line = ["bench", "fsmark", "--on", &mnt, "--files", "40", "--rounds", "1", "--json"];
    let file = targets.at("report.json");
    let table = ok(&[&line[..], &[&file]].concat());
    assert!(String::from_utf8_lossy(&table).contains("sync 40 files made before"));
    let text = std::fs::read(&file).expect("a report");
    let report: Value = serde_json::from_slice(&text).expect("JSON");
    let variant = |case: usize, at: usize| &report["cases"][case]["variants"][at]["values"];
    assert_eq!(variant(0, 0)["flushes_per_file"][0], 0.0, "none");
    assert_eq!(variant(0, 1)["commits_per_file"][0], 1.0, "each");
    assert_eq!(variant(1, 0)["commits_per_file"][0], 1.0, "pass");
    // All files, and their directory by itself if the kernel asks so.
    assert!(variant(1, 1)["commits_per_file"][0].as_f64() <= Some(0.05), "{report}");
    assert_eq!(variant(1, 1)["dirty_bytes_per_file"][0], 4096.0);
    assert!(variant(1, 1)["cpu_us_per_file"][0].as_f64() > Some(0.0));
    ok(&["umount", &mnt]);
}

#[test]
fn an_interrupted_run_leaves_nothing() {
    let dir = TempDir::new().expect("a directory");
    let line = [
        "bench",
        "fsmark",
        "--on",
        path(dir.path()),
        "--files",
        "100",
        "--rounds",
        "100000",
        "--sync",
        "none",
    ];
    let bench = Command::new(program())
        .args(line)
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command runs");
    while is_empty(dir.path())
        || std::fs::read_dir(dir.path())
            .expect("readable")
            .flatten()
            .all(|own| is_empty(&own.path()))
    {
        std::thread::yield_now();
    }
    let killed =
        Command::new("kill").args(["-INT", &bench.id().to_string()]).status().expect("kill runs");
    assert!(killed.success());
    let output = bench.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "ferry: interrupted\n");
    assert!(is_empty(dir.path()), "nothing is left");
}

#[test]
fn the_bench_removes_its_own_mounts() {
    let dir = TempDir::new().expect("a directory");
    let (tree, tar, volumes) =
        (dir.path().join("tree"), dir.path().join("t.tar"), dir.path().join("volumes"));
    std::fs::create_dir_all(tree.join("below")).expect("a directory");
    std::fs::create_dir(&volumes).expect("a directory");
    std::fs::write(tree.join("below/file"), "contents").expect("a file");
    let packed = Command::new("tar").arg("-cf").arg(&tar).arg("-C").arg(&tree).arg(".").status();
    assert!(packed.expect("tar runs").success());
    let mounts =
        ["--rounds", "1", "--json", "-", "--rtt", "0us", "--local", "--volumes", path(&volumes)];
    let untar = json(&[&["bench", "untar", "--tar", path(&tar)][..], &mounts].concat());
    let create = json(&[&["bench", "create", "--shell", "--files", "20"][..], &mounts].concat());
    for (report, value, expected) in [(&untar, "entries", Some(2.0)), (&create, "create_s", None)] {
        let variants = report["cases"][0]["variants"].as_array().expect("variants");
        let ends = |n: usize, name: &str| {
            variants[n]["name"].as_str().is_some_and(|all| all.ends_with(name))
        };
        assert!(variants.len() == 2 && ends(0, "/local") && ends(1, "/rtt-0us"), "{report}");
        for variant in variants {
            let got = variant["values"][value][0].as_f64();
            assert!(got.is_some() && (expected.is_none() || got == expected), "{variant}");
        }
    }
    assert!(is_empty(&volumes), "nothing is left");
}

#[test]
fn impossible_options_are_refused_before_the_run() {
    let refused = |args: &[&str], code: i32, why: &str| {
        let output = ferry(&[&["bench", "fserver", "--rounds", "1"], args].concat());
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(why), "{output:?}");
    };
    refused(&["--time", "0"], 2, "nothing happens in no time");
    // Each would take an hour otherwise.
    refused(&["--time", "1h", "--json", "/nonexistent/report"], 1, "cannot write the report");
    refused(&["--time", "1h", "--html", "/nonexistent/report"], 1, "cannot write the report");
}

#[test]
fn ferry_says_what_to_do_if_the_benchmarks_are_not_beside_it() {
    let dir = TempDir::new().expect("a directory");
    let alone = dir.path().join("ferry");
    // This process must not write the copy: what another test starts meanwhile would have it open
    // for writing, too, and nobody could run it.
    let copied = Command::new("cp").arg(program()).arg(&alone).status().expect("cp runs");
    assert!(copied.success());
    let output = Command::new(&alone)
        .args(["bench", "fsmark", "--help"])
        .output()
        .expect("the command runs");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.starts_with(&format!("ferry: {}-bench: ", path(&alone))), "{said}");
    assert!(said.contains("`cargo build --release --package ferry-bench`"), "{said}");
}

#[test]
fn ferry_hands_help_and_options_over() {
    let help = ok(&["bench", "fsmark", "--help"]);
    assert_eq!(ok(&["help", "bench", "fsmark"]), help);
    assert!(String::from_utf8_lossy(&help).contains("Usage: ferry bench fsmark"), "{help:?}");
    let output = ferry(&["--log-level", "odd", "bench", "torn", "--reads", "1"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("log level \"odd\""), "{output:?}");
}

#[test]
fn the_virtual_bench_prints_each_cell() {
    let line = [
        "bench",
        "fsync-happy",
        "--virtual",
        "--flush-time",
        "2ms",
        "--callers",
        "1,4",
        "--json",
        "-",
    ];
    let cells = json(&line);
    assert_eq!(cells.as_array().map(Vec::len), Some(2));
    let policies = &cells[1]["policies"];
    assert_eq!(policies["adaptive"]["callers_per_flush"], 4.0);
    assert_eq!(policies["each"]["callers_per_flush"], 1.0);
    let table = ok(&line[..line.len() - 2]);
    assert_eq!(String::from_utf8_lossy(&table).lines().count(), 4, "two lines of heading");
}

#[test]
fn the_null_file_system_is_mounted_like_any_other() {
    let dir = TempDir::new().expect("a directory");
    let (mnt, log) = (dir.path().join("mnt"), dir.path().join("log"));
    std::fs::create_dir(&mnt).expect("a directory");
    ok(&["bench", "null", path(&mnt), "-o", &format!("log={}", log.display())]);
    std::fs::write(mnt.join("file"), "in memory").expect("writable");
    assert_eq!(std::fs::read(mnt.join("file")).expect("readable"), b"in memory");
    let again = ferry(&["bench", "null", path(&mnt)]);
    ok(&["umount", path(&mnt)]);
    assert_eq!(again.status.code(), Some(1), "{again:?}");
    assert!(
        String::from_utf8_lossy(&again.stderr).contains("is mounted here already"),
        "{again:?}"
    );
}

#[test]
fn the_null_file_system_refuses_the_mount_point_of_a_volume() {
    let targets = Targets::new("commit_interval=1h");
    let refused = ferry(&["bench", "null", &targets.at("mnt")]);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert!(
        String::from_utf8_lossy(&refused.stderr).contains("is mounted here already"),
        "{refused:?}"
    );
}
