//! `ferry dashboard`: a page for a browser that shows the mounts and servers of this machine. It
//! is only read. This process asks the daemons as `ferry list` does and records the last hour; the
//! page fetches what it lacks, derives rates and draws. If a person asks which directories take the
//! space, this process asks the daemon as `ferry space` does. All of the page is in this program.
//!
//! A browser runs pages of strangers too, and all users of this machine reach a TCP port. So over
//! TCP the figures need a token, and the `Host` header must be the address: the name of a stranger
//! that resolves to this machine is refused.

mod maps;
mod record;

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;

use ferry_env::{Entropy, Env};
use parking_lot::Mutex;
use rustix::fs::Mode;
use rustix::process::umask;

use crate::cli::DashboardArgs;
use crate::control::print;
use crate::error::CliError;
use crate::http::{Request, Response};
use crate::list;
use crate::listen::Address;
use crate::waiting::{stop_on_signals_or_end, wait};

use maps::Maps;
use record::{INTERVAL, Record};

/// The permissions that new files lack: a socket is for its owner alone.
const UMASK: Mode = Mode::from_raw_mode(0o177);
/// The page loads nothing from elsewhere, runs no inline script, and is in no frame.
const HEADERS: &str = "\
Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n\
X-Content-Type-Options: nosniff\r\n\
Referrer-Policy: no-referrer\r\n\
Cross-Origin-Resource-Policy: same-origin\r\n\
Cache-Control: no-store\r\n";

/// Where the figures are, beside the files of the page.
const DATA: &str = "/data.json";
/// Where the directories are that take the space of a source.
const MAP: &str = "/map.json";
/// The header that begins or stops a count. A page from elsewhere cannot send it.
const ORDER: &str = "Ferry-Map";

/// The files of the page: the path, the type and the contents.
const FILES: [(&str, &str, &str); 3] = [
    ("/", "text/html; charset=utf-8", include_str!("dashboard/index.html")),
    ("/app.js", "text/javascript; charset=utf-8", include_str!("dashboard/app.js")),
    ("/style.css", "text/css; charset=utf-8", include_str!("dashboard/style.css")),
];

/// Runs the command, until a signal ends it.
pub fn run(args: &DashboardArgs) -> Result<(), CliError> {
    must_be_private(&args.listen)?;
    let stop = stop_on_signals_or_end()?;
    umask(UMASK);
    let bound = args.listen.bind("--listen ")?;
    let env = Env::real();
    let (door, address) = match args.listen {
        Address::Tcp(_) => {
            let door = Door::new(bound.address(), &*env.entropy);
            let address = format!("http://{}/#token={}", bound.address(), door.token);
            (Some(door), address)
        }
        Address::Unix(_) => (None, bound.address().to_owned()),
    };
    let record = Arc::new(Mutex::new(Record::new(env.entropy.next_u64(), !args.no_map)));
    let read = record.clone();
    let clock = env.clock.clone();
    let (maps, with_maps) = (Maps::new(), !args.no_map);
    let map = move |source: u64, order: Option<&str>| {
        match order {
            Some("begin") => read.lock().daemon(source).map(|daemon| maps.begin(source, daemon))?,
            Some("stop") => maps.stop(source),
            _ => {}
        }
        Some(maps.look(source).to_string())
    };
    let read = record.clone();
    let pages = move |request: &Request<'_>| {
        let data = |since| read.lock().json(clock.monotonic(), since);
        answer(request, door.as_ref(), data, |source, order| {
            map(source, order).filter(|_| with_maps)
        })
    };
    let _endpoint = bound.serve("ferry-dashboard", pages)?;
    print(&format!("the dashboard is at {address}\n"))?;
    loop {
        // The lock is not held while the daemons are asked.
        let found = list::found()?;
        record.lock().add(env.clock.monotonic(), found);
        if !wait(INTERVAL, &stop) {
            return Ok(());
        }
    }
}

/// Refuses an address that other machines reach: nothing is encrypted.
fn must_be_private(address: &Address) -> Result<(), CliError> {
    let Address::Tcp(text) = address else { return Ok(()) };
    let mut resolved = text
        .to_socket_addrs()
        .map_err(|error| CliError::Failed(format!("--listen {text}: no such address: {error}")))?;
    match resolved.all(|address| address.ip().is_loopback()) {
        true => Ok(()),
        false => Err(CliError::Usage(format!(
            "--listen {text}: other machines reach this address, and nothing is encrypted. Listen at 127.0.0.1, and put a proxy with TLS \
             in front of it"
        ))),
    }
}

