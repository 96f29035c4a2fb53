//! Many clients with many leases: what they cost the server, and how long it takes to have all of
//! them back. `scripts/long` runs it. The figures: `cargo test --release -p ferry-net --lib many --
//! --ignored --nocapture --test-threads 1`.

use std::pin::Pin;
use std::time::Instant;

use tokio::io::{ReadHalf, WriteHalf, split};
use tokio::task::JoinHandle;

use super::*;
use crate::codec::List;
use crate::frame;
use crate::lanes;
use crate::message::*;

const SESSIONS: usize = 200;
const LEASES: usize = 10_000;
/// Seconds: the bar for having them all back.
const RECALL_TIME_MAX: f64 = 5.0;

/// Bytes of memory that this process has in use.
fn memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() << 10
}

/// A client that keeps nothing but its word: it gives back what it is asked for.
struct Idle {
    out: lanes::Line<()>,
    heard: JoinHandle<()>,
    /// Read leases that it was told of, leases that it gave back, and write leases.
    counts: Arc<[AtomicU64; 3]>,
    /// Inodes that it was told of.
    found: Arc<Mutex<Vec<Ino>>>,
}

fn say(out: &lanes::Line<()>, message: &ToServer) {
    out.send(frame::encode(message), ());
}

impl Idle {
    fn new(server: &Server, name: usize) -> Self {
        let (ours, theirs) = duplex(16 << 10);
        server.serve_stream(Box::new(theirs));
        let (reader, writer): (ReadHalf<DuplexStream>, WriteHalf<DuplexStream>) = split(ours);
        let (out, outgoing) = lanes::line();
        tokio::spawn(async {
            lanes::write_all(writer, outgoing, &lanes::AsTaken::default()).await
        });
        let name = format!("client {name}").into_bytes();
        say(
            &out,
            &ToServer::Hello { version: VERSION, session: 0, path: b"/".to_vec(), name, newest: 0 },
        );
        let (counts, found) = (Arc::<[AtomicU64; 3]>::default(), Arc::<Mutex<Vec<Ino>>>::default());
        let heard = tokio::spawn(hear(reader, out.clone(), (counts.clone(), found.clone())));
        Self { out, heard, counts, found }
    }

    fn ask_to_decide(&self, inos: &[Ino]) {
        let op = Op::Lease { inodes: List(inos.to_vec()) };
        say(&self.out, &ToServer::Request { id: inos[0], after: 0, caller: Caller::default(), op });
    }

    fn look_up(&self, names: std::ops::Range<usize>, dir: Ino) {
        for n in names {
            let op = Op::Lookup { parent: dir, name: n.to_string().into_bytes() };
            say(
                &self.out,
                &ToServer::Request { id: n as u64, after: 0, caller: Caller::default(), op },
            );
        }
    }

    fn count(&self, which: usize) -> usize {
        self.counts[which].load(Ordering::Relaxed) as usize
    }
}

async fn hear(
    mut reader: ReadHalf<DuplexStream>,
    out: lanes::Line<()>,
    (counts, found): (Arc<[AtomicU64; 3]>, Arc<Mutex<Vec<Ino>>>),
) {
    while let Ok(Some(message)) = read::<ToClient>(&mut reader).await {
        match message {
            ToClient::Reply { leased, outcome: Outcome::Entry { known: Some(known) }, .. } => {
                found.lock().push(known.attr.ino);
                let told = u64::from(leased & LEASED_FOUND != 0);
                counts[0].fetch_add(told, Ordering::Relaxed);
            }
            ToClient::Reply { outcome: Outcome::Leases { held }, .. } => {
                counts[2].fetch_add(held.0.len() as u64, Ordering::Relaxed);
            }
            ToClient::Reply { outcome, .. } => panic!("{outcome:?}"),
            ToClient::Recall { inodes } => {
                counts[1].fetch_add(inodes.0.len() as u64, Ordering::Relaxed);
                say(&out, &ToServer::Returned { inodes: List(inodes.0), after: 0 });
            }
            ToClient::Goodbye {} => return,
            _ => {}
        }
    }
}

/// Stops the server, which asks for all leases: seconds until it knows that nobody has any, and
/// until it has stopped.
fn stopped(world: &World) -> (f64, f64) {
    let control = world.server().control();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let recalled = scope.spawn(|| {
            while sum_of(&control, "leases") > 0 {
                std::thread::sleep(Duration::from_millis(5));
            }
            begun.elapsed()
        });
        world.stop();
        (recalled.join().unwrap().as_secs_f64(), begun.elapsed().as_secs_f64())
    })
}

