//! What `ferry serve` refuses, and what it does when it panics.

mod panics;

use super::*;

#[test]
fn without_tls_an_address_is_served_only_if_that_was_asked_for() {
    for (address, exposed_to) in [
        ("127.0.0.1:0", "every user of this machine"),
        ("[::1]:0", "every user of this machine"),
        ("0.0.0.0:0", "everybody on the network"),
    ] {
        let ip = super::parse(address).expect("an address").ip();
        let said = allowed_plain(ip, false).expect_err(address).to_string();
        assert!(
            said.contains(exposed_to) && said.contains("--tls") && said.contains("--insecure"),
            "{said}"
        );
        assert!(allowed_plain(ip, true).is_ok());
    }
}
