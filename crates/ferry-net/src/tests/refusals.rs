//! A refused client is told why, and the administrator sees it.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use ferry_env::Clock;

use super::boundaries::Raw;
use super::certificates::Listening;
use super::claims::until;
use super::*;
use crate::limits::Peer;
use crate::message::*;
use crate::{Address, ClientTls, ServerTls, TcpConnector, Terms, authority, ends_soon};

/// A clock that is ahead.
struct Ahead(Duration);

impl Clock for Ahead {
    fn monotonic(&self) -> Duration {
        Env::real().clock.monotonic()
    }
    fn wall(&self) -> Duration {
        Env::real().clock.wall() + self.0
    }
}

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

fn connect(world: &World, port: u16, tls: Option<ClientTls>) -> String {
    let address = Address::of_host("localhost", Some(port), "/");
    let options = ClientOptions { timeout: Duration::from_secs(5), ..world.client_options("/") };
    let connected =
        RemoteFs::connect(Arc::new(TcpConnector::new(address, tls)), options, &Env::real());
    connected.map_or_else(|error| error.to_string(), |_| "is in".into())
}

fn refused(world: &World, cause: &str) -> u64 {
    world.server().control().refused()[cause].as_u64().unwrap()
}

/// The server counts so many refusals, the last one perhaps behind its answer.
fn was_refused(world: &World, cause: &str, count: u64) {
    until(cause, || refused(world, cause) >= count);
    assert_eq!(refused(world, cause), count, "{cause}");
}

#[test]
fn an_expired_certificate_is_refused_and_the_client_is_told() {
    let env = Env { clock: Arc::new(Ahead(40 * DAY)), ..Env::real() };
    let listening = Listening::of(World::serving(750, server_options(), env));
    let at = listening.dir.path();
    for (name, days) in [("short", 30), ("long", 60)] {
        authority::issue(at, name, &Terms::default(), days).unwrap();
    }
    let said = listening.connect("short").map(drop).unwrap_err().to_string();
    assert!(said.contains("certificate (short) has expired on 2"), "{said}");
    assert!(listening.connect("long").is_ok());
    was_refused(&listening.world, "certificate_expired", 1);
    // Each side checks its own certificate before it begins.
    authority::issue(at, "over", &Terms::default(), 0).unwrap();
    let wall = Env::real().clock.wall();
    while Env::real().clock.wall().as_secs() <= wall.as_secs() + 1 {
        std::thread::yield_now();
    }
    let said = ClientTls::load(&at.join("over")).map(drop).unwrap_err().to_string();
    assert!(said.contains("has expired on") && said.contains("ferry cert issue"), "{said}");
    let ending = |name: &str| {
        let until = ClientTls::load(&at.join(name)).unwrap().until().unwrap();
        ends_soon(until, wall + DAY)
    };
    assert!(ending("short").unwrap().contains("expires on"));
    assert_eq!(ending("long"), None);
}

#[test]
fn a_certificate_of_another_authority_is_refused_with_that_reason() {
    let listening = Listening::new(751);
    let stranger = tempfile::tempdir().unwrap();
    authority::init(stranger.path(), &["localhost".into()], authority::DAYS).unwrap();
    let theirs =
        authority::issue(stranger.path(), "laptop", &Terms::default(), authority::DAYS).unwrap();
    // It trusts this server nevertheless.
    fs::copy(listening.dir.path().join("ca.pem"), theirs.join("ca.pem")).unwrap();
    for _ in 0..20 {
        let said =
            connect(&listening.world, listening.port, Some(ClientTls::load(&theirs).unwrap()));
        assert!(said.contains("of another authority"), "{said}");
    }
    was_refused(&listening.world, "certificate_unknown", 20);
}

#[test]
fn a_mismatch_of_tls_is_reported_on_both_sides() {
    let listening = Listening::new(752);
    let (world, at) = (&listening.world, listening.dir.path());
    let laptop = authority::issue(at, "laptop", &Terms::default(), authority::DAYS).unwrap();
    for _ in 0..20 {
        let said = connect(world, listening.port, None);
        assert!(said.contains("the server speaks TLS: mount with -o tls=DIR"), "{said}");
    }
    was_refused(world, "without_tls", 20);
    let plain = on_loopback(&world.server(), None).port();
    for _ in 0..20 {
        let said = connect(world, plain, Some(ClientTls::load(&laptop).unwrap()));
        assert!(said.contains("does not speak TLS: mount with -o insecure"), "{said}");
    }
    was_refused(world, "with_tls", 20);
    assert_eq!(connect(world, plain, None), "is in");
}

