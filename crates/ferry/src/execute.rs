//! A process with many threads becomes another program.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

static EXECUTES: AtomicBool = AtomicBool::new(false);

/// This process becomes another program. Returns only if that fails.
///
/// Meanwhile the kernel refuses new threads to the others (`EAGAIN`), and one that relies on them
/// panics. That must not end the process: [`is_under_way`] tells.
pub fn execute(mut command: Command) -> io::Error {
    EXECUTES.store(true, Ordering::SeqCst);
    command.exec()
}

/// Whether this process is about to become another program, with which all its threads end.
pub fn is_under_way() -> bool {
    EXECUTES.load(Ordering::SeqCst)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

    use super::*;
    use crate::logging;

    const TRIES: u32 = 200;
    const OWN: &str = "execute::tests::a_process_whose_threads_start_threads";

    /// Runs in a process of its own, which becomes `true`.
    #[test]
    #[ignore = "run by another test"]
    fn a_process_whose_threads_start_threads() {
        logging::log_panics();
        for _ in 0..4 {
            std::thread::spawn(|| {
                loop {
                    std::thread::spawn(|| ()).join().unwrap();
                }
            });
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
        panic!("{}", execute(Command::new("true")));
    }

    #[test]
    fn a_thread_that_cannot_start_another_one_does_not_end_a_process_that_becomes_another_program()
    {
        for number in 0..TRIES {
            let mut own = Command::new(std::env::current_exe().unwrap());
            let ended = own.args(["--ignored", "--exact", OWN]).output().unwrap();
            assert!(ended.status.success(), "try {number}: {ended:?}");
        }
    }
}
