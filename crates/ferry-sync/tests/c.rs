//! The library as C sees it: the example is compiled against the header and linked with the static
//! library.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(output.status.success(), "{command:?}: {output:?}");
    output
}

/// The library, which cargo has built beside this test.
fn library() -> PathBuf {
    let test = std::env::current_exe().expect("a running test has a path");
    let deps = test.parent().expect("it lies in a directory");
    let library = deps.join("libferry_sync.a");
    assert!(library.exists(), "{} is not there", library.display());
    library
}

/// Compiles with strict warnings, and without GNU extensions.
fn compile(source: &Path, program: &Path) {
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    run(Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-I"])
        .args([&include, Path::new("-o"), program, source, &library()])
        .args(["-lpthread", "-ldl", "-lm"]));
}

#[test]
fn the_example_in_c_syncs_files() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let dir = TempDir::new().expect("a directory");
    let program = dir.path().join("sync");
    compile(&here.join("examples/sync.c"), &program);

    let files = ["one", "two"].map(|name| dir.path().join(name));
    files.iter().for_each(|file| std::fs::write(file, "x").expect("writable"));
    let said = run(Command::new(&program).args(&files).arg(dir.path().join("absent")));
    let said = String::from_utf8(said.stdout).expect("ASCII");
    let mut lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.remove(0), "1 of 3 failed");
    lines.sort_unstable();
    let ends =
        lines.iter().map(|line| line.rsplit('/').next().expect("a path")).collect::<Vec<_>>();
    assert_eq!(ends, ["absent: Bad file descriptor", "one: durable", "two: durable"]);
}

/// The library opens files of its own: none may be mistaken for a closed descriptor of the caller.
#[test]
fn each_descriptor_gets_the_error_of_its_own_fsync() {
    let text = r#"
#define _POSIX_C_SOURCE 200809L
#include "ferry_sync.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
static void done(void *context, size_t index, int err) { ((int *)context)[index] = err; }
int main(int argc, char **argv) {
    int pipe_ends[2], file = open(argv[argc - 1], O_RDWR | O_CREAT, 0600), closed = dup(file);
    if (pipe(pipe_ends) != 0)
        return 2;
    close(closed);
    int fds[] = {file, closed, -1, pipe_ends[0], file}, errs[5], later[5];
    ferry_sync_pending *pending;
    printf("%d failed\n", ferry_sync_files(fds, 5, errs, 0));
    if (ferry_sync_start(fds, 5, 0, done, later, &pending) != 0)
        return 3;
    printf("%d failed\n", ferry_sync_wait(pending));
    for (int i = 0; i < 5; i++) {
        int expected = fsync(fds[i]) == 0 ? 0 : errno;
        printf("%d %d %d\n", expected, errs[i], later[i]);
    }
    return 0;
}
"#;
    let dir = TempDir::new().expect("a directory");
    let (source, program) = (dir.path().join("each.c"), dir.path().join("each"));
    std::fs::write(&source, text).expect("writable");
    compile(&source, &program);
    let said = run(Command::new(&program).arg(dir.path().join("file"))).stdout;
    let expected =
        [0, libc::EBADF, libc::EBADF, libc::EINVAL, 0].map(|e| format!("{e} {e} {e}\n")).concat();
    assert_eq!(
        String::from_utf8(said).expect("ASCII"),
        "3 failed\n3 failed\n".to_owned() + &expected
    );
}

#[test]
fn the_header_and_the_library_agree_on_the_ioctl() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let dir = TempDir::new().expect("a directory");
    let source = dir.path().join("number.c");
    let program = dir.path().join("number");
    let text = "#include <stdio.h>\n#include \"ferry_sync.h\"\nint main(void) { printf(\"%lu\", (unsigned long)FERRY_SYNC_FILES); }\n";
    std::fs::write(&source, text).expect("writable");
    run(Command::new("cc")
        .arg("-I")
        .arg(here.join("include"))
        .arg("-o")
        .arg(&program)
        .arg(&source));
    assert_eq!(
        run(&mut Command::new(&program)).stdout,
        ferry_sync::SYNC_FILES.to_string().as_bytes()
    );
}