async fn until(what: impl Fn() -> bool) {
    while !what() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Answers to all look-ups, with not more under way than the window takes.
async fn ask_for_leases(idle: &[Idle], dir: Ino) {
    const STEP: usize = 250;
    for from in (0..LEASES).step_by(STEP) {
        idle.iter().for_each(|client| client.look_up(from..from + STEP, dir));
        until(|| idle.iter().all(|client| client.count(0) == from + STEP)).await;
    }
}

/// Keeps the terms going.
async fn ping(idle: &[Idle]) {
    loop {
        idle.iter().for_each(|client| say(&client.out, &ToServer::Ping { number: 1 }));
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

#[test]
#[ignore = "takes a minute; scripts/long runs it"]
fn two_hundred_sessions_with_ten_thousand_leases_each() {
    let world = World::new(90);
    let dir = {
        let me = InProcess::default();
        let dir = me.call(|cx| world.fs.mkdir(cx, ROOT, b"d", 0o755)).unwrap().attr.unwrap().ino;
        for n in 0..LEASES {
            let name = n.to_string();
            me.call(|cx| world.fs.mknod(cx, dir, name.as_bytes(), libc::S_IFREG | 0o644, 0))
                .unwrap();
        }
        dir
    };
    let server = world.server();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let _inside = runtime.enter();
    let before = memory();
    let idle: Vec<Idle> = (0..SESSIONS).map(|name| Idle::new(&server, name)).collect();
    // What is not named before cannot be used: the directory itself.
    let known = |client: &Idle| {
        let op = Op::Lookup { parent: ROOT, name: b"d".to_vec() };
        say(
            &client.out,
            &ToServer::Request { id: u64::MAX, after: 0, caller: Caller::default(), op },
        );
    };
    idle.iter().for_each(known);
    runtime.block_on(until(|| idle.iter().all(|client| client.count(0) == 1)));
    idle.iter().for_each(|client| client.counts[0].store(0, Ordering::Relaxed));
    let connected = memory();
    let begun = Instant::now();
    runtime.block_on(async {
        tokio::select! {
            () = ask_for_leases(&idle, dir) => {}
            () = ping(&idle) => {}
        }
    });
    let granted = begun.elapsed();
    let full = memory();
    let held = world.figure("leases");
    assert!(held as usize >= SESSIONS * LEASES, "{held}");

    // One inode that all of them know, changed by another client.
    let other = world.client();
    let begun = Instant::now();
    let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    let ino = other.ino(ROOT, "d");
    other.me.call(|cx| other.fs.setattr(cx, ino, None, &set)).unwrap();
    let one = begun.elapsed();
    // All of them: the server stops.
    // The server would wait for a client that leaves without a goodbye.
    other.fs.close();
    runtime.block_on(until(|| {
        world.server().control().clients().as_array().unwrap().len() == SESSIONS
    }));
    drop(server);
    let (recalled, stopped) = stopped(&world);
    let per = |bytes: u64, of: usize| bytes / of as u64;
    println!(
        "{SESSIONS} sessions, {held} leases: {} bytes a session (its buffers too), {} bytes a lease; granted in {:.1} s; \
         an inode of all changed after {:.0} ms; all given back after {recalled:.2} s, stopped after {stopped:.2} s",
        per(connected - before, SESSIONS),
        per(full - connected, held as usize),
        granted.as_secs_f64(),
        one.as_secs_f64() * 1e3,
    );
    assert!(recalled < RECALL_TIME_MAX, "{recalled} s");
    for client in idle {
        runtime.block_on(client.heard).unwrap();
    }
}

/// Each has files of its own, so that all may have the write leases.
#[test]
#[ignore = "takes a minute and 8 GiB of memory; scripts/long runs it"]
fn two_hundred_sessions_with_ten_thousand_write_leases_each() {
    let world = World::on(Arc::new(MemDevice::new(8 << 30)), 91, server_options());
    let me = InProcess::default();
    for session in 0..SESSIONS {
        let name = format!("d{session}");
        let dir = me
            .call(|cx| world.fs.mkdir(cx, ROOT, name.as_bytes(), 0o755))
            .unwrap()
            .attr
            .unwrap()
            .ino;
        for n in 0..LEASES {
            let name = n.to_string();
            let made =
                me.call(|cx| world.fs.mknod(cx, dir, name.as_bytes(), libc::S_IFREG | 0o644, 0));
            world.fs.forget(made.unwrap().attr.unwrap().ino, 1);
        }
    }
    let server = world.server();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let _inside = runtime.enter();
    let idle: Vec<Idle> = (0..SESSIONS).map(|name| Idle::new(&server, name)).collect();
    for (session, client) in idle.iter().enumerate() {
        let op = Op::Lookup { parent: ROOT, name: format!("d{session}").into_bytes() };
        say(
            &client.out,
            &ToServer::Request { id: u64::MAX, after: 0, caller: Caller::default(), op },
        );
    }
    let pinged = async |work: Pin<Box<dyn Future<Output = ()> + '_>>| {
        tokio::select! {
            () = work => {}
            () = ping(&idle) => {}
        }
    };
    let found = |count| move |client: &Idle| client.found.lock().len() == count;
    runtime.block_on(until(|| idle.iter().all(found(1))));
    let begun = Instant::now();
    runtime.block_on(pinged(Box::pin(async {
        const STEP: usize = 250;
        for from in (0..LEASES).step_by(STEP) {
            for client in &idle {
                let dir = client.found.lock()[0];
                client.look_up(from..from + STEP, dir);
            }
            until(|| idle.iter().all(found(1 + from + STEP))).await;
            for client in &idle {
                client.ask_to_decide(&client.found.lock()[1 + from..]);
            }
            until(|| idle.iter().all(|client| client.count(2) == from + STEP)).await;
        }
    })));
    let granted = begun.elapsed();
    let held = world.figure("write_leases");
    assert!(held as usize >= SESSIONS * LEASES, "{held}");
    let memory = memory();
    drop(server);
    let (recalled, stopped) = stopped(&world);
    println!(
        "{SESSIONS} sessions, {held} write leases granted in {:.1} s, {} MiB with the volume; \
         all given back after {recalled:.2} s, stopped after {stopped:.2} s",
        granted.as_secs_f64(),
        memory >> 20,
    );
    assert!(recalled < RECALL_TIME_MAX, "{recalled} s");
    for client in idle {
        runtime.block_on(client.heard).unwrap();
    }
}
