//! `ferry profile`: where the time of a mount's requests goes.

use super::*;
use std::fs::{self, File};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;

/// Takes a profile of a second while files are made and synced.
fn profile_of_syncs(mnt: &Path, more: &[&str]) -> Output {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0_u64.. {
                if done.load(Ordering::Relaxed) {
                    return;
                }
                let name = mnt.join(format!("file-{}", number % 100));
                let mut file = File::create(name).expect("it fits");
                file.write_all(b"contents").expect("it fits");
                file.sync_all().expect("the device works");
            }
        });
        let output = ferry(&[&["profile", path(mnt), "--seconds", "1"], more].concat());
        done.store(true, Ordering::Relaxed);
        output
    })
}

fn number(of: &Value, key: &str) -> u64 {
    of[key].as_u64().unwrap_or_else(|| panic!("{key}: {of}"))
}

#[test]
fn a_profile_says_that_syncs_wait_for_the_device() {
    let fixture = TestVolume::new();
    fixture.mount();
    let (folded, svg) = (fixture.0.path().join("folded"), fixture.0.path().join("profile.svg"));
    let files = ["--json", "--folded", path(&folded), "--svg", path(&svg)];
    let output = profile_of_syncs(&fixture.mnt(), &files);
    ok(&output);
    let profile: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let (time, samples) = (number(&profile, "time_ns"), number(&profile, "samples"));
    assert!(time >= 1_000_000_000 && samples > 0, "{profile}");
    // One program syncs, so at most one request is under way at each look.
    let stacks = profile["stacks"].as_array().expect("a list");
    let of = |operation: &str, layer: &str| -> u64 {
        let wanted = stacks.iter().filter(|one| one["operation"] == operation);
        let layers = |one: &Value| one["layers"].as_array().cloned().unwrap_or_default();
        let wanted = wanted.filter(|one| layers(one).contains(&layer.into()));
        wanted.map(|one| number(one, "count")).sum()
    };
    let waits = of("fsync", "commit");
    assert!(waits > 0 && waits <= samples, "{waits} of {samples}: {profile}");
    let made = &profile["requests"];
    assert!(number(made, "fsync") > 0 && number(made, "write") > 0, "{profile}");
    let stacks = fs::read_to_string(&folded).expect("it was written");
    let counts = stacks.lines().map(|line| line.rsplit_once(' ').expect("a stack and its count"));
    let seen: u64 = counts.map(|(_, count)| count.parse::<u64>().expect("a count")).sum();
    let all = profile["stacks"].as_array().expect("a list").iter();
    assert_eq!(seen, all.map(|one| number(one, "count")).sum::<u64>(), "{stacks}");
    let drawn = fs::read_to_string(&svg).expect("it was written");
    assert!(drawn.starts_with("<svg ") && drawn.contains("<title>fsync: "), "{drawn}");
    ok(&ferry(&["umount", path(&fixture.mnt())]));
}

#[test]
fn a_profile_is_a_table_and_names_what_it_cannot_look_at() {
    let fixture = TestVolume::new();
    fixture.mount();
    let busy = profile_of_syncs(&fixture.mnt(), &[]);
    ok(&busy);
    let table = String::from_utf8_lossy(&busy.stdout);
    assert!(table.contains("\nfsync ") && table.contains("\n  commit "), "{table}");
    let nowhere = fixture.0.path().join("absent/profile.svg");
    fails(
        &ferry(&["profile", path(&fixture.mnt()), "--seconds", "1", "--svg", path(&nowhere)]),
        "cannot write",
    );
    ok(&ferry(&["umount", path(&fixture.mnt())]));
    fails(&ferry(&["profile", path(&fixture.mnt())]), "no FerryFS is mounted here");
}
