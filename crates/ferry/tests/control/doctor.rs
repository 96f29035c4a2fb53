//! The doctor: what it says of a mount, and what its bundle has.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};

use rustix::process::{Signal, kill_process};
use serde_json::Value;

use super::{FERRY, Served, TestVolume, ferry, ok, path, stop};

/// The results of a doctor, by what was checked. The exit status is that of the worst.
fn results(output: &Output) -> BTreeMap<String, (String, Option<String>)> {
    let all: Vec<Value> = serde_json::from_slice(&output.stdout).expect("the results are JSON");
    let text = |check: &Value, key: &str| check[key].as_str().map(str::to_owned);
    let of = |check: &Value| {
        let result = text(check, "result").expect("it has a result");
        assert_eq!(result == "ok", check["advice"].is_null(), "{check}");
        (text(check, "check").expect("it has a name"), (result, text(check, "advice")))
    };
    let results: BTreeMap<_, _> = all.iter().map(of).collect();
    // Other tests have mounts, too, and stop their daemons.
    let bad = results.values().any(|(result, _)| result == "bad");
    assert_eq!(output.status.code(), Some(i32::from(bad)), "{output:?}");
    results
}

#[test]
fn a_mount_that_works_is_ok_and_so_is_its_host() {
    let fixture = TestVolume::new();
    fixture.mount();
    let results = results(&ferry(&["doctor", "--json"]));
    let result = |what: &str| results.get(what).unwrap_or_else(|| panic!("{what}: {results:?}"));
    assert_eq!(result(&format!("mount {}", path(&fixture.mnt()))).0, "ok");
    assert_eq!(result(&format!("space of volume {}", path(&fixture.volume()))).0, "ok");
    assert_eq!(result("/dev/fuse").0, "ok", "there is a mount");
    for what in ["kernel", "FUSE over io_uring", "open files", "memory", "clock"] {
        assert_ne!(result(what).0, "bad");
    }
    let said = ferry(&["doctor"]);
    let said = String::from_utf8_lossy(&said.stdout);
    assert!(said.starts_with("check ") && said.contains("open files"), "{said}");
    ok(&ferry(&["umount", path(&fixture.mnt())]));
}

#[test]
fn a_daemon_that_hangs_is_bad_and_does_not_hang_the_doctor() {
    let fixture = TestVolume::new();
    fixture.mount();
    let daemon = fixture.daemon();
    stop(daemon);
    let bundle = fixture.0.path().join("report.tar.gz");
    // A doctor that hangs is killed, and prints nothing.
    let said = ferry(&["doctor", "--json", "--bundle", path(&bundle)]);
    kill_process(daemon, Signal::CONT).expect("it is ours");
    let results = results(&said);
    let (result, advice) = &results[&format!("mount {}", path(&fixture.mnt()))];
    assert_eq!(result, "bad");
    let advice = advice.as_ref().expect("what to do");
    assert!(advice.contains(&format!("kill -CONT {}", daemon.as_raw_nonzero())), "{advice}");
    let files = unpacked(&bundle);
    let (number, _) = ours(&files, &fixture);
    assert!(files[&format!("stats/mount-{number}.json")].contains("does not answer"), "{files:?}");
    assert!(files[&format!("log/mount-{number}.txt")].contains("mounted"), "{files:?}");
    ok(&ferry(&["umount", path(&fixture.mnt())]));
}

/// The files of a bundle by their names.
fn unpacked(bundle: &std::path::Path) -> BTreeMap<String, String> {
    let file = File::open(bundle).expect("it was made");
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(file));
    let read = |entry: std::io::Result<tar::Entry<'_, _>>| {
        let mut entry = entry.expect("an entry");
        let name = entry.path().expect("UTF-8").strip_prefix("ferry-doctor").map(|p| p.to_owned());
        let mut text = String::new();
        entry.read_to_string(&mut text).expect("text");
        (path(&name.expect("all is in one directory")).to_owned(), text)
    };
    archive.entries().expect("an archive").map(read).collect()
}

/// The number of the fixture's mount in a bundle, and the list that has it.
fn ours(files: &BTreeMap<String, String>, fixture: &TestVolume) -> (usize, Vec<Value>) {
    let list: Vec<Value> = serde_json::from_str(&files["list.json"]).expect("JSON");
    let number = list.iter().position(|one| one["at"] == path(&fixture.mnt()));
    (number.expect("the mount is listed"), list)
}

