//! One server of several (`ferry serve --standby`).

use std::process::{Child, Stdio};

use super::*;

/// A server, which no test outlives.
struct Server(Child);

impl Server {
    fn start(store: &Store) -> Self {
        let log = fs::File::create(store.at("server.log")).expect("a file");
        let mut serve = Command::new(FERRY);
        serve.args(["serve", &store.url(), "--standby", "--insecure", "--listen", "127.0.0.1:0"]);
        let server = Self(serve.stdin(Stdio::null()).stderr(log).spawn().expect("it starts"));
        wait_until(|| store.log("server").contains(" serving "));
        server
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).expect("it is ours");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It has ended if the test went well.
        let _ended = self.0.kill();
        self.0.wait().expect("it is a child of this process");
    }
}

fn wait_until(mut happens: impl FnMut() -> bool) {
    let tries = (0..1200).find(|_| {
        std::thread::park_timeout(Duration::from_millis(50));
        happens()
    });
    tries.expect("within a minute");
}

/// Who asks for its end does not want it to wait for the volume, and to take it later.
#[test]
fn a_server_that_has_lost_its_volume_ends_when_it_is_asked_to() {
    let store = Store::made();
    let mut server = Server::start(&store);
    server.signal(Signal::STOP);
    ok(&store.try_mount("second", &["--take-over"]));
    server.signal(Signal::TERM);
    server.signal(Signal::CONT);
    wait_until(|| server.0.try_wait().expect("it is a child of this process").is_some());
    let log = store.log("server");
    assert_eq!(log.matches(" stands by ").count(), 1, "{log}");
    ok(&store.ferry(&["umount", "second"]));
    ok(&store.ferry(&["fsck", &store.url()]));
}
