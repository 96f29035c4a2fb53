//! The page that `ferry dashboard` serves, with a real mount.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use ferry_env::Env;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::metrics::{TIME_MAX, connect, exchange, free_address, write_files};
use super::{FERRY, TestVolume, fails, ferry, ok, path};

/// A dashboard that the test does not outlive, and the address that it has printed.
struct Dashboard(Child, String);

impl Dashboard {
    fn start(listen: &str) -> Self {
        let started = Command::new(FERRY)
            .args(["dashboard", "--listen", listen])
            .stdout(Stdio::piped())
            .spawn();
        let mut child = started.expect("the command runs");
        let mut line = String::new();
        let said = child.stdout.take().expect("it is piped");
        BufReader::new(said).read_line(&mut line).expect("readable");
        let address = line.trim().strip_prefix("the dashboard is at ");
        Self(child, address.unwrap_or_else(|| panic!("{line}")).to_owned())
    }

    /// Ends it as Ctrl-C does.
    fn end(mut self) {
        kill_process(Pid::from_child(&self.0), Signal::INT).expect("it is ours");
        assert!(self.0.wait().expect("it is ours").success());
    }
}

impl Drop for Dashboard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn get(target: &str, headers: &str) -> String {
    format!("GET {target} HTTP/1.1\r\n{headers}\r\n\r\n")
}

fn body(answer: &str) -> &str {
    let (head, body) = answer.split_once("\r\n\r\n").expect("headers and a body");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    body
}

/// What `ask` answers of a mount once it has as many samples.
fn when_sampled(fixture: &TestVolume, samples: usize, ask: impl Fn() -> String) -> (Value, Value) {
    let clock = Env::real().clock;
    let (_held, pause) = mpsc::channel::<()>();
    let end = clock.monotonic() + TIME_MAX;
    loop {
        let data: Value = serde_json::from_str(&ask()).expect("JSON");
        let mut sources = data["sources"].as_array().expect("mounts and servers").iter();
        let ours = sources.find(|source| source["at"] == path(&fixture.mnt())).cloned();
        match ours {
            Some(ours) if ours["samples"].as_array().is_some_and(|all| all.len() >= samples) => {
                return (data["columns"].clone(), ours);
            }
            _ => assert!(clock.monotonic() < end, "{data}"),
        }
        // The next samples are seconds away.
        let _ = pause.recv_timeout(Duration::from_millis(100));
    }
}

#[test]
fn the_figures_of_a_mount_grow_under_load_for_those_who_have_the_token() {
    let (fixture, address) = (TestVolume::new(), free_address());
    fixture.mount();
    let dashboard = Dashboard::start(&address);
    let token = dashboard.1.strip_prefix(&format!("http://{address}/#token=")).expect("a token");
    let asked =
        |target: &str, headers: &str| exchange(&mut connect(&address), &get(target, headers));
    let host = format!("Host: {address}");
    let with_token = format!("{host}\r\nAuthorization: Bearer {token}");
    let data = || body(&asked("/data.json?since=0", &with_token)).to_owned();
    let (columns, before) = when_sampled(&fixture, 1, data);
    assert_eq!((&before["state"], &before["level"]), (&"ok".into(), &"ok".into()));
    let before = before["samples"].as_array().map_or(0, Vec::len);
    write_files(&fixture, 0, 10);
    let (_, after) = when_sampled(&fixture, before + 2, data);
    let samples = after["samples"].as_array().expect("samples");
    let at = |name: &str| {
        1 + columns.as_array().expect("names").iter().position(|it| it == name).expect(name)
    };
    let grown = |name: &str| {
        let figure = |sample: &Value| sample[at(name)].as_u64().unwrap_or_default();
        figure(&samples[samples.len() - 1]) - figure(&samples[0])
    };
    assert!(grown("names") >= 10 && grown("syncs") >= 10, "{after}");
    assert!(grown("requests") >= 30 && grown("forces") >= 10 && grown("log_bytes") > 0, "{after}");
    assert_eq!(after["figures"]["inodes"]["used"], 11);

    let begins = |answer: &str, status: &str| {
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{answer}");
    };
    begins(&asked("/data.json", &host), "401");
    begins(&asked("/data.json", &format!("{host}\r\nAuthorization: Bearer {token}0")), "401");
    begins(&asked(&format!("/data.json?token={token}"), &host), "401");
    begins(&asked("/", "Host: files.example.org"), "421");
    begins(&asked("/data.json", &with_token.replace(&address, "files.example.org")), "421");
    begins(&asked("/index.html", &host), "404");
    for method in ["POST", "PUT", "DELETE", "OPTIONS"] {
        let request = get("/data.json", &with_token).replacen("GET", method, 1);
        begins(&exchange(&mut connect(&address), &request), "405");
    }
    for file in ["/", "/app.js", "/style.css"] {
        let answer = asked(file, &host);
        begins(&answer, "200");
        assert!(answer.contains("\r\nContent-Security-Policy: default-src 'none'; "), "{answer}");
        assert!(!answer.contains("Access-Control"), "{answer}");
    }
    ok(&ferry(&["umount", path(&fixture.mnt())]));
    dashboard.end();
}

#[test]
fn a_socket_is_for_its_owner_and_is_removed_at_the_end() {
    let fixture = TestVolume::new();
    fixture.mount();
    let socket = fixture.0.path().join("dashboard");
    let dashboard = Dashboard::start(&format!("unix:{}", path(&socket)));
    let mode = fs::metadata(&socket).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let data = || {
        let mut stream = UnixStream::connect(&socket).expect("it listens");
        stream.set_read_timeout(Some(TIME_MAX)).expect("a socket");
        body(&exchange(&mut stream, &get("/data.json", "Host: a"))).to_owned()
    };
    when_sampled(&fixture, 1, data);
    ok(&ferry(&["umount", path(&fixture.mnt())]));
    dashboard.end();
    assert!(!socket.exists());
}

#[test]
fn an_address_that_is_taken_or_public_is_an_error() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let address = taken.local_addr().expect("it is bound").to_string();
    let refusal = ferry(&["dashboard", "--listen", &address]);
    fails(&refusal, &format!("--listen {address}: cannot listen there: Address already in use"));
    let public = ferry(&["dashboard", "--listen", "0.0.0.0:9821"]);
    let said = String::from_utf8_lossy(&public.stderr).into_owned();
    assert!(public.status.code() == Some(2) && said.contains("proxy with TLS"), "{said}");
}