/// Which requests over TCP are answered.
struct Door {
    /// The names of the address that the `Host` header may have.
    hosts: Vec<String>,
    /// What a request for figures must have.
    token: String,
}

impl Door {
    fn new(address: &str, entropy: &dyn Entropy) -> Self {
        let mut hosts = vec![address.to_owned()];
        if let Ok(address) = address.parse::<SocketAddr>() {
            hosts.push(format!("localhost:{}", address.port()));
        }
        // A browser leaves out the port of HTTP.
        let short = hosts.iter().filter_map(|host| host.strip_suffix(":80")).map(str::to_owned);
        hosts.extend(short.collect::<Vec<_>>());
        let token = format!("{:016x}{:016x}", entropy.next_u64(), entropy.next_u64());
        Self { hosts, token }
    }

    fn is_meant(&self, request: &Request<'_>) -> bool {
        let host = request.header("Host");
        host.is_some_and(|host| self.hosts.iter().any(|own| own.eq_ignore_ascii_case(host)))
    }

    fn has_token(&self, request: &Request<'_>) -> bool {
        let given = request.header("Authorization").and_then(|value| value.strip_prefix("Bearer "));
        given.is_some_and(|given| are_equal(given.as_bytes(), self.token.as_bytes()))
    }
}

/// Compares in a time that does not depend on where they differ.
fn are_equal(given: &[u8], secret: &[u8]) -> bool {
    let differs = |all, (a, b): (&u8, &u8)| all | (a ^ b);
    given.len() == secret.len() && given.iter().zip(secret).fold(0, differs) == 0
}

