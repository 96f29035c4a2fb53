//! The `ferry` command.

mod memory;

use std::process::ExitCode;

fn main() -> ExitCode {
    ferry::command::main()
}
