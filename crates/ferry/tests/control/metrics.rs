//! The figures that a mount and a server give to Prometheus.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use ferry_env::Env;
use rustix::process::{Pid, Signal, kill_process};

use super::{FERRY, TestVolume, fails, ferry, ok, path};

/// A scrape that would wait for ever fails its test instead.
pub const TIME_MAX: Duration = Duration::from_secs(60);

/// An address of this machine that nothing has.
pub fn free_address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    listener.local_addr().expect("it is bound").to_string()
}

impl TestVolume {
    fn mount_with_metrics(&self, address: &str) {
        let options = format!("{},metrics={address}", self.log());
        ok(&ferry(&["mount", path(&self.volume()), path(&self.mnt()), "-o", &options]));
    }

    fn unmount(&self) {
        ok(&ferry(&["umount", path(&self.mnt())]));
    }
}

pub fn exchange(stream: &mut (impl Read + Write), request: &str) -> String {
    stream.write_all(request.as_bytes()).expect("it is read");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it is answered in time");
    answer
}

pub fn connect(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).expect("it listens");
    stream.set_read_timeout(Some(TIME_MAX)).expect("a socket");
    stream
}

const REQUEST: &str = "GET /metrics HTTP/1.1\r\nHost: ferry\r\nAccept: */*\r\n\r\n";

/// The samples of an answer by their names and labels. Each has a HELP and a TYPE.
fn samples(answer: &str) -> BTreeMap<String, f64> {
    let (head, body) = answer.split_once("\r\n\r\n").expect("headers and a body");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains("\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8"), "{head}");
    assert!(head.contains(&format!("\r\nContent-Length: {}", body.len())), "{head}");
    let (mut helped, mut typed) = (BTreeSet::new(), BTreeMap::new());
    let mut samples = BTreeMap::new();
    for line in body.lines() {
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        match words[..] {
            ["#", "HELP", name, text] => {
                assert!(helped.insert(name) && !text.is_empty(), "{line}");
            }
            ["#", "TYPE", name, kind] => assert_eq!(typed.insert(name, kind), None, "{line}"),
            _ => {
                let (key, value) = line.rsplit_once(' ').expect("a sample");
                let name = key.split('{').next().unwrap_or(key);
                let family = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| {
                    name.strip_suffix(suffix).filter(|family| typed.contains_key(family))
                });
                let family = family.unwrap_or(name);
                assert!(helped.contains(family), "no HELP: {line}");
                let is_total = name.ends_with("_total");
                assert_eq!(typed.get(family) == Some(&"counter"), is_total, "{line}");
                assert!(name.starts_with("ferryfs_"), "{line}");
                let value = value.parse().expect("a number");
                assert_eq!(samples.insert(key.to_owned(), value), None, "twice: {line}");
            }
        }
    }
    samples
}

fn scrape(address: &str) -> BTreeMap<String, f64> {
    samples(&exchange(&mut connect(address), REQUEST))
}

pub fn write_files(fixture: &TestVolume, from: u32, count: u32) {
    for number in from..from + count {
        let mut file = fs::File::create(fixture.mnt().join(number.to_string())).expect("it fits");
        file.write_all(b"contents").and_then(|()| file.sync_all()).expect("it fits");
    }
}

#[test]
fn a_mount_gives_its_figures_to_a_scraper() {
    let (fixture, address) = (TestVolume::new(), free_address());
    fixture.mount_with_metrics(&address);
    write_files(&fixture, 0, 2);
    let before = scrape(&address);
    write_files(&fixture, 2, 5);
    fs::create_dir_all(fixture.mnt().join("full/of")).expect("it fits");
    fs::remove_dir(fixture.mnt().join("full")).expect_err("it is not empty");
    let after = scrape(&address);
    let grew = |name: &str| {
        let of = |samples: &BTreeMap<String, f64>| samples.get(name).copied().unwrap_or(0.0);
        of(&after) - of(&before)
    };
    assert!(grew("ferryfs_operations_total{operation=\"create\"}") >= 5.0, "{after:?}");
    assert!(grew("ferryfs_operation_errors_total{operation=\"rmdir\"}") >= 1.0, "{after:?}");
    assert!(grew("ferryfs_log_forces_total") >= 5.0, "{after:?}");
    assert!(grew("ferryfs_log_written_bytes_total") > 0.0, "{after:?}");
    assert!(grew("ferryfs_log_stage_seconds_count{stage=\"flush\"}") > 0.0, "{after:?}");
    let shrunk = after.iter().filter(|(name, _)| {
        name.contains("_total") && after[*name] < before.get(*name).copied().unwrap_or(0.0)
    });
    assert_eq!(shrunk.count(), 0, "{before:?}\n{after:?}");
    let stats = ferry(&["stats", path(&fixture.mnt()), "--json"]);
    let stats: serde_json::Value = serde_json::from_slice(&stats.stdout).expect("JSON");
    assert_eq!(stats["inodes"]["used"].as_f64(), Some(after["ferryfs_inodes"]), "the same figures");
    fixture.unmount();
    for _ in 0..3 {
        assert!(TcpStream::connect(&address).is_err(), "the address is free with the unmount");
        fixture.mount_with_metrics(&address);
        assert!(scrape(&address).contains_key("ferryfs_inodes"));
        fixture.unmount();
    }
}