#[test]
fn a_client_of_another_version_is_told_so() {
    let world = World::new(753);
    let told = |bytes: &[u8]| {
        let mut raw = Raw::connected(&world, Peer::default());
        raw.send_bytes(bytes);
        let Some(ToClient::Refused { reason }) = raw.hear() else { panic!("not refused") };
        String::from_utf8(reason).unwrap()
    };
    let mut hello = crate::frame::encode(&super::boundaries::hello(b"/"));
    assert_eq!(hello[4..9], [&[1][..], &VERSION.to_le_bytes()].concat());
    let older = "install the server's FerryFS on the client's machine";
    let newer = "install the client's FerryFS on the server's machine";
    for (version, update) in [(7, older), (VERSION - 1, older), (VERSION + 1, newer), (77, newer)] {
        hello[5..9].copy_from_slice(&version.to_le_bytes());
        let said = told(&hello);
        assert!(said.contains(&format!("speaks version {version} of the protocol")), "{said}");
        assert!(said.contains("the server 8 and 10: ") && said.contains(update), "{said}");
    }
    let greeting_of_later =
        [9_u32.to_le_bytes().as_slice(), &[1], &78_u32.to_le_bytes(), &[7; 4]].concat();
    assert!(told(&greeting_of_later).contains("speaks version 78 of the protocol"));
    assert_eq!((refused(&world, "version"), refused(&world, "no_greeting")), (5, 0));
}

#[test]
fn the_address_of_a_client_is_reported() {
    let listening = Listening::new(754);
    authority::issue(listening.dir.path(), "laptop", &Terms::default(), authority::DAYS).unwrap();
    let _client = listening.connect("laptop").unwrap();
    let clients = listening.world.server().control().clients();
    let address = clients[0]["address"].as_str().unwrap_or_default();
    assert!(address.starts_with("127.0.0.1:") || address.starts_with("[::1]:"), "{clients}");
    assert_eq!(clients[0]["certificate"], "laptop");
}

#[test]
fn a_private_key_that_others_can_read_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    authority::init(at, &["localhost".into()], authority::DAYS).unwrap();
    let laptop = authority::issue(at, "laptop", &Terms::default(), authority::DAYS).unwrap();
    let allow = |path: &std::path::Path, mode| {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap()
    };
    for mode in [0o640, 0o604, 0o620, 0o666] {
        for (key, is_server) in [(at.join("server.key"), true), (laptop.join("client.key"), false)]
        {
            allow(&key, mode);
            let loaded = if is_server {
                ServerTls::load(at).map(drop)
            } else {
                ClientTls::load(&laptop).map(drop)
            };
            let said = loaded.unwrap_err().to_string();
            assert!(said.contains(&format!("chmod 600 {}", key.display())), "{said}");
            allow(&key, 0o600);
        }
    }
    let key = at.join("authority/ca.key");
    allow(&key, 0o644);
    let said =
        authority::issue(at, "other", &Terms::default(), authority::DAYS).unwrap_err().to_string();
    assert!(said.contains("chmod 600"), "{said}");
    allow(&key, 0o400);
    assert!(authority::issue(at, "another", &Terms::default(), authority::DAYS).is_ok());
    assert!(ServerTls::load(at).is_ok() && ClientTls::load(&laptop).is_ok());
}

#[test]
fn a_server_runs_without_the_key_of_its_authority() {
    let dir = tempfile::tempdir().unwrap();
    let (at, away) = (dir.path().join("tls"), dir.path().join("safe"));
    let days = authority::DAYS;
    authority::init(&at, &["localhost".into()], days).unwrap();
    assert!(!at.join("ca.key").exists());
    assert_eq!(fs::metadata(at.join("authority")).unwrap().permissions().mode() & 0o777, 0o700);
    assert!(
        authority::issue(&at, "authority", &Terms::default(), days).is_err(),
        "that is no client"
    );
    authority::issue(&at, "laptop", &Terms::default(), days).unwrap();
    // The administrator takes the key away.
    fs::rename(at.join("authority"), &away).unwrap();
    assert!(ServerTls::load(&at).is_ok());
    for failed in [
        authority::issue(&at, "desktop", &Terms::default(), days).map(drop),
        authority::init(&at, &["localhost".into()], days),
    ] {
        let said = failed.unwrap_err().to_string();
        assert!(said.contains("the authority's key is not here"), "{said}");
    }
    assert!(
        !at.join("authority").exists() && !at.join("desktop").exists(),
        "and no second one is made"
    );
    let desktop = authority::issue(&away, "desktop", &Terms::default(), days).unwrap();
    assert!(ClientTls::load(&desktop).is_ok());
    assert_eq!(authority::revoke(&at, "laptop").unwrap(), 1, "which needs no key");
    // An authority of an older version has all files in one directory.
    let old = dir.path().join("old");
    fs::create_dir(&old).unwrap();
    for name in ["ca.key", "ca.pem"] {
        fs::copy(away.join(name), old.join(name)).unwrap();
    }
    authority::init(&old, &["localhost".into()], days).unwrap();
    authority::issue(&old, "laptop", &Terms::default(), days).unwrap();
    assert!(ServerTls::load(&old).is_ok() && !old.join("authority").exists());
}