#[test]
fn a_bundle_has_what_a_report_needs_and_no_secrets() {
    let fixture = TestVolume::new();
    fixture.mount();
    let server_volume = TestVolume::new();
    let server = Served::new(&server_volume.volume());
    fs::create_dir(fixture.mnt().join("wedding")).expect("it fits");
    fs::write(fixture.mnt().join("wedding/photo.jpg"), "x").expect("it fits");
    let log = fixture.0.path().join("log");
    let mut log = OpenOptions::new().append(true).open(log).expect("the daemon has made it");
    let planted = "\
2026-01-01T00:00:00.000000Z ERROR ferry: the key is AKIAIOSFODNN7EXAMPLE\n\
2026-01-01T00:00:00.000000Z ERROR ferry: wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY was refused\n\
2026-01-01T00:00:00.000000Z  WARN ferry: GET https://user:hunter2@store.example/b?X-Amz-Signature=hunter3\n\
2026-01-01T00:00:00.000000Z  WARN ferry: Authorization: Basic hunter4\n\
2026-01-01T00:00:00.000000Z  WARN ferry: passphrase=hunter5\n\
2026-01-01T00:00:00.000000Z ERROR ferry: data is damaged inode=7 name=\"photo.jpg\" offset=0\n\
2026-01-01T00:00:00.000000Z ERROR ferry: /wedding/photo.jpg cannot be read\n\
2026-01-01T00:00:00.000000Z DEBUG ferry: lookup photo.jpg\n\
2026-01-01T00:00:00.000000Z  INFO ferry: the end\n";
    log.write_all(planted.as_bytes()).expect("it fits");
    let bundle = fixture.0.path().join("report.tar.gz");
    let made = Command::new("timeout")
        .args(["--signal=KILL", "60", FERRY, "doctor", "--json", "--bundle", path(&bundle)])
        .env("AWS_SECRET_ACCESS_KEY", "hunter6")
        .env("FERRY_PASSPHRASE_FILE", "/hunter7")
        .env("HUNTER", "hunter8")
        .output()
        .expect("the command runs");
    let checked = results(&made);
    let mode = fs::metadata(&bundle).expect("it was made").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let files = unpacked(&bundle);
    for (name, text) in &files {
        for secret in ["AKIA", "wJalr", "MDENG", "hunter", "wedding", "photo"] {
            assert!(!text.contains(secret), "{secret} in {name}: {text}");
        }
    }
    let (number, list) = ours(&files, &fixture);
    let log = &files[&format!("log/mount-{number}.txt")];
    assert!(log.contains("mounted volume=") && log.contains("INFO ferry: the end"), "{log}");
    assert!(log.contains("https://<removed>@store.example"), "{log}");
    let stats = |name: String| -> Value { serde_json::from_str(&files[&name]).expect("JSON") };
    assert!(stats(format!("stats/mount-{number}.json"))["log"]["bytes"].is_u64());
    let server = list.iter().position(|one| one["at"] == server.1.as_str());
    let server = server.expect("the server is listed");
    assert_eq!(stats(format!("stats/server-{server}.json"))["server"]["sessions"], 0);
    assert!(files["mounts.txt"].contains(path(&fixture.mnt())), "{files:?}");
    let checks: Vec<Value> = serde_json::from_str(&files["checks.json"]).expect("JSON");
    assert_eq!(checks.len(), checked.len());
    let system: Value = serde_json::from_str(&files["system.json"]).expect("JSON");
    assert!(system["cpus"].as_u64() > Some(0) && system["memory_bytes"].as_u64() > Some(0));
    assert_eq!(system["ferry"], env!("CARGO_PKG_VERSION"));
    ok(&ferry(&["umount", path(&fixture.mnt())]));
}

#[test]
fn a_bundle_overwrites_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let (file, link) = (dir.path().join("report.tar.gz"), dir.path().join("link"));
    fs::write(&file, "mine").expect("it fits");
    std::os::unix::fs::symlink(dir.path().join("absent"), &link).expect("it fits");
    for taken in [&file, &link] {
        let said = ferry(&["doctor", "--bundle", path(taken)]);
        let error = String::from_utf8_lossy(&said.stderr);
        assert!(said.status.code() == Some(1) && error.contains("name another file"), "{said:?}");
        assert!(said.stdout.is_empty(), "{said:?}");
    }
    assert_eq!(fs::read(&file).expect("it is left"), b"mine");
    assert!(!dir.path().join("absent").exists());
}

#[test]
fn another_users_mount_is_a_note_and_not_bad() {
    use std::os::unix::process::CommandExt;
    let fixture = TestVolume::new();
    fixture.mount();
    let closed = fs::Permissions::from_mode(0o700);
    fs::set_permissions(fixture.0.path(), closed).expect("the directory is ours");
    let mut doctor = Command::new(FERRY);
    let said = doctor.args(["doctor", "--json"]).uid(65534).gid(65534).output();
    let results = results(&said.expect("the command runs"));
    let (mount, volume) = (fixture.mnt(), fixture.volume());
    for what in [format!("mount {}", path(&mount)), format!("space of volume {}", path(&volume))] {
        assert_eq!(results[&what].0, "note", "{what}: {results:?}");
    }
    ok(&ferry(&["umount", path(&fixture.mnt())]));
}
