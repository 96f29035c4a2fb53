//! The library as C sees it: the example is compiled against the header and linked with the static library.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(output.status.success(), "{command:?}: {output:?}");
    output
}

/// The library, which cargo has built for this test, beside it.
fn library() -> PathBuf {
    let test = std::env::current_exe().expect("a running test has a path");
    let deps = test.parent().expect("it lies in a directory");
    let library = deps.join("libferry_sync.a");
    assert!(library.exists(), "{} is not there", library.display());
    library
}

#[test]
fn the_example_in_c_syncs_files() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let dir = TempDir::new().expect("a directory");
    let program = dir.path().join("sync");
    run(Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-I"])
        .args([&here.join("include"), Path::new("-o"), &program, &here.join("examples/sync.c")])
        .arg(library())
        .args(["-lpthread", "-ldl", "-lm"]));

    let files = ["one", "two"].map(|name| dir.path().join(name));
    files.iter().for_each(|file| std::fs::write(file, "x").expect("writable"));
    let said = run(Command::new(&program).args(&files).arg(dir.path().join("absent")));
    let said = String::from_utf8(said.stdout).expect("ASCII");
    let mut lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.remove(0), "1 of 3 failed");
    lines.sort_unstable();
    let ends = lines.iter().map(|line| line.rsplit('/').next().expect("a path")).collect::<Vec<_>>();
    assert_eq!(ends, ["absent: Bad file descriptor", "one: durable", "two: durable"]);
}

#[test]
fn the_header_and_the_library_agree_on_the_ioctl() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let dir = TempDir::new().expect("a directory");
    let source = dir.path().join("number.c");
    let program = dir.path().join("number");
    let text = "#include <stdio.h>\n#include \"ferry_sync.h\"\nint main(void) { printf(\"%lu\", (unsigned long)FERRY_SYNC_FILES); }\n";
    std::fs::write(&source, text).expect("writable");
    run(Command::new("cc").arg("-I").arg(here.join("include")).arg("-o").arg(&program).arg(&source));
    assert_eq!(run(&mut Command::new(&program)).stdout, ferry_sync::SYNC_FILES.to_string().as_bytes());
}