/// `data`: the figures in JSON since a number that the page gives. `map`: the directories of a
/// source in JSON, by its number, and an order; `None`: there is no such source.
fn answer(
    request: &Request<'_>,
    door: Option<&Door>,
    data: impl Fn(u64) -> String,
    map: impl Fn(u64, Option<&str>) -> Option<String>,
) -> Response {
    let refused = |status, why| Response { headers: HEADERS, ..Response::refusal(status, why) };
    let page =
        |content_type, body| Response { status: "200 OK", content_type, headers: HEADERS, body };
    if door.is_some_and(|door| !door.is_meant(request)) {
        return refused("421 Misdirected Request", "this is not the host that is served here");
    }
    let file = FILES.iter().find(|(path, ..)| *path == request.path);
    if let Some((_, content_type, text)) = file {
        return page(content_type, (*text).to_owned());
    }
    if ![DATA, MAP].contains(&request.path) {
        return refused("404 Not Found", "the page is at /");
    }
    if door.is_some_and(|door| !door.has_token(request)) {
        let why = "the address that `ferry dashboard` has printed has the token";
        return refused("401 Unauthorized", why);
    }
    if request.path == MAP {
        let source = request.query.strip_prefix("source=").and_then(|number| number.parse().ok());
        return match source.and_then(|source| map(source, request.header(ORDER))) {
            Some(map) => page("application/json", map),
            None => refused("404 Not Found", "there is no map of this"),
        };
    }
    let since = request.query.strip_prefix("since=").and_then(|number| number.parse().ok());
    page("application/json", data(since.unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn door() -> Door {
        Door::new("127.0.0.1:9821", &*Env::real().entropy)
    }

    fn asked(door: Option<&Door>, target: &str, headers: &[(&str, &str)]) -> (String, String) {
        let map = |source: u64, order: Option<&str>| {
            (source < 9).then(|| format!("map {source} {}", order.unwrap_or("-")))
        };
        let data = |since| format!("since {since}");
        let answer = answer(&Request::of(target, headers), door, data, map);
        assert_eq!(answer.headers, HEADERS, "{target}");
        (answer.status[..3].to_owned(), answer.body)
    }

    #[test]
    fn the_files_need_no_token_and_the_figures_do() {
        let door = door();
        let host = ("Host", "127.0.0.1:9821");
        let status = |target: &str, given: &str| {
            asked(Some(&door), target, &[host, ("Authorization", given)]).0
        };
        for (path, _, _) in FILES {
            assert_eq!(asked(Some(&door), path, &[host]).0, "200");
        }
        for path in ["/index.html", "/data.json/", "//", "/../app.js", "*"] {
            assert_eq!(asked(Some(&door), path, &[host]).0, "404", "{path}");
        }
        let token = &door.token;
        assert_eq!(status("/data.json", &format!("Bearer {token}")), "200");
        let query = format!("/data.json?token={token}");
        assert_eq!(status(&query, ""), "401", "an address is in logs and histories");
        let shorter = &token[1..];
        for given in ["", "Bearer", "Bearer ", "Basic x", token, &format!("Bearer {shorter}")] {
            assert_eq!(status("/data.json", given), "401", "{given}");
        }
        let twice = ("Authorization", &*format!("Bearer {token}"));
        assert_eq!(asked(Some(&door), "/data.json", &[host, twice, twice]).0, "401");
        assert_eq!(status("/map.json?source=1", &format!("Bearer {token}")), "200");
        assert_eq!(status("/map.json?source=1", "Bearer"), "401", "it has names");
        assert_ne!(*token, super::tests::door().token);
        assert_eq!(token.len(), 32);
    }

    #[test]
    fn only_the_own_host_is_served() {
        let door = door();
        let status = |host: &str| asked(Some(&door), "/", &[("Host", host)]).0;
        assert_eq!(status("127.0.0.1:9821"), "200");
        assert_eq!(status("LocalHost:9821"), "200");
        for host in ["evil.example:9821", "127.0.0.1", "localhost", "127.0.0.1:80", ""] {
            assert_eq!(status(host), "421", "{host}");
        }
        assert_eq!(asked(Some(&door), "/", &[]).0, "421");
        let at_80 = Door::new("[::1]:80", &*Env::real().entropy);
        for host in ["[::1]", "[::1]:80", "localhost"] {
            assert_eq!(asked(Some(&at_80), "/", &[("Host", host)]).0, "200", "{host}");
        }
    }

    #[test]
    fn a_unix_socket_needs_neither_host_nor_token() {
        assert_eq!(asked(None, "/data.json?since=7", &[]), ("200".into(), "since 7".into()));
        for query in ["", "?", "?since=", "?since=-1", "?since=a"] {
            let answer = asked(None, &format!("/data.json{query}"), &[("Host", "a")]);
            assert_eq!(answer, ("200".into(), "since 0".into()), "{query}");
        }
    }

    #[test]
    fn a_map_is_begun_by_a_header_alone() {
        let map = |target: &str, headers: &[(&str, &str)]| asked(None, target, headers);
        assert_eq!(map("/map.json?source=7", &[]), ("200".into(), "map 7 -".into()));
        let begun = map("/map.json?source=7", &[(ORDER, "begin")]);
        assert_eq!(begun, ("200".into(), "map 7 begin".into()));
        for query in ["", "?source=9", "?source=a", "?source=1&begin=1"] {
            assert_eq!(map(&format!("/map.json{query}"), &[]).0, "404", "{query}");
        }
    }

    #[test]
    fn an_address_that_others_reach_is_refused() {
        let refusal = |text: &str| must_be_private(&text.parse().expect(text));
        for text in ["127.0.0.1:0", "[::1]:0", "127.8.8.8:1", "unix:/run/a"] {
            assert!(refusal(text).is_ok(), "{text}");
        }
        for text in ["0.0.0.0:1", "[::]:1", "192.0.2.1:1"] {
            let error = refusal(text).expect_err(text).to_string();
            assert!(error.contains("proxy with TLS"), "{error}");
        }
    }

    /// A browser loads only what the page names, and the policy allows nothing else.
    #[test]
    fn the_page_names_nothing_of_elsewhere() {
        for (path, _, text) in FILES {
            let namespace = "http://www.w3.org/2000/svg";
            let rest = text.replace(namespace, "");
            assert!(!rest.contains("//") || path == "/app.js", "{path}");
            assert!(!rest.contains("http:") && !rest.contains("https:"), "{path}");
            for danger in ["innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("] {
                assert!(!text.contains(danger), "{path}: {danger}");
            }
        }
    }
}
