//! `ferry completions` and `ferry man`: what packages install beside the program, made of the
//! definition of the command line.

use std::fs;

use clap::CommandFactory;
use clap_complete::{generate, shells};

use crate::cli::{Cli, CompletionsArgs, ManArgs, Shell};
use crate::control::print;
use crate::error::CliError;

/// Prints the completions of one shell.
pub fn completions(args: &CompletionsArgs) -> Result<(), CliError> {
    let (mut command, mut text) = (Cli::command(), Vec::new());
    match args.shell {
        Shell::Bash => generate(shells::Bash, &mut command, "ferry", &mut text),
        Shell::Zsh => generate(shells::Zsh, &mut command, "ferry", &mut text),
        Shell::Fish => generate(shells::Fish, &mut command, "ferry", &mut text),
    }
    print(&String::from_utf8_lossy(&text))
}

/// Writes a manual page for each command, and one for all.
pub fn man(args: &ManArgs) -> Result<(), CliError> {
    let dir = &args.dir;
    fs::create_dir_all(dir).map_err(CliError::path(dir, "cannot be made"))?;
    clap_mangen::generate_to(Cli::command(), dir)
        .map_err(CliError::path(dir, "cannot hold the manual pages"))
}