#[test]
fn a_unix_socket_gives_the_figures_and_is_removed_with_the_mount() {
    let fixture = TestVolume::new();
    let socket = fixture.0.path().join("metrics");
    fixture.mount_with_metrics(&format!("unix:{}", path(&socket)));
    let mut stream = UnixStream::connect(&socket).expect("it listens");
    stream.set_read_timeout(Some(TIME_MAX)).expect("a socket");
    assert!(samples(&exchange(&mut stream, REQUEST)).contains_key("ferryfs_space_free_bytes"));
    fixture.unmount();
    assert!(!socket.exists());
}

/// The slow clients take all connections there are, and more.
#[test]
fn a_slow_client_delays_no_other() {
    let (fixture, address) = (TestVolume::new(), free_address());
    fixture.mount_with_metrics(&address);
    let mut slow: Vec<TcpStream> = (0..20).map(|_| connect(&address)).collect();
    for stream in &mut slow {
        // The oldest are closed as further ones arrive.
        let _ = stream.write_all(b"G");
    }
    // Not one of them is read to its end before the others are answered.
    for _ in 0..20 {
        let (done, answered) = mpsc::channel();
        let address = address.clone();
        std::thread::spawn(move || done.send(scrape(&address)));
        let limit = Duration::from_secs(4);
        answered.recv_timeout(limit).expect("less than a slow client may take");
    }
    // Each of them ends: what it sends in the end does not matter.
    for stream in &mut slow {
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        assert!(rest.is_empty());
    }
    drop(slow);
    fixture.unmount();
}

#[test]
fn a_request_that_never_ends_is_refused() {
    let (fixture, address) = (TestVolume::new(), free_address());
    fixture.mount_with_metrics(&address);
    let mut stream = connect(&address);
    stream.write_all(b"GET /metrics HTTP/1.1\r\nA: ").expect("it is read");
    let mut sent = 0;
    while stream.write_all(&[b'a'; 512]).is_ok() {
        sent += 512;
        assert!(sent < 64 << 20, "it reads on");
    }
    assert!(scrape(&address).contains_key("ferryfs_inodes"));
    fixture.unmount();
}

#[test]
fn an_address_in_use_is_an_error_and_nothing_is_mounted() {
    let fixture = TestVolume::new();
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let address = taken.local_addr().expect("it is bound");
    let options = format!("{},metrics={address}", fixture.log());
    let mount = || ferry(&["mount", path(&fixture.volume()), path(&fixture.mnt()), "-o", &options]);
    fails(&mount(), &format!("metrics={address}: cannot listen there: Address already in use"));
    assert!(!fixture.is_mounted());
    ok(&ferry(&["fsck", path(&fixture.volume())]));
    drop(taken);
    ok(&mount());
    fixture.unmount();
}

/// A server that the test does not outlive.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_server_and_its_client_give_their_figures() {
    let (fixture, of_server, of_client) = (TestVolume::new(), free_address(), free_address());
    let volume = fixture.volume();
    let tls = volume.with_file_name("tls");
    ok(&ferry(&["cert", "init", path(&tls), "--host", "127.0.0.1", "--days", "100"]));
    ok(&ferry(&["cert", "issue", path(&tls), "laptop", "--days", "200"]));
    let listen = ["serve", path(&volume), "--listen", "127.0.0.1:0", "--grace", "0s", "--tls"];
    let server = Command::new(FERRY)
        .args(listen)
        .arg(&tls)
        .args(["--metrics", &of_server])
        .stderr(Stdio::piped())
        .spawn();
    let mut server = Server(server.expect("the command runs"));
    let mut said = BufReader::new(server.0.stderr.take().expect("it is piped"));
    let address = loop {
        let mut line = String::new();
        assert_ne!(said.read_line(&mut line).expect("readable"), 0, "it has ended");
        if let Some((_, rest)) = line.split_once("address=") {
            break rest.split_whitespace().next().expect("an address").to_owned();
        }
    };
    // Its log must go on somewhere.
    std::thread::spawn(move || std::io::copy(&mut said, &mut std::io::sink()));
    let client_tls = tls.join("laptop");
    let options = format!("tls={},{},metrics={of_client}", path(&client_tls), fixture.log());
    let source = format!("ferry://{address}/");
    ok(&ferry(&["mount", &source, path(&fixture.mnt()), "-o", &options]));
    write_files(&fixture, 0, 3);
    let (served, mounted) = (scrape(&of_server), scrape(&of_client));
    assert_eq!(served["ferryfs_server_sessions"], 1.0);
    assert!(served["ferryfs_server_leases"] > 0.0, "{served:?}");
    assert!(served["ferryfs_log_transactions_total"] >= 3.0, "{served:?}");
    assert_eq!(served["ferryfs_server_refused_clients_total{cause=\"version\"}"], 0.0);
    assert_eq!(mounted["ferryfs_client_connected"], 1.0);
    assert!(mounted["ferryfs_operations_total{operation=\"create\"}"] >= 3.0, "{mounted:?}");
    let now = Env::real().clock.wall().as_secs_f64();
    let days = |figures: &BTreeMap<String, f64>, of: &str| {
        let end = figures[&format!("ferryfs_{of}_certificate_end_timestamp_seconds")];
        ((end - now) / 86400.0).round()
    };
    assert_eq!((days(&served, "server"), days(&mounted, "client")), (100.0, 200.0));
    // The mount answers without its server.
    let process = Pid::from_child(&server.0);
    kill_process(process, Signal::STOP).expect("it is ours");
    assert!(scrape(&of_client).contains_key("ferryfs_client_cached_inodes"));
    kill_process(process, Signal::CONT).expect("it is ours");
    fixture.unmount();
}
