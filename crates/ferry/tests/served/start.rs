//! The start of a server, for all tests that run one.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

/// Starts `ferry serve` on this volume, at this address or one with a free port; returns the
/// address, too. `ferry` is the program, with what else its process needs.
pub fn start_server(
    ferry: &mut Command,
    volume: &str,
    listen: &str,
    grace: &str,
) -> (Child, String) {
    let mut server = ferry
        .args(["serve", volume, "--listen", listen, "--insecure", "--grace", grace])
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("the command runs");
    let mut said = BufReader::new(server.stderr.take().expect("it is piped"));
    let mut log = String::new();
    let address = loop {
        let mut line = String::new();
        assert_ne!(said.read_line(&mut line).expect("readable"), 0, "it ended: {log}");
        if let Some((_, rest)) = line.split_once("address=") {
            break rest.split_whitespace().next().expect("an address").to_owned();
        }
        log.push_str(&line);
    };
    // Its log must go on somewhere.
    std::thread::spawn(move || std::io::copy(&mut said, &mut std::io::sink()));
    (server, address)
}
