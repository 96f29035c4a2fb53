//! `ferry bench transactions`: the journal alone.

use ferry_bench::transactions;

use crate::args::TransactionsArgs;
use crate::show;
use ferry::command::shared::{CliError, format_bytes};

/// In process, each turn on a new journal.
pub fn run(args: &TransactionsArgs) -> Result<(), CliError> {
    if !args.run.on.is_empty() {
        return Err(CliError::Usage(
            "transactions are the journal's alone: there is nothing to run --on a path".into(),
        ));
    }
    let options = transactions::Options {
        threads: args.threads,
        keys: args.keys,
        bytes: usize::from(args.bytes),
        log_size: args.log_size,
        commit_interval: args.commit_interval,
        time: args.time,
        rounds: args.run.rounds,
    };
    let mut bench = transactions::bench(&options, &args.model.device());
    bench.options.push(("device", args.model.to_string()));
    bench.options.push(("log", format_bytes(args.log_size)));
    show(bench, &args.run, |_| Vec::new())
}
