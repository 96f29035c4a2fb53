//! Whatever a volume's bytes are: check, mount and work on it end, without a panic and in bounded
//! memory.

use std::process::Command;

/// Seeds that once failed, each with options behind it.
const CORPUS: &str = include_str!("../fuzz_corpus.txt");
/// Seeds of a run.
const SEEDS: &str = "2500";
/// Seconds of a run on seeds that are always the same; there are two.
const SECONDS: &str = if cfg!(debug_assertions) { "10" } else { "30" };

fn fuzz(arguments: &[&str]) {
    let output = Command::new(env!("CARGO_BIN_EXE_fuzz"))
        .args(arguments)
        .output()
        .expect("the program is there");
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "fuzz {arguments:?}:\n{out}\n{err}");
    println!("{out}");
}

#[test]
fn no_damage_causes_a_panic_a_hang_or_unbounded_memory() {
    for options in [&[][..], &["--home"]] {
        fuzz(&[&["--seconds", SECONDS, "--count", SEEDS, "--seed", "1"], options].concat());
    }
}

#[test]
fn volumes_that_failed_once_pass() {
    for line in CORPUS.lines() {
        let options = line.split('#').next().unwrap_or_default().split_whitespace();
        fuzz(&std::iter::once("--one").chain(options).collect::<Vec<_>>());
    }
}
